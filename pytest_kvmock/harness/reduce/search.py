"""The search for a smaller failing input: it removes halves, quarters, ... and then single items.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (ddmin), only with complements. The
search reads no clock: its limit is a number of replayed steps, and a caller can pass a callable that reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Spent(Exception):  # noqa: N818 - no error: the search ends with what it has
    """The budget is used up."""


class Budget:
    """The limit of a search.

    Args:
        work: maximum number of steps over all replays.
        expired: called before each step; True ends the search.

    Attributes:
        used: number of steps so far.
        replays: number of replays so far.
    """

    def __init__(self, work: int, expired: Callable[[], bool] | None = None) -> None:
        self.used = 0
        self.replays = 0
        self._work = work
        self._expired = expired

    def spend(self, steps: int = 1) -> None:
        """Count one step, or `steps`.

        Raises:
            Spent: the budget is used up.
        """
        self.used += steps
        if self.is_spent:
            raise Spent

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self.used > self._work or (self._expired is not None and self._expired())


def minimal(items: Sequence[T], attempt: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Remove items, from the end to the start, until no single item can be removed.

    Args:
        items: items that fail together.
        attempt: returns whether a part of them also fails; the search continues with each accepted part.

    Returns:
        A failing part from which no single item can be removed.
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
