"""The state of one test: its harness, its policy, and the problems counted so far.

This module is loaded with the first test that uses a fixture of this plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from pytest_kvmock.plugin.matrix import Placeholder, resolve_placeholder
from pytest_kvmock.plugin.options import BACKENDS, DIALECTS, PROFILE_KEYS, Axis, unknown_name
from pytest_kvmock.plugin.precedence import Policy, marker_values, resolve_engine, resolve_policy, resolve_profile
from pytest_kvmock.plugin.settings import SETTINGS

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
    from pytest_kvmock.engines.base.driver import Traits
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.recovery import Recovery
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.plugin.captures import TestCapture

_RECOVERY: Final = pytest.StashKey["Recovery"]()

_HARNESS_KEYS: Final = ("sync", "clears", "faults", "survive", "roles", "stores")
"""Keys of the `kvmock` marker that are passed to `RouterHarness` unchanged; the innermost marker that has a key
wins."""


class Case:
    """One test: its harness, and the effect of broken rules.

    Kept in the item's stash from set-up to the end of teardown, where the hooks find it (`verdict.py`).

    Args:
        item: the test.
        harness: its harness.
        policy: the effect of broken rules.
        ask: returns the value of a fixture of the test, by its name.

    Attributes:
        item: the test.
        harness: its harness.
        policy: the effect of broken rules.
        backend: the backend, once a fixture needed one.
        capture: records the events; None if no option or fixture asked for it.
        passed: whether the call phase ended without a failure.
        failed_before: failures of the session when the call phase ended.
        errors: event errors that counted so far.
        warnings: event warnings so far, by rule, except `engine_warnings`.
        engine_warnings: event warnings that a faithful engine causes, by rule.
        taken_for_device: the number from the last `Verdict`.
    """

    __slots__ = (
        "_ask",
        "backend",
        "capture",
        "engine_warnings",
        "errors",
        "failed_before",
        "harness",
        "item",
        "passed",
        "policy",
        "taken_for_device",
        "warnings",
    )

    def __init__(
        self, item: pytest.Item, harness: RouterHarness, policy: Policy, ask: Callable[[str], Any] | None = None
    ) -> None:
        self.item = item
        self._ask = ask
        self.harness = harness
        self.policy = policy
        self.taken_for_device = 0
        harness.events.warnings_fail = policy.event_warnings == "fail"
        self.backend: str | None = None
        self.capture: TestCapture | None = None
        self.passed = False
        self.failed_before = 0
        self.errors = 0
        self.warnings: dict[str, int] = {}
        self.engine_warnings: dict[str, int] = {}

    def count(self, errors: Sequence[Problem], warnings: Sequence[Problem]) -> None:
        """Count the problems found since the last call."""
        self.errors += len(errors)
        for warning in warnings:
            counts = self.engine_warnings if self.harness.inside.is_engines_own(warning) else self.warnings
            counts[warning.rule] = counts.get(warning.rule, 0) + 1

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the test's capture when the context ends."""
        try:
            yield
        finally:
            if self.capture is not None:
                self.capture.close()

    def with_backend(self, value: object) -> RouterHarness:
        """Return the harness, with engines of this backend."""
        if self.backend is None:
            name = backend_name(self.item, value, ask=self._ask)
            try:
                # This also checks that its managers have this name.
                speaker = _speaker(self.item, self._ask) if isinstance(value, Placeholder) else None
                self.harness.inside.use_backend(name if speaker is None else speaker)
            except ValueError as error:
                why = str(error)
                # Messages with this start are about the backend's name; others are refusals by the backend, nearly
                # always of a block size.
                if not why.startswith("backend ") and re.search("block.size", why):
                    why += f" ({_place(self.item, 'block_size')})"
                if "takes no tiers" in why:
                    why += f" ({_place(self.item, 'tiers')})"
                fail_in_one_line(self.item, f"backend {name}: {why}")
            self.backend = name
        return self.harness


def backend_name(
    item: pytest.Item, value: object, axis: Axis = BACKENDS, ask: Callable[[str], Any] | None = None
) -> str:
    """Return the backend that `kv_backend` names in a test; with the axis of dialects, the dialect that `kv_dialect`
    names.

    Args:
        item: the test.
        value: what the fixture returned.
        axis: backends or dialects.
        ask: `getfixturevalue` of a request of the test: the user may have overridden `kv_dialect`.
    """
    name: object = value
    if isinstance(value, Placeholder):
        speaker = _speaker(item, ask) if axis is BACKENDS else None
        name = resolve_placeholder(item, axis) if speaker is None else speaker.name
    known = axis.known()
    if not isinstance(name, str) or name not in known:
        from pytest_kvmock.values.checks import did_you_mean

        if axis is DIALECTS and isinstance(name, str):
            pytest.fail(f"kvmock: {axis.fixture}: {unknown_name(axis.what, name, known)}", pytrace=False)
        hint = did_you_mean(name, known, f"known: {', '.join(known)}")
        pytest.fail(f"kvmock: {axis.fixture} is {name!r}{hint}", pytrace=False)
    return name


def traits_of(item: pytest.Item, spec: BackendSpec, profile: EngineProfile) -> Traits:
    """Return the traits of a test's backend at the sizes of its profile."""
    try:
        return profile.traits(spec)
    except ValueError as error:
        fail_in_one_line(item, f"backend {spec.name}: {error} ({_place(item, 'block_size')})")


def quarter_in_tokens(profile: EngineProfile, traits: Traits) -> int:
    """Return the tokens of the longest prompt that fits into a quarter of an engine's blocks, at least 1.

    In a hybrid model each cache group takes blocks for a prompt.
    """
    taken = sum(profile.block_size // group.block_size for group in traits.groups) or 1
    return max(1, profile.num_blocks * profile.block_size // (4 * taken))


def _speaker(item: pytest.Item, ask: Callable[[str], Any] | None) -> BackendSpec | None:
    """Return the backend that speaks the dialect of a test, in its release; None if the test has no dialect, or asks
    for backends by a marker.
    """
    fixture = DIALECTS.fixture
    if ask is None or fixture not in getattr(item, "fixturenames", ()):
        return None
    if item.get_closest_marker(BACKENDS.marker) is not None:
        return None
    from pytest_kvmock.engines.backends import speaker_of  # imported on first use
    from pytest_kvmock.wire.codec.table import find_dialect

    dialect = find_dialect(backend_name(item, ask(fixture), DIALECTS))
    try:
        return speaker_of(dialect)
    except ValueError as error:
        version = "" if dialect.version is None else f", version {dialect.version!r}"
        why = f"{dialect.name!r} is spoken by backend {dialect.backend!r}{version}: {error}"
        pytest.fail(f"kvmock: {fixture} {why}", pytrace=False)


def defaults_of(item: pytest.Item) -> Mapping[str, Any]:
    """Return the defaults of a test that plugins set by `pytest_kvmock_defaults`; its markers take precedence.

    Raises:
        ValueError: a plugin refuses to run the test.
    """
    return item.ihook.pytest_kvmock_defaults(item=item) or {}


def harness_options(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a test's `RouterHarness` that its markers set."""
    markers = marker_values(item)
    options = {key: values[key] for values in markers for key in _HARNESS_KEYS if key in values}
    engine = resolve_engine(markers)
    defaults = defaults_of(item)
    engine = {**defaults.get("engine", {}), **engine}
    options = {**{key: defaults[key] for key in (*_HARNESS_KEYS, "judge_unpublished") if key in defaults}, **options}
    if engine:
        options["engine"] = engine
    return options


def _place(item: pytest.Item, field: str) -> str:
    """Return the source of a field of a test's profile that a backend may refuse."""
    from pytest_kvmock.plugin.markers import show_mark

    for key in (field, "profile"):  # a single field overrides a profile, wherever it is set
        for mark in item.iter_markers("kvmock"):
            if mark.kwargs.get(key) is not None or key in mark.kwargs.get("engine", ()):
                return show_mark(mark)
    return f"{field} is from kv_base_profile, or ini kvmock_{'profile' if field == 'tiers' else field}"


def fail_in_one_line(item: pytest.Item, message: str) -> NoReturn:
    """Fail with one line; with --full-trace, raise the handled error to show its origin."""
    if not item.config.getoption("fulltrace", False):
        raise pytest.fail.Exception(f"kvmock: {message}", pytrace=False) from None
    raise  # noqa: PLE0704 - called where an error is handled


def let_waive(item: pytest.Item, harness: RouterHarness) -> None:
    """Let the hook `pytest_kvmock_event_error` waive problems of a test, if a plugin implements it."""
    if item.config.hook.pytest_kvmock_event_error.get_hookimpls():  # `_waives` calls only those of this item
        harness.events.waive = partial(_waives, item)


def _waives(item: pytest.Item, problem: Problem) -> bool:
    """Return whether a hook waives this problem; only hooks of conftests that apply to the test are called."""
    __tracebackhide__ = True
    try:
        answer = item.ihook.pytest_kvmock_event_error(item=item, problem=problem)
    except pytest.exit.Exception:
        raise
    except Exception as error:  # noqa: BLE001 - any error is reported in one line
        from pytest_kvmock.plugin.registry import raised_in

        hooks = item.ihook.pytest_kvmock_event_error.get_hookimpls()
        fail_in_one_line(item, raised_in(item.config, "pytest_kvmock_event_error", hooks, error))
    if answer is not None and not isinstance(answer, bool):
        pytest.fail(
            f"kvmock: pytest_kvmock_event_error returned {answer!r:.80}; allowed: True, False or None", pytrace=False
        )
    return answer is True


def _backend_of_matrix(item: pytest.Item) -> BackendSpec | None:
    """Return the backend that a test is parametrised with; None if it is not known before its fixtures are set up."""
    from pytest_kvmock.engines.backends import known_backends

    callspec = getattr(item, "callspec", None)
    name = None if callspec is None else callspec.params.get(BACKENDS.fixture)
    return known_backends().get(name) if isinstance(name, str) else None


def effective_profile(item: pytest.Item, base: EngineProfile) -> EngineProfile:
    """Return the profile of a test: the base, overridden by its markers, and these by the command line."""
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.plugin.markers import check_markers

    if not isinstance(base, EngineProfile):
        pytest.fail(f"kvmock: kv_base_profile must return an EngineProfile, got {base!r}", pytrace=False)
    try:
        check_markers(item)  # collection checked them, except TestCase methods and markers added later
        settings = item.config.stash[SETTINGS]
        sizes = {key: value for key, value in defaults_of(item).items() if key in PROFILE_KEYS}
        profile = resolve_profile(base, marker_values(item), settings.command_line, settings.profiles, sizes)
        backend = _backend_of_matrix(item)
        return profile if backend is None else profile.sized_for(backend)
    except ValueError as error:
        fail_in_one_line(item, str(error))


# ---------------------------------------------------------------------------------------------------- for fixtures


def make_case(request: pytest.FixtureRequest, base: EngineProfile, index: Any) -> Case:
    """Build the harness of a test, without a backend."""
    from pytest_kvmock.harness import RouterHarness

    item = request.node
    profile = effective_profile(item, base)
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
            index=index,
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
    case = Case(item, harness, policy, request.getfixturevalue)
    if capture is not None:
        case.capture = capture.of(harness)
    return case


@contextmanager
def recovery_of(item: pytest.Item, case: Case | None) -> Iterator[Recovery]:
    """Yield the store of the events of a test's workers; join it to the harness if that already exists."""
    from pytest_kvmock.harness.recovery import Recovery

    recovery = Recovery()
    if case is not None:
        try:
            case.harness.inside.use_recovery(recovery)
        except ValueError as error:
            fail_in_one_line(item, f"kv_recovery: {error}; ask for it before the fixtures that make traffic")
    item.stash[_RECOVERY] = recovery
    yield recovery
    del item.stash[_RECOVERY]  # pytest-rerunfailures runs the same item again
