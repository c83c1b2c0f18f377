"""Failing worlds, and a check that their reproductions still fail."""

from __future__ import annotations

import random
from inspect import signature
from types import MappingProxyType

import pytest
from faulty_worlds import FAULTY

from pytest_kvmock import EngineProfile, EventRulesBroken, RouterHarness
from pytest_kvmock.engines import backends


@pytest.fixture
def faulty_backends(monkeypatch):
    """Register the faulty engines and return their names."""
    monkeypatch.setattr(backends, "BACKENDS", MappingProxyType({**backends.BACKENDS, **FAULTY}))
    return tuple(FAULTY)


# ------------------------------------------------------------------------------------------------------ traffic


@pytest.fixture
def busy():
    """Make a harness with traffic: two workers that must evict serve prompts with shared prefixes."""

    def make(backend="lineage", index=None, *, requests=150, seed=0, amid=lambda kv: None, **fields):
        profile = EngineProfile(**{"block_size": 4, "num_blocks": 24, "workers": 2, **fields})
        kv = RouterHarness(profile, backend, index)
        rng = random.Random(seed)
        shared = [kv.prompt(3) for _ in range(6)]
        for number in range(requests):
            if number == requests // 2:
                amid(kv)
            prompt = kv.prompt(rng.randrange(1, 5), after=rng.choice(shared))
            kv.worker(rng.randrange(2)).serve(prompt, rng.choice([0, 0, 6]))
        kv.judge()
        return kv

    return make


@pytest.fixture
def failure_of():
    """Run the text of a reproduction as a module would; return the message of its failure."""

    def run(reproduction, index=None):
        module = {}
        exec(compile(reproduction.as_test(), "pasted", "exec"), module)
        asked = signature(module["test_reproduction"]).parameters
        fixtures = {"kv_index": index, "kv_backend": reproduction.backend}
        with pytest.raises(EventRulesBroken) as raised:
            module["test_reproduction"](**{name: fixtures[name] for name in asked})
        return str(raised.value)

    return run
