"""A flag says that the engine has EAGLE, so the router asks by windows of one token more; the stream has plain tokens.

SGLang keys its tree by pairs with EAGLE, but not where the model keeps recurrent states (Qwen3-Next): the stream shows
it, the algorithm does not.
"""

import pytest
from sound_index import HashIndex

from pytest_kvmock import block_hashes


class WindowsByFlag(HashIndex):
    find_matches = None  # it is asked by tokens, and hashes them as its flag says

    def match_tokens(self, tokens):
        return HashIndex.find_matches(self, block_hashes(tokens, 16, eagle=True))


@pytest.fixture
def kv_index():
    return WindowsByFlag()


@pytest.mark.kv_backends("sglang")
def test_a_prompt_that_was_served_is_found(kv_worker):
    kv_worker.serve(range(40))
