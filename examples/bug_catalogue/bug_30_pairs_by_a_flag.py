"""A flag declares EAGLE, so the router looks up windows with one more token; the stream has plain tokens.

With EAGLE, SGLang keys its tree by pairs, except for models with recurrent states (Qwen3-Next). The stream shows this,
the flag does not.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import block_hashes


class WindowsByFlag(HashIndex):
    find_matches = None  # it is queried by tokens, and hashes them according to its flag

    def match_tokens(self, tokens):
        return HashIndex.find_matches(self, block_hashes(tokens, 16, eagle=True))


@pytest.fixture
def kv_index():
    return WindowsByFlag()


@pytest.mark.kv_backends("sglang")
def test_a_prompt_that_was_served_is_found(kv_worker):
    kv_worker.serve(range(40))
