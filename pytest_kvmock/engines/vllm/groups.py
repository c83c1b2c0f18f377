"""Cache groups of a hybrid model, and what follows from them: the sizes of scheduler blocks, hash units and hits.

One subject: the geometry of an engine, and what a request needs of it.
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
# groups take blocks from one pool. They are numbered by their first layers in the model.
#
# Tokens are hashed in units, the largest that divides all blocks. A hit ends at a multiple of the alignment, which is
# the least common multiple of their blocks, or the unit where the engine copies a block that a hit ends in (fine hits).


_FULL_CUTS_FROM: Final = 2
"""From this many tokens of lookahead on, a look-up in windows alone begins behind the last name."""

_WHOLE_REQUEST: Final = 2**40  # tokens, more than a request has

Retention: TypeAlias = int | None
"""Which blocks of sparse groups are cached: 0: those that prompts resume from; positive: also those that end at each
multiple of this number of tokens; None: all that a hit may use."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The groups of one engine, and what follows from them. `of` makes one.

    Attributes:
        groups: in the engine's order.
        retention: which blocks of sparse groups are cached (`Retention`).
        drop: hits in the groups of a draft model are one unit shorter than what is cached.
        lookahead: how many of the next tokens names cover too.
        computed_again: with several draft modules, the last tokens that may be computed again. They are not cached yet,
            in groups that drop and if there is one group; windows keep as many tokens more, whatever a look-up finds.
        caching: whether anything is cached.
        scheduler_block_size: the smallest number of tokens that is whole blocks in all groups.
        hash_unit: tokens that a hash is made of.
        alignment: hits end at multiples of it.
        families: the numbers of the groups of one spec each, those of full attention first.
        drops: per group, whether a hit in it is one unit shorter than what is cached.
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
        """Work out the sizes of an engine of these groups.

        Args:
            groups: at least one that can be cached.
            retention: as given; a multiple of the scheduler's block.
            match_unit: tokens of a hash (`--prefix-match-unit`), which divides all blocks; None: the largest that does.
            speculative: the draft model; None if there is none.
            caching: as given.

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
        """Whether chunks end where states are cached."""
        return self.caching and any(group.kind == STATE and group.mode == "align" for group in self.groups)

    def uncached(self) -> GroupGeometry:
        """The same engine without prefix caching: of a state, a request has one block for all its tokens, and the
        scratch blocks.
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
        """The last multiple of a unit that a request of the same prompt could resume from, with a state."""
        if self.drop:
            return max(prompt_tokens // unit * unit - unit, 0)
        return max(prompt_tokens - max(1, self.lookahead), 0) // unit * unit

    def checkpoints(self, prompt_tokens: int, junction: int, number: int) -> set[int]:
        """The token counts that a sparse group keeps its blocks before, whatever the interval: what prompts resume
        from.

        Args:
            prompt_tokens: length of the prompt.
            junction: where the request left what others have in common with it; 0: nowhere.
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
        """The most blocks that a group is asked for as a request is admitted; None: as many as it has tokens for.

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
    """Let sizes of context parallelism pass.

    Args:
        dcp: ranks that share the tokens of a block.
        pcp: ranks of prefill context parallelism.
        block_size: tokens a block.
        groups: the cache groups of the engine, where it has several.

    Raises:
        ValueError: they are not what they must be, or a group has windows or chunks, with which vLLM does not start.
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
    """The groups of an engine with `drafts` drafts a step: states have as many scratch blocks.

    Raises:
        ValueError: a group has `speculative_blocks` already.
    """
    odd = next((group for group in groups if group.speculative_blocks), None)
    if odd is not None:
        raise ValueError(
            f"cache group {odd.kind!r}: speculative_blocks is the number of tokens of speculative, {drafts}; leave "
            "them out; "
            f"got {odd.speculative_blocks}"
        )
    return tuple(replace(group, speculative_blocks=drafts) if group.kind == STATE else group for group in groups)


@dataclass(frozen=True, slots=True)
class BlocksAlone:
    """The blocks that a request needs of all groups together where it is the only one, and nothing is cached.

    It is exact where no group keeps states. What needs more than there are can never run.

    Attributes:
        groups: of the engine.
        caps: of each group, the most blocks that it is asked for as a request is admitted; None: as many as it has
            tokens for.
        chunks: how a prompt of n tokens is computed: for each chunk where it begins and ends, and the states that it
            takes in addition to the running ones.
        exported: those states for a prompt of n tokens that is one chunk, as which it is admitted.
        again: tokens that windows keep beyond their own (`GroupGeometry.computed_again`).
    """

    groups: tuple[CacheGroup, ...]
    caps: tuple[int | None, ...]
    chunks: Callable[[int], Iterable[tuple[int, int, int]]]
    exported: Callable[[int], int]
    again: int = 0

    def to_admit(self, prompt: int) -> int:
        """The blocks that must be free for a prompt of `prompt` tokens to be admitted."""
        return self.exported(prompt) + sum(
            _held(group, 0, prompt, 0) if cap is None else min(_held(group, 0, prompt, 0), cap)
            for group, cap in zip(self.groups, self.caps, strict=True)
        )

    def to_compute(self, prompt: int, tokens: int) -> int:
        """The most blocks that are held at once until `tokens` tokens are computed: a prompt in chunks, others one a
        step.
        """
        most = max((self._held(start, end) + states for start, end, states in self.chunks(prompt)), default=0)
        # The needs of tokens repeat after a period, except in groups that free nothing; so only the last period counts.
        period = lcm(*(each for group in self.groups for each in (group.block_size, group.chunk or 1)))
        first = max(prompt, tokens - period)
        for start in range(first, tokens):
            if start == first or any(not start % group.block_size for group in self.groups):
                most = max(most, self._held(start, start + 1))
        return most

    def _held(self, start: int, end: int) -> int:
        return sum(_held(group, start, end, self.again) for group in self.groups)

    def at_most(self, tokens: int) -> int:
        """Blocks that are surely enough for `tokens` tokens, quickly counted."""
        return sum(
            -(-tokens // group.block_size) + group.speculative_blocks + 4 * (group.kind == STATE)
            for group in self.groups
        )


def _held(group: CacheGroup, start: int, end: int, again: int) -> int:
    """The blocks that a request holds of a group as it computes the tokens from one on up to another."""
    if group.kind == RING:
        return 1
    size = group.block_size
    if group.kind == STATE and group.mode == "align":
        # The running state, and the one before it where the tokens end in a later block.
        return 1 + group.speculative_blocks + (start > 0 and (start - 1) // size < (end - 1) // size)
    return -(-end // size) + group.speculative_blocks - max(group.skipped(start, again), 0) // size
