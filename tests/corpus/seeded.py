"""Digests of the results of seeds: traces, traffic, streams, replays, vectors, wire bytes, reproductions.

    python tests/corpus/seeded.py                 # prints the table
    python tests/corpus/seeded.py replay          # prints the rows whose names begin with this
    python tests/corpus/seeded.py --text NAME     # prints the text behind a row, to compare it with that of another checkout
    python tests/corpus/seeded.py --write         # replaces seeded.tsv

Tests and failure messages contain seeds, so a seed must give the same result in the next release. Users see the change
of a row: if the change is intended, the commit says why.
"""  # noqa: E501, W505

# ruff: noqa: T201 - it is a program too

import json
import logging
import re
import sys
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
TESTS = HERE.parent
sys.path += [str(TESTS / part) for part in (".", "interop", "wire", "oracle/faults", "testing", "harness/reduce")]

import faulty_worlds as of_reduce  # noqa: E402 - as above
import payloads  # noqa: E402 - the paths come first
import pytest  # noqa: E402 - as above
import replay_cases  # noqa: E402 - as above
import verdicts  # noqa: E402 - as above
from contract_runs import failure_of, names_of_tests  # noqa: E402 - as above
from mutants_indexes import INDEXES  # noqa: E402 - as above
from mutants_managers import MANAGERS  # noqa: E402 - as above
from mutants_policies import POLICIES  # noqa: E402 - as above
from mutants_workers import WORKERS  # noqa: E402 - as above

from pytest_kvmock import (  # noqa: E402 - as above
    BACKENDS,
    CapturingSink,
    EngineProfile,
    MockEngine,
    OutOfBlocks,
    RouterHarness,
    Stored,
    create_manager,
    replay,
)
from pytest_kvmock.contrib.scenarios.writing import scenario_text  # noqa: E402 - as above
from pytest_kvmock.contrib.vectors.vectors import write_vectors  # noqa: E402 - as above
from pytest_kvmock.engines import MockEngineArgs  # noqa: E402 - as above
from pytest_kvmock.engines.backends import registered  # noqa: E402 - as above
from pytest_kvmock.fleets import (  # noqa: E402 - as above
    EngineStalled,
    TraceRequest,
    synthetic_trace,
)
from pytest_kvmock.harness.reduce import reproduce  # noqa: E402 - as above
from pytest_kvmock.harness.reduce.program import NotReduced  # noqa: E402 - as above
from pytest_kvmock.testing.drafts import play, random_traffic  # noqa: E402 - as above
from pytest_kvmock.testing.manager.manager_checks import MoveTraffic  # noqa: E402 - as above
from pytest_kvmock.wire import DIALECTS, decode  # noqa: E402 - as above

TABLE = HERE / "seeded.tsv"
COLUMNS = "name", "digest"

# ------------------------------------------------------------------------------------------------ traces, traffic

TRACES = {
    "defaults": {},
    "small": {"block_size": 16, "groups": 3, "prefix_blocks": (0, 2), "turns": (2, 5), "interval_ms": 50},
    "short": {"input_tokens": (1, 40), "output_tokens": (0, 3), "delay_ms": (0, 9), "block_size": 8},
}
TRAFFIC = {
    "defaults": {},
    "wide": {"workers": 3, "ranks": 2, "most_blocks": 3, "numbers": 5, "most_tokens": 4},
    "bursts": {"workers": 2, "most_in_a_burst": 20, "steps": 120},
}


def trace(name, seed):
    return "\n".join(map(str, synthetic_trace(400, seed=seed, **TRACES[name])))


def traffic(name, seed):
    return str(random_traffic(seed, **TRAFFIC[name]))


# ----------------------------------------------------------------------------------------------- streams, replays


def stream(backend, seed):
    """Return the events of two workers with two ranks each, and the results of their requests."""
    profile = EngineProfile(4, 12, 2, 2, seed=seed, chunk=None if seed % 2 else 8)
    kv = RouterHarness(profile, backend)
    play(kv, random_traffic(seed, 80, workers=2, ranks=2))
    lines = [entry.event.to_json() + f" {entry.event.token_ids} {entry.event.extra}" for entry in kv.events]
    for key, worker in kv.workers.items():
        manager = worker.manager
        lines.append(f"{key} {sorted(manager.resident())} {manager.num_active_blocks} {manager.num_inactive_blocks}")
    return "\n".join([*lines, *map(str, kv.events.problems)])


def engines(backend, seed):
    """Return the events of two engines of a harness that share one clock, and the results of their requests."""
    rng = Random(f"engines {seed}")
    fields = {"max_num_seqs": rng.choice((1, 2, 8)), "max_num_batched_tokens": rng.choice((5, 16, 64))}
    kv = RouterHarness(EngineProfile(4, rng.choice((8, 12, 30)), 2, seed=seed), backend, engine=fields)
    prompts = [kv.prompt(rng.randint(1, 3), tail=rng.randint(0, 3)) for _ in range(3)]
    requests = []
    for number in range(16):
        engine = kv.engine(number % 2)
        with suppress(OutOfBlocks, ValueError):
            requests.append(engine.submit(rng.choice(prompts), rng.randint(1, 6), 7.0 * number))
        if not number % 5:
            engine.step()
        if number == 11:
            requests[rng.randrange(len(requests))].abort()
    for worker in range(2):
        with suppress(EngineStalled):
            kv.engine(worker).run()
    lines = [entry.event.to_json() + f" {entry.event.token_ids}" for entry in kv.events]
    lines += [f"{each.status} {each.generated_tokens} {each.cached_tokens} {each.preemptions}" for each in requests]
    lines += [str(kv.engine(worker).metrics) + f" {kv.engine(worker).now_ms}" for worker in range(2)]
    return "\n".join([*lines, *map(str, kv.events.problems)])


def moves(backend, seed):
    """Return the events that the traffic of moves in a contract publishes."""
    sink = CapturingSink()
    manager = create_manager(backend, num_blocks=8, block_size=4, sink=sink)
    traffic = MoveTraffic(manager, seed, fitting=False)
    held = []
    for _ in range(80):
        traffic.step()
        held.append(str(sorted(traffic.references.items(), key=str)))
    return "\n".join([*map(repr, sink.events), *held])


def report_text(report):
    """Return the summary of a report without means: Python 3.12 sums floats with a smaller error than older ones."""
    summary = report.to_json()
    return json.dumps(
        {name: summary[name] for name in summary if not name.startswith(("mean_", "std_"))}, sort_keys=True
    )


def replayed(case, seed):
    """Return the report of a random replay, or the reason why it does not end."""
    how = case["replay"]
    of_vllm = ("lineage", "lru", "multi_lru", "hash_cache", "vllm")
    is_sglang = case["scheduler"] == "sglang"
    backend, semantics = ("sglang", "mixed") if is_sglang else (of_vllm[seed % 5], "1.2.1")

    def engines(fields, count):
        if fields is None:
            return []
        args = MockEngineArgs(**fields, semantics=semantics)
        return [MockEngine(args, backend=backend, seed=number) for number in range(how.get(count, 1))]

    decode = engines(case.get("engine"), "num_workers") or engines(case.get("decode_engine"), "num_decode_workers")
    prefill = engines(case.get("prefill_engine"), "num_prefill_workers")
    try:
        report = replay(
            [request_of(row) for row in case["requests"]],
            decode,
            prefill,
            concurrency=how.get("replay_concurrency"),
            arrival_speedup=how.get("arrival_speedup_ratio", 1.0),
            trace_block_size=how["trace_block_size"],
        )
    except (EngineStalled, OutOfBlocks, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    rows = [json.dumps(row, sort_keys=True) for row in report.per_request()]
    metrics = [str(each.metrics) for each in (*prefill, *decode)]
    return "\n".join([report_text(report), *rows, *metrics])


def hosted(seed):
    """Return the report and the events of a replay of the kind "vllm" with a host tier below the device."""
    rng = Random(f"host {seed}")
    case = replay_cases.random_case("vllm", seed)
    host = {
        "num_g2_blocks": rng.choice((4, 16, 64)),
        "offload_batch_size": rng.choice((1, 2, 4)),
        "kv_bytes_per_token": rng.choice((0, 1000, 250_000)),
        "bandwidth_g1_to_g2_gbps": rng.choice((0.0, 1.0, 14.0)),
        "bandwidth_g2_to_g1_gbps": rng.choice((0.5, 1.0)),
        "performance_model": (10.0, 1.0),
    }
    engine = {name: value for name, value in case["engine"].items() if not name.endswith("speedup_ratio")}
    sink = CapturingSink()
    one = MockEngine(MockEngineArgs(**engine, **host), backend=("lineage", "lru", "multi_lru")[seed % 3], sink=sink)
    try:
        report = replay([request_of(row) for row in case["requests"]], [one], concurrency=1 + seed % 3)
    except (EngineStalled, OutOfBlocks, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    rows = [json.dumps(row, sort_keys=True) for row in report.per_request()]
    return "\n".join([report_text(report), *rows, *map(repr, sink.router_events)])


def longest_prefix_first(seed):
    """Return the report of a replay of many similar prompts under SGLang's longest-prefix-first policy."""
    rng = Random(f"lpm {seed}")
    page = rng.choice((1, 4, 16, 32))
    sglang = {"page_size": page, "schedule_policy": "lpm"}
    if seed % 3:
        sglang["chunked_prefill_size"] = 32 * rng.choice((1, 2))
    args = MockEngineArgs(
        engine_type="sglang",
        block_size=page,
        num_gpu_blocks=rng.choice((160, 320)) // page + 4,
        max_num_seqs=rng.choice((1, 2, 3)),
        sglang=sglang,
    )
    engine = MockEngine(args, seed=seed)
    prompts = [[*range(100 * n, 100 * n + length)] for n, length in enumerate((24, 31, 32, 33, 40, 64))]
    for _ in range(12):
        prompt = rng.choice(prompts)[: rng.choice((31, 32, 33, 64))]
        engine.submit([*prompt, *range(5000, 5000 + rng.randint(0, 9))], rng.randint(1, 4))
    try:
        engine.run()
    except (EngineStalled, OutOfBlocks) as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(f"{each.admitted_ms} {each.cached_tokens} {each.status}" for each in engine.requests)


def request_of(row):
    lengths = row["input_length"], row["output_length"], tuple(row["hash_ids"])
    return TraceRequest(row.get("timestamp"), *lengths, row.get("session_id"), row.get("delay"))


# ----------------------------------------------------------------------------------------------------------- wire


def wire(name):
    """Return the bytes of a dialect, and what is decoded from damaged copies of them."""
    rng = Random(name)
    lines = []
    for payload in payloads.payloads(name):
        lines += [payload.hex(), repr(decode(payload, name))]
        for number in range(160):
            if number % 2 and DIALECTS[name].is_msgpack:
                damaged = payloads.mutated_tree(rng, payload)
            else:
                damaged = payloads.mutated_bytes(rng, payload)
            read = decode(damaged, name, worker_id=3, dp_rank=1, first_event_id=7)
            lines += [damaged.hex(), read_text(read)]
    return "\n".join(lines)


def read_text(read):
    return re.sub(" object at 0x[0-9a-f]+", "", "\n".join([repr(read), *map(str, read.problems)]))


VECTORS = ("vllm-0.19", "vllm-0.33", "sglang-0.5.23", "dynamo-router-event")


def vectors(dialect, seed):
    """Return the files of a dialect. Files about all dialects are left out: they name the version of the package."""
    with tempfile.TemporaryDirectory() as directory:
        write_vectors(directory, dialects=[dialect], seed=seed)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        found = {path.relative_to(directory).as_posix(): path for path in files}
        return "\n".join(
            f"{name} {sha256(without_head(path)).hexdigest()}"
            for name, path in found.items()
            if name not in ("index.json", "README.md")
        )


def without_head(path):
    """Return the bytes of a file; for a capture, without its first line, which names the version."""
    data = path.read_bytes()
    return data.partition(b"\n")[2] if path.name == "capture.jsonl" else data


# --------------------------------------------------------------------------------------------------- reproductions


ODD = ("right/", "managers/StopsWhenNobodyListens")
"""Cases without a bug, and a manager that follows the harness itself."""


IN_TURN = (*BACKENDS, "mocker_sglang_1_6")
"""The backends over which bugs are reduced. Another number of them would pair bugs with other backends."""


def reduced():
    """Yield the bugs to reduce, each with a backend and with a level: events or requests."""
    cases = [case for case in verdicts.cases() if "+" not in case.name and not case.name.startswith(ODD)]
    for place, case in enumerate(cases):
        backends = IN_TURN if case.backends() == [*BACKENDS] else case.backends()
        yield case, backends[place % len(backends)], ("events", "requests")[place // 2 % 2]


def reduction(case, backend, level):
    """Return the smallest reproduction of a known bug, and the number of replays to find it."""
    return re.sub(r"\.py:\d+", ".py", reduced_text(verdicts.run(case, backend, 0)[0], level))


LATE = {"overflows": of_reduce.Overflows, "forgets": of_reduce.ForgetsOldest, "long": of_reduce.ForgetsLongRemoved}


def late(name, sync, level):
    """Return the reproduction for an index that is not compared after every event, over workers of several backends."""
    kv = RouterHarness(EngineProfile(4, 10, 2), "lineage", LATE[name](), sync=sync)
    kv.worker(5, dp_rank=0, backend="multi_lru")
    rng = Random(f"{name} {sync}")
    for _ in range(40):
        kv.worker(rng.choice((0, 1, 5)), dp_rank=0).serve([*range(100 * rng.randrange(9), 900)][: rng.randint(4, 20)])
    if name == "long":
        kv.make_sink(num_blocks=2)(Stored(None, (1, 2, 3), (1, 2, 3)))
    kv.judge()
    return reduced_text(kv, level)


def driven(name, by):
    """Return the reproduction for a faulty engine whose workers were driven in virtual time."""
    with registered({name: of_reduce.FAULTY[name]}):
        kv = RouterHarness(EngineProfile(4, 24, 2), name, engine={"max_num_seqs": 3})
        rng = Random(f"{name} {by}")
        shared = [kv.prompt(3) for _ in range(6)]
        for number in range(30):
            prompt = kv.prompt(rng.randrange(1, 5), after=rng.choice(shared))
            arrival = 30.0 * number if by == "arrival" else None
            kv.engine(rng.randrange(2)).submit(prompt, rng.choice([1, 2, 6, 9]), arrival)
            if by == "step":
                kv.engine(rng.randrange(2)).step()
        for worker in (0, 1):
            kv.engine(worker).run()
        kv.judge()
        return reduced_text(kv, "requests")


def reduced_text(kv, level):
    try:
        found = reproduce(kv, level=level, work=4_000)
    except NotReduced as reason:
        return f"not reduced: {reason}"
    sizes = f"{found.cut_from} {found.replays} {found.complete} {found.breach}"
    return "\n".join([sizes, found.as_test(), scenario_text(found, "reduced")])


# ------------------------------------------------------------------------------------------------------- contracts

TOO_LONG = (
    "test_it_follows_live_traffic",
    "test_many_events_may_come_before_a_flush",
    "test_it_holds_what_a_fleet_has",
    "test_a_look_up_costs_no_more_than_its_share",
    "test_events_may_come_from_threads",
)
"""These tests take a tenth of a second or more, or their messages depend on the clock or on threads. They have tests
of their own."""

BY_THREADS = "test_look_ups_may_come_from_threads"
"""The order of threads decides the text of its message after the first colon."""


def contract(subject):
    """Return the message of each test of a contract for a broken subject."""
    lines = []
    for name in names_of_tests(subject):
        if name not in TOO_LONG:
            try:
                message = failure_of(subject, name)
            except pytest.skip.Exception as skipped:
                message = f"skipped: {skipped}"
            except Exception as error:  # noqa: BLE001 - of a broken subject
                message = f"raised {type(error).__name__}"
            # pytest indents the messages of asserts, and adds values to them.
            message = re.sub(r"\n\s*", "\n", re.split(r"(?:^|: |\n)assert ", str(message))[0])
            if name == BY_THREADS:
                message = message.partition(":")[0]
            if "the index holds" in message:  # counts of Python objects, some shared with tests that ran before
                message = re.sub(r"[\d,]+ objects|(and|left) [\d,]{4,}", "...", message)
            lines.append(f"{name}: {message}")
    return re.sub(r"0x[0-9a-f]{12}\b", "0x...", "\n".join(lines))


# ----------------------------------------------------------------------------------------------------------- table


def rows():
    """Yield the name of each row, and a function that makes its text."""
    for name in TRACES:
        for seed in range(2):
            yield f"trace/{name}/{seed}", lambda name=name, seed=seed: trace(name, seed)
    for name in TRAFFIC:
        for seed in range(3):
            yield f"traffic/{name}/{seed}", lambda name=name, seed=seed: traffic(name, seed)
    for backend, spec in BACKENDS.items():
        if spec.group is not None:  # hybrid engines are tested by their recordings
            continue
        for seed in range(4):
            yield f"stream/{backend}/{seed}", lambda backend=backend, seed=seed: stream(backend, seed)
        for seed in range(6):
            yield f"engines/{backend}/{seed}", lambda backend=backend, seed=seed: engines(backend, seed)
    for backend in ("lineage", "lru", "multi_lru", "hash_cache"):
        for seed in range(5):
            yield f"moves/{backend}/{seed}", lambda backend=backend, seed=seed: moves(backend, seed)
    for mutants in (POLICIES, MANAGERS, WORKERS, INDEXES):
        for subject, *_ in mutants.cases:
            if subject.__name__.startswith("Shares"):  # it shares with all subjects made before it
                continue
            name = f"contract/{mutants.contract.__name__}/{subject.__name__}"
            yield name, lambda subject=subject: contract(subject)
    for kind in replay_cases.KINDS:
        for seed in range(120):
            case = replay_cases.random_case(kind, seed)
            if seed % 2 == (case["scheduler"] == "sglang"):  # the other seeds were of releases that are gone
                yield f"replay/{kind}/{seed}", lambda case=case, seed=seed: replayed(case, seed)
    for seed in range(40):
        yield f"replay/host/{seed}", lambda seed=seed: hosted(seed)
        if seed % 4 == 3:  # as above
            yield f"replay/lpm/{seed}", lambda seed=seed: longest_prefix_first(seed)
    for name in DIALECTS:
        yield f"wire/{name}", lambda name=name: wire(name)
    for dialect in VECTORS:
        yield f"vectors/{dialect}", lambda dialect=dialect: vectors(dialect, 0)
    for name in LATE:
        for sync in ("every", "auto", "burst", "end"):
            for level in ("events", "requests"):
                given = name, sync, level
                yield f"reduction/late/{name}/{sync}/{level}", lambda given=given: late(*given)
    for place, name in enumerate(of_reduce.FAULTY):
        by = ("run", "step", "arrival")[place % 3]
        yield f"reduction/driven/{name}/{by}", lambda name=name, by=by: driven(name, by)
    for given in reduced():
        case, backend, level = given
        yield f"reduction/{case.name}/{backend}/{level}", lambda given=given: reduction(*given)


def group_of(name):
    """Return the name of the group of rows that one test compares."""
    kind, what = name.split("/")[:2]
    return kind if kind in ("trace", "traffic") else f"{kind}/{what}"


def lines(begin=""):
    """Return the lines of the table for the rows whose names begin with `begin`."""
    return [f"{name}\t{digest(make())}" for name, make in rows() if name.startswith(begin)]


def digest(text):
    return sha256(text.encode()).hexdigest()[:16]


def main(arguments):
    logging.disable()
    if arguments == ["--write"]:
        TABLE.write_text("\n".join(["\t".join(COLUMNS), *lines()]) + "\n", encoding="utf-8")
    elif arguments[:1] == ["--text"]:
        print(dict(rows())[arguments[1]]())
    else:
        print("\t".join(COLUMNS), *lines(*arguments), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
