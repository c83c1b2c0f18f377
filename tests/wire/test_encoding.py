"""Encoding of batches, and batches that cannot be written."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payloads import EXTRAS, MSGPACK, cleared, examples, extras_of, removed, stored, with_digests

from pytest_kvmock import (
    BACKENDS,
    Cleared,
    KvCacheEvent,
    Prompt,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    create_manager,
)
from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.wire import DIALECTS, Batch, EncodeError, KvWire, StreamDigests, decode, encode

unpack = msgspec.msgpack.decode
BYTES = [name for name in MSGPACK if DIALECTS[name].hashes == "bytes"]
INTEGERS = [name for name in MSGPACK if name not in BYTES]


@pytest.mark.parametrize("name", MSGPACK)
def test_a_decoded_batch_is_encoded_to_the_same_bytes(name):
    for batch in examples(name):
        payload = encode(batch, name)
        decoded = decode(payload, name)
        again = Batch(decoded.events, decoded.timestamp, decoded.dp_rank)

        assert decoded.problems == []
        assert payload == encode(again, name)


hashes = st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5)


@given(
    hashes=hashes,
    parent=st.none() | st.integers(-(2**63), 2**64 - 1),
    size=st.integers(1, 9),
    first=st.integers(0, 2**31),
    tier=st.sampled_from([StorageTier.DEVICE, StorageTier.HOST_PINNED]),
    name=st.sampled_from([name for name in INTEGERS if StorageTier.HOST_PINNED in DIALECTS[name].media]),
    extras=st.sets(st.sampled_from(sorted(EXTRAS))),
)
def test_a_stored_is_decoded_as_it_was_encoded(hashes, parent, *, size, first, tier, name, extras):
    possible = extras_of(DIALECTS[name])
    extra = {key: possible[key] for key in sorted(extras & {*possible}) if key != "medium"}
    if "extra_keys" in extra:
        extra["extra_keys"] = (3 * extra["extra_keys"])[: len(hashes)]
    if "lookahead_token_ids" in extra:
        extra["lookahead_token_ids"] = [[first + size * place] for place in range(1, len(hashes) + 1)]
    event = stored(hashes, parent, size=size, first=first, tier=tier, extra=extra or None)
    (seen,) = decode(encode(Batch([event]), name), name).events

    def as_written(number):
        number &= 2**64 - 1
        return number - 2**64 if number >= 2**63 and DIALECTS[name].hashes == "signed" else number

    data = seen.event.data
    assert tuple(map(as_written, hashes)) == data.block_hashes
    assert (None if parent is None else as_written(parent)) == data.parent_hash
    assert (event.event.data.tokens_hashes, event.token_ids, tier, event.extra) == (
        data.tokens_hashes,
        seen.token_ids,
        seen.storage_tier,
        seen.extra,
    )


def test_hashes_keep_their_bits_in_signed_and_unsigned_dialects():
    events = [stored((-1, 2**63 - 1), -(2**63)), removed((-1,))]
    signed = [stored((2**64 - 1, 2**63 - 1), 2**63), removed((2**64 - 1,))]

    first, second = unpack(encode(Batch(events), "vllm-0.10.2"))[1]
    assert (first[1], first[2], second[1]) == ([2**64 - 1, 2**63 - 1], 2**63, [2**64 - 1])
    first, second = unpack(encode(Batch(signed), "sglang-0.5.9"))[1]
    assert (first[1], first[2], second[1]) == ([-1, 2**63 - 1], -(2**63), [-1])


def test_small_hashes_are_written_unchanged():
    assert unpack(encode(Batch([stored((1, 2))]), "vllm-0.33"))[1][0]["block_hashes"] == [1, 2]


def test_extra_data_without_a_field_in_the_dialect_is_not_written():
    event = stored(extra={"cache_salt": "s", "lora_name": "adapter", "anything": 1})

    assert encode(Batch([stored()]), "vllm-0.9") == encode(Batch([event]), "vllm-0.9")
    assert unpack(encode(Batch([event]), "vllm-0.14"))[1][0][-1] == "adapter"
    assert unpack(encode(Batch([event]), "sglang-0.5.20"))[1][0]["cache_salt"] == "s"


def test_eagle_token_pairs_are_written_back_unchanged():
    pairs = [[i, i + 1] for i in range(8)]
    payload = msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, pairs, 4, None, "GPU"]], None])
    events = decode(payload, "sglang-0.5.9").events

    assert payload == encode(Batch(events, 1.0), "sglang-0.5.9")


WITHOUT_LOOKAHEAD = [
    name
    for name, row in DIALECTS.items()
    if row.is_msgpack
    and not row.whole_blocks  # TensorRT-LLM's names never look ahead
    and not any(each.name == "lookahead_token_ids" for each in row.stored)
]


@pytest.mark.parametrize("name", WITHOUT_LOOKAHEAD)
def test_look_ahead_tokens_are_refused_by_dialects_without_that_field(name):
    extra = {"lookahead_token_ids": [[4], [8]]}
    if DIALECTS[name].hashes == "bytes":
        extra["digests"] = (None, (b"1" * 32, b"2" * 32))
    wire = KvWire(name)
    with pytest.raises(EncodeError) as refused:
        wire.publish(stored(extra=extra))
    assert str(refused.value) == (
        f"event 0 of the batch: dialect {name!r} has no lookahead_token_ids, and the names of these blocks look ahead: "
        "vllm-0.33 has it, and an engine with Speculative(..., plain_hashes=True) needs none"
    )
    assert wire.payloads == []
    wire.publish(stored(extra={**extra, "lookahead_token_ids": None}))
    assert len(wire.payloads) == 1


@pytest.mark.parametrize("name", ["vllm-0.33", "vllm-0.33-bytes"])
def test_look_ahead_tokens_are_written_by_dialects_with_that_field(name):
    extra = {"lookahead_token_ids": [[4], [8]]}
    if DIALECTS[name].hashes == "bytes":
        extra["digests"] = (None, (b"1" * 32, b"2" * 32))
    assert unpack(encode(Batch([stored(extra=extra)]), name))[1][0]["lookahead_token_ids"] == [[4], [8]]


def test_a_batch_has_the_rank_of_its_events():
    assert unpack(encode(Batch([stored(rank=2), cleared(rank=2)]), "vllm-0.33"))[2] == 2
    assert unpack(encode(Batch([], dp_rank=5), "vllm-0.33"))[2] == 5
    assert unpack(encode(Batch([]), "vllm-0.33"))[2] == 0


def bare(**changes):
    """Return a Stored with wrong token ids."""
    event = stored()
    event.token_ids = changes.get("token_ids")
    event.extra = changes.get("extra")
    return event


TOKENS = "a Stored without token ids, which dialect 'vllm-0.33' carries: serve prompts of tokens, not of hashes, and give a manager token_ids"  # fmt: skip  # noqa: E501
DIGESTS = (
    "dialect 'vllm-0.33-bytes' has whole digests as block hashes, and an event has 64 bits of one: give "
    "digests=StreamDigests.of_manager(...) of the manager whose stream it is"
)
REFUSED = [
    ("vllm-0.33", bare(), TOKENS),
    ("vllm-0.33", bare(token_ids=[]), TOKENS),
    ("vllm-0.33", bare(token_ids=[(1, 2, 3, 4)]), "4 token ids came for 2 blocks of 4"),
    ("vllm-0.33", bare(token_ids=[(1, 2), (3, 4, 5)]), "blocks came with 2 to 3 token ids; expected one block size"),
    ("vllm-0.33", bare(token_ids=[(1, 2, 3), (4,)]), "blocks came with 1 to 3 token ids; expected one block size"),
    ("vllm-0.33", bare(token_ids=[(), ()]), "0 token ids came for 2 blocks of 0"),
    (
        "vllm-0.33",
        RouterEvent(0, KvCacheEvent(0, Stored(None, (), ()))),
        "a Stored without blocks has no block size; no engine publishes one",
    ),
    (
        "vllm-0.28",
        stored(tier=StorageTier.EXTERNAL),
        "dialect 'vllm-0.28' has no name for tier external; it has device, host_pinned, disk",
    ),
    (
        "vllm-0.9",
        removed(tier=StorageTier.HOST_PINNED),
        "dialect 'vllm-0.9' does not say where a block is, and tier is host_pinned",
    ),
    ("vllm-0.33", stored((2**64, 1)), "block hash 18446744073709551616 has more than 64 bits"),
    ("vllm-0.33", stored((-(2**63) - 1, 1)), "block hash -0x8000000000000001 has more than 64 bits"),
    ("sglang-0.5.9", stored((1, 2), 2**64), "block hash 18446744073709551616 has more than 64 bits"),
    ("vllm-0.9", stored((-1, 2**64)), "block hash 18446744073709551616 has more than 64 bits"),
    ("vllm-0.9", stored((-(2**63) - 1, 1)), "block hash -0x8000000000000001 has more than 64 bits"),
    ("vllm-0.33", removed((2**64,)), "block hash 18446744073709551616 has more than 64 bits"),
    ("vllm-0.33", stored(extra={"lora_name": 5}), "extra['lora_name']: expected a string, or nil, got 5"),
    ("vllm-0.33", stored(extra={"group_idx": "0"}), "extra['group_idx']: expected an integer, or nil, got '0'"),
    (
        "vllm-0.33-bytes",
        stored(),
        DIGESTS,
    ),
    (
        "vllm-0.33",
        stored(extra={"extra_keys": [None]}),
        "extra['extra_keys']: expected an entry for each of 2 blocks, got an array of 1",
    ),
    (
        "vllm-0.19",
        stored(extra={"extra_keys": []}),
        "extra['extra_keys']: expected an entry for each of 2 blocks, got an array of 0",
    ),
    ("sglang-0.5.18", stored(extra={"cache_salt": 5}), "extra['cache_salt']: expected a string, or nil, got 5"),
    ("sglang-0.5.20", stored(extra={"cache_salt": 5}), "extra['cache_salt']: expected a string, or nil, got 5"),
    *(
        ("vllm-0.33", stored(extra={name: value}), f"extra['{name}']: the event has this field itself; extra is for other fields")  # noqa: E501
        for name, value in {"block_hashes": [1, 2], "block_size": 4, "medium": "GPU", "token_ids": None, "parent_block_hash": 3}.items()  # noqa: E501
    ),
    ("vllm-0.33", removed(extra={"block_hashes": [5]}), "extra['block_hashes']: the event has this field itself; extra is for other fields"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("name", "event", "message"), REFUSED)
def test_an_event_that_cannot_be_written_is_refused_in_one_line(name, event, message):
    good = with_digests(cleared())
    with pytest.raises(EncodeError) as error:
        encode(Batch([good, event]), name)

    assert str(error.value) == f"event 1 of the batch: {message}"


def test_a_batch_of_two_ranks_is_refused():
    for batch in (Batch([stored(rank=1), stored(rank=2)]), Batch([stored(rank=1), stored(rank=2)], dp_rank=1)):
        with pytest.raises(EncodeError, match="event 1 of the batch is of rank 2, and the batch of rank 1"):
            encode(batch, "vllm-0.33")


def test_values_that_msgpack_cannot_encode_are_refused():
    with pytest.raises(EncodeError, match=r"the batch cannot be written in 'vllm-0.33': "):
        encode(Batch([stored(extra={"extra_keys": [object(), None]})]), "vllm-0.33")
    with pytest.raises(EncodeError, match=r"the batch cannot be written in 'vllm-0.33': "):
        encode(Batch([stored()], timestamp="now"), "vllm-0.33")


def test_prompts_of_hashes_are_refused_by_dialects_that_carry_token_ids():
    with RouterHarness(backend="vllm") as kv:
        kv.worker(0).serve(Prompt(hashes=[1, 2, 3]))
        published = [entry.event for entry in kv.events]
    with pytest.raises(
        EncodeError, match=r"event 0 of the batch: a Stored without token ids, which dialect 'vllm-0.24'"
    ):
        encode(Batch(published), "vllm-0.24")
    assert published == decode(encode(Batch(published), "dynamo-router-event"), "dynamo-router-event").events


# ---------------------------------------------------------------------------------------------------- whole digests


def stream(backend, **sizes):
    """Return the manager and the events of an engine that evicts, stores copies and clears."""
    with RouterHarness(backend=backend, **sizes) as kv:
        worker, prompt = kv.worker(0), kv.prompt(4)
        for more in (prompt, kv.prompt(3, after=prompt), kv.prompt(5), prompt):
            worker.serve(more, output_tokens=20)
        with worker.prefill(prompt), worker.prefill(kv.prompt(4)):
            pass
        worker.clear()
        worker.serve(prompt)
        return worker.manager, [entry.event for entry in kv.events]


@pytest.mark.parametrize("backend", ["vllm", "vllm_0_19"])
@pytest.mark.parametrize("name", BYTES)
def test_block_hashes_in_bytes_are_the_whole_digests_of_the_stream(name, backend):
    manager, published = stream(backend)
    digests, seen = StreamDigests.of_manager(manager), {}
    for start in range(0, len(published), 4):
        payload = encode(Batch(published[start : start + 4]), name, digests=digests)
        decoded = decode(payload, name, first_event_id=start)
        assert decoded.problems == []
        assert published[start : start + 4] == decoded.events
        for event in decoded.events:
            if isinstance(event.event.data, Stored):
                seen |= dict(zip(event.event.data.block_hashes, event.extra["digests"][1], strict=True))

    first = published[0]
    tokens = [token for block in first.token_ids for token in block]
    right = manager.hasher.digests(tokens, manager.block_size, 0, None)
    assert right == [seen[block] for block in first.event.data.block_hashes]
    assert {*map(len, seen.values())} == {32}


def test_xxhash_digests_have_16_bytes():
    manager = create_manager("vllm", num_blocks=8, hash_algorithm="xxhash_cbor")
    tokens = [tuple(range(16)), tuple(range(16, 32))]
    found = manager.hasher.digests(range(32), 16, 0, None)
    event = stored([*map(manager.hasher.name, found)])
    event.token_ids = tokens
    payload = encode(Batch([event]), "vllm-0.33-bytes", digests=StreamDigests.of_manager(manager))

    assert found == unpack(payload)[1][0]["block_hashes"]
    assert len(found[0]) == 16


@pytest.mark.parametrize("backend", [name for name in BACKENDS if "vllm" not in name])
def test_a_backend_without_digests_is_refused_for_dialects_of_digests(backend):
    have = "its engine publishes numbers; vllm and vllm_0_19 have"
    message = f"backend '{backend}' has no digests to write as bytes: {have}"
    with pytest.raises(EncodeError) as error:
        StreamDigests.of_manager(create_manager(backend, num_blocks=4))

    assert str(error.value) == message


@pytest.mark.parametrize("backend", ["vllm", "vllm_0_19"])
def test_requests_with_an_adapter_a_salt_or_images_have_their_own_digests(backend):
    with RouterHarness(backend=backend) as kv:
        worker, tokens = kv.worker(0), [*range(64)]
        for keys in ({"lora_name": "adapter"}, {"cache_salt": "salt"}, {"multimodal": [("image", 18, 20)]}, {}):
            worker.serve(Prompt(tokens, **keys))
            worker.serve(Prompt(tokens + [7] * 40, **keys))
        published = [entry.event for entry in kv.events]
        digests = StreamDigests.of_manager(worker.manager)
    payload = encode(Batch(published), "vllm-0.33-bytes", digests=digests)
    decoded = decode(payload, "vllm-0.33-bytes")

    assert len(published) == 8
    assert decoded.problems == []
    hashes = [event.event.data.block_hashes for event in decoded.events]
    assert [event.event.data.block_hashes for event in published] == hashes
    assert len({names[0] for names in hashes[::2]}) == 4


def refused(digests, *events):
    with pytest.raises(EncodeError) as error:
        encode(Batch(events), "vllm-0.33-bytes", digests=digests)
    return str(error.value)


def test_a_block_without_a_digest_is_refused_and_the_batch_changes_nothing():
    hasher = VllmHasher()
    names = [*map(hasher.name, hasher.digests(range(8), 4, 0, None))]
    digests = StreamDigests(hasher)
    first, second = stored(names[:1]), stored(names[1:], names[0], first=4)

    assert "event 0 of the batch: the parent " in refused(digests, second)
    assert (
        refused(digests, first, removed((7,)))
        == "event 1 of the batch: block 7 is not held, so that there is no digest of it"
    )
    assert "event 0 of the batch: the parent " in refused(digests, second)  # the previous batch was undone
    assert "event 0 of the batch: block 9 does not follow from its tokens: their digest is named " in refused(
        digests, stored((9,))
    )
    assert "event 0 of the batch: a Stored without token ids, which dialect " in refused(digests, bare())

    encode(Batch([first, second, first]), "vllm-0.33-bytes", digests=digests)
    assert "event 2 of the batch: block " in refused(digests, cleared(), first, removed(names[1:]))
    encode(Batch([removed(names[:1]), removed(names)]), "vllm-0.33-bytes", digests=digests)  # a copy, then the last
    assert " is not held" in refused(digests, removed(names[:1]))


# ---------------------------------------------------------------------------------------------------- without msgspec

WITHOUT = """
import sys
sys.modules["msgspec"] = None
from pytest_kvmock.wire import Batch, decode, encode
print(encode(Batch([]), "dynamo-router-event"), decode(b"", "dynamo-kv-cache-event").problems)
for call in (lambda: encode(Batch([]), "vllm-0.33"), lambda: decode(b"", "sglang-0.5.9")):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def test_without_msgspec_a_one_line_error_says_how_to_install_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)

    line = "dialects of vLLM and SGLang need msgspec: pip install '/path/to/pytest-kvmock[wire]', with the path of your checkout"  # noqa: E501
    assert ["b'' []", line, line] == done.stdout.splitlines()


def test_msgspec_is_loaded_when_a_dialect_is_used():
    code = "import sys, pytest_kvmock.wire as w; print('msgspec' in sys.modules); w.encode(w.Batch([]), 'vllm-0.9'); print('msgspec' in sys.modules)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["False", "True"]


@pytest.mark.parametrize(("rank", "shown"), [(-1, "-1"), (2**32, "4294967296"), ("a", "'a'"), (True, "True")])
def test_an_invalid_rank_of_a_batch_is_refused(rank, shown):
    with pytest.raises(EncodeError) as caught:
        encode(Batch([], dp_rank=rank), "vllm-0.33")
    assert str(caught.value) == f"the rank of a batch is an integer from 0 to 4294967295, or None, got {shown}"


@pytest.mark.parametrize("dialect", ["vllm-0.33", "vllm-0.33-bytes", "dynamo-router-event"])
def test_a_value_that_is_not_a_batch_of_events_is_refused_in_one_line(dialect):
    with pytest.raises(TypeError, match=r"^encode takes a Batch of RouterEvents, got \[\]$"):
        encode([], dialect)
    with pytest.raises(TypeError, match=r"^event 0 of the batch must be a RouterEvent, got 5$"):
        encode(Batch([5]), dialect)


BIG = Stored(None, (2**40, 2**40 + 1), (7, 8))
PLAIN = [[1], [2]]
FLAWED = {
    "hash": (RouterEvent(0, KvCacheEvent(0, Stored(None, ("x",), (7,))), token_ids=[[1]]), ("block_hashes must be "
    "integers, got 'x' at 0")),
    "parent": (RouterEvent(0, KvCacheEvent(0, Stored("x", (1,), (7,))), token_ids=[[1]]), ("parent_hash must be an "
    "integer, or None, got 'x'")),
    "removed": (RouterEvent(0, KvCacheEvent(0, Removed(("x",)))), "block_hashes must be integers, got 'x' at 0"),
    "no data": (RouterEvent(0, KvCacheEvent(0, None)), ("its data must be Stored, Removed, Located, Updated or "
    "Cleared, got None")),
    "no event": (RouterEvent(0, Cleared()), "its event must be a KvCacheEvent, got Cleared()"),
    "tier": (RouterEvent(0, KvCacheEvent(0, BIG), [], PLAIN), ("storage_tier must be a StorageTier (device, "
    "host_pinned, disk, external), got []")),
}  # fmt: skip
WITH_TOKENS = {
    "tokens": (RouterEvent(0, KvCacheEvent(0, BIG), token_ids=5), ("token_ids must have a sequence of token ids for "
    "each block, got 5")),
    "flat tokens": (RouterEvent(0, KvCacheEvent(0, BIG), token_ids=[1, 2]), ("token_ids must have a sequence of token "
    "ids for each block, got [1, 2]")),
    "bool": (RouterEvent(0, KvCacheEvent(0, Removed((True,)))), "block_hashes must be integers, got True at 0"),
    "float": (RouterEvent(0, KvCacheEvent(0, Removed((1, 1.5, 2)))), "block_hashes must be integers, got 1.5 at 1"),
    "extra": (RouterEvent(0, KvCacheEvent(0, BIG), token_ids=PLAIN, extra=5), ("extra must map names of fields to "
    "values, or be None, got 5")),
    "extra names": (RouterEvent(0, KvCacheEvent(0, BIG), token_ids=PLAIN, extra=["x"]), ("extra must map names of "
    "fields to values, or be None, got ['x']")),
    "size": (RouterEvent(0, KvCacheEvent(0, Stored(None, (), ())), extra={"block_size": True}), "a Stored without blocks has no block size; no engine publishes one"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in ("vllm-0.33", "vllm-0.9", "sglang-0.5.22") for case in (*FLAWED, *WITH_TOKENS)]
    + [("dynamo-router-event", case) for case in FLAWED],  # it writes only these parts of an event
)
def test_an_event_with_invalid_fields_is_refused_in_one_line(name, case):
    event, message = {**FLAWED, **WITH_TOKENS}[case]
    with pytest.raises(EncodeError) as error:
        encode(Batch([cleared(), event], dp_rank=0 if case != "no event" else None), name)
    assert str(error.value) == f"event 1 of the batch: {message}"


@pytest.mark.parametrize(
    "digests", [5, (None,), (None, [b"y" * 32]), (b"x", [b"y" * 32] * 2), (None, [b"y" * 31] * 2), (None, ["y"] * 2)]
)
def test_digests_that_do_not_match_the_blocks_are_refused(digests):
    expected = r"extra\['digests'\]: expected the digest of the parent or None, and of each of 2 blocks, of 16 or 32 bytes, got "  # noqa: E501
    with pytest.raises(EncodeError, match=f"^event 0 of the batch: {expected}"):
        encode(Batch([stored(extra={"digests": digests})]), "vllm-0.33-bytes")


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), -float("inf"), "5", None, True])
@pytest.mark.parametrize("name", ["vllm-0.33", "sglang-0.5.9", "dynamo-router-event"])
def test_a_timestamp_that_is_not_a_finite_number_is_refused(name, timestamp):
    with pytest.raises(EncodeError) as error:
        encode(Batch([cleared()], timestamp), name)
    assert str(error.value) == (
        f"the batch cannot be written in {name!r}: its timestamp must be a finite number of seconds, got {timestamp!r}"
    )


@pytest.mark.parametrize("rank", [-1, 2**32, "0", None, True])
def test_an_invalid_rank_of_the_events_is_refused(rank):
    with pytest.raises(
        EncodeError, match=f"^the rank of a batch is an integer from 0 to 4294967295, or None, got {rank!r}$"
    ):
        encode(Batch([cleared(rank=rank)]), "vllm-0.33")


@pytest.mark.parametrize("events", [5, None, {1, 2}])
def test_a_batch_whose_events_are_not_a_sequence_is_refused(events):
    with pytest.raises(TypeError, match=r"^the events of a batch are a sequence of RouterEvents, got "):
        encode(Batch(events), "vllm-0.33")


def test_invalid_digests_are_refused():
    with pytest.raises(TypeError, match=r"^digests must be StreamDigests, or None, got 5$"):
        encode(Batch([cleared()]), "vllm-0.33", digests=5)
    with pytest.raises(TypeError, match=r"^hasher must be the hasher of a manager, as manager\.hasher; got 'vllm'$"):
        StreamDigests("vllm")


def test_token_ids_of_blocks_of_different_lengths_are_refused():
    event = RouterEvent(0, KvCacheEvent(0, Stored(None, (1, 2, 3), (4, 5, 6))), token_ids=[[1, 2], [3], [4, 5, 6]])
    with pytest.raises(EncodeError, match=r"^event 0 of the batch: blocks came with 1 to 3 token ids; expected one"):
        encode(Batch([event], 5.0), "vllm-0.33")
