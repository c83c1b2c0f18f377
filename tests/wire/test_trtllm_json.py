"""TensorRT-LLM's JSON form: round trips of the recordings, omitted fields, and values without a form."""

import json

import pytest
from players import player

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.values import Located, Updated
from pytest_kvmock.wire import Batch, EncodeError, decode, encode
from pytest_kvmock.wire.codec.defects import WireDefect

PLAYER = player("engines/trtllm/play_trtllm.py")

TOKENS = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in (1, 2, 3, 4)]
BLOCK = {"type": "stored_block", "block_hash": 924206229973855, "tokens": TOKENS, "cache_level": 0, "priority": 35}
STORED = {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [BLOCK]}, "window_size": 64}
UPDATED = {
    "event_id": 2,
    "data": {
        "type": "updated",
        "block_hash": 2**64 - 1,
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        "priority": None,
    },
    "window_size": 64,
    "attention_dp_rank": 3,
}


def read(*rows):
    return decode(json.dumps(rows).encode(), "trtllm-1.2")


def changed(row, path, value):
    """A copy of a row with one value changed; Ellipsis deletes the value."""
    row = json.loads(json.dumps(row))
    at = row
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return row


def plain(event):
    """Return an event without the fields that no wire has."""
    extra = {name: value for name, value in event.extra.items() if name not in ("silently_gone", "tokens_per_block")}
    token_ids = None if event.token_ids is None else [tuple(tokens) for tokens in event.token_ids]
    return event, token_ids, extra


@pytest.mark.parametrize("kind", ["programs", "v1"])
def test_recorded_events_are_written_and_read_back(recording, kind):
    for program in recording("trtllm_v1.json.gz")[kind]:
        playing = PLAYER.Player(program["config"])
        for call, *arguments, _ in program["log"]:
            playing.play(call, *arguments)
        events = playing.sink.router_events
        decoded = decode(encode(Batch(events), "trtllm-1.2"), "trtllm-1.2")
        assert ([], len(events)) == (decoded.problems, decoded.num_events)
        assert list(map(plain, events)) == list(map(plain, decoded.events))


def test_an_event_is_read_with_its_id_rank_and_window():
    stored, updated = read(STORED, UPDATED).events
    assert (
        stored.event_id,
        stored.dp_rank,
        stored.extra["window_size"],
        stored.token_ids,
    ) == (1, 0, 64, [(1, 2, 3, 4)])
    assert Updated(2**64 - 1, (0, 1), None) == updated.data
    assert (updated.event_id, updated.dp_rank) == (2, 3)


def test_windows_are_numbered_as_groups_by_length():
    rows = [changed(STORED, ["window_size"], window) for window in (64, 16, 32)]
    groups = [(event.extra.get("group_idx", 0), event.extra.get("kv_cache_spec_kind")) for event in read(*rows).events]
    assert groups == [(2, None), (0, "sliding_window"), (1, "sliding_window")]


def test_fields_added_by_later_serializers_are_read():
    row = changed(STORED, ["data", "blocks", 0], {**BLOCK, "mm_keys": [], "cache_salt": "tenant"})
    assert read({**row, "hash_algo": "v1_block_key", "layer_group_id": 0}).events[0].extra["cache_salt"] == "tenant"


@pytest.mark.parametrize(
    ("path", "value", "defect"),
    [
        (["event_id"], -1, WireDefect.WRONG_TYPE),
        (["window_size"], ..., WireDefect.MISSING_FIELD),
        (["data"], [], WireDefect.WRONG_FORM),
        (["data", "type"], "cleared", WireDefect.UNKNOWN_TAG),
        (["data", "blocks"], {}, WireDefect.WRONG_TYPE),
        (["data", "parent_hash"], 2**64, WireDefect.HASH_OUT_OF_RANGE),
        (["data", "blocks", 0, "block_hash"], 9.24206229973855e14, WireDefect.HASH_OUT_OF_RANGE),
        (["data", "blocks", 0, "block_hash"], -5, WireDefect.HASH_OUT_OF_RANGE),
        (["data", "blocks", 0, "tokens"], [], WireDefect.WRONG_TYPE),
        (["data", "blocks", 0, "tokens", 0, "token_id"], 2**32, WireDefect.TOKEN_OUT_OF_RANGE),
        (["data", "blocks", 0, "cache_level"], None, WireDefect.WRONG_TYPE),
    ],
)
def test_an_invalid_event_is_dropped_and_the_others_are_kept(path, value, defect):
    decoded = read(changed(STORED, path, value), UPDATED)
    assert [(defect, 0)] == [(problem.name, problem.event) for problem in decoded.problems]
    assert [event.event_id for event in decoded.events] == [2]


@pytest.mark.parametrize(
    ("payload", "defect"),
    [
        (b'[{"event_id": 1', WireDefect.TRUNCATED),
        (b"[nothing]", WireDefect.MALFORMED),
        (b'["\xff"]', WireDefect.BAD_TEXT),
        (b'{"event_id": 1}', WireDefect.NOT_A_BATCH),
        (b"[" * 100_000 + b"]", WireDefect.NESTED_TOO_DEEPLY),
    ],
)
def test_a_value_that_is_not_a_list_of_events_is_reported(payload, defect):
    decoded = decode(payload, "trtllm-1.2")
    assert ([defect], []) == ([problem.name for problem in decoded.problems], decoded.events)


@pytest.mark.parametrize(
    ("data", "tier", "why"),
    [
        (Cleared(), StorageTier.DEVICE, "TensorRT-LLM has no event that says that all is gone"),
        (Located((1,)), StorageTier.DEVICE, "TensorRT-LLM has no Located"),
        (Removed((1,)), StorageTier.HOST_PINNED, "TensorRT-LLM names a tier by the level of a block alone"),
        (Stored(None, (1,), (1,)), StorageTier.DEVICE, "a block of TensorRT-LLM's Stored has its tokens"),
    ],
)
def test_events_without_a_trtllm_form_are_refused(data, tier, why):
    with pytest.raises(EncodeError, match=f"^event 0 of the batch: {why}"):
        encode(Batch([RouterEvent(0, KvCacheEvent(0, data), tier)]), "trtllm-1.2")


@pytest.mark.parametrize("dialect", ["vllm-0.33", "sglang-0.5.22", "dynamo-router-event"])
def test_other_dialects_refuse_an_updated(dialect):
    with pytest.raises(EncodeError, match="has no Updated"):
        encode(Batch([RouterEvent(0, KvCacheEvent(0, Updated(1, (0, 1))))]), dialect)
