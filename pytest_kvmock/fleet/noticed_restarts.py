"""What a router knows that notices the restart of a worker which nobody announced: by its event ids, which begin anew.

Theory of operation. Of such a restart a router is not told, and two answers are right from then on: that of an index which noticed
nothing, as the reference index, and that of one which dropped what was held at the first event whose id went back, and kept what came
since. The second one is here: of each worker that began anew an index of its own, of the events since. Prefill tokens of the requests
that were sent there since it restarted follow from what overlapped by that index at the pick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_kvmock.router.index import RadixIndex, RadixIndexError
from pytest_kvmock.router.routing import stream_of

if TYPE_CHECKING:
    from pytest_kvmock.events import RouterEvent
    from pytest_kvmock.router.routing import RouterRequest, Worker


class NoticedRestarts:
    """Unannounced restarts of workers, as a router notices them; run after run of a fleet.

    Attributes:
        noticed: of each worker that began anew, by which event, as text.
    """

    def __init__(self) -> None:
        self._last: dict[Worker, int] = {}  # the id of the last event, of all workers
        self._watched: set[Worker] = set()  # those that restarted
        self._since: dict[Worker, RadixIndex] = {}
        self.noticed: dict[Worker, str] = {}
        self._prefill: dict[
            RouterRequest, tuple[Worker, int]
        ] = {}  # where it was sent, and tokens of it to compute there

    def restarted(self, workers: Iterable[Worker]) -> None:
        """Note that workers have restarted, and nobody says so; their requests are lost."""
        self._watched.update(workers)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone, or begins anew and says so."""
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

    def overlaps(self, request: RouterRequest) -> dict[Worker, int]:
        """Return how many leading blocks of a prompt the workers hold that began anew."""
        return {
            worker: index.find_matches(request.local_hashes).scores.get(stream_of(worker), 0)
            for worker, index in self._since.items()
        }

    def dispatched(self, request: RouterRequest, worker: Worker, held: int) -> None:
        """Count a request that goes to a worker, which holds so many leading blocks of its prompt by an index that notices restarts."""
        if worker in self._watched:
            self._prefill[request] = worker, max(0, request.prompt_tokens - held * request.block_size)

    def prefilled(self, request: RouterRequest) -> None:
        """Take away the tokens of a prompt that is computed, or of a request that is over."""
        self._prefill.pop(request, None)

    def prefill_tokens(self, worker: Worker) -> int | None:
        """Return the prefill tokens of a worker; None: it did not restart."""
        return sum(tokens for of, tokens in self._prefill.values() if of == worker) if worker in self._watched else None
