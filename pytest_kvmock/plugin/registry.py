"""Backends and dialects of other plugins: the results of their hooks are checked, and registered for this run.

This module is loaded only if a plugin implements such a hook, or backends or dialects are used.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    import pluggy


class Registry(NamedTuple):
    """The kind of objects that one hook registers.

    Attributes:
        hook: the name of the hook.
        what: the word for one object in messages.
        kind: the class of the objects.
        example: code that makes one.
        built_in: the built-in objects, by name.
        registered: registers others while its context lasts.
    """

    hook: str
    what: str
    kind: type
    example: str
    built_in: Mapping[str, object]
    registered: Callable[[Mapping[str, Any]], AbstractContextManager[None]]


def read_backends(config: pytest.Config) -> dict[str, str]:
    """Read the hook `pytest_kvmock_backends`; see `read`."""
    from pytest_kvmock.engines.backends import BACKENDS, BackendSpec, registered

    example = "BackendSpec.of_policy(...)"
    return read(config, Registry("pytest_kvmock_backends", "backend", BackendSpec, example, BACKENDS, registered))


def read_dialects(config: pytest.Config) -> dict[str, str]:
    """Read the hook `pytest_kvmock_dialects`; see `read`."""
    from pytest_kvmock.values.dialect import Dialect
    from pytest_kvmock.wire.codec.table import DIALECTS, registered_dialects

    example = "DIALECTS['vllm-0.33'].variant(...)"
    return read(config, Registry("pytest_kvmock_dialects", "dialect", Dialect, example, DIALECTS, registered_dialects))


def read(config: pytest.Config, registry: Registry) -> dict[str, str]:
    """Call a hook, and register its results until the run ends.

    Returns:
        The plugin that registered each object, by the object's name.

    Raises:
        pytest.UsageError: a plugin raises, does not return a mapping of names to objects of the hook's kind, or uses
            the name of a built-in object or of another plugin's. The message names the plugin.
    """
    specs: dict[str, object] = {}
    plugins: dict[str, str] = {}
    for plugin in _implementers(config, registry.hook):
        name = plugin_name(config, plugin)
        for key, spec in _returned(config, plugin, registry).items():
            if key in registry.built_in:
                raise pytest.UsageError(
                    f"{registry.hook} of {name}: {key!r} is the name of a built-in {registry.what}; take another"
                )
            if key in specs:
                raise pytest.UsageError(
                    f"{registry.hook}: {plugins[key]} and {name} both register a {registry.what} {key!r}"
                )
            specs[key] = spec
            plugins[key] = name
    known = ExitStack()
    known.enter_context(registry.registered(specs))
    config.add_cleanup(known.close)
    return plugins


def plugin_name(config: pytest.Config, plugin: object) -> str:
    """Return the name of a plugin for messages; for a conftest, its path from the root."""
    name = config.pluginmanager.get_name(plugin) or repr(plugin)
    if os.path.isabs(name):  # noqa: PTH117 - it need not be a path
        path = Path(name)
        return str(path.relative_to(config.rootpath)) if path.is_relative_to(config.rootpath) else name
    return name


def raised_in(config: pytest.Config, hook: str, implementations: Sequence[pluggy.HookImpl], error: Exception) -> str:
    """Describe an error of a hook: the plugin that raised it, if the traceback shows it, the error and its place."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    for implementation in implementations:
        if getattr(implementation.function, "__code__", None) in codes:
            return f"{hook} of {plugin_name(config, implementation.plugin)} {_raised(error)}"
    return f"{hook} {_raised(error)}"


def _raised(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"raised {type(error).__name__}: {error} ({place}; --full-trace shows the way there)"


def _implementers(config: pytest.Config, hook: str) -> list[object]:
    """Return the plugins that implement a hook, in the order of registration."""
    hooks = getattr(config.hook, hook).get_hookimpls()
    return [each.plugin for each in hooks if not (each.wrapper or each.hookwrapper)]


def _returned(config: pytest.Config, plugin: object, registry: Registry) -> Mapping[str, Any]:
    """Call the hook of one plugin, and check what it returns."""
    where = f"{registry.hook} of {plugin_name(config, plugin)}"
    kind = registry.kind.__name__
    others = [other for other in _implementers(config, registry.hook) if other is not plugin]
    try:
        answers = config.pluginmanager.subset_hook_caller(registry.hook, others)(config=config)
    except (pytest.UsageError, pytest.exit.Exception):
        raise
    except Exception as error:  # noqa: BLE001 - any error is reported in one line
        if config.getoption("fulltrace", False):
            raise pytest.UsageError(f"{where} raised:\n{''.join(traceback.format_exception(error))}") from None
        raise pytest.UsageError(f"{where} {_raised(error)}") from None
    specs = answers[0] if answers else None  # pluggy leaves out a None
    if not isinstance(specs, Mapping):
        raise pytest.UsageError(f"{where} returned {specs!r:.80}; allowed: a mapping of names to {kind}s")
    for key, spec in specs.items():
        if not isinstance(spec, registry.kind):
            raise pytest.UsageError(f"{where}: {key!r} is {spec!r:.80}; allowed: a {kind}, such as {registry.example}")
        if key != spec.name:  # type: ignore[attr-defined]  # backends and dialects have a name
            raise pytest.UsageError(f"{where}: the key {key!r} is not the name of its {registry.what}, {spec.name!r}")  # type: ignore[attr-defined]  # as above
    return specs


def too_late(config: pytest.Config, plugin: object, hook: str) -> pytest.Collector.CollectError:
    """Return the error for a plugin that has the hook, but was registered after it was read."""
    return pytest.Collector.CollectError(
        f"{plugin_name(config, plugin)}: {hook} comes too late here: it is read once, before collection, from plugins "
        "and initial conftests (those of the root, of testpaths, and of paths on the command line)"
    )
