"""The receivers of the events that a subscriber reads, and of its losses. A harness is one, and declares it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import ismethod
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """Batches that could not be had.

    Attributes:
        dp_rank: the rank.
        batches: their numbers; none where the publisher began again.
        observed: what happened.
    """

    dp_rank: int
    batches: range
    observed: str

    def __str__(self) -> str:
        return f"rank {self.dp_rank}: {self.observed}"


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Something that was wrong with a message.

    Attributes:
        dp_rank: the rank.
        batch: the number of the batch; None: it had none.
        text: the problem; for a payload, the text of a `WireProblem`.
    """

    dp_rank: int
    batch: int | None
    text: str

    def __str__(self) -> str:
        batch = "a message" if self.batch is None else f"batch {self.batch}"
        return f"rank {self.dp_rank}, {batch}: {self.text}"


class LostBatches(Protocol):
    """What is called for batches that could not be had or read, in part too: what `Receiver.losses_at` returns, or
    `on_loss`.
    """

    def __call__(self, worker_id: int, dp_rank: int, batches: range, observed: str, /) -> object:
        """Take note.

        Args:
            worker_id: the worker.
            dp_rank: the rank.
            batches: their numbers; after a restart none, and `start` is the number that was due. Where single events
                could not be read, that of their batch, once for each run of such events: between the events around it.
            observed: what happened, in words.
        """


@runtime_checkable
class Receiver(Protocol):
    """What has more to do with the events of a `KvSubscriber` than to take them: the inside of a `RouterHarness`,
    and a `KvSink`.

    A subscriber is given one of its methods as the sink, or the receiver itself where that can be called.
    """

    def losses_at(self, endpoints: Sequence[str], /) -> LostBatches:
        """Return the function that a subscriber at these endpoints, one a rank, calls for losses."""

    def sinks_of(self, worker_id: int, /) -> Iterable[tuple[object, int | None]]:
        """Return the receiver of the events of a worker that arrive here, with their worker; None: of all workers."""


def receiver_of(sink: object) -> Receiver | None:
    """The receiver that a sink is, or is a method of; None if it is neither."""
    owner = sink.__self__ if ismethod(sink) else sink
    owner = getattr(owner, "inside", owner)  # of a `RouterHarness`
    return owner if isinstance(owner, Receiver) else None
