"""Recordings of the real manager (dynamo-mocker 1.2.1 on kvbm-logical 1.2.1), compared step by step."""

import hashlib
import json
from collections import Counter
from functools import cache
from itertools import islice

import pytest
from cache_helpers import Player, new_manager, publish_rows, state_of
from depth import few, whole_trace

from pytest_kvmock import EngineProfile, RouterHarness, Stored, sequence_hashes
from pytest_kvmock.values import Deref, MoveError, Use, lineage_hashes

FILES = (
    "logical_scenarios",
    "logical_lineage_moves",
    "logical_lineage_woken",
    "logical_lru_moves",
    "logical_multi_lru_moves",
    "logical_lineage_requests",
    "logical_lru_requests",
    "logical_multi_lru_requests",
)


@pytest.mark.parametrize("in_runs", [True, False])
@pytest.mark.parametrize("file", FILES)
def test_a_recorded_program_gives_the_recorded_answers_events_and_counts(recording, file, in_runs):
    for program in recording(f"{file}.json.gz")["programs"]:
        sizes = (program["backend"], program["capacity"], program["block_size"])
        player = Player(new_manager(*sizes, in_runs=in_runs))
        for number, (operation, *expected) in enumerate(program["steps"]):
            where = (program["backend"], program.get("name", program.get("seed")), number, operation)
            if isinstance(expected[0], dict):  # the real manager panicked
                before = state_of(player.manager)
                with pytest.raises(MoveError):
                    player.play(operation)
                assert before == state_of(player.manager), where
            else:
                assert player.play(operation) == expected, where
                assert len(player.manager.inactive_blocks()) == expected[4], where


RESTORED = ("evicted_and_restored", None)
OWN_FAULTS = {  # faults of the real manager; consequences are listed under their cause
    "logical_scenarios": {
        ("invalid_block", None): 3,
        ("orphaned_child", None): 13,
        RESTORED: 14,
        ("engine_drift", "evicted_and_restored"): 14,
    },
    "logical_lineage_woken": {
        ("orphaned_child", None): 71,
        RESTORED: 7,
        ("orphaned_child", "evicted_and_restored"): 3,
        ("engine_drift", "evicted_and_restored"): 7,
        ("parent_block_not_found", "evicted_and_restored"): 3,
    },
    "logical_lru_moves": {
        ("orphaned_child", None): 38,
        RESTORED: 1,
        ("orphaned_child", "evicted_and_restored"): 1,
        ("engine_drift", "evicted_and_restored"): 1,
    },
    "logical_multi_lru_requests": {
        RESTORED: 1,
        ("engine_drift", "evicted_and_restored"): 1,
        ("parent_block_not_found", "evicted_and_restored"): 1,
    },
}


@pytest.mark.parametrize("file", FILES)
def test_a_custom_engine_sink_reports_the_faults_of_the_recorded_manager(recording, file):
    """The sink is compared with the manager's blocks after each step (docs/how-to/own-engine.md) and detects that
    hashes are chained.
    """
    found = Counter()
    for program in recording(f"{file}.json.gz")["programs"]:
        player = Player(new_manager(program["backend"], program["capacity"], program["block_size"]))
        kv = RouterHarness(EngineProfile(block_size=program["block_size"]), backend=None)
        sink = kv.make_sink(
            num_blocks=program["capacity"], prefix_closed=program["backend"] != "multi_lru", restores=True
        )
        sink.compare(player.manager.resident)
        for operation, *expected in program["steps"]:
            if isinstance(expected[0], dict):  # the real manager panicked
                continue
            player.play(operation)
            publish_rows(sink, expected[1])
            kv.flush()
        found.update((problem.rule, problem.cause and problem.cause.rule) for problem in kv.events.problems)
    assert OWN_FAULTS.get(file, {}) == found


RUNS = range(24)  # two traces, three policies, two capacities, one and eight requests at a time


@pytest.fixture(scope="module")
def hashed_trace(traces):
    """Read a trace, or its first lines, once, as a list of (local hashes, sequence hashes, lineage hashes)."""

    @cache
    def read(name, most=None):
        requests = []
        with (traces / name).open() as lines:
            for line in islice(lines, most):
                ids = json.loads(line)["hash_ids"]
                blocks = sequence_hashes(ids)
                requests.append((ids, blocks, lineage_hashes(blocks)))
        return requests

    return read


class DigestSink:
    """A sink that hashes the event stream as the recording does and counts its events."""

    def __init__(self):
        self.digest = hashlib.sha256()
        self.stored = self.removed = self.events = 0

    def publish(self, event, storage_tier, token_ids):
        data = event.data
        if isinstance(data, Stored):
            self.stored += len(data.block_hashes)
            head = ("S", event.event_id, "-" if data.parent_hash is None else data.parent_hash)
        else:
            self.removed += len(data.block_hashes)
            head = ("R", event.event_id)
        self.events += 1
        self.digest.update((" ".join(map(str, (*head, *data.block_hashes))) + "\n").encode())


def play_trace(run, requests):
    """Return the sink and the numbers of requested and refused blocks."""
    manager = new_manager(run["backend"], run["capacity"])
    manager.sink = sink = DigestSink()
    held = []
    blocks_asked = refused = 0
    for n, (ids, blocks, plhs) in enumerate(requests):
        if len(held) == run["open"]:
            manager.process(Deref(held.pop(5 * n % run["open"])[::-1]))
        served = manager.process(Use(blocks, ids, plhs))
        held.append(blocks[:served])
        blocks_asked += len(ids)
        refused += served < len(ids)
    return sink, blocks_asked, refused


@pytest.mark.parametrize("number", few(RUNS, 6))
def test_the_first_thousand_requests_of_a_trace_hit_as_many_blocks_as_recorded(recording, hashed_trace, number):
    run = recording("logical_mooncake.json")["runs"][number]
    sink, blocks_asked, _ = play_trace(run, hashed_trace(run["trace"], 1_000))
    assert run["hits_of_first_1000_requests"] == blocks_asked - sink.stored


@whole_trace
@pytest.mark.parametrize("number", RUNS)
def test_a_request_trace_gives_the_recorded_event_stream(recording, hashed_trace, number):
    run = recording("logical_mooncake.json")["runs"][number]
    requests = hashed_trace(run["trace"])
    sink, blocks_asked, refused = play_trace(run, requests)
    assert (run["requests"], run["blocks"], run["refused"]) == (len(requests), blocks_asked, refused)
    assert (run["stored"], run["removed"], run["events"]) == (sink.stored, sink.removed, sink.events)
    assert run["hits"] == blocks_asked - sink.stored
    assert run["stream_sha256"] == sink.digest.hexdigest()


def test_every_recorded_run_of_an_eviction_policy_is_played(recording):
    assert len(RUNS) == len(recording("logical_mooncake.json")["runs"])
