"""The frequency tracker: values of the real one, and a comparison with a plain port."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from pytest_kvmock.engines.dynamo.eviction.tinylfu import TinyLfu

M = 2**64 - 1
KEY = 0x0123456789ABCDEF0123456789ABCDEF

# XXH3-64 of a key's 16 bytes with the secrets of seeds 0, 1, 2 and 3 (xxhash-rust, as kvbm-logical calls it).
HASHES = (0x28761A69E54C4229, 0xEEEDF6460FB2D1BB, 0x84C93D55FD2CD8D7, 0x1DF2889A894E034B)


def xxh3_of_16_bytes(key, seed):
    """Return XXH3-64 of a 16-byte key with the secret derived from a seed, step by step."""
    w24, w32, w40, w48 = 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8
    low = (key & M) ^ ((w24 - seed) & M) ^ ((w32 + seed) & M)
    high = (key >> 64) ^ ((w40 - seed) & M) ^ ((w48 + seed) & M)
    product = low * high
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    acc = (16 + swapped + high + ((product & M) ^ (product >> 64))) & M
    acc ^= acc >> 37
    acc = acc * 0x165667919E3779F9 & M
    return acc ^ acc >> 32


class PlainSketch:
    """A direct port of kvbm-logical's `TinyLFUSketch`: words of sixteen counters, without precomputed values."""

    def __init__(self, capacity):
        self.table = [0] * max(1, capacity // 4)
        self.size = 0
        self.sample_size = min(10 * capacity, 2**32 - 1)

    def where(self, key):
        hashes = [xxh3_of_16_bytes(key, seed) for seed in range(4)]
        return [(h % len(self.table), 4 * (h & 15)) for h in hashes]

    def increment(self, key):
        added = False
        for word, shift in self.where(key):
            if (self.table[word] >> shift) & 15 != 15:
                self.table[word] += 1 << shift
                added = True
        if added:
            self.size += 1
            if self.size >= self.sample_size:
                odd = sum((word & 0x1111111111111111).bit_count() for word in self.table)
                self.table = [(word >> 1) & 0x7777777777777777 for word in self.table]
                self.size = max(0, (self.size >> 1) - (odd >> 2))

    def estimate(self, key):
        return min((self.table[word] >> shift) & 15 for word, shift in self.where(key))


def count(tracker, *keys):
    tracker.count(tracker.places(keys))


def estimate(tracker, key):
    return tracker.estimate(tracker.places([key])[0])


def test_the_plain_hash_function_gives_the_recorded_hashes():
    assert [xxh3_of_16_bytes(KEY, seed) for seed in range(4)] == list(HASHES)
    assert xxh3_64_intdigest(KEY.to_bytes(16, "little")) == HASHES[0]


# With one word a place is `hash & 15`, with 2**24 of them `hash & (2**24 - 1)`: more than the fourfold hash itself.
@pytest.mark.parametrize("bits", [4, 5, 16, 24])
def test_a_key_has_the_recorded_counter_places(bits):
    tracker = TinyLfu(4 << bits)
    assert [tuple(h % len(tracker.counters) for h in HASHES)] == tracker.places([KEY])


@given(st.integers(0, 2**128 - 1), st.integers(1, 10_000))
def test_a_counter_place_follows_from_the_word_and_counter_bits_of_the_four_hashes(key, capacity):
    tracker = TinyLfu(capacity)
    words = max(1, capacity // 4)
    (place,) = tracker.places([key])
    hashes = [xxh3_of_16_bytes(key, seed) for seed in range(4)]
    assert [(h % words, h & 15) for h in hashes] == [(number % words, number & 15) for number in place]


def test_the_counter_of_a_key_saturates_at_fifteen():
    tracker = TinyLfu(100)
    seen = []
    for _ in range(20):
        count(tracker, KEY)
        seen.append(estimate(tracker, KEY))
    assert [*range(1, 16), *[15] * 5] == seen
    assert estimate(tracker, 0) == 0
    assert tracker.size == 15  # counts of four saturated counters are not recorded


def test_a_hundred_keys_in_a_small_table_give_the_recorded_words():
    tracker = TinyLfu(10)
    count(tracker, *range(100))
    assert tracker.words() == [0x0F0F0F0F0F0F0F0F, 0xF0F0F0F0F0F0F0F0]
    assert (tracker.size, estimate(tracker, 5)) == (79, 15)


def test_the_estimate_of_a_key_is_its_count():
    tracker = TinyLfu(100)
    count(tracker, 42)
    assert estimate(tracker, 42) == 1
    count(tracker, 42, 42)
    assert estimate(tracker, 42) == 3
    assert estimate(tracker, 99) == 0


def test_the_thousandth_count_at_capacity_100_halves_all_counters():
    tracker = TinyLfu(100)
    count(tracker, 42, 42, 42, 42)
    tracker.size = 998
    count(tracker, 1000)
    assert (tracker.size, estimate(tracker, 42)) == (999, 4)
    count(tracker, 2000)
    assert estimate(tracker, 42) == 2
    assert tracker.size < 500


@pytest.mark.parametrize("capacity", [1, 3, 4, 7, 8, 12, 20, 64, 100])
def test_a_table_has_the_size_of_the_original_table(capacity):
    assert max(1, capacity // 4) == len(TinyLfu(capacity).words())


programs = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.lists(st.integers(0, 40), max_size=60)),
        st.tuples(st.just("estimate"), st.lists(st.integers(0, 60), min_size=1, max_size=5)),
    ),
    max_size=30,
)


@given(st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 64, 100, 256])), programs, st.integers(0, 2**128 - 41))
def test_counts_and_halvings_equal_those_of_the_plain_port(capacity, program, base):
    ours, plain = TinyLfu(capacity), PlainSketch(capacity)
    for kind, numbers in program:
        keys = [(base + (number << 64) + number) % 2**128 for number in numbers]
        if kind == "count":
            count(ours, *keys)
            for key in keys:
                plain.increment(key)
        else:
            assert [plain.estimate(key) for key in keys] == [estimate(ours, key) for key in keys]
        assert (plain.size, plain.table) == (ours.size, ours.words())
