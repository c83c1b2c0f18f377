"""The faults that a test injects (`kv_harness.faults`).

One subject: a class with one method for each fault, with its arguments and errors. `pytest_kvmock.oracle.faults` has
the changes that faults make to events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.harness.publisher import Publisher
from pytest_kvmock.harness.workers import WorkerKey, Workers
from pytest_kvmock.oracle.faults import changes
from pytest_kvmock.oracle.faults.fault import DoneAtOnce, Fault, RandomFault, wanted
from pytest_kvmock.oracle.faults.injector import FaultInjector
from pytest_kvmock.oracle.faults.kinds import check_rates, check_survived
from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.oracle.hygiene.text import worker_text
from pytest_kvmock.values.checks import check_integer, is_integer, unknown_text
from pytest_kvmock.values.events import KINDS, Cleared, KvCacheEvent, RouterEvent, StreamKey, block_text

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.oracle.faults.changes import Change

__all__ = ["Faults"]

LATE_BY = 2
"""Default number of further events of its worker and rank after which a delayed event arrives."""


class Faults:
    """Injects faults between workers and router (`kv_harness.faults`).

    Most faults apply to the next `n` events that match their filters; `n=None` means every event until the fault is
    stopped. Their methods return a `Fault`, which is also a context manager. The other faults have taken effect when
    their method returns. At most one fault applies to an event: the first requested one, or a random one if no other
    applies.

    A problem that results from a fault names it (`Problem.fault`). It fails the test like any other, unless the test
    expects it, allows the rule, or requires that its router survives such faults (`survive`).

    Args:
        profile: the router's profile.
        workers: the workers whose events are changed.
        publisher: injects the faults.
        judge: records the effects of faults.
        seed: seed of random choices.
    """

    def __init__(self, profile: EngineProfile, workers: Workers, publisher: Publisher, judge: Judge, seed: str) -> None:
        self._profile = profile
        self._workers = workers
        self._publisher = publisher
        self._judge = judge
        self._seed = seed
        self._rng = Random(f"{seed}:faults")  # noqa: S311 - mock data
        self._scripted: list[Fault] = []
        self._injector = FaultInjector()

    def __repr__(self) -> str:
        return f"<Faults: {self._injector!r}>"

    # ------------------------------------------------------------------------------------------ of the events

    def lose(self, n: int | None = 1, *, kind: str | None = None, worker: WorkerKey | None = None) -> Fault:
        """Lose events: they do not arrive.

        Args:
            n: number of events; None: every event until the fault is stopped.
            kind: only "stored", "removed", "cleared", "located" or "updated" events; any if None.
            worker: only events of this worker, or of this (worker, rank).

        Raises:
            ValueError: a count below 1, an unknown kind, or a worker that does not exist.
        """
        return self._script("lose", changes.lost, n, kind=kind, worker=worker)

    def double(self, n: int | None = 1, *, kind: str | None = None, worker: WorkerKey | None = None) -> Fault:
        """Deliver events twice, one right after the other. Arguments and errors: see `lose`."""
        return self._script("double", changes.doubled, n, kind=kind, worker=worker)

    def reorder(self, n: int | None = 1, *, kind: str | None = None, worker: WorkerKey | None = None) -> Fault:
        """Deliver events after the next one of their worker and rank. Arguments and errors: see `lose`."""
        return self._script("reorder", changes.lost, n, kind=kind, worker=worker, late_by=1)

    def delay(
        self, n: int | None = 1, *, by: int = LATE_BY, kind: str | None = None, worker: WorkerKey | None = None
    ) -> Fault:
        """Deliver events late: after `by` more of their worker and rank. If fewer follow, they never arrive.

        The other arguments, and the errors: see `lose`.
        """
        _check_count("delay", "by", by)
        return self._script("delay", changes.lost, n, kind=kind, worker=worker, late_by=by, by=by)

    def wrong_parent(self, n: int | None = 1, *, parent: int | None = None, worker: WorkerKey | None = None) -> Fault:
        """Give Stored events this parent; None: one that was never stored. Other arguments and errors: see `lose`."""
        if parent is not None and (not is_integer(parent) or not 0 <= parent < 2**64):
            raise ValueError(
                f"kv_harness.faults.wrong_parent: parent must be a hash from 0 to 2**64 - 1, got {block_text(parent)}"
            )
        change = changes.wrong_parent(self._rng, parent)
        return self._script("wrong_parent", change, n, worker=worker, parent=parent)

    def foreign(
        self,
        n: int | None = 1,
        *,
        to: WorkerKey | None = None,
        kind: str | None = None,
        worker: WorkerKey | None = None,
    ) -> Fault:
        """Deliver events as events of another worker instead of their own.

        If `to` is another rank of the same worker, an event has the wrong scope: a Cleared of one rank empties another.

        Args:
            n: see `lose`.
            to: the worker, or (worker, rank), that the events arrive from; the next other worker if None.
            kind: see `lose`.
            worker: see `lose`.

        Raises:
            ValueError: see `lose`; or there is no other worker.
        """
        if to is not None:
            target = self._streams("foreign", "to", to)[0]
            change = changes.foreign(lambda own: target if target != own else None)
        elif len({worker_id for worker_id, _ in self._judge.ledger.streams}) < 2:
            raise ValueError("kv_harness.faults.foreign: there is no other worker whose event it could become")
        else:
            change = changes.foreign(self._next_worker)
        return self._script("foreign", change, n, kind=kind, worker=worker, to=to)

    def unknown_removed(self, n: int | None = 1, *, worker: WorkerKey | None = None) -> Fault:
        """Add two blocks that were never stored to Removed events. Arguments and errors: see `lose`."""
        return self._script("unknown_removed", changes.unknown_removed(self._rng), n, worker=worker)

    def self_parent(self, n: int | None = 1, *, worker: WorkerKey | None = None) -> Fault:
        """Give Stored events their own first block as parent. Arguments and errors: see `lose`."""
        return self._script("self_parent", changes.self_parent, n, worker=worker)

    def sink_failure(self, n: int | None = 1, *, kind: str | None = None, worker: WorkerKey | None = None) -> Fault:
        """Raise in a sink between worker and router, so that the router never gets the event. Arguments and errors: see
        `lose`.
        """
        return self._script("sink_failure", changes.lost, n, kind=kind, worker=worker)

    def missing_first(self, n: int | None = 1, *, worker: WorkerKey | None = None) -> Fault:
        """Lose the first event (id 0) of the next `n` workers and ranks that begin.

        Arguments and errors: see `lose`.
        """
        return self._script("missing_first", changes.first_lost, n, worker=worker)

    def late_join(self, *, worker: WorkerKey | None = None) -> Fault:
        """Lose every event until the fault is stopped, or the `with` block ends: the router joins late.

        Args:
            worker: only events of this worker, or of this (worker, rank); None: of all workers.

        Raises:
            ValueError: a worker that does not exist.
        """
        return self._script("late_join", changes.lost, None, worker=worker)

    def salt(
        self,
        *,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        worker: WorkerKey | None = None,
    ) -> Fault:
        """Hash with a salt in workers but not in the router, so that no prompt of the router matches their blocks.

        The hashes of events are replaced by those that a salted engine publishes for the event's tokens. Events without
        tokens do not change.

        Args:
            lora_name: the salt of a LoRA adapter.
            cache_namespace: the salt of a tenant.
            worker: only this worker, or this (worker, rank).

        Raises:
            ValueError: no salt, a salt that is no text, or a worker that does not exist.
        """
        for name, value in (("lora_name", lora_name), ("cache_namespace", cache_namespace)):
            if value is not None and not _is_text(value):
                raise ValueError(f"kv_harness.faults.salt: {name} must be a text in UTF-8, or None, got {value!r:.80}")
        if not lora_name and not cache_namespace:
            raise ValueError("kv_harness.faults.salt: give a lora_name or a cache_namespace that is not empty")
        change = changes.salted(self._profile.block_size, lora_name, cache_namespace)
        return self._script("salt", change, None, worker=worker, lora_name=lora_name, cache_namespace=cache_namespace)

    def signed(self, n: int | None = None, *, kind: str | None = None, worker: WorkerKey | None = None) -> Fault:
        """Give the index under test block hashes as i64: those from 2**63 on are negative.

        A hash in an event is a u64, so the arriving event and the log stay valid; only the argument of the index's
        `apply` is changed. An index that treats hashes as opaque names is not affected, unless only some of its events
        are signed (`n`, or `kind`). Local hashes are computed by the router and do not change. The fault does not apply
        to an event whose hashes are all below 2**63.

        Args:
            n: number of events; every event by default.
            kind: see `lose`.
            worker: see `lose`.

        Raises:
            ValueError: see `lose`; or there is no index under test; or the engines of all matching workers already
                publish signed hashes, as SGLang does.
        """
        if self._judge.under_test is None:
            raise ValueError("kv_harness.faults.signed: there is no index under test that could be given signed hashes")
        keys = sorted(self._judge.ledger.streams) if worker is None else self._streams("signed", "worker", worker)
        engines = {(one.worker_id, one.dp_rank): one for one in self._workers.by_key.values()}
        if keys and all(key in engines and _is_signed(engines[key]) for key in keys):
            raise ValueError(
                f"kv_harness.faults.signed: backend {engines[keys[0]].backend!r} publishes signed hashes already, so "
                "that the fault would change nothing"
            )
        fault = self._script("signed", changes.signed, n, kind=kind, worker=worker, of_index_input=True)
        self._judge.index_input_filter = self._injector.filter_index_input
        return fault

    # ----------------------------------------------------------------------------------------- of the workers

    def restart(self, worker: WorkerKey = 0) -> DoneAtOnce:
        """Restart a worker unannounced, as after a crash: it is empty, and its event ids begin with 0; see
        `KvWorker.restart`.

        Args:
            worker: the worker, with all its ranks, or a (worker, rank).

        Raises:
            ValueError: a worker that does not exist.
        """
        workers = self._engines("restart", worker)
        with self._publisher.lock:
            self._begin()
            for one in workers:
                key = (one.worker_id, one.dp_rank)
                self._judge.injected(self._injector.injection("restart", key))
                one.restart()
        return DoneAtOnce("restart")

    def crashed(self, worker: WorkerKey) -> None:
        """Record that a worker of a fleet dies (`Moment.crash`). Its published events arrive unchanged, and no others
        follow.

        Args:
            worker: the worker, with all its ranks, or a (worker, rank).

        Raises:
            ValueError: a worker that does not exist.
        """
        keys = self._streams("crashed", "worker", worker)
        with self._publisher.lock:
            self._begin()
            for key in keys:
                self._judge.crashed(key)

    def clear(self, worker: WorkerKey = 0) -> DoneAtOnce:
        """Deliver a Cleared that the worker and rank never published: the router drops its blocks.

        Args:
            worker: the worker, with all its ranks, or a (worker, rank).

        Raises:
            ValueError: a worker that does not exist.
        """
        keys = self._streams("clear", "worker", worker)
        with self._publisher.lock:
            self._begin()
            for key in keys:
                event = RouterEvent(key[0], KvCacheEvent(self._publisher.next_id(*key), Cleared(), key[1]))
                injection = self._injector.injection("clear", key, event)
                self._judge.injected(injection)
                self._publisher.deliver(Delivery(event, injection=injection))
        return DoneAtOnce("clear")

    def block_size(self, size: int, *, worker: int | None = None) -> KvWorker:
        """Add a worker whose block size differs from the router's.

        The tokens in its events show the size; the router still looks up with the block size of the profile.

        Args:
            size: its tokens per block.
            worker: its id; None: the lowest free id.

        Returns:
            The worker.

        Raises:
            ValueError: a size that the backend rejects, or the router's own size; or a worker that exists already.
        """
        if size == self._profile.block_size:
            raise ValueError(f"kv_harness.faults.block_size: {size} must differ from the block size of the router")
        with self._publisher.lock:
            try:
                made = self._workers.add_mismatched(worker, block_size=size)
            except ValueError as error:
                raise ValueError(f"kv_harness.faults.block_size: {error}") from None
            key = (made.worker_id, made.dp_rank)
            self._begin()
            self._judge.mismatched(key, self._injector.injection("block_size", key))
        return made

    # ------------------------------------------------------------------------------------------ of the stores

    def evict(self, store: str, n: int | None = None) -> DoneAtOnce:
        """Let a store drop its oldest blocks: files, objects, or chunks.

        LMCache's server reports this in its log, and HiCache's master in its stream. For files and for Mooncake below
        vLLM no stream reports it, so an index may be stale.

        Args:
            store: its name.
            n: number of blocks; None: all.

        Raises:
            ValueError: an unknown store, or a count below 1.
        """
        target = self._store("evict", store)
        if n is not None:
            _check_count("evict", "n", n)
        self._inject_in_store("evict", store, target.drop(len(target) if n is None else n))
        return DoneAtOnce("evict")

    def restart_store(self, store: str) -> DoneAtOnce:
        """Restart a store, empty. The streams of LMCache's workers report it when they next read its log.

        Args:
            store: its name.

        Raises:
            ValueError: an unknown store, or a folder of files.
        """
        target = self._store("restart_store", store, needs="restart")
        target.restart()
        self._inject_in_store("restart_store", store)
        return DoneAtOnce("restart_store")

    def trim_log(self, store: str, keep: int = 0) -> DoneAtOnce:
        """Let LMCache's server drop all but the last records of its log.

        A worker that has not read the dropped records withdraws all that it announced, and never reports what it did
        not read.

        Args:
            store: its name.
            keep: number of records that stay.

        Raises:
            ValueError: an unknown store, or a store without a log.
        """
        target = self._store("trim_log", store, needs="trim_log")
        check_integer("kv_harness.faults.trim_log: keep", keep, 0)
        target.trim_log(keep)
        self._inject_in_store("trim_log", store)
        return DoneAtOnce("trim_log")

    def _store(self, fault: str, store: str, needs: str = "drop") -> Any:
        made = self._workers.stores
        if store not in made:
            text = unknown_text("store", store, made) if made else f"no worker shares a store, got {store!r:.80}"
            raise ValueError(f"kv_harness.faults.{fault}: {text}")
        if not hasattr(made[store], needs):
            raise ValueError(f"kv_harness.faults.{fault}: {store!r} is a {type(made[store]).__name__}, which has none")
        return made[store]

    def _inject_in_store(self, fault: str, store: str, names: Sequence[int] = ()) -> None:
        """Record a fault of a store: it changed no stream, and concerns each of the store's workers."""
        workers = self._judge.reference.stores[store].workers
        keys = [key for key in sorted(self._judge.ledger.streams) if key[0] in workers]
        with self._publisher.lock:
            self._begin()
            first = keys[0] if keys else (workers[0], 0)
            own = self._injector.injection(fault, first, keys=frozenset(keys), whole=True)
            self._judge.noted(replace(own, store=store, blocks=frozenset(names), subjects=frozenset(names)))

    # ---------------------------------------------------------------------------------------------- the test

    def survive(self, *names: str) -> DoneAtOnce:
        """Require that the router survives these faults.

        Their results in the stream do not fail the test. But an index under test must be right in spite of them: at
        each flush and at the end its answers are compared with the *published* events, as far as a router can detect
        them. Until it has recovered from a fault, its answers for that worker and rank are not compared after each
        event; after another fault has changed the stream, they are not compared at all.

        Earlier events are allowed if all of them arrived as published.

        Args:
            *names: names of faults, added to those of earlier calls.

        Raises:
            ValueError: an unknown fault, or one that no router can survive; or a fault was already injected, or a sink
                kept an event from the router.
        """
        survived = check_survived(names, "kv_harness.faults.survive: ")
        with self._publisher.lock:
            book, lost = self._judge.book, self._judge.first_lost
            if book is not None and book.attribution.injections:
                raise ValueError(
                    f"kv_harness.faults.survive: call it before the first fault; "
                    f"injected already: {book.attribution.injections[0]}"
                )
            if lost is not None:
                who = worker_text(lost.worker_id, lost.dp_rank)
                raise ValueError(
                    "kv_harness.faults.survive: call it before an event is lost; "
                    f"a sink has kept event {lost.event_id} of {who} from the router"
                )
            if survived:
                self._injector.survived |= frozenset(survived)
                self._begin()
                self._judge.survive()
        return DoneAtOnce("survive")

    def at_random(self, rates: Mapping[str, float]) -> DoneAtOnce:
        """Inject faults at random, each with a generator seeded by the harness's seed and the fault's name.

        Args:
            rates: by name, the probability that an event gets the fault if it applies, from 0 to 1.

        Raises:
            ValueError: see `check_rates`.
        """
        makers: Mapping[str, tuple[Change, int]] = {
            "lose": (changes.lost, 0),
            "double": (changes.doubled, 0),
            "reorder": (changes.lost, 1),
            "delay": (changes.lost, LATE_BY),
            "wrong_parent": (changes.wrong_parent(self._rng), 0),
            "foreign": (changes.foreign(self._next_worker), 0),
            "unknown_removed": (changes.unknown_removed(self._rng), 0),
            "self_parent": (changes.self_parent, 0),
            "sink_failure": (changes.lost, 0),
        }
        for kind, rate in check_rates(rates).items():
            change, late_by = makers[kind]
            rng = Random(f"{self._seed}:faults:{kind}")  # noqa: S311 - mock data
            self._injector.random.append(RandomFault(kind, rate, change, rng, late_by=late_by))
            self._begin()
        return DoneAtOnce("at_random")

    def unmet(self) -> list[str]:
        """Stop all scripted faults; return a sentence for each that was injected less often than requested."""
        unmet = [sentence for fault in self._scripted if (sentence := fault.unmet()) is not None]
        for fault in list(self._scripted):
            fault.stop()
        return unmet

    # ---------------------------------------------------------------------------------------------- arming

    def _script(
        self,
        name: str,
        change: Change,
        n: int | None,
        *,
        worker: WorkerKey | None,
        late_by: int = 0,
        of_index_input: bool = False,
        **arguments: Any,
    ) -> Fault:
        """Arm a fault; `arguments` are shown in addition to n and worker, and may include the kind of events."""
        if n is not None:
            _check_count(name, "n", n)
        only = arguments.get("kind")
        if only is not None and only not in KINDS:
            raise ValueError(f"kv_harness.faults.{name}: {unknown_text('kind', only, KINDS)}")
        if worker is not None:
            self._streams(name, "worker", worker)
        worker_id, dp_rank = worker if isinstance(worker, tuple) else (worker, None)
        arguments = {**arguments, "worker": worker}
        shown = [
            *([] if n is None else [str(n)]),
            *(
                f"{key}={block_text(value) if key == 'parent' else repr(value)}"
                for key, value in arguments.items()
                if value is not None
            ),
        ]
        armed = self._injector.of_index_input if of_index_input else self._injector.armed

        def end(fault: Fault) -> None:
            for faults in (armed, self._scripted):
                if fault in faults:
                    faults.remove(fault)

        call = f"kv_harness.faults.{name}({', '.join(shown)})"
        fault = Fault(name, call, change, n, wants=wanted(only, worker_id, dp_rank), end=end, late_by=late_by)
        with self._publisher.lock:
            self._begin()
            armed.append(fault)
            self._scripted.append(fault)
        return fault

    def _streams(self, fault: str, argument: str, worker: WorkerKey) -> list[StreamKey]:
        """Return the streams of a worker, or of one of its ranks.

        Raises:
            ValueError: there is no stream.
        """
        known = sorted(self._judge.ledger.streams)
        found = [key for key in known if (key == worker if isinstance(worker, tuple) else key[0] == worker)]
        if not found or not all(map(is_integer, worker if isinstance(worker, tuple) else (worker,))):
            named = ", ".join(map(str, known if isinstance(worker, tuple) else dict.fromkeys(key[0] for key in known)))
            raise ValueError(
                f"kv_harness.faults.{fault}: {argument}: there is no worker {worker!r}; there are: "
                f"{named or 'none yet'}"
            )
        return found

    def _engines(self, fault: str, worker: WorkerKey) -> list[KvWorker]:
        """Return the engines of a worker, or of one of its ranks.

        Raises:
            ValueError: there is no engine.
        """
        engines = {(one.worker_id, one.dp_rank): one for one in self._workers.by_key.values()}
        found: list[KvWorker] = [engines[key] for key in self._streams(fault, "worker", worker) if key in engines]
        if not found:
            raise ValueError(
                f"kv_harness.faults.{fault}: worker {worker!r} is a sink of the test's own; it has no engine"
            )
        return found

    def _next_worker(self, own: StreamKey) -> StreamKey | None:
        """Return the next other worker, with the same rank if it has one; None if there is no other."""
        others = sorted(key for key in self._judge.ledger.streams if key[0] != own[0])
        if not others:
            return None
        worker_id = next((key[0] for key in others if key[0] > own[0]), others[0][0])
        ranks = [key for key in others if key[0] == worker_id]
        return next((key for key in ranks if key[1] == own[1]), ranks[0])

    def _begin(self) -> None:
        """Start to inject faults."""
        self._publisher.use_injector(self._injector)


def _check_count(fault: str, name: str, value: object) -> None:
    check_integer(f"kv_harness.faults.{fault}: {name}", value, 1)


def _is_signed(worker: KvWorker) -> bool:
    """Whether an engine publishes signed hashes. Dynamo's managers have no hasher; the caller makes their hashes."""
    return bool(getattr(getattr(worker.manager, "hasher", None), "signed", False))


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair cannot be hashed
        return False
