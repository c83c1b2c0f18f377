"""Batches of bytes without a socket: what an engine writes per step, and what it cannot write."""

import pytest

from pytest_kvmock import CapturingSink, Cleared, KvCacheEvent, Removed, RouterEvent, RouterHarness, StorageTier, Stored
from pytest_kvmock.wire import DIALECTS, EncodeError, KvWire, StreamDigests

SPOKEN = [name for name, dialect in DIALECTS.items() if dialect.in_matrix]


@pytest.mark.parametrize("dialect", SPOKEN)
def test_the_bytes_of_an_engine_are_decoded_to_its_events(dialect):
    wire = KvWire(dialect)
    with RouterHarness(backend=DIALECTS[dialect].backend) as harness:
        published = CapturingSink()
        harness.add_sink(wire)
        harness.add_sink(published)
        with wire.step():
            harness.worker(0).serve(harness.prompt(blocks=3), output_tokens=20)
        harness.worker(0).clear()
    assert len(wire.payloads) == 2
    decoded = [event for payload in wire.payloads for event in wire.decode(payload).events]
    assert [event.data for event in published.events] == [event.event.data for event in decoded]
    assert [problem for payload in wire.take() for problem in wire.decode(payload).problems] == []
    assert wire.payloads == []


def test_small_block_ids_are_written_unchanged():
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]])
    assert wire.decode(wire.payloads[0]).events[0].event.data.block_hashes == (1,)


def test_extra_fields_of_a_dialect_are_carried_with_the_event():
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]], extra={"lora_name": "sql", "group_idx": 2})
    wire.publish(
        RouterEvent(0, KvCacheEvent(1, Stored(None, (2,), (8,))), token_ids=[[1, 2]], extra={"session_id": "s"})
    )
    assert [wire.decode(payload).extra for payload in wire.payloads] == [
        [{"lora_name": "sql", "group_idx": 2}],
        [{"session_id": "s"}],
    ]


@pytest.mark.parametrize("tier", ["host", "g2", "host_pinned"])
def test_a_tier_can_be_given_by_any_of_its_names(tier):
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), tier, token_ids=[[1, 2]])
    wire.publish(Removed((1,)), tier)
    with pytest.raises(ValueError, match=r"^unknown tier 'hots'; did you mean 'host'"):
        wire.publish(Removed((1,)), "hots")
    tiers = [event.storage_tier for payload in wire.payloads for event in wire.decode(payload).events]
    assert tiers == [StorageTier.HOST_PINNED] * 2


def test_each_rank_has_its_own_batches_in_a_step():
    wire = KvWire("vllm-0.33", ranks=2, timestamp=lambda: 1_700_000_000.5)
    with wire.step():
        wire.publish(KvCacheEvent(0, Cleared(), 1))
        wire.publish(KvCacheEvent(0, Cleared(), 0))
        wire.publish(KvCacheEvent(1, Cleared(), 1))
    assert [(batch.dp_rank, wire.decode(batch.payload).num_events) for batch in wire.batches] == [(0, 1), (1, 2)]
    assert wire.decode(wire.payloads[0]).timestamp == 1_700_000_000.5
    with pytest.raises(ValueError, match="ranks 0 to 1, got rank 2"):
        wire.publish(KvCacheEvent(0, Cleared(), 2))


def test_a_dialect_of_whole_digests_needs_the_digests_of_a_manager():
    with RouterHarness(backend="vllm") as harness:
        wire = KvWire("vllm-0.33-bytes", digests={0: StreamDigests.of_manager(harness.worker(0).manager)})
        harness.add_sink(wire)
        harness.worker(0).serve(harness.prompt(blocks=2))
        hashes = [event.event.data.block_hashes for event in wire.decode(wire.payloads[0]).events]
        assert [entry.event.event.data.block_hashes for entry in harness.events] == hashes
    with pytest.raises(EncodeError, match="whole digests"):
        KvWire("vllm-0.33-bytes").publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]])


def test_a_step_that_raises_publishes_the_events_before_the_error():
    wire = KvWire("vllm-0.33")

    def fail():
        with wire.step():
            wire.publish(Cleared())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(wire.payloads) == 1


def test_a_step_with_an_unwritable_rank_publishes_the_batches_of_the_other_ranks():
    wire = KvWire("vllm-0.33", ranks=3)

    def step():
        with wire.step():
            wire.publish(Cleared())
            wire.publish(KvCacheEvent(0, Stored(None, (1,), (7,)), 1))
            wire.publish(KvCacheEvent(0, Cleared(), 2))

    with pytest.raises(EncodeError, match="a Stored without token ids"):
        step()
    assert [batch.dp_rank for batch in wire.batches] == [0, 2]
    with wire.step():
        pass
    assert len(wire.batches) == 2


def test_an_event_that_cannot_be_written_is_a_sink_failure_of_the_harness():
    harness = RouterHarness(backend="lru")
    harness.add_sink(KvWire("vllm-0.33"))
    harness.apply(Stored(None, (1,), (7,)))
    (failure,) = harness.events.errors
    assert failure.rule == "sink_failure"
    assert failure.observed.startswith(
        "KvWire.publish raised EncodeError: event 0 of the batch: a Stored without token ids"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"timestamp": 5}, "timestamp must be callable and return seconds, or None, got 5"),
        ({"digests": 5}, "digests must map ranks to StreamDigests, got 5"),
        ({"digests": {0: 5}}, "digests must map ranks to StreamDigests, got 5 for 0"),
    ],
)
def test_wire_options_of_the_wrong_type_are_refused(option, message):
    with pytest.raises(TypeError) as caught:
        KvWire("vllm-0.33", **option)
    assert str(caught.value) == message


def test_digests_of_a_missing_rank_are_refused():
    with RouterHarness(backend="vllm") as harness:
        digests = StreamDigests.of_manager(harness.worker(0).manager)
    for rank in (1, -1, "0", True):
        with pytest.raises(ValueError, match=f"^digests are of ranks 0 to 0, got rank {rank!r}$"):
            KvWire("vllm-0.33-bytes", digests={rank: digests})


EVENT = RouterEvent(0, KvCacheEvent(0, Stored(None, (1,), (7,))), token_ids=[[1, 2]])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"token_ids": [[3, 4]]}, "token_ids"),
        ({"extra": {"lora_name": "sql"}}, "extra"),
        ({"storage_tier": StorageTier.DISK}, "storage_tier"),
        ({"storage_tier": StorageTier.DISK, "token_ids": [], "extra": {}}, "storage_tier and token_ids and extra"),
    ],
)
def test_arguments_that_duplicate_fields_of_a_router_event_are_refused(options, names):
    wire = KvWire("vllm-0.33")
    with pytest.raises(
        ValueError, match=f"^{names} given with a RouterEvent, which has its own: publish the event alone, or"
    ):
        wire.publish(EVENT, **options)
    wire.publish(EVENT, StorageTier.DEVICE)
    assert [[each.event.data.block_hashes for each in wire.decode(one).events] for one in wire.payloads] == [[(1,)]]


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"lora_nmae": "sql"}, ValueError, ("extra has 'lora_nmae', which is a field of no dialect; did you mean "
        "'lora_name'?")),
        ({"sesion_id": "s"}, ValueError, ("extra has 'sesion_id', which is a field of no dialect; did you mean "
        "'session_id'?")),
        ({5: "s"}, TypeError, "extra must map names of fields to values, got the name 5"),
        (["lora_name"], TypeError, "extra must map names of fields to values, or be None, got ['lora_name']"),
        ({"block_hashes": [2]}, EncodeError, "event 0 of the batch: extra['block_hashes']: the event has this field"),
    ],
)  # fmt: skip
def test_an_extra_field_of_no_dialect_is_refused(extra, error, message):
    wire = KvWire("vllm-0.33")
    for _ in range(2):
        with pytest.raises(error) as caught:
            wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]], extra=extra)
        assert str(caught.value).startswith(message)
    assert wire.batches == []


@pytest.mark.parametrize(
    ("data", "beside", "message"),
    [
        (Removed((1,)), {"token_ids": [[1]]}, "token_ids go with a Stored, and were given with Removed("),
        (Cleared(), {"token_ids": []}, "token_ids go with a Stored, and were given with Cleared()"),
        (
            Cleared(),
            {"extra": {"group_idx": 1}},
            "extra goes with a Stored or a Removed, and was given with Cleared()",
        ),
    ],
)
def test_arguments_that_an_event_cannot_carry_are_refused(data, beside, message):
    wire = KvWire("vllm-0.33")
    with pytest.raises(ValueError) as caught:
        wire.publish(data, **beside)
    assert str(caught.value).startswith(message)
    assert wire.batches == []


@pytest.mark.parametrize(
    "event", [KvCacheEvent(0, None), RouterEvent(0, KvCacheEvent(0, "stored")), RouterEvent(0, None)]
)
def test_an_event_without_valid_data_is_refused(event):
    wire = KvWire("vllm-0.33")
    with pytest.raises(EncodeError, match=r"^event 0 of the batch: its (data|event) must be"):
        wire.publish(event)
    assert wire.batches == []


@pytest.mark.parametrize("name", ["cache_salt", "lora_path", "field_17", "kvmock_field"])
def test_an_extra_field_of_another_dialect_is_left_out(name):
    wire = KvWire("vllm-0.33")
    wire.publish(Stored(None, (1,), (7,)), token_ids=[[1, 2]], extra={name: "x"})
    assert wire.decode(wire.payloads[0]).extra == [None]


@pytest.mark.parametrize("rank", [True, "0", None, 1, -1])
def test_an_invalid_rank_is_refused(rank):
    wire = KvWire("vllm-0.33")
    with pytest.raises(ValueError, match=f"^the publisher has ranks 0 to 0, got rank {rank!r}$"):
        wire.publish(KvCacheEvent(0, Cleared(), rank))
    assert wire.batches == []


@pytest.mark.parametrize("timestamp", [float("nan"), "5", None])
def test_an_invalid_timestamp_is_refused_and_no_batch_is_counted(timestamp):
    stamps = iter([timestamp, 2.0])
    wire = KvWire("vllm-0.33", timestamp=lambda: next(stamps))
    with pytest.raises(
        EncodeError, match=r"^the batch cannot be written in 'vllm-0\.33': its timestamp must be a finite"
    ):
        wire.publish(Cleared())
    wire.publish(Cleared())
    assert [wire.decode(payload).timestamp for payload in wire.payloads] == [2.0]
