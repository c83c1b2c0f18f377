"""Several engines on one clock: requests of a trace are dispatched to them in turn, and served in virtual time.

One subject: who is next on the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

from pytest_kvmock.fleet.arrivals import Arrivals, Turn
from pytest_kvmock.fleet.engine_state import EngineStalled
from pytest_kvmock.fleet.handoff import DestinationFirst, Handoff, Handoffs, ReservingHandoffs
from pytest_kvmock.fleet.ranks import RankedWorker
from pytest_kvmock.fleet.replay_checks import (
    check_engines,
    check_objectives,
    check_settings,
    check_sizes,
    engines_of,
    turns_of,
)
from pytest_kvmock.fleet.run_notes import RunNotes
from pytest_kvmock.long_runs import long_run
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import Objectives, Pools, RunFacts, WorkerCount

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.fleet.engine_request import EngineRequest
    from pytest_kvmock.fleet.mock_engine import MockEngine
    from pytest_kvmock.fleet.ranks import Driven
    from pytest_kvmock.traces import TraceRequest

# Theory of operation
#
# The clock jumps from one moment at which something happens to the next: a pass ends, a handoff is through, a request
# arrives. At one moment passes end first, in the order of the engines, then handoffs arrive, then requests; then each
# engine that runs no pass, and has requests, starts one. A prefill pass of no time ends before a decode engine starts its
# pass. What a handoff does is in `handoff`.


def replay(
    requests: Iterable[TraceRequest],
    engines: Iterable[MockEngine],
    prefill: Iterable[MockEngine] = (),
    concurrency: int | None = None,
    arrival_speedup: float = 1.0,
    *,
    trace_block_size: int | None = None,
    stop_ms: float | None = None,
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
    slo_e2e_ms: float | None = None,
) -> Report:
    """Replay a trace on engines that share one clock, as Dynamo's offline replay does.

    The clock starts at the time of the engine that is furthest, 0 where all are new; all times of the report are on it.

    With `prefill`, engines are of the semantics of 1.2.1, over any backend, or of 1.6.1: `sglang`'s are refused.

    A harness does not record what is replayed on its engines: where such a test fails, the reproduction is cut down from
    the events alone.

    Args:
        requests: what arrives, by timestamp in an open loop (the first at once), in this order in a closed one. Each has
            at least one token of prompt and one of output, and finite times; timestamps of a session do not fall, where
            they stand for a delay.
        engines: they take requests in turn; all idle, of one block size and semantics. With `prefill` they must be of
            `worker_type` "decode", else "aggregated".
        prefill: engines of `worker_type` "prefill", that compute prompts, in turn; a request then moves to one of
            `engines` over a link (`kv_bytes_per_token`, `kv_transfer_bandwidth`).
        concurrency: how many requests are open at once, whatever their timestamps; None: they arrive by those.
        arrival_speedup: by what arrival times and delays are divided; above 0.
        trace_block_size: tokens for each hash id; a prompt has then the tokens of Dynamo's loader, each id repeated
            so often. None: an id is a block of the engines' size, its local hash, or its tokens where the trace was read
            `with_tokens`.
        stop_ms: how long the clock runs at most, in milliseconds: nothing after that happens, a pass under way gives
            nothing, and what is open is aborted and has no row (Dynamo: `max_sim_time_ms`). None: to the end.
        slo_ttft_ms: in the semantics of 1.6.1, the report counts requests as good whose first token takes no longer, in
            milliseconds (Dynamo: `sla_ttft_ms`). None: any.
        slo_itl_ms: likewise, the mean time between tokens.
        slo_e2e_ms: likewise, the time to the last token; not together with the other two, as in the original.

    Raises:
        EngineStalled: an engine can never make progress. Requests stay open then: `MockEngine.close` drops them.
        OutOfBlocks: a request can never fit one of the engines, which does not reject it (see `MockEngine.dispatch`);
            nothing has happened.
        TypeError: an argument, or something in it, is not of its type; nothing has happened.
        ValueError: an argument, or a field of a request, is out of range; nothing has happened.
    """
    engines, prefill = engines_of("engines", engines), engines_of("prefill", prefill)
    check_engines(engines, prefill)
    check_settings(concurrency, arrival_speedup, trace_block_size, stop_ms)
    objectives = check_objectives(slo_ttft_ms, slo_itl_ms, slo_e2e_ms)
    release = engines[0].args.release
    with long_run():
        takes_hashes = all(engine.worker.traits.takes_hashes for engine in (*prefill, *engines))
        size, least = engines[0].args.block_size, release.least_output
        turns = turns_of(requests, trace_block_size, size, least_output=least, takes_hashes=takes_hashes)
        check_sizes(turns, engines, prefill)
        start_ms = float(max(engine.now_ms for engine in (*prefill, *engines)))
        arrivals = Arrivals(
            turns, concurrency, arrival_speedup, sessions_keep_place=release.sessions_keep_place, start_ms=start_ms
        )
        # In a closed loop Dynamo's replay of one engine looks at the clock when a pass has ended, not before.
        only_between_passes = concurrency is not None and len(engines) == 1 and not prefill
        only_between_passes &= release.arrivals_between_passes
        return _Replay(
            engines,
            prefill,
            arrivals,
            start_ms,
            only_between_passes=only_between_passes,
            stop_ms=math.inf if stop_ms is None else stop_ms,
            objectives=objectives,
        ).run()


class _Replay:
    """One replay, from the first arrival to the last token.

    Args:
        engines: those that generate tokens.
        prefill: those that compute prompts for them; may be empty.
        arrivals: decides when which request arrives.
        start_ms: when the clock starts.
        only_between_passes: whether requests arrive only when no pass is under way.
        stop_ms: how long the clock runs at most.
        objectives: what counts as good.
    """

    def __init__(
        self,
        engines: Sequence[MockEngine],
        prefill: Sequence[MockEngine],
        arrivals: Arrivals,
        start_ms: float,
        *,
        only_between_passes: bool,
        stop_ms: float = math.inf,
        objectives: Objectives,
    ) -> None:
        self._engines = engines
        self._prefill = prefill
        self._everyone = [*prefill, *engines]
        # What the clock drives: engines, or the workers whose ranks they are.
        self._sources: Sequence[Driven] = prefill
        self._workers: Sequence[Driven] = engines
        size = engines[0].args.dp_size if engines[0].args.release.ranks_in_lock_step else 1
        if size > 1:
            self._workers = [RankedWorker(engines[at : at + size]) for at in range(0, len(engines), size)]
        self._all: Sequence[Driven] = [*self._sources, *self._workers]
        self._worker_of = {engine: self._workers[at // size] for at, engine in enumerate(engines)}
        count = len(self._workers)
        self._next_engine = cycle(worker * size + rank for rank in range(size) for worker in range(count))
        named = dict(enumerate(engines)) | {f"prefill {at}": engine for at, engine in enumerate(prefill)}
        self._notes = RunNotes(cast("Any", named), start_ms)
        self._start_ms = start_ms
        self._stop_ms = start_ms + stop_ms
        self._objectives = objectives
        self._turns: list[Turn] = []
        self._rejected: list[Handoff] = []
        self._arrivals = arrivals
        self._only_between_passes = only_between_passes
        self._stalls_at_once = engines[0].args.release.stalls_at_once and not prefill
        self._now = start_ms
        self._busy: dict[Driven, float] = {}
        # Engines that could do nothing, and to which nothing has happened since.
        self._blocked: set[Driven] = set()
        # Engines whose last pass preempted, and generated nothing.
        self._cycling: set[Driven] = set()
        self._turn_of: dict[EngineRequest, Turn] = {}
        self._handoffs = self._make_handoffs()
        # Nothing that happens on an engine changes what arrives at another, so that each goes on to the next arrival.
        self._is_alone = not prefill and not arrivals.depends_on_ends
        self._order: list[EngineRequest] = []
        self._served_by: list[int | None] = []

    def _make_handoffs(self) -> Handoffs:
        release = self._engines[0].args.release
        if not self._prefill or not release.reserves_destination:
            return Handoffs(self._prefill, self._expect, self._arrivals)
        return (DestinationFirst if release.destination_first else ReservingHandoffs)(
            self._prefill,
            self._engines,
            self._expect,
            self._arrivals,
            rejected=self._finished,
            busy=self._busy,
            blocked=self._blocked,
        )

    def run(self) -> Report:
        """Replay until nothing is open."""
        while True:
            self._end_passes()
            self._handoffs.finish_transfers(self._now)
            self._handoffs.act(self._now)
            if self._handoffs.starts_first and (self._go_on() or self._handoffs.has_actions):
                continue
            for turn, arrival_ms in self._arrivals.take(self._now):
                self._dispatch(turn, arrival_ms)
            if self._go_on() or self._handoffs.has_actions:
                continue
            moment = self._next_moment()
            if moment == math.inf:
                self._check_served()
                break
            if moment > self._stop_ms:
                self._abort_open()
                break
            self._now = moment
        for worker in self._workers:
            if isinstance(worker, RankedWorker):
                worker.close()
        return self._report()

    def _abort_open(self) -> None:
        """Abort what is open, as the clock stops; what no decode engine was given has arrived all the same."""
        for engine in self._everyone:
            engine.close()
        for handoff in self._handoffs.made:
            request = handoff.prefilled
            if request is not None and handoff.request is None:
                request.status, request.ended_ms = "aborted", None
                self._note(request, None, handoff.turn)

    def _report(self) -> Report:
        release, gpus = self._engines[0].args.release, self._engines[0].args.gpus
        made_or_rejected = (*self._handoffs.made, *self._rejected) if release.reserves_destination else ()
        handoffs: dict[ScheduledRequest, dict[str, Any]] = {
            made.request: made.to_json() for made in made_or_rejected if made.request is not None
        }
        pools = None
        if release.reports_workers:
            place = {engine: position for position, engine in enumerate(self._prefill)}
            for made in made_or_rejected:
                request = made.request or made.prefilled
                if request is not None and made.source is not None and made.prefilled is not None:
                    of_prefill = {
                        "prefill_worker_idx": place[made.source],
                        "prefill_admissions": made.prefilled.admissions,
                    }
                    handoffs[request] = handoffs.get(request, {}) | of_prefill
            pools = Pools(
                self._now - self._start_ms,
                WorkerCount(len(self._workers), gpus),
                WorkerCount(len(self._prefill), self._prefill[0].args.gpus if self._prefill else 0),
                self._arrivals.depends_on_ends,
                len(self._engines) // len(self._workers),
                release.destination_first,
            )
        return Report(
            tuple(self._order),
            RunFacts(
                self._engines[0].args.block_size,
                sketches=release.reports_workers,
                pools=pools,
                objectives=self._objectives,
                turns=tuple(self._turns),
            ),
            self._notes.close(self._now),
            tuple(self._served_by),
            tuple(self._turns),
            handoffs=handoffs,
        )

    def _check_served(self) -> None:
        """Raise if requests are left for which nobody will free blocks."""
        running = [request for engine in self._everyone for request in engine.scheduler.running]
        waiting = [request for engine in self._everyone for request in engine.scheduler.waiting]
        waiting += [request for engine in self._everyone for request in engine.scheduler.parked]
        waiting += self._handoffs.waiting
        if running or waiting:
            raise EngineStalled(self._now, tuple(running), tuple(waiting), 0)

    # ------------------------------------------------------------------------------------------------ the clock

    def _end_passes(self) -> None:
        for engine in self._all:
            if self._busy.get(engine, math.inf) <= self._now:
                del self._busy[engine]
                self._end_pass(engine)

    def _end_pass(self, engine: Driven) -> bool:
        """End what an engine was busy with; whether that did anything."""
        if not engine.is_in_pass:  # passes were made in one go
            self._cycling.discard(engine)
            self._handoffs.pass_ended(engine, None, self._now)
            return True
        done = engine.finish_pass(blocks_may_come=self._blocks_may_come)
        self._handoffs.check_progress(engine, done)
        if not done.did_something:
            return self._handoffs.nothing_done(engine, self._now)
        self._handoffs.pass_ended(engine, done, self._now)
        if engine not in self._sources:
            for request in (*done.rejected, *done.finished):
                self._finished(cast("EngineRequest", request))  # engines were given no other
        else:
            for request in done.rejected:  # no decode engine will have it
                handoff = self._handoffs.rejected(cast("EngineRequest", request))
                self._rejected.append(handoff)
                if handoff.request is None:
                    self._note(cast("EngineRequest", request), None, handoff.turn)
                    self._arrivals.done(handoff.turn, self._now)
                    continue
                self._handoffs.give_back(handoff)
                handoff.request.status, handoff.request.ended_ms = "rejected", self._now
                self._finished(handoff.request)
        if done.preempted and not done.generated:
            self._cycling.add(engine)
        else:
            self._cycling.discard(engine)
        return True

    @property
    def _blocks_may_come(self) -> bool:
        """Whether blocks that a handoff holds may be freed yet."""
        handoffs = self._handoffs
        return handoffs.keeps_blocks and (handoffs.next_moment < math.inf or not self._cycling.issuperset(self._busy))

    def _go_on(self) -> bool:
        """Start a pass on each engine that can; whether there is more to do at this moment."""
        if self._engines[0].args.release.instant_passes_first:
            return self._start_after_instant_passes(self._sources) | self._start_after_instant_passes(self._workers)
        return self._start_passes(self._sources) or self._start_passes(self._workers)

    def _start_after_instant_passes(self, engines: Sequence[Driven]) -> bool:
        """Run the passes of these engines that take no time, then start one that does; whether one took none."""
        did_something = False
        for engine in engines:
            while engine not in self._busy and engine not in self._blocked and engine.has_work:
                end = self._start_pass(engine)
                if end > self._now:
                    self._busy[engine] = end
                elif self._end_pass(engine):
                    did_something = True
                else:
                    if self._stalls_at_once:
                        self._check_served()
                    self._blocked.add(engine)
        return did_something

    def _start_passes(self, engines: Sequence[Driven]) -> bool:
        """Start a pass on each engine that can; whether one took no time."""
        at_once = False
        for engine in engines:
            if engine not in self._busy and engine.has_work:
                end = self._busy[engine] = self._start_pass(engine)
                at_once |= end <= self._now
        return at_once

    def _start_pass(self, engine: Driven) -> float:
        """Start a pass, or several whose ends nobody waits for; when they end."""
        # Passes that were run in one go cannot be taken back where the clock stops among them.
        if self._stop_ms == math.inf and not self._handoffs.waits_for(engine):
            end = engine.fast_forward(self._now, self._next_moment(engine))
            if end > self._now:
                return end
        return engine.start_pass(self._now).end_ms

    def _next_moment(self, idle: Driven | None = None) -> float:
        """When something happens next; for an engine that is about to go on, when something else does."""
        if idle is not None and self._is_alone:
            return self._arrivals.next_ms
        if idle is not None and any(each.has_work for each in self._all if each is not idle and each not in self._busy):
            return self._now  # another is about to start a pass
        moments = [self._handoffs.next_moment, *self._busy.values()]
        if not (self._only_between_passes and self._busy):
            moments.append(self._arrivals.next_ms)
        return min(moments)

    # ---------------------------------------------------------------------------------------------- a request

    def _dispatch(self, turn: Turn, arrival_ms: float) -> None:
        if self._prefill:
            source = self._handoffs.begin(turn, arrival_ms)
            if source is not None:
                self._blocked.discard(source)
            return
        position = next(self._next_engine)
        engine = self._engines[position]
        request = engine.dispatch(turn.prompt, turn.trace.output_length, arrival_ms)
        self._note(request, position, turn)
        self._blocked.discard(self._worker_of[engine])
        self._turn_of[request] = turn

    def _expect(self, handoff: Handoff) -> None:
        """Open the request of a handoff at the next decode engine."""
        position = next(self._next_engine)
        turn = handoff.turn
        handoff.destination = self._engines[position]
        handoff.request = handoff.destination.expect(turn.prompt, turn.trace.output_length, handoff.arrival_ms)
        self._note(handoff.request, position, turn)
        self._turn_of[handoff.request] = turn

    def _note(self, request: EngineRequest, position: int | None, turn: Turn) -> None:
        self._order.append(request)
        self._turns.append(turn)
        self._served_by.append(position)

    def _finished(self, request: EngineRequest) -> None:
        turn = self._turn_of.pop(request)
        if request.status == "failed":  # the rest of its session is not sent
            turn.next = None
        self._arrivals.done(turn, self._now)
