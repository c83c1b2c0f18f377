"""The load stream of served engines of SGLang: its ports, its messages, and its faults."""

import re

import pytest
from depth import each_parameter
from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.values.load_stat import LoadStat
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets import LoadSubscriber
from pytest_kvmock.wire.sockets.load_sockets import LoadSender

DIALECT = "sglang-0.5.22"
MESSAGES = [(0, 10), (1, 20), (0, 11), (1, 21)]
STAT = LoadStat(1, 0, 48, 1600, 0, 0, 48, 100, 32, 900)


def serving(ranks=1, dialect=DIALECT):
    profile = EngineProfile(block_size=16, num_blocks=64, workers=1, dp_size=ranks)
    return RouterHarness(profile, speaker_of(find_dialect(dialect)))


def until(subscriber, holds):
    """Read until a condition holds for the readings."""
    for _ in range(500):
        if holds(found := subscriber.read(0.01)):
            return found
    raise AssertionError(found)


def test_each_rank_publishes_its_load_at_the_port_in_server_info():
    with serving(ranks=2) as harness, KvServer(harness, DIALECT, ports={"loads": 0}) as server:
        events = call(server.url(0), "/server_info")[1]["kv_events"]
        (worker,) = server.inside.ready_line()["workers"]
        with LoadSubscriber(worker["loads"]) as loads:
            idle = until(loads, lambda found: len(found) == 2)
            complete(server.url(0), server.text(3))
            served = until(loads, lambda found: any(each.stat.prefill_tokens for each in found.values()))
    assert worker["loads"] == [f"tcp://127.0.0.1:{events['load_endpoint_port_base'] + rank}" for rank in (0, 1)]
    assert events["load_topic"] == "load"
    assert [(rank, each.stat.running, each.stat.rank) for rank, each in idle.items()] == [(0, 0, 0), (1, 0, 1)]
    assert sorted(each.stat.prefill_tokens for each in served.values()) == [0, 48]


def test_a_stopped_worker_publishes_no_load_and_a_restarted_one_starts_at_number_0():
    with serving() as harness, KvServer(harness, DIALECT, ports={"loads": 0}) as server:
        (worker,) = server.inside.ready_line()["workers"]
        with LoadSubscriber(worker["loads"]) as loads:
            until(loads, lambda found: 0 in found)
            complete(server.url(0), server.text(3))
            until(loads, lambda found: found[0].number > 0)
            server.stop(0)
            loads.read()
            number = loads.read()[0].number
            server.restart(0)
            assert loads.read()[0].number == number
            server.start(0)
            restarted = until(loads, lambda found: found[0].number < number)
    assert restarted[0].stat.prefill_us > 0


def test_without_a_load_stream_server_info_names_no_port():
    with serving() as harness, KvServer(harness, DIALECT) as server:
        assert "load_endpoint_port_base" not in call(server.url(0), "/server_info")[1]["kv_events"]


@pytest.mark.parametrize(
    ("dialect", "ports", "text"),
    [
        ("vllm-0.33", {"loads": 0}, r"ports\['loads'\] is for the load stream of SGLang; dialect 'vllm-0.33' has none"),
        (DIALECT, {"loads": 65535}, r"ports\['loads'\] must leave room for 2 ports, at most 65534, got 65535"),
        (
            DIALECT,
            {"events": 25557, "loads": 25558},
            r"ports\['loads'\], 25558 to 25559, overlap ports\['events'\], 25557 to 25558",
        ),
    ],
)
def test_impossible_load_ports_are_refused(dialect, ports, text):
    with serving(2, dialect) as harness, pytest.raises(ValueError, match=text):
        KvServer(harness, dialect, ports=ports)


# ------------------------------------------------------------------------------------- faults, by the control API


@pytest.fixture
def asked():
    """Yield a served engine of two ranks and its control API."""
    with serving(2) as harness, KvServer(harness, DIALECT, ports={"loads": 0, "control": 0}) as server:

        def ask(**given):
            return call(server.control_url, "/load_fault", {"worker": 0, **given})

        yield server, ask


@pytest.fixture
def heard(asked):
    """Yield a reader of its loads that has received both ranks."""
    with LoadSubscriber(asked[0].inside.ready_line()["workers"][0]["loads"]) as loads:
        until(loads, lambda found: len(found) == 2)
        yield loads


def test_a_frozen_load_is_repeated_under_new_numbers(asked, heard):
    server, ask = asked
    assert ask(name="freeze", rank=0, messages=100) == (200, {"done": True})
    complete(server.url(0), server.text(3), data_parallel_rank=0)
    before = heard.read()[0].number
    said = until(heard, lambda found: found[0].number > before)
    assert said[0].stat.prefill_tokens == 0
    assert {(name, rank) for name, rank, _ in server.publisher(0).loads.faults.injected} == {("freeze", 0)}
    (left,) = server.inside.faults_left
    assert re.fullmatch(r"worker 0: freeze of loads \(\d+ left\)", left)


def test_load_messages_can_be_lost_and_numbers_can_jump(asked, heard):
    server, ask = asked
    before = heard.read()[0].number
    assert ask(name="jump", rank=0, numbers=5)[0] == ask(name="lose", rank=0)[0] == 200
    complete(server.url(0), server.text(3), data_parallel_rank=0)
    until(heard, lambda found: found[0].number > before + 6 and found[0].stat.prefill_tokens == 48)
    assert server.inside.faults_left == []
    assert [name for name, *_ in server.publisher(0).loads.faults.injected] == ["lose"]


@pytest.mark.parametrize("path", ["/metrics", "/get_load", "/v1/loads"])
@each_parameter
def test_load_polls_can_fail_for_a_while(asked, path):
    server, ask = asked
    assert ask(name="fail_polls", times=2) == (200, {"done": True})
    assert call(server.url(0), "/health")[0] == 200
    assert [call(server.url(0), path)[0] for _ in range(3)] == [503, 503, 200]
    ask(name="fail_polls", times=None)
    assert [call(server.url(0), path)[0] for _ in range(3)] == [503, 503, 503]
    server.start(0)
    assert call(server.url(0), path)[0] == 200
    ask(name="fail_polls")
    assert call(server.control_url, "/verdict")[1]["faults_left"] == ["worker 0: fail_polls (1 left)"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "loose"}, "unknown fault of loads 'loose'; known: lose, late, cut, extend, freeze, jump, fail_polls"),
        ({"name": "lose", "rank": 2}, "dp_rank must be below 2, the ranks of these loads; got 2"),
        ({"name": "lose", "messages": 0}, "messages must be an integer of at least 1, got 0"),
        ({"name": "lose", "batches": 1}, "lose: unknown option 'batches'"),
        ({"name": "fail_polls", "times": 0}, "fail_polls: times must be an integer of at least 1, got 0"),
        ({"name": "lose", "worker": 7}, "there is no worker 7"),
        ({}, "argument 'name' is missing"),
    ],
)
@each_parameter
def test_an_impossible_load_fault_is_refused_in_one_line(asked, given, text):
    server, ask = asked
    status, answer = ask(**given)
    assert (status, text in answer["error"], "\n" in answer["error"]) == (400, True, False)
    assert server.inside.faults_left == []


def test_a_worker_without_a_load_stream_refuses_stream_faults():
    with serving(dialect="vllm-0.33") as harness, KvServer(harness) as server:
        with pytest.raises(ValueError, match="fault 'lose' is for a load stream, and worker 0 has none: see ports"):
            server.load_fault(0, "lose")
        server.load_fault(0, "fail_polls")
        assert [call(server.url(0), "/load")[0] for _ in range(2)] == [503, 200]


# ------------------------------------------------------------------------------------------------------- the stream


@pytest.fixture
def stream():
    now = [0.0]
    sender = LoadSender("tcp://127.0.0.1:*", interval=1, clock=lambda: now[0])
    with LoadSubscriber(sender.endpoints, clock=lambda: now[0]) as subscriber:

        def say(stat=STAT):
            now[0] += 1.0
            sender.call(0, lambda: stat)

        for _ in range(500):  # until the subscription is active
            say()
            if subscriber.read(0.01):
                break
        yield sender, subscriber, say
    sender.close()


def test_a_lost_message_is_a_gap_and_the_next_one_replaces_it(stream):
    sender, subscriber, say = stream
    before = subscriber.read()[0].number
    sender.faults.lose(2)
    for _ in range(3):
        say()
    until(subscriber, lambda found: found[0].number == before + 3)
    assert [name for name, *_ in sender.faults.injected] == ["lose", "lose"]


def test_a_late_message_does_not_replace_a_newer_reading(stream):
    sender, subscriber, say = stream
    before = subscriber.read()[0].number
    sender.faults.late()
    say(LoadStat(9, 0, 0, 1600))
    say(LoadStat(2, 0, 0, 1600))
    say(LoadStat(3, 0, 0, 1600))
    assert until(subscriber, lambda found: found[0].number == before + 3)[0].stat.running == 3
    assert [name for name, *_ in sender.faults.injected] == ["late", "late"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("cut", LoadStat(7, 0, 48, 1600)),
        ("extend", LoadStat(7, 0, 48, 1600, 0, 5, 48, 100, 32, 900)),
    ],
)
def test_a_message_of_another_length_is_read_by_position(stream, fault, expected):
    sender, subscriber, say = stream
    getattr(sender.faults, fault)()
    say(LoadStat(7, 0, 48, 1600, 0, 5, 48, 100, 32, 900))
    assert until(subscriber, lambda found: found[0].stat.running == 7)[0].stat == expected


def test_a_message_that_is_too_short_is_reported_and_changes_nothing(stream):
    sender, subscriber, say = stream
    sender.faults.cut(entries=3)
    say(LoadStat(7, 0, 0, 1600))
    say(LoadStat(8, 0, 0, 1600))
    until(subscriber, lambda found: found[0].stat.running == 8)
    assert subscriber.unread == ["rank 0: a LoadStat is an array of at least 6 entries, got ['LoadStat', 7, 0]"]


def test_a_jump_skips_numbers_like_failed_sends(stream):
    sender, subscriber, say = stream
    before = subscriber.read()[0].number
    sender.faults.jump(10)
    say()
    until(subscriber, lambda found: found[0].number == before + 11)


def test_late_messages_are_held_back_per_rank():
    sender = LoadSender("tcp://127.0.0.1:*", 2, interval=1, clock=lambda: 0.0)
    sender.faults.late()
    sent = [sender.faults.strike(rank, [b"load", bytes(7) + bytes([number]), b""]) for rank, number in MESSAGES]
    sender.close()
    assert [[message[1][7] for message in messages] for messages in sent] == [[], [20], [11, 10], [21]]
    assert [(name, rank) for name, rank, _ in sender.faults.injected] == [("late", 0), ("late", 0)]


def test_a_load_fault_refuses_an_unknown_rank(stream):
    sender, _, _ = stream
    with pytest.raises(ValueError, match="dp_rank must be below 1, the ranks of these loads; got 3"):
        sender.faults.lose(dp_rank=3)
