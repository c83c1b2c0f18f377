"""How figures are taken, and what one is."""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec


@dataclass
class Figure:
    """One row of the results.

    Attributes:
        name: what was measured.
        bar: what is to be reached, as text; empty where nothing was set.
        measured: what was found.
        met: whether it reaches the bar; None where there is none.
        peer: what it was measured beside, and what that did; empty for nothing.
        profile: where the time goes, for a figure that misses its bar.
    """

    name: str
    bar: str
    measured: str
    met: bool | None = None
    peer: str = ""
    profile: str = ""


@dataclass
class TableRow:
    """One row of a table of its own, below the figures.

    Attributes:
        name: what was measured; no two rows have one name.
        table: title of the table.
        cells: its columns, by their heads.
    """

    name: str
    table: str
    cells: dict[str, str]


class NotHere(Exception):  # noqa: N818 - no error: a figure that this environment cannot give
    """Why a figure cannot be measured here."""


def wall_seconds(function: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """For what runs in one thread: the same as the wall clock of an idle machine, on a busy one too."""
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def alternating(rounds: int, *functions: Callable[[], object], clock=wall_seconds) -> list[float]:
    """Median seconds of each function; rounds go through all of them in turn, so that what slows one slows all."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds):
        order = range(len(functions))
        for i in order if number % 2 == 0 else reversed(order):
            times[i].append(clock(functions[i]))
    return [statistics.median(taken) for taken in times]


def profile_of(function: Callable[[], object], top: int = 8) -> str:
    """The functions that take the most time by themselves, one a line: share, calls, name."""
    profiler = cProfile.Profile()
    profiler.runcall(function)
    stats = pstats.Stats(profiler)
    total = stats.total_tt  # type: ignore[attr-defined]
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][2])[:top]  # type: ignore[attr-defined]
    lines = []
    for (file, line, name), (_, calls, own, *_rest) in rows:
        where = name if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {name}"
        lines.append(f"{own / total:6.1%} {calls:>10,} calls  {where}")
    return "\n".join(lines)


def dynamo(*releases: str):
    """`dynamo._core` and its version; of these releases ("1.6") where they are given."""
    try:
        from dynamo import _core
    except ImportError:
        raise NotHere("ai-dynamo-runtime is not installed") from None
    version = metadata.version("ai-dynamo-runtime")
    if releases and version.rpartition(".")[0] not in releases:
        raise NotHere(f"needs ai-dynamo-runtime {' or '.join(releases)}, {version} is installed")
    return _core, f"ai-dynamo-runtime {version}"


def needs(*modules: str) -> None:
    """Raise NotHere for the first of these modules that is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise NotHere(f"{module} is not installed")


def rate(count: float, seconds: float) -> str:
    per_second = count / seconds
    return f"{per_second / 1e6:.2f} M/s" if per_second >= 1e6 / 2 else f"{per_second / 1e3:.0f} k/s"
