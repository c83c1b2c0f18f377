"""From worker to router: what was published, what is lost on the way, and who else listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pytest_kvmock.events import RouterEvent
from pytest_kvmock.hygiene.problem import Problem

if TYPE_CHECKING:
    from pytest_kvmock.hygiene.stream import StreamKey
    from pytest_kvmock.sinks import Sink

Transport: TypeAlias = Callable[[RouterEvent], Iterable[RouterEvent]]
"""What becomes of an event on its way: the events that arrive for it, none when it is lost."""


class Carrier(Protocol):
    """What stands on the way, and may do harm there (`pytest_kvmock.faults`)."""

    def carry(self, event: RouterEvent, chained: bool) -> bool:
        """Have `Delivery.arrive` called for what becomes of an event; False: sinks after the router do not hear it."""


class Delivery:
    """Takes what workers publish to the router.

    Args:
        arrive: called with each event that arrives, and whether its hashes must be the engine's chain.
        lost: called for a sink that raised: with the problem, the event, and whether the router missed it.
        skipped: called for an event whose id is too high: with worker and rank, the id after the last one that they
            published (None: this event is their first), and the id that it has.

    Attributes:
        published: the id after the last one that was published, by worker and rank.
        kept: told of each event that is published, whatever becomes of it; None: nobody keeps them.
        faults: what does harm on the way; None: nothing does.
        transport: what becomes, at the end of the way, of events that came so far; None: they arrive.
    """

    def __init__(
        self,
        arrive: Callable[[RouterEvent, bool], None],
        lost: Callable[[Problem, RouterEvent, bool], None],
        skipped: Callable[[StreamKey, int | None, int], None],
    ) -> None:
        self.published: dict[StreamKey, int] = {}
        self.transport: Transport | None = None
        self.kept: Callable[[RouterEvent], None] | None = None
        self._arrive = arrive
        self._lost = lost
        self._skipped = skipped
        self._before: list[Sink] = []
        self._after: list[Sink] = []
        self.faults: Carrier | None = None

    def add_sink(self, sink: Sink, *, before: bool) -> None:
        """Tell one more sink of each event, before the router or after it."""
        (self._before if before else self._after).append(sink)

    def publish(self, event: RouterEvent, *, chained: bool) -> None:
        """An event sets out."""
        inner = event.event
        key = (event.worker_id, inner.dp_rank)
        due = self.published.get(key)
        if inner.event_id > (due or 0):
            self._skipped(key, due, inner.event_id)
        self.published[key] = inner.event_id + 1
        if self.kept is not None:
            self.kept(event)
        if self._before and not self._tell(self._before, event, missed=True):
            return
        if self.faults is None:
            self.arrive(event, chained)
        elif not self.faults.carry(event, chained):
            return
        if self._after:
            self._tell(self._after, event, missed=False)

    def arrive(self, event: RouterEvent, chained: bool) -> None:
        """An event comes to its end of the way."""
        if self.transport is None:
            self._arrive(event, chained)
        else:
            for arriving in self.transport(event):
                self._arrive(arriving, chained)

    def _tell(self, sinks: list[Sink], event: RouterEvent, *, missed: bool) -> bool:
        """Tell sinks in order; the first that raises keeps the event from those after it (Dynamo, reference 3.1)."""
        for sink in sinks:
            try:
                sink.publish(event.event, event.storage_tier, event.token_ids)
            except Exception as error:  # noqa: BLE001 - whatever a sink raises is a finding
                known = f"{type(sink).__name__}.publish raised {type(error).__name__}: {error}"
                if missed:
                    known += "; the router never got the event"
                rank = event.event.dp_rank
                problem = Problem("sink_failure", event.worker_id, rank, known, "a sink takes every event", event)
                self._lost(problem, event, missed)
                return False
        return True
