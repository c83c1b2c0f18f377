"""Which problems of a capture are results of faults that its test injected, by what the capture says of that.

A fault between worker and router was attributed when the test ran, as then there was a record of what was published: a line
names each problem that is its result. A fault of a wire strikes a batch: batches that a subscriber lost are its result where
faults account for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pytest_kvmock.events import StreamKey
from pytest_kvmock.hygiene.injection import Injection
from pytest_kvmock.hygiene.log import EventLog
from pytest_kvmock.hygiene.problem import Problem

_LOSE: Final = ("lose", "reorder", "gap_beyond_buffer", "late_join", "slow_subscriber", "corrupt", "unknown_tag")
"""Faults of the wire by which a subscriber may lose the batch that they change, or an event of it."""


class Injected:
    """Finds the fault of each problem that is a result of one.

    Args:
        log: the events and problems of the capture.
        faults: where faults are added, in order.
    """

    def __init__(self, log: EventLog, faults: list[Injection]) -> None:
        self._log, self._faults = log, faults
        self._lost: list[tuple[Problem, range]] = []
        self._by_batch: dict[tuple[int, int], Injection] = {}  # by rank and number of a batch
        self._truncated: dict[tuple[int, int], Injection] = {}  # by rank and the first batch that was left out
        self._restarted: list[Injection] = []

    def take_fault(self, key: StreamKey, value: Mapping[str, Any]) -> None:
        """Take the line of a fault.

        Args:
            key: the worker and rank whose stream it changed, or that published the batch.
            value: `fault`, and `event_id` and `survived`, or the number of the `batch`.
        """
        kind, batch = str(value["fault"]), value.get("batch")
        if batch is None:
            self._faults.append(
                Injection(kind, *key, event_id=value["event_id"], survived=value.get("survived") is True)
            )
            return
        injection = Injection(f"{kind} of batch {batch}" if kind != "restart" else "restart on the wire", *key)
        self._faults.append(injection)
        if kind in _LOSE:
            self._by_batch[key[1], batch] = injection
        elif kind == "truncate_replay":
            self._truncated[key[1], batch] = injection
        elif kind == "restart":
            self._restarted.append(injection)

    def take_result(self, key: StreamKey, value: Mapping[str, Any]) -> None:
        """Take the line of a problem that is a result of a fault; one that is not found again is none."""
        fault, blocks = self._faults[value["of"]], tuple(value["blocks"])
        for problem in reversed(self._log.problems):
            if problem.position < value["position"]:
                break
            whose = (problem.worker_id, problem.dp_rank)
            if (problem.rule, whose, problem.blocks) == (value["rule"], key, blocks) and problem.fault is None:
                problem.fault = fault
                break

    def lost(self, problem: Problem, batches: range) -> None:
        """Take a loss of batches; none of them where their numbers went backwards."""
        self._lost.append((problem, batches))

    def attribute(self) -> None:
        """Take real problems from under results of faults, and find which losses are faults of the wire."""
        for problem in self._log.problems:
            if problem.fault is None and problem.cause is not None and problem.cause.fault is not None:
                problem.stand()
        for problem, batches in self._lost:  # what follows from one stays listed under it
            problem.fault = self._of_wire(problem.dp_rank, batches)

    def _of_wire(self, dp_rank: int, batches: range) -> Injection | None:
        if not batches:
            return self._restarted.pop(0) if self._restarted else None
        found: Injection | None = None
        for batch in batches:
            fault = self._by_batch.get((dp_rank, batch)) or self._truncated.get((dp_rank, batch))
            if fault is None and not (found is not None and found in self._truncated.values()):
                return None
            found = fault or found
        return found
