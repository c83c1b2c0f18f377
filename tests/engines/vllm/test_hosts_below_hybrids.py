"""vLLM's native offload below several cache groups and draft models: the recordings, step by step, and what a router
can conclude from the events.
"""

from random import Random

import pytest
from depth import DEEP, each_parameter, few
from players import player

from pytest_kvmock import EngineProfile, Removed, RouterHarness, StorageTier, create_manager
from pytest_kvmock.engines import CacheGroup, KvWorker, Speculative
from pytest_kvmock.engines.backends import BACKENDS
from pytest_kvmock.engines.makers import block_pool_driver
from pytest_kvmock.engines.vllm.host.native_offload import offload_of
from pytest_kvmock.engines.vllm.host.offload_steps import Computing, OffloadStep, OffloadStopError
from pytest_kvmock.values.prompt_keys import group_of

play_vllm = player("engines/base/play_hybrid_host_vllm.py")

FILE = "vllm_0.33.0_offload_hybrid.json.gz"
GEOMETRIES = [
    *("gpt_oss_dense", "gemma4", "gemma4_every_32", "qwen3_next_checkpoint", "qwen35_unit", "kimi_k3_unit"),
    *("deepseek_v4_dense", "llama4", "odd_window", "three_kinds", "ring", "eagle_k1", "mtp_modules", "draft_model"),
    *("gpt_oss_eagle3_dense", "qwen35_unit_mtp", "qwen3_next_mtp_checkpoint"),
]
HOST = StorageTier.HOST_PINNED
MODELS = ["vllm_gemma4", "vllm_qwen3_next", "vllm_kimi_k3", "vllm_deepseek_v4", "vllm_llama4", "vllm_mtp"]
STEPS = 20_000 if DEEP else 100
STATES = (CacheGroup("mamba", 8), CacheGroup("full_attention", 8))


@pytest.fixture(scope="module")
def recorded(recording):
    return {program["geometry"]: program for program in recording(FILE)["programs"]}


@each_parameter
@pytest.mark.parametrize("geometry", few(GEOMETRIES, 6))
def test_every_step_equals_the_recorded_step(recorded, geometry):
    assert play_vllm.difference(recorded[geometry]) is None


def test_the_recordings_cover_resets_partial_tails_loads_stores_and_preemption(recorded):
    assert sorted(recorded) == sorted(GEOMETRIES)
    programs = recorded.values()
    steps = [entry[1] for program in programs for entry in program["log"] if entry[0] == "step"]
    assert {program["config"].get("async", False) for program in programs} == {False, True}
    assert any(entry[0] == "reset" for program in programs for entry in program["log"])
    assert any(program["facts"]["partial_tail"] for program in programs)
    for name in ("loads", "stores", "flush", "preempted", "received"):
        assert any(step.get(name) for step in steps)


@pytest.mark.parametrize("name", ["lookups", "loads", "stores", "events", "crc"])
def test_the_player_finds_a_difference_in_any_field_of_a_step(recorded, name):
    program = recorded["kimi_k3_unit"]
    number = next(i for i, entry in enumerate(program["log"]) if entry[0] == "step" and entry[1].get(name))
    log = program["log"].copy()
    log[number] = ["step", {**log[number][1], name: []}]
    found = play_vllm.difference({**program, "log": log})
    assert found.startswith(f"entry {number}:")
    assert f"  {name}: recorded []" in found


def held(manager):
    """Return the blocks of an engine by medium and group: names on the device, and on the host."""
    sets = {}
    for group, name in manager.resident_names():
        sets.setdefault(("GPU", group), set()).add(name)
    for name, group in manager.offload.resident():
        sets.setdefault(("CPU", group), set()).add(name)
    return sets


def said(events, sets):
    """Return the blocks that events report, with their counts, by medium and group."""
    for each in events:
        medium = "CPU" if each.storage_tier is HOST else "GPU"
        counts = sets.setdefault((medium, group_of(each.extra)), {})
        step = -1 if isinstance(each.event.data, Removed) else 1
        for name in each.event.data.block_hashes:
            counts[name] = counts.get(name, 0) + step
            assert counts[name] >= 0
            if not counts[name]:
                del counts[name]


@pytest.mark.parametrize("model", MODELS)
def test_events_equal_the_blocks_of_each_group_on_both_tiers(model):
    rng, size, sets = Random(5), BACKENDS[model].default_block_size or 16, {}
    tiers = {"host": 90, "gbps": 1.0, "bytes_per_token": 125_000 // size}
    profile = EngineProfile(size, 150, workers=1, tiers=tiers)
    with RouterHarness(profile, model, engine={"performance_model": (1, 1)}) as kv:
        engine = kv.engine(0)
        steps = seen = 0
        arrival = 0.0
        while steps < STEPS:
            prompt = [block for _ in range(rng.randint(1, 6)) for block in [rng.randrange(3)] * size]
            arrival = max(arrival, engine.now_ms) + rng.random() * 20
            engine.submit([*prompt, 7], rng.randint(1, 30), arrival_ms=arrival)
            while not engine.is_idle and (steps % 7 or len(engine.requests) > 4):
                engine.step()
                steps += 1
                said(kv.events[seen:], sets)
                seen = len(kv.events)
                counted = {key: {*counts} for key, counts in sets.items() if counts}
                assert counted == held(engine.worker.manager)
            steps += 1
        assert seen


def test_a_state_is_loaded_back_with_its_block_as_in_the_worked_example():
    """A worked example of vLLM: groups of states and of full attention, blocks of 8, a device of 12 blocks."""
    events = []
    tiers = {"host": 64, "gbps": 0}
    worker = KvWorker(
        lambda sink: create_manager("vllm", num_blocks=12, groups=STATES, sink=sink, tiers=tiers),
        sink=events.append,
        rng=Random(1),
        driver=block_pool_driver,
    )
    prompt = list(range(20))
    worker.serve(prompt)
    worker.tick(10.0)
    stored = [(group_of(each.extra), len(each.event.data.block_hashes)) for each in events if each.storage_tier is HOST]
    assert sorted(stored) == [(0, 1), (1, 1), (1, 1)]  # one state, at the end of whole blocks
    worker.serve(list(range(100, 170)))
    worker.tick(20.0)
    longer = [*prompt, *range(50, 56)]
    assert (worker.cached_tokens(longer), worker.cached_tokens(longer, HOST)) == (0, 16)
    with worker.prefill(longer) as request:
        assert (request.cached_tokens, request.onboarded_tokens) == (16, 16)


def test_over_a_host_names_do_not_look_ahead_and_hits_drop_a_block():
    profile = EngineProfile(block_size=16, num_blocks=40, tiers={"host": 96, "gbps": 0})
    with RouterHarness(profile, "vllm_mtp") as kv:
        assert (kv.worker(0).traits.looks_ahead, kv.worker(0).traits.drops_last) == (0, True)
        prompt = kv.prompt(blocks=12)
        for each in (prompt, kv.prompt(blocks=30)):
            kv.worker(0).serve(each)
            kv.worker(0).tick(kv.worker(0).now + 10.0)
        request = kv.worker(0).prefill(prompt)
        # The hit on the device drops the ninth block, and that on the host the twelfth.
        assert (request.cached_tokens, request.onboarded_tokens) == (176, 48)
        request.decode(5, accepted=(2, 1))
        request.finish()
    with RouterHarness(EngineProfile(block_size=16, num_blocks=40), "vllm_mtp") as alone:
        assert (alone.worker(0).traits.looks_ahead, alone.worker(0).traits.drops_last) == (1, False)


@pytest.mark.parametrize("model", ["vllm_mtp", "vllm_qwen3_next"])
def test_an_engine_loads_a_prefix_back_from_the_host(model):
    profile = EngineProfile(16, 60, tiers={"host": 200, "gbps": 1.0, "bytes_per_token": 62_500})
    with RouterHarness(profile, model) as kv:
        engine, prompts = kv.engine(0), [kv.prompt(blocks=12), kv.prompt(blocks=40)]
        for prompt in (*prompts, prompts[0]):
            request = engine.submit(prompt, 4)
            engine.run()
            engine.run(until_ms=engine.now_ms + 100.0)
        assert request.onboarded_tokens > 0
        assert engine.worker.manager.num_free_blocks == 60
        kv.assert_in_sync()


def test_a_prompt_tail_beyond_max_offload_tokens_crashes_the_engine():
    """vLLM's own assertion fails: the prompt's last unit lies beyond the request's limit for stores."""
    manager = create_manager("vllm", num_blocks=40, groups=STATES, match_unit=2)
    manager.attach_offload(offload_of(manager, 40, max_offload_tokens=4), None)
    host, request = manager.offload, manager.new_request(range(22))
    known = host.request(request.tokens)
    play_vllm_steps(manager, host, request, known, [16, 4])
    with pytest.raises(OffloadStopError, match=r"max_offload_tokens is 4 \(vLLM 0\.33\.0: an AssertionError"):
        play_vllm_steps(manager, host, request, known, [2])


def play_vllm_steps(manager, host, request, known, chunks):
    """Compute chunks of a request, each in a step with planned stores."""
    for tokens in chunks:
        manager.new_step_starts()
        assert manager.allocate_slots(request, tokens) is not None
        states = [(known, entries) for entries in manager.take_states().values()]
        manager.end_step()
        computing = Computing(known, [table.blocks for table in request.tables], request.num_computed_tokens)
        host.plan(OffloadStep([computing], states=states))


@pytest.mark.parametrize(
    ("groups", "tiers", "options", "text"),
    [
        (
            STATES,
            {"host": 64, "chunk": 2},
            {"retention": 8},
            (
                "tiers: retention must be whole chunks of 16 tokens (2 blocks of 8) of each window and state group, as "
                "vLLM 0.33.0 refuses others; got 8"
            ),
        ),
        (
            STATES,
            {"host": 2, "chunk": 2},
            {},
            (
                "tiers: host must have room for a chunk of each of the 2 cache groups, which a hit needs at least, 4 "
                "blocks; got 2"
            ),
        ),
        (
            STATES,
            {"host": 64, "write_policy": "write_back"},
            {},
            (
                "tiers: 'write_policy' is not for this backend; vLLM's native offload has host, gbps, bytes_per_token, "
                "chunk, policy, self_describing, prompt_only, store_threshold, max_load_tokens, max_offload_tokens, "
                "async_scheduling, files, file_events, file_locality, file_gbps"
            ),
        ),
    ],
)
def test_options_that_vllm_refuses_are_refused_in_one_line(groups, tiers, options, text):
    with pytest.raises(ValueError) as error:
        create_manager("vllm", num_blocks=64, groups=groups, tiers=tiers, **options)
    assert str(error.value) == text


def test_states_over_a_host_need_prefix_caching():
    with pytest.raises(ValueError, match=r"tiers below groups of states need prefix caching, .*; got mamba 8; "):
        KvWorker(
            lambda sink: create_manager("vllm", num_blocks=64, groups=STATES, sink=sink, tiers={"host": 64}),
            prefix_caching=False,
            driver=block_pool_driver,
        )


def test_drafts_with_no_drop_drop_no_block_over_a_host():
    draft = Speculative("eagle3", no_drop=True)
    manager = create_manager("vllm", num_blocks=64, block_size=4, speculative=draft, tiers={"host": 64})
    assert (manager.geometry.lookahead, manager.geometry.drop) == (0, False)
