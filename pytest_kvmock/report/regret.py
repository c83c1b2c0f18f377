"""What the picks of a router cost beyond the cheapest ones, by a reference selector that knew the true loads and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from pytest_kvmock.report.routing_figures import aligned

if TYPE_CHECKING:
    from pytest_kvmock.report.rows import PickRecord, Record
    from pytest_kvmock.router.routing import Candidate, RouterRequest


LOADS: Final = ("overlap", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting")
"""What is shown of a candidate."""


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Return the candidates as a table, for messages."""
    columns = ("worker", *LOADS)
    rows = [columns, *([str(getattr(each, name)) for name in columns] for each in candidates)]
    return aligned(rows)


class Selector(Protocol):
    """Says what a request costs on a worker: `DynamoRouter`, or one of your own. It may have `costs` and `explain` too."""

    def cost(self, request: RouterRequest, candidate: Candidate) -> float:
        """Return what a request costs on a candidate, in blocks; the least is best."""


class PickRegret(NamedTuple):
    """What one pick cost beyond the cheapest.

    Attributes:
        at: its place in `Report.picks`.
        blocks: how much more its worker cost than the cheapest, by the selector.
    """

    at: int
    blocks: float


class Regret:
    """The regret of all picks of a run.

    Args:
        selector: the reference.
        recorder: the picks, with what was true.

    Attributes:
        blocks: how much each pick cost beyond the cheapest, in blocks.
        picks: the picks that were not among the cheapest, in order.
        share: how many of all picks these are, from 0 to 1.
        mean: how much a pick cost beyond the cheapest, in blocks, over all picks.
        worst: the pick that cost most beyond the cheapest, the first of these; None where all were among the cheapest.
    """

    _NO_MORE = 1e-9

    def __init__(self, selector: Selector, recorder: Record) -> None:
        self._selector = selector
        self._recorder = recorder
        self.blocks = [_regret(selector, recorder.pick(at)) for at in range(len(recorder))]
        self.picks = [PickRegret(at, blocks) for at, blocks in enumerate(self.blocks) if blocks > self._NO_MORE]
        count = len(recorder)
        self.share = len(self.picks) / count if count else 0.0
        self.mean = sum(each.blocks for each in self.picks) / count if count else 0.0
        self.worst = max(self.picks, key=lambda each: (each.blocks, -each.at), default=None)

    def __repr__(self) -> str:
        return f"<Regret: {self.share:.1%} of {len(self._recorder)} picks, {self.mean:.3g} blocks a pick>"

    def __str__(self) -> str:
        name = type(self._selector).__name__
        text = (
            f"{len(self.picks)} of {len(self._recorder)} picks ({self.share:.2%}) were not among the cheapest by {name} "
            f"on true loads and true caches; {self.mean:.3g} blocks a pick"
        )
        if self.worst is None:
            return text
        return f"{text}. The worst cost {self.worst.blocks:.4g} blocks more than the cheapest:\n{self.explain()}"

    def explain(self, at: int | None = None) -> str:
        """Return a table of what each candidate of a pick would have cost, and who was picked.

        Args:
            at: the pick, by its place in `Report.picks`; None: the worst.
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


def check_selector(selector: Any) -> Selector:
    """Return a selector, if it is one.

    Raises:
        TypeError: it is a class, or has no method `cost`.
    """
    if isinstance(selector, type):
        raise TypeError(f"selector is the class {selector.__name__}; it must be an object, {selector.__name__}()")
    if not callable(getattr(selector, "cost", None)):
        raise TypeError(f"selector must have a method cost(request, candidate), got {selector!r:.80}")
    return cast("Selector", selector)


def selector_costs(selector: Selector, record: PickRecord) -> Sequence[float]:
    """Return what each candidate of a pick would have cost, by a selector."""
    costs = getattr(selector, "costs", None)
    if callable(costs):
        return cast("Sequence[float]", costs(record.request, record.candidates))
    return [selector.cost(record.request, each) for each in record.candidates]


def _regret(selector: Selector, record: PickRecord) -> float:
    """How much the chosen worker cost beyond the cheapest."""
    costs = selector_costs(selector, record)
    chosen = next(cost for each, cost in zip(record.candidates, costs, strict=True) if each.worker == record.chosen)
    return chosen - min(costs)
