"""A mock engine in virtual time: requests arrive, a scheduler decides, passes take time, tokens and events come out.
The public class is here; `engine_inside` has the implementation.
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
        args: its arguments; by default those of Dynamo's mocker. The engine is one rank, whatever `dp_size` is.
        backend: name or spec of its block manager, if no worker is given; by default "lineage", or "sglang" for
            `engine_type="sglang"`.
        sink: where its events are published, if no worker is given.
        seed: seed of generated tokens and of the names of partial blocks.
        worker: the worker whose manager and requests it uses; its sizes must be those of `args`.

    Raises:
        ValueError: args and worker differ, the worker has an engine, or its backend has no scheduler of this type.

    Attributes:
        args: as given, with the release of Dynamo that it follows as `semantics`.
        worker: its worker, with manager, requests and restarts.
        size: the largest requests that it can serve.
        inside: its clock and scheduler, for code that drives several engines on one clock.
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
        """All requests that it got; while a fleet or a replay runs, they are up to date after `catch_up`."""
        return self.inside.requests

    @property
    def passes(self) -> int:
        """Number of forward passes that it ran."""
        return self.inside.passes

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that it computed, recomputed ones included."""
        return self.inside.prefill_tokens

    @property
    def metrics(self) -> EngineMetrics:
        """The present state of the engine."""
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
        """Whether no request runs, waits or is to arrive."""
        return self.inside.is_idle

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has started but not ended."""
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
            max_output_tokens: number of tokens to generate, at least 1; in the semantics of 1.6.1 over `vllm` also 0.
                There, output ends at `max_model_len`.
            arrival_ms: when it arrives; not before the previous request. None: now, or with the previous request if
                that arrives later.
            priority: larger is served first, if the engine's policy has priorities.
            abort_after_ms: milliseconds after its arrival at which its client leaves and it is called off, if it is
                still open; see `abort`.
            abort_after_tokens: number of output tokens after which it is called off, if that is earlier.

        Raises:
            OutOfBlocks: prompt and output can never fit, even in an empty engine. (SGLang's scheduler needs slightly
                more room than their size; a request that it can never admit ends in `EngineStalled`.)
            ValueError: an argument is out of range, or the prompt has keys that the engine's block hashes do not cover;
                nothing has changed.
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

        Between two passes, the request leaves the engine at once: its blocks are freed, no further events of it are
        published, and cached blocks stay cached. During a pass, this happens at the end of the pass, before tokens are
        handed out: the request gets no token of that pass, even if it is its last. Over SGLang's own caches ("sglang"
        and its hybrid models) only waiting requests leave like this; a running request has one more pass and then ends
        like others, with a checkpoint (SGLang 0.5.23: `Scheduler.abort_request`).

        Raises:
            RequestError: `request` is not an open request of this engine.
        """
        self.inside.abort(request)

    def step(self) -> ForwardPass:
        """Run one forward pass; if nothing runs or waits, first wait for the next arrival.

        Returns:
            The result of the pass; an empty pass of no time if no request is open.

        Raises:
            EngineStalled: its requests can never make progress.
        """
        return self.inside.step()

    def run(self, until_ms: float | None = None) -> Report:
        """Run passes until no request is open, or until a moment.

        Args:
            until_ms: no pass starts at or after this time, and the engine's time is then at least this. A pass that
                began before may end after it, so the value may be in the past; then nothing happens. None: to the end.
                With a host, transfers that are done by then are published if no request is left.

        Raises:
            EngineStalled: its requests can never make progress.
            ValueError: `until_ms` is not a finite number of at least 0.
        """
        return self.inside.run(until_ms)

    def catch_up(self) -> None:
        """Bring all requests up to date; decode-only requests are otherwise updated late."""
        self.inside.catch_up()

    def close(self) -> None:
        """Close the engine: abort each open request and free all blocks; full blocks stay cached.

        A pass under way gives no tokens and ends no request; events that are held for its end are published. The
        worker, the time, `requests` and `report` stay. Leaving the engine's `with` block does the same.
        """
        self.inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
