"""What a run notes for its report, as it goes: picks, who was there when, incidents; and with `record` much more.

One note a pick and a request, nothing a pass. With `record` an array has a sample a real pass, and the candidates of each pick
are kept as they truly were: loads by the load book, overlaps by an index that hears every event as it is published.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from pytest_kvmock.report.rows import Happened, PassSample, Pick, PickRecord, WorkerRow
from pytest_kvmock.router.routing import Candidate

if TYPE_CHECKING:
    from pytest_kvmock.fleet.fleet_events import TrueCaches
    from pytest_kvmock.fleet.mock_engine import MockEngine
    from pytest_kvmock.router.routing import RouterRequest, Worker


# Of a row, what an engine counts over all its runs.
_COUNTED = ("passes", "prompt_tokens_computed", "blocks_evicted", "preemptions")


class _Term:
    """A worker from when it came until it went, with what its engine had counted before."""

    __slots__ = ("before", "engine", "last_pick", "open", "since", "until_ms")

    def __init__(self, engine: MockEngine, since: tuple[float, int]) -> None:
        self.engine = engine
        self.before = engine.row
        self.since = since
        self.until_ms: float | None = None
        self.last_pick: int | None = None  # how many picks there were when it was a candidate no more
        self.open = 0


class RunNotes:
    """Notes of one run.

    Args:
        engines: the engines at its start, by worker.
        start_ms: when it starts.
        recorder: notes much more; None: nothing does.

    Attributes:
        picks: the choices of the router, in order.
        happened: the incidents.
        recorder: as above.
    """

    def __init__(self, engines: Mapping[Worker, MockEngine], start_ms: float, recorder: Recorder | None = None) -> None:
        self.picks: list[Pick] = []
        self.happened: list[Happened] = []
        self.recorder = recorder
        self._terms = {worker: _Term(engine, (start_ms, 0)) for worker, engine in engines.items()}
        self._open: dict[RouterRequest, tuple[_Term, int]] = {}

    def picked(self, request: RouterRequest, pick: Pick) -> None:
        """Note a choice; the request is open from the next one on."""
        self.picks.append(pick)
        self._open[request] = self._terms[pick.worker], len(self.picks)

    def ended(self, request: RouterRequest) -> None:
        """Note that a request is open no more."""
        noted = self._open.pop(request, None)
        if noted is not None:
            term, since = noted
            # Of one that ends on a worker which left, only the picks count that this was a candidate of.
            upto = len(self.picks) if term.last_pick is None else term.last_pick
            term.open += max(0, upto - since)

    def no_candidate(self, worker: Worker) -> None:
        """Note that the router is not offered a worker any more: as that leaves, or as its crash is noticed."""
        self._terms[worker].last_pick = len(self.picks)

    def happens(self, now_ms: float, kind: str, worker: int, ranks: Any, lost: int = 0) -> None:
        """Note an incident: who comes, and who goes.

        Args:
            now_ms: when.
            kind: what.
            worker: the id of the worker.
            ranks: what the router calls its ranks, or the worker itself; of a join a mapping of these to their engines.
            lost: how many requests it lost.
        """
        self.happened.append(Happened(now_ms, kind, worker, lost))
        for each in ranks:
            if kind == "join":
                self._terms[each] = _Term(ranks[each], (now_ms, len(self.picks)))
            elif kind in ("crash", "leave"):
                self._terms[each].until_ms = now_ms
            if self.recorder is not None and kind == "join":
                self.recorder.caches.join(each, ranks[each])
            elif self.recorder is not None and kind in ("crash", "restart"):
                self.recorder.caches.remove(each)

    def close(self, now_ms: float) -> list[WorkerRow]:
        """End the notes; what each worker did, in the order in which they came."""
        for request in list(self._open):
            self.ended(request)
        found = []
        for position, (worker, term) in enumerate(self._terms.items()):
            row, before = term.engine.row, term.before
            did: dict[str, Any] = {name: getattr(row, name) - getattr(before, name) for name in _COUNTED}
            found.append(
                row._replace(
                    worker=worker,
                    position=position,
                    since_ms=term.since[0],
                    until_ms=now_ms if term.until_ms is None else term.until_ms,
                    open_requests=term.open,
                    picks=(len(self.picks) if term.last_pick is None else term.last_pick) - term.since[1],
                    **did,
                )
            )
        return found


# ---------------------------------------------------------------------------------------------------------- record


# Of a candidate, in its order: what stands before its usage, and `held_blocks`, which is its last.
_COLUMNS = ("overlap", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting", "held_blocks")


class Recorder:
    """Keeps a sample a real pass, and the candidates of each pick, in arrays.

    Args:
        caches: what each engine holds, by what it published.

    Attributes:
        caches: as above.
        samples: the columns of `PassSample`, by name.
    """

    def __init__(self, caches: TrueCaches) -> None:
        self.caches = caches
        self.samples: dict[str, array[Any]] = {name: array("d" if name == "ms" else "q") for name in PassSample._fields}
        self._requests: list[RouterRequest] = []
        self._at: list[tuple[float, int, Worker, Mapping[Worker, int]]] = []
        self._arrived: dict[RouterRequest, Mapping[Worker, int]] = {}
        self._starts = array("q", [0])
        self._workers: list[Worker] = []
        self._fixed: dict[Worker, tuple[int, int | None]] = {}
        self._columns = {name: array("q") for name in _COLUMNS}
        self._shown = array("q")
        self._usage = array("d")

    def passed(self, now_ms: float, engines: Iterable[tuple[int, MockEngine]]) -> None:
        """Take a sample of engines, by their position, whose pass has ended."""
        for position, engine in engines:
            metrics = engine.metrics
            sample = PassSample(
                now_ms, position, metrics.running, metrics.waiting, metrics.active_blocks, engine.prefill_tokens
            )
            for column, value in zip(self.samples.values(), sample, strict=True):
                column.append(value)

    def arrived(self, request: RouterRequest) -> None:
        """Note what each worker truly holds of a prompt that arrives."""
        self._arrived[request] = self.caches.overlaps(request)

    def picked(
        self, request: RouterRequest, worker: Worker, candidates: Sequence[Candidate], shown: Mapping[Worker, int]
    ) -> None:
        """Keep the candidates of a pick.

        Args:
            request: the request, before it counts on the worker.
            worker: who was picked.
            candidates: all of them, with loads by the load book.
            shown: the overlaps that the router was shown.
        """
        true = self.caches.overlaps(request)
        self._requests.append(request)
        self._at.append((request.now_ms, request.attempt, worker, self._arrived[request]))
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
        """Return a pick by its place in `Report.picks`, with the candidates as they truly were."""
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
