"""The hashes of our engines for prompts with adapters and items, against Dynamo's hash function: any release from
1.1.1 on.
"""

import inspect
import random
from itertools import pairwise

import pytest
from peer import dynamo_core

from pytest_kvmock import EngineProfile, Prompt, RouterHarness, Stored

core = dynamo_core()

TAKES_NAMESPACE = "cache_namespace" in inspect.signature(core.compute_block_hash_for_seq).parameters
"""The argument came after 1.3.1."""

SIZE = 4


def theirs(tokens, keys):
    """Return Dynamo's local hashes; the first 16 digits of an item count in each block that it overlaps."""
    infos = []
    for start in range(0, len(tokens), SIZE):
        inside = [
            int(identifier[:16], 16)
            for identifier, offset, length in keys.get("multimodal", ())
            if offset < start + SIZE and offset + length > start
        ]
        infos.append({"mm_objects": [{"mm_hash": h, "offsets": []} for h in inside]} if inside else None)
    options = {"cache_namespace": keys["cache_salt"]} if "cache_salt" in keys else {}
    return core.compute_block_hash_for_seq(tokens, SIZE, infos, keys.get("lora_name"), False, **options)


def drawn(rnd):
    keys = {}
    if rnd.random() < 0.5:
        keys["lora_name"] = rnd.choice(["a", "my-adapter", "Überlänge-模型"])
    if TAKES_NAMESPACE and rnd.random() < 0.5:
        keys["cache_salt"] = rnd.choice(["a", "tenant-a", "テナント"])
    if rnd.random() < 0.5:
        offsets = sorted(rnd.sample(range(13), rnd.randint(2, 4)))
        keys["multimodal"] = [
            (f"{rnd.getrandbits(256):064x}", offset, rnd.randint(1, min(6, end - offset)))
            for offset, end in pairwise(offsets)
        ]
    return keys


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "mocker_sglang_1_6"])
def test_local_hashes_of_an_engines_events_equal_dynamos(backend):
    rnd = random.Random(backend)
    for _ in range(60):
        keys = drawn(rnd)
        if backend == "sglang":
            keys.pop("multimodal", None)
        tokens = [rnd.randrange(100_000) for _ in range(rnd.randint(18, 30))]
        with RouterHarness(EngineProfile(block_size=SIZE, num_blocks=32), backend) as kv:
            prompt = Prompt(tokens, **keys)
            with kv.worker(0).prefill(prompt) as request:
                output = [rnd.randrange(100_000) for _ in range(9)]
                request.decode(output)
            events = [entry.event.event.data for entry in kv.events]
        published = [local for data in events if isinstance(data, Stored) for local in data.tokens_hashes]
        expected = theirs([*tokens, *output], keys)
        assert prompt.block_hashes(SIZE) == expected[: len(tokens) // SIZE], keys
        assert published == expected[: len(published)], keys
        assert len(published) >= len(expected) - 1
