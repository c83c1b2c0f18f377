"""The radix cache against the RadixCache of SGLang, on random requests: no difference at all.

Run as a program, it is the long differential: `python tests/interop/test_sglang_radix.py RUNS [FIRST_SEED
[THRESHOLD]]`; with a threshold, it plays only slru.
"""

import random
import sys
import time
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
from peer import engine

from pytest_kvmock import CapturingSink, Prompt, Removed, Stored, create_manager
from pytest_kvmock.engines.sglang.radix_driver import RadixDriver
from pytest_kvmock.engines.sglang.radix_tree import POLICIES

radix, base, params = engine(
    "sglang", "srt.mem_cache.radix_cache", "srt.mem_cache.base_prefix_cache", "srt.mem_cache.cache_init_params"
)


class Clock:
    """Ticks, so that no two nodes have the same time; the real clock may be too coarse for that."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self):
        self.now = 0

    def monotonic(self):
        self.now += 1
        return self.now


OF_BOTH = [policy for policy in POLICIES if policy not in ("fifo", "filo")]
"""Under the other two policies, the upper node of a split is new in `RadixCache`, but keeps the age of the run in the
unified tree, which ours follows."""


class RealRequest:
    """The part of SGLang's Req that its cache reads."""

    extra_key = cache_salt = None

    def __init__(self, tokens, priority):
        self.origin_input_ids = list(tokens)
        self.full_untruncated_fill_ids = array("q", tokens)
        self.priority = priority
        self.kv = SimpleNamespace(req_pool_idx=0, cache_inserted_len=0, cache_protected_len=0, swa_evict_floor=0)


class Real:
    """SGLang's cache, and what its scheduler does around it. The slot of a token does not matter."""

    device = "cpu"

    def __init__(self, pages, size, policy, **config):
        self.size = size
        self.free = self.capacity = pages * size
        self.rows = radix.torch.zeros((1, 4 * self.free + 1024), dtype=radix.torch.int64)
        pool = SimpleNamespace(req_to_token=self.rows, write=lambda where, what: None)
        self.cache = radix.RadixCache(
            params.CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=self,
                page_size=size,
                eviction_policy=policy,
                eviction_policy_config=config or None,
                enable_kv_cache_events=True,
            )
        )

    def free_segment(self, value, start_pos=0):
        self.free += len(value)

    def up(self, tokens):
        return -(-tokens // self.size) * self.size

    def take(self, tokens, demand):
        if demand > self.free:
            self.cache.evict(base.EvictParams(num_tokens=demand - self.free))
        self.free -= tokens

    def admit(self, tokens, priority):
        key = radix.RadixKey(array("q", tokens[:-1]))
        found = self.cache.match_prefix(base.MatchPrefixParams(key=key))
        hit, lock = found.device_prefix_len, self.cache.lock(found.last_device_node)
        missing = self.up(len(tokens)) - hit
        if missing > self.free + self.cache.evictable_size():
            self.cache.unlock(lock)
            return None
        # alloc_for_extend requests one page too many if a page is larger than a token
        self.take(missing, len(tokens) - hit + (self.size if self.size > 1 else 0))
        request = RealRequest(tokens, priority)
        request.lock, request.kv.cache_protected_len = lock, hit
        self.checkpoint(request)
        return request

    def checkpoint(self, request):
        self.cache.checkpoint(request, up_to=len(request.full_untruncated_fill_ids))

    def decode(self, request, tokens):
        have = len(request.full_untruncated_fill_ids)
        missing = self.up(have + len(tokens)) - self.up(have)
        if missing > self.free + self.cache.evictable_size():
            return False
        self.take(missing, missing)
        request.full_untruncated_fill_ids.extend(tokens)
        return True

    def release(self, request):
        self.checkpoint(request)
        self.preempt(request)

    def preempt(self, request):
        self.free += self.up(len(request.full_untruncated_fill_ids)) - request.kv.cache_protected_len
        self.cache.unlock(request.lock)

    def clear(self):
        self.cache.reset()
        self.free = self.capacity

    def captured(self):
        rows = []
        for event in self.cache.kv_events.take():
            kind = type(event).__name__
            if kind == "BlockRemoved":
                rows.append(("R", *event.block_hashes))
            elif kind == "AllBlocksCleared":
                rows.append(("C",))
            else:
                rows.append(("S", event.parent_block_hash, tuple(event.block_hashes), tuple(event.token_ids)))
        return rows

    def sizes(self):
        return self.free, self.cache.evictable_size(), self.cache.protected_size()


class Ours:
    def __init__(self, pages, size, policy, **config):
        self.sink = CapturingSink()
        self.manager = create_manager(
            "sglang", num_blocks=pages, block_size=size, sink=self.sink, policy=policy, **config
        )
        self.manager.hold_events = True  # as in the original, where the events of a step are merged
        self.driver = RadixDriver(self.manager, True, random.Random(0))

    def admit(self, tokens, priority):
        request = self.driver.open(Prompt(tokens))
        request.priority = priority
        needed, available = self.driver.need(request, len(request)), self.driver.room()
        if needed > available:
            return None
        self.driver.admit(request, len(request))
        return request

    def decode(self, request, tokens):
        needed, available = self.driver.need(request, len(request), tokens), self.driver.room()
        if needed > available:
            return False
        self.driver.extend(request, tokens)
        return True

    def release(self, request):
        self.driver.free(request, done=True)

    def preempt(self, request):
        self.driver.free(request, done=False)

    def clear(self):
        assert self.driver.clear()

    def captured(self):
        self.manager.take_events()
        rows = []
        for event in self.sink.router_events:
            data = event.event.data
            if isinstance(data, Stored):
                flat = tuple(token for page in event.token_ids for token in page)
                rows.append(("S", data.parent_hash, data.block_hashes, flat))
            else:
                rows.append(("R", *data.block_hashes) if isinstance(data, Removed) else ("C",))
        self.sink.take()
        return rows

    def sizes(self):
        return self.manager.available_size(), self.manager.evictable_size(), self.manager.protected_size()


def run(seed, counts, steps=150, threshold=None):
    """Run a random program on both; answers, events and sizes must be equal. With a threshold the policy is slru."""
    rng = random.Random(seed)
    size, pages, policy = rng.choice((1, 2, 4, 16)), rng.choice((1, 2, 3, 6, 12, 48)), rng.choice(OF_BOTH)
    if threshold is None:
        sides = [side(pages, size, policy) for side in (Real, Ours)]
    else:
        sides = [side(pages, size, "slru", protected_threshold=threshold) for side in (Real, Ours)]
    vocabulary = rng.choice((2, 50, 200_000))
    known, live = [], []

    def fresh(most):
        return [rng.randrange(vocabulary) for _ in range(rng.randrange(most + 1))]

    def let_go(number, what):
        for side, request in zip(sides, live.pop(number), strict=False):
            getattr(side, what)(request)

    for _ in range(steps):
        choice = rng.random()
        if choice < 0.45 or not live:
            tokens = [*(rng.choice(known) if known and rng.random() < 0.7 else ()), *fresh(size * pages // 2)]
            tokens = tokens[: rng.choice((None, None, len(tokens) // size * size))][: 2 * size * pages] or [0]
            known = [*known[-9:], tokens]
            priority = rng.choice((0, 0, 1, 3))
            theirs, mine = (side.admit(tokens, priority) for side in sides)
            assert (theirs is None) == (mine is None), seed
            counts["admitted" if mine else "refused"] += 1
            if mine is not None:
                live.append((theirs, mine, tokens))
        elif choice < 0.68:
            *both, tokens = rng.choice(live)
            new = [*fresh(2 * size), 0]
            done = [side.decode(one, new) for side, one in zip(sides, both, strict=True)]
            assert done[0] == done[1], seed
            counts["decode", done[0]] += 1
            if done[0]:
                tokens += new
        elif choice < 0.97:
            let_go(rng.randrange(len(live)), rng.choice(("release", "release", "preempt")))
        else:
            while live:
                let_go(0, "release")
            for side in sides:
                side.clear()
        theirs, mine = (side.captured() for side in sides)
        assert theirs == mine, seed
        counts.update(row[0] for row in mine)
        theirs, mine = (side.sizes() for side in sides)
        assert theirs == mine, seed
    counts["steps"] += steps


@pytest.fixture(autouse=True)
def ticking(monkeypatch):
    monkeypatch.setattr(radix, "time", Clock())


@pytest.mark.filterwarnings("ignore")  # SGLang's own
@pytest.mark.parametrize("block", range(4))
def test_random_requests_get_the_same_answers_events_and_sizes(block):
    counts = Counter()
    for seed in range(50 * block, 50 * block + 50):
        run(seed, counts)
    kinds = ("admitted", "refused", ("decode", True), ("decode", False), "S", "R", "C")
    assert [kind for kind in kinds if not counts[kind]] == []


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("threshold", [1, 2, 3, 5])
def test_slru_protects_from_its_threshold_which_is_two_hits_by_default(threshold):
    counts = Counter()
    for seed in range(30):
        run(seed, counts, threshold=threshold)
    assert counts["R"]
    assert radix.get_eviction_strategy("slru").protected_threshold == 2


if __name__ == "__main__":
    radix.time = Clock()
    totals = Counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    threshold = int(sys.argv[3]) if len(sys.argv) > 3 else None
    for number in range(first, first + int(sys.argv[1])):
        run(number, totals, threshold=threshold)
    print(dict(totals))  # noqa: T201 - it is a program too
