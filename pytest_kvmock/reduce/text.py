"""A reproduction as the text of a Python test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pytest_kvmock.backends import EngineProfile, known_backends
from pytest_kvmock.events import Removed, RouterEvent, StorageTier, Stored, block_text
from pytest_kvmock.harness.recording import Forgotten, Operation
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.hygiene.content import is_chained
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.events import EventData
    from pytest_kvmock.reduce.program import Reproduction

_PUBLIC = (
    *("Cleared", "EngineProfile", "KvCacheEvent", "Prompt", "Removed", "RouterEvent", "RouterHarness", "StorageTier"),
    "Stored",
)


def test_text(program: Reproduction, name: str, awaited_by: str | None) -> str:
    """The text of a test that does what a program says, and fails for the same rule.

    Args:
        program: the program.
        name: the name of the test.
        awaited_by: see `Reproduction.as_test`.
    """
    body = [*_world(program)]
    body += _events(program) if program.level == "events" else _operations(program)
    if program.aflush == "end":
        body.append("await kv.aflush()")
    if not program.breach.is_error:
        body.append(f'assert [] == [p for p in kv.judge().warnings if p.rule == "{program.rule}"]')
    index = "kv_index" if program.with_index else ""
    size = program.profile.block_size
    marks = []
    if program.with_index and size != EngineProfile().block_size:  # for a kv_index that reads kv_profile
        marks.append(f"@pytest.mark.kvmock(block_size={size})")
    if program.aflush is not None and awaited_by:
        marks.append(f"@pytest.mark.{awaited_by}")
    with_harness = [f"with RouterHarness({_harness(program)}) as kv:", *(f"    {line}" for line in body)]
    runs_itself = program.aflush is not None and awaited_by is None
    if runs_itself:
        with_harness = ["async def body():", *(f"    {line}" for line in with_harness), "", "asyncio.run(body())"]
    kind = "def" if program.aflush is None or runs_itself else "async def"
    lines = [*marks, f"{kind} {name}({index}):", *(f"    {line}".rstrip() for line in with_harness)]
    text = "\n".join(lines)
    names = [public for public in _PUBLIC if f"{public}(" in text or f"{public}." in text]
    imports = ["import asyncio\n\n"] * runs_itself + ["import pytest\n\n"] * bool(marks)
    return f"{''.join(imports)}from pytest_kvmock import {', '.join(names)}\n\n\n{text}\n"


def _harness(program: Reproduction) -> str:
    default = EngineProfile()
    fields = [
        f"{field.name}={getattr(program.profile, field.name)!r}"
        for field in dataclasses.fields(EngineProfile)
        if getattr(program.profile, field.name) != getattr(default, field.name)
    ]
    arguments = [f"EngineProfile({', '.join(fields)})"] if fields else []
    named = "" if fields else "backend="
    spec = known_backends().get(program.backend)
    judged_otherwise = spec is not None and (spec.residency == "counted" or not spec.prefix_closed)
    if program.level == "requests" or (judged_otherwise and len(program.sinks) < len(_speakers(program))):
        arguments.append(f'{named}"{program.backend}"')
    if program.with_index:
        arguments.append("index=kv_index")
    if program.sync != "auto":
        arguments.append(f"sync={_quoted(program.sync)}")
    if program.index_semantics is not None:
        arguments.append(f"index_semantics={_quoted(program.index_semantics)}")
    if program.allow:
        arguments.append(f"allow=[{', '.join(map(_quoted, program.allow))}]")
    return ", ".join(arguments)


def _speakers(program: Reproduction) -> set[int]:
    return {event.worker_id for event in program.events}


def _quoted(text: str) -> str:
    return f'"{text}"'


def _world(program: Reproduction) -> Iterator[str]:
    for (worker_id, rank), backend in program.workers:
        of = "" if backend is None else f', backend="{backend}"'
        yield f"kv.worker({worker_id}{f', {rank}' if rank else ''}{of})"
    for i, sink in enumerate(program.sinks):
        fields = {name: value for name, value in sink._asdict().items() if value != sink._field_defaults[name]}
        own = [event for event in program.events if event.worker_id == FIRST_SINK_WORKER + i]
        if not sink.chained and any(map(_is_chained, own)):  # it would be found out
            fields["chained"] = False
        said = ", ".join(
            f"{name}={_quoted(value) if isinstance(value, str) else value}" for name, value in fields.items()
        )
        yield f"{_sink(FIRST_SINK_WORKER + i, program)} = kv.make_sink({said})"


# ----------------------------------------------------------------------------------------------------- events


def _events(program: Reproduction) -> Iterator[str]:
    if program.aflush == "every":
        for step in program.steps:
            yield from _events(program.replace(steps=(step,), aflush="end"))
            yield "await kv.aflush()"
        return
    for (kind, where), group in groupby(program.steps, _place):
        steps = [*group]
        if kind == "forget":
            yield from (_forgotten(step) for step in steps if isinstance(step, Forgotten))
            continue
        events = [step for step in steps if isinstance(step, RouterEvent)]
        if kind == "sink":
            name = _sink(where[0], program)
            for run in _alike(events, program):
                if len(run) > 1:
                    yield f"for block in {_blocks(run)}:"
                    yield f"    {name}({_ANY_BLOCK})"
                else:
                    yield f"{name}({_said(run[0], program)})"
            continue
        worker_id, rank = where
        at = "".join([f", worker_id={worker_id}" * bool(worker_id), f", dp_rank={rank}" * bool(rank)])
        said = [
            f"*({_ANY_BLOCK} for block in {_blocks(run)})" if len(run) > 1 else _applied(run[0], program)
            for run in _alike(events, program)
        ]
        if len(events) == 1:
            yield f"kv.apply({said[0]}{at})"
        else:
            yield "kv.apply(["
            yield from (f"    {text}," for text in said)
            yield f"]{at})"


_ANY_BLOCK: Final = "Stored(None, (block,), (block,))"
_ALIKE: Final = 6
"""So many events that differ by their block alone, one higher each, are written as one."""


def _alike(events: Sequence[RouterEvent], program: Reproduction) -> Iterator[Sequence[RouterEvent]]:
    """Events one by one, but runs of those that store one root block each, one higher than the one before, together."""
    start = 0
    while start < len(events):
        first = events[start].event.data
        end = start
        if isinstance(first, Stored) and not program.with_ids:
            block = first.block_hashes[0] if first.block_hashes else 0
            while end < len(events) and _is_plain(events[end], block + end - start):
                end += 1
        if end - start < _ALIKE:
            end = start + 1
        yield events[start:end]
        start = end


def _is_plain(event: RouterEvent, block: int) -> bool:
    """Whether an event says nothing but that a root block is stored, in a sink on its first rank."""
    rank = event.event.dp_rank if event.worker_id >= FIRST_SINK_WORKER else 0
    plain = (Stored(None, (block,), (block,)), StorageTier.DEVICE, None, 0)
    return plain == (event.event.data, event.storage_tier, event.token_ids, rank)


def _blocks(run: Sequence[RouterEvent]) -> str:
    """The blocks of events that are alike, as a range."""
    first, last = (event.event.data for event in (run[0], run[-1]))
    assert isinstance(first, Stored)
    assert isinstance(last, Stored)
    return f"range({block_text(first.block_hashes[0])}, {block_text(last.block_hashes[0] + 1)})"


def _is_chained(event: RouterEvent) -> bool:
    return isinstance(event.event.data, Stored) and is_chained(event.event.data)


def _sink(worker_id: int, program: Reproduction) -> str:
    return "sink" if len(program.sinks) == 1 else f"sink{worker_id - FIRST_SINK_WORKER + 1}"


def _place(step: object) -> tuple[str, tuple[int, int]]:
    if not isinstance(step, RouterEvent):
        return "forget", (0, 0)
    where = (step.worker_id, step.event.dp_rank)
    return ("sink" if step.worker_id >= FIRST_SINK_WORKER else "apply"), where


def _forgotten(step: Forgotten) -> str:
    if step.first_id is None:
        return f"kv.remove_worker({step.worker_id})"
    rank = f", {step.dp_rank}" if step.dp_rank else ""
    return f"kv.worker({step.worker_id}{rank}).restart(announced=True)"


def _said(step: RouterEvent, program: Reproduction) -> str:
    """What a sink is called with."""
    text = _data(step.event.data)
    if program.with_ids or step.event.dp_rank:
        text = _with_id(step, text)
    if step.storage_tier is not StorageTier.DEVICE or step.token_ids is not None:
        text += f", {_tier(step)}"
    if step.token_ids is not None:
        text += f", {_tokens(step)}"
    return text


def _applied(step: RouterEvent, program: Reproduction) -> str:
    """What `apply` is called with."""
    text = _data(step.event.data)
    beside = step.storage_tier is not StorageTier.DEVICE or step.token_ids is not None
    if not program.with_ids and not beside:
        return text
    text = _with_id(step, text)
    if beside:
        tokens = "" if step.token_ids is None else f", {_tokens(step)}"
        text = f"RouterEvent({step.worker_id}, {text}, {_tier(step)}{tokens})"
    return text


def _with_id(step: RouterEvent, data: str) -> str:
    rank = f", {step.event.dp_rank}" if step.event.dp_rank else ""
    return f"KvCacheEvent({step.event.event_id}, {data}{rank})"


def _tier(step: RouterEvent) -> str:
    return f"StorageTier.{step.storage_tier.name}"


def _tokens(step: RouterEvent) -> str:
    return f"[{', '.join(map(_token_list, step.token_ids or ()))}]"


def _data(data: EventData) -> str:
    if isinstance(data, Stored):
        parent = "None" if data.parent_hash is None else block_text(data.parent_hash)
        more = "" if data.start_position is None else f", start_position={data.start_position}"
        more += "" if data.mm_extra_info is None else f", mm_extra_info={data.mm_extra_info!r}"
        return f"Stored({parent}, {_tuple(data.block_hashes)}, {_tuple(data.tokens_hashes)}{more})"
    if isinstance(data, Removed):
        return f"Removed({_tuple(data.block_hashes)})"
    return "Cleared()"


def _tuple(hashes: Sequence[int]) -> str:
    parts = _parts(hashes)
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


# --------------------------------------------------------------------------------------------------- operations


def _operations(program: Reproduction) -> Iterator[str]:
    for line in _calls(program):
        yield line
        if program.aflush == "every":
            yield "await kv.aflush()"


def _calls(program: Reproduction) -> Iterator[str]:
    steps = list(program.operations)
    size = program.profile.block_size
    prefills = {step.request: step for step in steps if step.kind == "prefill"}
    while steps:
        step = steps.pop(0)
        worker = _worker(step)
        if step.kind == "prefill":
            own = [s for s in steps if s.request == step.request]
            kinds = [s.kind for s in own]
            together = steps[: len(own)] == own and program.aflush != "every"
            if together and kinds in (["finish"], ["decode", "finish"]) and isinstance(own[0].argument or 0, int):
                steps = steps[len(own) :]
                output = f", {own[0].argument}" if own[0].kind == "decode" else ""
                yield f"{worker}.serve({_prompt(step.argument, size)}{output})"
            else:
                name = f"request{step.request} = " if own else ""
                yield f"{name}{worker}.prefill({_prompt(step.argument, size)})"
        elif step.request in prefills:
            argument = ""
            if step.kind == "decode" and step.argument != 1:
                tokens = step.argument
                argument = str(tokens) if isinstance(tokens, int) else _prompt(Prompt.of(tokens), size)
            yield f"request{step.request}.{step.kind}({argument})"
        elif step.kind == "restart":
            yield f"{worker}.restart({'announced=True' if step.argument else ''})"
        elif step.kind == "remove_worker":
            yield f"kv.remove_worker({step.worker[0]})"
        elif step.kind == "drop_next":
            count, kind = step.argument
            yield f"kv.drop_next({count if count > 1 or kind else ''}{'' if kind is None else f', kind={_quoted(kind)}'})"
        else:
            yield f"{worker}.{step.kind}()"


def _worker(step: Operation) -> str:
    worker_id, rank = step.worker
    return f"kv.worker({worker_id}{f', {rank}' if rank else ''})"


def _prompt(prompt: Prompt, block_size: int) -> str:
    if prompt.tokens is not None:
        return _token_list(prompt.tokens)
    hashes = ", ".join(_parts(prompt.block_hashes(block_size)))
    length = "" if prompt.num_tokens is None else f", num_tokens={prompt.num_tokens}"
    return f"Prompt(hashes=[{hashes}]{length})"


def _token_list(tokens: Sequence[int]) -> str:
    """A list of tokens."""
    return f"[{', '.join(_parts(tokens, str))}]"


def _parts(numbers: Iterable[int], shown: Callable[[int], str] = block_text) -> list[str]:
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
