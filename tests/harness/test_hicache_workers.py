"""Workers and engines over `sglang` with a host: what SGLang's HiCache publishes, in virtual time."""

import contextlib
from random import Random

import pytest
from depth import examples
from hypothesis import given, settings

from pytest_kvmock import BACKENDS, EngineProfile, OutOfBlocks, Prompt, RouterHarness, StorageTier, create_manager
from pytest_kvmock.engines import SglangSpeculative, WouldWait
from pytest_kvmock.testing import play, traffic

DEVICE, HOST, *_ = StorageTier
SIZE = 4


def harness(num_blocks=20, workers=1, **tiers):
    tiers = {"host": 40, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}  # a block takes a millisecond
    return RouterHarness(
        EngineProfile(block_size=SIZE, num_blocks=num_blocks, workers=workers, tiers=tiers), backend="sglang"
    )


def tiers_of(kv, prompt):
    return {tier: blocks[0] for tier, blocks in kv.overlap(prompt, tier=None).items()}


def test_a_copy_is_published_when_it_ends_and_a_load_when_it_begins():
    kv = harness()
    worker, prompt = kv.worker(0), list(range(30))
    worker.serve(prompt)
    assert tiers_of(kv, prompt) == {DEVICE: 7}
    assert {*worker.manager.resident(HOST)} == set()
    worker.tick(7.0)
    assert len(worker.manager.resident(HOST)) == 7
    worker.manager.evict(80)
    assert tiers_of(kv, prompt) == {HOST: 7}
    assert kv.reusable(prompt) == {}
    assert kv.reusable(prompt, tier="host") == {0: 28}
    with worker.prefill([*prompt, *range(100, 106)]) as request:
        assert worker.now == 7.0  # no request waits for a load
        assert (request.cached_tokens, request.onboarded_tokens) == (28, 28)
        assert tiers_of(kv, [*prompt, *range(100, 106)]) == {DEVICE: 9}
    kv.assert_in_sync()


def test_fewer_than_ten_tokens_on_the_host_are_promised_and_not_reused():
    kv = harness()
    worker, prompt = kv.worker(0), list(range(9))
    assert worker.traits.promises_more
    worker.serve(prompt)
    worker.tick(10.0)
    worker.manager.evict(80)
    assert tiers_of(kv, prompt) == {HOST: 2}
    assert kv.reusable(prompt, tier="host") == {}
    with worker.prefill(prompt) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (0, 0)
    kv.assert_in_sync()


def test_write_back_copies_what_the_device_evicts():
    kv = harness(write_policy="write_back")
    worker = kv.worker(0)
    worker.serve(range(30))
    worker.tick(100.0)
    assert worker.manager.resident(HOST) == []
    worker.manager.evict(80)
    assert tiers_of(kv, list(range(30))) == {HOST: 7}


def test_write_through_selective_copies_at_the_second_use():
    kv = harness(write_policy="write_through_selective")
    worker = kv.worker(0)
    worker.serve(range(16))
    worker.tick(100.0)
    assert worker.manager.resident(HOST) == []
    worker.serve(range(24))
    worker.tick(200.0)
    assert len(worker.manager.resident(HOST)) == 4


def test_a_request_waits_for_blocks_that_are_being_copied():
    kv = harness(num_blocks=8)
    worker = kv.worker(0)
    worker.serve(range(28))
    with pytest.raises(WouldWait, match=r"being copied to the host, until 7\.0 ms at the earliest"):
        worker.prefill(range(100, 128), wait=False)
    with worker.prefill(range(100, 128)):
        assert worker.now == 7.0
    kv.assert_in_sync()


def test_a_clear_empties_device_and_host():
    kv = harness()
    worker = kv.worker(0)
    worker.serve(range(28))
    assert not worker.clear()  # a copy is under way
    worker.tick(100.0)
    assert worker.clear()
    assert tiers_of(kv, list(range(28))) == {}
    kv.assert_in_sync()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("host", [4, 16, 40])
def test_stream_and_engine_are_in_sync_after_each_step(policy, host):
    for seed in range(4):
        rng = Random(seed)
        kv = harness(
            *(16, 2),
            host=host,
            write_policy=policy,
            gbps=rng.choice([0, 0.1, 10]),
            storage=bool(seed % 2),
            prefetch_threshold=8,
        )
        running = []
        for _ in range(100):
            worker, kind = kv.worker(rng.randrange(2)), rng.random()
            if kind < 0.5:
                length = rng.randrange(1, 40)
                prompt = (
                    [rng.randrange(2) for _ in range(length)] if rng.random() < 0.5 else [rng.randrange(3)] * length
                )
                with contextlib.suppress(OutOfBlocks, WouldWait):
                    running.append(worker.prefill(prompt, wait=rng.random() < 0.7))
            elif kind < 0.8 and running:
                request = running.pop(rng.randrange(len(running)))
                with contextlib.suppress(OutOfBlocks):
                    request.decode(rng.randrange(1, 6))
                request.finish()
            else:
                worker.tick(worker.now + rng.random() * 5)
            kv.assert_in_sync()
        for request in running:
            request.finish()
        kv.assert_in_sync()


def test_an_engine_loads_blocks_back_from_the_host():
    kv = harness(32, host=200)
    engine = kv.engine(0)
    prompts = [[user] * 60 for user in range(4)]
    requests = []
    for turn in range(3):
        for user, prompt in enumerate(prompts):
            requests.append(engine.submit([*prompt, turn], 3, arrival_ms=(4 * turn + user) * 500.0))
    engine.run()
    engine.run(until_ms=engine.now_ms + 1000)
    assert {request.status for request in requests} == {"finished"}
    assert sum(request.onboarded_tokens for request in requests)
    kv.assert_in_sync()


def test_a_storage_behind_the_host_is_shared_and_publishes_nothing():
    kv = harness(workers=2, storage=True, prefetch_threshold=16)
    first, second = kv.worker(0), kv.worker(1)
    prompt = list(range(30))
    first.serve(prompt)
    first.tick(100.0)
    assert 7 == len(first.storage.blocks) == len(second.storage.blocks)
    assert kv.reusable(prompt, tier="storage") == {1: 28}
    assert kv.overlap(prompt, tier=None) == {DEVICE: {0: 7}}
    with second.prefill(prompt) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (28, 28)
    second.tick(100.0)
    kv.assert_in_sync()


def test_a_test_can_fill_the_storage_and_lose_blocks_of_it():
    kv = harness(storage=True, prefetch_threshold=16)
    worker, prompt = kv.worker(0), list(range(41))
    worker.storage.fill(prompt)
    assert kv.reusable(prompt, tier="storage") == {0: 40}
    worker.storage.lose(prompt, from_block=5)
    assert len(worker.storage.blocks) == 5
    assert kv.reusable(prompt, tier="storage") == {0: 20}
    with worker.prefill(prompt) as request:
        assert request.cached_tokens == 20
    worker.storage.lose(prompt)
    assert worker.storage.blocks == set()
    worker.tick(100.0)  # copies of computed blocks are written
    assert len(worker.storage.blocks) == 5
    kv.assert_in_sync()


def test_a_clear_keeps_the_storage_and_each_harness_has_its_own():
    kv = harness(storage=True, prefetch_threshold=16)
    kv.worker(0).serve(range(30))
    kv.worker(0).tick(100.0)
    assert kv.worker(0).clear()
    assert kv.worker(0).serve(range(30)).cached_tokens == 28
    kv.assert_in_sync()
    other = RouterHarness(kv.profile, backend="sglang")
    assert other.worker(0).storage.blocks == set()


@pytest.mark.parametrize(
    ("options", "cached", "now"),
    [
        ({"prefetch_policy": "wait_complete"}, 40, 10.0),
        ({"prefetch_policy": "best_effort"}, 0, 0.0),
        ({"prefetch_timeout_base": 1.0}, 40, 10.0),
        ({"prefetch_timeout_base": 0.0035, "prefetch_timeout_per_ki_token": 0}, 0, 3.5),  # nothing is reported by then
        ({"prefetch_timeout_base": 0.0035, "prefetch_timeout_per_ki_token": 0, "storage_batch": 1}, 12, 3.5),
        ({"prefetch_timeout_base": 0, "prefetch_timeout_per_ki_token": 0.128, "storage_batch": 1}, 20, 5.0),
        ({"prefetch_threshold": 44}, 0, 0.0),
    ],
)
def test_a_request_waits_for_its_prefetch_as_long_as_the_policy_says(options, cached, now):
    kv = harness(storage=True, **{"prefetch_threshold": 4, **options})
    worker = kv.worker(0)
    worker.storage.fill(range(41))
    with worker.prefill(range(41)) as request:
        assert cached == request.cached_tokens
        assert now == pytest.approx(worker.now, abs=0.002)
    worker.tick(100.0)
    kv.assert_in_sync()


@pytest.mark.parametrize("host", [6, 40])
def test_a_draft_model_without_pairs_can_have_a_host(host):
    spec = BACKENDS["sglang"].variant("sglang_ngram", speculative=SglangSpeculative("NGRAM", 3, draft_tokens=4))
    tiers = {"host": host, "gbps": 1.0, "bytes_per_token": 250_000}
    profile = EngineProfile(block_size=SIZE, num_blocks=20, workers=1, tiers=tiers)
    kv = RouterHarness(profile, spec)
    worker, rng = kv.worker(0), Random(0)
    for turn in range(12):
        with contextlib.suppress(OutOfBlocks), worker.prefill([turn % 3] * rng.randrange(10, 40)) as request:
            accepted = [rng.randrange(4) for _ in range(3)]
            request.decode(sum(accepted) + len(accepted), accepted=accepted)
            request.decode(2)
            kv.assert_in_sync()
        worker.tick(worker.now + 3.0)
        kv.assert_in_sync()
    engine = RouterHarness(profile, spec).engine(0, performance_model=(1, 1))
    for turn in range(6):
        engine.submit([turn % 2] * 20, 9, arrival_ms=turn * 30)
    report = engine.run()
    assert len(report.completed) == 6
    assert engine.passes < 6 * 9  # drafts are accepted


def test_a_prefetch_that_a_request_does_not_wait_for_is_on_the_host_later():
    kv = harness(storage=True, prefetch_threshold=4)
    worker = kv.worker(0)
    worker.storage.fill(range(41))
    with pytest.raises(WouldWait, match=r"its prefix is fetched from the storage, until 10\.0 ms") as error:
        worker.prefill(range(41), wait=False)
    assert worker.manager.resident(HOST) == []
    worker.tick(error.value.deadline)
    assert len(worker.manager.resident(HOST)) == 10
    with worker.prefill(range(41), wait=False) as request:
        assert request.cached_tokens == 40
    kv.assert_in_sync()


def test_an_abandoned_prefetch_does_not_block_other_requests():
    kv = harness(num_blocks=8, storage=True, prefetch_threshold=4, gbps=0.1, prefetch_timeout_base=0.001)
    worker = kv.worker(0)
    worker.serve(range(100, 129))  # its copy takes 70 ms
    worker.storage.fill(range(29))
    with pytest.raises(WouldWait):
        worker.prefill(range(29), wait=False)
    worker.tick(5.0)
    with worker.prefill(range(200, 229)):
        assert worker.now == 70.0
    worker.tick(1000.0)
    kv.assert_in_sync()


def test_manual_acknowledgements_make_copies_resident_one_by_one():
    manager = create_manager("sglang", num_blocks=8, block_size=4, tiers={"host": 8})
    request = manager.request(Prompt.of(range(9)), Random(0))
    manager.find(request)
    manager.admit(request)
    manager.prefill([(request, 9)])
    manager.checkpoint(request)
    manager.submit_writes()
    for wrong, message in (
        ({}, "ack of nothing: 1 groups of writes and 0 of loads are under way"),
        ({"writes": 2}, "ack: writes must be at most 1, the groups under way, got 2"),
        ({"loads": 1}, "ack: loads must be at most 0, the groups under way, got 1"),
        ({"writes": -1}, "ack: writes must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            manager.ack(**wrong)
    assert manager.resident(HOST) == []
    manager.ack(writes=1)
    assert len(manager.resident(HOST)) == 2


@settings(max_examples=examples(150), database=None, deadline=None)
@given(traffic(workers=2, most_in_a_burst=5, tiers=True))
def test_blocks_being_written_to_the_storage_leave_room_on_the_device(program):
    tiers = {"host": 3, "gbps": 1.0, "bytes_per_token": 250_000, "write_policy": "write_back"}
    tiers |= {"storage": True, "prefetch_threshold": 8}
    with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=6, workers=2, tiers=tiers), "sglang") as kv:
        play(kv, program)
        kv.assert_in_sync()


def test_a_worker_without_a_storage_refuses_to_fill_one():
    with pytest.raises(ValueError, match=r"has none; make it with tiers="):
        harness().worker(0).storage.fill(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": {"host": 0}}, "tiers: host must be an integer of at least 1 (blocks), got 0"),
        ({"tiers": {"host": 8, "batch": 2}}, "tiers: 'batch' is not for this backend; SGLang's HiCache has host, "),
        (
            {"tiers": {"host": 8, "policy": "arc"}},
            "tiers: 'policy' is not for this backend; SGLang's HiCache has host, ",
        ),
        ({"tiers": {"host": 8, "write_policy": "write_thru"}}, "unknown tiers: write_policy 'write_thru'"),
        ({"tiers": {"host": 8, "prefetch_threshold": 0}}, "tiers: prefetch_threshold must be an integer of at least 1"),
        (
            {"tiers": {"host": 8, "prefetch_policy": "time_out"}},
            "unknown tiers: prefetch_policy 'time_out'; did you mean 'timeout'?",
        ),
        ({"tiers": {"storage": True}}, "tiers: 'host' is missing, the number of blocks that fit host memory"),
        (
            {"tiers": {"host": 8, "storage_batch": 0}},
            "tiers: storage_batch must be an integer of at least 1 (blocks), got 0",
        ),
        (
            {"tiers": {"host": 8, "retry_attempts": -1}},
            "tiers: retry_attempts must be an integer of at least 0, got -1",
        ),
        (
            {"tiers": {"host": 8, "prefetch_timeout_base": -1}},
            "tiers: prefetch_timeout_base must be a finite number of at least 0",
        ),
        ({"tiers": {"host": 8, "storage": 1}}, "tiers: storage must be True or False, got 1"),
        ({"tiers": {"host": 8}, "policy": "mru"}, "tiers of sglang are for policy lru, lfu and slru"),
        (
            {"tiers": {"host": 8}, "states": 8, "state_grid": 4, "speculative": SglangSpeculative("EAGLE")},
            "tiers of sglang are not for states with drafts: no recording has both; got SglangSpeculative(",
        ),
        (
            {"tiers": {"host": 1}, "window": 20, "window_ratio": 1.0},
            "a window of 20 tokens needs 5 pages of the host, and of its 1 pages it has 2 for windows",
        ),
    ],
)
def test_options_without_a_recording_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError) as error:
        create_manager("sglang", num_blocks=8, block_size=4, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_sglangs_write_policy_is_refused_for_another_engine():
    with pytest.raises(ValueError, match="'write_policy' is not for this backend; vLLM's native offload has"):
        create_manager("vllm", num_blocks=8, tiers={"host": 8, "write_policy": "write_back"})
