"""The values of the fleets' fixtures: fleets behind the router of the test, and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.fleets.traces.mooncake import TraceRequest, read_mooncake
from pytest_kvmock.fleets.traces.synthetic import fitting_trace
from pytest_kvmock.plugin.case import fail_in_one_line, quarter_in_tokens
from pytest_kvmock.plugin.of_engines import engines_of
from pytest_kvmock.plugin.options import SYNTHETIC_REQUESTS
from pytest_kvmock.plugin.precedence import marker_values, resolve_trace_tokens
from pytest_kvmock.plugin.settings import SETTINGS, trace_path

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.plugin.case import Case

_TRACES: Final = pytest.StashKey[dict[object, tuple[TraceRequest, ...]]]()


def fleets_of(case: Case, backend: str, router: Any) -> Callable[..., Fleet]:
    """Return a function that makes fleets of the test's harness."""
    harness = case.with_backend(backend)

    def make(*, router: Any = router, **options: Any) -> Fleet:
        __tracebackhide__ = True
        return harness.fleet(router, **options)

    return make


def fleet_of(case: Case, backend: str, router: Any) -> Fleet:
    """Return the fleet of the test's workers; fail the test with one line if it cannot be made."""
    try:
        return fleets_of(case, backend, router)()
    except (TypeError, ValueError) as error:
        fail_in_one_line(case.item, f"kv_fleet: {error}")


def trace_of(request: pytest.FixtureRequest, base: EngineProfile) -> Sequence[TraceRequest]:
    """Return the requests of the run's trace, or of a synthetic trace that fits the test's engines; each is made
    once.
    """
    config = request.config
    settings = config.stash[SETTINGS]
    path = trace_path(config, settings)
    limit = settings.get("trace_limit")
    profile, traits = engines_of(request, base)
    with_tokens = resolve_trace_tokens(settings.command_line, marker_values(request.node), settings.ini)
    with_tokens = with_tokens or not traits.takes_hashes
    size, most = profile.block_size, quarter_in_tokens(profile, traits)
    source = (path, limit) if path else (limit, profile.seed, size, most)
    traces = config.stash.setdefault(_TRACES, {})
    if (source, with_tokens) not in traces:
        try:
            read = (
                read_mooncake(path, limit=limit)
                if path
                else fitting_trace(limit or SYNTHETIC_REQUESTS, most, seed=profile.seed, block_size=size)
            )
            traces[source, with_tokens] = tuple(replace(each, with_tokens=with_tokens) for each in read)
        except (OSError, ValueError) as error:
            fail_in_one_line(request.node, f"kv_trace: {error}")
    return traces[source, with_tokens]
