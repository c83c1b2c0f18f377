"""How a router must treat the loads that its workers publish: a reading has an age, and no reading does not mean
idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.routing.load_feed import LoadFeed
from pytest_kvmock.testing.router.router_part import RouterPart

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest

_LATER_MS: Final = 6000.0
"""Time of a burst: the last message of a worker that fell silent at 1.5 s is older than three heartbeats."""

_SILENT_MS: Final = 1500.0

_BUSY_MS: Final = 1700.0
_LONG: Final = 300
_PASS_MS: Final = 20.0
"""Requests that come at 1.7 s and generate `_LONG` tokens, one in each pass of 20 ms, are still open then."""

_NOT_ASKED: Final = "reads_load_stream is False: a router that is fed by load streams was not checked"


class StreamedLoads(RouterPart):
    """The part of `RouterContract` about loads that workers publish (SGLang's load stream).

    Attributes:
        reads_load_stream: whether the router uses `Candidate.reading`, like one that subscribes to load streams.
    """

    reads_load_stream: ClassVar[bool] = False

    def test_a_reading_that_is_too_old_is_none(self) -> None:
        """Worker 0 reported that it is idle, and then nothing for more than three heartbeats; a burst goes to worker
        1.
        """
        where = "worker 0 was last heard 5 s ago, as idle, worker 1 just now, with one request"
        counts = self._of_a_burst(where, LoadFeed(silent={0: _SILENT_MS}), workers=2, busy=[1])
        if counts[0] >= counts[1]:
            self._fail(
                f"{where}: of a burst of new prompts worker 0 got {counts[0]} and worker 1 {counts[1]}; expected most "
                "of them on worker 1: a reading that is older than three heartbeats (`reading.is_fresh`) says nothing"
            )

    def test_a_worker_that_said_nothing_is_unknown_and_not_idle(self) -> None:
        """Worker 0 never reported a load; it gets at most an even share of a burst."""
        where = "worker 0 never said anything, workers 1 to 3 just now, with four requests each"
        counts = self._of_a_burst(where, LoadFeed(silent={0: 0.0}), workers=4, busy=[1, 2, 3] * 4)
        total = sum(counts.values())
        if counts[0] > -(-total // 4):
            self._fail(
                f"{where}: of a burst of {total} new prompts worker 0 got {counts[0]}; expected {-(-total // 4)} at "
                "most, its even share: where `reading` is None the load is unknown"
            )

    def test_numbers_that_jump_are_no_loss(self) -> None:
        """Worker 1 is idle, worker 0 is busy; a jump in worker 1's message numbers changes nothing."""
        where = "worker 1 is idle, and the numbers of its messages jump, as sends that failed make them"
        counts = self._of_a_burst(where, LoadFeed(jumps={1: 1000}), workers=2, busy=[0] * 12)
        if counts[0] >= counts[1]:
            self._fail(
                f"{where}, worker 0 has 12 requests: of a burst of new prompts worker 0 got {counts[0]} and worker 1 "
                f"{counts[1]}; expected most of them on worker 1: the next message replaces those that are missing"
            )

    def _of_a_burst(self, where: str, feed: LoadFeed, *, workers: int, busy: Sequence[Worker]) -> dict[Worker, int]:
        """Return how many requests of a burst each worker gets while the `busy` ones serve long requests and `feed`
        carries the loads.
        """
        __tracebackhide__ = True
        if not self.reads_load_stream:
            pytest.skip(_NOT_ASKED)
        size = 2 * self.block_size
        rows: list[FleetRequest | TraceRequest] = [FleetRequest(range(size), 1, 0.0)]  # starts the clock
        moments = [_BUSY_MS + 20.0 * at for at in range(len(busy))]
        for at, ms in enumerate(moments):
            first = 2**28 + size * at
            rows.append(FleetRequest(range(first, first + size), _LONG, ms))

        def happens(fleet: Fleet) -> None:
            for ms, busy_one in zip(moments, busy, strict=True):  # only it can be picked
                for worker in set(range(workers)) - {busy_one}:
                    fleet.at(ms - 5.0).cordon(worker)
                    fleet.at(ms + 5.0).uncordon(worker)

        blocks = 400 + len(busy) * (2 + _LONG // self.block_size)
        report = self._played(
            happens,
            workers=workers,
            num_blocks=blocks,
            rows=[*rows, *self._burst(_LATER_MS)],
            args={"performance_model": (_PASS_MS, _PASS_MS)},
            loads=feed,
        )
        self._judge(where, report)
        picked = [pick.worker for pick in report.picks if pick.ms >= _LATER_MS]
        return {worker: picked.count(worker) for worker in range(workers)}
