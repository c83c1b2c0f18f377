"""Stream against engine: what do the events say is held, and what does the engine hold?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from pytest_kvmock.engine.worker import KvWorker
from pytest_kvmock.events import StorageTier, StreamKey, check_block_hashes
from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.hygiene.drift import differences, oldest_first
from pytest_kvmock.hygiene.problem import Problem

Residents: TypeAlias = Iterable[tuple[StreamKey, StorageTier, Callable[[], Iterable[int]]]]
"""Who can tell what is resident: worker and rank, tier, and a callable that answers block hashes."""


class EngineComparison:
    """Compares, at each flush, ids with what was published, held blocks with capacities, and the stream with the engines.

    Args:
        judge: what arrived; problems are noted there.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._resident: dict[tuple[StreamKey, StorageTier], Callable[[], Iterable[int]]] = {}
        self._mute: set[StreamKey] = set()  # whose callable has failed to tell what is resident

    def compare_with(
        self, worker_id: int, dp_rank: int, storage_tier: StorageTier, resident: Callable[[], Iterable[int]]
    ) -> None:
        """From here on compare the stream of a worker, rank and tier with what a callable says is resident."""
        self._resident[(worker_id, dp_rank), storage_tier] = resident

    def remove(self, keys: Iterable[StreamKey]) -> None:
        """Compare these workers and ranks with nothing more."""
        for key in keys:
            for tier in StorageTier:
                self._resident.pop((key, tier), None)

    def _residents(self, workers: Iterable[KvWorker]) -> Residents:
        """Who can tell what is resident: callables, and workers.

        A worker that has never published, and holds nothing, is only a name for events made by hand.
        """
        return [
            *((key, tier, resident) for (key, tier), resident in self._resident.items()),
            *(
                ((worker.worker_id, worker.dp_rank), StorageTier.DEVICE, worker.manager.resident)
                for worker in workers
                if worker.has_published or (worker.prefix_caching and worker.manager.resident())
            ),
        ]

    def flush(self, next_ids: Mapping[StreamKey, int], workers: Iterable[KvWorker]) -> None:
        """Compare what can be compared by now, and note what is new.

        Args:
            next_ids: the id after the last one that was published, by worker and rank.
            workers: the engines.
        """
        judge = self._judge
        ledger, book, position = judge.ledger, judge.book, judge.log.total - 1
        for key, next_id in next_ids.items():
            real = () if book is None else book.ledger.published(key, next_id, position)
            judge.note(ledger.published(key, next_id, position), real)
        judge.note(ledger.over_capacity(position), () if book is None else book.ledger.over_capacity(position))
        drift: list[Problem] = []
        for key, tier, resident in self._residents(workers):
            blocks = self._resident_blocks(key, resident)
            if blocks is not None:
                real = () if book is None else book.ledger.drift(key, blocks, position, tier)
                found = ledger.drift(key, blocks, position, tier)
                if book is not None:
                    book.attribution.classify(found, real)
                drift += found
        judge.log.note(oldest_first(drift, ledger.streams, judge.log))

    def _resident_blocks(self, key: StreamKey, resident: Callable[[], Iterable[int]]) -> list[int] | None:
        """What a callable says is resident; None, and a problem noted once, where it cannot say."""
        try:
            blocks = list(resident())
            check_block_hashes(blocks)
        except Exception as error:  # noqa: BLE001 - a user's callable; what else was found must not be lost
            if key not in self._mute:
                self._mute.add(key)
                known = f"what is resident could not be told: {type(error).__name__}: {error}"
                right = "a callable given to compare answers the block hashes that are resident"
                self._judge.log.note([Problem("engine_drift", *key, known, right, position=self._judge.log.total - 1)])
            return None
        return blocks

    def differences(self, workers: Iterable[KvWorker]) -> list[Problem]:
        """Where stream and engines differ now, reported before or not; nothing is noted."""
        judge = self._judge
        survives = judge.book is not None and judge.book.survival is not None
        ledger = judge.book.ledger if judge.book is not None and survives else judge.ledger  # what is survived is none
        found = []
        for key, tier, resident in self._residents(workers):
            stream = ledger.streams[key]
            for blocks, right, had in differences(stream, self._resident_blocks(key, resident) or [], tier):
                if blocks:
                    found.append(ledger.drift_problem(stream, tuple(blocks), right, had))
        for problem in found:
            problem.position = judge.log.total - 1
        return oldest_first(found, judge.ledger.streams, judge.log)
