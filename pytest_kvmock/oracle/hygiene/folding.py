"""Problems of a stream: making them, and listing them under a cause while blocks are unknown."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.events import StorageTier


def problem_of(
    rule: str,
    stream: Stream,
    observed: str,
    expected: str,
    blocks: tuple[int, ...],
    *,
    tier: StorageTier = StorageTier.DEVICE,
    case: str = "",
) -> Problem:
    """Make the problem of a stream.

    Args:
        rule: the name of the rule.
        stream: the stream of that worker and rank.
        observed: see `Problem`.
        expected: see `Problem`.
        blocks: see `Problem`.
        tier: the tier of the blocks.
        case: the case of the rule.
    """
    if stream.group_idx:
        observed += f" (cache group {stream.group_idx})"
    problem = Problem(rule, stream.worker_id, stream.dp_rank, observed, expected, blocks=blocks, storage_tier=tier)
    problem.restarts, problem.case = stream.restarts, case
    return problem


def fold(stream: Stream, problem: Problem, *, every: bool = False) -> Problem:
    """List a problem under its stream's desync if its block is unknown, or under the problem that left it resident.

    Args:
        stream: the stream of that worker and rank.
        problem: the problem.
        every: whether the problem stands by itself only if all its blocks are known; False: the first is enough.
    """
    desync, tier = stream.desync, problem.storage_tier
    if desync is not None and problem is not desync.cause:
        named = desync.named(tier)
        resynced = named.issuperset(problem.blocks) if every else problem.block in named
        if not problem.blocks or not resynced:
            problem.follows_from(desync.cause)
    if problem.cause is None and tier is StorageTier.DEVICE and problem.block in stream.removed_but_resident:
        problem.follows_from(stream.removed_but_resident[problem.block])
    return problem


def parts_of(stream: Stream, blocks: Iterable[int], tier: StorageTier) -> list[tuple[int, ...]]:
    """Group blocks of a tier by their cause; known blocks have none, and come first."""
    blocks = tuple(blocks)
    desync = stream.desync
    removed_but_resident = stream.removed_but_resident if tier is StorageTier.DEVICE else {}
    if desync is None and not removed_but_resident:
        return [blocks] if blocks else []
    named = frozenset(blocks) if desync is None else desync.named(tier)
    parts: dict[Problem | None, list[int]] = {None: []}
    for block in blocks:
        unknown = desync is not None and block not in named
        cause = desync.cause if desync is not None and unknown else removed_but_resident.get(block)
        parts.setdefault(cause, []).append(block)
    return [tuple(part) for part in parts.values() if part]
