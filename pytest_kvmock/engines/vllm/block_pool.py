"""vLLM's block manager: `KVCacheManager` over `BlockPool`, by release; the quick form of one full-attention group.

One subject: the life of a physical block, from the free queue to a request and back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pytest_kvmock.engines.base.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.base.manager_base import LOG
from pytest_kvmock.engines.vllm.hashes import ExtraKeys
from pytest_kvmock.engines.vllm.vllm_manager import VllmManager
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.prompt_keys import REPORT
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.values.moves import Block

# Theory of operation
#
# All blocks that no request holds are in one queue, hashed or not; new blocks are taken from its head. A hashed block
# keeps its hash in the queue, so that lookups can hit it until it is taken. Freed requests append their blocks to the
# queue tail first, so that a chain is evicted from its tail.
#
# A request hashes a block when it has computed the block's last token, even if another block already has that hash.
# Blocks that requests compute at the same time, or again (the last token is always computed), therefore have copies. A
# lookup hits the copy that was cached first. No lookup happens while blocks are filled.


class PoolRequest:
    """One request and the blocks that it holds, made by `BlockPoolManager.new_request`.

    Attributes:
        tokens: its tokens and their hashes; grows as tokens are generated.
        block_ids: the physical blocks that it holds, in order.
        num_computed_tokens: number of its tokens whose KV is in these blocks.
        num_cached_blocks: number of leading blocks that are hashed.
        skip_reading_prefix_cache: the request reuses no cached block, as requests for prompt logprobs do.
        computes_last_token: the last token is computed even if it is cached, because its output is needed.
    """

    __slots__ = (
        "_found",
        "block_ids",
        "computes_last_token",
        "num_cached_blocks",
        "num_computed_tokens",
        "skip_reading_prefix_cache",
        "tokens",
    )

    def __init__(self, tokens: HashedTokens, *, skip_reading_prefix_cache: bool = False) -> None:
        self.tokens = tokens
        self._found: tuple[int, int, list[int]] | None = None  # the last lookup: change count, tokens, blocks
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.computes_last_token = True

    def __len__(self) -> int:
        return self.tokens.num_tokens

    def most_hits(self, block_size: int) -> int:
        """Return the number of its blocks that may be hits: all full blocks, or all before that of its last token."""
        return (self.tokens.num_tokens - self.computes_last_token) // block_size

    @property
    def blocks(self) -> list[Block]:
        """Names of its complete blocks; for the others, the number of the physical block as a UUID.

        The number is 0, vLLM's null block, while the request holds no blocks.
        """
        names = self.tokens.names
        held = self.block_ids or [0] * -(-len(self) // self.tokens.block_size)
        return [*names, *(UUID(int=block_id) for block_id in held[len(names) :])]


class BlockPoolManager(VllmManager):
    """Blocks of one vLLM engine: looked up, allocated, cached, freed and evicted as its `KVCacheManager` does.

    Blocks are numbered from 1. Block 0 is vLLM's null block: no request gets it, and `num_blocks` does not count it.

    Args:
        num_blocks: capacity in usable blocks, at least 1.
        **options: the other arguments of `VllmManager`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, *, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks=num_blocks, **options)
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        # Indexed by block number; the null block is never in use.
        self._refs = [0] * (num_blocks + 1)
        self._names: list[int | None] = [None] * (num_blocks + 1)
        # By name: the block that was cached first; the other blocks, in the order in which they were cached.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._references = 0
        self._is_pinned = False  # whether a holder other than a request ever held a block
        self._changes = 0  # grows whenever the results of lookups may change

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        return self.num_blocks - len(self._free)

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use."""
        return self._references

    @property
    def num_free_blocks(self) -> int:
        """Physical blocks that no request uses, cached or not: the length of the queue."""
        return len(self._free)

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks that no request uses; every copy counts. Walks the queue."""
        return len(self.inactive_blocks())

    @property
    def active_blocks(self) -> dict[Block, int]:
        """References to each block in use, copies added up; a block without a hash is named by its number as UUID."""
        out: dict[Block, int] = {}
        for block_id, refs in enumerate(self._refs):
            if refs:
                name = self._names[block_id]
                block: Block = UUID(int=block_id) if name is None else name
                out[block] = out.get(block, 0) + refs
        return out

    def references(self, block: Block) -> int:
        """Return the references to one block now, copies added up; 0 if it is not in use."""
        if isinstance(block, UUID):
            known = block.int <= self.num_blocks and self._names[block.int] is None
            return self._refs[block.int] if known else 0
        first = self._cached.get(block)
        if first is None:
            return 0
        return sum(self._refs[block_id] for block_id in (first, *self._copies.get(block, ())))

    def inactive_blocks(self) -> list[int]:
        """Return the cached blocks that no request uses, in eviction order."""
        names = self._names
        return [name for block_id in self._free if (name := names[block_id]) is not None]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> list[int]:
        """Return the names of the blocks cached in a tier, in use or not; copies repeated."""
        if tier != StorageTier.DEVICE:
            return self._resident_below(tier)
        return [name for name in self._names if name is not None]

    @property
    def free_queue(self) -> list[int]:
        """Numbers of the blocks that no request uses, in the order in which they would be taken."""
        return list(self._free)

    # ------------------------------------------------------------------------------------------------ requests

    def new_request(
        self,
        prompt: Prompt | TokenIds,
        *,
        rng: Random | None = None,
        keys: ExtraKeys | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> PoolRequest:
        """Make a request of this engine, without blocks yet.

        Args:
            prompt: tokens, or hashes.
            rng: source of the names of generated blocks if the prompt has only hashes.
            keys: extra keys that are hashed with its tokens, instead of the prompt's own keys.
            skip_reading_prefix_cache: see `PoolRequest`.

        Raises:
            ValueError: the prompt is empty, its hashes do not fit the block size, or it has hashes and extra keys.
        """
        tokens = self._hashed(prompt, self.block_size, rng, keys)
        return PoolRequest(tokens, skip_reading_prefix_cache=skip_reading_prefix_cache)

    def get_computed_blocks(self, request: PoolRequest) -> list[int]:
        """Return the cached blocks that a request without blocks could start with. Changes nothing.

        The last token is computed even if it is cached, because its output is needed. If the request is a whole number
        of blocks, its last block is therefore no hit (vLLM: `max_cache_hit_length = request.num_tokens - 1`).

        Returns:
            Their numbers, in order. A second call repeats the lookup only if anything was cached or evicted since.
        """
        found, num_tokens = request._found, request.tokens.num_tokens  # noqa: SLF001 - one family
        if found is not None and found[0] == self._changes and found[1] == num_tokens:
            return found[2].copy()
        hits = self.cached_blocks(request, request.most_hits(self.block_size))
        request._found = self._changes, num_tokens, hits  # noqa: SLF001 - as above
        return hits.copy()

    def cached_blocks(self, request: PoolRequest, most: int | None = None) -> list[int]:
        """Return the cached blocks that a request begins with, at most `most`; they may include the last token's."""
        hits: list[int] = []
        if self.enable_caching and not request.skip_reading_prefix_cache:
            names = request.tokens.names
            append = hits.append
            for block_id in map(self._cached.get, names if most is None or len(names) <= most else names[:most]):
                if block_id is None:
                    break
                append(block_id)
        return hits

    def report_hits(self, request: PoolRequest) -> None:
        """Publish the hits of a look-up as if they were stored now, from block 0 on, with the keys of this request.

        vLLM does so at each look-up of a request in the mode "full" (`kv_cache_report_mode`). The cache does not
        change.

        Raises:
            FullReportError: the report ends the engine.
        """
        hits = len(self.get_computed_blocks(request))
        self.check_reported(hits * self.block_size)
        if hits:
            self._lora_ids.use(request.tokens.keys)
            data, token_ids = request.tokens.stored(0, hits)
            extra = {**(request.tokens.carried(0, hits, self._lora_ids) or {}), REPORT: True}
            self._publisher.publish(data, token_ids, StorageTier.DEVICE, extra)

    def references_to(self, block_id: int) -> int:
        """Return the references to one physical block."""
        return self._refs[block_id]

    def missing_blocks(self, request: PoolRequest, num_tokens: int, new_computed_blocks: Sequence[int] = ()) -> int:
        """Count the free blocks that a request needs for its first `num_tokens`. Changes nothing.

        Args:
            request: the request.
            num_tokens: number of leading tokens.
            new_computed_blocks: the blocks that `get_computed_blocks` found; those that no request uses count too,
                because they are taken from the queue.
        """
        size = self.block_size
        missing = (num_tokens + size - 1) // size - len(new_computed_blocks) - len(request.block_ids)
        if new_computed_blocks:
            missing += list(map(self._refs.__getitem__, new_computed_blocks)).count(0)
        return missing

    def allocate_slots(
        self,
        request: PoolRequest,
        num_new_tokens: int,
        new_computed_blocks: Sequence[int] = (),
        *,
        delay_cache_blocks: bool = False,
    ) -> list[int] | None:
        """Get blocks for tokens that are computed in this step, and cache the blocks that they fill.

        Args:
            request: the request.
            num_new_tokens: number of tokens after those already computed, which include the hits.
            new_computed_blocks: the blocks that `get_computed_blocks` found just before, for a request without blocks.
            delay_cache_blocks: the tokens come from elsewhere: `cache_blocks` caches their blocks once they have
                arrived. All blocks of the request may be hits then.

        Returns:
            The numbers of the new blocks; None if there are too few free blocks, in which case nothing has changed.

        Raises:
            ValueError: no tokens, more tokens than the request has, or hits for a request that has blocks.
        """
        held, size, refs, free = request.block_ids, self.block_size, self._refs, self._free
        if new_computed_blocks and held:
            raise ValueError(f"new_computed_blocks are for a request without blocks; this one has {len(held)}")
        computed = request.num_computed_tokens + len(new_computed_blocks) * size
        upto = computed + num_new_tokens
        least = 0 if new_computed_blocks and (delay_cache_blocks or not request.computes_last_token) else 1
        if num_new_tokens < least or upto > request.tokens.num_tokens:
            raise ValueError(
                f"num_new_tokens must be at least 1, and at most the {len(request) - computed} tokens of the request "
                f"that are not computed; got {num_new_tokens!r}"
            )
        if self.missing_blocks(request, upto, new_computed_blocks) > len(free):
            return None
        self._lora_ids.use(request.tokens.keys)
        # Hits are touched first, so that they are not taken as new blocks.
        for block_id in new_computed_blocks:
            before = refs[block_id]
            if not before:
                del free[block_id]
            refs[block_id] = before + 1
        held += new_computed_blocks
        request.num_cached_blocks += len(new_computed_blocks)
        count = (upto + size - 1) // size - len(held)
        self._references += len(new_computed_blocks) + count
        taken: list[int] = []
        evicted: list[int] = []
        if count:
            popitem = free.popitem
            taken = [popitem(last=False)[0] for _ in range(count)]
            evicted = self._evict(taken)
            for block_id in taken:
                refs[block_id] = 1
            held += taken
        request.num_computed_tokens = upto
        start, end = request.num_cached_blocks, upto // size
        stored = end > start and self.enable_caching and not delay_cache_blocks
        if stored:
            self._cache_full_blocks(request, start, end)
        if (stored or evicted) and LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "eviction", evicted)
            trace(self, "allocation", request.tokens.names[start:end] if stored else ())
        if self._publisher.failure is not None:
            self._publisher.surface()
        return taken

    def reserve_slots(self, request: PoolRequest, num_tokens: int) -> bool:
        """Get blocks for the first `num_tokens` of a request that holds blocks, before all these tokens exist.

        Dynamo's mock of vLLM does so for the tokens that a step with drafts may generate; vLLM does so during
        allocation (`num_lookahead_tokens`).

        Returns:
            Whether there were enough blocks; if not, nothing has changed.
        """
        held, refs, free = request.block_ids, self._refs, self._free
        count = -(-num_tokens // self.block_size) - len(held)
        if count > len(free):
            return False
        if count > 0:
            taken = [free.popitem(last=False)[0] for _ in range(count)]
            self._evict(taken)
            for block_id in taken:
                refs[block_id] = 1
            held += taken
            self._references += count
            if self._publisher.failure is not None:
                self._publisher.surface()
        return True

    def release_slots(self, request: PoolRequest) -> None:
        """Free the blocks of a request beyond its tokens; they go where the queue takes blocks without a name."""
        held, first = request.block_ids, -(-len(request) // self.block_size)
        for block_id in reversed(held[first:]):
            self._refs[block_id] = 0
            self._references -= 1
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=not self.version.prepends_unhashed)
        del held[first:]

    def cache_blocks(self, request: PoolRequest) -> None:
        """Cache the full blocks of a request that were not cached at allocation."""
        start, end = request.num_cached_blocks, request.num_computed_tokens // self.block_size
        if end > start and self.enable_caching:
            self._cache_full_blocks(request, start, end)
        if self._publisher.failure is not None:
            self._publisher.surface()

    def _evict(self, taken: list[int]) -> list[int]:
        """Drop the hashes of these blocks, and publish one Removed per block, as vLLM does."""
        names, cached, copies = self._names, self._cached, self._copies
        evicted: list[int] = []
        for block_id in taken:
            name = names[block_id]
            if name is None:
                continue
            names[block_id] = None
            evicted.append(name)
            if name not in copies:
                del cached[name]
                continue
            others = copies[name]
            if cached[name] == block_id:
                cached[name] = others.pop(0)
            else:
                others.remove(block_id)
            if not others:
                del copies[name]
        if evicted:
            self._changes += 1
            self._publisher.publish_removed(evicted)
        return evicted

    def _cache_full_blocks(self, request: PoolRequest, start: int, end: int) -> None:
        """Hash a request's blocks from `start` to `end`, and publish them in one event."""
        tokens, names, cached = request.tokens, self._names, self._cached
        new, ids = tokens.names[start:end], request.block_ids[start:end]
        for block_id, name in zip(ids, new, strict=True):
            names[block_id] = name
        if cached.keys().isdisjoint(new):
            cached.update(zip(new, ids, strict=True))
        else:
            for block_id, name in zip(ids, new, strict=True):
                if name in cached:
                    self._copies.setdefault(name, []).append(block_id)
                else:
                    cached[name] = block_id
        request.num_cached_blocks = end
        self._changes += 1
        publisher = self._publisher
        if publisher.sink is not None and not publisher.passes_over(1):
            # The parent is found by name: it is cached, perhaps in a block other than the one the request holds.
            data, token_ids = tokens.stored(start, end)
            if tokens.keys is None:
                publisher.publish(data, token_ids)
            else:
                publisher.publish(data, token_ids, StorageTier.DEVICE, tokens.carried(start, end, self._lora_ids))

    def free(self, request: PoolRequest) -> None:
        """Free all blocks of a request, tail first. A request without blocks is left as it is."""
        if self._is_pinned:  # other holders may hold blocks without a name too
            self.give_back(self.take_blocks(request))
            return
        held, refs, free = request.block_ids, self._refs, self._free
        hashed = request.num_cached_blocks
        self._references -= len(held)
        if len(held) > hashed:  # no other request holds these
            unhashed = held[hashed:]
            for block_id in unhashed:
                refs[block_id] = 0
            if self.version.prepends_unhashed:
                for block_id in unhashed:
                    free[block_id] = None
                    free.move_to_end(block_id, last=False)
            else:
                for block_id in reversed(unhashed):
                    free[block_id] = None
            held = held[:hashed]
        for block_id in reversed(held):
            left = refs[block_id] - 1
            refs[block_id] = left
            if not left:
                free[block_id] = None
        request.block_ids = []
        request.num_computed_tokens = request.num_cached_blocks = 0

    def take_blocks(self, request: PoolRequest) -> list[int]:
        """Take all blocks from a request without freeing them; see `DeferredFrees`."""
        blocks, request.block_ids = request.block_ids, []
        request.num_computed_tokens = request.num_cached_blocks = 0
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks taken from a request, its last block first."""
        refs, free, names, prepends = self._refs, self._free, self._names, self.version.prepends_unhashed
        self._references -= len(blocks)
        nameless: list[int] = []
        for block_id in reversed(blocks):
            refs[block_id] -= 1
            if refs[block_id]:
                continue
            if prepends and names[block_id] is None:
                nameless.append(block_id)
            else:
                free[block_id] = None
        for block_id in reversed(nameless):
            free[block_id] = None
            free.move_to_end(block_id, last=False)

    def pin_blocks(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks while a connector reads them. `give_back` releases them."""
        self._is_pinned = True
        for block_id in blocks:
            self._refs[block_id] += 1
        self._references += len(blocks)

    def count_held_by(self, pins: Mapping[int, int]) -> int:
        """Count the blocks whose only references are these pins: no request holds them."""
        return sum(self._refs[block_id] == times for block_id, times in pins.items())

    def nameless_blocks(self, request: PoolRequest) -> tuple[list[int], ...]:
        """Return the blocks of a request that have no name: tokens from elsewhere are read into them."""
        return ([block_id for block_id in request.block_ids if self._names[block_id] is None],)

    def free_behind_windows(self, request: PoolRequest, processed: int | None = None) -> None:
        """Free nothing: full attention attends to all blocks. See `VllmHybridManager.free_behind_windows`."""

    def reset_prefix_cache(self) -> bool:
        """Drop the whole cache and publish a Cleared; do nothing and return False while a block is in use.

        The queue keeps its order.
        """
        if len(self._free) < self.num_blocks:
            return False
        self._names = [None] * len(self._names)
        self._cached.clear()
        self._copies.clear()
        self._changes += 1
        return self._cleared()

    def clear(self) -> bool:
        """Reset the prefix cache; see `reset_prefix_cache`."""
        return self.reset_prefix_cache()
