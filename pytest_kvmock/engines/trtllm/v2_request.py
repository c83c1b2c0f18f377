"""Requests of TensorRT-LLM's V2, and the pages that they lock and hold."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.trtllm.page_pools import NoRoomError, PagePools
from pytest_kvmock.engines.trtllm.request_tokens import RequestTokens
from pytest_kvmock.engines.trtllm.tree_block import Page, TreeBlock

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.group_events import GroupEvents
    from pytest_kvmock.engines.trtllm.hashes import V1Hasher, V2Hasher
    from pytest_kvmock.engines.trtllm.prefix_tree import PrefixTree
    from pytest_kvmock.values.prompt_keys import PromptKeys

# Theory of operation
#
# A request has three lengths: the committed tokens (of its prompt only), its history, which decides when pages leave
# windows, and its capacity, the tokens that have pages. A running request locks its pages, a suspended one holds them.
# If a page leaves its window before its block is committed, it is held until then.


class RequestBlock:
    """One block of a request.

    Attributes:
        pages: its page in each layer group; None if it has none, or has released it.
        locked: whether it locks the page (if not, it only holds it), for each layer group.
        tree: the block of the tree that has these pages; None: the pages are its own.
    """

    __slots__ = ("locked", "pages", "tree")

    def __init__(self, groups: int) -> None:
        self.pages: list[Page | None] = [None] * groups
        self.locked = [False] * groups
        self.tree: TreeBlock | None = None


class V2Request(RequestTokens):
    """One request (`_KVCache`).

    Args:
        tokens: tokens of its prompt, at least one.
        block_size: tokens a block.
        hasher: names its blocks, with its adapter and salt.
        keys: what its prompt carries in addition to its tokens; None if nothing.
        rng: source of the names of partial blocks.

    Attributes:
        keys: as given.
        committed: number of prompt tokens that are stored, or count as stored.
        history: number of past tokens; it decides when pages leave windows.
        capacity: number of tokens that have pages.
        held: its blocks.
        is_active: whether it runs; if not, it is suspended.
        stores: whether it stores its computed blocks.
    """

    _tree: PrefixTree
    _pools: PagePools
    _events: GroupEvents

    def __init__(
        self, tokens: list[int], block_size: int, hasher: V1Hasher | V2Hasher, keys: PromptKeys | None, *, rng: Random
    ) -> None:
        super().__init__(tokens, block_size, hasher, rng)
        self.keys = keys
        self.forget()

    def forget(self) -> None:
        """Drop its blocks."""
        self.committed = self.history = self.capacity = self._stored = 0
        self.held: list[RequestBlock] = []
        self.is_active = self._resumed = False
        self.stores = True

    # ----------------------------------------------------------------------------------------------------- pages

    def _live(self) -> Iterator[tuple[RequestBlock, int]]:
        """Yield its blocks that a layer group needs, group by group."""
        for group, rule in enumerate(self._tree.groups):
            passed = rule.passed(self.history, self.block_size)
            yield from ((block, group) for place, block in enumerate(self.held) if place not in passed)

    def _let_go(self, block: RequestBlock, group: int) -> None:
        page, block.pages[group] = block.pages[group], None
        if page is None:
            return
        if block.locked[group]:
            self._pools.unlock(page)
        else:
            self._pools.release(page)

    def _lock_held(self, wanted: list[tuple[RequestBlock, int, Page]]) -> None:
        """Move pages that it holds to the device, and lock them."""
        self._pools.lock_all([page for _, _, page in wanted])
        for block, group, page in wanted:
            if block.pages[group] is not None:
                page.holds -= 1  # a lock is also a hold
            block.pages[group], block.locked[group] = page, True

    def begin(
        self, tree: PrefixTree, pools: PagePools, events: GroupEvents, found: list[tuple[TreeBlock, int]]
    ) -> None:
        """Hold the pages that a look-up found; the request is suspended until it is resumed."""
        self._tree, self._pools, self._events = tree, pools, events
        self.committed = sum(tokens for _, tokens in found)
        self.history = self.capacity = self.committed
        for block, _ in found:
            mine = RequestBlock(len(tree.groups))
            mine.tree = tree.use(block)
            self.held.append(mine)
        self._stored = self.committed // self.block_size
        for mine, group in self._live():
            assert mine.tree is not None
            page = mine.tree.pages[group]
            assert page is not None
            pools.hold(page)
            mine.pages[group] = page

    def resume(self, max_utilization: float) -> bool:
        """Lock its pages on the device; a partly matched block gets its own pages.

        Returns:
            False, with the request still suspended, if too much of the device is in use, or there is no room.
        """
        pools = self._pools
        if pools.utilization() > max_utilization:
            return False
        groups = len(self._tree.groups)
        copies = [int(not self._resumed and self.committed % self.block_size > 0)] * groups
        try:
            pools.take(copies)
        except NoRoomError as error:
            pools.lose(error.waiting)
            return False
        held = [(block, group, page) for block, group in self._live() if (page := block.pages[group]) is not None]
        try:
            self._lock_held(held)
        except NoRoomError as error:
            for group, count in enumerate(copies):
                pools.free[0][pools.pool_of[group]] += count
            pools.lose(error.waiting)
            return False
        if any(copies):
            last = self.held[self.committed // self.block_size]
            for group in range(groups):
                self._let_go(last, group)
            for group in range(groups):
                self._own(last, group)
            before, last.tree = last.tree, None
            self._tree.unuse(before)
        self._resumed = self.is_active = True
        return True

    def _own(self, block: RequestBlock, group: int) -> None:
        """Lock a new page, whose slot was taken."""
        page = block.pages[group] = Page(group)
        block.locked[group] = True
        self._pools.lock(page)

    def suspend(self) -> None:
        """Hold the pages that it locks: they may move to a lower level, but are not lost."""
        for block, group in self._live():
            page = block.pages[group]
            if page is not None and block.locked[group]:
                page.holds += 1
                block.locked[group] = False
                self._pools.unlock(page)
        self.is_active = False

    def resize(self, capacity: int, history: int) -> bool:
        """Take pages for `capacity` tokens, the first `history` of them as history; the request runs.

        Returns:
            False, with its pages unchanged, if there is no room.
        """
        pools, size, rules = self._pools, self.block_size, self._tree.groups
        before, after = len(self.held), -(-capacity // size)
        passed = self._unlock_passed(history)
        new = [[place for place in range(before, after) if place not in rule.passed(history, size)] for rule in rules]
        try:
            pools.take([len(places) for places in new])
        except NoRoomError as error:
            self._lock_held(passed)
            for _, _, page in reversed(passed):
                pools.release(page)
            pools.lose(error.waiting)
            return False
        for place in range(before, after):
            block = RequestBlock(len(rules))
            for group, places in enumerate(new):
                if place in places:
                    self._own(block, group)
            self.held.append(block)
        self.capacity, self.history = capacity, history
        for _, _, page in reversed(passed):
            pools.release(page)
        return True

    def _unlock_passed(self, history: int) -> list[tuple[RequestBlock, int, Page]]:
        """Unlock the pages that leave their windows with a longer history; they are held until the resize is over."""
        unlocked: list[tuple[RequestBlock, int, Page]] = []
        if history == self.history:
            return unlocked
        for group, rule in enumerate(self._tree.groups):
            now, then = (rule.passed(length, self.block_size) for length in (self.history, history))
            for block in self.held[max(now.stop, then.start) : then.stop]:
                page = block.pages[group]
                if page is None:
                    continue
                page.holds += 1
                unlocked.append((block, group, page))
                block.locked[group] = False
                if block.tree is None and self.stores:
                    page.holds += 1
                else:
                    block.pages[group] = None
                self._pools.unlock(page)
        return unlocked

    # ----------------------------------------------------------------------------------------------------- store

    def commit(self, upto: int) -> None:
        """Store the full blocks of the first `upto` tokens of its prompt, which are computed."""
        self.committed = max(self.committed, upto)
        if self.history < self.committed:  # pages that leave a window are held until their block is stored
            self.resize(self.capacity, self.committed)
        while self.stores and self._stored < self.committed // self.block_size:
            self._commit_block(self._stored)

    def stop_storing(self) -> None:
        """Store a partial last block, and then no more blocks."""
        if not self.stores:
            return
        if self._resumed and self.committed % self.block_size:
            self._commit_block(self.committed // self.block_size)
        self._stop()

    def _stop(self) -> None:
        """Stop storing, and release the pages that were held until their blocks were stored."""
        self.stores = False
        for group, rule in enumerate(self._tree.groups):
            passed = rule.passed(self.history, self.block_size)
            for block in self.held[max(passed.start, self._stored) : passed.stop]:
                self._let_go(block, group)

    def _commit_block(self, place: int) -> None:
        mine, tree, size = self.held[place], self._tree, self.block_size
        tokens = tuple(self.tokens[place * size : min(self.committed, (place + 1) * size)])
        before = self.held[place - 1].tree if place else tree.root(self.hasher)
        if before is None or (place and before.is_orphan):
            self._stop()  # its ancestor left the tree; newer versions insert it again
            return
        block = tree.covering(before, tokens)
        if block is None:
            block = tree.add(before, tokens, self.hasher)
            for page in mine.pages:
                if page is not None:
                    self._pools.dequeue(page)
                    tree.set_page(block, page)
            for group, page in enumerate(block.pages):
                if page is not None and page.tokens == len(tokens):
                    self._events.stored(block, group, self.keys)
        elif len(tokens) == size:
            self._rebase(mine, block)
        else:
            self._stop()
            return
        mine.tree = tree.use(block)
        self._stored = place + 1
        for group, rule in enumerate(tree.groups):
            if place in rule.passed(self.history, size):
                self._let_go(mine, group)

    def _rebase(self, mine: RequestBlock, block: TreeBlock) -> None:
        """Switch to the pages of a block that is in the tree already, and give it the pages that it lacks."""
        shared: list[tuple[int, Page, Page]] = []
        for group, page in enumerate(mine.pages):
            if page is None:
                continue
            existing = block.pages[group]
            if existing is None or existing.tokens < len(block.tokens):
                self._pools.dequeue(page)
                self._tree.set_page(block, page)
                if group not in block.announced:
                    self._events.stored(block, group, self.keys)
                continue
            if mine.locked[group]:
                page.holds += 1
                mine.locked[group] = False
                self._pools.unlock(page)
            shared.append((group, page, existing))
        self._pools.lock_all([existing for _, _, existing in shared])
        for group, page, existing in shared:
            mine.pages[group], mine.locked[group] = existing, True
            self._pools.release(page)

    def close(self) -> None:
        """Store a partial last block, and release all pages, from the last block and the highest layer group on."""
        self.stop_storing()
        while self.held:
            block = self.held.pop()
            self._tree.unuse(block.tree)
            for group in reversed(range(len(block.pages))):
                self._let_go(block, group)
        self.forget()
