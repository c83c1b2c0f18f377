"""The recording of a harness, from which a failure is replayed and reduced (`pytest_kvmock.reduce`).

Two levels are kept: the events as they arrived, which the journal has, and the operations on the workers. A passing test
pays for a tuple an operation, and for nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pytest_kvmock.engine.worker import KvWorker, Request
from pytest_kvmock.events import RouterEvent
from pytest_kvmock.hygiene import entries
from pytest_kvmock.programs.operations import Decode, Finish, Operation, Preempt, Prefill, Resume, RunPasses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvmock.backends import BackendSpec
    from pytest_kvmock.engine.args import MockEngineArgs
    from pytest_kvmock.events import StreamKey
    from pytest_kvmock.harness.index_comparison import Sync
    from pytest_kvmock.hygiene.log import EventLog
    from pytest_kvmock.tokens import Prompt

MOST: Final = 200_000
"""How many events, and how many operations, a failure is reduced from; what comes later is left out."""


class Recorded(NamedTuple):
    """An operation, and when it was called.

    Attributes:
        operation: what a test did with a worker, or with the router; requests are numbered from 1.
        at: how many events had arrived before.
    """

    operation: Operation
    at: int


class Recording:
    """Events and operations of a harness, in order, each up to `MOST`.

    Args:
        log: counts the events.
        journal: has them.
        sync: when the index under test is compared; see `RouterHarness`.
        index_semantics: what a Cleared empties; likewise.

    Attributes:
        operations: the operations on the workers: the class of each, its fields, and `Recorded.at`. The value is made
            when it is wanted (`recorded`).
        requests: how many requests there were.
        bursts: whether the test gave an index events in bursts (`RouterHarness.burst`).
        engines: of each worker and rank that had an engine, its arguments and the worker's backend.
        backends: the backends of the workers, by name.
        sinks: the worker ids of the sinks.
    """

    __slots__ = (
        "_journal",
        "_log",
        "backends",
        "bursts",
        "engines",
        "index_semantics",
        "operations",
        "requests",
        "sinks",
        "sync",
    )

    def __init__(
        self, log: EventLog, journal: entries.Journal, sync: Sync = "auto", index_semantics: Literal["e1"] | None = None
    ) -> None:
        self.operations: list[tuple[type[Operation], tuple[Any, ...], int]] = []
        self.requests = 0
        self.bursts = False
        self.engines: dict[StreamKey, tuple[MockEngineArgs, BackendSpec]] = {}
        self.backends: dict[str, BackendSpec] = {}
        self.sinks: set[int] = set()
        self.sync = sync
        self.index_semantics = index_semantics
        self._log = log
        self._journal = journal

    @property
    def arrivals(self) -> list[entries.Arrival]:
        """What the router received, and what stands among that; events that were found to be a chain are marked as such."""
        chained = {entry.position for entry in self._journal if isinstance(entry, entries.HashesChained)}
        arrivals: list[entries.Arrival] = []
        position = 0
        for entry in self._journal:
            event = entry.event if isinstance(entry, entries.Replayed) else entry
            if isinstance(event, RouterEvent):
                arrivals.append(replace(event, chained=True) if position in chained else event)
                position += 1
            elif isinstance(event, entries.NoEvent):
                arrivals.append(event)
        return arrivals[:MOST]

    def next_request(self) -> int:
        """Number one more request, from 1."""
        self.requests += 1
        return self.requests

    def operate(self, operation: type[Operation], *fields: Any) -> None:
        """Record an operation, before it runs: one that raises changes nothing, or a part of what it should."""
        if len(self.operations) < MOST:
            self.operations.append((operation, fields, self._log.total))

    def step(self, worker_id: int, dp_rank: int) -> None:
        """Record a pass of an engine; passes that follow on each other are one operation."""
        if self.operations:
            operation, fields, at = self.operations[-1]
            if operation is RunPasses and fields[1:] == (worker_id, dp_rank):
                self.operations[-1] = operation, (fields[0] + 1, *fields[1:]), at
                return
        self.operate(RunPasses, 1, worker_id, dp_rank)

    def recorded(self) -> Iterator[Recorded]:
        """The operations as values, in order."""
        return (Recorded(operation(*fields), at) for operation, fields, at in self.operations)


def recorded_prompt(prompt: Prompt, block_size: int) -> tuple[Sequence[int], tuple[int, ...] | int | None, bool]:
    """Return the fields `blocks`, `tail` and `hashed` of an operation with this prompt (`WithPrompt`)."""
    # Not the prompt itself: it keeps three lists of hashes for as long as it lives.
    if prompt.tokens is not None:
        return (), prompt.tokens, False
    blocks = tuple(prompt.block_hashes(block_size))
    return blocks, None if prompt.num_tokens is None else prompt.num_tokens - len(blocks) * block_size, True


class RecordedRequest(Request):
    """A request that records the operations on it."""

    def __init__(self, worker: KvWorker, prompt: Prompt, recording: Recording, *, wait: bool = True) -> None:
        super().__init__(worker, prompt)
        self._recording = recording
        self._number = recording.next_request()
        blocks, tail, hashed = recorded_prompt(prompt, worker.manager.block_size)
        worker_id, rank = worker.worker_id, worker.dp_rank
        recording.operate(Prefill, self._number, blocks, tail, worker_id, rank, hashed, wait, prompt.keys)

    def decode(self, tokens: int | Sequence[int] = 1) -> None:
        """As `Request.decode`."""
        self._recording.operate(Decode, self._number, tuple(tokens) if isinstance(tokens, list) else tokens, None)
        super().decode(tokens)

    def finish(self) -> None:
        """As `Request.finish`."""
        self._recording.operate(Finish, self._number)
        super().finish()

    def preempt(self) -> None:
        """As `Request.preempt`."""
        self._recording.operate(Preempt, self._number)
        super().preempt()

    def resume(self) -> None:
        """As `Request.resume`."""
        self._recording.operate(Resume, self._number)
        super().resume()
