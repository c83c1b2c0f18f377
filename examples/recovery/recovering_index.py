"""A small router index that asks its workers for missed events.

A `RouterCursor` decides which events to apply, and when to ask. It asks by a function: `kv_recovery` in the tests, a
request to the worker elsewhere. `Dynamo7072` and `KeepsWhatItHad` are the same index, each with a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from pytest_kvmock import RadixIndex, RadixIndexError, RouterEvent
from pytest_kvmock.oracle import Answer, Events, OverlapScores, RecoveryStep, RouterCursor, TreeDump

Ask = Callable[..., Answer]
"""Called with worker_id, start, end and dp_rank, the fields of a `WorkerQuery`."""


class RecoveringIndex:
    """An index that recovers missed events.

    Args:
        ask: asks a worker.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._cursor = RouterCursor()
        self._tree = RadixIndex()

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker, and ask for missing events before it."""
        key = (event.worker_id, event.event.dp_rank)
        step = self._cursor.observe(event)
        self._take(key, step)
        while step.ask is not None:
            step = self._cursor.answered(step.ask, self._ask(*step.ask))
            self._take(key, step)

    def _take(self, key: tuple[int, int], step: RecoveryStep) -> None:
        if step.replace:  # a dump is complete: all other blocks are dropped
            self._tree.remove_worker_dp_rank(*key)
        for event in step.apply:
            with suppress(RadixIndexError):
                self._tree.apply(event)

    def remove_worker(self, worker_id: int) -> None:
        """Drop a worker that was removed or restarted: its next event is the first."""
        self._tree.remove_worker(worker_id)
        self._cursor.forget(worker_id)

    def find_matches(self, local_hashes: Sequence[int]) -> OverlapScores:
        """Return the number of leading blocks of a prompt that each worker holds."""
        return self._tree.find_matches(local_hashes)


class Dynamo7072(RecoveringIndex):
    """The bug: its cursor is the id of the last applied event, also after a dump, so it asks again at each event."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self._last: dict[tuple[int, int], int] = {}

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker."""
        key, got = (event.worker_id, event.event.dp_rank), event.event.event_id
        last = self._last.get(key, got - 1)
        if got == last + 1:
            self._keep(key, (event,))
        elif got > last:
            answer = self._ask(key[0], last + 1, dp_rank=key[1])
            if isinstance(answer, TreeDump):
                self._tree.remove_worker_dp_rank(*key)
            if isinstance(answer, Events | TreeDump):
                self._keep(key, answer.events)

    def _keep(self, key: tuple[int, int], events: Sequence[RouterEvent]) -> None:
        self._take(key, RecoveryStep(apply=tuple(events)))
        for event in events:
            self._last[key] = event.event.event_id


class KeepsWhatItHad(RecoveringIndex):
    """The bug: it adds a dump to its blocks, so that a block whose Removed was lost stays for ever."""

    def _take(self, key: tuple[int, int], step: RecoveryStep) -> None:
        super()._take(key, step._replace(replace=False))
