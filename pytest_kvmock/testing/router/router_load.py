"""Promises of every router under everyday load: prompts with a common prefix, or without a full block, make no hot
spot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.engines.base.pair_options import IN_ROOMS
from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.report.regret import tie_shares
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.report.routing_figures import assert_balanced
from pytest_kvmock.fleets.traces.mooncake import TraceRequest
from pytest_kvmock.testing.router.router_part import RouterPart
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Candidate, RouterRequest, Worker

_WORKERS: Final = 4
_REQUESTS: Final = 200
"""With this number, correct routers stay far from each limit: a random choice among four gave a worker at most 1.4
times the mean."""

_EVERY_MS: Final = 500.0
"""The most age of polled loads: a burst at one moment sees them once."""

_ENDED_WELL: Final = 120
"""Requests that a single worker serves. A router that never stops counting them, their blocks or their tokens sends it
none of a burst of 36.

Two other workers then take 18 requests of the burst each, all of two blocks: 18 requests, 36 blocks and 36 blocks to
compute, or 90 for a router that adds up the three.
"""

_LATER_MS: Final = 3000.0
"""A time long after their end."""

_SERVED: Final = (
    ": all its requests were served and are over, so the router still counts them as open, or their blocks or "
    "tokens. finished(request) is called for each; with loads() the failure names the request at which the count "
    "differs. A router that goes by how much it sent to a worker declares follows_prefix = True"
)

_CHANCES: Final = 40
"""Number of random routers that show the results of chance. A further random router is below all of them in one trace
of 41, and in all of four traces in one case of 3 million."""


class _Chance:
    """A router that picks at random."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)  # noqa: S311 - mock data

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker:  # noqa: ARG002 - a router's method
        return self._rng.choice(candidates).worker


class EverydayLoad(RouterPart):
    """The part of `RouterContract` about how much each busy worker gets."""

    def test_a_chat_template_is_no_hot_spot(self) -> None:
        """Every prompt begins with the same one or two blocks, which one worker holds: this worker does not get most
        requests.
        """
        for blocks in (1, 2):
            template = range(blocks * self.block_size)
            where = f"{_REQUESTS} requests whose prompts all begin with the same {len(template)} tokens, which worker 1 holds"  # noqa: E501
            report = self._played(self._holding([1], template), workers=_WORKERS, rows=self._of_a_template(template))
            self._judge(where, report)
            self._excuse(where, "packs", "follows_prefix")
            self._require(where, report.assert_balanced)

    def test_prompts_of_less_than_a_block_share_a_burst(self) -> None:
        """Many requests without a full block arrive at one moment: each worker gets some, and no worker gets most."""
        if self.block_size == 1:
            pytest.skip("block_size is 1: prompts of less than a block were not checked, as there are none")
        where = f"a burst of {_REQUESTS} requests, all of less than a block"
        report = self._played(workers=_WORKERS, rows=self._of_less_than_a_block())
        self._judge(where, report)
        self._excuse(where, "packs")
        self._require(where, report.assert_balanced)
        self._each_is_picked(where, report, range(_WORKERS))

    def test_what_ended_well_is_no_load(self) -> None:
        """A single worker has served many requests when others join. Many new prompts follow, and it gets some."""

        def happens(fleet: Fleet) -> None:
            for _ in range(2):
                fleet.at(_LATER_MS / 2).join(engine=self._engine())

        # With `follows_prefix` all have one prompt: a policy that follows prefixes may prefer the worker that was sent
        # the fewest different ones, and worker 0 would have more for ever.
        size = 2 * self.block_size
        firsts = [0 if self.follows_prefix else at * size for at in range(_ENDED_WELL)]
        rows = [FleetRequest(range(first, first + size), 4, 10.0 * at) for at, first in enumerate(firsts)]
        where = f"{_ENDED_WELL} requests ended well on worker 0, workers 1 and 2 join, and a burst of new prompts comes"
        report = self._played(happens, workers=1, rows=[*rows, *self._burst(_LATER_MS)])
        self._judge(where, report)
        self._each_is_picked(where, report, [0], lambda pick: pick.ms >= _LATER_MS, hint=_SERVED)

    def test_a_burst_is_shared_where_all_hold_its_prefix(self) -> None:
        """Loads are polled, and a burst at one moment finds equal workers: all idle, all with the prefix."""
        where = f"a burst of {_REQUESTS} requests of one prefix, which all workers hold, by loads that are polled each {_EVERY_MS:g} ms"  # noqa: E501
        report = self._burst_over(range(_WORKERS), where)
        self._require(where, report.assert_balanced)

    def test_a_burst_is_shared_among_those_that_hold_its_prefix(self) -> None:
        """One worker lacks the prefix: the three others are equal and best, and none of them gets most of a burst."""
        best = range(1, _WORKERS)
        where = (
            f"a burst of {_REQUESTS} requests of one prefix, which workers 1 to 3 hold and worker 0 does not, by loads "
            f"that are polled each {_EVERY_MS:g} ms"
        )
        report = self._burst_over(best, where)
        picked = [pick.worker for pick in report.picks]
        counts: dict[Worker, float] = {worker: picked.count(worker) for worker in best}
        if sum(counts.values()) < _REQUESTS / 2:  # worker 0 has most
            self._require(where, report.assert_balanced)
        else:
            self._require(where, lambda: assert_balanced("requests to workers that hold it", counts))

    def test_workers_that_tie_share(self) -> None:
        """With a `selector`: the workers that tie for the least cost share the requests, as `Report.assert_ties_shared`
        defines it.
        """
        if self.selector is None:
            pytest.skip(
                f"{type(self).__name__}.selector is None: whether workers that tie for the least cost share was not "
                "checked"
            )
        self._check_selector()
        where = "requests of one prefix, which workers 1 to 3 hold and worker 0 does not, one by one"
        rows = self._of_a_prefix(apart_ms=_EVERY_MS)
        report = self._played(self._holding(range(1, _WORKERS), self._prefix), workers=_WORKERS, rows=rows, record=True)
        self._judge(where, report)
        self._excuse(where, "packs", "first_of_equals")
        assert report.run.recorder is not None
        if not tie_shares(self.selector, report.run.recorder):
            pytest.skip(
                f"{where}: no workers tied by {type(self).__name__}.selector: whether those that do share was not "
                "checked"
            )
        self._require(where, lambda: report.assert_ties_shared(self.selector))

    def test_it_does_not_avoid_what_is_cached(self) -> None:
        """On at least one of four traces the router reuses as much as the worst of 40 random routers, as a router that
        ignores caches does.
        """
        found: list[tuple[float, float, float]] = []
        for seed in range(4):
            rows = self._of_documents(seed)
            report = self._played(workers=_WORKERS, num_blocks=2000, rows=rows)
            self._judge("documents that are asked about four times each", report)
            own = report.figure("hit_ratio") or 0.0
            by_chance: list[float] = []
            for number in range(_CHANCES):
                engines: dict[Worker, MockEngine] = {at: self._engine(2000) for at in range(_WORKERS)}
                if self.hand_over is not None:
                    engines = self._with_decode(engines)
                by_chance.append(Fleet(engines, _Chance(number)).run(rows).figure("hit_ratio") or 0.0)
                if by_chance[-1] <= own:
                    return
            found.append((own, min(by_chance), max(by_chance)))
        (own, least, most), *more = found
        also = ", ".join(f"{own:.2f} ({least:.2f} to {most:.2f})" for own, least, most in more)
        self._fail(
            f"avoids the workers that hold the prefix: {own:.2f}, chance gives {least:.2f} to {most:.2f}, the share of "
            f"prompt tokens that is found cached, by {_CHANCES} random routers; on three more traces: {also}"
        )

    # ------------------------------------------------------------------------------------------------ the means

    def _excuse(self, where: str, *names: str) -> None:
        """Skip the rest of a test if the contract declares one of these, and report what was not checked."""
        __tracebackhide__ = True
        for name in names:
            if getattr(self, name):
                pytest.skip(
                    f"{type(self).__name__}.{name} is True: {where}: whether the workers share them was not checked"
                )

    def _require(self, where: str, assertion: Callable[[], None]) -> None:
        """Run an assertion; put `where` before the message of a failure."""
        __tracebackhide__ = True
        problem = None
        try:
            assertion()
        except AssertionError as error:
            problem = str(error)
        if problem is not None:
            self._fail(f"{where}: {problem}")

    def _burst_over(self, holders: Sequence[int], where: str) -> Report:
        """Play a burst at one moment with polled loads; `holders` hold its prefix."""
        __tracebackhide__ = True
        polled = {"loads": "engine", "loads_every_ms": _EVERY_MS}
        report = self._played(
            self._holding(holders, self._prefix), workers=_WORKERS, rows=self._of_a_prefix(), **polled
        )
        self._judge(where, report)
        self._excuse(where, "packs", "first_of_equals", "follows_prefix")
        return report

    @property
    def _prefix(self) -> range:
        return range(4 * self.block_size)

    def _holding(self, workers: Sequence[int], prefix: Sequence[int]) -> Callable[[Fleet], None]:
        """Return a function that makes each of these workers hold a prefix. They serve it, and index and router receive
        its events when the run begins.
        """
        if self.hand_over == IN_ROOMS:
            pytest.skip(
                f"{type(self).__name__}.hand_over is {IN_ROOMS!r}, whose prefill engines compute nothing by "
                "themselves: what workers that held a prompt before are given was not checked"
            )

        def serve(fleet: Fleet) -> None:
            for worker in workers:
                engine = fleet.engines[worker]
                engine.submit(Prompt((*prefix, 2**30)), 1)
                engine.run()

        return serve

    def _of_a_prefix(self, apart_ms: float = 0.0) -> list[FleetRequest]:
        size = self.block_size
        own = (range(at * size, (at + 2) * size) for at in range(1000, 1000 + 2 * _REQUESTS, 2))
        return [FleetRequest((*self._prefix, *tail), 8, at * apart_ms) for at, tail in enumerate(own)]

    def _of_a_template(self, template: Sequence[int]) -> list[FleetRequest]:
        """Return requests that arrive so fast that each worker serves ten or more at a time."""
        rng, size = Random(1), self.block_size  # noqa: S311 - mock data
        now, first, rows = 0.0, 1000 * size, []
        for _ in range(_REQUESTS):
            now += rng.expovariate(1 / 4)
            own = range(first, first + size * rng.randint(2, 6) - rng.randrange(size))
            rows.append(FleetRequest((*template, *own), rng.randint(8, 24), now))
            first = own.stop
        return rows

    def _of_less_than_a_block(self) -> list[FleetRequest]:
        rng, size = Random(1), self.block_size  # noqa: S311 - mock data
        firsts = range(0, _REQUESTS * size, size)
        return [FleetRequest(range(first, first + rng.randrange(1, size)), 8, 0.0) for first in firsts]

    def _of_documents(self, seed: int) -> list[TraceRequest]:
        """Return requests of 24 prefixes, four of each, in random order. They are so far apart that loads do not show
        which worker holds what.
        """
        rng, size = Random(seed), self.block_size  # noqa: S311 - mock data
        ids = iter(range(2**40, 2**41))
        heads = [[next(ids) for _ in range(rng.randint(4, 10))] for _ in range(24)]
        order = heads * 4
        rng.shuffle(order)
        now, rows = 0.0, []
        for head in order:
            now += rng.expovariate(1 / 120)
            chain = (*head, *(next(ids) for _ in range(rng.randint(1, 3))))
            rows.append(TraceRequest(now, size * len(chain), rng.randint(1, 4), chain))
        return rows
