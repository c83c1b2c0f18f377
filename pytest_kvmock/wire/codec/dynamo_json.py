"""Dynamo's JSON on a wire: one `KvCacheEvent` or `RouterEvent` per line.

It has event ids and ranks, but no token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import KvCacheEvent, Located, RouterEvent, SparseStored, Updated
from pytest_kvmock.wire.codec.defects import EncodeError, WireDefect, WireProblem, shown

# Patterns of the messages of `events.py`, in the order in which they are tried.
_DEFECTS: Final = (
    ("nested too deeply", WireDefect.NESTED_TOO_DEEPLY),
    ("duplicate field", WireDefect.DUPLICATE_KEY),
    ("codec can't decode", WireDefect.BAD_TEXT),
    ("not JSON", WireDefect.MALFORMED),
    ("missing field", WireDefect.MISSING_FIELD),
    ('expected {"stored"', WireDefect.UNKNOWN_TAG),
    ("storage_tier: expected one of", WireDefect.UNKNOWN_MEDIUM),
    ("dp_rank: expected", WireDefect.BAD_RANK),
)
_HASHES: Final = ("block_hash", "tokens_hash", "parent_hash")


def write_lines(events: Sequence[RouterEvent], dialect: Dialect) -> bytes:
    """Write events, one per line; signed block hashes become the u64 of the same bits, as Dynamo reads them.

    Raises:
        EncodeError: Dynamo's JSON has no form for an event.
    """
    for index, event in enumerate(events):
        if isinstance(event.event.data, (SparseStored, Located, Updated)):
            raise EncodeError(f"event {index} of the batch: Dynamo's JSON has no {type(event.event.data).__name__}")
    whole = dialect.form == "router_json"
    return b"".join((event if whole else event.event).to_json().encode() + b"\n" for event in events)


def read_lines(
    payload: bytes, dialect: Dialect, worker_id: int, problems: list[WireProblem]
) -> tuple[list[RouterEvent], int]:
    """Read events, one per line, and note in `problems` the defects of those that are left out.

    Returns:
        The good events, and the number of lines.
    """
    events: list[RouterEvent] = []
    lines = [line for line in payload.split(b"\n") if line.strip()]
    for index, line in enumerate(lines):
        try:
            if dialect.form == "router_json":
                events.append(RouterEvent.from_json(line))
            else:
                events.append(RouterEvent(worker_id, KvCacheEvent.from_json(line)))
        except ValueError as error:
            problems.append(_problem(index, str(error), last=index == len(lines) - 1 and not payload.endswith(b"\n")))
    return events, len(lines)


def _problem(index: int, message: str, *, last: bool) -> WireProblem:
    """Return the record for an error of `from_json`: "RouterEvent.event.dp_rank: expected an integer ..., got 'x'"."""
    where, _, what = message.partition(": ")
    defect = next((defect for text, defect in _DEFECTS if text in message), WireDefect.WRONG_TYPE)
    if defect is WireDefect.MALFORMED and last:
        defect = WireDefect.TRUNCATED  # a line without a newline was cut off
    expected, got, observed = what.removeprefix("expected ").rpartition(", got ")
    if defect is WireDefect.WRONG_TYPE and any(name in where for name in _HASHES) and observed.lstrip("-").isdigit():
        defect = WireDefect.HASH_OUT_OF_RANGE
    field = where.partition(".")[2][:80] or None
    if not got:
        return WireProblem(defect, index, field, shown(what), "Dynamo's JSON, one event a line")
    return WireProblem(defect, index, field, observed[:80], expected[:80])
