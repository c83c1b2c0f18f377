"""The nested JSON form of an engine's arguments: values that 1.6.1 refuses, with our messages, and written forms."""

import re

import pytest

from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.engines.schedulers.json_forms import INERT

EXTERNAL = {"type": "external", "provider": "ais", "config": {}}

REFUSED = [
    ({"num_gpu_blocks": 0}, "num_gpu_blocks must be"),
    ({"num_gpu_blocks": None}, "num_gpu_blocks must be"),
    ({"block_size": 0}, "engine.block_size must be an integer of at least 2 (tokens) for vllm in 1.6.1, got 0"),
    ({"block_size": 1}, "engine.block_size must be an integer of at least 2 (tokens) for vllm in 1.6.1, got 1"),
    ({"backend": "x"}, "engine.backend must be 'vllm' or 'sglang' or 'trtllm', got 'x'"),
    (
        {"backend": "trtllm", "block_size": 1},
        "engine.block_size must be an integer of at least 2 (tokens) for trtllm in",
    ),
    (
        {"backend": "trtllm", "trtllm": {"capacity_scheduler_policy": "max_utilization"}},
        "engine.trtllm has a capacity_scheduler_policy, which must be 'guaranteed_no_evict' in 1.6.1, got {'capacity_",
    ),
    ({"backend": "trtllm", "worker_type": "decode"}, "worker_type must be 'aggregated' for engine_type 'trtllm', got"),
    ({"backend": "trtllm", "trtllm": None}, "engine.trtllm has a capacity_scheduler_policy, which must be"),
    ({"backend": "trtllm", "prefill_decode_interval": 2}, "prefill_decode_interval is for engine_type 'sglang', got 2"),
    ({"backend": "trtllm", "prefill_schedule_interval": 2}, "prefill_schedule_interval is for engine_type 'vllm', got"),
    ({"engine_type": "vllm"}, "engine: engine_type is not an argument of 1.6.1: it is backend now"),
    ({"is_prefill": True}, "engine: is_prefill is not an argument of 1.6.1: it is worker_type now"),
    ({"num_g2_blocks": 4}, "engine: num_g2_blocks is not an argument of 1.6.1: host memory is native_host_offload now"),
    ({"backend": "sglang", "sglang": {"page_size": 4}}, "engine.sglang: page_size is not an argument of 1.6.1"),
    (
        {"backend": "sglang", "sglang": {"schedule_policy": "fcfs"}},
        "engine.sglang.schedule_policy must be 'fifo' or 'lpm'",
    ),
    ({"backend": "sglang", "sglang": 4}, "engine.sglang must be a mapping, got 4"),
    ({"backend": "sglang", "enable_chunked_prefill": False}, "engine.enable_chunked_prefill must be True for sglang"),
    (
        {"backend": "sglang", "block_size": 4, "sglang": {"chunked_prefill_size": 6}},
        "sglang.chunked_prefill_size must be a multiple",
    ),
    (
        {"backend": "sglang", "block_size": 3},
        "engine.sglang.chunked_prefill_size must be a multiple of the block size, 3, got 8192, its default",
    ),
    (
        {"backend": "sglang", "sglang": {"max_prefill_tokens": None}},
        "engine.sglang.max_prefill_tokens must be set or left out in 1.6.1, got None",
    ),
    ({"speedup_ratio": -1}, "speedup_ratio must be"),
    ({"prefill_decode_interval": 1}, "prefill_decode_interval is for engine_type 'sglang', got 1 with 'vllm'"),
    (
        {"backend": "sglang", "prefill_schedule_interval": 2},
        "prefill_schedule_interval is for engine_type 'vllm', got 2",
    ),
    ({"prefill_schedule_interval": 0}, "prefill_schedule_interval must be"),
    ({"max_model_len": 0}, "max_model_len must be"),
    ({"kv_bytes_per_token": 0}, "engine.kv_bytes_per_token must be at least 1, or None, in 1.6.1, got 0"),
    (
        {"kv_bytes_per_token": 1, "kv_transfer_bytes_per_token": 1},
        "engine: kv_transfer_bytes_per_token and kv_bytes_per_token",
    ),
    ({"kv_transfer_timing_mode": "x"}, "kv_transfer_timing_mode: got 'x'"),
    ({"emit_kv_token_ids": True}, "engine.emit_kv_token_ids is True without engine.emit_kv_events"),
    ({"aic_nextn_accept_rates": "0.5"}, "aic_nextn_accept_rates is set without aic_nextn"),
    ({"timing_model": EXTERNAL}, "engine.timing_model must be"),
    ({"timing_model": {"type": "fixed", "prefill_ms": 1}}, "engine.timing_model must be"),
    (
        {"timing_model": {"type": "fixed", "prefill_ms": -1, "decode_ms": 1}},
        "prefill must be callable, or a finite number",
    ),
    ({"num_gpu_block": 1}, "unknown field of engine 'num_gpu_block'; did you mean 'num_gpu_blocks'?"),
]


@pytest.mark.parametrize(("engine", "message"), REFUSED, ids=[str(engine)[:60] for engine, _ in REFUSED])
def test_the_nested_form_refuses_the_values_that_1_6_1_refuses(engine, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        MockEngineArgs.from_json({"engine": engine})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": {}, "num_gpu_blocks": 100}, "unknown field of the engine's arguments 'num_gpu_blocks'"),
        ({"engine": {}, "dp_size": 0}, "dp_size must be"),
        ({"engine": {}, "startup_time": -1}, "startup_time must be"),
        ({"dynamo": {"bootstrap": 1}}, "unknown field of dynamo 'bootstrap'; did you mean 'bootstrap_port'?"),
        ({"dynamo": []}, "dynamo must be a mapping, got []"),
    ],
)
def test_fields_next_to_the_nested_engine_are_checked(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        MockEngineArgs.from_json(given)


def test_the_nested_form_is_refused_for_semantics_other_than_1_6_1():
    with pytest.raises(ValueError, match=r"^the nested form is that of semantics='1.6.1', got '1.2.1'$"):
        MockEngineArgs.from_json({"engine": {}}, semantics="1.2.1")


def test_a_block_size_of_null_is_the_default():
    assert MockEngineArgs.from_json({"engine": {"block_size": None}}).block_size == 64


def test_arguments_read_in_the_nested_form_are_written_back():
    given = {
        "engine": {
            "backend": "sglang",
            "block_size": 4,
            "sglang": {"schedule_policy": "lpm"},
            "prefill_decode_interval": 2,
            "kv_bytes_per_token": 8,
            "emit_kv_events": True,
        },
        "dp_size": 2,
        "tensor_parallel_size": 4,
        "dynamo": {"reasoning": {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}},
    }
    args = MockEngineArgs.from_json(given)
    written = args.to_dict()
    assert args == MockEngineArgs.from_json(written)
    assert (
        written["engine"]["kv_transfer_bytes_per_token"],
        written["engine"]["emit_kv_events"],
        written["tensor_parallel_size"],
        args.gpus,
    ) == (8, True, 4, 8)


def test_the_default_model_is_written_by_its_name():
    assert MockEngineArgs(semantics="1.6.1").to_dict()["engine"]["timing_model"] == {"type": "polynomial"}


def test_only_known_inert_arguments_are_accepted():
    with pytest.raises(ValueError, match=rf"^inert must be a mapping of {next(iter(INERT))}"):
        MockEngineArgs(semantics="1.6.1", inert={"x": 1})
    assert MockEngineArgs(semantics="1.6.1", inert=dict(INERT)).inert == INERT
