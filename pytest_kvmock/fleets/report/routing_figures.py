"""Figures of routing quality: functions from picks and counts by worker to shares, balance and failure texts.

You need no fleet. If you note for each request the blocks that the chosen worker and the best worker held, and how many
requests each worker got, you get the same figures and assertions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvmock.values.checks import check_number

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Worker


_MOST_SHARE: Final = (1.0, 0.75, 0.6, 0.5)
"""The largest share of the picks that one of 1, 2, 3 or 4 candidates may get; with more candidates, the limit is twice
the mean.

Measured: in busy fleets right routers gave one of two workers at most 0.64 of the requests, and one of three 0.58
(`tests/fleets/right_routers.py`).
"""

_TINY: Final = 1e-9


class Choice(NamedTuple):
    """One choice of a router.

    Attributes:
        worker: the chosen worker.
        selected: leading blocks of the prompt that it held at the pick.
        best: the most that any worker held at the pick.
    """

    worker: Worker
    selected: int
    best: int

    @property
    def regret(self) -> int:
        """Number of blocks that the best worker held beyond those of the chosen worker."""
        return max(0, self.best - self.selected)


def share(part: float, whole: float) -> float | None:
    """Return a part as a share of a whole; None if there is no whole."""
    return part / whole if whole else None


def of_best(choices: Iterable[Choice]) -> float | None:
    """Return the blocks that chosen workers held, as a share of those that the best workers held; None if no worker
    held any.
    """
    selected = best = 0
    for choice in choices:
        selected += choice.selected
        best += choice.best
    return share(selected, best)


def worst_choice(choices: Sequence[Choice]) -> int | None:
    """Return the position of the first choice with the largest regret; None if no choice has regret."""
    at = max(range(len(choices)), key=lambda each: (choices[each].regret, -each), default=None)
    return at if at is not None and choices[at].regret else None


class Most(NamedTuple):
    """The worker that got the most for the time that it was a candidate.

    Attributes:
        worker: the worker.
        times: its rate over the mean rate; see `rates`.
    """

    worker: Worker
    times: float


def rates(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> dict[Worker, float]:
    """Return each worker's rate: its count, divided by the share of the picks at which it was a candidate.

    Args:
        counts: how much each worker got.
        there: the share of the picks at which each worker was a candidate, from 0 to 1; a worker with 0 is left out.
            None: each worker was one at all picks.
    """
    if there is None:
        return dict(counts)
    return {worker: count / there[worker] for worker, count in counts.items() if there.get(worker)}


def candidates(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float:
    """Return the mean number of candidates per pick. `rates` explains the arguments."""
    return len(counts) if there is None else sum(there.get(worker, 0.0) for worker in counts)


def most(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> Most | None:
    """Return the worker with the highest rate, the first of equals; None if all counts are 0.

    The mean rate is the sum of all counts divided by the sum of all shares. `rates` explains the arguments.
    """
    found = rates(counts, there)
    total = sum(counts[worker] for worker in found)
    if not total:
        return None
    worker = max(found, key=found.__getitem__)
    return Most(worker, found[worker] / (total / candidates(counts, there)))


def max_to_mean(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float | None:
    """Return the highest rate divided by the mean rate; None if all counts are 0. See `most`."""
    found = most(counts, there)
    return None if found is None else found.times


def jain(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float | None:
    """Return Jain's index of fairness of the rates: 1 if all are equal, 1 / n if one of n workers got everything, None
    if all counts are 0.

    Each worker's weight is the share of the picks at which it was a candidate. `rates` explains the arguments.
    """
    found = rates(counts, there)
    weights = dict.fromkeys(found, 1.0) if there is None else there
    whole = candidates(found, weights)
    squares = sum(weights[worker] * each * each for worker, each in found.items())
    return sum(weights[worker] * each for worker, each in found.items()) ** 2 / (whole * squares) if squares else None


def got_nothing(of: str, counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> str:
    """Return a text that names the workers that got nothing although their fair share was at least 1; empty if there
    are none.

    Args:
        of: what is counted.
        counts: how much of it each worker got.
        there: see `rates`.
    """
    total, mean = sum(counts.values()), candidates(counts, there)
    idle = [worker for worker, count in counts.items() if not count and total * (there[worker] if there else 1) >= mean]
    if not total or not idle:
        return ""
    numbers = [worker for worker in idle if isinstance(worker, int)]
    if len(idle) > 2 and numbers == idle == list(range(numbers[0], numbers[-1] + 1)):
        named = f"{idle[0]} to {idle[-1]}"
    else:
        named = " and ".join(filter(None, (", ".join(map(repr, idle[:-1])), repr(idle[-1]))))
    return f"worker{'s' if len(idle) > 1 else ''} {named} got none of {total:g} {of}"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table, with columns aligned to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# ------------------------------------------------------------------------------------------------------ assertions


def check_share(name: str, value: object) -> float:
    """Return the share that an assertion requires, after a check.

    Raises:
        ValueError: it is not a number from 0 to 1.
    """
    return check_number(name, value, 0.0, 1.0)


def assert_at_least(what: str, value: float | None, least: float, row: str) -> None:
    """Fail if a figure is below its minimum.

    Args:
        what: name of the figure.
        value: its value; None if it has none.
        least: the minimum.
        row: the row of the report that the message quotes.

    Raises:
        AssertionError: the value is below the minimum.
        ValueError: the figure has no value.
    """
    __tracebackhide__ = True
    if value is None:
        raise ValueError(f"{what} has no value here: there was nothing to count")
    if value < least:
        raise AssertionError(f"{what} is {value:.4g}, must be at least {least:.4g}\n{row}")


def called_off_text(count: float | None, of: str = "requests") -> str:
    """Return a line with the number of a worker's called-off requests; empty if there are none, or if `of` is not
    "requests".
    """
    return f"{count:g} of its requests were called off\n" if count and of == "requests" else ""


def most_times(candidates: float) -> float:
    """Return how many times the mean one worker may get, by the mean number of candidates per pick.

    It is 2.0 for four or more candidates and less for fewer: one of two workers cannot get more than twice the mean.
    """
    if candidates >= len(_MOST_SHARE):
        return 2.0
    whole = max(1, int(candidates))
    low, high = _MOST_SHARE[whole - 1], _MOST_SHARE[whole]
    return candidates * (low + (candidates - whole) * (high - low))


def assert_balanced(
    of: str,
    counts: Mapping[Worker, float],
    within: float | None = None,
    there: Mapping[Worker, float] | None = None,
    row: Callable[[Worker], str] | None = None,
) -> None:
    """Fail if one worker has more than `within` times the mean; a single worker is balanced.

    Args:
        of: what is counted; "requests" count one for each pick.
        counts: how much of it each worker got.
        within: how many times the mean a worker may have; None: see `most_times`.
        there: see `rates`.
        row: returns a worker's row of the report, for the message.

    Raises:
        AssertionError: a worker has more.
        ValueError: `within` is below 1, or so large that no assignment to the workers there could break it; or no
            worker got any.
    """
    __tracebackhide__ = True
    if within is not None:
        check_number("assert_balanced: within", within, 1.0)
    shares = [share for share in (dict.fromkeys(counts, 1.0) if there is None else there).values() if share]
    number = candidates(counts, there)
    if shares and number <= 1 + _TINY:
        return
    found = most(counts, there)
    if found is None:
        raise ValueError(f"assert_balanced: no worker has any {of}: there was nothing to count")
    # A worker gets at most one request per pick, but one that was a candidate for a moment may get all the tokens.
    possible = number if of == "requests" else number / min(shares)
    if within is None:
        within = most_times(number)
    elif within >= possible - _TINY:
        mean = " on the mean" if min(shares) < 1 else ""
        raise ValueError(
            f"assert_balanced: within={within:g} can never fail: a pick had {number:.3g} candidates{mean}, so that no "
            "worker can have "
            f"more than {possible:.3g} times the mean of {of}; give less, or nothing for {most_times(number):.3g}"
        )
    if found.times > within + _TINY:
        shown = ", ".join(
            f"{each}: {counts[each]:g}"
            + (f", a candidate of {there[each]:.0%} of the picks" if there and there[each] < 1 else "")
            for each in rates(counts, there)
        )
        nothing = got_nothing(of, counts, there)
        raise AssertionError(
            (f"{nothing}; " if nothing else "")
            + f"worker {found.worker!r} has {found.times:.2f} times the mean of {of}, must be at most {within:.4g} "
            f"times ({shown})" + (f"\n{row(found.worker)}" if row else "")
        )
