"""The output of `--kv-html`: a page for each failing test, with the state of ledger and index after each event, and its
fleet.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.harness.reduce.states import states, worker_name
from pytest_kvmock.oracle.hygiene.report import problem_text
from pytest_kvmock.oracle.hygiene.text import event_text
from pytest_kvmock.plugin.captures import file_name
from pytest_kvmock.values.events import Removed, Stored, block_text
from pytest_kvmock.values.pages.page import render, write_page

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.oracle.hygiene.log_entry import LogEntry
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.plugin.case import Case

MOST_EVENTS: Final = 2_000
"""Events around the problem in the log of a page."""

MOST_BLOCKS: Final = 32
"""Blocks of an event that the page names."""

MOST_PROBLEMS: Final = 200

_SECONDS: Final = 5.0
"""Time limit for computing the states."""


def write_failure(case: Case, directory: str, failure: str, problem: Problem | None, reproduction: str | None) -> str:
    """Write the page of a failing test.

    Args:
        case: the test.
        directory: the directory to write to, relative to where pytest was started; created if missing.
        failure: the message.
        problem: the problem shown first; None: the end of the log.
        reproduction: the smallest reproduction, as text.

    Returns:
        The path of the page.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(case.item.config.invocation_params.dir, directory, file_name(case.item.nodeid, "html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    data = failure_data(case.harness, failure, problem, reproduction)
    write_page(path, render("test", case.item.nodeid, data))
    return str(path)


def failure_data(
    kv: RouterHarness, failure: str, problem: Problem | None = None, reproduction: str | None = None
) -> dict[str, Any]:
    """Return the contents of a failing test's page, as plain data.

    Args:
        kv: its harness.
        failure: the message.
        problem: the problem shown first; None: the end of the log.
        reproduction: the smallest reproduction, as text.
    """
    log = [*kv.events]
    base = log[0].position if log else 0
    opens = base + len(log) - 1 if problem is None else _opens(log, problem)
    start = max(0, min(opens - base - MOST_EVENTS // 2, len(log) - MOST_EVENTS))
    shown = log[start : start + MOST_EVENTS]
    notes = []
    if len(shown) < len(log):
        notes.append(f"The log has {len(shown):,} of {len(log):,} events: those around the problem.")
    until = time.monotonic() + _SECONDS
    worker = problem.worker_id if problem is not None else shown[-1].event.worker_id if shown else 0
    found = states(kv, opens, worker, expired=lambda: time.monotonic() > until) if log else None
    if found is not None:
        notes += found.pop("notes")
    from pytest_kvmock.fleets.report.page_data import fleet_data  # there may be no fleet

    reports = [fleet.report for fleet in kv.fleets if fleet.report is not None]
    if len(reports) > 1:
        notes.append(f"The test ran {len(reports)} fleets: the last report of the last one is shown.")
    return {
        "failure": failure,
        "opens": opens,
        "problem": None if problem is None else _problem(problem),
        "problems": [_problem(each) for each in kv.events.problems[:MOST_PROBLEMS]],
        "events": [_event(each) for each in shown],
        "states": found,
        "reproduction": reproduction,
        "notes": notes,
        "fleet": fleet_data(reports[-1]) if reports else None,
    }


def _opens(log: list[LogEntry], problem: Problem) -> int:
    """Return the number of the event that a problem is about; for a comparison, the last event that names its block."""
    key, block = (problem.worker_id, problem.dp_rank), problem.block
    if problem.event is None and block is not None:
        for entry in reversed(log):
            data = entry.event.data
            is_its_own = entry.position <= problem.position and entry.event.key == key
            if is_its_own and isinstance(data, Stored | Removed) and block in data.block_hashes:
                return entry.position
    return problem.position


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "rule": problem.rule,
        "is_error": problem.is_error,
        "worker": worker_name(problem.worker_id, problem.dp_rank),
        "position": problem.position,
        "observed": problem.observed,
        "expected": problem.expected,
        "block": None if problem.block is None else block_text(problem.block),
        "follows": problem.cause is not None,
        "text": problem_text(problem),
    }


def _event(entry: LogEntry) -> dict[str, Any]:
    event = entry.event
    data = event.event.data
    blocks = data.block_hashes if isinstance(data, Stored | Removed) else ()
    parent = data.parent_hash if isinstance(data, Stored) else None
    return {
        "position": entry.position,
        "worker": worker_name(event.worker_id, event.event.dp_rank),
        "id": event.event.event_id,
        "kind": entry.kind,
        "tier": str(event.storage_tier),
        "text": event_text(event),
        "blocks": [block_text(block) for block in blocks[:MOST_BLOCKS]],
        "more": max(0, len(blocks) - MOST_BLOCKS),
        "parent": None if parent is None else block_text(parent),
        "problems": [problem.rule for problem in entry.problems],
    }
