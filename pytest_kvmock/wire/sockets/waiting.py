"""Waiting without sleep: until a socket may have a message, or a consumer gives the expected answer."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from time import monotonic
from typing import Any, Final, TypeVar

from pytest_kvmock.values.checks import KvMockError, check_number

POLL_MS: Final = 5
"""How long a socket is polled between two queries of a consumer, in milliseconds."""


_T = TypeVar("_T")


class WireTimeout(KvMockError, TimeoutError):  # noqa: N818 - named for what it is, as TimeoutExpired is
    """Raised when a wait has timed out. The message says what arrived instead."""


def milliseconds(seconds: float) -> int:
    """Return a poll time for ZMQ in whole milliseconds of 32 bits: rounded up, at most 24 days."""
    return int(min(seconds * 1000 + 0.999, 2**31 - 1))


class Deadline:
    """The deadline of a wait.

    Args:
        timeout: seconds from now.

    Raises:
        ValueError: it is not a finite number of at least 0.

    Attributes:
        timeout: as given.
    """

    __slots__ = ("_until", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = check_number("timeout", timeout, unit=" seconds")
        self._until = monotonic() + self.timeout

    @property
    def left(self) -> float:
        """Number of seconds left, at least 0."""
        return max(0.0, self._until - monotonic())

    def rest(self, too_late: Callable[[], WireTimeout]) -> float:
        """Return the number of seconds left.

        Args:
            too_late: makes the error.

        Raises:
            WireTimeout: no time is left.
        """
        __tracebackhide__ = True  # the traceback of a failure then shows the test, not the waiting helper
        rest = self.left
        if not rest:
            raise too_late()
        return rest


def loop_lines(name: str, twin: str) -> list[str]:
    """Return a line for a timeout if an asyncio loop runs in this thread; else no line.

    Args:
        name: the blocking function.
        twin: the function to await instead.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return []
    return [f"{name} blocks the asyncio loop that runs here, and all that would answer in it: await {twin}"]


def is_settled(answer: object, expected: object) -> bool:
    """Whether a consumer's answer is as expected: equal to `expected`, or any true value if that is None."""
    if isinstance(answer, AssertionError):
        return False
    return bool(answer) if expected is None else bool(answer == expected)


def at_once(answer: _T, who: str = "settle", twin: str = "; asettle awaits it") -> _T:
    """Return the answer of a probe; it must not be a coroutine, because every coroutine is true.

    Args:
        answer: the result of the probe.
        who: the caller of the probe, for the message.
        twin: the end of the message, which names the async function if there is one.
    """
    if isinstance(answer, Coroutine):
        answer.close()
        raise TypeError(f"{who} takes a probe that answers at once, and got a coroutine{twin}")
    return answer


def awaited(answer: Awaitable[object]) -> Awaitable[object]:
    """Return the result of a probe, which must be awaitable."""
    if not isinstance(answer, Awaitable):
        raise TypeError(f"asettle takes an async probe, and this one returned {answer!r:.80}; call settle")
    return answer


async def readable(rest: float, *sockets: Any) -> None:
    """Wait until there may be something to read; at most 50 ms, because a send can consume the edge of a file
    descriptor.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptors = [socket.fd for socket in sockets]  # a socket that was closed in the meantime has none
    for descriptor in descriptors:
        loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(min(rest, 0.05)):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


@types.coroutine
def _turn() -> Generator[None, None, None]:
    """Let the loop's other tasks run once; otherwise many replies that are already there would block them."""
    yield


async def polled(socket: Any, timeout: float, check_open: Callable[[], None]) -> bool:  # noqa: ASYNC109 - as poll has it
    """Wait until a socket has something to read, and return whether it has; the loop always runs at least once.

    Args:
        socket: the socket.
        timeout: seconds.
        check_open: raises if the socket was closed in the meantime.

    Raises:
        ValueError: raised by `check_open`.
    """
    until = monotonic() + timeout
    await _turn()
    while True:
        check_open()
        if socket.poll(0):
            return True
        rest = until - monotonic()
        if rest <= 0:
            return False
        await readable(rest, socket)
