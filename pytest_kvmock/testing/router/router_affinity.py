"""Promises of every router that uses the blocks which workers hold.

A prompt goes to a worker that holds it, whatever the load of other workers, and also after a drain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.report.routing_figures import most, most_times
from pytest_kvmock.testing.router.router_part import RouterPart

if TYPE_CHECKING:
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.fleets.report.rows import Pick
    from pytest_kvmock.fleets.routing.routing import Worker

_WORKERS: Final = 4
_PROMPTS: Final = 16
_BLOCKS: Final = 8
"""Number of prompts, and blocks of each."""

_SIBLINGS: Final = 4
"""Requests with the same prefix that arrive together."""

_LOADS: Final = (0, 12, 70)
"""Open requests of one worker while the others are idle. The thresholds of routers that switch to balancing lie between
these.
"""

_JOIN_MS: Final = 100.0
_APART_MS: Final = 60.0
"""Time between two requests, so that the other workers are idle."""

_LONG: Final = 400
"""Output tokens of the requests that make the load: they run until the end."""


class Affinity(RouterPart):
    """The part of `RouterContract` about where held prompts go."""

    def test_a_held_prompt_goes_where_it_is_however_loaded_others_are(self) -> None:
        """Prompts that an idle worker holds go there, whatever the load of another worker.

        Only for a router that has `overlap(request)` or `uses_overlap`.
        """
        for load in _LOADS[: 1 if self.switches_by_load else None]:
            where = (
                f"worker 0 has {load} open requests, and the others are idle: {_PROMPTS} prompts come once, and once "
                "more each"
            )
            rows = self._twice(load)
            report = self._played(self._joining, workers=1, num_blocks=4000, rows=rows)
            self._judge(where, report)
            self._needs_overlap(where)
            self._go_where_they_are(where, report.picks)

    def test_siblings_go_together_before_the_first_event(self) -> None:
        """With `keeps_siblings`: of four requests with the same prefix within 3 ms, three follow the first.

        At least half of them must. Events come 40 ms late, so that the router can use only what it sent.
        """
        if not self.keeps_siblings:
            pytest.skip(
                f"{type(self).__name__}.keeps_siblings is not set: where prompts that begin alike go before the "
                "first event of one of them was not checked"
            )
        size = self.block_size
        heads = [range(at * _BLOCKS * size, (at + 1) * _BLOCKS * size) for at in range(_PROMPTS)]
        rows = [
            FleetRequest((*head, 2**31 + at), 1, 10.0 * _APART_MS * number + at)
            for number, head in enumerate(heads)
            for at in range(_SIBLINGS)
        ]
        where = f"{_PROMPTS} times {_SIBLINGS} requests that begin alike come within 3 ms, and all is idle"
        report = self._played(rows=rows, event_delay_ms=40)
        self._judge(where, report)
        went = {pick.number: pick.worker for pick in report.picks}
        later = [number for number in went if number % _SIBLINGS]
        found = sum(went[number] == went[number - number % _SIBLINGS] for number in later)
        if 2 * found < len(later):
            self._fail(
                f"{where}: {found} of {len(later)} went where the first of them went, before its first event; "
                "expected half of them at least"
            )

    def test_what_a_cordoned_worker_held_is_its_still(self) -> None:
        """A worker is no candidate for a while, as if drained or flapping.

        Afterwards prompts that it holds go to it, and it gets its share of new ones.
        """
        rows = self._twice(0)
        drained_ms = _JOIN_MS + 2 * (_PROMPTS + 1) * _APART_MS
        between = FleetRequest(range(2**30, 2**30 + 2 * self.block_size), 4, drained_ms + 100.0)
        again_ms, heads = drained_ms + 400.0, [each.prompt for each in rows[:_PROMPTS]]
        again = [FleetRequest(head, 1, again_ms + at * _APART_MS) for at, head in enumerate(heads)]
        burst = self._burst(again_ms + (_PROMPTS + 4) * _APART_MS)

        def happens(fleet: Fleet) -> None:
            self._joining(fleet)
            fleet.at(drained_ms).cordon(1)
            fleet.at(drained_ms + 300.0).uncordon(1)

        where = "worker 1 is cordoned while a prompt comes, and is back: what was held comes again"
        report = self._played(happens, workers=1, num_blocks=4000, rows=[*rows, between, *again, *burst])
        self._judge(where, report)
        self._no_more_than_its_share(report, burst[0].timestamp)
        self._needs_overlap(where)
        if not self.forgets_cordoned:
            self._go_where_they_are(where, [pick for pick in report.picks if pick.ms >= again_ms])

    def test_it_uses_a_name_that_returns(self) -> None:
        """With `names_return`: worker 1 crashes, and an empty worker starts under its name later.

        The new worker gets some requests.
        """
        if not self.names_return:
            pytest.skip(
                f"{type(self).__name__}.names_return is not set: whether a worker that comes back under its name "
                "is used was not checked"
            )
        back_ms, later_ms = 900.0, 2500.0

        def happens(fleet: Fleet) -> None:
            fleet.at(300.0).crash(1)
            fleet.at(back_ms).join(1, engine=self._engine(4000))

        size = _BLOCKS * self.block_size
        first = [FleetRequest(range(at * size, (at + 1) * size), 4, 20.0 * at) for at in range(12)]
        second = [FleetRequest(each.prompt, 4, 1000.0 + 20.0 * at) for at, each in enumerate(first)]
        where = (
            f"worker 1 crashes at 300 ms, and comes back under its name at {back_ms:g} ms; a burst of new prompts "
            "comes after it"
        )
        report = self._played(happens, num_blocks=4000, rows=[*first, *second, *self._burst(later_ms)])
        self._judge(where, report)
        self._each_is_picked(where, report, [1], lambda pick: pick.ms >= later_ms)

    def test_a_prompt_goes_to_the_host_that_has_it(self) -> None:
        """With `tiers`: of idle workers the router picks the one whose host has the prompt, if no device has it."""
        if self.tiers is None:
            pytest.skip(f"{type(self).__name__}.tiers is None: whether it weighs what a host has was not checked")
        size = _BLOCKS * self.block_size
        prompts = [range(at * size, (at + 1) * size) for at in range(8)]

        def serve(fleet: Fleet) -> None:
            for number, prompt in enumerate(prompts):  # each device holds one prompt, and its host the others
                engine = fleet.engines[1 + number % 2]
                engine.submit((*prompt, 2**30), 1)
                engine.run()
            for number in (1, 2):
                for fill in range(2):
                    first = 2**29 + 2**20 * (2 * number + fill)
                    fleet.engines[number].submit(range(first, first + size), 1)
                    fleet.engines[number].run()

        where = "workers 1 and 2 have prompts on their hosts, worker 0 has none, and all are idle"
        rows = [FleetRequest((*prompt, 2**31 + at), 1, 2000.0 * (1 + at)) for at, prompt in enumerate(prompts)]
        report = self._played(serve, num_blocks=_BLOCKS + 2, rows=rows)
        self._judge(where, report)
        right = sum(pick.worker == 1 + pick.number % 2 for pick in report.picks)
        if right < 0.75 * len(prompts):
            self._fail(
                f"{where}: {right} of {len(prompts)} prompts went where the host has them; expected "
                f"{0.75:.0%} of them at least"
            )

    # ------------------------------------------------------------------------------------------------ the means

    def _needs_overlap(self, where: str) -> None:
        """Skip the rest of a test unless the router declares that it uses the blocks that workers hold."""
        subject, name = self._subject(), type(self).__name__
        uses = callable(getattr(subject, "overlap", None)) if self.uses_overlap is None else self.uses_overlap
        if not uses:
            pytest.skip(
                f"{type(subject).__name__} has no overlap(request), or {name}.uses_overlap is False: {where}: whether "
                "they go where they are held was not checked; uses_overlap = True would let it"
            )

    def _twice(self, load: int) -> list[FleetRequest]:
        """Return each prompt twice, one by one, the second time in another order.

        `load` long requests come before them, all at once.
        """
        size = self.block_size
        heads = [range(at * _BLOCKS * size, (at + 1) * _BLOCKS * size) for at in range(_PROMPTS)]
        order = [*heads]
        Random(1).shuffle(order)  # noqa: S311 - mock data
        rows = [FleetRequest(head, 1, _JOIN_MS + at * _APART_MS) for at, head in enumerate((*heads, *order), 1)]
        firsts = range(2**31, 2**31 + load * size, size)
        return [*rows, *(FleetRequest(range(first, first + size), _LONG, 0.0) for first in firsts)]

    def _joining(self, fleet: Fleet) -> None:
        """Let the other workers join when the first one has its load."""
        for _ in range(_WORKERS - 1):
            fleet.at(_JOIN_MS).join(engine=self._engine(4000))

    def _go_where_they_are(self, where: str, picks: Sequence[Pick]) -> None:
        """Fail unless at least half of the held prompts go to a worker that holds most of them, and more than
        round-robin would send there.
        """
        __tracebackhide__ = True
        held = [pick for pick in picks if pick.best_held >= _BLOCKS // 2]
        found, in_turn = sum(pick.held == pick.best_held for pick in held), len(held) // _WORKERS
        if 2 * found < len(held) or found <= in_turn:
            self._fail(
                f"{where}: {found} of {len(held)} prompts went to the worker that held most of them, and in turn "
                f"{in_turn} would; expected half of them at least. A policy that goes by load alone when loads "
                "are uneven, on purpose, declares switches_by_load = True; a policy that ignores what workers "
                "hold declares uses_overlap = False"
            )

    def _no_more_than_its_share(self, report: Report, from_ms: float | None) -> None:
        """Fail if the worker that was cordoned gets far more than its share of a burst of new prompts."""
        __tracebackhide__ = True
        if self.packs:
            return
        counts: dict[Worker, float] = dict(Counter(pick.worker for pick in report.picks if pick.ms >= (from_ms or 0.0)))
        found, limit = most(counts), most_times(_WORKERS)
        if found is not None and found.worker == 1 and counts[1] * _WORKERS > limit * sum(counts.values()):
            shown = ", ".join(f"worker {worker!r}: {count:g}" for worker, count in counts.items())
            self._fail(
                f"worker 1 was cordoned for a while, and gets too much of a burst of new prompts after that ({shown}); "
                f"expected at most {limit:.3g} times the mean"
            )
