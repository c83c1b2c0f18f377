"""The survival oracle: what an index under test should answer in spite of the faults that its router survives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

from pytest_kvmock.harness.under_test import Scores, WorkerScores, agree, by_worker
from pytest_kvmock.oracle.hygiene.delivery import Published
from pytest_kvmock.oracle.hygiene.injection import Injection, Injections
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError
from pytest_kvmock.values.events import Removed, RouterEvent, Stored, StreamKey


class SurvivalOracle:
    """A reference index of published events, with their history; events that arrived before count as published.

    A survived fault *affects* the streams that it changes, until the answers of the index are right for the blocks of
    the changed event. Answers for an affected stream are not compared after each event. At a flush they must be right,
    as far as a router can detect a loss: a lost event becomes visible when a later event of its worker and rank
    arrives. So the most recently lost events are not expected yet, nor the events after a delayed one.

    A stream that another fault changes is *exempt*: any answer for it is accepted.

    Args:
        ledger: the ledger of published events; it takes each event before the oracle does.
        reference: the reference index of the events that arrived so far.

    Attributes:
        ledger: has the history that the chains to look up come from.
        reference: has the answers that a router should give.
        exempt: the streams that other faults changed.
        affected: the streams that survived faults changed, each with the stream and block of the chains to look up.
    """

    def __init__(self, ledger: Ledger, reference: RadixIndex) -> None:
        self.ledger = ledger
        self.reference = deepcopy(reference)
        self.affected: dict[StreamKey, set[tuple[StreamKey, int]]] = {}
        self.exempt: set[StreamKey] = set()
        self._before = deepcopy(reference)  # the state before the history
        self._history: list[tuple[StreamKey, RouterEvent | None]] = []  # None: the worker and rank starts over
        self._injections: dict[StreamKey, Injections] = {}
        self._lost: dict[StreamKey, list[int]] = {}  # places in the history of losses that are not visible yet
        self._held: dict[StreamKey, dict[Injection, int]] = {}

    def published(self, event: RouterEvent) -> int:
        """Record an event that a router should get; return its place in the history."""
        shown = self.ledger.uncounted(event)
        self._history.append(((event.worker_id, event.event.dp_rank), shown))
        with suppress(RadixIndexError):
            self.reference.apply(shown)
        return len(self._history) - 1

    def begin_anew(self, key: StreamKey, *, announced: bool) -> None:
        """Start over with a worker and rank; if the restart is announced, earlier faults no longer count."""
        self._history.append((key, None))
        self.reference.remove_worker_dp_rank(*key)
        if announced:
            self.exempt.discard(key)
            for of_streams in (self.affected, self._injections, self._lost, self._held):
                of_streams.pop(key, None)

    def injected(self, injection: Injection, event: RouterEvent | None, emptied: Collection[int]) -> None:
        """Record an injection into the last published event.

        Args:
            injection: the injection.
            event: the event that it changed, as published; None if it changed a worker.
            emptied: the blocks that were held before it emptied the cache.
        """
        if not injection.survived:
            self.exempt |= injection.keys
            return
        own = (injection.worker_id, injection.dp_rank)
        if injection.event_id is None and own in self._injections:  # a restart: earlier faults no longer count
            self._injections[own].recover()
        stream = self.ledger.streams.get(own)
        data = None if event is None else event.event.data
        blocks: Iterable[int] = () if stream is None else stream.emptied
        if isinstance(data, Stored):
            blocks = data.block_hashes[-1:]
        elif isinstance(data, Removed):
            blocks = data.block_hashes
        for key in injection.keys:
            self.affected.setdefault(key, set()).update((own, block) for block in blocks)
            self._injections.setdefault(key, Injections()).add(injection, emptied)
        place = len(self._history) - 1
        if injection.late:
            self._held.setdefault(own, {})[injection] = place
        elif injection.missing or injection.event_id is None:  # a restart is not visible before the next event
            self._lost.setdefault(own, []).append(place)

    def touched(self, key: StreamKey, event: RouterEvent) -> None:
        """Record an arriving event of an affected stream; its blocks are looked up to see if the index applied it."""
        data = event.event.data
        if isinstance(data, Stored | Removed):
            self.affected[key].update((key, block) for block in data.block_hashes)

    def received(self, key: StreamKey, published: Published | None) -> None:
        """Record an arriving event of this worker and rank: losses before it become visible.

        Args:
            key: worker and rank.
            published: the event as published; None if it was not published.
        """
        lost = self._lost.get(key)
        if lost:
            place = len(self._history) if published is None else published.place
            self._lost[key] = [each for each in lost if each > place]

    def released(self, injection: Injection, emptied: Collection[int]) -> None:
        """Record the arrival of the event that this fault delayed; see `injected`."""
        self._held.get((injection.worker_id, injection.dp_rank), {}).pop(injection, None)
        for key in injection.keys if injection.survived else ():
            self._injections.setdefault(key, Injections()).recover_from(injection, emptied)

    def recovered(self, key: StreamKey, ids: range) -> None:
        """Record that the index asked a worker and rank for these event ids: no event is missing any more."""
        self._lost.pop(key, None)
        self._held.pop(key, None)
        if key in self._injections:
            self._injections[key].recover_ids(key, ids)

    def injection_of(self, key: StreamKey, blocks: Sequence[int]) -> Injection | None:
        """Return the survived fault that caused a problem of the index, by the rule of `Injections`.

        Args:
            key: the worker and rank of the problem.
            blocks: the blocks that the problem names.

        Returns:
            The injection; None if no fault touched the blocks and the index has recovered from all faults.
        """
        injections = self._injections.get(key)
        if injections is None:
            return None
        naming = injections.naming(blocks, partial(self._ancestors, key))
        return naming if naming is not None or key not in self.affected else injections.first()

    def _ancestors(self, key: StreamKey, block: int) -> list[int]:
        """Return the chain of a block, as published; a block of another stream, as that stream published it."""
        streams = (self.ledger.streams.get(key), *self.ledger.streams.values())
        return next((stream.chain(block) for stream in streams if stream is not None and stream.was_stored(block)), [])

    def mark_recovered(self, key: StreamKey) -> None:
        """Mark a stream as recovered, because the index is right about it, unless a loss is not visible yet."""
        if not self._lost.get(key) and not self._held.get(key):
            self.affected.pop(key, None)
            if key in self._injections:
                self._injections[key].recover()

    def expected(
        self, answer: Scores | WorkerScores, local_hashes: tuple[int, ...], ignored: Collection[StreamKey] | None
    ) -> Scores:
        """Return the answer that is expected of the index.

        Args:
            answer: the answer that it returned.
            local_hashes: the chain that was looked up.
            ignored: streams for which any answer is accepted; None: the answer for an affected stream may lack events
                whose loss is not visible yet.
        """
        expected = self.reference.find_matches(local_hashes).scores
        if agree(answer, expected):
            return expected
        ranked = not answer or isinstance(next(iter(answer)), tuple)
        given: Mapping[Any, int] = answer
        free = {*self.exempt, *(ignored or ())}
        behind = self._behind(free) if ignored is None else set()
        knowable: list[Mapping[Any, int]] = []
        if behind:
            known = self._knowable(local_hashes)
            knowable += [scores if ranked else by_worker(scores) for scores in known]
        out = dict(expected)
        for key in (*free, *behind):
            name = key if ranked else key[0]
            got = given.get(name, 0)
            if key in behind and all(got != scores.get(name, 0) for scores in knowable):
                continue
            for other in [key] if ranked else [k for k in out if k[0] == key[0]]:
                out.pop(other, None)
            if got:
                out[key] = got
        return out

    def unjudged_below(self, ignored: Collection[StreamKey] | None) -> set[StreamKey]:
        """Return the streams for which any answer is accepted below the device; see `expected`."""
        free = {*self.exempt, *(ignored or ())}
        return free | self._behind(free) if ignored is None else free

    def _behind(self, free: set[StreamKey]) -> set[StreamKey]:
        """Return the affected streams, except those in `free`, with a loss that an index cannot detect yet."""
        return {key for key in self.affected.keys() - free if self._lost.get(key) or self._held.get(key)}

    def _knowable(self, local_hashes: tuple[int, ...]) -> list[Scores]:
        """Return all answers that were right since the first loss that is not visible yet; an index that asked the
        worker may be ahead of the others.
        """
        first: dict[StreamKey, int] = {}
        for key in {*self._lost, *self._held}:
            places = (*self._lost.get(key, ()), *self._held.get(key, {}).values())
            first[key] = min(places, default=len(self._history))
        before = [one for place, one in enumerate(self._history) if place < first.get(one[0], len(self._history))]
        after = [one for place, one in enumerate(self._history) if place >= first.get(one[0], len(self._history))]
        index = deepcopy(self._before)
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
        with suppress(RadixIndexError):
            index.apply(event)
