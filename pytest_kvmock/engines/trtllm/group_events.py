"""The events of one iteration of TensorRT-LLM's V2, by layer group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.engines.trtllm.cache_block import DEFAULT_PRIORITY
from pytest_kvmock.engines.trtllm.hashes import BlockKey
from pytest_kvmock.engines.trtllm.iteration_events import Queued, QueuedBlock

if TYPE_CHECKING:
    from pytest_kvmock.engines.trtllm.tree_block import TreeBlock
    from pytest_kvmock.values.prompt_keys import PromptKeys


class GroupEvents:
    """Queues events in V2's order (`_event_manager.KVCacheEventManager`).

    A Stored joins the layer group's last Stored if this ended with its parent. A Removed waits until a Stored of its
    layer group, an Updated of any group, a separate Stored of another group, or the end of the iteration.
    """

    __slots__ = ("_joinable", "_queue", "_removed")

    def __init__(self) -> None:
        self._queue: list[Queued] = []
        self._joinable: dict[int, Queued] = {}
        self._removed: dict[int, tuple[list[int], list[bytes]]] = {}

    def _add(self, event: Queued) -> None:
        for group in list(self._removed):
            self._send_removed(group)
        if event.kind != "stored":
            self._joinable.pop(event.window, None)
        self._queue.append(event)

    def _send_removed(self, group: int) -> None:
        waiting = self._removed.pop(group, None)
        if waiting is not None:
            self._joinable.pop(group, None)
            self._queue.append(Queued(group, "removed", names=waiting[0], digests=waiting[1]))

    def created(self, group: int, slots: tuple[int, ...]) -> None:
        """Queue the number of slots of each level."""
        self._add(Queued(group, "created", levels=slots))

    def stored(self, block: TreeBlock, group: int, keys: PromptKeys | None) -> None:
        """Queue a Stored of a block's page in a layer group."""
        parent, page = block.parent, block.pages[group]
        assert parent is not None
        assert page is not None
        block.announced.add(group)
        row = QueuedBlock(block.name, BlockKey(block.tokens), page.level, DEFAULT_PRIORITY)
        self._send_removed(group)
        last = self._joinable.get(group)
        if not self._removed and last is not None and parent.position >= 0 and last.blocks[-1].name == parent.name:
            last.blocks = [*last.blocks, row]
            last.digests.append(block.digest)
            return
        before = None if parent.position < 0 else parent
        event = Queued(
            group, "stored", None if before is None else before.name, [row], keys=keys, position=block.position
        )
        event.digests = [block.digest]
        event.parent_digest = None if before is None else before.digest
        self._add(event)
        self._joinable[group] = event

    def removed(self, blocks: Sequence[TreeBlock]) -> None:
        """Let a Removed of blocks wait, in each layer group in which they are announced."""
        for group in sorted({group for block in blocks for group in block.announced}):
            self._wait(group, [block for block in blocks if group in block.announced])
        for block in blocks:
            block.announced.clear()

    def removed_group(self, block: TreeBlock, group: int) -> None:
        """Let a Removed of a block wait, in one layer group."""
        if group in block.announced:
            self._wait(group, [block])
            block.announced.remove(group)

    def _wait(self, group: int, blocks: Sequence[TreeBlock]) -> None:
        names, digests = self._removed.setdefault(group, ([], []))
        names += [block.name for block in blocks]
        digests += [block.digest for block in blocks]
        self._joinable.pop(group, None)

    def updated(self, group: int, block: TreeBlock, levels: tuple[int, int]) -> None:
        """Queue an Updated: a block's page in a layer group has changed its level, from and to."""
        self._add(Queued(group, "updated", names=[block.name], levels=levels, digests=[block.digest]))

    def take(self) -> list[Queued]:
        """End the iteration: return its events, in order."""
        for group in list(self._removed):
            self._send_removed(group)
        taken, self._queue = self._queue, []
        self._joinable.clear()
        return taken
