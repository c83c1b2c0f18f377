"""Checks of a replay's arguments before it starts: its engines, its requests, and whether these can ever fit.

Each error names the argument and the position in it, from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_kvmock.fleets.clock.arrivals import FleetRequest, Turn
from pytest_kvmock.fleets.clock.engine_aborts import check_abort
from pytest_kvmock.fleets.clock.engine_state import EngineSize, RequestTooLarge
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.report.rows import Objectives
from pytest_kvmock.fleets.traces.mooncake import Row, TraceRequest, disagreement
from pytest_kvmock.values.checks import check_integer, check_number, is_integer
from pytest_kvmock.values.tokens import Prompt

# --------------------------------------------------------------------------------------------------------- engines


def engines_of(name: str, engines: Iterable[MockEngine]) -> tuple[MockEngine, ...]:
    """Return the engines of one argument.

    Raises:
        TypeError: the argument cannot be iterated, or an item is not a `MockEngine`.
    """
    found = tuple(_iterated(name, engines, "MockEngine objects"))
    for position, engine in enumerate(found):
        if not isinstance(engine, MockEngine):
            raise TypeError(f"replay: {name}[{position}] must be a MockEngine, got {engine!r:.80}")
    return found


def check_engines(engines: Sequence[MockEngine], prefill: Sequence[MockEngine]) -> None:
    """Check that engines can take part in one replay together.

    Raises:
        ValueError: there is no engine; an engine is given twice, has open requests or the wrong worker type; or engines
            differ in a setting that must be the same.
    """
    if not engines:
        raise ValueError("replay: engines must be at least one, got none")
    everyone = [*prefill, *engines]
    if len(set(map(id, everyone))) < len(everyone):
        raise ValueError("replay: an engine is given twice; each takes part once")
    for engine in everyone:
        if not engine.is_idle or engine.is_in_pass:
            raise ValueError(f"replay: {engine!r} has open requests; engines must be idle")
    served = "decode" if prefill else "aggregated"
    why = "" if prefill else ": prefill is empty"
    for name, wanted, because, group in (("prefill", "prefill", "", prefill), ("engines", served, why, engines)):
        for engine in group:
            is_both = engine.args.worker_type == "both" and wanted != "aggregated"
            if engine.args.worker_type != wanted and not is_both:
                raise ValueError(
                    f"replay: {name} must have worker_type={wanted!r}, got {engine.args.worker_type!r}{because}"
                )
    size = engines[0].args.dp_size if engines[0].args.release.ranks_in_lock_step else 1
    if len(engines) % size or (size > 1 and prefill):
        raise ValueError(
            f"replay: in the semantics of 1.6.1 engines are the ranks of workers, dp_size={size} each, and take no "
            f"prefill engines next to them; got {len(engines)} engines and {len(prefill)} of prefill"
        )
    for field in ("block_size", "scheduler_semantics", "dp_size", "hand_over"):
        if len(values := {getattr(engine.args, field): None for engine in everyone}) > 1:
            raise ValueError(f"replay: all engines must have one {field}, got {', '.join(map(repr, values))}")


def check_settings(
    concurrency: int | None, arrival_speedup: float, trace_block_size: int | None, stop_ms: float | None
) -> None:
    """Check the arguments of `replay` that are numbers.

    Raises:
        ValueError: an argument is out of range, or not a number.
    """
    if concurrency is not None:
        check_integer("replay: concurrency", concurrency, 1, ", or None")
    if trace_block_size is not None:
        check_integer("replay: trace_block_size", trace_block_size, 1, " (tokens), or None")
    if stop_ms is not None and (not _is_finite(stop_ms) or stop_ms < 0):
        raise ValueError(
            f"replay: stop_ms must be a finite number of at least 0 (milliseconds), or None, got {stop_ms!r:.80}"
        )
    if not _is_finite(arrival_speedup) or arrival_speedup <= 0:
        raise ValueError(f"replay: arrival_speedup must be a finite number above 0, got {arrival_speedup!r:.80}")


def check_objectives(what: str, slo: object) -> Objectives:
    """Return the limits of good requests, after a check.

    Raises:
        TypeError: `slo` is not `Objectives`.
    """
    if not isinstance(slo, Objectives):
        raise TypeError(f"{what}: slo must be Objectives(ttft_ms=, itl_ms=, e2e_ms=), got {slo!r:.80}")
    return slo


# -------------------------------------------------------------------------------------------------------- requests


def turns_of(
    requests: Iterable[TraceRequest | FleetRequest],
    trace_block_size: int | None,
    block_size: int,
    *,
    least_output: int = 1,
    takes_hashes: bool = True,
    who: str = "replay",
) -> list[Turn]:
    """Return the requests of a trace, each with its prompt.

    Args:
        requests: the trace.
        trace_block_size: as `replay` takes it.
        block_size: the engines' block size.
        least_output: the fewest tokens of output that a request may ask for.
        takes_hashes: whether the engines take prompts of hashes; otherwise each prompt gets tokens.
        who: the beginning of messages; a "Fleet" also takes `FleetRequest` objects.

    Raises:
        TypeError: the trace cannot be iterated, or an item is not a request.
        ValueError: there is no request, or a field of a request is out of range.
    """
    turns: list[Turn] = []
    sessions: dict[str, float] = {}
    kinds = (TraceRequest,) if who == "replay" else (TraceRequest, FleetRequest)
    for position, request in enumerate(_iterated("requests", requests, "TraceRequest objects", who)):
        where = f"{who}: requests[{position}]"
        if not isinstance(request, kinds):
            hint = "; a prompt is sent by FleetRequest(prompt, output_tokens)" if isinstance(request, Prompt) else ""
            raise TypeError(
                f"{where} must be a {' or '.join(each.__name__ for each in kinds)}, got {request!r:.80}{hint}"
            )
        if isinstance(request, TraceRequest):
            check_integer(f"{where}: input_length", request.input_length, 1, " (tokens)")
        check_integer(f"{where}: output_length", request.output_length, least_output, " (tokens)")
        _check_times(where, request, sessions)
        if isinstance(request, FleetRequest):
            check_abort(f"{where}: ", request.abort_after_ms, request.abort_after_tokens)
            if request.retry_after_ms is not None:
                check_number(f"{where}: retry_after_ms", request.retry_after_ms, unit=" (milliseconds), or None")
        try:
            if isinstance(request, FleetRequest):
                prompt = _own_prompt(request, block_size)
            else:
                if len(request.hash_ids) != -(-request.input_length // (trace_block_size or block_size)):
                    before = [turn.trace for turn in turns]
                    wrong = _wrong_ids(request, trace_block_size, block_size, before, requests)
                    raise ValueError(wrong)  # noqa: TRY301 - it gets its place below
                tokens = True if trace_block_size is not None or not takes_hashes else None
                prompt = request.prompt(trace_block_size or block_size, tokens=tokens)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}: {error}") from None
        turns.append(Turn(request, prompt))
    if not turns:
        raise ValueError(f"{who}: there is no request{_read_once(requests)}")
    return turns


def _check_times(where: str, request: TraceRequest | FleetRequest, sessions: dict[str, float]) -> None:
    """Check the times of a request; note the last timestamp of its session.

    Raises:
        ValueError: a time is not finite, or the request comes before the previous request of its session.
    """
    timestamp, delay, session = request.timestamp, request.delay, request.session_id
    if timestamp is not None and not _is_finite(timestamp):
        raise ValueError(f"{where}: timestamp must be a finite number (milliseconds), or None, got {timestamp!r:.80}")
    if delay is not None and not (_is_finite(delay) and delay >= 0):
        raise ValueError(
            f"{where}: delay must be a finite number of at least 0 (milliseconds), or None, got {delay!r:.80}"
        )
    before = None if session is None else sessions.get(session)
    if delay and before is None:
        raise ValueError(f"{where}: delay must be 0 or None, as no turn of a session is before it, got {delay!r}")
    if session is None:
        return
    # Without a delay in the trace, it is the difference of timestamps (`link_sessions`); Dynamo's loader also refuses a
    # negative one.
    if before is not None and delay is None and timestamp is not None and timestamp < before:
        raise ValueError(
            f"{where}: timestamp must be at least {before!r}, that of the turn before it in session {session!r}, got "
            f"{timestamp!r}"
        )
    if timestamp is not None or before is None:
        sessions[session] = timestamp or 0.0


def _wrong_ids(
    request: TraceRequest,
    trace_block_size: int | None,
    block_size: int,
    before: Sequence[TraceRequest | FleetRequest],
    trace: Iterable[TraceRequest | FleetRequest],
) -> str:
    """Return the message for a request without one id for each block, with the setting that would fit.

    Args:
        request: the request.
        trace_block_size: as `replay` takes it.
        block_size: the engines' block size.
        before: the previous requests.
        trace: the trace; its longest prompt is used if it can be read twice.
    """
    size, row = (
        trace_block_size or block_size,
        Row(f"requests[{len(before)}]", request.input_length, len(request.hash_ids)),
    )
    whose = "the engines' block size" if trace_block_size is None else "trace_block_size"
    made = -(-row.tokens // size)
    wrong = f"a prompt of {row.tokens} tokens has {row.ids} hash ids, where {whose} of {size} makes {made}"
    rows = (
        Row(f"requests[{at}]", each.input_length, len(each.hash_ids))
        for at, each in enumerate(before)
        if isinstance(each, TraceRequest)
    )
    other = next((each for each in rows if each.disagrees(row)), None)
    if other is not None:
        return f"{wrong}; {disagreement(other, row)}"
    if row.fits_none:
        return f"{wrong}; a trace has one id for each block of a prompt"
    fits = request.block_size if row.least <= request.block_size <= row.most else row.least
    if trace_block_size is not None:
        return f"{wrong}; trace_block_size={fits} fits it"
    requests = trace if isinstance(trace, Sequence) else [request]
    longest = max(-(-each.input_length // fits) for each in requests if isinstance(each, TraceRequest))
    return (
        f"{wrong}; its ids are of {fits} tokens: give the engines blocks of that size, and enough, such as "
        f"four times the longest prompt (of a test: @pytest.mark.kvmock(block_size={fits}, num_blocks={4 * longest})), "
        f"or give trace_block_size={fits}, and prompts have tokens"
    )


def _own_prompt(request: FleetRequest, block_size: int) -> Prompt:
    prompt = Prompt.of(request.prompt)
    if not prompt.length(block_size):
        raise ValueError("prompt must have at least 1 token, got none")
    if not is_integer(request.priority):
        raise ValueError(f"priority must be an integer, got {request.priority!r:.80}")
    return prompt


# ----------------------------------------------------------------------------------------------------------- sizes


def check_sizes(
    turns: Iterable[Turn], engines: Iterable[MockEngine], prefill: Iterable[MockEngine] = (), who: str = "replay"
) -> None:
    """Check that each request fits each engine that may get it, or is rejected there; see `MockEngine.dispatch`.

    Raises:
        RequestTooLarge: prompt and output can never fit; it reports the largest such request.
    """
    serving, computing = _sizes(engines), _sizes(prefill)
    largest: RequestTooLarge | None = None
    for position, turn in enumerate(turns):
        where = f"{who}: requests[{position}]"
        try:
            if computing and not any(_accepts(size, turn, 1, where, "prefill") for size in computing):
                continue  # no decode engine gets it
            for size in serving:
                _accepts(size, turn, turn.trace.output_length, where, "engines")
        except RequestTooLarge as error:
            if largest is None or error.requested > largest.requested:
                largest = error
    if largest is not None:
        raise largest


def _sizes(engines: Iterable[MockEngine]) -> list[EngineSize]:
    """Return the different sizes of engines."""
    return list(dict.fromkeys(engine.size for engine in engines))


def _accepts(size: EngineSize, turn: Turn, output: int, where: str, engines: str) -> bool:
    """Return whether engines of this size accept a request with this output; False: they reject it."""
    prompt = turn.prompt.length(size.block_size)
    if size.rejects_prompt(prompt):
        return False
    size.check(prompt, output, f"{where} of {prompt} tokens and {output} of output", engines)
    return True


# ----------------------------------------------------------------------------------------------------------- values


def _iterated(name: str, values: Iterable[Any], wanted: str, who: str = "replay") -> Iterator[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{who}: {name} must be a sequence of {wanted}, got {values!r:.80}")
    return iter(values)


def _read_once(values: Iterable[Any]) -> str:
    """Return a text on why the trace may be empty, for a message."""
    if not isinstance(values, Iterator):
        return ""
    kind = type(values).__name__
    return f": the trace is a {kind} that has nothing left: it is empty after it was read once; a list is not"


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is not a float
        return False
