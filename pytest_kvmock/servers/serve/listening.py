"""How a port of a server starts and stops listening, and how many file descriptors it needs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any, Final

from aiohttp import web

from pytest_kvmock.wire.sockets.endpoints import EndpointError

MOST_BODY: Final = 2**26
"""Maximum number of bytes of a body."""

WORKER_DESCRIPTORS: Final = 8
RANK_DESCRIPTORS: Final = 4
"""File descriptors that a worker needs, and further ones for each rank: sockets, and those of ZMQ's threads."""
SPARE_DESCRIPTORS: Final = 32
"""Descriptors for the loop, the control API and the first connections."""

SILENT: Final = logging.getLogger("pytest_kvmock.servers.silent")
"""A logger that hides aiohttp's messages about invalid bytes of clients, such as a probe of HTTP/2."""
SILENT.disabled = True  # pytest's log capture also gets loggers that do not propagate


def large_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Return a request whose body may have `MOST_BODY` bytes."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MOST_BODY)


def cut_all(server: web.Server | None) -> None:
    """Cut all connections of a server, as if its process died; None: there is no server."""
    for handler in list(server.connections) if server is not None else ():
        if handler.transport is not None:
            handler.transport.abort()


async def end_listening(runner: web.ServerRunner, server: web.Server, listening: socket.socket | None) -> None:
    """Stop listening, and cut all connections.

    Args:
        runner: the runner of the server.
        server: the server with the connections.
        listening: its socket; None if it has already stopped listening.
    """
    if listening is not None:
        await _accepted(listening)
    cut_all(server)
    await runner.cleanup()


async def listen_no_more(runner: web.ServerRunner, listening: socket.socket) -> None:
    """Stop listening; connections stay open."""
    await _accepted(listening)
    for site in list(runner.sites):
        await site.stop()


async def _accepted(listening: socket.socket) -> None:
    """Accept no more connections, and wait until the server has registered the accepted ones.

    If asyncio were closed earlier, it would leave such a connection open and its client waiting (CPython issue 109564).
    """
    asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(3):  # steps of the loop between accepting and registering a connection
        await asyncio.sleep(0)


def check_descriptors(workers: int, ranks: int, ports: int) -> None:
    """Check that the process can open all descriptors of the workers, each with these ranks and HTTP ports. ZMQ would
    end the process if it could not open an eventfd.

    Raises:
        EndpointError: there are too few; the message has the numbers.
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
            "ranks, or a higher limit (ulimit -n)"
        ) from None
    finally:
        for each in opened:
            os.close(each)
