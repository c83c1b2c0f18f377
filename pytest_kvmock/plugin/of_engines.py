"""The values of the engines' fixtures: traits, managers, an engine in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.driver import Traits
from pytest_kvmock.plugin.case import backend_name, effective_profile, fail_in_one_line, traits_of
from pytest_kvmock.plugin.matrix import AXIS

if TYPE_CHECKING:
    import pytest

    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.paged import PagedCacheManager
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.plugin.case import Case


def engines_of(request: pytest.FixtureRequest, base: EngineProfile) -> tuple[EngineProfile, Traits]:
    """Return the test's profile at its backend's block size, and its engines' traits; without a backend, those of a
    sink.

    This does not bring in the matrix: a `kv_index` may ask for `kv_traits` in a test without one.
    """
    profile = effective_profile(request.node, base)
    if AXIS in request.fixturenames:
        from pytest_kvmock.engines.backends import backend_spec

        spec = backend_spec(backend_name(request.node, request.getfixturevalue(AXIS), ask=request.getfixturevalue))
        return profile.sized_for(spec), traits_of(request.node, spec, profile)
    return profile, Traits()  # a sink expects each block to be published once, unless the test sets it otherwise


def managers_of(harness: RouterHarness) -> Callable[..., KvManager]:
    """Return a function that makes managers, each for the next worker."""

    def make(backend: str | None = None) -> KvManager:
        return harness.worker(None, backend=backend).manager

    return make


def engine_of(case: Case, backend: str) -> MockEngine:
    """Return the engine of worker 0; fail the test with one line if it cannot be made."""
    harness = case.with_backend(backend)
    try:
        return harness.engine(0)
    except ValueError as error:
        fail_in_one_line(case.item, f"kv_engine: {error}")


def paged_manager(request: pytest.FixtureRequest, base: EngineProfile) -> PagedCacheManager:
    """Return a `PagedCacheManager` of the test's profile, one byte per token."""
    from pytest_kvmock.engines.base.paged import PagedCacheManager

    profile = effective_profile(request.node, base)
    return PagedCacheManager(profile.num_blocks * profile.block_size, profile.block_size, 1, profile.prefix_caching)
