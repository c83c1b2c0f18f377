"""One rank of a served engine: requests in, passes one after the other, tokens out.

Theory of operation. All here runs in the thread of the server, and holds the lock of the harness while it touches engine or ledger. A pass
begins, takes its time by the wall (`time_scale`), and ends; its events are one batch, which is on the wire before anybody hears of its
tokens. A request that arrives during a pass waits for the next one, as in a real engine. Whatever an engine raises breaks it, and is said on
standard error once: its requests fail, it takes no more of them, and it runs no further pass.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_kvmock.capture.lines import CaptureError
from pytest_kvmock.engine.worker import RequestError
from pytest_kvmock.serve.answers import CompletionChoice
from pytest_kvmock.serve.api import RankState
from pytest_kvmock.serve.loop_thread import print_error
from pytest_kvmock.serve.text import Letters, letters_of
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_kvmock.clock.engine_request import EngineRequest
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.engines import HarnessEngine
    from pytest_kvmock.schedulers.scheduler import ForwardPass
    from pytest_kvmock.serve.api import Generate
    from pytest_kvmock.serve.request_log import ServedRequest
    from pytest_kvmock.wire.zmq import KvPublisher


class Job:
    """One request of a client: its choices, and what of them was not sent yet.

    Attributes:
        asked: the request.
        choices: its choices, in the order of the answer.
        rows: of each prompt, what the log has of it.
        fresh: choices with tokens that were not taken yet, and those tokens.
        changed: set when there is something to take.
        left: how many choices are not over.
        failure: why it cannot be served; None: it can.
    """

    __slots__ = ("asked", "changed", "choices", "failure", "fresh", "left", "rows")

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

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return not self.left or self.failure is not None


class _Running:
    """One choice while an engine serves it."""

    __slots__ = ("choice", "job", "row", "source")

    def __init__(self, job: Job, choice: CompletionChoice, row: ServedRequest, source: Letters) -> None:
        self.job = job
        self.choice = choice
        self.row = row
        self.source = source


class EngineLoop:
    """Drives one rank of an engine.

    Args:
        harness: whose engine it is.
        engine: the engine.
        publisher: where its events are sent.
        time_scale: how long a pass takes by the wall, as a share of its virtual time; 0: none.
        seed: of what is generated.
        open_changed: set whenever a choice opens, or is over.

    Attributes:
        engine: as above.
        state: what it shows of itself.
        held: whether passes wait for `step` or `release`.
        steps: how many passes may run while it is held.
        error: why it is broken; None: it is not.
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
    ) -> None:
        self.state = RankState()
        self.held = False
        self.steps = 0
        self.error: str | None = None
        self._publisher = publisher
        self._scale = time_scale
        self._seed = seed
        self._open_changed = open_changed
        self._running: dict[Any, _Running] = {}  # by `EngineRequest`
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.use(harness, engine)

    def use(self, harness: RouterHarness, engine: HarnessEngine) -> None:
        """Drive an engine from now on, one that is not broken; nothing may be open."""
        self._harness = harness
        self._lock = harness.publisher.lock
        self.engine = engine
        self.error = None
        engine.driver = "a KvServer"
        engine.output_of = lambda prompt: letters_of(self._seed, prompt.tokens)

    def start(self) -> None:
        """Begin to run passes."""
        self._task = asyncio.get_running_loop().create_task(self._drive())

    async def stop(self) -> None:
        """Run no further pass; one that is under way ends."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self.error is not None:
            self.let_go()
            return
        with self._lock:
            if self.engine.is_in_pass:
                with suppress(Exception), self.guarded(), self._publisher.step():
                    self.engine.finish_pass()
            self._leave()

    def let_go(self) -> None:
        """Close the engine, with a pass that is under way, and leave it to others."""
        with self._lock:
            with suppress(Exception), self.guarded():
                self.engine.close()
            self._leave()

    def _leave(self) -> None:
        self.engine.driver = None
        self.engine.output_of = None

    def halt(self) -> None:
        """Run no further pass, and leave all as it is, with a pass that is under way: for a process that ends now."""
        if self._task is not None:
            self._task.cancel()
        self._running.clear()

    def restart(self) -> None:
        """Restart the engine, announced to the harness."""
        with self._lock, self.guarded():
            self.engine.worker.restart(announced=True)

    def clear(self) -> bool:
        """Empty the cache, and return whether that was possible."""
        with self._lock, self.guarded():
            worker, tiers = self.engine.worker, self.engine.worker.tiers
            if worker.clear():
                return True
            if tiers is None or self.engine.has_work:
                return False
            while (deadline := tiers.parking.deadline) is not None:  # copies of an idle server end (SGLang's HiCache)
                worker.tick(max(worker.now, deadline))
            return worker.clear()

    # ----------------------------------------------------------------------------------------------- what goes wrong

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within the context, what the engine raises breaks it, and is raised on; a refusal does not.

        A refusal is a ValueError; one that a capture cannot be written is none.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, CaptureError) or not isinstance(error, ValueError):
                self.break_down(error)
            raise

    def break_down(self, error: Exception) -> None:
        """Take the engine for broken, and end all that is open."""
        if self.error is None:
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
            worker = self.engine.worker
            print_error(f"worker {worker.worker_id} rank {worker.dp_rank} is broken: {self.error}")
        self.fail(self.error)

    # ------------------------------------------------------------------------------------------------- requests

    @property
    def num_open(self) -> int:
        """Choices that are not over."""
        return len(self._running)

    def submit(self, job: Job, prompts: Sequence[Prompt]) -> None:
        """Give the engine all choices of a request.

        Raises:
            OutOfBlocks: one can never fit; none was given then.
        """
        asked, engine = job.asked, self.engine
        given: list[EngineRequest] = []
        with self._lock:
            try:
                for choice in job.choices:
                    position = choice.index // asked.n
                    request = engine.dispatch(
                        prompts[position],
                        asked.max_tokens,
                        engine.now_ms,
                        priority=asked.priority,
                        recorded_ms=engine.now_ms,
                    )
                    given.append(request)
                    source = letters_of(self._seed, asked.prompts[position])
                    self._running[request] = _Running(job, choice, job.rows[position], source)
                    self._open_changed.set()
            except BaseException:
                for request in given:
                    del self._running[request]
                    engine.abort(request)
                raise
        self._wake.set()

    def abort(self, job: Job) -> None:
        """Abort what is open of a request, as its client has gone."""
        for request in [each for each, running in self._running.items() if running.job is job]:
            del self._running[request]
            self._abort(request)
            self.state.finished["abort"] += 1
        self._open_changed.set()
        self._wake.set()

    def fail(self, reason: str) -> None:
        """End all that is open with a reason: the engine has lost it, or is taken away."""
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
        with self._lock:
            if request.is_open:
                with suppress(Exception), self.guarded(), suppress(RequestError):
                    self.engine.abort(request)

    # --------------------------------------------------------------------------------------------------- passes

    def allow(self, *, steps: int = 0) -> None:
        """Let so many passes run while it is held, or take back so many; 0: look anew whether it is."""
        self.steps = max(0, self.steps + steps)
        self._wake.set()

    async def stepped(self) -> None:
        """Wait until the passes that were allowed have run, or nothing is left to run."""
        while self.steps and self._has_passes:
            self._stepped.clear()
            await self._stepped.wait()
        self.steps = 0

    @property
    def _has_passes(self) -> bool:
        return self.error is None and self.engine.has_work

    @property
    def _may_pass(self) -> bool:
        return self._has_passes and (not self.held or self.steps > 0)

    async def _drive(self) -> None:
        while True:
            if not self._may_pass:
                self._stepped.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._pass()
            except Exception as error:  # noqa: BLE001 - whatever it is, clients are waiting
                self.break_down(error)
            self.steps = max(0, self.steps - 1)
            self._stepped.set()

    async def _pass(self) -> None:
        engine = self.engine
        with self._lock, self._publisher.step():
            engine.record_passes(1)
            begun = engine.start_pass(engine.now_ms)
        await asyncio.sleep((begun.end_ms - begun.start_ms) / 1000 * self._scale)
        with self._lock:
            if engine is not self.engine or not engine.is_in_pass:  # restarted, or exchanged, in between
                return
            with self._publisher.step():
                done = engine.finish_pass()
            self._note_state()
        self._give_out(done)

    def _note_state(self) -> None:
        metrics = self.engine.metrics
        state = self.state
        state.running, state.waiting = metrics.running, metrics.waiting
        state.usage, state.num_blocks = metrics.cache_usage, metrics.total_blocks
        state.preemptions = metrics.preemptions

    def look(self) -> RankState:
        """Return the state as it is now."""
        with self._lock:
            self._note_state()
        return self.state

    def _give_out(self, done: ForwardPass) -> None:
        """Give clients the tokens of a pass."""
        state, open_requests = self.state, self._running
        for request in done.generated:
            running = open_requests.get(request)
            if running is None:
                continue
            choice, times, count = running.choice, request.token_ms, done.bursts.get(request, 1)
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
        for request in done.rejected:
            running = open_requests.pop(request, None)
            self._open_changed.set()
            if running is not None:
                running.job.failure = f"the engine rejected the request: {request.prompt_tokens} tokens never fit"
                running.job.changed.set()

    def _admitted(self, request: Any, running: _Running) -> None:
        state, usage = self.state, running.choice.usage
        usage.cached_tokens = request.cached_tokens
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
