"""`sticky_router.py` fulfils the contract of router processes, as far as it applies to a router without events."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router needs aiohttp")

from pytest_kvmock.testing import ProcessContract


class TestMyRouter(ProcessContract):
    hears_events = False
    takes_token_ids = False  # it goes by texts

    def command(self, engines):
        return [sys.executable, Path(__file__).with_name("sticky_router.py"), str(engines.port), *engines.urls]
