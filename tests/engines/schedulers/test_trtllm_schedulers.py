"""TensorRT-LLM's own scheduler, worked out by hand from the rules in its source: the original did not run."""

import pytest

from pytest_kvmock import BACKENDS, Fleet, MockEngine, MockEngineArgs, Prompt
from pytest_kvmock.fleets import RoundRobin, TraceRequest

V1, V2 = "trtllm", "trtllm_v2"
V2_WITH_HOST = BACKENDS[V2].variant("trtllm_v2_with_host", levels=(16,))
TWO_WINDOWS = BACKENDS[V1].variant("trtllm_two_windows", windows=[32, 256])
POLICIES = ("guaranteed_no_evict", "max_utilization")


def made(policy, backend=V1, blocks=8, **fields):
    fields = {"block_size": 4, "max_num_batched_tokens": 64, **fields}
    args = MockEngineArgs(engine_type="trtllm", semantics=policy, num_gpu_blocks=blocks, **fields)
    return MockEngine(args, backend=backend)


def prompt(number, tokens=8):
    """Return a prompt that shares no token with prompts of other numbers."""
    return range(100 * number, 100 * number + tokens)


def chunks(done):
    """Return the prompt chunks of a pass: request, number of tokens, tokens before them."""
    return [(each.request.opened, each.tokens, each.prefix_tokens) for each in done.scheduled if each.prompt_tokens]


def computed(done):
    return [(each.request.opened, each.tokens) for each in done.scheduled]


# ------------------------------------------------------------------------------------------------- GUARANTEED_NO_EVICT


def test_guaranteed_no_evict_starts_a_request_once_its_whole_output_has_room():
    """Each request needs 3 blocks for 8 + 4 tokens: of 8 blocks, two requests get 2 each; the third waits, although 4
    blocks are free.
    """
    engine = made("guaranteed_no_evict")
    requests = [engine.submit(prompt(number), 4) for number in range(3)]
    assert [each.opened for each in engine.step().admitted] == [0, 1]
    for _ in range(2):
        assert engine.step().admitted == []
    engine.run()
    assert [(each.status, each.generated_tokens, each.preemptions) for each in requests] == [("finished", 4, 0)] * 3


def test_guaranteed_no_evict_does_not_subtract_cached_blocks_from_the_need():
    """5 of 8 blocks are reserved, 3 free: a second request that hits two blocks in use needs one but counts three."""
    engine = made("guaranteed_no_evict", blocks=7)
    engine.submit(prompt(0, 13), 7)
    engine.step()
    engine.submit(prompt(0, 8), 4)
    assert engine.step().admitted == []


def test_the_first_request_that_does_not_fit_ends_admission():
    engine = made("guaranteed_no_evict")
    for number, output in enumerate((4, 20, 4)):
        engine.submit(prompt(number), output)
    assert [each.opened for each in engine.step().admitted] == [0]


def test_at_most_max_num_seqs_requests_start():
    engine = made("guaranteed_no_evict", blocks=64, max_num_seqs=2)
    for number in range(3):
        engine.submit(prompt(number), 4)
    assert [each.opened for each in engine.step().admitted] == [0, 1]


def test_a_shorter_window_needs_its_blocks_and_one_more_for_sliding():
    """For 8 + 60 tokens the longer window needs 17 of its blocks; the shorter one 8, plus one while it slides."""
    engine = made("guaranteed_no_evict", TWO_WINDOWS, blocks=32)
    driver = engine.inside.scheduler._driver
    state = engine.submit(prompt(0), 60).state
    assert driver.blocks_to_completion(state, 68) == [9, 17]


# ----------------------------------------------------------------------------------------------------------------- skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [V1, V2])
def test_a_request_waits_for_and_hits_a_block_that_another_request_computes(policy, backend):
    engine = made(policy, backend, blocks=32)
    for _ in range(2):
        engine.submit(prompt(0), 4)
    assert computed(engine.step()) == [(0, 8)]
    assert (1, 1, 7) in chunks(engine.step())


@pytest.mark.parametrize(("backend", "together"), [(V1, False), (V2, True)])
def test_v1_compares_blocks_without_their_ancestors_and_v2_with_them(backend, together):
    """Two different cached blocks are each followed by an equal block."""
    engine = made("max_utilization", backend, blocks=32)
    for number in (1, 2):
        engine.submit([*prompt(number, 4), 0], 1)
    engine.run()
    for number in (1, 2):
        engine.submit([*prompt(number, 4), 7, 7, 7, 7, 8], 4)
    assert together == (len(engine.step().admitted) == 2)


def test_with_several_windows_no_request_waits():
    engine = made("guaranteed_no_evict", TWO_WINDOWS, blocks=32)
    for _ in range(2):
        engine.submit(prompt(0), 4)
    assert len(engine.step().admitted) == 2


# ----------------------------------------------------------------------------------------------------- MAX_UTILIZATION


def test_the_last_started_request_is_paused_and_recomputes_all_its_tokens_as_a_prompt():
    """Two requests of 8 tokens have two of five blocks each: for the first output token each needs a third, but one is
    free.
    """
    engine = made("max_utilization", blocks=5)
    first, last = (engine.submit(prompt(number), 6) for number in range(2))
    assert [first, last] == engine.step().admitted
    done = engine.step()
    assert ([last], [(0, 1)]) == (done.preempted, computed(done))
    assert (len(last), last.status) == (9, "preempted")
    engine.run()
    assert [(each.status, each.generated_tokens, each.preemptions) for each in (first, last)] == [
        ("finished", 6, 0),
        ("finished", 6, 1),
    ]
    assert [found for _, found in last.admissions] == [0, 4]  # the first request took one of its two blocks


def test_no_request_is_admitted_after_a_paused_one():
    engine = made("max_utilization", blocks=5)
    for number in range(2):
        engine.submit(prompt(number), 6)
    engine.step()
    engine.submit(prompt(2, 3), 1)  # the two blocks of the paused request would be enough
    assert engine.step().admitted == []


def test_a_new_prompt_pauses_no_earlier_request():
    engine = made("max_utilization", blocks=4)
    engine.submit(prompt(0), 4)
    engine.step()
    engine.submit(prompt(1), 4)
    done = engine.step()
    assert (done.admitted, done.preempted) == ([], [])


def test_pausing_a_request_does_not_free_the_blocks_that_another_request_shares():
    engine = made("max_utilization", blocks=16)
    for tail in range(2):
        engine.submit([*prompt(0), 90 + tail], 6)
        engine.step()
    driver = engine.inside.scheduler._driver
    one, other = (each.state for each in engine.inside.scheduler.running)
    free = driver.free_blocks()[0]
    assert (free + 1, free + 4) == (driver.free_blocks([other])[0], driver.free_blocks([one, other])[0])


# ----------------------------------------------------------------------------------------------------------------- V2


def test_v2_suspends_a_request_and_moves_its_pages_to_the_host():
    engine = made("max_utilization", V2_WITH_HOST, blocks=5)
    first, last = (engine.submit(prompt(number), 6) for number in range(2))
    assert [first, last] == engine.step().admitted
    done = engine.step()
    assert ([last], [(0, 1)]) == (done.preempted, computed(done))
    assert engine.inside.scheduler._driver.is_suspended(last.state)
    engine.run()
    assert [(each.status, each.generated_tokens) for each in (first, last)] == [("finished", 6)] * 2
    assert [tokens for _, tokens in last.admissions] == [0]  # it was never recomputed as a prompt


def test_without_a_host_level_a_suspended_request_of_v2_is_recomputed():
    engine = made("max_utilization", V2, blocks=5)
    _, last = (engine.submit(prompt(number), 6) for number in range(2))
    engine.run()
    assert (last.status, last.generated_tokens, last.preemptions, len(last.admissions)) == ("finished", 6, 1, 2)


def test_over_v2_both_capacity_policies_use_the_suspending_scheduler():
    schedulers = [made(policy, V2).inside.scheduler for policy in POLICIES]
    assert [type(each).__name__ for each in schedulers] == ["SuspendingScheduler"] * 2


# --------------------------------------------------------------------------------------------------------- micro batch


@pytest.mark.parametrize("backend", [V1, V2])
def test_first_come_first_served_chunks_prompts_at_whole_blocks(backend):
    """A budget of 22 for prompts of 10, 10 and 6 leaves 2 for the third, less than a block, so it waits."""
    engine = made("guaranteed_no_evict", backend, blocks=64, max_num_batched_tokens=22)
    for number, tokens in enumerate((10, 10, 6)):
        engine.submit(prompt(number, tokens), 4)
    assert chunks(engine.step()) == [(0, 10, 0), (1, 10, 0)]


def test_equal_progress_gives_one_block_to_each_prompt_in_turn():
    """A budget of 22 is five blocks of 4, plus 2 tokens that are too few for any prompt."""
    policy = {"context_chunking_policy": "equal_progress"}
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=22, **policy)
    for number in range(3):
        engine.submit(prompt(number, 12), 4)
    assert chunks(engine.step()) == [(0, 8, 0), (1, 8, 0), (2, 4, 0)]


def test_with_chunking_last_chunks_are_ordered_behind_the_others():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=16)
    engine.submit(prompt(0, 6), 4)
    engine.submit(prompt(1, 20), 4)
    assert computed(engine.step()) == [(1, 8), (0, 6)]


def test_without_chunking_a_prompt_beyond_the_budget_ends_the_pass():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=16, enable_chunked_prefill=False)
    for number, tokens in enumerate((10, 10, 6)):
        engine.submit(prompt(number, tokens), 4)
    assert computed(engine.step()) == [(0, 10)]


def test_generating_requests_count_first_against_the_token_budget():
    engine = made("guaranteed_no_evict", blocks=64, max_num_batched_tokens=12)
    engine.submit(prompt(0), 4)
    engine.step()
    engine.submit(prompt(1, 12), 4)
    assert computed(engine.step()) == [(1, 8), (0, 1)]


def test_v1_budgets_a_prompt_without_its_hits_and_v2_with_them():
    """16 of 17 tokens are cached: in a budget of 8, V1 counts 17 tokens, chunks them and has room for one prompt;
    V2 has room for two.
    """
    served = {}
    for backend in (V1, V2):
        engine = made("guaranteed_no_evict", backend, blocks=64, max_num_batched_tokens=8)
        for number in range(2):
            engine.submit(prompt(number, 17), 1)
        engine.run()
        for number in range(2):
            engine.submit(prompt(number, 17), 1)
        served[backend] = computed(engine.step())
    assert served == {V1: [(2, 1)], V2: [(2, 1), (3, 1)]}


def test_the_requests_of_a_pass_are_sorted_by_adapter():
    engine = made("guaranteed_no_evict", blocks=64)
    for number, name in enumerate(("one", "two", "one", None)):
        engine.submit(Prompt(prompt(number), lora_name=name), 4)
    assert [each for each, _ in computed(engine.step())] == [3, 0, 2, 1]


# -------------------------------------------------------------------------------------------------- engines and fleets


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [V1, V2, V2_WITH_HOST], ids=[V1, V2, V2_WITH_HOST.name])
def test_a_fleet_of_trtllm_engines_serves_a_trace(policy, backend):
    trace = [TraceRequest(7.0 * turn, 64, 24, (turn % 3, 3 + turn % 7, 100 + turn, 200 + turn)) for turn in range(30)]
    engines = [made(policy, backend, blocks=12, block_size=16) for _ in range(2)]
    report = Fleet(engines, RoundRobin()).run(trace)
    assert len(report.completed) == 30
    assert {len(each.token_ms) for each in report.completed} == {24}


@pytest.mark.parametrize("backend", [V1, V2])
def test_passes_in_one_go_equal_passes_one_by_one(backend):
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


def test_the_trtllm_scheduler_refuses_other_backends():
    with pytest.raises(
        ValueError,
        match=r"^semantics='max_utilization' of engine_type 'trtllm' schedules over trtllm or trtllm_v2; got 'vllm'",
    ):
        made("max_utilization", "vllm")


def test_context_chunking_policy_is_refused_without_the_trtllm_scheduler():
    with pytest.raises(ValueError, match=r"^context_chunking_policy is for TensorRT-LLM's own scheduler"):
        MockEngineArgs(context_chunking_policy="equal_progress")


def test_the_capacity_scheduler_policy_is_written_to_json():
    written = MockEngineArgs(engine_type="trtllm", semantics="max_utilization").to_dict()
    assert written["engine"]["trtllm"] == {"capacity_scheduler_policy": "max_utilization"}
