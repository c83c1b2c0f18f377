"""Random replays of 1.6.1: cases as `replay_cases` makes them, with the nested arguments and the additions of that
release.

`engine` (or `prefill_engine` and `decode_engine`) is the argument group of that name; `dp_size` is next to it.
"""

from random import Random

from replay_cases import _OUTPUTS, _replay, _requests, _sessions_of, _speeds

KINDS = ("vllm", "sglang", "trtllm", "disaggregated", "moments", "ranks", "drafts")


def random_case(kind, seed):
    """Return the case of a seed and of a kind in KINDS; it is always the same."""
    if kind == "moments":
        return _moments(Random(f"1.6 moments {seed}"), random_case("disaggregated", seed) | {"kind": kind})
    if kind == "drafts":
        rng = Random(f"1.6 drafts {seed}")
        return _drafts(rng, random_case(rng.choice(("vllm", "sglang", "trtllm")), seed) | {"kind": kind})
    case = _case(Random(f"1.6 {kind} {seed}"), kind, {"kind": kind, "seed": seed})
    _watch(Random(f"1.6 watch {kind} {seed}"), case)
    if case.get("engine", {}).get("backend") == "sglang":
        _strain(Random(f"1.6 strain {kind} {seed}"), case)
    return case


def _case(rng, kind, case):
    if kind == "disaggregated":
        return case | _disaggregated(rng)
    engine = _sglang(rng) if kind == "sglang" or (kind == "ranks" and rng.random() < 0.4) else _vllm(rng)
    if kind == "trtllm":
        engine["backend"] = kind
    replay = _replay(rng, engine)
    if kind == "ranks":
        case["dp_size"] = rng.choice((2, 2, 3))
        if engine["backend"] == "sglang":
            engine["prefill_decode_interval"] = rng.choice((0, 1, 2, 5))
        else:
            engine["prefill_schedule_interval"] = rng.choice((1, 2, 3, 5))
    elif engine["backend"] == "sglang" and rng.random() < 0.2:
        engine["prefill_decode_interval"] = rng.choice((1, 2, 5))
    return case | {"engine": engine, "replay": replay, "requests": _rows(rng, engine, replay, rng.randint(2, 10))}


def _drafts(rng, case):
    """Make passes try drafts, and give requests enough output for some."""
    engine = case["engine"]
    engine.pop("decode_speedup_ratio", None)  # it must be 1
    engine["aic_nextn"] = rng.randint(1, 5)
    if rng.random() < 0.7:
        rates = [round(rng.random(), 2) for _ in range(engine["aic_nextn"])]
        engine["aic_nextn_accept_rates"] = ",".join(map(str, rates))
    if rng.random() < 0.5:
        engine["aic_mtp_seed"] = rng.randrange(2**30)
    for row in case["requests"]:
        if rng.random() < 0.6:
            row["output_length"] = rng.randint(1, 40)
    return case


def _moments(rng, case):
    """Make passes last tens of milliseconds and requests arrive at such times, so that several events coincide."""
    for name in ("prefill_engine", "decode_engine"):
        engine = case[name]
        for field in ("speedup_ratio", "decode_speedup_ratio"):
            engine.pop(field, None)
        decode_ms = rng.choice((5.0, 10.0, 10.0))
        engine["timing_model"] = {"type": "fixed", "prefill_ms": rng.choice((10.0, 20.0)), "decode_ms": decode_ms}
        if rng.random() < 0.6:
            for field in ("kv_transfer_bytes_per_token", "kv_transfer_bandwidth"):
                engine.pop(field, None)
    case["replay"].pop("arrival_speedup_ratio", None)
    for row in case["requests"]:
        row.update({name: row[name] // 10 * 10 for name in ("timestamp", "delay") if name in row})
    return case


def random_cases(kind, number, first=0):
    """Return the cases of `number` seeds, beginning with `first`."""
    return [random_case(kind, seed) for seed in range(first, first + number)]


def _watch(rng, case):
    """Make the clock of some cases stop, their report count goodput, and add a row without a session."""
    replay = case["replay"]
    if rng.random() < 0.2:
        replay["max_sim_time_ms"] = rng.choice((0.0, 5.0, 20.0, 61.3, 150.0, 400.0))
    if rng.random() < 0.1:
        replay["sla_e2e_ms"] = rng.choice((20.0, 90.0, 300.0))
    elif rng.random() < 0.2:
        replay["sla_ttft_ms"] = rng.choice((16.7, 30.0, 100.0))
        if rng.random() < 0.5:
            replay["sla_itl_ms"] = rng.choice((6.82, 7.0, 12.0))
    if "prefill_schedule_interval" in case.get("engine", ()) and rng.random() < 0.2:
        case["engine"]["max_num_batched_tokens"] = rng.choice((1, 2, 3))  # fewer than the decoding requests
    if rng.random() < 0.2:
        row = {"timestamp": 0} | rng.choice(case["requests"])
        alone = {name: value for name, value in row.items() if name not in ("session_id", "delay")}
        case["requests"].insert(rng.randint(0, len(case["requests"])), alone)


def _strain(rng, case):
    """Give some cases of SGLang's type more requests, many without output, and a queue that is sorted and waits."""
    engine, replay, rows = case["engine"], case["replay"], case["requests"]
    if rng.random() < 0.3 and not any("session_id" in row for row in rows):
        rows += _requests(rng, engine, rng.randint(10, 20), hash_size=replay["trace_block_size"])
    if rng.random() < 0.4:
        for row in rows:
            if rng.random() < 0.3:
                row["output_length"] = 0
    if rng.random() < 0.2:
        engine["sglang"] |= {"schedule_policy": "lpm", "clip_max_new_tokens": rng.choice((1, 2, 3))}
        engine["prefill_decode_interval"] = rng.choice((1, 2, 3))


def _rows(rng, engine, replay, number):
    """Return requests: alone or in sessions, a few without output, a few that are too large."""
    replay["trace_block_size"] = max(4, engine["block_size"])  # with fewer, lengths do not fit the hash ids
    if rng.random() < 0.3:
        rows = _sessions_of(rng, engine, replay)
    else:
        rows = _requests(rng, engine, number, hash_size=replay["trace_block_size"])
    for row in rows:
        if rng.random() < 0.04:
            row["output_length"] = 0
        elif rng.random() < 0.1:
            row["output_length"] = rng.choice((*_OUTPUTS, 20, 30))
    return rows


def _vllm(rng):
    size = rng.choice((4, 4, 4, 8, 8, 16, 2))
    engine = {"backend": "vllm", "block_size": size, "num_gpu_blocks": rng.choice((5, 6, 8, 10, 13, 13, 20, 40, 100))}
    if rng.random() < 0.55:
        engine["max_num_batched_tokens"] = rng.choice((size + 1, 2 * size, 3 * size, 16, 64, rng.randint(2, 100), None))
    if rng.random() < 0.3:
        engine["max_num_seqs"] = rng.choice((1, 2, 3, 4, None))
    if rng.random() < 0.2:
        engine["enable_prefix_caching"] = False
    if rng.random() < 0.2:
        engine["enable_chunked_prefill"] = False
    if rng.random() < 0.3:
        engine["preemption_mode"] = "fifo"
    return engine | _common(rng, engine)


def _sglang(rng):
    page = rng.choice((4, 4, 4, 2, 8, 1))
    options = {}
    if rng.random() < 0.45:
        options["schedule_policy"] = rng.choice(("lpm", "lpm", "fifo"))
    if rng.random() < 0.4:
        options["chunked_prefill_size"] = page * rng.choice((2, 3, 4, 6, 8))
    if rng.random() < 0.2:
        options["max_prefill_tokens"] = rng.choice((16, 30, 32, 40, 64))
    if rng.random() < 0.3:
        options["schedule_conservativeness"] = rng.choice((0.0, 0.2, 0.5, 0.9, 1.0, 1.5, 2.0))
    if rng.random() < 0.25:
        options["clip_max_new_tokens"] = rng.choice((1, 2, 4, 6, 100))
    blocks = max(4, rng.choice((10, 12, 16, 16, 24, 24, 24, 60)) * 4 // page)
    engine = {"backend": "sglang", "block_size": page, "num_gpu_blocks": blocks, "sglang": options}
    if rng.random() < 0.35:
        engine["max_num_seqs"] = rng.randint(1, 3)
    if rng.random() < 0.12:
        engine["enable_prefix_caching"] = False
    return engine | _common(rng, engine)


def _common(rng, engine):
    found = _speeds(rng) if rng.random() < 0.5 else {}
    if rng.random() < 0.12:
        found["max_model_len"] = rng.randint(3, engine["num_gpu_blocks"] * engine["block_size"])
    if rng.random() < 0.12:
        found["timing_model"] = {
            "type": "fixed",
            "prefill_ms": rng.choice((0.0, 2.5, 10.0)),
            "decode_ms": rng.choice((0.25, 1.0, 3.3)),
        }
    return found


def _disaggregated(rng):
    kind = rng.choice(("vllm", "sglang"))
    make = _vllm if kind == "vllm" else _sglang
    first = make(rng)
    engines = {}
    for worker in ("prefill", "decode"):
        engine = make(rng) | {"block_size": first["block_size"], "worker_type": worker}
        engine["num_gpu_blocks"] = max(engine["num_gpu_blocks"], 8)
        options = engine.get("sglang", {})
        options.pop("chunked_prefill_size", None)  # it is for another page size
        if rng.random() < 0.5:
            engine.pop("max_model_len", None)
        if rng.random() < 0.7:
            engine["kv_transfer_bytes_per_token"] = rng.choice((1_000, 1_000_000))
            engine["kv_transfer_bandwidth"] = rng.choice((0.0, 0.5, 1.0, 8.0))
        if rng.random() < 0.3:
            engine["kv_transfer_timing_mode"] = "destination_missing"
        engines[f"{worker}_engine"] = engine
    smallest = min(engines.values(), key=lambda engine: engine["num_gpu_blocks"])
    replay = _replay(rng, smallest)
    if replay.pop("num_workers", None) or rng.random() < 0.4:
        replay["num_prefill_workers"], replay["num_decode_workers"] = rng.choice(((1, 2), (2, 1), (2, 2), (1, 3)))
    else:
        replay["num_prefill_workers"] = replay["num_decode_workers"] = 1
    rows = _rows(rng, smallest, replay, rng.randint(1, 8))
    for row in rows:  # a request without output keeps its pages until its pass ends
        row["output_length"] = max(1, row["output_length"])
    return {**engines, "replay": replay, "requests": rows}
