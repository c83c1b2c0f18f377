"""Stores shared by workers of a fleet: loads from them, a router's index of them, and its promises."""

import warnings

import pytest
from store_fleets import DISK, PROMPTS, SIZE, STORES, OfOwners, asked, engine, fleet_of, serve

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines import Tiers
from pytest_kvmock.fleets import Fleet, FleetRequest, RoundRobin


@pytest.mark.parametrize(("worker", "reused"), [(0, 128), (1, 128), (2, 0)])
def test_workers_of_a_store_load_blocks_that_any_of_them_wrote(worker, reused):
    router = OfOwners()
    router.worker = worker
    fleet = fleet_of(router)
    serve(fleet, 0)
    report = fleet.run(asked())
    assert router.reused == [reused] * 4
    assert not report.beliefs
    assert [each.blocks for each in report.run.promises] == [{"disk": {0: 8, 1: 8}}] * 4


def test_a_load_from_the_host_ends_in_an_otherwise_idle_fleet():
    fleet = Fleet([engine(files=False)], RoundRobin())
    serve(fleet, 0, PROMPTS[:1], fillers=1)
    report = fleet.run([FleetRequest(range(5000, 5020), 1, 0.0), FleetRequest([*PROMPTS[0], 9], 1, 2000.0)])
    assert [each.first_reused_tokens for each in report.run.requests] == [0, 112]


def test_the_index_of_a_fleet_attributes_a_store_to_its_workers():
    fleet = fleet_of()
    serve(fleet, 1)
    fleet.run(asked()[:1])
    hashes = fleet.run(asked()[:1]).run.asked[0].prompt.block_hashes(SIZE)
    found = fleet._knowledge.reference.find_tiered(hashes)
    assert {key[0] for key in found[DISK]} <= {0, 1}


def test_a_store_folder_outlives_its_workers():
    router = OfOwners()
    fleet = fleet_of(router)
    serve(fleet, 0)
    router.worker = 1
    fleet.at(0).restart(1)
    fleet.at(0).leave(0)
    report = fleet.run(asked(apart_ms=2000.0))
    assert router.reused == [128] * 4
    assert not report.beliefs


def test_a_worker_that_joins_can_belong_to_a_store():
    router = OfOwners(stores={"disk": {"kind": "files", "workers": [0, 3]}})
    fleet = fleet_of(router, stores={"disk": {"kind": "files", "workers": [0, 3]}})
    serve(fleet, 0)
    router.worker = 3
    fleet.at(0).join(engine=engine())
    fleet.run(asked())
    assert router.reused == [128] * 4


def test_without_stores_each_worker_has_its_own_folder():
    router = OfOwners()
    router.worker = 1
    fleet = fleet_of(router, stores=None)
    serve(fleet, 0)
    report = fleet.run(asked())
    assert router.reused == [0] * 4
    assert report.run.promises == ()  # there is no store to compare with


class CreditsThePublisher(OfOwners):
    def overlap_by_owner(self, request):
        return {"disk": {0: super().overlap_by_owner(request)["disk"].get(0, 0)}}


class CreditsAll(OfOwners):
    def overlap_by_owner(self, request):
        most = max(super().overlap_by_owner(request)["disk"].values(), default=0)
        return {"disk": dict.fromkeys(self.workers(), most)}


class JumpsHoles(OfOwners):
    def overlap_by_owner(self, request):
        return {"disk": dict.fromkeys((0, 1), len(request.local_hashes))}


class TakesItForTheDevice(OfOwners):
    def overlap(self, request):
        return super().overlap(request) | super().overlap_by_owner(request)["disk"]


@pytest.mark.parametrize(
    ("router", "text"),
    [
        (
            CreditsThePublisher,
            "promises worker 1 0 of 8 blocks from the store 'disk'",
        ),
        (CreditsAll, "promises worker 2 8 of 8 blocks from the store 'disk'"),
        (JumpsHoles, "promises worker 0 8 of 8 blocks from the store 'disk'"),
        (TakesItForTheDevice, "TakesItForTheDevice.overlap() says 8 of 8 blocks on worker 0"),
    ],
)
def test_a_wrong_promise_of_a_store_is_reported(router, text):
    fleet = fleet_of(router())
    serve(fleet, 0, PROMPTS[:1] if router is JumpsHoles else PROMPTS)
    prompts = [[*PROMPTS[0][: 4 * SIZE], *PROMPTS[1][: 4 * SIZE]]] if router is JumpsHoles else PROMPTS
    (belief,) = fleet.run(asked(prompts)).beliefs
    assert belief.rule == "overlap_drift"
    assert text in str(belief)


def test_a_wrong_promise_of_a_store_is_reported_with_the_expected_one():
    fleet = fleet_of(CreditsThePublisher())
    serve(fleet, 0)
    (belief,) = fleet.run(asked()).beliefs
    assert belief.observed.endswith("from the store 'disk' before the pick for request 0 at 138.047 ms")
    assert belief.expected == "8: all workers of it can load the same"


class CountsFromTheFirstBlock(OfOwners):
    """Promises what a store holds, on top of what is on the device."""

    def overlap_by_owner(self, request):
        found = super().overlap_by_owner(request)["disk"]
        return {"disk": dict.fromkeys((0, 1), max(found.values(), default=0))}


def test_blocks_of_a_device_are_not_promised_again_from_a_store():
    for router, expected in ((OfOwners(), []), (CountsFromTheFirstBlock(), ["at most 4"])):
        fleet = fleet_of(router)
        serve(fleet, 0, PROMPTS[:1])
        fleet.engines[1].submit([*PROMPTS[0][: 4 * SIZE], 7], 1)
        fleet.engines[1].run()
        assert [belief.expected for belief in fleet.run(asked(PROMPTS[:1])).beliefs] == expected


class KnowsWhoIsThere(OfOwners):
    def overlap_by_owner(self, request):
        there = self.workers()
        return {"disk": {key: n for key, n in super().overlap_by_owner(request)["disk"].items() if key in there}}


class SaysNoneOfTheAbsent(OfOwners):
    def overlap_by_owner(self, request):
        return {"disk": super().overlap_by_owner(request)["disk"] | {3: 0}}


@pytest.mark.parametrize("router", [KnowsWhoIsThere, SaysNoneOfTheAbsent, OfOwners])
def test_a_worker_of_a_store_that_is_not_there_may_be_promised_nothing(router):
    stores = {"disk": {"kind": "files", "workers": [0, 1, 3]}}
    fleet = fleet_of(router(stores=stores), stores=stores)
    serve(fleet, 0)
    assert not fleet.run(asked()).beliefs


class LeavesItOut(OfOwners):
    def overlap_by_owner(self, request):
        return {}


class Lowers(OfOwners):
    """Promises at most four blocks, for all workers alike."""

    def overlap_by_owner(self, request):
        return {"disk": {key: min(blocks, 4) for key, blocks in super().overlap_by_owner(request)["disk"].items()}}


@pytest.mark.parametrize("router", [OfOwners, LeavesItOut, Lowers, RoundRobin])
def test_a_correct_promise_of_a_store_passes(router):
    fleet = fleet_of(router())
    serve(fleet, 0)
    fleet.at(3000).leave(0)
    assert not fleet.run(asked()).beliefs


def test_blocks_of_deleted_files_are_recomputed_and_a_stale_promise_passes():
    router = OfOwners()
    router.worker = 1
    fleet = fleet_of(router)
    serve(fleet, 0)
    for prompt in PROMPTS:
        fleet.engines[0].worker.storage.lose(prompt)
    report = fleet.run(asked())
    assert router.reused == [0] * 4
    assert not report.beliefs


def test_workers_with_different_layouts_share_no_blocks_and_one_warning_says_so():
    router = OfOwners()
    router.worker = 1
    message = (
        r"^stores\['disk'\]: worker 1 has blocks of 16 tokens in chunks of 2, and another one blocks of 16 tokens in "
        r"chunks of 1: neither finds what the other has written$"
    )
    with pytest.warns(UserWarning, match=message) as said:
        fleet = fleet_of(router, [engine(), engine(chunk=2), engine()])
    assert len(said) == 1
    serve(fleet, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet.run(asked()[:1])
    assert router.reused == [0]


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ({"disk": {"kind": "file", "workers": [0]}}, r"^Fleet: stores\['disk'\]: unknown kind 'file'; did you mean"),
        (STORES, r"^stores\['disk'\]: worker 0 has no place for it: a store of kind 'files' is below a host; give "),
    ],
)
def test_invalid_stores_are_refused_in_one_line(stores, message):
    with pytest.raises(ValueError, match=message):
        fleet_of(RoundRobin(), [engine(files=False)], stores=stores)


def test_an_invalid_overlap_by_owner_is_reported_in_one_line():
    for answer, message in (
        ({"dsk": {}}, r"overlap_by_owner\(\): unknown store 'dsk'; did you mean 'disk'"),
        ({"disk": 3}, r"overlap_by_owner\(\): must return {store: {worker: blocks}}, got {'disk': 3}"),
        ({"disk": {"a": 3}}, r"overlap_by_owner\(\) names a worker 'a'; in this fleet a worker is named by its id, 0"),
    ):
        router = OfOwners()
        router.overlap_by_owner = lambda request, answer=answer: answer
        with pytest.raises(Exception, match=message):
            fleet_of(router).run(asked()[:1])


def test_a_fleet_of_a_harness_has_the_stores_of_the_harness():
    tiers = Tiers.of({"host": 16, "files": True})
    with RouterHarness(EngineProfile(SIZE, 10, 3, tiers=tiers), "vllm", stores=STORES, name="stores") as kv:
        router = OfOwners()
        router.worker = 1
        fleet = kv.fleet(router)
        serve(fleet, 0)
        report = fleet.run(asked())
        assert router.reused == [128] * 4
        assert not report.beliefs
        with pytest.raises(TypeError, match="fleet: stores is the harness's own"):
            kv.fleet(stores=STORES)
