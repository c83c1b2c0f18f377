"""P/D pairs compared step by step with the real schedulers and connectors of vLLM 0.33.0.

The data is a part of the recordings that `play_pairs.py` plays: all scenarios, and some programs of each kind of
random pairs.
"""

import pytest
from players import player

play = player("engines/pairs/play_pairs_vllm.py").play

FILE = "vllm_0.33.0_pairs.json.gz"


@pytest.fixture(scope="module")
def programs(recording):
    return {each["name"]: each for each in recording(FILE)}


def steps_of(programs):
    return [entry[3] for program in programs for entry in program["log"] if entry[0] == "step"]


@pytest.mark.parametrize(
    "kind", ["scenarios", "pull", "async", "both", "hybrid", "tight", "mooncake_scenarios", "mooncake"]
)
def test_every_step_of_a_pair_equals_the_recorded_step(programs, kind):
    found = {name: play(program) for name, program in programs.items() if name.split()[0] == kind}
    assert found
    assert found == {name: [] for name in found}


def test_the_recordings_contain_every_kind_of_step_fate_and_finish(programs):
    logs = [entry for program in programs.values() for entry in program["log"]]
    assert {entry[0] for entry in logs} >= {"add", "reject", "abort", "reset", "died", "step"}
    fates = {entry[6][0] for entry in logs if entry[0] == "add" and len(entry) > 6 and entry[6]}
    assert fates >= {"ok", "error", "setup", "handshake", "bootstrap"}
    finishes = {answer[2] for step in steps_of(programs.values()) for answer in step.get("answers", ())}
    assert finishes == {None, "length", "stop", "error"}
    configs = [config for program in programs.values() for config in program["config"].values()]
    assert {config["role"] for config in configs} == {"kv_producer", "kv_consumer", "kv_both"}
    assert any(len(config.get("groups", ())) > 1 for config in configs)
    assert any(config.get("async") for config in configs)


@pytest.mark.parametrize(
    "name",
    ["lookups", "scheduled", "beats", "reads", "leased", "sent", "received", "answers", "events", "tables", "status"],
)
def test_the_player_finds_a_difference_in_any_field_of_a_step(programs, name):
    program = programs["scenarios prefix_on_d"]
    number = next(i for i, entry in enumerate(program["log"]) if entry[0] == "step" and entry[3].get(name))
    log = program["log"].copy()
    log[number] = [*log[number][:3], {**log[number][3], name: []}]
    (found,) = play({**program, "log": log})
    assert found.startswith(f"entry {number} ")
    assert f"\n    {name}: recorded None" in found


def test_the_player_finds_a_different_final_state(programs):
    program = {**programs["scenarios plain"], "final": {"P": [], "D": []}}
    (found,) = play(program)
    assert found.startswith("final: ")
