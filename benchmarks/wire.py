"""The codec of KV events, compared with msgspec, which reads and writes the same bytes without decoding events."""

from __future__ import annotations

import random
import time

from benchmarks.measure import Figure, cpu_seconds, needs
from pytest_kvmock import KvCacheEvent, RouterEvent, Stored, block_hashes

BLOCK_SIZE, BLOCKS, EVENTS, ROUNDS, CALLS = 16, 8, 32, 41, 12
DIALECTS = ("vllm-0.10.2", "vllm-0.33", "sglang-0.5.20")


def stored_events(count: int = EVENTS) -> list[RouterEvent]:
    """Return events of 8 blocks of 16 tokens, each the child of the one before, with hashes as wide as an engine's."""
    rng = random.Random(0)
    events: list[RouterEvent] = []
    parent = None
    for number in range(count):
        tokens = [tuple(rng.randrange(128_000) for _ in range(BLOCK_SIZE)) for _ in range(BLOCKS)]
        names = tuple(rng.getrandbits(63) | 2**62 for _ in range(BLOCKS))
        local = tuple(block_hashes([token for block in tokens for token in block], BLOCK_SIZE))
        events.append(RouterEvent(0, KvCacheEvent(number, Stored(parent, names, local)), token_ids=tokens))
        parent = names[-1]
    return events


def codec():
    needs("msgspec")
    import msgspec

    from pytest_kvmock.wire import Batch, decode, encode

    batch = Batch(stored_events(), 1700000000.5)
    read, write = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
    for name in DIALECTS:
        payload = encode(batch, name)
        plain = read(payload)
        decoded = decode(payload, name)
        assert payload == write(plain) or name == "vllm-0.33"  # only its structs have the head of a long map
        assert (batch.events, []) == (decoded.events, decoded.problems)
        raw_read, raw_write, ours_read, ours_write = _medians(
            lambda payload=payload: read(payload),
            lambda plain=plain: write(plain),
            lambda payload=payload, name=name: decode(payload, name),
            lambda name=name: encode(batch, name),
        )
        for what, bar, ours, raw, how in (
            ("encode", 0.3, ours_write, raw_write, "write"),
            ("decode to events for the ledger", 0.4, ours_read, raw_read, "read"),
        ):
            text = f"{what}, {BLOCKS} blocks of {BLOCK_SIZE} tokens an event, {EVENTS} events a batch"
            yield Figure(text, raw / ours, bar, f"msgspec {msgspec.__version__}, {how} in full", name)


def _medians(*calls) -> list[float]:
    """Return the CPU seconds of one call of each function: the median of rounds through all of them, a few calls at a
    time.
    """
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        cpu_seconds(lambda call=call: [call() for _ in range(5)])  # fills caches
    for number in range(ROUNDS):
        for place in range(len(calls)) if number % 2 else reversed(range(len(calls))):
            start = time.process_time()
            for _ in range(CALLS):
                calls[place]()
            taken[place].append((time.process_time() - start) / CALLS)
    return [sorted(times)[ROUNDS // 2] for times in taken]
