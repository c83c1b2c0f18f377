"""The harness of a test: workers, ledger, reference index, and the index under test.

One subject: the interface of a harness. Each method delegates to the part that does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Self, overload

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.harness.by_hand import ByHand
from pytest_kvmock.harness.engine_comparison import EngineComparison
from pytest_kvmock.harness.index_comparison import Sync
from pytest_kvmock.harness.inside import Inside
from pytest_kvmock.harness.judge import Judge, check_comparison
from pytest_kvmock.harness.lookups import Lookups, Overlap
from pytest_kvmock.harness.publisher import Publisher
from pytest_kvmock.harness.recording import Recording
from pytest_kvmock.harness.user_sink import KvSink, Publishable
from pytest_kvmock.harness.verdict import Verdict, Verdicts
from pytest_kvmock.harness.workers import WorkerKey, Workers, check_worker_key
from pytest_kvmock.oracle.hygiene.entries import Journal
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import EventRulesBroken, Problem
from pytest_kvmock.oracle.hygiene.report import failure_text, problems_text
from pytest_kvmock.oracle.hygiene.rules import check_allowed
from pytest_kvmock.oracle.hygiene.stream_spec import Residency
from pytest_kvmock.oracle.index.index import Clears
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.programs.operations import DropNext, RemoveWorker
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.harness.faults import Faults
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.oracle.faults.fault import Fault
    from pytest_kvmock.values.shared_stores import StoreSpec
    from pytest_kvmock.values.sinks import GivenSink


class RouterHarness:
    """Workers that publish KV events, a router index that receives them, and a ledger that judges the stream.

    As a context manager it judges at the end of the block. It models `RouterIndexerHarness` of dynamo-mocker.

    Args:
        profile: size and kind of the workers; None: the default profile.
        backend: name of the workers' backend, or a `BackendSpec`; None if no worker is needed yet (see
            `Inside.use_backend`).
        index: the index under test (see `IndexUnderTest` for its methods), or, with `roles`, one for each role,
            `{"prefill": ..., "decode": ...}`; None: only the reference index.
        sync: when an index under test is compared: after "every" event, "auto" (after every event up to the 2,000th,
            then after one in 16), after a "burst" (see `burst`; all events form one) or at the "end".
        allow: rules whose breach is no failure when the harness judges at the end of the block.
        recovery: the callable that an index uses to ask workers for missed events; None: workers keep no events.
        name: seeds all random choices, together with the profile's seed; the plugin passes the test's node id.
        faults: rates of random faults, from 0 to 1, by name; see `Faults.at_random`.
        survive: names of the faults that the index under test must survive.
        engine: fields of `MockEngineArgs` for the engines of its workers (see `engine`); their sizes override the
            profile's.
        judge_unpublished: whether to judge also the events that workers without prefix caching would publish, only by
            the rules of the ledger.
        clears: what a Cleared empties: the "rank" that published it (Dynamo from 1.6), or all ranks of its "worker"
            (Dynamo up to 1.3); see `RadixIndex`.
        journal: keeps the entries of the ledger; a `CapturingJournal` also writes them to a capture. None: a plain
            journal.
        roles: the workers of each role in P/D pairs, such as `{"prefill": 1, "decode": 1}` (see `role`); None: no
            roles.
        stores: the stores that workers share, such as `{"disk": {"kind": "files", "workers": [0, 1]}}`; None: workers
            share no store, and each keeps its tiers below the host to itself.

    Raises:
        ValueError: an unknown backend, rule, fault, `sync` or `clears`; a rate out of range; an index that is not
            empty.
        TypeError: an index that lacks a method, or an argument of the wrong kind.

    Attributes:
        events: every arrived event, with its verdict, and their numbers by kind (`events.counts`).
        profile: the profile in force.
        publisher: the stage between workers and router: ids, sinks, the lock.
        recording: the events, the operations, and the settings of the harness, for a replay.
        inside: the interface for the plugin, servers, subscribers and fleets.
        by_hand: publishes the events of `apply`; it has the next id of an event made by hand.
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
        clears: Clears = "rank",
        engine: Mapping[str, Any] | None = None,
        judge_unpublished: bool = False,
        journal: Journal | None = None,
        roles: Mapping[str, Any] | None = None,
        stores: Mapping[str, Any] | None = None,
    ) -> None:
        check_comparison(sync, clears)
        if profile is not None and not isinstance(profile, EngineProfile):
            raise TypeError(f"profile must be an EngineProfile, got {profile!r:.80}")
        self._allow = check_allowed(allow)
        self.profile = profile or EngineProfile()
        if engine:
            from pytest_kvmock.harness.engines import engine_profile  # imported on first use

            self.profile = engine_profile(self.profile, engine)
        self.profile = self.profile.sized_for(backend)
        if self.profile.tiers is not None and self.profile.tiers.storage:
            self.profile = replace(self.profile, tiers=self.profile.tiers.with_store())
        self.events = EventLog(self.flush, allow=self._allow)
        self._seed = f"{self.profile.seed}:{name}"
        self._rng = Random(self._seed)  # noqa: S311 - mock data
        # The comparison has a separate generator, so that traffic is the same with and without an index under test.
        comparing = Random(self._rng.getrandbits(64))  # noqa: S311 - as above
        journal = Journal() if journal is None else journal
        self.recording = Recording(self.events, journal, sync, clears)
        shared, read = _stores(stores), _roles(roles, self.profile.dp_size)
        if read:  # keys include the rank if a role has several
            self.profile = replace(self.profile, dp_size=max(role.ranks for role in read.values()))
        if read and isinstance(index, Mapping):
            index = _by_role(index, read, lambda worker_id: self._workers.role_of(worker_id))  # noqa: PLW0108 - made below
        self._judge = Judge(self.events, index, sync, comparing, clears=clears, journal=journal, stores=shared)
        self.publisher = Publisher(self._judge)
        self._engines, self._verdicts = EngineComparison(self._judge), Verdicts(self.events)
        self._workers = Workers(
            self.profile,
            self._judge,
            self.publisher,
            self._engines,
            recording=self.recording,
            rng=self._rng,
            engine=engine or {},
            judge_unpublished=judge_unpublished,
            roles=read,
            stores=shared,
        )
        self.by_hand = ByHand(self.publisher, self._workers)
        self._lookups = Lookups(self._judge, self._workers, self.profile.block_size, self.publisher.lock)
        self.inside = Inside(
            self.events, self._judge, self.publisher, self._workers, recording=self.recording, by_hand=self.by_hand
        )
        if recovery is not None:
            self.inside.use_recovery(recovery)
        self._faults: Faults | None = None
        self.fleets: list[Fleet] = []
        if faults:
            self.faults.at_random(faults)
        if survive != ():
            from pytest_kvmock.oracle.faults.kinds import check_survived  # imported on first use

            self.faults.survive(*check_survived(survive, "survive: "))
        if backend is not None:
            self.inside.use_backend(backend)

    def __repr__(self) -> str:
        return f"<RouterHarness {self.backend}: {len(self._workers.by_key)} workers, {self.events.total} events>"

    # ---------------------------------------------------------------------------------------------- workers

    @property
    def backend(self) -> str | None:
        """Name of the workers' backend; None until one is set."""
        return None if self._workers.spec is None else self._workers.spec.name

    @property
    def index(self) -> Any:
        """The index that answers: the index under test, or else the reference."""
        return self._judge.reference if (under_test := self._judge.under_test) is None else under_test.index

    @property
    def workers(self) -> Mapping[WorkerKey, KvWorker]:
        """The workers by id, or by (id, dp_rank) if workers have several ranks."""
        return self._workers.by_key

    def worker(
        self,
        id: int | None,  # noqa: A002 - upstream's word
        *,
        dp_rank: int = 0,
        backend: BackendSpec | str | None = None,
    ) -> KvWorker:
        """Return the worker with this id and rank; make it if there is none.

        Args:
            id: its id, from 0 to 2**64 - 1; None: a new worker, with the lowest free id.
            dp_rank: its data-parallel rank.
            backend: its backend; None: the harness's.

        Raises:
            ValueError: an id out of range or of a sink; or a backend that is unknown, differs from the worker's, or is
                missing.
        """
        return self._workers.next_worker(backend) if id is None else self._workers.worker(id, dp_rank, backend)

    def store(self, name: str) -> Any:
        """Return a store that workers share. Changes to it publish nothing by themselves.

        It is a `FileStore`, `MooncakeObjects`, `LmcacheServer` or `MooncakeMaster`, depending on its kind.

        Raises:
            ValueError: an unknown name, or a store that no worker uses yet.
        """
        made = self._workers.stores
        if name not in made:
            raise ValueError(
                unknown_text("store", name, made) if made else f"store: this harness has none, got {name!r:.80}"
            )
        return made[name]

    def role(self, worker_type: str) -> list[KvWorker]:
        """Return the workers of a role of P/D pairs ("prefill", "decode" or "both"), in the order of their ids.

        Raises:
            ValueError: the harness has no worker of that role.
        """
        if worker_type not in self._workers.by_role:
            raise ValueError(
                f"role: this harness has {', '.join(map(repr, self._workers.by_role)) or 'no roles'}, "
                f"got {worker_type!r:.80}; roles={{'prefill': 1, 'decode': 1}} makes some"
            )
        return list(self._workers.by_role[worker_type])

    def engine(
        self,
        id: int | None = 0,  # noqa: A002 - upstream's word
        *,
        dp_rank: int = 0,
        args: MockEngineArgs | None = None,
        **engine: Any,
    ) -> MockEngine:
        """Return the engine of a worker, in virtual time; make it if there is none.

        Args:
            id: the worker's id; None: a new worker, with the lowest free id.
            dp_rank: its data-parallel rank.
            args: the engine's arguments; by default from the harness's profile and `engine` fields.
            **engine: fields of `MockEngineArgs` that override those of the harness.

        Raises:
            ValueError: a field out of range, sizes that differ from the worker's, or arguments that differ from those
                of the existing engine.
        """
        return self._workers.engine(id, dp_rank, args, engine)

    def fleet(
        self,
        router: object = None,
        *,
        workers: int | None = None,
        backends: Sequence[str] | None = None,
        engine: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Fleet:
        """Put a router in front of this harness's engines; their events are judged, and its index answers overlaps.

        Args:
            router: see `Fleet`; None: Dynamo's, seeded by the name of the harness.
            workers: number of workers, with ids from 0; None: the existing workers. With `roles` it must be None.
            backends: names of backends, used in turn for new workers with the next free ids. None: the harness's
                backend.
            engine: fields of `MockEngineArgs` that override those of the harness.
            **options: arguments of `Fleet`: `semantics`, `loads`, `concurrency`, `event_delay_ms` and others.

        Raises:
            TypeError: the router or an argument has the wrong type.
            ValueError: an argument out of range, or workers that cannot serve together.
        """
        from pytest_kvmock.harness.routed import make_fleet  # imported on first use

        made = make_fleet(
            self, self.publisher, self._seed, router, workers=workers, backends=backends, engine=engine, **options
        )
        self.fleets.append(made)
        return made

    def make_sink(
        self,
        *,
        chained: bool | None = None,
        num_blocks: int | None = None,
        tier_blocks: Mapping[StorageTier | str, int] | None = None,
        residency: Residency = "unique",
        prefix_closed: bool = True,
        worker_id: int | None = None,
        hash: str | None = None,  # noqa: A002 - the user's word
        seed: str | None = None,
        restores: bool = False,
    ) -> KvSink:
        """Make a sink for your own block manager to publish to; each sink is a worker.

        Args:
            chained: whether its hashes must be Dynamo's chain (`wrong_hash`); None: detected from its events.
            num_blocks: number of blocks on the device, per rank (`over_capacity`); None: not judged.
            tier_blocks: number of blocks in the tiers below, by tier: `{"host_pinned": 256}`.
            residency: "unique" if a block is published once while it is held; "counted" if every copy is published.
            prefix_closed: whether a block is removed before its parent (`orphaned_child`); see `BackendSpec`.
            worker_id: the worker that it stands for; None: the first free id from 2**16.
            hash: the hash of vLLM that names its blocks (`--prefix-caching-hash-algo`). Its hashes are then judged by
                vLLM's chain (`wrong_hash`), not by Dynamo's.
            seed: seed of the hash, as PYTHONHASHSEED; None: that of vLLM 0.33 (`xxhash` has none).
            restores: whether it may store a held block again and then publish a Removed of it although it keeps the
                block, as Dynamo's `multi_lru` does. Differences that `compare` finds then are listed under the warning,
                not reported as a separate `engine_drift`.

        Raises:
            ValueError: a capacity below 1, an unknown tier, residency or hash, or the id of another worker or sink.
        """
        return self._workers.make_sink(
            chained=chained,
            num_blocks=num_blocks,
            tier_blocks=tier_blocks or {},
            residency=residency,
            prefix_closed=prefix_closed,
            worker_id=worker_id,
            named=(hash, seed),
            restores=restores,
        )

    def add_sink(self, sink: GivenSink, *, before: bool = False, worker_id: int | None = None) -> None:
        """Add a sink that gets each event.

        Args:
            sink: a sink of any shape of `sinks.GivenSink`. A sink that raises and whose `closed` is True gets no more
                events.
            before: whether it gets events before the router. Its exception then keeps the event from the router, like
                an exception of the first of Dynamo's publishers.
            worker_id: the worker whose events it gets; None: all workers.
        """
        self.publisher.add_sink(sink, before=before, worker_id=worker_id)

    def prompt(self, blocks: int = 4, after: Prompt | TokenIds | None = None, *, tail: int = 0, **keys: Any) -> Prompt:
        """Make a prompt of fresh tokens.

        Args:
            blocks: number of full blocks of fresh tokens.
            after: the prompt or tokens that it begins with; it also takes over what that prompt carries.
            tail: number of further tokens, less than a block.
            **keys: what it carries, as for `Prompt`: `lora_name`, `cache_salt`, `multimodal`, `session_id`.

        Raises:
            ValueError: `after` has no tokens, a size is out of range, or a key has an invalid value.
        """
        size = self.profile.block_size
        if blocks < 0 or not 0 <= tail < size:
            raise ValueError(
                f"prompt: blocks is at least 0 and tail from 0 to {size - 1} tokens, got blocks={blocks}, tail={tail}"
            )
        before = None if after is None else Prompt.of(after)
        if before is not None and before.tokens is None:
            raise ValueError("prompt(after=...) needs a prompt of tokens; this one has only hashes")
        fresh = [self._rng.randrange(100_000) for _ in range(blocks * size + tail)]
        return Prompt(fresh, **keys) if before is None else before.followed_by(fresh, **keys)

    # ----------------------------------------------------------------------------------------------- events

    def apply(self, events: Publishable | Iterable[Publishable], worker_id: int = 0, dp_rank: int = 0) -> None:
        """Publish events made by hand to the router.

        Args:
            events: one or more of Stored, Removed, Located, Updated or Cleared, which get their worker's next id, or of
                KvCacheEvent or RouterEvent.
            worker_id: the worker of events that name no worker.
            dp_rank: that worker's rank.

        Raises:
            TypeError: something else. The events before it were published.
            ValueError: an event of a sink's worker; publish it through the sink. The events before it were published.
        """
        self.by_hand.publish(events, worker_id, dp_rank)

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Within the context, give the index under test events without a flush or lookup in between.

        After the context, after 10,000 events, and at each lookup or check, the index is flushed once and compared for
        the chains that the events changed (sync="end": at the end). This reveals a queue that overflows. An async index
        waits for `aflush` in any case.
        """
        self.recording.bursts = True
        try:
            with self._judge.burst():
                yield
        finally:
            with self.publisher.lock:
                self._judge.end_burst()

    # ----------------------------------------------------------------------------------------------- faults

    @property
    def faults(self) -> Faults:
        """The faults that the test injects between workers and router."""
        if self._faults is None:
            from pytest_kvmock.harness.faults import Faults  # imported on first use

            self._faults = Faults(self.profile, self._workers, self.publisher, self._judge, self._seed)
        return self._faults

    def drop_next(self, n: int = 1, *, kind: str | None = None) -> Fault:
        """Lose the next events between workers and router: `faults.lose(n, kind=kind)`."""
        fault = self.faults.lose(n, kind=kind)
        self.recording.operate(DropNext, n, kind)
        return fault

    def remove_worker(self, id: WorkerKey) -> None:  # noqa: A002 - upstream's word
        """Remove a worker, or one of its ranks, from the router; it may come back with any event id.

        The worker object still exists, but its tiers below the device are emptied and its transfers cancelled.
        `worker(id)` makes a new worker.

        Args:
            id: its id, for all its ranks; or (id, dp_rank), for one rank.

        Raises:
            ValueError: an invalid id; or the index under test has no `remove_worker(worker_id)`, or, for one of several
                ranks, no `remove_worker_dp_rank(worker_id, dp_rank)`. Nothing has changed.
        """
        worker_id, dp_rank = check_worker_key(id)
        with self.publisher.lock:
            self.recording.operate(RemoveWorker, worker_id, dp_rank)
            keys = self.publisher.removed(worker_id, dp_rank)
            self._engines.remove(keys)
            self._workers.remove(keys, whole=dp_rank is None)

    # ------------------------------------------------------------------------------------------ comparisons

    def flush(self) -> None:
        """Compare all that can be compared now: arrived ids with published ids, and the streams with the engines.

        An async index is flushed by `aflush`, in the test's own event loop.
        """
        with self.publisher.lock:
            self._workers.release_events()
            self._judge.flush_index()
            self._engines.flush(self.publisher.next_ids, self._workers.by_key.values())

    async def aflush(self) -> None:
        """Flush an async index: give it the waiting events, and compare it with the reference.

        Raises:
            TypeError: the index is not async.
        """
        __tracebackhide__ = True
        self._lookups.need_async("aflush")
        self._workers.release_events()
        await self._judge.acompare()
        self.flush()

    # ---------------------------------------------------------------------------------------------- lookups

    @overload
    def overlap(
        self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE, *, owner: str | None = None
    ) -> Overlap: ...

    @overload
    def overlap(self, prompt: Prompt | TokenIds, tier: None) -> dict[StorageTier, Overlap]: ...

    def overlap(
        self,
        prompt: Prompt | TokenIds,
        tier: StorageTier | str | None = StorageTier.DEVICE,
        *,
        owner: str | None = None,
    ) -> Overlap | dict[StorageTier, Overlap]:
        """Ask the index how many leading blocks of a prompt each worker holds; workers without a match are left out.

        Args:
            prompt: the prompt.
            tier: the tier. Below the device, the answer is the number of blocks by which the tier extends the match of
                the faster tiers. None: the answers of all tiers, by tier; tiers without any match are absent.
            owner: instead of a tier, a store that workers share; the answer is the number of blocks by which it extends
                the match of each of its workers.

        Raises:
            TypeError: the index is async: `await kv_harness.aoverlap(prompt)`.
            ValueError: an unknown tier or store; or the index takes tokens, and the prompt has none; or the index does
                not answer by tier.
        """
        __tracebackhide__ = True
        if owner is not None:
            return self._lookups.run("overlap", self._lookups.of_owner(prompt, owner))
        if tier is None:
            return self._lookups.run("overlap", self._lookups.by_tier(prompt))
        return self._lookups.run("overlap", self._lookups.of_tier(prompt, tier))

    @overload
    async def aoverlap(
        self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE, *, owner: str | None = None
    ) -> Overlap: ...

    @overload
    async def aoverlap(self, prompt: Prompt | TokenIds, tier: None) -> dict[StorageTier, Overlap]: ...

    async def aoverlap(
        self,
        prompt: Prompt | TokenIds,
        tier: StorageTier | str | None = StorageTier.DEVICE,
        *,
        owner: str | None = None,
    ) -> Overlap | dict[StorageTier, Overlap]:
        """Ask an async index as `overlap` does; the answer covers the events up to the last `aflush`."""
        __tracebackhide__ = True
        if owner is not None:
            return await self._lookups.arun("aoverlap", self._lookups.of_owner(prompt, owner))
        if tier is None:
            return await self._lookups.arun("aoverlap", self._lookups.by_tier(prompt))
        return await self._lookups.arun("aoverlap", self._lookups.of_tier(prompt, tier))

    def reusable(self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE) -> dict[WorkerKey, int]:
        """Return how many tokens of a prompt each engine would reuse, at most those of `overlap`; workers without any
        are left out. The call changes nothing.

        Args:
            prompt: the prompt.
            tier: "device"; or a tier below it, for the tokens by which it extends the device's match; or "storage", for
                the tokens that would be fetched from the storage behind the host, which no event reports.

        Raises:
            ValueError: a worker cannot name the blocks of the prompt; or an unknown tier.
        """
        return self._lookups.reusable(prompt, tier)

    # ----------------------------------------------------------------------------------------------- checks

    def assert_no_event_errors(self) -> None:
        """Flush, and raise if there was any error that the test did not expect.

        Raises:
            EventRulesBroken: there was an unexpected error; the message is the report.
        """
        __tracebackhide__ = True
        self.events.assert_no_event_errors()

    def assert_in_sync(self) -> None:
        """Flush, and raise if streams and engines, or index and reference, differ now, for any reason.

        Raises:
            EventRulesBroken: they differ; the message is the report.
            TypeError: the index is async: `await kv_harness.aassert_in_sync()`.
        """
        __tracebackhide__ = True
        self._lookups.need_sync("assert_in_sync", "aassert_in_sync")
        with self.publisher.lock:
            self._raise_if_any(self._judge.compare())

    async def aassert_in_sync(self) -> None:
        """Flush an async index, and check it as `assert_in_sync` does."""
        __tracebackhide__ = True
        self._lookups.need_async("aassert_in_sync")
        self._raise_if_any(await self._judge.acompare())

    def _raise_if_any(self, found: list[Problem]) -> None:
        __tracebackhide__ = True
        self.flush()
        found += self._engines.differences(self._workers.by_key.values())
        if found:
            raise EventRulesBroken(problems_text(found))

    # ---------------------------------------------------------------------------------------------- judging

    def judge(self) -> Verdict:
        """Flush, compare everything, and return the problems since the last verdict."""
        with self.publisher.lock:
            self._verdicts.not_flushed(self._judge.take_waiting())
            self._judge.compare()
            self.flush()
            self._verdicts.leaked(self._workers.by_key.values(), self.inside.begun)
            self.inside.begun = frozenset()
            verdict = self._verdicts.next()
            if self._faults is not None:
                verdict.unmet.extend(self._faults.unmet())
            return verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # so that the traceback of a failure shows the test
        verdict = self.judge()
        errors = [problem for problem in verdict.errors if problem.rule not in self._allow]
        if kind is None and (errors or verdict.unmet):
            raise EventRulesBroken(failure_text(errors, verdict.unmet, harness=True))


def _roles(given: Mapping[str, Any] | None, dp_size: int) -> Mapping[str, Any]:
    """Return the roles of a harness; the module that reads them is imported only if there are any."""
    if given is None:
        return {}
    from pytest_kvmock.harness.roles import read_roles

    return read_roles(given, dp_size)


def _by_role(index: Mapping[str, Any], roles: Mapping[str, Any], role_of: Callable[[int], Any]) -> Any:
    """Return one index that combines the index of each role."""
    from pytest_kvmock.fleets.pairs.role_router import RoleIndexes, check_roles

    found = check_roles("index", index)
    if set(roles) != set(found):
        raise ValueError(f"index by role is for roles 'prefill' and 'decode', got {', '.join(map(repr, roles))}")
    return RoleIndexes(found, role_of)


def _stores(given: Mapping[str, Any] | None) -> Mapping[str, StoreSpec]:
    """Return the stores of a harness; the module that reads them is imported only if there are any."""
    if given is None:
        return {}
    from pytest_kvmock.values.shared_stores import read_stores

    return read_stores(given)
