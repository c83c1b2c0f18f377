"""Scenes of the router contract in which workers are no candidates: no worker is there, or one is cordoned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.fleets.report.routing_figures import most, most_times
from pytest_kvmock.testing.router.router_part import RouterPart

if TYPE_CHECKING:
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.fleets.routing.routing import Worker

AT_MS: Final = 150.0
"""Time of the first incident, in the middle of the trace."""

LATER_MS: Final = 1500.0
"""A time long after the end of the trace."""

WORKERS: Final = 3
"""Workers that leave; two more make a fleet of five, in which four share the work of a cordoned one."""

_MORE: Final = 1.5
"""Factor by which the imbalance of a fleet may grow while a worker is cordoned."""


class RouterAbsence(RouterPart):
    """The scenes of `RouterContract` in which workers are no candidates."""

    def test_requests_wait_while_nobody_is_there(self) -> None:
        """The last worker is lost, leaves, or is cordoned. Requests arrive and are served when others join."""
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
        """A worker is no candidate for a while, without notice: the others share its work, and afterwards it gets some
        again.
        """
        again_ms, workers = 2 * LATER_MS, WORKERS + 2
        back_ms = (LATER_MS + again_ms) / 2
        bursts = zip((LATER_MS, LATER_MS, again_ms, again_ms), range(2**30, 2**31, 2**20), strict=False)
        rows = [*self._rows(), *(each for ms, first in bursts for each in self._burst(ms, first=first))]

        def happens(fleet: Fleet) -> None:
            fleet.at(AT_MS).cordon(1)
            fleet.at(back_ms).uncordon(1)

        def shares(report: Report) -> dict[Worker, float]:
            picked = [pick.worker for pick in report.picks if LATER_MS <= pick.ms < back_ms]
            return {worker: picked.count(worker) for worker in report.workers if worker != 1}

        where = f"worker 1 is cordoned at {AT_MS:g} ms, and a burst of prompts of which no worker holds a block comes to the others"  # noqa: E501
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
                f"{where}: worker {found.worker!r} has {found.times:.2f} times the mean of their requests, must be at "
                f"most {limit:.3g} times ({counts})"
            )
        where = f"worker 1 is cordoned for a while, and then a burst of new prompts comes at {again_ms:g} ms"
        self._each_is_picked(where, report, [1], lambda pick: pick.ms >= again_ms)
