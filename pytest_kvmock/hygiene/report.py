"""The one place that turns problems and the log into text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.hygiene.problem import INDEX_RULES
from pytest_kvmock.hygiene.rules import RULES
from pytest_kvmock.hygiene.text import after_text, event_text, worker_text

if TYPE_CHECKING:
    from pytest_kvmock.hygiene.log import EventLog, LogEntry, WorkerNote
    from pytest_kvmock.hygiene.problem import Problem

MOST_PROBLEMS = 3
"""How many problems a failure message tells in full; the log has the rest."""

MOST_LINES = 10
"""How many more it names one by one."""

MOST_NAMING = 5
"""How many events that name the block of a problem the log shows beside those around it."""


def problem_line(problem: Problem) -> str:
    """A problem in a few words: rule, worker and event."""
    who = worker_text(problem.worker_id, problem.dp_rank)
    event = problem.event
    if event is None:
        return f"{problem.rule} ({who})"
    if (event.worker_id, event.event.dp_rank) == (problem.worker_id, problem.dp_rank):
        return f"{problem.rule} ({who}, event {event.event.event_id}{after_text(problem.restarts)})"
    said_by = worker_text(event.worker_id, event.event.dp_rank)
    return f"{problem.rule} ({who}, at event {event.event.event_id} of {said_by})"


def fault_text(problem: Problem) -> str:
    """Which injected fault a problem came of, and whether the router must survive it."""
    fault = problem.fault
    if fault is None:
        return ""
    return f"injected: {fault}" + ("; the router survives it" if problem.excused else "")


def problem_text(problem: Problem) -> str:
    """A problem in full: the event, the worker, the block, what was known and what would have been right."""
    lines = []
    if problem.event is not None:
        own = (problem.event.worker_id, problem.event.event.dp_rank) == (problem.worker_id, problem.dp_rank)
        lines.append(f"  {event_text(problem.event, _named(problem), problem.restarts if own else ())}")
    else:
        after = "before any event" if problem.position < 0 else f"after entry {problem.position} of the log"
        lines.append(f"  {worker_text(problem.worker_id, problem.dp_rank)}, compared {after}")
    lines += [
        f"    rule:   {problem.rule}: {RULES[problem.rule].broken_when}",
        f"    known:  {problem.known}",
        f"    right:  {problem.right}",
    ]
    if problem.fault is not None:
        lines.append(f"    fault:  {fault_text(problem)}")
    folded = list(problem.consequences())
    if folded:
        counts: dict[str, int] = {}
        for consequence in folded:
            counts[consequence.rule] = counts.get(consequence.rule, 0) + 1
        parts = ", ".join(f"{count} {rule}" for rule, count in counts.items())
        lines.append(f"    follows from it, and is covered by it:  {parts}")
        if folded[0].known != problem.known:
            lines.append(f"      first: {folded[0].known}")
    return "\n".join(lines)


def problems_text(problems: Sequence[Problem]) -> str:
    """A headline that stands by itself, the first problems in full, and how many more there are of which rule.

    Of many problems, the first of each rule is told in full: what repeats a fault says nothing new.
    """
    kinds = {"error" if problem.is_error else "warning" for problem in problems}
    what = kinds.pop() if len(kinds) == 1 else "problem"
    first = problem_line(problems[0])
    more = f", and {len(problems) - 1:,} more" if len(problems) > 1 else ""
    headline = f"{len(problems):,} KV event {what}{'s' * (len(problems) != 1)}: {first}{more}"
    told = list(problems[:MOST_PROBLEMS])
    if len(problems) > MOST_PROBLEMS + MOST_LINES:
        by_rule: dict[str, Problem] = {}
        for problem in problems:
            by_rule.setdefault(problem.rule, problem)
        told = list(by_rule.values())[:MOST_PROBLEMS]
    parts = [headline, *map(problem_text, told)]
    rest = [problem for problem in problems if all(problem is not other for other in told)]
    if len(rest) > MOST_LINES:
        counts = Counter(problem.rule for problem in rest)
        parts.append(f"  and {len(rest):,} more: " + ", ".join(f"{count:,} {rule}" for rule, count in counts.items()))
    elif rest:
        parts.append("  and: " + ", ".join(map(problem_line, rest)))
    return "\n\n".join(parts)


def expectation_text(rule: str, times: int, seen: int, events: int) -> str:
    """What to say of an expectation that was not met."""
    saw = "none" if seen == 0 else str(seen)
    return f"expected {times} {rule}, saw {saw} in {events} KV event{'s' * (events != 1)}"


def failure_text(
    errors: Sequence[Problem], unmet: Sequence[str] = (), *, late: bool = False, harness: bool = False
) -> str:
    """The message of a test that fails for its events.

    Args:
        errors: what is wrong, in order; may be empty when `unmet` is not.
        unmet: sentences about expected errors that did not come.
        late: it came after the test's body, from a teardown.
        harness: it is about a `RouterHarness` by itself, to which no fixture and no marker belongs.
    """
    parts = []
    if errors:
        text = problems_text(errors)
        headline, _, rest = text.partition("\n")
        if late:
            headline += "; it came after the test body, from a teardown"
        rule = errors[0].rule
        log = "kv.events" if harness else "kv_events"
        advice = [f'  expected? for the test:  {log}.expect_error("{rule}")']
        if not RULES[rule].at_end:
            advice.insert(0, f'  expected? mark it:       with {log}.expect_error("{rule}"):')
        allow = f'RouterHarness(allow=["{rule}"])' if harness else f'@pytest.mark.kvmock(allow=["{rule}"])'
        advice.append(f"  not your concern?        {allow}")
        fault = errors[0].fault
        if fault is not None and fault.survivable and not fault.survived and rule not in INDEX_RULES:
            faults = "kv.faults" if harness else "kv_router.faults"
            advice.append(f'  must it be survived?     {faults}.survive("{fault.kind}")')
        parts.append("\n".join([headline, rest, "", *advice]))
    parts += unmet
    return "\n\n".join(parts)


def entry_line(entry: LogEntry, around: Problem | None = None) -> str:
    """A line of the log; it shows the blocks that its problems name, and that of another.

    Args:
        entry: the event.
        around: the other problem.
    """
    problems = entry.problems if around is None else (*entry.problems, around)
    named = [block for problem in problems for block in _named(problem)]
    counts = Counter(map(_mark, entry.problems))
    marks = "".join(f"  {mark}" + f" ({count} times)" * (count > 1) for mark, count in counts.items())
    return f"{entry.position:>5}  {event_text(entry.event, named)}{marks}"


def _named(problem: Problem) -> tuple[int, ...]:
    """The blocks that the text of a problem names, and that are perhaps not shown with its event."""
    return (*problem.blocks[:1], *problem.named)


def _mark(problem: Problem) -> str:
    weight = "~" if problem.excused else "!!" if problem.is_error else "!"
    fault = "" if problem.fault is None else f" ({fault_text(problem)})"
    return f"{weight} {problem.rule}{', waived' if problem.waived else ''}{fault}"


def log_text(log: EventLog, last: int = 20, around: Problem | None = None) -> str:
    """The part of the log that tells most.

    Without a problem, the last lines, and those before them that broke a rule (the first few). With one, the lines
    around the event that shows it, or around the last that names its block where a comparison shows it, and the
    events before that name its block (the last few). Where a worker was removed or began anew, a line says so: among
    the lines that are shown, and before them where the problem is about that worker.

    Args:
        log: the log.
        last: how many lines.
        around: the problem that matters.
    """
    entries = list(log)
    text = f"{len(entries):,} event{'s' * (len(entries) != 1)}"
    start, before, notes = 0, [], []
    if len(entries) > last and around is None:
        start = len(entries) - last
        text += f", the last {last}"
        before = [entry for entry in entries[:start] if entry.problems][:last]
    elif len(entries) > last and around is not None:
        named = [i for i, entry in enumerate(entries) if _is_own(entry, around) and _names(entry, around)]
        at = around.position - entries[0].position
        if around.event is None:
            at = max(named or [i for i, entry in enumerate(entries) if _names(entry, around)], default=at)
        start = min(max(0, at - last * 3 // 5), len(entries) - last)
        text += "; those around the first problem"
        before = [entries[i] for i in named if i < start][-MOST_NAMING:]
        if before:
            text += ", and those before that name its block"
        notes = [note for note in log.notes if note.at < entries[start].position and _is_about(note, around)]
        notes = notes[-MOST_NAMING:]
    lines = _lines(before, notes, around)
    lines += ["  ..."] * bool(lines)
    part = entries[start : start + last]
    first = part[0].position if start else 0
    end = log.total if not entries or part[-1] is entries[-1] else part[-1].position
    lines += _lines(part, [note for note in log.notes if first <= note.at <= end], around)
    lines += ["  ..."] * (bool(part) and part[-1] is not entries[-1])
    return "\n".join([text, *lines])


def _lines(entries: Iterable[LogEntry], notes: Iterable[WorkerNote], around: Problem | None) -> list[str]:
    """Lines for events and notes, in their order."""
    lines = [(entry.position, 1, entry_line(entry, around)) for entry in entries]
    lines += [(note.at, 0, f"       {note.text}") for note in notes]
    return [line for *_, line in sorted(lines, key=lambda line: line[:2])]


def _is_own(entry: LogEntry, problem: Problem) -> bool:
    """Whether an event is of the worker and rank that a problem is about."""
    return (entry.event.worker_id, entry.event.event.dp_rank) == (problem.worker_id, problem.dp_rank)


def _is_about(note: WorkerNote, problem: Problem) -> bool:
    """Whether a note is about the worker and rank that a problem is about."""
    return note.worker_id == problem.worker_id and note.dp_rank in (None, problem.dp_rank)


def _names(entry: LogEntry, problem: Problem) -> bool:
    """Whether an event is about the problem's block."""
    return problem.block is not None and problem.block in getattr(entry.event.event.data, "block_hashes", ())
