"""Aborted requests of an engine: when each client leaves, and which results of the pass under way are dropped.

Theory of operation. An engine checks between two passes which clients have left. A request called off during a pass is
noted, and removed at the end of the pass, before its tokens are handed out (vLLM: `EngineCore` handles aborts after the
model has run and before `update_from_output`; aisimulate-core 0.13.0 suppresses the pending output). The mock computes
a pass when it starts, so it takes the token back at the end, and an end of the request in this pass does not count.
Schedulers that give such requests one last pass (`Scheduler.has_last_pass`) deliver all tokens.
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
        ValueError: a time is not a finite number of at least 0, or a count not an integer of at least 0.
    """
    if after_ms is not None:
        check_number(f"{where}abort_after_ms", after_ms, unit=" (milliseconds), or None")
    if after_tokens is not None:
        check_integer(f"{where}abort_after_tokens", after_tokens, 0, " (tokens), or None")


class EngineAborts:
    """The planned aborts of one engine, and the called-off requests that wait for the end of a pass.

    Args:
        take_out: removes a request from the engine; returns whether the request is over. The second argument is whether
            the abort was planned at submission.
        wake: brings a request up to date; returns whether it was behind.
    """

    def __init__(self, take_out: Callable[[EngineRequest, bool], bool], wake: Callable[[EngineRequest], bool]) -> None:
        self._take_out = take_out
        self._wake = wake
        self._due: list[tuple[float, int, EngineRequest]] = []
        self._count = 0
        self._limited: dict[EngineRequest, None] = {}
        self._noted: dict[EngineRequest, bool] = {}  # with whether the abort was planned

    def plan(self, request: EngineRequest, after_ms: float | None, after_tokens: int | None) -> None:
        """Plan to call a request off `after_ms` after its arrival, or after `after_tokens` output tokens."""
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
        """Forget all aborts, because the engine has no requests any more."""
        self._due.clear()
        self._limited.clear()
        self._noted.clear()

    @property
    def next_ms(self) -> float:
        """The time at which the next open request is called off; infinite if there is none."""
        due = self._due
        while due and not due[0][2].is_open:
            heappop(due)
        return due[0][0] if due else math.inf

    @property
    def passes_left(self) -> int | None:
        """Number of decode passes until the first running request reaches its token limit; None: no running request has
        one.
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
        """Act between two passes on the aborts that are due by now."""
        while self.next_ms <= now_ms:
            self._take_out(heappop(self._due)[2], True)

    def during_pass(self, end_ms: float, done: ForwardPass | None) -> None:
        """Note the aborts that are due before the end of a pass, which may have ended their requests; `done` is None
        for the last of planned passes.
        """
        due = self._due
        while due and due[0][0] < end_ms:
            request = heappop(due)[2]
            if request.is_open or (done is not None and (request in done.finished or request in done.rejected)):
                self.note(request, is_planned=True)

    def end_pass(self, done: ForwardPass | None, now_ms: float, *, has_last_pass: bool) -> None:
        """Remove the noted requests before the tokens of the pass are handed out.

        Args:
            done: the result of the pass; None if it was the last of the planned passes, in which each running request
                decoded.
            now_ms: its end.
            has_last_pass: whether its tokens are handed out nevertheless, and an end in this pass counts.
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
        """Take back the results of the pass for a request: its token or its end."""
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
        """Call off the requests that have reached their token limit; `done` as in `end_pass`."""
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
