"""TensorRT-LLM's JSON of V2: written events are read back, and invalid digests are found."""

import json

import pytest

from pytest_kvmock import CapturingSink, Prompt
from pytest_kvmock.engines.trtllm.v2_manager import V2Manager
from pytest_kvmock.wire import read_events
from pytest_kvmock.wire.codec.defects import WireDefect
from pytest_kvmock.wire.codec.trtllm_json import event_row, write_events

ALGOS = ("v1_block_key", "v2_sha256", "v2_sha256_64")


def events_of(algo):
    """Return events of every kind in two layer groups."""
    sink = CapturingSink()
    manager = V2Manager(
        num_blocks=[6, 6],
        block_size=4,
        levels=([4, 4],),
        groups=[(None, 0), (8, 0)],
        pool_groups=[0, 1],
        max_seq_len=64,
        hash_algo=algo,
        sink=sink,
    )
    for first in (1, 100, 200):
        request = manager.new_request(range(first, first + 17))
        manager.prepare_context(request)
        for upto in (8, 17):
            assert manager.resize_context(request, upto)
            manager.update_context(request, upto)
        manager.close(request)
        manager.flush()
    return sink.router_events


@pytest.mark.parametrize("algo", ALGOS)
def test_v2_events_are_written_and_read_back(algo):
    events, problems = events_of(algo), []
    assert {type(event.event.data).__name__ for event in events} == {"Cleared", "Stored", "Removed", "Updated"}
    found, count = read_events(write_events(events), 0, problems)
    assert problems == []
    assert len(events) == count
    for event, read in zip(events, found, strict=True):
        assert event.event == read.event
        assert {name: value for name, value in event.extra.items() if name != "tokens_per_block"} == read.extra
        assert event_row(event) == event_row(read)


def test_multimodal_keys_and_salt_of_a_stored_block_are_optional_for_a_reader():
    sink = CapturingSink()
    manager = V2Manager(num_blocks=4, block_size=4, sink=sink)
    for prompt in (Prompt(range(4)), Prompt(range(4), cache_salt="tenant")):
        request = manager.new_request(prompt)
        manager.prepare_context(request)
        assert manager.resize_context(request, 4)
        manager.update_context(request, 4)
        manager.flush()
    rows = json.loads(write_events(sink.router_events[-2:]))
    blocks = [row["data"]["blocks"][0] for row in rows]
    assert [[*block.items()][-2:] for block in blocks] == [
        [("mm_keys", []), ("cache_salt", None)],
        [("mm_keys", []), ("cache_salt", "tenant")],
    ]
    assert [*blocks[0]][:-2] == ["type", "block_hash", "tokens", "cache_level", "priority"]
    for block in blocks:
        del block["mm_keys"], block["cache_salt"]
    problems = []
    assert len(read_events(json.dumps(rows).encode(), 0, problems)[0]) == 2
    assert problems == []


@pytest.mark.parametrize("kind", ["stored", "removed", "updated"])
@pytest.mark.parametrize("wrong", [5, "e4", "z" * 64, None])
def test_a_hash_that_is_not_a_digest_is_reported(kind, wrong):
    rows = json.loads(write_events(events_of("v2_sha256")))
    data = next(row["data"] for row in rows if row["data"]["type"] == kind)
    (data if kind == "updated" else data["blocks"][0] if kind == "stored" else data)[
        "block_hash" if kind != "removed" else "block_hashes"
    ] = [wrong] if kind == "removed" else wrong
    problems = []
    found, count = read_events(json.dumps(rows).encode(), 0, problems)
    assert count - 1 == len(found)
    assert [problem.name for problem in problems] == [WireDefect.HASH_OUT_OF_RANGE]
    assert problems[0].expected == "64 hexadecimal digits, as its hash_algo is v2_sha256"


@pytest.mark.parametrize(
    ("field", "wrong", "expected"),
    [
        ("hash_algo", "sha", "v1_block_key or v2_sha256 or v2_sha256_64"),
        ("hash_algo", ["v2_sha256"], "v1_block_key or v2_sha256 or v2_sha256_64"),
        ("layer_group_id", -1, "an integer from 0 to 4294967295"),
    ],
)
def test_an_invalid_v2_field_is_reported(field, wrong, expected):
    rows = json.loads(write_events(events_of("v1_block_key")[:1]))
    rows[0][field] = wrong
    problems = []
    assert read_events(json.dumps(rows).encode(), 0, problems) == ([], 1)
    assert [(problem.field, problem.expected) for problem in problems] == [(field, expected)]
