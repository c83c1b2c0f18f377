"""Which publisher of a test sent the batches that a consumer lost, and since which of its restarts.

Batches are numbered from 0 again after each restart, and each publisher has its own: a number alone says nothing. A
`KvSubscriber` says at which endpoints it has subscribed. What reports losses itself is taken to listen to the publisher
of its worker, or else to the only one. Restarts that a consumer has noticed are at least as many as it reported, and at
most as many as there were. What is not known stays open, so that a check excuses nothing by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pytest_kvmock.values.events import StreamKey
from pytest_kvmock.wire.sockets.wire_faults import WireFaults, WireInjection


class FaultyPublisher(Protocol):
    """The interface of a publisher, such as `KvPublisher`."""

    endpoints: tuple[str, ...]
    ranks: int
    faults: WireFaults

    def batches(self, dp_rank: int = 0) -> int:
        """The number of the next batch of a rank."""


class Consumer:
    """What has subscribed: where, and how often each rank had restarted then and since.

    Args:
        number: how many had subscribed before.
        endpoints: of each rank.
        start: how often each had restarted.
    """

    __slots__ = ("endpoints", "number", "reported", "start")

    def __init__(self, number: int, endpoints: Sequence[str], start: Sequence[int]) -> None:
        self.number, self.endpoints, self.start = number, tuple(endpoints), tuple(start)
        self.reported: Counter[int] = Counter()  # restarts, by rank


class Publishers:
    """The publishers of a test, and who listens to them."""

    def __init__(self) -> None:
        self._publishers: list[tuple[int, FaultyPublisher]] = []
        self._consumers = 0
        self._reported: Counter[StreamKey] = Counter()  # restarts, of consumers that are not known

    def add(self, worker_id: int, publisher: FaultyPublisher) -> None:
        """Take a publisher of a worker."""
        self._publishers.append((worker_id, publisher))

    def subscribed(self, endpoints: Sequence[str]) -> Consumer:
        """Take who subscribes at endpoints, one a rank."""
        found = [self._at(endpoint) for endpoint in endpoints]
        self._consumers += 1
        start = [0 if each is None else self._restarts(*each) for each in found]
        return Consumer(self._consumers - 1, endpoints, start)

    def sender(self, key: StreamKey, batches: range, consumer: object = None) -> dict[str, Any] | None:
        """Return what is known of who sent what was lost: number and rank of the publisher, restarts, the consumer.

        Args:
            key: the worker and rank of the events, as the consumer has it.
            batches: what it lost; none: it reports a restart.
            consumer: what `subscribed` returned; None: it is not known where the consumer listens.

        Returns:
            `publisher`, `dp_rank`, the least and the most `restarts`, and the number of the `consumer`, or None; None
            where it is not known who sent it.
        """
        dp_rank, name = key[1], None
        if isinstance(consumer, Consumer):
            name = consumer.number
            consumer.reported[dp_rank] += not batches
            found = self._at(consumer.endpoints[dp_rank]) if dp_rank < len(consumer.endpoints) else None
            least = 0 if found is None else consumer.start[dp_rank] + consumer.reported[dp_rank]
        else:
            self._reported[key] += not batches
            found, least = self._of(key), self._reported[key]
        if found is None:
            return None
        number, rank = found
        restarts = [least, self._restarts(number, rank)]
        return {"publisher": number, "dp_rank": rank, "restarts": restarts, "consumer": name}

    def injections(self) -> Iterator[tuple[int, int, WireInjection]]:
        """Yield each fault that was injected, with the number of its publisher and its worker."""
        for number, (worker_id, publisher) in enumerate(self._publishers):
            for injection in publisher.faults.injected:
                yield number, worker_id, injection

    def _restarts(self, number: int, dp_rank: int) -> int:
        return self._publishers[number][1].faults.restarts(dp_rank)

    def _at(self, endpoint: str) -> tuple[int, int] | None:
        """The number and rank of the publisher that is bound at an endpoint: the last, where one was closed."""
        for number in reversed(range(len(self._publishers))):
            for dp_rank, bound in enumerate(self._publishers[number][1].endpoints):
                if _place(bound) == _place(endpoint):
                    return number, dp_rank
        return None

    def _of(self, key: StreamKey) -> tuple[int, int] | None:
        """The publisher of a worker, or the only one, that has published at its rank."""
        worker_id, dp_rank = key
        heard = [
            (number, worker)
            for number, (worker, publisher) in enumerate(self._publishers)
            if dp_rank < publisher.ranks
            and (publisher.batches(dp_rank) or publisher.faults.restarts(dp_rank))
            and self._at(publisher.endpoints[dp_rank]) == (number, dp_rank)  # not where another took its place
        ]
        own = [each for each in heard if each[1] == worker_id]
        found = own or heard
        return (found[0][0], dp_rank) if len(found) == 1 else None


def _place(endpoint: str) -> str:
    """Where an endpoint is: of tcp the port, as the loopback has many names."""
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint
