"""Which publisher of a test sent the batches that a consumer lost, and after which of its restarts.

Batches are numbered from 0 again after each restart, and each publisher has separate numbers, so a number alone is not
enough. A `KvSubscriber` names the endpoints that it subscribes to. Other code that reports losses is assumed to listen
to the publisher of its worker, or else to the only publisher. The number of restarts that a consumer noticed is at
least the number that it reported, and at most the number that happened. Unknown data is left out, and a check then
excuses nothing.
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
        """Return the number of the next batch of a rank."""


class Consumer:
    """A subscriber: its endpoints, and the restarts of each rank before it subscribed and since then.

    Args:
        number: the number of earlier consumers.
        endpoints: the endpoint of each rank.
        start: how often each rank had restarted before.
    """

    __slots__ = ("endpoints", "number", "reported", "start")

    def __init__(self, number: int, endpoints: Sequence[str], start: Sequence[int]) -> None:
        self.number, self.endpoints, self.start = number, tuple(endpoints), tuple(start)
        self.reported: Counter[int] = Counter()  # reported restarts, by rank


class Publishers:
    """The publishers of a test, and their consumers."""

    def __init__(self) -> None:
        self._publishers: list[tuple[int, FaultyPublisher]] = []
        self._consumers = 0
        self._reported: Counter[StreamKey] = Counter()  # restarts reported by unknown consumers

    def add(self, worker_id: int, publisher: FaultyPublisher) -> None:
        """Add a publisher of a worker."""
        self._publishers.append((worker_id, publisher))

    def subscribed(self, endpoints: Sequence[str]) -> Consumer:
        """Add a consumer that subscribes to these endpoints, one per rank; return it."""
        found = [self._at(endpoint) for endpoint in endpoints]
        self._consumers += 1
        start = [0 if each is None else self._restarts(*each) for each in found]
        return Consumer(self._consumers - 1, endpoints, start)

    def sender(self, key: StreamKey, batches: range, consumer: object = None) -> dict[str, Any] | None:
        """Return the known data about the publisher of lost batches.

        Args:
            key: the worker and rank of the events, from the consumer's view.
            batches: the lost batches; empty: the consumer reports a restart.
            consumer: the consumer, as returned by `subscribed`; None: its endpoints are unknown.

        Returns:
            `publisher` (its number), `dp_rank`, the minimum and maximum of `restarts`, and the number of the `consumer`
            or None. None if the publisher is unknown.
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
        """Yield each injected fault, with the number of its publisher and its worker."""
        for number, (worker_id, publisher) in enumerate(self._publishers):
            for injection in publisher.faults.injected:
                yield number, worker_id, injection

    def _restarts(self, number: int, dp_rank: int) -> int:
        return self._publishers[number][1].faults.restarts(dp_rank)

    def _at(self, endpoint: str) -> tuple[int, int] | None:
        """Return the number and rank of the publisher at an endpoint: the last one, if earlier ones were closed."""
        for number in reversed(range(len(self._publishers))):
            for dp_rank, bound in enumerate(self._publishers[number][1].endpoints):
                if _place(bound) == _place(endpoint):
                    return number, dp_rank
        return None

    def _of(self, key: StreamKey) -> tuple[int, int] | None:
        """Return the publisher of a worker, or the only publisher, that has published at this rank."""
        worker_id, dp_rank = key
        heard = [
            (number, worker)
            for number, (worker, publisher) in enumerate(self._publishers)
            if dp_rank < publisher.ranks
            and (publisher.batches(dp_rank) or publisher.faults.restarts(dp_rank))
            and self._at(publisher.endpoints[dp_rank]) == (number, dp_rank)  # not if another publisher has replaced it
        ]
        own = [each for each in heard if each[1] == worker_id]
        found = own or heard
        return (found[0][0], dp_rank) if len(found) == 1 else None


def _place(endpoint: str) -> str:
    """Return the place of an endpoint; for tcp only the port, as the loopback has many names."""
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint
