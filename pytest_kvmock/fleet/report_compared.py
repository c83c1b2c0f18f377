"""Reports of fleets beside each other: one that was made now, or what one of another day was as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_kvmock.fleet.fleet_figures import FIGURES, Figures, RequestRow, check_figure, dynamo_key
from pytest_kvmock.fleet.routing_figures import aligned

if TYPE_CHECKING:
    from pytest_kvmock.fleet.regret import Regret
    from pytest_kvmock.fleet.router_calls import Belief
    from pytest_kvmock.fleet.run_notes import Pick
    from pytest_kvmock.router.routing import Worker


class Reported(Protocol):
    """What a comparison and an assertion need of a report (`FleetReport`)."""

    @property
    def picks(self) -> Sequence[Pick]: ...  # noqa: D102 - as FleetReport has it
    @property
    def event_errors(self) -> Sequence[object] | None: ...  # noqa: D102 - likewise
    @property
    def beliefs(self) -> Sequence[Belief] | None: ...  # noqa: D102 - likewise
    @property
    def router(self) -> str: ...  # noqa: D102 - likewise
    @property
    def arrived(self) -> int: ...  # noqa: D102 - likewise
    @property
    def trace_name(self) -> str: ...  # noqa: D102 - likewise
    @property
    def trace_digest(self) -> str: ...  # noqa: D102 - likewise
    @property
    def picks_digest(self) -> str: ...  # noqa: D102 - likewise
    @property
    def held_before(self) -> int: ...  # noqa: D102 - likewise
    @property
    def loads_every_ms(self) -> float | None: ...  # noqa: D102 - likewise
    @property
    def served(self) -> list[RequestRow]: ...  # noqa: D102 - likewise

    def row(self, worker: Worker | None = None) -> Figures: ...  # noqa: D102 - likewise
    def figure(self, name: str, worker: Worker | None = None) -> float | None: ...  # noqa: D102 - likewise
    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]: ...  # noqa: D102 - likewise
    def regret(self, selector: Any) -> Regret: ...  # noqa: D102 - likewise
    def explain_pick(self, at: int) -> str: ...  # noqa: D102 - likewise
    def table_row(self, worker: Worker | None) -> str: ...  # noqa: D102 - likewise


def figure_text(value: float | None) -> str:
    """Return a figure as messages and tables have it."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


class Compared:
    """A report to compare with: one of this run, or JSON of another.

    Attributes:
        router: the class of the router.
        trace: what the trace is called.
        digest: digits of the trace.
        picks: digits of the picks.
        held_before: blocks that the engines held as the run began.
    """

    def __init__(self, report: Reported | None, data: Mapping[str, Any]) -> None:
        self._report = report
        self._data = data
        self.arrived: int = data["all"]["requests"] if report is None else report.arrived
        self.router: str = data["router"]
        self.digest: str = data["trace_digest"]
        self.picks: str = data["picks_digest"]
        self.held_before: int = data.get("held_before", 0)
        self.trace: str = data["trace"] or f"trace {self.digest} of {self.arrived} requests"

    @classmethod
    def of(cls, other: object) -> Compared:
        """Return a report, or its JSON, as one to compare with.

        Raises:
            TypeError: it is neither.
        """
        if hasattr(type(other), "picks_digest"):
            other = cast("Reported", other)
            names = {
                "router": other.router,
                "trace": other.trace_name,
                "trace_digest": other.trace_digest,
                "picks_digest": other.picks_digest,
                "held_before": other.held_before,
            }
            return cls(other, names)
        fleet = other.get("fleet") if isinstance(other, Mapping) else None
        if not isinstance(fleet, Mapping) or not {"router", "trace", "trace_digest", "picks_digest", "all"} <= set(
            fleet
        ):
            raise TypeError(f"other must be a FleetReport, or what its to_json() returned, got {other!r:.80}")
        return cls(None, {**fleet, "top": other})

    def other_start(self, other: Compared) -> str:
        """Return that the two began with caches that are not alike, as text; "" where they did not."""
        if self.held_before == other.held_before:
            return ""
        return (
            f"{self.router} began with {self.held_before} blocks in its engines, {other.router} with {other.held_before}: what an "
            "earlier run left there is a hit for the later one"
        )

    def figure(self, name: str) -> float | None:
        """Return one figure of all together."""
        check_figure(name)
        if self._report is not None:
            return self._report.figure(name)
        key = dynamo_key(name)
        found: float | None = self._data["all"].get(name) if key is None else self._data["top"].get(key)
        return found

    def figures(self) -> Figures:
        """Return all figures of all together."""
        return {name: self.figure(name) for name in FIGURES} if self._report is None else self._report.row()


class Comparison(Mapping[str, "tuple[float | None, float | None]"]):
    """Two reports side by side: figures, each with both values; printed, a table of those that differ, with the differences.

    Args:
        one: the one.
        other: the other.

    Attributes:
        notes: what to know about them: other traces, or a router that draws randomness of its own.
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
                f"the same trace and {one.router} twice, yet other picks: unless its options or the fleet's are others, it draws "
                "randomness that is not seeded alike, or keeps what it learnt (ties alone are worth some 5 % of latencies)"
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

    def __str__(self) -> str:
        one, other = self._one, self._other
        lines = [["figure", one.router, other.router, "difference", "times"]]
        for name, (ours, theirs) in self.differences.items():
            apart = times = None
            if ours is not None and theirs is not None:
                apart = ours - theirs
                times = ours / theirs if theirs else None
            lines.append([name, figure_text(ours), figure_text(theirs), figure_text(apart), figure_text(times)])
        table = aligned(lines) if len(lines) > 1 else f"{one.router} and {other.router}: all figures are equal"
        return "\n".join([table, *(f"note: {note}" for note in self.notes)])
