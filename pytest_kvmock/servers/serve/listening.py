"""How a port of a server listens, and ends that; and how many descriptors that takes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any, Final

from aiohttp import web

from pytest_kvmock.wire.sockets.endpoints import EndpointError

MOST_BODY: Final = 2**26
"""Bytes of a body, at most."""

WORKER_DESCRIPTORS: Final = 8
RANK_DESCRIPTORS: Final = 4
"""Descriptors that a worker has open, and those of each of its ranks in addition: sockets, and what ZMQ's threads wait
with."""
SPARE_DESCRIPTORS: Final = 32
"""Descriptors for the loop, the control API and the first connections."""

SILENT: Final = logging.getLogger("pytest_kvmock.servers.silent")
"""Where aiohttp says what it found wrong with a client's bytes, as with a probe of HTTP/2: it is not shown."""
SILENT.disabled = True  # pytest's capture of logs hears loggers that do not propagate, too


def large_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Return a request whose body may have `MOST_BODY` bytes."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MOST_BODY)


def cut_all(server: web.Server | None) -> None:
    """Cut all connections of a server, as a process that dies does; None: there is none."""
    for handler in list(server.connections) if server is not None else ():
        if handler.transport is not None:
            handler.transport.abort()


async def end_listening(runner: web.ServerRunner, server: web.Server, listening: socket.socket | None) -> None:
    """Listen no more, and cut all connections.

    Args:
        runner: what listens.
        server: whose connections.
        listening: where; None: nowhere any more.
    """
    if listening is not None:
        await _accepted(listening)
    cut_all(server)
    await runner.cleanup()


async def listen_no_more(runner: web.ServerRunner, listening: socket.socket) -> None:
    """Listen no more; connections stay."""
    await _accepted(listening)
    for site in list(runner.sites):
        await site.stop()


async def _accepted(listening: socket.socket) -> None:
    """Accept no more, and wait until the server knows each connection that was accepted.

    asyncio, closed meanwhile, would leave one open and its client waiting (CPython's issue 109564).
    """
    asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(3):  # steps of the loop from a connection that was accepted to one that the server knows
        await asyncio.sleep(0)


def check_descriptors(workers: int, ranks: int, ports: int) -> None:
    """Raise where a process cannot open what workers need, each with these ranks and HTTP ports: without an eventfd,
    ZMQ would end it.

    Raises:
        EndpointError: the message says how many there are.
    """
    needed = SPARE_DESCRIPTORS + workers * (WORKER_DESCRIPTORS + ports - 1 + ranks * RANK_DESCRIPTORS)
    opened: list[int] = []
    try:
        while len(opened) < needed:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EndpointError(
            f"KvServer: {needed} descriptors are needed, {len(opened)} can be opened ({reason}): fewer workers or "
            "ranks, or a higher "
            "limit (ulimit -n)"
        ) from None
    finally:
        for each in opened:
            os.close(each)
