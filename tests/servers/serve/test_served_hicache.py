"""Engines of SGLang with a host behind sockets: events on the wire, their batches, and host hits."""

import msgspec
import pytest
from served import cached, call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.servers import KvServer

DIALECT = "sglang-0.5.23"
TIERS = {"host": 64, "gbps": 0, "bytes_per_token": 1}  # copies take no time


def harness(num_blocks=12, engine=None, **tiers):
    return RouterHarness(EngineProfile(num_blocks=num_blocks, tiers={**TIERS, **tiers}), "sglang", engine=engine)


def batches(server):
    """Return kind, medium and number of blocks of each event, by batch on the wire."""
    found = []
    for batch in server.publisher(0).kept():
        events = msgspec.msgpack.decode(batch.payload)[1]
        found.append([(each["type"], each.get("medium"), len(each.get("block_hashes", ()))) for each in events])
    return found


def test_a_prompt_is_loaded_back_from_the_host():
    with harness() as kv, KvServer(kv, DIALECT) as server:
        texts = [server.text(5) + "x" for _ in range(3)]
        for text in texts:
            complete(server.url(0), text)
        assert cached(complete(server.url(0), texts[0])) == 80
        events = [event for batch in batches(server) for event in batch]
        assert events[:2] == [("BlockStored", "GPU", 5), ("BlockStored", "CPU_PINNED", 5)]
        assert ("BlockRemoved", "GPU", 5) in events
        assert ("BlockRemoved", "CPU_PINNED", 5) not in events
        kv.assert_in_sync()
        assert server.expect(texts[0])["blocks"] == [{"worker": 0, "rank": 0, "blocks": 5, "reusable": 80}]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, [[("GPU", 2)], [("CPU_PINNED", 2)], [("GPU", 1)], [("CPU_PINNED", 1)]]),
        (40, [[("GPU", 2)], [("CPU_PINNED", 2), ("GPU", 1)], [("CPU_PINNED", 1)]]),
    ],
)
def test_copies_made_during_decode_are_published_with_the_next_batch(every, expected):
    with harness(engine={"publish_every": every}) as kv, KvServer(kv, DIALECT) as server:
        text = server.text(2) + "x"
        complete(server.url(0), text, max_tokens=20)
        assert call(server.url(0), "/flush_cache")[0] == 200
        complete(server.url(0), text)
        stored = [
            [(medium, count) for kind, medium, count in batch if kind == "BlockStored"] for batch in batches(server)
        ]
        assert [batch for batch in stored if batch][: len(expected)] == expected
        kv.assert_in_sync()
