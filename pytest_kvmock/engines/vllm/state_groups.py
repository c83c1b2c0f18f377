"""Groups of recurrent states (Mamba, GDN, KDA): the states that they hold and cache, and the ends of chunks for
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.cache_group import RING, STATE
from pytest_kvmock.engines.vllm.group_policies import GroupPolicy
from pytest_kvmock.engines.vllm.group_request import Checkpoint, Span
from pytest_kvmock.engines.vllm.named_pool import NULL, NamedPool

if TYPE_CHECKING:
    from pytest_kvmock.engines.vllm.group_policies import GroupJournal, Lookup
    from pytest_kvmock.engines.vllm.group_request import GroupRequest, GroupTable
    from pytest_kvmock.engines.vllm.groups import GroupGeometry

# Theory of operation
#
# A block of a state group is a state: the state after the tokens of a chunk. A request holds only its running state,
# the previous state until the model has answered, and scratch blocks for speculation behind them; all other positions
# are null. A state is cached where a chunk ends at the end of a block, at the last unit of a prompt (fine hits), or
# where the backend exports it within a chunk (a checkpoint). Chunks are cut so that they end there.
#
# A state that another request named, or the request itself at the end of its prompt, must not be overwritten: it is
# copied first. A state named in this step is not computed yet, so requests can resume from it only in the next step.


class StatePolicy(GroupPolicy):
    """States in mode "align".

    It also uses the fields `begun`, `retired`, `checkpoint` and `named_inside` of a `GroupTable`.

    Attributes:
        named_in_step: the first names of the states that were named in this step.
        named: the states that were named since the connector last took them: request, block and tokens; None if there
            is no connector.
    """

    def __init__(self, number: int, geometry: GroupGeometry, pool: NamedPool, journal: GroupJournal) -> None:
        super().__init__(number, geometry, pool, journal)
        self._scratch = self.group.speculative_blocks
        self.named_in_step: set[tuple[int, int]] = set()
        self.named: list[tuple[GroupRequest, int, int]] | None = None

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:  # noqa: ARG002 - states are checkpointed earlier instead
        """Return the last token count at which a state is cached."""
        size = self._alignment
        return next((tokens for tokens in range(limit // size * size, 0, -size) if look.has(tokens)), 0)

    def found(self, request: GroupRequest, hit: int, reached: int) -> list[int]:  # noqa: ARG002 - there is one state
        """Return the one state of the hit, behind null positions."""
        return [NULL] * self._first_found(hit) + [self._pool.cached[self.number][request.key(hit)]]

    # ------------------------------------------------------------------------------------------------ allocation

    def missing(
        self,
        request: GroupRequest,
        span: Span,
        hits: Sequence[int],
        cap: int | None = None,  # noqa: ARG002 - states have none
        *,
        asks: bool = False,
    ) -> int:
        """Count the running state, for any length of chunk, and a checkpoint, a copy and scratch blocks if due."""
        table, pool, size = request.tables[self.number], self._pool, self.block_size
        checkpoint = self._checkpoint(request, table, span)
        if not asks:
            table.checkpoint = checkpoint
        if hits and not self.named_in_step.isdisjoint(pool.names(hits[-1])[:1]):
            return len(pool.refs)  # more than exist, so that the request waits a step
        copies = bool(hits and span.hit % size) or table.named_inside is not None
        new = max(-(-span.end // size) + self._scratch - len(hits) - len(table.blocks), 0) + copies
        most = 1 + copies + (checkpoint is not None) + (0 if table.begun else self._scratch)
        return min(new, most) + pool.idle(hits)

    def _checkpoint(self, request: GroupRequest, table: GroupTable, span: Span) -> Checkpoint | None:
        """Return the state that is exported within a chunk and has no block yet; None if there is none."""
        checkpoint = self.exports(max(request.tokens.num_prompt_tokens, len(request) - 1), span.start, span.end)
        if checkpoint is None:
            return None
        held = len(table.blocks) - (self._scratch if table.begun else 0)
        free = checkpoint.position >= held or table.blocks[checkpoint.position] == NULL
        return checkpoint if free else None

    def exports(self, last: int, start: int, end: int) -> Checkpoint | None:
        """Return the state exported within a chunk of a prefill that ends at `last` tokens; None if there is none."""
        every = self.group.checkpoint
        if every is None or (self._geometry.retention == 0 and end < last):
            return None
        return self.exported(start, end, every)

    def taken(self, prompt: int, before: int, start: int, end: int) -> int:
        """Count the blocks that a chunk of a prompt takes in addition to the running state.

        They are the exported state, and the copy of a state that the last chunk named inside a block.
        """
        names_inside = start == self._geometry.prompt_end(prompt, self._unit) and start % self.block_size
        copies = bool(names_inside) and self.exports(prompt, before, start) is None
        return copies + (self.exports(prompt, start, end) is not None)

    def exported(self, start: int, end: int, every: int, prefill: int | None = None) -> Checkpoint | None:
        """Return the state that a backend exporting at multiples of `every` tokens exports in a chunk; None if none.

        Args:
            start: where the chunk begins.
            end: where it ends.
            every: the interval in tokens, counted from `start`.
            prefill: where the prefill ends; None: at `end`.
        """
        unit, size = self._unit, self.block_size
        tokens = self._geometry.prompt_end(end if prefill is None else prefill, self._alignment)
        position = -(-end // size) - 2
        if start % unit or (tokens - start) % every or not start + unit <= tokens < end:
            return None
        return Checkpoint(tokens, position) if position >= 0 and position > (start - 1) // size else None

    def retire(self, table: GroupTable, processed: int) -> None:
        """Free the states before the running one."""
        super().retire(table, processed)
        table.retired = max(self._end_of_null(table, processed), table.retired)

    def behind(self, table: GroupTable, processed: int) -> Iterator[int]:
        """Return the positions of all states before the running one; positions between them may be null."""
        end = self._end_of_null(table, processed)
        return (place for place in range(end - 1, table.retired - 1, -1) if table.blocks[place] != NULL)

    def _end_of_null(self, table: GroupTable, processed: int) -> int:
        return min(self.skipped(processed) // self.block_size, len(table.blocks))

    def fill(self, request: GroupRequest, span: Span, copies: list[tuple[int, int]]) -> None:
        """Take blocks for the running state, a checkpoint and scratch blocks; existing scratch blocks move to the
        end.
        """
        table = request.tables[self.number]
        blocks, pool = table.blocks, self._pool
        required = -(-span.end // self.block_size) + self._scratch
        due = table.shares_last or table.named_inside is not None or table.checkpoint is not None
        if required <= len(blocks) and not due:
            table.begun = True
            return
        self._copy_shared(table, copies)
        self._copy_named(request, table, copies)
        before = len(blocks)
        first = required - self._scratch - 1 - (table.checkpoint is not None)  # where blocks are needed from
        blocks += [NULL] * (first - before)
        if table.begun:
            for position in range(before - self._scratch, min(before, first)):
                blocks.append(blocks[position])
                blocks[position] = NULL
        if required > len(blocks):
            blocks += pool.take(required - len(blocks))
        table.begun = True

    def _copy_named(self, request: GroupRequest, table: GroupTable, copies: list[tuple[int, int]]) -> None:
        """Move the names of the running state to a copy; the state continues in its own block.

        Both are held until the step ends.
        """
        if table.named_inside is not None:
            source, pool = table.blocks[table.named_inside], self._pool
            table.named_inside = None
            (copy,) = pool.take(1)
            tokens = pool.tokens(source)
            pool.pass_on(source, copy)
            if self.named is not None and tokens % self.block_size:
                self.named.append((request, copy, tokens))
            self.named_in_step.update(pool.names(copy)[:1])
            pool.touch((source,))
            copies.append((source, copy))

    def quiet_tokens(self, table: GroupTable, computed: int) -> int:
        """Return 0 while a copy is due; else see `GroupPolicy`."""
        return 0 if table.named_inside is not None else super().quiet_tokens(table, computed)

    def _slots(self, table: GroupTable) -> int:
        return super()._slots(table) - self._scratch * self.block_size

    # --------------------------------------------------------------------------------------------------- caching

    def kept(self, request: GroupRequest, start: int, end: int) -> Collection[int]:
        """Return the states that prompts resume from, and those at multiples of the retention."""
        size = self.block_size
        if self._geometry.retention is None:
            return range(start, end)
        marks = self._geometry.checkpoints(request.tokens.num_prompt_tokens, request.junction, self.number)
        return [
            place for place in range(start, end) if self._is_regular((place + 1) * size) or (place + 1) * size in marks
        ]

    def _is_regular(self, tokens: int) -> bool:
        """Return whether the state after `tokens` tokens is kept for every request."""
        every = self._geometry.retention
        return not tokens % self.block_size and (every is None or (every > 0 and not tokens % every))

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name the state at the end of a chunk, and the checkpoint or the state at the end of the prompt."""
        table, pool = request.tables[self.number], self._pool
        considered = self._cache_whole(request, table, upto)
        for block in table.blocks[considered.start : considered.stop]:
            self.named_in_step.update(pool.names(block)[:1])
        if table.checkpoint is not None:
            self._cache_checkpoint(request, table, table.checkpoint)
        elif upto and upto == self._geometry.prompt_end(request.tokens.num_prompt_tokens, self._unit):
            self._cache_prompt_end(request, table, upto)
        if self.named is not None and considered:
            # vLLM offers the blocks that have names at this point, without the shortened end of the prompt.
            stop = considered.stop if table.cached is None else table.cached
            for block in table.blocks[considered.start : stop]:
                if pool.names(block):
                    self.named.append((request, block, pool.tokens(block)))

    def _cache_checkpoint(self, request: GroupRequest, table: GroupTable, checkpoint: Checkpoint) -> None:
        tokens, pool = checkpoint.tokens, self._pool
        block = table.blocks[checkpoint.position]
        if block == NULL:
            return
        ends = (self._geometry.prompt_end(request.tokens.num_prompt_tokens, self._alignment), request.junction)
        kept = tokens in ends or self._is_regular(tokens)
        if kept and pool.tokens(block) == tokens:
            return
        names = pool.strip(block)
        if names:
            self._journal.removed(names)
        if kept:
            self._name_inside(request, block, tokens)
            self.named_in_step.add((self.number, request.key(tokens)))

    def _cache_prompt_end(self, request: GroupRequest, table: GroupTable, tokens: int) -> None:
        position = (tokens - 1) // self.block_size
        block = table.blocks[position]
        if block == NULL or self._pool.tokens(block) == tokens:
            return
        self._name_inside(request, block, tokens)
        self.named_in_step.add((self.number, request.key(tokens)))
        if tokens % self.block_size:
            table.cached = position
            table.named_inside = position


class UncachedStatePolicy(GroupPolicy):
    """States in mode "none": one block per `block_size` tokens; no lookup finds any."""

    def longest(self, look: Lookup, limit: int, drops: bool) -> int:  # noqa: ARG002 - as it says
        """Return 0."""
        return 0

    def missing(
        self, request: GroupRequest, span: Span, hits: Sequence[int], cap: int | None = None, *, asks: bool = False
    ) -> int:
        """Count the blocks for the tokens, and the scratch blocks."""
        return super().missing(request, self._with_scratch(span), hits, cap, asks=asks)

    def fill(self, request: GroupRequest, span: Span, copies: list[tuple[int, int]]) -> None:
        """Take the blocks that `missing` counts."""
        super().fill(request, self._with_scratch(span), copies)

    def _slots(self, table: GroupTable) -> int:
        return super()._slots(table) - self.group.speculative_blocks * self.block_size

    def _with_scratch(self, span: Span) -> Span:
        return Span(span.hit, span.start, span.end, span.end + self.group.speculative_blocks * self.block_size)

    def cache(self, request: GroupRequest, upto: int) -> None:
        """Name nothing."""


class ChunkEnds:
    """Chooses the ends of a request's chunks, so that cached states are where later prompts resume.

    Args:
        geometry: the engine's groups and sizes.
        policies: one per group.
        max_num_batched_tokens: the most tokens of one step.
    """

    def __init__(self, geometry: GroupGeometry, policies: Sequence[GroupPolicy], max_num_batched_tokens: int) -> None:
        self._geometry = geometry
        self._most = max_num_batched_tokens
        self._size = min(group.block_size for group in geometry.groups if group.kind != RING)
        self._states = [policy for policy in policies if isinstance(policy, StatePolicy)]
        self._cuts = geometry.aligned_states
        every = [group.checkpoint for group in geometry.groups if group.kind == STATE]
        self._every = every[0] if None not in every and every else None

    def tokens(self, prompt: int, length: int, start: int, tokens: int, junction: int) -> int:
        """Return the tokens of the next chunk; 0 if the request is not in this step.

        Args:
            prompt: tokens of the prompt.
            length: tokens of prompt and output so far.
            start: computed tokens.
            tokens: remaining tokens that fit into the step.
            junction: see `GroupRequest.junction`.
        """
        size, geometry = self._size, self._geometry
        end, prefill = start + tokens, max(prompt, length - 1)
        if not self._cuts or start >= prefill:
            return tokens
        exported = (
            self._every is not None and end >= prefill and self._states[0].exported(start, end, self._every, prefill)
        )
        if end < prefill:
            whole = end // size * size
            if whole > start or size <= self._most:
                end = max(whole, start)
        cuts: list[int] = []
        if not exported:
            cuts = [-(-start // size) * size, geometry.prompt_end(length, size)]
            fine = geometry.prompt_end(prompt, geometry.hash_unit)
            if geometry.fine_hits and cuts[1] < fine < prompt:
                cuts.append(fine)
        if start < junction < end:
            cuts.append(start + (junction - start) // size * size)
        return min([cut for cut in cuts if start < cut < end], default=end) - start

    def taken(self, prompt: int, before: int, start: int, end: int) -> int:
        """Count the blocks that states take in a chunk in addition to the running ones; `before`: start of the last
        chunk.
        """
        return sum(each.taken(prompt, before, start, end) for each in self._states)
