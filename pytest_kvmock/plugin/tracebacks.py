"""The traceback of a failing test, without our code that refuses a test's call. The test's line and the message are
enough.

The line that raised an error shows its origin. If this is a `raise` of ours, or is in user code that we called, our
frames in between are left out. Any other error in our code is our bug, and is shown whole. `--full-trace` shows
everything.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

_OURS: Final = "pytest_kvmock"


def leave_out_ours(item: pytest.Item, failure: BaseException) -> None:
    """Remove our frames from the tracebacks of a failure and of its causes, if they explain nothing.

    Args:
        item: the test; a test of a contract, which is our code, is not changed.
        failure: the exception that it raised.
    """
    function = getattr(item, "function", None)
    if item.config.getoption("fulltrace", False) or _is_ours(getattr(function, "__module__", _OURS)):
        return
    for error in _chain(failure):
        if error.__traceback__ is not None:
            error.__traceback__ = _without_ours(error.__traceback__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that are shown with it as its origin."""
    seen: set[int] = set()
    shown: BaseException | None = error
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        yield shown
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == _OURS


def _without_ours(whole: TracebackType) -> TracebackType:
    """Return a traceback without our frames if the rest shows the origin; otherwise the whole one."""
    entries: list[TracebackType] = []
    entry: TracebackType | None = whole
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    last = entries[-1]
    kept = [each for each in entries if not _is_ours(each.tb_frame.f_globals.get("__name__"))]
    if not kept or (kept[-1] is not last and not _is_raise(last)):
        return whole
    made: TracebackType | None = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    assert made is not None
    return made


def _is_raise(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code
    line = linecache.getline(code.co_filename, entry.tb_lineno, entry.tb_frame.f_globals)
    return line.lstrip().startswith("raise")
