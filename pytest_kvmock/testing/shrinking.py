"""A limit on how long Hypothesis shrinks a program that fails.

Hypothesis gives up after five minutes, and an index that is slow, or fails in many ways, uses most of them. The only
public way to stop it earlier is an exception that does not count as a failure of the example: one that is not an
`Exception`. This module counts the events played since the first failure, and raises the first failure beyond the limit
as `ShrinkingStopped`. The main limit is a number of events, so that the same failure ends in the same way on any
machine; the limit in seconds is for an index that needs long for each event.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterable
from types import FrameType
from typing import Final

from pytest_kvmock.values.programs.operations import Program, Step

MOST_EVENTS: Final = 10_000
"""Limit of events. An ordinary failure is shrunk within 4,500 (measured over the broken indexes of the contract's
tests)."""

MOST_SECONDS: Final = 20.0
"""Limit of seconds. An ordinary failure takes 3 to 8."""


class ShrinkingStopped(BaseException):
    """A program fails, and shrinking it took too long. The message has the smallest failing program and its error.

    The failure itself is the `__cause__`.
    """


class _Shrinking:
    """The failures of the running test.

    Attributes:
        clock: the time in seconds.
        test: the test run, identified by the outermost frame of Hypothesis; a new run resets the counts.
        events: number of events played since the first failure.
        since: time of the first failure, in seconds.
        smallest: the smallest failing program, and its failure.
    """

    def __init__(self) -> None:
        self.clock = time.monotonic
        self.test: FrameType | None = None
        self.events = 0
        self.since = 0.0
        self.smallest: tuple[Program, Exception] | None = None

    def played(self, program: Iterable[Step], events: int, failure: Exception | None, most: int | None) -> None:
        """Count a play.

        Args:
            program: the program that was played.
            events: number of its events.
            failure: the exception it raised; None: it passed.
            most: limit of events; None: no limit.

        Raises:
            ShrinkingStopped: the play failed after more events than `most`, or after `MOST_SECONDS`.
        """
        hypothesis = sys.modules.get("hypothesis")
        if most is None or hypothesis is None or not hypothesis.currently_in_test_context():
            return
        test = _outermost_of_hypothesis()
        if test is not self.test:
            self.test, self.events, self.smallest = test, 0, None
        if self.smallest is None and failure is None:
            return
        self.events += events
        if failure is None or not isinstance(program, Program):
            return
        if self.smallest is None:
            self.since = self.clock()
        if self.smallest is None or len(program) <= len(self.smallest[0]):
            self.smallest = program, failure
        seconds = self.clock() - self.since
        if self.events > most or seconds > MOST_SECONDS:
            (program, failure), counted = self.smallest, self.events
            self.test = None  # a rerun of the test shrinks again
            raise ShrinkingStopped(
                f"shrinking stopped after {counted:,} events and {seconds:.0f} s (play: most_shrink_events={most:,}, "
                f"and at most {MOST_SECONDS:.0f} s); the smallest program that failed has {len(program)} "
                f"steps:\n{program!r}\n{type(failure).__name__}: {failure}"
            ) from failure


def _outermost_of_hypothesis() -> FrameType | None:
    """Return the frame in which Hypothesis runs the test. Each run by pytest, unittest or hand has a new one."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "hypothesis":
            found = frame
        frame = frame.f_back
    return found


SHRINKING: Final = _Shrinking()
"""One for the process: Hypothesis runs one test at a time."""
