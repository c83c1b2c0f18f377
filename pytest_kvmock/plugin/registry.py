"""Backends of other plugins: what the hook `pytest_kvmock_backends` returns is checked, and registered for this run.

Loaded only where somebody implements the hook, or uses backends.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_kvmock.backends import BACKENDS, BackendSpec, registered

if TYPE_CHECKING:
    import pluggy

HOOK: Final = "pytest_kvmock_backends"


def read_backends(config: pytest.Config) -> dict[str, str]:
    """Read the hook, and register what it returns until the run is over.

    Returns:
        Who registered each backend, by its name.

    Raises:
        pytest.UsageError: a plugin returns something else than a mapping of names to `BackendSpec`s, names a built-in
            backend or one that another plugin has named, or raises. It names the plugin.
    """
    specs: dict[str, BackendSpec] = {}
    plugins: dict[str, str] = {}
    for plugin in _implementers(config):
        name = plugin_name(config, plugin)
        for key, spec in _returned(config, plugin).items():
            if key in BACKENDS:
                raise pytest.UsageError(f"{HOOK} of {name}: {key!r} is the name of a built-in backend; take another")
            if key in specs:
                raise pytest.UsageError(f"{HOOK}: {plugins[key]} and {name} both register a backend {key!r}")
            specs[key] = spec
            plugins[key] = name
    known = ExitStack()
    known.enter_context(registered(specs))
    config.add_cleanup(known.close)
    return plugins


def plugin_name(config: pytest.Config, plugin: object) -> str:
    """Return the name of a plugin for messages; of a conftest, its path from the root."""
    name = config.pluginmanager.get_name(plugin) or repr(plugin)
    if os.path.isabs(name):  # noqa: PTH117 - it need not be a path at all
        path = Path(name)
        return str(path.relative_to(config.rootpath)) if path.is_relative_to(config.rootpath) else name
    return name


def raised_in(config: pytest.Config, hook: str, implementations: Sequence[pluggy.HookImpl], error: Exception) -> str:
    """Describe an error of a hook: which plugin raised it, as far as its traceback shows, and what and where."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for implementation in implementations:
        if getattr(implementation.function, "__code__", None) in codes:
            return f"{hook} of {plugin_name(config, implementation.plugin)} {_raised(error)}"
    return f"{hook} {_raised(error)}"


def _raised(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"raised {type(error).__name__}: {error} ({place}; --full-trace shows the way there)"


def _implementers(config: pytest.Config) -> list[object]:
    """Plugins that implement the hook, in the order in which they were registered."""
    hooks = getattr(config.hook, HOOK).get_hookimpls()
    return [hook.plugin for hook in hooks if not (hook.wrapper or hook.hookwrapper)]


def _returned(config: pytest.Config, plugin: object) -> Mapping[str, BackendSpec]:
    """Call the hook of one plugin, and check what it returns."""
    where = f"{HOOK} of {plugin_name(config, plugin)}"
    others = [other for other in _implementers(config) if other is not plugin]
    try:
        answers = config.pluginmanager.subset_hook_caller(HOOK, others)(config=config)
    except (pytest.UsageError, pytest.exit.Exception):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported in one line
        if config.getoption("fulltrace", False):
            raise pytest.UsageError(f"{where} raised:\n{''.join(traceback.format_exception(error))}") from None
        raise pytest.UsageError(f"{where} {_raised(error)}") from None
    specs = answers[0] if answers else None  # pluggy leaves out a None
    if not isinstance(specs, Mapping):
        raise pytest.UsageError(f"{where} returned {specs!r:.80}; allowed: a mapping of names to BackendSpecs")
    for key, spec in specs.items():
        if not isinstance(spec, BackendSpec):
            raise pytest.UsageError(
                f"{where}: {key!r} is {spec!r:.80}; allowed: a BackendSpec, such as BackendSpec.of_policy(...)"
            )
        if key != spec.name:
            raise pytest.UsageError(f"{where}: the key {key!r} is not the name of its backend, {spec.name!r}")
    return specs


def too_late(config: pytest.Config, plugin: object) -> pytest.Collector.CollectError:
    """The error for a plugin that has the hook, and came when it was read."""
    return pytest.Collector.CollectError(
        f"{plugin_name(config, plugin)}: {HOOK} comes too late here: it is read once, before collection, from plugins "
        "and initial conftests (those of the root, of testpaths, and of paths on the command line)"
    )
