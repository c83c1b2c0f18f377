"""LMCache's server below an engine of vLLM: the engine's requests store and load chunks there.

The events of the server were recorded. The times of an engine's stores and loads are assumed: they were not recorded,
and the code of `LMCacheMPConnector` was not read for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.engines.vllm.host.lmcache_server import HeldChunk, LmcacheServer
from pytest_kvmock.engines.vllm.host.offload_steps import Hit, OffloadPlan, OffloadStep
from pytest_kvmock.engines.vllm.host.store_host import StoreHost
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.offload import TierEvent
    from pytest_kvmock.engines.vllm.host.offload_steps import OffloadTransfer
    from pytest_kvmock.engines.vllm.host.store_host import StoreComputing

# Theory of operation
#
# A request is looked up when it would be admitted: the hit is the leading chunks that the server has under its salt.
# Chunks behind the device's blocks are loaded between steps. Chunks that a step completes, also those of generated
# tokens, are stored between steps if they lie behind the hit; their blocks are held meanwhile. With each step the
# engine reads the server's log and publishes its records, also those of other engines.


@dataclass(eq=False, slots=True)
class ChunkRequest:
    """The connector's record of one request.

    Attributes:
        tokens: its tokens; grows as tokens are generated.
        stored: number of leading chunks that need not be stored.
        digests: digests of its leading chunks, as far as they were made.
    """

    tokens: HashedTokens
    stored: int = 0
    digests: list[bytes] = field(default_factory=list)

    @property
    def salt(self) -> str:
        """The tenant's salt, by which the server keeps chunks apart; "" for none."""
        keys = self.tokens.keys
        return "" if keys is None or keys.cache_salt is None else keys.cache_salt


class _Job(NamedTuple):
    """A range of a request with its blocks: chunks that are stored, or tokens that are loaded."""

    request: ChunkRequest
    first: int
    end: int
    blocks: list[int]
    is_load: bool


class LmcacheHost(StoreHost):
    """The server as the host of one engine.

    Args:
        server: the server.
        manager: the block manager above it.
        model: the engine's model; engines of other models have other chunks.

    Raises:
        ValueError: this kind of manager was not recorded, or a chunk is not a whole number of its blocks.

    Attributes:
        reader: reads the server's log, and makes the events that the engine publishes.
    """

    tier = StorageTier.HOST_PINNED

    def __init__(self, server: LmcacheServer, manager: KvManager, *, model: str = "model") -> None:
        super().__init__(manager)
        size = self._chunk = server.chunk_tokens
        if size % manager.block_size:
            raise ValueError(
                f"stores: a chunk of {size} tokens is not a whole number of blocks of {manager.block_size}, and "
                "LMCache refuses such an engine"
            )
        self.blocks_per_chunk = size // manager.block_size
        self._server = server
        self.reader = server.attach(model)
        self._to_load: list[_Job] = []
        self._jobs: dict[int, _Job] = {}

    def request(self, tokens: HashedTokens) -> ChunkRequest:
        """Make the connector's record of a request with these tokens."""
        return ChunkRequest(tokens)

    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens that can be loaded after `start` tokens on the device."""
        return max(0, self._held(ChunkRequest(tokens)) * self._chunk - start)

    def match(self, request: ChunkRequest, start: int) -> Hit:
        """Look up a request that would be admitted, from its first chunk on."""
        request.stored = self._held(request)
        return Hit(start, max(0, request.stored * self._chunk - start))

    def admitted(self, request: ChunkRequest) -> None:
        """Do nothing: stores begin behind the hit."""

    def allocated(
        self,
        request: ChunkRequest,
        blocks: Sequence[Sequence[int]],
        hit: Hit,
        named: object = None,  # noqa: ARG002 - as of a `NativeOffload`
    ) -> None:
        """Plan the load of a hit into the blocks of a request."""
        size = self._manager.block_size
        loaded = [*blocks[0][hit.start // size : (hit.start + hit.tokens) // size]]
        self._to_load.append(_Job(request, hit.start, hit.start + hit.tokens, loaded, is_load=True))

    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step: hits are loaded, and complete chunks are stored."""
        out, per = OffloadPlan(), self.blocks_per_chunk
        for job in self._to_load:
            out.loads.append(self._open(job))
        self._to_load.clear()
        computing: Iterable[StoreComputing] = step.computing  # type: ignore[assignment]  # they are this host's
        for each in computing:
            request = each.request
            first, end = request.stored, min(each.upto, request.tokens.num_tokens) // self._chunk
            if end > first and request.tokens.tokens is not None:
                request.stored = end
                job = _Job(request, first, end, [*each.blocks[first * per : end * per]], is_load=False)
                self._hold(job.blocks)
                out.stores.append(self._open(job))
        return out

    def _open(self, job: _Job) -> OffloadTransfer:
        transfer = self._transfer(job.request, len(job.blocks), is_load=job.is_load)
        self._jobs[transfer.number] = job
        return transfer

    def complete(self, jobs: Iterable[int]) -> list[ChunkRequest]:
        """Complete transfers; return the requests whose loads are done."""
        loaded: list[ChunkRequest] = []
        for number in jobs:
            request, first, end, blocks, is_load = self._jobs.pop(number)
            if is_load:
                here = self._held(request) * self._chunk
                self._loaded(request, end if here >= end else max(first, here))
                loaded.append(request)
            else:
                tokens = request.tokens.cut(0, end * self._chunk)
                self._server.store(self.reader.model, tokens, first=first, salt=request.salt)
                self._free(blocks)
        return loaded

    def _held(self, request: ChunkRequest) -> int:
        """Count the leading chunks of a request that the server has."""
        tokens, size = request.tokens, self._chunk
        if tokens.tokens is None:  # the server hashes tokens, and a prompt of hashes has none
            return 0
        known, count = request.digests, tokens.num_tokens // size
        if count > len(known):
            rest = tokens.cut(len(known) * size, count * size)
            known += self._server.hasher.digests(rest, size, len(known), known[-1] if known else None)
        held, model, salt = self._server.held, self.reader.model, request.salt
        return next((at for at, each in enumerate(known) if HeldChunk(model, each, salt) not in held), len(known))

    def take_events(self) -> Sequence[TierEvent]:
        """Take the events of the server's log since the last call, of all engines."""
        return self.reader.read()

    def empty(self) -> None:
        """Do nothing: a reset of the engine does not affect the server."""
