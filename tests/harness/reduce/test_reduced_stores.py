"""Failures over shared stores: the reproduction has the stores that it needs."""

import pytest
from depth import takes_long
from scenario_files import load_scenarios, play, scenario_text

from pytest_kvmock import EngineProfile, EventRulesBroken, RadixIndex, RouterHarness, StorageTier
from pytest_kvmock.engines import Tiers
from pytest_kvmock.harness.reduce import reproduce

STORES = {"disk": {"kind": "files", "workers": [0, 1]}}


class CreditsThePublisher(RadixIndex):
    """Credits a store's block to its publisher: wrong only where a store is shared."""

    def new(self):
        return of_vllm(type(self))


class JumpsAHole(CreditsThePublisher):
    """Promises one block too many below the host: wrong without stores, too."""

    def find_tiered(self, local_hashes, **more):
        found = super().find_tiered(local_hashes, **more)
        disk = found.get(StorageTier.DISK, {})
        disk.update({key: blocks + 1 for key, blocks in disk.items()})
        return found


def of_vllm(kind):
    return kind(count_copies=True, chunk=1, clears_below=False)


def failed(kind):
    tiers = Tiers.of({"host": 8, "files": True})
    kv = RouterHarness(EngineProfile(4, 8, 3, tiers=tiers), "vllm", of_vllm(kind), stores=STORES, name="stores")
    for first in (0, 100):
        worker = kv.worker(0)
        worker.serve(range(first, first + 27))
        worker.tick(worker.now + 20)
    return kv


@takes_long
@pytest.mark.parametrize("kind", [CreditsThePublisher, JumpsAHole])
def test_a_reproduction_has_the_stores_that_it_needs_and_fails(kind, tmp_path):
    kv = failed(kind)
    found = reproduce(kv, kv.judge().errors[0])
    assert found.size <= 2
    if kind is CreditsThePublisher:
        assert found.stores == STORES
        assert 'stores={"disk": {"kind": "files", "workers": [0, 1]}}' in found.as_test()
    namespace = {}
    exec(found.as_test(), namespace)
    with pytest.raises(EventRulesBroken, match="index_drift"):
        namespace["test_reproduction"](of_vllm(kind), "vllm")

    path = tmp_path / "cut.kv.yaml"
    path.write_text(scenario_text(found, "cut"))
    (scenario,) = load_scenarios(path)
    assert scenario.stores == found.stores
    harness = RouterHarness(found.profile, "vllm", of_vllm(kind), stores=found.stores or None)
    with pytest.raises(EventRulesBroken, match="index_drift"), harness as kv:
        play(kv, scenario, errors_fail=False)
    if found.stores:
        with pytest.raises(ValueError, match=r"the scenario wants stores=.*, the harness has {}$"):
            play(RouterHarness(found.profile, "vllm", of_vllm(kind)), scenario)
