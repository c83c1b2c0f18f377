"""The blocks of one request, with names that an engine makes by its own hash of tokens.

One subject: names of a request's blocks, from its tokens to the digests of its events.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from pytest_kvmock.values.events import BlockTokens, Stored
from pytest_kvmock.values.hashed_blocks import HashedBlocks, own_blocks
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, keys_looked_at, names_blocks
from pytest_kvmock.values.tokens import (
    GrowingTokens,
    Prompt,
    TokenRows,
    keyed_block_hashes,
    sequence_hashes,
    windows_of,
)

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra, LoraIds

# Theory of operation
#
# vLLM and SGLang chain a cryptographic digest from block to block, and publish 64 bits of it. So a chain is extended
# from the digest, not from the name. A hash-only prompt (from a trace) has no tokens to digest. Its blocks have
# Dynamo's names on every engine, chained from these hashes.

_U64: Final = 2**64 - 1


class BlockHasher(Protocol):
    """Names blocks for one engine. It is hashable, and hashers that give the same names are equal.

    Attributes:
        signed: whether names are signed 64-bit integers.
    """

    @property
    def signed(self) -> bool:
        """Whether names are signed."""

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:
        """Return the chained digest of each complete block of these tokens.

        Args:
            tokens: token ids; an incomplete last block is left out.
            block_size: tokens a block.
            position: number of blocks before the first one.
            parent: digest of the block before the first; None for a root.
        """

    def name(self, digest: bytes) -> int:
        """Return the part of a digest that the engine publishes."""

    def looking_ahead(self, lookahead: int) -> BlockHasher:
        """Return the hasher of the same engine whose names also cover `lookahead` of the next tokens."""

    def of_event(self, extra: EventExtra, position: int) -> BlockHasher:
        """Return the hasher for the blocks of an event whose request carried keys in addition to tokens.

        Args:
            extra: the extra data of the event.
            position: position of its first block, which will be passed to `digests`.
        """


class HashedTokens:
    """The tokens of one request, and the names of its complete blocks. It grows at the end.

    Args:
        prompt: tokens, or hashes.
        block_size: tokens a block.
        hasher: names the blocks; made for the request's LoRA, salt or namespace, if any. None: the blocks have no
            names, because nothing is shared.
        rng: source of the local hashes of generated blocks if token values are unknown.

    Raises:
        ValueError: the prompt is empty, or its hashes do not fit the block size.

    Attributes:
        block_size: tokens a block.
        num_prompt_tokens: length of the prompt.
        num_tokens: tokens so far.
        names: name of each complete block, as the engine publishes it; read-only.
        keys: keys of the prompt in addition to its tokens; None if there are none.
    """

    __slots__ = (
        "_digests",
        "_grown",
        "_hasher",
        "_last",
        "_local",
        "_prompt",
        "_rng",
        "_tokens",
        "block_size",
        "keys",
        "names",
        "num_prompt_tokens",
        "num_tokens",
    )

    def __init__(self, prompt: Prompt, block_size: int, hasher: BlockHasher | None, rng: Random) -> None:
        self.block_size = block_size
        self.num_prompt_tokens = self.num_tokens = prompt.length(block_size)
        if not self.num_tokens:
            raise ValueError("the prompt is empty; a request needs at least one token")
        self._hasher, self._rng = hasher, rng
        self.keys = prompt.keys
        self._tokens = GrowingTokens(prompt) if prompt.has_tokens else None
        self._grown = False  # until it grows it shares the prompt's lists; most requests need no copy
        self.names: list[int] = []
        self._prompt = prompt
        self._local: list[int] | None = None if hasher is not None else []
        self._digests: list[bytes] | None = []  # one for each block, if tokens are known; None: computed on demand
        self._last: bytes | int | None = None
        if hasher is not None:
            made = prompt.kept((block_size, hasher), lambda: _named(prompt, block_size, hasher))
            self.names, self._digests, self._last = made

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """All tokens so far; None if only the prompt's hashes are known."""
        return None if self._tokens is None else self._tokens.whole

    def cut(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens from `start` to `end`, which must be known."""
        assert self._tokens is not None
        return self._tokens.cut(start, end)

    def rows(self, start: int, end: int, size: int) -> TokenRows | None:
        """Return the tokens of blocks `start` to `end` for this block size; None if only hashes are known."""
        return None if self._tokens is None else self._tokens.rows(start, end, size)

    @property
    def local_hashes(self) -> list[int]:
        """The router's hash of each complete block; read-only. Hashes are computed on demand."""
        local, size = self._local, self.block_size
        if local is None:
            local = self._prompt.block_hashes(size)
            local = self._local = local.copy() if self._grown else local
        if self._tokens is not None and len(local) < len(self.names):
            start, end = len(local), len(self.names)
            local += keyed_block_hashes(self._tokens.cut(start * size, end * size), size, self.keys, start)
        return local

    def append(self, token: int) -> None:
        """Add one token; a block that it completes is named at once."""
        self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; blocks that they complete are named at once."""
        size, hasher = self.block_size, self._hasher
        if not self._grown:
            self._unshare()
        first = self.num_tokens // size
        self.num_tokens += len(tokens)
        if self._tokens is not None:
            self._tokens.output.extend(tokens)
        count = self.num_tokens // size - first
        if not count or hasher is None:
            return
        before = self._last
        if self._tokens is None:
            assert not isinstance(before, bytes)
            local = [self._rng.getrandbits(64) for _ in range(count)]
            self.local_hashes.extend(local)
            chain = sequence_hashes(local, parent=before)
            names = _as_published(chain, hasher)
            self._last = chain[-1]
        else:
            assert not isinstance(before, int)
            blocks = self._tokens.cut(first * size, (first + count) * size)
            digests = hasher.digests(blocks, size, first, before)
            names = _names(digests, hasher)
            self._last = digests[-1]
            self._made_digests().extend(digests)
        self.names += names

    def _unshare(self) -> None:
        """Replace the prompt's lists by copies."""
        self._grown = True
        self.names, self._digests = self.names.copy(), self._made_digests().copy()
        self._local = self._local and self._local.copy()

    def block_tokens(self, start: int, end: int) -> Sequence[tuple[Any, ...]] | None:
        """Return the token ids of the complete blocks from `start` to `end` for an event; None if unknown."""
        rows = self.rows(start, end, self.block_size)
        if rows is None or self.keys is not None or self._hasher is None:
            return rows
        parent = self.names[start - 1] if start else None
        names, local_hashes = tuple(self.names[start:end]), tuple(self.local_hashes[start:end])
        digests = self._made_digests()[start:end]
        return HashedBlocks(rows, parent, names, local_hashes, digests=digests, hasher=self._hasher)

    def release(self) -> None:
        """Compact the data of a finished request; other data is computed again on demand."""
        self.names = cast(
            "list[int]", array("q" if self._hasher is not None and self._hasher.signed else "Q", self.names)
        )
        if self._tokens is not None and self._hasher is not None:
            self._local = self._digests = None
        self._prompt.release()

    def _made_digests(self) -> list[bytes]:
        """Return the digest of each complete block; tokens must be known."""
        if self._digests is None:
            tokens, hasher, size = self._tokens, self._hasher, self.block_size
            assert tokens is not None
            assert hasher is not None
            self._digests = hasher.digests(tokens.cut(0, len(self.names) * size), size, 0, None)
        return self._digests

    def stored(self, start: int, end: int) -> tuple[Stored, BlockTokens | None]:
        """Return the Stored of the complete blocks from `start` to `end`, and its token ids."""
        tokens = self.block_tokens(start, end)
        if type(tokens) is HashedBlocks:
            return Stored(tokens.parent, tokens.names, tokens.local_hashes), tokens
        parent = self.names[start - 1] if start else None
        return Stored(parent, tuple(self.names[start:end]), tuple(self.local_hashes[start:end])), tokens

    def carried(self, start: int, end: int, lora_ids: LoraIds | None = None) -> dict[str, Any] | None:
        """Return the extra data of an event that stores the blocks from `start` to `end`; None if there is none.

        See `PromptKeys.carried`.
        """
        return None if self.keys is None else self.keys.carried(start, end, self.block_size, lora_ids) or None


class HashChain:
    """Computes the names that a Stored should have, from its tokens and the names before it.

    It belongs to one stream. A name is only 64 bits of a digest, so it keeps the digest of each name in the stream.

    Args:
        hasher: names the blocks of this stream.
        unit: tokens per digest, if that is less than a block; None: a block.
    """

    __slots__ = ("_digests", "_hasher", "_unit")

    def __init__(self, hasher: BlockHasher, unit: int | None = None) -> None:
        self._hasher = hasher
        self._unit = unit
        self._digests: dict[int, bytes] = {}

    def forget(self, kept: Collection[int]) -> None:
        """Drop the digests of all names except these. A block stored after a dropped name has no expected name."""
        self._digests = {name: digest for name, digest in self._digests.items() if name in kept}

    def expected(
        self,
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,
        extra: EventExtra | None = None,
    ) -> Sequence[int] | None:
        """Return the names that the blocks of a Stored should have.

        Args:
            data: the Stored.
            token_ids: token ids of each block, empty if they are invalid; None if there are none, and names are
                Dynamo's.
            block_size: tokens a block; None if unknown.
            extra: the extra data of the event.

        Returns:
            None if they cannot be known.
        """
        parent = data.parent_hash
        if token_ids is None:
            return _as_published(
                sequence_hashes(data.tokens_hashes, parent=None if parent is None else parent & _U64), self._hasher
            )
        before = None if parent is None else self._digests.get(parent)
        if not token_ids or block_size is None or (parent is not None and before is None):
            return None
        own = own_blocks(data, token_ids, block_size, extra)
        if own is not None and own.hasher == self._hasher:
            self._digests.update(zip(own.names, own.digests, strict=True))
            return own.names
        made = self._made(token_ids, block_size, before, extra)
        if made is None:
            return None
        digests, names = made
        self._digests.update(zip(names, digests, strict=True))
        return names

    def name(
        self,
        parent: int | None,
        local: int,
        tokens: Sequence[int] | None,
        block_size: int | None,
        extra: EventExtra | None = None,
    ) -> int | None:
        """Return the name of one block below a parent.

        Args:
            parent: the block before it; None for a root.
            local: its local hash.
            tokens: its token ids; None if none came with the event, and names are Dynamo's.
            block_size: tokens a block; None if unknown.
            extra: the extra data of an event with only this block.

        Returns:
            None if it cannot be known.
        """
        if tokens is None:
            parent = None if parent is None else parent & _U64
            return _as_published(sequence_hashes((local,), parent=parent), self._hasher)[0]
        before = None if parent is None else self._digests.get(parent)
        if not tokens or block_size is None or (parent is not None and before is None):
            return None
        made = self._made((tokens,), block_size, before, extra)
        return None if made is None else made[1][0]

    def _made(
        self, token_ids: BlockTokens, block_size: int, before: bytes | None, extra: EventExtra | None
    ) -> tuple[list[bytes], list[int]] | None:
        """Return digests and names of the blocks after one digest; None if they cannot be computed."""
        made = event_digests(self._hasher, token_ids, block_size, before, extra, unit=self._unit)
        return None if made is None else (made[0], _names(*made))


def event_digests(
    hasher: BlockHasher,
    token_ids: BlockTokens,
    block_size: int,
    before: bytes | None,
    extra: EventExtra | None = None,
    *,
    unit: int | None = None,
    position: int | None = None,
) -> tuple[list[bytes], BlockHasher] | None:
    """Compute the digests of an event's blocks from its data; return them with the hasher that names them.

    Args:
        hasher: the hasher of its engine.
        token_ids: token ids of each block, as received.
        block_size: tokens a block.
        before: digest of the block before the first one; None for a root.
        extra: the extra data of the event.
        unit: tokens per digest, if that is less than a block; None: a block.
        position: number of blocks before the first one; None if unknown.

    Returns:
        None if they cannot be known.
    """
    windows, ahead = windows_of(token_ids, None if extra is None else extra.get(LOOKAHEAD))
    step = 1 if unit is None or block_size % unit else block_size // unit
    if position is None:
        position = 0 if before is None else 1
    hasher = hasher.looking_ahead(ahead)
    if extra is not None and names_blocks(extra):
        if step > 1:
            return None  # events have the data that is hashed with the tokens for each block, not for each unit
        hasher = hasher.of_event(keys_looked_at(extra, block_size, ahead) if ahead else extra, position)
    if not ahead:
        return hasher.digests(list(chain.from_iterable(windows)), block_size // step, position, before)[
            step - 1 :: step
        ], hasher
    digests: list[bytes] = []
    for place, window in enumerate(windows, position):
        digests += hasher.digests(window, block_size // step, place, before)[step - 1 :: step]
        before = digests[-1]
    return digests, hasher


def _named(prompt: Prompt, block_size: int, hasher: BlockHasher) -> tuple[list[int], list[bytes], bytes | int | None]:
    """Return the names of a prompt's complete blocks, their digests if it has tokens, and the next block's parent."""
    if not prompt.has_tokens:
        chain = prompt.sequence_hashes(block_size)
        return _as_published(chain, hasher), [], chain[-1] if chain else None
    digests, runs = None, prompt.repeats(block_size)
    if runs is not None and (of_runs := getattr(hasher, "digests_of_runs", None)) is not None:
        digests = of_runs(*runs, prompt.length(block_size) // block_size, block_size)
    if digests is None:
        assert prompt.tokens is not None
        digests = hasher.digests(prompt.tokens, block_size, 0, None)
    return _names(digests, hasher), digests, digests[-1] if digests else None


def _names(digests: list[bytes], hasher: BlockHasher) -> list[int]:
    """Return the names of digests, in one call if the hasher has one."""
    of_all: Callable[[Sequence[bytes]], list[int]] | None = getattr(hasher, "names", None)
    return list(map(hasher.name, digests)) if of_all is None else of_all(digests)


def _as_published(chain: list[int], hasher: BlockHasher) -> list[int]:
    """Return Dynamo's unsigned sequence hashes in the form in which the engine publishes hashes."""
    return [name - 2**64 if name >= 2**63 else name for name in chain] if hasher.signed else chain
