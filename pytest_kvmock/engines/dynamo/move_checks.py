"""Checks of moves and block sizes. A move that breaks a rule is refused before anything changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import reduce
from itertools import repeat
from operator import or_
from typing import Any
from uuid import UUID

from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy, Slot
from pytest_kvmock.engines.dynamo.names import Names
from pytest_kvmock.values.checks import check_integer, is_integer
from pytest_kvmock.values.events import block_text, value_text
from pytest_kvmock.values.moves import Block, MoveError, Promote, Use
from pytest_kvmock.values.plh import LineageHashes
from pytest_kvmock.values.tokens import TokenRows

_U64 = 2**64 - 1
_PLH_END = 3 << 126


def check_logical_block_size(block_size: int) -> int:
    """Return `block_size`, or raise a ValueError: kvbm-logical needs a power of two, a sequence at least two tokens."""
    if not is_integer(block_size, 2) or block_size > 1024 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from 2 to 1024 (tokens a block), got {block_size!r}")
    return block_size


def check_sequence_block_size(block_size: int) -> int:
    """Return `block_size`, or raise a ValueError: the engines of dynamo-mocker 1.0.2 take any size from two tokens."""
    return check_integer("block_size", block_size, 2, " (tokens a block)")


def is_full(block: object) -> bool:
    """Return whether this names a full block: a u64."""
    return isinstance(block, int) and not isinstance(block, bool) and 0 <= block <= _U64  # hot: no function call


def check_full(block: object, what: str) -> None:
    """Raise a MoveError unless this names a full block."""
    if not is_full(block):
        raise MoveError(f"{what} {block_text(block)}: expected a sequence hash, an integer from 0 to 2**64 - 1")


def flatten(blocks: tuple[Block | Iterable[Block], ...]) -> list[Block]:
    """Return a flat list of blocks that were given one by one, as lists, or both."""
    flat: list[Block] = []
    for block in blocks:
        if isinstance(block, Iterable) and not isinstance(block, (str, bytes)):
            flat.extend(block)
        else:
            flat.append(block)  # type: ignore[arg-type]  # process refuses what is not a block
    return flat


def check_list(value: object, what: str) -> None:
    """Raise a MoveError unless this has a length, like a list of blocks or hashes."""
    if not hasattr(value, "__len__") or isinstance(value, (str, bytes)):
        raise MoveError(f"{what}: a list is expected, one entry a block, got {value_text(value):.80}")


def are_plhs(plhs: Sequence[int]) -> bool:
    """Return whether these are lineage hashes: 128 bits, without both highest bits set."""
    try:
        # One pass in C detects negative values, values that are too large, and non-integers.
        bits = reduce(or_, plhs, 0)
    except TypeError:
        return False
    if bits >> 126 == 3:  # in one hash, or in two combined
        return all(plh >> 126 < 3 for plh in plhs)
    return 0 <= bits < _PLH_END


def check_plhs(plhs: Sequence[int]) -> None:
    """Raise a MoveError unless these are lineage hashes."""
    if not are_plhs(plhs):
        raise MoveError(f"lineage hashes are expected, integers of 128 bits, got {plhs!r:.200}")


def _are_u64(values: Sequence[Any]) -> bool:
    """Return whether these are integers from 0 to 2**64 - 1; checked in C."""
    try:
        array("Q", values)
    except (TypeError, OverflowError):
        return False
    return True


def check_use(move: Use) -> int:
    """Check a Use, except its lineage hashes; return the number of full blocks that it begins with.

    These are nearly always all blocks, except a partial one at the end.

    Raises:
        MoveError: the Use breaks a rule.
    """
    blocks, plhs, local_hashes, token_ids = move.blocks, move.plhs, move.local_hashes, move.token_ids
    if (
        type(blocks) is type(local_hashes) is list
        and (type(plhs) is list or type(plhs) is LineageHashes)
        and len(plhs) == len(blocks) == len(local_hashes)
    ):
        # A short cut for nearly every Use, with fewer calls.
        is_sound = token_ids is None or (isinstance(token_ids, list | TokenRows) and len(token_ids) == len(blocks))
        if is_sound and (move.parent is None or is_full(move.parent)) and _are_u64(blocks) and _are_u64(local_hashes):
            return len(blocks)
    leading, num_full = check_names(move)
    if len(plhs) != num_full:
        raise MoveError(lengths("plhs", len(plhs), num_full, blocks))
    if local_hashes and len(local_hashes) != num_full:
        raise MoveError(lengths("local_hashes", len(local_hashes), num_full, blocks, "none, or "))
    if token_ids is not None and len(token_ids) != num_full:
        raise MoveError(lengths("token_ids", len(token_ids), num_full, blocks, "None, or "))
    return leading


def check_use_plhs(move: Use) -> None:
    """Check the lineage hashes of a Use.

    Raises:
        MoveError: a lineage hash is invalid.
    """
    if not are_plhs(move.plhs):
        bad = next(plh for plh in move.plhs if not are_plhs((plh,)))
        raise MoveError(f"{use_of(move.blocks)}: {bad!r} is not a lineage hash, an integer of 128 bits")


def check_names(move: Use) -> tuple[int, int]:
    """Check that a Use names blocks and hashes.

    Returns:
        The number of full blocks that it begins with, and the number that it has.

    Raises:
        MoveError: a name or hash is invalid, or the parent is partial.
    """
    blocks = move.blocks
    for value in (blocks, move.plhs, move.local_hashes, move.token_ids or ()):
        check_list(value, "Use")
    num_full = leading = _leading_full(blocks)
    if leading < len(blocks):
        num_full += _count_full(blocks[leading:])
    if move.parent is not None:
        if isinstance(move.parent, UUID):
            raise MoveError(f"{use_of(blocks)}: its parent {move.parent} is partial")
        check_full(move.parent, f"{use_of(blocks)}: parent")
    if not _are_u64(move.local_hashes):
        for local in move.local_hashes:
            check_full(local, f"{use_of(blocks)}: local hash")
    return leading, num_full


def iter_blocks(move: Use, start: int) -> Iterator[tuple[Any, int | None, int, Sequence[int] | None]]:
    """Yield the name, lineage hash, local hash and token ids of each block of a Use from `start` on.

    All blocks before `start` must be full. The lineage hash of a partial block is None.
    """
    full = zip(
        move.plhs[start:],
        move.local_hashes[start:] or repeat(0),
        repeat(None) if move.token_ids is None else move.token_ids[start:],
        strict=False,
    )
    for block in move.blocks[start:]:
        yield (block, None, 0, None) if isinstance(block, UUID) else (block, *next(full))


def _leading_full(blocks: Sequence[Block]) -> int:
    if _are_u64(blocks):
        return len(blocks)
    if isinstance(blocks[-1], UUID) and _are_u64(blocks[:-1]):
        return len(blocks) - 1
    return next((i for i, block in enumerate(blocks) if not is_full(block)), len(blocks))


def _count_full(blocks: Sequence[Block]) -> int:
    full = 0
    for block in blocks:
        if not isinstance(block, UUID):
            if not is_full(block):
                raise MoveError(
                    f"Use of block {block_text(block)}: a block is a sequence hash (an integer from 0 to 2**64 - 1) "
                    "or a UUID"
                )
            full += 1
    return full


def check_deref(
    blocks: Sequence[Block], references: Callable[[Block], int], names: Names, policy: EvictionPolicy, backend: str
) -> None:
    """Check a Deref.

    Args:
        blocks: the blocks that it names.
        references: returns the number of references to a block.
        names: the names that hold slots.
        policy: the eviction policy, which takes the slots that are no longer held.
        backend: name of the manager's behaviour.

    Raises:
        MoveError: a block has fewer references than `blocks` drops, or could not become inactive.
    """
    asked = check_held(blocks, references)
    if policy._collisions:
        last = [b for b, times in asked.items() if not isinstance(b, UUID) and times == references(b)]
        _check_collisions(last, names, policy, backend)


def check_held(blocks: Sequence[Block], references: Callable[[Block], int]) -> dict[Block, int]:
    """Check that each block has the references that a Deref drops.

    Args:
        blocks: the blocks that the Deref names.
        references: returns the number of references to a block.

    Returns:
        How often the Deref names each block.

    Raises:
        MoveError: a block has fewer references than the Deref drops.
    """
    asked = count_blocks(blocks, "Deref")
    for block, times in asked.items():
        has = references(block)
        if times > has:
            why = f"it has {has} reference(s), and the move drops {times}" if has else "it is not active"
            raise MoveError(f"Deref of {called(block)}: {why}")
    return asked


def count_blocks(blocks: Sequence[Block], what: str) -> dict[Block, int]:
    """Count how often a move names each block.

    Args:
        blocks: the blocks that it names.
        what: the kind of move, for the error.

    Raises:
        MoveError: something is not a block.
    """
    check_list(blocks, what)
    asked: dict[Block, int] = {}
    for block in blocks:
        if not isinstance(block, UUID):
            check_full(block, f"{what} of block")
        asked[block] = asked.get(block, 0) + 1
    return asked


def called(block: Block) -> str:
    """Return a block's text in an error: "block 4", or "partial block ..."."""
    return f"partial block {block}" if isinstance(block, UUID) else f"block {block_text(block)}"


def _check_collisions(last: list[int], names: Names, policy: EvictionPolicy, backend: str) -> None:
    """Raise a MoveError if the policy cannot take the slots that lose their last holders when these names are
    dropped.
    """
    held: dict[Slot, int] = {}
    falling: list[Slot] = []
    for name in last:
        slot = names.held_by(name)
        assert slot is not None
        held[slot] = held.get(slot, 0) + 1
        if held[slot] == slot.aliases + (slot.refs > 0):
            falling.append(slot)
    refused = policy._first_refused(falling)
    if refused is not None:
        raise MoveError(
            f"Deref of block {block_text(refused.name)}: hash collision. Another block has the same position and "
            f"fragment as its lineage hash {refused.plh:#034x}, and {backend} cannot have both inactive"
        )


def check_promote(move: Promote, partials: Container[Block]) -> None:
    """Check a Promote, except its lineage hash; `partials` has the partial blocks in use.

    Raises:
        MoveError: the Promote breaks a rule.
    """
    what = f"Promote of partial block {move.partial}"
    if not isinstance(move.partial, UUID) or move.partial not in partials:
        raise MoveError(f"{what}: it is not active")
    check_full(move.block, f"{what} to block")
    if isinstance(move.parent, UUID):
        raise MoveError(f"{what} to block {block_text(move.block)}: its parent {move.parent} is partial")
    if move.parent is not None:
        check_full(move.parent, f"{what} to block {block_text(move.block)}: parent")
    check_full(move.local_hash, f"{what} to block {block_text(move.block)}: local hash")


def check_promote_plh(move: Promote) -> int:
    """Return the lineage hash of a Promote.

    Raises:
        MoveError: it has no valid lineage hash.
    """
    if move.plh is None or not are_plhs((move.plh,)):
        what = f"Promote of partial block {move.partial} to block {block_text(move.block)}"
        raise MoveError(f"{what}: plh must be a lineage hash, got {move.plh!r}")
    return move.plh


def use_of(blocks: Sequence[Block]) -> str:
    """Return the text of a Use in an error: it names the first block."""
    if not blocks:
        return "Use"
    return f"Use of block {blocks[0] if isinstance(blocks[0], UUID) else block_text(blocks[0])}"


def lengths(what: str, got: int, expected: int, blocks: Sequence[Block], also: str = "") -> str:
    """Return the error for lists that differ in length."""
    return f"{use_of(blocks)}: {got} {what} for {expected} full blocks; expected {also}one for each full block"
