"""Operations, done on the workers of a harness.

What an operation does is written here and nowhere else. It raises whatever a worker raises, and returns the answer:
which errors are no failure is for its callers to decide, who derive from it or catch them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, get_args

from pytest_kvmock.events import BlockTokens, Stored
from pytest_kvmock.programs.operations import (
    Abort,
    Burst,
    Clear,
    Decode,
    DropNext,
    Finish,
    Name,
    Operation,
    Preempt,
    Prefill,
    RemoveWorker,
    Restart,
    Resume,
    Run,
    RunPasses,
    Serve,
    ServeNear,
    Step,
    Submit,
    Tick,
    WithPrompt,
)
from pytest_kvmock.tokens import Prompt


class OpenRequest(Protocol):
    """What a program needs of a request (`engine.worker.Request`)."""

    cached_tokens: int

    @property
    def status(self) -> str: ...  # noqa: D102 - as Request has it

    def decode(self, tokens: int | tuple[int, ...], /) -> None: ...  # noqa: D102 - likewise
    def finish(self) -> None: ...  # noqa: D102 - likewise
    def preempt(self) -> None: ...  # noqa: D102 - likewise
    def resume(self) -> None: ...  # noqa: D102 - likewise


class _Served(Protocol):
    @property
    def cached_tokens(self) -> int: ...


class Worker(Protocol):
    """What a program needs of a worker (`engine.worker.KvWorker`)."""

    def prefill(self, prompt: Prompt, /, *, wait: bool = True) -> OpenRequest: ...  # noqa: D102 - as KvWorker has it
    def serve(self, prompt: Prompt, output_tokens: int, /) -> _Served: ...  # noqa: D102 - likewise
    def tick(self, now: float, /) -> None: ...  # noqa: D102 - likewise
    def clear(self) -> bool: ...  # noqa: D102 - likewise
    def restart(self, *, announced: bool) -> None: ...  # noqa: D102 - likewise


class SubmittedRequest(Protocol):
    """What a program needs of a request of an engine (`fleet.EngineRequest`)."""

    @property
    def is_open(self) -> bool: ...  # noqa: D102 - as EngineRequest has it

    def abort(self) -> None: ...  # noqa: D102 - likewise


class Engine(Protocol):
    """What a program needs of an engine (`fleet.MockEngine`)."""

    passes: int

    def submit(  # noqa: D102 - as MockEngine has it
        self, prompt: Prompt, max_output_tokens: int, arrival_ms: float | None, /, *, priority: int | None
    ) -> SubmittedRequest: ...
    def step(self) -> object: ...  # noqa: D102 - likewise
    def run(self, until_ms: float | None, /) -> object: ...  # noqa: D102 - likewise


class Sink(Protocol):
    """What a program needs of a sink (`harness.user_sink.KvSink`)."""

    def publish(self, event: Stored, /, *, token_ids: BlockTokens | None) -> None: ...  # noqa: D102 - as KvSink has it


class Profile(Protocol):
    """What a program needs of a profile (`backends.EngineProfile`)."""

    @property
    def block_size(self) -> int: ...  # noqa: D102 - as EngineProfile has it


class Harness(Protocol):
    """What a program needs of the harness it is played on (`harness.RouterHarness`)."""

    @property
    def profile(self) -> Profile: ...  # noqa: D102 - as RouterHarness has it

    def worker(self, worker_id: int, dp_rank: int, /) -> Worker: ...  # noqa: D102 - as RouterHarness has it
    def engine(self, worker_id: int, dp_rank: int, /) -> Engine: ...  # noqa: D102 - likewise
    def remove_worker(self, worker_id: int, /) -> None: ...  # noqa: D102 - likewise
    def drop_next(self, n: int, /, *, kind: str | None) -> object: ...  # noqa: D102 - likewise
    def make_sink(self, *, chained: bool | None) -> Sink: ...  # noqa: D102 - likewise
    def burst(self) -> AbstractContextManager[None]: ...  # noqa: D102 - likewise


class Interpreter:
    """Does operations on the workers of a harness.

    Args:
        harness: whose workers serve.
        make_prompt: makes the prompt of a `Prefill` or `Serve` for a block size. By default each is made anew; who plays
            a program many times keeps them, since a prompt keeps its hashes.
        by_tokens: the index under test is asked by tokens: a `ServeNear` has such prompts.

    Attributes:
        requests: the requests that were admitted, by the names that their `Prefill` gave them.
        submitted: the requests that engines were given, by the names that their `Submit` gave them.
    """

    def __init__(
        self,
        harness: Harness,
        make_prompt: Callable[[WithPrompt, int], Prompt] = WithPrompt.prompt,
        *,
        by_tokens: bool = False,
    ) -> None:
        self.requests: dict[Name, OpenRequest] = {}
        self.submitted: dict[Name, SubmittedRequest] = {}
        self._harness = harness
        self._make_prompt = make_prompt
        self._by_tokens = by_tokens

    def do(self, step: Operation) -> Any:
        """Do one operation.

        Returns:
            Of a Prefill, Resume or Serve, how many tokens of the prompt were cached; of a RunPasses or Run, how many
            passes there were; of a Clear, whether it was done; else None.

        Raises:
            KeyError: it is about a request that was not admitted, or not submitted.
            TypeError: it is no operation.
            Exception: whatever the worker, the request or the harness raises.
        """
        harness, requests = self._harness, self.requests
        match step:
            case Prefill():
                worker = harness.worker(step.worker, step.rank)
                prompt = self._prompt(step)
                request = worker.prefill(prompt) if step.wait else worker.prefill(prompt, wait=False)
                requests[step.name] = request
                return request.cached_tokens
            case Decode():
                requests[step.name].decode(step.argument)
            case Finish():
                requests[step.name].finish()
            case Preempt():
                requests[step.name].preempt()
            case Resume():
                request = requests[step.name]
                request.resume()
                return request.cached_tokens
            case Serve():
                worker = harness.worker(step.worker, step.rank)
                return worker.serve(self._prompt(step), step.output_tokens).cached_tokens
            case Submit():
                engine = harness.engine(step.worker, step.rank)
                prompt, priority = self._prompt(step), step.priority
                submitted = engine.submit(prompt, step.output_tokens, step.arrival_ms, priority=priority)
                self.submitted[step.name] = submitted
            case Abort():
                self.submitted[step.name].abort()
            case RunPasses():
                engine = harness.engine(step.worker, step.rank)
                for _ in range(step.count):
                    engine.step()
                return step.count
            case Run():
                engine = harness.engine(step.worker, step.rank)
                before = engine.passes
                engine.run(step.until_ms)
                return engine.passes - before
            case Tick():
                harness.worker(step.worker, step.rank).tick(step.now_ms)
            case Clear():
                return harness.worker(step.worker, step.rank).clear()
            case Burst():
                harness.worker(step.worker, step.rank)  # made now, if there is none: what it publishes then is no burst
                with harness.burst():
                    for served in step.served:
                        self.do(served)
            case ServeNear():
                size, by_tokens = harness.profile.block_size, self._by_tokens
                sink = harness.make_sink(chained=False)
                for data, tokens in step.published(size, by_tokens=by_tokens):
                    sink.publish(data, token_ids=tokens)
                self.do(step.served(size, by_tokens=by_tokens))
            case Restart():
                harness.worker(step.worker, step.rank).restart(announced=step.announced)
            case RemoveWorker():
                harness.remove_worker(step.worker)
            case DropNext():
                harness.drop_next(step.count, kind=step.of)
            case _:
                *most, last = (operation.__name__ for operation in get_args(Step))
                raise TypeError(f"a program has {', '.join(most)} and {last}, got {step!r:.80}")
        return None

    def _prompt(self, step: WithPrompt) -> Prompt:
        return self._make_prompt(step, self._harness.profile.block_size)
