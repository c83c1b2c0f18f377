"""A router for all engines, tested by `test_engine_matrix.py`.

It differs in two points from a router for Dynamo's engines only. vLLM stores several copies of a block and removes each
by itself, so the router counts them. For a hybrid model vLLM publishes each cache group by itself; the router follows
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from pytest_kvmock import Removed, RouterEvent, Stored
from pytest_kvmock.values import SparseStored

Place: TypeAlias = int
"""The place of a block: the hash of all local hashes up to its own."""

ROOT: Place = 0

ATTENTION = ("full_attention", "mla_attention")


class EngineIndex:
    """An index of the prefixes of each worker, by the local hashes in the workers' events.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[int, int] = {}  # the number of the attention group, by worker
        self._places: dict[int, dict[int, Place]] = {}  # the place of each block, by worker
        self._copies: dict[int, Counter[Place]] = {}  # the number of copies at each place, by worker

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker."""
        if not self._is_of_blocks(event):
            return
        places = self._places.setdefault(event.worker_id, {})
        copies = self._copies.setdefault(event.worker_id, Counter())
        data = event.event.data
        if isinstance(data, Stored):
            place = ROOT if data.parent_hash is None else places[data.parent_hash]
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                place = hash((place, local))
                places[block] = place
                copies[place] += 1
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                if block not in places:  # a prompt's tail
                    continue
                copies[places[block]] -= 1
                if not copies[places[block]]:
                    del copies[places[block]], places[block]
        else:
            places.clear()
            copies.clear()

    def _is_of_blocks(self, event: RouterEvent) -> bool:
        """Whether an event is about whole blocks of the attention group; for an engine with one cache, every event
        is.
        """
        data, extra = event.event.data, event.extra or {}
        group = extra.get("group_idx", 0)
        if isinstance(data, Stored):
            if isinstance(data, SparseStored) or extra.get("kv_cache_spec_kind", ATTENTION[0]) not in ATTENTION:
                return False
            self._groups[event.worker_id] = group
            return not event.token_ids or len(event.token_ids[0]) == self._block_size
        return not isinstance(data, Removed) or group == self._groups.get(event.worker_id, 0)

    def find_matches(self, local_hashes: Sequence[int]) -> dict[int, int]:
        """Return the number of leading blocks of a prompt that each worker has; workers without any are absent."""
        found = {worker: self._depth(copies, local_hashes) for worker, copies in self._copies.items()}
        return {worker: depth for worker, depth in found.items() if depth}

    @staticmethod
    def _depth(copies: Counter[Place], local_hashes: Sequence[int]) -> int:
        place = ROOT
        for depth, local in enumerate(local_hashes):
            place = hash((place, local))
            if place not in copies:
                return depth
        return len(local_hashes)


class EngineRouter:
    """Sends a prompt to the worker that has most of it; among equals, to the one that was picked least often.

    Args:
        index: the index of the workers' blocks.
        workers: the ids of the workers.
    """

    def __init__(self, index: EngineIndex, workers: Sequence[int]) -> None:
        self.index = index
        self._asked = dict.fromkeys(workers, 0)

    def route(self, local_hashes: Sequence[int]) -> int:
        """Choose a worker for a prompt."""
        overlap = self.index.find_matches(local_hashes)
        worker = min(self._asked, key=lambda worker: (-overlap.get(worker, 0), self._asked[worker]))
        self._asked[worker] += 1
        return worker
