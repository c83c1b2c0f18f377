"""What a long run does about Python's collector of cycles: it has it look less often, and never turns it off.

A run keeps the data of its report: requests, events, the times of tokens. None of that is garbage, and by default the
collector looks through it again after each 700 objects. `long_run` raises that threshold while a run lasts.

The process is the user's, so that nothing is changed where the user has chosen otherwise, or where engines are served,
which may run for days next to code that is not ours. What makes cycles meanwhile (a router, a hook) has them collected
as before, only a little later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final
from weakref import WeakSet

RAISED: Final = 50_000
"""New objects after which the collector looks through the youngest: some megabytes of them. More gains nothing
measurable."""

_DEFAULTS: Final = frozenset({(700, 10, 10), (2_000, 10, 10), (2_000, 10, 0)})
"""Thresholds with which an interpreter starts: up to 3.12, and in those after it."""

_lock: Final = Lock()
_servers: Final[WeakSet[object]] = WeakSet()
_found: list[tuple[int, int, int]] = []  # the thresholds to restore: empty, or one entry


@contextmanager
def long_run() -> Iterator[None]:
    """Have the collector of cycles look less often meanwhile, and as before afterwards, whatever happens.

    Nothing changes where it is off, its thresholds are not those of Python, or engines are served in this process. Of
    runs inside each other, or in several threads, the one that came first counts. Thresholds that are set meanwhile
    stand.
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
    """Leave the collector alone from now on, as it was before a run that is under way, until this server's
    `end_serving`.
    """
    with _lock:
        _servers.add(server)
        _go_back()


def end_serving(server: object) -> None:
    """A server has ended; one that is not known is not an error."""
    with _lock:
        _servers.discard(server)


def _go_back() -> None:
    """Undo what a run has changed, unless other code has changed it since."""
    for found in _found:
        if gc.get_threshold() == (RAISED, *found[1:]):
            gc.set_threshold(*found)
    _found.clear()
