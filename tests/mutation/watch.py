"""A plugin for the runs of `mutate.py`: notes which test runs which lines, or runs the tests that it is given.

`KVMOCK_MUTATION` names a JSON file. `{"note": FILE}`: the seconds of each test are noted there (the lines are noted by
coverage, under the name of each test). `{"serve": SOCKET}`: all tests are collected once, and each plan that arrives
there is carried out in a fork, in which the functions of a module have the code of its changed text. Else it is itself
a plan: the tests to run, in order, with their limits in seconds, and files of which all tests are to be run but for
those that are known.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

import pytest

TIMEOUT = 77
"""Exit status of a run that a test ended by computing longer than its limit."""
UNFIT = 78
"""Exit status where the changed code does not fit into the functions that there are."""
LIMIT = 20
"""Seconds of computing for a test that has no limit of its own."""
MEMORY = 4 * 2**30
"""Bytes; a loop without an end may fill memory."""

PLAN = json.loads(Path(os.environ["KVMOCK_MUTATION"]).read_text()) if "KVMOCK_MUTATION" in os.environ else {}
NOTE, SERVE = PLAN.get("note"), PLAN.get("serve")
SECONDS = {}
FAILED = set()


def bounded():
    """Give this process its limits."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGVTALRM, lambda *_: os._exit(TIMEOUT))


def select(items, plan):
    """Leave what a plan wants, in its order."""
    places = {nodeid: place for place, nodeid in enumerate(plan["tests"])}
    files, known = set(plan["files"]), set(plan["known"])
    new = {each.nodeid for each in items if each.nodeid.partition("::")[0] in files} - known
    wanted = (each for each in items if each.nodeid in places or each.nodeid in new)
    items[:] = sorted(wanted, key=lambda each: places.get(each.nodeid, len(places)))


def pytest_configure():
    if not NOTE and not SERVE:
        bounded()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if not NOTE and not SERVE:
        select(items, PLAN)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    if SERVE:
        serve(session)
    return (yield)


def serve(session):
    """Carry out plans, each in a fork; returns in the forks alone, which go on to run their tests."""
    gc.unfreeze()
    functions = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            functions[each.__code__.co_filename].append(each)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SERVE)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                plan = json.loads(stream.readline())
                failed = Path(plan["failed"])
                failed.unlink(missing_ok=True)
                child = os.fork()
                if not child:
                    PLAN.update(plan)
                    os.setpgid(0, 0)
                    bounded()
                    if not replace(functions[plan["path"]], plan["old"], plan["new"], plan["path"]):
                        os._exit(UNFIT)
                    select(session.items, plan)
                    return
                until = time.monotonic() + plan["wall"]
                while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                    if time.monotonic() > until:
                        os.kill(child, signal.SIGKILL)
                    time.sleep(0.01)
                status = os.waitstatus_to_exitcode(ended[1])
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # what its tests have started
                answer = {"status": status, "failed": failed.read_text() if failed.exists() else ""}
                stream.write(json.dumps(answer) + "\n")


def replace(functions, old, new, path):
    """Give functions the code that they have in the new text of their module; false where that cannot be done."""
    before, after = codes(compile(old, path, "exec")), codes(compile(new, path, "exec"))
    fresh = {}
    for name, those in before.items():
        these = after.get(name, [])
        if len(those) == len(these):  # else a lambda went with what was removed: its function has new code itself
            for one, other in zip(those, these, strict=True):
                fresh.setdefault((name, one.co_firstlineno), []).append(other)
    for each in functions:
        code = fresh.get((each.__code__.co_qualname, each.__code__.co_firstlineno), [])
        if len(code) > 1:  # two lambdas of a line
            return False
        if code:
            try:
                each.__code__ = code[0]
            except ValueError:  # of other free variables
                return False
    return True


def codes(code):
    """All code in some code, by qualified name."""
    found, waiting = defaultdict(list), [code]
    while waiting:
        each = waiting.pop()
        found[each.co_qualname].append(each)
        waiting.extend(const for const in each.co_consts if isinstance(const, CodeType))
    return {name: sorted(those, key=lambda one: one.co_firstlineno) for name, those in found.items()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = time.process_time()
    if not NOTE:
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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus):
    if NOTE:
        passed = {nodeid: took for nodeid, took in SECONDS.items() if nodeid not in FAILED}
        Path(NOTE).write_text(json.dumps(passed))
    if SERVE:
        Path(PLAN["failed"]).write_text(next(iter(FAILED), ""))
        sys.stdout.flush()
        os._exit(int(exitstatus))
