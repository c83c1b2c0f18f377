"""The scheduler matrix in pytest: a marker, two fixtures, and the settings that they give to a test."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.contrib.lab import CASE_OF_MATRIX, SCHEDULER_MATRIX
from pytest_kvmock.plugin.fixtures import CASE

if TYPE_CHECKING:
    from pytest_kvmock.contrib.lab.scheduler_cases import SchedulerCase, SchedulerRequest
    from pytest_kvmock.engines.backends import EngineProfile

MARKER: Final = (
    f"{SCHEDULER_MATRIX}: run the test over the eight cases of Dynamo's scheduler matrix, on each of its backends; "
    "it takes kv_engine or kv_harness, and may take kv_scheduler_case and kv_scheduler_requests."
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(wrapper=True, trylast=True)  # after all parametrisation except over backends
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Run a test with the marker over the cases."""
    yield
    if SCHEDULER_MATRIX in metafunc.definition.keywords or CASE_OF_MATRIX in metafunc.fixturenames:
        from pytest_kvmock.contrib.lab.scheduler_matrix import generate_cases

        generate_cases(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a test that has the marker but was not parametrised, if no fixture of ours has checked this.

    Methods of `unittest.TestCase` are not parametrised, and markers may be added after collection.
    """
    if SCHEDULER_MATRIX in item.keywords and isinstance(item, pytest.Function) and item.stash.get(CASE, None) is None:
        from pytest_kvmock.contrib.lab.scheduler_matrix import scheduler_case
        from pytest_kvmock.plugin.case import fail_in_one_line

        try:
            scheduler_case(item)
        except ValueError as error:
            fail_in_one_line(item, str(error))


def pytest_kvmock_defaults(item: pytest.Item) -> Mapping[str, Any] | None:
    """Return the sizes of the test's case."""
    callspec = getattr(item, "callspec", None)
    if SCHEDULER_MATRIX not in item.keywords and (callspec is None or CASE_OF_MATRIX not in callspec.params):
        return None
    from pytest_kvmock.contrib.lab.scheduler_matrix import scheduler_case

    case = scheduler_case(item)
    return None if case is None else {**case.sizes, "engine": case.engine, "judge_unpublished": True}


@pytest.fixture
def _kvmock_scheduler_case(request: pytest.FixtureRequest) -> SchedulerCase | None:
    """Return the test's case of the scheduler matrix."""
    from pytest_kvmock.contrib.lab.scheduler_matrix import scheduler_case
    from pytest_kvmock.plugin.case import fail_in_one_line

    try:
        return scheduler_case(request.node)
    except ValueError as error:
        fail_in_one_line(request.node, str(error))


@pytest.fixture
def kv_scheduler_case(request: pytest.FixtureRequest, _kvmock_scheduler_case: SchedulerCase | None) -> SchedulerCase:
    """The test's case of `@pytest.mark.kv_scheduler_matrix`: `shared`, `caching`, `chunked`."""
    return _case_or_fail(request, _kvmock_scheduler_case)


@pytest.fixture
def kv_scheduler_requests(
    request: pytest.FixtureRequest, kv_base_profile: EngineProfile, _kvmock_scheduler_case: SchedulerCase | None
) -> Sequence[SchedulerRequest]:
    """The 200 requests of the case: `kv_engine.submit(*request)`."""
    from pytest_kvmock.contrib.lab.scheduler_cases import make_scheduler_requests
    from pytest_kvmock.plugin.case import effective_profile

    case = _case_or_fail(request, _kvmock_scheduler_case)
    seed = effective_profile(request.node, kv_base_profile).seed
    return make_scheduler_requests(case, Random(f"{seed}:{request.node.nodeid}:{request.fixturename}"))  # noqa: S311 - mock data


def _case_or_fail(request: pytest.FixtureRequest, case: SchedulerCase | None) -> SchedulerCase:
    if case is None:
        pytest.fail(f"kvmock: {request.fixturename} is for tests with @pytest.mark.kv_scheduler_matrix", pytrace=False)
    return case
