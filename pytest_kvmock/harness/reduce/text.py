"""Events as Python code: the calls of a sink, or of `apply`, that publish them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, WorkerRemoved
from pytest_kvmock.values.events import Cleared, RouterEvent, SparseStored, StorageTier, Stored, Updated, block_text
from pytest_kvmock.values.programs.python import literal, number_parts, token_list

if TYPE_CHECKING:
    from pytest_kvmock.values.events import EventData

_ANY_BLOCK: Final = "Stored(None, (block,), (block,))"
_ALIKE: Final = 6
"""Minimum number of events with consecutive blocks, and no other difference, that are written as one loop."""


def event_lines(steps: Iterable[object], *, sinks: int, with_ids: bool, after_each: str | None = None) -> Iterator[str]:
    """Yield the lines that deliver events, remove workers and lose batches.

    Args:
        steps: the events and `NoEvent` steps.
        sinks: number of sinks; the first is worker 2**16.
        with_ids: whether the ids of the events are written; False: they count from 0.
        after_each: a line that follows each step; each step is then a separate line.
    """
    if after_each is not None:
        for step in steps:
            yield from event_lines((step,), sinks=sinks, with_ids=with_ids)
            yield after_each
        return
    for (kind, where), group in groupby(steps, _place):
        alike = [*group]
        if kind == "remove":
            for step in alike:
                if isinstance(step, BatchesLost):
                    yield _batches_lost(step, sinks)
                elif isinstance(step, WorkerRemoved):
                    yield _worker_removed(step)
            continue
        events = [step for step in alike if isinstance(step, RouterEvent)]
        if kind == "sink":
            name = sink_name(where[0], sinks)
            for run in _alike(events, with_ids=with_ids):
                if len(run) > 1:
                    yield f"for block in {_blocks(run)}:"
                    yield f"    {name}({_ANY_BLOCK})"
                else:
                    yield f"{name}({_call(run[0], with_ids=with_ids)})"
            continue
        worker_id, rank = where
        at = "".join([f", worker_id={worker_id}" * bool(worker_id), f", dp_rank={rank}" * bool(rank)])
        texts = [
            f"*({_ANY_BLOCK} for block in {_blocks(run)})" if len(run) > 1 else _applied(run[0], with_ids=with_ids)
            for run in _alike(events, with_ids=with_ids)
        ]
        if len(events) == 1:
            yield f"kv.apply({texts[0]}{at})"
        else:
            yield "kv.apply(["
            yield from (f"    {text}," for text in texts)
            yield f"]{at})"


def _alike(events: Sequence[RouterEvent], *, with_ids: bool) -> Iterator[Sequence[RouterEvent]]:
    """Yield single events, and runs of events that each store one root block, each block one higher than the last."""
    start = 0
    while start < len(events):
        first = events[start].event.data
        end = start
        if isinstance(first, Stored) and not with_ids:
            block = first.block_hashes[0] if first.block_hashes else 0
            while end < len(events) and _is_plain(events[end], block + end - start):
                end += 1
        if end - start < _ALIKE:
            end = start + 1
        yield events[start:end]
        start = end


def _is_plain(event: RouterEvent, block: int) -> bool:
    """Whether an event only stores one root block on the device, and, in a sink, on rank 0."""
    rank = event.event.dp_rank if event.worker_id >= FIRST_SINK_WORKER else 0
    plain = (Stored(None, (block,), (block,)), StorageTier.DEVICE, None, None, 0)
    return plain == (event.event.data, event.storage_tier, event.token_ids, event.extra, rank)


def _blocks(run: Sequence[RouterEvent]) -> str:
    """Return the blocks of a run of events as a range."""
    first, last = (event.event.data for event in (run[0], run[-1]))
    assert isinstance(first, Stored)
    assert isinstance(last, Stored)
    return f"range({block_text(first.block_hashes[0])}, {block_text(last.block_hashes[0] + 1)})"


def sink_name(worker_id: int, sinks: int) -> str:
    """Return the name of one of `sinks` sinks."""
    return "sink" if sinks == 1 else f"sink{worker_id - FIRST_SINK_WORKER + 1}"


def _place(step: object) -> tuple[str, tuple[int, int]]:
    if not isinstance(step, RouterEvent):
        return "remove", (0, 0)
    where = (step.worker_id, step.event.dp_rank)
    return ("sink" if step.worker_id >= FIRST_SINK_WORKER else "apply"), where


def _worker_removed(step: WorkerRemoved) -> str:
    if step.first_id is None:
        of = step.worker_id if step.dp_rank is None else (step.worker_id, step.dp_rank)
        return f"kv.remove_worker({of})"
    rank = f", dp_rank={step.dp_rank}" if step.dp_rank else ""
    return f"kv.worker({step.worker_id}{rank}).restart(announced=True)"


def _batches_lost(step: BatchesLost, sinks: int) -> str:
    is_sink = step.worker_id >= FIRST_SINK_WORKER
    whose = f"{sink_name(step.worker_id, sinks)}.worker_id" if is_sink else str(step.worker_id)
    observed = f", {literal(step.observed)}" if step.observed else ""
    return f"kv.inside.lost_batches({whose}, {step.dp_rank}, {step.batches!r}{observed})"


def _call(step: RouterEvent, *, with_ids: bool) -> str:
    """Return the arguments of a sink's call."""
    text = _data(step.event.data)
    if with_ids or step.event.dp_rank:
        text = _with_id(step, text)
    if step.storage_tier is not StorageTier.DEVICE or step.token_ids is not None:
        text += f", {_tier(step)}"
    if step.token_ids is not None:
        text += f", {_tokens(step)}"
    if step.extra is not None:
        text += f", extra={_extra(step)}"
    return text


def _applied(step: RouterEvent, *, with_ids: bool) -> str:
    """Return the text of an event as an argument of `apply`."""
    text = _data(step.event.data)
    has_more = step.storage_tier is not StorageTier.DEVICE or step.token_ids is not None or step.extra is not None
    if not with_ids and not has_more:
        return text
    text = _with_id(step, text)
    if has_more:
        tokens = "" if step.token_ids is None else f", {_tokens(step)}"
        extra = "" if step.extra is None else f", extra={_extra(step)}"
        text = f"RouterEvent({step.worker_id}, {text}, {_tier(step)}{tokens}{extra})"
    return text


def _with_id(step: RouterEvent, data: str) -> str:
    rank = f", {step.event.dp_rank}" if step.event.dp_rank else ""
    return f"KvCacheEvent({step.event.event_id}, {data}{rank})"


def _tier(step: RouterEvent) -> str:
    return f"StorageTier.{step.storage_tier.name}"


def _tokens(step: RouterEvent) -> str:
    return f"[{', '.join(map(token_list, step.token_ids or ()))}]"


def _extra(step: RouterEvent) -> str:
    extra = dict(step.extra or {})
    if "extra_keys" in extra:  # a tuple, as `literal` has a rule for tuples
        extra["extra_keys"] = tuple(extra["extra_keys"])
    return literal(extra)


def _data(data: EventData) -> str:
    if isinstance(data, SparseStored):
        parent = "None" if data.parent_hash is None else block_text(data.parent_hash)
        return f"SparseStored({parent}, {_tuple(data.block_hashes)}, span={data.span}, block_size={data.block_size})"
    if isinstance(data, Stored):
        parent = "None" if data.parent_hash is None else block_text(data.parent_hash)
        more = "" if data.start_position is None else f", start_position={data.start_position}"
        more += "" if data.mm_extra_info is None else f", mm_extra_info={data.mm_extra_info!r}"
        return f"Stored({parent}, {_tuple(data.block_hashes)}, {_tuple(data.tokens_hashes)}{more})"
    if isinstance(data, Updated):
        return f"Updated({block_text(data.block_hash)}, {data.levels}, {data.priorities})"
    if not isinstance(data, Cleared):
        return f"{type(data).__name__}({_tuple(data.block_hashes)})"
    return "Cleared()"


def _tuple(hashes: Sequence[int]) -> str:
    parts = number_parts(hashes)
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
