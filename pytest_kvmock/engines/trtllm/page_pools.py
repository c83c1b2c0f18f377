"""The pages of TensorRT-LLM's V2: slots of each level and pool, eviction queues, and the moves to lower levels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.engines.trtllm.tree_block import Page, TreeBlock

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.group_events import GroupEvents

# Theory of operation
#
# A page is locked (a running sequence reads it), held (by suspended sequences) or droppable. The original frees a page
# when its last reference is gone; here a page dies when no sequence uses it and it is in no queue. A page that moves
# between levels is only in the lists of `_fall`. As in CPython, lists are emptied from the end (this is a rule: it
# decides which of several lost pages removes its children).


class NoRoomError(Exception):
    """No room on a level (`OutOfPagesError`).

    Attributes:
        waiting: pages that were moving; the handler passes them to `PagePools.lose`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Page] = []


class PagePools:
    """Slots and queues of all levels (`StorageManager`).

    Args:
        slots: number of slots of each pool, for each level.
        pool_of: the pool of each layer group.
        events: the queue of events.

    Attributes:
        slots: as given.
        pool_of: as given.
        free: number of free slots of each level and pool.
        queues: pages of each level and pool, the next to be evicted first.
        page_lost: called with the block and the layer group of a lost page.
    """

    __slots__ = ("_events", "free", "page_lost", "pool_of", "queues", "slots")

    page_lost: Callable[[TreeBlock, int], None]

    def __init__(self, slots: Sequence[Sequence[int]], pool_of: Sequence[int], events: GroupEvents) -> None:
        self.slots, self.pool_of, self._events = slots, pool_of, events
        self.free = [[*level] for level in slots]
        self.queues: list[list[OrderedDict[Page, None]]] = [[OrderedDict() for _ in level] for level in slots]

    @property
    def last(self) -> int:
        """The last level."""
        return len(self.slots) - 1

    def utilization(self) -> float:
        """Return the share of device slots that are neither free nor evictable; the maximum over pools."""
        rows = zip(self.slots[0], self.free[0], self.queues[0], strict=True)
        return max((total - free - len(queue)) / total for total, free, queue in rows)

    def pools_of(self, counts: Sequence[int]) -> list[int]:
        """Return the counts of layer groups, added up by pool."""
        found = [0] * len(self.slots[0])
        for group, count in enumerate(counts):
            found[self.pool_of[group]] += count
        return found

    # ---------------------------------------------------------------------------------------------------- use

    def _queue(self, page: Page) -> OrderedDict[Page, None]:
        return self.queues[page.level][self.pool_of[page.group]]

    def enqueue(self, page: Page) -> None:
        """Put a page at the end of its level's queue."""
        page.is_queued = True
        self._queue(page)[page] = None

    def dequeue(self, page: Page) -> None:
        """Take a page out of its queue if it is in one."""
        if page.is_queued:
            del self._queue(page)[page]
            page.is_queued = False

    def hold(self, page: Page) -> None:
        """Hold a page; it leaves its queue only on the last level."""
        page.holds += 1
        if page.level == self.last:
            self.dequeue(page)

    def lock(self, page: Page) -> None:
        """Lock a page of the device: a sequence reads it, and it leaves its queue."""
        page.locks += 1
        self.dequeue(page)

    def unlock(self, page: Page) -> None:
        """Unlock a page; a page that is still held may move to a lower level, if there is one."""
        page.locks -= 1
        if page.locks:
            return
        if not page.holds:
            self._let_go(page)
        elif page.level < self.last:
            self.enqueue(page)

    def release(self, page: Page) -> None:
        """Drop a hold of a page."""
        page.holds -= 1
        if page.is_droppable:
            self._let_go(page)

    def _let_go(self, page: Page) -> None:
        """Release an unused page: it waits for its eviction, or dies if no look-up can find it."""
        if page.found_block is not None:
            if not page.is_queued:
                self.enqueue(page)
        else:
            self.dequeue(page)
            self.die(page)

    def die(self, page: Page) -> None:
        """Free the slot of a page that no sequence uses and that is in no queue; its block may leave the tree."""
        if page.block is not None:
            block, page.block = page.block, None
            block.pages[page.group] = None
            self.page_lost(block, page.group)
        self.free[page.level][self.pool_of[page.group]] += 1

    def lose(self, pages: Iterable[Page]) -> None:
        """Lose the moving pages that no sequence uses."""
        for page in pages:
            if page.is_droppable and not page.is_queued:
                self.die(page)

    def unlink(self, page: Page) -> None:
        """Remove a page from its block, which is gone; the page dies if it waits for its eviction."""
        page.block = None
        if page.is_droppable and page.is_queued:
            self.dequeue(page)
            self.die(page)

    # --------------------------------------------------------------------------------------------------- room

    def take(self, counts: Sequence[int]) -> None:
        """Take device slots, `counts` by layer group; make room if needed.

        Raises:
            NoRoomError: there is no room; nothing is taken.
        """
        wanted = self.pools_of(counts)
        if any(want > free for want, free in zip(wanted, self.free[0], strict=True)):
            self.make_room(wanted)
        for pool, want in enumerate(wanted):
            self.free[0][pool] -= want

    def make_room(self, wanted: Sequence[int]) -> None:
        """Make at least `wanted` slots of each device pool free.

        Raises:
            NoRoomError: this is not possible.
        """
        fallen: list[list[Page]] = [[] for _ in wanted]
        accepted: list[list[list[Page]]] = []
        try:
            self._fall(0, wanted, fallen, accepted)
        except NoRoomError as error:
            ways = [*reversed(accepted), fallen]  # the deepest first
            error.waiting = [page for pools in ways for pool in reversed(pools) for page in reversed(pool)]
            raise

    def _fall(self, level: int, goals: Sequence[int], fallen: list[list[Page]], on_way: list[list[list[Page]]]) -> None:
        """Make room on a level for its goals and for the pages that move down to it, by moving pages further down.

        TensorRT-LLM: `_prepare_free_slots`.
        """
        free, queues, is_last = self.free[level], self.queues[level], level == self.last
        pools = range(len(goals))
        counts, held = [0 for _ in pools], [list[Page]() for _ in pools]
        for pool in pools:
            evictable = len(queues[pool])
            counts[pool] = max(0, min(goals[pool] + len(fallen[pool]) - free[pool], evictable))
            if is_last:
                held[pool] = [page for page in fallen[pool] if page.is_held]
                fallen[pool][:] = [page for page in fallen[pool] if not page.is_held]
            if free[pool] + evictable - len(held[pool]) < goals[pool]:
                raise NoRoomError
        evicted = [[self._first(queues[pool]) for _ in range(counts[pool])] for pool in pools]
        accepted: list[list[Page]] = [[] for _ in pools]
        for pool in pools:
            falling = fallen[pool]
            if is_last:
                for page in reversed(evicted[pool]):
                    self.die(page)
                falling += held[pool]
                room = free[pool] - goals[pool]
            else:
                falling[:0] = evicted[pool]
                room = free[pool] + counts[pool] - goals[pool]
            cut = max(0, len(falling) - room)
            accepted[pool] = falling[cut:]
            del falling[cut:]
            if is_last:
                for page in reversed(falling):
                    self.die(page)
                falling.clear()
        if not is_last:
            on_way.append(accepted)
            self._fall(level + 1, [0 for _ in pools], fallen, on_way)
        for pages in accepted:
            self._move(pages, level)
            for page in pages:
                if not (is_last and page.is_held):
                    self.enqueue(page)

    @staticmethod
    def _first(queue: OrderedDict[Page, None]) -> Page:
        page, _ = queue.popitem(last=False)
        page.is_queued = False
        return page

    def _move(self, pages: Sequence[Page], level: int) -> None:
        """Move pages to a level that has room, grouped by their present level."""
        by_level: dict[int, list[Page]] = {}
        for page in pages:
            by_level.setdefault(page.level, []).append(page)
        for before, of_level in by_level.items():
            for page in of_level:
                pool = self.pool_of[page.group]
                self.free[before][pool] += 1
                self.free[level][pool] -= 1
                page.level = level
                block = page.found_block
                if block is not None and block.announced:
                    self._events.updated(page.group, block, (before, level))

    def lock_all(self, pages: Sequence[Page]) -> None:
        """Move pages to the device, and lock them (`batched_lock_to_gpu`).

        Raises:
            NoRoomError: the device has no room for them; none is locked.
        """
        queued = [page.is_queued for page in pages]
        for page in pages:
            self.dequeue(page)
        away = [page for page in pages if page.level]
        try:
            self.make_room(
                self.pools_of([sum(page.group == group for page in away) for group in range(len(self.pool_of))])
            )
        except NoRoomError:
            for page, was_queued in zip(pages, queued, strict=True):
                if was_queued:
                    self.enqueue(page)
            raise
        by_place: dict[tuple[int, int], list[Page]] = {}
        for page in away:
            by_place.setdefault((page.level, self.pool_of[page.group]), []).append(page)
        for of_place in by_place.values():
            self._move(of_place, 0)
        for page in pages:
            self.lock(page)
