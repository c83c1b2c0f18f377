"""The event log of a test: every event with its verdict, and the errors that the test expects.

One subject: the view of events for tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

from pytest_kvmock.oracle.hygiene.counts import EventCounts
from pytest_kvmock.oracle.hygiene.log_entry import LogEntry, WorkerNote
from pytest_kvmock.oracle.hygiene.problem import EventRulesBroken, Problem
from pytest_kvmock.oracle.hygiene.report import expectation_text, problems_text
from pytest_kvmock.oracle.hygiene.rules import RULES, check_rule
from pytest_kvmock.oracle.hygiene.text import worker_text
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import Cleared, EventData, KvCacheEvent, Removed, Stored
from pytest_kvmock.values.prompt_keys import group_of

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_kvmock.values.events import RouterEvent, StreamKey


_THE_SAME: Final = "; the same "


class Expectation:
    """An error that a test expects, in the whole test or in a `with` block."""

    def __init__(self, log: EventLog, rule: str, times: int) -> None:
        self.rule = rule
        self.times = times
        self._log = log
        self.since = len(log.problems)

    def __enter__(self) -> Self:
        if RULES[self.rule].at_end:
            self._log.expectations.remove(self)
            raise ValueError(
                f"{self.rule} is found only at the end of a test, not at the end of a with block; "
                f"call kv_events.expect_error({self.rule!r}) without with, for the whole test"
            )
        self._log.expectations.remove(self)
        self._log.within.append(self)
        self.since = len(self._log.problems)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # so that the traceback of a failure shows the test
        self._log.flush()
        self._log.within.remove(self)
        seen = self.mark()
        if seen != self.times and kind is None:
            raise EventRulesBroken(expectation_text(self.rule, self.times, seen, self._log.total))

    def mark(self) -> int:
        """Mark the problems that the `with` block expects; return how many came, even more than expected."""
        return self._log.mark(self.rule, self.times, self.since, self)


class EventLog:
    """Every event that arrived, in order, with its problems.

    Iterating gives `LogEntry` objects. `stored`, `removed` and `cleared` are lists of events. `stored_blocks` and
    `removed_blocks` are their blocks in order; for a hybrid model, those of its attention group.

    Args:
        flush: called to compare everything that can be compared.
        allow: rules whose breaches do not fail the test.

    Attributes:
        problems: every problem so far, including those of comparisons and consequences of others.
        expectations: the expected errors of the whole test.
        within: the expected errors of the open `with` blocks, outermost first.
        warnings_fail: whether a warning fails the test too; then `assert_no_event_errors` raises for it.
        waive: returns whether a problem that would fail the test is waived; None: no problem is.
        group_of_blocks: returns the number of the attention group of a worker and rank; None if it has one cache.
        total: number of arrived events, including those that were taken or cleared.
        notes: removed and restarted workers and missing batches of a wire, in order; notes are not counted as events.
    """

    def __init__(self, flush: Callable[[], None] | None = None, *, allow: Collection[str] = ()) -> None:
        # For each event its entry, or the event itself until it is read; most events are never read.
        self._lines: list[Any] = []
        self._made = 0  # number of entries among them
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
        self._resets: dict[StreamKey, list[tuple[int, str]]] = {}  # where ids began again, with the reasons
        self._missing: tuple[WorkerNote, int] | None = (
            None  # the last note of missing batches, with the number of its gaps
        )
        self._counts: Counter[tuple[int, int, type[EventData]]] = Counter()  # see `_count`
        self._counted = 0  # number of counted lines

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
        """Add an arrived event; return its position."""
        position = self.total
        self.total += 1
        self._lines.append(event)
        return position

    def extend(self, events: Sequence[RouterEvent]) -> None:
        """Add arrived events, in order."""
        self.total += len(events)
        self._lines += events

    def _count(self) -> Mapping[tuple[int, int, type[EventData]], int]:
        """Return the number of arrived events, by worker, rank and kind. Events are counted on demand, or before they
        are dropped.
        """
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
        """Return the entries of these events, in the order of the log; a cleared event has none.

        An event is found by worker, rank, id and identity of the object, as ids repeat after a restart.
        """
        wanted: dict[tuple[int, int, int], list[RouterEvent]] = {}
        for event in events:
            wanted.setdefault(_name(event), []).append(event)
        return [e for e in self._entries if any(e.event is event for event in wanted.get(_name(e.event), ()))]

    def positions(self, events: Sequence[RouterEvent]) -> list[int]:
        """Return the last position of each of these events in the log; -1 if the log does not have it (any more)."""
        found: dict[tuple[int, int, int], list[LogEntry]] = {}
        for entry in self.find(events):
            found.setdefault(_name(entry.event), []).append(entry)
        return [
            next((e.position for e in reversed(found.get(_name(event), ())) if e.event is event), -1)
            for event in events
        ]

    def note(self, problems: list[Problem]) -> None:
        """Add problems; the entry of the event that shows a problem gets it too, if the entry was not cleared."""
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
        """Set the earlier restarts of a problem's worker and rank; the problem itself may be the first sign of one."""
        key = (problem.worker_id, problem.dp_rank)
        resets = self._resets.get(key, [])
        if len(problem.restarts) <= len(resets):
            problem.restarts = tuple(why for position, why in resets if position <= problem.position)
        else:
            self._resets[key] = [*resets, (problem.position, problem.restarts[-1])]
            what = "event ids go backwards, as after an unannounced restart"
            self.notes.append(WorkerNote(problem.position, *key, f"{worker_text(*key)}: {what}"))

    def _note_batches(self, problem: Problem) -> None:
        """Add a note of missing batches of a wire. Several in a row share one note, with the first gap and the number
        of others.
        """
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
            note = self.notes[-1] = last._replace(text=f"{last.text.partition(_THE_SAME)[0]}{_THE_SAME}{again} more")
        else:
            observed, gaps = problem.observed, 1
            shown = observed if len(observed) <= 100 else f"{observed[:91]}..."
            note = WorkerNote(self.total, *key, f"{worker_text(*key)}: {shown}")
            self.notes.append(note)
        self._missing = (note, gaps)

    def worker_removed(
        self, worker_id: int, dp_rank: int | None, keys: Iterable[StreamKey], *, restarted: bool
    ) -> None:
        """Record that the router removed a worker, or a rank of it.

        Args:
            worker_id: the worker.
            dp_rank: the rank; None: all ranks.
            keys: the workers and ranks whose event ids begin again.
            restarted: whether they restarted; False: they left.
        """
        for key in keys:
            self._resets.setdefault(key, []).append((self.total, "restart" if restarted else "removal"))
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
        """Compare everything that can be compared now."""
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
        """Block hashes of all Stored, in order; for a hybrid model those of its attention group, as in a worker's
        `resident()`.
        """
        return self._blocks(Stored)

    @property
    def removed_blocks(self) -> list[int]:
        """Block hashes of all Removed, in order; for a hybrid model those of its attention group."""
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
        """Errors that stand by themselves, expected or not; their consequences are in `folded`."""
        return [p for p in self.problems if p.is_error and p.cause is None]

    @property
    def warnings(self) -> list[Problem]:
        """Warnings that stand by themselves."""
        return [p for p in self.problems if not p.is_error and p.cause is None]

    @property
    def counts(self) -> EventCounts:
        """Counters of valid and invalid events by kind, and of warnings."""
        return EventCounts(self._count(), self.problems)

    def for_worker(self, worker_id: int, dp_rank: int | None = None) -> EventLog:
        """Return the part of the log for one worker, or one rank of it."""

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
        """Return the events so far and clear them from the log; their problems are kept."""
        events = [entry.event for entry in self._entries]
        self.clear()
        return events

    def keep_last(self, events: int) -> None:
        """Drop all but the last `events` events."""
        self._count()
        gone = max(0, len(self._lines) - events)
        del self._lines[:gone]
        self._made, self._first, self._counted = max(0, self._made - gone), self._first + gone, self._counted - gone
        self.notes = [note for note in self.notes if note.at >= self._first]

    def clear(self) -> None:
        """Clear the events from the log; their problems are kept, and so are the held blocks in the ledger."""
        self._count()
        self._lines.clear()
        self._made, self._first, self._counted = 0, self.total, 0
        self.notes.clear()

    # ------------------------------------------------------------------------------------------------ judging

    def assert_no_event_errors(self, at_least: int = 0) -> None:
        """Check now, as far as possible, what the verdict will check at the end.

        Args:
            at_least: number of events that must have arrived by now.

        Raises:
            EventRulesBroken: unexpected errors, or warnings with `event_warnings="fail"` (listed in order), or too few
                events.
        """
        __tracebackhide__ = True
        self.flush()
        counted = [p for p in self.problems if p.cause is None and (p.is_error or self.warnings_fail)]
        wrong = self.unexcused(counted)
        if wrong:
            raise EventRulesBroken(problems_text(wrong))
        if self.total < at_least:
            raise EventRulesBroken(f"expected at least {at_least} KV events by now, {self.total} arrived")

    def assert_no_event_warnings(self) -> None:
        """Flush, and raise if there was any warning.

        Raises:
            EventRulesBroken: there was a warning; the message is the report.
        """
        __tracebackhide__ = True
        self.flush()
        found = self.unexcused(self.warnings)
        if found:
            raise EventRulesBroken(problems_text(found))

    def mark(self, rule: str, times: int, since: int, who: Expectation) -> int:
        """Mark the first `times` breaches of a rule as expected; return the number of breaches that no other
        expectation covers.
        """
        seen = [p for p in self.problems[since:] if p.rule == rule and p.expected_by in (None, who)]
        for problem in seen[:times]:
            problem.expected_by = who
        return len(seen)

    def match_expectations(self) -> list[str]:
        """Mark the expected errors of the whole test; return a sentence for each rule whose number of breaches is not
        the expected one.
        """
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
        """Return the problems that the test neither allows nor expects, in a `with` block or for the whole test."""
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
        """Expect `times` breaches of a rule; consequences of other problems count.

        `with kv_events.expect_error(rule):` counts the breaches in the block. At its end it flushes, and raises if the
        number differs. Without `with` the expectation applies to the whole test.

        Raises:
            ValueError: an unknown rule; or, in a `with`, a rule that is found only at the end of a test.
        """
        check_rule(rule)
        check_integer("expect_error: times", times, 1)
        expectation = Expectation(self, rule, times)
        self.expectations.append(expectation)
        return expectation


def _name(event: RouterEvent) -> tuple[int, int, int]:
    """Return worker, rank and event id."""
    return event.worker_id, event.event.dp_rank, event.event.event_id
