"""TensorRT-LLM's block names: vectors of its own tests, chains of hashes, salts, and the order of children."""

import sys
from hashlib import sha256
from types import SimpleNamespace

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock.engines import V1Hasher
from pytest_kvmock.engines.trtllm.child_map import ChildMap
from pytest_kvmock.engines.trtllm.hashes import BlockKey, salt_number, v1_block_key


@pytest.mark.parametrize(
    ("tokens", "adapter", "salt", "names"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], None, None, [924206229973855, 2728178455351807326]),
        ([1, 2, 3, 4], None, 123, [6280297290684427985]),
        ([1, 2, 3, 4, 5, 6, 7, 8], None, 7, [8576965929102610221, 6927852439789526715]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 3, None, [2244231307907415583, 5480438883692199241]),
    ],
)
def test_full_blocks_have_the_names_of_the_reference(tokens, adapter, salt, names):
    hasher = V1Hasher(adapter, salt)
    assert names == [hasher.name(each) for each in hasher.digests(tokens, 4, 0, None)]


@pytest.mark.parametrize(
    ("tokens", "salt", "parent", "name"),
    [
        ((9, 10), None, 2728178455351807326, 477185028293711010),
        ((5, 6), None, 924206229973855, 6875034662206558884),
        ((5, 6), 123, 6280297290684427985, 18177682803760873588),
    ],
)
def test_a_partial_block_is_named_by_its_tokens(tokens, salt, parent, name):
    assert name == v1_block_key(BlockKey(tokens, None, salt), parent)


def test_a_salt_number_is_the_number_itself_or_eight_bytes_of_a_digest(monkeypatch):
    salt_number.cache_clear()
    assert salt_number(2**64 - 1) == 2**64 - 1
    monkeypatch.setitem(sys.modules, "blake3", None)  # not installed
    assert int.from_bytes(sha256(b"tenant-a").digest()[:8], "little") == salt_number("tenant-a")
    salt_number.cache_clear()
    digest = bytes(range(32))
    monkeypatch.setitem(sys.modules, "blake3", SimpleNamespace(blake3=lambda _: SimpleNamespace(digest=lambda: digest)))
    assert salt_number("tenant-a") == 0x0706050403020100
    salt_number.cache_clear()


def test_the_hasher_of_an_event_uses_the_adapter_and_salt_of_its_extra_data():
    assert V1Hasher(3, 7) == V1Hasher().of_event({"lora_name": "a", "lora_id": 3, "cache_salt": 7}, 0)
    assert V1Hasher() == V1Hasher().of_event({"extra_keys": [None]}, 0)


class PlainMap:
    """libstdc++'s `unordered_map`, by its nodes: one linked list, and for each bucket the node before its first."""

    def __init__(self):
        self.buckets, self.nodes = 1, []  # nodes: (bucket, key), in the order of the list

    def add(self, key):
        if len(self.nodes) + 1 > {1: 0}.get(self.buckets, self.buckets):  # the first insertion allocates 13
            self.buckets = next(size for size in (13, 29, 59, 127, 257) if size > self.buckets)
            before, self.nodes = self.nodes, []
            for _, each in before:
                self.put(each)
        self.put(key)

    def put(self, key):
        bucket = v1_block_key(key) % self.buckets
        place = next((at for at, node in enumerate(self.nodes) if node[0] == bucket), 0)
        self.nodes.insert(place, (bucket, key))

    def remove(self, key):
        self.nodes = [node for node in self.nodes if node[1] != key]


@settings(max_examples=examples(200))
@given(st.lists(st.integers(-60, 60), max_size=200))
def test_children_are_walked_in_the_order_of_libstdcxx(steps):
    """A number adds the child of that token; a negative number removes it."""
    plain, ours, there = PlainMap(), ChildMap(), set()
    for step in steps:
        token = abs(step)
        key = BlockKey((token, 1))
        if step >= 0 and token not in there:
            plain.add(key)
            ours.add(key, token)
            there.add(token)
        elif step < 0 and token in there:
            plain.remove(key)
            ours.remove(key)
            there.remove(token)
        assert [key.tokens[0] for _, key in plain.nodes] == ours.walk()
        assert len(there) == len(ours)
