"""The results of a run for its report (`Report.run`): raw rows, and figures that are sums over them.

One subject: the rows of a run, of all and of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pytest_kvmock.fleets.report.comparison import Compared
from pytest_kvmock.fleets.report.figures import (
    FIGURES,
    PRINTED,
    Figures,
    Rows,
    check_figure,
    digest_of,
    figure_columns,
    folded,
    names_of,
    trace_digest,
)
from pytest_kvmock.fleets.report.request_rows import joined_rows

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.fleets.pairs.role_figures import RoleFigures
    from pytest_kvmock.fleets.report.report_text import MissedAbort
    from pytest_kvmock.fleets.report.rows import (
        Asked,
        Belief,
        EventMark,
        Happened,
        OwnerPromise,
        Pick,
        Record,
        RequestRow,
        RunFacts,
        WorkerRow,
    )
    from pytest_kvmock.fleets.routing.routing import Phase, Worker


@dataclass(frozen=True, repr=False, eq=False)
class RunResult:
    """The results of a run of one engine, of several on one clock, or of a fleet.

    Attributes:
        requests: all requests, in the order in which they were dispatched.
        facts: how the run was made.
        services: a row for each worker.
        served_by: for each request, the position of the engine that generates its tokens; None if a prefill engine
            rejected it.
        asked: the entry of each request in the trace.
        numbers: the position of each request in the order of arrival at the router.
        handoffs: data of each hand-over from a prefill engine for Dynamo's report; empty in the semantics of 1.2.1.
        picks: the choices of the router, in order.
        incidents: the incidents of workers, in order.
        missed: incidents that were planned for a time after the end of the run, and aborts (`MissedAbort`: `ms`,
            `number` and the kind "abort") of requests that were over by then, or had not arrived.
        event_errors: errors in the events of this run by a harness's verdict, without those that an injected fault
            explains or a test expects; None for bare engines, whose events are not judged.
        marks: times of injected faults and of wrong events in a harness, in order.
        recorder: with `record=True`, `samples` of each real pass (columns by name, in arrays; see `PassSample`) and
            `pick(at)` with true candidates (`PickRecord`); else None.
        beliefs: the router's wrong beliefs, the first of each kind; in a harness they are also problems of the test.
            None if it has none of the methods `loads()`, `overlap(request)`, `believed(request)`, `workers()` and
            `overlap_by_owner(request)`.
        promises: the router's promises of blocks in shared stores at each pick, if it has `overlap_by_owner(request)`.
        roles: figures of the legs "prefill" and "decode" of P/D pairs; None if there are no pairs.
    """

    requests: Sequence[ScheduledRequest]
    facts: RunFacts
    services: Sequence[WorkerRow] = ()
    served_by: Sequence[int | None] = ()
    asked: Sequence[Asked] = ()
    numbers: Sequence[int] = ()
    handoffs: Mapping[ScheduledRequest, Mapping[str, Any]] = field(default_factory=dict)
    picks: Sequence[Pick] = ()
    incidents: Sequence[Happened] = ()
    missed: Sequence[Happened | MissedAbort] = ()
    event_errors: Sequence[object] | None = None
    marks: Sequence[EventMark] = ()
    recorder: Record | None = None
    beliefs: Sequence[Belief] | None = None
    promises: Sequence[OwnerPromise] = ()
    roles: Mapping[Phase, RoleFigures] | None = None

    @cached_property
    def served(self) -> list[RequestRow]:
        """A row for each dispatched request, with its first and its last pick."""
        return joined_rows(
            self.requests,
            self.facts.block_size,
            numbers=self.numbers,
            served_by=self.served_by,
            asked=self.asked,
            handoffs=self.handoffs,
            picks=self.picks,
            services=self.services,
        )

    @property
    def passes(self) -> int:
        """Number of forward passes of all engines."""
        return sum(each.passes for each in self.services)

    @property
    def arrived(self) -> int:
        """Number of requests that arrived."""
        return len(self.requests) if self.facts.arrived is None else self.facts.arrived

    @cached_property
    def trace_digest(self) -> str:
        """Eight digits that are equal for two traces with the same requests; without a trace, for two runs of requests
        with the same lengths.
        """
        if self.facts.turns:
            return trace_digest(self.facts.turns, self.facts.block_size)
        return digest_of([(each.prompt_tokens, each.max_output_tokens) for each in self.requests])

    @property
    def trace_name(self) -> str:
        """The trace in messages: its name, or its size and digest."""
        return self.facts.trace or f"trace {self.trace_digest} of {len(self.facts.turns or self.requests)} requests"

    @property
    def picks_digest(self) -> str:
        """Eight digits that are equal for two runs with the same picks."""
        return digest_of([(pick.number, pick.worker) for pick in self.picks])

    @property
    def workers(self) -> list[Worker]:
        """The workers, in order of their arrival."""
        return [each.worker for each in self.services]

    def of(self, worker: Worker | None = None, *, by_end: bool = False) -> Rows:
        """Return the rows of a worker, or of all; `by_end`: in the order in which the long form of Dynamo's report adds
        them up.
        """
        if worker is not None and worker not in self.workers:
            raise ValueError(f"there is no worker {worker!r:.80}; there are {', '.join(map(repr, self.workers))}")
        by_end = by_end and self.facts.sketches
        known = self._known_rows.get((worker, by_end))
        if known is None:
            known = self._make_rows(worker, by_end=by_end)
            if self.facts.turns:  # the trace was served, so rows are final; an engine without a trace may continue
                self._known_rows[worker, by_end] = known
        return known

    @cached_property
    def _known_rows(self) -> dict[tuple[Worker | None, bool], Rows]:
        return {}

    def _make_rows(self, worker: Worker | None, *, by_end: bool) -> Rows:
        served, picks, services, arrived = self.served, self.picks, self.services, self.arrived
        if by_end:
            served = sorted(served, key=lambda each: each.request.ended_ms or 0.0)
        if worker is None:
            withdrawn, parts = self.facts.withdrawn, partial(map, self.of, dict.fromkeys(self.workers))
            return Rows(self.facts, served, picks, services, arrived=arrived, withdrawn=withdrawn, parts=parts)
        served = [each for each in served if each.worker == worker]
        picks = [pick for pick in picks if pick.worker == worker]
        services = [each for each in services if each.worker == worker]
        return Rows(self.facts, served, picks, services, arrived=len(served))

    def figures(self, worker: Worker | None = None, *, has_gaps: bool = True) -> Figures:
        """Return the figures of a worker, or of all; `has_gaps`: whether to include the figures of gaps between tokens,
        which may be millions.
        """
        names = names_of("worker", "latency") if worker is not None else names_of("all", "worker", "latency")
        return self.of(worker).figures(name for name in names if has_gaps or not name.startswith("itl_"))

    def figure(self, name: str, worker: Worker | None = None) -> float | None:
        """Return one figure of a worker or of all; see `Report.figure`."""
        check_figure(name)
        rows = self.of(worker)
        return None if worker is not None and FIGURES[name].shown == "all" else rows.figure(name)

    @property
    def compared(self) -> Compared:
        """The values that a comparison needs."""
        facts = self.facts
        known = (facts.router or "no router", self.trace_name, self.trace_digest, self.picks_digest, facts.held_before)
        return Compared(*known, figure=self.figure, figures=self.figures)

    def printed_rows(self) -> dict[Worker | None, Figures]:
        """Return the printed figures of all workers together and of each."""
        whole = (*PRINTED, *names_of("all"))
        return {
            each: self.of(each).figures(PRINTED if each in self.workers else whole) for each in (None, *self.workers)
        }

    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]:
        """Return the arguments of balance, as `assert_balanced` takes them: counts by worker, and the share of the
        picks at which each was a candidate.
        """
        return self.of().counts(of)

    def values(self, what: str) -> Sequence[float]:
        """Return the values of a distribution in milliseconds: "ttft", "tpot" or "e2e", one for each request, or "itl",
        one for each gap between tokens.
        """
        return self.of().values(what)

    def table(self, rows: Mapping[Worker | None, Figures]) -> str:
        """Return a table of rows of figures, in the form of `rows()`; a figure that no row has is left out."""
        workers = ["worker", *("all" if worker is None else str(worker) for worker in rows)]
        return folded([workers], figure_columns(list(rows.values()), PRINTED))
