"""The unreadable parts of a batch: which events, where they are missing, and which dialects would read the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.wire.codec.batch import Decoded
from pytest_kvmock.wire.codec.decoding import decode
from pytest_kvmock.wire.codec.defects import WireProblem
from pytest_kvmock.wire.codec.table import spoken_dialects


def has_no_events(decoded: Decoded) -> bool:
    """Whether not even the number of a batch's events could be read."""
    return not decoded.num_events and any(problem.event is None for problem in decoded.problems)


def is_unreadable(decoded: Decoded) -> bool:
    """Whether a batch, or all of its events, cannot be read."""
    return not decoded.events and (decoded.num_events > 0 or has_no_events(decoded))


def events_and_gaps(decoded: Decoded, batch: int) -> Iterator[RouterEvent | str]:
    """Yield the events of a batch in order, and in place of unreadable ones a text that says which and why.

    Args:
        decoded: the decoded contents.
        batch: the number of the batch.
    """
    unread = {problem.event: problem for problem in reversed(decoded.problems) if not problem.is_kept}
    events = iter(decoded.events)
    first: int | None = None
    for index in range(decoded.num_events):
        if index in unread:
            first = index if first is None else first
            continue
        if first is not None:
            yield _gap_text(unread[first], first, index, batch)
            first = None
        yield from _next(events)
    if first is not None:
        yield _gap_text(unread[first], first, decoded.num_events, batch)
    yield from events


def _next(events: Iterator[RouterEvent]) -> Iterator[RouterEvent]:
    for event in events:
        yield event
        return


def _gap_text(problem: WireProblem, first: int, stop: int, batch: int) -> str:
    names = f"event {first}" if stop - first == 1 else f"events {first} to {stop - 1}"
    field = "" if problem.field is None else f", {problem.field}"
    why = f"{problem.name}{field}: expected {problem.expected}, got {problem.observed}"
    return f"{names} of batch {batch} could not be read: {why}"


class OtherDialects:
    """Finds the dialects that can read a batch which another dialect cannot.

    Args:
        dialect: the other dialect.
    """

    __slots__ = ("_dialect", "_found")

    def __init__(self, dialect: Dialect) -> None:
        self._dialect: Final = dialect
        self._found: list[Dialect] = []

    def text(self, payload: bytes, decoded: Decoded) -> str:
        """Return the addition to the message for an unreadable batch: "; it reads as vllm-0.24", or "".

        Dialects that read one batch are tried first for the next, because a stream has one dialect.
        """
        if not decoded.num_events:
            return ""
        for dialects in (self._found, spoken_dialects().values()):
            found = [each for each in dialects if each is not self._dialect and _reads(each, payload)]
            if found:
                self._found = found
                return f"; it reads as {', '.join(each.name for each in found)}"
        return ""


def _reads(dialect: Dialect, payload: bytes) -> bool:
    read = decode(payload, dialect)
    return bool(read.events) and not read.problems
