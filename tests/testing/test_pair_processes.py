"""Router processes in front of P/D pairs: a wrong one fails the contract by name, and the right one passes it."""

from itertools import count

import pytest
from depth import few, takes_long
from pair_contracts import DIALECTS, contract_of
from process_runs import outcome_of
from wrong_pair_router import BUGS

from pytest_kvmock.testing import ProcessContract
from pytest_kvmock.testing.process import process_judge
from pytest_kvmock.testing.process.process_pairs import ProcessPairs
from pytest_kvmock.testing.process.router_process import ServedEngine, ServedEngines

SCENES = [
    "a_prompt_has_two_legs_that_meet",
    "bodies_of_both_legs_are_made_of_the_clients",
    "no_prefill_engine_is_not_passed_over_in_silence",
    "clients_that_leave_hold_nothing",
    "the_load_of_prefill_ends_with_its_leg",
    "requests_at_once_are_not_mixed_up",
    "several_children_leave_nothing",
    "a_leg_that_fails_ends_the_other_one",
]
OF_ROUTERS_BY_EVENTS = ["legs_meet_at_one_rank", "engines_that_join_change_no_load"]
"""Scenes for which `test_pairs_by_events.py` has wrong routers."""

WRONG = {
    "sends_all_to_decode": (SCENES[0], "it has no prefill leg, and the decode engine computed all of it"),
    "decodes_alone_in_silence": (SCENES[2], "the decode engine computed the prompt, and the client got 200"),
    "sends_both_without_parameters": (SCENES[0], "expected a true do_remote_decode"),
    "adds_usage_of_both_legs": (SCENES[0], "usage has completion_tokens 6; expected 5"),
    "says_decode_cached": (SCENES[0], "its decode leg came with remote_prefill_cached_tokens None"),
    "holds_load_of_prefill": (SCENES[4], "its load is held to the end of the request"),
    "skips_short_prompts": (SCENES[0], "a prompt of 5 tokens: it has no prefill leg"),
    "leaves_legs_of_clients_that_left": (SCENES[3], "of its legs is open in an engine still"),
    "sends_without_a_room_while_prefill_is_down": (SCENES[2], "without bootstrap room"),
    "makes_one_room": (SCENES[5], "room 7 was given to"),
    "passes_n_on": (SCENES[6], "blocks are held that no leg asks for: prefill engine"),
    "passes_n_on_in_rooms": (SCENES[6], "expected a refusal (400), or 2 choices"),
    "leaves_the_limit_of_prefill": (SCENES[1], "its prefill leg has max_tokens 5; expected 1"),
    "leaves_the_stream_of_the_client": (SCENES[1], "its prefill leg has stream True; expected False"),
    "makes_no_max_tokens_none_at_decode": (SCENES[1], "its decode leg has max_tokens 1; expected None"),
    "waits_for_the_other_leg": (SCENES[7], "prefill engines answer 500: the client got no answer"),
    "makes_rooms_of_each_leg": (SCENES[5], "and no other one: legs of a request must share it"),
    "replaces_the_host": (SCENES[0], "its decode leg came with remote_host '127.0.0.1'; expected '10.0.0."),
    "waits_for_decode_though_refused": (SCENES[7], "prefill engines answer 400: the client got no answer"),
}


def test_each_bug_of_the_small_router_has_a_test():
    assert {bug for bug, way in BUGS.items() if way} == set(WRONG)


@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_router_of_pairs_fails_by_name(bug, seed, monkeypatch):
    monkeypatch.setattr(process_judge, "_seeds", count(1000 * seed + 1))
    scene, why = WRONG[bug]
    way = BUGS[bug]
    outcome = outcome_of(contract_of(bug, way), f"test_{scene}", DIALECTS[way])
    assert outcome.startswith("failed: ")
    assert why in outcome
    assert "\n" not in outcome


@takes_long
@pytest.mark.parametrize("way", DIALECTS)
@pytest.mark.parametrize("scene", SCENES)
def test_a_right_router_of_pairs_passes(way, scene):
    outcome = outcome_of(contract_of("right", way, timeout_s=10.0), f"test_{scene}", DIALECTS[way])
    assert outcome == "" or outcome.startswith("skipped: Of_right: both legs end together")


def test_a_right_router_may_fall_back_if_it_declares_it():
    contract = contract_of("right_falls_back", "vllm", falls_back=True, timeout_s=10.0)
    assert outcome_of(contract, f"test_{SCENES[2]}") == ""


@pytest.mark.parametrize(
    ("traits", "why"),
    [
        ({"hand_over": "nixl"}, "unknown hand_over 'nixl'"),
        ({"falls_back": 1}, "falls_back must be True or False, got 1"),
        ({"threshold": -1}, "threshold must be an integer of at least 0"),
    ],
)
def test_a_wrong_declaration_is_reported(traits, why):
    assert why in contract_of("right", "vllm", **traits).wrong_declaration()


@pytest.mark.parametrize(
    ("dialect", "why"),
    [
        ("sglang-0.5.23", "hand_over 'vllm' is not that of engines of sglang-0.5.23; see dialects"),
        ("vllm-0.24", "hand_over 'vllm' over vllm-0.24: pairs are those of vLLM 0.33.0; got backend 'vllm' of version"),
    ],
)
def test_a_dialect_whose_engine_has_no_such_pairs_is_refused_in_one_line(dialect, why):
    with pytest.raises(pytest.fail.Exception) as failed:
        contract_of("right", "vllm")().test_several_children_leave_nothing(dialect)
    assert str(failed.value).startswith(f"Of_right: {why}")
    assert "\n" not in str(failed.value)


def test_a_contract_without_a_hand_over_has_no_scenes_of_pairs():
    scenes = {name.removeprefix("test_") for name in vars(ProcessPairs) if name.startswith("test_")}
    assert scenes == {*SCENES, *OF_ROUTERS_BY_EVENTS}
    assert all(getattr(ProcessContract, f"test_{scene}") is None for scene in scenes)
    assert all(callable(getattr(contract_of("right", "vllm"), f"test_{scene}")) for scene in scenes)


def test_engines_can_be_selected_by_role():
    rows = [ServedEngine(0, "http://a", (), (), role="prefill"), ServedEngine(1, "http://b", (), (), role="decode")]
    engines = ServedEngines.at_a_port(rows, "m", 16)
    assert [each.url for each in engines.of("decode")] == ["http://b"]
    with pytest.raises(ValueError, match="no engine has the role 'both'; roles here: 'prefill', 'decode'"):
        engines.of("both")
