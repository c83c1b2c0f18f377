"""The injector of faults: between a worker that publishes and the judge that receives, and before the index under test.

It takes events, and returns deliveries and a record of what a fault did. Its state is its faults and the events that
they delay; it keeps no record of held blocks.
"""

from __future__ import annotations

from pytest_kvmock.oracle.faults import changes
from pytest_kvmock.oracle.faults.fault import Fault, RandomFault
from pytest_kvmock.oracle.faults.kinds import FAULTS
from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.values.events import Cleared, RouterEvent, StreamKey


class _Held:
    """A delayed delivery, and the number of events of its worker and rank after which it arrives."""

    __slots__ = ("delivery", "left")

    def __init__(self, delivery: Delivery, left: int) -> None:
        self.delivery = delivery
        self.left = left


class FaultInjector:
    """Injects faults into published events.

    Attributes:
        armed: scripted faults, in the order of the calls.
        random: random faults; they get the events that no scripted fault takes.
        of_index_input: faults that change only the input of the index under test.
        survived: the faults that the router must survive.
    """

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.random: list[RandomFault] = []
        self.of_index_input: list[Fault] = []
        self.survived: frozenset[str] = frozenset()
        self._held: list[_Held] = []

    def __repr__(self) -> str:
        return f"{len(self.armed) + len(self.of_index_input)} waiting, {len(self.random)} at random"

    def publish(self, sent: Delivery) -> tuple[Injection | None, list[Delivery]]:
        """Inject a fault into an event that a worker publishes, if one applies to it.

        Args:
            sent: the published event.

        Returns:
            The record of the fault, if there was one; and the deliveries that arrive now, in order: those of the event
            (none, one or more), then the delayed events that are due.
        """
        event, own = sent.event, sent.key
        due = [held for held in self._held if held.delivery.key == own]
        injection, deliveries = None, [sent]
        faults: tuple[Fault | RandomFault, ...] = (*self.armed, *self.random)
        for fault in faults:
            arriving = fault.inject(event)
            if arriving is not None:
                injection = self._inject(fault, event, arriving)
                if fault.late_by:
                    self._held.append(_Held(sent._replace(injection=injection), fault.late_by))
                deliveries = [
                    sent._replace(event=each, injection=injection if i or each is not event else None)
                    for i, each in enumerate(arriving)
                ]
                break
        for held in due:
            held.left -= 1
            if not held.left:
                self._held.remove(held)
                deliveries.append(held.delivery)
        return injection, deliveries

    def _inject(self, fault: Fault | RandomFault, event: RouterEvent, arriving: list[RouterEvent]) -> Injection:
        own, keys = _key(event), frozenset(map(_key, arriving))
        return self.injection(
            fault.kind,
            own,
            event,
            *arriving,
            keys=keys,
            missing=own not in keys,
            late=bool(fault.late_by),
            whole=bool(arriving) and all(each is event for each in arriving),
        )

    def injection(
        self,
        kind: str,
        own: StreamKey,
        *events: RouterEvent,
        keys: frozenset[StreamKey] = frozenset(),
        missing: bool = False,
        late: bool = False,
        whole: bool = False,
    ) -> Injection:
        """Record the effect of a fault.

        Args:
            kind: the fault's name.
            own: the worker and rank of the stream that it changed.
            *events: the event that it changed, then what arrives in its place; empty if it acts on the worker itself.
            keys: every other stream that it changed.
            missing: see `Injection`.
            late: see `Injection`.
            whole: see `Injection`.
        """
        return Injection(
            kind,
            *own,
            event_id=events[0].event.event_id if events else None,
            keys=keys | {own},
            blocks=frozenset(block for event in events for block in changes.named(event)),
            subjects=frozenset(block for event in events for block in getattr(event.event.data, "block_hashes", ())),
            survived=kind in self.survived,
            survivable=FAULTS[kind].can_be_survived,
            empties=kind == "restart" or any(isinstance(event.event.data, Cleared) for event in events),
            missing=missing,
            late=late,
            whole=whole,
        )

    def filter_index_input(self, event: RouterEvent) -> tuple[Injection | None, RouterEvent]:
        """Return the record of a fault in the input of the index under test, if any, and the event that it is given."""
        for fault in self.of_index_input:
            given = fault.inject(event)
            if given is not None:
                return self.injection(fault.kind, _key(event), event), given[0]
        return None, event


def _key(event: RouterEvent) -> StreamKey:
    return event.worker_id, event.event.dp_rank
