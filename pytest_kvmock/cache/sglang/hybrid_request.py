"""Requests of a hybrid cache, and the tokens of one whose keys are bigrams."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from pytest_kvmock.cache.lookahead_tokens import LookaheadTokens
from pytest_kvmock.cache.sglang.hashes import SglangHasher
from pytest_kvmock.cache.sglang.hybrid_tree import Lock, TreeMatch
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.tokens import Prompt


class BigramTokens(LookaheadTokens):
    """The tokens of a request for EAGLE: its pages are of bigrams, one fewer than tokens.

    Args:
        prompt: tokens; one of hashes has no bigrams.
        block_size: bigrams a page.
        hasher: one of bigrams.
        rng: as `HashedTokens`.

    Raises:
        ValueError: the prompt is empty, or has no tokens.
    """

    __slots__ = ()

    def __init__(self, prompt: Prompt, block_size: int, hasher: SglangHasher, rng: Random) -> None:
        super().__init__(prompt, block_size, hasher, rng, 1)

    def block_tokens(self, start: int, end: int) -> list[tuple[Any, ...]] | None:
        """Bigrams of the complete pages from `start` to `end`, as pairs."""
        size = self.block_size
        return [tuple(pairwise(self.cut(at, at + size + 1))) for at in range(start * size, end * size, size)]


class HybridRequest(RadixRequest):
    """One request, and what it has of a hybrid cache. Lengths are in units: tokens, or bigrams where keys are.

    Attributes:
        lock: what it has locked; None while nothing.
        dead: pages before which its window is freed.
        branch: units up to which full attention has what cannot be used: where its next checkpoint ends; None for none.
        state_branch: the same on the grid of states; None for none.
        tracked: tokens of which it keeps the state for its next checkpoint; None for none.
        slots: of states that it has.
        short: of its last match, how many of its units full attention had, and the parts that were not there, by their sizes.
        match: what its last lookup found; None before the first.
        from_host: tokens that it loaded from a host.
        from_storage: of these, tokens that a prefetch had brought there for it.
        leaves_prefetch: what is fetched for it is cached when it comes, though nobody waits for it.
    """

    __slots__ = (
        "branch",
        "dead",
        "from_host",
        "from_storage",
        "leaves_prefetch",
        "lock",
        "match",
        "short",
        "slots",
        "state_branch",
        "tracked",
    )

    def append(self, token: int) -> None:
        """Add one token."""
        tokens = self.tokens
        whole = len(tokens.names)
        tokens.append(token)
        if len(tokens) == len(tokens.names) * tokens.block_size:
            self._partial = None
        elif self._partial is None or len(tokens.names) > whole:  # of pairs, one token is always in no whole page
            self._open()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.short: tuple[int, tuple[str, ...]] = (0, ())

    def retract(self) -> None:
        """Forget what it has: it begins anew, with the tokens that it has."""
        super().retract()
        self.lock: Lock | None = None
        self.dead = self.slots = 0
        self.branch: int | None = None
        self.state_branch: int | None = None
        self.tracked: int | None = None
        self.match: TreeMatch | None = None
        self.from_host = self.from_storage = 0
        self.leaves_prefetch = False
