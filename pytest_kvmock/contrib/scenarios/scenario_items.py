"""Scenario files (`*.kv.yaml`) as tests, collected if the ini setting `kvmock_scenarios` matches.

Each scenario is one test for each backend of its matrix, with the same verdict as any other test (`verdict.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.contrib.scenarios import Scenario, ScenarioFailure, load_scenarios, play
from pytest_kvmock.harness import RouterHarness
from pytest_kvmock.plugin.case import Case, let_waive
from pytest_kvmock.plugin.fixtures import CASE
from pytest_kvmock.plugin.matrix import matrix_of
from pytest_kvmock.plugin.options import default_backends, known_backends
from pytest_kvmock.plugin.precedence import resolve_matrix, resolve_policy, resolve_profile
from pytest_kvmock.plugin.settings import SETTINGS, base_profile, profile_name
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.strict_yaml import Place, YamlError

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile

SUFFIX: Final = ".kv.yaml"


class ScenarioCollector:
    """The plugin that collects scenario files; registered if the setting is given.

    Args:
        globs: `fnmatch` patterns of paths relative to the root directory; `*` also matches slashes. A pattern without a
            slash matches the file's name.
    """

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = globs

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
        """Collect a scenario file that one of the globs matches."""
        if not file_path.name.endswith(SUFFIX):
            return None
        root = parent.config.rootpath
        path = file_path.relative_to(root).as_posix() if file_path.is_relative_to(root) else file_path.as_posix()
        for glob in self._globs:
            if fnmatchcase(path if "/" in glob else file_path.name, glob):
                return ScenarioFile.from_parent(parent, path=file_path)
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect cases that the command line removes from the matrix."""
        deselected = [item for item in items if isinstance(item, ScenarioItem) and not item.is_wanted]
        if deselected:
            items[:] = [item for item in items if item not in deselected]
            config.hook.pytest_deselected(items=deselected)


class ScenarioFile(pytest.File):
    """One scenario file."""

    def collect(self) -> Iterable[ScenarioItem]:
        """Make a test for each scenario and backend.

        Raises:
            pytest.Collector.CollectError: the file is invalid; the message is one line with file, line and column.
        """
        try:
            scenarios = load_scenarios(self.path, _shown(self.path, self.config))
        except YamlError as error:
            raise self.CollectError(str(error)) from None
        known = known_backends()
        for scenario in scenarios:
            for name in scenario.backends or ():
                if name not in known:
                    message = (
                        f"{scenario.backends_at or scenario.place}: backends: {unknown_text('backend', name, known)}"
                    )
                    raise self.CollectError(message)
            try:
                profile = _profile(scenario, self.config)
            except ValueError as error:
                raise self.CollectError(f"{scenario.place}: profile: {error}") from None
            if scenario.engine:
                from pytest_kvmock.harness.engines import engine_profile  # imported on first use

                try:
                    engine_profile(profile, scenario.engine)
                except ValueError as error:
                    raise self.CollectError(f"{scenario.engine_at}: engine: {error}") from None
            mark = None if scenario.backends is None else pytest.mark.kv_backends(*scenario.backends).mark
            settings = self.config.stash[SETTINGS]
            default = default_backends(settings.command_line.get("backends", ()))
            # Cases that the command line removes are made, too, so that pytest counts them as deselected.
            everything = resolve_matrix(known, default, {}, () if mark is None else (mark,), settings.ini)
            wanted = matrix_of(self.config, () if mark is None else (mark,))
            for name in everything:
                yield ScenarioItem.from_parent(
                    self,
                    name=f"{scenario.name}[{name}]",
                    scenario=scenario,
                    profile=profile,
                    backend=name,
                    is_wanted=name in wanted,
                )


class ScenarioItem(pytest.Item):
    """One scenario over one backend.

    Attributes:
        is_wanted: whether the command line keeps its backend in the matrix.
    """

    def __init__(
        self, *, scenario: Scenario, profile: EngineProfile, backend: str, is_wanted: bool, **others: Any
    ) -> None:
        super().__init__(**others)
        self.is_wanted = is_wanted
        self._scenario = scenario
        self._profile = profile
        self._backend = backend

    def runtest(self) -> None:
        """Play the scenario. The verdict on its events comes afterwards, as for other tests."""
        if self._scenario.needs_index:
            pytest.skip(
                "it needs the index under test: play(kv_harness, load_scenarios(path)[0]), in a test that has it"
            )
        settings = self.config.stash[SETTINGS]
        policy = resolve_policy(settings.command_line, ({"allow": self._scenario.allow},), settings.ini)
        capture = None
        if settings.get("capture") is not None:
            from pytest_kvmock.plugin.captures import TestCapture

            capture = TestCapture(self, self._profile)
        try:
            harness = RouterHarness(
                self._profile,
                backend=None,
                allow=policy.allow,
                name=self.nodeid,
                engine=self._scenario.engine,
                stores=self._scenario.stores or None,
                journal=None if capture is None else capture.journal,
            )
            if capture is not None:
                capture.of(harness)
            harness.inside.use_backend(self._backend)
        except ValueError as error:
            place = self._scenario.place
            if capture is not None:
                capture.close()
            raise ScenarioFailure(place, f"backend {self._backend}: {error}") from None
        let_waive(self, harness)
        case = self.stash[CASE] = Case(self, harness, policy)
        case.backend, case.capture = self._backend, capture
        play(harness, self._scenario, allow=policy.allow, errors_fail=policy.event_errors == "fail")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the lines of the file instead of our code; with --full-trace, show our code."""
        error = excinfo.value
        if isinstance(error, ScenarioFailure) and not self.config.getoption("fulltrace", False):
            first, _, rest = str(error).partition("\n")
            notes = getattr(error, "__notes__", [])
            return "\n".join([first, *_excerpt(self.path, error.place), *([rest] if rest else []), *notes])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return file, line (from 0) and name."""
        return self.path, self._scenario.place.line - 1, self.name


def _profile(scenario: Scenario, config: pytest.Config) -> EngineProfile:
    """Return the profile that a `kvmock` marker with the same keys would give.

    Raises:
        ValueError: the profile is unknown, or the fields together are out of range.
    """
    settings = config.stash[SETTINGS]
    keywords = dict(scenario.profile)
    if scenario.base is not None:
        keywords["profile"] = profile_name(scenario.base, settings.profiles)
    return resolve_profile(base_profile(settings), (keywords,), settings.command_line, settings.profiles)


def _shown(path: Path, config: pytest.Config) -> str:
    """Return a path for messages: relative to the invocation directory if it is below that."""
    home = config.invocation_params.dir
    return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _excerpt(path: Path, place: Place, around: int = 1) -> list[str]:
    """Return the lines of a file around a place, which is marked."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = max(0, place.line - 1 - around)
    return [
        f"{'>' if number == place.line else ' '} {number:>4}  {line}"
        for number, line in enumerate(lines[first : place.line + around], first + 1)
    ]
