"""What all operations share: a value that does itself, is written as Python and in a scenario file, and is made
simpler.
"""

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
"""What a program calls a request; requests that a harness records are numbered from 1."""

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
"""What an argument of a scenario file may be; `contrib.scenarios.fields.ARGUMENTS` reads it."""


class Harness(Protocol):
    """What a program needs of the harness it is played on (`harness.RouterHarness`), in addition to the methods it
    calls by name.
    """

    @property
    def profile(self) -> Any: ...

    def worker(self, worker_id: int, /, *, dp_rank: int) -> Any: ...
    def make_sink(self, *, chained: bool | None) -> Any: ...
    def burst(self) -> AbstractContextManager[None]: ...


class Doer:
    """Does operations on the workers of a harness, and on requests by their names.

    Args:
        harness: the harness of the workers.
        make_prompt: makes the prompt of a `Prefill` or `Serve` for a block size. By default each is made on every
            play; code that plays a program many times keeps them, since a prompt keeps its hashes.
        by_tokens: the index under test is asked by tokens: a `ServeNear` has such prompts.

    Attributes:
        harness: as given.
        by_tokens: as given.
        requests: the requests that were admitted, by the names that their `Prefill` gave them.
        submitted: the requests that engines were given, by the names that their `Submit` gave them.
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
        """Tokens a block of its workers."""
        size: int = self.harness.profile.block_size
        return size

    def prompt(self, step: WithPrompt) -> Prompt:
        """The prompt of an operation."""
        return self._make_prompt(step, self.block_size)

    def do(self, step: Operation) -> Any:
        """Do one operation, and return its answer."""
        return step.do(self)


@dataclass(frozen=True, slots=True, repr=False)
class Operation:
    """What all operations share; its repr leaves out each field that has its default.

    Attributes:
        kind: the method that does it, of a worker, an engine, a request or a harness; in a scenario file, the step.
    """

    # What follows is for authors of operations. It has comments and no docstrings, as the site shows those of each
    # operation.

    kind: ClassVar[str]
    by_place: ClassVar[tuple[str, ...]] = ()  # the fields that this method is called with
    by_name: ClassVar[tuple[str, ...]] = ()  # those that it is called with by name, where they are not as by default
    takes: ClassVar[Mapping[str, Argument] | None] = None  # the arguments of the step, in order; None: no file has it
    needs: ClassVar[tuple[str, ...]] = ()  # those that must be there
    one_of: ClassVar[tuple[str, ...]] = ()  # those of which exactly one must be there
    short: ClassVar[str] = ""  # the one that may stand alone
    amount: ClassVar[str] = ""  # the field that can be less
    optional: ClassVar[tuple[str, ...]] = ()  # the fields that can be left out

    def __repr__(self) -> str:
        parts = [repr(value) if name == "name" else f"{name}={value!r}" for name, value in self.changed.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    # The default of a field.
    @classmethod
    def default(cls, name: str) -> Any:
        return cls.__dataclass_fields__[name].default

    # The fields that are not as by default, by name.
    @property
    def changed(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        return {each.name: value for each in fields if (value := getattr(self, each.name)) != each.default}

    # ---------------------------------------------------------------------------------------------- to be done

    # Whose method does it.
    def owner(self, doer: Doer) -> Any:
        return doer.harness

    # What that method is called with: arguments by place, and by name.
    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_name = {name: value for name in self.by_name if (value := getattr(self, name)) != self.default(name)}
        return tuple([getattr(self, name) for name in self.by_place]), by_name

    # Call that method, with these arguments before its own.
    def call(self, doer: Doer, *first: object) -> Any:
        given, named = self.given
        return getattr(self.owner(doer), self.kind)(*first, *given, **named)

    # Do it.
    #
    # Returns:
    #     Of a Prefill, Resume or Serve, how many tokens of the prompt were cached; of a RunPasses or Run, how many
    #     passes there were; of a Clear, whether it was done; else None.
    #
    # Raises:
    #     KeyError: it is about a request that was not admitted, or not submitted.
    #     Exception: whatever the worker, the request or the harness raises.
    def do(self, doer: Doer) -> Any:
        self.call(doer)

    # Whether it can be done now, apart from refusals when room is short.
    def fits(self, doer: Doer) -> bool:
        return True

    # ------------------------------------------------------------------------------------------ to be written

    # Whose method does it, as Python that has a harness `kv`.
    @property
    def owner_text(self) -> str:
        return "kv"

    # The call of that method, with these arguments before its own.
    def call_text(self, *first: str) -> str:
        given, named = self.given
        own = (token_list(value) if isinstance(value, tuple) else literal(value) for value in given)
        by_name = (f"{name}={literal(value)}" for name, value in named.items())
        return f"{self.owner_text}.{self.kind}({', '.join([*first, *own, *by_name])})"

    # The lines that do it on a harness `kv`.
    #
    # Args:
    #     block_size: tokens a block, for its prompt.
    #     named: whether a request that it begins is needed later.
    def python(self, block_size: int, *, named: bool) -> Iterator[str]:
        yield self.call_text()

    # The step of a scenario file that does it.
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

    # The operation that a step of a scenario file asks for.
    #
    # Args:
    #     given: the arguments of the step, as `takes` has them: numbers as ranges, a worker with its rank.
    #     block_size: tokens a block.
    @classmethod
    def from_yaml(cls, given: Mapping[str, Any], block_size: int) -> Self:
        fields = dict(given)
        if isinstance(worker := fields.get("worker"), tuple):
            fields["worker"], fields["rank"] = worker
        if "request" in fields:
            fields["name"] = fields.pop("request")
        return cls(**fields)

    # ----------------------------------------------------------------------------------------- to be simpler

    # It with less of its amount, from the least on.
    def simpler(self) -> Iterator[Self]:
        if self.amount:
            value = getattr(self, self.amount)
            for fewer in sizes(value if isinstance(value, int) else len(value)):
                yield dataclasses.replace(self, **{self.amount: fewer if isinstance(value, int) else value[:fewer]})

    # It with one field as by default.
    def without(self, name: str) -> Self:
        return dataclasses.replace(self, **{name: self.default(name)})


class OnWorker(Operation):
    """An operation on a worker and rank."""

    __slots__ = ()
    whose: ClassVar[Literal["worker", "engine"]] = "worker"  # whether to it, or to its engine in virtual time
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
    states: ClassVar[tuple[str, ...]] = ()  # in which of its states it can be done
    becomes: ClassVar[str | None] = None  # its state then; None: as it was, or none

    name: Name

    def owner(self, doer: Doer) -> Any:
        return doer.requests[self.name]

    def fits(self, doer: Doer) -> bool:
        request = doer.requests.get(self.name)
        return request is not None and request.status in self.states

    # What Python calls the request.
    @property
    def variable(self) -> str:
        return f"request{self.name}" if isinstance(self.name, int) else self.name

    @property
    def owner_text(self) -> str:
        return self.variable

    # What a scenario file calls the request.
    @property
    def request(self) -> str:
        return f"r{self.name}" if isinstance(self.name, int) else self.name


class WithPrompt(OnWorker):
    """What `Prefill`, `Serve` and `Submit` share: a prompt, block by block.

    Attributes:
        blocks: of each block a small number (a block of number 3 has nothing but the token 3), or its tokens.
        tail: more tokens: a number of tokens 0, or the tokens. It may be the whole prompt.
        worker: the worker.
        rank: its rank.
        hashed: each block is a local hash; `tail` is then how many tokens there are besides, or None where that is not
            known.
        keys: what the prompt carries in addition to its tokens; None if there is nothing.
    """

    __slots__ = ()
    blocks: tuple[int | tuple[int, ...], ...]
    tail: int | tuple[int, ...] | None
    hashed: bool
    keys: PromptKeys | None

    def prompt(self, block_size: int) -> Prompt:
        """The prompt for blocks of `block_size` tokens.

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
    """A value as YAML has it: lists, and no tuples."""
    if isinstance(value, Mapping):
        return {key: plain_lists(item) for key, item in value.items()}
    return [*map(plain_lists, value)] if isinstance(value, tuple | list) else value


def number_ranges(numbers: Sequence[int]) -> list[int | str] | str:
    """Numbers as a scenario file has them, with runs as ranges; a single run stands alone."""
    parts: list[int | str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            run = numbers[start:end]
            parts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else run
            start = end
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def sizes(below: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... below a number, and the one before it."""
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
