"""vLLM's block manager for hybrid models: several cache groups over one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from uuid import UUID

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.vllm.coordinator import ComputedBlocks, Coordinator
from pytest_kvmock.cache.vllm.group_policies import GroupRequest, Span
from pytest_kvmock.cache.vllm.groups import CacheGroup, Geometry, Retention
from pytest_kvmock.cache.vllm.hashes import ExtraKeys, VllmHasher, vllm_version
from pytest_kvmock.cache.vllm.named_pool import NamedPool
from pytest_kvmock.cache.vllm.states import ChunkEnds
from pytest_kvmock.checks import check_integer
from pytest_kvmock.events import Cleared, StorageTier
from pytest_kvmock.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.moves import Block
    from pytest_kvmock.sinks import Sink


class SpanStored(NamedTuple):
    """Blocks of one group were named."""

    group: int
    parent: int | None
    hashes: tuple[int, ...]
    block_size: int
    start: int
    end: int
    first_token: int
    extra_keys: tuple | None


class SpanRemoved(NamedTuple):
    """A block lost a name."""

    group: int
    hash: int


class HybridManager(RequestLevel):
    takes: ClassVar[str] = "new_request, get_computed_blocks, allocate_slots, free, reset_prefix_cache"

    def __init__(
        self,
        *,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int | None = None,
        dp_rank: int = 0,
        sink: Sink | None = None,
        backend: str = "vllm",
        version: str = "0.33.0",
        hash_algorithm: str = "sha256_cbor",
        hash_seed: str | None = "0",
        enable_caching: bool = True,
        lora_paths: Mapping[str, str] | None = None,
        retention: Retention = 0,
        match_unit: int | None = None,
        use_eagle: bool = False,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        async_scheduling: bool = False,
    ) -> None:
        self.geometry = Geometry.of(
            groups, retention=retention, match_unit=match_unit, use_eagle=use_eagle, caching=enable_caching
        )
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        self.version = vllm_version(version)
        self.hasher = VllmHasher(version, hash_algorithm, hash_seed)
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        pool = NamedPool(num_blocks, len(self.geometry.groups), self.removed, front=not enable_caching)
        self._pool = pool
        self.log = []
        self._coordinator = Coordinator(self.geometry, pool, self)
        self._uncapped = (None,) * len(self.geometry.groups)
        in_flight = max_num_batched_tokens * (2 if async_scheduling else 1)
        self._caps = [
            self.geometry.admission_cap(number, in_flight, max_model_len)
            for number in range(len(self.geometry.groups))
        ]
        self._chunks = ChunkEnds(self.geometry, self._coordinator.policies, max_num_batched_tokens)
        self._rng = Random(0)

    def new_request(self, prompt: Prompt | TokenIds, *, rng=None, keys: ExtraKeys | None = None) -> GroupRequest:
        prompt = Prompt.of(prompt)
        if keys is not None:
            prompt = prompt.with_keys(keys.of_prompt)
        hasher = self.hasher.keyed(keys)
        tokens = HashedTokens(prompt, self.geometry.hash_unit, hasher, rng or self._rng)
        return GroupRequest(tokens, len(self.geometry.groups))

    def get_computed_blocks(self, request: GroupRequest) -> ComputedBlocks:
        return self._coordinator.lookup(request)

    def chunk_tokens(self, request, tokens, hits=None):
        start = request.num_computed_tokens + (hits.num_tokens if hits else 0)
        return self._chunks.tokens(request, start, tokens, hits.junction if hits is not None else request.junction)

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None, *, num_lookahead_tokens=0, full_sequence_must_fit=False) -> bool:
        hits, coordinator, free = new_computed_blocks, self._coordinator, self._pool.free
        hit = 0
        if hits is not None:
            hit = hits.num_tokens
            request.junction = hits.junction
        computed = request.num_computed_tokens + hit
        limit = self.max_model_len or 2**62
        if full_sequence_must_fit:
            end = min(len(request), limit)
            if coordinator.missing(request, Span(hit, computed, end, end), hits, self._caps, asks=True) > len(free):
                return False
        coordinator.retire(request, max(0, min(computed, limit) - request.num_in_flight))
        upto = computed + num_new_tokens
        span = Span(hit, computed, min(upto, limit), min(upto + num_lookahead_tokens, limit))
        if coordinator.missing(request, span, hits, self._uncapped, asks=False) > len(free):
            return False
        coordinator.fill(request, span, hits)
        request.num_computed_tokens = upto
        coordinator.cache(request, min(upto, len(request)))
        return True

    def cache_blocks(self, request, num_tokens):
        self._coordinator.cache(request, min(num_tokens, len(request)))

    def free(self, request):
        self._coordinator.free(request)
        request.num_computed_tokens = 0

    def new_step_starts(self):
        self._coordinator.start_step()

    def end_step(self):
        return self._coordinator.end_step()

    def reset_prefix_cache(self):
        if len(self._pool.free) < self.max_capacity:
            return False
        self._pool.reset()
        self.log.append("C")
        return True

    def stored(self, request, group, block_size, start, ends, end):
        key = request.key
        salt = request.tokens.keys.cache_salt if request.tokens.keys else None
        first = request.tokens.tokens[start]
        extra = [[salt] if e == block_size and salt else None for e in ends]
        self.log.append(SpanStored(group, key(start) if start else None, tuple(map(key, ends)), block_size, start, end, first,
            tuple(extra) if any(extra) else None))

    def removed(self, names):
        self.log += [SpanRemoved(*name) for name in names]
