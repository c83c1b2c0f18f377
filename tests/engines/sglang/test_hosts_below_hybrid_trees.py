"""SGLang's HiCache below windows, states and pairs: the recordings, step by step, and what a router can conclude
from the events.
"""

from random import Random

import pytest
from depth import DEEP, each_parameter
from players import player

from pytest_kvmock import (
    EngineProfile,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import KvWorker, SglangSpeculative
from pytest_kvmock.engines.makers import sglang_driver

play_sglang = player("engines/base/play_hybrid_host_sglang.py")

FILE = "sglang_0.5.23_hicache_hybrid.json.gz"
KINDS = sorted(
    {f"{part}-{policy}" for part in ("swa", "mamba", "both", "eagle") for policy in ("through", "selective", "back")}
    | {"swa-through-storage", "mamba-selective-storage", "mamba-back-storage", "weagle-back-storage"}
)
DEVICE, HOST, *_ = StorageTier
STEPS = 20_000 if DEEP else 300

MODELS = {
    "sglang_gpt_oss": {"num_blocks": 40, "block_size": 16},
    "sglang_qwen3_next": {"num_blocks": 60, "block_size": 64},
    "sglang_deepseek_v4": {"num_blocks": 30, "block_size": 256},
    "sglang_eagle": {"num_blocks": 40, "block_size": 16},
    "sglang": {"num_blocks": 40, "block_size": 16, "window": 48, "states": 20, "state_grid": 16, "state_interval": 32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_the_recorded_answers_events_sizes_and_trees(recording, kind):
    programs = [program for program in recording(FILE) if program["kind"] == kind]
    assert programs
    for program in programs:
        assert list(play_sglang.Player.differences(program)) == []


class Names:
    """A sink that records the contents of each tier by the events, and counts each Removed of a missing block."""

    def __init__(self):
        self.tiers = {DEVICE: set(), HOST: set()}
        self.unknown = 0

    def publish(self, event, storage_tier, token_ids):
        data, names = event.data, self.tiers[storage_tier]
        if isinstance(data, Stored):
            names.update(data.block_hashes)
        elif isinstance(data, Removed):
            self.unknown += len({*data.block_hashes} - names)
            names.difference_update(data.block_hashes)

    def promised(self, manager, prompt):
        """Return the pages of a prompt that events promise on either tier, and those that full attention has there."""
        request = manager.request(prompt, Random(0))
        names = request.tokens.names[: (len(prompt.tokens) - 1) // manager.block_size]
        there = self.tiers[DEVICE] | self.tiers[HOST]
        leading = next((at for at, name in enumerate(names) if name not in there), len(names))
        return leading, manager._tree.look(request.tokens.names, len(names), request.namespace).depth


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("model", MODELS)
def test_events_equal_the_pages_of_full_attention_on_both_tiers(model, write_policy):
    options, names, rng = MODELS[model], Names(), Random(1)
    if write_policy == "write_back" and model not in {"sglang_qwen3_next", "sglang_eagle"}:
        with pytest.raises(ValueError, match="write_policy 'write_back' of sglang is not for models with windows"):
            create_manager(model, tiers={"host": 80, "write_policy": write_policy}, **options)
        return
    tiers = {"host": 2 * options["num_blocks"], "write_policy": write_policy}
    worker = KvWorker(
        lambda into: create_manager(model, sink=into, tiers=tiers, **options),
        sink=names,
        rng=Random(0),
        driver=sglang_driver,
    )
    live, refused = [], 0
    for step in range(STEPS):
        try:
            which = rng.random()
            if which < 0.5 or not live:
                blocks = [
                    block for _ in range(rng.randint(1, 8)) for block in [rng.randrange(3)] * options["block_size"]
                ]
                prompt = Prompt([*blocks, 7])
                promised, full_hit = names.promised(worker.manager, prompt)
                assert promised == full_hit
                live.append(worker.prefill(prompt))
                assert live[-1].cached_tokens <= promised * options["block_size"]
            elif which < 0.7:
                rng.choice(live).decode([3] * rng.randint(1, 20))
            else:
                live.pop(rng.randrange(len(live))).finish()
        except OutOfBlocks:
            refused += 1
            if live:
                live.pop(0).finish()
        if not step % 3:
            worker.tick(step * 1000.0)
        assert names.tiers[DEVICE] == {*worker.manager.resident(DEVICE)}
        assert names.tiers[HOST] == {*worker.manager.resident(HOST)}
    assert names.unknown == 0
    assert refused < STEPS


def test_a_prompt_is_loaded_back_from_the_host_with_its_window():
    worker = KvWorker(
        lambda into: create_manager("sglang_gpt_oss", num_blocks=40, sink=into, tiers={"host": 80}),
        rng=Random(0),
        driver=sglang_driver,
    )
    prompt = Prompt([*range(321)])
    worker.prefill(prompt).finish()
    worker.tick(1e6)
    worker.manager.evict(640, 640)
    assert worker.cached_tokens(prompt) == 0
    request = worker.prefill(prompt)
    assert request.onboarded_tokens == 320


@pytest.mark.parametrize("model", ["sglang_gpt_oss", "sglang_qwen3_next", "sglang_eagle", "sglang_deepseek_v4"])
def test_an_engine_over_a_host_stays_in_sync_with_its_events(model):
    options, rng = MODELS[model], Random(3)
    tiers = {"host": 2 * options["num_blocks"], "gbps": 1.0, "bytes_per_token": 250_000 // options["block_size"]}
    kv = RouterHarness(EngineProfile(workers=1, tiers=tiers, **options), model, engine={"performance_model": (1, 1)})
    engine = kv.engine(0)
    for user in range(120 if DEEP else 25):
        blocks = [block for _ in range(rng.randint(1, 8)) for block in [rng.randrange(3)] * options["block_size"]]
        engine.submit([*blocks, 7], rng.randint(1, 40), arrival_ms=user * 9.0)
    passes = 0
    while not engine.is_idle:
        engine.step()
        passes += 1
        if not passes % 5:
            kv.assert_in_sync()
    assert passes


@each_parameter
@pytest.mark.parametrize("model", ["sglang_gpt_oss", "sglang_qwen3_next", "sglang_deepseek_v4", "sglang_eagle"])
def test_storage_holds_windows_and_states_only_where_a_prompt_can_be_resumed(model):
    size = MODELS[model]["block_size"]
    tiers = {"host": 2 * MODELS[model]["num_blocks"], "storage": True, "prefetch_threshold": size}
    with RouterHarness(EngineProfile(workers=2, tiers=tiers, **MODELS[model]), model) as kv:
        tokens = [block for block in range(12) for _ in range(size)]
        kv.worker(0).storage.fill(tokens)
        longer = [*tokens, 7, 8]
        has_parts = model != "sglang_eagle"
        pages = 12 if has_parts else 11  # pages of pairs
        assert kv.reusable(longer, tier="storage") == {0: pages * size, 1: pages * size}
        assert kv.worker(1).serve(longer).cached_tokens == pages * size
        kv.worker(0).storage.lose(tokens, 10)
        # With pages a hit loses the window or state at its end, and has no other.
        assert kv.reusable(longer, tier="storage") == ({} if has_parts else {0: 10 * size})
        kv.assert_in_sync()


def test_a_model_with_states_and_drafts_is_refused_over_a_host():
    with pytest.raises(ValueError, match="tiers of sglang are not for states with drafts: no recording has both"):
        create_manager(
            "sglang_qwen3_next", num_blocks=64, block_size=64, tiers={"host": 8}, speculative=SglangSpeculative()
        )
