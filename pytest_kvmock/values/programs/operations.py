"""A program of requests as values: the operations on workers and router, in order.

All programs use this model: those that a harness records, reductions to a reproduction, scenario files, and programs
    drawn by contracts. Operations compare by value, and their repr is Python that makes them again.

One subject: the operations of a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Protocol, Self, TypeAlias

from pytest_kvmock.values.events import BlockTokens, Stored
from pytest_kvmock.values.programs.forms import Doer, OnRequest, OnWorker, WithPrompt, number_ranges, sizes
from pytest_kvmock.values.programs.forms import Operation as Operation  # noqa: PLC0414 - who records them takes all from here
from pytest_kvmock.values.prompt_keys import PromptKeys
from pytest_kvmock.values.tokens import Prompt, TokenRuns, block_hashes


class Log(Protocol):
    """The log in which workers and engines record each operation before it runs (`harness.recording.Recording`)."""

    def next_request(self) -> int:
        """Return the number of the next request, from 1: its name in operations."""

    def operate(self, operation: type[Operation], /, *fields: object) -> None:
        """Record an operation, given as its class and fields."""

    def retract_pass(self, worker_id: int, dp_rank: int, /) -> None:
        """Remove the last recorded pass of an engine, which never ended and published no events."""


def prompt_fields(
    prompt: Prompt, block_size: int
) -> tuple[Sequence[int], TokenRuns | tuple[int, ...] | int | None, bool]:
    """Return the fields `blocks`, `tail` and `hashed` of an operation with this prompt (`WithPrompt`); `TokenRuns` are
    kept.
    """
    # Not the prompt itself, because it keeps three lists of hashes.
    source = prompt.source
    if source is not None:
        return (), source, False
    blocks = tuple(prompt.block_hashes(block_size))
    return blocks, None if prompt.num_tokens is None else prompt.num_tokens - len(blocks) * block_size, True


@dataclass(frozen=True, slots=True, repr=False)
class Prefill(WithPrompt, OnRequest):
    """Admit a request. Prompts share their common leading blocks.

    Attributes:
        name: how later operations call it.
        blocks: its prompt, a small number for each block (block 3 consists of token 3), or the tokens of each block.
        tail: more tokens: a number of tokens 0, or the tokens.
        worker: the worker.
        rank: its rank.
        hashed: whether blocks are local hashes (see `WithPrompt`).
        wait: whether to let time pass until there is room and its blocks are loaded back from the host; otherwise it is
            not admitted in such a case.
        keys: the keys that the prompt carries; None if there are none.
    """

    kind = "prefill"
    by_name = ("wait",)
    takes = {"request": "text", "prompt": "prompt", "worker": "worker", "wait": "flag"}
    short = ""
    optional = ("wait", "keys")

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    wait: bool = True
    keys: PromptKeys | None = None

    def do(self, doer: Doer) -> Any:
        doer.requests.pop(self.name, None)
        request = doer.requests[self.name] = self.call(doer, doer.prompt(self))
        return request.cached_tokens

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        line = f"{f'{self.variable} = ' if named else ''}{self.prompt_call(block_size)}"
        yield from [line] if self.wait else ["with suppress(WouldWait):", f"    {line}"]


@dataclass(frozen=True, slots=True, repr=False)
class Serve(WithPrompt):
    """Prefill, decode and finish one request that has no name.

    Attributes:
        blocks: its prompt; this and what follows as in `Prefill`.
        tail: further tokens.
        worker: the worker.
        rank: its rank.
        hashed: whether blocks are local hashes.
        output_tokens: how many tokens are generated.
        keys: the keys that the prompt carries.
    """

    kind = "serve"
    takes = {"prompt": "prompt", "output_tokens": "from 0", "worker": "worker"}
    optional = ("keys",)

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    output_tokens: int = 0
    keys: PromptKeys | None = None

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.output_tokens,) if self.output_tokens else (), {}

    def do(self, doer: Doer) -> Any:
        return self.call(doer, doer.prompt(self)).cached_tokens

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield self.prompt_call(block_size)


@dataclass(frozen=True, slots=True, repr=False)
class Decode(OnRequest):
    """Generate tokens, one by one.

    Attributes:
        name: the request.
        tokens: the number of tokens, or the tokens.
        of: the token to generate if `tokens` is a number; full blocks may then equal blocks of another request. None
            for tokens that the worker draws.
        accepted: for an engine with a draft model, the number of drafts that each step accepts; None if there is no
            draft model, or no draft is accepted.
    """

    kind = "decode"
    by_name = ("accepted",)
    takes = {"request": "text", "tokens": "tokens", "count": "from 0", "accepted": "counts"}
    one_of = ("tokens", "count")
    short = ""
    amount = "tokens"
    states = ("running",)

    tokens: int | tuple[int, ...] = 1
    of: int | None = 0
    accepted: tuple[int, ...] | None = None

    @property
    def argument(self) -> int | tuple[int, ...]:
        """The argument of `Request.decode`."""
        tokens, of = self.tokens, self.of
        return tokens if of is None or isinstance(tokens, tuple) else (of,) * tokens

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {} if self.accepted is None else {"accepted": self.accepted}
        return () if self.argument == 1 else (self.argument,), named

    def yaml(self, block_size: int) -> dict[str, Any]:
        tokens = self.argument
        amount: dict[str, Any] = {"count": tokens} if isinstance(tokens, int) else {"tokens": number_ranges(tokens)}
        if self.accepted is not None:
            amount["accepted"] = list(self.accepted)
        return {self.kind: {"request": self.request, **amount}}

    def simpler(self) -> Iterator[Self]:
        if self.accepted is None:
            yield from OnRequest.simpler(self)
            return
        for fewer in sizes(len(self.accepted)):
            accepted = self.accepted[:fewer]
            count = sum(accepted) + len(accepted)
            tokens = count if isinstance(self.tokens, int) else self.tokens[:count]
            yield replace(self, tokens=tokens, accepted=accepted)

    @classmethod
    def from_yaml(cls, given: Mapping[str, Any], block_size: int) -> Self:
        tokens = tuple(chain.from_iterable(given["tokens"])) if "tokens" in given else given["count"]
        accepted = given.get("accepted")
        return cls(given["request"], tokens, of=None, accepted=None if accepted is None else tuple(accepted))


@dataclass(frozen=True, slots=True, repr=False)
class Finish(OnRequest):
    """Finish a request: its blocks are freed but stay cached."""

    kind = "finish"
    states = ("running", "preempted")


@dataclass(frozen=True, slots=True, repr=False)
class Preempt(OnRequest):
    """Preempt a request: its blocks are freed, and it keeps its generated tokens."""

    kind = "preempt"
    states = ("running",)
    becomes = "preempted"


@dataclass(frozen=True, slots=True, repr=False)
class Resume(OnRequest):
    """Resume a preempted request: it gets blocks again."""

    kind = "resume"
    states = ("preempted",)
    becomes = "running"

    def do(self, doer: Doer) -> Any:
        self.call(doer)
        return doer.requests[self.name].cached_tokens


@dataclass(frozen=True, slots=True, repr=False)
class Submit(WithPrompt, OnRequest):
    """Submit a request to the engine of a worker.

    Attributes:
        name: how later operations call it.
        blocks: its prompt; this and what follows as in `Prefill`.
        tail: further tokens.
        worker: the worker.
        rank: its rank.
        hashed: whether blocks are local hashes.
        output_tokens: number of tokens that it generates.
        arrival_ms: when it arrives; None: now.
        priority: its priority; None if the engine has none.
        keys: the keys that the prompt carries.
        abort_after_ms: time from its arrival to its abort; None: no abort.
        abort_after_tokens: number of output tokens until its abort; None: no abort.
    """

    kind = "submit"
    by_place = ("output_tokens",)
    by_name = ("arrival_ms", "priority", "abort_after_ms", "abort_after_tokens")
    whose = "engine"
    takes = {
        "request": "text",
        "prompt": "prompt",
        "output_tokens": "tokens from 1",
        "arrival_ms": "ms",
        "priority": "integer",
        "abort_after_ms": "ms",
        "abort_after_tokens": "from 0",
        "worker": "worker",
    }
    needs = ()
    short = ""
    amount = "output_tokens"
    optional = ("arrival_ms", "priority", "abort_after_ms", "abort_after_tokens", "keys")

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    output_tokens: int = 1
    arrival_ms: float | None = None
    priority: int | None = None
    keys: PromptKeys | None = None
    abort_after_ms: float | None = None
    abort_after_tokens: int | None = None

    def do(self, doer: Doer) -> Any:
        doer.submitted.pop(self.name, None)
        doer.submitted[self.name] = self.call(doer, doer.prompt(self))

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield f"{f'{self.variable} = ' if named else ''}{self.prompt_call(block_size)}"


@dataclass(frozen=True, slots=True, repr=False)
class Abort(OnRequest):
    """Abort a request of an engine."""

    kind = "abort"

    def owner(self, doer: Doer) -> Any:
        return doer.submitted[self.name]

    def fits(self, doer: Doer) -> bool:
        return self.name in doer.submitted and bool(doer.submitted[self.name].is_open)


@dataclass(frozen=True, slots=True, repr=False)
class RunPasses(OnWorker):
    """Let the engine of a worker run forward passes.

    Attributes:
        count: how many.
        worker: the worker.
        rank: its rank.
    """

    kind = "step"
    whose = "engine"
    takes = {"count": "from 1", "worker": "worker"}
    short = "count"
    amount = "count"

    count: int = 1
    worker: int = 0
    rank: int = 0

    def do(self, doer: Doer) -> Any:
        engine = self.owner(doer)
        for _ in range(self.count):
            engine.step()
        return self.count

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        one = self.call_text()
        yield from [f"for _ in range({self.count}):", f"    {one}"] if self.count > 1 else [one]


@dataclass(frozen=True, slots=True, repr=False)
class Run(OnWorker):
    """Let the engine of a worker run until no request is open, or until a moment.

    Attributes:
        until_ms: no pass starts at or after it; None: to the end.
        worker: the worker.
        rank: its rank.
    """

    kind = "run"
    by_name = ("until_ms",)
    whose = "engine"
    takes = {"until_ms": "ms or null", "worker": "worker"}
    short = "until_ms"
    optional = ("until_ms",)

    until_ms: float | None = None
    worker: int = 0
    rank: int = 0

    def do(self, doer: Doer) -> Any:
        engine = self.owner(doer)
        before = engine.passes
        self.call(doer)
        return engine.passes - before


@dataclass(frozen=True, slots=True, repr=False)
class Tick(OnWorker):
    """Move the time of a worker with tiers forward.

    Attributes:
        now_ms: the new time.
        worker: the worker.
        rank: which of its ranks.
    """

    kind = "tick"
    by_place = ("now_ms",)
    takes = {"now_ms": "ms", "worker": "worker"}
    needs = ("now_ms",)
    short = "now_ms"

    now_ms: float = 0.0
    worker: int = 0
    rank: int = 0

    def fits(self, doer: Doer) -> bool:
        worker = self.owner(doer)
        return getattr(worker, "tiers", None) is not None and self.now_ms >= getattr(worker, "now", 0.0)


@dataclass(frozen=True, slots=True, repr=False)
class Clear(OnWorker):
    """Clear a worker: it drops its cached blocks. Nothing happens while it has requests."""

    kind = "clear"
    takes = {"worker": "worker"}
    needs = ("worker",)
    short = "worker"

    worker: int = 0
    rank: int = 0

    def do(self, doer: Doer) -> Any:
        return self.call(doer)


@dataclass(frozen=True, slots=True, repr=False)
class Burst(OnWorker):
    """Serve prompts of one block each, one after the other; the index is flushed and compared only at the end.

    This shows a queue that overflows: in a full cache, each prompt gives two events.

    Attributes:
        count: number of prompts. The first has block 0, the next block 1, and so on, as in `Prefill.blocks`.
        worker: the worker.
        rank: its rank.
    """

    kind = "burst"

    count: int = 1
    worker: int = 0
    rank: int = 0

    @property
    def served(self) -> Iterator[Serve]:
        """The prompts as `Serve` operations."""
        return (Serve((number,), 0, self.worker, self.rank) for number in range(self.count))

    def do(self, doer: Doer) -> Any:
        self.owner(doer)  # creates a missing worker now, so that its first events are not part of the burst
        with doer.harness.burst():
            for served in self.served:
                doer.do(served)

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield "with kv.burst():"
        yield f"    for number in range({self.count}):"
        yield f"        {self.owner_text}.serve([number] * {block_size})"


@dataclass(frozen=True, slots=True, repr=False)
class ServeNear(OnWorker):
    """Serve a prompt whose hash partly equals that of another worker's block; that worker's block names also agree in
    part.

    This shows an index that keeps only that part of local hashes or block hashes. The other worker is a sink, for an
    engine with free block names, because a `lineage` engine itself keeps less than 64 bits of a hash.

    Attributes:
        kept: the part in which the hashes agree: "low32", "high32", "low53", "float53" or "low63".
        worker: the worker.
        rank: its rank.
    """

    kind = "serve_near"

    kept: str = "low63"
    worker: int = 0
    rank: int = 0

    def published(self, block_size: int, *, by_tokens: bool = False) -> Iterator[tuple[Stored, BlockTokens | None]]:
        """Yield the Stored of the other worker: two blocks with nearly equal names, a child of each, and a block with a
        nearly equal local hash.

        Args:
            block_size: tokens per block.
            by_tokens: whether near hashes come from tokens, for an index that is queried by tokens.
        """
        from pytest_kvmock.values.programs.near_hashes import hash_pair  # few tests need it

        first, second = hash_pair(self.kept)
        near = self._near(block_size, by_tokens=by_tokens)[0]
        plain = [(number,) * block_size for number in range(1, 5)]
        local = block_hashes([token for tokens in plain for token in tokens], block_size)
        for place, (parent, name) in enumerate(((None, first), (None, second), (first, 1), (second, 2))):
            yield Stored(parent, (name,), (local[place],)), [plain[place]]
        if isinstance(near, tuple):
            yield Stored(None, (3,), (block_hashes(near, block_size)[0],)), [near]
        else:
            yield Stored(None, (3,), (near,)), None

    def served(self, block_size: int, *, by_tokens: bool = False) -> Serve:
        """Return the prompt as a `Serve` operation; arguments as of `published`."""
        near = self._near(block_size, by_tokens=by_tokens)[1]
        return Serve((near,), 0, self.worker, self.rank, hashed=not by_tokens)

    def _near(self, block_size: int, *, by_tokens: bool) -> tuple[int | tuple[int, ...], int | tuple[int, ...]]:
        from pytest_kvmock.values.programs.near_hashes import hash_pair, token_pair

        return token_pair(block_size, self.kept) if by_tokens else hash_pair(self.kept)

    def fits(self, doer: Doer) -> bool:
        return not self.owner(doer).traits.looks_ahead  # the known hashes are of blocks, not of windows

    def do(self, doer: Doer) -> Any:
        size, by_tokens = doer.block_size, doer.by_tokens or not self.owner(doer).traits.takes_hashes
        sink = doer.harness.make_sink(chained=False)
        for data, tokens in self.published(size, by_tokens=by_tokens):
            sink.publish(data, token_ids=tokens)
        doer.do(self.served(size, by_tokens=by_tokens))

    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield "sink = kv.make_sink(chained=False)"
        yield from (f"sink.publish({data!r})" for data, _ in self.published(block_size))
        yield from self.served(block_size).python(block_size, named=named)


@dataclass(frozen=True, slots=True, repr=False)
class Restart(OnWorker):
    """Restart a worker, as after a crash.

    Attributes:
        worker: the worker.
        rank: which of its ranks.
        announced: whether the router removes it, as after a notice of a discovery service.
    """

    kind = "restart"
    by_name = ("announced",)
    takes = {"worker": "worker", "announced": "flag"}
    needs = ("worker",)
    short = "worker"

    worker: int = 0
    rank: int = 0
    announced: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class RemoveWorker(Operation):
    """Remove a worker from the router, with all its ranks or one of them.

    Attributes:
        worker: the worker.
        rank: which of its ranks; None for all.
    """

    kind = "remove_worker"
    takes = {"worker": "worker or rank"}
    needs = ("worker",)
    short = "worker"

    worker: int = 0
    rank: int | None = None

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.worker if self.rank is None else (self.worker, self.rank),), {}

    def call_text(self, *first: str) -> str:
        return f"{self.owner_text}.{self.kind}({self.given[0][0]})"

    def yaml(self, block_size: int) -> dict[str, Any]:
        return {self.kind: self.worker if self.rank is None else [self.worker, self.rank]}


@dataclass(frozen=True, slots=True, repr=False)
class DropNext(Operation):
    """Drop the next events on their way to the router.

    Attributes:
        count: how many.
        of: the kind of events: "stored", "removed", "cleared", "located" or "updated"; None for any.
    """

    kind = "drop_next"

    count: int = 1
    of: str | None = None

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kind = {} if self.of is None else {"kind": self.of}
        return () if self.count == 1 and not kind else (self.count,), kind

    def yaml(self, block_size: int) -> dict[str, Any]:
        return {"fault": {"lose": {"n": self.count, **self.given[1]}}}


Step: TypeAlias = Operation
"""One step of a program."""

OPERATIONS: Final[tuple[type[Operation], ...]] = tuple(
    each
    for each in [*vars().values()]
    if isinstance(each, type) and issubclass(each, Operation) and "kind" in vars(each)
)
"""All operations, in the order of this module."""


class Program:
    """Steps in order. The repr is Python that makes it again, one line per step."""

    __slots__ = ("steps",)

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.steps)

    def __repr__(self) -> str:
        return "\n".join(["Program(", *(f"    {step!r}," for step in self.steps), ")"]) if self.steps else "Program()"
