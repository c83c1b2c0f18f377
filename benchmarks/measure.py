"""Figures, and how they are measured."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import pytest_kvmock
from pytest_kvmock.fleets import read_mooncake


@dataclass
class Figure:
    """One figure of the results; figures that differ only in their variant are one row.

    Attributes:
        name: what was measured.
        ratio: the result: our speed relative to the peer, unless name or unit say otherwise.
        bar: the value to reach; None if none was set.
        peer: the peer of the comparison; empty for none.
        variant: the variant that was measured.
        unit: the unit of ratio and bar: the times sign, or a unit of memory.
        most: whether the bar is an upper limit.
        why: the reason if it misses its bar.
        lines: the user's code for it, if it is not a command of the variant's name.
    """

    name: str
    ratio: float
    bar: float | None = None
    peer: str = ""
    variant: str = ""
    unit: str = "×"
    most: bool = False
    why: str = ""
    lines: str = ""

    @property
    def key(self) -> str:
        """Its unique name."""
        return f"{self.name}: {self.variant}" if self.variant else self.name

    @property
    def missed(self) -> bool:
        return self.bar is not None and (self.ratio > self.bar if self.most else self.ratio < self.bar)

    @property
    def shown(self) -> str:
        return f"{number(self.ratio)} {self.unit}"

    @property
    def bar_shown(self) -> str:
        return "" if self.bar is None else f"{'at most ' * self.most}{number(self.bar)} {self.unit}"


def number(value: float) -> str:
    """Format a number with three digits, or all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class NotHere(Exception):  # noqa: N818 - not an error, but a figure that cannot be measured here
    """The reason why a figure cannot be measured here."""


def wall_seconds(function: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of a single-threaded function: the wall time of an idle machine, also on a busy one."""
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def written(lines: str, **names: object) -> Callable[[], object]:
    """Return a function that runs lines as a user writes them, so that a row shows the measured code."""
    code = compile(lines, "<lines of a user>", "exec")
    used = {name: getattr(pytest_kvmock, name) for name in re.findall(r"\w+", lines) if name in pytest_kvmock.__all__}
    return lambda: exec(code, {"read_mooncake": read_mooncake} | used | names)


def alternating(rounds: int, *functions: Callable[[], object], clock=wall_seconds) -> list[float]:
    """Return the median seconds of each function. Rounds run all of them in turn, so that a slow machine affects
    all.
    """
    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds):
        order = range(len(functions))
        for i in order if number % 2 == 0 else reversed(order):
            times[i].append(clock(functions[i]))
    return [statistics.median(taken) for taken in times]


def dynamo(*releases: str):
    """Return `dynamo._core` and its version, which must be one of `releases` ("1.6") if given."""
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
