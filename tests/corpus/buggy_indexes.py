"""Plausible indexes with one bug each; apart from that bug they are right over every backend."""

from collections import Counter, deque
from contextlib import suppress
from itertools import takewhile

from pytest_kvmock import Cleared, KvCacheEvent, RadixIndex, RadixIndexError, Removed, RouterEvent, StorageTier, Stored

# ------------------------------------------------------------------------------------------------- right ones


class Tree:
    """A right index: the reference's own tree, which counts copies if the backend publishes them."""

    def __init__(self, *, counts=False):
        self.tree = RadixIndex(count_copies=counts)
        self.tree._strict_removed = True  # as when the tables were made: every unknown block is an error

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.tree.remove_worker_dp_rank(worker_id, dp_rank)


class Chains:
    """A right index of another kind: it holds, for each block, the local hashes from the root and the number of copies.

    A block keeps its chain while its parent is gone, so it is found again as soon as the parent is back.
    """

    def __init__(self, *, counts=False):
        self.counts = counts
        self.held = {}
        self.copies = {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if isinstance(data, Cleared):
            self.remove_worker_dp_rank(*key)
        elif event.storage_tier is StorageTier.DEVICE:  # no query asks for other tiers
            held, copies = self.held.setdefault(key, {}), self.copies.setdefault(key, Counter())
            if isinstance(data, Stored):
                self.store(held, copies, data)
            else:
                self.remove(held, copies, data)

    def store(self, held, copies, data):
        chain = () if data.parent_hash is None else held.get(data.parent_hash)
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if chain is not None:  # no query can reach a block below an unknown parent
                chain = held[block] = (*chain, local)
                copies[block] = copies[block] + 1 if self.counts else 1

    def remove(self, held, copies, data):
        for block in data.block_hashes:
            copies[block] -= 1
            if copies[block] < 1:
                held.pop(block, None)
                del copies[block]

    def find_matches(self, local_hashes):
        chains = [tuple(local_hashes[:n]) for n in range(1, len(local_hashes) + 1)]
        return {key: len([*takewhile(set(held.values()).__contains__, chains)]) for key, held in self.held.items()}

    def remove_worker(self, worker_id):
        for key in [key for key in self.held if key[0] == worker_id]:
            self.remove_worker_dp_rank(*key)

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.held.pop((worker_id, dp_rank), None)
        self.copies.pop((worker_id, dp_rank), None)


# ------------------------------------------------------------------------------------------------- wrong ones


def with_data(event, data):
    """Return the event with other data."""
    inner = event.event
    return RouterEvent(event.worker_id, KvCacheEvent(inner.event_id, data, inner.dp_rank), event.storage_tier)


class IgnoresInnerRemoved(Tree):
    """Ignores a Removed of a block that has children: "it will go when they go"."""

    def __init__(self, *, counts=False):
        super().__init__(counts=counts)
        self.children = {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        children = self.children.setdefault(key, {})
        if isinstance(data, Stored):
            for parent, block in zip((data.parent_hash, *data.block_hashes), data.block_hashes, strict=False):
                children.setdefault(parent, set()).add(block)
        elif isinstance(data, Removed):
            leaves = []
            for block in data.block_hashes:
                if not children.get(block):
                    leaves.append(block)
                    for others in children.values():
                        others.discard(block)
            event = with_data(event, Removed(leaves))
        else:
            children.clear()
        super().apply(event)


class MixesRanksUp(Tree):
    """Treats all ranks of a worker as one."""

    def apply(self, event):
        one = RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, event.event.data, 0), event.storage_tier)
        with suppress(RadixIndexError):  # the other rank has removed it already
            super().apply(one)

    def find_matches(self, local_hashes):
        return {worker_id: blocks for (worker_id, _), blocks in super().find_matches(local_hashes).items()}


class OverflowingQueue(Tree):
    """Queues up to 64 events and drops the oldest when the queue is full."""

    def __init__(self, *, counts=False):
        super().__init__(counts=counts)
        self.queue = deque(maxlen=64)

    def apply(self, event):
        self.queue.append(event)

    def flush(self):
        while self.queue:
            with suppress(RadixIndexError):
                self.tree.apply(self.queue.popleft())

    def find_matches(self, local_hashes):
        self.flush()
        return super().find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.flush()
        super().remove_worker(worker_id)

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.flush()
        super().remove_worker_dp_rank(worker_id, dp_rank)


class HangsBlocksWrongly(Tree):
    """Adds a Stored that has a parent below the block that was stored last, whichever that is."""

    def __init__(self, *, counts=False):
        super().__init__(counts=counts)
        self.last = {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if isinstance(data, Stored):
            parent = None if data.parent_hash is None else self.last.get(key)
            self.last[key] = data.block_hashes[-1]
            event = with_data(event, Stored(parent, data.block_hashes, data.tokens_hashes))
        with suppress(RadixIndexError):
            super().apply(event)


class AnswersOneShort(Tree):
    """Does not count the last block that is held."""

    def find_matches(self, local_hashes):
        return {key: blocks - 1 for key, blocks in super().find_matches(local_hashes).items()}


class IgnoresCleared(Tree):
    """Ignores a Cleared as an unsupported kind of event."""

    def apply(self, event):
        if not isinstance(event.event.data, Cleared):
            super().apply(event)


class ClearsAllRanks(Tree):
    """Clears all ranks of a worker at a Cleared of one rank."""

    def apply(self, event):
        if isinstance(event.event.data, Cleared):
            self.tree.remove_worker(event.worker_id)
        else:
            with suppress(RadixIndexError):
                super().apply(event)


class KeepsRemovedWorkers(Tree):
    """Accepts the removal of a worker without applying it."""

    def remove_worker(self, worker_id):
        pass

    remove_worker_dp_rank = None


class ForgetsRankZeroOnly(Tree):
    """Removes only rank 0 of a removed worker."""

    def remove_worker(self, worker_id):
        self.tree.remove_worker_dp_rank(worker_id, 0)

    remove_worker_dp_rank = None


class QueueOutlivesWorker(Tree):
    """Removes a worker at once, but brings it back by its events that are still queued."""

    def __init__(self, *, counts=False):
        super().__init__(counts=counts)
        self.queue = []

    def apply(self, event):
        self.queue.append(event)

    def flush(self):
        queue, self.queue = self.queue, []
        for event in queue:
            with suppress(RadixIndexError):
                self.tree.apply(event)


class ReadsRemovedUnsigned(Tree):
    """Reads signed hashes of a Removed as unsigned ones, so it never removes the negative half."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Removed):
            event = with_data(event, Removed(block % 2**64 for block in data.block_hashes))
        with suppress(RadixIndexError):
            super().apply(event)


class CountsNoCopies(Tree):
    """Removes a block at the first Removed, however many copies of it were stored."""

    def __init__(self, *, counts=False):
        super().__init__()

    def apply(self, event):
        with suppress(RadixIndexError):
            super().apply(event)


class GrowsWithEvents(Tree):
    """Keeps every event for ever; its answers are right."""

    def __init__(self, *, counts=False):
        super().__init__(counts=counts)
        self.journal = []

    def apply(self, event):
        self.journal.append(event)
        super().apply(event)

    def size(self):
        return len(self.journal)


BUGGY_INDEXES = {
    "removed_inner_ignored": IgnoresInnerRemoved,
    "ranks_mixed_up": MixesRanksUp,
    "queue_overflows": OverflowingQueue,
    "parent_wrong": HangsBlocksWrongly,
    "match_one_short": AnswersOneShort,
    "cleared_ignored": IgnoresCleared,
    "cleared_clears_all_ranks": ClearsAllRanks,
    "removed_worker_kept": KeepsRemovedWorkers,
    "removed_worker_rank_0_only": ForgetsRankZeroOnly,
    "removed_worker_back_by_queue": QueueOutlivesWorker,
    "signed_read_as_unsigned": ReadsRemovedUnsigned,
    "copies_not_counted": CountsNoCopies,
    "grows_with_events": GrowsWithEvents,
}
RIGHT_INDEXES = {"tree": Tree, "chains": Chains}
