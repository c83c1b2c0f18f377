"""One router and its tests over every engine.

    pytest examples/engine_matrix

The marker names the engines; the tests are the same for all. `kv_worker.traits` declares how engines differ: an engine
that serves a hybrid model may reuse less than its events promise (`promises_more`), and its caches share the blocks, so
that the pool has more.
"""

import pytest
from engine_router import EngineIndex, EngineRouter

from pytest_kvmock import BACKENDS, EngineProfile
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE

pytestmark = [pytest.mark.kv_backends(*BACKENDS), pytest.mark.kvmock(workers=2)]


@pytest.fixture
def kv_index(kv_profile):
    return EngineIndex(kv_profile.block_size)


@pytest.fixture
def router(kv_index, kv_harness):
    return EngineRouter(kv_index, list(kv_harness.workers))


@pytest.mark.kvmock(num_blocks=1024)
def test_the_next_turn_of_a_chat_goes_where_the_last_one_was(router, kv_harness, kv_traits, kv_profile, kv_prompt):
    """However the engine publishes the answer, the router knows all its whole blocks by the next turn."""
    size = kv_profile.block_size
    question = kv_prompt(blocks=3, tail=1)  # with a draft model, a block gets its name when the next token is there
    first = router.route(question.block_hashes(size, kv_traits.looks_ahead))
    with kv_harness.worker(first).prefill(question) as request:
        answer = kv_prompt(blocks=2, tail=1).tokens
        request.decode(answer[:size])
        known = kv_harness.overlap(question).get(first, 0)
        assert known == 3  # the prompt, from the moment that it is prefilled
        request.decode(answer[size:])

    followup = kv_prompt(blocks=1, after=(*question.tokens, *answer))
    known = kv_harness.overlap(followup)[first]
    stored = 3 if kv_traits.stores_when == "never" else 5  # TensorRT-LLM's V2 stores no output
    assert stored == known or (kv_traits.promises_more and known < 5)  # SGLang keeps no output whose state is gone
    assert first == router.route(followup.block_hashes(size, kv_traits.looks_ahead))
    reused = kv_harness.worker(first).cached_tokens(followup) // size  # TensorRT-LLM reuses parts of blocks, too
    assert stored == reused or (kv_traits.promises_more and known >= reused)


@pytest.mark.kvmock(num_blocks=1024)
def test_a_prompt_asked_again_is_reused_but_for_what_the_engine_recomputes(
    router, kv_harness, kv_traits, kv_profile, kv_prompt
):
    size = kv_profile.block_size
    prompt = kv_prompt(blocks=4)
    worker = kv_harness.worker(router.route(prompt.block_hashes(size, kv_traits.looks_ahead)))
    worker.serve(prompt)

    known = 4 - bool(worker.traits.looks_ahead)  # with a draft model, the name of the last block covers a later token
    assert {worker.worker_id: known} == kv_harness.overlap(prompt)
    most, reused = min(known, 4 - worker.traits.recomputes_last_token), worker.serve(prompt).cached_tokens // size
    assert most == reused or (worker.traits.promises_more and most > reused)


@pytest.mark.kvmock(workers=1, num_blocks=512)
def test_a_block_of_which_there_are_copies_is_known_until_the_last_goes(kv_harness, kv_worker, kv_prompt):
    """An engine that recomputes the last token has the last block twice (vLLM). Then the older copy is evicted."""
    prompt = kv_prompt(blocks=3)
    kv_worker.serve(prompt)
    kv_worker.serve(prompt)
    twice = len(kv_worker.manager.resident()) > 3
    looks_ahead = bool(kv_worker.traits.looks_ahead)  # the last block, which is recomputed, then has no name yet
    assert (kv_worker.traits.copies and not looks_ahead) == twice
    while twice and len(set(kv_worker.manager.resident())) < len(kv_worker.manager.resident()):
        kv_worker.serve(kv_prompt(blocks=1))

    # The plugin checks this after each event: an index that removes the block with its first copy has failed by now.
    assert {0: 3 - looks_ahead} == kv_harness.overlap(prompt)


class TestTrace:
    """The synthetic trace, or `pytest examples --kv-trace FILE`."""

    @pytest.fixture
    def kv_base_profile(self, pytestconfig, kv_backend):
        """Return a profile that is small for the short prompts of the synthetic trace, so that the engines evict, or as
        large as a real one.
        """
        groups = BACKENDS[kv_backend].traits_at(MOONCAKE_BLOCK_SIZE).groups
        caches = sum(MOONCAKE_BLOCK_SIZE // group.block_size for group in groups) or 1
        num_blocks = caches * (48 if pytestconfig.getoption("kv_trace") is None else 4096)
        return EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=num_blocks)

    def test_a_trace_is_served(self, router, kv_harness, kv_traits, kv_events, kv_trace, kv_backend, capsys):
        asked = cached = 0
        for request in kv_trace:
            prompt = request.prompt()
            worker = kv_harness.worker(router.route(prompt.block_hashes(MOONCAKE_BLOCK_SIZE, kv_traits.looks_ahead)))
            asked += request.input_length
            cached += worker.serve(prompt).cached_tokens

        kv_harness.assert_no_event_errors()
        stored, removed = kv_events.stored_blocks, kv_events.removed_blocks
        with capsys.disabled():
            print(
                f"\n{kv_backend:>10}: {cached / asked:6.1%} of the tokens reused, {kv_events.total:>5} events, "
                f"{len(stored):>5} blocks stored, {len(removed):>5} removed"
            )
        held = sum(len(worker.manager.resident()) for worker in kv_harness.workers.values())
        if kv_traits.partial_blocks:  # TensorRT-LLM: a block that a partial match takes leaves without a Removed
            assert held <= len(stored) - len(removed)
        elif "evicted_and_restored" not in kv_harness.events.counts.warnings:  # else more is held than published
            assert held == len(stored) - len(removed)
