"""Workers with vLLM's native offload: every event is right, in each form and with each key of a prompt."""

import pytest
from offload_traffic import HOST, PROMPTS, harness, overlaps, traffic

from pytest_kvmock import Prompt, Stored
from pytest_kvmock.engines.vllm.host.chunk_events import ChunkEvents
from pytest_kvmock.values import Located

FORMS = [
    {},
    {"chunk": 2},
    {"self_describing": True},
    {"self_describing": True, "chunk": 3, "host": 18},
    {"policy": "arc", "prompt_only": False},
]


def host_events(kv, kind):
    return [each for each in kv.events if each.storage_tier is HOST and type(each.event.data) is kind]


@pytest.mark.parametrize("tiers", FORMS, ids=str)
def test_events_of_the_host_describe_exactly_what_it_holds(tiers):
    kv = harness(tiers)
    worker = kv.worker(0)
    traffic(worker)
    worker.tick(worker.now + 100)
    kv.assert_in_sync()
    assert list(kv.events.errors) == []
    assert host_events(kv, Stored if tiers.get("self_describing") else Located)
    assert worker.clear()
    kv.assert_in_sync()
    assert worker.manager.resident(HOST)


@pytest.mark.parametrize("tiers", FORMS, ids=str)
def test_the_reference_returns_what_the_engine_would_reuse(tiers):
    kv = harness(tiers)
    worker = kv.worker(0)
    for _ in range(3):
        traffic(worker)
        worker.tick(worker.now + 100)
        for found, expected in overlaps(kv, worker):
            assert found == expected
        worker.clear()


@pytest.mark.parametrize(
    "keys", [{"cache_salt": "x"}, {"lora_name": "a"}, {"session_id": "s"}, {"multimodal": [("ab", 2, 6)]}], ids=str
)
@pytest.mark.parametrize("described", [False, True])
def test_prompts_may_have_keys_that_host_events_do_not_publish(keys, described):
    kv = harness({"self_describing": described})
    traffic(kv.worker(0), keys=keys)
    kv.assert_in_sync()
    assert list(kv.events.errors) == []
    assert all("cache_salt" not in (each.extra or {}) for each in kv.events if each.storage_tier is HOST)


def test_without_prefix_caching_the_host_stores_nothing():
    kv = harness({}, prefix_caching=False)
    traffic(kv.worker(0))
    assert kv.worker(0).manager.resident(HOST) == []


def test_native_offload_and_another_host_can_run_in_one_harness():
    kv = harness({}, workers=0)
    native, moved = kv.worker(0), kv.worker(1, backend="lineage")
    prompt = PROMPTS[0]
    for worker in (native, moved):
        worker.serve(prompt)
        worker.tick(worker.now + 100)
        worker.serve(PROMPTS[3])
        worker.tick(worker.now + 100)
    assert {str(tier) for tier in kv.overlap(prompt, tier=None)} == {"device", "host_pinned"}
    assert native.clear()
    assert moved.clear()
    assert kv.overlap(prompt, tier=None) == {HOST: {0: 8}}
    assert (native.cached_tokens(prompt, HOST), moved.cached_tokens(prompt, HOST)) == (32, 0)
    kv.assert_in_sync()


def test_a_wrong_host_event_of_a_salted_block_is_found(monkeypatch):
    noted = ChunkEvents.note

    def with_another_parent(self, tokens, end, key, *, again=True):
        noted(self, tokens, end, key, again=again)
        event = self._noted[key]
        if event.data.parent_hash is not None:
            self._noted[key] = event._replace(data=Stored(7, event.data.block_hashes, event.data.tokens_hashes))

    monkeypatch.setattr(ChunkEvents, "note", with_another_parent)
    kv = harness({"self_describing": True})
    kv.worker(0).serve(Prompt(PROMPTS[1], cache_salt="x"))
    kv.worker(0).tick(50.0)
    assert {problem.rule for problem in kv.events.errors} == {"wrong_hash"}
    assert {problem.storage_tier for problem in kv.events.errors} == {HOST}
    assert len(kv.events.errors) == 4
    kv.events.take()
