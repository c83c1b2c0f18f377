"""Promises of every router to each request.

A refused request is no load, no request waits while others pass it, and a trace makes the same picks again.
"""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Final

import pytest

from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.testing.router.router_part import RouterPart

_LATER_MS: Final = 1500.0
_REFUSED: Final = 24
"""Number of requests that engines refuse, mixed with others."""

_QUEUED: Final = 160
"""Number of equal requests. They come somewhat faster than three workers with few places serve them."""

_PASSED: Final = 80
"""The most requests that may pass a waiting request that came before them."""


class Fairness(RouterPart):
    """The part of `RouterContract` about single requests."""

    def test_what_an_engine_refuses_is_no_load(self) -> None:
        """Engines refuse prompts that are longer than their model allows.

        `finished` is called, and the router counts no part of them any more.
        """
        size = self.block_size
        longest = 40 * size
        firsts = range(2**31, 2**31 + _REFUSED * 2**16, 2**16)
        refused = [FleetRequest(range(first, first + longest + size), 4, 12.0 * at) for at, first in enumerate(firsts)]
        where = f"engines refuse {_REFUSED} prompts that are too long, and a burst of new prompts comes later"
        args = {"semantics": "1.6.1", "max_model_len": longest}
        try:
            report = self._played(rows=[*self._rows(), *refused, *self._burst(_LATER_MS)], args=args)
        except ValueError as error:
            pytest.skip(
                f"engines of this backend refuse no prompt ({error}): whether a refused prompt counts as load was "
                "not checked"
            )
        for belief in report.beliefs or ():
            self._fail(f"{where}: {belief}")
        self._skip_if_alone(where, report)
        later = [pick for pick in report.picks if pick.ms >= _LATER_MS]
        if len(later) < len(self._burst(_LATER_MS)):
            self._fail(f"{where}: {len(later)} of them were picked for; expected all of them")
        if self.follows_prefix:  # it may use the amount sent to each worker, including refused requests
            return
        self._each_is_picked(
            where,
            report,
            sorted({pick.worker for pick in report.picks}, key=repr),
            lambda pick: pick.ms >= _LATER_MS,
            hint=": finished(request) is called with status 'rejected'",
        )

    def test_none_waits_while_others_pass(self) -> None:
        """Equal requests come a little faster than they are served.

        If the router lets some wait, no more than half of the others may pass one of them.
        """
        size = self.block_size
        firsts = range(0, _QUEUED * 4 * size, 4 * size)
        rows = [FleetRequest(range(first, first + 4 * size), 24, 4.0 * at) for at, first in enumerate(firsts)]
        where = f"{_QUEUED} alike requests come one by one, faster than they are served"
        report = self._played(rows=rows)
        self._judge(where, report)
        numbers = [pick.number for pick in report.picks]
        passed = [sum(later > number for later in numbers[:at]) for at, number in enumerate(numbers)]
        most = max(passed, default=0)
        if most > _PASSED:
            number = numbers[passed.index(most)]
            self._fail(
                f"{where}: request {number} waited while {most} that came after it were picked for; expected {_PASSED} "
                "at most: is the last one served first?"
            )

    def test_one_trace_makes_the_same_picks(self) -> None:
        """A trace that is played twice, with a new router each time, makes the same picks.

        Random choices must come from a seed.
        """
        if not self.repeats:
            pytest.skip(
                f"{type(self).__name__}.repeats is False: whether one trace makes the same picks was not checked"
            )
        found, state = [], random.getstate()
        try:
            for _ in range(2):
                random.seed(1)  # a router that draws with the module's functions repeats, too
                report = self._played()
                found.append([(pick.number, pick.worker) for pick in report.picks])
        finally:
            random.setstate(state)
        first, second = found
        other = next(((a, b) for a, b in zip_longest(first, second) if a != b), None)
        if other is not None:
            self._fail(
                f"one trace, played twice: pick {other[0]} is then {other[1]} (request, worker). A router that "
                "draws needs a seed, and takes the time from request.now_ms, not from a clock; a router with a "
                "new seed each time declares repeats = False"
            )
