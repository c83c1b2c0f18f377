"""The index counts blocks behind a hole, which the engine cannot reuse.

Schedulers free the tail of a request first, so that holes are rare (`multi_lru` makes them by itself). If blocks are
freed by hand, root first, `lru` evicts the head of a prompt and keeps the rest.
"""

import pytest
from sound_index import HashIndex

PROMPT = [1, 2, 3, 4]  # made by hand: any number can be a block's name and local hash


class CountsWhatItHas(HashIndex):
    def find_matches(self, local_hashes):
        chains = {tuple(local_hashes[:n]) for n in range(1, len(local_hashes) + 1)}
        return {who: len(chains & set(held.values())) for who, held in self.held.items()}


@pytest.fixture
def kv_index():
    return CountsWhatItHas()


@pytest.mark.kvmock(num_blocks=4)
def test_a_match_ends_at_a_hole(kv_manager):
    kv_manager.use(PROMPT)
    kv_manager.deref(PROMPT)  # root first
    kv_manager.use([5, 6])  # evicts 1 and 2
