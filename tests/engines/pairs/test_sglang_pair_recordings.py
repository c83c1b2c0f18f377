"""P/D pairs compared step by step with the queues and the cache of SGLang 0.5.23.

The data is a part of the recordings that `play_pairs.py` plays: programs of prefill and decode
engines that together cover everything in the others.
"""

import pytest
from players import player

play = player("engines/pairs/play_pairs_sglang.py").play

FILE = "sglang_0.5.23_pairs.json.gz"


@pytest.fixture(scope="module")
def programs(recording):
    return recording(FILE)


def of_kind(programs, kind):
    return [program for program in programs if program["kind"] == kind]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_step_of_an_engine_equals_the_recorded_step(programs, kind):
    found = {program["seed"]: play(program) for program in of_kind(programs, kind)}
    assert len(found) >= 10
    assert found == {seed: [] for seed in found}


def test_the_recordings_contain_every_finish_arrival_and_option(programs):
    steps = [step for program in programs for step in program["steps"]]
    said = {said[1] for step in steps for said in step.get("said", ()) if isinstance(said, list)}
    assert said == {"length", "error", "abort"}
    arrived = {str(step["op"][2]) for step in steps if step["op"][0] == "arrive"}
    assert arrived == {"True", "False", "ok", "failed", "room"}
    prefills = of_kind(programs, "prefill")
    assert {program["overlap"] for program in prefills} == {True, False}
    assert {program["policy_alloc"] for program in prefills} == {"early", "prefill_complete"}
    assert {program["optimistic"] for program in prefills} >= {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *[("prefill", field) for field in ("batch", "sent", "said", "status", "ok", "hit")],
        *[("decode", field) for field in ("got", "queue", "failed", "lost", "joined", "over", "done")],
        *[(kind, field) for kind in ("prefill", "decode") for field in ("events", "sizes", "tree")],
    ],
)
def test_the_player_finds_a_difference_in_any_field_of_a_step(programs, kind, field):
    program, number = next(
        (program, number)
        for program in of_kind(programs, kind)
        for number, step in enumerate(program["steps"])
        if step.get(field)
    )
    steps = program["steps"].copy()
    steps[number] = {**steps[number], field: "another"}
    found = play({**program, "steps": steps})
    assert [line.split(":")[:2] for line in found] == [[f"step {number} {steps[number]['op'][0]}", f" {field}"]]


@pytest.mark.parametrize(
    ("option", "value", "seed"),
    [
        ("overlap", False, 1011),
        ("optimistic", 0, 1035),
        ("buffers", 8, 1013),
        ("max_live", 9, 1035),
        ("reserved", 0, 1064),
    ],
)
def test_the_player_finds_a_difference_for_a_changed_engine_option(programs, option, value, seed):
    program = next(each for each in programs if option in each and seed in (each["seed"], None))
    assert program[option] != value
    assert play({**program, option: value})
