"""Replays recorded from Dynamo's mock of SGLang, 1.3.1 and 1.2.1, to the bit: times, reuse, events and hangs."""

import pytest
from depth import few
from recorded_replays import check_run, recorded, request_of, runs_of

from pytest_kvmock.engine.args import MockEngineArgs
from pytest_kvmock.events import Stored
from pytest_kvmock.fleet import EngineStalled, MockEngine, replay
from pytest_kvmock.tokens import Prompt

VERSIONS = ("1.3.1", "1.2.1")

RUNS = runs_of("replay_sglang.json.gz", *VERSIONS)
"""4 small replays and 60 random ones; of 1.3.1 the figures that differ from those of 1.2.1."""


@pytest.mark.parametrize("watched", [False, True], ids=["in-one-go", "each-pass"])
@pytest.mark.parametrize(("case", "version"), few(RUNS, 40))
def test_a_replay_equals_the_recorded_one(case, version, watched):
    check_run(case, version, "mocker_sglang", watched=watched)


def test_the_recordings_have_hangs_of_1_2_1_alone():
    hangs = [each.values[1] for each in RUNS if "error" in each.values[0]["runs"][each.values[1]]]
    assert ["1.2.1"] * 7 == hangs


class NamedEvents:
    """Events in the form of the recording: blocks by the order in which they appear, at whole microseconds."""

    def __init__(self):
        self.names = {}
        self.published = []
        self.events = []

    def publish(self, event, storage_tier=None, token_ids=None):
        self.published.append(event.data)

    def end_pass(self, done):
        """What a pass publishes is visible at its end."""
        at = int(done.end_ms * 1000)
        for data in self.published:
            if isinstance(data, Stored):
                parent = None if data.parent_hash is None else self.name(data.parent_hash)
                self.events.append([at, "S", parent, list(map(self.name, data.block_hashes))])
            else:
                self.events.append([at, "R", list(map(self.name, data.block_hashes))])
        self.published.clear()

    def name(self, block):
        return self.names.setdefault(block, len(self.names))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case["id"]) for case in recorded("replay_sglang_events.json.gz")]
)
def test_an_event_stream_equals_the_recorded_one(case):
    events = NamedEvents()
    args = MockEngineArgs.from_json(case["engine"], semantics="1.3.1")
    engine = MockEngine(args, backend="mocker_sglang", sink=events)
    engine.on_pass(events.end_pass)
    # These were recorded by arrival times alone, whatever `replay` has for the closed loop.
    report = replay(map(request_of, case["requests"]), [engine], trace_block_size=case["replay"]["trace_block_size"])
    assert case["events"] == events.events
    assert case["tokens"] == sum(len(request.token_ms) for request in report.requests)


@pytest.mark.parametrize("semantics", VERSIONS)
@pytest.mark.parametrize("backend", ["mocker_sglang", "sglang"])
@pytest.mark.parametrize("page_size", few([4, 16]))
def test_passes_in_one_go_are_the_same_passes(semantics, backend, page_size):
    for case in recorded("replay_sglang.json.gz"):
        engine_args = {**case["engine"], "block_size": page_size, "sglang": {**case["engine"]["sglang"]}}
        engine_args["sglang"] |= {"page_size": page_size, "chunked_prefill_size": 16 * page_size}
        found = []
        for watched in (True, False):
            engine = MockEngine(MockEngineArgs(**engine_args, semantics=semantics), backend=backend)
            if watched:
                engine.on_pass(lambda done: None)
            for number, row in enumerate(sorted(case["requests"], key=lambda row: row["timestamp"])):
                tokens = [token for token in row["hash_ids"] for _ in range(4)][: row["input_length"]]
                engine.submit(Prompt(tokens), row["output_length"] + 3 * (number % 3), float(row["timestamp"]))
            try:
                engine.run()
            except EngineStalled as error:
                found.append(error.now_ms)
            else:
                times = [request.token_ms for request in engine.requests]
                found.append((engine.report.to_json(), times, engine.passes))
        assert found[0] == found[1], case["id"]
