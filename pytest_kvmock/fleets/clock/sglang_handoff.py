"""Handoffs of SGLang's P/D pairs on a clock: both legs at once, in a room.

One subject: when the engines of pairs notice each other's steps.

Theory of operation. A request is sent at once to the next prefill engine and the next decode engine in turn, with one
room. Other engines notice the results of a pass when their next pass starts; the end of the pass touches each engine
that has something to notice. The ends of transfers and waits are moments of the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.clock.pair_handoff import PairHandoffs

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.engines.sglang.pairs.sglang_port import SglangPort
    from pytest_kvmock.engines.sglang.pairs.sglang_rooms import Fate
    from pytest_kvmock.fleets.clock.arrivals import Turn
    from pytest_kvmock.fleets.clock.handoff import Handoff
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine

_FATES: Final[dict[str | None, Fate]] = {
    "fails": "fails",
    "never": "never",
    "handshake": "handshake",
}
"""The fate of a room by fault of the link; other faults do not change it."""


class SglangHandoffs(PairHandoffs["SglangPort"]):
    """Handoffs as SGLang's pairs make them; arguments as of `PairHandoffs`.

    The link fault "used again" sends the next request in the room of this one; "stale" does nothing, because there are
    no leases.
    """

    at_once = True

    def _prepare(self) -> None:
        self._reused: Any = None
        for source in self._sources:
            source.worker.pair.rooms.link_s = self._link_of(source)

    def _take(self, engine: MockEngine) -> None:
        port: SglangPort = engine.worker.pair
        self._engine_of[port] = engine
        if engine in self._sources:
            port.rooms.link_s = self._link_of(engine)

    def _link_of(self, source: MockEngine) -> Callable[[int], float]:
        def link_s(tokens: int) -> float:
            duration = self._link.duration_ms(tokens, source.args.handoff_ms(tokens))
            self.link_ms += duration
            return duration / 1000

        return link_s

    @property
    def next_ms(self) -> float:
        """The time at which the next transfer or wait ends; infinite if there is none."""
        moments = [port.next_s for port in self._engine_of]
        moments += [source.worker.pair.rooms.next_s for source in self._sources]
        return min((each * 1000 for each in moments if each is not None), default=math.inf)

    @property
    def in_transfer(self) -> bool:
        """Whether anything is due."""
        return self.next_ms < math.inf

    def begin(self, turn: Turn, arrival_ms: float, now_ms: float) -> None:
        """Send both legs of a request that arrives."""
        handoff, source = self.new(turn, arrival_ms), next(self._next_source)
        hand_over, self._reused = self._reused or source.worker.pair.new_hand_over(), None
        if self._link.faults.get(handoff.order) == "used again":
            self._reused = hand_over
        self.prefill(handoff, source, hand_over, now_ms)
        self.send(handoff, hand_over, now_ms)

    def prefill(self, handoff: Handoff, source: MockEngine, hand_over: Mapping[str, Any], now_ms: float) -> None:
        """Send a prefill leg; if it is refused at once, it is "rejected"."""
        for each in self._engine_of:
            each.expire(now_ms / 1000)
        _, prefilled = self._dispatch(handoff, source)
        scheduler: Any = source.inside.scheduler
        if scheduler.open_leg(prefilled, hand_over) is None:
            self._ended(source, prefilled, "rejected", now_ms)
        self._passes.touch(source, now_ms)

    def send(self, handoff: Handoff, hand_over: Mapping[str, Any], now_ms: float) -> None:
        """Send a decode leg; if it is refused at once, it is "rejected"."""
        assert handoff.source is not None
        port: SglangPort = handoff.source.worker.pair
        fault = self._link.faults.get(handoff.order)
        request = self._expect(handoff)
        destination = handoff.destination
        at_destination: Any = destination.inside.scheduler
        at_destination.submit(request)
        late_s = self._link.late_ms / 1000 if fault == "late" else 0.0
        leg = handoff.leg = at_destination.open_leg(request, hand_over, _FATES.get(fault, "ok"))
        if leg is None:
            self._ended(destination, request, "rejected", now_ms)
            request.end()
            self._finished(request)
        elif late_s:
            port.rooms.delay(leg, late_s)
        self._passes.touch(destination, now_ms)

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        """Note the end of a pass, and touch the engines that have something to notice."""
        port: SglangPort = engine.worker.pair
        for peer in port.take_news():
            other = self._engine_of.get(peer)
            if other is not None:
                self._passes.touch(other, now_ms)
        if done is None or engine not in self._sources:
            return
        for handoff, _ in self._held(done, now_ms):
            handoff.released_ms = now_ms
            if handoff.request is not None:
                handoff.take_over()
        for ended in done.aborted:
            self._of.pop(ended, None)

    def at(self, now_ms: float) -> None:
        """End the transfers and waits that are due, and touch their engines."""
        now_s = now_ms / 1000
        while self.next_ms <= now_ms:
            for port, engine in self._engine_of.items():
                due = port.next_s
                if due is not None and due * 1000 <= now_ms:
                    port.expire(max(due, now_s))
                    self._passes.touch(engine, now_ms)
                due = port.rooms.next_s
                if due is not None and due * 1000 <= now_ms and port.rooms.at(max(due, now_s)):
                    for each in (port for rank in port.ranks for port in (rank, *rank.askers)):
                        if each in self._engine_of:  # otherwise it left before this run
                            self._passes.touch(self._engine_of[each], now_ms)

    def add(self, engine: MockEngine) -> None:
        """Add an engine."""
        if engine.args.worker_type == "prefill":
            self._sources |= {engine}
        self._take(engine)

    def lost(self, engine: MockEngine, port: SglangPort, now_ms: float) -> None:
        """Note that an engine was emptied and has a new port instead of this one. D notices a lost P by heartbeats, and
        its rooms fail; P notices a lost D only by failed transfers.
        """
        del self._engine_of[port]
        touched = [self._engine_of[each] for each in port.lost() if each in self._engine_of]
        for other in self._engine_of:
            other.forget_peer(port)
        self._take(engine)
        for each in touched:
            self._passes.touch(each, now_ms)
