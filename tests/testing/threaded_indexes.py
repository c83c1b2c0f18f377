"""Indexes that receive events from several threads: right ones, and wrong ones whose critical section is interrupted
between two writes.
"""

from contextlib import nullcontext
from itertools import takewhile
from threading import Lock, RLock
from time import sleep

from pytest_kvmock import Cleared, RadixIndex, StorageTier, Stored


def give_way():
    """Let another thread run, as could happen at any line."""
    sleep(0)


class Holders:
    """A right index: one map with the holders of each chain; each call holds the lock from its first to its last
    line.
    """

    def __init__(self):
        self.lock = RLock()
        self.apply_lock = self.remove_lock = self.second_lock = self.lock
        self.holders, self.names = {}, {}  # workers and ranks by chain of local hashes; chain by block

    def apply(self, event):
        if event.storage_tier is not StorageTier.DEVICE:
            return
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        with self.apply_lock:
            if isinstance(data, Cleared):
                self.drop(lambda each: each == key)
            elif isinstance(data, Stored):
                self.store(key, data)
            else:
                for block in data.block_hashes:
                    chain = self.names.get(key, {}).pop(block, None)
                    if chain is not None:
                        self.change(chain, lambda held: held - {key})

    def store(self, key, data):
        names = self.names.setdefault(key, {})
        chain = () if data.parent_hash is None else names.get(data.parent_hash)
        if chain is None:
            return
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            chain = (*chain, local)
            names[block] = chain
            self.change(chain, lambda held: held | {key})

    def change(self, chain, how):
        with self.second_lock:
            held = how(self.holders.get(chain, frozenset()))
            give_way()
            self.holders[chain] = held

    def drop(self, which):
        left = {chain: frozenset(key for key in held if not which(key)) for chain, held in [*self.holders.items()]}
        give_way()
        self.holders = left
        for key in [*self.names]:
            if which(key):
                self.names.pop(key, None)

    def remove_worker(self, worker_id):
        with self.remove_lock:
            self.drop(lambda key: key[0] == worker_id)

    def find_matches(self, local_hashes):
        with self.lock:
            found = {}
            for end in range(1, len(local_hashes) + 1):
                for key in self.holders.get(tuple(local_hashes[:end]), ()):
                    if found.get(key, 0) == end - 1:
                        found[key] = end
            return found


class UnlockedApply(Holders):
    def __init__(self):
        super().__init__()
        self.apply_lock = self.second_lock = nullcontext()


class UnlockedRemoveWorker(Holders):
    def __init__(self):
        super().__init__()
        self.remove_lock = nullcontext()


class LocksTheNamesAlone(Holders):
    """Holds the lock for the first of two writes only."""

    def __init__(self):
        super().__init__()
        self.apply_lock, self.second_lock = nullcontext(), nullcontext()

    def store(self, key, data):
        with self.lock:
            self.names.setdefault(key, {})
        super().store(key, data)


class ALockForEachWorker(Holders):
    """Has a lock per worker and one map for all."""

    def __init__(self):
        super().__init__()
        self.locks = {}
        self.second_lock = nullcontext()

    def apply(self, event):
        with self.locks.setdefault(event.worker_id, Lock()):
            self.apply_lock = nullcontext()
            super().apply(event)


class LocksTwiceForOneStored(Holders):
    """Looks up holders under the lock, releases it, and writes them under it again."""

    def __init__(self):
        super().__init__()
        self.apply_lock = nullcontext()

    def change(self, chain, how):
        with self.lock:
            held = how(self.holders.get(chain, frozenset()))
        give_way()
        with self.lock:
            self.holders[chain] = held


class RemovesInTwoSteps(Holders):
    """Removes the holders of a worker under the lock, releases it, and removes the names under it again."""

    def __init__(self):
        super().__init__()
        self.remove_lock = nullcontext()

    def remove_worker(self, worker_id):
        with self.lock:
            self.holders = {
                chain: frozenset(key for key in held if key[0] != worker_id) for chain, held in self.holders.items()
            }
        give_way()
        with self.lock:
            for key in [*self.names]:
                if key[0] == worker_id:
                    del self.names[key]


WRONG = (
    RemovesInTwoSteps,
    UnlockedApply,
    UnlockedRemoveWorker,
    LocksTheNamesAlone,
    ALockForEachWorker,
    LocksTwiceForOneStored,
)


class Locked:
    """The reference index with a lock."""

    def __init__(self):
        self.lock, self.tree = Lock(), RadixIndex()

    def apply(self, event):
        with self.lock:
            self.tree.apply(event)

    def find_matches(self, local_hashes):
        with self.lock:
            return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        with self.lock:
            self.tree.remove_worker(worker_id)


class ByTheInterpreter:
    """Needs no lock: each worker and rank has its own maps, written by one thread; reads of others are single C
    calls.
    """

    def __init__(self):
        self.held = {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        blocks = self.held.setdefault(key, {})
        if isinstance(data, Cleared):
            blocks.clear()
        elif event.storage_tier is not StorageTier.DEVICE:
            return
        elif isinstance(data, Stored):
            chain = () if data.parent_hash is None else blocks.get(data.parent_hash)
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True) if chain is not None else ():
                blocks[block] = chain = (*chain, local)
        else:
            for block in data.block_hashes:
                blocks.pop(block, None)

    def find_matches(self, local_hashes):
        asked = [tuple(local_hashes[:end]) for end in range(1, len(local_hashes) + 1)]
        return {
            key: len([*takewhile(frozenset(list(blocks.values())).__contains__, asked)])
            for key, blocks in list(self.held.items())
        }

    def remove_worker(self, worker_id):
        for key in list(self.held):
            if key[0] == worker_id:
                self.held.pop(key, None)


RIGHT = (Holders, Locked, ByTheInterpreter)


class ByRecord:
    """A right index with one record per worker and rank, which it changes under the lock."""

    def __init__(self):
        self.lock, self.records = RLock(), {}

    def apply(self, event):
        if event.storage_tier is not StorageTier.DEVICE:
            return
        with self.lock:
            key = event.worker_id, event.event.dp_rank
            self.records[key] = self.changed(self.records.get(key, {}), event.event.data)

    def changed(self, record, data):
        """Return a record with the changes of an event: each block with its chain."""
        if isinstance(data, Cleared):
            return {}
        if isinstance(data, Stored):
            chain, record = () if data.parent_hash is None else record.get(data.parent_hash), dict(record)
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True) if chain is not None else ():
                record[block] = chain = (*chain, local)
            return record
        return {block: chain for block, chain in record.items() if block not in data.block_hashes}

    def find_matches(self, local_hashes):
        asked = [tuple(local_hashes[:end]) for end in range(1, len(local_hashes) + 1)]
        with self.lock:
            records = dict(self.records)
        return {key: len([*takewhile({*record.values()}.__contains__, asked)]) for key, record in records.items()}

    def remove_worker(self, worker_id):
        with self.lock:
            for key in [key for key in self.records if key[0] == worker_id]:
                del self.records[key]


class WritesBackWhatAnEventChanged(ByRecord):
    """Releases the lock between reading the record and writing it back."""

    def apply(self, event):
        if event.storage_tier is not StorageTier.DEVICE:
            return
        key = event.worker_id, event.event.dp_rank
        with self.lock:
            record = self.records.get(key, {})
        record = self.changed(record, event.event.data)
        give_way()
        with self.lock:
            self.records[key] = record


class WritesBackWhatALookUpRead(ByRecord):
    """Moves the records of a lookup to the end of the order, after releasing the lock in between."""

    def find_matches(self, local_hashes):
        with self.lock:
            records = dict(self.records)
        found = super().find_matches(local_hashes)
        give_way()
        with self.lock:
            for key in found:
                if key in records and records[key] == self.records.get(key, records[key]):
                    self.records[key] = records[key]
        return found


class RemovesARankWithoutTheLock(ByRecord):
    """Reads the records under the lock, and replaces them by the remaining ones under it again."""

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        with self.lock:
            left = {key: record for key, record in self.records.items() if key != (worker_id, dp_rank)}
        give_way()
        with self.lock:
            self.records = left


class QueuesEventsAndNoRemoval(ByRecord):
    """Queues events until a flush, but not removals: events queued before a removal come back."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def apply(self, event):
        with self.lock:
            self.queue.append(event)

    def flush(self):
        with self.lock:
            for event in self.queue:
                super().apply(event)
            self.queue.clear()


class QueuesBoth(QueuesEventsAndNoRemoval):
    """A right index: queues removals like events."""

    def remove_worker(self, worker_id):
        with self.lock:
            self.queue.append(worker_id)

    def flush(self):
        with self.lock:
            for each in self.queue:
                if isinstance(each, int):
                    ByRecord.remove_worker(self, each)
                else:
                    ByRecord.apply(self, each)
            self.queue.clear()


WRONG += (
    WritesBackWhatAnEventChanged,
    WritesBackWhatALookUpRead,
    RemovesARankWithoutTheLock,
    QueuesEventsAndNoRemoval,
)
RIGHT += (ByRecord, QueuesBoth)
