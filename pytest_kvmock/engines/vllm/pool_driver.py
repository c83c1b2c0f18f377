"""Common base of the drivers of vLLM's block managers: requests are opened, generate and end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from pytest_kvmock.engines.base.driver import PROMPT_KEYS, Powers, Traits

if TYPE_CHECKING:
    from pytest_kvmock.values.tokens import Prompt


class Ends(Protocol):
    """Decides about the blocks of some requests when they end or are preempted."""

    def freed(self, state: Any, *, done: bool) -> bool:
        """Handle a request that is about to free its blocks; return whether this takes the place of the free."""


class PoolDriver:
    """Base of the drivers of vLLM's managers; a subclass looks up and allocates. The manager makes the requests.

    Args:
        manager: a block manager of vLLM.
        prefix_caching: whether requests may reuse blocks; applied to the manager.
        rng: source of the names of generated blocks if a prompt has only hashes.
    """

    traits = Traits(
        recomputes_last_token=True, stores_when="full", copies=True, removed_first=True, names_received="taken up"
    )
    prompt_keys = PROMPT_KEYS
    admits_whole = True
    """As in vLLM since 0.19, which has `scheduler_reserve_full_isl` on by default."""

    pair: Ends | None = None
    """Decides about the blocks of legs when these end, in an engine of a pair."""

    manager: Any

    def __init__(self, manager: Any, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._rng = rng
        if not prefix_caching:
            manager.turn_caching_off()

    @property
    def powers(self) -> Powers:
        """Its optional abilities, which not every driver has."""
        return Powers(clears_with_a_step=True, reports=self, pair=self.pair)

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """Make a request without blocks."""
        return self.manager.new_request(prompt, rng=None if to_look else self._rng)

    def room(self) -> int:
        """Return the number of blocks in the queue."""
        free: int = self.manager.num_free_blocks
        return free

    def reports(self, request: Any) -> bool:
        """Return whether each look-up of a request publishes its hits (vLLM's `kv_cache_report_mode`)."""
        keys = request.tokens.keys
        return keys is not None and keys.report_mode is not None

    def report(self, request: Any) -> None:
        """Publish the hits of a request that asked for reports; it is looked up now, whether or not it is admitted.

        Raises:
            FullReportError: the report ends the engine.
        """
        if self.reports(request):
            self.manager.report_hits(request)

    def needs_no_output(self, request: Any) -> None:
        """Let hits cover its whole prompt: its last token needs no output."""
        request.computes_last_token = False

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate for the first `upto` tokens and count them as computed; all of them, or none."""
        raise NotImplementedError

    def tables(self, request: Any, tokens: int | None = None) -> tuple[list[int], ...]:
        """Return the blocks that a request holds, by group and position: those of `tokens` tokens, or all.

        Block 0 marks a position where it needs none.
        """
        raise NotImplementedError

    def blocks_to_hold(self, request: Any, upto: int, *, external: int = 0, hits: bool = True) -> int:
        """Count the blocks that a request needs for its first `upto` tokens, as vLLM does for admission."""
        raise NotImplementedError

    def hold(self, request: Any, upto: int, reserved: int = 0) -> bool:
        """Take hits and blocks for the first `upto` tokens, which come from elsewhere; only `name` names the blocks.

        Returns:
            False, and nothing has changed, if too few blocks are free or would be left.
        """
        raise NotImplementedError

    def name(self, request: Any, upto: int) -> None:
        """Name the blocks of the first `upto` tokens, which have come from elsewhere, and publish them."""
        raise NotImplementedError

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the first `upto` tokens as computed if that takes, fills and frees no block."""
        raise NotImplementedError

    def generate(self, request: Any, token: int) -> bool:
        """Append a token; it gets its slot in the next pass, which computes it."""
        request.tokens.append(token)
        return True

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
        request.tokens.extend(tokens)
        request.num_computed_tokens += len(tokens)

    def free(self, request: Any, *, done: bool) -> None:
        """Free all blocks, tail first; generated tokens are kept, and looked up when the request is resumed."""
        if self.pair is None or not self.pair.freed(request, done=done):
            self.manager.free(request)
        if done:  # a finished request caches no more blocks
            request.tokens.release()

    def clear(self) -> bool:
        """Drop the whole cache."""
        cleared: bool = self.manager.reset_prefix_cache()
        return cleared
