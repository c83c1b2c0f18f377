"""Reports of what engines served: latencies, throughput and reuse, as Dynamo's replay calculates them."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, repeat
from operator import mul, sub, truediv
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ScheduledRequest

_MOST_SORTED: Final = 100_000
_PERCENTILES: Final = (("median", 0.5), ("p75", 0.75), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))


@dataclass(frozen=True, slots=True, repr=False)  # a repr of all requests would be a book
class EngineReport:
    """What was served.

    All times are on the clock of the engines. All sums are over the requests that completed. A percentile is the value at `round((n - 1) * q)` of the n sorted
    ones (half up), a standard deviation that of the population; without a value both are 0 (Dynamo's replay).

    Attributes:
        requests: all requests, in the order of their arrival.
        passes: how many forward passes were run.
    """

    requests: Sequence[ScheduledRequest]
    passes: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.completed)} of {len(self.requests)} requests finished>"

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished."""
        return [request for request in self.requests if request.status == "finished"]

    @property
    def rejected(self) -> list[ScheduledRequest]:
        """The requests that were rejected, as they could never fit."""
        return [request for request in self.requests if request.status == "rejected"]

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return sum(request.preemptions for request in self.requests)

    @property
    def duration_ms(self) -> float:
        """From the first arrival, be it of a request that is rejected, to the last token of those that completed; 0 without one."""
        ends = [request.token_ms[-1] for request in self.completed if request.token_ms]
        return max(ends) - min(request.arrival_ms for request in self.requests) if ends else 0.0

    @property
    def reused_ratio(self) -> float:
        """Share of the prompts' tokens that were cached, of each request the most that one admission found."""
        return _ratio(
            sum(request.reused_tokens for request in self.completed),
            sum(request.prompt_tokens for request in self.completed),
        )

    @property
    def onboarded_tokens(self) -> int:
        """Tokens that came back from the host for these requests."""
        return sum(request.onboarded_tokens for request in self.completed)

    @property
    def onboarded_ratio(self) -> float:
        """The same as a share of the prompts' tokens; it is a part of `reused_ratio`."""
        return _ratio(self.onboarded_tokens, sum(request.prompt_tokens for request in self.completed))

    def to_json(self) -> dict[str, Any]:
        """Return all figures, by the keys of Dynamo's replay; times in milliseconds.

        `onboarded_input_tokens` is ours: what came back from the host.
        """
        done = self.completed
        inputs = sum(request.prompt_tokens for request in done)
        outputs = sum(request.generated_tokens for request in done)
        duration = self.duration_ms
        seconds = duration / 1000
        out: dict[str, Any] = {
            "num_requests": len(self.requests),
            "completed_requests": len(done),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "duration_ms": duration,
            "request_throughput_rps": _ratio(len(done), seconds),
            "input_throughput_tok_s": _ratio(inputs, seconds),
            "output_throughput_tok_s": _ratio(outputs, seconds),
            "total_throughput_tok_s": _ratio(inputs + outputs, seconds),
            "processed_tokens": inputs + outputs,
            "prefix_cache_reused_ratio": self.reused_ratio,
            "first_admission_prefix_cache_reused_ratio": _ratio(
                sum(request.first_reused_tokens for request in done), inputs
            ),
            "onboarded_input_tokens": self.onboarded_tokens,
        }
        times = [(request.arrival_ms, request.token_ms) for request in done if request.token_ms]
        later = [tokens for _, tokens in times if len(tokens) > 1]
        gaps = array("d", chain.from_iterable(map(sub, islice(tokens, 1, None), tokens) for tokens in later))
        out |= statistics("ttft_ms", [tokens[0] - arrival for arrival, tokens in times])
        out |= statistics("ttst_ms", [tokens[1] - tokens[0] for tokens in later])
        out |= statistics("tpot_ms", [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in later])
        out |= self._gap_statistics("itl_ms", gaps)
        out |= statistics("e2e_latency_ms", [tokens[-1] - arrival for arrival, tokens in times])
        per_user = array("d", map(truediv, repeat(1000.0), filter(None, gaps)))
        out |= self._gap_statistics("output_token_throughput_per_user", per_user)
        return out

    def _gap_statistics(self, name: str, values: Sequence[float]) -> dict[str, float]:
        """Statistics of what is by the gap between tokens; from 1.6.1 on their percentiles are sketched."""
        return statistics(name, values)

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row a request, by the keys of Dynamo's report; what did not happen is None.

        `onboarded_input_tokens` is ours.
        """
        rows = []
        for request in self.requests:
            tokens = request.token_ms
            rows.append(
                {
                    "arrival_time_ms": request.arrival_ms,
                    "first_admit_ms": request.admitted_ms,
                    "first_token_ms": tokens[0] if tokens else None,
                    "last_token_ms": tokens[-1] if tokens else None,
                    "input_length": request.prompt_tokens,
                    "output_length": request.max_output_tokens,
                    "reused_input_tokens": request.reused_tokens,
                    "onboarded_input_tokens": request.onboarded_tokens,
                    "ttft_ms": tokens[0] - request.arrival_ms if tokens else None,
                }
            )
        return rows


@dataclass(frozen=True, slots=True, repr=False)
class ReplayReport(EngineReport):
    """What several engines served on one clock.

    Attributes:
        requests: all requests, in the order in which they were dispatched.
        passes: how many forward passes were run, by all engines together.
        served_by: for each request, the position of the engine that generates its tokens; None where a prefill engine
            rejected it.
        handoffs: of each request that a prefill engine handed over, what Dynamo's report says about that; 1.6.1 only, in the
            semantics of 1.2.1 it is empty.
    """

    served_by: Sequence[int | None] = ()
    handoffs: Mapping[ScheduledRequest, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def reported(self) -> Sequence[ScheduledRequest]:
        """The requests that have a row in `per_request`."""
        return self.requests

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row a request, by the keys of Dynamo's report of its release, those of its handoff included."""
        rows = EngineReport.per_request(self)
        return [{**row, **self.handoffs.get(request, {})} for request, row in zip(self.requests, rows, strict=True)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def statistics(name: str, values: Sequence[float], counted: Counter[float] | None = None) -> dict[str, float]:
    """Return mean, least, greatest, exact percentiles and deviation of values, by Dynamo's keys; 0 where there are none.

    Args:
        name: what the keys end with.
        values: the values, in their order.
        counted: how often each is there, where that is known.
    """
    count = len(values)
    if not count:
        keys = ["mean", "min", "max", *(key for key, _ in _PERCENTILES), "std"]
        return {f"{key}_{name}": 0.0 for key in keys}
    # Gaps between tokens are millions, of a few thousand values: these are counted, as a sorted list would take much memory.
    tally = (Counter(values) if counted is None else counted) if count > _MOST_SORTED else None
    if tally is None or len(tally) > _MOST_SORTED:
        ordered = sorted(values)
        out = {f"mean_{name}": sum(values) / count, f"min_{name}": ordered[0], f"max_{name}": ordered[-1]}
        for key, share in _PERCENTILES:
            out[f"{key}_{name}"] = ordered[math.floor((count - 1) * share + 0.5)]
        out[f"std_{name}"] = _deviation(values)
        return out
    distinct = sorted(tally)
    counts = [tally[each] for each in distinct]
    upto = list(accumulate(counts))
    out = {f"mean_{name}": sum(values) / count, f"min_{name}": distinct[0], f"max_{name}": distinct[-1]}
    for key, share in _PERCENTILES:
        out[f"{key}_{name}"] = distinct[bisect_right(upto, math.floor((count - 1) * share + 0.5))]
    out[f"std_{name}"] = _deviation(distinct, counts)
    return out


def _deviation(values: Sequence[float], counts: Sequence[int] | None = None) -> float:
    """Return the standard deviation of the population, by differences from one value, which lose no digits.

    Args:
        values: the values.
        counts: how often each is there; None: once.
    """
    pivot, count = values[0], len(values) if counts is None else sum(counts)
    apart = array("d", map(sub, values, repeat(pivot)))
    weighted = apart if counts is None else array("d", map(mul, apart, counts))
    mean = math.fsum(weighted) / count
    return math.sqrt(max(0.0, math.fsum(map(mul, weighted, apart)) / count - mean * mean))
