"""Random replays of the kinds that are recorded: cases of only numbers, strings and lists, one for each seed.

A case is a dict like those of the recordings: `scheduler` ("vllm" or "sglang"), `seed`, `requests` (rows of a Mooncake
trace), `engine` (or `prefill_engine` and `decode_engine`) and `replay`: the arguments of Dynamo's `MockEngineArgs` and
`run_mocker_trace_replay`.
"""

from random import Random

KINDS = ("vllm", "sglang", "disaggregated", "sessions")
_ARRIVAL_GAPS = (0, 0, 0, 1, 3, 10, 40, 100)  # ms
_OUTPUTS = (1, 1, 2, 2, 3, 3, 5, 8, 12)


def random_case(kind, seed):
    """Return the case of a seed and of a kind in KINDS; it is always the same."""
    rng = Random(f"{kind} {seed}")
    case = {"scheduler": "vllm", "kind": kind, "seed": seed}
    if kind == "vllm":
        case |= _vllm(rng)
    elif kind == "sglang":
        case |= _sglang(rng)
    elif kind == "disaggregated":
        case |= _disaggregated(rng)
    else:
        case |= _sessions(rng)
    return case


def routed_case(seed):
    """Return the case of a seed with two or more workers behind Dynamo's KV router."""
    rng = Random(f"routed {seed}")
    case = {"scheduler": "vllm", "kind": "routed", "seed": seed} | _vllm(rng)
    case["engine"].pop("enable_prefix_caching", None)  # 1.2.1 sends its router events even without it
    case["replay"]["num_workers"] = rng.choice((2, 2, 3, 4, 8))
    if "replay_concurrency" in case["replay"]:
        case["replay"]["replay_concurrency"] = rng.choice((1, 2, 3, 6, 12))
    if rng.random() < 0.3:
        case["requests"] = _sessions_of(rng, case["engine"], case["replay"])
    else:
        case["requests"] = _requests(rng, case["engine"], rng.randint(6, 30))
    options = {
        "overlap_score_credit": (0.0, 0.3, 0.5, 1.0),
        "prefill_load_scale": (0.0, 0.5, 1.7, 2.0),
        "router_queue_threshold": (None, 0.0, 0.0005, 0.002, 0.25, 1.0),
        "router_queue_policy": ("fcfs", "lcfs", "wspt"),
        "router_temperature": (0.2, 1.0),
        "router_track_active_blocks": (False,),
        "router_track_prefill_tokens": (False,),
        "router_assume_kv_reuse": (False,),
    }
    often = ("router_queue_threshold", "router_queue_policy")
    case["router"] = {
        name: rng.choice(values) for name, values in options.items() if rng.random() < (0.4 if name in often else 0.15)
    }
    return case


def random_cases(kind, number, first=0):
    """Return the cases of `number` seeds, beginning with `first`."""
    return [random_case(kind, seed) for seed in range(first, first + number)]


def _vllm(rng):
    engine = _vllm_engine(rng)
    requests = _requests(rng, engine, rng.randint(2, 10))
    return {"requests": requests, "engine": engine, "replay": _replay(rng, engine)}


def _vllm_engine(rng):
    size = rng.choice((4, 4, 4, 8, 8, 16, 16))
    engine = {"block_size": size, "num_gpu_blocks": rng.choice((6, 8, 8, 10, 13, 13, 20, 20, 40, 100))}
    if rng.random() < 0.55:
        engine["max_num_batched_tokens"] = rng.choice(
            (size + 1, 2 * size, 3 * size, 4 * size, 16, 64, rng.randint(5, 100), rng.randint(5, 100))
        )
    if rng.random() < 0.3:
        engine["max_num_seqs"] = rng.randint(1, 4)
    if rng.random() < 0.2:
        engine["enable_prefix_caching"] = False
    if rng.random() < 0.15:
        engine["enable_chunked_prefill"] = False
    if rng.random() < 0.25:
        engine["preemption_mode"] = "fifo"
    return engine | _speeds(rng)


def _speeds(rng):
    speeds = {}
    if rng.random() < 0.25:
        speeds["speedup_ratio"] = rng.choice((0.0, 0.5, 2.0, 3.0, 7.3, 1000.0))
    if rng.random() < 0.25:
        speeds["decode_speedup_ratio"] = rng.choice((0.0, 0.5, 2.0, 3.0))
    return speeds


def _sglang(rng):
    page = rng.choice((4, 4, 4, 4, 2, 8, 1))
    options = {"page_size": page}
    if rng.random() < 0.45:
        options["schedule_policy"] = rng.choice(("lpm", "lpm", "lpm", "fifo", "fcfs"))
    if rng.random() < 0.35:
        options["chunked_prefill_size"] = page * rng.choice((1, 2, 4, 6, 8))
    if rng.random() < 0.2:
        options["max_prefill_tokens"] = rng.choice((16, 30, 32, 40, 64))
    if rng.random() < 0.25:
        options["schedule_conservativeness"] = rng.choice((0.0, 0.2, 0.5, 0.9, 1.0, 1.5))
    if rng.random() < 0.25:
        options["clip_max_new_tokens"] = rng.choice((1, 2, 4, 6))
    blocks = rng.choice((10, 12, 16, 16, 24, 24, 24, 24, 60, 60)) * 4 // page
    engine = {"engine_type": "sglang", "block_size": page, "num_gpu_blocks": blocks, "sglang": options}
    if rng.random() < 0.3:
        engine["max_num_seqs"] = rng.randint(1, 3)
    if rng.random() < 0.1:
        engine["enable_prefix_caching"] = False
    if rng.random() < 0.1:
        engine["max_num_batched_tokens"] = rng.choice((8, 16))
    engine |= _speeds(rng) if rng.random() < 0.4 else {}
    requests = _requests(rng, engine, rng.randint(2, 10), hash_size=max(page, 4))
    replay = _replay(rng, engine, hash_size=max(page, 4))
    return {"scheduler": "sglang", "requests": requests, "engine": engine, "replay": replay}


def _disaggregated(rng):
    size = rng.choice((4, 8, 16))
    link = {}
    if rng.random() < 0.5:
        link = {"kv_bytes_per_token": 1_000_000, "kv_transfer_bandwidth": rng.choice((0.5, 1.0, 8.0, 3.7))}
    engines = {}
    for worker in ("prefill", "decode"):
        engine = {"worker_type": worker, "block_size": size, "num_gpu_blocks": rng.choice((13, 20, 40, 100))}
        if rng.random() < 0.35:
            engine["max_num_batched_tokens"] = rng.choice((8, 16, 64, rng.randint(size + 1, 50)))
        if rng.random() < 0.15:
            engine["max_num_seqs"] = rng.randint(1, 3)
        if rng.random() < 0.1:
            engine["enable_prefix_caching"] = False
        engine |= _speeds(rng) if rng.random() < 0.3 else {}
        engines[f"{worker}_engine"] = engine | link
    smallest = min(engines.values(), key=lambda engine: engine["num_gpu_blocks"])
    replay = _replay(rng, smallest)
    if replay.pop("num_workers", None) or rng.random() < 0.3:
        replay["num_prefill_workers"], replay["num_decode_workers"] = rng.choice(((1, 2), (2, 1), (2, 2), (3, 2)))
    return {"requests": _requests(rng, smallest, rng.randint(1, 8)), **engines, "replay": replay, "disaggregated": True}


def _sessions(rng):
    """Return a case of conversations."""
    case = _sglang(rng) if rng.random() < 0.3 else _vllm(rng)
    return case | {"requests": _sessions_of(rng, case["engine"], case["replay"])}


def _sessions_of(rng, engine, replay):
    """Return conversations: a turn has the tokens of the turn before it, or of none, and more."""
    rows = []
    fresh = 1
    now = 0
    for number in range(rng.randint(1, 4)):
        now += rng.choice(_ARRIVAL_GAPS)
        ids = []
        at = now
        for turn in range(rng.randint(1, 4)):
            new = rng.randint(1, 2)
            ids = [*ids[: rng.choice((len(ids), len(ids), 1))], *range(fresh, fresh + new)]
            fresh += new
            row = {"timestamp": at, "session_id": f"s{number}"}
            row |= _lengths(rng, engine, ids, replay["trace_block_size"])
            if turn:
                at += rng.choice((0, 1, 20, 50))
                message = rng.choice(("delay", "delay", "timestamp", "neither", "both"))
                row["timestamp"] = at
                if message in ("delay", "neither"):
                    del row["timestamp"]
                if message in ("delay", "both"):
                    row["delay"] = rng.choice((0, 0.5, 10, 50, 200))
            rows.append((at, row))
    order = rng.random()
    if order < 0.5:
        rows.sort(key=lambda row: row[0])  # sessions interleave
    elif order < 0.6:
        rows.sort(key=lambda row: row[1]["session_id"], reverse=True)  # the later sessions come first
    return [row for _, row in rows]


def _replay(rng, engine, hash_size=None):
    replay = {"trace_block_size": hash_size or engine["block_size"]}
    mode = rng.random()
    if mode < 0.45:
        replay["replay_concurrency"] = rng.randint(1, 3)
    elif mode < 0.65:
        replay["arrival_speedup_ratio"] = rng.choice((0.5, 2.0, 3.0))
    if rng.random() < 0.2:
        replay["num_workers"] = rng.choice((2, 2, 3))
    return replay


def _requests(rng, engine, number, hash_size=None):
    """Return rows with prompts of 1 to 5 hash ids; one in three begins like an earlier one."""
    size = hash_size or engine["block_size"]
    if rng.random() < 0.1 and engine["num_gpu_blocks"] >= 20:
        number += 10
    now = rng.choice((0, 0, 1, 3, 10, 40))
    rows, fresh = [], 1
    for _ in range(number):
        now += rng.choice(_ARRIVAL_GAPS)
        length = rng.randint(1, 5)
        ids = []
        if rows and rng.random() < 0.4:
            earlier = rng.choice(rows)["hash_ids"]
            ids = earlier[: rng.randint(1, len(earlier))][:length]
        new = length - len(ids)
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        rows.append({"timestamp": now} | _lengths(rng, engine, ids, size))
    if rng.random() < 0.1:
        rng.shuffle(rows)
    return rows


def _lengths(rng, engine, ids, size):
    """Return the lengths of a request with these hash ids, which nearly always fit its engine."""
    length = len(ids) * size - rng.choice((0, 0, 0, 1, size // 2))
    output = rng.choice(_OUTPUTS)
    while length + output > engine["num_gpu_blocks"] * engine["block_size"] and rng.random() < 0.98:
        output = rng.choice(_OUTPUTS)
        ids = ids[:-1] or ids
        length = min(length, len(ids) * size)
    return {"input_length": max(1, length), "output_length": output, "hash_ids": ids}
