"""Cache groups of a hybrid model, and what follows from them: the sizes of scheduler blocks, hash units and hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_kvmock.checks import check_integer, unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.cache.vllm.speculative import Speculative

# Theory of operation
#
# A hybrid model keeps several caches, one for each group of layers: all layers of a group share one block table. All
# groups take their blocks from one pool. They are numbered in the order in which their first layers stand in the model.
#
# Tokens are hashed in units, the largest that divides all blocks. A hit ends at a multiple of the alignment, which is the
# least common multiple of their blocks, or the unit where the engine copies a block that a hit ends in (fine hits).

FULL: Final = ("full_attention", "mla_attention")
WINDOWS: Final = ("sliding_window", "sliding_window_mla")
LOCAL: Final = "chunked_local_attention"
STATE: Final = "mamba"
RING: Final = "ring"
KINDS: Final = (*FULL, *WINDOWS, LOCAL, STATE, RING)
"""Kinds of groups, by vLLM's names (`kv_cache_spec_kind`); a ring is its circular buffer, which is never cached."""

_WHOLE_REQUEST: Final = 2**40  # tokens, more than a request has

Retention: TypeAlias = int | None
"""Which blocks of sparse groups are cached: 0: those that prompts resume from; positive: also those that end at each multiple of
so many tokens; None: all that a hit may use."""


@dataclass(frozen=True, slots=True, repr=False)
class CacheGroup:
    """The layers that share one block table. Its repr leaves out what it has not.

    Attributes:
        kind: one of `KINDS`.
        block_size: tokens a block, at least 1.
        window: tokens that a token attends to, itself among them; of windows alone, at least 1.
        chunk: tokens of a chunk, beyond which no token attends; of chunked local attention alone, at least 1.
        checkpoint: the backend of a state can export it within a chunk, at multiples of so many tokens; None: it cannot.
        speculative_blocks: scratch blocks behind the running state.
        mode: of states: "align" where they are cached at the ends of blocks, "none" where they are not cached.
        eagle: it holds draft layers: where hits drop a block (`Speculative.drops`), those in it do; if no group holds any, in all.

    Raises:
        ValueError: a field is not what it must be, or not of this kind.
    """

    kind: str
    block_size: int
    window: int | None = None
    chunk: int | None = None
    checkpoint: int | None = None
    speculative_blocks: int = 0
    mode: Literal["align", "none"] = "align"
    eagle: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(unknown_text("kind of a cache group", self.kind, KINDS))
        where = f"cache group {self.kind!r}: "
        check_integer(f"{where}block_size", self.block_size, 1)
        for name, kinds in (("window", WINDOWS), ("chunk", (LOCAL,))):
            value = getattr(self, name)
            if self.kind in kinds:
                check_integer(f"{where}{name}", value, 1)
            elif value is not None:
                raise ValueError(f"{where}it has no {name}, got {value!r:.80}; {' and '.join(kinds)} have one")
        if self.checkpoint is not None:
            check_integer(f"{where}checkpoint", self.checkpoint, 1, ", or None")
        check_integer(f"{where}speculative_blocks", self.speculative_blocks, 0)
        if self.mode not in ("align", "none"):
            raise ValueError(f"{where}mode must be 'align' or 'none', got {self.mode!r:.80}")
        if not isinstance(self.eagle, bool):
            raise ValueError(f"{where}eagle must be True or False, got {self.eagle!r:.80}")  # noqa: TRY004 - one error
        given = (self.checkpoint, self.speculative_blocks, self.mode)
        if self.kind != STATE and given != (None, 0, "align"):
            raise ValueError(f"{where}checkpoint, speculative_blocks and mode are for groups of kind {STATE!r}")

    def __repr__(self) -> str:
        given = [
            (each.name, getattr(self, each.name))
            for each in fields(self)[1:]
            if getattr(self, each.name) != each.default
        ]
        return f"CacheGroup({self.kind!r}, {', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def cacheable(self) -> bool:
        """Whether blocks of it can be found again."""
        return self.kind != RING

    @property
    def sparse(self) -> bool:
        """Whether it caches only what a later prompt can resume from."""
        return self.kind in WINDOWS or self.kind == STATE

    def skipped(self, tokens: int) -> int:
        """How many of the leading tokens no later one attends to, once so many are computed; less than 1: none."""
        if self.window is not None:
            return tokens - self.window + 1
        if self.chunk is not None:
            return tokens // self.chunk * self.chunk
        return tokens - 1 if self.kind == STATE else 0  # the running state is that of the last token

    @property
    def spec(self) -> tuple[Any, ...]:
        """What vLLM compares: groups of one spec are looked up together."""
        return (
            self.kind,
            self.block_size,
            self.window,
            self.chunk,
            self.checkpoint,
            self.speculative_blocks,
            self.mode,
        )


def groups_text(groups: Iterable[CacheGroup]) -> str:
    """The sizes of cache groups, in words: tokens of a block, of a window and of a chunk, once for groups of one spec."""
    counts = Counter(groups)
    return "; ".join(
        (f"{count} x " if count > 1 else "")
        + f"{group.kind} {group.block_size}"
        + "".join(f" ({name} {size})" for name in ("window", "chunk") if (size := getattr(group, name)) is not None)
        for group, count in counts.items()
    )


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The groups of one engine, and what follows from them. `of` makes one.

    Attributes:
        groups: in the engine's order.
        retention: which blocks of sparse groups are cached (`Retention`).
        drop: hits in the groups of a draft model are one unit shorter than what is cached.
        lookahead: how many of the next tokens names cover too.
        computed_again: with several draft modules, the last tokens that are not cached yet as they may be computed again: in
            groups that drop, and where there is one group.
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
            retention: as above; a multiple of the scheduler's block.
            match_unit: tokens of a hash (`--prefix-match-unit`), which divides all blocks; None: the largest that does.
            speculative: the draft model; None: there is none.
            caching: as above.

        Raises:
            ValueError: a value is not what it must be.
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
                    f"retention must be a multiple of {scheduler_block}, the least common multiple of the groups' block sizes; got {retention}"
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
                    f"speculative: {speculative.chunk_lookahead} modules need blocks of as many tokens at least, as vLLM refuses "
                    f"others; the blocks of all groups together have {scheduler_block}"
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
        """The same engine without prefix caching: of a state, a request has one block for all its tokens, and the scratch blocks."""
        groups = tuple(
            group
            if group.kind != STATE
            else CacheGroup(STATE, _WHOLE_REQUEST, mode="none", speculative_blocks=group.speculative_blocks)
            for group in self.groups
        )
        return GroupGeometry.of(groups, retention=self.retention and 0, caching=False)

    def prompt_end(self, prompt_tokens: int, unit: int) -> int:
        """The last multiple of a unit that a request of the same prompt could resume from, with a state."""
        if self.drop:
            return max(prompt_tokens // unit * unit - unit, 0)
        return max(prompt_tokens - max(1, self.lookahead), 0) // unit * unit

    def checkpoints(self, prompt_tokens: int, junction: int, number: int) -> set[int]:
        """The token counts that a sparse group keeps its blocks before, whatever the interval: what prompts resume from.

        Args:
            prompt_tokens: length of the prompt.
            junction: where the request left what others have in common with it; 0: nowhere.
            number: that of the group.
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
            number: that of the group.
            batch_tokens: the most tokens that may be in flight.
            max_model_len: the longest request; None: there is no limit.
        """
        group = self.groups[number]
        if group.window is not None:
            reach, extra = group.window - 1, 1
        elif group.chunk is not None:
            reach, extra = group.chunk, 0
        else:
            return None
        tokens = reach + batch_tokens
        if max_model_len is not None:
            tokens = min(tokens, max_model_len)
        return -(-tokens // group.block_size) + extra


def with_scratch(groups: tuple[CacheGroup, ...], drafts: int) -> tuple[CacheGroup, ...]:
    """The groups of an engine with so many drafts a step: states have as many scratch blocks.

    Raises:
        ValueError: a group has some of its own.
    """
    odd = next((group for group in groups if group.speculative_blocks), None)
    if odd is not None:
        raise ValueError(
            f"cache group {odd.kind!r}: speculative_blocks are as many as speculative has tokens, {drafts}; leave them out; "
            f"got {odd.speculative_blocks}"
        )
    return tuple(replace(group, speculative_blocks=drafts) if group.kind == STATE else group for group in groups)


@dataclass(frozen=True, slots=True)
class BlocksAlone:
    """The blocks that a request needs of all groups together where it is the only one, and nothing is cached.

    It is exact where no group keeps states. What needs more than there are can never run.

    Attributes:
        groups: of the engine.
        caps: of each group, the most blocks that it is asked for as a request is admitted; None: as many as it has tokens for.
        chunks: how a prompt of so many tokens is computed: of each chunk where it begins and ends, and the states that
            it takes beside the running ones.
        exported: of a prompt of so many tokens that is one chunk, as which it is admitted, likewise those states.
    """

    groups: tuple[CacheGroup, ...]
    caps: tuple[int | None, ...]
    chunks: Callable[[int], Iterable[tuple[int, int, int]]]
    exported: Callable[[int], int]

    def to_admit(self, prompt: int) -> int:
        """The blocks that must be free for a prompt of so many tokens to be admitted."""
        return self.exported(prompt) + sum(
            _held(group, 0, prompt) if cap is None else min(_held(group, 0, prompt), cap)
            for group, cap in zip(self.groups, self.caps, strict=True)
        )

    def to_compute(self, prompt: int, tokens: int) -> int:
        """The most blocks that are held at once until so many tokens are computed: a prompt in chunks, others one a step."""
        most = max((self._held(start, end) + states for start, end, states in self.chunks(prompt)), default=0)
        # What a token needs repeats after so many, but for groups that let go of nothing: those before the last need no more.
        period = lcm(*(each for group in self.groups for each in (group.block_size, group.chunk or 1)))
        first = max(prompt, tokens - period)
        for start in range(first, tokens):
            if start == first or any(not start % group.block_size for group in self.groups):
                most = max(most, self._held(start, start + 1))
        return most

    def _held(self, start: int, end: int) -> int:
        return sum(_held(group, start, end) for group in self.groups)

    def at_most(self, tokens: int) -> int:
        """Blocks that are surely enough for so many tokens, quickly counted."""
        return sum(
            -(-tokens // group.block_size) + group.speculative_blocks + 4 * (group.kind == STATE)
            for group in self.groups
        )


def _held(group: CacheGroup, start: int, end: int) -> int:
    """The blocks that a request holds of a group as it computes the tokens from one on up to another."""
    if group.kind == RING:
        return 1
    size = group.block_size
    if group.kind == STATE and group.mode == "align":
        # The running state, and the one before it where the tokens end in a later block.
        return 1 + group.speculative_blocks + (start > 0 and (start - 1) // size < (end - 1) // size)
    return -(-end // size) + group.speculative_blocks - max(group.skipped(start), 0) // size


def checked_groups(groups: object) -> tuple[CacheGroup, ...]:
    """Return the groups of an engine, at least one that can be cached.

    Raises:
        ValueError: they are none.
    """
    if isinstance(groups, CacheGroup) or not isinstance(groups, Sequence):
        raise ValueError(f"groups must be a list of CacheGroup, got {groups!r:.80}")  # noqa: TRY004 - one error
    for group in groups:
        if not isinstance(group, CacheGroup):
            raise ValueError(f"groups must be a list of CacheGroup, got {group!r:.80} in it")  # noqa: TRY004 - one error
    if not any(group.cacheable for group in groups):
        raise ValueError(f"groups must have one at least that is no ring, got {len(groups)} groups")
    return tuple(groups)
