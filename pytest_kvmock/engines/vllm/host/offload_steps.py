"""What a scheduler, vLLM's native offload and the worker that copies pass to each other in a step."""

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
    """The connector has ended the engine, as it ends vLLM's: with it all of its requests are lost."""


class Hit(NamedTuple):
    """What the host has of a request, beyond what the device has.

    Attributes:
        start: tokens that the device has.
        tokens: tokens after these that can be loaded.
        within_step: whether they are loaded within the step; else the request waits for them.
    """

    start: int
    tokens: int
    within_step: bool = False


@dataclass(eq=False, slots=True)
class OffloadRequest:
    """One request as the connector knows it. `NativeOffload.request` makes one.

    Attributes:
        tokens: its tokens and their names; it grows as tokens are generated.
        max_load_tokens: the most that is loaded for it; None: no limit.
        max_offload_tokens: how many of its tokens are stored at most; None: all.
        user: what it did with chunks.
        blocks: by group that is stored, those that it was given until it last computed; what its windows let go of
            stays here, until another request gets it.
        offered: by group that is stored, how many chunks, from the first, need not be offered.
        confirmed: by group that is stored, where the chunks end that its last look-up found.
        tail: tokens that its last hit ends at inside a block; 0: it ends with one.
        junction: as its engine's (`GroupRequest.junction`), when it last computed.
        has_loaded: whether anything was loaded for it.
        is_over: whether it generates no more.
        computed: of one that was aborted, how many of its tokens were computed.
        jobs: numbers of its transfers that are under way.
        load_tiers: which tiers below the host it may load from (vLLM: `kv_load_tiers`); None: all.
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
        request: whose.
        chunks: their names, in order.
        blocks: the blocks of the device, in order.
        slots: where they are in the host, in order.
        sizes: how many of the blocks are of each group that is stored.
        firsts: for each group that is stored, the position of the first block in the request's table.
        watched: of a store, blocks that others may get while the request runs, as its windows let go of them.
        held: the others, which others may get once it is over.
        is_load: whether it goes to the device.
        within_step: whether it is a load that the step waits for.
        is_dropped: the host was emptied meanwhile; it is reported all the same.
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
        request: which.
        blocks: all blocks that it has, by group; not copied.
        upto: how many of its tokens are computed with this step.
        junction: as `OffloadRequest`.
    """

    request: OffloadRequest
    blocks: Sequence[Sequence[int]]
    upto: int
    junction: int = 0


class StateHandOff(NamedTuple):
    """A state that the device has named, and that stays as it is for this step alone.

    Attributes:
        group: whose.
        block: where it is.
        tokens: those of its request that it is the state after.
    """

    group: int
    block: int
    tokens: int


@dataclass(slots=True)
class OffloadStep:
    """What a scheduler has decided.

    Attributes:
        computing: the requests that compute, in order.
        preempted: those that were preempted since the last step.
        finished: those that are over since the last step.
        blocks: blocks that requests got: all of those that were admitted, and the new ones of others.
        states: what was named of groups of states since the last step, by request.
    """

    computing: Sequence[Computing] = ()
    preempted: Iterable[OffloadRequest] = ()
    finished: Sequence[OffloadRequest] = ()
    blocks: Collection[int] = ()
    states: Sequence[tuple[OffloadRequest, Sequence[StateHandOff]]] = ()


@dataclass(slots=True)
class OffloadPlan:
    """What the worker has to do.

    Attributes:
        loads: transfers to the device, which begin now.
        stores: transfers to the host, which begin with the next step, or now if they are flushed.
        flush: numbers of transfers that must be done before anything is computed.
    """

    loads: list[OffloadTransfer] = field(default_factory=list)
    stores: list[OffloadTransfer] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
