"""Endpoints of ZMQ: what may be bound, the endpoint of each rank, and pyzmq itself, which is an extra."""

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
"""The transports that a publisher of a test binds; of tcp, the loopback only."""

MOST_IPC: Final = 107
"""The longest path of an ipc socket, in bytes: `sun_path` has 108, a zero at its end among them."""

_LOOPBACK: Final = re.compile(r"127(\.\d{1,3}){3}|\[::1\]")
_MOST_TRIES: Final = 100
_FREE_PORTS: Final = range(20_000, 32_768)
"""Where runs of ports are looked for: below those that systems give to connections (from 32768 or 49152 on), where
any number may be taken for a minute after closing."""
MOST_RANKS: Final = 1024
"""Most ranks that can have ports picked by the system; an engine has some hundred at most."""

_CLOSING: Final = 1.0
"""How long a thread of ZMQ may take to close what listened at an endpoint, in seconds."""

_released: Final[set[str]] = set()
_names: Final = itertools.count()
_random: Final = SystemRandom()  # without a seed, so that parallel runs try different ports

_T = TypeVar("_T")


class EndpointError(KvMockError, ValueError):
    """Raised for an endpoint that cannot be used, or that is taken. The message lists those allowed."""


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
    """Raise unless sockets can be made in this: a `zmq.Context` that is open, or None.

    Raises:
        TypeError: it is something else; or a context of asyncio, whose sockets are awaited.
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
    """Return an endpoint that a publisher may bind, its short forms written out.

    "tcp" is a port of the loopback that the system picks, "inproc" a name that is free; "ipc" has to be made into a
    path by the caller.

    Args:
        endpoint: the endpoint.
        loopback: whether it must be on the loopback, where it is one of tcp.

    Raises:
        EndpointError: another transport, a tcp address beyond the loopback, or an ipc path that is relative or too
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
        EndpointError: another transport, no address, or one that cannot be passed on.
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
    """Return what a rank makes of an endpoint of KV events or replays, as vLLM and SGLang: of tcp the port plus the
    rank, of a name in process that with `_dp1` after it. Port 0, which the system picks, stays.

    Source: `offset_endpoint_port` of vLLM 0.33.0.

    Raises:
        EndpointError: a rank above 0 has an endpoint of another kind, as ipc, one of tcp without a port, or a port
            above 65535.
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
    """Return the endpoints that a subscriber connects to, one a rank.

    Args:
        endpoint: rank 0's, from which the others follow; or one for each rank.
        ranks: how many; None: as many as there are endpoints.

    Raises:
        EndpointError: not an endpoint a rank, or one that cannot be connected to.
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
    """Make a socket a rank, and bind them to consecutive ports, or names.

    Args:
        make: makes a socket of pyzmq.
        endpoint: of rank 0; with the port `*` the system picks one, or for several ranks ports in a row are looked for.
        ranks: how many.

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
    """Let a socket use an endpoint with an address of IPv6, which ZMQ does not look up by default."""
    if endpoint.startswith("tcp://["):
        socket.set(load_zmq().IPV6, 1)


class ClosedAtEnd:
    """A holder of sockets that is a context manager: its end closes them."""

    def close(self) -> None:
        """Close all. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def release(socket: Any) -> None:
    """Close a socket that was bound; its name is free a moment later, and not only when the context has closed it."""
    zmq = load_zmq()
    with suppress(zmq.ZMQError):  # it was not bound, or its context has ended
        endpoint = socket.last_endpoint.rstrip(b"\0").decode()
        _released.add(endpoint)
        socket.unbind(endpoint)
    socket.close(linger=0)


def _bind_when_free(socket: Any, endpoint: str) -> None:
    """Bind a socket; where one of this process was closed, wait until it has gone."""
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
