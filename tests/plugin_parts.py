"""The parts of the plugin, in the core's modules and in those that its hooks load."""

from importlib import import_module

from pytest_kvmock.plugin import pytest_plugins
from pytest_kvmock.plugin.options import OPTIONS as OF_CORE

MODULES = [import_module(name) for name in pytest_plugins]
FIXTURES = [name for module in MODULES for name in vars(module) if name.startswith(("kv_", "make_kv_"))]
TABLES = [OF_CORE, *(module.OPTIONS for module in MODULES if hasattr(module, "OPTIONS"))]
OPTIONS = tuple(option for table in {id(table): table for table in TABLES}.values() for option in table)
