"""Several engines on one clock: requests of a trace are dispatched to them round robin, and served in virtual time.

One subject: who is next on the clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pytest_kvmock.checks import check_integer
from pytest_kvmock.fleet.handoff import Handoff, Handoffs, ReservingHandoffs
from pytest_kvmock.fleet.mock_engine import EngineStalled
from pytest_kvmock.fleet.report import ReplayReport
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.fleet.mock_engine import EngineRequest, MockEngine
    from pytest_kvmock.traces import TraceRequest

# Theory of operation
#
# The clock jumps from one moment at which something happens to the next: a pass ends, a request arrives, a handoff is
# through (see `handoff`). At one moment passes end first, in the order of the engines, then requests arrive, then each
# engine that runs no pass and has requests starts one.
#
# A request of a session waits for the one before it, and its delay. In a closed loop a request arrives when it is
# dispatched, which is as soon as fewer than `concurrency` are open.


def replay(
    requests: Iterable[TraceRequest],
    engines: Sequence[MockEngine],
    prefill: Sequence[MockEngine] = (),
    concurrency: int | None = None,
    arrival_speedup: float = 1.0,
    *,
    trace_block_size: int | None = None,
) -> ReplayReport:
    """Replay a trace on engines that share one clock, as Dynamo's offline replay does.

    Args:
        requests: sorted by their timestamps here, stably; the first arrives at 0.
        engines: they take requests in turn.
        prefill: engines that compute prompts, in turn; a request then moves to one of `engines`, which must be decode
            engines, over a link (`kv_bytes_per_token`, `kv_transfer_bandwidth`).
        concurrency: how many requests are open at once, whatever their timestamps; None: they arrive by those.
        arrival_speedup: by what arrival times are divided.
        trace_block_size: tokens for each hash id; a prompt has then the tokens of Dynamo's loader, each id repeated
            so often. None: an id is the local hash of a block of the engines' size.

    Raises:
        EngineStalled: an engine can never make progress.
        OutOfBlocks: a request can never fit (where the engine does not reject it).
        ValueError: an argument is not what it must be.
    """
    return _Replay(requests, engines, prefill, concurrency, arrival_speedup, trace_block_size).run()


class _Turn:
    """One request of the trace on its way through the engines."""

    __slots__ = ("delay_ms", "held", "next", "prompt", "served", "trace")

    def __init__(self, trace: TraceRequest, prompt: Prompt) -> None:
        self.trace = trace
        self.prompt = prompt
        self.next: _Turn | None = None
        self.delay_ms = 0.0
        self.held = False
        self.served: EngineRequest | None = None


class _Replay:
    def __init__(
        self,
        requests: Iterable[TraceRequest],
        engines: Sequence[MockEngine],
        prefill: Sequence[MockEngine],
        concurrency: int | None,
        arrival_speedup: float,
        trace_block_size: int | None,
    ) -> None:
        if concurrency is not None:
            check_integer("concurrency", concurrency, 1, ", or None")
        self.engines = engines
        self.prefill = prefill
        self.concurrency = concurrency
        self.speedup = arrival_speedup
        ordered = sorted(requests, key=lambda request: request.timestamp or 0.0)
        first = ordered[0].timestamp or 0.0
        self.now = 0.0
        # Dynamo's loop for one engine in a closed loop looks at the clock when a pass has ended, not before.
        self.lone = concurrency is not None and len(engines) == 1 and not prefill
        self.open = 0
        self.order: list[EngineRequest] = []
        self.served_by: list[int | None] = []
        self.sequence = 0
        # (moment, order, turn): what arrives when.
        self.arrivals: list[tuple[float, int, _Turn]] = []
        self.ready: list[tuple[float, int, _Turn]] = []
        self.turn_of: dict[EngineRequest, _Turn] = {}
        self.turns = [0, 0]
        self.busy: dict[MockEngine, float] = {}
        # Engines that could do nothing, and to which nothing has happened since.
        self.blocked: set[MockEngine] = set()
        # Engines whose last pass preempted, and generated nothing.
        self.cycling: set[MockEngine] = set()
        self.handoffs = self._make_handoffs()
        turns = self._turns(requests, arrival_speedup, trace_block_size)
        first = turns[0].trace.timestamp or 0.0
        for turn in turns:
            if concurrency is None:
                self._arrive(((turn.trace.timestamp or 0.0) - first) / arrival_speedup, turn)
            else:
                self._wait(0.0, turn)

    def _make_handoffs(self) -> Handoffs:
        if not self.prefill or self.prefill[0].args.semantics != "1.3.1":
            return Handoffs(self.prefill, self._open_at_destination)
        for engine in self.engines:
            if not engine.can_reserve:
                raise ValueError(f"engines must be able to reserve blocks for prompts of prefill engines, got {engine!r}")
        return ReservingHandoffs(
            self.prefill, self.engines, self._open_at_destination, self._close, self.busy, self.blocked
        )

    def _turns(
        self, requests: Iterable[TraceRequest], arrival_speedup: float, trace_block_size: int | None
    ) -> list[_Turn]:
        """The first turns of all sessions, by their timestamps; each knows the next of its session."""
        firsts: list[_Turn] = []
        last: dict[str, tuple[_Turn, float]] = {}
        for request in requests:
            turn, session = _Turn(request, self._prompt(request, trace_block_size, self.engines[0].args.block_size)), request.session_id
            if session is None or session not in last:
                firsts.append(turn)
                moment = request.timestamp or 0.0
            else:
                before, moment = last[session]
                before.next = turn
                delay = request.delay
                if delay is None:
                    delay = 0.0 if request.timestamp is None else request.timestamp - moment
                turn.delay_ms = delay / arrival_speedup
                moment = moment if request.timestamp is None else request.timestamp
            if session is not None:
                last[session] = turn, moment
        firsts.sort(key=lambda turn: turn.trace.timestamp or 0.0)
        return firsts

    @staticmethod
    def _prompt(request: TraceRequest, trace_block_size: int | None, block_size: int) -> Prompt:
        if trace_block_size is None:
            return request.prompt(block_size)
        tokens = [hash_id & 0xFFFFFFFF for hash_id in request.hash_ids for _ in range(trace_block_size)]
        return Prompt(tokens[: request.input_length])

    def _arrive(self, moment: float, turn: _Turn) -> None:
        heappush(self.arrivals, (moment, self.sequence, turn))
        self.sequence += 1

    def run(self) -> ReplayReport:
        """Replay until nothing is open."""
        engines = [*self.prefill, *self.engines]
        while True:
            for engine in engines:
                if self.busy.get(engine, math.inf) <= self.now:
                    del self.busy[engine]
                    self._end_pass(engine)
            self.handoffs.finish_transfers(self.now)
            while self.arrivals and self.arrivals[0][0] <= self.now:
                moment, _, turn = heappop(self.arrivals)
                self._dispatch(turn, moment if self.concurrency is None else self.now)
            while self.ready and self._has_room and self.ready[0][0] <= self.now:
                self._dispatch(heappop(self.ready)[2], self.now)
            self.handoffs.act(self.now)
            if self._start_passes():
                continue
            moments = [*self.busy.values()]
            if self.arrivals and not (self.lone and self.busy):
                moments.append(self.arrivals[0][0])
            if not (self.lone and self.busy) and self.ready and self._has_room:
                moments.append(self.ready[0][0])
            self.now, last = min([*moments, self.handoffs.next_moment]), self.now
            if self.now == math.inf:
                self._check_served(last)
                break
        return ReplayReport(
            tuple(self.order), sum(e.passes for e in engines), tuple(self.served_by), tuple(self.handoffs.made)
        )

    @property
    def _has_room(self) -> bool:
        """Whether the closed loop takes another request."""
        return self.concurrency is None or self.open - self.handoffs.on_link < self.concurrency

    @property
    def _blocks_may_come(self) -> bool:
        """Whether blocks that a handoff holds may be freed yet."""
        handoffs = self.handoffs
        return handoffs.keeps_blocks and (handoffs.next_moment < math.inf or not self.cycling.issuperset(self.busy))

    def _end_pass(self, engine: MockEngine) -> bool:
        """End what an engine was busy with; whether that did anything."""
        # There is no pass to end after passes that were made in one go.
        done = engine.finish_pass(blocks_may_come=self._blocks_may_come) if engine.is_in_pass else None
        self.cycling.discard(engine)
        if done is not None:
            if not done.did_something:
                return False
            if done.preempted and not done.generated:
                self.cycling.add(engine)
        self.handoffs.pass_ended(engine, done, self.now)
        if done is None:
            return True
        prefills = engine in self.prefill
        if not prefills:
            for request in done.finished:
                self._close(request)
        for request in done.rejected:
            if prefills:
                self.order.append(request)
                self.served_by.append(None)
            self._close(request)
        return True

    def _start_passes(self) -> bool:
        """Start a pass on each engine that can; whether anything is to be looked at anew at this moment."""
        if self.handoffs.keeps_blocks:
            return self._run_at_once(self.prefill) | self._run_at_once(self.engines)
        # A prefill pass of no time hands over before a decode engine starts its pass.
        return self._start_on(self.prefill) or self._start_on(self.engines)

    def _start_on(self, engines: Sequence[MockEngine]) -> bool:
        """Start a pass on each of these engines that can; whether one took no time."""
        at_once = False
        for engine in engines:
            if engine not in self.busy and (engine.scheduler.running or engine.scheduler.waiting):
                self.busy[engine] = self._start_pass(engine)
                at_once |= self.busy[engine] <= self.now
        return at_once

    def _run_at_once(self, engines: Sequence[MockEngine]) -> bool:
        """Start a pass on each of these engines that can, after its passes of no time; whether one of these did anything."""
        did_something = False
        for engine in engines:
            while engine not in self.busy and engine not in self.blocked and (engine.scheduler.running or engine.scheduler.waiting):
                end = self._start_pass(engine)
                if end > self.now:
                    self.busy[engine] = end
                elif self._end_pass(engine):
                    did_something = True
                else:
                    self.blocked.add(engine)
        return did_something

    def _start_pass(self, engine: MockEngine) -> float:
        """Start a pass now, or several that nobody waits for; when it ends."""
        if not self.handoffs.needs_end(engine):
            end = engine.fast_forward(self.now, self._next_moment(engine))
            if end > self.now:
                return end
        return engine.start_pass(self.now).end_ms

    def _check_served(self, now: float) -> None:
        """Raise if a request is left that can never be served."""
        engines = (*self.prefill, *self.engines)
        running = [request for engine in engines for request in engine.scheduler.running]
        waiting = [request for engine in engines for request in engine.scheduler.waiting] + self.handoffs.waiting
        if running or waiting:
            raise EngineStalled(now, tuple(running), tuple(waiting), 0)

    def _next_moment(self, engine: MockEngine) -> float:
        """When anything else happens, while one engine goes on; now, if another engine is about to start a pass."""
        moments = [math.inf]
        for other in (*self.prefill, *self.engines):
            if other in self.busy:
                moments.append(self.busy[other])
            elif other is not engine and (other.scheduler.running or other.scheduler.waiting):
                return self.now
        if self.arrivals:
            moments.append(self.arrivals[0][0])
        if self.ready and self._has_room:
            moments.append(self.ready[0][0])
        return min([*moments, self.handoffs.next_moment])

    def _dispatch(self, turn: _Turn, arrival: float) -> None:
        if not (self.concurrency is not None and turn.held):
            self.open += 1
        if self.prefill:
            engine = self.prefill[self.turns[0] % len(self.prefill)]
            self.turns[0] += 1
            request = engine._open(turn.prompt, 1, arrival, 0)
            request.keeps_blocks = self.handoffs.keeps_blocks
        else:
            at = self.turns[1] % len(self.engines)
            engine = self.engines[at]
            self.turns[1] += 1
            request = engine._open(turn.prompt, turn.trace.output_length, arrival, 0)
            self.order.append(request)
            self.served_by.append(at)
        self.turn_of[request] = turn
        engine.scheduler.submit(request)

    def _open_at_destination(self, handoff: Handoff) -> None:
        """Open the request of a handoff at the next decode engine in turn."""
        prefilled = handoff.prefilled
        turn = self.turn_of.pop(prefilled)
        at = self.turns[1] % len(self.engines)
        engine = handoff.destination = self.engines[at]
        self.turns[1] += 1
        request = handoff.request = engine._open(turn.prompt, turn.trace.output_length, prefilled.arrival_ms, 0)
        self.order.append(request)
        self.served_by.append(at)
        self.turn_of[request] = turn

    def _close(self, request: EngineRequest) -> None:
        """Note that a request is done, and what comes after it in its session."""
        turn = self.turn_of.pop(request)
        self.open -= 1
        if turn.next is not None:
            at = self.now + turn.next.delay_ms
            if self.concurrency is None:
                self._arrive(at, turn.next)
            elif self.engines[0].args.semantics == "1.3.1":
                self.open += 1
                turn.next.held = True
                self._arrive(at, turn.next)
            else:
                self._wait(at, turn.next)

    def _wait(self, moment: float, turn: _Turn) -> None:
        heappush(self.ready, (moment, self.sequence, turn))
        self.sequence += 1
