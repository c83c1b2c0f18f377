"""SGLang's HiCache: the cache of a model with full attention alone, over device and host (`UnifiedRadixCache` of 0.5.23).

One subject: who has which pages, of the device and of the host, and which copies between them are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from random import Random
from typing import Any, ClassVar, Final

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.hicache_storage import HostStorage
from pytest_kvmock.cache.sglang.hicache_tree import DEVICE, HOST, WRITE_POLICIES, HiCacheTree, HostMatch
from pytest_kvmock.cache.sglang.page_cache import PageCache, on_the_wire
from pytest_kvmock.cache.sglang.radix_request import RadixRequest
from pytest_kvmock.cache.sglang.radix_tree import Hold, TreeNode
from pytest_kvmock.checks import check_integer
from pytest_kvmock.events import StorageTier
from pytest_kvmock.tokens import Prompt

# Theory of operation
#
# A request has pages of the device, its own from `protected` on. A checkpoint gives the tree what it lacks there, nodes
# that were on the host alone included, and orders copies to the host as the policy says. Copies that were ordered go as
# one group, loads of a batch as another; a group is acknowledged as a whole, groups in their order. A load is published
# when it is ordered, a copy when it is acknowledged.

LEAST_LOAD: Final = 10
"""Tokens below which nothing is loaded from the host (`load_back_threshold`)."""
RETRACT_TOKENS: Final = 20
"""Tokens of room that a retraction makes for each request that is left (`retract_decode_steps`)."""


class HiCacheRequest(RadixRequest):
    """One request, and what it has of a cache with a host.

    Attributes:
        path: what its last lookup found; None before the first.
        from_host: tokens that it loaded from the host.
        from_storage: of these, tokens that a prefetch had brought there for it.
        leaves_prefetch: what is fetched for it is cached when it comes, though nobody waits for it.
    """

    __slots__ = ("from_host", "from_storage", "leaves_prefetch", "path")

    def retract(self) -> None:
        """Forget what it has: it begins anew, with the tokens that it has."""
        super().retract()
        self.path: HostMatch | None = None
        self.from_host = self.from_storage = 0
        self.leaves_prefetch = False


class HiCacheManager(PageCache[HiCacheRequest, HiCacheTree]):
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
        self._hits_to_write = WRITE_POLICIES[write_policy]
        self.storage = storage
        self.offload: Any = None
        self._ordered_writes: list[Hold] = []
        self._ordered_loads: list[tuple[Hold, Hold]] = []
        self.writes: deque[list[Hold]] = deque()
        self.loads: deque[list[tuple[Hold, Hold]]] = deque()
        self._before_reset: dict[StorageTier, Collection[int]] = {DEVICE: (), HOST: ()}
        super().__init__(**options)
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
            return [name for node in self._tree.nodes() if node.host.on_device for name in node.names]
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
        busy = bool(self._ordered_writes or self._ordered_loads or self.writes or self.loads)
        return busy or (self.storage is not None and self.storage.is_busy)

    def _reusable(self, request: HiCacheRequest) -> int:
        return (len(request.tokens) - 1) // self.block_size

    def promised(self, request: HiCacheRequest) -> int:
        """Count the pages that it has on device or host: what events promise. Changes nothing."""
        return self._tree.look(request.tokens.names, self._reusable(request), request.namespace)[0]

    def lookup(self, request: HiCacheRequest) -> int:
        """Count the pages that it would use, where there is room. Changes nothing."""
        pages, on_device = self._tree.look(request.tokens.names, self._reusable(request), request.namespace)
        return pages if (pages - on_device) * self.block_size >= LEAST_LOAD else on_device

    def in_storage(self, request: HiCacheRequest) -> int:
        """Count the pages that the storage would be asked for now and has, beyond those of device and host. Changes nothing."""
        path = [*self._tree.path(request.tokens.names, self._reusable(request), request.namespace)]
        if self.storage is None or (path and not path[-1][0].host.on_host):
            return 0
        pages = sum(shared for _, shared in path)
        hit = self.storage.store.leading(request.tokens.names[pages : self._reusable(request)])
        return hit if hit * self.block_size >= self.storage.prefetch_threshold else 0

    def on_device(self, request: HiCacheRequest) -> int:
        """Count the pages of it that are on the device. Changes nothing."""
        return self._tree.look(request.tokens.names, self._reusable(request), request.namespace)[1]

    def _held(self) -> set[TreeNode]:
        """Nodes that requests hold, whatever copies do."""
        nodes: set[TreeNode] = set()
        for request in self.requests:
            node = request.node
            while node is not None and node is not self._tree.root and node not in nodes:
                nodes.add(node)
                node = node.parent
        return nodes

    @property
    def unheld_blocks(self) -> int:
        """Pages of the device that no request holds, those included that a copy does."""
        own = sum(request.allocated - request.protected for request in self.requests)
        return self.max_capacity - own - sum(len(node.names) for node in self._held())

    def missing(self, request: HiCacheRequest, upto: int) -> int:
        """Count the pages that no request holds and that the first tokens of one need. Changes nothing."""
        if request in self.requests:
            return self.pages_of(upto) - request.allocated
        held, shared = self._held(), 0
        for node, pages in self._tree.path(request.tokens.names, self._reusable(request), request.namespace):
            shared += pages if node in held else 0
        return self.pages_of(upto) - shared

    # ---------------------------------------------------------------------------------------------- admission

    def request(self, prompt: Prompt, rng: Random) -> HiCacheRequest:
        """A request that has nothing yet."""
        hasher, namespace = self._hasher_of(prompt)
        return HiCacheRequest(HashedTokens(prompt, self.block_size, hasher, rng), rng, namespace)

    def find(self, request: HiCacheRequest, upto: int | None = None) -> HostMatch:
        """Match all of a request but its last token, which is computed anyway, for `admit`.

        Args:
            request: one that has nothing.
            upto: match no more than so many of its tokens; None: all.
        """
        count = self._reusable(request)
        if upto is not None:
            count = min(count, upto // self.block_size)
        request.path = self._tree.find(request.tokens.names, count, request.namespace)
        request.found = request.path.device_pages
        return request.path

    def admit(self, request: HiCacheRequest) -> None:
        """Lock what was found on the device for a request."""
        path = request.path
        assert path is not None
        request.node = path.device_node
        self._tree.lock(request.node)
        self.requests[request] = None
        self._has(request, path.device_pages)
        self._flush()

    def _has(self, request: HiCacheRequest, pages: int) -> None:
        request.found = request.protected = request.allocated = pages
        request.computed = pages * self.block_size

    def withdraw(self, request: HiCacheRequest) -> None:
        """Take back `admit` of a request for which nothing was allocated."""
        del self.requests[request]
        assert request.node is not None
        self._tree.unlock(request.node)
        request.node = None
        self._has(request, 0)
        request.from_host = request.from_storage = 0

    def lacking(self, request: HiCacheRequest, upto: int, pages: int = 0) -> int:
        """Count the pages that lack for the tokens of an admitted request up to one, with those that are spoken for."""
        return max(0, self.pages_of(upto) - request.allocated + pages - self._free - self._tree.evictable)

    def load(self, request: HiCacheRequest) -> int:
        """Load what an admitted request has on the host, all of it or nothing, for the next batch.

        Returns:
            Tokens; 0 if they are too few, or there is no room. What was evicted for them is, all the same.
        """
        tree, path = self._tree, request.path
        assert path is not None
        node, pages = path.node, path.pages - path.device_pages
        hold = tree.hold_host(node)
        tree.lock(node)
        loaded = 0
        if pages * self.block_size >= LEAST_LOAD:
            if pages > self._free:
                self._free += tree.evict_device(pages - self._free)
            if pages <= self._free:
                self._free -= pages
                loaded = pages
                self._order_load(node)
        tree.release_host(hold)
        tree.unlock(node)
        if loaded:
            assert request.node is not None
            tree.lock(node)
            tree.unlock(request.node)
            request.node = node
            self._has(request, path.pages)
            request.from_host = loaded * self.block_size
        self._flush()
        return loaded * self.block_size

    def _order_load(self, node: TreeNode) -> None:
        """Publish a path as loaded, and keep it until it is."""
        tree = self._tree
        loading = []
        at: TreeNode | None = node
        while at is not None and not at.host.on_device:
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

    def evict(self, num_tokens: int) -> int:
        """Evict from the device until so many tokens are freed, or none may be evicted.

        Returns:
            Tokens that are free now.
        """
        freed = self._tree.evict_device(-(-num_tokens // self.block_size))
        self._free += freed
        self._flush()
        return freed * self.block_size

    def evict_host(self, num_tokens: int) -> int:
        """Evict from the host likewise."""
        freed = self._tree.evict_host(-(-num_tokens // self.block_size))
        self._flush()
        return freed * self.block_size

    def make_room(self, tokens: int) -> None:
        """Evict until so many tokens are free, or no more may be evicted."""
        if tokens > self.available_size():
            self._free += self._tree.evict_device(-(-(tokens - self.available_size()) // self.block_size))

    def submit_loads(self) -> None:
        """Let what was ordered since the last batch begin, as one group."""
        if self._ordered_loads:
            self.loads.append(self._ordered_loads)
            self._ordered_loads = []

    def submit_writes(self) -> None:
        """Let the copies to the host that were ordered begin, as one group."""
        if self._ordered_writes:
            self.writes.append(self._ordered_writes)
            self._ordered_writes = []

    def prefill(self, batch: Sequence[tuple[HiCacheRequest, int]]) -> None:
        """Allocate, and compute, what requests that were admitted have not of their first tokens.

        Args:
            batch: each with how many tokens, from its first; `lacking` was asked about each.

        Raises:
            ValueError: there is no room, though `lacking` said so: what counts as evictable is held (`write_back`).
        """
        size = self.block_size
        self.submit_loads()
        self.make_room(sum(upto - request.computed + (size if size > 1 else 0) for request, upto in batch))
        for request, upto in batch:
            self._allocate(request, upto)
            request.computed = upto
        self._flush()

    def _allocate(self, request: HiCacheRequest, upto: int) -> None:
        pages = self.pages_of(upto) - request.allocated
        if pages > self._free:
            raise ValueError(f"{pages} pages are needed, {self._free} are free")
        self._free -= pages
        request.allocated += pages

    def checkpoint(self, request: HiCacheRequest) -> None:
        """Insert the whole pages that a request has computed into the tree, and lock them there."""
        tree, count = self._tree, request.computed // self.block_size
        node = self._insert(request, count)
        assert request.node is not None
        tree.unlock(request.node)
        tree.lock(node)
        request.node = node
        self._flush()

    def _insert(self, request: HiCacheRequest, count: int) -> TreeNode:
        tree, tokens, names, namespace = self._tree, request.tokens, request.tokens.names, request.namespace
        node, matched, on_device = tree.root, 0, 0
        for node, matched in tree.walk(names, count, namespace):
            if node.host.on_device:
                on_device = matched
            else:
                tree.put_on_device(node)
            self._hit(node, counts=matched > request.inserted)
        if matched < count:
            node = tree.grow(node, tokens, matched, count, namespace)
            tree.put_on_device(node)
            self._hit(node, counts=count > request.inserted)
        prompt = tokens.num_prompt_tokens // self.block_size
        if 0 < prompt < count:  # a node ends where the prompt does
            for _ in tree.walk(names, prompt, namespace):
                pass
        self._free += max(0, on_device - request.protected)
        request.protected = count
        request.inserted = max(request.inserted, count)
        return node

    def _hit(self, node: TreeNode, *, counts: bool) -> None:
        """Count a hit, and order the copy of a node that has enough of them, and before it of what is above."""
        if not counts or not self._hits_to_write:
            return
        tree = self._tree
        node.hit_count += 1
        tree.note(node)
        if node.host.on_host or node.hit_count < self._hits_to_write:
            return
        lacking = []
        at: TreeNode | None = node
        while at is not None and not at.host.on_host:
            lacking.append(at)
            at = at.parent
        for each in reversed(lacking):
            if not tree.make_host_room(len(each.names)):
                return
            self._ordered_writes.append(tree.order_copy(each))

    def finish(self, request: HiCacheRequest) -> None:
        """Cache what a request has computed, and free the rest."""
        self._insert(request, request.computed // self.block_size)
        self.release(request)
        self._flush()

    def release(self, request: HiCacheRequest) -> None:
        """Free what a request has outside the tree, and release its lock; nothing if it has none."""
        if request not in self.requests:
            return
        del self.requests[request]
        self._free += request.allocated - request.protected
        assert request.node is not None
        self._tree.unlock(request.node)
        request.retract()

    def retract(self, request: HiCacheRequest) -> None:
        """Free what a request has, uncached, and make some room for those that are left."""
        self.release(request)
        self.make_room(RETRACT_TOKENS * len(self.requests))
        self._flush()

    def may_step(self, request: HiCacheRequest) -> bool:
        """Whether there is a free page for the next token of a request, or it needs none."""
        return not request.opens_page or self._free > 0

    def begin_step(self, requests: Sequence[HiCacheRequest]) -> bool:
        """Make room for a token of each request; False where it is short.

        Room is made for a page a request then, though some need none (`alloc_paged_token_slots_decode`).
        """
        pages = sum(request.opens_page for request in requests)
        self.make_room(pages * self.block_size)
        fits = pages <= self._free
        if fits:
            self.make_room(len(requests) * self.block_size)
        self._flush()
        return fits

    def end_step(self, request: HiCacheRequest, token: int) -> None:
        """Append a token, for which `begin_step` has made room, and compute it."""
        request.append(token)
        self._allocate(request, request.computed + 1)
        request.computed += 1

    def begin_verify(self, requests: Sequence[HiCacheRequest]) -> bool:
        """Give each request room for its next step with drafts; False where it is short."""
        lacking = [self.pages_ahead(request) for request in requests]
        self.make_room(sum(lacking) * self.block_size)
        fits = sum(lacking) <= self._free
        if fits:
            self._take_ahead(requests, lacking)
        self._flush()
        return fits

    def end_verify(self, request: HiCacheRequest, tokens: Sequence[int]) -> None:
        """Append the tokens that a step commits, for which `begin_verify` has made room."""
        for token in tokens:
            request.append(token)
        request.computed += len(tokens)
        request.steps += 1

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

    def _flush(self) -> None:
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()
