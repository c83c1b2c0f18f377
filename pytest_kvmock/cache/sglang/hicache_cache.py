"""SGLang's HiCache: the cache of a model with full attention alone, over device and host (`UnifiedRadixCache` of 0.5.23).

One subject: who has which pages, of the device and of the host, and which copies between them are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Final

from pytest_kvmock.cache.sglang.geometry import Geometry
from pytest_kvmock.cache.sglang.hicache_storage import HostStorage
from pytest_kvmock.cache.sglang.hicache_tree import DEVICE, HOST, HiCacheTree
from pytest_kvmock.cache.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.cache.sglang.hybrid_request import HybridRequest
from pytest_kvmock.cache.sglang.page_cache import on_the_wire
from pytest_kvmock.cache.sglang.radix_tree import Hold, Pages, TreeNode
from pytest_kvmock.checks import check_integer
from pytest_kvmock.events import StorageTier

# Theory of operation
#
# A request has pages of the device, its own from `protected` on. A checkpoint gives the tree what it lacks there, nodes
# that were on the host alone included, and orders copies to the host as the policy says. Copies that were ordered go as
# one group, loads of a batch as another; a group is acknowledged as a whole, groups in their order. A load is published
# when it is ordered, a copy when it is acknowledged.

LEAST_LOAD: Final = 10
"""Tokens below which nothing is loaded from the host (`load_back_threshold`)."""


class HiCacheManager(HybridCacheManager):
    """Caches whole pages on device and host, and publishes what is on each.

    Args:
        host_blocks: pages that the host has; a server's has one more than its ratio says.
        write_policy: when pages are copied to the host: one of `WRITE_POLICIES`.
        storage: what is behind the host; None: nothing.
        **options: as `RadixCacheManager`; the policy is "lru", "lfu" or "slru".

    Raises:
        ValueError: an argument is not what it must be.

    Attributes:
        host_blocks: as above.
        write_policy: as above.
        storage: as above.
        offload: how long copies take, for the time of a worker; None: they are acknowledged by `step`.
        writes: groups of copies to the host that were submitted and are not acknowledged, in order.
        loads: groups of copies to the device, likewise.
    """

    _tree: HiCacheTree
    takes: ClassVar[str] = (
        "match_prefix, evict, evict_host, reset; find, admit, load, prefill, checkpoint of a request; ack"
    )

    def __init__(
        self,
        *,
        host_blocks: int,
        write_policy: str = "write_through",
        storage: HostStorage | None = None,
        **options: Any,
    ) -> None:
        self.host_blocks, self.write_policy = host_blocks, write_policy
        self.storage = storage
        self.offload: Any = None
        self._ordered_loads: list[tuple[Hold, Hold]] = []
        self.writes: deque[list[Hold]] = deque()
        self.loads: deque[list[tuple[Hold, Hold]]] = deque()
        self._before_reset: dict[StorageTier, Collection[int]] = {DEVICE: (), HOST: ()}
        super().__init__(geometry=Geometry(), **options)
        if storage is not None:
            storage.attach(self._tree, self.block_size)

    def _new_tree(self, policy: str, protected_threshold: int) -> HiCacheTree:
        return HiCacheTree(
            policy,
            protected_threshold,
            host_pages=self.host_blocks,
            write_policy=self.write_policy,
            stored=self._was_stored,
            removed=self._was_removed,
            copied=self._was_copied,
        )

    def _stored(self, pages: Pages, new: Sequence[int], start: int, end: int) -> None:
        """Nothing: the tree says node by node what comes."""

    def _removed(self, names: list[int]) -> None:
        """Nothing: the tree says node by node what goes."""

    def _was_stored(self, node: TreeNode, tier: StorageTier) -> None:
        part, parent = node.host, node.parent
        before = parent.names[-1] if parent is not None and parent is not self._tree.root else None
        self._queue.stored(before, node.names, part.local_hashes, part.token_ids, on_the_wire(part.extra), tier=tier)

    def _was_removed(self, node: TreeNode, tier: StorageTier) -> None:
        self._queue.removed(node.names, tier)

    def _was_copied(self, node: TreeNode) -> None:
        if self.storage is not None:
            self.storage.back_up(node)

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def host_free(self) -> int:
        """Tokens in pages of the host that are free."""
        return self._tree.host_free * self.block_size

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Names of what is cached in a tier; on the host, of what has been copied."""
        if tier == DEVICE:
            return [name for node in self._tree.nodes() if node.on_device for name in node.names]
        if tier == HOST:
            return [
                name for node in self._tree.nodes() if node.host.on_host and not node.host.copy for name in node.names
            ]
        return []

    def announced(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Names that events promise in a tier: what is resident, but for what events say that wait (`hold_events`)."""
        before = self._queue.undone(self.resident(tier), tier)
        return self._before_reset[tier] if before is None else before

    @property
    def is_busy(self) -> bool:
        """Whether copies are ordered or under way."""
        busy = bool(self._tree.ordered or self._ordered_loads or self.writes or self.loads)
        return busy or (self.storage is not None and self.storage.is_busy)

    def lookup(self, request: HybridRequest) -> int:
        """Count the pages that it would use, where there is room. Changes nothing."""
        found = self._tree.look(request.tokens.names, self._reusable(request), request.namespace)
        return found.depth if (found.depth - found.usable) * self.block_size >= LEAST_LOAD else found.usable

    def in_storage(self, request: HybridRequest) -> int:
        """Count the pages that the storage would be asked for now and has, beyond those of device and host. Changes nothing."""
        names, count = request.tokens.names, self._reusable(request)
        found = self._tree.look(names, count, request.namespace)
        if self.storage is None or not found.end.host.on_host:
            return 0
        hit = self.storage.store.leading(names[found.depth : count])
        return hit if hit * self.block_size >= self.storage.prefetch_threshold else 0

    def on_device(self, request: HybridRequest) -> int:
        """Count the pages of it that are on the device. Changes nothing."""
        return super().lookup(request)

    def _held(self) -> set[TreeNode]:
        """Nodes that requests hold, whatever copies do."""
        nodes: set[TreeNode] = set()
        for request in self.requests:
            node = None if request.lock is None else request.lock.node
            while node is not None and node is not self._tree.root and node not in nodes:
                nodes.add(node)
                node = node.parent
        return nodes

    @property
    def unheld_blocks(self) -> int:
        """Pages of the device that no request holds, those included that a copy does."""
        own = sum(request.allocated - request.protected for request in self.requests)
        return self.max_capacity - own - sum(len(node.names) for node in self._held())

    def missing(self, request: HybridRequest, upto: int) -> int:
        """Count the pages that no request holds and that the first tokens of one need. Changes nothing."""
        if request in self.requests:
            return self.pages_of(upto) - request.allocated
        held, shared = self._held(), 0
        for node, end in self._tree.path(request.tokens.names, self._reusable(request), request.namespace):
            if node not in held:  # nor is what is below it
                break
            shared = end
        return self.pages_of(upto) - shared

    # ---------------------------------------------------------------------------------------------- admission

    def withdraw(self, request: HybridRequest) -> None:
        """Take back `admit`, and `load`, of a request for which nothing was allocated."""
        super().withdraw(request)
        request.from_host = request.from_storage = 0

    def load(self, request: HybridRequest) -> int:
        """Load what an admitted request has on the host, all of it or nothing, for the next batch.

        Returns:
            Tokens; 0 if they are too few, or there is no room. What was evicted for them is, all the same.
        """
        tree, match = self._tree, request.match
        assert match is not None
        node, pages = match.end, match.depth - match.usable
        hold = tree.hold_host(node)
        tree.lock(node)
        loaded = 0
        if pages * self.block_size >= LEAST_LOAD:
            self.make_room(pages * self.block_size)
            if pages <= self._free:
                self._free -= pages
                loaded = pages
                self._order_load(node)
        tree.release_host(hold)
        tree.unlock(node)
        if loaded:
            assert request.lock is not None
            tree.release(request.lock)
            request.lock = tree.hold(node)
            request.found = request.protected = request.allocated = match.depth
            request.computed = match.depth * self.block_size
            request.from_host = loaded * self.block_size
        self._flush()
        return loaded * self.block_size

    def _order_load(self, node: TreeNode) -> None:
        """Publish a path as loaded, and keep it until it is."""
        tree = self._tree
        loading = []
        at: TreeNode | None = node
        while at is not None and not at.on_device:
            loading.append(at)
            at = at.parent
        hold = Hold(node)
        hold.nodes = loading[::-1]
        for each in hold.nodes:
            each.host.loads.append(hold)
            tree.put_on_device(each)
        tree.lock(node)
        self._ordered_loads.append((hold, tree.hold_host(node)))

    # ------------------------------------------------------------------------------------------------- compute

    def evict_host(self, num_tokens: int) -> int:
        """Evict from the host until so many tokens are freed, or none may be evicted.

        Returns:
            Tokens that are free there now.
        """
        freed = self._tree.evict_host(-(-num_tokens // self.block_size))
        self._flush()
        return freed * self.block_size

    def submit_loads(self) -> None:
        """Let what was ordered since the last batch begin, as one group."""
        if self._ordered_loads:
            self.loads.append(self._ordered_loads)
            self._ordered_loads = []

    def submit_writes(self) -> None:
        """Let the copies to the host that were ordered begin, as one group."""
        if self._tree.ordered:
            self.writes.append(self._tree.ordered)
            self._tree.ordered = []

    def prefill(self, batch: Sequence[tuple[HybridRequest, int]]) -> None:
        """Allocate, and compute, what requests that were admitted have not of their first tokens.

        Args:
            batch: each with how many tokens, from its first; `lacking` was asked about each.

        Raises:
            ValueError: there is no room, though `lacking` said so: what counts as evictable is held (`write_back`).
        """
        self.submit_loads()
        super().prefill(batch)

    # -------------------------------------------------------------------------------------------------- copies

    def step(self, writes: int, loads: int) -> None:
        """Look once, as the scheduler does at the start of a step: submit copies that wait, acknowledge those that are done.

        Args:
            writes: so many groups of copies to the host are done, from the first; no more than were submitted before.
            loads: likewise of copies to the device.
        """
        done = min(writes, len(self.writes))
        self.submit_writes()
        for _ in range(done):
            for hold in self.writes.popleft():
                self._tree.copied(hold)
                for node in hold.nodes:
                    self._was_copied(node)
        for _ in range(min(loads, len(self.loads))):
            for hold, host_hold in self.loads.popleft():
                self._tree.release_host(host_hold)
                for node in reversed(hold.nodes):
                    node.host.loads.remove(hold)
                    self._tree.note_duplicate(node)
                self._tree.unlock(hold.nodes[-1])
        self._flush()

    def ack(self, writes: int = 0, loads: int = 0) -> None:
        """Acknowledge copies that were submitted, by hand: so many groups to the host, and to the device.

        Raises:
            ValueError: there are not so many under way, or none is acknowledged; nothing has changed.
        """
        for name, count, under_way in (("writes", writes, self.writes), ("loads", loads, self.loads)):
            check_integer(f"ack: {name}", count, 0, " (groups)")
            if count > len(under_way):
                raise ValueError(f"ack: {name} must be at most {len(under_way)}, the groups under way, got {count}")
        if not writes + loads:
            raise ValueError(
                f"ack of nothing: {len(self.writes)} groups of writes and {len(self.loads)} of loads are under way"
            )
        self.step(writes, loads)

    def reset(self) -> None:
        """Drop everything that is cached, on device and host, and publish a Cleared; the storage stays.

        Raises:
            ValueError: requests have pages, or copies are under way.
        """
        if self.is_busy:
            raise ValueError("reset: copies between device, host and storage are under way; acknowledge them first")
        if self.hold_events:
            self._before_reset = {tier: self.announced(tier) for tier in (DEVICE, HOST)}
        super().reset()
        if self.storage is not None:
            self.storage.reset()

    def clear(self) -> bool:
        """Reset the cache; False, and nothing happens, while a page is in use or a copy under way (`flush_cache`)."""
        return not self.is_busy and super().clear()
