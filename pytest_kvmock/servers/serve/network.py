"""Where a server listens and what others call it, which ranks stand behind which of its ports, and who may use its
control API.

An address beyond the loopback is bound on request alone. A page in a browser reaches any port of the machine that it
runs on, so what it sends is told apart from what a test sends: it has an Origin, or the name of its own site as Host.
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
"""How ranks share HTTP ports, as vLLM's modes of load balancing do (`entrypoints/cli/serve.py` of 0.33.0).

"worker" is internal: one port has all ranks of a worker. "rank" is external: each has a server of its own. "node" is
hybrid: each node has a port, behind which its ranks are numbered from 0; a worker has two nodes.
"""

_NODES: Final = 2
_PORTS: Final = 2**16
_NAMES: Final = {"sglang": "SGLang's engines", "trtllm": "TensorRT-LLM's engines"}

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
"""A name of a host; those of compose have underscores."""
_SECRET: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Network:
    """Where a server listens, and what it is called by those who come there.

    Attributes:
        host: the address that is bound.
        advertised: the name or address that others are given.
    """

    host: str = LOOPBACK
    advertised: str = LOOPBACK

    @classmethod
    def of(cls, host: str, advertise_host: str | None) -> Self:
        """Return it as a user names it.

        Raises:
            ValueError: no address; no name; or every address is bound, and none is named that clients could use.
        """
        bound = _address(LOOPBACK if host == "localhost" else host)
        if bound is None:
            raise ValueError(
                f"KvServer: host must be an address of this machine ({LOOPBACK} or 'localhost', the loopback; 0.0.0.0 "
                "for all), "
                f"got {host!r:.80}"
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
        """Whether it can be reached from this machine alone."""
        return ip_address(self.host).is_loopback

    def url(self, port: int) -> str:
        """Return the URL of a port, as others are given it."""
        return f"http://{in_url(self.advertised)}:{port}"

    def bound_endpoint(self, port: int) -> str:
        """Return the endpoint that a publisher binds; of port 0, one whose port the system picks."""
        return f"tcp://{in_url(self.host)}:{port or '*'}"

    def endpoint(self, bound: str) -> str:
        """Return a bound endpoint of tcp as others are given it."""
        return f"tcp://{in_url(self.advertised)}:{bound.rpartition(':')[2]}" if bound.startswith("tcp://") else bound

    def bound_socket(self, port: int) -> socket.socket:
        """Return a socket that listens; of port 0, at one that the system picks.

        Raises:
            EndpointError: the port is taken, or cannot be used, or the address is none of this machine; the message
                names it.
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
    """Return of each HTTP port of a worker the ranks behind it, by their numbers in the whole worker.

    Args:
        form: one of `HTTP_FORMS`.
        release: of the engine.
        ranks: how many ranks a worker has.
        has_roles: whether workers are in P/D pairs.

    Raises:
        ValueError: an unknown form, or one that its engines do not have.
    """
    if form not in HTTP_FORMS:
        raise ValueError(f"KvServer: http: {not_allowed_text(form, HTTP_FORMS)}")
    if form != HTTP_FORMS[0] and (has_roles or not release.has_http_forms):
        whose = _NAMES.get(release.engine, "workers with roles")
        raise ValueError(f"KvServer: http must be 'worker' for {whose}, one port for all ranks; got {form!r}")
    size = {"worker": ranks, "rank": 1, "node": -(-ranks // _NODES)}[form]
    return [range(first, min(first + size, ranks)) for first in range(0, ranks, size)]


def check_ports(ports: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Raise unless ports in a row have room, and no two ranges overlap: engines that cannot bind do not start.

    Args:
        ports: the first port of each range, by its name; 0: the system picks.
        counts: how many ports each range has.

    Raises:
        ValueError: a first port that leaves no room, or ranges that overlap.
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
        network: where it listens.
        token: what a client must show; None: nothing.
        allowed_hosts: further names by which it is called.

    Raises:
        ValueError: no name, or no token.
        TypeError: one text in place of a list.
    """

    def __init__(self, network: Network, token: str | None = None, allowed_hosts: Sequence[str] = ()) -> None:
        if isinstance(allowed_hosts, str):
            raise TypeError(f"KvServer: allowed_hosts must be a list of names, got {allowed_hosts!r:.80}")
        names = [network.host, network.advertised, "localhost"]
        names += [_check_name("each of allowed_hosts", name) for name in allowed_hosts]
        self._names = frozenset(name.lower() for name in names)
        self._token = None if token is None else check_secret("token", token)

    def foreign_text(self, hosts: Sequence[str], origins: Sequence[str], arrived_at: str) -> str | None:
        """Return why a request may be one of a page in a browser; None: it is not.

        Args:
            hosts: each Host that it has; a client of HTTP/1.0 has none.
            origins: each Origin.
            arrived_at: the address of this machine at which it arrived.
        """
        if origins:
            return f"Origin {origins[0]!r:.80} is of a page in a browser, which cannot use the control API"
        here = arrived_at.removeprefix("::ffff:").partition("%")[0]
        for host in hosts:
            if (name := _name_of(host)) != here and name not in self._names:
                return (
                    f"Host {host!r:.80} is not one of {', '.join(sorted(self._names | {here}))}; allow more by "
                    "--allowed-host NAME "
                    "(network['allowed_hosts'] of KvServer)"
                )
        return None

    def admits(self, authorization: str) -> bool:
        """Return whether a client shows the token, where there is one."""
        return self._token is None or shows(authorization, self._token)


def shows(authorization: str, secret: str) -> bool:
    """Return whether the header Authorization has a secret as its bearer; that takes as long wherever they differ."""
    scheme, _, shown = authorization.partition(" ")
    is_equal = secrets.compare_digest(shown.encode("utf-8", "surrogateescape"), secret.encode())
    return is_equal and scheme.lower() == "bearer"


def check_secret(name: str, value: object) -> str:
    """Return a token or key that a header can have.

    Raises:
        ValueError: it is empty, or has what no header has; the message does not repeat it.
    """
    if not isinstance(value, str) or not _SECRET.fullmatch(value):
        raise ValueError(f"KvServer: {name} must be a text of ASCII characters that can be seen, without spaces")
    return value


def in_url(host: str) -> str:
    """Return a host as URLs and endpoints have it: an address of IPv6 in brackets."""
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
    """Return the name in a Host, without the port, in lower case."""
    before, bracket, _ = host.lower().partition("]")
    return before.removeprefix("[") if bracket else before.partition(":")[0]
