"""Programs: run on the workers of a harness, and written as equivalent Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_kvmock.values.programs.forms import Doer, OnRequest, Operation
from pytest_kvmock.values.programs.operations import OPERATIONS, Decode, Finish, Prefill, Serve, Submit


class Interpreter(Doer):
    """Runs operations on the workers of a harness.

    It returns the worker's answer and raises whatever the worker raises. Callers decide which errors are not a failure:
        they subclass it or catch them.
    """

    def do(self, step: Operation) -> Any:
        """Run one operation and return its answer (`Operation.do`).

        Raises:
            KeyError: its request was not admitted or not submitted.
            TypeError: it is not an operation.
            Exception: whatever the worker, the request or the harness raises.
        """
        if not isinstance(step, Operation):
            *most, last = (operation.__name__ for operation in OPERATIONS)
            raise TypeError(f"a program has {', '.join(most)} and {last}, got {step!r:.80}")
        return super().do(step)


def calls(operations: Iterable[Operation], block_size: int, *, after_each: str | None = None) -> Iterator[str]:
    """Yield the lines that run a program on a `RouterHarness` named `kv`; a fully served request is one line.

    Args:
        operations: the program.
        block_size: tokens per block, for its prompts.
        after_each: a line to add after each operation; operations are then not merged.
    """
    steps = [*operations]
    while steps:
        step, own = steps.pop(0), list[OnRequest]()
        if isinstance(step, Prefill | Submit):
            own = [s for s in steps if isinstance(s, OnRequest) and s.name == step.name]
        if isinstance(step, Prefill) and after_each is None and steps[: len(own)] == own:
            served = _served(step, own)
            if served is not None:
                steps, step = steps[len(own) :], served
        yield from step.python(block_size, named=bool(own))
        if after_each is not None:
            yield after_each


def _served(prefill: Prefill, own: Sequence[OnRequest]) -> Serve | None:
    """Return a request as one operation; None if it is more than prefill, decode and finish."""
    tokens: int | tuple[int, ...] = 0
    if len(own) == 2 and isinstance(own[0], Decode):
        tokens = own[0].argument
    elif len(own) != 1:
        return None
    if not isinstance(own[-1], Finish) or not isinstance(tokens, int) or not prefill.wait:
        return None
    p = prefill
    return Serve(p.blocks, p.tail, p.worker, p.rank, p.hashed, tokens, p.keys)
