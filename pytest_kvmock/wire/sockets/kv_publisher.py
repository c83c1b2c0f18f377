"""A publisher of KV events over ZMQ, as in an engine: numbered batches, and a replay of missed ones.

One subject: the sending of one engine's batches. Theory of operation. Each rank has an XPUB socket. Subscribers connect
to it as to a PUB socket, and it reports subscriptions, so that a test can wait for them and loses no batch to a late
subscriber. The publishing thread sends the batches. A separate thread answers replays, using only the ROUTER sockets,
so that a consumer in the test's thread can request and wait. `close` ends both, and leaves nothing open.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from pytest_kvmock.values.checks import check_integer, is_utf8
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.batcher import Batcher
from pytest_kvmock.wire.codec.decoding import as_bytes
from pytest_kvmock.wire.codec.table import not_spoken_text
from pytest_kvmock.wire.sockets.endpoints import bind_ranks, check_bound, check_context, load_zmq, release
from pytest_kvmock.wire.sockets.explained import PublishedRank, inproc_lines, not_settled
from pytest_kvmock.wire.sockets.replay_server import Replay, ReplayServer
from pytest_kvmock.wire.sockets.waiting import (
    POLL_MS,
    Deadline,
    WireTimeout,
    at_once,
    awaited,
    is_settled,
    loop_lines,
    readable,
)
from pytest_kvmock.wire.sockets.wire_faults import Numbered, WireFaults

if TYPE_CHECKING:
    from pytest_kvmock.wire.codec.digests import StreamDigests
    from pytest_kvmock.wire.sockets.load_sockets import LoadSender


_LOOKS: Final = 100
"""Number of a rank's first batches before which the publisher looks for a subscription, until it finds one."""

MOST_QUEUED: Final = 2**30
"""The longest queue of a socket: ZMQ counts in 31 bits, and a replay has an end marker."""

_MADE: Final[set[Path]] = set()
"""The directories made here for ipc sockets; a removed one is made again for the next socket that is bound there."""


class _PublishedRank:
    """The state of one rank: a socket, the next number, the batches for replays, subscriptions."""

    __slots__ = ("before", "buffer", "looks_until", "number", "restarted_alone", "subscriptions", "unheard", "xpub")

    def __init__(self, xpub: Any, buffer_steps: int) -> None:
        self.xpub = xpub
        self.restarted_alone = False  # without its worker
        self.buffer: deque[Numbered] = deque(maxlen=buffer_steps)
        self.subscriptions: list[tuple[bytes, int]] = []  # the topic, and the next number when it was seen
        self.number = self.before = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Number batches from 0, with an empty replay buffer; `before` is the number of earlier batches."""
        self.before = self.number or self.before
        self.number = self.unheard = 0
        self.looks_until = _LOOKS
        self.buffer.clear()
        self.subscriptions = [(topic, 0) for topic, _ in self.subscriptions]


class KvPublisher(Batcher):
    """Publishes the events of one engine with all its ranks over ZMQ sockets. It is a `Sink` and a context manager.

    Each event is a separate batch; events published within `step()` become one batch for each rank, as in vLLM. Block
    ids below 2^32 are written as full-width values, one to one (`wire_hash`).

    Args:
        dialect: name of the dialect, or a `Dialect`.
        endpoint: where rank 0 is bound: "tcp" for a loopback port that the system picks, "ipc", "inproc", or an
            endpoint of these transports. Other ranks have the next ports, or the name plus `_dp1` and so on; with "ipc"
            there is one rank, as in engines.
        replay: where replays are requested: True for an endpoint of the same transport, False for none, or an endpoint.
        ranks: number of data-parallel ranks.
        topic: the first frame of each batch; "kv-events", or "kv@POD@MODEL" for llm-d.
        buffer_steps: maximum number of each rank's batches that a replay can have.
        hwm: high-water mark of a subscriber's queue, in batches.
        timestamp: returns the timestamp of a batch, in seconds; None: the number of earlier batches, over restarts.
        digests: the digests of each rank, if the dialect has bytes as hashes.
        context: a `zmq.Context`; None: a new one. Over inproc, a consumer must use the same context.
        loopback: False: tcp endpoints may have any address of this machine, as in a `KvServer` with that setting.

    Raises:
        EndpointError: an endpoint cannot be bound, or is taken.
        ValueError: the dialect is unknown or not used over ZMQ, a number is out of range, or the context is closed.
        TypeError: `replay` is neither a bool nor a string, or `context` is not a context; or as in `Batcher`.
        ImportError: pyzmq or msgspec is not installed.

    Attributes:
        dialect: the `Dialect`.
        endpoints: where each rank is bound.
        replay_endpoints: where replays of each rank are requested; empty if there are none.
        context: the `zmq.Context`.
        topic: as given.
        buffer_steps: as given.
        faults: the faults of the wire, for tests to request.
        loads: sends the load stream of its engine (SGLang); None: there is none.
    """

    loads: LoadSender | None = None

    def __init__(
        self,
        dialect: str | Dialect = "vllm-0.33",
        *,
        endpoint: str = "tcp",
        replay: bool | str = True,
        ranks: int = 1,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        timestamp: Callable[[], float] | None = None,
        digests: Mapping[int, StreamDigests] | None = None,
        context: Any = None,
        loopback: bool = True,
    ) -> None:
        zmq = self._zmq = load_zmq()  # before msgspec, because the extra of sockets has both
        super().__init__(dialect, ranks=ranks, timestamp=timestamp, digests=digests, widens=True)
        if self.dialect.replay is None:
            raise ValueError(not_spoken_text(self.dialect))
        for name, value in (("buffer_steps", buffer_steps), ("hwm", hwm)):
            if check_integer(name, value, 1) > MOST_QUEUED:
                raise ValueError(f"{name} must be an integer from 1 to {MOST_QUEUED}, got {value!r:.80}")
        if not isinstance(topic, str):
            raise ValueError(f"topic must be a string, got {topic!r:.80}")  # noqa: TRY004 - one family of errors
        if not is_utf8(topic):
            raise ValueError(f"topic must be text that UTF-8 can write, got {topic!r:.80}")
        if not isinstance(replay, bool | str | None):
            raise TypeError(f"replay must be True, False or an endpoint, got {replay!r:.80}")
        check_context(context)
        self._more = zmq.SNDMORE
        self.topic = topic
        self._topic = topic.encode()
        self.buffer_steps = buffer_steps
        self.faults = WireFaults(self.dialect, self.restart, self.check_rank)
        self._took_over = False
        self._made: str | None = None  # a directory for ipc sockets
        self._server: ReplayServer | None = None
        self._owns_context = context is None
        publishers: list[Any] = []
        routers: list[Any] = []
        self.replay_endpoints: tuple[str, ...] = ()
        try:
            bound = check_bound(self._written_out(endpoint, "events"), loopback=loopback)
            if replay is not None and replay is not False:
                replay = endpoint.partition("://")[0] if replay is True else replay
                asked = check_bound(self._written_out(replay, "replay"), loopback=loopback)
            self.context = zmq.Context() if context is None else context
            publishers, self.endpoints = bind_ranks(lambda: self._xpub(hwm), bound, ranks)
            if replay is not None and replay is not False:
                routers, self.replay_endpoints = bind_ranks(
                    lambda: self._router(min(2 * (buffer_steps + 1), 2**31 - 1)), asked, ranks
                )
        except BaseException:
            for socket in publishers:
                release(socket)
            self._release()
            raise
        self._ranks = [_PublishedRank(publisher, buffer_steps) for publisher in publishers]
        if routers:
            reply_topic = topic.encode() if self.dialect.replay == "topic" else None
            self._server = ReplayServer(self.context, routers, reply_topic, self._batches_from)

    def __repr__(self) -> str:
        numbers = ", ".join(str(rank.number) for rank in self._ranks)
        return f"<KvPublisher {self.dialect.name} at {self.endpoint}, batches: {numbers}>"

    @property
    def endpoint(self) -> str:
        """The endpoint of rank 0."""
        return self.endpoints[0]

    @property
    def replay_endpoint(self) -> str | None:
        """The replay endpoint of rank 0; None if there is none."""
        return self.replay_endpoints[0] if self.replay_endpoints else None

    @property
    def replays(self) -> list[Replay]:
        """The requested replays, in order."""
        return [] if self._server is None else self._server.replays

    # ------------------------------------------------------------------------------------------------ to publish

    def publish_payload(self, payload: bytes, dp_rank: int = 0) -> None:
        """Send bytes as the next batch of a rank: invalid bytes, or those of another program.

        Raises:
            TypeError: the payload is not bytes.
            ValueError: the rank is unknown, or a fault that changes events meets a payload that is not a batch.
        """
        with self._lock:
            self._check_open()
            self._write(self.check_rank(dp_rank), as_bytes(payload))

    def restart(self, dp_rank: int | None = None) -> None:
        """Restart, as after a crash of the engine: batches are numbered from 0, and a replay has no earlier ones.

        The engine keeps its cached blocks. A worker's `restart()` empties the engine and restarts its publisher.

        Args:
            dp_rank: the rank; None for all.
        """
        with self._lock:
            self._check_open()
            for rank in self._begin_anew(dp_rank):
                self._ranks[rank].restarted_alone = True

    def worker_restarted(self, dp_rank: int) -> None:
        """Restart a rank whose worker restarts; do nothing if there is no such rank, or if closed. A harness calls
        it.
        """
        with self._lock:
            super().worker_restarted(dp_rank)
            if dp_rank < self.ranks:
                self._ranks[dp_rank].restarted_alone = False

    def _begin_anew(self, dp_rank: int | None) -> list[int]:
        begun = super()._begin_anew(dp_rank)
        for rank in begun:
            if self._ranks[rank].number:
                self.faults.begun_anew(rank)
            self._ranks[rank].begin_anew()
        return begun

    def take_over(self, closed: KvPublisher) -> None:
        """Publish in place of a closed publisher, as a restarted engine process: for a reader, numbers begin again.

        Timestamps continue, so that no batch equals an earlier one byte for byte; waiting faults stay with the closed
        one.

        Raises:
            ValueError: the other publisher is not closed.
        """
        if not closed.closed:
            raise ValueError(f"{closed!r} is open: close it first")
        with self._lock:
            self._took_over = True
            self._sent = max(self._sent, closed._sent)
            for dp_rank, (rank, former) in enumerate(zip(self._ranks, closed._ranks, strict=False)):
                rank.before = former.number or former.before
                self.faults.take_over(closed.faults, dp_rank, published=former.number > 0)

    def batches(self, dp_rank: int = 0) -> int:
        """Return the number of a rank's batches so far, which is the number of its next batch."""
        return self._rank(dp_rank).number

    def _write(self, dp_rank: int, payload: bytes) -> None:
        """Number a payload, let a fault change it, and send the resulting batches."""
        rank = self._ranks[dp_rank]
        if rank.number < rank.looks_until:
            self._look(dp_rank, rank)
        batch = Numbered(rank.number, payload)
        outcome = self.faults.strike(dp_rank, batch)
        rank.number += 1
        if outcome is None:
            rank.buffer.append(batch)
            self._send(rank, batch)
            return
        if outcome.forgets_older:
            rank.buffer.clear()
        if outcome.kept is not None:
            rank.buffer.append(outcome.kept)
        for each in outcome.sent:
            self._send(rank, each)

    def _look(self, dp_rank: int, rank: _PublishedRank) -> None:
        """Look for a subscription before sending a batch, to report the batch if there is none."""
        if any(map(self._topic.startswith, self.subscriptions(dp_rank))):
            rank.looks_until = 0
        else:
            rank.unheard = rank.number + 1

    def _send(self, rank: _PublishedRank, batch: Numbered) -> None:
        send, more = rank.xpub.send, self._more
        send(self._topic, more)  # like send_multipart, without its type check of each frame
        send(batch.number.to_bytes(8, "big"), more)
        send(batch.payload)

    # ------------------------------------------------------------------------------------------------ to wait

    def subscriptions(self, dp_rank: int = 0) -> tuple[bytes, ...]:
        """Return the topics, or prefixes of topics, subscribed to at a rank now, one for each subscription."""
        with self._lock:
            rank = self._rank(dp_rank)
            while not self._closed and rank.xpub.poll(0):
                message = rank.xpub.recv()
                topics = [topic for topic, _ in rank.subscriptions]
                if message[:1] == b"\x01":
                    rank.subscriptions.append((message[1:], rank.number))
                elif message[:1] == b"\x00" and message[1:] in topics:
                    del rank.subscriptions[topics.index(message[1:])]
            return tuple(topic for topic, _ in rank.subscriptions)

    def wait_subscribed(self, subscribers: int = 1, timeout: float = 5.0) -> None:
        """Wait until n subscribers have subscribed to the topic at each rank. Later batches reach them.

        Args:
            subscribers: required number of subscriptions; ended ones do not count.
            timeout: seconds.

        Raises:
            WireTimeout: there were fewer in time; the message lists them.
            ValueError: a number is out of range, or the publisher is closed.
        """
        __tracebackhide__ = True
        missing = self._waits_for(subscribers, timeout, blocks=True)
        while (waits := missing()) is not None:
            self._wait(*waits)

    async def await_subscribed(self, subscribers: int = 1, timeout: float = 5.0) -> None:  # noqa: ASYNC109 - as its twin
        """Wait for subscribers while the asyncio loop runs on."""
        __tracebackhide__ = True
        missing = self._waits_for(subscribers, timeout)
        while (waits := missing()) is not None:
            dp_rank, rest = waits
            await readable(rest, self._ranks[dp_rank].xpub)

    def settle(self, probe: Callable[[], object], expected: object = None, timeout: float = 5.0) -> Any:
        """Wait until the consumer's answer shows that it has applied the published events.

        Args:
            probe: queries the consumer; called repeatedly. An AssertionError counts as "not yet".
            expected: the expected answer; None: any true value.
            timeout: seconds.

        Returns:
            The answer.

        Raises:
            WireTimeout: the answer did not come in time; the message has the last answer, and the published and
                requested batches.
            TypeError: the probe cannot be called, or is async; use `asettle` for that.
            Exception: any other exception of the probe.
        """
        __tracebackhide__ = True
        rest_of = self._settles(probe, expected, timeout, blocks=True)
        while True:
            try:
                answer = at_once(probe())
            except AssertionError as error:
                answer = error
            if (rest := rest_of(answer)) is None:
                return answer
            self.subscriptions()  # an unread one would end each wait at once
            self._wait(0, rest)

    async def asettle(
        self,
        probe: Callable[[], Awaitable[object]],
        expected: object = None,
        timeout: float = 5.0,  # noqa: ASYNC109 - as its twin
    ) -> Any:
        """Do the same as `settle` with an async probe, while the asyncio loop runs on."""
        __tracebackhide__ = True
        rest_of = self._settles(probe, expected, timeout)
        while True:
            try:
                answer = await awaited(probe())
            except AssertionError as error:
                answer = error
            if (rest := rest_of(answer)) is None:
                return answer
            self._check_open()
            await readable(min(rest, POLL_MS / 1000), self._ranks[0].xpub)

    def _waits_for(
        self, subscribers: int, timeout: float, *, blocks: bool = False
    ) -> Callable[[], tuple[int, float] | None]:
        """Return a function that finds the first rank with too few subscriptions, and the time left.

        The function raises a WireTimeout if no time is left.
        """
        check_integer("subscribers", subscribers, 1)
        deadline = Deadline(timeout)
        topic = self._topic

        def missing() -> tuple[int, float] | None:
            __tracebackhide__ = True
            with self._lock:
                self._check_open()
                for dp_rank in range(self.ranks):
                    if sum(map(topic.startswith, self.subscriptions(dp_rank))) < subscribers:
                        break
                else:
                    return None
            return dp_rank, deadline.rest(
                lambda: self._not_subscribed(dp_rank, subscribers, deadline.timeout, blocks=blocks)
            )

        return missing

    def _settles(
        self, probe: object, expected: object, timeout: float, *, blocks: bool = False
    ) -> Callable[[object], float | None]:
        """Return a function of an answer that returns the time left, or None if the answer is as expected.

        The function raises a WireTimeout if no time is left.
        """
        if not callable(probe):
            raise TypeError(f"probe is called until it answers as expected; got {probe!r:.80}, which cannot be called")
        deadline = Deadline(timeout)

        def rest_of(answer: object) -> float | None:
            __tracebackhide__ = True
            if is_settled(answer, expected):
                return None
            return deadline.rest(lambda: self._not_settled(probe, answer, expected, deadline.timeout, blocks=blocks))

        return rest_of

    def _wait(self, dp_rank: int, rest: float) -> None:
        """Wait for a subscription at a rank for at most a few ms, so that other threads can publish in between."""
        with self._lock:
            self._check_open()
            self._ranks[dp_rank].xpub.poll(min(POLL_MS, max(1, int(rest * 1000))))

    def _not_subscribed(self, dp_rank: int, subscribers: int, timeout: float, *, blocks: bool) -> WireTimeout:
        there = self.subscriptions(dp_rank)
        shown = ", ".join(repr(topic.decode(errors="replace")) for topic in there) or "nothing"
        found = sum(map(self._topic.startswith, there))
        text = (
            f"rank {dp_rank} at {self.endpoints[dp_rank]} has {found} of {subscribers} subscriptions to its topic "
            f"{self.topic!r} after {timeout:g} s; subscribed to: {shown}"
        )
        lines = [text]
        if not there:
            lines += inproc_lines(self.endpoints[dp_rank])
        if self._took_over:
            lines.append(
                "it took over from a publisher that was closed: a SUB socket subscribes again while its owner polls "
                "it; for one in this thread, settle(lambda: subscriber.poll() or publisher.subscriptions())"
            )
        if blocks:
            lines += loop_lines("wait_subscribed", "await_subscribed")
        return WireTimeout("\n".join(lines))

    def _not_settled(
        self, probe: object, answer: object, expected: object, timeout: float, *, blocks: bool
    ) -> WireTimeout:
        published = [self._published(dp_rank) for dp_rank in range(self.ranks)]
        return not_settled(
            probe,
            answer,
            expected,
            timeout,
            published=published,
            replays=self.replays,
            injected=self.faults.injected,
            more=loop_lines("settle", "asettle") if blocks else (),
        )

    def _published(self, dp_rank: int) -> PublishedRank:
        """Return the published batches and the receivers of a rank."""
        self.subscriptions(dp_rank)
        rank = self._ranks[dp_rank]
        return PublishedRank(
            dp_rank,
            self.endpoints[dp_rank],
            batches=rank.number,
            since=[first for topic, first in rank.subscriptions if self._topic.startswith(topic)],
            unheard=rank.unheard,
            before=rank.before,
            restarted_alone=rank.restarted_alone,
            replays=bool(self.replay_endpoints),
        )

    def kept(self, dp_rank: int = 0) -> list[Numbered]:
        """Return the batches of a rank that a replay can have, oldest first, as written."""
        with self._lock:
            return list(self._rank(dp_rank).buffer)

    def fate(self, number: int, dp_rank: int = 0) -> str:
        """Describe the fate of a rank's batch since the last restart: which subscribers got it, what fault changed it,
        whether a replay had it.
        """
        with self._lock:
            published = self._published(self.check_rank(dp_rank))
            restarts = self.faults.restarts(dp_rank)
            injected = [each for each in self.faults.injected if (each.dp_rank, each.restarts) == (dp_rank, restarts)]
            return published.fate(number, [each for each in self.replays if each.dp_rank == dp_rank], injected)

    def _batches_from(self, dp_rank: int, start: int) -> tuple[list[Numbered], bool]:
        """Return the batches of a replay answer; called in the answering thread."""
        with self._lock:
            found = [batch for batch in self._ranks[dp_rank].buffer if batch.number >= start]
            return self.faults.truncated(dp_rank, found)

    # ------------------------------------------------------------------------------------------------ sockets

    def _xpub(self, hwm: int) -> Any:
        zmq = self._zmq
        socket = self.context.socket(zmq.XPUB)
        socket.set(zmq.XPUB_VERBOSER, 1)  # reports each subscription and each end of one, also for equal topics
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.LINGER, 0)
        return socket

    def _router(self, hwm: int) -> Any:
        zmq = self._zmq
        socket = self.context.socket(zmq.ROUTER)
        socket.set(zmq.SNDHWM, hwm)  # vLLM 0.33: room for the full buffer
        socket.set(zmq.LINGER, 0)
        return socket

    def _written_out(self, endpoint: Any, name: str) -> Any:
        """Return an endpoint, with "ipc" alone as a path in a new directory. A path of a closed publisher gets its
        directory back.
        """
        if endpoint == "ipc":
            if self._made is None:
                self._made = tempfile.mkdtemp(prefix="kvmock-")
                _MADE.add(Path(self._made))
            return f"ipc://{self._made}/{name}"
        if isinstance(endpoint, str) and endpoint.startswith("ipc://"):
            directory = Path(endpoint.removeprefix("ipc://")).parent
            if directory in _MADE and not directory.exists():
                directory.mkdir(mode=0o700)
                self._made = str(directory)
        return endpoint

    def _rank(self, dp_rank: int) -> _PublishedRank:
        return self._ranks[self.check_rank(dp_rank)]

    def close(self) -> None:
        """Close the sockets and end the thread; batches that a subscriber has not read may be lost. A second call does
        nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._server is not None:
            self._server.close()
        if self.loads is not None:
            self.loads.close()
        for rank in self._ranks:
            release(rank.xpub)
        self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this KvPublisher is closed; another one may be bound at {self.endpoint}")

    def _release(self) -> None:
        if self._owns_context and hasattr(self, "context"):
            self.context.destroy(linger=0)  # with sockets that an inproc consumer left open
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
