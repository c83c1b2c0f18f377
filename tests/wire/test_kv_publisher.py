"""A publisher from a router's view: frames, numbers, replays; and how a test waits for it."""

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from sockets import BIG, number, plain_sub, publish_chain, removed, replayed, stored, tasks_wait, tokens_of

from pytest_kvmock import Cleared, EngineProfile, KvCacheEvent, Removed, RouterEvent, RouterHarness, Stored
from pytest_kvmock.wire import DIALECTS, EncodeError, KvWire, decode
from pytest_kvmock.wire.codec.batch import block_of, wire_hash
from pytest_kvmock.wire.sockets import KvPublisher, KvSubscriber, WireTimeout
from pytest_kvmock.wire.sockets.endpoints import EndpointError, rank_endpoint, rank_endpoints

SPOKEN = [name for name, dialect in DIALECTS.items() if dialect.in_matrix]


@pytest.fixture
def publisher():
    with KvPublisher("vllm-0.24") as publisher:
        yield publisher


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_a_batch_is_sent_as_topic_number_and_payload(transport):
    with KvPublisher("vllm-0.24", endpoint=transport, topic="kv@pod:1@m") as publisher:
        with plain_sub(publisher.endpoint, topic=b"kv@", context=publisher.context) as sub:
            publisher.wait_subscribed()
            publish_chain(publisher, 2)
            first, second = sub.recv_multipart(), sub.recv_multipart()
        assert [b"kv@pod:1@m", (0).to_bytes(8, "big")] == first[:2]
        assert [b"kv@pod:1@m", (1).to_bytes(8, "big")] == second[:2]
        assert [*decode(first[2], "vllm-0.24").events[0].event.data.block_hashes] == [BIG]
        assert decode(second[2], "vllm-0.24").events[0].event.data.parent_hash == BIG


def test_a_step_publishes_one_batch_per_rank_and_none_without_events():
    with KvPublisher("vllm-0.33", ranks=2) as publisher, plain_sub(*publisher.endpoints) as sub:
        publisher.wait_subscribed()
        with publisher.step():
            publisher.publish(stored(BIG), token_ids=tokens_of(1))
            publisher.publish(stored(BIG + 1, BIG), token_ids=tokens_of(5))
            publisher.publish(KvCacheEvent(0, Cleared(), 1))
        with publisher.step():
            pass
        assert (publisher.batches(0), publisher.batches(1)) == (1, 1)
        batches = {msgspec.msgpack.decode((frames := sub.recv_multipart())[2])[2]: frames for _ in range(2)}
        assert [decode(batches[rank][2], "vllm-0.33").num_events for rank in (0, 1)] == [2, 1]
        assert [number(batches[rank]) for rank in (0, 1)] == [0, 0]


def test_a_flush_within_a_step_sends_the_events_published_so_far(publisher):
    with publisher.step():
        publish_chain(publisher, 2)
        assert publisher.batches() == 0
        publisher.flush()
        assert publisher.batches() == 1
        publisher.publish(Cleared())
    assert publisher.batches() == 2


def test_a_worker_of_a_harness_publishes_through_a_publisher():
    with RouterHarness(backend="vllm") as harness, KvPublisher("vllm-0.33") as publisher:
        harness.add_sink(publisher)
        prompt = harness.prompt(blocks=2)
        with plain_sub(publisher.endpoint) as sub:
            publisher.wait_subscribed()
            with publisher.step():
                harness.worker(0).serve(prompt)
            decoded = decode(sub.recv_multipart()[2], "vllm-0.33")
        assert decoded.problems == []
        assert harness.events.stored_blocks == [block for e in decoded.events for block in e.event.data.block_hashes]
        assert [tuple(prompt.tokens[:16]), tuple(prompt.tokens[16:32])] == [*map(tuple, decoded.events[0].token_ids)]


BEHIND_THE_WIRE = ("lose", "double", "reorder", "delay", "wrong_parent", "unknown_removed", "self_parent", "late_join")


@pytest.mark.parametrize("fault", BEHIND_THE_WIRE)
def test_faults_of_a_harness_do_not_change_the_bytes_on_the_wire(fault):
    def sent(ask):
        harness = RouterHarness(backend="vllm", allow=["event_id_gap"])
        wire = KvWire("vllm-0.33")
        harness.add_sink(wire, worker_id=0)
        prompt = harness.prompt()
        harness.worker(0).serve(prompt)
        if ask:
            getattr(harness.faults, fault)()
        for _ in range(3):
            harness.worker(0).serve(harness.prompt(after=prompt))
        harness.worker(0).clear()
        return wire.payloads

    assert sent(ask=False) == sent(ask=True)


@pytest.mark.parametrize("dialect", SPOKEN)
def test_small_block_ids_are_mapped_one_to_one_to_64_bit_hashes(dialect):
    with KvPublisher(dialect) as publisher, plain_sub(publisher.endpoint) as sub:
        publisher.wait_subscribed()
        publisher.publish(Stored(None, (0, 1), (7, 8)), token_ids=[[1, 2], [3, 4]])
        publisher.publish(Stored(1, (5,), (9,)), token_ids=[[5, 6]])
        publisher.publish(removed(5, 2**32 - 1, 2**32, BIG))
        payloads = [sub.recv_multipart()[2] for _ in range(3)]
    first, second, third = (decode(payload, dialect).events[0].event.data for payload in payloads)
    on_wire = [*first.block_hashes, second.parent_hash, *second.block_hashes, *third.block_hashes]
    assert [*map(block_of, on_wire)] == [0, 1, 1, 5, 5, 2**32 - 1, 2**32, BIG]
    assert len({*on_wire}) == 6
    assert all(abs(value) >= 2**32 for value in on_wire)  # eight bytes in msgpack, signed or not
    width = b"\xd3" if DIALECTS[dialect].hashes == "signed" else b"\xcf"
    assert all(width + wire_hash(block).to_bytes(8, "big") in payloads[0] for block in (0, 1))


def test_a_block_hash_of_more_than_64_bits_is_refused_even_next_to_a_small_one(publisher):
    for block in (2**64, -(2**63) - 1):
        with pytest.raises(EncodeError, match=r"block hash -?(0x)?\w+ has more than 64 bits$"):
            publisher.publish(removed(5, block))
    assert publisher.batches() == 0


def test_sequence_numbers_begin_at_0_after_a_restart_and_the_buffer_is_empty(publisher):
    publish_chain(publisher, 3)
    publisher.restart()
    publish_chain(publisher, 1)
    assert [int.from_bytes(reply[1], "big") for reply in replayed(publisher.replay_endpoint, 0)[:-1]] == [0]


RESTARTS = {
    "of its own accord": lambda harness: harness.worker(0).restart(),
    "announced": lambda harness: harness.worker(0).restart(announced=True),
    "a fault": lambda harness: harness.faults.restart(worker=0),
}


@pytest.mark.parametrize("restart", RESTARTS)
def test_restarting_a_worker_restarts_its_publisher(restart):
    harness = RouterHarness(backend="vllm")
    with KvPublisher("vllm-0.33") as publisher, KvPublisher("vllm-0.33") as other:
        for worker, of_worker in enumerate((publisher, other)):
            harness.add_sink(of_worker, worker_id=worker)
            harness.worker(worker).serve(harness.prompt())
        with publisher.step():
            harness.worker(0).serve(harness.prompt())
            RESTARTS[restart](harness)  # unsent batches are lost in a crash
        assert (publisher.batches(), other.batches()) == (0, 1)
        harness.worker(0).serve(harness.prompt())
        assert [int.from_bytes(reply[1], "big") for reply in replayed(publisher.replay_endpoint, 0)[:-1]] == [0]


def test_restarting_a_rank_restarts_only_that_rank_of_the_publisher():
    harness = RouterHarness(EngineProfile(dp_size=2), backend="vllm")
    with KvPublisher("vllm-0.33", ranks=2) as publisher:
        harness.add_sink(publisher, worker_id=0)
        for rank in (0, 1):
            harness.worker(0, dp_rank=rank).serve(harness.prompt())
        harness.worker(0, dp_rank=1).restart()
        assert (publisher.batches(0), publisher.batches(1)) == (1, 0)


def test_a_worker_can_restart_if_its_publisher_is_closed_or_lacks_the_rank():
    harness = RouterHarness(EngineProfile(dp_size=2), backend="vllm")
    with KvPublisher("vllm-0.33") as publisher:
        harness.add_sink(publisher, worker_id=0)
        harness.worker(0, dp_rank=1).restart()
    harness.worker(0, dp_rank=0).restart()


def test_a_restart_within_a_step_drops_the_unsent_events_of_the_worker():
    harness = RouterHarness(backend="vllm")
    wire = KvWire("vllm-0.33")
    harness.add_sink(wire, worker_id=0)
    with wire.step():
        harness.worker(0).serve(harness.prompt())
        harness.worker(0).restart()
        harness.worker(0).serve(harness.prompt())
    assert len(wire.decode(wire.payloads[0]).events) == 1


def test_a_timeout_notes_a_restart_of_the_publisher_without_its_worker(publisher):
    publish_chain(publisher, 2)
    publisher.faults.restart()
    publish_chain(publisher, 1)
    line = "rank 0 was restarted without its worker: worker.restart() empties the engine, and restarts its publisher"
    with pytest.raises(WireTimeout, match=f"^{re.escape(line)}$".replace("^", "(?m)^")):
        publisher.settle(lambda: False, timeout=0)
    publisher.worker_restarted(0)
    with pytest.raises(WireTimeout) as caught:
        publisher.settle(lambda: False, timeout=0)
    assert line not in str(caught.value)


def test_a_timeout_after_a_restart_notes_that_batch_numbers_restarted(publisher):
    began_anew = "rank 0 restarted: its numbers begin with 0 again; batches 0 to 1 went out before that, and no replay has them any more"  # noqa: E501
    publish_chain(publisher, 2)
    assert began_anew not in why(publisher)
    publisher.worker_restarted(0)
    publisher.worker_restarted(0)  # it has published no batch since
    assert began_anew in why(publisher)


def test_event_ids_of_published_data_begin_at_0_after_a_restart():
    wire = KvWire("dynamo-router-event")
    for _ in range(2):
        wire.publish(Stored(None, (1,), (1,)), token_ids=[(1, 2)])
        wire.publish(Removed((1,)))
        wire.worker_restarted(0)
    ids = [event.event.event_id for payload in wire.payloads for event in wire.decode(payload).events]
    assert ids == [0, 1, 0, 1]


# ------------------------------------------------------------------------------------------------ closed, and bound
# again


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("own_context", [True, False])
def test_a_new_publisher_can_take_over_the_endpoint_of_a_closed_one(transport, own_context):
    context = None if own_context else zmq.Context()
    closed = KvPublisher("vllm-0.33", endpoint=transport, context=context)
    places = {"endpoint": closed.endpoint, "replay": closed.replay_endpoint}
    with plain_sub(closed.endpoint) as sub:
        for _ in range(3):  # a process may die more than once
            closed.settle(lambda closed=closed: sub.poll(0) or closed.subscriptions())
            publish_chain(closed, 2)
            first, second = sub.recv_multipart(), sub.recv_multipart()
            assert [number(first), number(second)] == [0, 1]
            closed.close()
            again = KvPublisher("vllm-0.33", **places, context=context)
            again.take_over(closed)
            closed = again
        with pytest.raises(WireTimeout, match=r"a SUB socket subscribes again while its owner polls it"):
            closed.wait_subscribed(2, timeout=0)
        publish_chain(closed, 1)
        assert [int.from_bytes(reply[-2], "big") for reply in replayed(closed.replay_endpoint, 0)[:-1]] == [0]
    closed.close()
    if context is not None:
        context.term()
    if transport == "ipc":
        assert not Path(closed.endpoint.removeprefix("ipc://")).parent.exists()


def test_a_publisher_that_takes_over_sends_new_bytes_and_notes_the_restart():
    with KvPublisher("vllm-0.33") as closed:
        publish_chain(closed, 1)
        payload = replayed(closed.replay_endpoint, 0)[0][-1]
    with KvPublisher("vllm-0.33", endpoint=closed.endpoint) as publisher:
        publisher.take_over(closed)
        publish_chain(publisher, 1)
        assert payload != replayed(publisher.replay_endpoint, 0)[0][-1]
        line = (
            "rank 0 restarted: its numbers begin with 0 again; batch 0 went out before that, and no replay has it "
            "any more"
        )
        assert line in why(publisher)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_an_address_is_free_as_soon_as_its_publisher_is_closed(transport):
    with zmq.Context() as context:
        closed = KvPublisher("vllm-0.33", endpoint=transport, context=context)
        for _ in range(30):
            closed.close()
            places = {"endpoint": closed.endpoint, "replay": closed.replay_endpoint}
            closed = KvPublisher("vllm-0.33", **places, context=context)
        closed.close()


def test_an_open_publisher_cannot_be_taken_over(publisher):
    with KvPublisher("vllm-0.24") as other, pytest.raises(ValueError, match="is open: close it first"):
        other.take_over(publisher)


def test_a_worker_that_publishes_to_a_closed_publisher_gets_one_error():
    harness = RouterHarness(backend="vllm")
    with KvPublisher("vllm-0.33") as publisher:
        harness.add_sink(publisher, worker_id=0)
    for _ in range(3):
        harness.worker(0).serve(harness.prompt())
    (problem,) = harness.judge().errors
    assert problem.rule == "sink_failure"
    assert problem.observed == (
        "KvPublisher.publish raised ValueError: this KvPublisher is closed; another one may be bound at "
        f"{publisher.endpoint}; it gets no further events"
    )


def test_an_event_that_cannot_be_published_is_refused_and_uses_no_batch_number(publisher):
    with pytest.raises(EncodeError, match="without token ids"):
        publisher.publish(stored(BIG))
    with pytest.raises(TypeError, match=r"a KvPublisher takes Stored, .*, got 'stored' \(str\)"):
        publisher.publish("stored")
    with pytest.raises(ValueError, match="the publisher has ranks 0 to 0, got rank 3"):
        publisher.publish(RouterEvent(0, KvCacheEvent(0, Cleared(), 3)))
    assert publisher.batches() == 0


# ------------------------------------------------------------------------------------------------ replay


@pytest.mark.parametrize(
    ("dialect", "topic"), [("vllm-0.24", []), ("vllm-0.33", [b"t"]), ("sglang-0.5.20", []), ("sglang-0.5.22", [b"t"])]
)
def test_a_replay_is_framed_as_the_engine_frames_it(dialect, topic):
    with KvPublisher(dialect, topic="t") as publisher:
        publish_chain(publisher, 4)
        *batches, end = replayed(publisher.replay_endpoint, 2)
    assert [[b"", *topic, (seq).to_bytes(8, "big")] for seq in (2, 3)] == [reply[:-1] for reply in batches]
    assert [b"", *([b""] if topic else []), b"\xff" * 8, b""] == end
    assert [(replay.start, replay.sent) for replay in publisher.replays] == [(2, (2, 3))]


def test_a_replay_from_a_dropped_batch_sends_the_later_batches_without_an_error():
    # vLLM's own test: a buffer of 100, 110 batches: 10 to 109.
    with KvPublisher("vllm-0.24", buffer_steps=100) as publisher:
        publish_chain(publisher, 110)
        *batches, _ = replayed(publisher.replay_endpoint, 0)
    assert [*range(10, 110)] == [int.from_bytes(reply[1], "big") for reply in batches]


def test_a_replay_from_a_future_batch_is_only_an_end_marker(publisher):
    assert len(replayed(publisher.replay_endpoint, 10)) == 1


def test_a_malformed_replay_request_is_recorded_and_not_answered(publisher):
    publish_chain(publisher, 1)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"only one"])
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    assert dealer.recv_multipart()[-2] != b"\xff" * 8
    context.destroy(linger=0)
    assert [(replay.frames, replay.start) for replay in publisher.replays] == [(1, None), (2, 0)]


def test_a_publisher_records_the_client_and_start_of_each_replay(publisher):
    publish_chain(publisher, 2)
    context = zmq.Context()
    for name, start in ((b"one", 1), (b"two", 0), (None, 1)):
        dealer = context.socket(zmq.DEALER)
        if name is not None:
            dealer.identity = name
        dealer.connect(publisher.replay_endpoint)
        dealer.rcvtimeo = 5000
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        for _ in range(3 - start):  # also the end marker
            dealer.recv_multipart()
        dealer.close(linger=0)
    context.term()
    one, two, unnamed = publisher.replays

    assert [(one.client, one.start), (two.client, two.start)] == [(b"one", 1), (b"two", 0)]
    assert unnamed.client not in (b"", b"one", b"two")


def test_each_rank_answers_replays_at_its_own_consecutive_port():
    with KvPublisher("vllm-0.24", ranks=3) as publisher:
        publisher.publish(KvCacheEvent(0, Cleared(), 2))
        assert [len(replayed(endpoint, 0)) for endpoint in publisher.replay_endpoints] == [1, 1, 2]
        for endpoints in (publisher.endpoints, publisher.replay_endpoints):
            base, *others = (int(endpoint.rpartition(":")[2]) for endpoint in endpoints)
            assert [base + 1, base + 2] == others


# ------------------------------------------------------------------------------------------------ waiting


def test_only_active_subscriptions_to_a_topic_are_counted(publisher):
    with plain_sub(publisher.endpoint), plain_sub(publisher.endpoint), plain_sub(publisher.endpoint):
        publisher.wait_subscribed(3)
        assert publisher.subscriptions() == (b"", b"", b"")
    assert publisher.settle(publisher.subscriptions, ()) == ()
    with pytest.raises(WireTimeout):
        publisher.wait_subscribed(timeout=0)


def test_a_timeout_of_wait_subscribed_lists_the_existing_subscriptions():
    with KvPublisher("vllm-0.24", topic="kv@a@m") as publisher, plain_sub(publisher.endpoint, topic=b"kv-events"):
        publisher.settle(publisher.subscriptions)
        with pytest.raises(WireTimeout) as caught:
            publisher.wait_subscribed(timeout=0)
        assert str(caught.value) == (
            f"rank 0 at {publisher.endpoint} has 0 of 1 subscriptions to its topic 'kv@a@m' after 0 s; "
            "subscribed to: 'kv-events'"
        )


def test_wait_subscribed_requires_a_subscription_to_each_rank():
    with KvPublisher("vllm-0.24", ranks=2) as publisher, plain_sub(publisher.endpoints[0]):
        with pytest.raises(WireTimeout) as caught:
            publisher.wait_subscribed(timeout=0.2)
        assert str(caught.value).startswith(f"rank 1 at {publisher.endpoints[1]} has 0 of 1 subscriptions")


def answers(value):
    """An async probe with this answer."""

    async def probe():
        return value

    return probe


def test_an_async_test_can_wait_without_blocking_its_loop(publisher):
    async def consumer(endpoint):
        turns = 0

        async def turn():
            nonlocal turns
            turns += 1
            return turns > 3

        with plain_sub(endpoint) as sub:
            await publisher.await_subscribed()
            publish_chain(publisher, 1)
            await publisher.asettle(turn)
            return number(sub.recv_multipart()), turns

    assert asyncio.run(consumer(publisher.endpoint)) == (0, 4)
    with pytest.raises(WireTimeout, match="0 of 2 subscriptions"):
        asyncio.run(publisher.await_subscribed(2, timeout=0.1))
    with pytest.raises(WireTimeout, match="expected 5, got 4"):
        asyncio.run(publisher.asettle(answers(4), 5, timeout=0))


def test_settle_waits_for_the_answer_of_a_consumer_in_another_thread(publisher):
    received = []

    def consume():
        with plain_sub(publisher.endpoint) as sub:
            received.extend(number(sub.recv_multipart()) for _ in range(5))

    thread = threading.Thread(target=consume)
    thread.start()
    publisher.wait_subscribed()
    publish_chain(publisher, 5)
    assert publisher.settle(lambda: [*received], [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    thread.join()


def test_settle_waits_between_polls_with_an_unread_subscription(publisher):
    asked = []
    with plain_sub(publisher.endpoint):
        while not publisher._ranks[0].xpub.poll(0):  # the subscription has arrived and is unread
            pass
        with pytest.raises(WireTimeout):
            publisher.settle(lambda: asked.append(1), timeout=0.1)
    assert len(asked) <= 30  # every 5 ms; without a wait there would be thousands


def test_settle_explains_its_wait(publisher):
    def overlap():
        return {0: 3}

    publisher.faults.lose()
    publish_chain(publisher, 2)
    replayed(publisher.replay_endpoint, 1)
    with pytest.raises(WireTimeout) as caught:
        publisher.settle(overlap, {0: 4}, timeout=0)
    assert str(caught.value).splitlines() == [
        "test_settle_explains_its_wait.<locals>.overlap: expected {0: 4}, got {0: 3} after 0 s",
        "rank 0 has published batches 0 to 1, to 0 subscriptions",
        "rank 0: batches 0 to 1 went out with 0 subscriptions: call wait_subscribed first",
        "rank 0 was asked for batches from 1 on, and sent 1",
        "injected: lose at rank 0, batch 0",
    ]


def why(publisher, answer=False, expected=None):
    """Return the lines of the timeout, except the first, of a consumer with a wrong answer."""
    with pytest.raises(WireTimeout) as caught:
        publisher.settle(lambda: answer, expected, timeout=0)
    return str(caught.value).splitlines()[1:]


def test_a_timeout_names_batches_sent_before_any_subscription(publisher):
    publish_chain(publisher, 3)
    with plain_sub(publisher.endpoint):
        publisher.wait_subscribed()
        publish_chain(publisher, 2)
        assert why(publisher) == [
            "rank 0 has published batches 0 to 4, to 1 subscriptions, seen from batch 3 on",
            "rank 0: batches 0 to 2 went out with 0 subscriptions: call wait_subscribed first",
        ]
        replayed(publisher.replay_endpoint, 0)  # a consumer that requests all batches gets them
        assert why(publisher) == [
            "rank 0 has published batches 0 to 4, to 1 subscriptions, seen from batch 3 on",
            "rank 0 was asked for batches from 0 on, and sent 5",
        ]
        publisher.restart()
        publish_chain(publisher, 1)
        assert why(publisher)[0] == "rank 0 has published batch 0, to 1 subscriptions"


def test_batches_sent_after_wait_subscribed_count_as_received_by_the_subscriber(publisher):
    with plain_sub(publisher.endpoint):
        publisher.wait_subscribed()
        publish_chain(publisher, 2)
        assert why(publisher) == ["rank 0 has published batches 0 to 1, to 1 subscriptions"]


def test_an_unread_subscription_counts_from_the_first_batch_that_it_receives(publisher):
    with plain_sub(publisher.endpoint):
        assert publisher._ranks[0].xpub.poll(5000)
        publish_chain(publisher, 2)
        assert why(publisher) == ["rank 0 has published batches 0 to 1, to 1 subscriptions"]


def test_a_replay_request_in_little_endian_is_explained(publisher):
    publish_chain(publisher, 3)
    replayed(publisher.replay_endpoint, int.from_bytes((2).to_bytes(8, "little"), "big"))
    assert why(publisher)[-1] == (
        "rank 0 was asked for batches from 144115188075855872 on, and sent 0: that is 2 in little-endian, and a number "
        "has its high byte first"
    )


@pytest.mark.parametrize("replay", [True, False])
def test_a_timeout_notes_an_injected_loss_without_a_replay_request(replay):
    with KvPublisher("vllm-0.33", replay=replay) as publisher:
        publisher.faults.double()
        publisher.faults.lose(2)
        publish_chain(publisher, 3)
        no_use = "" if replay else ", and it answers none: replay=False"
        assert why(publisher)[-1] == f"no subscriber asked rank 0 for a replay after lose of batch 1{no_use}"
        if replay:
            replayed(publisher.replay_endpoint, 1)
            assert "no subscriber asked" not in str(why(publisher))


def test_a_wait_that_blocks_the_loop_names_its_async_version(publisher):
    async def blocks():
        return why(publisher)[-1]

    async def waits():
        with pytest.raises(WireTimeout) as caught:
            publisher.wait_subscribed(timeout=0)
        return str(caught.value).splitlines()[-1]

    async def goes_on():
        async def probe():
            return False

        with pytest.raises(WireTimeout) as caught:
            await publisher.asettle(probe, timeout=0)
        return str(caught.value)

    line = "{} blocks the asyncio loop that runs here, and all that would answer in it: await {}"
    assert line.format("settle", "asettle") == asyncio.run(blocks())
    assert line.format("wait_subscribed", "await_subscribed") == asyncio.run(waits())
    assert "asyncio" not in asyncio.run(goes_on()) + str(why(publisher))


def test_a_timeout_over_inproc_mentions_the_shared_context():
    with KvPublisher("vllm-0.33", endpoint="inproc") as publisher:
        line = "over inproc a subscriber uses the publisher's `context`"
        assert line == why(publisher)[-1]
        with pytest.raises(WireTimeout, match=f"{line}$"):
            publisher.wait_subscribed(timeout=0)
        with plain_sub(publisher.endpoint, context=publisher.context):
            publisher.wait_subscribed()
            assert line not in why(publisher)


# An answer, the expected one, and the first lines of the timeout about the difference.
LONG = {
    "a list": (
        [0] * 9 + [1],
        [0] * 10,
        ["the answer differs from what is expected in 1 place after 0 s", "  [9]: expected 0, got 1"],
    ),
    "a shorter list": (
        [0] * 9,
        [0] * 10,
        ["the answer differs from what is expected in 1 place after 0 s", "  [9]: expected 0, got nothing"],
    ),
    "a map": (
        {n: n for n in range(1, 11)},
        {n: n % 9 for n in range(10)},
        [
            "the answer differs from what is expected in 3 places after 0 s",
            "  [0]: expected 0, got nothing",
            "  [9]: expected 0, got 9",
            "  [10]: expected nothing, got 10",
        ],
    ),
    "all": (
        [1] * 20,
        [0] * 20,
        [
            "the answer differs from what is expected in 20 places after 0 s",
            *(f"  [{n}]: expected 0, got 1" for n in range(5)),
            "  and 15 more",
        ],
    ),
    "another type": ([0] * 3, (0,) * 3, ["expected (0, 0, 0), got [0, 0, 0] after 0 s"]),
    "a short list": ([0] * 3, [1] * 3, ["expected [1, 1, 1], got [0, 0, 0] after 0 s"]),
}


@pytest.mark.parametrize("case", LONG)
def test_a_timeout_shows_only_the_differences_of_a_long_answer(publisher, case):
    answer, expected, lines = LONG[case]

    def probe():
        return answer

    probe.__qualname__ = "probe"
    with pytest.raises(WireTimeout) as caught:
        publisher.settle(probe, expected, timeout=0)
    assert [f"probe: {lines[0]}", *lines[1:], "rank 0 has published no batch, to 0 subscriptions"] == str(
        caught.value
    ).splitlines()


def test_settle_retries_after_an_assertion_error_and_raises_any_other_error(publisher):
    answers = iter([AssertionError("no"), AssertionError("not yet"), None])

    def probe():
        if (answer := next(answers)) is not None:
            raise answer
        return True

    assert publisher.settle(probe) is True

    def never():
        raise AssertionError("2 blocks")

    with pytest.raises(WireTimeout, match="expected something true, got AssertionError"):
        publisher.settle(never, timeout=0)
    with pytest.raises(ZeroDivisionError):
        publisher.settle(lambda: 1 / 0)


# ------------------------------------------------------------------------------------------------ endpoints

WRONG = {
    "http://x": "'http://x': unknown transport 'http'; known: tcp, ipc, inproc",
    "tpc://127.0.0.1:*": "'tpc://127.0.0.1:*': unknown transport 'tpc'; known: tcp, ipc, inproc",
    "tcp://0.0.0.0:5557": "'tcp://0.0.0.0:5557': a test's publisher stays on the loopback; allowed: "
    "tcp://127.0.0.1:PORT, "
    "or tcp://127.0.0.1:* for a port that the system picks",
    "tcp://127.0.0.1:70000": "'tcp://127.0.0.1:70000': a port is from 1 to 65535, or * for one that the system picks",
    "ipc://here/sock": "'ipc://here/sock': an ipc path is absolute; 'ipc' alone is a path that is made and removed",
    "ipc:///" + "x" * 200: "ipc path of 201 bytes, at most 107; 'ipc' alone is a short path that is made",
    5: "an endpoint is a string such as 'tcp', 'ipc' or 'inproc', got 5",
    "tcp://": "'tcp://' has no address: expected tcp://HOST:PORT",
    "inproc://": "'inproc://' has no address: expected inproc://NAME",
    "tcp://127.0.0.1:\u0663": "'tcp://127.0.0.1:\u0663': a port is from 1 to 65535, or * for one that the system picks",
    "tcp://127.0.0.1:" + "9" * 5000: "'tcp://127.0.0.1:"
    + "9" * 63
    + ": a port is from 1 to 65535, or * for one that the system picks",
    "ipc:///run/\0x": r"'ipc:///run/\x00x': an address is text that UTF-8 can write, without a zero",
    "inproc://\ud800": r"'inproc://\ud800': an address is text that UTF-8 can write, without a zero",
}


@pytest.mark.parametrize("endpoint", WRONG)
def test_an_unusable_endpoint_is_refused(endpoint):
    with pytest.raises(EndpointError) as caught:
        KvPublisher("vllm-0.24", endpoint=endpoint)
    assert WRONG[endpoint] == str(caught.value)


def test_a_refused_replay_endpoint_leaves_no_ipc_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EndpointError, match="unknown transport 'http'"):
        KvPublisher("vllm-0.24", endpoint="ipc", replay="http://x")
    assert [*tmp_path.iterdir()] == []


def test_ipc_is_refused_for_several_ranks_and_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EndpointError, match="an endpoint of rank 1 must be tcp with a port, or inproc; got 'ipc:///"):
        KvPublisher("vllm-0.33", endpoint="ipc", ranks=2)
    assert [*tmp_path.iterdir()] == []


def test_localhost_is_bound_as_the_loopback_address():
    with KvPublisher("vllm-0.24", endpoint="tcp://localhost:*", replay=False) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        assert publisher.replay_endpoint is None
        assert publisher.replays == []


def test_a_port_that_is_taken_is_named(publisher):
    with pytest.raises(EndpointError) as caught:
        KvPublisher("vllm-0.24", endpoint=publisher.endpoint)
    assert str(caught.value) == (
        f"{publisher.endpoint} is taken: something else is bound there; tcp://127.0.0.1:* is a port that the system "
        "picks"
    )
    with pytest.raises(EndpointError, match=f"^{publisher.endpoint} is taken"):
        KvPublisher("vllm-0.24", replay=publisher.endpoint)


def test_a_taken_endpoint_of_a_later_rank_is_named_and_the_first_is_released():
    # Over inproc: another program may take the port after a free one at any time.
    context = zmq.Context()
    with KvPublisher("vllm-0.24", endpoint="inproc://kv_dp1", replay=False, context=context):
        with pytest.raises(EndpointError, match="inproc://kv_dp1 is taken"):
            KvPublisher("vllm-0.24", endpoint="inproc://kv", replay=False, ranks=2, context=context)
        with KvPublisher("vllm-0.24", endpoint="inproc://kv", replay=False, context=context) as publisher:
            assert publisher.endpoint == "inproc://kv"
    with KvPublisher("vllm-0.24", endpoint="inproc://kv", replay=False, ranks=2, context=context) as publisher:
        assert publisher.endpoints == ("inproc://kv", "inproc://kv_dp1")
    context.term()


def test_an_inproc_name_that_is_taken_is_named():
    context = zmq.Context()
    with (
        KvPublisher("vllm-0.24", endpoint="inproc://kv", context=context),
        pytest.raises(EndpointError, match="inproc://kv is taken: something else is bound there; take another name"),
    ):
        KvPublisher("vllm-0.24", endpoint="inproc://kv", context=context)
    context.term()  # it would wait for an open socket


def test_each_rank_has_the_next_port_or_an_inproc_suffix():
    assert [rank_endpoint("tcp://h:5557", rank) for rank in (0, 1)] == ["tcp://h:5557", "tcp://h:5558"]
    assert [rank_endpoint("inproc://kv", rank) for rank in (0, 1)] == ["inproc://kv", "inproc://kv_dp1"]
    assert rank_endpoint("tcp://*:0", 7) == "tcp://*:0"
    with pytest.raises(EndpointError, match="an endpoint of rank 1 must be tcp with a port, or inproc; got 'ipc://kv'"):
        rank_endpoint("ipc://kv", 1)
    assert rank_endpoints(["tcp://h:1", "tcp://g:2"], None) == ("tcp://h:1", "tcp://g:2")
    assert rank_endpoints("tcp://h:1", 2) == ("tcp://h:1", "tcp://h:2")
    with pytest.raises(EndpointError, match="rank 3 would have port 65538; ports end at 65535"):
        rank_endpoint("tcp://127.0.0.1:65535", 3)
    with pytest.raises(EndpointError, match="2 endpoints for 3 ranks"):
        rank_endpoints(["tcp://h:1", "tcp://g:2"], 3)
    with pytest.raises(EndpointError, match=r"'tcp://\*:5557' is where an engine binds; connect to tcp://HOST:PORT"):
        rank_endpoints("tcp://*:5557", 1)


# ------------------------------------------------------------------------------------------------ other refusals


@pytest.mark.parametrize("rank", [2, -1, "one"])
def test_a_fault_of_an_unknown_rank_is_refused(rank):
    with KvPublisher("vllm-0.24", ranks=2, replay=False) as publisher:
        with pytest.raises(ValueError, match=f"^the publisher has ranks 0 to 1, got rank {rank!r}$"):
            publisher.faults.lose(dp_rank=rank)
        assert publisher.faults.unused == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x93\xc0\xc0\xc0", b"\x93\xc0\x91\x01\xc0"])
def test_an_event_fault_refuses_a_payload_without_events_and_remains_pending(publisher, payload):
    publisher.faults.extra_field()
    with pytest.raises(
        ValueError, match=r"^extra_field changes the events of a batch, and the payload of batch 0 is none"
    ):
        publisher.publish_payload(payload)
    assert (
        publisher.batches(),
        publisher.faults.injected,
        publisher.faults.unused,
    ) == (0, [], ["extra_field (1 batch left)"])


def test_truncate_replay_remains_pending_until_a_replay_is_long_enough(publisher):
    publisher.faults.truncate_replay(2)
    publish_chain(publisher, 2)
    assert [int.from_bytes(frames[-2], "big") for frames in replayed(publisher.replay_endpoint, 0)[:-1]] == [0, 1]
    assert publisher.faults.unused == ["truncate_replay (no replay was long enough to cut)"]
    assert publisher.faults.injected == []
    publish_chain(publisher, 1)
    assert len(replayed(publisher.replay_endpoint, 0)) == 3  # two batches and the end marker
    assert [(each.fault, each.batch) for each in publisher.faults.injected] == [("truncate_replay", 2)]


def test_a_replay_without_its_end_marker_is_recorded_as_injected(publisher):
    publisher.faults.truncate_replay(5, end_marker=False)
    publish_chain(publisher, 2)
    assert len(replayed(publisher.replay_endpoint, 0, messages=2)) == 2
    assert [(each.fault, each.batch) for each in publisher.faults.injected] == [("truncate_replay", 2)]
    assert publisher.faults.unused == []


@pytest.mark.parametrize("payload", [5, "text", None])
def test_a_payload_that_is_not_bytes_is_refused(publisher, payload):
    with pytest.raises(TypeError, match=f"^a payload is bytes, or a buffer of them; got {payload!r}$"):
        publisher.publish_payload(payload)
    assert publisher.batches() == 0


def test_an_unknown_dialect_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"unknown dialect 'vllm-0\.34'; did you mean 'vllm-0\.33'"):
        KvPublisher("vllm-0.34")


def test_a_dialect_without_zmq_is_refused():
    with pytest.raises(
        ValueError, match=r"dialect 'dynamo-router-event' is not spoken over ZMQ; these are: vllm-0\.9, "
    ):
        KvPublisher("dynamo-router-event")


@pytest.mark.parametrize("name", ["ranks", "buffer_steps", "hwm"])
def test_publisher_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got 0$"):
        KvPublisher("vllm-0.24", **{name: 0})


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"context": 5}, TypeError, "context must be a zmq.Context, or None for one of its own, got 5"),
        ({"replay": 5}, TypeError, "replay must be True, False or an endpoint, got 5"),
        ({"replay": ""}, EndpointError, "'': unknown transport ''; known: tcp, ipc, inproc"),
        ({"topic": "\ud800"}, ValueError, r"topic must be text that UTF-8 can write, got '\ud800'"),
        ({"hwm": 2**31}, ValueError, "hwm must be an integer from 1 to 1073741824, got 2147483648"),
        ({"buffer_steps": 10**30}, ValueError, f"buffer_steps must be an integer from 1 to 1073741824, got {10**30}"),
        ({"ranks": 5000}, EndpointError, "5000 ranks: ports in a row are searched for at most 1024"),
        ({"topic": b"kv"}, ValueError, "topic must be a string, got b'kv'"),
    ],
)
def test_publisher_options_of_the_wrong_type_are_refused(option, error, message):
    with pytest.raises(error) as caught:
        KvPublisher("vllm-0.33", **option)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "make", [KvPublisher, lambda **options: KvSubscriber("tcp://127.0.0.1:1", print, dialect="vllm-0.33", **options)]
)
def test_a_context_that_is_closed_or_of_asyncio_is_refused(make):
    context = zmq.Context()
    context.term()
    with pytest.raises(ValueError, match=r"^context is closed; it must be open, or None for one of its own$"):
        make(context=context)
    with zmq.asyncio.Context() as awaited:
        with pytest.raises(
            TypeError, match=r"^context must be a zmq\.Context, and not one of zmq\.asyncio; zmq\.Context\("
        ):
            make(context=awaited)
        with make(context=zmq.Context(awaited)):
            pass


def test_settle_refuses_async_probes_and_asettle_refuses_sync_ones(publisher):
    async def probe():
        return True

    with pytest.raises(
        TypeError, match=r"^settle takes a probe that answers at once, and got a coroutine; asettle awaits it$"
    ):
        publisher.settle(probe)
    with pytest.raises(TypeError, match=r"^asettle takes an async probe, and this one returned True; call settle$"):
        asyncio.run(publisher.asettle(lambda: True))
    with pytest.raises(
        TypeError, match=r"^probe is called until it answers as expected; got 5, which cannot be called$"
    ):
        publisher.settle(5)


def test_end_marker_must_be_a_boolean(publisher):
    with pytest.raises(ValueError, match=r"^end_marker must be True or False, got 5$"):
        publisher.faults.truncate_replay(end_marker=5)
    assert publisher.faults.unused == []


def test_a_closed_publisher_refuses_with_and_step(publisher):
    publisher.close()
    for context in (publisher, publisher.step()):
        with pytest.raises(ValueError) as refused, context:
            pass
        assert str(refused.value) == f"this KvPublisher is closed; another one may be bound at {publisher.endpoint}"


def test_a_closed_publisher_refuses_every_call_except_close(publisher):
    publisher.close()
    publisher.close()
    for call in (
        lambda: publish_chain(publisher, 1),
        publisher.flush,
        publisher.restart,
        publisher.wait_subscribed,
        lambda: publisher.settle(lambda: False),
        lambda: asyncio.run(publisher.asettle(answers(False))),
    ):
        with pytest.raises(ValueError, match=re.escape("this KvPublisher is closed")):
            call()


def test_closing_a_publisher_while_a_task_waits_ends_the_wait(publisher):
    async def closed_meanwhile():
        waiting = asyncio.create_task(publisher.await_subscribed())
        await tasks_wait()
        publisher.close()
        await waiting

    with pytest.raises(ValueError, match="this KvPublisher is closed"):
        asyncio.run(closed_meanwhile())


def test_without_pyzmq_a_one_line_error_says_how_to_install_it():
    code = (
        "import sys; sys.modules['zmq'] = None\nfrom pytest_kvmock.wire.sockets import KvPublisher\ntry: "
        "KvPublisher('vllm-0.24')\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = "sockets of KV events need pyzmq: pip install '/path/to/pytest-kvmock[zmq]', with the path of your checkout"
    assert line + "\n" == done.stdout
