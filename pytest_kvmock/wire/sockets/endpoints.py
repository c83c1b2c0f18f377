"""ZMQ endpoints: checks of bound ones, the endpoint of each rank, and the import of pyzmq, which is an extra."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from time import monotonic
from typing import Any, Final, Self, TypeVar

from pytest_kvmock.values.checks import KvMockError, check_integer, install_text, is_utf8, unknown_text

_ADDRESSES: Final = {"tcp": "HOST:PORT", "ipc": "/PATH", "inproc": "NAME"}
TRANSPORTS: Final = tuple(_ADDRESSES)
"""The transports that a test's publisher binds; with tcp, only the loopback."""

MOST_IPC: Final = 107
"""The longest path of an ipc socket, in bytes: `sun_path` has 108 bytes, including a final zero."""

_LOOPBACK: Final = re.compile(r"127(\.\d{1,3}){3}|\[::1\]")
_MOST_TRIES: Final = 100
_FREE_PORTS: Final = range(20_000, 32_768)
"""The range in which consecutive ports are searched: below the ports that systems give to connections (from 32768 or
49152 on), because those may stay taken for a minute after closing.
"""
MOST_RANKS: Final = 1024
"""Maximum number of ranks with ports picked by the system; an engine has some hundred at most."""

_CLOSING: Final = 1.0
"""How long a ZMQ thread may take to close a listener at an endpoint, in seconds."""

_released: Final[set[str]] = set()
_names: Final = itertools.count()
_random: Final = SystemRandom()  # without a seed, so that parallel runs try different ports

_T = TypeVar("_T")


class EndpointError(KvMockError, ValueError):
    """Raised for an endpoint that cannot be used or is taken. The message lists the allowed ones."""


def load_zmq() -> Any:
    """Import pyzmq.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        import zmq
    except ImportError:
        raise ImportError(f"sockets of KV events need pyzmq: {install_text('zmq')}") from None
    return zmq


def check_context(context: object) -> None:
    """Check that a context is an open `zmq.Context`, or None.

    Raises:
        TypeError: it is something else, or an asyncio context, whose sockets are awaited.
        ValueError: it is closed.
    """
    zmq = load_zmq()
    if context is None:
        return
    if not isinstance(context, zmq.Context):
        raise TypeError(f"context must be a zmq.Context, or None for one of its own, got {context!r:.80}")
    for name in ("zmq.asyncio", "zmq.green"):
        if (module := sys.modules.get(name)) is not None and isinstance(context, module.Context):
            raise TypeError(f"context must be a zmq.Context, and not one of {name}; zmq.Context(yours) shares it")
    if context.closed:
        raise ValueError("context is closed; it must be open, or None for one of its own")


def check_bound(endpoint: str, *, loopback: bool = True) -> str:
    """Return an endpoint that a publisher may bind, with short forms expanded.

    "tcp" becomes a loopback port that the system picks, "inproc" a free name; the caller must turn "ipc" into a path.

    Args:
        endpoint: the endpoint.
        loopback: whether a tcp endpoint must be on the loopback.

    Raises:
        EndpointError: the transport is unknown, a tcp address is not on the loopback, or an ipc path is relative or too
            long.
    """
    if not isinstance(endpoint, str):
        raise EndpointError(f"an endpoint is a string such as 'tcp', 'ipc' or 'inproc', got {endpoint!r:.80}")
    if endpoint == "tcp":
        return "tcp://127.0.0.1:*"
    if endpoint == "inproc":
        return f"inproc://kvmock-{next(_names)}"
    transport, address = _parts(endpoint)
    if transport == "tcp":
        host, _, port = address.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host
        if loopback and not _LOOPBACK.fullmatch(host):
            raise EndpointError(
                f"{endpoint!r:.80}: a test's publisher stays on the loopback; allowed: tcp://127.0.0.1:PORT, "
                "or tcp://127.0.0.1:* for a port that the system picks"
            )
        if port != "*" and not (_is_port(port) and 0 < int(port[:9]) < 2**16):
            raise EndpointError(f"{endpoint!r:.80}: a port is from 1 to 65535, or * for one that the system picks")
        return f"tcp://{host}:{port}"
    if transport == "ipc":
        if not Path(address).is_absolute():
            raise EndpointError(
                f"{endpoint!r:.80}: an ipc path is absolute; 'ipc' alone is a path that is made and removed"
            )
        if (size := len(address.encode())) > MOST_IPC:
            raise EndpointError(
                f"ipc path of {size} bytes, at most {MOST_IPC}; 'ipc' alone is a short path that is made"
            )
    return endpoint


def _parts(endpoint: str) -> tuple[str, str]:
    """Return transport and address of an endpoint.

    Raises:
        EndpointError: the transport is unknown, or the address is missing or invalid.
    """
    transport, separator, address = endpoint.partition("://")
    if transport not in TRANSPORTS:
        raise EndpointError(f"{endpoint!r:.80}: {unknown_text('transport', transport, TRANSPORTS)}")
    if not separator or not address:
        raise EndpointError(f"{endpoint!r:.80} has no address: expected {transport}://{_ADDRESSES[transport]}")
    if not is_utf8(address) or "\0" in address:
        raise EndpointError(f"{endpoint!r:.80}: an address is text that UTF-8 can write, without a zero")
    return transport, address


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Return a rank's endpoint for KV events or replays, as in vLLM and SGLang: for tcp the port plus the rank, for
    inproc the name plus `_dp1` and so on. Port 0, which the system picks, stays.

    Source: `offset_endpoint_port` of vLLM 0.33.0.

    Raises:
        EndpointError: a rank above 0 has an endpoint of another kind, such as ipc, tcp without a port, or a port above
            65535.
    """
    if not endpoint or not dp_rank:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{dp_rank}"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp") or not _is_port(port):
        raise EndpointError(f"an endpoint of rank {dp_rank} must be tcp with a port, or inproc; got {endpoint!r:.80}")
    number = int(port) and int(port) + dp_rank
    if number >= 2**16:
        raise EndpointError(f"{endpoint!r:.80}: rank {dp_rank} would have port {number}; ports end at 65535")
    return f"{host}:{number}"


def rank_endpoints(endpoint: str | Sequence[str], ranks: int | None) -> tuple[str, ...]:
    """Return the endpoints that a subscriber connects to, one for each rank.

    Args:
        endpoint: the endpoint of rank 0, from which the others follow; or one for each rank.
        ranks: number of ranks; None: the number of endpoints.

    Raises:
        EndpointError: there is not one endpoint for each rank, or one cannot be connected to.
        ValueError: `ranks` is not an integer of at least 1.
    """
    if ranks is not None:
        check_integer("ranks", ranks, 1)
    given = (endpoint,) if isinstance(endpoint, str) else tuple(endpoint) if isinstance(endpoint, Sequence) else ()
    if not given or not all(isinstance(each, str) for each in given):
        raise EndpointError(f"endpoints are a string, or one a rank, such as 'tcp://HOST:PORT'; got {endpoint!r:.80}")
    if len(given) == 1 and ranks is not None:
        given = tuple(rank_endpoint(given[0], rank) for rank in range(ranks))
    if ranks is not None and len(given) != ranks:
        raise EndpointError(f"{len(given)} endpoints for {ranks} ranks; one a rank, or that of rank 0, is expected")
    for each in given:
        transport, address = _parts(each)
        if transport == "tcp" and (address.startswith("*") or not _is_port(address.rpartition(":")[2])):
            raise EndpointError(f"{each!r:.80} is where an engine binds; connect to tcp://HOST:PORT")
        if transport == "tcp" and not 0 < int(address.rpartition(":")[2][:9]) < 2**16:
            raise EndpointError(f"{each!r:.80}: a port is from 1 to 65535")
    return given


def bind_ranks(make: Callable[[], _T], endpoint: str, ranks: int) -> tuple[list[_T], tuple[str, ...]]:
    """Make one socket for each rank, and bind them to consecutive ports or names.

    Args:
        make: makes a pyzmq socket.
        endpoint: the endpoint of rank 0; with port `*`, the system picks one, or consecutive ports are searched for
            several ranks.
        ranks: number of ranks.

    Returns:
        The sockets, and their endpoints.

    Raises:
        EndpointError: an endpoint is taken, or cannot be bound.
    """
    is_picked = endpoint.endswith(":*")
    if is_picked and ranks > MOST_RANKS:
        raise EndpointError(f"{ranks} ranks: ports in a row are searched for at most {MOST_RANKS}")
    for left in reversed(range(_MOST_TRIES if is_picked else 1)):
        sockets: list[Any] = []
        base, bound = endpoint, []
        if is_picked and ranks > 1:
            base = f"{endpoint[:-1]}{_random.choice(_FREE_PORTS[:-ranks])}"
        try:
            for rank in range(ranks):
                sockets.append(make())
                wanted = rank_endpoint(base, rank)
                _bind(sockets[-1], wanted)
                bound.append(sockets[-1].last_endpoint.rstrip(b"\0").decode())
                if not rank:
                    base = bound[0]  # if the system picked it
        except EndpointError:
            for socket in sockets:
                release(socket)
            if not left:
                raise
        except BaseException:
            for socket in sockets:
                release(socket)
            raise
        else:
            return sockets, tuple(bound)
    raise AssertionError("unreachable")  # pragma: no cover


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def allow_ipv6(socket: Any, endpoint: str) -> None:
    """Let a socket use an endpoint with an IPv6 address, which ZMQ does not resolve by default."""
    if endpoint.startswith("tcp://["):
        socket.set(load_zmq().IPV6, 1)


class ClosedAtEnd:
    """A context manager that holds sockets and closes them at its end."""

    def close(self) -> None:
        """Close all sockets. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def release(socket: Any) -> None:
    """Close a bound socket; its name is free a moment later, not only when the context has closed it."""
    zmq = load_zmq()
    with suppress(zmq.ZMQError):  # it was not bound, or its context has ended
        endpoint = socket.last_endpoint.rstrip(b"\0").decode()
        _released.add(endpoint)
        socket.unbind(endpoint)
    socket.close(linger=0)


def _bind_when_free(socket: Any, endpoint: str) -> None:
    """Bind a socket; if this process has closed a socket at the endpoint, wait until that is gone."""
    zmq = load_zmq()
    until = monotonic() + (_CLOSING if endpoint in _released else 0.0)
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or monotonic() >= until:
                raise
            socket.poll(1)  # a socket that is not bound receives nothing, so this waits a millisecond
        else:
            _released.discard(endpoint)
            return


def _bind(socket: Any, endpoint: str) -> None:
    zmq = load_zmq()
    allow_ipv6(socket, endpoint)
    try:
        _bind_when_free(socket, endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            other = (
                f"{endpoint.rpartition(':')[0]}:* is a port that the system picks"
                if endpoint.startswith("tcp")
                else "take another name"
            )
            raise EndpointError(f"{endpoint} is taken: something else is bound there; {other}") from None
        raise EndpointError(f"{endpoint} cannot be bound: {error.strerror}") from None
