"""When a rank of SGLang publishes its load, and what each message contains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_kvmock.values.load_stat import DEFAULT_INTERVAL, HEARTBEAT_S, LoadPublisher, LoadStat

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine

_SERVED: Final = 16
"""Number of requests from which the cached share of prompts is estimated."""


def load_of(engine: MockEngine, rank: int = 0) -> LoadStat:
    """Return the load that an engine reports now.

    The uncached tokens of waiting prompts are estimated by the cached share of the prompts served last.
    """
    scheduler, manager, size = engine.inside.scheduler, engine.worker.manager, engine.args.block_size
    waiting = [*scheduler.waiting, *scheduler.parked]
    used = manager.num_active_blocks * size
    queued = sum(max(0, each.prompt_tokens - each.computed_tokens) for each in waiting)
    served = [each for each in engine.requests[-_SERVED:] if each.token_ms]
    asked = sum(each.prompt_tokens for each in served)
    missed = 1.0 - sum(each.cached_tokens for each in served) / asked if asked else 1.0
    metrics = engine.metrics
    return LoadStat(
        metrics.running,
        metrics.waiting,
        used,
        manager.num_blocks * size,
        rank,
        round(queued * missed),
        used + queued,
        engine.args.max_num_seqs or manager.num_blocks,
        engine.prefill_tokens,
        metrics.prefill_us,
    )


class EngineLoads:
    """The load messages of one engine in virtual time.

    It reports after each pass (forced if the pass computed a part of a prompt) and in each turn of an idle loop.

    Args:
        engine: the engine, which is idle.
        start_ms: the time from which it publishes.
        rank: the rank that it reports.
        interval: every n-th report that is not forced is sent.
    """

    __slots__ = ("_cadence", "_engine", "_fresh", "_idle", "_idle_ms", "_rank")

    def __init__(
        self, engine: MockEngine, start_ms: float = 0.0, *, rank: int = 0, interval: int = DEFAULT_INTERVAL
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._cadence = LoadPublisher(interval)
        self._fresh: list[tuple[float, int, LoadStat]] = []
        self._idle_ms: float | None = start_ms  # when it became idle, or last reported being idle
        self._idle = load_of(engine, rank)
        self._call(start_ms, self._idle, force=True)

    def _call(self, now_ms: float, stat: LoadStat, *, force: bool) -> None:
        if not self._cadence.is_due(force=force):
            return
        number = self._cadence.next_number(stat, now_ms / 1000.0)
        if number is not None:
            self._cadence.sent(stat, now_ms / 1000.0)
            self._fresh.append((now_ms, number, stat))

    def passed(self, start_ms: float, end_ms: float, *, prefill: bool) -> None:
        """Report after a pass that has ended."""
        self._turn(start_ms)
        stat = load_of(self._engine, self._rank)
        self._call(end_ms, stat, force=prefill)
        self._idle_ms = None if self._engine.has_work else end_ms
        if self._idle_ms is not None:
            self._idle = stat
            self._call(end_ms, stat, force=True)

    def _turn(self, until_ms: float) -> None:
        """Run the idle loop until a moment; it repeats the last load once per heartbeat."""
        while self._idle_ms is not None and self._idle_ms + 1000.0 * HEARTBEAT_S <= until_ms:
            self._idle_ms += 1000.0 * HEARTBEAT_S
            self._call(self._idle_ms, self._idle, force=True)

    def take(self, now_ms: float) -> list[tuple[float, int, LoadStat]]:
        """Return the messages sent since the last call: time, number, load."""
        engine = self._engine
        self._turn(engine.now_ms if engine.is_in_pass else now_ms)
        fresh, self._fresh = self._fresh, []
        return fresh
