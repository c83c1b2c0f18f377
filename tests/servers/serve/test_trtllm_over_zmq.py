"""TensorRT-LLM's V2 over ZMQ: only full blocks of the longest window, by their sha256, without levels."""

import json
from urllib.request import Request, urlopen

import pytest

from pytest_kvmock import EngineProfile, Prompt, RadixIndex, Removed, RouterHarness, Stored, create_manager
from pytest_kvmock.__main__ import main
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer, check_file
from pytest_kvmock.wire import DIALECTS, EncodeError, KvWire
from pytest_kvmock.wire.sockets import KvSubscriber

DIALECT = DIALECTS["trtllm-1.3-zmq"]
PROMPT = [*range(1, 11)]
FIRST = -2003500929019345749  # of [1, 2, 3, 4]


def worker_over(backend, wire, **sizes):
    """Return a worker whose events go to the wire."""
    kv = RouterHarness(EngineProfile(**{"block_size": 4, "num_blocks": 8, "workers": 1, **sizes}), backend=backend)
    kv.add_sink(wire, worker_id=0)
    return kv.worker(0)


def written(wire):
    return [event for payload in wire.take() for event in wire.decode(payload).events]


def test_partial_blocks_and_created_are_not_written_to_the_wire():
    wire = KvWire(DIALECT)
    worker_over(speaker_of(DIALECT), wire).serve(PROMPT)
    (stored,) = written(wire)
    assert (
        stored.data.parent_hash,
        stored.data.block_hashes[0],
        [*map(tuple, stored.token_ids)],
    ) == (None, FIRST, [(1, 2, 3, 4), (5, 6, 7, 8)])


def test_a_single_partial_block_and_its_removal_make_no_batch():
    wire = KvWire(DIALECT)
    worker = worker_over(speaker_of(DIALECT), wire)
    worker.serve(PROMPT[:2])
    assert wire.batches == []
    worker.serve(PROMPT[:4])  # the full block replaces it
    assert [Stored] == [type(event.data) for event in written(wire)]


def test_offloaded_blocks_stay_on_the_device_on_the_wire_until_they_are_lost():
    """Two prompts of four full blocks and one token, with six pages on the device and four on the host."""
    wire = KvWire(DIALECT)
    backend = speaker_of(DIALECT).variant("with_host", levels=(4,))
    worker = worker_over(backend, wire, num_blocks=6)
    for first in (1, 100, 200):
        worker.serve(range(first, first + 17))
    events = written(wire)
    assert {event.storage_tier.name for event in events} == {"DEVICE"}
    stored = [name for event in events if isinstance(event.data, Stored) for name in event.data.block_hashes]
    removed = [name for event in events if isinstance(event.data, Removed) for name in event.data.block_hashes]
    assert len(stored) == 12
    assert set(removed) < set(stored)


def test_only_the_layer_group_with_the_longest_window_is_written():
    wire = KvWire(DIALECT)
    backend = speaker_of(DIALECT).variant("two_groups", groups=((None, 0), (8, 0)))
    worker_over(backend, wire, num_blocks=32).serve(range(1, 18))
    assert [len(event.data.block_hashes) for event in written(wire)] == [4]


def test_fields_on_the_wire_are_those_that_readers_expect():
    msgspec = pytest.importorskip("msgspec")
    wire = KvWire(DIALECT)
    worker_over(speaker_of(DIALECT), wire).serve(PROMPT[:4])
    (payload,) = wire.take()
    _, (event,), rank = msgspec.msgpack.decode(payload)
    assert event == {
        "type": "BlockStored",
        "block_hashes": [FIRST],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert rank == 0


def test_v1_block_keys_are_refused_in_one_line():
    wire = KvWire(DIALECT)
    manager = create_manager("trtllm_v2", num_blocks=8, block_size=4, sink=wire)
    request = manager.new_request(PROMPT)
    manager.prepare_context(request)
    manager.resize_context(request, 10)
    manager.update_context(request, 10)
    with pytest.raises(EncodeError, match="give the engine hash_algo='v2_sha256_64'"):
        manager.flush()


def test_events_are_sent_and_the_poll_route_is_empty():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64, workers=1), backend=speaker_of(DIALECT))
    index = RadixIndex()
    with KvServer(kv, DIALECT) as server:
        publisher = server.publisher()
        with KvSubscriber(publisher.endpoints, index.apply, dialect=DIALECT) as subscriber:
            publisher.wait_subscribed()
            body = json.dumps({"model": "mock-model", "prompt": PROMPT, "max_tokens": 2}).encode()
            urlopen(Request(f"{server.url()}/v1/completions", body, {"content-type": "application/json"})).close()
            subscriber.receive(1)
            with urlopen(Request(f"{server.url()}/kv_cache_events", b"{}")) as answer:
                assert json.loads(answer.read()) == []
    assert [*index.find_matches(Prompt(PROMPT).block_hashes(4)).scores.values()] == [2]


@pytest.mark.parametrize("levels", [(), (4,)])
def test_a_stream_with_evictions_and_offloads_is_clean_in_a_check(tmp_path, levels):
    """A Removed of a block that still has children would break a rule."""
    wire = KvWire(DIALECT)
    backend = speaker_of(DIALECT).variant("mine", levels=levels)
    worker = worker_over(backend, wire, num_blocks=12)
    for turn in range(40):
        worker.serve([*range(turn % 5, 9 + turn % 7), *range(100 * turn, 100 * turn + turn % 9)], 3)
    payloads = wire.take()
    path = tmp_path / "stream.msgpack"
    path.write_bytes(b"".join(payloads))
    result = check_file(path, dialect=DIALECT.name)
    assert result.problems == []
    assert sum(len(wire.decode(payload).events) for payload in payloads) == len(result.log) > 40


@pytest.mark.parametrize("dialect", ["vllm-0.33", "trtllm-1.2"])
def test_events_zmq_is_accepted_only_for_trtllm_1_3(dialect, capsys):
    assert main(["serve", "--dialect", dialect, "--events", "zmq"]) == 2
    assert f"--events is for --dialect trtllm-1.3, got {dialect!r}" in capsys.readouterr().err
