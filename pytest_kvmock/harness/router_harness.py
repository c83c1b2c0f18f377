"""The whole world of a test: workers, ledger, reference index, and the index under test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from random import Random
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pytest_kvmock.backends import BackendSpec, EngineProfile, backend_spec
from pytest_kvmock.checks import check_integer, integer_text, is_integer, unknown_text
from pytest_kvmock.events import (
    Cleared,
    KvCacheEvent,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
)
from pytest_kvmock.harness.comparison import SYNC, Sync
from pytest_kvmock.harness.delivery import Delivery
from pytest_kvmock.harness.judge import Judge, Verdict
from pytest_kvmock.harness.questions import Questions, WorkerKey
from pytest_kvmock.harness.recording import Recording
from pytest_kvmock.harness.recovery import Recovery
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER, HASHES, KvSink, Published, is_event
from pytest_kvmock.harness.worker import HarnessWorker
from pytest_kvmock.hygiene.log import EventLog, KvEventsError
from pytest_kvmock.hygiene.report import failure_text
from pytest_kvmock.hygiene.rules import check_rule
from pytest_kvmock.hygiene.stream import RESIDENCIES, Residency, Stream, StreamKey
from pytest_kvmock.programs.operations import DropNext, RemoveWorker
from pytest_kvmock.router.index import RadixIndex
from pytest_kvmock.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_kvmock.engine.worker import KvWorker, Request
    from pytest_kvmock.faults.fault import Fault
    from pytest_kvmock.faults.faults import Faults
    from pytest_kvmock.hygiene.problem import Problem
    from pytest_kvmock.sinks import Sink


MOST_WORKER_ID: Final = 2**64 - 1

ENGINES_OWN: Final = frozenset({"evicted_and_restored", "wrong_hash"})
"""What faithful engines do wrong by themselves where a block may go before its parent, as warnings."""


class RouterHarness(Questions):
    """Workers that speak, a router index that hears them, and a ledger that judges what is said.

    As a context manager it judges on leaving. `RouterIndexerHarness` of dynamo-mocker is its model.

    Args:
        profile: size and kind of the workers; the default profile if None.
        backend: name of the workers' backend, or a `BackendSpec`; None if no worker is wanted yet (see `use_backend`).
        index: the index under test (see `IndexUnderTest` for what it offers); None for the reference index alone.
        sync: when an index under test is compared: after "every" event, "auto" (after every event up to the 2,000th,
            then after one in 16), after a "burst" (see `burst`: all events are in one) or at the "end".
        allow: rules whose breach is no failure when the harness judges on leaving.
        recovery: what an index calls to ask workers for events that it missed; None: they keep none.
        name: seeds everything random, together with the profile's seed; the plugin passes the test's node id.
        faults: how often faults strike an event at random, from 0 to 1, by their names; see `Faults`.
        survive: names of the faults that the index under test must survive.
        index_semantics: what a Cleared empties: None for the rank that published it (Dynamo from 1.6), "e1" for all ranks
            of its worker (Dynamo up to 1.3); see `RadixIndex`.

    Raises:
        ValueError: an unknown backend, rule, fault, `sync` or `index_semantics`; a rate out of range; an index that says it is not empty.
        TypeError: an index that lacks a method, or an argument of the wrong kind.

    Attributes:
        events: every event that arrived, with its verdict.
        profile: the profile in force.
        sync: when an index under test is compared.
        delivery: from worker to router.
        recording: what happened, as far as it can be replayed.
        by_hand: the workers and ranks that events made by hand name.
        index_semantics: as above.
    """

    def __init__(
        self,
        profile: EngineProfile | None = None,
        backend: str | BackendSpec | None = "lineage",
        index: Any = None,
        *,
        sync: Sync = "auto",
        allow: Collection[str] = (),
        recovery: Recovery | None = None,
        name: str = "",
        faults: Mapping[str, float] | None = None,
        survive: Collection[str] = (),
        index_semantics: Literal["e1"] | None = None,
    ) -> None:
        if sync not in SYNC:
            raise ValueError(unknown_text("sync", sync, SYNC))
        if index_semantics not in (None, "e1"):
            raise ValueError(f"unknown index_semantics {index_semantics!r}; known: None, 'e1'")
        if profile is not None and not isinstance(profile, EngineProfile):
            raise TypeError(f"profile must be an EngineProfile, got {profile!r:.80}")
        if isinstance(allow, str):
            raise TypeError(f"allow takes a list or tuple of rules, got the string {allow!r}")
        if isinstance(allow, Mapping) or not isinstance(allow, Iterable):
            raise TypeError(f"allow takes a list or tuple of rules, got {allow!r:.80}")
        self.profile = profile or EngineProfile()
        self.sync = sync
        self._allow = frozenset(map(check_rule, allow))
        self.events = EventLog(self.flush, allow=self._allow)
        self._seed = f"{self.profile.seed}:{name}"
        self._rng = Random(self._seed)  # noqa: S311 - mock data
        self._lock = RLock()
        # The comparison has a generator of its own, so that traffic is the same with and without an index under test.
        comparing = Random(self._rng.getrandbits(64))  # noqa: S311 - as above
        self.recording = Recording(self.events)
        self.index_semantics = index_semantics
        reference = RadixIndex(semantics=index_semantics)
        self._judge = Judge(self.events, index, sync, comparing, self.recording, reference=reference)
        self.delivery = Delivery(self._judge.arrive, self._judge.sink_failed, self._judge.ledger.skipped)
        self._workers: dict[WorkerKey, HarnessWorker] = {}
        self._resident: dict[tuple[StreamKey, StorageTier], Callable[[], Iterable[int]]] = {}
        self._sinks: set[int] = set()
        self.by_hand: set[StreamKey] = set()
        self._holed: set[StreamKey] = set()  # of engines whose blocks may go before their parents
        self._begun: frozenset[Request] = frozenset()
        self._recovery: Recovery | None = None
        if recovery is not None:
            self.use_recovery(recovery)
        self._spec: BackendSpec | None = None
        self._faults: Faults | None = None
        if faults:
            self.faults.at_random(faults)
        if survive != ():
            from pytest_kvmock.faults.kinds import check_survived  # for those who use it

            try:
                survived = check_survived(survive)
            except ValueError as error:
                raise ValueError(f"survive: {error}") from None
            self.faults.survive(*survived)
        if backend is not None:
            self.use_backend(backend)

    def __repr__(self) -> str:
        return f"<RouterHarness {self.backend}: {len(self._workers)} workers, {self.events.total} events>"

    # ---------------------------------------------------------------------------------------------- workers

    @property
    def backend(self) -> str | None:
        """Name of the workers' backend; None while there is none."""
        return None if self._spec is None else self._spec.name

    @property
    def backends(self) -> dict[str, BackendSpec]:
        """The backends of its workers, by name."""
        specs = [worker.spec for worker in self._workers.values()]
        return {spec.name: spec for spec in (self._spec, *specs) if spec is not None}

    @property
    def reference(self) -> RadixIndex:
        """The reference index."""
        return self._judge.reference

    @property
    def index(self) -> Any:
        """The index that answers: the one under test, or the reference."""
        under_test = self._judge.under_test
        return self.reference if under_test is None else under_test.index

    @property
    def is_async(self) -> bool:
        """Whether the index under test is to be awaited."""
        return self._judge.is_async

    @property
    def workers(self) -> Mapping[WorkerKey, KvWorker]:
        """The workers by id, or by (id, dp_rank) where a worker has more ranks than one."""
        return MappingProxyType(self._workers)

    @property
    def streams(self) -> Mapping[StreamKey, Stream]:
        """What the events have said, by (worker_id, dp_rank)."""
        return MappingProxyType(self._judge.ledger.streams)

    @property
    def sink_ids(self) -> frozenset[int]:
        """The worker ids of its sinks."""
        return frozenset(self._sinks)

    def use_backend(self, backend: str | BackendSpec) -> None:
        """Say which backend the workers have, once, and make those that exist from the start.

        Raises:
            ValueError: an unknown backend, or another one than before.
        """
        spec = backend_spec(backend)
        if self._spec is not None:
            if spec is not self._spec:
                raise ValueError(f"the harness has backend {self._spec.name!r} already; it cannot become {spec.name!r}")
            return
        self._spec = spec
        for worker_id in range(self.profile.workers):
            for dp_rank in range(self.profile.dp_size):
                self.worker(worker_id, dp_rank)

    def worker(self, id: int, dp_rank: int = 0, backend: BackendSpec | str | None = None) -> KvWorker:  # noqa: A002 - upstream's word
        """The worker of this id and rank; made now if there is none.

        Args:
            id: its id, from 0 to 2**64 - 1.
            dp_rank: its data-parallel rank.
            backend: a backend of its own; the harness's if None.

        Raises:
            ValueError: an id out of range or of a sink, an unknown backend, another backend than the worker has, or
                none at all.
        """
        key = self._key(id, dp_rank)
        found = self._workers.get(key)
        if found is None:
            return self._add_worker(id, dp_rank, backend)
        wanted = backend.name if isinstance(backend, BackendSpec) else backend
        if wanted is not None and found.backend != wanted:
            raise ValueError(f"worker {id} has backend {found.backend!r}, not {wanted!r}")
        return found

    def next_worker(self, backend: BackendSpec | str | None = None) -> KvWorker:
        """Make one more worker, with the lowest id that is free."""
        return self._add_worker(self._free_id(), 0, backend)

    def _free_id(self) -> int:
        """The lowest id that no engine and no sink has."""
        taken = {*self._sinks, *(worker.worker_id for worker in self._workers.values())}
        return next(i for i in count() if i not in taken)

    def misfit(self, id: int | None, **fields: Any) -> KvWorker:  # noqa: A002 - as above
        """Make one more worker with another profile than the router's; see `Faults.block_size`.

        Args:
            id: its id; the lowest that is free if None.
            **fields: the fields of the profile that differ.

        Raises:
            ValueError: a field out of range, or a worker that exists.
        """
        worker_id = self._free_id() if id is None else id
        if any(worker.worker_id == worker_id for worker in self._workers.values()):
            raise ValueError(f"worker {worker_id} exists already; its profile is the router's")
        return self._add_worker(worker_id, 0, None, self.profile.replace(**fields))

    def _add_worker(
        self, worker_id: int, dp_rank: int, backend: BackendSpec | str | None, profile: EngineProfile | None = None
    ) -> KvWorker:
        if not is_integer(worker_id, 0) or worker_id > MOST_WORKER_ID:
            raise ValueError(f"a worker id is an integer from 0 to {MOST_WORKER_ID}, got {worker_id!r}")
        if worker_id in self._sinks:
            raise ValueError(f"worker {worker_id} is a sink of this test; take another id for an engine")
        if not is_integer(dp_rank, 0):
            raise ValueError(f"a dp_rank is {integer_text(0)}, got {dp_rank!r}")
        spec = self._spec if backend is None else backend_spec(backend)
        if spec is None:
            raise ValueError("this harness has no backend yet: pass backend=, or have the test ask for kv_backend")
        rng = Random(self._rng.getrandbits(64))  # noqa: S311 - mock data
        # The worker is made before it is heard: it may be refused, and some engines speak as they begin.
        worker = HarnessWorker(self, spec, worker_id, dp_rank, rng, profile=profile)
        self._workers[self._key(worker_id, dp_rank)] = worker
        if not spec.prefix_closed:
            self._holed.add((worker_id, dp_rank))
        self._judge.open(
            (worker_id, dp_rank),
            first_id=0,
            block_size=self.profile.block_size,
            num_blocks=self.profile.num_blocks,
            residency=spec.residency,
            prefix_closed=spec.prefix_closed,
            chain=None if spec.chain is None else partial(spec.chain, worker.manager),
        )
        if self._recovery is not None:
            self._recovery.restarted((worker_id, dp_rank))
        worker.listen()
        return worker

    def _key(self, worker_id: int, dp_rank: int) -> WorkerKey:
        return (worker_id, dp_rank) if self.profile.dp_size > 1 or dp_rank else worker_id

    def make_sink(
        self,
        *,
        chained: bool | None = None,
        num_blocks: int | None = None,
        residency: Residency = "unique",
        prefix_closed: bool = True,
    ) -> KvSink:
        """Where a block manager of the user's own may publish; each is a worker of its own.

        Args:
            chained: whether its hashes must be Dynamo's chain (`wrong_hash`); None: that is found out from
                what is published.
            num_blocks: how many blocks each of its ranks has on the device (`over_capacity`); None: it is not judged.
            residency: "unique" where a block is published once while it is held; "counted" where every copy is.
            prefix_closed: whether a block goes before its parent (`orphaned_child`); see `BackendSpec`.

        Raises:
            ValueError: a capacity below 1, or another residency.
        """
        if num_blocks is not None:
            check_integer("make_kv_sink: num_blocks", num_blocks, 1, ", or None")
        if residency not in RESIDENCIES:
            raise ValueError(f"make_kv_sink: {unknown_text('residency', residency, RESIDENCIES)}")
        taken = {*self._sinks, *(key[0] for key in self._judge.ledger.streams)}  # by engines, and by hand
        worker_id = next(i for i in count(FIRST_SINK_WORKER) if i not in taken)
        self._sinks.add(worker_id)
        self._judge.open(
            (worker_id, 0),
            first_id=None,
            block_size=self.profile.block_size,
            num_blocks=num_blocks,
            residency=residency,
            prefix_closed=prefix_closed,
        )
        return KvSink(self, worker_id, chained=chained)

    def add_sink(self, sink: Sink, *, before: bool = False) -> None:
        """Have one more sink hear what workers publish.

        Args:
            sink: told of each event, with tier and token ids.
            before: tell it before the router; what it raises then keeps the event from the router, as the first of
                Dynamo's publishers does.
        """
        self.delivery.add_sink(sink, before=before)

    def prompt(self, blocks: int = 4, after: Prompt | TokenIds | None = None, *, tail: int = 0) -> Prompt:
        """A prompt of fresh tokens.

        Args:
            blocks: how many whole blocks of fresh tokens.
            after: what it begins with: tokens that it shares with another prompt.
            tail: further tokens, less than a block.

        Raises:
            ValueError: `after` has no tokens, or a size is out of range.
        """
        size = self.profile.block_size
        if blocks < 0 or not 0 <= tail < size:
            raise ValueError(
                f"prompt: blocks is at least 0 and tail from 0 to {size - 1} tokens, got blocks={blocks}, tail={tail}"
            )
        shared: tuple[int, ...] = ()
        if after is not None:
            tokens = Prompt.of(after).tokens
            if tokens is None:
                raise ValueError("prompt(after=...) needs a prompt of tokens; this one has only hashes")
            shared = tokens
        fresh = blocks * size + tail
        return Prompt((*shared, *(self._rng.randrange(100_000) for _ in range(fresh))))

    # ----------------------------------------------------------------------------------------------- events

    def next_id(self, worker_id: int, dp_rank: int) -> int:
        """The id that an event of this worker gets if it has none; it is used up."""
        worker = self._workers.get(self._key(worker_id, dp_rank))
        published = self.delivery.published.get((worker_id, dp_rank), 0)  # by hand perhaps, with ids of its own
        return published if worker is None else max(published, worker.manager.take_event_id())

    def apply(
        self,
        events: Published | Iterable[Published],
        worker_id: int = 0,
        dp_rank: int = 0,
    ) -> None:
        """Let the router hear events made by hand.

        Args:
            events: one or more, each a Stored, Removed or Cleared, which gets its worker's next id, a KvCacheEvent or
                a RouterEvent.
            worker_id: whose events they are, where they do not say it.
            dp_rank: and of which rank.

        Raises:
            TypeError: something else. The events before it have been heard.
            ValueError: events of a sink, which publishes them itself. Likewise.
        """
        if isinstance(events, (Stored, Removed, Cleared, KvCacheEvent, RouterEvent)):
            events = (events,)
        elif not isinstance(events, Iterable) or isinstance(events, (str, bytes, Mapping)):
            _refuse(events)
        for event in events:
            with self._lock:  # from the next id on, or two threads would get one id
                addressed = self._addressed(event, worker_id, dp_rank)
                self.by_hand.add((addressed.worker_id, addressed.event.dp_rank))
                self.hear(addressed)

    def _addressed(self, event: Published, worker_id: int, dp_rank: int) -> RouterEvent:
        """An event with what it lacks: id, rank and worker."""
        if isinstance(event, (Stored, Removed, Cleared)):
            event = KvCacheEvent(self.next_id(worker_id, dp_rank), event, dp_rank)
        if isinstance(event, KvCacheEvent):
            event = RouterEvent(worker_id, event)
        if not is_event(event):
            _refuse(event)
        if event.worker_id in self._sinks:
            raise ValueError(f"worker {event.worker_id} is a sink of this test; publish its events through the sink")
        return event

    def hear(self, event: RouterEvent, *, chained: bool = False) -> None:
        """An event is published; it arrives if nothing is in the way.

        Args:
            event: what is said, and by whom.
            chained: whether its hashes must be the engine's chain.
        """
        with self._lock:
            self.delivery.publish(event, chained=chained)

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Give the index under test events without a flush and a question in between, while the context lasts.

        After it, after 10,000 events, and whenever the test asks (`overlap`, `flush`, `events.check`), the index is
        flushed once and compared for the chains that the events changed. So a queue that overflows shows; a drift is
        placed at the last event that explains it. With sync="end" it is compared at the end all the same. An async index
        gets no event before `aflush` anyway.
        """
        self.recording.bursts = True
        try:
            with self._judge.burst():
                yield
        finally:
            with self._lock:
                self._judge.end_burst()

    def judge_hashes(self, events: Sequence[RouterEvent]) -> None:
        """Judge hashes of events that were published before it was known that they are a chain."""
        if events:
            self._judge.judge_hashes(events)

    def publishing(self) -> AbstractContextManager[bool]:
        """Hold up all other publishers while the context lasts."""
        return self._lock

    # ----------------------------------------------------------------------------------------------- faults

    @property
    def faults(self) -> Faults:
        """What the test breaks on purpose, on the way from workers to router."""
        if self._faults is None:
            from pytest_kvmock.faults.faults import Faults

            self._faults = Faults(self, self._judge, self._seed)
        return self._faults

    def drop_next(self, n: int = 1, *, kind: str | None = None) -> Fault:
        """Lose the next events on their way to the router: `faults.lose(n, kind=kind)`."""
        fault = self.faults.lose(n, kind=kind)
        self.recording.operate(DropNext, n, kind)
        return fault

    def remove_worker(self, id: int) -> None:  # noqa: A002 - upstream's word
        """The router forgets a worker, all ranks; it may come back with any event id.

        The worker itself goes on; `worker(id)` makes a new one.

        Raises:
            ValueError: the index under test has no `remove_worker`; nothing has changed.
        """
        with self._lock:
            self.recording.operate(RemoveWorker, id)
            for key in self._judge.gone(id, first_id=None):
                self.delivery.published.pop(key, None)
                for tier in StorageTier:
                    self._resident.pop((key, tier), None)
                self._workers.pop(self._key(*key), None)

    def restarted(self, worker: KvWorker, *, announced: bool) -> None:
        """A worker begins anew; called by `HarnessWorker.restart`.

        Raises:
            ValueError: it is announced, and the index under test cannot be told; nothing has changed.
        """
        key = (worker.worker_id, worker.dp_rank)
        with self._lock:
            if announced:
                self._judge.gone(*key, first_id=0)
            self.delivery.published[key] = 0
            if self._recovery is not None:
                self._recovery.restarted(key)

    @property
    def asks_recovery(self) -> bool:
        """Whether a router may ask its workers for what it missed."""
        return self._recovery is not None

    def use_recovery(self, recovery: Recovery) -> None:
        """Have workers keep what they publish, so that a router can ask them for what it missed.

        Raises:
            TypeError: it is no `Recovery`.
            ValueError: events were published before, which nobody has kept (but for a Cleared, with which some engines
                begin); the harness has another recovery already, or the recovery another harness.
        """
        if not isinstance(recovery, Recovery):
            raise TypeError(f"recovery must be a Recovery, got {recovery!r:.80}")
        with self._lock:
            if self._recovery is not None:
                raise ValueError("the harness has a recovery already")
            begun = [entry.event for entry in self.events if isinstance(entry.event.event.data, Cleared)]
            if not len(begun) == self.events.total == sum(self.delivery.published.values()):
                raise ValueError("recovery comes too late: events were published before, and no worker has kept them")
            recovery.join(self._judge, self._lock)
            for event in begun:
                recovery.keep(event)
            self._recovery, self.delivery.kept = recovery, recovery.keep

    # ------------------------------------------------------------------------------------------ comparisons

    def flush(self) -> None:
        """Compare what can be compared by now: ids with what was published, the stream with the engines.

        An async index is flushed by `aflush`, in the test's own loop.
        """
        with self._lock:
            self._judge.flush(self.delivery.published, self._residents())

    async def aflush(self) -> None:
        """As `flush`, for an async index: give it the events that wait, and compare it with the reference.

        Raises:
            TypeError: the index is not async.
        """
        __tracebackhide__ = True
        self._need_async("aflush")
        await self._judge.acompare()
        self.flush()

    def _residents(self) -> list[tuple[StreamKey, StorageTier, Callable[[], Iterable[int]]]]:
        # A worker that has never published, and has nothing, is only a name for events made by hand.
        speaking = [
            worker
            for worker in self._workers.values()
            if worker.has_published or (worker.prefix_caching and worker.manager.resident())
        ]
        return [
            *((key, tier, resident) for (key, tier), resident in self._resident.items()),
            *(((w.worker_id, w.dp_rank), StorageTier.DEVICE, w.manager.resident) for w in speaking),
        ]

    def compare_with(
        self, worker_id: int, dp_rank: int, storage_tier: StorageTier, resident: Callable[[], Iterable[int]]
    ) -> None:
        """Compare the stream of a worker, at each flush and at the end, with what a callable says is resident."""
        self._resident[(worker_id, dp_rank), storage_tier] = resident

    # ---------------------------------------------------------------------------------------------- judging

    def body_begins(self) -> None:
        """What is open now was opened by fixtures: the next verdict leaves it to their teardown, the one after does not."""
        self._begun = frozenset(request for worker in self._workers.values() for request in worker.requests)

    def judge(self) -> Verdict:
        """Flush, compare everything there is to compare, and say what is new since the last time."""
        with self._lock:
            self._judge.close_async()
            self._judge.compare()
            self.flush()
            self._judge.leaked(self._workers.values(), self._begun)
            self._begun = frozenset()
            verdict = self._judge.verdict()
            if self._faults is not None:
                verdict.unmet.extend(self._faults.unmet())
            return verdict

    def is_engines_own(self, warning: Problem) -> bool:
        """Whether a warning is about what a faithful mock engine does by itself, as `multi_lru` and `hash_cache` do."""
        key = (warning.worker_id, warning.dp_rank)
        return warning.rule in ENGINES_OWN and key in self._holed and key not in self.by_hand and warning.fault is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # a test's failure shows the test
        verdict = self.judge()
        errors = [problem for problem in verdict.errors if problem.rule not in self._allow]
        if kind is None and (errors or verdict.unmet):
            raise KvEventsError(failure_text(errors, verdict.unmet, harness=True))


def _refuse(event: object) -> None:
    raise TypeError(
        f"apply takes Stored, Removed, Cleared, KvCacheEvent or RouterEvent, one or more, with {HASHES}, "
        f"got {event!r:.80} ({type(event).__name__})"
    )
