"""Scenarios whose workers are driven by engines in virtual time: steps, expectations and refusals."""

from __future__ import annotations

import pytest

from pytest_kvmock import EngineProfile, EventRulesBroken, RouterHarness
from pytest_kvmock.contrib.scenarios import ScenarioFailure, load_scenarios, play
from pytest_kvmock.contrib.scenarios.writing import scenario_text
from pytest_kvmock.harness.reduce import Breach, reproduce
from pytest_kvmock.harness.reduce.program import Reproduction
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import Abort, Clear, Prefill, Restart, Run, RunPasses, Submit
from pytest_kvmock.values.strict_yaml import YamlError

PROFILE = EngineProfile(block_size=4, num_blocks=6, workers=2)


@pytest.fixture
def loaded(tmp_path):
    """Read the text of a scenario file that has one scenario."""

    def load(text):
        path = tmp_path / "x.kv.yaml"
        path.write_text(text)
        (scenario,) = load_scenarios(path, "x.kv.yaml")
        return scenario

    return load


@pytest.fixture
def played(loaded):
    """Play the text of a scenario file on a harness of the profile above."""

    def play_text(text, profile=PROFILE, backend="lineage", **others):
        with RouterHarness(profile, backend, **others) as harness:
            play(harness, loaded(text))
        return harness

    return play_text


def test_a_scenario_drives_engines(played):
    harness = played(
        """
        engine: {max_num_seqs: 1, performance_model: [10, 5]}
        steps:
        - submit: {request: a, tokens: 0..7, output_tokens: 3}
          expect: {requests: {a: waiting}, events: []}
        - submit: {request: b, tokens: 0..11, output_tokens: 2, arrival_ms: 12}
          expect: {metrics: {running: 0, waiting: 1, arriving: 1, active_blocks: 0, now_ms: 0}}
        - submit: {tokens: 50..57, worker: 1}
        - step: 1
          expect:
            requests: {a: {status: running, generated_tokens: 1}}
            events: [{stored: 2, parent: null}]
            metrics: {running: 1, waiting: 0, active_blocks: 3, now_ms: 15}
        - clear: 0
          expect: {refused: worker 0 is not cleared while requests are open}
        - step: {count: 2}
          expect: {requests: {a: finished, b: {status: waiting, cached_tokens: 0}}}
        - run: 30
          expect: {requests: {b: {status: running, cached_tokens: 8, preemptions: 0}}}
        - run:
          expect: {requests: {b: {status: finished, generated_tokens: 2}}, overlap: {tokens: 0..11, workers: {0: 3}}}
        - run: {worker: 1}
          expect: {overlap: {tokens: 50..57, workers: {1: 2}}}
        """
    )
    assert [request.status for request in harness.engine(0).requests] == ["finished", "finished"]


def test_a_scenario_can_abort_requests_and_restart_their_engine(played):
    played(
        """
        steps:
        - submit: {request: a, tokens: 0..7, output_tokens: 9}
        - submit: {request: b, tokens: 20..27, output_tokens: 9}
        - step: 1
        - abort: a
          expect: {requests: {a: aborted, b: running}, metrics: {running: 1, active_blocks: 3}}
        - restart: {worker: 0, announced: true}
          expect: {requests: {b: lost}, metrics: {running: 0, active_blocks: 0}}
        - submit: {request: a, tokens: 0..7}
        - run:
          expect: {requests: {a: {status: finished, cached_tokens: 0}}}
        """
    )


def test_an_engine_can_have_its_own_arguments(played):
    harness = played(
        """
        engine: {max_num_seqs: 3}
        steps:
        - engine: {worker: 1, max_num_batched_tokens: 4}
        - submit: {request: a, tokens: 0..7, worker: 1}
        - step: {worker: 1}
          expect: {requests: {a: {status: running, generated_tokens: 0}}}
        - run: {worker: 1}
        - run: {worker: 0}
        """
    )
    assert [
        (harness.engine(worker).args.max_num_seqs, harness.engine(worker).args.max_num_batched_tokens)
        for worker in (0, 1)
    ] == [(3, 8192), (3, 4)]


def test_engine_fields_of_a_scenario_override_those_of_the_file(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text(
        "engine: {max_num_seqs: 3, sglang: {schedule_policy: lpm}}\nscenarios:\n"
        "  a: {steps: [{run: }]}\n  b: {engine: {max_num_seqs: 4, speedup_ratio: 2}, steps: [{run: }]}\n"
    )
    a, b = load_scenarios(path)
    assert a.engine == {"max_num_seqs": 3, "sglang": {"schedule_policy": "lpm"}}
    assert b.engine == {"max_num_seqs": 4, "sglang": {"schedule_policy": "lpm"}, "speedup_ratio": 2}


def test_a_scenario_can_submit_a_prompt_of_hashes(played):
    played(
        "steps:\n- submit: {request: a, hashes: [7, 8], num_tokens: 10, output_tokens: 3}\n- run:\n"
        "  expect: {requests: {a: finished}, overlap: {hashes: [7, 8], workers: {0: 2}}}\n"
    )


def test_a_scenario_can_submit_a_request_with_a_planned_abort(played):
    played(
        "steps:\n- submit: {request: a, tokens: 0..3, output_tokens: 9, abort_after_tokens: 3}\n"
        "- submit: {request: b, tokens: 10..13, output_tokens: 9, abort_after_ms: 1}\n- run:\n"
        "  expect: {requests: {a: {status: aborted, generated_tokens: 3}, b: {status: aborted, generated_tokens: 0}}, "
        "metrics: {active_blocks: 0}}\n"
    )


FAILURES = [
    (("submit: {request: a, tokens: 0..3}\n  expect: {requests: {a: "
    "running}}"), "3: expect requests {'a': {'status': 'running'}}: got {'a': {'status': 'waiting'}}"),
    (("run:\n  expect: {requests: {a: "
    "running}}"), ("3: expect requests {'a': {'status': 'running'}}: got {'a': {'error': \"no request is named 'a'; "
    'known: none"}}')),
    ("run:\n  expect: {metrics: {waiting: 1}}", "3: expect metrics {'waiting': 1}: got {'waiting': 0}"),
    (("submit: {request: a, tokens: "
    "0..99}"), ("2: submit was refused: RequestTooLarge: a request of 100 + 1 tokens can never fit: 26 blocks are "
    "needed")),
    (("submit: {request: a, tokens: 0..3}\n- submit: {request: a, tokens: "
    "0..3}"), "3: submit was refused: ValueError: a request named 'a' is open already"),
    (("submit: {request: a, tokens: 0..3}\n- finish: "
    "a"), ("3: finish was refused: RequestError: finish on a request that is an engine's, which finishes it or aborts "
    "it; it is waiting")),
    (("prefill: {request: a, tokens: 0..3}\n- abort: "
    "a"), ("3: abort was refused: RequestError: abort on a request that is not an engine's: finish it; it is "
    "running")),
    (("submit: {request: a, tokens: 0..3}\n- run:\n- abort: "
    "a"), "4: abort was refused: RequestError: abort on a request that is finished"),
    ("abort: a", "2: abort was refused: ValueError: no request is named 'a'; known: none"),
    (("submit: {tokens: 0..3, arrival_ms: 7}\n- submit: {tokens: 0..3, arrival_ms: "
    "6}"), "3: submit was refused: ValueError: arrival_ms must be at least 7.0"),
    ("submit: {tokens: 0..3, priority: 7}", "2: submit was refused: ValueError: priority "),
    ("run: 7\n- run: 6\n  expect: {metrics: {now_ms: 6}}", "4: expect metrics {'now_ms': 6}: got {'now_ms': 7}"),
    (("engine: {max_num_seqs: 1}\n- engine: {max_num_seqs: "
    "2}"), ("3: engine was refused: ValueError: the engine of worker 0 exists already, with other arguments: "
    "max_num_seqs is 1, asked for 2")),
    ("submit: {tokens: 0..3, worker: 65536}", "2: submit was refused: ValueError: a worker id is an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "message"), FAILURES)
def test_a_scenario_stops_at_a_failed_expectation(played, steps, message):
    with pytest.raises(ScenarioFailure) as raised:
        played(f"steps:\n- {steps}\n")
    assert str(raised.value).startswith(f"x.kv.yaml:{message}")


def test_disabled_tiers_beyond_the_host_are_accepted(played):
    played("engine: {num_g3_blocks: null, enable_g4_storage: false, max_num_seqs: 1}\nsteps: [{run: }]")
    played("steps: [{engine: {worker: 0, enable_g4_storage: false}}]")


BAD = [
    (("engine: {max_num_seq: 3}\nsteps: [{run: "
    "}]"), ("1:10: engine: unknown key 'max_num_seq'; did you mean 'max_num_seqs'? known: engine_type, "
    "num_gpu_blocks, ")),
    (("engine: {max_num_seqs: 0}\nsteps: [{run: "
    "}]"), "1:24: max_num_seqs: max_num_seqs must be an integer of at least 1, or None, got 0"),
    (("engine: {num_g3_blocks: 5}\nsteps: [{run: "
    "}]"), "1:10: engine: num_g3_blocks=5: there are no tiers beyond the host; leave it out"),
    (("steps: [{engine: {worker: 0, enable_g4_storage: "
    "true}}]"), "1:30: engine: enable_g4_storage=True: there are no tiers beyond the host; leave it out"),
    (("engine: {sglang: {schedule_polici: lpm}}\nsteps: [{run: "
    "}]"), "1:19: sglang: unknown key 'schedule_polici'; did you mean 'schedule_policy'? known: "),
    (("engine: {sglang: {schedule_policy: random}}\nsteps: [{run: "
    "}]"), "1:18: sglang: sglang.schedule_policy: got 'random'; allowed: fifo, fcfs, lpm"),
    (("engine: {sglang: lpm}\nsteps: [{run: "
    "}]"), "1:18: sglang: got 'lpm'; allowed: a mapping of keys schedule_policy, "),
    ("engine: fast\nsteps: [{run: }]", "1:9: engine: got 'fast'; allowed: a mapping of keys "),
    ("engine: {performance_model: [10]}\nsteps: [{run: }]", "1:29: performance_model: "),
    (("steps: [{engine: {worker: 0, block_sizes: "
    "3}}]"), "1:30: engine: unknown key 'block_sizes'; did you mean 'block_size'? known: worker, engine_type, "),
    ("steps: [{submit: {request: a}}]", "1:18: submit: exactly one of tokens, hashes is needed"),
    (("steps: [{submit: {tokens: 1, output_tokens: "
    "0}}]"), "1:45: output_tokens: got 0; allowed: an integer from 1 to 1000000"),
    (("steps: [{submit: {tokens: 1, arrival_ms: "
    "-1}}]"), "1:42: arrival_ms: got -1; allowed: a number of at least 0 (milliseconds)"),
    (("steps: [{submit: {tokens: 1, arrival_ms: "
    "1e999}}]"), "1:42: arrival_ms: got inf; allowed: a number of at least 0 (milliseconds)"),
    ("steps: [{step: 0}]", "1:16: step: got 0; allowed: an integer of at least 1"),
    ("steps: [{run: soon}]", "1:15: run: got 'soon'; allowed: a number"),
    ("steps: [{run: 1, expect: {requests: {a: done}}}]", "1:41: a: got 'done'; allowed: waiting, "),
    ("steps: [{run: 1, expect: {requests: {a: {}}}}]", "1:41: a: nothing is expected; known: status, cached_tokens, "),
    ("steps: [{run: 1, expect: {metrics: {}}}]", "1:36: metrics: nothing is expected; known: running, "),
    (("steps: [{run: 1, expect: {cached_tokens: "
    "4}}]"), ("1:27: expect: only prefill, resume and serve return 'cached_tokens'; that of an engine's request "
        "is expected "
    "as {requests: ")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_an_invalid_engine_scenario_is_one_error_with_its_place(loaded, text, message):
    with pytest.raises(YamlError) as raised:
        loaded(text)
    assert str(raised.value).startswith(f"x.kv.yaml:{message}")
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------ writing


def written(tmp_path, *steps, **fields):
    breach = Breach("event_id_gap", is_error=True, worker=(0, 0), block=None, story="")
    path = tmp_path / "saved.kv.yaml"
    path.write_text(scenario_text(Reproduction(breach, "requests", "lru", PROFILE, steps, **fields), "all"))
    (scenario,) = load_scenarios(path)
    return scenario


def test_each_engine_operation_is_written_as_an_equivalent_step(tmp_path):
    steps = (
        Submit("a", (1, (5, 6, 7, 8)), 1, output_tokens=4),
        Submit(2, (11, 12), None, worker=1, hashed=True, arrival_ms=12.5),
        Prefill(3, (1,)),
        RunPasses(),
        RunPasses(2, 1),
        Abort("a"),
        Restart(announced=True),
        Run(400.5, 1),
        Run(None, 1),
        Clear(1),
        Run(),
    )
    scenario = written(tmp_path, *steps)
    played, done = RouterHarness(PROFILE, "lru"), RouterHarness(PROFILE, "lru")
    play(played, scenario)
    interpreter = Interpreter(done)
    for step in steps:
        interpreter.do(step)
    assert [entry.event for entry in done.events] == [entry.event for entry in played.events]
    assert [kv.engine(1).now_ms for kv in (played, done)] == [400.5, 400.5]


def test_engine_arguments_are_written_to_a_scenario_file(tmp_path):
    common = {"max_num_seqs": 3, "sglang": {"schedule_policy": "lpm"}, "performance_model": (1, 2.5)}
    scenario = written(tmp_path, Run(), engine=common, engines=(((1, 0), {"speedup_ratio": 2.0}),))
    assert common == scenario.engine
    assert scenario.steps[0].given == {"worker": (1, 0), "fields": {"speedup_ratio": 2.0}}


def test_a_saved_engine_reproduction_breaks_the_same_rule(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_kvmock.harness.reduce.requests.RequestCutter._make_plain", lambda cutter: None)
    kv = RouterHarness(PROFILE, "lru", engine={"max_num_seqs": 2})
    kv.engine(0).submit(range(8), 3)
    kv.worker(1).manager.use([5])
    kv.engine(0).run()
    kv.drop_next()
    kv.engine(0).submit(range(20, 36), 3)
    kv.engine(0).submit(range(40, 56), 3)
    kv.engine(0).run()
    kv.judge()
    found = reproduce(kv, level="requests")
    path = tmp_path / "saved.kv.yaml"
    path.write_text(scenario_text(found, "saved"))
    (scenario,) = load_scenarios(path)
    assert scenario.engine == {"max_num_seqs": 2}
    harness = RouterHarness(EngineProfile().replace(**scenario.profile), "lru", allow=scenario.allow)
    with pytest.raises((AssertionError, EventRulesBroken)), harness:
        play(harness, scenario)
    assert found.rule in [problem.rule for problem in harness.events.problems]
