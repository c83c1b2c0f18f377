"""Streams of hybrid models and of offloading over a wire: sparse Stored and locations are read, and written back
unchanged.
"""

import msgspec
import pytest
from hybrid_streams import hybrid_streams, offload_streams, payload

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored, block_hashes
from pytest_kvmock.values import Located, SparseStored, group_extra
from pytest_kvmock.wire import DIALECTS, Batch, EncodeError, KvWire, StreamDigests, decode, encode

WITH_GROUPS = ["vllm-0.23", "vllm-0.24", "vllm-0.28", "vllm-0.33"]
WINDOW = group_extra(1, "sliding_window", 8)
SPAN = [(1, 2), (3, 4), (5, 6)]


def over(dialect, batches):
    """Decode batches, and check that each is written back unchanged."""
    for batch in batches:
        data = payload(batch, dialect)
        decoded = decode(data, dialect)
        assert decoded.problems == []
        assert len(batch) == len(decoded.events)
        assert data == encode(Batch(decoded.events, decoded.timestamp), dialect)
        yield from zip(batch, decoded.events, strict=True)


def as_published(event):
    """Return an event of a recording as our engine publishes it."""
    if event["type"] == "AllBlocksCleared":
        return Cleared(), None, None
    hashes, group = tuple(event["block_hashes"]), event.get("group_idx", 0)
    if event["type"] == "BlockRemoved":
        return Removed(hashes), None, group_extra(group)
    size, tokens = event["block_size"], event["token_ids"]
    kind = event.get("kv_cache_spec_kind", None)
    keys = (
        {} if not any(event.get("extra_keys") or ()) else {"extra_keys": [k and tuple(k) for k in event["extra_keys"]]}
    )
    extra = group_extra(group, kind, event.get("kv_cache_spec_sliding_window"), keys)
    cut = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    if len(cut) > len(hashes):
        return SparseStored(event["parent_block_hash"], hashes, len(tokens), size), cut, extra
    return Stored(event["parent_block_hash"], hashes, tuple(block_hashes(tokens, size))), cut, extra


@pytest.mark.parametrize("dialect", WITH_GROUPS)
def test_streams_of_hybrid_models_are_read_and_written_back_byte_for_byte(recording, dialect):
    streams = hybrid_streams(recording("vllm_0.33.0_hybrid_streams.json.gz"))
    kinds = set()
    for stream in streams:
        for wire, event in over(dialect, stream.batches):
            assert as_published(wire) == (event.data, event.token_ids, event.extra)
            kinds.add((type(event.data), (event.extra or {}).get("kv_cache_spec_kind")))
    assert {(SparseStored, "sliding_window"), (SparseStored, "mamba"), (SparseStored, "sliding_window_mla")} <= kinds


def test_events_of_hybrid_models_have_the_recorded_bytes(recording):
    for stream in hybrid_streams(recording("vllm_0.33.0_hybrid_streams.json.gz")):
        for batch in stream.batches:
            made = [
                RouterEvent(0, KvCacheEvent(i, data), token_ids=tokens, extra=extra)
                for i, (data, tokens, extra) in enumerate(map(as_published, batch))
            ]
            written = encode(Batch(made, 1.5), "vllm-0.33")
            assert payload(batch) == written
            assert batch == msgspec.msgpack.decode(written)[1]


@pytest.mark.parametrize("dialect", WITH_GROUPS)
def test_streams_of_offloading_are_read_and_written_back_byte_for_byte(recording, dialect):
    located = 0
    for _, batches in offload_streams(recording("vllm_0.33.0_offload_streams.json.gz")):
        for wire, event in over(dialect, batches):
            if isinstance(event.data, Located):
                located += 1
                assert (wire["block_size"], wire["token_ids"]) == (0, [])
                assert (event.storage_tier, event.token_ids) == (StorageTier.HOST_PINNED, None)
                group = {key: event.extra[key] for key in event.extra or {}}
                assert group.keys() <= {"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
            elif wire["type"] != "AllBlocksCleared":
                assert (wire["medium"] == "CPU") == (event.storage_tier is StorageTier.HOST_PINNED)
    assert located > 300


def stored(**changes):
    fields = {"block_hashes": [7], "parent_block_hash": 5, "token_ids": [*range(1, 7)], "block_size": 2}
    return {"type": "BlockStored", **fields, "group_idx": 1, "kv_cache_spec_kind": "mamba", "medium": "GPU", **changes}


PLACEHOLDER = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU"}
READ = [
    ("vllm-0.33", {}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.23", {"block_hashes": []}, SparseStored(5, (), 6, 2)),
    ("vllm-0.24", {"kv_cache_spec_kind": None}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.28", {"kv_cache_spec_kind": "chunked_local_attention"}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.33", {"group_idx": 0}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.33", {"group_idx": None, "kv_cache_spec_kind": "unknown"}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.33", {"kv_cache_spec_kind": "of a later release"}, SparseStored(5, (7,), 6, 2)),
    ("vllm-0.33", PLACEHOLDER, Located((7,))),
    ("vllm-0.33", {**PLACEHOLDER, "medium": "STORAGE", "block_hashes": [7, 8]}, Located((7, 8))),
    ("vllm-0.19", PLACEHOLDER, Located((7,))),
    ("vllm-0.14", {**PLACEHOLDER, "block_size": 16}, Located((7,))),
]


@pytest.mark.parametrize(("dialect", "changes", "data"), READ)
@pytest.mark.parametrize("careful", [False, True])
def test_sparse_stored_and_locations_are_recognised_in_a_payload(dialect, changes, data, careful):
    event = stored(**changes)
    before = payload([event], dialect)
    if careful:  # an unknown field makes the reader decode each event separately
        batch = msgspec.msgpack.decode(before)
        if DIALECTS[dialect].form == "map":
            batch[1][0]["new"] = 1
        else:
            batch[1][0].append(1)
        before = msgspec.msgpack.encode(batch)
    decoded = decode(before, dialect)

    assert [True] * careful == [problem.is_kept for problem in decoded.problems]
    assert [data] == [each.data for each in decoded.events]
    if not careful:
        assert before == encode(Batch(decoded.events, 1.5), dialect)


REFUSED = [
    ("vllm-0.33", {"kv_cache_spec_kind": None, "group_idx": None}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.24", {"kv_cache_spec_kind": None, "group_idx": 0}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.23", {"kv_cache_spec_kind": None, "group_idx": None}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.28", {"kv_cache_spec_kind": None, "group_idx": None, "block_hashes": []}, "span_mismatch", "0 (0 blocks of 2)", "6 token ids"),  # noqa: E501
    ("vllm-0.33", {"kv_cache_spec_kind": "full_attention"}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.33", {"kv_cache_spec_kind": "mla_attention"}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.33", {"token_ids": [1, 2, 3]}, "span_mismatch", "2 (1 block of 2)", "3 token ids"),
    ("vllm-0.33", {"block_hashes": [6, 7, 8, 9]}, "span_mismatch", "8 (4 blocks of 2)", "6 token ids"),
    ("vllm-0.19", {}, "span_mismatch", "2 (1 block of 2)", "6 token ids"),
    ("vllm-0.33", {"block_size": 0}, "bad_block_size", "an integer of at least 1", "0"),
    ("vllm-0.33", {**PLACEHOLDER, "medium": "GPU"}, "bad_block_size", "an integer of at least 1", "0"),
    ("vllm-0.33", {**PLACEHOLDER, "parent_block_hash": 5}, "bad_block_size", "an integer of at least 1", "0"),
    ("vllm-0.33", {**PLACEHOLDER, "block_hashes": []}, "bad_block_size", "an integer of at least 1", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "changes", "defect", "expected", "observed"), REFUSED)
def test_an_event_that_is_neither_sparse_nor_a_location_is_reported_and_dropped(
    dialect, changes, *, defect, expected, observed
):
    event = stored(**changes, extra_keys=[None] * len(changes.get("block_hashes", [7])))
    decoded = decode(payload([event], dialect), dialect)

    (problem,) = decoded.problems
    assert decoded.events == []
    assert (problem.name, problem.expected, problem.observed, problem.is_kept) == (defect, expected, observed, False)


def test_a_sparse_stored_and_a_location_keep_their_extra_data_over_the_wire():
    wire = KvWire("vllm-0.33")
    wire.publish(SparseStored(9, (7,), 6, 2), token_ids=SPAN, extra={**WINDOW, "lora_name": "a", "session_id": "s"})
    wire.publish(Located((7,)), "host", extra={**group_extra(1), "locality": "LOCAL", "ownership": "kvcr"})
    (one,), (other,) = (wire.decode(data).events for data in wire.payloads)

    assert (SparseStored(9, (7,), 6, 2), SPAN) == (one.data, one.token_ids)
    assert one.extra == {**WINDOW, "lora_name": "a", "session_id": "s"}
    assert (Located((7,)), StorageTier.HOST_PINNED) == (other.data, other.storage_tier)
    assert other.extra == {"group_idx": 1, "locality": "LOCAL", "ownership": "kvcr"}


UNWRITTEN = [
    ("vllm-0.19", SparseStored(9, (7,), 6, 2), "device", ("dialect 'vllm-0.19' has no cache groups, and a SparseStored "
    "is of one")),
    ("sglang-0.5.22", SparseStored(9, (7,), 6, 2), "device", "has no cache groups, and a SparseStored is of one"),
    ("vllm-0.33", SparseStored(9, (7,), 8, 2), "device", ("6 token ids in blocks of 2 came for a span of 8 in blocks "
    "of 2")),
    ("vllm-0.33", SparseStored(9, (7,), 6, 3), "device", ("6 token ids in blocks of 2 came for a span of 6 in blocks "
    "of 3")),
    ("vllm-0.33", Located((7,)), "device", "a location names blocks in a tier below the device"),
    ("vllm-0.33", Located(()), "host", "a location names blocks in a tier below the device"),
    ("vllm-0.9", Located((7,)), "host", "does not say where a block is"),
    ("dynamo-router-event", SparseStored(9, (7,), 6, 2), "device", "Dynamo's JSON has no SparseStored"),
    ("dynamo-kv-cache-event", Located((7,)), "host", "Dynamo's JSON has no Located"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "data", "tier", "message"), UNWRITTEN)
def test_events_that_a_dialect_cannot_express_are_refused(dialect, data, tier, message):
    wire = KvWire(dialect)
    tokens = None if isinstance(data, Located) else SPAN
    with pytest.raises(EncodeError, match="event 0 of the batch: .*" + message):
        wire.publish(data, tier, token_ids=tokens)
    assert wire.batches == []


def test_a_location_carries_the_digest_of_a_held_block():
    from pytest_kvmock import create_manager

    sink = []
    manager = create_manager("vllm", num_blocks=8, block_size=2, sink=sink.append)
    wire = KvWire("vllm-0.33-bytes", digests={0: StreamDigests.of_manager(manager)})
    tokens = [[1, 2], [3, 4]]
    names = [manager.hasher.name(digest) for digest in manager.hasher.digests([1, 2, 3, 4], 2, 0, None)]
    wire.publish(Stored(None, tuple(names), tuple(block_hashes([1, 2, 3, 4], 2))), token_ids=tokens)
    wire.publish(Located((names[1],)), "host")
    with pytest.raises(EncodeError, match="block 5 is not held"):
        wire.publish(Located((5,)), "host")
    with pytest.raises(EncodeError, match="a sparse Stored has no digests"):
        wire.publish(SparseStored(None, (names[1],), 4, 2), token_ids=tokens, extra=WINDOW)

    (event,) = wire.decode(wire.payloads[1]).events
    assert Located((names[1],)) == event.data
    assert wire.payloads[1] == encode(Batch([event], 1.0), "vllm-0.33-bytes")
