"""Workers driven by engines in virtual time: failures are cut to engine requests, and the reproduction fails too."""

import random

import pytest
from depth import worth_its_time
from faulty_worlds import ByTokens, ForgetsLongRemoved, spec

from pytest_kvmock import EngineProfile, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import Abort, Run, RunPasses, Submit


@pytest.fixture
def driven():
    """Make a harness whose two workers were driven by engines, in one of three ways."""

    def make(backend="lineage", index=None, *, by="run", requests=40, judge_unpublished=False, engine=None, **fields):
        profile = EngineProfile(**{"block_size": 4, "num_blocks": 24, "workers": 2, **fields})
        kv = RouterHarness(profile, backend, index, engine=engine, judge_unpublished=judge_unpublished)
        rng = random.Random(1)
        shared = [kv.prompt(3) for _ in range(6)]
        for number in range(requests):
            prompt = kv.prompt(rng.randrange(1, 5), after=rng.choice(shared))
            arrival = 30.0 * number if by == "arrival" else None
            kv.engine(rng.randrange(2)).submit(prompt, rng.choice([1, 2, 6, 9]), arrival)
            if by == "step":
                for _ in range(rng.randrange(4)):
                    kv.engine(rng.randrange(2)).step()
        for worker in (0, 1):
            kv.engine(worker).run()
        kv.judge()
        return kv

    return make


@pytest.mark.parametrize(
    ("backend", "by"),
    [
        ("forgets_a_removed", "arrival"),
        ("keeps_one_secret", "run"),
        ("names_one_twice", "run"),
        ("hashes_one_wrongly", "step"),
        ("does_both", "step"),
    ],
)
def test_a_manager_fault_is_cut_to_requests_of_its_engine(faulty_backends, driven, failure_of, backend, by):
    assert backend in faulty_backends
    kv = driven(backend, by=by, engine={"max_num_seqs": 3})

    found = reproduce(kv)

    assert (found.level, found.cut_from, found.complete) == ("requests", 40, True)
    assert found.size <= 2
    assert {Submit, Run} == {type(step) for step in found.steps}
    assert f"{found.rule} (worker" in failure_of(found)


def test_a_reproduction_of_an_engine_fault_is_one_submit_and_one_run(faulty_backends, driven):
    assert faulty_backends
    found = reproduce(driven("hashes_decoded_blocks_wrongly", by="step", engine={"max_num_seqs": 3}))
    assert found.as_test() == (
        "from pytest_kvmock import EngineProfile, RouterHarness\n\n\n"
        "def test_reproduction():\n"
        '    with RouterHarness(EngineProfile(block_size=4, num_blocks=3), "hashes_decoded_blocks_wrongly") as kv:\n'
        "        kv.engine(0).submit([0, 1, 2, 3], 5)\n"
        "        kv.engine(0).run()\n"
    )


@worth_its_time
def test_an_index_fault_is_cut_to_events_or_to_requests(driven, failure_of):
    kv = driven(index=ForgetsLongRemoved(), engine={"max_num_seqs": 3})
    by_events, by_requests = reproduce(kv), reproduce(kv, level="requests")
    assert (by_events.level, by_requests.level) == ("events", "requests")
    assert by_events.engine == {}
    assert "index_drift" in failure_of(by_events, ForgetsLongRemoved())
    assert "index_drift" in failure_of(by_requests, ForgetsLongRemoved())
    by_tokens = reproduce(driven(index=ByTokens(4)))
    assert by_tokens.level == "requests"
    assert "index_drift" in failure_of(by_tokens, ByTokens(4))


# ------------------------------------------------------------------------------------------- arguments of the engine


def hashes_a_first_one_wrongly(data):
    """Give a block that is stored alone and without a parent a wrong hash."""
    if isinstance(data, Stored) and len(data.block_hashes) == 1 and data.parent_hash is None:
        return Stored(None, (77,), data.tokens_hashes)
    return data


IN_CHUNKS = spec("in-chunks", hashes_a_first_one_wrongly)
"""Fails where a block is stored alone, as the first chunk of a prompt of at least two blocks."""


def chunked(**engine):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=24), IN_CHUNKS, engine=engine)
    for number in range(8):
        kv.engine(0).submit([*range(100 * number, 100 * number + 12)], 2)
    kv.engine(0).run()
    kv.judge()
    return kv


def test_engine_fields_that_do_not_matter_are_left_out():
    kv = chunked(max_num_batched_tokens=4, max_num_seqs=3, performance_model=(5, 5.5))
    assert kv.events.errors[0].rule == "wrong_hash"
    found = reproduce(kv)
    # A prompt of one block shows the fault with any budget.
    assert found.engine == {}
    assert found.size == 1


def test_a_reproduction_gives_each_engine_its_own_fields(monkeypatch):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=24, workers=2), IN_CHUNKS, engine={"max_num_seqs": 2})
    kv.engine(0, max_num_batched_tokens=4).submit([*range(12)], 2)
    kv.engine(1).submit([*range(12)], 2)
    for worker in (0, 1):
        kv.engine(worker).run()
    kv.judge()
    # Disable the cuts of prompts, so that no field of an engine can be left out.
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._make_plain", lambda cutter: None)
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._fewer_blocks", lambda cutter: None)
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._shorter_prompts", lambda cutter: None)
    found = reproduce(kv)
    assert found.engines == (((0, 0), {"max_num_seqs": 2, "max_num_batched_tokens": 4}), ((1, 0), {"max_num_seqs": 2}))
    assert "        kv.engine(0, max_num_seqs=2, max_num_batched_tokens=4)\n" in found.as_test()


def test_groups_of_engine_fields_are_written_as_mappings(monkeypatch):
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._make_plain", lambda cutter: None)
    reasoning = {"start_thinking_token_id": 7, "end_thinking_token_id": 8, "thinking_ratio": 0.5}
    kv = chunked(max_num_batched_tokens=4, reasoning=reasoning, performance_model=(5, 5.5), preemption_mode="fifo")
    found = reproduce(kv)
    fields = {
        "max_num_batched_tokens": 4,
        "reasoning": reasoning,
        "preemption_mode": "fifo",
        "performance_model": (5, 5.5),
    }
    assert fields == found.engine
    assert (
        'engine={"max_num_batched_tokens": 4, '
        '"reasoning": {"start_thinking_token_id": 7, "end_thinking_token_id": 8, "thinking_ratio": 0.5}, '
        '"preemption_mode": "fifo", "performance_model": (5, 5.5)}'
    ) in found.as_test()


def test_a_fault_that_depends_on_a_python_object_cannot_be_cut_to_requests(monkeypatch):
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._make_plain", lambda cutter: None)
    kv = chunked(max_num_batched_tokens=4, performance_model=(lambda *_: 1.0, lambda *_: 1.0))
    with pytest.raises(
        NotReduced, match=r"^it depends on an engine's performance_model, which is a Python object and no"
    ):
        reproduce(kv, level="requests")
    assert reproduce(kv).level == "events"


def test_unpublished_events_are_cut_by_requests_only(faulty_backends, failure_of):
    assert faulty_backends
    profile = EngineProfile(block_size=4, num_blocks=24, prefix_caching=False)
    kv = RouterHarness(profile, "keeps_one_secret", judge_unpublished=True)
    for number in range(20):
        kv.engine(0).submit([*range(100 * number, 100 * number + 22)], 7)
    kv.engine(0).run()
    kv.judge()
    assert kv.events.errors[0].rule == "block_not_found"
    found = reproduce(kv)
    assert found.level == "requests"
    assert found.rule in failure_of(found)
    with pytest.raises(NotReduced, match=r"^events that are not published cannot be replayed$"):
        reproduce(kv, level="events")


# ---------------------------------------------------------------------------------------------------- what it replays


def test_a_request_generates_the_same_tokens_when_other_requests_are_left_out():
    def conversation(others):
        kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64), "lru", name=str(others))
        engine = kv.engine(0)
        tokens = []
        engine.on_pass(lambda done: tokens.extend(zip(done.generated, done.tokens, strict=True)))
        for number in range(others):
            engine.submit([*range(number, number + 5)], 3)
        first = engine.submit([1, 2, 3, 4], 9)
        engine.run()
        return [token for request, token in tokens if request is first]

    alone = conversation(0)
    assert len(alone) == 9
    assert alone == conversation(3)


def test_a_replayed_conversation_reuses_the_same_cached_tokens():
    """A prompt with the output of an earlier request finds it cached, also in a harness of another name."""
    profile = EngineProfile(block_size=4, num_blocks=400)
    kv = RouterHarness(profile, "lineage", name="as it was")
    engine, output, history = kv.engine(0), {}, []

    def listen(done):
        for request, token in zip(done.generated, done.tokens, strict=True):
            output.setdefault(request, []).append(token)

    engine.on_pass(listen)
    for turn in range(5):
        history += range(100 * turn, 100 * turn + 5)
        history += output[_served(engine, history)]
    again = RouterHarness(profile, "lineage")
    interpreter = Interpreter(again)
    for step, _ in kv.recording.recorded():
        interpreter.do(step)
    cached = [request.cached_tokens for request in engine.requests]
    assert cached == [0, 8, 20, 32, 44]
    assert cached == [request.cached_tokens for request in again.engine(0).requests]


def _served(engine, prompt):
    request = engine.submit(prompt, 7)
    engine.run()
    return request


def test_requests_with_equal_prompts_generate_different_tokens():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64), "lru")
    passes = []
    kv.engine(0).on_pass(passes.append)
    for _ in range(2):
        kv.engine(0).submit([1, 2, 3, 4], 1)
    kv.engine(0).run()
    (done,) = passes
    assert len(set(done.tokens)) == 2


def test_consecutive_passes_of_an_engine_are_recorded_as_one_operation():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64, workers=2), "lru")
    first, second = kv.engine(0), kv.engine(1)
    request = first.submit([1, 2, 3, 4], 9)
    for _ in range(3):
        first.step()
    second.step()
    first.step()
    request.abort()
    first.run(until_ms=1000.0)
    assert [
        Submit(1, tail=(1, 2, 3, 4), output_tokens=9),
        RunPasses(3),
        RunPasses(1, worker=1),
        RunPasses(1),
        Abort(1),
        Run(1000.0),
    ] == [step for step, _ in kv.recording.recorded()]


def test_a_leak_is_cut_to_one_submitted_request(driven):
    kv = driven(requests=5)
    kv.engine(1).submit(kv.prompt(2), 3, 10_000.0)
    kv.judge()
    (leaked,) = kv.events.warnings
    found = reproduce(kv, leaked)
    assert (Submit(1, ((0, 1, 2, 3),), (), 1),) == found.steps


def test_a_reproduction_has_no_step_that_its_engine_would_refuse(faulty_backends, failure_of):
    """In a smaller cache the request does not fit; a reproduction has no step that raises."""
    assert faulty_backends
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=24), "names_one_twice")
    for number in range(20):
        kv.engine(0).submit([*range(100 * number, 100 * number + 20)], 7)
    kv.engine(0).run()
    kv.judge()
    found = reproduce(kv)
    assert found.profile.num_blocks < 24
    assert "block_not_found" in failure_of(found)


def test_events_held_until_a_pass_ends_are_judged_as_a_chain(driven):
    kv = driven(requests=5, engine={"events_visible": "pass_end"})
    assert all(event.chained for event in kv.recording.arrivals)
    assert kv.recording.arrivals
