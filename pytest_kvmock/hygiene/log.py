"""The event log of a test: every event with its verdict, and the errors that the test expects.

One subject: what a test reads of its events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

from pytest_kvmock.checks import check_integer
from pytest_kvmock.events import Cleared, EventData, KvCacheEvent, Removed, Stored
from pytest_kvmock.hygiene.counts import EventCounts
from pytest_kvmock.hygiene.log_entry import LogEntry, WorkerNote
from pytest_kvmock.hygiene.problem import EventRulesBroken, Problem
from pytest_kvmock.hygiene.report import expectation_text, problems_text
from pytest_kvmock.hygiene.rules import RULES, check_rule
from pytest_kvmock.hygiene.text import worker_text
from pytest_kvmock.prompt_keys import group_of

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_kvmock.events import RouterEvent, StreamKey


_LIKEWISE: Final = "; likewise "


class Expectation:
    """An error that a test expects: in the whole test, or in a `with` block."""

    def __init__(self, log: EventLog, rule: str, times: int) -> None:
        self.rule = rule
        self.times = times
        self._log = log
        self.since = len(log.problems)

    def __enter__(self) -> Self:
        if RULES[self.rule].at_end:
            self._log.expectations.remove(self)
            raise ValueError(
                f"{self.rule} is found only at the end of a test, not when a with block is left; "
                f"call kv_events.expect_error({self.rule!r}) without with, for the whole test"
            )
        self._log.expectations.remove(self)
        self._log.within.append(self)
        self.since = len(self._log.problems)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # a test's failure shows the test
        self._log.flush()
        self._log.within.remove(self)
        seen = self.mark()
        if seen != self.times and kind is None:
            raise EventRulesBroken(expectation_text(self.rule, self.times, seen, self._log.total))

    def mark(self) -> int:
        """Mark the problems that the `with` block expects; return how many came, those beyond its number too."""
        return self._log.mark(self.rule, self.times, self.since, self)


class EventLog:
    """Every event that arrived, in order, with what was wrong with it.

    Iterating gives `LogEntry` objects. `stored`, `removed` and `cleared` are events, `stored_blocks` and
    `removed_blocks` their blocks in order, of a hybrid model those of its attention group.

    Args:
        flush: compares everything that can be compared.
        allow: rules whose breaches do not fail `check`.

    Attributes:
        problems: every problem so far, also those found by comparisons, and those that follow from others.
        expectations: the errors that the test expects, for the whole test.
        within: those of the `with` blocks that are open, outermost first.
        warnings_fail: a warning fails the test, too, so `check` raises for it.
        waive: returns whether a problem that would fail the test is waived; None: none is.
        group_of_blocks: returns the number of the attention group of a worker and rank; None: it has one cache.
        total: how many events arrived, those that were taken or cleared too.
        notes: workers that were removed or began anew, and batches of a wire that are missing, in order; they count as no
            events.
    """

    def __init__(self, flush: Callable[[], None] | None = None, *, allow: Collection[str] = ()) -> None:
        # Of each event its entry, or the event itself until somebody looks at it: nobody does at most of them.
        self._lines: list[Any] = []
        self._made = 0  # so many of them are entries
        self._first = 0  # position of the first
        self._flush = flush
        self._allow = allow
        self.problems: list[Problem] = []
        self.expectations: list[Expectation] = []
        self.within: list[Expectation] = []
        self.waive: Callable[[Problem], bool] | None = None
        self.warnings_fail = False
        self.group_of_blocks: Callable[[StreamKey], int | None] = lambda _: None
        self.total = 0
        self.notes: list[WorkerNote] = []
        self._anew: dict[StreamKey, list[tuple[int, str]]] = {}  # the first positions after ids began anew, and why
        self._missing: tuple[WorkerNote, int] | None = (
            None  # the last note of missing batches, and of how many gaps it is
        )
        self._counts: Counter[tuple[int, int, type[EventData]]] = Counter()  # see `_count`
        self._counted = 0  # so many lines are in it

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> LogEntry:
        return self._entries[index]

    def __repr__(self) -> str:
        return f"<EventLog of {len(self)} events, {len(self.errors)} errors, {len(self.warnings)} warnings>"

    # ------------------------------------------------------------------------------------------------ filling

    def append(self, event: RouterEvent) -> int:
        """Add an event that arrived; return its position."""
        position = self.total
        self.total += 1
        self._lines.append(event)
        return position

    def extend(self, events: Sequence[RouterEvent]) -> None:
        """Add events that arrived, in order."""
        self.total += len(events)
        self._lines += events

    def _count(self) -> Mapping[tuple[int, int, type[EventData]], int]:
        """How many events arrived, by worker, rank and kind; events are counted when somebody asks, or they go."""
        for line in islice(self._lines, self._counted, None):
            event: RouterEvent = line.event if type(line) is LogEntry else line
            self._counts[event.worker_id, event.event.dp_rank, type(event.event.data)] += 1
        self._counted = len(self._lines)
        return self._counts

    @property
    def _entries(self) -> list[LogEntry]:
        lines, end = self._lines, len(self._lines)
        for at in range(self._made, end):
            event = lines[at]
            lines[at] = LogEntry(self._first + at, event, has_groups=self.group_of_blocks(event.key) is not None)
        self._made = end
        return lines

    def find(self, events: Iterable[RouterEvent]) -> list[LogEntry]:
        """The entries of these events, in the order of the log; an event that was cleared has none.

        An event is found by worker, rank and id, and by being the same object: after a restart the ids come again.
        """
        wanted: dict[tuple[int, int, int], list[RouterEvent]] = {}
        for event in events:
            wanted.setdefault(_name(event), []).append(event)
        return [e for e in self._entries if any(e.event is event for event in wanted.get(_name(e.event), ()))]

    def positions(self, events: Sequence[RouterEvent]) -> list[int]:
        """Positions in the log where each of these events arrived last; -1 for one that it does not have (any more)."""
        found: dict[tuple[int, int, int], list[LogEntry]] = {}
        for entry in self.find(events):
            found.setdefault(_name(entry.event), []).append(entry)
        return [
            next((e.position for e in reversed(found.get(_name(event), ())) if e.event is event), -1)
            for event in events
        ]

    def note(self, problems: list[Problem]) -> None:
        """Add problems; those that an event shows are marked at its entry, if that was not cleared."""
        self.problems += problems
        for problem in problems:
            self._count_restarts(problem)
            if problem.of_batches:
                self._note_batches(problem)
        for problem in problems:
            if problem.event is not None and problem.position >= self._first and self._lines:
                entry = self._entries[problem.position - self._first]
                if entry.event is problem.event:
                    entry.problems = (*entry.problems, problem)

    def _count_restarts(self, problem: Problem) -> None:
        """Set how often the worker and rank of a problem had begun anew; the problem itself may be the first to show that."""
        key = (problem.worker_id, problem.dp_rank)
        anew = self._anew.get(key, [])
        if len(problem.restarts) <= len(anew):
            problem.restarts = tuple(why for position, why in anew if position <= problem.position)
        else:
            self._anew[key] = [*anew, (problem.position, problem.restarts[-1])]
            what = "event ids go backwards, as after an unannounced restart"
            self.notes.append(WorkerNote(problem.position, *key, f"{worker_text(*key)}: {what}"))

    def _note_batches(self, problem: Problem) -> None:
        """Add a note where batches of a wire are missing; of several in a row the first, and how many more."""
        key = (problem.worker_id, problem.dp_rank)
        last = self.notes[-1] if self.notes else None
        if (
            last is not None
            and self._missing is not None
            and last is self._missing[0]
            and last[:3] == (self.total, *key)
        ):
            gaps = self._missing[1] + 1
            again = "once" if gaps == 2 else f"{gaps - 1} times"
            note = self.notes[-1] = last._replace(text=f"{last.text.partition(_LIKEWISE)[0]}{_LIKEWISE}{again} more")
        else:
            observed, gaps = problem.observed, 1
            shown = observed if len(observed) <= 100 else f"{observed[:91]}..."
            note = WorkerNote(self.total, *key, f"{worker_text(*key)}: {shown}")
            self.notes.append(note)
        self._missing = (note, gaps)

    def worker_removed(
        self, worker_id: int, dp_rank: int | None, keys: Iterable[StreamKey], *, restarted: bool
    ) -> None:
        """Record that the router removes a worker, or a rank of it.

        Args:
            worker_id: which worker.
            dp_rank: which rank; None for all.
            keys: the workers and ranks whose event ids begin anew.
            restarted: it was told that they restarted; else that they have left.
        """
        for key in keys:
            self._anew.setdefault(key, []).append((self.total, "restart" if restarted else "removal"))
        if restarted and dp_rank is not None:
            what = f"{worker_text(worker_id, dp_rank)} restarted, announced"
        else:
            what = (
                f"worker {worker_id} removed, all ranks"
                if dp_rank is None
                else f"worker {worker_id} rank {dp_rank} removed"
            )
        what += ": your router drops its blocks"
        self.notes.append(WorkerNote(self.total, worker_id, dp_rank, what))

    def flush(self) -> None:
        """Compare everything that can be compared by now."""
        if self._flush is not None:
            self._flush()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def stored(self) -> list[KvCacheEvent]:
        """The Stored events."""
        return [e.event.event for e in self._entries if isinstance(e.event.event.data, Stored)]

    @property
    def removed(self) -> list[KvCacheEvent]:
        """The Removed events."""
        return [e.event.event for e in self._entries if isinstance(e.event.event.data, Removed)]

    @property
    def cleared(self) -> list[KvCacheEvent]:
        """The Cleared events."""
        return [e.event.event for e in self._entries if isinstance(e.event.event.data, Cleared)]

    @property
    def stored_blocks(self) -> list[int]:
        """Block hashes over all Stored, in order; of a hybrid model those of its attention group, as a worker's `resident()`."""
        return self._blocks(Stored)

    @property
    def removed_blocks(self) -> list[int]:
        """Block hashes over all Removed, in order; of a hybrid model those of its attention group."""
        return self._blocks(Removed)

    def _blocks(self, kind: type[Stored | Removed]) -> list[int]:
        found: list[int] = []
        for event in (entry.event for entry in self._entries):
            data = event.event.data
            if isinstance(data, kind):
                group = self.group_of_blocks((event.worker_id, event.event.dp_rank))
                if group is None or group == group_of(event.extra):
                    found += data.block_hashes
        return found

    @property
    def errors(self) -> list[Problem]:
        """Errors that stand by themselves, expected or not; what follows from them is in their `folded`."""
        return [p for p in self.problems if p.is_error and p.cause is None]

    @property
    def warnings(self) -> list[Problem]:
        """Warnings that stand by themselves."""
        return [p for p in self.problems if not p.is_error and p.cause is None]

    @property
    def counts(self) -> EventCounts:
        """How many events of each kind were valid, or not, and how many warnings came."""
        return EventCounts(self._count(), self.problems)

    def for_worker(self, worker_id: int, dp_rank: int | None = None) -> EventLog:
        """The part of the log that is about one worker, or about one rank of it."""

        def asked_for(worker: int, rank: int) -> bool:
            return worker == worker_id and dp_rank in (None, rank)

        part = EventLog(self._flush, allow=self._allow)
        part.waive, part.warnings_fail = self.waive, self.warnings_fail
        part.group_of_blocks = self.group_of_blocks
        part._lines = [e for e in self._entries if asked_for(e.event.worker_id, e.event.event.dp_rank)]
        part._made = len(part._lines)
        part.problems = [p for p in self.problems if asked_for(p.worker_id, p.dp_rank)]
        part.notes = [
            n for n in self.notes if n.worker_id == worker_id and (None in (dp_rank, n.dp_rank) or n.dp_rank == dp_rank)
        ]
        part._counts.update({key: count for key, count in self._count().items() if asked_for(key[0], key[1])})
        part._counted, part.total = len(part._lines), part._counts.total()
        return part

    def take(self) -> list[RouterEvent]:
        """Return the events so far and clear them from the log; their problems stay on record."""
        events = [entry.event for entry in self._entries]
        self.clear()
        return events

    def keep_last(self, events: int) -> None:
        """Clear all events from the log but so many."""
        self._count()
        gone = max(0, len(self._lines) - events)
        del self._lines[:gone]
        self._made, self._first, self._counted = max(0, self._made - gone), self._first + gone, self._counted - gone
        self.notes = [note for note in self.notes if note.at >= self._first]

    def clear(self) -> None:
        """Clear the events from the log; their problems stay on record, and the ledger keeps what workers hold."""
        self._count()
        self._lines.clear()
        self._made, self._first, self._counted = 0, self.total, 0
        self.notes.clear()

    # ------------------------------------------------------------------------------------------------ judging

    def check(self, at_least: int = 0) -> None:
        """Check now what the verdict will check at the end, as far as that is possible.

        Args:
            at_least: how many events must have arrived by now.

        Raises:
            EventRulesBroken: an error that is not expected, or a warning where `event_warnings="fail"`, in the order in
                which they came; or fewer events.
        """
        __tracebackhide__ = True
        self.flush()
        counted = [p for p in self.problems if p.cause is None and (p.is_error or self.warnings_fail)]
        wrong = self.unexcused(counted)
        if wrong:
            raise EventRulesBroken(problems_text(wrong))
        if self.total < at_least:
            raise EventRulesBroken(f"expected at least {at_least} KV events by now, {self.total} arrived")

    def mark(self, rule: str, times: int, since: int, who: Expectation) -> int:
        """Mark the first `times` breaches of a rule as expected; return how many came that nothing else expects."""
        seen = [p for p in self.problems[since:] if p.rule == rule and p.expected_by in (None, who)]
        for problem in seen[:times]:
            problem.expected_by = who
        return len(seen)

    def match_expectations(self) -> list[str]:
        """Mark what is expected for the whole test; return a sentence for each rule broken more or less often."""
        by_rule: dict[str, list[Expectation]] = {}
        for expectation in self.expectations:
            by_rule.setdefault(expectation.rule, []).append(expectation)
        unmet = []
        for rule, expectations in by_rule.items():
            first, times = expectations[0], sum(expectation.times for expectation in expectations)
            seen = self.mark(rule, times, first.since, first)
            if seen != times:
                unmet.append(expectation_text(rule, times, seen, self.total))
        return unmet

    def unexcused(self, problems: list[Problem]) -> list[Problem]:
        """Return the problems that the test neither expects, within a `with` or for the whole test, nor allows."""
        for expectation in reversed(self.within):
            expectation.mark()
        self.match_expectations()
        wrong = [problem for problem in problems if not problem.covered() and problem.rule not in self._allow]
        return self.unwaived(wrong)

    def unwaived(self, problems: list[Problem]) -> list[Problem]:
        """Return the problems that are not waived; `waive` is called once for each."""
        if self.waive is not None:
            for problem in problems:
                if problem.waived is None:
                    problem.waived = self.waive(problem)
        return [problem for problem in problems if not problem.waived]

    def expect_error(self, rule: str, times: int = 1) -> Expectation:
        """Expect this many breaches of a rule, consequences of another fault counted.

        As `with kv_events.expect_error(rule):` it counts what comes until the block is left, flushes, and raises
        there if the number differs. Called without `with` it is for the whole test.

        Raises:
            ValueError: an unknown rule, or one that is found only at the end of a test, in a `with`.
        """
        check_rule(rule)
        check_integer("expect_error: times", times, 1)
        expectation = Expectation(self, rule, times)
        self.expectations.append(expectation)
        return expectation


def _name(event: RouterEvent) -> tuple[int, int, int]:
    """Worker, rank and event id."""
    return event.worker_id, event.event.dp_rank, event.event.event_id
