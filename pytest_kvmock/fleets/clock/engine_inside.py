"""The inside of a mock engine: its clock, and the life of a request on it.

One subject. `MockEngine` is its public interface, for tests; code that drives several engines on one clock uses the
inside (`fleets/clock/passes`, `replay`, handoffs, fleets, servers).
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final, cast

from pytest_kvmock.engines.base.driver import ReservingDriver
from pytest_kvmock.engines.base.manager import protocol_mismatch
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
from pytest_kvmock.engines.vllm.vllm_manager import FullReportError
from pytest_kvmock.engines.worker import KvWorker, RequestError
from pytest_kvmock.fleets.clock.engine_aborts import EngineAborts, check_abort
from pytest_kvmock.fleets.clock.engine_parts import (
    accepted_drafts,
    make_scheduler,
    publish_times,
)
from pytest_kvmock.fleets.clock.engine_request import EngineRequest
from pytest_kvmock.fleets.clock.engine_state import EngineMetrics, EngineSize, EngineStalled
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.report.rows import RunFacts, WorkerRow
from pytest_kvmock.fleets.report.run_result import RunResult
from pytest_kvmock.values.checks import check_integer, check_number, is_integer
from pytest_kvmock.values.programs.operations import Abort, Log, Operation, Run, RunPasses, Submit, prompt_fields
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from collections.abc import Callable


MOST_IDLE_PASSES: Final = 1024
"""Passes without progress after which an engine is stalled: the number in Dynamo's replay of 1.3.1."""


class EngineInside:
    """One engine in virtual time: a scheduler over the driver of a worker, and a clock that only passes move.

    Args:
        args: its arguments.
        worker: the worker whose manager and requests it uses.
        rng: source of generated tokens.

    Raises:
        ValueError: the worker has an engine, or its backend has no scheduler of this type.

    Attributes:
        args: as given, with the release of Dynamo that it follows as `semantics`.
        worker: as given.
        scheduler: decides which requests run; a restart replaces it.
        size: the largest requests that it can serve.
        now_ms: its time, in milliseconds from its start.
        requests: all requests that it got, up to date after `catch_up`.
        passes: number of forward passes that it ran.
        prefill_tokens: prompt tokens that it computed, including those computed again.
        token_source: returns the source of a prompt's output tokens.
        log: records the operations on the engine; None: they are not recorded.
        on_abort: called with each request whose `abort` is called; set by code that drives several engines on one
            clock. None: the engine acts itself.
    """

    def __init__(self, args: MockEngineArgs, worker: KvWorker, rng: Random) -> None:
        self.args, self.worker, self._rng = args, worker, rng
        self.log: Log | None = None
        self.on_abort: Callable[[EngineRequest], None] | None = None
        self.token_source: Callable[[Prompt], Random] = self._next_source
        self.now_ms = 0.0
        self.requests: list[EngineRequest] = []
        self.passes = 0
        self._listeners: list[Callable[[ForwardPass], None]] = []
        self._arriving: deque[EngineRequest] = deque()
        self._last_delivered = 0.0  # arrival time of the last request that has arrived
        self._preemptions = 0
        self.prefill_tokens = 0
        self._prefill_ms = 0.0
        self._idle_passes = 0
        self._under_way: ForwardPass | None = None
        self._aborts = EngineAborts(self._take_out, self._wake)
        self._begin()
        self.size = EngineSize.of(args, self._driver)

    def __repr__(self) -> str:
        return f"<MockEngine {self.args.engine_type} over {self.worker.backend} at {self.now_ms:g} ms>"

    def _begin(self) -> None:
        """Make the scheduler over the worker's present driver."""
        self._driver = self.worker.attach(self, publishes=self.args.needs_kv_publisher)
        try:
            self.scheduler = make_scheduler(self.args, self._driver, self.worker.tiers)
            self.number_drafts(self.worker.worker_id)
            self._published = publish_times(self.args, self.worker)
        except ValueError:
            self.worker.detach()
            raise

    def number_drafts(self, number: int) -> None:
        """Draw accepted drafts, if there are any, as the worker of this number does.

        Raises:
            ValueError: both the arguments and the backend have a draft model.
        """
        self.scheduler.accept_drafts(accepted_drafts(self.args, self.worker, number))

    def worker_restarted(self) -> None:
        """Begin again after a restart of the worker: no request runs, waits or arrives, and a pass under way is lost.
        Time and figures stay.
        """
        self.catch_up()
        self._arriving.clear()
        self._aborts.clear()
        self._forget_pass()
        self._last_delivered = min(self._last_delivered, self.now_ms)
        self._idle_passes = 0
        self._begin()

    @property
    def metrics(self) -> EngineMetrics:
        """The present state of the engine."""
        manager = self.worker.manager
        return EngineMetrics(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.parked),
            arriving=len(self._arriving),
            active_blocks=manager.num_active_blocks,
            total_blocks=manager.num_blocks,
            preemptions=self._preemptions,
            prefill_us=round(1000.0 * self._prefill_ms),
        )

    @property
    def report(self) -> Report:
        """A report of the requests that the engine has served so far."""
        self.catch_up()
        facts = RunFacts(self.args.block_size, sketches=self.args.release.reports_workers)
        return Report(RunResult(tuple(self.requests), facts, (self.row,)))

    @property
    def row(self) -> WorkerRow:
        """The engine's figures so far, as a row of a report."""
        worker = self.worker
        return WorkerRow(
            worker.worker_id,
            until_ms=self.now_ms,
            passes=self.passes,
            prompt_tokens_computed=self.prefill_tokens,
            blocks_evicted=worker.removed_blocks,
            preemptions=self._preemptions,
            recomputes_last_token=worker.traits.recomputes_last_token,
            has_host=worker.tiers is not None,
        )

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.scheduler.running or self.scheduler.waiting or self.scheduler.parked)

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, waits or is to arrive."""
        return not (self.has_work or self._arriving)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has started but not ended."""
        return self._under_way is not None

    def on_pass(self, listener: Callable[[ForwardPass], None]) -> None:
        """Call a listener after each forward pass; while there is one, no passes are run in one go."""
        self.catch_up()
        self._listeners.append(listener)

    # -------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: Prompt | TokenIds,
        max_output_tokens: int,
        arrival_ms: float | None = None,
        *,
        priority: int | None = None,
        abort_after_ms: float | None = None,
        abort_after_tokens: int | None = None,
    ) -> EngineRequest:
        """Submit a request (`MockEngine.submit`)."""
        prompt = self.worker.accept(prompt)
        check_integer("max_output_tokens", max_output_tokens, self.args.release.least_output, " (tokens)")
        arrival = self._check_arrival(arrival_ms)
        self._check_priority(priority)
        check_abort("", abort_after_ms, abort_after_tokens)
        self._check_size(prompt, max_output_tokens)
        request = self._open(prompt, max_output_tokens, arrival, priority or 0)
        self._aborts.plan(request, abort_after_ms, abort_after_tokens)
        if arrival > self.now_ms:
            self._arriving.append(request)
        else:
            self._last_delivered = arrival
            self.scheduler.submit(request)
        self._record_submit(request, arrival_ms, priority, abort_after_ms, abort_after_tokens)
        return request

    def _record_submit(
        self, request: EngineRequest, arrival_ms: float | None, priority: int | None, *abort_after: float | None
    ) -> None:
        if self.log is None:
            return
        prompt = request.prompt
        request.number = self.log.next_request()
        blocks, tail, hashed = prompt_fields(prompt, self.worker.manager.block_size)
        of = (
            self.worker.worker_id,
            self.worker.dp_rank,
            hashed,
            request.requested_output_tokens,
            arrival_ms,
            priority,
            prompt.keys,
            *abort_after,
        )
        self.log.operate(Submit, request.number, blocks, tail, *of)

    def dispatch(
        self,
        prompt: Prompt,
        max_output_tokens: int,
        arrival_ms: float,
        *,
        priority: int = 0,
        recorded_ms: float | None = None,
        abort_after_tokens: int | None = None,
    ) -> EngineRequest:
        """Take a request that has arrived, for code that drives several engines on one clock and decides their order.

        Args:
            prompt: as `submit` takes it.
            max_output_tokens: as `submit` takes it.
            arrival_ms: when it arrived; its times count from then.
            priority: its priority.
            recorded_ms: when it is dispatched, for callers that also record its passes (`record_passes`); None: it is
                not recorded.
            abort_after_tokens: as `submit` takes it.

        Raises:
            OutOfBlocks: prompt and output can never fit; in 1.6.1 a pass rejects a prompt that alone is too large
                instead (vllm).
        """
        self.worker.accept(prompt)
        if not self.size.rejects_prompt(prompt.length(self.args.block_size)):
            self._check_size(prompt, max_output_tokens)
        request = self._open(prompt, max_output_tokens, arrival_ms, priority)
        self._aborts.plan(request, None, abort_after_tokens)
        self.scheduler.submit(request)
        if recorded_ms is not None:
            self._record_submit(request, recorded_ms, priority or None, None, abort_after_tokens)
        return request

    # ---------------------------------------------------------------------------------- handoffs between engines

    def expect(
        self, prompt: Prompt, max_output_tokens: int, arrival_ms: float, *, abort_after_tokens: int | None = None
    ) -> EngineRequest:
        """Open a request without giving it to the scheduler, because another engine computes its prompt.

        Returns:
            The request; in 1.6.1 it is rejected if the prompt alone is larger than all blocks.

        Raises:
            OutOfBlocks: prompt and output can never fit.
            ValueError: the prompt has keys that the engine's block hashes do not cover.
        """
        self.worker.accept(prompt)
        rejected = self.size.rejects_prompt(prompt.length(self.args.block_size))
        if not rejected:
            self._check_size(prompt, max_output_tokens)
        request = self._open(prompt, max_output_tokens, arrival_ms, 0)
        self._aborts.plan(request, None, abort_after_tokens)
        if rejected:
            request.status = "failed"
            self.worker.requests.remove(request)
        return request

    @property
    def can_reserve(self) -> bool:
        """Whether blocks can be reserved for a prompt that another engine computes."""
        return protocol_mismatch(self._driver, ReservingDriver) is None

    def reserve(self, request: EngineRequest) -> int | None:
        """Reserve blocks for the whole prompt of a request that was not submitted.

        Returns:
            The number of blocks that are not cached; None if there are not enough blocks.
        """
        driver = cast("ReservingDriver", self._driver)  # as can_reserve says
        return driver.reserve(request.state, request.prompt_tokens)

    def activate(self, request: EngineRequest) -> None:
        """Submit a request whose prompt another engine computed into the blocks reserved for it."""
        driver = cast("ReservingDriver", self._driver)  # as can_reserve says
        driver.claim(request.state, request.prompt_tokens)
        request.computed_tokens = request.prompt_tokens
        self.scheduler.activate(request)

    def hold_back_prompts(self, holds: bool) -> None:
        """Admit only requests whose prompt is computed, or all requests again."""
        self.scheduler.holds_back_prompts = holds

    def give_back(self, request: EngineRequest) -> None:
        """Free the blocks that were reserved for a request whose prompt will not be computed."""
        self._driver.free(request.state, done=True)
        request.status = "aborted"
        self.worker.requests.remove(request)

    def release(self, request: EngineRequest) -> None:
        """Free the blocks of a finished request that keeps them."""
        self._driver.free(request.state, done=True)
        self.worker.requests.remove(request)

    # ---------------------------------------------------------------------------------------------- opening requests

    def _open(self, prompt: Prompt, max_output_tokens: int, arrival_ms: float, priority: int) -> EngineRequest:
        rng = self.token_source(prompt) if prompt.has_tokens else None
        reasoning = self.args.reasoning
        planned: dict[int, int] = {}
        if reasoning is not None:
            for position in (0, reasoning.num_thinking_tokens(max_output_tokens) - 1):
                token = reasoning.token_at(position, max_output_tokens)
                if token is not None:
                    planned[position] = token
        request = EngineRequest(
            self,
            self._driver.open(prompt),
            prompt,
            prompt.length(self.args.block_size),
            max_output_tokens,
            rng=rng,
            planned=planned,
            arrival_ms=arrival_ms,
            priority=priority,
        )
        request.max_output_tokens = self.size.output_of(request.prompt_tokens, max_output_tokens)
        request.opened = len(self.requests)
        self.requests.append(request)
        self.worker.requests.append(request)
        return request

    def _next_source(self, prompt: Prompt) -> Random:  # noqa: ARG002 - who records requests looks at it
        """Return the next source of generated tokens."""
        return Random(self._rng.getrandbits(64))  # noqa: S311 - mock data

    def _check_size(self, prompt: Prompt, max_output_tokens: int) -> None:
        asked = prompt.length(self.args.block_size)
        self.size.check(asked, max_output_tokens, f"a request of {asked} + {max_output_tokens} tokens", repr(self))

    def _check_arrival(self, arrival_ms: float | None) -> float:
        last = self._arriving[-1].arrival_ms if self._arriving else self._last_delivered
        if arrival_ms is None:
            return max(self.now_ms, last)
        check_number("arrival_ms", arrival_ms, unit=" (milliseconds)")
        if arrival_ms < last:
            raise ValueError(
                f"arrival_ms must be at least {last!r}, the arrival of the request before it, got "
                f"{arrival_ms!r}: requests are submitted in the order of their arrival"
            )
        return float(arrival_ms)

    def _check_priority(self, priority: int | None) -> None:
        if priority is None:
            return
        if not is_integer(priority):
            raise ValueError(f"priority must be an integer, got {priority!r:.80}")
        if not self.scheduler.has_priorities:
            raise ValueError(f"priority is for engines whose policy has priorities (backend sglang); this is {self!r}")

    def abort(self, request: EngineRequest) -> None:
        """Call off an open request (`MockEngine.abort`)."""
        if not ((request.is_open and request in self.worker.requests) or self.ends(request)):
            raise RequestError(f"abort of {request!r}, which is not an open request of {self!r}")
        if self.on_abort is not None:
            self.on_abort(request)
        else:
            self.call_off(request)

    def ends(self, request: EngineRequest) -> bool:
        """Return whether the pass under way ends a request, whose end is not reported yet."""
        done = self._under_way
        return done is not None and (request in done.finished or request in done.rejected)

    def call_off(self, request: EngineRequest, *, in_pass: bool = False) -> None:
        """Act on an open request whose client is gone, for code that drives several engines on one clock.

        Args:
            request: the request.
            in_pass: whether a planned pass is under way, at whose end `end_plan` is called.
        """
        if in_pass or self._under_way is not None:
            self._aborts.note(request)
        else:
            self._take_out(request)

    def _take_out(self, request: EngineRequest, is_planned: bool = False) -> bool:
        """Remove a request whose client is gone, between two passes; return False if it has one more pass.

        Args:
            request: the request.
            is_planned: whether the abort was given, and so recorded, at submission.
        """
        if request.number and not is_planned:  # a request of `dispatch` may have none
            self._record(Abort, request.number)
        scheduler = self.scheduler
        if request in self._arriving:
            self._arriving.remove(request)
        elif not self._is_scheduled(request):  # another engine computes its prompt, or it computes the prompt for one
            self._driver.free(request.state, done=True)
        elif not scheduler.call_off(request):
            return False
        request.status, request.ended_ms = "aborted", self.now_ms
        self.worker.requests.remove(request)
        request.end()
        self._look_idle()
        return True

    def _is_scheduled(self, request: EngineRequest) -> bool:
        scheduler = self.scheduler
        return request in scheduler.running or request in scheduler.waiting or request in scheduler.parked

    def _drop(self, request: EngineRequest) -> None:
        """Remove a request from the queues and free its blocks, because the engine is closed."""
        if request.number:  # a request of `dispatch` has none
            self._record(Abort, request.number)
        if request in self._arriving:
            self._arriving.remove(request)
        elif self._is_scheduled(request):
            self.scheduler.abort(request)
        else:  # another engine computes its prompt, or it computes the prompt for one
            self._driver.free(request.state, done=True)
        if request.is_open:
            request.status = "aborted"

    def close(self) -> None:
        """Drop the engine (`MockEngine.close`)."""
        self.catch_up()
        self.worker.release_events()
        # In this order each request is at an end of its queue, so a search among thousands is quick.
        order = (*self._arriving, *self.scheduler.waiting, *reversed(self.scheduler.running))
        own = [each for each in self.worker.requests if isinstance(each, EngineRequest)]
        requests = dict.fromkeys((*(cast("EngineRequest", each) for each in order), *own))
        for request in requests:
            self._drop(request)
        self.worker.requests[:] = [each for each in self.worker.requests if each not in requests]
        self._aborts.clear()
        self._forget_pass()
        self.scheduler.holds_back_prompts = False
        self._idle_passes = 0
        self._look_idle()

    def _forget_pass(self) -> None:
        """Remove the results of the pass under way from requests and figures, because it will never end."""
        done, self._under_way = self._under_way, None
        if done is None:
            return
        for request in done.generated:
            count = done.bursts.get(request, 1)
            del request.token_ms[-count:]
            request.generated_tokens -= count
        for request in (*done.finished, *done.rejected, *done.aborted):
            request.status, request.ended_ms = "aborted", None
        self.passes -= 1
        self.prefill_tokens -= done.prefill_tokens
        self._prefill_ms -= done.prefill_ms
        self._preemptions -= len(done.preempted)

    # -------------------------------------------------------------------------------------------------- time

    def step(self) -> ForwardPass:
        """Run one forward pass (`MockEngine.step`)."""
        self._record(RunPasses, 1, self.worker.worker_id, self.worker.dp_rank)
        self.catch_up()
        return self._step()

    def _wake(self, request: EngineRequest) -> bool:
        return self.scheduler.wake(request)  # the present scheduler

    def catch_up(self) -> None:
        """Bring all requests up to date; decode-only requests are otherwise updated late."""
        woken = self.scheduler.wake_all()
        done = self._under_way
        if done is not None and woken:
            done.generated += cast("list[EngineRequest]", woken)
            done.tokens += [0] * len(woken)  # no recorder reads them
            done.sleepers = 0

    def _record(self, operation: type[Operation], *fields: object) -> None:
        if self.log is not None:
            self.log.operate(operation, *fields)

    def _step(self) -> ForwardPass:
        while not self._is_ready() and not self.is_idle:
            pass
        done = self.start_pass(self.now_ms)
        self._aborts.during_pass(done.end_ms, done)
        self.finish_pass()
        self._aborts.at(self.now_ms)
        return done

    def _is_ready(self) -> bool:
        """Act on due aborts, and wait for the next arrival if nothing runs or waits; return whether a pass has
        something to do.
        """
        self._aborts.at(self.now_ms)
        if self._arriving and not self.has_work:
            self.now_ms = max(self.now_ms, self._arriving[0].arrival_ms)
            self._aborts.at(self.now_ms)
        return self.has_work or bool(self._arriving and self._arriving[0].arrival_ms <= self.now_ms)

    def run(self, until_ms: float | None = None) -> Report:
        """Run passes (`MockEngine.run`)."""
        self._check_until(until_ms)
        self._record(Run, until_ms, self.worker.worker_id, self.worker.dp_rank)
        until = math.inf if until_ms is None else until_ms
        try:
            while not self.is_idle and self.now_ms < until:
                if not self.has_work and self._arriving[0].arrival_ms >= until:
                    break
                if not self._is_ready():  # the request to be served was called off
                    continue
                self._step()
                next_arrival = self._arriving[0].arrival_ms if self._arriving else math.inf
                ends = self.plan(self.now_ms, min(until, next_arrival, self._aborts.next_ms))
                if ends:
                    self.run_plan(ends)
                    self._aborts.during_pass(self.now_ms, None)
                    self.end_plan()
                    self._aborts.at(self.now_ms)
        finally:
            self.catch_up()
        if until_ms is not None:
            self.now_ms = max(self.now_ms, until_ms)
            tiers = self.worker.tiers
            if tiers is not None and not self.has_work:  # otherwise its next pass advances this time
                tiers.pass_to(max(tiers.now, self.now_ms))
        return self.report

    def _check_until(self, until_ms: float | None) -> None:
        if until_ms is not None:
            check_number("until_ms", until_ms, unit=" (milliseconds)")

    def plan(self, now_ms: float, until_ms: float = math.inf) -> list[float]:
        """Return the ends of the passes that can be computed in one go with the same result; none is run yet.

        Args:
            now_ms: when the first pass starts.
            until_ms: each pass starts before this moment.
        """
        if self._listeners:
            return []
        left = self._aborts.passes_left  # it wakes the requests with a token limit
        ends = self.scheduler.plan(now_ms, until_ms)
        ends = ends if left is None else ends[:left]
        return ends if self._published is None else self._published.passes(ends)

    def run_plan(self, ends: list[float]) -> None:
        """Run planned passes: the first of them, or all."""
        self.scheduler.run_plan(ends)
        self.now_ms = ends[-1]
        self.passes += len(ends)
        self._idle_passes = 0
        if self._published is not None:
            self._published.ran(len(ends))

    def end_plan(self) -> None:
        """End planned passes that were run: requests called off during the last pass are removed, without its token."""
        self._aborts.end_pass(None, self.now_ms, has_last_pass=self.scheduler.has_last_pass)
        self._aborts.reached(None)
        self._look_idle()

    def record_passes(self, count: int) -> None:
        """Record `count` passes that another object drives, before they begin."""
        self._record(RunPasses, count, self.worker.worker_id, self.worker.dp_rank)

    def retract_pass(self) -> None:
        """Remove the record of the pass under way if its events are lost because the worker crashes."""
        if self.log is not None and self._under_way is not None and self.args.events_visible_at == "pass_end":
            self.log.retract_pass(self.worker.worker_id, self.worker.dp_rank)

    def start_pass(self, now_ms: float) -> ForwardPass:
        """Start the next pass at this moment without ending it, for code that drives several engines on one clock.

        Its results are there at once; events that are visible at its end are held until `finish_pass`.

        Raises:
            RequestError: a pass is under way.
        """
        if self._under_way is not None:
            raise RequestError(f"start_pass while a pass of {self!r} is under way; finish_pass ends it")
        self.now_ms = now_ms
        arriving = self._arriving
        while arriving and arriving[0].arrival_ms <= now_ms:
            self._last_delivered = arriving[0].arrival_ms
            self.scheduler.submit(arriving.popleft())
        worker = self.worker
        holds = self.args.events_visible_at == "pass_end"
        worker.step_begins(held=holds)
        if self._published is not None:
            self._published.start_pass()
        if holds:
            worker.hold_events()
        try:
            done = self.scheduler.execute_pass(now_ms)
        except FullReportError:
            worker.crash()
            raise
        except BaseException:  # for example from a user's performance model; computed tokens stay
            worker.release_events()
            raise
        for request in (*done.finished, *done.rejected, *done.aborted):
            request.ended_ms = done.end_ms
            if not request.keeps_blocks or request.status == "rejected":
                own = cast("EngineRequest", request)  # it got no other requests
                worker.requests.remove(own)
                own.end()
        self._under_way = done
        self._preemptions += len(done.preempted)
        self.prefill_tokens += done.prefill_tokens
        self._prefill_ms += done.prefill_ms
        self.passes += 1
        return done

    def end_pass_at(self, end_ms: float) -> None:
        """Let the pass under way end at a moment not before its own end, for ranks in lock step."""
        done = self._under_way
        assert done is not None
        done.end_ms = end_ms
        for request in done.generated:
            count = done.bursts.get(request, 1)
            request.token_ms[-count:] = [end_ms] * count
        for request in (*done.finished, *done.rejected, *done.aborted):
            request.ended_ms = end_ms

    def finish_pass(self, *, blocks_may_come: bool = False) -> ForwardPass:
        """End the pass under way: publish its events, call its listeners, and set the time to its end.

        Args:
            blocks_may_come: whether blocks may come from elsewhere, so a pass without progress does not count as
                stalled.

        Raises:
            EngineStalled: its requests can never make progress.
            RequestError: no pass is under way.
        """
        done = self._under_way
        if done is None:
            raise RequestError(f"finish_pass while no pass of {self!r} is under way; start_pass starts one")
        self._under_way = None
        self.now_ms = done.end_ms
        self._aborts.end_pass(done, done.end_ms, has_last_pass=self.scheduler.has_last_pass)
        if self._published is not None:
            self._published.end_pass(done, is_idle=not self.has_work)
        self.worker.release_events()
        # Passes of no time that repeat count even then, because no token comes at this moment.
        if not blocks_may_come or (done.end_ms == done.start_ms and done.did_something):
            self._watch(done)
        for listener in self._listeners:
            listener(done)
        self._aborts.reached(done)
        self._look_idle()
        return done

    def _look_idle(self) -> None:
        """Publish the events that wait in the cache if no request runs or waits."""
        if self._published is not None and self._under_way is None:
            self._published.look(is_idle=not self.has_work)

    def _watch(self, done: ForwardPass) -> None:
        """Raise after enough passes without progress to show that there will be none."""
        if done.has_generated or done.rejected or done.aborted or self.is_idle:
            self._idle_passes = 0
            return
        self._idle_passes += 1
        if self._idle_passes <= MOST_IDLE_PASSES:
            return
        scheduler = self.scheduler
        # A long prompt may need many passes, in small parts, before its first token.
        budget = self.args.budget
        waiting = (*scheduler.waiting, *scheduler.parked)
        open_tokens = sum(len(request) for request in (*scheduler.running, *waiting))
        tiers = self.worker.tiers
        # Each device block may have to move to the host and back separately.
        transfers = 0 if tiers is None else 2 * self.args.num_gpu_blocks
        if self._idle_passes > MOST_IDLE_PASSES + transfers + 2 * open_tokens / (budget or math.inf):
            lost = None if tiers is None else tiers.lost_text
            raise EngineStalled(done.end_ms, tuple(scheduler.running), waiting, self._idle_passes, lost)
