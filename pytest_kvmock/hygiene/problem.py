"""One broken rule, as a record. `report.py` alone turns it into text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_kvmock.hygiene.rules import RULES
from pytest_kvmock.hygiene.text import worker_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_kvmock.events import RouterEvent


@dataclass(slots=True, eq=False, repr=False)
class Problem:
    """One broken rule.

    Attributes:
        rule: its name.
        is_error: an error fails the test by default; a warning is recorded.
        worker_id: the worker it is about.
        dp_rank: and its rank.
        known: what was known, in one sentence: "block 0x.. was removed by event 6".
        right: what would have been right, in one sentence.
        event: the event that shows it; None where a comparison does.
        position: number of that event in the log, from 0; or of the last event before the comparison.
        blocks: the blocks it names, the telling one first; none where it names none.
        cause: the problem that it follows from; then it is listed there and is none of its own.
        folded: the problems that follow from this one.
        expected_by: what of the test said that it would come; None: nothing did.
        waived: whether somebody from outside the test lets it pass; None: nobody was asked (see `EventLog.waive`).
    """

    rule: str
    worker_id: int
    dp_rank: int
    known: str
    right: str
    event: RouterEvent | None = None
    position: int = -1
    blocks: tuple[int, ...] = ()
    is_error: bool = True
    cause: Problem | None = None
    folded: list[Problem] = field(default_factory=list)
    expected_by: object = None
    waived: bool | None = None

    def __post_init__(self) -> None:
        if RULES[self.rule].kind == "warning":
            self.is_error = False

    def __repr__(self) -> str:
        event = "" if self.event_id is None else f" event {self.event_id}"
        return f"<{self.rule}: {worker_text(self.worker_id, self.dp_rank)}{event}: {self.known}>"

    @property
    def block(self) -> int | None:
        """The block that tells; None where the problem names none."""
        return self.blocks[0] if self.blocks else None

    @property
    def event_id(self) -> int | None:
        """Id of the event that shows it; None where a comparison does."""
        return None if self.event is None else self.event.event.event_id

    def follows_from(self, cause: Problem) -> None:
        """List this problem under its cause; it is no problem of its own any more."""
        self.cause = cause
        cause.folded.append(self)

    def covered(self) -> bool:
        """Whether a test expected it, or what it follows from."""
        problem: Problem | None = self
        while problem is not None:
            if problem.expected_by is not None:
                return True
            problem = problem.cause
        return False

    def consequences(self) -> Iterator[Problem]:
        """All that follow from it, however indirectly."""
        for problem in self.folded:
            yield problem
            yield from problem.consequences()
