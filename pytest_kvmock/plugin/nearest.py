"""A misspelt fixture is answered with the nearest ones. Loaded where a test asks for a name that may be one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import pytest

from pytest_kvmock.checks import did_you_mean
from pytest_kvmock.plugin.fixtures import FIXTURE_PREFIXES, FIXTURES

NAME: Final = "kvmock-nearest-fixtures"


def expect_lookup_errors(config: pytest.Config) -> None:
    """From here on, explain fixtures of this run that are not found."""
    if not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(_Explainer(), NAME)


class _Explainer:
    """A plugin; pytest's own error stays, and the nearest names follow it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Set a test up: this is when its fixtures are looked up."""
        __tracebackhide__ = True
        try:
            yield
        except pytest.FixtureLookupError as error:
            name = error.argname
            if isinstance(name, str) and name.startswith(FIXTURE_PREFIXES) and name not in FIXTURES:
                hint = did_you_mean(name, FIXTURES)
                if hint:
                    item.add_report_section("setup", "kvmock", f"fixture {name!r} not found{hint}")
            raise
