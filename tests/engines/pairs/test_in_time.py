"""P/D pairs of vLLM in virtual time: properties under any traffic, link and faults, and the effect of each fault."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pair_makers import WAYS, engines_of, stored

from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import replay, synthetic_trace
from pytest_kvmock.fleets.clock.pair_handoff import FAULTS, PairLink

MOONCAKE_WAIT_MS = 480_000
"""`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`: the time for which a decode engine waits for an offer."""


def trace_of(requests, seed=0, **options):
    options = {
        "input_tokens": (1, 150),
        "output_tokens": (1, 40),
        "prefix_blocks": (0, 3),
        "interval_ms": 40,
        **options,
    }
    return list(synthetic_trace(requests, seed=seed, block_size=16, turns=(1, 1), **options))


def run(requests=20, *, seed=0, way="vllm", link=None, count=2, **fields):
    """Replay requests on two prefill and two decode engines; return the report, the engines and their events."""
    prefill, of_p = engines_of("prefill", count, way=way, seed=seed, **fields)
    decode, of_d = engines_of("decode", count, way=way, seed=seed, **fields)
    report = replay(trace_of(requests, seed), decode, prefill, link=link)
    return report, prefill, decode, of_p, of_d


class Watch:
    """Checks the end of each pass of a decode engine, and records when it requested each transfer."""

    def __init__(self, engines):
        self.loading = 0
        self.asked_ms = {}  # by request state
        for engine in engines:
            engine.on_pass(lambda done, engine=engine: self.look(engine, done.end_ms))

    def look(self, engine, now_ms):
        worker = engine.worker
        driver, manager = worker.pair.driver, worker.manager
        for leg in worker.pair.side.legs.values():
            if leg.status in ("loading", "kept"):
                # 1.11 and 1.18: blocks that are read into have no name, are held, and cover the whole prompt.
                self.loading += 1
                self.asked_ms.setdefault(leg.state, now_ms)
                (blocks,) = driver.tables(leg.state)
                assert len(blocks) == -(-leg.prompt_tokens // manager.block_size)
                nameless = manager.nameless_blocks(leg.state)[0]
                assert len(nameless) >= 1
                assert not set(blocks) & set(manager.free_queue)


@given(
    seed=st.integers(0, 2**16),
    sizes=st.tuples(st.integers(26, 120), st.integers(1, 6)),
    ms_per_token=st.sampled_from([0, 0.1, 2]),
    way=st.sampled_from(WAYS),
    fails=st.sampled_from([None, "fail", "recompute"]),
)
@example(  # failed transfers fill the prefill engine with leases: it offers two prompts too late
    seed=26, sizes=(26, 1), ms_per_token=0, way="vllm-mooncake", fails="fail"
)
@example(  # a prompt of one token is taken up while loads hold all blocks, because it needs none
    seed=1, sizes=(26, 1), ms_per_token=0.1, way="vllm", fails=None
)
@settings(max_examples=12, deadline=None)
def test_the_rules_of_kept_loaded_and_named_blocks_hold_under_any_traffic(seed, sizes, ms_per_token, way, fails):
    places = dict.fromkeys(range(0, 20, 3), "fails") if fails else {}
    fields = {"way": way, "num_gpu_blocks": sizes[0], "max_num_seqs": sizes[1]}
    prefill, of_p = engines_of("prefill", 1, **fields)
    decode, of_d = engines_of("decode", 2, pair={"kv_load_failure_policy": fails or "fail"}, **fields)
    watch = Watch(decode)
    trace = trace_of(20, seed)
    report = replay(trace, decode, prefill, link=PairLink(lambda tokens: ms_per_token * tokens, places))
    # 1.31 and 1.33: a load fails if its transfer fails, or if its prompt is not offered in time. A failed transfer
    # keeps its blocks at the prefill engine, so prompts may wait there longer than a decode engine does.
    late = set()
    status_of = {}
    for turn, request in zip(report.run.facts.turns, report.requests, strict=True):
        status_of[turn.session] = request.status
        gives_up_ms = watch.asked_ms[request.state] + MOONCAKE_WAIT_MS
        if report.run.handoffs[request]["source_held_ms"] >= gives_up_ms:
            late.add(turn.session)
            assert fails == "recompute" or request.ended_ms > gives_up_ms - 1e-6  # engines have seconds
    assert not late or way == "vllm-mooncake"
    failed = set() if fails == "recompute" else late | set(places)
    assert status_of == {place: "failed" if place in failed else "finished" for place in range(len(trace))}
    # 1.5: every lease ends by notification or by time; then no block is held anywhere.
    for engine in (*prefill, *decode):
        assert engine.worker.leased == ()
        assert engine.worker.manager.num_active_blocks == 0
    # 1.12: each Stored of a decode engine names blocks of its prompts, and parents that it stored before.
    for sink in of_d:
        known = set()
        for each in sink.events:
            if hasattr(each.data, "tokens_hashes"):
                assert each.data.parent_hash is None or each.data.parent_hash in known
                known.update(each.data.block_hashes)
    assert watch.loading > 0 or ms_per_token == 0
    assert any(map(stored, of_p))


@pytest.mark.parametrize("way", WAYS)
def test_the_link_delays_the_first_token_of_the_decode_engine(way):
    quick, _, _, _, _ = run(6, way=way)
    slow, _, _, _, _ = run(6, way=way, link=PairLink(lambda _: 5000.0))
    assert all(
        later.ttft_ms >= first.ttft_ms + 4900 for first, later in zip(quick.requests, slow.requests, strict=True)
    )


def test_the_delay_of_the_link_follows_from_kv_bytes_and_bandwidth_of_the_engines():
    fields = {"kv_bytes_per_token": 1_000_000, "kv_transfer_bandwidth": 0.1}
    quick, _, _, _, _ = run(6)
    slow, _, _, _, _ = run(6, **fields)
    assert all(later.ttft_ms > first.ttft_ms for first, later in zip(quick.requests, slow.requests, strict=True))


@pytest.mark.parametrize("fault", ["fails", "handshake"])
def test_a_failed_transfer_fails_its_request_and_the_lease_expires(fault):
    report, prefill, _, _, of_d = run(4, link=PairLink(faults={1: fault}))
    statuses = sorted(request.status for request in report.requests)
    assert statuses == ["failed", "finished", "finished", "finished"]
    assert all(engine.worker.leased == () for engine in prefill)
    assert report.requests
    assert any(map(stored, of_d))


def test_heartbeats_keep_the_lease_of_a_late_transfer_alive():
    report, _, decode, _, _ = run(4, link=PairLink(faults={0: "late"}, late_ms=90_000))
    assert all(request.status == "finished" for request in report.requests)
    assert [engine.worker.pair.stale_reads for engine in decode] == [[], []]


def test_a_decode_leg_after_the_end_of_the_lease_is_a_stale_read():
    report, _, decode, _, _ = run(4, link=PairLink(faults={0: "stale"}))
    assert all(request.status == "finished" for request in report.requests)
    assert sum(len(engine.worker.pair.stale_reads) for engine in decode) == 1


def test_parameters_that_are_used_twice_cause_a_stale_read():
    _, _, decode, _, _ = run(4, link=PairLink(lambda tokens: tokens, faults={0: "used again"}))
    assert sum(len(engine.worker.pair.stale_reads) for engine in decode) == 1


def test_a_request_waits_until_the_run_stops_if_its_transfer_never_arrives():
    prefill, _ = engines_of("prefill", 1)
    decode, _ = engines_of("decode", 1)
    report = replay(trace_of(4), decode, prefill, link=PairLink(faults={0: "never"}), stop_ms=100_000)
    assert min(request.status for request in report.requests) == "aborted"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"faults": {0: "lost"}},
            "link: a fault must be 'fails', 'late', 'handshake', 'never', 'stale', 'used again', got 'lost'",
        ),
        ({"faults": {-1: "late"}}, "link: faults: a place must be"),
        ({"late_ms": -1}, "link: late_ms must be"),
        ({"ms": 5}, "link: ms must be a function of tokens"),
    ],
)
def test_an_invalid_link_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        PairLink(**options)


def test_a_negative_time_of_a_link_is_refused():
    with pytest.raises(ValueError, match="link: ms must return a finite number of at least 0"):
        run(2, link=PairLink(lambda _: -1.0))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hand_over": "nixl"}, "hand_over must be 'dynamo', 'vllm', 'vllm-mooncake', 'sglang', got 'nixl'"),
        ({"hand_over": "vllm", "semantics": "1.6.1"}, "worker_type 'prefill', 'decode' or 'both', got 'aggregated'"),
        ({"worker_type": "both"}, "worker_type='both' is for hand_over='vllm', got hand_over='dynamo'"),
        ({"hand_over": "vllm", "worker_type": "prefill"}, "in the semantics of '1.6.1'"),
        ({"hand_over": "vllm", "engine_type": "trtllm"}, "is for engine_type='vllm'"),
        ({"pair": {"kv_lease_duration": 5}}, "pair is for hand_over='vllm' or 'vllm-mooncake', got 'dynamo'"),
        (
            {"hand_over": "vllm", "worker_type": "prefill", "semantics": "1.6.1", "pair": {"lease": 5}},
            "pair: 'lease' is not an option of a pair; options are kv_lease_duration",
        ),
    ],
)
def test_invalid_arguments_of_a_pair_are_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        MockEngineArgs(**fields)


def test_the_known_link_faults_are_those_that_are_tested():
    assert set(FAULTS) == {"fails", "late", "handshake", "never", "stale", "used again"}


def test_a_decode_engine_of_a_pair_publishes_blocks_of_its_prefill_engine():
    _, _, _, of_p, of_d = run(6, seed=Random(1).randrange(9))
    assert {name for sink in of_d for each in stored(sink) for name in each} & {
        name for sink in of_p for each in stored(sink) for name in each
    }
