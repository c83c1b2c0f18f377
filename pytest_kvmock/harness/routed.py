"""A fleet over the workers of a harness: its events are judged, its faults injected, and its index is the one under test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.checks import check_integer, check_number
from pytest_kvmock.events import Stored
from pytest_kvmock.fleet.fleet import Fleet
from pytest_kvmock.fleet.fleet_events import EventDelay, Knowledge
from pytest_kvmock.hygiene.delivery import Delivery
from pytest_kvmock.hygiene.problem import ROUTER_RULES, Problem
from pytest_kvmock.report.rows import EventMark
from pytest_kvmock.router.index import RadixIndex
from pytest_kvmock.router.routing import stream_of
from pytest_kvmock.router.selection import DynamoRouter

if TYPE_CHECKING:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.clock.mock_engine import MockEngine
    from pytest_kvmock.engine.worker import KvWorker
    from pytest_kvmock.events import RouterEvent, StreamKey
    from pytest_kvmock.fleet.router_calls import RouterCalls
    from pytest_kvmock.harness.faults import Faults
    from pytest_kvmock.harness.lookups import Overlap
    from pytest_kvmock.harness.publisher import Publisher
    from pytest_kvmock.harness.workers import WorkerKey
    from pytest_kvmock.hygiene.log import EventLog
    from pytest_kvmock.hygiene.stream import Stream
    from pytest_kvmock.report.rows import Belief
    from pytest_kvmock.router.routing import RouterRequest, Worker
    from pytest_kvmock.tokens import Prompt


class Judging(Protocol):
    """What a fleet needs of a harness (`RouterHarness`)."""

    @property
    def profile(self) -> EngineProfile: ...  # noqa: D102 - as RouterHarness has it
    @property
    def workers(self) -> Mapping[WorkerKey, KvWorker]: ...  # noqa: D102 - likewise
    @property
    def reference(self) -> RadixIndex: ...  # noqa: D102 - likewise
    @property
    def is_async(self) -> bool: ...  # noqa: D102 - likewise
    @property
    def streams(self) -> Mapping[StreamKey, Stream]: ...  # noqa: D102 - likewise
    @property
    def faults(self) -> Faults: ...  # noqa: D102 - likewise

    events: EventLog

    def worker(self, id: int | None, dp_rank: int = 0, backend: str | None = None) -> KvWorker: ...  # noqa: A002, D102 - likewise
    def engine(self, id: int | None = 0, dp_rank: int = 0, **engine: Any) -> MockEngine: ...  # noqa: A002, D102 - likewise
    def overlap(self, prompt: Prompt) -> Overlap: ...  # noqa: D102 - likewise
    def remove_worker(self, id: int) -> None: ...  # noqa: A002, D102 - likewise


class JudgedEvents(Knowledge[Delivery]):
    """The events of a harness on their way to judge and router, behind the faults; overlaps by the index of the harness.

    Args:
        harness: the harness.
        publisher: its publisher.
        delay: how late events are delivered, in virtual milliseconds.
    """

    takes_engines = False

    def __init__(self, harness: Judging, publisher: Publisher, delay: EventDelay) -> None:
        super().__init__(harness.reference, delay, has_ranks=harness.profile.dp_size > 1)
        self._harness = harness
        self._publisher = publisher
        self._found = 0  # problems before the run
        self._events_before = 0  # events up to the end of the last run, all of which the router has
        self._untold: set[Worker] = set()
        self._seen = (0, 0)  # injections and problems that have a mark
        self.marks: list[EventMark] = []

    def begin(self, calls: RouterCalls) -> None:
        """Begin a run: from now on, what is published is held until it is delivered.

        Raises:
            TypeError: the index is async.
        """
        if self._harness.is_async:
            raise TypeError("a fleet asks the index under test for overlaps between two passes; it cannot be async")
        super().begin(calls)
        self._found = len(self._harness.events.problems)
        self._seen, self.marks = (len(self._publisher.injections), self._found), []
        self._publisher.gate = lambda delivery: self._on_the_way.put(delivery.event, delivery)

    def end(self) -> None:
        """End the run, and deliver what is left of one that failed."""
        self._publisher.gate = None
        super().end()
        for delivery in self._on_the_way.take(math.inf):
            self._publisher.receive(delivery)
        self._events_before = self._harness.events.total

    def _receive(self, thing: Delivery) -> tuple[RouterEvent, bool]:
        self._publisher.receive(thing)
        return thing.event, self._publisher.may_be_refused

    def _story(self, event: RouterEvent) -> str:
        return self._publisher.story_before(event)

    def _delivered(self, now_ms: float) -> None:
        """Note when faults were injected, and errors found that no fault explains."""
        injections, problems = self._publisher.injections, self._harness.events.problems
        if self._seen == (len(injections), len(problems)) or now_ms == math.inf:
            return
        faults, found = self._seen
        self._seen = len(injections), len(problems)
        self.marks += (EventMark(now_ms, each.kind, each.worker_id, str(each)) for each in injections[faults:])
        self.marks += (
            EventMark(now_ms, each.rule, each.worker_id, each.observed, is_error=True)
            for each in problems[found:]
            if each.is_error and each.cause is None and each.fault is None and each.rule not in ROUTER_RULES
        )

    def overlaps(self, request: RouterRequest) -> Mapping[Worker, int]:
        """Return how many leading full blocks of a prompt each worker holds, by the index of the harness."""
        return cast("Mapping[Worker, int]", self._harness.overlap(request.prompt))

    @property
    def untold(self) -> set[Worker]:
        """The workers that held blocks when events had arrived that the router was not told of; they restart, and it is told again."""
        if self._harness.events.total != self._events_before:
            self._untold.update(worker for worker in self._harness.workers if self.held_blocks(worker))
        return self._untold

    def drifted(self, belief: Belief) -> None:
        """Note a wrong belief in the log, under the one that it may follow from."""
        workers = self._harness.workers
        # Of one that is not there, the first that is; where nobody is, the one that it is about.
        named = belief.worker if belief.worker in workers else next(iter(workers), belief.worker)
        key = stream_of(named)
        log = self._harness.events
        problem = Problem(belief.rule, *key, belief.observed, belief.expected, position=log.total - 1)
        if belief.follows:
            problem.follows_from(next(each for each in reversed(log.problems) if each.rule in ROUTER_RULES))
        log.note([problem])

    def held_events(self) -> list[RouterEvent]:
        """Return events that tell an empty index what is held now; the reference index counts no copies, the ledger does."""
        held = super().held_events()
        streams = self._harness.streams
        for event in [*held]:
            copies = streams[event.worker_id, event.event.dp_rank].copies.get(event.storage_tier, {})
            assert isinstance(event.event.data, Stored)
            held += [event] * copies.get(event.event.data.block_hashes[0], 0)
        return held

    def new_index(self) -> RadixIndex:
        """Return an empty index of events as the router is told them; the reference index counts no copies, the ledger does."""
        workers = list(self._harness.workers.values())
        specs = [BACKENDS.get(worker.backend) for worker in workers]
        index = RadixIndex(count_copies=any(spec is not None and spec.residency == "counted" for spec in specs))
        for worker in workers:
            index.offloads_in_chunks(worker.worker_id, worker.dp_rank, worker.traits.chunk)
        return index

    @property
    def event_errors(self) -> list[Problem]:
        """Errors of this run that no injected fault explains and no test expects."""
        new = self._harness.events.problems[self._found :]
        return [
            each for each in new if each.is_error and each.cause is None and each.fault is None and not each.covered()
        ]

    def restart(self, worker: Worker, engine: MockEngine, *, announced: bool) -> None:
        """Restart a worker; one that nobody announces is a fault, to which what follows is attributed."""
        if announced:
            self._on_the_way.drop(*stream_of(worker))
            self._untold.discard(worker)
            engine.worker.restart(announced=True)
        else:
            self._harness.faults.restart(worker)

    def crash(self, worker: Worker, engine: MockEngine) -> None:
        """Have a worker die: what it has published may still come, and nothing after that."""
        self._harness.faults.crashed(worker)
        super().crash(worker, engine)

    def _remove_from_indexes(self, worker_id: int) -> None:
        self._harness.remove_worker(worker_id)

    def join(self, worker: Worker, engine: MockEngine | None, like: MockEngine) -> MockEngine:  # noqa: ARG002 - it is made by the profile
        """Make one more worker."""
        return self._harness.engine(*stream_of(worker))


def make_fleet(
    harness: Judging,
    publisher: Publisher,
    seed: str,
    router: object,
    *,
    workers: int | None,
    backends: Sequence[str] | None,
    engine: Mapping[str, Any] | None,
    event_delay_ms: EventDelay = 0.0,
    **options: Any,
) -> Fleet:
    """Make a fleet; see `RouterHarness.fleet`."""
    if not callable(event_delay_ms):
        check_number("fleet: event_delay_ms", event_delay_ms, unit=" (milliseconds), or a function of the event")
    if isinstance(backends, str) or (backends is not None and not backends):
        raise TypeError(f"fleet: backends must be names of backends, one or more, got {backends!r:.80}")
    if workers is not None:
        check_integer("fleet: workers", workers, 1, ", or None")
    elif backends is not None:
        raise ValueError("fleet: backends need workers=, how many there are")
    size = harness.profile.dp_size
    if workers is None:
        serving = list(harness.workers.values())
    elif backends is None:
        serving = [harness.worker(each, rank) for each in range(workers) for rank in range(size)]
    else:
        serving = []
        for each in range(workers):
            first = harness.worker(None, backend=backends[each % len(backends)])
            serving += [first, *(harness.worker(first.worker_id, rank, first.backend) for rank in range(1, size))]
    engines: dict[Worker, MockEngine] = {
        (worker.worker_id, worker.dp_rank) if size > 1 else worker.worker_id: harness.engine(
            worker.worker_id, worker.dp_rank, **(engine or {})
        )
        for worker in serving
    }
    if router is None and engines:
        args = next(iter(engines.values())).args
        router = DynamoRouter(args.release.dynamo, rng=Random(f"{seed}:router"))  # noqa: S311 - mock data
    return Fleet(engines, router, knowledge=JudgedEvents(harness, publisher, event_delay_ms), **options)
