"""One rank of a served engine: it takes requests, runs passes one after the other, and returns tokens.

One subject: the life of one rank. Theory of operation. All code here runs in the server's thread, and holds the
harness's lock while it uses engine or ledger. A pass begins, takes its time on the wall clock (`time_scale`), and ends.
Its events are one batch, which is on the wire before any client gets its tokens. A request that arrives during a pass
waits for the next pass, as in a real engine. An exception of the engine breaks it, and is printed on standard error
once: its requests fail, it takes no more requests, and it runs no further pass.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.base.pair_options import IN_ROOMS
from pytest_kvmock.engines.worker import RequestError
from pytest_kvmock.fleets.clock.engine_loads import load_of
from pytest_kvmock.servers.capture.lines import CaptureError
from pytest_kvmock.servers.serve.answers import CompletionChoice
from pytest_kvmock.servers.serve.api import RankState
from pytest_kvmock.servers.serve.loop_thread import print_error
from pytest_kvmock.servers.serve.text import Letters, letters_of
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.engines import HarnessEngine
    from pytest_kvmock.servers.serve.api import Generate
    from pytest_kvmock.servers.serve.request_log import ServedRequest
    from pytest_kvmock.servers.serve.served_pairs import ServedPairs
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher


class Job:
    """One request of a client: its choices, and their tokens that were not sent yet.

    Attributes:
        asked: the request.
        choices: its choices, in the order of the answer.
        rows: the log's entry for each prompt.
        fresh: choices with new tokens, each with the number of these tokens.
        changed: set when there are new tokens, or the request has ended.
        left: number of choices that have not ended.
        failure: why it cannot be served; None if it can.
        failure_kind: the type of that error in the answer.
    """

    __slots__ = ("asked", "changed", "choices", "failure", "failure_kind", "fresh", "left", "rows")

    def __init__(self, asked: Generate, rows: Sequence[ServedRequest]) -> None:
        self.asked = asked
        self.rows = rows
        self.choices = [
            CompletionChoice(position * asked.n + number, len(prompt))
            for position, prompt in enumerate(asked.prompts)
            for number in range(asked.n)
        ]
        self.fresh: list[tuple[CompletionChoice, int]] = []
        self.changed = asyncio.Event()
        self.left = len(self.choices)
        self.failure: str | None = None
        self.failure_kind = "InternalServerError"

    @property
    def is_over(self) -> bool:
        """Whether no more tokens will come."""
        return not self.left or self.failure is not None


class _Running:
    """One choice while an engine serves it."""

    __slots__ = ("choice", "job", "leg", "row", "source")

    def __init__(self, job: Job, choice: CompletionChoice, row: ServedRequest, source: Letters) -> None:
        self.job = job
        self.choice = choice
        self.row = row
        self.source = source
        self.leg: Any = None  # of a P/D pair


class EngineLoop:
    """Drives one rank of an engine.

    Args:
        harness: the harness of the engine.
        engine: the engine.
        publisher: sends its events.
        time_scale: the time of a pass on the wall clock, as a share of its virtual time; 0: none.
        seed: seed of generated tokens.
        open_changed: set whenever a choice opens or ends.
        pairs: the P/D pairs of the server; None: its engines have no roles.

    Attributes:
        engine: the engine.
        state: its visible state.
        held: whether passes wait for `step` or `release`.
        steps: number of passes that may run while it is held.
        error: why it is broken; None if it is not.
        lock: the lock of the harness.
        pairs: the P/D pairs of the server; None: its engines have no roles.
        frozen: whether it is paused with its requests, so that no pass runs.
        clears_when_idle: whether its cache is emptied as soon as no request is open, because of a pause.
    """

    def __init__(
        self,
        harness: RouterHarness,
        engine: HarnessEngine,
        publisher: KvPublisher,
        *,
        time_scale: float,
        seed: int,
        open_changed: asyncio.Event,
        pairs: ServedPairs | None = None,
    ) -> None:
        self.pairs = pairs
        self.state = RankState()
        self.held = False
        self.steps = 0
        self.error: str | None = None
        self.frozen = self.clears_when_idle = False
        self._publisher = publisher
        self._scale = time_scale
        self._seed = seed
        self._open_changed = open_changed
        self._running: dict[Any, _Running] = {}  # by `EngineRequest`
        self._wake = asyncio.Event()
        self._roused = 0  # number of calls of `rouse`
        self._is_quiet = False  # the last pass did nothing, and none is useful before the next `rouse`
        self._stepped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.use(harness, engine)

    def use(self, harness: RouterHarness, engine: HarnessEngine) -> None:
        """Start to drive an engine, which must not be broken; no request may be open."""
        self._harness = harness
        self.lock = harness.publisher.lock
        self.engine = engine
        self.error = None
        engine.driver = "a KvServer"
        engine.output_of = lambda prompt: letters_of(self._seed, prompt.tokens)
        if self.pairs is not None:
            self.pairs.join(self)

    def start(self) -> None:
        """Start to run passes."""
        self._task = asyncio.get_running_loop().create_task(self._drive())

    async def stop(self) -> None:
        """Run no further pass; finish a pass that is under way."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self.error is not None:
            self.let_go()
            return
        with self.lock:
            if self.engine.is_in_pass:
                with suppress(Exception), self.guarded(), self._publisher.step():
                    self.engine.inside.finish_pass()
            self._leave()

    def let_go(self) -> None:
        """Close the engine, including a pass that is under way, and stop driving it."""
        with self.lock:
            with suppress(Exception), self.guarded():
                self.engine.close()
            self._leave()

    def _leave(self) -> None:
        self.engine.driver = None
        self.engine.output_of = None

    def halt(self) -> None:
        """Run no further pass and clean nothing up, for a process that ends now."""
        if self._task is not None:
            self._task.cancel()
        self._running.clear()

    def restart(self) -> None:
        """Restart the engine, announced to the harness."""
        with self.lock, self.guarded():
            self.engine.worker.restart(announced=True)
            if self.pairs is not None:
                self.pairs.join(self)
        self.rouse()

    def clear(self) -> bool:
        """Empty the cache; return whether this was possible."""
        with self.lock, self.guarded():
            worker, tiers = self.engine.worker, self.engine.worker.tiers
            if worker.clear():
                return True
            if tiers is None or self.engine.has_work:
                return False
            while (deadline := tiers.parking.deadline) is not None:  # copies of an idle server end (SGLang's HiCache)
                worker.tick(max(worker.now, deadline))
            return worker.clear()

    # ------------------------------------------------------------------------------------------------------- pauses

    def _end_pass_now(self) -> None:
        """End a pass that is under way before its time on the wall clock is over."""
        if self.engine.is_in_pass:
            with self._publisher.step():
                done = self.engine.inside.finish_pass()
            self._note_state()
            self._give_out(done)

    def preempt_all(self) -> None:
        """Let running requests wait again, without their blocks; they are computed again later."""
        with self.lock, self.guarded():
            self._end_pass_now()
            with self._publisher.step():
                self.engine.inside.scheduler.preempt_all()

    def reset(self, *, running: bool = False, external: bool = False) -> bool:
        """Empty the cache as vLLM does: the Cleared is published with the next step. Return False if a request runs.

        Args:
            running: whether to preempt running requests first.
            external: whether to empty the host, too.
        """
        if running:
            self.preempt_all()
        with self.lock, self.guarded():
            worker = self.engine.worker
            if self.engine.inside.scheduler.running or self.engine.inside.scheduler.parked or not worker.reset():
                return False
            if external and worker.tiers is not None:
                worker.tiers.cancel()
            return True

    def flush_retracted(self) -> bool:
        """Empty the cache while all requests wait without blocks, as SGLang does after a pause that retracts them."""
        with self.lock, self.guarded():
            scheduler = self.engine.inside.scheduler
            if not self.frozen or scheduler.running or scheduler.parked or self.engine.is_in_pass:
                return False
            with self._publisher.step():
                return self.engine.worker.reset()

    def end_requests(self, names: Callable[[str], bool]) -> None:
        """End open requests, chosen by their ids in answers, as an engine does on an abort."""
        with self.lock, self.guarded():
            self._end_pass_now()
        for request, running in list(self._running.items()):
            if not names(running.job.asked.id):
                continue
            del self._running[request]
            self._abort(request)
            self.state.finished["abort"] += 1
            choice = running.choice
            choice.finish_reason = "abort"
            choice.usage.completion_tokens = len(choice.tokens)
            running.job.left -= 1
            running.job.changed.set()
        self._open_changed.set()
        self._wake.set()

    # ----------------------------------------------------------------------------------------------- what goes wrong

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within the context, an exception of the engine breaks it and is raised again; a rejection does not break it.

        A rejection is a ValueError other than a `CaptureError`.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, CaptureError) or not isinstance(error, ValueError):
                self.break_down(error)
            raise

    def break_down(self, error: Exception) -> None:
        """Mark the engine as broken, and end all open requests."""
        if self.error is None:
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
            worker = self.engine.worker
            print_error(f"worker {worker.worker_id} rank {worker.dp_rank} is broken: {self.error}")
        self.fail(self.error)

    # ------------------------------------------------------------------------------------------------- requests

    def generated(self, tokens: Sequence[int], count: int) -> str:
        """Return the first tokens that the engine generates for a prompt, as a text."""
        source = letters_of(self._seed, tokens)
        return "".join(chr(source.getrandbits(32)) for _ in range(count))

    @property
    def num_open(self) -> int:
        """Number of choices that have not ended."""
        return len(self._running)

    def submit(self, job: Job, prompts: Sequence[Prompt], positions: Sequence[int]) -> None:
        """Give the engine the choices of a request.

        Args:
            job: the request.
            prompts: all prompts of the request.
            positions: the positions of the prompts that this rank serves.

        Raises:
            OutOfBlocks: a prompt can never fit; then none is submitted.
            PairRefused: an engine of a P/D pair rejects the request.
        """
        asked, engine = job.asked, self.engine
        given: list[EngineRequest] = []
        output = asked.max_tokens
        if self.pairs is not None:
            self.pairs.check(asked)
            output = self.pairs.output_of(self, asked)
        with self.lock:
            try:
                for choice in job.choices:
                    position = choice.index // asked.n
                    if position not in positions:
                        continue
                    request = engine.inside.dispatch(
                        prompts[position],
                        output,
                        engine.now_ms,
                        priority=asked.priority,
                        recorded_ms=engine.now_ms,
                    )
                    given.append(request)
                    source = letters_of(self._seed, asked.prompts[position])
                    running = self._running[request] = _Running(job, choice, job.rows[position], source)
                    if self.pairs is not None:
                        running.leg = self.pairs.open(self, request, asked, position)
                        if running.leg is not None:
                            self.pairs.meet(job.rows[position], running.leg.name)
                    self._open_changed.set()
            except BaseException:
                for request in given:
                    del self._running[request]
                    if request.is_open:
                        engine.abort(request)
                raise
        self.rouse()

    def abort(self, job: Job) -> None:
        """Abort the open choices of a request whose client has disconnected."""
        for request in [each for each, running in self._running.items() if running.job is job]:
            del self._running[request]
            self._abort(request)
            self.state.finished["abort"] += 1
        self._open_changed.set()
        self.rouse()

    def fail(self, reason: str) -> None:
        """End all open requests with a reason: the engine has lost them, or is replaced."""
        jobs = dict.fromkeys(running.job for running in self._running.values())
        requests = list(self._running)
        self._running.clear()
        for request in requests:
            self._abort(request)
        self._open_changed.set()
        for job in jobs:
            job.failure = reason
            job.changed.set()

    def _abort(self, request: EngineRequest) -> None:
        with self.lock:
            if request.is_open:
                with suppress(Exception), self.guarded(), suppress(RequestError):
                    self.engine.abort(request)

    # --------------------------------------------------------------------------------------------------- passes

    def allow(self, *, steps: int = 0) -> None:
        """Allow `steps` more passes while it is held. Below 0: withdraw some; 0: only check `held` again."""
        self.steps = max(0, self.steps + steps)
        self.rouse()

    def rouse(self) -> None:
        """Check again whether there is work."""
        self._roused += 1
        self._is_quiet = False
        self._wake.set()

    async def stepped(self) -> None:
        """Wait until the allowed passes have run, or there is no work left."""
        while self.steps and self._has_passes:
            self._stepped.clear()
            await self._stepped.wait()
        self.steps = 0

    @property
    def _has_passes(self) -> bool:
        return self.error is None and self.engine.has_work and not self._is_quiet

    @property
    def _may_pass(self) -> bool:
        return self._has_passes and not self.frozen and (not self.held or self.steps > 0)

    async def _drive(self) -> None:
        while True:
            if not self._may_pass:
                self._wake.clear()
                self._notice()
                if not self._wake.is_set():
                    self._stepped.set()
                    await self._wake.wait()
                continue
            try:
                await self._pass()
            except Exception as error:  # noqa: BLE001 - whatever it is, clients are waiting
                self.break_down(error)
            self.steps = max(0, self.steps - 1)
            self._stepped.set()

    def _notice(self) -> None:
        """For a P/D pair, run a step that computes nothing, so that reports of other engines and due changes apply."""
        if self.pairs is None or self.held or self.error is not None:
            return
        with self.lock, suppress(Exception), self.guarded(), self._publisher.step():
            self.pairs.step(self)

    @property
    def in_rooms(self) -> bool:
        """Whether it is an engine of SGLang's pairs, whose failed legs have a special answer."""
        return self.pairs is not None and self.pairs.way == IN_ROOMS

    def lose(self, request: Any, reason: str) -> None:
        """End a request that its engine ended with an error, and all other choices of its client."""
        running = self._running.pop(request, None)
        if running is not None:
            running.job.failure, running.job.failure_kind = reason, "500" if self.in_rooms else "InternalServerError"
            self.abort(running.job)
            running.job.changed.set()

    async def _pass(self) -> None:
        engine, roused = self.engine, self._roused
        with self.lock, self._publisher.step():
            engine.inside.record_passes(1)
            if self.pairs is not None:
                self.pairs.begin_pass(self)
            begun = engine.inside.start_pass(engine.now_ms)
        await asyncio.sleep((begun.end_ms - begun.start_ms) / 1000 * self._scale)
        with self.lock:
            if engine is not self.engine or not engine.is_in_pass:  # restarted or replaced in the meantime
                return
            with self._publisher.step():
                done = engine.inside.finish_pass(blocks_may_come=self.pairs is not None)
                if self.pairs is not None:
                    self.pairs.step(self)
                    self._note_answers(done)
                    self._is_quiet = not done.did_something and roused == self._roused
            self._note_state()
            self.say_load(force=any(each.prompt_tokens for each in done.scheduled))
        self._give_out(done)
        if self.clears_when_idle and not self._running and self.reset():
            self.clears_when_idle = False

    def say_load(self, *, force: bool) -> None:
        """Publish the load of the rank if it has a load stream and a message is due, after and between passes."""
        loads = self._publisher.loads
        if loads is None or self.error is not None:
            return
        with self.lock:
            rank = self.engine.worker.dp_rank
            loads.call(rank, lambda: load_of(self.engine, rank), force=force)

    def _note_answers(self, done: ForwardPass) -> None:
        """Record the hand-over parameters in the answers of legs that have ended."""
        assert self.pairs is not None
        for request in done.finished:
            running = self._running.get(request)
            if running is not None and running.leg is not None:
                running.choice.hand_over = running.row.handed = self.pairs.answer(self, running.leg)

    def _note_state(self) -> None:
        metrics = self.engine.metrics
        state = self.state
        state.running, state.waiting = metrics.running, metrics.waiting
        state.usage, state.num_blocks = metrics.cache_usage, metrics.total_blocks
        state.preemptions = metrics.preemptions

    def look(self) -> RankState:
        """Return the current state."""
        with self.lock:
            self._note_state()
        return self.state

    def _give_out(self, done: ForwardPass) -> None:
        """Give clients the tokens of a pass."""
        state, open_requests = self.state, self._running
        in_pairs = None if self.pairs is None else self.pairs.generated(self, done)
        for request in done.generated if in_pairs is None else in_pairs:
            running = open_requests.get(request)
            if running is None:
                continue
            choice, times, count = running.choice, request.token_ms, done.bursts.get(request, 1)
            if in_pairs is not None:
                count = in_pairs[request] - len(choice.tokens)
            choice.tokens += (running.source.getrandbits(32) for _ in range(count))
            state.generation_tokens += count
            if len(times) == count:
                self._admitted(request, running)
                state.ttft.add((times[0] - request.arrival_ms) / 1000)
            for at in range(max(len(times) - count, 1), len(times)):
                state.itl.add((times[at] - times[at - 1]) / 1000)
            running.job.fresh.append((choice, count))
            if request.status == "finished":
                self._finished(request, running, "length")
            running.job.changed.set()
        if self.pairs is not None:
            for request in [each for each in (*done.rejected, *done.aborted) if each.status != "rejected"]:
                self.lose(request, self.pairs.why_lost(self, request))
        for request in done.rejected:
            running = open_requests.pop(request, None)
            self._open_changed.set()
            if running is not None:
                running.job.failure = f"the engine rejected the request: {request.prompt_tokens} tokens never fit"
                running.job.changed.set()

    def _admitted(self, request: Any, running: _Running) -> None:
        state, usage = self.state, running.choice.usage
        usage.cached_tokens = request.cached_tokens
        if self.pairs is not None and (given := running.job.asked.hand_overs):
            position = running.choice.index // running.job.asked.n
            usage.cached_tokens = self.pairs.cached_tokens(self, given[position], request.cached_tokens)
        state.queried += request.prompt_tokens
        state.hits += request.cached_tokens
        state.prompt_tokens += request.prompt_tokens
        if running.row.cached_tokens is None:
            running.row.cached_tokens = request.cached_tokens

    def _finished(self, request: Any, running: _Running, reason: str) -> None:
        del self._running[request]
        self._open_changed.set()
        self.state.finished[reason] += 1
        self.state.e2e.add((request.token_ms[-1] - request.arrival_ms) / 1000)
        running.choice.finish_reason = reason
        running.choice.usage.completion_tokens = len(running.choice.tokens)
        running.row.output_tokens += len(running.choice.tokens)
        running.job.left -= 1
