"""TensorRT-LLM's V2 cache manager: its engine's calls, its layer groups and levels, and its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import Any, ClassVar, Final, cast
from uuid import UUID

from pytest_kvmock.engines.trtllm.group_events import GroupEvents
from pytest_kvmock.engines.trtllm.hashes import HASH_ALGOS, V1Hasher, V2Hasher
from pytest_kvmock.engines.trtllm.iteration_events import Queued
from pytest_kvmock.engines.trtllm.iteration_manager import IterationManager
from pytest_kvmock.engines.trtllm.page_pools import PagePools
from pytest_kvmock.engines.trtllm.prefix_tree import LayerGroup, PrefixTree
from pytest_kvmock.engines.trtllm.request_tokens import checked_prompt
from pytest_kvmock.engines.trtllm.tree_block import Page, TreeBlock
from pytest_kvmock.engines.trtllm.v2_request import V2Request
from pytest_kvmock.values.checks import is_integer, not_allowed_text
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.moves import Block
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, group_extra
from pytest_kvmock.values.sinks import Sink
from pytest_kvmock.values.tokens import Prompt, TokenIds

LEVELS: Final = (StorageTier.DEVICE, StorageTier.HOST_PINNED, StorageTier.HOST_PINNED)
"""The tier of each level. An Updated has only the level's number; all levels below the device count as the host."""


class V2Manager(IterationManager):
    """Caches prompts, but no output, in a radix tree whose blocks have a page for each layer group, on several levels.

    An iteration ends with `flush`; its events are published only then.

    Args:
        num_blocks: pages of the device, at least 1: a number for each pool, or a list with one number a pool.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        backend: name of the backend.
        levels: pages of each level below the device, at most two levels: each as for `num_blocks`.
        groups: layer groups: (window in tokens, or None for all; number of leading tokens that are always kept).
        pool_groups: the pool of each layer group, from 0; None: one pool for all.
        max_seq_len: maximum tokens of a request; also the published window of a layer group without a window. None: the
            tokens of the pages.
        partial_reuse: whether a part of a cached block is reused.
        max_util_for_resume: a request is not resumed while a larger share of a pool than this is in use.
        hash_algo: "v1_block_key", "v2_sha256" or "v2_sha256_64".
        event_buffer: number of events of an iteration that are kept; older ones are dropped. None to keep all.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        groups: the layer groups.
        windows: the window of each layer group, in tokens, as in its events.
        attention_group: the layer group with the longest window.
        pools: the pages.
        tree: the blocks that look-ups find.
        requests: requests that have blocks, in order of arrival.
        max_seq_len: as given.
        hash_algo: as given.
        hasher: names the blocks of requests without adapter and salt.
    """

    takes: ClassVar[str] = (
        "new_request, prepare_context, resize_context, update_context, try_allocate_generation, update_generation, "
        "close, flush"
    )

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int],
        block_size: int = 32,
        dp_rank: int = 0,
        sink: Sink | None = None,
        backend: str = "trtllm_v2",
        levels: Sequence[int | Sequence[int]] = (),
        groups: Sequence[tuple[int | None, int]] = ((None, 0),),
        pool_groups: Sequence[int] | None = None,
        max_seq_len: int | None = None,
        partial_reuse: bool = True,
        max_util_for_resume: float = 0.95,
        hash_algo: str = "v1_block_key",
        event_buffer: int | None = None,
    ) -> None:
        self._events = GroupEvents()
        pages = num_blocks if is_integer(num_blocks) or not isinstance(num_blocks, Sequence) else _most(num_blocks)
        super().__init__(
            backend=backend,
            num_blocks=pages,
            block_size=block_size,
            dp_rank=dp_rank,
            sink=sink,
            max_seq_len=max_seq_len,
            event_buffer=event_buffer,
            flags={"partial_reuse": partial_reuse},
            events=self._events,
        )
        self.groups = _layer_groups(groups, block_size)
        pool_of = _pools(pool_groups, len(self.groups))
        slots = _slots([num_blocks, *_lower(levels)], 1 + max(pool_of))
        if isinstance(max_util_for_resume, bool) or not isinstance(max_util_for_resume, int | float):
            raise ValueError(f"max_util_for_resume must be a number from 0 to 1, got {max_util_for_resume!r:.80}")  # noqa: TRY004 - one error
        if not 0 <= max_util_for_resume <= 1:
            raise ValueError(f"max_util_for_resume must be a number from 0 to 1, got {max_util_for_resume!r:.80}")
        if not isinstance(hash_algo, str) or hash_algo not in HASH_ALGOS:
            raise ValueError(f"hash_algo: {not_allowed_text(hash_algo, HASH_ALGOS)}")
        self.hash_algo, self._max_util = hash_algo, max_util_for_resume
        self._hasher = HASH_ALGOS[hash_algo]
        self.hasher = self._hasher()
        self.pools = PagePools(slots, pool_of, self._events)
        self.tree = PrefixTree(self.groups, block_size, self.pools, self._events, partial_reuse=partial_reuse)
        self.max_seq_len = block_size * min(slots[0]) if max_seq_len is None else max_seq_len
        self.windows = [self.max_seq_len if rule.window is None else rule.window for rule in self.groups]
        longest = max(
            range(len(self.groups)), key=lambda group: (self.groups[group].window is None, self.windows[group])
        )
        self.attention_group = longest
        self.num_blocks = slots[0][pool_of[longest]]
        self.requests: dict[V2Request, None] = {}
        for group in range(len(self.groups)):
            self._events.created(group, tuple(map(sum, slots)))

    # -------------------------------------------------------------------------------------------------- requests

    def new_request(
        self,
        prompt: Prompt | TokenIds,
        *,
        adapter: int | None = None,
        cache_salt: int | None = None,
        rng: Random | None = None,
        to_look: bool = False,
    ) -> V2Request:
        """Return a new request, without blocks.

        Args:
            prompt: its tokens.
            adapter: number of its LoRA adapter; None: the number of the prompt's `lora_name`, by first use.
            cache_salt: number of its salt, used unchanged; None: the prompt's salt.
            rng: source of the names of partial blocks.
            to_look: whether it is only for `lookup`: then its adapter is not recorded.

        Raises:
            ValueError: the prompt is empty, or has only hashes.
        """
        prompt = checked_prompt(prompt)
        assert prompt.tokens is not None
        hasher = self._hasher(*self._scope(prompt.keys, adapter, cache_salt, to_look=to_look))
        return V2Request([*prompt.tokens], self.block_size, hasher, prompt.keys, rng=rng or self._rng)

    def probe(self, tokens: Sequence[int], hasher: V1Hasher | V2Hasher | None = None) -> int:
        """Count how many of the given tokens would be reused now. Changes nothing."""
        found = self.tree.match(hasher or self.hasher, tokens) if self.enable_caching else []
        return sum(count for _, count in found)

    def lookup(self, request: V2Request) -> int:
        """Count the tokens that a request would reuse now, at most all but its last one. Changes nothing."""
        return self.probe(request.tokens[:-1], request.hasher)

    def first_new_block(self, request: V2Request) -> int | None:
        """Return the name of the first full block of a request that the tree lacks.

        None if there is no such block, with several layer groups, or without caching.
        """
        if len(self.groups) > 1 or not self.enable_caching:
            return None
        node, size = self.tree.roots.get(request.hasher), self.block_size
        for place, name in enumerate(request.names):
            node = None if node is None else node.children.get(tuple(request.tokens[place * size : (place + 1) * size]))
            if node is None:
                return name
        return None

    def prepare_context(self, request: V2Request) -> tuple[int, bool]:
        """Let a request hold its hits, and resume it.

        Returns:
            Number of its tokens that are hit, and whether it runs; if not, it holds the hits, suspended.

        Raises:
            ValueError: it has begun already.
        """
        if request in self.requests:
            raise ValueError("prepare_context: the request has begun already")
        found = self.tree.match(request.hasher, request.tokens[:-1]) if self.enable_caching else []
        request.begin(self.tree, self.pools, self._events, found)
        if not self.enable_caching:
            request.stop_storing()
        self.requests[request] = None
        return request.committed, self.resume(request)

    def resume(self, request: V2Request) -> bool:
        """Resume a suspended request: move its pages to the device. False if there is no room, or too much in use."""
        return request.resume(self._max_util)

    def suspend(self, request: V2Request) -> None:
        """Suspend a request: its pages may move to lower levels, but are not lost."""
        request.suspend()

    def resize_context(self, request: V2Request, tokens: int, *, first_chunk: bool = True) -> bool:
        """Make room for the first tokens of a prompt; return False, and suspend a first chunk, if there is none."""
        fits = request.resize(max(request.capacity, tokens), request.history)
        if not fits and first_chunk:
            request.suspend()
        return fits

    def update_context(self, request: V2Request, upto: int) -> None:
        """Count the first tokens of a prompt as computed: store full blocks, and at its end also the last block."""
        request.commit(upto) if self.enable_caching else request.resize(request.capacity, upto)
        if upto >= request.num_prompt_tokens:
            request.stop_storing()

    def try_allocate_generation(self, request: V2Request) -> bool:
        """Make room for one more token, and resume the request if it is suspended; return False if there is none."""
        if not request.is_active and not self.resume(request):
            return False
        return request.resize(request.capacity + 1, request.history)

    def update_generation(self, request: V2Request, history: int) -> bool:
        """Count `history` tokens as history, and free the pages that have left a window."""
        return request.resize(request.capacity, history)

    def close(self, request: V2Request) -> None:
        """End a request, and free its pages."""
        request.close()
        del self.requests[request]

    def pages_needed(self, request: V2Request, length: int) -> int:
        """Count the free device pages that room for `length` tokens would take, in the scarcest pool.

        Hits count, except those that other requests lock. A partial hit also counts a page for the copy of its block.

        Returns:
            The request fits if this is at most `num_free_blocks`. One more than that while it may not be resumed.
        """
        available = self.num_free_blocks
        size, begun = self.block_size, request in self.requests
        found = [] if begun or not self.enable_caching else self.tree.match(request.hasher, request.tokens[:-1])
        hit = sum(tokens for _, tokens in found)
        if not request.is_active and self.pools.utilization() > self._max_util:
            return available + 1
        history = request.history if begun else hit
        new = range(len(request.held) if begun else len(found), -(-length // size))
        counts = []
        for group, rule in enumerate(self.groups):
            passed = rule.passed(history, size)
            pages = [block.pages[group] for place, (block, _) in enumerate(found) if place not in passed]
            unlocked = sum(page is not None and not page.locks for page in pages)
            counts.append(unlocked + (hit % size > 0) + sum(place not in passed for place in new))
        rows = zip(self.pools.pools_of(counts), self.pools.free[0], self.pools.queues[0], strict=True)
        return available + max(count - free - len(queue) for count, free, queue in rows)

    # ---------------------------------------------------------------------------------------------------- events

    def _extra(self, event: Queued) -> dict[str, Any]:
        """Return the extra fields; the layer group's id is also the cache group's."""
        group = event.window
        window = self.windows[group]
        kind = FULL_ATTENTION if group == self.attention_group else "sliding_window"
        extra = {
            "window_size": window,
            "layer_group_id": group,
            "hash_algo": self.hash_algo,
            **(group_extra(group, kind, None if kind == FULL_ATTENTION else window) or {}),
        }
        if self.hash_algo == "v2_sha256" and event.digests:
            extra["digests"] = event.parent_digest, tuple(event.digests)
        return extra

    # --------------------------------------------------------------------------------------------------- queries

    @property
    def num_free_blocks(self) -> int:
        """Number of device pages that no running request uses; the minimum over pools."""
        rows = zip(self.pools.free[0], self.pools.queues[0], strict=True)
        return min(free + len(queue) for free, queue in rows)

    @property
    def num_active_blocks(self) -> int:
        """Number of device pages that requests use, in the pool with the fewest free pages."""
        return self.num_blocks - min(self.num_free_blocks, self.num_blocks)

    def free_slots(self) -> list[list[list[int]]]:
        """Return the numbers of free slots and of evictable pages, by level and pool."""
        return [
            [[free, len(queue)] for free, queue in zip(*level, strict=True)]
            for level in zip(self.pools.free, self.pools.queues, strict=True)
        ]

    def _cached(self) -> Iterator[tuple[TreeBlock, Page]]:
        """Yield the blocks of the tree with their page of the attention group."""
        for block in self.tree.blocks():
            page = block.pages[self.attention_group]
            if page is not None:
                yield block, page

    @property
    def num_inactive_blocks(self) -> int:
        """Number of cached device blocks of the attention group that no request uses."""
        return sum(not page.level and page.is_droppable for _, page in self._cached())

    def _in_use(self) -> Iterator[tuple[Block, int]]:
        seen: dict[Page, int] = {}
        for request in self.requests:
            for block in request.held:
                page = block.pages[self.attention_group]
                if page is not None:
                    seen[page] = seen.get(page, 0) + 1
        for number, (page, refs) in enumerate(seen.items()):
            yield UUID(int=number) if page.block is None else page.block.name, refs

    def inactive_blocks(self) -> list[int]:
        """Return the device blocks in the tree that no request uses, in the order of eviction."""
        queue = self.pools.queues[0][self.pools.pool_of[self.attention_group]]
        pages = (page for page in queue if page.group == self.attention_group and page.is_droppable)
        return [block.name for page in pages if (block := page.found_block) is not None]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names of the blocks that the attention group has cached in a tier, partial blocks included."""
        return [block.name for block, page in self._cached() if LEVELS[page.level] == tier]

    def announced(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names that its events promise in a tier: the resident ones of the attention group."""
        return self.resident(tier)

    @property
    def tier_sizes(self) -> dict[StorageTier, int]:
        """Number of pages of each tier, over all pools."""
        sizes = Counter[StorageTier]()
        for tier, slots in zip(LEVELS, self.pools.slots, strict=False):
            sizes[tier] += sum(slots)
        return dict(sizes)

    def clear(self) -> bool:
        """Take all blocks out of the tree, with a Removed; do nothing and return False while there are requests."""
        if self.requests:
            return False
        self.tree.clear()
        self.flush()
        return True


def _most(slots: Sequence[int]) -> int:
    """Return the maximum number of pages of a pool, for the check; an invalid entry is returned unchanged."""
    wrong = [each for each in slots if not is_integer(each, 1)]
    return wrong[0] if wrong else max(slots, default=0)


def _layer_groups(groups: object, block_size: int) -> list[LayerGroup]:
    allowed = "groups are (window in tokens or None, sink tokens), at least one"
    if isinstance(groups, str) or not isinstance(groups, Sequence) or not groups:
        raise ValueError(f"{allowed}; got {groups!r:.80}")
    found = []
    for each in groups:
        if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != 2:
            raise ValueError(f"{allowed}; got {groups!r:.80}")
        window, sinks = each
        if not (window is None or is_integer(window, 1)) or not is_integer(sinks, 0) or (sinks and window is None):
            raise ValueError(
                "a layer group has a window of at least 1 token, or None, and sinks of at least 0, with a window "
                f"alone; got {each!r:.80}"
            )
        found.append(LayerGroup(window, -(-sinks // block_size)))
    return found


def _pools(pool_groups: object, count: int) -> list[int]:
    if pool_groups is None:
        return [0] * count
    numbers = [*pool_groups] if isinstance(pool_groups, Sequence) and not isinstance(pool_groups, str) else []
    if len(numbers) != count or not all(map(is_integer, numbers)) or {*numbers} != {*range(len({*numbers}))}:
        raise ValueError(
            f"pool_groups must be a pool of each of {count} layer groups, from 0, or None; got {pool_groups!r:.80}"
        )
    return numbers


def _lower(levels: object) -> list[Any]:
    if isinstance(levels, str) or not isinstance(levels, Sequence) or len(levels) >= len(LEVELS):
        raise ValueError(
            f"levels are pages of each of at most {len(LEVELS) - 1} levels below the device; got {levels!r:.80}"
        )
    return [*levels]


def _slots(levels: Sequence[object], pools: int) -> list[list[int]]:
    """Return the number of pages of each pool, by level."""
    found: list[list[int]] = []
    for level in levels:
        is_each = isinstance(level, Sequence) and not isinstance(level, str)
        row: list[Any] = [*cast("Sequence[Any]", level)] if is_each else [level] * pools
        if len(row) != pools or not all(is_integer(each, 1) for each in row):
            raise ValueError(f"a level has at least 1 page in each of {pools} pools; got {level!r:.80}")
        found.append(row)
    return found
