"""SGLang's HiCache: a cache over device and host (`UnifiedRadixCache` of 0.5.23).

One subject: which device and host pages each request and node has, and which copies between the two are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.host.hicache_storage import HostStorage
from pytest_kvmock.engines.sglang.host.hicache_tree import DEVICE, HOST, Copy, HiCacheTree, HostLock
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.hybrid_request import HybridRequest
from pytest_kvmock.engines.sglang.hybrid_tree import Lock
from pytest_kvmock.engines.sglang.page_cache import on_the_wire
from pytest_kvmock.engines.sglang.radix_tree import Hold, Pages, TreeNode
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import StorageTier

# Theory of operation
#
# A request has device pages; it owns the pages from `protected` on. A checkpoint gives the tree the device pages that
# it lacks, also for nodes that were only on the host, and orders copies to the host by the write policy. Ordered copies
# are submitted as one group, the loads of a batch as another. A group is acknowledged as a whole; groups are
# acknowledged in order. A load is published when it is ordered, a copy when it is acknowledged.

LEAST_LOAD: Final = 10
"""Tokens below which nothing is loaded from the host (`load_back_threshold`)."""


class HostLoad(NamedTuple):
    """A load: the nodes that it copies to the device, and the locks that keep them on the device and on the host."""

    nodes: Hold
    lock: Lock
    host_lock: HostLock


class HiCacheManager(HybridCacheManager):
    """Caches whole pages on device and host, and publishes the contents of both.

    Args:
        host_blocks: host pages; a server has one more than its ratio gives.
        geometry: the parts of the model; None: only full attention.
        host_windows: host pages for windows; None: the device's window pages times the ratio of `host_blocks` to the
            device's pages, plus one.
        host_states: host slots for states; None: by the same rule.
        write_policy: when pages are copied to the host: one of `WRITE_POLICIES`.
        storage: the storage below the host; None if there is none.
        **options: see `RadixCacheManager`; the policy is "lru", "lfu" or "slru".

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        host_blocks: as given.
        write_policy: as given.
        storage: as given.
        offload: durations of copies in a worker's time; None: `step` acknowledges copies.
        writes: submitted and not yet acknowledged groups of copies to the host, in order.
        loads: the same for copies to the device.
    """

    _tree: HiCacheTree
    takes: ClassVar[str] = (
        "match_prefix, evict, evict_host, reset; find, admit, load, prefill, checkpoint of a request; ack"
    )

    def __init__(
        self,
        *,
        host_blocks: int,
        geometry: Geometry | None = None,
        host_windows: int | None = None,
        host_states: int | None = None,
        write_policy: str = "write_through",
        storage: HostStorage | None = None,
        **options: Any,
    ) -> None:
        self.host_blocks, self.write_policy = host_blocks, write_policy
        self.host_windows, self.host_states = host_windows, host_states
        self.storage = storage
        self.offload: Any = None
        self._ordered_loads: list[HostLoad] = []
        self.writes: deque[list[Copy]] = deque()
        self.loads: deque[list[HostLoad]] = deque()
        self._before_reset: dict[StorageTier, Collection[int]] = {DEVICE: (), HOST: ()}
        super().__init__(geometry=geometry or Geometry(), **options)
        if storage is not None:
            storage.attach(self._tree, self.block_size, self._bigram)

    def _new_tree(self, policy: str, protected_threshold: int) -> HiCacheTree:
        geometry, size, capacity = self.geometry, self.block_size, self.num_blocks
        geometry.check(capacity, size, policy)
        window, states = geometry.make_window(capacity, size), geometry.make_states()
        host_windows, host_states = self.host_windows, self.host_states
        if host_windows is None:
            host_windows = 0 if window is None else self.host_blocks * window.capacity // capacity + 1
        if host_states is None:
            host_states = 0 if states is None else self.host_blocks * states.capacity // capacity + 1
        if window is not None and self.host_windows is None and host_windows < window.pages:
            raise ValueError(
                f"a window of {geometry.window} tokens needs {window.pages} pages of the host, and of its "
                f"{self.host_blocks} pages it has {host_windows} for windows"
            )
        return HiCacheTree(
            policy,
            protected_threshold,
            window=window,
            states=states,
            host_windows=host_windows,
            host_states=host_states,
            host_pages=self.host_blocks,
            write_policy=self.write_policy,
            stored=self._was_stored,
            removed=self._was_removed,
            copied=self._was_copied,
        )

    def _stored(self, pages: Pages, new: Sequence[int], start: int, end: int) -> None:
        """Do nothing: the tree reports each stored node itself."""

    def _removed(self, names: list[int]) -> None:
        """Do nothing: the tree reports each removed node itself."""

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
        """Tokens in free host pages."""
        return self._tree.host_free * self.block_size

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names of the pages cached in a tier; on the host, without pages whose copy is under way."""
        if tier == DEVICE:
            return [name for node in self._tree.nodes() if node.on_device for name in node.names]
        if tier == HOST:
            return [
                name
                for node in self._tree.nodes()
                if node.host.on_host and not node.host.on_the_way
                for name in node.names
            ]
        return []

    def announced(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names that published events promise in a tier.

        They are the resident names before the changes of waiting events (`hold_events`).
        """
        before = self._queue.undone(self.resident(tier), tier)
        return self._before_reset[tier] if before is None else before

    @property
    def is_busy(self) -> bool:
        """Whether copies are ordered or under way."""
        busy = bool(self._tree.ordered or self._ordered_loads or self.writes or self.loads)
        return busy or (self.storage is not None and self.storage.is_busy)

    def lookup(self, request: HybridRequest) -> int:
        """Count the cached pages that a request would use if there is room. Changes nothing."""
        found = self._tree.look(request.tokens.names, self._reusable(request), request.namespace)
        loads = found.window_pages or found.state_on_host or found.host_pages * self.block_size >= LEAST_LOAD
        return found.reach if loads else found.usable

    def in_storage(self, request: HybridRequest) -> int:
        """Count the pages that a look-up would find in the storage now, beyond those on device and host. Changes
        nothing.
        """
        names, count = request.tokens.names, self._reusable(request)
        found = self._tree.look(names, count, request.namespace)
        if self.storage is None or not found.best.host.on_host:
            return 0
        hit = self.storage.leading(found.best, names[found.promised : count])
        return hit if hit * self.block_size >= self.storage.prefetch_threshold else 0

    def on_device(self, request: HybridRequest) -> int:
        """Count the pages of a request that are on the device. Changes nothing."""
        return super().lookup(request)

    def _held(self) -> set[TreeNode]:
        """Return the nodes that requests hold; holds of copies do not count."""
        nodes: set[TreeNode] = set()
        for request in self.requests:
            node = None if request.lock is None else request.lock.node
            while node is not None and node is not self._tree.root and node not in nodes:
                nodes.add(node)
                node = node.parent
        return nodes

    @property
    def unheld_blocks(self) -> int:
        """Device pages that no request holds, including those held only by a transfer to or from the host."""
        own = sum(request.allocated - request.protected for request in self.requests)
        return self.num_blocks - own - sum(len(node.names) for node in self._held())

    def _held_parts(self) -> tuple[set[TreeNode], set[TreeNode]]:
        """Return the nodes whose window, and the nodes whose state, requests hold; holds of copies do not count."""
        windows: set[TreeNode] = set()
        states: set[TreeNode] = set()
        root = self._tree.root
        for request in self.requests:
            lock = request.lock
            if lock is None or not lock.has_parts or lock.node is root:
                continue
            if self.window is not None:
                nodes = self.window.locked(lock.node, root, lock.edge)
                windows.update(node for node in nodes if node.window.there)
            if self.states is not None and lock.node.state.there:
                states.add(lock.node)
        return windows, states

    def lacks_parts(self, request: HybridRequest, pages: int) -> int:
        """Count the window pages or slots that `pages` more pages of a request lack once all copies are done: the
        larger shortfall.
        """
        found, root = request.match, self._tree.root
        starts = request not in self.requests and found is not None
        held_windows, held_states = self._held_parts()
        lacking, window, states = 0, self.window, self.states
        if window is not None:
            own = sum(each.allocated - max(each.dead, each.protected) for each in self.requests)
            unheld = window.capacity - own - sum(len(node.names) for node in held_windows)
            lacking = min(pages, self._chunk_pages) - unheld
            if starts and found is not None:  # its match is locked, and cannot be evicted for room
                mine = (
                    node for node in window.last(found.node, root) if node.window.there and node not in held_windows
                )
                lacking += found.window_pages + sum(len(node.names) for node in mine)
        if states is not None and starts and found is not None:
            unheld = states.capacity - len(held_states) - sum(each.slots for each in self.requests)
            locks = found.node is not root and found.node.state.there and found.node not in held_states
            slots = max(self.geometry.slots_to_start, self.slots_needed(request) + found.state_on_host + locks)
            lacking = max(lacking, slots - unheld)
        return max(0, lacking)

    def missing(self, request: HybridRequest, upto: int) -> int:
        """Count the pages that the first `upto` tokens of a request need and no request holds. Changes nothing."""
        if request in self.requests:
            return self.pages_of(upto) - request.allocated
        held, shared = self._held(), 0
        reach = self._reusable(request)
        if self.window is not None or self.states is not None:  # the room test counts pages after the usable prefix
            reach = self._tree.look(request.tokens.names, reach, request.namespace).usable
        for node, end in self._tree.path(request.tokens.names, reach, request.namespace):
            if node not in held:  # then the nodes below it are not held either
                break
            shared = end
        return self.pages_of(upto) - shared

    # ---------------------------------------------------------------------------------------------- admission

    def withdraw(self, request: HybridRequest) -> None:
        """Undo `admit` and `load` of a request for which nothing was allocated."""
        super().withdraw(request)
        request.from_host = request.from_storage = 0

    def lacks_for_load(
        self,
        request: HybridRequest,
        upto: int,
        held: tuple[int, int, int] = (0, 0, 0),
        *,
        loads: bool = True,
        in_chunks: bool = False,
    ) -> int:
        """Count the units missing for the first `upto` tokens of an admitted request and for its load, as `lacking`
        does.

        Args:
            request: the request.
            upto: number of its tokens, from the first.
            held: pages, window pages and slots that are reserved for others.
            loads: whether the request would load its match from the host.
            in_chunks: as in `lacking`.
        """
        match = request.match
        assert match is not None
        pages = self.pages_of(upto) - request.allocated
        windows, slots = pages, self.slots_needed(request)
        if loads:
            windows -= match.host_pages
            slots += match.state_on_host
        lacking = [pages + held[0] - self._free - self._tree.evictable]
        if self.window is not None:
            windows = min(windows, self._chunk_pages) if in_chunks else windows
            windows += match.window_pages if loads else 0
            lacking.append(windows + held[1] - self.window.unheld())
        if self.states is not None:
            lacking.append(slots + held[2] - self.states.unheld())
        return max(0, *lacking)

    def load(self, request: HybridRequest) -> int:
        """Order the load of an admitted request's whole match on the host, for the next batch; all or nothing is
        loaded.

        If a state is loaded, the request takes a slot for a separate copy of it.

        Returns:
            Tokens loaded; 0 if they are too few or there is no room. Pages that were evicted for them stay evicted.
        """
        tree, match = self._tree, request.match
        assert match is not None
        node = match.best
        host_lock, lock = tree.hold_host(node), tree.hold(node)
        loaded = self._take_load(request, node)
        tree.release_host(host_lock)
        tree.release(lock)
        if loaded:
            assert request.lock is not None
            tree.release(request.lock)
            request.lock = tree.hold(node)
            request.found = request.protected = request.allocated = match.reach
            request.computed = match.reach * self.block_size
            request.from_host = (match.reach - match.usable) * self.block_size
        self._flush()
        return request.from_host if loaded else 0

    def _take_load(self, request: HybridRequest, node: TreeNode) -> bool:
        """Order the load of a path if it is large enough, no other load is under way on it (`write_back`), and there is
        room.
        """
        tree = self._tree
        nodes, windows, state = tree.to_load(node)
        pages, lengths = (sum(len(each.names) for each in some) for some in (nodes, windows))
        if not (windows or state) and pages * self.block_size < LEAST_LOAD:
            return False
        loading = {*nodes, *windows, *([node] if state else ())}
        if tree.is_write_back and any(each.host.loads for each in loading):
            return False
        if state:
            self._make_slots(1)
            self._take_slots(request, 1)
        if not self._make_load_room(pages, lengths, int(state)):
            if state:
                self._take_slots(request, -1)
            return False
        self._free -= pages
        if self.window is not None:
            self.window.free -= lengths
        if state and self.states is not None:
            self.states.free -= 1
        hold = Hold(*nodes)  # loaded windows and states pin nothing
        for each in hold.nodes:
            each.host.loads.append(hold)
        tree.put_loaded(nodes, windows, node if state else None)
        self._ordered_loads.append(HostLoad(hold, tree.hold(node), tree.hold_host(node)))
        return True

    def _make_load_room(self, pages: int, windows: int, states: int) -> bool:
        """Make room for a load, pool by pool; return False as soon as one is short. Evicted pages stay evicted."""
        size = self.block_size
        if pages > self._free:
            self._reclaim(tokens=(pages - self._free) * size)
            if pages > self._free:
                return False
        if self.window is not None and windows > self.window.free:
            self._reclaim(window_tokens=(windows - self.window.free) * size)
            if windows > self.window.free:
                return False
        self._make_slots(states)
        return self.states is None or states <= self.states.free

    # ------------------------------------------------------------------------------------------------- compute

    def evict_host(self, num_tokens: int, window_tokens: int = 0, states: int = 0) -> tuple[int, int, int]:
        """Evict from the host until these amounts of full attention, then of windows, then of states are freed, or
        nothing more can be evicted.

        Returns:
            The freed amounts: full attention tokens, window tokens, states.
        """
        size, tree = self.block_size, self._tree
        pages = tree.evict_host(-(-num_tokens // size))
        windows = 0 if tree.windows_below is None else tree.evict_from(tree.windows_below, -(-window_tokens // size))
        slots = 0 if tree.states_below is None else tree.evict_from(tree.states_below, states)
        self._flush()
        return pages * size, windows * size, slots

    def submit_loads(self) -> None:
        """Submit the loads that were ordered since the last batch as one group."""
        if self._ordered_loads:
            self.loads.append(self._ordered_loads)
            self._ordered_loads = []

    def submit_writes(self) -> None:
        """Submit the ordered copies to the host as one group."""
        if self._tree.ordered:
            self.writes.append(self._tree.ordered)
            self._tree.ordered = []

    def prefill(self, batch: Sequence[tuple[HybridRequest, int]]) -> None:
        """Allocate pages for the first tokens of admitted requests, and compute those that are not cached.

        Args:
            batch: requests, each with the number of tokens from its first; `lacking` was called for each.

        Raises:
            ValueError: there is no room, although `lacking` returned 0: pages that count as evictable are held
                (`write_back`).
        """
        self.submit_loads()
        super().prefill(batch)

    # -------------------------------------------------------------------------------------------------- copies

    def step(self, writes: int, loads: int) -> None:
        """Do the scheduler's work at the start of a step: submit ordered copies, and acknowledge finished ones.

        Args:
            writes: number of finished groups of copies to the host, from the first; groups that this call submits do
                not count.
            loads: the same for copies to the device.
        """
        done = min(writes, len(self.writes))
        self.submit_writes()
        for _ in range(done):
            for hold in self.writes.popleft():
                self._tree.copied(hold)
                for node in hold.nodes:
                    self._was_copied(node)
        for _ in range(min(loads, len(self.loads))):
            for load in self.loads.popleft():
                self._tree.release_host(load.host_lock)
                for node in reversed(load.nodes.nodes):
                    node.host.loads.remove(load.nodes)
                    self._tree.note_duplicate(node)
                self._tree.release(load.lock)
        self._flush()

    def ack(self, writes: int = 0, loads: int = 0) -> None:
        """Acknowledge submitted copies by hand: `writes` groups to the host and `loads` groups to the device.

        Raises:
            ValueError: fewer groups are under way, or both are 0; nothing has changed.
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
        """Drop everything on device and host, and publish a Cleared; the storage stays.

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
        """Reset the cache; do nothing and return False while a page is in use or a copy under way (`flush_cache`)."""
        return not self.is_busy and super().clear()
