"""Replaying steps in a fresh world, and looking whether they break the rule again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.events import RouterEvent
from pytest_kvmock.harness import RouterHarness, Verdict
from pytest_kvmock.harness.recording import Forgotten, Operation
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.reduce.program import NotReduced
from pytest_kvmock.reduce.search import Spent

if TYPE_CHECKING:
    from pytest_kvmock.backends import BackendSpec, EngineProfile
    from pytest_kvmock.engine.worker import Request
    from pytest_kvmock.harness.comparison import Sync
    from pytest_kvmock.reduce.program import Reproduction
    from pytest_kvmock.reduce.search import Budget

ASKED_ALWAYS: Final = 50
"""Up to so many steps an index is compared as in a test; in longer replays at the end alone, which is the last step."""


class Replayer:
    """Replays programs, each in a world of its own.

    Args:
        new_index: makes an empty index of the kind under test; None: none takes part.
        ignored: rules that the failing test let pass.
        budget: pays for every step.
        specs: backends that are known here only, by name.
    """

    def __init__(
        self,
        new_index: Callable[[], Any] | None,
        ignored: Collection[str],
        budget: Budget,
        specs: Mapping[str, BackendSpec] = MappingProxyType({}),
    ) -> None:
        self.budget = budget
        self._specs = specs
        self._new_index = new_index
        self._ignored = frozenset(ignored)

    def breaks(self, program: Reproduction, *, sync: Sync | None = None, strict: bool = False) -> bool:
        """Whether a program breaks its rule, and no other before it.

        Args:
            program: what to replay.
            sync: when an index is compared; None: by the length.
            strict: an operation that raises is no reproduction; else it is passed over.

        Raises:
            Spent: the budget is used up.
        """
        try:
            verdict = self.verdict(program, sync=sync, strict=strict)
        except Spent:
            raise
        except Exception:  # noqa: BLE001 - an index or a backend of the user's, on a stream that it never saw
            return False
        breach = program.breach
        errors = [p for p in verdict.errors if p.rule == breach.rule or p.rule not in self._ignored]
        if breach.is_error:
            return bool(errors) and breach.shows_in(errors[0])
        return not errors and any(map(breach.shows_in, verdict.warnings))

    def verdict(self, program: Reproduction, *, sync: Sync | None = None, strict: bool = False) -> Verdict:
        """What is found in a program.

        Raises:
            Spent: the budget is used up.
            Exception: whatever a user's own index or backend raises.
        """
        self.budget.replays += 1
        index = self._new_index() if program.with_index and self._new_index is not None else None
        sync = sync or ("auto" if len(program.steps) <= ASKED_ALWAYS else "end")
        kv = RouterHarness(program.profile, self._specs.get(program.backend, program.backend), index, sync=sync)
        for key, backend in program.workers:
            kv.worker(*key, backend=None if backend is None else self._specs.get(backend, backend))
        for sink in program.sinks:
            kv.make_sink(**sink._asdict())
        if program.level == "events":
            self._hear(kv, program)
        else:
            self._operate(kv, program, strict=strict)
        return kv.judge()

    def _hear(self, kv: RouterHarness, program: Reproduction) -> None:
        spend, hear = self.budget.spend, kv.hear
        chained = {FIRST_SINK_WORKER + i for i, sink in enumerate(program.sinks) if sink.chained}
        # Some engines have spoken by now (SGLang's begins with a Cleared); what is told from here on comes after.
        begun = {} if program.with_ids else {key: count for key, count in kv.delivery.published.items() if count}
        for step in program.steps:
            spend()
            if isinstance(step, RouterEvent):
                if begun and (first := begun.get((step.worker_id, step.event.dp_rank))):
                    step = replace(step, event=replace(step.event, event_id=step.event.event_id + first))  # noqa: PLW2901 - the same step, with another id
                hear(step, chained=step.worker_id in chained)
            elif isinstance(step, Forgotten):
                if step.first_id is None:
                    kv.remove_worker(step.worker_id)
                else:
                    kv.worker(step.worker_id, step.dp_rank or 0).restart(announced=True)

    def _operate(self, kv: RouterHarness, program: Reproduction, *, strict: bool) -> None:
        requests: dict[int, Request] = {}
        for step in program.steps:
            self.budget.spend()
            assert isinstance(step, Operation)
            try:
                operate(kv, step, requests)
            except Exception:
                if strict:
                    raise


def operate(kv: RouterHarness, step: Operation, requests: dict[int, Request]) -> None:
    """Do one operation.

    Args:
        kv: the world.
        step: what to do.
        requests: those that were made, by number; a prefill adds one.

    Raises:
        KeyError: the operation is about a request that was not made.
        Exception: whatever the operation raises.
    """
    kind, argument = step.kind, step.argument
    if kind == "prefill":
        requests[step.request] = kv.worker(*step.worker).prefill(argument)
    elif kind == "decode":
        requests[step.request].decode(argument)
    elif kind == "finish":
        requests[step.request].finish()
    elif kind == "preempt":
        requests[step.request].preempt()
    elif kind == "resume":
        requests[step.request].resume()
    elif kind == "clear":
        kv.worker(*step.worker).clear()
    elif kind == "restart":
        kv.worker(*step.worker).restart(announced=argument)
    elif kind == "remove_worker":
        kv.remove_worker(step.worker[0])
    else:
        count, of_kind = argument
        kv.drop_next(count, kind=of_kind)


def index_maker(index: Any, profile: EngineProfile) -> Callable[[], Any]:
    """How to make an empty index like the one under test.

    By its `new()`, where it has one; else by its class, called with nothing, or with what of the profile its parameters
    are named after (`block_size`).

    Raises:
        NotReduced: it cannot be made.
    """
    kind: Any = type(index)
    new = getattr(index, "new", None)
    if callable(new):
        make: Callable[[], Any] = new
    else:
        given: dict[str, Any] = {}
        with suppress(TypeError, ValueError):  # a class that is not written in Python has no signature
            for parameter in _needed(signature(kind).parameters.values()):
                if not hasattr(profile, parameter.name):
                    raise NotReduced(_no_second(kind, f"its class needs {parameter.name!r}"))
                given[parameter.name] = getattr(profile, parameter.name)
        make = partial(kind, **given)
    try:
        RouterHarness(profile, None, make())
    except Exception as error:
        raise NotReduced(_no_second(kind, f"{type(error).__name__}: {error}")) from error
    return make


def _needed(parameters: Iterable[Parameter]) -> list[Parameter]:
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is Parameter.empty and p.kind not in variadic]


def _no_second(kind: type, why: str) -> str:
    return f"no second {kind.__name__} can be made to try with ({why}); give it a method new() that makes an empty one"
