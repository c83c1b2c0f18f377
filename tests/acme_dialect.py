"""A user's module that defines a dialect, for the commands that load one with `-p`."""

import sys

import pytest

HOOK = """
from pytest_kvmock.wire import DIALECTS, WireField

OURS = DIALECTS["vllm-0.33"].variant("acme-1", add_stored=(WireField("acme", "text", default=None, ordinary="x"),))

def pytest_kvmock_dialects(config):
    return {"acme-1": OURS}

def pytest_configure(config):
    raise AssertionError("this is no run of pytest")
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    (tmp_path / "acme_kv.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    yield "acme_kv"
    sys.modules.pop("acme_kv", None)
