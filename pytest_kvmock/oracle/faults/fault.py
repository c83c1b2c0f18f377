"""One fault of a test: the events that it applies to, and how often it was injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Self

from pytest_kvmock.oracle.faults.kinds import FAULTS
from pytest_kvmock.oracle.hygiene.problem import EventRulesBroken
from pytest_kvmock.values.events import kind_of

if TYPE_CHECKING:
    from random import Random
    from types import TracebackType

    from pytest_kvmock.oracle.faults.changes import Change
    from pytest_kvmock.values.events import RouterEvent


class Fault:
    """A scripted fault. It is injected into the events that match it. As a context manager it ends with the block.

    An unused fault fails the test: at the end of the block or of the test, fewer injections than requested are an
    error. `stop` ends the fault early, without that check.

    Attributes:
        kind: the name of the fault: "lose", "double", ...
        left: number of events that it is still to be injected into; None: every event.
        injected: number of events that it was injected into.
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
        self._asked = n
        self.injected = 0
        self.change = change
        self.late_by = late_by
        self._call = call
        self._wants = wants
        self._end = end

    def __repr__(self) -> str:
        return f"<{self._call}: {self.injected} injected>"

    def inject(self, event: RouterEvent) -> list[RouterEvent] | None:
        """Return what arrives in place of an event; None if the fault does not apply to it."""
        if self.left == 0 or not self._wants(event):
            return None
        arriving = self.change(event)
        if arriving is not None:
            self.injected += 1
            if self.left is not None:
                self.left -= 1
        return arriving

    def stop(self) -> None:
        """End the fault, even if it was injected less often than requested."""
        self._end(self)

    def unmet(self) -> str | None:
        """Return the message if the fault was injected less often than requested, else None."""
        if self.left == 0 or (self.left is None and self.injected):
            return None
        if not self.injected:
            return f"{self._call}: unused, no event matched"
        return f"{self._call}: {self.injected} of {self._asked} injected"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True  # so that the traceback of a failure shows the test
        self.stop()
        unmet = self.unmet()
        if unmet is not None and kind is None:
            raise EventRulesBroken(unmet)


class DoneAtOnce:
    """The result of a method of `Faults` that has taken effect when it returns; using it with `with` is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<kv_harness.faults.{self._name}: done>"

    def __enter__(self) -> NoReturn:
        __tracebackhide__ = True  # see `Fault.__exit__`
        blocks = ", ".join(kind.name for kind in FAULTS.values() if kind.is_block)
        calls = ", ".join((*(kind.name for kind in FAULTS.values() if not kind.is_block), "survive", "at_random"))
        raise TypeError(
            f"kv_harness.faults.{self._name}() is not a context manager: call it without `with`; it has taken effect "
            f"when it returns. Calls: {calls}; blocks, for `with`: {blocks}"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Never called, as `__enter__` raises. Without it Python would not call `__enter__`."""


class RandomFault:
    """A fault that is injected at random, at a rate. It has its own seed, so other faults do not change its events.

    Attributes:
        kind: the name of the fault.
        is_unused: whether it has a rate above 0 and was not injected yet.
    """

    def __init__(self, kind: str, rate: float, change: Change, rng: Random, *, late_by: int = 0) -> None:
        self.kind = kind
        self.change = change
        self.late_by = late_by
        self.is_unused = rate > 0
        self._rate = rate
        self._rng = rng

    def inject(self, event: RouterEvent) -> list[RouterEvent] | None:
        """Return what arrives in place of an event; None if the fault does not apply to it."""
        arriving = self.change(event) if self._rng.random() < self._rate else None
        if arriving is not None:
            self.is_unused = False
        return arriving


def wanted(kind: str | None, worker_id: int | None, dp_rank: int | None) -> Callable[[RouterEvent], bool]:
    """Make a filter of events by kind, worker and rank; None matches any."""

    def wants(event: RouterEvent) -> bool:
        return (
            (kind is None or kind == kind_of(event))
            and worker_id in (None, event.worker_id)
            and dp_rank in (None, event.event.dp_rank)
        )

    return wants
