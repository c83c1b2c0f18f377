"""The router identifies blocks by their own tokens only, so that two blocks with different next tokens are one.

The index counts copies. When one of the twins is removed, the other still makes it promise the last block of the first
prompt.
"""

from collections import Counter

import pytest
from own_tokens import PROMPT, TWIN, stored

from pytest_kvmock import Removed, Stored


class OwnTokens:
    def __init__(self):
        self.prefixes, self.copies = {}, Counter()

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            prefix = self.prefixes.get(data.parent_hash, ())
            for name, tokens in zip(data.block_hashes, event.token_ids, strict=True):
                prefix = self.prefixes[name] = (*prefix, *tokens)
                self.copies[prefix] += 1
        else:
            for name in data.block_hashes:
                self.copies[self.prefixes[name]] -= 1

    def match_tokens(self, tokens):
        ends = range(16, len(tokens) + 1, 16)
        held = next((n for n, end in enumerate(ends) if self.copies[tuple(tokens[:end])] < 1), len(ends))
        return {65536: held}


@pytest.fixture
def kv_index():
    return OwnTokens()


def test_a_block_is_gone_though_its_twin_is_there(kv_sink):
    kv_sink.publish(**stored((1, 2), PROMPT))
    kv_sink.publish(**stored((3,), TWIN, parent=1, first=1))
    kv_sink.publish(Removed((3,)))
