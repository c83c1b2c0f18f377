"""The record of injected faults, and the search for the injection that caused a problem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from pytest_kvmock.oracle.hygiene.text import worker_text
from pytest_kvmock.values.events import StreamKey


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Injection:
    """One action of a fault. Its results are not problems of a worker.

    Attributes:
        kind: the fault's name: "lose", "double", ...
        worker_id: the worker whose stream it changed.
        dp_rank: the rank of that worker.
        event_id: the event that it changed; None if there is none, as for a restart.
        keys: every worker and rank whose stream it changed.
        blocks: the blocks that the event named, as published and as it arrived.
        subjects: the blocks that the event stored or removed, as published and as it arrived.
        empties: whether the worker and rank holds nothing afterwards, as after a Cleared or a restart.
        survived: whether the test's router must survive faults of this kind.
        survivable: whether a router can survive faults of this kind.
        missing: whether the event did not arrive in its turn.
        late: whether the event is delayed and may still arrive.
        whole: whether the event arrives as published, at least once.
        store: the store that it changed instead of a stream; None if it changed a stream.
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
    store: str | None = None

    @property
    def fails_sink(self) -> bool:
        """Whether a sink before the router raises. The failure is reported as a separate problem, and later sinks get
        no event.
        """
        return self.kind == "sink_failure"

    def __str__(self) -> str:
        if self.store is not None:
            return f"{self.kind} of the store {self.store!r}"
        who = worker_text(self.worker_id, self.dp_rank)
        return f"{self.kind} of {who}" if self.event_id is None else f"{self.kind}, event {self.event_id} of {who}"

    def __repr__(self) -> str:
        return f"<injected: {self}>"


class Injections:
    """The injections into one stream, or into the input of one index from that stream.

    A problem is attributed to the latest injection that stored or removed its block or an ancestor. If there is none,
    it is attributed to the first injection from which the stream has not recovered, or, if it has recovered from all,
    to the last. The blocks of a problem are looked up in order. A Cleared and a restart count as removing all blocks
    held until then. An event that only names the block as a parent does not count.

    A stream has *recovered* from an injection

    * into an event that still arrives, twice or late;
    * into an event, once the worker was asked for its id or an earlier one (`Recovery`);
    * before an arriving Cleared, or a restart;
    * before an announced restart or the removal of the worker and rank: then the injection is no longer kept;
    * for an index that must survive faults, once its answers are right for all blocks of the injections.

    Until then it has not recovered from a lost or changed event or an unannounced restart.
    """

    __slots__ = ("_last", "_latest", "_open", "_order")

    def __init__(self) -> None:
        self._order: dict[Injection, int] = {}  # all kept injections
        self._open: list[Injection] = []  # injections without recovery, in order
        self._latest: dict[int, Injection] = {}  # by block, the latest injection with that subject
        self._last: Injection | None = None

    def add(self, injection: Injection, emptied: Collection[int] = (), *, recovered: bool = False) -> None:
        """Record an injection.

        Args:
            injection: the injection.
            emptied: the blocks that were held before it emptied the cache.
            recovered: whether the stream recovers at once, because the event arrives.
        """
        self._order[injection] = len(self._order)
        self._last = injection
        self._latest.update(dict.fromkeys((*injection.subjects, *emptied), injection))
        if not recovered:
            self._open.append(injection)

    def recover(self, *, before: Injection | None = None) -> None:
        """Mark the stream as recovered from every injection so far, or from all before a given one."""
        since = len(self._order) if before is None else self._order.get(before, len(self._order))
        self._open = [injection for injection in self._open if self._order[injection] >= since]

    def recover_from(self, injection: Injection, emptied: Collection[int] = ()) -> None:
        """Mark the stream as recovered from one injection, because its event arrived. If the injection was dropped, it
        is added again; see `add`.
        """
        if injection in self._open:
            self._open.remove(injection)
        elif injection not in self._order:
            self.add(injection, emptied, recovered=True)

    def recover_ids(self, key: StreamKey, ids: range) -> None:
        """Mark the stream as recovered from all injections except those into events before the requested ids.

        Args:
            key: the worker and rank.
            ids: from the first requested id up to the newest.
        """
        self._open = [
            injection
            for injection in self._open
            if (injection.worker_id, injection.dp_rank) == key
            and injection.event_id is not None
            and injection.event_id < ids.start
        ]

    def naming(self, blocks: Sequence[int], chain: Callable[[int], Iterable[int]]) -> Injection | None:
        """Return the latest injection that stored or removed one of these blocks or an ancestor of it.

        Args:
            blocks: the blocks; the first with an injection counts.
            chain: returns the ancestors of a block.
        """
        for block in blocks:
            found = [self._latest[one] for one in (block, *chain(block)) if one in self._latest]
            if found:
                return max(found, key=self._order.__getitem__)
        return None

    def first(self) -> Injection | None:
        """Return the first injection from which the stream has not recovered, or else the last."""
        return self._open[0] if self._open else self._last
