"""Routers' readers of the events of hybrid models: two right ones, and eight that misread cache groups.

Each reads the events of one worker as vLLM writes them, and answers how many leading blocks of a prompt are cached.
`UnderTest` makes an index of a harness from one.
"""

from collections import Counter, defaultdict
from functools import lru_cache

from pytest_kvmock import Cleared, Removed, StorageTier
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.values import SparseStored

ATTENTION = ("full_attention", "mla_attention")


class Dense:
    """Right: answers the leading blocks that the attention group holds; it knows their tokens and counts copies.

    Args:
        about: `block_size`, `groups`, `hash_unit` and `alignment` of an engine, as in `index.json` of vectors.
    """

    def __init__(self, about):
        self.about, self.size = about, about["block_size"]
        self.prefixes = {}  # from the name of a block to all tokens up to its end
        self.names = {}  # the reverse
        self.copies = defaultdict(Counter)  # of names, by group
        self.attention = None

    def apply(self, event):
        if event["type"] == "BlockStored":
            self.stored(event, event["group_idx"], event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            self.removed(event["group_idx"], event["block_hashes"])
        else:
            self.cleared()

    def stored(self, event, group, names):
        self.copies[group].update(names)
        if event["kv_cache_spec_kind"] in ATTENTION:
            self.attention = group
            if event["block_size"] == self.size:
                self.learn(event)

    def learn(self, event):
        """Record the tokens of each block of an event."""
        size, tokens = event["block_size"], tuple(event["token_ids"])
        prefix = self.prefixes.get(event["parent_block_hash"], ())
        for name in event["block_hashes"]:
            prefix, tokens = prefix + tokens[:size], tokens[size:]
            self.prefixes[name], self.names[prefix] = prefix, name

    def removed(self, group, names):
        self.copies[group].subtract(names)

    def cleared(self):
        self.copies.clear()

    def answer(self, tokens):
        """Return the leading blocks of a prompt without its last token."""
        return self.leading(self.attention, tokens)

    def leading(self, group, tokens):
        copies, ends = self.copies[group], range(self.size, len(tokens), self.size)
        held = (n for n, end in enumerate(ends) if copies[self.names.get(tuple(tokens[:end]))] < 1)
        return next(held, len(ends))


class Exact(Dense):
    """Right: answers what the engine would reuse. It names blocks as vLLM does, at every unit of a prompt."""

    def answer(self, tokens):
        unit, step = self.about["hash_unit"], self.about["alignment"]
        names = names_of(tuple(tokens), unit)
        for end in range((len(tokens) - 1) // step * step, 0, -step):
            if all(self.can_go_on(group, names, end, unit) for group in self.about["groups"]):
                return end // self.size
        return 0

    def can_go_on(self, group, names, end, unit):
        kind, size, copies = group["kv_cache_spec_kind"], group["block_size"], self.copies[group["group_idx"]]
        if kind == "mamba":
            return copies[names[end // unit - 1]] > 0
        first, last = 0, end // size
        if window := group.get("kv_cache_spec_sliding_window"):
            first = max(last - -(-(window - 1) // size), 0)
        elif chunk := group.get("chunk"):
            first = end // chunk * chunk // size
        ends = [*range((first + 1) * size, last * size + 1, size), *([end] if end % size else [])]
        return all(copies[names[each // unit - 1]] > 0 for each in ends)


@lru_cache(maxsize=4096)
def names_of(tokens, unit):
    """Return the name of each prefix of whole units."""
    hasher = VllmHasher()
    return [*map(hasher.name, hasher.digests(tokens, unit, 0, None))]


class OneMap(Dense):
    """Treats all groups as one: a block that one of them has removed is gone."""

    def __init__(self, about):
        super().__init__(about)
        self.there = set()

    def stored(self, event, group, names):
        super().stored(event, group, names)
        self.there.update(names)

    def removed(self, group, names):
        super().removed(group, names)
        self.there.difference_update(name for name in names if self.copies[group][name] < 1)

    def cleared(self):
        super().cleared()
        self.there.clear()

    def leading(self, group, tokens):
        ends = range(self.size, len(tokens), self.size)
        held = (n for n, end in enumerate(ends) if self.names.get(tuple(tokens[:end])) not in self.there)
        return next(held, len(ends))


class AnyGroup(Dense):
    """Takes a block as cached if any group has it."""

    def leading(self, group, tokens):
        names = (self.names.get(tuple(tokens[:end])) for end in range(self.size, len(tokens), self.size))
        held = (n for n, name in enumerate(names) if all(copies[name] < 1 for copies in self.copies.values()))
        return next(held, (len(tokens) - 1) // self.size)


class MinimumOverGroups(Dense):
    """Answers the least that any group has."""

    def answer(self, tokens):
        return min((self.leading(group, tokens) for group in self.copies), default=0)


class DividesTheSpanByItsHashes(Dense):
    """Assigns the first tokens of a span to the blocks that were kept of it."""

    def stored(self, event, group, names):
        super().stored(event, group, names)
        if names and len(event["token_ids"]) > self.size * len(names):
            self.learn({**event, "block_size": self.size})


class LooksUpParentsAcrossGroups(Dense):
    """Refuses blocks whose parent was removed by some group."""

    def __init__(self, about):
        super().__init__(about)
        self.known = {None}

    def stored(self, event, group, names):
        if event["parent_block_hash"] in self.known:
            self.known.update(names)
            super().stored(event, group, names)

    def cleared(self):
        super().cleared()
        self.known = {None}

    def removed(self, group, names):
        super().removed(group, names)
        self.known.difference_update(names)


class TakesGroupZero(Dense):
    """Takes group 0 for the attention group."""

    def answer(self, tokens):
        return self.leading(0, tokens)


class RemovesOfAnyGroup(Dense):
    """Removes from the attention group what any group removes."""

    def removed(self, group, names):
        super().removed(group, names)
        if group != self.attention:
            super().removed(self.attention, names)


class TakesTailsForBlocks(Dense):
    """Counts a prompt's tail in the attention group as one more block."""

    def stored(self, event, group, names):
        super().stored(event, group, names)
        if group == self.attention and event["block_size"] < self.size:
            self.learn(event)

    def answer(self, tokens):
        whole, copies = super().answer(tokens), self.copies[self.attention]
        ends = range(whole * self.size + 1, min((whole + 1) * self.size, len(tokens)))
        return whole + any(copies[self.names.get(tuple(tokens[:end]))] > 0 for end in ends)


NAIVE = (
    OneMap,
    AnyGroup,
    MinimumOverGroups,
    DividesTheSpanByItsHashes,
    LooksUpParentsAcrossGroups,
    TakesGroupZero,
    RemovesOfAnyGroup,
    TakesTailsForBlocks,
)


def about_manager(manager):
    """Return what a reader must know of an engine besides its events."""
    geometry = manager.geometry
    groups = [
        {
            "group_idx": number,
            "kv_cache_spec_kind": group.kind,
            "block_size": group.block_size,
            "kv_cache_spec_sliding_window": group.window,
            "chunk": group.chunk,
        }
        for number, group in enumerate(geometry.groups)
    ]
    sizes = {"block_size": manager.block_size, "hash_unit": geometry.hash_unit, "alignment": geometry.alignment}
    return {**sizes, "groups": groups}


class UnderTest:
    """An index of a harness over a hybrid model: a reader for each worker.

    Args:
        kind: class of the readers.
        about: about their engines.
    """

    def __init__(self, kind, about):
        self.kind, self.about, self.readers = kind, about, {}
        if kind is Exact:
            self.answers = "reusable"

    def apply(self, event):
        if event.storage_tier is StorageTier.DEVICE:
            key = event.worker_id, event.event.dp_rank
            if key not in self.readers:
                self.readers[key] = self.kind(self.about)
            self.readers[key].apply(as_map(event))

    def match_tokens(self, tokens):
        asked = (*tokens, 0)  # a prompt that continues after them
        return {key: reader.answer(asked) for key, reader in self.readers.items()}

    def remove_worker(self, worker_id):
        self.readers = {key: reader for key, reader in self.readers.items() if key[0] != worker_id}


def as_map(event):
    """Return an event as vLLM writes it, with the fields that a reader uses."""
    data, extra = event.event.data, event.extra or {}
    if isinstance(data, Cleared):
        return {"type": "AllBlocksCleared"}
    fields = {"block_hashes": data.block_hashes, "group_idx": extra.get("group_idx", 0)}
    if isinstance(data, Removed):
        return {"type": "BlockRemoved", **fields}
    tokens = event.token_ids or ()
    return {
        "type": "BlockStored",
        **fields,
        "parent_block_hash": data.parent_hash,
        "token_ids": [token for block in tokens for token in block],
        "block_size": data.block_size if isinstance(data, SparseStored) else len(tokens[0]),
        "kv_cache_spec_kind": extra.get("kv_cache_spec_kind", ATTENTION[0]),
    }
