"""Performance models, which predict the prefill and decode times of one pass, and sums of virtual time.

A model returns milliseconds as a float, neither rounded nor divided by a speedup: `rounded_ms` does both.
Rules and figures are those of Dynamo's mocker 1.2.1, equal to the bit, and of 1.6.1 if `semantics` says so.

There is no clock here. As in Dynamo's mocker, a time is a number of milliseconds that the caller passes. Sums are equal
to the mocker's to the bit: a duration is rounded to whole nanoseconds when it is made, and again when a speedup divides
it (`Duration::from_secs_f64`: exact, ties to even). It is added to a time as its seconds times 1,000.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, Literal, Protocol, SupportsFloat, TypeAlias, TypeGuard, runtime_checkable

from pytest_kvmock.values.checks import not_allowed_text

Semantics: TypeAlias = Literal["1.2.1", "1.6.1"]
"""The release of Dynamo whose rules apply."""

SEMANTICS: Final[tuple[Semantics, ...]] = ("1.2.1", "1.6.1")


@runtime_checkable
class PerformanceModel(Protocol):
    """Predicts the duration of a pass. Any object with these two methods is a performance model."""

    def prefill_ms(self, batch: int, isl: int, prefix: int) -> float:
        """Return the duration of the prefill of a pass.

        Args:
            batch: number of requests with prompt tokens in this pass.
            isl: mean number of their prompt tokens up to the end of the pass, reused tokens included, rounded down.
            prefix: mean number of the tokens that were computed or reused before, rounded down.

        Returns:
            Milliseconds: finite, at least 0.
        """

    def decode_ms(self, active_kv_tokens: int, total_kv_tokens: int, context_length: int) -> float:
        """Return the duration of the decode step of a pass.

        Args:
            active_kv_tokens: tokens of the blocks in use; from 1.6.1 on, the sum of the lengths of the requests that
                get a token.
            total_kv_tokens: tokens of all blocks.
            context_length: mean length of the requests that get a token, in tokens, rounded down.

        Returns:
            Milliseconds: finite, at least 0.
        """


def _check_semantics(semantics: object) -> None:
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics: {not_allowed_text(semantics, SEMANTICS)}")


@dataclass(frozen=True, slots=True)
class PolynomialModel:
    """Dynamo's default model: polynomials of the new tokens, and of the share of the cache in use.

    With n = batch * (isl - prefix) new tokens, prefill takes 4.209989e-07 n² + 1.518344e-02 n + 16.50142 ms. With a
    share p of the KV cache in use, decode takes -25.74 p² + 54.01 p + 5.74 ms, at least 1.

    Attributes:
        semantics: in "1.2.1", a prefill without new tokens takes the constant, and p may exceed 1; later it takes 0 ms,
            and p is at most 1.

    Raises:
        ValueError: `semantics` is unknown.
    """

    semantics: Semantics = "1.2.1"

    def __post_init__(self) -> None:
        _check_semantics(self.semantics)

    def prefill_ms(self, batch: int, isl: int, prefix: int) -> float:
        """Return the duration of the prefill of a pass; see `PerformanceModel`."""
        tokens = batch * max(0, isl - prefix)
        if not tokens and self.semantics != "1.2.1":
            return 0.0
        new = float(tokens)
        return 4.209989e-07 * (new * new) + 1.518344e-02 * new + 16.50142

    def decode_ms(self, active_kv_tokens: int, total_kv_tokens: int, context_length: int) -> float:  # noqa: ARG002 - the protocol's
        """Return the duration of the decode step of a pass; see `PerformanceModel`."""
        share = active_kv_tokens / (total_kv_tokens or 1)
        if share > 1.0 and self.semantics != "1.2.1":
            share = 1.0
        # As in the original, the square comes first: -25.74 * p * p differs in the last bit.
        return max(1.0, -25.74 * (share * share) + 54.01 * share + 5.74)


@dataclass(frozen=True, slots=True)
class InterpolatedModel:
    """A model that interpolates measured times: prefill by new tokens, decode by tokens in use and context length.

    It is linear between points (decode: bilinear), and extrapolates with the outermost segments. Prefill takes at least
    0 ms, decode at least 1 ms.

    Attributes:
        prefill_isl: numbers of tokens, strictly ascending, at least two.
        prefill_ttft_ms: prefill times, one for each of `prefill_isl`.
        decode_active_kv_tokens: numbers of tokens in use, strictly ascending, at least two.
        decode_context_length: numbers of tokens, strictly ascending, at least two.
        decode_itl: times of a decode step in ms: a row for each of `decode_active_kv_tokens`, with a time for each of
            `decode_context_length`.
        semantics: in "1.2.1", a prefill without new tokens is also extrapolated; later it takes 0 ms.

    Raises:
        ValueError: lengths do not fit, an axis does not ascend or has fewer than two points, a number is not finite, or
            `semantics` is unknown.
    """

    prefill_isl: Sequence[float]
    prefill_ttft_ms: Sequence[float]
    decode_active_kv_tokens: Sequence[float]
    decode_context_length: Sequence[float]
    decode_itl: Sequence[Sequence[float]]
    semantics: Semantics = "1.2.1"

    def __post_init__(self) -> None:
        _check_semantics(self.semantics)
        for name in ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        for name in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length"):
            _check_axis(name, getattr(self, name))
        _check_length("prefill_ttft_ms", self.prefill_ttft_ms, "prefill_isl", self.prefill_isl)
        if not isinstance(self.decode_itl, Iterable):
            raise ValueError(f"decode_itl must be a sequence of rows of numbers, got {self.decode_itl!r:.80}")  # noqa: TRY004 - one error
        rows = tuple(_numbers(f"decode_itl[{number}]", row) for number, row in enumerate(self.decode_itl))
        object.__setattr__(self, "decode_itl", rows)
        _check_length("decode_itl", rows, "decode_active_kv_tokens", self.decode_active_kv_tokens)
        for number, row in enumerate(rows):
            _check_length(f"decode_itl[{number}]", row, "decode_context_length", self.decode_context_length)

    @classmethod
    def from_npz(cls, path: str | PathLike[str], *, semantics: Semantics = "1.2.1") -> InterpolatedModel:
        """Read a profile file of Dynamo's planner: `.npz`, with an array for each attribute.

        Dynamo reads only float64; this method also reads float32, and integers of 32 and 64 bits.

        Raises:
            ValueError: the file does not exist or is not an `.npz` file, an array is missing or has a wrong shape or
                type, or its numbers break the rules above. The message has the path.
        """
        from pytest_kvmock.engines.schedulers.npz import read_npz  # imported on first use

        file = Path(fspath(path))
        arrays = read_npz(file, tuple(_DIMENSIONS))
        for name, dimensions in _DIMENSIONS.items():
            shape = arrays[name].shape
            if len(shape) != dimensions:
                raise ValueError(
                    f"{file}: {name} must have {dimensions} dimension{'s' * (dimensions > 1)}, got shape {shape}"
                )
        itl = arrays.pop("decode_itl")
        columns = itl.shape[1]
        rows = [itl.values[row * columns : (row + 1) * columns] for row in range(itl.shape[0])]
        try:
            return cls(**{name: array.values for name, array in arrays.items()}, decode_itl=rows, semantics=semantics)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def prefill_ms(self, batch: int, isl: int, prefix: int) -> float:
        """Return the duration of the prefill of a pass; see `PerformanceModel`."""
        tokens = batch * max(0, isl - prefix)
        if not tokens and self.semantics != "1.2.1":
            return 0.0
        axis, times = self.prefill_isl, self.prefill_ttft_ms
        left = _segment(axis, tokens)
        return max(0.0, _line(axis[left], times[left], axis[left + 1], times[left + 1], tokens))

    def decode_ms(self, active_kv_tokens: int, total_kv_tokens: int, context_length: int) -> float:  # noqa: ARG002 - the protocol's
        """Return the duration of the decode step of a pass; see `PerformanceModel`."""
        active, context, times = self.decode_active_kv_tokens, self.decode_context_length, self.decode_itl
        row, column = _segment(active, active_kv_tokens), _segment(context, context_length)
        # In the original's order, first along the tokens in use: the other order differs in the last bits.
        below, above = (
            _line(active[row], times[row][at], active[row + 1], times[row + 1][at], active_kv_tokens)
            for at in (column, column + 1)
        )
        return max(1.0, _line(context[column], below, context[column + 1], above, context_length))


_DIMENSIONS: Final = {
    "prefill_isl": 1,
    "prefill_ttft_ms": 1,
    "decode_active_kv_tokens": 1,
    "decode_context_length": 1,
    "decode_itl": 2,
}
"""The arrays of a profile file."""


def _segment(axis: Sequence[float], at: float) -> int:
    """Return the number of the segment of the axis that has a point; the outermost segments have no end."""
    return min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)


def _line(x1: float, y1: float, x2: float, y2: float, x: float) -> float:
    """Return y at x on the line through two points (ndarray-interp: slope first, from the left point)."""
    return (y2 - y1) / (x2 - x1) * (x - x1) + y1


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a sequence of numbers, got {values!r:.80}") from None
    for position, value in enumerate(numbers):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{position}] must be a finite number, got {value}")
    return numbers


def _check_axis(name: str, axis: Sequence[float]) -> None:
    if len(axis) < 2:
        raise ValueError(f"{name} must have at least 2 points, got {len(axis)}")
    for position, (one, next_one) in enumerate(pairwise(axis)):
        if not one < next_one:
            raise ValueError(f"{name} must be strictly ascending, got {one} at {position} and {next_one} after it")


def _check_length(name: str, values: Sequence[Any], axis_name: str, axis: Sequence[float]) -> None:
    if len(values) != len(axis):
        raise ValueError(f"{name} must have one entry for each of the {len(axis)} of {axis_name}, got {len(values)}")


PrefillTime: TypeAlias = Callable[[int, int, int], float] | float
DecodeTime: TypeAlias = Callable[[int, int, int], float] | float


@dataclass(frozen=True, slots=True)
class CallableModel:
    """A model of two callables, or of constant times.

    With `CallableModel(prefill=lambda batch, isl, prefix: batch * (isl - prefix) * 0.5, decode=10)`, a prompt token
    takes half a millisecond, and every decode step 10 ms.

    Attributes:
        prefill: called with `batch`, `isl` and `prefix` of `PerformanceModel.prefill_ms`; or a number of milliseconds.
        decode: called with `active_kv_tokens`, `total_kv_tokens` and `context_length` of `decode_ms`; or a number.

    Raises:
        ValueError: one of them is neither callable nor a finite number of at least 0, or it returns no such number when
            it is called.
    """

    prefill: PrefillTime
    decode: DecodeTime

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            value = getattr(self, name)
            if not callable(value) and not _is_time(value):
                raise ValueError(f"{name} must be callable, or {_A_TIME}, got {value!r:.80}")

    def prefill_ms(self, batch: int, isl: int, prefix: int) -> float:
        """Return the duration of the prefill of a pass; see `PerformanceModel`.

        Raises:
            ValueError: the callable did not return a finite number of at least 0.
        """
        if not callable(self.prefill):
            return float(self.prefill)
        ms = self.prefill(batch, isl, prefix)
        if _is_time(ms):
            return float(ms)
        raise ValueError(f"prefill time for {batch=}, {isl=}, {prefix=} must be {_A_TIME}, got {ms!r:.80}")

    def decode_ms(self, active_kv_tokens: int, total_kv_tokens: int, context_length: int) -> float:
        """Return the duration of the decode step of a pass; see `PerformanceModel`.

        Raises:
            ValueError: the callable did not return a finite number of at least 0.
        """
        if not callable(self.decode):
            return float(self.decode)
        ms = self.decode(active_kv_tokens, total_kv_tokens, context_length)
        if _is_time(ms):
            return float(ms)
        given = f"{active_kv_tokens=}, {total_kv_tokens=}, {context_length=}"
        raise ValueError(f"decode time for {given} must be {_A_TIME}, got {ms!r:.80}")


_A_TIME: Final = "a finite number of milliseconds of at least 0"


def _is_time(value: object) -> TypeGuard[SupportsFloat]:
    return isinstance(value, SupportsFloat) and not isinstance(value, bool) and 0.0 <= float(value) < math.inf


def make_performance_model(given: object, semantics: Semantics = "1.2.1") -> PerformanceModel:
    """Return the performance model for a user's argument.

    Args:
        given: None for the polynomial model; or a `PerformanceModel` (if it is the user's own, its results are
            checked); or a pair of callables or of milliseconds for `CallableModel`.
        semantics: semantics of the polynomial model.

    Raises:
        ValueError: the argument is none of these.
    """
    if given is None:
        return PolynomialModel(semantics)
    if isinstance(given, PolynomialModel | InterpolatedModel | CallableModel):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        return CallableModel(*given)
    if not isinstance(given, type) and isinstance(given, PerformanceModel):
        return CallableModel(given.prefill_ms, given.decode_ms)
    raise ValueError(
        "performance_model must have the methods prefill_ms() and decode_ms(), or be a pair of callables or of "
        f"milliseconds (prefill, decode), or None, got {given!r:.80}"
    )


_NS: Final = 10**9
_NEAR_TIE: Final = 1e-3


def whole_nanoseconds(seconds: float) -> int:
    """Round to whole nanoseconds, exactly, ties to even.

    Raises:
        ValueError: the number is negative, infinite or NaN.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a duration must be a finite number of seconds of at least 0, got {seconds!r}")
    near = seconds * _NS
    if near < 2**40 and abs(near % 1.0 - 0.5) > _NEAR_TIE:  # the error of the product is far smaller
        return round(near)
    numerator, denominator = seconds.as_integer_ratio()
    whole, rest = divmod(numerator * _NS, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole & 1):
        whole += 1
    return whole


def _seconds(nanoseconds: int) -> float:
    """Return a duration in seconds (`Duration::as_secs_f64`): whole seconds, plus the rest divided."""
    whole, rest = divmod(nanoseconds, _NS)
    return whole + rest / _NS


@lru_cache(maxsize=4096)
def rounded_ms(ms: float, speedup: float = 1.0) -> float:
    """Round a duration, divide it by a speedup, and round it again.

    Args:
        ms: the duration in milliseconds.
        speedup: the divisor; 0 means no division (Dynamo's rule for `speedup_ratio`).

    Returns:
        Milliseconds, rounded to whole nanoseconds.

    Raises:
        ValueError: the duration is negative, infinite or NaN.
    """
    nanoseconds = whole_nanoseconds(ms / 1000)
    # A speedup of 1 divides nothing, and below 2**50 ns the second rounding changes nothing.
    if speedup > 0 and (speedup != 1.0 or nanoseconds >= 2**50):
        nanoseconds = whole_nanoseconds(_seconds(nanoseconds) / speedup)
    return _seconds(nanoseconds) * 1000.0


def moments(start_ms: float, step_ms: float, count: int) -> list[float]:
    """Return the ends of `count` passes of equal duration, summed one by one like single passes."""
    ends = accumulate(repeat(step_ms, count), initial=start_ms)
    next(ends)
    return list(ends)
