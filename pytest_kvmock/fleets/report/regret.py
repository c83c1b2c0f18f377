"""The regret of a router's picks, and its choices among equal workers, by a selector with true loads and caches."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from pytest_kvmock.fleets.report.routing_figures import aligned

if TYPE_CHECKING:
    from pytest_kvmock.fleets.report.rows import PickRecord, Record
    from pytest_kvmock.fleets.routing.routing import Candidate, RouterRequest, Worker


_NO_MORE: Final = 1e-9
"""A cost within this many blocks of the least counts as the least, because floats may be added in another order."""

_LEAST_DUE: Final = 8
"""Minimum due, in picks, from which a worker is judged."""

_PART_OF_DUE: Final = 3
_MOST_OF_DUE: Final = 2.5
"""A worker must have got at least a third and at most 2.5 times its due: see `Report.assert_ties_shared`."""

LOADS: Final = ("overlap", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting")
"""The fields of a candidate in tables."""


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Return a table of candidates, for messages."""
    columns = ("worker", *LOADS)
    rows = [columns, *([str(getattr(each, name)) for name in columns] for each in candidates)]
    return aligned(rows)


class Selector(Protocol):
    """Computes the cost of a request on a worker: `DynamoRouter`, or your own. It may also have `costs` and
    `explain`.
    """

    def cost(self, request: RouterRequest, candidate: Candidate) -> float:
        """Return the cost of a request on a candidate, in blocks; the least is best."""


class PickRegret(NamedTuple):
    """The regret of one pick.

    Attributes:
        at: its position in `Report.picks`.
        blocks: the cost of its worker minus the least cost, by the selector.
    """

    at: int
    blocks: float


class Regret:
    """The regret of all picks of a run.

    Args:
        selector: the reference.
        recorder: the picks, with true values.

    Attributes:
        blocks: the regret of each pick, in blocks.
        picks: the picks that were not among the cheapest, in order.
        share: the share of such picks, from 0 to 1.
        mean: the mean regret of all picks, in blocks.
        worst: the first pick with the most regret; None if all were among the cheapest.
    """

    def __init__(self, selector: Selector, recorder: Record) -> None:
        self._selector = selector
        self._recorder = recorder
        self.blocks = [_regret(selector, recorder.pick(at)) for at in range(len(recorder))]
        self.picks = [PickRegret(at, blocks) for at, blocks in enumerate(self.blocks) if blocks > _NO_MORE]
        count = len(recorder)
        self.share = len(self.picks) / count if count else 0.0
        self.mean = sum(each.blocks for each in self.picks) / count if count else 0.0
        self.worst = max(self.picks, key=lambda each: (each.blocks, -each.at), default=None)

    def __repr__(self) -> str:
        return f"<Regret: {self.share:.1%} of {len(self._recorder)} picks, {self.mean:.3g} blocks a pick>"

    def __str__(self) -> str:
        name = type(self._selector).__name__
        text = (
            f"{len(self.picks)} of {len(self._recorder)} picks ({self.share:.2%}) were not among the cheapest by "
            f"{name} on true loads and true caches; {self.mean:.3g} blocks a pick"
        )
        if self.worst is None:
            return text
        return f"{text}. The worst cost {self.worst.blocks:.4g} blocks more than the cheapest:\n{self.explain()}"

    def explain(self, at: int | None = None) -> str:
        """Return a table of the cost of each candidate of a pick, with the chosen one.

        Args:
            at: position of the pick in `Report.picks`; None: the worst.
        """
        if at is None:
            if self.worst is None:
                return "every pick was among the cheapest"
            at = self.worst.at
        record = self._recorder.pick(at)
        explain = getattr(self._selector, "explain", None)
        if callable(explain):
            table = str(explain(record.request, record.candidates)).replace("<- chosen", "<- cheapest")
        else:
            costs = ", ".join(
                f"{each.worker!r}: {cost:g}"
                for each, cost in zip(record.candidates, selector_costs(self._selector, record), strict=True)
            )
            table = f"{record.request!r}\n{candidates_table(record.candidates)}\ncosts {costs}"
        differs = record.shown != tuple(each.overlap for each in record.candidates)
        told = f"; the router was shown overlaps {', '.join(map(str, record.shown))}" if differs else ""
        return f"{table}\nthe router picked {record.chosen!r}{told}"


class TieShare(NamedTuple):
    """One worker's share of the picks in which it tied with others for the least cost.

    Attributes:
        worker: the worker.
        due: the sum of 1/n over these picks, with n the number of tied workers.
        had: number of these picks that it got.
    """

    worker: Worker
    due: float
    had: int


def tie_shares(selector: Selector, recorder: Record) -> list[TieShare]:
    """Return the share of each worker that tied with others for the least cost, in the order of the first ties."""
    due: dict[Worker, Fraction] = {}
    had: dict[Worker, int] = {}
    for at in range(len(recorder)):
        record = recorder.pick(at)
        costs = selector_costs(selector, record)
        most = min(costs) + _NO_MORE
        tied = [each.worker for each, cost in zip(record.candidates, costs, strict=True) if cost <= most]
        if len(tied) < 2:
            continue
        for worker in tied:
            due[worker] = due.get(worker, Fraction()) + Fraction(1, len(tied))
            had[worker] = had.get(worker, 0) + (worker == record.chosen)
    return [TieShare(worker, float(due[worker]), had[worker]) for worker in due]


def assert_ties_shared(selector: Selector, recorder: Record, note: str = "") -> None:
    """Fail if a worker that often tied for the least cost got too few or too many of these picks.

    Args:
        selector: the reference.
        recorder: the picks, with true values.
        note: end of the message.

    Raises:
        AssertionError: a worker got too few or too many, or no workers ever tied.
    """
    __tracebackhide__ = True
    shares = tie_shares(selector, recorder)
    name = type(selector).__name__
    if not shares:
        raise AssertionError(
            f"nothing tied: at none of {len(recorder)} picks did several workers have the least cost by {name}"
        )
    judged = [each for each in shares if each.due >= _LEAST_DUE]
    over = [each for each in judged if each.had > _MOST_OF_DUE * each.due]
    under = [each for each in judged if each.had < each.due / _PART_OF_DUE]
    if over or under:
        worst = max(over or under, key=lambda each: abs(each.had / each.due - 1))
        shown = ", ".join(f"{each.worker!r}: {each.had} of {each.due:.3g}" for each in shares)
        raise AssertionError(
            f"worker {worst.worker!r} had {worst.had} of the picks in which it tied with others for the least cost by "
            f"{name}, and its due was "
            f"{worst.due:.3g}; must be from a third of that to {_MOST_OF_DUE:g} times that ({shown}){note}"
        )


def check_selector(selector: Any) -> Selector:
    """Check and return a selector.

    Raises:
        TypeError: it is a class, or has no method `cost`.
    """
    if isinstance(selector, type):
        raise TypeError(f"selector is the class {selector.__name__}; it must be an object, {selector.__name__}()")
    if not callable(getattr(selector, "cost", None)):
        raise TypeError(f"selector must have a method cost(request, candidate), got {selector!r:.80}")
    return cast("Selector", selector)


def stale_note(what: str, every_ms: float | None) -> str:
    """Return a note that the router saw polled loads while `what` uses true loads; "" if loads were not polled."""
    if every_ms is None:
        return ""
    return (
        f"\nnote: the router was shown the loads of the engines, up to {every_ms:g} ms old, and {what} by the true "
        "ones of the load book: a right router has some too"
    )


def selector_costs(selector: Selector, record: PickRecord) -> Sequence[float]:
    """Return the cost of each candidate of a pick, by a selector."""
    costs = getattr(selector, "costs", None)
    if callable(costs):
        return cast("Sequence[float]", costs(record.request, record.candidates))
    return [selector.cost(record.request, each) for each in record.candidates]


def _regret(selector: Selector, record: PickRecord) -> float:
    """Return the cost of the chosen worker minus the least cost."""
    costs = selector_costs(selector, record)
    chosen = next(cost for each, cost in zip(record.candidates, costs, strict=True) if each.worker == record.chosen)
    return chosen - min(costs)
