"""SGLang's load stream: how readers decode its messages, and which ports a server refuses."""

import msgspec
import pytest

from pytest_kvmock.values.load_stat import LoadPublisher, LoadStat
from pytest_kvmock.values.prompt_keys import LoraIds
from pytest_kvmock.wire.codec.load_stream import load_frames, load_ports

STAT = LoadStat(3, 2, 100, 1000, 1, 40, 150, 8, 500, 700)


def test_a_load_message_is_decoded_as_it_was_encoded():
    topic, number, payload = load_frames(7, STAT)
    assert (topic, int.from_bytes(number, "big")) == (b"load", 7)
    message = msgspec.msgpack.decode(payload)
    assert len(message) == 11
    assert LoadStat.of(message) == STAT


def test_older_and_newer_messages_are_read_by_position():
    assert LoadStat.of(STAT.entries[:6]) == LoadStat(3, 2, 100, 1000, 1)
    assert LoadStat.of([*STAT.entries, 99]) == STAT


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (["LoadStat", 1, 2], "an array of at least 6 entries"),
        (["Load", 1, 2, 3, 4, 5], "begins with its tag, got 'Load'"),
        (["LoadStat", 1, 2.5, 3, 4, 5], "integers alone, got 2.5"),
    ],
)
def test_a_value_that_is_not_a_load_is_refused(message, text):
    with pytest.raises(ValueError, match=text):
        LoadStat.of(message)


def test_an_idle_rank_sends_a_reading_once_a_second():
    publisher, sent = LoadPublisher(), []
    for tenth in range(35):
        assert publisher.is_due(force=True)
        number = publisher.next_number(STAT, tenth / 10)
        if number is not None:
            publisher.sent(STAT, tenth / 10)
            sent.append((number, tenth))
    assert sent == [(0, 0), (1, 10), (2, 20), (3, 30)]


@pytest.mark.parametrize(
    ("option", "kv", "text"),
    [
        ("auto", None, "needs KV events with a publisher"),
        ("auto", "ipc://kv", "needs KV events at a tcp endpoint"),
        ("tcp://10.0.0.1:6000", "tcp://*:5557", "its host must be a wildcard"),
        ("tcp://*:65535", "tcp://*:5557", "the port of the last of 2 ranks would be 65536"),
        ("tcp://*:5558", "tcp://*:5557", "ports 5558 to 5559 overlap those of KV events, 5557 to 5558"),
    ],
)
def test_ports_with_which_the_server_would_not_start_are_refused(option, kv, text):
    with pytest.raises(ValueError, match=text):
        load_ports(option, kv_endpoint=kv, replay_endpoint=None, ranks=2)


def test_a_reloaded_adapter_gets_a_new_number():
    ids = LoraIds()
    assert (ids.load("a"), ids.load("b")) == (1, 2)
    ids.unload("a")
    assert (ids.load("a"), ids.of("b")) == (3, 2)
