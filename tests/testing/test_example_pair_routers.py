"""The three routers of `examples/prefill_decode/` in traffic of five seeds: slow workers, restarts, bad links.

The example plays one seed of each scene.
"""

import sys
from pathlib import Path

import pytest
from contract_runs import failure_of
from depth import takes_long

from pytest_kvmock.testing.router.router_pairs import PairScenes

sys.path.append(str(Path(__file__).parents[2] / "examples" / "prefill_decode"))

import test_pair_routers as routers

SCENES = [name for name in vars(PairScenes) if name.startswith("test_") and name != "test_pairs_are_judged"]
ROUTERS = [routers.TestLlmDisagg, routers.TestSglangPairs, routers.TestDynamoPrefillRouter]


class Conditional(routers.TestDynamoPrefillRouter):
    """Dynamo's router with conditional disaggregation: the load decides what is decoded alone, without a threshold."""

    order, threshold = "decode_first", None
    __test__ = False

    def make_router(self, workers):
        router = routers.DynamoPrefillRouter(conditional=True)
        router.started(workers)
        return router


@takes_long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("contract", [*ROUTERS, Conditional], ids=lambda each: each.__name__)
def test_an_example_router_passes_the_scenes_of_pairs(contract, seed):
    of_seed = type(contract.__name__, (contract,), {"seed": seed})
    found = {}
    for name in SCENES:
        try:
            said = failure_of(of_seed, name)
        except pytest.skip.Exception:
            continue
        if said is not None:
            found[name] = said
    assert found == {}
