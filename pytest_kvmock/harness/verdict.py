"""The verdict of a test: the problems since the last verdict, and problems that only the end of the test shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pytest_kvmock.engines.worker import KvWorker, OpenRequest, Request
from pytest_kvmock.harness.queued import QueuedEvent
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import LEAKED_REQUESTS, LEASED_BLOCKS, NOT_FLUSHED, OVERWRITTEN_BLOCKS


class Verdict(NamedTuple):
    """The problems found since the last verdict.

    Attributes:
        errors: errors that stand by themselves and that the test did not expect.
        warnings: warnings that stand by themselves and that the test did not expect.
        unmet: a sentence for each expected error and each requested fault that did not come as often as requested.
    """

    errors: list[Problem]
    warnings: list[Problem]
    unmet: list[str]


class Verdicts:
    """Makes the verdicts of a test: one after its body, one after its teardowns.

    Args:
        log: the events and problems.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._judged = 0
        self._leaked: set[OpenRequest] = set()
        self._leased: set[tuple[int, int, str, str]] = set()

    def leaked(self, workers: Iterable[KvWorker], spared: Collection[OpenRequest] = ()) -> None:
        """Record the requests that are still open at the end of a test, each once; also open leases and overwritten
        blocks.

        Args:
            workers: the workers of the harness.
            spared: requests that a teardown may still finish.
        """
        for worker in workers:
            self._leases(worker)
            self._overwritten(worker)
            requests = [r for r in worker.requests if r not in spared and r not in self._leaked]
            if not requests:
                continue
            self._leaked.update(requests)
            sizes = [len(request.blocks) if request.status == "running" else 0 for request in requests]
            shown = ", ".join(map(str, sizes[:8])) + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")
            known = f"{len(requests)} request{'s are' if len(requests) > 1 else ' is'} open, with {shown} blocks"
            right = "a request is finished, or left by its with block, before the test ends"
            if any(not isinstance(request, Request) for request in requests):  # of an engine
                right = "an engine runs to its end, or aborts what is open (run, abort, close), before the test ends"
            key = (worker.worker_id, worker.dp_rank)
            self._log.note([Problem(LEAKED_REQUESTS, *key, known, right, position=self._log.total - 1)])

    def _leases(self, worker: KvWorker) -> None:
        """Record the blocks that a worker holds for legs that do not run, once per leg."""
        key = (worker.worker_id, worker.dp_rank)
        leases = [each for each in worker.leased if (*key, each.request, each.phase) not in self._leased]
        if not leases:
            return
        self._leased.update((*key, each.request, each.phase) for each in leases)
        shown = ", ".join(f"{each.num_blocks} of {each.request} ({each.phase})" for each in leases[:8])
        shown += f" and {len(leases) - 8} more" if len(leases) > 8 else ""
        known = f"blocks are held for {len(leases)} leg{'s' * (len(leases) > 1)}: {shown}"
        right = "each hand-over is loaded, or its lease ends (tick), before the test ends"
        self._log.note([Problem(LEASED_BLOCKS, *key, known, right, position=self._log.total - 1)])

    def _overwritten(self, worker: KvWorker) -> None:
        """Record the legs whose blocks a worker freed while they were being written, each once."""
        key = (worker.worker_id, worker.dp_rank)
        names = [each for each in worker.overwritten if (*key, each, "overwritten") not in self._leased]
        if not names:
            return
        self._leased.update((*key, each, "overwritten") for each in names)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        known = f"blocks of {len(names)} leg{'s' * (len(names) > 1)} were free while they were written: {shown}"
        right = "blocks of a leg that is called off stay taken until its transfer is reported"
        self._log.note([Problem(OVERWRITTEN_BLOCKS, *key, known, right, position=self._log.total - 1)])

    def not_flushed(self, waiting: Sequence[QueuedEvent]) -> None:
        """Record that an async index was not given these events before the test body ended."""
        if not waiting:
            return
        first, count = waiting[0], len(waiting)
        problem = Problem(
            NOT_FLUSHED,
            first.event.worker_id,
            first.event.event.dp_rank,
            f"{count} event{'s' * (count != 1)} waited for the async index when the test body ended, this one first",
            "`await kv_harness.aflush()` comes after the last event",
            first.event,
            first.position,
        )
        self._log.note([problem])

    def next(self) -> Verdict:
        """Return the problems since the last verdict. The first verdict counts expectations for the whole test."""
        unmet = self._log.match_expectations()
        self._log.expectations.clear()
        new, self._judged = self._log.problems[self._judged :], len(self._log.problems)
        standing = [p for p in new if p.cause is None and p.expected_by is None and not p.excused]
        return Verdict([p for p in standing if p.is_error], [p for p in standing if not p.is_error], unmet)
