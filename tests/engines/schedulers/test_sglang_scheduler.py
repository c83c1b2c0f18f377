"""The scheduler over SGLang's own cache: admission, retraction and times."""

from random import Random

import pytest
from depth import examples, few
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, CapturingSink, EngineProfile, MockEngine, Prompt, RouterHarness
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import EngineStalled

SIZE = 4


def engine(num_gpu_blocks=100, *, backend="sglang", sink=None, sglang=None, **args):
    args = {"block_size": SIZE, **args}
    return MockEngine(
        MockEngineArgs(engine_type="sglang", num_gpu_blocks=num_gpu_blocks, sglang=sglang, **args),
        backend=backend,
        sink=sink,
    )


def pages(*numbers, tail=0):
    return [*(number for number in numbers for _ in range(SIZE)), *[0] * tail]


def run(one, until=1000):
    """Run passes until no request is open, up to a maximum; return them."""
    passes = []
    while not one.is_idle and len(passes) < until:
        passes.append(one.step())
    return passes


def admissions(one, requests):
    """Return the numbers of the requests admitted by each pass that admits any."""
    return [[requests.index(each) for each in done.admitted] for done in run(one) if done.admitted]


# ----------------------------------------------------------------------------------------------------- times


def test_over_the_real_cache_the_last_token_of_a_cached_prompt_is_computed():
    one = engine(backend="sglang")
    for _ in range(2):
        one.submit([*range(8)], 1)
        one.run()
    assert [request.reused_tokens for request in one.requests] == [0, 4]


def test_speedups_divide_rounded_times():
    one = engine(speedup_ratio=2.0, decode_speedup_ratio=4.0)
    one.submit([*range(8)], 1)
    done = one.step()
    assert pytest.approx((done.prefill_ms, done.decode_ms), abs=1e-4) == (16.622887 / 2, 6.809931 / 8)


def test_a_decode_worker_charges_only_decode_and_a_prefill_worker_both():
    times = []
    for kind in ("decode", "prefill"):
        one = engine(worker_type=kind)
        one.submit([*range(8)], 1)
        done = one.step()
        times.append((bool(done.prefill_ms), bool(done.decode_ms)))
    assert times == [(False, True), (True, True)]


# ------------------------------------------------------------------------------------------------- admission


def test_prompts_are_chunked_by_whole_pages_and_the_remainder_waits_at_the_front():
    one = engine(sglang={"chunked_prefill_size": 8})
    long, short = one.submit(pages(1, 2, 3, 4, 5, tail=1), 1), one.submit(pages(6), 1)
    passes = run(one)
    chunks = [
        [(one.requests.index(each.request), each.tokens, each.prefix_tokens) for each in done.scheduled]
        for done in passes
    ]
    # The remaining 5 tokens take two pages of the budget, which leaves none for the short prompt.
    assert chunks == [[(0, 8, 0)], [(0, 8, 8)], [(0, 5, 16)], [(1, 4, 0)]]
    assert (long.reused_tokens, long.status) == (16, "finished")  # its own chunks count as reused
    assert [long] == list(passes[0].waiting)[:1]
    assert short.status == "finished"


def test_the_first_chunk_matches_at_most_one_chunk_of_cached_tokens():
    one = engine(sglang={"chunked_prefill_size": 8})
    one.submit(pages(1, 2, 3, 4), 1)
    one.run()
    again = one.submit(pages(1, 2, 3, 4), 1)
    first, second = run(one)
    assert [(each.tokens, each.prefix_tokens) for done in (first, second) for each in done.scheduled] == [
        (0, 8),
        (8, 8),
    ]
    assert again.first_reused_tokens == 8


def test_max_num_seqs_limits_the_number_of_running_requests():
    one = engine(max_num_seqs=2)
    for number in range(5):
        one.submit(pages(number), 3)
    assert one.step().running == 2


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one():
    one = engine(6)
    for number in (1, 2):
        one.submit(pages(number, number + 10, number + 20), 2)
    one.submit(pages(3), 1)
    assert one.step().running == 1


def test_lpm_admits_the_longest_cached_prefix_first():
    one = engine(sglang={"schedule_policy": "lpm"}, max_num_seqs=1)
    one.submit(pages(1, 2, 3), 1)
    one.run()
    prompts = [pages(9), pages(1, 9), pages(1, 2, 3, 9), pages(8), pages(1, 2, 9)]
    requests = [one.submit(prompt, 1) for prompt in prompts]
    assert admissions(one, requests) == [[2], [4], [1], [0], [3]]


def test_of_uncached_prompts_with_a_common_beginning_all_but_the_first_yield():
    one = engine(sglang={"schedule_policy": "lpm"}, max_num_seqs=1)
    alike = [*range(10, 18)]
    prompts = [pages(*alike, 1), pages(*alike, 2), pages(3), pages(*alike)[:-1], pages(*alike)[:-1]]
    requests = [one.submit(prompt, 1) for prompt in prompts]
    order = admissions(one, requests)
    assert order[0] == [0]
    # Once the first is cached, the second has the longest cached prefix.
    assert order[1] == [1]
    one = engine(sglang={"schedule_policy": "lpm"})
    for prompt in prompts:
        one.submit(prompt, 1)
    admitted = [one.requests.index(request) for request in one.step().admitted]
    assert admitted == [0, 2, 3, 4, 1]  # a prompt of fewer than 32 tokens yields to no other


@pytest.mark.parametrize(("alike", "expected"), [(31, [0, 1, 2]), (32, [0, 2, 1]), (33, [0, 2, 1])])
def test_prompts_with_the_same_first_32_tokens_yield_to_the_first_of_them(alike, expected):
    one = engine(400, block_size=1, sglang={"schedule_policy": "lpm", "page_size": 1})
    for number in (100, 200):
        one.submit([*range(alike), *range(number, number + 10)], 1)
    one.submit([*range(300, 350)], 1)
    assert [one.requests.index(request) for request in one.step().admitted] == expected


def test_more_than_128_waiting_requests_are_not_sorted_by_prefix():
    one = engine(2000, sglang={"schedule_policy": "lpm"}, max_num_seqs=1)
    one.submit(pages(1, 1), 1)
    one.run()
    requests = [one.submit(pages(2 + number), 1) for number in range(128)]
    requests.append(one.submit(pages(1, 1), 1))
    assert [requests.index(each) for each in one.step().admitted] == [0]
    assert [requests.index(each) for each in one.step().admitted] == [128]


# ------------------------------------------------------------------------------------------------ retraction


def crowded():
    """Return an engine and three requests that fit without their output."""
    one = engine(8, sglang={"schedule_conservativeness": 0.0, "clip_max_new_tokens": 0})
    return one, [one.submit(pages(number, number + 10), 9) for number in range(1, 4)]


def test_the_request_with_the_fewest_generated_tokens_is_retracted_to_the_front():
    one, requests = crowded()
    retracted = [(done.preempted, done.waiting) for done in run(one) if done.preempted]
    assert retracted
    preempted, waiting = retracted[0]
    assert requests[0] is preempted[0]  # all have generated the same number, so it is the first
    assert requests[0].status == "finished"
    assert requests[0].preemptions
    assert preempted[0] is waiting[0]
    assert [len(request.token_ms) for request in requests] == [9, 9, 9]
    assert 0 == one.metrics.running == one.metrics.waiting


def test_a_retracted_request_keeps_its_generated_tokens():
    one, requests = crowded()
    kept, back = {}, 0
    while not one.is_idle:
        done = one.step()
        for each in done.scheduled:
            if each.request in kept:
                assert 8 + kept[each.request] == each.tokens + each.prefix_tokens
                back += 1
        kept |= {request: request.generated_tokens for request in done.preempted}
    assert back
    assert {len(request.token_ms) for request in requests} == {9}


# ---------------------------------------------------------------------------------------------- what is there


def test_events_are_visible_when_the_pass_ends():
    sink = CapturingSink()
    one = engine(sink=sink)
    sink.take()  # of the empty cache
    one.submit(pages(1, 2), 2)
    done = one.inside.start_pass(0.0)
    assert sink.events == []
    one.inside.finish_pass()
    assert len(sink.take()) == 1
    assert done.end_ms == one.now_ms


@pytest.mark.parametrize("backend", ["mocker_sglang_1_6", "sglang"])
def test_an_abort_frees_the_blocks_of_a_running_chunked_or_waiting_request(backend):
    one = engine(20, backend=backend, sglang={"chunked_prefill_size": 8})
    running, chunked = one.submit(pages(1), 5), one.submit(pages(2, 3, 4, 5, tail=1), 5)
    waiting = one.submit(pages(6), 5)
    one.step()
    assert ("running", [chunked, waiting]) == (running.status, list(one.inside.scheduler.waiting))
    for request in (waiting, chunked, running):
        request.abort()
    if backend == "sglang":
        assert ("running", [running]) == (running.status, list(one.inside.scheduler.running))
        assert [running] == one.step().aborted
    assert one.is_idle
    assert one.metrics.active_blocks == 0
    assert [request.status for request in (running, chunked, waiting)] == ["aborted"] * 3


def test_requests_with_higher_priority_are_admitted_first():
    one = engine(backend="sglang", max_num_seqs=1)
    requests = [one.submit(pages(number), 1, priority=priority) for number, priority in enumerate((0, 5, 5, 9))]
    assert admissions(one, requests) == [[3], [1], [2], [0]]
    with pytest.raises(ValueError, match=r"^priority is for engines whose policy has priorities \(backend sglang\)"):
        engine(backend="mocker_sglang_1_6").submit(pages(1), 1, priority=3)


def test_a_request_that_can_never_be_admitted_stalls_the_engine():
    one = engine(4, sglang={"clip_max_new_tokens": 4, "schedule_conservativeness": 0.0})
    one.submit(pages(1, 2, 3), 4)  # it fits but is never admitted: the free room must exceed what it takes
    with pytest.raises(EngineStalled, match="the engine makes no progress"):
        one.run()


# ------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("backend", ["lineage", "hash_cache", "vllm"])
def test_the_sglang_scheduler_refuses_backends_without_a_radix_cache(backend):
    with pytest.raises(
        ValueError,
        match="^engine_type 'sglang' schedules over a radix cache, backend sglang or mocker_sglang_1_6; got "
        f"'{backend}'$",
    ):
        engine(backend=backend)


@pytest.mark.parametrize("backend", ["mocker_sglang_1_6", "sglang"])
def test_a_radix_cache_refuses_other_schedulers(backend):
    with pytest.raises(ValueError, match=f"^engine_type 'vllm' cannot schedule over backend '{backend}'"):
        MockEngine(MockEngineArgs(block_size=SIZE), backend=backend)


def test_the_dynamo_mock_of_sglang_is_refused_for_other_semantics():
    with pytest.raises(
        ValueError, match=r"^the backend 'mocker_sglang_1_6' is of 1\.6\.1, and its engine semantics='mixed'$"
    ):
        engine(backend="mocker_sglang_1_6", semantics="mixed")


# ------------------------------------------------------------------------------------------------- in one go


@pytest.mark.parametrize("backend", ["sglang", "mocker_sglang_1_6"])
@pytest.mark.parametrize("page_size", few([4, 16]))
@pytest.mark.parametrize("seed", range(12))
def test_passes_in_one_go_equal_passes_one_by_one(seed, backend, page_size):
    rng = Random(seed)
    fields = {"block_size": page_size, "num_gpu_blocks": rng.choice([12, 24, 60]), "max_num_seqs": rng.choice([2, 64])}
    options = {"page_size": page_size, "chunked_prefill_size": page_size * rng.choice([2, 16])}
    arrivals = sorted(rng.choice([0, 5, 40, 200]) for _ in range(8))
    prompts = [pages(*(rng.randrange(3) for _ in range(rng.randint(1, 6))), tail=rng.randrange(SIZE)) for _ in range(8)]
    found = []
    for watched in (True, False):
        one = MockEngine(MockEngineArgs("sglang", sglang=options, **fields), backend=backend)
        if watched:
            one.on_pass(lambda done: None)
        for number, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True)):
            one.submit(Prompt(prompt), 2 + 3 * (number % 3), float(arrival))
        try:
            one.run()
        except EngineStalled as error:
            found.append(error.now_ms)
        else:
            times = [request.token_ms for request in one.requests]
            found.append((one.report.to_json(), times, one.passes))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------- any traffic


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, SIZE - 1), st.integers(1, 9)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(150))
@given(
    requests=REQUESTS,
    num_gpu_blocks=st.sampled_from([9, 12, 24]),
    backend=st.sampled_from(["mocker_sglang_1_6", "sglang"]),
    options=st.fixed_dictionaries(
        {
            "schedule_policy": st.sampled_from(["fifo", "lpm"]),
            "chunked_prefill_size": st.sampled_from([4, 12, 8192]),
            "clip_max_new_tokens": st.sampled_from([0, 2, 4096]),
            "schedule_conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
        }
    ),
)
def test_any_requests_are_served_without_event_errors_or_leaks(requests, num_gpu_blocks, backend, options):
    profile = EngineProfile(block_size=SIZE, num_blocks=num_gpu_blocks)
    harness = RouterHarness(profile, BACKENDS[backend])
    worker = harness.worker(0)
    one = MockEngine(
        MockEngineArgs(engine_type="sglang", num_gpu_blocks=num_gpu_blocks, block_size=SIZE, sglang=options),
        worker=worker,
    )
    for numbers, tail, output in requests:
        if len(numbers) * SIZE + tail + output <= num_gpu_blocks * SIZE:
            one.submit(Prompt(pages(*numbers, tail=tail)), output)
    try:
        report = one.run()
    except EngineStalled:  # the original hangs there too
        return
    assert set(report.completed) == set(report.requests)
    assert all(len(request.token_ms) == request.max_output_tokens for request in report.requests)
    harness.events.assert_no_event_errors()
    assert worker.manager.num_active_blocks == 0
    assert harness.judge().errors == []
