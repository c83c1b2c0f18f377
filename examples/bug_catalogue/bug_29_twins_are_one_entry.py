"""The router has one entry for blocks with the same tokens: when one of two twins is removed, both are gone.

Dynamo 1.6.1 does not read the next tokens of an event, so that twins share one node, and the first Removed removes the
worker from it.
"""

import pytest
from own_tokens import PROMPT, TWIN, stored

from pytest_kvmock import Removed, Stored


class OneEntry:
    def __init__(self):
        self.prefixes, self.held = {}, set()

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            prefix = self.prefixes.get(data.parent_hash, ())
            for name, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                prefix = self.prefixes[name] = (*prefix, *tokens)
                self.held.add(prefix)
        else:
            self.held.difference_update(self.prefixes[name] for name in data.block_hashes)

    def match_tokens(self, tokens):
        ends = range(16, len(tokens) + 1, 16)
        return {65536: next((n for n, end in enumerate(ends) if tuple(tokens[:end]) not in self.held), len(ends))}


@pytest.fixture
def kv_index():
    return OneEntry()


def test_a_block_stays_though_its_twin_goes(kv_sink):
    kv_sink.publish(**stored((1, 2), PROMPT))
    kv_sink.publish(**stored((3,), TWIN, parent=1, first=1))
    kv_sink.publish(Removed((3,)))
