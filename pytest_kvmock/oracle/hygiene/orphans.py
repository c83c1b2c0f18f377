"""Chains on which correct indexes may differ: a block is held without its parent, or two blocks are stored for one
place.

After an `orphaned_child`, indexes may differ on the chain until that worker and rank is cleared or begins again. One
index drops the descendants of a removed block, as Dynamo's does; another matches them again when the parent is stored
again. Both are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.tokens import sequence_hashes


class Orphaned(NamedTuple):
    """The orphans in a chain, and the number of its held blocks.

    Attributes:
        blocks: the orphans, in order.
        run: number of leading blocks of the chain that are held according to the events.
    """

    blocks: tuple[int, ...]
    run: int


def orphaned(stream: Stream, local_hashes: tuple[int, ...], named: Sequence[int] = ()) -> Orphaned | None:
    """Return the orphans of a chain in a stream; None if there are none.

    Args:
        stream: the stream of one worker and rank.
        local_hashes: the chain.
        named: its block hashes in some stream; empty if no stream has it.
    """
    if not stream.orphaned:
        return None
    ways = [({block} for block in way) for way in (named, sequence_hashes(local_hashes))]
    found: list[int] = []
    most = 0
    for way in (*ways, places_of(stream, local_hashes)):
        run, seen = 0, set[int]()
        for depth, blocks in enumerate(way):
            found += sorted(blocks & stream.orphaned.keys())
            held = {block for block in blocks - seen if block in stream.device or block in stream.implied}
            seen |= held
            if held and run == depth:
                run += 1
        most = max(most, run)
    return Orphaned(tuple(dict.fromkeys(found)), most) if found else None


def held_under_one_path(stream: Stream, local_hashes: tuple[int, ...]) -> int | None:
    """Return the number of leading held places of a chain if one of its places was stored as two blocks; else None.

    This happens if an engine hashes keys that its events lack, or links a block wrongly. By local hashes, one index
    then finds one of the two blocks, and another finds both.
    """
    places = places_of(stream, local_hashes)
    if all(len(blocks) == 1 for blocks in places):
        return None
    held = (any(block in stream.device or block in stream.implied for block in blocks) for blocks in places)
    return sum(1 for _ in takewhile(bool, held))


def stored_as(stream: Stream, local_hashes: tuple[int, ...]) -> set[int]:
    """Return the blocks that the stream stored at the end of a chain of local hashes; empty if it never stored it."""
    stored = places_of(stream, local_hashes)
    return stored[-1] if len(stored) == len(local_hashes) else set()


def places_of(stream: Stream, local_hashes: tuple[int, ...]) -> list[set[int]]:
    """Return the blocks that the stream stored for each place of a chain, from the root up to the first place that has
    none.
    """
    links = stream.links
    links.read(stream.events)
    out: list[set[int]] = []
    parents: set[int | None] = {None}
    for local in local_hashes:
        blocks = links.after(parents, local)
        if not blocks:
            break
        out.append(blocks)
        parents = {*blocks}
    return out
