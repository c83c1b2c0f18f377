"""The command `replay`: traces, backends and routers from a shell, and a table of the results."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.contrib.lab.named_routers import ROUTERS
from pytest_kvmock.contrib.lab.sweeps import Sweep, SweepRun, SweepSettings, run_cases, sweep_cases
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.report.rows import Objectives
from pytest_kvmock.fleets.traces.mooncake import MOONCAKE_BLOCK_SIZE
from pytest_kvmock.fleets.traces.synthetic import ARRIVALS, synthetic_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from pytest_kvmock.contrib.lab.sweeps import SweepCase, Trace

SYNTHETIC: Final = "synthetic"
"""The name of a synthetic trace."""

INTERRUPTED: Final = 130


def replay_traces(given: argparse.Namespace) -> int:
    """Run all combinations; return the exit code: 0, 1 if a run failed or a router drifted, 130 after Ctrl-C."""
    before = None if given.compare is None else _read_json(given.compare)
    traces, backends, routers = _traces(given), _names(given.backend), _names(given.router)
    is_table = len(traces) * len(backends) * len(routers) > 1
    cases = sweep_cases(traces, backends, routers, _settings(given, is_table=is_table))
    jobs = len(os.sched_getaffinity(0)) if given.jobs is None else given.jobs
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {given.jobs}")
    outputs = [path for path in (given.json, given.html) if path is not None and path != "-"]
    for path in outputs:  # checked before minutes of work
        if not Path(path).parent.is_dir():
            raise ValueError(f"{path}: no directory {Path(path).parent} to write it in")
    done, interrupted = _run(cases, min(jobs, len(cases)))
    found = Sweep(done)
    if given.json is not None:
        text = json.dumps(found.to_json(), indent=1)
        if given.json == "-":
            sys.stdout.write(f"{text}\n")
        else:
            Path(given.json).write_text(f"{text}\n")
    if given.html is not None:
        _write_pages(found, Path(given.html), before)
    if given.json != "-" and done:
        sys.stdout.write(f"{done[0].text if len(cases) == 1 and not found.errors else found}\n")
    if before is not None:
        for run, compared in found.compare(before):
            sys.stdout.write(f"\n{run.name}, compared with {given.compare}:\n{compared}\n")
    sys.stdout.flush()
    if interrupted:
        whole = len(done) == len(cases)
        what = "the run ends where it was" if whole else f"{len(done)} of {len(cases)} runs were made"
        sys.stderr.write(f"replay: interrupted; {what}\n")
        return INTERRUPTED
    for run in found.errors:
        sys.stderr.write(f"replay: {run.name}: {run.error}\n")
    for run in found.drifted:
        sys.stderr.write(f"replay: {run.name}: {', '.join(each.rule for each in run.drifts)}\n")
    return 1 if found.errors or found.drifted else 0


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"--compare {path}: no JSON of a replay: {error}") from None


def _write_pages(found: Sweep, path: Path, before: Any) -> None:
    """Write a page for each run, with all others next to it: the first at the path, the others with their number
    appended.
    """
    from pytest_kvmock.fleets.report.page_data import compared
    from pytest_kvmock.values.pages.page import render, write_page

    runs = [(run, run.page) for run in found.runs if run.page is not None]
    parts = [(run.trace, run.backend, run.router) for run, _ in runs]
    differ = [at for at in range(3) if len({each[at] for each in parts}) > 1] or [2]
    named = [
        page["reports"][0] | {"name": ", ".join(each[at] for at in differ)}
        for (_, page), each in zip(runs, parts, strict=True)
    ]
    known = {} if before is None else {run.name: each for run, each in found.before(before)}
    for number, (run, page) in enumerate(runs, 1):
        own = named[number - 1]
        earlier = [compared(known[run.name]) | {"name": "before"}] if run.name in known else []
        data = page | {"reports": [own, *earlier, *(each for each in named if each is not own)]}
        where = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        write_page(where, render("fleet", run.name, data))


def _names(texts: Sequence[str]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(names))


def _settings(given: argparse.Namespace, *, is_table: bool) -> SweepSettings:
    """Return the common settings of all runs; `is_table`: a table shows the figures of several runs."""
    engine = {"num_gpu_blocks": given.num_blocks, "block_size": given.block_size, "semantics": given.semantics}
    fleet = {
        "concurrency": given.concurrency,
        "arrival_speedup": given.speedup,
        "slo": Objectives(given.slo_ttft_ms, given.slo_itl_ms, given.slo_e2e_ms),
    }
    return SweepSettings(
        given.workers,
        given.trace_block_size,
        given.limit,
        given.seed,
        {name: value for name, value in engine.items() if value is not None},
        {name: value for name, value in fleet.items() if value is not None},
        pages=given.html is not None,
        figures=is_table or given.json is not None or given.compare is not None,
    )


def _traces(given: argparse.Namespace) -> dict[str, Trace]:
    found: dict[str, Trace] = {}
    for text in given.trace:
        if text == SYNTHETIC:
            name, trace = SYNTHETIC, _synthetic(given)
        else:
            name, trace = Path(text).stem, text
        if name in found:
            raise ValueError(f"two traces are called {name!r}; each needs a name of its own")
        found[name] = trace
    return found


def _synthetic(given: argparse.Namespace) -> Trace:
    arrival, _, rate = given.arrival.partition(":")
    try:
        interval_ms = round(1000 / float(rate))
    except (ValueError, ZeroDivisionError, OverflowError):
        interval_ms = 0
    if arrival not in ARRIVALS or interval_ms < 1:
        known = " or ".join(f"{name}:RATE" for name in ARRIVALS)
        raise ValueError(
            f"--arrival must be {known}, with at most 1000 new sessions a second, got {given.arrival!r:.80}"
        )
    return list(
        synthetic_trace(
            sessions=given.sessions,
            groups=given.tenants,
            arrival=arrival,
            interval_ms=interval_ms,
            block_size=given.trace_block_size,
            seed=given.seed,
        )
    )


# ------------------------------------------------------------------------------------------------------- running


def _run(cases: Sequence[SweepCase], jobs: int) -> tuple[list[SweepRun], bool]:
    """Run the cases; return the finished runs in order, and whether they were interrupted."""
    return _run_here(cases) if jobs == 1 else _run_in_processes(cases, jobs)


def _run_here(cases: Sequence[SweepCase]) -> tuple[list[SweepRun], bool]:
    """Run one after the other. Ctrl-C stops the current run, whose report is then complete; a second one ends it at
    once.
    """
    done: list[SweepRun] = []
    fleets: list[Fleet] = []
    interrupted = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal interrupted
        if interrupted or not fleets:
            raise KeyboardInterrupt
        interrupted = True
        fleets[-1].stop()

    with _handled(stop), _shown(lambda: _requests_text(fleets, len(done), len(cases))):
        for _, run in run_cases(cases, watch=fleets.append):
            done.append(run)
            if interrupted:
                break
    return done, interrupted


def _run_in_processes(cases: Sequence[SweepCase], jobs: int) -> tuple[list[SweepRun], bool]:
    """Run in parallel processes. Ctrl-C ends them, and the runs under way are lost."""
    done: dict[int, SweepRun] = {}
    interrupted = False
    # Spawned, not forked, so that processes do not share the state of routers, plugins and threads.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _ignore_interrupts)
    try:
        with _shown(lambda: f"{len(done)} of {len(cases)} runs"):
            for at, run in run_cases(cases, pool):
                done[at] = run  # noqa: PERF403 - runs that finished before an interrupt are kept
    except KeyboardInterrupt:
        interrupted = True
        for process in multiprocessing.active_children():
            process.terminate()
    finally:
        pool.shutdown(wait=not interrupted, cancel_futures=True)
    return [done[at] for at in sorted(done)], interrupted


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in a process of the pool: its parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _requests_text(fleets: Sequence[Fleet], done: int, planned: int) -> str:
    arrived = fleets[-1].arrived if fleets else 0
    runs = f"run {min(done + 1, planned)} of {planned}, " if planned > 1 else ""
    return f"{runs}{arrived:,} requests"


@contextmanager
def _shown(text: Any) -> Iterator[None]:
    """Show the progress on a terminal, a few times a second."""
    with ExitStack() as stack:
        if sys.stderr.isatty():
            ended = Event()

            def show() -> None:
                while not ended.wait(0.2):
                    sys.stderr.write(f"\r\x1b[K{text()}")
                    sys.stderr.flush()
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

            thread = Thread(target=show, name="kvmock-progress", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
        yield


def add_parser(commands: Any, plugins: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    replay = commands.add_parser(
        "replay",
        parents=[plugins],
        help="serve traces by mock engines in virtual time, behind a router, and report the results",
        description="Serve traces by mock engines in virtual time, behind a router. Several traces, backends and "
        "routers make a table "
        "of all combinations. Exits with 0 if all were served, 1 if a run failed or a router had wrong beliefs "
        "(drift), 2 if a run cannot begin, 130 after Ctrl-C, which prints the finished runs.",
    )
    replay.add_argument(
        "trace",
        metavar="TRACE",
        nargs="+",
        help=f"a file in the Mooncake format, or {SYNTHETIC!r}: a generated one",
    )
    replay.add_argument(
        "--router",
        metavar="NAME",
        action="append",
        help=f"{', '.join(ROUTERS)}, or module:name; several with commas (default: dynamo)",
    )
    replay.add_argument(
        "--backend", metavar="NAME", action="append", help="of the engines; several with commas (default: vllm)"
    )
    replay.add_argument("--workers", metavar="N", type=int, default=8, help="how many engines (default: 8)")
    replay.add_argument(
        "--num-blocks", metavar="N", type=int, default=16_384, help="blocks of each engine (default: 16384)"
    )
    replay.add_argument("--block-size", metavar="N", type=int, default=64, help="tokens a block (default: 64)")
    replay.add_argument(
        "--trace-block-size",
        metavar="N",
        type=int,
        default=MOONCAKE_BLOCK_SIZE,
        help=f"tokens for each hash id of a trace (default: {MOONCAKE_BLOCK_SIZE})",
    )
    replay.add_argument("--semantics", metavar="RELEASE", help="the release of Dynamo whose scheduler engines follow")
    replay.add_argument("--concurrency", metavar="N", type=int, help="requests open at once, regardless of timestamps")
    replay.add_argument("--speedup", metavar="X", type=float, default=1.0, help="divides times of arrival (default: 1)")
    replay.add_argument("--limit", metavar="N", type=int, help="serve at most N requests of each trace")
    replay.add_argument("--seed", metavar="N", type=int, default=0, help="seed of all random values (default: 0)")
    for name, what in (("ttft", "the first token"), ("itl", "the mean time between tokens"), ("e2e", "the last token")):
        replay.add_argument(
            f"--slo-{name}-ms", metavar="MS", type=float, help=f"goodput: {what} takes no longer, in milliseconds"
        )
    replay.add_argument("--jobs", metavar="N", type=int, help="runs side by side (default: one a core)")
    replay.add_argument(
        "--json", metavar="FILE", help="write all figures there; - for standard output, in place of the table"
    )
    replay.add_argument(
        "--html", metavar="FILE", help="write a page for each run, from the second on as FILE-2 and so on"
    )
    replay.add_argument("--compare", metavar="FILE", help="show differences from figures that --json wrote before")
    made_up = replay.add_argument_group(f"the trace {SYNTHETIC!r}")
    made_up.add_argument("--sessions", metavar="N", type=int, default=500, help="conversations (default: 500)")
    made_up.add_argument("--tenants", metavar="N", type=int, default=8, help="shared prefixes (default: 8)")
    made_up.add_argument(
        "--arrival", metavar="HOW", default="poisson:1", help="sessions that begin a second (default: poisson:1)"
    )
    replay.set_defaults(run=_with_defaults)


def _with_defaults(given: argparse.Namespace) -> int:
    given.router = given.router or ["dynamo"]
    given.backend = given.backend or ["vllm"]
    return replay_traces(given)
