"""The workers of a harness: mock engines made from a profile and a backend, and sinks for the user's own engines.

One subject: the workers of a harness, by id and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import count
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, backend_spec
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.harness.engine_comparison import EngineComparison
from pytest_kvmock.harness.harness_worker import HarnessWorker, options_of
from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.harness.publisher import Publisher
from pytest_kvmock.harness.recording import Recording
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER, KvSink
from pytest_kvmock.oracle.hygiene.content import DynamoChain
from pytest_kvmock.oracle.hygiene.entries import Opened
from pytest_kvmock.oracle.hygiene.rules import EVICTED_AND_RESTORED, ORPHANED_CHILD, WRONG_HASH
from pytest_kvmock.oracle.hygiene.stream_spec import Residency, StreamSpec, check_residency
from pytest_kvmock.values.checks import check_integer, check_u64, integer_text, is_integer
from pytest_kvmock.values.events import StorageTier, StreamKey
from pytest_kvmock.values.hashed_blocks import Chain

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.harness.engines import HarnessEngine
    from pytest_kvmock.harness.roles import Role
    from pytest_kvmock.values.shared_stores import StoreSpec

WorkerKey: TypeAlias = int | tuple[int, int]
"""A worker id, or (worker_id, dp_rank) if workers have several ranks."""

MOST_WORKER_ID: Final = 2**64 - 1

_OWN_IF_NOT_PREFIX_CLOSED: Final = (EVICTED_AND_RESTORED, WRONG_HASH)
"""Warnings that engines cause by themselves if they may remove a parent before its child."""

_OWN_WITH_TIERS: Final = (ORPHANED_CHILD,)
"""Warnings that engines with tiers cause by themselves: a swap-in drops its pins head first (as upstream does), and
`lru` then evicts parents first."""


def check_worker_key(key: object) -> tuple[int, int | None]:
    """Return the worker id and rank of a key; the rank is None if the key is only an id, which means all ranks.

    Raises:
        ValueError: the key is neither an id nor (id, dp_rank).
    """
    worker_id, dp_rank = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if not is_integer(worker_id, 0) or worker_id > MOST_WORKER_ID or not (dp_rank is None or is_integer(dp_rank, 0)):
        raise ValueError(
            f"remove_worker takes a worker id (an integer from 0 to {MOST_WORKER_ID}), or (worker id, dp_rank) for one "
            f"rank, got {key!r:.80}"
        )
    return worker_id, dp_rank


class Workers:
    """Makes the workers of a harness, and finds them by id and rank.

    Args:
        profile: their size and kind.
        judge: judges their events.
        publisher: receives their events.
        engines: compares the stream of a sink with the blocks that its engine holds.
        recording: records the operations on them.
        rng: source of their random choices.
        engine: fields of `MockEngineArgs` for their engines.
        judge_unpublished: whether to judge the events that workers that do not publish would publish, only by the
            rules of the ledger.
        roles: the roles in P/D pairs, by worker type; empty: ordinary workers, in the number of the profile.
        stores: the stores that workers share, by name.

    Attributes:
        by_role: the workers of each role.
        spec: the default backend; None until it is set.
        sink_ids: the worker ids of sinks.
    """

    def __init__(
        self,
        profile: EngineProfile,
        judge: Judge,
        publisher: Publisher,
        engines: EngineComparison,
        *,
        recording: Recording,
        rng: Random,
        engine: Mapping[str, Any] = MappingProxyType({}),
        judge_unpublished: bool = False,
        roles: Mapping[str, Role] = MappingProxyType({}),
        stores: Mapping[str, StoreSpec] = MappingProxyType({}),
    ) -> None:
        self.spec: BackendSpec | None = None
        self._stores = stores
        self._shared: dict[str, Any] = {}
        self._roles = roles
        self.by_role: dict[str, list[KvWorker]] = {}
        self._profile = profile
        self._judge = judge
        self._publisher = publisher
        self._engines = engines
        self._recording = recording
        self._rng = rng
        self._engine_fields = dict(engine)
        self._judge_unpublished = judge_unpublished
        self._workers: dict[WorkerKey, HarnessWorker] = {}
        self._engines_of: dict[WorkerKey, HarnessEngine] = {}
        self._sinks: dict[int, KvSink] = {}
        self._not_prefix_closed: set[StreamKey] = set()

    @property
    def by_key(self) -> Mapping[WorkerKey, HarnessWorker]:
        """The workers by id, or by (id, dp_rank) if workers have several ranks."""
        return MappingProxyType(self._workers)

    @property
    def sink_ids(self) -> Collection[int]:
        """The worker ids of sinks."""
        return self._sinks.keys()

    def key(self, worker_id: int, dp_rank: int) -> WorkerKey:
        """Return the key of a worker and rank in `by_key`."""
        return (worker_id, dp_rank) if self._profile.dp_size > 1 or dp_rank else worker_id

    def own_warnings(self, key: StreamKey) -> Collection[str]:
        """Return the rules of the warnings that the faithful engine of a worker and rank causes by itself."""
        if key in self._not_prefix_closed:
            return _OWN_IF_NOT_PREFIX_CLOSED
        return _OWN_WITH_TIERS if self._profile.tiers is not None else ()

    def use_backend(self, backend: str | BackendSpec) -> None:
        """Set the backend of the workers, once, and make the initial workers.

        Raises:
            ValueError: an unknown backend, or a different one than before.
        """
        spec = backend_spec(backend)
        if self.spec is not None:
            if spec is not self.spec and backend != self.spec.name:
                raise ValueError(f"the harness has backend {self.spec.name!r} already; it cannot become {spec.name!r}")
            return
        spec.check_options(options_of(self._profile))
        self.spec = self._recording.backends[spec.name] = spec
        if self._roles:
            for kind, role in self._roles.items():
                self.by_role[kind] = []
                for _ in range(role.workers):
                    worker_id = self._free_id()
                    for dp_rank in range(role.ranks):
                        self.add_to_role(kind, worker_id, dp_rank)
            return
        for worker_id in range(self._profile.workers):
            for dp_rank in range(self._profile.dp_size):
                self.worker(worker_id, dp_rank)

    def add_to_role(self, kind: str, worker_id: int, dp_rank: int) -> None:
        """Add a worker, or a rank of one, to a role."""
        role = self._roles[kind]
        worker = self._add(worker_id, dp_rank, role.backend, self._profile, role)
        self.by_role[kind].append(worker)
        if role.ranks > 1:
            worker.rejoin = partial(self._join_ranks, kind, worker_id, role.ranks)
            worker.rejoin()

    def _join_ranks(self, kind: str, worker_id: int, count: int) -> None:
        """Join the ports of a worker's ranks as soon as all ranks exist."""
        ranks = [each.pair for each in self.by_role[kind] if each.worker_id == worker_id]
        if len(ranks) == count:
            ranks[0].join_ranks(ranks)

    def role_of(self, worker_id: int) -> str:
        """Return the role of a worker that has a role."""
        return next(kind for kind, made in self.by_role.items() if any(each.worker_id == worker_id for each in made))

    def worker(self, worker_id: int, dp_rank: int = 0, backend: BackendSpec | str | None = None) -> KvWorker:
        """Return the worker with this id and rank; make it if there is none. See `RouterHarness.worker`."""
        found = self._workers.get(self.key(worker_id, dp_rank))
        if found is None:
            return self._add(worker_id, dp_rank, backend, self._profile)
        wanted = backend.name if isinstance(backend, BackendSpec) else backend
        if wanted is not None and found.backend != wanted:
            raise ValueError(f"worker {worker_id} has backend {found.backend!r}, not {wanted!r}")
        return found

    def next_worker(self, backend: BackendSpec | str | None = None) -> KvWorker:
        """Make a worker with the lowest free id."""
        return self._add(self._free_id(), 0, backend, self._profile)

    def engine(
        self, worker_id: int | None, dp_rank: int, args: MockEngineArgs | None, fields: Mapping[str, Any]
    ) -> HarnessEngine:
        """Return the engine of a worker; make it if there is none. See `RouterHarness.engine`.

        Args:
            worker_id: the worker; None: a new worker, with the lowest free id.
            dp_rank: its rank.
            args: the engine's arguments; None: from the profile.
            fields: fields of `MockEngineArgs` that override those of the harness.

        Raises:
            ValueError: see `RouterHarness.engine`.
        """
        from pytest_kvmock.harness.engines import HarnessEngine, differences, engine_args  # imported on first use

        key = None if worker_id is None else self.key(worker_id, dp_rank)
        found = None if key is None else self._engines_of.get(key)
        if found is not None and args is None and not fields:
            return found
        spec = self._spec_of(key)
        if args is None:
            profile, of_role = self._of_role(key)
            wanted = engine_args(profile, spec, {**self._engine_fields, **of_role, **fields})
        else:
            wanted = args.following(spec.semantics)
        if found is not None:
            if found.args != wanted:
                raise ValueError(
                    f"the engine of worker {worker_id} exists already, with other arguments: "
                    f"{differences(found.args, wanted)}"
                )
            return found
        worker = self.next_worker() if worker_id is None else self.worker(worker_id, dp_rank)
        assert isinstance(worker, HarnessWorker)
        engine = HarnessEngine(wanted, worker, self._recording, self._profile.seed)
        if worker.role is not None:
            engine.inside.log = None
        self._engines_of[self.key(worker.worker_id, worker.dp_rank)] = engine
        self._recording.engines[worker.worker_id, worker.dp_rank] = wanted, worker.spec
        return engine

    def _spec_of(self, key: WorkerKey | None) -> BackendSpec:
        worker = None if key is None else self._workers.get(key)
        spec = self.spec if worker is None else worker.spec
        if spec is None:
            raise ValueError("this harness has no backend yet: pass backend=, or have the test ask for kv_backend")
        return spec

    def _of_role(self, key: WorkerKey | None) -> tuple[EngineProfile, dict[str, Any]]:
        """Return the profile of a worker and the fields of its engine, with the settings of its role in a P/D pair."""
        role = getattr(None if key is None else self._workers.get(key), "role", None)
        return (self._profile, {}) if role is None else (self._profile.replace(**role.sizes), role.engine)

    def release_events(self) -> None:
        """Publish the events that engines hold until their passes end."""
        for engine in self._engines_of.values():
            if not engine.worker.cleared_waits:  # only a step may publish a waiting Cleared
                engine.worker.release_events()

    def add_mismatched(self, worker_id: int | None, **fields: Any) -> KvWorker:
        """Make a worker whose profile differs from the router's; see `Faults.block_size`.

        Args:
            worker_id: its id; None: the lowest free id.
            **fields: the fields of the profile that differ.

        Raises:
            ValueError: a field out of range, or a worker that exists already.
        """
        if worker_id is None:
            worker_id = self._free_id()
        if any(worker.worker_id == worker_id for worker in self._workers.values()):
            raise ValueError(f"worker {worker_id} exists already; its profile is the router's")
        return self._add(worker_id, 0, None, self._profile.replace(**fields))

    def remove(self, keys: Collection[StreamKey], *, whole: bool) -> None:
        """Remove workers and ranks; the next call for such a key makes a new worker. `whole`: they are all ranks of a
        worker.
        """
        for key in keys:
            worker = self._workers.pop(self.key(*key), None)
            if worker is not None:
                worker.cancel_transfers()
            self._engines_of.pop(self.key(*key), None)
            self._judge.reuse.engines.pop(key, None)
            if key[0] in self._sinks and whole:
                self._sinks[key[0]].is_removed = True

    def _free_id(self) -> int:
        """Return the lowest id that no engine and no sink has."""
        taken = {*self.sink_ids, *(worker.worker_id for worker in self._workers.values())}
        return next(i for i in count() if i not in taken)

    def _add(
        self,
        worker_id: int,
        dp_rank: int,
        backend: BackendSpec | str | None,
        profile: EngineProfile,
        role: Role | None = None,
    ) -> HarnessWorker:
        if not is_integer(worker_id, 0) or worker_id > MOST_WORKER_ID:
            raise ValueError(f"a worker id is an integer from 0 to {MOST_WORKER_ID}, got {worker_id!r}")
        if worker_id in self.sink_ids:
            raise ValueError(f"worker {worker_id} is a sink of this test; take another id for an engine")
        if not is_integer(dp_rank, 0):
            raise ValueError(f"a dp_rank is {integer_text(0)}, got {dp_rank!r}")
        spec = self.spec if backend is None else backend_spec(backend)
        if spec is None:
            raise ValueError("this harness has no backend yet: pass backend=, or have the test ask for kv_backend")
        own = self._profile
        if role is not None:
            profile = own = profile.replace(**role.sizes)
        rng = Random(self._rng.getrandbits(64))  # noqa: S311 - mock data
        # The worker is made before the judge opens its stream: the backend may reject it, and some engines publish at
        # the start.
        under_test = self._judge.under_test
        worker = HarnessWorker(
            spec,
            worker_id,
            dp_rank,
            profile=profile,
            publisher=self._publisher,
            recording=self._recording,
            rng=rng,
            by_tokens=None if under_test is None else under_test.by_tokens,
            role=role,
            below=self._below(worker_id, profile),
        )
        self._workers[self.key(worker_id, dp_rank)] = worker
        self._recording.backends[spec.name] = spec
        tiers = self._profile.tiers
        below = None if tiers is None else {tiers.below: tiers.host}
        prefix_closed = spec.prefix_closed and (tiers is None or not tiers.leaves_holes)
        num_blocks = own.num_blocks
        sizes = getattr(worker.manager, "tier_sizes", None)  # of a manager with a host and separate blocks for windows
        if sizes is not None:
            num_blocks = sizes[StorageTier.DEVICE]
            below = {tier: size for tier, size in sizes.items() if tier is not StorageTier.DEVICE} or None
        if not prefix_closed:
            self._not_prefix_closed.add((worker_id, dp_rank))
        about = StreamSpec(
            own.block_size,
            num_blocks,
            below,
            spec.residency,
            prefix_closed,
            DynamoChain if spec.chain is None else partial(spec.chain, worker.manager),
            clears_below=worker.traits.clears_below,
            chunk=worker.traits.chunk,
            stores_again=worker.traits.stores_again,
            stores=self._stores_of(worker_id),
        )
        if worker.traits.promises_more:
            self._judge.reuse.engines[worker_id, dp_rank] = worker
        self._judge.open(Opened((worker_id, dp_rank), 0, about), None if tiers is None else worker.unpublished)
        if self._judge_unpublished:
            worker.watch(SimpleNamespace(publish=self._judge.watched))
        self._publisher.begun((worker_id, dp_rank))
        worker.release_events()
        return worker

    def _stores_of(self, worker_id: int) -> dict[StorageTier, str] | None:
        """Return the stores that a worker's blocks belong to, by tier; None if there are none."""
        return {each.tier: name for name, each in self._stores.items() if worker_id in each.workers} or None

    def _below(self, worker_id: int, profile: EngineProfile) -> Any:
        """Return the tiers below a worker's device: those of its profile, then the store that it shares, if any."""
        below: Any = profile.tiers
        for store in self._stores.values():
            if worker_id in store.workers:
                from pytest_kvmock.engines.shared import store_below

                below = store_below(store, self._shared, below)
        return below

    @property
    def stores(self) -> Mapping[str, Any]:
        """The shared stores, by name; only those that an existing worker uses."""
        return self._shared

    def make_sink(
        self,
        *,
        chained: bool | None,
        num_blocks: int | None,
        tier_blocks: Mapping[StorageTier | str, int],
        residency: Residency,
        prefix_closed: bool,
        worker_id: int | None = None,
        named: tuple[str | None, str | None] = (None, None),
        restores: bool = False,
    ) -> KvSink:
        """Make a sink for the user's own block manager; see `RouterHarness.make_sink`."""
        if num_blocks is not None:
            check_integer("make_kv_sink: num_blocks", num_blocks, 1, ", or None")
        below = _tier_blocks(tier_blocks)
        check_residency(residency, "make_kv_sink: ")
        if not isinstance(restores, bool):
            text = f"make_kv_sink: restores must be True or False, got {restores!r:.80}"
            raise ValueError(text)  # noqa: TRY004 - one error
        if worker_id is None:
            # The streams include those of engines and of events made by hand.
            taken = {*self.sink_ids, *(key[0] for key in self._judge.ledger.streams)}
            worker_id = next(i for i in count(FIRST_SINK_WORKER) if i not in taken)
        else:
            self._check_free_for_sink(worker_id)
        chain, (hash_name, seed) = _chain_of_sink(named, chained), named
        about = StreamSpec(
            self._profile.block_size,
            num_blocks,
            below,
            residency,
            prefix_closed,
            chain or DynamoChain,
            hash=hash_name,
            seed=seed,
            restores=restores,
            compares_tokens=chain is None and chained is None,
        )
        self._judge.open(Opened((worker_id, 0), None, about))
        sink = KvSink(
            worker_id,
            self._publisher,
            self._judge.judge_hashes,
            self._engines.compare_with,
            chained=chained if chain is None else True,
            judges_host=chain is None,
        )
        self._sinks[worker_id] = sink
        self._recording.sinks.add(worker_id)
        self._publisher.user_sinks.append(sink)
        return sink

    def _check_free_for_sink(self, worker_id: int) -> None:
        """Check that a sink may have this worker id. A sink that the router has removed may be replaced by another."""
        check_u64("make_kv_sink: worker_id", worker_id)
        sink = self._sinks.get(worker_id)
        if sink is not None:
            if sink.is_removed:
                return
            whose = "a sink of this test already"
        elif any(worker.worker_id == worker_id for worker in self._workers.values()):
            whose = "an engine of this test"
        elif any(key[0] == worker_id for key in self._judge.ledger.streams):
            whose = "known by events that were published before"
        else:
            return
        raise ValueError(f"worker {worker_id} is {whose}; take another worker_id")


def _chain_of_sink(named: tuple[str | None, str | None], chained: bool | None) -> Callable[[], Chain] | None:
    """Return the function that makes the chain of a sink with a given hash and seed; None if no hash is given."""
    hash_name, seed = named
    if hash_name is None:
        if seed is not None:
            raise ValueError(f"make_kv_sink: seed needs hash=, which is not given; got {seed!r:.80}")
        return None
    if chained is False:
        raise ValueError(f"make_kv_sink: chained=False judges no hashes, and hash={hash_name!r} says how to")
    from pytest_kvmock.wire.codec.event_names import EventNames, hasher_of  # imported on first use

    try:
        return EventNames((hasher_of(hash_name, seed),), is_given=True, knows_release=False).chain
    except ValueError as error:
        raise ValueError(f"make_kv_sink: {error}") from None


def _tier_blocks(given: object) -> dict[StorageTier, int]:
    """Return the checked capacities of a sink's tiers below the device."""
    name = "make_kv_sink: tier_blocks"
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a mapping of tiers to numbers of blocks, got {given!r:.80}")
    below: dict[StorageTier, int] = {}
    for tier, blocks in given.items():
        try:
            known = StorageTier.of(tier)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if known in below:
            raise ValueError(f"{name}: the tier {known} is given twice")
        below[known] = check_integer(f"{name}[{tier!r}]", blocks, 1)
    if StorageTier.DEVICE in below:
        raise ValueError(f"{name}: the blocks of the device are num_blocks")
    return below
