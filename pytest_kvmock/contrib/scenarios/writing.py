"""Writes a reproduction as a scenario file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.harness.reduce.program import plain_field
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, WorkerRemoved
from pytest_kvmock.values.events import Cleared, RouterEvent, SparseStored, StorageTier, Stored, Updated
from pytest_kvmock.values.programs.forms import number_ranges, plain_lists

if TYPE_CHECKING:
    from pytest_kvmock.harness.reduce.program import Reproduction
    from pytest_kvmock.values.events import StreamKey


def scenario_text(program: Reproduction, name: str) -> str:
    """Return the text of a scenario file that does the steps of a reproduction, and fails with the same rule.

    If an index under test takes part, the scenario must be played in a test with this index (`needs_index`).

    Args:
        program: the reproduction.
        name: the scenario's name.
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
    if program.stores:
        document["stores"] = plain_lists(program.stores)
    document["backends"] = [program.backend]
    if program.allow:
        document["allow"] = list(program.allow)
    size = program.profile.block_size
    done = _events(program) if program.level == "events" else (step.yaml(size) for step in program.operations)
    steps = [*_world(program), *done]
    if not program.breach.is_error:  # without this a warning would pass
        steps[-1]["expect"] = {"problems": []}
    document["scenarios"] = {name: {"steps": steps}}
    # Each leaf is one line; other nodes are blocks.
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
                yield {"remove_worker": step.worker_id if step.dp_rank is None else [*key]}
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
    elif isinstance(data, Updated):
        changes = {"levels": data.levels, "priorities": data.priorities}
        written = {"updated": data.block_hash, **{name: list(pair) for name, pair in changes.items() if pair}}
    else:
        written = {data.kind: list(data.block_hashes)}
    written |= _of((event.worker_id, event.event.dp_rank))
    if program.with_ids:
        written["id"] = event.event.event_id
    if event.storage_tier is not StorageTier.DEVICE:
        written["tier"] = event.storage_tier.name.lower()
    if event.token_ids is not None:
        written["token_ids"] = [number_ranges(ids) for ids in event.token_ids]
    if event.extra is not None and not isinstance(data, Cleared):
        written["extra"] = plain_lists(event.extra)
    return written | _of_a_sink(event.worker_id, program, chained=True)


def _of_a_sink(worker_id: int, program: Reproduction, *, chained: bool) -> dict[str, Any]:
    """Return the arguments of a step's sink, as the first step of a sink makes it."""
    written: dict[str, Any] = {}
    if worker_id >= FIRST_SINK_WORKER:
        sink = program.sinks[worker_id - FIRST_SINK_WORKER]
        written |= {"chained": True} if sink.chained and chained else {}
        written |= {} if sink.num_blocks is None else {"num_blocks": sink.num_blocks}
        written |= {} if sink.tier_blocks is None else {"tier_blocks": dict(sink.tier_blocks)}
        written |= {"residency": sink.residency} if sink.residency != "unique" else {}
        written |= {} if sink.prefix_closed else {"prefix_closed": False}
        written |= {name: text for name in ("hash", "seed") if (text := getattr(sink, name)) is not None}
    return written
