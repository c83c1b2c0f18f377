"""The arrival of a trace's requests: by timestamps or as soon as others are done, and turn by turn in a session."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest
    from pytest_kvmock.values.tokens import Prompt, TokenIds

# Theory of operation
#
# The requests of a session arrive one after the other, in the order of the trace, each with a delay after the previous
# one is done. If the trace has no delay, it is the difference of the timestamps, or 0 if one is missing. A request
# without a session is a separate session.
#
# In an open loop, the first request of a session arrives at its timestamp. In a closed loop, timestamps do not matter:
# sessions begin in the order of the trace, each when fewer than `concurrency` requests are open. The releases count
# open requests differently: in 1.6.1 a session keeps its place until its last request is done; in 1.2.1 others are
# served between its requests, and a request on the link between two engines does not count.


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request for a fleet with more than a trace's hash ids: tokens, an adapter, or a salt.

    Attributes:
        prompt: a `Prompt`, or token ids.
        output_tokens: tokens to generate.
        timestamp: arrival in milliseconds; None: with the first request, or as soon as others are done.
        session_id: the conversation that it is a turn of; None: no conversation.
        delay: milliseconds between the end of the session's previous turn and this one; None: by the timestamps.
        priority: larger is served first, if the engines have priorities.
        abort_after_ms: milliseconds after its arrival at which its client leaves and it is called off, if it is still
            open; None: never.
        abort_after_tokens: number of output tokens after which it is called off, if that is earlier; None: no limit.
        retry_after_ms: milliseconds after which the client of a called-off request sends it again, as a new request
            that is not called off; None: never.
    """

    prompt: Prompt | TokenIds
    output_tokens: int
    timestamp: float | None = None
    session_id: str | None = None
    delay: float | None = None
    priority: int = 0
    abort_after_ms: float | None = None
    abort_after_tokens: int | None = None
    retry_after_ms: float | None = None

    @property
    def output_length(self) -> int:
        """Tokens to generate, under the name that `TraceRequest` uses."""
        return self.output_tokens


class Turn:
    """One request of a trace.

    Attributes:
        trace: the request in the trace.
        prompt: its prompt.
        session: the number of its session, in the order of the trace.
        session_name: the session's name in the trace, or Dynamo's name: "request_3" for the third row.
        index: its place in its session, from 0.
        next: the next request of its session; None if there is none.
        delay_ms: time from the end of the session's previous request to its arrival.
        keeps_place: whether it takes over the place of the previous request in a closed loop.
        abort_after_ms: time from its arrival to its abort; None: no abort by time.
        abort_after_tokens: output tokens until its abort; None: no abort by tokens.
    """

    __slots__ = (
        "abort_after_ms",
        "abort_after_tokens",
        "delay_ms",
        "index",
        "keeps_place",
        "next",
        "prompt",
        "session",
        "session_name",
        "trace",
    )

    def __init__(self, trace: TraceRequest | FleetRequest, prompt: Prompt) -> None:
        self.trace = trace
        self.prompt = prompt
        self.session = 0
        self.session_name = ""
        self.index = 0
        self.next: Turn | None = None
        self.delay_ms = 0.0
        self.keeps_place = False
        self.abort_after_ms: float | None = None
        self.abort_after_tokens: int | None = None
        if isinstance(trace, FleetRequest):
            self.abort_after_ms, self.abort_after_tokens = trace.abort_after_ms, trace.abort_after_tokens

    @property
    def timestamp_ms(self) -> float:
        """Its timestamp; 0 without one."""
        return self.trace.timestamp or 0.0


def link_sessions(turns: Iterable[Turn], speedup: float) -> list[Turn]:
    """Link the turns of each session.

    Args:
        turns: all requests, in the order of the trace.
        speedup: divisor of delays.

    Returns:
        The first turn of each session, in the order of the trace.
    """
    firsts: list[Turn] = []
    last: dict[str, tuple[Turn, float]] = {}
    for row, turn in enumerate(turns, 1):
        session, timestamp = turn.trace.session_id, turn.trace.timestamp
        turn.session_name = f"request_{row}" if session is None else session
        if session is None or session not in last:
            turn.session = len(firsts)
            firsts.append(turn)
            known = turn.timestamp_ms
        else:
            before, known = last[session]
            turn.session = before.session
            turn.index = before.index + 1
            before.next = turn
            delay = turn.trace.delay
            if delay is None:
                delay = 0.0 if timestamp is None else timestamp - known
            turn.delay_ms = delay / speedup
            known = known if timestamp is None else timestamp
        if session is not None:
            last[session] = turn, known
    return firsts


class Arrivals:
    """Decides which request arrives when.

    Args:
        turns: all requests, in the order of the trace.
        concurrency: number of open requests at once; None: requests arrive by timestamps.
        speedup: divisor of times, in an open loop.
        sessions_keep_place: whether a session counts as open until its last request is done (1.6.1).
        start_ms: when the first request arrives.

    Attributes:
        depends_on_ends: whether the end of a request lets another one arrive: in a closed loop, or if a session has a
            second turn. 1.6.1's report then names sessions.
    """

    def __init__(
        self,
        turns: Iterable[Turn],
        concurrency: int | None,
        speedup: float,
        *,
        sessions_keep_place: bool,
        start_ms: float = 0.0,
    ) -> None:
        self._limit = concurrency
        self._sessions_keep_place = sessions_keep_place
        self._open = 0
        # (moment, session, turn): requests that arrive by time only, and requests that wait for a place. At one moment,
        # the first session of the trace comes first.
        self._timed: list[tuple[float, int, Turn]] = []
        self._placeless: list[tuple[float, int, Turn]] = []
        # In a closed loop, Dynamo ignores the speedup.
        firsts = link_sessions(turns, speedup if concurrency is None else 1.0)
        self.depends_on_ends = concurrency is not None or any(turn.next is not None for turn in firsts)
        first_ms = min(turn.timestamp_ms for turn in firsts)
        for turn in firsts:
            if concurrency is None:
                moment = start_ms + (turn.timestamp_ms - first_ms) / speedup
                heappush(self._timed, (moment, turn.session, turn))
            else:
                heappush(self._placeless, (start_ms, turn.session, turn))

    @property
    def _has_place(self) -> bool:
        return self._limit is not None and self._open < self._limit

    @property
    def next_ms(self) -> float:
        """The time of the next arrival if nothing else happens before; infinite if there is none."""
        moments = [math.inf]
        if self._timed:
            moments.append(self._timed[0][0])
        if self._placeless and self._has_place:
            moments.append(self._placeless[0][0])
        return min(moments)

    def take(self, now_ms: float) -> Iterator[tuple[Turn, float]]:
        """Yield each request that arrives by now, with its arrival time; in a closed loop this is the dispatch."""
        while self._timed and self._timed[0][0] <= now_ms:
            moment, _, turn = heappop(self._timed)
            self._open += not turn.keeps_place
            yield turn, moment if self._limit is None else now_ms
        while self._placeless and self._has_place and self._placeless[0][0] <= now_ms:
            turn = heappop(self._placeless)[2]
            self._open += 1
            yield turn, now_ms

    def leave(self) -> None:
        """Count one request less as open, because it is on the link."""
        self._open -= 1

    def enter(self) -> None:
        """Count one more request as open, because it has arrived over the link."""
        self._open += 1

    def called_off(self, turn: Turn, now_ms: float) -> None:
        """Let the next request of the session arrive after a called-off one; if its client retries, the retry comes
        first.
        """
        trace = turn.trace
        if isinstance(trace, FleetRequest) and trace.retry_after_ms is not None:
            again = Turn(trace, turn.prompt)
            again.abort_after_ms = again.abort_after_tokens = None
            again.session, again.session_name, again.index = turn.session, turn.session_name, turn.index
            again.delay_ms, again.next, turn.next = trace.retry_after_ms, turn.next, again
        self.done(turn, now_ms)

    def done(self, turn: Turn, now_ms: float) -> None:
        """Let the next request of the session arrive after one that is done."""
        self._open -= 1
        after = turn.next
        if after is None:
            return
        moment = now_ms + after.delay_ms
        if self._limit is not None and not self._sessions_keep_place:
            heappush(self._placeless, (moment, after.session, after))
            return
        if self._limit is not None:
            self._open += 1
            after.keeps_place = True
        heappush(self._timed, (moment, after.session, after))
