"""The addresses that a server binds and advertises, the ranks behind each of its ports, and the access to its control
API.

An address beyond the loopback is only bound on request. A page in a browser can reach any port of its machine, so its
requests must be distinguished from those of a test: they have an Origin, or the name of the page's site as Host.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import combinations
from typing import TYPE_CHECKING, Final, Self

from pytest_kvmock.values.checks import check_integer, not_allowed_text
from pytest_kvmock.wire.sockets.endpoints import EndpointError

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.api import FaceRelease

LOOPBACK: Final = "127.0.0.1"

HTTP_FORMS: Final = ("worker", "rank", "node")
"""How ranks share HTTP ports, like vLLM's modes of load balancing (`entrypoints/cli/serve.py` of 0.33.0).

"worker" is vLLM's internal mode: one port for all ranks of a worker. "rank" is external: one server per rank. "node" is
hybrid: one port per node, with ranks numbered from 0 behind it; a worker has two nodes.
"""

_NODES: Final = 2
_PORTS: Final = 2**16
_NAMES: Final = {"sglang": "SGLang's engines", "trtllm": "TensorRT-LLM's engines"}

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
"""A valid host name; names of Docker Compose services may have underscores."""
_SECRET: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Network:
    """The address that a server binds, and the name that clients use.

    Attributes:
        host: the bound address.
        advertised: the name or address for clients.
    """

    host: str = LOOPBACK
    advertised: str = LOOPBACK

    @classmethod
    def of(cls, host: str, advertise_host: str | None) -> Self:
        """Return the network of a user's arguments.

        Raises:
            ValueError: an invalid address or name; or every address is bound, but no name for clients is given.
        """
        bound = _address(LOOPBACK if host == "localhost" else host)
        if bound is None:
            raise ValueError(
                f"KvServer: host must be an address of this machine ({LOOPBACK} or 'localhost', the loopback; 0.0.0.0 "
                f"for all), got {host!r:.80}"
            )
        if advertise_host is None and bound.is_unspecified:
            raise ValueError(
                f"KvServer: host {bound} is every address of this machine, so advertise_host must name the one that "
                "clients use"
            )
        advertised = str(bound) if advertise_host is None else _check_name("advertise_host", advertise_host)
        return cls(str(bound), advertised)

    @property
    def is_loopback(self) -> bool:
        """Whether it can only be reached from this machine."""
        return ip_address(self.host).is_loopback

    def url(self, port: int) -> str:
        """Return the advertised URL of a port."""
        return f"http://{in_url(self.advertised)}:{port}"

    def bound_endpoint(self, port: int) -> str:
        """Return the endpoint that a publisher binds; for port 0 the system picks the port."""
        return f"tcp://{in_url(self.host)}:{port or '*'}"

    def endpoint(self, bound: str) -> str:
        """Return the advertised form of a bound endpoint; only tcp endpoints change."""
        return f"tcp://{in_url(self.advertised)}:{bound.rpartition(':')[2]}" if bound.startswith("tcp://") else bound

    def bound_socket(self, port: int) -> socket.socket:
        """Return a listening socket; for port 0 the system picks the port.

        Raises:
            EndpointError: the port is taken or cannot be used, or the address is not of this machine; the message names
                it.
        """
        is_ipv6 = ":" in self.host
        try:
            return socket.create_server(
                (self.host, port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                backlog=1024,
                dualstack_ipv6=self.host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            reason = error.strerror.partition(" (")[0] if error.strerror else str(error)
            raise EndpointError(
                f"{f'port {port}' if port else 'a port'} of {self.host} cannot be bound: {reason}"
            ) from None


def ranks_of_ports(form: str, release: FaceRelease, ranks: int, *, has_roles: bool) -> list[range]:
    """Return the ranks behind each HTTP port of a worker, by their numbers in the worker.

    Args:
        form: one of `HTTP_FORMS`.
        release: the release of the engine.
        ranks: number of ranks of a worker.
        has_roles: whether workers are in P/D pairs.

    Raises:
        ValueError: an unknown form, or a form that the engine does not support.
    """
    if form not in HTTP_FORMS:
        raise ValueError(f"KvServer: http: {not_allowed_text(form, HTTP_FORMS)}")
    if form != HTTP_FORMS[0] and (has_roles or not release.has_http_forms):
        whose = _NAMES.get(release.engine, "workers with roles")
        raise ValueError(f"KvServer: http must be 'worker' for {whose}, one port for all ranks; got {form!r}")
    size = {"worker": ranks, "rank": 1, "node": -(-ranks // _NODES)}[form]
    return [range(first, min(first + size, ranks)) for first in range(0, ranks, size)]


def check_ports(ports: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Check that all ranges of ports are valid and do not overlap, as engines that cannot bind do not start.

    Args:
        ports: the first port of each range, by its name; 0: the system picks.
        counts: the number of ports of each range.

    Raises:
        ValueError: a first port that leaves too little room, or ranges that overlap.
    """
    ranges: dict[str, range] = {}
    for name, first in ports.items():
        most = _PORTS - counts[name]
        if check_integer(f"KvServer: ports[{name!r}]", first, 0) > most:
            room = f"leave room for {counts[name]} ports, " if counts[name] > 1 else "be "
            raise ValueError(f"KvServer: ports[{name!r}] must {room}at most {most}, got {first}")
        if first:
            ranges[name] = range(first, first + counts[name])
    for (one, taken), (other, asked) in combinations(ranges.items(), 2):
        if taken.start < asked.stop and asked.start < taken.stop:
            raise ValueError(f"KvServer: ports[{other!r}], {_shown(asked)}, overlap ports[{one!r}], {_shown(taken)}")


def _shown(ports: range) -> str:
    return f"{ports.start} to {ports[-1]}" if len(ports) > 1 else str(ports.start)


class Guard:
    """Decides who may use a control API.

    Args:
        network: the address of the control API.
        token: the token that clients must send; None: no token.
        allowed_hosts: further names that clients may send as Host.

    Raises:
        ValueError: an invalid name or token.
        TypeError: a text instead of a list.
    """

    def __init__(self, network: Network, token: str | None = None, allowed_hosts: Sequence[str] = ()) -> None:
        if isinstance(allowed_hosts, str):
            raise TypeError(f"KvServer: allowed_hosts must be a list of names, got {allowed_hosts!r:.80}")
        names = [network.host, network.advertised, "localhost"]
        names += [_check_name("each of allowed_hosts", name) for name in allowed_hosts]
        self._names = frozenset(name.lower() for name in names)
        self._token = None if token is None else check_secret("token", token)

    def foreign_text(self, hosts: Sequence[str], origins: Sequence[str], arrived_at: str) -> str | None:
        """Return why a request may come from a page in a browser; None if it does not.

        Args:
            hosts: all its Host headers; a client of HTTP/1.0 sends none.
            origins: all its Origin headers.
            arrived_at: the address of this machine where it arrived.
        """
        if origins:
            return f"Origin {origins[0]!r:.80} is of a page in a browser, which cannot use the control API"
        here = arrived_at.removeprefix("::ffff:").partition("%")[0]
        for host in hosts:
            if (name := _name_of(host)) != here and name not in self._names:
                return (
                    f"Host {host!r:.80} is not one of {', '.join(sorted(self._names | {here}))}; allow more by "
                    "--allowed-host NAME (network['allowed_hosts'] of KvServer)"
                )
        return None

    def admits(self, authorization: str) -> bool:
        """Return whether a client may use the API: it sent the token, or no token is needed."""
        return self._token is None or shows(authorization, self._token)


def shows(authorization: str, secret: str) -> bool:
    """Return whether the header Authorization has a secret as its bearer token, compared in constant time."""
    scheme, _, shown = authorization.partition(" ")
    is_equal = secrets.compare_digest(shown.encode("utf-8", "surrogateescape"), secret.encode())
    return is_equal and scheme.lower() == "bearer"


def check_secret(name: str, value: object) -> str:
    """Return `value` if it is a token or key that a header can have.

    Raises:
        ValueError: it is empty or has invalid characters; the message does not show it.
    """
    if not isinstance(value, str) or not _SECRET.fullmatch(value):
        raise ValueError(f"KvServer: {name} must be a text of ASCII characters that can be seen, without spaces")
    return value


def in_url(host: str) -> str:
    """Return a host in the form of URLs and endpoints: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _address(text: object) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text) if isinstance(text, str) and "%" not in text else None
    except ValueError:
        return None


def _check_name(what: str, name: object) -> str:
    address = _address(name)
    if address is not None and not address.is_unspecified:
        return str(address)
    if address is not None or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"KvServer: {what} must be a name or an address that clients use, without scheme and port, got {name!r:.80}"
        )
    return name


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port, in lower case."""
    before, bracket, _ = host.lower().partition("]")
    return before.removeprefix("[") if bracket else before.partition(":")[0]
