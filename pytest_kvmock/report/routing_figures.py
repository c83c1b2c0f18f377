"""What routing was worth, by plain rows: picks and counts by worker in, shares, balance and failure texts out.

No fleet is needed: whoever notes for each request what the chosen worker held of its prompt and what the best one did, and how many
requests each worker got, has the same figures and the same assertions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvmock.checks import check_number

if TYPE_CHECKING:
    from pytest_kvmock.router.routing import Worker


_MOST_SHARE: Final = (1.0, 0.75, 0.6, 0.5)
"""The share of the picks that one worker may have of 1, 2, 3 and 4 candidates; of more it is twice the mean.

Measured: of two workers right routers gave one at most 0.64 of the requests, of three 0.58, where fleets are busy
(`tests/fleet/right_routers.py`).
"""

_TINY: Final = 1e-9


class Choice(NamedTuple):
    """One choice of a router.

    Attributes:
        worker: who was chosen.
        selected: leading blocks of the prompt that it held then.
        best: the most that any worker held then.
    """

    worker: Worker
    selected: int
    best: int

    @property
    def regret(self) -> int:
        """Blocks that the best worker held beyond those of the chosen one."""
        return max(0, self.best - self.selected)


def share(part: float, whole: float) -> float | None:
    """Return a part as a share of a whole; None where there is no whole."""
    return part / whole if whole else None


def of_best(choices: Iterable[Choice]) -> float | None:
    """Return the blocks that chosen workers held as a share of those that the best ones did; None where no worker held any."""
    selected = best = 0
    for choice in choices:
        selected += choice.selected
        best += choice.best
    return share(selected, best)


def worst_choice(choices: Sequence[Choice]) -> int | None:
    """Return the position of the choice that gave away most blocks, the first of these; None where none gave any away."""
    at = max(range(len(choices)), key=lambda each: (choices[each].regret, -each), default=None)
    return at if at is not None and choices[at].regret else None


class Most(NamedTuple):
    """The worker with the most.

    Attributes:
        worker: who.
        times: how many times the mean it has, by the share of the picks at which each was a candidate.
    """

    worker: Worker
    times: float


def rates(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> dict[Worker, float]:
    """Return the count of each worker over the share of the picks at which it was a candidate.

    Args:
        counts: how much each worker got.
        there: at which share of the picks it was a candidate, from 0 to 1; one of 0 is left out. None: at all.
    """
    if there is None:
        return dict(counts)
    return {worker: count / there[worker] for worker, count in counts.items() if there.get(worker)}


def candidates(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float:
    """Return how many candidates a pick had, on the mean; for the arguments see `rates`."""
    return len(counts) if there is None else sum(there.get(worker, 0.0) for worker in counts)


def most(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> Most | None:
    """Return the worker with the most, the first of these, for the time that it was there; None where nobody has any.

    The mean is that of all counts over all shares, so that a worker which was there for a moment weighs as much. For the arguments
    see `rates`.
    """
    found = rates(counts, there)
    total = sum(counts[worker] for worker in found)
    if not total:
        return None
    worker = max(found, key=found.__getitem__)
    return Most(worker, found[worker] / (total / candidates(counts, there)))


def max_to_mean(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float | None:
    """Return how many times the mean the worker with the most has; None where nobody has any. See `most`."""
    found = most(counts, there)
    return None if found is None else found.times


def jain(counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> float | None:
    """Return Jain's index of fairness: 1 where all have the same, 1 / n where one of n has all; None where nobody has any.

    A worker weighs as much as the share of the picks at which it was a candidate. For the arguments see `rates`.
    """
    found = rates(counts, there)
    weights = dict.fromkeys(found, 1.0) if there is None else there
    whole = candidates(found, weights)
    squares = sum(weights[worker] * each * each for worker, each in found.items())
    return sum(weights[worker] * each for worker, each in found.items()) ** 2 / (whole * squares) if squares else None


def got_nothing(of: str, counts: Mapping[Worker, float], there: Mapping[Worker, float] | None = None) -> str:
    """Return who got nothing of all that was to be had, as text; empty where nobody was due one and got none.

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
    """Return rows as a table, each column to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# ------------------------------------------------------------------------------------------------------ assertions


def check_share(name: str, value: object) -> float:
    """Return what an assertion requires as a share, if it is one.

    Raises:
        ValueError: it is no number from 0 to 1.
    """
    return check_number(name, value, 0.0, 1.0)


def assert_at_least(what: str, value: float | None, least: float, row: str) -> None:
    """Fail where a figure is less than it must be.

    Args:
        what: the figure, by its name.
        value: what it is; None: it has no value.
        least: what it must be at least.
        row: what broke it, for the message.

    Raises:
        AssertionError: it is less.
        ValueError: it has no value.
    """
    __tracebackhide__ = True
    if value is None:
        raise ValueError(f"{what} has no value here: there was nothing to count")
    if value < least:
        raise AssertionError(f"{what} is {value:.4g}, must be at least {least:.4g}\n{row}")


def called_off_text(count: float | None, of: str = "requests") -> str:
    """Return a line that says how many requests of a worker were called off; empty where none was, or where no requests are counted."""
    return f"{count:g} of its requests were called off\n" if count and of == "requests" else ""


def most_times(candidates: float) -> float:
    """Return how many times the mean one worker may have, by how many candidates picks have on the mean.

    2.0 from four candidates on; below that less, as of two no worker can have more than twice the mean.
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
    """Fail where one worker has more than so many times the mean; one that is alone is balanced.

    Args:
        of: what is counted; "requests" are one a pick.
        counts: how much of it each worker got.
        within: how many times the mean it may be; None: see `most_times`.
        there: see `rates`.
        row: returns more on the worker, for the message.

    Raises:
        AssertionError: one has more.
        ValueError: `within` is below 1, or so large that no assignment to who was there could break it; or nobody got any.
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
    # Of requests a worker gets one a pick at most; of tokens one that was there for a moment may have all.
    possible = number if of == "requests" else number / min(shares)
    if within is None:
        within = most_times(number)
    elif within >= possible - _TINY:
        mean = " on the mean" if min(shares) < 1 else ""
        raise ValueError(
            f"assert_balanced: within={within:g} can never fail: a pick had {number:.3g} candidates{mean}, so that no worker can have "
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
            + f"worker {found.worker!r} has {found.times:.2f} times the mean of {of}, must be at most {within:.4g} times ({shown})"
            + (f"\n{row(found.worker)}" if row else "")
        )
