"""Which problems of a capture are results of faults that its test injected, by what the capture says of that.

A fault between worker and router was attributed when the test ran, as then there was a record of what was published: a
line names each problem that is its result. A fault of a wire strikes a batch of one publisher, between two of its
restarts: batches that a consumer lost are its result where the capture says who sent them, and faults account for each
of them. A restart that the consumer perhaps missed leaves open which batch of a number it lost; then there must be a
fault of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import StreamKey
from pytest_kvmock.wire.sockets.wire_faults import MAY_LOSE


class _Numbering(NamedTuple):
    """The batches that are numbered from 0 once: of a publisher's rank, from one restart to the next."""

    publisher: int
    dp_rank: int
    restarts: int


_Consumer: TypeAlias = tuple[int, int, int | None]
"""Worker and rank of who lost batches, and its number, where it has one."""


class _Sent(NamedTuple):
    """What is known of who sent a batch that was lost, and who lost it."""

    publisher: int
    dp_rank: int
    consumer: _Consumer
    restarts: range


class InjectedFaults:
    """Finds the fault of each problem that is a result of one.

    Args:
        log: the events and problems of the capture.
        faults: where faults are added, in order.
    """

    def __init__(self, log: EventLog, faults: list[Injection]) -> None:
        self._log, self._faults = log, faults
        self._lost: list[tuple[Problem, range, _Sent | None]] = []
        self._by_batch: dict[tuple[_Numbering, int], Injection] = {}
        self._truncated: dict[tuple[_Numbering, int], Injection] = {}  # by the first batch that was left out
        self._restarted: dict[_Numbering, Injection] = {}  # by what began with it
        self._had: set[tuple[_Consumer, _Numbering, int]] = set()  # the batches that were lost, by who lost them

    def take_fault(self, key: StreamKey, value: Mapping[str, Any]) -> None:
        """Take the line of a fault.

        Args:
            key: the worker and rank whose stream it changed, or that published the batch.
            value: `fault`, and `event_id` and `survived`, or the number of the `batch`, of the `publisher`, and of its
                `restarts` until then.
        """
        kind, batch = str(value["fault"]), value.get("batch")
        if batch is None:
            self._faults.append(
                Injection(kind, *key, event_id=value["event_id"], survived=value.get("survived") is True)
            )
            return
        injection = Injection(f"{kind} of batch {batch}" if kind != "restart" else "restart on the wire", *key)
        self._faults.append(injection)
        if value.get("publisher") is None:  # it is not known who else published
            return
        numbering = _Numbering(
            check_integer("publisher", value["publisher"], 0), key[1], check_integer("restarts", value["restarts"], 0)
        )
        if kind in MAY_LOSE:
            self._by_batch[numbering, batch] = injection
        elif kind == "truncate_replay":
            self._truncated[numbering, batch] = injection
        elif kind == "restart":
            self._restarted[numbering] = injection

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

    def lost(self, problem: Problem, batches: range, sent_by: Mapping[str, Any] | None) -> None:
        """Take a loss of batches; none of them where their numbers went backwards.

        Args:
            problem: the loss.
            batches: their numbers.
            sent_by: the `publisher`, its `dp_rank`, the least and the most `restarts` of which it was at that time, and
                the number of the `consumer`, perhaps; None: it is not known.
        """
        sent: _Sent | None = None
        if sent_by is not None:
            publisher, dp_rank = (check_integer(name, sent_by[name], 0) for name in ("publisher", "dp_rank"))
            least, most = (check_integer("restarts", each, 0) for each in sent_by["restarts"])
            consumer = (
                sent_by["consumer"]
                if sent_by["consumer"] is None
                else check_integer("consumer", sent_by["consumer"], 0)
            )
            loser = (problem.worker_id, problem.dp_rank, consumer)
            sent = _Sent(publisher, dp_rank, loser, range(least, most + 1))
        self._lost.append((problem, batches, sent))

    def attribute(self) -> None:
        """Take real problems from under results of faults, and find which losses are faults of the wire."""
        for problem in self._log.problems:
            if problem.fault is None and problem.cause is not None and problem.cause.fault is not None:
                problem.stand()
        self._tighten()
        for problem, batches, sent in self._lost:  # what follows from one stays listed under it
            if sent is not None and 0 < sent.restarts.stop - sent.restarts.start <= len(self._faults):
                numberings = [_Numbering(sent.publisher, sent.dp_rank, each) for each in sent.restarts]
                found = [self._of_wire(sent.consumer, batches, each) for each in numberings]
                problem.fault = None if None in found else found[-1]
        for problem, *_ in self._lost:  # but for another loss, which is a fault of its own or none
            if problem.fault is None and problem.cause is not None and problem.cause.fault is not None:
                problem.stand()

    def _tighten(self) -> None:
        """Take from each loss the restarts that its consumer reports later: it was before them."""
        stop: dict[tuple[int, int, _Consumer], int] = {}
        for at, (problem, batches, sent) in reversed([*enumerate(self._lost)]):
            if sent is not None:
                last = min(sent.restarts.stop, stop.get(sent[:3], sent.restarts.stop))
                self._lost[at] = (problem, batches, sent._replace(restarts=range(sent.restarts.start, last)))
                stop[sent[:3]] = last if batches else last - 1

    def _of_wire(self, consumer: _Consumer, batches: range, numbering: _Numbering) -> Injection | None:
        """The last fault that accounts for a loss; None: none does, or it accounts for an earlier one of the same
        consumer.
        """
        if not batches:
            return None if self._is_again(consumer, numbering, -1) else self._restarted.get(numbering)
        found: Injection | None = None
        again = False
        for batch in batches:
            left_out = self._truncated.get((numbering, batch))
            found = self._by_batch.get((numbering, batch)) or left_out
            if found is None:
                return None
            again |= self._is_again(consumer, numbering, batch)
            if left_out is not None:  # and all that follow
                break
        return None if again else found

    def _is_again(self, consumer: _Consumer, numbering: _Numbering, batch: int) -> bool:
        """Whether the same consumer lost the batch before; -1 is the restart before the first."""
        had = len(self._had)
        self._had.add((consumer, numbering, batch))
        return len(self._had) == had
