"""Block names depend only on their own content: a prompt that repeats a block has a block that is its own parent."""

from zlib import crc32

from pytest_kvmock import Stored


class ContentCache:
    def __init__(self, publish):
        self.publish = publish

    def insert(self, tokens, block_size=4):
        parent = None
        for start in range(0, len(tokens), block_size):
            block = crc32(bytes(tokens[start : start + block_size]))  # should be a hash of parent and content
            self.publish(Stored(parent, (block,), (block,)))
            parent = block


def test_a_prompt_may_say_the_same_twice(kv_sink):
    ContentCache(kv_sink).insert([7, 7, 7, 7, 7, 7, 7, 7])
