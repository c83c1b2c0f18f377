"""The rules of the index again, written as plainly as possible: sets of workers, dicts of children.

It shares only the events with `pytest_kvmock.oracle.index.index`. A query is answered for each worker separately.
"""

from pytest_kvmock import Removed, Stored


class Block:
    def __init__(self):
        self.workers = set()
        self.children = {}


class PlainTree:
    def __init__(self, *, e1=False):
        self.root = Block()
        self.known = {}
        self.e1 = e1

    def apply(self, event):
        """Apply an event and return the name of the broken rule or None."""
        key = (event.worker_id, event.event.dp_rank)
        data = event.event.data
        if isinstance(data, Stored):
            return self._store(key, data)
        if isinstance(data, Removed):
            return self._remove(key, data.block_hashes)
        for other in self.known:
            if other == key or (self.e1 and other[0] == key[0]):
                self._remove(other, list(self.known[other]))
        return None

    def _store(self, key, data):
        known = self.known.get(key, {})
        node = self.root
        if data.parent_hash is not None:
            if data.parent_hash not in known:
                return "parent_block_not_found"
            node = known[data.parent_hash]
        known = self.known.setdefault(key, known)
        for block_hash, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if local not in node.children:
                node.children[local] = known[block_hash] if block_hash in known else Block()
            child = node.children[local]
            if child is node:
                return "invalid_block"
            child.workers.add(key)
            known[block_hash] = child
            node = child
        return None

    def _remove(self, key, block_hashes):
        known = self.known.get(key, {})
        rule = None
        for block_hash in block_hashes if self.e1 else dict.fromkeys(block_hashes):
            if block_hash not in known:
                rule = "block_not_found"
                continue
            node = known.pop(block_hash)
            node.workers.discard(key)
            if not node.workers:
                node.children = {}
        return rule

    def remove_worker(self, worker_id):
        for key in [key for key in self.known if key[0] == worker_id]:
            self._remove(key, list(self.known[key]))
            del self.known[key]

    def clear_all_blocks(self, worker_id):
        for key in [key for key in self.known if key[0] == worker_id]:
            self._remove(key, list(self.known[key]))

    def depth(self, key, query):
        node, depth = self.root, 0
        for local in query:
            node = node.children.get(local)
            if node is None or key not in node.workers:
                break
            depth += 1
        return depth

    def find(self, query, keys):
        return {key: depth for key in keys if (depth := self.depth(key, query))}

    def find_early(self, query, keys):
        """Do the same as `find`, but no deeper than the first block that only one worker holds."""
        full = self.find(query, keys)
        alone = (d for d in range(1, len(query) + 1) if sum(depth >= d for depth in full.values()) == 1)
        stop = next(alone, len(query))
        return {key: min(depth, stop) for key, depth in full.items()}
