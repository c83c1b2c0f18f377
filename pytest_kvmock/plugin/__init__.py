"""The pytest plugin: this module is its entry point, and names those of its modules that pytest is to look at."""

from pytest_kvmock.plugin.options import KvEventWarning

__all__ = ["KvEventWarning"]

pytest_plugins = ("pytest_kvmock.plugin.hooks", "pytest_kvmock.plugin.fixtures")
