"""inference_lab's `KVCacheManager`: blocks by the page, counted and not named, for tests of schedulers.

It publishes no events, and it is none of the backends. Capacity is in bytes, free blocks are a
stack, a request gets all the blocks that it needs or none, and its prefix cache keys requests by id and length, not by
tokens. What the original does not check is refused here before anything changes: see `PagedCacheManager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_kvmock.cache.base import check_request_block_size
from pytest_kvmock.checks import check_integer, is_integer


@dataclass(slots=True)
class PagedRequest:
    """A request as a `PagedCacheManager` sees it; the arguments are those of inference_lab's `Request::new`.

    The scheduler keeps it up to date: after an allocation it adds the new blocks to `kv_blocks`, after a step it counts
    `num_computed_tokens` on.

    Attributes:
        request_id: its name.
        priority: for a scheduler; the manager does not read it.
        arrival_time: likewise, in seconds.
        num_prompt_tokens: tokens of the prompt.
        max_output_tokens: for a scheduler; the manager does not read it.
        num_computed_tokens: tokens, of prompt and output, whose KV entries exist.
        kv_blocks: ids of the blocks that it has, in order.

    Raises:
        ValueError: the id is no string, or a number of tokens is no integer of at least 0.
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

    Where inference_lab's would go on with a wrong state, this one raises and stays as it was: freeing a block that is
    free (there it would be on the stack twice, and be given to two requests), an id that there is not, and a capacity of
    no block (there the utilization is no number).

    Args:
        kv_cache_capacity: bytes of KV cache; what is left of the last whole block is not used.
        block_size: tokens a block.
        kv_cache_bytes_per_token: bytes that one token takes.
        enable_prefix_caching: whether `check_prefix_cache` looks at all.

    Raises:
        ValueError: a size below 1, or a capacity of less than one block.

    Attributes:
        block_size: tokens a block.
        total_blocks: how many blocks there are; their ids are 0 to `total_blocks - 1`.
        enable_prefix_caching: as given.
        num_prefix_cache_hits: requests that `check_prefix_cache` knew.
        num_prefix_cache_misses: requests that it did not.
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
        # The stack of free blocks: what came back, on top of those that were never used. The latter are the ids below
        # `_untouched`, highest on top, so that a large cache costs nothing before it is used.
        self._returned: list[int] = []
        self._untouched = self.total_blocks
        self._references: dict[int, int] = {}  # of blocks in use
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
            ValueError: there is no such block.
        """
        self._check_block(block_id, "references")
        return self._references.get(block_id, 0)

    def allocate_blocks(self, request: PagedRequest, num_tokens: int) -> list[int] | None:
        """Allocate the blocks that a request lacks for so many more tokens.

        Counted from its `num_computed_tokens` and `kv_blocks`, which this does not change.

        Args:
            request: who needs them.
            num_tokens: tokens beyond those that are computed.

        Returns:
            Their ids, the last that came back first, else from the highest down; none if it has enough. None if there
            are not enough free ones: then none is taken.

        Raises:
            ValueError: no request, or a number of tokens that is none.
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
        """Add one reference to each of some blocks that are in use: each is freed once more before it is free.

        The original counts holders of a block (`Block::allocate`, `Block::release`), and its manager never makes a
        second one; a scheduler that shares prefixes would.

        Args:
            block_ids: which, one for each new reference.

        Raises:
            ValueError: one is free, or there is no such block; nothing has changed.
        """
        block_ids = self._check_blocks(block_ids, "reference_blocks")
        for block_id in block_ids:
            if block_id not in self._references:
                raise ValueError(f"reference_blocks of block {block_id}: it is free; allocate_blocks gives free blocks")
        for block_id in block_ids:
            self._references[block_id] += 1

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Free blocks of a request, in this order: the last one is the first to be allocated again.

        Args:
            block_ids: which, one for each reference to drop.

        Raises:
            ValueError: one is free, or has fewer references than would go, or there is none; nothing has changed.
        """
        block_ids = self._check_blocks(block_ids, "free_blocks")
        for block_id, times in Counter(block_ids).items():
            has = self._references.get(block_id, 0)
            if times > has:
                why = f"it has {has} reference(s), and {times} would go" if has else "it is free already"
                raise ValueError(f"free_blocks of block {block_id}: {why}")
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
                self._returned.append(block_id)

    def check_prefix_cache(self, request: PagedRequest) -> int:
        """Tokens of a request's prompt that count as cached, and count a hit or a miss.

        A toy, as in the original: a prompt is known by the request's id and its length, not by its tokens; at most one
        block of it counts; and what is known stays so, also when its blocks are freed. A request that is missed is
        known from then on, if it has a block.

        Returns:
            For a known one `block_size`, or the whole prompt where that is shorter; else 0. Without prefix caching 0,
            and nothing is counted.

        Raises:
            ValueError: no request.
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
    if not all(hasattr(request, name) for name in _READ):  # a scheduler may have a class of its own
        raise ValueError(f"{what}: the request must be like a PagedRequest, got {request!r:.80}")
    for name in ("num_prompt_tokens", "num_computed_tokens"):  # the scheduler changes them
        check_integer(f"{what} of request {request.request_id!r:.80}: {name}", getattr(request, name), 0)
    if not isinstance(request.kv_blocks, list):  # None, if what did not fit was assigned to it
        raise ValueError(  # noqa: TRY004 - one error
            f"{what} of request {request.request_id!r:.80}: kv_blocks must be a list of block ids, "
            f"got {request.kv_blocks!r:.80}"
        )
