"""Requests of P/D pairs by hand.

A prefill engine keeps its blocks, a decode engine loads them, and a test decides when the bytes arrive.

Each operation of a worker is a step of its engine, so the effects of the step (answers, reads, reports) are there when
the operation returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pytest_kvmock.engines.base.hand_over import check_kind
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied
from pytest_kvmock.engines.worker import KvWorker, OutOfBlocks, Request, RequestError, Served
from pytest_kvmock.values.checks import check_time

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hand_over import HandOver
    from pytest_kvmock.engines.base.pair_options import PairRole
    from pytest_kvmock.engines.vllm.pairs.legs import Leg
    from pytest_kvmock.engines.vllm.pairs.port import Loading, PairPort
    from pytest_kvmock.values.tokens import Prompt, TokenIds


class HandedOver(Served):
    """The result of `KvWorker.serve` of a prefill leg."""

    _hand_over: HandOver | None

    def __new__(cls, cached_tokens: int, stored_blocks: tuple[int, ...], hand_over: HandOver | None) -> Self:
        """See `Served`; `hand_over` is not part of the tuple."""
        served = super().__new__(cls, cached_tokens, stored_blocks)
        served._hand_over = hand_over
        return served

    @property
    def hand_over(self) -> HandOver | None:
        """The parameters for a decode engine; None if the engine gives none."""
        return self._hand_over


class LegRequest(Request):
    """A decode leg: another engine's prefill leg computes its prompt, for which it may have to wait."""

    _port: Any
    _leg: Any = None
    _open: ClassVar[tuple[str, ...]]

    def __init__(self, worker: KvWorker, prompt: Prompt) -> None:
        super().__init__(worker, prompt)
        self._port = worker.pair

    @property
    def status(self) -> str:
        """Its state, as one word."""
        self._look()
        return self._status

    @property
    def name(self) -> str:
        """Its name in its engine."""
        return "" if self._leg is None else self._leg.name

    def begin(self, hand_over: Mapping[str, Any] | None) -> None:
        """Request the data of its prompt; see `KvWorker.load`."""
        raise NotImplementedError

    def _look(self) -> None:
        """Update its state from the engine's leg."""
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        if self.status in self._open:
            self.finish()


class LoadingRequest(LegRequest):
    """A decode leg: it holds blocks for a prompt that another engine has, and then runs like any request.

    `KvWorker.load` makes it. Its status is "loading" until the transfer has ended, "received" until the scheduler takes
    it up, then "running"; "failed" if the transfer failed and the engine's policy is "fail"; "aborted" if it was
    finished before it ran.
    """

    _port: PairPort
    _leg: Leg | None = None
    _loading: Loading | None = None
    _open = ("running", "preempted", "loading", "received")

    @property
    def is_stale(self) -> bool:
        """Whether its blocks were read after their lease, so they may have belonged to other requests."""
        return self._loading is not None and self._loading.is_stale

    def begin(self, hand_over: Mapping[str, Any] | None) -> None:
        """Look up the blocks on this engine, and allocate blocks for the coming data; see `KvWorker.load`."""
        port, driver, state = self._port, self._driver, self._state
        if not hand_over or not (hand_over.get("do_remote_prefill") or hand_over.get("do_remote_decode")):
            self._admit()
            return
        self._worker._check_takes("a request")  # noqa: SLF001 - as a request of its own
        self._worker.step_begins()
        leg = port.open(state, hand_over, len(state))
        try:
            external = port.side.look_up(leg, driver.lookup(state))
            self.cached_tokens = leg.local_tokens
            if not external:  # a second turn for which the other engine has too little
                self._leg = leg
                self._admit()
                port.side.started(leg)
                self._step(port)
                return
            needed = port.driver.blocks_to_hold(state, len(state), external=external)
            fits = needed <= driver.room() and port.side.load(leg)
        except EngineDied as death:
            port.death = death
            raise
        if not fits:
            port.forget(leg)
            raise OutOfBlocks(needed, driver.room())
        self._leg, self._status = leg, "loading"
        self._step(port)
        self._loading = port.loads.get(leg.name)
        self._look()

    def end_transfer(self, *, take_up: bool = True) -> None:
        """End the transfer: the bytes have arrived.

        The other engine is notified, and the scheduler takes up the request, which names and publishes its blocks.

        Args:
            take_up: False: the request is only received, as if all places of the engine were taken; call `take_up`
                later.

        Raises:
            RequestError: it waits for no transfer, or its transfer has not begun.
        """
        self._end_transfer(ok=True)
        if take_up and self._status == "received":
            self.take_up()

    def fail_transfer(self) -> None:
        """Let the transfer fail; the other engine is not notified.

        Depending on the policy, the request fails or is computed here.

        Raises:
            RequestError: see `end_transfer`.
            OutOfBlocks: it must be computed here, but does not fit; it is then preempted.
        """
        self._end_transfer(ok=False)
        if self._status == "received":
            self.take_up()

    def _end_transfer(self, *, ok: bool) -> None:
        port, loading = self._port, self._loading
        if self._leg is None or loading is None or self._leg.name not in port.loads:
            why = (
                "its parameters lack a field, so that it waits for ever"
                if self._status == "loading"
                else f"it is {self._status}"
            )
            raise RequestError(f"end of a transfer that is not under way: {why} (worker {self._worker.worker_id})")
        if not loading.has_begun and ok:
            raise RequestError("end of a transfer that has not begun: the prefill engine has offered nothing yet")
        port.ended(loading, ok=ok)
        if loading.peer is not None:
            self._step(loading.peer)
        self._step(port)
        self._look()

    def _step(self, port: PairPort) -> None:
        try:
            port.step(port.now_s)
        except EngineDied as death:
            port.death = death
            raise

    def _look(self) -> None:
        """Update its state from the engine's leg."""
        leg = self._leg
        if leg is None:
            return
        if leg.finish == "error" and self._status not in ("failed", "aborted"):
            self._status = "failed"
            if self in self._worker.requests:
                self._worker.requests.remove(self)
        elif leg.status == "received":
            self._status = "received"

    def take_up(self) -> None:
        """Let the scheduler take up the request: name and publish the received blocks, and compute the last token.

        Raises:
            RequestError: nothing was received for it.
            OutOfBlocks: its transfer failed, and it must be computed here, but does not fit; it is then preempted.
        """
        self._look()
        self._need("take_up", "received")
        leg, port = self._leg, self._port
        assert leg is not None
        port.side.take_up(leg)
        port.side.holding.remove(leg)
        if leg.status == "waiting" or not self._state.num_computed_tokens:
            port.side.look_up(leg, self._driver.lookup(self._state))
        port.side.started(leg)
        self._status = "preempted"
        if self._state.num_computed_tokens:
            self._driver.admit(self._state, len(self._state))
            self._status = "running"
        else:
            self._admit()
        self.cached_tokens = leg.cached_tokens

    def finish(self) -> None:
        """Finish the request and free its blocks.

        While it is loading, the blocks are freed, without names, when the transfer has ended.

        Raises:
            RequestError: it has ended, or its worker restarted.
        """
        if self._status in ("loading", "received"):
            assert self._leg is not None
            self._driver.free(self._state, done=True)
            self._status = "aborted"
            self._worker.requests.remove(self)
        else:
            super().finish()
        self._step(self._port)


def load(
    worker: KvWorker,
    prompt: Prompt | TokenIds,
    hand_over: Mapping[str, Any] | None,
    kind: type[LegRequest] = LoadingRequest,
    takers: tuple[str, ...] = ("decode", "both"),
) -> LegRequest:
    """Open a decode leg; see `KvWorker.load`."""
    role = worker.pair.role
    if role.worker_type not in takers:
        able = " or ".join(map(repr, takers))
        raise ValueError(f"load: a decode leg is for worker_type {able}; {worker!r} is for {role.worker_type!r}")
    params = check_kind(hand_over, role.hand_over, "load")
    request = kind(worker, worker.accept(prompt))
    request.begin(params)
    if request.status != "failed":
        worker.requests.append(request)
    return request


def serve(
    worker: KvWorker, prompt: Prompt | TokenIds, output_tokens: int, hand_over: Mapping[str, Any] | None
) -> Served:
    """Serve a prefill leg, and keep its blocks; see `KvWorker.serve`."""
    port = worker.pair
    if port.role.worker_type == "decode":
        raise ValueError(f"serve: hand_over is for worker_type 'prefill' or 'both'; {worker!r} is for 'decode'")
    given = check_kind(hand_over, port.role.hand_over, "serve")
    if given is not None and port.role.reads:
        raise ValueError("serve: hand_over of an engine that reads is True; a second turn is load(prompt, hand_over)")
    if given is None and not port.role.reads:
        given = port.new_hand_over()
    stored = worker._recorder.stored = []  # noqa: SLF001 - one family
    try:
        request = Request(worker, worker.accept(prompt))
        state = request._state  # noqa: SLF001 - as above
        leg = port.open(state, port.prefill_leg(given), len(state))
        try:
            request._admit()  # noqa: SLF001 - as above
        except BaseException:
            port.forget(leg)
            raise
        port.side.look_up(leg, request.cached_tokens)
        port.side.started(leg)
        worker.requests.append(request)
        if output_tokens > 1:  # the last token is sampled, and not computed
            request.decode(output_tokens - 1)
        port.step(port.now_s)
        request.finish()
        port.step(port.now_s)
    finally:
        worker._recorder.stored = None  # noqa: SLF001 - as above
    answer = port.answers.pop(leg.name, None)
    if not port.role.reads:
        answer = None if given is None else port.hand_over_of(given)
    return HandedOver(request.cached_tokens, tuple(stored), answer)


def tick(worker: KvWorker, now_ms: float) -> None:
    """Move the time of an engine forward; heartbeats and ends of leases happen in order.

    Raises:
        ValueError: the time is not a finite number of at least 0, or is before the engine's time.
    """
    each_moment(worker.pair, now_ms, worker.pair.step)
    for request in [each for each in worker.requests if isinstance(each, LoadingRequest)]:
        request._look()  # noqa: SLF001 - as above


def each_moment(port: Any, now_ms: float, act: Callable[[float], object]) -> None:
    """Call `act` at each time (in seconds) at which an engine of a pair is due, up to now, and now.

    Raises:
        ValueError: the time is not a finite number of at least 0, or is before the engine's time.
    """
    now_s = check_time(now_ms) / 1000
    if now_s < port.now_s:
        raise ValueError(f"tick: time does not go backwards; it is {port.now_s * 1000} ms, got {now_ms}")
    while (due := port.next_s) is not None and port.now_s < due <= now_s:
        act(due)
    act(now_s)


def make_port(driver: Any, role: PairRole, engine_id: str, chunk: int | None) -> PairPort:  # noqa: ARG001 - SGLang's has chunks
    """Return the port of vLLM's engine of a pair."""
    from pytest_kvmock.engines.vllm.pairs.port import PairPort

    driver.manager.attach_connector()
    return PairPort(driver, role, engine_id)
