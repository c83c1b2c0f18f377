"""Router processes over stores shared by workers: wrong ones fail by name, and right ones pass."""

import sys
from pathlib import Path

import pytest
from depth import each_parameter, takes_long
from process_runs import OfPlainRouter, ask, outcome_of, patient, source_of

PROGRAM = Path(__file__).with_name("store_router.py")
STORES = {"disk": {"kind": "files", "workers": [0, 1]}}
OWN = "test_a_block_of_a_store_is_no_worker_s_own"
OUTLIVES = "test_a_store_outlives_what_happens_to_its_workers"
LOWERED = "test_a_promise_that_was_broken_is_lowered"


def by_owner(self, prompt):
    answer = ask(self.url, "POST", "/blocks", {"prompt": prompt, "by_owner": True})
    return {"disk": {engine.worker: blocks for engine, blocks in zip(self.engines, answer, strict=True)}}


def of_design(name, **traits):
    """Return the contract of the plain router with a design for stores."""

    def command(self, engines):
        return [sys.executable, PROGRAM, name, str(engines.block_size), *map(source_of, engines)]

    own = {"command": command, "ready": patient, "timeout_s": 2.0, "stores": STORES, "blocks_by_owner": by_owner}
    return type(f"Of_{name}", (OfPlainRouter,), own | traits)


RIGHT = ("counts_a_store", "leaves_stores_out", "lowers_after_a_miss")


@pytest.mark.parametrize(
    ("design", "name"),
    [
        ("counts_a_store", OWN),
        ("counts_a_store", OUTLIVES),
        ("leaves_stores_out", OWN),
        ("lowers_after_a_miss", LOWERED),
    ],
)
def test_a_right_process_over_stores_passes(design, name):
    assert outcome_of(of_design(design, timeout_s=10.0), name) == ""


@takes_long
@pytest.mark.parametrize("name", [OWN, OUTLIVES, LOWERED])
@pytest.mark.parametrize("design", RIGHT)
def test_a_right_process_over_stores_passes_all_tests(design, name):
    assert outcome_of(of_design(design, timeout_s=10.0), name) == ""


FAR = {"far": {"kind": "mooncake", "workers": [0, 1]}}


def of_far(self, prompt):
    return {"far": by_owner(self, prompt)["disk"]}


@takes_long
@pytest.mark.parametrize("name", [OWN, OUTLIVES])
def test_a_right_process_passes_over_mooncake(name):
    far = of_design("counts_mooncake", timeout_s=10.0, stores=FAR, blocks_by_owner=of_far)
    assert outcome_of(far, name) == ""


def test_a_process_that_takes_mooncake_for_the_device_is_found():
    far = of_design("takes_mooncake_for_the_device", stores=FAR, blocks_by_owner=None)
    text = "to the store 'far', and no device has them: worker 0 rank 0: the router knows 4 blocks, 0 are held"
    assert text in outcome_of(far, OWN)


WRONG = {
    "credits_the_publisher": (
        OWN,
        "it promises worker 1 0 blocks of one from the store 'disk'; expected 4: all workers",
    ),
    "credits_all": (OWN, "it promises worker 2 4 blocks of one from the store 'disk'; expected 0: it cannot load"),
    "takes_a_store_for_the_device": (OWN, "and no device has them: worker 0 rank 0: the router knows 4 blocks, 0 are"),
    "clears_a_store_with_a_worker": (OUTLIVES, "and was cleared: it promises worker 1 0 blocks; expected 4, as before"),
    "jumps_holes": (OWN, "it promises worker 0 5 blocks of one from the store 'disk'; expected at most 4"),
}


@pytest.mark.parametrize("design", WRONG)
def test_a_wrong_process_over_stores_is_found(design):
    name, text = WRONG[design]
    assert text in outcome_of(of_design(design), name)


@takes_long
def test_a_process_that_reports_nothing_about_stores_is_found_by_its_picks():
    silent = of_design("credits_the_publisher", blocks_by_owner=None)
    text = "all 16 went to worker 0; expected some at the others: workers 0, 1 can load them alike"
    assert text in outcome_of(silent, OWN)


def test_unjudged_properties_of_stores_are_reported():
    text = "stores is None: what it makes of stores that workers share was not judged; stores, and which worker can "
    assert text in outcome_of(of_design("counts_a_store", stores=None), OWN)
    text = "it has no blocks_by_owner(prompt): what it promises of a store was not judged"
    assert text in outcome_of(of_design("counts_a_store", blocks_by_owner=None), OUTLIVES)
    assert "tiers are those of vLLM 0.33.0; got version '0.28.0': what it" in outcome_of(
        of_design("counts_a_store"), OWN, "vllm-0.28"
    )
    assert "stores that workers share (stores)" in OfPlainRouter().unjudged_text(with_rare=True)


@takes_long
def test_a_broken_promise_paid_twice_is_noted_and_is_no_failure():
    told = []
    counts = of_design(
        "counts_a_store", timeout_s=10.0, _note_unjudged=lambda self, *text, **about: told.append((text, about))
    )
    assert outcome_of(counts, LOWERED) == ""
    text = "4 of 4 promises of deleted blocks were paid for twice (an engine's answer, cached_tokens, shows a miss)"
    assert told == [((text,), {"about": "the store 'disk'"})]


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"stores": {"disk": {"kind": "file", "workers": [0]}}}, "stores['disk']: unknown kind 'file'; did you mean"),
        ({"stores": {"disk": {"kind": "files", "workers": [7]}}}, "stores: worker ids must be below 7, got 7"),
        ({"hears_events": False}, "stores is for a process that hears events, and hears_events is False"),
    ],
)
@each_parameter
def test_a_wrong_declaration_of_stores_is_refused(declared, text):
    assert text in type("Mine", (OfPlainRouter,), {"stores": STORES} | declared).wrong_declaration()
