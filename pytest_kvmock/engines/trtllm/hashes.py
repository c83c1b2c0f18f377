"""Block names of TensorRT-LLM: V1's chain of 64-bit numbers (`v1_block_key`), or V2's chain of sha256; all unsigned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Self

from pytest_kvmock.values.prompt_keys import LoraIds

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B9


class BlockKey(NamedTuple):
    """The key of a block among the children of its parent (`BlockKey` of TensorRT-LLM).

    Attributes:
        tokens: tokens of the block; a partial block has fewer than its size.
        adapter: number of the LoRA adapter; None if there is none.
        salt: number of the salt; None if there is none.
    """

    tokens: tuple[int, ...]
    adapter: int | None = None
    salt: int | None = None


@lru_cache(maxsize=2**16)
def _mix32(token: int) -> int:
    token = ((token >> 16) ^ token) * 0x45D9F3B & _U32
    token = ((token >> 16) ^ token) * 0x45D9F3B & _U32
    return ((token >> 16) ^ token) + _GOLDEN & _U32  # without the wrap, as in a proposal's copy, hashes differ


def _mix64(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _U64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _U64
    return (number ^ number >> 31) + _GOLDEN


def v1_block_key(key: BlockKey, parent: int = 0) -> int:
    """Return the name of a block, full or partial (`BlockKeyHasher::hash`).

    Args:
        key: its tokens, from 0 to 2**32 - 1, adapter and salt.
        parent: the name of the block before it; 0 for a root, whose name includes its salt.
    """
    seed = len(key.tokens) ^ parent * 0xBF58476D1CE4E5B9 & _U64
    if key.salt is not None and not parent:
        seed ^= _mix64(key.salt) + (seed << 6) + (seed >> 2) & _U64
    for token in key.tokens:
        seed ^= _mix32(token) + (seed << 6) + (seed >> 2) & _U64
    if key.adapter is not None:
        seed ^= _mix64(key.adapter) + (seed << 6) + (seed >> 2) & _U64
    return seed


@lru_cache(maxsize=256)
def salt_number(salt: str | int) -> int:
    """Return the number of a salt: a number itself, or for a text, the first 8 bytes of its digest, little endian.

    The digest is blake3 if the package `blake3` is installed, as in the hash module of TensorRT-LLM's routers; else
    sha256, as in one version of V2's adapter.
    """
    if isinstance(salt, int):
        return salt
    try:
        from blake3 import blake3  # type: ignore[import-not-found, unused-ignore]  # not one of our dependencies
    except ImportError:
        digest = sha256(salt.encode()).digest()
    else:
        digest = blake3(salt.encode()).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """The data that names blocks in addition to their tokens. Its subclasses are the hashers (`BlockHasher`).

    Attributes:
        adapter: number of the LoRA adapter; None if there is none.
        salt: number of the salt; None if there is none.
    """

    signed: ClassVar[bool] = False

    adapter: int | None = None
    salt: int | None = None

    def looking_ahead(self, lookahead: int) -> Self:  # noqa: ARG002 - the signature of BlockHasher
        """Return this hasher: these names never look ahead."""
        return self

    def of_event(self, extra: EventExtra, position: int) -> Self:  # noqa: ARG002 - the signature of BlockHasher
        """Return the hasher for the adapter and salt of an event."""
        salt = extra.get("cache_salt")
        return type(self)(extra.get("lora_id"), None if salt is None else salt_number(salt))

    @classmethod
    def of_prompt(cls, keys: object, lora_ids: LoraIds, *, to_look: bool = False) -> Self:
        """Return the scope of a request with these `PromptKeys`.

        Adapters are numbered in the order of their first use; a look-up does not count as a use.
        """
        adapter, salt = getattr(keys, "lora_name", None), getattr(keys, "cache_salt", None)
        number = lora_ids.looked_up if to_look else lora_ids.of
        return cls(None if adapter is None else number(adapter), None if salt is None else salt_number(salt))


@dataclass(frozen=True, slots=True)
class V1Hasher(ReuseScope):
    """Names blocks by `v1_block_key`; a digest has the eight bytes of a name. Attributes: see `ReuseScope`."""

    def key(self, tokens: Sequence[int]) -> BlockKey:
        """Return the key of a block with these tokens."""
        return BlockKey(tuple(tokens), self.adapter, self.salt)

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:  # noqa: ARG002 - the signature of BlockHasher
        """Return the chained digest of each block of these tokens, a last partial one included.

        See `BlockHasher.digests`.
        """
        before, found = 0 if parent is None else self.name(parent), []
        for start in range(0, len(tokens), block_size):
            before = v1_block_key(self.key(tokens[start : start + block_size]), before)
            found.append(before.to_bytes(8, "big"))
        return found

    def name(self, digest: bytes) -> int:
        """Return the number whose bytes are the digest."""
        return int.from_bytes(digest, "big")


@dataclass(frozen=True, slots=True)
class V2Hasher(ReuseScope):
    """Names blocks by `v2_sha256`; a name is the digest's first 8 bytes, big endian (`v2_sha256_64`).

    Attributes: see `ReuseScope`.
    """

    def root(self) -> bytes:
        """Return the digest to which the first blocks are chained (`reuse_scope_to_bytes`)."""
        fields = (self.adapter, self.salt)
        mask = sum((field is not None) << place for place, field in enumerate(fields))
        return sha256(
            bytes([mask]) + b"".join(each.to_bytes(8, "little") for each in fields if each is not None)
        ).digest()

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:  # noqa: ARG002 - the signature of BlockHasher
        """Return the chained digest of each block of these tokens, a last partial one included.

        See `BlockHasher.digests`.
        """
        before, found = self.root() if parent is None else parent, []
        for start in range(0, len(tokens), block_size):
            packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
            before = sha256(before + packed).digest()
            found.append(before)
        return found

    def name(self, digest: bytes) -> int:
        """Return the number that represents a digest."""
        return int.from_bytes(digest[:8], "big")


HASH_ALGOS: Final[dict[str, type[V1Hasher | V2Hasher]]] = {
    "v1_block_key": V1Hasher,
    "v2_sha256": V2Hasher,
    "v2_sha256_64": V2Hasher,
}
"""The hasher for each algorithm of V2."""
