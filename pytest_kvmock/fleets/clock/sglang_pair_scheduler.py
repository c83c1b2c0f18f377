"""Schedulers of an SGLang pair's engines, with turns of P's event loop and steps of D as passes.

One subject: how one pass uses the queues of `pairs`, which track what is cached, sent and answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.schedulers.scheduler import ForwardPass, ScheduledTokens
from pytest_kvmock.engines.schedulers.sglang_scheduler import SglangScheduler
from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, PrefillLeg
from pytest_kvmock.engines.sglang.pairs.sglang_prefill import PrefillPiece

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.engines.sglang.pairs.sglang_port import SglangPort
    from pytest_kvmock.engines.sglang.pairs.sglang_rooms import Fate

LegT = TypeVar("LegT", PrefillLeg, DecodeLeg)

# Theory of operation
#
# A pass of P is a turn of its event loop: a batch within the budgets of `SglangScheduler`. With overlap, the next turn
# processes the result of a batch, so another pass follows a pass that computed, even if it takes no time. A request
# runs from its first chunk until its transfer has ended; its token is generated when the prompt is computed.
#
# A pass of D gives pages, checks transfers, lets requests join, and generates. The first token of a request comes from
# P, at the start of the pass in which the request joins. If pages run short, the request with the fewest generated
# tokens is retracted; its KV is copied back when it has pages again.
#
# If a pass did nothing, the remaining requests wait for other engines; the run touches this engine when something
# arrives.


class SglangPairScheduler(SglangScheduler):
    """The common part of both engines' schedulers."""

    has_priorities = False

    def __init__(self, driver: Any, args: MockEngineArgs) -> None:
        super().__init__(driver, args)
        self._port: SglangPort = driver.pair
        self._requests: dict[str, ScheduledRequest] = {}

    def _open(self, request: ScheduledRequest, leg: LegT | None) -> LegT | None:
        """Note the leg of a request that was submitted; None: its prompt is longer than the pool."""
        if leg is None:
            self._waiting.remove(request)
        else:
            self._requests[leg.name] = request
        return leg

    def submit(self, request: ScheduledRequest) -> None:
        """Take a request that has arrived; `open_leg` follows."""
        self._waiting.append(request)

    def _name_of(self, request: ScheduledRequest) -> str:
        return next(name for name, each in self._requests.items() if each is request)

    def abort(self, request: ScheduledRequest) -> None:
        """Remove an open request and free its blocks when the engine is closed."""
        self._queue_of(request).remove(request)
        name = self._name_of(request)
        del self._requests[name]
        self._port.forget(name)
        self._driver.free(request.state, done=False)
        request.status = "aborted"

    def call_off(self, request: ScheduledRequest) -> bool:
        """Act on an open request whose client is gone: at once if this ends its leg, otherwise in a later pass."""
        name, port = self._name_of(request), self._port
        self._abort_leg(name)
        port.take_answers()
        if port.answers.pop(name, None) is None:
            return False
        del self._requests[name]
        self._waiting.remove(request)
        return True

    def _abort_leg(self, name: str) -> None:
        """Call off a leg."""
        raise NotImplementedError

    def plan(self, now_ms: float, until_ms: float) -> list[float]:  # noqa: ARG002 - each pass looks at the queues
        """Return no passes, because none can be computed in one go."""
        return []

    def _take_answers(self, done: ForwardPass) -> None:
        """End the requests whose legs were answered."""
        answers = self._port.answers
        for name in [name for name in answers if name in self._requests]:
            answer, request = answers.pop(name), self._requests.pop(name)
            self._queue_of(request).remove(request)
            if answer.finish == "length":
                request.status = "finished"
                done.finished.append(request)
            else:
                self._failed(done, request)
            request.state.tokens.release()

    def _failed(self, done: ForwardPass, request: ScheduledRequest) -> None:
        """Note a request whose leg ended with an error."""
        raise NotImplementedError

    def _run(self, request: ScheduledRequest) -> None:
        """Move a waiting request to the running ones."""
        self._waiting.remove(request)
        self._running.append(request)
        request.status = "running"

    def _give_way(self, done: ForwardPass, request: ScheduledRequest) -> None:
        """Move a running request back to the waiting ones."""
        self._running.remove(request)
        self._waiting.append(request)
        request.status = "preempted"
        request.preemptions += 1
        done.preempted.append(request)

    def _end(self, done: ForwardPass, before: object, *, is_more: bool = False) -> ForwardPass:
        """End a pass; `before` is the port's state at its start."""
        self._take_answers(done)
        done.may_do_more = is_more or self._port.state != before
        done.active_blocks = self._driver.manager.num_active_blocks
        done.note_times()
        done.running, done.waiting = len(self._running), tuple(self._waiting)
        return done


class SglangPrefillScheduler(SglangPairScheduler):
    """Computes prompts for which a decode engine has pages.

    Args:
        driver: brings its requests to the cache.
        args: budgets, times and speedups of the engine.
    """

    def __init__(self, driver: Any, args: MockEngineArgs) -> None:
        super().__init__(driver, args)
        side = self._port.prefill
        assert side is not None
        self._side = side
        if args.max_num_seqs is not None:
            side.free_rows = args.max_num_seqs

    def open_leg(self, request: ScheduledRequest, hand_over: Mapping[str, Any]) -> PrefillLeg | None:
        """Open the leg of a request that was submitted; None: its prompt is longer than the pool."""
        leg = self._open(request, self._port.ask_prefill(request.state, hand_over))
        if leg is not None:
            leg.token = request.next_token()
        return leg

    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one turn of the event loop from this moment."""
        done, port, side = ForwardPass(now_ms), self._port, self._side
        port.expire(port.time_of(now_ms))
        before = port.state
        side.begin_turn()
        batch = self._batch(done)
        side.launch(batch)
        self._charge_prefill(done)
        done.end_ms = now_ms + done.prefill_ms
        port.now_s = max(port.now_s, port.time_of(now_ms if side.overlaps else done.end_ms))
        port.end_turn()
        self._note_computed(done)
        return self._end(done, before, is_more=bool(batch))

    def _batch(self, done: ForwardPass) -> list[PrefillPiece]:
        """Return prompts in order, as far as the budgets, rows and blocks suffice."""
        side, size = self._side, self._page
        manager: Any = self._driver.manager
        batch: list[PrefillPiece] = []
        left, rows, pages = min(self._most_prefill, self._chunk), side.free_rows, 0
        for leg in side.candidates():
            request, scheduled = leg.request, self._requests[leg.name]
            is_new = request not in manager.requests
            if left <= 0 or (is_new and not rows):
                break
            if is_new:
                manager.find(request)
                manager.admit(request)
            start, end = request.computed, leg.prompt_tokens
            upto = end if end - start <= left else start + int(left) // size * size
            if upto == start or manager.lacking(request, upto, pages):
                if is_new:
                    manager.withdraw(request)
                break
            pages += manager.pages_of(upto) - request.allocated
            left -= -(-(upto - start) // size) * size
            if is_new:
                rows -= 1
                done.admitted.append(scheduled)
                if scheduled in self._waiting:
                    self._run(scheduled)
            scheduled.computed_tokens = upto
            self._admitted(scheduled, done.start_ms, start)
            done.scheduled.append(ScheduledTokens(scheduled, upto - start, upto - start, start))
            batch.append(PrefillPiece(leg, start, upto))
            if upto < end:
                break
        return batch

    def _note_computed(self, done: ForwardPass) -> None:
        """Note the tokens of computed prompts, and the requests that lost their row."""
        for leg in self._side.inflight:
            request = self._requests.get(leg.name)
            if request is not None and not request.generated_tokens:
                assert leg.token is not None
                done.note_tokens(request, [leg.token])
        for leg in (*self._side.waiting, *self._side.boot):
            request = self._requests.get(leg.name)
            if request is not None and request.status == "running" and not leg.has_row:
                self._give_way(done, request)
                request.generated_tokens = request.computed_tokens = 0

    def _failed(self, done: ForwardPass, request: ScheduledRequest) -> None:
        request.status = "aborted"
        done.aborted.append(request)

    def _abort_leg(self, name: str) -> None:
        self._side.abort(name)


class SglangDecodeScheduler(SglangPairScheduler):
    """Receives prompts and generates tokens.

    Args:
        driver: brings its requests to the cache.
        args: places, times and speedups of the engine.
    """

    def __init__(self, driver: Any, args: MockEngineArgs) -> None:
        super().__init__(driver, args)
        side = self._port.decode
        assert side is not None
        self._side = side
        if args.max_num_seqs is not None:
            side.places = args.max_num_seqs

    def open_leg(self, request: ScheduledRequest, hand_over: Mapping[str, Any], fate: Fate = "ok") -> DecodeLeg | None:
        """Open the leg of a request that was submitted; None: its prompt is longer than the pool."""
        return self._open(request, self._port.ask_decode(request.state, hand_over, request.max_output_tokens, fate))

    def execute_pass(self, now_ms: float) -> ForwardPass:
        """Run one step from this moment."""
        done, port, side = ForwardPass(now_ms), self._port, self._side
        port.expire(port.time_of(now_ms))
        before = port.state
        port.look()
        for leg in side.join():
            self._joined(done, self._requests[leg.name], leg)
        self._retract_some(done)
        legs = side.running
        if legs:
            self._step(done, legs)
        done.end_ms = now_ms + done.decode_ms
        port.now_s = max(port.now_s, port.time_of(done.end_ms))
        port.take_answers()
        return self._end(done, before)

    def _joined(self, done: ForwardPass, request: ScheduledRequest, leg: DecodeLeg) -> None:
        self._run(request)
        request.computed_tokens = leg.prompt_tokens
        self._admitted(request, done.start_ms, leg.hit_tokens)
        done.admitted.append(request)
        if not request.generated_tokens:
            request.generated_tokens = 1
            request.token_ms.append(done.start_ms)

    def _retract_some(self, done: ForwardPass) -> None:
        """Retract running requests until the others can generate, or one is left."""
        side = self._side
        while len(side.running) > 1:
            needed = self._driver.step_tokens([leg.request for leg in side.running])
            if self._driver.unheld() >= needed:
                return
            leg = min(side.running, key=lambda each: len(each.request) - each.prompt_tokens)
            request = self._requests[leg.name]
            side.retract(leg)
            self._give_way(done, request)

    def _step(self, done: ForwardPass, legs: Sequence[DecodeLeg]) -> None:
        requests = [self._requests[leg.name] for leg in legs]
        lengths = [len(leg.request) for leg in legs]
        tokens = [request.next_token() for request in requests]
        if not self._side.decode(legs, tokens):
            return
        done.decode_lengths = lengths
        done.decode_ms = self._decode_ms(sum(lengths), len(lengths))
        for leg, request, token in zip([*legs], requests, tokens, strict=True):
            done.note_tokens(request, [token])
            request.computed_tokens = leg.request.computed
            if leg.is_called_off or request.generated_tokens >= request.max_output_tokens:
                self._side.finish(leg)

    def _failed(self, done: ForwardPass, request: ScheduledRequest) -> None:
        request.status = "failed"
        done.rejected.append(request)

    def _abort_leg(self, name: str) -> None:
        self._side.abort(name, self._port.now_s)


def make_pair_scheduler(driver: Any, args: MockEngineArgs) -> SglangPairScheduler:
    """Make the scheduler of an engine of a pair."""
    return (SglangPrefillScheduler if args.worker_type == "prefill" else SglangDecodeScheduler)(driver, args)
