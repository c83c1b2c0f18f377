"""Recorded streams of vLLM's hybrid models and offloading break no rule; blocks are counted by group and tier."""

from collections import Counter

import pytest
from hybrid_streams import hybrid_streams, offload_streams, payload

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle.hygiene.entries import Counted, Opened, Recovered
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
from pytest_kvmock.values import Located, SparseStored, group_extra
from pytest_kvmock.wire import decode

DEVICE, HOST, *_ = StorageTier
FULL = group_extra(1)
WINDOW = group_extra(0, "sliding_window", 8)


class Judged:
    """The ledger of one stream."""

    def __init__(self, **about):
        self.ledger = Ledger()
        self.stream = self.ledger.open((0, 0), first_id=0, **{"residency": "counted", **about})
        self.problems = []
        self.next_id = 0

    def read(self, batches):
        for batch in batches:
            for event in decode(payload(batch), "vllm-0.33", first_event_id=self.next_id).events:
                self.take(event)
                yield event
            self.next_id += len(batch)

    def take(self, event):
        self.problems += self.ledger.take(event)

    def publish(self, data, extra=None, token_ids=None, tier=DEVICE):
        self.take(RouterEvent(0, KvCacheEvent(self.next_id, data), tier, token_ids, extra))
        self.next_id += 1

    def end(self):
        self.problems += self.ledger.take(Counted())
        return [(problem.rule, problem.observed) for problem in self.problems]

    def held(self, tier=DEVICE):
        """Return the number of copies of each block in each group."""
        parts = (self.stream, *self.stream.groups.values())
        held = {(part.group_idx, block): 1 for part in parts for block in part.held(tier)}
        return Counter(held) + Counter(
            {(part.group_idx, block): more for part in parts for block, more in part.copies.get(tier, {}).items()}
        )


def counted(events, tier=DEVICE, *, clears=True):
    """Count Stored minus Removed by group and hash, of events as the wire has them."""
    copies = Counter()
    for event in events:
        if event["type"] == "AllBlocksCleared":
            copies = Counter() if clears else copies
        elif (event["medium"] == "GPU") == (tier is DEVICE):
            sign = 1 if event["type"] == "BlockStored" else -1
            for block in event["block_hashes"]:
                copies[event["group_idx"], block] += sign
    return +copies


@pytest.mark.parametrize("knows_size", [True, False])
def test_hybrid_streams_break_no_rule_and_are_counted_by_group(recording, knows_size):
    judged_events = 0
    for stream in hybrid_streams(recording("vllm_0.33.0_hybrid_streams.json.gz")):
        size = {"block_size": stream.attention[1]} if knows_size else {}
        judged = Judged(num_blocks=stream.num_blocks - 1, **size)
        judged_events += sum(1 for _ in judged.read(stream.batches))

        assert judged.end() == [], stream.name
        assert counted(event for batch in stream.batches for event in batch) == judged.held(), stream.name
        if any(event.get("group_idx") == stream.attention[0] for batch in stream.batches for event in batch):
            assert stream.attention[0] == judged.stream.group_idx
    assert judged_events > 2000


def test_all_groups_of_a_hybrid_stream_share_one_pool(recording):
    """Half of the highest number of held blocks is too small a capacity for each stream."""
    for stream in hybrid_streams(recording("vllm_0.33.0_hybrid_streams.json.gz"))[:8]:
        judged = Judged(block_size=stream.attention[1])
        most = max((judged.stream.count(DEVICE) for _ in judged.read(stream.batches)), default=0)
        assert most <= stream.num_blocks - 1

        full = Judged(block_size=stream.attention[1], num_blocks=most // 2)
        list(full.read(stream.batches))
        assert [*{rule for rule, _ in full.end()}] == ["over_capacity"], stream.name


def test_offload_streams_break_no_rule_and_are_counted_by_tier(recording):
    """One exception: a chunk that vLLM evicts and stores again in one step is removed by names it never stored."""
    found = []
    for name, batches in offload_streams(recording("vllm_0.33.0_offload_streams.json.gz")):
        judged = Judged(clears_below=False)
        list(judged.read(batches))
        events = [event for batch in batches for event in batch]

        found += (
            (name, rule, problem.storage_tier) for (rule, _), problem in zip(judged.end(), judged.problems, strict=True)
        )
        assert counted(events) == judged.held(), name
        assert counted(events, HOST, clears=False) == judged.held(HOST), name
    assert found == [("program 13", "block_not_found", HOST)]


# ------------------------------------------------------------------------------------------------ by hand


@pytest.fixture
def judged():
    return Judged(block_size=4, num_blocks=8)


def tokens(blocks, size=4):
    return [tuple(range(at * size, (at + 1) * size)) for at in range(blocks)]


def test_only_the_names_of_a_sparse_stored_count(judged):
    judged.publish(SparseStored(99, (2, 2**60), 24, 4), WINDOW, tokens(6))
    judged.publish(SparseStored(98, (), 8, 4), WINDOW, tokens(2))
    judged.publish(Stored(97, (5,), (15,)), WINDOW, tokens(1))
    judged.publish(Stored(None, (1, 2), (11, 12)), FULL, tokens(2))
    judged.publish(Removed((2**60, 5)))
    judged.publish(Removed((2,)))
    assert judged.end() == []
    assert judged.held() == {(1, 1): 1, (1, 2): 1}

    judged.publish(Removed((2,)))
    assert judged.end() == [("block_not_found", "block 2 was removed by event 5")]


def test_a_parent_must_be_held_in_the_attention_group_only(judged):
    judged.publish(SparseStored(None, (2,), 8, 4), WINDOW, tokens(2))
    judged.publish(Stored(2, (3,), (13,)), FULL, tokens(1))
    assert judged.end() == [("parent_block_not_found", "block 2 was never stored (cache group 1)")]


def test_a_prompt_tail_is_a_second_name_and_no_block_of_the_chain():
    judged = Judged(block_size=4, num_blocks=2)
    judged.publish(Stored(None, (1, 2), (11, 12)), FULL, tokens(2))
    judged.publish(Stored(70, (7,), (17,)), FULL, tokens(1, size=2))
    judged.publish(Stored(70, (7,), (17,)), FULL, tokens(1, size=2))  # of another prompt
    judged.publish(Stored(None, (1,), (11,)), {**FULL, "session_id": "s"}, tokens(1))
    assert (judged.stream.count(DEVICE), [rule for rule, _ in judged.end()]) == (3, ["over_capacity"])
    judged.publish(Removed((7,)), FULL)
    judged.publish(Removed((2, 1)), FULL)
    judged.publish(Removed((7,)), FULL)
    judged.publish(Removed((1,)), FULL)
    assert judged.stream.count(DEVICE) == 0
    assert len(judged.end()) == 1

    judged.publish(Removed((7,)), FULL)
    assert judged.end()[-1][0] == "block_not_found"


def test_a_prompt_tail_may_come_before_the_block_size_is_known():
    judged = Judged()
    judged.publish(Stored(None, (6,), (16,)), group_extra(0, "mamba"), tokens(1, size=2))
    judged.publish(Stored(70, (7,), (17,)), FULL, tokens(1, size=2))  # its block comes later
    judged.publish(Stored(None, (1, 2), (11, 12)), FULL, tokens(2))
    judged.publish(Stored(71, (8,), (18,)), FULL, tokens(1, size=2))
    assert judged.end() == []

    judged.publish(Stored(71, (9,), (19,)), FULL, tokens(1))
    assert judged.end() == [("parent_block_not_found", "block 71 was never stored (cache group 1)")]


def test_a_location_is_held_in_its_tier_and_group(judged):
    judged.publish(Located((1, 2)), FULL, tier=HOST)
    judged.publish(Located((1,)), WINDOW, tier=HOST)
    judged.publish(Stored(None, (1, 2), (11, 12)), FULL, tokens(2))
    judged.publish(Removed((2,)), FULL)
    judged.publish(Removed((2, 1)), FULL, tier=HOST)
    judged.publish(Removed((1,)), tier=HOST)
    assert judged.end() == []

    judged.publish(Removed((1,)), tier=HOST)
    assert [rule for rule, _ in judged.end()] == ["block_not_found"]


@pytest.mark.parametrize("clears_below", [True, False])
def test_whether_a_cleared_empties_lower_tiers_is_a_trait_of_the_engine(clears_below):
    judged = Judged(clears_below=clears_below)
    for group in (None, WINDOW, group_extra(2)):
        judged.publish(Stored(None, (1, 2), (11, 12)), group, tokens(2))
        judged.publish(Located((1, 2, 2)), group, tier=HOST)
    judged.publish(Cleared())
    assert judged.held() == {}
    assert (0 if clears_below else 9) == judged.held(HOST).total()

    judged.publish(Removed((2, 2)), group_extra(2), tier=HOST)
    assert clears_below == bool(judged.end())


def test_the_attention_group_is_found_after_any_other_events(judged):
    judged.publish(Removed((9,)), group_extra(3))  # of a block stored before the stream began
    judged.publish(Stored(None, (1,), (11,)), group_extra(3), tokens(1))
    judged.publish(Stored(None, (1,), (11,)), WINDOW, tokens(1))
    judged.publish(Stored(None, (1,), (11,)), group_extra(2, "mamba"), tokens(1))
    assert (judged.stream.group_idx, {*judged.stream.groups}) == (3, {0, 2})
    assert judged.held() == {(3, 1): 1, (0, 1): 1, (2, 1): 1}
    assert judged.stream.leaves() == [1]


def test_a_copied_stream_and_a_recovered_one_have_the_same_groups(judged):
    judged.publish(Stored(None, (1, 2), (11, 12)), FULL, tokens(2))
    judged.publish(Stored(70, (7,), (17,)), FULL, tokens(1, size=2))
    judged.publish(SparseStored(99, (2,), 8, 4), WINDOW, tokens(2))
    copy = judged.stream.copy()

    other = Ledger()
    other.take(Opened((0, 0), 0, StreamSpec(block_size=4, residency="counted")))
    other.take(Recovered(copy, range(3)))
    stream = other.streams[0, 0]
    assert (stream.group_idx, {*stream.groups}, stream.count(DEVICE), stream.tails) == (1, {0}, 3, {7})
    assert stream.leaves() == [2]


SAID = [[100, 101], [102, 103]]
"""Tokens of two blocks that are hashed with a salt, which no event of the host has."""


@pytest.mark.parametrize(
    ("data", "tokens", "observed"),
    [
        (Stored(1, (2,), (12,)), [[102, 103]], None),
        (Stored(None, (1, 2), (91, 92)), SAID, None),  # hashing tokens without the salt gives other local hashes
        (Stored(7, (8,), (18,)), [[104, 105]], None),  # the device never had it: nothing is known about it
        (Stored(None, (2,), (12,)), [[102, 103]], "block 2 is stored as a root"),
        (Stored(9, (1, 2), (11, 12)), SAID, "block 1 is stored under block 9"),
        (Stored(1, (2,), (12,)), [[102, 104]], "block 2 is stored with other tokens than before"),
        (Stored(None, (1, 2), (11, 13)), None, "block 2 is stored with other tokens than before"),
    ],
)
def test_an_event_without_its_keys_is_checked_against_the_devices_event(data, tokens, observed):
    judged = Judged(block_size=2)
    judged.publish(Stored(None, (1, 2), (11, 12)), {"extra_keys": [("salt",), None]}, SAID)
    judged.publish(Removed((2,)))
    judged.publish(data, {"extra_keys": None}, tokens, HOST)
    assert ([] if observed is None else [("wrong_hash", observed)]) == judged.end()
