"""A decoder of arrays drops events that are maps, as vLLM 0.24 and later write them.

Up to 0.23 an event was an array. The decoder silently takes anything else for malformed.
"""

import msgspec
import pytest
from sound_index import HashIndex

from pytest_kvmock import Removed, Stored, block_hashes
from pytest_kvmock.wire import Batch, encode


class WireIndex(HashIndex):
    """An index that receives an engine's events as bytes."""

    def apply(self, event):
        _, events, _ = msgspec.msgpack.decode(encode(Batch([event]), "vllm-0.24"))
        for fields in events:
            if isinstance(fields, list):  # otherwise it is malformed
                self.take(self.held[self.owner(event)], *fields)

    def take(self, blocks, tag, hashes=(), parent=None, tokens=(), block_size=0, *_):
        if tag == "BlockStored":
            self.store(blocks, Stored(parent, hashes, block_hashes(tokens, block_size)))
        elif tag == "BlockRemoved":
            for block in Removed(hashes).block_hashes:
                self.remove(blocks, block)
        else:
            blocks.clear()


@pytest.fixture
def kv_index():
    return WireIndex()


@pytest.mark.kv_backends("vllm")
def test_the_router_sees_what_a_new_vllm_stores(kv_worker, kv_prompt):
    kv_worker.serve(kv_prompt(blocks=3))
