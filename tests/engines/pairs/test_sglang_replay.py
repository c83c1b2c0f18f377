"""SGLang's P/D pairs in virtual time: complete engines, both legs at once, slow and failing transfers."""

import pytest

from pytest_kvmock import CapturingSink, Removed, Stored
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import MockEngine, TraceRequest, replay
from pytest_kvmock.fleets.clock.pair_handoff import PairLink

SIZE = 16


class Engine(MockEngine):
    """An engine of a pair, with its events."""

    def __init__(self, kind, pages=256, pair=None, **args):
        self.sink = CapturingSink()
        given = {"engine_type": "sglang", "hand_over": "sglang", "block_size": SIZE, "num_gpu_blocks": pages}
        if kind == "decode":
            pair = {"num_reserved_decode_tokens": 32, "disaggregation_decode_enable_radix_cache": True, **(pair or {})}
        super().__init__(MockEngineArgs(**given, worker_type=kind, pair=pair, **args), backend="sglang", sink=self.sink)

    @property
    def names(self):
        """The block names that its events leave present."""
        held = set()
        for event in self.sink.events:
            if isinstance(event.data, Stored):
                held |= {*event.data.block_hashes}
            elif isinstance(event.data, Removed):
                held -= {*event.data.block_hashes}
        return held

    @property
    def is_quiet(self):
        """Whether it holds no request, no pages and no leg."""
        worker = self.worker
        return not (worker.requests or worker.manager.num_active_blocks or worker.leased or worker.pair.legs)


def trace(count, output=4, every_ms=20.0):
    """Return requests with shared beginnings, of 3 to 7 pages and a partial one."""
    return [
        TraceRequest(
            timestamp=at * every_ms,
            input_length=SIZE * (3 + at % 5) + 5,
            output_length=1 + at % output,
            hash_ids=[at % 3, 100 + at % 3, 200 + at % 7, *(1000 + at * 10 + page for page in range(1 + at % 5))],
        )
        for at in range(count)
    ]


def pairs(prefill=None, decode=None, count=2, **args):
    return (
        [Engine("prefill", pair=prefill, **args) for _ in range(count)],
        [Engine("decode", pair=decode, **args) for _ in range(count)],
    )


def test_every_request_is_served_and_no_block_is_held_at_the_end():
    prefills, decodes = pairs()
    report = replay(trace(40), decodes, prefills)
    assert {request.status for request in report.requests} == {"finished"}
    assert [request.generated_tokens for request in report.requests] == [1 + at % 4 for at in range(40)]
    assert all(engine.is_quiet for engine in (*prefills, *decodes))
    for engine in (*prefills, *decodes):
        assert engine.names == {*engine.worker.manager.resident()}


def test_a_decode_engine_without_a_radix_cache_publishes_no_event():
    prefills, decodes = pairs(decode={"disaggregation_decode_enable_radix_cache": False})
    replay(trace(10), decodes, prefills)
    assert [len(engine.sink.events) for engine in decodes] == [0, 0]
    assert all(engine.names for engine in prefills)


def test_the_link_delays_the_first_token_by_the_bytes_sent():
    def first_ms(link):
        prefills, decodes = pairs(count=1)
        return replay(trace(1), decodes, prefills, link=link).requests[0].token_ms[0]

    at_once = first_ms(None)
    assert first_ms(PairLink(ms=lambda tokens: tokens * 2.0)) == pytest.approx(at_once + 2.0 * (SIZE * 3 + 5))


def test_kv_bytes_and_bandwidth_of_the_prefill_engine_set_the_delay_of_the_link():
    prefills, decodes = pairs(count=1, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
    slow = replay(trace(1), decodes, prefills).requests[0].token_ms[0]
    prefills, decodes = pairs(count=1)
    fast = replay(trace(1), decodes, prefills).requests[0].token_ms[0]
    assert slow == pytest.approx(fast + SIZE * 3 + 5)


@pytest.mark.parametrize("fault", ["fails", "handshake", "never"])
def test_a_fault_of_one_transfer_fails_only_its_request_and_frees_all_blocks(fault):
    prefills, decodes = pairs()
    report = replay(trace(12), decodes, prefills, link=PairLink(faults={4: fault}))
    assert [at for at, request in enumerate(report.requests) if request.status != "finished"] == [4]
    assert report.requests[4].status == "failed"
    assert all(engine.is_quiet for engine in (*prefills, *decodes))


def test_a_late_transfer_delays_the_first_token_by_late_ms():
    def first_ms(**link):
        prefills, decodes = pairs(count=1)
        return replay(trace(1), decodes, prefills, link=PairLink(**link)).requests[0].token_ms[0]

    assert first_ms(faults={0: "late"}, late_ms=500) == pytest.approx(first_ms() + 500)


def test_a_transfer_that_never_ends_fails_at_the_waiting_timeout():
    prefills, decodes = pairs(decode={"waiting_timeout": 7})
    report = replay(trace(3), decodes, prefills, link=PairLink(faults={1: "never"}))
    assert report.requests[1].ended_ms == pytest.approx(7_020)


def test_reusing_a_live_room_fails_exactly_one_request():
    prefills, decodes = pairs(count=1)
    report = replay(trace(4, every_ms=0.0), decodes, prefills, link=PairLink(faults={1: "used again"}))
    assert sorted(request.status for request in report.requests) == ["failed", "finished", "finished", "finished"]
    assert all(engine.is_quiet for engine in (*prefills, *decodes))


def test_a_full_decode_engine_gates_the_prefill_engine():
    def computed(pages):
        prefills = [Engine("prefill")]
        decodes = [Engine("decode", pages=pages)]
        report = replay(trace(6, output=9, every_ms=0.0), decodes, prefills)
        assert {request.status for request in report.requests} == {"finished"}
        return prefills[0].now_ms

    assert computed(pages=16) > computed(pages=256)


@pytest.mark.parametrize(
    "prefill",
    [
        {"disable_overlap_schedule": True},
        {"optimistic_prefill_attempts": 2},
        {"disaggregation_decode_allocation_policy": "prefill_complete"},
        {"metadata_slots": 1},
    ],
)
def test_under_any_prefill_option_all_requests_finish_and_no_block_is_held(prefill):
    decode = {}
    if "disaggregation_decode_allocation_policy" in prefill:
        decode = {**prefill, "disaggregation_decode_enable_radix_cache": False}
    prefills, decodes = pairs(prefill, decode, max_num_seqs=2)
    report = replay(trace(20, every_ms=1.0), decodes, prefills)
    assert {request.status for request in report.requests} == {"finished"}
    assert all(engine.is_quiet for engine in (*prefills, *decodes))


def test_a_second_run_gives_the_same_times_and_events():
    def run():
        prefills, decodes = pairs()
        report = replay(trace(20), decodes, prefills)
        return [request.token_ms for request in report.requests], [engine.sink.events for engine in prefills]

    assert run() == run()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"engine_type": "vllm"}, "hand_over='sglang' is for engine_type='sglang' .* got 'vllm'"),
        ({"worker_type": "aggregated"}, "is for worker_type 'prefill' or 'decode', got 'aggregated'"),
        ({"worker_type": "both"}, "is for worker_type 'prefill' or 'decode', got 'both'"),
        ({"pair": 5}, "pair must be SglangPairOptions, a mapping of them, or None, got 5"),
        ({"pair": {"kv_lease_duration": 5}}, "pair: 'kv_lease_duration' is not an option of a pair"),
    ],
)
def test_incompatible_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        MockEngineArgs(**{"engine_type": "sglang", "worker_type": "prefill", "hand_over": "sglang", **args})


@pytest.mark.parametrize(
    ("backend", "message"),
    [("sglang_gpt_oss", "a role over a window was not recorded"), ("sglang_qwen3_next", "a role over states was not")],
)
def test_a_pair_over_a_model_without_recordings_is_refused(backend, message):
    args = MockEngineArgs(
        engine_type="sglang", worker_type="prefill", hand_over="sglang", block_size=64, num_gpu_blocks=256
    )
    with pytest.raises(ValueError, match=message):
        MockEngine(args, backend=backend)
