"""The clock that engines share: it jumps to the next moment at which something happens, where each stage acts in turn.

One subject: when passes of engines start and end.

Theory of operation. A stage is one kind of thing that happens in time: passes end, requests arrive, passes start. At a
moment, the stages act in order, again and again until nothing is due. An engine takes a seat, and starts a pass when it
has requests and runs no pass. After a pass that could do nothing, it waits until something happens to it.

An engine that would only decode plans all its passes up to one that does something else, and the clock jumps to the end
of the last one; the results are the same. If something happens to the engine earlier, the plan is cut after the pass
that is then under way. The passes of a plan are computed when it ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pytest_kvmock.fleets.clock.engine_state import EngineStalled
from pytest_kvmock.fleets.clock.ranks import RankedWorker

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.engines.schedulers.scheduler_specs import Release
    from pytest_kvmock.fleets.clock.arrivals import Turn
    from pytest_kvmock.fleets.clock.engine_inside import EngineInside
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine

Calls: TypeAlias = Generator["Awaitable[Any]", Any, Any]
"""Steps that an async run awaits, and a sync run runs to the end."""

Stage: TypeAlias = Callable[[float], Iterable[Any]]
"""Does everything that is due at a moment; yields the awaitables."""


_order_of = attrgetter("order")
_start_of = attrgetter("started")


class Seat:
    """One unit that runs passes: an engine, or the ranks of a worker, which run theirs together.

    Args:
        engines: the engine, or the ranks.
        order: its place among all seats.

    Attributes:
        engines: as given.
        order: as given.
        driven: the object that runs passes.
        started: the number of its pass, or of the first pass of its plan, among all passes started in the run.
        end_ms: the end of its pass, or of the last pass of its plan; None: it runs no pass.
        plan: the ends of the passes that it runs in one go; empty: it runs a single pass, or none.
        is_cut: whether its plan was cut.
        cycles: whether its last pass preempted requests and generated nothing.
    """

    __slots__ = ("cycles", "driven", "end_ms", "engines", "is_cut", "order", "plan", "started")

    def __init__(self, engines: Sequence[MockEngine], order: int) -> None:
        self.engines = engines
        self.order = order
        insides = [engine.inside for engine in engines]
        self.driven: EngineInside | RankedWorker = insides[0] if len(insides) == 1 else RankedWorker(insides)
        self.started = 0
        self.end_ms: float | None = None
        self.plan: list[float] = []
        self.is_cut = False
        self.cycles = False


class EngineRun(ABC):
    """A run on one clock, from the first arrival until nothing is open.

    Args:
        start_ms: when the clock starts.
        stop_ms: when the clock stops.

    Attributes:
        now_ms: the present time.
        requests: the requests of the engines, in the order of their first arrival there.
        turns: the trace entry of each request.
        served_by: for each request, the position of the engine that served it last; None: no engine that generates.
    """

    def __init__(self, start_ms: float, stop_ms: float = math.inf) -> None:
        self.now_ms = self._start_ms = start_ms
        self._stop_ms = stop_ms
        self.requests: list[EngineRequest] = []
        self.turns: list[Turn] = []
        self.served_by: list[int | None] = []

    def note(self, request: EngineRequest, position: int | None, turn: Turn) -> None:
        """Note a request that an engine gets."""
        self.requests.append(request)
        self.turns.append(turn)
        self.served_by.append(position)

    def pass_time(self, *stages: Stage) -> Calls:
        """Let the stages act in order, at one moment after the other, until nothing is due."""
        moment = self.now_ms
        while moment < math.inf:
            self.now_ms = max(self.now_ms, moment)
            for act in stages:
                yield from act(self.now_ms)
            moment = self.next_ms

    @property
    @abstractmethod
    def next_ms(self) -> float:
        """The time at which something is due next, possibly now or in the past; infinite if the run is over."""

    @abstractmethod
    def plans_until(self, seat: Seat) -> float:
        """Return the time up to which passes of a seat are planned: each pass starts before it."""

    def record(self, seat: Seat, passes: int) -> None:  # noqa: B027 - most are recorded nowhere
        """Record passes, before they are computed or their plan is cut."""

    def started(self) -> Iterable[Any]:
        """Note that a pass has started."""
        return ()

    def finish(self, seat: Seat) -> ForwardPass:
        """End a pass; return its result."""
        return seat.driven.finish_pass()

    @abstractmethod
    def ended(self, seat: Seat, done: ForwardPass | None) -> Iterable[Any]:
        """Note the result of a pass that has ended; None for planned passes."""

    @abstractmethod
    def check_served(self) -> None:
        """Raise if requests are left that can make no more progress."""

    def stalled(self, engines: Iterable[MockEngine], waiting: Iterable[EngineRequest] = ()) -> EngineStalled:
        """Return the error for engines that are left with requests, and for other waiting requests."""
        schedulers = [engine.inside.scheduler for engine in engines]
        running = tuple(chain.from_iterable(each.running for each in schedulers))
        queues = chain.from_iterable((each.waiting, each.parked) for each in schedulers)
        return EngineStalled(self.now_ms, running, tuple(chain.from_iterable((*queues, waiting))), 0)


class Passes:
    """The passes of a run, with two stages: passes end, passes start.

    Args:
        run: the run of these passes.
        release: the engines' release. Before 1.6.1, an engine that could do nothing tries again at the same moment,
            until it counts as stalled; from 1.6.1 on, it starts no pass until something happens to it.
        ends_at_once: whether a pass of no time ends when it starts; otherwise it ends in its turn, like other passes.
        sources: number of seats, the first ones, that belong to prefill engines: no other engine starts a pass while a
            prefill pass of no time is still to end.
        plans: whether passes are planned.
        end_by: the latest end of a planned pass.
    """

    def __init__(
        self,
        run: EngineRun,
        release: Release,
        *,
        ends_at_once: bool = True,
        sources: int = 0,
        plans: bool = True,
        end_by: float = math.inf,
    ) -> None:
        self._run = run
        self._release = release
        self._ends_at_once = ends_at_once
        self._sources = sources
        self._plans = plans
        self._end_by = end_by
        # (end, number of the start, seat); replaced entries are skipped.
        self._ends: list[tuple[float, int, Seat]] = []
        self._count = 0
        self._seats: dict[MockEngine, Seat] = {}
        # Engines to check for a new pass, because something has happened to them.
        self._idle: set[Seat] = set()
        self._start_ms = -math.inf  # when all engines that could had started a pass

    @property
    def next_ms(self) -> float:
        """When the next pass ends; infinite if none is under way."""
        ends = self._ends
        while ends and ends[0][2].end_ms != ends[0][0]:
            heappop(ends)
        return ends[0][0] if ends else math.inf

    @property
    def go_on(self) -> bool:
        """Whether an engine is in a pass, and its previous pass did not only preempt."""
        return any(seat.end_ms is not None and not seat.cycles for seat in self._seats.values())

    def add(self, engines: Sequence[MockEngine]) -> None:
        """Add an engine, or the ranks of a worker."""
        self._seats.update(dict.fromkeys(engines, Seat(engines, len(self._seats))))

    def touch(self, engine: MockEngine, now_ms: float) -> None:
        """Let an engine start a pass because something happens to it; its plan ends with the pass under way."""
        seat = self._seats[engine]
        self._idle.add(seat)
        self._cut(seat, now_ms)

    def is_busy(self, engine: MockEngine, now_ms: float) -> bool:
        """Return whether an engine is in a pass, and cut its plan; a pass that ends now has ended."""
        seat = self._seats[engine]
        self._cut(seat, now_ms)
        if seat.plan and seat.end_ms == now_ms:
            seat.end_ms = None
            self._compute(seat, seat.plan)
            self._idle.add(seat)
        return seat.end_ms is not None

    def is_in_pass(self, engine: MockEngine) -> bool:
        """Return whether an engine is in a pass."""
        return self._seats[engine].end_ms is not None

    def end_planned(self, engine: MockEngine, now_ms: float) -> Calls:
        """Cut the plan of an engine; a planned pass that ends now ends before the event for which this is called."""
        seat = self._seats[engine]
        self._cut(seat, now_ms)
        if seat.plan and seat.end_ms == now_ms:
            yield from self._end(seat)

    def end(self, now_ms: float) -> Calls:
        """End the passes that are due by now, in the order in which they started; with prefill engines, in the order of
        the seats.
        """
        if self.next_ms > now_ms:
            return
        ends = self._ends
        due = {heappop(ends)[2]: None}
        while ends and self.next_ms <= now_ms:
            due[heappop(ends)[2]] = None
        for seat in due if len(due) == 1 else sorted(due, key=_order_of if self._sources else _start_of):
            yield from self._end(seat)

    def _end(self, seat: Seat) -> Calls:
        """End the pass or plan of a seat; return whether it did anything."""
        done: ForwardPass | None = None
        seat.end_ms, plan = None, seat.plan
        if plan:
            self._compute(seat, plan)
            cast("EngineInside", seat.driven).end_plan()  # as in `_compute`
        else:
            done = self._run.finish(seat)
        did_something = done is None or done.did_something
        if did_something:
            seat.cycles = done is not None and bool(done.preempted) and not done.has_generated
        if did_something or not self._release.instant_passes_first:
            self._idle.add(seat)
        yield from self._run.ended(seat, done)
        return did_something

    def _compute(self, seat: Seat, plan: list[float]) -> None:
        """Compute the passes of a plan: the first of them, or all."""
        if not seat.is_cut:
            self._run.record(seat, len(plan))
        if plan:
            cast("EngineInside", seat.driven).run_plan(plan)  # a worker with ranks plans nothing
        seat.plan, seat.is_cut = [], False

    def start(self, now_ms: float) -> Calls:
        """Start a pass on each engine that can, in the order of the seats."""
        idle = self._idle
        while idle:
            seat = min(idle, key=_order_of)
            if seat.order >= self._sources > 0 and self.next_ms <= now_ms and self._ends[0][2].order < self._sources:
                break
            idle.remove(seat)
            if seat.end_ms is None and seat.driven.has_work:
                yield from self._start(seat, now_ms)
        else:
            self._start_ms = now_ms

    def _start(self, seat: Seat, now_ms: float) -> Calls:
        """Start the next pass of a seat, or plan several."""
        run = self._run
        plan: list[float] = []
        if self._plans:
            plan = seat.driven.plan(now_ms, run.plans_until(seat))
            # After a pass of no time, everything due at this moment happens before the next pass.
            del plan[bisect_right(plan, self._end_by) if plan and plan[0] > now_ms else 0 :]
        seat.plan = plan
        if plan:
            end_ms = plan[-1]
        else:
            run.record(seat, 1)
            end_ms = seat.driven.start_pass(now_ms).end_ms
            yield from run.started()
        self._count += 1
        seat.started = self._count
        if end_ms > now_ms or not self._ends_at_once:
            self._note_end(seat, end_ms)
        elif not (yield from self._end(seat)) and self._release.stalls_at_once and not self._sources:
            run.check_served()

    def _note_end(self, seat: Seat, end_ms: float) -> None:
        seat.end_ms = end_ms
        heappush(self._ends, (end_ms, seat.started, seat))

    def _cut(self, seat: Seat, now_ms: float) -> None:
        plan = seat.plan
        if not plan or seat.is_cut:
            return
        # A pass that starts at this moment has begun if others have.
        kept = 1 + (bisect_right if self._start_ms == now_ms else bisect_left)(plan, now_ms)
        self._run.record(seat, min(kept, len(plan)))
        if kept < len(plan):
            del plan[kept:]
            self._note_end(seat, plan[-1])
        seat.is_cut = True

    def lose(self, engine: MockEngine, now_ms: float) -> None:
        """Drop the pass of a lost engine; the planned passes that have ended by now count."""
        seat = self._seats[engine]
        seat.end_ms, plan = None, seat.plan
        if plan:
            del plan[bisect_right(plan, now_ms) :]
            self._compute(seat, plan)

    def restarted(self, engine: MockEngine) -> None:
        """Begin again after an engine's restart."""
        driven = self._seats[engine].driven
        if isinstance(driven, RankedWorker):
            driven.restarted()

    def close(self) -> None:
        """Let ranks run independently again."""
        for seat in self._seats.values():
            if isinstance(seat.driven, RankedWorker):
                seat.driven.close()
