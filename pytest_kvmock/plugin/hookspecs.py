"""The hooks that others may implement, in a plugin or in a conftest.

Mark an implementation with `@pytest.hookimpl(optionalhook=True)`, and `pytest -p no:kvmock` still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.harness.reduce.program import Reproduction
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.values.dialect import Dialect


@pytest.hookspec
def pytest_kvmock_backends(config: pytest.Config) -> Mapping[str, BackendSpec]:  # type: ignore[empty-body]  # only declared
    """Return backends of your own by name. Tests run over them in addition to the built-in ones.

    It is read once, before collection: from plugins and from the initial conftests, which are those of the root, of
    `testpaths` and of the paths on the command line. In another conftest it is an error. A name stands for one backend:
    two plugins that return the same one are an error too.

    Args:
        config: of the run.
    """


@pytest.hookspec
def pytest_kvmock_dialects(config: pytest.Config) -> Mapping[str, Dialect]:  # type: ignore[empty-body]  # only declared
    """Return dialects of your own by name. They are known wherever a dialect is asked for.

    It is read as `pytest_kvmock_backends` is.

    Args:
        config: of the run.
    """


@pytest.hookspec(firstresult=True)
def pytest_kvmock_event_error(item: pytest.Item, problem: Problem) -> bool | None:
    """Say whether a broken rule may pass: True waives this one problem; False does not, and no further plugin is asked.

    It is asked once for each problem that would fail the test or be warned of, warnings included, if the test does not
    expect it or allow its rule. What is waived covers what follows from it, and stays in the log, marked as waived.

    Args:
        item: the test.
        problem: the rule, the worker, the event, what was known.
    """


@pytest.hookspec(firstresult=True)
def pytest_kvmock_defaults(item: pytest.Item) -> Mapping[str, Any] | None:
    """Return what a test has where its `kvmock` markers say nothing: keys of that marker, `engine` among them.

    Sizes are laid over `kv_base_profile`. `judge_unpublished=True` judges what engines without prefix caching would
    publish, too.

    Args:
        item: the test.

    Raises:
        ValueError: the test cannot run; it fails with this line.
    """


@pytest.hookspec
def pytest_kvmock_reproduction(item: pytest.Item, reproduction: Reproduction) -> str | None:
    """Take the smallest reproduction of a failure, and return a line for its section of the report, if there is one to
    add.

    It is called once for each failure that is reduced. Where a plugin has it, failures of a few requests are reduced,
    too.

    Args:
        item: the test.
        reproduction: its steps, `as_test()`, what broke.
    """
