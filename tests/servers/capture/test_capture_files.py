"""Files that a check reads: captures, Dynamo's JSON lines, payloads; unreadable ones are refused in one line."""

import json
import os
from pathlib import Path

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.servers import CaptureError, CaptureFile, CapturingJournal, check_file
from pytest_kvmock.servers.capture.lines import bare_line, event_of
from pytest_kvmock.values import Located, SparseStored
from pytest_kvmock.wire import DIALECTS, KvWire

ROOT = Stored(None, (2**63 + 5, 2**40), (11, 12))
EVENTS = [ROOT, Stored(2**40, (2**41,), (13,)), Removed((2**41,)), Cleared()]
GOOD = [RouterEvent(0, KvCacheEvent(i, data)) for i, data in enumerate(EVENTS)]
BAD = [*GOOD, RouterEvent(0, KvCacheEvent(4, Removed((2**42,))))]
HEADER = '{"kvmock_capture":1}\n'
EVENT = json.dumps({"event": GOOD[0].to_dict()}) + "\n"


@pytest.fixture
def file(tmp_path):
    def write(content, name="a.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def json_lines(events, form):
    forms = {
        "RouterEvent": lambda event: event.to_dict(),
        "KvCacheEvent": lambda event: event.event.to_dict(),
        "with its time": lambda event: {"timestamp": 12.5, "event": event.to_dict()},
    }
    return "".join(json.dumps(forms[form](event)) + "\n" for event in events)


@pytest.mark.parametrize("form", ["RouterEvent", "KvCacheEvent", "with its time"])
def test_dynamos_json_lines_are_checked(file, form):
    assert check_file(file(json_lines(GOOD, form))).problems == []
    assert [problem.rule for problem in check_file(file(json_lines(BAD, form))).problems] == ["block_not_found"]


@pytest.mark.parametrize(
    "data",
    [SparseStored(-7, (-1, 2**63), 24, 4), SparseStored(None, (), 4, 4), Located((-3, 5)), Located((2**63,))],
    ids=repr,
)
def test_a_line_contains_the_span_the_location_and_the_group_of_an_event(data):
    group = {"group_idx": 2, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    event = RouterEvent(1, KvCacheEvent(4, data, 2), StorageTier.HOST_PINNED, [[1, 2, 3, 4]], group)

    read = event_of(json.loads(json.dumps(bare_line(event))))

    assert (event, group, [[1, 2, 3, 4]]) == (read, read.extra, read.token_ids)


SPOKEN = [name for name, dialect in DIALECTS.items() if dialect.hashes != "bytes" and dialect.is_msgpack]


@pytest.mark.parametrize("dialect", SPOKEN)
def test_payloads_are_checked(file, dialect):
    wire = KvWire(dialect, ranks=2)
    low = 2**62
    for rank in (0, 1):
        wire.publish(
            RouterEvent(0, KvCacheEvent(0, Stored(None, (low, low + 1), (11, 12)), rank), token_ids=[[1], [2]])
        )
        with wire.step():
            wire.publish(RouterEvent(0, KvCacheEvent(1, Removed((low + 1, low)), rank)))
            wire.publish(RouterEvent(0, KvCacheEvent(2, Cleared(), rank)))
    path = file(b"".join(wire.payloads), "a.msgpack")

    checked = check_file(path, dialect=dialect)
    assert checked.log.total == 6
    assert checked.is_clean

    wire.publish(RouterEvent(0, KvCacheEvent(3, Removed((low + 9,)), 0)))
    checked = check_file(file(b"".join(wire.payloads), "b.msgpack"), dialect=dialect)
    assert [problem.rule for problem in checked.problems] == ["block_not_found"]


def test_an_unreadable_event_is_named_and_leaves_a_gap(file):
    wire = KvWire("vllm-0.33")
    wire.publish(Cleared())
    payload = wire.take()[0]
    odd = payload.replace(b"AllBlocksCleared", b"AllBlocksCleaned")

    checked = check_file(file(payload + odd + payload, "a.msgpack"), dialect="vllm-0.33")

    assert not checked.is_clean
    assert len(checked.unreadable) == 1
    assert checked.unreadable[0].startswith("batch 1: unknown_tag")
    assert [problem.rule for problem in checked.problems] == ["event_id_gap"]


def test_cache_groups_are_checked_in_payloads(file):
    wire, group = KvWire("vllm-0.33"), {"group_idx": 1}
    wire.publish(Stored(None, (2**50,), (11,)), token_ids=[[1, 2]])
    wire.publish(Stored(None, (2**50,), (11,)), token_ids=[[1, 2]], extra=group)
    wire.publish(Removed((2**50,)), extra=group)
    assert check_file(file(b"".join(wire.payloads)), dialect="vllm-0.33").is_clean

    wire.publish(Removed((2**50,)), extra=group)
    (problem,) = check_file(file(b"".join(wire.payloads)), dialect="vllm-0.33").problems
    assert "cache group 1" in problem.observed


def test_residency_can_be_given_for_a_file_without_it(file):
    both = Removed(ROOT.block_hashes[::-1])
    stream = [ROOT, ROOT, Stored(None, (2**45,), (15,)), both, both]
    twice = [RouterEvent(0, KvCacheEvent(i, data)) for i, data in enumerate(stream)]
    path = file(json_lines(twice, "RouterEvent"))

    assert "block_not_found" in {problem.rule for problem in check_file(path).errors}
    assert check_file(path, residency="counted").problems == []


def test_an_allowed_rule_is_not_a_problem(file):
    assert check_file(file(json_lines(BAD, "RouterEvent")), allow=["block_not_found"]).is_clean


def test_a_capture_without_its_last_line_is_reported_as_cut(file):
    assert "no last line" in check_file(file(HEADER + EVENT)).text()
    assert "no last line" not in check_file(file(HEADER + EVENT + '{"end":{"events":1}}\n')).text()


LOST = """{"stream":{"worker_id":0,"dp_rank":0,"first_id":0}}
{"lost":{"worker_id":0,"dp_rank":0,"start":1,"stop":2,"observed":"","sent_by":null}}
"""

REFUSED = {
    "empty": ("", "the file is empty; a capture has a header"),
    "no JSON": ("hello\n", "line 1: not JSON: Expecting value"),
    "no text": (b"\x93\xcb\xff\n", "line 1: not JSON"),
    "no object": ("[1]\n", "line 1: expected an object, got [1]"),
    "no header": ('{"a":1}\n', "line 1: expected the header of a capture (kvmock_capture), or an event"),
    "newer version": ('{"kvmock_capture":2}\n', "line 1: version 2 of the format of captures; this program reads 1"),
    "no version": ('{"kvmock_capture":true}\n', "line 1: version True of the format"),
    "cut line": (HEADER + EVENT + EVENT[:40], "line 3: cut off: 40 bytes of a line without its end"),
    "cut header": (HEADER[:10], "line 1: cut off: 10 bytes"),
    "unknown kind": (HEADER + '{"evnt":{}}\n', "line 2: unknown kind of line 'evnt'; did you mean 'event'?"),
    "no kind": (HEADER + "{}\n", "line 2: unknown kind of line None"),
    "no event": (HEADER + '{"event":{}}\n', "line 2: RouterEvent: missing field"),
    "wrong hash": (
        HEADER + EVENT.replace(": 11", ': "x"'),
        "line 2: RouterEvent.event.data.stored.blocks[0].tokens_hash",
    ),
    "wrong tokens": (
        HEADER + EVENT.replace("}\n", ',"token_ids":[1]}\n'),
        "line 2: token_ids: expected an array of arrays",
    ),
    "wrong extra": (HEADER + EVENT.replace("}\n", ',"extra":[1]}\n'), "line 2: extra: expected an object, got [1]"),
    "wrong hex": (HEADER + EVENT.replace("}\n", ',"extra":{"a":{"hex":"x"}}}\n'), "line 2: non-hexadecimal number"),
    "other hashes": (
        HEADER + EVENT.replace("}\n", ',"as_published":[null,[1,2]]}\n'),
        "line 2: as_published: expected",
    ),
    "no stream": (HEADER + '{"stream":{}}\n', "line 2: 'worker_id' is missing"),
    "wrong stream": (HEADER + '{"stream":7}\n', "line 2: stream: expected an object, got 7"),
    "unknown residency": (
        HEADER + '{"stream":{"worker_id":0,"dp_rank":0,"first_id":0,"residency":"any"}}\n',
        "line 2: unknown residency 'any'",
    ),
    **{
        f"a stream with {name} {value}": (
            HEADER + '{"stream":{"worker_id":0,"dp_rank":0,"first_id":0}}\n'.replace("}}", f',"{name}":{value}}}}}', 1),
            f"line 2: {message}",
        )
        for name, value, message in (
            ("num_blocks", "NaN", "num_blocks must be an integer of at least 1, or null, got nan"),
            ("num_blocks", "0", "num_blocks must be an integer of at least 1, or null, got 0"),
            ("block_size", "true", "block_size must be an integer of at least 1, or null, got True"),
            ("first_id", '"a"', "first_id must be an integer of at least 0, or null, got 'a'"),
            ("prefix_closed", '"no"', "prefix_closed must be true or false, got 'no'"),
            ("tier_blocks", "[1]", "tier_blocks must map tiers to blocks, or be null, got [1]"),
            ("tier_blocks", '{"disk":1.5}', "tier_blocks of 'disk' must be an integer of at least 0, got 1.5"),
            ("worker_id", "true", "worker_id must be an integer of at least 0, got True"),
            ("dp_rank", "-1", "dp_rank must be an integer of at least 0, got -1"),
        )
    },
    "a loss of too many": (HEADER + LOST.replace('"stop":2', f'"stop":{2**70}'), "line 3: "),
    **{
        f"a loss sent by {value}": (
            HEADER + LOST.replace("null}}", value + "}}"),
            f"line 3: {message}",
        )
        for value, message in (
            ("{}", "'publisher' is missing"),
            ('{"publisher":-1}', "publisher must be an integer of at least 0, got -1"),
            ('{"publisher":0,"dp_rank":0,"restarts":[0]}', "not enough values"),
            ('{"publisher":0,"dp_rank":0,"restarts":[0,"a"]}', "restarts must be an integer of at least 0, got 'a'"),
            ('{"publisher":0,"dp_rank":0,"restarts":[0,0],"consumer":[]}', "consumer must be an integer of at least 0"),
        )
    },
    "an event before the first": (
        HEADER + '{"hashes_of":-1}\n',
        "line 2: hashes_of must be an integer of at least 0, got -1",
    ),
    "no such event": (HEADER + '{"hashes_of":3}\n', "line 2: list index out of range"),
    "an event of none": (
        json_lines(GOOD[:1], "RouterEvent") + '{"worker_id":0}\n',
        "line 2: RouterEvent: missing field",
    ),
    "nested": (HEADER + "[" * 100_000 + "\n", "line 2: not JSON"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unreadable_file_is_refused_in_one_line(file, content, message):
    path = file(content)

    with pytest.raises(CaptureError) as error:
        check_file(path)

    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_payloads_that_end_in_the_middle_are_refused(file):
    wire = KvWire("vllm-0.33")
    wire.publish(Cleared())
    wire.publish(Cleared())
    (first, second), path = wire.take(), file(b"")

    with pytest.raises(CaptureError, match=r"the file is empty; payloads of vllm-0\.33 are expected"):
        check_file(path, dialect="vllm-0.33")
    with pytest.raises(CaptureError, match=f"the payload from byte {len(first)} on cannot be read"):
        check_file(file(first + second[:-3]), dialect="vllm-0.33")


def test_a_directory_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(CaptureError, match="cannot be read: Is a directory"):
        check_file(tmp_path)
    with pytest.raises(CaptureError, match="cannot be read: No such file or directory"):
        check_file(tmp_path / "a.jsonl")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(file):
    path = file(HEADER)
    path.chmod(0)
    with pytest.raises(CaptureError, match="cannot be read: Permission denied"):
        check_file(path)


def test_unknown_dialects_rules_and_residencies_are_refused(file):
    path = file(HEADER)
    for given, message in (
        ({"dialect": "vllm-0.34"}, "unknown dialect 'vllm-0.34'; did you mean 'vllm-0.33'"),
        ({"allow": ["wrong_hsah"]}, "unknown rule 'wrong_hsah'; did you mean 'wrong_hash'"),
        ({"residency": "any"}, "unknown residency 'any'"),
    ):
        with pytest.raises(ValueError) as error:
            check_file(path, **given)
        assert str(error.value).startswith(message)


# ---------------------------------------------------------------------------------------------------- writing


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"file/a.jsonl: cannot be written: "):
        CaptureFile(tmp_path / "file" / "a.jsonl", {})
    with pytest.raises(CaptureError, match="cannot be written: Is a directory"):
        CaptureFile(tmp_path, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only where there is a full disk at hand")
def test_a_full_disk_is_reported_once():
    file = CaptureFile("/dev/full", {})
    with pytest.raises(CaptureError, match="/dev/full: cannot be written: No space left on device"):
        file.write({"event": "x" * 100_000})
    file.close()
    assert str(file.error) == "/dev/full: cannot be written: No space left on device"
    Ledger(CapturingJournal(file)).take(GOOD[0])


def test_the_header_is_read_when_the_first_line_is_written(tmp_path):
    about = {}
    with CaptureFile(tmp_path / "a" / "b.jsonl", lambda: about) as file:
        about["seed"] = 7
        Ledger(CapturingJournal(file)).take(GOOD[0])

    first, *_, last = (tmp_path / "a" / "b.jsonl").read_text().splitlines()
    assert json.loads(first) == {"kvmock_capture": 1, "seed": 7}
    assert json.loads(last) == {"end": {"events": 1}}


def test_a_capture_without_events_has_a_header(tmp_path):
    CaptureFile(tmp_path / "a.jsonl", {}).close()
    assert check_file(tmp_path / "a.jsonl").log.total == 0


def test_values_without_a_json_form_are_written_as_text(tmp_path):
    event = RouterEvent(
        0, KvCacheEvent(0, ROOT), extra={"odd": object, "range": range(2)}, token_ids=[range(2), (3, 4)]
    )
    with CaptureFile(tmp_path / "a.jsonl", {}) as file:
        Ledger(CapturingJournal(file)).take(event)

    (entry,) = check_file(tmp_path / "a.jsonl").log
    assert entry.extra == {"odd": "<class 'object'>", "range": [0, 1]}
    assert entry.token_ids == [[0, 1], [3, 4]]


def test_a_lost_batch_with_another_number_of_restarts_is_real(file):
    sent_by = f'{{"publisher":0,"dp_rank":0,"restarts":[0,{2**70}],"consumer":null}}'
    injected = '{"injected":{"worker_id":0,"dp_rank":0,"fault":"lose","batch":1,"publisher":0,"restarts":0}}\n'
    for lost, is_clean in (
        (LOST.replace("null", sent_by), False),
        (LOST.replace("null", sent_by.replace(str(2**70), "0")), True),
    ):
        assert is_clean is check_file(file(HEADER + lost + injected + '{"end":{"events":0}}\n')).is_clean


def test_a_long_check_reports_its_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_kvmock.servers.capture.check._EVERY", 4)
    wire = KvWire("vllm-0.33")
    for block in range(1, 11):
        wire.publish(Stored(None, (block,), (block,)), token_ids=[[1, 2, 3, 4]])
    path = tmp_path / "worker.msgpack"
    path.write_bytes(b"".join(wire.payloads))
    reported = []
    checked = check_file(path, dialect="vllm-0.33", progress=lambda read, events: reported.append(events))
    assert (checked.log.total, len([events for events in reported if events > 1])) == (10, 2)
    assert sorted(reported) == reported
