"""An SGLang engine's port to others: its queues, its rooms, and its leases for legs that do not run.

One subject: one step of an engine of a pair, by hand or in time.

Theory of operation. P's port has the rooms, as P's bootstrap server does. D reaches them by the hand-over of a router
(`HandOver.source`), or by the host and port of a P that it met. The ranks of one P share its rooms: D asks
the rank that the room names, or the one that it is given. A step repeats the actions of the queues until nothing
changes. In time, the engine's driver chooses the batches of P (`SglangPrefill.launch`); by hand a batch has all waiting
prompts, one after the other, in chunks of the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.base.hand_over import HandOver, Lease
from pytest_kvmock.engines.sglang.pairs.sglang_decode import SglangDecode
from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, LegAnswer, PrefillLeg
from pytest_kvmock.engines.sglang.pairs.sglang_prefill import PrefillPiece, SglangPrefill
from pytest_kvmock.engines.sglang.pairs.sglang_rooms import RoomReused, SglangRooms
from pytest_kvmock.values.checks import is_integer

if TYPE_CHECKING:
    from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangRole
    from pytest_kvmock.engines.sglang.pairs.sglang_rooms import Address, Fate

HOST: Final = "10.0.0.1"
"""The host that hand-overs name."""


class SglangPort:
    """The port of one engine.

    Args:
        driver: the driver of its cache.
        role: role of the engine.
        engine_id: its name.
        rows: requests that may run or have pages at the same time.
        chunk: by hand, tokens of a prompt that one batch computes, in whole pages; None: all.

    Attributes:
        driver: as given.
        role: as given.
        engine_id: as given.
        prefill: its queues as P; None for D.
        decode: its queues as D; None for P.
        rooms: for P, the rooms that routers gave it or other ranks of its worker; empty for D.
        now_s: its time, in seconds.
        peers: ports of prefill engines, by host and port; they come with hand-overs.
        answers: its answers by leg, until they are taken.
        death: the error that ended the engine; None while it is alive.
        askers: ports of decode engines that have asked this one.
        address: host and port of its bootstrap server.
        has_clock: whether its time is that of its owner, not of its passes.
        overwritten: legs of D whose pages were free while P wrote into them.
        dp_rank: its rank in its worker.
        ranks: the ports of all ranks of its worker, in order.
    """

    has_clock = False
    dp_rank = 0

    def __init__(
        self,
        driver: Any,
        role: SglangRole,
        engine_id: str,
        rows: int = 1 << 20,
        chunk: int | None = None,
    ) -> None:
        self.driver, self.role, self.engine_id = driver, role, engine_id
        self._chunk = chunk
        manager = driver.manager
        is_prefill = role.worker_type == "prefill"
        options = role.options
        self.prefill = SglangPrefill(manager, rows=rows, options=options) if is_prefill else None
        self.decode = None if is_prefill else SglangDecode(manager, places=rows, options=options)
        self.rooms = SglangRooms()
        self.address: Address = HOST, options.disaggregation_bootstrap_port
        self.now_s = 0.0
        self.peers: dict[Address, SglangPort] = {}
        self.answers: dict[str, LegAnswer] = {}
        self._numbers = count()
        self._names: dict[str, PrefillLeg | DecodeLeg] = {}
        self._port_of: dict[DecodeLeg, SglangPort] = {}
        self.askers: list[SglangPort] = []
        self.death: RoomReused | None = None
        self._news: dict[SglangPort, None] = {}
        self.overwritten: list[str] = []
        self.ranks: Sequence[SglangPort] = (self,)
        if self.prefill is not None:
            self.rooms.add(self.address, (self.prefill,))
        driver.pair = self
        driver.traits = replace(driver.traits, names_received=role.names_received)

    @staticmethod
    def join_ranks(ports: Sequence[SglangPort]) -> None:
        """Let ports be the ranks of one worker, in their order; those of a P share one bootstrap server.

        A port that replaces another one after a restart gets the rooms that the other ranks share.
        """
        joined = next((port for port in ports if len(port.ranks) > 1), ports[0])
        rooms, address = joined.rooms, joined.address
        for rank, port in enumerate(ports):
            port.dp_rank, port.ranks, port.rooms, port.address = rank, tuple(ports), rooms, address
        sides = [port.prefill for port in ports if port.prefill is not None]
        if sides:
            rooms.add(address, sides)

    def time_of(self, now_ms: float) -> float:
        """Return the engine's time in seconds at a pass."""
        return self.now_s if self.has_clock else now_ms / 1000

    # ---------------------------------------------------------------------------- legs

    def new_hand_over(self) -> HandOver:
        """Return the fields that a router gives both legs: the address of this prefill engine, and a new room.

        The room modulo the number of ranks is this rank, as with Dynamo's router: D looks for the room there.
        """
        host, port = self.address
        room = next(self._numbers) * len(self.ranks) + self.dp_rank
        fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        return HandOver(fields, "sglang", self)

    def hand_over_of(self, fields: Mapping[str, Any]) -> HandOver:
        """Return parameters as a hand-over of this engine."""
        return HandOver(fields, "sglang", self)

    def _name(self) -> str:
        """Make a name that is no prefix of another, because an abort matches prefixes (`Scheduler.abort_request`)."""
        return f"{next(self._numbers)}-{self.engine_id}"

    def ask_prefill(self, state: Any, hand_over: Mapping[str, Any]) -> PrefillLeg | None:
        """Give a prefill engine its leg; None if its prompt is longer than the pool."""
        assert self.prefill is not None
        leg = PrefillLeg(self._name(), _room_of(hand_over, "serve"), state, self.now_s)
        if not self.prefill.ask(leg):
            self.prefill.take_answers()
            return None
        try:
            self.rooms.prefill(leg, self.address, self.dp_rank)
        except RoomReused as death:
            self.death = death
            raise
        self._names[leg.name] = leg
        return leg

    @staticmethod
    def check_leg(hand_over: Mapping[str, Any], where: str) -> None:
        """Check the fields of a decode leg.

        Raises:
            ValueError: the room is missing, or `disagg_prefill_dp_rank` is invalid.
        """
        _room_of(hand_over, where)
        rank = hand_over.get("disagg_prefill_dp_rank")
        if rank is not None and not is_integer(rank, 0):
            raise ValueError(
                f"{where}: disagg_prefill_dp_rank must be an integer of at least 0, or None, got {rank!r:.80}"
            )

    def ask_decode(
        self, state: Any, hand_over: Mapping[str, Any], max_new_tokens: int, fate: Fate = "ok"
    ) -> DecodeLeg | None:
        """Give a decode engine its leg; None if its prompt is longer than the pool."""
        assert self.decode is not None
        self.check_leg(hand_over, "load")
        told: int | None = hand_over.get("disagg_prefill_dp_rank")
        leg = DecodeLeg(self._name(), hand_over["bootstrap_room"], state, max_new_tokens, self.now_s)
        if not self.decode.ask(leg):
            self.decode.take_answers()
            return None
        own = self.role.options.disaggregation_bootstrap_port
        port = hand_over.get("bootstrap_port")
        address = hand_over.get("bootstrap_host") or "", own if port is None else port
        self._names[leg.name] = leg
        source = hand_over.source if isinstance(hand_over, HandOver) else None
        if isinstance(source, SglangPort):
            self.peers[source.address] = source
        peer = self.peers.get(address)
        if peer is None:  # no bootstrap server has this address
            leg.fail()
            return leg
        rank = peer.rooms.rank_of(address, leg.room, told)
        if 0 <= rank < len(peer.ranks):  # else its leg fails at once
            peer = peer.ranks[rank]
        self._port_of[leg] = peer
        peer.met(self)
        try:
            peer.rooms.decode(leg, address, rank, fate)
        except RoomReused as death:
            self.death = death
            raise
        return leg

    def met(self, asker: SglangPort) -> None:
        """Note that a decode engine uses this prefill engine."""
        if asker not in self.askers:
            self.askers.append(asker)

    def peer_of(self, leg: DecodeLeg) -> SglangPort | None:
        """Return the prefill engine of a decode leg; None if there is none at its address."""
        return self._port_of.get(leg)

    @property
    def legs(self) -> list[PrefillLeg] | list[DecodeLeg]:
        """The legs that are open."""
        return self.prefill.legs if self.prefill is not None else self._decode.legs

    @property
    def _decode(self) -> SglangDecode:
        assert self.decode is not None
        return self.decode

    # ---------------------------------------------------------------------------- steps

    def settle(self) -> None:
        """Repeat `act` of this engine and its paired engines until nothing changes."""
        family = [self, *self.peers.values(), *self.askers]
        family = list(dict.fromkeys(family))
        before: Any = None
        while (now := [port.state for port in family]) != before:
            before = now
            for port in family:
                port.act()

    @property
    def state(self) -> Any:
        """The part of its queues that `act` may change; equal before and after a call that changed nothing."""
        queues: tuple[Any, ...]
        if self.prefill is not None:
            p = self.prefill
            queues = p.boot, p.waiting, p.inflight, [p.chunked] if p.chunked else ()
        else:
            d = self._decode
            queues = d.queue, d.moving, d.arrived, d.running, d.retracted
        return [[(leg.name, leg.polled, leg.request.computed) for leg in queue] for queue in queues]

    def act(self) -> None:
        """Run the queues once, and pass on the results."""
        if self.prefill is not None:
            self.prefill.begin_turn()
            self.prefill.launch(self._batch(self.prefill))
            self.end_turn()
        else:
            self.look()
            self._decode.join()
            self.take_answers()

    def end_turn(self) -> None:
        """End a turn of P, put its pages on the link, and report computed prompts to D."""
        assert self.prefill is not None
        self.prefill.end_turn()
        self.rooms.sent(self.prefill.take_sent(), self.now_s)
        if self.prefill.computes_first:
            self.rooms.computed(self.prefill.inflight)
            self._news |= dict.fromkeys(self.askers)
        self.take_answers()

    def look(self) -> None:
        """Run D's reservations, report them to P, and check for arrivals."""
        self.expire(self.now_s)
        for leg in self._decode.reserve():
            peer = self._port_of[leg]
            peer.rooms.reserved((leg,))
            self._news[peer] = None
        self._decode.poll()
        self.take_answers()

    def take_answers(self) -> None:
        """Note the answers, and the engines that they affect."""
        side = self._decode if self.prefill is None else self.prefill
        for answer in side.take_answers():
            leg = self._names.pop(answer.name)
            self.answers[answer.name] = answer
            if isinstance(leg, DecodeLeg):
                peer = self._port_of.get(leg)
                if peer is not None and leg not in self._decode.kept:
                    if leg.may_be_written and not leg.request.allocated and peer.rooms.is_written(leg):
                        self.overwritten.append(leg.name)
                    peer.rooms.ended(leg, is_well=answer.finish == "length")
            else:
                self.rooms.ended(leg, is_well=answer.finish == "length")
                if answer.finish != "length":
                    self._news |= dict.fromkeys(self.askers)

    def _batch(self, side: SglangPrefill) -> list[PrefillPiece]:
        """Make a batch of the waiting legs, as far as there are rows and pages; only the last piece may be a chunk."""
        manager = self.driver.manager
        batch: list[PrefillPiece] = []
        rows, pages = side.free_rows, 0
        for leg in side.candidates():
            request = leg.request
            is_new = request not in manager.requests
            if is_new:
                if rows <= 0:
                    break
                manager.find(request)
                manager.admit(request)
            upto = leg.prompt_tokens
            chunk = self._chunk
            if chunk is not None and upto - request.computed > chunk:
                size = manager.block_size
                upto = request.computed + max(chunk // size, 1) * size
            if manager.lacking(request, upto, pages):
                if is_new:
                    manager.withdraw(request)
                break
            pages += manager.pages_of(upto) - request.allocated
            rows -= is_new
            batch.append(PrefillPiece(leg, request.computed, upto))
            if upto < leg.prompt_tokens:
                break
        return batch

    def expire(self, now_s: float) -> None:
        """Advance the time: legs that waited too long fail, and kept pages are freed."""
        self.now_s = max(self.now_s, now_s)
        if self.prefill is not None:
            self.prefill.expire(self.now_s)
            return
        kept = [*self._decode.kept]
        for late in self._decode.expire(self.now_s):
            if late in self._port_of:
                peer = self._port_of[late]
                peer.rooms.give_up(late)
                self._news[peer] = None
        for leg in kept:
            if leg not in self._decode.kept and leg in self._port_of:
                self._port_of[leg].rooms.ended(leg, is_well=False)

    @property
    def next_s(self) -> float | None:
        """Time at which its next wait ends; None if there is none."""
        return self._decode.expires_s if self.prefill is None else self.prefill.expires_s

    def take_news(self) -> list[SglangPort]:
        """Return the ports of engines that events since the last call affect."""
        news, self._news = [*self._news], {}
        return news

    def forget(self, name: str) -> None:
        """Forget a leg as the engine closes; the caller frees its pages."""
        leg = self._names.pop(name, None)
        if isinstance(leg, PrefillLeg) and self.prefill is not None:
            self.prefill.forget(leg)
            self.rooms.ended(leg, is_well=False)
        elif isinstance(leg, DecodeLeg):
            self._decode.forget(leg)
            peer = self._port_of.get(leg)
            if peer is not None:
                peer.rooms.ended(leg, is_well=False)

    # ---------------------------------------------------------------------------- engines are lost

    def lost(self) -> list[SglangPort]:
        """Mark the engine as gone; return the ports of engines that notice it.

        Legs at D that wait for this P fail at once here; SGLang's D first misses two heartbeats (10 s).
        """
        if self.prefill is not None:
            self.rooms.lose(self.address)
            return self.askers
        peers = [self._port_of[leg] for leg in self._decode.legs if leg in self._port_of]
        for leg in [*self._decode.legs, *self._decode.kept]:
            peer = self._port_of.get(leg)
            if peer is not None:
                peer.rooms.give_up(leg)
                peer.rooms.ended(leg, is_well=False)
        return [*dict.fromkeys(peers)]

    def forget_peer(self, port: SglangPort) -> None:
        """Forget a paired engine that is gone."""
        if port in self.askers:
            self.askers.remove(port)
        for address in [address for address, peer in self.peers.items() if peer is port]:
            del self.peers[address]

    # ---------------------------------------------------------------------------- queries

    @property
    def leased(self) -> tuple[Lease, ...]:
        """Its leases for legs that do not run, in order of arrival."""
        return tuple(self._leases())

    def _leases(self) -> Iterator[Lease]:
        if self.prefill is not None:
            until = self.role.options.bootstrap_timeout
            for sending in self.prefill.inflight:
                waits = sending.polled == "handshake"
                ends = (sending.asked_s + until) * 1000 if waits else None
                yield Lease(sending.name, "kept", sending.request.allocated, ends)
            return
        side, until = self._decode, self.role.options.waiting_timeout
        for leg in side.moving:
            yield Lease(leg.name, "loading", leg.request.allocated, (leg.asked_s + until) * 1000)
        for leg in side.arrived:
            yield Lease(leg.name, "received", leg.request.allocated, None)
        for leg, until_s in side.kept.items():
            if leg not in side.moving:
                yield Lease(leg.name, "kept", leg.request.allocated, until_s * 1000)


def _room_of(hand_over: Mapping[str, Any], where: str) -> int:
    """Return the room of a leg.

    Raises:
        ValueError: the room is missing; SGLang's scheduler answers 400.
    """
    room = hand_over.get("bootstrap_room")
    if not is_integer(room, 0):
        raise ValueError(
            f"{where}: request without bootstrap room: bootstrap_room must be an integer of at least 0, "
            f"got {room!r:.80} (SGLang answers 400)"
        )
    return room
