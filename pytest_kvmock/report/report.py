"""What was served, and what its routing was worth: figures by worker and in all, compared, and required of it by a test.

One subject: the report. `figures` has the arithmetic, `rows` what a run leaves.

A failure of an assertion shows the row that broke it, and the worst pick. How often right routers failed one is from runs of three of them
(Dynamo's cost, llm-d's scorers, SGLang's rule) over 30 seeds in 7 settings: system prompts of tenants and conversations, both below
saturation or, tenants, above it; 8 workers, small caches, late events, an announced restart, a crash. What is said of eight kinds has five
policies without an index too (least load, fewest requests, the better of two, sessions that keep their worker, AIBrix's prefixes), over 5
to 9 seeds in 16 settings: two and three workers, a leave, and arrivals that find an idle fleet as well (`tests/fleet/right_routers.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pytest_kvmock.checks import check_number, unknown_text
from pytest_kvmock.long_runs import long_run
from pytest_kvmock.report.comparison import Compared, Comparison
from pytest_kvmock.report.figures import (
    BALANCED,
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
from pytest_kvmock.report.regret import Regret, assert_ties_shared, candidates_table, check_selector, stale_note
from pytest_kvmock.report.report_text import MissedAbort, report_text
from pytest_kvmock.report.request_rows import STATUS, joined_rows, request_json
from pytest_kvmock.report.routing_figures import (
    assert_at_least,
    assert_balanced,
    called_off_text,
    check_share,
    worst_choice,
)
from pytest_kvmock.report.rows import BELIEFS_TEXT, Objectives, RequestRow
from pytest_kvmock.router.selection import DynamoRouter

if TYPE_CHECKING:
    from pytest_kvmock.report.regret import Selector
    from pytest_kvmock.report.rows import Asked, Belief, EventMark, Happened, Pick, Record, RunFacts, WorkerRow
    from pytest_kvmock.router.routing import Worker
    from pytest_kvmock.schedulers.scheduler import ScheduledRequest


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """What one engine, several on one clock, or a fleet served, and where its router sent each request.

    Printed, it is a table: a row for all, and one a worker.

    All times are on the clock of the engines. All sums are over the requests that completed. A percentile is the value at `round((n - 1) * q)` of the n sorted
    ones (half up), a standard deviation that of the population; without a value both are 0 (Dynamo's replay).

    The figures (`figure`, `rows`), over requests that finished where nothing else is said, times in virtual milliseconds:

    - `requests` that arrived (of a worker: that it served last), `completed`; `aborted`: those that were called off, which count in
      `requests`, balance and the blocks of the ideal, and neither among those that completed nor in `goodput`;
    - `hit_ratio`: share of the prompts' tokens that the first admission found cached; `ideal_hit_ratio`: that of one endless cache
      which sees the requests in order of arrival; `of_ideal`: the one as a share of the other, low by nature under SGLang's scheduler of Dynamo's mock before 1.6.1, where
      prefill reads at most one chunk of a cached prefix;
    - `overlap_selected`, `overlap_best`: blocks that the chosen workers held at the picks, by the index, and that the best ones did;
      `of_best`: the one as a share of the other; `overlap_regret`: the difference, in blocks a pick;
    - `promised_not_found`: blocks that the index promised at the pick and the first admission did not find; `found_not_promised`;
    - `believed_not_found`: likewise what the router's `believed(request)` said of the worker that it picked; None: it has none;
    - `device_tokens`, `host_tokens`, `storage_tokens`: tokens of prompts that the first admission found there; what a
      storage had is not counted as the host's, through which it comes. None without a host;
    - `prompt_tokens_computed` (what was computed again too), `blocks_evicted` (on the device), `preemptions`;
    - `router_wait_ms` until the first pick, `engine_wait_ms` from the last pick to the first admission: means;
    - `ttft`, `itl`, `tpot`, `e2e`, each with `_mean`, `_p50`, `_p75`, `_p90`, `_p95`, `_p99`, `_max`;
    - `goodput`: share of all that arrived, but for those that were called off, that kept the `slo_...` of the run; None without;
    - `balance_...` and `jain_...` of `requests`, `prompt_tokens` (computed) and `open_requests` (at picks), of all only: greatest
      over mean, and Jain's index, by the share of the picks at which each worker was a candidate. Picks for requests that are sent
      anew count like any other.

    Further figures have the names of Dynamo's keys: `output_throughput_tok_s`, `duration_ms` ... A figure that has no value, as there was
    nothing to count, or no router, is None.

    Attributes:
        requests: all requests, in the order in which they were dispatched.
        facts: how the run was made.
        services: what each worker did, a row each.
        served_by: for each request, the position of the engine that generates its tokens; None where a prefill engine
            rejected it.
        asked: what the trace asked for with each request.
        numbers: of each request, its place in the order of arrival at the router.
        handoffs: of each request that a prefill engine handed over, what Dynamo's report says about that; 1.6.1 only, in the
            semantics of 1.2.1 it is empty.
        picks: the choices of the router, in order.
        incidents: what happened to workers, in order.
        missed: what was planned to happen to workers after the run had ended, and did not; likewise the aborts (`MissedAbort`: `ms`, `number` and
            the kind "abort") of requests that were over by then, or had not arrived.
        event_errors: what the verdict of a harness has against the events of this run, an error each that no injected fault explains
            and no test expects; None: bare engines, which nobody judges.
        marks: when faults were injected in a harness, and when events were wrong, in order.
        recorder: with `record=True`, `samples` of each real pass (columns by name, in arrays; see `PassSample`) and `pick(at)` with true
            candidates (`PickRecord`); else None.
        beliefs: what the router believed wrongly, the first of each kind; in a harness these are problems of the test too. None: it has
            none of `loads()`, `overlap(request)`, `believed(request)` and `workers()`.
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

    def __repr__(self) -> str:
        on = f"{self.router} on {self.facts.trace or 'a trace'}, " if self.router else ""
        return f"<{type(self).__name__}: {on}{self._finished_text}>"

    @property
    def _finished_text(self) -> str:
        return f"{len(self.completed)} of {len(self.requests)} requests finished"

    # ---------------------------------------------------------------------------------------------------- rows

    @cached_property
    def served(self) -> list[RequestRow]:
        """The requests that were dispatched, a row each, with its first pick and its last."""
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

    def _rows(self, worker: Worker | None = None, *, by_end: bool = False) -> Rows:
        """The rows of a worker, or of all; `by_end`: in the order in which the long form of Dynamo's report sums them up."""
        if worker is not None and worker not in self.workers:
            raise ValueError(f"there is no worker {worker!r:.80}; there are {', '.join(map(repr, self.workers))}")
        by_end = by_end and self.facts.sketches
        known = self._known_rows.get((worker, by_end))
        if known is None:
            known = self._make_rows(worker, by_end=by_end)
            if self.facts.turns:  # a trace that was served; an engine by itself may go on
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
            withdrawn, parts = self.facts.withdrawn, partial(map, self._rows, dict.fromkeys(self.workers))
            return Rows(self.facts, served, picks, services, arrived=arrived, withdrawn=withdrawn, parts=parts)
        served = [each for each in served if each.worker == worker]
        picks = [pick for pick in picks if pick.worker == worker]
        services = [each for each in services if each.worker == worker]
        return Rows(self.facts, served, picks, services, arrived=len(served))

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished; from 1.6.1 on in the order of their ends."""
        return list(self._rows(by_end=True).done)

    @property
    def aborted(self) -> int:
        """Number of requests that were called off, dispatched or not; of a replay also those that its stop left open."""
        return self._rows().aborted

    @property
    def _reported(self) -> list[RequestRow]:
        return [each for each in self.served if self.facts.pools is None or each.request.status in STATUS]

    @property
    def passes(self) -> int:
        """How many forward passes were run, by all engines together."""
        return sum(each.passes for each in self.services)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON: those of Dynamo's replay by its keys, times in milliseconds; of a fleet "fleet" has those of routing.

        `onboarded_input_tokens` is ours: what came back from the host. "fleet" has `router`, `trace` (its name) and `trace_digest`,
        `picks_digest` (equal where all picks are), `held_before` (blocks that
        the engines held as the run began), `all` (the figures without latencies, which are at the top), `workers` (a list: `worker`, `since_ms`, `until_ms`, and its figures, without gaps between
        tokens), of hybrid models `lacking`, `nobody_from_ms` where that has a value, where requests were called off `aborted` (how many), `incidents` (`ms`, `kind`, `worker`, `lost`), `event_errors` (how many, or None) and `beliefs` (rows of `Belief`,
        or None).
        """
        whole = self._rows(by_end=True).to_json()
        if not self.router:
            return whole
        return whole | {
            "fleet": {
                "router": self.router,
                "trace": self.facts.trace,
                "trace_digest": self.trace_digest,
                "picks_digest": self._picks_digest,
                "held_before": self.facts.held_before,
                "all": self._rows().figures(names_of("all", "worker")),
                "workers": [
                    {
                        "worker": each.worker,
                        "since_ms": each.since_ms,
                        "until_ms": each.until_ms,
                        **self._figures(each.worker, has_gaps=False),
                    }
                    for each in self.services
                ],
                **({"lacking": lacking} if (lacking := self.lacking()) else {}),
                **({} if self.facts.nobody_from_ms is None else {"nobody_from_ms": self.facts.nobody_from_ms}),
                **({"aborted": aborted} if (aborted := self.aborted) else {}),
                "incidents": [each._asdict() for each in self.incidents],
                "event_errors": None if self.event_errors is None else len(self.event_errors),
                "beliefs": None if self.beliefs is None else [each._asdict() for each in self.beliefs],
            }
        }

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row for each request, with the keys of Dynamo's report of its release and handoff; None for what did not happen.

        `uuid`, which is random in 1.6.1, is left out; `onboarded_input_tokens` is ours. In a fleet a row has what its last pick was:
        `number` (by the order of arrival), `worker`, `status`, `attempts`, `picked_ms`, `router_wait_ms`, `engine_wait_ms`,
        `selected_overlap_blocks`, `best_available_overlap_blocks`, `overlap_regret_blocks` (1.6.1's names, there in
        `routing_history` too, and as there by the caches on its arrival), `promised_blocks` (by those at its pick) and `found_blocks`; in
        the order in which requests were dispatched first.
        """
        return [request_json(each, self.facts.pools) for each in self._reported]

    # ---------------------------------------------------------------------------------------- figures of routing

    @property
    def arrived(self) -> int:
        """How many requests arrived."""
        return len(self.requests) if self.facts.arrived is None else self.facts.arrived

    @property
    def router(self) -> str:
        """The class of the router, by name; "": there was none."""
        return self.facts.router

    @cached_property
    def trace_digest(self) -> str:
        """Eight digits that two traces share if they ask for the same; without a trace, two runs of requests of the same lengths."""
        if self.facts.turns:
            return trace_digest(self.facts.turns, self.facts.block_size)
        return digest_of([(each.prompt_tokens, each.max_output_tokens) for each in self.requests])

    @property
    def trace_name(self) -> str:
        """What messages call the trace: its name, or its size and digest."""
        return self.facts.trace or f"trace {self.trace_digest} of {len(self.facts.turns or self.requests)} requests"

    @property
    def _picks_digest(self) -> str:
        """Eight digits that two runs share if the router picked the same."""
        return digest_of([(pick.number, pick.worker) for pick in self.picks])

    @property
    def workers(self) -> list[Worker]:
        """The workers, in the order in which they came."""
        return [each.worker for each in self.services]

    def _figures(self, worker: Worker | None = None, *, has_gaps: bool = True) -> Figures:
        """The figures of a worker, or of all; without those of gaps between tokens, which are millions, where these are not wanted."""
        names = names_of("worker", "latency") if worker is not None else names_of("all", "worker", "latency")
        return self._rows(worker).figures(name for name in names if has_gaps or not name.startswith("itl_"))

    def rows(self) -> dict[Worker | None, Figures]:
        """Return the figures of all together, under None, and of each worker."""
        return {worker: self._figures(worker) for worker in (None, *self.workers)}

    def printed_rows(self) -> dict[Worker | None, Figures]:
        """Return of these rows what is printed."""
        whole = (*PRINTED, *names_of("all"))
        return {
            each: self._rows(each).figures(PRINTED if each in self.workers else whole) for each in (None, *self.workers)
        }

    def figure(self, name: str, worker: Worker | None = None) -> float | None:
        """Return one figure of a worker or of all; None if there was nothing to count.

        Raises:
            ValueError: no figure has this name, or there is no such worker.
        """
        check_figure(name)
        rows = self._rows(worker)
        return None if worker is not None and FIGURES[name].shown == "all" else rows.figure(name)

    def lacking(self, worker: Worker | None = None) -> dict[str, int]:
        """Return why blocks were promised and not found before engines of hybrid models: those that full attention had, by who lacked them.

        Each is named by kind, tokens a block and window, such as "sliding_window 16 (window 128)". What is not in here, of
        `promised_not_found`, was evicted before the first admission, or never there.

        Raises:
            ValueError: there is no such worker.
        """
        return self._rows(worker).lacking()

    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]:
        """Return what balance is made of, as `assert_balanced` has it: counts by worker, and at which share of the picks each was a candidate."""
        return self._rows().counts(of)

    def values(self, what: str) -> Sequence[float]:
        """Return the values of a distribution: "ttft", "tpot" or "e2e", one a request in milliseconds, or "itl", one a gap between tokens."""
        return self._rows().values(what)

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
        return Regret(*self._recorded("regret", selector))

    def _recorded(self, what: str, selector: Any) -> tuple[Selector, Record]:
        """Return a selector, and the picks that it judges."""
        selector = check_selector(selector)
        if self.recorder is None:
            raise ValueError(f"{what} needs the candidates of each pick: make the fleet with record=True")
        return selector, self.recorder

    def explain_pick(self, at: int) -> str:
        """Return what a pick was, by its place in `picks`; with `record=True` all candidates as they truly were."""
        if not -len(self.picks) <= at < len(self.picks):
            raise ValueError(f"there is no pick {at!r:.80}; there are {len(self.picks)}, counted from 0")
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
        workers = ["worker", *("all" if worker is None else str(worker) for worker in rows)]
        return folded([workers], figure_columns(list(rows.values()), PRINTED))

    def _table_row(self, worker: Worker | None) -> str:
        """Return the row of a worker, or of all, below what is in its columns."""
        return self.table({worker: self._rows(worker).figures(PRINTED)})

    def __str__(self) -> str:
        return report_text(self, f"{self.router} on {self.trace_name}" if self.router else self._finished_text)

    def compare(self, other: Report | Mapping[str, Any]) -> Comparison:
        """Return how another report differs: a table when printed, a mapping of figures to (this one's, the other's).

        Args:
            other: a report, or what `to_json()` of one with a router returned.

        Raises:
            TypeError: it is neither.
        """
        return Comparison(self.compared, Compared.of(other))

    @property
    def compared(self) -> Compared:
        """What a comparison needs of it."""
        facts = (
            self.router or "no router",
            self.trace_name,
            self.trace_digest,
            self._picks_digest,
            self.facts.held_before,
        )
        return Compared(*facts, figure=self.figure, figures=self._figures)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        compare: Report | Mapping[str, Any] | Sequence[Report | Mapping[str, Any]] = (),
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
            html = render("fleet", title or f"{data['router']} on {data['trace']}", data)
            del data  # before anybody looks through it for cycles
        write_page(path, html)

    def page_data(
        self,
        compare: Report | Mapping[str, Any] | Sequence[Report | Mapping[str, Any]] = (),
        selector: Any = None,
    ) -> dict[str, Any]:
        """Return what `to_html` shows, as plain data."""
        from pytest_kvmock.report.page_data import fleet_data  # likewise

        others = compare if isinstance(compare, list | tuple) else (compare,)
        with long_run():
            figures = {worker: self._figures(worker, has_gaps=False) for worker in (None, *self.workers)}
            return fleet_data(self, figures, others, DynamoRouter() if selector is None else selector)

    # ---------------------------------------------------------------------------------------------- assertions

    def _need_requests(self, what: str) -> None:
        if not self.arrived:
            raise ValueError(f"{what}: the report has no requests: none arrived")

    def _worst_pick(self, number: int | None = None) -> str:
        """The pick for a request, or the one that gave away most blocks of overlap, as text."""
        if not self.picks:
            return "no router picked"
        if number is not None:
            at = max(at for at, pick in enumerate(self.picks) if pick.number == number)
        else:
            found = worst_choice([pick.choice for pick in self.picks])
            if found is None:
                return "every pick went to the worker that held most"
            at = found
        return f"the worst {self.explain_pick(at)}"

    def assert_slo(
        self,
        *,
        ttft_ms: float | None = None,
        itl_ms: float | None = None,
        e2e_ms: float | None = None,
        at: float = 0.95,
    ) -> None:
        """Require that a share of all requests that arrived keeps its limits; those that were called off count neither way.

        Near saturation a limit flakes as any threshold on a latency: 15 % of slack at least are worth it.

        Args:
            ttft_ms: most milliseconds to the first token, inclusive; None: any.
            itl_ms: likewise on the mean between its tokens.
            e2e_ms: likewise to the last token.
            at: the share of requests that keeps them, from 0 to 1.

        Raises:
            AssertionError: fewer do.
            ValueError: no limit is given, one is out of range, or no request arrived that was not called off.
        """
        __tracebackhide__ = True
        for name, limit in (("ttft_ms", ttft_ms), ("itl_ms", itl_ms), ("e2e_ms", e2e_ms)):
            if limit is not None:
                check_number(f"assert_slo: {name}", limit, unit=" (milliseconds), or None")
        objectives = Objectives(ttft_ms, itl_ms, e2e_ms)
        limits = {name: limit for name, limit in asdict(objectives).items() if limit is not None}
        if not limits:
            raise ValueError("assert_slo needs a limit: ttft_ms=, itl_ms= or e2e_ms=")
        check_share("assert_slo: at", at)
        self._need_requests("assert_slo")
        served = [each for each in self.served if each.request.status != "aborted"]
        arrived = self.arrived - self.aborted
        if not arrived:
            raise ValueError(f"assert_slo: all {self.aborted} requests were called off: there was nothing to judge")
        bad = [each for each in served if each.request.status != "finished" or not objectives.are_met(each.request)]
        good = len(served) - len(bad)
        if good >= at * arrived:
            return
        kept = ", ".join(f"{name}={limit:g}" for name, limit in limits.items())
        text = f"{good} of {arrived} requests ({good / arrived:.1%}) keep {kept}, must be {at:.1%}"
        if not bad:
            raise AssertionError(f"{text}; {self.facts.nobody_text or 'the others never left the router'}")
        worst = max(bad, key=RequestRow.lateness)
        raise AssertionError(f"{text}. The worst:\n{worst}\n{self._worst_pick(worst.number)}")

    def assert_hit_ratio(
        self,
        *,
        at_least: float | None = None,
        of_ideal: float | None = None,
        of_best: float | None = None,
        times: tuple[float, Any] | None = None,
    ) -> None:
        """Require a hit ratio, by any of these.

        `times=(1.0, round robin's report)`: right routers failed it in 0 of 630 runs; `(0.9, MostCached's)` fails Dynamo's own router
        in most runs of conversations, as a greedy choice is no bound.

        Args:
            at_least: the share of prompt tokens that was found cached, at first admission.
            of_ideal: that as a share of one endless cache's. Under SGLang's scheduler of Dynamo's mock, before 1.6.1, prefill reads
                at most one chunk of a cached prefix (`sglang.chunked_prefill_size`): there it is low by nature, whatever the router does.
            of_best: blocks that chosen workers held as a share of those that the best ones did, at the picks.
            times: (factor, other): the hit ratio is at least so many times that of another report of this trace, or of its JSON.

        Raises:
            AssertionError: it is less.
            ValueError: nothing is required, a number is out of range, no request arrived, or the other report is of another trace.
            TypeError: `times` is no pair of a number and a report.
        """
        __tracebackhide__ = True
        given = {"hit_ratio": at_least, "of_ideal": of_ideal, "of_best": of_best}
        wanted = {name: least for name, least in given.items() if least is not None}
        if times is None and not wanted:
            raise ValueError("assert_hit_ratio needs at_least=, of_ideal=, of_best= or times=")
        for name, least in wanted.items():
            check_share(f"assert_hit_ratio: {'at_least' if name == 'hit_ratio' else name}", least)
        self._need_requests("assert_hit_ratio")
        for name, least in wanted.items():
            value = self.figure(name)
            if value is None or value < least:
                assert_at_least(name, value, least, f"{self._table_row(None)}\n{self._worst_pick()}")
        if times is not None:
            if not isinstance(times, tuple) or len(times) != 2:
                raise TypeError(f"assert_hit_ratio: times must be (factor, report), got {times!r:.80}")
            factor = check_number("assert_hit_ratio: times[0]", times[0])
            other = self._same_trace("assert_hit_ratio: times[1]", times[1])
            theirs, value = other.figure("hit_ratio"), self.figure("hit_ratio")
            least = factor * (theirs or 0.0)
            if value is None or value < least:
                what = f"hit_ratio, which is {theirs or 0.0:.4g} with {other.router},"
                assert_at_least(
                    what, value, least, f"{self._start(other)}{self._table_row(None)}\n{self._worst_pick()}"
                )

    def assert_balanced(self, within: float | None = None, of: str = "requests") -> None:
        """Require that no worker has more than so many times the mean, by the share of the picks at which each was a candidate.

        Cache affinity is imbalance: at 1.25 right routers failed in 5 to 25 of 30 runs, at 1.5 in up to 12, at 2.0 in none without
        incidents (450 runs). What is caught at 2.0 are hot spots: one popular prefix on 8 workers is one too, by SGLang's rule.
        No limit holds where most requests find an idle fleet, as then nothing speaks against the worker that holds most: of four
        workers llm-d's scorers gave one up to 2.4 times the mean there. One worker is balanced.

        Args:
            within: how many times the mean it may be, at least 1. None: 2.0 from four workers on, 1.8 of three, 1.5 of two (right
                routers of eight kinds had at most 1.74 and 1.28), and between these where workers came or went.
            of: "requests", "prompt_tokens" (computed) or "open_requests" (at the picks).

        Raises:
            AssertionError: one has more.
            ValueError: an argument out of range, `within` so large that no assignment to who was there could break it, or no request
                arrived.
        """
        __tracebackhide__ = True
        if of not in BALANCED:
            raise ValueError(f"assert_balanced: {unknown_text('of', of, BALANCED)}")
        if within is not None:
            check_number("assert_balanced: within", within, 1.0)
        self._need_requests("assert_balanced")

        def row(worker: Worker) -> str:
            called_off = called_off_text(self.figure("aborted", worker), of)
            return f"{called_off}{self._table_row(worker)}\n{self._worst_pick()}"

        counts, there = self.counts(of)
        assert_balanced(of.replace("_", " "), counts, within, there, row)

    def assert_no_worse(self, than: Any, **factors: float) -> None:
        """Require that figures are no worse than the best of other reports of this trace, by a factor each.

        `assert_no_worse(than=[round_robin, least_loaded], ttft_p95=1.5)`: right routers of eight kinds failed it in none of 1,264 runs of
        100 and 200 requests below saturation, sparse arrivals among them (at most 1.36); at 1.15 in 132, at 1.25 in 19. Of `ttft_mean`
        1.25 holds there (at most 1.18); of `ttft_p99` no factor does (up to 4.2). Near saturation no factor holds of any percentile for
        routers that know no caches (of the p95 up to 8.8); those that follow the events kept 1.5 there too, in 201 runs.

        Args:
            than: a report, or several; what `to_json()` of one returned will do.
            factors: for each figure (`FIGURES`), how many times the best of the others it may be; where more is better, how
                many times it must be.

        Raises:
            AssertionError: a figure is worse.
            ValueError: there is no figure of this name, one has no better, a factor is out of range, no report is given, no request
                arrived, a figure has nothing to count (latencies where no request completed), or a report is of another trace.
            TypeError: `than` has what is no report.
        """
        __tracebackhide__ = True
        if not factors:
            raise ValueError("assert_no_worse needs figures, such as ttft_p95=1.5")
        for name, factor in factors.items():
            check_figure(name)
            if not FIGURES[name].better:
                raise ValueError(f"assert_no_worse: neither more nor less of {name} is better")
            check_number(f"assert_no_worse: {name}", factor)
        self._need_requests("assert_no_worse")
        several = isinstance(than, Iterable) and not isinstance(than, Mapping)
        others = [self._same_trace("assert_no_worse: than", each) for each in (than if several else [than])]
        if not others:
            raise ValueError("assert_no_worse: than must have a report at least")
        for name, factor in factors.items():
            self._assert_no_worse(name, factor, others)

    def _assert_no_worse(self, name: str, factor: float, others: Sequence[Compared]) -> None:
        __tracebackhide__ = True
        value, sign = self.compared.counted(name), FIGURES[name].better
        found = [(each.counted(name), each) for each in others]
        known = [(theirs, each) for theirs, each in found if theirs is not None]
        if value is None or not known:
            raise ValueError(
                f"assert_no_worse: {name} has no value here: it was not recorded, or there was nothing to count"
            )
        best, other = max(known, key=lambda pair: sign * pair[0])
        limit = factor * best
        if sign * value >= sign * limit:
            return
        must = "at least" if sign > 0 else "at most"
        number = None
        if name.startswith("ttft"):
            number = max((each for each in self.served if each.request.token_ms), key=RequestRow.lateness).number
        raise AssertionError(
            f"{name} is {value:.4g}, must be {must} {factor:g} times {best:.4g}, that of {other.router}\n"
            f"{self._start(other)}{self._table_row(None)}\n{self._worst_pick(number)}"
        )

    def _start(self, other: Compared) -> str:
        """A line that says so where the other run began with other caches; else nothing."""
        text = self.compared.other_start(other)
        return f"note: {text}\n" if text else ""

    def _same_trace(self, what: str, other: object) -> Compared:
        try:
            found = Compared.of(other)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from None
        if found.digest != self.trace_digest:
            raise ValueError(
                f"{what}: the other report is of another trace: {found.trace}; this one is of {self.trace_name}"
            )
        return found

    def assert_regret(self, selector: Any, at_most: float = 0.0) -> None:
        """Require that no more than a share of the picks cost more than the cheapest, by a selector on true loads and true caches.

        A right router has none by its own selector (in no run over six engines, with incidents and with ranks), but where events are late
        or lost, where a crash is noticed late, and where it is shown loads that were polled a while ago (`loads="engine"`,
        `loads_every_ms=`): the assertion compares with true loads and true caches, and these it was not shown. Then `at_most` is what
        your polls cost.

        Args:
            selector: see `Report.regret`.
            at_most: the share of picks, from 0 to 1.

        Raises:
            AssertionError: more of them did.
            TypeError: the selector is a class, or has no `cost`.
            ValueError: `at_most` is out of range, no request arrived, or the fleet was not made with `record=True`.
        """
        __tracebackhide__ = True
        check_share("assert_regret: at_most", at_most)
        self._need_requests("assert_regret")
        regret = self.regret(selector)
        if regret.share > at_most:
            raise AssertionError(
                f"the share of picks with regret must be at most {at_most:.2%}: {regret}{stale_note('regret is', self.facts.loads_every_ms)}"
            )

    def assert_ties_shared(self, selector: Any) -> None:
        """Require that workers that tie for the least cost share the picks, by a selector on true loads and caches.

        A worker's due is the sum of 1/n over the picks in which it was one of n that tied; with a due of at least 8 it must have had
        from a third of it to 2.5 times it. Of 7,738 workers of right routers, two to eight on four costs, in 30 seeds of 18 traces, none
        had more than 2.15 times its due, and two less than a third. Where loads are polled, ties are by the true ones.

        Args:
            selector: see `Report.regret`.

        Raises:
            AssertionError: one had less or more, or no workers ever tied.
            TypeError: the selector is a class, or has no `cost`.
            ValueError: no request arrived, or the fleet was not made with `record=True`.
        """
        __tracebackhide__ = True
        self._need_requests("assert_ties_shared")
        assert_ties_shared(
            *self._recorded("assert_ties_shared", selector), stale_note("ties are", self.facts.loads_every_ms)
        )

    def assert_no_drift(self) -> None:
        """Require that, at each pick, the router's beliefs about loads, overlaps and workers agree with what it was told.

        In a fleet of a harness the test fails by itself (`load_drift`, `overlap_drift`, `worker_drift`). Right routers never failed it.

        Raises:
            AssertionError: it believed otherwise.
            ValueError: there was no router, or it has none of `loads()`, `overlap(request)`, `believed(request)`, `workers()`; no request arrived.
        """
        __tracebackhide__ = True
        self._need_requests("assert_no_drift")
        if not self.router:
            raise ValueError("assert_no_drift: there was no router")
        beliefs = self.beliefs
        if beliefs is None:
            raise ValueError(
                f"assert_no_drift: {self.router} does not say what it believes: it has none of {BELIEFS_TEXT}"
            )
        if beliefs:
            raise AssertionError("\n".join(map(str, beliefs)))

    def assert_no_event_errors(self) -> None:
        """Require that the events of this run have no errors, except those that injected faults explain.

        Right routers never failed it: it is about engines and index.

        Raises:
            AssertionError: it has.
            ValueError: a fleet of bare engines, which nobody judges, or no request arrived.
        """
        __tracebackhide__ = True
        self._need_requests("assert_no_event_errors")
        errors = self.event_errors
        if errors is None:
            raise ValueError(
                "assert_no_event_errors: events of bare engines are not judged; use kv_fleet, or RouterHarness.fleet()"
            )
        if errors:
            more = f"\nand {len(errors) - 5} more" if len(errors) > 5 else ""
            raise AssertionError(f"errors of events: {len(errors)}\n" + "\n".join(map(str, errors[:5])) + more)
