"""The common base of the drivers of TensorRT-LLM's cache managers: iterations, and the groups of a manager."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_kvmock.engines.base.cache_group import CacheGroup
from pytest_kvmock.engines.base.driver import Powers, Traits
from pytest_kvmock.engines.trtllm.v1_manager import V1Manager
from pytest_kvmock.engines.trtllm.v2_manager import V2Manager

if TYPE_CHECKING:
    from pytest_kvmock.values.tokens import Prompt

ManagerT = TypeVar("ManagerT", V1Manager, V2Manager)


class IterationDriver(Generic[ManagerT]):
    """Turns requests into calls of TensorRT-LLM's engine.

    An iteration ends with each operation of a worker, or each pass of a scheduler.

    Args:
        manager: the cache.
        windows: the window of each of its groups, in tokens; None for full attention.
        prefix_caching: whether its requests reuse cached blocks and leave blocks in the cache.
        rng: source of the names of partial blocks.
    """

    traits = Traits(
        recomputes_last_token=True,
        stores_when="never",
        removed_first=True,
        cleared_first=True,
        takes_hashes=False,
        partial_blocks=True,
    )
    manager: ManagerT
    prompt_keys = ("lora_name", "cache_salt", "session_id")
    admits_whole = True

    def __init__(self, manager: ManagerT, windows: Sequence[int | None], *, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._rng = rng
        self._in_pass = False
        if not prefix_caching:
            manager.turn_caching_off()
        if len(windows) > 1:
            size = manager.block_size
            groups = (
                CacheGroup("full_attention", size)
                if window is None
                else CacheGroup("sliding_window", size, window=window)
                for window in windows
            )
            self.traits = replace(self.traits, publishes_groups=True, groups=tuple(groups))
        manager.flush()  # the first iteration has only the created event

    @property
    def powers(self) -> Powers:
        """Capabilities that not every driver has."""
        return Powers(begin_pass=self.begin_pass, end_iteration=self.end_iteration)

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """Return a new request, without blocks."""
        rng = Random(0) if to_look else self._rng  # noqa: S311 - mock data
        return self.manager.new_request(prompt, rng=rng, to_look=to_look)

    def lookup(self, request: Any) -> int:
        """Count the cached tokens of a request, including a part of the last block; its last token never counts."""
        return self.manager.lookup(request)

    def room(self) -> int:
        """Count the device blocks that no request has; the minimum over windows or pools."""
        return self.manager.num_free_blocks

    def adapter(self, request: Any) -> int:
        """Return the number of a request's adapter; -1 without an adapter."""
        number: int | None = request.hasher.adapter
        return -1 if number is None else number

    def first_new_block(self, request: Any) -> Hashable | None:
        """Return the first full block of a request that is not cached; V1 compares it without its predecessors."""
        return self.manager.first_new_block(request)

    def clear(self) -> bool:
        """Evict all cached blocks."""
        return self.manager.clear()

    def extend(self, request: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token: each step computes the token before it, unless that belongs to the prompt."""
        for token in tokens:
            if self._length(request) < len(request):
                self._step(request)
            request.tokens.append(token)
        self._operation_over()

    def quiet_tokens(self, request: Any) -> int:
        """Count the tokens, from the last one on, that can be computed before one needs a block."""
        return -self._length(request) % self.manager.block_size

    def generate(self, request: Any, token: int) -> bool:
        """Append a token; it gets its slot in the next pass, which computes it."""
        request.tokens.append(token)
        return True

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """For each token, compute the last token of the request, and append this one."""
        step, output = self._step, request.tokens
        for token in tokens:
            step(request)
            output.append(token)

    def _length(self, request: Any) -> int:
        """Count the tokens of a request that have room."""
        raise NotImplementedError

    def _step(self, request: Any) -> bool:
        """Give a request room for one more token; return False if there is none."""
        raise NotImplementedError

    def _store(self) -> None:
        """Store the computed parts of prompts."""
        raise NotImplementedError

    def _operation_over(self) -> None:
        if not self._in_pass:
            self._store()
            self.manager.flush()

    def begin_pass(self) -> None:
        """Begin an iteration."""
        self._in_pass = True

    def end_iteration(self) -> None:
        """End an iteration, and publish its events."""
        self._in_pass = False
        self._operation_over()

    def needs_no_output(self, request: Any) -> None:
        """Do nothing: the last token of the request is computed all the same."""
