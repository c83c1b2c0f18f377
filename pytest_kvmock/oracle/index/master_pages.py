"""What a router can learn about the pages at Mooncake's master from the master's own stream.

It follows the source `kv_router/shared_cache.rs` of dynamo-llm 1.6.1: there is no snapshot, so after a gap, a lost
connection or another layout it is empty until pages are put again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from pytest_kvmock.values.shared_stores import MasterMessage

MOST_OBJECTS: Final = 1_000_000
"""Number of objects that are kept; one more clears all."""

_TENANT: Final = "default"


class MasterPages:
    """The objects that a master's stream announced, and the pages that they make up.

    Args:
        keys: returns the keys of all objects of a page, given the page's hash in hex.

    Attributes:
        objects: the keys of the present objects.
        gaps: how often a gap in the numbers has cleared it.
    """

    __slots__ = ("_advertised", "_keys", "_last", "gaps", "objects")

    def __init__(self, keys: Callable[[str], Sequence[str]]) -> None:
        self.objects: set[str] = set()
        self.gaps = 0
        self._keys = keys
        self._last: int | None = None
        self._advertised: dict[int, Hashable] = {}

    def advertise(self, worker_id: int, layout: Hashable) -> None:
        """Record how a worker cuts a page, and where its master is; a changed layout clears all."""
        before = self._advertised.get(worker_id)
        if before is not None and before != layout:
            self.clear()
        self._advertised[worker_id] = layout

    @property
    def agrees(self) -> bool:
        """Whether all workers advertise the same layout; otherwise no page can be loaded."""
        return len({*self._advertised.values()}) <= 1

    def take(self, message: MasterMessage) -> None:
        """Apply a message. A repeated message is ignored; after a gap everything is cleared first."""
        if self._last is not None:
            if message.number == self._last:
                return
            if message.number != self._last + 1:
                self.objects.clear()
                self.gaps += 1
        self._last = message.number
        for event in message.events:
            if event.tenant_id != _TENANT:
                continue
            if event.event_type == "stored":
                self.objects.add(event.object_key)
            else:
                self.objects.discard(event.object_key)
        if len(self.objects) > MOST_OBJECTS:
            self.objects.clear()

    def clear(self) -> None:
        """Drop all objects, as after a lost connection: the next message may have any number."""
        self.objects.clear()
        self._last = None

    def hits(self, pages: Sequence[str]) -> list[int]:
        """Return the positions of the complete pages, including those after a hole.

        Args:
            pages: hashes of the pages, in order.
        """
        if not self.agrees:
            return []
        return [place for place, page in enumerate(pages) if self.objects.issuperset(self._keys(page))]

    def loadable(self, pages: Sequence[str]) -> int:
        """Count the pages that an engine can load: those before the first hole."""
        there = {*self.hits(pages)}
        return next((place for place in range(len(pages)) if place not in there), len(pages))
