"""An event that no dialect can write is reported in one line; one just within the bounds is not reported."""

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.wire import EncodeError
from pytest_kvmock.wire.codec.event_flaws import check_events, check_rank, check_timestamp, event_flaw

U64 = "18446744073709551615"


def event(data=None, *, worker_id=0, event_id=0, dp_rank=0, tier=StorageTier.DEVICE, tokens=None, extra=None):
    data = Stored(None, (1, 2), (3, 4)) if data is None else data
    return RouterEvent(worker_id, KvCacheEvent(event_id, data, dp_rank), tier, tokens, extra)


def changed(data, **fields):
    """Return an event whose data were changed after its creation."""
    for name, value in fields.items():
        setattr(data, name, value)
    return event(data)


TOKENS = "token_ids must have a sequence of token ids for each block, got"
WRONG = [
    (event(worker_id=-1), f"worker_id must be an integer from 0 to {U64}, got -1"),
    (event(worker_id=2**64), f"worker_id must be an integer from 0 to {U64}, got 18446744073709551616"),
    (event(worker_id=True), f"worker_id must be an integer from 0 to {U64}, got True"),
    (event(event_id=-1), f"event_id must be an integer from 0 to {U64}, got -1"),
    (event(event_id=2**64), f"event_id must be an integer from 0 to {U64}, got 18446744073709551616"),
    (event(dp_rank=-1), "dp_rank must be an integer from 0 to 4294967295, got -1"),
    (event(dp_rank=2**32), "dp_rank must be an integer from 0 to 4294967295, got 4294967296"),
    (event(dp_rank="0"), "dp_rank must be an integer from 0 to 4294967295, got '0'"),
    (event(tier="host"), "storage_tier must be a StorageTier (device, host_pinned, "),
    (event(extra=[1]), "extra must map names of fields to values, or be None, got [1]"),
    (event(data=5), "its data must be Stored, Removed, Located, Updated or Cleared, got 5"),
    (RouterEvent(0, 5), "its event must be a KvCacheEvent, got 5"),
    (event(tokens=7), f"{TOKENS} 7"),
    (event(tokens="ab"), f"{TOKENS} 'ab'"),
    (event(tokens=[[1], "b"]), f"{TOKENS} "),
    (event(tokens=[[1], 2]), f"{TOKENS} "),
    (event(tokens={0: [1]}), f"{TOKENS} "),
    (event(tokens=[[1, 2], [3, -1]]), "for each block, got -1 in block 1"),
    (event(tokens=[[1, 2**32], [3, 4]]), "for each block, got 4294967296 in block 0"),
    (event(tokens=[[1, 2], [3.5, 4]]), "for each block, got 3.5 in block 1"),
    (changed(Stored(None, (1,), (2,)), block_hashes=7), "block_hashes must be a tuple of integers, got 7"),
    (changed(Stored(None, (1,), (2,)), tokens_hashes=7), "tokens_hashes must be a tuple of integers, got 7"),
    (changed(Stored(None, (1,), (2,)), parent_hash="x"), "parent_hash must be an integer, or None, got 'x'"),
    (changed(Removed((1,)), block_hashes="ab"), "block_hashes must be a tuple of integers, got 'ab'"),
    (changed(Removed((1,)), block_hashes=(1, "b")), "block_hashes must be integers, got 'b' at 1"),
    (changed(Stored(None, (1,), (2,)), tokens_hashes=(None,)), "tokens_hashes must be integers, got None at 0"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_invalid_fields_of_an_event_are_named(wrong, message):
    assert message in event_flaw(wrong)
    with pytest.raises(EncodeError) as raised:
        check_events([event(), wrong])
    assert str(raised.value).startswith("event 1 of the batch: ")
    assert message in str(raised.value)


RIGHT = [
    event(worker_id=2**64 - 1),
    event(worker_id=0, event_id=2**64 - 1),
    event(dp_rank=2**32 - 1),
    event(tokens=[[0, 2**32 - 1], [1, 2]]),
    event(tokens=((), ())),
    event(Stored(-5, (2**64 - 1,), (0,))),
    event(Removed((2**64 - 1, 0))),
    event(Removed(())),
    event(Cleared()),
    event(tier=StorageTier.EXTERNAL, extra={}),
]


@pytest.mark.parametrize("right", RIGHT)
def test_valid_fields_of_an_event_have_no_flaw(right):
    assert None is event_flaw(right)
    check_events([right, right])
    check_events([])


def test_token_ids_that_are_not_written_are_not_checked():
    wrong = event(tokens=[[-1]])
    assert None is event_flaw(wrong, with_tokens=False)
    check_events([wrong], with_tokens=False)
    with pytest.raises(EncodeError):
        check_events([wrong])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (5, "the events of a batch are a sequence of RouterEvents, got 5"),
        ({1: 2}, "the events of a batch are a sequence of RouterEvents, got {1: 2}"),
        ([event(), "x"], "event 1 of the batch must be a RouterEvent, got 'x'"),
    ],
)
def test_a_value_that_is_not_a_batch_of_events_raises_a_type_error(events, message):
    with pytest.raises(TypeError) as raised:
        check_events(events)
    assert str(raised.value) == message


@pytest.mark.parametrize("time", [0, 5, -1, 2**80, 1.5, 0.0])
def test_a_finite_number_is_a_valid_timestamp(time):
    check_timestamp(time, "vllm-0.33")


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf"), True, None, "5"])
def test_a_value_that_is_not_a_finite_number_is_an_invalid_timestamp(time):
    with pytest.raises(EncodeError) as raised:
        check_timestamp(time, "vllm-0.33")
    expected = (
        f"the batch cannot be written in 'vllm-0.33': its timestamp must be a finite number of seconds, got {time!r}"
    )
    assert str(raised.value) == expected


def test_the_rank_of_a_batch_is_limited_to_32_bits():
    check_rank(0)
    check_rank(2**32 - 1)
    for wrong in (-1, 2**32, True, "0"):
        with pytest.raises(EncodeError) as raised:
            check_rank(wrong)
        assert str(raised.value) == f"the rank of a batch is an integer from 0 to 4294967295, or None, got {wrong!r}"
