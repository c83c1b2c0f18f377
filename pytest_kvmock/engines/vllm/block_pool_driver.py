"""Driver of vLLM's block manager, which looks up once and then allocates step by step, as vLLM's scheduler does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import Powers, PromptPlan, checked_manager
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.pool_driver import PoolDriver

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.vllm.block_pool import PoolRequest


class BlockPoolDriver(PoolDriver):
    """Turns requests into lookups, allocations and frees.

    Args:
        manager: a `BlockPoolManager`.
        prefix_caching: whether requests may reuse blocks; applied to the manager.
        rng: source of the names of generated blocks if a prompt has only hashes.

    Raises:
        ValueError: the manager is of another kind.
    """

    manager: BlockPoolManager
    _drops_last = False

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, BlockPoolManager, "BlockPoolDriver"), prefix_caching, rng)

    @property
    def powers(self) -> Powers:
        """Its optional abilities, which not every driver has."""
        return replace(super().powers, drop_last=self.drop_last, bursts=self)

    def drop_last(self, drops: bool) -> None:
        """Compute the last block of a hit again, as Dynamo's mock of vLLM does with a draft model."""
        self._drops_last = drops

    def lookup(self, request: PoolRequest) -> int:
        """Return the cached tokens of the request, generated ones included; its last token never counts."""
        return len(self._found(request)) * self.manager.block_size

    def need(self, request: PoolRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count new blocks and hits that no request uses, as vLLM does, also those of decode steps, which free none."""
        return self.manager.missing_blocks(request, upto + len(tokens), self._hits(request))

    def step_inside(self, request: PoolRequest, upto: int) -> bool:
        """Count the first `upto` tokens as computed if this stays inside the block of the last computed token."""
        size = self.manager.block_size
        if request.num_computed_tokens // size != upto // size or upto > len(request.block_ids) * size:
            return False
        request.num_computed_tokens = upto
        return True

    def need_whole(self, request: PoolRequest) -> int:
        """Count the new blocks for all its tokens. Hits that any request holds are subtracted, also the last token's.

        Blocks that it holds already are subtracted too: a loaded prompt of one token has some, and nothing computed.
        """
        manager, size = self.manager, self.manager.block_size
        held = sum(map(bool, map(manager.references_to, manager.cached_blocks(request))))
        most = request.most_hits(size)
        return -(-len(request) // size) - min(held, most) - len(request.block_ids)

    def plan(self, request: PoolRequest, upto: int) -> PromptPlan:
        """Return `need`, `room` and `lookup`, from one look-up."""
        manager, hits = self.manager, self._found(request)
        needed = manager.missing_blocks(request, upto, hits)
        return PromptPlan(needed, manager.num_free_blocks, len(hits) * manager.block_size, hits)

    def admit(self, request: PoolRequest, upto: int, plan: PromptPlan | None = None) -> None:
        """Allocate blocks up to `upto` tokens; the first allocation of a request also takes all its hits."""
        manager, hits = self.manager, self._hits(request) if plan is None else plan.found
        new = upto - request.num_computed_tokens - len(hits) * manager.block_size
        if new > 0:
            manager.allocate_slots(request, new, hits)

    def extend(self, request: PoolRequest, tokens: Sequence[int]) -> None:
        """Run decode steps, one per token; only those of a block's first and last token have an effect."""
        size, start = self.manager.block_size, 0
        while start < len(tokens):
            step = tokens[start : start + size - len(request) % size]
            request.tokens.extend(step)
            self.manager.allocate_slots(request, len(step))
            start += len(step)

    def _hits(self, request: PoolRequest) -> list[int]:
        return [] if request.block_ids else self._found(request)

    def _found(self, request: PoolRequest) -> list[int]:
        found = self.manager.get_computed_blocks(request)
        return found[:-1] if self._drops_last and request.computes_last_token else found

    def allocate(self, request: PoolRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or nothing changes."""
        manager, hits = self.manager, self._hits(request)
        new = upto - request.num_computed_tokens - len(hits) * manager.block_size
        is_due = new > 0 or (hits and not new and not request.computes_last_token)
        if is_due and manager.allocate_slots(request, new, hits) is None:
            return request.num_computed_tokens
        return upto

    def reserve_burst(self, request: PoolRequest, tokens: int) -> bool:
        """Take blocks for `tokens` tokens that a pass may add to a request; return False if there are too few."""
        return self.manager.reserve_slots(request, len(request) + tokens)

    def release_burst(self, request: PoolRequest) -> None:
        """Give back the blocks of tokens that were not generated."""
        self.manager.release_slots(request)

    def reserve(self, request: PoolRequest, upto: int) -> int | None:
        """Take the hits among the first `upto` tokens, and blocks for the rest, which are cached only by `claim`."""
        manager, size = self.manager, self.manager.block_size
        hits = manager.cached_blocks(request, upto // size)
        taken = manager.allocate_slots(request, upto - len(hits) * size, hits, delay_cache_blocks=True)
        return None if taken is None else len(taken)

    def claim(self, request: PoolRequest, upto: int) -> None:  # noqa: ARG002 - it was reserved up to there
        """Cache the reserved blocks that are full."""
        self.manager.cache_blocks(request)

    def tables(self, request: PoolRequest, tokens: int | None = None) -> tuple[list[int], ...]:
        """Return the blocks that a request holds, as one group: those of `tokens` tokens, or all."""
        held = request.block_ids
        return (held if tokens is None else held[: -(-tokens // self.manager.block_size)],)

    def blocks_to_hold(
        self,
        request: PoolRequest,
        upto: int,
        *,
        external: int = 0,  # noqa: ARG002 - full attention needs the blocks of both
        hits: bool = True,
    ) -> int:
        """Count the blocks of the queue that a request needs for its first `upto` tokens.

        They are new blocks, and hits that no request uses.
        """
        return self.manager.missing_blocks(request, upto, self._hits(request) if hits else ())

    def hold(self, request: PoolRequest, upto: int, reserved: int = 0) -> bool:
        """Take hits and blocks for the first `upto` tokens, which come from elsewhere.

        Return False if fewer than `reserved` blocks would be left.
        """
        manager, hits = self.manager, self._hits(request)
        if manager.missing_blocks(request, upto, hits) > manager.num_free_blocks - reserved:
            return False
        manager.allocate_slots(request, upto - len(hits) * manager.block_size, hits, delay_cache_blocks=True)
        return True

    def name(self, request: PoolRequest, upto: int) -> None:
        """Name the full blocks of the first `upto` tokens."""
        request.num_computed_tokens = upto
        self.manager.cache_blocks(request)

    def quiet_tokens(self, request: PoolRequest) -> int:
        """Return the number of tokens, from the last one on, that can be computed before one needs or fills a block."""
        size, length = self.manager.block_size, len(request)
        return -length % size if length <= len(request.block_ids) * size else 0
