"""Operations as Python: the calls on a `RouterHarness` named `kv` that do the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pytest_kvmock.events import block_text
from pytest_kvmock.programs.operations import (
    Burst,
    Clear,
    Decode,
    DropNext,
    Finish,
    Name,
    OnRequest,
    Operation,
    Prefill,
    RemoveWorker,
    Restart,
    Run,
    RunPasses,
    Serve,
    ServeNear,
    Submit,
    Tick,
)
from pytest_kvmock.tokens import Prompt


def calls(operations: Iterable[Operation], block_size: int, *, after_each: str | None = None) -> Iterator[str]:
    """The lines that do a program; a request that is served whole is one line.

    Args:
        operations: the program.
        block_size: tokens a block, for its prompts.
        after_each: a line that comes after each operation; each is then a line by itself.
    """
    steps = [*operations]
    while steps:
        step, named = steps.pop(0), True
        if isinstance(step, Submit):
            named = any(isinstance(s, OnRequest) and s.name == step.name for s in steps)
        elif isinstance(step, Prefill):
            own = [s for s in steps if isinstance(s, OnRequest) and s.name == step.name]
            named = bool(own)
            served = _served(step, own) if after_each is None and steps[: len(own)] == own else None
            if served is not None:
                steps, step = steps[len(own) :], served
        yield from _lines(step, block_size, named=named)
        if after_each is not None:
            yield after_each


def _served(prefill: Prefill, own: Sequence[OnRequest]) -> Serve | None:
    """A request as one operation; None where it is more than prefill, decode and finish."""
    tokens: int | tuple[int, ...] = 0
    if len(own) == 2 and isinstance(own[0], Decode):
        tokens = own[0].argument
    elif len(own) != 1:
        return None
    if not isinstance(own[-1], Finish) or not isinstance(tokens, int) or not prefill.wait:
        return None
    p = prefill
    return Serve(p.blocks, p.tail, p.worker, p.rank, p.hashed, tokens, p.keys)


def _lines(step: Operation, block_size: int, *, named: bool) -> Iterator[str]:
    """One operation; `named`: whether a request that is admitted is needed later."""
    match step:
        case Prefill():
            name = f"{_request(step.name)} = " if named else ""
            called = f"{name}{_worker(step.worker, step.rank)}.prefill"
            prompt = _prompt(step.prompt(block_size), block_size)
            if step.wait:
                yield f"{called}({prompt})"
            else:
                yield "with suppress(WouldWait):"
                yield f"    {called}({prompt}, wait=False)"
        case Serve():
            prompt = _prompt(step.prompt(block_size), block_size)
            output = f", {step.output_tokens}" if step.output_tokens else ""
            yield f"{_worker(step.worker, step.rank)}.serve({prompt}{output})"
        case Decode():
            tokens = step.argument
            if tokens == 1:
                argument = ""
            else:
                argument = str(tokens) if isinstance(tokens, int) else _prompt(Prompt.of(tokens), block_size)
            yield f"{_request(step.name)}.decode({argument})"
        case Submit():
            name = f"{_request(step.name)} = " if named else ""
            prompt = _prompt(step.prompt(block_size), block_size)
            arrival = "" if step.arrival_ms is None else f", arrival_ms={step.arrival_ms!r}"
            priority = "" if step.priority is None else f", priority={step.priority}"
            called = f"{_engine(step.worker, step.rank)}.submit"
            yield f"{name}{called}({prompt}, {step.output_tokens}{arrival}{priority})"
        case RunPasses():
            if step.count > 1:
                yield f"for _ in range({step.count}):"
            yield f"{'    ' * (step.count > 1)}{_engine(step.worker, step.rank)}.step()"
        case Run():
            until = "" if step.until_ms is None else f"until_ms={step.until_ms!r}"
            yield f"{_engine(step.worker, step.rank)}.run({until})"
        case OnRequest():
            yield f"{_request(step.name)}.{step.kind}()"
        case Tick():
            yield f"{_worker(step.worker, step.rank)}.tick({step.now_ms!r})"
        case Clear():
            yield f"{_worker(step.worker, step.rank)}.clear()"
        case Burst():
            yield "with kv.burst():"
            yield f"    for number in range({step.count}):"
            yield f"        {_worker(step.worker, step.rank)}.serve([number] * {block_size})"
        case ServeNear():
            yield "sink = kv.make_sink(chained=False)"
            yield from (f"sink.publish({data!r})" for data, _ in step.published(block_size))
            yield from _lines(step.served(block_size), block_size, named=False)
        case Restart():
            yield f"{_worker(step.worker, step.rank)}.restart({'announced=True' if step.announced else ''})"
        case RemoveWorker():
            yield f"kv.remove_worker({step.worker})"
        case DropNext():
            count = str(step.count) if step.count > 1 or step.of else ""
            yield f"kv.drop_next({count}{'' if step.of is None else f', kind={quoted(step.of)}'})"


def _request(name: Name) -> str:
    return f"request{name}" if isinstance(name, int) else name


def _worker(worker_id: int, rank: int) -> str:
    return f"kv.worker({worker_id}{f', {rank}' if rank else ''})"


def _engine(worker_id: int, rank: int) -> str:
    return f"kv.engine({worker_id}{f', {rank}' if rank else ''})"


def quoted(text: str) -> str:
    """A text as Python writes it with double quotes."""
    return f'"{text}"'


def literal(value: object) -> str:
    """A value as Python writes it, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    return repr(value)


def is_literal(value: object) -> bool:
    """Whether `literal` writes a value so that Python reads it again."""
    if isinstance(value, Mapping):
        return all(map(is_literal, value.values()))
    if isinstance(value, tuple | list):
        return all(map(is_literal, value))
    return value is None or isinstance(value, str | int | float)


def _prompt(prompt: Prompt, block_size: int) -> str:
    given = {} if prompt.keys is None else prompt.keys.given
    keys = "".join(f", {name}={literal(value)}" for name, value in given.items())
    if prompt.tokens is not None:
        tokens = token_list(prompt.tokens)
        return f"Prompt({tokens}{keys})" if keys else tokens
    hashes = ", ".join(number_parts(prompt.block_hashes(block_size)))
    length = "" if prompt.num_tokens is None else f", num_tokens={prompt.num_tokens}"
    return f"Prompt(hashes=[{hashes}]{length}{keys})"


def token_list(tokens: Sequence[int]) -> str:
    """A list of tokens, with long runs as ranges."""
    return f"[{', '.join(number_parts(tokens, str))}]"


def number_parts(numbers: Iterable[int], shown: Callable[[int], str] = block_text) -> list[str]:
    """The inside of a list of numbers, with long runs up or down as ranges."""
    parts: list[str] = []
    for run, step in _runs(numbers):
        first, end = run[0], run[-1] + step
        if len(run) < 6 or end < 0:
            parts += map(shown, run)
        elif step < 0:
            parts.append(f"*range({shown(first)}, {shown(end)}, -1)")
        else:
            parts.append(f"*range({shown(first)}, {shown(end)})" if first else f"*range({shown(end)})")
    return parts


def _runs(numbers: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """Numbers in runs of one step, 1 or -1."""
    run: list[int] = []
    step = 1
    for number in numbers:
        if len(run) == 1 and abs(number - run[0]) == 1:
            step = number - run[0]
        elif run and number - run[-1] != step:
            yield run, step
            run, step = [], 1
        run.append(number)
    if run:
        yield run, step
