"""Thirteen bugs planted in a correct router, to check your own checks, each with the rule that finds it.

A bug changes one thing in `pytest_kvmock.testing.RightRouter`; `ROUTER_BUGS` has them by name::

    router = ROUTER_BUGS["never_freed"].make(range(4))
    report = Fleet(engines, router).run(trace)
    assert report.beliefs[0].rule == ROUTER_BUGS["never_freed"].found_by
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock import Prompt
from pytest_kvmock.testing import RightRouter

if TYPE_CHECKING:
    from pytest_kvmock.fleets import Candidate, RouterRequest, Worker

Setting: TypeAlias = Literal["plain", "restart", "join", "crash", "adapters", "ranks", "late"]


class StaleIndex(RightRouter):
    """Keeps the blocks of a removed or restarted worker in its index."""

    def worker_removed(self, worker: Worker) -> None:
        self.book.remove_worker(worker)


class IgnoresLoad(RightRouter):
    """Counts only the overlap: a shared prefix makes a hot spot."""

    def cost(self, request: RouterRequest, worker: Worker, overlap: int) -> float:
        return -overlap


class Herd(RightRouter):
    """Picks the worker with the fewest open requests, polled up to 500 ms ago; the first of equals."""

    _EVERY_MS = 500.0
    _polled_ms = float("-inf")
    _polled: Mapping[Worker, int] = MappingProxyType({})

    needs_candidates = True

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker:
        if request.now_ms - self._polled_ms >= self._EVERY_MS:
            self._polled_ms = request.now_ms
            self._polled = {each.worker: each.active_requests for each in candidates}
        return min(candidates, key=lambda each: self._polled.get(each.worker, 0)).worker


class NeverFreed(RightRouter):
    """Counts requests at dispatch, and never stops counting them."""

    def finished(self, request: RouterRequest) -> None:
        pass


class EmptyScores(RightRouter):
    """Picks the first worker for a prompt that no worker holds."""

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:
        if any(self.overlap(request).values()) or not candidates:
            return super().pick(request, candidates)
        return candidates[0].worker


class CountedTwice(RightRouter):
    """Counts the prefill of a request twice at dispatch."""

    def dispatched(self, request: RouterRequest, worker: Worker) -> None:
        super().dispatched(request, worker)
        self.book.loads[worker].prefill_tokens += request.prompt_tokens


class NewWorkerNotLearnt(RightRouter):
    """Ignores a worker that joins."""

    def worker_added(self, worker: Worker) -> None:
        pass


class DeadWorkerKept(RightRouter):
    """Ignores a worker that leaves, and picks it."""

    def worker_removed(self, worker: Worker) -> None:
        self.index.remove_worker(worker[0] if isinstance(worker, tuple) else worker)

    def choices(self, candidates: Sequence[Candidate]) -> list[Worker]:
        return self.workers()

    def worker_added(self, worker: Worker) -> None:
        if worker not in self.book.loads:
            super().worker_added(worker)


class LoraBlind(RightRouter):
    """Looks a prompt up as if it had no adapter."""

    def overlap(self, request: RouterRequest) -> dict[Worker, int]:
        tokens = request.tokens
        hashes = request.local_hashes if tokens is None else Prompt(tokens).block_hashes(request.block_size)
        return self._matched(hashes)


class TrustsLateEvents(RightRouter):
    """Correct by the events that it received, but does not allow for late ones."""


class RanksSummed(RightRouter):
    """Takes the ranks of a worker for one cache, and adds up their blocks."""

    def overlap(self, request: RouterRequest) -> dict[Worker, int]:
        held: dict[int, int] = {}
        for (worker, _), score in self.index.find_matches(request.local_hashes).scores.items():
            held[worker] = held.get(worker, 0) + score
        known = self.workers()
        return {worker: held.get(worker[0] if isinstance(worker, tuple) else worker, 0) for worker in known}


class NeverMatches(RightRouter):
    """Hashes with another seed than the engines, so that no block is ever found."""

    def overlap(self, request: RouterRequest) -> dict[Worker, int]:
        return self._matched([each ^ 1 for each in request.local_hashes])


class Dearest(RightRouter):
    """Picks the highest cost instead of the lowest."""

    def cost(self, request: RouterRequest, worker: Worker, overlap: int) -> float:
        return -super().cost(request, worker, overlap)


class RouterBug(NamedTuple):
    """One planted bug.

    Attributes:
        router: the correct router with the bug.
        shows_in: the condition under which it shows: a worker restarts, joins or crashes; prompts have adapters;
            workers have ranks; events come late. "plain": always.
        found_by: the rule of the wrong belief; "regret": `Report.regret`; "promised_not_found": only this figure, which
            shows late events, not an error of the router.
    """

    router: type[RightRouter]
    shows_in: Setting
    found_by: str

    @property
    def text(self) -> str:
        """The description of the bug."""
        return (self.router.__doc__ or "").strip()

    def make(
        self, workers: Iterable[Worker], seed: int = 0, *, copies: bool = False, of: type[RightRouter] = RightRouter
    ) -> RightRouter:
        """Return a router with the bug.

        Args:
            workers: as in `RightRouter`, like the other arguments.
            seed: seed of the choice among equals.
            copies: whether the engines publish every copy of a block.
            of: the router that gets the bug, a subclass of `RightRouter`, for example with its own cost.

        Raises:
            TypeError: `of` is no such class.
        """
        if not (isinstance(of, type) and issubclass(of, RightRouter)):
            raise TypeError(f"RouterBug.make: of must be RightRouter or a subclass of it, got {of!r:.80}")
        router = self.router if of is RightRouter else type(self.router.__name__, (self.router, of), {})
        made: RightRouter = router(workers, seed, copies=copies)
        return made


ROUTER_BUGS: Final[Mapping[str, RouterBug]] = MappingProxyType(
    {
        "stale_index": RouterBug(StaleIndex, "restart", "overlap_drift"),
        "ignores_load": RouterBug(IgnoresLoad, "plain", "regret"),
        "herd": RouterBug(Herd, "plain", "regret"),
        "never_freed": RouterBug(NeverFreed, "plain", "load_drift"),
        "empty_scores": RouterBug(EmptyScores, "plain", "regret"),
        "counted_twice": RouterBug(CountedTwice, "plain", "load_drift"),
        "new_worker_not_learnt": RouterBug(NewWorkerNotLearnt, "join", "worker_drift"),
        "dead_worker_kept": RouterBug(DeadWorkerKept, "crash", "worker_drift"),
        "lora_blind": RouterBug(LoraBlind, "adapters", "overlap_drift"),
        "trusts_late_events": RouterBug(TrustsLateEvents, "late", "promised_not_found"),
        "ranks_summed": RouterBug(RanksSummed, "ranks", "overlap_drift"),
        "never_matches": RouterBug(NeverMatches, "plain", "overlap_drift"),
        "dearest": RouterBug(Dearest, "plain", "regret"),
    }
)
"""The planted bugs, by name."""
