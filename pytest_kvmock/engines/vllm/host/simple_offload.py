"""vLLM's `SimpleCPUOffloadConnector`: a second block pool below the device, which blocks are copied to one by one.

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
# The pool below has the device's groups, block sizes and rules (vLLM: `SimpleCPUOffloadScheduler`
# has a coordinator of its own). It is
# asked for what follows the device's hit, and what it has stays pinned from the question to the answer.
#
# Eager: a block is offered in the first step in which its request computes after the one that
# computed it; what is left is offered as the
# request ends. Lazy: each step walks the device's queue from where the last walk stopped, and
# copies what will be evicted next.
#
# Blocks that are copied are held on both sides. As a copy is done, they are freed one by one,
# head first, unlike a request's: so the
# device evicts heads before tails, and what stands behind such a hole is worth nothing.

# A lazy pool that is smaller than what the device caches never rests: what was copied goes to the
# end of the queue, where
# the walk finds it again, and by then its copy was evicted.

LOCALITY: Final = {"locality": "LOCAL"}


class CopiedBlock(NamedTuple):
    """A block on its way to the pool.

    Attributes:
        name: its group and its hash.
        device: its block of the device.
        slot: its block of the pool.
        event: what is published when it is there.
    """

    name: tuple[int, int]
    device: int
    slot: int
    event: TierEvent


@dataclass(eq=False, slots=True)
class BlockCopies:
    """One transfer of a step, for all its requests.

    Attributes:
        number: 0, 1, 2 ... of its direction.
        device: blocks of the device, in order.
        slots: blocks of the pool, in order.
        requests: of a load, those that wait for it.
    """

    number: int
    device: Sequence[int]
    slots: Sequence[int]
    requests: Sequence[SimpleRequest] = ()


@dataclass(eq=False, slots=True)
class SimpleRequest:
    """One request as the connector knows it. `SimpleOffload.request` makes one.

    Attributes:
        state: the request as the block manager knows it.
        hit: what the pool has of it, which is pinned until blocks are allocated; None: nothing.
        blocks: by group, the blocks that it was given, those included that have fallen behind a window since.
        stored: by group, how many of these need not be offered; None: it is not offered at all.
        loading: blocks of the device and of the pool that its load holds; None: it has none.
        load: the number of that load; None: it has not begun.
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
        request: which.
        computed: how many of its tokens the steps before have computed, less those whose output is not known yet.
    """

    request: SimpleRequest
    computed: int


@dataclass(slots=True)
class SimplePlan:
    """What the worker has to do in a step.

    Attributes:
        load: the transfer to the device; None: there is none.
        store: the transfer to the pool; None: there is none.
        flush: whether all that is under way must be done before anything is computed.
    """

    load: BlockCopies | None = None
    store: BlockCopies | None = None
    flush: bool = False


class _Rest:
    """The tokens of a request behind those that the device has, as a coordinator looks them up."""

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
        """Itself: of a request a lookup needs no more than its tokens."""
        return self


class SimpleOffload:
    """The pool of one engine, and what is on its way to it and back.

    Args:
        num_blocks: usable blocks, at least 1 (vLLM's `num_cpu_blocks` less the null block).
        device: the block manager above it.
        lazy: whether what is evicted next is copied (`lazy_offload`), and not what was computed last.
        disk: whether the pool is a file (`kv_offload_backend: disk`), which events then say.

    Raises:
        ValueError: an argument is not what it must be.
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
        self._dropped: dict[int, list[CopiedBlock]] = {}  # under way as the pool was reset
        self._to_load: list[SimpleRequest] = []
        self._loading: list[SimpleRequest] = []
        self._dropped_loads: list[SimpleRequest] = []
        self._numbers = {"load": 0, "store": 0}
        self._events: list[TierEvent] = []
        self._pinned: dict[SimpleRequest, None] = {}  # those of which it has something that is not loaded yet
        self._requests: list[SimpleRequest] = []  # those that are offered

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the pool that nothing holds, cached or not."""
        return len(self._pool.free)

    @property
    def num_held_alone(self) -> int:
        """Blocks of the device that stores hold and nothing else."""
        stores = (self._left, *self._stores.values(), *self._dropped.values())
        holds = Counter(each.device for blocks in stores for each in blocks)
        return sum(self._device.refs[block] == times for block, times in holds.items())

    @property
    def is_idle(self) -> bool:
        """Whether no store is under way, so that an engine without requests need not step."""
        return not (self._left or self._stores or self._dropped)

    def resident(self) -> list[tuple[int, int]]:
        """Names of what the pool has, (group, hash), copies repeated."""
        return [name for block in range(1, self._num_blocks + 1) for name in self._pool.names(block)]

    # ------------------------------------------------------------------------------------------------ requests

    def request(self, state: GroupRequest) -> SimpleRequest:
        """A request of this engine, before it is looked up."""
        return SimpleRequest(state)

    def match(self, request: SimpleRequest, start: int) -> int:
        """Look for what follows the tokens that the device has, and pin what is found; returns its tokens.

        Args:
            request: whose.
            start: how many tokens the device has.
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
        """Tokens of a request that are there, behind those that the device has. Changes nothing."""
        found = self._found(state, start)
        return 0 if found is None else found.num_tokens

    def _unpin(self, request: SimpleRequest) -> None:
        if request.hit is not None:
            self._pool.release(_blocks_of(request.hit))
            request.hit = None
            del self._pinned[request]

    def allocated(self, request: SimpleRequest, upto: int, external: int) -> None:
        """A request got blocks: it is offered from now on, and what was found begins to load with the next plan.

        Args:
            request: which.
            upto: tokens that the device has and the pool brings, together.
            external: those that the pool brings; 0: it brings none.
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
            first = -(-upto // group.block_size) - len(found)  # what comes stands at the end of what is computed
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
        """A request is over, before its blocks are freed: what is left of it is stored with the next step.

        Args:
            request: which.
            computed: how many of its tokens are computed.
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
        """A request lost its blocks: all that it computes again is offered again."""
        if request.stored is not None:
            request.blocks, request.stored = [[] for _ in request.stored], [0] * len(request.stored)

    # -------------------------------------------------------------------------------------------------- a step

    def plan(self, computing: Iterable[ComputingRequest], *, flush: bool = False) -> SimplePlan:
        """Plan the transfers of a step.

        Args:
            computing: the requests that compute, in the order of vLLM's scheduler output: new, resumed, running.
            flush: whether a request was preempted, so that no copy may be under way.
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
        """Begin to store what of it is computed, hashed, and neither there nor under way; as much as fits."""
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
        """Places of the device's queue that a lazy step walks at most.

        vLLM: _estimate_lazy_target_blocks, with a reserve as large as the target.
        """
        tokens = self._manager.max_num_batched_tokens
        return 2 * sum(
            -(-group.window // group.block_size) + 1 if group.window else -(-tokens // group.block_size)
            for group in self._geometry.groups
        )

    def _walked(self) -> list[CopiedBlock]:
        """Begin to store what the device evicts next, from where the last walk stopped."""
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
        """Loads and stores were reported as done, in these orders."""
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
        """Drop all that the pool has, and publish a Cleared; False, and nothing is dropped, while a copy is under way.

        What is under way comes for nothing.
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
        """What was published since the last time; it stands behind the device's in a batch."""
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
        """The Stored of one block, with all that there is to say but the session."""
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
        """What a lazy copy publishes: neither tokens nor a parent, but the size of the block."""
        group, block_hash = name
        spec = self._geometry.groups[group]
        more = {"block_size": spec.block_size, "kv_cache_spec_kind": spec.kind}
        return TierEvent(Located((block_hash,)), self.tier, None, self._extra(group, more))


def _blocks_of(hit: ComputedBlocks) -> list[int]:
    return [block for blocks in hit.blocks for block in blocks if block != NULL]
