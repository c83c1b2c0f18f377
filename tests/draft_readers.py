"""Routers' readers of engines with a draft model: a right one, and naive ones like those in existing routers."""

from collections import Counter, defaultdict

from pytest_kvmock import Cleared, RadixIndex, Stored, block_hashes
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.values.prompt_keys import LOOKAHEAD
from pytest_kvmock.values.tokens import windows_of

SIZE = 4


class ByTokens:
    """Finds blocks by the tokens that it assumes for them, from the root on; with copies, or one entry per block.

    Args:
        counts: whether it counts copies.
        size: tokens of a block.
    """

    def __init__(self, *, counts=True, size=SIZE):
        self.size = size
        self.counts, self.ranks = counts, defaultdict(lambda: (defaultdict(list), Counter()))

    def apply(self, event):
        prefixes, held = self.ranks[event.key]
        data = event.event.data
        if isinstance(data, Cleared):
            prefixes.clear()
            held.clear()
        elif isinstance(data, Stored):
            prefix = prefixes[data.parent_hash][-1] if data.parent_hash is not None else ()
            for name, tokens in zip(data.block_hashes, self.tokens_of(event), strict=True):
                prefix = (*prefix, *tokens)
                prefixes[name].append(prefix)
                held[prefix] = held[prefix] + 1 if self.counts else 1
        else:
            for name in data.block_hashes:
                held[prefixes[name][-1]] -= 1

    def tokens_of(self, event):
        """Return each block's own tokens; for pairs of tokens, the first of each pair."""
        windows, _ = windows_of(event.token_ids, None)
        return [tuple(window[: self.size]) for window in windows]

    def match_tokens(self, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        return {
            rank: next((n for n, end in enumerate(ends) if held[tuple(tokens[:end])] < 1), len(ends))
            for rank, (_, held) in self.ranks.items()
        }

    def remove_worker(self, worker_id):
        for key in [key for key in self.ranks if key[0] == worker_id]:
            del self.ranks[key]


class ByWindows:
    """Right: finds blocks by the token windows that their names cover, which the stream of each worker shows."""

    def __init__(self, copies, size=SIZE):
        self.size = size
        self.index, self.forms = RadixIndex(count_copies=copies), {}

    def apply(self, event):
        if event.token_ids and isinstance(event.event.data, Stored):
            self.forms[event.key] = windows_of(event.token_ids, (event.extra or {}).get(LOOKAHEAD))[1]
        self.index.apply(event)

    def match_tokens(self, tokens):
        found = {}
        for ahead in {*self.forms.values()}:
            scores = self.index.find_matches(block_hashes(tokens, self.size, lookahead=ahead)).scores
            found |= {key: count for key, count in scores.items() if self.forms.get(key) == ahead}
        return found

    def remove_worker(self, worker_id):
        self.index.remove_worker(worker_id)


class PlainNames:
    """Finds blocks by vLLM's names without a draft model."""

    def __init__(self, size=SIZE):
        self.size = size
        self.held, self.hasher = defaultdict(Counter), VllmHasher()

    def apply(self, event):
        data, held = event.event.data, self.held[event.key]
        if isinstance(data, Stored):
            held.update(data.block_hashes)
        elif isinstance(data, Cleared):
            held.clear()
        else:
            held.subtract(data.block_hashes)

    def match_tokens(self, tokens):
        asked = [self.hasher.name(digest) for digest in self.hasher.digests(tokens, self.size, 0, None)]
        return {
            key: next((n for n, name in enumerate(asked) if held[name] < 1), len(asked))
            for key, held in self.held.items()
        }


class Flagged:
    """Looks up every stream by windows."""

    lookahead = 1

    def __init__(self):
        self.index = RadixIndex(count_copies=True)

    def apply(self, event):
        self.index.apply(event)

    def match_tokens(self, tokens):
        return self.index.find_matches(block_hashes(tokens, SIZE, lookahead=self.lookahead)).scores


class PlainHashes(Flagged):
    """Looks up every stream by the blocks' own tokens."""

    lookahead = 0
