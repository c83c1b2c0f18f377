"""Differences between stream and engine: the blocks, the problems that they explain, the order of reports. Also checks
of capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from pytest_kvmock.oracle.hygiene.folding import fold, problem_of
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import ENGINE_DRIFT, INDEX_DRIFT, OVER_CAPACITY
from pytest_kvmock.oracle.hygiene.story import where_text
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.events import RouterEvent, StorageTier, StreamKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_kvmock.oracle.hygiene.log import EventLog

DRIFTS = (ENGINE_DRIFT, INDEX_DRIFT)
"""The rules of the two comparisons: stream with engine, index with reference."""


def differences(
    stream: Stream,
    resident: Collection[int],
    tier: StorageTier = StorageTier.DEVICE,
    unpublished: Collection[int] = (),
) -> list[tuple[list[int], str, str]]:
    """Return the blocks in which stream and engine differ, with the expected and the observed text; see
    `entries.Resident`.
    """
    held, copies = dict.fromkeys(stream.in_tier(tier)), stream.copies.get(tier, {})
    there = resident if isinstance(resident, (set, frozenset, dict)) else dict.fromkeys(resident)
    extra = [block for block in held if block not in there]
    implied = stream.implied if tier is StorageTier.DEVICE else ()
    silent = [block for block in there if block not in held and block not in implied and block not in unpublished]
    found = [
        (extra, "what the engine drops is published as Removed", "the engine does not hold"),
        (silent, "what the engine caches is published as Stored", "the engine holds"),
    ]
    if stream.spec.residency == "counted":
        had = Counter(resident)
        fewer = [block for block in held if 0 < had[block] < 1 + copies.get(block, 0)]
        more = [block for block in held if had[block] > 1 + copies.get(block, 0)]
        found += [
            (fewer, "each copy that the engine drops is published as Removed", "the engine holds fewer copies of"),
            (more, "each copy that the engine caches is published as Stored", "the engine holds more copies of"),
        ]
    return [(stream.oldest_first(blocks), expected, what) for blocks, expected, what in found]


def confirm(stream: Stream, found: list[Problem], drifts: list[Problem], resident: set[int], tier: StorageTier) -> None:
    """List the consequences of a missing Removed under the engine_drift that shows the dropped block.

    Args:
        stream: the stream of that worker and rank.
        found: problems that may be consequences: orphans that the engine has dropped, or a capacity that only dropped
            blocks exceed.
        drifts: the engine_drift problems, by cause.
        resident: the blocks that the engine holds.
        tier: the tier.
    """
    dropped = [drift for drift in drifts if drift.cause is None and resident.isdisjoint(drift.blocks)]
    extra = sum(block not in resident for block in stream.held(tier))
    most = stream.spec.capacity(tier)
    fits = most is not None and stream.count(tier) - extra <= most
    for problem in found:
        for drift in dropped:
            if set(drift.blocks).issuperset(problem.blocks) and (problem.blocks or fits):
                problem.follows_from(drift)
                break


def oldest_first(problems: list[Problem], streams: Mapping[StreamKey, Stream], log: EventLog) -> list[Problem]:
    """Sort drifts by the events that stored their blocks; blocks that no event stored come last."""
    if len(problems) < 2 or any(problem.rule not in DRIFTS for problem in problems):
        return problems
    ages: dict[Problem, int] = {}
    stored: dict[Problem, RouterEvent] = {}
    for problem in problems:
        stream = streams.get((problem.worker_id, problem.dp_rank))
        event = None if stream is None or problem.block is None else stream.stored_by(problem.block)
        if event is None:
            ages[problem] = log.total
        else:
            stored[problem] = event
    ages.update(zip(stored, log.positions(list(stored.values())), strict=True))
    return sorted(problems, key=ages.__getitem__)


def over_capacity(stream: Stream) -> list[Problem]:
    """Return an over_capacity for each tier that holds more blocks than its capacity and was not reported before."""
    problems: list[Problem] = []
    if stream.untold or any(part.untold for part in stream.groups.values()):
        return problems
    for tier, held in stream.tiers.items():
        most = stream.spec.capacity(tier)
        fits = len(held) <= most if most is not None else True
        is_plain = not (stream.copies or stream.groups or stream.moved)
        if most is None or (tier not in stream.overfull and is_plain and fits):
            continue
        count, reported = stream.count(tier), tier in stream.overfull
        if count <= most:
            stream.overfull.discard(tier)
        elif not reported:
            stream.overfull.add(tier)
            where = where_text(stream, tier)
            since = f" after event {stream.last.event.event_id}" if stream.last is not None else ""
            observed = f"according to the events, {count} blocks are held{where}{since}"
            has = f"the engine has {most} block{'s' * (most != 1)}{where and ' there'}"
            expected = f"{has}; what it evicts is published as Removed"
            problems.append(fold(stream, problem_of(OVER_CAPACITY, stream, observed, expected, (), tier=tier)))
            stream.unconfirmed.append((tier, problems[-1]))
    return problems
