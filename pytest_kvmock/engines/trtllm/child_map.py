"""The children of a block, in the iteration order of a C++ `unordered_map`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from pytest_kvmock.engines.trtllm.hashes import BlockKey, v1_block_key

BlockT = TypeVar("BlockT")

# Theory of operation
#
# TensorRT-LLM keeps children in an `unordered_map` keyed by their hash without a parent. Its iteration order decides
# which of several equal matches is found first, and the order of a Removed of several children. libstdc++ has one list
# of all nodes, in which the nodes of a bucket are a run: a new node goes to the front of its bucket's run, and the
# first node of a bucket to the front of the list (`_M_insert_bucket_begin`). If there are more nodes than buckets, the
# number of buckets grows, and all nodes are inserted again in iteration order (`_M_rehash_aux`); it never shrinks. So
# here a run is a list, runs are a dict by bucket, both with the newest last, and the walk goes backwards through both.
#
# An only child needs no bucket: its hash is computed when a second child comes.

_BUCKETS: Final = (1, 13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697)
"""Numbers of buckets of such a map as it grows (`_Prime_rehash_policy`)."""


class ChildMap(Generic[BlockT]):
    """Children by key, walked in the order of libstdc++."""

    __slots__ = ("_blocks", "_by_first", "_growth", "_hashes", "_runs")

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, BlockT] = {}
        self._by_first: dict[BlockKey, dict[BlockKey, None]] = {}
        self._runs: dict[int, list[BlockKey]] = {}  # of all children, after there have been two
        self._hashes: dict[BlockKey, int] = {}
        self._growth = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> BlockT | None:
        """Return the child with exactly this key."""
        return self._blocks.get(key)

    def add(self, key: BlockKey, block: BlockT) -> None:
        """Add a child with a unique key."""
        if len(self._blocks) == 1 and not self._runs:
            self._put(next(iter(self._blocks)))
        self._blocks[key] = block
        self._by_first.setdefault(_first(key), {})[key] = None
        if len(self._blocks) > _BUCKETS[self._growth]:
            self._growth += 1
            walk = list(self._walk())
            self._runs = {}
            for each in walk:
                self._put(each)
        if len(self._blocks) > 1:
            self._put(key)

    def remove(self, key: BlockKey) -> None:
        """Remove a child."""
        del self._blocks[key]
        first = _first(key)
        del self._by_first[first][key]
        if not self._by_first[first]:
            del self._by_first[first]
        self._hashes.pop(key, None)
        for bucket, run in self._runs.items():
            if key in run:
                run.remove(key)
                if not run:
                    del self._runs[bucket]
                break

    def _put(self, key: BlockKey) -> None:
        found = self._hashes.get(key)
        if found is None:
            found = self._hashes[key] = v1_block_key(key)
        self._runs.setdefault(found % _BUCKETS[self._growth], []).append(key)

    def _walk(self) -> Iterator[BlockKey]:
        return (key for run in reversed(self._runs.values()) for key in reversed(run))

    def walk(self) -> list[BlockT]:
        """Return all children, in the order of the walk."""
        if len(self._blocks) < 2:
            return list(self._blocks.values())
        return [self._blocks[key] for key in self._walk()]

    def alike(self, key: BlockKey) -> list[tuple[int, BlockT]]:
        """Return each child with a key's adapter, salt and first token, after the number of their common tokens."""
        return [(_common(key.tokens, each.tokens), self._blocks[each]) for each in self._by_first.get(_first(key), ())]


def _first(key: BlockKey) -> BlockKey:
    return key._replace(tokens=key.tokens[:1])


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for place, (token, another) in enumerate(zip(one, other, strict=False)):
        if token != another:
            return place
    return min(len(one), len(other))
