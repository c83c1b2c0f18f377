"""Drives TensorRT-LLM's V2 cache like its engine: prompts are stored chunk by chunk, output is not stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import PromptPlan, checked_manager
from pytest_kvmock.engines.trtllm.iteration_driver import IterationDriver
from pytest_kvmock.engines.trtllm.v2_manager import V2Manager

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.trtllm.v2_request import V2Request

# Theory of operation
#
# A prompt's last chunk computes its last token and returns the first output token, which the next step computes. So all
# tokens of a running request have room, except the last output token.
#
# A preempted request is closed, and comes back as a prompt of all its tokens, so its output is then stored. (V2's own
# scheduler suspends requests, `suspend`; a worker has no room for suspended requests, which hold pages.)
#
# Each operation of a worker is an iteration, and publishes its events at its end; so is each pass of a scheduler.


class TrtllmV2Driver(IterationDriver[V2Manager]):
    """Drives a `V2Manager`.

    Raises:
        ValueError: the manager is of another class.
    """

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        mine: V2Manager = checked_manager(manager, V2Manager, "TrtllmV2Driver")
        windows = [None if group == mine.attention_group else window for group, window in enumerate(mine.windows)]
        self._computed: list[tuple[V2Request, int]] = []
        super().__init__(mine, windows, prefix_caching=prefix_caching, rng=rng)
        if len(windows) > 1:
            self.traits = replace(self.traits, promises_more=True)

    def need(self, request: V2Request, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the pages that it needs and no request has, the maximum over pools.

        More than are free if it may not be resumed.
        """
        length = max(request.capacity, upto + max(len(tokens) - 1, 0))
        return self.manager.pages_needed(request, length)

    def plan(self, request: V2Request, upto: int) -> PromptPlan:
        """Return `need`, `room` and `lookup`."""
        return PromptPlan(self.need(request, upto), self.room(), self.lookup(request))

    def admit(self, request: V2Request, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - V2 takes as it looks
        """Allocate pages for its first `upto` tokens, and store them."""
        if self.allocate(request, upto) < upto:
            raise AssertionError("it fits, as was checked before")
        self._operation_over()

    def _length(self, request: V2Request) -> int:
        return request.capacity

    def _step(self, request: V2Request) -> bool:
        if not self.manager.try_allocate_generation(request):
            return False
        self.manager.update_generation(request, request.capacity)
        return True

    def free(self, request: V2Request, *, done: bool) -> None:
        """Free its pages; a preempted request comes back as a prompt of all its tokens."""
        if request in self.manager.requests:
            self._store(request)
            self.manager.close(request)
            if not done:
                request.num_prompt_tokens = len(request)
            self._operation_over()

    def _store(self, only: V2Request | None = None) -> None:
        """Store the computed parts of one prompt, or of all."""
        computed, self._computed = self._computed, []
        for request, upto in computed:
            if only is not None and request is not only:
                self._computed.append((request, upto))
            elif request in self.manager.requests:
                self.manager.update_context(request, upto)

    # ------------------------------------------------------------------------------------------- a scheduler's

    def need_whole(self, request: V2Request) -> int:
        """Count the pages of all tokens of a request without pages, without its hits that others hold."""
        return self.need(request, len(request))

    def allocate(self, request: V2Request, upto: int) -> int:
        """Allocate pages for the first `upto` tokens, and count them as computed; all of them, or nothing changes."""
        manager = self.manager
        if request in manager.requests and upto > request.num_prompt_tokens:
            return upto if upto <= request.capacity or self._step(request) else request.capacity
        if manager.pages_needed(request, max(upto, request.capacity)) > manager.num_free_blocks:
            return request.capacity
        if request not in manager.requests:
            manager.prepare_context(request)
        if not manager.resize_context(request, upto, first_chunk=False):
            return request.capacity
        self._computed.append((request, upto))
        return upto

    def place(self, request: V2Request, upto: int) -> bool:
        """Allocate pages for the first `upto` tokens of a prompt; return False if there is no room.

        A first chunk without room frees all its pages (the newest V2).
        """
        manager = self.manager
        is_first = request not in manager.requests
        runs = manager.prepare_context(request)[1] if is_first else request.is_active or manager.resume(request)
        if runs and manager.resize_context(request, upto, first_chunk=is_first):
            self._computed.append((request, upto))
            return True
        if is_first:
            manager.close(request)
        return False

    def is_suspended(self, request: V2Request) -> bool:
        """Return whether a request is suspended: it holds pages and does not run."""
        return request in self.manager.requests and not request.is_active

    def suspend(self, request: V2Request) -> bool:
        """Suspend a running request; return False without a level below, where its pages would free no room."""
        if not request.is_active or not self.manager.pools.last:
            return False
        self.manager.suspend(request)
        return True

    def step_inside(self, request: V2Request, upto: int) -> bool:
        """Count a token as computed; return False if this needs a page."""
        if upto != request.capacity + 1 or not request.capacity % self.manager.block_size:
            return False
        return self._step(request)
