"""Events and removals that an index under test was not given yet, and its wrong answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pytest_kvmock.harness.under_test import Call, Scores, WorkerScores
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.values.events import RouterEvent, StorageTier, StreamKey
from pytest_kvmock.values.prompt_keys import EventExtra
from pytest_kvmock.values.tokens import Prompt


class QueuedEvent(NamedTuple):
    """An event that the index under test was not given yet.

    Attributes:
        event: the event.
        position: its number in the log.
        problems: the problems that the ledger found.
        refused: whether the reference index raised on it.
        given: the event that the index is given instead if a fault changes its input.
        orphaned: the blocks that its worker and rank holds without their parents, each with the warning.
    """

    event: RouterEvent
    position: int
    problems: list[Problem]
    refused: bool = False
    given: RouterEvent | None = None
    orphaned: Mapping[int, Problem] = MappingProxyType({})

    @property
    def key(self) -> StreamKey:
        """The worker and rank of the event."""
        return self.event.worker_id, self.event.event.dp_rank

    @property
    def may_be_refused(self) -> bool:
        """Whether an index may raise on the event: the reference index raised, and the ledger found no error."""
        return self.refused and not any(problem.is_error for problem in self.problems)

    @property
    def is_of_the_engine(self) -> bool:
        """Whether an index that tracks parents may raise on the event because of the engine's own behaviour.

        This is true if any index may raise on it, or if all its errors follow from a warning.
        """
        errors = [problem for problem in self.problems if problem.is_error]
        return self.may_be_refused or (bool(errors) and not any(each.root.is_error for each in errors))


class WrongAnswer(NamedTuple):
    """The first worker for which an answer of the index under test is wrong.

    Attributes:
        asked: the method that returned the answer.
        answer: the answer for the device.
        tier: the tier with the wrong answer.
        worker: the worker.
        rank: the worker's rank.
        blocks: the number of blocks in the answer.
        expected: the correct numbers of blocks.
    """

    asked: str
    answer: Scores | WorkerScores
    tier: StorageTier
    worker: int
    rank: int
    blocks: int
    expected: range


class AskedPrompt(NamedTuple):
    """A prompt that a test has looked up.

    Attributes:
        prompt: the prompt.
        block_size: tokens per block.
        extra: what it carries in addition to its tokens, in the form of the engines' events; None for nothing.
        by_tier: whether the lookup was for all tiers; False: only for the device.
    """

    prompt: Prompt
    block_size: int
    extra: EventExtra | None
    by_tier: bool


class QueuedRemoval(NamedTuple):
    """A removal that the index under test was not given yet: these workers and ranks begin again."""

    keys: Sequence[StreamKey]
    calls: Sequence[Call]
