"""Handoffs of prompts from prefill engines to decode engines, as Dynamo's replay of 1.3.1 makes them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ForwardPass
    from pytest_kvmock.fleet.mock_engine import EngineRequest, MockEngine

_Action: TypeAlias = Literal["reserve", "transfer", "activate", "release"]


class Handoff:
    __slots__ = (
        "activated_ms",
        "decode_admitted_ms",
        "destination",
        "held_ms",
        "prefilled",
        "released_ms",
        "request",
        "reserved_ms",
        "source",
    )

    def __init__(self, source: MockEngine, prefilled: EngineRequest, held_ms: float) -> None:
        self.source = source
        self.prefilled = prefilled
        self.held_ms = held_ms
        self.destination: MockEngine | None = None
        self.request: EngineRequest | None = None
        self.reserved_ms: float | None = None
        self.activated_ms: float | None = None
        self.released_ms: float | None = None


class _Destination:
    """What a decode engine knows of the handoffs to it."""

    __slots__ = ("generation", "pending", "tried")

    def __init__(self) -> None:
        self.pending: deque[Handoff] = deque()
        self.generation = 0
        self.tried: int | None = None


class Handoffs:
    def __init__(
        self,
        engines: Iterable[MockEngine],
        busy: Container[MockEngine],
        route: Callable[[Handoff], tuple[MockEngine, EngineRequest]],
    ) -> None:
        self._busy = busy
        self._route = route
        self._destinations = {engine: _Destination() for engine in engines}
        self._actions: deque[tuple[_Action, Handoff]] = deque()
        self._deferred: dict[MockEngine, list[tuple[_Action, Handoff]]] = {}
        self._transfers: list[tuple[float, int, Handoff]] = []
        self._sequence = 0
        self.log: list[Handoff] = []

    @property
    def next_moment(self) -> float:
        return self._transfers[0][0] if self._transfers else math.inf

    def is_quiet(self, engine: MockEngine) -> bool:
        """Whether nothing waits for the end of the engine's next pass."""
        return not (engine in self._destinations and self._destinations[engine].pending) and engine not in self._deferred

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        destination = self._destinations.get(engine)
        reserved = None
        if destination is not None:
            if done is not None and (done.finished or done.preempted or done.rejected):
                destination.generation += 1
            reserved = self._reserve_next(engine, now_ms)
        self._actions.extend(self._deferred.pop(engine, ()))
        if destination is None and done is not None:
            for request in done.finished:
                handoff = Handoff(engine, request, now_ms)
                self.log.append(handoff)
                self._actions.append(("reserve", handoff))
        if reserved is not None:
            self._actions.append(("transfer", reserved))

    def finish_transfers(self, now_ms: float) -> None:
        while self._transfers and self._transfers[0][0] <= now_ms:
            self._actions.append(("activate", heappop(self._transfers)[2]))

    def act(self, now_ms: float) -> None:
        while self._actions:
            action, handoff = self._actions.popleft()
            if action == "reserve":
                engine, request = self._route(handoff)
                handoff.destination, handoff.request = engine, request
                destination = self._destinations[engine]
                if not destination.pending:
                    destination.tried = None
                destination.pending.append(handoff)
                engine.scheduler.prepared_only = True
                if engine not in self._busy:
                    reserved = self._reserve_next(engine, now_ms)
                    if reserved is not None:
                        self._actions.append(("transfer", reserved))
            elif action == "transfer":
                delay = transfer_ms(handoff.source, handoff.prefilled)
                if delay > 0:
                    heappush(self._transfers, (now_ms + delay, self._sequence, handoff))
                    self._sequence += 1
                else:
                    self._actions.append(("activate", handoff))
            elif action == "activate":
                engine = handoff.destination
                if engine in self._busy:
                    self._deferred.setdefault(engine, []).append((action, handoff))
                    continue
                self._activate(handoff, now_ms)
            elif handoff.source in self._busy:
                self._deferred.setdefault(handoff.source, []).append((action, handoff))
            else:
                handoff.source.scheduler._driver.release(handoff.prefilled.state)
                handoff.released_ms = now_ms

    def _reserve_next(self, engine: MockEngine, now_ms: float) -> Handoff | None:
        destination = self._destinations[engine]
        if not destination.pending:
            return None
        generation = destination.generation
        if len(engine.scheduler.running) >= (engine.args.max_num_seqs or math.inf):
            destination.tried = generation
            return None
        if destination.tried == generation:
            return None
        handoff = destination.pending[0]
        request = handoff.request
        if not engine.scheduler._driver.reserve(request.state, request.prompt_tokens):
            destination.tried = generation
            return None
        destination.pending.popleft()
        destination.tried = None
        engine.scheduler.prepared_only = bool(destination.pending)
        handoff.reserved_ms = now_ms
        return handoff

    def _activate(self, handoff: Handoff, now_ms: float) -> None:
        engine, request = handoff.destination, handoff.request
        driver = engine.scheduler._driver
        active = driver.manager.num_active_blocks
        driver.claim(request.state, request.prompt_tokens)
        request.computed_tokens = request.prompt_tokens
        engine.scheduler.submit(request)
        handoff.activated_ms = now_ms
        destination = self._destinations[engine]
        if driver.manager.num_active_blocks < active:
            destination.generation += 1
        self._actions.append(("release", handoff))
        reserved = self._reserve_next(engine, now_ms)
        if reserved is not None:
            self._actions.append(("transfer", reserved))


def transfer_ms(source: MockEngine, request: EngineRequest) -> float:
    """How long the KV of a prompt takes over the link of its prefill engine; 0 where it has none."""
    args = source.args
    if not (args.kv_bytes_per_token and args.kv_transfer_bandwidth):
        return 0.0
    return request.prompt_tokens * args.kv_bytes_per_token / (args.kv_transfer_bandwidth * 1e9) * 1000.0
