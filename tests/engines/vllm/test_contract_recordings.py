"""Full reports, context parallelism, resets, adapters, `SimpleCPUOffloadConnector` and load streams, as recorded.

The data is a part of the recordings that `play_contracts.py` plays.
"""

import json

import pytest
from depth import each_parameter
from players import player

contracts = player("engines/vllm/play_contracts.py")

VLLM = "vllm_0.33.0_small_contracts.json.gz"
GROUPS = "vllm_0.33.0_full_reports.json.gz"
LOAD = "sglang_0.5.23_load.json.gz"


@pytest.mark.parametrize("file", [VLLM, GROUPS, LOAD])
@each_parameter
def test_every_step_equals_the_recorded_step(recording, file):
    found = [pair for pair in contracts.played(recording(file)) if pair[1] is not None]
    assert found == []


def with_another_event(program):
    """Return the program with another name in its first event."""
    program = json.loads(json.dumps(program))
    step = next(entry for entry in program["log"] if entry[0] == "step" and entry[-1]["events"])
    step[-1]["events"][0] = ["C"]
    return program


def test_the_player_finds_a_changed_event(recording):
    recorded = recording(VLLM)
    for program in (*recorded["programs"][1:3], recorded["scenarios"][0]):
        found = contracts.difference(with_another_event(program), recorded["fields"])
        assert "events: recorded [{'type': 'AllBlocksCleared'}" in found


def test_the_player_finds_an_engine_that_should_have_died(recording):
    recorded = recording(VLLM)
    dead = next(each for each in recorded["programs"] if each["log"][-1] == ["died"])
    calm = [[*entry[:4], None, *entry[5:]] if entry[0] == "add" else entry for entry in dead["log"]]
    assert contracts.difference({**dead, "log": calm}, recorded["fields"]) is not None


def test_the_player_finds_a_changed_load_stream_and_a_changed_port(recording):
    recorded = recording(LOAD)
    stream = json.loads(json.dumps(next(each for each in recorded["streams"] if each["enabled"])))
    message = next(entry for entry in stream["log"] if entry[5])[5][0]
    message[1] = "00000000000000ff"
    assert "00000000000000ff" in contracts.stream_difference(stream)
    rows = [row for row in recorded["ranges"] if row[4]]
    assert contracts.ranges_difference([[*rows[0][:4], [rows[0][4][0], 1], False]]) is not None
