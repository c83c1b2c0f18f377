"""The values that pass from a worker to the judge: an event as published, and as it arrives.

Theory of operation. Every event takes one path, as a value:

1. A block manager publishes in parts, as it has no worker id. The worker's `EventRecorder` or `KvSink` makes a
   `RouterEvent` of the parts, and notes in it whether it belongs to a request. The event is immutable: changes make a
   copy by `replace`. Code that publishes one again by hand removes the note.
2. The `Publisher` notes its id, and passes it to the sinks before the router.
3. If there is a book of the events as they would arrive without faults, the judge enters the event there: `Published`.
4. A `Delivery` is made. With armed faults, `FaultInjector.publish` turns it into at most one `Injection` and some
   deliveries: none for an event that is lost or held back, two for a doubled one, and also events that were held back
   until now.
5. The judge records the injection, and applies the deliveries, one after the other, to the ledger, the reference index
   and the index under test.
6. Sinks after the router get the event as published.

Restarts and Cleared events that a fault makes up begin at step 5, as no worker published them.
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
        place: its number in the history that a router that survives faults must reach; 0 if no test requires one.
    """

    event: RouterEvent
    problems: Sequence[Problem]
    place: int


class Delivery(NamedTuple):
    """An event between a worker and the router.

    Attributes:
        event: the event as it arrives.
        published: the event as published; None if no book is kept, or no worker published it.
        injection: the fault that changed it, delayed it or made it up; None if it arrives as published.
    """

    event: RouterEvent
    published: Published | None = None
    injection: Injection | None = None

    @property
    def key(self) -> StreamKey:
        """Worker and rank that the event names when it arrives.

        If a fault moved it to another stream, `published` has the key of the worker that published it.
        """
        return self.event.key
