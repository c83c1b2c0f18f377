"""Handoffs: a prefill engine computes a prompt, and a decode engine gets its KV over a link and generates tokens.

One subject: the steps of a request between the two engines, by release.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_kvmock.fleets.clock.engine_state import EngineStalled

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.arrivals import Arrivals, Turn
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.passes import Passes

# Theory of operation
#
# 1.2.1 (`Handoffs`). When a prefill pass has computed the whole prompt, its blocks are free, and the link takes the
# request to the next decode engine in turn, where it arrives as any request does. While it is on the link, it does not
# count as open, so a closed loop dispatches another request. A prefill pass of no time hands over before a decode
# engine starts its pass.
#
# 1.6.1 (`ReservingHandoffs`). The KV has an owner at every moment. A handoff consists of these actions, each caused by
# the previous one; they are taken one at a time, in the order in which they were caused:
#
#   reserve   The prompt is computed, and stays allocated at its source ("held"). The next decode engine in turn is its
#             destination, where it queues for blocks.
#   transfer  The destination has blocks for the whole prompt ("reserved"): those that it has cached, and new ones, which  # noqa: E501, W505
#             have no name yet, so that no other request hits them. The transfer starts, of the whole prompt whatever is
#             cached.
#   activate  The transfer is through. The new blocks get their names; one that another request cached in the meantime is  # noqa: E501, W505
#             given back. The request waits at the decode engine as one whose prompt is computed.
#   release   The source frees its blocks; they stay cached there.
#
# Actions are taken before requests arrive. Over vLLM's type, passes also start before that; if they reject a request,
# its successor arrives after the requests that are due already. Transfers that end together act in the order of
# arrival, and handed-over requests wait in the order in which their blocks were requested. An engine in a pass is not
# changed: activation and release wait for the end of its pass, and come before the actions that the end causes. A
# destination tries only the first request of its queue: when one of its passes ends (even one that could do nothing),
# when a request joins its queue while it runs no pass, and after an activation. It reserves nothing while the maximum
# number of requests runs, nor, after a failed try, before blocks or a running place become free. While its queue is not
# empty, a decode engine admits only activated requests, not preempted ones, which would compute their prompts again. A
# prompt that is larger than the destination's pool fails: its source frees it, and no token is generated.
#
# An SGLang pair begins with the destination (`DestinationFirst`): reserve, then the prompt is computed ("prefill"),
# then transfer, activate, release. If the source rejects a request, its reserved blocks are given back, and the
# destination tries its queue again: at once, or, if it is in a pass, again at the end of the pass.
#
# A request is open from its arrival to its last token. A pass of no time ends when it starts, and its consequences come
# after all passes that start at that moment.


class Handoff:
    """One prompt on its way from a prefill engine to a decode engine.

    Attributes:
        turn: the request of the trace.
        arrival_ms: when it arrived.
        source: the prefill engine; None before it is chosen.
        prefilled: the request on the prefill engine, whose token does not count.
        leg: for P/D pairs, the decode leg in its engine; None: it was not sent, or sent without parameters.
        order: its place among all handoffs, in the order of their begin.
        fresh_tokens: tokens of the reserved blocks that were not cached; None before.
        destination: the decode engine; set together with `request`.
        request: the request on the decode engine, which is reported.
        held_ms: when the prompt was computed.
        reserved_ms: when the destination had blocks for it.
        activated_ms: when the transfer had ended and the destination had the request.
        released_ms: when the source freed its blocks.
        decode_admitted_ms: start of the pass that admitted it at the destination. This and the next value are known
            when it has finished.
        decode_reused_tokens: the most tokens that the destination found cached when it resumed the request; hits at the
            reservation do not count.
    """

    __slots__ = (
        "activated_ms",
        "arrival_ms",
        "decode_admitted_ms",
        "decode_reused_tokens",
        "destination",
        "fresh_tokens",
        "held_ms",
        "leg",
        "order",
        "prefilled",
        "released_ms",
        "request",
        "reserved_ms",
        "source",
        "turn",
    )

    def __init__(self, turn: Turn, arrival_ms: float, order: int) -> None:
        self.turn = turn
        self.arrival_ms = arrival_ms
        self.order = order
        self.source: MockEngine | None = None
        self.prefilled: EngineRequest | None = None
        self.destination: MockEngine
        self.request: EngineRequest | None = None
        self.leg: Any = None
        self.fresh_tokens: int | None = None
        self.held_ms: float | None = None
        self.reserved_ms: float | None = None
        self.activated_ms: float | None = None
        self.released_ms: float | None = None
        self.decode_admitted_ms: float | None = None
        self.decode_reused_tokens = 0

    @property
    def transfer_ms(self) -> float:
        """Time of its KV transfer over the link of its source; 0 without a link."""
        assert self.source is not None
        assert self.prefilled is not None
        return self.source.args.handoff_ms(self.prefilled.prompt_tokens, self.fresh_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the handoff under the keys of Dynamo's report; None for steps that did not happen."""
        prefilled = self.prefilled
        return {
            "reused_input_tokens": 0 if prefilled is None else prefilled.reused_tokens,
            "prefill_admit_ms": None if prefilled is None else prefilled.admitted_ms,
            "source_held_ms": self.held_ms,
            "destination_reserved_ms": self.reserved_ms,
            "destination_activated_ms": self.activated_ms,
            "decode_admit_ms": self.decode_admitted_ms,
            "source_released_ms": self.released_ms,
            "decode_reused_input_tokens": self.decode_reused_tokens,
        }

    def take_over(self) -> None:
        """Give the request the admission and hits of its source, for the report."""
        request, prefilled = self.request, self.prefilled
        assert request is not None
        assert prefilled is not None
        request.admitted_ms = prefilled.admitted_ms
        request.reused_tokens = max(request.reused_tokens, prefilled.reused_tokens)
        request.first_reused_tokens, request.lacking = prefilled.first_reused_tokens, prefilled.lacking


_Action: TypeAlias = "tuple[Callable[[Handoff, float], None], Handoff]"


class Handoffs:
    """Handoffs by the rules of 1.2.1.

    Args:
        sources: the prefill engines.
        expect: opens the request of a handoff on the next decode engine in turn, sets both, and returns the request.
        arrivals: in a closed loop, counts requests on the link as not open.
        passes: the passes of all engines.

    Attributes:
        keeps_blocks: whether a prompt stays allocated at its source when it is computed.
        starts_first: whether passes start before requests arrive.
        made: the handoffs, in the order in which they began.
        link_ms: sum of the times of all transfers of P/D pairs, which may overlap.
    """

    keeps_blocks = False
    starts_first = False

    def __init__(
        self,
        sources: Sequence[MockEngine],
        expect: Callable[[Handoff], EngineRequest],
        arrivals: Arrivals,
        passes: Passes,
    ) -> None:
        self._sources = frozenset(sources)
        self._next_source = cycle(sources)
        self._expect = expect
        self._arrivals = arrivals
        self._passes = passes
        self._of: dict[ScheduledRequest, Handoff] = {}  # by the request at the source: (end, order, request)
        self._transfers: list[tuple[float, int, Handoff]] = []
        self._sequence = 0
        self.link_ms = 0.0
        self.made: list[Handoff] = []

    @property
    def next_ms(self) -> float:
        """The time at which the next transfer ends or an action is due; infinite if there is none."""
        return self._transfers[0][0] if self._transfers else math.inf

    @property
    def in_transfer(self) -> bool:
        """Whether a request is on the link."""
        return bool(self._transfers)

    @property
    def waiting(self) -> list[EngineRequest]:
        """The requests that wait for blocks of a decode engine, which has not admitted them."""
        return []

    def new(self, turn: Turn, arrival_ms: float) -> Handoff:
        """Return the handoff of a request."""
        handoff = Handoff(turn, arrival_ms, len(self.made))
        self.made.append(handoff)
        return handoff

    def begin(self, turn: Turn, arrival_ms: float, now_ms: float) -> None:
        """Begin the handoff of a request that arrives."""
        self._compute(self.new(turn, arrival_ms), now_ms)

    def _compute(self, handoff: Handoff, now_ms: float) -> None:
        """Give the prompt to the next prefill engine."""
        source, request = self._dispatch(handoff)
        request.keeps_blocks = self.keeps_blocks
        self._passes.touch(source, now_ms)

    def _dispatch(self, handoff: Handoff, source: MockEngine | None = None) -> tuple[MockEngine, EngineRequest]:
        """Give a prompt to a prefill engine; `source` None: the next one."""
        source = handoff.source = source or next(self._next_source)
        output = min(1, handoff.turn.trace.output_length)
        request = handoff.prefilled = source.inside.dispatch(handoff.turn.prompt, output, handoff.arrival_ms)
        self._of[request] = handoff
        return source, request

    def rejected(self, request: EngineRequest) -> Handoff:
        """Forget the handoff of a request that its source rejected."""
        handoff = self._of.pop(request)
        self.made.remove(handoff)
        return handoff

    def give_back(self, handoff: Handoff) -> None:
        """Free the blocks reserved for a request that its source rejected."""

    def unsend(self, handoff: Handoff) -> None:
        """Cancel a leg that is still to be sent, because its client is gone."""

    def waits_for(self, engine: MockEngine) -> bool:  # noqa: ARG002 - nothing waits here
        """Whether something waits for the end of the engine's next pass."""
        return False

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        """Note the end of a pass; None: of passes that were made in one go."""
        if done is None or engine not in self._sources:
            return
        for request in done.finished:
            handoff = self._of.pop(request)
            handoff.held_ms = now_ms
            delay = handoff.transfer_ms
            if delay:
                self._start_transfer(handoff, now_ms + delay)
                self._arrivals.leave()
            else:
                self._arrive(handoff, now_ms)

    def _start_transfer(self, handoff: Handoff, end_ms: float) -> None:
        heappush(self._transfers, (end_ms, handoff.order if self.keeps_blocks else self._sequence, handoff))
        self._sequence += 1

    def at(self, now_ms: float) -> None:
        """End the transfers that are due."""
        while self.next_ms <= now_ms:
            self._arrivals.enter()
            self._arrive(heappop(self._transfers)[2], now_ms)

    def _arrive(self, handoff: Handoff, now_ms: float) -> None:
        request = self._expect(handoff)
        handoff.take_over()
        self._passes.touch(handoff.destination, now_ms)
        handoff.destination.inside.scheduler.submit(request)


class _Queue:
    """The handoffs that queue for blocks of one decode engine.

    Attributes:
        handoffs: the handoffs, in order of arrival.
        freed: how often blocks or a running place became free.
        tried: `freed` at the last try of the first handoff; None before.
    """

    __slots__ = ("freed", "handoffs", "tried")

    def __init__(self) -> None:
        self.handoffs: deque[Handoff] = deque()
        self.freed = 0
        self.tried: int | None = None


class ReservingHandoffs(Handoffs):
    """Handoffs by the rules of 1.6.1.

    Args:
        sources: the prefill engines.
        expect: as given.
        arrivals: as given.
        passes: as given.
        destinations: the decode engines.
        rejected: called with a request whose prompt its destination can never hold.

    Attributes:
        needs_seat: whether nothing is reserved while the maximum number of requests runs.
    """

    keeps_blocks = True
    starts_first = True
    needs_seat = True

    def __init__(
        self,
        sources: Sequence[MockEngine],
        expect: Callable[[Handoff], EngineRequest],
        arrivals: Arrivals,
        passes: Passes,
        destinations: Sequence[MockEngine],
        *,
        rejected: Callable[[EngineRequest], None],
    ) -> None:
        super().__init__(sources, expect, arrivals, passes)
        for engine in destinations:
            if not engine.inside.can_reserve:
                raise ValueError(
                    "replay: with prefill, engines must be of semantics='1.2.1' over any backend, or of '1.6.1'; "
                    f"got {engine!r} of {engine.args.scheduler_semantics!r}"
                )
        self._rejected = rejected
        self._queues: dict[MockEngine, _Queue] = {engine: _Queue() for engine in destinations}
        self._actions: deque[_Action] = deque()
        self._deferred: dict[MockEngine, list[_Action]] = {}
        self._active: dict[ScheduledRequest, Handoff] = {}

    @property
    def waiting(self) -> list[EngineRequest]:
        """The requests that wait for blocks of a decode engine, which has not admitted them."""
        handoffs = [handoff for queue in self._queues.values() for handoff in queue.handoffs]
        return [handoff.request for handoff in handoffs if handoff.request is not None]

    def waits_for(self, engine: MockEngine) -> bool:
        """Whether something waits for the end of the engine's next pass."""
        queue = self._queues.get(engine)
        return queue is not None and bool(queue.handoffs)

    @property
    def next_ms(self) -> float:
        """The time at which the next transfer ends or an action is due; infinite if there is none."""
        return -math.inf if self._actions else super().next_ms

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        """Note the end of a pass; None: of passes that were made in one go."""
        if done is not None and not done.did_something:  # it tries to reserve, as at any other end
            if engine in self._queues:
                self._try_next(engine, now_ms)
            return
        reserved = None
        queue = self._queues.get(engine)
        if queue is not None:
            if done is not None and (done.finished or done.preempted):
                queue.freed += 1
            reserved = self._reserve_first(engine, now_ms)
        self._actions.extend(self._deferred.pop(engine, ()))
        if done is not None:
            for request in done.finished:
                if queue is None:
                    handoff = self._of.pop(request)
                    handoff.held_ms = now_ms
                    self._actions.append((self._transfer if handoff.request else self._reserve, handoff))
                else:
                    self._settle(self._active.pop(request))
        if reserved is not None:
            self._actions.append(reserved)

    @staticmethod
    def _settle(handoff: Handoff) -> None:
        """Note the destination's admission and hits of a finished request, which is reported with those of its
        source.
        """
        assert handoff.request is not None
        handoff.decode_admitted_ms = handoff.request.admitted_ms
        handoff.decode_reused_tokens = handoff.request.reused_tokens
        handoff.take_over()

    def at(self, now_ms: float) -> None:
        """End the transfers that are due; take the pending actions, and those that they cause."""
        while self._transfers and self._transfers[0][0] <= now_ms:
            self._actions.append((self._activate, heappop(self._transfers)[2]))
        while self._actions:
            act, handoff = self._actions.popleft()
            act(handoff, now_ms)

    def _reserve(self, handoff: Handoff, now_ms: float) -> None:
        request, engine = self._expect(handoff), handoff.destination
        if not request.is_open:  # rejected, or failed
            request.ended_ms = now_ms
            if handoff.source is None:
                self._rejected(request)
            else:
                handoff.take_over()
                self._actions.append((self._release, handoff))
            return
        self._queues[engine].handoffs.append(handoff)
        engine.inside.hold_back_prompts(True)
        self._passes.touch(engine, now_ms)  # it may admit other requests now
        self._retry(handoff, now_ms)

    def _retry(self, handoff: Handoff, now_ms: float) -> None:
        if not self._passes.is_busy(handoff.destination, now_ms):  # otherwise the end of its pass tries
            self._try_next(handoff.destination, now_ms)

    def _transfer(self, handoff: Handoff, now_ms: float) -> None:
        if handoff.transfer_ms:
            self._start_transfer(handoff, now_ms + handoff.transfer_ms)
        else:
            self._actions.append((self._activate, handoff))

    def _is_deferred(self, engine: MockEngine, action: _Action, now_ms: float) -> bool:
        """Touch an engine for an action, or defer the action if the engine is in a pass; return whether it was
        deferred.
        """
        if self._passes.is_busy(engine, now_ms):
            self._deferred.setdefault(engine, []).append(action)
            return True
        self._passes.touch(engine, now_ms)
        return False

    def _try_next(self, engine: MockEngine, now_ms: float) -> None:
        """Reserve blocks for the first handoff of an engine's queue, and queue the resulting action."""
        reserved = self._reserve_first(engine, now_ms)
        if reserved is not None:
            self._actions.append(reserved)

    def _reserve_first(self, engine: MockEngine, now_ms: float) -> _Action | None:
        """Reserve blocks for the first handoff of an engine's queue, if due and possible; return the resulting
        action.
        """
        queue = self._queues[engine]
        if not queue.handoffs or queue.tried == queue.freed:
            return None
        queue.tried = queue.freed
        has_seat = len(engine.inside.scheduler.running) < (engine.args.max_num_seqs or math.inf)
        if self.needs_seat and not has_seat:
            return None
        handoff = queue.handoffs[0]
        assert handoff.request is not None
        fresh = engine.inside.reserve(handoff.request)
        if fresh is None:
            return None
        handoff.fresh_tokens = fresh * engine.args.block_size
        queue.handoffs.popleft()
        queue.tried = None
        engine.inside.hold_back_prompts(bool(queue.handoffs))
        self._passes.touch(engine, now_ms)
        handoff.reserved_ms = now_ms
        return (self._compute if handoff.source is None else self._transfer), handoff

    def _activate(self, handoff: Handoff, now_ms: float) -> None:
        engine, request = handoff.destination, handoff.request
        assert request is not None
        if self._is_deferred(engine, (self._activate, handoff), now_ms):
            return
        manager = engine.worker.manager
        active = manager.num_active_blocks
        engine.inside.activate(request)
        handoff.activated_ms = now_ms
        self._active[request] = handoff
        if manager.num_active_blocks < active:
            self._queues[engine].freed += 1
        self._actions.append((self._release, handoff))
        self._try_next(engine, now_ms)

    def _release(self, handoff: Handoff, now_ms: float) -> None:
        source, request = handoff.source, handoff.request
        assert source is not None
        assert handoff.prefilled is not None
        assert request is not None
        if self._is_deferred(source, (self._release, handoff), now_ms):
            return
        source.inside.release(handoff.prefilled)
        if not request.is_open and handoff.activated_ms is None:  # rejected, or failed
            self._rejected(request)
        else:
            handoff.released_ms = now_ms


class DestinationFirst(ReservingHandoffs):
    """Handoffs of SGLang pairs in 1.6.1: blocks are reserved before the prompt is computed."""

    starts_first = False
    needs_seat = False

    def begin(self, turn: Turn, arrival_ms: float, now_ms: float) -> None:  # noqa: ARG002 - an action does it
        """Request blocks for the prompt; no engine gets the request yet."""
        self._actions.append((self._reserve, self.new(turn, arrival_ms)))

    def give_back(self, handoff: Handoff) -> None:
        """Free the blocks reserved for a request that its source rejected; the next handoff is tried."""
        assert handoff.request is not None
        handoff.destination.inside.give_back(handoff.request)
        self._queues[handoff.destination].freed += 1
        self._actions.append((self._given_back, handoff))

    def _given_back(self, handoff: Handoff, now_ms: float) -> None:
        if not self._is_deferred(handoff.destination, (self._given_back, handoff), now_ms):
            self._try_next(handoff.destination, now_ms)

    def pass_ended(self, engine: MockEngine, done: ForwardPass | None, now_ms: float) -> None:
        """Note the end of a pass; None: of passes that were made in one go.

        Raises:
            EngineStalled: a decode engine runs requests but has no page for any; the original retries this forever.
        """
        if engine in self._queues and done is not None:
            scheduler = engine.inside.scheduler
            did = done.has_generated or done.scheduled or done.admitted or done.preempted
            if scheduler.running and done.end_ms == done.start_ms and not did:
                waiting = (*scheduler.waiting, *scheduler.parked)
                raise EngineStalled(done.end_ms, tuple(scheduler.running), waiting, 1)
        super().pass_ended(engine, done, now_ms)
