"""The careful reader, which reports defects of payloads, reads all msgpack that msgspec writes, to the byte."""

import struct

import msgspec
import pytest
from msgspec.msgpack import Ext

from pytest_kvmock.wire.codec.defects import WireDefect
from pytest_kvmock.wire.codec.reader import MOST_DEPTH, Pairs, Reader, ReadError, Unreadable

EDGES = (0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536)
INTEGERS = [sign * 2**bits + off for bits in (5, 7, 8, 15, 16, 31, 32, 63) for sign in (1, -1) for off in (-1, 0, 1)]
SCALARS = [None, True, False, 0, 2**64 - 1, 1.5, *(value for value in INTEGERS if -(2**63) <= value < 2**64)]
TEXTS = ["x" * size for size in EDGES] + ["ä€😀"]
BYTES = [b"\x92" * size for size in EDGES]
ARRAYS = [[7] * size for size in EDGES]
VALUES = SCALARS + TEXTS + BYTES + ARRAYS
EXTENSIONS = [(code, size) for code in (-128, -1, 0, 127) for size in (1, 2, 3, 4, 8, 16, 17, 255, 256, 65536)]


def short(value):
    return f"{type(value).__name__}-{value!r:.20}-{len(value) if hasattr(value, '__len__') else ''}"


@pytest.mark.parametrize("value", VALUES, ids=short)
def test_a_value_is_read_exactly_to_its_last_byte(value):
    data = msgspec.msgpack.encode(value)
    reader = Reader(data + b"\xc1")
    assert value == reader.value()
    assert (len(data), 1) == (reader.position, reader.rest)


@pytest.mark.parametrize("value", VALUES, ids=short)
def test_a_value_is_skipped_exactly_to_its_last_byte(value):
    data = msgspec.msgpack.encode([value, 5])
    reader = Reader(data + data + b"\xc1")
    reader.skip()
    reader.skip()
    assert 2 * len(data) == reader.position


@pytest.mark.parametrize("size", EDGES)
def test_a_map_is_read_as_its_pairs_in_order(size):
    reader = Reader(msgspec.msgpack.encode({number: str(number) for number in range(size)}))
    assert Pairs((number, str(number)) for number in range(size)) == reader.value()
    assert reader.rest == 0


def test_a_map_keeps_duplicate_keys():
    assert Pairs([(1, 2), (1, 3)]) == Reader(b"\x82\x01\x02\x01\x03").value()


@pytest.mark.parametrize("size", EDGES)
def test_a_map_is_skipped_entirely(size):
    reader = Reader(msgspec.msgpack.encode({number: [number] for number in range(size)}) + b"\x05")
    reader.skip()
    assert reader.value() == 5


def test_a_float_of_four_bytes_is_read():
    reader = Reader(b"\xca" + struct.pack(">f", 0.1))
    assert struct.unpack(">f", struct.pack(">f", 0.1))[0] == reader.value()
    assert reader.rest == 0


@pytest.mark.parametrize(("code", "size"), EXTENSIONS)
def test_an_extension_is_reported_with_its_type_and_skipped_entirely(code, size):
    data = msgspec.msgpack.encode([Ext(code, b"\xc1" * size), 5])
    extension, after = Reader(data).value()
    assert (WireDefect.WRONG_TYPE, f"an extension of type {code}", 5) == (extension.defect, extension.observed, after)
    reader = Reader(data)
    reader.skip()
    assert reader.rest == 0


@pytest.mark.parametrize(
    "value",
    [300, 2**40, -2, 1.5, "abc", "x" * 40, b"abc", [1, [2, "x"], {}], {"a": [1, 2]}, Ext(3, b"ab"), Ext(3, b"abc")],
    ids=lambda value: f"{value.code} {value.data!r}" if isinstance(value, Ext) else repr(value),
)
def test_a_value_cut_at_any_byte_is_reported_as_truncated(value):
    data = msgspec.msgpack.encode(value)
    for stop in range(len(data)):
        for read in (Reader(data[:stop]).value, Reader(data[:stop]).skip):
            with pytest.raises(ReadError) as caught:
                read()
            assert (caught.value.defect, caught.value.expected) == (WireDefect.TRUNCATED, "the whole of the value")


def test_missing_bytes_are_counted():
    def observed(data):
        with pytest.raises(ReadError) as caught:
            Reader(data).value()
        return caught.value.observed

    assert observed(b"") == "1 bytes are needed and 0 left"
    assert observed(b"\xa4abc") == "4 bytes are needed and 3 left"
    assert observed(b"\x93\x01\x02") == "3 values are announced and 2 bytes left"
    assert observed(b"\x82\x01\x02\x03") == "4 values are announced and 3 bytes left"
    assert observed(b"\x92\x01\xc1") == "byte 0xc1 at 2"


def test_arrays_are_read_up_to_the_allowed_depth():
    value = msgspec.msgpack.decode(b"\x91" * (MOST_DEPTH - 1) + b"\x90")
    assert value == Reader(msgspec.msgpack.encode(value)).value()


@pytest.mark.parametrize(("one", "observed"), [(b"\x91", "an array"), (b"\x81\x01", "a map")])
def test_a_value_nested_too_deeply_is_reported_and_the_next_value_is_read(one, observed):
    inner = one * (MOST_DEPTH + 3) + b"\x07"
    found, after = Reader(b"\x92" + inner + b"\x05").value()
    while not isinstance(found, Unreadable):
        found = found[0] if isinstance(found[0], (list, Unreadable)) else found[0][1]
    expected = f"at most {MOST_DEPTH} in each other"
    assert found == Unreadable(WireDefect.NESTED_TOO_DEEPLY, f"{observed} in {MOST_DEPTH} others", expected)
    assert after == 5


def test_the_invalid_byte_of_a_string_is_named():
    (found, after) = Reader(b"\x92\xa3ab\xff\x05").value()
    assert (Unreadable(WireDefect.BAD_TEXT, "byte 0xff at 2 of a text of 3 bytes", "UTF-8"), 5) == (found, after)


def test_array_length_returns_none_for_other_values_and_does_not_advance():
    reader = Reader(b"\x05\x92\x01\x02")
    assert (reader.array_length(), reader.position) == (None, 0)
    reader.value()
    assert (reader.array_length(), reader.position) == (2, 2)
