"""A request of a trace, and a streaming reader of the Mooncake format.

A trace names blocks, not tokens: one id for each `trace_block_size` tokens of a prompt. The ids are *prefix* ids: equal
ids have the same position after equal prefixes, so an id can serve as the block's local hash. `TraceRequest.prompt`
uses it so; for routers that hash tokens themselves, it makes the block's tokens from the id.

The last id may name a partial block. In the real traces such an id never also names a full block: the next turn of the
conversation fills the block and gives it another id. `synthetic_trace` does the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from pytest_kvmock.values.checks import KvMockError, check_integer, integer_text
from pytest_kvmock.values.tokens import Prompt, TokenRuns, check_block_size

MOONCAKE_BLOCK_SIZE: Final = 512
"""Tokens for each hash id in the Mooncake traces."""

_U64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp: arrival in milliseconds from the start of the trace; None if the trace has none.
        input_length: length of the prompt in tokens.
        output_length: tokens to generate.
        hash_ids: one prefix id (u64) for each block of the prompt; the last block may be partial.
        session_id: the conversation that this request is a turn of, in the order of the trace; None for a request that
            is a separate session (Dynamo calls it `request_<n>`).
        delay: milliseconds between the end of the session's previous turn and this one; None if only timestamps say it.
        with_tokens: whether `prompt` makes tokens by default; `kv_trace` sets it by `kvmock(trace_tokens=...)`.
        priority: larger is served first, if the engines have priorities; 0 if the trace has none.
        block_size: tokens for each id, from the reader or generator; the default of `prompt`.
    """

    timestamp: float | None
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: str | None = None
    delay: float | None = None
    with_tokens: bool = field(default=False, compare=False)
    priority: int = field(default=0, repr=False)
    block_size: int = field(default=MOONCAKE_BLOCK_SIZE, compare=False, repr=False)

    def prompt(
        self,
        trace_block_size: int | None = None,
        *,
        whole_blocks: bool = False,
        tokens: bool | None = None,
    ) -> Prompt:
        """Return the request's prompt: hashes only, with each id as the local hash of a block, or tokens.

        Args:
            trace_block_size: tokens for each id; None: `block_size`. A prompt of hashes also has this block size for a
                worker, unless `whole_blocks`.
            whole_blocks: count the last block as full, whatever `input_length` is. Every id is then one block of any
                size, as in the recorded runs of the real managers, and the length in tokens is unknown. With `tokens`,
                every id is a block of `trace_block_size`.
            tokens: make tokens, for an index that hashes them itself: the low 32 bits of each id, `trace_block_size`
                times, cut at `input_length` (Dynamo's loader). Block hashes are then computed from the tokens, at any
                block size. None: as `with_tokens` says.

        Raises:
            TypeError: the block size is not an integer.
            ValueError: the block size is below 1, or the number of ids does not fit `input_length`.
        """
        if trace_block_size is None:
            trace_block_size = self.block_size
        check_block_size(trace_block_size)
        if tokens is None:
            tokens = self.with_tokens
        expected = -(-self.input_length // trace_block_size)
        if not whole_blocks and len(self.hash_ids) != expected:
            raise ValueError(
                f"a request of {self.input_length} tokens has {len(self.hash_ids)} hash ids: {expected} are expected, "
                f"one for each {trace_block_size} tokens (trace_block_size), of which the last may be partial"
            )
        if tokens:
            length = len(self.hash_ids) * trace_block_size if whole_blocks else self.input_length
            return Prompt(TokenRuns(self.hash_ids, trace_block_size, length))
        if whole_blocks:
            return Prompt(hashes=self.hash_ids)
        return Prompt(hashes=self.hash_ids[: self.input_length // trace_block_size], num_tokens=self.input_length)


# -------------------------------------------------------------------------------------------------- block sizes


class Row(NamedTuple):
    """One row of a trace, and the block sizes that fit it.

    Attributes:
        name: the row's name in messages.
        tokens: length of its prompt.
        ids: number of its ids.
    """

    name: str
    tokens: int
    ids: int

    @property
    def least(self) -> int:
        """The smallest block size at which `tokens` tokens fill `ids` blocks; the last block may be partial."""
        return max(1, -(-self.tokens // max(1, self.ids)))

    @property
    def most(self) -> float:
        """The largest block size that fits; less than `least` if none does."""
        if self.ids > 1:
            return (self.tokens - 1) // (self.ids - 1)
        return math.inf if min(1, self.tokens) == self.ids else 0

    @property
    def fits_none(self) -> bool:
        """Whether no size fits, so that the row itself is wrong."""
        return self.least > self.most

    def disagrees(self, other: Row) -> bool:
        """Whether each row has sizes that fit it, but no size fits both."""
        least, most = max(self.least, other.least), min(self.most, other.most)
        return least > most and not self.fits_none and not other.fits_none

    def __str__(self) -> str:
        sizes = f"at least {self.least}" if math.isinf(self.most) else f"{self.least} to {self.most}"
        return f"{self.name} ({self.tokens} tokens, number of ids {self.ids}: blocks of {sizes})"


def disagreement(row: Row, other: Row) -> str:
    """Return the message that no block size fits both rows."""
    return f"a trace has one block size, and {row} and {other} disagree about it"


# ------------------------------------------------------------------------------------------------------ reading


class TraceError(KvMockError, ValueError):
    """A line of a trace that cannot be used, or a trace without a request.

    Attributes:
        source: name of the file, or `<lines>`.
        line: number of the line, from 1; None for the trace as a whole.
        field: name of the field; None for the line as a whole.
    """

    def __init__(self, source: str, line: int | None, field: str | None, problem: str) -> None:
        super().__init__(source, line, field, problem)  # all four, so that it can be pickled
        self.source = source
        self.line = line
        self.field = field
        self._problem = problem

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self._problem}" if self.field is None else f"{place}, field {self.field!r}: {self._problem}"


def read_mooncake(
    path_or_lines: str | os.PathLike[str] | Iterable[str | bytes],
    *,
    limit: int | None = None,
    trace_block_size: int = MOONCAKE_BLOCK_SIZE,
) -> Iterator[TraceRequest]:
    """Read a trace in the Mooncake format: one JSON object a line; blank lines and unknown fields are ignored.

    Lines are read lazily and not kept; only the names of sessions are. The rules are those of Dynamo's loader, plus one
    from the published traces: there is one id for each block of the input.

    Args:
        path_or_lines: name of the UTF-8 file (a string is a name, never a line), or its lines.
        limit: how many requests to read, at least 1; later lines are never read. None for all.
        trace_block_size: tokens for each hash id.

    Yields:
        The requests, in the order of the trace.

    Raises:
        OSError: the file cannot be opened, on the first request.
        TraceError: a line breaks a rule, or there is no request at all; raised when that line is read.
        TypeError: `limit` or `trace_block_size` is not an integer.
        ValueError: `limit` or `trace_block_size` is below 1.
    """
    check_block_size(trace_block_size)
    if limit is not None:
        check_integer("limit", limit, 1, " (requests; None reads all)", wrong_type=TypeError)
    if isinstance(path_or_lines, (str, os.PathLike)):
        return _read_file(Path(path_or_lines), limit, trace_block_size)
    return _read(path_or_lines, "<lines>", limit, trace_block_size)


def _read_file(path: Path, limit: int | None, trace_block_size: int) -> Iterator[TraceRequest]:
    with path.open("rb") as lines:  # as bytes, to report the number of a line that is not UTF-8
        yield from _read(lines, str(path), limit, trace_block_size)


def _read(
    lines: Iterable[str | bytes], source: str, limit: int | None, trace_block_size: int
) -> Iterator[TraceRequest]:
    sessions: set[str] = set()
    count = 0
    longest = Row("", 0, 0)  # of the lines so far; it limits the block size the most
    for number, line in enumerate(lines, 1):
        if isinstance(line, (str, bytes)) and not line.strip():
            continue
        request = _Line(source, number, line).request(sessions, trace_block_size, longest)
        if len(request.hash_ids) > longest.ids:
            longest = Row(f"line {number}", request.input_length, len(request.hash_ids))
        yield request
        count += 1
        if count == limit:
            return
    if not count:
        raise TraceError(source, None, None, "no request in it; at least one line with a JSON object is expected")


class _Line:
    """One line of a trace, with its checks."""

    __slots__ = ("_fields", "_number", "_source")

    def __init__(self, source: str, number: int, line: str | bytes) -> None:
        self._source = source
        self._number = number
        self._fields = self._parse(line)

    def _wrong(self, problem: str, field: str | None = None) -> NoReturn:
        raise TraceError(self._source, self._number, field, problem) from None

    def _parse(self, line: str | bytes) -> dict[str, Any]:
        hint = ""
        if isinstance(line, bytes):
            if not line.endswith(b"\n"):
                hint = "; the file ends in this line, it may be cut off"
            try:
                line = line.decode()
            except UnicodeDecodeError as error:
                self._wrong(f"not UTF-8 at byte {error.start}; a trace is a JSON object a line, in UTF-8")
        elif not isinstance(line, str):
            self._wrong(f"a line of text is expected, got {_shown(line)}")
        if self._number == 1:
            line = line.removeprefix("\ufeff")
        line = line.rstrip()  # otherwise an error at its end would be reported in the next line
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            self._wrong(f"not JSON: {error.msg} at column {error.colno}, got {_cut(line)}{hint}")
        except (ValueError, RecursionError) as error:  # integers of 4,301 digits; thousands of open brackets
            self._wrong(f"JSON that cannot be read ({str(error).partition(';')[0]}), got {_cut(line)}")
        if not isinstance(fields, dict):
            self._wrong(f"a JSON object is expected, got {_shown(fields)}")
        return fields

    def request(self, sessions: set[str], trace_block_size: int, longest: Row) -> TraceRequest:
        timestamp = self._milliseconds("timestamp")
        input_length = self._length("input_length")
        output_length = self._length("output_length")
        hash_ids = self._hash_ids(input_length, trace_block_size, longest)
        session_id = self._fields.get("session_id")
        if session_id is not None and not isinstance(session_id, str):
            self._wrong(f"a string is expected, got {_shown(session_id)}", "session_id")
        delay = self._milliseconds("delay")
        if delay and (session_id is None or session_id not in sessions):
            whose = "this request is a session of its own" if session_id is None else f"session {session_id!r} begins"
            self._wrong(
                f"a first turn has no turn before it to wait for ({whose}), got {delay:g}; 0 or no delay is expected",
                "delay",
            )
        if session_id is not None:
            sessions.add(session_id)
        priority = self._fields.get("priority")
        if priority is None:
            priority = 0
        if type(priority) is not int:  # refuses a bool
            self._wrong(f"an integer is expected (larger is served first), got {_shown(priority)}", "priority")
        return TraceRequest(
            timestamp, input_length, output_length, hash_ids, session_id, delay,
            priority=priority, block_size=trace_block_size,
        )  # fmt: skip

    def _required(self, field: str) -> Any:
        try:
            return self._fields[field]
        except KeyError:
            self._wrong("missing; a request has input_length, output_length and hash_ids", field)

    def _length(self, field: str) -> int:
        value = self._required(field)
        if type(value) is not int or value < 0:  # refuses a bool
            self._wrong(f"{integer_text(0)} (tokens) is expected, got {_shown(value)}", field)
        return value

    def _milliseconds(self, field: str) -> float | None:
        value = self._fields.get(field)
        if value is None:
            return None
        number = -1.0
        if type(value) in (int, float):  # refuses a bool
            with suppress(OverflowError):
                number = float(value)
        if not 0 <= number < math.inf:  # refuses NaN too
            self._wrong(f"a finite number of at least 0 (milliseconds) is expected, got {_shown(value)}", field)
        return number

    def _hash_ids(self, input_length: int, trace_block_size: int, longest: Row) -> tuple[int, ...]:
        ids = self._required("hash_ids")
        if not isinstance(ids, list):
            self._wrong(f"a list of ids, one a block, is expected, got {_shown(ids)}", "hash_ids")
        if not {int}.issuperset(map(type, ids)) or (ids and not 0 <= min(ids) <= max(ids) <= _U64):
            for position, value in enumerate(ids):
                if type(value) is not int or not 0 <= value <= _U64:
                    self._wrong(
                        f"id {position}: an integer from 0 to 2**64 - 1 is expected, got {_shown(value)}", "hash_ids"
                    )
        expected = -(-input_length // trace_block_size)
        if len(ids) != expected:
            row, hint = Row(f"line {self._number}", input_length, len(ids)), ""
            if longest.disagrees(row):
                hint = f"; {disagreement(longest, row)}"
            elif not row.fits_none:
                hint = f"; trace_block_size={row.least} fits this line"
            self._wrong(
                f"{expected} ids are expected, one for each {trace_block_size} of {input_length} tokens (the last "
                f"block may be partial), got {len(ids)}{hint}",
                "hash_ids",
            )
        return tuple(ids)


def _cut(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _shown(value: object) -> str:
    """Return a value as shortened JSON, or its type if JSON cannot show it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
