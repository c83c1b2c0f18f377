"""TensorRT-LLM's own scheduler, worked by hand from its rules as they were read: it did not run."""

import pytest

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, Prompt
from pytest_kvmock.backends import BACKENDS
from pytest_kvmock.router import RoundRobin
from pytest_kvmock.traces import TraceRequest

V1, V2 = "trtllm", "trtllm_v2"
V2_WITH_HOST = BACKENDS[V2].variant("trtllm_v2_with_host", levels=(16,))
TWO_WINDOWS = BACKENDS[V1].variant("trtllm_two_windows", windows=[32, 256])
POLICIES = ("guaranteed_no_evict", "max_utilization")


def made(policy, backend=V1, blocks=8, **fields):
    fields = {"block_size": 4, "max_num_batched_tokens": 64, **fields}
    args = MockEngineArgs(engine_type="trtllm", semantics=policy, num_gpu_blocks=blocks, **fields)
    return MockEngine(args, backend=backend)


def prompt(number, tokens=8):
    """A prompt that shares nothing with another of another number."""
    return range(100 * number, 100 * number + tokens)


def chunks(done):
    """What a pass computed of prompts: which request, so many tokens, behind so many."""
    return [(each.request.opened, each.tokens, each.prefix_tokens) for each in done.scheduled if each.prompt_tokens]


def computed(done):
    return [(each.request.opened, each.tokens) for each in done.scheduled]


# ------------------------------------------------------------------------------------------------- GUARANTEED_NO_EVICT


def test_a_request_starts_once_all_that_it_may_generate_has_room():
    """3 blocks each to their end, 8 + 4 tokens: two of 8 blocks' four are admitted, and the third waits though 4 are free."""
    engine = made("guaranteed_no_evict")
    requests = [engine.submit(prompt(number), 4) for number in range(3)]
    assert [0, 1] == [each.opened for each in engine.step().admitted]
    for _ in range(2):
        assert [] == engine.step().admitted
    engine.run()
    assert [("finished", 4, 0)] * 3 == [(each.status, each.generated_tokens, each.preemptions) for each in requests]


def test_what_is_cached_is_not_subtracted():
    """5 of 8 blocks are reserved, 3 free: a second request that hits two blocks in use needs one more, and counts three."""
    engine = made("guaranteed_no_evict", blocks=7)
    engine.submit(prompt(0, 13), 7)
    engine.step()
    engine.submit(prompt(0, 8), 4)
    assert [] == engine.step().admitted


def test_the_first_that_does_not_fit_ends_admission():
    engine = made("guaranteed_no_evict")
    for number, output in enumerate((4, 20, 4)):
        engine.submit(prompt(number), output)
    assert [0] == [each.opened for each in engine.step().admitted]


def test_no_more_than_so_many_requests_start():
    engine = made("guaranteed_no_evict", blocks=64, max_num_seqs=2)
    for number in range(3):
        engine.submit(prompt(number), 4)
    assert [0, 1] == [each.opened for each in engine.step().admitted]


def test_a_shorter_window_needs_no_more_than_itself():
    """Of 8 + 60 tokens the longer window needs 17 of its blocks; the shorter one 8."""
    engine = made("guaranteed_no_evict", TWO_WINDOWS, blocks=32)
    driver = engine.scheduler._driver
    state = engine.submit(prompt(0), 60).state
    assert [8, 17] == driver.blocks_to_completion(state, 68)


# ----------------------------------------------------------------------------------------------------------------- skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [V1, V2])
def test_who_would_compute_the_same_block_waits_for_it_and_hits_it_next(policy, backend):
    engine = made(policy, backend, blocks=32)
    for _ in range(2):
        engine.submit(prompt(0), 4)
    assert [(0, 8)] == computed(engine.step())
    assert (1, 1, 7) in chunks(engine.step())


@pytest.mark.parametrize(("backend", "together"), [(V1, False), (V2, True)])
def test_v1_compares_a_block_without_what_stands_before_it(backend, together):
    """Two cached blocks that differ, and one equal block behind each."""
    engine = made("max_utilization", backend, blocks=32)
    for number in (1, 2):
        engine.submit([*prompt(number, 4), 0], 1)
    engine.run()
    for number in (1, 2):
        engine.submit([*prompt(number, 4), 7, 7, 7, 7, 8], 4)
    assert together == (len(engine.step().admitted) == 2)


def test_with_several_windows_nobody_waits():
    engine = made("guaranteed_no_evict", TWO_WINDOWS, blocks=32)
    for _ in range(2):
        engine.submit(prompt(0), 4)
    assert 2 == len(engine.step().admitted)


# ----------------------------------------------------------------------------------------------------- MAX_UTILIZATION


def test_the_last_started_is_paused_and_comes_back_as_a_prompt_of_all_its_tokens():
    """Two of 8 tokens have two blocks each of five: with the first token of output each needs a third, and one is free."""
    engine = made("max_utilization", blocks=5)
    first, last = (engine.submit(prompt(number), 6) for number in range(2))
    assert [first, last] == engine.step().admitted
    done = engine.step()
    assert ([last], [(0, 1)]) == (done.preempted, computed(done))
    assert (9, "preempted") == (len(last), last.status)
    engine.run()
    assert [("finished", 6, 0), ("finished", 6, 1)] == [
        (each.status, each.generated_tokens, each.preemptions) for each in (first, last)
    ]
    assert [0, 4] == [found for _, found in last.admissions]  # the first one took one of the two blocks that it left


def test_nobody_behind_a_paused_one_is_looked_at():
    engine = made("max_utilization", blocks=5)
    for number in range(2):
        engine.submit(prompt(number), 6)
    engine.step()
    engine.submit(prompt(2, 3), 1)  # the two blocks of the paused one would do
    assert [] == engine.step().admitted


def test_a_new_prompt_pauses_nobody_before_it():
    engine = made("max_utilization", blocks=4)
    engine.submit(prompt(0), 4)
    engine.step()
    engine.submit(prompt(1), 4)
    done = engine.step()
    assert ([], []) == (done.admitted, done.preempted)


def test_blocks_that_another_shares_are_not_free_when_one_is_paused():
    engine = made("max_utilization", blocks=16)
    for tail in range(2):
        engine.submit([*prompt(0), 90 + tail], 6)
        engine.step()
    driver = engine.scheduler._driver
    one, other = (each.state for each in engine.scheduler.running)
    free = driver.free_blocks()[0]
    assert (free + 1, free + 4) == (driver.free_blocks([other])[0], driver.free_blocks([one, other])[0])


# ----------------------------------------------------------------------------------------------------------------- V2


def test_v2_suspends_who_gives_way_and_its_pages_fall_to_the_host():
    engine = made("max_utilization", V2_WITH_HOST, blocks=5)
    first, last = (engine.submit(prompt(number), 6) for number in range(2))
    assert [first, last] == engine.step().admitted
    done = engine.step()
    assert ([last], [(0, 1)]) == (done.preempted, computed(done))
    assert engine.scheduler._driver.is_suspended(last.state)
    engine.run()
    assert [("finished", 6)] * 2 == [(each.status, each.generated_tokens) for each in (first, last)]
    assert [0] == [tokens for _, tokens in last.admissions]  # it never came back as a prompt


def test_v2_without_a_level_below_has_it_come_back_as_a_prompt():
    engine = made("max_utilization", V2, blocks=5)
    _, last = (engine.submit(prompt(number), 6) for number in range(2))
    engine.run()
    assert ("finished", 6, 1, 2) == (last.status, last.generated_tokens, last.preemptions, len(last.admissions))


def test_over_v2_one_policy_stands_in_for_the_other():
    schedulers = [made(policy, V2).scheduler for policy in POLICIES]
    assert ["SuspendingScheduler"] * 2 == [type(each).__name__ for each in schedulers]


# --------------------------------------------------------------------------------------------------------- micro batch


@pytest.mark.parametrize("backend", [V1, V2])
def test_first_come_first_served_cuts_to_whole_blocks(backend):
    """A budget of 22 for prompts of 10, 10 and 6: the third has 2 left, less than a block, and waits."""
    engine = made("guaranteed_no_evict", backend, blocks=64, max_num_batched_tokens=22)
    for number, tokens in enumerate((10, 10, 6)):
        engine.submit(prompt(number, tokens), 4)
    assert [(0, 10, 0), (1, 10, 0)] == chunks(engine.step())


def test_equal_progress_gives_a_block_to_each_in_turn():
    """A budget of 22 is five blocks of 4 and 2 tokens that are too few for anybody."""
    policy = {"context_chunking_policy": "equal_progress"}
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=22, **policy)
    for number in range(3):
        engine.submit(prompt(number, 12), 4)
    assert [(0, 8, 0), (1, 8, 0), (2, 4, 0)] == chunks(engine.step())


def test_with_cuts_last_chunks_come_behind_the_others():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=16)
    engine.submit(prompt(0, 6), 4)
    engine.submit(prompt(1, 20), 4)
    assert [(1, 8), (0, 6)] == computed(engine.step())


def test_without_chunks_a_prompt_that_is_too_much_ends_the_pass():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=16, enable_chunked_prefill=False)
    for number, tokens in enumerate((10, 10, 6)):
        engine.submit(prompt(number, tokens), 4)
    assert [(0, 10)] == computed(engine.step())


def test_those_that_generate_are_counted_first():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=12)
    engine.submit(prompt(0), 4)
    engine.step()
    engine.submit(prompt(1, 12), 4)
    assert [(1, 8), (0, 1)] == computed(engine.step())


def test_v1_budgets_a_prompt_before_its_hits_are_known_and_v2_after():
    """Of 17 tokens 16 are cached: in a budget of 8, V1 cuts what it takes for 17, and has room for one prompt; V2 for two."""
    served = {}
    for backend in (V1, V2):
        engine = made("guaranteed_no_evict", backend, blocks=64, max_num_batched_tokens=8)
        for number in range(2):
            engine.submit(prompt(number, 17), 1)
        engine.run()
        for number in range(2):
            engine.submit(prompt(number, 17), 1)
        served[backend] = computed(engine.step())
    assert {V1: [(2, 1)], V2: [(2, 1), (3, 1)]} == served


def test_a_pass_is_sorted_by_adapter():
    engine = made("guaranteed_no_evict", blocks=64)
    for number, name in enumerate(("one", "two", "one", None)):
        engine.submit(Prompt(prompt(number), lora_name=name), 4)
    assert [3, 0, 2, 1] == [each for each, _ in computed(engine.step())]


# -------------------------------------------------------------------------------------------------- engines and fleets


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [V1, V2, V2_WITH_HOST], ids=[V1, V2, V2_WITH_HOST.name])
def test_a_fleet_serves_a_trace(policy, backend):
    trace = [TraceRequest(7.0 * turn, 64, 24, (turn % 3, 3 + turn % 7, 100 + turn, 200 + turn)) for turn in range(30)]
    engines = [made(policy, backend, blocks=12, block_size=16) for _ in range(2)]
    report = Fleet(engines, RoundRobin()).run(trace)
    assert 30 == len(report.completed)
    assert {24} == {len(each.token_ms) for each in report.completed}


@pytest.mark.parametrize("backend", [V1, V2])
def test_passes_in_one_go_are_the_same_passes(backend):
    reports = []
    for listens in (False, True):
        engine = made("max_utilization", backend, blocks=40)
        if listens:
            engine.on_pass(lambda done: None)
        for number in range(4):
            engine.submit(prompt(number), 30)
        reports.append([each.token_ms for each in engine.run().requests])
    assert reports[0] == reports[1]


def test_an_unknown_policy_is_refused():
    with pytest.raises(
        ValueError, match=r"^semantics: got 'static'; allowed: 1.6.1, guaranteed_no_evict, max_utilization$"
    ):
        MockEngineArgs(engine_type="trtllm", semantics="static")


def test_it_schedules_over_no_other_cache():
    with pytest.raises(
        ValueError,
        match=r"^semantics='max_utilization' of engine_type 'trtllm' schedules over trtllm or trtllm_v2; got 'vllm'",
    ):
        made("max_utilization", "vllm")


def test_how_prompts_share_a_pass_is_for_its_own_scheduler():
    with pytest.raises(ValueError, match=r"^context_chunking_policy is for TensorRT-LLM's own scheduler"):
        MockEngineArgs(context_chunking_policy="equal_progress")


def test_its_policy_is_written_to_json():
    written = MockEngineArgs(engine_type="trtllm", semantics="max_utilization").to_dict()
    assert {"capacity_scheduler_policy": "max_utilization"} == written["engine"]["trtllm"]
