"""Checks of a single Stored, without memory of the stream: self-parents, hashes, tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvmock.values.events import BlockTokens, RouterEvent, Stored, block_text
from pytest_kvmock.values.hashed_blocks import Chain, own_blocks
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, hash_options, names_blocks, part_of
from pytest_kvmock.values.tokens import TokenRows, block_hashes, chained_hash, sequence_hashes, windows_of

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

HAND_WRITTEN: Final = 2**16
"""Smaller hashes are taken for numbers written by hand; a hash function hardly ever returns one."""

MOST_PARENTS: Final = 2**18
"""Maximum number of tries per stream to find right parents: about a tenth of a second."""


_U64: Final = 2**64 - 1


class DynamoChain:
    """Dynamo's rule: a name is the hash of the parent's name and the local hash."""

    @staticmethod
    def expected(
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,
        extra: EventExtra | None = None,
    ) -> Sequence[int]:
        """Return the names that follow from the parent and the local hashes of a Stored."""
        own = own_blocks(data, token_ids, block_size, extra)
        if own is not None and own.hasher is None:
            return own.names
        parent = data.parent_hash
        return sequence_hashes(data.tokens_hashes, parent=None if parent is None else parent & _U64)

    @staticmethod
    def name(
        parent: int | None,
        local: int,
        tokens: Sequence[int] | None,  # noqa: ARG004 - the signature of Chain
        block_size: int | None,  # noqa: ARG004 - as above
        extra: EventExtra | None = None,  # noqa: ARG004 - as above
    ) -> int:
        """Return the name that follows from the parent and the local hash of a block."""
        return chained_hash(None if parent is None else parent & _U64, local)


class FoundChain:
    """Detects whether the block hashes of a stream are Dynamo's chain, and which Stored events break it.

    One block whose hash follows from its parent and local hash is proof (1 in 2**64 by chance) for all later events.
    Events that are not part of the chain, such as handmade ones in between, may have any hashes.

    Attributes:
        found: whether the block hashes are a chain.
    """

    __slots__ = ("_blocks", "_tries", "found")

    def __init__(self) -> None:
        self.found = False
        self._blocks: dict[int, None] = {}  # blocks of the chain, in order of arrival
        self._tries = MOST_PARENTS

    def is_broken_by(self, data: Stored) -> bool:
        """Whether a Stored belongs to the chain but has a hash that breaks it.

        It belongs to the chain if another of its hashes does, if the block before a wrong one does, or if its first
        hash would be right under another parent.
        """
        blocks, parent = data.block_hashes, data.parent_hash
        if not data.tokens_hashes:  # only some blocks of a span were kept, and only their names are known
            return False
        if parent is None or parent >= 0:
            rights = sequence_hashes(data.tokens_hashes, parent=parent)
            if tuple(rights) == blocks:  # the usual case of a chain
                if blocks and blocks[-1] >= HAND_WRITTEN and (parent is not None or len(blocks) > 1):
                    self.found = True
                self._blocks.update(dict.fromkeys(blocks if parent is None else (parent, *blocks)))
                return False
        links = [*zip((parent, *blocks), blocks, data.tokens_hashes, strict=False)]
        if all(-HAND_WRITTEN < number < HAND_WRITTEN for link in links for number in link if number is not None):
            return False
        belongs = broken = False
        for before, block, local in links:
            if before is None:
                fits = block == local
            else:
                fits = before >= 0 and chained_hash(before, local) == block
                self.found |= fits
                belongs |= fits or before in self._blocks
                if fits:
                    self._blocks[before] = None
            if fits:
                self._blocks[block] = None
            broken |= not fits
        if not broken or not self.found:
            return False
        return belongs or any(chained_hash(other, links[0][2]) == links[0][1] for other in self._others())

    def is_shown_by(self, data: Stored, resident: Collection[int]) -> bool:
        """Whether an engine holds a block under the chain's name for it, not under the name in a Stored.

        If so, the engine's hashes are a chain, and it published a wrong hash.

        Args:
            data: a Stored that does not show this alone.
            resident: blocks that the engine holds.
        """
        if not data.tokens_hashes:
            return False
        parent = data.parent_hash
        rights = sequence_hashes(data.tokens_hashes, parent=None if parent is None else parent & _U64)
        is_shown = any(
            expected != block and expected >= HAND_WRITTEN and expected in resident and block not in resident
            for block, expected in zip(data.block_hashes, rights, strict=True)
        )
        self.found |= is_shown
        return is_shown

    def _others(self) -> Iterator[int]:
        """Yield blocks of the chain, the newest first, up to `MOST_PARENTS` in all."""
        for block in reversed(self._blocks):
            if not self._tries:
                return
            self._tries -= 1
            if block >= 0:
                yield block


def is_chained(data: Stored) -> bool:
    """Whether a Stored shows by itself that its hashes are Dynamo's chain."""
    chain = FoundChain()
    chain.is_broken_by(data)
    return chain.found


class BlockFlaw(NamedTuple):
    """A flaw in one block of a Stored: the block, the observed and the expected text."""

    block: int
    observed: str
    expected: str


def own_parent(hashes: tuple[int, ...], parent: int | None) -> int | None:
    """Return the first block that is its own parent, if any; longer cycles are legal (`multi_lru` stores some)."""
    for block in hashes:
        if block == parent:
            return block
        parent = block
    return None


def sparse(event: RouterEvent, data: Stored, size: int | None, *, partial: bool = False) -> BlockFlaw | None:
    """Return the first block without token ids in an event that has token ids; None if there is none.

    Args:
        event: an event with or without token ids.
        data: its Stored.
        size: tokens per block; None if unknown: then any number above 0 is enough.
        partial: whether the last block may have fewer tokens.
    """
    tokens, hashes = event.token_ids, data.block_hashes
    if tokens is None or (isinstance(tokens, TokenRows) and (len(tokens), tokens.size) == (len(hashes), size)):
        return None  # all rows have the same size
    try:
        sizes = list(map(len, tokens))
    except TypeError:
        observed = "token ids came, and not as one sequence for each block"
        return BlockFlaw(hashes[0], observed, "each block has its tokens") if hashes else None
    if partial and size is not None and sizes and 0 < sizes[-1] < size:
        sizes[-1] = size
    if len(sizes) == len(hashes) and (size is None or sizes.count(size) == len(sizes)):
        return None
    expected = "one sequence of token ids a block" if size is None else f"each block has its {size} tokens"
    for block, count in zip(hashes, sizes, strict=False):
        if size is not None and count != size:
            return BlockFlaw(
                block, f"block {block_text(block)} came with {count} token id{'s' * (count != 1)}", expected
            )
    if not hashes:
        return None
    block = hashes[min(len(sizes), len(hashes) - 1)]
    return BlockFlaw(block, f"token ids came for {len(sizes)} of {len(hashes)} blocks", expected)


def wrong_hash(
    event: RouterEvent,
    data: Stored,
    size: int | None,
    chain: Chain,
    parents: Callable[[int], Iterable[int]] = lambda _: (),
    *,
    partial: bool = False,
) -> BlockFlaw | None:
    """Return the first block whose hashes do not follow from its parent, local hash and tokens.

    Args:
        event: an event with or without token ids.
        data: its Stored.
        size: tokens per block; None: local hashes are not compared with tokens.
        chain: the engine's rule for names.
        parents: returns candidates for the right parent of a block, if the event's parent is wrong.
        partial: whether the last block may have fewer tokens.
    """
    tokens = event.token_ids
    own = own_blocks(data, tokens, size, event.extra) is not None
    by_itself = getattr(chain, "reads_extra", False)  # this chain uses all data of the event
    is_sparse = (
        tokens is not None and not own and (size is None or sparse(event, data, size, partial=partial) is not None)
    )
    if is_sparse and not by_itself:
        tokens = ()
    if not own and not is_sparse and size is not None and tokens:
        windows, ahead = windows_of(tokens, None if event.extra is None else event.extra.get(LOOKAHEAD))
        flat = [token for ids in windows for token in ids]
        options = {} if event.extra is None else hash_options(event.extra)
        made_of = block_hashes(flat, size + ahead, **options)
        if not ahead and len(flat) % size:
            made_of += block_hashes(tokens[-1], len(tokens[-1]), **options)
        for block, local, made in zip(data.block_hashes, data.tokens_hashes, made_of, strict=False):
            if local != made:
                return BlockFlaw(
                    block,
                    f"block {block_text(block)} has local hash {block_text(local)}",
                    f"its {len(tokens[data.block_hashes.index(block)])} tokens{_with(event.extra)} have local hash "
                    f"{block_text(made)}",
                )
    looks = by_itself or names_blocks(event.extra) or (event.extra and event.extra.get(LOOKAHEAD))
    extra = event.extra if looks else None
    rights = chain.expected(data, tokens, size) if extra is None else chain.expected(data, tokens, size, extra)
    if rights is not None and tuple(rights) != data.block_hashes:
        for i, (block, local, expected) in enumerate(zip(data.block_hashes, data.tokens_hashes, rights, strict=True)):
            if block != expected:
                parent = "no parent" if data.parent_hash is None else f"parent {block_text(data.parent_hash)}"
                observed = (
                    f"block {block_text(block)} is stored with local hash {block_text(local)}; the event has {parent}"
                )
                known_tokens = None if tokens is None else tuple(tokens[i]) if tokens else ()
                others = (None, *data.block_hashes)
                carried = () if extra is None else (part_of(extra, (i,)),)
                for candidate in (*others, *parents(block)):
                    if chain.name(candidate, local, known_tokens, size, *carried) == block:
                        return BlockFlaw(block, *_fits(observed, candidate))
                content = "tokens" if by_itself else "local hash"
                content += f" ({by})" if (by := getattr(chain, "named_by", "")) else ""
                return BlockFlaw(block, observed, f"the chain of parent and {content} is {block_text(expected)}")
    return without_keys(event, data, size, chain) if rights is None else None


def without_keys(event: RouterEvent, data: Stored, size: int | None, chain: Chain) -> BlockFlaw | None:
    """Return the first block whose local hash or name ignores keys that its event has in addition to tokens.

    This finds blocks of an adapter under names of the base model even if the right names cannot be computed: vLLM
    hashes an adapter's path, which no event has. Only the root of a chain from tokens can show it, as blocks after the
    root follow the same rule with and without keys.

    Args:
        event: an event with or without token ids.
        data: its Stored.
        size: tokens per block; None if unknown: then nothing is judged.
        chain: the engine's rule for names.
    """
    tokens, extra = event.token_ids, event.extra
    if tokens is None or size is None or extra is None or not names_blocks(extra) or extra.get(LOOKAHEAD):
        return None
    if sparse(event, data, size) is not None:
        return None
    flat, before = [token for ids in tokens for token in ids], data.parent_hash
    by_tokens = getattr(chain, "reads_extra", False)
    rows = zip(data.block_hashes, data.tokens_hashes, block_hashes(flat, size), strict=False)
    keyed = block_hashes(flat, size, **hash_options(extra))
    for at, ((block, local, alone), due) in enumerate(zip(rows, keyed, strict=False)):
        if alone != due:
            if local == alone and not by_tokens:
                observed = f"block {block_text(block)} has local hash {block_text(local)}, that of its tokens alone"
                return BlockFlaw(block, observed, f"its tokens{_with(extra)} have local hash {block_text(due)}")
            is_root = not at and before is None
            if (is_root or not by_tokens) and chain.name(before, alone, tuple(tokens[at]), size) == block:
                observed = f"block {block_text(block)} has the name of its tokens alone"
                return BlockFlaw(block, observed, f"a name of its tokens{_with(extra)}")
        before = block
    return None


def _with(extra: EventExtra | None) -> str:
    """Return the text of the keys that are hashed in addition to tokens."""
    if extra is None or not names_blocks(extra):
        return ""
    shown = [f"{key} {extra[key]!r}" for key in ("lora_name", "cache_salt") if extra.get(key)]
    return f" (with {' and '.join(shown) or 'multimodal items'})"


FITS: Final = "; the hash fits "
"""Text before the parent that a wrong hash would fit."""


def _fits(observed: str, parent: int | None) -> tuple[str, str]:
    """Return the observed and expected text of a block whose hash is right and whose parent is wrong."""
    if parent is None:
        return f"{observed}{FITS}no parent", "the block is a root"
    name = block_text(parent)
    return f"{observed}{FITS}parent {name}", f"the parent is block {name}"
