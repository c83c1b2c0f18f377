"""Decoding of payloads, and the reports about bad ones: each defect has its name and its place."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payloads import MSGPACK, NAMES, careful, check, cleared, examples, payloads, removed, same, stored

from pytest_kvmock import Prompt, RadixIndex, RouterEvent, RouterHarness, StorageTier, block_hashes
from pytest_kvmock.wire import DIALECTS, Batch, decode, encode
from pytest_kvmock.wire.codec.defects import DEFECTS, WireDefect, WireProblem

pack = msgspec.msgpack.encode
ARRAY, MAP, SIGNED, BYTES = "vllm-0.19", "vllm-0.33", "sglang-0.5.9", "vllm-0.24-bytes"
TAGS = "BlockStored, BlockRemoved, AllBlocksCleared"
DIGEST = "a digest of 16 or 32 bytes"
LISTS = "an array of arrays of integers, or nil"


def array(place=None, value=None, *, hashes=(11, 12)):
    """Return a BlockStored of vLLM 0.19 with one element changed."""
    event = ["BlockStored", [*hashes], None, [*range(4 * len(hashes))], 4, None, "GPU", None, [None] * len(hashes)]
    if place is not None:
        event[place] = value
    return event


def as_map(**changes):
    """Return a BlockStored of vLLM 0.33 with fields changed; REMOVED deletes one."""
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [*range(8)],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | changes
    return {key: value for key, value in event.items() if value is not REMOVED}


REMOVED = object()
GOOD = {ARRAY: array(hashes=(21, 22)), MAP: as_map(block_hashes=[21, 22]), SIGNED: array()[:7]}
GOOD[BYTES] = as_map(block_hashes=[b"\x07" * 32, b"\x08" * 16])


def around(name, *events):
    """Return a batch with these events between two good ones."""
    return pack([1.5, [GOOD[name], *events, GOOD[name]], 0])


# For each event: dialect, the event, defect, field, expected, observed. The event is between two good ones.
BAD = [
    (ARRAY, 7, "wrong_type", None, "an array", "7"),
    (ARRAY, None, "wrong_type", None, "an array", "None"),
    (MAP, "BlockStored", "wrong_type", None, "a map", "'BlockStored'"),
    (MAP, array(), "wrong_form", None, "a map", "an array"),
    (ARRAY, as_map(), "wrong_form", None, "an array", "a map"),
    (ARRAY, [], "missing_field", "type", f"a tag: {TAGS}", "an empty array"),
    (MAP, {}, "missing_field", "type", f"a tag: {TAGS}", "a map of 0"),
    (MAP, as_map(type=REMOVED), "missing_field", "type", f"a tag: {TAGS}", "a map of 10"),
    (ARRAY, ["BlockMoved", [1]], "unknown_tag", "type", TAGS, "'BlockMoved'"),
    (ARRAY, [5], "unknown_tag", "type", TAGS, "5"),
    (MAP, {"type": "blockstored"}, "unknown_tag", "type", TAGS, "'blockstored'"),
    (MAP, {"type": ["BlockStored"]}, "unknown_tag", "type", TAGS, "['BlockStored']"),
    (ARRAY, array()[:7], "missing_field", "lora_name", "the field lora_name", "6 fields"),
    (ARRAY, ["BlockRemoved", [1]], "missing_field", "medium", "the field medium", "1 fields"),
    (MAP, as_map(token_ids=REMOVED), "missing_field", "token_ids", "the field token_ids", "a map of 10"),
    (ARRAY, array(1, 11), "wrong_type", "block_hashes", "an array of block hashes", "11"),
    (ARRAY, array(1, None), "wrong_type", "block_hashes", "an array of block hashes", "None"),
    (ARRAY, array(1, ["x", 12]), "wrong_type", "block_hashes", "an integer from 0 to 2**64 - 1", "'x'"),
    (ARRAY, array(1, [True, 12]), "wrong_type", "block_hashes", "an integer from 0 to 2**64 - 1", "True"),
    (ARRAY, array(1, [1.0, 12]), "wrong_type", "block_hashes", "an integer from 0 to 2**64 - 1", "1.0"),
    (ARRAY, array(1, [-1, 12]), "hash_out_of_range", "block_hashes", "an integer from 0 to 2**64 - 1", "-1"),
    (
        SIGNED,
        array(1, [2**63, 12])[:7],
        "hash_out_of_range",
        "block_hashes",
        "an integer from -2**63 to 2**63 - 1",
        "0x8000000000000000",
    ),
    (ARRAY, array(1, [b"x" * 32, 12]), "wrong_hash_form", "block_hashes", "an integer from 0 to 2**64 - 1", "32 bytes"),
    (BYTES, as_map(), "wrong_hash_form", "block_hashes", DIGEST, "11"),
    (BYTES, as_map(block_hashes=[b"x" * 32, b"y" * 8]), "hash_out_of_range", "block_hashes", DIGEST, "8 bytes"),
    (BYTES, as_map(block_hashes=[b"x" * 32, b"y" * 20]), "hash_out_of_range", "block_hashes", DIGEST, "20 bytes"),
    (ARRAY, array(2, "root"), "wrong_type", "parent_block_hash", "an integer from 0 to 2**64 - 1", "'root'"),
    (ARRAY, array(2, -7), "hash_out_of_range", "parent_block_hash", "an integer from 0 to 2**64 - 1", "-7"),
    (
        ARRAY,
        array(3, [0, 1, 2, 3, 4, 5, 6, -7]),
        "token_out_of_range",
        "token_ids",
        "an array of integers from 0 to 4294967295",
        "-7",
    ),
    (
        MAP,
        as_map(token_ids=[0, 1, 2, 3, 4, 5, 6, 2**32]),
        "token_out_of_range",
        "token_ids",
        "an array of integers from 0 to 4294967295",
        "4294967296",
    ),
    (ARRAY, array(3, "text"), "wrong_type", "token_ids", "an array of integers from 0 to 4294967295", "'text'"),
    (
        ARRAY,
        array(3, [0, 1, 2, None, 4, 5, 6, 7]),
        "wrong_type",
        "token_ids",
        "an array of integers from 0 to 4294967295",
        "None at 3",
    ),
    (ARRAY, array(3, [*range(6)]), "span_mismatch", "token_ids", "8 (2 blocks of 4)", "6 token ids"),
    (ARRAY, array(3, []), "span_mismatch", "token_ids", "8 (2 blocks of 4)", "0 token ids"),
    (MAP, as_map(block_hashes=[11]), "span_mismatch", "token_ids", "4 (1 block of 4)", "8 token ids"),
    (MAP, as_map(block_size=3), "span_mismatch", "token_ids", "6 (2 blocks of 3)", "8 token ids"),
    (MAP, as_map(block_size=0), "bad_block_size", "block_size", "an integer of at least 1", "0"),
    (ARRAY, array(4, -4), "bad_block_size", "block_size", "an integer of at least 1", "-4"),
    (ARRAY, array(4, None), "wrong_type", "block_size", "an integer of at least 1", "None"),
    (ARRAY, array(4, 4.0), "wrong_type", "block_size", "an integer of at least 1", "4.0"),
    (ARRAY, array(5, "adapter"), "wrong_type", "lora_id", "an integer, or nil", "'adapter'"),
    (ARRAY, array(6, 0), "wrong_type", "medium", "a string, or nil", "0"),
    (ARRAY, array(6, "cuda:0"), "unknown_medium", "medium", "'GPU' or 'CPU' or 'STORAGE'".replace("'", ""), "'cuda:0'"),
    (MAP, {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"}, "unknown_medium", "medium", "GPU or CPU or STORAGE or cpu", "'TAPE'"),  # noqa: E501
    (ARRAY, array(7, 5), "wrong_type", "lora_name", "a string, or nil", "5"),
    (ARRAY, array(8, "salt"), "wrong_type", "extra_keys", "an array, or nil", "'salt'"),
    (MAP, as_map(group_idx="0"), "wrong_type", "group_idx", "an integer, or nil", "'0'"),
    (MAP, as_map(lookahead_token_ids=[[1], "2"]), "wrong_type", "lookahead_token_ids", LISTS, "'2' at 1"),
    (MAP, as_map(lookahead_token_ids=[[1], [2, "3"]]), "wrong_type", "lookahead_token_ids", LISTS, "'3' at 1 of 1"),
    (MAP, as_map(locality=1), "wrong_type", "locality", "a string, or nil", "1"),
    (MAP, as_map(ownership=["a"]), "wrong_type", "ownership", "a string, or nil", "['a']"),
    (MAP, as_map(locality={(1,): 2}), "wrong_type", "locality", "a scalar as a key", "[1]"),
    (
        MAP,
        as_map(ownership=msgspec.msgpack.Ext(5, b"x")),
        "wrong_type",
        "ownership",
        "a value of msgpack's own types",
        "an extension of type 5",
    ),
    (ARRAY, array(8, [None]), "span_mismatch", "extra_keys", "an entry for each of 2 blocks", "an array of 1"),
    (MAP, as_map(extra_keys=[["img"], None, None]), "span_mismatch", "extra_keys", ("an entry for each of 2 "
    "blocks"), "an array of 3"),
    (MAP, as_map() | {7: 8}, "unknown_field", None, "a text as a key", "the key 7"),
    (
        SIGNED,
        [*array()[:7], "x" * 100],
        "unknown_field",
        "field_7",
        "at most 6 fields",
        "a text of length 100",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "event", "defect", "field", "expected", "observed"), BAD)
def test_a_bad_event_is_reported_and_the_good_events_are_kept(name, event, *, defect, field, expected, observed):
    decoded = decode(around(name, event), name)
    (problem,) = decoded.problems

    kept = problem.is_kept
    assert problem == WireProblem(WireDefect(defect), 1, field, observed, expected, is_kept=kept)
    assert (
        (defect == "unknown_field" and field is not None) or (field == "extra_keys" and defect == "span_mismatch")
    ) == kept
    assert [each.event.event_id for each in decoded.events] == ([0, 1, 2] if kept else [0, 2])
    assert decoded.num_events == 3


def raw_map(*pairs):
    """Return a map whose keys may be duplicates."""
    return bytes([0x80 | len(pairs)]) + b"".join(pack(key) + pack(value) for key, value in pairs)


def with_raw(name, event):
    """Return a batch of a good event, an event in bytes, and a good event."""
    good = pack(GOOD[name])
    return b"\x93" + pack(1.5) + b"\x93" + good + event + good + pack(0)


def deep(levels):
    return b"\x91" * levels + b"\xc0"


IN_BYTES = [
    (
        MAP,
        raw_map(*as_map().items(), ("block_size", 4)),
        "duplicate_key",
        "block_size",
        "each key once",
        "the key 'block_size' again",
    ),
    (MAP, raw_map(("type", "AllBlocksCleared"), ("type", "AllBlocksCleared")), "duplicate_key", "type", "each key once", "the key 'type' again"),  # noqa: E501
    (
        MAP,
        raw_map(*[*as_map().items()][:8], ("extra_keys", msgspec.Raw(b"\x91\x82\xa1a\x01\xa1a\x02"))),
        "duplicate_key",
        "extra_keys",
        "each key once",
        "the key 'a' again",
    ),
    (MAP, raw_map(*[*as_map().items()][:8], ("locality", msgspec.Raw(deep(40)))), "nested_too_deeply", "locality", "at most 16 in each other", "an array in 16 others"),  # noqa: E501
    (MAP, raw_map(*[*as_map().items()][:8], ("locality", msgspec.Raw(deep(100_000)))), "nested_too_deeply", "locality", "at most 16 in each other", "an array in 16 others"),  # noqa: E501
    (ARRAY, deep(100_000), "unknown_tag", "type", TAGS, "*"),
    (ARRAY, b"\x93\xacBlockRemoved\xa4\xff\xfe\x00\x00\xc0", "bad_text", "block_hashes", "UTF-8", "byte 0xff at 0 of a text of 4 bytes"),  # noqa: E501
    (ARRAY, b"\x91\xa2\xc3\x28", "bad_text", "type", "UTF-8", "byte 0xc3 at 0 of a text of 2 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "event", "defect", "field", "expected", "observed"), IN_BYTES)
def test_defects_that_exist_only_in_raw_bytes_are_reported(name, event, *, defect, field, expected, observed):
    decoded = decode(with_raw(name, event), name)
    (problem,) = decoded.problems

    if defect == "unknown_tag":
        assert problem.name in (WireDefect.NESTED_TOO_DEEPLY, WireDefect.UNKNOWN_TAG)
    else:
        assert problem == WireProblem(WireDefect(defect), 1, field, observed, expected)
    assert [each.event.event_id for each in decoded.events] == [0, 2]


BATCH = "an array of timestamp, events and rank"
# For each batch: the payload, its defect, field, expected, observed, and whether its event is kept.
BATCHES = [
    (b"", "truncated", None, "the whole of the value", "1 bytes are needed and 0 left", 0),
    (b"\xc1", "malformed", None, "msgpack, which has no such byte", "byte 0xc1 at 0", 0),
    (b"garbage", "not_a_batch", None, BATCH, "103", 0),
    (pack({"ts": 1.0, "events": []}), "not_a_batch", None, BATCH, "{'ts': 1.0, 'events': []}", 0),
    (pack([]), "not_a_batch", None, BATCH, "an array of 0", 0),
    (pack([1.0]), "not_a_batch", None, BATCH, "an array of 1", 0),
    (pack([1.0, 5, 0]), "wrong_type", "events", "an array of events", "5", 0),
    (pack([1.0, array(), 0]), "wrong_type", None, "an array", "'BlockStored'", 0),
    (pack(["now", [array()], 0]), "wrong_type", "timestamp", "a number", "'now'", 1),
    (pack([float("nan"), [array()], 0]), "wrong_type", "timestamp", "a finite number", "nan", 1),
    (pack([float("-inf"), [array()], 0]), "wrong_type", "timestamp", "a finite number", "-inf", 1),
    (pack([1.0, [array()]]), "missing_field", "data_parallel_rank", BATCH, "an array of 2", 1),
    (pack([1.0, [array()], -1]), "bad_rank", "data_parallel_rank", "an integer from 0 to 4294967295, or nil", "-1", 1),
    (
        pack([1.0, [array()], "0"]),
        "bad_rank",
        "data_parallel_rank",
        "an integer from 0 to 4294967295, or nil",
        "'0'",
        1,
    ),
    (
        pack([1.0, [array()], True]),
        "bad_rank",
        "data_parallel_rank",
        "an integer from 0 to 4294967295, or nil",
        "True",
        1,
    ),
    (pack([1.0, [array()], 0, "more"]), "unknown_field", "field_3", BATCH, "'more'", 1),
    (pack([1.0, [array()], 0]) + b"\x00\x00", "trailing_bytes", None, "the end of the batch", "2 bytes after it", 1),
    (pack([1.0, [array()], 0])[:-1], "truncated", None, "the whole of the value", "1 bytes are needed and 0 left", 1),
]


@pytest.mark.parametrize(("payload", "defect", "field", "expected", "observed", "events"), BATCHES)
def test_a_bad_batch_is_reported_and_its_events_are_kept(payload, defect, *, field, expected, observed, events):
    decoded = decode(payload, ARRAY)
    problem = decoded.problems[0]

    assert (
        problem.name,
        problem.field,
        problem.expected,
        problem.observed,
    ) == (WireDefect(defect), field, expected, observed)
    assert events == len(decoded.events)
    if events:
        assert [problem] == decoded.problems
        assert problem.is_kept


@pytest.mark.parametrize("name", [ARRAY, MAP])
def test_the_complete_events_of_a_truncated_batch_are_kept(name):
    payload = pack([1.5, [GOOD[name]] * 3, 0])
    for length in range(len(payload)):
        decoded = decode(payload[:length], name)
        (problem,) = decoded.problems
        assert problem.name == "truncated"
        whole = (length - 11) // len(pack(GOOD[name]))
        assert max(0, whole) == len(decoded.events), length
        assert (None if problem.is_kept or length < 11 else whole) == problem.event


def test_a_length_larger_than_the_payload_is_reported_as_truncated():
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        assert decode(b"\x93\x01\x91" + head, ARRAY).defects == ["truncated"]


def test_a_payload_above_most_bytes_is_not_decoded():
    payload = pack([1.5, [array()], 0])
    limit = len(payload)

    assert decode(payload, ARRAY, most_bytes=limit).problems == []
    decoded = decode(payload, ARRAY, most_bytes=limit - 1)
    assert decoded.events == []
    assert [*map(str, decoded.problems)] == [f"oversize: batch: expected at most {limit - 1}, got {limit} bytes"]


def test_a_payload_must_be_bytes():
    for wrong in ("text", None, 5, [1]):
        with pytest.raises(TypeError, match="payload is bytes"):
            decode(wrong, ARRAY)
    assert len(decode(memoryview(pack([1.5, [array()], 0])), ARRAY).events) == 1


@pytest.mark.parametrize("name", ["worker_id", "dp_rank", "first_event_id", "most_bytes"])
@pytest.mark.parametrize("value", ["x", -1, None, True, 1.5])
def test_an_invalid_number_is_refused(name, value):
    for dialect in ("vllm-0.33", "dynamo-router-event"):
        with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 0, got {value!r}$"):
            decode(b"", dialect, **{name: value})


def test_every_defect_has_an_explanation_and_a_test_case():
    rows = (
        {row[2] for row in (*BAD, *IN_BYTES)}
        | {row[1] for row in BATCHES}
        | {"oversize", "eagle_pairs", "bad_lookahead"}
    )

    assert [*WireDefect] == [*DEFECTS]
    assert {*WireDefect} == rows


def test_the_text_of_a_wire_problem_is_one_line():
    problem = decode(around(MAP, as_map(block_size=0)), MAP).problems[0]

    assert str(problem) == "bad_block_size: event 1, block_size: expected an integer of at least 1, got 0"


# ---------------------------------------------------------------------------------------------------- what is kept


def test_a_field_of_a_later_release_is_reported_and_kept():
    decoded = decode(pack([1.0, [as_map(colour="red", shade=[1, {"a": 2}])], 0]), MAP)

    fields = ", ".join(field.name for field in DIALECTS[MAP].stored)
    assert [*map(str, decoded.problems)] == [
        f"unknown_field: event 0, colour: expected {fields}, got 'red'",
        f"unknown_field: event 0, shade: expected {fields}, got [1, {{'a': 2}}]",
    ]
    assert decoded.extra == [{"colour": "red", "shade": [1, {"a": 2}]}]


def test_field_values_that_differ_from_the_ordinary_ones_are_in_extra():
    event = as_map(lora_id=3, lora_name="adapter", extra_keys=[["adapter"], None], group_idx=1, session_id="s")
    decoded = decode(pack([1.0, [event, as_map()], 0]), MAP)

    special = {
        "lora_id": 3,
        "lora_name": "adapter",
        "extra_keys": [("adapter",), None],
        "group_idx": 1,
        "session_id": "s",
    }
    assert [special, None] == decoded.extra
    assert decoded.extra[0] is decoded.events[0].extra


def test_a_missing_field_that_ordinary_engines_write_is_none_in_extra():
    (extra,) = decode(pack([1.0, [as_map(group_idx=REMOVED, medium=None)], 0]), MAP).extra

    assert extra == {"group_idx": None, "medium": None}


def test_blocks_of_an_adapter_have_local_hashes_with_the_adapter():
    (event,) = decode(pack([1.0, [as_map(lora_name="adapter")], 0]), MAP).events

    assert tuple(block_hashes(range(8), 4, lora_name="adapter")) == event.event.data.tokens_hashes


def test_an_unknown_field_can_have_any_value():
    event = {
        key: value
        for key, value in as_map(lora_name=5, cache_salt="s").items()
        if key not in ("extra_keys", "group_idx", "kv_cache_spec_kind")
    }
    decoded = decode(pack([1.0, [event], None]), "sglang-0.5.20")

    assert (decoded.defects, decoded.extra) == (["unknown_field"], [{"lora_name": 5, "cache_salt": "s"}])
    assert tuple(block_hashes(range(8), 4, cache_namespace="s")) == decoded.events[0].event.data.tokens_hashes


def test_chained_token_pairs_are_read_and_hashed_as_eagle_windows():
    pairs = [[i, i + 1] for i in range(8)]
    decoded = decode(around(SIGNED, array(3, pairs)[:7]), SIGNED)

    assert decoded.problems == []
    event = decoded.events[1]
    assert tuple(block_hashes(range(9), 4, eagle=True)) == event.event.data.tokens_hashes
    assert ([tuple(map(tuple, pairs[:4])), tuple(map(tuple, pairs[4:]))], None) == (event.token_ids, event.extra)


def test_token_pairs_in_a_vllm_dialect_are_reported():
    decoded = decode(pack([1.0, [as_map(token_ids=[[i, i + 1] for i in range(8)])], 0]), MAP)

    expected = WireProblem(WireDefect.EAGLE_PAIRS, 0, "token_ids", "8 pairs", "one token id each", is_kept=True)
    assert decoded.problems == [expected]
    assert tuple(block_hashes(range(9), 4, eagle=True)) == decoded.events[0].event.data.tokens_hashes


AHEAD = "vllm-0.33"


def test_blocks_with_look_ahead_tokens_have_hashes_of_windows():
    decoded = decode(pack([1.0, [as_map(lookahead_token_ids=[[4, 5], [8, 9]])], 0]), AHEAD)

    assert decoded.problems == []
    event = decoded.events[0]
    assert tuple(block_hashes(range(10), 4, lookahead=2)) == event.event.data.tokens_hashes
    assert (event.token_ids, event.extra) == ([(0, 1, 2, 3), (4, 5, 6, 7)], {"lookahead_token_ids": [[4, 5], [8, 9]]})


@pytest.mark.parametrize(
    ("lists", "observed"),
    [
        ([[4]], "1 list"),
        ([[4], [8], [9]], "3 lists"),
        ([[4], [8, 9]], "lists of 1 and 2 token ids"),
        ([[], []], "lists of 0 token ids"),
        ([[5], [8]], "[5] of 0"),
        ([[4], [-1]], "[-1] of 1"),
    ],
)
def test_invalid_look_ahead_tokens_are_reported_and_the_blocks_are_hashed_without_them(lists, observed):
    decoded = decode(pack([1.0, [as_map(lookahead_token_ids=lists)], 0]), AHEAD)

    (problem,) = decoded.problems
    found = (problem.name, problem.event, problem.field, problem.observed, problem.is_kept)
    assert ("bad_lookahead", 0, "lookahead_token_ids", observed, True) == found
    event = decoded.events[0]
    assert (tuple(block_hashes(range(8), 4)), None) == (event.event.data.tokens_hashes, event.extra)


def test_an_event_whose_token_pairs_do_not_form_a_chain_is_dropped():
    decoded = decode(around(SIGNED, array(3, [[1, 2]] * 8)[:7]), SIGNED)

    assert [(problem.name, problem.is_kept) for problem in decoded.problems] == [("eagle_pairs", False)]
    assert len(decoded.events) == 2


def test_an_event_without_a_medium_is_on_the_device():
    events = decode(
        pack([1.0, [as_map(medium=None), {"type": "BlockRemoved", "block_hashes": [1], "medium": None}], 0]), MAP
    )

    assert events.problems == []
    assert [event.storage_tier for event in events.events] == [StorageTier.DEVICE] * 2


def test_a_map_in_another_order_or_with_explicit_defaults_is_the_same_event():
    event = dict(reversed(as_map(locality=None, session_id=None).items()))
    decoded = decode(pack([1.0, [event], 0]), MAP)

    assert ([], decode(pack([1.0, [as_map()], 0]), MAP).events) == (decoded.problems, decoded.events)


def test_decoded_events_have_the_given_worker_rank_and_first_event_id():
    payload = pack([1.0, [array(), ["AllBlocksCleared"]], None])
    events = decode(payload, ARRAY, worker_id=4, dp_rank=2, first_event_id=10).events

    assert [(event.worker_id, event.event.event_id, event.event.dp_rank) for event in events] == [
        (4, 10, 2),
        (4, 11, 2),
    ]


def test_the_rank_of_a_batch_overrides_the_given_rank():
    (event,) = decode(pack([1.0, [array()], 5]), ARRAY, dp_rank=2).events

    assert event.event.dp_rank == 5


def test_a_payload_in_another_dialect_is_reported_event_by_event():
    """A reader of maps gets array events, and a reader of arrays gets maps: no event is read, and each is reported."""
    of_maps, of_arrays = encode(Batch([stored(), removed(event_id=1)]), MAP), encode(Batch([stored()]), ARRAY)

    assert (decode(of_maps, ARRAY).defects, decode(of_maps, ARRAY).events) == (["wrong_form"] * 2, [])
    assert (decode(of_arrays, MAP).defects, decode(of_arrays, MAP).events) == (["wrong_form"], [])


# ---------------------------------------------------------------------------------------------------- judged


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.in_matrix])
def test_a_stream_decoded_from_the_wire_equals_the_published_stream(name):
    dialect = DIALECTS[name]
    with RouterHarness(backend=dialect.backend) as engine:
        worker, prompt = engine.worker(0), engine.prompt(8)
        for more in (prompt, engine.prompt(6, after=prompt), engine.prompt(4)):
            worker.serve(more, output_tokens=20)
        worker.clear()
        worker.serve(prompt)
        published = [entry.event for entry in engine.events]
    with RouterHarness(index=RadixIndex()) as router:
        for start in range(0, len(published), 3):
            batch = Batch(published[start : start + 3])
            decoded = decode(encode(batch, dialect), dialect, first_event_id=start)
            assert decoded.problems == []
            assert batch.events == decoded.events
            assert [event.token_ids for event in batch.events] == [event.token_ids for event in decoded.events]
            router.apply(decoded.events)
        assert router.overlap(prompt)[0] == 8


KEYED = [
    (name, key)
    for name, dialect in DIALECTS.items()
    if dialect.in_matrix
    for key, field in (("lora_name", "lora_name"), ("cache_salt", "cache_salt"), ("multimodal", "extra_keys"))
    if field in [one.name for one in dialect.stored] and (dialect.backend != "sglang" or key != "multimodal")
]


@pytest.mark.parametrize(("name", "key"), KEYED)
def test_prompt_keys_are_carried_over_dialects_that_have_their_field(name, key):
    value = {"lora_name": "adapter", "cache_salt": "salt", "multimodal": [("image", 18, 20)]}[key]
    one_name = (key, DIALECTS[name].hashes) == ("lora_name", "signed")  # SGLang, with and without an adapter
    with RouterHarness(backend=DIALECTS[name].backend) as engine:
        engine.worker(0).serve(Prompt([*range(64)], **{key: value}))
        if not one_name:
            engine.worker(0).serve(Prompt([*range(64)]))
        published = [entry.event for entry in engine.events]
    with RouterHarness() as router:
        decoded = decode(encode(Batch(published), name), name)
        assert ([], published) == (decoded.problems, decoded.events)
        if key == "multimodal":  # tuples, as in the process
            sent, came = ([(e.extra or {}).get("extra_keys") for e in events] for events in (published, decoded.events))
            assert sent == came
        router.apply(decoded.events)
        assert router.overlap(Prompt([*range(64)], **{key: value}))[0] == 4
        assert ({} if one_name else {0: 4}) == router.overlap(Prompt([*range(64)]))
        assert router.overlap(Prompt([*range(64)], lora_name="another")) == {}


def test_a_map_of_many_keys_after_an_array_is_read_in_linear_time():
    many = {f"key {place}": place for place in range(60_000)}  # compared pair by pair, this would take minutes
    out = decode(around(SIGNED, [*array()[:7], many]), "sglang-0.5.18")
    assert (len(out.events), {*out.defects}) == (3, {"unknown_field"})
    assert many == out.extra[1]


def test_a_wrong_type_in_the_map_after_an_array_is_reported_and_the_event_dropped():
    events = ([*array()[:7], {"cache_salt": salt}] for salt in (5, "a", None))
    out = decode(around(SIGNED, *events), "sglang-0.5.18")
    assert [*map(str, out.problems)] == ["wrong_type: event 1, metadata: expected a string, or nil, got 5"]
    assert [event.event.event_id for event in out.events] == [0, 2, 3, 4]


def test_a_duplicate_key_in_the_map_after_an_array_is_reported():
    event = pack([*array()[:7]])
    twice = b"\x98" + event[1:] + b"\x82" + 2 * (pack("cache_salt") + pack("a"))
    out = decode(b"\x93" + pack(1.5) + b"\x91" + twice + b"\xc0", "sglang-0.5.18")
    assert [*map(str, out.problems)] == [
        "duplicate_key: event 0, metadata: expected each key once, got the key 'cache_salt' again"
    ]


# ---------------------------------------------------------------------------------------------------- Dynamo's JSON

LINE = stored().to_json()
BAD_LINES = [
    ("{", "malformed", None),
    ("[" * 100_000, "nested_too_deeply", None),
    ('{"worker_id": 1, "worker_id": 2}', "duplicate_key", None),
    (LINE.replace('"worker_id":0,', ""), "missing_field", None),
    (LINE.replace('"stored"', '"stord"'), "unknown_tag", "event.data"),
    (LINE.replace('"device"', '"cellar"'), "unknown_medium", "storage_tier"),
    (
        LINE.replace('"block_hash":11', '"block_hash":-11'),
        "hash_out_of_range",
        "event.data.stored.blocks[0].block_hash",
    ),
    (LINE.replace('"block_hash":11', '"block_hash":"x"'), "wrong_type", "event.data.stored.blocks[0].block_hash"),
    (LINE.replace('"dp_rank":0', '"dp_rank":null'), "bad_rank", "event.dp_rank"),
    ("\udcff", "bad_text", None),
]


@pytest.mark.parametrize(("line", "defect", "field"), BAD_LINES)
def test_a_bad_line_of_json_is_reported_and_the_good_lines_are_kept(line, defect, field):
    payload = f"{LINE}\n{line}\n{LINE}\n".encode(errors="surrogateescape")
    decoded = decode(payload, "dynamo-router-event")

    assert [(defect, 1, field)] == [(problem.name, problem.event, problem.field) for problem in decoded.problems]
    assert [stored(), stored()] == decoded.events
    assert decoded.num_events == 3


def test_an_incomplete_last_line_is_reported_as_truncated():
    assert decode((LINE + "\n" + LINE[:30]).encode(), "dynamo-router-event").defects == ["truncated"]


# ---------------------------------------------------------------------------------------------------- any bytes


@given(payload=st.binary(max_size=300), name=st.sampled_from(NAMES))
def test_any_bytes_are_read_without_an_exception(payload, name):
    check(payload, name)


@st.composite
def damaged(draw):
    name = draw(st.sampled_from(NAMES))
    data = bytearray(draw(st.sampled_from(payloads(name))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.sampled_from([0, 1, 1, 2, 9]))] = draw(st.binary(max_size=9))
    return bytes(data), name


@given(damaged())
def test_a_damaged_payload_is_read_without_an_exception(payload_and_name):
    check(*payload_and_name)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=33),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(data=st.data(), name=st.sampled_from(MSGPACK))
def test_a_payload_with_replaced_values_is_read_without_an_exception(data, name):
    tree = msgspec.msgpack.decode(data.draw(st.sampled_from(payloads(name)[:3])))
    for _ in range(data.draw(st.integers(1, 3))):
        node = tree
        while True:
            key = data.draw(st.sampled_from([*node] if isinstance(node, dict) else [*range(len(node))]))
            if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
                node = node[key]
            else:
                break
        node[key] = data.draw(VALUES)
    check(pack(tree), name)


@pytest.mark.parametrize("name", MSGPACK)
def test_the_careful_reader_gives_the_same_events_as_msgspec(name):
    for batch, payload in zip(examples(name), payloads(name), strict=True):
        decoded = decode(payload, name)
        assert decoded.problems == []
        assert same(decoded, careful(payload, name))
        assert [event.event.data for event in batch.events] == [event.event.data for event in decoded.events]
        assert isinstance(decoded.events[0] if decoded.events else stored(), RouterEvent)
        # Digests are not fields of a dialect, nor are the sizes of TensorRT-LLM's levels if it sends only whole
        # blocks.
        lacks_some = DIALECTS[name].hashes == "bytes" or DIALECTS[name].whole_blocks
        assert [event.extra for event in batch.events] == decoded.extra or lacks_some


def test_a_cleared_with_extra_elements_is_reported_and_kept():
    decoded = decode(pack([1.0, [["AllBlocksCleared", 7]], 0]), ARRAY)

    assert (["unknown_field"], [cleared().event.data]) == (
        decoded.defects,
        [event.event.data for event in decoded.events],
    )


def test_an_event_without_blocks_is_read_and_written_back_unchanged():
    """Also in a dialect of digests: a Stored by its last 64 bits, a Removed without any."""
    empty = as_map(block_hashes=[], parent_block_hash=b"p" * 24 + bytes(7) + b"\x05", token_ids=[], extra_keys=[])
    events = [
        empty,
        {**empty, "parent_block_hash": None},
        {"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"},
    ]
    out = decode(pack([1.5, events, 0]), BYTES)

    assert out.problems == []
    assert [event.event.data.parent_hash for event in out.events[:2]] == [5, None]
    assert events == msgspec.msgpack.decode(encode(Batch(out.events, out.timestamp), BYTES))[1]
