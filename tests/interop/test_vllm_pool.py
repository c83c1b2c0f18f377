"""The block pool against the KVCacheManager of vLLM, on random requests: no difference at all.

Run as a program, it is the long differential: `python tests/interop/test_vllm_pool.py RUNS [FIRST_SEED]`.
"""

import random
import sys
from collections import Counter
from importlib import metadata

import pytest
from peer import engine

from pytest_kvmock import CapturingSink, Prompt, Removed, Stored, create_manager
from pytest_kvmock.engines.vllm.hashes import ExtraKeys

manager, utils, interface, requests, sampling, hashing, lora, torch_dtypes = engine(
    "vllm",
    "v1.core.kv_cache_manager",
    "v1.core.kv_cache_utils",
    "v1.kv_cache_interface",
    "v1.request",
    "sampling_params",
    "utils.hashing",
    "lora.request",
    "utils.torch_utils",
)
pytest.importorskip("cbor2")

BACKEND = "vllm" if tuple(map(int, metadata.version("vllm").split(".")[:2])) >= (0, 24) else "vllm_0_19"
ALGORITHMS = ("sha256_cbor", "sha256", "xxhash", "xxhash_cbor")
SEED = "17"
KEYS = (
    ExtraKeys(),
    ExtraKeys(cache_salt="salt"),
    ExtraKeys(lora_name="adapter", lora_path="/adapter"),
    ExtraKeys(lora_name="adapter", lora_path="/adapter", cache_salt="salt"),
)


class Real:
    """vLLM's manager, with one group of full attention."""

    def __init__(self, num_blocks, block_size, algorithm):
        function = getattr(hashing, algorithm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", SEED)
            utils.init_none_hash(function)
        self.hasher = utils.get_request_block_hasher(block_size, function)
        spec = interface.FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=1,
            dtype=torch_dtypes.STR_DTYPE_TO_TORCH_DTYPE["float16"],
        )
        sizes = {"hash_block_size": block_size}
        if BACKEND == "vllm":
            sizes["scheduler_block_size"] = block_size
        self.manager = manager.KVCacheManager(
            interface.KVCacheConfig(num_blocks + 1, [], [interface.KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=2**20,
            enable_kv_cache_events=True,
            **sizes,
        )
        self.made = 0

    def admit(self, tokens, keys, upto):
        self.made += 1
        request = requests.Request(
            str(self.made),
            list(tokens),
            sampling.SamplingParams(max_tokens=1),
            None,
            lora_request=keys.lora_name and lora.LoRARequest(keys.lora_name, 1, keys.lora_path),
            cache_salt=keys.cache_salt,
            block_hasher=self.hasher,
        )
        blocks, computed = self.manager.get_computed_blocks(request)[:2]
        upto = max(upto, computed + 1)
        if self.manager.allocate_slots(request, upto - computed, computed, blocks) is None:
            return computed, None
        request.num_computed_tokens = upto
        return computed, request

    def go_on(self, request, count):
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.num_computed_tokens += count
        return True

    def decode(self, request, tokens):
        length, hashes = request.num_tokens, len(request.block_hashes)
        request.append_output_token_ids(list(tokens))
        if self.go_on(request, len(tokens)):
            return True
        del request._all_token_ids[length:], request._output_token_ids[-len(tokens) :], request.block_hashes[hashes:]
        return False

    def captured(self):
        rows = []
        for event in self.manager.take_events():
            kind = type(event).__name__
            if kind == "BlockStored":
                rows.append(("S", event.parent_block_hash, tuple(event.block_hashes), tuple(event.token_ids)))
            else:
                rows.append(("R", *event.block_hashes) if kind == "BlockRemoved" else ("C",))
        return rows

    def free_queue(self):
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]


class Ours:
    def __init__(self, num_blocks, block_size, algorithm):
        self.sink = CapturingSink()
        options = {"hash_algorithm": algorithm, "hash_seed": SEED}
        self.manager = create_manager(BACKEND, num_blocks=num_blocks, block_size=block_size, sink=self.sink, **options)

    def admit(self, tokens, keys, upto):
        request = self.manager.new_request(Prompt(tokens), keys=None if keys == ExtraKeys() else keys)
        blocks = self.manager.get_computed_blocks(request)
        computed = len(blocks) * self.manager.block_size
        upto = max(upto, computed + 1)
        got = self.manager.allocate_slots(request, upto - computed, blocks)
        return computed, None if got is None else request

    def go_on(self, request, count):
        return self.manager.allocate_slots(request, count) is not None

    def decode(self, request, tokens):
        if self.manager.missing_blocks(request, len(request) + len(tokens)) > self.manager.num_free_blocks:
            return False
        request.tokens.extend(tokens)
        return self.go_on(request, len(tokens))

    def captured(self):
        rows = []
        for event in self.sink.router_events:
            data = event.event.data
            if isinstance(data, Stored):
                flat = tuple(token for block in event.token_ids for token in block)
                rows.append(("S", data.parent_hash, data.block_hashes, flat))
            else:
                rows.append(("R", *data.block_hashes) if isinstance(data, Removed) else ("C",))
        self.sink.take()
        return rows

    def free_queue(self):
        return self.manager.free_queue


def run(seed, counts, steps=150):
    """Run one random program on both; every answer, event and free queue must be equal."""
    rng = random.Random(seed)
    size, capacity = rng.choice((1, 2, 4, 16)), rng.choice((1, 2, 3, 6, 12, 48))
    algorithm = rng.choice(ALGORITHMS)
    sides = [side(capacity, size, algorithm) for side in (Real, Ours)]
    vocabulary, keyed = rng.choice((2, 50, 200_000)), rng.random() < 0.3
    known, live = [], []

    def fresh(most):
        return [rng.randrange(vocabulary) for _ in range(rng.randrange(most + 1))]

    def both(what, *arguments):
        theirs, mine = (getattr(side, what)(*arguments) for side in sides)
        assert theirs == mine, (seed, what)
        return theirs

    def free(number):
        for side, request in zip(sides, live.pop(number), strict=False):
            side.manager.free(request)

    for _ in range(steps):
        choice = rng.random()
        if choice < 0.45 or not live:
            tokens = [*(rng.choice(known) if known and rng.random() < 0.7 else ()), *fresh(size * capacity // 2)]
            tokens = tokens[: rng.choice((None, None, len(tokens) // size * size))] or [0]
            known = [*known[-9:], tokens]
            keys = rng.choice(KEYS) if keyed else ExtraKeys()
            upto = rng.choice((len(tokens), rng.randrange(1, len(tokens) + 1)))
            (computed, theirs), (hit, mine) = (side.admit(tokens, keys, upto) for side in sides)
            assert (computed, theirs is None) == (hit, mine is None), seed
            counts["admitted" if mine else "refused", "hit" if hit else "missed"] += 1
            if mine is not None:
                live.append((theirs, mine, tokens))
        elif choice < 0.72:
            theirs, mine, tokens = rng.choice(live)
            left = len(mine) - mine.num_computed_tokens
            new = [*fresh(2 * size), 0]
            what, argument = ("go_on", rng.randrange(1, left + 1)) if left else ("decode", new)
            done = [getattr(side, what)(one, argument) for side, one in zip(sides, (theirs, mine), strict=True)]
            assert done[0] == done[1], (seed, what)
            counts[what, done[0]] += 1
            if done[0] and what == "decode":
                tokens += new
        elif choice < 0.96:
            free(rng.randrange(len(live)))
        else:
            for _ in range(rng.choice((0, len(live)))):
                free(0)
            done = [side.manager.reset_prefix_cache() for side in sides]
            assert done[0] == done[1], seed
            counts["reset", done[0]] += 1
        counts.update(row[0] for row in both("captured"))
        both("free_queue")
    counts["steps"] += steps


@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize("block", range(4))
def test_random_requests_get_the_same_answers_events_and_free_queue(block):
    counts = Counter()
    for seed in range(25 * block, 25 * block + 25):
        run(seed, counts)
    kinds = [("admitted", "hit"), ("refused", "hit"), ("go_on", True), ("decode", True), ("decode", False)]
    assert [kind for kind in (*kinds, ("reset", True), ("reset", False), "S", "R", "C") if not counts[kind]] == []


if __name__ == "__main__":
    totals = Counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for number in range(first, first + int(sys.argv[1])):
        run(number, totals)
    print(BACKEND, dict(totals))  # noqa: T201 - it is a program too
