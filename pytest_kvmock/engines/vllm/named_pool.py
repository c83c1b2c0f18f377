"""The blocks that all cache groups of an engine share: their queue, their references and their names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

# Theory of operation
#
# Blocks that no request holds are in one queue, with or without a name; new blocks are taken from its head. A name is a
# pair of group and hash, because hashes are equal across groups. A block has several names if it was named at the end
# of a prompt inside it, and again when it was full. Several blocks have the same name if requests computed the same
# tokens; a lookup finds the block that was named first.

NULL: int = 0
"""The placeholder for positions where a request needs no block; no request gets it."""


class NamedPool:
    """The blocks of one engine, numbered from 1.

    Args:
        num_blocks: capacity, at least 1.
        num_groups: number of groups that take blocks.
        removed: called with the names, (group, hash), that blocks lost, in order.
        front: all freed blocks go to the front of the queue, as they do in vLLM without caching.

    Attributes:
        free: blocks that no request holds, in the order in which they are taken.
        refs: references to each block, by its number.
        cached: per group, by hash, the block that was named first.
        changes: grows whenever the results of lookups may change.
    """

    __slots__ = ("_copies", "_front", "_names", "_removed", "_tokens", "cached", "changes", "free", "refs")

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        removed: Callable[[Sequence[tuple[int, int]]], None],
        *,
        front: bool = False,
    ) -> None:
        self.free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.refs = [0] * (num_blocks + 1)
        self.cached: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.changes = 0
        self._copies: dict[tuple[int, int], list[int]] = {}  # by name, the blocks that were named later, in order
        self._names: list[list[tuple[int, int]]] = [[] for _ in range(num_blocks + 1)]
        self._tokens = [0] * (num_blocks + 1)
        self._removed = removed
        self._front = front

    # ------------------------------------------------------------------------------------------------- queries

    def names(self, block: int) -> Sequence[tuple[int, int]]:
        """Return the names of a block, (group, hash), oldest first; do not change the list."""
        return self._names[block]

    def tokens(self, block: int) -> int:
        """Return the number of leading tokens that a block's first name covers; 0 if it has no name."""
        return self._tokens[block] if self._names[block] else 0

    def idle(self, blocks: Iterable[int]) -> int:
        """Count the blocks among these that no request holds."""
        refs = self.refs
        return sum(not refs[block] for block in blocks if block != NULL)

    def holders(self, group: int, block_hash: int) -> list[int]:
        """Return the blocks with this name, in the order in which they were named."""
        first = self.cached[group].get(block_hash)
        return [] if first is None else [first, *self._copies.get((group, block_hash), ())]

    # -------------------------------------------------------------------------------------------- hold and free

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; blocks in the queue leave it."""
        refs, free = self.refs, self.free
        for block in blocks:
            if block != NULL:
                if not refs[block]:
                    del free[block]
                refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the queue, which must have as many; they lose their names."""
        popitem, refs, names = self.free.popitem, self.refs, self._names
        taken = [popitem(last=False)[0] for _ in range(count)]
        lost: list[tuple[int, int]] = []
        for block in taken:
            refs[block] = 1
            if names[block]:
                lost += self._unname(block)
        if lost:
            self._removed(lost)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. Blocks without any further reference go into the queue.

        Blocks without a name go to its front in the given order and are taken next; named blocks go to its end.
        """
        refs, free, names, everything = self.refs, self.free, self._names, self._front
        nameless: list[int] = []
        for block in blocks:
            if block == NULL:
                continue
            left = refs[block] - 1
            refs[block] = left
            if left:
                continue
            if names[block] and not everything:
                free[block] = None
            else:
                nameless.append(block)
        for block in reversed(nameless):
            free[block] = None
            free.move_to_end(block, last=False)

    def grow(self, count: int) -> None:
        """Put `count` more blocks at the end of the queue."""
        first = len(self.refs)
        self.free.update(dict.fromkeys(range(first, first + count)))
        self.refs += [0] * count
        self._tokens += [0] * count
        self._names += [[] for _ in range(count)]

    def reset(self) -> None:
        """Drop all names; the queue keeps its order."""
        for cached in self.cached:
            cached.clear()
        self._copies.clear()
        self._names = [[] for _ in self._names]
        self.changes += 1

    # ---------------------------------------------------------------------------------------------------- names

    def name(self, block: int, group: int, block_hash: int, tokens: int) -> None:
        """Give a block one more name.

        Args:
            block: the block.
            group: the name's group.
            block_hash: the name's hash.
            tokens: number of leading tokens that the name covers; kept only for the first name.
        """
        names = self._names[block]
        if not names:
            self._tokens[block] = tokens
        names.append((group, block_hash))
        cached = self.cached[group]
        if block_hash in cached:
            self._copies.setdefault((group, block_hash), []).append(block)
        else:
            cached[block_hash] = block
        self.changes += 1

    def strip(self, block: int) -> list[tuple[int, int]]:
        """Take all names from a block and return them; publishes no event."""
        return self._unname(block) if self._names[block] else []

    def pass_on(self, source: int, target: int) -> None:
        """Move all names of a block to a block without names; publishes no event."""
        tokens = self._tokens[source]
        for group, block_hash in self.strip(source):
            self.name(target, group, block_hash, tokens)

    def _unname(self, block: int) -> list[tuple[int, int]]:
        names, self._names[block] = self._names[block], []
        for name in names:
            cached, block_hash = self.cached[name[0]], name[1]
            others = self._copies.get(name)
            if others is None:
                del cached[block_hash]
                continue
            if cached[block_hash] == block:
                cached[block_hash] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del self._copies[name]
        self.changes += 1
        return names
