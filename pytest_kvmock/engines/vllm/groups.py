"""Cache groups of a hybrid model, and the sizes that follow from them: scheduler blocks, hash units and hits.

One subject: the geometry of an engine, and the blocks that a request needs under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.engines.base.cache_group import (
    FULL,
    LOCAL,
    RING,
    STATE,
    WINDOWS,
    CacheGroup,
    checked_groups,
    groups_text,
)
from pytest_kvmock.values.checks import check_integer

if TYPE_CHECKING:
    from pytest_kvmock.engines.vllm.speculative import Speculative

# Theory of operation
#
# A hybrid model keeps several caches, one for each group of layers: all layers of a group share one block table. All
# groups take blocks from one pool. Groups are numbered by their first layers in the model.
#
# Tokens are hashed in units; the unit is the largest size that divides all block sizes. A hit ends at a multiple of the
# alignment. The alignment is the least common multiple of the block sizes, or the unit if the engine copies a block
# that a hit ends in (fine hits).


_FULL_CUTS_FROM: Final = 2
"""From this many tokens of lookahead on, a look-up without full attention begins behind the last name."""

_WHOLE_REQUEST: Final = 2**40  # tokens, more than any request has

Retention: TypeAlias = int | None
"""Which blocks of sparse groups are cached. 0: those that prompts resume from; positive: also those at each multiple of
this number of tokens; None: all that a hit may use."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The groups of one engine, and the sizes that follow from them; made by `of`.

    Attributes:
        groups: in the engine's order.
        retention: which blocks of sparse groups are cached (`Retention`).
        drop: hits in the groups of a draft model are one unit shorter than the cached tokens.
        lookahead: number of following tokens that names also cover.
        computed_again: with several draft modules, the number of last tokens that may be computed again. They are not
            cached yet in groups that drop, nor if there is only one group. Windows keep as many more tokens, whatever
            a look-up finds.
        caching: whether anything is cached.
        scheduler_block_size: the smallest number of tokens that fills whole blocks in all groups.
        hash_unit: tokens per hash.
        alignment: hits end at multiples of this number of tokens.
        families: the numbers of the groups of each spec, full attention first.
        drops: per group, whether its hits are one unit shorter than the cached tokens.
    """

    groups: tuple[CacheGroup, ...]
    retention: Retention
    drop: bool
    lookahead: int
    computed_again: int
    caching: bool
    scheduler_block_size: int
    hash_unit: int
    alignment: int
    families: tuple[tuple[int, ...], ...]
    drops: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        groups: Iterable[CacheGroup],
        *,
        retention: Retention = 0,
        match_unit: int | None = None,
        speculative: Speculative | None = None,
        caching: bool = True,
    ) -> GroupGeometry:
        """Work out the sizes of an engine with these groups.

        Args:
            groups: at least one group that can be cached.
            retention: see `Retention`; a multiple of the scheduler's block.
            match_unit: tokens per hash (`--prefix-match-unit`), a divisor of all blocks; None: the largest divisor.
            speculative: the draft model; None if there is none.
            caching: whether anything is cached.

        Raises:
            ValueError: a value is invalid.
        """
        taken = checked_groups(groups)
        cacheable = [group for group in taken if group.cacheable]
        scheduler_block = lcm(*(group.block_size for group in taken))
        aligned = caching and all(group.mode == "align" for group in taken)
        unit = gcd(*(group.block_size for group in cacheable)) if aligned else scheduler_block
        if match_unit is not None:
            check_integer("match_unit", match_unit, 1, " tokens, or None")
            odd = next((group for group in cacheable if group.block_size % match_unit), None)
            if odd is not None:
                raise ValueError(f"match_unit {match_unit} does not divide block_size {odd.block_size} of {odd.kind}")
            if aligned and len(taken) > 1:
                unit = match_unit
        if retention is not None:
            check_integer("retention", retention, 0, " tokens, or None")
            if retention % scheduler_block:
                raise ValueError(
                    f"retention must be a multiple of {scheduler_block}, the least common multiple of the groups' "
                    f"block sizes; got {retention}"
                )
        fine = any(group.kind == STATE and group.block_size > unit for group in cacheable) and all(
            group.kind in FULL or group.kind == STATE or group.block_size == unit for group in cacheable
        )
        drop = speculative is not None and speculative.drops
        if speculative is not None:
            if speculative.reads_ahead and any(group.kind == LOCAL for group in taken):
                raise ValueError(f"speculative: vLLM has no draft model with groups of kind {LOCAL!r}")
            if speculative.chunk_lookahead > max(scheduler_block, 1):
                raise ValueError(
                    f"speculative: {speculative.chunk_lookahead} modules need blocks of at least that number of "
                    f"tokens, as vLLM refuses others; the blocks of all groups together have {scheduler_block}"
                )
            if caching and speculative.lookahead >= _FULL_CUTS_FROM and not any(each.kind in FULL for each in taken):
                raise ValueError(
                    f"speculative: names that look {speculative.lookahead} tokens ahead need a group of full "
                    "attention, as vLLM 0.33.0 ends with an IndexError at a look-up without one; got groups of "
                    f"{groups_text(taken)}"
                )
        families: dict[tuple[Any, ...], list[int]] = {}
        for number, group in enumerate(taken):
            if group.cacheable:
                families.setdefault(group.spec, []).append(number)
        ordered = sorted(families.values(), key=lambda numbers: taken[numbers[0]].kind not in FULL)
        flagged = any(group.eagle for group in taken)
        dropping = {
            number
            for numbers in ordered
            if drop and (not flagged or any(taken[each].eagle for each in numbers))
            for number in numbers
        }
        return cls(
            groups=taken,
            retention=retention,
            drop=drop,
            lookahead=speculative.lookahead if speculative is not None and caching else 0,
            computed_again=0 if speculative is None else max(speculative.chunk_lookahead - 1, 0),
            caching=caching,
            scheduler_block_size=scheduler_block,
            hash_unit=unit,
            alignment=unit if aligned and fine else scheduler_block,
            families=tuple(map(tuple, ordered)),
            drops=tuple(number in dropping for number in range(len(taken))),
        )

    @property
    def fine_hits(self) -> bool:
        """Whether a hit may end inside a block."""
        return self.alignment < self.scheduler_block_size

    @property
    def aligned_states(self) -> bool:
        """Whether chunks are cut where states are to be cached."""
        return self.caching and any(group.kind == STATE and group.mode == "align" for group in self.groups)

    def uncached(self) -> GroupGeometry:
        """Return the same engine without prefix caching.

        In a state group, a request has one block for all its tokens, and the scratch blocks.
        """
        groups = tuple(
            group
            if group.kind != STATE
            else CacheGroup(STATE, _WHOLE_REQUEST, mode="none", speculative_blocks=group.speculative_blocks)
            for group in self.groups
        )
        uncached = GroupGeometry.of(groups, retention=self.retention and 0, caching=False)
        return replace(uncached, computed_again=self.computed_again)

    def prompt_end(self, prompt_tokens: int, unit: int) -> int:
        """Return the last multiple of `unit` at which a request with the same prompt could resume from a state."""
        if self.drop:
            return max(prompt_tokens // unit * unit - unit, 0)
        return max(prompt_tokens - max(1, self.lookahead), 0) // unit * unit

    def checkpoints(self, prompt_tokens: int, junction: int, number: int) -> set[int]:
        """Return the token counts that prompts resume from: a sparse group keeps the blocks before them at any
        retention.

        Args:
            prompt_tokens: length of the prompt.
            junction: number of tokens that the request shares with others, see `GroupRequest`; 0 if none.
            number: the group's number.
        """
        size = self.scheduler_block_size
        kept = {(prompt_tokens - 1) // size * size}
        if self.drop:
            kept = {max(tokens // size * size - size, 0) for tokens in (prompt_tokens - 1, prompt_tokens)}
        if junction:
            kept.add(junction // size * size)
            if self.drops[number]:
                kept.add(max(junction - self.groups[number].block_size, 0) // size * size)
        return kept

    def admission_cap(self, number: int, batch_tokens: int, max_model_len: int | None) -> int | None:
        """Return the most blocks of a group that the admission of a request requires; None if there is no cap.

        Args:
            number: the group's number.
            batch_tokens: the most tokens that may be in flight.
            max_model_len: the longest request; None if there is no limit.
        """
        group = self.groups[number]
        if group.window is not None:
            reach, extra = group.window - 1 + self.computed_again, 1
        elif group.chunk is not None:
            reach, extra = group.chunk, 0
        else:
            return None
        tokens = reach + batch_tokens
        if max_model_len is not None:
            tokens = min(tokens, max_model_len)
        return -(-tokens // group.block_size) + extra


def check_context_parallel(dcp: object, pcp: object, block_size: int, groups: Iterable[CacheGroup] = ()) -> None:
    """Check the sizes of context parallelism.

    Args:
        dcp: number of ranks that share the tokens of a block.
        pcp: number of ranks of prefill context parallelism.
        block_size: tokens per block.
        groups: the cache groups of the engine, if it has several.

    Raises:
        ValueError: a size is invalid, or `dcp` is not 1 and a group has windows or chunks: vLLM refuses to start.
    """
    check_integer("dcp", dcp, 1)
    check_integer("pcp", pcp, 1)
    if dcp != 1 and dcp % pcp:  # type: ignore[operator]  # they are integers
        raise ValueError(f"dcp must be 1, or a multiple of pcp, which is {pcp}; got {dcp}")
    if block_size % dcp:  # type: ignore[operator]  # as above
        raise ValueError(f"dcp must divide block_size, {block_size} tokens, into pages; got {dcp}")
    odd = next((group for group in groups if group.kind in (*WINDOWS, LOCAL)), None)
    if dcp != 1 and odd is not None:
        raise ValueError(f"dcp must be 1 with a cache group of kind {odd.kind!r}, as vLLM refuses it; got {dcp}")


def with_scratch(groups: tuple[CacheGroup, ...], drafts: int) -> tuple[CacheGroup, ...]:
    """Return the groups of an engine with `drafts` drafts per step: each state group gets as many scratch blocks.

    Raises:
        ValueError: a group already has `speculative_blocks`.
    """
    odd = next((group for group in groups if group.speculative_blocks), None)
    if odd is not None:
        raise ValueError(
            f"cache group {odd.kind!r}: speculative_blocks is the number of tokens of speculative, {drafts}; leave "
            f"them out; got {odd.speculative_blocks}"
        )
    return tuple(replace(group, speculative_blocks=drafts) if group.kind == STATE else group for group in groups)


@dataclass(frozen=True, slots=True)
class BlocksAlone:
    """The blocks that a request needs from all groups together if it is the only request and nothing is cached.

    The count is exact if no group keeps states. A request that needs more blocks than exist can never run.

    Attributes:
        groups: the groups of the engine.
        caps: per group, the most blocks that an admission requires; None if there is no cap.
        chunks: yields the chunks of a prompt of n tokens: start, end, and the number of states that the chunk takes in
            addition to the running ones.
        exported: number of these states for a prompt of n tokens in one chunk, as its admission assumes.
        again: tokens that windows keep beyond their own (`GroupGeometry.computed_again`).
    """

    groups: tuple[CacheGroup, ...]
    caps: tuple[int | None, ...]
    chunks: Callable[[int], Iterable[tuple[int, int, int]]]
    exported: Callable[[int], int]
    again: int = 0

    def to_admit(self, prompt: int) -> int:
        """Count the blocks that must be free for a prompt of `prompt` tokens to be admitted."""
        return self.exported(prompt) + sum(
            _held(group, 0, prompt, 0) if cap is None else min(_held(group, 0, prompt, 0), cap)
            for group, cap in zip(self.groups, self.caps, strict=True)
        )

    def to_compute(self, prompt: int, tokens: int) -> int:
        """Return the most blocks held at once until `tokens` tokens are computed.

        The prompt is computed in chunks, the other tokens one per step.
        """
        most = max((self._held(start, end) + states for start, end, states in self.chunks(prompt)), default=0)
        # The needs repeat after a period, except in groups that free nothing, whose needs grow: only the last period
        # counts.
        period = lcm(*(each for group in self.groups for each in (group.block_size, group.chunk or 1)))
        first = max(prompt, tokens - period)
        for start in range(first, tokens):
            if start == first or any(not start % group.block_size for group in self.groups):
                most = max(most, self._held(start, start + 1))
        return most

    def _held(self, start: int, end: int) -> int:
        return sum(_held(group, start, end, self.again) for group in self.groups)

    def at_most(self, tokens: int) -> int:
        """Return an upper bound of the blocks for `tokens` tokens, without walking chunks."""
        return sum(
            -(-tokens // group.block_size) + group.speculative_blocks + 4 * (group.kind == STATE)
            for group in self.groups
        )


def _held(group: CacheGroup, start: int, end: int, again: int) -> int:
    """Count the blocks of a group that a request holds while it computes the tokens from `start` to `end`."""
    if group.kind == RING:
        return 1
    size = group.block_size
    if group.kind == STATE and group.mode == "align":
        # The running state, and the previous one if the tokens end in a later block.
        return 1 + group.speculative_blocks + (start > 0 and (start - 1) // size < (end - 1) // size)
    return -(-end // size) + group.speculative_blocks - max(group.skipped(start, again), 0) // size
