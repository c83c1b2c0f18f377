"""The router names blocks as an engine without a draft model does, so it finds no block of an engine with one.

With MTP, vLLM's names also cover the next token. Plain names never match, although the engine reuses nearly all blocks.
"""

from collections import defaultdict

import pytest

from pytest_kvmock import Cleared, Stored
from pytest_kvmock.engines import VllmHasher


class PlainNames:
    def __init__(self, block_size):
        self.held, self.size, self.hasher = defaultdict(set), block_size, VllmHasher()

    def apply(self, event):
        names, data = self.held[event.worker_id], event.event.data
        if isinstance(data, Stored):
            names.update(data.block_hashes)
        elif isinstance(data, Cleared):
            names.clear()
        else:
            names.difference_update(data.block_hashes)

    def match_tokens(self, tokens):
        asked = [self.hasher.name(digest) for digest in self.hasher.digests(tokens, self.size, 0, None)]
        return {
            worker: next((n for n, name in enumerate(asked) if name not in names), len(asked))
            for worker, names in self.held.items()
        }


@pytest.fixture
def kv_index():
    return PlainNames(16)


@pytest.mark.kv_backends("vllm_mtp")
def test_a_prompt_that_was_served_is_found(kv_worker):
    kv_worker.serve(range(40))
