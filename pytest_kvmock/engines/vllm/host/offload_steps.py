"""The values that a scheduler, vLLM's native offload and the copying worker exchange in a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey, ChunkUser
from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.prompt_keys import LoadFrom

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens


class OffloadStopError(KvMockError, RuntimeError):
    """The connector has ended the engine, as it ends vLLM's; all requests of the engine are lost."""


class Hit(NamedTuple):
    """The tokens of a request that the host has beyond those of the device.

    Attributes:
        start: tokens that the device has.
        tokens: tokens behind these that can be loaded.
        within_step: whether they are loaded within the step; else the request waits for them.
    """

    start: int
    tokens: int
    within_step: bool = False


@dataclass(eq=False, slots=True)
class OffloadRequest:
    """The connector's record of one request, made by `NativeOffload.request`.

    Attributes:
        tokens: its tokens and their names; grows as tokens are generated.
        max_load_tokens: the most tokens that are loaded for it; None: no limit.
        max_offload_tokens: the most of its tokens that are stored; None: all.
        user: its use of chunks.
        blocks: per stored group, the blocks that it was given up to its last computation; blocks that its windows
            freed stay here until another request gets them.
        offered: per stored group, the number of leading chunks that need not be offered.
        confirmed: per stored group, the number of leading chunks that its last look-up found ready.
        tail: token count at which its last hit ends inside a block; 0 if it ends with a block.
        junction: `GroupRequest.junction` when it last computed.
        has_loaded: whether anything was loaded for it.
        is_over: whether it has stopped generating.
        computed: if it was aborted, the number of its computed tokens.
        jobs: numbers of its transfers in flight.
        load_tiers: the tiers below the host that it may load from (vLLM: `kv_load_tiers`); None: all.
    """

    tokens: HashedTokens
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    user: ChunkUser = field(default_factory=ChunkUser)
    blocks: list[list[int]] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)
    tail: int = 0
    junction: int = 0
    has_loaded: bool = False
    is_over: bool = False
    computed: int | None = None
    jobs: set[int] = field(default_factory=set)
    load_tiers: Sequence[LoadFrom] | None = None


@dataclass(eq=False, slots=True)
class OffloadTransfer:
    """Chunks that are copied for one request.

    Attributes:
        number: 0, 1, 2 ... over both directions.
        request: the request.
        chunks: their names, in order.
        blocks: the blocks of the device, in order.
        slots: their slots in the host, in order.
        sizes: number of the blocks in each stored group.
        firsts: for each stored group, the position of the first block in the request's table.
        watched: for a store: blocks that other requests may get while this one runs, because its windows free them.
        held: for a store: the other blocks, which other requests may get once this one is over.
        is_load: whether it goes to the device.
        within_step: whether it is a load that the step waits for.
        is_dropped: the host was emptied meanwhile; the transfer is still reported.
    """

    number: int
    request: OffloadRequest
    chunks: Sequence[ChunkKey]
    blocks: Sequence[int]
    slots: Sequence[int]
    sizes: Sequence[int]
    firsts: Sequence[int]
    watched: Sequence[int] = ()
    held: Sequence[int] = ()
    is_load: bool = False
    within_step: bool = False
    is_dropped: bool = False


class Computing(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: the request.
        blocks: all its blocks, by group; not copied.
        upto: number of its tokens that are computed after this step.
        junction: as in `OffloadRequest`.
    """

    request: OffloadRequest
    blocks: Sequence[Sequence[int]]
    upto: int
    junction: int = 0


class StateHandOff(NamedTuple):
    """A state that the device has named, and that is unchanged only during this step.

    Attributes:
        group: its group.
        block: its block.
        tokens: number of tokens of its request that it covers.
    """

    group: int
    block: int
    tokens: int


@dataclass(slots=True)
class OffloadStep:
    """The decisions of a scheduler for a step.

    Attributes:
        computing: the requests that compute, in order.
        preempted: requests preempted since the last step.
        finished: requests that ended since the last step.
        blocks: blocks that requests got: all blocks of admitted requests, and the new blocks of others.
        states: states that were named since the last step, by request.
    """

    computing: Sequence[Computing] = ()
    preempted: Iterable[OffloadRequest] = ()
    finished: Sequence[OffloadRequest] = ()
    blocks: Collection[int] = ()
    states: Sequence[tuple[OffloadRequest, Sequence[StateHandOff]]] = ()


@dataclass(slots=True)
class OffloadPlan:
    """The work of the worker in a step.

    Attributes:
        loads: transfers to the device, which begin now.
        stores: transfers to the host, which begin with the next step, or now if they are flushed.
        flush: numbers of the transfers that must finish before the step computes anything.
    """

    loads: list[OffloadTransfer] = field(default_factory=list)
    stores: list[OffloadTransfer] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
