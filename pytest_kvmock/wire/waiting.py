"""Waiting without sleep: until a socket may have something, or a consumer answers what it should."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from time import monotonic
from typing import Any, Final

from pytest_kvmock.checks import check_number
from pytest_kvmock.wire.replay_server import Replay
from pytest_kvmock.wire.wire_faults import WireInjection

POLL_MS: Final = 5
"""How long a socket is polled between two questions to a consumer."""

_MOST_SHOWN: Final = 5


class WireTimeout(TimeoutError):  # noqa: N818 - named for what it is, as TimeoutExpired is
    """Raised when what was waited for did not come in time. The message says what was there instead."""


def milliseconds(seconds: float) -> int:
    """Return how long ZMQ shall poll, which takes 32 bits of whole milliseconds: rounded up, 24 days at most."""
    return int(min(seconds * 1000 + 0.999, 2**31 - 1))


class Deadline:
    """The time until which something is waited for.

    Args:
        timeout: seconds from now.

    Raises:
        ValueError: it is no finite number of at least 0.

    Attributes:
        timeout: as above.
    """

    __slots__ = ("_until", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = check_number("timeout", timeout, unit=" seconds")
        self._until = monotonic() + self.timeout

    def rest(self, too_late: Callable[[], WireTimeout]) -> float:
        """Return how many seconds are left.

        Args:
            too_late: makes the error.

        Raises:
            WireTimeout: none.
        """
        rest = self._until - monotonic()
        if rest <= 0:
            raise too_late()
        return rest


def is_settled(answer: object, expected: object) -> bool:
    """Whether a consumer answered what it should: `expected`, or anything that is true where that is None."""
    if isinstance(answer, AssertionError):
        return False
    return bool(answer) if expected is None else bool(answer == expected)


def not_settled(
    probe: object,
    answer: object,
    expected: object,
    timeout: float,
    *,
    published: Iterable[str],
    replays: list[Replay],
    injected: list[WireInjection],
) -> WireTimeout:
    """The error for a consumer that did not answer in time what it should.

    Args:
        probe: what asked it.
        answer: what it answered last; an AssertionError that the probe raised.
        expected: what it should answer; None: anything true.
        timeout: seconds.
        published: a line a rank.
        replays: who asked for what.
        injected: the faults that struck.
    """
    name = getattr(probe, "__qualname__", repr(probe))
    wanted = "something true" if expected is None else f"{expected!r:.200}"
    lines = [f"{name}: expected {wanted}, got {answer!r:.200} after {timeout:g} s", *published]
    lines += [
        f"rank {each.dp_rank} was asked for batches from {each.start} on, and sent {len(each.sent)}"
        for each in replays[-_MOST_SHOWN:]
    ]
    lines += [f"injected: {each.fault} at rank {each.dp_rank}, batch {each.batch}" for each in injected[-_MOST_SHOWN:]]
    error = WireTimeout("\n".join(lines))
    error.__cause__ = answer if isinstance(answer, BaseException) else None
    return error


def at_once(answer: object) -> object:
    """Return the answer of a probe, which must be no coroutine: any coroutine is true."""
    if isinstance(answer, Coroutine):
        answer.close()
        raise TypeError("settle takes a probe that answers at once, and got a coroutine; asettle awaits it")
    return answer


def awaited(answer: Awaitable[object]) -> Awaitable[object]:
    """Return what a probe has returned, which must be to be awaited."""
    if not isinstance(answer, Awaitable):
        raise TypeError(f"asettle takes a probe that is awaited, and it returned {answer!r:.80}; settle takes such")
    return answer


async def readable(rest: float, *sockets: Any) -> None:
    """Wait until there may be something to read; 50 ms at most, as a send can take the edge of a file descriptor."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptors = [socket.fd for socket in sockets]  # a socket that is closed meanwhile has none
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
