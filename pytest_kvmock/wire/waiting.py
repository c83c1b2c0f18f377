"""Waiting without sleep: until a socket may have something, or a consumer answers what it should."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from pytest_kvmock.wire.replay_server import Replay
from pytest_kvmock.wire.wire_faults import WireInjection

POLL_MS: Final = 5
"""How long a socket is polled between two questions to a consumer."""

_MOST_SHOWN: Final = 5


class WireTimeout(TimeoutError):  # noqa: N818 - named for what it is, as TimeoutExpired is
    """Raised when what was waited for did not come in time. The message says what was there instead."""


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
