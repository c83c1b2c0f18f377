"""Recorded streams of real engines go through the ledger unchanged: the problems found are the engines' own."""

from collections import Counter
from itertools import count

import pytest

from pytest_kvmock import Cleared, EngineProfile, KvCacheEvent, Removed, RouterEvent, RouterHarness, StorageTier, Stored
from pytest_kvmock.oracle.hygiene.entries import Counted
from pytest_kvmock.oracle.hygiene.ledger import Ledger

U64 = 2**64 - 1


class Replayed:
    """The stream of one engine, event by event."""

    def __init__(self, **options):
        self.ledger = Ledger()
        self.stream = self.ledger.open((0, 0), first_id=0, **options)
        self.ids = count()
        self.problems = []

    def observe(self, data, *, chained=False):
        number = next(self.ids)
        self.problems += self.ledger.take(RouterEvent(0, KvCacheEvent(number, data), chained=chained))

    def end(self):
        self.problems += self.ledger.take(Counted())
        return [(p.rule, p.cause and p.cause.rule) for p in self.problems]

    @property
    def held(self):
        return self.stream.count(StorageTier.DEVICE)


def steps_of(program):
    """Yield operations and events of a program until the real manager panicked."""
    for operation, *row in program["steps"]:
        if isinstance(row[0], dict):
            return
        yield operation, row[1]


def logical(program, **options):
    """Play the events of a recorded program of the logical manager; blocks moved by hand have their own hashes."""
    replayed = Replayed(block_size=program["block_size"], num_blocks=program["capacity"], **options)
    for operation, events in steps_of(program):
        chained = operation[0] in ("alloc", "push")
        for kind, _, *rest in events:
            if kind == "S":
                parent, blocks = rest
                replayed.observe(Stored(parent, *map(tuple, zip(*blocks, strict=True))), chained=chained)
            else:
                replayed.observe(Removed(*map(tuple, rest)))
    return replayed


def engine(row):
    """Return an event of vLLM or SGLang; hashes may be signed, and each serves as its own local hash."""
    kind, *rest = row
    if kind == "S":
        parent, hashes, *_ = rest
        blocks = tuple(block & U64 for block in hashes)
        return Stored(None if parent is None else parent & U64, blocks, blocks)
    return Removed(tuple(block & U64 for block in rest[0])) if kind == "R" else Cleared()


# --------------------------------------------------------------------------------------------- the logical manager


@pytest.mark.parametrize("backend", ["lineage", "lru"])
def test_recorded_requests_over_lineage_and_lru_break_no_rule(recording, backend):
    programs = recording(f"logical_{backend}_requests.json.gz")["programs"]
    assert programs
    for program in programs:
        replayed = logical(program)
        assert replayed.end() == [], program["seed"]
        assert replayed.stream.events


def test_requests_over_multi_lru_cause_only_its_own_warnings(recording):
    found = Counter()
    for program in recording("logical_multi_lru_requests.json.gz")["programs"]:
        replayed = logical(program, prefix_closed=False)
        found.update(replayed.end())
        assert [p for p in replayed.problems if p.is_error and p.cause is None] == []
    assert found == {
        ("evicted_and_restored", None): 1,
        ("parent_block_not_found", "evicted_and_restored"): 1,
    }


SELF_PARENT = {"one block twice in one use": ["invalid_block"]}
HAZARD = {
    "evicted and stored again in one use": ["evicted_and_restored"] * 2,
    "the same, later reuse": ["evicted_and_restored"] * 3,
    "prefill cost after the hazard": ["evicted_and_restored"] * 2,
}
SCENARIOS = {
    # 10 is stored under 1, the block that comes last in the same Use: the anchor follows every hit (Dynamo 1.2.1)
    "lineage": SELF_PARENT | {"evicted and stored again in one use": ["orphaned_child"]},
    "lru": SELF_PARENT
    | HAZARD
    | {
        "freed root first": ["orphaned_child"] * 4,
        "two chains interleaved": ["orphaned_child"] * 2,
        "positions across 255": ["orphaned_child"] * 6,
    },
    "multi_lru": SELF_PARENT | HAZARD,
}


@pytest.mark.parametrize("backend", SCENARIOS)
def test_hand_made_scenarios_break_the_intended_rules(recording, backend):
    found = {}
    for program in recording("logical_scenarios.json.gz")["programs"]:
        if program["backend"] == backend:
            broken = logical(program, prefix_closed=backend != "multi_lru").end()
            if broken:
                found[program["name"]] = [rule for rule, _ in broken]
    assert SCENARIOS[backend] == found


# ---------------------------------------------------------------------------------------------- vLLM and SGLang


@pytest.mark.parametrize("kind", ["random", "scenarios"])
@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
def test_recorded_vllm_streams_break_no_rule_if_copies_are_counted(recording, version, kind):
    programs = recording(f"vllm_{version}_{kind}.json.gz")
    for program in programs:
        replayed = Replayed(num_blocks=program["usable_blocks"], residency="counted", block_size=program["block_size"])
        for step in program["steps"]:
            for row in step["events"]:
                replayed.observe(engine(row))
        assert replayed.end() == []


def test_vllms_copies_break_rules_if_blocks_are_unique(recording):
    found = Counter()
    for program in recording("vllm_0.33.0_random.json.gz"):
        replayed = Replayed()
        for step in program["steps"]:
            for row in step["events"]:
                replayed.observe(engine(row))
        found.update(rule for rule, _ in replayed.end())
    assert found["duplicate_store"] > 0 < found["block_not_found"]


def sunk(num_blocks, size):
    """Return a harness and its sink, for an engine that publishes every copy and names blocks in its own way."""
    kv = RouterHarness(EngineProfile(block_size=size), backend=None)
    return kv, kv.make_sink(num_blocks=num_blocks, residency="counted")


@pytest.mark.parametrize("kind", ["random", "scenarios"])
@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
def test_a_sink_with_vllms_events_has_no_problems(recording, version, kind):
    stored = 0
    for program in recording(f"vllm_{version}_{kind}.json.gz"):
        kv, sink = sunk(program["usable_blocks"], program["block_size"])
        for step in program["steps"]:
            for row in step["events"]:
                sink(engine(row))
            kv.flush()
        assert kv.events.problems == []
        stored += len(kv.events.stored)
    assert stored


@pytest.mark.parametrize("kind", ["random", "scenarios"])
def test_a_sink_with_sglangs_events_has_no_problems(recording, kind):
    stored = 0
    for program in recording(f"sglang_0.5.23_{kind}.json.gz"):
        tokens, size = program.get("capacity_tokens"), program["page_size"]
        kv, sink = sunk(tokens and tokens // size, size)
        for _, events in sglang_steps(program) if "steps" in program else ():
            for data in events:
                sink(data)
            kv.flush()
        assert kv.events.problems == []
        stored += len(kv.events.stored)
    assert stored


def sglang_steps(program):
    """Yield steps and events; a scenario whose events are taken at its end has none in between."""
    for step in program["steps"]:
        yield step, [engine(row) for row in step.get("events", ())]


@pytest.mark.parametrize("kind", ["random", "scenarios"])
def test_recorded_sglang_streams_break_no_rule_if_copies_are_counted(recording, kind):
    compared = 0
    for program in recording(f"sglang_0.5.23_{kind}.json.gz"):
        size = program["page_size"]
        tokens = program.get("capacity_tokens")
        replayed = Replayed(num_blocks=tokens and tokens // size, residency="counted", block_size=size)
        waits = any("events" not in step for step in program.get("steps", ()))
        for step, events in sglang_steps(program) if "steps" in program else ():
            for data in events:
                replayed.observe(data)
            if not waits and "protected" in step:
                assert step["evictable"] + step["protected"] == replayed.held * size, (program, step["op"])
                compared += 1
        assert replayed.end() == [], program.get("name", program.get("seed"))
    assert compared > 100
