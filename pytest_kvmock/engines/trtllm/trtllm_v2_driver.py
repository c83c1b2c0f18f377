"""Drives TensorRT-LLM's V2 cache as its engine does: chunk by chunk, a prompt stored as it is computed, output
never.
"""

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
# A prompt's last chunk computes its last token and gives the first one of output, which the next step computes. So of a
# request that runs, all tokens but the last one of output have room.
#
# A preempted request is closed, and comes back as a prompt of all its tokens: what it had generated is a prompt then,
# and is stored. (V2's own scheduler suspends requests, `suspend`; a worker has no room for what is suspended and held.)
#
# A worker's operation is an iteration of its own, at whose end its events come out; a scheduler's pass is one.


class TrtllmV2Driver(IterationDriver[V2Manager]):
    """Drives a `V2Manager`.

    Raises:
        ValueError: the manager is another.
    """

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        mine: V2Manager = checked_manager(manager, V2Manager, "TrtllmV2Driver")
        windows = [None if group == mine.attention_group else window for group, window in enumerate(mine.windows)]
        self._computed: list[tuple[V2Request, int]] = []
        super().__init__(mine, windows, prefix_caching=prefix_caching, rng=rng)
        if len(windows) > 1:
            self.traits = replace(self.traits, promises_more=True)

    def need(self, request: V2Request, upto: int, tokens: Sequence[int] = ()) -> int:
        """Pages that it needs and that no request has, in the pool that lacks most; more than there are if it may not
        be resumed.
        """
        length = max(request.capacity, upto + max(len(tokens) - 1, 0))
        return self.manager.pages_needed(request, length)

    def plan(self, request: V2Request, upto: int) -> PromptPlan:
        """As `need`, `room` and `lookup`."""
        return PromptPlan(self.need(request, upto), self.room(), self.lookup(request))

    def admit(self, request: V2Request, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - V2 takes as it looks
        """Give it pages for its first tokens, and store them."""
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
        """Let its pages go; a preempted request comes back as a prompt of all its tokens."""
        if request in self.manager.requests:
            self._store(request)
            self.manager.close(request)
            if not done:
                request.num_prompt_tokens = len(request)
            self._operation_over()

    def _store(self, only: V2Request | None = None) -> None:
        """Store what was computed of prompts, of one or of all."""
        computed, self._computed = self._computed, []
        for request, upto in computed:
            if only is not None and request is not only:
                self._computed.append((request, upto))
            elif request in self.manager.requests:
                self.manager.update_context(request, upto)

    # ------------------------------------------------------------------------------------------- a scheduler's

    def need_whole(self, request: V2Request) -> int:
        """Pages of all tokens of a request without any, less those that others have which it hits."""
        return self.need(request, len(request))

    def allocate(self, request: V2Request, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or nothing changes."""
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
        """Allocate for the first tokens of a prompt; a first chunk without room lets all go again (the newest V2)."""
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
        """Whether it holds pages and does not run."""
        return request in self.manager.requests and not request.is_active

    def suspend(self, request: V2Request) -> bool:
        """Suspend a request that runs; without a level below its pages would free nothing."""
        if not request.is_active or not self.manager.pools.last:
            return False
        self.manager.suspend(request)
        return True

    def step_inside(self, request: V2Request, upto: int) -> bool:
        """Count a token as computed, if that takes no page."""
        if upto != request.capacity + 1 or not request.capacity % self.manager.block_size:
            return False
        return self._step(request)
