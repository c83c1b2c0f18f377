"""What an index under test should know though faults strike, where a test says which of them its router survives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_kvmock.events import Removed, RouterEvent, Stored
from pytest_kvmock.harness.under_test import Scores, WorkerScores, agree, by_worker
from pytest_kvmock.hygiene.ledger import Ledger
from pytest_kvmock.router.index import KvEventError, RadixIndex

if TYPE_CHECKING:
    from pytest_kvmock.hygiene.injected import Injected
    from pytest_kvmock.hygiene.stream import StreamKey


class Standard:
    """A ledger and a reference index of what was published.

    A survived fault *hurts* the streams that it changes, until the index answers right for the blocks of the event that
    it struck; what it answers for a hurt stream is not compared after each event. At a flush it must be right, as far
    as a router can know: an event that was lost shows when a later one of its worker and rank arrives, so those that
    were lost last are not due, nor those after one that is held back.

    A fault that need not be survived *spoils* the streams that it changes: the index may say of them what it likes.

    Args:
        reference: an empty reference index.

    Attributes:
        ledger: whose history the chains to ask for come from.
        reference: what a router should answer.
        spoiled: the streams that other faults have struck.
        hurt: the streams that survived faults have struck, each with the stream and block of the chains to ask for.
    """

    def __init__(self, reference: RadixIndex) -> None:
        self.ledger = Ledger()
        self.reference = reference
        self.hurt: dict[StreamKey, set[tuple[StreamKey, int]]] = {}
        self.spoiled: set[StreamKey] = set()
        self._strikes: dict[StreamKey, list[Injected]] = {}
        self._said: list[tuple[StreamKey, RouterEvent | None]] = []
        self._heard: list[RouterEvent] = []
        self._places: dict[int, int] = {}  # in `_said`, of the events in `_heard`, which keeps them
        self._lost: dict[StreamKey, list[int]] = {}  # where in `_said` is what nobody can know to be lost
        self._held: dict[StreamKey, dict[Injected, int]] = {}

    def hear(self, event: RouterEvent) -> None:
        """An event that a router should know of."""
        key = (event.worker_id, event.event.dp_rank)
        self._places[id(event)] = len(self._said)
        self._heard.append(event)
        self.ledger.observe(event, len(self._said))
        shown = self.ledger.uncounted(event)
        self._said.append((key, shown))
        with suppress(KvEventError):
            self.reference.apply(shown)

    def gone(self, key: StreamKey, *, first_id: int | None) -> None:
        """A worker and rank begins anew."""
        self._said.append((key, None))
        self.ledger.restarted(key, first_id=first_id)
        self.reference.remove_worker_dp_rank(*key)

    def announced(self, key: StreamKey, *, first_id: int | None) -> None:
        """It does, and the index is told: whatever happened before is over."""
        self.gone(key, first_id=first_id)
        self.spoiled.discard(key)
        self.hurt.pop(key, None)
        self._strikes.pop(key, None)
        self._lost.pop(key, None)
        self._held.pop(key, None)

    def struck(self, strike: Injected, event: RouterEvent | None, *, held: bool) -> None:
        """A fault has struck what was heard last.

        Args:
            strike: the fault.
            event: the event that it struck, as published; None where it struck a worker.
            held: the event is late, and not lost.
        """
        if not strike.survived:
            self.spoiled |= strike.keys
            return
        own = (strike.worker_id, strike.dp_rank)
        stream = self.ledger.streams.get(own)
        data = None if event is None else event.event.data
        blocks: Iterable[int] = () if stream is None else stream.emptied
        if isinstance(data, Stored):
            blocks = data.block_hashes[-1:]
        elif isinstance(data, Removed):
            blocks = data.block_hashes
        for key in strike.keys:
            self.hurt.setdefault(key, set()).update((own, block) for block in blocks)
            self._strikes.setdefault(key, []).append(strike)
        if strike.missing:
            place = len(self._said) - 1
            if held:
                self._held.setdefault(own, {})[strike] = place
            else:
                self._lost.setdefault(own, []).append(place)

    def touched(self, key: StreamKey, event: RouterEvent) -> None:
        """An event of a hurt stream has arrived; whether the index could take it shows by its blocks."""
        data = event.event.data
        if isinstance(data, Stored | Removed):
            self.hurt[key].update((key, block) for block in data.block_hashes)

    def arrived(self, key: StreamKey, published: RouterEvent | None) -> None:
        """An event of this worker and rank has arrived: what was lost before it shows.

        Args:
            key: worker and rank.
            published: the event as it was published; None: it was not.
        """
        lost = self._lost.get(key)
        if lost:
            place = self._places.get(id(published), len(self._said))
            self._lost[key] = [each for each in lost if each > place]

    def released(self, strike: Injected) -> None:
        """The event that this fault held back has arrived."""
        self._held.get((strike.worker_id, strike.dp_rank), {}).pop(strike, None)

    def recovered(self, key: StreamKey) -> None:
        """The index has asked a worker and rank, and can know all of it."""
        self._lost.pop(key, None)
        self._held.pop(key, None)

    def strike(self, key: StreamKey, block: int | None = None) -> Injected | None:
        """The last fault to be survived that struck a stream, or, once the index has recovered, that struck a block."""
        strikes = self._strikes.get(key, [])
        if key not in self.hurt:
            strikes = [strike for strike in strikes if block in strike.blocks]
        return strikes[-1] if strikes else None

    def healed(self, key: StreamKey) -> None:
        """The index is right about a stream again; not so yet where it is right by knowing less."""
        if not self._lost.get(key) and not self._held.get(key):
            self.hurt.pop(key, None)

    def expected(
        self, answer: Scores | WorkerScores, local_hashes: tuple[int, ...], ignored: Collection[StreamKey] | None
    ) -> Scores:
        """What the index should answer.

        Args:
            answer: what it does answer.
            local_hashes: what it was asked.
            ignored: streams of which it may say anything; None: of a hurt one it may be behind by what no router can
                know.
        """
        expected = self.reference.find_matches(local_hashes).scores
        if agree(answer, expected):
            return expected
        ranked = not answer or isinstance(next(iter(answer)), tuple)
        said: Mapping[Any, int] = answer
        free = {*self.spoiled, *(ignored or ())}
        behind: set[StreamKey] = set()
        if ignored is None:
            behind = {key for key in self.hurt.keys() - free if self._lost.get(key) or self._held.get(key)}
        knowable: list[Mapping[Any, int]] = []
        if behind:
            known = self._knowable(local_hashes)
            knowable += [scores if ranked else by_worker(scores) for scores in known]
        out = dict(expected)
        for key in (*free, *behind):
            name = key if ranked else key[0]
            got = said.get(name, 0)
            if key in behind and all(got != scores.get(name, 0) for scores in knowable):
                continue
            for other in [key] if ranked else [k for k in out if k[0] == key[0]]:
                out.pop(other, None)
            if got:
                out[key] = got
        return out

    def _knowable(self, local_hashes: tuple[int, ...]) -> list[Scores]:
        """What was right since the first event that no router can know of yet; one that asked the worker may know more."""
        first: dict[StreamKey, int] = {}
        for key in {*self._lost, *self._held}:
            places = (*self._lost.get(key, ()), *self._held.get(key, {}).values())
            first[key] = min(places, default=len(self._said))
        before = [one for place, one in enumerate(self._said) if place < first.get(one[0], len(self._said))]
        after = [one for place, one in enumerate(self._said) if place >= first.get(one[0], len(self._said))]
        index = self.reference.new()
        for one in before:
            _apply(index, *one)
        out = [index.find_matches(local_hashes).scores]
        for one in after:
            _apply(index, *one)
            out.append(index.find_matches(local_hashes).scores)
        return out


def _apply(index: RadixIndex, key: StreamKey, event: RouterEvent | None) -> None:
    if event is None:
        index.remove_worker_dp_rank(*key)
    else:
        with suppress(KvEventError):
            index.apply(event)
