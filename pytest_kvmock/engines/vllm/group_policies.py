"""vLLM's rules for the blocks of one cache group, by kind: all kinds of attention, and rings.

One subject: the life of a block in its group, from the lookup that finds it to the step that moves a window past it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from pytest_kvmock.engines.vllm.named_pool import NULL, NamedPool

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.vllm.group_request import GroupRequest, GroupTable, Span
    from pytest_kvmock.engines.vllm.groups import GroupGeometry


class GroupJournal(Protocol):
    """Publishes the changes of groups."""

    def stored(
        self, request: GroupRequest, group: int, *, block_size: int, start: int, ends: Sequence[int], end: int
    ) -> None:
        """Publish the blocks that were named.

        Args:
            request: the request that holds them.
            group: the group.
            block_size: tokens per published block.
            start: number of tokens before the first block that was considered.
            ends: for each block that was named, the number of tokens up to its end; may be empty.
            end: number of tokens up to the end of the last block that was considered.
        """

    def removed(self, names: Sequence[tuple[int, int]]) -> None:
        """Publish the names, (group, hash), that blocks lost."""


class Lookup:
    """The cached blocks of one request in a family of groups; a block counts only if all these groups have it.

    Args:
        tokens: the tokens of the request.
        caches: the blocks of each group by hash.
    """

    __slots__ = ("_caches", "_names", "_unit")

    def __init__(self, tokens: HashedTokens, caches: Sequence[dict[int, int]]) -> None:
        self._names, self._unit = tokens.names, tokens.block_size
        self._caches = caches

    def has(self, tokens: int) -> bool:
        """Return whether the block that ends after `tokens` tokens is cached."""
        name = self._names[tokens // self._unit - 1]
        return all(name in cache for cache in self._caches)

    def leading(self, first: int, last: int, block_size: int) -> int:
        """Count the cached blocks from position `first` on, up to the first missing block or up to `last`."""
        step = block_size // self._unit
        names = self._names[(first + 1) * step - 1 : last * step : step]
        for cache in self._caches:
            names = names[: next((place for place, name in enumerate(names) if name not in cache), len(names))]
        return len(names)


class GroupPolicy:
    """Common base of all kinds of groups. A subclass has the rules of its kind.

    Args:
        number: the group's number.
        geometry: the engine's groups and sizes.
        pool: the pool of its blocks.
        journal: publishes its events.
    """

    def __init__(self, number: int, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        self.number = number
        self.group = geometry.groups[number]
        self.block_size = self.group.block_size
        self.drops = geometry.drops[number]
        self._geometry, self._pool, self._journal = geometry, pool, journal
        self._alignment, self._again = geometry.alignment, geometry.computed_again
        self._unit = geometry.hash_unit

    # --------------------------------------------------------------------------------------------------- lookup

    drop_unit = 0
    """Tokens that a lookup adds for a group whose hits are one unit shorter than the cached tokens; 0 if they are
    not."""

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:
        """Return the most tokens, up to a limit, that a request could resume from in this group.

        With `drops`, one unit less.
        """
        raise NotImplementedError

    def skipped(self, tokens: int) -> int:
        """Return the number of leading tokens that no later token attends to after `tokens` computed tokens."""
        return self.group.skipped(tokens, self._again)

    def found(self, request: GroupRequest, hit: int, reached: int) -> list[int]:  # noqa: ARG002 - of a subclass
        """Return the blocks of a hit by position; null where no block is needed.

        Args:
            request: the request.
            hit: tokens that all groups can resume from.
            reached: tokens that this group could resume from.
        """
        first, step = self._first_found(hit), self.block_size // self._unit
        names = request.tokens.names[(first + 1) * step - 1 : hit // self._unit : step]
        return [NULL] * first + list(map(self._pool.cached[self.number].__getitem__, names))

    def _first_found(self, hit: int) -> int:
        return max(self.group.skipped(hit), 0) // self.block_size

    # ------------------------------------------------------------------------------------------------ allocation

    def missing(
        self, request: GroupRequest, span: Span, hits: Sequence[int], cap: int | None = None, *, asks: bool = False
    ) -> int:
        """Count the blocks of the queue that a request needs of this group.

        Args:
            request: the request.
            span: the span that it asks for.
            hits: the hits of the lookup in this group.
            cap: the most blocks that are counted as required; None if there is no cap.
            asks: True only counts; False also plans the allocation.
        """
        del asks  # only state groups plan
        table, size = request.tables[self.number], self.block_size
        required = -(-span.slots // size)
        if cap is not None:
            required = min(required, cap)
        held = len(table.blocks)
        if table.cached is not None:
            return max(required - held, 0)
        behind = max(self.skipped(span.start), 0) // size
        new = max(required - max(behind, len(hits) + held), 0)
        idle = self._pool.idle(hits[max(behind - held, 0) :])
        return new + idle + bool(hits and span.hit % size)

    def retire(self, table: GroupTable, processed: int) -> None:
        """Free the blocks behind the window after `processed` tokens, the last one first."""
        freed = []
        for position in self.behind(table, processed):
            freed.append(table.blocks[position])
            table.blocks[position] = NULL
        if freed:
            self._pool.release(freed)

    def behind(self, table: GroupTable, processed: int) -> Iterator[int]:
        """Yield the positions of the blocks that `retire` would free, the last one first."""
        blocks = table.blocks
        for position in range(min(self.skipped(processed) // self.block_size, len(blocks)) - 1, -1, -1):
            if blocks[position] == NULL:
                return
            yield position

    def adopt(self, table: GroupTable, hits: Sequence[int], hit: int) -> None:
        """Give a request without blocks the blocks that the lookup found."""
        first = self._first_found(hit)
        held = list(hits[first:])
        self._pool.touch(held)
        table.blocks = [NULL] * first + held
        table.shares_last = bool(hit % self.block_size and hits)
        table.cached = hit // self.block_size if table.shares_last else len(table.blocks)

    def receive(self, table: GroupTable, upto: int) -> None:
        """Take blocks for tokens that come computed from elsewhere, up to `upto`; null behind the window."""
        skipped, size = max(self.skipped(upto), 0), self.block_size
        behind = skipped // size - len(table.blocks)
        if behind > 0:
            table.blocks += [NULL] * behind
            table.cached = len(table.blocks)
        count = -(-upto // size) - len(table.blocks)
        if count > 0 and skipped < upto:
            table.blocks += self._pool.take(count)

    def fill(self, request: GroupRequest, span: Span, copies: list[tuple[int, int]]) -> None:
        """Take the blocks that `span` needs; append each pair (block, copy) to `copies`."""
        table = request.tables[self.number]
        self._copy_shared(table, copies)
        count = -(-span.slots // self.block_size) - len(table.blocks)
        if count > 0:
            table.blocks += self._pool.take(count)

    def _copy_shared(self, table: GroupTable, copies: list[tuple[int, int]]) -> None:
        """Replace a shared last block by a copy that only this request writes. Both are held until the step ends."""
        if table.shares_last:
            table.shares_last = False
            (copy,) = self._pool.take(1)
            self._pool.touch((copy,))
            copies.append((table.blocks[-1], copy))
            table.blocks[-1] = copy

    def quiet_tokens(self, table: GroupTable, computed: int) -> int:
        """Return how many steps of one token can follow `computed` tokens before one takes, fills or frees a block."""
        blocks, size = table.blocks, self.block_size
        if self._slots(table) <= computed:
            return 0
        behind = max(self.skipped(computed), 0) // size
        if behind and blocks[min(behind, len(blocks)) - 1] != NULL:
            return 0
        return min(size - 1 - computed % size, self._next_retired(computed) - computed)

    def _slots(self, table: GroupTable) -> int:
        return len(table.blocks) * self.block_size

    def _next_retired(self, computed: int) -> int:
        """Return the number of computed tokens at which one more block is behind the window."""
        skipped = self.skipped(computed)
        return computed - skipped + (max(skipped, 0) // self.block_size + 1) * self.block_size

    # --------------------------------------------------------------------------------------------------- caching

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name and publish the blocks of a request that end within `upto` tokens and that this kind of group keeps."""
        self._cache_whole(request, request.tables[self.number], upto)

    def kept(self, request: GroupRequest, start: int, end: int) -> Collection[int]:  # noqa: ARG002 - of a subclass
        """Return the positions from `start` to `end` whose blocks are named."""
        return range(start, end)

    def _cache_whole(self, request: GroupRequest, table: GroupTable, upto: int) -> range:
        """Name whole blocks; return the positions that were considered."""
        named = len(request.tokens.names) * self._unit
        considered = range(table.cached or 0, min(upto, named) // self.block_size)
        if not considered:
            return considered
        pool, size, blocks, number = self._pool, self.block_size, table.blocks, self.number
        table.cached = considered.stop
        kept = [place for place in self.kept(request, considered.start, considered.stop) if blocks[place] != NULL]
        promoted = [name for place in kept for name in pool.strip(blocks[place])]
        if promoted:
            self._journal.removed(promoted)
        ends = [(place + 1) * size for place in kept]
        for place, end in zip(kept, ends, strict=True):
            pool.name(blocks[place], number, request.key(end), end)
        self._journal.stored(
            request, number, block_size=size, start=considered.start * size, ends=ends, end=considered.stop * size
        )
        return considered

    def _name_inside(self, request: GroupRequest, block: int, tokens: int) -> None:
        """Name a block by its first `tokens` tokens, which may fill it in part; it loses names of fewer tokens."""
        pool, name = self._pool, (self.number, request.key(tokens))
        if name in pool.names(block):
            return
        if pool.names(block) and pool.tokens(block) < tokens:
            self._journal.removed(pool.strip(block))
        pool.name(block, *name, tokens)
        unit = self._unit
        self._journal.stored(request, self.number, block_size=unit, start=tokens - unit, ends=(tokens,), end=tokens)


class FullPolicy(GroupPolicy):
    """Full attention and MLA: every block is kept, and lookups go from the left.

    If a hash unit is smaller than a block, the block in which a prompt ends is also named by the tokens that a request
    with the same prompt could resume from. If hits may end inside a block, lookups find it by that name.
    """

    def __init__(self, number: int, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        super().__init__(number, geometry, pool, journal)
        self.drop_unit = self._unit if self._alignment < self.block_size else self.block_size

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:
        """Count the tokens of blocks from the left until one is missing.

        If hits may end inside a block, the units of the next block count too.
        """
        size, unit, alignment = self.block_size, self._unit, self._alignment
        length = look.leading(0, limit // size, size) * size
        if alignment < size:
            most = min(limit, length + size - 1) // unit * unit
            length = next((tokens for tokens in range(most, length, -unit) if look.has(tokens)), length)
        if drops:
            length = max(length - min(alignment, size), 0)
        return length // alignment * alignment

    def found(self, request: GroupRequest, hit: int, reached: int) -> list[int]:
        """Return all blocks; of the last one, perhaps only the first tokens are hit."""
        blocks, size = super().found(request, hit, reached), self.block_size
        if hit % size:  # the block that the lookup reached; its name may cover more tokens than the hit
            inside = min(reached + (self._unit if self.drops else 0), -(-hit // size) * size)
            blocks.append(self._pool.cached[self.number][request.key(inside)])
        return blocks

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name all full blocks, and the block that the prompt ends in."""
        table = request.tables[self.number]
        self._cache_whole(request, table, upto)
        if self.block_size == self._unit:
            return
        prompt, unit = request.tokens.num_prompt_tokens, self._unit
        named = len(request.tokens.names) * unit
        tail = min((prompt if self.drops else prompt - 1) // unit * unit, named)
        if tail % self.block_size and tail <= upto:
            block = table.blocks[tail // self.block_size]
            if block != NULL:
                self._name_inside(request, block, tail)


class WindowPolicy(GroupPolicy):
    """Sliding windows: a request can resume behind a full window of cached blocks; lookups go from the right."""

    def __init__(self, number: int, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        super().__init__(number, geometry, pool, journal)
        assert self.group.window is not None
        self._need = -(-(self.group.window - 1) // self.block_size)  # blocks that are read before a token
        self.drop_unit = self.block_size

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:
        """Return the last token count that has a full window of cached blocks, or all blocks, before it."""
        size, alignment, most = self.block_size, self._alignment, self._need + drops
        run = end = 0  # consecutive blocks, with their end
        for position in range(limit // size, 0, -1):
            if not look.has(position * size):
                run = 0
            elif run or not (position - drops) * size % alignment:
                end = end if run else position
                run += 1
                if run >= most:
                    return (end - drops) * size
        whole = run * size // alignment * alignment
        return max(whole - drops * size, 0) // alignment * alignment

    def kept(self, request: GroupRequest, start: int, end: int) -> Collection[int]:
        """Return the blocks of the windows that prompts resume from, and of those before each multiple of the
        retention.
        """
        geometry, size, drops = self._geometry, self.block_size, self.drops
        need = (self._need + drops) * size
        every = self._alignment if geometry.retention is None else geometry.retention
        if self._alignment % size or (every and (need >= every or every <= size)):
            return range(start, end)
        marks: Collection[int] = ()
        if geometry.retention is not None:
            marks = geometry.checkpoints(request.tokens.num_prompt_tokens, request.junction, self.number)
        shift = drops * size
        return [
            position
            for position, upto in enumerate(range((start + 1) * size - shift, (end + 1) * size - shift, size), start)
            if (every and upto > 0 and -upto % every < need) or any(mark - need < upto <= mark for mark in marks)
        ]


class LocalPolicy(GroupPolicy):
    """Chunked local attention: no token attends to tokens before its chunk; every block is kept."""

    def __init__(self, number: int, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        super().__init__(number, geometry, pool, journal)
        assert self.group.chunk is not None
        self._chunk = self.group.chunk

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:  # noqa: ARG002 - refused with a draft model
        """Count the tokens up to the first missing block, searched from the start of the chunk that holds the limit."""
        size = self.block_size
        first = self.skipped(limit) // size
        return (first + look.leading(first, limit // size, size)) * size

    def _next_retired(self, computed: int) -> int:
        return (computed // self._chunk + 1) * self._chunk


class RingPolicy(GroupPolicy):
    """A circular buffer: one block per request, which no lookup finds."""

    def found(self, request: GroupRequest, hit: int, reached: int) -> list[int]:  # noqa: ARG002 - nothing ever is
        """Return no blocks."""
        return []

    def missing(
        self,
        request: GroupRequest,
        span: Span,  # noqa: ARG002 - however much that is
        hits: Sequence[int],  # noqa: ARG002 - there are none
        cap: int | None = None,  # noqa: ARG002 - one is the least
        *,
        asks: bool = False,  # noqa: ARG002 - as above
    ) -> int:
        """Count the one block, unless the request has it."""
        return not request.tables[self.number].blocks

    def retire(self, table: GroupTable, processed: int) -> None:
        """Free nothing before the request ends."""

    def behind(self, table: GroupTable, processed: int) -> Iterator[int]:  # noqa: ARG002 - as above
        """Yield nothing: no block is behind a window."""
        return iter(())

    def adopt(self, table: GroupTable, hits: Sequence[int], hit: int) -> None:
        """Do nothing: lookups find no block."""

    def quiet_tokens(self, table: GroupTable, computed: int) -> int:  # noqa: ARG002 - as above
        """Return a block's worth of tokens: no step takes, fills or frees a block."""
        return self.block_size

    def receive(self, table: GroupTable, upto: int) -> None:  # noqa: ARG002 - as above
        """Take the one block."""
        self._take_once(table)

    def fill(self, request: GroupRequest, span: Span, copies: list[tuple[int, int]]) -> None:  # noqa: ARG002 - as above
        """Take the one block."""
        self._take_once(request.tables[self.number])

    def _take_once(self, table: GroupTable) -> None:
        if not table.blocks:
            table.blocks = self._pool.take(1)

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name nothing."""
