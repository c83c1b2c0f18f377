"""The index of README: queried by local hashes, for engines that publish a block once, however many copies they
hold.
"""

from pytest_kvmock import Cleared, StorageTier, Stored
from pytest_kvmock.testing import IndexContract


class MyIndex:
    """Holds, for each block of each worker and rank, the block before it and its local hash."""

    def __init__(self):
        self.held = {}  # by worker and rank: each block's parent and local hash

    def apply(self, event):
        blocks = self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        data = event.event.data
        if isinstance(data, Cleared):
            blocks.clear()
        elif event.storage_tier is not StorageTier.DEVICE:
            return
        elif isinstance(data, Stored):
            parent = data.parent_hash
            assert parent is None or parent in blocks
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                blocks[block] = (parent, local)
                parent = block
        else:
            for block in data.block_hashes:
                blocks.pop(block, None)

    def find_matches(self, local_hashes):
        matches = {}
        for rank, blocks in self.held.items():
            after = {key: block for block, key in blocks.items()}
            depth, block = 0, None
            while depth < len(local_hashes) and (block, local_hashes[depth]) in after:
                block, depth = after[block, local_hashes[depth]], depth + 1
            matches[rank] = depth
        return matches

    def remove_worker(self, worker_id):
        for rank in [*self.held]:
            if rank[0] == worker_id:
                del self.held[rank]


class TestMyIndex(IndexContract):
    backends = ("lineage", "lru", "multi_lru", "sglang")

    def make_index(self):
        return MyIndex()
