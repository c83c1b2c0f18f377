"""Running the tests of a `ProcessContract` by hand, before a process with a mistake."""

import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "router_process"))

from test_process_contract import TestPlainRouter as OfPlainRouter
from test_process_contract import source_of

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.backends import speaker_of
from pytest_kvmock.serve import KvServer
from pytest_kvmock.testing import ProcessEnded
from pytest_kvmock.wire import find_dialect

PLAIN = Path(__file__).parents[2] / "examples" / "router_process" / "plain_router.py"
PROGRAM = Path(__file__).with_name("wrong_router.py")


def of_bug(name, **traits):
    """The contract of the plain router with one mistake."""

    def command(self, engines):
        return [sys.executable, PROGRAM, name, str(engines.block_size), *map(source_of, engines)]

    return type(f"Of_{name}", (OfPlainRouter,), {"command": command, "ready": patient, "timeout_s": 2.0, **traits})


def patient(self, process):
    """Wait for the port of a process for 20 s, so that a wrong one is waited for 2 s alone."""
    for _ in range(10):
        try:
            return f"http://127.0.0.1:{process.line()}"
        except ProcessEnded:
            if not process.is_alive:
                raise
    raise AssertionError(process.state_text)


def outcome_of(contract, name, dialect="vllm-0.33"):
    """Run a test of a contract, and return "" where it passes, else how it ends: "failed: ..." or "skipped: ..."."""
    method = getattr(contract(), name)
    profile = {}
    for mark in getattr(method, "pytestmark", ()):
        profile |= mark.kwargs if mark.name == "kvmock" else {}
    with RouterHarness(EngineProfile(**profile), speaker_of(find_dialect(dialect))) as kv:
        servers = []

        def make_kv_server(**options):
            servers.append(KvServer(kv, dialect, **options))
            return servers[-1]

        given = {"make_kv_server": make_kv_server, "kv_dialect": dialect}
        try:
            method(**{each: given[each] for each in inspect.signature(method).parameters})
        except (AssertionError, pytest.fail.Exception) as error:
            return f"failed: {error}"
        except pytest.skip.Exception as skipped:
            return f"skipped: {skipped}"
        finally:
            for server in servers:
                server.close()
    return ""
