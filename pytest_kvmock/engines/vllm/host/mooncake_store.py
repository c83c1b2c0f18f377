"""The connector of one engine to Mooncake's store: it plans, holds, loads and publishes blocks.

It mocks the scheduler side of `MooncakeStoreConnector` of vLLM 0.33.0, for one cache group. The caller decides when an
answer comes and when a rank carries out a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.engines.base.offload import TierEvent
from pytest_kvmock.engines.vllm.host.mooncake_ranks import (
    LoadJob,
    MooncakeObjects,
    MooncakeRank,
    MooncakeRequest,
    PutEvent,
    SaveJob,
)
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied
from pytest_kvmock.values.events import StorageTier, Stored
from pytest_kvmock.values.tokens import block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens

# Theory of operation
#
# The tokens of a prompt that a step computes are a job: each rank puts its objects of these blocks, starting where its
# last job of that request ended. Objects that are in the store already are skipped, and cause no event. A job holds all
# blocks of its request until each rank has reported it. Puts are counted per block over ranks and steps; a block is
# published once its puts cover all ranks. Two engines that put the same block at once may therefore both fail to
# publish it.
#
# A prompt is looked up from its first block on; blocks in the store beyond those of the device are loaded between
# steps. If an object is dropped meanwhile, the load fails from there on.


class ScheduledTokensOf(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: the request.
        computed: number of tokens computed before the step.
        tokens: number of tokens that the step computes.
        blocks: its blocks of the device.
        is_admitted: whether it was admitted in this step.
    """

    request: MooncakeRequest
    computed: int
    tokens: int
    blocks: Sequence[int]
    is_admitted: bool


class MooncakeOffload:
    """The connector of one engine to Mooncake's store.

    Args:
        objects: the store.
        block_size: tokens per block; with context parallelism, of the block over all ranks.
        ranks: number of ranks of tensor parallelism.
        heads: KV heads of the model; if there are fewer heads than ranks, some ranks hold the same heads.
        dcp: number of ranks of decode context parallelism; with more than 1, no two ranks hold the same data.
        save_decode: whether blocks of generated tokens are put too (vLLM: `save_decode_cache`).
        hold: called with the blocks of the device that a job reads.
        free: called with these blocks when all ranks have reported the job.

    Attributes:
        objects: as given.
        ranks: the threads of each rank.
    """

    def __init__(
        self,
        objects: MooncakeObjects,
        block_size: int,
        *,
        ranks: int = 1,
        heads: int = 8,
        dcp: int = 1,
        save_decode: bool = False,
        hold: Callable[[list[int]], object],
        free: Callable[[list[int]], object],
    ) -> None:
        self.objects = objects
        self._sharers = ranks // heads if heads < ranks and dcp == 1 else 1
        self.ranks = [MooncakeRank(objects, rank, self._sharers, block_size) for rank in range(ranks)]
        self._size = block_size
        self._save_decode = save_decode
        self._hold, self._free = hold, free
        self._next_job = 0
        self._open: dict[int, tuple[SaveJob, int]] = {}  # with the number of ranks that have not reported the job
        self._known: dict[MooncakeRequest, Sequence[int]] = {}
        self._counts: dict[PutEvent, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no job is in flight."""
        return not self._open

    def lookup(self, tokens: HashedTokens) -> int:
        """Count the leading tokens whose blocks are in the store, never the last token's block. Changes nothing."""
        shares, objects = range(len(self.ranks) // self._sharers), self.objects.objects
        most = (tokens.num_tokens - 1) // self._size
        for place, name in enumerate(tokens.names[:most]):
            if any((name, share) not in objects for share in shares):
                return place * self._size
        return min(most, len(tokens.names)) * self._size

    def match(self, request: MooncakeRequest, local: int, found: int) -> int:
        """Return the tokens that are loaded for a request beyond those of the device.

        Args:
            request: the request.
            local: tokens that the device has.
            found: leading tokens that the store has, by the answered look-up.
        """
        if found <= local:
            return 0
        request.to_load = local, found
        return found - local

    def allocated(self, request: MooncakeRequest, blocks: Sequence[int] = ()) -> None:
        """Record that a request has blocks; if blocks are given, it loads into them."""
        request.is_known = True
        self._known[request] = blocks

    def plan(
        self,
        scheduled: Sequence[ScheduledTokensOf],
        preempted: Iterable[MooncakeRequest] = (),
        finished: Iterable[MooncakeRequest] = (),
    ) -> tuple[list[SaveJob], list[LoadJob]]:
        """Plan the jobs of a step, at its end.

        Args:
            scheduled: the computing requests, newly admitted ones first.
            preempted: requests preempted since the last step.
            finished: requests finished since the last step.

        Raises:
            EngineDied: a computing request was preempted since the last step, and the connector forgot it.
        """
        for request in (*finished, *preempted):
            request.to_load, request.is_known = None, False
            self._known.pop(request, None)
            request.seen = request.saved = 0
        saves = [job for each in scheduled if (job := self._save(each)) is not None]
        computing = {each.request for each in scheduled}
        loads: list[LoadJob] = []
        for request, blocks in self._known.items():
            if request not in computing and request.to_load is not None:
                (start, end), request.to_load = request.to_load, None
                request.seen, request.saved, request.token_ids = end, 0, []
                loads.append(LoadJob(request, [*request.tokens.names], start, end, blocks))
        for job in saves:
            self._hold(job.blocks)
            self._open[job.number] = job, len(self.ranks)
            for rank in self.ranks:
                rank.enter(job)
        return saves, loads

    def end_step(self, preempted: Iterable[MooncakeRequest] = (), finished: Iterable[MooncakeRequest] = ()) -> None:
        """Pass the preempted and finished requests on to the ranks."""
        for rank in self.ranks:
            for request in preempted:
                rank.forget(request)
            for request in finished:
                rank.end(request)

    def _save(self, each: ScheduledTokensOf) -> SaveJob | None:
        request, tokens = each.request, each.request.tokens
        if not request.is_known:
            raise EngineDied(
                "AssertionError",
                ("mooncake/store/scheduler.py", "build_connector_meta"),
                "a reset preempted a request, the same step admits it again, and the connector forgot it between",
            )
        if each.is_admitted:
            request.to_load = None
            request.seen = each.computed + each.tokens
            request.saved, request.prompt_end = 0, tokens.num_tokens
            request.token_ids = [*tokens.cut(0, request.seen)]
        else:
            if each.computed >= request.prompt_end and not self._save_decode:
                return None
            new = tokens.cut(request.seen, min(request.seen + each.tokens, tokens.num_tokens))
            request.seen += len(new)
            request.token_ids += new
        start, upto = request.saved, request.seen // self._size * self._size
        if upto < (start // self._size + 1) * self._size:
            return None
        request.saved = upto
        job = SaveJob(
            self._next_job, request, [*tokens.names], upto, start, request.token_ids[start:upto], [*each.blocks]
        )
        self._next_job += 1
        return job

    def reported(self, number: int, ranks: int) -> None:
        """Count the ranks that reported a job in this step; when all have, free its blocks."""
        job, left = self._open[number]
        if left > ranks:
            self._open[number] = job, left - ranks
        else:
            del self._open[number]
            self._free(job.blocks)

    def reset(self) -> None:
        """Empty the store for all engines, without an event, and drop incomplete counts."""
        self.objects.objects.clear()
        self._counts.clear()
        for request in self._known:
            request.to_load = None

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last call, one per block, to be published after those of the device."""
        for rank in self.ranks:
            for event in rank.events:
                self._counts[event] = self._counts.get(event, 0) + self._sharers
            rank.events.clear()
        whole = [event for event, count in self._counts.items() if count >= len(self.ranks)]
        for event in whole:
            del self._counts[event]
        return [_published(*event) for event in whole]


def _published(name: int, parent: int | None, tokens: tuple[int, ...]) -> TierEvent:
    data = Stored(parent, (name,), tuple(block_hashes(tokens, len(tokens))))
    return TierEvent(data, StorageTier.EXTERNAL, (tokens,), {"extra_keys": None, "kv_cache_spec_kind": None})
