"""The doors of the package: the modules that users import from, and the names of each."""

import importlib
from pathlib import Path

import pytest_kvmock

SUBJECTS = [
    "engines",
    "fleets",
    "harness",
    "harness.reduce",
    "oracle",
    "plugin",
    "servers",
    "values",
    "wire",
    "wire.sockets",
]
"""The modules with names that the root lacks; `testing` is not here because some of its names need Hypothesis."""

SUBJECTS += [
    f"contrib.{path.parent.name}"
    for path in sorted(Path(pytest_kvmock.__file__).parent.glob("contrib/*/__init__.py"))
    if "__all__" in path.read_text(encoding="utf-8")
]

DOORS = ["pytest_kvmock", *(f"pytest_kvmock.{name}" for name in [*SUBJECTS, "testing"])]


def public_names():
    """Return the public names of each door."""
    modules = [importlib.import_module(door) for door in DOORS]
    return {each.__name__: [name for name in each.__all__ if not name.startswith("__")] for each in modules}
