"""The record of what faults did between worker and router, and which part of it a problem is a result of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from pytest_kvmock.events import StreamKey
from pytest_kvmock.hygiene.text import worker_text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Injection:
    """One action of a fault: no worker is to blame for its results.

    Attributes:
        kind: the fault's name: "lose", "double", ...
        worker_id: the worker whose stream it changed.
        dp_rank: and of which rank.
        event_id: the event that it changed; None where there is none, as for a restart.
        keys: every worker and rank whose stream it changed.
        blocks: the blocks that the event named, as published and as it arrived.
        subjects: the blocks that the event stored or removed, as published and as it arrived.
        empties: the worker and rank holds nothing afterwards: a Cleared, or a restart.
        survived: the router of the test must survive faults of this kind.
        survivable: a router can survive faults of this kind.
        missing: the event did not arrive in its turn.
        late: it is held back, and may arrive yet.
        whole: it arrives as it was published, more than once perhaps.
    """

    kind: str
    worker_id: int
    dp_rank: int
    event_id: int | None = None
    keys: frozenset[StreamKey] = frozenset()
    blocks: frozenset[int] = frozenset()
    subjects: frozenset[int] = frozenset()
    survived: bool = False
    survivable: bool = True
    empties: bool = False
    missing: bool = False
    late: bool = False
    whole: bool = False

    @property
    def fails_sink(self) -> bool:
        """Whether a sink before the router raises: that is a problem of its own, and sinks after it get no event."""
        return self.kind == "sink_failure"

    def __str__(self) -> str:
        who = worker_text(self.worker_id, self.dp_rank)
        return f"{self.kind} of {who}" if self.event_id is None else f"{self.kind}, event {self.event_id} of {who}"

    def __repr__(self) -> str:
        return f"<injected: {self}>"


class Injections:
    """The injections into one stream, or into the input that one index was given of it.

    A problem names the latest of them that stored or removed its block or an ancestor of its block; where none did, the
    first from which the stream has not recovered; where it has recovered from all, the last. Of a problem with several
    blocks, the first is looked up first. A Cleared and a restart removed what was held until then. An event that only
    names the block as a parent does not count.

    A stream has *recovered* from what was done

    * to an event that still arrives: twice, or late;
    * to an event whose id the worker was asked for since, or an id before it (`Recovery`);
    * before a Cleared that arrives, or a restart;
    * before the worker and rank restarted, announced, or was removed: then it is no longer kept at all;
    * for an index that must survive faults, once its answers are right for all blocks that they touched.

    From an event that was lost or changed, or an unannounced restart, it has not recovered until then.
    """

    __slots__ = ("_last", "_latest", "_open", "_order")

    def __init__(self) -> None:
        self._order: dict[Injection, int] = {}  # all that are kept
        self._open: list[Injection] = []  # those not recovered from, in order
        self._latest: dict[int, Injection] = {}  # by block, the latest with that subject
        self._last: Injection | None = None

    def add(self, injection: Injection, emptied: Collection[int] = (), *, recovered: bool = False) -> None:
        """Keep a record of what a fault did.

        Args:
            injection: what it did.
            emptied: the blocks that were held until it emptied the cache.
            recovered: the stream is sound all the same: the event arrives.
        """
        self._order[injection] = len(self._order)
        self._last = injection
        self._latest.update(dict.fromkeys((*injection.subjects, *emptied), injection))
        if not recovered:
            self._open.append(injection)

    def recover(self, *, before: Injection | None = None) -> None:
        """Mark the stream as recovered from every injection so far, or from those before one of them."""
        since = len(self._order) if before is None else self._order.get(before, len(self._order))
        self._open = [injection for injection in self._open if self._order[injection] >= since]

    def recover_from(self, injection: Injection, emptied: Collection[int] = ()) -> None:
        """Mark the stream as recovered from one: the event arrives. One that was dropped is kept again; see `add`."""
        if injection in self._open:
            self._open.remove(injection)
        elif injection not in self._order:
            self.add(injection, emptied, recovered=True)

    def recover_ids(self, key: StreamKey, ids: range) -> None:
        """Mark the stream as recovered from all but the events before some ids that the worker was asked for.

        Args:
            key: the worker and rank that was asked.
            ids: from the first id that it was asked for, up to the newest.
        """
        self._open = [
            injection
            for injection in self._open
            if (injection.worker_id, injection.dp_rank) == key
            and injection.event_id is not None
            and injection.event_id < ids.start
        ]

    def naming(self, blocks: Sequence[int], chain: Callable[[int], Iterable[int]]) -> Injection | None:
        """The latest injection that stored or removed a block or an ancestor of it.

        Args:
            blocks: the first for which there is one counts.
            chain: returns the ancestors of a block.
        """
        for block in blocks:
            found = [self._latest[one] for one in (block, *chain(block)) if one in self._latest]
            if found:
                return max(found, key=self._order.__getitem__)
        return None

    def first(self) -> Injection | None:
        """The first injection from which the stream has not recovered, or else the last."""
        return self._open[0] if self._open else self._last
