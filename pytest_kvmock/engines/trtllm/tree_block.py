"""One block of the tree of TensorRT-LLM's V2, and the page that it has for a layer group."""

from __future__ import annotations


class Page:
    """One block of one layer group, on one level.

    Attributes:
        group: its layer group.
        level: where it is; 0 is the device.
        block: the block whose page it is; None if it is no longer stored, or not yet.
        tokens: how many tokens of the block it has, once it is stored.
        holds: sequences that keep it.
        locks: sequences that read it.
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
        """The block that names it, which a look-up may find; None: that left the tree, or there is none."""
        return None if self.block is None or self.block.is_orphan else self.block

    @property
    def is_held(self) -> bool:
        """Whether sequences keep it, and none reads it."""
        return self.holds > 0 and not self.locks


class TreeBlock:
    """One block of the tree, full or partial.

    Attributes:
        tokens: of the block; of a root none.
        digest: what the names of those behind it are made from.
        name: as it is published.
        position: how many blocks stand before it; -1: it is a root.
        parent: the block before it, or a root; None if it is not in the tree.
        children: those behind it by their tokens, the first inserted first.
        pages: that of each layer group.
        announced: layer groups of which it was Stored, and not Removed.
        users: sequences that have it as theirs.
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
