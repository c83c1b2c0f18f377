"""Names of vLLM's blocks are computed from parents and tokens: each changed event is found, and no other."""

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import hybrid_streams
import msgspec
import pytest
from captured import Captured
from depth import seeds, worth_its_time

from pytest_kvmock import BACKENDS, EngineProfile, EventRulesBroken, KvCacheEvent, Prompt, RouterHarness, Stored
from pytest_kvmock.engines import KvWorker, Speculative
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.servers import check_file
from pytest_kvmock.wire import DIALECTS, KvWire, StreamDigests

DATA = Path(__file__).parents[2] / "data"
OF_VLLM = [name for name in DIALECTS if name.startswith("vllm-")]
SAY_KEYS = [name for name in OF_VLLM if any(field.name == "extra_keys" for field in DIALECTS[name].stored)]
SIZE = 4
GIVEN = {"hash": "sha256_cbor", "seed": "0"}


def engine(dialect, wire=None):
    """Return a worker of the engine with this dialect, its events, and a wire for their bytes."""
    row = DIALECTS[dialect]
    spec = speaker_of(row)
    events = []
    worker = KvWorker(
        lambda sink: spec.make(num_blocks=64, block_size=SIZE, dp_rank=0, sink=sink),
        sink=events.append,
        driver=spec.driver,
    )
    digests = {0: StreamDigests.of_manager(worker.manager)} if row.hashes == "bytes" else None
    return worker, events, KvWire(row, digests=digests)


def traffic(dialect, seed=0, requests=30, *, keys=True):
    """Return the batches of random requests with shared prefixes; some have a salt, an adapter or an image."""
    worker, events, wire = engine(dialect)
    rng, prefixes = Random(seed), [[n * 1000 + i for i in range(16)] for n in range(3)]
    carried = [{}, {}, {"cache_salt": "t"}, {"lora_name": "a"}, {"multimodal": [("ab" * 32, 5, 6)]}]
    for _ in range(requests):
        tokens = rng.choice(prefixes)[: rng.randrange(12, 17)] + [rng.randrange(9000) for _ in range(rng.randrange(9))]
        worker.serve(Prompt(tokens, **(rng.choice(carried) if keys else {})), rng.randrange(7))
        with wire.step():
            for event in events:
                wire.publish(event)
        events.clear()
    return wire.payloads


def checked(tmp_path, payloads, dialect, **given):
    path = tmp_path / "a.msgpack"
    path.write_bytes(b"".join(payloads))
    return check_file(path, dialect=dialect, residency="counted", **given)


def wrong(found):
    return [problem for problem in found.problems if problem.rule == "wrong_hash"]


def computed(found):
    (note,) = (note for note in found.notes if "computed" in note)
    return int(note.split()[0].replace(",", "")), note


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["found", "given"])
@pytest.mark.parametrize("dialect", OF_VLLM)
@pytest.mark.parametrize("seed", seeds(20))
def test_an_engines_own_names_are_right(tmp_path, dialect, given, seed):
    found = checked(tmp_path, traffic(dialect, seed), dialect, **given)
    assert found.errors == []
    assert computed(found)[0]


def test_recorded_payloads_of_releases_have_right_names(tmp_path):
    count = 0
    for release in json.loads(gzip.decompress((DATA / "wire_releases.json.gz").read_bytes())):
        for case in release["cases"]:
            # Hand-made events have made-up names, and 0.9 named blocks by Python's own hash.
            if "refused" in case or "by hand" in case["name"] or case["dialect"] not in OF_VLLM[1:]:
                continue
            payload = bytes.fromhex(next(iter(case["published"].values())))
            for given in ({}, GIVEN):
                found = checked(tmp_path, [payload], case["dialect"], **given)
                assert wrong(found) == [], (case["dialect"], case["name"])
                count += any(note[0] != "0" for note in found.notes)
    assert count > 100


@worth_its_time
def test_recorded_streams_of_hybrid_models_and_of_a_host_have_right_names(tmp_path):
    streams = [each.batches for each in hybrid_streams.hybrid_streams(DATA / "vllm_0.33.0_hybrid_streams.json.gz")]
    streams += [batches for _, batches in hybrid_streams.offload_streams(DATA / "vllm_0.33.0_offload_streams.json.gz")]
    count = 0
    for batches in streams:
        payloads = list(map(hybrid_streams.payload, batches))
        if not payloads:
            continue
        for given in ({}, GIVEN):
            found = checked(tmp_path, payloads, "vllm-0.33", **given)
            assert wrong(found) == []
            count += any(note[0] != "0" for note in found.notes)
    assert count > 120


# -------------------------------------------------------------------------------------- names that look ahead


def looking_ahead(modules=1, algorithm="sha256_cbor", dialect="vllm-0.33"):
    """Return the batches of an engine whose names cover the next `modules` tokens."""
    make = partial(
        BACKENDS["vllm_mtp"].make, hash_algorithm=algorithm, speculative=Speculative(tokens=3, modules=modules)
    )
    events, wire = [], KvWire(dialect)
    worker = KvWorker(
        lambda sink: make(num_blocks=64, block_size=SIZE, dp_rank=0, sink=sink),
        sink=events.append,
        driver=BACKENDS["vllm_mtp"].driver,
    )
    rng = Random(modules)
    for _ in range(20):
        prompt = [*range(100, 100 + rng.randrange(8, 17)), *(rng.randrange(9000) for _ in range(rng.randrange(9)))]
        worker.serve(Prompt(prompt, **rng.choice([{}, {"cache_salt": "t"}])), rng.randrange(7))
    for event in events:
        wire.publish(event)
    return wire.payloads


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_names_that_look_ahead_are_computed_with_the_next_tokens(tmp_path, algorithm, modules):
    payloads = looking_ahead(modules, algorithm)
    batches = map(msgspec.msgpack.decode, payloads)
    names = sum(len(event.get("block_hashes", ())) for _, events, *_ in batches for event in events)
    assert names > 30
    for given in ({}, {"hash": algorithm, "seed": "0"}):
        found = checked(tmp_path, payloads, "vllm-0.33", **given)
        assert (found.errors, found.notes) == ([], [f"{names} names computed ({algorithm}, seed '0')"])


def next_token(fields):
    ahead = fields.get("lookahead_token_ids")
    if ahead and fields["parent_block_hash"] is None:
        ahead[-1][-1] += 1  # of the last block: nothing else in the event shows the change
        return True
    return False


def own_token(fields):
    if fields.get("lookahead_token_ids") and fields["parent_block_hash"] is None:
        fields["token_ids"][1] += 1
        return True
    return False


def without_lookahead(fields):
    return fields["parent_block_hash"] is None and fields.pop("lookahead_token_ids", None) is not None


@pytest.mark.parametrize("change", [next_token, own_token, without_lookahead])
def test_a_name_with_changed_look_ahead_tokens_is_found(tmp_path, change):
    payloads = changed(looking_ahead(), "vllm-0.33", change)
    assert wrong(checked(tmp_path, payloads, "vllm-0.33", **GIVEN))


# ------------------------------------------------------------------------------------------- what was changed


def changed(payloads, dialect, change):
    """Return the payloads with one Stored changed; `change` gets the fields of each by name until it returns True."""
    names = [field.name for field in DIALECTS[dialect].stored]
    is_done, out = False, []
    for payload in payloads:
        timestamp, events, *rest = msgspec.msgpack.decode(payload)
        for place, event in enumerate(events):
            is_map = isinstance(event, dict)
            tag = event["type"] if is_map else event[0]
            if is_done or tag != "BlockStored":
                continue
            fields = event if is_map else dict(zip(names, event[1:], strict=False))
            is_done = change(fields)
            if not is_map:
                events[place] = [tag, *fields.values()]
        out.append(msgspec.msgpack.encode([timestamp, events, *rest]))
    assert is_done
    return out


class AfterRoots:
    """Changes the first Stored below a parent after several roots; `roots` are the roots before it."""

    def __init__(self, change):
        self.change, self.roots = change, []

    def __call__(self, fields):
        if fields["parent_block_hash"] is None:
            self.roots.append(fields["block_hashes"][0])
            return False
        others = [root for root in self.roots if root != fields["parent_block_hash"]]
        if len(others) < 2:
            return False
        self.change(fields, others[0])
        return True


def other_parent(fields, other):
    fields["parent_block_hash"] = other


def no_parent(fields, other):
    fields["parent_block_hash"] = None


def other_tokens(fields, other):
    fields["token_ids"][1] += 1


def other_name(fields, other):
    name = fields["block_hashes"][0]
    fields["block_hashes"][0] = bytes([name[0] ^ 1, *name[1:-1], name[-1] ^ 1]) if isinstance(name, bytes) else name ^ 1


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["found", "given"])
@pytest.mark.parametrize("change", [other_parent, no_parent, other_tokens, other_name])
@pytest.mark.parametrize("dialect", SAY_KEYS)
def test_each_change_of_a_stored_is_found_once(tmp_path, dialect, change, given):
    payloads = changed(traffic(dialect, keys=False), dialect, AfterRoots(change))
    (problem,) = wrong(checked(tmp_path, payloads, dialect, **given))
    assert problem.is_error


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["found", "given"])
@pytest.mark.parametrize("change", [other_tokens, other_name])
def test_a_change_of_the_first_event_is_found(tmp_path, change, given):
    def first(fields):
        change(fields, None)
        return True

    payloads = changed(traffic("vllm-0.33", keys=False), "vllm-0.33", first)
    problem = wrong(checked(tmp_path, payloads, "vllm-0.33", **given))[0]
    assert problem.event.event.event_id == 0


@pytest.mark.parametrize("dialect", [name for name in OF_VLLM if name not in SAY_KEYS])
def test_a_wrong_parent_is_found_in_a_dialect_without_keys(tmp_path, dialect):
    payloads = changed(traffic(dialect, keys=False), dialect, AfterRoots(other_parent))
    (problem,) = wrong(checked(tmp_path, payloads, dialect))
    assert "; the hash fits parent" in problem.observed


@pytest.mark.parametrize("dialect", [name for name in OF_VLLM if name not in SAY_KEYS])
def test_a_wrong_name_is_found_in_a_dialect_without_keys_if_the_blocks_after_it_are_right(tmp_path, dialect):
    def of_a_second(fields):
        if len(fields["block_hashes"]) < 3:
            return False
        other_name(fields, None)
        return True

    payloads = changed(traffic(dialect, keys=False), dialect, of_a_second)
    assert wrong(checked(tmp_path, payloads, dialect, **GIVEN))


@pytest.mark.parametrize("keys", [{"cache_salt": "t"}, {"multimodal": [("ab" * 32, 5, 6)]}])
def test_keys_in_an_event_are_part_of_the_computed_names(tmp_path, keys):
    worker, events, wire = engine("vllm-0.33")
    worker.serve(range(100, 108))
    worker.serve(Prompt(range(20), **keys))
    with wire.step():
        for event in events:
            wire.publish(event)
    found = checked(tmp_path, wire.payloads, "vllm-0.33")
    assert (found.errors, computed(found)[0]) == ([], 7)

    def salted(fields):
        kept = any(fields["extra_keys"] or ())
        if kept:
            fields["extra_keys"] = [
                [*key[:-1], "u"] if key and isinstance(key[-1], str) else [["cd" * 32, 1]]
                for key in fields["extra_keys"]
            ]
        return kept

    assert wrong(checked(tmp_path, changed(wire.payloads, "vllm-0.33", salted), "vllm-0.33"))


# --------------------------------------------------------------------------------------- by what, and of how many


def test_one_note_counts_computed_names_and_the_others_by_reason(tmp_path):
    worker, events, wire = engine("vllm-0.33")
    worker.serve(range(12))
    worker.serve(Prompt(range(8), lora_name="a"))
    worker.serve(Prompt(range(8), cache_salt="t"))
    with wire.step():
        for event in events:
            wire.publish(event)
    found = checked(tmp_path, wire.payloads, "vllm-0.33")
    line = "5 names computed (sha256_cbor, seed '0'); 2 not: 2 with an adapter, whose path is hashed and on no wire"
    assert [line] == found.notes
    assert f"note: {line}\nclean" in found.text()


def test_a_wrong_name_is_reported_with_the_hash_algorithm_and_seed(tmp_path):
    found = checked(tmp_path, traffic("vllm-0.33"), "vllm-0.33", hash="sha256", seed="7")
    assert all(
        problem.expected.startswith("the chain of parent and tokens (sha256, seed '7') is ") for problem in wrong(found)
    )
    assert wrong(found)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", ["0", "42", None])
def test_the_hash_algorithm_is_detected_for_seed_0_and_without_a_seed(tmp_path, algorithm, seed):
    if seed is None and algorithm.startswith("xxhash"):
        pytest.skip("it has another seed in each process")
    worker, events, wire = keyed_engine(algorithm, seed)
    worker.serve(range(12))
    for event in events:
        wire.publish(event)
    for given, count in (
        ({}, 0 if seed == "42" else 3),
        ({"hash": algorithm}, 0 if seed == "42" else 3),
        ({"seed": seed}, 3),
    ):
        found = checked(tmp_path, wire.payloads, "vllm-0.33", **given)
        assert (count, []) == (computed(found)[0], found.errors), given


def keyed_engine(algorithm, seed, dialect="vllm-0.33"):
    row = DIALECTS[dialect]
    make = partial(speaker_of(row).make, hash_algorithm=algorithm, hash_seed=seed)
    events = []
    worker = KvWorker(
        lambda sink: make(num_blocks=64, block_size=SIZE, dp_rank=0, sink=sink),
        sink=events.append,
        driver=speaker_of(row).driver,
    )
    digests = {0: StreamDigests.of_manager(worker.manager)} if row.hashes == "bytes" else None
    return worker, events, KvWire(row, digests=digests)


def test_children_of_a_random_root_are_checked_if_the_parents_digest_is_known(tmp_path):
    def published(dialect):
        worker, events, wire = keyed_engine("sha256_cbor", "of this process", dialect)
        worker.serve(range(12))
        worker.serve(range(20))
        for event in events:
            wire.publish(event)
        return wire.payloads

    found = checked(tmp_path, published("vllm-0.33-bytes"), "vllm-0.33-bytes")
    assert found.notes == ["4 names computed (sha256_cbor, random root); 1 not: 1 below a random root"]
    found = checked(tmp_path, published("vllm-0.33"), "vllm-0.33")
    assert found.notes == ["0 names computed; 5 not: 5 by no hash and seed that were tried"]

    def child(fields):
        fields["token_ids"][-1] += 1
        return fields["parent_block_hash"] is not None

    assert wrong(checked(tmp_path, changed(published("vllm-0.33-bytes"), "vllm-0.33-bytes", child), "vllm-0.33-bytes"))


def test_children_of_unknown_blocks_do_not_use_up_the_detection_attempts(tmp_path):
    row, wire = DIALECTS["vllm-0.33"], KvWire("vllm-0.33")
    for number in range(100):
        wire.publish(Stored(2**62, (2**62 + 1 + number,), (7,)), token_ids=[[number] * SIZE])
    worker, events, _ = engine(row.name)
    worker.serve(range(12))
    for event in events:
        wire.publish(event)
    note = computed(checked(tmp_path, wire.payloads, row.name))[1]
    assert note == "3 names computed (sha256_cbor, seed '0'); 100 not: 100 below a parent whose name was not computed"


def test_an_invalid_hash_or_seed_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.msgpack"
    path.write_bytes(b"".join(traffic("vllm-0.33", requests=1)))
    for given, message in (
        ({"hash": "sha256_cbr"}, "unknown hash 'sha256_cbr'; did you mean 'sha256_cbor'"),
        ({"seed": ""}, "seed must be a string, as PYTHONHASHSEED is, or None; got ''"),
        (
            {"hash": "sha256", "dialect": "sglang-0.5.20"},
            "a hash is for dialects of vLLM.*; got dialect 'sglang-0.5.20'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_file(path, **{"dialect": "vllm-0.33", **given})


# ------------------------------------------------------------------------------------------------- of a sink


def replaced(event, **changes):
    """Return the event with other fields of its Stored."""
    return replace(event, event=replace(event.event, data=replace(event.event.data, **changes)))


def with_other_parent(event, root):
    return replaced(event, parent_hash=root)


def with_other_tokens(event, root):
    return replace(event, token_ids=[[7] * SIZE, *event.token_ids[1:]])


def with_other_name(event, root):
    names = event.event.data.block_hashes
    return replaced(event, block_hashes=(names[0] ^ 1, *names[1:]))


def into_sink(sink, change=None):
    """Publish an engine's events to a sink; `change` alters the second Stored of the first prompt, and blocks follow
    below it.
    """
    worker, events, _ = engine("vllm-0.33")
    for prompt in (range(12), range(100, 108), Prompt(range(200, 208), cache_salt="t"), range(20)):
        worker.serve(prompt)
    *before, last = events
    for event in (*before, last if change is None else change(last, events[1].event.data.block_hashes[0])):
        sink.publish(event.event, token_ids=[list(tokens) for tokens in event.token_ids], extra=event.extra)


CHANGES = [with_other_parent, with_other_tokens, with_other_name]


@pytest.mark.parametrize("given", [GIVEN, {}], ids=["given", "not given"])
def test_a_sink_with_vllms_names_has_no_problems(given):
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    into_sink(kv.make_sink(residency="counted", **given))
    kv.judge()
    assert kv.events.problems == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_sink_with_a_declared_hash_finds_a_change(change):
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    into_sink(kv.make_sink(residency="counted", **GIVEN), change)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.position) == ("wrong_hash", 3)


def carried_into(sink, dialect, change=None):
    """Publish prompts with a salt, an adapter and an image as an engine of a dialect does; `change` alters the last
    event.
    """
    worker, events, _ = engine(dialect)
    for keys in ({}, {"cache_salt": "t"}, {"lora_name": "a"}, {"multimodal": [("ab" * 32, 1, 6)]}, {"cache_salt": "u"}):
        worker.serve(Prompt(range(12), **keys))
    *before, last = events
    for event in (*before, last if change is None else change(last, None)):
        sink.publish(event.event, token_ids=[list(tokens) for tokens in event.token_ids], extra=event.extra)


@pytest.mark.parametrize("dialect", OF_VLLM[1:])  # 0.9 has signed names
def test_a_sink_of_any_release_is_right_with_all_keys_of_prompts(tmp_path, dialect):
    captured = Captured(tmp_path / "a.jsonl", profile=EngineProfile(block_size=SIZE))
    carried_into(captured.kv.make_sink(residency="counted", **GIVEN), dialect)
    assert (captured.found(), captured.again()) == ([], [])


def test_a_sink_with_right_salts_finds_a_change_of_a_salted_block():
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    carried_into(kv.make_sink(residency="counted", **GIVEN), "vllm-0.33", with_other_name)
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.position) == ("wrong_hash", 4)


def test_each_rank_of_a_sink_has_its_own_names():
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    sink = kv.make_sink(residency="counted", **GIVEN)
    worker, events, _ = engine("vllm-0.33")
    worker.serve(range(12))
    (event,) = events
    tokens = [list(each) for each in event.token_ids]
    for rank in (0, 1):
        sink.publish(KvCacheEvent(0, event.event.data, rank), token_ids=tokens)
    assert kv.events.problems == []
    sink.publish(KvCacheEvent(1, with_other_name(event, None).event.data, 1), token_ids=tokens)
    assert [(problem.rule, problem.dp_rank) for problem in kv.events.errors] == [("wrong_hash", 1)]


def test_a_fault_before_a_sink_with_a_declared_hash_is_attributed_to_the_fault():
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    sink = kv.make_sink(residency="counted", **GIVEN)
    with kv.faults.wrong_parent():
        into_sink(sink)
    kv.judge()
    assert {problem.fault.kind for problem in kv.events.errors if problem.cause is None} == {"wrong_parent"}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_capture_contains_the_declared_hash_of_a_sink(tmp_path, change):
    captured = Captured(tmp_path / "a.jsonl", profile=EngineProfile(block_size=SIZE))
    into_sink(captured.kv.make_sink(residency="counted", **GIVEN), change)
    found = captured.found()
    assert (change is not None) == bool(found)
    assert found == captured.again()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_event_of_a_sink_is_reduced_to_a_sink_with_the_declared_hash(change):
    kv = RouterHarness(EngineProfile(block_size=SIZE))
    into_sink(kv.make_sink(residency="counted", **GIVEN), change)
    kv.judge()
    found = reproduce(kv)
    assert 'hash="sha256_cbor", seed="0"' in found.as_test()
    namespace = {}
    exec(found.as_test(), namespace)
    with pytest.raises(EventRulesBroken, match="wrong_hash"):
        namespace["test_reproduction"]()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hash": "md5"}, "make_kv_sink: unknown hash 'md5'"),
        ({"seed": "0"}, "make_kv_sink: seed needs hash=, which is not given; got '0'"),
        (
            {"hash": "xxhash"},
            "make_kv_sink: seed is missing: without one, vLLM 0.33.0 has other xxhash hashes in each process",
        ),
        (
            {"hash": "sha256", "chained": False},
            "make_kv_sink: chained=False judges no hashes, and hash='sha256' says how to",
        ),
    ],
)
def test_a_sink_with_an_invalid_hash_is_refused_in_one_line(given, message):
    kv = RouterHarness()
    with pytest.raises(ValueError, match=f"^{message}"):
        kv.make_sink(**given)
    assert [*kv.inside.streams] == [(0, 0)]
