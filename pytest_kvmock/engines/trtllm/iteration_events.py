"""The events of one iteration of TensorRT-LLM; all become visible at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_kvmock.engines.trtllm.hashes import BlockKey

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import PromptKeys

REMOVED_ORDERS: Final = ("1.2", "2026-03")
"""When a Removed is sent: at its place, or (#11883) before its window's next Stored or at the end of the iteration."""


class QueuedBlock(NamedTuple):
    """One block of a Stored, in its state at that time."""

    name: int
    key: BlockKey
    level: int
    priority: int


@dataclass(slots=True)
class Queued:
    """An event of a window, or of a layer group, that waits for the end of its iteration.

    Attributes:
        window: its window, in tokens; in V2, its layer group.
        kind: "created", "stored", "removed" or "updated".
        parent: for a Stored, the block before the first; None for a root.
        blocks: for a Stored, its blocks.
        names: for a Removed, its blocks in order; for an Updated, its block.
        levels: for an Updated, the levels before and after, or None if unchanged; for "created", the number of blocks
            of each level.
        priorities: for an Updated, the priorities before and after; None if unchanged.
        gone: names that left the tree without a Removed since the last event of the window: leaves that partial matches
            took.
        keys: for a Stored, what the prompt carried in addition to its tokens.
        position: for a Stored, the number of blocks of its prompt before the first.
        digests: in V2, the digest of each block that it names.
        parent_digest: for a Stored in V2, the digest of the parent.
    """

    window: int
    kind: str
    parent: int | None = None
    blocks: Sequence[QueuedBlock] = ()
    names: list[int] = field(default_factory=list)
    levels: tuple[int, ...] | None = None
    priorities: tuple[int, int] | None = None
    gone: list[int] = field(default_factory=list)
    keys: PromptKeys | None = None
    position: int = 0
    digests: list[bytes] = field(default_factory=list)
    parent_digest: bytes | None = None


class IterationEvents:
    """Queues events in the order of a release (`KVCacheEventManager`).

    Args:
        removed_order: one of `REMOVED_ORDERS`.
    """

    __slots__ = ("_gone", "_late", "_queue", "_removed")

    def __init__(self, removed_order: str) -> None:
        self._queue: list[Queued] = []
        self._late = removed_order != REMOVED_ORDERS[0]
        self._removed: dict[int, list[int]] = {}
        self._gone: dict[int, list[int]] = {}

    def _add(self, event: Queued) -> None:
        event.gone = self._gone.pop(event.window, [])
        self._queue.append(event)

    def gone(self, window: int, name: int) -> None:
        """Record a name that left the tree without a Removed, for the next event of its window."""
        self._gone.setdefault(window, []).append(name)

    def created(self, window: int, blocks: tuple[int, int]) -> None:
        """Queue the number of blocks of each level of a window."""
        self._add(Queued(window, "created", levels=blocks))

    def stored(
        self, window: int, parent: int | None, blocks: Sequence[QueuedBlock], keys: PromptKeys | None, position: int
    ) -> None:
        """Queue a Stored of consecutive blocks of a request; each is the child of the block before it."""
        self._send_removed([window])
        self._add(Queued(window, "stored", parent, blocks, keys=keys, position=position))

    def removed(self, window: int, name: int) -> None:
        """Queue a Removed of one block; it joins the previous event if this is a Removed of the same window."""
        if self._late:
            self._removed.setdefault(window, []).append(name)
        elif self._queue and (self._queue[-1].kind, self._queue[-1].window) == ("removed", window):
            self._queue[-1].names.append(name)
        else:
            self._add(Queued(window, "removed", names=[name]))

    def updated(
        self,
        window: int,
        name: int,
        *,
        levels: tuple[int, int] | None = None,
        priorities: tuple[int, int] | None = None,
    ) -> None:
        """Queue an Updated: a block has changed its level or its priority, from and to."""
        self._add(Queued(window, "updated", names=[name], levels=levels, priorities=priorities))

    def _send_removed(self, windows: Iterable[int]) -> None:
        for window in windows:
            names = self._removed.pop(window, None)
            if names:
                self._add(Queued(window, "removed", names=names))

    def take(self) -> list[Queued]:
        """End the iteration: return its events, in order."""
        self._send_removed(sorted(self._removed))
        taken, self._queue = self._queue, []
        return taken
