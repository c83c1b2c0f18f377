"""Cache groups in vLLM's host tier: their chunks, and the blocks of windows that later prompts can resume from."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.cache_group import STATE, WINDOWS
from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.vllm.host.chunk_events import OffloadGroup


class ChunkGroup:
    """A cache group in the host, divided into chunks.

    Args:
        group: the group.
        blocks: blocks per chunk.

    Attributes:
        of: the group.
        number: its number in the engine.
        size: tokens per block.
        chunk: tokens per chunk.
        window: number of chunks that a hit needs before its end; None: all.
    """

    __slots__ = ("chunk", "number", "of", "size", "window")

    def __init__(self, group: OffloadGroup, blocks: int) -> None:
        assert group.number is not None  # see `numbered`
        self.of, self.number, self.size = group, group.number, group.block_size
        self.chunk = chunk = group.block_size * blocks
        self.window: int | None = None
        if group.kind in WINDOWS:
            assert group.window is not None
            self.window = max(-(-group.window // chunk), -(-(group.window - 1 + group.again) // chunk))
        elif group.chunk is not None:
            self.window = -(-group.chunk // chunk)
        elif group.kind == STATE:
            self.window = 1

    def keyed(self, tokens: HashedTokens) -> int:
        """Return the number of chunks of a request that have names."""
        return len(tokens.names) * tokens.block_size // self.chunk

    def key(self, tokens: HashedTokens, end: int) -> ChunkKey:
        """Return the key of the chunk that ends after `end` tokens."""
        return tokens.names[end // tokens.block_size - 1], self.number

    def keys(self, tokens: HashedTokens, first: int, last: int) -> list[ChunkKey]:
        """Return the keys of the chunks from `first` up to, not including, `last`."""
        step, number = self.chunk // tokens.block_size, self.number
        return [(name, number) for name in tokens.names[(first + 1) * step - 1 : last * step : step]]

    def window_before(self, tokens: int) -> int:
        """Return the number of chunks that a hit of `tokens` tokens needs in a group with a window.

        The hit may end inside the last chunk.
        """
        assert self.window is not None
        if self.of.window is None:
            return self.window
        return max(self.window, -(-(self.of.window - 1 + self.of.again + -tokens % self.chunk) // self.chunk))


def reachable_blocks(
    group: OffloadGroup,
    start: int,
    end: int,
    *,
    alignment: int | None,
    retention: int | None,
    marks: tuple[int, ...],
    horizon: int | None = None,
) -> Collection[int]:
    """Return the positions from `start` to `end` whose blocks can serve a hit (vLLM: `_reachable_store_block_mask`).

    Args:
        group: any group; without a sliding window, all positions can.
        start: the first position.
        end: the position behind the last.
        alignment: hits end at multiples of this number of tokens; None: anywhere.
        retention: as `Retention`.
        marks: token counts that prompts resume from: the end of the prompt, and where other requests left it; used only
            with a retention.
        horizon: the end of the request in blocks, if known; None: it may go on.
    """
    size, every_block = group.block_size, range(start, end)
    if group.window is None or alignment is None or alignment % size:
        return every_block
    shift = int(group.drafts)  # a look-up for drafts peeks one block further
    need = -(-(group.window + group.again - 1) // size) + shift
    found: set[int] = set()
    segment = alignment if retention is None else retention
    if segment:
        every = segment // size
        if need >= every:
            return every_block
        found.update(at for at in range(max(start, shift), end) if (at - shift) % every >= every - need)
        if horizon is not None and not shift and horizon % every:
            found.update(range(max(start, horizon - horizon % every, horizon - need), min(end, horizon)))
    if retention is not None:
        for mark in marks:
            last = mark // alignment * alignment // size + shift
            found.update(range(max(start, last - need), min(end, last)))
    return found
