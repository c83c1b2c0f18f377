"""Contracts for the routers of P/D pairs in these tests: the small router, and the plain one of the examples."""

import sys
from pathlib import Path

from process_runs import OfPlainRouter, ask, patient, source_of

from pytest_kvmock.testing import ProcessContract

DIALECTS = {"vllm": "vllm-0.33", "vllm-mooncake": "vllm-0.33", "sglang": "sglang-0.5.23"}

SMALL = Path(__file__).with_name("wrong_pair_router.py")
PLAIN = Path(__file__).with_name("pair_router.py")


def contract_of(bug, way, **traits):
    """Return the contract of the small router with one bug."""

    def command(self, engines):
        prefill = [f"{each.url},{each.bootstrap_port or 0}" for each in engines.of("prefill")]
        return [sys.executable, SMALL, bug, way, *prefill, "--", *(each.url for each in engines.of("decode"))]

    made = {
        "command": command,
        "ready": patient,
        "hand_over": way,
        "dialects": (DIALECTS[way],),
        "hears_events": False,
        "threshold": 0,
        "timeout_s": 2.0,
    }
    return type(f"Of_{bug}", (ProcessContract,), {**made, **traits})


def source(engine):
    if engine.role == "decode":
        return f"decode:{engine.url}"
    return f"{source_of(engine)}@{engine.bootstrap_port or 0}"


def by_events(bug, way, **traits):
    """Return the contract of the plain router over pairs, which reads events of prefill engines, with one bug."""

    def command(self, engines):
        return [sys.executable, PLAIN, bug, way, str(engines.block_size), *map(source, engines)]

    def moved(self, engines):
        ask(self.url, "PUT", "/workers", [source(each) for each in engines])

    made = {
        "command": command,
        "moved": moved,
        "ready": patient,
        "hand_over": way,
        "dialects": (DIALECTS[way],),
        "threshold": 0,
        "timeout_s": 2.0,
    }
    return type(f"Of_{bug}", (OfPlainRouter,), {**made, **traits})
