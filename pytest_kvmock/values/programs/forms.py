"""The base of all operations: values that can run, be written as Python and in a scenario file, and be simplified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

from pytest_kvmock.values.programs.python import literal, prompt_text, token_list
from pytest_kvmock.values.prompt_keys import PromptKeys
from pytest_kvmock.values.tokens import Prompt

Name: TypeAlias = str | int
"""A program's name of a request; requests that a harness records are numbered from 1."""

Argument: TypeAlias = Literal[
    "prompt",
    "text",
    "flag",
    "integer",
    "worker",
    "worker or rank",
    "tokens",
    "from 0",
    "tokens from 1",
    "from 1",
    "counts",
    "ms",
    "ms or null",
]
"""The type of an argument in a scenario file; `contrib.scenarios.fields.ARGUMENTS` reads it."""


class Harness(Protocol):
    """The interface that a program needs from its harness (`harness.RouterHarness`), in addition to methods called by
    name.
    """

    @property
    def profile(self) -> Any: ...

    def worker(self, worker_id: int, /, *, dp_rank: int) -> Any: ...
    def make_sink(self, *, chained: bool | None) -> Any: ...
    def burst(self) -> AbstractContextManager[None]: ...


class Doer:
    """Runs operations on the workers of a harness, and on requests by name.

    Args:
        harness: the harness of the workers.
        make_prompt: makes the prompt of a `Prefill` or `Serve` for a block size. By default every run makes a new one;
            code that runs a program many times keeps them, because a prompt caches its hashes.
        by_tokens: whether the index under test is queried by tokens; then the prompts of `ServeNear` have tokens.

    Attributes:
        harness: as given.
        by_tokens: as given.
        requests: the admitted requests, by the names in their `Prefill`.
        submitted: the requests submitted to engines, by the names in their `Submit`.
    """

    def __init__(
        self,
        harness: Harness,
        make_prompt: Callable[[WithPrompt, int], Prompt] | None = None,
        *,
        by_tokens: bool = False,
    ) -> None:
        self.requests: dict[Name, Any] = {}
        self.submitted: dict[Name, Any] = {}
        self.harness = harness
        self.by_tokens = by_tokens
        self._make_prompt = WithPrompt.prompt if make_prompt is None else make_prompt

    @property
    def block_size(self) -> int:
        """Tokens per block of the workers."""
        size: int = self.harness.profile.block_size
        return size

    def prompt(self, step: WithPrompt) -> Prompt:
        """Return the prompt of an operation."""
        return self._make_prompt(step, self.block_size)

    def do(self, step: Operation) -> Any:
        """Run one operation and return its answer."""
        return step.do(self)


@dataclass(frozen=True, slots=True, repr=False)
class Operation:
    """Base of all operations; the repr leaves out fields with their default.

    Attributes:
        kind: the method of a worker, engine, request or harness that runs it; in a scenario file, the step.
    """

    # The rest is for authors of operations. It has comments instead of docstrings, because the site shows the
    # docstrings of each operation.

    kind: ClassVar[str]
    by_place: ClassVar[tuple[str, ...]] = ()  # the fields passed to this method by position
    by_name: ClassVar[tuple[str, ...]] = ()  # the fields passed by name if they differ from their default
    takes: ClassVar[Mapping[str, Argument] | None] = None  # the arguments of the step, in order; None: not for files
    needs: ClassVar[tuple[str, ...]] = ()  # required arguments
    one_of: ClassVar[tuple[str, ...]] = ()  # exactly one of these is required
    short: ClassVar[str] = ""  # the argument that may stand alone
    amount: ClassVar[str] = ""  # the field that can be reduced
    optional: ClassVar[tuple[str, ...]] = ()  # the fields that can be left out

    def __repr__(self) -> str:
        parts = [repr(value) if name == "name" else f"{name}={value!r}" for name, value in self.changed.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    # The default of a field.
    @classmethod
    def default(cls, name: str) -> Any:
        return cls.__dataclass_fields__[name].default

    # The fields that differ from their default, by name.
    @property
    def changed(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        return {each.name: value for each in fields if (value := getattr(self, each.name)) != each.default}

    # ---------------------------------------------------------------------------------------------- to be done

    # The owner of the method.
    def owner(self, doer: Doer) -> Any:
        return doer.harness

    # The arguments of that method: by position, and by name.
    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_name = {name: value for name in self.by_name if (value := getattr(self, name)) != self.default(name)}
        return tuple([getattr(self, name) for name in self.by_place]), by_name

    # Call that method, with these arguments first.
    def call(self, doer: Doer, *first: object) -> Any:
        given, named = self.given
        return getattr(self.owner(doer), self.kind)(*first, *given, **named)

    # Run the operation.
    #
    # Returns:
    # For a Prefill, Resume or Serve, the number of cached prompt tokens; for a RunPasses or Run, the number of passes;
    # for a Clear, whether it was done; else None.
    #
    # Raises:
    # KeyError: its request was not admitted or not submitted.
    #     Exception: whatever the worker, the request or the harness raises.
    def do(self, doer: Doer) -> Any:
        self.call(doer)

    # Whether it can run now, ignoring refusals for lack of room.
    def fits(self, doer: Doer) -> bool:
        return True

    # ------------------------------------------------------------------------------------------ to be written

    # The owner of the method, as Python source with a harness `kv`.
    @property
    def owner_text(self) -> str:
        return "kv"

    # The call of that method, with these arguments first.
    def call_text(self, *first: str) -> str:
        given, named = self.given
        own = (token_list(value) if isinstance(value, tuple) else literal(value) for value in given)
        by_name = (f"{name}={literal(value)}" for name, value in named.items())
        return f"{self.owner_text}.{self.kind}({', '.join([*first, *own, *by_name])})"

    # The lines that run it on a harness `kv`.
    #
    # Args:
    #     block_size: tokens per block, for its prompt.
    # named: whether its request is needed later.
    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield self.call_text()

    # The step of a scenario file that runs it.
    #
    # Raises:
    #     ValueError: no file has such a step.
    def yaml(self, block_size: int) -> dict[str, Any]:
        if self.takes is None:
            raise ValueError(f"a scenario file has no step for {self!r}")
        written: dict[str, Any] = {}
        wanted = {"request", self.amount, *self.needs, *self.changed}
        for name in self.takes:
            rank = getattr(self, "rank", 0) if name == "worker" else 0
            if name == "prompt" and isinstance(self, WithPrompt):
                written |= self.yaml_prompt(block_size)
            elif name in wanted or rank:
                value = getattr(self, name)
                written[name] = [value, rank] if rank else value
        return {self.kind: written[self.short] if len(self.takes) == 1 else written}

    # Return the operation of a step in a scenario file.
    #
    # Args:
    # given: the arguments of the step, as in `takes`: numbers as ranges, a worker with its rank.
    #     block_size: tokens per block.
    @classmethod
    def from_yaml(cls, given: Mapping[str, Any], block_size: int) -> Self:
        fields = dict(given)
        if isinstance(worker := fields.get("worker"), tuple):
            fields["worker"], fields["rank"] = worker
        if "request" in fields:
            fields["name"] = fields.pop("request")
        return cls(**fields)

    # ----------------------------------------------------------------------------------------- to be simpler

    # The operation with a smaller amount, the smallest first.
    def simpler(self) -> Iterator[Self]:
        if self.amount:
            value = getattr(self, self.amount)
            for fewer in sizes(value if isinstance(value, int) else len(value)):
                yield dataclasses.replace(self, **{self.amount: fewer if isinstance(value, int) else value[:fewer]})

    # The operation with one field at its default.
    def without(self, name: str) -> Self:
        return dataclasses.replace(self, **{name: self.default(name)})


class OnWorker(Operation):
    """An operation on a worker and rank."""

    __slots__ = ()
    whose: ClassVar[Literal["worker", "engine"]] = "worker"  # the worker itself, or its engine in virtual time
    worker: int
    rank: int

    def owner(self, doer: Doer) -> Any:
        return getattr(doer.harness, self.whose)(self.worker, dp_rank=self.rank)

    @property
    def owner_text(self) -> str:
        return f"kv.{self.whose}({self.worker}{f', dp_rank={self.rank}' if self.rank else ''})"


@dataclass(frozen=True, slots=True, repr=False)
class OnRequest(Operation):
    """The common part of operations on one request.

    Attributes:
        name: the request.
    """

    takes = {"request": "text"}
    needs: ClassVar[tuple[str, ...]] = ("request",)
    short = "request"
    states: ClassVar[tuple[str, ...]] = ()  # the states of the request in which it can run
    becomes: ClassVar[str | None] = None  # the state afterwards; None: unchanged, or no state

    name: Name

    def owner(self, doer: Doer) -> Any:
        return doer.requests[self.name]

    def fits(self, doer: Doer) -> bool:
        request = doer.requests.get(self.name)
        return request is not None and request.status in self.states

    # The name of the request in Python.
    @property
    def variable(self) -> str:
        return f"request{self.name}" if isinstance(self.name, int) else self.name

    @property
    def owner_text(self) -> str:
        return self.variable

    # The name of the request in a scenario file.
    @property
    def request(self) -> str:
        return f"r{self.name}" if isinstance(self.name, int) else self.name


class WithPrompt(OnWorker):
    """Common part of `Prefill`, `Serve` and `Submit`: a prompt, block by block.

    Attributes:
        blocks: for each block, a small number (block 3 consists of token 3), or its tokens.
        tail: further tokens: a number of tokens 0, or the tokens. It may be the whole prompt.
        worker: the worker.
        rank: its rank.
        hashed: whether each block is a local hash; `tail` is then the number of further tokens, or None if unknown.
        keys: the keys that the prompt carries; None if there are none.
    """

    __slots__ = ()
    blocks: tuple[int | tuple[int, ...], ...]
    tail: int | tuple[int, ...] | None
    hashed: bool
    keys: PromptKeys | None

    def prompt(self, block_size: int) -> Prompt:
        """Return the prompt for blocks of `block_size` tokens.

        Raises:
            TypeError: a block or tail that is neither a number nor tokens.
            ValueError: a number is out of range, or a multimodal item exceeds the end.
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

    def fits(self, doer: Doer) -> bool:
        return True

    # The call of its method, with the prompt.
    def prompt_call(self, block_size: int) -> str:
        return self.call_text(prompt_text(self.prompt(block_size), block_size))

    # The prompt as arguments of a step.
    def yaml_prompt(self, block_size: int) -> dict[str, Any]:
        prompt = self.prompt(block_size)
        keys = {} if prompt.keys is None else plain_lists(prompt.keys.given)
        if prompt.tokens is not None:
            return {"tokens": number_ranges(prompt.tokens), **keys}
        hashes = {"hashes": number_ranges(prompt.block_hashes(block_size)), **keys}
        return hashes if prompt.num_tokens is None else {**hashes, "num_tokens": prompt.num_tokens}

    @classmethod
    def from_yaml(cls, given: Mapping[str, Any], block_size: int) -> Self:
        known = {each.name for each in dataclasses.fields(PromptKeys)}
        keys = {name: value for name, value in given.items() if name in known}
        rest = {name: value for name, value in given.items() if name not in (*keys, "tokens", "hashes", "num_tokens")}
        if "tokens" in given:
            rest["tail"] = tuple(chain.from_iterable(given["tokens"]))
        else:
            hashes, length = tuple(chain.from_iterable(given["hashes"])), given.get("num_tokens")
            rest |= {"blocks": hashes, "hashed": True}
            rest["tail"] = None if length is None else length - len(hashes) * block_size
        return super().from_yaml({**rest, "keys": PromptKeys(**keys) if keys else None}, block_size)


def plain_lists(value: Any) -> Any:
    """Return a value for YAML, with lists instead of tuples."""
    if isinstance(value, Mapping):
        return {key: plain_lists(item) for key, item in value.items()}
    return [*map(plain_lists, value)] if isinstance(value, tuple | list) else value


def number_ranges(numbers: Sequence[int]) -> list[int | str] | str:
    """Return numbers for a scenario file, with runs as ranges; a single run stands alone."""
    parts: list[int | str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = numbers[start:end]
            parts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else run
            start = end
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def sizes(below: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, 16 ... below a number, then the number minus 1."""
    size = 1
    seen = set()
    while size < below:
        for candidate in (size, size + size // 2):
            if candidate < below and candidate not in seen:
                seen.add(candidate)
                yield candidate
        size *= 2
    if below > 1 and below - 1 not in seen:
        yield below - 1
