"""Scenes of the router contract in which clients go away, at any stage of their requests; more requests follow after
the last has gone.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.testing.router.router_part import RouterPart

LATER_MS: Final = 3000.0
"""A time long after the last client has left."""

_BURST: Final = 90
"""Requests at one moment, thirty per worker. A router that never stops counting those of one worker sends it none of
the later ones."""

_CALLED_OFF: Final = (
    ": all its requests were called off and are over, so the router still counts them as open, or avoids the "
    "worker for what its clients did. finished(request) is called with status 'aborted', and withdrawn(request) for a "
    "request that was not dispatched; with loads() the failure names the request at which the count differs"
)


class RouterAborts(RouterPart):
    """The scenes of `RouterContract` in which clients go away."""

    def test_it_forgets_who_leaves_before_the_first_token(self) -> None:
        """Clients go away while their requests wait in an engine or are prefilled: there is no `first_token`."""
        after = (0.0, 2.0, 8.0, 15.0)
        rows = self._leaving(lambda at: {"abort_after_ms": after[at % 4]} if at % 3 else {})
        self._judge_aborts("clients that leave before the first token", rows)

    def test_it_forgets_who_leaves_while_it_generates(self) -> None:
        """Clients go away after some tokens."""
        rows = self._leaving(lambda at: {"abort_after_tokens": 1 + at % 9} if at % 3 else {})
        self._judge_aborts("clients that leave after some tokens", rows)

    def test_it_forgets_who_leaves_while_it_waits(self) -> None:
        """The clients of a burst go away one after the other. Some requests may wait in the router; it receives no
        `finished` for these.
        """
        rows = self._leaving(lambda at: {"abort_after_ms": 3.0 * at} if at % 3 else {}, apart_ms=0.0)
        self._judge_aborts("a burst whose clients leave one after the other", rows)

    def test_it_forgets_who_leaves_as_its_worker_is_lost(self) -> None:
        """Worker 1 is lost, which is noticed 60 ms later. Clients go away before or while their requests are sent
        again.
        """

        def happens(fleet: Fleet) -> None:
            fleet.at(150.0).crash(1, notice_ms=60)
            for number in range(0, 36, 2):
                fleet.at(150.0 + 3 * number).abort(number)

        self._judge_aborts("clients that leave as worker 1 crashes at 150 ms", self._leaving(lambda _: {}, 30), happens)

    def test_it_serves_clients_that_come_again(self) -> None:
        """Clients go away and come again with the same prompt, also in sessions."""
        rows = self._leaving(
            lambda at: {
                "abort_after_tokens": 2 if at % 2 else None,
                "retry_after_ms": 25.0,
                "session_id": f"session {at % 12}",
            }
        )
        self._judge_aborts("clients that leave and come again", rows)

    def test_a_worker_whose_clients_left_is_used_again(self) -> None:
        """All clients of worker 0 go away after the first token. Many new prompts follow, and each worker gets some."""
        later_ms = LATER_MS + 1000.0 * self.cools_down_s

        def happens(fleet: Fleet) -> None:
            def leave(done: Any) -> None:
                for request in done.generated:
                    if request.is_open and request.arrival_ms < later_ms:
                        request.abort()

            fleet.engines[0].on_pass(leave)

        where = "a burst whose clients on worker 0 all leave, and new prompts later"
        size = 2 * self.block_size
        # They do not come at one moment: a router that goes by blocks in use would send all of them to the worker with
        # the fewest.
        later = [
            FleetRequest(range(3 * 2**30 + at * size, 3 * 2**30 + (at + 1) * size), 4, later_ms + 8 * at)
            for at in range(_BURST)
        ]
        rows = [*self._leaving(lambda _: {}, 2, count=_BURST, apart_ms=0.0), *later]
        report = self._played(happens, rows=rows)
        self._judge(where, report)
        self._each_is_picked(where, report, range(3), lambda pick: pick.ms >= later_ms, hint=_CALLED_OFF)

    # ------------------------------------------------------------------------------------------------ the means

    def _judge_aborts(
        self, where: str, rows: Sequence[FleetRequest], happens: Callable[[Fleet], object] | None = None
    ) -> None:
        """Play requests, some of which are called off, and a burst after all have ended."""
        __tracebackhide__ = True
        report = self._played(happens, rows=[*rows, *self._burst(LATER_MS)])
        assert report.aborted, "no client left: the scene shows nothing"
        self._judge(where, report)

    def _leaving(
        self,
        fields: Callable[[int], dict[str, Any]],
        output: int = 24,
        *,
        count: int = 36,
        apart_ms: float = 6.0,
    ) -> list[FleetRequest]:
        """Return requests that share one of three prefixes, and requests with separate prompts; `fields` sets further
        fields of each.
        """
        size = self.block_size
        rows = []
        for at in range(count):
            first = 2**20 * (at % 3) if at % 2 else 2**30 + 2**10 * at
            prompt = (*range(first, first + 3 * size), *range(2**31 + at, 2**31 + at + size))
            rows.append(FleetRequest(prompt, output, apart_ms * at, **fields(at)))
        return rows
