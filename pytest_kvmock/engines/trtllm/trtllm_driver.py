"""Drives TensorRT-LLM's V1 cache like its engine: blocks for a whole prompt, stored after prefill and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import Powers, PromptPlan, checked_manager
from pytest_kvmock.engines.trtllm.iteration_driver import IterationDriver
from pytest_kvmock.engines.trtllm.v1_manager import V1Manager

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.trtllm.v1_request import V1Request

# Theory of operation
#
# A prompt's step computes all its tokens and returns the first output token, which is in no block until the next step
# computes it. So a request has room for `length` computed tokens, and has at most one more token.
#
# Each operation of a worker is an iteration, and publishes its events at its end. A pass of a scheduler is also an
# iteration: prompts are stored after all its computation, so requests of one pass share no new blocks.


class TrtllmDriver(IterationDriver[V1Manager]):
    """Drives a `V1Manager`.

    Raises:
        ValueError: the manager is of another class.
    """

    traits = replace(IterationDriver.traits, stores_when="finish", chunks=False)

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        mine: V1Manager = checked_manager(manager, V1Manager, "TrtllmDriver")
        windows = [*(each.window for each in mine.windows[:-1]), None]
        self._computed: list[V1Request] = []
        super().__init__(mine, windows, prefix_caching=prefix_caching, rng=rng)

    @property
    def powers(self) -> Powers:
        """Capabilities that not every driver has."""
        return replace(super().powers, scarce=self.scarce)

    def need(self, request: V1Request, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the blocks of all its tokens and of these steps, except blocks it has, and hits that others hold."""
        manager, size = self.manager, self.manager.block_size
        first = 0 if request in manager.requests else manager.blocks_needed(request)
        held = request.length or len(request)
        length = max(held, upto + max(len(tokens) - 1, 0) if tokens else upto)
        return first + -(-length // size) - -(-held // size)

    def plan(self, request: V1Request, upto: int) -> PromptPlan:  # noqa: ARG002 - it gets blocks for all its tokens
        """Return `need`, `room` and `lookup`, from one look-up in each window."""
        found = self.manager.look(request)
        return PromptPlan(found.needed, self.room(), found.tokens, found)

    def scarce(self) -> str:
        """Return a text on the window with the fewest free blocks; "" if there is only one window."""
        windows = self.manager.windows
        if len(windows) == 1:
            return ""
        fewest = min(windows, key=lambda each: each.queues.free[0])
        return f" of the {fewest.blocks[0]} of the window of {fewest.window} tokens"

    def admit(self, request: V1Request, upto: int, plan: PromptPlan | None = None) -> None:
        """Allocate blocks for all its tokens; store its full blocks when the last token is computed."""
        if request not in self.manager.requests:
            self.manager.add(request, None if plan is None else plan.found)
        if upto >= len(request):
            self._computed.append(request)
        self._operation_over()

    def _length(self, request: V1Request) -> int:
        return request.length

    def _step(self, request: V1Request) -> bool:
        self.manager.add_token(request)
        return True

    def free(self, request: V1Request, *, done: bool) -> None:  # noqa: ARG002 - a paused request is stored, too
        """Store its computed tokens, with a partial last block, and free its blocks."""
        if request in self.manager.requests:
            self._store()
            self.manager.remove(request, tokens=request.length)
            self._operation_over()

    def _store(self) -> None:
        """Store the prompts whose last tokens were computed."""
        computed, self._computed = self._computed, []
        for request in computed:
            self.manager.store_context_blocks(request, request.length)

    # ------------------------------------------------------------------------------------------- a scheduler's

    def free_blocks(self, without: Sequence[V1Request] = ()) -> list[int]:
        """Count the level 0 blocks of each window that no request uses, after these requests free theirs."""
        return self.manager.free_without(without)

    def blocks_to_completion(self, request: V1Request, tokens: int) -> list[int]:
        """Count the blocks of each window that a request still needs until it has `tokens` tokens."""
        return self.manager.blocks_to_completion(request, tokens)

    def blocks_of_step(self, request: V1Request) -> list[int]:
        """Count the blocks of a request's next step, for each window.

        A request without blocks needs the blocks of all its tokens, a prompt in progress none, and any other request
        those of one more token.
        """
        manager = self.manager
        if request not in manager.requests:
            return manager.blocks_to_completion(request, len(request))
        count = int(request.length < len(request) and manager.takes_block(request))
        return [count for _ in manager.windows]

    def need_whole(self, request: V1Request) -> int:
        """Count the blocks of all tokens of a request without blocks, without its hits that others hold."""
        return self.manager.blocks_needed(request)

    def allocate(self, request: V1Request, upto: int) -> int:
        """Allocate blocks for the first `upto` tokens, and count them as computed; all of them, or nothing changes."""
        manager = self.manager
        if request not in manager.requests:
            found = manager.look(request)
            if found.needed > manager.num_free_blocks:
                return 0
            manager.add(request, found)
        elif upto > request.length:
            if manager.takes_block(request) and not manager.num_free_blocks:
                return request.length
            manager.add_token(request)
            return upto
        if upto == request.length:
            self._computed.append(request)
        return upto

    def step_inside(self, request: V1Request, upto: int) -> bool:
        """Count a token as computed; return False if this needs a block."""
        if upto != request.length + 1 or self.manager.takes_block(request):
            return False
        return self._step(request)
