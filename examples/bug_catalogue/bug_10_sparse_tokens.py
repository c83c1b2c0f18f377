"""An engine publishes the tokens of more blocks than it names: a router that cuts them up by itself counts too many.

Layers that keep a state for every so many tokens name only the blocks at which they keep one; the tokens are all there.
"""

from pytest_kvmock import Stored


class AlignedManager:
    def __init__(self, publish, block_size=16):
        self.publish, self.size = publish, block_size

    def store(self, block, tokens):
        self.publish(Stored(None, (block,), (block,)), token_ids=[tokens])  # one block, all tokens


def test_a_block_has_its_own_tokens(kv_sink):
    AlignedManager(kv_sink.publish).store(7, range(64))
