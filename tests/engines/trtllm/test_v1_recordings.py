"""The recordings of TensorRT-LLM's V1 manager, step by step: answers, events, free blocks and the queues at the end.

The data is a part of the recordings that `play_trtllm.py` plays: 17 random programs that together contain every kind of
step, 21 programs by hand, and 24 chains of hashes.
"""

import gzip
import json

import pytest
from players import player

PLAYER = player("engines/trtllm/play_trtllm.py")

FILE = "trtllm_v1.json.gz"


@pytest.mark.parametrize("kind", ["programs", "v1"])
def test_every_program_has_the_recorded_answers_events_and_queues(recording, kind):
    programs = recording(FILE)[kind]
    assert {"programs": 17, "v1": 21}[kind] == len(programs)
    for program in programs:
        assert list(PLAYER.differences(program)) == [], program.get("seed", program.get("name"))


def test_every_recorded_chain_has_the_recorded_names(recording):
    rows = recording("trtllm_hashes.json")
    assert {True, False} == {row["lora_id"] is None for row in rows} == {row["salt"] is None for row in rows}
    assert [found for row in rows if (found := PLAYER.hash_differences(row))] == []


def test_the_recordings_cover_level_changes_ties_windows_and_a_full_buffer(recording):
    programs = recording(FILE)["programs"]
    events = [event for program in programs for step in program["log"] if step[0] == "flush" for event in step[1]]
    updated = [event for event in events if event[2] == "U"]
    assert {(0, 1), (1, 0)} <= {tuple(event[4]) for event in updated if event[4]}
    assert any(event[5] for event in updated)
    assert any(sum(program["ties"]) for program in programs)
    assert {program["config"]["removed_batching"] for program in programs} == {0, 1}
    assert {len(program["config"]["windows"]) for program in programs} == {1, 2}
    assert any(program["config"]["event_buffer_max_size"] == 3 for program in programs)


@pytest.mark.parametrize("call", ["add", "add_token", "free", "flush"])
def test_the_player_finds_a_difference_in_the_answer_of_any_call(recording, call):
    program = recording(FILE)["programs"][0]
    number = next(number for number, step in enumerate(program["log"]) if step[0] == call)
    program["log"][number][-1] = "other"
    assert (number, call, "other") == next(PLAYER.differences(program))[:3]


def test_the_player_prints_differences_and_exits_with_1(recording, tmp_path, capsys):
    recorded = recording(FILE)
    path = tmp_path / "programs.json.gz"
    recorded["programs"][1]["final"]["free"] = {}
    path.write_bytes(gzip.compress(json.dumps(recorded).encode()))
    assert PLAYER.main([path]) == 1
    first, was, ours, last = capsys.readouterr().out.splitlines()
    assert first == f"programs.json.gz: {recorded['programs'][1]['seed']}: step final, queues:"
    assert was.startswith("  recorded {'queues'")
    assert ours.startswith("  ours     {'queues'")
    assert last == "37 of 38 programs equal"
