"""The block managers of the real engines, if installed: vLLM's KVCacheManager and SGLang's RadixCache.

Both serve the shared workload as under a scheduler, one request at a time: look up, allocate blocks, cache them, free,
and take the events. Requests, keys, and vLLM's hashes are made before, as they are not the manager's work. SGLang
computes page names while it publishes, which cannot be separated.
"""

from __future__ import annotations

import inspect
import os
import warnings
from array import array
from importlib import import_module, metadata

from benchmarks import workload
from benchmarks.measure import NotHere

SIZE = workload.BLOCK_SIZE


def row_of(event):
    """Return an event of either engine in a short form."""
    kind = type(event).__name__
    if kind == "BlockRemoved":
        return ("R", *event.block_hashes)
    return ("C",) if kind == "AllBlocksCleared" else ("S", event.parent_block_hash, *event.block_hashes)


def _modules(engine, *names):
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [import_module("torch"), *(import_module(f"{engine}.{name}") for name in names)]
    except ImportError as error:
        raise NotHere(f"{engine} cannot be imported: {error}") from None


class Vllm:
    """vLLM's manager, with one group of full attention.

    Raises:
        NotHere: vLLM is not installed.

    Attributes:
        name: name of the peer.
        backend: our backend that models it.
    """

    def __init__(self):
        torch, manager, utils, interface, request, sampling, hashing = _modules(
            "vllm",
            "v1.core.kv_cache_manager",
            "v1.core.kv_cache_utils",
            "v1.kv_cache_interface",
            "v1.request",
            "sampling_params",
            "utils.hashing",
        )
        version = metadata.version("vllm")
        self.name = f"KVCacheManager of vLLM {version}"
        self.backend = "vllm" if tuple(map(int, version.split(".")[:2])) >= (0, 24) else "vllm_0_19"
        os.environ.setdefault("PYTHONHASHSEED", "0")  # as in our hasher
        utils.init_none_hash(hashing.sha256_cbor)
        hasher = utils.get_request_block_hasher(SIZE, hashing.sha256_cbor)
        once = sampling.SamplingParams(max_tokens=1)
        self._requests = [
            request.Request(str(number), tokens, once, None, block_hasher=hasher)
            for number, tokens in enumerate(workload.tokens())
        ]
        spec = interface.FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        # One more than the capacity, for its null block.
        config = interface.KVCacheConfig(workload.CAPACITY + 1, [], [interface.KVCacheGroupSpec(["layer"], spec)])
        self._manager = manager.KVCacheManager
        self._options = {"max_model_len": 2**20, "hash_block_size": SIZE, "enable_kv_cache_events": True}
        self._options |= {"kv_cache_config": config}
        if "scheduler_block_size" in inspect.signature(self._manager.__init__).parameters:
            self._options["scheduler_block_size"] = SIZE

    def run(self, keep=None):
        """Serve all requests from an empty cache; return the results of `keep` for each event."""
        manager = self._manager(**self._options)
        kept = []
        for request in self._requests:
            blocks, computed = manager.get_computed_blocks(request)[:2]
            manager.allocate_slots(request, request.num_tokens - computed, computed, blocks)
            manager.free(request)
            events = manager.take_events()
            if keep is not None:
                kept += map(keep, events)
        return kept


class _Allocator:
    """The part of SGLang's memory pool that the cache calls. The caller counts the free tokens."""

    device = "cpu"

    def free_segment(self, value, start_pos=0):
        pass


class Sglang:
    """SGLang's cache.

    Raises:
        NotHere: SGLang is not installed.

    Attributes:
        name: name of the peer.
        backend: our backend that models it.
    """

    backend = "sglang"

    def __init__(self):
        torch, self._radix, self._base = _modules(
            "sglang", "srt.mem_cache.radix_cache", "srt.mem_cache.base_prefix_cache"
        )
        torch.set_num_threads(1)
        self.name = f"RadixCache of SGLang {metadata.version('sglang')}"
        self._tokens = [array("q", tokens) for tokens in workload.tokens()]
        self._slots = torch.zeros(workload.BLOCKS * SIZE, dtype=torch.int64)

    def run(self, keep=None):
        """Serve all requests from an empty cache; return the results of `keep` for each event.

        This is less than its scheduler does, which inserts and matches again at a checkpoint.
        """
        base, key_of = self._base, self._radix.RadixKey
        cache = self._radix.RadixCache.create_simulated(
            mock_allocator=_Allocator(), page_size=SIZE, enable_kv_cache_events=True
        )
        free = workload.CAPACITY * SIZE
        kept = []
        for tokens in self._tokens:
            found = cache.match_prefix(base.MatchPrefixParams(key=key_of(tokens, limit=len(tokens) - 1)))
            cache.inc_lock_ref(found.last_device_node)
            # One page more than needed, as its scheduler requests (alloc_for_extend).
            missing = len(tokens) - found.device_prefix_len + SIZE - free
            if missing > 0:
                free += cache.evict(base.EvictParams(num_tokens=missing)).num_tokens_evicted
            cached = cache.insert(base.InsertParams(key=key_of(tokens), value=self._slots)).prefix_len
            free -= len(tokens) - cached
            cache.dec_lock_ref(found.last_device_node)
            events = cache.kv_events.take()
            if keep is not None:
                kept += map(keep, events)
        return kept
