"""The ledger: records the blocks that are held according to the events, and judges the stream.

One subject: the rules that need memory of a stream, one method for each rule.

Theory of operation. The ledger keeps no tree. Per worker, rank and tier it records the held blocks, and if residency is
counted, the copies of each. Per worker and rank it records the Stored that last named a block, which gives local
hashes, parents and chains. It applies every event, even a wrong one, so that one fault is reported once.

If events are known to be missing, the stream is *out of sync*: every block of that worker and rank is unknown until an
event names it again. A problem with an unknown block is then listed under the problem that opened the desync. Rules
that need no memory of the stream, such as the chain of hashes inside one event, are still judged.

A single block can also be unknown: an engine that evicts a block and stores it again in one move publishes the Stored
first (kvbm-logical: one Stored, then one Removed per Use). Then the engine holds the block, but the router removed it.
This is `evicted_and_restored`; until an event names the block again, its later problems are listed under it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.content import BlockFlaw, DynamoChain, own_parent, sparse, without_keys, wrong_hash
from pytest_kvmock.oracle.hygiene.drift import confirm, differences, over_capacity
from pytest_kvmock.oracle.hygiene.folding import fold, parts_of, problem_of
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.rules import (
    BLOCK_NOT_FOUND,
    DUPLICATE_STORE,
    ENGINE_DRIFT,
    EVENT_ID_GAP,
    EVICTED_AND_RESTORED,
    INVALID_BLOCK,
    ORPHANED_CHILD,
    PARENT_BLOCK_NOT_FOUND,
    SPARSE_TOKENS,
    WRONG_HASH,
)
from pytest_kvmock.oracle.hygiene.story import story_of, where_text
from pytest_kvmock.oracle.hygiene.stream import LAST, Desync, Stream
from pytest_kvmock.oracle.hygiene.stream_spec import UNKNOWN, StreamSpec
from pytest_kvmock.oracle.hygiene.text import blocks_text, ids_text
from pytest_kvmock.values.events import (
    Cleared,
    Located,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    StreamKey,
    Updated,
    block_text,
)
from pytest_kvmock.values.prompt_keys import group_of, has_window_size

_Answer: TypeAlias = tuple[list[Problem], bool]
"""The problems that an entry shows, and whether it is kept: an entry that changes nothing is not."""


class Ledger:
    """Judges events one by one, and records the held blocks.

    Each input is an entry for `take`, which returns the problems that it shows, causes before their consequences.
    Problems are never raised.

    Args:
        journal: receives taken entries; None: they are not kept.
        judges_hashes: whether to judge the hashes of events that belong to requests.

    Attributes:
        streams: the streams, by worker and rank.
        journal: the journal, or None.
        position: number of the last arrived event, from 0; -1 before the first.
        owned: by shared store, the set of blocks that streams have announced.
    """

    def __init__(self, journal: entries.Journal | None = None, *, judges_hashes: bool = True) -> None:
        self.streams: dict[StreamKey, Stream] = {}
        self.journal = journal
        self.position = -1
        self.owned: dict[str, set[int]] = {}
        self._judges_hashes = judges_hashes
        self._of_the_chain: dict[int, Problem] = {}  # by event number, problems that also make later hashes wrong

    def open(self, key: StreamKey, *, first_id: int | None = None, **about: Any) -> Stream:
        """Open the stream of a worker and rank; `about` are the fields of its `StreamSpec`."""
        self.take(entries.Opened(key, first_id, StreamSpec(**about)))
        return self.streams[key]

    def stream(self, key: StreamKey) -> Stream:
        """Return the stream of a worker and rank. A stream that was not opened is opened with the spec of the worker's
        first rank, if there is one.
        """
        stream = self.streams.get(key)
        if stream is None:
            first = self.streams.get((key[0], 0))
            spec = None
            if first is not None:
                chain = (
                    DynamoChain if first.spec.hash is None else first.spec.chain
                )  # an engine's chain belongs to its first rank
                spec = dataclasses.replace(first.spec, tier_blocks=first.spec.tier_blocks or {}, chain=chain)
            self.take(entries.Opened(key, None, spec))
            stream = self.streams[key]
        return stream

    def is_replay(self, event: RouterEvent) -> bool:
        """Whether a recovery already brought an arriving event, so that it must be taken as `Replayed`."""
        stream = self.streams.get((event.worker_id, event.event.dp_rank))
        return stream is not None and bool(stream.late) and stream.is_late(event.event.event_id)

    # --------------------------------------------------------------------------------------------- entries

    def take(self, entry: entries.Entry) -> list[Problem]:
        """Take the next entry: judge it, apply it, and append it to the journal.

        Returns:
            The problems of the entry, each with the number of the last event.
        """
        if type(entry) is not RouterEvent and (arm := self._arms.get(type(entry))) is not None:
            return self._take(entry, arm)
        event: RouterEvent = entry  # type: ignore[assignment]  # nothing else has no arm
        self.position += 1
        inner = event.event
        key = (event.worker_id, inner.dp_rank)
        stream = self.streams.get(key) or self.stream(key)
        problems: list[Problem] = []
        part, data = stream, inner.data  # the cache group that the event is about
        before = None
        if (event.extra is not None or stream.groups) and not isinstance(data, Cleared):
            part = stream.part_of(event)
            if part is not stream:
                stream.restored = {}
            # TensorRT-LLM may exceed capacity inside one iteration: its Removed come last, or later for another window.
            if stream.groups and not isinstance(data, Removed) and not has_window_size(event.extra):
                before = over_capacity(stream)
            if event.extra is not None and (gone := event.extra.get("silently_gone")):
                part.take_gone(gone)
        restored, cause = part.restored, None
        if inner.event_id != stream.next_id and stream.next_id is not None:
            if not stream.take_hole(inner.event_id):
                cause = self._gap(stream, event, problems)
                if cause is None:  # a repeat does not change the next id
                    stream.next_id = inner.event_id + 1
        else:
            stream.next_id = inner.event_id + 1
        stores = stream.spec.stores
        if stores is not None and event.storage_tier in stores and not isinstance(data, Cleared):
            found = self._owned(part, event, stores[event.storage_tier])
        elif isinstance(data, Stored):
            found = self._stored(part, event, data)
        elif isinstance(data, Removed):
            found = self._removed(part, event, data)
        elif isinstance(data, Updated):
            found = self._updated(part, event, data)
        else:
            found = []
            if isinstance(data, Located):
                part.take_names(event)
        if before:
            found = before + found
        for problem in found:
            problem.event, problem.position = event, self.position
            if cause is not None and problem.cause is None:
                problem.follows_from(cause)
        problems += found
        if problems and problems[0].rule in _OF_THE_CHAIN:
            self._of_the_chain[self.position] = problems[0]
        if isinstance(data, Cleared):
            for each in (stream, *stream.groups.values()):
                each.events.append(event)
            stream.clear(below=stream.spec.clears_below)
        if cause is not None:  # a repeat does not become the previous event
            part.restored = restored
        stream.last = part.last = event
        if self.journal is not None:
            self.journal.append(event)
            if problems:
                self.journal.note(problems)
        return problems

    def take_leaves(self, events: Sequence[RouterEvent]) -> int:
        """Take the leading events of a batch that need no judging; return their number.

        The events are Removed with one device block each, from one stream, with consecutive ids; vLLM publishes hardly
        any other Removed. An event needs no judging if its id is due and its block is held without a child.
        """
        first = events[0]
        stream = self.streams.get(first.key)
        if stream is None or stream.groups or not stream.is_plain or stream.next_id not in (None, first.event_id):
            return 0
        count = 0
        for event in events:
            if not stream.drop_leaf(event.event.data.block_hashes[0]):  # type: ignore[union-attr]  # they are Removed
                break
            count += 1
        if count:
            taken = events[:count]
            stream.events += taken
            stream.last, stream.next_id = taken[-1], taken[-1].event_id + 1
            self.position += count
            if self.journal is not None:
                for event in taken:  # one by one, as a journal may write each to a file
                    self.journal.append(event)
        return count

    def _take(self, entry: entries.Entry, arm: Callable[[Any, Any], _Answer]) -> list[Problem]:
        found, is_kept = arm(self, entry)
        for problem in found:
            if problem.position < 0:
                problem.position = self.position
        if self.journal is not None and is_kept:
            self.journal.add(entry, found)
        return found

    def _gap(self, stream: Stream, event: RouterEvent, problems: list[Problem]) -> Problem | None:
        """Add the problem of an id out of order. If it opens no desync, return it: it is the cause of the event's other
        problems.
        """
        got, due = event.event.event_id, stream.next_id
        assert due is not None
        if got > due:
            stream.holes.append(range(due, got))
            case, (lost, skipped) = "skip", stream.take_skipped(range(due, got))
            never = f"; the worker never published {_several(skipped)}" if skipped else ""
            observed = f"{_several(lost)} did not arrive" + (f" after event {due - 1}" if due else "") + never
            if not lost:
                begun = f"go on from {due - 1} to {got}" if due else f"begin with {got}"
                observed = f"event ids {begun}{never}"
        elif event == stream.last:
            case, observed = "repeat", f"event {got} had arrived already"
        else:
            case, before = "backwards", "another event" if got == due - 1 else "event"
            observed = f"{before} {due - 1} had arrived: ids went backwards, as after an unannounced restart"
            stream.begin_anew("backwards")
        problem = problem_of(EVENT_ID_GAP, stream, observed, f"event {due}", (), case=case)
        problem.event, problem.position = event, self.position
        problems.append(problem)
        if event == stream.last:  # a repeat of the previous event: only its own problems follow from it
            fold(stream, problem)
            return problem
        self._desync(stream, problem)
        return None

    def _stored(self, stream: Stream, event: RouterEvent, data: Stored) -> list[Problem]:
        if (event.extra is not None or stream.spec.full_reports) and stream.take_report(event, data):
            return []
        if (event.extra is not None or stream.groups or type(data) is not Stored) and stream.names_alone(event):
            stream.take_names(event)
            return []
        hashes, parent, tier = data.block_hashes, data.parent_hash, event.storage_tier
        on_device = tier is StorageTier.DEVICE
        held = stream.device if on_device else stream.held(tier)
        partial = has_window_size(event.extra)
        if partial:
            stream.give_way(hashes, is_told=_tells(event))
        fresh = held.keys().isdisjoint(hashes)
        # Below the device, blocks arrive in order of eviction, without their parents (kvbm-logical).
        due = parent is None or parent in held or not (on_device or parent in hashes)
        plain = due and fresh and len(set(hashes)) == len(hashes)
        again = set() if fresh else held.keys() & hashes
        before: list[Problem] = []
        spec = stream.spec
        is_at_rest = not (partial and stream.groups)  # see `take`: TensorRT-LLM may exceed capacity for a moment
        if is_at_rest and (
            spec.tier_blocks
            or (
                spec.num_blocks is not None
                and (stream.overfull or stream.copies or len(stream.device) > spec.num_blocks)
            )
        ):
            before = over_capacity(stream)
        problems = [] if plain else self._unsound(stream, event, data, again)
        if event.token_ids is not None and (flaw := sparse(event, data, spec.block_size, partial=partial)) is not None:
            problems.append(problem_of(SPARSE_TOKENS, stream, flaw.observed, flaw.expected, (flaw.block,), tier=tier))
        if self._judges_hashes and (event.chained or (not on_device and _hides_keys(event))):
            problems += self._wrong_hash(stream, event, data, problems)
        elif self._judges_hashes and not on_device and (differs := stream.unlike_device(event, data)) is not None:
            problems.append(self._hash_problem(stream, event, differs))
        elif self._judges_hashes and on_device and spec.compares_tokens and not problems:
            problems += self._without_keys(stream, event, data)
        if again and spec.residency == "unique":
            problems += self._repeated(stream, hashes, again, tier, alone=not problems)
        elif stream.restored:
            stream.restored = {}
        if on_device and stream.removed_but_resident:
            # These blocks count as held, so this event may store them again like any held block.
            resident = stream.removed_but_resident
            stream.restored = {**stream.restored, **{b: resident[b] for b in hashes if b in resident}}
        if not on_device:
            stream.add_names(tier, hashes, again)
        elif plain:
            stream.add(held, hashes, parent)
        else:
            if parent is not None and parent not in held:
                stream.implied.add(parent)
            stream.add_again(hashes, parent, again)
        if partial and event.extra is not None:
            for block, level in zip(hashes, event.extra.get("cache_levels", ()), strict=False):
                stream.move(block, level)
        stream.events.append(event)
        stream.mark_named(hashes, tier)
        desync = stream.desync
        if desync is not None:
            desync.named(tier).update(hashes)
            if on_device and parent is not None:
                desync.resynced.add(parent)
        return before + problems if before else problems

    def _owned(self, stream: Stream, event: RouterEvent, store: str) -> list[Problem]:
        """Apply an event about a shared store. Its blocks are a set, and no worker holds them."""
        owned, data = self.owned.setdefault(store, set()), event.event.data
        if isinstance(data, Removed):
            owned.difference_update(data.block_hashes)
        elif isinstance(data, Stored | Located):
            owned.update(data.block_hashes)
        stream.events.append(event)
        return []

    def attention_group(self, key: StreamKey) -> int | None:
        """Return the number of the attention group of a worker and rank; -1 if unknown, None if it has one cache."""
        stream = self.streams.get(key)
        if stream is None or not stream.groups:
            return None
        return -1 if stream.group_idx is None else stream.group_idx

    def _wrong_hash(self, stream: Stream, event: RouterEvent, data: Stored, before: Sequence[Problem]) -> list[Problem]:
        """Return the wrong_hash of a Stored, if any, listed under a wrong parent among the problems `before`."""
        if not event.chained and _hides_keys(event):
            flaw = stream.unlike_before(event, data)
        else:  # also for a sink whose hashes were later found to be a chain
            partial = has_window_size(event.extra)
            size = stream.spec.block_size
            flaw = wrong_hash(event, data, size, stream.hash_chain, stream.parents_of, partial=partial)
        if flaw is None and event.chained and event.storage_tier is not StorageTier.DEVICE:
            flaw = stream.unlike_device(event, data)
        if flaw is None:
            return []
        problem = self._hash_problem(stream, event, flaw)
        if before and before[0].rule in _OF_THE_CHAIN and before[0].cause is None:
            problem.follows_from(before[0])  # a wrong parent makes the chain wrong: one fault
        return [problem]

    def _without_keys(self, stream: Stream, event: RouterEvent, data: Stored) -> list[Problem]:
        """Return a warning if the names of a Stored ignore the keys that it carries, for an unknown rule for names."""
        flaw = without_keys(event, data, stream.spec.block_size, stream.hash_chain)
        if flaw is None:
            return []
        problem = self._hash_problem(stream, event, flaw)
        problem.is_error = False
        return [problem]

    @staticmethod
    def _hash_problem(stream: Stream, event: RouterEvent, flaw: BlockFlaw) -> Problem:
        problem = problem_of(WRONG_HASH, stream, flaw.observed, flaw.expected, (flaw.block,), tier=event.storage_tier)
        # Only engines of Dynamo that are not prefix-closed link blocks wrongly without a fault.
        problem.is_error = stream.spec.prefix_closed or not isinstance(stream.hash_chain, DynamoChain)
        return problem

    def _repeated(
        self, stream: Stream, hashes: tuple[int, ...], again: set[int], tier: StorageTier, *, alone: bool
    ) -> list[Problem]:
        """Record the blocks of a Stored that are held already; return a duplicate_store if all are held and nothing
        else is wrong.
        """
        desync, problems = stream.desync, []
        stream.doubled, stream.restored = None, {}
        if alone and again.issuperset(hashes):
            observed = f"{blocks_text(hashes)} {'is' if len(hashes) == 1 else 'are'} held already"
            expected = "a block that is held is not stored again"
            stream.doubled = problem_of(DUPLICATE_STORE, stream, observed, expected, hashes, tier=tier)
            problems.append(fold(stream, stream.doubled, every=True))
        named: Collection[int] = again if desync is None else desync.named(tier)
        if tier is StorageTier.DEVICE:  # a block that one Use evicts and stores again is on the device
            stream.restored = {b: desync.cause if desync is not None and b not in named else None for b in again}
        return problems

    def _unsound(self, stream: Stream, event: RouterEvent, data: Stored, again: set[int]) -> list[Problem]:
        """Return the invalid_block or parent_block_not_found of a Stored, if any."""
        hashes, parent, tier = data.block_hashes, data.parent_hash, event.storage_tier
        twice = len(set(hashes)) != len(hashes)
        if (twice or parent in hashes) and (own := own_parent(hashes, parent)) is not None:
            observed = f"block {block_text(own)} is named as its own parent"
            return [problem_of(INVALID_BLOCK, stream, observed, "a block's parent is another block", (own,), tier=tier)]
        if twice or again:
            first = dict(zip(hashes[::-1], data.tokens_hashes[::-1], strict=True)) if twice else {}
            had = first | stream.local_hashes(again)
            for block, local in zip(hashes, data.tokens_hashes, strict=True):
                if had.get(block, local) == local:
                    continue
                # SGLang's plain names do not differ between adapters; each adapter has its own copy.
                if not (
                    stream.spec.residency == "counted" and block in again and stream.is_of_other_adapter(event, block)
                ):
                    observed = f"block {block_text(block)} is held with local hash {block_text(had[block])}"
                    expected = f"one block hash has one local hash, not {block_text(local)} too"
                    problem = problem_of(INVALID_BLOCK, stream, observed, expected, (block,), tier=tier)
                    return [fold(stream, problem)]
        if tier is not StorageTier.DEVICE:
            return []
        held = (stream.device, stream.implied, stream.doubtful)
        if parent is not None and not any(parent in blocks for blocks in held):
            expected = "the parent is a block that this worker and rank holds, or none for a root"
            problem = problem_of(PARENT_BLOCK_NOT_FOUND, stream, story_of(stream, parent), expected, (parent,))
            return [fold(stream, problem)]
        return []

    def _removed(self, stream: Stream, event: RouterEvent, data: Removed) -> list[Problem]:
        hashes, tier = data.block_hashes, event.storage_tier
        on_device = tier is StorageTier.DEVICE
        held = stream.device if on_device else stream.held(tier)
        if len(hashes) == 1 and on_device and stream.is_plain and stream.drop_leaf(hashes[0]):
            stream.events.append(event)
            return []
        after = stream.remove(tier, held, hashes)
        first = after[0] if after else LAST
        # All engines remove the tail first, so each block is the child of the next one: one comparison covers all.
        plain = after[1:] == hashes[:-1] and (
            first == LAST or (first is not None and first < LAST and first not in held)
        )
        if not on_device:
            plain = None not in after
        elif plain and stream.spec.residency == "counted":  # a copy of a block may remain while its parent is removed
            plain = held.keys().isdisjoint(hashes)
        problems: list[Problem] = []
        removed: dict[int, int | None] = {}
        unpublished = stream.unpublished
        if unpublished:
            stream.unpublished = frozenset()
        if not plain:
            unknown: list[int] = []
            for block, child in zip(hashes, after, strict=True):
                if child is None and block not in (stream.implied if on_device else unpublished):
                    if on_device and stream.takes_doubt(block):
                        continue
                    unknown.append(block)
                elif removed.get(block, LAST) == LAST:
                    removed[block] = child
            expected = "a Removed names blocks that are held"
            for part in parts_of(stream, unknown, tier):
                observed = story_of(stream, part[0], tier)
                if part[0] in removed:
                    times, over = hashes.count(part[0]), unknown.count(part[0])
                    observed = f"block {block_text(part[0])} is named {times} times, and was held {times - over}"
                problem = problem_of(BLOCK_NOT_FOUND, stream, observed, expected, part, tier=tier)
                problems.append(fold(stream, problem))
        restored = self._restored(stream, event, hashes) if stream.restored else []
        stream.events.append(event)
        stream.mark_named(hashes, tier)
        if restored:
            # If the engine did this to the block before, later problems are listed under the first one.
            firsts = (p.cause if p.cause is not None and p.cause.rule == p.rule else p for p in restored)
            resident = zip((problem.blocks[0] for problem in restored), firsts, strict=True)
            stream.removed_but_resident.update(resident)
            problems += restored
        if removed and on_device and stream.spec.prefix_closed:
            problems += self._orphaned(stream, removed, event)
        if stream.desync is not None:
            stream.desync.named(tier).update(hashes)
        return problems

    def _updated(self, stream: Stream, event: RouterEvent, data: Updated) -> list[Problem]:
        """Apply a move of a block between tiers, or a change of its priority; links do not change."""
        block, problems = data.block_hash, []
        if block not in stream.device and block not in stream.implied:
            observed, expected = story_of(stream, block), "an Updated names a block that is held"
            problem = problem_of(BLOCK_NOT_FOUND, stream, observed, expected, (block,))
            problems.append(fold(stream, problem))
        elif data.levels is not None:
            level = int(block in stream.moved)
            # All levels below the device count as the host.
            if level != min(data.levels[0], 1) and (stream.desync is None or block in stream.desync.resynced):
                observed = f"block {block_text(block)} is on level {level}, and moves from level {data.levels[0]}"
                expected = "an Updated moves a block from the level where it is"
                problems.append(fold(stream, problem_of(BLOCK_NOT_FOUND, stream, observed, expected, (block,))))
            stream.move(block, data.levels[1])
        stream.restored = {}
        stream.events.append(event)
        stream.mark_named((block,), StorageTier.DEVICE)
        if stream.desync is not None:
            stream.desync.resynced.add(block)
        return problems

    def _restored(self, stream: Stream, event: RouterEvent, hashes: tuple[int, ...]) -> list[Problem]:
        """Return a problem for each removed block that the previous event stored again while it was held."""
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
                problem = problem_of(EVICTED_AND_RESTORED, stream, observed, expected, (block,))
                cause = again[block]
                if cause is not None:
                    problem.follows_from(cause)
                problems.append(problem)
        if problems and stream.doubled is not None and stream.doubled.cause is None:
            stream.doubled.follows_from(problems[0])
        return problems

    @classmethod
    def _orphaned(cls, stream: Stream, removed: dict[int, int | None], event: RouterEvent) -> list[Problem]:
        """Return the problems of device blocks whose parent is not held, one per cause.

        Args:
            stream: the stream of that worker and rank.
            removed: the removed blocks, each with the result of `Stream.remove`.
            event: the Removed.
        """
        untold = has_window_size(event.extra) and not _tells(event)
        orphans: dict[Problem | None, list[tuple[int, int]]] = {}
        desync = stream.desync
        for block, child in removed.items():
            if stream.doubtful.get(block):  # the engine may hold a copy of it
                continue
            for orphan in stream.orphans(block, child):
                if orphan in stream.gone or (untold and stream.device[orphan] == LAST):
                    continue
                cause = stream.removed_but_resident.get(block)
                if cause is None and desync is not None and orphan not in desync.resynced:
                    cause = desync.cause
                orphans.setdefault(cause, []).append((orphan, block))
        problems = []
        for cause, pairs in orphans.items():
            (orphan, parent), blocks = pairs[0], tuple(orphan for orphan, _ in pairs)
            observed = f"{story_of(stream, orphan)}, and its parent {block_text(parent)} is no longer held"
            if len(pairs) > 1:
                observed += f"; the same for {len(pairs) - 1} more"
            problem = problem_of(ORPHANED_CHILD, stream, observed, "a block is removed before its parent is", blocks)
            problem.named = (parent,)
            if cause is not None:
                problem.follows_from(cause)
            stream.orphaned.update(dict.fromkeys(blocks, problem))
            problems.append(problem)
            stream.unconfirmed.append((StorageTier.DEVICE, problem))
        return problems

    # ------------------------------------------------------------------------------------------- comparisons

    def _opened(self, entry: entries.Opened) -> _Answer:
        before = self.streams.get(entry.key)
        stream = self.streams[entry.key] = Stream(entry.key, entry.spec or UNKNOWN, first_id=entry.first_id)
        stream.restarts = () if before is None else before.restarts
        return [], True

    def _replayed(self, entry: entries.Replayed) -> _Answer:
        self.position += 1
        self.stream(entry.event.key).take_late(entry.event.event_id)
        return [], True

    def _removed_worker(self, entry: entries.WorkerRemoved) -> _Answer:
        for key in entry.keys:
            stream = self.streams.get(key)
            if stream is not None:
                stream.clear()
                stream.begin_anew("removal" if entry.first_id is None else "restart")
                stream.next_id, stream.last = entry.first_id, None
                stream.holes.clear()
                stream.late.clear()
        return [], True

    def _missed(self, entry: entries.Missed) -> _Answer:
        stream = self.stream(entry.key)
        stream.holes.append(range(entry.event_id, entry.event_id + 1))
        stream.next_id = entry.event_id + 1
        problem = Problem(entry.rule, *entry.key, entry.observed, entry.expected, entry.event)
        self._desync(stream, problem)
        return [problem], True

    def _lost(self, entry: entries.BatchesLost) -> _Answer:
        stream = self.stream((entry.worker_id, entry.dp_rank))
        case = "batch" if entry.batches else "batch_backwards"
        problem = problem_of(EVENT_ID_GAP, stream, entry.text, f"batch {entry.batches.start}", (), case=case)
        problem.of_batches, stream.restored = True, {}
        self._desync(stream, problem)
        return [problem], True

    def _ids_begun(self, entry: entries.IdsBegun) -> _Answer:
        stream = self.streams.get(entry.key)
        changes = stream is not None and bool(stream.late)
        if stream is not None:
            stream.late.clear()
        return [], changes

    def _unpublished(self, entry: entries.Unpublished) -> _Answer:
        self.stream(entry.key).unpublished = entry.blocks
        return [], True

    def _chained(self, entry: entries.HashesChained) -> _Answer:
        event, before = entry.event, self._of_the_chain.get(entry.position)
        assert isinstance(event.data, Stored)
        found = self._wrong_hash(self.stream(event.key), event, event.data, () if before is None else (before,))
        for problem in found:
            problem.event, problem.position = event, entry.position
        return found, True

    def _recovered(self, entry: entries.Recovered) -> _Answer:
        """Return the problems of recovered events that left blocks resident after a Removed, or orphaned."""
        stream = self.stream((entry.published.worker_id, entry.published.dp_rank))
        before = {*stream.removed_but_resident.values(), *stream.orphaned.values()}
        stream.recover(entry.published, entry.ids)
        news: dict[Problem, Problem] = {}
        for table in (stream.removed_but_resident, stream.orphaned):
            for block, problem in table.items():
                if problem not in before:
                    if problem not in news:
                        news[problem] = dataclasses.replace(problem, cause=None, folded=[], position=self.position)
                    table[block] = news[problem]
        return list(news.values()), True

    def _skipped(self, entry: entries.Skipped) -> _Answer:
        stream = self.streams.get(entry.key)
        if stream is None:
            return [], False
        first = stream.next_id if entry.due is None else entry.due
        if first is not None and first < entry.got:
            stream.skipped.append(range(first, entry.got))
        return [], True

    # ------------------------------------------------------------------------------------------- comparisons

    def uncounted(self, event: RouterEvent) -> RouterEvent:
        """Return the event that was just taken in the form for an index that does not count copies.

        If residency is counted, a Removed removes one copy, and the block is held until the last copy is removed.
        (Dynamo has the same filter before its indexer: dynamo #8012.)
        """
        data = event.event.data
        if not isinstance(data, Removed):
            return event
        stream = self.streams.get((event.worker_id, event.event.dp_rank))
        if stream is None or stream.spec.residency == "unique":
            return event
        held = stream.part(group_of(event.extra)).held(event.storage_tier)
        blocks = data.block_hashes
        if held.keys().isdisjoint(blocks) and (len(blocks) == 1 or len(set(blocks)) == len(blocks)):
            return event
        removed = tuple(block for block in dict.fromkeys(blocks) if block not in held)
        return dataclasses.replace(event, event=dataclasses.replace(event.event, data=Removed(removed)))

    def _published(self, entry: entries.IdsPublished) -> _Answer:
        if entry.key not in self.streams:
            self.take(entries.Opened(entry.key, 0))
        stream, next_id = self.streams[entry.key], entry.next_id
        due = next_id - 1 if stream.next_id is None else stream.next_id  # ids before the first event are unknown
        if next_id <= due:
            return [], False
        missing = range(due, next_id)
        lost, skipped = stream.take_skipped(missing)
        never = f"; it never published {_several(skipped)}" if skipped else ""
        problem = problem_of(
            EVENT_ID_GAP,
            stream,
            f"the worker published ids up to {next_id - 1}; {_several(lost)} did not arrive{never}",
            "what is published arrives",
            (),
            case="never_arrived",
        )
        stream.holes.append(missing)
        stream.next_id = next_id
        self._desync(stream, problem)
        return [problem], True

    def _counted(self, _: entries.Counted) -> _Answer:
        problems = [problem for stream in self.streams.values() for problem in over_capacity(stream)]
        return problems, bool(problems)

    def _resident(self, entry: entries.Resident) -> _Answer:
        """Return the problems of blocks in which stream and engine differ; each block is reported once."""
        stream, tier, resident = self.stream(entry.key), entry.tier, entry.blocks
        problems = []
        for differing, expected, had in differences(stream, resident, tier, entry.unpublished):
            fresh = [block for block in differing if (tier, block) not in stream.drifted]
            stream.drifted.update((tier, block) for block in fresh)
            parts = parts_of(stream, fresh, tier)
            problems += [fold(stream, self.drift_problem(stream, part, expected, had, tier)) for part in parts]
        for problem in problems if not stream.spec.restores else ():
            if problem.cause is not None and problem.cause.rule == EVICTED_AND_RESTORED:
                problem.stand()
        waiting = [pair for pair in stream.unconfirmed if pair[0] is tier]
        stream.unconfirmed = [pair for pair in stream.unconfirmed if pair[0] is not tier]
        unconfirmed = [problem for _, problem in waiting if problem.cause is None]
        if unconfirmed and problems:
            confirm(stream, unconfirmed, problems, set(resident), tier)
        return problems, bool(problems or waiting)

    def drift_problem(
        self, stream: Stream, blocks: tuple[int, ...], expected: str, had: str, tier: StorageTier
    ) -> Problem:
        """Make the problem of blocks that differ between stream and engine in a tier."""
        observed = f"{had} {blocks_text(blocks)}{where_text(stream, tier)}; {story_of(stream, blocks[0], tier)}"
        return problem_of(ENGINE_DRIFT, stream, observed, expected, blocks, tier=tier)

    def _known(self, _: entries.Subscribed | entries.Injected | entries.Attributed) -> _Answer:
        return [], True

    # ---------------------------------------------------------------------------------------------- desyncs

    def _desync(self, stream: Stream, cause: Problem) -> None:
        """Open a desync: every block becomes unknown. A second cause is listed under the first, and makes blocks
        unknown again.
        """
        fold(stream, cause)
        for part in (stream, *stream.groups.values()):
            part.desync = Desync(cause if cause.cause is None else cause.cause)

    _arms: ClassVar[Mapping[type, Callable[[Any, Any], _Answer]]] = {
        entries.Opened: _opened,
        entries.Replayed: _replayed,
        entries.WorkerRemoved: _removed_worker,
        entries.Missed: _missed,
        entries.Skipped: _skipped,
        entries.Subscribed: _known,
        entries.BatchesLost: _lost,
        entries.IdsBegun: _ids_begun,
        entries.Unpublished: _unpublished,
        entries.HashesChained: _chained,
        entries.Recovered: _recovered,
        entries.IdsPublished: _published,
        entries.Counted: _counted,
        entries.Resident: _resident,
        entries.Injected: _known,
        entries.Attributed: _known,
    }


def _hides_keys(event: RouterEvent) -> bool:
    """Whether an event lacks the keys that were hashed with its tokens, as events of vLLM's host do."""
    return event.extra is not None and event.extra.get("extra_keys", ()) is None


def _tells(event: RouterEvent) -> bool:
    """Whether an engine's events list blocks that it has dropped without a Removed; no wire format has that."""
    return event.extra is not None and "silently_gone" in event.extra


def _several(parts: Sequence[range]) -> str:
    """Return the text of several ranges of event ids."""
    return ", ".join(map(ids_text, parts))


_OF_THE_CHAIN = (INVALID_BLOCK, PARENT_BLOCK_NOT_FOUND)
"""The rules that, when broken, also make later hashes wrong."""
