"""Keys and requests of SGLang's cache."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any
from uuid import UUID

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.engines.sglang.radix_tree import TreeNode
from pytest_kvmock.values.events import BlockTokens
from pytest_kvmock.values.moves import Block
from pytest_kvmock.values.tokens import Prompt, TokenIds, block_hashes

_U64 = 2**64 - 1


class RadixKey:
    """The whole pages of some tokens, for lookups and inserts by hand; an incomplete last page is cut off.

    Args:
        tokens: token ids, from 0 to 2**63 - 1, or a `Prompt`. May be empty.
        page_size: tokens (or bigrams) per page.
        hasher: names the pages; it is made for their salt and namespace. Events carry the salt.
        lora_name: the adapter, if the namespace is one; events carry it, and routers hash by it.
        session_id: the session, which events carry.

    Raises:
        TypeError: a token is not an integer.
        ValueError: a token is out of range, or a prompt of hashes does not fit the page size.

    Attributes:
        names: names of the pages.
        local_hashes: the router's hash of each page; of a page with a token that no router can hash (above 2**32 - 1),
            the bits of its name.
    """

    __slots__ = ("_extra", "_is_eagle", "_page_size", "_tokens", "local_hashes", "names")

    def __init__(
        self,
        tokens: TokenIds | Prompt,
        page_size: int,
        hasher: SglangHasher,
        *,
        lora_name: str | None = None,
        session_id: str | None = None,
    ) -> None:
        self._page_size, self._is_eagle = page_size, hasher.is_eagle
        carried = {"lora_name": lora_name, "cache_salt": hasher.cache_salt, "session_id": session_id}
        self._extra = {name: value for name, value in carried.items() if value is not None}
        self._tokens: list[int] | None
        if isinstance(tokens, Prompt) and tokens.tokens is None:
            hashed = HashedTokens(tokens, page_size, hasher, Random(0))  # noqa: S311 - nothing is drawn
            self._tokens, self.names, self.local_hashes = None, hashed.names, hashed.local_hashes
            return
        if isinstance(tokens, str) or not isinstance(tokens, (Prompt, Iterable)):
            raise TypeError(f"tokens must be a sequence of token ids, or a Prompt; got {tokens!r:.80}")
        self._tokens = list(tokens.tokens or () if isinstance(tokens, Prompt) else tokens)
        digests = hasher.digests(self._tokens, page_size, 0, None)
        self.names = list(map(hasher.name, digests))
        self.local_hashes = [name & _U64 for name in self.names]
        width = page_size + self._is_eagle
        for page in range(len(self.names)):
            with suppress(ValueError):
                window = self._tokens[page * page_size : page * page_size + width]
                self.local_hashes[page] = block_hashes(
                    window, page_size, lora_name=lora_name, cache_namespace=hasher.cache_salt, eagle=self._is_eagle
                )[0]

    def block_tokens(self, start: int, end: int) -> BlockTokens | None:
        """Return the token ids of the pages from `start` to `end`, or their bigrams as pairs; None if unknown."""
        if self._tokens is None:
            return None
        size, tokens = self._page_size, self._tokens
        units: list[Any] = list(pairwise(tokens)) if self._is_eagle else tokens
        return [tuple(units[at : at + size]) for at in range(start * size, end * size, size)]

    def carried(self, start: int, end: int) -> dict[str, Any] | None:  # noqa: ARG002 - as HashedTokens has it
        """Return the extra properties of an event that stores these pages; None if there are none."""
        return self._extra or None


class RadixRequest:
    """One request and its pages (SGLang's `Req`). It grows at its end.

    Args:
        tokens: the tokens of prompt and output.
        rng: source of the names of partial blocks.
        namespace: separates it in the tree from requests with the same names; None: the common namespace.

    Attributes:
        tokens: as given.
        namespace: as given.
        priority: priority of the pages that it inserts.
        node: the node where its pages in the tree end; before it has any, the node where its last lookup ended.
        found: pages that its last lookup matched.
        protected: its pages in the tree.
        allocated: all its pages, including those in the tree.
        computed: its computed tokens, for which it has pages.
        inserted: number of pages that it has inserted; it counts only one hit for each.
        steps: number of its decode steps, if its cache counts them.
    """

    __slots__ = (
        "_partial",
        "_rng",
        "allocated",
        "computed",
        "found",
        "inserted",
        "namespace",
        "node",
        "priority",
        "protected",
        "steps",
        "tokens",
    )

    def __init__(
        self, tokens: HashedTokens, rng: Random, namespace: tuple[str | None, str | None] | None = None
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.priority = 0
        self._rng = rng
        self._partial: UUID | None = None
        if len(tokens) > len(tokens.names) * tokens.block_size:
            self._open()
        self.retract()

    def _open(self) -> None:
        self._partial = UUID(int=self._rng.getrandbits(128), version=4)

    def retract(self) -> None:
        """Forget its pages; it starts over with its tokens (`reset_for_retract`)."""
        self.node: TreeNode | None = None
        self.found = self.protected = self.allocated = self.computed = self.inserted = self.steps = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shared(self) -> int:
        """Its pages in the tree; before its first checkpoint, those of its match."""
        return max(self.protected, self.found)

    @property
    def opens_page(self) -> bool:
        """Whether its next token needs another page."""
        return self.computed >= self.allocated * self.tokens.block_size

    @property
    def blocks(self) -> list[Block]:
        """Names of its whole pages, and a UUID for an incomplete last page."""
        whole: list[Block] = [*self.tokens.names]
        return whole if self._partial is None else [*whole, self._partial]

    def append(self, token: int) -> None:
        """Add one token."""
        self.tokens.append(token)
        over = len(self.tokens) % self.tokens.block_size
        if not over:
            self._partial = None
        elif over == 1:
            self._open()
