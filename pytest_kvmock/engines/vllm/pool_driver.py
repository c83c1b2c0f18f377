"""What the drivers of vLLM's block managers share: how requests are opened, generate and end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from pytest_kvmock.engines.base.driver import PROMPT_KEYS, Powers, Traits

if TYPE_CHECKING:
    from pytest_kvmock.values.tokens import Prompt


class Ends(Protocol):
    """What decides about the blocks of some requests as they end, or are preempted."""

    def freed(self, state: Any, *, done: bool) -> bool:
        """A request is to free its blocks; whether that was seen to."""


class PoolDriver:
    """Base of the drivers of vLLM's managers; a subclass looks up and allocates. Requests are its manager's.

    Args:
        manager: vLLM's.
        prefix_caching: whether its requests may reuse blocks; the manager is set to it.
        rng: source of the names of generated blocks where a prompt has hashes only.
    """

    traits = Traits(
        recomputes_last_token=True, stores_when="full", copies=True, removed_first=True, names_received="taken up"
    )
    prompt_keys = PROMPT_KEYS
    admits_whole = True
    """As vLLM since 0.19, where `scheduler_reserve_full_isl` is on by default."""

    pair: Ends | None = None
    """What decides about the blocks of legs as these end, for an engine of a pair."""

    manager: Any

    def __init__(self, manager: Any, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._rng = rng
        if not prefix_caching:
            manager.turn_caching_off()

    @property
    def powers(self) -> Powers:
        """What it can do that not every driver can."""
        return Powers(clears_with_a_step=True, reports=self, pair=self.pair)

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """A request that has no block yet."""
        return self.manager.new_request(prompt, rng=None if to_look else self._rng)

    def room(self) -> int:
        """Blocks in the queue."""
        free: int = self.manager.num_free_blocks
        return free

    def reports(self, request: Any) -> bool:
        """Whether what a request hits is published at each of its look-ups (vLLM's `kv_cache_report_mode`)."""
        keys = request.tokens.keys
        return keys is not None and keys.report_mode is not None

    def report(self, request: Any) -> None:
        """Publish what a request hits, if it asked for that; it is looked up now, whether or not it is admitted.

        Raises:
            FullReportError: the engine ends by it.
        """
        if self.reports(request):
            self.manager.report_hits(request)

    def needs_no_output(self, request: Any) -> None:
        """Let all of its prompt be cached."""
        request.computes_last_token = False

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or none."""
        raise NotImplementedError

    def tables(self, request: Any, tokens: int | None = None) -> tuple[list[int], ...]:
        """The blocks that a request holds, by group and position, those of `tokens` tokens or all.

        Block 0 where it needs none.
        """
        raise NotImplementedError

    def blocks_to_hold(self, request: Any, upto: int, *, external: int = 0, hits: bool = True) -> int:
        """Count the blocks that a request needs for its first `upto` tokens, as vLLM does for admission."""
        raise NotImplementedError

    def hold(self, request: Any, upto: int, reserved: int = 0) -> bool:
        """Take hits and blocks for the first `upto` tokens, which come from elsewhere: nothing is named before `name`.

        Returns:
            False, and nothing has changed: there are too few, or too few would be left.
        """
        raise NotImplementedError

    def name(self, request: Any, upto: int) -> None:
        """Name the blocks of the first `upto` tokens, which have come from elsewhere, and publish them."""
        raise NotImplementedError

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the tokens up to one as computed, if that takes, fills and frees no block."""
        raise NotImplementedError

    def generate(self, request: Any, token: int) -> bool:
        """Append a token; it gets its slot in the pass that computes it, the next one."""
        request.tokens.append(token)
        return True

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Compute the last token and append one, as often as there are tokens."""
        request.tokens.extend(tokens)
        request.num_computed_tokens += len(tokens)

    def free(self, request: Any, *, done: bool) -> None:
        """Free all blocks, tail first; what was generated is kept, and looked up when the request is resumed."""
        if self.pair is None or not self.pair.freed(request, done=done):
            self.manager.free(request)
        if done:  # nothing more is cached at the end
            request.tokens.release()

    def clear(self) -> bool:
        """Drop all that is cached."""
        cleared: bool = self.manager.reset_prefix_cache()
        return cleared
