"""SGLang's event queue. Events wait in it until they are taken; neighbouring events are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_kvmock.values.events import BlockTokens, Cleared, EventData, Removed, StorageTier, Stored

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

T = TypeVar("T")


class TakenEvent(NamedTuple):
    """One event of an `EventQueue`.

    Attributes:
        data: the event.
        token_ids: the token ids of each page of a Stored, if known.
        extra: other properties of the storing request, which travel with SGLang's own events.
    """

    data: EventData
    token_ids: BlockTokens | None = None
    extra: EventExtra | None = None

    @property
    def tier(self) -> StorageTier:
        """The tier of the event."""
        return StorageTier.DEVICE


class TakenHostEvent(TakenEvent):
    """An event on the host."""

    __slots__ = ()

    @property
    def tier(self) -> StorageTier:
        """The tier of the event."""
        return StorageTier.HOST_PINNED


class _Waiting:
    """A waiting event that may still grow. `local_hashes` is None in a Removed, `names` in a Cleared."""

    __slots__ = ("extra", "local_hashes", "names", "parent", "tier", "token_ids")

    def __init__(
        self,
        names: Sequence[int] | None,
        parent: int | None = None,
        local_hashes: Sequence[int] | None = None,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
        *,
        tier: StorageTier = StorageTier.DEVICE,
    ) -> None:
        self.names = names
        self.tier = tier
        self.parent = parent
        self.local_hashes = local_hashes
        self.token_ids = token_ids
        self.extra = extra

    def taken(self) -> TakenEvent:
        if self.names is None:
            return TakenEvent(Cleared())
        kind = TakenEvent if self.tier == StorageTier.DEVICE else TakenHostEvent
        if self.local_hashes is None:
            return kind(Removed(tuple(self.names)))
        stored = Stored(self.parent, tuple(self.names), tuple(self.local_hashes))
        return kind(stored, self.token_ids, self.extra)


class EventQueue:
    """Events in order; an event that continues the last one is merged into it (SGLang 0.5.23, `mem_cache/events.py`).

    A Removed continues a Removed of the same tier. A Stored continues a Stored of the same tier, salt, adapter and
    session whose last page is its parent.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def stored(
        self,
        parent: int | None,
        names: Sequence[int],
        local_hashes: Sequence[int],
        token_ids: BlockTokens | None,
        extra: EventExtra | None = None,
        *,
        tier: StorageTier = StorageTier.DEVICE,
    ) -> None:
        """Add a Stored of pages, each the child of the page before it."""
        if parent is not None and self._waiting:
            tail = self._waiting[-1]
            if (
                tail.names
                and tail.local_hashes is not None
                and tail.names[-1] == parent
                and tail.extra == extra
                and tail.tier == tier
                and (tail.token_ids is None) == (token_ids is None)
            ):
                tail.names = _grown(tail.names, names)
                tail.local_hashes = _grown(tail.local_hashes, local_hashes)
                if tail.token_ids is not None and token_ids is not None:
                    tail.token_ids = _grown(tail.token_ids, token_ids)
                return
        self._waiting.append(_Waiting(names, parent, local_hashes, token_ids, extra, tier=tier))

    def removed(self, names: Sequence[int], tier: StorageTier = StorageTier.DEVICE) -> None:
        """Add a Removed of pages."""
        tail = self._waiting[-1] if self._waiting else None
        if tail is not None and tail.names is not None and tail.local_hashes is None and tail.tier == tier:
            tail.names = _grown(tail.names, names)
        else:
            self._waiting.append(_Waiting(names, tier=tier))

    def cleared(self) -> None:
        """Add a Cleared."""
        self._waiting.append(_Waiting(None))

    def undone(self, names: Collection[int], tier: StorageTier) -> Collection[int] | None:
        """Return a tier's names before the waiting events, given its present names; None if a Cleared waits."""
        if not self._waiting:
            return names
        counts = Counter(names)
        for each in reversed(self._waiting):
            if each.names is None:
                return None
            if each.tier == tier and each.local_hashes is None:
                counts.update(each.names)
            elif each.tier == tier:
                counts.subtract(each.names)
        return [*counts.elements()]

    def take(self) -> list[TakenEvent]:
        """Return all events so far, and empty the queue."""
        waiting, self._waiting = self._waiting, []
        return [one.taken() for one in waiting]


def _grown(first: Sequence[T], then: Sequence[T]) -> list[T]:
    """Return both in one list; another call extends that list."""
    grown: list[T] = first if isinstance(first, list) else list(first)
    grown.extend(then)
    return grown
