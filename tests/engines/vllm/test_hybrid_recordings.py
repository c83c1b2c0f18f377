"""Engines with several cache groups compared with the real `KVCacheManager` and `Scheduler` of vLLM 0.33.0.

The data is a part of the recordings that `play_hybrid.py` plays: one program for each geometry of layers, cut
after 130 steps.
"""

import pytest
from players import player

PLAYER = player("engines/vllm/play_hybrid.py")
Player, difference = PLAYER.Player, PLAYER.difference

FILE = "vllm_0.33.0_hybrid.json.gz"


def test_every_geometry_gives_the_recorded_answers_tables_queues_and_events(recording):
    programs = recording(FILE)
    assert len({program["geometry"] for program in programs}) == 41
    assert [found for program in programs if (found := difference(program)) is not None] == []


def test_the_recordings_cover_sparse_and_salted_stored_preemption_resets_and_junctions(recording):
    steps = [step for program in recording(FILE) for step in program["steps"]]
    stored = [event for step in steps for event in step["events"] if event[0] == "S"]
    assert any(not event[3] for event in stored)  # no block of the span was kept
    assert any(0 < len(event[3]) < event[5] // event[4] for event in stored)
    assert any(event[-1] and isinstance(event[-1], list) for event in stored)  # salted
    assert any(step["op"][0] == "preempt" for step in steps)
    assert any(step["op"][0] == "end" and step["copies"] for step in steps)
    assert any(step["op"] == ["reset"] and step["ok"] for step in steps)
    assert any(step.get("junction", 0) > step.get("computed_tokens", 0) > 0 for step in steps)


@pytest.mark.parametrize("name", ["events", "free", "crc", "computed_tokens"])
def test_the_player_finds_a_difference_in_any_field_of_a_step(recording, name):
    program = next(program for program in recording(FILE) if program["geometry"] == "gpt_oss")
    number = next(number for number, step in enumerate(program["steps"]) if name in step)
    program["steps"][number] = {**program["steps"][number], name: ["other"]}
    assert f"step {number}" in difference(program)
    assert name in difference(program)


def test_the_sizes_derived_from_the_groups_equal_the_recorded_ones(recording):
    for program in recording(FILE):
        facts = {name: value for name, value in program["facts"].items() if name != "kinds"}
        assert facts == Player(program).facts(), program["geometry"]
