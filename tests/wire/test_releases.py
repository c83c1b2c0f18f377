"""The dialects compared with their releases: batches made by the releases' own code, byte for byte.

Recorded from vLLM 0.9.2, 0.10.2, 0.14.1 (0.14.0 writes the same), 0.19.1 (as 0.19.0), 0.23.0, 0.24.0, 0.28.0 and
0.33.0: `BlockPool` of vllm/v1/core/block_pool.py caches and evicts blocks that vllm/v1/core/kv_cache_utils.py has
hashed (sha256_cbor, PYTHONHASHSEED=0; in 0.9.2 Python's own hash), `take_events` of vllm/v1/core/kv_cache_manager.py
annotates, and `ZmqEventPublisher.publish` of vllm/distributed/kv_events.py fills the rank in. And from SGLang 0.5.9
(srt/mem_cache/radix_cache.py) and 0.5.18, 0.5.20, 0.5.22 and 0.5.23 (srt/mem_cache/events.py), with their
srt/disaggregation/kv_events.py. Cases "by hand" are of the release's structs, with the values of their other writers:
connectors, lower tiers.
"""

import gzip
import json
from pathlib import Path

import pytest
from payloads import stored

from pytest_kvmock import Cleared, KvCacheEvent, Prompt, Removed, RouterEvent, StorageTier, create_manager
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.engines.sglang.hashes import SglangHasher
from pytest_kvmock.wire import DIALECTS, Batch, decode, encode

PLACES = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")
CASES = [
    (release["release"], case)
    for release in json.loads(
        gzip.decompress((Path(__file__).parents[1] / "data" / "wire_releases.json.gz").read_bytes())
    )
    for case in release["cases"]
]
MADE = [case for _, case in CASES if "refused" not in case]
PAIRS = "pairs of tokens"


def ids(cases):
    return [f"{case['dialect']}: {case['name']}" for case in cases]


def parametrised(cases):
    return pytest.mark.parametrize("case", cases, ids=ids(cases))


def plain(value):
    """Return a recorded value with its bytes, which are {"bytes": their digits} in JSON."""
    if isinstance(value, dict) and [*value] == ["bytes"]:
        return bytes.fromhex(value["bytes"])
    return [plain(each) for each in value] if isinstance(value, list) else value


def name_of(digest):
    return int.from_bytes(digest[-8:], "big") if isinstance(digest, bytes) else digest


def fields_of(event):
    """Return the fields of our event by their names on the wire, with those in `extra`."""
    data, extra = event.event.data, dict(event.extra or {})
    parent, hashes = extra.pop("digests", (getattr(data, "parent_hash", None), getattr(data, "block_hashes", ())))
    if isinstance(data, Cleared):
        return "AllBlocksCleared", {}, extra
    if isinstance(data, Removed):
        return "BlockRemoved", {"block_hashes": [*hashes]}, extra
    tokens = [token for block in event.token_ids for token in block]
    size = len(event.token_ids[0])
    own = {"block_hashes": [*hashes], "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return "BlockStored", own, extra


def event_of(tag, fields, dialect, event_id):
    """Return the event of recorded fields; `extra` has the values that are not None, and digests."""
    fields = {name: plain(value) for name, value in fields.items()}
    extra = {name: value for name, value in fields.items() if name not in PLACES and value is not None}
    tiers = {medium: tier for tier, medium in dialect.media.items()}
    tier = tiers.get(fields.get("medium"), StorageTier.DEVICE)
    if dialect.media and "medium" in fields and fields["medium"] is None:
        extra["medium"] = None
    if tag == "AllBlocksCleared":
        return RouterEvent(0, KvCacheEvent(event_id, Cleared()))
    hashes, parent = fields["block_hashes"], fields.get("parent_block_hash")
    if dialect.hashes == "bytes":
        extra["digests"] = parent, tuple(hashes)
    hashes = tuple(map(name_of, hashes))
    for name in ("group_idx", "kv_cache_spec_kind", "extra_keys"):  # no ordinary engine writes None for them
        if name in fields and fields[name] is None:
            extra[name] = None
    if tag == "BlockRemoved":
        return RouterEvent(0, KvCacheEvent(event_id, Removed(hashes)), tier, extra=extra or None)
    size = fields["block_size"]
    event = stored(hashes, name_of(parent), size=size, event_id=event_id, tier=tier, extra=extra or None)
    tokens = fields["token_ids"]
    event.token_ids = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return event


def test_every_zmq_dialect_has_recordings():
    read = {"trtllm-1.3-zmq"}  # by reading its code: it did not run
    assert {name for name, dialect in DIALECTS.items() if dialect.is_msgpack} - read == {
        case["dialect"] for case in MADE
    }


@pytest.mark.parametrize("rank", [0, 1])
@parametrised([case for case in MADE if case["name"] != PAIRS])
def test_a_batch_is_encoded_to_the_recorded_bytes_of_its_release(case, rank):
    dialect = DIALECTS[case["dialect"]]
    events = [event_of(tag, fields, dialect, index) for index, (tag, fields) in enumerate(case["events"])]
    for event in events:
        event.event.dp_rank = rank

    assert case["published"][str(rank)] == encode(Batch(events, 1700000000.5, rank), dialect).hex()


SGLANG = [case for case in MADE if case["dialect"].startswith("sglang") and case["name"] != PAIRS]


@parametrised([case for case in SGLANG if case["dialect"] != "sglang-0.5.23"])
def test_an_unpublished_sglang_batch_has_no_rank(case):
    dialect = DIALECTS[case["dialect"]]
    events = [event_of(tag, fields, dialect, index) for index, (tag, fields) in enumerate(case["events"])]

    assert case["made"] == encode(Batch(events, 1700000000.5), dialect).hex()


ORDINARY = [case for case in MADE if case["name"] in ("plain", "cleared", "no event")]


@parametrised(ORDINARY)
def test_ordinary_engine_events_need_no_extra_data(case):
    """Its events have no `extra`, and are written without it."""
    dialect = DIALECTS[case["dialect"]]
    decoded = decode(bytes.fromhex(case["published"]["0"]), dialect)
    own = {"digests"} if dialect.hashes == "bytes" else set()

    assert decoded.problems == []
    assert [own if fields else set() for _, fields in case["events"]] == [{*(extra or {})} for extra in decoded.extra]


@parametrised([case for case in MADE if case["name"] != PAIRS])
def test_published_bytes_of_a_release_are_read_with_the_recorded_fields(case):
    dialect = DIALECTS[case["dialect"]]
    payload = bytes.fromhex(case["published"]["1"])
    decoded = decode(payload, dialect)

    assert decoded.problems == []
    assert (1700000000.5, 1, len(case["events"])) == (decoded.timestamp, decoded.dp_rank, len(decoded.events))
    for (tag, recorded), event in zip(case["events"], decoded.events, strict=True):
        fields = {name: plain(value) for name, value in recorded.items()}
        found, own, extra = fields_of(event)
        ordinary = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        ordinary["extra_keys"] = [None] * len(fields.get("block_hashes", ()))

        assert tag == found
        assert {name: fields[name] for name in own} == own
        for name in [name for name in fields if name not in PLACES]:
            assert fields[name] == plain(json.loads(json.dumps(extra.get(name, ordinary.get(name))))), name
        if fields.get("medium") is not None:
            assert fields["medium"] == dialect.media[event.storage_tier]
    assert payload == encode(Batch(decoded.events, decoded.timestamp, decoded.dp_rank), dialect)


@parametrised([case for case in MADE if case["name"] == PAIRS])
def test_pages_of_token_pairs_are_read_and_written_back(case):
    payload = bytes.fromhex(case["published"]["0"])
    decoded = decode(payload, case["dialect"])

    assert decoded.problems == []
    assert payload == encode(Batch(decoded.events, decoded.timestamp, 0), case["dialect"])


# ---------------------------------------------------------------------------------------------- the engine behind it


def prompt_of(request):
    keys = {"lora_name": request.get("lora"), "cache_salt": request.get("salt"), "session_id": request.get("session")}
    return Prompt(request["tokens"], multimodal=request.get("mm", ()), **keys)


SERVED = {"plain", "salt", "lora", "session", "multimodal", "all", "one item a block"}
VLLM = [
    case
    for case in MADE
    if case["dialect"] in DIALECTS and DIALECTS[case["dialect"]].hashes == "unsigned" and case["name"] in SERVED
]


@parametrised(VLLM)
def test_the_backend_of_a_dialect_publishes_the_recorded_bytes_of_its_release(case):
    """Names, parents, evictions and event fields: a manager behaves like the pool of the release."""
    dialect, published = DIALECTS[case["dialect"]], []

    class Sink:
        def publish(self, event, storage_tier=StorageTier.DEVICE, token_ids=None, extra=None):
            if extra and "lora_id" in extra:
                extra = {**extra, "lora_id": 7}  # the number of the recorded adapter
            published.append(RouterEvent(0, event, storage_tier, token_ids, extra))

    paths = {"adapter": "/adapters/adapter"}
    manager = create_manager(speaker_of(dialect), num_blocks=19, block_size=4, sink=Sink(), lora_paths=paths)
    request = manager.new_request(prompt_of(case["request"]))
    manager.allocate_slots(request, 8)
    manager.allocate_slots(request, 12)
    manager.free(request)
    manager.allocate_slots(manager.new_request(range(1000, 1068)), 68)
    events = published[: len(case["events"])]

    assert dialect.backend == manager.backend
    assert case["published"]["0"] == encode(Batch(events, 1700000000.5), dialect).hex()


def test_block_hashes_of_vllm_0_9_are_signed():
    manager = create_manager(speaker_of(DIALECTS["vllm-0.9"]), num_blocks=8, block_size=4)
    names = manager.new_request(range(400)).tokens.names

    assert len(names) == 100
    assert min(names) < 0 < max(names) < 2**63


def test_vllm_0_9_and_0_10_refuse_lora_requests_with_events():
    """`LoRARequest` has no attribute `id`, which the block pool reads."""
    refused = [(release, case["name"]) for release, case in CASES if "refused" in case]

    assert {*refused} == {
        ("vLLM 0.9.2", "lora"),
        ("vLLM 0.9.2", "all"),
        ("vLLM 0.10.2", "lora"),
        ("vLLM 0.10.2", "all"),
    }


def hashes_of(case):
    return [each for tag, fields in case["events"] if tag == "BlockStored" for each in fields["block_hashes"]]


def has_our_names(case):
    """Before 0.5.23 the plain format names the pages of an adapter like those without an adapter."""
    return case["request"] and (
        case["dialect"] == "sglang-0.5.23" or "lora" not in case["name"] or "Dynamo" in case["name"]
    )


@parametrised([case for case in SGLANG if has_our_names(case)])
def test_sglang_page_names_depend_on_salt_and_adapter(case):
    request = case["request"]
    hasher = SglangHasher(dynamo_kv_event_format=case["format"] == "dynamo")
    hasher = hasher.keyed(request.get("extra_key"), request.get("salt"), is_lora="lora" in request)
    digests = hasher.digests(request["tokens"], request["block_size"], 0, None)

    assert hashes_of(case) == [hasher.name(digest) for digest in digests]
