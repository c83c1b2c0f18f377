"""One table of all figures of a run, for printed reports, pages, JSON, comparisons and assertions.

One subject: the table, and the rows that its functions take.

Theory of operation. A figure is a function of `Rows`, those of one worker or of all. A request counts for the worker
that served it last. Promised blocks are the overlap by the index at the pick; found blocks are those reused by the
first admission. An engine that computes the last token of a prompt again (`Traits.recomputes_last_token`) does not
reuse the last block of a prompt of full blocks, so that block is not promised. A request without output may reuse that
block on any engine, as in 1.6.1. The ideal is one endless cache that sees the requests in order of arrival.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain, islice, repeat
from operator import attrgetter, sub, truediv
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.fleets.report.routing_figures import aligned, jain, max_to_mean, of_best, share
from pytest_kvmock.fleets.report.statistics import PERCENTILES, POINTS, Counted, Sketch, few_values, statistics
from pytest_kvmock.values.checks import unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.fleets.report.rows import Asked, RequestRow, RunFacts, WorkerRow
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.values.tokens import Prompt

Figures: TypeAlias = dict[str, "float | None"]

BALANCED: Final = ("requests", "prompt_tokens", "open_requests")
"""Quantities with figures of balance: requests, computed prompt tokens, open requests at picks."""

_OF_REQUESTS: Final = {"ttft": "ttft_ms", "ttst": "ttst_ms", "tpot": "itl_ms", "e2e": "e2e_ms"}
"""The distributions with one value per request, and the attribute of that value."""

MOST_WIDE: Final = 120
"""Maximum width of a printed table in characters."""


class Rows:
    """The rows of one worker, or of all.

    Args:
        facts: how the run was made.
        requests: the requests that were dispatched.
        picks: the choices of the router; each has a `worker` and a `choice`.
        workers: the row of each worker.
        arrived: number of requests that arrived.
        done: the completed requests; None: the finished ones.
        withdrawn: number of arrived requests that were called off before they were dispatched.
        parts: for the rows of all workers, returns the rows of each; None if unknown.
    """

    def __init__(
        self,
        facts: RunFacts,
        requests: Sequence[RequestRow] = (),
        picks: Sequence[Any] = (),
        workers: Sequence[WorkerRow] = (),
        *,
        arrived: int,
        done: Sequence[Any] | None = None,
        withdrawn: int = 0,
        parts: Callable[[], Iterable[Rows]] | None = None,
    ) -> None:
        self.facts = facts
        self.requests = requests
        self.picks = picks
        self.workers = workers
        self.arrived = arrived
        self.aborted = withdrawn + sum(each.request.status == "aborted" for each in requests)
        finished = (each.request for each in requests if each.request.status == "finished")
        self.done = list(finished) if done is None else done
        self._make_parts = parts
        self._statistics: dict[str, dict[str, float]] = {}

    def total(self, name: str) -> int:
        """Return the sum of an attribute over the requests that completed."""
        return sum(map(attrgetter(name), self.done))

    def of_prompts(self, name: str) -> float:
        """Return the sum of an attribute as a share of the prompts' tokens; 0 if there are none."""
        return share(self.total(name), self.total("prompt_tokens")) or 0.0

    def of_workers(self, name: str) -> int:
        """Return the sum of an attribute over the workers."""
        return sum(map(attrgetter(name), self.workers))

    @cached_property
    def admitted(self) -> list[RequestRow]:
        """The requests that were admitted."""
        return [each for each in self.requests if each.request.admitted_ms is not None]

    # ----------------------------------------------------------------------------------------------------- time

    @cached_property
    def duration_ms(self) -> float:
        """Duration of the run by the rule of Dynamo's report in its release; 0 if no request completed."""
        if self.facts.pools is not None:
            return max((request.ended_ms or 0.0 for request in self.done), default=0.0)
        ends = [request.token_ms[-1] for request in self.done if request.token_ms]
        return max(ends) - min(each.request.arrival_ms for each in self.requests) if ends else 0.0

    def per_second(self, count: float) -> float:
        """Return a count per second of the run."""
        seconds = self.duration_ms / 1000
        if self.facts.pools is not None:
            seconds = max(seconds, 1e-9)
        return count / seconds if seconds else 0.0

    @property
    def gaps(self) -> array[float]:
        """Milliseconds between tokens. There may be millions of values, so they are not kept."""
        later = (request.token_ms for request in self.done if len(request.token_ms) > 1)
        gaps = array("d", chain.from_iterable(map(sub, islice(tokens, 1, None), tokens) for tokens in later))
        # After a handoff the second token may have an earlier time than the first.
        return array("d", (max(0.0, gap) for gap in gaps)) if gaps and min(gaps) < 0.0 and self.facts.sketches else gaps

    def values(self, what: str) -> Sequence[float]:
        """Return the values of a distribution: one for each request that has it, or for "itl" and "per_user" one for
        each gap between tokens.

        Raises:
            ValueError: there is no such distribution.
        """
        if what == "itl":
            return self.gaps
        if what == "per_user":
            return _rates(self.gaps)
        if what not in _OF_REQUESTS:
            raise ValueError(unknown_text("distribution", what, (*_OF_REQUESTS, "itl", "per_user")))
        found = map(attrgetter(_OF_REQUESTS[what]), self.done)
        return [value for value in found if value is not None]

    def statistic(self, what: str, point: str) -> float:
        """Return one of `POINTS` of a distribution, such as the mean; points of gaps are sketched from 1.6.1 on."""
        known = self._statistics.get(what)
        if known is None or point not in known:
            if not self.facts.sketches or what not in ("itl", "per_user"):
                self._statistics[what] = statistics(self.values(what))
            elif what == "itl" and point in PERCENTILES:
                self._statistics[what] = self.gap_sketch.percentiles()
            else:
                self._statistics |= self._gap_statistics()
            known = self._statistics[what]
        return known[point]

    @cached_property
    def parts(self) -> Sequence[Rows]:
        """For the rows of all workers, the rows of each; empty if unknown, or if a request belongs to no worker."""
        found = [] if self._make_parts is None else [*self._make_parts()]
        return found if sum(len(each.done) for each in found) == len(self.done) else ()

    @cached_property
    def gap_sketch(self) -> Sketch:
        """The sketch of the gaps between tokens."""
        if self.parts:
            return Sketch.of_all(each.gap_sketch for each in self.parts)
        return Sketch(*_counted(self.gaps))

    def _gap_statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of gaps between tokens and of their rates, counted by worker."""
        gaps, rates = [], []
        for each in self.parts or (self,):
            counted = _counted(each.gaps)
            each.gap_sketch = Sketch(*counted)
            gaps.append(counted)
            rates.append(_rates_of(counted))
        values, of_rates = self.gaps, Sketch.of_all(Sketch(*each) for each in rates)
        return {
            "itl": statistics(values, few_values(gaps), self.gap_sketch),
            "per_user": statistics(_rates(values), few_values(rates), of_rates),
        }

    # --------------------------------------------------------------------------------------------------- routing

    @cached_property
    def hit_ratio(self) -> float | None:
        """Tokens of prompts that the first admission found cached, as a share; None if nothing completed."""
        return share(self.total("cached_tokens"), self.total("prompt_tokens"))

    @cached_property
    def ideal(self) -> float | None:
        """The hit ratio of one endless cache that sees the requests in order of arrival; None if none finished."""
        cached = prompts = 0
        size = self.facts.block_size
        rows = sorted(self.requests, key=attrgetter("number"))
        asked = [(each.request, each.asked.prompt) for each in rows if each.asked and each.request.status != "rejected"]
        known = leading_blocks([prompt for _, prompt in asked], size)
        for (request, _), blocks in zip(asked, known, strict=True):
            if request.status == "finished":
                cached += blocks * size
                prompts += request.prompt_tokens
        return share(cached, prompts)

    @cached_property
    def regrets(self) -> list[int]:
        """The overlap regret of each pick, in blocks."""
        return [pick.choice.regret for pick in self.picks]

    def router_wait_ms(self) -> float | None:
        """Return the mean wait of requests for their first pick."""
        waits = [0.0 if each.first is None else each.first.waited_ms for each in self.requests]
        return share(sum(waits), len(waits))

    def engine_wait_ms(self) -> float | None:
        """Return the mean wait of admitted requests in their engines."""
        waits = [each.engine_wait_ms for each in self.admitted]
        return share(sum(wait for wait in waits if wait is not None), len(waits))

    def lacking(self) -> dict[str, int]:
        """Return the promised blocks that full attention had but that could not be reused, by the caches that lacked
        them.
        """
        counts: dict[str, int] = {}
        for blocks, caches in (each.lacking for each in self.admitted):
            if blocks and caches:
                name = " and ".join(caches)
                counts[name] = counts.get(name, 0) + blocks
        return counts

    def believed_not_found(self) -> int | None:
        """Return the number of blocks that the router believed to be there but no first admission found; None if it
        does not report beliefs.
        """
        says = [(said, each.found) for each in self.admitted if (said := each.believed) is not None]
        return _missing(says) if says else None

    def counts(self, of: str) -> tuple[dict[Worker, float], dict[Worker, float]]:
        """Return one of `BALANCED` by worker, and the share of the picks at which each worker was a candidate.

        Raises:
            ValueError: `of` is not one of `BALANCED`.
        """
        if of not in BALANCED:
            raise ValueError(unknown_text("count", of, BALANCED))
        picks = len(self.picks)
        there = {each.worker: each.picks / picks if picks else 0.0 for each in self.workers}
        if of == "prompt_tokens":
            return {each.worker: each.prompt_tokens_computed for each in self.workers}, there
        if of == "open_requests":
            return {each.worker: each.open_requests / picks if picks else 0.0 for each in self.workers}, there
        counts: dict[Worker, float] = dict.fromkeys(there, 0.0)
        for pick in self.picks:
            counts[pick.worker] += 1
        return counts, there

    def balance(self, of: str, measure: Callable[..., float | None]) -> float | None:
        """Return the balance of one of `BALANCED`, by a measure of counts and shares."""
        return measure(*self.counts(of))

    # -------------------------------------------------------------------------------------------------- figures

    def figure(self, name: str) -> float | None:
        """Return a figure by its name; None if it has no value."""
        figure = FIGURES[name]
        return None if figure.is_routed and not self.facts.router else figure.of(self)

    def figures(self, names: Iterable[str]) -> Figures:
        """Return figures by their names."""
        return {name: self.figure(name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """Return the figures of Dynamo's report of this release, by its keys; figures of objectives only if there are
        objectives.
        """
        is_long = self.facts.pools is not None
        out: dict[str, Any] = {"kv_eviction_policy": "lru", "power_w": None, "power_coverage": None} if is_long else {}
        for figure in FIGURES.values():
            if figure.key is not None and (is_long or not figure.is_long):
                value = figure.of(self)
                if value is not None:
                    out[figure.key] = value
        return out


def leading_blocks(prompts: Sequence[Prompt], size: int) -> Iterator[int]:
    """Yield for each prompt the number of leading blocks that an earlier prompt had too.

    Prompts with ids are looked up by id; an id fills several blocks. If a prompt has no ids, or ids of another kind,
    all prompts are looked up by sequence hash.
    """
    runs = [prompt.repeats(size) for prompt in prompts]
    if None not in runs and len({each and each[1] for each in runs}) < 2:
        yield from _leading_by_ids(
            [(*each, prompt.length(size) // size) for each, prompt in zip(runs, prompts, strict=True) if each]
        )
        return
    seen: set[int] = set()
    for prompt in prompts:
        blocks = prompt.sequence_hashes(size)
        prompt.release()
        yield next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)


def _leading_by_ids(prompts: Iterable[tuple[Sequence[int], int, int]]) -> Iterator[int]:
    """Do the same for (ids of a prompt, blocks that each id fills, blocks of the prompt), in a tree of ids."""
    places: dict[tuple[int, int], int] = {}  # by the previous place and the id
    blocks = [0]  # for each place, the most blocks that any prompt had there
    for ids, each_fills, length in prompts:
        place, known, is_known, left = 0, 0, True, length
        for each in ids:
            count = min(each_fills, left)
            if not count:
                break
            left -= count
            place = places.setdefault((place, each), len(blocks))
            if place == len(blocks):
                blocks.append(0)
            if is_known:
                known += min(count, blocks[place])
                is_known = count <= blocks[place]
            blocks[place] = max(blocks[place], count)
        yield known


# ---------------------------------------------------------------------------------------------------------- the table

Shown: TypeAlias = Literal["all", "worker", "latency", "asked"]


class Figure(NamedTuple):
    """One figure.

    Attributes:
        name: its name in `Report.figure`.
        title: the heading of its column.
        better: 1 if more is better, -1 if less is, 0 if neither.
        of: computes it from rows; return None if there was nothing to count.
        shown: where it is shown. "all": in the row of all workers; "worker": also in the row of each worker; "latency":
            like "worker", but at the top of the JSON; "asked": only by its name, and under its key.
        key: its key in Dynamo's JSON; None if it has none.
        is_long: whether only the long form has that key.
        is_routed: whether it needs a router.
        is_point: whether it is one of `POINTS` of a distribution, which Dynamo reports as 0 if there is no value.
    """

    name: str
    title: str
    better: int
    of: Callable[[Rows], float | None]
    shown: Shown = "worker"
    key: str | None = None
    is_long: bool = False
    is_routed: bool = False
    is_point: bool = False


def _dynamo(key: str, title: str, better: int, of: Callable[[Rows], float | None]) -> Figure:
    """Make a figure of Dynamo's report, named by its key."""
    return Figure(key, title, better, of, "asked", key)


def _long(key: str, title: str, better: int, of: Callable[[Rows], float | None]) -> Figure:
    """Make a figure of Dynamo's long form."""
    return Figure(key, title, better, of, "asked", key, is_long=True)


def _routed(name: str, title: str, better: int, of: Callable[[Rows], float | None]) -> Figure:
    """Make a figure of routing."""
    return Figure(name, title, better, of, is_routed=True)


LATENCIES: Final = ("ttft", "itl", "tpot", "e2e")
"""The latencies with mean, percentiles and maximum in a row."""

_NAMES: Final = {"mean": "mean", "median": "p50", "p75": "p75", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}
"""The points of a latency in a row, with their names there."""


def _points(what: str, metric: str, title: str, better: int = -1) -> Iterable[Figure]:
    """Make the figures of a distribution's points: `ttft_p95` is Dynamo's `p95_ttft_ms`."""
    for point in POINTS:
        name = _NAMES.get(point, point)
        shown: Shown = "latency" if what in LATENCIES and point in _NAMES else "asked"
        of = partial(Rows.statistic, what=what, point=point)
        yield Figure(f"{what}_{name}", f"{title} {name}", better, of, shown, f"{point}_{metric}", is_point=True)


def _rates(gaps: Iterable[float]) -> array[float]:
    """Convert gaps in milliseconds to tokens per second of a user; a gap of 0 has no rate."""
    return array("d", map(truediv, repeat(1000.0), filter(None, gaps)))


def _counted(values: Iterable[float]) -> Counted:
    counted = Counter(values)
    return array("d", counted), array("Q", counted.values())


def _rates_of(counted: Counted) -> Counted:
    """Convert counted gaps to rates; several gaps may have the same rate."""
    gaps, times = counted
    return _rates(gaps), times if all(gaps) else array(
        "Q", (count for gap, count in zip(gaps, times, strict=True) if gap)
    )


def _processed(rows: Rows) -> int:
    return rows.total("prompt_tokens") + rows.total("generated_tokens")


def _missing(pairs: Iterable[tuple[int, int]]) -> int:
    """Sum the shortfalls over pairs (expected, actual)."""
    return sum(max(0, should - there) for should, there in pairs)


def _of_tier(name: str) -> Callable[[Rows], float | None]:
    """Make a figure of the prompt tokens from a tier; None without a host."""
    return lambda rows: rows.total(name) if any(each.has_host for each in rows.workers) else None


def _gpus(rows: Rows, kind: str) -> int | None:
    pools = rows.facts.pools
    return None if pools is None else getattr(pools, kind).gpus


def _seconds(rows: Rows, kind: str) -> float | None:
    pools = rows.facts.pools
    return None if pools is None else getattr(pools, kind).count * pools.clock_ms / 1000


def _gpu_hours(rows: Rows) -> float:
    kinds = ("prefill", "decode")
    return sum((_seconds(rows, kind) or 0.0) * (_gpus(rows, kind) or 0) for kind in kinds) / 3600


def _of_good(of: Callable[[Rows, list[Any]], float | None]) -> Callable[[Rows], float | None]:
    """Make a figure of the requests that kept the objectives; None without objectives."""

    def figure(rows: Rows) -> float | None:
        goal = rows.facts.objectives
        return of(rows, [request for request in rows.done if goal.are_met(request)]) if goal else None

    return figure


_ALL: Final = (
    _dynamo("num_requests", "dispatched", 0, lambda rows: len(rows.requests)),
    Figure("requests", "requests", 0, lambda rows: rows.arrived),
    Figure("completed", "completed", 1, lambda rows: len(rows.done), key="completed_requests"),
    Figure("aborted", "called off", 0, lambda rows: rows.aborted, "asked"),
    Figure("hit_ratio", "hit", 1, lambda rows: rows.hit_ratio),
    Figure("ideal_hit_ratio", "ideal", 0, lambda rows: rows.ideal, "all"),
    Figure("of_ideal", "of ideal", 1, lambda rows: share(rows.hit_ratio or 0.0, rows.ideal or 0.0), "all"),
    _routed("overlap_selected", "selected", 0, lambda rows: sum(pick.held for pick in rows.picks)),
    _routed("overlap_best", "best", 0, lambda rows: sum(pick.best_held for pick in rows.picks)),
    _routed("of_best", "of best", 1, lambda rows: of_best(pick.choice for pick in rows.picks)),
    _routed("overlap_regret", "regret", -1, lambda rows: share(sum(rows.regrets), len(rows.picks))),
    Figure(
        "elsewhere", "elsewhere", -1, lambda rows: sum(regret > 0 for regret in rows.regrets), "asked", is_routed=True
    ),
    _routed("promised_not_found", "not found", -1, lambda rows: _missing((r.promised, r.found) for r in rows.admitted)),
    _routed("believed_not_found", "believed, not found", -1, Rows.believed_not_found),
    _routed(
        "found_not_promised", "found, not promised", 0, lambda rows: _missing((r.found, r.held) for r in rows.admitted)
    ),
    Figure(
        "prompt_tokens_computed",
        "computed",
        -1,
        lambda rows: rows.of_workers("prompt_tokens_computed"),
        key="committed_prefill_tokens",
        is_long=True,
    ),
    Figure("device_tokens", "device", 0, _of_tier("device_tokens")),
    Figure("host_tokens", "host", 0, _of_tier("host_tokens")),
    Figure("storage_tokens", "storage", 0, _of_tier("fetched_tokens")),
    Figure("blocks_evicted", "evicted", -1, lambda rows: rows.of_workers("blocks_evicted")),
    Figure("preemptions", "preempted", -1, lambda rows: rows.of_workers("preemptions")),
    _routed("router_wait_ms", "router ms", -1, Rows.router_wait_ms),
    Figure("engine_wait_ms", "engine ms", -1, Rows.engine_wait_ms),
    *_points("ttft", "ttft_ms", "ttft"),
    *_points("ttst", "ttst_ms", "ttst"),
    *_points("tpot", "tpot_ms", "tpot"),
    *_points("itl", "itl_ms", "itl"),
    *_points("e2e", "e2e_latency_ms", "e2e"),
    *_points("per_user", "output_token_throughput_per_user", "tokens/s of a user", 1),
    Figure("goodput", "goodput", 1, _of_good(lambda rows, good: share(len(good), rows.arrived - rows.aborted))),
    _long("goodput_completed_requests", "good", 1, _of_good(lambda _, good: len(good))),
    _long("goodput_request_throughput_rps", "good/s", 1, _of_good(lambda rows, good: rows.per_second(len(good)))),
    _long(
        "goodput_output_throughput_tok_s",
        "good tokens/s",
        1,
        _of_good(lambda rows, good: rows.per_second(sum(request.generated_tokens for request in good))),
    ),
    _dynamo("duration_ms", "duration ms", -1, lambda rows: rows.duration_ms),
    _dynamo("request_throughput_rps", "requests/s", 1, lambda rows: rows.per_second(len(rows.done))),
    _dynamo("input_throughput_tok_s", "input/s", 1, lambda rows: rows.per_second(rows.total("prompt_tokens"))),
    _dynamo("output_throughput_tok_s", "output/s", 1, lambda rows: rows.per_second(rows.total("generated_tokens"))),
    _dynamo("total_throughput_tok_s", "tokens/s", 1, lambda rows: rows.per_second(_processed(rows))),
    _dynamo("total_input_tokens", "input", 0, lambda rows: rows.total("prompt_tokens")),
    _dynamo("total_output_tokens", "output", 0, lambda rows: rows.total("generated_tokens")),
    _dynamo("processed_tokens", "tokens", 0, _processed),
    _dynamo("prefix_cache_reused_ratio", "reused", 1, lambda rows: rows.of_prompts("reused_tokens")),
    _dynamo(
        "first_admission_prefix_cache_reused_ratio", "first", 1, lambda rows: rows.of_prompts("first_reused_tokens")
    ),
    _dynamo("onboarded_input_tokens", "onboarded", 0, lambda rows: rows.total("onboarded_tokens")),
    _long("num_ttft_samples", "with a token", 0, lambda rows: len(rows.values("ttft"))),
    _long("num_tpot_samples", "with two tokens", 0, lambda rows: len(rows.values("tpot"))),
    _long("num_e2e_latency_samples", "with a last token", 0, lambda rows: len(rows.values("e2e"))),
    _long("prefill_worker_seconds", "prefill s", -1, partial(_seconds, kind="prefill")),
    _long("decode_worker_seconds", "decode s", -1, partial(_seconds, kind="decode")),
    _long("prefill_gpus_per_worker", "prefill GPUs", 0, partial(_gpus, kind="prefill")),
    _long("decode_gpus_per_worker", "decode GPUs", 0, partial(_gpus, kind="decode")),
    _long("gpu_hours", "GPU hours", -1, _gpu_hours),
    *(
        Figure(f"balance_{each}", "max : mean", -1, partial(Rows.balance, of=each, measure=max_to_mean), "all")
        for each in BALANCED
    ),
    *(Figure(f"jain_{each}", "Jain", 1, partial(Rows.balance, of=each, measure=jain), "all") for each in BALANCED),
)
FIGURES: Final[Mapping[str, Figure]] = {figure.name: figure for figure in _ALL}
"""Every figure, by its name."""

PRINTED: Final = (
    *("requests", "hit_ratio", "of_best", "overlap_regret", "promised_not_found", "believed_not_found"),
    *(
        "prompt_tokens_computed",
        "device_tokens",
        "host_tokens",
        "storage_tokens",
        "blocks_evicted",
        "preemptions",
        "router_wait_ms",
        "engine_wait_ms",
    ),
    *("ttft_p50", "ttft_p95", "itl_p95", "tpot_p50", "e2e_p95", "goodput"),
)
"""The columns of a printed report, and of its page."""


def names_of(*shown: Shown) -> list[str]:
    """Return the names of the figures with one of these `shown`."""
    return [each.name for each in _ALL if each.shown in shown]


def check_figure(name: str) -> str:
    """Check and return the name of a figure.

    Raises:
        ValueError: no figure has this name.
    """
    if not isinstance(name, str) or name not in FIGURES:
        raise ValueError(unknown_text("figure", name, FIGURES))
    return name


# --------------------------------------------------------------------------------------------------------------- text


def figure_text(value: float | None) -> str:
    """Return a figure as text for messages and tables."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


def figure_columns(rows: Sequence[Figures], names: Iterable[str]) -> list[list[str]]:
    """Return the columns of a table of figures, with titles; a figure that no row has is left out."""
    shown = [name for name in names if any(row.get(name) is not None for row in rows)]
    return [[FIGURES[name].title, *(figure_text(row.get(name)) for row in rows)] for name in shown]


def folded(named: Sequence[Sequence[str]], columns: Iterable[Sequence[str]]) -> str:
    """Return a table of at most `MOST_WIDE` characters; columns that do not fit follow below.

    Args:
        named: the columns that name a row, which each part repeats.
        columns: the other columns.
    """
    first = sum(2 + max(map(len, column)) for column in named) - 2
    parts, wide = [[*named]], first
    for column in columns:
        width = 2 + max(map(len, column))
        if wide + width > MOST_WIDE and len(parts[-1]) > len(named):
            parts.append([*named])
            wide = first
        parts[-1].append(column)
        wide += width
    return "\n".join(aligned(zip(*part, strict=True)) for part in parts)


def digest_of(rows: Sequence[object]) -> str:
    """Return a digest of rows, of eight digits."""
    return sha256(repr(rows).encode()).hexdigest()[:8]


def trace_digest(turns: Iterable[Asked], block_size: int) -> str:
    """Return a digest of eight digits that is equal for two traces with the same requests: prompts, lengths, times,
    sessions, priorities, and aborts.

    Args:
        turns: the requests of a trace, in its order.
        block_size: tokens per block of the engines, by which prompts are hashed.
    """
    found = sha256()
    for turn in turns:
        asked, prompt = turn.trace, turn.prompt
        times, last = (asked.timestamp, asked.delay, asked.session_id, asked.priority), prompt.last_hash(block_size)
        sizes = prompt.length(block_size), asked.output_length
        found.update(repr(([] if last is None else [last], *sizes, *times)).encode())
        called_off = getattr(turn, "abort_after_ms", None), getattr(turn, "abort_after_tokens", None)
        if called_off != (None, None):
            found.update(repr(called_off).encode())
        prompt.release()
    return found.hexdigest()[:8]
