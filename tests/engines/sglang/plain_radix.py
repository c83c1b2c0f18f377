"""SGLang's radix tree as described, without optimization: the reference for our cache."""

import heapq
from itertools import count, takewhile

KEYS = {
    "lru": lambda node: node.last,
    "lfu": lambda node: (node.hits, node.last),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.last,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority, node.last),
    "slru": lambda node: (node.hits >= 2, node.last),
}


class PlainNode:
    def __init__(self, parent, pages, now):
        self.parent, self.pages, self.children = parent, pages, []
        self.locks = self.hits = self.priority = 0
        self.last = self.created = now


class PlainTree:
    """A tree whose pages are tuples of tokens; a first page also contains its namespace."""

    def __init__(self, policy):
        self.key = KEYS[policy]
        self.clock = count()
        self.root = PlainNode(None, [], 0)

    def walk(self, pages):
        """Yield (node, pages passed) for each step of the longest common path; the last node is split if necessary."""
        now, node, at = next(self.clock), self.root, 0
        while at < len(pages):
            child = next((c for c in node.children if c.pages[0] == pages[at]), None)
            if child is None:
                return
            child.last = now
            pairs = zip(child.pages, pages[at:], strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            at += shared
            node = child if shared == len(child.pages) else self.split(child, shared)
            yield node, at

    def split(self, node, at):
        upper = PlainNode(node.parent, node.pages[:at], next(self.clock))
        upper.locks, upper.hits, upper.priority, upper.created = node.locks, node.hits, node.priority, node.created
        siblings = node.parent.children
        siblings[siblings.index(node)] = upper
        upper.children = [node]
        node.parent, node.pages = upper, node.pages[at:]
        return upper

    def match(self, pages):
        steps = list(self.walk(pages))
        return steps[-1] if steps else (self.root, 0)

    def insert(self, pages, priority, inserted):
        node, at = self.root, 0
        for node, at in self.walk(pages):
            node.priority = max(node.priority, priority)
            node.hits += at > inserted
        if at < len(pages):
            leaf = PlainNode(node, pages[at:], next(self.clock))
            leaf.priority, leaf.hits = priority, int(len(pages) > inserted)
            node.children.append(leaf)
        return at

    def lock(self, node, by):
        while node is not self.root:
            node.locks += by
            node = node.parent

    def nodes(self, node=None):
        for child in (node or self.root).children:
            yield child
            yield from self.nodes(child)

    def evict(self, pages):
        heap = [(self.key(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(heap)
        gone = []
        while heap and sum(map(len, gone)) < pages:
            _, node = heapq.heappop(heap)
            gone.append(node.pages)
            parent = node.parent
            parent.children.remove(node)
            if parent is not self.root and not parent.children and not parent.locks:
                heapq.heappush(heap, (self.key(parent), parent))
        return gone

    def shape(self, node=None):
        return [
            [len(child.pages), child.locks, child.hits, child.priority, self.shape(child)]
            for child in (node or self.root).children
        ]
