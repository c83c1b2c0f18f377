"""Nested runs of pytest for the tests of the plugin."""

from nested_runs import ids, installed, nested  # noqa: F401 - fixtures
