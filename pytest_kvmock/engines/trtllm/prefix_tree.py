"""The radix tree of TensorRT-LLM's V2, whose blocks have a page for each layer group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvmock.engines.trtllm.tree_block import TreeBlock

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.group_events import GroupEvents
    from pytest_kvmock.engines.trtllm.hashes import V1Hasher, V2Hasher
    from pytest_kvmock.engines.trtllm.page_pools import PagePools
    from pytest_kvmock.engines.trtllm.tree_block import Page

_MOST_SEARCHED: Final = 31
"""Maximum number of children among which a partial match is tried."""


class LayerGroup(NamedTuple):
    """Layers that keep the same pages (a life cycle).

    Attributes:
        window: number of tokens that they attend to; None: all.
        sinks: number of leading blocks that they always keep.
    """

    window: int | None
    sinks: int

    def passed(self, length: int, block_size: int) -> range:
        """Return the blocks that a history of this length no longer needs: behind the sinks, and before the window."""
        first = min(-(-length // block_size), self.sinks)
        if self.window is None:
            return range(first, first)
        return range(first, max(first, (length + 1 - self.window) // block_size))


class PrefixTree:
    """All blocks that can be found, and their look-up (`BlockRadixTree`).

    Args:
        groups: its layer groups.
        block_size: tokens of a full block.
        pools: the pages of the blocks.
        events: the queue of events.
        partial_reuse: whether a look-up finds a part of a block.
    """

    __slots__ = ("_events", "_partial_reuse", "_pools", "block_size", "groups", "roots")

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        pools: PagePools,
        events: GroupEvents,
        *,
        partial_reuse: bool,
    ) -> None:
        self.groups, self.block_size = groups, block_size
        self._pools, self._events, self._partial_reuse = pools, events, partial_reuse
        self.roots: dict[V1Hasher | V2Hasher, TreeBlock] = {}
        pools.page_lost = self.page_lost

    def blocks(self) -> Iterator[TreeBlock]:
        """Yield all blocks in the tree, each before the blocks behind it."""
        waiting = [child for root in self.roots.values() for child in root.children.values()]
        while waiting:
            block = waiting.pop()
            yield block
            waiting += block.children.values()

    # -------------------------------------------------------------------------------------------------- look-up

    def match(self, hasher: V1Hasher | V2Hasher, tokens: Sequence[int]) -> list[tuple[TreeBlock, int]]:
        """Return the blocks that tokens can reuse, each with its number of reused tokens; all but the last are full."""
        node, found, size = self.roots.get(hasher), list[tuple[TreeBlock, int]](), self.block_size
        for at in range(0, len(tokens), size):
            if node is None:
                break
            wanted = tuple(tokens[at : at + size])
            child = node.children.get(wanted)
            if child is None:
                found += self._partial(node, wanted)
                break
            found.append((child, len(wanted)))
            node = child
        return self._usable(found)

    def _partial(self, node: TreeBlock, wanted: tuple[int, ...]) -> list[tuple[TreeBlock, int]]:
        """Return the child with the longest common prefix, the first inserted among equals."""
        if not self._partial_reuse or len(node.children) > _MOST_SEARCHED:
            return []
        best, most = None, 0
        for child in node.children.values():
            pairs = zip(wanted, child.tokens, strict=False)
            shorter = min(len(wanted), len(child.tokens))
            common = next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)
            if common > most:
                best, most = child, common
        return [] if best is None else [(best, most)]

    def _usable(self, found: list[tuple[TreeBlock, int]]) -> list[tuple[TreeBlock, int]]:
        """Return the longest prefix for which each layer group has the pages that a history of this length needs."""
        while found:
            length = self.block_size * (len(found) - 1) + found[-1][1]
            for group, rule in enumerate(self.groups):
                passed = rule.passed(length, self.block_size)
                short = (
                    (place, page.tokens if page is not None else 0)
                    for place, (block, tokens) in enumerate(found)
                    if place not in passed and ((page := block.pages[group]) is None or page.tokens < tokens)
                )
                cut = next(short, None)
                if cut is not None:
                    place, covered = cut
                    found = [*found[:place], *([(found[place][0], covered)] if covered else [])]
                    break
            else:
                break
        return found

    # ---------------------------------------------------------------------------------------------------- store

    def root(self, hasher: V1Hasher | V2Hasher) -> TreeBlock:
        """Return the root of the blocks of an adapter and a salt; it is not a block."""
        found = self.roots.get(hasher)
        if found is None:
            found = self.roots[hasher] = TreeBlock((), b"", 0, None, 0)
        return found

    def covering(self, parent: TreeBlock, tokens: tuple[int, ...]) -> TreeBlock | None:
        """Return the child with these tokens, or, if they are not a full block, a child that begins with them."""
        found = parent.children.get(tokens)
        if found is None and len(tokens) < self.block_size:
            same = (child for child in parent.children.values() if child.tokens[: len(tokens)] == tokens)
            found = next(same, None)
        return found

    def add(self, parent: TreeBlock, tokens: tuple[int, ...], hasher: V1Hasher | V2Hasher) -> TreeBlock:
        """Add a block that no child covers behind another; it takes the pages of shorter siblings, which leave."""
        before = None if parent.position < 0 else parent.digest
        digest = hasher.digests(tokens, self.block_size, parent.position + 1, before)[0]
        block = TreeBlock(tokens, digest, hasher.name(digest), parent, len(self.groups))
        shorter = [child for child in parent.children.values() if tokens[: len(child.tokens)] == child.tokens]
        parent.children[tokens] = block
        for child in shorter:
            for group, page in enumerate(child.pages):
                if page is not None:
                    child.pages[group], block.pages[group], page.block = None, page, block
            self._detach(child)
            self._events.removed([child])
        return block

    def set_page(self, block: TreeBlock, page: Page) -> None:
        """Make a page the block's page of its layer group, in place of a page with fewer tokens."""
        before = block.pages[page.group]
        block.pages[page.group] = page
        page.block, page.tokens = block, len(block.tokens)
        if before is not None:
            self._pools.unlink(before)
            self._pools.dequeue(before)

    # --------------------------------------------------------------------------------------------------- leave

    def _detach(self, block: TreeBlock) -> None:
        """Take a block out of the tree; if no sequence has it, its pages lose their block."""
        parent, block.parent = block.parent, None
        assert parent is not None
        del parent.children[block.tokens]
        if parent.position < 0 and not parent.children:
            self.roots = {hasher: root for hasher, root in self.roots.items() if root is not parent}
        if not block.users:
            self._forget(block)

    def _forget(self, block: TreeBlock) -> None:
        for group, page in enumerate(block.pages):
            if page is not None:
                block.pages[group] = None
                self._pools.unlink(page)

    def use(self, block: TreeBlock) -> TreeBlock:
        """Add a sequence as a user of a block; return the block."""
        block.users += 1
        return block

    def unuse(self, block: TreeBlock | None) -> None:
        """Remove a sequence as a user of a block."""
        if block is not None:
            block.users -= 1
            if not block.users and block.is_orphan:
                self._forget(block)

    def remove(self, block: TreeBlock) -> None:
        """Take a block and all blocks behind it out of the tree, children first."""
        node, gone = block, list[TreeBlock]()
        while True:
            if node.children:
                node = next(iter(node.children.values()))
                continue
            gone.append(node)
            parent = node.parent
            self._detach(node)
            if node is block:
                break
            assert parent is not None
            node = parent
        self._events.removed(gone)

    def clear(self) -> None:
        """Take all blocks out of the tree."""
        while self.roots:
            root = next(iter(self.roots.values()))
            self.remove(next(iter(root.children.values())))

    def page_lost(self, block: TreeBlock, group: int) -> None:
        """Remove a block that lost a page: with all blocks behind it, or only from the page's layer group."""
        if block.is_orphan:
            return
        rule = self.groups[group]
        if rule.window is None or block.position < rule.sinks:
            self.remove(block)
            return
        self._events.removed_group(block, group)
        node: TreeBlock | None = block
        while node is not None and node.parent is not None and node.pages[group] is None and not node.children:
            parent = node.parent
            self._detach(node)
            self._events.removed([node])
            node = parent if parent.position >= 0 else None
