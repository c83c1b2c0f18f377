"""Names of vLLM's blocks, by release: the published last 64 bits of a digest of parent, tokens and extra keys.

One subject: the name of a block, from the tokens and keys that it covers to the bytes that are digested.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct, iter_unpack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from xxhash import xxh3_128

from pytest_kvmock.values.checks import did_you_mean
from pytest_kvmock.values.prompt_keys import MultimodalItem, PromptKeys, block_keys, hashed_lora_id

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

# Theory of operation
#
# A block is hashed as the triple (digest of the parent, tokens, extra keys or None), either pickled or as canonical
# CBOR (RFC 8949 4.2.1). The parent digest of a root is NONE_HASH: the hash of a seed, the text of PYTHONHASHSEED. Most
# triples have no extra keys; their CBOR is written in one go.


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """The properties of one release of vLLM that its block pool and its hashes show.

    Attributes:
        name: the release.
        prepends_unhashed: freed blocks without a hash go to the front of the free queue and are reused first; else they
            go to its end, before the hashed blocks of the same request.
        tagged_keys: extra keys are hashed with a tag for their kind: `("cache_salt", salt)` instead of `salt`.
        fixed_seed: seed of the SHA-256 hashes if none is set; None if it differs in each process.
        item_offsets: a multimodal item is hashed with its offset in the block, not only by its identifier.
        lora_by_id: an adapter is hashed by its number instead of its name.
        signed_names: names are signed. 0.9 hashed with Python's own `hash`, whose numbers differ between processes; the
            mock uses the SHA-256 of the same triple.
        has_groups: its cache groups were recorded and are mocked.
    """

    name: str
    prepends_unhashed: bool = False
    tagged_keys: bool = False
    fixed_seed: str | None = None
    item_offsets: bool = True
    lora_by_id: bool = False
    signed_names: bool = False
    has_groups: bool = False

    def untagged(self, keys: tuple[Any, ...] | None, lora_name: str | None) -> tuple[Any, ...] | None:
        """Return the keys of a block as this release hashes them, given the untagged keys.

        Args:
            keys: the keys of one block as they are on the wire; None if it has none.
            lora_name: the adapter; None if there is none.
        """
        if keys is None or self.item_offsets:
            return keys
        plain = [key[0] if isinstance(key, (tuple, list)) else key for key in keys]
        if self.lora_by_id and lora_name is not None:
            plain[0] = hashed_lora_id(lora_name)
        return tuple(plain)


VERSIONS: Final = MappingProxyType(
    {
        version.name: version
        for version in (
            VllmVersion(
                "0.33.0", prepends_unhashed=True, tagged_keys=True, fixed_seed="vllm-none-hash", has_groups=True
            ),
            VllmVersion("0.28.0", prepends_unhashed=True),
            VllmVersion("0.24.0", prepends_unhashed=True),
            VllmVersion("0.23.0"),
            VllmVersion("0.19.1"),
            VllmVersion("0.14.1", item_offsets=False),
            VllmVersion("0.10.2", item_offsets=False, lora_by_id=True),
            VllmVersion("0.9.2", item_offsets=False, lora_by_id=True, signed_names=True),
        )
    }
)
"""The known releases, newest first. The pools of 0.33.0 and 0.19.1 and the names of all releases were recorded; the
rest was read from the source."""


def vllm_version(name: str) -> VllmVersion:
    """Return the release of this name.

    Raises:
        ValueError: the release is unknown; the message lists the known ones.
    """
    if isinstance(name, str) and name in VERSIONS:
        return VERSIONS[name]
    raise ValueError(f"unknown vLLM version {name!r}; known: {', '.join(VERSIONS)}")


class _Hashed(Protocol):
    def digest(self) -> bytes: ...


_FUNCTIONS: Final[Mapping[str, Callable[[bytes], _Hashed]]] = MappingProxyType(
    {"sha256": hashlib.sha256, "xxhash": xxh3_128}
)
ALGORITHMS: Final = tuple(f"{function}{form}" for function in _FUNCTIONS for form in ("", "_cbor"))
"""The algorithms by vLLM's names (`--prefix-caching-hash-algo`)."""


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """The keys of one request that are hashed with its tokens.

    Attributes:
        lora_name: the adapter; None if there is none.
        lora_path: the path of the adapter; hashed if keys are tagged.
        multimodal: the items in the order of their offsets.
        cache_salt: None if there is none; hashed only in block 0, and carried on by the chain.
    """

    lora_name: str | None = None
    lora_path: str = ""
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str | None = None

    def of_block(self, position: int, block_size: int, *, tagged: bool, lookahead: int = 0) -> tuple[Any, ...] | None:
        """Return the keys of one block, in vLLM's order; None if it has none.

        Args:
            position: number of blocks before it.
            block_size: tokens per block.
            tagged: see `VllmVersion.tagged_keys`.
            lookahead: number of following tokens that its name also covers.
        """
        keys = self.of_prompt.block_keys(position, block_size, lookahead)
        return tagged_keys(keys, self.lora_name, self.lora_path) if tagged else keys

    @property
    def of_prompt(self) -> PromptKeys:
        """The same keys as a prompt carries them."""
        return PromptKeys(self.lora_name, self.cache_salt, self.multimodal, lora_path=self.lora_path)


@dataclass(frozen=True, slots=True)
class EventKeys:
    """The keys of the blocks of one event, as the event carries them.

    Attributes:
        blocks: per block, its untagged keys; None if it has none.
        first: position of the first of these blocks.
        lora_name: the adapter; None if there is none.
        lora_path: the path of the adapter.
    """

    blocks: tuple[tuple[Any, ...] | None, ...]
    first: int = 0
    lora_name: str | None = None
    lora_path: str = ""

    def of_block(
        self,
        position: int,
        block_size: int,  # noqa: ARG002 - as ExtraKeys
        *,
        tagged: bool,
        lookahead: int = 0,
    ) -> tuple[Any, ...] | None:
        """Return the extra keys of a block. Events do not carry an image that begins in the lookahead tokens."""
        del lookahead
        at = position - self.first
        keys = self.blocks[at] if 0 <= at < len(self.blocks) else None
        return tagged_keys(keys, self.lora_name, self.lora_path) if tagged else keys


def tagged_keys(keys: tuple[Any, ...] | None, lora_name: str | None, lora_path: str) -> tuple[Any, ...] | None:
    """Return the keys of a block tagged with their kinds, as vLLM hashes them since 0.33; on the wire they are
    untagged.
    """
    if keys is None:
        return None
    kinds: list[Any] = []
    for place, key in enumerate(keys):
        if isinstance(key, (tuple, list)):
            kinds.append(("mm", *key))
        elif not place and key == lora_name:
            kinds.append(("lora", key, lora_path))
        else:
            kinds.append(("cache_salt", key))
    return tuple(kinds)


class VllmHasher:
    """Names blocks as vLLM does; a `BlockHasher`.

    Args:
        version: release of vLLM.
        algorithm: one of `ALGORITHMS`.
        seed: a string, as PYTHONHASHSEED; None if that is not set.
        keys: the extra keys that the request hashes with its tokens; None if there are none.
        lookahead: number of following tokens that a name also covers, as with a draft model; 0 for none.

    Raises:
        ValueError: the version or the algorithm is unknown, or the seed is missing and the release has no fixed one.

    Attributes:
        algorithm: as given.
        seed: as given, or the fixed seed of the release.
        none_hash: the parent digest of a root.
        signed: names are signed.
        lookahead: as given.
    """

    __slots__ = (
        "_begins",
        "_dump",
        "_form",
        "_given",
        "_hash",
        "_hashed",
        "_keys",
        "_naming",
        "_release",
        "algorithm",
        "lookahead",
        "none_hash",
        "seed",
        "signed",
    )

    def __init__(
        self,
        version: str = "0.33.0",
        algorithm: str = "sha256_cbor",
        seed: str | None = "0",
        keys: ExtraKeys | EventKeys | None = None,
        lookahead: int = 0,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"hash_algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
                f"{did_you_mean(algorithm, ALGORITHMS)}"
            )
        release = vllm_version(version)
        self._naming = version, algorithm, seed
        function, _, form = algorithm.partition("_")
        if seed is None:
            seed = release.fixed_seed if function == "sha256" else None
            if seed is None:
                raise ValueError(
                    f"hash_seed is missing: without one, vLLM {version} has other {algorithm} hashes in each process; "
                    "give a string, as PYTHONHASHSEED"
                )
        elif not isinstance(seed, str) or not seed:
            raise ValueError(f"hash_seed must be a string, as PYTHONHASHSEED is, or None; got {seed!r}")
        self.algorithm, self.seed = algorithm, seed
        self._hashed = _FUNCTIONS[function]
        self._release = release
        self.signed = release.signed_names
        self.lookahead = lookahead
        self._keys = keys
        # Writes a triple; None for plain CBOR.
        self._dump: Callable[[object], bytes] | None = _pickled
        if form:
            text = seed.encode()
            self.none_hash = self._hashed(_head(_TEXT, len(text)) + text).digest()
            self._dump = None if keys is None else _cbor
        else:
            self.none_hash = self._hashed(_pickled(seed)).digest()
        self._form = f">{len(self.none_hash) - 8}x{'q' if self.signed else 'Q'}"  # the name: a digest's last bytes
        # The head of the triple, and the head of its digest, which is as long as NONE_HASH.
        self._begins = _head(_ARRAY, 3) + _head(_BYTES, len(self.none_hash))
        hashed_keys = release.tagged_keys, release.item_offsets, release.lora_by_id
        self._given = (algorithm, self.none_hash, self.signed, None if keys is None else hashed_keys, keys, lookahead)
        self._hash = hash(self._given)

    def keyed(self, keys: ExtraKeys | EventKeys | None) -> VllmHasher:
        """Return the hasher of the same engine for a request with these keys."""
        return VllmHasher(*self._naming, keys, self.lookahead)

    def looking_ahead(self, lookahead: int) -> VllmHasher:
        """Return the hasher of an engine with a draft model, whose names also cover the next `lookahead` tokens."""
        return self if lookahead == self.lookahead else VllmHasher(*self._naming, self._keys, lookahead)

    def of_event(self, extra: EventExtra, position: int) -> VllmHasher:
        """Return the hasher for the blocks of an event, from the keys that it carries (`BlockHasher.of_event`)."""
        blocks = tuple(None if keys is None else tuple(map(_hashable, keys)) for keys in block_keys(extra))
        return self.keyed(EventKeys(blocks, position, extra.get("lora_name"), extra.get("lora_path") or ""))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VllmHasher) and self._given == other._given

    def __hash__(self) -> int:
        return self._hash

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:
        """Digest complete blocks; see `BlockHasher.digests`. A block is complete once all tokens that its name covers
        exist.
        """
        if self.lookahead:
            return self._digests_ahead(tokens, block_size, position, parent)
        before = self.none_hash if parent is None else parent
        hashed, out, release = self._hashed, [], self._release
        ends = range(block_size, len(tokens) + 1, block_size)
        if self._dump is not None:
            for place, end in enumerate(ends, position):
                keys = None
                if self._keys is not None:
                    keys = self._keys.of_block(place, block_size, tagged=release.tagged_keys)
                    keys = release.untagged(keys, self._keys.lora_name)
                before = hashed(self._dump((before, tuple(tokens[end - block_size : end]), keys))).digest()
                out.append(before)
            return out
        begins, head, least = self._begins, _head_of(block_size), min(tokens, default=0)
        for end in ends:
            before = hashed(begins + before + head + _encoded(tokens[end - block_size : end], least) + _NULL).digest()
            out.append(before)
        return out

    def digests_of_runs(self, ids: Sequence[int], times: int, blocks: int, block_size: int) -> list[bytes] | None:
        """Return the `digests` from the root of tokens that repeat, as in a trace; None if only `digests` can do it.

        Args:
            ids: the tokens.
            times: number of blocks that each token fills.
            blocks: number of leading blocks to digest.
            block_size: tokens per block.
        """
        if self._dump is not None or self.lookahead:
            return None
        out: list[bytes] = []
        before, hashed, begins = self.none_hash, self._hashed, self._begins
        head = _head_of(block_size)
        for token in ids[: -(-blocks // times)]:
            own = head + _TOKENS[token] * block_size + _NULL
            for _ in range(min(times, blocks - len(out))):
                before = hashed(begins + before + own).digest()
                out.append(before)
        return out

    def _digests_ahead(
        self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None
    ) -> list[bytes]:
        """Return the `digests` of triples whose third item is (extra keys or None, the next tokens...)."""
        before, ahead = self.none_hash if parent is None else parent, self.lookahead
        hashed, out, release, request_keys = self._hashed, [], self._release, self._keys
        head, third = _head_of(block_size), _head_of(1 + ahead) + _NULL
        for place, end in enumerate(range(block_size, len(tokens) + 1 - ahead, block_size), position):
            block, after = tokens[end - block_size : end], tokens[end : end + ahead]
            if self._dump is None:
                own = head + _encoded(block, min(block)) + third + _encoded(after, min(after))
                before = hashed(self._begins + before + own).digest()
            else:
                keys = None
                if request_keys is not None:
                    keys = request_keys.of_block(place, block_size, tagged=release.tagged_keys, lookahead=ahead)
                before = hashed(self._dump((before, tuple(block), (keys, *after)))).digest()
            out.append(before)
        return out

    def name(self, digest: bytes) -> int:
        """Return the last 64 bits of a digest: signed in 0.9, else unsigned."""
        return int.from_bytes(digest[-8:], "big", signed=self.signed)

    def names(self, digests: Sequence[bytes]) -> list[int]:
        """Return the `name` of each digest."""
        return [name for (name,) in iter_unpack(self._form, b"".join(digests))]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


# ------------------------------------------------------------------------------------------------- canonical CBOR

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0, 1, 2, 3, 4  # major types
_NULL: Final = b"\xf6"
_SIZES: Final = (1, 1, 2, 4, 4, 8, 8, 8, 8)  # encoded length of an argument, by its length in bytes


def _head(major: int, value: int) -> bytes:
    """Encode a major type and its argument in the fewest bytes."""
    first = major << 5
    if value < 24:
        return bytes((first | value,))
    size = _SIZES[(value.bit_length() + 7) // 8]
    return bytes((first | 23 + size.bit_length(),)) + value.to_bytes(size, "big")


@lru_cache(maxsize=64)
def _head_of(count: int) -> bytes:
    """Return the head of an array of `count` items."""
    return _head(_ARRAY, count)


_FULL_HEAD: Final = _head(_UNSIGNED, 2**32 - 1)[:1]


class _Tokens(dict[int, bytes]):
    """Token ids as CBOR; ids that a vocabulary can have are kept."""

    KEPT: Final = 2**18

    def __missing__(self, token: int) -> bytes:
        if self.KEPT <= token < 2**32:  # ids of generated tokens
            return _FULL_HEAD + token.to_bytes(4, "big")
        encoded = _head(_UNSIGNED, token)
        if token < self.KEPT:
            self[token] = encoded
        return encoded


_TOKENS: Final = _Tokens()


class _Heads(dict[int, bytes]):
    """The CBOR bytes before the lower two bytes of a token id from 256 on, by its higher two bytes."""

    def __missing__(self, high: int) -> bytes:
        head = self[high] = _head(_UNSIGNED, max(high << 16, 256))[:-2]
        return head


_HEADS: Final = _Heads()


@lru_cache(maxsize=64)
def _packer(count: int) -> tuple[Callable[..., bytes], Callable[[bytes], tuple[Any, ...]]]:
    """Return two functions: write `count` ids as words; split each word into a number (high half) and two bytes."""
    return Struct(f">{count}I").pack, Struct(">" + "H2s" * count).unpack


def _encoded(tokens: Sequence[int], least: int) -> bytes:
    """Encode token ids as CBOR, one after the other.

    Most blocks avoid a look at each id. One repeated id, as Dynamo's trace loader makes it, is encoded once. Ids from
    2**16 on, as engines generate them, are a head and four bytes each. Ids from 256 on end in their lower two bytes.

    Args:
        tokens: the ids of one block.
        least: a lower bound of the ids.
    """
    last, count = tokens[-1], len(tokens)
    if last == tokens[0] and tokens.count(last) == count:
        return _TOKENS[last] * count
    if least < 2**8:
        least = min(tokens)
    if least >= 2**8 and max(tokens) < 2**32:
        write, split = _packer(count)
        words = write(*tokens)
        if least < 2**16:
            parts = [*split(words)]
            parts[::2] = map(_HEADS.__getitem__, parts[::2])
            return b"".join(parts)
        out = bytearray(5 * count)
        out[::5] = _FULL_HEAD * count
        for place in range(4):
            out[place + 1 :: 5] = words[place::4]
        return bytes(out)
    return b"".join(map(_TOKENS.__getitem__, tokens))


def _cbor(value: object) -> bytes:
    """Encode a value that vLLM hashes in canonical CBOR: integers, texts, bytes, None, and tuples of these."""
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    if isinstance(value, int):
        return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
    if value is None:
        return _NULL
    assert isinstance(value, tuple)
    return _head(_ARRAY, len(value)) + b"".join(map(_cbor, value))


def _hashable(key: object) -> object:
    return tuple(key) if isinstance(key, list) else key
