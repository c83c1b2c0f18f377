"""Recovery: the answers of workers to a router that asks for missed events."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock, RLock
from typing import TYPE_CHECKING

from pytest_kvmock.harness.judge import Judge, RecoveryAnswer
from pytest_kvmock.oracle.hygiene.entries import IdsBegun
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.oracle.index.recovery import RING, Events, LocalIndex, TreeDump, WorkerQuery, ring_size
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.events import Stored

if TYPE_CHECKING:
    from pytest_kvmock.oracle.index.recovery import Answer
    from pytest_kvmock.values.events import RouterEvent, StreamKey


class Recovery:
    """The callable that a router uses to ask a worker of a harness for missed events: `recovery(*query)`.

    It answers as the worker would, from a `LocalIndex` of each worker and rank, which has all published events, even
    lost ones. The answer counts as arrived: its events are no longer missing, and from then on the index under test is
    compared without excuse. The harness does not apply the answer to the index; the index must apply it before its
    `apply`, or its `flush`, returns.

    A recovery belongs to one harness (`RouterHarness(recovery=...)`), from before the first event.

    Args:
        ring: number of last events that each worker and rank keeps.

    Raises:
        ValueError: an invalid `ring`.

    Attributes:
        queries: the queries, in order.
        answers: the answer to each.
    """

    def __init__(self, ring: int = RING) -> None:
        self._ring = ring_size(ring)
        self.queries: list[WorkerQuery] = []
        self.answers: list[Answer] = []
        self._local: dict[StreamKey, LocalIndex] = {}
        self._published = Ledger(judges_hashes=False)  # the hashes of answers are not judged
        # The events that the reference index is rebuilt from, for streams that are not prefix-closed: there, events
        # applied again after later ones would leave other links than in their order. Also for streams with counted
        # copies, as the reference counts none.
        self._built: dict[StreamKey, list[RouterEvent]] = {}
        self._judge: Judge | None = None
        self._harness_lock = RLock()
        self._lock = Lock()  # an index may ask from another thread while its harness waits for it

    def __repr__(self) -> str:
        return f"<Recovery with rings of {self.ring} events, asked {len(self.queries)} times>"

    @property
    def ring(self) -> int:
        """Number of last events that each worker and rank keeps. A smaller number drops the oldest."""
        return self._ring

    @ring.setter
    def ring(self, size: int) -> None:
        with self._lock:
            self._ring = ring_size(size)
            for local in self._local.values():
                local.ring = size

    def __call__(self, worker_id: int, start: int | None = None, end: int | None = None, dp_rank: int = 0) -> Answer:
        """Ask a worker.

        Args:
            worker_id: the worker.
            start: the first event id; None: a dump of all that the worker holds.
            end: the last event id; None: the newest. An answer runs to the newest in any case.
            dp_rank: the worker's rank.

        Raises:
            ValueError: an unknown worker, or an invalid id.
            RuntimeError: the recovery belongs to no harness.
        """
        judge = self._judge
        if judge is None:
            raise RuntimeError("there is no worker to ask yet: the recovery belongs to no RouterHarness")
        key = (worker_id, dp_rank)
        is_key = all(map(is_integer, key))
        with self._lock:
            local = self._local.get(key) if is_key else None
            if not is_key or (local is None and key not in judge.ledger.streams):
                known = ", ".join(f"worker {worker} rank {rank}" for worker, rank in sorted(judge.ledger.streams))
                raise ValueError(
                    f"there is no worker {worker_id!r:.80} rank {dp_rank!r:.80} to ask; known: {known or 'none'}"
                )
            answer = (local or LocalIndex(self._ring)).get_events_in_id_range(start, end)
            if isinstance(answer, TreeDump) and key in self._published.streams:
                answer = self._with_copies(answer, self._published.streams[key])
            self.queries.append(WorkerQuery(worker_id, start, end, dp_rank))
            self.answers.append(answer)
            if local is not None and isinstance(answer, (Events, TreeDump)):
                is_dump, published = isinstance(answer, TreeDump), self._published.streams[key].copy()
                next_id = 0 if local.newest is None else local.newest + 1
                ids = range(0 if is_dump or start is None else start, next_id)
                if self._is_plain(published):
                    judge.pending_recoveries.append(RecoveryAnswer(published, ids, answer.events, is_dump))
                else:
                    if is_dump:
                        self._built[key] = list(answer.events)
                    judge.pending_recoveries.append(
                        RecoveryAnswer(published, ids, tuple(self._built[key]), replace=True)
                    )
        if self._harness_lock.acquire(blocking=False):
            try:
                judge.apply_pending_recoveries()
            finally:
                self._harness_lock.release()
        return answer

    @staticmethod
    def _with_copies(dump: TreeDump, published: Stream) -> TreeDump:
        """Return the dump with a Stored for each further copy of a block, as the router must count copies too."""
        again: list[RouterEvent] = []
        for event in dump.events:
            data = event.event.data
            assert isinstance(data, Stored)  # of one block
            more = published.copies.get(event.storage_tier, {}).get(data.block_hashes[0], 0)
            again += [event] * more
        events = [*dump.events, *again]
        numbered = (replace(one, event=replace(one.event, event_id=place)) for place, one in enumerate(events))
        return TreeDump(tuple(numbered), dump.last_event_id) if again else dump

    # --------------------------------------------------------------------------------------- of its harness

    def join(self, judge: Judge, lock: RLock) -> None:
        """Bind the recovery to a harness.

        Raises:
            ValueError: it already belongs to a harness.
        """
        if self._judge is not None:
            raise ValueError("this recovery belongs to another RouterHarness; make one for each")
        self._judge, self._harness_lock = judge, lock

    def keep(self, event: RouterEvent) -> None:
        """Record an event that a worker publishes."""
        with self._lock:
            key = (event.worker_id, event.event.dp_rank)
            local = self._local.get(key) or self._begin(key)
            self._published.take(event)
            shown = self._published.uncounted(event)
            local.apply(event, shown)
            if not self._is_plain(self._published.streams[key]):
                self._built[key].append(shown)

    @staticmethod
    def _is_plain(published: Stream) -> bool:
        return published.spec.prefix_closed and published.spec.residency == "unique"

    def worker_restarted(self, key: StreamKey) -> None:
        """Start over with a worker and rank, and drop its earlier events."""
        with self._lock:
            self._begin(key)

    def _begin(self, key: StreamKey) -> LocalIndex:
        assert self._judge is not None
        ledger = self._judge.ledger
        ledger.take(IdsBegun(key))
        arrived = ledger.streams.get(key)
        local = LocalIndex(self._ring, clears_below=arrived is None or arrived.spec.clears_below)
        self._local[key] = local
        self._published.streams[key] = Stream(key) if arrived is None else arrived.fresh()
        self._built[key] = []
        return local
