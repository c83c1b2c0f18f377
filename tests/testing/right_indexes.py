"""Right indexes of the kinds that people write: by edges, by hashes, by tokens, by an engine's names; with their
declarations.
"""

from collections import Counter, defaultdict

from draft_readers import ByWindows
from hybrid_readers import Dense, UnderTest

from pytest_kvmock import Cleared, RadixIndex, RadixIndexError, Removed, StorageTier, Stored
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.testing import IndexContract


class Edges:
    """Edges from parent to child by local hash, as in own-index.md: a removed block keeps the edges to its
    children.
    """

    def __init__(self, *, counts=False, obeys=False):
        self.counts, self.obeys = counts, obeys
        self.ranks = {}

    def apply(self, event):
        data, key = event.event.data, (event.worker_id, event.event.dp_rank)
        blocks, edges, copies = self.ranks.setdefault(key, ({}, {}, Counter()))
        if self.obeys:  # they were removed before the event
            self.remove(key, (event.extra or {}).get("silently_gone", ()))
        if isinstance(data, Cleared):
            self.ranks[key] = {}, {}, Counter()
        elif event.storage_tier is not StorageTier.DEVICE:
            return
        elif isinstance(data, Stored):
            parent = data.parent_hash
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                blocks[block] = parent, local
                edges[parent, local] = block
                copies[block] = copies[block] + 1 if self.counts else 1
                parent = block
        if isinstance(data, Removed):
            self.remove(key, data.block_hashes)

    def remove(self, key, names):
        blocks, edges, copies = self.ranks[key]
        for block in names:
            if block not in blocks:
                continue
            copies[block] -= 1
            if copies[block] < 1:
                del copies[block]  # nothing stays of a removed block
                edge = blocks.pop(block)
                if edges.get(edge) == block:
                    del edges[edge]

    def find_matches(self, local_hashes):
        found = {}
        for key, (_, edges, _) in self.ranks.items():
            parent, count = None, 0
            for local in local_hashes:
                parent = edges.get((parent, local))
                if parent is None:
                    break
                count += 1
            found[key] = count
        return {key: count for key, count in found.items() if count}

    def remove_worker(self, worker_id):
        self.ranks = {key: held for key, held in self.ranks.items() if key[0] != worker_id}


class ByPlace:
    """Looks up by tokens and by what vLLM hashes with them: an image counts with its offset in a block."""

    def __init__(self, size, *, counts=False):
        self.size, self.counts, self.held = size, counts, {}

    def chain(self, tokens, extra, prefix=()):
        keys = (extra or {}).get("extra_keys") or [None] * len(tokens)
        for at in range(len(tokens) // self.size):
            prefix = hash((prefix, tuple(tokens[at * self.size : (at + 1) * self.size]), keys[at]))
            yield prefix

    def apply(self, event):
        data, key = event.event.data, (event.worker_id, event.event.dp_rank)
        named, copies = self.held.setdefault(key, ({}, Counter()))
        if isinstance(data, Cleared):
            del self.held[key]
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                copies[named.get(block)] -= 1
        elif isinstance(data, Stored):
            tokens = [token for block in event.token_ids for token in block]
            before = () if data.parent_hash is None else named[data.parent_hash]
            for block, prefix in zip(data.block_hashes, self.chain(tokens, event.extra, before), strict=True):
                named[block] = prefix
                copies[prefix] += 1

    def match_tokens(self, tokens, extra):
        found = {}
        for key, (_, copies) in self.held.items():
            chain = [*self.chain(tokens, extra)]
            found[key] = next((at for at, prefix in enumerate(chain) if copies[prefix] < 1), len(chain))
        return {key: count for key, count in found.items() if count}


class ByEngineNames:
    """Computes vLLM's names from tokens and looks them up, like kthena, AIBrix and llm-d; it counts copies."""

    def __init__(self, size, algorithm="sha256_cbor", seed="0"):
        self.size, self.hasher = size, VllmHasher(algorithm=algorithm, seed=seed)
        self.ranks = defaultdict(Counter)

    def apply(self, event):
        data, held = event.event.data, self.ranks[event.worker_id, event.event.dp_rank]
        if event.storage_tier is not StorageTier.DEVICE and not isinstance(data, Cleared):
            return
        if isinstance(data, Stored):
            held.update(data.block_hashes)
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                held[block] -= 1
                if held[block] < 1:
                    del held[block]  # nothing stays of a removed block
        elif isinstance(data, Cleared):
            held.clear()

    def match_tokens(self, tokens):
        digests = self.hasher.digests(tuple(tokens), self.size, 0, None)
        names = self.hasher.names(digests) if digests else []
        found = {
            key: next((at for at, name in enumerate(names) if held[name] < 1), len(names))
            for key, held in self.ranks.items()
        }
        return {key: count for key, count in found.items() if count}

    def remove_worker(self, worker_id):
        for key in [key for key in self.ranks if key[0] == worker_id]:
            del self.ranks[key]


class AllTiersAlike(Edges):
    """Counts a block once, in whichever tier it is: loading from HiCache costs nothing."""

    def __init__(self):
        self.tiers = {tier: Edges() for tier in StorageTier}

    def apply(self, event):
        for tier, index in self.tiers.items():
            if event.storage_tier is tier or isinstance(event.event.data, Cleared):
                index.apply(_on_device(event))

    def find_matches(self, local_hashes):
        found = {}
        for key in {key for index in self.tiers.values() for key in index.ranks}:
            edges = {}
            for index in self.tiers.values():
                edges |= index.ranks.get(key, ({}, {}, {}))[1]
            parent, count = None, 0
            for local in local_hashes:
                parent = edges.get((parent, local))
                if parent is None:
                    break
                count += 1
            found[key] = count
        return {key: count for key, count in found.items() if count}

    def remove_worker(self, worker_id):
        for index in self.tiers.values():
            index.remove_worker(worker_id)


def _on_device(event):
    return type(event)(event.worker_id, event.event, StorageTier.DEVICE, event.token_ids, event.extra)


class LongestWindow(Edges):
    """Takes the longest window seen in any event of a rank for its attention group."""

    def __init__(self, **options):
        super().__init__(**options)
        self.longest = {}

    def apply(self, event):
        key, window = (event.worker_id, event.event.dp_rank), (event.extra or {}).get("window_size", 0)
        if isinstance(event.event.data, Cleared):
            super().apply(event)
        elif window >= self.longest.get(key, 0):
            if window > self.longest.get(key, 0):
                self.ranks.pop(key, None)
            self.longest[key] = window
            super().apply(event)


class Reference:
    """The reference index, which never raises."""

    def __init__(self, **options):
        self.index = RadixIndex(**options)

    def apply(self, event):
        try:
            self.index.apply(event)
        except RadixIndexError:
            return

    def find_matches(self, local_hashes):
        return self.index.find_matches(local_hashes).scores

    def remove_worker(self, worker_id):
        self.index.remove_worker(worker_id)


class Attention(Dense):
    """The attention group of a hybrid model, without the tokens of removed blocks."""

    def learn(self, event):
        if event["parent_block_hash"] is None or event["parent_block_hash"] in self.prefixes:
            super().learn(event)

    def removed(self, group, names):
        super().removed(group, names)
        for name in names:
            if self.copies[group][name] < 1:
                del self.copies[group][name]
                if group == self.attention:
                    self.names.pop(self.prefixes.pop(name, None), None)

    def cleared(self):
        super().cleared()
        self.prefixes.clear()
        self.names.clear()


class OfEdges(IndexContract):
    def make_index(self):
        return Edges(counts=self.traits.copies)


class OfEdgesThatObey(IndexContract):
    def make_index(self):
        return Edges(counts=self.traits.copies, obeys=True)


class OfEngineNames(IndexContract):
    names = "vllm"

    def make_index(self, block_size):
        return ByEngineNames(block_size)


class OfAllTiersAlike(IndexContract):
    one_tier = True

    def make_index(self):
        return AllTiersAlike()


class OfLongestWindow(IndexContract):
    def make_index(self):
        return LongestWindow(counts=self.traits.copies)


class OfReference(IndexContract):
    def make_index(self):
        return Reference(count_copies=self.traits.copies)


class OfAttention(IndexContract):
    """Looks up by tokens the blocks of a hybrid model's attention group."""

    def make_index(self, block_size):
        return UnderTest(Attention, {"block_size": block_size})


class OfWindows(IndexContract):
    """Looks up by tokens and the next tokens that names cover, for engines with a draft model."""

    def make_index(self, block_size):
        return ByWindows(self.traits.copies, block_size)
