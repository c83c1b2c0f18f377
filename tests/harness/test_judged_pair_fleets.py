"""A fleet of P/D pairs over the workers of a harness: verdict, an index per role, ranks, refused options."""

from collections import Counter

import pytest
from depth import each_parameter, worth_its_time

from pytest_kvmock import EngineProfile, RadixIndex, RouterHarness
from pytest_kvmock.engines.vllm.pairs.vllm_side import VllmSide
from pytest_kvmock.fleets import LeastLoaded, PairLink, synthetic_trace
from pytest_kvmock.harness.reduce import NotReduced, reproduce
from pytest_kvmock.testing import RightRouter

SIZE = 16
PROFILE = EngineProfile(block_size=SIZE, num_blocks=400)
TWO = {"prefill": 2, "decode": 2}
SGLANG = {"hand_over": "sglang", "num_blocks": 400}
CACHES = {**SGLANG, "disaggregation_decode_enable_radix_cache": True, "num_reserved_decode_tokens": 32}


def harness(roles=TWO, backend="vllm", **options):
    return RouterHarness(PROFILE, backend, roles=roles, **options)


def trace(count=30, seed=1, **options):
    sizes = {"groups": 5, "prefix_blocks": (2, 8), "turns": (1, 3), "input_tokens": (SIZE, 8 * SIZE), **options}
    return list(synthetic_trace(count, seed=seed, block_size=SIZE, output_tokens=(2, 24), interval_ms=8, **sizes))


def right(kv, backend="vllm", kind=RightRouter):
    return kind([*kv.workers], copies=backend == "vllm")


def by_role(**indexes):
    return {"prefill": RadixIndex(count_copies=True), "decode": RadixIndex(count_copies=True), **indexes}


def rules(kv):
    kv.judge()
    return Counter(problem.rule for problem in kv.events.problems if problem.cause is None)


# -------------------------------------------------------------------------------------------------- the verdict


@each_parameter
@pytest.mark.parametrize("hand_over", ["vllm", "vllm-mooncake", "sglang"])
def test_a_right_router_of_pairs_has_no_problem(hand_over):
    backend = "sglang" if hand_over == "sglang" else "vllm"
    of_decode = {**CACHES, "workers": 2} if backend == "sglang" else {"hand_over": hand_over, "workers": 2}
    kv = harness({"prefill": {"hand_over": hand_over, "workers": 2}, "decode": of_decode}, backend)
    report = kv.fleet(right(kv, backend), link=PairLink(lambda tokens: tokens / 10)).run(trace())
    assert len(report.completed) == report.arrived
    assert report.roles["decode"].requests == 30
    assert rules(kv) == {}


def test_a_wrong_load_names_the_pick_at_which_it_was_found():
    class NeverEnds(RightRouter):
        def finished(self, request):
            if request.phase == "prefill":
                super().finished(request)

    kv = harness()
    kv.fleet(right(kv, kind=NeverEnds)).run(trace())
    assert rules(kv) == {"load_drift": 1}
    (problem,) = [each for each in kv.events.problems if each.rule == "load_drift"]
    assert problem.worker_id in (2, 3)
    assert "before the prefill pick for request" in problem.observed
    assert ", decode) at " in problem.observed


def test_an_engine_that_frees_too_early_after_an_abort_overwrites_blocks(monkeypatch):
    # sglang 24527: blocks are used again while the prefill engine still writes into them.
    end = VllmSide.end

    def end_and_free(side, leg, finish, *args, **options):
        params = end(side, leg, finish, *args, **options)
        if finish == "abort":
            side._driver.manager.free(leg.state)
        return params

    kv = harness()
    fleet = kv.fleet(right(kv), link=PairLink(lambda _: 200.0))
    fleet.abort_share(0.5, within_ms=300.0)
    report = fleet.run(trace())
    assert report.aborted > 5
    assert rules(kv) == {}

    monkeypatch.setattr(VllmSide, "end", end_and_free)
    kv = harness()
    fleet = kv.fleet(right(kv), link=PairLink(lambda _: 200.0))
    fleet.abort_share(0.5, within_ms=300.0)
    fleet.run(trace())
    assert set(rules(kv)) == {"overwritten_blocks"}


# ------------------------------------------------------------------------------------------- an index of each role


def test_each_role_may_have_its_own_index():
    index = by_role()
    kv = harness(index=index)
    fleet = kv.fleet(right(kv))
    fleet.at(100.0).restart(1)
    report = fleet.run(trace())
    assert report.beliefs == ()
    assert rules(kv) == {}
    assert index["prefill"].num_blocks(0, 0) > 0
    assert index["prefill"].num_blocks(2, 0) == 0
    assert index["decode"].num_blocks(2, 0) > 0


def test_an_index_of_one_role_that_loses_an_event_drifts_at_a_worker_of_that_role():
    class Forgetful(RadixIndex):
        given = 0

        def apply(self, event):
            self.given += 1
            if self.given != 5:
                super().apply(event)

    kv = harness(index=by_role(decode=Forgetful(count_copies=True)))
    kv.fleet(right(kv)).run(trace())
    assert rules(kv)["index_drift"] > 0
    drifted = [problem for problem in kv.events.problems if problem.rule == "index_drift"]
    assert {problem.worker_id for problem in drifted} <= {2, 3}
    with pytest.raises(NotReduced, match="each role has an index of its own, and a reproduction has no roles"):
        reproduce(kv, drifted[0])


# ------------------------------------------------------------------------------------------------ ranks, and joins


def test_a_role_may_have_ranks():
    kv = harness({"prefill": {"workers": 2, "dp_size": 2}, "decode": 1})
    assert [*kv.workers] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    report = kv.fleet(right(kv)).run(trace())
    assert report.roles["prefill"].workers == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert report.beliefs == ()
    assert rules(kv) == {}


def test_a_prefill_rank_chooses_a_room_that_maps_back_to_it():
    kv = harness({"prefill": {**SGLANG, "dp_size": 2}, "decode": CACHES}, "sglang")
    _, p = kv.role("prefill")
    (d,) = kv.role("decode")
    served = p.serve(range(40), hand_over=True)
    assert served.hand_over["bootstrap_room"] % 2 == 1
    request = d.load(range(40), served.hand_over)
    request.end_transfer()
    request.finish()
    assert kv.overlap(list(range(40))) == {(0, 1): 2, (1, 0): 2}


@each_parameter
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_worker_joins_a_role(dp_size):
    kv = harness({"prefill": {"dp_size": dp_size}, "decode": 1})
    names = {1: ([0, 1], 2), 2: ([(0, 0), (0, 1), (1, 0)], (2, 0))}[dp_size]
    assert [*kv.workers] == names[0]
    fleet = kv.fleet(right(kv))
    assert fleet.at(50.0).join(role="prefill") == 2
    assert fleet.at(50.0).join(role="decode") == 3
    report = fleet.run(trace())
    assert names[1] in {pick.worker for pick in report.picks if pick.phase == "prefill"}
    assert [worker.worker_id for worker in kv.role("prefill")] == sorted([0, 2] * dp_size)
    assert rules(kv) == {}


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"workers": 6},
            ValueError,
            r"have roles \(2 of 'prefill', 2 of 'decode'\), and all serve; leave workers=6 out",
        ),
        ({"workers": 2, "backends": ["vllm"]}, ValueError, r"all serve; leave backends=\['vllm'\] out"),
        ({"index": RadixIndex()}, TypeError, "index is the harness's own; the index is what kv_index returns, by role"),
        ({"router": {"prefill": LeastLoaded()}}, ValueError, "router by role needs 'prefill' and 'decode'"),
        ({"order": "both"}, ValueError, "unknown order 'both'"),
    ],
)
def test_a_fleet_with_bad_options_is_refused_and_makes_no_worker(options, error, why):
    kv = harness()
    with pytest.raises(error, match=why):
        kv.fleet(**options)
    assert [*kv.workers] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ({"prefill": 2}, "P/D pairs need engines of both roles; there is none of worker_type='decode'"),
        ({"both": 2}, "engine 0 must have worker_type='prefill' or 'decode', as others have, got 'both'"),
        (
            {"prefill": {"hand_over": "vllm-mooncake"}, "decode": 1},
            "must have one hand_over, got 'vllm-mooncake', 'vllm'",
        ),
    ],
)
def test_a_fleet_is_refused_over_roles_that_are_no_pairs(roles, why):
    with pytest.raises(ValueError, match=why):
        harness(roles).fleet()


class Async(RadixIndex):
    async def find_matches(self, local_hashes):
        return super().find_matches(local_hashes)


@pytest.mark.parametrize(
    ("roles", "index", "error", "why"),
    [
        (TWO, {"prefill": RadixIndex()}, ValueError, "index by role needs 'prefill' and 'decode', got 'prefill'"),
        (TWO, by_role(decode=object()), TypeError, r"index of 'decode' must have a method apply\(\)"),
        (TWO, by_role(decode=Async()), TypeError, r"index of 'decode': find_matches\(\) is async"),
        ({"both": 2}, by_role(), ValueError, "index by role is for roles 'prefill' and 'decode', got 'both'"),
        (None, by_role(), TypeError, r"the index under test \(dict\) has no apply\(event\)"),
        ({"prefill": {"dp_size": 0}}, None, ValueError, r"roles\['prefill'\]: dp_size"),
    ],
)
def test_indexes_and_roles_that_cannot_be_are_refused(roles, index, error, why):
    with pytest.raises(error, match=why):
        harness(roles, index=index)


def test_a_join_of_a_pair_fleet_needs_a_role():
    kv = harness()
    fleet = kv.fleet(right(kv))
    with pytest.raises(ValueError, match="needs role='prefill' or 'decode'"):
        fleet.at(5.0).join()
    with pytest.raises(ValueError, match="role is for fleets of P/D pairs, got 'prefill'"):
        RouterHarness(PROFILE, "vllm").fleet(workers=1).at(5.0).join(role="prefill")


@worth_its_time
def test_fleet_fixtures_accept_a_router_over_the_roles_of_a_test(pytester):
    pytester.makepyfile(
        """
        import pytest

        from pytest_kvmock.testing import RightRouter

        pytestmark = [
            pytest.mark.kv_backends("vllm"),
            pytest.mark.kvmock(block_size=16, num_blocks=400, roles={"prefill": 2, "decode": 1}, trace_tokens=True),
        ]

        @pytest.fixture
        def kv_router():
            return RightRouter(range(3), copies=True)

        def test_fleet(kv_fleet, kv_trace):
            report = kv_fleet.run(kv_trace)
            assert report.roles["prefill"].kept == report.roles["decode"].requests > 0

        def test_made(make_kv_fleet, kv_trace):
            assert make_kv_fleet(order="decode_first").run(kv_trace).roles["decode"].requests > 0
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
