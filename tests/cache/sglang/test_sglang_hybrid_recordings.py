"""The recordings of SGLang 0.5.23's hybrid cache, step by step: answers, events, sizes and the shape of the tree."""

import gzip
import json

import pytest
from players import player

play_hybrid = player("cache/sglang/play_hybrid.py")

FILE = "sglang_0.5.23_hybrid.json.gz"
KINDS = ["both", "mamba", "mamba_nobuf", "swa", "swa_eagle", "swa_ungated"]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_the_recorded_answers_events_sizes_and_trees(recording, kind):
    programs = [program for program in recording(FILE) if program["kind"] == kind]
    assert 2 <= len(programs)
    for program in programs:
        assert [] == list(play_hybrid.differences(program)), program["seed"]


def test_every_recorded_program_is_played(recording):
    assert {*KINDS} == {program["kind"] for program in recording(FILE)}


def test_the_player_says_what_differs_and_fails(recording, tmp_path, capsys):
    program, other = recording(FILE)[:2]
    program["steps"][3]["sizes"][0] += 1
    path = tmp_path / "programs.json.gz"
    path.write_bytes(gzip.compress(json.dumps([program, other]).encode()))
    assert 1 == play_hybrid.main([path])
    first, recorded, ours, last = capsys.readouterr().out.splitlines()
    assert f"{program['kind']} {program['seed']} step 3 {program['steps'][3]['op'][0]}:" == first
    assert f"  sizes: recorded {program['steps'][3]['sizes']}" == recorded
    assert ours.startswith("         ours     [")
    assert "1 of 2 programs equal" == last
