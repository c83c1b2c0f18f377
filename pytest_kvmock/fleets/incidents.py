"""Incidents of a fleet: workers that crash, restart, leave, join or are cordoned during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_kvmock.values.checks import check_number, unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.passes import Calls
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker

Kind: TypeAlias = Literal["crash", "notice", "restart", "leave", "join", "cordon", "uncordon"]
NEXT_WORKER: Final = -1
"""Stands for the id of a worker that joins without one; the fleet gives it the next id."""

Lost: TypeAlias = Literal["resubmit", "drop"]
_LOST: Final = ("resubmit", "drop")


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident.

    Attributes:
        ms: when, in virtual milliseconds from the start of a run.
        kind: what happens; "notice": the router is notified of a crash.
        worker: id of the affected worker, with all its ranks; for a join, the new id or NEXT_WORKER.
        lost: what happens to the worker's requests.
        notice_ms: the delay after which the router is notified of a crash.
        announced: whether a restart is announced.
        engine: for a join, the new engine; None: one like the others.
        role: for a join to P/D pairs without an engine, the role of the worker.
    """

    ms: float
    kind: Kind
    worker: int
    lost: Lost = "resubmit"
    notice_ms: float = 0.0
    announced: bool = True
    engine: MockEngine | None = None
    role: Phase | None = None


def has_crashed(worker: int, planned: Iterable[Incident], ms: float) -> bool:
    """Whether by `ms` a worker has crashed, the router was notified, and the worker has not come back."""
    last = max((each for each in planned if each.worker == worker), key=lambda each: each.ms, default=None)
    return last is not None and last.kind == "crash" and last.ms + last.notice_ms < ms


class Incidents:
    """The incidents of a run, a stage of it.

    Args:
        happen: carries out an incident.
        start_ms: when the run starts.
        planned: the incidents planned so far.

    Attributes:
        planned: all incidents, also those that have happened.
    """

    def __init__(self, happen: Callable[[Incident], Calls], start_ms: float, planned: Iterable[Incident]) -> None:
        self._happen = happen
        self._start_ms = start_ms
        self._to_come: list[tuple[float, int, Incident]] = []
        self._count = 0
        self.planned: list[Incident] = []
        for incident in planned:
            self.plan(incident)

    def plan(self, incident: Incident) -> None:
        """Plan an incident, at its time after the start."""
        self.planned.append(incident)
        self.follow(incident, self._start_ms + incident.ms)

    def follow(self, incident: Incident, ms: float) -> None:
        """Plan an incident that follows from another, at a time of the clock."""
        self._count += 1
        heappush(self._to_come, (ms, self._count, incident))

    @property
    def next_ms(self) -> float:
        """The time of the next incident; infinite if there is none."""
        return self._to_come[0][0] if self._to_come else math.inf

    def at(self, now_ms: float) -> Calls:
        """Carry out the incidents that are due by now."""
        while self.next_ms <= now_ms:
            yield from self._happen(heappop(self._to_come)[2])

    @property
    def to_come(self) -> list[Incident]:
        """The incidents that have not happened yet, by time."""
        return [incident for _, _, incident in sorted(self._to_come)]


class Moment:
    """Plans what happens to a fleet at a moment; see `Fleet.at`.

    Args:
        ms: when, in virtual milliseconds from the start of a run.
        plan: adds an incident to the plan of the fleet if it is possible, and returns its worker.
        plan_abort: adds the abort of a request to the plan.
    """

    def __init__(
        self,
        ms: float,
        plan: Callable[[Incident], Worker],
        plan_abort: Callable[[float, int | RouterRequest], None],
    ) -> None:
        self._ms = ms
        self._plan = plan
        self._plan_abort = plan_abort

    def abort(self, request: int | RouterRequest) -> None:
        """Call off a request at any stage, as if its client left. If the request is over by then or has not arrived,
        the abort is among `missed` in the report.

        Args:
            request: its place in the order of arrival, from 0; a hook of a router may also pass the request that it was
                given.

        Raises:
            ValueError: `request` is not an integer of at least 0, or not a request of the current run.
        """
        self._plan_abort(self._ms, request)

    def crash(self, worker: int, lost: Lost = "resubmit", notice_ms: float = 0.0) -> None:
        """Lose a worker for good, with the pass under way. Its requests leave the books at once.

        Args:
            worker: its id; all its ranks.
            lost: "resubmit": its requests go to the router again, from their prompts (`request.attempt` + 1); "drop":
                they end as "lost".
            notice_ms: how long the router still sees it as a candidate; requests sent there come back and wait.

        Raises:
            ValueError: there is no such worker at that time, or an argument is out of range.
        """
        if lost not in _LOST:
            raise ValueError(f"crash: {unknown_text('lost', lost, _LOST)}")
        check_number("crash: notice_ms", notice_ms, unit=" (milliseconds)")
        self._plan(Incident(self._ms, "crash", worker, lost, notice_ms))

    def restart(self, worker: int, announced: bool = True, lost: Lost = "resubmit") -> None:
        """Restart a worker: it loses its blocks and requests.

        Args:
            worker: its id; all its ranks.
            announced: whether router and index are notified: `worker_removed`, then `worker_added`. A silent restart is
                an injected fault: a harness attributes the consequences to it, as for `faults.restart`.
            lost: as in `crash`.

        Raises:
            ValueError: there is no such worker at that time, or `lost` is unknown.
        """
        if lost not in _LOST:
            raise ValueError(f"restart: {unknown_text('lost', lost, _LOST)}")
        self._plan(Incident(self._ms, "restart", worker, lost, announced=announced))

    def leave(self, worker: int) -> None:
        """Let a worker leave: it gets no more requests, finishes its own, and its blocks are removed.

        Raises:
            ValueError: there is no such worker at that time.
        """
        self._plan(Incident(self._ms, "leave", worker))

    def cordon(self, worker: int) -> None:
        """Stop offering a worker as a candidate, as if it were unhealthy or drained by hand. It serves its requests,
        and the router gets no call.

        It stays cordoned after a restart, and in later runs of the fleet. Nothing changes if it is cordoned already.

        Args:
            worker: its id; all its ranks.

        Raises:
            ValueError: there is no such worker at that time.
        """
        self._plan(Incident(self._ms, "cordon", worker))

    def uncordon(self, worker: int) -> None:
        """Offer a worker as a candidate again; nothing changes if it is not cordoned.

        Raises:
            ValueError: there is no such worker at that time.
        """
        self._plan(Incident(self._ms, "uncordon", worker))

    def join(
        self,
        worker: int | None = None,
        *,
        engine: MockEngine | None = None,
        role: Phase | None = None,
        after_ms: float = 0.0,
    ) -> Worker:
        """Add a worker.

        Args:
            worker: its id, which no other worker has or had; on bare engines a crashed worker's id may return. None:
                the next one.
            engine: its engine, in a fleet of bare engines; None: one like the first.
            role: for P/D pairs, "prefill" or "decode": each engine of the worker is like the first engine of that role.
                None: the role of `engine`.
            after_ms: how long it takes to start; the join is later by this time.

        Returns:
            Its id.

        Raises:
            TypeError: `engine` is not an engine, or the fleet belongs to a harness, which makes engines itself.
            ValueError: the id was used, the engine cannot serve in this fleet, a number is out of range, or the role is
                missing or differs from the engine's.
        """
        check_number("join: after_ms", after_ms, unit=" (milliseconds)")
        return self._plan(
            Incident(self._ms + after_ms, "join", NEXT_WORKER if worker is None else worker, engine=engine, role=role)
        )
