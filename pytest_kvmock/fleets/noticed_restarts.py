"""The correct overlaps for a router that notices an unannounced restart by event ids that begin again.

Theory of operation. A router is not notified of an unannounced restart, so two answers are right from then on. One is
the answer of an index that noticed nothing, like the reference index. The other is the answer of an index that dropped
the worker's blocks at the first event whose id went back, and kept later blocks. This module computes the second one:
each restarted worker has a separate index of the events since. The prefill tokens of requests sent there since the
restart follow from the overlap in that index at the pick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_kvmock.fleets.routing.routing import stream_of
from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import NameForms, RouterRequest, Worker
    from pytest_kvmock.values.events import RouterEvent


class NoticedRestarts:
    """Unannounced restarts of workers as a router notices them, over all runs of a fleet.

    Attributes:
        noticed: for each worker that restarted, the event that showed it, as text.
    """

    def __init__(self) -> None:
        self._last: dict[Worker, int] = {}  # the id of the last event, for all workers
        self._watched: set[Worker] = set()  # those that restarted
        self._since: dict[Worker, RadixIndex] = {}
        self.noticed: dict[Worker, str] = {}
        self._prefill: dict[RouterRequest, tuple[Worker, int]] = {}  # the worker, and the tokens to compute there

    def restarted(self, workers: Iterable[Worker]) -> None:
        """Note that workers have restarted unannounced; their requests are lost."""
        self._watched.update(workers)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that has left, or whose restart is announced."""
        self._watched.discard(worker)
        self._last.pop(worker, None)
        self._since.pop(worker, None)
        self.noticed.pop(worker, None)

    def applied(self, event: RouterEvent, worker: Worker, new_index: Callable[[], RadixIndex], now_ms: float) -> None:
        """Note an event of a worker that was delivered.

        Args:
            event: the event.
            worker: its worker.
            new_index: makes an empty index of such events.
            now_ms: when, in virtual milliseconds.
        """
        number, last = event.event.event_id, self._last.get(worker, -1)
        self._last[worker] = number
        if number <= last and worker in self._watched:
            self._since[worker] = new_index()
            self.noticed[worker] = f"event {number} at {now_ms:g} ms"
        if worker in self._since:
            with suppress(RadixIndexError):
                self._since[worker].apply(event)

    def overlaps(self, request: RouterRequest, forms: NameForms) -> dict[Worker, int]:
        """Return the leading blocks of a prompt on workers that restarted; `forms` knows the form of each worker's
        hashes.
        """
        return {
            worker: forms.find(index.find_matches, request.hashes).get(stream_of(worker), 0)
            for worker, index in self._since.items()
        }

    def dispatched(self, request: RouterRequest, worker: Worker, held: int) -> None:
        """Count a request that goes to a worker; an index that notices restarts has `held` leading blocks of its prompt
        there.
        """
        if worker in self._watched:
            self._prefill[request] = worker, max(0, request.prompt_tokens - held * request.block_size)

    def prefilled(self, request: RouterRequest) -> None:
        """Remove the tokens of a prompt that is computed, or of a request that is over."""
        self._prefill.pop(request, None)

    def prefill_tokens(self, worker: Worker) -> int | None:
        """Return the prefill tokens of a worker; None if it did not restart."""
        return sum(tokens for of, tokens in self._prefill.values() if of == worker) if worker in self._watched else None
