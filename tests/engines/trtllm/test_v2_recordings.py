"""The recordings of TensorRT-LLM's V2 manager, step by step: answers, events, free slots and the queues at the end.

The data is a part of the recordings that `play_trtllm.py` plays: 15 random programs that together contain every kind of
step, and 21 programs by hand.
"""

import pytest
from players import player

PLAYER = player("engines/trtllm/play_trtllm.py")

FILE = "trtllm_v2.json.gz"


@pytest.mark.parametrize("kind", ["programs", "v2"])
def test_every_program_has_the_recorded_answers_events_and_queues(recording, kind):
    programs = recording(FILE)[kind]
    assert {"programs": 15, "v2": 21}[kind] == len(programs)
    for program in programs:
        assert list(PLAYER.differences(program)) == [], program.get("seed", program.get("name"))


def test_the_recordings_cover_all_levels_hash_algorithms_layer_groups_and_answers(recording):
    programs = recording(FILE)["programs"]
    configs = [program["config"] for program in programs]
    events = [event for program in programs for step in program["log"] if step[0] == "flush" for event in step[1]]
    assert {(0, 1), (1, 0), (1, 2)} <= {tuple(event[5]) for event in events if event[3] == "U"}
    assert {config["hash_algo"] for config in configs} == {"v1_block_key", "v2_sha256", "v2_sha256_64"}
    assert {1, 2, 3} == {len(config["slots"]) for config in configs} == {len(each["life_cycles"]) for each in configs}
    assert any(sinks for config in configs for _, sinks in config["life_cycles"])
    answers = {(step[0], step[-1]) for program in programs for step in program["log"] if isinstance(step[-1], bool)}
    assert {(call, answer) for call in ("resume", "resize_context") for answer in (True, False)} <= answers


@pytest.mark.parametrize("call", ["prepare_context", "resize_context", "free", "flush"])
def test_the_player_finds_a_difference_in_the_answer_of_any_call(recording, call):
    program = recording(FILE)["programs"][0]
    number = next(number for number, step in enumerate(program["log"]) if step[0] == call)
    program["log"][number][-1] = "other"
    assert (number, call, "other") == next(PLAYER.differences(program))[:3]


@pytest.mark.parametrize("name", ["v1_block_key", "v2_sha256", "v2_sha256_64"])
def test_the_player_finds_a_wrong_name_in_a_chain_of_hashes(recording, name):
    row = recording("trtllm_hashes.json")[0]
    assert PLAYER.hash_differences(row) == []
    row[name] = ["other"]
    assert [("hash", name, ["other"])] == [each[:3] for each in PLAYER.hash_differences(row)]
