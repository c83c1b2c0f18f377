"""Lines of the event log: an event with its verdict, or a note of what happened to a worker between two events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import BLOCK_NOT_FOUND, INVALID_BLOCK, PARENT_BLOCK_NOT_FOUND
from pytest_kvmock.oracle.hygiene.text import event_text
from pytest_kvmock.values.events import BlockTokens, RouterEvent, StorageTier, kind_of

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

STATUSES = (PARENT_BLOCK_NOT_FOUND, BLOCK_NOT_FOUND, INVALID_BLOCK)
"""The errors that Dynamo's index counts."""


class LogEntry:
    """One event as it arrived.

    Attributes:
        position: its number in the log, from 0.
        event: the event, with worker, tier and token ids.
        problems: its problems, causes before consequences; empty if there are none.
        has_groups: whether the worker has cache groups.
    """

    __slots__ = ("event", "has_groups", "position", "problems")

    def __init__(self, position: int, event: RouterEvent, *, has_groups: bool = False) -> None:
        self.position = position
        self.event = event
        self.has_groups = has_groups
        self.problems: Sequence[Problem] = ()

    def __repr__(self) -> str:
        return f"<{entry_line(self).strip()}>"

    @property
    def ok(self) -> bool:
        """Whether the event broke no rule; a warning is not a breach."""
        return not any(problem.is_error for problem in self.problems)

    @property
    def status(self) -> str:
        """The event's status in an index: "ok", "parent_block_not_found", "block_not_found" or "invalid_block"."""
        for problem in self.problems:
            if problem.rule in STATUSES:
                return problem.rule
        return "ok"

    @property
    def kind(self) -> str:
        """The event's kind: "stored", "removed", "cleared", "located" or "updated"."""
        return kind_of(self.event)

    @property
    def token_ids(self) -> BlockTokens | None:
        """The token ids of each block, if they travel with the event."""
        return self.event.token_ids

    @property
    def extra(self) -> EventExtra | None:
        """The extra data of the event (`RouterEvent.extra`)."""
        return self.event.extra

    @property
    def storage_tier(self) -> StorageTier:
        """The tier of the blocks."""
        return self.event.storage_tier


class WorkerNote(NamedTuple):
    """A line of the log that is not an event: a note of what happened to a worker between two events.

    Attributes:
        at: position of the next event.
        worker_id: the worker.
        dp_rank: the rank; None: all ranks.
        text: what happened.
    """

    at: int
    worker_id: int
    dp_rank: int | None
    text: str


def entry_line(entry: LogEntry, around: Problem | None = None) -> str:
    """Return the log line of an event. It shows the blocks that its problems and one further problem name.

    Args:
        entry: the event.
        around: the further problem.
    """
    problems = entry.problems if around is None else (*entry.problems, around)
    named = [block for problem in problems for block in problem.named_blocks]
    counts = Counter(map(_mark, entry.problems))
    marks = "".join(f"  {mark}" + f" ({count} times)" * (count > 1) for mark, count in counts.items())
    return f"{entry.position:>5}  {event_text(entry.event, named, has_groups=entry.has_groups)}{marks}"


def _mark(problem: Problem) -> str:
    weight = "~" if problem.excused else "!!" if problem.is_error else "!"
    fault = "" if problem.fault is None else f" ({problem.fault_text})"
    return f"{weight} {problem.rule}{', waived' if problem.waived else ''}{fault}"
