"""The events of a fleet of bare engines, on their way to index and router: at once, or late in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from pytest_kvmock.events import RouterEvent
from pytest_kvmock.router.index import KvEventError, RadixIndex

if TYPE_CHECKING:
    from pytest_kvmock.events import StreamKey
    from pytest_kvmock.fleet.router_calls import Calls, RouterCalls
    from pytest_kvmock.router.routing import RouterRequest, Worker


class Heard:
    """What index and router were told of the caches.

    Args:
        index: answers overlaps.
        calls: calls the router.
        delay_ms: how late an event is delivered, in virtual milliseconds, or what says so of each.
        has_ranks: whether workers are named by id and rank.

    Raises:
        TypeError: the index lacks a method.
    """

    def __init__(
        self, index: Any, calls: RouterCalls, delay_ms: float | Callable[[RouterEvent], float], *, has_ranks: bool
    ) -> None:
        for method in ("apply", "find_matches"):
            if not callable(getattr(index, method, None)):
                raise TypeError(f"Fleet: index must have a method {method}(), got {index!r:.80}")
        self._index = index
        self._reference = index if isinstance(index, RadixIndex) else RadixIndex()
        self._calls = calls
        self._delay = delay_ms
        self._has_ranks = has_ranks
        self._published: list[RouterEvent] = []
        self._late: list[tuple[float, int, RouterEvent]] = []
        self._count = 0
        self._last_due: dict[StreamKey, float] = {}

    def publish(self, event: RouterEvent) -> None:
        """Take an event of a worker; it is delivered when `deliver` is called."""
        self._published.append(event)

    @property
    def next_ms(self) -> float:
        """When the next event is due that is late."""
        return self._late[0][0] if self._late else math.inf

    def deliver(self, now_ms: float) -> Calls:
        """Deliver what was published since, and what was late, as far as it is due by now."""
        if self._published:
            published, self._published = self._published, []
            if not self._delay:
                for event in published:
                    yield from self._apply(event, now_ms)
                return
            for event in published:
                delay = self._delay(event) if callable(self._delay) else self._delay
                due = max(now_ms + delay, self._last_due.get(event.key, 0.0))
                self._last_due[event.key] = due
                self._count += 1
                heappush(self._late, (due, self._count, event))
        while self._late and self._late[0][0] <= now_ms:
            yield from self._apply(heappop(self._late)[2], now_ms)

    def _apply(self, event: RouterEvent, now_ms: float) -> Calls:
        with suppress(KvEventError):  # an oddity of a faithful engine, which this index tells by raising
            self._reference.apply(event)
        if self._reference is not self._index:
            self._index.apply(event)
        if self._calls.has("apply"):
            yield from self._calls.hook("apply", now_ms, event)

    def overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return how many leading full blocks of a prompt each worker holds."""
        found = self._index.find_matches(request.local_hashes)
        scores: Mapping[Any, int] = getattr(found, "scores", found)
        if self._has_ranks:
            return scores
        return {key[0] if isinstance(key, tuple) else key: score for key, score in scores.items()}

    def held_blocks(self, worker: Worker) -> int:
        """Return how many blocks a worker holds."""
        key = worker if isinstance(worker, tuple) else (worker, 0)
        return self._reference.num_blocks(*key)


class Tap:
    """Hears one engine, and gives its events the name that its worker has in the fleet.

    Args:
        heard: takes them.
        worker: the name.
    """

    def __init__(self, heard: Heard, worker: Worker) -> None:
        self._heard = heard
        self._key = worker if isinstance(worker, tuple) else (worker, 0)

    def publish(self, event: RouterEvent) -> None:
        """Pass on an event."""
        worker_id, dp_rank = self._key
        inner = event.event
        if inner.dp_rank != dp_rank:
            inner = replace(inner, dp_rank=dp_rank)
        elif event.worker_id == worker_id:
            self._heard.publish(event)
            return
        self._heard.publish(
            RouterEvent(worker_id, inner, event.storage_tier, event.token_ids, event.extra, event.chained)
        )
