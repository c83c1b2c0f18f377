"""vLLM's block manager for hybrid models: its `KVCacheManager` with several cache groups that share one pool.

One subject: the requests to the engine of a hybrid model, and the events that it publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pytest_kvmock.engines.base.cache_group import FULL, CacheGroup, checked_groups, groups_text
from pytest_kvmock.engines.base.cache_trace import TRACE_LEVEL, trace
from pytest_kvmock.engines.base.lookahead_tokens import LookaheadTokens
from pytest_kvmock.engines.base.manager_base import LOG, EventPublisher
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.coordinator import Coordinator
from pytest_kvmock.engines.vllm.group_request import ComputedBlocks, GroupRequest, Span
from pytest_kvmock.engines.vllm.groups import GroupGeometry, Retention, check_context_parallel, with_scratch
from pytest_kvmock.engines.vllm.hashes import ExtraKeys
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadStopError, StateHandOff
from pytest_kvmock.engines.vllm.named_pool import NULL, NamedPool
from pytest_kvmock.engines.vllm.speculative import Speculative
from pytest_kvmock.engines.vllm.state_groups import ChunkEnds
from pytest_kvmock.engines.vllm.vllm_manager import FullReportError, VllmManager
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import Removed, SparseStored, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, LOOKAHEAD, LOOKAHEAD_KEYS, REPORT, group_extra
from pytest_kvmock.values.tokens import Prompt, TokenIds, keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.offload import WriteThrough
    from pytest_kvmock.values.moves import Block
    from pytest_kvmock.values.prompt_keys import EventExtra

_NO_LIMIT = 2**63
_OF_STEPS = ("speculative", "max_num_batched_tokens", "max_model_len", "async_scheduling")
"""Settings that `BlockPoolManager` does not support for one group of full attention."""


class VllmHybridManager(VllmManager):
    """Blocks of one vLLM engine whose model has several cache groups, or a single group that is not full attention.

    Its methods are those of `BlockPoolManager`, with blocks by group. A scheduler that runs several requests in a step
    calls `new_step_starts` before the step and `end_step` after it.

    Args:
        groups: in the engine's order.
        num_blocks: capacity in usable blocks, at least 1.
        retention: which blocks of sparse groups are cached (`--prefix-cache-retention-interval`): 0: those that prompts
            resume from; a multiple of all groups' block sizes: also those at its multiples; None: all that a hit could
            use.
        match_unit: tokens per hash (`--prefix-match-unit`), a divisor of all groups' blocks; None: the largest divisor.
        speculative: the draft model, of version 0.33.0; None if there is none.
        max_num_batched_tokens: the most tokens of one step, at least 1.
        max_model_len: the most tokens of a request, at least 1; None if there is no limit.
        async_scheduling: each step is scheduled before the previous step is answered.
        **options: the other arguments of `VllmManager`; `block_size` is that of the attention group and optional.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        geometry: the groups, and the sizes that follow from them.
        max_model_len: as given.
        admission_caps: per group, the most blocks that the admission of a request requires; None if there is no cap.
    """

    def __init__(
        self,
        *,
        groups: Iterable[CacheGroup],
        num_blocks: int,
        retention: Retention = 0,
        match_unit: int | None = None,
        speculative: Speculative | None = None,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        async_scheduling: bool = False,
        **options: Any,
    ) -> None:
        taken = checked_groups(groups)
        main = next((group for group in taken if group.kind in FULL), taken[0])
        check_context_parallel(options.get("dcp", 1), options.get("pcp", 1), main.block_size, taken)
        if options.setdefault("block_size", main.block_size) != main.block_size:
            raise ValueError(
                f"block_size must be that of the attention group, {main.block_size} tokens, or not given; "
                f"got {options['block_size']!r}"
            )
        super().__init__(num_blocks=num_blocks, **options)
        check_speculative(speculative)
        if not self.version.has_groups:
            if speculative is not None:
                raise ValueError(
                    f"speculative is mocked for vLLM 0.33.0, which was recorded; got version {self.version.name!r}"
                )
            raise ValueError(
                f"cache groups are those of vLLM 0.33.0; version {self.version.name} is not mocked with them"
            )
        if speculative is not None:
            taken = with_scratch(taken, speculative.tokens)
        self.speculative = speculative
        check_integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        if max_model_len is not None:
            check_integer("max_model_len", max_model_len, 1, " tokens, or None")
        self._steps_in_flight = 2 if async_scheduling else 1
        self.max_model_len = max_model_len
        self._most_tokens = _NO_LIMIT if max_model_len is None else max_model_len
        self._main = taken.index(main)
        self._uncapped = [None] * len(taken)
        self._extras = [group_extra(number, each.kind, each.window) for number, each in enumerate(taken)]
        self._removed_extras = [group_extra(number) for number in range(len(taken))]
        self._retention, self._match_unit = retention, match_unit
        self._begin(self._geometry_of(taken))
        self.limit_steps(max_num_batched_tokens)

    def _geometry_of(self, groups: tuple[CacheGroup, ...]) -> GroupGeometry:
        """Return the sizes that follow from its groups and settings."""
        return GroupGeometry.of(
            groups,
            retention=self._retention,
            match_unit=self._match_unit,
            speculative=self.speculative,
            caching=self.enable_caching,
        )

    def limit_steps(self, max_num_batched_tokens: int) -> None:
        """Limit steps, after which windows free blocks, to this number of tokens; call it before the first request."""
        self.max_num_batched_tokens = max_num_batched_tokens
        geometry, in_flight = self.geometry, max_num_batched_tokens * self._steps_in_flight
        places = range(len(geometry.groups))
        self.admission_caps = [geometry.admission_cap(place, in_flight, self.max_model_len) for place in places]
        self._chunks = ChunkEnds(geometry, self._coordinator.policies, max_num_batched_tokens)

    def _begin(self, geometry: GroupGeometry) -> None:
        """Start with all blocks free and none cached."""
        self.geometry = geometry
        self.hasher = self.hasher.looking_ahead(geometry.lookahead)
        self._pool = NamedPool(self.num_blocks, len(geometry.groups), self.removed, front=not geometry.caching)
        self._coordinator = Coordinator(geometry, self._pool, self)

    def turn_caching_off(self) -> None:
        """Turn caching off; call it before the first request. Each request then has one block per state group."""
        super().turn_caching_off()
        self._begin(self.geometry.uncached())
        self.limit_steps(self.max_num_batched_tokens)

    def attach_connector(self) -> None:
        """Attach a KV connector, before the first request: a draft model then makes hits drop a block in any case."""
        if self.speculative is not None and not self.speculative.connector:
            self.speculative = replace(self.speculative, connector=True)
            self._begin(self._geometry_of(self.geometry.groups))
            self.limit_steps(self.max_num_batched_tokens)

    def attach_offload(self, offload: WriteThrough, copies: object) -> None:
        """Put a host tier below the manager, before its first request, and record named states for it."""
        super().attach_offload(offload, copies)
        self._coordinator.note_states()

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def pool(self) -> NamedPool:
        """The pool of its blocks, for a connector that holds and frees blocks itself."""
        return self._pool

    @property
    def num_active_blocks(self) -> int:
        """Physical blocks in use."""
        return self.num_blocks - len(self._pool.free)

    @property
    def num_active_block_refs(self) -> int:
        """References to blocks in use."""
        return sum(self._pool.refs)

    @property
    def num_free_blocks(self) -> int:
        """Physical blocks that no request uses, cached or not: the length of the queue."""
        return len(self._pool.free)

    @property
    def num_inactive_blocks(self) -> int:
        """Cached blocks of the attention group that no request uses; every copy counts. Walks the queue."""
        return len(self.inactive_blocks())

    @property
    def active_blocks(self) -> dict[Block, int]:
        """References to each block in use, added up over copies and groups; a block without a name is named by its
        number as UUID.
        """
        out: dict[Block, int] = {}
        for number, refs in enumerate(self._pool.refs):
            if refs:
                names = self._pool.names(number)
                block: Block = names[0][1] if names else UUID(int=number)
                out[block] = out.get(block, 0) + refs
        return out

    def references(self, block: Block) -> int:
        """Return the references to one block now, added up over copies and groups; 0 if it is not in use."""
        pool = self._pool
        if isinstance(block, UUID):
            known = block.int <= self.num_blocks and not pool.names(block.int)
            return pool.refs[block.int] if known else 0
        held = {each for group in range(len(pool.cached)) for each in pool.holders(group, block)}
        return sum(pool.refs[each] for each in held)

    def inactive_blocks(self) -> list[int]:
        """Return the cached blocks of the attention group that no request uses, in eviction order."""
        firsts = [names[0] for block in self._pool.free if (names := self._pool.names(block))]
        return [block_hash for group, block_hash in firsts if group == self._main]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> list[int]:
        """Return the names that the attention group has cached in a tier, in use or not; copies repeated."""
        if tier != StorageTier.DEVICE:
            return self._resident_below(tier, self._main)
        return [block_hash for group, block_hash in self.resident_names() if group == self._main]

    def resident_names(self) -> list[tuple[int, int]]:
        """Return the names of all cached blocks of all groups, (group, hash), in use or not; copies repeated."""
        pool = self._pool
        return [name for block in range(1, self.num_blocks + 1) for name in pool.names(block)]

    @property
    def free_queue(self) -> list[int]:
        """Numbers of the blocks that no request uses, in the order in which they would be taken."""
        return list(self._pool.free)

    # ------------------------------------------------------------------------------------------------ requests

    def new_request(
        self,
        prompt: Prompt | TokenIds,
        *,
        rng: Random | None = None,
        keys: ExtraKeys | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> GroupRequest:
        """Make a request of this engine, without blocks yet.

        Args:
            prompt: tokens; or hashes, if all groups have the same block size.
            rng: source of the names of generated blocks if the prompt has only hashes.
            keys: extra keys that are hashed with its tokens, instead of the prompt's own keys.
            skip_reading_prefix_cache: see `GroupRequest`.

        Raises:
            ValueError: the prompt is empty or longer than `max_model_len`, its hashes do not fit, or it has only hashes
                although tokens are needed.
        """
        prompt, main = Prompt.of(prompt), self.geometry.groups[self._main].block_size
        unit = self.geometry.hash_unit if self.enable_caching else main
        if not prompt.has_tokens and self.enable_caching and self.needs_tokens and not self.geometry.lookahead:
            raise ValueError(
                f"a prompt of hashes has no tokens: this engine has blocks of several sizes, and hashes {unit} tokens "
                "at a time"
            )
        request = GroupRequest(self._hashed(prompt, unit, rng, keys), len(self.geometry.groups), (self._main, main))
        self._check_length(len(request))
        request.skip_reading_prefix_cache = skip_reading_prefix_cache
        return request

    def _check_length(self, tokens: int) -> None:
        if tokens > self._most_tokens:
            raise ValueError(f"a request has at most {self._most_tokens} tokens here (max_model_len), got {tokens}")

    @property
    def needs_tokens(self) -> bool:
        """Whether prompts of hashes are refused: its groups have several block sizes, or names look ahead."""
        return bool(self.geometry.lookahead) or {each.block_size for each in self.geometry.groups} != {
            self.geometry.hash_unit
        }

    def another(self, request: GroupRequest) -> GroupRequest:
        """Make a request with the same tokens and no blocks."""
        main = self.geometry.groups[self._main].block_size
        return GroupRequest(request.tokens, len(self.geometry.groups), (self._main, main))

    def get_computed_blocks(self, request: GroupRequest) -> ComputedBlocks:
        """Return the longest hit of a request without blocks that all groups can resume from. Changes nothing.

        The last token is computed even if it is cached, because its output is needed.
        """
        found, changes, length = request._found, self._pool.changes, len(request)  # noqa: SLF001 - one family
        if found is None or found[:2] != (changes, length):
            found = request._found = changes, length, self._coordinator.lookup(request)  # noqa: SLF001 - as above
        return found[2]

    def report_hits(self, request: GroupRequest) -> None:
        """Publish the hits of a look-up as `BlockPoolManager.report_hits` does.

        The report names all blocks of the hit for each group, also blocks that the group does not hold.

        Raises:
            FullReportError: the report ends the engine.
        """
        hit = self.get_computed_blocks(request).num_tokens
        self.check_reported(hit)
        if not hit:
            return
        self._lora_ids.use(request.tokens.keys)
        hashed = len(request.tokens.names) * request.tokens.block_size
        for number, group in enumerate(self.geometry.groups):
            size = group.block_size
            end = -(-hit // size) * size
            if end > hashed:
                raise FullReportError(
                    f"a full report ends this engine: the hit of {hit} tokens ends inside a block of {size}, "
                    "of which the request has no full hash (vLLM 0.33.0: an IndexError; all requests are lost)"
                )
            self._publish_stored(request, number, size, (0, end), range(size, end + 1, size), is_report=True)

    def missing_groups(self, found: ComputedBlocks) -> tuple[int, tuple[str, ...]]:
        """Return the number of tokens that full attention has of a looked-up prompt, and the groups, with their sizes,
        that cannot resume there.
        """
        groups = self.geometry.groups
        short = tuple(groups_text([groups[each]]) for each in found.short) if found.short else ()
        return max(found.num_tokens, found.junction), short

    def chunk_tokens(
        self,
        request: GroupRequest,
        most: int,
        new_computed_blocks: ComputedBlocks | None = None,
        num_external_tokens: int = 0,
    ) -> int:
        """Return the number of tokens of a request's next chunk.

        It is less than fits if states are cached at the chunk's end, or if draft modules need more tokens behind it.

        Args:
            request: the request.
            most: remaining tokens that fit into the step, drafts included.
            new_computed_blocks: the hits of a request without blocks.
            num_external_tokens: tokens behind the hits that come from elsewhere in this step.

        Returns:
            The number; 0 if the request has to wait for a step with more room.
        """
        start, junction = request.num_computed_tokens, request.junction
        if new_computed_blocks is not None:
            start += new_computed_blocks.num_tokens + num_external_tokens
            junction = new_computed_blocks.junction
        if new_computed_blocks is None and self.speculative is not None:
            most = max(min(most, self._most_tokens - 1 - start), 0)
        return self._chunk(request.tokens.num_prompt_tokens, len(request), start, most, junction)

    def exported_alone(self, prompt: int) -> int:
        """Count the states that an uncached prompt in one chunk takes in addition to the running ones."""
        return self._chunks.taken(prompt, 0, 0, prompt)

    def chunks_alone(self, prompt: int, most: int | None) -> Iterator[tuple[int, int, int]]:
        """Yield the chunks of an uncached prompt: start, end, and the number of states that the chunk takes in addition
        to the running ones.

        Args:
            prompt: number of its tokens.
            most: the most tokens of a step; None for no limit.
        """
        before = start = 0
        while start < prompt:
            fit = min(most or prompt, prompt - start)
            end = start + (
                self._chunk(prompt, prompt, start, fit) or fit
            )  # a chunk of 0 waits for more room, not for blocks
            yield start, end, self._chunks.taken(prompt, before, start, end)
            before, start = start, end

    def _chunk(self, prompt: int, length: int, start: int, most: int, junction: int = 0) -> int:
        tokens = self._chunks.tokens(prompt, length, start, most, junction)
        if self.speculative is None or self.speculative.chunk_lookahead < 2:
            return tokens
        left = length - start - tokens
        need = self.speculative.chunk_lookahead
        return max(tokens - (need - left), 0) if 0 < left < need else tokens

    def missing_blocks(
        self,
        request: GroupRequest,
        num_tokens: int,
        new_computed_blocks: ComputedBlocks | None = None,
        *,
        for_admission: bool = False,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """Count the free blocks that a request needs for its first `num_tokens` in one step. Changes nothing.

        The count exceeds the capacity if the request hits a state that was cached in this step and is not computed yet.

        Args:
            request: the request.
            num_tokens: number of leading tokens.
            new_computed_blocks: the blocks that `get_computed_blocks` found.
            for_admission: count each group only up to its cap, because its window frees blocks on the way.
            num_external_tokens: tokens behind the hits that come from elsewhere: of these, windows need only the blocks
                before the next token.
            num_lookahead_tokens: slots beyond `num_tokens`; states have none.

        Raises:
            ValueError: `num_tokens` exceeds `max_model_len`.
        """
        self._check_length(num_tokens)
        hit = 0 if new_computed_blocks is None else new_computed_blocks.num_tokens
        upto = min(num_tokens, self._most_tokens)
        span = Span(hit, request.num_computed_tokens + hit + num_external_tokens, upto, upto + num_lookahead_tokens)
        caps = self.admission_caps if for_admission else self._uncapped
        return self._coordinator.missing(request, span, new_computed_blocks, caps, asks=True)

    def allocate_slots(
        self,
        request: GroupRequest,
        num_new_tokens: int,
        new_computed_blocks: ComputedBlocks | None = None,
        *,
        num_lookahead_tokens: int | None = None,
        full_sequence_must_fit: bool = False,
        num_external_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> tuple[list[int], ...] | None:
        """Get blocks for tokens that are computed in this step, and cache the blocks that they complete.

        Args:
            request: the request.
            num_new_tokens: number of tokens after those already computed, which include the hits.
            new_computed_blocks: the blocks that `get_computed_blocks` found just before, for a request without blocks.
            num_lookahead_tokens: slots beyond the tokens for drafts; None: those of the manager's draft model.
            full_sequence_must_fit: admit the request only if there are blocks for all its tokens.
            num_external_tokens: tokens between the hits and the new tokens that come from elsewhere; with these,
                `num_new_tokens` may be 0.
            delay_cache_blocks: the external tokens have not arrived: `cache_blocks` caches the blocks that they
                complete.

        Returns:
            The new blocks of each group; None if there are too few free blocks. Nothing has changed then, except that
            blocks behind a window are freed.

        Raises:
            ValueError: no tokens, or more than `max_model_len`; or hits for a request that has blocks.
            OffloadStopError: states came from elsewhere within the step, and need one block more than was counted and
                is free; this ends the engine.
        """
        if new_computed_blocks is not None and request.holds_blocks:
            raise ValueError("new_computed_blocks are for a request without blocks; this one has some")
        least = 0 if num_external_tokens or (new_computed_blocks is not None and not request.computes_last_token) else 1
        if num_new_tokens < least:
            raise ValueError(f"num_new_tokens must be at least 1, got {num_new_tokens!r}")
        coordinator, free = self._coordinator, self._pool.free
        hit = 0 if new_computed_blocks is None else new_computed_blocks.num_tokens
        start, most = request.num_computed_tokens + hit + num_external_tokens, self._most_tokens
        upto = start + num_new_tokens
        self._check_length(upto)
        if new_computed_blocks is not None:
            request.junction = new_computed_blocks.junction
        if full_sequence_must_fit:
            needed = self.missing_blocks(
                request,
                len(request),
                new_computed_blocks,
                for_admission=True,
                num_external_tokens=num_external_tokens,
            )
            if needed > len(free):
                return None
        if num_lookahead_tokens is None:
            num_lookahead_tokens = 0 if self.speculative is None else self.speculative.slots
        coordinator.retire(request, self._processed(request, start))
        span = Span(hit, start, upto, min(upto + num_lookahead_tokens, most))
        if coordinator.missing(request, span, new_computed_blocks, self._uncapped, asks=False) > len(free):
            return None
        self._lora_ids.use(request.tokens.keys)
        if new_computed_blocks is not None:
            request.short = self.missing_groups(new_computed_blocks)
        try:
            taken = coordinator.fill(request, span, new_computed_blocks)
        except KeyError:
            # A loaded state and the running one are two blocks; the count includes one.
            if not (num_external_tokens and coordinator.has_states):
                raise
            raise OffloadStopError(
                f"a load within a step ends this engine: states need a block more than was counted, and none of "
                f"{self.num_blocks} is free (vLLM 0.33.0: a ValueError in get_new_blocks; all requests are lost)"
            ) from None
        request.num_computed_tokens = upto
        if not delay_cache_blocks:
            coordinator.cache(request, min(upto, len(request)))
        if self._publisher.failure is not None:
            self._publisher.surface()
        return taken

    def cache_blocks(self, request: GroupRequest, num_tokens: int) -> None:
        """Cache the blocks that the first `num_tokens` tokens complete and that were not cached at allocation."""
        self._coordinator.cache(request, min(num_tokens, len(request)))
        if self._publisher.failure is not None:
            self._publisher.surface()

    def take_output(
        self,
        request: GroupRequest,
        num_tokens: int,
        sampled: Sequence[int] | None,
        *,
        room: int = _NO_LIMIT,
        stale: bool = False,
    ) -> int:
        """Process the model's answer to the oldest step in flight of a request: accepted drafts and one more token.

        Blocks of rejected drafts stay and are used again; blocks that are now complete are cached.

        Args:
            request: the request; each of its steps was counted by `Drafts.scheduled`.
            num_tokens: number of tokens of that step.
            sampled: the accepted drafts and one more token; None for a chunk that samples nothing.
            room: the most tokens that the request may still generate.
            stale: the request was preempted since: its tokens are appended, and nothing else changes.

        Returns:
            The number of tokens taken: up to the request's last token.
        """
        drafts, request.num_in_flight_tokens = request.drafts.answered(), request.num_in_flight_tokens - num_tokens
        if sampled is None:
            return 0
        taken = sampled[: min(room, self._most_tokens - len(request))]
        request.tokens.extend(taken)
        if stale:
            return len(taken)
        rejected = drafts - (len(sampled) - 1) if drafts else 0
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= rejected
        if request.drafts.placeholders > 0:
            request.drafts.placeholders -= rejected
        request.num_computed_tokens -= len(sampled) - len(taken)
        request.drafts.placeholders = max(request.drafts.placeholders - len(sampled), 0)
        self.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
        return len(taken)

    def free(self, request: GroupRequest) -> None:
        """Free all blocks of a request, group by group, tail first. A request without blocks is left as it is."""
        self._coordinator.free(request)

    def take_blocks(self, request: GroupRequest) -> list[int]:
        """Take all blocks from a request, group by group, without freeing them; see `DeferredFrees`."""
        blocks = [block for table in request.tables for block in table.blocks if block != NULL]
        self._coordinator.forget_states(request)
        request.forget_blocks()
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks that were taken from a request, all groups in one list, the last one first."""
        self._pool.release(reversed(blocks))

    def nameless_blocks(self, request: GroupRequest) -> tuple[list[int], ...]:
        """Return the blocks of a request that have no name, by group: tokens from elsewhere are read into them."""
        names = self._pool.names
        return tuple(
            [block for block in table.blocks if block != NULL and not names(block)] for table in request.tables
        )

    def free_behind_windows(self, request: GroupRequest, processed: int | None = None) -> None:
        """Free the blocks that no token after the processed ones attends to, as vLLM does before it notifies a
        connector of a request's end.

        None for `processed`: the computed and answered tokens.
        """
        if processed is None:
            processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        self._coordinator.retire(request, processed)

    def retirable_blocks(self, request: GroupRequest) -> int:
        """Count the blocks behind windows that the next step of a request frees before it takes new ones."""
        return self._coordinator.retirable(request, self._processed(request, request.num_computed_tokens))

    def _processed(self, request: GroupRequest, computed: int) -> int:
        return max(0, min(computed, self._most_tokens) - request.num_in_flight_tokens)

    def quiet_tokens(self, request: GroupRequest) -> int:
        """Return how many steps of one token a request can compute before one takes, fills or frees a block."""
        computed = request.num_computed_tokens
        policies = self._coordinator.policies
        return min(policy.quiet_tokens(table, computed) for policy, table in zip(policies, request.tables, strict=True))

    def new_step_starts(self) -> None:
        """Start a step of the scheduler: states cached in the previous step are computed now, and may be hit."""
        self._coordinator.start_step()

    def end_step(self) -> list[tuple[int, int]]:
        """End a step of the scheduler: release the blocks copied in it and their copies; return these pairs."""
        return self._coordinator.end_step()

    def take_copies(self) -> list[tuple[int, int]]:
        """Take the pairs of blocks that were copied in this step, instead of `end_step`.

        Both blocks are held until they are given back (`DeferredFrees.copied`).
        """
        return self._coordinator.take_copies()

    def take_states(self) -> dict[GroupRequest, list[StateHandOff]]:
        """Take the states that were named since the last call, by request, for a connector that stores them."""
        return self._coordinator.take_states()

    def cut_hits(self, found: ComputedBlocks, num_tokens: int) -> ComputedBlocks:
        """Cut hits down to `num_tokens` tokens, a whole number of blocks; a state at their end may be missing."""
        sizes = [group.block_size for group in self.geometry.groups]
        blocks = tuple(each[: num_tokens // size] for each, size in zip(found.blocks, sizes, strict=True))
        return found._replace(num_tokens=num_tokens, blocks=blocks)

    def reset_prefix_cache(self) -> bool:
        """Drop the whole cache and publish a Cleared; do nothing and return False while a block is in use.

        The queue keeps its order.
        """
        if len(self._pool.free) < self.num_blocks:
            return False
        self._pool.reset()
        return self._cleared()

    def clear(self) -> bool:
        """Reset the prefix cache; see `reset_prefix_cache`."""
        return self.reset_prefix_cache()

    def rehearsal(self, request: GroupRequest, extra_blocks: int) -> tuple[VllmHybridManager, GroupRequest]:
        """Copy this engine and a request to try steps; the copy has `extra_blocks` more blocks and no publisher."""
        silent = EventPublisher(None, self.dp_rank)
        nothing = {id(self.offload): None, id(self.copies): None}
        manager, copied = deepcopy((self, request), {id(self._publisher): silent, **nothing})
        manager._pool.grow(extra_blocks)  # noqa: SLF001 - its own
        return manager, copied

    # --------------------------------------------------------------------------------------------- what is published

    def stored(
        self, request: GroupRequest, group: int, *, block_size: int, start: int, ends: Sequence[int], end: int
    ) -> None:
        """Publish the blocks that a group has named in a span; see `GroupJournal`."""
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "allocation", map(request.key, ends))
        if self._publisher.sink is not None and not self._publisher.passes_over(1):
            self._publish_stored(request, group, block_size, (start, end), ends)

    def _publish_stored(
        self,
        request: GroupRequest,
        group: int,
        block_size: int,
        span: tuple[int, int],
        ends: Sequence[int],
        *,
        is_report: bool = False,
    ) -> None:
        start, end = span
        publisher = self._publisher
        tokens, keys, extra = request.tokens, request.tokens.keys, self._extras[group]
        first, last = start // block_size, end // block_size
        if keys is not None:
            extra = group_extra(
                group,
                self.geometry.groups[group].kind,
                self.geometry.groups[group].window,
                _of_kept(
                    keys.carried(first, last, block_size, self._lora_ids),
                    [each // block_size - 1 - first for each in ends],
                ),
            )
        if is_report:
            extra = {**(extra or {}), REPORT: True}
        if isinstance(tokens, LookaheadTokens):
            extra = {**(extra or {}), LOOKAHEAD: tokens.after(ends)}
            if keys is not None and keys.multimodal:
                places = (each // block_size - 1 for each in ends)
                extra[LOOKAHEAD_KEYS] = [keys.block_keys(place, block_size, tokens.lookahead) for place in places]
        if len(ends) == last - first and block_size == tokens.block_size:
            data, token_ids = tokens.stored(first, last)
            publisher.publish(data, token_ids, extra=extra)
            return
        parent = request.key(start) if start else None
        names = tuple(map(request.key, ends))
        blocks = tokens.rows(first, last, block_size)
        if len(ends) < last - first:
            publisher.publish(SparseStored(parent, names, end - start, block_size), blocks, extra=extra)
            return
        local = keyed_block_hashes(
            tokens.cut(start, end + self.geometry.lookahead), block_size, keys, first, self.geometry.lookahead
        )  # a prompt with only hashes does not get here: its blocks are units
        publisher.publish(Stored(parent, names, tuple(local)), blocks, extra=extra)

    def removed(self, names: Sequence[tuple[int, int]]) -> None:
        """Publish one Removed per name; see `GroupJournal`."""
        if LOG.isEnabledFor(TRACE_LEVEL):
            trace(self, "eviction", [block_hash for _, block_hash in names])
        publisher = self._publisher
        if publisher.sink is None or publisher.passes_over(len(names), len(names)):
            return
        for group, block_hash in names:
            publisher.publish(Removed((block_hash,)), extra=self._removed_extras[group])


def check_speculative(value: object) -> None:
    """Check that a value is a draft model of vLLM, or None.

    Raises:
        ValueError: it is neither.
    """
    if value is not None and not isinstance(value, Speculative):
        raise ValueError(f"speculative must be a Speculative, or None; got {value!r:.80}")


def _of_kept(carried: dict[str, Any], kept: Sequence[int]) -> EventExtra:
    """Return the extra fields of a Stored, with the keys of the kept blocks only."""
    if "extra_keys" in carried:
        keys = [carried["extra_keys"][place] for place in kept]
        if keys:
            carried["extra_keys"] = keys
        else:
            del carried["extra_keys"]
    return carried


def of_groups(
    groups: object, settings: dict[str, Any], options: dict[str, Any]
) -> VllmHybridManager | BlockPoolManager:
    """Make the manager of an engine with these groups: a `BlockPoolManager` for a single group of full attention.

    Args:
        groups: its groups; one is of full attention or MLA.
        settings: arguments that only `VllmHybridManager` has.
        options: arguments that both managers have.

    Raises:
        ValueError: an argument is invalid.
    """
    taken = checked_groups(groups)
    if not any(group.kind in FULL for group in taken):
        kinds = ", ".join(group.kind for group in taken)
        raise ValueError(f"groups must have one of kind {' or '.join(map(repr, FULL))}, got {kinds}")
    if len(taken) > 1 or taken[0].kind != FULL_ATTENTION or any(settings.get(name) for name in _OF_STEPS):
        return VllmHybridManager(groups=taken, **settings, **options)
    VllmHybridManager(
        groups=taken, **settings, **{**options, "num_blocks": 1, "sink": None}
    )  # raises for a wrong value
    return BlockPoolManager(**{"block_size": taken[0].block_size, **options})


def of_draft_model(settings: dict[str, Any], options: dict[str, Any]) -> VllmHybridManager:
    """Make the manager of an engine with a draft model and one cache of full attention.

    It is not a `BlockPoolManager`: support for a draft model there (slots, drops, blocks that are named late) made
    engines in time without a draft model 3.1 % slower, and workers 0.6 % (15 runs each by turns, CPU time). That is
    without drafts in flight, whose code would also exist twice. With a draft model a worker takes three times the CPU
    time of one without, because each step is scheduled and answered.

    Args:
        settings: arguments that only `VllmHybridManager` has, including the draft model.
        options: arguments that all managers of vLLM have.

    Raises:
        ValueError: an argument is invalid.
    """
    check_speculative(settings["speculative"])
    return by_groups(settings, options)


def by_groups(settings: dict[str, Any], options: dict[str, Any], groups: Any = None) -> VllmHybridManager:
    """Make the `VllmHybridManager` of an engine with these groups; the default is one group of full attention."""
    taken = [CacheGroup(FULL_ATTENTION, options.get("block_size", 16))] if groups is None else groups
    return VllmHybridManager(groups=taken, **settings, **options)
