"""Batches of bytes without a socket: what an engine writes a step, and what it cannot write."""

import pytest

from pytest_kvmock import CapturingSink, Cleared, KvCacheEvent, RouterEvent, RouterHarness, Stored
from pytest_kvmock.wire import DIALECTS, EncodeError, KvWire, StreamDigests

SPOKEN = [name for name, dialect in DIALECTS.items() if dialect.in_matrix]


@pytest.mark.parametrize("dialect", SPOKEN)
def test_the_bytes_of_an_engine_say_what_it_published(dialect):
    wire = KvWire(dialect)
    with RouterHarness(backend=DIALECTS[dialect].backend) as harness:
        published = CapturingSink()
        harness.add_sink(wire)
        harness.add_sink(published)
        with wire.step():
            harness.worker(0).serve(harness.prompt(blocks=3), output_tokens=20)
        harness.worker(0).clear()
    assert 2 == len(wire.payloads)
    decoded = [event for payload in wire.payloads for event in wire.decode(payload).events]
    assert [event.data for event in published.events] == [event.event.data for event in decoded]
    assert [] == [problem for payload in wire.take() for problem in wire.decode(payload).problems]
    assert [] == wire.payloads


def test_small_block_ids_are_written_as_they_are():
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]])
    assert (1,) == wire.decode(wire.payloads[0]).events[0].event.data.block_hashes


def test_the_fields_of_a_dialect_travel_beside_the_event():
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]], extra={"lora_name": "sql", "group_idx": 2})
    wire.publish(
        RouterEvent(0, KvCacheEvent(1, Stored(None, (2,), (8,))), token_ids=[[1, 2]], extra={"session_id": "s"})
    )
    assert [[{"lora_name": "sql", "group_idx": 2}], [{"session_id": "s"}]] == [
        wire.decode(payload).extra for payload in wire.payloads
    ]


def test_each_rank_has_batches_of_its_own():
    wire = KvWire("vllm-0.33", ranks=2, timestamp=lambda: 1_700_000_000.5)
    with wire.step():
        wire.publish(KvCacheEvent(0, Cleared(), 1))
        wire.publish(KvCacheEvent(0, Cleared(), 0))
        wire.publish(KvCacheEvent(1, Cleared(), 1))
    assert [(0, 1), (1, 2)] == [(batch.dp_rank, wire.decode(batch.payload).num_events) for batch in wire.batches]
    assert 1_700_000_000.5 == wire.decode(wire.payloads[0]).timestamp
    with pytest.raises(ValueError, match="ranks 0 to 1, got rank 2"):
        wire.publish(KvCacheEvent(0, Cleared(), 2))


def test_whole_digests_need_a_manager_that_has_them():
    with RouterHarness(backend="vllm") as harness:
        wire = KvWire("vllm-0.33-bytes", digests={0: StreamDigests.of_manager(harness.worker(0).manager)})
        harness.add_sink(wire)
        harness.worker(0).serve(harness.prompt(blocks=2))
        hashes = [event.event.data.block_hashes for event in wire.decode(wire.payloads[0]).events]
        assert [entry.event.event.data.block_hashes for entry in harness.events] == hashes
    with pytest.raises(EncodeError, match="whole digests"):
        KvWire("vllm-0.33-bytes").publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]])


def test_a_step_that_fails_publishes_what_came_before():
    wire = KvWire("vllm-0.33")

    def fail():
        with wire.step():
            wire.publish(Cleared())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert 1 == len(wire.payloads)


def test_of_a_step_that_cannot_be_written_at_one_rank_the_others_are_published_and_nothing_waits():
    wire = KvWire("vllm-0.33", ranks=3)

    def step():
        with wire.step():
            wire.publish(Cleared())
            wire.publish(KvCacheEvent(0, Stored(None, (1,), (7,)), 1))
            wire.publish(KvCacheEvent(0, Cleared(), 2))

    with pytest.raises(EncodeError, match="a Stored without token ids"):
        step()
    assert [0, 2] == [batch.dp_rank for batch in wire.batches]
    with wire.step():
        pass
    assert 2 == len(wire.batches)


def test_an_event_that_cannot_be_written_is_a_sink_failure_of_the_harness():
    harness = RouterHarness(backend="lru")
    harness.add_sink(KvWire("vllm-0.33"))
    harness.apply(Stored(None, (1,), (7,)))
    (failure,) = harness.events.errors
    assert "sink_failure" == failure.rule
    assert failure.observed.startswith(
        "KvWire.publish raised EncodeError: event 0 of the batch: a Stored without token ids"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"timestamp": 5}, "timestamp must be callable and return seconds, or None, got 5"),
        ({"digests": 5}, "digests must map ranks to StreamDigests, got 5"),
    ],
)
def test_options_of_another_type_are_refused(option, message):
    with pytest.raises(TypeError) as caught:
        KvWire("vllm-0.33", **option)
    assert message == str(caught.value)
