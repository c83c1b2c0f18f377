"""The ledger: it records which blocks are held according to the events, and judges the stream.

One subject: the rules that need memory of a stream, one method a rule.

Theory of operation. The ledger keeps no tree. Per worker, rank and tier it records which blocks are held, and how many
copies of each where residency is counted; and per worker and rank, which Stored last named a block, from which local
hashes, parents and chains follow. It applies every event, a wrong one too, so that one fault is reported once.

Where events are known to be missing it is *out of sync*: every block of that worker and rank counts as unknown until an
event names it again. A problem with an unknown block is nothing new then; it is listed under what opened the desync. A rule
that needs no memory of the stream, such as the chain of hashes inside one event, is judged all the same.

One block alone can be unknown in this way: an engine that evicts a block and stores it again in one move publishes the
Stored first (kvbm-logical: one Stored, then one Removed a Use). The block is held then, and the router removes it. That
is `evicted_and_restored`, and what follows for the block, until an event names it again, is listed under it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from pytest_kvmock.events import Cleared, Removed, RouterEvent, StorageTier, Stored, StreamKey, block_text
from pytest_kvmock.hygiene.content import Chain, own_parent, sparse, wrong_hash
from pytest_kvmock.hygiene.drift import confirm, differences, over_capacity
from pytest_kvmock.hygiene.folding import fold, parts_of, problem_of
from pytest_kvmock.hygiene.injection import Injection
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import LAST, Desync, Residency, Stream
from pytest_kvmock.hygiene.text import blocks_text, ids_text
from pytest_kvmock.prompt_keys import group_of


class Ledger:
    """Judges events one by one, and records what is held.

    `observe` returns the problems that an event shows, causes before what follows from them. No problem is ever raised.
    """

    def __init__(self) -> None:
        self.streams: dict[StreamKey, Stream] = {}

    def copy_with(self, problems: Iterable[Problem]) -> tuple[Ledger, dict[Problem, Problem]]:
        """Return a ledger that holds the same, and is independent from here on.

        Both share the events, which are values. All else is copied, the hash chain of a stream too: it has state.

        Args:
            problems: problems that this ledger found.

        Returns:
            The copy; and those of the problems that it refers to, by their copies.
        """
        events = (event for stream in self.streams.values() for event in (*stream.events, stream.last))
        memo: dict[int, Any] = {id(event): event for event in events}  # how deepcopy shares objects
        ledger = copy.deepcopy(self, memo)
        return ledger, {memo[id(problem)]: problem for problem in problems if id(problem) in memo}

    def open(
        self,
        key: StreamKey,
        *,
        first_id: int | None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        tier_blocks: Mapping[StorageTier, int] | None = None,
        residency: Residency = "unique",
        prefix_closed: bool = True,
        chain: Callable[[], Chain] | None = None,
        unpublished: Callable[[StorageTier], Container[int]] | None = None,
    ) -> Stream:
        """Open the stream of a worker and rank, which holds nothing.

        Args:
            key: (worker_id, dp_rank).
            first_id: the id that its first event has; None for any.
            block_size: tokens a block, to judge token ids by; None: unknown.
            num_blocks: how many blocks it has on the device; None: unknown, and over_capacity is not judged.
            tier_blocks: likewise in the tiers below, by tier.
            residency: see `BackendSpec`; where it is "counted", a block may be stored and removed several times.
            prefix_closed: see `BackendSpec`; where it is false a wrong hash is a warning, and an orphaned child is none.
            chain: makes the rule by which it names blocks, to judge `wrong_hash` by; None: Dynamo's rule.
            unpublished: returns the blocks of a tier that it may hold without a Stored (`Stream.is_unpublished`); a
                function, which copies of the ledger share.
        """
        before = self.streams.get(key)
        stream = self.streams[key] = Stream(
            key,
            first_id=first_id,
            block_size=block_size,
            num_blocks=num_blocks,
            tier_blocks=tier_blocks,
            residency=residency,
            prefix_closed=prefix_closed,
            chain=None if chain is None else chain(),
            unpublished=unpublished,
        )
        stream.restarts = () if before is None else before.restarts
        return stream

    def stream(self, key: StreamKey) -> Stream:
        """The stream of a worker and rank; one that was not opened is like the worker's first rank, if there is one."""
        stream = self.streams.get(key)
        if stream is not None:
            return stream
        first = self.streams.get((key[0], 0))
        if first is None:
            return self.open(key, first_id=None)
        return self.open(
            key,
            first_id=None,
            block_size=first.block_size,
            num_blocks=first.num_blocks,
            tier_blocks=first.tier_blocks,
            residency=first.residency,
            prefix_closed=first.prefix_closed,
        )

    def restarted(self, key: StreamKey, *, first_id: int | None) -> None:
        """Record an announced restart, or a removal: nothing is held, and ids begin with `first_id`."""
        stream = self.streams.get(key)
        if stream is not None:
            stream.clear()
            stream.begin_anew("removal" if first_id is None else "restart")
            stream.next_id, stream.last = first_id, None
            stream.holes.clear()
            stream.late.clear()

    # ------------------------------------------------------------------------------------------------ events

    def observe(self, event: RouterEvent, position: int) -> list[Problem]:
        """Judge one event, and apply it.

        Args:
            event: as it arrived.
            position: its number in the log.
        """
        inner = event.event
        key = (event.worker_id, inner.dp_rank)
        stream = self.streams.get(key) or self.stream(key)
        problems: list[Problem] = []
        part = stream  # what it is about: the blocks of one cache group
        if event.extra is not None and (group := group_of(event.extra)):
            part, stream.restored = stream.group(group), {}
        restored, cause = part.restored, None
        if inner.event_id != stream.next_id and stream.next_id is not None:
            if not stream.take_hole(inner.event_id):
                cause = self._gap(stream, event, position, problems)
                if cause is None:  # a repeat leaves the next id as it was
                    stream.next_id = inner.event_id + 1
        else:
            stream.next_id = inner.event_id + 1
        data = inner.data
        if isinstance(data, Stored):
            found = self._stored(part, event, data)
        elif isinstance(data, Removed):
            found = self._removed(part, event, data)
        else:
            found = []
        for problem in found:
            problem.event, problem.position = event, position
            if cause is not None and problem.cause is None:
                problem.follows_from(cause)
        problems += found
        if isinstance(data, Cleared):
            for each in (stream, *stream.groups.values()):
                each.events.append(event)
            stream.clear()
        if cause is not None:  # a repeat does not count as the event before
            part.restored = restored
        stream.last = part.last = event
        return problems

    def _gap(self, stream: Stream, event: RouterEvent, position: int, problems: list[Problem]) -> Problem | None:
        """Add the problem of an id out of turn. Return the cause of what else the event breaks, where it opens no desync."""
        got, due = event.event.event_id, stream.next_id
        assert due is not None
        if got > due:
            missing = range(due, got)
            stream.holes.append(missing)
            lost, skipped = stream.take_skipped(missing)
            never = f"; the worker never published {_several(skipped)}" if skipped else ""
            observed = f"{_several(lost)} did not arrive" + (f" after event {due - 1}" if due else "") + never
            if not lost:
                observed = f"non-consecutive event id: expected {due}, got {got}{never}"
        elif event == stream.last:
            observed = f"event {got} had arrived already"
        else:
            before = "another event" if got == due - 1 else "event"
            observed = f"{before} {due - 1} had arrived: ids went backwards, as after an unannounced restart"
            stream.begin_anew("backwards")
        problem = problem_of("event_id_gap", stream, observed, f"event {due}", ())
        problem.event, problem.position = event, position
        problems.append(problem)
        if event == stream.last:  # a repeat of the event before: only its own consequences follow from it
            fold(stream, problem)
            return problem
        self._desync(stream, problem)
        return None

    def _stored(self, stream: Stream, event: RouterEvent, data: Stored) -> list[Problem]:
        hashes, parent, tier = data.block_hashes, data.parent_hash, event.storage_tier
        on_device = tier is StorageTier.DEVICE
        held = stream.device if on_device else stream.held(tier)
        fresh = held.keys().isdisjoint(hashes)
        # Below the device blocks come in the order of their eviction, without their parents (kvbm-logical).
        due = parent is None or parent in held or not (on_device or parent in hashes)
        plain = due and fresh and len(set(hashes)) == len(hashes)
        again = set() if fresh else held.keys() & hashes
        before: list[Problem] = []
        if stream.tier_blocks or (
            stream.num_blocks is not None
            and (stream.overfull or stream.copies or len(stream.device) > stream.num_blocks)
        ):
            before = over_capacity(stream)
        problems = [] if plain else self._unsound(stream, event, data, again)
        if event.token_ids is not None and (flaw := sparse(event, data, stream.block_size)) is not None:
            problems.append(problem_of("sparse_tokens", stream, flaw.observed, flaw.expected, (flaw.block,), tier=tier))
        if event.chained:
            problems += self._wrong_hash(stream, event, data, problems)
        if again and stream.residency == "unique":
            problems += self._repeated(stream, hashes, again, tier, alone=not problems)
        elif stream.restored:
            stream.restored = {}
        if on_device and stream.removed_but_resident:
            # Such a block is held, so this event may store it again like any that is.
            resident = stream.removed_but_resident
            stream.restored = {**stream.restored, **{b: resident[b] for b in hashes if b in resident}}
        if not on_device:
            stream.add_below(tier, hashes, again)
        elif plain:
            stream.add(held, hashes, parent)
        else:
            if parent is not None and parent not in held:
                stream.implied.add(parent)
            stream.add_again(hashes, parent, again)
        stream.events.append(event)
        stream.mark_named(hashes, tier)
        desync = stream.desync
        if desync is not None:
            desync.named(tier).update(hashes)
            if on_device and parent is not None:
                desync.resynced.add(parent)
        return before + problems if before else problems

    def wrong_hash(self, event: RouterEvent, position: int, before: Sequence[Problem]) -> list[Problem]:
        """Judge the hashes of a Stored that was observed before it was known that they are a chain.

        Args:
            event: the event.
            position: its number in the log.
            before: what else is wrong with it.
        """
        data = event.event.data
        assert isinstance(data, Stored)
        problems = self._wrong_hash(self.stream((event.worker_id, event.event.dp_rank)), event, data, before)
        for problem in problems:
            problem.event, problem.position = event, position
        return problems

    def _wrong_hash(self, stream: Stream, event: RouterEvent, data: Stored, before: Sequence[Problem]) -> list[Problem]:
        """The wrong_hash of a Stored, if it has one; it follows from a wrong parent among the problems `before`."""
        flaw = wrong_hash(event, data, stream.block_size, stream.hash_chain, stream.parents_of)
        if flaw is None:
            return []
        problem = problem_of("wrong_hash", stream, flaw.observed, flaw.expected, (flaw.block,), tier=event.storage_tier)
        problem.is_error = stream.prefix_closed
        if before and before[0].rule in _OF_THE_CHAIN and before[0].cause is None:
            problem.follows_from(before[0])  # the parent is wrong, so the chain is: one fault
        return [problem]

    def _repeated(
        self, stream: Stream, hashes: tuple[int, ...], again: set[int], tier: StorageTier, *, alone: bool
    ) -> list[Problem]:
        """Record which blocks of a Stored are held already; a duplicate_store, if they all are and nothing else is wrong."""
        desync, problems = stream.desync, []
        stream.doubled, stream.restored = None, {}
        if alone and again.issuperset(hashes):
            observed = f"{blocks_text(hashes)} {'is' if len(hashes) == 1 else 'are'} held already"
            expected = "a block that is held is not stored again"
            stream.doubled = problem_of("duplicate_store", stream, observed, expected, hashes, tier=tier)
            problems.append(fold(stream, stream.doubled, every=True))
        named: Collection[int] = again if desync is None else desync.named(tier)
        if tier is StorageTier.DEVICE:  # what is evicted and stored in one Use is
            stream.restored = {b: desync.cause if desync is not None and b not in named else None for b in again}
        return problems

    def _unsound(self, stream: Stream, event: RouterEvent, data: Stored, again: set[int]) -> list[Problem]:
        """The one of invalid_block and parent_block_not_found that a Stored breaks, if any."""
        hashes, parent, tier = data.block_hashes, data.parent_hash, event.storage_tier
        twice = len(set(hashes)) != len(hashes)
        if (twice or parent in hashes) and (own := own_parent(hashes, parent)) is not None:
            observed = f"block {block_text(own)} is named as its own parent"
            return [
                problem_of("invalid_block", stream, observed, "a block's parent is another block", (own,), tier=tier)
            ]
        if twice or again:
            first = dict(zip(hashes[::-1], data.tokens_hashes[::-1], strict=True)) if twice else {}
            had = first | stream.local_hashes(again)
            for block, local in zip(hashes, data.tokens_hashes, strict=True):
                if had.get(block, local) == local:
                    continue
                # SGLang's plain names do not tell adapters apart: each has a copy of its own.
                if not (stream.residency == "counted" and block in again and stream.is_of_other_adapter(event, block)):
                    observed = f"block {block_text(block)} is held with local hash {block_text(had[block])}"
                    expected = f"one block hash has one local hash, not {block_text(local)} too"
                    problem = problem_of("invalid_block", stream, observed, expected, (block,), tier=tier)
                    return [fold(stream, problem)]
        if tier is not StorageTier.DEVICE:
            return []
        if parent is not None and parent not in stream.device and parent not in stream.implied:
            expected = "the parent is a block that this worker and rank holds, or none for a root"
            problem = problem_of("parent_block_not_found", stream, stream.history(parent), expected, (parent,))
            return [fold(stream, problem)]
        return []

    def _removed(self, stream: Stream, event: RouterEvent, data: Removed) -> list[Problem]:
        hashes, tier = data.block_hashes, event.storage_tier
        on_device = tier is StorageTier.DEVICE
        held = stream.device if on_device else stream.held(tier)
        after = stream.remove(tier, held, hashes)
        first = after[0] if after else LAST
        # Tail first, as all engines do it, each block is the child of the next: one comparison for all of them.
        plain = after[1:] == hashes[:-1] and (
            first == LAST or (first is not None and first < LAST and first not in held)
        )
        if not on_device:
            plain = None not in after
        elif plain and stream.residency == "counted":  # a copy may be left, whose parent is removed
            plain = held.keys().isdisjoint(hashes)
        problems: list[Problem] = []
        removed: dict[int, int | None] = {}
        if not plain:
            unknown: list[int] = []
            for block, child in zip(hashes, after, strict=True):
                if child is None and not (block in stream.implied if on_device else stream.is_unpublished(block, tier)):
                    unknown.append(block)
                elif removed.get(block, LAST) == LAST:
                    removed[block] = child
            expected = "a Removed names blocks that are held"
            for part in parts_of(stream, unknown, tier):
                observed = stream.history(part[0], tier)
                if part[0] in removed:
                    times, over = hashes.count(part[0]), unknown.count(part[0])
                    observed = f"block {block_text(part[0])} is named {times} times, and was held {times - over}"
                problem = problem_of("block_not_found", stream, observed, expected, part, tier=tier)
                problems.append(fold(stream, problem))
        restored = self._restored(stream, event, hashes) if stream.restored else []
        stream.events.append(event)
        stream.mark_named(hashes, tier)
        if restored:
            # Where the engine did it before with this block, all is listed under the first time.
            firsts = (p.cause if p.cause is not None and p.cause.rule == p.rule else p for p in restored)
            resident = zip((problem.blocks[0] for problem in restored), firsts, strict=True)
            stream.removed_but_resident.update(resident)
            problems += restored
        if removed and on_device and stream.prefix_closed:
            problems += self._orphaned(stream, removed)
        if stream.desync is not None:
            stream.desync.named(tier).update(hashes)
        return problems

    def _restored(self, stream: Stream, event: RouterEvent, hashes: tuple[int, ...]) -> list[Problem]:
        """The blocks that the event directly before stored again though they were held, a problem each."""
        last, again = stream.last, stream.restored
        assert last is not None
        stream.restored = {}
        if last.event.event_id + 1 != event.event.event_id or last.storage_tier is not event.storage_tier:
            return []
        problems = []
        for block in dict.fromkeys(hashes):
            if block in again:
                observed = (
                    f"block {block_text(block)} was held already when event {last.event.event_id} stored it again"
                )
                expected = "a block that is evicted and stored again is not removed after that: the router drops it"
                problem = problem_of("evicted_and_restored", stream, observed, expected, (block,))
                cause = again[block]
                if cause is not None:
                    problem.follows_from(cause)
                problems.append(problem)
        if problems and stream.doubled is not None and stream.doubled.cause is None:
            stream.doubled.follows_from(problems[0])
        return problems

    @classmethod
    def _orphaned(cls, stream: Stream, removed: dict[int, int | None]) -> list[Problem]:
        """The children that the device holds though it does not hold their parent, one problem a cause.

        Args:
            stream: the stream of that worker and rank.
            removed: the blocks that were removed there, each with what `Stream.remove` returned.
        """
        orphans: dict[Problem | None, list[tuple[int, int]]] = {}
        desync = stream.desync
        for block, child in removed.items():
            for orphan in stream.orphans(block, child):
                cause = stream.removed_but_resident.get(block)
                if cause is None and desync is not None and orphan not in desync.resynced:
                    cause = desync.cause
                orphans.setdefault(cause, []).append((orphan, block))
        problems = []
        for cause, pairs in orphans.items():
            (orphan, parent), blocks = pairs[0], tuple(orphan for orphan, _ in pairs)
            observed = f"{stream.history(orphan)}, and its parent {block_text(parent)} is no longer held"
            if len(pairs) > 1:
                observed += f"; likewise {len(pairs) - 1} more"
            problem = problem_of("orphaned_child", stream, observed, "a block is removed before its parent is", blocks)
            problem.named = (parent,)
            if cause is not None:
                problem.follows_from(cause)
            stream.orphaned.update(dict.fromkeys(blocks, problem))
            problems.append(problem)
            stream.unconfirmed.append((StorageTier.DEVICE, problem))
        return problems

    # ------------------------------------------------------------------------------------------- comparisons

    def missed(self, key: StreamKey, event_id: int, cause: Problem) -> None:
        """Record that an event did not arrive because of `cause`: its id is no gap, and its blocks are unknown."""
        stream = self.stream(key)
        stream.holes.append(range(event_id, event_id + 1))
        stream.next_id = event_id + 1
        self._desync(stream, cause)

    def subscribed(self, endpoints: Sequence[str]) -> object | None:
        """Return who a consumer is that subscribes at endpoints, for `lost_batches`; a `CapturingLedger` looks who publishes."""

    def lost_batches(
        self,
        key: StreamKey,
        batches: range,
        position: int,
        observed: str = "",
        consumer: object = None,  # noqa: ARG002 - as of `subscribed`
    ) -> list[Problem]:
        """Record batches of a wire that did not arrive, and could not be had: what was in them is unknown.

        A wire numbers batches and no events, so the ids of events show no gap.

        Args:
            key: (worker_id, dp_rank).
            batches: their numbers; none where numbers went backwards, and `start` is the number that was due.
            position: number of the last event so far, for the record.
            observed: what happened; by default that they did not arrive.
            consumer: who lost them: what `subscribed` returned.
        """
        stream = self.stream(key)
        names = f"batch {batches.start}" if len(batches) == 1 else f"batches {batches.start} to {batches.stop - 1}"
        expected = f"batch {batches.start}"
        problem = problem_of("event_id_gap", stream, observed or f"{names} did not arrive", expected, ())
        problem.position, problem.of_batches, stream.restored = position, True, {}
        self._desync(stream, problem)
        return [problem]

    def recovered(self, published: Stream, ids: range) -> list[Problem]:
        """Record a recovery: a worker and rank was asked for some event ids, up to the newest, and these have arrived.

        Args:
            published: all that it has published, in order.
            ids: the ids that it was asked for.

        Returns:
            The problems, among the events that had not arrived, that left blocks resident after a Removed or without
            their parent.
        """
        stream = self.stream((published.worker_id, published.dp_rank))
        before = {*stream.removed_but_resident.values(), *stream.orphaned.values()}
        stream.recover(published, ids)
        news: dict[Problem, Problem] = {}
        for table in (stream.removed_but_resident, stream.orphaned):
            for block, problem in table.items():
                if problem not in before:
                    if problem not in news:
                        news[problem] = dataclasses.replace(problem, cause=None, folded=[])
                    table[block] = news[problem]
        return list(news.values())

    def was_replayed(self, event: RouterEvent) -> bool:
        """Whether an event that arrives was part of a recovery, so that it changes nothing. True once for each event."""
        stream = self.streams.get((event.worker_id, event.event.dp_rank))
        return stream is not None and stream.take_late(event.event.event_id)

    def uncounted(self, event: RouterEvent) -> RouterEvent:
        """The event to apply to an index that counts no copies, for the event that was just observed.

        Where residency is counted, a Removed takes one copy, and the block is held until the last is removed. (Dynamo
        filters so before its indexer: dynamo #8012.)
        """
        data = event.event.data
        stream = self.streams.get((event.worker_id, event.event.dp_rank))
        if stream is None or stream.residency == "unique" or not isinstance(data, Removed):
            return event
        held = stream.groups.get(group_of(event.extra), stream).held(event.storage_tier)
        removed = tuple(block for block in dict.fromkeys(data.block_hashes) if block not in held)
        return dataclasses.replace(event, event=dataclasses.replace(event.event, data=Removed(removed)))

    def skipped(self, key: StreamKey, due: int | None, got: int) -> None:
        """Record that a worker published an event and left out ids before it: they will not arrive.

        Args:
            key: (worker_id, dp_rank).
            due: the id after the last one that it published; None: it has published nothing before.
            got: the id that it published.
        """
        stream = self.streams.get(key)
        if stream is not None and (first := stream.next_id if due is None else due) is not None and first < got:
            stream.skipped.append(range(first, got))

    def published(self, key: StreamKey, next_id: int, position: int) -> list[Problem]:
        """Compare with what the worker published: ids below `next_id`, all of which must have arrived by now."""
        stream = self.streams.get(key) or self.open(key, first_id=0)
        due = next_id - 1 if stream.next_id is None else stream.next_id  # what came before the first is unknown
        if next_id <= due:
            return []
        missing = range(due, next_id)
        lost, skipped = stream.take_skipped(missing)
        never = f"; it never published {_several(skipped)}" if skipped else ""
        problem = problem_of(
            "event_id_gap",
            stream,
            f"the worker published ids up to {next_id - 1}; {_several(lost)} did not arrive{never}",
            "what is published arrives",
            (),
        )
        problem.position = position
        stream.holes.append(missing)
        stream.next_id = next_id
        self._desync(stream, problem)
        return [problem]

    def over_capacity(self, position: int) -> list[Problem]:
        """Compare what each worker and rank holds with its capacity; for a flush, when events are complete.

        Args:
            position: number of the last event so far, for the record.
        """
        problems = [problem for stream in self.streams.values() for problem in over_capacity(stream)]
        for problem in problems:
            problem.position = position
        return problems

    def drift(
        self, key: StreamKey, resident: Collection[int], position: int, tier: StorageTier = StorageTier.DEVICE
    ) -> list[Problem]:
        """Compare the blocks held according to the events with those that the engine holds. A block is reported once.

        Args:
            key: (worker_id, dp_rank).
            resident: block hashes that the engine holds in the tier; where residency is counted, one for each copy.
            position: number of the last event so far, for the record.
            tier: which tier.
        """
        stream = self.stream(key)
        problems = []
        for differing, expected, had in differences(stream, resident, tier):
            fresh = [block for block in differing if (tier, block) not in stream.drifted]
            stream.drifted.update((tier, block) for block in fresh)
            for part in parts_of(stream, fresh, tier):
                problem = self.drift_problem(stream, part, expected, had, tier)
                problem.position = position
                problems.append(fold(stream, problem))
        unconfirmed = [problem for where, problem in stream.unconfirmed if where is tier and problem.cause is None]
        stream.unconfirmed = [pair for pair in stream.unconfirmed if pair[0] is not tier]
        if unconfirmed and problems:
            confirm(stream, unconfirmed, problems, set(resident), tier)
        return problems

    def drift_problem(
        self, stream: Stream, blocks: tuple[int, ...], expected: str, had: str, tier: StorageTier
    ) -> Problem:
        """The problem for blocks in which stream and engine differ in a tier."""
        observed = f"{had} {blocks_text(blocks)}{stream.where_text(tier)}; {stream.history(blocks[0], tier)}"
        return problem_of("engine_drift", stream, observed, expected, blocks, tier=tier)

    def injected(self, injection: Injection) -> None:
        """Take note of a fault that was injected into a stream; a `CapturingLedger` writes it down."""

    def attributed(self, problem: Problem) -> None:
        """Take note of a problem that was found to be a result of an injected fault; likewise."""

    # ---------------------------------------------------------------------------------------------- desyncs

    def _desync(self, stream: Stream, cause: Problem) -> None:
        """Open a desync: every block is unknown. A second cause is listed under the first, and blocks are unknown again."""
        fold(stream, cause)
        for part in (stream, *stream.groups.values()):
            part.desync = Desync(cause if cause.cause is None else cause.cause)


def _several(parts: Sequence[range]) -> str:
    """Several runs of event ids, as text."""
    return ", ".join(map(ids_text, parts))


_OF_THE_CHAIN = ("invalid_block", "parent_block_not_found")
"""The rules whose breach makes the hashes after it wrong as well."""
