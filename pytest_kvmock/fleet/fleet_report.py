"""What a fleet served, and what its routing was worth: figures by worker and in all, compared, and required.

One subject: the report. `fleet_figures` has the arithmetic, `report_assertions` what a test requires.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleet.fleet_figures import LATENCIES, Figures, RequestRow, Rows, check_figure, trace_digest
from pytest_kvmock.fleet.later_report import LaterReplayReport, Objectives, by_sketch
from pytest_kvmock.fleet.regret import Regret, check_selector
from pytest_kvmock.fleet.report import ReplayReport, statistics
from pytest_kvmock.fleet.report_assertions import ReportAssertions
from pytest_kvmock.fleet.report_compared import Compared, Comparison, figure_text
from pytest_kvmock.fleet.router_calls import candidates_table
from pytest_kvmock.fleet.routing_figures import aligned
from pytest_kvmock.long_runs import long_run
from pytest_kvmock.router.selection import DynamoRouter

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.fleet.arrivals import Turn
    from pytest_kvmock.fleet.fleet_events import EventMark
    from pytest_kvmock.fleet.incidents import Incident
    from pytest_kvmock.fleet.router_calls import Belief
    from pytest_kvmock.fleet.run_notes import Happened, Pick, Recorder, Service
    from pytest_kvmock.router.routing import Worker

_COLUMNS: Final = {
    "requests": "requests",
    "hit_ratio": "hit",
    "of_best": "of best",
    "overlap_regret": "regret",
    "promised_not_found": "not found",
    "believed_not_found": "believed, not found",
    "prompt_tokens_computed": "computed",
    "blocks_evicted": "evicted",
    "preemptions": "preempted",
    "router_wait_ms": "router ms",
    "engine_wait_ms": "engine ms",
    "ttft_p50": "ttft p50",
    "ttft_p95": "ttft p95",
    "itl_p95": "itl p95",
    "tpot_p50": "tpot p50",
    "e2e_p95": "e2e p95",
    "goodput": "goodput",
}
"""The columns of a printed report, by the figure in them."""


@dataclass(frozen=True, slots=True, repr=False)
class RoutedRun:
    """How a fleet was run, and what was noted.

    Attributes:
        router: the class of the router, by name.
        trace: what the trace is called, if it has a name.
        all_turns: the trace.
        block_size: tokens a block of the engines.
        arrived: how many requests arrived at the router.
        numbers: of each request that was dispatched, its place in the order of arrival at the router.
        turns: of each, its place in the trace.
        services: what each worker did.
        objectives: what counts as good.
        held_before: blocks that the engines held as the run began.
        loads_every_ms: how old the loads of engines were at most that the router was shown; None: it was shown those of the load book.
    """

    router: str
    trace: str | None
    all_turns: Sequence[Turn]
    block_size: int
    arrived: int
    numbers: Sequence[int]
    turns: Sequence[Turn]
    services: Sequence[Service]
    objectives: Objectives
    held_before: int = 0
    loads_every_ms: float | None = None

    def __repr__(self) -> str:
        return f"<RoutedRun: {self.router} on {self.trace or f'{len(self.all_turns)} requests'}>"


@dataclass(frozen=True, slots=True, repr=False)
class FleetReport(ReplayReport, ReportAssertions):
    """What a fleet served, and where the router sent it. Printed, it is a table: a row for all, and one a worker.

    The figures (`figure`, `row`, `rows`), over requests that finished where nothing else is said, times in virtual milliseconds:

    - `requests` that arrived (of a worker: that it served last), `completed`;
    - `hit_ratio`: share of the prompts' tokens that the first admission found cached; `ideal_hit_ratio`: that of one endless cache
      which sees the requests in order of arrival; `of_ideal`: the one as a share of the other, low by nature under SGLang's scheduler of Dynamo's mock before 1.6.1, where
      prefill reads at most one chunk of a cached prefix;
    - `overlap_selected`, `overlap_best`: blocks that the chosen workers held at the picks, by the index, and that the best ones did;
      `of_best`: the one as a share of the other; `overlap_regret`: the difference, in blocks a pick;
    - `promised_not_found`: blocks that the index promised at the pick and the first admission did not find; `found_not_promised`;
    - `believed_not_found`: likewise what the router's `believed(request)` said of the worker that it picked; None: it has none;
    - `prompt_tokens_computed` (what was computed again too), `blocks_evicted` (on the device), `preemptions`;
    - `router_wait_ms` until the first pick, `engine_wait_ms` from the last pick to the first admission: means;
    - `ttft`, `itl`, `tpot`, `e2e`, each with `_mean`, `_p50`, `_p75`, `_p90`, `_p95`, `_p99`, `_max`;
    - `goodput`: share of all that arrived that kept the `slo_...` of the fleet; None without;
    - `balance_...` and `jain_...` of `requests`, `prompt_tokens` (computed) and `open_requests` (at picks), of all only: greatest
      over mean, and Jain's index, by the share of the picks at which each worker was a candidate. Picks for requests that are sent
      anew count like any other.

    A figure that has no value, as there was nothing to count, is None.

    Attributes:
        replay: the report of the engines' release, where Dynamo's figures come from.
        picks: the choices of the router, in order.
        run: how it was run.
        incidents: what happened to workers, in order.
        missed: what was planned to happen to workers after the run had ended, and did not.
        event_errors: what the verdict of a harness has against the events of this run, an error each that no injected fault explains
            and no test expects; None: bare engines, which nobody judges.
        marks: when faults were injected in a harness, and when events were wrong, in order.
        recorder: with `record=True`, `samples` of each real pass (columns by name, in arrays; see `PassSample`) and `pick(at)` with true
            candidates (`PickRecord`); else None.
        beliefs: what the router believed wrongly, the first of each kind; in a harness these are problems of the test too. None: it has
            none of `loads()`, `overlap(request)`, `believed(request)` and `workers()`.
    """

    replay: ReplayReport | None = None
    picks: Sequence[Pick] = ()
    run: RoutedRun | None = None
    incidents: Sequence[Happened] = ()
    missed: Sequence[Incident] = ()
    event_errors: Sequence[object] | None = None
    marks: Sequence[EventMark] = ()
    recorder: Recorder | None = None
    beliefs: Sequence[Belief] | None = None

    def __repr__(self) -> str:
        of = f"{len(self.completed)} of {len(self.requests)} requests finished"
        return f"<{type(self).__name__}: {self.router} on {self._run.trace or 'a trace'}, {of}>"

    @classmethod
    def of(cls, replay: ReplayReport, run: RoutedRun, **noted: Any) -> FleetReport:
        """Return the report of a replay, with what was noted of its routing."""
        return cls(replay.requests, replay.passes, replay.served_by, replay.handoffs, replay, run=run, **noted)

    # ----------------------------------------------------------------------------------------- Dynamo's figures

    @property
    def _figures(self) -> ReplayReport:
        assert self.replay is not None
        return self.replay

    @property
    def _run(self) -> RoutedRun:
        assert self.run is not None
        return self.run

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished."""
        return self._figures.completed

    @property
    def duration_ms(self) -> float:
        """From the first arrival to the last token of requests that completed; 0 where none did."""
        return self._figures.duration_ms

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON: at the top those of Dynamo's replay, by its keys; under "fleet" those of routing.

        "fleet" has `router`, `trace` (its name) and `trace_digest`, `picks_digest` (equal where all picks are), `held_before` (blocks that
        the engines held as the run began), `all` (the figures without latencies, which are at the top), `workers` (a list: `worker`, `since_ms`, `until_ms`, and its figures, without gaps between
        tokens), `incidents` (`ms`, `kind`, `worker`, `lost`), `event_errors` (how many, or None) and `beliefs` (rows of `Belief`,
        or None).
        """
        rows = self._rows()
        shown = [each for each in LATENCIES if each != "itl"]
        workers = [
            {
                "worker": each.worker,
                "since_ms": each.since_ms,
                "until_ms": each.until_ms,
                **rows.row(each.worker, latencies=shown),
            }
            for each in self._run.services
        ]
        return self._figures.to_json() | {
            "fleet": {
                "router": self._run.router,
                "trace": self._run.trace,
                "trace_digest": self.trace_digest,
                "picks_digest": self.picks_digest,
                "held_before": self.held_before,
                "all": rows.row(latencies=()),
                "workers": workers,
                "incidents": [each._asdict() for each in self.incidents],
                "event_errors": None if self.event_errors is None else len(self.event_errors),
                "beliefs": None if self.beliefs is None else [each._asdict() for each in self.beliefs],
            }
        }

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row a request, by the keys of Dynamo's report of its release, and what its last pick was.

        These are `number` (by the order of arrival), `worker`, `status`, `attempts`, `picked_ms`, `router_wait_ms`, `engine_wait_ms`,
        `selected_overlap_blocks`, `best_available_overlap_blocks`, `overlap_regret_blocks` (1.6.1's names, there in
        `routing_history` too, and as there by the caches on its arrival), `promised_blocks` (by those at its pick) and `found_blocks`; in
        the order in which requests were dispatched first.
        """
        replay = self._figures
        rows = []
        served = {id(each.request): each for each in self.served}
        for request, row in zip(replay.reported, replay.per_request(), strict=True):
            each = served[id(request)]
            pick = each.last
            overlaps = {
                "selected_overlap_blocks": pick.overlap,
                "best_available_overlap_blocks": pick.best_overlap,
                "overlap_regret_blocks": max(0, pick.best_overlap - pick.overlap),
            }
            if row.get("routing_history"):
                row["routing_history"][-1] |= overlaps | {"queue_wait_ms": pick.waited_ms}
            rows.append(
                row
                | {
                    "number": each.number,
                    "worker": pick.worker,
                    "status": request.status,
                    "attempts": pick.attempt,
                    "picked_ms": pick.ms,
                    "router_wait_ms": each.first.waited_ms,
                    "engine_wait_ms": each.engine_wait_ms,
                    "promised_blocks": each.promised,
                    "found_blocks": each.found,
                }
                | overlaps
            )
        return rows

    # ---------------------------------------------------------------------------------------- figures of routing

    @property
    def arrived(self) -> int:
        """How many requests arrived at the router."""
        return self._run.arrived

    @property
    def router(self) -> str:
        """The class of the router, by name."""
        return self._run.router

    @property
    def trace_digest(self) -> str:
        """Eight digits that two traces share if they ask for the same."""
        return trace_digest(self._run.all_turns, self._run.block_size)

    @property
    def trace_name(self) -> str:
        """What messages call the trace: its name, or its size and digest."""
        return self._run.trace or f"trace {self.trace_digest} of {len(self._run.all_turns)} requests"

    @property
    def picks_digest(self) -> str:
        """Eight digits that two runs share if the router picked the same."""
        return sha256(repr([(pick.number, pick.worker) for pick in self.picks]).encode()).hexdigest()[:8]

    @property
    def held_before(self) -> int:
        """Blocks that the engines held as the run began: the router found them there, and `ideal_hit_ratio` knows none of them."""
        return self._run.held_before

    @property
    def loads_every_ms(self) -> float | None:
        """How old the loads of engines were at most that the router was shown; None: it was shown those of the load book."""
        return self._run.loads_every_ms

    @property
    def workers(self) -> list[Worker]:
        """The workers, in the order in which they came."""
        return [each.worker for each in self._run.services]

    @property
    def served(self) -> list[RequestRow]:
        """The requests that were dispatched, each with its first pick and its last."""
        first: dict[int, Pick] = {}
        last: dict[int, Pick] = {}
        for pick in self.picks:
            first.setdefault(pick.number, pick)
            last[pick.number] = pick
        size = self._run.block_size
        recomputes = {each.worker: each.recomputes_last_token for each in self._run.services}
        return [
            RequestRow(request, number, first[number], last[number], size, recomputes[last[number].worker])  # type: ignore[arg-type]  # a fleet's are an engine's
            for request, number in zip(self.requests, self._run.numbers, strict=True)
        ]

    def _rows(self) -> Rows:
        run = self._run
        gaps = by_sketch if isinstance(self.replay, LaterReplayReport) else statistics
        return Rows(
            self.served,
            self.picks,
            services=run.services,
            arrived=run.arrived,
            turns=run.turns,
            objectives=run.objectives,
            gaps=gaps,
            block_size=run.block_size,
        )

    def row(self, worker: Worker | None = None) -> Figures:
        """Return the figures of a worker by name; None: of all together.

        Raises:
            ValueError: there is no such worker.
        """
        self._check_worker(worker)
        return self._rows().row(worker)

    def rows(self) -> dict[Worker | None, Figures]:
        """Return the figures of all together, under None, and of each worker."""
        rows = self._rows()
        return {worker: rows.row(worker) for worker in (None, *self.workers)}

    def figure(self, name: str, worker: Worker | None = None) -> float | None:
        """Return one figure, of a worker or of all; None: it has no value, as there was nothing to count.

        Raises:
            ValueError: no figure has this name, or there is no such worker.
        """
        check_figure(name)
        self._check_worker(worker)
        what = name.rpartition("_")[0]
        latencies = (what,) if what in LATENCIES else ()
        return self._rows().row(worker, latencies=latencies).get(name)

    def _check_worker(self, worker: Worker | None) -> None:
        if worker is not None and worker not in self.workers:
            raise ValueError(f"there is no worker {worker!r:.80}; there are {', '.join(map(repr, self.workers))}")

    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]:
        """Return what balance is made of: counts by worker, and at which share of the picks each was a candidate."""
        return self._rows().counts(of)

    # -------------------------------------------------------------------------------------------------- regret

    def regret(self, selector: Any) -> Regret:
        """Return what the picks cost beyond the cheapest by a reference selector, on true loads and true caches.

        Loads are those of the load book, caches what the engines had published by the pick, whatever the router was told. A right
        router has none by its own selector, but where events are late or lost, or where it draws by a temperature.

        Args:
            selector: has `cost(request, candidate)`; `DynamoRouter` is one.

        Raises:
            TypeError: it is a class, or has no such method.
            ValueError: the fleet was not made with `record=True`.
        """
        selector = check_selector(selector)
        if self.recorder is None:
            raise ValueError("regret needs the candidates of each pick: make the fleet with record=True")
        return Regret(selector, self.recorder)

    def explain_pick(self, at: int) -> str:
        """Return what a pick was, by its place in `picks`; with `record=True` all candidates as they truly were."""
        pick = self.picks[at]
        text = (
            f"pick {at} at {pick.ms:g} ms: request {pick.number} went to worker {pick.worker!r}, which held {pick.held} "
            f"blocks of it; the best held {pick.best_held}"
        )
        if self.recorder is None:
            return f"{text} (a fleet with record=True shows all candidates)"
        return f"{text}\n{candidates_table(self.recorder.pick(at).candidates)}"

    # ---------------------------------------------------------------------------------------------------- text

    def table(self, rows: Mapping[Worker | None, Figures]) -> str:
        """Return rows of figures, as `rows()` has them, as a table; a figure that none has is left out."""
        columns = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows.values())]
        lines = [["worker", *(_COLUMNS[name] for name in columns)]]
        for worker, row in rows.items():
            name = "all" if worker is None else str(worker)
            lines.append([name, *(figure_text(row.get(column)) for column in columns)])
        return aligned(lines)

    def table_row(self, worker: Worker | None) -> str:
        """Return the row of a worker, or of all, below what is in its columns."""
        return self.table({worker: self.row(worker)})

    def __str__(self) -> str:
        rows = self.rows()
        whole = rows[None]
        parts = [f"{type(self).__name__}: {self.router} on {self.trace_name}", self.table(rows)]
        parts.append(
            f"ideal hit ratio {figure_text(whole['ideal_hit_ratio'])} ({figure_text(whole['of_ideal'])} of it); greatest : mean of "
            f"requests {figure_text(whole['balance_requests'])}, of prompt tokens computed "
            f"{figure_text(whole['balance_prompt_tokens'])}, of open requests at picks {figure_text(whole['balance_open_requests'])}"
        )
        if self.held_before:
            parts.append(
                f"the engines held {self.held_before} blocks before this run: their hits count, and the ideal knows none of them"
            )
        parts += [f"{each.ms:g} ms: {each.kind} of worker {each.worker!r}, {each.lost} lost" for each in self.incidents]
        parts += [
            f"the run ended before {each.ms:g} ms: no {each.kind} of worker {each.worker!r}" for each in self.missed
        ]
        parts += map(str, self.beliefs or ())
        if self.event_errors:
            parts.append(f"errors of events: {len(self.event_errors)}")
        return "\n".join(parts)

    def compare(self, other: FleetReport | Mapping[str, Any]) -> Comparison:
        """Return how another report differs: a table when printed, a mapping of figures to (this one's, the other's).

        Args:
            other: a report, or what its `to_json()` returned.

        Raises:
            TypeError: it is neither.
        """
        return Comparison(Compared.of(self), Compared.of(other))

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        compare: FleetReport | Mapping[str, Any] | Sequence[FleetReport | Mapping[str, Any]] = (),
        selector: Any = None,
        title: str | None = None,
    ) -> None:
        """Write a page that a browser opens from disk: tables, charts over time, a timeline of the requests and their picks.

        Queue, running requests and blocks over time, and the candidates of picks, are there with `record=True`.

        Args:
            path: the file; one that exists is replaced.
            compare: other reports, or what their `to_json()` returned, to be shown beside this one.
            selector: tells the cost of candidates, as for `regret`; None: `DynamoRouter()`. Without a record, regret is in blocks of
                overlap.
            title: its heading; None: router and trace.

        Raises:
            TypeError: what to compare with is no report, or the selector is none.
            OSError: the file cannot be written.
        """
        from pytest_kvmock.pages import render, write_page  # for those who want a page

        with long_run():
            data = self.page_data(compare, selector)
            html = render("fleet", title or f"{self.router} on {data['trace']}", data)
            del data  # before anybody looks through it for cycles
        write_page(path, html)

    def page_data(
        self,
        compare: FleetReport | Mapping[str, Any] | Sequence[FleetReport | Mapping[str, Any]] = (),
        selector: Any = None,
    ) -> dict[str, Any]:
        """Return what `to_html` shows, as plain data."""
        from pytest_kvmock.fleet.fleet_page import fleet_data  # likewise

        others = compare if isinstance(compare, list | tuple) else (compare,)
        rows = self._rows()
        shown = [each for each in LATENCIES if each != "itl"]  # of millions of gaps, which take seconds
        with long_run():
            figures = {worker: rows.row(worker, latencies=shown) for worker in (None, *self.workers)}
            return fleet_data(self, figures, others, DynamoRouter() if selector is None else selector)
