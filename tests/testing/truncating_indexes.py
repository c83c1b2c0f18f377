"""Indexes that keep part of each local hash or block hash and are right otherwise; looked up by hashes or by tokens."""

from collections import Counter
from itertools import takewhile, zip_longest

from players import player

from pytest_kvmock import Cleared, StorageTier, Stored, block_hashes
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS, truncated

KEPT = ["low32", "high32", "float53", "low53", "low63"]
assert sorted(KEPT) == sorted(TRUNCATIONS)

AttentionGroup = player("../examples/own_index/attention_group.py").AttentionGroup


class HashIndex:
    """The index of examples/own_index, by local hashes.

    Args:
        kept: the part of a hash that it keeps; None: all of it.
        of: the kind of hash, "local" or "block".
        counts: whether it counts copies.
        size: tokens per block for hybrid models, whose attention group it follows; None: it takes every event.
    """

    def __init__(self, kept=None, of=None, counts=False, size=None):
        self.kept, self.of, self.counts, self.ranks = kept, of, counts, {}
        self.group = None if size is None else AttentionGroup(size)

    def block(self, value):
        return truncated(value, self.kept) if self.of == "block" else value

    def local(self, value):
        return truncated(value, self.kept) if self.of == "local" else value

    def contents(self, event):
        return map(self.local, event.event.data.tokens_hashes)

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if self.group is not None and not self.group.has(event):
            return
        if isinstance(data, Cleared):
            self.ranks.pop(key, None)
        elif event.storage_tier is StorageTier.DEVICE:
            chains, copies = self.ranks.setdefault(key, ({}, Counter()))
            if isinstance(data, Stored):
                chain = () if data.parent_hash is None else chains[self.block(data.parent_hash)]
                # The last block may be partial (TensorRT-LLM); then it is not a block of any prompt.
                contents = [*self.contents(event)]
                assert len(data.block_hashes) - 1 <= len(contents) <= len(data.block_hashes)
                for name, content in zip_longest(map(self.block, data.block_hashes), contents):
                    chain = chains[name] = (*chain, content)
                    copies[name] += 1
            else:
                for name in map(self.block, data.block_hashes):
                    copies[name] -= 1
                    if not (self.counts and copies[name] > 0):
                        del copies[name]
                        chains.pop(name, None)

    def matches(self, contents):
        asked = [tuple(contents[:n]) for n in range(1, len(contents) + 1)]
        return {k: len([*takewhile(set(chains.values()).__contains__, asked)]) for k, (chains, _) in self.ranks.items()}

    def find_matches(self, local_hashes):
        return self.matches([*map(self.local, local_hashes)])

    def remove_worker(self, worker_id):
        self.ranks = {key: held for key, held in self.ranks.items() if key[0] != worker_id}


class TokenIndex(HashIndex):
    """An index that hashes tokens itself, like Dynamo's, and ignores local hashes."""

    find_matches = None

    def __init__(self, kept=None, of=None, counts=False, size=4):
        super().__init__(kept, of, counts, size)
        self.size = size

    def hashed(self, tokens):
        return [*map(self.local, block_hashes(tokens, self.size))]

    def contents(self, event):
        return self.hashed([token for block in event.token_ids for token in block])

    def match_tokens(self, tokens):
        return self.matches(self.hashed(tokens))


class KeyedTokenIndex(TokenIndex):
    """An index by tokens and keys of prompts.

    Args:
        ignored: a key that it ignores: "lora_name", "cache_salt" or "multimodal".
    """

    def __init__(self, ignored=None):
        super().__init__()
        self.ignored = ignored

    def keyed(self, tokens, extra):
        """Hash each block by its tokens and by the keys that vLLM hashes with them."""
        keys = (extra or {}).get("extra_keys")
        blocks = [
            tuple(tokens[at : at + self.size]) for at in range(0, len(tokens) // self.size * self.size, self.size)
        ]
        return [(block, self.looked_at(keys[i], extra) if keys else ()) for i, block in enumerate(blocks)]

    def looked_at(self, keys, extra):
        is_kind = {
            "lora_name": lambda key: key == extra.get("lora_name"),
            "cache_salt": lambda key: key == extra.get("cache_salt"),
            "multimodal": lambda key: isinstance(key, tuple),
        }
        ignored = is_kind.get(self.ignored, lambda key: False)
        return tuple(key for key in keys or () if not ignored(key))

    def contents(self, event):
        return self.keyed([token for block in event.token_ids for token in block], event.extra)

    def match_tokens(self, tokens, extra=None):
        return self.matches(self.keyed(tokens, extra))
