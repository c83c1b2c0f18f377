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

    As a context manager it judges on leaving. It models `RouterIndexerHarness` of dynamo-mocker.

    Args:
        profile: size and kind of the workers; the default profile if None.
        backend: name of the workers' backend, or a `BackendSpec`; None if no worker is needed yet (see
            `Inside.use_backend`).
        index: the index under test (see `IndexUnderTest` for its methods), or, with `roles`, one of each role,
            `{"prefill": ..., "decode": ...}`; None for the reference index alone.
        sync: when an index under test is compared: after "every" event, "auto" (after every event up to the 2,000th,
            then after one in 16), after a "burst" (see `burst`: all events are in one) or at the "end".
        allow: rules whose breach is no failure when the harness judges on leaving.
        recovery: the callable by which an index asks workers for events that it missed; None: they keep none.
        name: seeds everything random, together with the profile's seed; the plugin passes the test's node id.
        faults: how often faults strike an event at random, from 0 to 1, by name; see `Faults.at_random`.
        survive: names of the faults that the index under test must survive.
        engine: fields of `MockEngineArgs` for the engines of its workers (see `engine`); sizes among them go before the
            profile's.
        judge_unpublished: judge what workers without prefix caching would publish, too, by the rules of the ledger
            alone.
        clears: what a Cleared empties: the "rank" that published it (Dynamo from 1.6), or all ranks of its "worker"
            (Dynamo up to 1.3); see `RadixIndex`.
        journal: keeps what the harness learns of its streams: a `CapturingJournal` writes it down too; None: a plain
            one.
        roles: its workers by what they are for in P/D pairs, such as `{"prefill": 1, "decode": 1}`
            (see `role`); None: they are in none.
        stores: the stores that workers share, such as `{"disk": {"kind": "files", "workers": [0, 1]}}`; None: there
            are none, and what a worker has below its host is its own.

    Raises:
        ValueError: an unknown backend, rule, fault, `sync` or `clears`; a rate out of range; an index with
            blocks.
        TypeError: an index that lacks a method, or an argument of the wrong kind.

    Attributes:
        events: every event that arrived, with its verdict, and how many of each kind there were (`events.counts`).
        profile: the profile in force.
        publisher: from worker to router: ids, sinks, the lock.
        recording: the events and operations, and how the harness was made, for a replay.
        inside: what is for the plugin, servers, subscribers and fleets.
        by_hand: what `apply` publishes by; it has the next id of an event made by hand.
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
        # The comparison has a generator of its own, so that traffic is the same with and without an index under test.
        comparing = Random(self._rng.getrandbits(64))  # noqa: S311 - as above
        journal = Journal() if journal is None else journal
        self.recording = Recording(self.events, journal, sync, clears)
        shared, read = _stores(stores), _roles(roles, self.profile.dp_size)
        if read:  # workers are named by their rank where one role has several
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
        """Name of the workers' backend; None while there is none."""
        return None if self._workers.spec is None else self._workers.spec.name

    @property
    def index(self) -> Any:
        """The index that answers: the one under test, or the reference."""
        return self._judge.reference if (under_test := self._judge.under_test) is None else under_test.index

    @property
    def workers(self) -> Mapping[WorkerKey, KvWorker]:
        """The workers by id, or by (id, dp_rank) where a worker has more ranks than one."""
        return self._workers.by_key

    def worker(
        self,
        id: int | None,  # noqa: A002 - upstream's word
        *,
        dp_rank: int = 0,
        backend: BackendSpec | str | None = None,
    ) -> KvWorker:
        """The worker of this id and rank; made now if there is none.

        Args:
            id: its id, from 0 to 2**64 - 1; None: one more worker, with the lowest id that is free.
            dp_rank: its data-parallel rank.
            backend: a backend of its own; the harness's if None.

        Raises:
            ValueError: an id out of range or of a sink, an unknown backend, another backend than the worker has, or
                none at all.
        """
        return self._workers.next_worker(backend) if id is None else self._workers.worker(id, dp_rank, backend)

    def store(self, name: str) -> Any:
        """A store that workers share, as they have it; what is done to it publishes nothing by itself.

        It is a `FileStore`, `MooncakeObjects`, `LmcacheServer` or `MooncakeMaster`, by its kind.

        Raises:
            ValueError: there is none of this name, or no worker that has it.
        """
        made = self._workers.stores
        if name not in made:
            raise ValueError(
                unknown_text("store", name, made) if made else f"store: this harness has none, got {name!r:.80}"
            )
        return made[name]

    def role(self, worker_type: str) -> list[KvWorker]:
        """The workers of a role of P/D pairs, in the order of their ids: "prefill", "decode" or "both".

        Raises:
            ValueError: the harness has none of that role.
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
        """The engine in virtual time of a worker; made now if it has none.

        Args:
            id: the worker's id; None: one more worker, with the lowest id that is free, and its engine.
            dp_rank: its data-parallel rank.
            args: what it is; by default the harness's profile and `engine` fields.
            **engine: fields of `MockEngineArgs`, laid over those of the harness.

        Raises:
            ValueError: a field out of range, sizes that are not the worker's, or other arguments than it has.
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
            workers: how many workers, those of ids from 0; None: those that exist, as with `roles` always.
            backends: names of their backends, in turn: these are then workers of their own, with the next ids that are
                free. None: the harness's.
            engine: fields of `MockEngineArgs`, laid over those of the harness.
            **options: of `Fleet`: `semantics`, `loads`, `concurrency`, `event_delay_ms` and others.

        Raises:
            TypeError: the router or an argument is not of its type.
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
            chained: whether its hashes must be Dynamo's chain (`wrong_hash`); None: that is detected from
                what is published.
            num_blocks: how many blocks each of its ranks has on the device (`over_capacity`); None: it is not judged.
            tier_blocks: the same in the tiers below, by tier: `{"host_pinned": 256}`.
            residency: "unique" where a block is published once while it is held; "counted" where every copy is.
            prefix_closed: whether a block is removed before its parent (`orphaned_child`); see `BackendSpec`.
            worker_id: the worker it stands for; None: the first from 2**16 on that is free.
            hash: by which of vLLM's hashes its blocks are named (`--prefix-caching-hash-algo`): they are judged by that
                chain (`wrong_hash`), and not by Dynamo's.
            seed: of the hash, as PYTHONHASHSEED; None: that of vLLM 0.33, which `xxhash` has not.
            restores: it may store a block that it holds again, and remove it at once, though it
                keeps it, as Dynamo's `multi_lru`: what
                `compare` finds of that is no `engine_drift` of its own, and listed under the warning.

        Raises:
            ValueError: a capacity below 1, an unknown tier, another residency, the id of another worker or sink, or an
                unknown hash.
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
        """Publish each event to one more sink.

        Args:
            sink: of any shape of `sinks.GivenSink`; one that raises and whose `closed` is True gets no more.
            before: publish to it before the router; an exception of it then keeps the event from the router, as that of
                the first of Dynamo's publishers does.
            worker_id: the worker whose events it gets; None for all.
        """
        self.publisher.add_sink(sink, before=before, worker_id=worker_id)

    def prompt(self, blocks: int = 4, after: Prompt | TokenIds | None = None, *, tail: int = 0, **keys: Any) -> Prompt:
        """Make a prompt of fresh tokens.

        Args:
            blocks: how many whole blocks of fresh tokens.
            after: what it begins with: tokens that it shares with another prompt, and what that one carries.
            tail: further tokens, less than a block.
            **keys: what it carries, as `Prompt` takes it: `lora_name`, `cache_salt`, `multimodal`, `session_id`.

        Raises:
            ValueError: `after` has no tokens, a size is out of range, or a key is not what it must be.
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
            events: one or more: Stored, Removed, Located, Updated or Cleared, which get their worker's next id,
                KvCacheEvent, RouterEvent.
            worker_id: the worker of events that name none.
            dp_rank: and its rank.

        Raises:
            TypeError: something else. The events before it were published.
            ValueError: events of a sink, which publishes them itself. The events before were published.
        """
        self.by_hand.publish(events, worker_id, dp_rank)

    @contextmanager
    def burst(self) -> Iterator[None]:
        """Within the context, give the index under test events without a flush or look-up in between.

        After it, after 10,000 events, and at each lookup or check, the index is flushed once and compared for the
        chains that the events changed (sync="end": at the end). So a queue that overflows shows; an async index waits
        for `aflush` anyway.
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
        """Remove a worker from the router, all ranks or one of them; it may come back with any event id.

        The worker itself still exists, without what was in tiers below its device or on the way; `worker(id)` makes a
        new one.

        Args:
            id: its id, for all its ranks; or (id, dp_rank), for that rank alone.

        Raises:
            ValueError: it is neither; or the index under test has no `remove_worker(worker_id)`, or for one rank of
                several no `remove_worker_dp_rank(worker_id, dp_rank)`. Nothing has changed.
        """
        worker_id, dp_rank = check_worker_key(id)
        with self.publisher.lock:
            self.recording.operate(RemoveWorker, worker_id, dp_rank)
            keys = self.publisher.removed(worker_id, dp_rank)
            self._engines.remove(keys)
            self._workers.remove(keys, whole=dp_rank is None)

    # ------------------------------------------------------------------------------------------ comparisons

    def flush(self) -> None:
        """Compare all that can be compared now: ids with what was published, the stream with the engines.

        An async index is flushed by `aflush`, in the test's own loop.
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
            tier: which tier. Of one below the device, the blocks by which it extends what the faster tiers have. None:
                the answers of all tiers, by tier; those of which no worker has any are absent.
            owner: in place of a tier, a store that workers share: the blocks by which it extends what each of its
                workers has.

        Raises:
            TypeError: the index is async: `await kv_harness.aoverlap(prompt)`.
            ValueError: an unknown tier or store; the index takes tokens, and the prompt has none; or it has no
                `find_tiered`.
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
        """Ask an async index as `overlap` does, as far as it was flushed."""
        __tracebackhide__ = True
        if owner is not None:
            return await self._lookups.arun("aoverlap", self._lookups.of_owner(prompt, owner))
        if tier is None:
            return await self._lookups.arun("aoverlap", self._lookups.by_tier(prompt))
        return await self._lookups.arun("aoverlap", self._lookups.of_tier(prompt, tier))

    def reusable(self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE) -> dict[WorkerKey, int]:
        """Return how many tokens of a prompt each engine would reuse, at most those of `overlap`; workers without any
        are left out. Changes nothing.

        Args:
            prompt: which.
            tier: where: "device"; or a tier below it, of which those count by which it extends what the device has; or
                "storage", what would be fetched from the storage behind the host, which no event says.

        Raises:
            ValueError: a worker cannot name the blocks of the prompt; or an unknown tier.
        """
        return self._lookups.reusable(prompt, tier)

    # ----------------------------------------------------------------------------------------------- checks

    def assert_no_event_errors(self) -> None:
        """Flush, and raise if there was any error that the test did not expect.

        Raises:
            EventRulesBroken: with the report.
        """
        __tracebackhide__ = True
        self.events.assert_no_event_errors()

    def assert_in_sync(self) -> None:
        """Flush, and raise if stream and engines, or index and reference, differ now, for whatever reason.

        Raises:
            EventRulesBroken: with the report.
            TypeError: the index is async: `await kv_harness.aassert_in_sync()`.
        """
        __tracebackhide__ = True
        self._lookups.need_sync("assert_in_sync", "aassert_in_sync")
        with self.publisher.lock:
            self._raise_if_any(self._judge.compare())

    async def aassert_in_sync(self) -> None:
        """Flush an async index, and do what `assert_in_sync` does."""
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
        """Flush, compare everything, and return what is new since the last verdict."""
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
        __tracebackhide__ = True  # a test's failure shows the test
        verdict = self.judge()
        errors = [problem for problem in verdict.errors if problem.rule not in self._allow]
        if kind is None and (errors or verdict.unmet):
            raise EventRulesBroken(failure_text(errors, verdict.unmet, harness=True))


def _roles(given: Mapping[str, Any] | None, dp_size: int) -> Mapping[str, Any]:
    """The roles of a harness, read by those that have some."""
    if given is None:
        return {}
    from pytest_kvmock.harness.roles import read_roles

    return read_roles(given, dp_size)


def _by_role(index: Mapping[str, Any], roles: Mapping[str, Any], role_of: Callable[[int], Any]) -> Any:
    """One index of each role, as one."""
    from pytest_kvmock.fleets.pairs.role_router import RoleIndexes, check_roles

    found = check_roles("index", index)
    if set(roles) != set(found):
        raise ValueError(f"index by role is for roles 'prefill' and 'decode', got {', '.join(map(repr, roles))}")
    return RoleIndexes(found, role_of)


def _stores(given: Mapping[str, Any] | None) -> Mapping[str, StoreSpec]:
    """The stores of a harness, read by those that have some."""
    if given is None:
        return {}
    from pytest_kvmock.values.shared_stores import read_stores

    return read_stores(given)
