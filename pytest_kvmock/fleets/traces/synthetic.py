"""A seeded generator of traces of the Mooncake form."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, TypeAlias

from pytest_kvmock.fleets.traces.mooncake import MOONCAKE_BLOCK_SIZE, TraceRequest
from pytest_kvmock.values.checks import check_integer, unknown_text
from pytest_kvmock.values.tokens import check_block_size

Range: TypeAlias = tuple[int, int]
"""Lowest and highest value of a uniform draw, both included."""


Arrival: TypeAlias = Literal["uniform", "poisson"]
"""How sessions begin: at intervals from 0 to twice the mean, or as a Poisson process."""

ARRIVALS: Final = ("uniform", "poisson")


def synthetic_trace(
    requests: int | None = None,
    *,
    seed: int = 0,
    block_size: int = MOONCAKE_BLOCK_SIZE,
    sessions: int | None = None,
    arrival: Arrival = "uniform",
    groups: int = 8,
    prefix_blocks: Range = (1, 4),
    turns: Range = (1, 3),
    input_tokens: Range = (100, 4_000),
    output_tokens: Range = (50, 600),
    interval_ms: int = 1_000,
    delay_ms: Range = (1_000, 30_000),
) -> Iterator[TraceRequest]:
    """Generate a trace of the Mooncake form: conversations of several turns that begin with one of a few prefixes.

    Each session begins with the prefix of its group (a system prompt, say). A turn's prompt is the session so far,
    outputs included, plus the new input. Sessions overlap; the trace is in the order of arrival.

    As in the published traces, an id has exactly one parent and one place, ids are dense from 0 in the order of their
    first appearance, and timestamps never go back. With the defaults, about half of all block references name a block
    of an earlier request, and a prompt has 4,900 tokens or 10 ids on average.

    The same arguments give the same trace on any Python and platform: all draws use `Random(seed).random()`, the only
    method whose sequence Python guarantees. Memory grows with the open sessions, not with the trace.

    Args:
        requests: number of requests, at least 1. A larger number continues the same trace. None: all of the `sessions`.
        seed: of the generator, from 0.
        block_size: tokens for each hash id.
        sessions: number of sessions, at least 1; the trace ends with their last turn. None: as many as `requests`
            needs.
        arrival: how sessions begin.
        groups: number of shared prefixes. The first ones are the most popular: half of the sessions take one of the
            first quarter.
        prefix_blocks: blocks in a group's prefix, drawn once for each group; (0, 0) for no shared prefix.
        turns: turns of a session, at least 1.
        input_tokens: new tokens that a turn adds to its prompt, at least 1.
        output_tokens: tokens that a turn generates.
        interval_ms: mean time from the start of one session to the next, in milliseconds. Draws of a Poisson process
            are rounded to milliseconds.
        delay_ms: time from a turn to the next one of its session, in milliseconds. Generation counts as instant: the
            timestamp of a later turn is that of the previous turn plus its delay.

    Returns:
        An iterator over the requests.

    Raises:
        TypeError: an argument is not an integer or a pair of integers.
        ValueError: an argument is too small, or the first of a pair larger than the second; neither requests nor
            sessions are given, or `arrival` is unknown.
    """
    if requests is None and sessions is None:
        raise ValueError("synthetic_trace takes requests, sessions=, or both, got neither")
    if requests is not None:
        _check_int("requests", requests, 1, "requests")
    if sessions is not None:
        _check_int("sessions", sessions, 1, "sessions")
    if arrival not in ARRIVALS:
        raise ValueError(unknown_text("arrival", arrival, ARRIVALS))
    _check_int("seed", seed, 0, "of the generator")
    check_block_size(block_size)
    _check_int("groups", groups, 1, "shared prefixes")
    _check_int("interval_ms", interval_ms, 0, "milliseconds")
    _check_range("prefix_blocks", prefix_blocks, 0, "blocks")
    _check_range("turns", turns, 1, "turns a session")
    _check_range("input_tokens", input_tokens, 1, "tokens")
    _check_range("output_tokens", output_tokens, 0, "tokens")
    _check_range("delay_ms", delay_ms, 0, "milliseconds")
    workload = _Workload(
        Random(seed),  # noqa: S311 - a workload, not a secret
        block_size, sessions, arrival, groups, prefix_blocks, turns, input_tokens, output_tokens, interval_ms, delay_ms,
    )  # fmt: skip
    return workload.requests(requests)


_PREFIX_TOKENS: Final = 4 * MOONCAKE_BLOCK_SIZE
_TURNS: Final = 3
_INPUT_TOKENS: Final = 4_000
_OUTPUT_TOKENS: Final = 600
_LONGEST_PROMPT: Final = _PREFIX_TOKENS + _TURNS * _INPUT_TOKENS + (_TURNS - 1) * _OUTPUT_TOKENS
"""Tokens of the longest prompt that `synthetic_trace` makes with its defaults."""


def fitting_trace(requests: int, most_tokens: int, *, seed: int = 0, block_size: int) -> Iterator[TraceRequest]:
    """Generate a trace like that of `synthetic_trace`, with no prompt of more than `most_tokens`.

    If the default prompts fit and blocks have 512 tokens, it is the same trace. Otherwise prompts, outputs and the
    times between them shrink together, so that the same number of requests overlap.

    Args:
        requests: number of requests.
        most_tokens: the most tokens of a prompt, at least 1.
        seed: of the generator, from 0.
        block_size: tokens for each hash id.
    """
    longest = min(most_tokens, _LONGEST_PROMPT)
    prefix = _PREFIX_TOKENS * longest // _LONGEST_PROMPT // block_size
    if not prefix and longest >= 2 * block_size:
        prefix = 1  # without a shared prefix there is little to cache
    own = longest - prefix * block_size
    turns = _TURNS if own >= 2 * _TURNS - 1 else 1  # each input and each output has at least one token
    own_at_most = _LONGEST_PROMPT - _PREFIX_TOKENS
    outputs = max(1, _OUTPUT_TOKENS * own // own_at_most)
    inputs = (own - (turns - 1) * outputs) // turns
    return synthetic_trace(
        requests,
        seed=seed,
        block_size=block_size,
        prefix_blocks=(max(min(1, prefix), prefix // 4), prefix),
        turns=(1, turns),
        input_tokens=(max(1, inputs // 40), inputs),
        output_tokens=(max(1, outputs // 12), outputs),
        interval_ms=max(1, 1_000 * longest // _LONGEST_PROMPT),
        delay_ms=(1_000 * longest // _LONGEST_PROMPT, 30_000 * longest // _LONGEST_PROMPT),
    )


@dataclass(slots=True)
class _Session:
    name: str
    blocks: list[int]  # ids of the full blocks that a request has named so far
    length: int  # tokens so far: prefix, inputs and outputs
    turns_left: int
    delay: int | None = None


@dataclass(slots=True)
class _Workload:
    rng: Random
    block_size: int
    sessions: int | None
    arrival: Arrival
    groups: int
    prefix_blocks: Range
    turns: Range
    input_tokens: Range
    output_tokens: Range
    interval_ms: int
    delay_ms: Range
    next_id: int = 0

    def requests(self, count: int | None) -> Iterator[TraceRequest]:
        prefix_lengths = [self._draw(self.prefix_blocks) for _ in range(self.groups)]
        prefixes: list[list[int]] = [[] for _ in range(self.groups)]  # ids, from the group's first request on
        waiting: list[tuple[int, int, _Session]] = []  # (arrival, session number, session): next turns
        started = made = 0
        next_start = 0
        while made != count:
            all_began = started == self.sessions
            if all_began and not waiting:
                return
            if waiting and (all_began or waiting[0][0] <= next_start):
                now, number, session = heapq.heappop(waiting)
            else:
                now, number = next_start, started
                group = int(self.groups * self.rng.random() ** 2)
                prefix = prefixes[group]
                prefix.extend(self._new_ids(prefix_lengths[group] - len(prefix)))
                length = prefix_lengths[group] * self.block_size
                session = _Session(f"session_{number}", list(prefix), length, self._draw(self.turns))
                started += 1
                next_start += self._interval()
            made += 1
            yield self._turn(session, now)
            if session.turns_left:
                session.delay = self._draw(self.delay_ms)
                heapq.heappush(waiting, (now + session.delay, number, session))

    def _turn(self, session: _Session, now: int) -> TraceRequest:
        input_length = session.length + self._draw(self.input_tokens)
        output_length = self._draw(self.output_tokens)
        session.blocks.extend(self._new_ids(input_length // self.block_size - len(session.blocks)))
        tail = self._new_ids(1) if input_length % self.block_size else ()
        session.length = input_length + output_length
        session.turns_left -= 1
        delay = None if session.delay is None else float(session.delay)
        ids = (*session.blocks, *tail)
        return TraceRequest(
            float(now), input_length, output_length, ids, session.name, delay, block_size=self.block_size
        )

    def _new_ids(self, count: int) -> range:
        first, self.next_id = self.next_id, self.next_id + count
        return range(first, self.next_id)

    def _interval(self) -> int:
        if self.arrival == "poisson":
            return round(-math.log(1.0 - self.rng.random()) * self.interval_ms)
        return self._draw((0, 2 * self.interval_ms))

    def _draw(self, bounds: Range) -> int:
        low, high = bounds
        return low + int(self.rng.random() * (high - low + 1))


def _check_int(name: str, value: object, least: int, unit: str) -> None:
    check_integer(name, value, least, f" ({unit})", wrong_type=TypeError)


def _check_range(name: str, value: object, least: int, unit: str) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of integers (lowest, highest; {unit}), got {value!r}")
    low, high = value
    _check_int(f"the lowest of {name}", low, least, unit)
    _check_int(f"the highest of {name}", high, low, unit)
