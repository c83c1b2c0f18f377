"""The values that pass from a worker to the judge: an event as published, and as it arrives.

Theory of operation. Every event takes one path, as a value:

1. A block manager publishes the parts of an event, as it has no worker id. The worker's `EventRecorder` or `KvSink`
   makes a `RouterEvent` of them, and marks whether it belongs to a request. The event is immutable: `replace` makes a
   changed copy. Code that publishes an event again by hand removes the mark.
2. The `Publisher` records its id, and passes it to the sinks before the router.
3. If there is a book of the events as they would arrive without faults, the judge adds the event there: `Published`.
4. A `Delivery` is made. With armed faults, `FaultInjector.publish` turns it into at most one `Injection` and some
   deliveries: none for a lost or delayed event, two for a doubled event, and the delayed events that are due now.
5. The judge records the injection, and applies the deliveries in order to the ledger, the reference index and the index
   under test.
6. Sinks after the router get the event as published.

Restarts and Cleared events that a fault creates begin at step 5, as no worker published them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.values.events import RouterEvent, StreamKey


class Published(NamedTuple):
    """An event as published, in the book of the events as they would arrive without faults.

    Attributes:
        event: the event.
        problems: its problems without any fault.
        place: its number in the history that a router must reach to survive faults; 0 if no test requires this.
    """

    event: RouterEvent
    problems: Sequence[Problem]
    place: int


class Delivery(NamedTuple):
    """An event between a worker and the router.

    Attributes:
        event: the event as it arrives.
        published: the event as published; None if no book is kept, or no worker published it.
        injection: the fault that changed, delayed or created it; None if it arrives as published.
    """

    event: RouterEvent
    published: Published | None = None
    injection: Injection | None = None

    @property
    def key(self) -> StreamKey:
        """Worker and rank of the event as it arrives.

        If a fault moved it to another stream, `published` has the key of the worker that published it.
        """
        return self.event.key
