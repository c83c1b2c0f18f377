"""What a scheduler, vLLM's native offload and the worker that copies pass to each other in a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pytest_kvmock.tiers.chunk_eviction import ChunkKey, ChunkUser

if TYPE_CHECKING:
    from pytest_kvmock.cache.hashed import HashedTokens

Keeps: TypeAlias = Callable[[int, int, int], Collection[int]]
"""Which positions of a group, between two, the engine keeps of a request."""


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
        keeps: what is stored of groups with a window; None: there are none.
        max_load_tokens: the most that is loaded for it; None: no limit.
        max_offload_tokens: how many of its tokens are stored at most; None: all.
        user: what it did with chunks.
        blocks: by group, those that it had when it last computed.
        offered: how many chunks, from the first, need not be offered.
        computed: of one that was aborted, how many of its tokens were computed.
        jobs: numbers of its transfers that are under way.
    """

    tokens: HashedTokens
    keeps: Keeps | None = None
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    user: ChunkUser = field(default_factory=ChunkUser)
    blocks: Sequence[Sequence[int]] = ()
    offered: int = 0
    computed: int | None = None
    jobs: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class OffloadTransfer:
    """Chunks that are copied for one request.

    Attributes:
        number: 0, 1, 2 ... over both directions.
        request: whose.
        chunks: their names, in order.
        blocks: the blocks of the device, in order.
        slots: where they are in the host, in order.
        is_load: whether it goes to the device.
        within_step: whether it is a load that the step waits for.
        is_dropped: the host was emptied meanwhile; it is reported all the same.
    """

    number: int
    request: OffloadRequest
    chunks: Sequence[ChunkKey]
    blocks: Sequence[int]
    slots: Sequence[int]
    is_load: bool = False
    within_step: bool = False
    is_dropped: bool = False


class Computing(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: which.
        blocks: all blocks that it has, by group; not copied.
        upto: how many of its tokens are computed with this step.
    """

    request: OffloadRequest
    blocks: Sequence[Sequence[int]]
    upto: int


@dataclass(slots=True)
class OffloadStep:
    """What a scheduler has decided.

    Attributes:
        computing: the requests that compute, in order.
        preempted: those that were preempted since the last step.
        finished: those that are over since the last step.
        blocks: blocks that requests got: all of those that were admitted, and the new ones of others.
    """

    computing: Sequence[Computing] = ()
    preempted: Iterable[OffloadRequest] = ()
    finished: Sequence[OffloadRequest] = ()
    blocks: Collection[int] = ()


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
