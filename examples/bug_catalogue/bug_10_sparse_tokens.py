"""An engine publishes the tokens of more blocks than it names: a router that splits the tokens counts too many blocks.

Layers that keep a state at regular intervals name only the blocks at which they keep one, but publish all tokens.
"""

from pytest_kvmock import Stored


class AlignedManager:
    def __init__(self, publish, block_size=16):
        self.publish, self.size = publish, block_size

    def store(self, block, tokens):
        self.publish(Stored(None, (block,), (block,)), token_ids=[tokens])  # one block, all tokens


def test_a_block_has_its_own_tokens(kv_sink):
    AlignedManager(kv_sink.publish).store(7, range(64))
