"""A radix tree splits a node, and publishes the lower half as removed, although it is still cached."""

from pytest_kvmock import Removed, Stored


class RadixCache:
    def __init__(self, publish):
        self.publish, self.nodes = publish, []

    def insert(self, blocks):
        parent, new = None, blocks
        for i, node in enumerate(self.nodes):
            shared = sum(mine == theirs for mine, theirs in zip(node, blocks, strict=True))
            if shared:
                self.nodes[i : i + 1] = [node[:shared], node[shared:]]
                self.publish(Removed(tuple(node[shared:])))  # only the node was split; its blocks stay
                parent, new = blocks[shared - 1], blocks[shared:]
                break
        self.nodes.append(new)
        self.publish(Stored(parent, tuple(new), tuple(new)))


def test_a_split_changes_nothing_for_the_router(kv_sink):
    cache = RadixCache(kv_sink)
    kv_sink.compare(lambda: [block for node in cache.nodes for block in node])
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 5, 6])
