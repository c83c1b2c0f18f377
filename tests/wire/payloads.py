"""Payloads for the tests of the codec: real ones, and random changes of them. `python payloads.py COUNT` is a long run.

Every payload must be read without an exception, each missing event must have its problem, and the careful reader must
agree with msgspec.
"""

import random
import sys
import time
from math import isfinite

import msgspec

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored, block_hashes
from pytest_kvmock.values.prompt_keys import hash_options
from pytest_kvmock.values.tokens import windows_of
from pytest_kvmock.wire import DIALECTS, Batch, decode, encode
from pytest_kvmock.wire.codec.batch import Decoded
from pytest_kvmock.wire.codec.decoding import _Decoder, _note_timestamp, _split_carefully
from pytest_kvmock.wire.codec.structs import structs_of

NAMES = list(DIALECTS)
MSGPACK = [name for name, dialect in DIALECTS.items() if dialect.is_msgpack]
EXTRAS = {
    "lora_id": 7,
    "lora_name": "adapter",
    "cache_salt": "salt",
    "session_id": "session",
    "group_idx": 2,
    "kv_cache_spec_kind": "mamba",
    "kv_cache_spec_sliding_window": 128,
    "extra_keys": [("adapter",), (("image", -3), "salt")],
    "lookahead_token_ids": [[4], [8]],
    "locality": "LOCAL",
    "ownership": "tier-1",
    "medium": None,
}


def stored(hashes=(11, 12), parent=None, *, size=4, first=0, event_id=0, tier=StorageTier.DEVICE, extra=None, rank=0):
    """Return a Stored with token ids from `first` on."""
    tokens = [tuple(range(first + i * size, first + (i + 1) * size)) for i in range(len(hashes))]
    windows, ahead = windows_of(tokens, (extra or {}).get("lookahead_token_ids"))
    local = block_hashes([token for window in windows for token in window], size + ahead, **hash_options(extra))
    event = KvCacheEvent(event_id, Stored(parent, tuple(hashes), tuple(local)), rank)
    return RouterEvent(0, event, tier, tokens, extra)


def removed(hashes=(12,), *, event_id=0, tier=StorageTier.DEVICE, extra=None, rank=0):
    return RouterEvent(0, KvCacheEvent(event_id, Removed(tuple(hashes)), rank), tier, extra=extra)


def cleared(*, event_id=0, rank=0, extra=None):
    return RouterEvent(0, KvCacheEvent(event_id, Cleared(), rank), extra=extra)


def extras_of(dialect, tag="stored"):
    """Return the extra fields that an event of a dialect can have."""
    names = {field.name for field in getattr(dialect, tag)} | (set(dialect.metadata) if tag == "stored" else set())
    return {name: value for name, value in EXTRAS.items() if name in names}


def with_digests(event):
    """Return the event as if read with whole digests, whose last 64 bits are its names."""
    data = event.event.data
    if isinstance(data, Cleared):
        return event

    def of(name):
        return None if name is None else b"\x01" * 24 + (name & 2**64 - 1).to_bytes(8, "big")

    parent = of(getattr(data, "parent_hash", None))
    digests = {"digests": (parent, tuple(map(of, data.block_hashes)))}
    return RouterEvent(0, event.event, event.storage_tier, event.token_ids, {**(event.extra or {}), **digests})


def examples(name):
    """Return batches of all kinds of events that a dialect has."""
    dialect = DIALECTS[name]
    big = -(2**62) - 5 if dialect.hashes == "signed" else 2**64 - 9
    events = [
        stored((big, 2)),
        stored((3,), 2, first=8, event_id=1),
        removed((big,), event_id=2),
        cleared(event_id=3, extra=None if dialect.clears else {"blocks_per_level": [8, 0]}),
        stored((5, 6, 7), 3, size=1, first=70_000, event_id=4),
        *(stored(event_id=5, tier=tier) for tier in [*dialect.media][1:]),
    ]
    if dialect.is_msgpack:
        extra = extras_of(dialect)
        events += [stored(extra=extra), removed(extra=extras_of(dialect, "removed") or None)]
    if dialect.hashes == "bytes":
        events = [*map(with_digests, events)]
    for place, event in enumerate(events):
        event.event.event_id = place
    return [Batch(events, 1700000000.5), Batch(events[:1], 2.0), Batch(events[1:4], 3), Batch([], 0.0)]


def payloads(name):
    return [encode(batch, name) for batch in examples(name)]


def careful(payload, name):
    """Decode a payload with the careful reader, without msgspec."""
    row, out = DIALECTS[name], Decoded()
    reader = _Decoder(row, structs_of(row), payload, worker_id=0, dp_rank=0, first_event_id=0)
    reader._events = _split_carefully(payload, out)
    reader._add_all([None] * len(reader._events), out)
    if out.timestamp is not None and not isfinite(out.timestamp):  # `decode` does this after either reader
        _note_timestamp(out)
    return out


def same(one, other):
    def seen(out):
        events = [(e.event, e.storage_tier, e.token_ids, sorted((e.extra or {}).items())) for e in out.events]
        return repr((events, out.problems, out.num_events, out.timestamp, out.dp_rank))

    return seen(one) == seen(other)


def check(payload, name, *, in_all_ways=True):
    """Read a payload, in all ways or in one; an AssertionError names a violated condition."""
    out = decode(payload, name)
    left_out = {problem.event for problem in out.problems if not problem.is_kept}
    if None not in left_out:
        there = {event.event.event_id for event in out.events} if DIALECTS[name].is_msgpack else None
        missing = out.num_events - len(out.events)
        assert missing == len(left_out - {None}) or any(p.name in ("truncated", "malformed") for p in out.problems), (
            name,
            payload,
        )
        assert there is None or not there & left_out, (name, payload)
    assert all(str(problem) for problem in out.problems)
    if in_all_ways and DIALECTS[name].is_msgpack:
        assert same(out, careful(payload, name)), name
    for event in out.events:
        data = event.event.data
        assert not isinstance(data, Stored) or len(data.block_hashes) == len(data.tokens_hashes)
    return out


VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        4,
        2**32,
        2**63,
        2**64 - 1,
        -(2**63),
        1.5,
        "",
        "GPU",
        "CPU",
        "BlockStored",
        "x" * 300,
    ),
    *(
        b"",
        b"\x01" * 8,
        b"\x02" * 16,
        b"\x03" * 32,
        [],
        [1, 2, 3, 4],
        [[1, 2], [2, 3]],
        [None],
        {},
        {"type": "BlockRemoved"},
    ),
    *([2**63], [-1], [2**32], ["a"], [[1, 2, 3]], [b"\x03" * 32], {"cache_salt": "s"}, {1: 2}, [[[[]]]]),
    *(msgspec.msgpack.Ext(5, b"abc"), float("nan"), float("inf")),
]


def mutated_tree(rng, payload):
    """Return a payload with one value changed, omitted or duplicated."""
    tree = msgspec.msgpack.decode(payload)
    spots = []

    def walk(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            spots.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(tree)
    node, key = rng.choice(spots)
    action = rng.randrange(5)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, list):
        node.insert(key, rng.choice(VALUES))
    elif action == 2 and isinstance(node, dict):
        node[rng.choice(["nonsense", "type", "token_ids", "medium", "lora_name", "group_idx"])] = rng.choice(VALUES)
    else:
        node[key] = rng.choice(VALUES)
    return msgspec.msgpack.encode(tree)


def mutated_bytes(rng, payload):
    """Return a payload with some of its bytes changed."""
    data = bytearray(payload)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        action, at = rng.randrange(6), rng.randrange(len(data) + 1)
        if action == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif action == 1:
            del data[at : at + rng.choice([1, 2, 8])]
        elif action == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 2, 8])))
        elif action == 3:
            del data[at:]
        elif action == 4:
            end = at + rng.choice([1, 4, 16, 40])
            data[at:at] = data[at:end]  # duplicates a part: keys, elements
        else:
            data[at : at + 1] = bytes(
                [rng.choice([0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC7, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF])]
            )
    return bytes(data)


def long_run(count, seed=0):
    rng = random.Random(seed)
    real = {name: payloads(name) for name in NAMES}
    start, seen = time.monotonic(), {}
    for number in range(count):
        name = rng.choice(NAMES)
        source = rng.choice(real[name if rng.random() < 0.9 else rng.choice(NAMES)])
        kind = rng.random()
        if kind < 0.05:
            payload = rng.randbytes(rng.randrange(200))
        elif kind < 0.45 and source[:1] == b"\x93":
            payload = mutated_tree(rng, source)
        else:
            payload = mutated_bytes(rng, source)
        try:
            out = check(payload, name, in_all_ways=number % 8 == 0)
        except Exception:
            print(f"seed {seed}, payload {number}: {name} {payload!r}"[-3000:])
            raise
        for defect in out.defects or ["none"]:
            seen[str(defect)] = seen.get(str(defect), 0) + 1
    print(f"{count} payloads in {time.monotonic() - start:.0f} s")
    for defect, times in sorted(seen.items(), key=lambda item: -item[1]):
        print(f"{times:9} {defect}")


if __name__ == "__main__":
    long_run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
