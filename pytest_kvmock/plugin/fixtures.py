"""The fixtures. One subject: what a test may ask for. None is autouse.

One private fixture, `_kvmock_case`, builds the harness of a test, without a backend; the public ones hand out its parts.
Those that need an engine depend on `kv_backend` as well, and give it to the harness when they are set up. So `kv_events`,
`kv_sink` and `kv_index` alone do not pull in the matrix, and all fixtures of a test share one harness.

No public fixture depends on another public one but `kv_backend`, `kv_dialect`, `kv_index`, `kv_router` and `kv_base_profile`: a test
has few fixtures to set up, which is most of what a test costs. The first and the last three are the ones to override.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.plugin.matrix import AXIS, Placeholder, placeholder
from pytest_kvmock.plugin.options import BACKENDS, DIALECTS, SYNTHETIC_REQUESTS, Axis
from pytest_kvmock.plugin.settings import SETTINGS, base_profile, trace_path

if TYPE_CHECKING:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.paged import PagedCacheManager
    from pytest_kvmock.clock.mock_engine import MockEngine
    from pytest_kvmock.drivers.driver import Traits
    from pytest_kvmock.engine.worker import KvWorker
    from pytest_kvmock.fleet.fleet import Fleet
    from pytest_kvmock.harness import KvSink, RouterHarness
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.hygiene.log import EventLog
    from pytest_kvmock.plugin.case import Case
    from pytest_kvmock.serve.kv_server import KvServer
    from pytest_kvmock.tokens import Prompt
    from pytest_kvmock.traces import TraceRequest
    from pytest_kvmock.wire.batcher import KvWire
    from pytest_kvmock.wire.zmq import KvPublisher


CASE: Final = pytest.StashKey["Case"]()
_RECOVERY: Final = pytest.StashKey["Recovery"]()
_BASE: Final = pytest.StashKey["EngineProfile"]()
_EXPLAINER: Final = "kvmock-nearest-fixtures"
_TRACES: Final = pytest.StashKey[dict[object, tuple["TraceRequest", ...]]]()


# ---------------------------------------------------------------------------------------------------- private


@pytest.fixture(scope="session")
def _kvmock_matrix() -> None:
    """Stand in the closure of every test that needs the `kv_backend` of this plugin (`matrix.py`)."""


@pytest.fixture(scope="session")
def _kvmock_dialects() -> None:
    """Stand likewise in the closure of every test that needs the `kv_dialect` of this plugin."""


@pytest.fixture
def _kvmock_case(request: pytest.FixtureRequest, kv_base_profile: EngineProfile, kv_index: Any) -> Case:
    """Build the harness of the test, without a backend, and show it to the hooks."""
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.plugin.case import Case, effective_profile, fail_in_one_line, harness_options, let_waive
    from pytest_kvmock.plugin.precedence import marker_values, resolve_policy

    item = request.node
    profile = effective_profile(item, kv_base_profile)
    markers = marker_values(item)
    settings = item.config.stash[SETTINGS]
    policy = resolve_policy(settings.command_line, markers, settings.ini)
    capture = None
    if settings.get("capture") is not None:
        from pytest_kvmock.plugin.captures import TestCapture

        capture = TestCapture(item, profile)
    try:
        harness = RouterHarness(
            profile,
            backend=None,
            index=kv_index,
            allow=policy.allow,
            recovery=item.stash.get(_RECOVERY, None),
            name=item.nodeid,
            journal=None if capture is None else capture.journal,
            **harness_options(item),
        )
    except (TypeError, ValueError) as error:
        if capture is not None:
            capture.close()
        fail_in_one_line(item, str(error))
    let_waive(item, harness)
    case = item.stash[CASE] = Case(item, harness, policy, request.getfixturevalue)
    if capture is not None:
        case.capture = capture.of(harness)
    return case


@pytest.fixture
def _kvmock_publishers(kv_dialect: str, kv_backend: str, _kvmock_case: Case) -> Iterator[Callable[..., KvPublisher]]:
    """Make publishers of the test's workers, and close them."""
    from pytest_kvmock.plugin.wires import publishers

    with publishers(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect) as make:
        yield make


# ---------------------------------------------------------------------------------------------------- to override


@pytest.fixture(scope="session")
def kv_backend(request: pytest.FixtureRequest, _kvmock_matrix: None) -> str:
    """Name of the eviction backend that the test runs on: the axis of the matrix.

    A test that needs it, directly or through another fixture, runs once for each backend. Narrow that with
    `@pytest.mark.kv_backends(...)`, `@pytest.mark.parametrize("kv_backend", ...)`, `--kv-backend`, or a fixture of
    this name that returns what you want.

    It has session scope, so that `@given` tests and fixtures of any scope can use it, and is parametrised for each
    test by itself, so that nothing is reordered.
    """
    name: str = _of_matrix(request, BACKENDS)
    return name


@pytest.fixture(scope="session")
def kv_dialect(request: pytest.FixtureRequest, _kvmock_dialects: None) -> str:
    """Name of the dialect of the wire that the test runs on: an axis as `kv_backend` is.

    It chooses the engine that speaks it, unless the test asks for `kv_backend` too. Narrow it with
    `@pytest.mark.kv_dialects(...)`, `@pytest.mark.parametrize("kv_dialect", ...)`, `--kv-dialect`, or a fixture of this
    name that returns what you want. One that calls this one needs pytest 9: older ones do not see what an override calls.
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
    `find_tiered(local_hashes)` or `match_tiered(tokens, extra)`, by which it tells tiers apart. By default it is None: then the reference index
    stands in.
    """
    return None


@pytest.fixture
def kv_router() -> Any:
    """The router under test, which `kv_fleet` puts before its engines. Override this fixture to plug in your own.

    A router has `pick(request, candidates)`, which returns the worker of one of these; what else it may have, see `Fleet`. By default
    it is None: then Dynamo's stands in, `DynamoRouter`, seeded by the test.
    """
    return None


@pytest.fixture
def kv_base_profile(pytestconfig: pytest.Config) -> EngineProfile:
    """The base `EngineProfile` of tests: that of the ini file. Override it for a module or a class.

    Markers, then the command line, are laid over it; `kv_profile` is the result.
    """
    stash = pytestconfig.stash
    base = stash.get(_BASE, None)
    if base is None:
        base = stash[_BASE] = base_profile(stash[SETTINGS])
    return base


# ---------------------------------------------------------------------------------------------------- to use


def checked(name: str, method: Any, more: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Wrap a method of the harness for a fixture: a misspelt argument is answered with the nearest ones."""
    code = method.__code__
    known = (*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount], *more)  # without self

    def call(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        for key in named:
            if key not in known:
                from pytest_kvmock.checks import unknown_text

                raise TypeError(f"{name}: {unknown_text('argument', key, known)}")
        return method(*args, **named)

    call.__name__ = call.__qualname__ = name  # as pytest prints it among the arguments of a test that failed
    return call


@pytest.fixture
def kv_profile(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> EngineProfile:
    """The effective `EngineProfile` of the test: base, markers and command line. A `kv_index` reads its block size."""
    from pytest_kvmock.plugin.case import effective_profile

    return effective_profile(request.node, kv_base_profile)


def _traits(request: pytest.FixtureRequest, base: EngineProfile) -> Traits:
    if AXIS in request.fixturenames:
        from pytest_kvmock.backends import backend_spec
        from pytest_kvmock.plugin.case import backend_name, effective_profile, traits_of

        name = backend_name(request.node, request.getfixturevalue(AXIS), ask=request.getfixturevalue)
        return traits_of(request.node, backend_spec(name), effective_profile(request.node, base))
    from pytest_kvmock.drivers.driver import Traits

    return Traits()  # a sink takes each block for published once, unless the test sets it otherwise


@pytest.fixture
def kv_traits(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Traits:
    """The traits of the test's backend at the test's sizes: a `kv_index` reads from them whether to count copies, and how large chunks below the device are.

    It does not bring in the matrix. In a test without a backend they are those of what `kv_sink` judges.
    """
    return _traits(request, kv_base_profile)


@pytest.fixture
def kv_harness(kv_backend: str, _kvmock_case: Case) -> RouterHarness:
    """The `RouterHarness`: workers, the index, and every event between them; events that are wrong fail the test."""
    return _kvmock_case.with_backend(kv_backend)


@pytest.fixture
def kv_worker(kv_backend: str, _kvmock_case: Case) -> KvWorker:
    """Worker 0 of the test's harness: a mock engine that serves prompts."""
    return _kvmock_case.with_backend(kv_backend).worker(0)


@pytest.fixture
def make_kv_worker(kv_backend: str, _kvmock_case: Case) -> Callable[..., KvWorker]:
    """Make more workers, `make_kv_worker(backend=None)`: each is the next one of the test's harness."""
    harness = _kvmock_case.with_backend(kv_backend)

    def make(backend: str | None = None) -> KvWorker:
        return harness.worker(None, backend=backend)

    return make


@pytest.fixture
def kv_manager(kv_backend: str, _kvmock_case: Case) -> KvManager:
    """The block manager of worker 0, on the test's backend; its events are checked."""
    return _kvmock_case.with_backend(kv_backend).worker(0).manager


@pytest.fixture
def make_kv_manager(make_kv_worker: Callable[..., KvWorker]) -> Callable[..., KvManager]:
    """Make more block managers, `make_kv_manager(backend=None)`: each is that of the next worker."""

    def make(backend: str | None = None) -> KvManager:
        return make_kv_worker(backend).manager

    return make


@pytest.fixture
def kv_engine(kv_backend: str, _kvmock_case: Case) -> MockEngine:
    """The engine of worker 0 in virtual time, a `MockEngine`: `submit`, `step`, `run`; `kvmock(engine={...})` says what it is."""
    harness = _kvmock_case.with_backend(kv_backend)
    try:
        return harness.engine(0)
    except ValueError as error:
        from pytest_kvmock.plugin.case import fail_in_one_line

        fail_in_one_line(_kvmock_case.item, f"kv_engine: {error}")


@pytest.fixture
def make_kv_engine(kv_backend: str, _kvmock_case: Case) -> Callable[..., MockEngine]:
    """Make more engines, `make_kv_engine(**engine)`: each is that of the next worker; the fields are over those of the markers."""
    harness = _kvmock_case.with_backend(kv_backend)

    def make(**engine: Any) -> MockEngine:
        return harness.engine(None, **engine)

    return make


@pytest.fixture
def kv_fleet(kv_backend: str, kv_router: Any, _kvmock_case: Case) -> Fleet:
    """The engines of the test's workers in virtual time behind `kv_router`, a `Fleet`: `kv_fleet.run(trace)`; events are judged."""
    try:
        return _fleets(kv_backend, kv_router, _kvmock_case)()
    except (TypeError, ValueError) as error:
        from pytest_kvmock.plugin.case import fail_in_one_line

        fail_in_one_line(_kvmock_case.item, f"kv_fleet: {error}")


def _fleets(backend: str, router: Any, case: Case) -> Callable[..., Fleet]:
    harness = case.with_backend(backend)

    def make(*, router: Any = router, **options: Any) -> Fleet:
        __tracebackhide__ = True
        return harness.fleet(router, **options)

    return make


@pytest.fixture
def make_kv_fleet(kv_backend: str, kv_router: Any, _kvmock_case: Case) -> Callable[..., Fleet]:
    """Make a fleet by `make_kv_fleet(workers=4, backends=None, engine={}, router=kv_router, concurrency=None, ...)`."""
    return _fleets(kv_backend, kv_router, _kvmock_case)


@pytest.fixture
def kv_paged_manager(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> PagedCacheManager:
    """A `PagedCacheManager`, inference_lab's, with the blocks of the test's profile, one byte a token; it has no events."""
    from pytest_kvmock.cache.paged import PagedCacheManager
    from pytest_kvmock.plugin.case import effective_profile

    profile = effective_profile(request.node, kv_base_profile)
    return PagedCacheManager(profile.num_blocks * profile.block_size, profile.block_size, 1, profile.prefix_caching)


@pytest.fixture
def kv_events(_kvmock_case: Case) -> EventLog:
    """The log of all events of the test, each with what was found wrong with it."""
    return _kvmock_case.harness.events


@pytest.fixture
def kv_sink(_kvmock_case: Case) -> KvSink:
    """A sink for a block manager of your own: it keeps each event, and has it checked."""
    return _kvmock_case.harness.make_sink()


@pytest.fixture
def make_kv_sink(_kvmock_case: Case) -> Callable[..., KvSink]:
    """Make more sinks, `make_kv_sink(chained=None, num_blocks=None, tier_blocks=None, residency="unique", prefix_closed=True, worker_id=None, hash=None, seed=None)`: each stands for a worker by itself."""
    return checked("make_kv_sink", _kvmock_case.harness.make_sink)


@pytest.fixture
def kv_wire(kv_dialect: str, kv_backend: str, _kvmock_case: Case) -> KvWire:
    """What worker 0 publishes as bytes in the test's dialect, without a socket: `kv_wire.payloads`, one a step."""
    from pytest_kvmock.plugin.wires import make_wire

    return make_wire(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect)


@pytest.fixture
def kv_publisher(_kvmock_publishers: Callable[..., KvPublisher]) -> KvPublisher:
    """The `KvPublisher` of worker 0: its events in the test's dialect over real ZMQ sockets, with replay."""
    return _kvmock_publishers()


@pytest.fixture
def make_kv_publisher(_kvmock_publishers: Callable[..., KvPublisher]) -> Callable[..., KvPublisher]:
    """Make publishers, `make_kv_publisher(worker=0, endpoint="tcp", topic="", ...)`: each is that of one worker, all ranks."""
    return _kvmock_publishers


@pytest.fixture
def make_kv_server(
    kv_dialect: str, kv_backend: str, _kvmock_case: Case, _kvmock_publishers: Callable[..., KvPublisher]
) -> Iterator[Callable[..., KvServer]]:
    """Make the test's server by `make_kv_server(adapters=(), time_scale=0.0, ports={"control": 0}, ...)`, as `KvServer` takes them; once a test."""
    from pytest_kvmock.plugin.wires import servers

    with servers(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect, _kvmock_publishers) as make:
        yield make


@pytest.fixture
def kv_server(
    kv_dialect: str, kv_backend: str, _kvmock_case: Case, _kvmock_publishers: Callable[..., KvPublisher]
) -> Iterator[KvServer]:
    """The workers of the test behind HTTP and ZMQ, a `KvServer`: `kv_server.url(0)`; its events are judged."""
    from pytest_kvmock.plugin.wires import servers

    with servers(_kvmock_case, _kvmock_case.with_backend(kv_backend), kv_dialect, _kvmock_publishers) as make:
        yield make()


@pytest.fixture
def kv_recovery(request: pytest.FixtureRequest) -> Iterator[Recovery]:
    """A callable by which a router asks a worker for events that it missed: `kv_recovery(worker_id, start, end, dp_rank)`.

    A `kv_index` may ask for it, so it stands before the harness; where the harness is there already, it joins it.
    """
    from pytest_kvmock.harness.recovery import Recovery

    item, recovery = request.node, Recovery()
    case = item.stash.get(CASE, None)
    if case is not None:
        try:
            case.harness.use_recovery(recovery)
        except ValueError as error:
            from pytest_kvmock.plugin.case import fail_in_one_line

            fail_in_one_line(item, f"kv_recovery: {error}; ask for it before what makes traffic")
    item.stash[_RECOVERY] = recovery
    yield recovery
    del item.stash[_RECOVERY]  # pytest-rerunfailures runs the same item again


@pytest.fixture
def kv_prompt(_kvmock_case: Case) -> Callable[..., Prompt]:
    """Make prompts of fresh tokens, `kv_prompt(blocks=4, after=other, tail=0)`: the second shares its prefix with `other`.

    With `lora_name`, `cache_salt`, `multimodal` and `session_id` as `Prompt` has them.
    """
    from pytest_kvmock.drivers.driver import PROMPT_KEYS

    return checked("kv_prompt", _kvmock_case.harness.prompt, PROMPT_KEYS)


@pytest.fixture
def kv_trace(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Sequence[TraceRequest]:
    """The requests of the trace that `--kv-trace` names, else of a synthetic one.

    `kvmock(trace_tokens=True)` gives them tokens, and they have tokens where the test's backend takes no hashes.
    """
    from dataclasses import replace

    from pytest_kvmock.plugin.case import effective_profile, fail_in_one_line
    from pytest_kvmock.plugin.precedence import marker_values, resolve_trace_tokens
    from pytest_kvmock.traces import read_mooncake, synthetic_trace

    config = request.config
    settings = config.stash[SETTINGS]
    path = trace_path(config, settings)
    limit = settings.get("trace_limit")
    seed = effective_profile(request.node, kv_base_profile).seed
    source = (path, limit) if path else (limit, seed)
    with_tokens = resolve_trace_tokens(settings.command_line, marker_values(request.node), settings.ini)
    if not with_tokens and AXIS in request.fixturenames:
        with_tokens = not _traits(request, kv_base_profile).takes_hashes
    traces = config.stash.setdefault(_TRACES, {})
    if (source, with_tokens) not in traces:
        try:
            read = read_mooncake(path, limit=limit) if path else synthetic_trace(limit or SYNTHETIC_REQUESTS, seed=seed)
            traces[source, with_tokens] = tuple(replace(each, with_tokens=with_tokens) for each in read)
        except (OSError, ValueError) as error:
            fail_in_one_line(request.node, f"kv_trace: {error}")
    return traces[source, with_tokens]


FIXTURE_PREFIXES: Final = ("kv_", "make_kv_")

FIXTURES: Final = tuple(name for name in globals() if name.startswith(FIXTURE_PREFIXES))
"""The names of the public fixtures that are here."""

OF_CONTRIB: Final = {
    "kv_block_manager": "block_managers",
    "kv_fabric": "block_managers",
    "kv_scheduler_case": "lab",
    "kv_scheduler_requests": "lab",
    "make_kv_block_manager": "block_managers",
}
"""The folders of `contrib` that fixtures come with, for who asks for one and has deleted its folder."""


def known_fixtures(config: pytest.Config) -> list[str]:
    """The names of the public fixtures in all modules of the plugin."""
    plugins = [plugin for name, plugin in config.pluginmanager.list_name_plugin() if name.startswith("pytest_kvmock.")]
    return [name for plugin in plugins for name in dir(plugin) if name.startswith(FIXTURE_PREFIXES)]


# ---------------------------------------------------------------------------------------------------- to misspell


class _Explainer:
    """A plugin that answers a misspelt fixture with the nearest ones; pytest's own error stays, and the nearest names follow it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Set a test up: this is when its fixtures are looked up."""
        __tracebackhide__ = True
        try:
            yield
        except pytest.FixtureLookupError as error:
            name = error.argname
            known = known_fixtures(item.config)
            if isinstance(name, str) and name.startswith(FIXTURE_PREFIXES) and name not in known:
                from pytest_kvmock.checks import did_you_mean

                folder = OF_CONTRIB.get(name)
                hint = did_you_mean(name, known) if folder is None else f": pytest_kvmock/contrib/{folder} is not here"
                if hint:
                    item.add_report_section("setup", "kvmock", f"fixture {name!r} not found{hint}")
            raise


def expect_lookup_errors(config: pytest.Config) -> None:
    """Explain, from now on, fixtures of this run that are not found."""
    if not config.pluginmanager.has_plugin(_EXPLAINER):
        config.pluginmanager.register(_Explainer(), _EXPLAINER)
