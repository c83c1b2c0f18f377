"""The doors of the package: the modules that users import from, and what each hands out."""

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
"""The modules of names that the root does not have; `testing` needs Hypothesis for some of its names."""

SUBJECTS += [
    f"contrib.{path.parent.name}"
    for path in sorted(Path(pytest_kvmock.__file__).parent.glob("contrib/*/__init__.py"))
    if "__all__" in path.read_text(encoding="utf-8")
]

DOORS = ["pytest_kvmock", *(f"pytest_kvmock.{name}" for name in [*SUBJECTS, "testing"])]


def public_names():
    """What each door hands out."""
    modules = [importlib.import_module(door) for door in DOORS]
    return {each.__name__: [name for name in each.__all__ if not name.startswith("__")] for each in modules}
