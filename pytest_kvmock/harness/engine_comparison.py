"""Comparison of stream and engine: the blocks held according to the events, and the blocks that the engine holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.oracle.hygiene.drift import differences, oldest_first
from pytest_kvmock.oracle.hygiene.entries import Counted, IdsPublished, Resident
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import ENGINE_DRIFT
from pytest_kvmock.values.events import StorageTier, StreamKey, check_block_hashes

Residents: TypeAlias = Iterable[tuple[StreamKey, StorageTier, Callable[[], Iterable[int]]]]
"""Sources of resident blocks: worker and rank, tier, and a callable that returns block hashes."""


class EngineComparison:
    """Compares, at each flush, arrived ids with published ids, held blocks with capacities, and streams with engines.

    Args:
        judge: has the arrived events, and records problems.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._resident: dict[tuple[StreamKey, StorageTier], Callable[[], Iterable[int]]] = {}
        self._mute: set[StreamKey] = set()  # workers and ranks whose callable has raised

    def compare_with(
        self, worker_id: int, dp_rank: int, storage_tier: StorageTier | str, resident: Callable[[], Iterable[int]]
    ) -> None:
        """Start to compare the stream of a worker, rank and tier with the resident blocks that a callable returns.

        Raises:
            ValueError: an unknown tier.
        """
        __tracebackhide__ = True
        self._resident[(worker_id, dp_rank), StorageTier.of(storage_tier)] = resident

    def remove(self, keys: Iterable[StreamKey]) -> None:
        """Stop comparing these workers and ranks with callables."""
        for key in keys:
            for tier in StorageTier:
                self._resident.pop((key, tier), None)

    def _residents(self, workers: Iterable[KvWorker]) -> Residents:
        """Return the sources of resident blocks: callables, and workers with their device and each known lower tier.

        These workers are left out: one that never published and holds nothing, as it is only a name for events made by
        hand; one that stopped publishing because it became a decode engine; and one whose Cleared is still waiting
        after a reset.
        """
        sources = [(key, tier, resident) for (key, tier), resident in self._resident.items()]
        for worker in workers:
            if worker.cleared_waits:
                continue
            if worker.is_watched or (worker.publishes and (worker.has_published or worker.manager.resident())):
                key = (worker.worker_id, worker.dp_rank)
                # What events promise, for an engine that drops some blocks without an event.
                promised = getattr(worker.manager, "announced", worker.manager.resident)
                sources.append((key, StorageTier.DEVICE, promised))
                tiers = self._judge.ledger.stream(key).spec.tier_blocks or ()
                sources += [(key, tier, partial(promised, tier)) for tier in tiers]
        return sources

    def flush(self, next_ids: Mapping[StreamKey, int], workers: Iterable[KvWorker]) -> None:
        """Compare what can be compared now, and report new problems.

        Args:
            next_ids: the id after the last published one, by worker and rank.
            workers: the engines.
        """
        judge, book = self._judge, self._judge.book
        for key, next_id in next_ids.items():
            self._compare(IdsPublished(key, next_id))
        self._compare(Counted())
        drift: list[Problem] = []
        for key, tier, resident in self._residents(workers):
            blocks = self._resident_blocks(key, resident)
            if blocks is not None:
                entry = Resident(key, tier, blocks, judge.unpublished(key, tier, blocks))
                real = () if book is None else book.ledger.take(entry)
                found = judge.ledger.take(entry)
                if book is not None:
                    book.attribution.classify(found, real)
                drift += found
        judge.log.note(oldest_first(drift, judge.ledger.streams, judge.log))

    def _compare(self, entry: IdsPublished | Counted) -> None:
        """Pass an entry to each ledger, and report new problems."""
        book = self._judge.book
        real = () if book is None else book.ledger.take(entry)
        self._judge.note(self._judge.ledger.take(entry), real)

    def _resident_blocks(self, key: StreamKey, resident: Callable[[], Iterable[int]]) -> list[int] | None:
        """Return the resident blocks that a callable returns; None if it raises, which is reported once."""
        try:
            blocks = list(resident())
            check_block_hashes(blocks)
        except Exception as error:  # noqa: BLE001 - a user's callable; what else was found must not be lost
            if key not in self._mute:
                self._mute.add(key)
                observed = f"the resident blocks could not be read: {type(error).__name__}: {error}"
                expected = "the callable given to compare returns the resident block hashes"
                self._judge.log.note(
                    [Problem(ENGINE_DRIFT, *key, observed, expected, position=self._judge.log.total - 1)]
                )
            return None
        return blocks

    def differences(self, workers: Iterable[KvWorker]) -> list[Problem]:
        """Return all current differences between streams and engines, even reported ones; the log does not change."""
        judge = self._judge
        survives = judge.book is not None and judge.book.survival is not None
        ledger = judge.book.ledger if judge.book is not None and survives else judge.ledger  # no survived faults
        found = []
        for key, tier, resident in self._residents(workers):
            stream = ledger.streams[key]
            there = self._resident_blocks(key, resident) or []
            for blocks, expected, had in differences(stream, there, tier, judge.unpublished(key, tier, there)):
                if blocks:
                    found.append(ledger.drift_problem(stream, tuple(blocks), expected, had, tier))
        for problem in found:
            problem.position = judge.log.total - 1
        return oldest_first(found, judge.ledger.streams, judge.log)
