"""The contracts hold for everything that we ship: backends, eviction policies and the reference index.

A quick run has one class of each family of managers, and for indexes one class for each thing the contract requires.
"""

from collections import Counter

from bounded_indexes import BoundedIndex
from depth import few, only_deep, worth_its_time
from hybrid_sizes import EACH
from threaded_indexes import Locked
from truncating_indexes import HashIndex, KeyedTokenIndex

from pytest_kvmock import BACKENDS, Cleared, KvCacheEvent, RadixIndex, Removed, RouterEvent, StorageTier, create_manager
from pytest_kvmock.engines import Speculative, backend_spec
from pytest_kvmock.engines.base.manager_base import RequestLevel
from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.eviction.multi_lru import MultiLruPolicy
from pytest_kvmock.testing import EvictionContract, IndexContract, ManagerContract, WorkerContract


class TestLineagePolicy(EvictionContract):
    prefix_closed = True

    def make_policy(self):
        return LineagePolicy()


class TestLruPolicy(EvictionContract):
    prefix_closed = True

    def make_policy(self):
        return LruPolicy()


class TestMultiLruPolicy(EvictionContract):
    def make_policy(self, capacity):
        return MultiLruPolicy(capacity)


class TestLineageManager(ManagerContract):
    backend = "lineage"


@only_deep
class TestLruManager(ManagerContract):
    backend = "lru"


@only_deep
class TestMultiLruManager(ManagerContract):
    backend = "multi_lru"


STRICT = backend_spec("hash_cache").variant("hash_cache_strict", prefix_closed=True, strict=True)


class TestHashCacheManager(ManagerContract):
    backend = "hash_cache"
    forgiving = True


@only_deep
class TestStrictHashCacheManager(ManagerContract):
    backend = STRICT


class TestAManagerOfOnesOwn(ManagerContract):
    def make_manager(self, num_blocks, block_size, sink):
        return create_manager("lru", num_blocks=num_blocks, block_size=block_size, sink=sink)


class TestLineageWorker(WorkerContract):
    backend = "lineage"


@only_deep
class TestLruWorker(WorkerContract):
    backend = "lru"


@only_deep
class TestMultiLruWorker(WorkerContract):
    backend = backend_spec("multi_lru")


class TestHashCacheWorker(WorkerContract):
    backend = "hash_cache"


@only_deep
class TestStrictHashCacheWorker(WorkerContract):
    backend = STRICT


class TestVllmWorker(WorkerContract):
    backend = "vllm"


@only_deep
class TestOlderVllmWorker(WorkerContract):
    backend = "vllm_0_19"


class TestVllmWorkerWithADraftModel(WorkerContract):
    backend = "vllm_mtp"


@only_deep
class TestVllmWorkerThatDropsBlocks(WorkerContract):
    backend = backend_spec("vllm_mtp").variant("vllm_drop", speculative=Speculative(plain_hashes=True))


class TestSglangWorkerWithADraftModel(WorkerContract):
    backend = "sglang_eagle"


@only_deep
class TestVllmWorkerOfAnotherHash(WorkerContract):
    backend = backend_spec("vllm").variant("vllm_xx", version="0.28.0", hash_algorithm="xxhash", hash_seed="42")
    block_size = 3


class TestSglangWorker(WorkerContract):
    backend = "sglang"


@only_deep
class TestSglangWorkerOfSmallPages(WorkerContract):
    backend = backend_spec("sglang").variant("sglang_slru", policy="slru")
    block_size = 2


class TestSglangGptOssWorker(WorkerContract):
    backend = "sglang_gpt_oss"


@only_deep
class TestSglangGemma4Worker(WorkerContract):
    backend = "sglang_gemma4"


@only_deep
class TestSglangLlama4Worker(WorkerContract):
    backend = "sglang_llama4"


@only_deep
class TestSglangQwen3NextWorker(WorkerContract):
    backend = "sglang_qwen3_next"


@only_deep
class TestSglangKimiLinearWorker(WorkerContract):
    backend = "sglang_kimi_linear"


@only_deep
class TestSglangDeepseekV4Worker(WorkerContract):
    backend = "sglang_deepseek_v4"


class TestVllmGptOssWorker(WorkerContract):
    backend = "vllm_gpt_oss"


@only_deep
class TestVllmGemma3Worker(WorkerContract):
    backend = "vllm_gemma3"


@only_deep
class TestVllmGemma4Worker(WorkerContract):
    backend = "vllm_gemma4"


class TestVllmQwen3NextWorker(WorkerContract):
    backend = "vllm_qwen3_next"


@only_deep
class TestVllmKimiLinearWorker(WorkerContract):
    backend = "vllm_kimi_linear"


@only_deep
class TestVllmKimiK3Worker(WorkerContract):
    backend = "vllm_kimi_k3"


@only_deep
class TestVllmDeepseekV4Worker(WorkerContract):
    backend = "vllm_deepseek_v4"
    block_size = 64


@only_deep
class TestVllmLlama4Worker(WorkerContract):
    backend = "vllm_llama4"


class TestMockerSglangWorker(WorkerContract):
    backend = "mocker_sglang_1_6"


@only_deep
class TestMockerSglangWorkerOfSmallPages(WorkerContract):
    backend = "mocker_sglang_1_6"
    block_size = 2


class TestTrtllmWorker(WorkerContract):
    backend = "trtllm"


class TestTrtllmWorkerWithAHost(WorkerContract):
    backend = BACKENDS["trtllm"].variant("trtllm_with_host", secondary_blocks=16)


@only_deep
class TestTrtllmWorkerOfTheLaterOrder(WorkerContract):
    backend = BACKENDS["trtllm"].variant("trtllm_2026_03", removed_order="2026-03")


@only_deep
class TestTrtllmWorkerOfTwoWindows(WorkerContract):
    backend = BACKENDS["trtllm"].variant("trtllm_two_windows", windows=(32, 256))


@only_deep
class TestTrtllmV2WorkerOfTwoLayerGroups(WorkerContract):
    backend = BACKENDS["trtllm_v2"].variant("trtllm_v2_two_groups", groups=((None, 0), (32, 4)))


class TestTrtllmV2Worker(WorkerContract):
    backend = "trtllm_v2"


@only_deep
class TestTrtllmV2WorkerWithAHost(WorkerContract):
    backend = BACKENDS["trtllm_v2"].variant("trtllm_v2_with_host", levels=(16,))


@only_deep
class TestLargeBlocks(WorkerContract):
    backend = "lru"
    block_size = 16


OF_SMALL_BLOCKS = tuple(name for name in EACH if name != "vllm_deepseek_v4")  # its blocks have at least 64 tokens


@worth_its_time
class TestRadixIndex(IndexContract):
    backends = few(OF_SMALL_BLOCKS, 10)

    def make_index(self):
        traits = self.traits
        return RadixIndex(count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below)


@only_deep
class TestRadixIndexOfLargeBlocks(TestRadixIndex):
    backends = ("vllm_deepseek_v4",)  # its minimum of 64 tokens is the block size of a class that sets none


class ExactIndex:
    """A right index of gpt-oss: of the attention group's blocks, those from which windows allow a prompt to resume."""

    answers = "reusable"

    def __init__(self, block_size):
        self.size, self.held, self.children, self.windows = block_size, {}, {}, {}
        self.most = 4096

    def apply(self, event):
        data, extra = event.event.data, event.extra or {}
        key, group = (event.worker_id, event.event.dp_rank), extra.get("group_idx", 0)
        held = self.held.setdefault(key, {})
        if event.storage_tier is not StorageTier.DEVICE:
            return
        if isinstance(data, Cleared):
            held.clear()
        elif isinstance(data, Removed):
            held[group] = held.get(group, Counter()) - Counter(data.block_hashes)
        else:
            held.setdefault(group, Counter()).update(data.block_hashes)
            if (window := extra.get("kv_cache_spec_sliding_window")) is not None:
                self.windows.setdefault(key, {})[group] = -(-(window - 1) // self.size)
            else:
                for parent, block, local in zip(
                    (data.parent_hash, *data.block_hashes), data.block_hashes, data.tokens_hashes, strict=False
                ):
                    self.children[parent, local] = block
        if len(self.children) > self.most:
            held = {block for groups in self.held.values() for counts in groups.values() for block in +counts}
            self.children = {link: block for link, block in self.children.items() if block in held}
            self.most = max(4096, 2 * len(self.children))

    def find_matches(self, local_hashes):
        names, block = [], None
        for local in local_hashes:
            block = self.children.get((block, local))
            if block is None:
                break
            names.append(block)
        return {key: self.reusable(held, self.windows.get(key, {}), names) for key, held in self.held.items()}

    def reusable(self, held, windows, names):
        def has(group, start, stop):
            return all(held.get(group, {}).get(name, 0) > 0 for name in names[max(start, 0) : stop])

        full = [group for group in held if group not in windows]
        ends = (t for t in range(len(names), 0, -1) if full and all(has(group, 0, t) for group in full))
        return next((t for t in ends if all(has(group, t - need, t) for group, need in windows.items())), 0)

    def remove_worker(self, worker_id):
        self.held = {key: held for key, held in self.held.items() if key[0] != worker_id}


class TestAnExactIndexOfAHybridModel(IndexContract):
    size_blocks = 2_000  # it tries each end of a prompt for each worker
    backends = ("vllm_gpt_oss",)

    def make_index(self, block_size):
        return ExactIndex(block_size)


@only_deep
class TestOlderRadixIndex(IndexContract):
    clears = "worker"

    def make_index(self):
        return RadixIndex(clears="worker")


class OneRank(RadixIndex):
    """A right index that knows workers without ranks, and reports its size."""

    def apply(self, event):
        inner = event.event
        super().apply(RouterEvent(event.worker_id, KvCacheEvent(inner.event_id, inner.data), event.storage_tier))

    def size(self):
        return sum(self.num_blocks(*key) for key in self.workers)


class NoticesRepeats(RadixIndex):
    """A right index that drops a repeated event, and all blocks of a worker that starts again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.last = {}

    def apply(self, event):
        key = (event.worker_id, event.event.dp_rank)
        last = self.last.get(key)
        if event == last:
            return
        if last is not None and event.event.event_id <= last.event.event_id:
            self.remove_worker_dp_rank(*key)
        self.last[key] = event
        super().apply(event)

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.last = {key: event for key, event in self.last.items() if key[0] != worker_id}


class TestAnIndexThatNoticesRepeats(IndexContract):
    backends = few(OF_SMALL_BLOCKS, 3)
    survives = ("double", "restart")

    def make_index(self):
        traits = self.traits
        return NoticesRepeats(count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below)


@only_deep
class TestAnIndexThatReadsGroupsOverPlainEngines(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    reads_groups = True

    def make_index(self, block_size):
        return HashIndex(counts=self.traits.copies, size=block_size)


class TestAnIndexByTokensAndKeys(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full

    def make_index(self):
        return KeyedTokenIndex()


class NamespaceIndex(KeyedTokenIndex):
    """A right index of SGLang's events, whose keys hold for all blocks of a request, and of other engines' events."""

    def keyed(self, tokens, extra):
        if extra and "extra_keys" in extra:
            return super().keyed(tokens, extra)
        namespace = tuple((name, extra[name]) for name in ("lora_name", "cache_salt") if (extra or {}).get(name))
        return [(block, namespace) for block, _ in super().keyed(tokens, None)]


@only_deep
class TestAnIndexByTokensAndNamespaces(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    backends = ("sglang",)

    def make_index(self):
        return NamespaceIndex()


@only_deep
class TestAnIndexByTokensAndEitherForm(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    backends = ("lineage", "sglang", "vllm")

    def make_index(self):
        index = NamespaceIndex()
        index.counts = self.traits.copies
        return index


class TestAnIndexThatDoesNotTellRanksApart(IndexContract):
    tells_ranks_apart = False

    def make_index(self):
        return OneRank()


class TestAnIndexThatMayBeAskedFromThreads(IndexContract):
    threads = True

    def make_index(self):
        return Locked()


class TestAnIndexThatForgets(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    bounded = 64
    bounded_at_most = 64

    def make_index(self):
        return BoundedIndex(64)


class SizedBoundedIndex(BoundedIndex):
    def size(self):
        return len(self.held)


@only_deep
class TestAnIndexThatForgetsAndSaysHowMuchItHolds(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    bounded = 64
    bounded_at_most = 80

    def make_index(self):
        return SizedBoundedIndex(70)


class KeepsLateNames(RadixIndex):
    """A right index that keeps the names of the last dropped blocks, for locations that come late."""

    def __init__(self, most, **options):
        super().__init__(**options)
        self.most, self.names, self.late = most, {}, {}

    def apply(self, event):
        super().apply(event)
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        if event.storage_tier is StorageTier.DEVICE and not isinstance(data, Cleared | Removed):
            self.names.setdefault(key, {}).update(dict.fromkeys(data.block_hashes))
        elif event.storage_tier is StorageTier.DEVICE:
            self.let_go(key, data.block_hashes if isinstance(data, Removed) else self.names.get(key, ()))

    def let_go(self, key, blocks):
        for block in [*blocks]:
            self.names.get(key, {}).pop(block, None)
            self.late[key, block] = None
        while len(self.late) > self.most:
            del self.late[next(iter(self.late))]

    def remove_worker(self, worker_id):
        for key in [key for key in self.names if key[0] == worker_id]:
            self.let_go(key, self.names[key])
        super().remove_worker(worker_id)

    def size(self):
        return sum(map(len, self.names.values())) + len(self.late)


@only_deep
class TestAnIndexThatKeepsLateNames(IndexContract):
    backends = ("lru", "vllm")

    def make_index(self):
        traits = self.traits
        return KeepsLateNames(4096, count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below)


@only_deep
class TestAnIndexThatKeepsManyLateNames(TestAnIndexThatKeepsLateNames):
    def make_index(self):
        traits = self.traits
        return KeepsLateNames(8000, count_copies=traits.copies, chunk=traits.chunk, clears_below=traits.clears_below)


@only_deep
class TestAnIndexThatForgetsSoon(IndexContract):
    size_blocks = 2_000  # it looks up each prefix in full
    bounded = 8

    def make_index(self):
        return BoundedIndex(8)


@only_deep
class TestAnIndexThatForgetsNothingBelowItsBound(IndexContract):
    bounded = 64

    def make_index(self):
        return RadixIndex()


def under(contract):
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, contract)]
    return {backend_spec(case.backend).name for case in here if case.backend is not None}


def test_every_backend_has_its_contracts():
    managers = {name: create_manager(name, num_blocks=1) for name in BACKENDS}
    assert {name for name, made in managers.items() if not isinstance(made, RequestLevel)} <= under(ManagerContract)
    assert {*BACKENDS} <= under(WorkerContract)
