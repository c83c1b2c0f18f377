"""The hooks that a plugin or conftest may implement.

Mark an implementation with `@pytest.hookimpl(optionalhook=True)`: `pytest -p no:kvmock` then still runs.
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
    """Return your own backends by name. Tests run over them in addition to the built-in ones.

    The hook is called once, before collection, in plugins and in the initial conftests: those of the root, of
    `testpaths` and of the paths on the command line. In another conftest it is an error. A name stands for one backend:
    it is also an error if two plugins return the same name.

    Args:
        config: the config of the run.
    """


@pytest.hookspec
def pytest_kvmock_dialects(config: pytest.Config) -> Mapping[str, Dialect]:  # type: ignore[empty-body]  # only declared
    """Return your own dialects by name. They are known wherever a dialect is named.

    The hook is called like `pytest_kvmock_backends`.

    Args:
        config: the config of the run.
    """


@pytest.hookspec(firstresult=True)
def pytest_kvmock_event_error(item: pytest.Item, problem: Problem) -> bool | None:
    """Return whether a broken rule may pass: True waives this problem; False does not, and no further plugin is called.

    The hook is called once for each error or warning that would fail the test or be reported as a warning, if the test
    does not expect it or allow its rule. A waiver also covers the problems that follow from this one; all stay in the
    log, marked as waived.

    Args:
        item: the test.
        problem: the rule, the worker, the event, and the state before it.
    """


@pytest.hookspec(firstresult=True)
def pytest_kvmock_defaults(item: pytest.Item) -> Mapping[str, Any] | None:
    """Return defaults for keys of the `kvmock` marker, including `engine`, that the markers of a test do not set.

    Sizes override `kv_base_profile`. `judge_unpublished=True` also checks the events that engines without prefix
    caching would publish.

    Args:
        item: the test.

    Raises:
        ValueError: the test cannot run; it fails with this line.
    """


@pytest.hookspec
def pytest_kvmock_reproduction(item: pytest.Item, reproduction: Reproduction) -> str | None:
    """Receive the smallest reproduction of a failure; return a line for its section of the report, or None.

    The hook is called once for each failure that is reduced. If a plugin implements it, failures of a few requests are
    reduced, too.

    Args:
        item: the test.
        reproduction: its steps, `as_test()`, and the broken rule.
    """
