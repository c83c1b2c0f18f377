"""Random worlds whose streams are captured, and the problems that a check of each capture finds.

python tests/corpus/captured_worlds.py 0 160     # the worlds of seeds 0 to 159: a line for each that differs
"""

# ruff: noqa: T201 - it is a program too

import logging
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "servers" / "capture"), str(HERE)]

from captured import NOT_OF_THE_STREAM, shown  # noqa: E402 - the paths come first
from worlds import World  # noqa: E402 - as above

from pytest_kvmock import RouterHarness  # noqa: E402 - as above
from pytest_kvmock.servers import CaptureFile, CapturingJournal, check_file  # noqa: E402 - as above

UP_TO_RESTARTS = 10  # a problem's later fields name faults, and a file records fewer faults


def captured_world(seed, path):
    """Play a world and capture its events in a file; return the problems of its stream and those of a check of the
    file.
    """

    class Captured(RouterHarness):
        def __init__(self, *args, **given):
            super().__init__(*args, **given, journal=CapturingJournal(file, self.backend_of))

        def backend_of(self, key):
            worker = self.workers.get(key) or self.workers.get(key[0])
            return None if worker is None else worker.backend

    with CaptureFile(path, {"engine": None, "seed": seed}) as file:
        kv = World(seed, Captured).play().kv
    found = [problem for problem in kv.events.problems if of_the_stream(problem)]
    again = check_file(path).log.problems
    return [[shown(problem)[:UP_TO_RESTARTS] for problem in each] for each in (found, again)]


def of_the_stream(problem):
    """Return whether the problem is about what arrived: a sink behind the router does not affect that."""
    if problem.rule == "sink_failure":
        return problem.observed.endswith("the router never got the event")
    return problem.rule not in NOT_OF_THE_STREAM


def main(first, last):
    logging.disable()
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(first, last):
            found, again = captured_world(seed, Path(directory) / "capture.jsonl")
            if found != again:
                print(
                    seed,
                    *(f"- {one}" for one in found if one not in again),
                    *(f"+ {one}" for one in again if one not in found),
                    sep="\n  ",
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
