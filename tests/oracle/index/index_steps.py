"""A small language for tables of steps on a router index.

Each step is a callable that takes an index and returns: None or the error's text for an event, scores for a query,
rows for a dump. A block that is not given as a pair has the sequence hash `base + local`.
"""

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, Stored, sequence_hashes
from pytest_kvmock.oracle import RadixIndex, RadixIndexError
from pytest_kvmock.values.tokens import chained_hash

PARENT = "Failed to find parent block"
UNKNOWN = "Failed to find block"
INVALID = "Invalid block sequence"


def event(worker, data, rank=0, event_id=0, **kwargs):
    return RouterEvent(worker, KvCacheEvent(event_id, data, rank), **kwargs)


def _event(worker, data, rank):
    def step(index: RadixIndex):
        try:
            index.apply(event(worker, data, rank))
        except RadixIndexError as error:
            return error.reason
        return None

    return step


def store(worker, blocks, parent=None, *, rank=0, base=100):
    pairs = [block if isinstance(block, tuple) else (base + block, block) for block in blocks]
    return _event(worker, Stored(parent, tuple(h for h, _ in pairs), tuple(local for _, local in pairs)), rank)


def remove(worker, block_hashes, *, rank=0):
    return _event(worker, Removed(tuple(block_hashes)), rank)


def cleared(worker, *, rank=0):
    return _event(worker, Cleared(), rank)


def remove_worker(worker):
    return lambda index: index.remove_worker(worker)


def clear_all_blocks(worker):
    return lambda index: index.clear_all_blocks(worker)


def find(*local_hashes, early_exit=False):
    return lambda index: index.find_matches(local_hashes, early_exit).scores


def dump(index):
    return [
        (e.worker_id, e.event.dp_rank, e.event.data.parent_hash, e.event.data.block_hashes) for e in index.dump_events()
    ]


def play(index, steps):
    """Return the answers of all steps, in order."""
    return [step(index) for step in steps]


def chain(worker, local, before=(), *, rank=0):
    """Return a Stored of `local` after the blocks `before`, with the sequence hashes of their chain."""
    hashes = sequence_hashes([*before, *local])
    start = len(before)
    return event(worker, Stored(hashes[start - 1] if start else None, tuple(hashes[start:]), tuple(local)), rank)


def chain_removed(worker, local, *positions, rank=0):
    """Return a Removed of the blocks at these positions of the chain `local`."""
    hashes = sequence_hashes(local)
    return event(worker, Removed(tuple(hashes[i] for i in positions)), rank)


__all__ = [
    "INVALID", "PARENT", "UNKNOWN", "chain", "chain_removed", "chained_hash", "clear_all_blocks", "cleared", "dump",
    "event", "find", "play", "remove", "remove_worker", "store",
]  # fmt: skip
