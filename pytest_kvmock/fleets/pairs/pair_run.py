"""One run of a fleet of P/D pairs: two picks and two legs for each request.

One subject: the path of a request between router, prefill engine and decode engine.

Theory of operation. The router picks twice for a request (`request.phase`). Serial hand-overs (NixlConnector) send the
prefill leg first, then the decode leg with its answer; others send both at once. With `order="prefill_first"`, a serial
decode worker is picked when the prefill leg is answered, as in Dynamo. With `"decode_first"`, and if both legs are sent
at once, both workers are picked before the first leg is sent, and count from then on. If one pick must wait, the other
one leaves no entry.

The fleet acts as a proxy: it passes parameters on unchanged. When a leg fails, it calls off the other one, and the
client gets the error. A router may do this itself: `hand_over(request, parameters)` returns the parameters of the
decode leg (with rooms, of both legs), and `leg_failed(request)` returns "retry" or "wait".

Ranks are separate engines that run their passes independently, as those of dense models do; a pick names a rank. For
SGLang's P, the room (room % ranks) or `disagg_prefill_dp_rank` must name it; `routed_dp_rank` is the pick.

The entry of a prefill leg in the load book ends with its answer, or, if both legs are sent at once, with the first
token of the decode leg. For a router that declares `holds_prefill`, it ends with the request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from pytest_kvmock.engines.base.hand_over import HandOver, check_kind
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied
from pytest_kvmock.fleets.clock.pair_handoff import PairLink
from pytest_kvmock.fleets.clock.sglang_handoff import SglangHandoffs
from pytest_kvmock.fleets.clock.vllm_handoff import VllmHandoffs
from pytest_kvmock.fleets.fleet_run import FleetRun
from pytest_kvmock.fleets.pairs.role_figures import RanOut, RoleNotes
from pytest_kvmock.fleets.report.rows import Pick
from pytest_kvmock.fleets.router_calls import RouterError
from pytest_kvmock.fleets.routing.routing import DECODE_ALONE, PHASES, REFUSE, id_of, stream_of

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.handoff import Handoff
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.passes import Calls, Seat
    from pytest_kvmock.fleets.incidents import Incident
    from pytest_kvmock.fleets.routing.routing import PairAnswer, Phase, RouterRequest, Worker

Order: TypeAlias = Literal["prefill_first", "decode_first"]

ORDERS: Final = ("prefill_first", "decode_first")

_HOLDING: Final = ("loading", "received", "taken up")
"""States of a leg that holds blocks but does not run."""

_MOST_RETRIES: Final = 100
"""The router's retries of one request that are taken for an endless loop."""

_ANSWERS: Final = {"prefill": (DECODE_ALONE, REFUSE), "decode": (REFUSE,)}


class _Way:
    """The state of one request between its two engines.

    Attributes:
        picks: the pick for each leg.
        made: for each pick that does not count yet, its report row and its note for the recorder.
        overlaps: by leg, the blocks of the prompt that each worker held before the first pick.
        legs: the legs that are open.
        counted: the legs that have an entry in the load book.
        handoff: the hand-over; None: not started yet.
        answer: the answer to the prefill leg.
        is_answered: whether the prefill leg was answered.
        doing: the state of legs when their client left.
        has_first: whether the decode leg has its first token.
        held: tokens that its decode worker held at the pick.
        error: how the request will end with its last leg, because a leg has failed; None: no leg has failed.
        failed: the leg that failed first, and when; None: no leg has failed.
    """

    __slots__ = (
        *("answer", "counted", "doing", "error", "failed", "handoff", "has_first", "held", "is_answered", "legs"),
        *("made", "overlaps", "picks"),
    )

    def __init__(self) -> None:
        self.picks: dict[Phase, Worker | PairAnswer] = {}
        self.made: dict[Phase, tuple[Pick, Any]] = {}
        self.overlaps: dict[Phase, Mapping[Worker, int]] = {}
        self.legs: dict[Phase, EngineRequest] = {}
        self.counted: list[Phase] = []
        self.doing: dict[Phase, str] = {}
        self.handoff: Handoff | None = None
        self.answer: HandOver | None = None
        self.error: str | None = None
        self.failed: tuple[Phase, float] | None = None
        self.is_answered = self.has_first = False
        self.held = 0


class PairRun(FleetRun):
    """One run of a fleet of P/D pairs.

    Args:
        *args: as of `FleetRun`.
        order: the leg that the router picks for first.
        link: the link between the engines.
        likes: by role, the model for engines of workers that join without one.
        **options: as of `FleetRun`.

    Attributes:
        roles: the counts of the legs.
    """

    phases = PHASES

    def __init__(
        self, *args: Any, order: Order, link: PairLink, likes: Mapping[Phase, MockEngine], **options: Any
    ) -> None:
        self.of_role: dict[Phase, dict[Worker, MockEngine]] = {phase: {} for phase in PHASES}
        self._handoffs: Any = None
        super().__init__(*args, **options)
        self._likes = likes
        self._order: Sequence[Phase] = PHASES if order == "prefill_first" else PHASES[::-1]
        sources, destinations = ([*self.of_role[phase].values()] for phase in PHASES)
        self._in_rooms = self._like.args.hands_over_in_rooms
        make = SglangHandoffs if self._in_rooms else VllmHandoffs
        self._failed: list[EngineRequest] = []
        self._handoffs = make(
            sources,
            self._expect,
            self._arrivals,
            self._passes,
            destinations,
            finished=self._failed.append,
            link=link,
        )
        self._handoffs.on_answer = self._answered
        self._join_ranks(self.engines)
        self._is_serial = not self._handoffs.at_once
        self._ways: dict[RouterRequest, _Way] = {}
        self._request_of: dict[Handoff, RouterRequest] = {}
        # By place, how and when a request ended that did not finish; its engine still writes to its row.
        self._ends: dict[int, tuple[str, float]] = {}
        self._retries: Counter[RouterRequest] = Counter()
        self.roles = RoleNotes()
        if self.beliefs is not None:
            self.beliefs.workers_of = lambda request: [
                each for each in self._book.loads if each in self.of_role[request.phase or "prefill"]
            ]

    def _take(self, engines: Mapping[Worker, MockEngine]) -> None:
        super()._take(engines)
        for worker, engine in engines.items():
            self.of_role[cast("Phase", engine.args.worker_type)][worker] = engine
            if self._handoffs is not None:
                self._handoffs.add(engine)
        if self._handoffs is not None:
            self._join_ranks(engines)

    def _join_ranks(self, workers: Iterable[Worker]) -> None:
        """Join the engines of each of these workers as its ranks."""
        for worker in dict.fromkeys(map(id_of, workers)):
            self._handoffs.join_ranks([self.engines[each] for each in self._ranks_of(worker)])

    def _joining(self, incident: Incident) -> tuple[Sequence[Worker], MockEngine]:
        like = incident.engine
        if like is None:
            assert incident.role is not None  # as was checked
            like = self._likes[incident.role]
        if not self._knowledge.has_ranks:
            return [incident.worker], like
        return [(incident.worker, rank) for rank in range(like.args.dp_size)], like

    @property
    def link_ms(self) -> float:
        """Sum of the times of all transfers, in virtual milliseconds."""
        return float(self._handoffs.link_ms)

    def _size_of(self, phase: Phase) -> int:
        return next((each.args.block_size for each in self.of_role[phase].values()), self._block_size)

    # ------------------------------------------------------------------------------------------------ the clock

    @property
    def _engines_next_ms(self) -> float:
        if self._failed:
            return self.now_ms
        moment = float(self._handoffs.next_ms)
        return min(super()._engines_next_ms, moment if moment < self._stop_ms else math.inf)

    def run(self) -> Calls:
        """Run until nothing is open, or until the clock stops; see `FleetRun.run`."""
        self._who = {phase: [*self.of_role[phase]] for phase in PHASES}
        try:
            yield from super().run()
        except EngineDied as death:  # because of a leg's parameters
            raise RouterError(str(death), self.now_ms) from death
        for place, (status, ended_ms) in self._ends.items():
            row = self.requests[place] = copy(self.requests[place])  # its engine may still have a leg that only drains
            row.status, row.ended_ms = cast("Any", status), ended_ms

    def check_served(self) -> None:
        """Raise if requests are left that can make no more progress; see `FleetRun.check_served`."""
        for request, way in () if self._in_rooms else self._ways.items():
            leg = None if way.handoff is None else way.handoff.leg
            worker = way.picks.get("decode")
            lacking = [] if leg is None else self.engines[cast("Worker", worker)].worker.pair.lacking(leg)
            if lacking:
                text = (
                    f"{self._calls.name}.hand_over() returned parameters without {' and '.join(lacking)}, so the "
                    f"decode leg at worker {worker!r} waits for ever, as in vLLM"
                )
                raise RouterError(text, self.now_ms, request)
        gone = [phase for phase in PHASES if not any(each in self.of_role[phase] for each in self._offer.workers)]
        if not self._routed and all(any(each not in self._ways[of].picks for each in gone) for of in self._waiting):
            return  # a missing worker is not an error
        super().check_served()

    def _tell(self, hook: str, workers: Sequence[Worker]) -> Calls:
        """Notify the router of workers that come or go, with their role if it takes that argument."""
        role_of = {worker: phase for phase in PHASES for worker in self.of_role[phase]}
        if self._calls.wants(hook):
            for worker in workers:
                more = (role_of[worker],) if self._calls.takes(hook, 2) else ()
                yield from self._calls.hook(hook, self.now_ms, worker, *more)

    def _until_stop(self, now_ms: float) -> Calls:
        if now_ms < self._stop_ms:
            self._handoffs.at(now_ms)
            yield from self._settle()
        yield from super()._until_stop(now_ms)

    def finish(self, seat: Seat) -> ForwardPass:
        """End a pass; blocks may arrive from other engines."""
        return seat.driven.finish_pass(blocks_may_come=self._handoffs.in_transfer or self._passes.go_on)

    def ended(self, seat: Seat, done: ForwardPass | None) -> Calls:
        """Deliver the events of a pass that has ended, then signal the result of each leg; None: a planned pass."""
        self._handoffs.pass_ended(seat.engines[0], done, self.now_ms)
        if done is None:
            yield from super().ended(seat, None)
            yield from self._settle()
            return
        self._note_sample(seat)
        self._offer.passed(seat.engines, done, self.now_ms)
        yield from self._knowledge.deliver(self.now_ms)
        first = [each for each in done.finished if not each.generated_tokens]
        for served in dict.fromkeys((*first, *(done.admitted if self._in_rooms else ()), *done.generated)):
            routed = self._routed.get(served)
            if routed is None:
                continue
            request, way = routed[0], self._ways[routed[0]]
            if served.status == "finished":
                yield from self._finished(served)
            elif served.token_ms and not way.has_first and way.legs.get("decode") is served:
                yield from self._first_token(request, way)
        for served in (*done.finished, *done.rejected, *done.aborted):
            if served in self._routed:
                yield from self._finished(served)
        yield from self._end_called_off(seat)
        yield from self._settle()

    def _settle(self) -> Calls:
        """Signal the ends of legs that ended outside a pass, and note leases that ran out."""
        while self._failed:
            served = self._failed.pop(0)
            if served in self._routed:
                yield from self._finished(served)
        for engine in () if self._in_rooms else self.of_role["prefill"].values():
            connector = engine.worker.pair.connector
            for name in connector.ran_out:
                request = self._request_of[self._handoffs.handoff_of(name)]
                phase = request.phase if request.status == "running" else request.status
                self.roles.ran_out.append(RanOut(request.number, str(phase)))
            connector.ran_out.clear()

    # ------------------------------------------------------------------------------------------------ the picks

    def _opened(self, request: RouterRequest) -> None:
        way = self._ways[request] = _Way()
        self._enter(request, way, self._order[0])

    def _enter(self, request: RouterRequest, way: _Way, phase: Phase) -> None:
        """Switch a request to one of its two legs, with the block size of that role's workers."""
        other: Phase = "decode" if phase == "prefill" else "prefill"
        request.phase, request.picked = phase, way.picks.get(other)
        size = self._size_of(phase)
        if size != request.block_size:
            request.block_size = size
            request.local_hashes = request.prompt.block_hashes(size)
            request.sequence_hashes = request.prompt.sequence_hashes(size)

    def _to_pick(self, way: _Way) -> Iterable[Phase]:
        """Yield the legs that need a pick now, in order."""
        for phase in self._order:
            if phase in way.picks:
                continue
            yield phase
            waits = self._is_serial and phase == "prefill" and self._order == PHASES
            if waits and way.picks.get(phase) is not DECODE_ALONE:
                return

    def _ask(self, request: RouterRequest, overlaps: Mapping[Worker, int] | None = None) -> Calls:
        """Ask the router for the workers needed now, and send the legs that can be sent; return whether the request
        needs no wait.
        """
        way = self._ways[request]
        had = dict(way.picks)
        for phase in self._to_pick(way):
            self._enter(request, way, phase)
            answer = yield from self._pick(request, way, phase, overlaps)
            overlaps = None
            if answer is None:
                way.picks = had
                way.made.clear()
                self._enter(request, way, next(iter(self._to_pick(way))))
                return False
            if answer is REFUSE:
                self.roles.refused[phase].append(request.number)
                yield from self._end(request, way, "refused", asks=False)
                return True
            way.picks[phase] = answer
        return (yield from self._send(request, way))

    def _pick(self, request: RouterRequest, way: _Way, phase: Phase, overlaps: Mapping[Worker, int] | None) -> Calls:
        request.now_ms = self.now_ms
        overlaps = self._knowledge.overlaps(request) if overlaps is None else overlaps
        if phase not in way.overlaps:
            way.overlaps[phase] = overlaps
            self._note_arrival(request, overlaps)
        known = request.overlaps = way.overlaps[phase]
        if self.beliefs is not None:
            yield from self.beliefs.check(request)
        offer = self._offer
        offer.of = self.of_role[phase]
        candidates = self._asked = offer.shown(request, overlaps, self.now_ms)
        there, of_book = offer.workers, [] if self.recorder is None else offer.of_book(request, {})
        offer.of = None
        if not candidates and self._calls.needs_candidates:
            return None
        answer = yield from self._calls.pick(
            request,
            candidates,
            self._position,
            self._cordoned,
            has_ranks=self._knowledge.has_ranks,
            besides=_ANSWERS[phase],
        )
        if answer is None or answer in _ANSWERS["prefill"]:
            return answer
        best = max((blocks for each, blocks in known.items() if each in there), default=0)
        best_held = max((blocks for each, blocks in overlaps.items() if each in there), default=0)
        believed = None if self.beliefs is None else self.beliefs.of_last(answer)
        found = known.get(answer, 0), best, overlaps.get(answer, 0), best_held
        waited = self.now_ms - request.arrival_ms
        pick = Pick(self.now_ms, request.number, answer, *found, waited, request.attempt, believed, phase)
        recorded = None if self.recorder is None else (of_book, overlaps)
        way.made[phase] = pick, recorded
        if phase == "decode":
            way.held = min(request.prompt_tokens, overlaps.get(answer, 0) * request.block_size)
        return answer

    # ------------------------------------------------------------------------------------------------ the legs

    def _send(self, request: RouterRequest, way: _Way) -> Calls:
        """Count new picks and send the legs that can be sent; return whether the request is under way."""
        request.status = "running"
        made, way.made = way.made, {}
        for phase in sorted(made, key=self._order.index):
            pick, recorded = made[phase]
            self._enter(request, way, phase)
            if self.recorder is not None and recorded is not None:
                self.recorder.picked(request, pick.worker, *recorded)
            self._book.dispatched(request, pick.worker, way.overlaps[phase].get(pick.worker, 0))
            self.notes.picked(request, pick)
            way.counted.append(phase)
            if self._calls.wants("dispatched"):
                yield from self._calls.hook("dispatched", self.now_ms, request, pick.worker, request=request)
        if any(each in self._gone for each in way.picks.values() if not way.is_answered or each == way.picks["decode"]):
            yield from self._lost(request)  # the router has not been notified yet
            return False
        if way.picks.get("prefill") is DECODE_ALONE:
            return (yield from self._send_alone(request, way))
        if way.is_answered:
            yield from self._send_decode(request, way, way.answer)
        else:
            yield from self._send_prefill(request, way)
        return True

    def _engine_for(self, way: _Way, phase: Phase) -> tuple[Worker, MockEngine]:
        worker = cast("Worker", way.picks[phase])
        return worker, self.engines[worker]

    def _send_alone(self, request: RouterRequest, way: _Way) -> Calls:
        self._enter(request, way, "decode")
        worker, engine = self._engine_for(way, "decode")
        self.roles.alone.append((request.number, request.prompt_tokens - way.held))
        if self._in_rooms:  # 400: "without bootstrap room"
            self.roles.ends["decode"]["rejected"] += 1
            yield from self._end(request, way, "failed", asks=False)
            return True
        turn = self._turn_of[request]
        self._passes.touch(engine, self.now_ms)
        served = engine.inside.dispatch(
            turn.prompt,
            turn.trace.output_length,
            request.arrival_ms,
            priority=request.priority,
            abort_after_tokens=turn.abort_after_tokens,
        )
        self._route(served, request, way, "decode", worker)
        return True

    def _send_prefill(self, request: RouterRequest, way: _Way) -> Calls:
        self._enter(request, way, "prefill")
        worker, engine = self._engine_for(way, "prefill")
        handoff = way.handoff = self._handoffs.new(self._turn_of[request], request.arrival_ms)
        self._request_of[handoff] = request
        given = carried = None
        if not self._is_serial:
            given = engine.worker.pair.new_hand_over()
            carried = yield from self._carried(request, given)
        self._handoffs.prefill(handoff, engine, carried if self._in_rooms else given, self.now_ms)
        self._route(handoff.prefilled, request, way, "prefill", worker)
        if handoff.prefilled.status == "rejected":  # at once, because it is longer than the pool
            self._failed.append(handoff.prefilled)
        if not self._is_serial:
            self._handoffs.send(handoff, carried, self.now_ms)

    def _send_decode(self, request: RouterRequest, way: _Way, answer: HandOver | None) -> Calls:
        self._enter(request, way, "decode")
        carried = yield from self._carried(request, answer)
        self._handoffs.send(way.handoff, carried, self.now_ms)

    def _carried(self, request: RouterRequest, hand_over: HandOver | None) -> Calls:
        """Return the parameters of the decode leg: those from the router's `hand_over`, otherwise all."""
        if not self._calls.has("hand_over"):
            return hand_over
        request.now_ms = self.now_ms
        given = yield from self._calls.hook("hand_over", self.now_ms, request, hand_over, request=request)
        name = f"{self._calls.name}.hand_over()"
        if given is not None and not isinstance(given, Mapping):
            text = f"{name} must return parameters, or None, got {given!r:.80}"
            raise RouterError(text, self.now_ms, request)
        worker, engine = self._engine_for(self._ways[request], "prefill")
        port = engine.worker.pair
        try:
            carried = check_kind(given, port.role.hand_over, name)
            if self._in_rooms:
                port.check_leg(carried or {}, name)
        except ValueError as error:
            raise RouterError(str(error), self.now_ms, request) from None
        if carried is not None and not isinstance(carried, HandOver):
            carried = port.hand_over_of(carried)  # the router's own mapping names the same engine
        picked = stream_of(worker)[1]
        routed = carried.get("routed_dp_rank", picked) if self._in_rooms and carried is not None else picked
        if routed != picked:
            text = f"{name} returned routed_dp_rank={routed!r:.80}; expected {picked}, the rank that was picked"
            raise RouterError(text, self.now_ms, request)
        return carried

    def _answered(self, handoff: Handoff, answer: HandOver | None) -> None:
        """Note the answer of a prefill leg that has ended."""
        way = self._ways.get(self._request_of[handoff])
        if way is not None and way.handoff is handoff:
            way.answer = answer

    def _expect(self, handoff: Handoff) -> EngineRequest:
        """Open the decode leg on the picked engine."""
        request = self._request_of[handoff]
        way, turn = self._ways[request], handoff.turn
        worker, engine = self._engine_for(way, "decode")
        handoff.destination = engine
        served = handoff.request = engine.inside.expect(
            turn.prompt, turn.trace.output_length, handoff.arrival_ms, abort_after_tokens=turn.abort_after_tokens
        )
        self._route(served, request, way, "decode", worker)
        return served

    def _route(self, served: Any, request: RouterRequest, way: _Way, phase: Phase, worker: Worker) -> None:
        """Note a leg that was given to an engine."""
        self._routed[served] = request, worker
        way.legs[phase] = served
        self.roles.counts[phase]["requests"] += 1
        turn = self._turn_of[request]
        if phase == "decode" and turn.abort_after_tokens is not None:
            self._may_abort[served] = self.engines[worker]
        place = self._place.get(request)
        if place is None:
            self._place[request] = len(self.requests)
            self.note(served, self._position[worker], turn)
            self.numbers.append(request.number)
        elif phase == "decode" or "decode" not in way.legs:
            self.requests[place], self.served_by[place] = served, self._position[worker]

    # -------------------------------------------------------------------------------------------- the ends of legs

    def _first_token(self, request: RouterRequest, way: _Way) -> Calls:
        way.has_first = True
        if not self._is_serial and "prefill" in way.counted and not self._calls.holds_prefill:
            yield from self._close_entry(request, way, "prefill")
        self._enter(request, way, "decode")
        self._book.first_token(request)
        yield from self._signal("first_token", request)

    def _close_entry(self, request: RouterRequest, way: _Way, phase: Phase) -> Calls:
        """Take a leg out of the books, and notify the router."""
        way.counted.remove(phase)
        self._enter(request, way, phase)
        request.now_ms = self.now_ms
        self._book.finished(request)
        self.notes.ended(request)
        if self._calls.wants("finished"):
            yield from self._calls.hook("finished", self.now_ms, request, request=request)

    def _finished(self, served: ScheduledRequest) -> Calls:
        """Continue after the end of a leg."""
        request, worker = self._routed.pop(served)
        self._may_abort.pop(cast("Any", served), None)
        way = self._ways[request]
        phase: Phase = "prefill" if way.legs.get("prefill") is served else "decode"
        del way.legs[phase]
        request.reused_tokens = served.first_reused_tokens if served.admissions else None
        is_called_off = request in self.aborts.called_off or self._has_all_it_waits_for(request, phase, served)
        is_over = request not in self._turn_of  # it was answered or its client left; this leg only drains
        how = str(served.status) if served.status in ("finished", "rejected") else "failed"
        self._note_end(way, phase, cast("Any", served), how)
        if is_called_off or is_over:
            if not is_over:
                self.aborts.called_off.add(request)  # its other leg ends in the same way
            if not is_over and not way.legs:
                has_all = phase == "decode" and how == "finished"
                yield from self._end(request, way, "finished" if has_all else "aborted")
        elif how != "finished":
            yield from self._fails(request, way, phase, how)
        elif phase == "prefill":
            yield from self._prefilled(request, way)
        else:
            yield from self._end(request, way, way.error or "finished")
        if request not in self._turn_of and not way.legs:
            self._ways.pop(request, None)
        if worker in self._leaving:
            self._drain(id_of(worker))

    def _has_all_it_waits_for(self, request: RouterRequest, phase: Phase, served: ScheduledRequest) -> bool:
        """Whether a leg ended because its client left after a number of tokens (its engine counts them)."""
        turn = self._turn_of.get(request)
        most = None if turn is None or phase == "prefill" else turn.abort_after_tokens
        return most is not None and served.status != "finished" and len(served.token_ms) >= most

    def _prefilled(self, request: RouterRequest, way: _Way) -> Calls:
        """Continue after the answer of a prefill leg."""
        way.is_answered = True
        if not self._is_serial:
            return
        if way.error is not None:
            yield from self._end(request, way, way.error)
            return
        if not self._calls.holds_prefill:
            yield from self._close_entry(request, way, "prefill")
        request.status = "waiting"
        if "decode" in way.picks:
            if not (yield from self._send(request, way)):
                self._waiting.append(request)
        else:
            self._enter(request, way, "decode")
            self._waiting.append(request)
        yield from self._ask_again()

    def _fails(self, request: RouterRequest, way: _Way, phase: Phase, how: str) -> Calls:
        """Handle a failed leg. The router decides: the client waits for the other leg, both legs are sent again, or the
        client gets the error and the other leg is called off.
        """
        answer = None
        way.failed = way.failed or (phase, self.now_ms)
        self._enter(request, way, phase)
        request.now_ms = self.now_ms
        if way.error is None and self._calls.has("leg_failed"):
            answer = yield from self._calls.hook("leg_failed", self.now_ms, request, request=request)
        if answer not in (None, "retry", "wait"):
            text = f"{self._calls.name}.leg_failed() must return 'retry', 'wait' or None, got {answer!r:.80}"
            raise RouterError(text, self.now_ms, request)
        if answer == "retry":
            self._retries[request] += 1
            if self._retries[request] == _MOST_RETRIES:
                text = (
                    f"{self._calls.name}.leg_failed() answered 'retry' {_MOST_RETRIES} times for request "
                    f"{request.number}, and a leg fails each time"
                )
                raise RouterError(text, self.now_ms, request)
            yield from self._lost(request)
            self._waiting.append(request)
            yield from self._ask_again()
        elif answer == "wait" and way.legs:
            way.error = how
        else:
            yield from self._end(request, way, way.error or how)

    def _end(self, request: RouterRequest, way: _Way, status: str, *, asks: bool = True) -> Calls:
        """End a request: call off its legs, close its entries, and release its place and the next turn."""
        request.status = cast("Any", status)
        if way.failed is not None:
            first, since_ms = way.failed
            self.roles.failed[first].append((request.number, self.now_ms - since_ms))
        if status != "finished":
            self._drop_legs(way)
        if status in ("failed", "refused", "rejected"):  # the rest of its session is not sent
            self._turn_of[request].next = None
        place = self._place.pop(request, None)
        if place is not None:
            row = self.requests[place]
            if status != "finished":
                self._ends[place] = status, self.now_ms
            elif request in self._first_ms and row.token_ms:
                row.token_ms[0] = self._first_ms.pop(request)
        for phase in [each for each in PHASES if each in way.counted]:
            yield from self._close_entry(request, way, phase)
        self._over(request)
        if not way.legs:
            self._ways.pop(request, None)
        if asks:
            yield from self._ask_again()

    def _drop_legs(self, way: _Way) -> None:
        """Call off the open legs of a request that is over or is sent again; they give no more signals."""
        if way.handoff is not None:
            self._handoffs.unsend(way.handoff)
        for phase, served in [*way.legs.items()]:
            routed = self._routed.pop(served, None)
            self._may_abort.pop(served, None)
            del way.legs[phase]
            if routed is None or not served.is_open:
                continue
            engine = self.engines[routed[1]]
            way.doing[phase] = self._doing(way, phase, served)
            self._note_end(way, phase, served, "")
            self._passes.touch(engine, self.now_ms)
            engine.inside.now_ms = max(engine.now_ms, self.now_ms)
            engine.inside.call_off(served, in_pass=self._passes.is_in_pass(engine))

    def _note_end(self, way: _Way, phase: Phase, served: EngineRequest, how: str) -> None:
        """Count how a leg ended, or its state when it was called off, and its hits."""
        leg = None if way.handoff is None else way.handoff.leg
        counts = self.roles.counts[phase]
        doing = way.doing.pop(phase, how)
        self.roles.ends[phase][how if how == "finished" else doing] += 1
        if phase == "prefill":
            counts["kept"] += how == "finished" and (way.answer is not None or not self._is_serial)
        if phase == "prefill" or leg is None:
            counts["hits"] += served.first_reused_tokens
            if phase == "decode" and way.handoff is not None:
                self.roles.recomputed.append(self._request_of[way.handoff].number)
            return
        own = leg.hit_tokens if self._in_rooms else leg.found[0]
        counts["hits"] += own
        if served.token_ms:
            loaded = served.prompt_tokens - own if self._in_rooms else leg.found[1]
            counts["transferred"] += loaded
            counts["transferred_held"] += max(0, min(way.held - own, loaded))

    def _doing(self, way: _Way, phase: Phase, served: EngineRequest) -> str:
        """Return the state of a leg: its status in the scheduler, or what it waits for while it holds blocks."""
        leg = None if way.handoff is None else way.handoff.leg
        if phase == "prefill" or leg is None or served.status != "waiting":
            return served.status if served.is_open else "running"  # in its last pass, which is computed at its start
        if self._in_rooms:
            return {"ready": "loading", "arrived": "received"}.get(leg.polled, "waiting")
        return leg.status if leg.status in _HOLDING else "waiting"

    # ---------------------------------------------------------------------------------------- one that is called off

    def _call_off(self, request: RouterRequest) -> Calls:
        """Call off an open request, which waits in the router or is on engines."""
        way = self._ways[request]
        if request.status == "waiting":
            self._waiting.remove(request)
            if self._place.get(request) is None:
                self.withdrawn += 1
            self._first_ms.pop(request, None)
            yield from self._end(request, way, "aborted", asks=False)
            yield from self._signal("withdrawn", request)
            return
        for phase, served in [*way.legs.items()]:
            engine = self.engines[self._routed[served][1]]
            yield from self._passes.end_planned(engine, self.now_ms)
            if way.legs.get(phase) is not served:
                continue
            way.doing[phase] = self._doing(way, phase, served)
            self._passes.touch(engine, self.now_ms)
            self._may_abort[served] = engine
            engine.inside.now_ms = max(engine.now_ms, self.now_ms)
            engine.inside.call_off(served, in_pass=self._passes.is_in_pass(engine))
            if served.status == "aborted":
                yield from self._finished(served)
        if not way.legs and request in self._turn_of:  # its decode leg is still to be sent
            yield from self._end(request, way, "aborted")

    # ------------------------------------------------------------------------------------------------- incidents

    def _lost(self, request: RouterRequest, *, again: bool = True) -> Calls:
        way = self._ways[request]
        request.status, request.now_ms = "aborted" if request in self.aborts.called_off else "lost", self.now_ms
        for phase, served in way.legs.items():
            if served not in self._routed:
                self.roles.ends[phase]["lost"] += 1
        if not way.has_first:  # the client never got the token of a prefill leg
            self._first_ms.pop(request, None)
        self._drop_legs(way)
        for phase in [each for each in PHASES if each in way.counted]:
            yield from self._close_entry(request, way, phase)
        if again:
            request.attempt += 1
            request.status = "waiting"
            self._opened(request)
        else:
            self._ways.pop(request)

    def _lose_requests(self, incident: Incident, empty: Callable[[Worker, MockEngine], None]) -> Calls:
        ranks = self._ranks_of(incident.worker)
        for served in [each for each, (request, of) in self._routed.items() if of in ranks]:
            if self._routed[served][0] not in self._turn_of:  # its request is over; this leg only drains
                del self._routed[served]

        def lose(worker: Worker, engine: MockEngine) -> None:
            port = engine.worker.pair
            empty(worker, engine)
            self._handoffs.lost(engine, port, self.now_ms)
            if worker == ranks[-1]:
                self._join_ranks([worker])

        lost = yield from super()._lose_requests(incident, lose)
        lost += yield from self._lose_picks(ranks, drops=incident.lost == "drop")
        yield from self._settle()
        return lost

    def _lose_picks(self, ranks: Sequence[Worker], *, drops: bool) -> Calls:
        """Close the entries on a lost worker that have no leg there. On a prefill worker these are held entries; on a
        decode worker, entries whose leg is still to be sent, and those requests are lost like requests with a leg.

        Returns:
            The requests that wait for another worker.
        """
        again: list[RouterRequest] = []
        for request, way in [*self._ways.items()]:
            for phase in [each for each in way.counted if way.picks[each] in ranks]:
                if phase == "prefill":
                    yield from self._close_entry(request, way, phase)
                elif drops:
                    yield from self._end(request, way, "lost", asks=False)
                else:
                    yield from self._lost(request)
                    again.append(request)
        return again

    def _drain(self, worker: Worker) -> None:
        ranks = self._ranks_of(worker)
        if any(each in ranks for way in self._ways.values() for each in way.picks.values() if way.counted):
            return
        super()._drain(worker)

    def _leave_open(self) -> None:
        super()._leave_open()
        for request in self._waiting:
            if request in self._place:
                self.requests[self._place[request]].status = "unfinished"
