"""Files below vLLM's host, Mooncake below vLLM, LMCache's server and the objects of SGLang's HiCache, as recorded.

The data is a part of the recordings that `play_stores.py` plays, with every kind of step.
"""

import json

import pytest
from depth import each_parameter
from players import player

stores = player("engines/vllm/play_stores.py")

FILES = "vllm_0.33.0_file_tier.json.gz"
MOONCAKE = "vllm_0.33.0_mooncake_store.json.gz"
LMCACHE = "lmcache_0.5.7rc2_events.json.gz"
KEYS = "sglang_0.5.23_mooncake_keys.json.gz"


@pytest.mark.parametrize("file", [FILES, MOONCAKE, LMCACHE, KEYS])
@each_parameter
def test_every_step_equals_the_recorded_step(recording, file):
    found = [pair for pair in stores.played(recording(file)) if pair[1] is not None]
    assert found == []


def spoilt(program, name, value):
    """Return the program with another value in its first step that has the given field."""
    program = json.loads(json.dumps(program))
    step = next(entry for entry in program["log"] if entry[0] == "step" and entry[2].get(name))
    step[2][name] = value
    return program


@pytest.mark.parametrize("name", ["events", "file_jobs", "file_done", "lookups"])
def test_the_player_finds_a_changed_step_over_files(recording, name):
    recorded = recording(FILES)
    program = next(each for each in recorded["scenarios"] if each["name"] == "files_vanish")
    found = stores.file_tier_difference(spoilt(program, name, []), recorded["fields"])
    assert f"  {name}: recorded []" in found


def test_the_player_finds_a_file_that_was_not_deleted(recording):
    recorded = recording(FILES)
    program = next(each for each in recorded["scenarios"] if each["name"] == "files_deleted")
    kept = [entry for entry in program["log"] if entry[0] != "delete"]
    assert stores.file_tier_difference({**program, "log": kept}, recorded["fields"]) is not None


@pytest.mark.parametrize("name", ["events", "runs", "saves", "loads", "asked"])
def test_the_player_finds_a_changed_step_over_mooncake(recording, name):
    recorded = recording(MOONCAKE)
    program = next(
        each for each in recorded["programs"] if any(entry[0] == "step" and entry[2].get(name) for entry in each["log"])
    )
    found = stores.mooncake_difference(spoilt(program, name, []), recorded["fields"])
    assert f"  {name}: recorded []" in found


def test_the_player_finds_a_reset_that_should_have_ended_the_engine(recording):
    recorded = recording(MOONCAKE)
    dead = next(each for each in recorded["programs"] if any(entry[0] == "died" for entry in each["log"]))
    calm = [["reset", *entry[1:2], False, *entry[3:]] if entry[0] == "reset" else entry for entry in dead["log"]]
    assert stores.mooncake_difference({**dead, "log": calm}, recorded["fields"]) is not None


def test_the_player_finds_a_changed_read_of_a_server(recording):
    recorded = recording(LMCACHE)
    program = next(each for each in recorded["programs"] if each["config"]["log"])
    log = [[*entry[:2], []] if entry[0] == "read" else entry for entry in program["log"]]
    assert "read: recorded []" in stores.lmcache_difference({**program, "log": log}, recorded["fields"])


def test_the_player_finds_a_changed_vector_of_a_chain(recording):
    recorded = recording(LMCACHE)
    assert stores.chain_difference("00" * 32, recorded["chain"]).startswith("the root is ")
    (size, count, _), *_ = recorded["chain"]
    assert "recorded ['00']" in stores.chain_difference(recorded["none_hash"], [[size, count, ["00"]]])


def test_the_player_finds_a_changed_key_and_a_changed_name(recording):
    recorded = recording(KEYS)
    assert "recorded 'other'" in stores.keys_difference({**recorded["layouts"][0], "prefix": "other"})
    page_hash, name = recorded["event_names"][0]
    assert stores.names_difference({**recorded, "event_names": [[page_hash, name + 1]]}) is not None
