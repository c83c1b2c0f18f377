"""Driver of vLLM's block manager with a draft model: each step tries drafts, and some are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.vllm.hybrid_pool_driver import HybridPoolDriver, end_step, prefill_steps

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import Powers, PromptPlan
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.vllm.group_request import ComputedBlocks, GroupRequest
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager

# Theory of operation
#
# The first output token of a prefill comes with the first generated token. Each further step computes the last token
# and the drafts; its answer is the accepted drafts and one more token. The manager decides what to cache when a step is
# scheduled and when it is answered. Every step has the engine's full number of drafts.


class DraftPoolDriver(HybridPoolDriver):
    """Turns requests into lookups and into steps with drafts, one step at a time.

    Args:
        manager: a `VllmHybridManager` with a draft model.
        prefix_caching: whether requests may reuse blocks; applied to the manager.
        rng: source of the names of generated blocks if a prompt has only hashes.

    Raises:
        ValueError: the manager is of another kind.

    Attributes:
        drafts: the most drafts that a step accepts.
    """

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(manager, prefix_caching, rng)
        draft, geometry = self.manager.speculative, self.manager.geometry
        assert draft is not None
        self.drafts = draft.tokens
        self.traits = replace(self.traits, stores_when="lookahead" if geometry.lookahead else "next_token")
        # Blocks that a step may need in addition to its tokens: slots and drafts in each group.
        beyond = draft.slots + draft.tokens
        self._spare += sum(2 + beyond // group.block_size for group in geometry.groups)

    @property
    def powers(self) -> Powers:
        """Its optional abilities, which not every driver has."""
        return replace(super().powers, drafts=self, generate_run=self.generate_run)

    # ---------------------------------------------------------------------------------- operations of a worker

    def need(self, request: GroupRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Return the most blocks that these steps take from the queue at once, net of those that they put back."""
        return self.need_runs(request, upto, [(token,) for token in tokens])

    def need_runs(self, request: GroupRequest, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that generate these runs of tokens, each accepted drafts and one more token."""
        manager, count = self.manager, sum(map(len, runs))
        most = max(manager.missing_blocks(request, upto + count, self._hits(request)), 0) + self._spare
        if most <= self.room():
            return most
        copy, copied = manager.rehearsal(request, most)
        before, least = copy.num_free_blocks, [copy.num_free_blocks]
        for end in self._ends(request, upto):
            _prefill(copy, copied, end, least)
        for run in runs:
            _decode(copy, copied, run, least)
        return before - min(least)

    def _ends(self, request: GroupRequest, upto: int) -> list[int]:
        """Return where the chunks of a request without blocks end."""
        if request.holds_blocks:
            return []
        chunk = self._chunk or max(upto, 1)
        return [min(end, upto) for end in range(chunk, upto + chunk, chunk)]

    def admit(self, request: GroupRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - as `plan` has it
        """Compute the first `upto` tokens, chunk by chunk; any remaining tokens are computed with the next chunk."""
        _prefill(self.manager, request, upto)

    def extend(self, request: GroupRequest, tokens: Sequence[int]) -> None:
        """Run decode steps, one per token: all drafts are rejected."""
        self.extend_runs(request, [(token,) for token in tokens])

    def extend_runs(self, request: GroupRequest, runs: Sequence[Sequence[int]]) -> None:
        """Run decode steps; each generates accepted drafts and one more token."""
        for run in runs:
            _decode(self.manager, request, run)

    def free(self, request: GroupRequest, *, done: bool) -> None:
        """Free all blocks, tail first; tokens in flight become stale."""
        super().free(request, done=done)
        if request.num_in_flight_tokens:
            request.drafts.answered()
            request.num_in_flight_tokens = 0

    # ------------------------------------------------------------------------------------------ for a scheduler

    def need_of_step(self, request: GroupRequest, upto: int) -> int:
        """Count the blocks needed for the first `upto` tokens; 0 for a request with blocks, which `allocate` checks."""
        return 0 if request.holds_blocks else self.need(request, upto)

    def allocate(self, request: GroupRequest, upto: int) -> int:
        """Schedule a chunk up to `upto` tokens, or the last token and drafts; all of them, or none."""
        manager, hits = self.manager, self._hits(request)
        start = request.num_computed_tokens + (0 if hits is None else hits.num_tokens)
        if hits is None and upto == len(request) and start >= request.tokens.num_prompt_tokens:
            return upto if _schedule(manager, request) else request.num_computed_tokens
        if upto <= start and not (hits is not None and hits.num_tokens):
            return upto
        if manager.allocate_slots(request, upto - start, hits) is None:
            return request.num_computed_tokens
        _scheduled(manager, request, upto - start)
        return upto

    def step_inside(self, request: GroupRequest, upto: int) -> bool:  # noqa: ARG002 - as the others have it
        """Return False: each step must be scheduled, because it may cache accepted tokens."""
        return False

    def quiet_tokens(self, request: GroupRequest) -> int:  # noqa: ARG002 - as above
        """Return 0: each step may cache accepted tokens."""
        return 0

    def generate_run(self, request: GroupRequest, tokens: Sequence[int]) -> None:
        """Answer the scheduled step with accepted drafts and one more token."""
        _answered(self.manager, request, tokens)

    def generate(self, request: GroupRequest, token: int) -> bool:
        """Answer the scheduled step with one token: all drafts are rejected."""
        _answered(self.manager, request, (token,))
        return True


def _scheduled(manager: VllmHybridManager, request: GroupRequest, tokens: int) -> None:
    """Record an allocated step; a step that samples nothing is answered at once."""
    request.drafts.scheduled(request, tokens)
    if request.num_computed_tokens < len(request):
        manager.take_output(request, tokens, None)


def _answered(manager: VllmHybridManager, request: GroupRequest, tokens: Sequence[int]) -> None:
    """Answer the step in flight; if there is none, because no step was scheduled, append the tokens."""
    if request.num_in_flight_tokens:
        manager.take_output(request, request.num_in_flight_tokens, tokens)
    else:
        request.tokens.extend(tokens)


def _prefill(manager: VllmHybridManager, request: GroupRequest, upto: int, least: list[int] | None = None) -> None:
    """Compute the first `upto` tokens, as far as chunks may end there.

    The number of free blocks in each step is appended to `least`.
    """
    for tokens in prefill_steps(manager, request, upto, _padded):
        _scheduled(manager, request, tokens)
        if least is not None:
            least.append(manager.num_free_blocks)


def _padded(manager: VllmHybridManager, request: GroupRequest, hits: ComputedBlocks) -> int:
    """Return the tokens of a step that computes only a prompt's last token: vLLM pads it with drafts to be rejected."""
    assert manager.speculative is not None
    drafts = manager.speculative.tokens
    if 1 + drafts > manager.max_num_batched_tokens:
        return 1
    request.drafts.proposed = drafts
    tokens = manager.chunk_tokens(request, 1 + drafts, hits)
    return tokens if tokens > drafts else 1


def _schedule(manager: VllmHybridManager, request: GroupRequest) -> bool:
    """Schedule the last token and drafts; return False and schedule nothing if blocks run short."""
    assert manager.speculative is not None
    request.drafts.proposed = manager.speculative.tokens
    tokens = manager.chunk_tokens(request, min(request.drafts.wanted(request), manager.max_num_batched_tokens))
    if tokens and manager.allocate_slots(request, tokens) is None:
        return False
    if tokens:
        request.drafts.scheduled(request, tokens)
    return True


def _decode(
    manager: VllmHybridManager, request: GroupRequest, run: Sequence[int], least: list[int] | None = None
) -> None:
    """Generate a run in one step: the outstanding token of a prefill, or the answer to a step scheduled now."""
    if request.num_in_flight_tokens:
        _answered(manager, request, run[:1])
        run = run[1:]
    if run:
        scheduled = _schedule(manager, request)
        assert scheduled  # as above
        if least is not None:
            least.append(manager.num_free_blocks)
        end_step(manager)
        _answered(manager, request, run)
