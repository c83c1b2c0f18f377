"""Programs, scenario files and reproductions whose prompts have keys (adapter, salt, images, session)."""

import pytest
from scenario_files import load_scenarios, play, scenario_failure, scenario_text

from pytest_kvmock import (
    BACKENDS,
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    RouterEvent,
    RouterHarness,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.values.programs.interpreter import Interpreter, calls
from pytest_kvmock.values.programs.operations import Finish, Prefill, Program, Run, Serve, Submit
from pytest_kvmock.values.prompt_keys import PromptKeys
from pytest_kvmock.values.strict_yaml import YamlError

KEYS = PromptKeys("a", "s", (("cat", 2, 4),), "x")
PROFILE = EngineProfile(block_size=4, num_blocks=16)
PROGRAM = Program(
    Prefill("r", (1, 2), keys=KEYS),
    Finish("r"),
    Serve((1, 2), 1, output_tokens=4, keys=PromptKeys(lora_name="b")),
    Submit("q", (3, 4), keys=PromptKeys(session_id="y")),
    Run(),
)


def published(kv):
    return [(entry.event, entry.extra) for entry in kv.events]


def played(do):
    kv = RouterHarness(PROFILE, "lineage")
    do(kv)
    return published(kv)


def by_steps(program):
    def do(kv):
        interpreter = Interpreter(kv)
        for step in program:
            interpreter.do(step)

    return do


def test_a_program_with_prompt_keys_has_an_equivalent_repr_and_equivalent_calls():
    names = {"Program": Program, "PromptKeys": PromptKeys}
    names |= {kind.__name__: kind for kind in (Prefill, Finish, Serve, Submit, Run)}
    assert eval(repr(PROGRAM), names) == PROGRAM
    text = "\n".join(calls(PROGRAM, 4))
    assert (
        'Prompt([1, 1, 1, 1, 2, 2, 2, 2], lora_name="a", cache_salt="s", multimodal=(("cat", 2, 4),), session_id="x")'
        in text
    )
    expected = played(by_steps(PROGRAM))
    assert played(lambda kv: exec(text, {"kv": kv, "Prompt": Prompt})) == expected
    assert {(extra or {}).get("lora_name") for _, extra in expected} == {"a", "b", None}


def test_replaying_a_recorded_program_with_prompt_keys_publishes_the_same_events():
    kv = RouterHarness(PROFILE, "lineage")
    by_steps(PROGRAM)(kv)
    recorded = [operation for operation, _ in kv.recording.recorded()]
    assert [KEYS, PromptKeys(lora_name="b"), PromptKeys(session_id="y")] == [
        step.keys for step in recorded if isinstance(step, (Prefill, Submit))
    ]
    assert played(by_steps(recorded)) == published(kv)


# --------------------------------------------------------------------------------------------------- scenario files

SCENARIO = """
profile: {block_size: 4, num_blocks: 16}
backends: [lineage, vllm]
scenarios:
  adapters share nothing:
    steps:
      - serve: {tokens: 0..8, lora_name: a, cache_salt: s, multimodal: [[cat, 2, 4]], session_id: x}
        expect: {events: [{stored: 2}]}
      - prefill: {request: r, tokens: 0..8, lora_name: b}
        expect: {cached_tokens: 0, overlap: {tokens: 0..8, lora_name: b, workers: {0: 2}}}
      - finish: r
      - submit: {tokens: 0..8, cache_salt: t, output_tokens: 1}
      - run:
        expect:
          overlap: {tokens: 0..8, cache_salt: t, workers: {0: 2}}
      - serve: {tokens: 0..8, lora_name: a, cache_salt: s, multimodal: [[cat, 2, 4]]}
        expect: {cached_tokens: 8, overlap: {tokens: 0..8, workers: {}}}
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "one.kv.yaml"
        path.write_text(text, encoding="utf-8")
        return load_scenarios(path)

    return load


@pytest.mark.parametrize("backend", ["lineage", "vllm"])
def test_a_scenario_file_can_contain_prompt_keys(load, backend):
    (scenario,) = load(SCENARIO)
    with RouterHarness(PROFILE, backend) as kv:
        play(kv, scenario)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("serve: {tokens: 0..8, lora_name: 7}", "lora_name: got 7; allowed: a string"),
        ("serve: {tokens: 0..8, lora_name: ''}", "lora_name must be a string that is not empty"),
        ("serve: {tokens: 0..8, multimodal: [[cat, 2]]}", "multimodal has items"),
        ("serve: {hashes: 0..8, cache_salt: s}", "'cache_salt' belongs to 'tokens'"),
        ("serve: {tokens: 0..8, lora_nam: a}", "unknown key 'lora_nam'; did you mean 'lora_name'"),
        ("event: {removed: [1], extra: {lora_name: a}}", "'extra' belongs to 'stored'"),
    ],
)
def test_invalid_prompt_keys_in_a_scenario_file_are_refused(load, wrong, message):
    with pytest.raises(YamlError, match=message):
        load(f"scenarios: {{one: {{steps: [{wrong}]}}}}")


# ---------------------------------------------------------------------------------------------------- reproductions


class IgnoresAdapters(RadixIndex):
    """An index that ignores the events of adapter "bad"."""

    def apply(self, event):
        if (event.extra or {}).get("lora_name") != "bad":
            super().apply(event)


def failure_of(found, index):
    module = {}
    exec(compile(found.as_test(), "pasted", "exec"), module)
    with pytest.raises(EventRulesBroken) as raised:
        module["test_reproduction"](index)
    return str(raised.value)


@pytest.mark.parametrize("level", ["events", "requests"])
def test_a_reproduction_contains_the_prompt_keys_that_matter(load, level):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=24), "lineage", IgnoresAdapters())
    for number in range(30):
        name = {"lora_name": "bad"} if number == 20 else {"lora_name": f"a{number % 3}", "session_id": "x"}
        kv.worker(0).serve(kv.prompt(2, **name))
    kv.judge()

    found = reproduce(kv, level=level)

    assert (level, 1) == (found.level, found.size)
    assert '"bad"' in found.as_test()
    assert "session_id" not in found.as_test()
    assert "index_drift" in failure_of(found, IgnoresAdapters())
    (scenario,) = load(scenario_text(found, "cut"))
    with pytest.raises(scenario_failure(), match="index_drift"):
        play(RouterHarness(found.profile, "lineage", IgnoresAdapters()), scenario)


def test_a_reproduction_leaves_out_irrelevant_prompt_keys():
    class DropsAll(RadixIndex):
        def apply(self, event):
            pass

    kv = RouterHarness(EngineProfile(block_size=4), "lineage", DropsAll())
    kv.worker(0).serve(kv.prompt(2, lora_name="a"))
    kv.judge()
    found = reproduce(kv, level="requests")
    assert "lora_name" not in found.as_test()


def test_a_wrong_hash_of_a_keyed_prompt_is_reproduced():
    right = block_hashes(range(8), 4, lora_name="a")
    wrong = [right[0], right[1] ^ 1]
    kv = RouterHarness(EngineProfile(block_size=4), "lineage")
    sink = kv.make_sink(chained=True)
    for local, name in ((right, "a"), (wrong, "a")):
        data = Stored(None, tuple(sequence_hashes(local)), tuple(local))
        event = KvCacheEvent(kv.by_hand.next_id(sink.worker_id, 0), data)
        sink(RouterEvent(0, event, token_ids=[range(4), range(4, 8)], extra={"lora_name": name}))
    kv.judge()
    assert "wrong_hash" in [problem.rule for problem in kv.events.problems]
    found = reproduce(kv)
    assert found.rule == "wrong_hash"


def test_every_backend_is_covered_by_the_list_of_known_engines():
    """Decide for each new backend which keys its block hashes include."""
    known = {
        "lineage",
        "lru",
        "multi_lru",
        "hash_cache",
        "vllm",
        "vllm_0_19",
        "sglang",
        "sglang_gpt_oss",
        "sglang_gemma4",
        "sglang_llama4",
        "sglang_qwen3_next",
        "sglang_kimi_linear",
        "sglang_deepseek_v4",
        "mocker_sglang_1_6",
        "trtllm",
        "trtllm_v2",
    }
    hybrid = {name for name, spec in BACKENDS.items() if spec.group}  # hashed as by `vllm`
    assert known | hybrid == set(BACKENDS)
