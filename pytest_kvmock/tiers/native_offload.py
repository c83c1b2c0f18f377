"""vLLM's native offload: what its connector does between the scheduler, the host tier and the worker that copies.

One subject: the transfers of a write-through host. It does what `OffloadingConnector` of vLLM 0.33.0 does with a `CPUOffloadingSpec`. Nothing here takes time: transfers are handed
out when they are planned, and whoever copies reports them when they are done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING, Final

from pytest_kvmock.cache.offload import TierEvent
from pytest_kvmock.events import StorageTier
from pytest_kvmock.tiers.chunk_events import ChunkEvents, OffloadGroup
from pytest_kvmock.tiers.chunk_eviction import ChunkKey, ChunkUser
from pytest_kvmock.tiers.chunk_store import ChunkStore
from pytest_kvmock.tiers.offload_steps import Hit, Keeps, OffloadPlan, OffloadRequest, OffloadStep, OffloadTransfer

if TYPE_CHECKING:
    from pytest_kvmock.cache.hashed import HashedTokens
    from pytest_kvmock.prompt_keys import LoraIds

# Theory of operation
#
# The host is a write-through copy: what requests compute is stored at the end of each step, in whole chunks from the start of the
# prompt, whatever the device keeps; what is loaded stays there. In each step a scheduler calls `match` for each request that it
# would admit, `allocated` for each hit that it admits, and `plan` at its end; then `ended` for what is over, and `complete` with the
# transfers that are reported. The chunks of a step that find no room are offered again, with more of them, in the next one.
#
# Of a group with a window only those chunks are stored that later prompts can resume from, and those before the end of a hit loaded.

_MOST_COUNTED: Final = 64_000
"""Chunks whose offers are counted at most (vLLM: `max_tracker_size`)."""


class NativeOffload:
    """The host tier of one engine, and what is copied to it and from it.

    Args:
        num_chunks: chunks that the host has room for, at least 1.
        groups: the cache groups of the engine, all with one block size; one at least has no window.
        blocks_per_chunk: blocks of a chunk, at least 1.
        policy: what is evicted: "lru" or "arc".
        prompt_only: whether only prompts are stored, and not what is generated.
        store_threshold: how often a chunk must be offered before it is stored; below 2: at once.
        max_load_tokens: as `OffloadRequest`, like the next one; of requests that have no limit of their own.
        max_offload_tokens: as above.
        within_step_tokens: tokens that are loaded within one step at most; longer hits are waited for.
        self_describing: whether events say all that there is to say of a chunk.
        rng: shuffles the events of one transfer, which have the order of a set in the original.

    Attributes:
        tier: the host's.
        store: what is there.
        blocks_per_chunk: as above.
        largest_offer: the most chunks that a request has offered at once.
    """

    tier = StorageTier.HOST_PINNED

    def __init__(
        self,
        num_chunks: int,
        groups: Sequence[OffloadGroup],
        *,
        blocks_per_chunk: int = 1,
        policy: str = "lru",
        prompt_only: bool = True,
        store_threshold: int = 0,
        max_load_tokens: int | None = None,
        max_offload_tokens: int | None = None,
        within_step_tokens: int = 0,
        self_describing: bool = False,
        rng: Random | None = None,
    ) -> None:
        self.store = ChunkStore(num_chunks, policy)
        self.blocks_per_chunk = blocks_per_chunk
        self.largest_offer = 0
        self._groups = tuple(groups)
        self._dense = [number for number, group in enumerate(groups) if group.window is None]
        self._sparse = [(number, group.window) for number, group in enumerate(groups) if group.window is not None]
        self._chunk = groups[0].block_size * blocks_per_chunk
        self._prompt_only = prompt_only
        self._threshold = store_threshold
        self._limits = max_load_tokens, max_offload_tokens
        self._offers: OrderedDict[ChunkKey, int] = OrderedDict()
        self._budget = self._step_budget = within_step_tokens
        self._events = ChunkEvents(groups, blocks_per_chunk, self_describing, rng or Random(0))  # noqa: S311 - mock data
        self._next_job = 0
        self._open: dict[int, OffloadTransfer] = {}
        self._loads: list[OffloadTransfer] = []  # of this step
        self._fences: dict[int, frozenset[int]] = {}  # by job, blocks of the device that it reads and nobody holds
        self._live: set[OffloadRequest] = set()
        self._over: set[OffloadRequest] = set()
        self._to_flush: set[int] = set()

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing that is over has to be planned for."""
        return not self._open and not self._over

    @property
    def num_blocks(self) -> int:
        """Blocks that the host has room for."""
        return self.store.capacity * self.blocks_per_chunk

    def resident(self) -> list[ChunkKey]:
        """The chunks that can be loaded."""
        return self.store.ready()

    def resident_names(self, group: int = 0) -> list[int]:
        """Hashes of what can be loaded of a group, as its events name it; repeated where two of them do."""
        return [name for key in self.store.ready() if key[1] == group for name in self._events.names_of(key)]

    def shuffle_with(self, rng: Random) -> None:
        """Have another source of the order in which the chunks of one transfer are published."""
        self._events.rng = rng

    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens of a request that are there, after so many that the device has. Changes nothing."""
        chunk, ready = self._chunk, {*self.store.ready()}
        first, end = start // chunk * chunk, len(tokens.names) * tokens.block_size // chunk * chunk
        for group in self._dense:
            chunks = self._chunks(tokens, first, end, group)
            end = first + chunk * sum(1 for _ in takewhile(lambda each: each[0] in ready, chunks))
        while any(key not in ready for key, _ in self._windows(tokens, first, end)):
            end -= chunk
        return end - start if end - start >= chunk else 0

    # -------------------------------------------------------------------------------------------------- a step

    def request(
        self,
        tokens: HashedTokens,
        *,
        keeps: Keeps | None = None,
        max_load_tokens: int | None = None,
        max_offload_tokens: int | None = None,
    ) -> OffloadRequest:
        """Make a request known.

        Args:
            tokens: its tokens and their names.
            keeps: what is stored of groups with a window; None: there are none.
            max_load_tokens: as `OffloadRequest`, like the next one.
            max_offload_tokens: as above.
        """
        load, offload = self._limits
        request = OffloadRequest(
            tokens,
            keeps,
            load if max_load_tokens is None else max_load_tokens,
            offload if max_offload_tokens is None else max_offload_tokens,
        )
        self._live.add(request)
        return request

    def match(self, request: OffloadRequest, start: int) -> Hit | None:
        """Look up what can be loaded for a request that has computed nothing.

        Args:
            request: which.
            start: tokens that the device has of it.

        Returns:
            None where that cannot be said yet: ask again in the next step.
        """
        request.blocks, request.offered = (), 0
        if request.jobs:
            return None
        chunk, tokens = self._chunk, request.tokens
        upto = len(tokens.names) * tokens.block_size  # none where nothing is cached
        if request.max_load_tokens is not None:
            upto = min(upto, start + request.max_load_tokens)
        upto = upto // chunk * chunk
        if upto - start < chunk:
            return Hit(start, 0)
        end, is_written = self._found(tokens, start // chunk * chunk, upto)
        if not is_written:
            return None
        if end - start < chunk:
            return Hit(start, 0)
        chunks = self.store.chunks
        if any(chunks[key].waits for key, _ in self._to_load(tokens, start, end)):
            return None
        hit = end - start
        if hit <= self._step_budget and end < tokens.num_tokens:
            self._step_budget -= hit
            return Hit(start, hit, within_step=True)
        return Hit(start, hit)

    def allocated(self, request: OffloadRequest, blocks: Sequence[Sequence[int]], hit: Hit) -> None:
        """Load a hit for a request that was admitted.

        Args:
            request: which.
            blocks: all blocks that it has, by group.
            hit: what `match` found in this step.
        """
        if not hit.tokens:
            return
        end = hit.start + hit.tokens
        keys = self._to_load(request.tokens, hit.start, end)
        slots = self.store.read(request.user, keys, waits=not hit.within_step)
        request.offered = end // self._chunk
        loaded: list[int] = []
        for key, at in keys:
            loaded += self._held(blocks, key, at, hit.start)
        job = self._new_job(request, [key for key, _ in keys], loaded, slots)
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
        plan.flush.update(number for number, fenced in self._fences.items() if not fenced.isdisjoint(got))
        new = {job.number for job in plan.loads}
        for request in step.preempted:
            plan.flush |= request.jobs - new
        for request, blocks, upto in step.computing:
            request.blocks = blocks
            job = self._offer(request, upto)
            if job is not None:
                plan.stores.append(job)
        over = [request for request in step.finished if request in self._over]
        for request in over:
            tokens, computed = request.tokens, request.computed
            # The last token was sampled, and never computed.
            upto = max(tokens.num_prompt_tokens, tokens.num_tokens - 1) if computed is None else computed
            job = self._offer(request, upto)
            if job is not None:
                plan.stores.append(job)
                if not self._fence(job).isdisjoint(got):
                    plan.flush.add(job.number)
        for request in over:
            self.store.end(request.user)
        self._over.difference_update(over)
        return plan

    def ended(self, request: OffloadRequest, *, computed: int | None = None) -> None:
        """A request is over, and its blocks are free, while they are still being copied.

        Args:
            request: which; a later step has it among those that are finished.
            computed: of one that was aborted, how many of its tokens were computed.
        """
        if request not in self._live:
            return
        self._live.remove(request)
        self._over.add(request)
        request.computed = computed
        for number in request.jobs:
            if not self._open[number].is_load:
                self._fence(self._open[number])

    def complete(self, jobs: Iterable[int]) -> list[OffloadRequest]:
        """Transfers are reported as done, in this order.

        Returns:
            The requests whose loads have come, which they were waiting for.
        """
        received: list[OffloadRequest] = []
        for number in jobs:
            job = self._open.pop(number)
            self._fences.pop(number, None)
            if job.is_load and not job.within_step:
                received.append(job.request)
            if job.is_dropped:
                continue
            job.request.jobs.discard(number)
            if job.is_load:
                self.store.was_read(job.chunks, waited=not job.within_step)
            else:
                self.store.written(job.chunks)
                self._events.stored(job.chunks)
        return received

    def reset(self) -> None:
        """Empty the host, without an event; what is under way comes for nothing, and is flushed in the next step."""
        self.store = self.store.emptied()
        self._over.clear()
        self._fences.clear()
        self._events.forget_notes()
        self._to_flush.update(self._open)
        for job in self._open.values():
            job.is_dropped = True
            job.request.jobs.clear()
        for request in self._live:
            request.offered, request.user = 0, ChunkUser()

    def number_adapters(self, lora_ids: LoraIds) -> None:
        """Take the numbers that the engine has for adapters, which its events carry."""
        self._events.lora_ids = lora_ids

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last time, to be published after those of the device."""
        return self._events.take()

    # ------------------------------------------------------------------------------------------------- details

    def _key(self, tokens: HashedTokens, end: int, group: int) -> ChunkKey:
        return tokens.names[end // tokens.block_size - 1], group

    def _chunks(self, tokens: HashedTokens, start: int, end: int, group: int = 0) -> list[tuple[ChunkKey, int]]:
        """The chunks of a group from one boundary to another, each with its end."""
        return [(self._key(tokens, at, group), at) for at in range(start + self._chunk, end + 1, self._chunk)]

    def _held(self, blocks: Sequence[Sequence[int]], key: ChunkKey, end: int, start: int = 0) -> Sequence[int]:
        """The blocks of the device that a chunk consists of, from a token on."""
        size = self._groups[key[1]].block_size
        return blocks[key[1]][max(end - self._chunk, start) // size : end // size]

    def _found(self, tokens: HashedTokens, start: int, upto: int) -> tuple[int, bool]:
        """Where what is there of a request ends, from a boundary to another, and whether all that was looked at is written."""
        chunks, chunk, end, is_written = self.store.chunks, self._chunk, upto, True
        for group in self._dense:
            at = start
            while at < end and (found := chunks.get(key := self._key(tokens, at + chunk, group))) is not None:
                at += chunk
                is_written = is_written and found.is_ready
                self._events.note(tokens, at, key, again=False)
            end = at
        while any(key not in chunks for key, _ in self._windows(tokens, start, end)):
            end -= chunk
        is_written = is_written and all(chunks[key].is_ready for key, _ in self._windows(tokens, start, end))
        return end, is_written

    def _windows(self, tokens: HashedTokens, start: int, end: int) -> list[tuple[ChunkKey, int]]:
        """The chunks after one boundary that the windows before another one reach into, each with its end."""
        found: list[tuple[ChunkKey, int]] = []
        for group, window in self._sparse:
            first = max(start, max(end - window + 1, 0) // self._chunk * self._chunk)
            found += self._chunks(tokens, first, end, group)
        return found

    def _to_load(self, tokens: HashedTokens, start: int, end: int) -> list[tuple[ChunkKey, int]]:
        """The chunks that a hit needs, group by group, each with its end."""
        first = start // self._chunk * self._chunk
        dense = [each for group in self._dense for each in self._chunks(tokens, first, end, group)]
        return sorted(dense + self._windows(tokens, first, end), key=lambda each: each[0][1])

    def _to_offer(self, request: OffloadRequest, start: int, end: int) -> list[tuple[ChunkKey, int]]:
        """The chunks from one boundary to another that are worth storing, group by group, each with its end."""
        offered: list[tuple[ChunkKey, int]] = []
        for group, (size, _, window) in enumerate(self._groups):
            chunks = self._chunks(request.tokens, start, end, group)
            if window is not None:
                keeps, blocks = request.keeps, request.blocks
                kept = frozenset(keeps(group, start // size, end // size) if keeps is not None else ())
                chunks = [
                    (key, at) for key, at in chunks if at // size - 1 in kept and all(self._held(blocks, key, at))
                ]
            offered += chunks
        return offered

    def _new_job(
        self, request: OffloadRequest, chunks: Sequence[ChunkKey], blocks: Sequence[int], slots: Sequence[int]
    ) -> OffloadTransfer:
        job = OffloadTransfer(self._next_job, request, chunks, blocks, slots)
        self._next_job += 1
        self._open[job.number] = job
        request.jobs.add(job.number)
        return job

    def _offer(self, request: OffloadRequest, upto: int) -> OffloadTransfer | None:
        """Offer what a request has computed and has not offered yet; returns the transfer, if anything of it is new."""
        tokens, held = request.tokens, request.blocks
        size, chunk = self._groups[0].block_size, self._chunk
        upto = min(upto, len(tokens.names) * tokens.block_size, len(held[0]) * size if held else 0)
        if self._prompt_only:
            upto = min(upto, tokens.num_prompt_tokens)
        if request.max_offload_tokens is not None:
            upto = min(upto, request.max_offload_tokens)
        first, last = request.offered, upto // chunk
        if last <= first:
            return None
        offered = self._to_offer(request, first * chunk, last * chunk)
        if self._threshold > 1:
            offered = [(key, end) for key, end in offered if self._count(key) >= self._threshold]
        self.largest_offer = max(self.largest_offer, len(offered))
        room = self.store.offer(request.user, offered)
        if room is None:
            return None
        request.offered = last
        if room.evicted:
            self._events.removed(room.evicted)
        if not room.new:
            return None
        ends = dict(offered)
        blocks: list[int] = []
        for key in room.new:
            self._events.note(tokens, ends[key], key)
            blocks += self._held(held, key, ends[key])
        return self._new_job(request, room.new, blocks, [self.store.chunks[key].slot for key in room.new])

    def _count(self, key: ChunkKey) -> int:
        """Count one more offer of a chunk."""
        offers = self._offers
        count = offers[key] = offers.pop(key, 0) + 1
        if len(offers) > _MOST_COUNTED:
            offers.popitem(last=False)
        return count

    def _fence(self, job: OffloadTransfer) -> frozenset[int]:
        fenced = self._fences[job.number] = frozenset(job.blocks)
        return fenced
