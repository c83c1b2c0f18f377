"""inference_lab's `KVCacheManager`: pages that are counted and not named, for tests of schedulers.

It publishes no events, and is not one of the backends. Capacity is in bytes, free blocks are a stack, a request gets
all the blocks that it needs or none, and its prefix cache keys requests by id and length, not by tokens. Invalid calls
that the original does not check are refused here: see `PagedCacheManager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_kvmock.engines.base.manager_base import check_request_block_size
from pytest_kvmock.values.checks import check_integer, is_integer


@dataclass(slots=True)
class PagedRequest:
    """A request as a `PagedCacheManager` sees it; the arguments are those of inference_lab's `Request::new`.

    The scheduler keeps it up to date: after an allocation it adds the new blocks to `kv_blocks`, after a step it raises
    `num_computed_tokens`.

    Attributes:
        request_id: its name.
        priority: for a scheduler; the manager does not read it.
        arrival_time: also for a scheduler, in seconds.
        num_prompt_tokens: tokens of the prompt.
        max_output_tokens: for a scheduler; the manager does not read it.
        num_computed_tokens: tokens, of prompt and output, whose KV entries exist.
        kv_blocks: ids of its blocks, in order.

    Raises:
        ValueError: the id is not a string, or a number of tokens is not an integer of at least 0.
    """

    request_id: str
    priority: int
    arrival_time: float
    num_prompt_tokens: int
    max_output_tokens: int
    num_computed_tokens: int = 0
    kv_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id must be a string, got {self.request_id!r:.80}")  # noqa: TRY004 - one error
        for name in ("num_prompt_tokens", "max_output_tokens", "num_computed_tokens"):
            check_integer(name, getattr(self, name), 0)


class PagedCacheManager:
    """A pool of KV blocks, sized in bytes.

    In three cases inference_lab's manager continues with a wrong state, while this one raises and does not change: a
    free block is freed (the original puts it on the stack twice, and gives it to two requests), an id is unknown, or
    the capacity is 0 blocks (the original's utilization is not a number).

    Args:
        kv_cache_capacity: bytes of KV cache; a rest of less than a block is not used.
        block_size: tokens a block.
        kv_cache_bytes_per_token: bytes that one token takes.
        enable_prefix_caching: whether `check_prefix_cache` can hit.

    Raises:
        ValueError: a size below 1, or a capacity of less than one block.

    Attributes:
        block_size: tokens a block.
        total_blocks: number of blocks; their ids are 0 to `total_blocks - 1`.
        enable_prefix_caching: as given.
        num_prefix_cache_hits: requests that `check_prefix_cache` found.
        num_prefix_cache_misses: requests that it did not find.
    """

    def __init__(
        self,
        kv_cache_capacity: int,
        block_size: int,
        kv_cache_bytes_per_token: int,
        enable_prefix_caching: bool = False,
    ) -> None:
        check_integer("kv_cache_capacity", kv_cache_capacity, 1, " (bytes)")
        self.block_size = check_request_block_size(block_size)
        check_integer("kv_cache_bytes_per_token", kv_cache_bytes_per_token, 1)
        if not isinstance(enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, got {enable_prefix_caching!r:.80}")  # noqa: TRY004 - one error
        bytes_per_block = block_size * kv_cache_bytes_per_token
        self.total_blocks = kv_cache_capacity // bytes_per_block
        if not self.total_blocks:
            raise ValueError(
                f"kv_cache_capacity must be at least one block, {bytes_per_block} bytes ({block_size} tokens of "
                f"{kv_cache_bytes_per_token} bytes), got {kv_cache_capacity}"
            )
        self.enable_prefix_caching = enable_prefix_caching
        self.num_prefix_cache_hits = 0
        self.num_prefix_cache_misses = 0
        # The stack of free blocks: returned blocks on top of unused ones. Unused blocks are the ids below `_untouched`,
        # with the highest on top, so a large cache costs nothing before it is used.
        self._returned: list[int] = []
        self._untouched = self.total_blocks
        self._references: dict[int, int] = {}  # references to each block in use
        self._known_prompts: set[tuple[str, int]] = set()

    def __repr__(self) -> str:
        return f"<PagedCacheManager: {self.num_free_blocks} of {self.total_blocks} blocks free>"

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self._untouched + len(self._returned)

    @property
    def utilization(self) -> float:
        """Share of the blocks that are in use, from 0 to 1."""
        return 1.0 - self.num_free_blocks / self.total_blocks

    def references(self, block_id: int) -> int:
        """Count the requests that have a block; 0 for a free one.

        Raises:
            ValueError: the block does not exist.
        """
        self._check_block(block_id, "references")
        return self._references.get(block_id, 0)

    def allocate_blocks(self, request: PagedRequest, num_tokens: int) -> list[int] | None:
        """Allocate the blocks that a request still needs for `num_tokens` more tokens.

        They are counted from its `num_computed_tokens` and `kv_blocks`, which do not change.

        Args:
            request: the request.
            num_tokens: tokens after the computed ones.

        Returns:
            The ids of the blocks: first the blocks that were returned last, then unused ones from the highest down; an
                empty list if the request has enough. None, with nothing taken, if too few are free.

        Raises:
            ValueError: `request` is not a request, or the number of tokens is invalid.
        """
        _check_request(request, "allocate_blocks")
        check_integer("allocate_blocks: num_tokens", num_tokens, 0)
        blocks = -(-(request.num_computed_tokens + num_tokens) // self.block_size)
        needed = max(0, blocks - len(request.kv_blocks))
        if needed > self.num_free_blocks:
            return None
        allocated = [self._pop() for _ in range(needed)]
        self._references.update(dict.fromkeys(allocated, 1))
        return allocated

    def _pop(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._untouched -= 1
        return self._untouched

    def reference_blocks(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of some blocks in use; each then has to be freed once more.

        The original counts holders of a block (`Block::allocate`, `Block::release`), but its manager never adds a
        second one; a scheduler that shares prefixes would.

        Args:
            block_ids: the blocks, one entry for each new reference.

        Raises:
            ValueError: a block is free or does not exist; nothing has changed.
        """
        block_ids = self._check_blocks(block_ids, "reference_blocks")
        for block_id in block_ids:
            if block_id not in self._references:
                raise ValueError(f"reference_blocks of block {block_id}: it is free; allocate_blocks gives free blocks")
        for block_id in block_ids:
            self._references[block_id] += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Free blocks of a request in this order; the last one is the first to be allocated again.

        Args:
            block_ids: the blocks, one entry for each reference to drop.

        Raises:
            ValueError: a block is free, unknown, or has fewer references than are dropped; nothing has changed.
        """
        block_ids = self._check_blocks(block_ids, "free_blocks")
        for block_id, times in Counter(block_ids).items():
            has = self._references.get(block_id, 0)
            if times > has:
                why = f"it has {has} reference(s), and {times} would be released" if has else "it is free already"
                raise ValueError(f"free_blocks of block {block_id}: {why}")
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
                self._returned.append(block_id)

    def check_prefix_cache(self, request: PagedRequest) -> int:
        """Return the prompt tokens of a request that count as cached, and count a hit or a miss.

        This is a toy, as in the original. The key of a prompt is the request's id and length, not its tokens. At most
        one block counts as cached, and entries stay when blocks are freed. A request that misses gets an entry if it
        has a block.

        Returns:
            `block_size` for a hit, or the length of a shorter prompt; 0 for a miss. Without prefix caching 0, with
            nothing counted.

        Raises:
            ValueError: `request` is not a request.
        """
        _check_request(request, "check_prefix_cache")
        if not self.enable_prefix_caching:
            return 0
        prompt = (request.request_id, request.num_prompt_tokens)
        if prompt in self._known_prompts:
            self.num_prefix_cache_hits += 1
            return min(self.block_size, request.num_prompt_tokens)
        self.num_prefix_cache_misses += 1
        if request.kv_blocks:
            self._known_prompts.add(prompt)
        return 0

    def _check_blocks(self, block_ids: Iterable[int], what: str) -> list[int]:
        if isinstance(block_ids, (str, bytes)) or not isinstance(block_ids, Iterable):
            raise ValueError(f"{what}: a list of block ids is expected, got {block_ids!r:.80}")  # noqa: TRY004 - one error
        block_ids = list(block_ids)
        for block_id in block_ids:
            self._check_block(block_id, what)
        return block_ids

    def _check_block(self, block_id: object, what: str) -> None:
        if not is_integer(block_id, 0) or block_id >= self.total_blocks:
            raise ValueError(f"{what} of block {block_id!r:.80}: there is none; ids are 0 to {self.total_blocks - 1}")


_READ = ("request_id", "num_prompt_tokens", "num_computed_tokens", "kv_blocks")


def _check_request(request: PagedRequest, what: str) -> None:
    if not all(hasattr(request, name) for name in _READ):  # a scheduler may have its own class
        raise ValueError(f"{what}: the request must be like a PagedRequest, got {request!r:.80}")
    for name in ("num_prompt_tokens", "num_computed_tokens"):  # the scheduler sets them
        check_integer(f"{what} of request {request.request_id!r:.80}: {name}", getattr(request, name), 0)
    if not isinstance(request.kv_blocks, list):  # None if the result of a failed allocation was assigned to it
        raise ValueError(  # noqa: TRY004 - one error
            f"{what} of request {request.request_id!r:.80}: kv_blocks must be a list of block ids, "
            f"got {request.kv_blocks!r:.80}"
        )
