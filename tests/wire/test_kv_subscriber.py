"""A subscriber: what it receives under each wire fault, with and without a replay."""

import asyncio
import contextlib
import socket

import msgspec
import pytest
import zmq
from sockets import BIG, publish_chain, removed, replayed, stored, tasks_wait, tokens_of

from pytest_kvmock import Cleared, EngineProfile, EventRulesBroken, KvCacheEvent, RouterHarness
from pytest_kvmock.wire import DIALECTS
from pytest_kvmock.wire.sockets import KvPublisher, KvSubscriber, WireTimeout, kv_subscriber
from pytest_kvmock.wire.sockets.endpoints import EndpointError
from pytest_kvmock.wire.sockets.waiting import readable

SPOKEN = [name for name, dialect in DIALECTS.items() if dialect.in_matrix]


def _has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as found:
        found.bind(("::1", 0))
        return True
    return False


class World:
    """A publisher, and a subscriber that records the received blocks."""

    def __init__(self, *, replay, dialect="vllm-0.33", **options):
        self.blocks, self.events = [], []
        self.failures = 0
        publisher = {name: options.pop(name) for name in ("ranks", "buffer_steps", "endpoint") if name in options}
        self.publisher = KvPublisher(dialect, **publisher)
        self.subscriber = KvSubscriber(
            self.publisher.endpoints,
            self.take,
            dialect=dialect,
            replay=self.publisher.replay_endpoints if replay else None,
            context=self.publisher.context if "endpoint" in publisher else None,
            **options,
        )
        self.publisher.wait_subscribed()
        self.next = 0

    def take(self, event):
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError
        self.events.append(event)
        self.blocks += [block - BIG for block in getattr(event.event.data, "block_hashes", ())]

    def publish(self, count):
        publish_chain(self.publisher, count, BIG + self.next)
        self.next += count

    def receive(self, batches):
        self.subscriber.receive(batches)
        return self.blocks

    @property
    def lost(self):
        return [loss.observed for loss in self.subscriber.lost]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.subscriber.close()
        self.publisher.close()


def test_a_timeout_after_a_restart_notes_that_batch_numbers_restarted():
    with World(replay=False) as world:
        world.publish(2)
        world.receive(2)
        world.publisher.restart()
        world.publish(1)
        with pytest.raises(WireTimeout) as caught:
            world.subscriber.receive(2, timeout=0.2)
    assert str(caught.value).splitlines() == [
        "1 of 2 batches arrived in 0.2 s",
        f"rank 0 at {world.publisher.endpoint}: next is batch 1; its numbers began again after batch 1",
        "rank 0: batch 0 came after batch 1: numbers went backwards, as after an unannounced restart",
    ]


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_restarted_engine_is_detected_even_if_its_first_batch_has_the_same_events(
    transport,
):
    harness, received = RouterHarness(backend="vllm"), []
    prompt, worker = harness.prompt(), harness.worker(0)
    with KvPublisher("vllm-0.33", endpoint=transport) as publisher:
        places = {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}
        subscriber = KvSubscriber(
            publisher.endpoint, received.append, dialect="vllm-0.33", replay=publisher.replay_endpoint
        )
        publisher.wait_subscribed()
        harness.add_sink(publisher, worker_id=0)
        worker.serve(prompt)
        subscriber.receive()
        publisher.close()
        harness.publisher.remove_sink(publisher)
    worker.restart(announced=True)
    with subscriber, KvPublisher("vllm-0.33", **places) as again:
        again.take_over(publisher)
        harness.add_sink(again, worker_id=0)
        again.settle(lambda: subscriber.poll() or again.subscriptions())
        worker.serve(prompt)
        subscriber.receive()
        assert len(received) == 2
        assert received[0].event.data == received[1].event.data
        assert [loss.observed for loss in subscriber.lost] == [
            "batch 0 came twice, with other events: numbers went backwards, as after an unannounced restart"
        ]
    assert harness.judge().errors == []


@pytest.mark.parametrize("dialect", SPOKEN)
@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_published_batches_arrive_over_every_transport_and_dialect(dialect, transport):
    with World(replay=False, dialect=dialect, endpoint=transport, worker_id=7) as world:
        world.publish(3)
        world.receive(3)
        signed = DIALECTS[dialect].hashes == "signed"
        assert [block + (2**64 if signed else 0) for block in world.blocks] == [0, 1, 2]
        assert [(each.worker_id, each.event.event_id) for each in world.events] == [(7, 0), (7, 1), (7, 2)]
        assert [tokens_of((BIG + n) % 1000) for n in range(3)] == [
            [*map(list, each.token_ids)] for each in world.events
        ]
        assert (world.subscriber.problems, world.subscriber.lost) == ([], [])


ALL = [0, 1, 2, 3, 4, 5]

# A fault, its request; the blocks that arrive with a replay and without; the losses with a replay and without.
FAULTS = {
    "none": (lambda faults: None, ALL, ALL, [], []),
    "lost": (lambda faults: faults.lose(2), ALL, [0, 3, 4, 5], [], ["batches 1 to 2 did not arrive"]),
    "doubled": (lambda faults: faults.double(2), ALL, ALL, [], []),
    "reordered": (lambda faults: faults.reorder(), ALL, [0, 2, 3, 4, 5], [], ["batch 1 did not arrive"]),
    "gap beyond the buffer": (
        lambda faults: faults.gap_beyond_buffer(2),
        [0, 3, 4, 5],
        [0, 3, 4, 5],
        ["batches 1 to 2 did not arrive, and a replay had no such batches any more"],
        ["batches 1 to 2 did not arrive"],
    ),
    "slow subscriber": (
        lambda faults: faults.slow_subscriber(2, 1),
        ALL,
        [0, 1, 2, 4, 5],
        [],
        ["batch 3 did not arrive"],
    ),
    "corrupt": (
        lambda faults: faults.corrupt(2),
        ALL,
        [0, 3, 4, 5],
        [],
        [
            "batch 1 cannot be read (malformed: batch: expected msgpack, which has no such byte, got byte 0xc1 at 0)",
            "batch 2 cannot be read (malformed: batch: expected msgpack, which has no such byte, got byte 0xc1 at 0)",
        ],
    ),
    "unknown tag": (lambda faults: faults.unknown_tag(2), ALL, ALL, [], []),
}


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dialect", ["vllm-0.19", "vllm-0.33", "sglang-0.5.22"])
def test_a_replay_recovers_available_batches_and_the_rest_is_reported(dialect, fault, replay):
    ask, with_replay, without, lost_with, lost_without = FAULTS[fault]
    with World(replay=replay, dialect=dialect) as world:
        world.publish(1)
        world.receive(1)
        ask(world.publisher.faults)
        world.publish(5)
        world.receive(5)
        signed = 2**64 if DIALECTS[dialect].hashes == "signed" else 0
        assert (with_replay if replay else without) == [block + signed for block in world.blocks]
        assert (lost_with if replay else lost_without) == world.lost
        assert world.publisher.faults.unused == []
        assert bool(ask(world.publisher.faults)) is False  # it can be requested again


def test_a_late_subscriber_recovers_all_batches_from_the_first():
    with World(replay=True) as world:
        world.publisher.faults.late_join(3)
        world.publish(4)
        assert world.receive(4) == [0, 1, 2, 3]
        assert [(0, range(4))] == world.subscriber.recovered
        with pytest.raises(ValueError, match="late_join must be requested before the first batch"):
            world.publisher.faults.late_join()


def test_a_late_subscriber_without_from_start_begins_with_the_next_batch():
    with World(replay=False, from_start=False) as world:
        world.publisher.faults.late_join(3)
        world.publish(4)
        assert world.receive(1) == [3]
        assert world.lost == []


def test_a_late_subscriber_can_catch_up_without_a_live_batch():
    with World(replay=True) as world:
        world.publisher.faults.late_join(3)
        world.publish(3)
        assert world.subscriber.catch_up() == 3
        assert world.blocks == [0, 1, 2]
        assert world.subscriber.catch_up() == 0
    with World(replay=False) as world, pytest.raises(ValueError, match="catch_up needs the replay endpoint"):
        world.subscriber.catch_up()


def test_a_lost_batch_that_arrives_late_is_not_applied():
    with World(replay=False) as world:
        world.publish(1)
        world.publisher.faults.reorder()
        world.publish(2)
        world.publish(1)
        world.receive(4)
        assert world.blocks == [0, 2, 3]
        assert [*map(str, world.subscriber.problems)] == [
            "rank 0, batch 1: arrived after batch 2, when it counted as lost"
        ]


def test_a_restart_at_the_number_of_a_lost_batch_is_not_a_late_batch():
    with World(replay=False, from_start=True) as world:
        world.publisher.faults.lose()
        world.publish(2)
        world.receive(2)
        world.publisher.restart()
        world.publish(2)
        world.receive(2)
        assert world.blocks == [1, 2, 3]
        assert (world.subscriber.problems, len(world.lost)) == ([], 2)


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_is_reported_and_the_new_batches_are_applied(replay):
    with World(replay=replay) as world:
        world.publish(3)
        world.receive(3)
        world.publisher.faults.restart()
        world.next = 0
        world.publish(2)
        assert world.receive(2) == [0, 1, 2, 0, 1]
        assert world.lost == ["batch 0 came after batch 2: numbers went backwards, as after an unannounced restart"]
        assert [event.event.event_id for event in world.events] == [0, 1, 2, 0, 1]


def test_a_restart_is_detected_if_a_replay_already_delivered_the_same_numbers():
    with World(replay=True) as world:
        world.publisher.faults.late_join(3)
        world.publish(3)
        assert world.subscriber.catch_up() == 3
        world.publisher.restart()
        world.next = 100
        world.publish(2)
        assert world.receive(2) == [0, 1, 2, 100, 101]
        assert world.lost == ["batch 0 came after batch 2: numbers went backwards, as after an unannounced restart"]
        assert world.subscriber.duplicates == 0


def test_a_restart_is_detected_after_more_batches_than_are_remembered(monkeypatch):
    monkeypatch.setattr(kv_subscriber, "MOST_REMEMBERED", 2)
    with World(replay=False) as world:
        world.publish(4)
        world.receive(4)
        world.publisher.restart()
        world.next = 100
        world.publish(2)
        assert world.receive(2) == [0, 1, 2, 3, 100, 101]
        assert world.lost == ["batch 0 came after batch 3: numbers went backwards, as after an unannounced restart"]


def test_a_repeated_batch_is_not_a_restart_even_if_it_is_no_longer_remembered(monkeypatch):
    monkeypatch.setattr(kv_subscriber, "MOST_REMEMBERED", 2)
    with World(replay=True) as world:
        world.publish(4)
        world.receive(4)
        (first, *_) = replayed(world.publisher.replay_endpoint, 0)
        world.publisher.restart()
        world.publisher.publish_payload(first[-1])  # the number and the bytes of batch 0
        assert world.subscriber.poll(5.0) == 1
        assert (world.subscriber.duplicates, world.blocks, world.lost) == (1, [0, 1, 2, 3], [])


def test_lost_batches_after_a_restart_are_recovered():
    with World(replay=True) as world:
        world.publish(5)
        world.receive(5)
        world.publisher.restart()
        world.publisher.faults.lose(2)
        world.next = 0
        world.publish(3)
        assert world.receive(3) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("end_marker", [True, False])
def test_the_gap_left_by_a_truncated_replay_is_reported(end_marker):
    with World(replay=True, replay_timeout=0.1) as world:
        world.publish(1)
        world.publisher.faults.lose(4)
        world.publisher.faults.truncate_replay(2, end_marker=end_marker)
        world.publish(5)
        assert world.receive(6) == [0, 1, 2, 5]
        why = (
            "a replay had no such batches any more"
            if end_marker
            else "the replay broke off: nothing more came in 0.1 s"
        )
        assert world.lost == [f"batches 3 to 4 did not arrive, and {why}"]
        assert [(0, range(1, 3))] == world.subscriber.recovered
        world.publisher.faults.lose()
        world.publish(2)  # the next replay is complete again
        assert world.receive(2) == [0, 1, 2, 5, 6, 7]


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
def test_the_ipv6_loopback_works_as_an_endpoint():
    with World(replay=True, endpoint="tcp://[::1]:*") as world:
        assert world.publisher.endpoint.startswith("tcp://[::1]:")
        world.publisher.faults.lose()
        world.publish(2)
        assert world.receive(2) == [0, 1]


def test_an_incomplete_replay_is_reported_even_without_a_gap():
    with World(replay=True, replay_timeout=0.1) as world:
        world.publisher.faults.lose(2)
        world.publisher.faults.truncate_replay(1, end_marker=False)
        world.publish(2)
        assert world.subscriber.catch_up() == 1
        assert [*map(str, world.subscriber.problems)] == [
            "rank 0, batch 1: the replay broke off before it: nothing more came in 0.1 s"
        ]


def test_an_unreadable_batch_is_not_recovered_by_a_replay_of_the_same_bytes():
    with World(replay=True) as world:
        world.publish(1)
        world.publisher.publish_payload(b"\xc1")
        world.publish(1)
        assert world.receive(3) == [0, 1]
        assert [range(1, 2)] == [loss.batches for loss in world.subscriber.lost]
        assert not any(1 in batches for _, batches in world.subscriber.recovered)


def test_a_replay_after_a_sink_error_delivers_the_remaining_batches():
    with World(replay=True) as world:
        world.publisher.faults.lose(3)
        world.publish(3)
        world.failures = 1
        with pytest.raises(ZeroDivisionError):
            world.subscriber.catch_up()
        assert world.subscriber.catch_up() == 2
        world.publisher.settle(lambda: [replay.sent for replay in world.publisher.replays], [(0, 1, 2), (1, 2)])
        world.publisher.faults.lose(2)
        world.publish(3)
        assert world.receive(3) == [1, 2, 3, 4, 5]
        assert world.lost == []


def test_each_rank_is_recovered_separately():
    with World(replay=True, ranks=2) as world:
        world.publisher.faults.lose(2, dp_rank=1)
        for event_id in range(4):
            for rank in (0, 1):
                world.publisher.publish(KvCacheEvent(event_id, Cleared(), rank))
        world.subscriber.receive(8)
        assert [[each.event.event_id for each in world.events if each.event.dp_rank == rank] for rank in (0, 1)] == [
            [0, 1, 2, 3]
        ] * 2
        assert [(replay.dp_rank, replay.start) for replay in world.publisher.replays] == [(1, 0)]


def test_messages_that_are_not_batches_are_reported():
    context = zmq.Context()
    xpub = context.socket(zmq.XPUB)
    xpub.bind("inproc://strange")
    with KvSubscriber("inproc://strange", print, dialect="vllm-0.33", context=context) as subscriber:
        assert xpub.recv() == b"\x01"
        xpub.send_multipart([b"", b"\0" * 8])
        xpub.send_multipart([b"", b"\0", b"payload"])
        subscriber.poll(5)
        assert [*map(str, subscriber.problems)] == [
            "rank 0, a message: expected topic, 8 bytes with the number of the batch, payload; got 2 frames",
            (
                "rank 0, a message: expected topic, 8 bytes with the number of the batch, payload; got 1 bytes for a "
                "number"
            ),
        ]
    xpub.close(linger=0)
    context.term()


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", b"garbage", b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x91\xa1x"])
def test_garbage_is_reported_and_the_next_batch_is_applied(payload):
    with World(replay=False) as world:
        world.publisher.publish_payload(payload)
        world.publish(1)
        assert world.receive(2) == [0]
        assert str(world.subscriber.problems[0])[:17] == "rank 0, batch 0: "


EMPTY = msgspec.msgpack.encode([5.0, [], 0])


@pytest.mark.parametrize("replay", [True, False])
def test_an_empty_batch_is_accepted_and_counts_as_received(replay):
    with World(replay=replay) as world:
        world.publisher.publish_payload(EMPTY)
        world.publish(1)
        assert world.receive(2) == [0]
        assert (world.lost, world.subscriber.problems, world.subscriber.unreadable) == ([], [], 0)


def test_a_restart_is_detected_by_an_empty_batch():
    with World(replay=False) as world:
        world.publish(3)
        world.receive(3)
        world.publisher.restart()
        world.publisher.publish_payload(EMPTY)
        assert world.subscriber.poll(5.0) == 1
        assert world.lost == ["batch 0 came after batch 2: numbers went backwards, as after an unannounced restart"]


def test_a_batch_with_an_unreadable_rank_keeps_its_events():
    with World(replay=False) as world:
        sent = []
        write, world.publisher._write = world.publisher._write, lambda dp_rank, payload: sent.append(payload)
        world.publish(1)
        world.publisher._write = write
        timestamp, events, _ = msgspec.msgpack.decode(sent[0])
        world.publisher.publish_payload(msgspec.msgpack.encode([timestamp, events, "one"]))
        assert world.receive(1) == [0]
        assert (world.lost, world.subscriber.unreadable, len(world.subscriber.problems)) == ([], 0, 1)


def test_one_bad_event_leaves_a_gap_of_event_ids():
    with World(replay=True) as world:
        world.publisher.faults.unknown_tag()
        world.publish(2)
        world.receive(2)
        assert [event.event.event_id for event in world.events] == [1, 2]
        assert [str(each)[:37] for each in world.subscriber.problems] == ["rank 0, batch 0: unknown_tag: event 0"]


def publish_some_unreadable(publisher, count, tags):
    """Publish one batch of a chain of `count` blocks; events at the given places have the given tags."""
    sent = []
    write, publisher._write = publisher._write, lambda dp_rank, payload: sent.append((dp_rank, payload))
    with publisher.step():
        publish_chain(publisher, count)
    publisher._write = write
    timestamp, events, rank = msgspec.msgpack.decode(sent[0][1])
    for place, tag in tags.items():
        events[place]["type"] = tag
    publisher.publish_payload(msgspec.msgpack.encode([timestamp, events, rank]))


EXPECTED_TAG = "unknown_tag, type: expected BlockStored, BlockRemoved, AllBlocksCleared, got"

# Tags by their places in a batch of four events; the reports, each with the number of events before it.
UNREADABLE = {
    "in the middle": ({1: "Pinned"}, [(1, f"event 1 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'")]),
    "at the end": ({3: "Pinned"}, [(3, f"event 3 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'")]),
    "two that follow each other": (
        {0: "Pinned", 1: "Moved"},
        [(0, f"events 0 to 1 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'")],
    ),
    "two apart": (
        {0: "Pinned", 2: "Moved"},
        [
            (0, f"event 0 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'"),
            (1, f"event 2 of batch 0 could not be read: {EXPECTED_TAG} 'Moved'"),
        ],
    ),
}


@pytest.mark.parametrize("where", UNREADABLE)
def test_unreadable_events_are_reported_at_their_place_in_the_stream(where):
    tags, expected = UNREADABLE[where]
    heard = []
    with World(
        replay=False, on_loss=lambda worker, rank, batches, text: heard.append((len(world.events), batches, text))
    ) as world:
        publish_some_unreadable(world.publisher, 4, tags)
        world.receive(1)
        assert heard == [(place, range(1), text) for place, text in expected]
        assert [*range(4 - len(tags))] == [event.event.event_id for event in world.events]  # and no gap
        assert ([], len(tags)) == (world.subscriber.lost, len(world.subscriber.problems))


def test_a_batch_that_a_replay_recovers_partly_counts_as_recovered():
    heard = []
    with World(replay=True, on_loss=lambda worker, rank, batches, text: heard.append(text)) as world:
        world.publisher.faults.lose()
        publish_some_unreadable(world.publisher, 3, {1: "Pinned"})
        publish_chain(world.publisher, 1, BIG + 9)
        assert world.receive(2) == [0, 2, 9]
        assert ([(0, range(2))], []) == (world.subscriber.recovered, world.lost)
        assert heard == [f"event 1 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'"]


@pytest.mark.parametrize("to_sink", [True, False])
def test_an_unreadable_last_event_fails_the_verdict(to_sink):
    with KvPublisher("vllm-0.33") as publisher:
        harness = RouterHarness(EngineProfile(block_size=4), backend=None)
        sink = harness.make_sink() if to_sink else harness.apply
        fed(harness, sink, publisher, lambda: publish_some_unreadable(publisher, 2, {1: "Pinned"}), 1)
        (error,) = harness.events.errors
        assert (
            error.rule,
            error.observed,
        ) == ("event_id_gap", f"event 1 of batch 0 could not be read: {EXPECTED_TAG} 'Pinned'")


def test_consequences_of_an_unreadable_event_are_listed_under_it():
    with KvPublisher("vllm-0.33") as publisher:
        harness = RouterHarness(EngineProfile(block_size=4), backend=None)
        fed(harness, harness.make_sink(), publisher, lambda: publish_some_unreadable(publisher, 4, {1: "Pinned"}), 1)
        (error,) = harness.events.errors
        assert [problem.rule for problem in error.consequences()] == ["parent_block_not_found"]


@pytest.mark.parametrize("replay", [True, False])
def test_a_batch_in_another_dialect_is_lost_and_the_matching_dialects_are_named(replay):
    with KvPublisher("vllm-0.33") as publisher, RouterHarness(backend=None, allow=["event_id_gap"]) as harness:
        endpoint = publisher.replay_endpoint if replay else None
        with KvSubscriber(publisher.endpoint, harness.make_sink(), dialect="vllm-0.23", replay=endpoint) as subscriber:
            publisher.wait_subscribed()
            publish_chain(publisher, 2)
            subscriber.receive(2)
        wrong = "cannot be read (wrong_form: event 0: expected an array, got a map; it reads as vllm-0.24, "
        named = "vllm-0.28, vllm-0.33)"
        assert [f"batch {n} {wrong}{named}" for n in (0, 1)] == [loss.observed for loss in subscriber.lost]
        assert [f"batch {n} {wrong}{named}" for n in (0, 1)] == [each.observed for each in harness.events.problems]
        assert (subscriber.batches, subscriber.unreadable) == (0, 2)


def test_no_dialect_is_suggested_for_a_batch_that_none_can_read():
    with World(replay=False) as world:
        publish_some_unreadable(world.publisher, 1, {0: "Pinned"})
        world.receive(1)
        assert world.lost == [f"batch 0 cannot be read (unknown_tag: event 0{EXPECTED_TAG[11:]} 'Pinned')"]


@pytest.mark.parametrize("dialect", SPOKEN)
def test_an_extra_field_is_reported_and_the_event_is_kept(dialect):
    with World(replay=False, dialect=dialect) as world:
        world.publisher.faults.extra_field(2)
        world.publish(1)
        world.publisher.publish(removed(BIG))
        world.receive(2)
        assert [each.text.partition(":")[0] for each in world.subscriber.problems] == 2 * ["unknown_field"]
        assert [event.event.event_id for event in world.events] == [0, 1]


def test_an_injected_extra_field_does_not_replace_the_salt_of_an_event():
    with World(replay=False, dialect="sglang-0.5.18") as world:
        world.publisher.faults.extra_field()
        world.publisher.publish(stored(BIG), token_ids=tokens_of(0), extra={"cache_salt": "s"})
        world.receive(1)
        assert world.events[0].extra == {"cache_salt": "s", "kvmock_field": True}


# ------------------------------------------------------------------------------------------------ a harness


def test_a_harness_checks_the_events_of_a_real_publisher():
    with RouterHarness(backend="vllm") as engines, KvPublisher("vllm-0.33") as publisher:
        engines.add_sink(publisher)
        with RouterHarness(backend=None) as judge:
            sink = judge.make_sink(residency="counted")
            with KvSubscriber(publisher.endpoint, sink, dialect="vllm-0.33") as subscriber:
                publisher.wait_subscribed()
                prompt = engines.prompt(blocks=3)
                engines.worker(0).serve(prompt)
                engines.worker(0).serve(engines.prompt(blocks=2, after=prompt))
                subscriber.receive(publisher.batches())
            assert {sink.worker_id: 3} == judge.overlap(prompt)
            assert engines.overlap(prompt)[0] == judge.overlap(prompt)[sink.worker_id]


def fed(harness, sink, publisher, publish, batches):
    with KvSubscriber(publisher.endpoint, sink, dialect="vllm-0.33", worker_id=3) as subscriber:
        publisher.wait_subscribed()
        publish()
        subscriber.receive(batches)


@pytest.mark.parametrize("to_sink", [True, False])
def test_lost_batches_are_reported_as_a_gap_of_event_ids(to_sink):
    with KvPublisher("vllm-0.33") as publisher:
        harness = RouterHarness(EngineProfile(block_size=4), backend=None)
        sink = harness.make_sink() if to_sink else harness.apply

        def publish():
            publish_chain(publisher, 4)
            publisher.faults.lose(3)
            publish_chain(publisher, 4, BIG + 4)

        fed(harness, sink, publisher, publish, 8)
        (error,) = harness.events.errors
        assert (
            error.rule,
            error.observed,
            error.expected,
        ) == ("event_id_gap", "batches 4 to 6 did not arrive", "batch 4")
        worker = sink.worker_id if to_sink else 3
        assert (worker, 0) == (error.worker_id, error.dp_rank)
        # The parent of the next block was in a lost batch; the gap explains this.
        assert [problem.rule for problem in error.consequences()] == ["parent_block_not_found"]
        with pytest.raises(EventRulesBroken, match="batches 4 to 6 did not arrive"):
            harness.assert_no_event_errors()


@pytest.mark.parametrize("method", [True, False])
def test_a_subscriber_cannot_feed_a_harness_with_its_own_events(method):
    with KvPublisher("vllm-0.33", ranks=2) as publisher, RouterHarness(backend="vllm") as harness:
        harness.add_sink(publisher, worker_id=0)
        with pytest.raises(ValueError) as caught:
            KvSubscriber(publisher.endpoints[1], harness.apply, dialect="vllm-0.33")
        assert str(caught.value) == (
            f"the sink belongs to the harness that publishes at {publisher.endpoints[1]}, whose worker 0 is a mock "
            "engine: each event would be published again. Pass a worker_id that this harness does not have, or a "
            "sink of make_kv_sink"
        )
        sink = harness.make_sink()
        for other in ({"sink": sink.publish if method else sink}, {"sink": harness.apply, "worker_id": 7}):
            KvSubscriber(publisher.endpoint, dialect="vllm-0.33", **other).close()
        with KvPublisher("vllm-0.33") as real:
            KvSubscriber(real.endpoint, harness.apply, dialect="vllm-0.33").close()


@pytest.mark.parametrize("method", [True, False])
def test_a_subscriber_cannot_feed_a_sink_from_a_publisher_of_all_workers(method):
    with KvPublisher("vllm-0.33") as publisher, RouterHarness(backend="vllm") as harness:
        harness.add_sink(publisher)
        sink = harness.make_sink()
        for given in (harness.apply, sink.publish if method else sink):
            with pytest.raises(ValueError, match=r"has the events of all workers: add_sink\(publisher, worker_id=0\)$"):
                KvSubscriber(publisher.endpoint, given, dialect="vllm-0.33", worker_id=7)


def test_a_block_size_different_from_that_of_the_index_is_reported():
    with KvPublisher("vllm-0.33") as publisher:
        harness = RouterHarness(EngineProfile(block_size=16), backend=None)
        fed(harness, harness.make_sink(), publisher, lambda: publish_chain(publisher, 1), 1)
        (error,) = harness.events.errors
        assert (error.rule, error.expected) == ("sparse_tokens", "each block has its 16 tokens")


def test_on_loss_is_called_with_each_loss():
    losses = []
    with World(replay=False, on_loss=lambda *loss: losses.append(loss)) as world:
        world.publisher.faults.lose()
        world.publish(2)
        world.receive(2)
    assert [(0, 0, range(1), "batch 0 did not arrive")] == losses


# ------------------------------------------------------------------------------------------------ waiting


def test_an_async_test_can_receive_without_blocking_its_loop():
    async def receive(world):
        waiting = asyncio.create_task(world.subscriber.areceive(4))
        await tasks_wait()  # the loop continues
        world.publisher.faults.lose()
        world.publish(4)
        await waiting
        return world.blocks

    with World(replay=True, ranks=1) as world:
        assert asyncio.run(receive(world)) == [0, 1, 2, 3]
        with pytest.raises(WireTimeout, match=r"0 of 1 batches arrived in 0\.1 s"):
            asyncio.run(world.subscriber.areceive(1, timeout=0.1))

        async def blocks():
            world.subscriber.receive(1, timeout=0)

        with pytest.raises(WireTimeout, match=r"receive blocks the asyncio loop .*: await areceive$"):
            asyncio.run(blocks())


class Engine:
    """A publisher whose replays are answered by tasks of the test's own loop: a blocked loop gets no answer."""

    def __init__(self, context):
        with KvPublisher("vllm-0.33", replay=False) as publisher:
            self.payloads = []
            publisher._write = lambda _, payload: self.payloads.append(payload)
            publish_chain(publisher, 4)
        self.events, self.asked = [], []
        self.wanted, self.reached = 0, asyncio.Event()
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.pub.bind("inproc://live")
        self.router.bind("inproc://replay")
        self.subscriber = KvSubscriber(
            "inproc://live", self.take, dialect="vllm-0.33", replay="inproc://replay", context=context
        )
        assert self.pub.recv() == b"\1"

    def take(self, event):
        self.events.append(event)
        if len(self.events) == self.wanted:
            self.reached.set()

    async def applied(self, events):
        """Wait until `count` events have arrived; there were fewer before."""
        assert len(self.events) < events
        self.wanted = events
        await self.reached.wait()

    def publish(self, number):
        self.pub.send_multipart([b"", number.to_bytes(8, "big"), self.payloads[number]])

    async def asks(self):
        """Wait for a request of a replay."""
        while not self.router.poll(0):
            await readable(1, self.router)
        identity, _, start = self.router.recv_multipart()
        self.asked.append(int.from_bytes(start, "big"))
        return identity

    def answer(self, identity, *numbers, end=True):
        for number in numbers:
            self.router.send_multipart([identity, b"", b"", number.to_bytes(8, "big"), self.payloads[number]])
        if end:
            self.router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])

    @property
    def blocks(self):
        return [event.event.data.block_hashes[0] - BIG for event in self.events]


@pytest.fixture
def engine():
    with zmq.Context() as context:
        made = Engine(context)
        yield made
        made.subscriber.close()
        made.pub.close(linger=0)
        made.router.close(linger=0)


def test_the_asyncio_loop_continues_while_a_replay_is_awaited(engine):
    async def test():
        waiting = asyncio.create_task(engine.subscriber.areceive(4))
        engine.publish(3)
        identity = await engine.asks()  # in the same loop
        engine.answer(identity, 0, 1, end=False)
        await engine.applied(2)
        assert not waiting.done()
        engine.answer(identity, 2)
        await waiting

    asyncio.run(test())
    assert engine.blocks == [0, 1, 2, 3]
    assert engine.asked == [0]
    assert [(0, range(3))] == engine.subscriber.recovered
    assert engine.subscriber.lost == []


def test_a_catch_up_can_be_awaited(engine):
    async def test():
        waiting = asyncio.create_task(engine.subscriber.acatch_up())
        engine.answer(await engine.asks(), 0, 1)
        return await waiting

    assert asyncio.run(test()) == 2
    assert engine.blocks == [0, 1]


def test_no_other_task_can_receive_while_a_replay_is_awaited(engine):
    async def test():
        first = asyncio.create_task(engine.subscriber.areceive(2))
        engine.publish(1)
        identity = await engine.asks()
        for call in (engine.subscriber.poll, engine.subscriber.receive, engine.subscriber.catch_up):
            with pytest.raises(ValueError, match=r"^another task awaits a replay; only one task at a time may"):
                call()
        second = asyncio.create_task(engine.subscriber.areceive(3))  # waits for its turn
        engine.publish(2)
        engine.answer(identity, 0)
        await asyncio.gather(first, second)

    asyncio.run(test())
    assert engine.blocks == [0, 1, 2]
    assert engine.asked == [0]


def test_a_task_cancelled_during_a_replay_leaves_the_remaining_batches_to_the_next(engine):
    async def test():
        waiting = asyncio.create_task(engine.subscriber.areceive(3))
        engine.publish(2)
        engine.answer(await engine.asks(), 0, end=False)
        await engine.applied(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        again = asyncio.create_task(engine.subscriber.areceive(3))
        engine.publish(3)
        engine.answer(await engine.asks(), 1, 2)
        await again

    asyncio.run(test())
    assert engine.blocks == [0, 1, 2, 3]
    assert engine.asked == [0, 1]


def test_closing_a_subscriber_during_a_replay_ends_the_wait(engine):
    async def test():
        waiting = asyncio.create_task(engine.subscriber.areceive(2))
        engine.publish(1)
        await engine.asks()
        engine.subscriber.close()
        with pytest.raises(ValueError, match=r"^this KvSubscriber is closed$"):
            await waiting

    asyncio.run(test())


def test_an_incomplete_replay_is_given_up_after_the_timeout_in_async_receive():
    async def receive(world):
        world.publisher.faults.lose(2)
        world.publisher.faults.truncate_replay(1, end_marker=False)
        world.publish(3)
        await world.subscriber.areceive(3)

    with World(replay=True, replay_timeout=0.1) as world:
        asyncio.run(receive(world))
        assert world.lost == ["batch 1 did not arrive, and the replay broke off: nothing more came in 0.1 s"]
        assert world.blocks == [0, 2]


def test_a_receive_timeout_explains_the_missing_batches():
    with World(replay=False) as world:
        world.publisher.faults.lose()
        world.publish(2)
        with pytest.raises(WireTimeout) as caught:
            world.subscriber.receive(3, timeout=0.2)
        assert str(caught.value).splitlines() == [
            "2 of 3 batches arrived in 0.2 s",
            f"rank 0 at {world.publisher.endpoint}: next is batch 2",
            "rank 0: batch 0 did not arrive",
        ]


def test_invalid_sinks_replay_endpoints_and_dialects_are_refused():
    with pytest.raises(TypeError, match="sink is called with each event; got 5, which cannot be called"):
        KvSubscriber("tcp://127.0.0.1:1", 5, dialect="vllm-0.33")
    with pytest.raises(EndpointError, match="2 endpoints for 1 ranks"):
        KvSubscriber("tcp://127.0.0.1:1", print, dialect="vllm-0.33", replay=["tcp://127.0.0.1:2", "tcp://127.0.0.1:3"])
    with pytest.raises(ValueError, match="unknown dialect 'vllm'"):
        KvSubscriber("tcp://127.0.0.1:1", print, dialect="vllm")


WRONG_ENDPOINTS = {
    "tcp://127.0.0.1:70000": "'tcp://127.0.0.1:70000': a port is from 1 to 65535",
    "tcp://127.0.0.1:0": "'tcp://127.0.0.1:0': a port is from 1 to 65535",
    "ipc://": "'ipc://' has no address: expected ipc:///PATH",
    "inproc://\ud800": r"'inproc://\ud800': an address is text that UTF-8 can write, without a zero",
    5: "endpoints are a string, or one a rank, such as 'tcp://HOST:PORT'; got 5",
    (): "endpoints are a string, or one a rank, such as 'tcp://HOST:PORT'; got ()",
    (5,): "endpoints are a string, or one a rank, such as 'tcp://HOST:PORT'; got (5,)",
}


@pytest.mark.parametrize("endpoint", WRONG_ENDPOINTS)
def test_unusable_endpoints_are_refused(endpoint):
    with pytest.raises(EndpointError) as caught:
        KvSubscriber(endpoint, print, dialect="vllm-0.33")
    assert WRONG_ENDPOINTS[endpoint] == str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"topic": 5}, "topic must be a string, got 5"),
        ({"from_start": 1}, "from_start must be True or False, got 1"),
        ({"on_loss": 5}, "on_loss is called with each loss; got 5, which cannot be called"),
    ],
)
def test_subscriber_options_of_the_wrong_type_leave_no_socket_open(option, message):
    context = zmq.Context()
    with pytest.raises(TypeError) as caught:
        KvSubscriber("tcp://127.0.0.1:9", print, dialect="vllm-0.33", context=context, **option)
    assert str(caught.value) == message
    context.term()  # it would wait for an open socket


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "x", None, True])
def test_an_invalid_timeout_is_refused(timeout):
    with KvSubscriber("tcp://127.0.0.1:9", print, dialect="vllm-0.33") as subscriber:
        for call in (subscriber.poll, lambda timeout: subscriber.receive(1, timeout)):
            with pytest.raises(ValueError, match=r"^timeout must be a finite number of at least 0 seconds, got "):
                call(timeout)


def test_a_timeout_can_be_longer_than_zmq_supports():
    with KvPublisher("vllm-0.33") as publisher:
        with KvSubscriber(
            publisher.endpoint, print, dialect="vllm-0.33", replay=publisher.replay_endpoint, replay_timeout=1e300
        ) as subscriber:
            publisher.wait_subscribed(timeout=1e300)
            publish_chain(publisher, 1)
            subscriber.receive(1, timeout=1e300)
            assert subscriber.catch_up() == 0
        with pytest.raises(ValueError, match=r"^this KvSubscriber is closed$"), subscriber:
            pass


def test_a_closed_subscriber_refuses_every_call_except_close():
    subscriber = KvSubscriber("tcp://127.0.0.1:9", print, dialect="vllm-0.33", replay="tcp://127.0.0.1:9")
    subscriber.close()
    subscriber.close()
    for call in (subscriber.receive, subscriber.poll, subscriber.catch_up, lambda: asyncio.run(subscriber.areceive())):
        with pytest.raises(ValueError, match=r"^this KvSubscriber is closed$"):
            call()
