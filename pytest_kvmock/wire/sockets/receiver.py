"""The interface of receivers of a subscriber's events and losses, such as a harness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import ismethod
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """Batches that could not be obtained.

    Attributes:
        dp_rank: the rank.
        batches: their numbers; empty if the publisher restarted.
        observed: what happened.
    """

    dp_rank: int
    batches: range
    observed: str

    def __str__(self) -> str:
        return f"rank {self.dp_rank}: {self.observed}"


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """A problem of a message.

    Attributes:
        dp_rank: the rank.
        batch: the number of the batch; None if it had none.
        text: the problem; for a payload, the text of a `WireProblem`.
    """

    dp_rank: int
    batch: int | None
    text: str

    def __str__(self) -> str:
        batch = "a message" if self.batch is None else f"batch {self.batch}"
        return f"rank {self.dp_rank}, {batch}: {self.text}"


class LostBatches(Protocol):
    """The function called for batches that could not be fully obtained or read: the result of `Receiver.losses_at`, or
    `on_loss`.
    """

    def __call__(self, worker_id: int, dp_rank: int, batches: range, observed: str, /) -> object:
        """Note a loss.

        Args:
            worker_id: the worker.
            dp_rank: the rank.
            batches: their numbers; after a restart an empty range whose `start` is the number that was due. For single
                unreadable events, the number of their batch, with one call for each run of such events, between the
                events around it.
            observed: what happened, as text.
        """


@runtime_checkable
class Receiver(Protocol):
    """A receiver of a `KvSubscriber`'s events that also handles losses: the inside of a `RouterHarness`, or a `KvSink`.

    A subscriber gets one of its methods as the sink, or the receiver itself if it is callable.
    """

    def losses_at(self, endpoints: Sequence[str], /) -> LostBatches:
        """Return the function that a subscriber at these endpoints (one for each rank) calls for losses."""

    def sinks_of(self, worker_id: int, /) -> Iterable[tuple[object, int | None]]:
        """Yield the sinks that get the events of a worker received here, each with its worker; None: all workers."""


def receiver_of(sink: object) -> Receiver | None:
    """Return the receiver that a sink is or belongs to; None if there is none."""
    owner = sink.__self__ if ismethod(sink) else sink
    owner = getattr(owner, "inside", owner)  # of a `RouterHarness`
    return owner if isinstance(owner, Receiver) else None
