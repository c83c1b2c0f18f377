"""Small harnesses used as a library, without the plugin's fixtures."""

import pytest

from pytest_kvmock import EngineProfile, RouterHarness


@pytest.fixture
def make_kv():
    """Make a harness whose workers have 8 blocks of 4 tokens by default."""

    def make(backend="lineage", index=None, *, sync="auto", allow=(), name="", **fields):
        profile = EngineProfile(**{"block_size": 4, "num_blocks": 8, **fields})
        return RouterHarness(profile, backend, index, sync=sync, allow=allow, name=name)

    return make


@pytest.fixture
def kv(make_kv):
    return make_kv()


@pytest.fixture
def rules_of():
    """Return the rules of problems, in order."""

    def rules(problems):
        return [problem.rule for problem in problems]

    return rules
