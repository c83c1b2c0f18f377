"""A request of a run as a row, and as JSON with the keys of Dynamo's report: the short row, the long one of 1.6.1, and
the fields of a router's pick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.report.rows import RequestRow

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.fleets.report.rows import Asked, Pick, Pools, WorkerRow

STATUS: Final = {"finished": "completed", "rejected": "rejected", "failed": "failed"}
"""The status of an ended request in the long form; a request without one has no row there."""

_HANDOFF: Final = (
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
)


def joined_rows(
    requests: Sequence[ScheduledRequest],
    block_size: int,
    *,
    numbers: Sequence[int],
    served_by: Sequence[int | None],
    asked: Sequence[Asked],
    handoffs: Mapping[ScheduledRequest, Mapping[str, Any]],
    picks: Sequence[Pick],
    services: Sequence[WorkerRow],
) -> list[RequestRow]:
    """Return a row for each request, with its first and its last pick; see `RunResult` for the arguments."""
    first: dict[int, Pick] = {}
    last: dict[int, Pick] = {}
    computes: dict[int, int] = {}  # attempts with a prefill worker, whose pick then determines the found blocks
    for each in picks:
        first.setdefault(each.number, each)
        if each.phase == "decode" and computes.get(each.number) == each.attempt:
            continue
        if each.phase == "prefill":
            computes[each.number] = each.attempt
        last[each.number] = each
    seats = {each.position: each for each in services}
    named = {each.worker: each for each in services}
    count = len(requests)
    columns = (requests, numbers or range(count), served_by or repeat(0, count), asked or repeat(None, count))
    rows = []
    for request, number, seat, turn in zip(*columns, strict=True):
        pick = last.get(number)
        service = named[pick.worker] if pick and pick.phase is None else None if seat is None else seats.get(seat)
        rows.append(
            RequestRow(
                request,
                number,
                seat,
                service.worker if service else None,
                turn,
                handoffs.get(request, {}),
                first.get(number),
                pick,
                block_size,
                service is not None and service.recomputes_last_token,
            )
        )
    return rows


def request_json(row: RequestRow, pools: Pools | None) -> dict[str, Any]:
    """Return a row as JSON.

    Args:
        row: the row.
        pools: data of the run for the long form; None: the short form.
    """
    request = row.request
    tokens = request.token_ms
    out: dict[str, Any] = {
        "arrival_time_ms": request.arrival_ms,
        "first_admit_ms": request.admitted_ms,
        "first_token_ms": tokens[0] if tokens else None,
        "last_token_ms": tokens[-1] if tokens else None,
        "input_length": request.prompt_tokens,
        "output_length": request.max_output_tokens,
        "reused_input_tokens": request.reused_tokens,
        "onboarded_input_tokens": request.onboarded_tokens,
        "ttft_ms": request.ttft_ms,
    }
    out |= row.handoff if pools is None else _long(row, pools)
    if row.last is not None:
        out |= _picked(row, row.last, out.get("routing_history"))
    return out


def _picked(row: RequestRow, pick: Pick, history: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the fields of a pick; also add them to the routing history of the long form."""
    overlaps = {
        "selected_overlap_blocks": pick.overlap,
        "best_available_overlap_blocks": pick.best_overlap,
        "overlap_regret_blocks": max(0, pick.best_overlap - pick.overlap),
    }
    if history:
        history[-1] |= overlaps | {"queue_wait_ms": pick.waited_ms}
    return {
        "number": row.number,
        "worker": pick.worker,
        "status": row.request.status,
        "attempts": pick.attempt,
        "picked_ms": pick.ms,
        "router_wait_ms": row.first.waited_ms if row.first else 0.0,
        "engine_wait_ms": row.engine_wait_ms,
        "promised_blocks": row.promised,
        "found_blocks": row.found,
        **overlaps,
    }


def _long(row: RequestRow, pools: Pools) -> dict[str, Any]:
    """Return the further fields of the long form."""
    request, worker, handoff, asked = row.request, row.served_by, row.handoff, row.asked
    history = _admissions(row)
    named = asked if pools.names_sessions else None
    return {
        **{name: value for name, value in handoff.items() if name != "prefill_admissions"},
        "session_id": None if named is None else named.session_name,
        "turn_index": None if named is None else named.index,
        "dispatched_at_ms": None,
        "terminal_time_ms": request.ended_ms,
        "ttst_ms": request.ttst_ms,
        "e2e_latency_ms": request.e2e_ms,
        "itl_ms": request.itl_ms,
        "requested_output_length": None if asked is None else asked.trace.output_length,
        "output_length": request.generated_tokens,
        "prefill_worker_idx": handoff.get("prefill_worker_idx"),
        "decode_worker_idx": None if request.status == "failed" else worker,
        **{name: handoff.get(name) for name in _HANDOFF},
        **({} if request.admissions else {"decode_reused_input_tokens": None}),
        "prefill_route_overlap_tokens": 0 if "prefill_worker_idx" in handoff else None,
        "decode_route_overlap_tokens": 0 if handoff and worker is not None else None,
        "routing_history": _routes(worker, handoff, pools),
        "admission_history": history,
        "admission_count": len(history),
        "readmission_count": sum(each["is_readmission"] for each in history),
        "pressure_record_ordinals": [],
        "terminal_status": STATUS[request.status],
    }


def _routes(worker: int | None, handoff: Mapping[str, Any], pools: Pools) -> list[dict[str, Any]]:
    places = [("prefill", handoff.get("prefill_worker_idx"), 1), ("decode", worker, pools.ranks)]
    if pools.decode_first:
        places.reverse()
    if not handoff:
        places = [("agg", worker, pools.ranks)]
    return [
        {
            "pool": pool,
            "outcome": "immediate",
            "queue_entered_at_ms": None,
            "released_at_ms": None,
            "queue_wait_ms": 0.0,
            "logical_worker_id": place // ranks,
            "scheduler_id": place,
            "dp_rank": place % ranks,
            "reported_overlap_tokens": 0,
            "selected_overlap_blocks": None,
            "best_available_overlap_blocks": None,
            "overlap_regret_blocks": None,
            "placement_replica_id": None,
        }
        for pool, place, ranks in places
        if place is not None
    ]


def _admissions(row: RequestRow) -> list[dict[str, Any]]:
    """Return the admissions of a request, those at the prefill engine first."""
    pools = [("agg", row.request.admissions)]
    if row.handoff:
        pools = [("prefill", row.handoff.get("prefill_admissions", ())), ("decode", row.request.admissions)]
    entries = [(pool, number, at, reused) for pool, made in pools for number, (at, reused) in enumerate(made)]
    return [
        {
            "admission_ordinal": ordinal,
            "pool_admission_ordinal": number,
            "pool": pool,
            "at_ms": at,
            "reused_input_tokens": reused,
            "is_readmission": number > 0,
        }
        for ordinal, (pool, number, at, reused) in enumerate(entries)
    ]
