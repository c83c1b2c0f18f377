"""The verdict: whether a test whose body has ended keeps its outcome.

It is given in the call phase, where it makes one failure of one test. A check in a fixture's finalizer would report
both "passed" and "error", double a failure of the body, and break xfail. Events that arrive later, from any teardown,
are checked when all finalizers are done.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.oracle.hygiene.rules import LEAKED_REQUESTS, LEASED_BLOCKS, NOT_FLUSHED
from pytest_kvmock.plugin.options import KvEventWarning
from pytest_kvmock.plugin.report import add_log, add_page, add_reproduction, record_properties

if TYPE_CHECKING:
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.plugin.case import Case

_OF_THE_END: Final = (LEAKED_REQUESTS, LEASED_BLOCKS, NOT_FLUSHED)
"""Rules that a body breaks if it ends early."""


class _Findings:
    """The problems found since the last check, sorted by their effect under the test's policy."""

    __slots__ = ("errors", "fatal", "reported", "unmet", "warnings")

    def __init__(self, case: Case) -> None:
        verdict = case.harness.judge()
        case.taken_for_device = case.harness.publisher.num_taken_for_device
        policy = case.policy
        self.errors = [problem for problem in verdict.errors if problem.rule not in policy.allow]
        warnings = [problem for problem in verdict.warnings if problem.rule not in policy.allow]
        unwaived = case.harness.events.unwaived
        if policy.event_errors != "ignore":  # no hook is called for problems without effect
            self.errors = unwaived(self.errors)
        if policy.event_warnings != "ignore":
            warnings = unwaived(warnings)
        self.warnings = warnings
        self.unmet: list[str] = list(verdict.unmet)
        if policy.event_warnings == "fail" and isinstance(case.item, pytest.Function) and not case.passed:
            self.unmet += [
                f"the sink of worker {worker_id} was never used: no event came to it (kv_sink, make_kv_sink)"
                for worker_id in case.harness.publisher.unused_sinks
            ]
        self.fatal: list[Problem] = []
        self.reported: list[Problem] = []
        for problems, reaction in ((self.errors, policy.event_errors), (warnings, policy.event_warnings)):
            if reaction == "fail":
                self.fatal += problems
            elif reaction == "warn":
                self.reported += problems
        if self.errors and warnings:  # the earliest problem is nearest to the cause, whatever its kind
            order = {problem: i for i, problem in enumerate(case.harness.events.problems)}
            for problems in (self.fatal, self.reported):
                problems.sort(key=order.__getitem__)

    @property
    def is_failure(self) -> bool:
        return bool(self.fatal or self.unmet)


def judge_body(case: Case) -> None:
    """Check the events of a test whose body passed.

    Raises:
        pytest.fail.Exception: they have errors.
    """
    __tracebackhide__ = True
    found = _look(case, "call")
    _finish(case, found, "call")
    case.passed = True
    case.failed_before = case.item.session.testsfailed


def judge_failed_body(case: Case, failure: BaseException) -> None:
    """Add notes and the log to a test whose body failed: its own failure stays the only one."""
    from pytest_kvmock.oracle.hygiene.problem import EventRulesBroken

    if _keeps_its_outcome(failure):
        return
    found = _add_note(case, failure)
    if case.policy.log != "none":
        add_log(case, "call", _first(found))
    if found is None:
        if not _is_expected(case.item, failure):
            add_page(case, "call", _said(failure))
        return
    if isinstance(failure, EventRulesBroken):  # for example by kv_events.assert_no_event_errors()
        problem = _first(found)
    else:
        problem = next((problem for problem in found.fatal if problem.rule not in _OF_THE_END), None)
    if not _is_expected(case.item, failure):
        reproduction = None if problem is None else add_reproduction(case, "call", problem)
        add_page(case, "call", _said(failure), _first(found), reproduction)


def judge_late(case: Case) -> None:
    """Check events after the body, when all finalizers are done.

    Raises:
        pytest.fail.Exception: late events have errors.
    """
    __tracebackhide__ = True
    # A failure that did not pass through our hook (of a TestCase, or a strict xfail that passed) shows in the count.
    if not case.passed or case.item.session.testsfailed > case.failed_before:
        return
    _finish(case, _look(case, "teardown"), "teardown")


def judge_failed_teardown(case: Case, failure: BaseException) -> None:
    """Add notes and the log to a test whose teardown failed."""
    if case.passed and not _keeps_its_outcome(failure):
        first = _first(_add_note(case, failure))
        if first is not None and case.policy.log != "none":
            add_log(case, "teardown", first)
        add_page(case, "teardown", _said(failure), first)


def _look(case: Case, phase: str) -> _Findings:
    """Collect the problems. The user's index or hook may raise in this; the log is then shown, too."""
    __tracebackhide__ = True
    try:
        return _Findings(case)
    except (Exception, pytest.fail.Exception):
        if case.policy.log != "none":
            add_log(case, phase)
        raise


def _finish(case: Case, found: _Findings, phase: str) -> None:
    from pytest_kvmock.oracle.hygiene.report import failure_text

    late = phase == "teardown"
    case.count(found.errors, found.warnings)
    record_properties(case)
    failure = failure_text(found.fatal, found.unmet, late=late) if found.is_failure else None
    if found.reported:
        text = failure_text(found.reported, late=late)
        try:
            case.item.warn(KvEventWarning(text))
        except KvEventWarning:
            # With -W error. Fail below instead of re-raising, to show the message without these frames.
            failure = failure or f"KvEventWarning: {text}"
    log = case.policy.log
    if (log == "all" and not late) or (log != "none" and failure):
        add_log(case, phase, next(iter(found.fatal), None))
    reproduction = add_reproduction(case, phase, found.fatal[0]) if found.fatal else None
    if failure:
        add_page(case, phase, failure, _first(found), reproduction)
        pytest.fail(failure, pytrace=False)


def _said(failure: BaseException) -> str:
    return "\n".join((f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())))


def _first(found: _Findings | None) -> Problem | None:
    return None if found is None else next(iter(found.fatal + found.reported), None)


def _add_note(case: Case, failure: BaseException) -> _Findings | None:
    """Add a note to the test's own failure if there is a problem; return None if the events cannot be checked."""
    from pytest_kvmock.oracle.hygiene.report import failure_text

    try:
        found = _Findings(case)
    except pytest.exit.Exception:
        raise
    # The user's index or hook may raise or fail here, which is not why the test failed.
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - as the comment says
        why = repr(error).removeprefix("kvmock: ")
        if why not in str(failure):  # kv_events.assert_no_event_errors() may have shown it
            failure.add_note(f"kvmock: the events could not be judged: {why}")
        return None
    case.count(found.errors, found.warnings)
    record_properties(case)
    first = _first(found)
    if first is not None:
        first_line = failure_text(found.fatal + found.reported).partition("\n")[0]
        if first_line not in str(failure):  # kv_events.assert_no_event_errors() may have shown it
            failure.add_note(f"kvmock: also {first_line}\n  observed: {first.observed}\n  expected: {first.expected}")
    return found


def _is_expected(item: pytest.Item, failure: BaseException) -> bool:
    """Return whether an xfail mark expects this failure, as far as can be determined: attachments would not be
    shown.
    """
    if item.config.getoption("runxfail", False):
        return False
    for mark in item.iter_markers("xfail"):
        conditions = [*mark.args, *([mark.kwargs["condition"]] if "condition" in mark.kwargs else [])]
        holds = not conditions or any(c for c in conditions if not isinstance(c, str))  # pytest evaluates strings
        raises = mark.kwargs.get("raises") or BaseException
        kinds = raises if isinstance(raises, tuple) else (raises,)
        if holds and isinstance(failure, tuple(kind for kind in kinds if isinstance(kind, type))):
            return True
    return False


def _keeps_its_outcome(failure: BaseException) -> bool:
    """Return whether a failure is a skip, an xfail, or the end of the session. A note on a skip would appear in the
    summary.
    """
    if isinstance(failure, pytest.skip.Exception | pytest.xfail.Exception | pytest.exit.Exception | KeyboardInterrupt):
        return True
    unittest = sys.modules.get("unittest")  # if loaded, pytest takes its SkipTest for a skip
    return unittest is not None and isinstance(failure, unittest.SkipTest)
