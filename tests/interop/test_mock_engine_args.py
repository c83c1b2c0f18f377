"""`MockEngineArgs` and `InterpolatedModel` against those of ai-dynamo-runtime 1.2.1: what is accepted, JSON, times."""

import json
import random
import struct
import zipfile
from collections import Counter
from fractions import Fraction

import pytest
from peer import dynamo_core

from pytest_kvmock.engines import InterpolatedModel, MockEngineArgs, PolynomialModel

core = dynamo_core("1.2")

INTEGERS = {
    "num_gpu_blocks": 1,
    "block_size": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "dp_size": 1,
    "aic_tp_size": 0,
    "aic_moe_tp_size": 0,
    "aic_moe_ep_size": 0,
    "aic_attention_dp_size": 0,
    "bootstrap_port": 0,
    "kv_bytes_per_token": 0,
    "zmq_kv_events_port": 0,
    "zmq_replay_port": 0,
}
NUMBERS = ("speedup_ratio", "decode_speedup_ratio", "startup_time", "kv_transfer_bandwidth")
BOOLEANS = ("enable_prefix_caching", "enable_chunked_prefill", "enable_local_indexer")
STRINGS = ("aic_backend", "aic_system", "aic_backend_version", "aic_model_path")
NAMES = {
    "engine_type": ("vllm", "sglang", "tensorrt", "VLLM"),
    "worker_type": ("aggregated", "prefill", "decode", "Prefill"),
    "preemption_mode": ("lifo", "fifo", "FIFO"),
    "router_queue_policy": ("fcfs", "lcfs", "wspt", "lifo"),
}
OPTIONAL = {
    *STRINGS,
    "router_queue_policy",
    "startup_time",
    "kv_transfer_bandwidth",
    "max_num_seqs",
    "reasoning",
    "sglang",
}


def arguments(rnd):
    """Return some arguments: mostly of the right type, now and then out of range or unknown."""
    pools = {
        **{
            name: lambda least=least: rnd.choice([least, least + 1, 4, 8, 16, 17, 4096])
            for name, least in INTEGERS.items()
        },
        **{name: lambda: rnd.choice([0, 1, 0.0, 0.5, 2, 7.25, 1e9]) for name in NUMBERS},
        **{name: lambda: rnd.random() < 0.5 for name in (*BOOLEANS, "is_prefill", "is_decode", "has_perf_model")},
        **{name: lambda: rnd.choice(["", "a", "ä"]) for name in STRINGS},
        **{name: lambda names=names: rnd.choice(names) for name, names in NAMES.items()},
        "reasoning": lambda: reasoning(rnd),
        "sglang": lambda: sglang(rnd),
    }
    found = {name: pools[name]() for name in rnd.sample(sorted(pools), rnd.randint(0, 6))}
    if rnd.random() < 0.5:
        found["engine_type"] = "sglang"
    if rnd.random() < 0.1:
        name = rnd.choice([*INTEGERS, *NUMBERS])
        found[name] = rnd.choice([-1, 0]) if name in INTEGERS else -0.5
    if rnd.random() < 0.05:
        found[rnd.choice(["num_blocks", "max_model_len", "tp_size"])] = 4
    for name in rnd.sample(sorted(OPTIONAL), 2):
        if rnd.random() < 0.1:
            found[name] = None
    return found


def reasoning(rnd):
    config = {
        "start_thinking_token_id": rnd.choice([0, 5, 2**32 - 1, 2**32]),
        "end_thinking_token_id": 5,
        "thinking_ratio": rnd.choice([0, 0.25, 1]),
    }
    if rnd.random() < 0.1:
        del config[rnd.choice(list(config))]
    return config


def sglang(rnd):
    config = {
        "schedule_policy": rnd.choice([None, "fifo", "fcfs", "lpm"]),
        "page_size": rnd.choice([None, 1, 4, 8]),
        "max_prefill_tokens": rnd.choice([None, 16]),
        "chunked_prefill_size": rnd.choice([None, 4, 6, 8, 16]),
        "clip_max_new_tokens": rnd.choice([None, 0, 4]),
        "schedule_conservativeness": rnd.choice([None, 0, 0.5, 1.5, "much"]),
    }
    return {name: config[name] for name in rnd.sample(list(config), rnd.randint(0, 4))}


def theirs(given):
    """Return their dump, or None if they refuse the arguments."""
    try:
        return core.MockEngineArgs.from_json(json.dumps(given)).dump_json()
    except Exception:  # noqa: BLE001 - what they raise
        return None


def ours(given):
    try:
        return MockEngineArgs.from_json(json.dumps(given)).to_json()
    except ValueError:
        return None


def stricter(given):
    """Return whether only we refuse the arguments: an integer below 0, which they read as none."""
    return any(given.get(name) == -1 for name in INTEGERS)


@pytest.mark.parametrize("seed", range(10))
def test_random_arguments_are_accepted_and_dumped_like_the_originals(seed):
    rnd = random.Random(seed)
    counts = Counter()
    for _ in range(300):
        given = arguments(rnd)
        expected = theirs(given)
        if stricter(given):
            assert ours(given) is None, given
            counts["stricter"] += 1
        else:
            assert ours(given) == expected, given
            counts["refused" if expected is None else "accepted"] += 1
    assert counts["accepted"] > 100
    assert counts["refused"] > 40
    assert counts["stricter"] > 0


def test_trtllm_as_an_engine_type_came_with_a_later_release():
    given = {"engine_type": "trtllm"}
    assert theirs(given) is None
    assert MockEngineArgs(engine_type="trtllm").to_json() == ours(given)


def test_our_defaults_equal_the_originals():
    assert core.MockEngineArgs().dump_json() == MockEngineArgs().to_json()


STRICTER = [
    {"num_gpu_blocks": "8"},
    {"max_num_seqs": 2.5},
    {"enable_prefix_caching": 1},
    {"speedup_ratio": None},
    {"bootstrap_port": 65536},
    {"is_prefill": 1},
    {"planner_profile_data": "none.npz"},
    {"sglang": {"foo": 1}},
    {"sglang": {"schedule_policy": "LPM"}},
    {"sglang": {"schedule_conservativeness": -0.1}},
    {"sglang": {"page_size": 0}},
    {"engine_type": "sglang", "sglang": {"max_prefill_tokens": 0}},
    {"engine_type": "sglang", "sglang": {"chunked_prefill_size": 0}},
    {"reasoning": {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 1.5}},
]


@pytest.mark.parametrize("given", STRICTER, ids=repr)
def test_arguments_that_only_we_refuse_are_still_accepted_by_the_original(given):
    """The list of the docstring. An argument that fails here is no longer stricter, and is removed from it."""
    assert theirs(given) is not None
    assert ours(given) is None


# ------------------------------------------------------------------------------------------------------------- times


def nanoseconds(ms):
    return round(Fraction(ms / 1000) * 10**9)


def as_ms(ns):
    return (ns // 10**9 + ns % 10**9 / 1e9) * 1000


def replayed(folder, isl, **options):
    """Return the time to first token, in ms, of a single request of one output token on 100 blocks of 64."""
    trace = folder / "trace.jsonl"
    ids = list(range(-(-isl // 64)))
    trace.write_text(json.dumps({"timestamp": 0, "input_length": isl, "output_length": 1, "hash_ids": ids}) + "\n")
    args = core.MockEngineArgs(num_gpu_blocks=100, block_size=64, **options)
    return core.run_mocker_trace_replay(str(trace), extra_engine_args=args, trace_block_size=64)["mean_ttft_ms"]


def expected_of(model, isl):
    prefill = nanoseconds(model.prefill_ms(1, isl, 0))
    return as_ms(prefill) + as_ms(nanoseconds(model.decode_ms(-(-isl // 64) * 64, 6400, isl)))


def write_profile(path, arrays):
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in arrays.items():
            rows = values if isinstance(values[0], list) else None
            shape = (len(rows), len(rows[0])) if rows else (len(values),)
            flat = [each for row in rows for each in row] if rows else values
            header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            begin = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
            archive.writestr(f"{name}.npy", begin + struct.pack(f"<{len(flat)}d", *flat))
    return path


def profile(rnd):
    scale = rnd.choice([1, 1e6, 1e12])  # large times show more bits

    def axis(most):
        return [each + rnd.choice([0, rnd.random()]) for each in sorted(rnd.sample(range(1, most), rnd.randint(2, 5)))]

    def times(count):
        return [rnd.uniform(-20, 300) * scale for _ in range(count)]

    prefill, active, context = axis(4000), axis(9000), axis(4000)
    return {
        "prefill_isl": list(map(float, prefill)),
        "prefill_ttft_ms": times(len(prefill)),
        "decode_active_kv_tokens": list(map(float, active)),
        "decode_context_length": list(map(float, context)),
        "decode_itl": [times(len(context)) for _ in active],
    }


@pytest.mark.parametrize("seed", range(40))
def test_times_of_a_random_profile_equal_the_originals_to_the_bit(tmp_path, seed):
    rnd = random.Random(seed)
    path = write_profile(tmp_path / "profile.npz", profile(rnd))
    model = InterpolatedModel.from_npz(path)
    for _ in range(5):
        isl = rnd.randint(1, 5000)
        assert replayed(tmp_path, isl, planner_profile_data=str(path)) == expected_of(model, isl), isl


@pytest.mark.parametrize("isl", [1, 64, 128, 999, 5000, 6399])
def test_times_of_the_polynomial_equal_the_originals_to_the_bit(tmp_path, isl):
    assert replayed(tmp_path, isl) == expected_of(PolynomialModel(), isl)


@pytest.mark.parametrize("seed", range(40))
def test_the_time_of_a_handoff_equals_the_originals_to_the_bit(tmp_path, seed):
    """Unlike the other times, it is not rounded to nanoseconds."""
    rnd = random.Random(seed)
    link = {"kv_bytes_per_token": rnd.randint(1, 10**7), "kv_transfer_bandwidth": rnd.uniform(0.01, 100)}
    isl = rnd.randint(1, 3000)
    trace = tmp_path / "trace.jsonl"
    ids = list(range(-(-isl // 64)))
    trace.write_text(json.dumps({"timestamp": 0, "input_length": isl, "output_length": 1, "hash_ids": ids}) + "\n")
    sizes = {"num_gpu_blocks": 100, "block_size": 64}
    theirs = core.run_mocker_trace_replay(
        str(trace),
        prefill_engine_args=core.MockEngineArgs(worker_type="prefill", **sizes, **link),
        decode_engine_args=core.MockEngineArgs(worker_type="decode", **sizes),
        trace_block_size=64,
    )["mean_ttft_ms"]
    model, args = PolynomialModel(), MockEngineArgs(worker_type="prefill", **sizes, **link)
    prefill = as_ms(nanoseconds(model.prefill_ms(1, isl, 0)))
    decode = as_ms(nanoseconds(model.decode_ms(len(ids) * 64, 6400, isl)))
    assert theirs == (prefill + args.handoff_ms(isl)) + decode
