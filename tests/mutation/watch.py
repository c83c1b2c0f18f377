"""A plugin for the runs of `mutate.py`: notes which tests run which lines, or runs the tests of a plan.

`KVMOCK_MUTATION` names a JSON file. With `{"note": FILE}` the seconds of each test are noted there (coverage notes the
lines, under the name of each test). With `{"serve": FD}`, an open socket, all tests are collected once; each plan that
arrives on the socket runs in a fork in which the functions of a module have the code of its changed text. Any other
file is itself a plan: the tests to run, in order, their limits in seconds, and files of which all tests run except the
known ones.
"""

import ast
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
"""Exit status of a run in which a test computed longer than its limit."""
UNFIT = 78
"""Exit status if the changed code does not fit into the existing functions."""
LIMIT = 20
"""Computing seconds of a test without a limit of its own."""
WAITING = 120
"""Seconds that a test may take beyond its limit while it waits for something. The machine may be busy."""
MEMORY = 4 * 2**30
"""Bytes; an endless loop may fill memory."""

PLAN = json.loads(Path(os.environ["KVMOCK_MUTATION"]).read_text()) if "KVMOCK_MUTATION" in os.environ else {}
NOTE, SERVE = PLAN.get("note"), PLAN.get("serve")
SECONDS = {}
FAILED = set()


def bounded():
    """Set the limits of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGVTALRM, lambda *_: os._exit(TIMEOUT))


def select(items, plan):
    """Keep only the tests of a plan, in its order."""
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
    """Run each plan in a fork. It returns only in the forks, which then run their tests."""
    gc.unfreeze()
    functions = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            functions[each.__code__.co_filename].append(each)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=SERVE) as connection:
        stream = connection.makefile("rw")
        with stream:
            for line in iter(stream.readline, ""):
                plan = json.loads(line)
                failed = Path(plan["failed"])
                failed.unlink(missing_ok=True)
                child = os.fork()
                if not child:
                    PLAN.update(plan)
                    os.setpgid(0, 0)
                    bounded()
                    if not replace(functions[plan["path"]], plan["old"], plan["new"], plan["path"]):
                        os._exit(UNFIT)
                    if not plan["in_function"] and not rebind(
                        functions[plan["path"]], plan["old"], plan["new"], plan["path"]
                    ):
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
                    os.killpg(child, signal.SIGKILL)  # processes that its tests have started
                answer = {"status": status, "failed": failed.read_text() if failed.exists() else ""}
                stream.write(json.dumps(answer) + "\n")
                stream.flush()


def replace(functions, old, new, path):
    """Give functions their code from the new text of their module; return False if that is impossible."""
    before, after = codes(compile(old, path, "exec")), codes(compile(new, path, "exec"))
    fresh = {}
    for name, those in before.items():
        these = after.get(name, [])
        if len(those) == len(these):  # otherwise the change removed a lambda: its function has new code itself
            for one, other in zip(those, these, strict=True):
                fresh.setdefault((name, one.co_firstlineno), []).append(other)
    for each in functions:
        code = fresh.get((each.__code__.co_qualname, each.__code__.co_firstlineno), [])
        if len(code) > 1:  # two lambdas on one line
            return False
        if code:
            try:
                each.__code__ = code[0]
            except ValueError:  # the free variables differ
                return False
    return True


def rebind(functions, old, new, path):
    """Set the new value of a module constant or of an argument's default; return False if that is impossible."""
    (module,) = [each for each in sys.modules.values() if getattr(each, "__file__", None) == path]
    names = vars(module)
    for before, after in zip(ast.walk(ast.parse(old)), ast.walk(ast.parse(new)), strict=False):
        both = isinstance(before, ast.FunctionDef) and isinstance(after, ast.FunctionDef)
        if both and ast.dump(before.args) != ast.dump(after.args):
            fitting = [each for each in functions if each.__name__ == before.name and _begins(each, before)]
            for each in fitting:
                each.__defaults__ = tuple(eval(ast.unparse(one), names) for one in after.args.defaults) or None
                pairs = zip(after.args.kwonlyargs, after.args.kw_defaults, strict=True)
                given = {arg.arg: eval(ast.unparse(one), names) for arg, one in pairs if one is not None}
                each.__kwdefaults__ = given or None
            return bool(fitting)
    for before, after in zip(ast.parse(old).body, ast.parse(new).body, strict=True):
        if ast.dump(before) != ast.dump(after):
            target = getattr(before, "target", None) or getattr(before, "targets", [None])[0]
            if not isinstance(target, ast.Name):
                return False
            was, fresh = names[target.id], eval(ast.unparse(after.value), names)
            for each in list(sys.modules.values()):
                if getattr(each, "__name__", "").startswith(module.__name__.partition(".")[0]):
                    for name in [name for name, value in vars(each).items() if value is was and name == target.id]:
                        setattr(each, name, fresh)
            return True
    return False


def _begins(function, node):
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return function.__code__.co_firstlineno == first


def codes(code):
    """Return all code objects in a code object, by qualified name."""
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
        limit = PLAN["limits"].get(item.nodeid, LIMIT)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit)
        signal.setitimer(signal.ITIMER_REAL, limit + WAITING)  # ends the process, which may hang in C
    else:
        import coverage

        coverage.Coverage.current().switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        SECONDS[item.nodeid] = time.process_time() - begun
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


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
