"""One engine from the router's view, without time: requests in, events out.

A worker takes requests; block managers take moves, or their own kind of requests. A `Driver` connects the two. There is
one for each kind of manager, and nothing else depends on the kind.

One subject: a request on a worker, and its fate when the worker clears or restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from pytest_kvmock.engines.base.driver import (
    Driver,
    MakeDriver,
    MakeManager,
    SchedulerDriver,
    SlotsLost,
    Traits,
    WouldWait,
    check_keys,
)
from pytest_kvmock.engines.base.event_recorder import EventRecorder
from pytest_kvmock.engines.base.manager import protocol_mismatch
from pytest_kvmock.engines.dynamo.move_driver import MoveDriver
from pytest_kvmock.engines.pauses import Pausing
from pytest_kvmock.values.checks import KvMockError, integer_text, is_integer
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.programs.operations import (
    Clear,
    Decode,
    Finish,
    Log,
    Operation,
    Preempt,
    Prefill,
    Restart,
    Resume,
    Tick,
    prompt_fields,
)
from pytest_kvmock.values.sinks import event_sink
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from types import TracebackType

    from pytest_kvmock.engines.base.hand_over import HandOver, Lease
    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.pair_options import PairRole
    from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
    from pytest_kvmock.engines.sglang.host.hicache_driver import WorkerStorage
    from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangRole
    from pytest_kvmock.engines.vllm.host.native_host_time import NativeHostTime, WorkerFolder
    from pytest_kvmock.values.moves import Block
    from pytest_kvmock.values.sinks import EventSink, GivenSink


class OutOfBlocks(KvMockError, RuntimeError):  # noqa: N818 - the name that engines use
    """A request does not fit; nothing has changed.

    Attributes:
        requested: number of blocks that it needs and no running request holds.
        available: number of blocks that no running request holds.
        where: text on the window of these blocks, if an engine has separate blocks for several windows; else "".
    """

    def __init__(self, requested: int, available: int, where: str = "") -> None:
        super().__init__(requested, available, where)
        self.requested = requested
        self.available = available
        self.where = where

    def __str__(self) -> str:
        return (
            f"{self.requested} blocks are needed and {self.available} are available{self.where} "
            "(capacity: @pytest.mark.kvmock(num_blocks=...), or EngineProfile(num_blocks=...))"
        )


class RequestError(KvMockError, RuntimeError):
    """An operation is not allowed in the request's state."""


class OpenRequest(Protocol):
    """The interface of a worker's open requests, its own and an engine's."""

    @property
    def status(self) -> str:
        """The request's state, as one word."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Its blocks in order."""

    def __len__(self) -> int:
        """Number of tokens of prompt and output so far."""

    def lose(self) -> None:
        """Give the request up, because its worker restarts."""


class Engine(Protocol):
    """The interface of an engine to its worker."""

    def worker_restarted(self) -> None:
        """Start over: the worker restarted, and has another driver."""


class Served(NamedTuple):
    """The result of `KvWorker.serve`.

    Attributes:
        cached_tokens: number of prompt tokens that were cached already.
        stored_blocks: hashes of the blocks that became cached, in order.
    """

    cached_tokens: int
    stored_blocks: tuple[int, ...]

    @property
    def hand_over(self) -> HandOver | None:
        """The parameters for a decode engine; None if they were not requested, or the engine gives none."""
        return None


class Request:
    """One request on a worker, from prefill to finish. As a context manager it finishes at the exit.

    Attributes:
        prompt: the prompt.
        cached_tokens: number of prompt tokens that were cached at its admission (or when it was resumed).
        onboarded_tokens: number of these tokens that were loaded back from the host for it, even if an earlier
            `prefill` did not wait for them.
    """

    def __init__(self, worker: KvWorker, prompt: Prompt) -> None:
        self.prompt = prompt
        self._worker = worker
        self._driver = worker._driver
        self._state = self._driver.open(prompt)
        self.cached_tokens = 0
        self.onboarded_tokens = 0
        self._status = "preempted"  # until its blocks are there
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status in ("running", "preempted"):
            self.finish()

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return f"<Request of {len(self)} tokens, {self._status}>"

    @property
    def status(self) -> str:
        """ "running", "preempted", "finished", or "lost" when its worker restarted."""  # noqa: D210 - the text begins with a quotation mark
        return self._status

    @property
    def blocks(self) -> list[Block]:
        """Its blocks in order: sequence hashes, and the UUID of a partial last one."""
        return list(self._state.blocks)

    def decode(self, tokens: int | Sequence[int] = 1, accepted: Sequence[int] | None = None) -> None:
        """Generate tokens, one a step.

        `KvWorker.traits.stores_when` shows when the engine publishes a block that they fill.

        Args:
            tokens: number of tokens, or the tokens.
            accepted: for an engine with a draft model, the number of drafts that each step accepts: it generates these,
                and one more token. None to reject all drafts of all steps.

        Raises:
            OutOfBlocks: not all of them fit; none was generated.
            SlotsLost: with tiers, a step needs a block that will never be free. The tokens before it were generated,
                and the request keeps running.
            RequestError: the request is not running.
            ValueError: a token, or the count, is out of range; or a number in `accepted` exceeds the drafts of a step,
                or they do not add up to `tokens`.
        """
        given = None if accepted is None else tuple(accepted)
        self._record(Decode, tuple(tokens) if isinstance(tokens, list) else tokens, None, given)
        self._need("decode", "running")
        self._worker._decode_begins()
        steps = self._worker._steps(tokens)
        if given is not None:
            self._decode_runs(steps, given)
            return
        driver, host_time = self._driver, self._worker._host_time
        self._check_room(driver.need(self._state, len(self._state), steps), (host_time or driver).room())
        if host_time is None:
            self._driver.extend(self._state, steps)
        else:
            host_time.generate(self._state, steps)

    def _decode_runs(self, steps: Sequence[int], accepted: tuple[int, ...]) -> None:
        """Decode in steps that generate several tokens each."""
        driver, host_time = self._worker._powers.drafts, self._worker._host_time
        if driver is None:
            raise ValueError(f"decode: accepted is for an engine with a draft model, and {self._worker!r} has none")
        runs = _runs(steps, accepted, driver.drafts)
        self._check_room(driver.need_runs(self._state, len(self._state), runs), (host_time or driver).room())
        (driver.extend_runs if host_time is None else host_time.generate_runs)(self._state, runs)

    def _check_room(self, requested: int, available: int) -> None:
        if requested > available:
            scarce = self._worker._powers.scarce
            raise OutOfBlocks(requested, available, "" if scarce is None else scarce())

    def lose(self) -> None:
        """Give the request up, because its worker restarts."""
        self._status = "lost"

    def finish(self) -> None:
        """Finish the request and free its blocks. Full blocks stay cached, evictable once no other request holds them.

        Raises:
            RequestError: it is finished, or its worker restarted.
        """
        self._record(Finish)
        self._need("finish", "running", "preempted")
        self._driver.free(self._state, done=True)
        self._end("finished")

    def preempt(self) -> None:
        """Preempt the request: free its blocks, and keep its output.

        Raises:
            RequestError: the request is not running.
        """
        self._record(Preempt)
        self._need("preempt", "running")
        self._driver.free(self._state, done=False)
        self._status = "preempted"

    def resume(self) -> None:
        """Allocate blocks again for all tokens so far, from the cache if they are still there.

        Raises:
            OutOfBlocks: they do not fit; it stays preempted.
            SlotsLost: with tiers, they would fit, but some slots will never be free; it stays preempted, and keeps its
                output.
            RequestError: the request is not preempted.
        """
        self._record(Resume)
        self._need("resume", "preempted")
        self._admit()

    def _admit(self, *, wait: bool = True, onboard: bool = False) -> None:
        driver, state = self._driver, self._state
        self._worker._admission_begins(state)
        if self._worker._host_time is not None:
            self._admit_in_time(self._worker._host_time, wait=wait, onboard=onboard)
            return
        length = len(state)
        plan = driver.plan(state, length)
        self._check_room(plan.need, plan.room)
        self.cached_tokens = self._of_prompt(plan.hit)
        chunk = self._worker.chunk or length
        driver.admit(state, min(chunk, length), plan)
        for upto in range(2 * chunk, length + chunk, chunk):  # cached blocks are taken with the first chunk
            driver.admit(state, min(upto, length))
        self._status = "running"

    def _admit_in_time(self, host_time: HostTime, *, wait: bool, onboard: bool) -> None:
        driver, state = self._driver, self._state
        self._check_room(driver.need(state, len(state)), host_time.room())
        length = len(state)
        chunk = self._worker.chunk or length
        try:
            self.onboarded_tokens = host_time.onboard(state, wait=wait, resumed=not onboard)
            self.cached_tokens = self._of_prompt(driver.lookup(state))
            for upto in range(chunk, length + chunk, chunk):
                host_time.allocate(state, min(upto, length), wait=wait)
        except (WouldWait, SlotsLost):
            driver.free(state, done=False)
            raise
        except KvMockError:
            if host_time.is_dead:
                self._worker.crash()
            raise
        host_time.admitted(state)
        self._status = "running"

    def _of_prompt(self, tokens: int) -> int:
        """Return how many of its first `tokens` tokens belong to the prompt."""
        return min(tokens, self.prompt.length(self._driver.manager.block_size))

    def _end(self, status: str) -> None:
        self._status = status
        self._worker.requests.remove(self)
        self._worker._request_ended()

    def _record(self, operation: type[Operation], *fields: object) -> None:
        self._worker._record(operation, self._number, *fields)

    def _need(self, what: str, *allowed: str) -> None:
        if self._status not in allowed:
            raise RequestError(
                f"{what} on a request that is {self._status}; it must be {' or '.join(allowed)} "
                f"(worker {self._worker.worker_id})"
            )


def _runs(steps: Sequence[int], accepted: tuple[int, ...], drafts: int) -> list[Sequence[int]]:
    """Return the tokens of each step, by its number of accepted drafts."""
    if not all(is_integer(count, 0) and count <= drafts for count in accepted):
        raise ValueError(
            f"decode: accepted must be integers from 0 to {drafts}, the drafts of a step, got {accepted!r:.80}"
        )
    if sum(accepted) + len(accepted) != len(steps):
        raise ValueError(
            f"decode: {len(accepted)} steps that accept {sum(accepted)} drafts generate "
            f"{sum(accepted) + len(accepted)} tokens, got tokens for {len(steps)}"
        )
    runs, at = [], 0
    for count in accepted:
        runs.append(steps[at : at + count + 1])
        at += count + 1
    return runs


def _pair_requests(role: PairRole | SglangRole | None) -> Any:
    """Return the module of requests of P/D pairs; it imports this module."""
    return import_module(f"pytest_kvmock.engines.{getattr(role, 'requests_in', 'pair_requests')}")


class KvWorker(Pausing):
    """One engine without time, the same for every backend.

    Args:
        make_manager: makes a block manager that publishes to the given sink; called again at each restart.
        worker_id: the worker's id.
        dp_rank: its data-parallel rank.
        sink: where its events are published, in any form of `sinks.GivenSink`; None: nowhere. Its exceptions are
            logged.
        prefix_caching: False: nothing is reused and nothing is published.
        chunk: tokens of a prefill chunk; None: no chunks.
        rng: source of generated tokens and of the names of partial blocks.
        driver: makes the driver from a manager, `prefix_caching` and `rng` (`BackendSpec.driver`); by default a driver
            for managers that take moves.
        publishes: False: nothing is published, as by a decode engine.
        holds_events: hold the events that its manager publishes when it is made, until `release_events`.
        log: records the operations on it and on its requests; None: no record.
        pair: its role in a P/D pair of vLLM's or SGLang's engines; None: it is in no pair.

    Raises:
        ValueError: pairs with its block manager were not recorded.

    Attributes:
        manager: its block manager; another one after a restart.
        requests: the open requests, oldest first, including those of an engine that uses it.
        is_sleeping: whether it was put to sleep, and not woken up since (`sleep`).
    """

    def __init__(
        self,
        make_manager: MakeManager,
        worker_id: int = 0,
        dp_rank: int = 0,
        *,
        sink: GivenSink | None = None,
        prefix_caching: bool = True,
        chunk: int | None = None,
        rng: Random | None = None,
        driver: MakeDriver | None = None,
        publishes: bool = True,
        holds_events: bool = False,
        log: Log | None = None,
        pair: PairRole | SglangRole | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.prefix_caching = prefix_caching
        self._caches = prefix_caching and getattr(pair, "caches", True)
        self.chunk = chunk
        self.publishes = publishes and self._caches
        self.requests: list[OpenRequest] = []
        self._engine: Engine | None = None
        self._watch: EventRecorder | None = None
        self._make_manager = make_manager
        taken = None if sink is None else event_sink(sink)
        self._recorder = EventRecorder(worker_id, taken, holds=holds_events)
        self._rng = rng or Random()  # noqa: S311 - mock data
        self._make_driver = driver or MoveDriver
        self._host_time: HostTime | None = None
        self._role = pair
        self._pair: Any = None
        self._log = log
        self._driver = self._start()

    def _start(self) -> Driver:
        self._recorder.extra_of = None
        sink = self._recorder if self.publishes else self._watch
        driver = self._make_driver(self._make_manager(sink), self._caches, self._rng)
        powers = self._powers = driver.powers
        self._recorder.for_requests = powers.take_recorder is None
        if powers.take_recorder is not None:
            powers.take_recorder(self._recorder)
        if powers.take_chunk is not None:  # the chunk affects `need`
            powers.take_chunk(self.chunk)
        now, self._host_time = self.now, None
        if getattr(driver.manager, "offload", None) is not None:
            from pytest_kvmock.engines.tiers import host_time_of

            self._host_time = host_time_of(driver, now)
        if self._role is not None:
            self._role.check_manager(driver.manager)
            engine_id = f"engine-{self.worker_id}-{self.dp_rank}"
            self._pair = _pair_requests(self._role).make_port(driver, self._role, engine_id, self.chunk)
            self._pair.now_s = now / 1000
        return driver

    def __repr__(self) -> str:
        return f"<KvWorker {self.worker_id} rank {self.dp_rank} {self.manager.backend}>"

    @property
    def manager(self) -> KvManager:
        """The block manager."""
        return self._driver.manager

    @property
    def tiers(self) -> HostTime | None:
        """The time of the tiers below the device, for an engine that uses the worker; None if there are none."""
        return self._host_time

    @property
    def now(self) -> float:
        """The worker's virtual time in ms; 0 for a worker without tiers below the device and not in a P/D pair."""
        if self._pair is not None:
            now: float = self._pair.now_s * 1000
            return now
        return 0.0 if self._host_time is None else self._host_time.now

    @property
    def storage(self) -> WorkerStorage | WorkerFolder:
        """The storage behind the host of SGLang's HiCache, or the folder below vLLM's, for tests to fill and lose.

        Raises:
            ValueError: there is none.
        """
        if getattr(self._host_time, "files", None) is not None:
            from pytest_kvmock.engines.vllm.host.native_host_time import WorkerFolder

            return WorkerFolder(cast("NativeHostTime", self._host_time))
        if getattr(self.manager, "storage", None) is None:
            raise ValueError(
                f"storage: {self!r} has none; make it with tiers={{'host': …, 'storage': True}} over sglang, or with "
                "'files': True over vllm"
            )
        from pytest_kvmock.engines.sglang.host.hicache_driver import WorkerStorage

        return WorkerStorage(cast("HiCacheManager", self.manager))

    def tick(self, now: float) -> None:
        """Move the worker's time forward to `now` (ms); transfers between tiers that end by then publish their events.

        In a P/D pair, leases that end by then free their blocks, and due heartbeats are sent.

        Raises:
            ValueError: the worker has no tiers below the device and is in no pair; or the time is not a finite number
                of at least 0, or is before the worker's time.
        """
        self._record(Tick, now, self.worker_id, self.dp_rank)
        if self._pair is not None:
            _pair_requests(self._role).tick(self, now)
            return
        if self._host_time is None:
            raise ValueError(f"tick: {self!r} has no tiers below the device, so no time passes in it")
        self._host_time.tick(now)

    @property
    def backend(self) -> str:
        """Name of the manager's backend."""
        return self.manager.backend

    @property
    def traits(self) -> Traits:
        """The traits of this engine."""
        return self._driver.traits

    @property
    def is_heard(self) -> bool:
        """Whether its events have a receiver now."""
        recorder = self._recorder if self.publishes else self._watch
        return recorder is not None and recorder.is_heard

    @property
    def removed_blocks(self) -> int:
        """Number of device blocks that it has published as removed, also before a restart."""
        return self._recorder.removed

    def _check_takes(self, what: str) -> None:
        if self._paused is not None:
            why = "sleeps: wake_up() it" if self.is_sleeping else f"is paused ({self._paused!r}): resume() it"
            raise RequestError(f"{what} on worker {self.worker_id}, which {why} first (vLLM answers 503)")

    def prefill(self, prompt: Prompt | TokenIds, *, wait: bool = True) -> Request:
        """Admit a request: allocate blocks for its whole prompt, and reuse cached ones.

        With tiers below the device, the host's blocks of the prompt are loaded back first. The worker's time passes
        until they have arrived and the device has room.

        Args:
            prompt: the prompt.
            wait: False: raise instead of letting time pass. A started transfer continues, and its blocks are cached
                when the worker is ticked.

        Raises:
            OutOfBlocks: it does not fit; nothing has changed.
            WouldWait: time would have to pass, and `wait` is False.
            SlotsLost: slots of the device are lost, and will never be free.
            FullReportError: the prompt asks for a full report, which ends the engine: all its requests are lost, and
                nothing is published any more.
            ValueError: the prompt is empty, a token is out of range, or the prompt has a key that the engine does not
                hash.
        """
        request = Request(self, self.accept(prompt))
        if self._log is not None:
            request._number = self._log.next_request()
            blocks, tail, hashed = prompt_fields(request.prompt, self._driver.manager.block_size)
            of = (self.worker_id, self.dp_rank, hashed, wait, request.prompt.keys)
            self._log.operate(Prefill, request._number, blocks, tail, *of)
        request._admit(wait=wait, onboard=True)
        self.requests.append(request)
        return request

    def serve(
        self,
        prompt: Prompt | TokenIds,
        output_tokens: int = 0,
        *,
        hand_over: bool | Mapping[str, Any] = False,
    ) -> Served:
        """Prefill, decode and finish one request.

        Args:
            prompt: the prompt.
            output_tokens: number of tokens that it generates.
            hand_over: True to keep its blocks for a decode engine, and return the parameters for that engine. With
                "vllm-mooncake", the parameters of `new_hand_over` do the same.

        Raises:
            OutOfBlocks: it does not fit. The prompt's blocks are freed again; they may be cached by then.
            ValueError: `hand_over` is given, and this is not a prefill engine of a pair.
        """
        if hand_over is not False:
            served: Served = _pair_requests(self._role).serve(
                self, prompt, output_tokens, None if hand_over is True else hand_over
            )
            return served
        stored = self._recorder.stored = []
        try:
            with self.prefill(prompt) as request:
                if output_tokens:
                    request.decode(output_tokens)
        finally:
            self._recorder.stored = None
        return Served(request.cached_tokens, tuple(stored))

    def load(self, prompt: Prompt | TokenIds, hand_over: Mapping[str, Any] | None) -> Request:
        """Open a decode leg: another engine's data is loaded into blocks that the leg holds from now on.

        Args:
            prompt: the prompt.
            hand_over: `Served.hand_over`, or fields of it; None, or fields that request nothing: this engine computes
                the prompt itself.

        Returns:
            The request. It waits until its `end_transfer` or `fail_transfer` is called.

        Raises:
            OutOfBlocks: the prompt does not fit next to the needs of other requests; nothing has changed.
            EngineDied: the original engine dies with these parameters.
            ValueError: this is not a decode engine of a pair, or the parameters belong to another kind of engine.
        """
        request: Request = _pair_requests(self._role).load(self, prompt, hand_over)
        return request

    @property
    def leased(self) -> tuple[Lease, ...]:
        """The blocks that it holds for legs that do not run, with their requests and phases; empty outside of pairs."""
        leased: tuple[Lease, ...] = () if self._pair is None else self._pair.leased
        return leased

    @property
    def overwritten(self) -> list[str]:
        """Legs whose blocks it freed while another engine of a P/D pair wrote into them; empty for a correct engine."""
        return [] if self._pair is None else list(self._pair.overwritten)

    @property
    def pair(self) -> Any:
        """The port of an engine of a P/D pair: its legs, its connector, and the transfers under way.

        Raises:
            EngineDied: it died, and was not restarted since.
            ValueError: it is in no pair.
        """
        if self._pair is None:
            raise ValueError(
                f"{self!r} is in no P/D pair; make it with pair=PairRole('decode'), or the test with roles="
            )
        if self._pair.death is not None:
            raise self._pair.death
        return self._pair

    def cached_tokens(self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE) -> int:
        """Return the number of prompt tokens that are cached now. Changes nothing.

        Args:
            prompt: the prompt.
            tier: the tier; in a further tier, only the tokens after the device's prefix count.

        Raises:
            ValueError: the tier is unknown.
        """
        if tier is not StorageTier.DEVICE and StorageTier.of(tier) is not StorageTier.DEVICE:
            return 0 if self._host_time is None else self._host_time.cached(self.accept(prompt), StorageTier.of(tier))
        return self._driver.lookup(self._driver.open(self.accept(prompt), to_look=True))

    def lacking(self, prompt: Prompt | TokenIds) -> tuple[str, ...]:
        """Return the caches of a hybrid model that lack a prefix which full attention holds, so less is reused.

        Changes nothing. Each cache is named by kind, tokens a block and window, such as "sliding_window 16 (window
        128)".

        Raises:
            ValueError: see `accept`.
        """
        find = self._powers.lacking
        return () if find is None else find(self._driver.open(self.accept(prompt), to_look=True))

    def accept(self, prompt: Prompt | TokenIds) -> Prompt:
        """Return a prompt whose blocks this engine can name, for a driver.

        Raises:
            ValueError: it has a key that the engine does not hash, or a token is out of range.
        """
        prompt = Prompt.of(prompt)
        if prompt.keys is not None:
            check_keys(self._driver, prompt)
            self._recorder.extra_of = self._powers.extra_of
        return prompt

    def clear(self) -> bool:
        """Drop all cached blocks, and publish a Cleared; return False, without an event, while requests are open.

        Transfers between tiers are cancelled, and further tiers are also emptied, except vLLM's
        (`Traits.clears_below`).
        """
        self._record(Clear, self.worker_id, self.dp_rank)
        cleared = not self.requests and self._driver.clear()
        if cleared and self._host_time is not None:
            self._host_time.forget()
        return cleared

    def cancel_transfers(self) -> None:
        """Cancel all transfers between tiers, and empty the further tiers without an event. The device is unchanged."""
        if self._host_time is not None:
            self._host_time.cancel()

    def unpublished(self, tier: StorageTier) -> Container[int]:
        """Return the blocks that a further tier has without a Stored; see `OffloadEngine.unpublished`."""
        return () if self._host_time is None else self._host_time.unpublished(tier)

    def restart(self, *, announced: bool = False) -> None:
        """Restart the engine, as after a crash: empty cache, open requests lost, event ids from 0.

        A `KvPublisher` with only this worker's events, like that of the fixture `kv_publisher`, also starts over.

        Args:
            announced: whether the router is notified, as by a discovery service: it then drops its blocks of the
                worker. Only a worker of a `RouterHarness` has a router.

        Raises:
            ValueError: it is announced, but the index under test cannot drop a worker; nothing has changed.
        """
        self._record(Restart, self.worker_id, self.dp_rank, announced)
        self._announce_restart(announced)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Lose open requests and all cached blocks, and start with a new manager and driver."""
        for request in self.requests:
            request.lose()
        self.requests.clear()
        self._forget_pauses()
        self.cancel_transfers()
        self._recorder.drop()
        self._driver = self._start()
        if self._engine is not None:
            self._engine.worker_restarted()

    def _announce_restart(self, announced: bool) -> None:
        """Let the receiver of its events start over; a worker on its own has none."""

    def _record(self, operation: type[Operation], *fields: object) -> None:
        if self._log is not None:
            self._log.operate(operation, *fields)

    # ---------------------------------------------------------------------------------------- for an engine

    def attach(self, engine: Engine, *, publishes: bool = True) -> SchedulerDriver:
        """Let an engine use this worker: it schedules requests on its manager, and starts over after a restart.

        Args:
            engine: the engine.
            publishes: False: nothing is published from now on.

        Returns:
            The driver of its manager; after a restart, another one.

        Raises:
            ValueError: another engine uses it, or its driver does not serve schedulers.
        """
        if self._engine is not None and self._engine is not engine:
            raise ValueError(f"{self!r} is used by {self._engine!r}; a worker has one engine")
        from pytest_kvmock.engines.schedulers.scheduler_specs import (
            SCHEDULERS,  # not needed by a worker without time
        )

        missing = [protocol_mismatch(self._driver, each.driver) for each in SCHEDULERS.values()]
        if None not in missing:
            raise ValueError(f"no engine can use {self!r}: its driver is {missing[0]}")
        self._engine = engine
        if self.publishes and not publishes:
            self.publishes = False
            self.manager.sink = self._watch
        return cast("SchedulerDriver", self._driver)

    def crash(self) -> None:
        """Let the engine die: open requests are lost, and nothing is published any more, held events included.

        No receiver is notified.
        """
        self.publishes, self._watch = False, None
        self._begin_anew()

    def detach(self) -> None:
        """Undo `attach`: no engine uses this worker any more."""
        self._engine = None

    @property
    def is_watched(self) -> bool:
        """Whether a sink receives the events that it does not publish (`watch`)."""
        return self._watch is not None and not self.publishes

    def watch(self, sink: EventSink) -> None:
        """Pass the events that this worker does not publish, for instance without prefix caching, to a sink.

        If no request is open and no engine uses it, it gets a new manager.
        """
        self._watch = EventRecorder(self.worker_id, sink)
        if self.publishes:
            return
        if self.requests or self._engine is not None:
            self.manager.sink = self._watch
        else:  # a manager may have wrapped its sink
            self._driver = self._start()

    def make_by(self, wrap: Callable[[MakeManager], MakeManager], *, restarts: bool = False) -> None:
        """Wrap the function that makes its managers; with `restarts`, make a new manager now."""
        self._make_manager = wrap(self._make_manager)
        if restarts:
            self._begin_anew()

    def publish_to(self, sink: EventSink) -> None:
        """Publish each event to one more sink, after the present ones; its exceptions are logged."""
        self._recorder.add(sink)

    def _steps(self, tokens: int | Sequence[int]) -> Sequence[int]:
        """Return the tokens of these decode steps."""
        if isinstance(tokens, int):
            if not is_integer(tokens, 0):
                raise ValueError(f"decode: a count of tokens is {integer_text(0)}, got {tokens!r}")
            return [self._rng.getrandbits(32) for _ in range(tokens)]
        steps = Prompt.of(tokens).tokens
        if steps is None:
            raise ValueError(f"decode takes tokens, or how many; got {tokens!r}")
        return steps
