"""LMCache's server as what is below an engine of vLLM: what its requests store there and load, chunk by chunk.

What the server publishes is recorded. When an engine stores and loads is assumed: neither was recorded, and the code of
`LMCacheMPConnector` was not read for it.
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
# A request is looked up when it would be admitted: the leading chunks that the server has under its salt; what lies
# behind the device's blocks is loaded between steps. Chunks that a step completes, those of generated tokens too, are
# stored between steps, from behind those that the look-up found; their blocks are held meanwhile. With each step the
# engine reads the server's log and publishes what it says, of whichever engine.


@dataclass(eq=False, slots=True)
class ChunkRequest:
    """One request as the connector knows it.

    Attributes:
        tokens: its tokens; it grows as tokens are generated.
        stored: chunks, from the first, that need not be stored.
        digests: of its chunks, as far as they were made.
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
    """Chunks of a request that are stored, from one to another; or tokens that are loaded; with their blocks."""

    request: ChunkRequest
    first: int
    end: int
    blocks: list[int]
    is_load: bool


class LmcacheHost(StoreHost):
    """The server as one engine has it.

    Args:
        server: the server.
        manager: the block manager above it.
        model: the engine's; engines of other models have other chunks.

    Raises:
        ValueError: the manager is of another kind than was recorded, or a chunk is no whole number of its blocks.

    Attributes:
        reader: what it publishes of the server.
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
        """What the connector knows a request with these tokens as."""
        return ChunkRequest(tokens)

    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens that can be loaded after `start` tokens on the device."""
        return max(0, self._held(ChunkRequest(tokens)) * self._chunk - start)

    def match(self, request: ChunkRequest, start: int) -> Hit:
        """Look up a request that would be admitted, from its first chunk on."""
        request.stored = self._held(request)
        return Hit(start, max(0, request.stored * self._chunk - start))

    def admitted(self, request: ChunkRequest) -> None:
        """Nothing: it stores from behind what was found."""

    def allocated(
        self,
        request: ChunkRequest,
        blocks: Sequence[Sequence[int]],
        hit: Hit,
        named: object = None,  # noqa: ARG002 - as of a `NativeOffload`
    ) -> None:
        """A request has blocks, and a hit is loaded into them."""
        size = self._manager.block_size
        loaded = [*blocks[0][hit.start // size : (hit.start + hit.tokens) // size]]
        self._to_load.append(_Job(request, hit.start, hit.start + hit.tokens, loaded, is_load=True))

    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step: what was found is loaded, and chunks that are complete are stored."""
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
        """Transfers are done; returns the requests whose loads are."""
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
        """Leading chunks of a request that the server has."""
        tokens, size = request.tokens, self._chunk
        if tokens.tokens is None:  # it hashes tokens, and nothing else is known
            return 0
        known, count = request.digests, tokens.num_tokens // size
        if count > len(known):
            rest = tokens.cut(len(known) * size, count * size)
            known += self._server.hasher.digests(rest, size, len(known), known[-1] if known else None)
        held, model, salt = self._server.held, self.reader.model, request.salt
        return next((at for at, each in enumerate(known) if HeldChunk(model, each, salt) not in held), len(known))

    def take_events(self) -> Sequence[TierEvent]:
        """Take what the server's log says since the last time, of whichever engine."""
        return self.reader.read()

    def empty(self) -> None:
        """Nothing: a reset of the engine leaves the server as it is."""
