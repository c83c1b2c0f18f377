"""Drives vLLM's block manager of several cache groups, as its scheduler does: in chunks that end where states are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.vllm.groups import STATE, BlocksAlone
from pytest_kvmock.cache.vllm.hybrid import VllmHybridManager
from pytest_kvmock.drivers.driver import checked_manager
from pytest_kvmock.drivers.pool_driver import PoolDriver
from pytest_kvmock.prompt_keys import FULL_ATTENTION

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.vllm.group_request import ComputedBlocks, GroupRequest

# Theory of operation
#
# A worker's operations are steps of their own: what one of them caches can be hit by the next. A scheduler runs several
# requests in a step, and calls `begin_pass` and `end_pass` about it.
#
# How many blocks several steps need at once depends on what windows and states free on the way. A count that ignores it is
# quickly made, and mostly there is room for that; where there is not, the steps are tried on a copy of the manager.


class HybridPoolDriver(PoolDriver):
    """Turns requests into lookups, allocations and frees of several cache groups.

    Args:
        manager: vLLM's.
        prefix_caching: whether its requests may reuse blocks; the manager is set to it.
        rng: source of the names of generated blocks where a prompt has hashes only.

    Raises:
        ValueError: the manager is another.
    """

    traits = replace(PoolDriver.traits, promises_more=True, publishes_groups=True)
    chunk: int | None = None
    """Tokens that its worker prefills at once: where chunks end, more states are held for a while; None: the whole prompt."""

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
        # What several steps may need beyond the count for one: states before and behind the running one, and copies.
        self._spare = sum(4 + group.speculative_blocks for group in geometry.groups if group.kind == STATE)

    def lookup(self, request: GroupRequest) -> int:
        """Tokens of the request that all groups can resume from, generated ones included; its last one never counts."""
        return self.manager.get_computed_blocks(request).num_tokens

    def lacking(self, request: GroupRequest) -> tuple[str, ...]:
        """The groups that cannot resume where full attention can, by their sizes. Changes nothing."""
        return self.manager.missing_groups(self.manager.get_computed_blocks(request))[1]

    # ---------------------------------------------------------------------------------- operations of a worker

    def need(self, request: GroupRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """The most blocks that these steps take from the queue at once, less those that they put back."""
        manager = self.manager
        missing = manager.missing_blocks(request, upto + len(tokens), self._hits(request))
        if self._in_pass:  # a scheduler asks for one step
            return max(missing - manager.retirable_blocks(request), 0)
        most = missing + self._spare
        if most <= self.room():
            return most
        copy, copied = manager.rehearsal(request, most)
        before = copy.num_free_blocks
        left: list[int] = []
        chunk = self.chunk or max(upto, 1)
        for end in range(chunk, upto + chunk, chunk):
            left += (copy.num_free_blocks for _ in prefill_steps(copy, copied, min(end, upto)))
        left += _decode(copy, copied, tokens)
        return before - min(left, default=before)

    def admit(self, request: GroupRequest, upto: int) -> None:
        """Compute the first `upto` tokens, chunk by chunk; what is left of them comes with the next chunk."""
        for _ in prefill_steps(self.manager, request, upto):
            pass

    def extend(self, request: GroupRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token; only those that take, fill or free a block do anything."""
        for _ in _decode(self.manager, request, tokens):
            pass

    # ------------------------------------------------------------------------------------------ for a scheduler

    def limit_passes(self, tokens: int) -> None:
        """Passes have so many tokens at most."""
        self.manager.limit_steps(tokens)

    def begin_pass(self) -> None:
        """A step begins: what the one before cached may be hit."""
        self._in_pass = True
        self.manager.new_step_starts()

    def end_pass(self) -> None:
        """A step ends: what was copied in it is let go of, and what it cached may be hit."""
        self._in_pass = False
        end_step(self.manager)

    def chunk_tokens(self, request: GroupRequest, most: int) -> int:
        """Tokens of the next chunk, at most so many; 0: it waits for a pass with more room."""
        return self.manager.chunk_tokens(request, most, self._hits(request))

    def need_whole(self, request: GroupRequest) -> int:
        """New blocks of all its tokens, as vLLM counts them for admission: of a window, what it holds at once."""
        return self.manager.missing_blocks(request, len(request), self._hits(request), for_admission=True)

    def blocks_alone(self, request: GroupRequest) -> int:
        """The blocks that a request without any needs at once if it shares none: with more than there are it can never run."""
        return self.manager.missing_blocks(request, len(request), for_admission=True)

    def alone(self, chunk: int | None, *, capped: bool) -> BlocksAlone:
        """What requests need of all groups where each is the only one.

        Args:
            chunk: the most tokens of a pass; None: any.
            capped: whether they are admitted by what windows hold at once (`need_whole`).
        """
        manager = self.manager
        caps = manager.admission_caps if capped else [None] * len(manager.geometry.groups)
        chunks = partial(manager.chunks_alone, most=chunk)
        return BlocksAlone(manager.geometry.groups, tuple(caps), chunks, manager.exported_alone)

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or none."""
        hits = self._hits(request)
        new = upto - request.num_computed_tokens - (0 if hits is None else hits.num_tokens)
        if (new > 0 or (hits is not None and hits.num_tokens and not new)) and (
            self.manager.allocate_slots(request, new, hits) is None
        ):
            return request.num_computed_tokens
        return upto

    def step_inside(self, request: GroupRequest, upto: int) -> bool:
        """Count the tokens up to one as computed, if no group takes, fills or frees a block for them."""
        if upto - request.num_computed_tokens > self.manager.quiet_tokens(request):
            return False
        request.num_computed_tokens = upto
        return True

    def quiet_tokens(self, request: GroupRequest) -> int:
        """Tokens that are computed, from the last one on, before a group takes, fills or frees a block."""
        return self.manager.quiet_tokens(request) if request.num_computed_tokens == len(request) - 1 else 0

    def _hits(self, request: GroupRequest) -> ComputedBlocks | None:
        return None if request.holds_blocks else self.manager.get_computed_blocks(request)


def end_step(manager: VllmHybridManager) -> None:
    """A step ends, and the next one may hit what it cached."""
    manager.end_step()
    manager.new_step_starts()


def prefill_steps(
    manager: VllmHybridManager,
    request: GroupRequest,
    upto: int,
    padded: Callable[[VllmHybridManager, GroupRequest, ComputedBlocks], int] | None = None,
) -> Iterator[int]:
    """Compute the first `upto` tokens, as far as chunks may end there; yields the tokens of each step that has blocks.

    Args:
        manager: of the request.
        request: whose tokens.
        upto: how many.
        padded: the tokens of a step that would compute the last one of a prompt alone, behind hits; None: one.
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
        assert taken is not None  # it was asked before
        yield tokens
        end_step(manager)
        hits = None


def _decode(manager: VllmHybridManager, request: GroupRequest, tokens: Sequence[int]) -> Iterator[int]:
    """Generate these tokens, one a step; yields how many blocks are free in each step that changes it."""
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
