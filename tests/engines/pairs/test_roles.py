"""The `roles` of a test: workers of P/D pairs with their own sizes, and the warning about blocks still in use."""

import pytest
from depth import each_parameter

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.sglang.pairs.sglang_decode import SglangDecode
from pytest_kvmock.engines.vllm.pairs.port import PairPort
from pytest_kvmock.engines.vllm.pairs.vllm_side import VllmSide

TEN = list(range(10))
SMALL = EngineProfile(block_size=4, num_blocks=16)


def harness_of(**roles):
    return RouterHarness(SMALL, "vllm", roles=roles)


def test_a_harness_creates_the_workers_of_its_roles():
    with harness_of(prefill=1, decode={"workers": 2, "num_blocks": 8}) as harness:
        assert [worker.worker_id for worker in harness.role("prefill")] == [0]
        assert [worker.worker_id for worker in harness.role("decode")] == [1, 2]
        assert [worker.manager.num_blocks for worker in harness.role("decode")] == [8, 8]
        assert len(harness.workers) == 3


def test_the_events_of_a_vllm_pair_pass_all_checks_of_the_harness():
    with harness_of(prefill=1, decode=1) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
        assert harness.overlap(TEN) == {0: 2}
        request.end_transfer()
        assert harness.overlap(TEN) == {0: 2, 1: 2}
        request.finish()
    assert harness.events.problems == []


def test_roles_can_have_different_block_sizes_and_publish_no_events():
    roles = {"prefill": {"block_size": 8}, "decode": {"publishes": False, "kv_load_failure_policy": "recompute"}}
    with harness_of(**roles) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
        request.end_transfer()
        request.finish()
        assert {each.event.worker_id for each in harness.events} == {0}
    assert harness.events.problems == []


def test_blocks_held_at_the_end_of_a_test_are_warned_about_with_request_and_phase():
    with harness_of(prefill=1, decode=1) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    found = {problem.rule: problem.observed for problem in harness.events.problems if problem.rule == "leased_blocks"}
    observed = [problem.observed for problem in harness.events.problems if problem.rule == "leased_blocks"]
    assert found
    assert observed == [
        "blocks are held for 1 leg: 3 of engine-0-0-0 (kept)",
        "blocks are held for 1 leg: 3 of engine-1-0-0 (loading)",
    ]


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_decode_engine_that_never_gives_up_a_load_holds_its_blocks_forever(monkeypatch, gives_up):
    # vllm 46283: a request is aborted while it waits for a prefill engine that never sends.
    if not gives_up:
        monkeypatch.setattr(PairPort, "_give_up_late", lambda self: None)
    mooncake = {"hand_over": "vllm-mooncake"}
    with harness_of(prefill=mooncake, decode=mooncake) as harness:
        (p,), (d,) = harness.role("prefill"), harness.role("decode")
        d.load(TEN, p.pair.new_hand_over()).finish()
        d.tick(480_000)
    observed = [problem.observed for problem in harness.events.problems if problem.rule == "leased_blocks"]
    assert observed == ([] if gives_up else ["blocks are held for 1 leg: 3 of engine-1-0-0 (kept)"])


def frees_at_once(monkeypatch):
    """vllm, sglang 24527: blocks of an aborted leg are freed at once, although they are being written."""
    end, abort = VllmSide.end, SglangDecode.abort

    def end_and_free(side, leg, finish, *args, **options):
        params = end(side, leg, finish, *args, **options)
        if finish == "abort":
            side._driver.manager.free(leg.state)
        return params

    def abort_and_free(side, *args):
        abort(side, *args)
        side.kept.clear()

    monkeypatch.setattr(VllmSide, "end", end_and_free)
    monkeypatch.setattr(SglangDecode, "abort", abort_and_free)


def overwritten_of(harness):
    problems = harness.events.problems
    return [(each.worker_id, each.observed) for each in problems if each.rule == "overwritten_blocks"]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", ["vllm", "vllm-mooncake", "sglang"])
@each_parameter
def test_blocks_that_are_freed_while_a_transfer_writes_them_are_an_error(monkeypatch, way, waits):
    if not waits:
        frees_at_once(monkeypatch)
    backend = "sglang" if way == "sglang" else "vllm"
    roles = {kind: {"hand_over": way, "num_blocks": 200} for kind in ("prefill", "decode")}
    harness = RouterHarness(SMALL, backend, roles=roles)
    (p,), (d,) = harness.role("prefill"), harness.role("decode")
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.finish()  # its transfer is active
    harness.judge()
    found = overwritten_of(harness)
    assert found == ([] if waits else [(1, f"blocks of 1 leg were free while they were written: {request.name}")])


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ({}, "roles must be a mapping such as"),
        ({"prefil": 1}, "roles: unknown worker type 'prefil'"),
        ({"prefill": 0}, r"roles\['prefill'\]: workers must be"),
        ({"prefill": {"tiers": {"host": 4}}}, r"roles\['prefill'\]: tiers with a role were not recorded"),
        ({"decode": {"blocks": 4}}, r"roles\['decode'\]: unknown key 'blocks'"),
        ({"decode": {"hand_over": "dynamo"}}, r"roles\['decode'\]: hand_over must be 'vllm' or 'vllm-mooncake'"),
        ({"decode": {"kv_lease_duration": -1}}, r"roles\['decode'\]: kv_lease_duration must be"),
        ({"both": {"hand_over": "vllm-mooncake"}}, "worker_type='both' is for hand_over='vllm'"),
    ],
)
def test_invalid_roles_are_refused(roles, why):
    with pytest.raises(ValueError, match=why):
        RouterHarness(SMALL, "vllm", roles=roles)


def test_an_unknown_role_of_a_harness_is_refused():
    with RouterHarness(SMALL, "vllm") as harness, pytest.raises(ValueError, match="role: this harness has no roles"):
        harness.role("prefill")


def test_the_kvmock_marker_sets_roles(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.kv_backends("vllm")
        @pytest.mark.kvmock(block_size=4, num_blocks=16, roles={"prefill": 1, "decode": 1})
        def test_pair(kv_harness):
            (p,), (d,) = kv_harness.role("prefill"), kv_harness.role("decode")
            request = d.load(list(range(10)), p.serve(list(range(10)), hand_over=True).hand_over)
            request.end_transfer()
            request.finish()
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_an_invalid_role_is_a_one_line_collection_error(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.kvmock(roles={"prefil": 1})
        def test_pair(kv_harness):
            pass
        """
    )
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*kvmock(roles={'prefil': 1}): roles: unknown worker type 'prefil'*"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_restarted_keeps_its_engine_id_port_and_peers(rank):
    with RouterHarness(SMALL, "vllm", roles={"prefill": {"dp_size": 2}, "decode": 1}) as harness:
        ranks = harness.role("prefill")
        before = [(each.pair.engine_id, each.pair.connector.address["remote_port"]) for each in ranks]
        ranks[rank].restart()
        assert [(each.pair.engine_id, each.pair.connector.address["remote_port"]) for each in ranks] == before
        assert [each.pair.ranks for each in ranks] == [tuple(each.pair for each in ranks)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restarted_sglang_rank_still_shares_the_rooms_of_its_worker(rank):
    pair = {"hand_over": "sglang", "num_reserved_decode_tokens": 4}
    roles = {"prefill": {**pair, "dp_size": 2}, "decode": pair}
    with RouterHarness(SMALL, "sglang", roles=roles) as harness:
        ranks, (d,) = harness.role("prefill"), harness.role("decode")
        ranks[rank].restart(announced=True)
        served = ranks[1].serve(range(10), hand_over=True)
        assert served.hand_over["bootstrap_room"] % 2 == 1
        request = d.load(range(10), served.hand_over)
        request.end_transfer()
        assert request.status == "running"
        assert [each.pair.dp_rank for each in ranks] == [0, 1]
