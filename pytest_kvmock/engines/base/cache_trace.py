"""The trace of allocations and evictions: lines in the log, as dynamo-mocker writes them.

Each line is an event, Stored ("allocation") or Removed ("eviction"), of the device or a tier below it, with or without
a sink. Its sizes are those of the device at that moment. The logger is `pytest_kvmock.engines`, the level INFO. When it
is off, each move that stores or evicts costs one check of the logger's level. Two things switch it on:

- the environment variable DYN_MOCKER_KV_CACHE_TRACE, `1` or `true` in any case, which is read once, when the first
  manager is made (dynamo-mocker: at its first event). The logger then has the level INFO, unless it was given one
  before;
- the level DEBUG of the logger, at any time (ours).

Words and fields are those of 1.0.2 (`KvManager::publish_kv_event`) for `hash_cache`, and of 1.2.1
(`kv_cache_trace::log_vllm_trace`) for `lineage`, `lru` and `multi_lru`. Backend, tier and blocks, which 1.2.1 leaves
out, are added. Managers that take requests log the same line, although vLLM and SGLang have no such trace and Dynamo's
mock of SGLang counts tokens in its own. The fields are also attributes of the log record.

`timestamp_ms` is the time at which `logging` made the record (`LogRecord.created`): no clock is read here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal

from pytest_kvmock.engines.base.manager_base import LOG
from pytest_kvmock.values.events import StorageTier, block_text

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager

VARIABLE: Final = "DYN_MOCKER_KV_CACHE_TRACE"

_PLAIN: Final = (
    "event=%(event)s timestamp_ms=%(timestamp_ms)d dp_rank=%(dp_rank)d block_size=%(block_size)d "
    "free_blocks=%(free_blocks)d "
    "active_blocks=%(active_blocks)d inactive_blocks=%(inactive_blocks)d total_blocks=%(total_blocks)d "
    "utilization=%(utilization).3f backend=%(backend)s tier=%(tier)s block_ids=[%(blocks)s]"
)
PLAIN: Final = f"KV cache trace {_PLAIN}"
OF_1_2_1: Final = f"KV cache trace engine_type=vllm {_PLAIN}"
OF_1_0_2: Final = (
    "KV cache trace event=%(event)s timestamp_ms=%(timestamp_ms)d block_ids=[%(blocks)s] block_size=%(block_size)d "
    "free_blocks_after=%(free_blocks_after)d active_blocks=%(active_blocks)d inactive_blocks=%(inactive_blocks)d "
    "total_blocks=%(total_blocks)d dp_rank=%(dp_rank)d"
)


def is_asked_for(value: str | None) -> bool:
    """Return whether this value of the environment variable switches the trace on."""
    return value is not None and (value == "1" or value.lower() == "true")


_ASKED_FOR: Final = is_asked_for(os.environ.get(VARIABLE))
TRACE_LEVEL: Final = logging.INFO if _ASKED_FOR else logging.DEBUG
"""The trace is on if the logger is enabled for this level."""
if _ASKED_FOR and not LOG.level:
    LOG.setLevel(logging.INFO)


def _stamp(record: logging.LogRecord) -> bool:
    """Give a line of the trace the time of its record."""
    if isinstance(record.args, dict) and "timestamp_ms" in record.args:
        record.timestamp_ms = record.args["timestamp_ms"] = int(record.created * 1000)
    return True


LOG.addFilter(_stamp)


def trace(
    manager: KvManager,
    event: Literal["allocation", "eviction"],
    blocks: Iterable[int | None],
    *,
    tier: StorageTier = StorageTier.DEVICE,
    sizes: tuple[int, int] | None = None,
    form: str = PLAIN,
) -> None:
    """Log an allocation or eviction, if there are blocks. Call it only if the logger is enabled for `TRACE_LEVEL`.

    Args:
        manager: the manager that publishes the event.
        event: "allocation" or "eviction".
        blocks: the full blocks; None, for a block without an entry in the manager, is left out.
        tier: the tier.
        sizes: active and inactive blocks of the device at that moment; None: the manager's present numbers.
        form: form of the line.
    """
    block_ids = [block for block in blocks if block is not None]
    if not block_ids:
        return
    active, inactive = sizes or (manager.num_active_blocks, manager.num_inactive_blocks)
    total = manager.num_blocks
    free = max(0, total - active - inactive)
    fields = {
        "event": event,
        "timestamp_ms": 0,  # see _stamp
        "dp_rank": manager.dp_rank,
        "block_size": manager.block_size,
        "free_blocks": free,
        "free_blocks_after": free,
        "active_blocks": active,
        "inactive_blocks": inactive,
        "total_blocks": total,
        "utilization": (active + inactive) / total,
        "backend": manager.backend,
        "tier": tier.value,
        "block_ids": block_ids,
    }
    LOG.info(form, {**fields, "blocks": ", ".join(map(block_text, block_ids))}, extra=fields, stacklevel=2)
