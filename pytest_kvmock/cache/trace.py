"""The KV cache trace: one line in the log for each allocation and each eviction.

The logger is `pytest_kvmock.cache`, the level DEBUG; words and fields are those of dynamo-mocker
(`kv_cache_trace::log_vllm_trace`, switched on there by DYN_MOCKER_KV_CACHE_TRACE), and the blocks beside them, as 1.0.2
had them. The fields are attributes of the log record too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from pytest_kvmock.events import block_text

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager

LOG: Final = logging.getLogger("pytest_kvmock.cache")
_TEXT: Final = (
    "KV cache trace event=%s dp_rank=%d block_size=%d free_blocks=%d active_blocks=%d inactive_blocks=%d "
    "total_blocks=%d utilization=%.3f backend=%s block_ids=[%s]"
)


def trace(manager: KvManager, stored: Iterable[int], evicted: Iterable[int | None]) -> None:
    """Log what one move allocated, then what it evicted; to be called where the logger is enabled for DEBUG.

    Args:
        manager: whose pool it is; its sizes are those after the move, as in the original.
        stored: the full blocks that became cached.
        evicted: the blocks that went, in order; None, for one that the manager had lost sight of, is left out.
    """
    total, active, inactive = manager.max_capacity, manager.num_active_blocks, manager.num_inactive_blocks
    free = total - active - inactive
    for event, given in (("allocation", stored), ("eviction", evicted)):
        blocks = [block for block in given if block is not None]
        if not blocks:
            continue
        fields = {
            "event": event,
            "dp_rank": manager.dp_rank,
            "block_size": manager.block_size,
            "free_blocks": free,
            "active_blocks": active,
            "inactive_blocks": inactive,
            "total_blocks": total,
            "utilization": (active + inactive) / total,
            "backend": manager.backend,
        }
        LOG.debug(
            _TEXT,
            *fields.values(),
            ", ".join(map(block_text, blocks)),
            extra={**fields, "block_ids": blocks},
            stacklevel=2,
        )
