"""One fault of a test: which events it strikes, and how many it has struck."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from pytest_kvmock.events import kind_of
from pytest_kvmock.hygiene.problem import KvEventsError

if TYPE_CHECKING:
    from random import Random
    from types import TracebackType

    from pytest_kvmock.events import RouterEvent
    from pytest_kvmock.faults.changes import Change


class Fault:
    """A fault that waits for the events that it strikes. As a context manager it ends when it is left.

    Then, or at the end of the test, it is an error that it has not struck as often as it was to: the test would not be
    about what it says. `stop` ends it before, and says nothing.

    Attributes:
        kind: its name: "lose", "double", ...
        left: how many events it is to strike yet; None: every one.
        struck: how many it has struck.
    """

    def __init__(
        self,
        kind: str,
        call: str,
        change: Change,
        n: int | None,
        *,
        wants: Callable[[RouterEvent], bool],
        end: Callable[[Fault], None],
        late_by: int = 0,
    ) -> None:
        self.kind = kind
        self.left = n
        self.injected = 0
        self.change = change
        self.late_by = late_by
        self._call = call
        self._wants = wants
        self._end = end

    def __repr__(self) -> str:
        return f"<{self._call}: {self.injected} struck>"

    def inject(self, event: RouterEvent) -> list[RouterEvent] | None:
        """What arrives in place of an event; None: it does not strike this one."""
        if self.left == 0 or not self._wants(event):
            return None
        arriving = self.change(event)
        if arriving is not None:
            self.injected += 1
            if self.left is not None:
                self.left -= 1
        return arriving

    def stop(self) -> None:
        """Strike nothing more; whether it struck as often as it was to does not matter."""
        self._end(self)

    def unmet(self) -> str | None:
        """What to say if it has not struck as often as it was to; None where it has."""
        if self.left == 0 or (self.left is None and self.injected):
            return None
        if not self.injected:
            return f"{self._call}: never struck"
        return f"{self._call}: {self.injected} struck, {self.left} never did"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # a test's failure shows the test
        self.stop()
        unmet = self.unmet()
        if unmet is not None and kind is None:
            raise KvEventsError(unmet)


class RandomFault:
    """A fault that strikes events at a rate, by a seed of its own: other faults change nothing about which.

    Attributes:
        kind: its name.
    """

    def __init__(self, kind: str, rate: float, change: Change, rng: Random, *, late_by: int = 0) -> None:
        self.kind = kind
        self.change = change
        self.late_by = late_by
        self._rate = rate
        self._rng = rng

    def inject(self, event: RouterEvent) -> list[RouterEvent] | None:
        """What arrives in place of an event; None: it does not strike this one."""
        return self.change(event) if self._rng.random() < self._rate else None


def wanted(kind: str | None, worker_id: int | None, dp_rank: int | None) -> Callable[[RouterEvent], bool]:
    """Make a filter of events, by kind, worker and rank; None is any."""

    def wants(event: RouterEvent) -> bool:
        return (
            (kind is None or kind == kind_of(event))
            and worker_id in (None, event.worker_id)
            and dp_rank in (None, event.event.dp_rank)
        )

    return wants
