"""The problem that a smaller stream must show again, distinguished from other problems of its rule."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.oracle.hygiene.content import FITS
from pytest_kvmock.oracle.hygiene.rules import EVENT_ID_GAP, WRONG_HASH
from pytest_kvmock.oracle.hygiene.text import without_restarts
from pytest_kvmock.values.events import StorageTier, block_text

if TYPE_CHECKING:
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.values.events import StreamKey


@dataclass(frozen=True, slots=True, repr=False)
class Breach:
    """The breach that a smaller stream must repeat: the same rule, broken in the same way.

    Attributes:
        rule: the rule.
        is_error: whether it counts as an error.
        worker: the (worker_id, dp_rank) of the problem.
        block: the block of the problem; None if it names no block, or if blocks get other names.
        story: the observed text without its numbers; it distinguishes a removed block from one that was never stored.
        expected: the expected text, if nothing else distinguishes two breaches; else None.
    """

    rule: str
    is_error: bool
    worker: StreamKey
    block: int | None
    story: str
    expected: str | None = None

    def __repr__(self) -> str:
        fields = {field.name: repr(getattr(self, field.name)) for field in dataclasses.fields(self)}
        fields["block"] = block_text(self.block)
        return f"Breach({', '.join(f'{name}={text}' for name, text in fields.items())})"

    @classmethod
    def of(cls, problem: Problem) -> Breach:
        """Return the breach of a problem."""
        worker = (problem.worker_id, problem.dp_rank)
        # A wrong hash is judged only by its event, so only the expected hash distinguishes two of them.
        expected = problem.expected if problem.rule == WRONG_HASH else None
        return cls(problem.rule, problem.is_error, worker, problem.block, story_of(problem), expected)

    def replace(self, **fields: Any) -> Breach:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def shows_in(self, problem: Problem) -> bool:
        """Whether a problem is this breach again."""
        return (
            problem.rule == self.rule
            and (problem.worker_id, problem.dp_rank) == self.worker
            and (self.block is None or problem.block == self.block)
            and (self.expected is None or problem.expected == self.expected)
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
    """Return the observed text of a problem, with placeholders for numbers and counts.

    A replay loses no events: the worker skips the ids that did not arrive, so both texts count as the same. The parent
    that the hash of a block fits is left out; `Problem.expected` has it.
    """
    # The device is only named if there is another tier, which a smaller stream may not need.
    text = without_restarts(problem.observed).partition(FITS)[0].replace(f" in {StorageTier.DEVICE}", "")
    if problem.rule == EVENT_ID_GAP and problem.event is not None and re.search("did not arrive|never published", text):
        first = not re.search("after event|go on from", text)
        return "the first event is missing" if first else "event # is missing"
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return text
