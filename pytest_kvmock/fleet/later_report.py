"""The report of a replay in the semantics of 1.6.1: more figures, percentiles of gaps by a sketch, and longer rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from operator import sub, truediv
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleet.report import EngineReport, ReplayReport, statistics

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.fleet.arrivals import Turn

_SKETCHED: Final = {"median": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
_STATUS: Final = {"finished": "completed", "rejected": "rejected", "failed": "failed"}
_HANDOFF: Final = (
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must not exceed to count as good; None: any. Each bound is inclusive.

    Attributes:
        ttft_ms: time to the first token.
        itl_ms: mean time between its tokens; a request of one token has none.
        e2e_ms: time to its last token.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return not (self.ttft_ms is None and self.itl_ms is None and self.e2e_ms is None)

    def are_met(self, request: ScheduledRequest) -> bool:
        """Whether a finished request keeps all of them; one without tokens only one end to end."""
        tokens = request.token_ms
        if not tokens:
            end = request.ended_ms
            alone = self.ttft_ms is None and self.itl_ms is None
            return alone and end is not None and self.e2e_ms is not None and end - request.arrival_ms <= self.e2e_ms
        first, last = tokens[0] - request.arrival_ms, tokens[-1] - request.arrival_ms
        gap = (last - first) / (len(tokens) - 1) if len(tokens) > 1 else None
        return (
            (self.ttft_ms is None or first <= self.ttft_ms)
            and (self.e2e_ms is None or last <= self.e2e_ms)
            and (self.itl_ms is None or gap is None or gap <= self.itl_ms)
        )


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The workers of one kind.

    Attributes:
        count: how many.
        gpus: of each.
    """

    count: int = 0
    gpus: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class LaterEngineReport(EngineReport):
    """What one engine in the semantics of 1.6.1 served: the percentiles of gaps between tokens come from a sketch, as in a replay."""

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished, in the order of their ends."""
        return _by_end(self.requests)

    def _gap_statistics(self, name: str, values: Sequence[float]) -> dict[str, float]:
        return by_sketch(name, values)


@dataclass(frozen=True, slots=True, repr=False)
class LaterReplayReport(ReplayReport):
    """What several engines served on one clock, as the replay of 1.6.1 reports it.

    Percentiles of times to the first token, the second, per output token and end to end are exact; those of gaps between
    tokens, and of throughput per user, come from a sketch, to the bit as the original's (`sketched`).

    Attributes:
        clock_ms: how long the clock ran.
        prefill: the prefill workers.
        decode: those that generate.
        prefill_tokens: tokens of prompts that were computed, and with them what was computed again.
        objectives: what counts as good.
        turns: of each request, its place in the trace.
        names_sessions: whether rows name sessions (`Arrivals.depends_on_ends`).
        ranks: of a decode worker.
        decode_first: whether a request is given to its decode engine before it is to its prefill engine.
    """

    clock_ms: float = 0.0
    prefill: WorkerCount = WorkerCount()
    decode: WorkerCount = WorkerCount()
    prefill_tokens: int = 0
    objectives: Objectives = Objectives()
    turns: Sequence[Turn] = ()
    names_sessions: bool = False
    ranks: int = 1
    decode_first: bool = False

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished, in the order of their ends."""
        return _by_end(self.requests)

    @property
    def duration_ms(self) -> float:
        """When the last request that completed ended, from the start of the clock; 0 where none did."""
        return max((request.ended_ms or 0.0 for request in self.completed), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, by the keys of Dynamo's replay; times in milliseconds."""
        done = self.completed
        inputs = sum(request.prompt_tokens for request in done)
        outputs = sum(request.generated_tokens for request in done)
        seconds = max(self.duration_ms / 1000, 1e-9)
        decode_seconds, prefill_seconds = (each.count * self.clock_ms / 1000 for each in (self.decode, self.prefill))
        times = [(request.arrival_ms, request.token_ms) for request in done if request.token_ms]
        later = [tokens for _, tokens in times if len(tokens) > 1]
        out: dict[str, Any] = {
            "kv_eviction_policy": "lru",
            "committed_prefill_tokens": self.prefill_tokens,
            "num_requests": len(self.requests),
            "completed_requests": len(done),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "duration_ms": self.duration_ms,
            "request_throughput_rps": len(done) / seconds,
            "input_throughput_tok_s": inputs / seconds,
            "output_throughput_tok_s": outputs / seconds,
            "total_throughput_tok_s": (inputs + outputs) / seconds,
            "prefill_worker_seconds": prefill_seconds,
            "decode_worker_seconds": decode_seconds,
            "prefill_gpus_per_worker": self.prefill.gpus,
            "decode_gpus_per_worker": self.decode.gpus,
            "gpu_hours": (prefill_seconds * self.prefill.gpus + decode_seconds * self.decode.gpus) / 3600,
        }
        if self.objectives:
            good = [request for request in done if self.objectives.are_met(request)]
            out["goodput_completed_requests"] = len(good)
            out["goodput_request_throughput_rps"] = len(good) / seconds
            out["goodput_output_throughput_tok_s"] = sum(request.generated_tokens for request in good) / seconds
        out |= {
            "power_w": None,
            "power_coverage": None,
            "processed_tokens": inputs + outputs,
            "prefix_cache_reused_ratio": _share((request.reused_tokens for request in done), inputs),
            "first_admission_prefix_cache_reused_ratio": _share(
                (request.first_reused_tokens for request in done), inputs
            ),
            "onboarded_input_tokens": self.onboarded_tokens,
            "num_ttft_samples": len(times),
            "num_tpot_samples": len(later),
            "num_e2e_latency_samples": len(times),
        }
        out |= statistics("ttft_ms", [tokens[0] - arrival for arrival, tokens in times])
        out |= statistics("ttst_ms", [tokens[1] - tokens[0] for tokens in later])
        out |= statistics("tpot_ms", [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in later])
        gaps = array("d", chain.from_iterable(map(sub, islice(tokens, 1, None), tokens) for tokens in later))
        if gaps and min(gaps) < 0.0:
            gaps = array("d", (max(0.0, gap) for gap in gaps))
        out |= by_sketch("itl_ms", gaps)
        out |= statistics("e2e_latency_ms", [tokens[-1] - arrival for arrival, tokens in times])
        out |= by_sketch(
            "output_token_throughput_per_user", array("d", map(truediv, repeat(1000.0), filter(None, gaps)))
        )
        return out

    @property
    def reported(self) -> list[ScheduledRequest]:
        """The requests that have a row: those that have an end."""
        return [request for request in self.requests if request.status in _STATUS]

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row a request that has an end, by the keys of Dynamo's report of 1.6.1; what did not happen is None.

        `uuid`, which is random there, is left out; `onboarded_input_tokens` is ours.
        """
        rows = zip(ReplayReport.per_request(self), self.requests, self.served_by, self.turns, strict=True)
        return [self._row(*each) for each in rows if each[1].status in _STATUS]

    def _row(self, row: dict[str, Any], request: ScheduledRequest, worker: int | None, turn: Turn) -> dict[str, Any]:
        tokens, handoff = request.token_ms, self.handoffs.get(request, {})
        history, failed = _admissions(request, handoff), request.status == "failed"
        row.pop("prefill_admissions", None)
        return row | {
            "session_id": turn.session_name if self.names_sessions else None,
            "turn_index": turn.index if self.names_sessions else None,
            "dispatched_at_ms": None,
            "terminal_time_ms": request.ended_ms,
            "ttst_ms": tokens[1] - tokens[0] if len(tokens) > 1 else None,
            "e2e_latency_ms": tokens[-1] - request.arrival_ms if tokens else None,
            "itl_ms": (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
            "requested_output_length": turn.trace.output_length,
            "output_length": request.generated_tokens,
            "prefill_worker_idx": handoff.get("prefill_worker_idx"),
            "decode_worker_idx": None if failed else worker,
            **{name: handoff.get(name) for name in _HANDOFF},
            **({} if request.admissions else {"decode_reused_input_tokens": None}),
            "prefill_route_overlap_tokens": 0 if "prefill_worker_idx" in handoff else None,
            "decode_route_overlap_tokens": 0 if handoff and worker is not None else None,
            "routing_history": self._routes(worker, handoff),
            "admission_history": history,
            "admission_count": len(history),
            "readmission_count": sum(each["is_readmission"] for each in history),
            "pressure_record_ordinals": [],
            "terminal_status": _STATUS[request.status],
        }

    def _routes(self, worker: int | None, handoff: Any) -> list[dict[str, Any]]:
        places = [("prefill", handoff.get("prefill_worker_idx"), 1), ("decode", worker, self.ranks)]
        if self.decode_first:
            places.reverse()
        if not handoff:
            places = [("agg", worker, self.ranks)]
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


def _by_end(requests: Iterable[ScheduledRequest]) -> list[ScheduledRequest]:
    done = [request for request in requests if request.status == "finished"]
    return sorted(done, key=lambda request: request.ended_ms or 0.0)


def _admissions(request: ScheduledRequest, handoff: Any) -> list[dict[str, Any]]:
    """The admissions of a request, at the prefill engine first."""
    pools = [("agg", request.admissions)]
    if handoff:
        pools = [("prefill", handoff.get("prefill_admissions", ())), ("decode", request.admissions)]
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


def _share(parts: Iterable[int], whole: int) -> float:
    return sum(parts) / whole if whole else 0.0


def by_sketch(name: str, values: Sequence[float]) -> dict[str, float]:
    """Statistics whose percentiles are sketched; mean and deviation, least and greatest value are not."""
    counted = Counter(values)
    out = statistics(name, values, counted)
    if counted:
        out |= {f"{key}_{name}": value for key, value in sketched(counted, _SKETCHED).items()}
    return out


# ---------------------------------------------------------------------------------------------------------- percentiles
#
# DDSketch (Masson, Rim, Lee, 2019) counts a value in a bucket whose bounds grow by a fixed factor, so that a percentile is
# within 0.1 % of a value that was there, and may be above the greatest. Rank and rounding are those of dynamo-mocker 1.6.1.

ACCURACY: Final = 0.001

_GAMMA: Final = 1.0 + 2.0 * ACCURACY / (1.0 - ACCURACY)
_PER_KEY: Final = 1.0 / math.log1p(2.0 * ACCURACY / (1.0 - ACCURACY))
_LEAST: Final = 1e-300
"""Values below count as 0."""


def sketched(values: Iterable[float], percentiles: Mapping[str, float]) -> dict[str, float]:
    """Return percentiles of values of at least 0, by name.

    Args:
        values: at least one; or how often each is there.
        percentiles: from 0 to 100, by name.
    """
    counted = values if isinstance(values, Counter) else Counter(values)
    count = counted.total()
    if count == 1:
        return dict.fromkeys(percentiles, next(iter(counted)))
    ceil, log = math.ceil, math.log
    buckets: Counter[int | None] = Counter()
    for value, times in counted.items():
        buckets[ceil(log(value) * _PER_KEY) if value > _LEAST else None] += times
    zeros = buckets.pop(None, 0)
    ordered = sorted(key for key in buckets if key is not None)
    wanted = sorted((_element(count, share), name) for name, share in percentiles.items())
    out: dict[str, float] = {}
    seen, at = zeros, -1
    for element, name in wanted:
        while seen <= element:
            at += 1
            seen += buckets[ordered[at]]
        out[name] = 0.0 if element < zeros else math.exp(ordered[at] * (1.0 / _PER_KEY)) * (2.0 / (1.0 + _GAMMA))
    return {name: out[name] for name in percentiles}


def _element(count: int, percentile: float) -> int:
    """Which of so many values in order, from 0, a percentile looks for."""
    span = count - 1
    rank = math.floor(span * percentile / 100.0 + 0.5)
    quantile = 1.0 if not span or rank >= span else (rank + 0.5) / span
    return int(quantile * span)
