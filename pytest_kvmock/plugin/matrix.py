"""The matrices: a test that needs a backend runs once for each, and a test that needs a wire dialect once for each
dialect.

A test that needs `kv_backend`, however indirectly, is parametrised over it, once for each backend of its matrix. The
value of the fixture is its parameter, so a user's parametrisation, override or marker works the same way as ours.

`kv_dialect` works the same way, with dialects. One engine speaks each dialect: a test that needs both and does not ask
for `kv_backend` itself runs once for each dialect, on the backend that speaks it.

The plugin detects that a test needs *our* fixture with pytest's public API only: ours depends on a private fixture,
such as `_kvmock_matrix`, which does nothing. A user's fixture that replaces `kv_backend` does not depend on it, and a
direct parametrisation cuts it off. It is then not in the test's closure, and the test is not parametrised.
"""

from __future__ import annotations

import inspect
import sys
from typing import Final

import pytest

from pytest_kvmock.plugin.options import AXES, BACKENDS, DIALECTS, Axis, all_named
from pytest_kvmock.plugin.settings import SETTINGS

CASE_FIXTURE: Final = "_kvmock_case"

AXIS: Final = BACKENDS.fixture
DIALECT_AXIS: Final = DIALECTS.fixture


class MatrixName(str):
    """A name from the matrix, a type that tells our parameters from the user's.

    Attributes:
        marks: the markers of its axis when the matrix was made.
    """

    __slots__ = ("marks",)

    marks: tuple[pytest.Mark, ...]


class Placeholder(str):
    """The value of `kv_backend` or `kv_dialect` in a test that is not parametrised: our fixtures read the markers
    instead.

    It is a string, so that code which takes it for a name gets an error that quotes it, with the advice in it.
    """

    __slots__ = ()


def placeholder(axis: Axis) -> Placeholder:
    """Return the value of an axis' fixture in a test that is not parametrised."""
    return Placeholder(
        f"<{axis.fixture} has no value here: this test is not parametrised; take a kv_ fixture or name the {axis.what} "
        "yourself>"
    )


def generate(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test over its matrices, if it needs one.

    Raises:
        pytest.Collector.CollectError: a marker is wrong, or the user's `pytest_generate_tests` parametrised it before.
    """
    from pytest_kvmock.plugin.markers import check_markers, wrong_markers

    definition = metafunc.definition
    try:
        check_markers(definition)
    except ValueError:
        raise pytest.Collector.CollectError(wrong_markers(definition)) from None
    if DIALECT_AXIS in metafunc.fixturenames:  # our fixture, a parametrisation, or the user's override
        spoken = not _asks_for_backend(metafunc)
        _parametrise(metafunc, DIALECTS)
        if spoken:
            return  # `backend_name` returns the backend that speaks it
    _parametrise(metafunc, BACKENDS)


def _parametrise(metafunc: pytest.Metafunc, axis: Axis) -> None:
    """Parametrise a test over one matrix, if it needs that."""
    definition = metafunc.definition
    if axis.detector not in metafunc.fixturenames or is_parametrised_by_mark(definition, axis.fixture):
        return
    marks = tuple(definition.iter_markers(axis.marker))
    values = matrix_of(metafunc.config, marks, axis) or (axis.nothing,)
    params = []
    for name in values:
        param = MatrixName(name)
        param.marks = marks
        params.append(param)
    try:
        # The fixture has session scope (see there), but each test has a separate parameter: tests are not reordered.
        metafunc.parametrize(axis.fixture, params, ids=values, indirect=True, scope="function")
    except (ValueError, pytest.Collector.CollectError) as error:  # 8.3 raises the former, 9.2 the latter
        if "duplicate" not in str(error):
            raise
        raise pytest.Collector.CollectError(
            f"{definition.nodeid}: {axis.fixture} is parametrised twice: by the {axis.what} matrix, and by a "
            f"pytest_generate_tests or a parametrised fixture of yours. Use @pytest.mark.{axis.marker}(...), "
            f'@pytest.mark.parametrize("{axis.fixture}", ...), or a fixture {axis.fixture} that does not call the '
            "original"
        ) from None


def _asks_for_backend(metafunc: pytest.Metafunc) -> bool:
    """Return whether a test asks for `kv_backend` itself: by an argument, a marker, or a parametrisation."""
    definition = metafunc.definition
    if definition.get_closest_marker(BACKENDS.marker) is not None or is_parametrised_by_mark(definition, AXIS):
        return True
    if any(AXIS in mark.args for mark in definition.iter_markers("usefixtures")):
        return True
    return AXIS in inspect.signature(metafunc.function).parameters


def is_parametrised_by_mark(definition: pytest.Item, name: str) -> bool:
    """Return whether a `parametrize` marker of a test gives values to this argument."""
    for mark in definition.iter_markers("parametrize"):
        argnames = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if isinstance(argnames, str):
            argnames = [each.strip() for each in argnames.split(",")]
        if name in argnames:
            return True
    return False


def matrix_of(config: pytest.Config, marks: tuple[pytest.Mark, ...], axis: Axis = BACKENDS) -> tuple[str, ...]:
    """Return the matrix of a test with these markers of an axis, closest first."""
    from pytest_kvmock.plugin.precedence import resolve_matrix  # imported on first use

    settings = config.stash[SETTINGS]
    key = f"{axis.what}s"
    default = axis.default(settings.command_line.get(key, ()))
    return resolve_matrix(axis.known(), default, settings.command_line, marks, settings.ini, key=key)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests whose matrix is empty, and tests that a marker added after generation excludes.

    `pytest.param(marks=...)` and `item.add_marker(...)` add such markers. They are not merged with the others: they can
    only remove tests.
    """
    kept, deselected = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = () if callspec is None else callspec.params
        if params and any(_is_excluded(item, params[axis.fixture], axis) for axis in AXES if axis.fixture in params):
            deselected.append(item)
        else:
            kept.append(item)
    if deselected:
        items[:] = kept
        config.hook.pytest_deselected(items=deselected)


def _is_excluded(item: pytest.Item, value: object, axis: Axis) -> bool:
    if type(value) is not MatrixName:
        return False
    return value == axis.nothing or _excluded_later(item, value, axis)


def _excluded_later(item: pytest.Item, name: MatrixName, axis: Axis) -> bool:
    from pytest_kvmock.plugin.markers import wrong_names

    for mark in item.iter_markers(axis.marker):
        if any(mark is seen for seen in name.marks):
            continue
        if any(wrong_names(mark)):
            continue  # reported at set-up: an error here would end the session, and confuse pytest-xdist
        wanted, unwanted = (all_named(each, axis.what) for each in (mark.args, mark.kwargs.get("exclude", ())))
        if (wanted and name not in wanted) or name in unwanted:
            return True
    return False


def resolve_placeholder(item: pytest.Item, axis: Axis = BACKENDS) -> str:
    """Return the backend or dialect of a test that is not parametrised over it: the only one of its matrix.

    TestCase methods and doctests are never parametrised; other tests are not if they ask only by `getfixturevalue`.
    """
    matrix = matrix_of(item.config, tuple(item.iter_markers(axis.marker)), axis)
    if len(matrix) == 1:
        return matrix[0]
    if not matrix:
        pytest.skip(f"kvmock: no {axis.what} is left of this test's matrix")
    unittest = sys.modules.get("unittest")
    cls = getattr(item, "cls", None)
    is_test_case = unittest is not None and isinstance(cls, type) and issubclass(cls, unittest.TestCase)
    why = (
        "pytest does not parametrise methods of unittest.TestCase"
        if is_test_case
        else f'its fixtures are asked for by name only; @pytest.mark.usefixtures("{axis.fixture}") runs the whole '
        "matrix"
    )
    pytest.fail(
        f"kvmock: the {axis.what} of this test is open ({', '.join(matrix)}): {why}; "
        f'@pytest.mark.{axis.marker}("{matrix[0]}") names one',
        pytrace=False,
    )
