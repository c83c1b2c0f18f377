"""Runs pytest inside pytest, with only the plugins that a test names."""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
import warnings
from functools import partial
from importlib import metadata

import msgspec  # noqa: F401 - to have it imported
import pytest
import zmq  # noqa: F401 - so that all runs in this process share its error classes

import pytest_kvmock

# pytester unloads the modules that a nested run loads. Modules loaded here stay: classes are the same in every run, and
# no run loads them again.
for _module in pkgutil.walk_packages(pytest_kvmock.__path__, "pytest_kvmock."):
    importlib.import_module(_module.name)

PREAMBLE = """\
import sys, unittest
import pytest
from pytest_kvmock import Cleared, Removed, Stored

BAD = Removed((1,))             # nobody stored block 1
GOOD = Stored(None, (2,), (2,))
TWICE = Stored(None, (2,), (2,))    # after GOOD: a duplicate, which is a warning

"""


# Plugins of pytest that no test here needs: a run loads each, calls each of its hooks, and searches it for fixtures.
UNUSED = ("faulthandler", "legacypath", "pastebin", "stepwise", "setuponly", "setupplan")
WITHOUT = [part for name in (*UNUSED, "randomly", "cacheprovider") for part in ("-p", f"no:{name}")]


class ShortInterrupt:
    """Shortens the traceback of a collection error, which interrupts the run: pytest shows only its last line and need
    not read the source of each frame.
    """

    @staticmethod
    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(excinfo):
        excinfo.traceback = excinfo.traceback[-1:]
        excinfo.getrepr = partial(excinfo.getrepr, style="native")


@pytest.fixture(scope="session")
def installed():
    """Return the installed distributions, whose metadata is parsed once instead of in every run."""
    found = list(metadata.distributions())
    for distribution in found:
        read = {name: getattr(distribution, name) for name in ("metadata", "entry_points")}
        distribution.__class__ = type("Read", (type(distribution),), read)
    return found


@pytest.fixture
def nested(pytester, monkeypatch, installed):
    """Write a test module and run it: `nested(source, *args, plugins=(), files={}, subprocess=False)`."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    monkeypatch.setattr(metadata, "distributions", lambda: installed)

    def run(source="", *args, plugins=(), files=None, subprocess=False):
        for name, text in (files or {}).items():
            path = pytester.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        if source:
            (pytester.path / "test_it.py").write_text(PREAMBLE + textwrap.dedent(source))
        loaded = [part for name in ("kvmock", *plugins) for part in ("-p", name)]
        # The outer run has imported the plugins already.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if "pytest_asyncio.plugin" in plugins:
            quiet += ["-o", "asyncio_default_fixture_loop_scope=function"]
        command = [*loaded, *WITHOUT, *quiet, *map(str, args)]
        if subprocess:
            result = pytester.runpytest_subprocess(*command)
        else:
            with warnings.catch_warnings():
                warnings.resetwarnings()  # the filters of the outer run
                result = pytester.runpytest_inprocess(*command, plugins=[ShortInterrupt])
        assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
        return result

    return run


@pytest.fixture
def ids(nested):
    """Return the ids of the tests in a module: `ids(source, *args)`."""

    def collect(source="", *args, **options):
        result = nested(source, "--collect-only", "-q", *args, **options)
        return [line.partition("::")[2] for line in result.outlines if "::" in line and not line.startswith("ERROR")]

    return collect
