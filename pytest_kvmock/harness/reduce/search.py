"""The search for a smaller thing that fails: removal of halves, quarters, ... and then one by one.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (ddmin), by complements alone. It reads
no clock: its limit is counted in replayed steps, and a caller with a clock passes a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Spent(Exception):  # noqa: N818 - no error: the search ends with what it has
    """The budget is used up."""


class Budget:
    """How much a search may replay.

    Args:
        work: how many steps, over all replays.
        expired: asked before each step; True ends the search.

    Attributes:
        used: steps so far.
        replays: replays so far.
    """

    def __init__(self, work: int, expired: Callable[[], bool] | None = None) -> None:
        self.used = 0
        self.replays = 0
        self._work = work
        self._expired = expired

    def spend(self, steps: int = 1) -> None:
        """Pay for one step, or for `steps`.

        Raises:
            Spent: there is nothing left.
        """
        self.used += steps
        if self.is_spent:
            raise Spent

    @property
    def is_spent(self) -> bool:
        """Whether there is nothing left."""
        return self.used > self._work or (self._expired is not None and self._expired())


def minimal(items: Sequence[T], attempt: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Remove what can be removed, from the end to the start, until no single item can.

    Args:
        items: what fails now.
        attempt: whether this part of them fails too; what it accepts is what is tried to be cut next.

    Returns:
        A part of which no single item can be removed.
    """
    size = max(1, len(items) // 2)
    while True:
        removed = False
        end = len(items)
        while end > 0:
            start = max(0, end - size)
            rest = [*items[:start], *items[end:]]
            if attempt(rest):
                items = rest
                removed = True
            end = start
        if size > 1:
            size //= 2
        elif not removed:
            return items
