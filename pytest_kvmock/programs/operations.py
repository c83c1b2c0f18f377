"""A program of requests as values: what is asked of workers and router, in order.

One model for all who have programs: what a harness records, what is cut down to a reproduction, what a scenario file
asks for, and the traffic that contracts draw. Operations compare by value, and their repr is Python that makes them
again.

One subject: the operations of a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from pytest_kvmock.events import BlockTokens, Stored
from pytest_kvmock.programs.near_hashes import hash_pair, token_pair
from pytest_kvmock.prompt_keys import PromptKeys
from pytest_kvmock.tokens import Prompt, block_hashes

Name: TypeAlias = str | int
"""What a program calls a request; requests that a harness records are numbered from 1."""


class Operation:
    """What all operations share: a repr that leaves out each field that has its default.

    Attributes:
        kind: the method that does it, of a worker, a request or a harness.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each operation is a dataclass
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(repr(value) if field.name == "name" else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


class Log(Protocol):
    """What workers and engines record operations in, each before it runs (`harness.recording.Recording`)."""

    def next_request(self) -> int:
        """Number one more request, from 1: its name in operations."""

    def operate(self, operation: type[Operation], /, *fields: object) -> None:
        """Record an operation, by its class and its fields."""

    def retract_pass(self, worker_id: int, dp_rank: int, /) -> None:
        """Take back the last pass that was recorded of an engine, as it never came to its end, nor its events out."""


class WithPrompt(Operation):
    """What `Prefill` and `Serve` share: a prompt, block by block.

    Attributes:
        blocks: of each block a small number (a block of number 3 has nothing but the token 3), or its tokens.
        tail: further tokens: how many of number 0, or which. It may be the whole prompt.
        worker: on which worker.
        rank: on which of its ranks.
        hashed: each block is a local hash; `tail` is then how many tokens there are besides, or None where that is not
            known.
        keys: what the prompt carries beside its tokens; None: nothing.
    """

    __slots__ = ()
    blocks: tuple[int | tuple[int, ...], ...]
    tail: int | tuple[int, ...] | None
    worker: int
    rank: int
    hashed: bool
    keys: PromptKeys | None

    def prompt(self, block_size: int) -> Prompt:
        """The prompt, where a block has so many tokens.

        Raises:
            TypeError: a block or tail that is neither a number nor tokens.
            ValueError: a number out of range, or a multimodal item behind the end.
        """
        prompt = self._plain(block_size)
        return prompt if self.keys is None else prompt.with_keys(self.keys)

    def _plain(self, block_size: int) -> Prompt:
        blocks, tail = self.blocks, self.tail
        if self.hashed:
            assert not isinstance(tail, tuple)
            hashes = [block for block in blocks if isinstance(block, int)]
            return Prompt(hashes=hashes, num_tokens=None if tail is None else len(hashes) * block_size + tail)
        tokens: list[int] = []
        for block in blocks:
            tokens += block if isinstance(block, tuple) else [block] * block_size
        return Prompt([*tokens, *(tail if isinstance(tail, tuple) else [0] * (tail or 0))])


def prompt_fields(prompt: Prompt, block_size: int) -> tuple[Sequence[int], tuple[int, ...] | int | None, bool]:
    """Return the fields `blocks`, `tail` and `hashed` of an operation with this prompt (`WithPrompt`)."""
    # Not the prompt itself: it keeps three lists of hashes for as long as it lives.
    if prompt.tokens is not None:
        return (), prompt.tokens, False
    blocks = tuple(prompt.block_hashes(block_size))
    return blocks, None if prompt.num_tokens is None else prompt.num_tokens - len(blocks) * block_size, True


@dataclass(frozen=True, slots=True, repr=False)
class OnRequest(Operation):
    """What the operations on one request share.

    Attributes:
        name: which request.
    """

    name: Name


@dataclass(frozen=True, slots=True, repr=False)
class Prefill(OnRequest, WithPrompt):
    """Admit a request. Prompts share the blocks with which both begin.

    Attributes:
        name: how later operations call it.
        blocks: its prompt, a small number for each block: a block of number 3 has nothing but the token 3. Or the tokens
            of each block.
        tail: further tokens: how many of number 0, or which.
        worker: on which worker.
        rank: on which of its ranks.
        hashed: whether blocks are local hashes (see `WithPrompt`).
        wait: whether time passes until there is room for it, and until the host's blocks of it are back; else it is not
            admitted then.
        keys: what the prompt carries beside its tokens; None: nothing.
    """

    kind = "prefill"

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    wait: bool = True
    keys: PromptKeys | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Serve(WithPrompt):
    """Prefill, decode and finish one request that has no name.

    Attributes:
        blocks: its prompt; this and what follows as in `Prefill`.
        tail: further tokens.
        worker: on which worker.
        rank: on which of its ranks.
        hashed: whether blocks are local hashes.
        output_tokens: how many tokens are generated.
        keys: what the prompt carries beside its tokens.
    """

    kind = "serve"

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    output_tokens: int = 0
    keys: PromptKeys | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Decode(OnRequest):
    """Generate tokens, one by one.

    Attributes:
        name: which request.
        tokens: how many, or which.
        of: where `tokens` is a number, which token; blocks that fill up may so be blocks that another request has. None
            for tokens that the worker draws.
    """

    kind = "decode"

    tokens: int | tuple[int, ...] = 1
    of: int | None = 0

    @property
    def argument(self) -> int | tuple[int, ...]:
        """What `Request.decode` is called with."""
        tokens, of = self.tokens, self.of
        return tokens if of is None or isinstance(tokens, tuple) else (of,) * tokens


@dataclass(frozen=True, slots=True, repr=False)
class Finish(OnRequest):
    """Finish a request: its blocks are freed, and stay cached."""

    kind = "finish"


@dataclass(frozen=True, slots=True, repr=False)
class Preempt(OnRequest):
    """Preempt a request: its blocks are freed, and it keeps what it has generated."""

    kind = "preempt"


@dataclass(frozen=True, slots=True, repr=False)
class Resume(OnRequest):
    """Resume a preempted request: it gets blocks again."""

    kind = "resume"


@dataclass(frozen=True, slots=True, repr=False)
class Submit(OnRequest, WithPrompt):
    """Give the engine of a worker a request.

    Attributes:
        name: how later operations call it.
        blocks: its prompt; this and what follows as in `Prefill`.
        tail: further tokens.
        worker: on which worker.
        rank: on which of its ranks.
        hashed: whether blocks are local hashes.
        output_tokens: how many tokens it generates.
        arrival_ms: when it arrives; None: now.
        priority: its priority; None where the engine has none.
        keys: what the prompt carries beside its tokens.
    """

    kind = "submit"

    blocks: tuple[int | tuple[int, ...], ...] = ()
    tail: int | tuple[int, ...] | None = 0
    worker: int = 0
    rank: int = 0
    hashed: bool = False
    output_tokens: int = 1
    arrival_ms: float | None = None
    priority: int | None = None
    keys: PromptKeys | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Abort(OnRequest):
    """Abort a request of an engine."""

    kind = "abort"


@dataclass(frozen=True, slots=True, repr=False)
class RunPasses(Operation):
    """Have the engine of a worker run forward passes.

    Attributes:
        count: how many.
        worker: on which worker.
        rank: on which of its ranks.
    """

    kind = "step"

    count: int = 1
    worker: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Run(Operation):
    """Have the engine of a worker run until no request is open, or until a moment.

    Attributes:
        until_ms: no pass starts at or after it; None: to the end.
        worker: on which worker.
        rank: on which of its ranks.
    """

    kind = "run"

    until_ms: float | None = None
    worker: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Tick(Operation):
    """Move the time of a worker with tiers forward.

    Attributes:
        now_ms: to when.
        worker: which worker.
        rank: which of its ranks.
    """

    kind = "tick"

    now_ms: float = 0.0
    worker: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Clear(Operation):
    """Clear a worker: it drops what is cached. While it has requests, nothing happens."""

    kind = "clear"

    worker: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Burst(Operation):
    """Serve prompts of one block each, one after the other; the index is flushed and compared when all are served.

    It is what shows a queue that overflows: in a cache that is full, each prompt is two events.

    Attributes:
        count: how many prompts. The first has block 0, the next block 1, and so on, as in `Prefill.blocks`.
        worker: on which worker.
        rank: on which of its ranks.
    """

    kind = "burst"

    count: int = 1
    worker: int = 0
    rank: int = 0

    @property
    def served(self) -> Iterator[Serve]:
        """The prompts, each as it is served."""
        return (Serve((number,), 0, self.worker, self.rank) for number in range(self.count))


@dataclass(frozen=True, slots=True, repr=False)
class ServeNear(Operation):
    """Serve a prompt whose hash agrees in a part with that of a block of one more worker; that one's blocks have such names, too.

    It is what shows an index that keeps only that part of local hashes or of block hashes. The other worker is a sink, of an
    engine that names its blocks as it likes: what an engine of `lineage` keeps of a hash is less than 64 bits itself.

    Attributes:
        kept: the part in which they agree: "low32", "high32", "low53", "float53" or "low63".
        worker: on which worker.
        rank: on which of its ranks.
    """

    kind = "serve_near"

    kept: str = "low63"
    worker: int = 0
    rank: int = 0

    def published(self, block_size: int, *, by_tokens: bool = False) -> Iterator[tuple[Stored, BlockTokens | None]]:
        """What the other worker stores: two blocks of such names, one below each, and one of such a local hash.

        Args:
            block_size: tokens a block.
            by_tokens: with the tokens of each block, for an index that is asked by them.
        """
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
        """The prompt, as it is served; arguments as of `published`."""
        near = self._near(block_size, by_tokens=by_tokens)[1]
        return Serve((near,), 0, self.worker, self.rank, hashed=not by_tokens)

    def _near(self, block_size: int, *, by_tokens: bool) -> tuple[int | tuple[int, ...], int | tuple[int, ...]]:
        return token_pair(block_size, self.kept) if by_tokens else hash_pair(self.kept)


@dataclass(frozen=True, slots=True, repr=False)
class Restart(Operation):
    """Restart a worker, as after a crash.

    Attributes:
        worker: which worker.
        rank: which of its ranks.
        announced: whether the router removes it, as after a notice of a discovery service.
    """

    kind = "restart"

    worker: int = 0
    rank: int = 0
    announced: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class RemoveWorker(Operation):
    """Remove a worker from the router, with all its ranks."""

    kind = "remove_worker"

    worker: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class DropNext(Operation):
    """Lose the next events on their way to the router.

    Attributes:
        count: how many.
        of: of which kind: "stored", "removed", "cleared" or "located"; None for any.
    """

    kind = "drop_next"

    count: int = 1
    of: str | None = None


Step: TypeAlias = (
    Prefill
    | Serve
    | Decode
    | Finish
    | Preempt
    | Resume
    | Submit
    | Abort
    | RunPasses
    | Run
    | Tick
    | Clear
    | Burst
    | ServeNear
    | Restart
    | RemoveWorker
    | DropNext
)
"""One step of a program."""


class Program:
    """Steps in order. Its repr is Python that makes it again, a line a step."""

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
