"""A report as plain data for the page of a fleet (`pages`).

Times are virtual milliseconds, to a tenth. A request is a row over several columns: its arrival, and the duration of
each phase. `notes` counts rows that are left out to keep the page small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.report.comparison import Compared
from pytest_kvmock.fleets.report.figures import FIGURES, PRINTED
from pytest_kvmock.fleets.report.regret import LOADS, Regret, Selector, check_selector, selector_costs
from pytest_kvmock.fleets.report.report_text import role_lines
from pytest_kvmock.fleets.report.routing_figures import got_nothing, most
from pytest_kvmock.fleets.routing.selection import DynamoRouter
from pytest_kvmock.values.long_runs import long_run
from pytest_kvmock.values.pages.page import MOST_POINTS, MOST_REQUESTS, every, peaks

if TYPE_CHECKING:
    from pytest_kvmock.fleets.report.figures import Figures
    from pytest_kvmock.fleets.report.rows import PickRecord, RequestRow
    from pytest_kvmock.fleets.routing.routing import Worker

MOST_PICKS: Final = 500
"""Number of picks whose candidates are in a page: those with the most regret."""

MOST_MARKS: Final = 200
"""Maximum number of marked faults and event errors."""

EVEN: Final = 1.25
"""Multiple of the mean from which the page says that a worker has more work than others."""

_CURVE: Final = 400
_CURVES: Final = ("ttft", "tpot", "e2e")
"""The latencies whose distributions are shown; for gaps between tokens, the mean of each request, as in objectives."""

_POINTS: Final = {"min": 0.0, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
"""Points of a distribution that the JSON of a report has."""


def fleet_data(report: Any, compare: Any = (), selector: Any = None) -> dict[str, Any]:
    """Return the data of the page that `Report.to_html` writes.

    Args:
        report: a `Report`.
        compare: another report or its JSON, or a list of them.
        selector: gives the cost of a candidate, from which the regret of a pick follows; for a run without
            `record=True`, regret is in blocks of overlap. None: `DynamoRouter()`.

    Raises:
        TypeError: `selector` is not a selector, or an item of `compare` is not a report.
    """
    with long_run():
        run = report.run
        rows = {worker: run.figures(worker, has_gaps=False) for worker in (None, *run.workers)}
        others = compare if isinstance(compare, list | tuple) else (compare,)
        return _data(report, rows, others, DynamoRouter() if selector is None else selector)


def _data(
    report: Any, rows: Mapping[Worker | None, Figures], compare: Sequence[object], selector: Selector
) -> dict[str, Any]:
    notes: list[str] = []
    served = [each for each in report.run.served if each.worker is not None]
    names = [str(worker) for worker in report.workers]
    place = {worker: at for at, worker in enumerate(report.workers)}
    selector = check_selector(selector)
    regrets: Sequence[float] = [pick.choice.regret for pick in report.picks]
    if report.run.recorder is not None:
        regrets = [round(blocks, 6) for blocks in Regret(selector, report.run.recorder).blocks]
    last = {pick.number: at for at, pick in enumerate(report.picks)}
    shown = every(served, MOST_REQUESTS)
    if len(shown) < len(served):
        notes.append(f"The timeline has {len(shown):,} of {len(served):,} requests, at even distances.")
    if report.arrived > len(served):
        notes.append(f"{report.arrived - len(served):,} requests arrived and were never sent to a worker.")
    if report.run.facts.nobody_text:
        notes.append(f"{report.run.facts.nobody_text.capitalize()}.")
    if not served:
        notes.append("This report has no requests.")
    # Also picks without regret whose worker held less than another: readers ask about these next.
    given_away = [pick.choice.regret for pick in report.picks]
    worst = [at for at in range(len(regrets)) if regrets[at] > 0 or given_away[at]]
    worst = sorted(worst, key=lambda at: (-regrets[at], -given_away[at], at))[:MOST_PICKS]
    if report.run.recorder is None:
        notes.append(
            "Not recorded: queue, running requests and blocks of each pass, and the candidates of picks (record=True)."
        )
    elif len(worst) == MOST_PICKS:
        notes.append(f"All candidates are shown for the {MOST_PICKS} picks of most regret.")
    samples = _samples(report, names, notes)
    marks = _marks(report, notes)
    limits = zip(_CURVES, astuple(report.run.facts.objectives), strict=True)
    return {
        "router": report.router or "no router",
        "trace": report.run.trace_name,
        "workers": names,
        "there": [[_ms(each.since_ms), _ms(each.until_ms)] for each in report.run.services],
        "block_size": report.run.facts.block_size,
        "roles": role_lines(report),
        "notes": notes,
        "columns": [[name, FIGURES[name].title] for name in PRINTED],
        "slo": {name: limit for name, limit in limits if limit is not None},
        "figures": [{"worker": "all" if worker is None else str(worker), **row} for worker, row in rows.items()],
        "got_nothing": got_nothing("requests", *report.run.counts("requests")),
        # The roles of P/D pairs have different work.
        "most_work": None if report.roles else _most_work(report),
        "requests": _requests(shown, place, last, regrets),
        "regret_by": "blocks of overlap" if report.run.recorder is None else type(selector).__name__,
        "picks": {}
        if report.run.recorder is None
        else {str(at): _pick(report.run.recorder.pick(at), selector) for at in worst},
        "samples": samples,
        "marks": marks,
        "event_errors": None
        if report.run.event_errors is None
        else [str(each)[:500] for each in report.run.event_errors[:100]],
        "reports": [compared(each) for each in (report, *compare)],
    }


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _most_work(report: Any) -> dict[str, Any] | None:
    """Return the worker with the most computed prompt tokens, counted as in `assert_balanced`; None if there were none,
    or there is only one worker.
    """
    found = most(*report.run.counts("prompt_tokens")) if len(report.workers) > 1 else None
    if found is None:
        return None
    return {"worker": str(found.worker), "times": found.times, "is_even": found.times < EVEN}


def _requests(
    shown: Sequence[RequestRow],
    place: Mapping[Any, int],
    last: Mapping[int, int],
    regrets: Sequence[float],
) -> dict[str, list[Any]]:
    """Return the requests of the timeline as columns; phases that did not take place are None."""
    rows = [_request(each, place, last.get(each.number), regrets) for each in shown]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {"number": []}


def _request(each: RequestRow, place: Mapping[Any, int], at: int | None, regrets: Sequence[float]) -> dict[str, Any]:
    request, pick = each.request, each.last
    tokens, admitted = request.token_ms, request.admitted_ms
    first = tokens[0] if tokens else None
    end = tokens[-1] if tokens and request.status == "finished" else request.ended_ms
    return {
        "number": each.number,
        "session": each.asked.session_name if each.asked else "",
        "worker": place[each.worker],
        "status": request.status,
        "arrival_ms": _ms(request.arrival_ms),
        "router_ms": _ms(pick.ms - request.arrival_ms) if pick else 0.0,
        "engine_ms": _ms(each.engine_wait_ms),
        "prefill_ms": None if first is None or admitted is None else _ms(first - admitted),
        "decode_ms": None if first is None or end is None else _ms(end - first),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.generated_tokens,
        "cached_tokens": request.first_reused_tokens,
        "host_tokens": request.host_tokens,
        "storage_tokens": request.fetched_tokens,
        "promised_blocks": each.promised,
        "overlap": each.held,
        "best_overlap": pick.best_held if pick else 0,
        "regret": 0.0 if at is None else round(regrets[at], 3),
        "pick": at,
        "attempts": pick.attempt if pick else 1,
        "preempted": _stops(request) or 0,
    }


def _stops(request: Any) -> list[list[float]]:
    """Return the preemptions of a request; each lasts from its last token or admission to the next admission."""
    found: list[list[float]] = []
    if len(request.admissions) < 2:
        return found
    for (before, _), (again, _) in zip(request.admissions, request.admissions[1:], strict=False):
        token = bisect_left(request.token_ms, again)
        start = max(before, request.token_ms[token - 1] if token else before)
        found.append([round(start - request.arrival_ms, 1), round(again - start, 1)])
    return found


def _pick(record: PickRecord, selector: Selector) -> dict[str, Any]:
    """Return a pick with the true values of all candidates, and the overlaps that the router saw."""
    costs = selector_costs(selector, record)
    rows = [
        {
            "worker": str(each.worker),
            "cost": round(cost, 3),
            "shown": shown,
            "usage": round(each.usage, 3),
            **{name: getattr(each, name) for name in LOADS},
        }
        for each, cost, shown in zip(record.candidates, costs, record.shown, strict=True)
    ]
    return {"chosen": str(record.chosen), "candidates": rows}


def _samples(report: Any, names: Sequence[str], notes: list[str]) -> list[dict[str, list[Any]]] | None:
    """Return samples of the passes of each worker; None if nothing was recorded."""
    if report.run.recorder is None:
        return None
    columns = report.run.recorder.samples
    wanted = ("ms", "running", "waiting", "active_blocks")
    by_worker: list[list[tuple[float, int, int, int]]] = [[] for _ in names]
    for position, *values in zip(columns["position"], *(columns[name] for name in wanted), strict=True):
        by_worker[position].append(tuple(values))
    most = max(map(len, by_worker), default=0)
    if most > MOST_POINTS:
        notes.append(
            f"Charts have at most {MOST_POINTS:,} of up to {most:,} passes a worker: for each interval the one "
            "with the longest queue."
        )
    found = []
    for rows in by_worker:
        kept = peaks(rows, MOST_POINTS, itemgetter(2, 3))
        found.append({name: [row[at] for row in kept] for at, name in enumerate(wanted)})
        found[-1]["ms"] = [round(ms, 1) for ms in found[-1]["ms"]]
    return found


def _marks(report: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Return marks in time: incidents, the router's first wrong beliefs, faults, and event errors."""
    marks = [
        {"ms": _ms(each.ms), "kind": each.kind, "worker": str(each.worker), "text": f"{each.lost} requests lost"}
        for each in report.run.incidents
    ]
    marks += [
        {"ms": _ms(each.ms), "kind": each.rule, "worker": str(each.worker), "text": str(each)}
        for each in report.beliefs or ()
    ]
    marks += [
        {
            "ms": _ms(each.ms),
            "kind": each.kind if each.is_error else f"fault {each.kind}",
            "worker": str(each.worker),
            "text": each.text,
        }
        for each in report.run.marks[:MOST_MARKS]
    ]
    if len(report.run.marks) > MOST_MARKS:
        notes.append(f"Of {len(report.run.marks):,} faults and errors of events the first {MOST_MARKS} are marked.")
    return sorted(marks, key=itemgetter("ms"))


# ------------------------------------------------------------------------------------------------- several reports


def compared(other: Any) -> dict[str, Any]:
    """Return the data of a report or its JSON for a comparison: throughput, latencies, and times to the first token.

    A distribution is points of (share of the requests, milliseconds). JSON has only some of them, and no times of
    single requests.
    """
    compared = Compared.of(other)
    if isinstance(other, Mapping):
        over_time: list[tuple[float, float]] = []
        points = {what: {at: compared.figure(f"{what}_{name}") for name, at in _POINTS.items()} for what in _CURVES}
        curves = {what: [[at, ms] for at, ms in of.items() if ms is not None] for what, of in points.items()}
    else:
        done = [(each.arrival_ms, each.ttft_ms) for each in other.completed]
        over_time = sorted((ms, ttft) for ms, ttft in done if ttft is not None)
        curves = {what: _curve(sorted(other.run.values(what))) for what in _CURVES}
    return {
        "name": compared.router,
        "trace": compared.trace,
        "throughput": round(compared.figure("output_throughput_tok_s") or 0.0, 3),
        "requests_per_s": round(compared.figure("request_throughput_rps") or 0.0, 4),
        "curves": curves,
        "ttft_over_time": [[round(ms, 1), round(ttft, 2)] for ms, ttft in every(over_time, MOST_POINTS)],
    }


def _curve(values: Sequence[float]) -> list[list[float]]:
    """Return points of the distribution of sorted values; the value at a share is taken as for Dynamo's percentiles."""
    shares = [at / _CURVE for at in range(_CURVE + 1)] if values else []
    return [[round(share, 4), round(values[int((len(values) - 1) * share + 0.5)], 2)] for share in shares]
