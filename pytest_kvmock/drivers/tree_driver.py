"""What the drivers of pages in a radix tree share: how requests are opened and admitted, and when they are checkpointed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.drivers.driver import Traits

if TYPE_CHECKING:
    from pytest_kvmock.tokens import Prompt


class TreeDriver:
    """Base of the drivers of a `RadixManager`, whose requests are its own; a subclass starts, computes and frees.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, each has pages of its own.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.
    """

    traits = Traits(
        recomputes_last_token=True, stores_when="finish", removed_first=True, cleared_first=True, extra_keys=False
    )
    prompt_keys: tuple[str, ...] = ("lora_name", "cache_salt", "session_id")
    """A multimodal item stands in the tokens themselves: SGLang replaces its placeholders by tokens made from its hash."""

    manager: Any

    def __init__(self, manager: Any, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        self._prefilled: set[Any] = set()

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """A request that has no page yet."""
        # With names from elsewhere: whoever only looks must not change what is generated next.
        return self.manager.request(prompt, Random(0) if to_look else self._rng)  # noqa: S311 - mock data

    def lookup(self, request: Any) -> int:
        """Tokens of the request that are cached and can be used, without its last one."""
        tokens: int = self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0
        return tokens

    def room(self) -> int:
        """Pages that no request has."""
        pages: int = self.manager.max_capacity - self.manager.num_active_blocks
        return pages

    def admit(self, request: Any, upto: int) -> None:
        """Compute up to this token, and checkpoint."""
        if request not in self.manager.requests:
            self.manager.admit(request)
        if upto > request.computed:
            self._compute(request, upto)
            self._computed(request)

    def free(self, request: Any, *, done: bool) -> None:
        """Free what it has; of a request that is done, after a last checkpoint."""
        self._prefilled.discard(request)
        if request in self.manager.requests:
            if not done:
                self.manager.retract(request)
            elif self._prefix_caching:
                self.manager.finish(request)
            else:
                self.manager.release(request)
        if done:
            request.tokens.release()

    def clear(self) -> bool:
        """Drop all that is cached."""
        cleared: bool = self.manager.clear()
        return cleared

    # ------------------------------------------------------------------------------------------- a scheduler's

    def unheld(self) -> int:
        """Tokens in pages that are free, or cached and evictable."""
        tokens: int = self.room() * self.manager.block_size
        return tokens

    def prefill(self, request: Any, upto: int) -> int | None:
        """Compute a chunk: match, lock, make room. It enters the tree when it is done, at the end of the pass.

        SGLang matches the whole prompt before it cuts a chunk; here a chunk matches what is cached of itself.
        """
        is_first = request not in self.manager.requests
        if is_first and not self._start(request, upto):
            return None
        if not self._fits(request, upto):
            if is_first:
                self._withdraw(request)
            return None
        before: int = request.computed
        if upto > before:
            self._compute(request, upto)
        self._prefilled.add(request)
        return before

    def checkpoint(self, request: Any) -> None:
        """Checkpoint what a prefill computed; output is not cached before the request finishes."""
        if request in self._prefilled:
            self._prefilled.discard(request)
            self._computed(request)

    def step_tokens(self, requests: Sequence[Any]) -> int:
        """A page for each that needs one."""
        tokens: int = sum(request.opens_page for request in requests) * self.manager.block_size
        return tokens

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens for which there are pages."""
        for token in tokens:
            request.append(token)
        request.computed += len(tokens)

    # ----------------------------------------------------------------------------------- what its manager does

    def _start(self, request: Any, upto: int) -> bool:
        """Match the first `upto` tokens of a request without pages, and lock; False where it has to wait."""
        raise NotImplementedError

    def _fits(self, request: Any, upto: int) -> bool:
        """Whether there is room for a chunk up to this token."""
        raise NotImplementedError

    def _withdraw(self, request: Any) -> None:
        """Undo the start of a request that has computed nothing."""
        raise NotImplementedError

    def _compute(self, request: Any, upto: int) -> None:
        """Take pages up to this token, and compute."""
        raise NotImplementedError

    def _computed(self, request: Any) -> None:
        """Cache what was computed of a request that goes on, where requests leave anything."""
        raise NotImplementedError
