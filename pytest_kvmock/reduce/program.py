"""A failing stream as a value: the world that it needs, and the steps that break the rule."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.backends import EngineProfile
from pytest_kvmock.events import RouterEvent, block_text
from pytest_kvmock.harness.recording import Forgotten, Operation
from pytest_kvmock.hygiene.content import FITS
from pytest_kvmock.hygiene.stream import Residency
from pytest_kvmock.hygiene.text import without_restarts

if TYPE_CHECKING:
    from pytest_kvmock.events import StreamKey
    from pytest_kvmock.harness.index_comparison import Sync
    from pytest_kvmock.hygiene.problem import Problem

Step: TypeAlias = RouterEvent | Forgotten | Operation
"""An event as it arrives, a worker that is forgotten, or an operation on a worker."""

Level: TypeAlias = Literal["events", "requests"]


class NotReduced(Exception):  # noqa: N818 - it says why, and nobody has to catch it by the word Error
    """Nothing smaller was found. The message is one line that says why."""


@dataclass(frozen=True, slots=True, repr=False)
class Breach:
    """What a smaller stream has to break: the same rule, in the same way.

    Attributes:
        rule: the rule.
        is_error: whether it counts as an error.
        worker: (worker_id, dp_rank) that it is about.
        block: the block that tells; None where it names none, or where blocks change their names.
        story: what was known, without its numbers: a block that was removed is not one that was never stored.
        right: what would have been right, where only that tells; else None.
    """

    rule: str
    is_error: bool
    worker: StreamKey
    block: int | None
    story: str
    right: str | None = None

    def __repr__(self) -> str:
        said = {field.name: repr(getattr(self, field.name)) for field in dataclasses.fields(self)}
        said["block"] = block_text(self.block)
        return f"Breach({', '.join(f'{name}={text}' for name, text in said.items())})"

    @classmethod
    def of(cls, problem: Problem) -> Breach:
        """What a problem is about."""
        worker = (problem.worker_id, problem.dp_rank)
        # A wrong hash is judged by nothing but its event: only what would have been right tells two of them apart.
        right = problem.right if problem.rule == "wrong_hash" else None
        return cls(problem.rule, problem.is_error, worker, problem.block, story_of(problem), right)

    def replace(self, **fields: Any) -> Breach:
        """Return the same with some fields changed."""
        return dataclasses.replace(self, **fields)

    def shows_in(self, problem: Problem) -> bool:
        """Whether a problem is this one again."""
        return (
            problem.rule == self.rule
            and (problem.worker_id, problem.dp_rank) == self.worker
            and (self.block is None or problem.block == self.block)
            and (self.right is None or problem.right == self.right)
            and story_of(problem) == self.story
        )


_PLAIN: Final = (
    (re.compile(r"0x[0-9a-f]+|\d+"), "#"),
    (re.compile(r"\b(block|event)s? # to #"), r"\1 #"),
    (re.compile(r"\b(block|event|token)s? #(, #)*( and # more)?"), r"\1 #"),
    (re.compile(r"# blocks?\b"), "# block"),
    (re.compile(r"\bare\b"), "is"),
)


def story_of(problem: Problem) -> str:
    """What was known, with numbers and counts made alike.

    In a replay nothing is lost on its way: what did not arrive, the worker leaves out. The parent that the hash of a
    block fits is told by what would have been right.
    """
    text = without_restarts(problem.known).partition(FITS)[0]
    if (
        problem.rule == "event_id_gap"
        and problem.event is not None
        and re.search("did not arrive|never published", text)
    ):
        first = not re.search("after event|expected [1-9]", text)
        return "the first event is missing" if first else "event # is missing"
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text


class SinkKind(NamedTuple):
    """How a sink of a program is made: the arguments of `make_kv_sink`."""

    chained: bool = False
    num_blocks: int | None = None
    residency: Residency = "unique"
    prefix_closed: bool = True


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The smallest stream found that breaks a rule as a larger one did.

    Attributes:
        breach: what it breaks.
        level: whether its steps are events, as they arrive at the router, or requests to workers.
        backend: the workers' backend.
        profile: their profile.
        steps: what to do, in order.
        workers: workers that must be made: (worker_id, dp_rank) and their backend, None for `backend`. Others exist, or
            need not.
        sinks: the sinks that speak; the first is worker 2**16.
        with_index: whether the index under test takes part.
        sync: when it is compared; see `RouterHarness`.
        index_semantics: what a Cleared empties; likewise.
        aflush: when the test awaits `aflush()`: after "every" step, or at the "end"; None where no async index takes part.
        with_ids: whether the ids of the events matter; if not, they count from 0.
        allow: rules that it breaks besides, and that the test let pass.
        cut_from: how many events, or requests, the failing test had.
        replays: how many replays it took.
        complete: whether nothing more can be left out; False: the search ended at its limit.
    """

    breach: Breach
    level: Level
    backend: str
    profile: EngineProfile
    steps: tuple[Step, ...] = ()
    workers: tuple[tuple[StreamKey, str | None], ...] = ()
    sinks: tuple[SinkKind, ...] = ()
    with_index: bool = False
    sync: Sync = "auto"
    index_semantics: Literal["e1"] | None = None
    aflush: Literal["every", "end"] | None = None
    with_ids: bool = False
    allow: tuple[str, ...] = ()
    cut_from: int = 0
    replays: int = 0
    complete: bool = False

    @property
    def rule(self) -> str:
        """The rule that it breaks."""
        return self.breach.rule

    @property
    def events(self) -> tuple[RouterEvent, ...]:
        """Its events; none where it is made of requests."""
        return tuple(step for step in self.steps if isinstance(step, RouterEvent))

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Its operations; none where it is made of events."""
        return tuple(step for step in self.steps if isinstance(step, Operation))

    @property
    def size(self) -> int:
        """How many events, or requests, it has."""
        if self.level == "events":
            return len(self.events)
        return sum(step.kind == "prefill" for step in self.operations)

    def replace(self, **fields: Any) -> Reproduction:
        """Return the same with some fields changed."""
        return dataclasses.replace(self, **fields)

    def as_test(self, name: str = "test_reproduction", *, awaited_by: str | None = None) -> str:
        """The text of a Python test that breaks the rule; where an index takes part, it is the fixture `kv_index`.

        Args:
            name: the name of the test.
            awaited_by: where an async index takes part, the marker by which a plugin runs async tests ("asyncio",
                "anyio"), or "" where it needs none; None for a test that runs by itself (`asyncio.run`).
        """
        from pytest_kvmock.reduce.text import test_text

        return test_text(self, name, awaited_by)
