"""One run of a fleet: the clock, and between router and engines the way of a request.

One subject: what happens in which order at one moment.

Theory of operation. The clock jumps from one moment at which something happens to the next. At one moment, in this order, again
and again until nothing changes:

1. passes end, in the order in which they were started: their events are published, then request by request its end or its first
   token is signalled. After each signal the requests that wait in the router are asked for again;
2. requests arrive, one by one: each is picked for and dispatched before the next;
3. each engine that has work and runs no pass starts one, in the order of the engines. A pass that takes no time ends at once.

An engine that would only decode plans all its passes up to the next block, and the clock jumps to the last one's end: nobody can
tell these passes apart. Where a request is dispatched to it before, the plan is cut behind the pass that is under way then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from pytest_kvmock.fleet.fleet_trace import FleetRequest, Pick
from pytest_kvmock.fleet.router_calls import RouterStalled
from pytest_kvmock.router.loads import LoadBook
from pytest_kvmock.router.routing import Candidate, RouterRequest

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ForwardPass, ScheduledRequest
    from pytest_kvmock.fleet.arrivals import Arrivals, Turn
    from pytest_kvmock.fleet.engine_request import EngineRequest
    from pytest_kvmock.fleet.mock_engine import MockEngine
    from pytest_kvmock.fleet.ranks import Driven
    from pytest_kvmock.fleet.router_calls import Calls, RouterCalls
    from pytest_kvmock.router.routing import Worker

LoadSource: TypeAlias = Literal["router", "engine"]


class Knowledge(Protocol):
    """What is known of the caches, from the events that were delivered so far."""

    def overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return how many leading full blocks of a prompt each worker holds; who has none may be absent."""

    def held_blocks(self, worker: Worker) -> int:
        """Return how many blocks a worker holds."""

    def deliver(self, now_ms: float) -> Calls:
        """Deliver the events that were published since, and those that were late, as far as they are due by now."""

    @property
    def next_ms(self) -> float:
        """When the next event is due that is late; infinite where none is."""


class Seat:
    """One engine as the clock has it.

    Attributes:
        worker: what the router calls it.
        engine: the engine.
        driven: what runs its passes: itself, or the worker whose ranks run together.
    """

    __slots__ = ("driven", "engine", "worker")

    def __init__(self, worker: Worker, engine: MockEngine, driven: Driven) -> None:
        self.worker = worker
        self.engine = engine
        self.driven = driven


class FleetRun:
    """One run, from the first arrival until nothing is open.

    Args:
        seats: the engines, in the order of their workers.
        calls: calls the router.
        knowledge: what is known of the caches.
        arrivals: decides when which request arrives.
        loads: whose loads candidates show: those of a load book, or of the engines.
        loads_every_ms: how old those of engines may be; 0: they are read at each pick.
        start_ms: when the clock starts.
        stop_ms: when it stops: from then on no pass starts, and no request arrives.
        has_ranks: whether workers are named by id and rank.
        plans: whether passes that only decode are run in one go.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        calls: RouterCalls,
        knowledge: Knowledge,
        arrivals: Arrivals,
        *,
        loads: LoadSource = "router",
        loads_every_ms: float = 0.0,
        start_ms: float = 0.0,
        stop_ms: float = math.inf,
        has_ranks: bool = False,
        plans: bool = True,
    ) -> None:
        self._seats = {seat.worker: seat for seat in seats}
        self._position = {seat.worker: position for position, seat in enumerate(seats)}
        self._calls = calls
        self._knowledge = knowledge
        self._arrivals = arrivals
        self._of_engines = loads == "engine"
        self._loads_every = loads_every_ms
        self._read_ms = -math.inf
        self._read: dict[Worker, tuple[int, int, int]] = {}
        self._stop_ms = stop_ms
        self._has_ranks = has_ranks
        self._plans = plans
        self._book = LoadBook(self._seats)
        self.now_ms = start_ms
        self._block_size = seats[0].engine.args.block_size
        self._order: dict[Driven, int] = {}
        for seat in seats:
            self._order.setdefault(seat.driven, len(self._order))
        # (end, when it was started, engine): a pass under way, or a plan. An entry that was replaced is passed over.
        self._ends: list[tuple[float, int, int, Driven]] = []
        self._busy: dict[Driven, tuple[float, int]] = {}
        self._plan: dict[Driven, list[float]] = {}
        self._started = 0
        self._idle: set[Driven] = set()  # they run no pass, and something happened to them since they could do nothing
        self._waiting: list[RouterRequest] = []
        self._asked: tuple[Candidate, ...] = ()
        self._turn_of: dict[RouterRequest, Turn] = {}
        self._routed: dict[ScheduledRequest, tuple[RouterRequest, Worker]] = {}
        self._numbers = 0
        self.requests: list[EngineRequest] = []
        self.turns: list[Turn] = []
        self.served_by: list[int | None] = []
        self.picks: list[Pick] = []

    # ------------------------------------------------------------------------------------------------ the clock

    def run(self) -> Calls:
        """Run until nothing is open, or until the clock stops.

        Raises:
            RouterError: the router did what it must not.
            RouterStalled: requests wait in the router, and nothing runs.
            EngineStalled: an engine can never make progress.
        """
        while True:
            yield from self._knowledge.deliver(self.now_ms)
            yield from self._end_passes()
            if self.now_ms < self._stop_ms:
                for turn, arrival_ms in self._arrivals.take(self.now_ms):
                    yield from self._arrive(turn, arrival_ms)
                if (yield from self._start_passes()):
                    continue
            moment = self._next_moment()
            if moment == math.inf:
                if self._waiting and self.now_ms < self._stop_ms:
                    raise RouterStalled(self.now_ms, self._waiting, self._asked)
                break
            self.now_ms = moment
        self._leave_open()
        yield from self._knowledge.deliver(math.inf)

    def _next_moment(self) -> float:
        ends = self._ends
        while ends and self._busy.get(ends[0][3]) != (ends[0][0], ends[0][1]):
            heappop(ends)
        moments = [ends[0][0]] if ends else []
        if (arrival := self._arrivals.next_ms) < self._stop_ms:
            moments.append(arrival)
        # What is late by itself moves nothing, but for the order of what is heard.
        return min(*moments, self._knowledge.next_ms) if moments else math.inf

    def _end_passes(self) -> Calls:
        """End the passes that end by now, in the order in which they were started."""
        ends, due = self._ends, []
        while ends and ends[0][0] <= self.now_ms:
            end, started, _, driven = heappop(ends)
            if self._busy.get(driven) == (end, started):
                due.append((started, driven))
        for _, driven in sorted(due, key=lambda each: each[0]):
            del self._busy[driven]
            plan = self._plan.pop(driven, None)
            if plan is not None:
                cast("MockEngine", driven).run_plan(plan)  # a worker with ranks plans nothing
                self._idle.add(driven)
            else:
                yield from self._end_pass(driven)

    def _start_passes(self) -> Calls:
        """Start a pass on each engine that can; whether one took no time."""
        at_once = False
        while self._idle:
            driven = min(self._idle, key=self._order.__getitem__)
            self._idle.remove(driven)
            if driven in self._busy or not driven.has_work:
                continue
            plan = cast("MockEngine", driven).plan(self.now_ms, self._stop_ms) if self._can_plan(driven) else []
            if plan:
                self._plan[driven] = plan
                end = plan[-1]
            else:
                end = driven.start_pass(self.now_ms).end_ms
                yield from self._knowledge.deliver(self.now_ms)
            if end <= self.now_ms:
                at_once |= yield from self._end_pass(driven)
            else:
                self._note_end(driven, end)
        return at_once

    def _can_plan(self, driven: Driven) -> bool:
        return self._plans and hasattr(driven, "plan")

    def _note_end(self, driven: Driven, end: float) -> None:
        self._started += 1
        self._busy[driven] = end, self._started
        heappush(self._ends, (end, self._started, self._order[driven], driven))

    def _cut_plan(self, driven: Driven) -> None:
        """End a plan with the pass that is under way now, as a request has come."""
        plan = self._plan.get(driven)
        if plan is None:
            return
        # A pass that would start at this very moment has not begun.
        kept = bisect_left(plan, self.now_ms) + 1
        if kept < len(plan):
            del plan[kept:]
            started = self._busy[driven][1]
            self._busy[driven] = plan[-1], started
            heappush(self._ends, (plan[-1], started, self._order[driven], driven))

    def _end_pass(self, driven: Driven) -> Calls:
        """End the pass of an engine: its events, then a signal for each request; whether it did anything."""
        done = driven.finish_pass()
        yield from self._knowledge.deliver(self.now_ms)
        if done.did_something or done.end_ms > done.start_ms:
            self._idle.add(driven)
        for request in self._ended_first(done):
            yield from self._finished(request)
        for request in done.generated:
            routed = self._routed.get(request)
            if routed is None:
                continue
            if request.status == "finished":
                yield from self._finished(request)
            elif len(request.token_ms) == 1:
                self._book.first_token(routed[0])
                yield from self._signal("first_token", routed[0])
        return done.did_something

    def _ended_first(self, done: ForwardPass) -> Iterable[ScheduledRequest]:
        """Requests that ended without a token of this pass: rejected, or asked for none."""
        if not done.rejected and len(done.finished) <= len(done.generated):
            return ()
        generated = set(map(id, done.generated))
        return [*done.rejected, *(each for each in done.finished if id(each) not in generated)]

    # ---------------------------------------------------------------------------------------------- a request

    def _arrive(self, turn: Turn, arrival_ms: float) -> Calls:
        """Take a request that arrives: pick for it, or let it wait behind those that do."""
        trace = turn.trace
        request = RouterRequest(
            self._numbers,
            turn.prompt,
            self._block_size,
            trace.output_length,
            arrival_ms,
            session_id=trace.session_id,
            priority=trace.priority if isinstance(trace, FleetRequest) else 0,
        )
        self._numbers += 1
        request.now_ms = self.now_ms
        self._turn_of[request] = turn
        overlaps = request.overlaps = self._knowledge.overlaps(request)
        if self._waiting:
            self._waiting.append(request)
            if not self._routed:  # nothing runs, so that nothing would have it asked for again
                yield from self._ask_again()
        elif not (yield from self._ask(request, overlaps)):
            self._waiting.append(request)

    def _signal(self, hook: str, request: RouterRequest) -> Calls:
        """Tell the router, and ask it for those that wait."""
        request.now_ms = self.now_ms
        if self._calls.has(hook):
            yield from self._calls.hook(hook, self.now_ms, request, request=request)
        yield from self._ask_again()

    def _ask_again(self) -> Calls:
        """Ask for each request that waits, once; in the router's order, where it has one."""
        if not self._waiting:
            return
        left = list(self._waiting)
        has_order = self._calls.has("next_waiting")
        while left:
            request = left[0]
            if has_order:
                request = yield from self._calls.next_waiting(tuple(left), self.now_ms)
                if request is None:
                    break
            left.remove(request)
            if (yield from self._ask(request)):
                self._waiting.remove(request)

    def _ask(self, request: RouterRequest, overlaps: Mapping[Worker, int] | None = None) -> Calls:
        """Ask the router for a worker, and dispatch the request to it; whether it has one."""
        request.now_ms = self.now_ms
        overlaps = self._knowledge.overlaps(request) if overlaps is None else overlaps
        candidates = self._candidates(request, overlaps)
        self._asked = candidates
        worker = yield from self._calls.pick(request, candidates, self._position, has_ranks=self._has_ranks)
        if worker is None:
            return False
        known = request.overlaps or {}
        request.status = "running"
        self._book.dispatched(request, worker, known.get(worker, 0))
        best = max((overlaps.get(each, 0) for each in self._book.loads), default=0) if overlaps else 0
        waited = self.now_ms - request.arrival_ms
        pick = Pick(self.now_ms, request.number, worker, overlaps.get(worker, 0), best, waited, request.attempt)
        self.picks.append(pick)
        if self._calls.has("dispatched"):
            yield from self._calls.hook("dispatched", self.now_ms, request, worker, request=request)
        self._dispatch(request, worker)
        return True

    def _dispatch(self, request: RouterRequest, worker: Worker) -> None:
        seat, turn = self._seats[worker], self._turn_of[request]
        self._cut_plan(seat.driven)
        served = seat.engine.dispatch(
            turn.prompt, turn.trace.output_length, request.arrival_ms, priority=request.priority
        )
        self.requests.append(served)
        self.turns.append(turn)
        self.served_by.append(self._position[worker])
        self._routed[served] = request, worker
        self._idle.add(seat.driven)

    def _finished(self, served: ScheduledRequest) -> Calls:
        """Signal the end of a request: its place in a closed loop is free first, then those that wait are asked for."""
        request, _ = self._routed.pop(served)
        request.status = cast("Any", served.status)
        self._book.finished(request)
        self._arrivals.done(self._turn_of.pop(request), self.now_ms)
        yield from self._signal("finished", request)

    def _leave_open(self) -> None:
        """Drop what is open as the clock stopped."""
        for request, _ in self._routed.values():
            request.status = "unfinished"
        for request in self._waiting:
            request.status = "unfinished"
        if self._routed:
            for seat in self._seats.values():
                seat.engine.close()

    # ------------------------------------------------------------------------------------------------ candidates

    def _candidates(self, request: RouterRequest, overlaps: Mapping[Worker, int]) -> tuple[Candidate, ...]:
        if self._of_engines:
            return tuple(self._candidates_of_engines(request, overlaps))
        chain, held, found = request.sequence_hashes, self._knowledge.held_blocks, []
        for worker, load in self._book.loads.items():
            engine = self._seats[worker].engine
            scheduler, manager = engine.scheduler, engine.worker.manager
            found.append(
                Candidate(
                    worker,
                    overlaps.get(worker, 0),
                    load.prefill_tokens,
                    load.blocks,
                    load.new_blocks(chain),
                    load.requests,
                    len(scheduler.waiting) + len(scheduler.parked),
                    manager.num_active_blocks / manager.max_capacity,
                    manager.max_capacity,
                    engine.args.max_num_batched_tokens,
                    held(worker),
                )
            )
        return tuple(found)

    def _candidates_of_engines(self, request: RouterRequest, overlaps: Mapping[Worker, int]) -> Iterable[Candidate]:
        if not self._read or self.now_ms - self._read_ms >= self._loads_every:
            self._read_ms = self.now_ms
            self._read = {seat.worker: _engine_load(seat.engine) for seat in self._seats.values()}
        full, held = len(request.sequence_hashes), self._knowledge.held_blocks
        for worker, seat in self._seats.items():
            engine, overlap = seat.engine, overlaps.get(worker, 0)
            prefill, blocks, active = self._read.get(worker, (0, 0, 0))
            metrics = engine.metrics
            yield Candidate(
                worker,
                overlap,
                prefill,
                blocks,
                full - overlap,
                active,
                metrics.waiting,
                metrics.cache_usage,
                metrics.total_blocks,
                engine.args.max_num_batched_tokens,
                held(worker),
            )


def _engine_load(engine: MockEngine) -> tuple[int, int, int]:
    """Return of an engine: tokens of prompts that are yet to be computed, blocks in use, open requests."""
    scheduler = engine.scheduler
    requests = (*scheduler.running, *scheduler.waiting, *scheduler.parked)
    prefill = sum(max(0, each.prompt_tokens - each.computed_tokens) for each in requests)
    return prefill, engine.worker.manager.num_active_blocks, len(requests)
