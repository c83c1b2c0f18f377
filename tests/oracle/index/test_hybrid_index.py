"""Hybrid models in the reference index: it returns the dense chain of the attention group."""

import pytest
from hybrid_streams import Look, hybrid_streams, payload

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored, block_hashes
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.index.index import BlockNotFound, ParentBlockNotFound
from pytest_kvmock.values import Located, SparseStored, group_extra
from pytest_kvmock.wire import decode

FULL = group_extra(1)
WINDOW = group_extra(0, "sliding_window", 8)


def looked_up(stream):
    """Yield each lookup of a stream, the index's answer, and the number of copies of each block in each group."""
    index, copies, next_id = RadixIndex(count_copies=True), {}, 0
    for part in stream.parts:
        if isinstance(part, Look):
            size = stream.attention[1] or stream.unit
            yield part, index.find_matches(block_hashes(part.prompt.tokens, size)).scores.get((0, 0), 0), copies
            continue
        for wire, event in zip(part, decode(payload(part), "vllm-0.33", first_event_id=next_id).events, strict=True):
            index.apply(event)
            if wire["type"] == "AllBlocksCleared":
                copies = {}
            else:
                for block in wire["block_hashes"]:
                    key = wire["group_idx"], block
                    copies[key] = copies.get(key, 0) + (1 if wire["type"] == "BlockStored" else -1)
        next_id += len(part)


def streams_of(recording):
    """Return the streams whose local hashes distinguish prompts as the engine's names do: the wire shows no salt."""
    streams = hybrid_streams(recording("vllm_0.33.0_hybrid_streams.json.gz"))
    return [s for s in streams if not any(isinstance(part, Look) and part.prompt.salt for part in s.parts)]


def test_the_index_returns_the_dense_chain_and_the_engine_reuses_no_more(recording):
    looks = less = 0
    for stream in streams_of(recording):
        group, size = stream.attention
        for look, found, copies in looked_up(stream):
            if group is None or size % stream.unit:  # no attention group, or nothing is cached
                continue
            names, tokens = look.prompt.names(stream.unit), len(look.prompt.tokens)

            def holds(end, copies=copies, names=names, group=group, unit=stream.unit):
                return copies.get((group, names[end // unit]), 0) > 0

            dense = 0
            while dense + size <= tokens and holds(dense + size):
                dense += size
            assert dense == found * size, stream.name

            dense = min(dense, (tokens - 1) // size * size)  # the last token is always computed
            inside = range(dense + stream.unit, min(tokens - 1, dense + size - 1) + 1, stream.unit)
            most = max([dense, *(end for end in inside if holds(end))])
            assert look.computed_tokens <= most, stream.name
            looks, less = looks + 1, less + (look.computed_tokens < most)
    assert looks > 400
    assert less > 60  # the attention group has the blocks, and another group has not


def test_a_stream_without_an_attention_group_is_not_an_error(recording):
    alone = [stream for stream in streams_of(recording) if stream.attention == (None, None)]
    assert alone
    for stream in alone:
        for look, found, _ in looked_up(stream):
            assert 0 <= found * stream.unit <= len(look.prompt.tokens)


# --------------------------------------------------------------------------------------------------- by hand


class Index:
    def __init__(self, **options):
        self.index = RadixIndex(**options)
        self.next_id = 0

    def __call__(self, data, extra=None, size=None, tier=StorageTier.DEVICE, worker=0):
        blocks = len(getattr(data, "block_hashes", ()))
        tokens = None if size is None else [(0,) * size] * blocks
        self.index.apply(RouterEvent(worker, KvCacheEvent(self.next_id, data), tier, tokens, extra))
        self.next_id += 1

    def found(self, *local):
        return self.index.find_matches(local).scores.get((0, 0), 0)


@pytest.fixture
def index():
    return Index()


def test_sparse_groups_do_not_change_the_length_of_a_match(index):
    index(SparseStored(None, (2,), 8, 4), WINDOW)
    assert index.found(11, 12) == 0
    index(Stored(None, (1, 2), (11, 12)), FULL, size=4)
    index(Stored(2, (3,), (13,)), WINDOW, size=4)
    index(SparseStored(3, (5,), 8, 4), WINDOW)
    assert index.found(11, 12, 13) == 2
    index(Removed((2, 3)))
    index(Removed((1,)), group_extra(4))
    assert index.found(11, 12, 13) == 2
    index(Removed((2,)), FULL)
    assert index.found(11, 12, 13) == 1


def test_the_attention_group_is_known_by_its_kind_even_if_no_other_group_has_stored(index):
    index(Stored(None, (1,), (11,)), group_extra(6), size=4)
    index(Removed((1,)), group_extra(2))
    assert index.found(11) == 1
    index(Stored(None, (1,), (11,)), WINDOW, size=4)
    index(Removed((1,)))
    assert index.found(11) == 1


def test_a_dump_has_each_counted_copy_of_the_attention_group_only():
    index, again = Index(count_copies=True), RadixIndex(count_copies=True)
    for _ in range(2):
        index(Stored(None, (1,), (11,)), WINDOW, size=4)
        index(Stored(None, (1,), (11,)), FULL, size=4)
    for event in index.index.dump_events():
        again.apply(event)
    after = [
        (Stored(None, (1,), (11,)), WINDOW, 1),
        (Removed((1,)), None, 1),
        (Removed((1,)), FULL, 1),
        (Removed((1,)), FULL, 0),
    ]
    for place, (data, extra, left) in enumerate(after):
        again.apply(RouterEvent(0, KvCacheEvent(place, data), extra=extra))
        assert left == again.find_matches([11]).scores.get((0, 0), 0), data


def test_each_worker_has_its_own_groups(index):
    index(Stored(None, (1,), (11,)), WINDOW, size=4)
    index(Stored(None, (1,), (11,)), FULL, size=4)
    index(Stored(None, (1,), (11,)), size=4, worker=1)
    index(Stored(1, (2,), (12,)), size=4, worker=1)
    assert index.index.find_matches([11, 12]).scores == {(0, 0): 1, (1, 0): 2}
    index.index.remove_worker(0)
    index(Stored(None, (1,), (11,)), size=4)
    assert index.index.find_matches([11, 12]).scores == {(0, 0): 1, (1, 0): 2}


@pytest.mark.parametrize("counts", [False, True])
def test_a_prompt_tail_is_not_a_block(counts):
    index = Index(count_copies=counts)
    index(Stored(None, (6,), (16,)), group_extra(0, "mamba"), size=4)
    index(Stored(70, (7,), (17,)), FULL, size=2)  # before the block size is known
    index(Stored(None, (1, 2), (11, 12)), FULL, size=4)
    index(Stored(2, (8,), (18,)), FULL, size=2)
    index(Stored(2, (8,), (18,)), FULL, size=2)
    assert (index.index.num_blocks(0), index.found(11, 12, 18)) == (2, 2)
    for _ in range(2):
        index(Removed((8,)), FULL)
    index(Removed((7, 2)), FULL)
    assert index.found(11, 12) == 1
    with pytest.raises(BlockNotFound):
        index(Removed((8,)), FULL)

    index(Stored(70, (7,), (17,)), FULL, size=2)
    index(Cleared())
    with pytest.raises(BlockNotFound):
        index(Removed((7,)), FULL)
    with pytest.raises(ParentBlockNotFound):
        index(Stored(70, (9,), (19,)), FULL, size=4)


def test_a_located_event_makes_no_block_known(index):
    index(Located((1,)))
    index(Located((1, 2)), tier=StorageTier.HOST_PINNED)
    index(Stored(None, (1,), (11,)))
    index(Located((1,)), tier=StorageTier.HOST_PINNED)
    assert index.found(11, 12) == 1
