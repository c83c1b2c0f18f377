"""Suggestions for a misspelt fixture, or a misspelt argument of a `make_` fixture."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

import pytest

from pytest_kvmock.plugin.options import FIXTURE_PREFIXES
from pytest_kvmock.values.checks import did_you_mean, unknown_text

_EXPLAINER: Final = "kvmock-nearest-fixtures"

OF_CONTRIB: Final = {
    "kv_block_manager": "block_manager",
    "kv_fabric": "block_manager",
    "kv_scheduler_case": "lab",
    "kv_scheduler_requests": "lab",
    "make_kv_block_manager": "block_manager",
}
"""The folder of `contrib` that has each fixture, for a test that asks for one whose folder was deleted."""


def known_fixtures(config: pytest.Config) -> list[str]:
    """Return the names of the public fixtures in all modules of the plugin."""
    plugins = [plugin for name, plugin in config.pluginmanager.list_name_plugin() if name.startswith("pytest_kvmock.")]
    return [name for plugin in plugins for name in dir(plugin) if name.startswith(FIXTURE_PREFIXES)]


class _Explainer:
    """A plugin that answers a misspelt fixture with the nearest names, after pytest's own error."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Set a test up: pytest then looks up its fixtures."""
        __tracebackhide__ = True
        try:
            yield
        except pytest.FixtureLookupError as error:
            name = error.argname
            known = known_fixtures(item.config)
            if isinstance(name, str) and name.startswith(FIXTURE_PREFIXES) and name not in known:
                folder = OF_CONTRIB.get(name)
                hint = did_you_mean(name, known) if folder is None else f": pytest_kvmock/contrib/{folder} is not here"
                if hint:
                    item.add_report_section("setup", "kvmock", f"fixture {name!r} not found{hint}")
            raise


def expect_lookup_errors(config: pytest.Config) -> None:
    """Register the plugin that explains missing fixtures of this run."""
    if not config.pluginmanager.has_plugin(_EXPLAINER):
        config.pluginmanager.register(_Explainer(), _EXPLAINER)


def checked(name: str, method: Any, more: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Wrap a method of the harness for a fixture, with suggestions for a misspelt argument."""
    code = method.__code__
    known = (*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount], *more)  # without self

    def call(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        for key in named:
            if key not in known:
                raise TypeError(f"{name}: {unknown_text('argument', key, known)}")
        return method(*args, **named)

    call.__name__ = call.__qualname__ = name  # pytest prints it among the arguments of a failed test
    return call
