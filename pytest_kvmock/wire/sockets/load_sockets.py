"""SGLang's load stream over ZMQ: a sender for its ranks, with faults, and a reader.

One subject: the transport of load messages. They have no replay, and a full queue drops them silently; the next message
replaces a lost one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import Any, Final

from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.load_stat import DEFAULT_INTERVAL, FIRST_VERSION, LoadPublisher, LoadReading, LoadStat
from pytest_kvmock.wire.codec.load_stream import LOAD_TOPIC, load_frames, read_load
from pytest_kvmock.wire.sockets.endpoints import ClosedAtEnd, allow_ipv6, bind_ranks, load_zmq, rank_endpoints, release

QUEUED: Final = 8
"""The high-water mark of a sender, beyond which messages are dropped (`LOAD_PUB_HWM` of SGLang)."""

_Message = list[bytes]
_Change = Callable[[_Message, _Message | None], list[_Message]]
"""Returns the messages to send in place of one, given the rank's previous message."""


class _PlannedFault:
    """A fault that waits for its message: its name, its rank, and its change."""

    __slots__ = ("change", "name", "rank")

    def __init__(self, name: str, rank: int | None, change: _Change) -> None:
        self.name, self.rank, self.change = name, rank, change


class LoadFaults:
    """The faults of a load stream, requested by a test: each changes the next messages, in the order of the requests.

    Args:
        check_rank: raises a ValueError for an unknown rank.

    Attributes:
        injected: for each changed message, the fault, the rank and the number of the message.
    """

    def __init__(self, check_rank: Callable[[int], int]) -> None:
        self.injected: list[tuple[str, int, int]] = []
        self._check_rank = check_rank
        self._planned: deque[_PlannedFault] = deque()
        self._jumps: dict[int, int] = {}
        self._before: dict[int, _Message] = {}

    def lose(self, messages: int = 1, *, dp_rank: int | None = None) -> None:
        """Lose the next messages."""
        self._plan("lose", messages, dp_rank, lambda *_: [])

    def late(self, messages: int = 1, *, dp_rank: int | None = None) -> None:
        """Hold the next messages back until the following one has been sent, so that they arrive out of order."""
        held: list[_Message] = []

        def hold(message: _Message, _: _Message | None) -> list[_Message]:
            held.append(message)
            return [message, *held[:-1]] if len(held) > messages else []

        self._plan("late", check_integer("messages", messages, 1) + 1, dp_rank, hold)

    def cut(self, messages: int = 1, *, entries: int = FIRST_VERSION, dp_rank: int | None = None) -> None:
        """Send the next messages with only their first entries, as an older worker does."""
        check_integer("entries", entries, 1)
        self._plan("cut", messages, dp_rank, lambda message, _: [_resized(message, lambda rows: rows[:entries])])

    def extend(self, messages: int = 1, *, dp_rank: int | None = None) -> None:
        """Send the next messages with one more entry, as a later worker may."""
        self._plan("extend", messages, dp_rank, lambda message, _: [_resized(message, lambda rows: [*rows, 0])])

    def freeze(self, messages: int = 1, *, dp_rank: int | None = None) -> None:
        """Send the next messages with the load of the previous one, like a rank with stuck counters."""
        self._plan("freeze", messages, dp_rank, lambda message, before: [[*message[:2], (before or message)[2]]])

    def jump(self, numbers: int = 1, *, dp_rank: int = 0) -> None:
        """Skip numbers before the next message of a rank, as failed sends do."""
        check_integer("numbers", numbers, 1)
        rank = self._check_rank(dp_rank)
        self._jumps[rank] = self._jumps.get(rank, 0) + numbers

    def take_jump(self, dp_rank: int) -> int:
        """Return the count of numbers to skip now."""
        return self._jumps.pop(dp_rank, 0)

    def strike(self, dp_rank: int, message: _Message) -> list[_Message]:
        """Return the messages to send in place of a rank's message."""
        sent = [message]
        found = next((each for each in self._planned if each.rank in (None, dp_rank)), None)
        if found is not None:
            self._planned.remove(found)
            if found.name == "late":  # messages of one rank wait for each other
                for each in self._planned:
                    each.rank = dp_rank if each.change is found.change else each.rank
            self.injected.append((found.name, dp_rank, int.from_bytes(message[1], "big")))
            sent = found.change(message, self._before.get(dp_rank))
        if sent:
            self._before[dp_rank] = sent[0]
        return sent

    @property
    def unused(self) -> list[str]:
        """The requested faults that have not changed a message yet, as text."""
        left = Counter(each.name for each in list(self._planned)) + Counter(jump=len(self._jumps))
        return [f"{name} of loads ({count} left)" for name, count in left.items()]

    def _plan(self, name: str, messages: int, dp_rank: int | None, change: _Change) -> None:
        check_integer("messages", messages, 1)
        if dp_rank is not None:
            self._check_rank(dp_rank)
        self._planned += [_PlannedFault(name, dp_rank, change) for _ in range(messages)]


class LoadSender:
    """Sends the loads of one worker's ranks, each at a separate port.

    Args:
        endpoint: where rank 0 is bound, in the forms of `KvPublisher`; rank r has port + r.
        ranks: number of ranks.
        interval: every n-th call that is not forced publishes (`--load-snapshot-publish-interval`).
        clock: the time in seconds, for heartbeats.

    Raises:
        EndpointError: the endpoint cannot be bound, or is taken.

    Attributes:
        endpoints: where each rank is bound.
        faults: the faults of the stream, for tests to request.
    """

    def __init__(
        self,
        endpoint: str,
        ranks: int = 1,
        *,
        interval: int = DEFAULT_INTERVAL,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        zmq = load_zmq()
        self._context = zmq.Context()
        self._again = zmq.Again
        self._flags = zmq.NOBLOCK
        self._interval = interval
        self._clock = clock
        self._lock = Lock()
        self._cadences = [LoadPublisher(interval) for _ in range(ranks)]
        self.faults = LoadFaults(self._check_rank)
        try:
            self._sockets, self.endpoints = bind_ranks(self._socket, endpoint, ranks)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _socket(self) -> Any:
        socket = self._context.socket(load_zmq().PUB)
        socket.set_hwm(QUEUED)
        return socket

    def _check_rank(self, dp_rank: int) -> int:
        if check_integer("dp_rank", dp_rank, 0) >= len(self._cadences):
            raise ValueError(f"dp_rank must be below {len(self._cadences)}, the ranks of these loads; got {dp_rank}")
        return dp_rank

    def call(self, dp_rank: int, read: Callable[[], LoadStat], *, force: bool = False) -> None:
        """Count a call of a rank; read and send its load if it is due."""
        with self._lock:
            cadence = self._cadences[dp_rank]
            if self._context.closed or not cadence.is_due(force=force):
                return
            cadence.number += self.faults.take_jump(dp_rank)
            stat, now_s = read(), self._clock()
            number = cadence.next_number(stat, now_s)
            if number is None:
                return
            cadence.sent(stat, now_s)
            for frames in self.faults.strike(dp_rank, load_frames(number, stat)):
                try:
                    self._sockets[dp_rank].send_multipart(frames, self._flags)
                except self._again:
                    break

    def restart(self) -> None:
        """Reset to a process that has sent nothing: numbers begin with 0."""
        with self._lock:
            self._cadences = [LoadPublisher(self._interval) for _ in self._cadences]

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        with self._lock:
            if not self._context.closed:
                for socket in self._sockets:
                    release(socket)
                self._context.destroy(linger=0)


class LoadSubscriber(ClosedAtEnd):
    """Reads the load streams of one worker's ranks. It is a context manager.

    Args:
        endpoint: the endpoint of rank 0, from which the others follow; or one for each rank.
        ranks: number of ranks; None: the number of endpoints.
        clock: the time in seconds, for the age of readings.

    Attributes:
        unread: the problems of unreadable messages, one line each.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        ranks: int | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        zmq = load_zmq()
        self.unread: list[str] = []
        self._clock = clock
        self._last: dict[int, tuple[LoadStat, int, float]] = {}
        endpoints = rank_endpoints(endpoint, ranks)
        self._context = zmq.Context()
        self._sockets = []
        for each in endpoints:
            socket = self._context.socket(zmq.SUB)
            allow_ipv6(socket, each)
            socket.subscribe(LOAD_TOPIC)
            socket.connect(each)
            self._sockets.append(socket)

    def read(self, timeout_s: float = 0.0) -> dict[int, LoadReading]:
        """Read all messages that have arrived; return the last reading of each rank that has sent one.

        The port determines the rank. A number below the last one means a late message, except 0, which means that the
        worker has restarted.

        Args:
            timeout_s: how long to wait for a message if none has arrived.
        """
        zmq = load_zmq()
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        wait_ms = round(timeout_s * 1000)
        while ready := dict(poller.poll(wait_ms)):
            wait_ms = 0
            for rank, socket in enumerate(self._sockets):
                if socket in ready:
                    self._take(rank, socket.recv_multipart())
        now_s = self._clock()
        return {
            rank: LoadReading(stat, number, 1000.0 * (now_s - read_s))
            for rank, (stat, number, read_s) in sorted(self._last.items())
        }

    def _take(self, rank: int, frames: list[bytes]) -> None:
        try:
            number, stat = read_load(frames)
        except ValueError as error:
            self.unread.append(f"rank {rank}: {error}")
            return
        before = self._last.get(rank)
        if before is None or number > before[1] or not number:
            self._last[rank] = stat, number, self._clock()

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        self._context.destroy(linger=0)


def _resized(message: _Message, change: Callable[[list[Any]], list[Any]]) -> _Message:
    """Return a message with changed payload entries."""
    import msgspec

    return [*message[:2], msgspec.msgpack.encode(change(msgspec.msgpack.decode(message[2])))]
