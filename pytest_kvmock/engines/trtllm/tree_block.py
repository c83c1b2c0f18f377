"""One block of the tree of TensorRT-LLM's V2, and its page for a layer group."""

from __future__ import annotations


class Page:
    """One block's data of one layer group, on one level.

    Attributes:
        group: its layer group.
        level: its level; 0 is the device.
        block: its block; None if the page is not stored yet, or no longer.
        tokens: number of tokens of the block that it has, once it is stored.
        holds: number of sequences that hold it.
        locks: number of sequences that read it.
        is_queued: whether it is in its level's queue.
    """

    __slots__ = ("block", "group", "holds", "is_queued", "level", "locks", "tokens")

    def __init__(self, group: int) -> None:
        self.group, self.level = group, 0
        self.block: TreeBlock | None = None
        self.is_queued = False
        self.tokens = self.holds = self.locks = 0

    @property
    def is_droppable(self) -> bool:
        """Whether no sequence uses it."""
        return not self.holds and not self.locks

    @property
    def found_block(self) -> TreeBlock | None:
        """Its block, by which a look-up can find it; None if there is no block, or the block has left the tree."""
        return None if self.block is None or self.block.is_orphan else self.block

    @property
    def is_held(self) -> bool:
        """Whether a sequence holds it, and none reads it."""
        return self.holds > 0 and not self.locks


class TreeBlock:
    """One block of the tree, full or partial.

    Attributes:
        tokens: tokens of the block; empty for a root.
        digest: digest from which the names of the blocks behind it are made.
        name: its published name.
        position: number of blocks before it; -1 for a root.
        parent: the block before it, or a root; None if it is not in the tree.
        children: the blocks behind it by their tokens, in the order of insertion.
        pages: its page for each layer group.
        announced: layer groups with a published Stored of it, and no Removed since.
        users: number of sequences that have it.
    """

    __slots__ = ("announced", "children", "digest", "name", "pages", "parent", "position", "tokens", "users")

    def __init__(
        self, tokens: tuple[int, ...], digest: bytes, name: int, parent: TreeBlock | None, groups: int
    ) -> None:
        self.tokens, self.digest, self.name, self.parent = tokens, digest, name, parent
        self.position: int = -1 if parent is None else parent.position + 1
        self.children: dict[tuple[int, ...], TreeBlock] = {}
        self.pages: list[Page | None] = [None] * groups
        self.announced: set[int] = set()
        self.users = 0

    @property
    def is_orphan(self) -> bool:
        """Whether it has left the tree."""
        return self.parent is None
