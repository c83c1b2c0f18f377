"""What routing was worth, by plain rows: picks and counts by worker in, shares, balance and failure texts out.

No fleet is needed: whoever notes for each request what the chosen worker held of its prompt and what the best one did, and how many
requests each worker got, has the same figures and the same assertions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.checks import check_number

if TYPE_CHECKING:
    from pytest_kvmock.router.routing import Worker


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


def rates(counts: Mapping[Worker, float], alive: Mapping[Worker, float] | None = None) -> dict[Worker, float]:
    """Return the count of each worker over the share of the time that it was there.

    Args:
        counts: how much each worker got.
        alive: for which share of the time it was there, from 0 to 1; one of 0 is left out. None: all the time.
    """
    if alive is None:
        return dict(counts)
    return {worker: count / alive[worker] for worker, count in counts.items() if alive.get(worker)}


def max_to_mean(counts: Mapping[Worker, float], alive: Mapping[Worker, float] | None = None) -> float | None:
    """Return by how much the worker with the most has more than the mean, by the time that each was there; None where nobody has any.

    The mean is that of all counts over all shares, so that a worker which was there for a moment weighs as much.
    """
    found = rates(counts, alive)
    there = len(found) if alive is None else sum(alive[worker] for worker in found)
    total = sum(counts[worker] for worker in found)
    return max(found.values()) / (total / there) if total else None


def jain(counts: Mapping[Worker, float], alive: Mapping[Worker, float] | None = None) -> float | None:
    """Return Jain's index of fairness: 1 where all have the same, 1 / n where one of n has all; None where nobody has any.

    A worker weighs as much as the share of the time that it was there.
    """
    found = rates(counts, alive)
    weights = dict.fromkeys(found, 1.0) if alive is None else alive
    there = sum(weights[worker] for worker in found)
    squares = sum(weights[worker] * each * each for worker, each in found.items())
    return sum(weights[worker] * each for worker, each in found.items()) ** 2 / (there * squares) if squares else None


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as a table, each column to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# ------------------------------------------------------------------------------------------------------ assertions


def check_share(name: str, value: object, most: float = 1.0) -> float:
    """Return what an assertion requires as a share, if it is one.

    Raises:
        ValueError: it is no number from 0 to `most`.
    """
    return check_number(name, value, 0.0, most)


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


def assert_balanced(
    of: str, counts: Mapping[Worker, float], within: float, alive: Mapping[Worker, float] | None = None, row: str = ""
) -> None:
    """Fail where one worker has more than so many times the mean.

    Args:
        of: what is counted.
        counts: how much of it each worker got.
        within: how many times the mean it may be.
        alive: see `rates`.
        row: more on the worker, for the message.

    Raises:
        AssertionError: one has more.
        ValueError: `within` is below 1, or nobody got any.
    """
    __tracebackhide__ = True
    check_number("assert_balanced: within", within, 1.0)
    value = max_to_mean(counts, alive)
    if value is None:
        raise ValueError(f"assert_balanced: no worker has any {of}: there was nothing to count")
    if value > within:
        found = rates(counts, alive)
        worker = max(found, key=found.__getitem__)
        shown = ", ".join(
            f"{each}: {counts[each]:g}" + (f" in {alive[each]:.0%} of the time" if alive and alive[each] < 1 else "")
            for each in found
        )
        raise AssertionError(
            f"worker {worker!r} has {value:.2f} times the mean of {of}, must be at most {within:g} times ({shown})"
            + (f"\n{row}" if row else "")
        )
