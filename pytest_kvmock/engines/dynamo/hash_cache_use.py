"""A Use of the hash cache: its plan, and the Stored that it publishes, both as in dynamo-mocker 1.0.2 and corrected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

from pytest_kvmock.engines.dynamo import move_checks
from pytest_kvmock.values.events import BlockTokens, Stored
from pytest_kvmock.values.moves import Block, MoveError, Use


class UsePlan(NamedTuple):
    """The blocks that a Use will serve, wake and evict.

    Attributes:
        served: number of leading blocks that it takes; all if it fits.
        hits: places of served blocks that are cached, or were named earlier in the Use.
        stored: places of the other served blocks.
        woken: the inactive blocks that it takes.
        evicted: the blocks that it evicts, in order.
    """

    served: int
    hits: list[int]
    stored: list[int]
    woken: list[Block]
    evicted: list[Block]


def full_blocks(blocks: Iterable[Block]) -> list[int]:
    """Return the full blocks among these."""
    return [block for block in blocks if not isinstance(block, UUID)]


def evicted_one_by_one(
    blocks: Sequence[Block], plan: UsePlan, active: int, inactive: int
) -> Iterator[tuple[Block, tuple[int, int]]]:
    """Yield each block that a Use evicts, with the numbers of active and inactive blocks right after its eviction.

    Args:
        blocks: the blocks of the Use.
        plan: the plan of the Use.
        active: number of active blocks before the Use.
        inactive: number of inactive blocks before the Use.
    """
    stored, woken = set(plan.stored), set(plan.woken)
    first = len(plan.stored) - len(plan.evicted)  # earlier blocks had room
    evicted = dict(zip(plan.stored[first:], plan.evicted, strict=True))
    for place, block in enumerate(blocks[: plan.served]):
        if place in evicted:
            inactive -= 1
            yield evicted[place], (active, inactive)
        if place in stored:
            active += 1
        elif block in woken:
            woken.remove(block)
            active += 1
            inactive -= 1


def check_token_places(move: Use, plan: UsePlan) -> None:
    """Raise a MoveError where the original misses the tokens of a block that it stores, even in a Use that fails."""
    places = _full_places(move, plan)
    if move.token_ids is not None and places and len(move.token_ids) <= places[-1]:
        raise MoveError(
            f"{move_checks.use_of(move.blocks)}: {len(move.token_ids)} token_ids for {len(move.blocks)} blocks; "
            "expected None, or one for each, partial ones too"
        )


def _full_places(move: Use, plan: UsePlan) -> list[int]:
    return [place for place in plan.stored if not isinstance(move.blocks[place], UUID)]


def stored_as_1_0_2(move: Use, plan: UsePlan) -> Iterator[tuple[Stored, BlockTokens | None]]:
    """Yield what a Use that fits publishes in the original: one Stored, and its tokens.

    Raises:
        MoveError: where the original panics.
    """
    blocks, what = move.blocks, move_checks.use_of(move.blocks)
    anchor = blocks[plan.hits[-1]] if plan.hits else move.parent
    if isinstance(anchor, UUID):
        raise MoveError(f"{what}: partial block {anchor} is the last that is cached, and a parent cannot be partial")
    places = _full_places(move, plan)
    if not places:
        return
    count, given = len(places), len(move.local_hashes)
    if given < count:
        raise MoveError(f"{what}: {given} local hashes for {count} blocks that are not cached; expected one for each")
    token_ids = None if move.token_ids is None else [move.token_ids[place] for place in places]
    names = tuple(full_blocks(blocks[place] for place in places))
    yield Stored(anchor, names, tuple(move.local_hashes[given - count :])), token_ids


def stored_runs(move: Use, plan: UsePlan) -> Iterator[tuple[Stored, BlockTokens | None]]:
    """Yield what a Use that fits should publish: a Stored for each run of new blocks, below the full block before."""
    new = set(plan.stored)
    anchor = before = move.parent
    run: list[int] = []
    first = full = 0
    for place, block in enumerate(move.blocks):
        if isinstance(block, UUID):
            continue
        if place in new:
            if not run:
                anchor, first = before, full
            run.append(block)
        elif run:
            yield _run(move, anchor, run, first)
            run = []
        before = block
        full += 1
    if run:
        yield _run(move, anchor, run, first)


def _run(move: Use, anchor: Block | None, run: Sequence[int], first: int) -> tuple[Stored, BlockTokens | None]:
    """Return one Stored; `first` is the place of its first block among the full blocks of the Use."""
    assert not isinstance(anchor, UUID)
    end = first + len(run)
    local_hashes = tuple(move.local_hashes[first:end]) or (0,) * len(run)
    return Stored(anchor, tuple(run), local_hashes), move.token_ids and move.token_ids[first:end]


def check_lengths(move: Use, num_full: int) -> None:
    """Raise a MoveError unless each list of a Use is absent or has one entry for each full block.

    Local hashes and token ids may have one more, for a partial last block.
    """
    blocks = move.blocks
    also = num_full + bool(blocks and isinstance(blocks[-1], UUID))  # for a last partial block
    if move.plhs and len(move.plhs) != num_full:
        raise MoveError(move_checks.lengths("plhs", len(move.plhs), num_full, blocks, "none, or "))
    if move.local_hashes and not num_full <= len(move.local_hashes) <= also:
        raise MoveError(move_checks.lengths("local_hashes", len(move.local_hashes), num_full, blocks, "none, or "))
    if move.token_ids is not None and not num_full <= len(move.token_ids) <= also:
        raise MoveError(move_checks.lengths("token_ids", len(move.token_ids), num_full, blocks, "None, or "))
