"""The blocks of one attention window of TensorRT-LLM's V1, on two levels, and the radix tree of the cached ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_kvmock.engines.trtllm.cache_block import DEFAULT_PRIORITY, PRIMARY, SECONDARY, BlockHolder, CacheBlock
from pytest_kvmock.engines.trtllm.free_queues import FreeQueues
from pytest_kvmock.engines.trtllm.hashes import BlockKey, v1_block_key
from pytest_kvmock.engines.trtllm.iteration_events import IterationEvents, QueuedBlock

# Theory of operation
#
# A block keeps its content when it changes levels: two blocks swap their memory. A block in the tree may be free (in a
# queue) or used, and so may a block outside the tree: a used block leaves the tree when its ancestor is evicted. An
# evicted block and its descendants keep their places in the queues.
#
# A new block is the first one of the lowest queue of level 0. If it has had content of sufficient priority, and level 1
# has a free block, the two swap levels, and the block from level 1 is evicted and used.


class WindowBlocks:
    """The blocks of a window (`WindowBlockManager`).

    Args:
        window: tokens of the window.
        blocks: number of blocks of each level.
        block_size: tokens a block.
        events: the queue of its events.
        partial_reuse: whether a part of a cached block is reused.
        copy_on_partial_reuse: whether such a block is copied if it is in use or has children; if not, it is no match.
        onboard: whether blocks move between the levels.
        offload_min_priority: a block with a lower priority is not offloaded.

    Attributes:
        window: as given.
        queues: the queues of its free blocks.
        root: the root of the tree; not a block.
        taken: names that were stored, and are neither Removed nor in the tree: leaves that partial matches took.
    """

    def __init__(
        self,
        window: int,
        blocks: tuple[int, int],
        block_size: int,
        events: IterationEvents,
        *,
        partial_reuse: bool,
        copy_on_partial_reuse: bool,
        onboard: bool,
        offload_min_priority: int,
    ) -> None:
        self.window, self.blocks = window, blocks
        self._block_size = block_size
        self._events = events
        self._partial_reuse, self._copies = partial_reuse, copy_on_partial_reuse
        self._onboards, self._offload_min_priority = onboard, offload_min_priority
        self.root = CacheBlock(-1, PRIMARY)
        self.taken: dict[int, None] = {}
        self.all = [CacheBlock(number, int(number >= blocks[0])) for number in range(sum(blocks))]
        self.queues = FreeQueues([self.all[: blocks[0]], self.all[blocks[0] :]])
        events.created(window, blocks)

    # ---------------------------------------------------------------------------------------------------- match

    def _match(self, node: CacheBlock, key: BlockKey) -> tuple[CacheBlock, int, bool] | None:
        """Return the child that matches a key, the number of matched tokens, and whether the match is partial."""
        if not key.tokens:
            return None
        block = node.children.get(key)
        if block is not None:
            return block, len(key.tokens), len(key.tokens) < self._block_size
        if not self._partial_reuse:
            return None
        alike = [each for each in node.children.alike(key) if self._copies or (not each[1].refs and each[1].is_leaf)]
        most = max((tokens for tokens, _ in alike), default=0)
        best = [block for tokens, block in alike if tokens == most]
        if len(best) > 1:  # among equal ones, the first in the walk
            best = [block for block in node.children.walk() if block in best]
        return (best[0], most, True) if best else None

    def match(self, keys: Iterable[BlockKey]) -> Iterator[tuple[CacheBlock, int, bool]]:
        """Yield the matches of a prompt's keys, each below the one before; see `_match`."""
        node = self.root
        for key in keys:
            match = self._match(node, key)
            if match is None:
                return
            yield match
            node = match[0]
            if match[2]:
                return

    # --------------------------------------------------------------------------------------------------- blocks

    def add(
        self,
        request: BlockHolder,
        keys: Sequence[BlockKey],
        retentions: Sequence[tuple[int | None, float | None]],
    ) -> int:
        """Allocate the blocks of a request's prompt, cached ones first (`loadOrAllocateBlocks`).

        The caller has checked that they fit.

        Args:
            request: the request.
            keys: keys of its leading blocks; further blocks have none.
            retentions: priority and duration of each block.

        Returns:
            Number of tokens that are hit.
        """
        table, found = request.tables[self.window], 0
        matches = self.match(keys)
        for place, (priority, duration) in enumerate(retentions):
            match = next(matches, None)
            key = keys[place] if place < len(keys) else None
            if match is None:
                matches = iter(())  # the search ends here
                wanted = DEFAULT_PRIORITY if priority is None else priority
                block = self._fresh(request, wanted, duration)
                block.key = key if key is not None else block.key
            else:
                block, tokens, is_partial = match
                found += tokens
                if priority is not None and block.priority != priority:
                    self._events.updated(self.window, block.name, priorities=(block.priority, priority))
                if is_partial and (block.refs or not block.is_leaf):
                    block = self._fresh(request, block.priority, block.duration)
                    block.key = key
                else:
                    self.queues.claim(block, priority, duration)
                    self._onboard(request, block)
                    if is_partial:  # a free leaf is used without a copy, and leaves the tree without an event
                        block.leave()
                        self.taken[block.name] = None
                        self._events.gone(self.window, block.name)
            block.refs += 1
            table.append(block)
        return found

    def _onboard(self, request: BlockHolder, block: CacheBlock) -> None:
        if self._onboards and block.level == SECONDARY:
            spare = self._fresh(request, DEFAULT_PRIORITY, None)
            block.level, spare.level = PRIMARY, SECONDARY
            if block.parent is not None:
                self._events.updated(self.window, block.name, levels=(SECONDARY, PRIMARY))
            self.queues.release(spare)

    def _fresh(self, request: BlockHolder, priority: int, duration: float | None) -> CacheBlock:
        """Return a new block of level 0 (`getFreeBlock`); its former content is offloaded or evicted."""
        block = self.queues.first(PRIMARY)
        if (
            block.key is not None
            and block.key.tokens
            and block.priority >= self._offload_min_priority
            and self._onboards
            and self.queues.free[SECONDARY]
        ):
            other = self.queues.first(SECONDARY)
            self.queues.claim(block)
            self.queues.claim(other)
            block.level, other.level = SECONDARY, PRIMARY
            if block.parent is not None:
                self._events.updated(self.window, block.name, levels=(PRIMARY, SECONDARY))
            self.queues.release(block)
            block = other
        self._evict(block)
        self.queues.claim(block, priority, duration)
        if block.sequence is not None and block.sequence is not request:
            block.sequence.spoilt.add(self.window)
        block.sequence = request
        return block

    def _evict(self, block: CacheBlock) -> None:
        """Take a block and all its descendants, including used ones, out of the tree, children first.

        Raises:
            RuntimeError: a block is below itself; the original recurses until its stack overflows.
        """
        waiting, above = [(block, False)], set()
        while waiting:
            one, is_ready = waiting.pop()
            if not is_ready and one.children:
                if one in above:
                    raise RuntimeError(
                        "TensorRT-LLM ends here: a request took back a block that had left its window of "
                        f"{self.window} tokens, and stored it below itself; more num_blocks or a longer window "
                        "avoid this"
                    )
                above.add(one)
                waiting.append((one, True))
                waiting += [(child, False) for child in reversed(one.children.walk())]
            elif one.parent is not None:
                self._events.removed(self.window, one.name)
                one.leave()

    def evict_all(self) -> None:
        """Take all blocks out of the tree; no request uses them."""
        for block in self.root.children.walk():
            self._evict(block)

    def grow(self, request: BlockHolder, priority: int, duration: float | None) -> CacheBlock:
        """Give a request one more block; the caller has checked that it fits."""
        block = self._fresh(request, priority, duration)
        block.refs += 1
        request.tables[self.window].append(block)
        return block

    def release(self, blocks: Iterable[CacheBlock]) -> None:
        """Release blocks of a request, in order; they stay in the tree."""
        for block in blocks:
            block.refs -= 1
            if not block.refs:
                self.queues.release(block)

    # ---------------------------------------------------------------------------------------------------- store

    def store(self, request: BlockHolder, keys: Sequence[BlockKey]) -> None:
        """Insert the blocks of a request into the tree, from the first one that it lacks (`storeBlocks`)."""
        node, position = self.root, 0
        new: list[CacheBlock] = []
        for key, block in zip(keys, request.tables[self.window], strict=False):
            match = node.children.get(key) if not new else None
            if match is None:
                block.key, block.parent = key, node
                block.name = v1_block_key(key, node.name)
                node.children.add(key, block)
                new.append(block)
                match = block
            position += not new
            node = match
        if new:
            before = new[0].parent
            assert before is not None
            parent = None if before is self.root else before.name
            rows = [QueuedBlock(block.name, _key_of(block), block.level, block.priority) for block in new]
            for block in new:
                self.taken.pop(block.name, None)
            self._events.stored(self.window, parent, rows, request.keys, position)

    def cached(self) -> Iterator[CacheBlock]:
        """Return all blocks in the tree."""
        return (block for block in self.all if block.parent is not None)


def _key_of(block: CacheBlock) -> BlockKey:
    """Return the key of a block that has content."""
    assert block.key is not None
    return block.key
