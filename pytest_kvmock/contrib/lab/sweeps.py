"""Many replays: each trace over each backend behind each router, one after the other or on any executor of
`concurrent.futures`.

A run and its result are values: both can be sent to other processes and machines. Each run makes its own router.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.contrib.lab.named_routers import MakeRouter, make_router
from pytest_kvmock.engines.backends import backend_spec
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.worker import OutOfBlocks
from pytest_kvmock.fleets.clock.engine_state import EngineStalled
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.report.comparison import Compared, Comparison
from pytest_kvmock.fleets.report.figures import figure_columns, folded
from pytest_kvmock.fleets.report.page_data import fleet_data
from pytest_kvmock.fleets.report.rows import Belief
from pytest_kvmock.fleets.router_calls import RouterError, RouterStalled
from pytest_kvmock.fleets.routing.selection import DynamoRouter
from pytest_kvmock.fleets.traces.mooncake import MOONCAKE_BLOCK_SIZE, TraceRequest, read_mooncake
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.long_runs import long_run

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pytest_kvmock.fleets.report.report import Report

Trace: TypeAlias = "str | os.PathLike[str] | Sequence[TraceRequest]"
"""A file in the Mooncake format, or requests."""

_COLUMNS: Final = (
    *("hit_ratio", "of_ideal", "of_best", "ttft_p50", "ttft_p95", "itl_p95", "e2e_p95", "goodput", "balance_requests"),
    "preemptions",
)


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """The common settings of all runs of a sweep; see `sweep`.

    Attributes:
        pages: whether each run returns the data of its page.
        figures: whether each run returns its figures (`SweepRun.report`); those of gaps between tokens take a while.
    """

    workers: int = 8
    trace_block_size: int = MOONCAKE_BLOCK_SIZE
    limit: int | None = None
    seed: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    fleet: Mapping[str, Any] = field(default_factory=dict)
    pages: bool = False
    figures: bool = True


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One run: the trace, the engines and the router.

    Attributes:
        trace: a name, and the requests or the file.
        backend: backend of the engines.
        router: a name, and what makes it.
        settings: the common settings.
    """

    trace: tuple[str, Trace]
    backend: str
    router: tuple[str, MakeRouter]
    settings: SweepSettings

    def engines(self) -> list[MockEngine]:
        """Make the engines.

        Raises:
            ValueError: their arguments are invalid.
        """
        spec = backend_spec(self.backend)
        args = MockEngineArgs(**{"engine_type": spec.scheduler, **self.settings.engine})
        return [MockEngine(args, backend=spec, seed=self.settings.seed + at) for at in range(self.settings.workers)]

    def fleet(self) -> Fleet:
        """Make engines and router.

        Raises:
            TypeError: see `make_router`.
            ValueError: see `make_router`, or a setting is out of range.
        """
        chosen = self.settings
        router, engines = make_router(self.router[1]), self.engines()
        if router is None:  # Dynamo's router of the engines' release
            router = DynamoRouter(engines[0].args.release.dynamo, rng=Random(chosen.seed))  # noqa: S311 - mock data
        options: dict[str, Any] = {"trace_block_size": chosen.trace_block_size, **chosen.fleet}
        if chosen.pages:
            options["record"] = True
        return Fleet(engines, router, **options)

    def requests(self) -> Iterable[TraceRequest]:
        """Return the requests of the trace, which may be read from a file.

        Raises:
            OSError: the file cannot be opened.
            TraceError: a line of it breaks a rule.
        """
        _, trace = self.trace
        chosen = self.settings
        if isinstance(trace, str | os.PathLike):
            return read_mooncake(trace, limit=chosen.limit, trace_block_size=chosen.trace_block_size)
        return trace if chosen.limit is None else trace[: chosen.limit]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """The result of one run.

    Attributes:
        trace: name of the trace.
        backend: backend of the engines.
        router: name of the router.
        report: the result of `Report.to_json()`; None: the run failed, or no figures are wanted.
        text: the printed report; "" if the run failed.
        error: the reason of a failure, in one line; "" if there was none.
        page: the data of its page (`page_data.fleet_data`); None if no page is wanted.
        drifts: wrong beliefs of the router, the first of each kind; see `Report.beliefs`.
    """

    trace: str
    backend: str
    router: str
    report: Mapping[str, Any] | None = None
    text: str = ""
    error: str = ""
    page: dict[str, Any] | None = field(default=None, repr=False)
    drifts: Sequence[Belief] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.trace}, {self.backend}, {self.router}"

    def figure(self, name: str) -> float | None:
        """Return a figure over all workers (see `Report`); None if there is none.

        Raises:
            ValueError: no figure has this name.
        """
        return None if self.report is None else Compared.of(self.report).figure(name)

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data for JSON."""
        names = {"trace": self.trace, "backend": self.backend, "router": self.router}
        return names | ({"error": self.error} if self.report is None else {"report": self.report})


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results of all runs. It prints as a table with one row per run; the row of a router that drifted is marked,
    and its wrong beliefs follow.

    Attributes:
        runs: the finished runs, in the order of traces, backends, routers.
    """

    runs: Sequence[SweepRun]

    @property
    def errors(self) -> list[SweepRun]:
        """The runs that failed."""
        return [run for run in self.runs if run.error]

    @property
    def drifted(self) -> list[SweepRun]:
        """The runs whose router had wrong beliefs."""
        return [run for run in self.runs if run.drifts]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON: `runs`, each with trace, backend, router, and report or error."""
        return {"kvmock_sweep": 1, "runs": [run.to_json() for run in self.runs]}

    def __str__(self) -> str:
        good = [run for run in self.runs if run.report is not None]
        drifted = self.drifted
        named = [[what, *(getattr(run, what) for run in good)] for what in ("trace", "backend", "router")]
        if drifted:
            named.append(["drift", *(", ".join(each.rule for each in run.drifts) or "-" for run in good)])
        columns = figure_columns([Compared.of(run.report).figures() for run in good], _COLUMNS)
        parts = [folded(named, columns)] if good else []
        parts += [f"{run.name}: {each}" for run in drifted for each in run.drifts]
        return "\n".join([*parts, *(f"{run.name}: {run.error}" for run in self.errors)])

    def compare(self, other: Mapping[str, Any]) -> list[tuple[SweepRun, Comparison]]:
        """Compare runs with those of another sweep that have the same trace, backend and router.

        Args:
            other: the result of `to_json()` of a sweep or a report; a report is compared with every run.

        Raises:
            TypeError: `other` is neither.
        """
        return [(run, Comparison(Compared.of(run.report), Compared.of(known))) for run, known in self.before(other)]

    def before(self, other: Mapping[str, Any]) -> list[tuple[SweepRun, Mapping[str, Any]]]:
        """Return the runs that another sweep also has, each with its report there; see `compare`."""
        if isinstance(other, Mapping) and "kvmock_sweep" in other:
            known = {(run["trace"], run["backend"], run["router"]): run.get("report") for run in other["runs"]}
        else:
            Compared.of(other)
            known = {(run.trace, run.backend, run.router): other for run in self.runs}
        pairs = [(run, known.get((run.trace, run.backend, run.router))) for run in self.runs]
        return [(run, report) for run, report in pairs if run.report is not None and report is not None]


def sweep_cases(
    traces: Mapping[str, Trace] | Iterable[Trace],
    backends: Iterable[str] = ("vllm",),
    routers: Mapping[str, MakeRouter] | Iterable[MakeRouter] = ("dynamo",),
    settings: SweepSettings | None = None,
) -> list[SweepCase]:
    """Return the runs of a sweep, after checking that all can begin; see `sweep` for the errors."""
    chosen = SweepSettings() if settings is None else settings
    check_integer("sweep: workers", chosen.workers, 1)
    named = _named("traces", traces, _trace_name)
    for name, trace in named:
        if isinstance(trace, str | os.PathLike):
            next(iter(read_mooncake(trace, limit=1, trace_block_size=chosen.trace_block_size)))
        elif not isinstance(trace, Sequence) or not trace:
            raise TypeError(f"sweep: trace {name!r} must be a file or a sequence of requests, got {trace!r:.80}")
    made_by = _named("routers", routers, _router_name)
    known = [backend_spec(name).name for name in _listed("backends", backends)]
    cases = [SweepCase(trace, backend, router, chosen) for trace in named for backend in known for router in made_by]
    for case in cases[: len(known) * len(made_by)]:  # settings and routers are checked with the first trace
        case.fleet()
    return cases


def _listed(what: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"sweep: {what} must be several, in a list, got {given!r:.80}")
    found = list(given)
    if not found:
        raise ValueError(f"sweep: {what} must be at least one, got none")
    return found


def _named(what: str, given: Any, name_of: Callable[[Any, int], str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return _listed(what, given.items())
    found = [(name_of(each, at), each) for at, each in enumerate(_listed(what, given))]
    names = [name for name, _ in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"sweep: {what} must have names of their own, two are called {twice!r}; a mapping names them")
    return found


def _trace_name(trace: Trace, at: int) -> str:
    return Path(trace).stem if isinstance(trace, str | os.PathLike) else f"trace {at}"


def _router_name(router: MakeRouter, at: int) -> str:
    return router if isinstance(router, str) else str(getattr(router, "__name__", f"router {at}"))


def run_case(case: SweepCase, watch: Callable[[Fleet], None] | None = None) -> SweepRun:
    """Run one replay, possibly in a process of an executor.

    Args:
        case: the run.
        watch: called with the fleet before it runs.

    Returns:
        The result; a failure of an engine or router is its `error`, not an exception.
    """
    names = case.trace[0], case.backend, case.router[0]
    with long_run():
        try:
            fleet = case.fleet()
            if watch is not None:
                watch(fleet)
            report: Report = fleet.run(case.requests(), name=case.trace[0])
        except (RouterError, RouterStalled, EngineStalled, OutOfBlocks, ValueError, TypeError, OSError) as error:
            return SweepRun(*names, error=_one_line(error))
        chosen = case.settings
        figures, page = report.to_json() if chosen.figures else None, fleet_data(report) if chosen.pages else None
        return SweepRun(*names, figures, str(report), page=page, drifts=report.beliefs or ())


def _one_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_cases(
    cases: Sequence[SweepCase], executor: Executor | None = None, watch: Callable[[Fleet], None] | None = None
) -> Iterator[tuple[int, SweepRun]]:
    """Yield the results of runs as they end, each with its index; see `sweep`.

    Args:
        cases: the runs.
        executor: runs them; None: they run in this process, one after the other.
        watch: called with the fleet of each run in this process.
    """
    if executor is None:
        for at, case in enumerate(cases):
            yield at, run_case(case, watch)
        return
    places = {executor.submit(run_case, case): at for at, case in enumerate(cases)}
    try:
        for future in as_completed(places):
            at = places[future]
            case = cases[at]
            try:
                yield at, future.result()
            except Exception as error:  # noqa: BLE001 - an executor may raise anything for a process that died, or a result that it cannot send
                yield at, SweepRun(case.trace[0], case.backend, case.router[0], error=_one_line(error))
    finally:
        for future in places:
            future.cancel()


def sweep(
    traces: Mapping[str, Trace] | Iterable[Trace],
    backends: Iterable[str] = ("vllm",),
    routers: Mapping[str, MakeRouter] | Iterable[MakeRouter] = ("dynamo",),
    executor: Executor | None = None,
    *,
    workers: int = 8,
    trace_block_size: int = MOONCAKE_BLOCK_SIZE,
    limit: int | None = None,
    seed: int = 0,
    engine: Mapping[str, Any] | None = None,
    **fleet: Any,
) -> Sweep:
    """Serve each trace over each backend behind each router, each time by new engines and a new router.

    Args:
        traces: files in the Mooncake format, or sequences of requests; a mapping names them.
        backends: names of backends.
        routers: names of `ROUTERS`, "module:name", or callables that make a router without arguments; a mapping names
            them.
        executor: any `concurrent.futures.Executor`, on this machine or on several. None: runs are made here, one after
            the other. Processes need arguments that can be pickled (no lambda), and backends that are registered there,
            too.
        workers: engines of each run, at least 1.
        trace_block_size: tokens for each hash id.
        limit: number of requests of each trace; None: all.
        seed: seed of generated tokens, and of Dynamo's router.
        engine: fields of `MockEngineArgs`: `num_gpu_blocks`, `block_size`, `semantics` ...
        **fleet: options of a `Fleet`: `concurrency`, `arrival_speedup`, `stop_ms`, `slo` ...

    Returns:
        All results; a run whose router or engine failed has an `error`.

    Raises:
        OSError: a trace cannot be opened.
        TypeError: an argument has the wrong type, or a router has no `pick`.
        ValueError: before any run: an unknown backend or router, one that cannot be made, or an option out of range.
    """
    chosen = SweepSettings(workers, trace_block_size, limit, seed, dict(engine or {}), fleet)
    cases = sweep_cases(traces, backends, routers, chosen)
    done = dict(run_cases(cases, executor))
    return Sweep([done[at] for at in sorted(done)])
