"""One run of a fleet: the clock, and the path of each request between router and engines.

One subject: the order in which things happen at one moment.

Theory of operation. The clock jumps to the next moment at which something happens. At one moment, these steps repeat in
this order until nothing changes:

1. late events are delivered; passes end, in the order in which they were started: their events are published, then the
   end or the first token of each request is signalled. After each signal the router picks for its waiting requests
   again;
2. incidents happen; requests arrive one by one, and each is dispatched before the next; requests are called off;
3. each engine that has work and runs no pass starts one, in the order of the engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_kvmock.fleets.aborts import Aborts, PlannedAbort
from pytest_kvmock.fleets.beliefs import Beliefs
from pytest_kvmock.fleets.candidates import Offer
from pytest_kvmock.fleets.clock.passes import EngineRun, Passes
from pytest_kvmock.fleets.clock.run_notes import RunNotes
from pytest_kvmock.fleets.incidents import Incident, Incidents
from pytest_kvmock.fleets.report.rows import Pick
from pytest_kvmock.fleets.router_calls import RouterStalled
from pytest_kvmock.fleets.routing.loads import LoadBook
from pytest_kvmock.fleets.routing.routing import RouterRequest, id_of
from pytest_kvmock.fleets.run_record import Recorder

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.arrivals import Arrivals, Turn
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.passes import Calls, Seat
    from pytest_kvmock.fleets.fleet_events import Knowledge
    from pytest_kvmock.fleets.router_calls import RouterCalls
    from pytest_kvmock.fleets.routing.load_feed import LoadFeed
    from pytest_kvmock.fleets.routing.routing import Candidate, Phase, Worker


class FleetRun(EngineRun):
    """One run, from the first arrival until nothing is open.

    Args:
        engines: the engines, by worker, in the order of workers.
        calls: calls the router.
        knowledge: the knowledge of the caches.
        arrivals: decides which request arrives when.
        like: the model for the engines of workers that join without one.
        loads: where the loads of candidates come from.
        in_lock_step: whether the ranks of a worker run their passes together.
        start_ms: when the clock starts.
        stop_ms: when the clock stops: from then on no pass starts and no request arrives.
        plans: whether decode-only passes are computed in one go.
        incidents: what happens to workers, by time.
        cordoned: the workers that are not candidates; incidents change this set.
        aborts: which requests are called off by their number, by time.
        recorder: records passes and candidates; None: they are not recorded.

    Attributes:
        engines: the engines, by worker, with those that joined and those that are gone.
        numbers: for each request that an engine got, its place in the order of arrival at the router.
        arrived: number of requests that arrived at the router.
        beliefs: compares the router's beliefs; None if it has no method for them.
        notes: the notes for the report, picks first.
        incidents: what happens to workers.
        aborts: which requests are called off.
        withdrawn: number of requests that were called off before an engine got them.
        recorder: as given.
    """

    phases: Sequence[Phase | None] = (None,)

    def __init__(
        self,
        engines: Mapping[Worker, MockEngine],
        calls: RouterCalls,
        knowledge: Knowledge[Any],
        arrivals: Arrivals,
        like: MockEngine,
        *,
        loads: LoadFeed,
        in_lock_step: bool = False,
        start_ms: float = 0.0,
        stop_ms: float = math.inf,
        plans: bool = True,
        incidents: Sequence[Incident] = (),
        cordoned: set[Worker] | None = None,
        aborts: Sequence[PlannedAbort] = (),
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(start_ms, stop_ms)
        self.engines: dict[Worker, MockEngine] = {}
        self._position: dict[Worker, int] = {}
        self._calls = calls
        self._knowledge = knowledge
        self._arrivals = arrivals
        self._like = like
        release, self._ranks, self._block_size = like.args.release, like.args.dp_size, like.args.block_size
        self._in_lock_step = in_lock_step
        # A load stream reports after each single pass.
        self._passes = Passes(self, release, plans=plans and loads.source != "stream")
        self.aborts = Aborts(self._call_off, start_ms, aborts)
        self.withdrawn = 0
        self._take(engines)
        self._book = LoadBook(engines)
        self._cordoned: set[Worker] = set() if cordoned is None else cordoned
        self.beliefs = None
        if calls.beliefs:
            self.beliefs = Beliefs(calls, knowledge, self._book, self._cordoned, self._has_blocks)
        calls.on_hook = None if self.beliefs is None else self.beliefs.after
        self._offer = Offer(self.engines, self._book, self._cordoned, knowledge, loads, start_ms=start_ms)
        self._waiting: list[RouterRequest] = []
        self._asked: tuple[Candidate, ...] = ()
        self.incidents = Incidents(self._happen, start_ms, incidents)
        # Workers that get no further request, and those that are gone.
        self._leaving: set[Worker] = set()
        self._gone: set[Worker] = set()
        self._place: dict[RouterRequest, int] = {}
        self._first_ms: dict[RouterRequest, float] = {}
        self._turn_of: dict[RouterRequest, Turn] = {}
        self._routed: dict[ScheduledRequest, tuple[RouterRequest, Worker]] = {}
        # Requests that an engine may end as called off, with their engines.
        self._may_abort: dict[EngineRequest, MockEngine] = {}
        self.arrived = 0
        self.numbers: list[int] = []
        self.notes = RunNotes(engines, start_ms, self.phases)
        self._cordoned.intersection_update(engines)  # without workers that were lost at the end of the last run
        for each in self._cordoned:
            self.notes.is_candidate(each, still=False)
        self.recorder = recorder
        self._who: Any = list(engines)  # as the router gets them in `started`
        self._nobody_from_ms: float | None = None  # since when there is no worker
        self._note_who_is_there()

    def _take(self, engines: Mapping[Worker, MockEngine]) -> None:
        """Add engines; the ranks of a worker run their passes together if this run is in lock step."""
        together: dict[Worker, list[MockEngine]] = {}
        for worker, engine in engines.items():
            self.engines[worker] = engine
            self._position[worker] = len(self._position)
            engine.inside.on_abort = self._abort_of_engine
            together.setdefault(id_of(worker) if self._in_lock_step else worker, []).append(engine)
        for ranks in together.values():
            self._passes.add(ranks)

    def _has_blocks(self, worker: Worker) -> bool:
        manager = self.engines[worker].worker.manager
        return bool(manager.num_active_blocks + manager.num_inactive_blocks)

    # ------------------------------------------------------------------------------------------------ the clock

    def run(self) -> Calls:
        """Run until nothing is open, or until the clock stops.

        Raises:
            RouterError: the router broke a rule of its protocol.
            RouterStalled: requests wait in the router, and nothing runs.
            EngineStalled: an engine can never make progress.
        """
        yield from self._calls.start(self._who, self.now_ms)
        yield from self.pass_time(self._knowledge.deliver, self._passes.end, self._until_stop)
        # Otherwise the next incident or abort would come after the stop.
        if self.now_ms < self._stop_ms and self.incidents.next_ms == math.inf and self.aborts.next_ms == math.inf:
            self.check_served()
        self._leave_open()
        yield from self._knowledge.deliver(math.inf)
        for incident in self.incidents.to_come:
            if incident.kind == "notice":  # the router has not noticed this crash yet
                self._knowledge.remove(incident.worker)

    def _until_stop(self, now_ms: float) -> Calls:
        """Let incidents happen, requests arrive and passes start, until the clock stops."""
        if now_ms < self._stop_ms:
            yield from self.incidents.at(now_ms)
            for turn, arrival_ms in self._arrivals.take(now_ms):
                yield from self._arrive(turn, arrival_ms)
            yield from self.aborts.at(now_ms)
            yield from self._passes.start(now_ms)

    def stop(self) -> None:
        """Stop the clock now; passes under way end."""
        self._stop_ms = min(self._stop_ms, self.now_ms)

    def check_served(self) -> None:
        """Raise if requests are left that can make no more progress. Requests that wait because there is no worker are
        not an error.
        """
        if self._routed:
            raise self.stalled(self.engines.values())
        if self._waiting and self._nobody_from_ms is None:
            raise RouterStalled(self.now_ms, self._waiting, self._asked)

    @property
    def next_ms(self) -> float:
        """The time at which something is due next."""
        moment = self._engines_next_ms
        # In a closed loop, a request may be overdue when a place becomes free.
        if (arrival := max(self._arrivals.next_ms, self.now_ms)) < self._stop_ms:
            moment = min(moment, arrival)
        if (moment < math.inf or self._waiting) and self.incidents.next_ms < self._stop_ms:
            moment = min(moment, self.incidents.next_ms)
        if (moment < math.inf or self._waiting or self._routed) and self.aborts.next_ms < self._stop_ms:
            moment = min(moment, self.aborts.next_ms)
        # A late event does not move the clock unless something else is due; it only changes the order of deliveries.
        return min(moment, self._knowledge.next_ms) if moment < math.inf else moment

    @property
    def _engines_next_ms(self) -> float:
        """The time at which an engine is due next."""
        return self._passes.next_ms

    def plans_until(self, seat: Seat) -> float:  # noqa: ARG002 - of all alike
        """Return the time up to which passes are planned: the stop."""
        return self._stop_ms

    def record(self, seat: Seat, passes: int) -> None:
        """Record planned passes before they are computed, or before a request cuts them short."""
        seat.driven.record_passes(passes)

    def started(self) -> Iterable[Any]:
        """Deliver the events that a pass published at its start."""
        return self._knowledge.deliver(self.now_ms)

    def ended(self, seat: Seat, done: ForwardPass | None) -> Calls:
        """Deliver the events of a pass that has ended, then signal the result of each request; `done` is None for a
        planned pass.
        """
        self._note_sample(seat)
        if done is None:
            yield from self._end_called_off(seat)
            return
        self._offer.passed(seat.engines, done, self.now_ms)
        yield from self._knowledge.deliver(self.now_ms)
        # The original's order: finished without tokens, generated, rejected.
        for request in [each for each in done.finished if not each.generated_tokens]:
            yield from self._finished(request)
        for request in done.generated:
            routed = self._routed.get(request)
            if routed is None:
                continue
            if request.status == "finished":
                yield from self._finished(request)
            elif len(request.token_ms) == done.bursts.get(request, 1):
                self._book.first_token(routed[0])
                yield from self._signal("first_token", routed[0])
        for request in done.rejected:
            yield from self._finished(request)
        yield from self._end_called_off(seat)

    def _note_sample(self, seat: Seat) -> None:
        """Take a sample of the engines of a seat, if there is a recorder."""
        if self.recorder is not None:
            each = ((at, engine) for at, engine in enumerate(self.engines.values()) if engine in seat.engines)
            self.recorder.passed(self.now_ms, each)

    # ---------------------------------------------------------------------------------------------- a request

    def _arrive(self, turn: Turn, arrival_ms: float) -> Calls:
        """Handle a request that arrives: pick for it, or queue it behind the waiting requests."""
        trace = turn.trace
        request = RouterRequest(
            self.arrived,
            turn.prompt,
            self._block_size,
            trace.output_length,
            arrival_ms,
            session_id=trace.session_id,
            priority=trace.priority,
        )
        self.arrived += 1
        request.now_ms = self.now_ms
        self._turn_of[request] = turn
        self.aborts.arrived(request, turn)
        self._opened(request)
        overlaps = self._knowledge.overlaps(request)
        self._note_arrival(request, overlaps)
        if self._waiting or self._keeps_requests:
            self._waiting.append(request)
            if not self._routed:  # nothing runs, so no signal would lead to another pick
                yield from self._ask_again()
        elif not (yield from self._ask(request, overlaps)):
            self._waiting.append(request)

    def _opened(self, request: RouterRequest) -> None:
        """Note a request that has arrived, before the router picks for it."""

    def _note_arrival(self, request: RouterRequest, overlaps: Mapping[Worker, int]) -> None:
        """Note the blocks that each worker holds of an arriving prompt; a request that is sent again arrives again."""
        request.overlaps = overlaps
        if self.recorder is not None:
            self.recorder.arrived(request)

    def _signal(self, hook: str, request: RouterRequest) -> Calls:
        """Call a hook of the router, then ask it to pick for the waiting requests."""
        request.now_ms = self.now_ms
        if self._calls.wants(hook):
            yield from self._calls.hook(hook, self.now_ms, request, request=request)
        yield from self._ask_again()

    def _ask_again(self) -> Calls:
        """Ask the router to pick for each waiting request once, in the router's order if it has one."""
        if not self._waiting or self._keeps_requests:
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
        """Ask the router for a worker, dispatch the request to it, and return whether there was one."""
        request.now_ms = self.now_ms
        overlaps = self._knowledge.overlaps(request) if overlaps is None else overlaps
        if request.overlaps is None:
            self._note_arrival(request, overlaps)
        if self.beliefs is not None:
            yield from self.beliefs.check(request)
        candidates = self._offer.shown(request, overlaps, self.now_ms)
        self._asked = candidates
        worker = yield from self._calls.pick(
            request, candidates, self._position, self._cordoned, has_ranks=self._ranks > 1
        )
        if worker is None:
            return False
        known = request.overlaps or {}
        if self.recorder is not None:
            self.recorder.picked(request, worker, self._offer.of_book(request, {}), overlaps)
        request.status = "running"
        self._book.dispatched(request, worker, known.get(worker, 0))
        best_overlap, best_held = self._greatest(known), self._greatest(overlaps)
        waited = self.now_ms - request.arrival_ms
        believed = None if self.beliefs is None else self.beliefs.of_last(worker)
        found = known.get(worker, 0), best_overlap, overlaps.get(worker, 0), best_held
        pick = Pick(self.now_ms, request.number, worker, *found, waited, request.attempt, believed)
        self.notes.picked(request, pick)
        if self._calls.wants("dispatched"):
            yield from self._calls.hook("dispatched", self.now_ms, request, worker, request=request)
        if worker in self._gone:  # the router has not been notified yet
            yield from self._lost(request)
            return False
        self._dispatch(request, worker)
        return True

    def _greatest(self, overlaps: Mapping[Worker, int]) -> int:
        """Return the greatest overlap among the candidates."""
        there = self._offer.workers
        return max((blocks for each, blocks in overlaps.items() if each in there), default=0)

    def _lost(self, request: RouterRequest, *, again: bool = True) -> Calls:
        """Take a request whose worker is gone out of the books, and notify the router; `again`: the request waits for a
        new worker.
        """
        request.status, request.now_ms = "aborted" if request in self.aborts.called_off else "lost", self.now_ms
        self._book.finished(request)
        self.notes.ended(request)
        if self._calls.wants("finished"):
            yield from self._calls.hook("finished", self.now_ms, request, request=request)
        if again:
            request.attempt += 1
            request.overlaps = None  # it arrives again
            request.status = "waiting"

    def _dispatch(self, request: RouterRequest, worker: Worker) -> None:
        engine, turn = self.engines[worker], self._turn_of[request]
        self._passes.touch(engine, self.now_ms)
        served = engine.inside.dispatch(
            turn.prompt,
            turn.trace.output_length,
            request.arrival_ms,
            priority=request.priority,
            recorded_ms=self.now_ms,
            abort_after_tokens=turn.abort_after_tokens,
        )
        if turn.abort_after_tokens is not None:
            self._may_abort[served] = engine
        place = self._place.get(request)
        if place is None:
            self._place[request] = len(self.requests)
            self.note(served, self._position[worker], turn)
            self.numbers.append(request.number)
        else:
            self.requests[place], self.served_by[place] = served, self._position[worker]
        self._routed[served] = request, worker

    def _finished(self, served: ScheduledRequest) -> Calls:
        """End a request: free its place in a closed loop, then pick for the waiting requests."""
        request, worker = self._routed.pop(served)
        self._may_abort.pop(cast("Any", served), None)
        if request in self._first_ms and served.token_ms:  # its first token came from an earlier attempt
            served.token_ms[0] = self._first_ms.pop(request)
        self._place.pop(request, None)
        request.status = cast("Any", served.status)
        request.reused_tokens = served.first_reused_tokens if served.admissions else None
        self._book.finished(request)
        self.notes.ended(request)
        self._over(request)
        yield from self._signal("finished", request)
        if worker in self._leaving:
            self._drain(id_of(worker))

    def _over(self, request: RouterRequest) -> None:
        """Release the place of an ended request in a closed loop, and the next turn of its session."""
        turn = self._turn_of.pop(request)
        self.aborts.over(request, self.now_ms)
        if request.status == "aborted":
            self._arrivals.called_off(turn, self.now_ms)
        else:
            self._arrivals.done(turn, self.now_ms)
        turn.prompt.release()

    # ---------------------------------------------------------------------------------------- one that is called off

    def _abort_of_engine(self, served: EngineRequest) -> None:
        """Call a request off now, because its engine's `abort` was called, for example by a listener."""
        self.aborts.now(self._routed[served][0], self.now_ms)

    def _call_off(self, request: RouterRequest) -> Calls:
        """Call an open request off: a waiting one at once, a dispatched one when its engine is between passes."""
        place = self._place.get(request)
        if request.status == "waiting":
            self._waiting.remove(request)
            request.status = "aborted"
            if place is None:
                self.withdrawn += 1
            else:  # its worker was lost
                self.requests[place].status = "aborted"
                del self._place[request]
                self._first_ms.pop(request, None)
            self._over(request)
            yield from self._signal("withdrawn", request)
            return
        assert place is not None
        served = self.requests[place]
        engine = self.engines[self._routed[served][1]]
        yield from self._passes.end_planned(engine, self.now_ms)
        self._passes.touch(engine, self.now_ms)
        self._may_abort[served] = engine
        engine.inside.now_ms = max(engine.now_ms, self.now_ms)
        engine.inside.call_off(served, in_pass=self._passes.is_in_pass(engine))
        if served.status == "aborted":
            yield from self._finished(served)

    def _end_called_off(self, seat: Seat) -> Calls:
        """Signal the end of requests that an engine has ended as called off."""
        for served in [each for each, engine in self._may_abort.items() if engine in seat.engines]:
            if served.status == "aborted":
                yield from self._finished(served)

    def _leave_open(self) -> None:
        """Drop the requests that are open when the clock stops, without notifying the router."""
        self._calls.left_open = self._calls.left_open or bool(self._routed)
        for request in self._waiting:
            request.status = "unfinished"
            if self._nobody_from_ms is not None and request in self._place:
                self.requests[self._place[request]].status = "unfinished"
        if self._routed:
            for engine in self.engines.values():
                engine.close()
        for served, (request, _) in self._routed.items():
            served.status = request.status = "unfinished"

    # ------------------------------------------------------------------------------------------------- incidents

    def _happen(self, incident: Incident) -> Calls:
        """Carry out an incident, then pick for the waiting requests."""
        yield from self._do(incident)
        self._note_who_is_there()
        yield from self._ask_again()

    def _note_who_is_there(self) -> None:
        """Note since when there is no worker."""
        if self._offer.workers:
            self._nobody_from_ms = None
        elif self._nobody_from_ms is None:
            self._nobody_from_ms = self.now_ms

    @property
    def _keeps_requests(self) -> bool:
        """Whether requests wait without a pick: there is no worker, and the router needs candidates."""
        return self._nobody_from_ms is not None and self._calls.needs_candidates

    @property
    def unserved_from_ms(self) -> float | None:
        """Since when waiting requests have had no worker; None: there is a worker, or no request waits."""
        return self._nobody_from_ms if self._waiting else None

    def _do(self, incident: Incident) -> Calls:
        worker = incident.worker
        ranks = self._ranks_of(worker)
        match incident.kind:
            case "join":
                ranks, like = self._joining(incident)
                made = {each: self._knowledge.join(each, incident.engine, like) for each in ranks}
                self._gone.difference_update(made)  # a crashed worker may come back under its id
                self._take(made)
                self._offer.join(made, self.now_ms)
                for each in made:
                    self._book.add_worker(each)
                self.notes.happens(self.now_ms, "join", worker, made)
                if self.recorder is not None:
                    for each, engine in made.items():
                        self.recorder.caches.join(each, engine)
                yield from self._tell("worker_added", ranks)
                yield from self._knowledge.deliver(self.now_ms)
            case "notice":
                self._remove(ranks)
                self._knowledge.remove(worker)
                yield from self._tell("worker_removed", ranks)
            case "leave":
                self._leaving.update(ranks)
                self.notes.happens(self.now_ms, "leave", worker, ranks)
                self._remove(ranks)
                self._drain(worker)
                yield from self._tell("worker_removed", ranks)
            case "crash":
                self._gone.update(ranks)
                lost = yield from self._lose_requests(incident, self._knowledge.crash)
                if incident.notice_ms:
                    notice = Incident(incident.ms + incident.notice_ms, "notice", worker)
                    self.incidents.follow(notice, self.now_ms + incident.notice_ms)
                else:
                    yield from self._do(Incident(incident.ms, "notice", worker))
                self._waiting += lost
            case "cordon" | "uncordon":
                # A worker in the requested state already does not change.
                changed = [each for each in ranks if (each in self._cordoned) == (incident.kind == "uncordon")]
                self._cordoned.symmetric_difference_update(changed)
                if changed:
                    self.notes.happens(self.now_ms, incident.kind, worker, changed)
                for each in changed:
                    self.notes.is_candidate(each, still=each not in self._cordoned)
            case "restart":
                restart = partial(self._knowledge.restart, announced=incident.announced)
                lost = yield from self._lose_requests(incident, restart)
                self._offer.join({each: self.engines[each] for each in ranks}, self.now_ms)
                if incident.announced:
                    yield from self._tell("worker_removed", ranks)
                    yield from self._tell("worker_added", ranks)
                elif self.beliefs is not None:
                    self.beliefs.restarted(ranks)
                self._waiting += lost

    def _joining(self, incident: Incident) -> tuple[Sequence[Worker], MockEngine]:
        """Return the ranks of a worker that joins, and the engine to model them on."""
        worker = incident.worker
        return [(worker, rank) for rank in range(self._ranks)] if self._ranks > 1 else [worker], self._like

    def _remove(self, ranks: Sequence[Worker]) -> None:
        """Take the ranks of a worker that is gone or leaving out of the books."""
        for each in ranks:
            self._book.remove_worker(each)
            self.notes.is_candidate(each, still=False)
        self._cordoned.difference_update(ranks)

    def _lose_requests(self, incident: Incident, empty: Callable[[Worker, MockEngine], None]) -> Calls:
        """Empty each engine of a worker with `empty`; return the requests that wait for another worker, in the order of
        dispatch.
        """
        ranks = self._ranks_of(incident.worker)
        for each in ranks:
            self._passes.lose(self.engines[each], self.now_ms)
        lost = [(served, request) for served, (request, of) in self._routed.items() if of in ranks]
        for each in ranks:
            self.engines[each].inside.retract_pass()
            empty(each, self.engines[each])
        for served, request in lost:
            del self._routed[served]
            if served.token_ms:
                self._first_ms.setdefault(request, served.token_ms[0])
        for each in ranks:
            self._passes.restarted(self.engines[each])
        self.notes.happens(self.now_ms, incident.kind, incident.worker, ranks, len(lost))
        if self.recorder is not None:
            for each in ranks:
                self.recorder.caches.remove(each)
        again: list[RouterRequest] = []
        for served, request in lost:
            self._may_abort.pop(cast("Any", served), None)
            over = incident.lost == "drop" or request in self.aborts.called_off
            yield from self._lost(request, again=not over)
            served.status = (
                "lost" if not over else cast("Any", request.status)
            )  # also a request that the pass under way would have ended
            if over:
                self._place.pop(request, None)
                self._over(request)
            else:
                again.append(request)
        return again

    def _drain(self, worker: Worker) -> None:
        """Remove a leaving worker once it has no open request."""
        ranks = self._ranks_of(worker)
        if not any(of in ranks for _, of in self._routed.values()):
            self._leaving.difference_update(ranks)
            self._gone.update(ranks)
            self._knowledge.remove(worker)

    def _ranks_of(self, worker: Worker) -> Sequence[Worker]:
        """Return the router's names for the ranks of a worker; a worker with one rank is its own name."""
        return [each for each in self.engines if id_of(each) == worker]

    @property
    def staying(self) -> dict[Worker, MockEngine]:
        """The engines of the workers that are neither gone nor leaving."""
        away = self._gone | self._leaving
        return {worker: engine for worker, engine in self.engines.items() if worker not in away}

    def close(self) -> None:
        """Let engines and ranks run on their own again."""
        for engine in self.engines.values():
            engine.inside.on_abort = None
            engine.catch_up()
        self._passes.close()

    def _tell(self, hook: str, workers: Sequence[Worker]) -> Calls:
        if self._calls.wants(hook):
            for worker in workers:
                yield from self._calls.hook(hook, self.now_ms, worker)
