"""The base of drivers of pages in a radix tree: it opens, admits and checkpoints requests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.base.driver import Powers, PromptPlan, Traits

if TYPE_CHECKING:
    from pytest_kvmock.values.tokens import Prompt


class TreeDriver:
    """Base of the drivers of a `RadixManager`, which makes the requests. Subclasses start, compute and free them.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse cached pages and leave pages; without it, requests share no pages.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.
    """

    traits = Traits(
        recomputes_last_token=True, stores_when="finish", removed_first=True, cleared_first=True, extra_keys=False
    )
    prompt_keys: tuple[str, ...] = ("lora_name", "cache_salt", "session_id")
    """"multimodal" is missing because a multimodal item is in the tokens: SGLang replaces its placeholders by tokens
    made from its hash.
    """

    manager: Any

    def __init__(self, manager: Any, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        self._prefilled: set[Any] = set()

    @property
    def powers(self) -> Powers:
        """Its optional abilities."""
        return Powers()

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """Open a new request without pages."""
        # Names come from another generator: a look-up must not change the tokens that are generated next.
        return self.manager.request(prompt, Random(0) if to_look else self._rng)  # noqa: S311 - mock data

    def lookup(self, request: Any) -> int:
        """Count the usable cached tokens of a request, without its last one."""
        tokens: int = self.manager.lookup(request) * self.manager.block_size if self._prefix_caching else 0
        return tokens

    def room(self) -> int:
        """Count the pages that no request has."""
        pages: int = self.manager.num_blocks - self.manager.num_active_blocks
        return pages

    def plan(self, request: Any, upto: int) -> PromptPlan:
        """Look up a request; as in SGLang, its match stays in the request."""
        need: int = self.need(request, upto)
        return PromptPlan(need, self.room(), request.found * self.manager.block_size)

    def admit(self, request: Any, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - the request has it
        """Compute the first `upto` tokens, and checkpoint."""
        if request not in self.manager.requests:
            self.manager.admit(request)
        if upto > request.computed:
            self._compute(request, upto)
            self._computed(request)

    def free(self, request: Any, *, done: bool) -> None:
        """Free the pages of a request; if it is done, checkpoint it first."""
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
        """Drop all cached pages."""
        cleared: bool = self.manager.clear()
        return cleared

    # ------------------------------------------------------------------------------------------- a scheduler's

    def unheld(self) -> int:
        """Count the tokens in pages that are free, or cached and evictable."""
        tokens: int = self.room() * self.manager.block_size
        return tokens

    def prefill(self, request: Any, upto: int) -> int | None:
        """Match, lock, make room and compute a chunk. The chunk enters the tree at the end of the pass.

        SGLang matches the whole prompt before it cuts a chunk; here only the chunk is matched.
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
        """Checkpoint a prefill; output is not cached before the request finishes."""
        if request in self._prefilled:
            self._prefilled.discard(request)
            self._computed(request)

    def step_tokens(self, requests: Sequence[Any]) -> int:
        """Count the tokens of a page for each request that needs one."""
        tokens: int = sum(request.opens_page for request in requests) * self.manager.block_size
        return tokens

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens for which the request has pages."""
        for token in tokens:
            request.append(token)
        request.computed += len(tokens)

    # ----------------------------------------------------------------------------------- what its manager does

    def need(self, request: Any, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the pages that a request needs; see `Driver.need`."""
        raise NotImplementedError

    def _start(self, request: Any, upto: int) -> bool:
        """Match and lock the first `upto` tokens of a request without pages; return False if it has to wait."""
        raise NotImplementedError

    def _fits(self, request: Any, upto: int) -> bool:
        """Return whether there is room for a chunk up to `upto`."""
        raise NotImplementedError

    def _withdraw(self, request: Any) -> None:
        """Undo the start of a request that has computed nothing."""
        raise NotImplementedError

    def _compute(self, request: Any, upto: int) -> None:
        """Take pages for the first `upto` tokens, and compute them."""
        raise NotImplementedError

    def _computed(self, request: Any) -> None:
        """Cache the computed tokens of a running request, if prefix caching is on."""
        raise NotImplementedError
