"""A state machine for Hypothesis: engines and a router under arbitrary traffic, step by step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.drafts import Player
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.programs.operations import Clear, Decode, Finish, Preempt, Prefill, Resume, Step

_worker = st.runner().flatmap(lambda machine: st.integers(0, machine.workers - 1))


class KvStateMachine(RuleBasedStateMachine):
    """Arbitrary traffic on the workers of a `RouterHarness`; the events are checked after each step.

    Use it unchanged, through `for_backend`, or as a base for your own rules and invariants, which run in addition::

        TestLru = KvStateMachine.for_backend("lru", num_blocks=8).TestCase

        class MyIndexMachine(KvStateMachine):
            workers = 2

            def make_index(self):
                return MyIndex()

        TestMyIndex = MyIndexMachine.TestCase

    A failure is printed as the fewest steps that show it. A prompt is a list of small numbers, one per block: block 3
    consists of token 3 only. A request that does not fit is refused; this is not a failure.

    Attributes:
        backend: name of the workers' backend, or a `BackendSpec`.
        num_blocks: capacity of each worker in blocks; it is small, so that blocks are evicted soon.
        block_size: tokens per block.
        workers: number of workers.
        chunk: tokens that are prefilled at once; None for the whole prompt.
        harness: the workers and the index, new for each example.
    """

    backend: ClassVar[str | BackendSpec] = "lineage"
    num_blocks: ClassVar[int] = 6
    block_size: ClassVar[int] = 2
    workers: ClassVar[int] = 1
    chunk: ClassVar[int | None] = None

    request = Bundle("request")

    def __init__(self) -> None:
        super().__init__()
        self.harness = self.make_harness()
        self._player = Player(self.harness)
        self._admitted = 0

    @classmethod
    def for_backend(cls, backend: str | BackendSpec, **attributes: Any) -> type[KvStateMachine]:
        """Return a machine class for a backend.

        Args:
            backend: its name, or a `BackendSpec`.
            attributes: further attributes, by name; `make_index`, a function without arguments, makes the index under
                test.

        Raises:
            TypeError: unknown attribute.
        """
        known = ("num_blocks", "block_size", "workers", "chunk", "make_index")
        for name in attributes:
            if name not in known:
                raise TypeError(f"for_backend: {unknown_text('attribute', name, known)}")
        name = backend.name if isinstance(backend, BackendSpec) else backend
        make: Callable[[], Any] | None = attributes.get("make_index")
        body = {**attributes, "backend": backend, "__module__": cls.__module__}
        if make is not None:
            body["make_index"] = staticmethod(make)
        return type(re.sub(r"\W", "_", f"{cls.__name__}_{name}"), (cls,), body)

    def make_index(self) -> Any:
        """Make the index under test, new for each example; None for the reference index alone."""
        return None

    def make_harness(self) -> RouterHarness:
        """Make the harness of an example."""
        profile = EngineProfile(
            block_size=self.block_size, num_blocks=self.num_blocks, workers=self.workers, chunk=self.chunk
        )
        return RouterHarness(profile, self.backend, self.make_index(), sync="every")

    # ------------------------------------------------------------------------------------------------ steps

    @rule(
        target=request,
        blocks=st.lists(st.integers(0, 2), max_size=4),
        tail=st.integers(0, 3),
        worker=_worker,
    )
    def prefill(self, blocks: Sequence[int], tail: int, worker: int) -> str:
        """Admit a request whose prompt has these blocks, then `tail` tokens 0."""
        name = f"r{self._admitted}"
        self._admitted += 1
        self._do(Prefill(name, tuple(blocks), tail if blocks else tail or 1, worker))
        return name

    @rule(request=request, tokens=st.integers(1, 5), of=st.integers(0, 2))
    def decode(self, request: str, tokens: int, of: int) -> None:
        """Generate `tokens` tokens, chosen by the number `of`."""
        self._do(Decode(request, tokens, of))

    @rule(request=consumes(request))
    def finish(self, request: str) -> None:
        """End a request: free its blocks."""
        self._do(Finish(request))

    @rule(request=request)
    def preempt(self, request: str) -> None:
        """Preempt a request: free its blocks, and keep its output."""
        self._do(Preempt(request))

    @rule(request=request)
    def resume(self, request: str) -> None:
        """Resume a preempted request: allocate its blocks again."""
        self._do(Resume(request))

    @rule(worker=_worker)
    def clear(self, worker: int) -> None:
        """Drop the cached blocks, if no request is open."""
        self._do(Clear(worker))

    def _do(self, step: Step) -> None:
        __tracebackhide__ = True
        # Checked here, not by an invariant: Hypothesis would print an invariant between any two steps.
        self._player.do(step)
        self.harness.events.assert_no_event_errors()

    def teardown(self) -> None:
        """Check what shows only at the end."""
        __tracebackhide__ = True
        self.harness.judge()
        self.harness.events.assert_no_event_errors()
