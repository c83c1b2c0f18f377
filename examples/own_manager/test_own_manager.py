"""Your own block manager: it publishes to a sink, and its events are compared with its blocks.

Six bugs of such managers follow, each in one line. The first report is the bug itself, not one of its results.
"""

from random import Random

import pytest

from pytest_kvmock import EventRulesBroken, KvCacheEvent, Removed, RouterHarness, Stored, block_hashes, sequence_hashes


class MyEngine:
    def __init__(self, publish, num_blocks):
        self.publish, self.num_blocks, self.next_id = publish, num_blocks, 0
        self.cached = {}  # blocks, the least recently used first

    def send(self, data, token_ids=None):
        self.publish(KvCacheEvent(self.next_id, data), token_ids=token_ids)
        self.next_id += 1

    def serve(self, tokens):
        local = block_hashes(tokens, 16)
        blocks = sequence_hashes(local)
        hits = sum(block in self.cached for block in blocks)
        for block in reversed(blocks):  # so that the tail of a prompt is evicted before its head
            self.cached.pop(block, None)
            self.cached[block] = None
        while len(self.cached) > self.num_blocks:
            oldest = next(iter(self.cached))
            del self.cached[oldest]
            self.send(Removed((oldest,)))
        if hits < len(blocks):
            parent = blocks[hits - 1] if hits else None
            token_ids = [tokens[16 * i : 16 * (i + 1)] for i in range(hits, len(blocks))]
            self.send(Stored(parent, tuple(blocks[hits:]), tuple(local[hits:])), token_ids)


class ForgetsARemoved(MyEngine):
    def send(self, data, token_ids=None):
        if isinstance(data, Stored) or self.next_id % 7:
            super().send(data, token_ids)


class RemovesParentsFirst(MyEngine):
    def serve(self, tokens):
        super().serve(tokens)
        blocks = sequence_hashes(block_hashes(tokens, 16))
        for block in blocks:  # the head is now evicted first
            del self.cached[block]
            self.cached[block] = None


class NamesAWrongParent(MyEngine):
    def send(self, data, token_ids=None):
        if isinstance(data, Stored) and data.parent_hash is not None:
            data = Stored(next(iter(self.cached)), data.block_hashes, data.tokens_hashes)
        super().send(data, token_ids)


class StoresTwice(MyEngine):
    def send(self, data, token_ids=None):
        super().send(data, token_ids)
        if isinstance(data, Stored) and self.next_id % 5 == 0:
            super().send(data, token_ids)


class HashesWrong(MyEngine):
    def send(self, data, token_ids=None):
        if isinstance(data, Stored):
            data = Stored(data.parent_hash, (*data.block_hashes[:-1], data.block_hashes[-1] ^ 1), data.tokens_hashes)
        super().send(data, token_ids)


class LeavesOutAnId(MyEngine):
    def send(self, data, token_ids=None):
        super().send(data, token_ids)
        self.next_id += self.next_id % 20 == 0


def exercise(engine, kv_events, seed):
    random = Random(seed)
    for _ in range(200):
        words = random.choices(range(3), k=random.randint(1, 5))  # few, so that prompts share prefixes
        engine.serve([word for word in words for _ in range(16)])
        kv_events.assert_no_event_errors()


@pytest.mark.kvmock(event_warnings="fail")
@pytest.mark.parametrize("seed", range(3))
def test_my_engine(make_kv_sink, kv_events, seed):
    sink = make_kv_sink(chained=True, num_blocks=8)
    engine = MyEngine(sink, num_blocks=8)
    sink.compare(lambda: engine.cached)
    exercise(engine, kv_events, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (ForgetsARemoved, "engine_drift"),
        (RemovesParentsFirst, "orphaned_child"),
        (NamesAWrongParent, "wrong_hash"),
        (StoresTwice, "duplicate_store"),
        (HashesWrong, "wrong_hash"),
        (LeavesOutAnId, "event_id_gap"),
    ],
)
def test_a_bug_is_the_first_that_is_reported(kind, rule, seed):
    kv = RouterHarness(backend=None)  # a separate harness, without the test's verdict
    kv.events.warnings_fail = True  # like event_warnings="fail"
    sink = kv.make_sink(chained=True, num_blocks=8)
    engine = kind(sink, num_blocks=8)
    sink.compare(lambda: engine.cached)
    with pytest.raises(EventRulesBroken, match=rf"^\d+ KV event \w+: {rule} "):
        exercise(engine, kv.events, seed)
