"""Who listens to a manager, and in which order."""

import io
import json

import pytest

from pytest_kvmock.events import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.sinks import CapturingSink, FanOutSink, JsonlRecorder

STORED = KvCacheEvent(0, Stored(None, (1, 2), (3, 4)))
REMOVED = KvCacheEvent(1, Removed((2,)))
CLEARED = KvCacheEvent(2, Cleared())


def test_a_capturing_sink_keeps_events_in_order_with_tier_and_tokens_beside_them():
    sink = CapturingSink(worker_id=7)
    sink.publish(STORED, StorageTier.DEVICE, ((1,), (2,)))
    sink.publish(REMOVED, StorageTier.DISK)
    sink.publish(CLEARED)
    assert [STORED, REMOVED, CLEARED] == sink.events
    expected = [RouterEvent(7, STORED), RouterEvent(7, REMOVED, StorageTier.DISK), RouterEvent(7, CLEARED)]
    assert expected == sink.router_events
    assert [((1,), (2,)), None, None] == [event.token_ids for event in sink.router_events]


def test_take_returns_what_was_captured_and_forgets_it():
    sink = CapturingSink()
    sink.publish(STORED)
    assert [STORED] == sink.take()
    assert ([], [], []) == (sink.events, sink.router_events, sink.take())
    sink.publish(REMOVED)
    assert [RouterEvent(0, REMOVED)] == sink.router_events


class Named:
    """Writes its name to a shared list; raises when told to."""

    def __init__(self, name, log, *, fails=False):
        self.name, self.log, self.fails = name, log, fails

    def publish(self, event, storage_tier=StorageTier.DEVICE, token_ids=None):
        self.log.append((self.name, event.event_id, storage_tier, token_ids))
        if self.fails:
            raise RuntimeError(f"{self.name} is broken")


def test_a_fan_out_tells_its_sinks_in_the_order_given_and_everything_it_knows():
    log = []
    FanOutSink(Named("event", log), Named("raw", log)).publish(STORED, StorageTier.HOST_PINNED, ((1,), (2,)))
    beside = (0, StorageTier.HOST_PINNED, ((1,), (2,)))
    assert [("event", *beside), ("raw", *beside)] == log


def test_the_first_sink_that_raises_keeps_the_event_from_those_after_it():
    log = []
    fan_out = FanOutSink(Named("a", log), Named("b", log, fails=True), Named("c", log))
    with pytest.raises(RuntimeError, match="b is broken"):
        fan_out.publish(STORED)
    assert ["a", "b"] == [name for name, *_ in log]


def test_a_fan_out_to_nobody_is_silent():
    assert None is FanOutSink().publish(STORED)


def test_a_recorder_writes_one_router_event_a_line_that_reads_back():
    target = io.StringIO()
    recorder = JsonlRecorder(target, worker_id=3)
    recorder.publish(STORED, StorageTier.DEVICE, ((1,), (2,)))
    recorder.publish(REMOVED, StorageTier.HOST_PINNED)
    recorder.publish(CLEARED)
    lines = target.getvalue().splitlines()
    expected = [RouterEvent(3, STORED), RouterEvent(3, REMOVED, StorageTier.HOST_PINNED), RouterEvent(3, CLEARED)]
    assert expected == [RouterEvent.from_json(line) for line in lines]
    assert {"worker_id", "storage_tier", "event"} == set(json.loads(lines[0]))


def test_a_recorder_s_file_is_replaced_and_closed(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("old\n")
    with JsonlRecorder.to_file(path, worker_id=1) as recorder:
        recorder.publish(CLEARED)
    assert RouterEvent(1, CLEARED).to_json() + "\n" == path.read_text()
    with pytest.raises(ValueError, match="closed file"):
        recorder.publish(CLEARED)


def test_what_travels_beside_an_event_reaches_each_sink_that_takes_it():
    first, second = CapturingSink(), CapturingSink()
    FanOutSink(first, second).publish(STORED, StorageTier.DEVICE, ((1,), (2,)), {"lora_name": "sql"})
    FanOutSink(first, second).publish(REMOVED)
    for sink in (first, second):
        assert [{"lora_name": "sql"}, None] == [event.extra for event in sink.router_events]
        assert [((1,), (2,)), None] == [event.token_ids for event in sink.router_events]
