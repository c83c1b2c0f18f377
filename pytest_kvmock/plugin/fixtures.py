"""The fixtures. None is autouse.

One private fixture, `_kvmock_case`, builds the harness of a test, without a backend; the public ones hand out its
parts. Those that need an engine depend on `kv_backend` as well, and give it to the harness when they are set up. So
`kv_events`, `kv_sink` and `kv_index` alone do not pull in the matrix, and all fixtures of a test share one harness.

No public fixture depends on another public one but `kv_backend`, `kv_index` and `kv_base_profile`: a test has few
fixtures to set up, which is most of what a test costs, and these three are the ones to override.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from pytest_kvmock.plugin.matrix import AXIS, PLACEHOLDER, Placeholder, resolve_placeholder
from pytest_kvmock.plugin.options import (
    SETTINGS,
    SYNTHETIC_REQUESTS,
    base_profile,
    known_backends,
    trace_path,
)
from pytest_kvmock.plugin.precedence import Policy, marker_values, resolve_policy, resolve_profile

if TYPE_CHECKING:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.paged import KVCacheManager
    from pytest_kvmock.engine.driver import Traits
    from pytest_kvmock.engine.worker import KvWorker
    from pytest_kvmock.harness import KvSink, RouterHarness
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.hygiene.log import EventLog
    from pytest_kvmock.hygiene.problem import Problem
    from pytest_kvmock.tokens import Prompt
    from pytest_kvmock.traces import TraceRequest


class Case:
    """One test: its harness, and what broken rules do to it.

    Kept in the item's stash from set-up to the end of teardown, where the hooks find it (`verdict.py`).

    Attributes:
        item: the test.
        harness: its world.
        policy: what broken rules do.
        backend: the backend, once a fixture needed one.
        passed: the call phase ended without a failure.
        failed_before: failures of the session when it ended.
        errors: event errors that counted so far.
        warnings: event warnings so far, by rule, but for those of `engine_warnings`.
        engine_warnings: those of what a faithful engine does by itself, by rule.
    """

    __slots__ = (
        "backend",
        "engine_warnings",
        "errors",
        "failed_before",
        "harness",
        "item",
        "passed",
        "policy",
        "warnings",
    )

    def __init__(self, item: pytest.Item, harness: RouterHarness, policy: Policy) -> None:
        self.item = item
        self.harness = harness
        self.policy = policy
        harness.events.warnings_fail = policy.event_warnings == "fail"
        self.backend: str | None = None
        self.passed = False
        self.failed_before = 0
        self.errors = 0
        self.warnings: dict[str, int] = {}
        self.engine_warnings: dict[str, int] = {}

    def count(self, errors: Sequence[Problem], warnings: Sequence[Problem]) -> None:
        """Count what was found since the last look."""
        self.errors += len(errors)
        for warning in warnings:
            counts = self.engine_warnings if self.harness.is_engines_own(warning) else self.warnings
            counts[warning.rule] = counts.get(warning.rule, 0) + 1

    def with_backend(self, value: object) -> RouterHarness:
        """Return the harness, with engines of this backend."""
        if self.backend is None:
            name = _backend_name(self.item, value)
            try:
                self.harness.use_backend(name)  # it makes sure, too, that its managers are what this name says
            except ValueError as error:
                why = str(error)
                # What begins so is about the backend; the rest is its own refusal, nearly always of a block size.
                if not why.startswith("backend ") and re.search("block.size", why):
                    why += f" ({_block_size_place(self.item)})"
                _fail_in_one_line(self.item, f"backend {name}: {why}")
            self.backend = name
        return self.harness


def _backend_name(item: pytest.Item, value: object) -> str:
    """The backend that `kv_backend` names in a test."""
    name = resolve_placeholder(item) if isinstance(value, Placeholder) else value
    known = known_backends()
    if not isinstance(name, str) or name not in known:
        from pytest_kvmock.checks import did_you_mean

        hint = did_you_mean(name, known, f"known: {', '.join(known)}")
        pytest.fail(f"kvmock: kv_backend is {name!r}{hint}", pytrace=False)
    return name


def _block_size_place(item: pytest.Item) -> str:
    """Where the block size of a test comes from: the one field that a backend may refuse."""
    from pytest_kvmock.plugin.markers import show_mark

    for key in ("block_size", "profile"):  # a single field is laid over a profile, wherever it stands
        for mark in item.iter_markers("kvmock"):
            if mark.kwargs.get(key) is not None:
                return show_mark(mark)
    return "block_size is from kv_base_profile, or ini kvmock_block_size"


CASE: Final = pytest.StashKey[Case]()
_HARNESS_KEYS: Final = ("sync", "index_semantics", "faults", "survive")
"""Keys of the `kvmock` marker that are arguments of `RouterHarness`; the innermost marker that has one wins."""

_RECOVERY: Final = pytest.StashKey["Recovery"]()
_BASE: Final = pytest.StashKey["EngineProfile"]()
_TRACES: Final = pytest.StashKey[dict[object, tuple["TraceRequest", ...]]]()


def _fail_in_one_line(item: pytest.Item, message: str) -> NoReturn:
    """Fail with one line; with --full-trace, let the error that is being handled say where it came from."""
    if not item.config.getoption("fulltrace", False):
        raise pytest.fail.Exception(f"kvmock: {message}", pytrace=False) from None
    raise  # noqa: PLE0704 - called where an error is handled


# ---------------------------------------------------------------------------------------------------- private


@pytest.fixture(scope="session")
def _kvmock_matrix() -> None:
    """Stand in the closure of every test that needs the `kv_backend` of this plugin (`matrix.py`)."""


@pytest.fixture
def _kvmock_case(request: pytest.FixtureRequest, kv_base_profile: EngineProfile, kv_index: Any) -> Case:
    """Build the harness of the test, without a backend, and show it to the hooks."""
    from pytest_kvmock.harness import RouterHarness

    item = request.node
    profile = _effective_profile(item, kv_base_profile)
    markers = marker_values(item)
    settings = item.config.stash[SETTINGS]
    policy = resolve_policy(settings.command_line, markers, settings.ini)
    said: dict[str, Any] = {key: values[key] for values in markers for key in _HARNESS_KEYS if key in values}
    try:
        harness = RouterHarness(
            profile,
            backend=None,
            index=kv_index,
            allow=policy.allow,
            recovery=item.stash.get(_RECOVERY, None),
            name=item.nodeid,
            **said,
        )
    except (TypeError, ValueError) as error:
        _fail_in_one_line(item, str(error))
    let_waive(item, harness)
    case = item.stash[CASE] = Case(item, harness, policy)
    return case


def let_waive(item: pytest.Item, harness: RouterHarness) -> None:
    """Let the hook `pytest_kvmock_event_error` waive problems of a test, where anybody implements it."""
    if item.config.hook.pytest_kvmock_event_error.get_hookimpls():  # what is of this item only is asked for below
        harness.events.waive = partial(_waives, item)


def _waives(item: pytest.Item, problem: Problem) -> bool:
    """Ask the hooks whether this problem may pass; those of the conftests that are about the test."""
    __tracebackhide__ = True
    try:
        answer = item.ihook.pytest_kvmock_event_error(item=item, problem=problem)
    except pytest.exit.Exception:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said in one line
        from pytest_kvmock.plugin.registry import raised_in

        hooks = item.ihook.pytest_kvmock_event_error.get_hookimpls()
        _fail_in_one_line(item, raised_in(item.config, "pytest_kvmock_event_error", hooks, error))
    if answer is not None and not isinstance(answer, bool):
        pytest.fail(
            f"kvmock: pytest_kvmock_event_error returned {answer!r:.80}; allowed: True, False or None", pytrace=False
        )
    return answer is True


def _effective_profile(item: pytest.Item, base: EngineProfile) -> EngineProfile:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.plugin.markers import check_markers

    if not isinstance(base, EngineProfile):
        pytest.fail(f"kvmock: kv_base_profile must return an EngineProfile, got {base!r}", pytrace=False)
    try:
        check_markers(item)  # collection checked them, but for TestCase methods and for markers that came later
        settings = item.config.stash[SETTINGS]
        return resolve_profile(base, marker_values(item), settings.command_line, settings.profiles)
    except ValueError as error:
        _fail_in_one_line(item, str(error))


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
    value = getattr(request, "param", PLACEHOLDER)
    return value if isinstance(value, Placeholder) else _plain(value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


@pytest.fixture
def kv_index() -> Any:
    """The router index under test. Override this fixture to plug in your own.

    An index has `apply(event)` and one of `find_matches(local_hashes)` and `match_tokens(tokens)`. By default it is
    None: then the reference index stands in.
    """
    return None


@pytest.fixture
def kv_base_profile(pytestconfig: pytest.Config) -> EngineProfile:
    """The base `EngineProfile` of tests: what the ini file says. Override it for a module or a class.

    Markers, then the command line, are laid over it; `kv_profile` is the result.
    """
    stash = pytestconfig.stash
    base = stash.get(_BASE, None)
    if base is None:
        base = stash[_BASE] = base_profile(stash[SETTINGS])
    return base


# ---------------------------------------------------------------------------------------------------- to use


def _checked(name: str, method: Any) -> Callable[..., Any]:
    """A method of the harness as a fixture hands it out: a misspelt argument is answered with the nearest ones."""
    code = method.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]  # without self

    def call(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        for key in named:
            if key not in known:
                from pytest_kvmock.checks import unknown_text

                raise TypeError(f"{name}: {unknown_text('argument', key, known)}")
        return method(*args, **named)

    return call


@pytest.fixture
def kv_profile(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> EngineProfile:
    """The effective `EngineProfile` of the test: base, markers and command line. A `kv_index` reads its block size."""
    return _effective_profile(request.node, kv_base_profile)


@pytest.fixture
def kv_traits(request: pytest.FixtureRequest) -> Traits:
    """Where the engine of the test's backend differs from others: what a `kv_index` reads whether to count copies from.

    It does not bring in the matrix. In a test without a backend they are those of what `kv_sink` judges.
    """
    if AXIS in request.fixturenames:
        from pytest_kvmock.backends import backend_spec

        return backend_spec(_backend_name(request.node, request.getfixturevalue(AXIS))).traits
    from pytest_kvmock.engine.driver import Traits

    return Traits()  # a sink takes each block for published once, unless the test says otherwise


@pytest.fixture
def kv_router(kv_backend: str, _kvmock_case: Case) -> RouterHarness:
    """The `RouterHarness`: workers, the index, and every event between them; events that are wrong fail the test."""
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
    """Make more block managers, `make_kv_manager(backend=None)`: each is that of the next worker."""
    harness = _kvmock_case.with_backend(kv_backend)

    def make(backend: str | None = None) -> KvManager:
        return harness.next_worker(backend).manager

    return make


@pytest.fixture
def kv_cache_manager(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> KVCacheManager:
    """inference_lab's `KVCacheManager`, with the blocks of the test's profile, one byte a token; it has no events."""
    from pytest_kvmock.cache.paged import KVCacheManager

    profile = _effective_profile(request.node, kv_base_profile)
    return KVCacheManager(profile.num_blocks * profile.block_size, profile.block_size, 1, profile.prefix_caching)


@pytest.fixture
def kv_events(_kvmock_case: Case) -> EventLog:
    """The log of all events of the test, each with what was found wrong with it."""
    return _kvmock_case.harness.events


@pytest.fixture
def kv_sink(_kvmock_case: Case) -> KvSink:
    """Where a block manager of your own publishes: it keeps each event, and has it checked."""
    return _kvmock_case.harness.make_sink()


@pytest.fixture
def make_kv_sink(_kvmock_case: Case) -> Callable[..., KvSink]:
    """Make more sinks, `make_kv_sink(chained=None, num_blocks=None)`: each stands for a worker by itself."""
    return _checked("make_kv_sink", _kvmock_case.harness.make_sink)


@pytest.fixture
def kv_recovery(request: pytest.FixtureRequest) -> Iterator[Recovery]:
    """What a router calls to ask a worker for events that it missed: `kv_recovery(worker_id, start=None)`.

    A `kv_index` may ask for it, so it stands before the harness; where the harness is there already, it joins it.
    """
    from pytest_kvmock.harness.recovery import Recovery

    item, recovery = request.node, Recovery()
    case = item.stash.get(CASE, None)
    if case is not None:
        try:
            case.harness.use_recovery(recovery)
        except ValueError as error:
            _fail_in_one_line(item, f"kv_recovery: {error}; ask for it before what makes traffic")
    item.stash[_RECOVERY] = recovery
    yield recovery
    del item.stash[_RECOVERY]  # pytest-rerunfailures runs the same item again


@pytest.fixture
def kv_prompt(_kvmock_case: Case) -> Callable[..., Prompt]:
    """Make prompts of fresh tokens, `kv_prompt(blocks=4, after=other)`: the second shares its prefix with `other`."""
    return _checked("kv_prompt", _kvmock_case.harness.prompt)


@pytest.fixture
def kv_trace(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Sequence[TraceRequest]:
    """The requests of the trace that `--kv-trace` names, else of a synthetic one."""
    from pytest_kvmock.traces import read_mooncake, synthetic_trace

    config = request.config
    settings = config.stash[SETTINGS]
    path = trace_path(config, settings)
    limit = settings.get("trace_limit")
    seed = _effective_profile(request.node, kv_base_profile).seed
    key = (path, limit) if path else (limit, seed)
    traces = config.stash.setdefault(_TRACES, {})
    if key not in traces:
        try:
            traces[key] = tuple(
                read_mooncake(path, limit=limit) if path else synthetic_trace(limit or SYNTHETIC_REQUESTS, seed=seed)
            )
        except (OSError, ValueError) as error:
            _fail_in_one_line(request.node, f"kv_trace: {error}")
    return traces[key]


FIXTURE_PREFIXES: Final = ("kv_", "make_kv_")

FIXTURES: Final = tuple(name for name in globals() if name.startswith(FIXTURE_PREFIXES))
"""The names of the public fixtures."""
