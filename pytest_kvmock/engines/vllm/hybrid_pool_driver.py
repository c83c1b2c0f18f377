"""Driver of vLLM's block manager with several cache groups, in chunks that end where states are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.cache_group import STATE
from pytest_kvmock.engines.base.driver import Powers, PromptPlan, checked_manager
from pytest_kvmock.engines.vllm.groups import BlocksAlone
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.engines.vllm.pool_driver import PoolDriver
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.vllm.group_request import ComputedBlocks, GroupRequest

# Theory of operation
#
# Each operation of a worker is a separate step: the next operation can hit the blocks that it caches. A scheduler runs
# several requests in a step, between `begin_pass` and `end_pass`.
#
# The number of blocks that several steps need at once depends on the blocks that windows and states free on the way. An
# estimate that ignores these is quick, and usually there is room for it. Otherwise the steps are tried on a copy of the
# manager.


class HybridPoolDriver(PoolDriver):
    """Turns requests into lookups, allocations and frees of several cache groups.

    Args:
        manager: a `VllmHybridManager`.
        prefix_caching: whether requests may reuse blocks; applied to the manager.
        rng: source of the names of generated blocks if a prompt has only hashes.

    Raises:
        ValueError: the manager is of another kind.
    """

    traits = replace(PoolDriver.traits, promises_more=True, publishes_groups=True)
    manager: VllmHybridManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        driven: VllmHybridManager = checked_manager(manager, VllmHybridManager, "HybridPoolDriver")
        geometry, takes_hashes = driven.geometry, not driven.needs_tokens
        super().__init__(driven, prefix_caching, rng)
        if [group.kind for group in geometry.groups] == [FULL_ATTENTION]:
            self.traits = PoolDriver.traits
        else:
            self.traits = replace(self.traits, groups=geometry.groups)
        self.traits = replace(
            self.traits,
            takes_hashes=takes_hashes,
            promises_more=self.traits.promises_more or geometry.drop,
            looks_ahead=geometry.lookahead,
            drops_last=geometry.drop,
        )
        self._in_pass = False
        self._chunk: int | None = None
        # Blocks that several steps may need beyond the count for one: states around the running one, and copies.
        self._spare = sum(4 + group.speculative_blocks for group in geometry.groups if group.kind == STATE)

    @property
    def powers(self) -> Powers:
        """Its optional abilities, which not every driver has."""
        return replace(
            super().powers,
            take_chunk=self.take_chunk,
            lacking=self.lacking,
            short=lambda request: request.short,
            groups=self,
            begin_pass=self.begin_pass,
            end_pass=self.end_pass,
        )

    def take_chunk(self, chunk: int | None) -> None:
        """Set the number of tokens that the worker prefills at once; None for the whole prompt.

        More states are held for a while where chunks end.
        """
        self._chunk = chunk

    def lookup(self, request: GroupRequest) -> int:
        """Return the tokens of the request, generated ones included, that all groups can resume from.

        Its last token never counts.
        """
        return self.manager.get_computed_blocks(request).num_tokens

    def lacking(self, request: GroupRequest) -> tuple[str, ...]:
        """Return the groups, with their sizes, that cannot resume where full attention can. Changes nothing."""
        return self.manager.missing_groups(self.manager.get_computed_blocks(request))[1]

    # ---------------------------------------------------------------------------------- operations of a worker

    def need(self, request: GroupRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Return the most blocks that these steps take from the queue at once, net of those that they put back."""
        manager = self.manager
        most = manager.missing_blocks(request, upto + len(tokens), self._hits(request)) + self._spare
        if most <= self.room():
            return most
        copy, copied = manager.rehearsal(request, most)
        before = copy.num_free_blocks
        left: list[int] = []
        chunk = self._chunk or max(upto, 1)
        for end in range(chunk, upto + chunk, chunk):
            left += (copy.num_free_blocks for _ in prefill_steps(copy, copied, min(end, upto)))
        left += _decode(copy, copied, tokens)
        return before - min(left, default=before)

    def plan(self, request: GroupRequest, upto: int) -> PromptPlan:
        """Return `need`, `room` and `lookup`, from one look-up, which the manager keeps until something changes."""
        return PromptPlan(self.need(request, upto), self.room(), self.lookup(request))

    def admit(self, request: GroupRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - as `plan` has it
        """Compute the first `upto` tokens, chunk by chunk; any remaining tokens are computed with the next chunk."""
        for _ in prefill_steps(self.manager, request, upto):
            pass

    def extend(self, request: GroupRequest, tokens: Sequence[int]) -> None:
        """Run decode steps, one per token; only those that take, fill or free a block have an effect."""
        for _ in _decode(self.manager, request, tokens):
            pass

    # ------------------------------------------------------------------------------------------ for a scheduler

    def need_of_step(self, request: GroupRequest, upto: int) -> int:
        """Count the blocks that one step takes from the queue, less those that it frees first; without a trial copy."""
        missing = self.manager.missing_blocks(request, upto, self._hits(request))
        return max(missing - self.manager.retirable_blocks(request), 0)

    def limit_passes(self, tokens: int) -> None:
        """Limit passes to `tokens` tokens."""
        self.manager.limit_steps(tokens)

    def begin_pass(self) -> None:
        """Begin a step, which may hit blocks that the previous step cached."""
        self._in_pass = True
        self.manager.new_step_starts()

    def end_pass(self) -> None:
        """End a step: release the blocks copied in it; blocks that it cached may be hit from now on."""
        self._in_pass = False
        end_step(self.manager)

    def chunk_tokens(self, request: GroupRequest, most: int) -> int:
        """Return the tokens of the next chunk, at most `most`; 0 if it waits for a pass with more room."""
        return self.manager.chunk_tokens(request, most, self._hits(request))

    def need_whole(self, request: GroupRequest) -> int:
        """Count the new blocks for all its tokens as vLLM does for admission: for a window, the most held at once."""
        return self.manager.missing_blocks(request, len(request), self._hits(request), for_admission=True)

    def blocks_alone(self, request: GroupRequest) -> int:
        """Count the blocks that a request needs at once if it shares none. If more than exist, it can never run."""
        return self.manager.missing_blocks(request, len(request), for_admission=True)

    def alone(self, chunk: int | None, *, capped: bool) -> BlocksAlone:
        """Return the blocks that a request needs from all groups if it is the only one.

        Args:
            chunk: the most tokens of a pass; None for no limit.
            capped: whether admission counts only the blocks that windows hold at once (`need_whole`).
        """
        manager = self.manager
        caps = manager.admission_caps if capped else [None] * len(manager.geometry.groups)
        chunks = partial(manager.chunks_alone, most=chunk)
        geometry = manager.geometry
        return BlocksAlone(geometry.groups, tuple(caps), chunks, manager.exported_alone, geometry.computed_again)

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or none."""
        hits = self._hits(request)
        new = upto - request.num_computed_tokens - (0 if hits is None else hits.num_tokens)
        if (new > 0 or (hits is not None and hits.num_tokens and not new)) and (
            self.manager.allocate_slots(request, new, hits) is None
        ):
            return request.num_computed_tokens
        return upto

    def tables(self, request: GroupRequest, tokens: int | None = None) -> tuple[list[int], ...]:
        """Return the blocks that a request holds, by group and position: those of `tokens` tokens, or all.

        Block 0 marks a position where it needs none.
        """
        if tokens is None:
            return tuple(table.blocks for table in request.tables)
        sizes = (group.block_size for group in self.manager.geometry.groups)
        return tuple(table.blocks[: -(-tokens // size)] for table, size in zip(request.tables, sizes, strict=True))

    def blocks_to_hold(self, request: GroupRequest, upto: int, *, external: int = 0, hits: bool = True) -> int:
        """Count the blocks of the queue that a request needs for its first `upto` tokens.

        For a window, the most blocks that it holds at once count.
        """
        return self.manager.missing_blocks(
            request, upto, self._hits(request) if hits else None, for_admission=True, num_external_tokens=external
        )

    def hold(self, request: GroupRequest, upto: int, reserved: int = 0) -> bool:
        """Take hits and blocks for the first `upto` tokens, which come from elsewhere.

        Return False if fewer than `reserved` blocks would be left.
        """
        manager, hits = self.manager, self._hits(request)
        external = upto - (0 if hits is None else hits.num_tokens)
        needed = manager.missing_blocks(request, upto, hits, num_external_tokens=external)
        if needed > manager.num_free_blocks - reserved:
            return False
        # a load takes no slots for drafts: those come with the step that runs (vLLM 0.33.0, `Scheduler.schedule`)
        manager.allocate_slots(
            request, 0, hits, num_lookahead_tokens=0, num_external_tokens=external, delay_cache_blocks=True
        )
        return True

    def name(self, request: GroupRequest, upto: int) -> None:
        """Name the blocks within the first `upto` tokens that each group keeps."""
        request.num_computed_tokens = upto
        self.manager.cache_blocks(request, upto)

    def step_inside(self, request: GroupRequest, upto: int) -> bool:
        """Count the first `upto` tokens as computed if no group takes, fills or frees a block for them."""
        if upto - request.num_computed_tokens > self.manager.quiet_tokens(request):
            return False
        request.num_computed_tokens = upto
        return True

    def quiet_tokens(self, request: GroupRequest) -> int:
        """Return the number of tokens, from the last one on, that can be computed before a group takes, fills or frees
        a block.
        """
        return self.manager.quiet_tokens(request) if request.num_computed_tokens == len(request) - 1 else 0

    def _hits(self, request: GroupRequest) -> ComputedBlocks | None:
        return None if request.holds_blocks else self.manager.get_computed_blocks(request)


def end_step(manager: VllmHybridManager) -> None:
    """End a step: the next one may hit blocks that it cached."""
    manager.end_step()
    manager.new_step_starts()


def prefill_steps(
    manager: VllmHybridManager,
    request: GroupRequest,
    upto: int,
    padded: Callable[[VllmHybridManager, GroupRequest, ComputedBlocks], int] | None = None,
) -> Iterator[int]:
    """Compute the first `upto` tokens, as far as chunks may end there; yield the tokens of each step after allocation.

    Args:
        manager: the manager of the request.
        request: the request.
        upto: number of leading tokens.
        padded: returns the tokens of a step that would compute only the last token of a prompt, behind hits; None: one.
    """
    hits = None if request.holds_blocks else manager.get_computed_blocks(request)
    while True:
        start = request.num_computed_tokens + (0 if hits is None else hits.num_tokens)
        tokens = manager.chunk_tokens(request, min(upto - start, manager.max_num_batched_tokens), hits)
        if tokens <= 0:
            return
        if padded is not None and hits is not None and hits.num_tokens and start + 1 == len(request):
            tokens = padded(manager, request, hits)
        taken = manager.allocate_slots(request, tokens, hits)
        assert taken is not None  # the caller has checked this
        yield tokens
        end_step(manager)
        hits = None


def _decode(manager: VllmHybridManager, request: GroupRequest, tokens: Sequence[int]) -> Iterator[int]:
    """Generate these tokens, one per step; yield the number of free blocks in each step that may change it."""
    at = 0
    while at < len(tokens):
        quiet = tokens[at : at + manager.quiet_tokens(request)]
        if quiet:
            request.tokens.extend(quiet)
            request.num_computed_tokens += len(quiet)
            at += len(quiet)
            continue
        request.tokens.append(tokens[at])
        at += 1
        taken = manager.allocate_slots(request, 1)
        assert taken is not None  # as above
        yield manager.num_free_blocks
        end_step(manager)
