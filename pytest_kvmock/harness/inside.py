"""The interface of a harness for the plugin, servers, subscribers and fleets: `RouterHarness.inside`.

One subject: the interface of a harness for the rest of this package, and for code that builds on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_kvmock.oracle.hygiene.entries import BatchesLost
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import Cleared, StreamKey

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.engines.worker import KvWorker, OpenRequest
    from pytest_kvmock.harness.by_hand import ByHand
    from pytest_kvmock.harness.judge import Judge
    from pytest_kvmock.harness.publisher import Publisher
    from pytest_kvmock.harness.recording import Recording
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.harness.workers import Workers
    from pytest_kvmock.oracle.hygiene.log import EventLog
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.oracle.hygiene.stream import Stream
    from pytest_kvmock.oracle.index.index import RadixIndex
    from pytest_kvmock.values.sinks import EventSink
    from pytest_kvmock.wire.sockets.receiver import LostBatches


class Inside:
    """The interface of a harness for the rest of the package.

    Attributes:
        begun: the requests that fixtures opened; see `body_begins`.
    """

    __slots__ = ("_by_hand", "_events", "_judge", "_publisher", "_recording", "_workers", "begun")

    def __init__(
        self,
        events: EventLog,
        judge: Judge,
        publisher: Publisher,
        workers: Workers,
        *,
        recording: Recording,
        by_hand: ByHand,
    ) -> None:
        self._events, self._judge, self._publisher = events, judge, publisher
        self._workers, self._recording, self._by_hand = workers, recording, by_hand
        self.begun: frozenset[OpenRequest] = frozenset()

    @property
    def reference(self) -> RadixIndex:
        """The reference index."""
        return self._judge.reference

    @property
    def is_async(self) -> bool:
        """Whether the index under test is async."""
        return self._judge.is_async

    @property
    def streams(self) -> Mapping[StreamKey, Stream]:
        """The streams of events, by (worker_id, dp_rank)."""
        return MappingProxyType(self._judge.ledger.streams)

    def use_backend(self, backend: str | BackendSpec) -> None:
        """Set the backend of the workers, once, and make the initial workers.

        Raises:
            ValueError: an unknown backend, or a different one than before.
        """
        self._workers.use_backend(backend)

    @property
    def by_role(self) -> Mapping[str, Sequence[KvWorker]]:
        """The workers of each role of P/D pairs; empty if they have no roles."""
        return self._workers.by_role

    @property
    def has_index_by_role(self) -> bool:
        """Whether the index under test has one index for each role."""
        if not self.by_role or self._judge.under_test is None:
            return False
        from pytest_kvmock.fleets.pairs.role_router import RoleIndexes  # only for harnesses with roles

        return isinstance(self._judge.under_test.index, RoleIndexes)

    def add_to_role(self, kind: str, worker_id: int, dp_rank: int) -> None:
        """Add a worker, or a rank of one, to a role of the harness."""
        self._workers.add_to_role(kind, worker_id, dp_rank)

    def sinks_of(self, worker_id: int) -> list[tuple[EventSink, int | None]]:
        """Return the sinks of `add_sink` that get the events of a worker, each with its worker, or None if it gets the
        events of all workers.
        """
        return self._publisher.sinks_of(worker_id)

    def lost_batches(self, worker_id: int, dp_rank: int, batches: range, observed: str = "") -> None:
        """Record batches of a wire that did not arrive, as a `KvSubscriber` does; see `entries.BatchesLost`."""
        self._publisher.lost_batches(BatchesLost(worker_id, dp_rank, batches, observed))

    def losses_at(self, endpoints: Sequence[str]) -> LostBatches:
        """Return `lost_batches` for a subscriber at these endpoints, one per rank; a capture names their publisher."""
        return self._publisher.losses_at(endpoints)

    def use_recovery(self, recovery: Recovery) -> None:
        """Keep published events, so that a router can ask workers for those that it missed.

        Raises:
            TypeError: not a `Recovery`.
            ValueError: events were already published, other than the Cleared with which some engines begin; or the
                harness already has a recovery, or the recovery belongs to another harness.
        """
        from pytest_kvmock.harness.recovery import Recovery  # imported on first use

        if not isinstance(recovery, Recovery):
            raise TypeError(f"recovery must be a Recovery, got {recovery!r:.80}")
        with self._publisher.lock:
            if self._publisher.recovery is not None:
                raise ValueError("the harness has a recovery already")
            begun = [entry.event for entry in self._events if isinstance(entry.event.event.data, Cleared)]
            if not len(begun) == self._events.total == sum(self._publisher.next_ids.values()):
                raise ValueError(
                    "use_recovery() must be called before any event is published; earlier events were not kept"
                )
            self._publisher.use_recovery(recovery)
            for event in begun:
                recovery.keep(event)

    def forget_history(self, *, events: int) -> None:
        """Drop the history before the last events, for a harness that runs for hours. Held blocks and problems are
        kept.

        Messages then have less detail about a block, and no failure is reproduced.

        Args:
            events: number of last events that stay in the log.
        """
        check_integer("forget_history: events", events, 0)
        with self._publisher.lock:
            self._events.keep_last(events)
            self._recording.cut()
            self._judge.forget_history()

    def body_begins(self) -> None:
        """Mark the requests that fixtures opened: the next verdict leaves them to their teardown, the one after it does
        not.
        """
        self.begun = frozenset(request for worker in self._workers.by_key.values() for request in worker.requests)

    def is_engines_own(self, warning: Problem) -> bool:
        """Whether a faithful mock engine causes this warning by itself, as `multi_lru` and `hash_cache` do."""
        key = (warning.worker_id, warning.dp_rank)
        return (
            warning.rule in self._workers.own_warnings(key) and key not in self._by_hand.keys and warning.fault is None
        )
