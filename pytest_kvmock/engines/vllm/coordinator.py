"""Coordination of the cache groups of one engine: common hits, and the order in which groups take blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pytest_kvmock.engines.base.cache_group import FULL, LOCAL, RING, STATE, WINDOWS, CacheGroup
from pytest_kvmock.engines.vllm.group_policies import (
    FullPolicy,
    GroupJournal,
    GroupPolicy,
    LocalPolicy,
    Lookup,
    RingPolicy,
    WindowPolicy,
)
from pytest_kvmock.engines.vllm.group_request import ComputedBlocks
from pytest_kvmock.engines.vllm.groups import GroupGeometry
from pytest_kvmock.engines.vllm.host.offload_steps import StateHandOff
from pytest_kvmock.engines.vllm.named_pool import NULL, NamedPool
from pytest_kvmock.engines.vllm.state_groups import StatePolicy, UncachedStatePolicy

if TYPE_CHECKING:
    from pytest_kvmock.engines.vllm.group_request import GroupRequest, Span

_POLICIES: Final[dict[str, type[GroupPolicy]]] = {
    **dict.fromkeys(FULL, FullPolicy),
    **dict.fromkeys(WINDOWS, WindowPolicy),
    LOCAL: LocalPolicy,
    STATE: StatePolicy,
    RING: RingPolicy,
}


class Coordinator:
    """The cache groups of one engine over their common pool.

    Args:
        geometry: the engine's groups and sizes.
        pool: the pool of their blocks.
        journal: publishes their events.

    Attributes:
        geometry: as given.
        pool: as given.
        policies: one per group.
    """

    def __init__(self, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        self.geometry, self.pool = geometry, pool
        self.policies = [
            _policy_of(group)(number, geometry, pool, journal) for number, group in enumerate(geometry.groups)
        ]
        self._states = [policy for policy in self.policies if isinstance(policy, StatePolicy)]
        self._several = len(geometry.groups) > 1
        # With one family of full attention and one other, both can resume from the hit of the second.
        first = geometry.groups[geometry.families[0][0]]
        self._in_one_pass = not self._several or (len(geometry.families) == 2 and first.kind in FULL)
        self._copies: dict[int, list[tuple[int, int]]] = {}  # by group, in this step

    # --------------------------------------------------------------------------------------------------- lookup

    def lookup(self, request: GroupRequest) -> ComputedBlocks:
        """Return the longest hit that all groups can resume from. Changes nothing."""
        policies, tokens = self.policies, request.tokens
        hit, reached, short = 0, dict[int, int](), dict[int, None]()
        if self.geometry.caching and not request.skip_reading_prefix_cache:
            hit, reached, short = self._longest(request, tokens.num_tokens - request.computes_last_token)
        if not hit:
            nothing: tuple[list[int], ...] = tuple([] for _ in policies)
            return ComputedBlocks(0, nothing, self._junction(reached, 0), tuple(short))
        blocks = tuple(policy.found(request, hit, reached.get(policy.number, 0)) for policy in policies)
        return ComputedBlocks(hit, blocks, self._junction(reached, hit), tuple(short))

    def _junction(self, reached: dict[int, int], hit: int) -> int:
        longest = max(reached.values(), default=0)
        return longest if self._several and longest > hit else 0

    def _longest(self, request: GroupRequest, limit: int) -> tuple[int, dict[int, int], dict[int, None]]:
        """Return the common hit, the longest hit of each group during the search, and the groups that shortened it.

        The last are the first groups of families other than full attention.
        """
        tokens, caches = request.tokens, self.pool.cached
        hashed = len(tokens.names) * tokens.block_size
        if self.geometry.lookahead:
            limit = min(limit, tokens.num_tokens - self.geometry.lookahead)
        looks = [Lookup(tokens, [caches[number] for number in family]) for family in self.geometry.families]
        reached: dict[int, int] = {}
        short: dict[int, None] = {}
        dropped: set[int] = set()  # families that need not drop a unit again: the limit already lies one unit lower
        while True:
            length = limit
            for family, look in zip(self.geometry.families, looks, strict=True):
                first = family[0]
                policy = self.policies[first]
                if isinstance(policy, FullPolicy) and first in reached:
                    length = length // self.geometry.alignment * self.geometry.alignment
                    continue
                drops = policy.drops and bool(policy.drop_unit) and first not in dropped
                upto = min(length + policy.drop_unit, hashed) if drops and self._several else length
                found = policy.longest(look, upto, drops)
                if drops:
                    dropped.add(first)
                elif found < length:
                    dropped.clear()
                if found < length and not isinstance(policy, FullPolicy):
                    short[first] = None
                length = found
                for number in family:
                    reached[number] = max(found, reached.get(number, 0))
            if length >= limit or self._in_one_pass or not length:
                return length, reached, short
            limit = length

    # ------------------------------------------------------------------------------------------------ allocation

    @property
    def has_states(self) -> bool:
        """Whether a group keeps states that later prompts resume from."""
        return bool(self._states)

    def missing(
        self, request: GroupRequest, span: Span, hits: ComputedBlocks | None, caps: Sequence[int | None], *, asks: bool
    ) -> int:
        """Count the blocks of the queue that all groups need; see `GroupPolicy.missing`."""
        return sum(
            policy.missing(request, span, hits.blocks[policy.number] if hits else (), cap, asks=asks)
            for policy, cap in zip(self.policies, caps, strict=True)
        )

    def retire(self, request: GroupRequest, processed: int) -> None:
        """Free the blocks that no later token attends to after `processed` tokens."""
        for policy, table in zip(self.policies, request.tables, strict=True):
            policy.retire(table, processed)

    def retirable(self, request: GroupRequest, processed: int) -> int:
        """Count the blocks that `retire` would put into the queue."""
        refs = self.pool.refs
        return sum(
            refs[table.blocks[position]] == 1
            for policy, table in zip(self.policies, request.tables, strict=True)
            for position in policy.behind(table, processed)
        )

    def fill(self, request: GroupRequest, span: Span, hits: ComputedBlocks | None) -> tuple[list[int], ...]:
        """Give a request its hits and the new blocks that it needs. All hits are held before any block is taken.

        Returns:
            The new blocks of each group; those for tokens from elsewhere come first.
        """
        is_new = not request.holds_blocks
        if hits is not None and any(hits.blocks):
            for policy, table, blocks in zip(self.policies, request.tables, hits.blocks, strict=True):
                # Tokens from another engine may move hits out of the window.
                behind = max(policy.skipped(span.start), 0) // policy.block_size if span.start > hits.num_tokens else 0
                policy.adopt(table, [NULL] * min(behind, len(blocks)) + blocks[behind:], hits.num_tokens)
        held = [len(table.blocks) for table in request.tables]
        if is_new and span.start > span.hit:
            # vLLM: allocate_new_computed_blocks, for all groups, comes before allocate_new_blocks
            for policy, table in zip(self.policies, request.tables, strict=True):
                policy.receive(table, span.start)
        for policy in self.policies:
            copies: list[tuple[int, int]] = []
            policy.fill(request, span, copies)
            if copies:
                self._copies.setdefault(policy.number, []).extend(copies)
        return tuple(table.blocks[before:] for table, before in zip(request.tables, held, strict=True))

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name the blocks within the first `upto` tokens that each group keeps, group by group."""
        if not self.geometry.caching:
            return
        geometry, whole = self.geometry, upto
        if self._several and not geometry.fine_hits:
            whole = upto // geometry.scheduler_block_size * geometry.scheduler_block_size
        for policy in self.policies:
            ahead = policy.block_size if whole and policy.drops and policy.drop_unit and self._several else 0
            again = geometry.computed_again if policy.drops or not self._several else 0
            policy.cache(request, max(min(whole + ahead, upto - again), 0))

    # ---------------------------------------------------------------------------------------------- steps and ends

    def start_step(self) -> None:
        """Count the states named in the last step as computed."""
        for policy in self._states:
            policy.named_in_step.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """Take the pairs of (block, copy) that were copied in this step; all blocks are still held."""
        if not self._copies:
            return []
        pairs = [pair for number in sorted(self._copies) for pair in self._copies[number]]
        self._copies.clear()
        return pairs

    def end_step(self) -> list[tuple[int, int]]:
        """Release the blocks that were copied in this step and their copies; return these pairs."""
        pairs = self.take_copies()
        if pairs:
            self.pool.release([block for pair in pairs for block in pair])
        return pairs

    def note_states(self) -> None:
        """Record from now on which states are named, for a connector that stores them."""
        for policy in self._states:
            policy.named = []

    def take_states(self) -> dict[GroupRequest, list[StateHandOff]]:
        """Take the states that were named since the last call, by request."""
        taken: dict[GroupRequest, list[StateHandOff]] = {}
        for policy in self._states:
            if policy.named:
                for request, block, tokens in policy.named:
                    taken.setdefault(request, []).append(StateHandOff(policy.number, block, tokens))
                policy.named = []
        return taken

    def forget_states(self, request: GroupRequest) -> None:
        """Drop the recorded states of a request whose blocks are freed: another request may overwrite them."""
        for policy in self._states:
            if policy.named:
                policy.named = [each for each in policy.named if each[0] is not request]

    def free(self, request: GroupRequest) -> None:
        """Free a request's blocks, group by group, tail first."""
        self.forget_states(request)
        for table in request.tables:
            self.pool.release(reversed(table.blocks))
        request.forget_blocks()


def _policy_of(group: CacheGroup) -> type[GroupPolicy]:
    return UncachedStatePolicy if group.kind == STATE and group.mode == "none" else _POLICIES[group.kind]
