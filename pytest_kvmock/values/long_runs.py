"""Settings of Python's cyclic garbage collector during long runs: it runs less often, but is never turned off.

A run keeps the data of its report: requests, events, token times. None of this is garbage, but by default the collector
scans it again after each 700 objects. `long_run` raises that threshold during a run.

The process belongs to the user, so nothing changes if the user has set other thresholds, or if the process serves
engines, possibly for days next to other code. Cycles made during a run (by a router or a hook) are still collected,
only slightly later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final
from weakref import WeakSet

RAISED: Final = 50_000
"""New objects (some megabytes) after which the collector scans the youngest generation. A higher value gains nothing
measurable.
"""

_DEFAULTS: Final = frozenset({(700, 10, 10), (2_000, 10, 10), (2_000, 10, 0)})
"""Default thresholds of the interpreter: up to 3.12, and later."""

_lock: Final = Lock()
_servers: Final[WeakSet[object]] = WeakSet()
_found: list[tuple[int, int, int]] = []  # the thresholds to restore: empty, or one entry


@contextmanager
def long_run() -> Iterator[None]:
    """Let the cyclic garbage collector run less often in this context, and restore its setting at the end, also after
    errors.

    Nothing changes if the collector is off, its thresholds are not Python's defaults, or this process serves engines.
    With nested runs, or runs in several threads, the first one counts. Thresholds set by other code during the run
    stay.
    """
    with _lock:
        found = gc.get_threshold()
        raises = gc.isenabled() and found in _DEFAULTS and not _servers
        if raises:
            _found[:] = [found]
            gc.set_threshold(RAISED, *found[1:])
    try:
        yield
    finally:
        if raises:
            with _lock:
                _go_back()


def begin_serving(server: object) -> None:
    """Restore the collector's setting now and leave it unchanged until this server's `end_serving`."""
    with _lock:
        _servers.add(server)
        _go_back()


def end_serving(server: object) -> None:
    """Note that a server has ended; an unknown server is not an error."""
    with _lock:
        _servers.discard(server)


def _go_back() -> None:
    """Undo what a run has changed, unless other code has changed it since."""
    for found in _found:
        if gc.get_threshold() == (RAISED, *found[1:]):
            gc.set_threshold(*found)
    _found.clear()
