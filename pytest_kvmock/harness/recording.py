"""What happened in a harness, so that a failure can be replayed and cut down (`pytest_kvmock.reduce`).

Two levels are kept: the events as they arrived, and what was asked of the workers. A passing test pays for a tuple an
event and a tuple an operation, and for nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.engine.worker import Request

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_kvmock.engine.worker import KvWorker
    from pytest_kvmock.events import RouterEvent, StreamKey
    from pytest_kvmock.hygiene.log import EventLog
    from pytest_kvmock.tokens import Prompt

MOST: Final = 200_000
"""How many events, and how many operations, are kept; what comes later is not."""

Kind: TypeAlias = Literal[
    "prefill", "decode", "finish", "preempt", "resume", "clear", "restart", "remove_worker", "drop_next"
]


class Operation(NamedTuple):
    """One thing that a test asked of a worker, or did to the router.

    Attributes:
        kind: the method that was called.
        worker: (worker_id, dp_rank); of `drop_next`, which is about no worker, (0, 0).
        request: number of the request that it is about, from 1; 0 for none.
        argument: prefill: a `Prompt` (while recorded, its tokens, local hashes and length); decode: the tokens, or how
            many; restart: whether it was announced; drop_next: how many, and of which kind.
        at: how many events had arrived before.
    """

    kind: Kind
    worker: StreamKey
    request: int
    argument: Any
    at: int = 0


class Forgotten(NamedTuple):
    """Among the events: the router was told that a worker begins anew.

    Attributes:
        worker_id: which worker.
        dp_rank: which rank; None for all.
        first_id: the id that its next event has; None for any.
    """

    worker_id: int
    dp_rank: int | None
    first_id: int | None


Arrival: TypeAlias = "tuple[RouterEvent, bool] | Forgotten"
"""An event as it arrived, and whether its hashes must be Dynamo's chain; or a worker that is forgotten."""


class Recording:
    """Events and operations of a harness, in order, each up to `MOST`.

    Attributes:
        arrivals: what the router heard.
        operations: what was asked of the workers, as tuples of `Operation`'s fields.
        requests: how many requests there were.
        bursts: whether the test gave an index events in bursts (`RouterHarness.burst`).
    """

    __slots__ = ("_log", "arrivals", "bursts", "operations", "requests")

    def __init__(self, log: EventLog) -> None:
        self.arrivals: list[Arrival] = []
        self.operations: list[tuple[Kind, StreamKey, int, Any, int]] = []
        self.requests = 0
        self.bursts = False
        self._log = log

    def arrive(self, arrival: Arrival) -> None:
        """Keep what the router hears."""
        if len(self.arrivals) < MOST:
            self.arrivals.append(arrival)

    def chain(self, positions: Collection[int]) -> None:
        """Note of events, by their positions in the log, that their hashes must be Dynamo's chain."""
        position = 0
        for i, arrival in enumerate(self.arrivals):
            if not isinstance(arrival, Forgotten):
                if position in positions:
                    self.arrivals[i] = arrival[0], True
                position += 1

    def operate(self, kind: Kind, worker: StreamKey, request: int = 0, argument: Any = None) -> None:
        """Keep what is asked, before it is done: what raises changes nothing, or a part of what it should."""
        if len(self.operations) < MOST:
            self.operations.append((kind, worker, request, argument, self._log.total))


class RecordedRequest(Request):
    """A request that notes what is asked of it."""

    def __init__(self, worker: KvWorker, prompt: Prompt, recording: Recording) -> None:
        super().__init__(worker, prompt)
        self._recording = recording
        self._key = (worker.worker_id, worker.dp_rank)
        recording.requests += 1
        self._number = recording.requests
        size = worker.manager.block_size
        # Not the prompt itself: it keeps three lists of hashes for as long as it lives.
        said = (prompt.tokens, None if prompt.tokens is not None else prompt.block_hashes(size), prompt.num_tokens)
        self._note("prefill", said)

    def _note(self, kind: Kind, argument: Any = None) -> None:
        self._recording.operate(kind, self._key, self._number, argument)

    def decode(self, tokens: int | Sequence[int] = 1) -> None:
        """As `Request.decode`."""
        self._note("decode", tuple(tokens) if isinstance(tokens, list) else tokens)
        super().decode(tokens)

    def finish(self) -> None:
        """As `Request.finish`."""
        self._note("finish")
        super().finish()

    def preempt(self) -> None:
        """As `Request.preempt`."""
        self._note("preempt")
        super().preempt()

    def resume(self) -> None:
        """As `Request.resume`."""
        self._note("resume")
        super().resume()
