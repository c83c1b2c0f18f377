"""Blocks that become free when a step in flight is processed, as in vLLM with a connector that loads.

Theory of operation. With two batches in flight, a step may still write blocks of a request that has ended, was aborted
or was preempted. A load into these blocks would not wait for the write. With a loading connector, these blocks
therefore leave their request at once, and return to the queue when the newest step scheduled by then is processed
(vLLM: `_free_request_blocks`, `_drain_deferred_frees`). Only steps that compute something count. An entry that is not
due blocks the entries behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol


class FreeingManager(Protocol):
    """The methods that a block manager must have."""

    def free(self, request: object, /) -> None:
        """Free all blocks of a request, group by group, tail first."""

    def take_blocks(self, request: object, /) -> list[int]:
        """Take all blocks from a request, group by group, without freeing them."""

    def give_back(self, blocks: list[int], /) -> None:
        """Free blocks that were taken from a request or that were copied, the last one first."""


class DeferredFrees:
    """The blocks of one engine that wait for a step.

    Args:
        manager: the manager of the blocks.
        defers: whether blocks wait at all: the connector loads, and two batches are in flight.

    Attributes:
        defers: as given.
        scheduled: the number of the newest scheduled step; steps that compute nothing have no number.
    """

    def __init__(self, manager: FreeingManager, *, defers: bool) -> None:
        self.defers = defers
        self.scheduled = 0
        self._manager = manager
        self._processed = 0
        self._waiting: deque[tuple[int, list[int]]] = deque()

    def __len__(self) -> int:
        return sum(len(blocks) for _, blocks in self._waiting)

    def step_scheduled(self) -> int:
        """Count a step that computes something and return its number; call it before its requests record the step."""
        self.scheduled += 1
        return self.scheduled

    def step_processed(self) -> None:
        """Count the oldest step in flight as processed, and free the blocks that waited for it."""
        self._processed += 1
        while self._waiting and self._waiting[0][0] <= self._processed:
            self._manager.give_back(self._waiting.popleft()[1])

    def free(self, request: object, last_step: int) -> None:
        """Free the blocks of a request: now if its last step is processed, else when the newest step is.

        Args:
            request: the request.
            last_step: the number of the last step that computed any of its tokens; 0 if none did.
        """
        if not self.defers or last_step <= self._processed:
            self._manager.free(request)
            return
        blocks = self._manager.take_blocks(request)
        if blocks:
            self._waiting.append((self.scheduled, blocks))

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Free the blocks that the step being scheduled copies, and their copies.

        They are freed now, or when the next step that computes something is processed.
        """
        blocks = [block for pair in reversed(pairs) for block in reversed(pair)]
        if not blocks:
            return
        if self.defers:
            self._waiting.append((self.scheduled + 1, blocks))
        else:
            self._manager.give_back(blocks)
