"""Requests of Dynamo's mock of SGLang: their tokens, named as Dynamo names them, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.sglang.radix_request import RadixRequest
from pytest_kvmock.values.tokens import Prompt, keyed_block_hashes, sequence_hashes

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra, PromptKeys


@dataclass(frozen=True, slots=True)
class DynamoHasher:
    """Names pages as Dynamo's router does, by the chained hash of their local hashes. This hash is its own digest.

    Attributes:
        keys: what the prompt carries that changes block names; None if nothing.
    """

    signed: ClassVar[bool] = False

    keys: PromptKeys | None = None

    def digests(
        self,
        tokens: Sequence[int],
        block_size: int,
        position: int,
        parent: bytes | None,
    ) -> list[bytes]:
        """Return the sequence hash of each complete block as bytes."""
        before = None if parent is None else self.name(parent)
        local = keyed_block_hashes(tokens, block_size, self.keys, position)
        return [name.to_bytes(8, "little") for name in sequence_hashes(local, parent=before)]

    def name(self, digest: bytes) -> int:
        """Return the sequence hash; the engine publishes it unshortened."""
        return int.from_bytes(digest, "little")

    def looking_ahead(self, lookahead: int) -> DynamoHasher:
        """Refuse: these names never look ahead."""
        raise NotImplementedError("the names of its streams follow from local hashes alone")

    def of_event(self, extra: EventExtra, position: int) -> DynamoHasher:
        """Refuse: the extra fields of an event change none of these names."""
        raise NotImplementedError("the names of its streams follow from local hashes alone")


HASHER = DynamoHasher()


class MockerRadixRequest(RadixRequest):
    """One request and its pages, each with an identity. It grows at the end.

    Args:
        prompt: tokens, or hashes.
        page_size: tokens a page.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the prompt is empty, or its hashes do not fit the page size.

    Attributes:
        pages: identities of its complete pages, shared ones included.
        computes_last_token: whether its last token is computed even if it is cached, because its output is needed.
    """

    __slots__ = ("computes_last_token", "pages")

    def __init__(self, prompt: Prompt, page_size: int, rng: Random) -> None:
        named = None if prompt.keys is None else prompt.keys.named()
        super().__init__(HashedTokens(prompt, page_size, HASHER if named is None else DynamoHasher(named), rng), rng)
        self.computes_last_token = True

    def retract(self) -> None:
        """Drop its pages: it starts over with its present tokens."""
        super().retract()
        self.pages: list[int] = []

    @property
    def most_hits(self) -> int:
        """Number of its pages that may be hits: all full pages, or all before the page of its last token."""
        return (len(self) - self.computes_last_token) // self.tokens.block_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the last page, which is not empty and does not become full."""
        self.tokens.extend(tokens)
