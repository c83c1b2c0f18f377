"""vLLM's native offload: what its connector does between the scheduler, the host tier and the worker that copies.

One subject: the transfers of a write-through host. It does what `OffloadingConnector` of vLLM 0.33.0 does with a
`CPUOffloadingSpec`. Nothing here takes time: whoever copies the transfers reports them when they are done.
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
# The host is a write-through copy: what requests compute is stored at the end of each step, in whole chunks from the
# start of the prompt, whatever the device keeps; what is loaded stays there. In each step a scheduler calls `match` for
# each request that it would admit, `allocated` for each hit that it admits, and `plan` at its end; then `ended` for
# what is over, and `complete` with the transfers that are reported. The chunks of a step that find no room are offered
# again, with more of them, in the next one.
#
# Of a window only those chunks are stored that later prompts can resume from. States are stored apart, each once, when
# the device names it; one that finds no room is lost.

_MOST_COUNTED: Final = 64_000
"""Chunks whose offers are counted at most (vLLM: `max_tracker_size`)."""


class NativeOffload:
    """The host tier of one engine, and what is copied to it and from it.

    Args:
        num_chunks: chunks that the host has room for, at least 1.
        groups: the cache groups of the engine that can be cached.
        blocks_per_chunk: blocks of a chunk, at least 1.
        hash_unit: tokens of a hash; None: a block of the first group.
        fine_hits: whether the device's hits may end inside a block (`GroupGeometry.fine_hits`).
        retention: which blocks of windows the device keeps (`Retention`).
        policy: what is evicted: "lru" or "arc".
        prompt_only: whether only prompts are stored, and not what is generated.
        store_threshold: how often a chunk must be offered before it is stored; below 2: at once.
        max_load_tokens: as `OffloadRequest`, like the next one; of requests that have no limit of their own.
        max_offload_tokens: as above.
        within_step_tokens: tokens that are loaded within one step at most; longer hits are waited for.
        self_describing: whether events say all that there is to say of a chunk.
        files: the folder below the host; None: there is none.
        rng: shuffles the events of one transfer, which have the order of a set in the original.

    Attributes:
        tier: the host's.
        store: what is there.
        blocks_per_chunk, files: as above.
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
        # Tables in which blocks are found that the request has let go of.
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
        self._fences: dict[int, set[int]] = {}  # by job, blocks of the device that it reads and others may get
        self._live: dict[OffloadRequest, None] = {}
        self._over: dict[OffloadRequest, None] = {}
        self._to_flush: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing that is over has to be planned for."""
        return not self._open and not self._over and (self.files is None or not self.files.pending)

    @property
    def num_blocks(self) -> int:
        """Blocks that the host has room for."""
        return self.store.capacity * self.blocks_per_chunk

    def resident(self) -> list[ChunkKey]:
        """The chunks that can be loaded."""
        return self.store.ready()

    @property
    def unmet_offer(self) -> tuple[int, int] | None:
        """The most chunks that a request has offered at once, and those that there is room for, where these are fewer.

        None: all had room.
        """
        capacity = self.store.capacity
        return (self.largest_offer, capacity) if self.largest_offer > capacity else None

    def resident_names(self, group: int = 0) -> list[int]:
        """Hashes of what can be loaded of a group, as its events name it; repeated where two of them do."""
        return [name for key in self.store.ready() if key[1] == group for name in self._events.names_of(key)]

    def shuffle_with(self, rng: Random) -> None:
        """Have another source of the order in which the chunks of one transfer are published."""
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
        """Make a request known.

        Args:
            tokens: its tokens and their names.
            max_load_tokens: as `OffloadRequest`, like the next one.
            max_offload_tokens: as above.
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
        """Look up what can be loaded for a request that has computed nothing.

        Args:
            request: which.
            start: tokens that the device has of it.

        Returns:
            None where that cannot be said yet: ask again in the next step.
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
            request: which.
            blocks: all blocks that it has, by group of the engine.
            hit: what `match` found in this step.
            named: whether a block of the device has a name, as those have that need not be loaded.
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
            step: what the scheduler has decided.
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
            # The last token was sampled, and never computed.
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
        """A request is over, and its blocks are free, while they are still being copied.

        Args:
            request: which; a later step has it among those that are finished.
            computed: of one that was aborted, how many of its tokens were computed.
        """
        if request not in self._live:
            return
        del self._live[request]
        self._over[request] = None
        request.computed, request.is_over = computed, True
        for number in request.jobs:
            self._fence(self._open[number], self._open[number].held)

    def complete(self, jobs: Iterable[int]) -> list[OffloadRequest]:
        """Transfers are reported as done, in this order.

        Returns:
            The requests whose loads have come, which they were waiting for.

        Raises:
            OffloadStopError: a store has a block of a window twice; the engine ends by it.
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
        """Empty the host, without an event; what is under way comes for nothing, and is flushed in the next step.

        What is read from files, and written, is waited for; the files stay.
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
        """Take the numbers that the engine has for adapters, which its events carry."""
        self._events.lora_ids = lora_ids

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last time, to be published after those of the device."""
        return self._events.take()

    # ------------------------------------------------------------------------------------------------- details

    def _restart(self, request: OffloadRequest) -> None:
        """All of a request is offered, and its blocks are found, from the first one on."""
        count = len(self._groups)
        request.blocks, request.offered = [[] for _ in range(count)], [0] * count

    def _extend_tables(self, step: OffloadStep, got: frozenset[int]) -> None:
        """Note the blocks that requests have got; what windows have let go of, and others got, is lost to them."""
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
                if self._prompt_only:  # of what is behind nothing is stored
                    end = min(end, request.tokens.num_prompt_tokens // self._groups[place].size)
                for at in range(request.offered[place] * per_chunk, end):
                    if table[at] in got:
                        table[at] = 0

    def _view(self, request: OffloadRequest, start: int) -> HostView:
        """What a look-up of a request with this many tokens sees: the host, and the folder below it."""
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
        """Whether a chunk that the host lacks is read from its file from now on, or has to be asked for again."""
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
        """Take what the folder's threads have done, once a step."""
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
        """Forget the answers of a request that is over, once all that it stores is on the host."""
        is_planned = request not in self._live and request not in self._over
        if is_planned and not any(not self._open[number].is_load for number in request.jobs):
            files.forget(request)

    def _offerable(self, request: OffloadRequest, computed: int) -> int:
        """How many tokens of a request may be stored where `computed` tokens are computed."""
        tokens = request.tokens
        upto = min(computed, tokens.num_tokens)
        if request.max_offload_tokens is not None:
            upto = min(upto, request.max_offload_tokens)
        return min(upto, tokens.num_prompt_tokens) if self._prompt_only else upto

    def _storable(self, request: OffloadRequest, place: int, upto: int) -> int:
        """How many chunks of a group may be stored where `upto` tokens may; the last chunk of drafts waits for its
        end, as it may be rewritten.
        """
        group, tokens = self._groups[place], request.tokens
        chunks = upto // group.chunk
        if group.of.drafts and upto > tokens.num_prompt_tokens and not request.is_over:
            chunks = max(0, chunks - 1)
        return min(chunks, len(request.blocks[place]) // self.blocks_per_chunk, group.keyed(tokens))

    def _to_offer(
        self, request: OffloadRequest, place: int, last: int, prompt: int
    ) -> tuple[int, int, list[tuple[ChunkKey, int]]]:
        """The chunks of a group that are looked at, the first one and behind the last; and those that are worth
        storing, each with its end.

        Args:
            request: whose.
            place: of which group.
            last: the chunk behind the last that may be stored.
            prompt: those of its prompt.
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
        """Offer what a request has computed and has not offered yet; returns the transfer, if anything of it is new."""
        upto = self._offerable(request, computed)
        if not (request.is_over and self._retention is None):
            for group, first in zip(self._groups, request.offered, strict=True):
                if upto >= (first + 1) * group.chunk:
                    break
            else:  # as of most steps of most requests
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
        """Offer chunks, each with its end, to the host; returns those that are new, None where it has no room."""
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
        """Store states that the device has named, each by itself; what has no room is lost."""
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
        """Store the block that a prompt ends in, of all groups, as its states were copied.

        Raises:
            OffloadStopError: it lies behind what may be stored of the request; the engine ends by it.
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
        """Sizes and first positions of a transfer of one block of some groups, by group."""
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
        """Make the transfer of chunks that were admitted; the others are the fields of an `OffloadTransfer`."""
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
        """Have a transfer waited for as soon as another request gets one of these blocks."""
        if blocks:
            self._fences.setdefault(job.number, set()).update(blocks)


_ASKED_FOR: Final = Chunk(-1)
"""What a look-up finds of a chunk that the folder below was asked for, and has not answered yet."""


def _note_nothing(tokens: HashedTokens, end: int, key: ChunkKey) -> None:
    """A look-up that changes nothing notes nothing."""


def offload_of(manager: Any, num_chunks: int, **options: Any) -> NativeOffload:
    """Make the host below a manager of vLLM, which has a connector from then on, with what follows from its cache
    groups.

    Args:
        manager: of one cache, or of cache groups.
        num_chunks: chunks that the host has room for.
        **options: the others of `NativeOffload`, but for the groups and their sizes.
    """
    manager.attach_connector()  # it may change which hits drop a block
    geometry = getattr(manager, "geometry", None)
    if geometry is not None and options.get("files") is not None:
        raise ValueError("tiers: 'files' are below engines of one cache, as these alone were recorded with them")
    if geometry is None:
        return NativeOffload(num_chunks, [OffloadGroup(manager.block_size)], **options)
    # The layers of a draft model stand in the one group that there is; of several, vLLM drops nothing where none is
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
    """Let the chunks of a host below cache groups pass.

    Raises:
        ValueError: windows and states are retained at what is no whole chunk, with which vLLM does not start; or the
            host has no room for a chunk of each group, which every hit needs.
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
