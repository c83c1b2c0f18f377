"""A scenario stops at the first line whose expectation fails, and reports the actual value."""

from __future__ import annotations

import pytest

from pytest_kvmock import EngineProfile, EventRulesBroken, RadixIndex, Removed, RouterHarness
from pytest_kvmock.contrib.scenarios import ScenarioFailure, load_scenarios, play

PROFILE = EngineProfile(block_size=4, num_blocks=4, workers=2)


@pytest.fixture
def played(tmp_path):
    def play_text(text, **others):
        path = tmp_path / "x.kv.yaml"
        path.write_text(text)
        (scenario,) = load_scenarios(path, "x.kv.yaml")
        with RouterHarness(PROFILE, "lineage", **others) as harness:
            play(harness, scenario)
        return harness

    return play_text


FAILURES = [
    ("use: [1]\n  expect: {allocated: 2}", "3: expect allocated 2: got 1"),
    ("use: [1]\n  expect: {active: [2]}", "3: expect active [2]: got [1]"),
    ("use: [1]\n  expect: {active: {1: 2}}", "3: expect active {1: 2}: got {1: 1}"),
    ("use: [p]\n  expect: {active: 0}", "3: expect active 0: got 1"),
    ("use: [p]\n  expect: {active: [q]}", "3: expect active ['q']: got ['p']"),
    ("use: [1]\n  expect: {inactive: [1]}", "3: expect inactive [1]: got []"),
    ("use: [1]\n  expect: {inactive: 1}", "3: expect inactive 1: got 0"),
    ("use: [1]\n- deref: [1]\n  expect: {eviction_order: [2]}", "4: expect eviction_order [2]: got [1]"),
    ("use: [1]\n  expect: {events: []}", "3: expect events []: got [{'stored': [1], 'parent': None}]"),
    (
        "use: [1]\n  expect: {events: [{stored: [1], parent: 2}]}",
        "3: expect events [{'stored': [1], 'parent': 2}]: got [{'stored': [1], 'parent': None}]",
    ),
    (
        "event: {stored: [1], tier: host}\n  expect: {events: [{stored: [2]}]}",
        "3: expect events [{'stored': [2]}]: got [{'stored': [1], 'tier': 'host_pinned'}]",
    ),
    (
        "event: {stored: [1], tier: host}\n  expect: {events: [{stored: [1], tier: g3}]}",
        "3: expect events [{'stored': [1], 'tier': 'disk'}]: got [{'stored': [1], 'tier': 'host_pinned'}]",
    ),
    (
        "event: {stored: [1], tier: host}\n  expect: {events: []}",
        "3: expect events []: got [{'stored': [1], 'parent': None, 'tier': 'host_pinned'}]",
    ),
    (
        "use: [1]\n  expect: {events: [{stored: [1], tier: g2}]}",
        "3: expect events [{'stored': [1], 'tier': 'host_pinned'}]: got [{'stored': [1], 'tier': 'device'}]",
    ),
    ("use: [1]\n  expect: {events: [cleared]}", "3: expect events [{'cleared': True}]: got [{'stored': [1]"),
    (
        "serve: {tokens: 0..7, worker: 1}\n  expect: {overlap: {tokens: 0..7, workers: {0: 2}}}",
        "3: expect overlap {0: 2}: got {1: 2}",
    ),
    ("prefill: {request: a, tokens: 0..7}\n  expect: {cached_tokens: 4}", "3: expect cached_tokens 4: got 0"),
    ("deref: [7]", "2: deref was refused: MoveError: "),
    ("deref: [7]\n  expect: {refused: nonsense}", "3: expect refused 'nonsense': got 'MoveError: "),
    ("use: [7]\n  expect: {refused: MoveError}", "3: expect refused 'MoveError': it was not"),
    ("finish: a", "2: finish was refused: ValueError: no request is named 'a'; known: none"),
    (
        "prefill: {request: a, tokens: 0..3}\n- prefill: {request: a, tokens: 0..3}",
        "3: prefill was refused: ValueError: a request named 'a' is open already",
    ),
    ("prefill: {request: a, tokens: 0..3}\n- clear: 0", "3: clear was refused: RequestError: worker 0 is not cleared"),
    ("serve: {tokens: 0..99}", "2: serve was refused: OutOfBlocks: "),
    ("serve: {tokens: 0..3, worker: 65536}", "2: serve was refused: ValueError: a worker id is an integer"),
    ("remove_worker: 77", "2: remove_worker was refused: ValueError: there is no worker 77; there are: 0, 1"),
    ("fault: {lose: {fault: double}}", "2: fault was refused: TypeError: "),
    ("event: {removed: [7]}", "2: block_not_found\n\n  event 0  worker 0  Removed block 7\n"),
    ("event: {removed: [7]}\n  expect: {problems: []}", "3: expect problems []: got ['block_not_found']\n\n  event 0"),
    ("use: [1]\n  expect: {problems: [block_not_found]}", "3: expect problems ['block_not_found']: got []"),
]


@pytest.mark.parametrize(("steps", "message"), FAILURES)
def test_a_scenario_fails_at_the_line_of_a_failed_expectation(played, steps, message):
    with pytest.raises(ScenarioFailure) as raised:
        played(f"steps:\n- {steps}\n")
    assert str(raised.value).startswith(f"x.kv.yaml:{message}")


def test_every_kind_of_step_has_the_expected_effect(played):
    harness = played("""
steps:
- use: [1, p]
  expect: {allocated: 2, active: {1: 1, p: 1}, events: [{stored: [1], worker: 0}]}
- promote: {partial: p, block: 2, parent: 1, local_hash: 22}
  expect: {events: [{stored: [2], parent: 1}], active: {1: 1, 2: 1}}
- deref: [2, 1]
  expect: {inactive: [1, 2], eviction_order: [2, 1]}
- clear: 0
  expect: {events: [cleared], inactive: 0}
- prefill: {request: a, tokens: 0..8, worker: 1}
  expect: {active: 3, events: [{stored: 2, parent: null, worker: 1}]}
- decode: {request: a, tokens: [9, 10, 11, 12]}
  expect: {active: 4, events: [{stored: 1}]}
- preempt: a
  expect: {active: 0, inactive: 3}
- resume: a
  expect: {cached_tokens: 9}
- finish: a
- restart: {worker: 1, announced: true}
  expect: {active: 0, inactive: 0}
- serve: {hashes: 1..2, output_tokens: 1, worker: 1}
  expect: {events: [{stored: 2}]}
- event: {stored: [50, 51], local_hashes: [5, 6], worker: 7}
- event: {removed: [51], worker: 7}
- event: {cleared: true, worker: 7}
- event: {stored: [60], worker: 7, id: 9}
  expect: {problems: [event_id_gap]}
- expect: {worker: 1, inactive: 2, overlap: {hashes: 1..3, workers: {1: 2}}}
""")
    assert harness.events.total == 10


def test_expected_overlaps_are_answered_by_the_index_under_test(played):
    index = RadixIndex()
    played("steps: [{serve: {tokens: 0..3}, expect: {overlap: {tokens: 0..3, workers: {0: 1}}}}]", index=index)
    assert len(index.dump_events()) == 1


ON_A_WORKER = [
    "use: {blocks: [1], worker: 65536}",
    "deref: {blocks: [1], worker: 65536}",
    "promote: {partial: p, block: 1, worker: 65536}",
    "prefill: {request: a, tokens: 0..3, worker: 65536}",
    "serve: {tokens: 0..3, worker: 65536}",
    "engine: {worker: 65536}",
    "submit: {tokens: 0..3, worker: 65536}",
    "step: {worker: 65536}",
    "run: {worker: 65536}",
    "tick: {now_ms: 1, worker: 65536}",
    "clear: 65536",
    "restart: 65536",
    "worker: 65536",
]


@pytest.mark.parametrize("step", ON_A_WORKER)
def test_worker_steps_are_refused_for_a_sink(played, step):
    with pytest.raises(ScenarioFailure) as raised:
        played(f"steps:\n- event: {{stored: [1], worker: 65536}}\n- {step}\n")
    refused = "was refused: ValueError: a worker id is an integer from 0 to 65535 here, got 65536"
    assert str(raised.value) == f"x.kv.yaml:3: {step.partition(':')[0]} {refused}"


def test_a_scenario_worker_can_have_another_backend(played):
    harness = played("steps: [{worker: {id: 5, backend: lru}}, {use: {blocks: [1], worker: 5}}, {use: [1]}]")
    assert [harness.worker(number).manager.backend for number in (5, 0)] == ["lru", "lineage"]


def test_expected_problems_can_be_listed_in_any_order(played):
    for order in ("[wrong_hash, over_capacity]", "[over_capacity, wrong_hash]"):
        played(f"""
steps:
- event: {{stored: [8, 9], worker: 65536, chained: true, num_blocks: 1}}
  expect: {{problems: {order}}}
""")


def test_an_expected_problem_does_not_cover_a_later_one(played):
    with pytest.raises(ScenarioFailure, match=r"^x\.kv\.yaml:4: block_not_found\n"):
        played("""steps:
- event: {removed: [7]}
  expect: {problems: [block_not_found]}
- event: {removed: [8]}
""")


def test_a_scenario_failure_is_reported_once_and_later_errors_by_the_harness(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text("steps:\n- event: {removed: [7]}\n")
    (scenario,) = load_scenarios(path, "x.kv.yaml")
    harness = RouterHarness(PROFILE, "lineage")
    with pytest.raises(ScenarioFailure, match="block_not_found"):
        play(harness, scenario)
    harness.assert_no_event_errors()
    harness.apply(Removed((8,)))
    with pytest.raises(EventRulesBroken, match="block_not_found"):
        harness.assert_no_event_errors()


def test_a_step_at_a_later_sink_creates_the_sinks_before_it(played):
    harness = played("steps:\n- event: {stored: [1], worker: 65538}\n- event: {stored: [2], worker: 65536}\n")
    assert [entry.event.worker_id for entry in harness.events] == [65538, 65536]
    assert harness.make_sink().worker_id == 65539


def test_the_local_hash_of_a_negative_block_id_has_the_same_bits(played):
    harness = played("steps: [{event: {stored: [-5, 6], worker: 65536}}]")
    assert harness.events[0].event.event.data.tokens_hashes == (2**64 - 5, 6)


def test_a_scenario_plays_on_a_harness_with_another_seed(played):
    assert played("profile: {seed: 7}\nsteps: [{use: [1]}]").events.total == 1


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ("profile: {block_size: 16, workers: 2}", "the scenario needs block_size=16, the harness has 4"),
        ("needs_index: true", "the scenario needs an index under test, and the harness has none"),
    ],
)
def test_an_incompatible_harness_is_refused(played, top, message):
    with pytest.raises(ValueError, match=rf"^x\.kv\.yaml:1:1: {message}$"):
        played(f"{top}\nsteps: [{{use: [1]}}]")


def test_problems_of_an_allowed_rule_do_not_fail_a_scenario(played):
    played("allow: [block_not_found]\nsteps: [{event: {removed: [7]}}]", allow=["block_not_found"])


def test_the_problem_of_an_injected_fault_can_be_expected(played):
    played("""
steps:
- fault: {lose: {n: 1, kind: stored, worker: 0}}
- use: [1, 2]
  expect: {events: [], problems: [event_id_gap]}
- use: [3]
  expect: {events: [{stored: [3]}], problems: []}
- fault: {clear: 0}
  expect: {problems: [engine_drift]}
""")


def test_an_unused_fault_fails_the_scenario(played):
    with pytest.raises(EventRulesBroken, match=r"kv_harness\.faults\.lose\(2\): 1 of 2 injected"):
        played("""
steps:
- fault: {lose: 2}
- use: [1]
  expect: {problems: [event_id_gap]}
""")


def test_an_unknown_argument_of_a_fault_is_refused_with_its_line(played):
    with pytest.raises(ScenarioFailure, match=r"^x\.kv\.yaml:2: fault was refused: TypeError: .*'speed'"):
        played("steps:\n- fault: {lose: {speed: 1}}")


def test_the_overlap_of_a_tier_can_be_expected_by_its_name(played):
    played("""
steps:
- event: {stored: [1, 2], worker: 65536, tier_blocks: {host: 2, disk: 1}}
- event: {stored: [3], parent: 2, worker: 65536, tier: host_pinned}
  expect:
    overlap: {hashes: [1, 2, 3], workers: {65536: 1}, tier: host}
- event: {stored: [9, 8], worker: 65536, tier: g3}
  expect: {problems: [over_capacity]}
- event: {stored: [3], parent: 2, worker: 65536}
  expect:
    overlap: {hashes: [1, 2, 3], workers: {65536: 3}}
""")


def test_events_can_be_published_for_sinks_ranks_and_tiers(played):
    harness = played("""
steps:
- worker: {id: 5, backend: lru}
- event: {stored: [1], worker: [5, 1], id: 0, tier: host_pinned}
- event: {stored: [7], worker: 65537, token_ids: [0..3], chained: true}
  expect: {problems: [wrong_hash]}
- remove_worker: 5
- event: {stored: [9], worker: 5}
""")
    assert [
        ((entry.event.worker_id, entry.event.event.dp_rank), entry.storage_tier.name) for entry in harness.events
    ] == [((5, 1), "HOST_PINNED"), ((65537, 0), "DEVICE"), ((5, 0), "DEVICE")]


def test_a_warning_of_a_scenario_event_is_not_attributed_to_the_engine(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text("steps: [{event: {stored: [1]}}, {event: {stored: [1]}}, {event: {removed: [1]}}]")
    (scenario,) = load_scenarios(path)
    harness = RouterHarness(PROFILE, "multi_lru")  # which also causes this warning without a fault
    harness.worker(0)
    play(harness, scenario, allow=["duplicate_store"])
    (warning,) = [each for each in harness.events.warnings if each.rule == "evicted_and_restored"]
    assert (warning.rule, harness.inside.is_engines_own(warning)) == ("evicted_and_restored", False)
