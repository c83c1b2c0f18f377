"""The values that travel from a worker to the judge: an event as it was published, and as it arrives.

Theory of operation. Every event takes one path, and what travels there is a value:

1. A block manager publishes, in parts, as it does not know its worker. What stands at the worker (`EventRecorder`, `KvSink`)
   makes a `RouterEvent` of the parts, and notes in it whether it is for a request. That is the value: what changes it makes
   another by `replace`. Who publishes one again, by hand, takes the note out of it.
2. The `Publisher` notes its id, and hands it to the sinks before the router.
3. Where a book of what would have arrived without faults is kept, the judge enters the event there first: `Published`.
4. A `Delivery` is made. With faults armed, `FaultInjector.publish` makes of it an `Injection` or none, and deliveries:
   none for a lost event or one that is held back, two for a doubled one, and those that were held back until now.
5. The judge records the injection, and receives the deliveries, one after the other. Each is applied to the ledger, to
   the reference index, and to the index under test.
6. Sinks after the router get the event as it was published.

Restarts and Cleared events that a fault makes up enter at 5: no worker published them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_kvmock.events import RouterEvent, StreamKey
from pytest_kvmock.hygiene.injection import Injection
from pytest_kvmock.hygiene.problem import Problem


class Published(NamedTuple):
    """An event as a worker published it, in the book of what would have arrived without faults.

    Attributes:
        event: the event.
        problems: what is wrong with it, whatever faults make of it.
        place: its number in the history that a router which survives faults must reach; 0 where no test asks for one.
    """

    event: RouterEvent
    problems: Sequence[Problem]
    place: int


class Delivery(NamedTuple):
    """An event between a worker and the router.

    Attributes:
        event: the event, as it arrives.
        published: the event as it was published; None where no book is kept, or no worker published it.
        injection: the fault that changed it, delayed it or made it up; None: it arrives as it was published.
    """

    event: RouterEvent
    published: Published | None = None
    injection: Injection | None = None

    @property
    def key(self) -> StreamKey:
        """Worker and rank, as the event names them when it arrives.

        A fault may have moved it to another stream: then `published` has the key of the worker that published it.
        """
        return self.event.key
