"""A whole mock engine in virtual time: requests arrive, a scheduler decides, passes take time, tokens and events come
out. Its public class is here; `engine_inside` has the implementation.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Self

from pytest_kvmock.engines.backends import BACKENDS, BackendSpec, backend_spec
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.fleets.clock.engine_inside import EngineInside
from pytest_kvmock.fleets.clock.engine_parts import check_worker, make_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.engine_state import EngineMetrics
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.values.sinks import GivenSink
    from pytest_kvmock.values.tokens import Prompt, TokenIds


class MockEngine:
    """One engine in virtual time: a worker, its scheduler and a clock that only passes move.

    Args:
        args: its arguments; by default those with which Dynamo's mocker starts. It is one rank, whatever `dp_size`
            says.
        backend: name or spec of its block manager, if no worker is given; by default "lineage", or "sglang" for
            `engine_type="sglang"`.
        sink: where its events are published, if no worker is given.
        seed: seed of generated tokens and of the names of partial blocks.
        worker: the worker whose manager and requests it uses; its sizes must be those of `args`.

    Raises:
        ValueError: args and worker differ, the worker has an engine, or its backend has no scheduler of this type.

    Attributes:
        args: as given, with the release of Dynamo that it follows as `semantics`.
        worker: its worker: manager, requests, restarts.
        size: what can ever be served here.
        inside: its clock and its scheduler, for who drives several engines on one clock.
    """

    def __init__(
        self,
        args: MockEngineArgs | None = None,
        *,
        backend: str | BackendSpec | None = None,
        sink: GivenSink | None = None,
        seed: int = 0,
        worker: KvWorker | None = None,
    ) -> None:
        args = MockEngineArgs() if args is None else args
        if not isinstance(args, MockEngineArgs):
            raise ValueError(f"args must be MockEngineArgs, got {args!r:.80}")  # noqa: TRY004 - one error
        if worker is not None and not isinstance(worker, KvWorker):
            raise ValueError(f"worker must be a KvWorker, or None, got {worker!r:.80}")
        rng = Random(seed)  # noqa: S311 - mock data
        spec = backend_spec(backend or args.default_backend)
        known = spec if worker is None else BACKENDS.get(worker.backend, spec)
        args = self.args = args.following(known.semantics)
        self.worker = worker or make_worker(args, spec, sink, Random(rng.getrandbits(64)))  # noqa: S311 - as above
        check_worker(args, self.worker)
        self.inside = EngineInside(args, self.worker, rng)
        self.size = self.inside.size

    def __repr__(self) -> str:
        return repr(self.inside)

    @property
    def now_ms(self) -> float:
        """Its time, in milliseconds from its start."""
        return self.inside.now_ms

    @property
    def requests(self) -> list[EngineRequest]:
        """All requests that it was given; while a fleet or a replay runs, they are up to date after `catch_up`."""
        return self.inside.requests

    @property
    def passes(self) -> int:
        """How many forward passes it ran."""
        return self.inside.passes

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that it computed, recomputed ones included."""
        return self.inside.prefill_tokens

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine is doing now."""
        return self.inside.metrics

    @property
    def report(self) -> Report:
        """A report of the requests that the engine has served so far."""
        return self.inside.report

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.inside.has_work

    @property
    def is_idle(self) -> bool:
        """Whether no request is open: none runs, waits or is to arrive."""
        return self.inside.is_idle

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass was started and has not ended."""
        return self.inside.is_in_pass

    def on_pass(self, listener: Callable[[ForwardPass], None]) -> None:
        """Call a listener after each forward pass; while there is one, no passes are run in one go."""
        self.inside.on_pass(listener)

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
        """Submit a request to the engine.

        Args:
            prompt: tokens, or hashes.
            max_output_tokens: how many tokens it generates, at least 1; in the semantics of 1.6.1 over `vllm` also 0.
                There it generates fewer where it would be longer than `max_model_len`.
            arrival_ms: when it arrives; not before the request before it. None: now, or with the request before it
                where that arrives later.
            priority: larger is served first, where the engine's policy has priorities.
            abort_after_ms: milliseconds after its arrival at which it is called off, as its client goes, if it is
                open then; see `abort`.
            abort_after_tokens: or when this many of its tokens have come out, whichever comes first.

        Raises:
            OutOfBlocks: prompt and output can never fit, however empty the engine is. (SGLang's scheduler needs a
                little more than they are; what it can never admit ends in `EngineStalled`.)
            ValueError: an argument out of range, or a prompt that carries what the engine names no blocks by; nothing
                has changed.
        """
        return self.inside.submit(
            prompt,
            max_output_tokens,
            arrival_ms,
            priority=priority,
            abort_after_ms=abort_after_ms,
            abort_after_tokens=abort_after_tokens,
        )

    def abort(self, request: EngineRequest) -> None:
        """Call off an open request whose client is gone; `EngineRequest.abort` calls it.

        Between two passes it leaves the engine at once: its blocks are freed, nothing more of it is published, and what
        is cached stays so. While a pass is under way that happens at its end, before tokens are handed out: it gets
        none of that pass, be it its last one. Over SGLang's own caches ("sglang" and its hybrid models) only one that
        waits leaves so; one that runs has one more pass, and ends with that as others do, with a checkpoint (SGLang
        0.5.23: `Scheduler.abort_request`).

        Raises:
            RequestError: it is not an open request of this engine.
        """
        self.inside.abort(request)

    def step(self) -> ForwardPass:
        """Run one forward pass; if nothing runs or waits, first wait for the next arrival.

        Returns:
            What the pass did; a pass of no time that did nothing if no request is open.

        Raises:
            EngineStalled: its requests can never make progress.
        """
        return self.inside.step()

    def run(self, until_ms: float | None = None) -> Report:
        """Run passes until no request is open, or until a moment.

        Args:
            until_ms: no pass is started at or after it; the engine's time is then at least that. A pass that began
                before may end after it, so it may be in the past: nothing happens then. None: to the end. With a host,
                transfers that are done by then are published, if no request is left.

        Raises:
            EngineStalled: its requests can never make progress.
            ValueError: `until_ms` is not a finite number of at least 0.
        """
        return self.inside.run(until_ms)

    def catch_up(self) -> None:
        """Bring all requests up to date: those that only generate are else, until somebody looks."""
        self.inside.catch_up()

    def close(self) -> None:
        """Drop the engine: abort each open request; all its blocks are free, and full ones stay cached.

        A pass that is under way gives no tokens, and ends no request; events that are held for its end are published.
        Its worker stays, and so do time, `requests` and `report`. To leave the engine as a context manager does this.
        """
        self.inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
