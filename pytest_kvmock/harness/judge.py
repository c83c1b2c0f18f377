"""The judge: receives every arriving event, and records its problems in the log.

One subject: the handling of arrivals and of all other entries of a ledger. An event is applied to the ledger, the
reference index and the index under test, in this order. `engine_comparison.py` has the comparison with the engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pytest_kvmock.harness.index_comparison import SYNC, IndexComparison, Sync
from pytest_kvmock.harness.queued import AskedPrompt, QueuedEvent
from pytest_kvmock.harness.reuse import Reuse
from pytest_kvmock.harness.under_test import Calls, IndexUnderTest, TierScores, arun, forms_of, of_each_form, run
from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.delivery import Delivery, Published
from pytest_kvmock.oracle.hygiene.drift import oldest_first
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import SINK_FAILURE
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.oracle.index.index import CLEARS, Clears, RadixIndex, RadixIndexError
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import Located, Removed, RouterEvent, StorageTier, StreamKey, Updated
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.harness.book import Book
    from pytest_kvmock.values.prompt_keys import EventExtra

InputFilter = Callable[[RouterEvent], tuple[Injection | None, RouterEvent]]
"""Returns the record of a fault in the input of the index under test, if any, and the event that the index is given."""

UnpublishedBlocks: TypeAlias = Callable[[StorageTier], Container[int]]
"""Returns the blocks that an engine has in a tier without a Stored; see `entries.Unpublished`."""


def check_comparison(sync: object, clears: object) -> None:
    """Check the arguments `sync` and `clears` of `RouterHarness`.

    Raises:
        ValueError: an unknown value.
    """
    if sync not in SYNC:
        raise ValueError(unknown_text("sync", sync, SYNC))
    if clears not in CLEARS:
        raise ValueError(unknown_text("clears", clears, CLEARS))


class RecoveryAnswer(NamedTuple):
    """The answer of a worker that a router asked for events that it missed.

    Attributes:
        published: all events that the worker's rank had published by then, in order.
        ids: the requested event ids, up to the newest.
        events: the events that the router got; or all events that it now has of the rank.
        replace: whether `events` are all events of the rank; False: only the missed ones.
    """

    published: Stream
    ids: range
    events: Sequence[RouterEvent]
    replace: bool


class Judge:
    """Receives every arriving event, and records its problems in the log.

    Args:
        log: records events and problems.
        index: the index under test; None: only the reference.
        sync: when it is compared; see `RouterHarness`.
        rng: source of the comparison's random choices.
        clears: what a Cleared empties in the reference index; see `RadixIndex`.
        journal: the empty journal of the ledger.
        stores: the stores that workers share, by name.

    Attributes:
        ledger: the blocks that are held according to the events.
        reference: the reference index.
        under_test: the index under test, or None.
        book: the record of what would have arrived without faults; None until a test injects a fault.
        index_input_filter: returns the event that the index under test is given for an event; None: the event itself.
        pending_recoveries: the answers that routers got from workers and that are not applied yet.
        first_lost: the problem of the first event that a sink kept from the router without a fault; None: no event.
        reuse: asks the engines of hybrid models how much they would reuse.
    """

    def __init__(
        self,
        log: EventLog,
        index: Any,
        sync: Sync,
        rng: Random,
        *,
        clears: Clears,
        journal: entries.Journal,
        stores: Mapping[str, Any] | None = None,
    ) -> None:
        self.log = log
        self.ledger = Ledger(journal)
        log.group_of_blocks = self.ledger.attention_group
        self.reference = RadixIndex(clears=clears, stores=stores)
        self.under_test = None if index is None else IndexUnderTest.of(index)
        self.book: Book | None = None
        self.index_input_filter: InputFilter | None = None
        self.pending_recoveries: deque[RecoveryAnswer] = deque()
        self.first_lost: Problem | None = None
        self._last: tuple[RouterEvent, int, list[Problem], bool] | None = None  # made a QueuedEvent on demand
        self._unpublished: dict[StreamKey, UnpublishedBlocks] = {}
        self.reuse = Reuse()
        self._comparison = None
        if self.under_test is not None:
            self._comparison = IndexComparison(
                self.under_test,
                self.reference,
                self.ledger,
                rng,
                sync,
                reuse=self.reuse,
                after_flush=self.apply_pending_recoveries,
            )

    @property
    def is_async(self) -> bool:
        """Whether the index under test is async."""
        return self.under_test is not None and self.under_test.is_async

    @property
    def last_received(self) -> QueuedEvent | None:
        """The last received event, with its problems; None before the first."""
        return None if self._last is None else QueuedEvent(*self._last)

    def open(self, entry: entries.Opened, unpublished: UnpublishedBlocks | None = None) -> None:
        """Open the stream of a worker and rank.

        Args:
            entry: the entry, with the known properties of the engine.
            unpublished: returns the blocks that the engine has below the device without a Stored; called before such a
                block is removed.
        """
        self.ledger.take(entry)
        if entry.spec is not None:
            self.reference.offloads_in_chunks(*entry.key, entry.spec.chunk)
        if self.book is not None:
            self.book.ledger.take(entry)
        if unpublished is not None:
            self._unpublished[entry.key] = unpublished

    def unpublished(self, key: StreamKey, tier: StorageTier, blocks: Iterable[int]) -> frozenset[int]:
        """Return the given blocks that an engine may have in a tier without a Stored."""
        ask = self._unpublished.get(key)
        if ask is None or tier is StorageTier.DEVICE:
            return frozenset()
        there = ask(tier)
        return frozenset(block for block in blocks if block in there)

    def _take(self, ledger: Ledger, event: RouterEvent) -> list[Problem]:
        """Pass an event to a ledger, after the engine's unpublished blocks that it removes."""
        if self._unpublished and isinstance(event.data, Removed):
            blocks = self.unpublished(event.key, event.storage_tier, event.data.block_hashes)
            if blocks:
                ledger.take(entries.Unpublished(event.key, blocks))
        return ledger.take(event)

    def keep_book(self) -> Book:
        """Start to keep a book of published events, in addition to the events that arrive."""
        if self.book is None:
            from pytest_kvmock.harness.book import Book  # imported on first use

            self.book = Book(self.ledger)
        return self.book

    def forget_history(self) -> None:
        """Drop the data of all streams that no held block needs."""
        for ledger in (self.ledger, *(() if self.book is None else (self.book.ledger,))):
            for stream in ledger.streams.values():
                stream.forget_history()

    def survive(self) -> None:
        """Start to require that the index under test survives faults; events that arrived so far count as published."""
        if self._comparison is not None and self._comparison.survival is None:
            self.apply_pending_recoveries()
            self._comparison.survive(self.keep_book().survive(self.reference))

    def note(self, found: list[Problem], real: Sequence[Problem] = (), delivery: Delivery | None = None) -> None:
        """Record problems in the log.

        Args:
            found: the problems of arrived events.
            real: the problems of published events at the same point; see `Attribution.classify`.
            delivery: the event that shows the problems; None if a comparison does.
        """
        if self.book is not None:
            self.book.attribution.classify(found, real, delivery)
            for problem in found:
                if problem.fault is not None:
                    self.ledger.take(entries.Attributed(problem))
        self.log.note(found)

    # ----------------------------------------------------------------------------------------------- events

    def published(self, event: RouterEvent) -> Published | None:
        """Record an event that a worker publishes; return None if no book is kept."""
        book = self.book
        if book is None:
            return None
        return book.published(event, self._take(book.ledger, event))

    def injected(self, injection: Injection, event: RouterEvent | None = None) -> None:
        """Record an injection.

        Args:
            injection: the injection.
            event: the published event that it changed; None: it changed a worker, or created an event.
        """
        emptied: set[int] = set()
        if injection.empties:
            streams = [self.ledger.streams[key] for key in injection.keys if key in self.ledger.streams]
            emptied.update(block for stream in streams for held in stream.tiers.values() for block in held)
        self.keep_book().injected(injection, event, emptied)
        self.ledger.take(entries.Injected(injection))
        if injection.fails_sink and event is not None:
            self.sink_failed("a sink raised on purpose", event, missed=True, fault=injection)

    def crashed(self, key: StreamKey) -> None:
        """Record that a worker and rank died: its published events arrive unchanged, and no others follow."""
        self.noted(Injection("crash", *key, keys=frozenset({key}), whole=True))

    def noted(self, injection: Injection) -> None:
        """Record an injection that changed no stream: a worker died, or a store got a fault."""
        self.keep_book().attribution.injected(injection)
        self.ledger.take(entries.Injected(injection))

    def mismatched(self, key: StreamKey, injection: Injection) -> None:
        """Attribute all problems of a worker's events to the fault that added the worker."""
        self.keep_book().attribution.mismatched[key] = injection
        self.ledger.take(entries.Injected(injection))

    def received(self, delivery: Delivery) -> None:
        """Receive an arriving event: judge it, and apply it to the indexes."""
        book, event = self.book, delivery.event
        if book is not None:
            book.receiving(delivery)
        if self.pending_recoveries:
            self.apply_pending_recoveries()
        position, ledger = self.log.append(event), self.ledger
        problems: list[Problem] = []
        refused = False
        if ledger.is_replay(event):
            ledger.take(entries.Replayed(event))
        else:
            problems = self._take(ledger, event) if self._unpublished else ledger.take(event)
            if problems:
                self.note(problems, () if delivery.published is None else delivery.published.problems, delivery)
            try:
                self.reference.apply(ledger.uncounted(event))
            except RadixIndexError:  # the ledger has already found the problem
                refused = True
        self._last = event, position, problems, refused
        if self._comparison is not None:
            self._compare_at(QueuedEvent(event, position, problems, refused), self._comparison)
        if book is not None:
            book.received(delivery)

    def takes_row(self) -> bool:
        """Whether `received_row` may be called: no part needs single events."""
        return self.book is None and self._comparison is None and not self.pending_recoveries and not self._unpublished

    def received_row(self, events: Sequence[RouterEvent]) -> None:
        """Receive events of one worker and rank, each a Removed of one block; nearly all need no judging."""
        while events:
            plain = events[: self.ledger.take_leaves(events)]
            self.log.extend(plain)
            if plain:
                *others, last = plain
                removed = (each.data.block_hashes for each in others if isinstance(each.data, Removed))
                self.reference.remove(*last.key, [*chain.from_iterable(removed)])
                refused = False
                try:
                    self.reference.apply(last)
                except RadixIndexError:  # as in `received`
                    refused = True
                self._last = last, self.log.total - 1, [], refused
            events = events[len(plain) :]
            if events:
                self.received(Delivery(events[0]))
                events = events[1:]

    def watched(self, event: RouterEvent) -> None:
        """Judge an unpublished event, only by the rules of the ledger: no index gets it."""
        self.log.append(event)
        found = self._take(self.ledger, event)
        self.note(found, found)

    def _compare_at(self, queued: QueuedEvent, comparison: IndexComparison) -> None:
        """Give the index under test an event, and compare the index if a comparison is due.

        An index that only answers for the device gets no Located, and an index without `takes_updates` no Updated.
        """
        data, under_test = queued.event.event.data, self.under_test
        if isinstance(data, Located) and under_test and under_test.tiered is None:
            return
        if isinstance(data, Updated) and under_test and not under_test.takes_updates:
            return
        if self.index_input_filter is not None:
            injection, given = self.index_input_filter(queued.event)
            if injection is not None:
                self.keep_book().attribution.index_input_changed(queued.key, injection)
                queued = queued._replace(given=given)
        comparison.queue(queued._replace(orphaned=self.ledger.streams[queued.key].orphaned))
        if not self.is_async and (found := run(comparison.catch_up())):
            self.note(self._oldest_first(found))

    def judge_hashes(self, events: Iterable[RouterEvent]) -> None:
        """Judge the hashes of events that arrived before the hashes were found to be a chain."""
        for entry in self.log.find(events):
            found = self.ledger.take(entries.HashesChained(entry.event, entry.position))
            self.note(found, found)  # the events arrived as published

    def sink_failed(self, observed: str, event: RouterEvent, *, missed: bool, fault: Injection | None = None) -> None:
        """Record that a sink raised.

        Args:
            observed: text of what it raised.
            event: the event that it was given.
            missed: whether the sink is between worker and router, so that the router misses the event.
            fault: the injected fault; None if the failure is real.
        """
        expected = "a sink takes every event"
        if not missed:
            self.log.note([Problem(SINK_FAILURE, *event.key, observed, expected, event, position=self.log.total - 1)])
            return
        observed += "; the router never got the event"
        entry = entries.Missed(event.key, event.event_id, SINK_FAILURE, observed, expected, event)
        (problem,) = self.ledger.take(entry)
        problem.fault = fault
        self.log.note([problem])
        if fault is not None:
            self.ledger.take(entries.Attributed(problem))
            return
        self.first_lost = self.first_lost or problem
        if self.book is not None:
            self.book.lost_to_failure(problem, entry)

    def lost_batches(self, lost: entries.BatchesLost) -> None:
        """Record batches of a wire that did not arrive."""
        found = self.ledger.take(lost)
        self.note(found, found)

    def apply_pending_recoveries(self) -> None:
        """Apply the answers that routers got from workers to ledger and reference: their events count as arrived.

        The index under test is not given them: it asked, and must apply the answer itself.
        """
        while self.pending_recoveries:
            published, ids, events, replace = self.pending_recoveries.popleft()
            key = (published.worker_id, published.dp_rank)
            if replace:
                self.reference.remove_worker_dp_rank(*key)
            for event in events:
                with suppress(RadixIndexError):  # from events that were applied before
                    self.reference.apply(event)
            self.note(
                self.ledger.take(entries.Recovered(published, ids)),
                () if self.book is None else self.book.left_behind(key),
            )
            if self.book is not None:
                self.book.recovered(key, ids)
            if self._comparison is not None:
                self._comparison.recovered(key, self.log.total - 1)

    def removed(self, worker_id: int, dp_rank: int | None = None, *, first_id: int | None) -> list[StreamKey]:
        """Remove a worker, or one rank of it, from ledger and indexes: it starts over.

        Args:
            worker_id: the worker.
            dp_rank: the rank; None: all ranks.
            first_id: the id of its next event; None: any.

        Returns:
            The removed workers and ranks.

        Raises:
            ValueError: the index under test cannot remove it; nothing is removed.
            Exception: whatever the index under test raises; nothing else is removed.
        """
        of_worker = [key for key in self.ledger.streams if key[0] == worker_id]
        keys = of_worker if dp_rank is None else [(worker_id, dp_rank)]
        if self._comparison is not None and self.under_test is not None:
            ranks = [rank for _, rank in keys]
            calls = self.under_test.removal_calls(worker_id, ranks, whole=keys == of_worker)
            self._comparison.removed(keys, calls)
        self.log.worker_removed(worker_id, dp_rank, keys, restarted=first_id is not None)
        self.ledger.take(entries.WorkerRemoved(worker_id, dp_rank, first_id, tuple(keys)))
        for key in keys:
            self.reference.remove_worker_dp_rank(*key)
            if self.book is not None:
                self.book.begin_anew(key, first_id=first_id)
        return keys

    # --------------------------------------------------------------------------------- the index under test

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Give the index events in a burst; see `RouterHarness.burst`."""
        comparison = self._comparison
        if comparison is None or self.is_async:
            yield
            return
        before, comparison.in_burst = comparison.in_burst, True
        try:
            yield
        finally:
            comparison.in_burst = before

    def end_burst(self) -> None:
        """Flush the index under test after a burst of events, and compare the chains that they changed."""
        if self._comparison is not None and not self.is_async and (found := run(self._comparison.end_burst())):
            self.note(found)

    def look_up(self, prompt: Prompt, block_size: int, *, extra: EventExtra | None, by_tier: bool) -> Calls[TierScores]:
        """Look up a prompt in the index under test, or in the reference; see `IndexUnderTest.look_up`. The answer is
        also compared.
        """
        __tracebackhide__ = True
        if self.under_test is None:
            return self.held(prompt, block_size, by_tier=by_tier)
        self.end_burst()
        comparison = self._comparison
        assert comparison is not None
        # If names look ahead, a prompt needs one query for each form; the harness's own lookups make these queries.
        before = comparison.moment() if forms_of(self.ledger.streams, prompt) == (0,) else None
        tiers = yield from self.under_test.look_up(
            prompt, block_size, extra=extra, by_tier=by_tier, streams=self.ledger.streams
        )
        if before is not None and before == comparison.moment():
            asked = AskedPrompt(prompt, block_size, extra, by_tier)
            found = yield from comparison.answered(asked, tiers, self.log.total - 1)
            if found:
                self.note(comparison.news(found))
        return tiers

    def held(self, prompt: Prompt, block_size: int, *, by_tier: bool = False) -> TierScores:
        """Return the reference index's answer for a prompt; see `IndexUnderTest.look_up`."""
        found: dict[StorageTier, dict[int, Any]] = {}
        forms = forms_of(self.ledger.streams, prompt)
        for ahead in forms:
            hashes = prompt.block_hashes(block_size, ahead)
            tiers: Mapping[StorageTier, Any] = {StorageTier.DEVICE: self.reference.find_matches(hashes).scores}
            if by_tier:
                tiers = self.reference.find_tiered(hashes)
            for tier, scores in tiers.items():
                found.setdefault(tier, {})[ahead] = scores
        if len(forms) == 1:
            return {tier: dict(answers[forms[0]]) for tier, answers in found.items()}
        return {tier: of_each_form(answers, self.ledger.streams) for tier, answers in found.items()}

    @property
    def num_taken_for_device(self) -> int:
        """Number of blocks that an Updated moved to the host and that the index under test still counts on the device,
        because it takes no Updated; 0 if it does.
        """
        if self.under_test is None or self.under_test.takes_updates:
            return 0
        return sum(len(stream.moved) for stream in self.ledger.streams.values())

    def flush_index(self) -> None:
        """Flush the index under test, and compare what must be right by now; do nothing for an async index."""
        if self._comparison is not None and not self.is_async:
            self.end_burst()
            self.note(run(self._comparison.flush()))
            self.note(self._comparison.news(run(self._comparison.recheck(self.log.total - 1))))

    def compare(self) -> list[Problem]:
        """Compare all chains ever stored, and record new problems; do nothing without an index under test, or if it is
        async.

        Returns:
            All current differences, including those reported before.
        """
        if self._comparison is None or self.is_async:
            return []
        self.end_burst()
        found = self._oldest_first(run(self._comparison.everything(self.log.total - 1)))
        self.note(self._comparison.news(found))
        return found

    async def acompare(self) -> list[Problem]:
        """Give an async index the waiting events, and `compare` it."""
        assert self._comparison is not None
        self.note(self._oldest_first(await arun(self._comparison.catch_up())))
        found = self._oldest_first(await arun(self._comparison.everything(self.log.total - 1)))
        self.note(self._comparison.news(found))
        return found

    def _oldest_first(self, drifts: list[Problem]) -> list[Problem]:
        """Sort drifts; see `drift.oldest_first`."""
        return oldest_first(drifts, self.ledger.streams, self.log)

    def take_waiting(self) -> list[QueuedEvent]:
        """Return the events that an async index was not given yet, and drop them."""
        if self._comparison is None or not self.is_async:
            return []
        waiting = [queued for queued in self._comparison.waiting if isinstance(queued, QueuedEvent)]
        self._comparison.waiting.clear()
        return waiting
