"""A small KV-aware router: it sends a prompt to the worker that has most of it cached and is not too busy.

`test_prefix_router.py` tests it. Its index does its own hashing, independent of the engines': a block's key is BLAKE2b
of the previous key and of the block's content. A subclass defines the content: the token ids that are passed with the
events (`TokenIndex`), or the local hashes in them (`HashIndex`), for request traces without tokens.

The cost of a worker is that of Dynamo's router: the weighted blocks that it would have to prefill, and the blocks that
its running requests hold.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from pytest_kvmock import Removed, RouterEvent, StorageTier, Stored

ROOT = b""
"""The key before the first block."""


class PrefixIndex:
    """An index of the cached prefixes of each worker, by the workers' events, for one rank per worker and one tier.

    Attributes:
        stale: workers that lost an event, so that the index may be wrong about them.
    """

    def __init__(self) -> None:
        self.stale: set[int] = set()
        self._owners: dict[bytes, set[int]] = {}
        self._keys: dict[int, dict[int, bytes]] = {}  # by worker: our key for each of the worker's block names
        self._next_id: dict[int, int] = {}

    def contents(self, query: Sequence[int]) -> list[bytes]:
        """Return the content of each whole block of a query."""
        raise NotImplementedError

    def stored_contents(self, event: RouterEvent) -> list[bytes]:
        """Return the content of each block that a Stored names."""
        raise NotImplementedError

    def apply(self, event: RouterEvent) -> None:
        """Apply one event of a worker."""
        worker, event_id, data = event.worker_id, event.event.event_id, event.event.data
        if event_id != self._next_id.get(worker, event_id):
            self.stale.add(worker)
        self._next_id[worker] = event_id + 1
        if event.storage_tier is not StorageTier.DEVICE:
            return
        if isinstance(data, Stored):
            self._store(worker, data, self.stored_contents(event))
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                self._disown(worker, self._keys.get(worker, {}).pop(block, ROOT))
        else:
            self._forget(worker)

    def remove_worker(self, worker: int) -> None:
        """Drop a worker that was removed or restarted."""
        self._forget(worker)
        self._next_id.pop(worker, None)

    def match(self, query: Sequence[int]) -> dict[int, int]:
        """Return the number of leading blocks of a query that each worker has; workers without any are absent."""
        matches: dict[int, int] = {}
        left: set[int] | None = None
        for depth, key in enumerate(chain(ROOT, self.contents(query)), 1):
            owners = self._owners.get(key, set())
            left = owners if left is None else left & owners
            if not left:
                break
            matches.update(dict.fromkeys(left, depth))
        return matches

    def size(self, worker: int) -> int:
        """Return the number of blocks of a worker."""
        return len(self._keys.get(worker, ()))

    def _store(self, worker: int, data: Stored, contents: list[bytes]) -> None:
        keys = self._keys.setdefault(worker, {})
        parent = ROOT if data.parent_hash is None else keys.get(data.parent_hash)
        if parent is None:
            return  # its Stored was lost: the place of these blocks is unknown
        for block, key in zip(data.block_hashes, chain(parent, contents), strict=True):
            keys[block] = key
            self._owners.setdefault(key, set()).add(worker)

    def _disown(self, worker: int, key: bytes) -> None:
        owners = self._owners.get(key)
        if owners is not None:
            owners.discard(worker)
            if not owners:
                del self._owners[key]

    def _forget(self, worker: int) -> None:
        for key in self._keys.pop(worker, {}).values():
            self._disown(worker, key)
        self.stale.discard(worker)


class TokenIndex(PrefixIndex):
    """An index of token ids, queried with the tokens of a prompt."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def contents(self, query: Sequence[int]) -> list[bytes]:
        """Cut token ids into blocks."""
        size = self._block_size
        return [array("I", query[i : i + size]).tobytes() for i in range(0, len(query) - size + 1, size)]

    def stored_contents(self, event: RouterEvent) -> list[bytes]:
        """Return the token ids next to the event."""
        return [array("I", tokens).tobytes() for tokens in event.token_ids or ()]

    match_tokens = PrefixIndex.match


class HashIndex(PrefixIndex):
    """An index of local hashes, queried with the local hashes of a prompt."""

    def contents(self, query: Sequence[int]) -> list[bytes]:
        """Return each hash as the content of a block."""
        return [local.to_bytes(8) for local in query]

    def stored_contents(self, event: RouterEvent) -> list[bytes]:
        """Return the local hashes of the event."""
        assert isinstance(event.event.data, Stored)
        return self.contents(event.event.data.tokens_hashes)

    find_matches = PrefixIndex.match


class PrefixRouter:
    """Chooses a worker for each prompt.

    Args:
        index: the index of the workers' cached blocks.
        workers: number of workers, with ids from 0.
        overlap_weight: cost of a block to prefill; a block that a running request holds costs 1.
    """

    def __init__(self, index: PrefixIndex, workers: int, overlap_weight: float = 1.0) -> None:
        self.index = index
        self._workers = workers
        self._weight = overlap_weight
        self._active: Counter[int] = Counter()  # blocks of the running requests of each worker

    def route(self, query: Sequence[int]) -> int:
        """Choose the cheapest worker, and count the request as running there until it is finished.

        Among equals it chooses the worker with the fewest cached blocks.
        """
        blocks, overlap = len(self.index.contents(query)), self.index.match(query)
        costs = [(self._cost(w, blocks, overlap.get(w, 0)), self.index.size(w), w) for w in range(self._workers)]
        worker = min(costs)[-1]
        self._active[worker] += blocks
        return worker

    def finish(self, worker: int, query: Sequence[int]) -> None:
        """Stop counting a finished request."""
        self._active[worker] -= len(self.index.contents(query))

    def _cost(self, worker: int, blocks: int, overlap: int) -> float:
        cached = 0 if worker in self.index.stale else overlap
        return self._weight * (blocks - cached) + self._active[worker]


def chain(parent: bytes, contents: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the keys of consecutive blocks after `parent`."""
    for content in contents:
        parent = blake2b(parent + content, digest_size=16).digest()
        yield parent
