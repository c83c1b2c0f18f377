"""`MockEngineArgs`: the arguments of Dynamo's mocker 1.2.1, refused values, and the JSON form."""

import json
import math
from pathlib import Path

import pytest
from depth import worth_its_time
from hypothesis import given
from hypothesis import strategies as st
from npz_files import PROFILE, write_npz

from pytest_kvmock import EngineProfile
from pytest_kvmock.engines import CallableModel, InterpolatedModel, MockEngineArgs, PolynomialModel
from pytest_kvmock.engines.schedulers.nested_args import ReasoningConfig, SglangArgs

THINKING = {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}

DUMPED = """{
  "engine_type": "vllm",
  "num_gpu_blocks": 16384,
  "block_size": 64,
  "max_num_seqs": 256,
  "max_num_batched_tokens": 8192,
  "enable_prefix_caching": true,
  "enable_chunked_prefill": true,
  "speedup_ratio": 1.0,
  "decode_speedup_ratio": 1.0,
  "dp_size": 1,
  "startup_time": null,
  "worker_type": "aggregated",
  "planner_profile_data": null,
  "aic_backend": null,
  "aic_system": null,
  "aic_backend_version": null,
  "aic_tp_size": null,
  "aic_model_path": null,
  "aic_moe_tp_size": null,
  "aic_moe_ep_size": null,
  "aic_attention_dp_size": null,
  "enable_local_indexer": false,
  "bootstrap_port": null,
  "kv_bytes_per_token": null,
  "kv_transfer_bandwidth": null,
  "reasoning": null,
  "zmq_kv_events_port": null,
  "zmq_replay_port": null,
  "preemption_mode": "lifo",
  "router_queue_policy": null,
  "sglang": null
}"""
"""The result of `MockEngineArgs().dump_json()` in Dynamo 1.2.1."""


def refusal(call, *given, **options):
    with pytest.raises(ValueError) as caught:
        call(*given, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- JSON, defaults


def test_the_defaults_are_dumped_as_by_dynamo():
    assert MockEngineArgs().to_json() == DUMPED
    assert json.loads(DUMPED) == MockEngineArgs().to_dict()


def test_nested_arguments_are_dumped_as_by_dynamo():
    args = MockEngineArgs(reasoning=THINKING, sglang=SglangArgs(page_size=4), speedup_ratio=2)
    assert {
        **json.loads(DUMPED),
        "speedup_ratio": 2.0,
        "reasoning": THINKING,
        "sglang": {
            "schedule_policy": None,
            "page_size": 4,
            "max_prefill_tokens": None,
            "chunked_prefill_size": None,
            "clip_max_new_tokens": None,
            "schedule_conservativeness": None,
        },
    } == args.to_dict()
    assert args.to_json() == MockEngineArgs.from_json(args.to_json()).to_json()


arguments = st.fixed_dictionaries(
    {},
    optional={
        "engine_type": st.sampled_from(["vllm", "sglang"]),
        "num_gpu_blocks": st.integers(1, 2**40),
        "block_size": st.sampled_from([0, 1, 4, 48, 64]),
        "max_num_seqs": st.none() | st.integers(1, 9),
        "max_num_batched_tokens": st.none() | st.integers(1, 9),
        "enable_prefix_caching": st.booleans(),
        "speedup_ratio": st.floats(0, 1e300),
        "startup_time": st.none() | st.floats(0, 9),
        "worker_type": st.sampled_from(["aggregated", "prefill", "decode"]),
        "aic_backend": st.none() | st.text(),
        "bootstrap_port": st.none() | st.integers(0, 65535),
        "reasoning": st.none() | st.just(THINKING),
        "preemption_mode": st.sampled_from(["lifo", "fifo"]),
        "router_queue_policy": st.sampled_from([None, "fcfs", "lcfs", "wspt"]),
        "sglang": st.none() | st.just({"schedule_policy": "lpm", "schedule_conservativeness": 1.5}),
    },
)


@worth_its_time
@given(arguments)
def test_written_arguments_are_read_back_unchanged(given):
    args = MockEngineArgs.from_json(given)
    assert args == MockEngineArgs(**given) == MockEngineArgs.from_json(args.to_json()) == args.replace()
    written = args.to_dict()
    same = [name for name in given if name not in ("block_size", "sglang", "reasoning")]
    assert {name: given[name] for name in same} == {name: written[name] for name in same}


def test_the_arguments_of_recorded_replays_are_accepted(recording):
    engines = recording("engine_args.json")
    assert len(engines) > 100
    for engine in engines:
        assert engine.items() <= {**MockEngineArgs.from_json(engine).to_dict(), **engine}.items()


def test_arguments_are_immutable_and_compare_by_value():
    one = MockEngineArgs(num_gpu_blocks=5, sglang={"page_size": 4})
    assert one == MockEngineArgs(num_gpu_blocks=5, sglang=SglangArgs(page_size=4))
    assert hash(one) == hash(one.replace())
    assert one != one.replace(num_gpu_blocks=6)
    with pytest.raises(AttributeError):
        one.num_gpu_blocks = 7


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the arguments of an engine must be JSON: Expecting value: line 1 column 1 (char 0)"),
        (
            b"\xff",
            (
                "the arguments of an engine must be JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid "
                "start byte"
            ),
        ),
        ("[]", "the arguments of an engine must be a JSON object, got []"),
        ("null", "the arguments of an engine must be a JSON object, got None"),
        ([], "the arguments of an engine must be a JSON object, got []"),
        ('{"dp_size": 1, "dp_size": 2}', "'dp_size' is there twice"),
        ('{"sglang": {"page_size": 1, "page_size": 2}}', "'page_size' is there twice"),
        ('{"speedup_ratio": NaN}', "speedup_ratio must be a finite number of at least 0, got nan"),
        ('{"speedup_ratio": 1e999}', "speedup_ratio must be a finite number of at least 0, got inf"),
        ({"semantics": "1.6.1"}, "semantics is not part of Dynamo's JSON: pass it by keyword"),
    ],
)
def test_json_that_does_not_describe_arguments_is_refused(source, message):
    assert refusal(MockEngineArgs.from_json, source) == message


def test_fields_added_to_those_of_dynamo_are_keywords_and_are_not_serialized():
    args = MockEngineArgs.from_json("{}", semantics="1.2.1", performance_model=(5, 7), events_visible="pass_end")
    assert ("1.2.1", "pass_end", CallableModel(5, 7)) == (
        args.scheduler_semantics,
        args.events_visible_at,
        args.performance,
    )
    assert args.to_json() == DUMPED
    assert (
        (refusal(MockEngineArgs.from_json, {}, semantic="1.2.1"))
        == "unknown addition 'semantic'; did you mean 'semantics'? known: semantics, performance_model, "
        "events_visible, "
        "context_chunking_policy, publish_every, hand_over, pair"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "aggregated"),
        ({"is_prefill": True}, "prefill"),
        ({"is_decode": True}, "decode"),
        ({"is_prefill": False, "is_decode": False}, "aggregated"),
        ({"is_prefill": True, "is_decode": False}, "prefill"),
        ({"is_prefill": True, "worker_type": "decode"}, "decode"),
        ({"is_prefill": True, "worker_type": "aggregated"}, "aggregated"),
        ({"is_prefill": True, "is_decode": True, "worker_type": "prefill"}, "prefill"),
        ({"has_perf_model": True}, "aggregated"),
    ],
)
def test_the_older_keys_of_the_worker_type_are_read(given, expected):
    assert MockEngineArgs.from_json(given).worker_type == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_prefill": True, "is_decode": True}, "is_prefill and is_decode cannot both be true"),
        ({"is_prefill": 1}, "is_prefill must be True or False, got 1"),
        ({"has_perf_model": "yes"}, "has_perf_model must be True or False, got 'yes'"),
    ],
)
def test_invalid_older_keys_are_refused(given, message):
    assert refusal(MockEngineArgs.from_json, given) == message


@pytest.mark.parametrize("name", ["is_prefill", "is_decode", "has_perf_model"])
def test_keys_that_exist_only_in_json_are_refused_as_keywords(name):
    for call in (MockEngineArgs().replace, lambda **given: MockEngineArgs.from_profile(EngineProfile(), **given)):
        message = refusal(call, **{name: True})
        assert message.startswith(f"unknown field of the engine's arguments {name!r}")
        assert name not in message.partition("known: ")[2]
    assert name in refusal(MockEngineArgs.from_json, {"max_model_len": 5}).partition("known: ")[2]


# ---------------------------------------------------------------------------------------------------------- refusals

NUMBER = "a finite number of at least 0"
THINKING_FIELDS = "start_thinking_token_id, end_thinking_token_id, thinking_ratio"
SGLANG_FIELDS = "schedule_policy, page_size, max_prefill_tokens, chunked_prefill_size, clip_max_new_tokens, schedule_conservativeness"  # noqa: E501
A_MODEL = (
    "have the methods prefill_ms() and decode_ms(), or be a pair of callables or of milliseconds (prefill, decode)"
)

REFUSED = [
    ("engine_type", "trt", "engine_type: got 'trt'; allowed: vllm, sglang, trtllm"),
    ("engine_type", "VLLM", "engine_type: got 'VLLM'; allowed: vllm, sglang, trtllm"),
    ("engine_type", None, "engine_type: got None; allowed: vllm, sglang, trtllm"),
    ("engine_type", ["vllm"], "engine_type: got ['vllm']; allowed: vllm, sglang, trtllm"),
    ("num_gpu_blocks", 0, "num_gpu_blocks must be an integer of at least 1, got 0"),
    ("num_gpu_blocks", 2.0, "num_gpu_blocks must be an integer of at least 1, got 2.0"),
    ("num_gpu_blocks", True, "num_gpu_blocks must be an integer of at least 1, got True"),
    ("num_gpu_blocks", None, "num_gpu_blocks must be an integer of at least 1, got None"),
    (
        "num_gpu_blocks",
        2**64,
        "num_gpu_blocks must be an integer from 1 to 18446744073709551615, got 18446744073709551616",
    ),
    ("block_size", -1, "block_size must be an integer of at least 0, got -1"),
    ("max_num_seqs", 0, "max_num_seqs must be an integer of at least 1, or None, got 0"),
    ("max_num_batched_tokens", 0, "max_num_batched_tokens must be an integer of at least 1, or None, got 0"),
    ("max_num_batched_tokens", "8", "max_num_batched_tokens must be an integer of at least 1, or None, got '8'"),
    ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, got 1"),
    ("enable_chunked_prefill", None, "enable_chunked_prefill must be True or False, got None"),
    ("speedup_ratio", -1, f"speedup_ratio must be {NUMBER}, got -1"),
    ("speedup_ratio", math.nan, f"speedup_ratio must be {NUMBER}, got nan"),
    ("speedup_ratio", "2", f"speedup_ratio must be {NUMBER}, got '2'"),
    ("speedup_ratio", None, f"speedup_ratio must be {NUMBER}, got None"),
    ("decode_speedup_ratio", math.inf, f"decode_speedup_ratio must be {NUMBER}, got inf"),
    ("decode_speedup_ratio", True, f"decode_speedup_ratio must be {NUMBER}, got True"),
    ("dp_size", 0, "dp_size must be an integer from 1 to 4294967295, got 0"),
    ("dp_size", 2**32, "dp_size must be an integer from 1 to 4294967295, got 4294967296"),
    ("startup_time", -0.5, f"startup_time must be {NUMBER} seconds, or None, got -0.5"),
    (
        "worker_type",
        "Decode",
        "worker_type: got 'Decode'; did you mean 'decode'? allowed: aggregated, prefill, decode, both",
    ),
    ("planner_profile_data", 5, "planner_profile_data must be the path of an .npz file, or None, got 5"),
    ("planner_profile_data", "none.npz", "planner_profile_data: there is no file none.npz"),
    ("aic_backend", 5, "aic_backend must be a string, or None, got 5"),
    ("aic_tp_size", -1, "aic_tp_size must be an integer of at least 0, or None, got -1"),
    ("enable_local_indexer", "yes", "enable_local_indexer must be True or False, got 'yes'"),
    ("bootstrap_port", 65536, "bootstrap_port must be an integer from 0 to 65535, or None, got 65536"),
    ("kv_bytes_per_token", -1, "kv_bytes_per_token must be an integer of at least 0, or None, got -1"),
    ("kv_transfer_bandwidth", -1, f"kv_transfer_bandwidth must be {NUMBER} GB/s, or None, got -1"),
    ("kv_transfer_bandwidth", math.inf, f"kv_transfer_bandwidth must be {NUMBER} GB/s, or None, got inf"),
    ("reasoning", 1, "reasoning must be a ReasoningConfig, a mapping of its fields, or None, got 1"),
    (
        "reasoning",
        {"thinking_ratio": 0.5},
        f"reasoning needs all of {THINKING_FIELDS}; missing: start_thinking_token_id, end_thinking_token_id",
    ),
    (
        "reasoning",
        {**THINKING, "ratio": 1},
        f"unknown field of reasoning 'ratio'; known: {THINKING_FIELDS}",
    ),
    (
        "reasoning",
        {**THINKING, "thinking_ratio": 1.5},
        "reasoning.thinking_ratio must be a finite number from 0 to 1, got 1.5",
    ),
    (
        "reasoning",
        {**THINKING, "start_thinking_token_id": -1},
        "reasoning.start_thinking_token_id must be an integer from 0 to 4294967295, got -1",
    ),
    (
        "reasoning",
        {**THINKING, "end_thinking_token_id": 2**32},
        "reasoning.end_thinking_token_id must be an integer from 0 to 4294967295, got 4294967296",
    ),
    ("zmq_kv_events_port", -1, "zmq_kv_events_port must be an integer from 0 to 65535, or None, got -1"),
    ("zmq_replay_port", 70000, "zmq_replay_port must be an integer from 0 to 65535, or None, got 70000"),
    ("preemption_mode", "LIFO", "preemption_mode: got 'LIFO'; allowed: lifo, fifo"),
    ("router_queue_policy", "fifo", "router_queue_policy: got 'fifo'; allowed: fcfs, lcfs, wspt"),
    ("sglang", [], "sglang must be a SglangArgs, a mapping of its fields, or None, got []"),
    (
        "sglang",
        {"page": 4},
        f"unknown field of sglang 'page'; known: {SGLANG_FIELDS}",
    ),
    ("sglang", {"page_size": 0}, "sglang.page_size must be an integer of at least 1, or None, got 0"),
    ("sglang", {"max_prefill_tokens": 0}, "sglang.max_prefill_tokens must be an integer of at least 1, or None, got 0"),
    (
        "sglang",
        {"chunked_prefill_size": 0},
        "sglang.chunked_prefill_size must be an integer of at least 1, or None, got 0",
    ),
    (
        "sglang",
        {"clip_max_new_tokens": -1},
        "sglang.clip_max_new_tokens must be an integer of at least 0, or None, got -1",
    ),
    (
        "sglang",
        {"schedule_policy": "LPM"},
        "sglang.schedule_policy: got 'LPM'; allowed: fifo, fcfs, lpm",
    ),
    (
        "sglang",
        {"schedule_conservativeness": -0.1},
        f"sglang.schedule_conservativeness must be {NUMBER}, or None, got -0.1",
    ),
    ("semantics", "1.3.1", "semantics: got '1.3.1'; did you mean '1.6.1' or '1.2.1'? allowed: 1.2.1, 1.6.1"),
    ("events_visible", "never", "events_visible: got 'never'; allowed: pass_start, pass_end"),
    (
        "performance_model",
        "polynomial",
        f"performance_model must {A_MODEL}, or None, got 'polynomial'",
    ),
    ("performance_model", (1, -1), "decode must be callable, or a finite number of milliseconds of at least 0, got -1"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_an_error_names_the_field_the_given_value_and_the_allowed_values(name, value, message):
    assert refusal(MockEngineArgs, **{name: value}) == message
    assert refusal(MockEngineArgs().replace, **{name: value}) == message
    assert refusal(MockEngineArgs.from_profile, EngineProfile(), **{name: value}) == message


ACCEPTED = [
    {"block_size": 1},
    {"block_size": 48},
    {"max_num_seqs": None, "max_num_batched_tokens": None},
    {"speedup_ratio": 0, "decode_speedup_ratio": 0.0},
    {"kv_transfer_bandwidth": 0, "kv_bytes_per_token": 0},
    {"aic_tp_size": 0, "bootstrap_port": 0},
    {"engine_type": "vllm", "block_size": 8, "sglang": {"page_size": 4, "chunked_prefill_size": 6}},
    {"engine_type": "sglang", "sglang": {"page_size": 3, "clip_max_new_tokens": 0, "schedule_conservativeness": 1.5}},
    {"engine_type": "sglang", "sglang": {"page_size": 16384}},
    {"reasoning": {**THINKING, "thinking_ratio": 0}},
    {"reasoning": {**THINKING, "thinking_ratio": 1}},
]


@pytest.mark.parametrize("given", ACCEPTED, ids=repr)
def test_boundary_values_that_dynamo_accepts_are_accepted(given):
    assert MockEngineArgs(**given) == MockEngineArgs.from_json(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_g3_blocks", 0), ("bandwidth_g2_to_g3_gbps", 1.5), ("enable_g4_storage", True)],
)
def test_arguments_of_tiers_beyond_the_host_are_refused(name, value):
    message = f"{name}={value!r}: there are no tiers beyond the host; leave it out"
    assert refusal(MockEngineArgs.from_json, {name: value}) == message
    assert refusal(MockEngineArgs().replace, **{name: value}) == message
    assert refusal(MockEngineArgs.from_profile, EngineProfile(), **{name: value}) == message
    assert MockEngineArgs() == MockEngineArgs.from_json({name: None}) == MockEngineArgs.from_json({name: False})


def test_an_unknown_field_is_refused_with_the_nearest_known_name():
    for call in (MockEngineArgs().replace, lambda **given: MockEngineArgs.from_json(given)):
        message = refusal(call, num_gpu_block=5)
        assert message.startswith(
            "unknown field of the engine's arguments 'num_gpu_block'; did you mean 'num_gpu_blocks' or "
            "'num_g2_blocks'? known: engine_type, "
        )
    message = refusal(MockEngineArgs.from_profile, EngineProfile(), max_model_length=5)
    assert message.startswith("unknown field of the engine's arguments 'max_model_length'")
    message = refusal(MockEngineArgs.from_json, {5: 5})
    assert message.startswith("unknown field of the engine's arguments 5; known: engine_type, ")


# -------------------------------------------------------------------------------------------------------- block size


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (64, {}),
        (64, {"block_size": 0}),
        (16, {"block_size": 16}),
        (64, {"sglang": {"page_size": 4}}),
        (1, {"engine_type": "sglang"}),
        (1, {"engine_type": "sglang", "sglang": {}}),
        (4, {"engine_type": "sglang", "sglang": {"page_size": 4}}),
        (4, {"engine_type": "sglang", "block_size": 4, "sglang": {"page_size": 4}}),
        (8, {"engine_type": "sglang", "block_size": 8}),
    ],
)
def test_the_block_size_is_normalised_by_engine_type(expected, given):
    assert expected == MockEngineArgs(**given).block_size == MockEngineArgs(**given).to_dict()["block_size"]


def test_different_page_and_block_sizes_are_refused():
    assert (
        refusal(MockEngineArgs, engine_type="sglang", block_size=8, sglang={"page_size": 4})
        == "block_size and sglang.page_size must be equal where both are set, got 8 and 4"
    )


def test_the_chunk_size_of_sglang_must_be_whole_pages():
    assert (
        refusal(MockEngineArgs, engine_type="sglang", sglang={"page_size": 4, "chunked_prefill_size": 6})
        == "sglang.chunked_prefill_size must be a multiple of the block size, 4, got 6"
    )


def test_replace_keeps_the_block_size_unless_it_is_0():
    args = MockEngineArgs().replace(engine_type="sglang")
    assert (args.block_size, args.replace(block_size=0).block_size) == (64, 1)


# ------------------------------------------------------------------------------------------------- what follows from
# them


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (("1.2.1", "pass_start"), {}),
        (("mixed", "pass_end"), {"engine_type": "sglang"}),
        (("1.2.1", "pass_end"), {"semantics": "1.2.1", "events_visible": "pass_end"}),
        (("1.6.1", "pass_start"), {"engine_type": "sglang", "semantics": "1.6.1", "events_visible": "pass_start"}),
    ],
)
def test_semantics_and_event_visibility_have_defaults_by_engine_type(expected, given):
    args = MockEngineArgs(**given)
    assert (args.scheduler_semantics, args.events_visible_at) == expected
    assert args.performance == PolynomialModel("1.2.1" if expected[0] == "1.2.1" else "1.6.1")


@pytest.mark.parametrize("gone", ["1.2.1", "1.3.1"])
def test_removed_semantics_of_the_sglang_mock_are_refused_with_the_remaining_ones(gone):
    assert (
        refusal(MockEngineArgs, engine_type="sglang", semantics=gone)
        == f"semantics: got '{gone}'; did you mean '1.6.1'? allowed: mixed, 1.6.1"
    )


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (True, {}),
        (True, {"worker_type": "prefill"}),
        (False, {"worker_type": "decode"}),
        (False, {"enable_prefix_caching": False}),
    ],
)
def test_a_publisher_is_needed_with_prefix_caching_except_on_decode_workers(expected, given):
    assert expected is MockEngineArgs(**given).needs_kv_publisher


def test_a_profile_file_is_read_when_the_arguments_are_made(tmp_path):
    path = write_npz(tmp_path / "profile.npz", PROFILE)
    args = MockEngineArgs("sglang", planner_profile_data=path)
    assert InterpolatedModel(**PROFILE, semantics="1.6.1") == args.performance
    assert str(path) == args.planner_profile_data == args.to_dict()["planner_profile_data"]
    rest = {name: values for name, values in PROFILE.items() if name != "decode_itl"}
    write_npz(path, rest)
    assert refusal(args.replace).startswith(f"planner_profile_data: {path} has no array 'decode_itl'; it has ")


def test_a_profile_file_and_a_model_together_are_refused(tmp_path):
    path = write_npz(tmp_path / "profile.npz", PROFILE)
    assert (
        refusal(MockEngineArgs, planner_profile_data=path, performance_model=(1, 2))
        == "planner_profile_data and performance_model cannot both be set"
    )


def test_sglang_options_have_the_defaults_of_the_scheduler():
    assert SglangArgs("fifo", 1, 16384, 8192, 4096, 1.0) == MockEngineArgs(engine_type="sglang").sglang_options
    args = MockEngineArgs(
        engine_type="sglang", block_size=8, sglang={"clip_max_new_tokens": 0, "schedule_policy": "lpm"}
    )
    assert SglangArgs("lpm", 8, 16384, 8192, 0, 1.0) == args.sglang_options


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (8.0, {"kv_bytes_per_token": 1_000_000, "kv_transfer_bandwidth": 1}),
        (0.125, {"kv_bytes_per_token": 1_000_000, "kv_transfer_bandwidth": 64, "speedup_ratio": 10}),
        (0.0, {"kv_bytes_per_token": 1_000_000}),
        (0.0, {"kv_bytes_per_token": 1_000_000, "kv_transfer_bandwidth": 0}),
        (0.0, {"kv_transfer_bandwidth": 64}),
    ],
)
def test_the_handoff_time_follows_from_kv_bytes_and_bandwidth(expected, given):
    assert MockEngineArgs(worker_type="prefill", **given).handoff_ms(8) == expected


@pytest.mark.parametrize(
    ("expected", "output", "ratio"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (2, 2, 0.5),
        (0, 2, 0.4),
        (2, 10, 0.1),
        (3, 10, 0.39),
        (10, 10, 1.0),
        (0, 10, 0.0),
        (50, 100, 0.5),
    ],
)
def test_the_reasoning_ratio_sets_the_number_of_thinking_tokens(expected, output, ratio):
    config = ReasoningConfig(7, 9, ratio)
    assert config.num_thinking_tokens(output) == expected
    tokens = [config.token_at(position, output) for position in range(output)]
    thinking = [7, *[None] * (expected - 2), 9] if expected else []
    assert tokens == [*thinking, *[None] * (output - expected)]


# ---------------------------------------------------------------------------------------------------------- of a
# profile


def test_a_profile_sets_sizes_and_leaves_other_fields_at_their_defaults():
    profile = EngineProfile(block_size=8, num_blocks=40, workers=3, dp_size=2, prefix_caching=False, seed=5)
    expected = MockEngineArgs(num_gpu_blocks=40, block_size=8, enable_prefix_caching=False, dp_size=2)
    assert MockEngineArgs.from_profile(profile) == expected
    assert MockEngineArgs.from_profile(profile, preemption_mode="fifo") == expected.replace(preemption_mode="fifo")


def test_arguments_override_the_defaults_of_a_profile():
    args = MockEngineArgs.from_profile(
        EngineProfile(), num_gpu_blocks=32, block_size=64, enable_prefix_caching=False, dp_size=2
    )
    assert MockEngineArgs(num_gpu_blocks=32, block_size=64, enable_prefix_caching=False, dp_size=2) == args


@pytest.mark.parametrize(
    ("profile", "engine", "message"),
    [
        ({"num_blocks": 64}, {"num_gpu_blocks": 32}, "num_gpu_blocks=32 contradicts num_blocks=64"),
        ({"block_size": 8}, {"block_size": 64}, "block_size=64 contradicts block_size=8"),
        (
            {"block_size": 8},
            {"engine_type": "sglang", "sglang": {"page_size": 4}},
            "sglang.page_size=4 contradicts block_size=8",
        ),
        (
            {"prefix_caching": False},
            {"enable_prefix_caching": True},
            "enable_prefix_caching=True contradicts prefix_caching=False",
        ),
        ({"dp_size": 2}, {"dp_size": 3}, "dp_size=3 contradicts dp_size=2"),
        ({"chunk": 8}, {"max_num_batched_tokens": 16}, "max_num_batched_tokens=16 contradicts chunk=8"),
        ({"chunk": 8}, {"max_num_batched_tokens": None}, "max_num_batched_tokens=None contradicts chunk=8"),
        (
            {"chunk": 8, "block_size": 4},
            {"engine_type": "sglang", "sglang": {"chunked_prefill_size": 16}},
            "sglang.chunked_prefill_size=16 contradicts chunk=8",
        ),
    ],
)
def test_arguments_that_contradict_explicit_profile_fields_are_refused(profile, engine, message):
    profile = EngineProfile(**profile)
    assert (
        refusal(MockEngineArgs.from_profile, profile, **engine)
        == f"{message} of the profile; set one of them, or both to the same value"
    )
    given = MockEngineArgs.from_profile(profile, explicit=(), **engine)
    for name, value in engine.items():
        shown = given.to_dict()[name]
        assert (value if name != "sglang" else {**shown, **value}) == shown


def test_the_caller_can_name_the_explicit_fields_of_a_profile():
    profile = EngineProfile(num_blocks=256)  # equal to the default, but set explicitly
    assert MockEngineArgs.from_profile(profile, num_gpu_blocks=32).num_gpu_blocks == 32
    assert (
        refusal(MockEngineArgs.from_profile, profile, explicit={"num_blocks", "seed"}, num_gpu_blocks=32)
    ) == "num_gpu_blocks=32 contradicts num_blocks=256 of the profile; set one of them, or both to the same value"
    assert MockEngineArgs.from_profile(profile, explicit={"num_blocks"}, num_gpu_blocks=256).num_gpu_blocks == 256


@pytest.mark.parametrize(
    ("expected", "engine"),
    [
        (16, {}),
        (16, {"block_size": 0}),
        (16, {"engine_type": "sglang"}),
        (4, {"engine_type": "sglang", "sglang": {"page_size": 4}}),
        (4, {"engine_type": "sglang", "block_size": 0, "sglang": {"page_size": 4}}),
        (16, {"sglang": {"page_size": 4}}),
        (4, {"block_size": 4}),
    ],
)
def test_the_block_size_defaults_to_that_of_the_profile(expected, engine):
    assert MockEngineArgs.from_profile(EngineProfile(), **engine).block_size == expected


def test_the_chunk_of_a_profile_sets_the_token_budget_of_a_pass():
    profile = EngineProfile(block_size=4, chunk=8)
    assert MockEngineArgs.from_profile(profile).max_num_batched_tokens == 8
    args = MockEngineArgs.from_profile(profile, engine_type="sglang", sglang={"schedule_policy": "lpm"})
    assert (SglangArgs("lpm", chunked_prefill_size=8), 8192) == (args.sglang, args.max_num_batched_tokens)
    assert MockEngineArgs.from_profile(EngineProfile()).max_num_batched_tokens == 8192


def test_any_object_with_the_profile_fields_is_accepted_as_a_profile():
    class Sizes:
        block_size, num_blocks, dp_size, prefix_caching, chunk = 4, 10, 1, True, None

    assert MockEngineArgs(block_size=4, num_gpu_blocks=10) == MockEngineArgs.from_profile(Sizes())
    assert (
        refusal(MockEngineArgs.from_profile, Sizes(), num_gpu_blocks=5)
    ) == "num_gpu_blocks=5 contradicts num_blocks=10 of the profile; set one of them, or both to the same value"


def test_from_profile_accepts_semantics_and_performance_model():
    args = MockEngineArgs.from_profile(EngineProfile(), semantics="1.6.1", performance_model=(1, 2))
    assert ("1.6.1", CallableModel(1, 2)) == (args.semantics, args.performance)


def test_planner_profile_data_accepts_a_path_object(tmp_path):
    path = Path(write_npz(tmp_path / "profile.npz", PROFILE))
    assert str(path) == MockEngineArgs.from_profile(EngineProfile(), planner_profile_data=path).planner_profile_data
