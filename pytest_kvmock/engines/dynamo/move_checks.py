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
    """Return `block_size`, or raise a ValueError: kvbm-logical takes powers of two, and a sequence two tokens or
    more.
    """
    if not is_integer(block_size, 2) or block_size > 1024 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two from 2 to 1024 (tokens a block), got {block_size!r}")
    return block_size


def check_sequence_block_size(block_size: int) -> int:
    """Return `block_size`, or raise a ValueError: the engines of dynamo-mocker 1.0.2 take any from two tokens on."""
    return check_integer("block_size", block_size, 2, " (tokens a block)")


def is_full(block: object) -> bool:
    """Return whether this names a full block: a u64."""
    return isinstance(block, int) and not isinstance(block, bool) and 0 <= block <= _U64  # hot: no call


def check_full(block: object, what: str) -> None:
    """Raise a MoveError unless this names a full block."""
    if not is_full(block):
        raise MoveError(f"{what} {block_text(block)}: expected a sequence hash, an integer from 0 to 2**64 - 1")


def flatten(blocks: tuple[Block | Iterable[Block], ...]) -> list[Block]:
    """Blocks given one by one, as a list, or both."""
    flat: list[Block] = []
    for block in blocks:
        if isinstance(block, Iterable) and not isinstance(block, (str, bytes)):
            flat.extend(block)
        else:
            flat.append(block)  # type: ignore[arg-type]  # what is not a block is refused by process
    return flat


def check_list(value: object, what: str) -> None:
    """Raise a MoveError unless this has a length, as a list of blocks or hashes has."""
    if not hasattr(value, "__len__") or isinstance(value, (str, bytes)):
        raise MoveError(f"{what}: a list is expected, one entry a block, got {value_text(value):.80}")


def are_plhs(plhs: Sequence[int]) -> bool:
    """Return whether these are lineage hashes: 128 bits, of which the two highest are not both set."""
    try:
        # One pass in C, in which a negative one and one too large show; and so does what is not an integer.
        bits = reduce(or_, plhs, 0)
    except TypeError:
        return False
    if bits >> 126 == 3:  # one, or two together
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
    """Check a Use, but for its lineage hashes; return how many full blocks it begins with.

    That is nearly always all of them but a partial one at the end.

    Raises:
        MoveError: the Use breaks a rule.
    """
    blocks, plhs, local_hashes, token_ids = move.blocks, move.plhs, move.local_hashes, move.token_ids
    if (
        type(blocks) is type(local_hashes) is list
        and (type(plhs) is list or type(plhs) is LineageHashes)
        and len(plhs) == len(blocks) == len(local_hashes)
    ):
        # Nearly every Use, with fewer calls.
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
        MoveError: one is invalid.
    """
    if not are_plhs(move.plhs):
        bad = next(plh for plh in move.plhs if not are_plhs((plh,)))
        raise MoveError(f"{use_of(move.blocks)}: {bad!r} is not a lineage hash, an integer of 128 bits")


def check_names(move: Use) -> tuple[int, int]:
    """Check that a Use names blocks and hashes.

    Returns:
        How many full blocks it begins with, and how many it has.

    Raises:
        MoveError: they are not, or the parent is partial.
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
    """Line a Use's lists up from a block on before which all are full: name, lineage hash, local hash, token ids.

    The lineage hash of a partial block is None.
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
        blocks: what it names.
        references: how many a block has.
        names: which name holds which slot.
        policy: takes the slots that are no longer held.
        backend: the manager's.

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
        How often each is named.

    Raises:
        MoveError: a block has fewer.
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
        blocks: what it names.
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
    """A block in an error: "block 4", or "partial block ..."."""
    return f"partial block {block}" if isinstance(block, UUID) else f"block {block_text(block)}"


def _check_collisions(last: list[int], names: Names, policy: EvictionPolicy, backend: str) -> None:
    """Raise if the policy cannot take the slots of which these are the last names to be dropped."""
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
            "fragment as "
            f"its lineage hash {refused.plh:#034x}, and {backend} cannot have both inactive"
        )


def check_promote(move: Promote, partials: Container[Block]) -> None:
    """Check a Promote, but for its lineage hash; `partials` has the partial blocks in use.

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
        MoveError: it has none.
    """
    if move.plh is None or not are_plhs((move.plh,)):
        what = f"Promote of partial block {move.partial} to block {block_text(move.block)}"
        raise MoveError(f"{what}: plh must be a lineage hash, got {move.plh!r}")
    return move.plh


def use_of(blocks: Sequence[Block]) -> str:
    """A Use in an error: by its first block."""
    if not blocks:
        return "Use"
    return f"Use of block {blocks[0] if isinstance(blocks[0], UUID) else block_text(blocks[0])}"


def lengths(what: str, got: int, expected: int, blocks: Sequence[Block], also: str = "") -> str:
    """The error of lists that differ in length."""
    return f"{use_of(blocks)}: {got} {what} for {expected} full blocks; expected {also}one for each full block"
