"""The ranks of one worker, which run their passes in lock step (Dynamo 1.6.1 with `dp_size` above 1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from pytest_kvmock.engines.schedulers.scheduler import ForwardPass

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.engine_inside import EngineInside


class RankedWorker:
    """Several engines that start their passes together and end them at the latest end.

    To a clock it has the interface of one engine.

    Args:
        ranks: the engines, in the order of their ranks.
    """

    def __init__(self, ranks: Sequence[EngineInside]) -> None:
        self.ranks = ranks
        self._interval = ranks[0].args.prefill_schedule_interval
        self._count = 0  # passes since it last had no requests
        self._under_way: list[tuple[EngineInside, ForwardPass]] = []
        for engine in ranks:
            engine.scheduler.is_rank = True

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return any(engine.has_work for engine in self.ranks)

    def plan(self, now_ms: float, until_ms: float) -> list[float]:  # noqa: ARG002 - as below
        """Return no passes, because the ranks' ends depend on each other."""
        return []

    def record_passes(self, count: int) -> None:
        """Record `count` passes of each rank that has requests."""
        for engine in self.ranks:
            if engine.has_work:
                engine.record_passes(count)

    def start_pass(self, now_ms: float) -> ForwardPass:
        """Run the next pass of each rank that has requests; return the one that ends last."""
        defers = self._count % self._interval != 0
        for engine in self.ranks:
            engine.scheduler.defers_prefills = defers
        passes = self._under_way = [(each, each.start_pass(now_ms)) for each in self.ranks if each.has_work]
        self._count += 1
        is_idle = not self.has_work
        for engine in self.ranks:
            engine.scheduler.settle([done for _, done in passes], is_idle=is_idle)
        end = max(done.end_ms for _, done in passes)
        for engine, _ in passes:
            engine.end_pass_at(end)
        return max((done for _, done in passes), key=lambda done: done.end_ms)

    def finish_pass(self, *, blocks_may_come: bool = False) -> ForwardPass:
        """End the passes of all ranks, in order; return their joint result."""
        passes = [engine.finish_pass(blocks_may_come=blocks_may_come) for engine, _ in self._under_way]
        self._under_way = []
        if not self.has_work:
            self._count = 0
        done = ForwardPass(passes[0].start_ms, end_ms=passes[0].end_ms)
        for name in ("scheduled", "generated", "tokens", "admitted", "preempted", "finished", "rejected", "aborted"):
            setattr(done, name, list(chain.from_iterable(getattr(each, name) for each in passes)))
        done.may_do_more = any(each.may_do_more for each in passes)
        return done

    def restarted(self) -> None:
        """Begin again after a restart of all ranks."""
        self._count, self._under_way = 0, []
        for engine in self.ranks:
            engine.scheduler.is_rank = True

    def close(self) -> None:
        """Let the ranks run independently again."""
        for engine in self.ranks:
            engine.scheduler.is_rank = engine.scheduler.defers_prefills = False
