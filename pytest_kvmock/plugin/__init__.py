"""The pytest plugin. This module is its entry point, and names the modules that pytest loads."""

from pathlib import Path

from pytest_kvmock.plugin.options import KvEventWarning

__all__ = ["KvEventWarning"]

pytest_plugins = (
    "pytest_kvmock.plugin.hooks",
    "pytest_kvmock.plugin.fixtures",
    # All folders present: each may be deleted, and `-p no:kvmock` turns all of them off.
    *(
        f"pytest_kvmock.contrib.{path.parent.name}.plugin"
        for path in sorted((Path(__file__).parents[1] / "contrib").glob("*/plugin.py"))
    ),
)
