"""The protocol of drivers, which connect a worker to a block manager, and the traits of engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of an engine: what a test may expect of its workers where engines differ.

    Attributes:
        recomputes_last_token: the last token of a prompt is computed though it is cached, so of a prompt that is whole
            blocks, all cached, the last one is not reused.
        stores_when: when a block that output fills is published: "next_token", once the next token opens another;
            "full", when its last token is computed; "finish", when the request finishes.
        copies: the same block may be cached, and published, several times.
        removed_first: what a step evicts is published before what it stores; else after.
        cleared_first: its first event is a Cleared.
        chunks: it takes blocks chunk by chunk where a profile has a `chunk`; else for the whole prompt at once.
    """

    recomputes_last_token: bool = False
    stores_when: Literal["next_token", "full", "finish"] = "next_token"
    copies: bool = False
    removed_first: bool = False
    cleared_first: bool = False
    chunks: bool = True


PROMPT_KEYS: Final = ("lora_name", "cache_salt", "multimodal", "session_id")
"""What a prompt may carry beside its tokens."""


def check_keys(driver: Driver, prompt: Prompt) -> None:
    """Refuse a prompt with what the engine does not name blocks by.

    The session of a prompt names nothing, and is refused nowhere.

    Raises:
        ValueError: the driver's `prompt_keys` has not all of them.
    """
    if prompt.keys is None:
        return
    able = getattr(driver, "prompt_keys", ())
    for name in prompt.keys.naming:
        if name not in able:
            names = [each for each in able if each != "session_id"]
            known = f"it names them by tokens and {', '.join(names)}" if names else "it names them by tokens alone"
            raise ValueError(f"backend {driver.manager.backend!r} names no blocks by {name}; {known}")


class WouldWait(RuntimeError):  # noqa: N818 - named for what it says, as BlockingIOError is
    """A request would have to wait, and must not. It holds nothing; what it has set going goes on.

    Attributes:
        deadline: when the next transfer is done, in ms: tick the worker to then and try again.
    """

    def __init__(self, now: float, deadline: float, why: str) -> None:
        super().__init__(now, deadline, why)
        self.now = now
        self.deadline = deadline
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}, until {self.deadline} ms at the earliest; it is {self.now} ms (wait=True waits, or tick the worker)"


class SlotsLost(RuntimeError):  # noqa: N818 - as above
    """A request waits for blocks of the device that nothing will ever free; nothing is under way."""


class Driver(Protocol):
    """Brings the requests of a worker to a block manager of one kind.

    A prompt may carry more than tokens (`Prompt.keys`). A driver whose engine names blocks by that has the names in
    `prompt_keys`, such as `("lora_name", "cache_salt")`; without the attribute, prompts that have any are refused before they
    come to it. Where its manager does not say what travels beside a Stored, a driver may have a method `extra_of(stored)`.

    What `open` returns is the driver's own: it has `blocks` (in order; a partial one is a UUID) and a length (tokens of
    prompt and output so far).
    """

    @property
    def manager(self) -> KvManager:
        """The block manager that takes its requests."""

    @property
    def traits(self) -> Traits:
        """The traits of its engine."""

    def lookup(self, prompt: Prompt) -> int:
        """Count the tokens of the prompt that are cached now. Changes nothing, recency included."""

    def open(self, prompt: Prompt) -> Any:
        """Open a request, without a block yet; what it returns is passed to the calls below."""

    def cached(self, request: Any) -> int:
        """Tokens of the request's prompt that are cached now."""

    def blocks_needed(self, request: Any) -> tuple[int, int]:
        """Return how many blocks the whole request needs that nobody holds (at most), and how many nobody holds."""

    def admit(self, request: Any, upto: int) -> None:
        """Allocate blocks for the first `upto` tokens; they fit, as was checked before."""

    def plan(self, request: Any, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the same as `blocks_needed`, of decode steps, one a token. Changes nothing."""

    def extend(self, request: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token; they fit, as was checked before."""

    def release(self, request: Any) -> None:
        """Free the blocks of a request that is done."""

    def preempt(self, request: Any) -> None:
        """Free the request's blocks, and keep what it has generated."""

    def clear(self) -> bool:
        """Drop all that is cached; False, and nothing changed, while a block is in use."""


class SchedulerDriver(Driver, Protocol):
    """Brings the requests of a scheduler to a block manager: in parts, and with an answer where blocks run short."""

    @property
    def admits_whole(self) -> bool:
        """Whether a request is admitted only when blocks for all its tokens are there, whatever a pass computes of it."""

    def reusable(self, request: Any) -> int:
        """Count the tokens of a request without blocks that are cached now. Changes nothing."""

    def fits(self, request: Any, upto: int) -> bool:
        """Return whether there are blocks for the first `upto` tokens. Changes nothing."""

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate blocks for the first `upto` tokens, cached ones first.

        Returns:
            How many tokens, from the first, have blocks now: `upto`, or fewer where blocks ran short. A manager that
            allocates all or nothing then has changed nothing.
        """

    def generate(self, request: Any, token: int) -> bool:
        """Append a generated token, and allocate what it needs; False: no block is free, the token is taken back."""

    def quiet_tokens(self, request: Any) -> int:
        """Count the tokens that can be generated, one a pass, before one needs a block or fills one."""

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append as many tokens as `quiet_tokens` allows, at most."""


@runtime_checkable
class ReservingDriver(SchedulerDriver, Protocol):
    """Reserves blocks for prompts that are computed elsewhere: its engine can be the destination of handoffs."""

    def reserve(self, request: Any, upto: int) -> bool:
        """Allocate blocks for the first `upto` tokens of a request without blocks.

        Those that are cached, and new ones that nobody else can hit before they are claimed.

        Returns:
            Whether there were enough; where not, nothing has changed.
        """

    def claim(self, request: Any, upto: int) -> None:
        """Make the reserved blocks those of the first `upto` tokens, which are computed now."""


class RadixSchedulerDriver(Driver, Protocol):
    """Brings the requests of SGLang's scheduler to a radix cache, and counts what there is room for, in tokens."""

    has_priorities: bool
    """Whether waiting requests are served by priority."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""

    def begin(self, semantics: Literal["1.2.1", "1.3.1"]) -> None:
        """Follow this release of Dynamo, where the cache is Dynamo's; called before anything else.

        Raises:
            ValueError: the cache was made for another one.
        """

    def unheld(self) -> int:
        """Count the tokens that are free, or cached and evictable."""

    def slack(self, request: Any) -> int:
        """Count the tokens that were allocated to a request by rounding up to pages and are unheld all the same."""

    def matched(self, request: Any) -> int:
        """Count the leading tokens of a request, its output included, that are cached. Changes nothing."""

    def prefill(self, request: Any, upto: int) -> int | None:
        """Compute a chunk, up to this token; the first one of a request matches what is cached.

        Returns:
            Tokens before which nothing was computed in this chunk. None: there is no room.
        """

    def chunk_done(self, request: Any) -> None:
        """Cache what a chunk computed that is not the last of its request."""

    def opens_page(self, request: Any) -> bool:
        """Whether the next token of a request needs another page."""

    def step_tokens(self, requests: Sequence[Any]) -> int:
        """Count the tokens that must be unheld if each of these is to generate one."""

    def make_room(self, requests: Sequence[Any]) -> bool:
        """Evict until each of these has room for a token; False if not all have, with all evicted that may be."""

    def generate(self, request: Any, token: int) -> bool:
        """Append a generated token; False: there is no room, and the token is taken back."""

    def token_done(self, request: Any) -> None:
        """Cache what is computed of a request that goes on."""

    def finish(self, request: Any) -> None:
        """Cache what is computed of a request that is done, and free the rest."""

    def retract(self, request: Any) -> None:
        """Free what the cache has not of a request, and keep its tokens."""

    def quiet_passes(self, requests: Sequence[Any]) -> int:
        """Count the passes in which each of these generates a token and neither needs a page, fills one nor evicts."""

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens to a request, as many as there are quiet passes, at most."""


MakeDriver: TypeAlias = Callable[["KvManager", bool, Random], Driver]
"""Makes the driver of a manager: called with it, whether prefix caching is on, and the source of random numbers."""
