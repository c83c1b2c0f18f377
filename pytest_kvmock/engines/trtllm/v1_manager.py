"""TensorRT-LLM's V1 cache manager: its engine's calls, its windows, and its events.

One subject: a request in all windows together, and the events of an iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import Any, ClassVar, Final, NamedTuple
from uuid import UUID

from pytest_kvmock.engines.trtllm.cache_block import PRIMARY, CacheBlock
from pytest_kvmock.engines.trtllm.hashes import BlockKey, V1Hasher
from pytest_kvmock.engines.trtllm.iteration_events import REMOVED_ORDERS, IterationEvents, Queued
from pytest_kvmock.engines.trtllm.iteration_manager import IterationManager
from pytest_kvmock.engines.trtllm.request_tokens import checked_prompt
from pytest_kvmock.engines.trtllm.v1_request import Retention, V1Request
from pytest_kvmock.engines.trtllm.window_blocks import WindowBlocks
from pytest_kvmock.values.checks import check_integer, check_time, is_integer, not_allowed_text
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.moves import Block
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, group_extra
from pytest_kvmock.values.sinks import Sink
from pytest_kvmock.values.tokens import Prompt, TokenIds

LEVELS: Final = (StorageTier.DEVICE, StorageTier.HOST_PINNED)
"""The tier of each level."""


class Look(NamedTuple):
    """The result of a look-up.

    Attributes:
        keys: the keys that may be matched.
        needed: number of free level 0 blocks that the request would take; the maximum over windows.
        tokens: number of tokens that it would reuse, in the longest window.
    """

    keys: list[BlockKey]
    needed: int
    tokens: int


class V1Manager(IterationManager):
    """Caches the blocks of requests in one radix tree for each window, on two levels.

    An iteration ends with `flush`; its events are published only then. Windows are given in tokens.

    Args:
        num_blocks: blocks of level 0, the device, of each window, at least 1.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        backend: name of the backend.
        secondary_blocks: blocks of level 1, the host, of each window.
        windows: attention windows, each as tokens, or as (tokens, blocks, secondary blocks); None: one of
            `max_seq_len`.
        max_seq_len: maximum tokens of a request; None: the longest window, or the tokens of `num_blocks`.
        partial_reuse: whether a part of a cached block is reused.
        copy_on_partial_reuse: whether a block in use or with children is copied for this; if not, it is not matched.
        onboard: whether blocks move between the levels; if not, no block goes to level 1.
        offload_min_priority: a block with a lower priority is evicted from level 0 without a copy on level 1.
        removed_order: when a Removed is sent, "1.2" or "2026-03".
        event_buffer: number of events of an iteration that are kept; older ones are dropped. None to keep all.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        windows: the blocks of each window, ascending.
        requests: requests that have blocks, in order of arrival.
        max_seq_len: as given.
        hasher: names the blocks of requests without adapter and salt.
    """

    takes: ClassVar[str] = "new_request, add, new_token, store_context_blocks, add_token, remove, refresh, flush"

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 32,
        dp_rank: int = 0,
        sink: Sink | None = None,
        backend: str = "trtllm",
        secondary_blocks: int = 0,
        windows: Sequence[int | tuple[int, int, int]] | None = None,
        max_seq_len: int | None = None,
        partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        onboard: bool = True,
        offload_min_priority: int = 30,
        removed_order: str = "1.2",
        event_buffer: int | None = None,
    ) -> None:
        self._events = IterationEvents(removed_order)
        flags = {"partial_reuse": partial_reuse, "copy_on_partial_reuse": copy_on_partial_reuse, "onboard": onboard}
        super().__init__(
            backend=backend,
            num_blocks=num_blocks,
            block_size=block_size,
            dp_rank=dp_rank,
            sink=sink,
            max_seq_len=max_seq_len,
            event_buffer=event_buffer,
            flags=flags,
            events=self._events,
        )
        check_integer("secondary_blocks", secondary_blocks, 0)
        sizes = _sizes(windows, block_size, num_blocks, secondary_blocks, max_seq_len)
        if not is_integer(offload_min_priority, 0) or offload_min_priority > 100:
            raise ValueError(f"offload_min_priority must be an integer from 0 to 100, got {offload_min_priority!r:.80}")
        if removed_order not in REMOVED_ORDERS:
            raise ValueError(f"removed_order: {not_allowed_text(removed_order, REMOVED_ORDERS)}")
        self.hasher = V1Hasher()
        self.windows = [
            WindowBlocks(window, blocks, block_size, self._events, offload_min_priority=offload_min_priority, **flags)
            for window, blocks in sorted(sizes.items())
        ]
        self.max_seq_len = max(sizes) if max_seq_len is None else max_seq_len
        self.num_blocks = self._longest.blocks[PRIMARY]
        self.requests: dict[V1Request, None] = {}

    @property
    def _longest(self) -> WindowBlocks:
        return self.windows[-1]

    # -------------------------------------------------------------------------------------------------- requests

    def new_request(
        self,
        prompt: Prompt | TokenIds,
        *,
        retention: Retention | None = None,
        adapter: int | None = None,
        cache_salt: int | None = None,
        rng: Random | None = None,
        to_look: bool = False,
    ) -> V1Request:
        """Return a new request, without blocks.

        Args:
            prompt: its tokens.
            retention: retention of its blocks; None: all have priority 35.
            adapter: number of its LoRA adapter; None: the number of the prompt's `lora_name`, by first use.
            cache_salt: number of its salt, used unchanged; None: the prompt's salt.
            rng: source of the names of partial blocks.
            to_look: whether it is only for `lookup`: then its adapter is not recorded.

        Raises:
            ValueError: the prompt is empty, or has only hashes.
        """
        prompt = checked_prompt(prompt)
        assert prompt.tokens is not None
        hasher = V1Hasher(*self._scope(prompt.keys, adapter, cache_salt, to_look=to_look))
        retention = Retention() if retention is None else retention
        return V1Request(
            [*prompt.tokens], self.block_size, hasher, prompt.keys, retention=retention, rng=rng or self._rng
        )

    def lookup(self, request: V1Request) -> int:
        """Count the tokens that a request would reuse now, at most all but its last one. Changes nothing."""
        return sum(tokens for _, tokens, _ in self._longest.match(self._keys(request)))

    def look(self, request: V1Request) -> Look:
        """Look up a request without blocks in all windows. Changes nothing."""
        keys = self._keys(request)
        found = [list(window.match(keys)) for window in self.windows]
        held = [sum(block.refs > 0 and not is_partial for block, _, is_partial in each) for each in found]
        needed = -(-len(request.tokens) // self.block_size) - min(held)
        return Look(keys, needed, sum(tokens for _, tokens, _ in found[-1]))

    def _keys(self, request: V1Request) -> list[BlockKey]:
        """Return the keys that may be matched: of all but the last token, and an empty key if its block has only it."""
        if not self.enable_caching:
            return []
        count = len(request.tokens)
        keys = request.block_keys(count - 1, partial=True)
        return [*keys, request.hasher.key(())] if count % self.block_size == 1 else keys

    def blocks_needed(self, request: V1Request) -> int:
        """Count the free level 0 blocks that a request without blocks would take; the maximum over windows.

        Free blocks that it hits count; only full hits on blocks in use do not.
        """
        return self.look(request).needed

    @property
    def num_free_blocks(self) -> int:
        """Number of level 0 blocks that no request uses; the minimum over windows."""
        return min(window.queues.free[PRIMARY] for window in self.windows)

    def first_new_block(self, request: V1Request) -> BlockKey | None:
        """Return the key, without its parent, of the first full block of a request that the tree lacks.

        None if there is no such block, with several windows, or without caching.
        """
        if len(self.windows) > 1 or not self.enable_caching:
            return None
        node = self._longest.root
        for key in request.block_keys(len(request.tokens), partial=False):
            child = node.children.get(key)
            if child is None:
                return key
            node = child
        return None

    def free_without(self, requests: Sequence[V1Request]) -> list[int]:
        """Count the level 0 blocks of each window that no request uses, after these requests free theirs."""
        found = []
        for window in self.windows:
            used = Counter(block for each in requests for block in self._held(each, window))
            freed = sum(block.refs == count for block, count in used.items())
            found.append(window.queues.free[PRIMARY] + freed)
        return found

    def _held(self, request: V1Request, window: WindowBlocks) -> list[CacheBlock]:
        """Return the blocks of a window that a request still holds: up to 1.2, only the shortest window slides."""
        table = request.tables[window.window]
        return table[request.left :] if window is self.windows[0] else table

    def blocks_to_completion(self, request: V1Request, tokens: int) -> list[int]:
        """Count the blocks of each window that a request still needs until it has `tokens` tokens.

        A window that still has to slide takes a block before it frees the first one
        (`getRemainingBlocksToCompletion`).
        """
        size, found = self.block_size, []
        last, now = -(-tokens // size), -(-len(request.tokens) // size)
        for each in self.windows:
            most = -(-min(tokens, each.window) // size)
            lacking = max(0, most - len(request.tables.get(each.window, ())))
            found.append(lacking + (last > max(now, most)))
        return found

    def add(self, request: V1Request, look: Look | None = None) -> int:
        """Allocate blocks for all tokens of a request, cached ones first, in all windows, the shortest first.

        Args:
            request: the request.
            look: the result of `look`, if nothing has changed since; None: look it up now.

        Returns:
            Number of its tokens that are hit in the longest window, without its last one.

        Raises:
            ValueError: it has blocks already, or there are too few blocks; nothing has changed.
        """
        if request in self.requests:
            raise ValueError("add: the request has blocks already")
        keys, needed, _ = self.look(request) if look is None else look
        if needed > self.num_free_blocks:
            raise ValueError(f"add: {needed} blocks are needed, {self.num_free_blocks} are free")
        size, retention = self.block_size, request.retention
        wanted = [retention.of_block(first) for first in range(0, len(request.tokens), size)]
        found = 0
        for window in self.windows:
            request.tables[window.window] = []
            found = window.add(request, keys, wanted)
        request.length = len(request.tokens)
        self.requests[request] = None
        return found

    def new_token(self, request: V1Request, token: int) -> None:
        """Append a token; it can be stored, but has no room in a block yet."""
        request.tokens.append(token)

    def store_context_blocks(self, request: V1Request, tokens: int | None = None) -> None:
        """Store the full blocks of a computed prompt, in windows that are as long as the longest request.

        Args:
            request: the request.
            tokens: number of its computed tokens; None: all but the last one, which is output.
        """
        self._store(request, tokens, partial=False, windows=[each for each in self.windows if self.is_full(each)])

    def is_full(self, window: WindowBlocks) -> bool:
        """Return whether a window is as long as the longest request."""
        return window.window >= self.max_seq_len

    def _store(self, request: V1Request, tokens: int | None, *, partial: bool, windows: Sequence[WindowBlocks]) -> None:
        if not self.enable_caching:
            return
        keys = request.block_keys(len(request.tokens) - 1 if tokens is None else tokens, partial=partial)
        for window in windows:
            window.store(request, keys)

    def takes_block(self, request: V1Request) -> bool:
        """Return whether one more token of a request needs a block."""
        return not request.length % self.block_size

    def add_token(self, request: V1Request) -> dict[int, CacheBlock]:
        """Give a request room for one more token; its first block may leave a window.

        Returns:
            The block that it took, by window.

        Raises:
            ValueError: there is no free block; nothing has changed.
        """
        if self.takes_block(request) and not self.num_free_blocks:
            raise ValueError("add_token: 1 block is needed, 0 are free")
        request.length += 1
        size, taken = self.block_size, {}
        for window in self.windows:
            while request.length - request.left * size >= window.window + size:
                window.release([request.tables[window.window][request.left]])
                request.left += 1  # one count for all windows, up to 1.2
            if request.length % size == 1 % size:
                taken[window.window] = window.grow(request, *request.retention.decode)
        return taken

    def remove(self, request: V1Request, *, store: bool = True, tokens: int | None = None) -> None:
        """End a request: store its tokens, with a partial last block, and free its blocks, last first.

        Args:
            request: a request with blocks.
            store: whether to store its tokens.
            tokens: number of computed tokens; None: all but the last.
        """
        for window in self.windows:
            if store and window.window not in request.spoilt:
                self._store(request, tokens, partial=True, windows=[window])
            window.release(reversed(self._held(request, window)))
        del self.requests[request]
        request.forget()

    def tick(self, now: float) -> None:
        """Set the present time, in ms, for the expiry of priorities."""
        check_time(now)
        for window in self.windows:
            window.queues.now = now

    def refresh(self) -> None:
        """Expire the priorities whose time is over; an engine does so in each iteration."""
        for window in self.windows:
            window.queues.refresh()

    # ---------------------------------------------------------------------------------------------------- events

    def _extra(self, event: Queued) -> dict[str, Any]:
        """Return the extra fields: windows are groups in ascending order, and the longest is full attention."""
        group = next(group for group, each in enumerate(self.windows) if each.window == event.window)
        kind = FULL_ATTENTION if event.window == self._longest.window else "sliding_window"
        short = None if kind == FULL_ATTENTION else event.window
        return {
            "window_size": event.window,
            **(group_extra(group, kind, short) or {}),
            "silently_gone": event.gone,
        }

    # --------------------------------------------------------------------------------------------------- queries

    @property
    def num_active_blocks(self) -> int:
        """Number of level 0 blocks that requests use, in the window with the fewest free blocks."""
        return self.num_blocks - min(self.num_free_blocks, self.num_blocks)

    @property
    def num_inactive_blocks(self) -> int:
        """Number of cached level 0 blocks of the longest window that no request uses."""
        return sum(block.level == PRIMARY and not block.refs for block in self._longest.cached())

    def _in_use(self) -> Iterator[tuple[Block, int]]:
        for block in self._longest.all:
            if block.refs:
                yield UUID(int=block.id) if block.parent is None else block.name, block.refs

    def inactive_blocks(self) -> list[int]:
        """Return the cached level 0 blocks that no request uses, in the order of eviction."""
        return [block.name for block in self._longest.queues.order(PRIMARY) if block.parent is not None]

    def resident(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names of the blocks that are cached in a tier, in the longest window, partial blocks included."""
        return [block.name for block in self._longest.cached() if LEVELS[block.level] == tier]

    def announced(self, tier: StorageTier = StorageTier.DEVICE) -> Collection[int]:
        """Return the names that its events promise in a tier, in the longest window.

        These are the resident blocks and the free leaves that partial matches took: such a leaf leaves the tree without
        a Removed. Events in process name these leaves in `RouterEvent.extra["silently_gone"]`.
        """
        resident = self.resident(tier)
        return [*resident, *self._longest.taken] if tier == StorageTier.DEVICE else resident

    @property
    def tier_sizes(self) -> dict[StorageTier, int]:
        """Number of blocks of each tier, over all windows."""
        sizes = (sum(window.blocks[level] for window in self.windows) for level in range(len(LEVELS)))
        return {tier: size for tier, size in zip(LEVELS, sizes, strict=True) if size}

    def clear(self) -> bool:
        """Evict all cached blocks, with a Removed; do nothing and return False while any block is in use.

        TensorRT-LLM has neither a call nor an event for this.
        """
        if self.requests:
            return False
        for window in self.windows:
            window.evict_all()
        self.flush()
        return True


def _sizes(
    windows: object, block_size: int, num_blocks: int, secondary_blocks: int, max_seq_len: int | None
) -> dict[int, tuple[int, int]]:
    """Return the number of blocks of both levels, by window."""
    longest = num_blocks * block_size if max_seq_len is None else max_seq_len
    if windows is None:
        return {longest: (num_blocks, secondary_blocks)}
    allowed = "windows are tokens, or (tokens, blocks, secondary blocks), each once"
    if isinstance(windows, str) or not isinstance(windows, Sequence) or not windows:
        raise ValueError(f"{allowed}; got {windows!r:.80}")
    sizes: dict[int, tuple[int, int]] = {}
    for each in windows:
        row = (
            (each, num_blocks, secondary_blocks)
            if is_integer(each)
            else tuple(each)
            if isinstance(each, Sequence)
            else ()
        )
        if len(row) != 3 or not all(map(is_integer, row)) or row[0] in sizes:
            raise ValueError(f"{allowed}; got {windows!r:.80}")
        window, blocks, secondary = row
        if window < block_size or blocks < 1 or secondary < 0:
            raise ValueError(
                f"a window has at least a block of {block_size} tokens, 1 block and 0 secondary blocks; got "
                f"{each!r:.80}"
            )
        if max_seq_len is not None and window > max_seq_len:
            raise ValueError(f"a window has at most max_seq_len tokens, {max_seq_len}; got {window}")
        sizes[window] = blocks, secondary
    return sizes
