"""Waiting without sleep: until a socket may have something, or a consumer answers what it should."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from time import monotonic
from typing import Any, Final, TypeVar

from pytest_kvmock.values.checks import KvMockError, check_number

POLL_MS: Final = 5
"""How long a socket is polled between two questions to a consumer."""


_T = TypeVar("_T")


class WireTimeout(KvMockError, TimeoutError):  # noqa: N818 - named for what it is, as TimeoutExpired is
    """Raised when a wait has timed out. The message tells what arrived instead."""


def milliseconds(seconds: float) -> int:
    """Return how long ZMQ shall poll, which takes 32 bits of whole milliseconds: rounded up, 24 days at most."""
    return int(min(seconds * 1000 + 0.999, 2**31 - 1))


class Deadline:
    """The time until which something is waited for.

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
        """How many seconds are left, 0 at least."""
        return max(0.0, self._until - monotonic())

    def rest(self, too_late: Callable[[], WireTimeout]) -> float:
        """Return how many seconds are left.

        Args:
            too_late: makes the error.

        Raises:
            WireTimeout: none.
        """
        __tracebackhide__ = True  # the traceback of a failure then shows the test, not the waiting helper
        rest = self.left
        if not rest:
            raise too_late()
        return rest


def loop_lines(name: str, twin: str) -> list[str]:
    """What a timeout adds where an asyncio loop runs in this thread: one line, or no line.

    Args:
        name: what has blocked.
        twin: what is awaited in its place.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return []
    return [f"{name} blocks the asyncio loop that runs here, and all that would answer in it: await {twin}"]


def is_settled(answer: object, expected: object) -> bool:
    """Whether a consumer answered what it should: `expected`, or anything that is true where that is None."""
    if isinstance(answer, AssertionError):
        return False
    return bool(answer) if expected is None else bool(answer == expected)


def at_once(answer: _T, who: str = "settle", twin: str = "; asettle awaits it") -> _T:
    """Return the answer of a probe, which must be no coroutine: any coroutine is true.

    Args:
        answer: what it returned.
        who: what asked it.
        twin: the name of the coroutine that the message names, where one exists.
    """
    if isinstance(answer, Coroutine):
        answer.close()
        raise TypeError(f"{who} takes a probe that answers at once, and got a coroutine{twin}")
    return answer


def awaited(answer: Awaitable[object]) -> Awaitable[object]:
    """Return what a probe has returned, which must be to be awaited."""
    if not isinstance(answer, Awaitable):
        raise TypeError(f"asettle takes an async probe, and this one returned {answer!r:.80}; call settle")
    return answer


async def readable(rest: float, *sockets: Any) -> None:
    """Wait until there may be something to read; 50 ms at most, as a send can take the edge of a file descriptor."""
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
    """Let the loop's other tasks go on once: many replies that are there already would keep them waiting."""
    yield


async def polled(socket: Any, timeout: float, check_open: Callable[[], None]) -> bool:  # noqa: ASYNC109 - as poll has it
    """Wait until a socket has something to read, and return whether it has; the loop goes on where it has already, too.

    Args:
        socket: which.
        timeout: seconds.
        check_open: raises where the socket was closed meanwhile.

    Raises:
        ValueError: whatever `check_open` raises.
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
