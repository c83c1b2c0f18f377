"""Recorded streams of real engines as payloads: a check finds no problem, and finds one lost event."""

import pytest

from pytest_kvmock import Cleared, Removed, Stored, block_hashes
from pytest_kvmock.servers import check_file
from pytest_kvmock.wire import KvWire

STREAMS = {
    "vllm_0.33.0_random.json.gz": "vllm-0.33",
    "vllm_0.19.1_random.json.gz": "vllm-0.19",
    "sglang_0.5.23_random.json.gz": "sglang-0.5.23",
}


def tokens_of(block):
    """Return tokens for a block: recordings have only names, and equal names get equal tokens."""
    return [block >> shift & 0xFFFF for shift in (0, 16, 32, 48)]


def payloads(program, dialect, change=lambda events: events):
    """Return the engine's batches, one per operation; the tokens are made up."""
    wire = KvWire(dialect)
    events = [event for step in program["steps"] for event in [*step["events"], None]]
    with_steps = change(events)
    pending = []
    for event in with_steps:
        if event is not None:
            pending.append(event)
            continue
        with wire.step():
            for kind, *rest in pending:
                if kind == "S":
                    parent, blocks = rest[0], rest[1]
                    tokens = [tokens_of(block) for block in blocks]
                    locals_ = block_hashes([token for each in tokens for token in each], 4)
                    wire.publish(Stored(parent, tuple(blocks), tuple(locals_)), token_ids=tokens)
                else:
                    wire.publish(Cleared() if kind == "C" else Removed(rest[0]))
        pending = []
    return b"".join(wire.payloads)


@pytest.mark.parametrize("name", STREAMS)
def test_the_stream_of_a_real_engine_is_clean(recording, tmp_path, name):
    events = 0
    for number, program in enumerate(recording(name)):
        path = tmp_path / f"{number}.msgpack"
        path.write_bytes(payloads(program, STREAMS[name]))
        checked = check_file(path, dialect=STREAMS[name])
        events += checked.log.total
        assert [] == checked.errors == checked.unreadable, program["seed"]
    assert events >= 300


@pytest.mark.parametrize("name", STREAMS)
def test_one_lost_event_is_found(recording, tmp_path, name):
    """The lost event is the first Stored of a stream on which a later child or Removed depends."""

    def lose_first(events):
        first = next(event for event in events if event and event[0] == "S")
        again = {block for event in events if event and event[0] == "R" for block in event[1]}
        assert again & {*first[2]}
        return [event for event in events if event is not first]

    for program in recording(name):
        try:
            data = payloads(program, STREAMS[name], lose_first)
        except AssertionError:
            continue  # no Removed names its blocks
        path = tmp_path / "a.msgpack"
        path.write_bytes(data)
        rules = {problem.rule for problem in check_file(path, dialect=STREAMS[name]).errors}
        assert rules
        assert rules <= {"parent_block_not_found", "block_not_found"}
        return
    pytest.fail("no stream removes what it stored first")
