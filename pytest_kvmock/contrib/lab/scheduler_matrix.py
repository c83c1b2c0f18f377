"""The scheduler matrix of a test: `@pytest.mark.kv_scheduler_matrix`, over the cases of `scheduler_cases.py`.

This module parametrises a private fixture, `_kvmock_scheduler_case`, whether or not the test asks for it, so a test
needs `kv_scheduler_case` only to read its case. The case sets sizes of the test's profile, which override the base but
not the markers, and fields of the engine, which markers also override; no marker may set a field that defines the case.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import pytest

from pytest_kvmock.contrib.lab import CASE_OF_MATRIX, SCHEDULER_MATRIX
from pytest_kvmock.contrib.lab.scheduler_cases import SCHEDULER_CASES, SchedulerCase
from pytest_kvmock.plugin.markers import show_mark
from pytest_kvmock.plugin.matrix import is_parametrised_by_mark

PARAMETER: Final = "_kvmock_scheduler_case"

_PARAMETRISED: Final = f"{CASE_OF_MATRIX} gets its values from @pytest.mark.{SCHEDULER_MATRIX}; do not parametrise it"
_ENGINES: Final = frozenset({"kv_engine", "kv_harness"})
_NO_ARGUMENTS: Final = (
    "takes no arguments; fields of the engine are those of kvmock(engine={...}), backends those of kv_backends"
)
_SET_BY_CASE: Final = ("enable_prefix_caching", "enable_chunked_prefill")


def generate_cases(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test over the eight cases, if it has the marker.

    Raises:
        pytest.Collector.CollectError: the test cannot be run over them.
    """
    definition, names = metafunc.definition, metafunc.fixturenames
    has_marker = definition.get_closest_marker(SCHEDULER_MATRIX) is not None
    if is_parametrised_by_mark(definition, CASE_OF_MATRIX):
        wrong: str | None = _PARAMETRISED
    elif has_marker and _ENGINES.isdisjoint(names):
        if not any(mark.name == SCHEDULER_MATRIX for mark in definition.own_markers):
            return  # a class's or module's marker has no effect without an engine
        wrong = f"{SCHEDULER_MATRIX} is for tests that take kv_engine, or kv_harness for engines; this one has neither"
    else:
        wrong = _wrong_beside(definition) if has_marker else None
    if wrong is not None:
        raise pytest.Collector.CollectError(f"{definition.nodeid}: {wrong}")
    if has_marker:
        if PARAMETER not in names:
            names.append(PARAMETER)
        metafunc.parametrize(PARAMETER, SCHEDULER_CASES, ids=[case.id for case in SCHEDULER_CASES], indirect=True)


def _wrong_beside(item: pytest.Item) -> str | None:
    """Return an error text for a marker of a test that is wrong or sets what the cases set; None if there is none."""
    for mark in item.iter_markers(SCHEDULER_MATRIX):
        if mark.args or mark.kwargs:
            return f"{show_mark(mark)}: {_NO_ARGUMENTS}"
    for mark in item.iter_markers("kvmock"):
        engine = mark.kwargs.get("engine")
        fields = engine if isinstance(engine, Mapping) else {}  # a wrong type is reported with all wrong markers
        name = next((name for name in _SET_BY_CASE if name in fields), None)
        if name is None and "prefix_caching" in mark.kwargs:
            name = "prefix_caching"
        if name is not None:
            return f"{show_mark(mark)}: each case of {SCHEDULER_MATRIX} sets {name}; leave it out"
    return None


def case_of(item: pytest.Item) -> SchedulerCase | None:
    """Return the case of a test that has the marker, or other parameters in place of the cases.

    None if the marker is on its class or module, and the test needs no engine.

    Raises:
        ValueError: the test was not parametrised by this module, or a later marker sets what its case sets.
    """
    callspec = getattr(item, "callspec", None)
    parameters = {} if callspec is None else callspec.params
    if CASE_OF_MATRIX in parameters:
        raise ValueError(_PARAMETRISED)
    case = parameters.get(PARAMETER)
    if isinstance(case, SchedulerCase):
        wrong = _wrong_beside(item)  # finds markers added after collection
        if wrong is not None:
            raise ValueError(wrong)
        return case
    unittest = sys.modules.get("unittest")
    cls = getattr(item, "cls", None)
    if unittest is not None and isinstance(cls, type) and issubclass(cls, unittest.TestCase):
        why = (
            "pytest does not parametrise methods of unittest.TestCase; write it as a function, or in a class of no base"
        )
    elif any(mark.name == SCHEDULER_MATRIX for mark in item.own_markers):
        why = "it takes no kv_engine or kv_harness as an argument, or the marker came after collection"
    elif _ENGINES.isdisjoint(getattr(item, "fixturenames", ())):
        return None
    else:
        why = "the marker came after collection"
    raise ValueError(f"this test has {SCHEDULER_MATRIX} and cannot be run over its cases: {why}")


def scheduler_case(item: pytest.Item) -> SchedulerCase | None:
    """Return the case of a test of the scheduler matrix; None if the test is not part of it.

    Raises:
        ValueError: it has the marker, and was not run over the matrix.
    """
    callspec = getattr(item, "callspec", None)
    has_marker = SCHEDULER_MATRIX in item.keywords and item.get_closest_marker(SCHEDULER_MATRIX) is not None
    if not has_marker and (callspec is None or CASE_OF_MATRIX not in callspec.params):
        return None
    return case_of(item)
