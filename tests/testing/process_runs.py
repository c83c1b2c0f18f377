"""Run the tests of a `ProcessContract` by hand, over a process with one bug."""

import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "router_process"))

from test_process_contract import TestPlainRouter as OfPlainRouter
from test_process_contract import ask, source_of

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.testing.process.router_process import ProcessEnded
from pytest_kvmock.wire import find_dialect

PLAIN = Path(__file__).parents[2] / "examples" / "router_process" / "plain_router.py"
PROGRAM = Path(__file__).with_name("wrong_router.py")


def of_bug(name, **traits):
    """Return the contract of the plain router with one bug."""

    def command(self, engines):
        return [sys.executable, PROGRAM, name, str(engines.block_size), *map(source_of, engines)]

    return type(f"Of_{name}", (OfPlainRouter,), {"command": command, "ready": patient, "timeout_s": 2.0, **traits})


def right_for(dialect):
    """Return the contract of the right router that reads a dialect."""
    return OfPlainRouter if find_dialect(dialect).form == "map" else of_bug(f"reads_{dialect}", timeout_s=10.0)


def blocks_of_chat(self, prompt, **keys):
    """Return the blocks that the right router for chats reports for a chat with the prompt as its message."""
    body = {"messages": [{"role": "user", "content": prompt}], "model": keys.get("lora_name") or self.engines.model}
    rows = ask(self.url, "POST", "/blocks", body | {"cache_salt": keys.get("cache_salt")})
    workers = {engine.url: engine.worker for engine in self.engines}
    return {(workers[row["url"]], row["rank"]): row["blocks"] for row in rows}


def adapter_loaded(self, name, path):
    """Notify a router of a loaded adapter."""
    ask(self.url, "POST", "/adapters", {"name": name, "path": path})


ADAPTERS = {"adapter_loaded": adapter_loaded}
HOSTS = {"tiers": {"host": 256, "self_describing": True}}


DECLARED = {
    "gives_hosts_no_weight": HOSTS,
    "takes_every_name_for_plain": {"reads_drafts": True},
    "names_ranks_as_events_do": {"http": "node"},
    "keeps_what_a_reloaded_adapter_had": ADAPTERS,
    "hashes_by_the_page": {"learns_block_size": True},
}
"""Declarations of wrong routers, without which they are not judged."""


def with_ids(contract):
    """Return the contract of a router that also gets the worker id after each source."""

    def source(engine):
        return f"{source_of(engine)}#{engine.worker}"

    def command(self, engines):
        return [*contract.command(self, engines)[:4], *map(source, engines)]

    def moved(self, engines):
        ask(self.url, "PUT", "/workers", [source(each) for each in engines])

    return type(contract.__name__, (contract,), {"command": command, "moved": moved})


RIGHT_DESIGNS = {
    "reads_chats": {"sends": "chat", "blocks": blocks_of_chat},
    "rests_who_failed": {"cools_down_s": 0.4},
    "weighs_what_is_computed": {"gives_up_after": None},
    "weighs_prompts_and_what_is_computed": {"gives_up_after": None},
    "reads_no_token_ids": {"takes_token_ids": False},
    "learns_the_block": {"learns_block_size": True},
    "forgets_reloaded_adapters": ADAPTERS,
    "weighs_hosts": HOSTS,
    "reads_look_ahead": {"reads_drafts": True},
}
"""Routers that are right in other ways than the plain one, with their declarations."""


def patient(self, process):
    """Wait up to 20 s for the port of a process, where a wrong one is given 2 s."""
    for _ in range(10):
        try:
            return f"http://127.0.0.1:{process.line()}"
        except ProcessEnded:
            if not process.is_alive:
                raise
    raise AssertionError(process.state_text)


def outcome_of(contract, name, dialect="vllm-0.33"):
    """Run a test of a contract; return "" if it passes, else its end: "failed: ..." or "skipped: ..."."""
    method = getattr(contract(), name)
    profile = {}
    for mark in (*getattr(contract, "pytestmark", ()), *getattr(method, "pytestmark", ())):
        profile |= mark.kwargs if mark.name == "kvmock" else {}
    roles = profile.pop("roles", None)
    with RouterHarness(EngineProfile(**profile), speaker_of(find_dialect(dialect)), roles=roles) as kv:
        servers = []

        def _kvmock_servers(**options):
            servers.append(KvServer(kv, dialect, **options))
            return servers[-1]

        given = {"_kvmock_servers": _kvmock_servers, "kv_dialect": dialect}
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
