"""The candidates of a pick: each worker as it stands, with loads by the load book, or by what the engines really do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from pytest_kvmock.router.routing import Candidate

if TYPE_CHECKING:
    from pytest_kvmock.clock.mock_engine import MockEngine
    from pytest_kvmock.fleet.fleet_events import KnownCaches
    from pytest_kvmock.router.loads import Load, LoadBook
    from pytest_kvmock.router.routing import RouterRequest, Worker


class Offer:
    """Makes the candidates of each pick.

    Args:
        engines: the engines, by worker, also those that come later.
        book: the load book, and with it who is there.
        cordoned: who is there and cannot be picked.
        caches: how many blocks each worker holds.
        every_ms: how old the loads of engines may be that a router is shown; 0: they are read at each pick. None: it is shown those of
            the load book.
    """

    def __init__(
        self,
        engines: Mapping[Worker, MockEngine],
        book: LoadBook,
        cordoned: Collection[Worker],
        caches: KnownCaches,
        every_ms: float | None,
    ) -> None:
        self._engines = engines
        self._book = book
        self._cordoned = cordoned
        self._caches = caches
        self._every_ms = every_ms
        self._read_ms = -math.inf
        self._read: dict[Worker, tuple[int, int, int, int, float]] = {}

    @property
    def workers(self) -> Mapping[Worker, Load]:
        """Who can be picked, with its load."""
        loads, cordoned = self._book.loads, self._cordoned
        return {worker: load for worker, load in loads.items() if worker not in cordoned} if cordoned else loads

    def shown(self, request: RouterRequest, overlaps: Mapping[Worker, int], now_ms: float) -> tuple[Candidate, ...]:
        """Return the candidates for a request as the router is shown them; see `of_book`."""
        if self._every_ms is None:
            return tuple(self.of_book(request, overlaps))
        return tuple(self._of_engines(request, overlaps, now_ms))

    def of_book(self, request: RouterRequest, overlaps: Mapping[Worker, int]) -> list[Candidate]:
        """Return the candidates for a request, with loads by the load book.

        Args:
            request: the request.
            overlaps: how many leading blocks of its prompt each worker holds.
        """
        chain, held, found = request.sequence_hashes, self._caches.held_blocks, []
        make, engines, overlap_of = (
            tuple.__new__,
            self._engines,
            overlaps.get,
        )  # by `Candidate` itself it takes twice as long
        for worker, load in self.workers.items():
            engine = engines[worker]
            scheduler, manager = engine.scheduler, engine.worker.manager
            capacity = manager.max_capacity
            fields = (
                worker,
                overlap_of(worker, 0),
                load.prefill_tokens,
                load.blocks,
                load.new_blocks(chain),
                load.requests,
                len(scheduler.waiting) + len(scheduler.parked),
                manager.num_active_blocks / capacity,
                capacity,
                engine.args.max_num_batched_tokens,
                held(worker),
            )
            found.append(make(Candidate, fields))
        return found

    def _of_engines(self, request: RouterRequest, overlaps: Mapping[Worker, int], now_ms: float) -> Iterable[Candidate]:
        if not self._read or now_ms - self._read_ms >= (self._every_ms or 0.0):
            self._read_ms = now_ms
            self._read = {worker: self._engine_load(worker) for worker in self._book.loads}
        full, held = len(request.sequence_hashes), self._caches.held_blocks
        for worker in self.workers:
            engine, overlap = self._engines[worker], overlaps.get(worker, 0)
            prefill, blocks, active, waiting, usage = self._read.get(worker, (0, 0, 0, 0, 0.0))
            yield Candidate(
                worker,
                overlap,
                prefill,
                blocks,
                full - overlap,
                active,
                waiting,
                usage,
                engine.worker.manager.max_capacity,
                engine.args.max_num_batched_tokens,
                held(worker),
            )

    def _engine_load(self, worker: Worker) -> tuple[int, int, int, int, float]:
        """Return of an engine: tokens of prompts that are yet to be computed, blocks in use, open requests, how many wait, usage."""
        engine = self._engines[worker]
        scheduler = engine.scheduler
        waiting = (*scheduler.waiting, *scheduler.parked)
        requests = (*scheduler.running, *waiting)
        prefill = sum(max(0, each.prompt_tokens - each.computed_tokens) for each in requests)
        blocks = engine.worker.manager.num_active_blocks
        return prefill, blocks, len(requests), len(waiting), blocks / engine.worker.manager.max_capacity
