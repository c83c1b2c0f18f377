"""vLLM's `SimpleCPUOffloadConnector`: a second block pool below the device; blocks are copied to it one by one.

One subject: the life of a block in that pool, from the offer to the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_kvmock.engines.base.offload import TierEvent
from pytest_kvmock.engines.vllm.coordinator import Coordinator
from pytest_kvmock.engines.vllm.named_pool import NULL, NamedPool
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import Cleared, Located, Removed, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import LoraIds, group_extra
from pytest_kvmock.values.tokens import keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.vllm.group_request import ComputedBlocks, GroupRequest
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager

# Theory of operation
#
# The pool has the device's groups, block sizes and rules (vLLM: `SimpleCPUOffloadScheduler` has its own coordinator).
# It is looked up for the tokens behind the device's hit; found blocks stay pinned until the request is allocated.
#
# Eager: a block is offered in the first step of its request after the step that computed it; the remaining blocks are
# offered when the request ends. Lazy: each step walks the device's queue from where the last walk stopped, and copies
# the blocks that will be evicted next.
#
# Blocks that are copied are held on both sides. When a copy is done, they are freed one by one, head first, unlike the
# blocks of a request. The device therefore evicts heads before tails, and blocks behind such a hole are useless.
#
# A lazy pool that is smaller than the device's cache never stops copying: copied blocks go to the end of the queue,
# where the walk finds them again, and by then their copies were evicted.

LOCALITY: Final = {"locality": "LOCAL"}


class CopiedBlock(NamedTuple):
    """A block that is being copied to the pool.

    Attributes:
        name: its group and its hash.
        device: its block of the device.
        slot: its block of the pool.
        event: the event that is published when the copy is done.
    """

    name: tuple[int, int]
    device: int
    slot: int
    event: TierEvent


@dataclass(eq=False, slots=True)
class BlockCopies:
    """One transfer of a step, for all its requests.

    Attributes:
        number: 0, 1, 2 ... in its direction.
        device: blocks of the device, in order.
        slots: blocks of the pool, in order.
        requests: for a load, the requests that wait for it.
    """

    number: int
    device: Sequence[int]
    slots: Sequence[int]
    requests: Sequence[SimpleRequest] = ()


@dataclass(eq=False, slots=True)
class SimpleRequest:
    """The connector's record of one request, made by `SimpleOffload.request`.

    Attributes:
        state: the request of the block manager.
        hit: its hit in the pool, pinned until blocks are allocated; None if there is none.
        blocks: by group, the blocks that it was given, including blocks that have fallen behind a window since.
        stored: by group, the number of leading blocks that need not be offered; None: the request is not offered.
        loading: blocks of the device and of the pool that its load holds; None if it has no load.
        load: the number of that load; None if it has not begun.
    """

    state: GroupRequest
    hit: ComputedBlocks | None = None
    blocks: Sequence[list[int]] = ()
    stored: list[int] | None = None
    loading: tuple[list[int], list[int]] | None = None
    load: int | None = None


class ComputingRequest(NamedTuple):
    """A request that computes tokens in a step.

    Attributes:
        request: the request.
        computed: number of its tokens computed by earlier steps, less those whose output is not known yet.
    """

    request: SimpleRequest
    computed: int


@dataclass(slots=True)
class SimplePlan:
    """The work of the worker in a step.

    Attributes:
        load: the transfer to the device; None if there is none.
        store: the transfer to the pool; None if there is none.
        flush: whether all transfers in flight must finish before the step computes anything.
    """

    load: BlockCopies | None = None
    store: BlockCopies | None = None
    flush: bool = False


class _Rest:
    """The tokens of a request behind those of the device, in the form that a coordinator looks up."""

    __slots__ = ("block_size", "computes_last_token", "names", "num_tokens", "skip_reading_prefix_cache")

    def __init__(self, state: GroupRequest, start: int) -> None:
        tokens = state.tokens
        self.block_size = tokens.block_size
        self.names = tokens.names[start // tokens.block_size :]
        self.num_tokens = tokens.num_tokens - start
        self.computes_last_token = True
        self.skip_reading_prefix_cache = False

    @property
    def tokens(self) -> _Rest:
        """Itself: a lookup needs only the tokens of a request."""
        return self


class SimpleOffload:
    """The pool of one engine, and the copies in flight in both directions.

    Args:
        num_blocks: usable blocks, at least 1 (vLLM's `num_cpu_blocks` less the null block).
        device: the block manager above it.
        lazy: whether it copies the blocks that are evicted next (`lazy_offload`) instead of those computed last.
        disk: whether the pool is a file (`kv_offload_backend: disk`), as events then say.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, num_blocks: int, device: VllmHybridManager, *, lazy: bool = False, disk: bool = False) -> None:
        check_integer("num_blocks", num_blocks, 1)
        self.lazy = lazy
        self.tier = StorageTier.DISK if disk else StorageTier.HOST_PINNED
        self.lora_ids = LoraIds()
        self._geometry = device.geometry
        self._device = device.pool
        groups = device.geometry.groups
        self._pool = NamedPool(num_blocks, len(groups), self._removed)
        self._num_blocks = num_blocks
        self._coordinator = Coordinator(device.geometry, self._pool, device)
        self._manager = device
        self._cursor: int | None = None
        self._under_way: set[int] = set()  # blocks of the device that are being stored, by number
        self._left: list[CopiedBlock] = []  # of requests that have ended, for the next step
        self._stores: dict[int, list[CopiedBlock]] = {}
        self._dropped: dict[int, list[CopiedBlock]] = {}  # stores in flight when the pool was reset
        self._to_load: list[SimpleRequest] = []
        self._loading: list[SimpleRequest] = []
        self._dropped_loads: list[SimpleRequest] = []
        self._numbers = {"load": 0, "store": 0}
        self._events: list[TierEvent] = []
        self._pinned: dict[SimpleRequest, None] = {}  # requests with a hit that is not loaded yet
        self._requests: list[SimpleRequest] = []  # requests that are offered

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks of the pool, cached or not."""
        return len(self._pool.free)

    @property
    def num_held_alone(self) -> int:
        """Number of blocks of the device that only stores hold."""
        stores = (self._left, *self._stores.values(), *self._dropped.values())
        holds = Counter(each.device for blocks in stores for each in blocks)
        return sum(self._device.refs[block] == times for block, times in holds.items())

    @property
    def is_idle(self) -> bool:
        """Whether no store is in flight, so that an engine without requests need not step."""
        return not (self._left or self._stores or self._dropped)

    def resident(self) -> list[tuple[int, int]]:
        """Return the names of the blocks in the pool, (group, hash), copies repeated."""
        return [name for block in range(1, self._num_blocks + 1) for name in self._pool.names(block)]

    # ------------------------------------------------------------------------------------------------ requests

    def request(self, state: GroupRequest) -> SimpleRequest:
        """Make the record of a request, before it is looked up."""
        return SimpleRequest(state)

    def match(self, request: SimpleRequest, start: int) -> int:
        """Look up the tokens that follow those of the device, and pin their blocks; return the number of tokens.

        Args:
            request: the request.
            start: number of tokens that the device has.
        """
        self._unpin(request)
        hit = self._found(request.state, start)
        if hit is None or not hit.num_tokens:
            return 0
        request.hit = hit
        self._pinned[request] = None
        self._pool.touch(_blocks_of(hit))
        return hit.num_tokens

    def _found(self, state: GroupRequest, start: int) -> ComputedBlocks | None:
        rest = _Rest(state, start)
        if rest.num_tokens <= 1 or not rest.names:
            return None
        return self._coordinator.lookup(rest)  # type: ignore[arg-type]  # it has what a lookup asks for

    def count(self, state: GroupRequest, start: int) -> int:
        """Count the tokens of a request that the pool has behind those of the device. Changes nothing."""
        found = self._found(state, start)
        return 0 if found is None else found.num_tokens

    def _unpin(self, request: SimpleRequest) -> None:
        if request.hit is not None:
            self._pool.release(_blocks_of(request.hit))
            request.hit = None
            del self._pinned[request]

    def allocated(self, request: SimpleRequest, upto: int, external: int) -> None:
        """Record that a request got blocks: it is offered from now on, and its hit is loaded with the next plan.

        Args:
            request: the request.
            upto: tokens of the device's hit and of the load together.
            external: tokens that the pool loads; 0 if none.
        """
        groups = self._geometry.groups
        if not self.lazy and request.stored is None:
            request.blocks, request.stored = [[] for _ in groups], [0] * len(groups)
            self._requests.append(request)
        if not external or request.hit is None:
            self._unpin(request)
            return
        device: list[int] = []
        slots: list[int] = []
        for group, table, found in zip(groups, request.state.tables, request.hit.blocks, strict=True):
            first = -(-upto // group.block_size) - len(found)  # loaded blocks are the last ones of `upto` tokens
            for place, slot in enumerate(found, first):
                if slot != NULL:
                    device.append(table.blocks[place])
                    slots.append(slot)
        self._pool.touch(slots)
        self._unpin(request)
        self._device.touch(device)
        request.loading = device, slots
        self._to_load.append(request)

    def ended(self, request: SimpleRequest, computed: int) -> None:
        """End a request before its blocks are freed; its remaining blocks are stored with the next step.

        Args:
            request: the request.
            computed: number of its computed tokens.
        """
        self._unpin(request)
        if request in self._to_load:
            self._to_load.remove(request)
            self._loaded(request)
        if request.stored is not None:
            self._left += self._offer(request, computed)
            request.stored = None
            self._requests.remove(request)

    def preempted(self, request: SimpleRequest) -> None:
        """Record that a request lost its blocks: all tokens that it computes again are offered again."""
        if request.stored is not None:
            request.blocks, request.stored = [[] for _ in request.stored], [0] * len(request.stored)

    # -------------------------------------------------------------------------------------------------- a step

    def plan(self, computing: Iterable[ComputingRequest], *, flush: bool = False) -> SimplePlan:
        """Plan the transfers of a step.

        Args:
            computing: the requests that compute, in the order of vLLM's scheduler output: new, resumed, running.
            flush: whether a request was preempted, so that no copy may stay in flight.
        """
        plan = SimplePlan(flush=flush)
        if self.lazy:
            blocks = self._walked()
        else:
            blocks = []
            for request, computed in computing:
                for known, table in zip(request.blocks, request.state.tables, strict=False):
                    known.extend(table.blocks[len(known) :])
                blocks += self._offer(request, computed)
            blocks += self._left
            self._left = []
        if blocks:
            number = self._next("store")
            self._stores[number] = blocks
            plan.store = BlockCopies(number, [each.device for each in blocks], [each.slot for each in blocks])
        if self._to_load:
            number = self._next("load")
            pairs = [each.loading for each in self._to_load if each.loading is not None]
            plan.load = BlockCopies(
                number,
                [block for device, _ in pairs for block in device],
                [slot for _, slots in pairs for slot in slots],
                self._to_load,
            )
            for each in self._to_load:
                each.load = number
            self._loading += self._to_load
            self._to_load = []
        return plan

    def _next(self, direction: str) -> int:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        return number

    def _offer(self, request: SimpleRequest, computed: int) -> list[CopiedBlock]:
        """Begin to store the computed and hashed blocks that are neither in the pool nor in flight, as many as fit."""
        offered: list[tuple[tuple[int, int], int, TierEvent]] = []
        if request.stored is None or not self._pool.free:
            return []
        room, unit, is_full = len(self._pool.free), self._geometry.scheduler_block_size, False
        aligned = computed // unit * unit
        for number, group in enumerate(self._geometry.groups):
            blocks = request.blocks[number][: aligned // group.block_size]
            for place in range(request.stored[number], len(blocks)):
                block = blocks[place]
                names = self._device.names(block) if block != NULL else ()
                if names and block not in self._under_way and names[0][1] not in self._pool.cached[names[0][0]]:
                    is_full = len(offered) == room
                    if is_full:
                        break
                    offered.append((names[0], block, self._described(request.state, names[0], place)))
                request.stored[number] = place + 1
            if is_full:
                break
        slots = self._pool.take(len(offered))
        self._device.touch(block for _, block, _ in offered)
        self._under_way.update(block for _, block, _ in offered)
        return [
            CopiedBlock(name, block, slot, event) for (name, block, event), slot in zip(offered, slots, strict=True)
        ]

    @property
    def _walk(self) -> int:
        """The most places of the device's queue that a lazy step walks.

        vLLM: _estimate_lazy_target_blocks, with a reserve as large as the target.
        """
        tokens = self._manager.max_num_batched_tokens
        return 2 * sum(
            -(-group.window // group.block_size) + 1 if group.window else -(-tokens // group.block_size)
            for group in self._geometry.groups
        )

    def _walked(self) -> list[CopiedBlock]:
        """Begin to store the blocks that the device evicts next, from where the last walk stopped."""
        free = self._device.free
        if self._cursor is not None and self._cursor not in free:
            self._cursor = None
        queue = iter(tuple(free))
        if self._cursor is not None:
            next(each for each in queue if each == self._cursor)
        room = len(self._pool.free)
        found: list[tuple[tuple[int, int], int]] = []
        most = self._walk
        for walked, block in enumerate(queue):
            if walked == most or len(found) == room:
                break
            self._cursor = block
            names = self._device.names(block)
            if names and names[0][1] not in self._pool.cached[names[0][0]]:
                found.append((names[0], block))
        slots = self._pool.take(len(found))
        self._device.touch(block for _, block in found)
        return [
            CopiedBlock(name, block, slot, self._place_of(name))
            for (name, block), slot in zip(found, slots, strict=True)
        ]

    def complete(self, received: Iterable[SimpleRequest], done: Iterable[int]) -> None:
        """Complete the loads and stores that are reported as done, in these orders."""
        for request in received:
            if request in self._loading:
                self._loading.remove(request)
            else:
                self._dropped_loads.remove(request)
            self._loaded(request)
        for number in done:
            if number in self._dropped:
                blocks = self._dropped.pop(number)
            else:
                blocks = self._stores.pop(number)
                self._under_way.difference_update(each.device for each in blocks)
                for each in blocks:
                    group, block_hash = each.name
                    self._pool.name(each.slot, group, block_hash, self._geometry.groups[group].block_size)
                    self._events.append(each.event)
            self._let_go(blocks)

    def _let_go(self, blocks: Sequence[CopiedBlock]) -> None:
        self._pool.release(each.slot for each in blocks)
        self._device.release(each.device for each in blocks)

    def _loaded(self, request: SimpleRequest) -> None:
        if request.loading is not None:
            device, slots = request.loading
            request.loading = request.load = None
            self._pool.release(slots)
            self._device.release(device)

    def reset(self) -> bool:
        """Empty the pool and publish a Cleared; while a copy is in flight, drop nothing and return False.

        Copies in flight have no effect.
        """
        self._dropped.update(self._stores)
        self._stores.clear()
        self._under_way.clear()
        for request in tuple(self._pinned):
            self._unpin(request)
        self._let_go(self._left)
        self._left = []
        for request in self._to_load:
            self._loaded(request)
        self._to_load = []
        self._dropped_loads += self._loading
        self._loading = []
        for request in self._requests:
            request.stored = None
        self._requests.clear()
        self._cursor = None
        if self._dropped or self._dropped_loads or len(self._pool.free) < self._num_blocks:
            return False
        self._pool.reset()
        self._events.append(TierEvent(Cleared(), self.tier))
        return True

    # ------------------------------------------------------------------------------------------------- events

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last call; in a batch they follow those of the device."""
        events, self._events = self._events, []
        return events

    def _removed(self, names: Sequence[tuple[int, int]]) -> None:
        for group, block_hash in names:
            self._events.append(
                TierEvent(Removed((block_hash,)), self.tier, None, group_extra(group, extra=dict(LOCALITY)))
            )

    def _extra(self, group: int, more: dict[str, Any]) -> dict[str, Any] | None:
        spec = self._geometry.groups[group]
        return group_extra(group, spec.kind, spec.window, {**LOCALITY, **more})

    def _described(self, state: GroupRequest, name: tuple[int, int], place: int) -> TierEvent:
        """Return the Stored of one block, with all fields except the session."""
        tokens: HashedTokens = state.tokens
        group, block_hash = name
        size, unit, keys = self._geometry.groups[group].block_size, tokens.block_size, tokens.keys
        start, end = place * size, (place + 1) * size
        parent = tokens.names[start // unit - 1] if start else None
        rows = tokens.rows(place, place + 1, size)
        if rows is None:
            local = tokens.local_hashes[place : place + 1]
        else:
            local = keyed_block_hashes(tokens.cut(start, end), size, keys, place)
        more: dict[str, Any] = {"extra_keys": None}
        if keys is not None:
            more |= keys.carried(place, place + 1, size, self.lora_ids)
            more.pop("session_id", None)
            if more["extra_keys"] == [None]:
                more["extra_keys"] = None
        return TierEvent(Stored(parent, (block_hash,), tuple(local)), self.tier, rows, self._extra(group, more))

    def _place_of(self, name: tuple[int, int]) -> TierEvent:
        """Return the event of a lazy copy: no tokens and no parent, but the size of the block."""
        group, block_hash = name
        spec = self._geometry.groups[group]
        more = {"block_size": spec.block_size, "kv_cache_spec_kind": spec.kind}
        return TierEvent(Located((block_hash,)), self.tier, None, self._extra(group, more))


def _blocks_of(hit: ComputedBlocks) -> list[int]:
    return [block for blocks in hit.blocks for block in blocks if block != NULL]
