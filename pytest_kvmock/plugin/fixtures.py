"""The fixtures that a test may use. None is autouse.

Other modules make their values, and are loaded with the first test that asks: `case` for the harness, `of_engines`,
`of_fleets`, and `wires` for bytes, sockets and servers.

A private fixture, `_kvmock_case`, builds the harness of a test, without a backend; the public fixtures return its
parts. Those that need an engine also depend on `kv_backend`, and give it to the harness when they are set up.
`kv_events`, `kv_sink` and `kv_index` by themselves therefore do not bring in the matrix, and all fixtures of a test
share one harness.

Public fixtures depend on no other public fixtures except `kv_backend`, `kv_dialect`, `kv_index`, `kv_router` and
`kv_base_profile`: a test then sets up few fixtures, which are most of its cost. The first and the last three are the
ones to override.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.plugin.matrix import Placeholder, placeholder
from pytest_kvmock.plugin.options import BACKENDS, DIALECTS, FIXTURE_PREFIXES, Axis
from pytest_kvmock.plugin.settings import SETTINGS, base_profile

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.base.driver import Traits
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.paged import PagedCacheManager
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest
    from pytest_kvmock.harness import KvSink, RouterHarness
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.oracle.hygiene.log import EventLog
    from pytest_kvmock.plugin.case import Case
    from pytest_kvmock.servers.serve.kv_server import KvServer
    from pytest_kvmock.values.tokens import Prompt
    from pytest_kvmock.wire.codec.batcher import KvWire
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher


CASE: Final = pytest.StashKey["Case"]()
_BASE: Final = pytest.StashKey["EngineProfile"]()


# ---------------------------------------------------------------------------------------------------- private


@pytest.fixture(scope="session")
def _kvmock_matrix() -> None:
    """Mark, by being in its closure, every test that needs the `kv_backend` of this plugin (`matrix.py`)."""


@pytest.fixture(scope="session")
def _kvmock_dialects() -> None:
    """Mark, by being in its closure, every test that needs the `kv_dialect` of this plugin."""


@pytest.fixture
def _kvmock_case(request: pytest.FixtureRequest, kv_base_profile: EngineProfile, kv_index: Any) -> Case:
    """Build the harness of the test, without a backend, and show it to the hooks."""
    from pytest_kvmock.plugin.case import make_case

    case = request.node.stash[CASE] = make_case(request, kv_base_profile, kv_index)
    return case


@pytest.fixture
def _kvmock_publishers(kv_dialect: str, kv_backend: str, _kvmock_case: Case) -> Iterator[Callable[..., KvPublisher]]:
    """Make publishers of the test's workers, and close them."""
    from pytest_kvmock.plugin.wires import publishers

    with publishers(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect) as make:
        yield make


@pytest.fixture
def _kvmock_servers(
    kv_dialect: str, kv_backend: str, _kvmock_case: Case, _kvmock_publishers: Callable[..., KvPublisher]
) -> Iterator[Callable[..., KvServer]]:
    """Make the server of the test, as `ProcessContract` does, and close it."""
    from pytest_kvmock.plugin.wires import servers

    with servers(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect, _kvmock_publishers) as make:
        yield make


# ---------------------------------------------------------------------------------------------------- to override


@pytest.fixture(scope="session")
def kv_backend(request: pytest.FixtureRequest, _kvmock_matrix: None) -> str:
    """Name of the eviction backend that the test runs on: the axis of the matrix.

    A test that needs this fixture, directly or through another one, runs once for each backend. Narrow that with
    `@pytest.mark.kv_backends(...)`, `@pytest.mark.parametrize("kv_backend", ...)`, `--kv-backend`, or a fixture of this
    name that returns your choice.

    It has session scope, so that `@given` tests and fixtures of any scope can use it. It is parametrised for each test
    separately, so that tests are not reordered.
    """
    name: str = _of_matrix(request, BACKENDS)
    return name


@pytest.fixture(scope="session")
def kv_dialect(request: pytest.FixtureRequest, _kvmock_dialects: None) -> str:
    """Name of the wire dialect that the test runs on: an axis like `kv_backend`.

    The dialect chooses the engine that speaks it, unless the test also asks for `kv_backend`. Narrow it with
    `@pytest.mark.kv_dialects(...)`, `@pytest.mark.parametrize("kv_dialect", ...)`, `--kv-dialect`, or a fixture of this
    name that returns your choice. An override that calls this fixture needs pytest 9: older versions do not see which
    fixtures an override calls.
    """
    name: str = _of_matrix(request, DIALECTS)
    return name


def _of_matrix(request: pytest.FixtureRequest, axis: Axis) -> Any:
    value = getattr(request, "param", None)
    if value is None:
        return placeholder(axis)
    return str(value) if isinstance(value, str) and not isinstance(value, Placeholder) else value


@pytest.fixture
def kv_index() -> Any:
    """The router index under test. Override this fixture to plug in your own.

    An index has `apply(event)` and one of `find_matches(local_hashes)`, `match_tokens(tokens)`, and
    `find_tiered(local_hashes)` or `match_tiered(tokens, extra)`, which answer tier by tier. The default is None: the
    reference index is used.
    """
    return None


@pytest.fixture
def kv_router() -> Any:
    """The router under test, which `kv_fleet` puts in front of its engines. Override this fixture to plug in your own.

    A router has `pick(request, candidates)`, which returns the worker of one candidate; `Fleet` documents its optional
    methods. The default is None: Dynamo's router is used, `DynamoRouter`, seeded by the test.
    """
    return None


@pytest.fixture
def kv_base_profile(pytestconfig: pytest.Config) -> EngineProfile:
    """The base `EngineProfile` of tests, by default the ini file's. Override it for a module or a class.

    Markers override it, and the command line overrides these; `kv_profile` is the result.
    """
    stash = pytestconfig.stash
    base = stash.get(_BASE, None)
    if base is None:
        base = stash[_BASE] = base_profile(stash[SETTINGS])
    return base


# ---------------------------------------------------------------------------------------------------- to use


@pytest.fixture
def kv_profile(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> EngineProfile:
    """The effective `EngineProfile` of the test: base, markers and command line. A `kv_index` can read the block size
    from it.
    """
    from pytest_kvmock.plugin.case import effective_profile

    return effective_profile(request.node, kv_base_profile)


@pytest.fixture
def kv_traits(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Traits:
    """The traits of the test's backend at the test's sizes: a `kv_index` can read from them whether to count copies,
    and how large chunks below the device are.

    This fixture does not bring in the matrix. In a test without a backend the traits describe the streams that
    `kv_sink` checks.
    """
    from pytest_kvmock.plugin.of_engines import engines_of

    return engines_of(request, kv_base_profile)[1]


@pytest.fixture
def kv_harness(kv_backend: str, _kvmock_case: Case) -> RouterHarness:
    """The `RouterHarness`: workers, the index, and every event between them; wrong events fail the test."""
    return _kvmock_case.with_backend(kv_backend)


@pytest.fixture
def kv_worker(kv_backend: str, _kvmock_case: Case) -> KvWorker:
    """Worker 0 of the test's harness: a mock engine that serves prompts."""
    return _kvmock_case.with_backend(kv_backend).worker(0)


@pytest.fixture
def kv_manager(kv_backend: str, _kvmock_case: Case) -> KvManager:
    """The block manager of worker 0, on the test's backend; its events are checked."""
    return _kvmock_case.with_backend(kv_backend).worker(0).manager


@pytest.fixture
def make_kv_manager(kv_backend: str, _kvmock_case: Case) -> Callable[..., KvManager]:
    """Make more block managers, `make_kv_manager(backend=None)`, each for the next worker."""
    from pytest_kvmock.plugin.of_engines import managers_of

    return managers_of(_kvmock_case.with_backend(kv_backend))


@pytest.fixture
def kv_engine(kv_backend: str, _kvmock_case: Case) -> MockEngine:
    """The engine of worker 0 in virtual time, a `MockEngine`: `submit`, `step`, `run`; `kvmock(engine={...})`
    configures it.
    """
    from pytest_kvmock.plugin.of_engines import engine_of

    return engine_of(_kvmock_case, kv_backend)


@pytest.fixture
def kv_fleet(kv_backend: str, kv_router: Any, _kvmock_case: Case) -> Fleet:
    """The engines of the test's workers in virtual time behind `kv_router`, a `Fleet`: `kv_fleet.run(trace)`; events
    are checked.
    """
    from pytest_kvmock.plugin.of_fleets import fleet_of

    return fleet_of(_kvmock_case, kv_backend, kv_router)


@pytest.fixture
def make_kv_fleet(kv_backend: str, kv_router: Any, _kvmock_case: Case) -> Callable[..., Fleet]:
    """Make a fleet by `make_kv_fleet(workers=4, backends=None, engine={}, router=kv_router, concurrency=None, ...)`."""
    from pytest_kvmock.plugin.of_fleets import fleets_of

    return fleets_of(_kvmock_case, kv_backend, kv_router)


@pytest.fixture
def kv_paged_manager(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> PagedCacheManager:
    """inference_lab's `PagedCacheManager` with the blocks of the test's profile, one byte per token; it publishes no
    events.
    """
    from pytest_kvmock.plugin.of_engines import paged_manager

    return paged_manager(request, kv_base_profile)


@pytest.fixture
def kv_events(_kvmock_case: Case) -> EventLog:
    """The log of all events of the test, each with its problems."""
    return _kvmock_case.harness.events


@pytest.fixture
def kv_sink(_kvmock_case: Case) -> KvSink:
    """A sink for your own block manager: it keeps and checks each event."""
    return _kvmock_case.harness.make_sink()


@pytest.fixture
def make_kv_sink(_kvmock_case: Case) -> Callable[..., KvSink]:
    """Make more sinks, `make_kv_sink(chained=None, num_blocks=None, tier_blocks=None, residency="unique",
    prefix_closed=True, worker_id=None, hash=None, seed=None, restores=False)`: each stands for a separate worker.
    """
    from pytest_kvmock.plugin.misspelt import checked

    return checked("make_kv_sink", _kvmock_case.harness.make_sink)


@pytest.fixture
def kv_wire(kv_dialect: str, kv_backend: str, _kvmock_case: Case) -> KvWire:
    """The bytes that worker 0 publishes in the test's dialect, without a socket: `kv_wire.payloads`, one per step."""
    from pytest_kvmock.plugin.wires import make_wire

    return make_wire(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect)


@pytest.fixture
def kv_publisher(_kvmock_publishers: Callable[..., KvPublisher]) -> KvPublisher:
    """The `KvPublisher` of worker 0: its events in the test's dialect over real ZMQ sockets, with replay."""
    return _kvmock_publishers()


@pytest.fixture
def make_kv_publisher(_kvmock_publishers: Callable[..., KvPublisher]) -> Callable[..., KvPublisher]:
    """Make publishers, `make_kv_publisher(worker=0, endpoint="tcp", topic="", ...)`: each publishes one worker, all
    ranks.
    """
    return _kvmock_publishers


@pytest.fixture
def kv_server(_kvmock_servers: Callable[..., KvServer]) -> KvServer:
    """The workers of the test behind HTTP and ZMQ, a `KvServer`: `kv_server.url(0)`; its events are checked."""
    return _kvmock_servers()


@pytest.fixture
def kv_recovery(request: pytest.FixtureRequest) -> Iterator[Recovery]:
    """A callable by which a router asks a worker for missed events: `kv_recovery(worker_id, start, end, dp_rank)`.

    A `kv_index` may depend on it, so it does not need the harness; it joins a harness that already exists.
    """
    from pytest_kvmock.plugin.case import recovery_of

    with recovery_of(request.node, request.node.stash.get(CASE, None)) as recovery:
        yield recovery


@pytest.fixture
def kv_prompt(_kvmock_case: Case) -> Callable[..., Prompt]:
    """Make prompts of fresh tokens, `kv_prompt(blocks=4, after=other, tail=0)`: the second shares its prefix with
    `other`.

    Also takes `lora_name`, `cache_salt`, `multimodal` and `session_id`, as in `Prompt`.
    """
    from pytest_kvmock.engines.base.driver import PROMPT_KEYS
    from pytest_kvmock.plugin.misspelt import checked

    return checked("kv_prompt", _kvmock_case.harness.prompt, PROMPT_KEYS)


@pytest.fixture
def kv_trace(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Sequence[TraceRequest]:
    """The requests of the trace that `--kv-trace` names; by default, of a synthetic trace that fits the engines.

    Hash ids of the synthetic trace stand for blocks of the engines' block size, and no prompt takes more than a quarter
    of their blocks. Requests have tokens with `kvmock(trace_tokens=True)`, or if the test's backend takes no hashes.
    """
    from pytest_kvmock.plugin.of_fleets import trace_of

    return trace_of(request, kv_base_profile)


FIXTURES: Final = tuple(name for name in globals() if name.startswith(FIXTURE_PREFIXES))
"""The names of the public fixtures in this module."""
