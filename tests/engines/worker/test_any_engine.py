"""Every engine under random requests: no event is wrong, no block is lost, and none is leaked."""

from collections import Counter

import pytest
from depth import FEWEST_EXAMPLES, examples
from hybrid_sizes import EACH, HYBRID, block_size_of, sized
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, EngineProfile, OutOfBlocks, Prompt, RouterHarness, Stored
from pytest_kvmock.testing import traffic
from pytest_kvmock.testing.drafts import Player
from pytest_kvmock.values.prompt_keys import is_attention_group

CAPACITY, SIZE = 8, 4
ENGINES = {
    **{name: BACKENDS[name] for name in EACH},
    "hash_cache_strict": BACKENDS["hash_cache"].variant("hash_cache_strict", prefix_closed=True, strict=True),
}

MAY_WARN = {
    "hash_cache": {"wrong_hash"},
    "multi_lru": {"evicted_and_restored", "wrong_hash", "orphaned_child"},
}
"""The warnings that the events of an engine may cause, because the original engine causes them."""


any_program = given(
    program=traffic(workers=2, most_steps=40, most_blocks=6, most_tokens=9),
    chunk=st.sampled_from([None, None, 1, 3, SIZE]),
    num_blocks=st.sampled_from([2, 5, CAPACITY]),
)


@pytest.mark.parametrize("engine", [name for name, spec in ENGINES.items() if spec.group is None])
@settings(max_examples=examples(25))
@any_program
def test_any_traffic_of_an_engine_breaks_no_rule_and_conserves_blocks(engine, program, chunk, num_blocks):
    check_any_traffic(engine, program, chunk, num_blocks)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name in HYBRID])
@settings(max_examples=FEWEST_EXAMPLES)  # the models of an engine differ by their sizes, and share its manager
@any_program
def test_any_traffic_of_a_hybrid_model_breaks_no_rule_and_conserves_blocks(engine, program, chunk, num_blocks):
    check_any_traffic(engine, program, chunk, num_blocks)


def check_any_traffic(engine, program, chunk, num_blocks):
    size = block_size_of(ENGINES[engine], SIZE)
    profile = EngineProfile(block_size=size, num_blocks=num_blocks * size // SIZE, workers=2, chunk=chunk)
    kv = RouterHarness(profile, ENGINES[engine])
    player = Player(kv)
    for step in program:
        player.do(step)
        kv.events.assert_no_event_errors()
        for worker in kv.workers.values():
            conserved(worker, profile.num_blocks)
    for worker in kv.workers.values():
        for request in list(worker.requests):
            request.finish()
        manager = worker.manager
        assert (manager.num_active_blocks, manager.num_active_block_refs) == (0, 0)
        names = len(
            manager.resident()
        )  # if a hash covers less than a block, a prompt's tail has one in addition to that of its block
        assert manager.num_inactive_blocks == names or (
            not worker.traits.takes_hashes and manager.num_inactive_blocks < names
        )
        assert worker.clear()
        assert list(manager.resident()) == []
    verdict = kv.judge()
    assert verdict.errors == []
    assert {problem.rule for problem in kv.events.warnings} <= MAY_WARN.get(engine, set())


def conserved(worker, num_blocks):
    """Check that used and cached blocks fit, and that each inactive block is resident."""
    manager = worker.manager
    active, inactive = manager.num_active_blocks, manager.num_inactive_blocks
    assert min(active, inactive) >= 0
    assert active + inactive <= num_blocks
    resident, idle = Counter(manager.resident()), Counter(manager.inactive_blocks())
    assert idle <= resident
    assert inactive == idle.total()
    assert active / num_blocks == manager.active_perc
    if not worker.traits.copies and worker.backend != "multi_lru":
        assert set(resident.values()) <= {1}
    running = sum(request.status == "running" for request in worker.requests)
    assert bool(running) == bool(active)
    assert sum(manager.active_blocks.values()) == manager.num_active_block_refs


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_left_open_is_reported_only_as_a_leaked_request(engine):
    spec = ENGINES[engine]
    kv = RouterHarness(sized(EngineProfile(block_size=SIZE, num_blocks=CAPACITY), spec), spec)
    kv.worker(0).prefill(kv.prompt(2, tail=1))
    verdict = kv.judge()
    assert verdict.errors == []
    assert [problem.rule for problem in verdict.warnings] == ["leaked_requests"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_larger_than_the_cache_is_refused(engine):
    spec = ENGINES[engine]
    with RouterHarness(sized(EngineProfile(block_size=SIZE, num_blocks=2), spec), spec) as kv:
        worker, most = kv.worker(0), kv.profile.num_blocks
        needed = "" if worker.traits.groups else f"{most + 1} "  # several caches need more or fewer blocks
        worker.serve(kv.prompt(2))
        before = (sorted(worker.manager.resident()), kv.events.total)
        with pytest.raises(OutOfBlocks, match=f"{needed}blocks are needed and {most} are available"):
            worker.serve(kv.prompt(most, tail=1))
        assert before == (sorted(worker.manager.resident()), kv.events.total)


@pytest.mark.parametrize("engine", [name for name, spec in ENGINES.items() if spec.traits.takes_hashes])
def test_output_after_a_prompt_of_hashes_continues_the_hash_chain(engine):
    spec = ENGINES[engine]
    with RouterHarness(sized(EngineProfile(block_size=SIZE, num_blocks=CAPACITY), spec), spec) as kv:
        for number in range(6):
            prompt = Prompt(hashes=[2**64 - 1 - number])  # as a signed number, its name is negative
            kv.worker(0).serve(prompt, output_tokens=3 * SIZE + 1)  # models with states keep one at 16 tokens
            assert kv.overlap(prompt) == {0: 1}
        stored = [entry.event for entry in kv.events if isinstance(entry.event.event.data, Stored)]
        names = [event.event.data.block_hashes for event in stored if is_attention_group(event.extra)]
        assert sum(map(len, names)) == 6 * 4
