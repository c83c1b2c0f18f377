"""Replay of steps in a new harness, to check whether they break the rule again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import Parameter, isawaitable, signature
from threading import Event, Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from pytest_kvmock.engines.base.driver import WouldWait
from pytest_kvmock.harness import RouterHarness
from pytest_kvmock.harness.reduce.program import NotReduced
from pytest_kvmock.harness.reduce.search import Spent
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.harness.verdict import Verdict
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, WorkerRemoved
from pytest_kvmock.oracle.hygiene.rules import INDEX_FAILURE
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.values.programs.forms import WithPrompt
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import Run, RunPasses

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
    from pytest_kvmock.harness.reduce.program import Reproduction
    from pytest_kvmock.harness.reduce.search import Budget
    from pytest_kvmock.values.tokens import Prompt

T = TypeVar("T")

_LOOK: Final = 0.05
"""Seconds between two checks whether a search in another thread must end."""

_GRACE: Final = 1.0
"""Seconds that the search then has to end, before its thread is abandoned."""

ASKED_ALWAYS: Final = 50
"""Maximum number of steps of a replay in which an index is compared as in a test; in longer replays it is compared
after the last step."""


class Replayer:
    """Replays programs, each in a new harness.

    Args:
        make_index: makes empty indexes like the one under test; None: no index takes part.
        ignored: rules that the failing test allowed.
        budget: counts every step.
        specs: backends that are not registered, by name.

    Attributes:
        ignored: rules that the failing test allowed.
        budget: counts every step; it may be replaced.
    """

    def __init__(
        self,
        make_index: MakeIndex | None,
        ignored: Collection[str],
        budget: Budget,
        specs: Mapping[str, BackendSpec] = MappingProxyType({}),
    ) -> None:
        self.budget = budget
        self._specs = specs
        self._make_index = make_index
        self._prompts: dict[object, Prompt] = {}
        self.ignored = frozenset(ignored)

    def breaks(self, program: Reproduction, *, as_test: bool = False, strict: bool = False) -> bool:
        """Whether a program breaks its rule, and no other before it.

        Args:
            program: the program.
            as_test: whether to compare an index as the program's test does, even if the program is long.
            strict: whether an operation that raises makes the result False; otherwise the operation is skipped.

        Raises:
            Spent: the budget is used up.
        """
        try:
            verdict = self.verdict(program, as_test=as_test, strict=strict)
        except Spent:
            raise
        except Exception:  # noqa: BLE001 - an index or a backend of the user's, on a stream that it never saw
            return False
        breach = program.breach
        errors = [p for p in verdict.errors if p.rule == breach.rule or p.rule not in self.ignored]
        if self._make_index is not None and breach.rule != INDEX_FAILURE:
            self._make_index.failures += [p.observed for p in errors if p.rule == INDEX_FAILURE]
        if breach.is_error:
            # Problems of one comparison have no order in time: any of them may match if all break the same rule.
            at_once = program.sync != "auto" or program.aflush is not None
            at_once = at_once and all(p.rule == breach.rule for p in errors)
            return any(map(breach.shows_in, errors if at_once else errors[:1]))
        return not errors and any(map(breach.shows_in, verdict.warnings))

    def verdict(self, program: Reproduction, *, as_test: bool = False, strict: bool = False) -> Verdict:
        """Return the verdict on a program.

        Raises:
            Spent: the budget is used up.
            Exception: whatever a user's own index or backend raises.
        """
        self.budget.replays += 1
        if not as_test and len(program.steps) > ASKED_ALWAYS:
            aflush = program.aflush and "end"
            program = program.replace(sync="end", aflush=aflush)
        if program.aflush is not None:
            return in_a_loop(self._aplay(program, strict=strict), self.budget)
        index = self._make_index() if program.with_index and self._make_index is not None else None
        kv = self._world(program, index)
        for _ in self._steps(kv, program, strict=strict):
            pass
        return kv.judge()

    async def _aplay(self, program: Reproduction, *, strict: bool) -> Verdict:
        assert self._make_index is not None
        kv = self._world(program, await self._make_index.amake())
        for _ in self._steps(kv, program, strict=strict):
            if program.aflush == "every":
                await kv.aflush()
        await kv.aflush()
        return kv.judge()

    def _world(self, program: Reproduction, index: Any) -> RouterHarness:
        backend = self._specs.get(program.backend, program.backend)
        clears = program.clears
        kv = RouterHarness(
            program.profile,
            backend,
            index,
            sync=program.sync,
            clears=clears,
            engine=program.engine,
            judge_unpublished=program.judge_unpublished,
            stores=program.stores or None,
        )
        for (worker_id, rank), name in program.workers:
            kv.worker(worker_id, dp_rank=rank, backend=None if name is None else self._specs.get(name, name))
        for (worker_id, rank), fields in program.engines:
            kv.engine(worker_id, dp_rank=rank, **fields)
        for sink in program.sinks:
            kv.make_sink(**sink._asdict())
        return kv

    def _steps(self, kv: RouterHarness, program: Reproduction, *, strict: bool) -> Iterator[None]:
        """Execute the steps, and yield after each."""
        return self._receive(kv, program) if program.level == "events" else self._operate(kv, program, strict=strict)

    def _receive(self, kv: RouterHarness, program: Reproduction) -> Iterator[None]:
        spend, receive = self.budget.spend, kv.publisher.publish
        chained = {FIRST_SINK_WORKER + i for i, sink in enumerate(program.sinks) if sink.chained}
        # Some engines have already published (SGLang's begins with a Cleared); the replayed events get later ids.
        begun = {} if program.with_ids else {key: count for key, count in kv.publisher.next_ids.items() if count}
        for step in program.steps:
            spend()
            if isinstance(step, RouterEvent):
                if begun and (first := begun.get((step.worker_id, step.event.dp_rank))):
                    step = replace(step, event=replace(step.event, event_id=step.event.event_id + first))  # noqa: PLW2901 - the same step, with another id
                receive(replace(step, chained=step.worker_id in chained))
            elif isinstance(step, BatchesLost):
                kv.inside.lost_batches(*step[:4])
            elif isinstance(step, WorkerRemoved):
                if step.first_id is None:
                    kv.remove_worker(step.worker_id if step.dp_rank is None else (step.worker_id, step.dp_rank))
                else:
                    kv.worker(step.worker_id, dp_rank=step.dp_rank or 0).restart(announced=True)
            yield

    def _operate(self, kv: RouterHarness, program: Reproduction, *, strict: bool) -> Iterator[None]:
        interpreter = Interpreter(kv, self._prompt)
        for step in program.operations:
            self.budget.spend()
            try:
                answer = interpreter.do(step)
            except WouldWait:  # an expected outcome of the operation
                pass
            except Exception:
                if strict:
                    raise
            else:
                if isinstance(step, RunPasses | Run):
                    self.budget.spend(answer)  # each pass of an engine is also a step
            yield

    def _prompt(self, step: WithPrompt, block_size: int) -> Prompt:
        """Return the prompt of an operation, always the same object, because it caches its hashes."""
        key = (step.blocks, step.tail, step.hashed, step.keys, block_size)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = step.prompt(block_size)
        return prompt


class MakeIndex:
    """Makes empty indexes like the one under test.

    They are made by `make`, if given, or by the index's `new()`, or else by its class, called without arguments or with
    the fields of the profile that its parameters are named after (`block_size`).

    Args:
        index: the index under test.
        profile: the source of arguments for the class.
        is_async: whether the index is async; then its constructor may need an event loop.
        make: makes an index; None: see above.

    Raises:
        NotReduced: its class needs other arguments.

    Attributes:
        failures: the failures of made indexes, in replays of problems other than `index_failure`.
    """

    def __init__(
        self, index: Any, profile: EngineProfile, *, is_async: bool, make: Callable[[], Any] | None = None
    ) -> None:
        self.failures: list[str] = []
        self._kind: Any = type(index)
        self._call = f"{self._kind.__name__}()"
        self._profile, self._is_async = profile, is_async
        new = getattr(index, "new", None) if make is None else make
        self._has_new = callable(new)
        self._make: Callable[[], Any] = new if callable(new) else self._by_class()

    def _by_class(self) -> Callable[[], Any]:
        given: dict[str, Any] = {}
        with suppress(TypeError, ValueError):  # a class not written in Python may have no signature
            for parameter in _needed(signature(self._kind).parameters.values()):
                if not hasattr(self._profile, parameter.name):
                    raise NotReduced(_no_second(self._kind, f"its class needs {parameter.name!r}"))
                given[parameter.name] = getattr(self._profile, parameter.name)
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        self._call = f"{self._kind.__name__}({arguments})"
        return partial(self._kind, **given)

    def __call__(self) -> Any:
        """Make an index."""
        return self._make()

    async def amake(self) -> Any:
        """Make an index inside its running event loop."""
        made = self._make()
        return await made if isawaitable(made) else made

    def probe(self, budget: Budget) -> None:
        """Make an index, to check that it is possible.

        Args:
            budget: limits the wait for an async index.

        Raises:
            NotReduced: no index can be made.
        """
        try:
            self._try(budget)
        except Spent:
            raise NotReduced(_no_second(self._kind, "it took longer than the limit")) from None
        except Exception as error:
            if self._has_new:  # perhaps the `new` of a base class, which makes a different index
                with suppress(Exception):
                    self._make = self._by_class()
                    self._try(budget)
                    return
            raise NotReduced(_no_second(self._kind, f"{type(error).__name__}: {error}")) from error

    def _try(self, budget: Budget) -> None:
        RouterHarness(self._profile, None, in_a_loop(self.amake(), budget) if self._is_async else self())

    def why_not(self) -> str:
        """Return a possible reason why a replay does not show the problem of the index under test."""
        if self.failures:
            return f"; a new {self._kind.__name__} failed there: {self.failures[0]}"
        return "" if self._has_new else f"; the replays called {self._call}: if yours differs, give it a method `new()`"


def _needed(parameters: Iterable[Parameter]) -> list[Parameter]:
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is Parameter.empty and p.kind not in variadic]


def _no_second(kind: type, why: str) -> str:
    return f"could not rebuild your index for the replay ({why}): give {kind.__name__} a method `new()` that returns an empty one"  # noqa: E501


# ------------------------------------------------------------------------------------------------- async indexes


def in_a_thread(search: Callable[[Callable[[], bool]], T], expired: Callable[[], bool] | None) -> T:
    """Search in a separate thread, as the caller's thread may already run an event loop.

    Args:
        search: called with a function that returns True when the search must end.
        expired: returns whether the search must end; None: never.

    Raises:
        NotReduced: a call of the index does not return; the thread is abandoned, and ends when the call returns.
        BaseException: whatever the search raises.
    """
    stopped = Event()
    ended: list[tuple[T | None, BaseException | None]] = []

    def is_over() -> bool:
        return stopped.is_set() or (expired is not None and expired())

    def run() -> None:
        try:
            ended.append((search(is_over), None))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            ended.append((None, error))

    thread = Thread(target=run, name="kvmock reduce", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not is_over():
            thread.join(_LOOK)
        thread.join(_GRACE)
    finally:
        stopped.set()
    if not ended:
        raise NotReduced("a call of the index under test did not return when it was replayed")
    found, error = ended[0]
    if error is not None:
        raise error
    return cast("T", found)


def in_a_loop(replay: Coroutine[Any, Any, T], budget: Budget) -> T:
    """Run a replay in a new event loop, and end it when the budget is used up.

    Raises:
        Spent: the budget is used up.
        Exception: whatever the replay raises.
    """
    import asyncio  # imported on first use

    async def main() -> T:
        # Errors in an index's own tasks are ignored; only its answers are checked.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = asyncio.ensure_future(replay)
        while not task.done():
            await asyncio.wait((task,), timeout=_LOOK)
            if not task.done() and budget.is_spent:
                raise Spent
        if task.cancelled():
            raise RuntimeError("the index under test cancelled the task that called it")
        return task.result()

    return asyncio.run(main())
