"""The radix tree of SGLang's HiCache: nodes whose pages are on the device, on the host, or on both.

One subject: where pages are, what holds them there, and the order in which they are evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from pytest_kvmock.engines.sglang.host.host_pools import PartPool
from pytest_kvmock.engines.sglang.hybrid_tree import HybridTree, Lock, TreeMatch
from pytest_kvmock.engines.sglang.parts import Part, States, Window
from pytest_kvmock.engines.sglang.radix_tree import Hold, HostCopy, HostPart, LeafQueue, Pages, TreeNode
from pytest_kvmock.values.events import StorageTier

# Theory of operation (SGLang 0.5.23, `UnifiedRadixCache` with `HybridCacheController`)
#
# A node is in the tree while its pages are on device or host. If a node is on the device, all nodes above it are too.
# The same holds for the host, unless copies are made at eviction (`write_back`). Once a copy is ordered, its node has a
# place on the host and counts as being there in every rule; it is published when the copy is done.
#
# Leaves of both tiers are evicted in the order of one policy. A device leaf has no child on the device; a host leaf is
# only on the host and has no children. Locks of requests and copies hold a path, wherever its nodes are, but only nodes
# on the device count as evictable or protected. A host lock holds one node on the host.
#
# Windows and states are copied separately and have separate pools (`host_pools.py`). A lookup accepts a part on either
# tier; parts are loaded before they are used. A copy to the host also copies the missing pages of the last window and
# the missing state, and is acknowledged for all nodes that it copied from.
#
# The rest is in the base class. It calls this class to decide what a leaf is, what happens to a leaf that leaves the
# device, and what an insert does to nodes that it passes or makes.

DEVICE: Final = StorageTier.DEVICE
HOST: Final = StorageTier.HOST_PINNED

WRITE_POLICIES: Final[dict[str, int]] = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""Number of hits after which a node is copied to the host; 0: at its eviction from the device
(`--hicache-write-policy`).
"""


class Copy(Hold):
    """An ordered copy to the host, with its lock on the device.

    Attributes:
        lock: as given.
    """

    __slots__ = ("lock",)

    def __init__(self, nodes: Sequence[TreeNode], lock: Lock) -> None:
        super().__init__(*nodes)
        self.lock = lock


class HostLock:
    """A lock of the host: the pages of one node, its last window, and its state.

    Attributes:
        pages: its hold on full attention pages.
        parts: its holds in each pool of windows or states.
    """

    __slots__ = ("pages", "parts")

    def __init__(self, pages: Hold, parts: list[tuple[PartPool, Hold]]) -> None:
        self.pages = pages
        self.parts = parts


class HiCacheTree(HybridTree):
    """A `HybridTree` over device and host. It counts free host pages, and notifies its owner of stored and removed
    nodes.

    Args:
        policy: one of "lru", "lfu", "slru", for both tiers.
        protected_threshold: as in `RadixTree`.
        host_pages: number of host pages.
        write_policy: one of `WRITE_POLICIES`.
        stored: called with a node and the tier to which its pages came.
        removed: called with a node and the tier that its pages left.
        copied: called with a node that an eviction has copied to the host.
        window: as in `HybridTree`.
        states: as in `HybridTree`.
        host_windows: host pages for windows.
        host_states: host slots for states.

    Attributes:
        windows_below: the pool of windows on the host; None without windows.
        states_below: the pool of states there; None without states.
        host_pages: as given.
        host_free: free host pages.
        is_write_back: whether copies are made at the eviction.
        ordered: ordered copies to the host, which its owner takes.
    """

    __slots__ = (
        "_copied",
        "_duplicates",
        "_hits_to_write",
        "_host_leaves",
        "_removed",
        "_stored",
        "host_free",
        "host_pages",
        "host_states",
        "host_windows",
        "is_write_back",
        "ordered",
        "states_below",
        "windows_below",
    )

    def __init__(
        self,
        policy: str,
        protected_threshold: int,
        *,
        host_pages: int,
        write_policy: str,
        stored: Callable[[TreeNode, StorageTier], None],
        removed: Callable[[TreeNode, StorageTier], None],
        copied: Callable[[TreeNode], None],
        window: Window | None = None,
        states: States | None = None,
        host_windows: int = 0,
        host_states: int = 0,
    ) -> None:
        self.host_pages, self.host_windows, self.host_states = host_pages, host_windows, host_states
        self._hits_to_write = WRITE_POLICIES[write_policy]
        self.is_write_back = not self._hits_to_write
        self._stored, self._removed, self._copied = stored, removed, copied
        super().__init__(policy, protected_threshold, window, states)

    def reset(self) -> None:
        """Drop everything, including locked nodes."""
        super().reset()
        self.root.host = HostPart((), None, None)
        self.root.host.on_host = True
        window, states = self.window, self.states
        self.windows_below = None if window is None else PartPool(self.host_windows, window)
        self.states_below = None if states is None else PartPool(self.host_states, states)
        for part, pool in ((window, self.windows_below), (states, self.states_below)):
            if part is not None:
                part.host = pool
        self.host_free = self.host_pages
        self._host_leaves = LeafQueue(self._key, self._is_host_leaf)
        self._queues.append(self._host_leaves)
        self._duplicates: dict[TreeNode, None] = {}
        self.ordered: list[Copy] = []

    def _is_leaf(self, node: TreeNode) -> bool:
        if node.lock_ref or not node.on_device or node.parent is None:
            return False
        return not any(child.on_device for child in node.children.values())

    def _is_host_leaf(self, node: TreeNode) -> bool:
        part = node.host
        return not (
            node.children or node.lock_ref or part.locks or node.on_device or node.parent is None or not part.on_host
        )

    @property
    def pools(self) -> list[PartPool]:
        """The host pools of its parts, windows first."""
        return [pool for pool in (self.windows_below, self.states_below) if pool is not None]

    def _walk(self, names: Sequence[int], count: int, namespace: Hashable, *, splits: bool) -> TreeMatch:
        tick = self._clock = self._clock + splits
        usable = best = node = self.root
        used = reach = at = 0
        has_window = has_state = True
        on_device = self._acceptor()
        anywhere = self._acceptor(counts_host=True)
        path: list[tuple[TreeNode, int, int]] = []
        for node, end in self.path(names, count, namespace):
            pages, at = end - at, end
            is_whole = pages == len(node.names)
            serves = all(on_device(node, pages, is_whole)) and node.on_device
            has_window, has_state = anywhere(node, pages, is_whole)
            if not is_whole and splits:
                node.last = tick
                node = self._split(node, pages)  # noqa: PLW2901 - the last one
            path.append((node, pages, at))
            if serves:
                usable, used = node, at
            if has_window and has_state:
                best, reach = node, at
        below = [(each, pages) for each, pages, end in path if end <= reach]
        host_pages = sum(pages for each, pages, end in path if used < end <= reach and each.host.on_host)
        state_on_host = best is not self.root and self.states is not None and not best.state.there
        windows = self._windows_on_host(below)
        return TreeMatch(usable, used, node, at, best, reach, host_pages, windows, state_on_host, has_window, has_state)

    def _windows_on_host(self, path: list[tuple[TreeNode, int]]) -> int:
        """Count the pages of the last window of a path that are only on the host."""
        seen = windows = 0
        if self.window is None:
            return 0
        for node, pages in reversed(path):
            if seen >= self.window.pages or not (node.window.there or node.host.window.there):
                break
            windows += 0 if node.window.there else pages
            seen += pages
        return windows

    # ------------------------------------------------------------------------------------------------ inserts

    def _grow(self, parent: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable) -> TreeNode:
        leaf = super()._grow(parent, pages, start, count, namespace)
        token_ids = pages.block_tokens(start, count)
        token_ids = token_ids if token_ids is None else tuple(token_ids)  # a queue of events extends lists
        leaf.host = HostPart(tuple(pages.local_hashes[start:count]), token_ids, pages.carried(start, count))
        self._add_copies(leaf)
        return leaf

    def _add_copies(self, node: TreeNode) -> None:
        if self._parts:
            node.host.window, node.host.state = HostCopy(node), HostCopy(node)

    def put_on_device(self, node: TreeNode) -> None:
        """Give a node device pages that the owner has taken."""
        super().put_on_device(node)
        self.note_duplicate(node)
        self._stored(node, DEVICE)

    def _hit(self, node: TreeNode) -> None:
        """Count a hit; if the node has enough, order its copy, after the copies of the nodes above it."""
        if self.is_write_back:
            return
        super()._hit(node)
        if node.host.on_host or node.hit_count < self._hits_to_write:
            return
        lacking = []
        at: TreeNode | None = node
        while at is not None and not at.host.on_host:
            lacking.append(at)
            at = at.parent
        for each in reversed(lacking):
            if not self._order_copy(each):
                return

    def _ended(self, node: TreeNode) -> None:
        """Order the copy of the parts that an insert gave a node, if the node is on the host already."""
        part = node.host
        if not self.is_write_back and node is not self.root and part.on_host and not part.copy:
            self._order_copy(node)

    def _lacking(self, node: TreeNode) -> tuple[int, list[TreeNode], bool]:
        """Return what the host lacks of a node: number of full attention pages, nodes with windows (from the root
        down), and whether the state is missing.
        """
        windows: list[TreeNode] = []
        if self.window is not None:
            for at in self.window.last(node, self.root):
                if at.host.copy or not (at.window.there or at.host.window.there):
                    break
                if not at.host.window.there:
                    windows.insert(0, at)
        has_state = self.states is not None and node.state.there and not node.host.state.there
        return 0 if node.host.on_host else len(node.names), windows, has_state

    def _take_host(self, node: TreeNode) -> list[TreeNode] | None:
        """Reserve host room for a node and its missing parts; pages that were evicted for it stay evicted.

        Returns:
            The nodes to be copied from, from the root down; None, and nothing is reserved, if there is no room.
        """
        pages, windows, has_state = self._lacking(node)
        if not (pages or windows or has_state):
            return []
        if not self.make_host_room(pages):
            return None
        self.host_free -= pages  # an eviction for the next part must not use these pages
        states, below = self.states_below, self.windows_below
        if has_state and states is not None:
            if not self.make_room_in(states, 1):
                self.host_free += pages
                return None
            states.free -= 1
        if windows and below is not None:
            lengths = sum(len(each.names) for each in windows)
            if not self.make_room_in(below, lengths):
                self.host_free += pages
                if has_state and states is not None:
                    states.free += 1
                return None
            below.free -= lengths
            for each in windows:
                below.put(each)
        if has_state and states is not None:
            states.put(node)
        if pages:
            node.host.on_host = True
        return [*(each for each in windows if each is not node), node]

    def _order_copy(self, node: TreeNode) -> bool:
        """Order the copy of the pages and parts that the host lacks of a node; return False if there is no room."""
        had_pages = node.host.on_host
        nodes = self._take_host(node)
        if nodes:
            node.host.on_the_way = not had_pages
            copy = Copy(nodes, self.hold(node))
            for each in nodes:
                each.host.copy = copy
            self.ordered.append(copy)
        return nodes is not None

    def _copy_now(self, node: TreeNode) -> None:
        """Copy the missing pages and parts of a node to the host at once, if there is room: an eviction waits for it
        (`write_back`).
        """
        nodes = self._take_host(node)
        for each in nodes or ():
            self.note_duplicate(each)
            self.note(each)
            self._stored(each, HOST)  # for a moment it is in both tiers
        if nodes:
            self._copied(node)

    def put_on_host(self, node: TreeNode) -> None:
        """Give a node host pages that were already counted as taken."""
        node.host.on_host = True
        self.note_duplicate(node)
        self.note(node)
        self._stored(node, HOST)

    def insert_host(
        self, anchor: TreeNode, pages: Pages, start: int, count: int, namespace: Hashable
    ) -> tuple[int, TreeNode | None]:
        """Put the pages from `start` to `count`, which arrived on the host, under the node that ends before them.

        Nodes that are only on the device get them too, except with `write_back`; pages without a node become a node on
        the host.

        Returns:
            The number of pages that were not needed, and the node where they end, or None if that node is not on the
            host.
        """
        node, at, spare = anchor, start, 0
        anchor.last = self._clock = self._clock + 1
        self.note(anchor)
        for node, end in self.walk(pages.names, count, namespace, anchor, start):
            if node.host.on_host or self.is_write_back:
                spare += end - at
            else:
                self.put_on_host(node)
            self.note(node)
            at = end
        if at < count:
            node = self._grow(node, pages, at, count, namespace)
            self.put_on_host(node)
        return spare, node if node.host.on_host else None

    def insert_parts(self, node: TreeNode, anchor: TreeNode, windows: int, states: int) -> tuple[int, int]:
        """Give the path below an anchor the last pages of its window, and its end the state, which arrived on the host.

        Nodes that are only on the device get them too, also with `write_back` (SGLang: `_commit_prefetch`).

        Returns:
            The numbers of window pages and states that were not needed.
        """
        below, spare, at = self.windows_below, 0, node
        while windows and below is not None and at is not anchor:
            own = min(len(at.names), windows)
            if at.host.window.there:
                spare += own
            else:
                if own < len(at.names):
                    self._split(at, len(at.names) - own)
                below.put(at)
            windows -= own
            assert at.parent is not None
            at = at.parent
        if states and self.states_below is not None and not node.host.state.there:
            self.states_below.put(node)
            states = 0
        return spare + windows, states

    def copied(self, copy: Copy) -> None:
        """Complete a copy to the host, for all nodes into which its node may have been split."""
        for node in copy.nodes:
            node.host.copy, node.host.on_the_way = None, False
            self._stored(node, HOST)
        self.release(copy.lock)

    def note_duplicate(self, node: TreeNode) -> None:
        """Note a node that is in both tiers; also called when a load is done."""
        if self.is_write_back and node.on_device and node.host.on_host and not node.host.loads:
            self._duplicates.setdefault(node)

    def _split(self, node: TreeNode, pages: int) -> TreeNode:
        upper = super()._split(node, pages)
        upper.host = node.host.split(pages, upper, node)
        self._add_copies(upper)
        if self.windows_below is not None:
            self.windows_below.split(upper, node)
        self.note_duplicate(upper)
        return upper

    # -------------------------------------------------------------------------------------------------- loads

    def to_load(self, node: TreeNode) -> tuple[list[TreeNode], list[TreeNode], bool]:
        """Return what a path must load before it can be used: nodes and nodes with a missing window, both from the root
        down, and whether its state is missing.
        """
        nodes: list[TreeNode] = []
        at: TreeNode | None = node
        while at is not None and not at.on_device:
            nodes.insert(0, at)
            at = at.parent
        windows: list[TreeNode] = []
        if self.window is not None:
            windows = [each for each in self.window.last(node, self.root) if not each.window.there][::-1]
        return nodes, windows, self.states is not None and node is not self.root and not node.state.there

    def put_loaded(self, nodes: Sequence[TreeNode], windows: Sequence[TreeNode], state_of: TreeNode | None) -> None:
        """Give nodes the device pages and slots of a load, which the owner has taken."""
        for node in nodes:
            self.put_on_device(node)
        for node in windows:
            assert self.window is not None
            self.window.put(node, node.window)
        if state_of is not None and self.states is not None:
            self.states.put(state_of, state_of.state)

    # -------------------------------------------------------------------------------------------------- locks

    def hold_host(self, node: TreeNode) -> HostLock:
        """Lock a node on the host: its pages, the last window that ends with it, and its state. The root locks
        nothing.
        """
        lock = HostLock(Hold(node), [])
        if node is self.root:
            return lock
        node.host.locks.append(lock.pages)
        if self.window is not None and self.windows_below is not None:
            nodes = [*self.window.last(node, self.root)][::-1]
            lock.parts.append((self.windows_below, self.windows_below.hold(nodes)))
        if self.states_below is not None:
            lock.parts.append((self.states_below, self.states_below.hold([node])))
        return lock

    def release_host(self, lock: HostLock) -> None:
        """Undo `hold_host`, for all nodes into which its node was split."""
        for pool, hold in lock.parts:
            pool.release(hold)
        for node in lock.pages.nodes:
            if node is not self.root:
                node.host.locks.remove(lock.pages)
                self.note(node)

    # ----------------------------------------------------------------------------------------------- eviction

    def _evict(self, node: TreeNode) -> bool:
        """Evict a device leaf; it stays in the tree if it is on the host, or is copied there now."""
        part, pages = node.host, len(node.names)
        if not part.on_host and self.is_write_back:
            self._copy_now(node)
        if not (part.on_host or self._drop_below(node)):
            return False
        self._removed(node, DEVICE)
        if not part.on_host:
            self._drop_copies(node)
            return super()._evict(node)
        self._drop_parts(node)
        self.evictable -= pages
        node.on_device = False
        self.note(node)
        assert node.parent is not None
        self.note(node.parent)
        return True

    def _lose(self, part: Part, node: TreeNode) -> None:
        if self.is_write_back and not node.host.on_host and not part.copy_of(node).there:
            windows, below = self._lacking(node)[1], part.host
            assert isinstance(below, PartPool)
            self.make_room_in(below, sum(len(each.names) for each in windows) if part is self.window else 1)
            self._copy_now(node)
        super()._lose(part, node)

    def _drop_copies(self, node: TreeNode) -> None:
        """Drop the host copies of a node's parts."""
        for pool in self.pools:
            pool.drop(node)

    def _drop_below(self, node: TreeNode) -> bool:
        """Delete all host nodes below a node without a copy; do nothing and return False if any of them is held."""
        below = [*_nodes_below(node)]
        if any(each.lock_ref or each.host.is_held for each in [node, *below]):
            return False
        for each in reversed(below):
            self._delete_host(each)
        return True

    def _delete_host(self, node: TreeNode) -> None:
        """Delete a node that is only on the host."""
        self.host_free += len(node.names)
        node.host.on_host = False
        self._drop_copies(node)
        self._removed(node, HOST)
        self._detach(node)

    def make_room_in(self, pool: PartPool, units: int) -> bool:
        """Evict from the pool of a part if fewer than `units` are free; return False if fewer are free even then.

        It evicts `units`, not only the units that are missing (`mem_cache/pool_host/group.py`, `reclaim`).
        """
        if pool.free < units:
            self.evict_from(pool, units)
        return pool.free >= units

    def evict_from(self, pool: PartPool, units: int) -> int:
        """Evict copies of a part until `units` are freed, or none can be evicted; a host leaf is evicted whole.

        Returns:
            The number of freed units.
        """
        before = pool.free
        for node in pool.in_order() if units > 0 else ():
            if self._is_host_leaf(node):
                self._delete_host(node)
            elif pool is self.windows_below:
                self._drop_copies(node)  # a state is useless without its window
            else:
                pool.drop(node)
            if pool.free >= before + units:
                break
        return pool.free - before

    def make_host_room(self, pages: int) -> bool:
        """Evict from the host until `pages` pages are free there; return False if fewer are. Evicted pages stay
        evicted.
        """
        if pages > self.host_free:
            self.evict_host(pages - self.host_free)
        return pages <= self.host_free

    def evict_host(self, pages: int) -> int:
        """Evict from the host until `pages` are freed, or none can be evicted: duplicates first, then leaves.

        Returns:
            The number of freed pages.
        """
        before = self.host_free
        until = before + pages
        for spares_leaves in (True, False) if self._duplicates else ():
            if self.host_free < until:
                self._reclaim(until, spares_leaves=spares_leaves)
        while self.host_free < until and (node := self._first(self._host_leaves)) is not None:
            self._delete_host(node)
        return self.host_free - before

    def _reclaim(self, until: int, *, spares_leaves: bool) -> None:
        """Drop host copies of nodes that are also on the device, the oldest duplicate first (`write_back`)."""
        for node in [*self._duplicates]:
            if self.host_free >= until:
                return
            part = node.host
            if node.parent is None or not (node.on_device and part.on_host):
                del self._duplicates[node]
                continue
            if part.is_held or (spares_leaves and self._is_leaf(node)):
                continue
            del self._duplicates[node]
            part.on_host = False
            self.host_free += len(node.names)
            self._removed(node, HOST)


def _nodes_below(node: TreeNode) -> Iterator[TreeNode]:
    """Yield the nodes below a node, a parent before its children."""
    for child in node.children.values():
        yield child
        yield from _nodes_below(child)
