"""A plain model of an index over tiers: the blocks of each rank, and queries that walk block by block."""

from pytest_kvmock import Cleared, Removed, StorageTier

DEVICE = StorageTier.DEVICE


class PlainTiers:
    """The blocks of each rank: by tier, sequence hashes with the place of each."""

    def __init__(self):
        self.held = {}

    def apply(self, event):
        key, tier, data = (event.worker_id, event.event.dp_rank), event.storage_tier, event.event.data
        if isinstance(data, Cleared):
            self.held = {place: blocks for place, blocks in self.held.items() if place[0] != key}
            return
        blocks = self.held.setdefault((key, tier), {})
        if isinstance(data, Removed):
            for block in data.block_hashes:
                blocks.pop(block, None)
            return
        parent = data.parent_hash
        if tier is DEVICE and parent is not None and parent not in blocks:
            return
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            blocks[block] = (parent, local)
            parent = block

    def find_tiered(self, local_hashes):
        out = {}
        for key in sorted({key for key, _ in self.held}):
            parent, depth = None, 0
            for tier in StorageTier:
                places, start = {place: block for block, place in self.held.get((key, tier), {}).items()}, depth
                while depth < len(local_hashes) and (parent, local_hashes[depth]) in places:
                    parent, depth = places[parent, local_hashes[depth]], depth + 1
                if depth > start:
                    out.setdefault(tier, {})[key] = depth - start
        return out

    def remove_worker(self, worker_id):
        self.held = {place: blocks for place, blocks in self.held.items() if place[0][0] != worker_id}
