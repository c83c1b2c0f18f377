"""Checks of one Stored by itself, without memory of the stream: own parent, hashes, tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from pytest_kvmock.events import BlockTokens, RouterEvent, Stored, block_text
from pytest_kvmock.hashed_blocks import own_blocks
from pytest_kvmock.prompt_keys import LOOKAHEAD, hash_options, names_blocks, part_of
from pytest_kvmock.tokens import block_hashes, chained_hash, sequence_hashes, windows_of

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra

HAND_WRITTEN: Final = 2**16
"""Hashes below are numbers written by hand: a hash function hardly ever returns one."""

MOST_PARENTS: Final = 2**18
"""The most blocks of a stream that are tried as the right parent of others, in all: a tenth of a second."""


class Chain(Protocol):
    """The rule by which one engine names its blocks; an object belongs to one stream, and may have state.

    Where blocks are named by more than tokens (`Prompt.keys`), both methods are given what travels beside the event as one
    more argument. One with an attribute `reads_extra` that is true always is, and is given the tokens as they came. One that has an
    attribute `named_by` says there by what it names blocks, for messages.
    """

    def expected(
        self,
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,
        extra: EventExtra | None = ...,
        /,
    ) -> Sequence[int] | None:
        """The names that the blocks of a Stored should have; None where they cannot be computed.

        Args:
            data: the Stored.
            token_ids: of each block; None where none came, empty where they are not `block_size` of each block.
            block_size: tokens a block; None: unknown.
            extra: what travels beside the event.
        """

    def name(
        self,
        parent: int | None,
        local: int,
        tokens: Sequence[int] | None,
        block_size: int | None,
        extra: EventExtra | None = ...,
        /,
    ) -> int | None:
        """The name of one block below a parent; None where it cannot be computed.

        Args:
            parent: the block before it; None: it is a root.
            local: its local hash.
            tokens: its token ids; None where none came with the event.
            block_size: tokens a block; None: unknown.
            extra: what travels beside an event of this block alone.
        """


_U64: Final = 2**64 - 1


class DynamoChain:
    """Dynamo's rule: the hash of the parent's name and the local hash."""

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
        block_size: int | None,  # noqa: ARG004 - likewise
        extra: EventExtra | None = None,  # noqa: ARG004 - as above
    ) -> int:
        """Return the name that follows from the parent and the local hash of a block."""
        return chained_hash(None if parent is None else parent & _U64, local)


class FoundChain:
    """Detects from a stream whether its block hashes are Dynamo's chain, and which Stored break it.

    One block that has the hash of its parent and its local hash is proof (by chance 1 in 2**64): from then on they are.
    What is not part of the chain, such as an event made by hand beside it, may have any hashes.

    Attributes:
        found: whether the block hashes are a chain.
    """

    __slots__ = ("_blocks", "_tries", "found")

    def __init__(self) -> None:
        self.found = False
        self._blocks: dict[int, None] = {}  # of the chain, in the order in which they came
        self._tries = MOST_PARENTS

    def is_broken_by(self, data: Stored) -> bool:
        """Whether a Stored belongs to the chain, and has a hash that does not.

        It belongs to the chain where another of its hashes is of the chain, or the block before a wrong one, or where its first hash
        would be right under another parent.
        """
        blocks, parent = data.block_hashes, data.parent_hash
        if not data.tokens_hashes:  # of a span some blocks were kept; their names alone are known
            return False
        if parent is None or parent >= 0:
            rights = sequence_hashes(data.tokens_hashes, parent=parent)
            if tuple(rights) == blocks:  # nearly every Stored of a chain
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
        """Whether an engine holds a block under its name by the chain, and not under the name that a Stored has for it.

        Then its hashes are a chain, and it published a wrong one.

        Args:
            data: a Stored that does not show it by itself.
            resident: the blocks that the engine holds.
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
        """Yield blocks of the chain, the newest first; of a stream that tries very often, none in the end."""
        for block in reversed(self._blocks):
            if not self._tries:
                return
            self._tries -= 1
            if block >= 0:
                yield block


def is_chained(data: Stored) -> bool:
    """Whether a Stored by itself shows that its hashes are Dynamo's chain."""
    chain = FoundChain()
    chain.is_broken_by(data)
    return chain.found


class BlockFlaw(NamedTuple):
    """What is wrong with one block of a Stored: the block, what was observed, what was expected."""

    block: int
    observed: str
    expected: str


def own_parent(hashes: tuple[int, ...], parent: int | None) -> int | None:
    """The first block that is its own parent, if any; a longer cycle is legal (`multi_lru` stores some)."""
    for block in hashes:
        if block == parent:
            return block
        parent = block
    return None


def sparse(event: RouterEvent, data: Stored, size: int | None, *, partial: bool = False) -> BlockFlaw | None:
    """The first block whose token ids are missing from an event that has token ids; None where none are.

    Args:
        event: with token ids or without.
        data: its Stored.
        size: tokens a block; None: unknown, then it is enough that each block has some.
        partial: the last block may have fewer.
    """
    tokens, hashes = event.token_ids, data.block_hashes
    if tokens is None:
        return None
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
    """The first block whose hashes do not follow from its parent, local hash and tokens.

    Args:
        event: with token ids or without.
        data: its Stored.
        size: tokens a block, to judge local hashes by tokens; None: they are not judged.
        chain: how the engine names blocks.
        parents: blocks that may be the right parent of a block, if the one that the event has is wrong.
        partial: the last block may have fewer tokens.
    """
    tokens = event.token_ids
    own = own_blocks(data, tokens, size, event.extra) is not None
    by_itself = getattr(chain, "reads_extra", False)  # it looks at all that came
    is_sparse = (
        tokens is not None and not own and (size is None or sparse(event, data, size, partial=partial) is not None)
    )
    if is_sparse and not by_itself:
        tokens = ()
    if tokens and size is not None and not own and not is_sparse:
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
                    f"its {len(tokens[data.block_hashes.index(block)])} tokens{_with(event.extra)} have local hash {block_text(made)}",
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
                beside = () if extra is None else (part_of(extra, (i,)),)
                for candidate in (*others, *parents(block)):
                    if chain.name(candidate, local, known_tokens, size, *beside) == block:
                        return BlockFlaw(block, *_fits(observed, candidate))
                content = "tokens" if by_itself else "local hash"
                content += f" ({by})" if (by := getattr(chain, "named_by", "")) else ""
                return BlockFlaw(block, observed, f"the chain of parent and {content} is {block_text(expected)}")
    return None


def _with(extra: EventExtra | None) -> str:
    """By what blocks are named beside their tokens, for a message."""
    if extra is None or not names_blocks(extra):
        return ""
    shown = [f"{key} {extra[key]!r}" for key in ("lora_name", "cache_salt") if extra.get(key)]
    return f" (with {' and '.join(shown) or 'multimodal items'})"


FITS: Final = "; the hash fits "
"""Precedes, in the text of a wrong hash, the parent that the hash fits."""


def _fits(observed: str, parent: int | None) -> tuple[str, str]:
    """Observed and expected, as text, of a block whose hash is right and whose parent is wrong."""
    if parent is None:
        return f"{observed}{FITS}no parent", "the block is a root"
    name = block_text(parent)
    return f"{observed}{FITS}parent {name}", f"the parent is block {name}"
