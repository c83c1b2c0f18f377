"""The stream of Mooncake's master over ZMQ: a publisher (not an engine) and a reader of messages with three frames."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.values.shared_stores import MasterEvent, MasterMessage
from pytest_kvmock.wire.sockets.endpoints import (
    ClosedAtEnd,
    allow_ipv6,
    bind_ranks,
    check_bound,
    load_zmq,
    rank_endpoints,
    release,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOPIC: Final = b""
_FRAMES: Final = 3


def master_frames(message: MasterMessage) -> list[bytes]:
    """Return the frames of a message: an empty topic, its number, and `[milliseconds, events, rank]`.

    Raises:
        ImportError: msgspec is not installed.
    """
    import msgspec

    events = [event._asdict() for event in message.events]
    return [_TOPIC, message.number.to_bytes(8, "big"), msgspec.msgpack.encode([message.at_ms, events, message.rank])]


def read_master(frames: list[bytes]) -> MasterMessage:
    """Read the frames of a message.

    Raises:
        ValueError: the frames are invalid; the error is one line.
    """
    import msgspec

    if len(frames) != _FRAMES or len(frames[1]) != 8:
        sizes = [len(frame) for frame in frames]
        raise ValueError(f"a message of Mooncake's master is {_FRAMES} frames, the second of 8 bytes; got {sizes}")
    try:
        at_ms, events, rank = msgspec.msgpack.decode(frames[2])
        read = tuple(MasterEvent(**event) for event in events)
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise ValueError(f"a message of Mooncake's master is [milliseconds, events, rank]: {error}") from None
    return MasterMessage(int.from_bytes(frames[1], "big"), at_ms, read, rank)


class MasterPublisher(ClosedAtEnd):
    """Publishes the messages of a master at a separate port: `master.listeners.append(publisher.publish)`.

    Args:
        endpoint: where it is bound, as `KvPublisher` takes it.

    Raises:
        EndpointError: the endpoint cannot be bound, or is taken.

    Attributes:
        endpoint: where it is bound.
    """

    def __init__(self, endpoint: str) -> None:
        zmq = load_zmq()
        where = check_bound(endpoint)
        self._context = zmq.Context()
        self._lock = Lock()
        try:
            (self._socket,), (self.endpoint,) = bind_ranks(lambda: self._context.socket(zmq.PUB), where, 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, message: MasterMessage) -> None:
        """Send a message to all connected subscribers; there is no replay."""
        with self._lock:
            if not self._context.closed:
                self._socket.send_multipart(master_frames(message))

    def close(self) -> None:
        """Close the socket. Twice is no error."""
        with self._lock:
            if not self._context.closed:
                release(self._socket)
                self._context.destroy(linger=0)


class MasterSubscriber(ClosedAtEnd):
    """Reads a master's stream. It is a context manager.

    Args:
        endpoint: where it is published.
    """

    def __init__(self, endpoint: str) -> None:
        zmq = load_zmq()
        (where,) = rank_endpoints(endpoint, 1)
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.SUB)
        allow_ipv6(self._socket, where)
        self._socket.subscribe(_TOPIC)
        self._socket.connect(where)

    def read(self, timeout_s: float = 0.0) -> Iterator[MasterMessage]:
        """Yield the messages that have arrived or arrive within the timeout.

        Args:
            timeout_s: how long to wait for each message if none has arrived.

        Raises:
            ValueError: a message is not one of a master.
        """
        while self._socket.poll(round(timeout_s * 1000)):
            yield read_master(self._socket.recv_multipart())

    def close(self) -> None:
        """Close the socket. Twice is no error."""
        self._context.destroy(linger=0)
