"""One broken rule, as a record. Only `report.py` turns it into text."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.rules import (
    INDEX_DRIFT,
    INDEX_FAILURE,
    LOAD_DRIFT,
    NOT_FLUSHED,
    OVERLAP_DRIFT,
    RULES,
    WORKER_DRIFT,
)
from pytest_kvmock.oracle.hygiene.text import after_text, worker_text
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_kvmock.values.events import RouterEvent


class EventRulesBroken(AssertionError):  # noqa: N818 - named for what happened
    """Raised if events were wrong, or if an expected error did not come. The message is the report."""


ROUTER_RULES: Final = frozenset({LOAD_DRIFT, OVERLAP_DRIFT, WORKER_DRIFT})
"""Rules about the state of a router under test."""

INDEX_RULES: Final = frozenset({INDEX_FAILURE, INDEX_DRIFT, NOT_FLUSHED, *ROUTER_RULES})
"""Rules about an index or router under test, not the stream. They also apply while it survives a fault."""


@dataclass(slots=True, eq=False, repr=False)
class Problem:
    """One broken rule.

    Attributes:
        rule: the name of the rule.
        is_error: whether it is an error, which fails the test by default, or a warning, which is recorded.
        worker_id: the worker it is about.
        dp_rank: the rank of that worker.
        observed: the observation, in one sentence: "block 0x.. was removed by event 6".
        expected: the expectation, in one sentence.
        event: the event that shows it; None if a comparison does.
        position: number of that event in the log, from 0; for a comparison, of the last event before it.
        blocks: the blocks that it names, first the block of its sentence; may be empty.
        cause: the problem that it follows from and is listed under; None if it stands by itself.
        folded: the problems that follow from this one.
        expected_by: the expectation of the test that covers it; None if there is none.
        named: further blocks that its text names.
        restarts: the reason for each time that event ids of its worker and rank began again before it
            (`EVENTS_BEGAN_ANEW`).
        waived: whether a hook outside of the test waives it; None if no hook was called (see `EventLog.waive`).
        fault: the injected fault that caused it; None if it is real.
        storage_tier: the tier of its blocks.
        of_batches: whether it reports missing batches of a wire, perhaps among other things.
        case: the case among the rule's `cases`; "" if the rule has none.
        compared_at: the position of the last event before the comparison, if the index received later events first;
            else None.
    """

    rule: str
    worker_id: int
    dp_rank: int
    observed: str
    expected: str
    event: RouterEvent | None = None
    position: int = -1
    blocks: tuple[int, ...] = ()
    is_error: bool = True
    cause: Problem | None = None
    folded: list[Problem] = field(default_factory=list)
    expected_by: object = None
    fault: Injection | None = None
    waived: bool | None = None
    named: tuple[int, ...] = ()
    restarts: tuple[str, ...] = ()
    storage_tier: StorageTier = StorageTier.DEVICE
    of_batches: bool = False
    case: str = ""
    compared_at: int | None = None

    def __post_init__(self) -> None:
        if RULES[self.rule].kind == "warning":
            self.is_error = False

    def __repr__(self) -> str:
        event = "" if self.event_id is None else f" event {self.event_id}{after_text(self.restarts)}"
        return f"<{self.rule}: {worker_text(self.worker_id, self.dp_rank)}{event}: {self.observed}>"

    def __deepcopy__(self, memo: dict[int, object]) -> Problem:
        """Copy the problem and its linked problems; event, fault and expectation are shared."""
        copy = memo[id(self)] = replace(self, cause=None, folded=[])
        copy.cause = deepcopy(self.cause, memo)
        copy.folded = deepcopy(self.folded, memo)
        return copy

    @property
    def block(self) -> int | None:
        """The block that its sentence is about; None if it names none."""
        return self.blocks[0] if self.blocks else None

    @property
    def broken_when(self) -> str:
        """The condition that breaks the rule, or its case if the rule has several, in one sentence."""
        rule = RULES[self.rule]
        if self.rule == INDEX_FAILURE and self.fault is not None and self.fault.survived:
            return "your index raised, or returned what cannot be read, after a fault that it must survive"
        return rule.cases.get(self.case, rule.broken_when)

    @property
    def event_id(self) -> int | None:
        """The id of the event that shows it; None if a comparison does."""
        return None if self.event is None else self.event.event.event_id

    @property
    def root(self) -> Problem:
        """Its first cause; the problem itself if it stands by itself."""
        problem = self
        while problem.cause is not None:
            problem = problem.cause
        return problem

    def follows_from(self, cause: Problem) -> None:
        """List this problem under its cause."""
        self.cause = cause
        cause.folded.append(self)

    def stand(self) -> None:
        """Stop listing this problem under its cause."""
        if self.cause is not None:
            self.cause.folded.remove(self)
            self.cause = None

    @property
    def excused(self) -> bool:
        """Whether it results from an injected fault that the router must survive, and is only about the stream."""
        return self.fault is not None and self.fault.survived and self.rule not in INDEX_RULES

    @property
    def named_blocks(self) -> tuple[int, ...]:
        """The blocks that the problem's text names; the event's text may be too short to show them."""
        return (*self.blocks[:1], *self.named)

    @property
    def fault_text(self) -> str:
        """Text of its injected fault, and whether the router must survive it; "" if the problem is real."""
        if self.fault is None:
            return ""
        return f"injected: {self.fault}" + ("; the router survives it" if self.excused else "")

    def covered(self) -> bool:
        """Whether the test expects the problem or a cause of it, or a fault that must be survived excuses it."""
        problem: Problem | None = self
        while problem is not None:
            if problem.expected_by is not None or problem.excused:
                return True
            problem = problem.cause
        return False

    def consequences(self) -> Iterator[Problem]:
        """Yield all problems that follow from it, directly or indirectly."""
        for problem in self.folded:
            yield problem
            yield from problem.consequences()
