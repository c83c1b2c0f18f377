"""A correct index, to plant bugs in: for each worker and rank, each block with the local hashes from the root to it."""

from collections import defaultdict

from pytest_kvmock import Cleared, Stored


class HashIndex:
    def __init__(self):
        self.held = defaultdict(dict)

    def apply(self, event):
        blocks, data = self.held[self.owner(event)], event.event.data
        if isinstance(data, Stored):
            self.store(blocks, data)
        elif isinstance(data, Cleared):
            blocks.clear()
        else:
            for block in data.block_hashes:
                self.remove(blocks, block)

    def owner(self, event):
        return event.worker_id, event.event.dp_rank

    def store(self, blocks, data):
        chain = () if data.parent_hash is None else blocks[data.parent_hash]
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            chain = blocks[block] = (*chain, local)

    def remove(self, blocks, block):
        del blocks[block]

    def find_matches(self, local_hashes):
        matches = {}
        for who, blocks in self.held.items():
            chains, depth = set(blocks.values()), 0
            while depth < len(local_hashes) and tuple(local_hashes[: depth + 1]) in chains:
                depth += 1
            matches[who] = depth
        return matches
