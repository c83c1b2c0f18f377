"""Native offload compared with the real scheduler and connector of vLLM 0.33.0, step by step.

The data is a part of the recordings that `play_vllm_offload.py` plays: programs that together contain every kind of
step.
"""

import pytest
from players import player

difference = player("engines/vllm/play_vllm_offload.py").difference

FILE = "vllm_0.33.0_offload.json.gz"


def name_of(program):
    return program.get("name", program.get("seed"))


@pytest.fixture(scope="module")
def recorded(recording):
    return recording(FILE)


def test_every_step_equals_the_recorded_step(recorded):
    found = {name_of(each): difference(each, recorded["fields"]) for each in recorded["programs"]}
    assert dict.fromkeys(found) == found


def test_the_recordings_cover_every_reset_answer_chunk_size_and_lookup_result(recorded):
    programs = recorded["programs"]
    steps = [entry[1] for program in programs for entry in program["log"] if entry[0] == "step"]
    answers = {entry[3] for program in programs for entry in program["log"] if entry[0] == "reset"}
    assert answers == {True, False, "RuntimeError"}
    assert {program["config"]["blocks_per_chunk"] for program in programs} == {1, 2, 3}
    assert any(program["config"].get("async") for program in programs)
    assert any(program["config"]["extra"].get("eviction_policy") == "arc" for program in programs)
    assert any(program["config"]["extra"].get("store_threshold") for program in programs)
    assert any(len(program["config"].get("groups", ())) > 1 for program in programs)
    looked = {(hit is None, waits) for step in steps for _, _, hit, waits in step.get("lookups", ())}
    assert looked == {(True, False), (False, False), (False, True)}
    assert any(step.get("preempted") and step.get("flush") for step in steps)
    own = [{job[0] for job in step.get("stores", ())} & {*step.get("flush", ())} for step in steps]
    assert any(own)  # a store is flushed in its own step


@pytest.mark.parametrize("name", ["lookups", "scheduled", "loads", "stores", "flush", "done", "received", "events"])
def test_the_player_finds_a_difference_in_any_field_of_a_step(recorded, name):
    program = next(
        each for each in recorded["programs"] if any(entry[0] == "step" and entry[1].get(name) for entry in each["log"])
    )
    number = next(i for i, entry in enumerate(program["log"]) if entry[0] == "step" and entry[1].get(name))
    log = program["log"].copy()
    log[number] = ["step", {**log[number][1], name: []}]
    found = difference({**program, "log": log}, recorded["fields"])
    assert found.startswith(f"entry {number}:")
    assert f"  {name}: recorded []" in found


def test_the_player_finds_a_different_final_state(recorded):
    program = {**recorded["programs"][0], "final": {"gpu": [], "cpu": []}}
    assert difference(program, recorded["fields"]).startswith("final: ")
