"""Modules with hooks, for the command: `python -m pytest_kvmock vectors -p MODULE`.

The results of `pytest_kvmock_dialects` and `pytest_kvmock_backends` of such a module are checked and registered as in a
run of pytest: a team's own dialect has vectors, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pluggy
import pytest

from pytest_kvmock.plugin import hookspecs
from pytest_kvmock.plugin.registry import read_backends, read_dialects


class _Plugins(pluggy.PluginManager):
    """A plugin manager that finds our hooks in a module as pytest does: by their names, marked with `hookimpl` or
    not.
    """

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return the options of a hook; None if it is not ours."""
        if not name.startswith("pytest_kvmock_") or not inspect.isroutine(getattr(plugin, name, None)):
            return None
        return super().parse_hookimpl_opts(plugin, name) or {}


class CommandConfig:
    """The `config` that hooks get outside of a pytest run.

    Attributes:
        pluginmanager: has the modules.
        hook: calls their hooks.
        rootpath: the working directory.
    """

    def __init__(self) -> None:
        self.pluginmanager = _Plugins("pytest")
        self.pluginmanager.add_hookspecs(hookspecs)
        self.hook = self.pluginmanager.hook
        self.rootpath = Path.cwd()
        self._cleanups = ExitStack()

    def getoption(self, name: str, default: Any = None, skip: bool = False) -> Any:  # noqa: ARG002 - as in pytest
        """Return the default: no option was given."""
        return default

    def add_cleanup(self, function: Callable[[], None]) -> None:
        """Register a function to call at the end."""
        self._cleanups.callback(function)

    def close(self) -> None:
        """Call the finalizers."""
        self._cleanups.close()


@contextmanager
def loaded(modules: Sequence[str]) -> Iterator[None]:
    """Register the dialects and backends of these modules while the context lasts.

    Raises:
        ValueError: a module cannot be imported or has no such hook, or a hook returned an invalid value.
    """
    config = CommandConfig()
    try:
        for name in dict.fromkeys(modules):
            try:
                module = import_module(name)
            except Exception as error:  # noqa: BLE001 - any error of a module is reported in one line
                raise ValueError(f"-p {name}: cannot be imported: {type(error).__name__}: {error}") from None
            config.pluginmanager.register(module, name)
            if not config.pluginmanager.get_hookcallers(module):
                raise ValueError(f"-p {name}: has neither pytest_kvmock_dialects nor pytest_kvmock_backends")
        try:
            read_backends(cast("pytest.Config", config))
            read_dialects(cast("pytest.Config", config))
        except pytest.UsageError as error:
            raise ValueError(str(error)) from None
        yield
    finally:
        config.close()
