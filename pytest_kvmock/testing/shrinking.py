"""How long Hypothesis may shrink a program that fails.

Hypothesis gives up after five minutes, and an index that is slow, or fails in many ways, takes most of them. It has no public
way to stop earlier but an exception that it does not take for a failure of the example: one that is no `Exception`. So work is
counted here, in events that plays were given since the first that failed, and the first failure beyond the bound is raised as
`ShrinkingStopped`. Events and not seconds: the same failure ends in the same way on any machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Final

from pytest_kvmock.programs.operations import Program, Step

MOST_EVENTS: Final = 10_000
"""An ordinary failure is shrunk within 4,500 (measured over the broken indexes of the contract's tests)."""


class ShrinkingStopped(BaseException):
    """A program fails, and shrinking it took too long; the message has the smallest that failed, and how.

    The failure itself is the `__cause__`.
    """


class _Shrinking:
    """What failed in the test that runs.

    Attributes:
        test: which test; what is counted begins anew with another.
        events: how many events plays had since the first that failed.
        smallest: the smallest program that failed, and its failure.
    """

    def __init__(self) -> None:
        self.test: str | None = None
        self.events = 0
        self.smallest: tuple[Program, Exception] | None = None

    def played(self, program: Iterable[Step], events: int, failure: Exception | None, most: int | None) -> None:
        """Count a play.

        Args:
            program: what was played.
            events: how many events there were.
            failure: what it raised; None: it passed.
            most: how many events may be counted.

        Raises:
            ShrinkingStopped: it failed, and there were more.
        """
        hypothesis = sys.modules.get("hypothesis")
        if most is None or hypothesis is None or not hypothesis.currently_in_test_context():
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if test != self.test:
            self.test, self.events, self.smallest = test, 0, None
        if self.smallest is None and failure is None:
            return
        self.events += events
        if failure is None or not isinstance(program, Program):
            return
        if self.smallest is None or len(program) <= len(self.smallest[0]):
            self.smallest = program, failure
        if self.events > most:
            (program, failure), counted = self.smallest, self.events
            self.test = None  # a rerun of the test shrinks anew
            raise ShrinkingStopped(
                f"shrinking stopped after {counted:,} events (play: most_shrink_events={most:,}); "
                f"the smallest program that failed has {len(program)} steps:\n{program!r}\n"
                f"{type(failure).__name__}: {failure}"
            ) from failure


SHRINKING: Final = _Shrinking()
"""Of this process: Hypothesis runs one test at a time."""
