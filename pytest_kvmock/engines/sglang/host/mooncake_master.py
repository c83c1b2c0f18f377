"""Mooncake's master as the storage behind SGLang's HiCache: pages as objects, and the stream that the master publishes.

No stream of an engine reports the contents of the store. The master's stream does, by keys of objects, not blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.sglang.hashes import SglangHasher, page_root
from pytest_kvmock.engines.sglang.host.hicache_storage import PageStore
from pytest_kvmock.values.shared_stores import MasterEvent, MasterMessage

if TYPE_CHECKING:
    from pytest_kvmock.engines.sglang.host.mooncake_keys import MooncakeLayout

# Theory of operation
#
# A page is several objects, one for each rank and half; it is stored if all its objects are. If a request has an
# adapter or a salt, the chain of page hashes begins with a seed. It therefore differs from the chain of names in
# events, and is made from the tokens of the written nodes. Each put and each eviction is one message. A restarted
# master is empty, and numbers its messages from 0 again. (The reader: `kv_router/shared_cache.rs` of dynamo-llm 1.6.1.)

_CHAIN: Final = SglangHasher()


class MooncakeMaster(PageStore):
    """The pages of workers with the same layout, and the messages of the master about them.

    Args:
        layout: the division of a page into objects.
        capacity: the most objects, at least 1; the oldest are evicted. None: no limit.

    Attributes:
        layout: as given.
        objects: keys of the stored objects, the oldest first, each with the name of its page.
        messages: all published messages.
        listeners: called with each message.
    """

    def __init__(self, layout: MooncakeLayout, capacity: int | None = None) -> None:
        super().__init__()
        if capacity is not None and capacity < 1:
            raise ValueError(f"MooncakeMaster: capacity must be at least 1, or None, got {capacity!r}")
        self.layout = layout
        self.objects: dict[str, int] = {}
        self.messages: list[MasterMessage] = []
        self.listeners: list[Callable[[MasterMessage], object]] = []
        self._capacity = capacity
        self._number = 0
        self._digests: dict[int, bytes] = {}

    def know(self, names: Sequence[int], rows: Sequence[Any] | None, extra: Any, before: int | None) -> None:
        """Compute the hashes of pages that may be written.

        Args:
            names: names of the pages.
            rows: their tokens, or pairs of tokens; None: the tokens are unknown, and the pages have no objects.
            extra: the extra properties of their events.
            before: the name of the page before them; None: they begin a prompt.
        """
        extra = extra or {}
        root = page_root(extra.get("lora_name"), extra.get("cache_salt"))
        last = root if before is None else self._digests.get(before)
        if rows is None or (last is None and before is not None):
            return
        for name, row in zip(names, rows, strict=True):
            words = [*chain.from_iterable(row)] if isinstance(row[0], tuple) else row
            (last,) = _CHAIN.digests(words, len(words), 0, last)
            self._digests[name] = last

    def knows(self, name: int) -> bool:
        """Return whether the hash of a page is known."""
        return name in self._digests

    def page_hash(self, name: int) -> str:
        """Return the hash of a page, in hex, by its name in events.

        Raises:
            KeyError: the hash is not known.
        """
        return self._digests[name].hex()

    def add(self, names: Iterable[int], windows: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Put pages; existing objects are not put again, and make no event."""
        names = [*names]
        put = [
            (key, name)
            for name in names
            if name in self._digests
            for key in self.layout.keys(self.page_hash(name))
            if key not in self.objects
        ]
        super().add(names, windows, states)
        self.objects.update(put)
        self._publish("stored", [key for key, _ in put])
        if self._capacity is not None and len(self.objects) > self._capacity:
            self.drop(len(self.objects) - self._capacity)

    def lose(self, names: Iterable[int], windows: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Evict all objects of pages."""
        gone = {*names}
        self._drop([key for key, name in self.objects.items() if name in gone])
        super().lose(gone, windows, states)

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.objects)

    def drop(self, count: int) -> list[int]:
        """Evict the oldest objects and publish this; a page that lost an object is no longer stored.

        Return the names of their pages.
        """
        return self._drop([*self.objects][:count])

    def _drop(self, keys: Sequence[str]) -> list[int]:
        names = [self.objects.pop(key) for key in keys]
        super().lose(names)
        self._publish("removed", keys)
        return names

    def skip(self, numbers: int = 1) -> None:
        """Skip message numbers, as if messages had been lost."""
        self._number += numbers

    def restart(self) -> None:
        """Restart empty, without an event; message numbers begin with 0 again."""
        super().lose(self.pages.copy(), self.windows.copy(), self.states.copy())
        self.objects.clear()
        self._number = 0

    def _publish(self, kind: str, keys: Sequence[str]) -> None:
        if not keys:
            return
        events = tuple(MasterEvent(kind, key) for key in keys)
        message = MasterMessage(self._number, round(self.now_ms), events)
        self._number += 1
        self.messages.append(message)
        for listener in self.listeners:
            listener(message)
