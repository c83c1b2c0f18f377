"""Counters of the events of each kind, by their status in an index, and of warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_kvmock.oracle.hygiene.log_entry import STATUSES
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import KINDS, EventData, Located, Updated, kind_of


class EventCounts:
    """The counters of a log. They include taken and cleared events, and consequences of other problems.

    Args:
        arrived: number of arrived events, by worker, rank and class of their data.
        problems: their problems, in order.
    """

    __slots__ = ("_arrived", "_problems")

    def __init__(self, arrived: Mapping[tuple[int, int, type[EventData]], int], problems: Sequence[Problem]) -> None:
        self._arrived = arrived
        self._problems = problems

    def __repr__(self) -> str:
        rare = (Located.kind, Updated.kind)  # few engines publish these
        kinds = [kind for kind in KINDS if kind not in rare or self.ok(kind)]
        valid = ", ".join(f"{self.ok(kind)} {kind}" for kind in kinds)
        return (
            f"<EventCounts ok: {valid}; invalid: {sum(self.invalid.values())}; warnings: {sum(self.warnings.values())}>"
        )

    def ok(self, kind: str) -> int:
        """Return the number of valid events of a kind ("stored", "removed", "cleared", "located", "updated").

        Raises:
            ValueError: an unknown kind.
        """
        return self.status(kind, "ok")

    def status(self, kind: str, status: str) -> int:
        """Return the number of events of a kind with a status: "ok", or an error that Dynamo's index counts
        (`LogEntry.status`).

        Raises:
            ValueError: an unknown kind or status.
        """
        if kind not in KINDS:
            raise ValueError(unknown_text("kind", kind, KINDS))
        if status not in ("ok", *STATUSES):
            raise ValueError(unknown_text("status", status, ("ok", *STATUSES)))
        wrong: dict[int, str] = {}
        for problem in self._problems:
            if problem.rule in STATUSES and problem.event is not None and kind_of(problem.event) == kind:
                wrong.setdefault(problem.position, problem.rule)
        if status == "ok":
            arrived = self._arrived.items()
            return sum(count for (*_, counted), count in arrived if counted.kind == kind) - len(wrong)
        return sum(rule == status for rule in wrong.values())

    @property
    def invalid(self) -> dict[tuple[str, str], int]:
        """The six counters of upstream's harness: (kind, error) for Stored and Removed."""
        return {(kind, status): self.status(kind, status) for kind in ("stored", "removed") for status in STATUSES}

    @property
    def warnings(self) -> dict[str, int]:
        """Number of warnings, by rule."""
        return dict(Counter(problem.rule for problem in self._problems if not problem.is_error))
