"""From a reproduction to a scenario file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.backends import EngineProfile
from pytest_kvmock.events import Cleared, RouterEvent, SparseStored, StorageTier, Stored
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.hygiene.entries import BatchesLost, WorkerRemoved
from pytest_kvmock.programs.operations import (
    Clear,
    Decode,
    DropNext,
    Name,
    OnRequest,
    Operation,
    Prefill,
    RemoveWorker,
    Restart,
    Run,
    RunPasses,
    Serve,
    Submit,
    Tick,
)
from pytest_kvmock.reduce.program import plain_field
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.events import StreamKey
    from pytest_kvmock.reduce.program import Reproduction


def scenario_text(program: Reproduction, name: str) -> str:
    """The text of a scenario file that does what a reproduction does, and fails for the same rule.

    Where an index under test takes part, it must be played in a test that has that index (`needs_index`).

    Args:
        program: the reproduction.
        name: what the scenario is called.
    """
    import yaml

    document: dict[str, Any] = {"description": f"{program.rule}, cut from {program.cut_from} {program.level}"}
    if program.with_index:
        document["needs_index"] = True
    fields = {
        field.name: plain_field(program.profile, field.name)
        for field in dataclasses.fields(EngineProfile)
        if getattr(program.profile, field.name) != field.default
    }
    if fields:
        document["profile"] = fields
    if program.engine:
        document["engine"] = dict(program.engine)
    document["backends"] = [program.backend]
    if program.allow:
        document["allow"] = list(program.allow)
    size = program.profile.block_size
    done = _events(program) if program.level == "events" else (_operation(step, size) for step in program.operations)
    steps = [*_world(program), *done]
    if not program.breach.is_error:  # else a warning passes
        steps[-1]["expect"] = {"problems": []}
    document["scenarios"] = {name: {"steps": steps}}
    # Leaves in one line each, blocks otherwise.
    return str(yaml.safe_dump(document, default_flow_style=None, sort_keys=False, width=120, allow_unicode=True))


def _world(program: Reproduction) -> Iterator[dict[str, Any]]:
    for key, backend in program.workers:
        yield {"worker": {"id": _worker(key), **({} if backend is None else {"backend": backend})}}
    for key, given in program.engines:
        yield {"engine": {**_of(key), **given}}


def _worker(key: StreamKey) -> int | list[int]:
    return list(key) if key[1] else key[0]


def _of(key: StreamKey) -> dict[str, Any]:
    return {"worker": _worker(key)} if any(key) else {}


def _events(program: Reproduction) -> Iterator[dict[str, Any]]:
    for step in program.steps:
        if isinstance(step, WorkerRemoved):
            key = (step.worker_id, step.dp_rank or 0)
            if step.first_id is None:
                yield {"remove_worker": step.worker_id}
            else:
                yield {"restart": {"worker": _worker(key), "announced": True}}
        elif isinstance(step, BatchesLost):
            observed = {"observed": step.observed} if step.observed else {}
            lost = {"first": step.batches.start, "count": len(step.batches), **observed}
            of = _of((step.worker_id, step.dp_rank))
            yield {"lost_batches": {**lost, **of, **_of_a_sink(step.worker_id, program, chained=False)}}
        elif isinstance(step, RouterEvent):
            yield {"event": _event(step, program)}


def _event(event: RouterEvent, program: Reproduction) -> dict[str, Any]:
    data = event.event.data
    written: dict[str, Any]
    if isinstance(data, Cleared):
        written = {"cleared": True}
    elif isinstance(data, Stored):
        written = {"stored": list(data.block_hashes)}
        if data.parent_hash is not None:
            written["parent"] = data.parent_hash
        if isinstance(data, SparseStored):
            written |= {"span": data.span, "block_size": data.block_size}
        elif data.tokens_hashes != data.block_hashes:
            written["local_hashes"] = list(data.tokens_hashes)
    else:
        written = {data.kind: list(data.block_hashes)}
    written |= _of((event.worker_id, event.event.dp_rank))
    if program.with_ids:
        written["id"] = event.event.event_id
    if event.storage_tier is not StorageTier.DEVICE:
        written["tier"] = event.storage_tier.name.lower()
    if event.token_ids is not None:
        written["token_ids"] = [_numbers(ids) for ids in event.token_ids]
    if event.extra is not None:
        written["extra"] = _as_lists(event.extra)
    return written | _of_a_sink(event.worker_id, program, chained=True)


def _of_a_sink(worker_id: int, program: Reproduction, *, chained: bool) -> dict[str, Any]:
    """What a step says of the sink whose it is, as its first one may make it."""
    written: dict[str, Any] = {}
    if worker_id >= FIRST_SINK_WORKER:
        sink = program.sinks[worker_id - FIRST_SINK_WORKER]
        written |= {"chained": True} if sink.chained and chained else {}
        written |= {} if sink.num_blocks is None else {"num_blocks": sink.num_blocks}
        written |= {} if sink.tier_blocks is None else {"tier_blocks": dict(sink.tier_blocks)}
        written |= {"residency": sink.residency} if sink.residency != "unique" else {}
        written |= {} if sink.prefix_closed else {"prefix_closed": False}
    return written


def _operation(step: Operation, size: int) -> dict[str, Any]:
    match step:
        case Prefill():
            of = {**_of((step.worker, step.rank)), **({} if step.wait else {"wait": False})}
            return {"prefill": {"request": _request(step.name), **_prompt(step.prompt(size), size), **of}}
        case Serve():
            of = _of((step.worker, step.rank))
            output = {"output_tokens": step.output_tokens} if step.output_tokens else {}
            return {"serve": {**_prompt(step.prompt(size), size), **output, **of}}
        case Decode():
            tokens = step.argument
            given = {"count": tokens} if isinstance(tokens, int) else {"tokens": _numbers(tokens)}
            return {"decode": {"request": _request(step.name), **given}}
        case Submit():
            of = _of((step.worker, step.rank))
            own = {name: getattr(step, name) for name in ("arrival_ms", "priority") if getattr(step, name) is not None}
            asked = {"request": _request(step.name), **_prompt(step.prompt(size), size)}
            return {"submit": {**asked, "output_tokens": step.output_tokens, **own, **of}}
        case RunPasses():
            return {"step": {"count": step.count, **_of((step.worker, step.rank))}}
        case Run():
            until = {} if step.until_ms is None else {"until_ms": step.until_ms}
            return {"run": {**until, **_of((step.worker, step.rank))}}
        case OnRequest():
            return {step.kind: _request(step.name)}
        case Restart():
            announced = {"announced": True} if step.announced else {}
            return {"restart": {"worker": _worker((step.worker, step.rank)), **announced}}
        case RemoveWorker():
            return {"remove_worker": step.worker}
        case DropNext():
            return {"fault": {"lose": {"n": step.count, **({} if step.of is None else {"kind": step.of})}}}
        case Tick():
            return {"tick": {"now_ms": step.now_ms, **_of((step.worker, step.rank))}}
        case Clear():
            return {"clear": _worker((step.worker, step.rank))}
    raise ValueError(f"a scenario file has no step for {step!r}")


def _request(name: Name) -> str:
    return f"r{name}" if isinstance(name, int) else name


def _prompt(prompt: Prompt, block_size: int) -> dict[str, Any]:
    keys = {} if prompt.keys is None else _as_lists(prompt.keys.given)
    if prompt.tokens is not None:
        return {"tokens": _numbers(prompt.tokens), **keys}
    hashes = {"hashes": _numbers(prompt.block_hashes(block_size)), **keys}
    return hashes if prompt.num_tokens is None else {**hashes, "num_tokens": prompt.num_tokens}


def _as_lists(value: Any) -> Any:
    """A value as YAML has it: lists, and no tuples."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [*map(_as_lists, value)] if isinstance(value, tuple | list) else value


def _numbers(numbers: Sequence[int]) -> list[int | str] | str:
    """Numbers with runs as ranges; a single run stands alone."""
    parts: list[int | str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = numbers[start:end]
            parts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else run
            start = end
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts
