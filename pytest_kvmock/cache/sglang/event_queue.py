"""SGLang's event queue, in which events wait until they are taken, and neighbours are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_kvmock.events import BlockTokens, Cleared, EventData, Removed, StorageTier, Stored

if TYPE_CHECKING:
    from pytest_kvmock.prompt_keys import EventExtra

T = TypeVar("T")


class TakenEvent(NamedTuple):
    """One event of an `EventQueue`.

    Attributes:
        data: what happened.
        token_ids: of each page of a Stored, where they are known.
        extra: what else the request carried that stored; it travels with SGLang's own events.
    """

    data: EventData
    token_ids: BlockTokens | None = None
    extra: EventExtra | None = None

    @property
    def tier(self) -> StorageTier:
        """Where it happened."""
        return StorageTier.DEVICE


class TakenHostEvent(TakenEvent):
    """One that happened on the host."""

    __slots__ = ()

    @property
    def tier(self) -> StorageTier:
        """Where it happened."""
        return StorageTier.HOST_PINNED


class _Waiting:
    """A Stored, a Removed (`local_hashes` is None) or a Cleared (`names` is) that may still grow."""

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

    A Removed continues a Removed; a Stored continues one of the same salt, adapter and session that ends in its parent;
    both only in one tier.
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
        """Add a Stored of pages, each after the one before."""
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
        """Return what a tier had before the events that wait, from the names that it has now; None: a Cleared waits."""
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
    """Return both in one list, which a further call extends."""
    grown: list[T] = first if isinstance(first, list) else list(first)
    grown.extend(then)
    return grown
