"""Files of events as programs print them: parsed as literals, and never evaluated."""

import pytest

from pytest_kvmock.servers import CaptureError, check_file

STORED = "BlockStored(block_hashes=[{}], parent_block_hash={}, token_ids=[1, 2, 3, 4], block_size=4, lora_id=None, medium='GPU', lora_name=None)"  # noqa: E501
REMOVED = "BlockRemoved(block_hashes=[{}], medium='GPU')"

SUBSCRIBER = f"""\
Received event batch at 1757000000.25:
  - {STORED.format(11, None)}
  - {STORED.format(12, 11)}
Received event batch at 1757000001.5:
  - {REMOVED.format(12)}
  - AllBlocksCleared()
"""
REPRS = "\n".join([STORED.format(11, None), REMOVED.format(11)])
BATCHES = f"KVEventBatch(ts=1.5, events=[{STORED.format(11, None)}, {REMOVED.format(11)}], data_parallel_rank=0)\n"
DICTS = (
    "{'type': 'BlockStored', 'block_hashes': [11], 'parent_block_hash': None, 'token_ids': [1, 2, 3, 4], "
    "'block_size': 4, "
    "'lora_id': None, 'medium': 'GPU', 'lora_name': None}\n{'type': 'BlockRemoved', 'block_hashes': [11], 'medium': "
    "'GPU'}\n"
)
JSON = (
    '{"type": "BlockStored", "block_hashes": ["11"], "parent_block_hash": null, "token_ids": ["1", "2", "3", "4"], '
    '"block_size": "4", '
    '"lora_id": null, "medium": "GPU", "lora_name": null}\n{"type": "BlockRemoved", "block_hashes": ["11"], "medium": '
    '"GPU"}\n'
)


def checked(tmp_path, text, **options):
    path = tmp_path / "events.txt"
    path.write_text(text, encoding="utf-8")
    return check_file(path, **options)


@pytest.mark.parametrize(
    ("text", "count"),
    [(SUBSCRIBER, 4), (REPRS, 2), (BATCHES, 2), (DICTS, 2), (JSON, 2)],
    ids=["subscriber", "reprs", "batches", "dicts", "json"],
)
@pytest.mark.parametrize("dialect", [None, "vllm-0.33", "vllm-0.19"])
def test_printed_events_are_parsed(tmp_path, text, count, dialect):
    found = checked(tmp_path, text, dialect=dialect)
    assert found.unreadable == []
    assert found.log.total == count


def test_problems_in_printed_events_are_found(tmp_path):
    found = checked(tmp_path, f"{STORED.format(11, None)}\n{REMOVED.format(12)}\n", dialect="vllm-0.33")
    assert [problem.rule for problem in found.log.problems] == ["block_not_found"]


@pytest.mark.parametrize(
    ("text", "dialect", "message"),
    [
        (
            "BlockStored(block_hashes=[__import__('os').getpid()])\n",
            None,
            r"events.txt: line 1: .*BlockStored.*Call is not a literal\); expected",
        ),
        (f"{REPRS}\nand so on\n", None, r"events.txt: line 3: 'and so on' cannot be read"),
        (
            "what came\n",
            "vllm-0.33",
            r"events.txt: this is text, not a payload of vllm-0.33; as text what vLLM's example",
        ),
        (
            "what came\n",
            None,
            r"events.txt: line 1: not JSON: .*; payloads in msgpack are read with their dialect, and as text what",
        ),
    ],
)
def test_an_unreadable_printed_event_is_refused_in_one_line(tmp_path, text, dialect, message):
    with pytest.raises(CaptureError, match=message) as error:
        checked(tmp_path, text, dialect=dialect)
    assert "\n" not in str(error.value)
