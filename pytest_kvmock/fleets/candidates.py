"""The candidates of a pick: each worker at that moment, with loads from the load book or from the engines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_kvmock.fleets.clock.engine_loads import EngineLoads, load_of
from pytest_kvmock.fleets.routing.routing import Candidate, stream_of
from pytest_kvmock.values.load_stat import FIRST_VERSION, LoadReading, LoadStat

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet_events import KnownCaches
    from pytest_kvmock.fleets.routing.load_feed import LoadFeed
    from pytest_kvmock.fleets.routing.loads import Load, LoadBook
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker

_Load: TypeAlias = tuple[int, int, int, int, float]
"""Prompt tokens still to compute, blocks in use, open requests, waiting requests, usage."""

_IDLE: Final[_Load] = (0, 0, 0, 0, 0.0)


class Offer:
    """Makes the candidates of each pick.

    Args:
        engines: the engines, by worker; engines that join later are added to it.
        book: the load book, which also lists the workers that are there.
        cordoned: workers that are there and cannot be picked.
        caches: how many blocks each worker holds.
        feed: the source of the loads that the router sees.
        start_ms: when the run starts.

    Attributes:
        of: the workers that can become candidates, those of one role; None for all.
    """

    def __init__(
        self,
        engines: Mapping[Worker, MockEngine],
        book: LoadBook,
        cordoned: Collection[Worker],
        caches: KnownCaches,
        feed: LoadFeed,
        *,
        start_ms: float,
    ) -> None:
        self._engines = engines
        self._book = book
        self._cordoned = cordoned
        self._caches = caches
        self._feed = feed
        self._start_ms = start_ms
        self.of: Collection[Worker] | None = None
        self._read_ms = -math.inf
        self._read: dict[Worker, tuple[_Load, LoadReading]] = {}  # here `age_ms` of a reading is the time it was read
        self._streams: dict[Worker, EngineLoads] = {}
        self._arriving: dict[Worker, deque[tuple[float, LoadReading]]] = {}
        self.join(engines, start_ms)

    @property
    def workers(self) -> Mapping[Worker, Load]:
        """The workers that can be picked, each with its load."""
        loads, cordoned = self._book.loads, self._cordoned
        if self.of is not None:
            loads = {worker: load for worker, load in loads.items() if worker in self.of}
        return {worker: load for worker, load in loads.items() if worker not in cordoned} if cordoned else loads

    def shown(self, request: RouterRequest, overlaps: Mapping[Worker, int], now_ms: float) -> tuple[Candidate, ...]:
        """Return the candidates for a request as the router sees them; see `of_book`."""
        if self._feed.source == "router":
            return tuple(self.of_book(request, overlaps))
        return tuple(self._of_engines(request, overlaps, now_ms))

    def of_book(self, request: RouterRequest, overlaps: Mapping[Worker, int]) -> list[Candidate]:
        """Return the candidates for a request, with loads by the load book.

        Args:
            request: the request.
            overlaps: the number of leading blocks of its prompt that each worker holds.
        """
        chain, held, found = request.sequence_hashes, self._caches.held_blocks, []
        make, engines, overlap_of = (
            tuple.__new__,
            self._engines,
            overlaps.get,
        )  # calling `Candidate` would take twice as long
        for worker, load in self.workers.items():
            engine = engines[worker]
            scheduler, manager = engine.inside.scheduler, engine.worker.manager
            capacity = manager.num_blocks
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
                None,
            )
            found.append(make(Candidate, fields))
        return found

    def _of_engines(self, request: RouterRequest, overlaps: Mapping[Worker, int], now_ms: float) -> Iterable[Candidate]:
        if self._feed.source == "stream":
            self._receive(now_ms)
        elif not self._read or now_ms - self._read_ms >= self._feed.every_ms:
            self._poll(now_ms)
        full, held = len(request.sequence_hashes), self._caches.held_blocks
        for worker in self.workers:
            engine, overlap = self._engines[worker], overlaps.get(worker, 0)
            (prefill, blocks, active, waiting, usage), reading = self._read.get(worker, (_IDLE, None))
            if reading is not None:
                reading = reading._replace(age_ms=now_ms - reading.age_ms)
            yield Candidate(
                worker,
                overlap,
                prefill,
                blocks,
                full - overlap,
                active,
                waiting,
                usage,
                engine.worker.manager.num_blocks,
                engine.args.max_num_batched_tokens,
                held(worker),
                reading,
            )

    def _is_silent(self, worker: Worker, ms: float) -> bool:
        from_ms = self._feed.silent.get(worker)
        return from_ms is not None and ms >= self._start_ms + from_ms

    def _poll(self, now_ms: float) -> None:
        """Read the load of every engine; a silent engine keeps its last reading."""
        self._read_ms = now_ms
        there = {}
        for worker in self._book.loads:
            before = self._read.get(worker)
            if not self._is_silent(worker, now_ms):
                number = 0 if before is None else before[1].number + 1
                stat = load_of(self._engines[worker], stream_of(worker)[1])
                there[worker] = self._engine_load(worker), LoadReading(stat, number, now_ms)
            elif before is not None:
                there[worker] = before
        self._read = there

    def _engine_load(self, worker: Worker) -> _Load:
        """Return the present load of an engine."""
        engine = self._engines[worker]
        scheduler = engine.inside.scheduler
        waiting = (*scheduler.waiting, *scheduler.parked)
        requests = (*scheduler.running, *waiting)
        prefill = sum(max(0, each.prompt_tokens - each.computed_tokens) for each in requests)
        blocks = engine.worker.manager.num_active_blocks
        return prefill, blocks, len(requests), len(waiting), blocks / engine.worker.manager.num_blocks

    # ------------------------------------------------------------------------------------------------- the stream

    def join(self, engines: Mapping[Worker, MockEngine], now_ms: float) -> None:
        """If the feed is a stream, start the load streams of engines and drop earlier readings of their workers."""
        if self._feed.source != "stream":
            return
        for worker, engine in engines.items():
            self._streams[worker] = EngineLoads(engine, now_ms, rank=stream_of(worker)[1], interval=self._feed.interval)
            self._arriving[worker] = deque()
            self._read.pop(worker, None)

    def passed(self, engines: Collection[MockEngine], done: ForwardPass, now_ms: float) -> None:
        """Note a pass that has ended, if engines publish their loads."""
        for worker, stream in self._streams.items():
            if self._engines[worker] in engines:
                prefill = any(each.prompt_tokens for each in done.scheduled)
                stream.passed(done.start_ms, now_ms, prefill=prefill)

    def _receive(self, now_ms: float) -> None:
        """Read the load messages that have arrived in each stream by now."""
        feed = self._feed
        for worker in self._book.loads:
            arriving = self._arriving[worker]
            for sent_ms, number, stat in self._streams[worker].take(now_ms):
                if not self._is_silent(worker, sent_ms):
                    jumped = number + feed.jumps.get(worker, 0) * (number + 1)
                    read = LoadStat.of(stat.entries[:FIRST_VERSION]) if worker in feed.short else stat
                    arriving.append((sent_ms + feed.late_ms, LoadReading(read, jumped, sent_ms)))
            while arriving and arriving[0][0] <= now_ms:
                reading = arriving.popleft()[1]
                self._read[worker] = self._load_by(worker, reading.stat), reading

    def _load_by(self, worker: Worker, stat: LoadStat) -> _Load:
        """Return the load of a worker by its published reading."""
        blocks, requests = stat.used_tokens // self._engines[worker].args.block_size, stat.running + stat.waiting
        usage = stat.used_tokens / stat.max_tokens
        return stat.waiting_uncached_tokens, blocks, requests, stat.waiting, usage
