"""Requests of a hybrid cache, and their tokens if keys are bigrams."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from pytest_kvmock.engines.base.lookahead_tokens import LookaheadTokens
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.engines.sglang.hybrid_tree import Lock, TreeMatch
from pytest_kvmock.engines.sglang.radix_request import RadixRequest
from pytest_kvmock.values.tokens import Prompt


class BigramTokens(LookaheadTokens):
    """The tokens of a request with EAGLE, whose pages consist of bigrams. There is one bigram fewer than tokens.

    Args:
        prompt: a prompt of tokens; hashes give no bigrams.
        block_size: bigrams per page.
        hasher: a hasher of bigrams.
        rng: see `HashedTokens`.

    Raises:
        ValueError: the prompt is empty, or has no tokens.
    """

    __slots__ = ()

    def __init__(self, prompt: Prompt, block_size: int, hasher: SglangHasher, rng: Random) -> None:
        super().__init__(prompt, block_size, hasher, rng, 1)

    def block_tokens(self, start: int, end: int) -> list[tuple[Any, ...]] | None:
        """Return the bigrams of the complete pages from `start` to `end`, as pairs of tokens."""
        size = self.block_size
        return [tuple(pairwise(self.cut(at, at + size + 1))) for at in range(start * size, end * size, size)]


class HybridRequest(RadixRequest):
    """One request, and its pages and slots of a hybrid cache. Lengths are in units of the keys: tokens or bigrams.

    Attributes:
        lock: its lock in the tree; None if there is none.
        dead: number of leading pages whose window is freed.
        branch: end of a full attention prefix that cannot be used, where its next checkpoint ends; None if there is
            none.
        state_branch: the same on the grid of states; None if there is none.
        tracked: position whose state it keeps for its next checkpoint; None if there is none.
        slots: number of its state slots.
        short: at its last match, the number of tokens that full attention had, and the missing parts with their sizes.
        match: result of its last lookup; None before the first.
        from_host: tokens that it loaded from a host.
        from_storage: number of these that a prefetch had brought to the host for it.
        leaves_prefetch: whether its prefetch continues without it, and is cached on arrival.
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
        elif self._partial is None or len(tokens.names) > whole:  # with pairs, one token is never in a whole page
            self._open()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.short: tuple[int, tuple[str, ...]] = (0, ())

    def retract(self) -> None:
        """Forget its pages and slots; it starts over with its tokens."""
        super().retract()
        self.lock: Lock | None = None
        self.dead = self.slots = 0
        self.branch: int | None = None
        self.state_branch: int | None = None
        self.tracked: int | None = None
        self.match: TreeMatch | None = None
        self.from_host = self.from_storage = 0
        self.leaves_prefetch = False
