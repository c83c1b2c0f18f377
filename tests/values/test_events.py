"""Events as values, and Dynamo's JSON form of them (each acceptance and rejection is serde's, see tests/interop)."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.values import Located, SparseStored
from pytest_kvmock.values.events import StoredBlock, stored_event

U64 = 2**64 - 1
MM = {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 4]]}]}

STORED = {"event_id": 3, "data": {"stored": {"blocks": [{"block_hash": 5, "tokens_hash": 6}]}}}


def stored(**fields):
    return {"event_id": 0, "data": {"stored": {"blocks": [], **fields}}}


def block(**fields):
    return stored(blocks=[{"block_hash": 1, "tokens_hash": 2, **fields}])


# --------------------------------------------------------------------------------------------------- values


def test_a_stored_shows_its_blocks_as_objects_when_asked():
    data = Stored(None, (1, 2), (3, 4), mm_extra_info=(None, MM))
    assert (StoredBlock(1, 3), StoredBlock(2, 4, MM)) == data.blocks
    assert (StoredBlock(1, 3, None),) == Stored(9, (1,), (3,)).blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, (1, 2), (3,)), "2 block_hashes and 1 tokens_hashes"),
        ((None, (1,), (3,), None, (None, None)), "1 block_hashes and 2 entries of mm_extra_info"),
    ],
)
def test_the_error_for_uneven_lists_of_a_stored_has_their_lengths(arguments, message):
    with pytest.raises(ValueError, match=message):
        Stored(*arguments)


# Events of hybrid models and offloading: a span with some of its blocks kept, and a location of known blocks.
SPARSE = SparseStored(7, (1, 2), span=24, block_size=4)
SPANS = [SPARSE, SparseStored(None, (), 4, 4), SparseStored(2**64 - 1, (2**63,), 8, 4)]


def test_a_sparse_stored_is_a_stored_with_only_block_hashes():
    assert isinstance(SPARSE, Stored)
    assert (
        SPARSE.kind, SPARSE.tokens_hashes, SPARSE.blocks, SPARSE.start_position, SPARSE.mm_extra_info
    ) == ("stored", (), (), None, None)  # fmt: skip
    assert Stored(7, (), ()) != SparseStored(7, (), 4, 4) != SparseStored(7, (), 8, 4)
    assert len({*SPANS, SparseStored(7, [1, 2], 24, 4)}) == 3
    assert repr(SPARSE) == "SparseStored(parent_hash=7, block_hashes=(1, 2), span=24, block_size=4)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (None, (1, 2), 8, 4),
            "2 block_hashes, and the span of 8 tokens has 2 blocks of 4; where all were kept it is a Stored",
        ),
        ((None, (1,), 9, 4), "a span has whole blocks of 4 tokens, got 9"),
        ((None, (), 0, 4), "a span has whole blocks of 4 tokens, got 0"),
        ((None, (), 4, 0), "block_size must be an integer of at least 1, got 0"),
        ((None, (), 4, None), "block_size must be an integer of at least 1, got None"),
    ],
)
def test_an_invalid_span_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SparseStored(*arguments)


@pytest.mark.parametrize("data", [*SPANS, Located((3, 2**64 - 1)), Located(())], ids=repr)
def test_a_sparse_stored_and_a_location_have_their_own_json_form(data):
    event = RouterEvent(1, KvCacheEvent(4, data, 2), StorageTier.HOST_PINNED)
    assert event == RouterEvent.from_json(event.to_json())
    assert data.kind in event.to_dict()["event"]["data"]


def test_the_json_of_sparse_stored_and_locations_has_unsigned_hashes():
    assert KvCacheEvent(0, Located((-1,))).to_dict()["data"] == {"located": {"block_hashes": [2**64 - 1]}}
    sparse = {"parent_hash": 2**64 - 2, "block_hashes": [2**64 - 1], "span": 8, "block_size": 4}
    assert {"stored": sparse} == KvCacheEvent(0, SparseStored(-2, (-1,), 8, 4)).to_dict()["data"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"span": 8, "block_size": 4}, "missing field 'block_hashes'"),
        ({"span": 8, "block_hashes": []}, "missing field 'block_size'"),
        ({"span": 9, "block_size": 4, "block_hashes": []}, "data.stored: SparseStored: a span has whole blocks of 4"),
        ({"span": 8, "block_size": 4, "block_hashes": [-1]}, "stored.block_hashes[0]: expected an integer"),
    ],
)
def test_an_invalid_json_of_a_sparse_stored_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        KvCacheEvent.from_dict({"event_id": 0, "data": {"stored": fields}})


def test_locations_compare_by_value():
    assert Located([1, 2]) == Located((1, 2)) != Removed((1, 2))
    assert repr(Located([1, 2])) == "Located(block_hashes=(1, 2))"
    assert (Located.kind, Removed.kind, Cleared.kind) == ("located", "removed", "cleared")


def test_token_ids_of_a_router_event_do_not_affect_equality_or_json():
    event = KvCacheEvent(0, Stored(None, (1,), (2,)))
    with_tokens = RouterEvent(1, event, token_ids=((1, 2, 3, 4),))
    assert RouterEvent(1, event) == with_tokens
    assert hash(RouterEvent(1, event)) == hash(with_tokens)
    assert RouterEvent(1, event).to_json() == with_tokens.to_json()


def test_events_with_a_different_worker_rank_tier_or_id_are_not_equal():
    event = KvCacheEvent(0, Removed((1,)))
    others = [
        RouterEvent(2, event),
        RouterEvent(1, KvCacheEvent(0, Removed((1,)), 1)),
        RouterEvent(1, KvCacheEvent(1, Removed((1,)))),
        RouterEvent(1, event, StorageTier.DISK),
        RouterEvent(1, KvCacheEvent(0, Cleared())),
    ]
    assert [other for other in others if other == RouterEvent(1, event)] == []


# ------------------------------------------------------------------------------------------------- writing JSON


@pytest.mark.parametrize(
    ("expected", "event"),
    [
        (
            (
                '{"event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":'
                '[{"block_hash":123,"tokens_hash":456,"mm_extra_info":null}]}},"dp_rank":0}'
            ),
            KvCacheEvent(0, Stored(None, (123,), (456,))),
        ),
        ('{"event_id":1,"data":{"removed":{"block_hashes":[123]}},"dp_rank":2}', KvCacheEvent(1, Removed((123,)), 2)),
        ('{"event_id":2,"data":"cleared","dp_rank":0}', KvCacheEvent(2, Cleared())),
        (
            '{"worker_id":7,"storage_tier":"host_pinned","event":{"event_id":2,"data":"cleared","dp_rank":0}}',
            RouterEvent(7, KvCacheEvent(2, Cleared()), StorageTier.HOST_PINNED),
        ),
    ],
)
def test_the_json_form_equals_that_of_dynamo(expected, event):
    assert event.to_json() == expected
    assert event.to_dict() == json.loads(expected)


u64 = st.integers(0, U64)
pairs = st.lists(st.tuples(u64, u64), max_size=4)
infos = st.none() | st.lists(
    st.fixed_dictionaries({"mm_hash": u64, "offsets": st.lists(st.lists(u64, min_size=2, max_size=2), max_size=2)}),
    max_size=2,
).map(lambda objects: {"mm_objects": objects})


@st.composite
def data(draw):
    kind = draw(st.sampled_from("SRC"))
    if kind == "C":
        return Cleared()
    if kind == "R":
        return Removed(tuple(draw(st.lists(u64, max_size=4))))
    blocks = draw(pairs)
    extra = tuple(draw(infos) for _ in blocks)
    return Stored(
        draw(st.none() | u64),
        tuple(b for b, _ in blocks),
        tuple(t for _, t in blocks),
        draw(st.none() | st.integers(0, 2**32 - 1)),
        extra if any(info is not None for info in extra) else None,
    )


kv_events = st.builds(KvCacheEvent, u64, data(), st.integers(0, 2**32 - 1))


@given(kv_events)
def test_every_event_is_read_back_from_its_json(event):
    assert event == KvCacheEvent.from_json(event.to_json())
    assert event == KvCacheEvent.from_json(event.to_json().encode())
    assert event == KvCacheEvent.from_dict(event.to_dict())


@given(st.builds(RouterEvent, u64, kv_events, st.sampled_from(StorageTier)))
def test_every_router_event_is_read_back_from_its_json(event):
    assert event == RouterEvent.from_json(event.to_json())
    assert event == RouterEvent.from_dict(event.to_dict())


# ------------------------------------------------------------------------------------------------- reading JSON


@pytest.mark.parametrize(
    ("expected", "given_"),
    [
        (KvCacheEvent(3, Stored(None, (5,), (6,)), 0), STORED),
        (KvCacheEvent(3, Stored(None, (5,), (6,)), 0), {**STORED, "storage_tier": "disk", "more": [1]}),
        (KvCacheEvent(0, Stored(None, (), (), 4)), stored(start_position=4, parent_hash=None, later=1)),
        (KvCacheEvent(0, Stored(U64, (1,), (2,))), {**block(), "data": {"stored": {"parent_hash": U64, **block()["data"]["stored"]}}}),  # noqa: E501
        (KvCacheEvent(0, Stored(None, (1,), (2,), None, (MM,))), block(mm_extra_info=MM, unknown=None)),
        (KvCacheEvent(0, Stored(None, (1,), (2,))), block(mm_extra_info=None)),
        (KvCacheEvent(0, Removed(())), {"event_id": 0, "data": {"removed": {"block_hashes": []}}}),
        (KvCacheEvent(0, Cleared()), {"event_id": 0, "data": "cleared"}),
        (KvCacheEvent(0, Cleared(), 5), {"event_id": 0, "data": {"cleared": None}, "dp_rank": 5}),
    ],
)  # fmt: skip
def test_missing_fields_have_defaults_and_unknown_fields_are_ignored(expected, given_):
    assert KvCacheEvent.from_dict(given_) == expected
    assert KvCacheEvent.from_json(json.dumps(given_)) == expected


def test_the_tier_of_a_router_event_defaults_to_the_device():
    expected = RouterEvent(7, KvCacheEvent(0, Cleared()), StorageTier.DEVICE)
    assert RouterEvent.from_dict({"worker_id": 7, "event": {"event_id": 0, "data": "cleared"}, "x": 1}) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"data": "cleared"}, r"KvCacheEvent: missing field 'event_id'"),
        ({"event_id": 0}, r"KvCacheEvent: missing field 'data'"),
        ({"event_id": -1, "data": "cleared"}, r"KvCacheEvent\.event_id: expected an integer from 0 to 18446744073709551615"),  # noqa: E501
        ({"event_id": 1.0, "data": "cleared"}, r"KvCacheEvent\.event_id: .* got 1\.0"),
        ({"event_id": True, "data": "cleared"}, r"KvCacheEvent\.event_id: .* got True"),
        ({"event_id": 0, "data": "cleared", "dp_rank": None}, r"KvCacheEvent\.dp_rank: .*\(u32\), got None"),
        ({"event_id": 0, "data": "cleared", "dp_rank": 2**32}, r"KvCacheEvent\.dp_rank: .*\(u32\), got 4294967296"),
        ({"event_id": 0, "data": "stored"}, r'KvCacheEvent\.data: expected \{"stored": \.\.\.\}, .* got "stored"'),
        ({"event_id": 0, "data": {"Stored": {"blocks": []}}}, r"KvCacheEvent\.data: expected"),
        ({"event_id": 0, "data": {"cleared": {}}}, r"KvCacheEvent\.data: expected"),
        ({"event_id": 0, "data": {"removed": {"block_hashes": []}, "cleared": None}}, r"KvCacheEvent\.data: expected"),
        ({"event_id": 0, "data": {"removed": {}}}, r"KvCacheEvent\.data\.removed: missing field 'block_hashes'"),
        ({"event_id": 0, "data": {"removed": {"block_hashes": [1, -2]}}}, r"KvCacheEvent\.data\.removed\.block_hashes\[1\]: .* got -2"),  # noqa: E501
        ({"event_id": 0, "data": {"removed": {"block_hashes": 1}}}, r"removed\.block_hashes: expected an array, got 1"),
        ({"event_id": 0, "data": {"stored": {}}}, r"KvCacheEvent\.data\.stored: missing field 'blocks'"),
        (stored(blocks=[5]), r"stored\.blocks\[0\]: expected an object, got 5"),
        (stored(blocks=[{"block_hash": 1}]), r"stored\.blocks\[0\]: missing field 'tokens_hash'"),
        (stored(blocks=[{"tokens_hash": 1}]), r"stored\.blocks\[0\]: missing field 'block_hash'"),
        (block(block_hash=-5), r"KvCacheEvent\.data\.stored\.blocks\[0\]\.block_hash: .*\(u64\), got -5"),
        (block(tokens_hash=2**64), r"stored\.blocks\[0\]\.tokens_hash: .* got 18446744073709551616"),
        (stored(parent_hash=-1), r"stored\.parent_hash: .* got -1"),
        (stored(start_position=2**32), r"stored\.start_position: .*\(u32\)"),
        (block(mm_extra_info={"x": 1}), r"blocks\[0\]\.mm_extra_info: missing field 'mm_objects'"),
        (block(mm_extra_info=5), r"blocks\[0\]\.mm_extra_info: expected an object, got 5"),
        (block(mm_extra_info={"mm_objects": [{"mm_hash": 1}]}), r"mm_objects\[0\]: missing field 'offsets'"),
        (block(mm_extra_info={"mm_objects": [{"mm_hash": -1, "offsets": []}]}), r"mm_objects\[0\]\.mm_hash: .* got -1"),
        (block(mm_extra_info={"mm_objects": [{"mm_hash": 1, "offsets": [[1]]}]}), r"offsets\[0\]: expected \[start, end\], got \[1\]"),  # noqa: E501
        (block(mm_extra_info={"mm_objects": [{"mm_hash": 1, "offsets": [[0, -1]]}]}), r"offsets\[0\]: expected an integer"),  # noqa: E501
        ([], r"KvCacheEvent: expected an object, got \[\]"),
        (None, r"KvCacheEvent: expected an object, got None"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_event_names_the_field(given_, message):
    with pytest.raises(ValueError, match=message):
        KvCacheEvent.from_dict(given_)
    with pytest.raises(ValueError, match=message.replace("True", ".rue").replace("None", "(None|null)")):
        KvCacheEvent.from_json(json.dumps(given_))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"event": {"event_id": 0, "data": "cleared"}}, r"RouterEvent: missing field 'worker_id'"),
        ({"worker_id": -1, "event": {"event_id": 0, "data": "cleared"}}, r"RouterEvent\.worker_id: .* got -1"),
        ({"worker_id": 1}, r"RouterEvent: missing field 'event'"),
        ({"worker_id": 1, "event": {"event_id": 0}}, r"RouterEvent\.event: missing field 'data'"),
        (
            {"worker_id": 1, "storage_tier": "gpu", "event": {"event_id": 0, "data": "cleared"}},
            r"RouterEvent\.storage_tier: expected one of device, host_pinned, disk, external, got 'gpu'",
        ),
    ],
)
def test_the_error_for_an_invalid_router_event_names_the_field(given_, message):
    with pytest.raises(ValueError, match=message):
        RouterEvent.from_json(json.dumps(given_))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"event_id":0,"data":"cleared"} x', "not JSON: Extra data"),
        ('{"event_id":0,', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("\ufeff{}", "not JSON"),
        ('{"event_id":NaN,"data":"cleared"}', "not JSON: NaN is not a number"),
        ('{"event_id":0,"data":"cleared","x":-Infinity}', "not JSON: -Infinity is not a number"),
        ('{"event_id":0,"event_id":0,"data":"cleared"}', "not JSON: duplicate field 'event_id'"),
        ("[" * 100_000, "not JSON: nested too deeply"),
    ],
    ids=range(9),
)
def test_text_that_serde_would_reject_is_refused(text, message):
    with pytest.raises(ValueError, match=f"KvCacheEvent: {message}"):
        KvCacheEvent.from_json(text)


def test_an_unknown_field_can_occur_twice():
    assert KvCacheEvent(0, Cleared()) == KvCacheEvent.from_json('{"event_id":0,"data":"cleared","x":1,"x":2}')


def test_stored_event_creates_the_same_event_as_the_constructors():
    short = stored_event(1, 2, 3, 4, (5, 6), (7, 8), StorageTier.DISK, [(9,), (10,)])
    long = RouterEvent(1, KvCacheEvent(2, Stored(4, (5, 6), (7, 8)), 3), StorageTier.DISK, [(9,), (10,)])

    assert (long, repr(long)) == (short, repr(short))  # the repr also shows fields that equality ignores
