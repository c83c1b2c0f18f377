"""Random event streams, and the answers that the real tree must give.

Run as a program, it is the long differential: `python tests/interop/streams.py RUNS [FIRST_SEED]` compares with the
installed release and prints counts.
"""

# ruff: noqa: T201 - it is a program too

import json
import random
import sys
from collections import Counter, deque

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, Stored, sequence_hashes
from pytest_kvmock.oracle import RadixIndex, RadixIndexError
from pytest_kvmock.oracle.index.index import InvalidBlockSequence

REFUSED = "Failed to apply event: "
DEAD = "RadixTree request was cancelled"
"""The answer of every call after the real tree's thread has panicked."""


class DifferenceError(AssertionError):
    """The two sides disagree."""


# ------------------------------------------------------------------------------------- the tree of 1.2.1, re-read


def shortcut_matches(index, query, early_exit):
    """Return the answer of 1.2.1's walk on the index's own tree, and whether its shortcut was wrong on the way.

    The shortcut: two sets of workers of the same size count as the same set (source of the rule: kv-router 1.2.1,
    `find_matches`).
    """
    tree = index._device
    scores, node, active, depth, wrong = {}, tree.root, None, 0, False
    for i, local in enumerate(query):
        node = dict(node.children()).get(local)
        if node is None:
            break
        holders = set(tree.who(node.holders))
        if active is None:
            if not holders:
                break
            active = holders
        elif len(holders) != len(active):
            scores.update(dict.fromkeys(active - holders, i))
            active &= holders
            if not active:
                break
        else:
            wrong |= active != holders
        depth = i + 1
        if early_exit and len(active) == 1:
            break
    scores.update(dict.fromkeys(active or (), depth))
    return scores, wrong


def self_edges(index):
    """Return every `(block, local hash)` that leads from a block to itself."""
    tree = index._device
    seen = {tree.root, *(node for rank in tree.ranks.values() for node in rank.blocks.values())}
    queue, found = deque(seen), set()
    while queue:
        node = queue.popleft()
        for local, child in node.children():
            if child is node:
                found.add((node, local))
            if child not in seen:
                seen.add(child)
                queue.append(child)
    return found


def verdict_of_1_2_1(index, event):
    """Apply an event to our index; return the text that 1.2.1 must answer ("" for none).

    If a block is its own parent, 1.2.1 refuses the first Stored, which leaves the edge behind. The next one that walks
    that edge borrows the block twice and panics (`RefCell already mutably borrowed`); the tree answers no more.
    """
    edges = self_edges(index)
    try:
        index.apply(event)
    except InvalidBlockSequence as error:
        return REFUSED + error.reason if self_edges(index) - edges else DEAD
    except RadixIndexError as error:
        return REFUSED + error.reason
    return ""


def apply_to(tree, event):
    """Apply an event to the real tree; return its error's text ("" for none)."""
    try:
        tree.apply_event(event.worker_id, event.event.to_json().encode())
    except RuntimeError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------ any stream


class AnyStream:
    """Events that need not make sense, over few hashes; in two of five runs, chained events of careless engines.

    Attributes:
        rnd: the run's generator.
        workers: how many workers there are; the calls for workers also name one more.
    """

    def __init__(self, seed):
        self.rnd = rnd = random.Random(seed)
        self.workers = rnd.choice([1, 2, 3, 4, 8])
        self.ranks = rnd.randint(1, 3)
        self.chained = rnd.random() < 0.4
        self.hashes = rnd.choice([4, 8, 16])
        self.locals = rnd.choice([2, 4, 8])
        self.paths = [()]
        self.events = 0

    def local(self, most):
        return [self.rnd.randint(1, self.locals) for _ in range(self.rnd.randint(0, most))]

    def step(self):
        """Return the next event, or the name of a call and its worker."""
        rnd = self.rnd
        worker, kind = rnd.randrange(self.workers), rnd.random()
        if kind < 0.03:
            return "remove_worker", rnd.randrange(self.workers + 1)
        if kind < 0.06:
            return "clear_all_blocks", rnd.randrange(self.workers + 1)
        if kind < 0.09:
            data = Cleared()
        elif kind < 0.40:
            data = Removed(tuple(self.hash() for _ in range(rnd.choice([0, 1, 1, 2, 4]))))
        else:
            data = self.chained_store() if self.chained else self.free_store()
        self.events += 1
        return RouterEvent(worker, KvCacheEvent(self.events, data, rnd.randrange(self.ranks)))

    def hash(self):
        path = self.rnd.choice(self.paths) if self.chained else ()
        return sequence_hashes(path)[-1] if path else self.rnd.randint(1, self.hashes)

    def chained_store(self):
        before, local = self.rnd.choice(self.paths), self.local(5)
        hashes = sequence_hashes([*before, *local])
        self.paths += [(*before, *local[: i + 1]) for i in range(len(local))]
        start = len(before)
        return Stored(hashes[start - 1] if start else None, tuple(hashes[start:]), tuple(local))

    def free_store(self):
        local = self.local(5)
        parent = None if self.rnd.random() < 0.4 else self.rnd.randint(1, self.hashes)
        return Stored(parent, tuple(self.rnd.randint(1, self.hashes) for _ in local), tuple(local))

    def query(self):
        return [*self.rnd.choice(self.paths), *self.local(9)]


def run_1_2_1(core, seed, counts, *, steps=60, queries=4):
    """Run one seed against 1.2.1, and compare error and matches after each step.

    Raises:
        DifferenceError: the real tree gives another answer than it must.
    """
    stream, real, index = AnyStream(seed), core.RadixTree(), RadixIndex(clears="worker")
    counts["runs"] += 1
    for number in range(steps):
        step = stream.step()
        counts["steps"] += 1
        if isinstance(step, tuple):
            name, worker = step
            getattr(real, name)(worker)
            getattr(index, name)(worker)
        else:
            answered, expected = apply_to(real, step), verdict_of_1_2_1(index, step)
            if answered != expected:
                raise DifferenceError(f"seed {seed} step {number}: {step}: real {answered!r}, ours {expected!r}")
            counts[answered.removeprefix(REFUSED) or "accepted"] += 1
            if answered == DEAD:
                break
        for _ in range(queries):
            query, early_exit = stream.query(), stream.rnd.random() < 0.3
            answered = real.find_matches(query, early_exit).scores
            expected, wrong = shortcut_matches(index, query, early_exit)
            exact = index.find_matches(query, early_exit).scores
            counts["queries"] += 1
            counts["answers that the shortcut changes"] += answered != exact
            if answered != expected or (answered != exact and not wrong):
                raise DifferenceError(
                    f"seed {seed} step {number}: find {query} early_exit={early_exit}: real {answered}, ours by its "
                    f"rule {expected}, exact {exact}"
                )
    index.dump_events()  # it ends even with cycles; the real tree's dump does not, so it is not called here


# --------------------------------------------------------------------------------------------- leaf-first streams


class LeafFirstStream(AnyStream):
    """Chained hashes; a block is removed with all its descendants, deepest first. Some events are wrong.

    Attributes:
        held: the blocks of each worker and rank, each as its chain of local hashes.
    """

    def __init__(self, seed):
        super().__init__(seed)
        self.held = {}

    def step(self):
        rnd = self.rnd
        key = worker, rank = rnd.randrange(self.workers), rnd.randrange(self.ranks)
        paths, kind = self.held.setdefault(key, set()), rnd.random()
        if kind < 0.04:
            name, worker = rnd.choice(["remove_worker", "clear_all_blocks"]), rnd.randrange(self.workers + 1)
            for other in self.held:
                if other[0] == worker:
                    self.held[other].clear()
            return name, worker
        if kind < 0.06:
            paths.clear()
            data = Cleared()
        elif kind < 0.40:
            data = self.removed(paths)
        else:
            data = self.stored(paths)
        self.events += 1
        return RouterEvent(worker, KvCacheEvent(self.events, data, rank))

    def stored(self, paths):
        before = self.rnd.choice(self.paths if self.rnd.random() < 0.3 else [(), *sorted(paths)])
        local = self.local(6)
        hashes, start = sequence_hashes([*before, *local]), len(before)
        new = [(*before, *local[: i + 1]) for i in range(len(local))]
        self.paths += new
        if not before or before in paths:
            paths.update(new)
        return Stored(hashes[start - 1] if start else None, tuple(hashes[start:]), tuple(local))

    def removed(self, paths):
        tops = self.rnd.sample(sorted(paths), min(len(paths), self.rnd.choice([0, 1, 1, 2])))
        gone = sorted((p for p in paths if any(p[: len(t)] == t for t in tops)), key=lambda p: (-len(p), p))
        paths.difference_update(gone)
        named = [sequence_hashes(path)[-1] for path in gone]
        if self.rnd.random() < 0.1:
            strange = self.rnd.choice(self.paths)
            if strange not in paths and strange not in gone:
                named.insert(self.rnd.randint(0, len(named)), sequence_hashes(strange)[-1] if strange else 12345)
        return Removed(tuple(named))


def run_leaf_first(core, seed, counts, *, steps=60, queries=4):
    """Run one leaf-first seed against 1.6.1, without `early_exit`; compare each step's error and matches and the dump.

    Raises:
        DifferenceError: there is a difference.
    """
    stream, real, index = LeafFirstStream(seed), core.RadixTree(), RadixIndex()
    counts["runs"] += 1
    for number in range(steps):
        step = stream.step()
        counts["steps"] += 1
        if isinstance(step, tuple):
            name, worker = step
            getattr(real, name)(worker)
            getattr(index, name)(worker)
        else:
            answered, expected = apply_to(real, step), ""
            try:
                index.apply(step)
            except RadixIndexError as error:
                expected = REFUSED + error.reason
            if answered != expected:
                raise DifferenceError(f"seed {seed} step {number}: {step}: real {answered!r}, ours {expected!r}")
            counts[answered.removeprefix(REFUSED) or "accepted"] += 1
        for _ in range(queries):
            query = stream.query()
            answered, ours = real.find_matches(query).scores, index.find_matches(query).scores
            counts["queries"] += 1
            counts["queries with a match"] += bool(answered)
            if answered != ours:
                raise DifferenceError(f"seed {seed} step {number}: find {query}: real {answered}, ours {ours}")
    ours, theirs = rows(index.dump_events()), rows(map(RouterEvent.from_json, real.dump_tree_as_events()))
    if ours != theirs:
        raise DifferenceError(f"seed {seed}: dumps differ: only real {theirs - ours}, only ours {ours - theirs}")


def rows(events):
    """Return the blocks of a dump, one row each, without event ids; events with several blocks are split."""
    found = set()
    for event in events:
        data = event.event.data
        parents = (data.parent_hash, *data.block_hashes)
        for parent, block, local in zip(parents, data.block_hashes, data.tokens_hashes, strict=False):
            found.add((event.worker_id, event.event.dp_rank, parent, block, local))
    return found


def main():
    from importlib import metadata

    from dynamo import _core

    version = metadata.version("ai-dynamo-runtime")
    run = run_1_2_1 if version.startswith("1.2.") else run_leaf_first
    runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000
    counts = Counter()
    for seed in range(first, first + runs):
        try:
            run(_core, seed, counts)
        except DifferenceError as difference:
            counts["differences"] += 1
            print(difference)
    counts.setdefault("differences", 0)
    print(f"ai-dynamo-runtime {version}, {run.__name__}, seeds {first} to {first + runs - 1}")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
