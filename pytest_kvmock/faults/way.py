"""The way from workers to router: which fault strikes an event there, and what the judge is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.events import Cleared
from pytest_kvmock.faults import changes
from pytest_kvmock.faults.kinds import FAULTS
from pytest_kvmock.hygiene.injected import Injected
from pytest_kvmock.hygiene.problem import Problem

if TYPE_CHECKING:
    from pytest_kvmock.events import RouterEvent
    from pytest_kvmock.faults.fault import Fault, RandomFault
    from pytest_kvmock.harness.delivery import Delivery
    from pytest_kvmock.harness.judge import Judge
    from pytest_kvmock.hygiene.stream import StreamKey
    from pytest_kvmock.hygiene.truth import Truth


class _Held:
    """An event on its way, and after how many more of its worker and rank it arrives."""

    __slots__ = ("chained", "event", "left", "strike")

    def __init__(self, event: RouterEvent, strike: Injected, left: int, *, chained: bool) -> None:
        self.event = event
        self.chained = chained
        self.strike = strike
        self.left = left


class Way:
    """Carries what workers publish, and lets faults strike it.

    Args:
        delivery: where events arrive.
        judge: told what was published, and which strike an event that arrives came of.

    Attributes:
        armed: scripted faults, in the order in which they were asked for.
        random: faults at random; they strike what no scripted one wants.
        doors: faults that change what the index under test is given.
        survived: the faults that the router must survive.
    """

    def __init__(self, delivery: Delivery, judge: Judge) -> None:
        self.armed: list[Fault] = []
        self.random: list[RandomFault] = []
        self.doors: list[Fault] = []
        self.survived: frozenset[str] = frozenset()
        self._held: list[_Held] = []
        self._delivery = delivery
        self._judge = judge

    def __repr__(self) -> str:
        return f"{len(self.armed) + len(self.doors)} waiting, {len(self.random)} at random"

    def begin(self) -> Truth:
        """From here on events go this way, and what was published is told from what arrived."""
        self._delivery.faults = self
        return self._judge.begin_truth()

    def injected(
        self,
        kind: str,
        own: StreamKey,
        *events: RouterEvent,
        keys: frozenset[StreamKey] = frozenset(),
        emptied: bool = False,
    ) -> Injected:
        """The record of a strike.

        Args:
            kind: the fault's name.
            own: whose stream it struck.
            *events: the event that it struck, then what arrives in its place.
            keys: every other stream that it changed.
            emptied: the worker and rank holds nothing any more.
        """
        blocks = frozenset(block for event in events for block in changes.named(event))
        subjects = {block for event in events for block in getattr(event.event.data, "block_hashes", ())}
        keys |= {own}
        if emptied or any(isinstance(event.event.data, Cleared) for event in events):
            streams = [stream for key, stream in self._judge.ledger.streams.items() if key in keys]
            subjects.update(block for stream in streams for held in stream.tiers.values() for block in held)
        event_id = events[0].event.event_id if events else None
        survived, survivable = kind in self.survived, FAULTS[kind].can_be_survived
        return Injected(kind, *own, event_id, keys, blocks, frozenset(subjects), survived, survivable)

    def next_worker(self, own: StreamKey) -> StreamKey | None:
        """The next other worker, with the same rank if it has it; None where there is no other."""
        others = sorted(key for key in self._judge.ledger.streams if key[0] != own[0])
        if not others:
            return None
        worker_id = next((key[0] for key in others if key[0] > own[0]), others[0][0])
        ranks = [key for key in others if key[0] == worker_id]
        return next((key for key in ranks if key[1] == own[1]), ranks[0])

    @property
    def injections(self) -> Sequence[Injected]:
        """What faults have done so far, in order."""
        truth = self._judge.truth
        return () if truth is None else truth.strikes

    def carry(self, event: RouterEvent, chained: bool) -> bool:
        """Have arrive what becomes of an event that a worker publishes; see `Carrier`."""
        judge, key = self._judge, _key(event)
        judge.begin_truth().published(event, judge.log.total, chained=chained)
        due = [held for held in self._held if _key(held.event) == key]
        if judge.standard is not None:
            judge.standard.hear(event)
        fault, arriving = self._strike(event)
        if fault is None:
            self.arrive(event, chained=chained, origin=event)
        else:
            self._struck(fault, event, arriving, chained=chained)
        for held in due:
            held.left -= 1
            if not held.left:
                self._release(held)
        return fault is None or fault.kind != "sink_failure"

    def _strike(self, event: RouterEvent) -> tuple[Fault | RandomFault | None, list[RouterEvent]]:
        """The fault that strikes an event, if one does, and what arrives in its place."""
        faults: list[Fault | RandomFault] = [*self.armed, *self.random]
        for fault in faults:
            arriving = fault.strike(event)
            if arriving is not None:
                return fault, arriving
        return None, []

    def _struck(
        self, fault: Fault | RandomFault, event: RouterEvent, arriving: list[RouterEvent], *, chained: bool
    ) -> None:
        judge, own = self._judge, _key(event)
        strike = self.injected(fault.kind, own, event, *arriving, keys=frozenset(map(_key, arriving)))
        strike.missing = own not in map(_key, arriving)
        standard = judge.standard
        if standard is not None:
            standard.struck(strike, event, held=bool(fault.late_by))
        if fault.kind == "sink_failure":
            strike.missing = False  # the failure itself says so
        whole = bool(arriving) and all(each is event for each in arriving)
        judge.begin_truth().struck(strike, whole=whole)
        if fault.late_by:
            self._held.append(_Held(event, strike, fault.late_by, chained=chained))
        if fault.kind == "sink_failure":
            known = "a sink raised on purpose; the router never got the event"
            judge.sink_failed(
                Problem("sink_failure", *own, known, "a sink takes every event", event, fault=strike),
                event,
                missed=True,
            )
        for i, each in enumerate(arriving):
            self.arrive(each, chained=chained, origin=event, strike=strike if i or each is not event else None)

    def _release(self, held: _Held) -> None:
        """An event that was held back goes on."""
        self._held.remove(held)
        standard = self._judge.standard
        if standard is not None:
            standard.released(held.strike)
        self._judge.begin_truth().released(held.strike)
        self.arrive(held.event, chained=held.chained, origin=held.event, strike=held.strike)

    def arrive(
        self, event: RouterEvent, *, chained: bool, origin: RouterEvent | None = None, strike: Injected | None = None
    ) -> None:
        """An event comes to the end of the way.

        Args:
            event: what arrives.
            chained: whether its hashes must be Dynamo's chain.
            origin: what was published; None: nothing was.
            strike: what made it what it is, or late.
        """
        truth, standard = self._judge.begin_truth(), self._judge.standard
        if standard is not None:
            standard.arrived(_key(event), origin)
        truth.arriving(origin, strike)
        try:
            self._delivery.arrive(event, chained)
        finally:
            truth.arrived()
        if isinstance(event.event.data, Cleared):
            truth.emptied(_key(event), strike)

    def through_the_door(self, event: RouterEvent) -> RouterEvent:
        """What the index under test is given for an event that has arrived."""
        for fault in self.doors:
            given = fault.strike(event)
            if given is not None:
                strike = self.injected(fault.kind, _key(event), event)
                self._judge.begin_truth().given(_key(event), strike)
                return given[0]
        return event


def _key(event: RouterEvent) -> StreamKey:
    return event.worker_id, event.event.dp_rank
