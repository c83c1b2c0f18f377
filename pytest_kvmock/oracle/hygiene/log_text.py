"""Excerpts of an event log, as text."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.log_entry import LogEntry, WorkerNote, entry_line
from pytest_kvmock.oracle.hygiene.problem import Problem

MOST_NAMING = 5
"""Maximum number of events before the excerpt that are shown because they name the problem's block."""


def log_text(log: EventLog, last: int = 20, around: Problem | None = None) -> str:
    """Return an excerpt of the log.

    Without a problem, the excerpt has the last lines, and the first few earlier lines that broke a rule. With a
    problem, it has the lines around the event that shows it (if a comparison shows it, around the last event that names
    its block), and the last few earlier events that name its block. Notes of removed and restarted workers among these
    lines are included; earlier notes only if they are about the problem's worker.

    Args:
        log: the log.
        last: the number of lines.
        around: the problem, if any.
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
    """Return lines for events and notes, in order."""
    lines = [(entry.position, 1, entry_line(entry, around)) for entry in entries]
    lines += [(note.at, 0, f"       {note.text}") for note in notes]
    return [line for *_, line in sorted(lines, key=lambda line: line[:2])]


def _is_own(entry: LogEntry, problem: Problem) -> bool:
    """Whether an event comes from the worker and rank of a problem."""
    return (entry.event.worker_id, entry.event.event.dp_rank) == (problem.worker_id, problem.dp_rank)


def _is_about(note: WorkerNote, problem: Problem) -> bool:
    """Whether a note is about the worker and rank of a problem."""
    return note.worker_id == problem.worker_id and note.dp_rank in (None, problem.dp_rank)


def _names(entry: LogEntry, problem: Problem) -> bool:
    """Whether an event names the block of a problem."""
    return problem.block is not None and problem.block in getattr(entry.event.event.data, "block_hashes", ())
