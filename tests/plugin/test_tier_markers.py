"""Tiers in a run: marker, profiles, refusals, and use."""

import pytest
from scenario_files import need_scenario_files

ABLE = "lineage, lru, multi_lru, vllm, sglang and some hybrid models do"
PROFILES = """\
profiles:
  tiered:
    num_blocks: 8
    block_size: 4
    tiers: {host: 64, gbps: 1.0, bytes_per_token: 250_000}
"""


def test_the_marker_gives_workers_a_host(nested):
    result = nested(
        """
        from pytest_kvmock import StorageTier
        from pytest_kvmock.engines import Tiers

        @pytest.mark.kvmock(num_blocks=8, block_size=4, tiers={"host": 64, "gbps": 1.0, "bytes_per_token": 250_000})
        class Test:
            def test(self, kv_worker, kv_harness, kv_prompt):
                first, second = kv_prompt(6), kv_prompt(6)
                kv_worker.serve(first)
                kv_worker.serve(second)
                kv_worker.tick(50)
                assert {"device": {0: 2}, "host_pinned": {0: 4}} == kv_harness.overlap(first, tier=None)
                assert 16 == kv_worker.cached_tokens(first, tier="host_pinned")
                with kv_worker.prefill(first) as request:
                    assert (24, 16) == (request.cached_tokens, request.onboarded_tokens)

            @pytest.mark.kvmock(tiers={"g2": 10})
            def test_the_inner_one_takes_its_place_whole(self, kv_profile, kv_manager, make_kv_manager):
                assert Tiers(10) == kv_profile.tiers
                assert (10, 10) == (kv_manager.offload.num_blocks, make_kv_manager().offload.num_blocks)

            @pytest.mark.kvmock(tiers=None)
            def test_none(self, kv_profile, kv_worker):
                assert None is kv_profile.tiers
                with pytest.raises(ValueError, match="has no tiers below the device, so no time passes in it"):
                    kv_worker.tick(1)
                kv_worker.manager.tick(1)
        """
    )
    result.assert_outcomes(passed=9)


def test_the_default_batch_size_fits_the_host(nested):
    nested(
        """
        @pytest.mark.kvmock(num_blocks=20, block_size=4, tiers={"host": 10})
        def test(kv_worker, kv_prompt):
            for _ in range(20):
                kv_worker.serve(kv_prompt(15))
            assert 0 == kv_worker.manager.offload.lost_blocks
        """
    ).assert_outcomes(passed=3)


@pytest.mark.parametrize("backend", ["hash_cache", "vllm_0_19", "mocker_sglang_1_6"])
def test_a_backend_without_tiers_is_refused_in_one_line(nested, backend):
    result = nested(
        f"""
        @pytest.mark.kv_backends("{backend}", "lru")
        @pytest.mark.kvmock(tiers={{"host": 64}})
        def test(kv_worker): pass
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    why = f"backend {backend!r} takes no tiers; {ABLE} (kvmock(tiers={{'host': 64}}))"
    assert f"kvmock: backend {backend}: {why}" in result.outlines


@pytest.mark.parametrize(
    ("dialect", "described", "why"),
    [
        ("vllm-0.23", True, "self-describing events of a host are vLLM's from 0.24 on; got dialect 'vllm-0.23'"),
        (
            "vllm-0.9",
            False,
            "dialect 'vllm-0.9' does not say where a block is, and engines have a host below the device",
        ),
    ],
)
def test_a_dialect_that_cannot_encode_host_events_is_refused_in_one_line(nested, dialect, described, why):
    result = nested(
        f"""
        @pytest.mark.kv_dialects("{dialect}")
        @pytest.mark.parametrize("kv_backend", ["vllm"])
        @pytest.mark.kvmock(tiers={{"host": 64, "self_describing": {described}}})
        class Test:
            def test_a_publisher(self, kv_publisher): pass
            def test_a_wire(self, kv_wire): pass
            def test_without_one(self, kv_worker, kv_prompt): kv_worker.serve(kv_prompt(4))
        """
    )
    result.assert_outcomes(passed=1, errors=2)
    assert {f"kvmock: kv_publisher: {why}", f"kvmock: kv_wire: {why}"} <= {*result.outlines}


def test_a_profile_of_a_file_may_have_tiers(nested):
    files = {"pytest.ini": "[pytest]\nkvmock_profiles = p.yaml\nkvmock_profile = tiered\n", "p.yaml": PROFILES}
    source = """
        def test(kv_worker, kv_profile):
            assert (64, 1.0, 250_000) == (kv_profile.tiers.host, kv_profile.tiers.gbps, kv_profile.tiers.bytes_per_token)
            assert 64 == kv_worker.manager.offload.num_blocks
        """  # noqa: E501
    nested(source, files=files).assert_outcomes(passed=3)
    listed = nested("", "--kv-list-profiles", files=files).stdout.str()
    assert "tiered  num_blocks=8, block_size=4, tiers={'host': 64, 'gbps': 1.0, 'bytes_per_token': 250000}" in listed
    refused = nested('@pytest.mark.kv_backends("hash_cache")\ndef test(kv_worker): pass', files=files).stdout.str()
    assert f"{ABLE} (tiers is from kv_base_profile, or ini kvmock_profile)" in refused


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (
            "{host: 4, batch: 3}",
            "tiers: batch must be at most 2 for a host of 4 blocks, got 3: batch squared blocks *",
        ),
        ("{g3: 4}", "tiers: 'g3' is not a key: 'files': True puts a folder below the host of vllm, *"),
        ("64", "tiers must be a mapping such as {'host': 64, 'gbps': 14.0}, got 64"),
        ("{host: .nan}", "tiers: host must be an integer of at least 1 (blocks), got '.nan'"),
    ],
)
def test_wrong_tiers_in_a_profile_file_give_a_one_line_error_with_their_position(nested, tiers, why):
    files = {"pytest.ini": "[pytest]\nkvmock_profiles = p.yaml\n", "p.yaml": f"profiles:\n  a:\n    tiers: {tiers}\n"}
    result = nested("def test(): pass", files=files)
    result.stderr.fnmatch_lines([f"ERROR: p.yaml:3:*{why}"])


def test_a_scenario_can_move_time_with_tick(nested):
    need_scenario_files()
    scenario = """\
profile: {block_size: 4, num_blocks: 8, tiers: {host: 64, gbps: 1.0, bytes_per_token: 250000}}
scenarios:
  what is evicted comes back:
    steps:
    - serve: {tokens: 0..23}
    - prefill: {request: a, tokens: 100..123, wait: false}
      expect: {refused: "WouldWait: blocks of the device are on their way to the host, until 4.0 ms"}
    - tick: 2
      expect: {events: []}
    - tick: {now_ms: 4}
      expect:
        events: [{stored: 1, tier: host_pinned}, {stored: 1, tier: host_pinned}, {stored: 1}, {stored: 1}]
        overlap: {tokens: 0..23, workers: {0: 4}, tier: host_pinned}
    - tick: 3
      expect: {refused: "tick: time does not go backwards; it is 4.0 ms, got 3"}
    - serve: {tokens: 0..23}
      expect: {cached_tokens: 24}
"""
    files = {"pytest.ini": "[pytest]\nkvmock_scenarios = *.kv.yaml\n", "a.kv.yaml": scenario}
    nested("", files=files).assert_outcomes(passed=3)
    bad = {**files, "a.kv.yaml": scenario.replace("tick: 2", "tick: -2")}
    nested("", files=bad).stdout.fnmatch_lines(
        ["a.kv.yaml:8:13: tick: got -2; allowed: a number of at least 0 (milliseconds)"]
    )
    refused = {**files, "a.kv.yaml": f"backends: [hash_cache]\n{scenario}"}
    nested("", files=refused).stdout.fnmatch_lines(
        [f"*a.kv.yaml:5: backend hash_cache: backend 'hash_cache' takes no tiers; {ABLE}"]
    )
