"""Programs that reuse blocks from the middle of cached chains, with the answers of dynamo-mocker 1.2.1 over `lineage`.

The answers come from a deliberately simple model that checks every cached block each time. It knows only full blocks,
each with its own lineage hash. `python plain_lineage.py COUNT [SEED]` prints programs as lines of JSON, `{backend,
capacity, block_size, seed, ops}`, in the operations of the recordings, for a driver of the real manager.

Reason for these programs: a block that is due for eviction but has a child waits until it is a leaf. It nearly always
becomes one when its last child is evicted; if that child is reused instead, no block is evicted at that moment.
Requests never do this, because a request that uses a child also holds its parents; random orders of blocks seldom do.
"""

import json
import random
import sys


class PlainForest:
    """The inactive blocks: only leaves are evicted, the least recently inserted first (kvbm-logical,
    `LineageBackend`).

    Args:
        parents: the parent of each block, None for a root.

    Attributes:
        turns: each inactive block with its turn.
        above: the parent that counts a block as its child, from the insertion of the block until it is neither
            inactive nor has a child.
    """

    def __init__(self, parents):
        self.parents = parents
        self.turns = {}
        self.above = {}
        self.inserted = 0

    def insert(self, block):
        self.turns[block] = self.inserted
        self.inserted += 1
        if self.parents[block] is not None:
            self.above[block] = self.parents[block]

    def remove(self, block):
        del self.turns[block]
        while block is not None and block not in self.turns and block not in self.above.values():
            block = self.above.pop(block, None)

    def leaves(self):
        return sorted(self.turns.keys() - self.above.values(), key=self.turns.get)

    def evict(self):
        leaf = self.leaves()[0]
        self.remove(leaf)
        return leaf

    def order(self):
        """Return the inactive blocks in eviction order without changing them."""
        forest = PlainForest(self.parents)
        forest.turns, forest.above = dict(self.turns), dict(self.above)
        return [forest.evict() for _ in self.turns]


class PlainManager:
    """The effects of Use and Deref on full blocks.

    Attributes:
        active: references to each block in use.
        entries: the cached blocks for which the manager could publish a Removed.
    """

    def __init__(self, capacity, parents):
        self.capacity = capacity
        self.forest = PlainForest(parents)
        self.active = {}
        self.entries = set()
        self.events = 0

    def row(self, value, events):
        """Return a step in the recorded form, without its operation."""
        for event in events:
            event.insert(1, self.events)
            self.events += 1
        return [value, events, len(self.active), sum(self.active.values()), len(self.forest.turns)]

    def use(self, blocks):
        anchor, stored, evicted, served = None, [], [], 0
        for block in blocks:
            if block in self.active:
                anchor = block
            elif block in self.forest.turns:
                self.forest.remove(block)
                anchor = block
            else:
                if len(self.active) + len(self.forest.turns) == self.capacity:
                    if not self.forest.turns:
                        break
                    evicted.append(self.forest.evict())
                stored.append(block)
                self.entries.add(block)
            self.active[block] = self.active.get(block, 0) + 1
            served += 1
        removed = [block for block in evicted if block in self.entries]
        self.entries -= set(removed)
        events = [["S", anchor, [[block, local_hash(block)] for block in stored]]] if stored else []
        return self.row(served, events + ([["R", removed]] if removed else []))

    def deref(self, blocks):
        for block in blocks:
            self.active[block] -= 1
            if not self.active[block]:
                del self.active[block]
                self.forest.insert(block)
        return self.row(1, [])


def local_hash(block):
    return block + 1000


class Program:
    """A random program of the model, with its steps.

    Args:
        seed: of all random choices.

    Attributes:
        steps: rows as in a recording: the operation, its answer, events, active blocks, references, inactive blocks.
        orders: the inactive blocks after each step, in eviction order.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.seed = seed
        self.capacity = self.rng.randint(3, 10)
        self.parents = {}
        for block in range(1, self.rng.randint(self.capacity, 3 * self.capacity) + 1):
            self.add(block, self.rng.choice([None, *self.parents, *list(self.parents)[-3:] * 3]))
        self.manager = PlainManager(self.capacity, self.parents)
        self.steps = []
        self.orders = []
        for _ in range(self.rng.randint(20, 60)):
            self.rng.choice([self.chain, self.wake, self.wake, self.press, self.free_one, self.free_all])()
        self.free_all()
        for _ in range(self.capacity):  # the whole order of eviction
            self.use([self.fresh()])

    def add(self, block, parent):
        self.parents[block] = parent
        return block

    def fresh(self):
        return self.add(len(self.parents) + 1, None)

    def chain_to(self, block):
        chain = []
        while block is not None:
            chain.insert(0, block)
            block = self.parents[block]
        return chain

    def use(self, blocks):
        plhs = [[block, self.parents[block], len(self.chain_to(block)) - 1] for block in blocks]
        operation = ["use", blocks, [local_hash(block) for block in blocks], plhs, None]
        self.step(operation, self.manager.use(blocks))

    def deref(self, blocks):
        self.step(["deref", blocks], self.manager.deref(blocks))

    def step(self, operation, row):
        self.steps.append([operation, *row])
        self.orders.append(self.manager.forest.order())

    def chain(self):
        """Use a chain and mostly free it at once, root first or tail first."""
        self.use(self.chain_to(self.rng.choice(list(self.parents))))
        if self.steps[-1][1] and self.rng.random() < 0.8:
            blocks = self.steps[-1][0][1][: self.steps[-1][1]]
            self.deref(blocks if self.rng.random() < 0.7 else blocks[::-1])

    def wake(self):
        """Use one inactive block without its ancestors."""
        if self.manager.forest.turns:
            self.use([self.rng.choice(list(self.manager.forest.turns))])

    def press(self):
        """Store new blocks, so that others are evicted, and free some of them."""
        for _ in range(self.rng.randint(1, 3)):
            self.use([self.fresh()])
            if self.steps[-1][1] and self.rng.random() < 0.6:
                self.deref(self.steps[-1][0][1])

    def free_one(self):
        if self.manager.active:
            self.deref([self.rng.choice(list(self.manager.active))])

    def free_all(self):
        blocks = [block for block, references in self.manager.active.items() for _ in range(references)]
        if blocks:
            if self.rng.random() < 0.5:
                self.rng.shuffle(blocks)
            self.deref(blocks)

    def as_json(self):
        """Return the program in the form for a driver of the real manager."""
        head = {"backend": "lineage", "capacity": self.capacity, "block_size": 16, "seed": self.seed}
        return json.dumps({**head, "ops": [operation for operation, *_ in self.steps]})


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + count):
        print(Program(seed).as_json())  # noqa: T201 - it is a program too
