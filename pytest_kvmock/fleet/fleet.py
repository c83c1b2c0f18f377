"""A fleet: mock engines in virtual time behind a router, which is the user's own.

One subject: the interface. `fleet_run` has the clock, `router_calls` what a router must be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Final, Self

from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.checks import check_integer, check_number, unknown_text
from pytest_kvmock.clock.arrivals import Arrivals
from pytest_kvmock.clock.mock_engine import MockEngine
from pytest_kvmock.clock.replay_checks import check_objectives, check_sizes, turns_of
from pytest_kvmock.fleet.aborts import AbortShare, PlannedAbort
from pytest_kvmock.fleet.fleet_events import EventDelay, Heard, Knowledge, TrueCaches
from pytest_kvmock.fleet.fleet_run import FleetRun, LoadSource
from pytest_kvmock.fleet.incidents import NEXT_WORKER, Incident, Moment
from pytest_kvmock.fleet.router_calls import RouterCalls
from pytest_kvmock.fleet.run_record import Recorder
from pytest_kvmock.long_runs import long_run
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import Happened, Objectives, Pools, RunFacts, WorkerCount
from pytest_kvmock.router.routing import RouterRequest, id_of
from pytest_kvmock.router.selection import DynamoRouter
from pytest_kvmock.schedulers.args import MockEngineArgs

if TYPE_CHECKING:
    from pytest_kvmock.clock.arrivals import FleetRequest
    from pytest_kvmock.router.routing import Worker
    from pytest_kvmock.schedulers.scheduler_specs import EngineSemantics
    from pytest_kvmock.traces import TraceRequest

LOADS: Final = ("router", "engine")


class Fleet:
    """Mock engines behind a router, which picks who serves each request of a trace, in virtual time.

    Its own clock begins at the time of the engine that is furthest. The events of the engines reach index and router at once, as they
    are published. Bare engines have no verdict.

    Args:
        engines: the engines, all idle, of one block size; a mapping names their workers, else these are 0, 1, 2 ... With
            `dp_size` above 1 each worker has so many in a row, its ranks, and is named (id, rank). None at all: workers join later.
        router: picks: `pick(request, candidates)` returns the worker of one of the candidates, or None, and the request waits. Where no worker is there it is asked
            with no candidates, unless it has `needs_candidates = True`. Each only if it
            has it, these are called too: `started(workers)` once, before its first pick; `dispatched(request, worker)` right after a pick; `first_token(request)`, not where
            that is the last token too; `finished(request)`; `withdrawn(request)` where one that waits is called off; `apply(event)` for each event; `next_waiting(requests)` returns which
            of those that wait is asked for next, or None for none now; `worker_added(worker)`, `worker_removed(worker)`. Async ones are for
            `arun`. What it believes is compared with what it was told where it has `loads()`, `overlap(request)`, `believed(request)` or `workers()`. None: a `DynamoRouter` of the engines' release.
        index: answers overlaps: it has `apply(event)` and `find_matches(local_hashes)`. None: a `RadixIndex`.
        args: of a fleet without engines, what its workers will be.
        semantics: the release whose closed loop is followed; None: that of the engines.
        loads: what candidates show: "router", the load book of Dynamo's router; "engine", what the engines really do.
        loads_every_ms: with "engine", how old that may be, `waiting` and `usage` too, in milliseconds; 0: it is read at each pick.
        concurrency: how many requests are open at once, whatever their timestamps; None: they arrive by those.
        arrival_speedup: by what arrival times and delays are divided; above 0.
        trace_block_size: tokens for each hash id of a trace; see `replay`.
        stop_ms: no pass starts, and no request arrives, from so many milliseconds after the start on; what is open then is "unfinished".
        event_delay_ms: how much later than it is published an event is delivered, in virtual milliseconds: a number, or a function of
            the event. Events of one rank stay in order. What is late at the end is delivered then.
        pick_timeout_s: how long an async method of the router may take, in seconds of real time.
        plans: run passes that only decode in one go; the results are the same without.
        seed: of the router that stands in where none is given.
        record: keep a sample of each real pass and the candidates of each pick, as they truly were, for `Report.regret` and pages.
        slo: what a request must keep to count as good.
        knowledge: delivers events and answers overlaps, in place of `index` and `event_delay_ms`: a harness has its own.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an argument out of range, or engines that cannot serve together.

    Attributes:
        engines: by the names of their workers; those that joined too, without those that are gone.
        report: of the last run; None before the first.
    """

    def __init__(
        self,
        engines: Iterable[MockEngine] | Mapping[Worker, MockEngine],
        router: object = None,
        index: Any = None,
        *,
        args: MockEngineArgs | None = None,
        semantics: EngineSemantics | None = None,
        loads: LoadSource = "router",
        loads_every_ms: float = 0.0,
        concurrency: int | None = None,
        arrival_speedup: float = 1.0,
        trace_block_size: int | None = None,
        stop_ms: float | None = None,
        pick_timeout_s: float = 5.0,
        event_delay_ms: EventDelay = 0.0,
        plans: bool = True,
        seed: int = 0,
        record: bool = False,
        slo: Objectives = Objectives(),  # noqa: B008 - it is frozen
        knowledge: Knowledge[Any] | None = None,
    ) -> None:
        named = _named(engines)
        self.engines = dict(named)
        _check_together(named)
        # What the workers are, of which none may be there: an engine that joins is like this one.
        self._like = _make_like(args, named)
        args = self._like.args
        releases = args.scheduler.releases
        if semantics is not None and semantics not in releases:
            raise ValueError(f"Fleet: {unknown_text('semantics', semantics, releases)}")
        if loads not in LOADS:
            raise ValueError(f"Fleet: {unknown_text('loads', loads, LOADS)}")
        check_number("Fleet: loads_every_ms", loads_every_ms, unit=" (milliseconds)")
        if concurrency is not None:
            check_integer("Fleet: concurrency", concurrency, 1, ", or None")
        if trace_block_size is not None:
            check_integer("Fleet: trace_block_size", trace_block_size, 1, " (tokens), or None")
        if stop_ms is not None:
            check_number("Fleet: stop_ms", stop_ms, unit=" (milliseconds)")
        for name, value in (("arrival_speedup", arrival_speedup), ("pick_timeout_s", pick_timeout_s)):
            check_number(f"Fleet: {name}", value)
            if not value:
                raise ValueError(f"Fleet: {name} must be above 0, got {value!r}")
        if router is None:
            router = DynamoRouter(args.release.dynamo, rng=Random(seed))  # noqa: S311 - mock data
        self._calls = router if isinstance(router, RouterCalls) else RouterCalls(router, pick_timeout_s)
        self._release = args.release if semantics is None else releases[semantics]
        self._loads: LoadSource = loads
        self._loads_every_ms = loads_every_ms
        self._concurrency = concurrency
        self._speedup = arrival_speedup
        self._trace_block_size = trace_block_size
        self._stop_ms = stop_ms
        self.report: Report | None = None
        self._plans = plans
        self._ranks = args.dp_size
        if not callable(event_delay_ms):
            check_number("Fleet: event_delay_ms", event_delay_ms, unit=" (milliseconds), or a function of the event")
        self._objectives = check_objectives("Fleet", slo)
        backends = [BACKENDS.get(engine.worker.backend) for engine in (*self.engines.values(), self._like)]
        # Engines that publish every copy of a block still hold it when one is removed.
        copies = any(each is not None and each.residency == "counted" for each in backends)
        if knowledge is None:
            ranked = any(isinstance(worker, tuple) for worker in self.engines) if named else args.dp_size > 1
            knowledge = Heard(index, self.engines, event_delay_ms, counts_copies=copies, has_ranks=ranked)
        self._knowledge = knowledge
        held = knowledge.held_events() if record else ()
        self._caches = None
        if record:
            self._caches = TrueCaches(self.engines, held, counts_copies=copies, has_ranks=knowledge.has_ranks)
        self._incidents: list[Incident] = []
        self._ids = set(map(id_of, self.engines))  # of all workers that were ever there
        self._ended_ms = 0.0
        self._cordoned: set[Worker] = set()
        self._aborts: list[PlannedAbort] = []
        self._abort_share: AbortShare | None = None
        self._run: FleetRun | None = None  # while it serves

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.engines)} engines behind {self._calls.name}>"

    def at(self, ms: float) -> Moment:
        """Return what may happen at a moment of the next run, or of the one under way: `fleet.at(500).crash(1)`; `restart`, `leave`, `join`, `cordon`, `uncordon`, `abort` too.

        Args:
            ms: when, in virtual milliseconds from the start of the run.

        Raises:
            ValueError: that is no number of at least 0, or it is in the past.
        """
        check_number("Fleet.at: ms", ms, unit=" (milliseconds)")
        run = self._run
        if run is not None and ms < run.now_ms - self._start_ms:
            raise ValueError(f"Fleet.at: {ms:g} ms is in the past; the run is at {run.now_ms - self._start_ms:g} ms")
        return Moment(ms, self._plan_incident, self._plan_abort)

    def abort_share(self, share: float, seed: int = 0, within_ms: float = 1000.0) -> Self:
        """Call off a share of the requests of each run, as if their clients left, except those that set a time themselves.

        Half of them go after a time, which is drawn from 0 to `within_ms`, the others after a part of their output: as they wait, as
        their prompts are computed, as they decode.

        Args:
            share: how many, as a share of the trace, from 0 to 1.
            seed: of the draw: the same requests of a trace at the same points.
            within_ms: the longest time, in virtual milliseconds from the arrival at the router.

        Returns:
            The fleet.

        Raises:
            ValueError: a number is out of range.
        """
        self._abort_share = AbortShare(share, seed, within_ms)
        return self

    def _plan_abort(self, ms: float, request: int | RouterRequest) -> None:
        """Take it into the plan that a request is called off.

        Raises:
            ValueError: it is no number of one, or none of the run under way.
        """
        run = self._run
        if isinstance(request, RouterRequest):
            if run is None or not run.aborts.has_seen(request):
                raise ValueError(f"Fleet.at({ms:g}).abort: {request!r} is none of a run under way; give its number")
            request = request.number
        abort = PlannedAbort(
            ms, check_integer(f"Fleet.at({ms:g}).abort: a request is named by its number, which", request, 0)
        )
        if run is None:
            self._aborts.append(abort)
        else:
            run.aborts.plan(abort)

    def _plan_incident(self, incident: Incident) -> Worker:
        """Take an incident into the plan, if with it workers are there to whom something happens; return to whom it does.

        Raises:
            TypeError: an engine that joins is none.
            ValueError: there is no such worker then, or there was one of that id.
        """
        run = self._run
        past = self._incidents if run is None else run.incidents.planned
        known = self._ids.union(each.worker for each in past)
        if incident.kind == "join":
            incident = self._joining(incident, known)
        planned = sorted([*past, incident], key=lambda each: each.ms)
        there = set(map(id_of, self.engines))
        for each in planned:
            where = f"Fleet.at({each.ms:g}).{each.kind}({each.worker!r})"
            if each.kind == "join":
                there.add(each.worker)
                continue
            if each.worker not in there:
                who = f"there are {', '.join(map(repr, sorted(there)))}" if there else "nobody is there"
                raise ValueError(f"{where}: there is no such worker then; {who}")
            if each.kind in ("crash", "leave"):
                there.discard(each.worker)
        if run is None:
            self._incidents = planned
        else:
            run.incidents.plan(incident)
        return incident.worker

    def _joining(self, incident: Incident, known: Collection[int]) -> Incident:
        """Return a join with the id of who joins, if it can."""
        engine, worker = incident.engine, incident.worker
        if engine is not None:
            if not isinstance(engine, MockEngine):
                raise TypeError(f"Fleet.at: join takes a MockEngine, got {engine!r:.80}")
            if not self._knowledge.takes_engines:
                raise TypeError("Fleet.at: join of a fleet of a harness makes the engine itself; leave engine out")
            if self._ranks > 1:
                raise ValueError("Fleet.at: workers have ranks, whose engines join makes itself; leave engine out")
            others = list(self.engines.items()) or [(worker, self._like)]
            _check_together([*others, (worker, engine)])
        if worker == NEXT_WORKER:
            return replace(incident, worker=max(known, default=-1) + 1)
        check_integer("Fleet.at: join: worker", worker, 0, ", or None")
        if worker in known:
            raise ValueError(
                f"Fleet.at({incident.ms:g}).join({worker}): ids are not used again; there is, or was, such a worker"
            )
        return incident

    def run(self, trace: Iterable[TraceRequest | FleetRequest], *, name: str | None = None) -> Report:
        """Serve a trace.

        Args:
            trace: the requests.
            name: what the report calls the trace.

        Raises:
            RouterError: the router raised, or did what a router must not.
            RouterStalled: requests wait in the router, and nothing runs any more.
            EngineStalled: an engine can never make progress.
            OutOfBlocks: a request can never fit an engine; nothing has happened.
            TypeError: something in the trace is no request, or the router is async.
            ValueError: the trace is empty, or a field of a request is out of range.
        """
        self._calls.check_sync()
        with long_run():
            run, finish = self._begin(trace, name)
            try:
                self._calls.run(run.run())
            finally:
                finish()
            return self._report(run)

    def stop(self) -> None:
        """End the run under way at its present moment, as `stop_ms` does: what is open is "unfinished". For a router, or the handler of a signal."""
        if self._run is not None:
            self._run.stop()

    @property
    def arrived(self) -> int:
        """How many requests of the run under way have arrived; 0 without one."""
        return 0 if self._run is None else self._run.arrived

    async def arun(self, trace: Iterable[TraceRequest | FleetRequest], *, name: str | None = None) -> Report:
        """Serve a trace, and await what the router returns where that is awaitable; else as `run`."""
        with long_run():
            run, finish = self._begin(trace, name)
            try:
                await self._calls.arun(run.run())
            finally:
                finish()
            return self._report(run)

    def _begin(self, trace: Iterable[TraceRequest | FleetRequest], name: str | None) -> tuple[FleetRun, Any]:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Fleet: name must be text, or None, got {name!r:.80}")
        engines = list(self.engines.values())
        serving = (
            engines or [each.engine or self._like for each in self._incidents if each.kind == "join"] or [self._like]
        )
        size, least = self._like.args.block_size, self._release.least_output
        takes_hashes = all(engine.worker.traits.takes_hashes for engine in serving)
        turns = turns_of(
            trace, self._trace_block_size, size, least_output=least, takes_hashes=takes_hashes, who="Fleet"
        )
        for engine in engines:
            if not engine.is_idle or engine.is_in_pass:
                raise ValueError(f"Fleet: {engine!r} has open requests; engines must be idle")
        check_sizes(turns, serving, who="Fleet")
        if self._abort_share is not None:
            self._abort_share.plan(turns)
        start_ms = float(max((engine.now_ms for engine in engines), default=self._ended_ms))
        arrivals = Arrivals(
            turns,
            self._concurrency,
            self._speedup,
            sessions_keep_place=self._release.sessions_keep_place,
            start_ms=start_ms,
        )
        self._trace = name, tuple(turns)
        managers = [engine.worker.manager for engine in engines if engine.args.enable_prefix_caching]
        self._held_before = sum(each.num_active_blocks + each.num_inactive_blocks for each in managers)
        self._start_ms = start_ms
        run = FleetRun(
            self.engines,
            self._calls,
            self._knowledge,
            arrivals,
            self._like,
            loads=self._loads,
            loads_every_ms=self._loads_every_ms,
            in_lock_step=self._ranks > 1 and self._release.ranks_in_lock_step,
            start_ms=start_ms,
            stop_ms=math.inf if self._stop_ms is None else start_ms + self._stop_ms,
            plans=self._plans,
            incidents=self._incidents,
            cordoned=self._cordoned,
            aborts=self._aborts,
            recorder=None if self._caches is None else Recorder(self._caches),
        )
        self._incidents, self._aborts = [], []
        self._run = run
        self._knowledge.begin(self._calls)
        self._names_sessions = arrivals.depends_on_ends

        def finish() -> None:
            self._knowledge.end()
            self._run = None
            self._ids.update(map(id_of, run.engines))
            self._ended_ms = run.now_ms
            run.close()

        return run, finish

    def _report(self, run: FleetRun) -> Report:
        engines = list(run.engines.values())
        self.engines = run.staying
        args, name, trace = self._like.args, *self._trace
        later = args.release.reports_workers
        workers = WorkerCount(len(engines) // self._ranks, args.gpus)
        clock_ms = run.now_ms - self._start_ms
        facts = RunFacts(
            args.block_size,
            sketches=later,
            pools=Pools(clock_ms, workers, names_sessions=self._names_sessions, ranks=self._ranks) if later else None,
            router=self._calls.name,
            trace=name,
            turns=trace,
            objectives=self._objectives,
            arrived=run.arrived,
            withdrawn=run.withdrawn,
            held_before=self._held_before,
            loads_every_ms=self._loads_every_ms if self._loads == "engine" else None,
            nobody_from_ms=run.unserved_from_ms,
        )
        self.report = Report(
            tuple(run.requests),
            facts,
            tuple(run.notes.close(run.now_ms)),
            tuple(run.served_by),
            tuple(run.turns),
            tuple(run.numbers),
            picks=tuple(run.notes.picks),
            incidents=tuple(run.notes.happened),
            missed=(
                *(Happened(each.ms, each.kind, each.worker) for each in run.incidents.to_come if each.kind != "notice"),
                *run.aborts.missed(run.now_ms),
            ),
            event_errors=self._knowledge.event_errors,
            marks=tuple(self._knowledge.marks),
            recorder=run.recorder,
            beliefs=None if run.beliefs is None else tuple(run.beliefs.found),
        )
        return self.report


def _named(engines: Iterable[MockEngine] | Mapping[Worker, MockEngine]) -> Sequence[tuple[Worker, MockEngine]]:
    """Return engines with the names of their workers."""
    if not isinstance(engines, Iterable):
        raise TypeError(f"Fleet: engines must be MockEngine objects, got {engines!r:.80}")
    if isinstance(engines, Mapping):
        named = list(engines.items())
    else:
        given = list(engines)
        size = given[0].args.dp_size if given and isinstance(given[0], MockEngine) else 1
        named = [(at if size == 1 else (at // size, at % size), engine) for at, engine in enumerate(given)]
    for worker, engine in named:
        if not isinstance(engine, MockEngine):
            raise TypeError(f"Fleet: engine {worker!r} must be a MockEngine, got {engine!r:.80}")
    return named


def _make_like(args: MockEngineArgs | None, named: Sequence[tuple[Worker, MockEngine]]) -> MockEngine:
    """Return what the workers of a fleet are like: its first engine, or where there is none, one by `args`."""
    if named:
        if args is not None:
            raise ValueError("Fleet: args are of a fleet without engines; these engines have their own")
        return named[0][1]
    if args is None:
        raise ValueError("Fleet: there are no engines, so args=MockEngineArgs(...) must say what its workers will be")
    if not isinstance(args, MockEngineArgs):
        raise TypeError(f"Fleet: args must be MockEngineArgs, got {args!r:.80}")
    if args.worker_type != "aggregated":
        raise ValueError(f"Fleet: args must have worker_type='aggregated', got {args.worker_type!r}")
    return MockEngine(args)


def _check_together(named: Sequence[tuple[Worker, MockEngine]]) -> None:
    if not named:
        return
    engines = [engine for _, engine in named]
    if len(set(map(id, engines))) < len(engines):
        raise ValueError("Fleet: an engine is given twice; each takes part once")
    for worker, engine in named:
        if engine.args.worker_type != "aggregated":
            raise ValueError(
                f"Fleet: engine {worker!r} must have worker_type='aggregated', got {engine.args.worker_type!r}"
            )
    for name in ("block_size", "dp_size"):
        found = list(dict.fromkeys(getattr(engine.args, name) for engine in engines))
        if len(found) > 1:
            raise ValueError(f"Fleet: all engines must have one {name}, got {', '.join(map(repr, found))}")
    if len(engines) % engines[0].args.dp_size:
        raise ValueError(
            f"Fleet: engines are the ranks of workers, dp_size={engines[0].args.dp_size} each; got {len(engines)} engines"
        )
