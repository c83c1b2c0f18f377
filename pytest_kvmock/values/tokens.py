"""Hashes of tokens: local block hashes, sequence hashes, positional lineage hashes, and prompts with them.

One subject: the three names of a block and their uses (Dynamo, `lib/tokens`):

* the *local hash* covers only the block's tokens; a router's query is a list of them; * the *sequence hash* chains it
to all blocks before it; events name blocks by it; * the *positional lineage hash* (PLH) is 128 bits of position, parent
and own fragment; block managers key on it.

All hashing is XXH3-64 with seed 1337, the seed that Dynamo's mocker and router share.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NoReturn, SupportsIndex, TypeAlias, TypeVar, overload

from xxhash import xxh3_64_intdigest

from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.plh import LineageHashes
from pytest_kvmock.values.prompt_keys import MultimodalItem, PromptKeys

T = TypeVar("T")

TokenIds: TypeAlias = Sequence[int]
"""Token ids, each an integer from 0 to 2**32 - 1: a list, tuple, range, bytes or array of them."""

SEED: Final = 1337
"""Salt of block hashes and seed of their chain, in the mocker and in the router alike."""

_U64: Final = 2**64 - 1
_TOKEN: Final = 2**32 - 1
_pack_pair: Final = struct.Struct("<QQ").pack


# ----------------------------------------------------------------------------------------------- tokens to bytes


def check_block_size(block_size: int) -> int:
    """Return `block_size`, if it is valid.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    return check_integer("block_size", block_size, 1, " (tokens a block)", wrong_type=TypeError)


def _token_bytes(tokens: TokenIds) -> bytes:  # noqa: RET503 - _raise_for_token does not return
    """Return `tokens` as little-endian u32s; the error names the first invalid token."""
    if isinstance(tokens, (bytes, bytearray)) or hasattr(tokens, "__next__"):
        # array() would read bytes as raw memory; an iterator could not be read again for the error
        tokens = list(tokens)
    with suppress(TypeError, OverflowError, ValueError):
        words = array("I", tokens)
        if sys.byteorder == "big":
            words.byteswap()
        return words.tobytes()
    _raise_for_token(tokens)  # outside the `with`, so that array's own error is not shown above it


def _raise_for_token(tokens: TokenIds) -> NoReturn:
    allowed = "a token id is an integer from 0 to 4294967295"
    if isinstance(tokens, str):
        raise TypeError(f"tokens are token ids, not text: {allowed}, got the string {tokens[:40]!r}")
    if not isinstance(tokens, Iterable):
        hint = "; a request of a trace is served by its request.prompt()" if hasattr(tokens, "hash_ids") else ""
        raise TypeError(f"tokens must be a sequence of token ids: {allowed}, got {tokens!r}{hint}")
    for position, token in enumerate(tokens):
        try:
            array("I", (token,))
        except OverflowError:
            raise ValueError(f"token {position} is {token!r}: {allowed}") from None
        except TypeError:
            raise TypeError(f"token {position} is {token!r} ({type(token).__name__}): {allowed}") from None
    raise TypeError(f"tokens cannot be read as a sequence of token ids: {allowed}")  # pragma: no cover


# ---------------------------------------------------------------------------------------------------- hashes


@lru_cache(maxsize=256)
def _splitter(width: int, count: int) -> struct.Struct:
    return struct.Struct(f"{width}s" * count)


def hash_seed(lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """Return the seed of local hashes for a LoRA adapter or a cache namespace; 1337 without either.

    Both are *added* to the seed, as XXH3-64 of the name with seed 0 and 1 (Dynamo, `compute_block_hash_for_seq`);
    an empty name counts as no name.
    """
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & _U64


def block_hashes(
    tokens: TokenIds,
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_namespace: str | None = None,
    mm_hashes: Sequence[Sequence[int] | None] | None = None,
    eagle: bool = False,
    lookahead: int = 0,
) -> list[int]:
    """Return the local hashes of the full blocks of `tokens`, one u64 per block; a partial tail has none.

    Bit-exact with `compute_block_hash_for_seq` of ai-dynamo-runtime; checked against 1.2.1 and 1.6.1.

    Args:
        tokens: token ids.
        block_size: tokens per block, at least 1.
        lora_name: name of the adapter; it changes the seed. None or empty for none.
        cache_namespace: a tenant's namespace; it changes the seed too.
        mm_hashes: per block, the u64 hashes of its multimodal objects (None or empty for none), in any order. The list
            may be shorter or longer than the blocks.
        eagle: the same as a lookahead of 1: windows of `block_size + 1` tokens, as in EAGLE's bigram caches.
        lookahead: number of tokens that a hashed window has after its block; there is one window every `block_size`
            tokens. A block has a hash once these next tokens are there too.

    Raises:
        TypeError: a token, or the block size, is not an integer.
        ValueError: a token is below 0 or above 2**32 - 1, the block size is below 1, the lookahead is below 0 or, with
            eagle, not 1, or a multimodal hash is not a u64.
    """
    check_block_size(block_size)
    if lookahead:
        check_integer("lookahead", lookahead, 0, " tokens")
        if eagle and lookahead != 1:
            raise ValueError(f"eagle is a lookahead of 1; got lookahead={lookahead}, too")
    elif eagle:
        lookahead = 1
    seed = hash_seed(lora_name, cache_namespace)
    data = _token_bytes(tokens)
    width = 4 * block_size
    if not lookahead and not mm_hashes:
        return _packed_hashes(data, block_size, seed)
    if lookahead:
        window = width + 4 * lookahead
        chunks: Sequence[bytes] = [data[at : at + window] for at in range(0, len(data) + 1 - window, width)]
    else:
        chunks = _splitter(width, len(data) // width).unpack_from(data)
    if mm_hashes:
        chunks = [*map(_with_objects, chunks, mm_hashes), *chunks[len(mm_hashes) :]]
    return list(map(xxh3_64_intdigest, chunks, repeat(seed)))


def _packed_hashes(data: bytes, block_size: int, seed: int = SEED) -> list[int]:
    """Return the `block_hashes` of tokens that are already packed as words."""
    chunks = _splitter(4 * block_size, len(data) // (4 * block_size)).unpack_from(data)
    return list(map(xxh3_64_intdigest, chunks, repeat(seed)))


def keyed_block_hashes(
    tokens: TokenIds, block_size: int, keys: PromptKeys | None, position: int = 0, lookahead: int = 0
) -> list[int]:
    """Return the local hashes of full blocks with the keys of their prompt.

    Args:
        tokens: token ids of these blocks, plus the tokens that the hashes look ahead.
        block_size: tokens per block.
        keys: the keys that the prompt carries; None if there are none.
        position: number of blocks before them in the prompt.
        lookahead: see `block_hashes`.
    """
    if keys is None:
        return block_hashes(tokens, block_size, lookahead=lookahead)
    mm_hashes = keys.mm_hashes(position, position + len(tokens) // block_size, block_size)
    return block_hashes(
        tokens,
        block_size,
        lora_name=keys.lora_name,
        cache_namespace=keys.cache_salt,
        mm_hashes=mm_hashes,
        lookahead=lookahead,
    )


def windows_of(token_ids: Sequence[Sequence[int]], lookahead: object = None) -> tuple[Sequence[Sequence[int]], int]:
    """Return the tokens that block names cover, by their event: the block's tokens and the next ones.

    Args:
        token_ids: the tokens of each block, or pairs of neighbours, as in SGLang with a draft model.
        lookahead: for each block, the tokens after it (`LOOKAHEAD`); None, or not one list per block: there are none.

    Returns:
        The covered tokens of each block, and how many of them belong to the next block.
    """
    if token_ids and token_ids[0] and isinstance(token_ids[0][0], (tuple, list)):
        pairs: Any = token_ids
        return [(*(first for first, _ in page), page[-1][1]) for page in pairs], 1
    if not lookahead or not isinstance(lookahead, (tuple, list)) or len(lookahead) != len(token_ids):
        return token_ids, 0
    return [(*own, *after) for own, after in zip(token_ids, lookahead, strict=True)], len(lookahead[0])


def _with_objects(chunk: bytes, hashes: Sequence[int] | None) -> bytes:
    if not hashes:
        return chunk
    try:
        return chunk + struct.pack(f"<{len(hashes)}Q", *sorted(hashes))
    except (struct.error, TypeError):
        raise ValueError(f"mm_hashes are integers from 0 to 2**64 - 1, got {list(hashes)!r}") from None


def sequence_hashes(block_hashes: Iterable[int], *, parent: int | None = None) -> list[int]:
    """Chain local hashes to sequence hashes: the first is the local hash itself, every other hashes (parent, local).

    Args:
        block_hashes: local hashes, u64, in order from the root or from the block after `parent`.
        parent: sequence hash of the block before the first one.

    Raises:
        ValueError: a chained hash is not a u64.
    """
    digest, pack, seed = xxh3_64_intdigest, _pack_pair, SEED
    out: list[int] = []
    append = out.append
    local = None
    try:
        for local in block_hashes:
            parent = local if parent is None else digest(pack(parent, local), seed)
            append(parent)
    except struct.error:
        _raise_for_hash(local, parent, len(out))
    return out


def _raise_for_hash(local: object, parent: object, position: int) -> NoReturn:
    """Raise a ValueError that names the hash of an unpackable pair that is not a u64."""
    allowed = "a hash is an integer from 0 to 2**64 - 1"
    before = f"hash {position - 1}" if position else "the parent"
    for name, value in ((f"hash {position}", local), (before, parent)):
        if not isinstance(value, int) or not 0 <= value <= _U64:
            raise ValueError(f"{name} is {value!r}: {allowed}") from None
    raise AssertionError("unreachable: both hashes can be packed")  # pragma: no cover


def _check_locals(hashes: Sequence[int]) -> None:
    """Raise a ValueError that names the first value that is not a local hash, if there is one."""
    if {int}.issuperset(map(type, hashes)):
        with suppress(OverflowError):
            array("Q", hashes)
            return
    for position, value in enumerate(hashes):
        if not isinstance(value, int) or not 0 <= value <= _U64:
            raise ValueError(f"hash {position} is {value!r}: a local hash is an integer from 0 to 2**64 - 1")


def chained_hash(parent: int | None, local: int) -> int:
    """Return the sequence hash of a block with the local hash `local` after the block `parent` (None for a root)."""
    return local if parent is None else xxh3_64_intdigest(_pack_pair(parent, local), SEED)


# ---------------------------------------------------------------------------------------------------- prompts


class TokenRuns:
    """Token ids that are made on demand: the low 32 bits of each id, repeated `times` times (Dynamo's trace loader).

    Args:
        ids: integers from 0.
        times: number of repetitions of each id, at least 1.
        length: number of tokens; the last repetitions may be cut.
    """

    __slots__ = ("_ids", "_length", "_times")

    def __init__(self, ids: Sequence[int], times: int, length: int) -> None:
        self._ids = ids
        self._times = times
        self._length = length

    def __len__(self) -> int:
        return self._length

    def tokens(self) -> tuple[int, ...]:
        """Make the token ids."""
        return self.cut(0, self._length)

    def repeats(self, block_size: int) -> tuple[Sequence[int], int] | None:
        """Return the ids as tokens, and the number of blocks that each fills; None if block ends and id ends differ."""
        blocks, over = divmod(self._times, block_size)
        return None if over else ([each & _TOKEN for each in self._ids], blocks)

    def cut(self, start: int, end: int) -> tuple[int, ...]:
        """Make the token ids from one place to another, within the length."""
        times, made = self._times, []
        for place in range(start // times, -(-end // times)):
            made += [self._ids[place] & _TOKEN] * (min(end, (place + 1) * times) - max(start, place * times))
        return tuple(made)

    def block_hashes(self, block_size: int) -> list[int]:
        """Return the local hashes of the full blocks; if block ends and id ends agree, each id is hashed once."""
        repeats = self.repeats(block_size)
        if repeats is None:
            return block_hashes(self.tokens(), block_size)
        found: list[int] = []
        for each in repeats[0]:
            found += [_hash_of_run(each, block_size)] * repeats[1]
        del found[self._length // block_size :]
        return found


@lru_cache(maxsize=2**14)
def _hash_of_run(token: int, block_size: int) -> int:
    """Return the local hash of a block that repeats one token."""
    return xxh3_64_intdigest(token.to_bytes(4, "little") * block_size, SEED)


class Prompt:
    """The input of one request: its token ids or only its block hashes, and the keys that it carries.

    Accepted wherever tokens are, and never changed. It hashes its tokens once for worker, index and router: routers
    query with `block_hashes(block_size)`, and Dynamo's engines name blocks by `sequence_hashes(block_size)`.
    `Prompt(hashes=...)` has no tokens: request traces have one id per block, which serves as its local hash.

    Args:
        tokens: token ids.
        hashes: instead of tokens, one local hash (u64) for each full block.
        num_tokens: with `hashes`, the prompt's length in tokens; it may exceed the blocks by a partial tail of less
            than a block. By default there is no tail.
        lora_name: name of its LoRA adapter. This and the next two are part of its blocks' names: prompts that differ in
            them share no block.
        cache_salt: a tenant's salt, or namespace.
        multimodal: the multimodal items in it, each as (identifier, offset, length): the engine's name for it, the
            position of its first token, and the number of its tokens.
        session_id: the session that it belongs to; it travels with events but is not part of block names.
        report_mode: "full": vLLM publishes hits again at each look-up (`kv_cache_report_mode`); other engines have no
            such report. Not part of block names.
        load_tiers: the tiers below its host that vLLM may load from for it, each as a mapping of "medium" and
            "locality" (`kv_load_tiers`); an empty list allows none. Not part of block names.

    Raises:
        TypeError: both or neither of `tokens` and `hashes` are given, or a token is not an integer.
        ValueError: a token or hash is out of range; a text is empty or invalid; an item is invalid or exceeds the
            prompt; or a name, salt or items are given together with `hashes`, which already include them.
    """

    __slots__ = ("_end", "_given", "_kept", "_packed", "_runs", "_tokens", "keys", "num_tokens")

    keys: PromptKeys | None
    """The keys that it carries; None if there are none."""

    num_tokens: int | None
    """Length in tokens; None for hashes without a stated length, which are full blocks of any size."""

    def __init__(
        self,
        tokens: TokenIds | TokenRuns | None = None,
        *,
        hashes: Iterable[int] | None = None,
        num_tokens: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem | tuple[str, int, int]] = (),
        session_id: str | None = None,
        report_mode: str | None = None,
        load_tiers: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        if (tokens is None) == (hashes is None):
            raise TypeError("Prompt takes either tokens or hashes=, one local hash a block")
        self.keys = None
        plain = lora_name is cache_salt is session_id is report_mode is None and multimodal == ()
        if not plain or load_tiers is not None:
            more: dict[str, Any] = {"multimodal": multimodal, "report_mode": report_mode, "load_tiers": load_tiers}
            keys = PromptKeys(lora_name, cache_salt, session_id=session_id, **more)
            self.keys = keys if keys.given else None
        self._kept: dict[Any, Any] = {}
        self._end: tuple[int, int] | None = None  # after `release`: a block size, and the last sequence hash
        self._given: list[int] | None = None
        self._packed: bytes | None = None  # the tokens as words, until they are hashed
        self._runs: TokenRuns | None = None  # the source of tokens, if they can be made again
        self._tokens: tuple[int, ...] | None = None
        if tokens is not None:
            if num_tokens is not None:
                raise TypeError("num_tokens goes with hashes=; tokens have a length of their own")
            if isinstance(tokens, TokenRuns):
                self._runs = tokens
            else:
                if hasattr(tokens, "__next__"):
                    tokens = tuple(tokens)
                self._packed = _token_bytes(tokens)
                self._tokens = tuple(tokens)
            self.num_tokens = len(tokens)
            if self.keys is not None:
                self.keys.check_fits(self.num_tokens)
            return
        assert hashes is not None
        if self.keys is not None and self.keys.naming:
            raise ValueError(
                f"a prompt of hashes= cannot take {' and '.join(self.keys.naming)}: the hashes include that already; "
                "give tokens, or leave it out"
            )
        self._given = list(hashes)
        _check_locals(self._given)
        if num_tokens is not None and num_tokens < len(self._given):
            raise ValueError(f"num_tokens={num_tokens} is less than the {len(self._given)} blocks given by hashes=")
        self.num_tokens = num_tokens

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The token ids; None if only hashes are known."""
        if self._tokens is None and self._runs is not None:
            self._tokens = self._runs.tokens()
        return self._tokens

    @property
    def has_tokens(self) -> bool:
        """Whether its token ids are known."""
        return self._given is None

    @property
    def lora_name(self) -> str | None:
        """The name of its LoRA adapter; None if there is none."""
        return None if self.keys is None else self.keys.lora_name

    @property
    def cache_salt(self) -> str | None:
        """Its tenant's salt or namespace; None if there is none."""
        return None if self.keys is None else self.keys.cache_salt

    @property
    def multimodal(self) -> tuple[MultimodalItem, ...]:
        """Its multimodal items, in the order of their offsets."""
        return () if self.keys is None else self.keys.multimodal

    @property
    def session_id(self) -> str | None:
        """Its session; None if there is none."""
        return None if self.keys is None else self.keys.session_id

    @classmethod
    def of(cls, tokens: TokenIds | Prompt) -> Prompt:
        """Return `tokens` itself if it is a prompt, else a prompt of these tokens."""
        return tokens if isinstance(tokens, Prompt) else cls(tokens)

    def with_keys(self, keys: PromptKeys | None) -> Prompt:
        """Return a prompt with the same tokens or hashes and these keys instead.

        Raises:
            ValueError: as the constructor.
        """
        if keys == self.keys:
            return self
        given = {} if keys is None else keys.given
        given.pop("lora_path", None)
        if self._given is not None:
            return Prompt(hashes=self._given, num_tokens=self.num_tokens, **given)
        prompt = Prompt(self.tokens, **given)
        prompt.keys = keys
        return prompt

    def followed_by(self, tokens: TokenIds, **keys: Any) -> Prompt:
        """Return this prompt followed by more tokens, with the same keys.

        Args:
            tokens: the tokens to append.
            **keys: keys that replace those of this prompt.

        Raises:
            ValueError: only hashes are known; or as the constructor.
        """
        if self.tokens is None:
            raise ValueError("a prompt of hashes cannot be followed by tokens: it has none of its own")
        given = {} if self.keys is None else self.keys.given
        given.pop("lora_path", None)
        return Prompt((*self.tokens, *tokens), **{**given, **keys})

    def __repr__(self) -> str:
        keys = "" if self.keys is None else "".join(f", {name}={value!r}" for name, value in self.keys.given.items())
        if self._given is not None:
            return f"<Prompt of {len(self._given)} block hashes{keys}>"
        return f"<Prompt of {self.num_tokens} tokens{keys}>"

    def length(self, block_size: int) -> int:
        """Return the prompt's length in tokens for a block size.

        Raises:
            ValueError: `num_tokens` of a prompt of hashes does not fit this block size.
        """
        if self._given is None:
            assert self.num_tokens is not None
            return self.num_tokens
        whole = len(self._given) * block_size
        if self.num_tokens is None:
            return whole
        if not whole <= self.num_tokens < whole + block_size:
            raise ValueError(
                f"a prompt of {len(self._given)} block hashes and num_tokens={self.num_tokens} does not fit "
                f"block_size={block_size}: expected {whole} to {whole + block_size - 1} tokens. The engine's block "
                "size must be the one that the hashes were made with (512 in Mooncake traces): of a test, "
                "@pytest.mark.kvmock(block_size=512, num_blocks=...)"
            )
        return self.num_tokens

    def block_hashes(self, block_size: int, lookahead: int = 0) -> list[int]:
        """Return the local hashes of the full blocks. They are computed once; do not change the list.

        Args:
            block_size: tokens per block.
            lookahead: as in the function `block_hashes`.

        Raises:
            ValueError: `lookahead` is set for a prompt of hashes.
        """
        if not lookahead:
            return self._hashes(block_size).local
        if self.tokens is None:
            raise ValueError("a prompt of hashes has no tokens, and hashes that look ahead are made of tokens")
        tokens = self.tokens
        return self.kept(
            (block_size, lookahead), lambda: keyed_block_hashes(tokens, block_size, self.keys, lookahead=lookahead)
        )

    def sequence_hashes(self, block_size: int) -> list[int]:
        """Return the sequence hashes of the full blocks. They are computed once; do not change the list."""
        return self._hashes(block_size).sequence

    def last_hash(self, block_size: int) -> int | None:
        """Return the sequence hash of the last full block, which is kept after `release`; None if there is none."""
        if self._end is not None and self._end[0] == block_size:
            return self._end[1]
        return next(reversed(self.sequence_hashes(block_size)), None)

    def lineage_hashes(self, block_size: int) -> LineageHashes:
        """Return the lineage hashes of the full blocks, computed once on first use."""
        return self._hashes(block_size).lineage

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value of a key; on first use, `make` makes it. It holds an engine's own hashes."""
        found: T | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found

    def repeats(self, block_size: int) -> tuple[Sequence[int], int] | None:
        """Return `TokenRuns.repeats` for a prompt of a trace without keys; else None."""
        return None if self._runs is None or self.keys is not None else self._runs.repeats(block_size)

    def cut(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens from one place to another; a trace's tokens are made without being kept. Tokens must be
        known.
        """
        if self._tokens is None:
            assert self._runs is not None
            return self._runs.cut(start, end)
        return self._tokens[start:end]

    @property
    def source(self) -> TokenRuns | tuple[int, ...] | None:
        """The source of its tokens, or the tokens; None if only hashes are known."""
        return self._tokens if self._runs is None else self._runs

    def release(self) -> None:
        """Drop the tokens and hashes after the prompt is served if they can be made again, as for a trace."""
        if self._runs is None:
            return
        self._tokens = None
        for key, found in self._kept.items():
            if isinstance(found, _Hashes) and found.ends:
                self._end = key, found.sequence[-1]
        self._kept = {}

    def _hashes(self, block_size: int) -> _Hashes:
        found: _Hashes | None = self._kept.get(block_size)
        if found is None:
            local = self._given
            if local is None and self._runs is not None and self.keys is None:
                local = self._runs.block_hashes(check_block_size(block_size))
            elif local is None:
                assert self.tokens is not None
                if self._packed is not None and self.keys is None:
                    local = _packed_hashes(self._packed, check_block_size(block_size))
                else:
                    local = keyed_block_hashes(self.tokens, block_size, self.keys)
                self._packed = None
            else:
                check_block_size(block_size)
            found = self._kept[block_size] = _Hashes(local)
        return found


class GrowingTokens:
    """The tokens of a prompt and its output. The output is kept separately, because the prompt's tokens may be made
    again.

    Args:
        prompt: a prompt with tokens.

    Attributes:
        output: the tokens after the prompt's.
    """

    __slots__ = ("_prompt", "output")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.output = array("I")

    def release(self) -> None:
        """Drop the prompt's data that can be made again (`Prompt.release`)."""
        self._prompt.release()

    @property
    def whole(self) -> tuple[int, ...]:
        """All tokens so far."""
        tokens = self._prompt.tokens
        assert tokens is not None
        return (*tokens, *self.output) if self.output else tokens

    def cut(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens from one place to another."""
        before = self._prompt.num_tokens
        assert before is not None
        if start >= before:
            return self.output[start - before : end - before]
        if end <= before:
            return self._prompt.cut(start, end)
        return (*self._prompt.cut(start, before), *self.output[: end - before])

    def rows(self, start: int, end: int, size: int) -> TokenRows:
        """Return the tokens of each block of size `size`, from one block to another."""
        before = self._prompt.num_tokens
        assert before is not None
        if end * size <= before:
            return TokenRows(self._prompt, start * size, end - start, size)
        return TokenRows(tuple(self.cut(start * size, end * size)), 0, end - start, size)


class TokenRows(Sequence[tuple[int, ...]]):
    """Token ids of full blocks, one tuple per block, as they travel with events; they are cut on demand.

    Args:
        source: the tokens, or a prompt with tokens.
        start: place of the first block's first token in the source.
        count: number of blocks.
        size: tokens per block.

    Attributes:
        size: as given.
    """

    __slots__ = ("_count", "_source", "_start", "size")

    def __init__(self, source: Prompt | tuple[int, ...], start: int, count: int, size: int) -> None:
        self._source, self._start, self._count, self.size = source, start, count, size

    def _cut(self, start: int, end: int) -> tuple[int, ...]:
        source = self._source
        return source[start:end] if isinstance(source, tuple) else tuple(source.cut(start, end))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        size = self.size
        tokens = self._cut(self._start, self._start + self._count * size)
        return (tokens[at : at + size] for at in range(0, len(tokens), size))

    @overload
    def __getitem__(self, at: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> list[tuple[int, ...]]: ...

    def __getitem__(self, at: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(at, slice):
            return list(self)[at]
        start = self._start + range(self._count)[at] * self.size
        return self._cut(start, start + self.size)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenRows | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(self),)

    @property
    def given(self) -> tuple[Prompt | tuple[int, ...], int, int, int]:
        """The arguments that it was made with."""
        return self._source, self._start, self._count, self.size

    def part(self, start: int, end: int) -> TokenRows:
        """Return the rows of some blocks."""
        return TokenRows(self._source, self._start + start * self.size, end - start, self.size)


class _Hashes:
    """The three parallel lists of hashes of one prompt at one block size; the last two are made on demand."""

    __slots__ = ("_lineage", "_sequence", "local")

    def __init__(self, local: list[int]) -> None:
        self.local = local
        self._sequence: list[int] | None = None
        self._lineage: LineageHashes | None = None

    @property
    def sequence(self) -> list[int]:
        if self._sequence is None:
            self._sequence = sequence_hashes(self.local)
        return self._sequence

    @property
    def ends(self) -> bool:
        return bool(self._sequence)

    @property
    def lineage(self) -> LineageHashes:
        if self._lineage is None:
            self._lineage = LineageHashes(self.sequence)
        return self._lineage
