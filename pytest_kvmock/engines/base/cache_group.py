"""One cache group of a hybrid model: the layers that share one block table. Kinds have vLLM's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from pytest_kvmock.values.checks import check_integer, unknown_text

FULL: Final = ("full_attention", "mla_attention")


WINDOWS: Final = ("sliding_window", "sliding_window_mla")


LOCAL: Final = "chunked_local_attention"


STATE: Final = "mamba"


RING: Final = "ring"


KINDS: Final = (*FULL, *WINDOWS, LOCAL, STATE, RING)
"""Kinds of groups, by vLLM's names (`kv_cache_spec_kind`). A ring is vLLM's circular buffer, which is never cached."""


@dataclass(frozen=True, slots=True, repr=False)
class CacheGroup:
    """The layers that share one block table. Its repr leaves out unset fields.

    Attributes:
        kind: one of `KINDS`.
        block_size: tokens a block, at least 1.
        window: tokens that a token attends to, itself included, at least 1; only for windows.
        chunk: tokens of a chunk, beyond which no token attends, at least 1; only for chunked local attention.
        checkpoint: a state's backend can export it within a chunk at multiples of this number of tokens; None if it
            cannot.
        speculative_blocks: scratch blocks after the running state.
        mode: for states: "align" if they are cached at the ends of blocks, "none" if they are not cached.
        eagle: whether it holds draft layers. If hits drop a block (`Speculative.drops`), hits in such groups do; if no
            group holds draft layers, hits in all groups do.

    Raises:
        ValueError: a field is invalid, or does not belong to this kind.
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
        """Whether its blocks can be cached."""
        return self.kind != RING

    @property
    def sparse(self) -> bool:
        """Whether it caches only blocks from which a later prompt can resume."""
        return self.kind in WINDOWS or self.kind == STATE

    def skipped(self, tokens: int, again: int = 0) -> int:
        """Return the number of leading tokens that no later token attends to after `tokens` computed ones.

        0 or less means none.

        Args:
            tokens: number of computed tokens.
            again: number of last tokens that may be computed again; a window keeps that many tokens more.
        """
        if self.window is not None:
            return tokens - self.window + 1 - again
        if self.chunk is not None:
            return tokens // self.chunk * self.chunk
        return tokens - 1 if self.kind == STATE else 0  # the running state belongs to the last token

    @property
    def spec(self) -> tuple[Any, ...]:
        """The key that vLLM compares: groups with the same spec are looked up together."""
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
    """Return the sizes of cache groups as text: tokens of a block, window and chunk, once for groups of one spec."""
    counts = Counter(groups)
    return "; ".join(
        (f"{count} x " if count > 1 else "")
        + f"{group.kind} {group.block_size}"
        + "".join(f" ({name} {size})" for name in ("window", "chunk") if (size := getattr(group, name)) is not None)
        for group, count in counts.items()
    )


def checked_groups(groups: object) -> tuple[CacheGroup, ...]:
    """Check and return the groups of an engine; at least one must be cacheable.

    Raises:
        ValueError: they are invalid.
    """
    if isinstance(groups, CacheGroup) or not isinstance(groups, Sequence):
        raise ValueError(f"groups must be a list of CacheGroup, got {groups!r:.80}")  # noqa: TRY004 - one error
    for group in groups:
        if not isinstance(group, CacheGroup):
            raise ValueError(f"groups must be a list of CacheGroup, got {group!r:.80} in it")  # noqa: TRY004 - one error
    if not any(group.cacheable for group in groups):
        raise ValueError(f"groups must have at least one that is not a ring, got {len(groups)} groups")
    return tuple(groups)
