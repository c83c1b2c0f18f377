"""Rooms: the messages between the two engines of an SGLang pair.

One subject: the messages between P and D, on a clock in seconds that the owner moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, PrefillLeg, SentPages
from pytest_kvmock.engines.sglang.pairs.sglang_prefill import SglangPrefill
from pytest_kvmock.values.checks import KvMockError

# Theory of operation
#
# In the handshake D asks P's bootstrap server for its ranks; P need not have the room yet. D announces its pages to P
# with the room; the later of P's leg and this message makes P's leg ready. P's pages travel one after the other, and
# P's token travels with the last. If P's leg ends without success, D is notified. If D's leg ends without success, P is
# not notified: it waits for its timeout, or writes into pages that D keeps for a while. A transfer that D gives up as
# too late is over for both.
#
# A room is at one rank of P: room % ranks, unless D was given another rank. At a wrong rank P's leg never comes.

Fate: TypeAlias = Literal["ok", "fails", "never", "handshake"]
"""What happens to a room. In order: it succeeds; the transfer fails at its end; the transfer never ends; the handshake
fails.
"""

Reused: TypeAlias = Literal["fails", "dies"]
"""What a second live leg of a room does: it fails, or it ends the scheduler process."""


class RoomReused(KvMockError, RuntimeError):  # noqa: N818 - what happened
    """A room was given to a second leg while the first was live, which ended the engine."""


class SglangRoom:
    """One room at one rank of P.

    Attributes:
        number: the number that the router chose.
        fate: what happens to it.
        prefill: P's live leg; None before it comes and after it ends.
        decode: D's live leg; None before it comes and after it ends.
        prefix: leading tokens of the prompt that D had cached when it got pages; None before.
        free_s: time at which all pages sent so far have arrived.
        is_moving: whether the last part is on its way.
        late_s: additional seconds of its last part.
    """

    __slots__ = ("decode", "fate", "free_s", "is_moving", "late_s", "number", "prefill", "prefix")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fate: Fate = "ok"
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        self.prefix: int | None = None
        self.free_s = 0.0
        self.is_moving = False
        self.late_s = 0.0


Address: TypeAlias = tuple[str, int]
"""Host and port of a bootstrap server."""


class SglangRooms:
    """The rooms of a set of engines, and the transfers between these.

    Args:
        link_s: returns the seconds that n tokens take over P's link.
        reused: what a second live leg of a room does.

    Attributes:
        link_s, reused: as given.
        seen: rank of P, room, and "prefill" or "decode" of every leg that came, in order.
    """

    def __init__(self, link_s: Callable[[int], float] | None = None, *, reused: Reused = "fails") -> None:
        self.link_s = link_s or _at_once
        self.reused = reused
        self._ranks: dict[Address, Sequence[SglangPrefill]] = {}
        self._lost: set[Address] = set()
        self._rooms: dict[tuple[Address, int, int], SglangRoom] = {}
        self._of: dict[PrefillLeg | DecodeLeg, SglangRoom] = {}
        self._due: list[tuple[float, int, SglangRoom]] = []
        self._count = 0
        self.seen: list[tuple[int, int, str]] = []

    def add(self, address: Address, ranks: Sequence[SglangPrefill]) -> None:
        """Start the bootstrap server of a P, at which D finds its ranks."""
        self._ranks[address] = ranks
        self._lost.discard(address)

    def rank_of(self, address: Address, number: int, rank: int | None = None) -> int:
        """Return the rank of a P at which D looks for a room: the given rank, or else the room's."""
        return number % max(len(self._ranks.get(address, ())), 1) if rank is None else rank

    def lose(self, address: Address) -> None:
        """Stop the bootstrap server of a P: D's heartbeats miss it, and all its rooms at D fail."""
        self._lost.add(address)
        for (where, _, _), room in self._rooms.items():
            if where == address and room.decode is not None:
                room.decode.fail()

    def room_of(self, leg: PrefillLeg | DecodeLeg) -> SglangRoom | None:
        """Return the room of a live leg."""
        return self._of.get(leg)

    def _room(self, address: Address, rank: int, number: int) -> SglangRoom:
        key = address, rank, number
        room = self._rooms.get(key)
        if room is None:
            room = self._rooms[key] = SglangRoom(number)
        return room

    # ---------------------------------------------------------------------------- legs come

    def prefill(self, leg: PrefillLeg, address: Address, rank: int = 0) -> None:
        """Note that a leg came to a rank of P.

        Raises:
            RoomReused: its room has a live leg there, and `reused` is "dies".
        """
        self.seen.append((rank, leg.room, "prefill"))
        room = self._room(address, rank, leg.room)
        if room.prefill is not None:
            self._reuse(leg, room)
            return
        room.prefill = leg
        self._of[leg] = room
        if room.fate == "handshake":
            leg.fail()
        elif room.prefix is not None:
            leg.shake(room.prefix)

    def decode(self, leg: DecodeLeg, address: Address, rank: int | None = None, fate: Fate = "ok") -> None:
        """Note that a leg came to D.

        Args:
            leg: the leg.
            address: address of P's bootstrap server.
            rank: rank of P; None: the rank of its room.
            fate: what happens to the transfer.

        Raises:
            RoomReused: its room has a live leg, and `reused` is "dies".
        """
        ranks = self._ranks.get(address, ())
        at = self.rank_of(address, leg.room, rank)
        self.seen.append((at, leg.room, "decode"))
        room = self._room(address, at, leg.room)
        if room.decode is not None:
            self._reuse(leg, room)
            return
        room.decode, room.fate = leg, fate
        self._of[leg] = room
        if not 0 <= at < len(ranks) or address in self._lost or fate == "handshake":
            leg.fail()
            if fate == "handshake" and room.prefill is not None:
                room.prefill.fail()
        elif not ranks[0].computes_first or (room.prefill is not None and room.prefill.is_computed):
            leg.shake()

    def delay(self, leg: PrefillLeg | DecodeLeg, late_s: float) -> None:
        """Make the last part of a room `late_s` seconds late."""
        room = self._of.get(leg)
        if room is not None:
            room.late_s = late_s

    def _reuse(self, leg: PrefillLeg | DecodeLeg, room: SglangRoom) -> None:
        if self.reused == "dies":
            raise RoomReused(f"room {room.number} was given to {leg.name} while another leg has it: the scheduler died")
        leg.fail()

    # ---------------------------------------------------------------------------- what legs do

    def reserved(self, legs: Iterable[DecodeLeg]) -> None:
        """Notify P that D has pages for legs."""
        for leg in legs:
            room = self._of[leg]
            room.prefix = leg.hit_tokens
            if room.prefill is not None:
                room.prefill.shake(room.prefix)

    def computed(self, legs: Iterable[PrefillLeg]) -> None:
        """Let D give pages for prompts that P has computed, if it waits for that."""
        for leg in legs:
            room = self._of.get(leg)
            if room is not None and leg.is_computed and room.decode is not None:
                room.decode.shake()

    def sent(self, pages: Iterable[SentPages], now_s: float) -> None:
        """Put pages on the link, one part after the other."""
        for each in pages:
            room = self._of[each.leg]
            room.free_s = max(room.free_s, now_s) + self.link_s(each.tokens)
            if each.is_last:
                room.is_moving = True
                if room.fate != "never":
                    self._count += 1
                    heappush(self._due, (room.free_s + room.late_s, self._count, room))

    def ended(self, leg: PrefillLeg | DecodeLeg, *, is_well: bool) -> None:
        """Note the end of a leg; D is notified if P's leg ended without success."""
        room = self._of.pop(leg, None)
        if room is None:
            return
        if leg is room.prefill:
            room.prefill = None
            if not is_well and room.decode is not None:
                room.decode.fail()
        else:
            room.decode = None
        if room.prefill is None and room.decode is None:
            self._rooms = {key: each for key, each in self._rooms.items() if each is not room}

    def is_written(self, leg: DecodeLeg) -> bool:
        """Return whether P may write into the pages of a leg: P's leg is live, and was notified of these pages."""
        room = self._of.get(leg)
        return room is not None and room.prefill is not None and room.prefill.polled == "ready"

    def give_up(self, leg: DecodeLeg) -> None:
        """Note that D no longer waits for data; P is notified if it is sending, as its sender waits for D."""
        room = self._of.get(leg)
        if room is not None and room.is_moving and room.prefill is not None:
            room.is_moving = False
            room.prefill.fail()

    # ---------------------------------------------------------------------------- time

    @property
    def next_s(self) -> float | None:
        """Time at which the next transfer ends; None if none is under way."""
        return self._due[0][0] if self._due else None

    def at(self, now_s: float) -> list[SglangRoom]:
        """End the due transfers; return their rooms."""
        ended: list[SglangRoom] = []
        while self._due and self._due[0][0] <= now_s:
            room = heappop(self._due)[2]
            self.end(room, is_well=room.fate == "ok")
            ended.append(room)
        return ended

    def end(self, room: SglangRoom, *, is_well: bool) -> None:
        """End the transfer of a room, with or without success."""
        if not room.is_moving:
            return
        room.is_moving = False
        self._due = [each for each in self._due if each[2] is not room]
        prefill, decode = room.prefill, room.decode
        if prefill is None:
            return
        if not is_well:
            prefill.fail()
            if decode is not None:
                decode.fail()
            return
        prefill.arrive()
        if decode is not None:
            decode.arrive(0 if prefill.token is None else prefill.token, prefill.room)


def _at_once(tokens: int) -> float:  # noqa: ARG001 - whatever it is
    return 0.0
