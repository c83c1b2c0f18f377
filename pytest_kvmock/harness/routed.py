"""A fleet that uses the workers of a harness: events are judged, faults are injected, and the index under test answers
overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_kvmock.engines.backends import BACKENDS
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.fleet_events import EventDelay, Knowledge
from pytest_kvmock.fleets.report.rows import EventMark
from pytest_kvmock.fleets.routing.routing import stream_of
from pytest_kvmock.fleets.routing.selection import DynamoRouter
from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.oracle.hygiene.problem import ROUTER_RULES, Problem
from pytest_kvmock.oracle.index.index import RadixIndex
from pytest_kvmock.values.checks import check_integer, check_number, unknown_text
from pytest_kvmock.values.events import Stored

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.report.rows import Belief
    from pytest_kvmock.fleets.router_calls import RouterCalls
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker
    from pytest_kvmock.harness.faults import Faults
    from pytest_kvmock.harness.inside import Inside
    from pytest_kvmock.harness.lookups import Overlap
    from pytest_kvmock.harness.publisher import Publisher
    from pytest_kvmock.harness.workers import WorkerKey
    from pytest_kvmock.oracle.hygiene.log import EventLog
    from pytest_kvmock.values.events import RouterEvent
    from pytest_kvmock.values.tokens import Prompt


class Judging(Protocol):
    """The part of a harness that a fleet uses (`RouterHarness`)."""

    @property
    def profile(self) -> EngineProfile: ...  # noqa: D102 - as RouterHarness has it
    @property
    def workers(self) -> Mapping[WorkerKey, KvWorker]: ...  # noqa: D102 - as above
    @property
    def faults(self) -> Faults: ...  # noqa: D102 - as above

    events: EventLog
    inside: Inside

    def worker(self, id: int | None, *, dp_rank: int = 0, backend: str | None = None) -> KvWorker: ...  # noqa: A002, D102 - as above
    def engine(self, id: int | None = 0, *, dp_rank: int = 0, **engine: Any) -> MockEngine: ...  # noqa: A002, D102 - as above
    def overlap(self, prompt: Prompt) -> Overlap: ...  # noqa: D102 - as above
    def remove_worker(self, id: int) -> None: ...  # noqa: A002, D102 - as above


class JudgedEvents(Knowledge[Delivery]):
    """The events of a harness on their way to judge and router, after faults; the harness's index answers overlaps.

    Args:
        harness: the harness.
        publisher: its publisher.
        delay: the delay of events, in virtual milliseconds.
    """

    takes_engines = False

    def __init__(self, harness: Judging, publisher: Publisher, delay: EventDelay) -> None:
        super().__init__(harness.inside.reference, delay, has_ranks=harness.profile.dp_size > 1)
        self._harness = harness
        self._publisher = publisher
        self._found = 0  # number of problems before the run
        self._events_before = 0  # number of events up to the end of the last run; the router has all of them
        self._untold: set[Worker] = set()
        self._seen = (0, 0)  # numbers of injections and of problems that were checked for marks
        self.marks: list[EventMark] = []

    def begin(self, calls: RouterCalls) -> None:
        """Begin a run: from now on, published events are held until they are due.

        Raises:
            TypeError: the index is async.
        """
        if self._harness.inside.is_async:
            raise TypeError("a fleet asks the index under test for overlaps between two passes; it cannot be async")
        super().begin(calls)
        for worker in self._harness.workers.values():
            self._know(worker)
        self._found = len(self._harness.events.problems)
        self._seen, self.marks = (len(self._publisher.injections), self._found), []
        self._publisher.gate = lambda delivery: self._on_the_way.put(delivery.event, delivery)

    def end(self) -> None:
        """End the run, and deliver the events that a failed run left."""
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
        """Record marks for injected faults, and for new errors that no fault explains."""
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
        """Return how many leading full blocks of a prompt each worker holds, according to the harness's index."""
        return cast("Mapping[Worker, int]", self._harness.overlap(request.prompt))

    @property
    def untold(self) -> set[Worker]:
        """The workers that held blocks when events arrived between runs, which the router did not get. After an
        announced restart a worker is removed from the set.
        """
        if self._harness.events.total != self._events_before:
            self._untold.update(worker for worker in self._harness.workers if self.held_blocks(worker))
        return self._untold

    def drifted(self, belief: Belief) -> None:
        """Record a wrong belief in the log, under the belief that it may follow from."""
        workers = self._harness.workers
        # An absent worker is replaced by the first existing worker, if there is one.
        named = belief.worker if belief.worker in workers else next(iter(workers), belief.worker)
        key = stream_of(named)
        log = self._harness.events
        problem = Problem(belief.rule, *key, belief.observed, belief.expected, position=log.total - 1)
        if belief.follows:
            problem.follows_from(next(each for each in reversed(log.problems) if each.rule in ROUTER_RULES))
        log.note([problem])

    def held_events(self) -> list[RouterEvent]:
        """Return the events that bring an empty index to the current state. Copies come from the ledger, because the
        reference index does not count them.
        """
        held = super().held_events()
        streams = self._harness.inside.streams
        for event in [*held]:
            copies = streams[event.worker_id, event.event.dp_rank].copies.get(event.storage_tier, {})
            assert isinstance(event.event.data, Stored)
            held += [event] * copies.get(event.event.data.block_hashes[0], 0)
        return held

    def new_index(self) -> RadixIndex:
        """Return an empty index for events as they reach the router. It counts copies if a backend publishes them; the
        reference index does not.
        """
        workers = list(self._harness.workers.values())
        specs = [BACKENDS.get(worker.backend) for worker in workers]
        copies = any(spec is not None and spec.residency == "counted" for spec in specs)
        index = RadixIndex(count_copies=copies, stores=self.reference.stores)
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
        """Restart a worker; an unannounced restart is a fault, and the problems after it are attributed to it."""
        if announced:
            self._on_the_way.drop(*stream_of(worker))
            self._untold.discard(worker)
            engine.worker.restart(announced=True)
        else:
            self._harness.faults.restart(worker)

    def crash(self, worker: Worker, engine: MockEngine) -> None:
        """Let a worker die: events that it has published may still arrive, and no others follow."""
        self._harness.faults.crashed(worker)
        super().crash(worker, engine)

    def _remove_from_indexes(self, worker_id: int) -> None:
        self._harness.remove_worker(worker_id)

    def join(self, worker: Worker, engine: MockEngine | None, like: MockEngine) -> MockEngine:  # noqa: ARG002 - it is made by the profile
        """Add a worker, with the role of the engine `like`."""
        worker_id, dp_rank = stream_of(worker)
        if like.args.worker_type != "aggregated":
            self._harness.inside.add_to_role(like.args.worker_type, worker_id, dp_rank)
        joined = self._harness.engine(worker_id, dp_rank=dp_rank)
        self._know(joined.worker)
        return joined

    def _know(self, worker: KvWorker) -> None:
        """Record how many next tokens a worker's names cover, so that prompts are looked up by such names."""
        self.forms.know((worker.worker_id, worker.dp_rank), worker.traits.looks_ahead)


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
    own = {"engines", "index", "stores"}  # the harness provides these
    known = [name for name in (*signature(Fleet).parameters, "workers", "backends", "engine") if name not in own]
    for name in options:
        if name in own:
            raise TypeError(f"fleet: {name} is the harness's own; the index is what kv_index returns, by role or one")
        if name not in known:
            raise TypeError(f"fleet: {unknown_text('argument', name, known)}")
    if not callable(event_delay_ms):
        check_number("fleet: event_delay_ms", event_delay_ms, unit=" (milliseconds), or a function of the event")
    if isinstance(backends, str) or (backends is not None and not backends):
        raise TypeError(f"fleet: backends must be names of backends, one or more, got {backends!r:.80}")
    if workers is not None:
        check_integer("fleet: workers", workers, 1, ", or None")
    elif backends is not None:
        raise ValueError("fleet: backends need workers=, the number of workers")
    size = harness.profile.dp_size
    by_role = harness.inside.by_role
    if workers is not None and by_role:
        asked = f"workers={workers}" if backends is None else f"backends={backends!r:.80}"
        have = ", ".join(f"{len({each.worker_id for each in found})} of {kind!r}" for kind, found in by_role.items())
        raise ValueError(f"fleet: the workers of this harness have roles ({have}), and all serve; leave {asked} out")
    if workers is None:
        serving = list(harness.workers.values())
    elif backends is None:
        serving = [harness.worker(each, dp_rank=rank) for each in range(workers) for rank in range(size)]
    else:
        serving = []
        for each in range(workers):
            first = harness.worker(None, backend=backends[each % len(backends)])
            serving += [
                first,
                *(harness.worker(first.worker_id, dp_rank=rank, backend=first.backend) for rank in range(1, size)),
            ]
    engines: dict[Worker, MockEngine] = {
        (worker.worker_id, worker.dp_rank) if size > 1 else worker.worker_id: harness.engine(
            worker.worker_id, dp_rank=worker.dp_rank, **(engine or {})
        )
        for worker in serving
    }
    if router is None and engines:
        args = next(iter(engines.values())).args
        router = DynamoRouter(args.release.dynamo, rng=Random(f"{seed}:router"))  # noqa: S311 - mock data
    return Fleet(engines, router, JudgedEvents(harness, publisher, event_delay_ms), **options)
