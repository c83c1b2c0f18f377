"""The protocol of drivers, which connect a worker to a block manager, their powers, and the traits of engines.

One subject: the interface of an engine for workers and schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.cache_group import CacheGroup
    from pytest_kvmock.engines.base.event_recorder import EventRecorder
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.values.events import Stored
    from pytest_kvmock.values.prompt_keys import EventExtra
    from pytest_kvmock.values.sinks import Sink


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of an engine: the differences between engines on which a test may rely.

    Attributes:
        recomputes_last_token: whether the last token of a prompt is computed even if it is cached. Then a prompt of
            whole cached blocks does not reuse its last block.
        stores_when: when a block that output fills is published: "next_token", when the next token opens another block;
            "full", when its last token is computed; "finish", when the request finishes; "lookahead", when the next
            tokens that its name covers are known (`looks_ahead`); "never", because only prompts are stored.
        copies: whether the same block may be cached and published several times.
        removed_first: whether the evictions of a step are published before its stores, not after them.
        cleared_first: whether its first event is a Cleared.
        chunks: whether it takes blocks chunk by chunk if a profile has a `chunk`; if not, it takes them for the whole
            prompt at once.
        promises_more: whether its events promise more than a request can use: it serves a hybrid model, whose windows
            or states may be evicted where blocks are cached, or it drops the last block of a hit.
        publishes_groups: whether each cache group of its hybrid model publishes separate blocks (vLLM). A router counts
            the blocks of the attention group.
        takes_hashes: whether it takes prompts of hashes only; if not, prompts must have tokens.
        groups: the caches of its hybrid model with their sizes in tokens: blocks, windows and chunks; empty for an
            engine with one cache. In SGLang the block of a state is the distance between states.
        partial_blocks: whether parts of cached blocks are reused and partial blocks are published. Then the tokens that
            a request reuses need not be whole blocks, and may be more than its events promise.
        chunk: blocks of a chunk on the host, if the engine copies computed blocks to its own host, as vLLM does (events
            do not name chunks); None: the host gets blocks that the device evicts, or there is no host.
        stores_again: whether a Stored of a tier below the device may name a block that is there already, without
            another copy: SGLang's host does so when a window or state is copied later.
        extra_keys: whether its events give the data hashed with the tokens separately for each block (vLLM's
            `extra_keys`), or once for all blocks, by `lora_name` and `cache_salt`.
        clears_below: whether a Cleared, which has no tier, also empties the tiers below the device; vLLM's does not.
        looks_ahead: number of next tokens that the name of a block also covers, as with a draft model. A router hashes
            windows that are this much longer.
        drops_last: whether the last block of a hit is computed again, with a draft model.
        pairs: whether the token ids of its events are pairs of neighbouring tokens (SGLang with a draft model).
        names_received: when blocks from another engine are named and published: "taken up", when the scheduler takes up
            the request; "joins the batch", when the request joins the batch; "never".
    """

    recomputes_last_token: bool = False
    stores_when: Literal["next_token", "full", "finish", "lookahead", "never"] = "next_token"
    copies: bool = False
    removed_first: bool = False
    cleared_first: bool = False
    chunks: bool = True
    promises_more: bool = False
    publishes_groups: bool = False
    takes_hashes: bool = True
    groups: tuple[CacheGroup, ...] = ()
    partial_blocks: bool = False
    chunk: int | None = None
    stores_again: bool = False
    extra_keys: bool = True
    clears_below: bool = True
    looks_ahead: int = 0
    drops_last: bool = False
    pairs: bool = False
    names_received: Literal["taken up", "joins the batch", "never"] = "never"


PROMPT_KEYS: Final = ("lora_name", "cache_salt", "multimodal", "session_id")
"""Keys that a prompt may carry in addition to its tokens."""


def check_keys(driver: Driver, prompt: Prompt) -> None:
    """Refuse a prompt with a key that the engine does not hash.

    A session is never hashed and never refused.

    Raises:
        ValueError: the driver's `prompt_keys` lack one of its keys.
    """
    if prompt.keys is None:
        return
    able = driver.prompt_keys
    for name in prompt.keys.naming:
        if name not in able:
            names = [each for each in able if each != "session_id"]
            known = f"it names them by tokens and {', '.join(names)}" if names else "it names them by tokens alone"
            raise ValueError(f"backend {driver.manager.backend!r} names no blocks by {name}; {known}")


def checked_manager(manager: KvManager, kind: type, driver: str) -> Any:
    """Return a manager if it is of the driver's kind.

    Raises:
        ValueError: it is of another kind.
    """
    if not isinstance(manager, kind):
        raise ValueError(f"a {driver} drives a {kind.__name__}, got {manager!r:.80}")  # noqa: TRY004 - one error
    return manager


class WouldWait(KvMockError, RuntimeError):  # noqa: N818 - named like BlockingIOError
    """A request would have to wait, but its caller does not allow it. The request holds no block; its transfers
    continue.

    Attributes:
        deadline: time at which the next transfer is done, in ms. Tick the worker to it, and try again.
    """

    def __init__(self, now: float, deadline: float, why: str) -> None:
        super().__init__(now, deadline, why)
        self.now = now
        self.deadline = deadline
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}, until {self.deadline} ms at the earliest; it is {self.now} ms (wait=True waits, or tick the worker)"  # noqa: E501


class SlotsLost(KvMockError, RuntimeError):  # noqa: N818 - as above
    """A request waits for device blocks that will never be free: no transfer is under way."""


class PromptPlan(NamedTuple):
    """The result of one look-up of a request without blocks, which `admit` can commit.

    Attributes:
        need: see `Driver.need`.
        room: see `Driver.room`.
        hit: leading tokens of the request that are cached.
        found: the match, in the driver's own form.
    """

    need: int
    room: int
    hit: int
    found: Any = None


class Driver(Protocol):
    """Serves the requests of a worker from one kind of block manager; a scheduler's driver also serves an engine.

    `open` returns a request in the driver's own class, with `blocks` (in order; a partial one is a UUID) and a length
    (tokens of prompt and output so far).
    """

    @property
    def manager(self) -> KvManager:
        """The block manager."""

    @property
    def traits(self) -> Traits:
        """The traits of its engine."""

    @property
    def prompt_keys(self) -> tuple[str, ...]:
        """The keys of prompts that its engine hashes in addition to tokens, such as `("lora_name", "cache_salt")`.

        See `Prompt.keys`. A prompt with another key is refused before it reaches the driver.
        """

    @property
    def powers(self) -> Powers:
        """Its present optional abilities."""

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """Open a request without blocks, to pass to the methods below.

        Args:
            prompt: the prompt.
            to_look: whether the request is only for `lookup`: then nothing random is drawn for it, and its keys are not
                kept.
        """

    def lookup(self, request: Any) -> int:
        """Count the leading cached tokens of a request, output included. Changes nothing, not even recency."""

    def need(self, request: Any, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the blocks that a request needs and no request holds; compare it with `room`.

        Changes nothing, except what the engine's own look-up of a request without blocks changes (SGLang's counts as a
        use).

        Args:
            request: the request.
            upto: number of its tokens, from the first.
            tokens: further tokens, one per step, of a request that has its blocks.

        Returns:
            An upper bound; the exact number if `room` is smaller. Steps may need more blocks in between than at the
            end.
        """

    def room(self) -> int:
        """Count the blocks that no request holds."""

    def plan(self, request: Any, upto: int) -> PromptPlan:
        """Look up a request without blocks once, for everything that a worker needs to admit the first `upto` tokens.

        Changes only what `need` changes.
        """

    def admit(self, request: Any, upto: int, plan: PromptPlan | None = None) -> None:
        """Allocate blocks for the first `upto` tokens; the caller has checked that they fit.

        Args:
            request: the request.
            upto: number of its tokens, from the first.
            plan: the plan that was made just before, without other calls in between; None: look the request up now.
        """

    def extend(self, request: Any, tokens: Sequence[int]) -> None:
        """Decode one token per step; the caller has checked that they fit."""

    def free(self, request: Any, *, done: bool) -> None:
        """Free the blocks of a request, if it has any.

        Args:
            request: the request; it keeps its generated tokens.
            done: True if it is over: computed blocks that are not cached yet are cached now. False if it was preempted,
                and will be admitted again.
        """

    def clear(self) -> bool:
        """Drop all cached blocks; do nothing and return False while a block is in use."""


class DraftDriver(Driver, Protocol):
    """Driver of an engine with a draft model: a step generates the accepted drafts and one more token."""

    @property
    def drafts(self) -> int:
        """Maximum number of drafts that a step accepts."""

    def need_runs(self, request: Any, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps; each step generates one of `runs`."""

    def extend_runs(self, request: Any, runs: Sequence[Sequence[int]]) -> None:
        """Extend a request by such steps."""


class ReportingDriver(Protocol):
    """Driver of an engine that publishes the hits of requests that ask for it."""

    def reports(self, request: Any) -> bool:
        """Whether the hits of a request are published at each look-up (vLLM's `kv_cache_report_mode`)."""

    def report(self, request: Any) -> None:
        """Look up a request, and publish its hits if it asks for them, even if it will not be admitted.

        Raises:
            FullReportError: this would end the engine.
        """


class GroupedDriver(Protocol):
    """Driver of an engine with several cache groups, whose requests cannot be cut at any token."""

    def limit_passes(self, tokens: int) -> None:
        """Limit a pass to `tokens` tokens."""

    def need_of_step(self, request: Any, upto: int) -> int:
        """Count the blocks that one step takes; `need` counts all steps of a worker."""

    def chunk_tokens(self, request: Any, most: int) -> int:
        """Count the tokens of the next chunk, at most `most`; 0 if the request has to wait."""

    def blocks_alone(self, request: Any) -> int:
        """Count the blocks of a prompt that shares none; this is not always one for each block of tokens."""

    def alone(self, chunk: int | None, *, capped: bool) -> Any:
        """Return the blocks that a request of any length needs when it is the only one: a `BlocksAlone`.

        Args:
            chunk: maximum tokens of a pass; None if there is none.
            capped: whether admission counts the blocks that windows hold at the same time (`need_whole`).
        """


class BurstDriver(Protocol):
    """Driver of an engine that takes blocks for drafts before they are drawn."""

    def reserve_burst(self, request: Any, tokens: int) -> bool:
        """Take blocks for `tokens` tokens of a request; change nothing and return False if there are too few."""

    def release_burst(self, request: Any) -> None:
        """Free the blocks of tokens that were not generated."""


class PageBurstDriver(Protocol):
    """Driver of a radix cache whose requests may generate several tokens in a pass (`bursts`)."""

    def burst_pages(self, requests: Sequence[Any], bursts: Sequence[int]) -> int:
        """Count the unheld pages that these bursts require, as `step_tokens` counts tokens."""

    def make_burst_room(self, requests: Sequence[Any], bursts: Sequence[int]) -> bool:
        """Evict until there is room for these bursts, as `make_room` does for one token each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Powers:
    """The optional abilities of a driver, each a callable or value; None if it lacks the ability.

    Attributes:
        extra_of: returns the extra data of a Stored whose manager does not give it.
        take_recorder: takes the recorder of its manager, which the driver enters while it acts for a request; without
            this ability, all events belong to requests.
        take_chunk: takes the number of tokens that its worker prefills at once, or None.
        lacking: returns the caches of a hybrid model that lack a prefix that full attention holds.
        short: returns the tokens of a request that full attention had at its admission, and the caches that could not
            resume there.
        brought: returns the number of tokens that came back from the host for a request, and of those from a storage.
        scarce: returns a text of the place with the fewest free blocks; "" if there is only one place.
        clears_with_a_step: whether events are published only with a step, so the Cleared of a reset waits for the next
            step.
        reports: publishes the hits of requests.
        drafts: steps with a draft model.
        generate_run: appends the tokens of a step with drafts.
        drop_last: sets whether the last block of a hit is computed again.
        bursts: reserves blocks for drafts.
        page_bursts: reserves pages for drafts.
        groups: serves several cache groups.
        begin_pass: called before a pass schedules.
        end_pass: called when a pass has scheduled.
        end_iteration: called at the end of a pass with its generated tokens.
        pair: decides what happens to the blocks of ending legs of a P/D pair.
    """

    extra_of: Callable[[Stored], EventExtra | None] | None = None
    take_recorder: Callable[[EventRecorder], None] | None = None
    take_chunk: Callable[[int | None], None] | None = None
    lacking: Callable[[Any], tuple[str, ...]] | None = None
    short: Callable[[Any], tuple[int, tuple[str, ...]]] | None = None
    brought: Callable[[Any], tuple[int, int]] | None = None
    scarce: Callable[[], str] | None = None
    clears_with_a_step: bool = False
    reports: ReportingDriver | None = None
    drafts: DraftDriver | None = None
    generate_run: Callable[[Any, Sequence[int]], None] | None = None
    drop_last: Callable[[bool], None] | None = None
    bursts: BurstDriver | None = None
    page_bursts: PageBurstDriver | None = None
    groups: GroupedDriver | None = None
    begin_pass: Callable[[], None] | None = None
    end_pass: Callable[[], None] | None = None
    end_iteration: Callable[[], None] | None = None
    pair: Any = None


class GeneratingDriver(Driver, Protocol):
    """The common part of all schedulers' drivers: output token by token, with a return value if blocks run short."""

    def generate(self, request: Any, token: int) -> bool:
        """Append a generated token, and allocate its block; without room, take the token back and return False."""

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens that need no block and fill none; the caller has checked this."""


class SchedulerDriver(GeneratingDriver, Protocol):
    """Serves the requests of a scheduler from a block manager: in parts, with a return value if blocks run short."""

    @property
    def admits_whole(self) -> bool:
        """Whether a request is admitted only if there are blocks for all its tokens, even if a pass computes fewer."""

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate blocks for the first `upto` tokens, cached ones first.

        Returns:
            The number of leading tokens that have blocks now: `upto`, or fewer if blocks ran short. In that case a
                manager that allocates all or nothing has changed nothing.
        """

    def quiet_tokens(self, request: Any) -> int:
        """Count the tokens that can be generated, one per pass, before one needs or fills a block."""


class PoolSchedulerDriver(SchedulerDriver, Protocol):
    """Driver of an engine that allocates a block when its first token is computed; generating a token needs no
    block.
    """

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the first `upto` tokens as computed; return False if that needs or fills a block."""

    def needs_no_output(self, request: Any) -> None:
        """Record that a request asks for no output, so its whole prompt may be cached, the last token included."""

    def need_whole(self, request: Any) -> int:
        """Count the blocks that a whole request without blocks needs and no request holds, as 1.6.1 counts them.

        Each hit that another request holds counts as one block fewer, also a hit after the last token, up to the number
        of blocks that it may take.
        """


class CapacityDriver(PoolSchedulerDriver, Protocol):
    """Driver of TensorRT-LLM, whose scheduler first selects the requests that the cache has room for."""

    def adapter(self, request: Any) -> int:
        """Return the number of a request's adapter; a pass is sorted by it. -1 if it has none."""

    def first_new_block(self, request: Any) -> Hashable | None:
        """Return the key of a request's first full block that is not cached; None if there is none.

        The scheduler compares it with those of other requests.
        """


class CountingDriver(CapacityDriver, Protocol):
    """Driver of V1, whose scheduler counts blocks, separately for each window, before it takes any."""

    def free_blocks(self, without: Sequence[Any] = ()) -> list[int]:
        """Count the blocks of each window that no request uses, cached ones included, after the requests `without` free
        theirs.
        """

    def blocks_to_completion(self, request: Any, tokens: int) -> list[int]:
        """Count the blocks of each window that a request needs for `tokens` tokens in all; hits are not subtracted."""

    def blocks_of_step(self, request: Any) -> list[int]:
        """Count the blocks of each window that the next step of a request takes; hits are not subtracted."""


class SuspendingDriver(CapacityDriver, Protocol):
    """Driver of V2, whose scheduler takes pages step by step, and suspends requests to make room."""

    def place(self, request: Any, upto: int) -> bool:
        """Allocate pages for the first `upto` tokens of a prompt; return False if there is no room.

        A first chunk without room holds no page.
        """

    def is_suspended(self, request: Any) -> bool:
        """Return whether a request is suspended: it holds pages and does not run."""

    def suspend(self, request: Any) -> bool:
        """Suspend a running request; return False, and let it run, if its pages cannot move to another tier."""


class ReservingDriver(Driver, Protocol):
    """Driver that reserves blocks for prompts that another engine computes: its engine can be the destination of
    handoffs.
    """

    def reserve(self, request: Any, upto: int) -> int | None:
        """Allocate blocks for the first `upto` tokens of a request without blocks.

        It takes cached blocks, and new ones that no other request can hit before they are claimed.

        Returns:
            The number of new blocks; None, and nothing changed, if there were not enough.
        """

    def claim(self, request: Any, upto: int) -> None:
        """Assign the reserved blocks to the first `upto` tokens, which are computed now."""


class RadixSchedulerDriver(GeneratingDriver, Protocol):
    """Serves the requests of SGLang's scheduler from a radix cache; counts of unheld room are in tokens.

    `open` returns a `RadixRequest`.
    """

    def unheld(self) -> int:
        """Count the tokens that are free, or cached and evictable."""

    def prefill(self, request: Any, upto: int) -> int | None:
        """Compute a chunk up to `upto`; the first chunk of a request matches the cache.

        Returns:
            The position at which this chunk began to compute; None if there is no room.
        """

    def checkpoint(self, request: Any) -> None:
        """Cache the tokens that a chunk or step of a running request computed, if the engine does so at this point."""

    def step_tokens(self, requests: Sequence[Any]) -> int:
        """Count the unheld tokens that one step of these requests requires."""

    def make_room(self, requests: Sequence[Any]) -> bool:
        """Evict until each of these requests has room for a token; return False if this is not possible."""

    def quiet_passes(self, requests: Sequence[Any]) -> int:
        """Count the next passes in which each of these requests generates a token, with no page taken, filled or
        evicted.
        """


class PagedSchedulerDriver(RadixSchedulerDriver, Protocol):
    """Driver of a cache whose requests take whole pages and always compute their last token (1.6.1)."""

    def needs_no_output(self, request: Any) -> None:
        """Record that a request asks for no output, so its whole prompt may be cached, the last token included."""

    def known(self, request: Any) -> int:
        """Count the leading tokens of a request that are cached now, its last one included. Changes nothing."""

    def generate_last(self, request: Any, token: int) -> None:
        """Append the last generated token, which is not computed."""


MakeManager: TypeAlias = Callable[["Sink | None"], "KvManager"]
"""Makes a manager that publishes to the sink it is given."""

MakeDriver: TypeAlias = Callable[["KvManager", bool, Random], Driver]
"""Makes a driver; called with the manager, whether prefix caching is on, and the source of random numbers."""
