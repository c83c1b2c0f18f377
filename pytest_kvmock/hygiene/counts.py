"""How many events of each kind arrived, by their status in an index, and how many warnings came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pytest_kvmock.checks import unknown_text
from pytest_kvmock.events import KINDS, EventData, Located, Updated, kind_of
from pytest_kvmock.hygiene.log_entry import STATUSES
from pytest_kvmock.hygiene.problem import Problem


class EventCounts:
    """The counters of a log. Events that were taken or cleared count too, and what follows from another fault.

    Args:
        arrived: how many events arrived, by worker, rank and class of their data.
        problems: what was wrong with them, in order.
    """

    __slots__ = ("_arrived", "_problems")

    def __init__(self, arrived: Mapping[tuple[int, int, type[EventData]], int], problems: Sequence[Problem]) -> None:
        self._arrived = arrived
        self._problems = problems

    def __repr__(self) -> str:
        rare = (Located.kind, Updated.kind)  # few engines publish one
        kinds = [kind for kind in KINDS if kind not in rare or self.ok(kind)]
        valid = ", ".join(f"{self.ok(kind)} {kind}" for kind in kinds)
        return (
            f"<EventCounts ok: {valid}; invalid: {sum(self.invalid.values())}; warnings: {sum(self.warnings.values())}>"
        )

    def ok(self, kind: str) -> int:
        """How many events of a kind ("stored", "removed", "cleared", "located", "updated") were valid.

        Raises:
            ValueError: an unknown kind.
        """
        return self.status(kind, "ok")

    def status(self, kind: str, status: str) -> int:
        """How many events of a kind had a status: "ok", or one of the errors that Dynamo's index counts (`LogEntry.status`).

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
        """How often each warning came, by rule."""
        return dict(Counter(problem.rule for problem in self._problems if not problem.is_error))
