"""Requests of Dynamo's mock of SGLang: their tokens under Dynamo's names, and the pages that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.tokens import Prompt, block_hashes, sequence_hashes


@dataclass(frozen=True, slots=True)
class DynamoHasher:
    """Names pages as Dynamo's router does: the chained hash of their local hashes, which is its own digest."""

    signed: ClassVar[bool] = False

    def digests(
        self,
        tokens: Sequence[int],
        block_size: int,
        position: int,  # noqa: ARG002 - the signature of BlockHasher
        parent: bytes | None,
    ) -> list[bytes]:
        """As `BlockHasher.digests`."""
        before = None if parent is None else self.name(parent)
        return [name.to_bytes(8, "little") for name in sequence_hashes(block_hashes(tokens, block_size), parent=before)]

    def name(self, digest: bytes) -> int:
        """As `BlockHasher.name`."""
        return int.from_bytes(digest, "little")


HASHER = DynamoHasher()


class PageRequest(RadixRequest):
    """One request, and the pages that it has, each with an identity. It grows at the end.

    In `RadixRequest`'s terms `computed` are its tokens that have a slot, `protected` its pages that are known to be in
    the tree: 0 after its admission, whatever prefix it shares; its first checkpoint counts them. `allocated` are whole
    pages by which its tokens are accounted for, though slots are taken one by one.

    Args:
        prompt: tokens, or hashes.
        page_size: tokens a page.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the prompt is empty, or its hashes do not fit the page size.

    Attributes:
        pages: identities of its complete pages, those that it shares included.
    """

    __slots__ = ("pages",)

    def __init__(self, prompt: Prompt, page_size: int, rng: Random) -> None:
        super().__init__(HashedTokens(prompt, page_size, HASHER, rng), rng)

    def retract(self) -> None:
        """Forget its pages: it begins anew, with the tokens that it has."""
        super().retract()
        self.pages: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens behind a page that has some and that they do not fill."""
        self.tokens.extend(tokens)

    @property
    def slack(self) -> int:
        """Tokens by which its last page is accounted for and that have no slot yet."""
        return self.allocated * self.tokens.block_size - self.computed
