"""The matrix: tests that need a backend run once for each.

A test that needs `kv_backend`, however indirectly, is parametrised over it, once for each backend of its matrix. The
value of the fixture is its parameter, so a user's own parametrisation, override or marker is the same thing as ours.

How a test is known to need *our* `kv_backend`, with pytest's public API only: ours depends on a private fixture,
`_kvmock_matrix`, which does nothing. A fixture of the user's that takes the place of `kv_backend` does not depend on
it, and a direct parametrisation cuts it off; then it is not in the test's closure, and the test is left alone.
"""

from __future__ import annotations

import sys
from typing import Final

import pytest

from pytest_kvmock.plugin.options import default_backends, known_backends, names
from pytest_kvmock.plugin.settings import SETTINGS

DETECTOR: Final = "_kvmock_matrix"
CASE_FIXTURE: Final = "_kvmock_case"
AXIS: Final = "kv_backend"
CASE_OF_MATRIX: Final = "kv_scheduler_case"
NO_BACKEND: Final = "no-backend"
"""Id of a test whose matrix is empty, which no one sees: it is deselected."""


class MatrixName(str):
    """A backend's name as the matrix hands it out, so that a parameter of ours is not taken for one of the user's.

    Attributes:
        marks: the `kv_backends` markers that were there when the matrix was made.
    """

    __slots__ = ("marks",)

    marks: tuple[pytest.Mark, ...]


class Placeholder(str):
    """The value of `kv_backend` where nothing was parametrised: our own fixtures ask the markers instead.

    A string, so that whoever takes it for a name gets an error that quotes it, and so reads what to do.
    """

    __slots__ = ()


PLACEHOLDER: Final = Placeholder(
    "<kv_backend has no value here: this test is not parametrised; take a kv_ fixture, or name the backend yourself>"
)


def generate(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test over its matrix, if it needs one.

    Raises:
        pytest.Collector.CollectError: a marker is wrong, or the user's `pytest_generate_tests` was here before.
    """
    from pytest_kvmock.plugin.markers import check_markers, wrong_markers

    definition = metafunc.definition
    try:
        check_markers(definition)
    except ValueError:
        raise pytest.Collector.CollectError(wrong_markers(definition)) from None
    if DETECTOR not in metafunc.fixturenames or is_parametrised_by_mark(definition, AXIS):
        return
    marks = tuple(definition.iter_markers("kv_backends"))
    values = matrix_of(metafunc.config, marks) or (NO_BACKEND,)
    params = []
    for name in values:
        param = MatrixName(name)
        param.marks = marks
        params.append(param)
    try:
        # The fixture has session scope (see there), but a parameter of each test's own: nothing is reordered.
        metafunc.parametrize(AXIS, params, ids=values, indirect=True, scope="function")
    except (ValueError, pytest.Collector.CollectError) as error:  # 8.3 raises the former, 9.2 the latter
        if "duplicate" not in str(error):
            raise
        raise pytest.Collector.CollectError(
            f"{definition.nodeid}: kv_backend is parametrised twice: by the backend matrix, and by a "
            "pytest_generate_tests or a parametrised fixture of yours. Use @pytest.mark.kv_backends(...), "
            '@pytest.mark.parametrize("kv_backend", ...), or a fixture kv_backend that does not call the original'
        ) from None


def is_parametrised_by_mark(definition: pytest.Item, name: str) -> bool:
    """Return whether a `parametrize` marker of a test gives values to this argument."""
    for mark in definition.iter_markers("parametrize"):
        argnames = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if isinstance(argnames, str):
            argnames = [each.strip() for each in argnames.split(",")]
        if name in argnames:
            return True
    return False


def matrix_of(config: pytest.Config, marks: tuple[pytest.Mark, ...]) -> tuple[str, ...]:
    """The matrix of a test with these `kv_backends` markers, closest first."""
    from pytest_kvmock.plugin.precedence import resolve_matrix  # for those who use backends

    settings = config.stash[SETTINGS]
    return resolve_matrix(known_backends(), default_backends(), settings.command_line, marks, settings.ini)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests whose matrix is empty, and those that a marker excludes which came after generation.

    `pytest.param(marks=...)` and `item.add_marker(...)` come so late. Such a marker is not merged with the
    others: it can only take tests away.
    """
    kept, deselected = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        value = None if callspec is None else callspec.params.get(AXIS)
        if type(value) is MatrixName and (value == NO_BACKEND or _excluded_later(item, value)):
            deselected.append(item)
        else:
            kept.append(item)
    if deselected:
        items[:] = kept
        config.hook.pytest_deselected(items=deselected)


def _excluded_later(item: pytest.Item, backend: MatrixName) -> bool:
    from pytest_kvmock.plugin.markers import wrong_in_kv_backends

    for mark in item.iter_markers("kv_backends"):
        if any(mark is seen for seen in backend.marks):
            continue
        if any(wrong_in_kv_backends(mark)):
            continue  # reported when the test is set up: an error here would end the session, and confuse pytest-xdist
        if (mark.args and backend not in mark.args) or backend in names(mark.kwargs.get("exclude", ())):
            return True
    return False


def resolve_placeholder(item: pytest.Item) -> str:
    """The backend of a test that is not parametrised: the only one of its matrix.

    TestCase methods and doctests never are; other tests are not where they ask by `getfixturevalue` only.
    """
    matrix = matrix_of(item.config, tuple(item.iter_markers("kv_backends")))
    if len(matrix) == 1:
        return matrix[0]
    if not matrix:
        pytest.skip("kvmock: no backend is left of this test's matrix")
    unittest = sys.modules.get("unittest")
    cls = getattr(item, "cls", None)
    is_test_case = unittest is not None and isinstance(cls, type) and issubclass(cls, unittest.TestCase)
    why = (
        "pytest does not parametrise methods of unittest.TestCase"
        if is_test_case
        else 'its fixtures are asked for by name only; @pytest.mark.usefixtures("kv_backend") runs the whole matrix'
    )
    pytest.fail(
        f"kvmock: the backend of this test is open ({', '.join(matrix)}): {why}; "
        f'@pytest.mark.kv_backends("{matrix[0]}") names one',
        pytrace=False,
    )
