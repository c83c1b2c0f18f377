"""Runs of pytest inside pytest, for the tests of what comes in through the hooks."""

from nested_runs import ids, installed, nested  # noqa: F401 - fixtures
