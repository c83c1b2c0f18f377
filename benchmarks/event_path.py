"""Counts of one event's path: calls, files and changes of file, from the block manager's sink to the verdict.

    python -m benchmarks.event_path [-v]

Only frames of the package count; an index under test answers like the reference index, and its own work is not counted.
With -v each call is listed. The lines of each room follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest_kvmock
from pytest_kvmock import KvCacheEvent, RadixIndex, RouterHarness, Stored, sequence_hashes
from pytest_kvmock.harness import Recovery

HOME = Path(pytest_kvmock.__file__).parent


class Uncounted:
    """An index under test that answers like the reference index."""

    def __init__(self) -> None:
        self._index = RadixIndex()

    def _call(self, function: Callable, *arguments):
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(profile)

    def apply(self, event):
        self._call(self._index.apply, event)

    def find_matches(self, local_hashes):
        return self._call(lambda: self._index.find_matches(local_hashes).scores)

    def remove_worker(self, worker_id):
        self._index.remove_worker(worker_id)


def path_of_one_event(arm: Callable | None = None, **options) -> list[tuple[str, str]]:
    """Return file and function of each call for a Stored that continues a chain of four blocks."""
    harness = RouterHarness(**options)
    if arm is not None:
        arm(harness)
    worker, prompt = harness.worker(0), harness.prompt(4)
    worker.serve(prompt)
    worker.serve(harness.prompt(4, after=prompt))
    if "double" in options.get("survive", ()):
        harness.faults.double(1)
    parent = sequence_hashes(prompt.block_hashes(16))[-1]
    event = KvCacheEvent(worker.manager.take_event_id(), Stored(parent, (77777,), (88888,)), 0)
    calls = []

    def note(frame, kind, _):
        file = Path(frame.f_code.co_filename)
        if kind == "call" and HOME in file.parents and not frame.f_code.co_name.startswith("<"):
            calls.append((file.relative_to(HOME).as_posix(), frame.f_code.co_name))

    publish = worker._recorder.publish  # noqa: SLF001 - where the manager publishes
    sys.setprofile(note)
    try:
        publish(event)
    finally:
        sys.setprofile(None)
    return calls


SETTINGS = {
    "no index": {},
    "an index": {"index": Uncounted},
    "a fault armed, no index": {"arm": lambda harness: harness.faults.lose(1, kind="cleared")},
    "an index, faults to survive": {"index": Uncounted, "survive": ("lose",)},
    "an index, an event doubled": {"index": Uncounted, "survive": ("double",)},
    "recovery, no index": {"recovery": Recovery},
}


def main() -> None:
    for name, options in SETTINGS.items():
        made = {key: value() if key in ("index", "recovery") else value for key, value in options.items()}
        calls = path_of_one_event(**made)
        files = [file for file, _ in calls]
        changes = sum(one != other for one, other in pairwise(files))
        print(f"{name:<30} {len(calls):4} calls, {len(set(files)):3} files, {changes:3} changes of file")
        if "-v" in sys.argv:
            for file, function in calls:
                print(f"    {file:<34} {function}")
    print()
    rooms: dict[str, list[int]] = {}
    for file in sorted(HOME.rglob("*.py")):
        room = file.relative_to(HOME).parts[0]
        rooms.setdefault(room, []).append(len(file.read_text(encoding="utf-8").splitlines()))
    for room, lines in rooms.items():
        print(f"{room:<20} {sum(lines):6} lines in {len(lines):2} modules")


if __name__ == "__main__":
    main()
