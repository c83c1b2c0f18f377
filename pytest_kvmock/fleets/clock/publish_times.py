"""The times at which an SGLang server publishes its cache's events: after a prefill, by decode steps, when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass

# Theory of operation (SGLang 0.5.23, `_publish_kv_events`)
#
# A server takes the events of its cache after the results of each prefill batch, when it logs its decode steps
# (`--decode-log-interval`), and when no request runs. Events in between wait in order, and neighbours are merged. While
# the engine is idle, events are published at once here, because an idle server polls all the time.


class PublishTimes:
    """Holds the events of one engine's cache, and publishes them when a server does.

    Args:
        every: publish after this many decode steps.
        manager: the engine's manager.

    Raises:
        ValueError: the manager is not SGLang's with a host.
    """

    def __init__(self, every: int, manager: KvManager) -> None:
        if not isinstance(manager, HiCacheManager):
            raise ValueError(  # noqa: TRY004 - one error
                f"publish_every={every} is for engines over sglang with tiers, as events wait for copies; "
                f"got {manager!r}"
            )
        self._every = every
        self._manager = manager
        self._steps = 0

    def start_pass(self) -> None:
        """Hold events from now on."""
        self._manager.hold_events = True

    def end_pass(self, done: ForwardPass, *, is_idle: bool) -> None:
        """Publish the waiting events if a server does so after such a pass."""
        decoded = bool(done.generated)
        self._steps += decoded
        if any(each.tokens for each in done.scheduled) or (decoded and not self._steps % self._every):
            self._manager.take_events()
        self.look(is_idle=is_idle)

    def look(self, *, is_idle: bool) -> None:
        """If the engine is idle, publish the waiting events, and hold none until its next pass."""
        if is_idle:
            self._manager.hold_events = False
            self._manager.take_events()

    def passes(self, ends: Sequence[float]) -> list[float]:
        """Return the decode steps up to the next one after which events may be published."""
        return [*ends[: self._every - self._steps % self._every]]

    def ran(self, count: int) -> None:
        """Count decode steps that were run in one go; see `passes`."""
        self._steps += count
        if not self._steps % self._every:
            self._manager.take_events()
