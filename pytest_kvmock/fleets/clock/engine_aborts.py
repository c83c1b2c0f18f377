"""Requests of an engine that are called off: when each client goes, and what of the pass under way it does not get any
more.

Theory of operation. An engine checks between two passes which clients have left. One that is called off while a pass is
under way is noted, and taken out at its end, before the tokens of the pass are handed out (vLLM: `EngineCore` handles
aborts after the model has run and before `update_from_output`; aisimulate-core 0.13.0 suppresses the pending output).
As the mock computes a pass when it starts, the token is taken back then, and an end that the pass made is none.
Schedulers whose requests have a last pass instead (`Scheduler.has_last_pass`) deliver all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import check_integer, check_number

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest


def check_abort(where: str, after_ms: object, after_tokens: object) -> None:
    """Check when a request is to be called off.

    Raises:
        ValueError: a time is not a finite number of at least 0, or a count no integer of at least 0.
    """
    if after_ms is not None:
        check_number(f"{where}abort_after_ms", after_ms, unit=" (milliseconds), or None")
    if after_tokens is not None:
        check_integer(f"{where}abort_after_tokens", after_tokens, 0, " (tokens), or None")


class EngineAborts:
    """The requests of one engine that are to be called off, and those that are and whose pass is under way.

    Args:
        take_out: takes a request out of the engine; whether it is over with that. Its second argument is whether that
            was planned as the request was submitted.
        wake: brings a request up to date; whether it was not.
    """

    def __init__(self, take_out: Callable[[EngineRequest, bool], bool], wake: Callable[[EngineRequest], bool]) -> None:
        self._take_out = take_out
        self._wake = wake
        self._due: list[tuple[float, int, EngineRequest]] = []
        self._count = 0
        self._limited: dict[EngineRequest, None] = {}
        self._noted: dict[EngineRequest, bool] = {}  # with whether that was planned

    def plan(self, request: EngineRequest, after_ms: float | None, after_tokens: int | None) -> None:
        """Call a request off `after_ms` after its arrival, or when `after_tokens` of its tokens have come out."""
        if after_tokens == 0:
            after_ms, after_tokens = 0.0, None
        if after_ms is not None:
            self._count += 1
            heappush(self._due, (request.arrival_ms + after_ms, self._count, request))
        if after_tokens is not None:
            request.abort_after_tokens = after_tokens
            self._limited[request] = None

    def note(self, request: EngineRequest, *, is_planned: bool = False) -> None:
        """Note a request that is called off while a pass is under way."""
        self._noted.setdefault(request, is_planned)

    def clear(self) -> None:
        """Forget all: the engine has no request any more."""
        self._due.clear()
        self._limited.clear()
        self._noted.clear()

    @property
    def next_ms(self) -> float:
        """When the next open request is called off; infinite if none is."""
        due = self._due
        while due and not due[0][2].is_open:
            heappop(due)
        return due[0][0] if due else math.inf

    @property
    def passes_left(self) -> int | None:
        """In how many passes that generate a token of each the first running request has all that it waits for;
        None: in none.
        """
        if not self._limited:
            return None
        for request in self._limited:
            self._wake(request)
        left = [
            limit - len(request.token_ms)
            for request in self._limited
            if request.status == "running" and (limit := request.abort_after_tokens) is not None
        ]
        return min(left, default=None)

    def at(self, now_ms: float) -> None:
        """Act on those that are due by now, between two passes."""
        while self.next_ms <= now_ms:
            self._take_out(heappop(self._due)[2], True)

    def during_pass(self, end_ms: float, done: ForwardPass | None) -> None:
        """Note those that are due before the end of a pass, which may have ended them; None: the last of passes that
        were planned.
        """
        due = self._due
        while due and due[0][0] < end_ms:
            request = heappop(due)[2]
            if request.is_open or (done is not None and (request in done.finished or request in done.rejected)):
                self.note(request, is_planned=True)

    def end_pass(self, done: ForwardPass | None, now_ms: float, *, has_last_pass: bool) -> None:
        """Take out who was noted, before the tokens of the pass are handed out.

        Args:
            done: the result of the pass; None if it was the last of the planned passes, in which each running request
                decoded.
            now_ms: its end.
            has_last_pass: its tokens are handed out all the same, and an end that it made is one.
        """
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        for request, is_planned in noted.items():
            if not has_last_pass:
                self._take_back(request, done)
            if request.is_open:
                if not self._take_out(request, is_planned):
                    continue
            elif request.status in ("finished", "rejected") and not has_last_pass:
                request.status, request.ended_ms = "aborted", now_ms
            else:
                continue
            if done is not None:
                done.aborted.append(request)

    def _take_back(self, request: EngineRequest, done: ForwardPass | None) -> None:
        """Take back what the pass did for a request: its token, or that it ended."""
        generated = self._wake(request)
        if done is None:
            generated = request.status == "running"
        elif not generated:
            generated = request in done.generated
            if generated:
                at = done.generated.index(request)
                del done.generated[at], done.tokens[at]
            for ended in (done.finished, done.rejected):
                if request in ended:
                    ended.remove(request)
        if generated:
            request.token_ms.pop()
            request.generated_tokens -= 1

    def reached(self, done: ForwardPass | None) -> None:
        """Call off the requests whose limit of tokens has come out; `done` as in `end_pass`."""
        if not self._limited:
            return
        for request in [*self._limited]:
            self._wake(request)
            if not request.is_open:
                del self._limited[request]
            elif len(request.token_ms) >= (request.abort_after_tokens or 0):
                del self._limited[request]
                if self._take_out(request, True) and done is not None:
                    done.aborted.append(request)
