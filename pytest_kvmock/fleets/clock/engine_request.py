"""A request of an engine, from its arrival to its last token."""

from __future__ import annotations

import sys
from array import array
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
from pytest_kvmock.engines.worker import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_kvmock.values.moves import Block
    from pytest_kvmock.values.tokens import Prompt


class RequestOwner(Protocol):
    """The interface of an engine to its requests."""

    def abort(self, request: EngineRequest, /) -> None:
        """Call a request off."""

    def ends(self, request: EngineRequest, /) -> bool:
        """Whether the pass under way ends a request, whose end is not reported yet."""


class EngineRequest(ScheduledRequest):
    """One request of an engine, made by `MockEngine.submit`. It adds these attributes to those of `ScheduledRequest`.

    Args:
        owner: its engine.
        state: the driver's own request.
        prompt: the prompt.
        prompt_tokens: length of the prompt.
        max_output_tokens: number of tokens that it generates.
        rng: source of its tokens; None if the prompt's tokens are unknown and output tokens are not used.
        planned: tokens that are not random, by position in the output.
        **options: `arrival_ms` and `priority`, as `ScheduledRequest` takes them.

    Attributes:
        prompt: as given.
        requested_output_tokens: number of output tokens that it asked for; `max_output_tokens` may be fewer.
        number: its number in the engine's log; 0: it is not recorded.
        abort_after_tokens: number of output tokens after which it is called off; None for no such limit.
    """

    __slots__ = ("_owner", "_planned", "_rng", "abort_after_tokens", "number", "prompt", "requested_output_tokens")

    def __init__(
        self,
        owner: RequestOwner,
        state: Any,
        prompt: Prompt,
        prompt_tokens: int,
        max_output_tokens: int,
        *,
        rng: Random | None,
        planned: Mapping[int, int],
        **options: Any,
    ) -> None:
        super().__init__(state, prompt_tokens, max_output_tokens, **options)
        self.prompt = prompt
        self.number = 0
        self.abort_after_tokens: int | None = None
        self.requested_output_tokens = max_output_tokens
        self._owner = owner
        self._rng = rng
        self._planned = planned

    @property
    def blocks(self) -> list[Block]:
        """Its blocks in order: sequence hashes, and the UUID of a partial last block."""
        return list(self.state.blocks)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that its first admission found cached; 0 before."""
        return self.first_reused_tokens

    def abort(self) -> None:
        """Abort the request because its client is gone; see `MockEngine.abort`.

        Raises:
            RequestError: it is finished, rejected, aborted or lost.
        """
        if not self.is_open and not self._owner.ends(self):
            raise RequestError(f"abort on a request that is {self.status}; it must be waiting, running or preempted")
        self._owner.abort(self)

    def end(self) -> None:
        """Drop the source of tokens, a large object, because no token follows."""
        self._rng = None

    def lose(self) -> None:
        """Give the request up because its worker restarts."""
        self.status = "lost"

    def next_token(self) -> int:
        """Return the next generated token, random or planned."""
        if self._rng is None:
            return 0
        token = self._planned.get(self.generated_tokens) if self._planned else None
        return self._rng.getrandbits(32) if token is None else token

    def next_tokens(self, count: int) -> Sequence[int]:
        """Return the next generated tokens, as `count` calls of `next_token` would."""
        if self._rng is None:
            return [0] * count
        if type(self._rng) is Random and not self._planned:
            # One large draw has the same words as single draws; the first word is the lowest.
            words = array("I", self._rng.getrandbits(32 * count).to_bytes(4 * count, "little"))
            if sys.byteorder == "big":
                words.byteswap()
            return words
        draw, planned, start = self._rng.getrandbits, self._planned, self.generated_tokens
        if not planned:
            return [draw(32) for _ in range(count)]
        return [planned[i] if i in planned else draw(32) for i in range(start, start + count)]
