"""Many rounds of sockets on a busy machine: publishers, subscribers, a gap, a replay, and everything closed. No round
may fail.

A counter-test shows that this is not luck: a plain PUB that does not wait loses batches in the same place.
"""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq
from depth import DEEP, worth_its_time
from sockets import BIG, plain_sub, publish_chain

from pytest_kvmock.wire.sockets import KvPublisher, KvSubscriber

ROUNDS, SOAK_ROUNDS = 200 if DEEP else 40, 5_000
BUSY = 3


@contextlib.contextmanager
def busy_machine():
    """Run three busy loops in other processes during the test."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def open_now():
    """Return the descriptors and threads of this process."""
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()


def round_of_sockets():
    """Three publishers and three subscribers: a gap in each stream, a replay that fills it, an end."""
    blocks = [[], [], []]
    with contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(KvPublisher("vllm-0.33", hwm=100)) for _ in blocks]
        subscribers = [
            stack.enter_context(
                KvSubscriber(publisher.endpoint, each.append, dialect="vllm-0.33", replay=publisher.replay_endpoint)
            )
            for publisher, each in zip(publishers, blocks, strict=True)
        ]
        for publisher in publishers:
            publisher.wait_subscribed(timeout=60)
            publish_chain(publisher, 1)
            publisher.faults.lose(2)
            publish_chain(publisher, 4, BIG + 1)
        for subscriber in subscribers:
            subscriber.receive(5, timeout=60)
    return [[event.event.data.block_hashes[0] - BIG for event in each] for each in blocks], [
        len(each.lost) for each in subscribers
    ]


@worth_its_time
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count descriptors")
def test_socket_rounds_on_a_busy_machine_succeed_and_leave_nothing_open(pytestconfig):
    rounds = SOAK_ROUNDS if pytestconfig.getoption("--soak") else ROUNDS
    round_of_sockets()
    before = open_now()
    with busy_machine():
        for _ in range(rounds):
            assert round_of_sockets() == ([[0, 1, 2, 3, 4]] * 3, [0, 0, 0])
    assert before == open_now()


def test_a_plain_pub_socket_that_does_not_wait_loses_the_first_message():
    lost = 0
    for _ in range(20):
        context = zmq.Context()
        pub = context.socket(zmq.PUB)
        pub.linger = 0
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        with plain_sub(f"tcp://127.0.0.1:{port}", context=context) as sub:
            pub.send_multipart([b"", (0).to_bytes(8, "big"), b"payload"])
            lost += not sub.poll(20)
        pub.close()
        context.term()
    assert lost > 0


def test_a_publisher_that_waits_for_its_subscriber_loses_no_message():
    for _ in range(20):
        with KvPublisher("vllm-0.33") as publisher, plain_sub(publisher.endpoint) as sub:
            publisher.wait_subscribed(timeout=60)
            publisher.publish_payload(b"payload")
            assert sub.recv_multipart()[2] == b"payload"


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count descriptors")
def test_close_leaves_no_descriptor_thread_socket_or_file(transport):
    KvPublisher("vllm-0.33").close()
    before = open_now()
    publisher = KvPublisher("vllm-0.33", endpoint=transport, ranks=1 if transport == "ipc" else 2)  # as engines have
    subscriber = KvSubscriber(
        publisher.endpoints,
        print,
        dialect="vllm-0.33",
        replay=publisher.replay_endpoints,
        context=publisher.context if transport == "inproc" else None,
    )
    publisher.wait_subscribed()
    assert before < open_now()
    subscriber.catch_up()
    if transport != "inproc":  # over inproc the publisher's context is closed with all its users
        subscriber.close()
    publisher.close()
    subscriber.close()
    assert before == open_now()
    assert publisher.context.closed
    if transport == "ipc":
        assert not Path(publisher.endpoint.removeprefix("ipc://")).parent.exists()


def test_a_port_is_free_again_when_close_returns():
    with KvPublisher("vllm-0.33", ranks=2) as publisher:
        endpoint, replay = publisher.endpoint, publisher.replay_endpoint
    for _ in range(5):
        KvPublisher("vllm-0.33", endpoint=endpoint, replay=replay, ranks=2).close()


def test_a_context_given_by_the_user_stays_open():
    context = zmq.Context()
    KvPublisher("vllm-0.33", context=context).close()
    assert not context.closed
    context.term()  # it would wait for an open socket
