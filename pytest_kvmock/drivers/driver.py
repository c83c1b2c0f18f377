"""The protocol of drivers, which connect a worker to a block manager, and the traits of engines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from pytest_kvmock.checks import KvMockError
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.vllm.groups import CacheGroup


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of an engine: what a test may expect of its workers where engines differ.

    Attributes:
        recomputes_last_token: the last token of a prompt is computed though it is cached, so of a prompt that is whole
            blocks, all cached, the last one is not reused.
        stores_when: when a block that output fills is published: "next_token", once the next token opens another;
            "full", when its last token is computed; "finish", when the request finishes; "lookahead", when the next tokens that
            its name covers are known (`looks_ahead`); "never": prompts alone are stored.
        copies: the same block may be cached, and published, several times.
        removed_first: what a step evicts is published before what it stores; else after.
        cleared_first: its first event is a Cleared.
        chunks: it takes blocks chunk by chunk where a profile has a `chunk`; else for the whole prompt at once.
        promises_more: its events promise more than a request can use: it serves a hybrid model, whose windows or states may
            be gone where blocks are cached, or it drops the last block of a hit.
        publishes_groups: each cache group of its hybrid model publishes blocks of its own (vLLM), of which a router's are those
            of the attention group; else blocks are of one kind.
        takes_hashes: it takes prompts that are known by hashes only; else prompts must have tokens.
        groups: the caches of its hybrid model with the sizes in force: tokens of blocks, windows and chunks; none of an engine
            with one cache. In SGLang a block of a state is how far apart states are.
        partial_blocks: parts of cached blocks are reused, and blocks that are not full are published, so that the tokens that a
            request reuses need not be whole blocks, and may be more than those that its events promise.
        chunk: of an engine that copies what it computes to a host of its own, as vLLM does, blocks of a chunk there, which no event
            says; None: what the device evicts goes to its host, or it has none.
        extra_keys: whether its events say per block what is hashed beside the tokens (vLLM's `extra_keys`); else once for all blocks,
            by `lora_name` and `cache_salt`.
        clears_below: whether a Cleared, which has no tier, empties the tiers below the device, too; vLLM's is of the device alone.
        looks_ahead: how many of the next tokens the name of a block covers, too, as with a draft model; a router hashes windows of
            as many tokens more.
        drops_last: with a draft model, the last block of a hit is computed again.
        pairs: its events have pairs of neighbours for token ids (SGLang with a draft model).
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
    extra_keys: bool = True
    clears_below: bool = True
    looks_ahead: int = 0
    drops_last: bool = False
    pairs: bool = False


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


def checked_manager(manager: KvManager, kind: type, driver: str) -> Any:
    """Return a manager, for the driver of its kind.

    Raises:
        ValueError: it is of another.
    """
    if not isinstance(manager, kind):
        raise ValueError(f"a {driver} drives a {kind.__name__}, got {manager!r:.80}")  # noqa: TRY004 - one error
    return manager


class WouldWait(KvMockError, RuntimeError):  # noqa: N818 - named for what it says, as BlockingIOError is
    """A request would have to wait and may not. It holds nothing; transfers that it started go on.

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


class SlotsLost(KvMockError, RuntimeError):  # noqa: N818 - as above
    """A request waits for device blocks that nothing will ever free: no transfer is under way."""


class Driver(Protocol):
    """Brings requests to a block manager of one kind: a worker's, and where it is a scheduler's driver too, an engine's.

    A prompt may carry more than tokens (`Prompt.keys`). A driver whose engine names blocks by that has the names in
    `prompt_keys`, such as `("lora_name", "cache_salt")`; without the attribute, prompts that have any are refused before they
    come to it. Where its manager does not say what travels beside a Stored, a driver may have a method `extra_of(stored)`. One that
    has an attribute `chunk` is told there how many tokens its worker prefills at once, or None. One that has `recorder` is given
    what its manager publishes to, which it enters for what is a request's: without the attribute, all is.

    What `open` returns is the driver's own: it has `blocks` (in order; a partial one is a UUID) and a length (tokens of
    prompt and output so far).
    """

    @property
    def manager(self) -> KvManager:
        """The block manager that takes its requests."""

    @property
    def traits(self) -> Traits:
        """The traits of its engine."""

    def open(self, prompt: Prompt, *, to_look: bool = False) -> Any:
        """Open a request, without a block yet; what it returns is passed to the calls below.

        Args:
            prompt: what is asked.
            to_look: it is for `lookup` alone: nothing random is drawn for it, and nothing that it carries is remembered.
        """

    def lookup(self, request: Any) -> int:
        """Count the leading tokens of a request that are cached now, its output included. Changes nothing, recency included."""

    def need(self, request: Any, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the blocks that nobody holds and that a request needs; to be compared with `room`.

        Changes nothing, but where the engine's own lookup of a request without blocks does (SGLang's counts as use).

        Args:
            request: which one.
            upto: for so many of its tokens, from the first.
            tokens: and for these, one a step, of a request that has its blocks.

        Returns:
            At most so many; where `room` has not as many, exactly. Steps may need more at once than they do at the end.
        """

    def room(self) -> int:
        """Count the blocks that no request holds."""

    def admit(self, request: Any, upto: int) -> None:
        """Allocate blocks for the first `upto` tokens; they fit, as was checked before."""

    def extend(self, request: Any, tokens: Sequence[int]) -> None:
        """Decode, one step a token; they fit, as was checked before."""

    def free(self, request: Any, *, done: bool) -> None:
        """Free the blocks of a request, if it has any.

        Args:
            request: which one; it keeps what it has generated.
            done: nothing follows, and what it has computed is cached if it was not yet. False: it was preempted, and will be
                admitted anew.
        """

    def clear(self) -> bool:
        """Drop all that is cached; False, and nothing changed, while a block is in use."""


class DraftDriver(Driver, Protocol):
    """Of an engine with a draft model: a step generates the drafts that are accepted, and one token more."""

    @property
    def drafts(self) -> int:
        """The most drafts that a step accepts."""

    def need_runs(self, request: Any, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that generate these tokens each."""

    def extend_runs(self, request: Any, runs: Sequence[Sequence[int]]) -> None:
        """Extend a request by such steps."""


class GeneratingDriver(Driver, Protocol):
    """What the drivers of all schedulers have besides: output token by token, with an answer where blocks run short."""

    def generate(self, request: Any, token: int) -> bool:
        """Append a generated token, and allocate what it needs; False: there is no room, and the token is taken back."""

    def generate_quietly(self, request: Any, tokens: Sequence[int]) -> None:
        """Append tokens that need no block and fill none, as was asked before."""


class SchedulerDriver(GeneratingDriver, Protocol):
    """Brings the requests of a scheduler to a block manager: in parts, and with an answer where blocks run short."""

    @property
    def admits_whole(self) -> bool:
        """Whether a request is admitted only when blocks for all its tokens are there, whatever a pass computes of it."""

    def allocate(self, request: Any, upto: int) -> int:
        """Allocate blocks for the first `upto` tokens, cached ones first.

        Returns:
            How many tokens, from the first, have blocks now: `upto`, or fewer where blocks ran short. A manager that
            allocates all or nothing then has changed nothing.
        """

    def quiet_tokens(self, request: Any) -> int:
        """Count the tokens that can be generated, one a pass, before one needs a block or fills one."""


class PoolSchedulerDriver(SchedulerDriver, Protocol):
    """Of an engine that allocates a block when the first of its tokens is computed: generating a token needs none.

    Where requests may not be cut anywhere, or one pass shows in another, a driver has besides, each alone: `limit_passes(tokens)`,
    the most of one pass; `begin_pass()` and `end_pass()`, which are called before a pass schedules and after; `end_iteration()`,
    which is called when it is over, with what it generated; `chunk_tokens(request, most)`, the tokens of the next chunk,
    0 where the request has to wait; `blocks_alone(request)`, the blocks of a prompt that shares none, where they are not one a block
    of tokens, and `alone(chunk, capped=)`, what requests of any length need there; `reserve_burst(request, tokens)`,
    whether it gets blocks for tokens that drafts may add, before any is drawn, and `release_burst(request)` for what is
    over.
    """

    def step_inside(self, request: Any, upto: int) -> bool:
        """Count the tokens up to one as computed, if that needs no block and fills none; False: it does."""

    def needs_no_output(self, request: Any) -> None:
        """Note that a request asks for no output: all of its prompt may be cached, its last token included."""

    def need_whole(self, request: Any) -> int:
        """Count the blocks that nobody holds and that all tokens of a request without blocks need, as 1.6.1 counts them.

        Each hit that another request holds counts as one block fewer, those behind the last token too, but no more of
        them than may be taken.
        """


class CapacityDriver(PoolSchedulerDriver, Protocol):
    """Of TensorRT-LLM, whose own scheduler asks which requests its cache has room for before it computes any."""

    def adapter(self, request: Any) -> int:
        """The number of a request's adapter, by which a pass is sorted; -1: it has none."""

    def first_new_block(self, request: Any) -> Hashable | None:
        """What its scheduler compares of the first full block of a request that is not cached; None: nothing."""


class CountingDriver(CapacityDriver, Protocol):
    """Of V1, whose scheduler counts blocks before it takes any, those of each window by themselves."""

    def free_blocks(self, without: Sequence[Any] = ()) -> list[int]:
        """Blocks of each window that nobody uses, cached ones included, if these requests let theirs go."""

    def blocks_to_completion(self, request: Any, tokens: int) -> list[int]:
        """Blocks of each window that a request lacks until it has so many tokens; hits are not subtracted."""

    def blocks_of_step(self, request: Any) -> list[int]:
        """Blocks of each window that the next step of a request takes; hits are not subtracted."""


class SuspendingDriver(CapacityDriver, Protocol):
    """Of V2, whose scheduler takes pages as it goes, and suspends who is to give way."""

    def place(self, request: Any, upto: int) -> bool:
        """Allocate for the first `upto` tokens of a prompt; False: no room, and a first chunk holds nothing."""

    def is_suspended(self, request: Any) -> bool:
        """Whether a request holds pages and does not run."""

    def suspend(self, request: Any) -> bool:
        """Suspend a request that runs; False: its pages could fall nowhere, and it runs on."""


class ReservingDriver(Driver, Protocol):
    """Reserves blocks for prompts that are computed elsewhere: its engine can be the destination of handoffs."""

    def reserve(self, request: Any, upto: int) -> int | None:
        """Allocate blocks for the first `upto` tokens of a request without blocks.

        Those that are cached, and new ones that nobody else can hit before they are claimed.

        Returns:
            How many new ones. None: there were not enough, and nothing has changed.
        """

    def claim(self, request: Any, upto: int) -> None:
        """Make the reserved blocks those of the first `upto` tokens, which are computed now."""


class RadixSchedulerDriver(GeneratingDriver, Protocol):
    """Brings the requests of SGLang's scheduler to a radix cache, and counts what is not held in tokens.

    What `open` returns is a `RadixRequest`.
    """

    def unheld(self) -> int:
        """Count the tokens that are free, or cached and evictable."""

    def prefill(self, request: Any, upto: int) -> int | None:
        """Compute a chunk, up to this token; the first one of a request matches what is cached.

        Returns:
            Tokens before which nothing was computed in this chunk. None: there is no room.
        """

    def checkpoint(self, request: Any) -> None:
        """Cache what a chunk or a token computed of a request that goes on, where the engine does so by then."""

    def step_tokens(self, requests: Sequence[Any]) -> int:
        """Count the tokens that must be unheld if each of these is to generate one."""

    def make_room(self, requests: Sequence[Any]) -> bool:
        """Evict until each of these has room for a token; False if not all have, with all evicted that may be."""

    def quiet_passes(self, requests: Sequence[Any]) -> int:
        """Count the passes in which each of these generates a token and neither needs a page, fills one nor evicts."""


class PagedSchedulerDriver(RadixSchedulerDriver, Protocol):
    """Of a cache whose requests take whole pages, and whose last token is computed whatever is cached (1.6.1).

    It may have `burst_pages(requests, bursts)` and `make_burst_room(requests, bursts)` besides: as `step_tokens`, in
    pages, and `make_room`, where each may generate so many tokens in a pass.
    """

    def needs_no_output(self, request: Any) -> None:
        """Note that a request asks for no output: all of its prompt may be cached, its last token included."""

    def known(self, request: Any) -> int:
        """Count the leading tokens of a request that are cached now, its last one included. Changes nothing."""

    def generate_last(self, request: Any, token: int) -> None:
        """Append a generated token that is not computed, as none follows it."""


MakeDriver: TypeAlias = Callable[["KvManager", bool, Random], Driver]
"""Makes the driver of a manager: called with it, whether prefix caching is on, and the source of random numbers."""
