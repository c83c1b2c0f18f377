"""What a router may know of the pages at Mooncake's master, by the master's own stream.

It does what `kv_router/shared_cache.rs` of dynamo-llm 1.6.1 does, as it was read: there is no snapshot, so after a gap,
a lost connection or another layout it knows nothing until pages are put again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from pytest_kvmock.values.shared_stores import MasterMessage

MOST_OBJECTS: Final = 1_000_000
"""Objects that it remembers; with one more it forgets all."""

_TENANT: Final = "default"


class MasterPages:
    """The objects that a master's stream has announced, and which pages they make.

    Args:
        keys: the keys of all objects of a page, by its hash in hex.

    Attributes:
        objects: the keys that are there.
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
        """A worker says how it cuts a page, and where the master is; another layout than before clears all."""
        before = self._advertised.get(worker_id)
        if before is not None and before != layout:
            self.clear()
        self._advertised[worker_id] = layout

    @property
    def agrees(self) -> bool:
        """Whether all workers say the same; else no page is there for any."""
        return len({*self._advertised.values()}) <= 1

    def take(self, message: MasterMessage) -> None:
        """Apply a message: one that came is ignored, and one that does not follow clears what was known first."""
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
        """Know nothing, as after a lost connection: the next message may have any number."""
        self.objects.clear()
        self._last = None

    def hits(self, pages: Sequence[str]) -> list[int]:
        """Places of the pages that are there whole, by their hashes; those behind a hole too."""
        if not self.agrees:
            return []
        return [place for place, page in enumerate(pages) if self.objects.issuperset(self._keys(page))]

    def loadable(self, pages: Sequence[str]) -> int:
        """Count the pages that an engine can load: those before the first hole."""
        there = {*self.hits(pages)}
        return next((place for place in range(len(pages)) if place not in there), len(pages))
