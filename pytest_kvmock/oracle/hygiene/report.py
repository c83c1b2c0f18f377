"""Problems and unmet expectations as text: the message of a test that fails because of its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_kvmock.oracle.hygiene.problem import INDEX_RULES, Problem
from pytest_kvmock.oracle.hygiene.rules import RULES
from pytest_kvmock.oracle.hygiene.text import after_text, event_text, worker_text

MOST_PROBLEMS = 3
"""Maximum number of problems that a failure message shows in full; the log has the rest."""

MOST_LINES = 10
"""Maximum number of further problems that it lists one by one."""


def problem_line(problem: Problem) -> str:
    """Return a problem in a few words: rule, worker and event."""
    who = worker_text(problem.worker_id, problem.dp_rank)
    event = problem.event
    if event is None:
        return f"{problem.rule} ({who})"
    if (event.worker_id, event.event.dp_rank) == (problem.worker_id, problem.dp_rank):
        return f"{problem.rule} ({who}, event {event.event.event_id}{after_text(problem.restarts)})"
    published_by = worker_text(event.worker_id, event.event.dp_rank)
    return f"{problem.rule} ({who}, at event {event.event.event_id} of {published_by})"


def problem_text(problem: Problem) -> str:
    """Return a problem in full: event, worker, block, the observed and the expected text."""
    lines = []
    if problem.event is not None:
        own = (problem.event.worker_id, problem.event.event.dp_rank) == (problem.worker_id, problem.dp_rank)
        text = event_text(problem.event, problem.named_blocks, problem.restarts if own else ())
        later = "" if problem.compared_at is None else f", compared after entry {problem.compared_at} of the log"
        lines.append(f"  {text}{later}")
    else:
        after = "before any event" if problem.position < 0 else f"after entry {problem.position} of the log"
        compared = "" if problem.of_batches else "compared "
        lines.append(f"  {worker_text(problem.worker_id, problem.dp_rank)}, {compared}{after}")
    lines += [
        f"    rule:      {problem.rule}: {problem.broken_when}",
        f"    observed:  {problem.observed}",
        f"    expected:  {problem.expected}",
    ]
    if problem.fault is not None:
        lines.append(f"    fault:     {problem.fault_text}")
    folded = list(problem.consequences())
    if folded:
        counts: dict[str, int] = {}
        for consequence in folded:
            counts[consequence.rule] = counts.get(consequence.rule, 0) + 1
        parts = ", ".join(f"{count} {rule}" for rule, count in counts.items())
        lines.append(f"    follows from it, and is covered by it:  {parts}")
        if folded[0].observed != problem.observed:
            lines.append(f"      first: {folded[0].observed}")
    return "\n".join(lines)


def problems_text(problems: Sequence[Problem]) -> str:
    """Return a headline, the first problems in full, and the number of others by rule.

    If there are many, only the first problem of a rule is shown in full, as repetitions add nothing new.
    """
    kinds = {"error" if problem.is_error else "warning" for problem in problems}
    what = kinds.pop() if len(kinds) == 1 else "problem"
    first = problem_line(problems[0])
    more = f", and {len(problems) - 1:,} more" if len(problems) > 1 else ""
    headline = f"{len(problems):,} KV event {what}{'s' * (len(problems) != 1)}: {first}{more}"
    shown = list(problems[:MOST_PROBLEMS])
    if len(problems) > MOST_PROBLEMS + MOST_LINES:
        by_rule: dict[str, Problem] = {}
        for problem in problems:
            by_rule.setdefault(problem.rule, problem)
        shown = list(by_rule.values())[:MOST_PROBLEMS]
    parts = [headline, *map(problem_text, shown)]
    rest = [problem for problem in problems if all(problem is not other for other in shown)]
    if len(rest) > MOST_LINES:
        counts = Counter(problem.rule for problem in rest)
        parts.append(f"  and {len(rest):,} more: " + ", ".join(f"{count:,} {rule}" for rule, count in counts.items()))
    elif rest:
        parts.append("  and: " + ", ".join(map(problem_line, rest)))
    return "\n\n".join(parts)


def expectation_text(rule: str, times: int, seen: int, events: int) -> str:
    """Return the sentence for an expectation that was not met."""
    saw = "none" if seen == 0 else str(seen)
    return f"expected {times} {rule}, saw {saw} in {events} KV event{'s' * (events != 1)}"


def failure_text(
    errors: Sequence[Problem], unmet: Sequence[str] = (), *, late: bool = False, harness: bool = False
) -> str:
    """Return the message of a test that fails because of its events.

    Args:
        errors: the problems, in order; may be empty if `unmet` is not.
        unmet: sentences about expected errors that did not come.
        late: whether the problems came after the test body, from a teardown.
        harness: whether the problems belong to a `RouterHarness` without fixtures and markers.
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
        if rule not in INDEX_RULES:  # index rules are about the index under test
            allow = f'RouterHarness(allow=["{rule}"])' if harness else f'@pytest.mark.kvmock(allow=["{rule}"])'
            advice.append(f"  not your concern?        {allow}")
        fault = errors[0].fault
        if fault is not None and fault.survivable and not fault.survived and rule not in INDEX_RULES:
            faults = "kv.faults" if harness else "kv_harness.faults"
            advice.append(f'  must it be survived?     {faults}.survive("{fault.kind}")')
        parts.append("\n".join([headline, rest, "", *advice]))
    parts += unmet
    return "\n\n".join(parts)
