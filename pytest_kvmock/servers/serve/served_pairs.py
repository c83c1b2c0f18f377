"""Served engines of P/D pairs: transfers between them on the wall clock, and how a test controls them.

One subject: links, leases and waits of a server whose engines have roles. `engines/*/pairs` has the blocks that engines
keep and load, and their messages.

Theory of operation. The ports of all engines find each other by the addresses in their hand-overs, as processes do.
Their time is the server's: seconds since it began. Each pass of an engine ends with a step of its port (`EngineLoop`).
An engine with nothing to compute steps when something is due or when another engine reports something. A transfer takes
the time of `delay_transfers`. Everything runs in the server's thread.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from pytest_kvmock.engines.base.pair_options import IN_ROOMS, PAIRED
from pytest_kvmock.servers.serve.bootstrap_port import BootstrapPort
from pytest_kvmock.values.checks import check_integer, check_number

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hand_over import Lease
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.engines.sglang.pairs.sglang_port import SglangPort
    from pytest_kvmock.engines.vllm.pairs.port import Loading, PairPort
    from pytest_kvmock.harness.roles import Role
    from pytest_kvmock.servers.serve.api import Generate, Model
    from pytest_kvmock.servers.serve.loop_thread import LoopThread
    from pytest_kvmock.servers.serve.network import Network
    from pytest_kvmock.servers.serve.request_log import ServedRequest

SIDE_CHANNEL_PORT: Final = 5600
"""The side channel port of vLLM's NixlConnector (`VLLM_NIXL_SIDE_CHANNEL_PORT`)."""

Place: TypeAlias = tuple[int, int]
"""A worker and one of its ranks, which other engines see as a separate engine."""

_MOST_ROOMS: Final = 4096
"""Maximum number of rooms and legs that are kept, for cached tokens and for the match of legs."""


class DrivenEngine(Protocol):
    """The part of an `EngineLoop` that is used here."""

    engine: Any
    lock: Any

    def rouse(self) -> None:
        """Check again whether there is work."""

    def lose(self, request: Any, reason: str) -> None:
        """End a request that its engine ended with an error."""

    def guarded(self) -> AbstractContextManager[None]:
        """Within the context, an exception of the engine breaks it."""


class PairRefused(ValueError):  # noqa: N818 - what happened
    """Raised if an engine of a pair rejects a leg, as the real engine does, with status 400."""


class ServedPairs(ABC):
    """The pairs of a server: `KvServer.pairs`. Tests call its methods in their own thread.

    Args:
        thread: the thread of the server.
        roles: the role of each worker.
        network: the address of bootstrap servers.
        model: the served model, with ranks per worker and tokens per block.
        seed: seed of the names of requests.

    Attributes:
        roles: the role of each worker: "prefill", "decode" or "both".
        bootstraps: the bootstrap server of each prefill worker, if its kind of hand-over has one.
    """

    way: str

    def __init__(
        self, thread: LoopThread, roles: Mapping[int, Role], network: Network, model: Model, seed: int
    ) -> None:
        self._ranks = model.ranks
        self.roles = {worker: role.pair.worker_type for worker, role in roles.items()}
        self._thread, self._network = thread, network
        self.bootstraps: dict[int, BootstrapPort] = {}
        self._began = time.monotonic()
        self._names = Random(f"{seed}:legs")  # noqa: S311 - mock data
        self._loops: dict[Place, DrivenEngine] = {}
        self._ports: dict[Place, Any] = {}
        self._lives: dict[Place, int] = {}
        self._alarms: dict[Place, asyncio.TimerHandle] = {}
        self._delay_s = 0.0
        self._failing = 0
        self._holds = False
        self._held: list[tuple[Place, Any]] = []
        self._legs: dict[str, list[int]] = {}  # the numbers of legs, by their shared value

    def __repr__(self) -> str:
        return f"<ServedPairs {self.way}: {', '.join(f'{kind} {worker}' for worker, kind in self.roles.items())}>"

    # --------------------------------------------------------------------------------------------- what a test does

    def fail_transfers(self, n: int = 1) -> None:
        """Let the next `n` transfers fail at the time when their bytes would have arrived.

        Raises:
            ValueError: `n` is no integer of at least 1.
        """
        self._failing += check_integer("fail_transfers: n", n, 1)

    def delay_transfers(self, seconds: float) -> None:
        """Let each transfer that begins from now on take this many seconds of real time.

        Raises:
            ValueError: `seconds` is no number of at least 0.
        """
        self._delay_s = check_number("delay_transfers: seconds", seconds, unit=" (seconds)")

    def hold_transfers(self) -> None:
        """Let no transfer end until `release_transfers`."""
        self._holds = True

    def release_transfers(self) -> None:
        """End `hold_transfers`: the held transfers end now."""
        self._holds = False

        async def release() -> None:
            held, self._held = self._held, []
            for place, transfer in held:
                self._arrives(place, transfer, self._take_fate())
            for loop in self._loops.values():
                loop.rouse()

        self._thread.call(release())

    def reset(self) -> None:
        """Drop delays, failures and held transfers, before the next test."""
        self._delay_s, self._failing, self._holds, self._held = 0.0, 0, False, []

    @property
    def leased(self) -> dict[int, tuple[Lease, ...]]:
        """The leases of each worker for legs that do not run; workers without any are absent."""

        async def look() -> dict[int, tuple[Lease, ...]]:
            found: dict[int, tuple[Lease, ...]] = {}
            for place, loop in self._loops.items():
                with loop.lock:
                    found[place[0]] = found.get(place[0], ()) + self._ports[place].leased
            return {worker: leases for worker, leases in found.items() if leases}

        return self._thread.call(look())

    @property
    def notified(self) -> list[tuple[str, str, str]]:
        """The notices that a request's blocks are no longer needed: sender and receiver, by engine name, and request
        (vLLM).
        """
        return []

    @property
    def rooms(self) -> list[tuple[int, int, int, str]]:
        """Each room that a leg named: prefill worker, rank, room, and "prefill" or "decode" (SGLang)."""
        return []

    def engine_id(self, worker: int, rank: int = 0) -> str:
        """Return the name of an engine, or of one of its ranks, for other engines; a restart changes it."""
        name: str = self._ports[worker, rank].engine_id
        return name

    def to_json(self) -> dict[str, Any]:
        """Return leases, notices and rooms in the form of the control API."""
        leases = self.leased
        rows = [
            {
                "worker": worker,
                "request": lease.request,
                "phase": lease.phase,
                "blocks": lease.num_blocks,
                "seconds_left": None if lease.until_ms is None else lease.until_ms / 1000 - self.now_s,
            }
            for worker, each in leases.items()
            for lease in each
        ]
        told = [{"by": by, "to": to, "request": request} for by, to, request in self.notified]
        rooms = [{"worker": at, "rank": rank, "room": room, "leg": leg} for at, rank, room, leg in self.rooms]
        return {"roles": self.roles, "leased": rows, "notified": told, "rooms": rooms}

    # ------------------------------------------------------------------------------------------------- engine loops

    @property
    def now_s(self) -> float:
        """The time of all engines, in seconds since the server began."""
        return time.monotonic() - self._began

    def join(self, loop: DrivenEngine) -> None:
        """Add an engine when it begins, or begins again after a restart."""
        place, port = _place_of(loop), loop.engine.worker.pair
        old = self._ports.get(place)
        if old is port:
            return
        life = self._lives[place] = self._lives.get(place, -1) + 1
        self._loops[place], self._ports[place] = loop, port
        port.has_clock = True
        port.now_s = self.now_s
        if old is not None:
            self._lose(old)
            for each in self._ports.values():
                each.forget_peer(old)
        worker, rank = place
        name = f"{self.roles[worker]}-{worker}{f'-{life}' if life else ''}"
        self._take_in(place, port, f"{name}_dp{rank}" if self._ranks > 1 else name)

    @abstractmethod
    def _lose(self, old: Any) -> None:
        """End the transfers of an engine that is gone."""

    @abstractmethod
    def _take_in(self, place: Place, port: Any, name: str) -> None:
        """Connect an engine with the others."""

    def _port_of(self, loop: DrivenEngine) -> Any:
        return self._ports[_place_of(loop)]

    def _rouse(self, port: Any) -> None:
        """Rouse an engine that has news, unless a restart has replaced it."""
        for place, each in self._ports.items():
            if each is port:
                self._loops[place].rouse()

    def rank_of(self, given: Mapping[str, Any] | None) -> int | None:  # noqa: ARG002 - some look at it
        """Return the rank of a prefill engine that serves a leg without a rank; None: any."""
        return None

    def check(self, asked: Generate) -> None:  # noqa: B027 - some refuse nothing
        """Check the legs of a request before any of them is opened.

        Raises:
            PairRefused: the engine answers with an error.
        """

    def output_of(self, loop: DrivenEngine, asked: Generate) -> int:  # noqa: ARG002 - some know better
        """Return how many tokens an engine generates for each choice of a request."""
        return asked.max_tokens

    def cached_tokens(self, loop: DrivenEngine, given: Mapping[str, Any] | None, own: int) -> int:  # noqa: ARG002
        """Return how many tokens of a prompt were cached, for the answer of its leg."""
        return own

    def generated(self, loop: DrivenEngine, done: ForwardPass) -> dict[Any, int]:  # noqa: ARG002 - some look at it
        """Return the requests with new tokens after a pass, each with its total number of tokens."""
        return {each: each.generated_tokens for each in done.generated}

    def why_lost(self, loop: DrivenEngine, request: Any) -> str:  # noqa: ARG002 - as above
        """Return why a request ended with an error."""
        return "Internal server error"

    @abstractmethod
    def open(self, loop: DrivenEngine, request: Any, asked: Generate, position: int) -> Any:
        """Open the leg of a request that an engine was given; return None for an ordinary request.

        Raises:
            PairRefused: the engine answers with an error; the request is removed.
        """

    def begin_pass(self, loop: DrivenEngine) -> None:
        """Set the time of an engine at the start of a pass."""
        port = self._port_of(loop)
        port.now_s = max(port.now_s, self.now_s)

    @abstractmethod
    def step(self, loop: DrivenEngine) -> None:
        """Run the pair's part at the end of a step of an engine."""

    def answer(self, loop: DrivenEngine, leg: Any) -> dict[str, Any] | None:  # noqa: ARG002 - most have none
        """Return the parameters of the answer of a leg that has ended; None: it has none."""
        return None

    @abstractmethod
    def shared(self, given: Mapping[str, Any]) -> Any:
        """Return the value that the parameters of both legs of a client's request share; None if this leg lacks it."""

    def meet(self, row: ServedRequest, shared: Any) -> None:
        """Record the value that a leg shares with the other leg of its client's request."""
        if shared is None:
            return
        legs = row.legs = self._legs.setdefault(str(shared), row.legs)
        if row.number not in legs:
            legs.append(row.number)
        while len(self._legs) > _MOST_ROOMS:
            del self._legs[next(iter(self._legs))]

    def _rouse_others(self, own: Place) -> None:
        for place, port in self._ports.items():
            if place != own and self._has_news(port):
                self._loops[place].rouse()

    @abstractmethod
    def _has_news(self, port: Any) -> bool:
        """Whether an engine has news."""

    def _set_alarm(self, place: Place, due_s: float | None) -> None:
        """Set the time to rouse an engine: when its next lease or wait ends, or a heartbeat is due."""
        alarm = self._alarms.pop(place, None)
        if alarm is not None:
            alarm.cancel()
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._alarms[place] = loop.call_later(max(0.0, due_s - self.now_s), self._loops[place].rouse)

    async def start(self) -> None:
        """Start the bootstrap servers."""
        for each in self.bootstraps.values():
            await each.start()

    async def stop(self) -> None:
        """Cancel all alarms, and stop the bootstrap servers."""
        for alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()
        for each in self.bootstraps.values():
            await each.stop()

    def close(self) -> None:
        """Close the sockets of bootstrap servers that never listened."""
        for each in self.bootstraps.values():
            each.close()

    # ---------------------------------------------------------------------------------------------------- transfers

    def _take_fate(self) -> bool:
        if not self._failing:
            return True
        self._failing -= 1
        return False

    def _travels(self, place: Place, transfer: Any) -> None:
        """Begin a transfer to an engine."""
        if self._holds:
            self._held.append((place, transfer))
            return
        asyncio.get_running_loop().call_later(self._delay_s, self._arrives, place, transfer, self._take_fate())

    @abstractmethod
    def _arrives(self, place: Place, transfer: Any, ok: bool) -> None:
        """End a transfer: its bytes have arrived, or (not `ok`) it failed."""


class VllmPairs(ServedPairs):
    """The pairs of vLLM's engines, with NixlConnector or MooncakeConnector."""

    def __init__(
        self, thread: LoopThread, roles: Mapping[int, Role], network: Network, model: Model, seed: int
    ) -> None:
        super().__init__(thread, roles, network, model, seed)
        self.way = next(iter(roles.values())).pair.hand_over
        self._reads = PAIRED[self.way]
        if self._reads:
            return
        for worker, role in roles.items():
            if role.pair.worker_type == "prefill":
                self.bootstraps[worker] = BootstrapPort(network, in_rooms=False, page_size=0)

    def _lose(self, old: PairPort) -> None:
        old.lost()
        for each in self._ports.values():
            for loading in [every for every in each.loads.values() if every.peer is old and every.has_begun]:
                each.ended(loading, ok=False)  # its connection is broken

    def _take_in(self, place: Place, port: PairPort, name: str) -> None:
        worker, rank = place
        port.rename(name, (f"10.0.0.{worker + 1}", SIDE_CHANNEL_PORT + rank))
        port.on_begin = lambda _, loading: self._travels(place, loading)
        if (bootstrap := self.bootstraps.get(worker)) is not None:
            bootstrap.engine_ids[rank], port.bootstrap_addr = name, bootstrap.url
        for each in self._ports.values():
            each.peers[name] = port
            port.peers[each.engine_id] = each

    def open(self, loop: DrivenEngine, request: Any, asked: Generate, position: int) -> Any:
        """Open the leg of a request; return None if it has no parameters."""
        given = asked.hand_overs[position] if asked.hand_overs else None
        if given is None:
            return None
        number = "" if asked.api == "chat" else f"-{position}"
        name = f"{asked.id}{number}-{self._names.getrandbits(32):08x}"  # `assign_request_id`
        return self._port_of(loop).open(request.state, self._reached(given), request.prompt_tokens, name)

    def shared(self, given: Mapping[str, Any]) -> Any:
        """Return the name of the prefill leg; for Mooncake, that of the transfer."""
        return given.get("remote_request_id" if self._reads else "transfer_id")

    def _reached(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters that find an engine only at its own address; at any other address the handshake fails."""
        params = dict(given)
        engine = params.get("remote_engine_id")
        if not params.get("do_remote_prefill") or not isinstance(engine, str):
            return params
        port = next((each for each in self._ports.values() if each.engine_id == engine), None)
        if port is None:
            return params
        here: tuple[Any, ...]
        there: tuple[Any, ...]
        if self._reads:
            here = tuple(port.connector.address.values())
            there = params.get("remote_host"), params.get("remote_port")
        else:
            here, there = (port.bootstrap_addr,), (self._canonical(params.get("remote_bootstrap_addr")),)
        if None not in there and here != there:
            params["remote_engine_id"] = f"{engine} at {there}"
        return params

    def _canonical(self, address: Any) -> Any:
        """Return the advertised address of a bootstrap server that is given by any name of this machine."""
        url = urlsplit(address) if isinstance(address, str) else None
        if url is None or url.hostname not in (self._network.host, self._network.advertised, "localhost"):
            return address
        with suppress(ValueError):  # an invalid port
            return self._network.url(url.port or 80)
        return address

    def cached_tokens(self, loop: DrivenEngine, given: Mapping[str, Any] | None, own: int) -> int:  # noqa: ARG002
        """Return, for a decode leg, the prefill engine's number, from the parameters
        (`v1/engine/output_processor.py`).
        """
        told = None if given is None else given.get("remote_prefill_cached_tokens")
        return told if isinstance(told, int) and not isinstance(told, bool) else own

    def step(self, loop: DrivenEngine) -> None:
        """Run the pair's part at the end of a step of an engine."""
        place = _place_of(loop)
        port: PairPort = loop.engine.worker.pair
        scheduler: Any = loop.engine.inside.scheduler
        for leg in port.step(self.now_s):
            request = scheduler.parking.request_of(leg)
            if request is not None:
                request.status, request.ended_ms = "failed", loop.engine.now_ms
                loop.engine.worker.requests.remove(request)
                request.end()
                loop.lose(request, "Internal server error")
        if not scheduler.parking.is_quiet:  # its next pass uses the received blocks
            loop.rouse()
        self._rouse_others(place)
        self._set_alarm(place, port.next_s)

    def answer(self, loop: DrivenEngine, leg: Any) -> dict[str, Any] | None:
        """Return the parameters of the answer of a leg that has ended; None: it has none."""
        found = self._port_of(loop).answers.pop(leg.name, None)
        return None if found is None else dict(found)

    def _has_news(self, port: PairPort) -> bool:
        return port.has_news

    def _arrives(self, place: Place, transfer: Loading, ok: bool) -> None:
        port = self._ports[place]
        if port.loads.get(transfer.transfer.name) is not transfer:
            return  # it has already ended
        loop = self._loops[place]
        with loop.lock, suppress(Exception), loop.guarded():
            port.ended(transfer, ok=ok)
        loop.rouse()
        self._rouse_others(place)

    @property
    def notified(self) -> list[tuple[str, str, str]]:
        """The notices that a request's blocks are no longer needed: sender, receiver (engine names) and request."""

        async def look() -> list[tuple[str, str, str]]:
            return [(by, port.engine_id, name) for port in self._ports.values() for by, name in port.told]

        return self._thread.call(look())


class RoomPairs(ServedPairs):
    """The pairs of SGLang's engines, which meet in rooms."""

    way = IN_ROOMS

    def __init__(
        self, thread: LoopThread, roles: Mapping[int, Role], network: Network, model: Model, seed: int
    ) -> None:
        super().__init__(thread, roles, network, model, seed)
        self._computed: dict[int, Any] = {}  # by room, the request of the prefill engine
        for worker, role in roles.items():
            if role.pair.worker_type == "prefill":
                size = int(role.sizes.get("block_size", model.block_size))
                self.bootstraps[worker] = BootstrapPort(network, in_rooms=True, page_size=size, ranks=model.ranks)

    def _lose(self, old: SglangPort) -> None:
        old.lost()
        for loop in self._loops.values():  # so that decode engines notice the missing heartbeats
            loop.rouse()

    def _take_in(self, place: Place, port: SglangPort, name: str) -> None:
        worker, rank = place
        port.engine_id = name
        bootstrap = self.bootstraps.get(worker)
        if bootstrap is not None:
            port.address = self._network.advertised, bootstrap.port
            port.join_ranks([*(self._ports[worker, each] for each in range(rank)), port])
            bootstrap.seen = port.rooms.seen
        port.rooms.link_s = lambda _: self._delay_s
        for each in self._ports.values():
            for one, other in ((each, port), (port, each)):
                if one.prefill is not None:
                    other.peers[one.address] = one
                    one.met(other)

    def check(self, asked: Generate) -> None:
        """Reject requests without a room."""
        for given in asked.hand_overs:
            if given is None or given.get("bootstrap_room") is None:
                raise PairRefused(f"Disaggregated request received without bootstrap room id. Request id: {asked.id}")

    def shared(self, given: Mapping[str, Any]) -> Any:
        """Return the room."""
        return given.get("bootstrap_room")

    def output_of(self, loop: DrivenEngine, asked: Generate) -> int:
        """Return 1 for a prefill engine, which generates one token."""
        return 1 if self._port_of(loop).prefill is not None else asked.max_tokens

    def rank_of(self, given: Mapping[str, Any] | None) -> int | None:
        """Return the rank of the leg's room (`--load-balance-method follow_bootstrap_room`, which is set here)."""
        room = None if given is None else given.get("bootstrap_room")
        return None if room is None else int(room) % self._ranks

    def open(self, loop: DrivenEngine, request: Any, asked: Generate, position: int) -> Any:
        """Open the leg of a request."""
        given = dict(asked.hand_overs[position] or {})
        port: SglangPort = self._port_of(loop)
        if given.get("bootstrap_host") in (self._network.host, "localhost"):
            given["bootstrap_host"] = self._network.advertised
        scheduler: Any = loop.engine.inside.scheduler
        if port.prefill is not None:
            self._computed[given["bootstrap_room"]] = request
            while len(self._computed) > _MOST_ROOMS:
                del self._computed[next(iter(self._computed))]
            leg = scheduler.open_leg(request, given)
        else:
            request.next_token()  # the prefill engine generates this token
            leg = scheduler.open_leg(request, given, "ok" if self._take_fate() else "fails")
        if leg is None:
            loop.engine.worker.requests.remove(request)
            request.status = "rejected"
            raise PairRefused(f"The prompt of request {asked.id} is longer than the KV cache")
        return leg

    def cached_tokens(self, loop: DrivenEngine, given: Mapping[str, Any] | None, own: int) -> int:
        """Return, for a decode leg, the number of the prefill engine, which arrives with the KV."""
        if given is None or self._port_of(loop).prefill is not None:
            return own
        found = self._computed.get(given["bootstrap_room"])
        cached: int = own if found is None else found.cached_tokens
        return cached

    def generated(self, loop: DrivenEngine, done: ForwardPass) -> dict[Any, int]:
        """Return the requests with new tokens. A prefill engine returns its token when its leg ends; a decode engine
        returns the first token when the leg joins the batch.
        """
        prefills = self._port_of(loop).prefill is not None
        named = done.finished if prefills else dict.fromkeys((*done.admitted, *done.generated, *done.finished))
        return {each: each.generated_tokens for each in named}

    def why_lost(self, loop: DrivenEngine, request: Any) -> str:
        """Return why a leg ended with an error: the beginning of SGLang's message."""
        if self._port_of(loop).prefill is not None:
            return f"Prefill {'transfer' if request.generated_tokens else 'bootstrap'} failed for request"
        return "Decode transfer failed for request"

    def step(self, loop: DrivenEngine) -> None:
        """Run the pair's part at the end of a step of an engine."""
        port: SglangPort = loop.engine.worker.pair
        before = port.state
        port.expire(self.now_s)
        if port.state != before:
            loop.rouse()
        if not self._holds and port.rooms.at(port.now_s):
            for rank in port.ranks:  # all ranks share rooms
                for each in (rank, *rank.askers):
                    self._rouse(each)
        for each in port.take_news():
            self._rouse(each)
        moments = [port.next_s, None if self._holds else port.rooms.next_s]
        self._set_alarm(_place_of(loop), min((each for each in moments if each is not None), default=None))

    def _has_news(self, port: SglangPort) -> bool:  # noqa: ARG002 - they say it themselves
        return False

    def _arrives(self, place: Place, transfer: Any, ok: bool) -> None:
        """Do nothing: transfers of rooms use a separate link."""

    @property
    def rooms(self) -> list[tuple[int, int, int, str]]:
        """Each room that a leg named: prefill worker, rank, room, and "prefill" or "decode"."""

        async def look() -> list[tuple[int, int, int, str]]:
            firsts = [(worker, port) for (worker, rank), port in self._ports.items() if not rank]  # ranks share them
            return [(worker, *seen) for worker, port in firsts for seen in port.rooms.seen]

        return self._thread.call(look())


def _place_of(loop: DrivenEngine) -> Place:
    worker = loop.engine.worker
    return worker.worker_id, worker.dp_rank


def pairs_of(thread: LoopThread, roles: Mapping[int, Role], network: Network, model: Model, seed: int) -> ServedPairs:
    """Make the pairs of a server for its workers' kind of hand-over.

    Raises:
        ValueError: workers have different kinds of hand-over.
    """
    ways = dict.fromkeys(role.pair.hand_over for role in roles.values())
    if len(ways) > 1:
        raise ValueError(f"KvServer: all roles must hand over alike, got {', '.join(map(repr, ways))}")
    if IN_ROOMS in ways:
        return RoomPairs(thread, roles, network, model, seed)
    return VllmPairs(thread, roles, network, model, seed)
