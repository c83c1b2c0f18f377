"""A harness whose workers have vLLM's native offload: every event is right, whatever form it has, and whatever a prompt carries."""

from random import Random

import pytest

from pytest_kvmock import EngineProfile, Prompt, RouterHarness
from pytest_kvmock.events import Located, StorageTier, Stored
from pytest_kvmock.tiers.chunk_events import ChunkEvents

HOST = StorageTier.HOST_PINNED
FORMS = [
    {},
    {"chunk": 2},
    {"self_describing": True},
    {"self_describing": True, "chunk": 3, "host": 18},
    {"policy": "arc", "prompt_only": False},
]


def harness(tiers, **fields):
    tiers = {"host": 16, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}
    return RouterHarness(EngineProfile(block_size=4, num_blocks=12, tiers=tiers, **fields), "vllm")


def host_events(kv, kind):
    return [each for each in kv.events if each.storage_tier is HOST and type(each.event.data) is kind]


def traffic(worker, prompts, keys=None):
    rng = Random(5)
    for _ in range(25):
        worker.serve(Prompt(prompts[rng.randrange(len(prompts))], **(keys or {})), rng.randrange(4))
        if rng.random() < 0.7:
            worker.tick(worker.now + rng.randrange(12))


PROMPTS = [[*range(start, start + length)] for start, length in ((0, 33), (0, 20), (100, 16), (200, 30), (300, 9))]


@pytest.mark.parametrize("tiers", FORMS, ids=str)
def test_what_events_say_is_what_the_host_holds(tiers):
    kv = harness(tiers)
    worker = kv.worker(0)
    traffic(worker, PROMPTS)
    worker.tick(worker.now + 100)
    kv.assert_in_sync()
    assert [] == list(kv.events.errors)
    assert host_events(kv, Stored if tiers.get("self_describing") else Located)
    assert worker.clear()
    kv.assert_in_sync()
    assert worker.manager.resident(HOST)


@pytest.mark.parametrize("tiers", FORMS, ids=str)
def test_the_reference_answers_as_the_engine_would(tiers):
    kv = harness(tiers)
    worker = kv.worker(0)
    for _ in range(3):
        traffic(worker, PROMPTS)
        worker.tick(worker.now + 100)
        for prompt in PROMPTS:
            if not len(prompt) % 4:
                continue  # of whole blocks the last one is computed, or loaded, again
            found = {tier: scores[0] * 4 for tier, scores in kv.overlap(prompt, tier=None).items()}
            device, host = worker.cached_tokens(prompt), worker.cached_tokens(prompt, HOST)
            assert {tier: tokens for tier, tokens in (("device", device), (HOST, host)) if tokens} == found
        worker.clear()


@pytest.mark.parametrize(
    "keys", [{"cache_salt": "x"}, {"lora_name": "a"}, {"session_id": "s"}, {"multimodal": [("ab", 2, 6)]}], ids=str
)
@pytest.mark.parametrize("described", [False, True])
def test_prompts_may_carry_what_the_host_does_not_publish(keys, described):
    kv = harness({"self_describing": described})
    traffic(kv.worker(0), PROMPTS, keys)
    kv.assert_in_sync()
    assert [] == list(kv.events.errors)
    assert all("cache_salt" not in (each.extra or {}) for each in kv.events if each.storage_tier is HOST)


def test_without_prefix_caching_nothing_is_stored():
    kv = harness({}, prefix_caching=False)
    traffic(kv.worker(0), PROMPTS)
    assert [] == kv.worker(0).manager.resident(HOST)


def test_engines_of_both_kinds_stand_beside_each_other():
    kv = harness({}, workers=0)
    native, moved = kv.worker(0), kv.worker(1, backend="lineage")
    prompt = PROMPTS[0]
    for worker in (native, moved):
        worker.serve(prompt)
        worker.tick(worker.now + 100)
        worker.serve(PROMPTS[3])
        worker.tick(worker.now + 100)
    assert {"device", "host_pinned"} == {str(tier) for tier in kv.overlap(prompt, tier=None)}
    assert native.clear()
    assert moved.clear()
    assert {HOST: {0: 8}} == kv.overlap(prompt, tier=None)
    assert (32, 0) == (native.cached_tokens(prompt, HOST), moved.cached_tokens(prompt, HOST))
    kv.assert_in_sync()


def test_a_wrong_event_of_a_salted_block_on_the_host_is_found(monkeypatch):
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
    assert {"wrong_hash"} == {problem.rule for problem in kv.events.errors}
    assert {HOST} == {problem.storage_tier for problem in kv.events.errors}
    assert 4 == len(kv.events.errors)
    kv.events.take()
