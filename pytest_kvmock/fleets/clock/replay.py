"""Replay of a trace on several engines with one clock: they get the requests in turn and serve them in virtual time.

One subject: the engine or request that is next on the clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

from pytest_kvmock.engines.worker import RequestError
from pytest_kvmock.fleets.clock.arrivals import Arrivals, Turn
from pytest_kvmock.fleets.clock.handoff import DestinationFirst, Handoff, Handoffs, ReservingHandoffs
from pytest_kvmock.fleets.clock.passes import EngineRun, Passes
from pytest_kvmock.fleets.clock.replay_checks import (
    check_engines,
    check_objectives,
    check_settings,
    check_sizes,
    engines_of,
    turns_of,
)
from pytest_kvmock.fleets.clock.run_notes import RunNotes
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.report.rows import Objectives, Pools, RunFacts, WorkerCount
from pytest_kvmock.fleets.report.run_result import RunResult
from pytest_kvmock.values.long_runs import long_run

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.pair_handoff import PairLink
    from pytest_kvmock.fleets.clock.passes import Seat
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest

# Theory of operation
#
# The stages of a replay, in this order: passes end, handoffs arrive, requests arrive, passes start (those of prefill
# engines first). `handoff` has the rules of handoffs.


def replay(
    requests: Iterable[TraceRequest],
    engines: Iterable[MockEngine],
    prefill: Iterable[MockEngine] = (),
    concurrency: int | None = None,
    arrival_speedup: float = 1.0,
    *,
    trace_block_size: int | None = None,
    stop_ms: float | None = None,
    slo: Objectives = Objectives(),  # noqa: B008 - it is frozen
    link: PairLink | None = None,
) -> Report:
    """Replay a trace on engines that share one clock, as Dynamo's offline replay does.

    The clock starts at the latest time of any engine, which is 0 if all are new; all times of the report are on this
    clock.

    With `prefill`, engines must have the semantics of 1.2.1, over any backend, or of 1.6.1; `sglang`'s own are refused.

    A harness does not record a replay on its engines: if such a test fails, the reproduction is reduced from the events
    only.

    `request.abort()` in a listener of an engine calls a request off at that moment; the request then has no row.

    Args:
        requests: the requests, which arrive by timestamp in an open loop (the first at once), in this order in a closed
            loop. Each has at least one token of prompt and of output, and finite times; timestamps of a session without
            delays must not fall.
        engines: the engines that take requests in turn; idle, with the same block size and semantics. With `prefill`
            they must have `worker_type` "decode", otherwise "aggregated".
        prefill: engines of `worker_type` "prefill" that compute prompts in turn; a request then moves to one of
            `engines` over a link (`kv_bytes_per_token`, `kv_transfer_bandwidth`).
        concurrency: number of requests that are open at once, regardless of timestamps; None: requests arrive by
            timestamps.
        arrival_speedup: divisor of arrival times and delays; above 0.
        trace_block_size: tokens for each hash id; a prompt then has the tokens of Dynamo's loader, with each id
            repeated this many times. None: an id is a block of the engines' size: its local hash, or its tokens if the
            trace was read `with_tokens`.
        stop_ms: maximum time of the clock, in milliseconds: nothing happens later, a pass under way gives no tokens,
            and open requests are aborted and have no row (Dynamo: `max_sim_time_ms`). None: to the end.
        slo: in the semantics of 1.6.1, the limits that a request must keep to count as good (Dynamo: `sla_ttft_ms` and
            so on). Each is above 0, and `e2e_ms` excludes the other two, as in the original.
        link: for engines of `hand_over` "vllm", "vllm-mooncake" or "sglang": the times and faults of transfers; None:
            times from the arguments of the prefill engines, without faults.

    Raises:
        EngineStalled: an engine can never make progress. Requests then stay open; `MockEngine.close` drops them.
        RequestError: a listener aborts a request that is handed over between two engines. Requests then stay open.
        OutOfBlocks: a request can never fit one of the engines, which does not reject it (see `MockEngine.dispatch`);
            nothing was run.
        TypeError: an argument, or an item of it, is not of its type; nothing was run.
        ValueError: an argument, or a field of a request, is out of range; nothing was run.
    """
    engines, prefill = engines_of("engines", engines), engines_of("prefill", prefill)
    check_engines(engines, prefill)
    check_settings(concurrency, arrival_speedup, trace_block_size, stop_ms)
    objectives = check_objectives("replay", slo)
    if 0 in (slo.ttft_ms, slo.itl_ms, slo.e2e_ms):
        raise ValueError(f"replay: slo: a limit must be above 0, got {slo!r}")
    if slo.e2e_ms is not None and (slo.ttft_ms is not None or slo.itl_ms is not None):
        raise ValueError("replay: slo: e2e_ms cannot be given together with ttft_ms or itl_ms")
    release = engines[0].args.release
    if link is not None and (not prefill or prefill[0].args.pair_role is None):
        raise ValueError(
            "replay: link is for prefill engines of hand_over 'vllm', 'vllm-mooncake' or 'sglang'; "
            f"got {link!r:.80} without any"
        )
    with long_run():
        takes_hashes = all(engine.worker.traits.takes_hashes for engine in (*prefill, *engines))
        size, least = engines[0].args.block_size, release.least_output
        turns = turns_of(requests, trace_block_size, size, least_output=least, takes_hashes=takes_hashes)
        check_sizes(turns, engines, prefill)
        start_ms = float(max(engine.now_ms for engine in (*prefill, *engines)))
        arrivals = Arrivals(
            turns, concurrency, arrival_speedup, sessions_keep_place=release.sessions_keep_place, start_ms=start_ms
        )
        # In a closed loop, Dynamo's replay of one engine checks the clock only when a pass has ended.
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
            link=link,
        ).run()


class _Replay(EngineRun):
    """One replay, from the first arrival to the last token.

    Args:
        engines: the engines that generate tokens.
        prefill: the engines that compute prompts for them; may be empty.
        arrivals: decides which request arrives when.
        start_ms: when the clock starts.
        only_between_passes: whether requests arrive only when no pass is under way.
        stop_ms: maximum time of the clock.
        objectives: the limits of good requests.
        link: the link between the engines of P/D pairs.
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
        link: PairLink | None = None,
    ) -> None:
        super().__init__(start_ms, start_ms + stop_ms)
        self._engines = engines
        self._prefill = prefill
        self._everyone = [*prefill, *engines]
        release = engines[0].args.release
        size = self._ranks = engines[0].args.dp_size if release.ranks_in_lock_step else 1
        for number, engine in enumerate(engines):
            engine.inside.number_drafts(number)
        named = dict(enumerate(engines)) | {f"prefill {at}": engine for at, engine in enumerate(prefill)}
        self._notes = RunNotes(cast("Any", named), start_ms)
        at_once = release.instant_passes_first
        self._passes = Passes(self, release, ends_at_once=at_once, sources=len(prefill), end_by=self._stop_ms)
        for ranks in (*zip(prefill, strict=True), *(engines[at : at + size] for at in range(0, len(engines), size))):
            self._passes.add(ranks)
        self._next_engine = cycle(at for rank in range(size) for at in range(rank, len(engines), size))
        self._objectives = objectives
        self._rejected: list[Handoff] = []
        self._arrivals = arrivals
        self._due: Sequence[tuple[Turn, float]] = ()  # requests due at this moment, if passes start first
        self._only_between_passes = only_between_passes
        self._turn_of: dict[EngineRequest, Turn] = {}
        self._handoffs = self._make_handoffs(link)
        self._to_call_off: deque[tuple[MockEngine, EngineRequest]] = deque()
        self._called_off: dict[EngineRequest, None] = {}  # still open, because their engines are in a pass
        for engine in self._everyone:
            engine.inside.on_abort = partial(self._abort, engine)

    def _make_handoffs(self, link: PairLink | None) -> Handoffs:
        release = self._engines[0].args.release
        if self._prefill and self._prefill[0].args.pair_role is not None:
            from pytest_kvmock.fleets.clock.pair_handoff import PairLink
            from pytest_kvmock.fleets.clock.sglang_handoff import SglangHandoffs
            from pytest_kvmock.fleets.clock.vllm_handoff import VllmHandoffs

            of_pairs = (self._prefill, self._expect, self._arrivals, self._passes, self._engines)
            made = SglangHandoffs if self._prefill[0].args.hands_over_in_rooms else VllmHandoffs
            return made(*of_pairs, finished=self._finished, link=PairLink() if link is None else link)
        if not self._prefill or not release.reserves_destination:
            return Handoffs(self._prefill, self._expect, self._arrivals, self._passes)
        return (DestinationFirst if release.destination_first else ReservingHandoffs)(
            self._prefill, self._expect, self._arrivals, self._passes, self._engines, rejected=self._finished
        )

    def run(self) -> Report:
        """Replay until nothing is open."""
        try:
            for _ in self.pass_time(
                self._passes.end, self._hand_over, self._arrive, self._call_off, self._passes.start
            ):
                pass  # no call is awaited
        finally:
            for engine in self._everyone:
                engine.inside.on_abort = None
                engine.catch_up()
        if self._due_ms < math.inf:
            self._abort_open()
        else:
            self.check_served()
        self._passes.close()
        return self._report()

    @property
    def next_ms(self) -> float:
        """The time at which something is due next; infinite after the stop."""
        moment = self._due_ms
        return moment if moment <= self._stop_ms else math.inf

    @property
    def _due_ms(self) -> float:
        """The time at which something is due next, ignoring the stop."""
        if self._to_call_off:
            return self.now_ms
        moment = min(self._passes.next_ms, self._handoffs.next_ms)
        return moment if self._only_between_passes and moment < math.inf else min(moment, self._arrivals.next_ms)

    def _hand_over(self, now_ms: float) -> Iterable[object]:
        self._handoffs.at(now_ms)
        if self._handoffs.starts_first:
            # Due requests come after these passes, but before requests that a rejection in these passes releases.
            self._due = [*self._arrivals.take(now_ms)]
            yield from self._passes.start(now_ms)
            while self._handoffs.next_ms <= now_ms:
                self._handoffs.at(now_ms)
                yield from self._passes.start(now_ms)

    def _abort_open(self) -> None:
        """Abort the open requests when the clock stops; those without a decode engine also count as arrived."""
        for engine in self._everyone:
            engine.close()
        for handoff in self._handoffs.made:
            request = handoff.prefilled
            if request is not None and handoff.request is None:
                request.status, request.ended_ms = "aborted", None
                self.note(request, None, handoff.turn)

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
                self.now_ms - self._start_ms,
                WorkerCount(len(self._engines) // self._ranks, gpus),
                WorkerCount(len(self._prefill), self._prefill[0].args.gpus if self._prefill else 0),
                self._arrivals.depends_on_ends,
                self._ranks,
                release.destination_first,
            )
        return Report(
            RunResult(
                tuple(self.requests),
                RunFacts(
                    self._engines[0].args.block_size,
                    sketches=release.reports_workers,
                    pools=pools,
                    objectives=self._objectives,
                    turns=tuple(self.turns),
                ),
                self._notes.close(self.now_ms),
                tuple(self.served_by),
                tuple(self.turns),
                handoffs=handoffs,
            )
        )

    def check_served(self) -> None:
        """Raise if requests are left that no engine will ever serve."""
        if self._handoffs.waiting or any(engine.has_work for engine in self._everyone):
            raise self.stalled(self._everyone, self._handoffs.waiting)

    # --------------------------------------------------------------------------------------------------- passes

    def plans_until(self, seat: Seat) -> float:
        """Return the time up to which passes of a seat are planned: for a single engine, the next arrival."""
        if self._handoffs.waits_for(seat.engines[0]):
            return -math.inf
        return self._arrivals.next_ms if len(self._everyone) == 1 else math.inf

    def finish(self, seat: Seat) -> ForwardPass:
        """End a pass; blocks that handoffs hold may still become free."""
        handoffs = self._handoffs
        blocks_may_come = handoffs.keeps_blocks and (handoffs.in_transfer or self._passes.go_on)
        return seat.driven.finish_pass(blocks_may_come=blocks_may_come)

    def ended(self, seat: Seat, done: ForwardPass | None) -> Iterable[object]:
        """Note the ends of requests in a pass that has ended; `done` is None for a planned pass."""
        now_ms, engine = self.now_ms, seat.engines[0]
        self._handoffs.pass_ended(engine, done, now_ms)
        for gone in [each for each in self._called_off if each.status == "aborted"]:
            self._finished(gone)
        if done is None:
            return ()
        if engine not in self._prefill:
            for request in (*done.rejected, *done.finished):
                self._finished(cast("EngineRequest", request))  # engines got no other requests
            return ()
        for request in done.rejected:  # no decode engine will get it
            handoff = self._handoffs.rejected(cast("EngineRequest", request))
            self._rejected.append(handoff)
            if handoff.request is None:
                self.note(cast("EngineRequest", request), None, handoff.turn)
                self._arrivals.done(handoff.turn, now_ms)
                continue
            self._handoffs.give_back(handoff)
            handoff.request.status, handoff.request.ended_ms = "rejected", now_ms
            self._finished(handoff.request)
        return ()

    # ---------------------------------------------------------------------------------------------- a request

    def _arrive(self, now_ms: float) -> Iterable[object]:
        due = self._due if self._handoffs.starts_first else self._arrivals.take(now_ms)
        for turn, arrival_ms in due:
            if self._prefill:
                self._handoffs.begin(turn, arrival_ms, now_ms)
                continue
            position = next(self._next_engine)
            engine = self._engines[position]
            self._passes.touch(engine, now_ms)
            request = engine.inside.dispatch(turn.prompt, turn.trace.output_length, arrival_ms)
            self.note(request, position, turn)
            self._turn_of[request] = turn
        return ()

    def _abort(self, engine: MockEngine, request: EngineRequest) -> None:
        """Queue a request to be called off at this moment, because its `abort` was called.

        Raises:
            RequestError: the request is handed over between engines.
        """
        if self._prefill:
            raise RequestError(
                f"abort of {request!r} in a replay with prefill engines: what is handed over between two engines "
                "cannot be called off"
            )
        self._to_call_off.append((engine, request))

    def _call_off(self, now_ms: float) -> Iterable[object]:
        """Let engines act on called-off requests; an engine in a pass acts at the end of the pass."""
        while self._to_call_off:
            engine, request = self._to_call_off.popleft()
            yield from self._passes.end_planned(engine, now_ms)
            if request.is_open and request not in self._called_off:
                self._passes.touch(engine, now_ms)
                self._called_off[request] = None
                engine.inside.call_off(request, in_pass=self._passes.is_in_pass(engine))
                if request.status == "aborted":
                    self._finished(request)

    def _expect(self, handoff: Handoff) -> EngineRequest:
        """Open the request of a handoff on the next decode engine."""
        position = next(self._next_engine)
        turn = handoff.turn
        handoff.destination = self._engines[position]
        request = handoff.destination.inside.expect(turn.prompt, turn.trace.output_length, handoff.arrival_ms)
        handoff.request, self._turn_of[request] = request, turn
        self.note(request, position, turn)
        return request

    def _finished(self, request: EngineRequest) -> None:
        turn = self._turn_of.pop(request, None)
        if turn is None:  # the second reader of one hand-over is not a request of the trace
            return
        self._called_off.pop(request, None)
        if request.status == "failed":  # the rest of its session is dropped
            turn.next = None
        self._arrivals.done(turn, self.now_ms)
        turn.prompt.release()
