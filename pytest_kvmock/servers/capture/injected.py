"""Attribution of a capture's problems to the faults that its test injected.

Faults between worker and router were attributed while the test ran, because only then there was a record of published
events: a line of the capture names each resulting problem. A wire fault changes one batch of one publisher, between two
of its restarts. Batches that a consumer lost are attributed to such faults if the capture names their publisher and
there is a fault for each batch. If the consumer may have missed a restart, batches before and after it have the same
numbers; then there must be a fault for each possible batch.
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
    """One numbering of batches from 0: those of a publisher's rank from one restart to the next."""

    publisher: int
    dp_rank: int
    restarts: int


_Consumer: TypeAlias = tuple[int, int, int | None]
"""Worker and rank of the stream that lost batches, and the number of the consumer, if it has one."""


class _Sent(NamedTuple):
    """The publisher of a lost batch, its possible numbers of restarts, and the consumer that lost it."""

    publisher: int
    dp_rank: int
    consumer: _Consumer
    restarts: range


class InjectedFaults:
    """Finds the fault of each problem that results from one.

    Args:
        log: the events and problems of the capture.
        faults: a list that gets the faults, in order.
    """

    def __init__(self, log: EventLog, faults: list[Injection]) -> None:
        self._log, self._faults = log, faults
        self._lost: list[tuple[Problem, range, _Sent | None]] = []
        self._by_batch: dict[tuple[_Numbering, int], Injection] = {}
        self._truncated: dict[tuple[_Numbering, int], Injection] = {}  # by the first batch that was left out
        self._restarted: dict[_Numbering, Injection] = {}  # by the numbering that began with it
        self._had: set[tuple[_Consumer, _Numbering, int]] = set()  # lost batches, by consumer

    def take_fault(self, key: StreamKey, value: Mapping[str, Any]) -> None:
        """Take the line of a fault.

        Args:
            key: the worker and rank whose stream the fault changed, or that published the batch.
            value: `fault`, and either `event_id` and `survived`, or `batch`, the number of the `publisher`, and the
                number of its earlier `restarts`.
        """
        kind, batch = str(value["fault"]), value.get("batch")
        if batch is None:
            self._faults.append(
                Injection(kind, *key, event_id=value["event_id"], survived=value.get("survived") is True)
            )
            return
        injection = Injection(f"{kind} of batch {batch}" if kind != "restart" else "restart on the wire", *key)
        self._faults.append(injection)
        if value.get("publisher") is None:  # unknown publisher
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
        """Take the line of a problem that results from a fault; ignore it if the problem was not found again."""
        fault, blocks = self._faults[value["of"]], tuple(value["blocks"])
        for problem in reversed(self._log.problems):
            if problem.position < value["position"]:
                break
            whose = (problem.worker_id, problem.dp_rank)
            if (problem.rule, whose, problem.blocks) == (value["rule"], key, blocks) and problem.fault is None:
                problem.fault = fault
                break

    def lost(self, problem: Problem, batches: range, sent_by: Mapping[str, Any] | None) -> None:
        """Take a loss of batches.

        Args:
            problem: the loss.
            batches: the numbers of the batches; empty if numbers went backwards.
            sent_by: the `publisher`, its `dp_rank`, the minimum and maximum number of its `restarts` at that time, and
                the number of the `consumer` or None; None: unknown.
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
        """Stop listing real problems under results of faults, and attribute losses to wire faults."""
        for problem in self._log.problems:
            if problem.fault is None and problem.cause is not None and problem.cause.fault is not None:
                problem.stand()
        self._tighten()
        for problem, batches, sent in self._lost:  # consequences of a loss stay listed under it
            if sent is not None and 0 < sent.restarts.stop - sent.restarts.start <= len(self._faults):
                numberings = [_Numbering(sent.publisher, sent.dp_rank, each) for each in sent.restarts]
                found = [self._of_wire(sent.consumer, batches, each) for each in numberings]
                problem.fault = None if None in found else found[-1]
        for problem, *_ in self._lost:  # a loss that is no result of a fault stands by itself
            if problem.fault is None and problem.cause is not None and problem.cause.fault is not None:
                problem.stand()

    def _tighten(self) -> None:
        """Exclude from each loss the restarts that its consumer reported later, as the loss came before them."""
        stop: dict[tuple[int, int, _Consumer], int] = {}
        for at, (problem, batches, sent) in reversed([*enumerate(self._lost)]):
            if sent is not None:
                last = min(sent.restarts.stop, stop.get(sent[:3], sent.restarts.stop))
                self._lost[at] = (problem, batches, sent._replace(restarts=range(sent.restarts.start, last)))
                stop[sent[:3]] = last if batches else last - 1

    def _of_wire(self, consumer: _Consumer, batches: range, numbering: _Numbering) -> Injection | None:
        """Return the last fault that explains a loss; None if a batch has no fault, or if its fault already explains an
        earlier loss of the same consumer.
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
            if left_out is not None:  # the fault also explains all later batches
                break
        return None if again else found

    def _is_again(self, consumer: _Consumer, numbering: _Numbering, batch: int) -> bool:
        """Whether the same consumer already lost the batch; -1 means the restart before the first batch."""
        had = len(self._had)
        self._had.add((consumer, numbering, batch))
        return len(self._had) == had
