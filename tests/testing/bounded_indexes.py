"""Indexes that keep a limited number of blocks and forget the oldest."""

from itertools import takewhile

from pytest_kvmock import Cleared, StorageTier, Stored


class BoundedIndex:
    """A right bounded index: a forgotten block is a hole, behind which nothing is found, and not a root.

    Args:
        most: number of blocks that it keeps.
    """

    def __init__(self, most):
        self.most, self.held = most, {}  # by worker, rank and block: the chain of local hashes that ends in the block

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if isinstance(data, Cleared):
            self.drop(lambda each: each == key)
        elif event.storage_tier is StorageTier.DEVICE:
            self.store(key, data) if isinstance(data, Stored) else self.remove(key, data)

    def store(self, key, data):
        chain = self.parent(key, data)
        if chain is not None:
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                chain = (*chain, local)
                self.held[key, block] = chain
        while len(self.held) > self.most:
            del self.held[next(iter(self.held))]

    def parent(self, key, data):
        return () if data.parent_hash is None else self.held.get((key, data.parent_hash))

    def remove(self, key, data):
        for block in data.block_hashes:
            self.held.pop((key, block), None)

    def drop(self, which):
        self.held = {each: chain for each, chain in self.held.items() if not which(each[0])}

    def remove_worker(self, worker_id):
        self.drop(lambda key: key[0] == worker_id)

    def find_matches(self, local_hashes):
        asked = [tuple(local_hashes[:end]) for end in range(1, len(local_hashes) + 1)]
        chains = {}
        for (key, _), chain in self.held.items():
            chains.setdefault(key, set()).add(chain)
        return {key: len([*takewhile(of.__contains__, asked)]) for key, of in chains.items()}


class HangsUnderTheRootWhatItForgot(BoundedIndex):
    """Stores children of forgotten blocks as roots once it has been full."""

    full = False

    def parent(self, key, data):
        chain = super().parent(key, data)
        self.full = self.full or len(self.held) == self.most
        return () if chain is None and self.full else chain


class RemovesNothingOnceItIsFull(BoundedIndex):
    def remove(self, key, data):
        if len(self.held) < self.most:
            super().remove(key, data)
