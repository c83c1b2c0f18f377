"""SGLang's pairs as `roles` of a test: checked like any worker, and warned about at the end."""

import pytest

from pytest_kvmock import EngineProfile, RouterHarness

TEN = list(range(10))
SMALL = EngineProfile(block_size=4, num_blocks=16)
SGLANG = {"hand_over": "sglang"}
CACHES = {**SGLANG, "disaggregation_decode_enable_radix_cache": True, "num_reserved_decode_tokens": 4}


def harness_of(backend="sglang", prefill=SGLANG, decode=CACHES):
    return RouterHarness(SMALL, backend, roles={"prefill": prefill, "decode": decode})


def test_the_events_of_an_sglang_pair_pass_all_checks_of_the_harness():
    with harness_of() as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        served = p.serve(TEN, hand_over=True)
        assert harness.overlap(TEN) == {}
        request = d.load(TEN, served.hand_over)
        assert harness.overlap(TEN) == {0: 2}
        request.end_transfer()
        assert harness.overlap(TEN) == {0: 2, 1: 2}
        request.decode(3)
        request.finish()
        assert (p.traits.names_received, d.traits.names_received) == ("never", "joins the batch")
    assert harness.events.problems == []


def test_a_decode_engine_without_a_radix_cache_has_no_event_in_the_harness():
    with harness_of(decode={**SGLANG, "num_reserved_decode_tokens": 4}) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        with d.load(TEN, p.serve(TEN, hand_over=True).hand_over) as request:
            request.end_transfer()
        assert {each.event.worker_id for each in harness.events} == {p.worker_id}
        assert d.traits.names_received == "never"
    assert harness.events.problems == []


def test_a_role_can_have_its_own_draft_model_and_blocks():
    with harness_of(prefill={**SGLANG, "backend": "sglang_eagle"}) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        with d.load(TEN, p.serve(TEN, hand_over=True).hand_over) as request:
            request.end_transfer()
    assert [worker.backend for worker in (p, d)] == ["sglang_eagle", "sglang"]
    assert harness.events.problems == []


def test_blocks_held_at_the_end_of_a_test_are_warned_about_with_request_and_phase():
    with harness_of() as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    observed = [problem.observed for problem in harness.events.problems if problem.rule == "leased_blocks"]
    assert observed == [
        "blocks are held for 1 leg: 3 of 1-engine-0-0 (kept)",
        "blocks are held for 1 leg: 3 of 0-engine-1-0 (loading)",
    ]


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (
            {"both": SGLANG},
            r"roles\['both'\]: worker_type of a pair with hand_over='sglang' must be 'prefill' or 'decode'",
        ),
        ({"decode": {**SGLANG, "kv_lease_duration": 3}}, r"roles\['decode'\]: unknown key 'kv_lease_duration'"),
        ({"decode": {**SGLANG, "bootstrap_timeout": -1}}, r"roles\['decode'\]: bootstrap_timeout must be"),
        ({"decode": {**SGLANG, "backend": "vllm"}}, "hand_over='sglang' is for SGLang's unified cache"),
    ],
)
def test_invalid_roles_are_refused(roles, why):
    with pytest.raises(ValueError, match=why):
        RouterHarness(SMALL, "sglang", roles=roles)
