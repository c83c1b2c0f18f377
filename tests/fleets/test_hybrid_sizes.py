"""Exactly the requests that can never fit an engine of a hybrid model are refused at submission."""

from functools import partial

import pytest
from depth import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, create_manager
from pytest_kvmock.engines import CacheGroup, KvWorker, backend_spec
from pytest_kvmock.fleets import EngineStalled, FleetRequest
from pytest_kvmock.fleets.clock.engine_state import RequestTooLarge

SIZES = st.sampled_from([2, 4, 8])
WINDOW = st.builds(CacheGroup, st.just("sliding_window"), SIZES, window=st.integers(1, 40))
LOCAL = st.builds(CacheGroup, st.just("chunked_local_attention"), SIZES, chunk=st.sampled_from([4, 8, 12, 20]))
FULL = st.builds(CacheGroup, st.just("full_attention"), SIZES)
RING = st.builds(CacheGroup, st.just("ring"), SIZES)
STATE = st.builds(
    CacheGroup,
    st.just("mamba"),
    st.sampled_from([4, 8, 16]),
    checkpoint=st.sampled_from([None, 2, 4]),
    speculative_blocks=st.integers(0, 2),
)


@st.composite
def engines(draw, *, states):
    """Draw the groups, blocks and arguments of an engine."""
    others = st.one_of(WINDOW, LOCAL, FULL, RING, *([STATE] * 3 if states else []))
    groups = draw(st.permutations([draw(FULL), *draw(st.lists(others, min_size=1, max_size=3))]))
    args = MockEngineArgs(
        num_gpu_blocks=draw(st.integers(2, 40)),
        block_size=next(group.block_size for group in groups if group.kind == "full_attention"),
        semantics=draw(st.sampled_from(["1.2.1", "1.6.1"])),
        max_num_batched_tokens=draw(st.sampled_from([None, 3, 7, 16, 64])),
        enable_prefix_caching=draw(st.booleans()),
    )
    return groups, args


def made(groups, args):
    make = partial(create_manager, "vllm", num_blocks=args.num_gpu_blocks, groups=groups)
    driver = backend_spec("vllm").driver
    worker = KvWorker(lambda sink: make(sink=sink), driver=driver, prefix_caching=args.enable_prefix_caching)
    return MockEngine(args, worker=worker)


def is_refused(groups, args, prompt, output):
    try:
        made(groups, args).submit(range(prompt), output)
    except RequestTooLarge:
        return True
    return False


def outcome(groups, args, prompt, output):
    """Return how a request ends in an empty engine without the size check: "finished", "rejected" or "stalled"."""
    engine = made(groups, args)
    engine.inside._check_size = lambda *request: None
    request = engine.submit(range(prompt), output)
    try:
        engine.run()
    except EngineStalled:
        return "stalled"
    return request.status


PROMPTS = st.integers(1, 120)
OUTPUTS = st.integers(1, 60)


@pytest.mark.parametrize("states", [False, True])
@given(data=st.data(), prompt=PROMPTS, output=OUTPUTS)
@settings(max_examples=examples(300), deadline=None)
def test_a_request_is_refused_exactly_if_an_empty_engine_cannot_serve_it(states, data, prompt, output):
    engine = data.draw(engines(states=states))
    refused = is_refused(*engine, prompt, output)
    event(f"refused: {refused}")
    became = outcome(*engine, prompt, output)
    assert refused is (became != "finished") or became == "rejected"


def state(size, **fields):
    return CacheGroup("mamba", size, **fields)


FULL_4, RING_4 = CacheGroup("full_attention", 4), CacheGroup("ring", 4)
NARROW = {  # found by a search; one more block is enough
    "a chunk that ends in a later block than the one before": (
        ([state(8, speculative_blocks=1), RING_4, FULL_4], 14, "1.2.1", 16),
        (41, 1),
    ),
    "a state that is copied, as it was named inside its block": (
        ([RING_4, state(16, checkpoint=4), FULL_4, CacheGroup("sliding_window", 4, window=38)], 10, "1.6.1", None),
        (14, 2),
    ),
    "a state that is exported, in the chunk": (
        ([FULL_4, RING_4, state(4, checkpoint=2), state(4, checkpoint=2)], 13, "1.2.1", 64),
        (34, 1),
    ),
    "a state that would be exported, were the prompt one chunk": (
        (
            [
                CacheGroup("chunked_local_attention", 2, chunk=8),
                FULL_4,
                state(8, checkpoint=2, speculative_blocks=2),
            ],
            27,
            "1.2.1",
            7,
        ),
        (32, 6),
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_cached_states_next_to_the_running_state_count_for_the_size(name):
    (groups, blocks, semantics, most), request = NARROW[name]

    def sized(num_gpu_blocks):
        args = MockEngineArgs(
            num_gpu_blocks=num_gpu_blocks, block_size=4, semantics=semantics, max_num_batched_tokens=most
        )
        return groups, args

    assert outcome(*sized(blocks), *request) == "stalled"
    assert is_refused(*sized(blocks), *request)
    assert outcome(*sized(blocks + 1), *request) == "finished"
    assert not is_refused(*sized(blocks + 1), *request)


GEMMA = "vllm_gemma3"  # windows of 1024 tokens in six groups, and full attention


@pytest.mark.parametrize(
    ("semantics", "prompt", "output", "blocks"),
    [
        ("1.2.1", 12 * 16, 4, 7 * 13),
        ("1.2.1", 65 * 16, 4, 7 * 65),
        ("1.6.1", 9 * 16, 300, 7 * 28),
        ("1.6.1", 9 * 16, 2, 7 * 10),
    ],
)
def test_the_blocks_of_all_cache_groups_count_for_the_size(semantics, prompt, output, blocks):
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=64, block_size=16, semantics=semantics), backend=GEMMA)
    with pytest.raises(
        RequestTooLarge, match=f"^a request of {prompt} \\+ {output} tokens can never fit: {blocks} blocks"
    ):
        engine.submit(range(prompt), output)
    assert engine.requests == []


def test_a_window_group_counts_only_the_blocks_that_it_holds_at_once():
    groups = [CacheGroup("full_attention", 16), CacheGroup("sliding_window", 16, window=32)]
    args = MockEngineArgs(num_gpu_blocks=40, block_size=16, semantics="1.6.1", max_num_batched_tokens=64)
    assert outcome(groups, args, 300, 200) == "finished"
    assert not is_refused(groups, args, 300, 200)


def test_a_prompt_that_is_too_large_without_output_is_rejected_when_its_turn_comes():
    args = MockEngineArgs(num_gpu_blocks=64, block_size=16, semantics="1.6.1")
    engine = MockEngine(args, backend=GEMMA)
    Fleet([engine], semantics="1.6.1").run([FleetRequest(range(12 * 16), 4)])
    assert [request.status for request in engine.requests] == ["rejected"]


def test_a_fleet_refuses_a_request_whose_output_never_fits():
    args = MockEngineArgs(num_gpu_blocks=64, block_size=16, semantics="1.6.1")
    fleet = Fleet([MockEngine(args, backend=GEMMA)], semantics="1.6.1")
    with pytest.raises(
        RequestTooLarge, match=r"requests\[0\] of 144 tokens and 300 of output can never fit: 196 blocks"
    ):
        fleet.run([FleetRequest(range(9 * 16), 300)])


# ------------------------------------------------------------------------------------------ the longest request


LIMITED = partial(create_manager, GEMMA, num_blocks=256, max_model_len=100)
TOO_LONG = r"^a request has at most 100 tokens here \(max_model_len\), got {}$"


def limited_worker():
    return KvWorker(lambda sink: LIMITED(sink=sink), driver=backend_spec(GEMMA).driver)


def test_a_prompt_beyond_max_model_len_of_the_manager_is_refused_in_one_line():
    worker = limited_worker()
    with pytest.raises(ValueError, match=TOO_LONG.format(200)):
        worker.serve(range(200))
    assert worker.manager.num_active_blocks == 0


def test_output_beyond_max_model_len_is_refused_before_it_is_generated():
    with limited_worker().prefill(range(96)) as request:
        request.decode(4)
        with pytest.raises(ValueError, match=TOO_LONG.format(101)):
            request.decode(1)


def test_slots_beyond_max_model_len_are_not_allocated():
    manager = LIMITED()
    request = manager.new_request(range(90))
    request.tokens.extend(range(50))
    with pytest.raises(ValueError, match=TOO_LONG.format(140)):
        manager.allocate_slots(request, 140)
    assert not request.holds_blocks


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
def test_an_engine_refuses_a_request_beyond_max_model_len_of_its_manager(semantics):
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=256, block_size=16, semantics=semantics), worker=limited_worker())
    engine.submit(range(90), 10)
    with pytest.raises(
        ValueError, match=r"^a request of 90 \+ 11 tokens is too long: max_model_len of its manager is 100 tokens"
    ):
        engine.submit(range(90), 11)
    engine.run()
    assert [request.status for request in engine.requests] == ["finished"]


def test_output_ends_at_max_model_len_of_the_engine_arguments():
    args = MockEngineArgs(num_gpu_blocks=256, block_size=16, semantics="1.6.1", max_model_len=100)
    engine = MockEngine(args, worker=limited_worker())
    request = engine.submit(range(90), 50)
    engine.run()
    assert (request.status, request.generated_tokens) == ("finished", 10)
