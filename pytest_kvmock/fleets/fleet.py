"""A fleet: mock engines in virtual time behind the user's own router.

One subject: the interface. `fleet_run` has the clock, `router_calls` the interface of routers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Self

from pytest_kvmock.engines.backends import BACKENDS
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.fleets.aborts import AbortShare, PlannedAbort
from pytest_kvmock.fleets.clock.arrivals import Arrivals
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.clock.replay_checks import check_objectives, check_sizes, turns_of
from pytest_kvmock.fleets.fleet_events import EventDelay, Heard, Knowledge, TrueCaches
from pytest_kvmock.fleets.fleet_run import FleetRun
from pytest_kvmock.fleets.incidents import NEXT_WORKER, Incident, Moment, has_crashed
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.report.rows import Happened, Objectives, Pools, RunFacts, WorkerCount
from pytest_kvmock.fleets.report.run_result import RunResult
from pytest_kvmock.fleets.router_calls import RouterCalls
from pytest_kvmock.fleets.routing.load_feed import LoadFeed
from pytest_kvmock.fleets.routing.routing import RouterRequest, id_of
from pytest_kvmock.fleets.routing.selection import DynamoRouter
from pytest_kvmock.fleets.run_record import Recorder
from pytest_kvmock.values.checks import check_integer, check_number, unknown_text
from pytest_kvmock.values.long_runs import long_run

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler_specs import EngineSemantics
    from pytest_kvmock.fleets.clock.arrivals import FleetRequest
    from pytest_kvmock.fleets.clock.pair_handoff import PairLink
    from pytest_kvmock.fleets.pairs.pair_run import Order
    from pytest_kvmock.fleets.routing.load_feed import LoadSource
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest


class Fleet:
    """Mock engines behind a router, which picks a worker for each request of a trace, in virtual time.

    Its clock begins at the latest time of any engine. The events of the engines reach index and router when they are
    published. Events of bare engines are not judged.

    Args:
        engines: the engines, idle, all of the same block size; a mapping names their workers, otherwise these are 0, 1,
            2 ... With `dp_size` above 1, each `dp_size` consecutive engines are the ranks of one worker, named (id,
            rank). If one role of P/D pairs has ranks, all workers are named this way. Without engines, workers join
            later.
        router: its `pick(request, candidates)` returns the worker of one of the candidates, or None to let the request
            wait. While there is no worker, it is called with no candidates, unless it has `needs_candidates = True`.
            These methods are called if it has them: `started(workers)` once, before its first pick;
            `dispatched(request, worker)` right after a pick; `first_token(request)`, unless the first token is also the
            last; `finished(request)`; `withdrawn(request)` when a waiting request is called off; `apply(event)` for
            each event; `next_waiting(requests)` returns the waiting request to pick for next, or None for no more picks
            now; `worker_added(worker)`, `worker_removed(worker)`. Async methods need `arun`. The router's beliefs are
            compared with the calls and events that it got if it has `loads()`, `overlap(request)`, `believed(request)`,
            `workers()`, or, for stores, `overlap_by_owner(request)`: {store: {worker: blocks}}, the blocks beyond the
            worker's faster tiers. None: a `DynamoRouter` of the engines' release.
        index: the index that overlaps come from; it has `apply(event)` and `find_matches(local_hashes)`. None: a
            `RadixIndex`.
        args: the arguments of workers that join, for a fleet without engines.
        semantics: the release whose closed loop is followed; None for the engines' release.
        loads: the loads that candidates show: "router", those of the load book of Dynamo's router; "engine", those of
            the engines themselves; "stream", those that engines publish, as SGLang's do; or a `LoadFeed`, whose
            readings may be late, lost or short.
        loads_every_ms: with "engine", the maximum age of loads, `waiting` and `usage`, in milliseconds; 0: they are
            read at each pick.
        concurrency: number of requests that are open at once, regardless of timestamps; None: requests arrive by
            timestamps.
        arrival_speedup: divisor of arrival times and delays; above 0.
        trace_block_size: tokens for each hash id of a trace; see `replay`.
        stop_ms: milliseconds after the start from which no pass starts and no request arrives; requests open then
            become "unfinished".
        event_delay_ms: virtual milliseconds from the publishing of an event to its delivery: a number, or a function of
            the event. Events of one rank stay in order. The end of the run delivers all events that are still late.
        pick_timeout_s: how long an async method of the router may take, in seconds of real time.
        record: keep a sample of each real pass, and the candidates of each pick with true values, for `Report.regret`
            and pages.
        slo: the limits that a request must keep to count as good.
        order: for P/D pairs, the leg that the router picks for first: "prefill_first" or "decode_first".
        link: for P/D pairs, the link between the engines; None: taken from the arguments of the prefill engines.
        stores: the stores that workers share, such as `{"disk": {"kind": "files", "workers": [0, 1]}}`; a worker may
            join later. Each engine of a store's workers is put over the store. The reference index counts blocks that a
            worker announces in a store as the store's, and so does the default index. A fleet of a harness has the
            harness's stores.
        threshold: for P/D pairs, a request needs a prefill leg if its decode worker lacks at least this many tokens;
            the report counts requests without one (`RoleFigures.alone_from`). None: not checked.

    Engines of `worker_type` "prefill" and "decode" that hand over as vLLM's or SGLang's do are P/D pairs: the router
    picks twice for each request, one of each role (`request.phase`), or answers `DECODE_ALONE` or `REFUSE`. `router`
    and `index` may then be one of each role, `{"prefill": ..., "decode": ...}`. Sizes differ from role to role.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an argument out of range, or engines that cannot serve together.

    Attributes:
        engines: the engines, by worker; with those that joined, without those that are gone.
        report: the report of the last run; None before the first.
        plans: whether decode-only passes are computed in one go; results do not depend on it.
    """

    def __init__(
        self,
        engines: Iterable[MockEngine] | Mapping[Worker, MockEngine],
        router: object = None,
        index: Any = None,
        *,
        args: MockEngineArgs | None = None,
        semantics: EngineSemantics | None = None,
        loads: LoadSource | LoadFeed = "router",
        loads_every_ms: float = 0.0,
        concurrency: int | None = None,
        arrival_speedup: float = 1.0,
        trace_block_size: int | None = None,
        stop_ms: float | None = None,
        pick_timeout_s: float = 5.0,
        event_delay_ms: EventDelay = 0.0,
        record: bool = False,
        slo: Objectives = Objectives(),  # noqa: B008 - it is frozen
        order: Order | None = None,
        link: PairLink | None = None,
        stores: Mapping[str, Any] | None = None,
        threshold: int | None = None,
    ) -> None:
        named = _named(engines)
        shared = None
        if stores is not None:
            from pytest_kvmock.fleets.fleet_stores import FleetStores  # only for fleets with stores

            shared = FleetStores.of(stores)
        self.engines = dict(named)
        self._pairs = None
        if any(engine.args.worker_type != "aggregated" for _, engine in named):
            from pytest_kvmock.fleets.pairs.pair_fleet import PairFleet  # only for fleets with pairs

            self._pairs = PairFleet(named, order, link, threshold)
            router, index = self._pairs.as_one(router, index)
        elif order is not None or link is not None or threshold is not None:
            raise ValueError("Fleet: order, link and threshold are for engines of worker_type 'prefill' and 'decode'")
        else:
            _check_together(named)
        # Shows the properties of workers even while there are none: an engine that joins has the same.
        self._like = _make_like(args, named)
        args = self._like.args
        releases = args.scheduler.releases
        if semantics is not None and semantics not in releases:
            raise ValueError(f"Fleet: {unknown_text('semantics', semantics, releases)}")
        self._loads = LoadFeed.of(loads, loads_every_ms)
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
            router = DynamoRouter(args.release.dynamo, rng=Random(0))  # noqa: S311 - mock data
        self._calls = router if isinstance(router, RouterCalls) else RouterCalls(router, pick_timeout_s)
        self._release = args.release if semantics is None else releases[semantics]
        self._concurrency = concurrency
        self._speedup = arrival_speedup
        self._trace_block_size = trace_block_size
        self._stop_ms = stop_ms
        self.report: Report | None = None
        self.plans = True
        self._ranks = args.dp_size if self._pairs is None else self._pairs.ranks
        if not callable(event_delay_ms):
            check_number("Fleet: event_delay_ms", event_delay_ms, unit=" (milliseconds), or a function of the event")
        self._objectives = check_objectives("Fleet", slo)
        backends = [BACKENDS.get(engine.worker.backend) for engine in (*self.engines.values(), self._like)]
        # Engines that publish every copy of a block still hold it when one is removed.
        copies = any(each is not None and each.residency == "counted" for each in backends)
        if isinstance(index, Knowledge):  # a harness has its own, which also delivers events
            knowledge = index
        else:
            ranked = any(isinstance(worker, tuple) for worker in self.engines) if named else args.dp_size > 1
            knowledge = Heard(
                index, self.engines, event_delay_ms, counts_copies=copies, has_ranks=ranked, shared=shared
            )
        self._knowledge = knowledge
        held = knowledge.held_events() if record else ()
        self._caches = None
        if record:
            known = knowledge.reference.stores
            self._caches = TrueCaches(
                self.engines, held, counts_copies=copies, has_ranks=knowledge.has_ranks, stores=known
            )
        self._incidents: list[Incident] = []
        self._ids = set(map(id_of, self.engines))  # of all workers that ever existed
        self._ended_ms = 0.0
        self._cordoned: set[Worker] = set()
        self._aborts: list[PlannedAbort] = []
        self._abort_share: AbortShare | None = None
        self._run: FleetRun | None = None  # set during a run

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.engines)} engines behind {self._calls.name}>"

    def at(self, ms: float) -> Moment:
        """Return an object that plans incidents at a moment of the next run, or of the current one:
        `fleet.at(500).crash(1)`; also `restart`, `leave`, `join`, `cordon`, `uncordon`, `abort`.

        Args:
            ms: when, in virtual milliseconds from the start of the run.

        Raises:
            ValueError: `ms` is not a number of at least 0, or it is in the past.
        """
        check_number("Fleet.at: ms", ms, unit=" (milliseconds)")
        run = self._run
        if run is not None and ms < run.now_ms - self._start_ms:
            raise ValueError(f"Fleet.at: {ms:g} ms is in the past; the run is at {run.now_ms - self._start_ms:g} ms")
        return Moment(ms, self._plan_incident, self._plan_abort)

    def abort_share(self, share: float, seed: int = 0, within_ms: float = 1000.0) -> Self:
        """Call off a share of the requests of each run, as if their clients left. Requests that set an abort keep their
        own.

        Half of them are called off after a time drawn from 0 to `within_ms`, the others after a part of their output.
        So aborts hit waiting requests, prefills and decodes.

        Args:
            share: the share of the trace's requests, from 0 to 1.
            seed: the seed of the draw; the same seed calls off the same requests of a trace at the same points.
            within_ms: the longest time, in virtual milliseconds from the arrival at the router.

        Returns:
            The fleet.

        Raises:
            ValueError: a number is out of range.
        """
        self._abort_share = AbortShare(share, seed, within_ms)
        return self

    def _plan_abort(self, ms: float, request: int | RouterRequest) -> None:
        """Plan that a request is called off.

        Raises:
            ValueError: `request` is not the number of a request, or not a request of the current run.
        """
        run = self._run
        if isinstance(request, RouterRequest):
            if run is None or not run.aborts.has_seen(request):
                raise ValueError(
                    f"Fleet.at({ms:g}).abort: {request!r} is not a request of the run under way; give its number"
                )
            request = request.number
        abort = PlannedAbort(
            ms, check_integer(f"Fleet.at({ms:g}).abort: a request is named by its number, which", request, 0)
        )
        if run is None:
            self._aborts.append(abort)
        else:
            run.aborts.plan(abort)

    def _plan_incident(self, incident: Incident) -> Worker:
        """Plan an incident if its worker exists at that time; return the worker.

        Raises:
            TypeError: the engine of a join is not a `MockEngine`.
            ValueError: there is no such worker at that time, or the id of a join was used before.
        """
        run = self._run
        past = self._incidents if run is None else run.incidents.planned
        known = self._ids.union(each.worker for each in past)
        if incident.kind == "join":
            incident = self._joining(incident, known, past)
        planned = sorted([*past, incident], key=lambda each: each.ms)
        there = set(map(id_of, self.engines))
        for each in planned:
            where = f"Fleet.at({each.ms:g}).{each.kind}({each.worker!r})"
            if each.kind == "join":
                there.add(each.worker)
                continue
            if each.worker not in there:
                who = f"there are {', '.join(map(repr, sorted(there)))}" if there else "no worker is there"
                raise ValueError(f"{where}: there is no such worker at that time; {who}")
            if each.kind in ("crash", "leave"):
                there.discard(each.worker)
        if run is None:
            self._incidents = planned
        else:
            run.incidents.plan(incident)
        return incident.worker

    def _joining(self, incident: Incident, known: Collection[int], past: Iterable[Incident]) -> Incident:
        """Return a join with the id of the new worker, if that worker can join."""
        engine, worker = incident.engine, incident.worker
        if engine is not None:
            if not isinstance(engine, MockEngine):
                raise TypeError(f"Fleet.at: join takes a MockEngine, got {engine!r:.80}")
            if not self._knowledge.takes_engines:
                raise TypeError("Fleet.at: join of a fleet of a harness makes the engine itself; leave engine out")
            if self._ranks > 1 or (self._pairs is not None and self._knowledge.has_ranks):
                raise ValueError("Fleet.at: workers have ranks, whose engines join makes itself; leave engine out")
            others = list(self.engines.items()) or [(worker, self._like)]
            if self._pairs is None:
                _check_together([*others, (worker, engine)])
            else:
                self._pairs.check([*others, (worker, engine)])
        if self._pairs is not None:
            incident = replace(incident, role=self._pairs.role_of(incident))
        elif incident.role is not None:
            raise ValueError(f"Fleet.at: join: role is for fleets of P/D pairs, got {incident.role!r:.80}")
        if worker == NEXT_WORKER:
            worker = max(known, default=-1) + 1
            if incident.role is not None and self._pairs is not None:
                worker = self._pairs.next_id(incident.role, known)
                self._pairs.joins(worker, incident.role)
            return replace(incident, worker=worker)
        check_integer("Fleet.at: join: worker", worker, 0, ", or None")
        if worker in known and not (self._knowledge.takes_engines and has_crashed(worker, past, incident.ms)):
            raise ValueError(
                f"Fleet.at({incident.ms:g}).join({worker}): there is such a worker, or was; on bare engines only "
                "a worker whose crash the router was told of comes back under its id"
            )
        if incident.role is not None and self._pairs is not None:
            self._pairs.joins(worker, incident.role)
        return incident

    def run(self, trace: Iterable[TraceRequest | FleetRequest], *, name: str | None = None) -> Report:
        """Serve a trace.

        Args:
            trace: the requests.
            name: the name of the trace in the report.

        Raises:
            RouterError: the router raised, or broke a rule for routers.
            RouterStalled: requests wait in the router, and nothing runs any more.
            EngineStalled: an engine can never make progress.
            OutOfBlocks: a request can never fit an engine; nothing was run.
            TypeError: something in the trace is not a request, or the router is async.
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
        """End the current run now, as `stop_ms` does: open requests become "unfinished". Call it from a router or from
        a signal handler.
        """
        if self._run is not None:
            self._run.stop()

    @property
    def arrived(self) -> int:
        """Number of requests that have arrived in the current run; 0 without a run."""
        return 0 if self._run is None else self._run.arrived

    async def arun(self, trace: Iterable[TraceRequest | FleetRequest], *, name: str | None = None) -> Report:
        """Serve a trace as `run` does, and await each awaitable that the router returns."""
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
        if self._pairs is None:
            check_sizes(turns, serving, who="Fleet")
        else:
            self._pairs.check_turns(turns, serving)
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
        make = FleetRun if self._pairs is None else self._pairs.make_run
        run = make(
            self.engines,
            self._calls,
            self._knowledge,
            arrivals,
            self._like,
            loads=self._loads,
            in_lock_step=self._pairs is None and self._ranks > 1 and self._release.ranks_in_lock_step,
            start_ms=start_ms,
            stop_ms=math.inf if self._stop_ms is None else start_ms + self._stop_ms,
            plans=self.plans,
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
        self.engines = run.staying
        args, name, trace = self._like.args, *self._trace
        later = args.release.reports_workers
        workers = WorkerCount(len(set(map(id_of, run.engines))), args.gpus)
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
            loads_every_ms=self._loads.stale_ms,
            nobody_from_ms=run.unserved_from_ms,
        )
        services = tuple(run.notes.close(run.now_ms))
        self.report = Report(
            RunResult(
                tuple(run.requests),
                facts,
                services,
                tuple(run.served_by),
                tuple(run.turns),
                tuple(run.numbers),
                picks=tuple(run.notes.picks),
                incidents=tuple(run.notes.happened),
                missed=(
                    *(
                        Happened(each.ms, each.kind, each.worker)
                        for each in run.incidents.to_come
                        if each.kind != "notice"
                    ),
                    *run.aborts.missed(run.now_ms),
                ),
                event_errors=self._knowledge.event_errors,
                marks=tuple(self._knowledge.marks),
                recorder=run.recorder,
                beliefs=None if run.beliefs is None else tuple(run.beliefs.found),
                promises=() if run.beliefs is None else run.beliefs.promises,
                roles=None if self._pairs is None else self._pairs.roles_of(run, services),
            )
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
        sizes = [engine.args.dp_size if isinstance(engine, MockEngine) else 1 for engine in given]
        named, at, rank = [], 0, 0
        for engine, size in zip(given, sizes, strict=True):
            named.append(((at, rank) if max(sizes) > 1 else at, engine))
            at, rank = (at, rank + 1) if rank + 1 < size else (at + 1, 0)
    for worker, engine in named:
        if not isinstance(engine, MockEngine):
            raise TypeError(f"Fleet: engine {worker!r} must be a MockEngine, got {engine!r:.80}")
    return named


def _make_like(args: MockEngineArgs | None, named: Sequence[tuple[Worker, MockEngine]]) -> MockEngine:
    """Return an engine with the properties of the workers: the first engine, or without engines one from `args`."""
    if named:
        if args is not None:
            raise ValueError("Fleet: args are for a fleet without engines; these engines have their own")
        return named[0][1]
    if args is None:
        raise ValueError(
            "Fleet: there are no engines, so args=MockEngineArgs(...) must say what its workers will be "
            "(of a test: @pytest.mark.kvmock(workers=...))"
        )
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
            f"Fleet: engines are the ranks of workers, dp_size={engines[0].args.dp_size} each; got {len(engines)} "
            "engines"
        )
