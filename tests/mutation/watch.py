"""A plugin for the runs of `mutate.py`: notes which test runs which lines, or runs the tests that it is given.

`KVMOCK_MUTATION` names a JSON file: `{"note": FILE}` where the seconds of each test are to be noted (the lines are
noted by coverage, under the name of each test), else the tests to run, in order, with their limits in seconds, and
files of which all tests are to be run but for those that are known.
"""

import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

TIMEOUT = 77
"""Exit status of a run that a test ended by computing longer than its limit."""
LIMIT = 20
"""Seconds of computing for a test that has no limit of its own."""
MEMORY = 4 * 2**30
"""Bytes; a loop without an end may fill memory."""

PLAN = json.loads(Path(os.environ["KVMOCK_MUTATION"]).read_text()) if "KVMOCK_MUTATION" in os.environ else {}
NOTE = PLAN.get("note")
SECONDS = {}
FAILED = set()


def pytest_configure():
    if NOTE is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGVTALRM, lambda *_: os._exit(TIMEOUT))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if NOTE is None:
        places = {nodeid: place for place, nodeid in enumerate(PLAN["tests"])}
        files, known = set(PLAN["files"]), set(PLAN["known"])
        new = {each.nodeid for each in items if each.nodeid.partition("::")[0] in files} - known
        wanted = (each for each in items if each.nodeid in places or each.nodeid in new)
        items[:] = sorted(wanted, key=lambda each: places.get(each.nodeid, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = time.process_time()
    if NOTE is None:
        signal.setitimer(signal.ITIMER_VIRTUAL, PLAN["limits"].get(item.nodeid, LIMIT))
    else:
        import coverage

        coverage.Coverage.current().switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        SECONDS[item.nodeid] = time.process_time() - begun
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def pytest_runtest_logreport(report):
    if report.failed:
        FAILED.add(report.nodeid)


def pytest_sessionfinish():
    if NOTE is not None:
        passed = {nodeid: took for nodeid, took in SECONDS.items() if nodeid not in FAILED}
        Path(NOTE).write_text(json.dumps(passed))
