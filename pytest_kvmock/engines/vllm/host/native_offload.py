"""vLLM's native offload: its connector between the scheduler, the host tier and the copying worker.

One subject: the transfers of a write-through host. It mocks `OffloadingConnector` of vLLM 0.33.0 with a
`CPUOffloadingSpec`. Nothing here takes time: the caller copies the transfers and reports them when they are done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.base.cache_group import STATE
from pytest_kvmock.engines.base.offload import TierEvent
from pytest_kvmock.engines.vllm.host.chunk_events import ChunkEvents, OffloadGroup, numbered
from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey, ChunkUser
from pytest_kvmock.engines.vllm.host.chunk_groups import ChunkGroup, reachable_blocks
from pytest_kvmock.engines.vllm.host.chunk_lookup import ChunkLookup, HostView
from pytest_kvmock.engines.vllm.host.chunk_store import Chunk, ChunkStore
from pytest_kvmock.engines.vllm.host.offload_steps import (
    Hit,
    OffloadPlan,
    OffloadRequest,
    OffloadStep,
    OffloadStopError,
    OffloadTransfer,
    StateHandOff,
)
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.vllm.host.file_tier import FileTier
    from pytest_kvmock.values.prompt_keys import LoraIds

# Theory of operation
#
# The host is a write-through copy. Computed tokens are stored at the end of each step, in whole chunks from the start
# of the prompt, independent of what the device keeps; loaded chunks stay in the host. In each step a scheduler calls
# `match` for each request that it would admit, `allocated` for each hit that it admits, and `plan` at the end of the
# step; then `ended` for requests that are over, and `complete` with the reported transfers. If the chunks of a step
# find no room, the next step offers them again, together with its own.
#
# Window groups store only the chunks that later prompts can resume from. States are stored separately, each once, when
# the device names it; a state that finds no room is lost.

_MOST_COUNTED: Final = 64_000
"""The most chunks whose offers are counted (vLLM: `max_tracker_size`)."""


class NativeOffload:
    """The host tier of one engine, and the transfers to and from it.

    Args:
        num_chunks: capacity of the host in chunks, at least 1.
        groups: the cache groups of the engine that can be cached.
        blocks_per_chunk: blocks per chunk, at least 1.
        hash_unit: tokens per hash; None: a block of the first group.
        fine_hits: whether hits of the device may end inside a block (`GroupGeometry.fine_hits`).
        retention: which blocks of windows the device keeps (`Retention`).
        policy: eviction policy: "lru" or "arc".
        prompt_only: whether only prompts are stored, without generated tokens.
        store_threshold: number of offers after which a chunk is stored; below 2: at once.
        max_load_tokens: default of `OffloadRequest.max_load_tokens`.
        max_offload_tokens: default of `OffloadRequest.max_offload_tokens`.
        within_step_tokens: the most tokens that are loaded within one step; requests wait for longer hits.
        self_describing: whether events describe their chunks in full.
        files: the folder below the host; None if there is none.
        rng: shuffles the events of one transfer; their order in the original is that of a set.

    Attributes:
        tier: the tier of the host.
        store: the chunks of the host.
        blocks_per_chunk, files: as given.
        largest_offer: the most chunks that a request has offered at once.
    """

    tier = StorageTier.HOST_PINNED

    def __init__(
        self,
        num_chunks: int,
        groups: Sequence[OffloadGroup],
        *,
        blocks_per_chunk: int = 1,
        hash_unit: int | None = None,
        fine_hits: bool = False,
        retention: int | None = 0,
        policy: str = "lru",
        prompt_only: bool = True,
        store_threshold: int = 0,
        max_load_tokens: int | None = None,
        max_offload_tokens: int | None = None,
        within_step_tokens: int = 0,
        self_describing: bool = False,
        files: FileTier | None = None,
        rng: Random | None = None,
    ) -> None:
        self.store = ChunkStore(num_chunks, policy)
        self.blocks_per_chunk = blocks_per_chunk
        self.largest_offer = 0
        self._groups = [ChunkGroup(group, blocks_per_chunk) for group in numbered(groups)]
        self._unit = self._groups[0].size if hash_unit is None else hash_unit
        self._lookup = ChunkLookup(self._groups, blocks_per_chunk, self._unit, fine=fine_hits)
        dense = {group.chunk for group in self._groups if group.window is None}
        self._alignment = None if len(dense) > 1 else max(dense or {group.chunk for group in self._groups})
        self._retention = retention
        # Groups whose tables may contain blocks that the request has freed.
        self._windows = [place for place, each in enumerate(self._groups) if each.window and each.of.kind != STATE]
        self._prompt_only = prompt_only
        self._threshold = store_threshold
        self._limits = max_load_tokens, max_offload_tokens
        self._offers: OrderedDict[ChunkKey, int] = OrderedDict()
        self._budget = self._step_budget = within_step_tokens
        self._events = ChunkEvents(groups, blocks_per_chunk, self_describing, rng or Random(0))  # noqa: S311 - mock data
        self.files = files
        self._has_polled = False  # in this step
        self._next_job = 0
        self._open: dict[int, OffloadTransfer] = {}
        self._loads: list[OffloadTransfer] = []  # of this step
        self._fences: dict[int, set[int]] = {}  # by job: blocks of the device that it reads and that others may get
        self._live: dict[OffloadRequest, None] = {}
        self._over: dict[OffloadRequest, None] = {}
        self._to_flush: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in flight and no ended request is left to plan for."""
        return not self._open and not self._over and (self.files is None or not self.files.pending)

    @property
    def num_blocks(self) -> int:
        """Capacity of the host in blocks."""
        return self.store.capacity * self.blocks_per_chunk

    def resident(self) -> list[ChunkKey]:
        """Return the chunks that can be loaded."""
        return self.store.ready()

    @property
    def unmet_offer(self) -> tuple[int, int] | None:
        """The most chunks that a request offered at once, and the smaller capacity; None if every offer could fit."""
        capacity = self.store.capacity
        return (self.largest_offer, capacity) if self.largest_offer > capacity else None

    def resident_names(self, group: int = 0) -> list[int]:
        """Return the hashes of a group's loadable chunks as its events name them, with repetitions."""
        return [name for key in self.store.ready() if key[1] == group for name in self._events.names_of(key)]

    def shuffle_with(self, rng: Random) -> None:
        """Replace the source of the order in which the chunks of one transfer are published."""
        self._events.rng = rng

    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens of a request that can be loaded after `start` tokens on the device. Changes nothing."""
        chunks, request = self.store.chunks, OffloadRequest(tokens)

        def written(key: ChunkKey) -> Chunk | None:
            chunk = chunks.get(key)
            return chunk if chunk is not None and chunk.is_ready else None

        tail = start % self._groups[0].size if self._lookup.tail_block else 0
        found = self._lookup.longest(request, start - tail, HostView(written, _note_nothing, _note_nothing))
        return found - tail if found is not None and found > tail else 0

    # -------------------------------------------------------------------------------------------------- a step

    def request(
        self,
        tokens: HashedTokens,
        *,
        max_load_tokens: int | None = None,
        max_offload_tokens: int | None = None,
    ) -> OffloadRequest:
        """Register a request.

        Args:
            tokens: its tokens and their names.
            max_load_tokens: see `OffloadRequest`; None: the default of the host.
            max_offload_tokens: see `OffloadRequest`; None: the default of the host.
        """
        load, offload = self._limits
        request = OffloadRequest(
            tokens,
            load if max_load_tokens is None else max_load_tokens,
            offload if max_offload_tokens is None else max_offload_tokens,
            load_tiers=None if tokens.keys is None else tokens.keys.load_tiers,
        )
        self._restart(request)
        self._live[request] = None
        return request

    def match(self, request: OffloadRequest, start: int) -> Hit | None:
        """Look up the tokens that can be loaded for a request that has computed nothing.

        Args:
            request: the request.
            start: tokens that the device has of it.

        Returns:
            The hit, perhaps empty; None if it is not known yet: ask again in the next step.
        """
        self._restart(request)
        if request.jobs:
            return None
        hit = self._lookup.longest(request, start, self._view(request, start))
        if hit is None:
            return None
        if hit and hit <= self._step_budget and start + hit < request.tokens.num_tokens:
            self._step_budget -= hit
            return Hit(start, hit, within_step=True)
        return Hit(start, hit)

    def allocated(
        self,
        request: OffloadRequest,
        blocks: Sequence[Sequence[int]],
        hit: Hit,
        named: Callable[[int], object] = lambda _: False,
    ) -> None:
        """Load a hit for a request that was admitted.

        Args:
            request: the request.
            blocks: all its blocks, by group of the engine.
            hit: the hit that `match` found in this step.
            named: returns whether a block of the device has a name, so that it need not be loaded.
        """
        if not hit.tokens:
            return
        tokens, per_chunk, end = request.tokens, self.blocks_per_chunk, hit.start + hit.tokens
        keys: list[tuple[ChunkKey, int]] = []
        loaded: list[int] = []
        sizes, firsts = [], []
        for place, group in enumerate(self._groups):
            table, size, chunk = blocks[group.number], group.size, group.chunk
            last, chunks = -(-end // size), -(-end // chunk)
            first = next(
                (
                    at
                    for at in range(-(-hit.start // size), last)
                    if table[at] and (hit.within_step or not named(table[at]))
                ),
                last,
            )
            if first < last:
                of_group = range(first // per_chunk, chunks - bool(request.tail))
                keys += zip(
                    group.keys(tokens, of_group.start, of_group.stop),
                    ((at + 1) * chunk for at in of_group),
                    strict=True,
                )
                if request.tail:
                    at = self._lookup.tail_end(group, request.tail)
                    keys.append((group.key(tokens, at), at))
            loaded += table[first:last]
            sizes.append(last - first)
            firsts.append(first)
            request.offered[place] = chunks
        request.tail, request.has_loaded = 0, True
        slots = self.store.read(request.user, keys, waits=not hit.within_step)
        job = OffloadTransfer(self._next_job, request, [key for key, _ in keys], loaded, slots, sizes, firsts)
        self._open_job(job)
        job.is_load, job.within_step = True, hit.within_step
        self._loads.append(job)

    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step, at its end.

        Args:
            step: the decisions of the scheduler.
        """
        plan = OffloadPlan(loads=self._loads, flush=self._to_flush)
        self._loads, self._to_flush, self._step_budget = [], set(), self._budget
        got = frozenset(step.blocks)
        self._extend_tables(step, got)
        new = {job.number for job in plan.loads}
        for request in step.preempted:
            plan.flush |= request.jobs - new
        plan.flush.update(number for number, fenced in self._fences.items() if not fenced.isdisjoint(got))
        for request, states in step.states:
            plan.stores += self._store_states(request, states)
        if self._lookup.tail_block and step.states:
            computed = {each.request: each.upto for each in step.computing}
            for request, states in step.states:
                tail = [state for state in states if state.tokens % self._lookup.tail_block]
                if tail:
                    plan.stores += self._store_tail(request, tail, computed.get(request, 0))
        for request, _, upto, _ in step.computing:
            plan.stores += self._offer(request, upto)
        over = [request for request in step.finished if request in self._over]
        for request in over:
            tokens, at_abort = request.tokens, request.computed
            # The last token was sampled but never computed.
            upto = max(tokens.num_prompt_tokens, tokens.num_tokens - 1) if at_abort is None else at_abort
            for job in self._offer(request, upto):
                plan.stores.append(job)
                self._fence(job, job.held)
                if not got.isdisjoint(job.held):
                    plan.flush.add(job.number)
        for request in over:
            self.store.end(request.user)
            del self._over[request]
        if self.files is not None:
            for request in over:
                self._forget(self.files, request)
            self._poll()
            self._has_polled = False
            self.files.end_schedule()
        return plan

    def ended(self, request: OffloadRequest, *, computed: int | None = None) -> None:
        """Record that a request is over; its blocks are free, although transfers may still read them.

        Args:
            request: the request; a later step lists it in `finished`.
            computed: if it was aborted, the number of its computed tokens.
        """
        if request not in self._live:
            return
        del self._live[request]
        self._over[request] = None
        request.computed, request.is_over = computed, True
        for number in request.jobs:
            self._fence(self._open[number], self._open[number].held)

    def complete(self, jobs: Iterable[int]) -> list[OffloadRequest]:
        """Complete the transfers that are reported as done, in this order.

        Returns:
            The requests that waited for one of these loads.

        Raises:
            OffloadStopError: a store contains a window's block twice, which ends the engine.
        """
        received: list[OffloadRequest] = []
        for number in jobs:
            job = self._open.pop(number)
            self._fences.pop(number, None)
            if job.is_load and not job.within_step:
                received.append(job.request)
            if job.is_dropped:
                continue
            if len({*job.watched}) < len(job.watched):
                twice = next(block for block in job.watched if job.watched.count(block) > 1)
                raise OffloadStopError(
                    f"the native offload ends this engine: transfer {number} stores block {twice} of the device twice "
                    "(vLLM 0.33.0: a KeyError in _remove_pending_job; all requests are lost)"
                )
            job.request.jobs.discard(number)
            if job.is_load:
                self.store.was_read(job.chunks, waited=not job.within_step)
            else:
                self.store.written(job.chunks)
                chunks = [*job.chunks]
                self._events.stored(chunks)
                if self.files is not None:
                    self.store.pin(chunks)
                    self.files.write(job.request, chunks)
                    self._forget(self.files, job.request)
        return received

    def reset(self) -> None:
        """Empty the host without an event; transfers in flight have no effect, and the next step flushes them.

        Reads and writes of files are waited for; the files stay.
        """
        if self.files is not None:
            self._take_finished(self.files, drain=True)
            self.files.forget_promotions()
            self._has_polled = False
        self.store = self.store.emptied()
        self._over.clear()
        self._fences.clear()
        self._events.forget_notes()
        self._to_flush.update(self._open)
        for job in self._open.values():
            job.is_dropped = True
            job.request.jobs.clear()
        for request in self._live:
            request.offered, request.user, request.tail = [0] * len(self._groups), ChunkUser(), 0
        if self.files is not None:
            self.files.forget_all_but(self._live)

    def number_adapters(self, lora_ids: LoraIds) -> None:
        """Set the engine's numbers of adapters, which events carry."""
        self._events.lora_ids = lora_ids

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last call, to be published after those of the device."""
        return self._events.take()

    # ------------------------------------------------------------------------------------------------- details

    def _restart(self, request: OffloadRequest) -> None:
        """Reset a request: its chunks are offered, and its blocks collected, from the first on."""
        count = len(self._groups)
        request.blocks, request.offered = [[] for _ in range(count)], [0] * count

    def _extend_tables(self, step: OffloadStep, got: frozenset[int]) -> None:
        """Add the new blocks of requests to their tables; clear entries that windows freed and other requests got."""
        before: dict[OffloadRequest, list[int]] = {}
        for request, blocks, _, junction in step.computing:
            request.junction = junction
            for table, group in zip(request.blocks, self._groups, strict=True):
                held = blocks[group.number]
                if len(held) > len(table):
                    if request not in before:
                        before[request] = [len(each) for each in request.blocks]
                    table.extend(held[len(table) :])
        if not self._windows or not got:
            return
        per_chunk = self.blocks_per_chunk
        for request in (*self._live, *self._over):
            ends = before.get(request)
            for place in self._windows:
                table = request.blocks[place]
                end = len(table) if ends is None else min(ends[place], len(table))
                if self._prompt_only:  # nothing behind the prompt is stored
                    end = min(end, request.tokens.num_prompt_tokens // self._groups[place].size)
                for at in range(request.offered[place] * per_chunk, end):
                    if table[at] in got:
                        table[at] = 0

    def _view(self, request: OffloadRequest, start: int) -> HostView:
        """Return the view for a look-up of a request behind `start` tokens: the host, and the folder below it."""
        events, files, group = self._events, self.files, self._groups[0]
        if files is None:
            return HostView(self.store.chunks.get, events.note_found, events.note_tail_found)
        serves = files.serves(request.load_tiers)
        first, chunks, size = start // group.chunk, self.store.chunks, group.chunk
        keys = group.keys(request.tokens, first, group.keyed(request.tokens)) if serves else []
        ends = {key: (first + at) * size for at, key in enumerate(keys, 1)}

        def find(key: ChunkKey) -> Chunk | None:
            self._poll()
            found = chunks.get(key)
            if found is None and serves and self._may_come(files, request, key, ends[key]):
                return chunks.get(key, _ASKED_FOR)
            return found

        def note(tokens: HashedTokens, end: int, key: ChunkKey) -> None:
            if key in chunks:
                events.note_found(tokens, end, key)

        return HostView(find, note, note)

    def _may_come(self, files: FileTier, request: OffloadRequest, key: ChunkKey, end: int) -> bool:
        """Return whether a chunk that the host lacks may come from its file: the read begins, or the answer is open."""
        is_there = files.lookup(key, request)
        if not is_there:
            return is_there is None
        room = self.store.offer(request.user, [(key, end)])
        if room is None:
            return False
        if room.evicted:
            self._events.removed(room.evicted)
        files.promote(request, key)
        return True

    def _poll(self) -> None:
        """Take the finished work of the folder's threads, once per step."""
        if self.files is not None and not self._has_polled:
            self._has_polled = True
            self._take_finished(self.files)

    def _take_finished(self, files: FileTier, *, drain: bool = False) -> None:
        for job in files.finished(drain=drain):
            if not job.is_load:
                self.store.was_read(job.keys, waited=False)
                if files.publishes:
                    self._events.written(job.keys, files.locality)
                continue
            came, lost = job.keys[: job.done], job.keys[job.done :]
            self.store.written(came)
            if came:
                self._events.read(came)
            for key in lost:
                self.store.drop(key)

    def _forget(self, files: FileTier, request: OffloadRequest) -> None:
        """Forget the file answers of a request that is over, once all its stores are on the host."""
        is_planned = request not in self._live and request not in self._over
        if is_planned and not any(not self._open[number].is_load for number in request.jobs):
            files.forget(request)

    def _offerable(self, request: OffloadRequest, computed: int) -> int:
        """Return the number of tokens of a request that may be stored if `computed` tokens are computed."""
        tokens = request.tokens
        upto = min(computed, tokens.num_tokens)
        if request.max_offload_tokens is not None:
            upto = min(upto, request.max_offload_tokens)
        return min(upto, tokens.num_prompt_tokens) if self._prompt_only else upto

    def _storable(self, request: OffloadRequest, place: int, upto: int) -> int:
        """Return the number of chunks of a group that may be stored if `upto` tokens may.

        The last chunk of a group with drafts waits for the request's end, because it may be rewritten.
        """
        group, tokens = self._groups[place], request.tokens
        chunks = upto // group.chunk
        if group.of.drafts and upto > tokens.num_prompt_tokens and not request.is_over:
            chunks = max(0, chunks - 1)
        return min(chunks, len(request.blocks[place]) // self.blocks_per_chunk, group.keyed(tokens))

    def _to_offer(
        self, request: OffloadRequest, place: int, last: int, prompt: int
    ) -> tuple[int, int, list[tuple[ChunkKey, int]]]:
        """Return the range of a group's chunks that are considered, and the chunks worth storing, each with its end.

        Args:
            request: the request.
            place: place of the group.
            last: end of the chunks that may be stored.
            prompt: tokens of its prompt that may be stored.
        """
        group, tokens, per_chunk = self._groups[place], request.tokens, self.blocks_per_chunk
        kind, first = group.of, request.offered[place]
        begin, of_prompt, horizon, looks_again = first, prompt // group.chunk, None, False
        if self._retention is None and not kind.drafts and kind.window is not None:
            if request.is_over:
                horizon = last
                aligned = self._alignment is not None and not self._alignment % group.size
                looks_again = last != of_prompt and aligned
            elif last <= of_prompt:
                horizon = of_prompt
        if looks_again:
            assert self._alignment is not None
            blocks = last * per_chunk
            begin = min(first, (blocks - blocks % (self._alignment // group.size)) // per_chunk)
        if last <= begin or kind.kind == STATE:
            return begin, last, []
        keys = group.keys(tokens, begin, last)
        ends = range((begin + 1) * group.chunk, last * group.chunk + 1, group.chunk)
        if kind.window is None and group.window is None:
            return begin, last, list(zip(keys, ends, strict=True))
        marks: tuple[int, ...] = (tokens.num_prompt_tokens - 1,)
        marks += (request.junction,) if request.junction else ()

        def reachable(horizon: int | None) -> set[int]:
            start, end = begin * per_chunk, last * per_chunk
            horizon = None if horizon is None else horizon * per_chunk
            return {
                *reachable_blocks(
                    kind,
                    start,
                    end,
                    alignment=self._alignment,
                    retention=self._retention,
                    marks=marks,
                    horizon=horizon,
                )
            }

        serves = reachable(horizon)
        did_serve = reachable(of_prompt) if looks_again else set()
        table, offered = request.blocks[place], []
        for chunk, key, end in zip(range(begin, last), keys, ends, strict=True):
            places = range(chunk * per_chunk, (chunk + 1) * per_chunk)
            if not table[places[-1]] or (chunk < first and not did_serve.isdisjoint(places)):
                continue
            if serves.isdisjoint(places) or any(not table[at] and at in serves for at in places):
                continue
            offered.append((key, end))
        return begin, last, offered

    def _offer(self, request: OffloadRequest, computed: int) -> list[OffloadTransfer]:
        """Offer the computed chunks that a request has not offered yet; return the transfer, if any chunk is new."""
        upto = self._offerable(request, computed)
        if not (request.is_over and self._retention is None):
            for group, first in zip(self._groups, request.offered, strict=True):
                if upto >= (first + 1) * group.chunk:
                    break
            else:  # most steps of most requests end here
                return []
        lasts = [self._storable(request, place, upto) for place in range(len(self._groups))]
        prompt = self._offerable(request, request.tokens.num_prompt_tokens)
        looked = [self._to_offer(request, place, last, prompt) for place, last in enumerate(lasts)]
        offered = [each for _, _, of_group in looked for each in of_group]
        new: Sequence[ChunkKey] | None = ()
        if offered:
            new = self._admit(request, offered)
            if new is None:
                return []
        for place, (_, last, _) in enumerate(looked):
            request.offered[place] = max(request.offered[place], last)
        if not new:
            return []
        ends, is_new = dict(offered), {*new}
        stored: list[int] = []
        watched: list[int] = []
        held: list[int] = []
        sizes, firsts = [], []
        per_chunk = self.blocks_per_chunk
        for (_, _, of_group), group, table in zip(looked, self._groups, request.blocks, strict=True):
            places = [
                at
                for key, end in of_group
                if key in is_new
                for at in range(end // group.chunk * per_chunk - per_chunk, end // group.chunk * per_chunk)
                if table[at]
            ]
            blocks = [table[at] for at in places]
            stored += blocks
            if group.window is None:
                held += blocks
            else:
                watched += blocks
            sizes.append(len(blocks))
            firsts.append(places[0] if places else 0)
        for key in new:
            self._events.note(request.tokens, ends[key], key)
        return [self._new_store(request, new, stored, (sizes, firsts), watched=watched, held=held)]

    def _admit(self, request: OffloadRequest, offered: Sequence[tuple[ChunkKey, int]]) -> Sequence[ChunkKey] | None:
        """Offer chunks, each with its end, to the host; return the new ones, None if there is no room."""
        self._poll()
        if self._threshold > 1:
            offered = [(key, end) for key, end in offered if self._count(key) >= self._threshold]
        self.largest_offer = max(self.largest_offer, len(offered))
        room = self.store.offer(request.user, offered)
        if room is None:
            return None
        if room.evicted:
            self._events.removed(room.evicted)
        return room.new

    def _store_states(self, request: OffloadRequest, states: Sequence[StateHandOff]) -> list[OffloadTransfer]:
        """Store states that the device has named, each in its own transfer; states without room are lost."""
        jobs: list[OffloadTransfer] = []
        most = self._offerable(request, request.tokens.num_tokens)
        for number, block, tokens in states:
            place = next((at for at, each in enumerate(self._groups) if each.number == number), None)
            if place is None or tokens > most or tokens % self._groups[place].chunk:
                continue
            group = self._groups[place]
            new = self._admit(request, [(group.key(request.tokens, tokens), tokens)])
            if new:
                places = self._of_groups({place: tokens // group.size - 1})
                jobs.append(self._new_store(request, new, [block], places, watched=[block]))
        return jobs

    def _store_tail(
        self, request: OffloadRequest, states: Sequence[StateHandOff], computed: int
    ) -> list[OffloadTransfer]:
        """Store the block that a prompt ends in, for all groups, when its states were copied.

        Raises:
            OffloadStopError: the block lies behind the tokens that may be stored, which ends the engine.
        """
        lookup, tokens, prompt = self._lookup, request.tokens, request.tokens.num_prompt_tokens
        if lookup.margin and not request.has_loaded:
            return []
        end = states[0].tokens
        if end > min(prompt, request.max_offload_tokens or prompt):
            raise OffloadStopError(
                f"the native offload ends this engine: a request's last {end % lookup.tail_block} tokens before "
                f"{end} stand in a block of their own, and max_offload_tokens is {request.max_offload_tokens} "
                "(vLLM 0.33.0: an AssertionError in _build_partial_tail_store_jobs; all requests are lost)"
            )
        if lookup.margin and end + lookup.margin > min(computed, prompt):
            return []
        copied = {state.group: state.block for state in states}
        at = end // lookup.tail_block
        if any(group.number not in copied and at >= len(request.blocks[i]) for i, group in enumerate(self._groups)):
            return []
        ends = [lookup.tail_end(group, end) for group in self._groups]
        keys = [group.key(tokens, tail) for group, tail in zip(self._groups, ends, strict=True)]
        new = self._admit(request, list(zip(keys, ends, strict=True)))
        if not new:
            return []
        places = {keys.index(key): at for key in new}
        for place in places:
            self._events.note_tail(tokens, ends[place], keys[place])
        numbers = [(place, self._groups[place].number) for place in places]
        blocks = [copied[number] if number in copied else request.blocks[place][at] for place, number in numbers]
        return [self._new_store(request, new, blocks, self._of_groups(places), watched=blocks)]

    def _of_groups(self, places: dict[int, int]) -> tuple[list[int], list[int]]:
        """Return `sizes` and `firsts` of a transfer with one block of each given group."""
        count = range(len(self._groups))
        return [int(group in places) for group in count], [places.get(group, 0) for group in count]

    def _new_store(
        self,
        request: OffloadRequest,
        chunks: Sequence[ChunkKey],
        blocks: Sequence[int],
        places: tuple[Sequence[int], Sequence[int]],
        *,
        watched: Sequence[int],
        held: Sequence[int] = (),
    ) -> OffloadTransfer:
        """Make the transfer of admitted chunks; for the other arguments see `OffloadTransfer`."""
        slots = [self.store.chunks[key].slot for key in chunks]
        job = OffloadTransfer(self._next_job, request, chunks, blocks, slots, *places, watched, held)
        self._open_job(job)
        if watched:
            self._fence(job, watched)
        return job

    def _open_job(self, job: OffloadTransfer) -> None:
        self._next_job += 1
        self._open[job.number] = job
        job.request.jobs.add(job.number)

    def _count(self, key: ChunkKey) -> int:
        """Count one more offer of a chunk."""
        offers = self._offers
        count = offers[key] = offers.pop(key, 0) + 1
        if len(offers) > _MOST_COUNTED:
            offers.popitem(last=False)
        return count

    def _fence(self, job: OffloadTransfer, blocks: Sequence[int]) -> None:
        """Let a step wait for a transfer as soon as another request gets one of these blocks."""
        if blocks:
            self._fences.setdefault(job.number, set()).update(blocks)


_ASKED_FOR: Final = Chunk(-1)
"""Stands for a chunk that the folder was asked for and has not answered yet."""


def _note_nothing(tokens: HashedTokens, end: int, key: ChunkKey) -> None:
    """Note nothing, for look-ups that change nothing."""


def offload_of(manager: Any, num_chunks: int, **options: Any) -> NativeOffload:
    """Make the host below a manager of vLLM, with the manager's cache groups; attaches a connector to the manager.

    Args:
        manager: a manager with one cache or with cache groups.
        num_chunks: capacity of the host in chunks.
        **options: arguments of `NativeOffload`, except the groups and their sizes.

    Raises:
        ValueError: `files` below cache groups, or invalid chunks.
    """
    manager.attach_connector()  # it may change which hits drop a block
    geometry = getattr(manager, "geometry", None)
    if geometry is not None and options.get("files") is not None:
        raise ValueError("tiers: 'files' are below engines of one cache, as these alone were recorded with them")
    if geometry is None:
        return NativeOffload(num_chunks, [OffloadGroup(manager.block_size)], **options)
    # A single group contains the layers of the draft model; of several groups, vLLM drops nothing in those that are not
    # flagged.
    is_alone = len(geometry.groups) == 1
    groups = [
        OffloadGroup(
            each.block_size,
            each.kind,
            each.window,
            each.chunk,
            geometry.drop and (each.eagle or is_alone),
            geometry.computed_again,
            number,
        )
        for number, each in enumerate(geometry.groups)
        if each.cacheable
    ]
    chunks = options.get("blocks_per_chunk", 1)
    _check_chunks(groups, num_chunks, chunks, geometry.retention)
    return NativeOffload(
        num_chunks,
        groups,
        hash_unit=geometry.hash_unit,
        fine_hits=geometry.fine_hits,
        retention=geometry.retention,
        **options,
    )


def _check_chunks(groups: Sequence[OffloadGroup], num_chunks: int, blocks: int, retention: int | None) -> None:
    """Check the chunks of a host below cache groups.

    Raises:
        ValueError: the retention is not a multiple of the chunks of windows and states, so that vLLM would not start;
            or the host has no room for a chunk of each group, which every hit needs.
    """
    for group in groups:
        chunk = group.block_size * blocks
        if not group.is_dense and retention is not None and retention % chunk:
            raise ValueError(
                f"tiers: retention must be whole chunks of {chunk} tokens ({blocks} blocks of {group.block_size}) of "
                f"each window and state group, as vLLM 0.33.0 refuses others; got {retention}"
            )
    if num_chunks < len(groups):
        raise ValueError(
            f"tiers: host must have room for a chunk of each of the {len(groups)} cache groups, which a hit needs at "
            f"least, {len(groups) * blocks} blocks; got {num_chunks * blocks}"
        )
