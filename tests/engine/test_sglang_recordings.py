"""Replays of Dynamo's mock of SGLang, 1.3.1 and 1.2.1, equal to the bit: times, reuse, events and hangs."""

import pytest
from sglang_replays import differences, make_engine, play, rows

from pytest_kvmock.events import Stored
from pytest_kvmock.fleet.mock_engine import EngineStalled


@pytest.fixture(scope="session")
def random_replays(recording):
    return [case for case in recording("replay_random.json.gz")["cases"] if case["scheduler"] == "sglang"]


@pytest.fixture(scope="session")
def small_replays(recording):
    return [
        case for case in recording("dynamo_replay.json.gz")["small"] if case["engine"].get("engine_type") == "sglang"
    ]


def summary_of(case, version):
    """1.3.1's summary is recorded by what differs from 1.2.1's."""
    run = case["runs"][version]
    if "summary" in run:
        return run["summary"]
    return {**case["runs"]["1.2.1"]["summary"], **run["differs_from_1.2.1"]}


def test_the_random_replays_of_1_3_1(random_replays):
    assert 60 == len(random_replays)
    for case in random_replays:
        report = play(case, make_engine(case, "1.3.1"))
        run = case["runs"]["1.3.1"]
        assert rows(run["per_request"]) == rows(report.per_request()), case["seed"]
        # What does not differ from 1.2.1 does not by 1e-12: not always to the bit.
        found = report.to_json()
        expected = run.get("summary") or run["differs_from_1.2.1"]
        assert {} == differences(expected, found), case["seed"]
        assert pytest.approx(found["duration_ms"], rel=1e-12) == summary_of(case, "1.3.1")["duration_ms"]


def test_the_random_replays_of_1_2_1_and_its_hangs(random_replays):
    hangs = 0
    for case in random_replays:
        run = case["runs"]["1.2.1"]
        engine = make_engine(case, "1.2.1")
        if "error" in run:
            hangs += 1
            with pytest.raises(EngineStalled, match="the engine makes no progress"):
                play(case, engine)
        else:
            assert {} == differences(run["summary"], play(case, engine).to_json()), case["seed"]
    assert 7 == hangs


def test_the_small_replays_of_both(small_replays):
    assert 4 == len(small_replays)
    for case in small_replays:
        newer = play(case, make_engine(case, "1.3.1"))
        assert rows(case["runs"]["1.3.1"]["per_request"]) == rows(newer.per_request()), case["id"]
        assert {} == differences(case["runs"]["1.3.1"]["differs_from_1.2.1"], newer.to_json()), case["id"]
        older = play(case, make_engine(case, "1.2.1"))
        assert {} == differences(case["runs"]["1.2.1"]["summary"], older.to_json()), case["id"]


class Named:
    """Events in the form of the recording: a block is named by the order in which it appears, times are whole microseconds."""

    def __init__(self):
        self.names = {}
        self.waiting = []
        self.events = []

    def publish(self, event, storage_tier=None, token_ids=None):
        self.waiting.append(event.data)

    def end(self, done):
        """What was published in a pass is visible at its end."""
        for data in self.waiting:
            at = int(done.end_ms * 1000)
            if isinstance(data, Stored):
                parent = None if data.parent_hash is None else self.name(data.parent_hash)
                self.events.append([at, "S", parent, list(map(self.name, data.block_hashes))])
            else:
                self.events.append([at, "R", list(map(self.name, data.block_hashes))])
        self.waiting.clear()

    def name(self, block):
        return self.names.setdefault(block, len(self.names))


def test_the_event_streams_of_1_3_1(recording):
    cases = recording("replay_sglang_events.json.gz")["cases"]
    assert 30 == len(cases)
    for case in cases:
        named = Named()
        engine = make_engine(case, "1.3.1", sink=named)
        engine.on_pass(named.end)
        report = play(case, engine, concurrency=None)  # these were recorded by arrival times alone
        assert case["events"] == named.events, case["seed"]
        assert case["tokens"] == sum(len(request.token_ms) for request in report.requests)


@pytest.mark.parametrize("semantics", ["1.3.1", "1.2.1"])
@pytest.mark.parametrize("backend", ["mocker_sglang", "sglang"])
def test_passes_in_one_go_are_the_same_passes(random_replays, semantics, backend):
    went = 0
    for case in random_replays:
        found = []
        for watched in (True, False):
            engine = make_engine(case, semantics, backend=backend)
            if watched:
                engine.on_pass(lambda done: None)
            size = case["replay"]["trace_block_size"]
            for number, row in enumerate(sorted(case["requests"], key=lambda row: row["timestamp"])):
                tokens = [token for token in row["hash_ids"] for _ in range(size)][: row["input_length"]]
                engine.submit(tokens, row["output_length"] + number % 3, float(row["timestamp"]))
            try:
                engine.run()
            except EngineStalled:
                found.append("stalled")
            else:
                found.append(
                    (engine.report.to_json(), [request.token_ms for request in engine.requests], engine.passes)
                )
                went += engine.passes
        assert found[0] == found[1], case["seed"]
    assert went
