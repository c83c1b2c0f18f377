"""Sinks of every signature on a harness, a worker and a manager: one event value, or its parts."""

import pytest

from pytest_kvmock import EngineProfile, KvCacheEvent, RouterEvent, RouterHarness, StorageTier, Stored, create_manager

PROFILE = EngineProfile(block_size=4, num_blocks=8)


class OfEvent:
    def __init__(self):
        self.taken = []

    def publish(self, event):
        self.taken.append(event)


class OfTokens(OfEvent):
    def publish(self, event, token_ids):
        self.taken.append((event, token_ids))


class OfParts(OfEvent):
    def publish(self, event, storage_tier, token_ids, extra=None):
        self.taken.append((event, storage_tier, token_ids, extra))


class OfAll(OfEvent):
    def publish(self, *parts):
        self.taken.append(parts)


def served(sink, **keys):
    kv = RouterHarness(PROFILE)
    kv.add_sink(sink)
    kv.worker(0).serve(kv.prompt(1, **keys))
    (entry,) = kv.events
    return entry.event


def test_a_sink_receives_the_same_event_object_as_the_router():
    sink = OfEvent()
    event = served(sink)
    (taken,) = sink.taken
    assert event is taken
    assert (0, (0, 0), 0, Stored) == (taken.event_id, taken.key, taken.dp_rank, type(taken.data))
    assert taken.chained


def test_a_function_is_a_sink():
    taken = []
    event = served(taken.append)
    assert [event] == taken


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (OfTokens, lambda event: (event.event, event.token_ids)),
        (OfParts, lambda event: (event.event, StorageTier.DEVICE, event.token_ids, event.extra)),
        (OfAll, lambda event: (event.event, StorageTier.DEVICE, event.token_ids)),
    ],
    ids=["tokens", "parts", "all"],
)
def test_a_sink_receives_the_parts_that_its_signature_names(make, shown):
    sink = make()
    event = served(sink, lora_name="sql")
    assert event.extra["lora_name"] == "sql"
    assert [shown(event)] == sink.taken


def test_a_manager_without_a_harness_publishes_as_worker_0():
    sink = OfEvent()
    create_manager("lru", num_blocks=4, block_size=4, sink=sink).use([7])
    assert [RouterEvent(0, KvCacheEvent(0, Stored(None, (7,), (7,))))] == sink.taken


def test_a_publish_method_that_is_replaced_later_is_called(monkeypatch):
    sink, taken = OfEvent(), []
    kv = RouterHarness(PROFILE)
    kv.add_sink(sink)
    monkeypatch.setattr(sink, "publish", taken.append)
    kv.worker(0).serve(kv.prompt(1))
    assert len(taken) == 1


def test_an_object_without_publish_is_refused_as_a_sink():
    kv = RouterHarness(PROFILE)
    with pytest.raises(TypeError, match=r"add_sink: sink must have a method publish\(event\)"):
        kv.add_sink([])
    kv.worker(0).serve(kv.prompt(1))
    assert kv.events.total == 1
