"""Comparison of reports, of this run or read from the JSON of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from pytest_kvmock.fleets.report.figures import FIGURES, Figures, check_figure, figure_text, names_of
from pytest_kvmock.fleets.report.routing_figures import aligned

NOISE: Final = 0.1
"""The largest difference of two figures, as a share of the greater one, that counts as noise: twice the effect of
random choices among equal workers.
"""


class Compared(NamedTuple):
    """A report to compare with: a `Report`, or the JSON of one.

    Attributes:
        router: the class of the router.
        trace: name of the trace.
        digest: digest of the trace.
        picks: digest of the picks.
        held_before: blocks that the engines held at the start of the run.
        figure: returns one figure of all workers together.
        figures: returns all figures.
    """

    router: str
    trace: str
    digest: str
    picks: str
    held_before: int
    figure: Callable[[str], float | None]
    figures: Callable[[], Figures]

    @classmethod
    def of(cls, other: object) -> Compared:
        """Convert a report or its JSON.

        Raises:
            TypeError: it is neither.
        """
        own = getattr(getattr(other, "run", None), "compared", None)
        if isinstance(own, Compared):
            return own
        fleet = other.get("fleet") if isinstance(other, Mapping) else None
        needed = {"router", "trace", "trace_digest", "picks_digest", "all"}
        if not isinstance(other, Mapping) or not isinstance(fleet, Mapping) or not needed <= set(fleet):
            raise TypeError(f"other must be a Report, or what its to_json() returned (of a fleet), got {other!r:.80}")
        whole: Mapping[str, Any] = other
        known: Mapping[str, Any] = fleet["all"]

        def figure(name: str) -> float | None:
            check_figure(name)
            found: float | None = known.get(name, whole.get(FIGURES[name].key or name))
            return found

        def figures() -> Figures:
            return {name: figure(name) for name in names_of("all", "worker", "latency")}

        digest = fleet["trace_digest"]
        trace = fleet["trace"] or f"trace {digest} of {known['requests']} requests"
        return cls(fleet["router"], trace, digest, fleet["picks_digest"], fleet.get("held_before", 0), figure, figures)

    def counted(self, name: str) -> float | None:
        """Return a figure; None if there was nothing to count, such as latencies without completed requests (0 in the
        JSON).
        """
        return None if FIGURES[name].is_point and not self.figure("completed") else self.figure(name)

    def other_start(self, other: Compared) -> str:
        """Return a note if the two runs began with different caches; else ""."""
        if self.held_before == other.held_before:
            return ""
        return (
            f"{self.router} began with {self.held_before} blocks in its engines, {other.router} with "
            f"{other.held_before}: what an earlier run left there is a hit for the later one"
        )


class Comparison(Mapping[str, "tuple[float | None, float | None]"]):
    """Two reports side by side: a mapping of figures to both values. It prints as a table of the figures that differ,
    with the differences.

    A figure of the first report is "better" or "worse" than the second's, or "within noise" if they differ by at most a
    tenth, twice the effect of random choices among equal workers. Figures without a better direction have no verdict.

    Args:
        one: the first report.
        other: the second report.

    Attributes:
        notes: texts on the limits of the comparison: different traces, or a router that draws unseeded random numbers.
    """

    def __init__(self, one: Compared, other: Compared) -> None:
        self._one, self._other = one, other
        ours, theirs = one.figures(), other.figures()
        self._values = {name: (ours.get(name), theirs.get(name)) for name in FIGURES if name in ours or name in theirs}
        self.notes: list[str] = []
        if one.digest != other.digest:
            self.notes.append(f"these are two traces: {one.trace}, and {other.trace}")
        elif one.router == other.router and one.picks != other.picks:
            self.notes.append(
                f"the same trace and {one.router} twice, but different picks: unless its options or the fleet's "
                "differ, its random draws are seeded differently, or it keeps what it learnt (ties alone are worth "
                "some 5 % of latencies)"
            )
        if start := one.other_start(other):
            self.notes.append(start)

    def __getitem__(self, name: str) -> tuple[float | None, float | None]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def differences(self) -> dict[str, tuple[float | None, float | None]]:
        """The figures that differ."""
        return {name: pair for name, pair in self._values.items() if pair[0] != pair[1]}

    def verdict(self, name: str) -> str:
        """Return the verdict on the first report's figure: "better", "worse", "within noise", or "" if there is
        none.
        """
        ours, theirs = self._values[name]
        better = FIGURES[name].better
        if ours is None or theirs is None or ours == theirs or not better:
            return ""
        if abs(ours - theirs) <= NOISE * max(abs(ours), abs(theirs)):
            return "within noise"
        return "better" if (ours - theirs) * better > 0 else "worse"

    def __str__(self) -> str:
        one, other = self._one, self._other
        lines = [["figure", one.router, other.router, "difference", "times", ""]]
        for name, (ours, theirs) in self.differences.items():
            apart = times = None
            if ours is not None and theirs is not None:
                apart = ours - theirs
                times = ours / theirs if theirs else None
            values = (figure_text(value) for value in (ours, theirs, apart, times))
            lines.append([name, *values, self.verdict(name)])
        table = aligned(lines) if len(lines) > 1 else f"{one.router} and {other.router}: all figures are equal"
        return "\n".join([table, *(f"note: {note}" for note in self.notes)])
