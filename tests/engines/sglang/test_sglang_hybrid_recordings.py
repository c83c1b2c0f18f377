"""The recordings of SGLang 0.5.23's hybrid cache, step by step: answers, events, sizes and the shape of the tree."""

import gzip
import json

import pytest
from players import player

play_hybrid = player("engines/sglang/play_hybrid.py")

FILE = "sglang_0.5.23_hybrid.json.gz"
KINDS = ["both", "mamba", "mamba_nobuf", "swa", "swa_eagle", "swa_ungated"]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_the_recorded_answers_events_sizes_and_trees(recording, kind):
    programs = [program for program in recording(FILE) if program["kind"] == kind]
    assert len(programs) >= 2
    for program in programs:
        assert list(play_hybrid.Player.differences(program)) == [], program["seed"]


def test_every_recorded_program_is_played(recording):
    assert {program["kind"] for program in recording(FILE)} == {*KINDS}


def test_the_player_prints_differences_and_exits_with_1(recording, tmp_path, capsys):
    program, other = recording(FILE)[:2]
    program["steps"][3]["sizes"][0] += 1
    path = tmp_path / "programs.json.gz"
    path.write_bytes(gzip.compress(json.dumps([program, other]).encode()))
    assert play_hybrid.main([path]) == 1
    first, recorded, ours, last = capsys.readouterr().out.splitlines()
    assert first == f"programs.json.gz: {program['kind']} {program['seed']}: step 3 {program['steps'][3]['op'][0]}:"
    assert recorded == f"  sizes: recorded {program['steps'][3]['sizes']}"
    assert ours.startswith("         ours     [")
    assert last == "1 of 2 programs equal"
