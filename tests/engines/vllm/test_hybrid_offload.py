"""Workers and engines of hybrid models over vLLM's native offload: recorded and random traffic."""

from functools import partial
from random import Random

import pytest

from pytest_kvmock import EngineProfile, RouterHarness, StorageTier, Stored, create_manager
from pytest_kvmock.engines import CacheGroup, KvWorker, WouldWait, backend_spec
from pytest_kvmock.testing.drafts import play, random_traffic
from pytest_kvmock.values import Located
from pytest_kvmock.values.prompt_keys import group_of

HOST = StorageTier.HOST_PINNED
GROUPS = (CacheGroup("full_attention", 4), CacheGroup("sliding_window", 4, window=8))


def worker_of(num_blocks, **tiers):
    """Return a worker whose blocks take a millisecond each on either link, and the list of its events."""
    tiers = {"host": 24, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}
    make = partial(create_manager, "vllm", num_blocks=num_blocks, groups=GROUPS, tiers=tiers)
    events = []
    return KvWorker(
        lambda sink: make(sink=sink), sink=events.append, rng=Random(1), driver=backend_spec("vllm").driver
    ), events


def short(event):
    kind = {"Stored": "BlockStored", "SparseStored": "BlockStored", "Located": "BlockStored", "Removed": "BlockRemoved"}
    medium = "CPU" if event.storage_tier is HOST else "GPU"
    data = event.event.data
    return kind[type(data).__name__], medium, group_of(event.extra), list(data.block_hashes)


def in_order(events):
    """Return the device's events in their order, then the host's, sorted because they have the order of a set."""
    events = list(events)
    return [each for each in events if each[1] == "GPU"] + sorted(each for each in events if each[1] == "CPU")


@pytest.mark.parametrize("name", ["hybrid", "hybrid_self_describing"])
def test_a_worker_publishes_the_recorded_events(recording, name):
    value = recording("vllm_0.33.0_offload.json.gz")
    (program,) = (each for each in value["programs"] if each.get("name") == name)
    worker, events = worker_of(
        program["config"]["gpu_blocks"], self_describing=bool(program["config"]["extra"]), host=24
    )
    recorded = []
    for kind, *entry in program["log"]:
        if kind == "add":
            assert in_order(recorded) == in_order(map(short, events))
            recorded.clear()
            events.clear()
            worker.serve(entry[1])
            worker.tick(worker.now + 100.0)
        else:
            recorded += (
                (*map(each.get, ("type", "medium", "group_idx")), each["block_hashes"])
                for each in entry[0].get("events", ())
            )
    assert in_order(recorded) == in_order(map(short, events))
    assert program["final"]["cpu"] == sorted(name for name, _ in worker.manager.offload.resident())


def test_self_describing_host_events_are_stored_for_attention_and_locations_for_windows():
    worker, events = worker_of(20, self_describing=True)
    worker.serve(list(range(40)))
    worker.tick(100.0)
    kinds = {(group_of(each.extra), type(each.event.data)) for each in events if each.storage_tier is HOST}
    assert {(0, Stored), (1, Located)} == kinds
    assert len(worker.manager.resident(HOST)) == 10  # of the attention group


def test_a_prefix_without_its_window_is_not_loaded_back_from_the_host():
    """A hit needs the window before its end: here the host has it only at the end of the prompt."""
    worker, _ = worker_of(20)
    prompt = list(range(40))
    worker.serve(prompt)
    worker.tick(100.0)
    worker.serve(list(range(100, 136)))
    worker.tick(200.0)
    assert (worker.cached_tokens(prompt), worker.cached_tokens(prompt, HOST)) == (0, 36)
    assert worker.cached_tokens([*prompt[:20], 7, 8, 9, 10], HOST) == 0
    with worker.prefill(prompt) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (36, 36)


def test_blocks_loaded_for_a_request_that_does_not_wait_are_hit_by_the_next_one():
    worker, _ = worker_of(20)
    prompt = list(range(40))
    worker.serve(prompt)
    worker.tick(100.0)
    worker.serve(list(range(100, 136)))
    worker.tick(200.0)
    with pytest.raises(WouldWait) as error:
        worker.prefill(prompt, wait=False)
    worker.tick(error.value.deadline)
    with worker.prefill(prompt, wait=False) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (36, 36)
    assert worker.manager.num_free_blocks == 20


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_gemma3"])
def test_random_traffic_over_a_host_breaks_no_rule(backend):
    tiers = {"host": 256, "gbps": 1.0, "bytes_per_token": 62_500, "self_describing": backend == "vllm_gemma3"}
    with RouterHarness(EngineProfile(16, 96, 2, tiers=tiers), backend, sync="every") as kv:
        play(kv, random_traffic(4, 40, workers=2, most_blocks=10, most_ms=12))
        assert any(each.storage_tier is HOST for each in kv.events)
        kv.assert_in_sync()


def test_an_engine_loads_a_prefix_back_from_the_host():
    tiers = {"host": 96, "gbps": 1.0, "bytes_per_token": 62_500}
    with RouterHarness(EngineProfile(16, 40, tiers=tiers), "vllm_gpt_oss") as kv:
        engine, prompts = kv.engine(0), [kv.prompt(blocks=12), kv.prompt(blocks=18)]
        for prompt in (*prompts, prompts[0]):
            request = engine.submit(prompt, 2)
            engine.run()
            engine.run(until_ms=engine.now_ms + 100.0)
        assert request.onboarded_tokens > 0
        assert engine.worker.manager.num_free_blocks == 40
        kv.assert_in_sync()
