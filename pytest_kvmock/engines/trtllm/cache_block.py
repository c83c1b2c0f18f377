"""One block of TensorRT-LLM's V1, and the sequences that use blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_kvmock.engines.trtllm.child_map import ChildMap

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.hashes import BlockKey
    from pytest_kvmock.values.prompt_keys import PromptKeys

DEFAULT_PRIORITY: Final = 35
"""The priority of a block without a retention range."""

PRIMARY: Final = 0
SECONDARY: Final = 1


class CacheBlock:
    """One block (`KVCacheBlock`).

    Attributes:
        id: its number in its window.
        level: the present place of its memory: `PRIMARY` or `SECONDARY`.
        key: the tokens for which it was last allocated; None if there were none.
        name: the name under which it was last published.
        parent: the block before it in the tree; None if it is not in the tree.
        children: the blocks behind it.
        refs: number of sequences that use it.
        is_free: whether it is in a queue.
        priority: eviction priority, from 0 to 100.
        duration: time in ms for which the priority lasts once the block is free; None: forever.
        expires: time at which the priority ends while the block is free; None: never.
        sequence: the last sequence that took it as a new block.
    """

    __slots__ = (
        *("children", "duration", "expires", "id", "is_free", "key", "level"),
        *("name", "parent", "priority", "refs", "sequence"),
    )

    def __init__(self, number: int, level: int) -> None:
        self.id, self.level = number, level
        self.key: BlockKey | None = None
        self.name = 0
        self.parent: CacheBlock | None = None
        self.children: ChildMap[CacheBlock] = ChildMap()
        self.refs = 0
        self.is_free = False
        self.priority = DEFAULT_PRIORITY
        self.duration: float | None = None
        self.expires: float | None = None
        self.sequence: BlockHolder | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether no block is behind it."""
        return not self.children

    def leave(self) -> None:
        """Leave the tree if it is in it."""
        if self.parent is not None:
            assert self.key is not None
            self.parent.children.remove(self.key)
            self.parent = None


class BlockHolder:
    """A sequence that uses blocks.

    Attributes:
        keys: what its prompt carries in addition to its tokens; None if nothing.
        tables: its blocks in each window, by the tokens of the window; blocks that left the window stay listed.
        left: number of blocks that left a window, in all windows together.
        spoilt: windows in which it stores nothing at its end, because another sequence took a block that was new to it.
    """

    __slots__ = ("keys", "left", "spoilt", "tables")

    def __init__(self, keys: PromptKeys | None = None) -> None:
        self.keys = keys
        self.forget()

    def forget(self) -> None:
        """Drop its blocks."""
        self.left = 0
        self.tables: dict[int, list[CacheBlock]] = {}
        self.spoilt: set[int] = set()
