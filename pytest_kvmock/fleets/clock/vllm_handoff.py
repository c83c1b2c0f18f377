"""Handoffs of vLLM's P/D pairs on a clock: legs, transfers, heartbeats and lease ends.

One subject: handoffs between engines that follow the rules of `pairs`.

Theory of operation. A request begins as a prefill leg of one token. With NixlConnector its answer has parameters, with
which the decode leg is sent to the next decode engine in turn; with MooncakeConnector both legs are sent at once. The
scheduler of the decode engine admits the leg, and the transfer begins at the end of that pass. Ends of transfers, ends
of leases and due heartbeats are moments of the clock. An engine notices them at the end of its pass; without a pass it
notices them at once, in a step that computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, cast

from pytest_kvmock.fleets.clock.pair_handoff import PairHandoffs

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.engines.vllm.pairs.legs import Leg
    from pytest_kvmock.engines.vllm.pairs.pair_time import PairParking
    from pytest_kvmock.engines.vllm.pairs.port import Loading, PairPort
    from pytest_kvmock.fleets.clock.arrivals import Turn
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.handoff import Handoff
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine


class VllmHandoffs(PairHandoffs["PairPort"]):
    """Handoffs of vLLM's connectors; arguments as of `PairHandoffs`."""

    def _prepare(self) -> None:
        self.at_once = not next(iter(self._engine_of)).role.reads
        self._legs: dict[EngineRequest, Leg] = {}
        self._handoff_of: dict[str, Handoff] = {}  # by the leg: (time, order, action, engine, request)
        self._due: list[tuple[float, int, Literal["arrives", "wakes", "sent"], PairPort, Any]] = []
        self._wakes: dict[PairPort, float] = {}
        self._taken: set[str] = set()
        self._now_ms = 0.0
        for port, engine in self._engine_of.items():
            self._name(port, engine)
            port.on_begin = self._begins

    def _name(self, port: PairPort, engine: MockEngine) -> None:
        """Give a port a name that no other port has or had, unless an earlier run named it."""
        known = (name for each in self._engine_of for name in (each.engine_id, *each.peers))
        self._taken.update(name.partition("_dp")[0] for name in known)  # also names of lost ports
        if not port.is_named:
            names = (f"{engine.args.worker_type}-{at}" for at in count())
            name = next(name for name in names if name not in self._taken)
            self._taken.add(name)
            port.rename(name)

    @property
    def next_ms(self) -> float:
        """The time at which the next transfer, lease or heartbeat is due; infinite if there is none."""
        return self._due[0][0] if self._due else math.inf

    @property
    def in_transfer(self) -> bool:
        """Whether anything is due."""
        return bool(self._due)

    def _plan(
        self, when_ms: float, what: Literal["arrives", "wakes", "sent"], port: PairPort, which: object = None
    ) -> None:
        self._sequence += 1
        heappush(self._due, (when_ms, self._sequence, what, port, which))

    # ------------------------------------------------------------------------------------------------------------ legs

    def begin(self, turn: Turn, arrival_ms: float, now_ms: float) -> None:
        """Send the prefill leg of a request that arrives, and with Mooncake also the decode leg."""
        handoff, source = self.new(turn, arrival_ms), next(self._next_source)
        given = source.worker.pair.new_hand_over() if self.at_once else None
        self.prefill(handoff, source, given, now_ms)
        if given is not None:
            self.send(handoff, given, now_ms)

    def prefill(self, handoff: Handoff, source: MockEngine, given: Mapping[str, Any] | None, now_ms: float) -> None:
        """Send a prefill leg; `given` are the parameters of both legs if these are sent at once."""
        _, request = self._dispatch(handoff, source)
        port = source.worker.pair
        leg = self._legs[request] = port.open(request.state, port.prefill_leg(given), request.prompt_tokens)
        self._handoff_of[leg.name] = handoff
        self._passes.touch(source, now_ms)
        self._set_alarm(port)

    def send(self, handoff: Handoff, hand_over: Mapping[str, Any] | None, now_ms: float) -> None:
        """Send a decode leg: now, or, with the fault "stale", when the lease of its blocks is over.

        `hand_over` None: an ordinary request, without parameters.
        """
        source = handoff.source
        assert source is not None
        if self._link.faults.get(handoff.order) == "stale" and not self.at_once and hand_over:
            until = source.worker.pair.lease_until_s(hand_over["remote_request_id"])
            self._plan((until or now_ms / 1000) * 1000 + 1, "sent", source.worker.pair, (handoff, hand_over))
            return
        self._decode(handoff, hand_over, now_ms)

    def _decode(self, handoff: Handoff, hand_over: Mapping[str, Any] | None, now_ms: float) -> None:
        request = self._expect(handoff)
        self._take_decode_leg(handoff, request, hand_over, now_ms)
        if not self.at_once:
            handoff.take_over()
        if self._link.faults.get(handoff.order) == "used again":
            again = handoff.destination.inside.expect(
                handoff.turn.prompt, handoff.turn.trace.output_length, handoff.arrival_ms
            )
            self._take_decode_leg(handoff, again, hand_over, now_ms)

    def _take_decode_leg(
        self, handoff: Handoff, request: EngineRequest, hand_over: Mapping[str, Any] | None, now_ms: float
    ) -> None:
        engine = handoff.destination
        if hand_over is not None:
            leg = engine.worker.pair.open(request.state, hand_over, request.prompt_tokens)
            self._handoff_of[leg.name] = handoff
            if handoff.request is request:
                handoff.leg = leg
        engine.inside.scheduler.submit(request)
        self._passes.touch(engine, now_ms)
        self._set_alarm(engine.worker.pair)

    def give_back(self, handoff: Handoff) -> None:
        """Call off the decode leg of a request that its source rejected (Mooncake)."""
        request, engine = handoff.request, handoff.destination
        assert request is not None
        if request.is_open:
            engine.inside.scheduler.abort(request)
            engine.worker.requests.remove(request)

    # ------------------------------------------------------------------------------------------------------- transfers

    def _begins(self, port: PairPort, loading: Loading) -> None:
        """Plan the end of a transfer that begins, in a step of its destination or its source."""
        handoff = self._handoff_of[loading.transfer.name]
        source = handoff.source
        assert source is not None
        fault = self._link.faults.get(handoff.order)
        if fault == "never":
            return
        if fault == "handshake":
            port.ended(loading, ok=False)
            return
        tokens = sum(map(len, loading.transfer.local)) * source.args.block_size
        duration = self._link.duration_ms(tokens, source.args.handoff_ms(tokens))
        if fault == "late":
            duration += self._link.late_ms
        self.link_ms += duration
        self._plan(self._now_ms + duration, "arrives", port, (loading, fault != "fails"))

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        """Note the end of a pass; None: of passes that were made in one go."""
        self._step(engine, now_ms)
        if done is None or engine not in self._sources:
            return
        for handoff, request in self._held(done, now_ms):
            answer = engine.worker.pair.answers.pop(self._legs.pop(request).name, None)
            if answer is not None and self.on_answer is None:
                self.send(handoff, answer, now_ms)
                continue
            if self.on_answer is not None:
                self.on_answer(handoff, answer)
            if handoff.request is not None:
                handoff.take_over()

    def _step(self, engine: MockEngine, now_ms: float) -> None:
        """End a step of an engine."""
        self._now_ms = now_ms
        port = engine.worker.pair
        if self._wakes.get(port, math.inf) <= now_ms:
            del self._wakes[port]
        elif not port.has_news:
            return
        now_s, due = now_ms / 1000, port.next_s
        if due is not None and abs(due - now_s) < 1e-9:  # the same moment, in another unit
            now_s = max(now_s, due)
        for leg in port.step(now_s):
            self._failed(engine, leg, now_ms)
        self._set_alarm(port)

    def _failed(self, engine: MockEngine, leg: Leg, now_ms: float) -> None:
        parking: PairParking = cast("Any", engine.inside.scheduler).parking
        request = cast("EngineRequest", parking.request_of(leg))
        self._ended(engine, request, "failed", now_ms)
        request.end()
        if self._handoff_of[leg.name].request is request:
            self._finished(request)

    def _set_alarm(self, port: PairPort) -> None:
        """Plan a step of an engine for its next lease end, wait end or heartbeat."""
        due = port.next_s
        if due is None:
            return
        due_ms = max(due * 1000, self._now_ms)
        if due_ms < self._wakes.get(port, math.inf):
            self._wakes[port] = due_ms
            self._plan(due_ms, "wakes", port)

    def at(self, now_ms: float) -> None:
        """Perform the actions that are due."""
        self._now_ms = now_ms
        while self._due and self._due[0][0] <= now_ms:
            when, _, what, port, which = heappop(self._due)
            if what == "sent":
                handoff, hand_over = which
                self._decode(handoff, hand_over, now_ms)
                continue
            if what == "arrives":
                loading, ok = which
                port.ended(loading, ok=ok)
                if loading.peer is not None:
                    self._wake(loading.peer, now_ms)
            elif self._wakes.get(port) != when:
                continue  # it was rescheduled
            self._wake(port, now_ms)

    def _wake(self, port: PairPort, now_ms: float) -> None:
        """Let an engine notice something at the end of its pass, or now if it runs none."""
        engine = self._engine_of[port]
        if not self._passes.is_busy(engine, now_ms):
            self._step(engine, now_ms)
            self._passes.touch(engine, now_ms)

    def handoff_of(self, name: str) -> Handoff:
        """Return the handoff of a leg."""
        return self._handoff_of[name]

    def unsend(self, handoff: Handoff) -> None:
        """Cancel a decode leg that is delayed by the fault "stale"."""
        self._due = [each for each in self._due if not (each[2] == "sent" and each[4][0] is handoff)]
        heapify(self._due)

    # ---------------------------------------------------------------------------------------------- engines come and go

    def add(self, engine: MockEngine) -> None:
        """Add an engine."""
        if engine.args.worker_type == "prefill":
            self._sources |= {engine}
        port = engine.worker.pair
        self._engine_of[port] = engine
        self._name(port, engine)
        port.on_begin = self._begins

    def lost(self, engine: MockEngine, port: PairPort, now_ms: float) -> None:
        """Note that an engine was emptied and has a new port: reads from the old port fail, and its own reads end.

        Leases that others hold for it run out, because no notice reaches them.
        """
        self._now_ms = max(self._now_ms, now_ms)
        del self._engine_of[port]
        port.on_begin = None
        self._wakes.pop(port, None)
        broken = [which[0] for _, _, what, of, which in self._due if what == "arrives" and which[0].peer is port]
        self._due = [
            each
            for each in self._due
            if each[2] == "sent" or not (each[3] is port or (each[2] == "arrives" and each[4][0].peer is port))
        ]
        heapify(self._due)
        port.lost()
        for other in [*self._engine_of]:
            other.forget_peer(port)
            for loading in [each for each in other.loads.values() if each in broken]:
                other.ended(loading, ok=False)
                self._wake(other, now_ms)
        self.add(engine)
