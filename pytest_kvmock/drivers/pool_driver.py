"""What the drivers of vLLM's block managers share: how requests are opened, generate and end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.drivers.driver import PROMPT_KEYS, Traits

if TYPE_CHECKING:
    from pytest_kvmock.tokens import Prompt


class PoolDriver:
    """Base of the drivers of vLLM's managers; a subclass looks up and allocates. Requests are those of its manager.

    Args:
        manager: vLLM's.
        prefix_caching: whether its requests may reuse blocks; the manager is set to it.
        rng: source of the names of generated blocks where a prompt has hashes only.
    """

    traits = Traits(recomputes_last_token=True, stores_when="full", copies=True, removed_first=True)
    prompt_keys = PROMPT_KEYS
    admits_whole = True
    """As vLLM since 0.19, where `scheduler_reserve_full_isl` is on by default."""

    manager: Any

    def __init__(self, manager: Any, prefix_caching: bool, rng: Random) -> None:
        self.manager = manager
        self._rng = rng
        if not prefix_caching:
            manager.turn_caching_off()

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """A request that has no block yet."""
        return self.manager.new_request(prompt, rng=None if to_look else self._rng)

    def room(self) -> int:
        """Blocks in the queue."""
        free: int = self.manager.num_free_blocks
        return free

    def needs_no_output(self, request: Any) -> None:
        """Let all of its prompt be cached."""
        request.computes_last_token = False

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate for the first `upto` tokens, and count them as computed; all of them, or none."""
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
        self.manager.free(request)
        if done:  # nothing more is cached at the end
            request.tokens.release()

    def clear(self) -> bool:
        """Drop all that is cached."""
        cleared: bool = self.manager.reset_prefix_cache()
        return cleared
