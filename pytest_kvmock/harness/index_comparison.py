"""Comparison of the index under test with the reference index: after each event, at a flush and at the end.

One subject: a query, from the event that causes it to the problem that its answer shows.

If a backend is not prefix-closed, the reference itself can be wrong: it loses the children of a block that is removed
before them, and it applies an event that links a block to its own descendant. Then every answer between that of the
reference and the leading run of held blocks, according to the events, is correct. The same applies to chains with two
blocks for one place, and to chains through a block that an engine left without its parent. An answer outside of this
range is listed under `orphaned_child`, unless it counts blocks that are not held or that follow a hole.

For a hybrid model every answer is correct from what the engine would reuse (`harness.reuse`) up to what its attention
group holds. Engines are asked at rest; chains that an event leaves open are looked up again then.

An index with `find_tiered` or `match_tiered` answers tier by tier. It is asked for tiers below the device as soon as an
event has named one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_kvmock.harness.chains import Chains, QueriedChain, leading_run, orphaned_in, without_a_word
from pytest_kvmock.harness.queued import AskedPrompt, QueuedEvent, QueuedRemoval, WrongAnswer
from pytest_kvmock.harness.reuse import Reuse, bounds_text, misread
from pytest_kvmock.harness.under_test import (
    CALLERS,
    Call,
    Findings,
    IndexMethod,
    IndexUnderTest,
    Scores,
    TierScores,
    UnreadableAnswer,
    WorkerScores,
    agree,
    difference_below,
    first_difference,
    forms_of,
    of_each_form,
)
from pytest_kvmock.oracle.hygiene.folding import fold
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.orphans import held_under_one_path, stored_as
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import EVENT_ID_GAP, INDEX_DRIFT, INDEX_FAILURE
from pytest_kvmock.oracle.hygiene.story import story_of
from pytest_kvmock.oracle.hygiene.stream import Desync
from pytest_kvmock.oracle.hygiene.text import NO_WORKER, worker_text
from pytest_kvmock.oracle.index.index import RadixIndex
from pytest_kvmock.values.checks import raised_at
from pytest_kvmock.values.events import Cleared, Removed, RouterEvent, StorageTier, StreamKey, block_text
from pytest_kvmock.values.prompt_keys import has_items, hash_options
from pytest_kvmock.values.tokens import block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.harness.survival import SurvivalOracle

Sync: TypeAlias = Literal["every", "auto", "burst", "end"]
SYNC: Final = ("every", "auto", "burst", "end")

ALWAYS_UPTO: Final = 2000
"""With sync="auto", a comparison follows each of this many events, then one event in `THEN_ONE_IN`."""
THEN_ONE_IN: Final = 16

MOST_IN_A_BURST: Final = 10_000
"""Maximum number of events that an index is given without a flush."""

_SCOPE: Final = ("lora_name", "cache_salt")
"""The keys, in addition to tokens, that name the owner of a prompt."""


class IndexComparison:
    """Looks up the same chains in the index under test and in the reference, and reports differences.

    Args:
        under_test: the user's index.
        reference: the reference index; it gets every event before the index under test.
        ledger: has the history that the chains come from.
        rng: picks foreign blocks, and events in long tests.
        sync: when to compare: after every event, after some of many, after a burst of events, or only at the end.
        reuse: asks engines how much they would reuse.
        after_flush: applies to ledger and reference the answers that the index got from workers.

    Attributes:
        waiting: events and removals that the index was not given yet; for an async index, until it is flushed.
        survival: replaces ledger and reference if the index must survive faults; else None.
        in_burst: whether the index is given events without a flush and a lookup in between, until `end_burst`.
    """

    def __init__(
        self,
        under_test: IndexUnderTest,
        reference: RadixIndex,
        ledger: Ledger,
        rng: Random,
        sync: Sync,
        *,
        reuse: Reuse,
        after_flush: Callable[[], None],
    ) -> None:
        self.waiting: deque[QueuedEvent | QueuedRemoval] = deque()
        self._under_test = under_test
        self.survival: SurvivalOracle | None = None
        self._reference = reference
        self._ledger = self._arrived = ledger
        self._chains = Chains(rng, with_tokens=under_test.by_tokens is not None, by_tier=under_test.tiered is not None)
        self._rng = rng
        self._sync = sync
        self._after_flush = after_flush
        self._catching_up = False
        self._given = 0  # number of events and removals that the index was given
        self.in_burst = sync == "burst" and not under_test.is_async
        self._unasked: list[tuple[QueuedEvent, bool]] = []  # given to the index; their changes are not looked up yet
        self._naming: list[tuple[Desync, tuple[int, ...]]] = []
        self._desyncs: dict[StreamKey, Desync] = {}
        self._recovered: dict[StreamKey, int] = {}
        self._reported: set[tuple[int, int, int, StorageTier]] = set()
        self._asking = under_test.plain.name
        self._reuse, self._at_rest, self._is_open = reuse, True, False
        self._open: dict[tuple[StreamKey, int], tuple[QueriedChain, QueuedEvent]] = {}  # to be looked up again at rest
        self._warned: dict[Problem, Problem] = {}  # the warning that an unreported problem follows from

    # ---------------------------------------------------------------------------------------------- events

    def survive(self, survival: SurvivalOracle) -> None:
        """Start to compare with the answers of an index that survives faults."""
        self.survival, self._reference, self._ledger = survival, survival.reference, survival.ledger

    def queue(self, event: QueuedEvent) -> None:
        """Queue an event that was applied to ledger and reference."""
        self.waiting.append(event)

    def catch_up(self) -> Findings:
        """Give the index all waiting events and removals, in order; then compare it with the reference.

        Raises:
            RuntimeError: another task is doing this already, so events would arrive out of order.
        """
        if self._catching_up:
            raise RuntimeError("aflush() is under way already; await one at a time")
        self._catching_up, self._at_rest = True, self._under_test.is_async
        try:
            return (yield from self._catch_up())
        finally:
            self._catching_up, self._at_rest = False, True

    def end_burst(self) -> Findings:
        """Flush the index, and look up what the events of the burst changed; do nothing if there were none."""
        return self._compare() if self._unasked or self._naming else _nothing()

    def _catch_up(self) -> Findings:
        found = yield from self._give()
        if not self.in_burst or len(self._unasked) >= MOST_IN_A_BURST:
            found += yield from self._compare()
        return found

    def _give(self) -> Findings:
        """Give the index all waiting events and removals."""
        found: list[Problem] = []
        while self.waiting:
            queued = self.waiting.popleft()
            self._given += 1
            if isinstance(queued, QueuedRemoval):
                found += yield from self._remove(queued)
                continue
            data, key = queued.event.event.data, queued.key
            if self.survival is not None and self._affected(key):
                self.survival.touched(key, queued.event)
            desync = self._desyncs.get(key)
            try:
                yield self._under_test.apply, queued.given or queued.event
            except Exception as error:  # noqa: BLE001 - as in run
                # A dump leaves out blocks that no query can reach; the reference also raises when they are removed.
                if not queued.may_be_refused:
                    found.append(self._failure("apply", error, key, queued))
            else:
                if isinstance(data, Cleared):
                    self._desyncs.pop(key, None)
            if self._due(queued.position):
                self._unasked.append((queued, self._affected(key)))
            if isinstance(data, Cleared):
                continue
            if desync is not None:
                self._naming.append((desync, data.block_hashes))
            if self._reported:  # a block that an event names again may drift again
                self._reported.difference_update(
                    (*key, block, tier) for block in data.block_hashes for tier in StorageTier
                )
        return found

    def _compare(self) -> Findings:
        """Look up what the events that the index was given have changed."""
        found: list[Problem] = []
        questions, self._unasked = self._unasked, []
        naming, self._naming = self._naming, []
        if questions:
            found += yield from self.flush()
        if self.survival is not None:
            for key in dict.fromkeys(queued.key for queued, _ in questions):
                if self._affected(key):
                    yield from self._look_for_recovery(key)
        for queued, was_affected in reversed(questions):  # a later event explains a difference better
            for chain in () if was_affected else self._chains.touched(queued.event, self._ledger.streams):
                self._is_open = False
                differences = yield from self._differences(chain, queued.key, queued)
                found += self.news(differences, queued)
                if self._is_open and not differences:
                    self._open.setdefault((queued.key, chain.blocks[-1]), (chain, queued))
                if any(problem.rule == INDEX_FAILURE for problem in differences):
                    break  # the other lookups would fail too
        for desync, blocks in naming:  # last, so that an event does not resync its own blocks
            desync.resynced.update(blocks)
        return found

    def recovered(self, key: StreamKey, position: int) -> None:
        """Record that the index asked a worker and rank for missed events: no desync excuses it any more.

        Args:
            key: the worker and rank that it asked.
            position: number of the last event that had arrived.
        """
        self._recovered[key] = position
        self._desyncs.pop(key, None)
        self._reported = {each for each in self._reported if each[:2] != key}

    # ------------------------------------------------------------------------------------- what a test asks

    def moment(self) -> int | None:
        """Return how many events and removals the index was given; None if an answer would not be compared.

        An answer is not compared while something is waiting or being given, or if only the end of a test is compared.
        """
        return None if self.waiting or self._catching_up or self._sync == "end" else self._given

    def answered(self, asked: AskedPrompt, tiers: TierScores, position: int) -> Findings:
        """Compare the answer that a test got. The answer itself counts; the index is asked again only for shorter parts
        of the prompt.

        Args:
            asked: the prompt that the test asked for.
            tiers: the answer.
            position: number of the last event.
        """
        self._after_flush()
        answer, local = tiers.get(StorageTier.DEVICE, {}), tuple(asked.prompt.block_hashes(asked.block_size))
        exactly = self._under_test.answers_reusable and self.survival is None
        plainly = not asked.by_tier and not self._under_test.plain.by_tier
        if not exactly and plainly and agree(answer, self._reference.find_matches(local).scores):
            return []  # the usual case, which needs no block names
        chain = self._chains.of_prompt(asked, self._ledger.streams)
        ignored = None if self.survival is None else self.survival.affected.keys()
        lookup = self._under_test.tiered if asked.by_tier else None
        lookup = lookup or self._under_test.plain
        self._asking = lookup.name
        wrong = self._wrong_in(tiers, chain, ignored, lookup, by_tier=asked.by_tier)
        if wrong is None:
            return []
        for count in range(1, len(local)):
            part = chain.part(0, count)
            try:
                again = yield from self._look_up(part, ignored)
            except Exception:  # noqa: BLE001 - as in run; the test's own answer shows it
                break
            if again is not None:
                return [self._drift(again, part, None, position)]
        return [self._drift(wrong, chain, None, position)]

    def removed(self, keys: Sequence[StreamKey], calls: Sequence[Call]) -> None:
        """Remove workers and ranks from the index; for an async index the removal is queued after earlier events.

        Raises:
            Exception: whatever the index raises.
        """
        if self._under_test.is_async:
            self.waiting.append(QueuedRemoval(keys, calls))
            return
        for function, argument in calls:
            function(argument)
        for key in keys:
            self._desyncs.pop(key, None)

    def _remove(self, removal: QueuedRemoval) -> Findings:
        found: list[Problem] = []
        for function, argument in removal.calls:
            try:
                yield function, argument
            except Exception as error:  # noqa: BLE001 - as in run
                found.append(self._failure("remove_worker", error, removal.keys[0] if removal.keys else NO_WORKER))
        for key in removal.keys:
            self._desyncs.pop(key, None)
        return found

    def flush(self) -> Findings:
        """Flush the index, if it has a `flush`."""
        flush = self._under_test.flush
        found = []
        if flush is not None:
            try:
                yield lambda _: flush(), None
            except Exception as error:  # noqa: BLE001 - as in run
                found.append(self._failure("flush", error, NO_WORKER))
        self._after_flush()
        return found

    def everything(self, position: int) -> Findings:
        """Compare all chains ever stored, at the end of a test. Problems may have been reported already; see `news`.

        Args:
            position: number of the last event.
        """
        found = yield from self.flush()
        found += yield from self._left_open()
        for key in list(self._ledger.streams):
            found += yield from self._all_of(key, position)
        return found

    def _left_open(self) -> Findings:
        """Look up again the chains that events left open, now that engines are at rest."""
        found: list[Problem] = []
        left, self._open = self._open, {}
        for (key, _), (chain, queued) in left.items():
            if key in self._ledger.streams:
                found += yield from self._differences(chain, key, queued)
        return found

    def recheck(self, position: int) -> Findings:
        """Compare the chains that events left open, and all chains of streams that faults affect: the index must be
        right by now.
        """
        found = yield from self._left_open()
        for key in [] if self.survival is None else list(self.survival.affected):
            if key in self._ledger.streams:
                found += yield from self._all_of(key, position)
        return found

    def _all_of(self, key: StreamKey, position: int) -> Findings:
        found: list[Problem] = []
        for chain in self._chains.all_of(self._ledger.streams[key]):
            found += yield from self._differences(chain, key, None, position)
            if self._under_test.answers_reusable and len(chain.local) > 1 and not chain.negative:
                cut = self._rng.randrange(1, len(chain.local))  # at the end of a chain, usually all of it is reused
                found += yield from self._differences(chain.part(0, cut), key, None, position)
        if self.survival is not None and not found:
            self.survival.mark_recovered(key)
        return found

    def _affected(self, key: StreamKey) -> bool:
        return self.survival is not None and key in self.survival.affected

    def _look_for_recovery(self, key: StreamKey) -> Generator[Call, Any, None]:
        """Check by lookups whether the index has recovered from the faults that affect a stream."""
        assert self.survival is not None
        others = self.survival.affected.keys() - {key}
        for where, block in list(self.survival.affected[key]):
            try:
                wrong = yield from self._look_up(self._chains.upto(self._ledger.streams[where], block), others)
            except Exception:  # noqa: BLE001 - it has not; the lookup at the end reports it
                return
            if wrong is not None:
                return
        self.survival.mark_recovered(key)

    def news(self, found: list[Problem], queued: QueuedEvent | None = None) -> list[Problem]:
        """Return the problems that were not reported before, each listed under its cause."""
        out = []
        warned, self._warned = self._warned, {}
        for problem in found:
            if problem.rule == INDEX_DRIFT:
                reported = (problem.worker_id, problem.dp_rank, problem.blocks[0], problem.storage_tier)
                if reported in self._reported:
                    continue
                self._reported.add(reported)
                self._fold(problem, queued, warned.get(problem))
            out.append(problem)
        return out

    def _due(self, position: int) -> bool:
        if self._sync == "auto" and not self.in_burst:
            return position < ALWAYS_UPTO or self._rng.randrange(THEN_ONE_IN) == 0
        return self._sync != "end"

    # --------------------------------------------------------------------------------------------- answers

    def _differences(
        self, chain: QueriedChain, key: StreamKey, queued: QueuedEvent | None, position: int = -1
    ) -> Findings:
        """Look up a chain; if the answer differs from the reference's, find the shortest part of it that shows this."""
        ignored = None if queued is None or self.survival is None else self.survival.affected.keys()
        try:
            if (yield from self._look_up(chain, ignored)) is None:
                return []
            for count in range(1, len(chain.local) + 1):
                shortest = chain.part(0, count)
                if (yield from self._look_up(shortest, ignored)) is not None:
                    break
            wrong = yield from self._look_up(shortest, ignored)
        except Exception as error:  # noqa: BLE001 - as in run
            return [self._failure(self._asking, error, key, queued, position)]
        if wrong is None:
            return []  # the index gave a different answer the second time; the next lookup shows the problem again
        return [self._drift(wrong, shortest, queued, position)]

    def _drift(self, wrong: WrongAnswer, shortest: QueriedChain, queued: QueuedEvent | None, position: int) -> Problem:
        """Return the index_drift of a wrong answer for a chain."""
        asked, answer, tier, worker, rank, got, right = wrong
        too_many = got >= right.stop
        block, story = self._story((worker, rank), shortest, tier, too_many=too_many)
        on = f"on a {len(shortest.local)}-block prefix (ends in {block_text(block)}); {story}"
        if (
            too_many
            and tier is StorageTier.DEVICE
            and "never removed" in story
            and right.stop <= len(shortest.blocks) - 1
        ):
            before = shortest.blocks[right.stop - 1]  # the first block that the reference lacks
            if (stream := self._ledger.streams.get((worker, rank))) is not None and stream.was_stored(before):
                on += f", but what stands before it is gone: {story_of(stream, before, tier)}"
        if too_many and (what := self._never_stored((worker, rank), shortest)):
            on = f"for {what}"
        stream = self._ledger.streams.get((worker, rank))
        if stream is not None and stream.groups:
            first = block if too_many or shortest.negative else shortest.blocks[got]
            if clue := misread(stream, first, too_many=too_many):
                lacks = "" if first == block else f"of block {block_text(first)}, the first that the answer lacks: "
                on += f"; {lacks}{clue}"
        if queued is not None and queued.key == (worker, rank) and self._left_a_copy(queued.event, block):
            on += "; this Removed took one copy of it, and the engine has another"
        on_device = tier is StorageTier.DEVICE
        orphan, warning = self._orphan(answer, (worker, rank), shortest) if on_device else (0, None)
        if len(right) == 1 and got >= right.stop:
            warning = None  # more than is held: an orphan does not excuse this
        if warning is not None:
            on += f"; block {block_text(orphan)} was left without its parent by event {warning.event_id}"
        expected = _expected_text(right, "the reference index returned" if self.survival is None else "was published")
        if on_device and ((worker, rank) in self._reuse.engines or (stream is not None and stream.groups)):
            expected = bounds_text(right, exactly=self._under_test.answers_reusable)
        problem = Problem(
            INDEX_DRIFT,
            worker,
            rank,
            f"{asked}() of your index ({self._under_test.name}) returned {got}{'' if on_device else f' in {tier}'} for "
            f"{worker_text(worker, rank)} {on}",
            expected,
            queued.event if queued else None,
            queued.position if queued else position,
            (block,),
            fault=None if self.survival is None else self.survival.injection_of((worker, rank), (block,)),
            storage_tier=tier,
            compared_at=self._arrived.position
            if queued is not None and self._arrived.position > queued.position
            else None,
        )
        if warning is not None:
            self._warned[problem] = warning
        return problem

    def _never_stored(self, key: StreamKey, chain: QueriedChain) -> str:
        """Return what a negative query asked for, and which key must be wrong; empty if it is a stored prefix after
        all.
        """
        stream = self._ledger.streams.get(key)
        if not chain.negative or (stream is not None and stored_as(stream, chain.local)):
            return ""
        first, last, count = block_text(chain.blocks[0]), block_text(chain.blocks[-1]), len(chain.local)
        if chain.negative == "tail":
            what = f"block {last} alone" if count == 1 else f"the {count} blocks from {first} to {last}"
            text = f"{what}, without the blocks before {'it' if count == 1 else 'them'}: no stored prefix begins so"
            if stream is None or not stream.lookahead:
                return text
            return f"{text} and has the same next token, which this worker's names cover"
        made = f"{first} with one token changed" if chain.tokens is not None else f"another in place of {first}"
        if count > 1:
            return f"{last} behind a block that no worker stored: {made}; what stands before a block is part of it"
        return f"a block that no worker stored: {made}; your key of it is also that of {first}"

    def _story(self, key: StreamKey, chain: QueriedChain, tier: StorageTier, *, too_many: bool) -> tuple[int, str]:
        """Return the last block of a chain, under the name that the worker and rank uses, and its history.

        Args:
            key: the worker and rank with the wrong answer.
            chain: the chain that was looked up.
            tier: the tier with the wrong answer.
            too_many: whether the answer is too high; then the index may have had blocks before the first event.
        """
        early, keys = "; was the index empty at the start?", ""
        if chain.extra and (given := [f"{each}={chain.extra[each]!r}" for each in _SCOPE if chain.extra.get(each)]):
            early, keys = "", f" with {' and '.join(given)}; is that part of your key?"
        streams, block = self._ledger.streams, chain.blocks[-1]
        own = streams.get(key)
        if own is not None:
            # Without its first block the chain may be another stored chain. The same applies below the device, where a
            # block arrives without its parent.
            if chain.negative or (len(own.tiers) > 1 and not own.was_stored(block)):
                named = stored_as(own, chain.local)
                block = min(named) if named else block
            store = (own.spec.stores or {}).get(tier)
            if store is not None and block in self._ledger.owned.get(store, ()):
                return block, f"the store {store!r} has it, and {worker_text(*key)} can load from it"
            if own.was_stored(block):
                return block, story_of(own, block, tier)
        others = [other for other, stream in streams.items() if other != key and stream.was_stored(block)]
        others.sort(key=lambda other: other[0] != key[0])  # another rank of the worker first
        if others:
            observed = f"it never stored it, {worker_text(*others[0])} did"
            return block, observed + early * (too_many and others[0][0] != key[0])
        return block, f"no worker ever stored it{keys}{early}"

    def _orphan(
        self, answer: Scores | WorkerScores, key: StreamKey, chain: QueriedChain
    ) -> tuple[int, Problem] | tuple[Literal[0], None]:
        """Return the first block of a chain that a worker and rank left without its parent, and its warning.

        Args:
            answer: the index's answer; if it is by worker, all ranks of the worker count.
            key: the worker and rank with the wrong answer.
            chain: the chain that was looked up.
        """
        ranked = not answer or isinstance(next(iter(answer)), tuple)
        others = [] if ranked else [other for other in self._ledger.streams if other[0] == key[0] and other != key]
        for each in (key, *others):
            if each not in self._ledger.streams or each not in self._arrived.streams:
                continue
            found = orphaned_in(self._ledger.streams[each], chain)
            warnings = self._arrived.streams[each].orphaned
            for block in () if found is None else found.blocks:
                if block in warnings and not warnings[block].excused:
                    return block, warnings[block]
        return 0, None

    def _left_a_copy(self, event: RouterEvent, block: int) -> bool:
        data, stream = event.event.data, self._ledger.streams[event.worker_id, event.event.dp_rank]
        return (
            stream.spec.residency == "counted"
            and isinstance(data, Removed)
            and block in data.block_hashes
            and block in stream.held(event.storage_tier)
        )

    def _look_up(
        self, chain: QueriedChain, ignored: Collection[StreamKey] | None
    ) -> Generator[Call, Any, WrongAnswer | None]:
        """Look up a chain in the index under test; return its first wrong answer, if any."""
        under_test = self._under_test
        asked, tiered = under_test.plain, under_test.tiered
        returned = yield self._question(chain, asked)
        answer = under_test.read(returned)
        wrong = self._wrong(answer, chain, ignored, asked)
        if wrong is not None:
            return WrongAnswer(asked.name, answer, StorageTier.DEVICE, *wrong)
        streams = self._ledger.streams.values()
        if tiered is None or all(len(stream.tiers) == 1 and stream.spec.stores is None for stream in streams):
            return None
        if asked.name != tiered.name:
            returned = yield self._question(chain, tiered)
        return self._wrong_in(under_test.read_tiered(returned), chain, ignored, tiered, by_tier=True)

    def _wrong_in(
        self,
        tiers: TierScores,
        chain: QueriedChain,
        ignored: Collection[StreamKey] | None,
        asked: IndexMethod,
        *,
        by_tier: bool,
    ) -> WrongAnswer | None:
        """Return the first wrong answer for a chain, tier by tier, or only for the device; None if all are right."""
        answer = tiers.get(StorageTier.DEVICE, {})
        wrong = self._wrong(answer, chain, ignored, asked)
        if wrong is not None or not by_tier:
            return None if wrong is None else WrongAnswer(asked.name, answer, StorageTier.DEVICE, *wrong)
        free = () if self.survival is None else self.survival.unjudged_below(ignored)
        held = self._reference.allowed(self._held_by_tier(chain, asked), tiers)
        below = difference_below(tiers, held, free, forgets=self._under_test.may_forget)
        return None if below is None else WrongAnswer(asked.name, answer, *below)

    def _wrong(
        self,
        answer: Scores | WorkerScores,
        chain: QueriedChain,
        ignored: Collection[StreamKey] | None,
        asked: IndexMethod,
    ) -> tuple[int, int, int, range] | None:
        """Return the first worker with a wrong answer: (worker_id, dp_rank, blocks returned, blocks expected)."""
        if self.survival is None and asked.by_tier and self._under_test.takes_updates:
            expected = self._held_by_tier(chain, asked).get(StorageTier.DEVICE, {})
        elif self.survival is None:
            expected = self._held(chain, asked)
        else:
            expected = self.survival.expected(answer, chain.local, ignored)
        exactly = self._under_test.answers_reusable and self.survival is None
        if agree(answer, expected) and not exactly:
            return None
        least, most = dict(expected), dict(expected)
        for key, stream in self._ledger.streams.items():
            if not stream.spec.prefix_closed:
                run, due = leading_run(stream, chain), expected.get(key, 0)
            elif (runs := without_a_word(stream, chain)) is not None:
                due = expected.get(key, 0)
                least[key], most[key] = min(runs[0], due), max(runs[1], due)
                continue
            elif (found := orphaned_in(stream, chain)) is not None:
                run, due = found.run, expected.get(key, 0)
            elif (alike := held_under_one_path(stream, chain.local)) is not None:
                run, due = alike, expected.get(key, 0)
            else:
                continue
            least[key], most[key] = min(run, due), max(run, due)
        for key, stream in self._ledger.streams.items() if has_items(chain.extra) else ():
            # vLLM's names cover the place of an image in its block, Dynamo's local hashes do not. Both are correct,
            # unless the index answers what is reused.
            run = leading_run(stream, chain)
            lower, upper = (run, run) if exactly else (least.get(key, 0), most.get(key, 0))
            least[key], most[key] = min(run, lower), max(run, upper)
        streams = self._ledger.streams
        self._reuse.widen(streams, chain, least, most, at_rest=self._at_rest, exactly=exactly)
        self._is_open = not self._at_rest and not agree(answer, most if exactly else expected)
        return first_difference(answer, {} if self._under_test.may_forget else least, most)

    def _held(self, chain: QueriedChain, asked: IndexMethod) -> Scores:
        """Return how many blocks of a chain each worker holds on the device."""
        hashes = self._hashes_by_form(chain, asked)
        if hashes is None:
            return self._reference.find_matches(chain.local).scores
        answers = {ahead: self._reference.find_matches(local).scores for ahead, local in hashes.items()}
        held: Scores = of_each_form(answers, self._ledger.streams)
        return held

    def _held_by_tier(self, chain: QueriedChain, asked: IndexMethod) -> Mapping[StorageTier, Scores]:
        """Return how many blocks of a chain each worker holds, tier by tier."""
        updated, hashes = self._under_test.takes_updates, self._hashes_by_form(chain, asked)
        if hashes is None:
            return self._reference.find_tiered(chain.local, updated=updated)
        answers = {ahead: self._reference.find_tiered(local, updated=updated) for ahead, local in hashes.items()}
        return {
            tier: of_each_form({ahead: found.get(tier, {}) for ahead, found in answers.items()}, self._ledger.streams)
            for tier in StorageTier
        }

    def _hashes_by_form(self, chain: QueriedChain, asked: IndexMethod) -> dict[int, Sequence[int]] | None:
        """Return the local hashes of a chain queried by tokens, by the number of next tokens that they cover.

        None if the chain's own hashes fit the names of all workers, or if the query is not by tokens.
        """
        forms, tokens = forms_of(self._ledger.streams), chain.asked_tokens
        if len(forms) == 1 or not asked.takes_tokens or tokens is None:
            return None
        options = {} if chain.extra is None else hash_options(chain.extra)
        return {ahead: block_hashes(tokens, chain.block_size, lookahead=ahead, **options) for ahead in forms}

    def _question(self, chain: QueriedChain, asked: IndexMethod) -> Call:
        self._asking = asked.name
        return asked.asking(chain.extra), asked.question(list(chain.local), chain.asked_tokens, of_events=True)

    def _failure(
        self, what: str, error: Exception, key: StreamKey, queued: QueuedEvent | None = None, position: int = -1
    ) -> Problem:
        """Return the index_failure of an index that raised, or returned an unreadable answer."""
        event = queued.event if queued else None
        unreadable = isinstance(error, UnreadableAnswer)
        text = f"{what} raised {type(error).__name__}: {error}{raised_at(error, CALLERS)}"
        observed = str(error) if unreadable else text
        if what == "apply" and event is not None and key in self._ledger.streams:
            observed += self._under_test.want_of_tokens(event, self._ledger.streams[key].spec.block_size)
        blocks = () if event is None else _blocks(event)
        fault = None if self.survival is None else self.survival.injection_of(key, blocks)
        expected = "applies every valid event" if fault is None else f"that must survive {fault.kind} does not raise"
        problem = Problem(
            INDEX_FAILURE,
            *key,
            observed,
            f"an index {expected}, and answers every query",
            event,
            queued.position if queued else position,
            fault=fault,
        )
        warning = None if queued is None or what != "apply" else self._of_an_orphan(queued)
        self._fold(problem, queued, warning)
        if warning is None or problem.cause is not warning:  # the warning excuses only its own chains
            self._desyncs[key] = Desync(problem.cause or problem)
        return problem

    # ---------------------------------------------------------------------------------------------- desyncs

    def _of_an_orphan(self, queued: QueuedEvent) -> Problem | None:
        """Return the warning of an orphan that an event names, itself or a descendant; an index may have dropped it."""
        if not queued.orphaned:
            return None
        stream = self._ledger.streams[queued.key]
        for named in _blocks(queued.event):
            for block in (named, *stream.chain(named)):
                if block in queued.orphaned and not queued.orphaned[block].excused:
                    return queued.orphaned[block]
        return None

    def _fold(self, problem: Problem, queued: QueuedEvent | None, warning: Problem | None = None) -> None:
        """List a problem under an error of the event itself, a warning, or a desync of the index or the stream."""
        own = next((p for p in self._faults(queued) if p.is_error and not p.excused), None) if queued else None
        key = (problem.worker_id, problem.dp_rank)
        desync = self._desyncs.get(key)
        if own is not None:
            problem.follows_from(own)
        elif warning is not None:
            problem.follows_from(warning)
        elif desync is not None and problem.block not in desync.resynced:
            problem.follows_from(desync.cause)
        elif key in self._arrived.streams:
            fold(self._arrived.streams[key], problem)
            if problem.cause is not None and problem.cause.excused:
                problem.stand()  # an index that survives a fault must still be right
        if problem.cause is not None:
            problem.fault = None  # its cause has the fault

    def _faults(self, queued: QueuedEvent) -> list[Problem]:
        """Return the problems of an event, without those that the index repaired by a recovery."""
        if queued.position > self._recovered.get(queued.key, -1):
            return queued.problems
        return [p for p in queued.problems if p.rule != EVENT_ID_GAP and p.cause is None]


def _nothing() -> Findings:
    return []
    yield  # makes this a generator, like the others


def _blocks(event: RouterEvent) -> tuple[int, ...]:
    """Return the blocks that an event stores or removes."""
    data = event.event.data
    return () if isinstance(data, Cleared) else data.block_hashes


def _expected_text(answers: range, as_what: str) -> str:
    least, most = answers.start, answers.stop - 1
    if least == most:
        return f"{_count(most)}, as {as_what}"
    return (
        f"{least} to {_count(most)}: between what the reference index returned and what is held according to the events"
    )


def _count(blocks: int) -> str:
    return "1 block" if blocks == 1 else f"{blocks} blocks"
