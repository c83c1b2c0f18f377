"""Recordings of the real manager with its offload engine (dynamo-mocker 1.2.1, `kvbm-offload`), step by step."""

from collections import Counter

import pytest
from cache_helpers import OffloadPlayer, new_manager

FILES = {"offload": 24, "offload_swaps": 40, "offload_programs": 56}


@pytest.mark.parametrize("file", FILES)
def test_a_recorded_program_gives_the_recorded_answers_events_and_counts(recording, file):
    programs = recording(f"{file}.json.gz")["programs"]
    assert FILES[file] == len(programs)
    for program in programs:
        player = OffloadPlayer.of(program)
        for number, (operation, *expected) in enumerate(program["steps"]):
            where = (program.get("name", program.get("seed")), number, operation)
            assert player.play(operation) == expected, where


def test_the_recordings_contain_each_outcome_of_a_swap_in(recording):
    found = Counter()
    for file in ("offload", "offload_swaps"):
        for program in recording(f"{file}.json.gz")["programs"]:
            answers = [answer for (kind, *_), answer, *_ in program["steps"] if kind == "swap_in"]
            found.update(answer if isinstance(answer, str) else answer[0] for answer in answers)
    assert found == {"no_hits": 345, "scheduled": 47, "blocked": 31}


@pytest.mark.parametrize("file", FILES)
def test_recorded_programs_account_for_every_slot(recording, file):
    for program in recording(f"{file}.json.gz")["programs"]:
        player = OffloadPlayer.of(program)
        manager, engine = player.manager, player.manager.offload
        for operation, *_ in program["steps"]:
            player.play(operation)
            held = engine.quarantined + sum(len(swap.slots) for swap in player.swaps.values())
            assert held + len(manager.active_blocks) == manager.num_active_blocks
            assert len(manager.inactive_blocks()) == manager.num_inactive_blocks


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
def test_the_worked_example_gives_the_same_steps_under_every_policy(recording, backend):
    program = recording("offload.json.gz")["programs"][0]
    assert program["name"] == "quarantine, then a second cycle"
    player = OffloadPlayer.of({**program, "backend": backend})
    assert [step[1:] for step in program["steps"]] == [player.play(operation) for operation, *_ in program["steps"]]


def test_without_an_engine_a_tick_does_nothing():
    manager = new_manager("lineage", 4, 4)
    manager.use([1, 2])
    events = list(manager.sink.events)
    manager.tick(1e9)
    assert (events, 2, None) == (manager.sink.events, manager.num_active_blocks, manager.offload_deadline())
