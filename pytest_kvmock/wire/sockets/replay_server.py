"""The thread that answers replays: a client asks for batches from a number on, and gets those that are still there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_kvmock.wire.sockets.endpoints import load_zmq, release
from pytest_kvmock.wire.sockets.wire_faults import Numbered

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends an answer."""

_names: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Replay:
    """One request for batches that were missed.

    Attributes:
        dp_rank: the rank that was asked.
        start: the number from which on batches were asked for; None: the request could not be read.
        sent: the numbers of the batches that were sent.
        frames: how many frames the request had after the identity; two are expected: empty, number.
        client: the identity of the socket that asked: what it has set, or one that ZMQ has made up for its connection.
    """

    dp_rank: int
    start: int | None
    sent: tuple[int, ...]
    frames: int = 2
    client: bytes = b""


class ReplayServer:
    """Answers from ROUTER sockets, in its own thread, which has them for itself.

    A request is an empty frame and a number of 8 bytes, big-endian. The answer is a message a batch, and one with
    number -1 at the end. Where the start is gone from the buffer, what is left is sent, without an error (vLLM).

    Args:
        context: a `zmq.Context`.
        routers: a socket a rank.
        topic: of the batches, where a reply has it before the number (vLLM from 0.28); None if it has not.
        batches_from: returns, for a rank and a number, the batches to send, and whether the end marker follows.

    Attributes:
        replays: the replays that were asked for.
    """

    def __init__(
        self,
        context: Any,
        routers: Sequence[Any],
        topic: bytes | None,
        batches_from: Callable[[int, int], tuple[list[Numbered], bool]],
    ) -> None:
        zmq = load_zmq()
        self.replays: list[Replay] = []
        self._context = context
        self._routers = routers
        self._topic = topic
        self._batches_from = batches_from
        name = f"inproc://kvmock-wake-{next(_names)}"
        woken = context.socket(zmq.PAIR)
        woken.bind(name)
        self._wake = context.socket(zmq.PAIR)
        self._wake.connect(name)
        self._thread = threading.Thread(target=self._serve, args=(woken,), name="KvPublisher replay", daemon=True)
        self._thread.start()

    def _serve(self, woken: Any) -> None:
        zmq = load_zmq()
        poller = zmq.Poller()
        for socket in (woken, *self._routers):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if woken in ready:
                    return
                for dp_rank, router in enumerate(self._routers):
                    if router in ready:
                        self._answer(dp_rank, router, router.recv_multipart())
        except zmq.ZMQError:  # the user has ended the context before
            pass
        finally:
            for socket in (woken, *self._routers):
                release(socket)

    def _answer(self, dp_rank: int, router: Any, frames: list[bytes]) -> None:
        client, *request = frames
        if len(request) != 2:  # vLLM logs a warning, and sends nothing
            self.replays.append(Replay(dp_rank, None, (), len(request), client))
            return
        start = int.from_bytes(request[1], "big")
        batches, end_marker = self._batches_from(dp_rank, start)
        self.replays.append(Replay(dp_rank, start, tuple(batch.number for batch in batches), client=client))
        head = (client, b"") if self._topic is None else (client, b"", self._topic)
        for number, payload in batches:
            router.send_multipart((*head, number.to_bytes(8, "big"), payload))
        if end_marker:
            router.send_multipart((client, b"", *([] if self._topic is None else [b""]), END, b""))

    def close(self) -> None:
        """End the thread, and close its sockets."""
        if not self._context.closed and not self._wake.closed:
            self._wake.send(b"")
        self._thread.join()
        self._wake.close(linger=0)
