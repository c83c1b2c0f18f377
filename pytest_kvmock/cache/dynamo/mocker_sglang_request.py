"""Requests of Dynamo's mock of SGLang: their tokens under Dynamo's names, and the pages that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.tokens import Prompt, keyed_block_hashes, sequence_hashes

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra, PromptKeys


@dataclass(frozen=True, slots=True)
class DynamoHasher:
    """Names pages as Dynamo's router does: the chained hash of their local hashes, which is its own digest.

    Attributes:
        keys: what the prompt carries that names blocks; None: nothing.
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
        """As `BlockHasher.digests`."""
        before = None if parent is None else self.name(parent)
        local = keyed_block_hashes(tokens, block_size, self.keys, position)
        return [name.to_bytes(8, "little") for name in sequence_hashes(local, parent=before)]

    def name(self, digest: bytes) -> int:
        """As `BlockHasher.name`."""
        return int.from_bytes(digest, "little")

    def of_event(self, extra: EventExtra, position: int) -> DynamoHasher:
        """As `BlockHasher.of_event`."""
        raise NotImplementedError("the names of its streams follow from local hashes alone")


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
        named = None if prompt.keys is None else prompt.keys.named()
        super().__init__(HashedTokens(prompt, page_size, HASHER if named is None else DynamoHasher(named), rng), rng)

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
