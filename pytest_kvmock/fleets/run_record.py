"""The recording of a fleet with `record`: a sample of each real pass, and the candidates of each pick with true values.

Loads come from the load book, overlaps from an index that gets every event at its publication.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from pytest_kvmock.fleets.report.rows import PassSample, PickRecord
from pytest_kvmock.fleets.routing.routing import Candidate

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet_events import TrueCaches
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker


# Fields of a candidate in its order: those before `usage`, and `held_blocks`, the last one.
_COLUMNS = ("overlap", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting", "held_blocks")


class Recorder:
    """Keeps a sample of each real pass, and the candidates of each pick, in arrays.

    Args:
        caches: the blocks that each engine holds by its published events.

    Attributes:
        caches: as given.
        samples: the columns of `PassSample`, by name.
    """

    def __init__(self, caches: TrueCaches) -> None:
        self.caches = caches
        self.samples: dict[str, array[Any]] = {name: array("d" if name == "ms" else "q") for name in PassSample._fields}
        self._requests: list[RouterRequest] = []
        self._at: list[tuple[float, int, Worker, Mapping[Worker, int]]] = []
        self._arrived: dict[tuple[RouterRequest, Phase | None], Mapping[Worker, int]] = {}
        self._starts = array("q", [0])
        self._workers: list[Worker] = []
        self._fixed: dict[Worker, tuple[int, int | None]] = {}
        self._columns = {name: array("q") for name in _COLUMNS}
        self._shown = array("q")
        self._usage = array("d")

    def passed(self, now_ms: float, engines: Iterable[tuple[int, MockEngine]]) -> None:
        """Take a sample of the engines whose pass has ended, given with their positions."""
        for position, engine in engines:
            metrics = engine.metrics
            sample = PassSample(
                now_ms, position, metrics.running, metrics.waiting, metrics.active_blocks, engine.prefill_tokens
            )
            for column, value in zip(self.samples.values(), sample, strict=True):
                column.append(value)

    def arrived(self, request: RouterRequest) -> None:
        """Note the blocks of an arriving prompt that each worker truly holds."""
        self._arrived[request, request.phase] = self.caches.overlaps(request)

    def picked(
        self, request: RouterRequest, worker: Worker, candidates: Sequence[Candidate], shown: Mapping[Worker, int]
    ) -> None:
        """Keep the candidates of a pick.

        Args:
            request: the request, before it counts on the worker.
            worker: the picked worker.
            candidates: all of them, with loads by the load book.
            shown: the overlaps that the router was shown.
        """
        true = self.caches.overlaps(request)
        self._requests.append(request if request.phase is None else copy(request))  # it changes with the phase
        self._at.append((request.now_ms, request.attempt, worker, self._arrived[request, request.phase]))
        for each in candidates:
            row = each._replace(overlap=true.get(each.worker, 0), held_blocks=self.caches.held_blocks(each.worker))
            self._workers.append(each.worker)
            self._fixed[each.worker] = each.num_blocks, each.max_batched_tokens
            for name, column in self._columns.items():
                column.append(getattr(row, name))
            self._shown.append(shown.get(each.worker, 0))
            self._usage.append(each.usage)
        self._starts.append(len(self._workers))

    def __len__(self) -> int:
        return len(self._requests)

    def pick(self, at: int) -> PickRecord:
        """Return a pick by its place in `Report.picks`, with the candidates' true values."""
        now_ms, attempt, chosen, overlaps = self._at[at]
        request = copy(self._requests[at])
        request.now_ms, request.attempt, request.overlaps, request.status = now_ms, attempt, overlaps, "waiting"
        rows = slice(self._starts[at], self._starts[at + 1])
        columns = (column[rows] for column in self._columns.values())
        make: Any = Candidate
        candidates = tuple(
            make(worker, *loads, usage, *self._fixed[worker], held)
            for worker, usage, *loads, held in zip(self._workers[rows], self._usage[rows], *columns, strict=True)
        )
        return PickRecord(request, chosen, candidates, tuple(self._shown[rows]))
