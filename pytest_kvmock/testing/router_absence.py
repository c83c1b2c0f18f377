"""Scenes of the contract of routers in which workers are no candidates: nobody is there, or one is cordoned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import pytest

from pytest_kvmock.report.routing_figures import most, most_times

if TYPE_CHECKING:
    from pytest_kvmock.clock import MockEngine
    from pytest_kvmock.fleet import Fleet
    from pytest_kvmock.report.report import Report
    from pytest_kvmock.report.rows import Pick
    from pytest_kvmock.router.routing import Worker
    from pytest_kvmock.traces import TraceRequest

AT_MS: Final = 150.0
"""When the first of it happens: in the midst of the trace."""

LATER_MS: Final = 1500.0
"""When the trace is long over."""

WORKERS: Final = 3
"""Workers that go; of five one is cordoned, so that four share its work."""

_MORE: Final = 1.5
"""By how many times a fleet may be less even while a worker is cordoned, where it is not even by itself."""


class RouterAbsence:
    """Scenes of workers that are no candidates; a part of `RouterContract`, which plays them."""

    packs: ClassVar[bool]

    if TYPE_CHECKING:  # what it has of the contract

        def _engine(self) -> MockEngine: ...

        def _rows(self) -> list[TraceRequest]: ...

        def _burst(self, ms: float, apart_ms: float = 0.0, first: int = ...) -> list[TraceRequest]: ...

        def _played(self, happens: Callable[[Fleet], object] | None = None, **options: Any) -> Report: ...

        def _judge(self, where: str, report: Report) -> None: ...

        def _each_is_picked(
            self, where: str, report: Report, workers: Sequence[Worker], of: Callable[[Pick], bool]
        ) -> None: ...

        def _fail(self, text: str) -> NoReturn: ...

    def test_requests_wait_while_nobody_is_there(self) -> None:
        """The last worker is lost, leaves, or is cordoned; requests arrive, and are served as others join."""
        gone_ms, joins_ms = AT_MS + 10 * (WORKERS - 1), 2 * AT_MS
        for kind in ("crash", "leave", "cordon"):

            def happens(fleet: Fleet, kind: str = kind) -> None:
                for worker in range(WORKERS):
                    getattr(fleet.at(AT_MS + 10 * worker), kind)(worker)
                for at in range(2):
                    fleet.at(joins_ms + 40 * at).join(engine=self._engine())

            where = f"{kind} of all workers, of the last one at {gone_ms:g} ms, and others join from {joins_ms:g} ms on"
            self._judge(where, self._played(happens))

    def test_a_cordoned_worker_gets_nothing(self) -> None:
        """A worker is no candidate for a while, and nobody says so: the others share its work, and then it gets some again."""
        again_ms, workers = 2 * LATER_MS, WORKERS + 2
        back_ms = (LATER_MS + again_ms) / 2
        bursts = zip((LATER_MS, LATER_MS, again_ms, again_ms), range(2**40, 2**41, 2**20), strict=False)
        rows = [*self._rows(), *(each for ms, first in bursts for each in self._burst(ms, first=first))]

        def happens(fleet: Fleet) -> None:
            fleet.at(AT_MS).cordon(1)
            fleet.at(back_ms).uncordon(1)

        def shares(report: Report) -> dict[Worker, float]:
            picked = [pick.worker for pick in report.picks if LATER_MS <= pick.ms < back_ms]
            return {worker: picked.count(worker) for worker in report.workers if worker != 1}

        where = f"worker 1 is cordoned at {AT_MS:g} ms, and a burst of prompts of which nobody holds a block comes to the others"
        report = self._played(happens, workers=workers, rows=rows)
        self._judge(where, report)
        if self.packs:
            pytest.skip(f"{type(self).__name__}.packs is True: {where}: whether they share it was not checked")
        found, others = most(shares(report)), workers - 1
        alone = most(shares(self._played(workers=workers, rows=rows)))
        limit = max(most_times(others), _MORE * alone.times if alone else 0.0)
        if found is None:
            self._fail(f"{where}: none of the others got any until it was uncordoned")
        if found.times > limit:
            counts = ", ".join(f"worker {worker!r}: {count:g}" for worker, count in shares(report).items())
            self._fail(
                f"{where}: worker {found.worker!r} has {found.times:.2f} times the mean of their requests, must be at most {limit:.3g} times "
                f"({counts})"
            )
        where = f"worker 1 is cordoned for a while, and then a burst of new prompts comes at {again_ms:g} ms"
        self._each_is_picked(where, report, [1], lambda pick: pick.ms >= again_ms)
