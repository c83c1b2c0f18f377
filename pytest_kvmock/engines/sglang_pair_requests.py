"""Requests of SGLang's P/D pairs by hand: P computes when D has pages, and a test decides when its data has arrived.

Each operation of a worker runs the queues of its engine and of its peers until nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines import pair_requests
from pytest_kvmock.engines.base.hand_over import check_kind
from pytest_kvmock.engines.pair_requests import HandedOver, LegRequest, each_moment
from pytest_kvmock.engines.worker import KvWorker, OutOfBlocks, RequestError, Served

if TYPE_CHECKING:
    from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg
    from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangRole
    from pytest_kvmock.engines.sglang.pairs.sglang_port import SglangPort
    from pytest_kvmock.values.tokens import Prompt, TokenIds


class SglangLoadingRequest(LegRequest):
    """A decode leg: it waits for pages, for P's data and for a place, and then runs like any request.

    `KvWorker.load` makes it. Its status is "waiting" until it has pages, "loading" until its transfer has ended, then
    "running"; "failed" if its handshake or transfer failed; "aborted" if it was finished before it ran.
    """

    _port: SglangPort
    _leg: DecodeLeg | None = None
    _open = ("waiting", "loading", "received", "preempted", "running")

    def __init__(self, worker: KvWorker, prompt: Prompt) -> None:
        super().__init__(worker, prompt)
        self._status = "waiting"

    def begin(self, hand_over: Mapping[str, Any] | None) -> None:
        """Request pages; see `KvWorker.load`."""
        port = self._port
        manager: Any = self._worker.manager
        kept = port.role.options.num_reserved_decode_tokens
        needed = manager.pages_of(len(self._state)) + manager.pages_of(kept)
        if needed > manager.num_blocks:
            error = OutOfBlocks(needed, manager.num_blocks)
            error.add_note(f"num_reserved_decode_tokens={kept} are kept for what the request generates")
            raise error
        # The length of its output is unknown; the reserved length is assumed.
        self._leg = port.ask_decode(self._state, hand_over or {}, max(kept, 2), "never")
        port.settle()

    def end_transfer(self) -> None:
        """End the transfer: P's leg gets its answer, and this request joins the batch, which publishes.

        Raises:
            RequestError: it waits for no transfer, or P has not sent the whole prompt.
        """
        self._end_transfer(is_well=True)

    def fail_transfer(self) -> None:
        """Let the transfer fail: both legs end with an error, and P's prompt stays cached.

        Raises:
            RequestError: see `end_transfer`.
        """
        self._end_transfer(is_well=False)

    def _end_transfer(self, *, is_well: bool) -> None:
        self._look()
        leg = self._leg
        peer = None if leg is None else self._port.peer_of(leg)
        room = None if peer is None or leg is None else peer.rooms.room_of(leg)
        if self._status != "loading" or room is None or not room.is_moving:
            why = f"it is {self._status}"
            if self._status in ("waiting", "loading"):
                why += ", and its prefill engine has not sent all of the prompt"
            raise RequestError(f"end of a transfer that is not under way: {why} (worker {self._worker.worker_id})")
        assert peer is not None
        peer.rooms.end(room, is_well=is_well)
        self._port.settle()
        self._look()

    def _look(self) -> None:
        """Update its state from the engine's leg."""
        leg, side = self._leg, self._port.decode
        if leg is None or side is None or self._status in ("failed", "aborted", "finished", "lost"):
            return
        if leg in side.running:
            if self._status != "running":
                self._status, self.cached_tokens = "running", leg.hit_tokens
        elif leg in side.moving:
            self._status = "loading"
        elif leg in side.arrived:
            self._status = "received"
        elif leg in side.retracted:
            self._status = "preempted"
        elif leg not in side.queue:
            answer = self._port.answers.pop(leg.name, None)
            self._status = "failed" if answer is None or answer.finish == "error" else "aborted"
            if self in self._worker.requests:
                self._worker.requests.remove(self)

    def decode(self, tokens: Any = 1, accepted: Any = None) -> None:
        """Generate tokens behind P's first one; see `Request.decode`."""
        self._look()
        super().decode(tokens, accepted)

    def preempt(self) -> None:
        """Retract the request: its pages are freed, and its KV waits outside; see `Request.preempt`."""
        self._look()
        self._need("preempt", "running")
        assert self._leg is not None
        assert self._port.decode is not None
        self._port.decode.retract(self._leg)
        self._status = "preempted"

    def resume(self) -> None:
        """Get new pages, to which its KV is copied back; nothing is matched.

        Raises:
            OutOfBlocks: there is no room; it stays preempted.
            RequestError: it is not preempted.
        """
        self._need("resume", "preempted")
        self._port.settle()
        self._look()
        if self._status != "running":
            needed = self._worker.manager.num_blocks
            raise OutOfBlocks(min(needed, self._driver.need(self._state, len(self._state))), self._driver.room())

    def finish(self) -> None:
        """Finish the request; while it is loading, its pages are kept as long as P may write into them.

        Raises:
            RequestError: it has ended, or its worker restarted.
        """
        self._look()
        self._need("finish", *self._open)
        leg, side = self._leg, self._port.decode
        assert leg is not None
        assert side is not None
        if self._status == "running":
            side.finish(leg)
            self._end_as("finished")
        else:
            side.abort(leg.name, self._port.now_s)
            self._end_as("aborted")
        self._port.settle()

    def _end_as(self, status: str) -> None:
        self._status = status
        self._worker.requests.remove(self)


def load(worker: KvWorker, prompt: Prompt | TokenIds, hand_over: Mapping[str, Any] | None) -> LegRequest:
    """Open a decode leg; see `KvWorker.load`."""
    return pair_requests.load(worker, prompt, hand_over, SglangLoadingRequest, ("decode",))


def serve(
    worker: KvWorker, prompt: Prompt | TokenIds, output_tokens: int, hand_over: Mapping[str, Any] | None
) -> Served:
    """Open a prefill leg; the engine computes it when a decode engine has pages. See `KvWorker.serve`.

    Its answer comes at the end of the transfer. The cached tokens and stored blocks are known here only if the decode
    leg came first.
    """
    port: SglangPort = worker.pair
    if port.role.worker_type != "prefill":
        raise ValueError(f"serve: hand_over is for worker_type 'prefill'; {worker!r} is for 'decode'")
    if output_tokens > 1:
        raise ValueError(f"serve: a prefill engine of SGLang generates 1 token, got output_tokens={output_tokens!r}")
    given = check_kind(hand_over, "sglang", "serve") or port.new_hand_over()
    accepted = worker.accept(prompt)
    driver: Any = worker._driver  # noqa: SLF001 - one family
    recorder = worker._recorder  # noqa: SLF001 - as above
    state = driver.open(accepted)
    stored = recorder.stored = []
    try:
        leg = port.ask_prefill(state, given)
        if leg is None:
            manager: Any = worker.manager
            raise OutOfBlocks(manager.pages_of(len(state)), manager.num_blocks)
        leg.token = worker._steps(1)[0]  # noqa: SLF001 - as above
        port.settle()
    finally:
        recorder.stored = None
    return HandedOver(leg.hit_tokens, tuple(stored), port.hand_over_of(given))


def tick(worker: KvWorker, now_ms: float) -> None:
    """Move the time of an engine forward; waits end in order.

    Raises:
        ValueError: the time is not a finite number of at least 0, or is before the engine's time.
    """
    port: SglangPort = worker.pair

    def act(at_s: float) -> None:
        port.expire(at_s)
        port.settle()

    each_moment(port, now_ms, act)


def make_port(driver: Any, role: SglangRole, engine_id: str, chunk: int | None) -> SglangPort:
    """Return the port of SGLang's engine of a pair."""
    from pytest_kvmock.engines.sglang.pairs.sglang_port import SglangPort

    return SglangPort(driver, role, engine_id, chunk=chunk)
