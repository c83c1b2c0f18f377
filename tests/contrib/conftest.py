"""Fixtures for runs of pytest inside pytest, which test the plugin's hooks."""

from nested_runs import ids, installed, nested  # noqa: F401 - fixtures
