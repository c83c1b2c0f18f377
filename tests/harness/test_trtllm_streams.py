"""Streams of TensorRT-LLM under the verdict: clean traffic, corrupted streams, levels, and excused events."""

from dataclasses import replace
from random import Random

import pytest
from depth import seeds

from pytest_kvmock import BACKENDS, Cleared, EngineProfile, RadixIndex, Removed, RouterHarness, StorageTier, Stored
from pytest_kvmock.engines import OutOfBlocks
from pytest_kvmock.values import Updated

TRTLLM = BACKENDS["trtllm"]
V2 = BACKENDS["trtllm_v2"]
VARIANTS = [
    TRTLLM,
    TRTLLM.variant("with_host", secondary_blocks=6),
    TRTLLM.variant("later_order", secondary_blocks=6, removed_order="2026-03"),
    TRTLLM.variant("no_partial_reuse", partial_reuse=False),
    TRTLLM.variant("no_copies", copy_on_partial_reuse=False),
    TRTLLM.variant("two_windows", windows=[64, 512], secondary_blocks=4),
    V2,
    V2.variant("v2_with_host", levels=(6,)),
    V2.variant("v2_with_disk", levels=(6, 8), hash_algo="v2_sha256"),
    V2.variant("v2_no_partial_reuse", partial_reuse=False, levels=(6,), hash_algo="v2_sha256_64"),
    V2.variant("v2_groups", groups=[(None, 0), (8, 4), (12, 0)], pool_groups=[0, 1, 1], levels=(8,)),
]
WINDOW = {"window_size": 64}
LOCAL = (11, 12, 13)


class WithoutUpdates(RadixIndex):
    takes_updates = False


def traffic(kv, rng, steps):
    """Serve short prompts that share prefixes within blocks; some stay open, some are preempted."""
    prompts, running, size = [], [], kv.profile.block_size
    for _ in range(steps):
        base = list(rng.choice(prompts)) if prompts and rng.random() < 0.7 else []
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 3 * size))]
        prompts.append(tuple(base[: rng.randrange(len(base) + 1)] + tokens)[: 6 * size])
        try:
            if rng.random() < 0.6:
                kv.worker(0).serve(prompts[-1], output_tokens=rng.randrange(6))
            elif rng.random() < 0.5 or not running:
                running.append(kv.worker(0).prefill(prompts[-1]))
            else:
                running[0].decode([rng.randrange(3) for _ in range(rng.randrange(1, size))])
                running.pop(0).finish()
        except OutOfBlocks:
            pass


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("index", [RadixIndex, WithoutUpdates])
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_clean_traffic_breaks_no_rule(spec, index, seed):
    rng = Random(f"{spec.name} {seed}")
    profile = EngineProfile(block_size=rng.choice([2, 4, 8]), num_blocks=rng.choice([16, 24]), workers=1)
    with RouterHarness(profile, spec, index(), sync="every") as kv:
        traffic(kv, rng, 40)


class AsOnAWire:
    """A sink that passes on events without `silently_gone`, which no wire has."""

    def __init__(self, sink):
        self.sink = sink

    def publish(self, event, storage_tier, token_ids, extra=None):
        told = {name: value for name, value in extra.items() if name != "silently_gone"}
        self.sink.publish(event, storage_tier, token_ids, told)


@pytest.mark.parametrize("seed", seeds(20))
def test_capacity_is_not_checked_if_an_engine_does_not_report_silently_removed_blocks(seed):
    def make(*, sink, **sizes):
        return TRTLLM.make(sink=sink and AsOnAWire(sink), **sizes)

    profile = EngineProfile(block_size=4, num_blocks=16, workers=1)
    with RouterHarness(profile, replace(TRTLLM, make=make), RadixIndex(), sync="every") as kv:
        traffic(kv, Random(seed), 40)


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("spec", [each for each in VARIANTS if "v2" in each.name], ids=lambda spec: spec.name)
def test_engines_over_v2_finish_all_requests_and_break_no_rule(spec, seed):
    rng = Random(f"{spec.name} {seed}")
    profile = EngineProfile(block_size=4, num_blocks=rng.choice([16, 24]), workers=1)
    with RouterHarness(profile, spec, RadixIndex(), sync="every") as kv:
        engine = kv.engine(0)
        base = [rng.randrange(3) for _ in range(20)]
        prompts = [
            base[: rng.randrange(20)] + [rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(12)
        ]
        handles = [engine.submit(prompt, rng.randrange(1, 9)) for prompt in prompts]
        engine.run()
        assert {handle.status for handle in handles} == {"finished"}


def by_hand(*data, index=None):
    """Return a harness that received these events of TensorRT-LLM."""
    kv = RouterHarness(EngineProfile(block_size=4), None, index)
    sink = kv.make_sink(worker_id=70_000)
    for each in data:
        given, extra = each if isinstance(each, tuple) else (each, {})
        sink(given, extra={**WINDOW, **extra})
    return kv


def rules(kv):
    return [problem.rule for problem in kv.events.errors]


def test_an_updated_moves_a_block_and_keeps_its_children():
    kv = by_hand(Stored(None, (1, 2, 3), LOCAL), Updated(2, levels=(0, 1)), Updated(3, priorities=(35, 80)))
    assert rules(kv) == []
    tiers = kv.inside.reference.find_tiered(LOCAL)
    assert tiers == {StorageTier.DEVICE: {(70_000, 0): 2}, StorageTier.HOST_PINNED: {(70_000, 0): 1}}
    assert kv.inside.reference.find_matches(LOCAL).scores == {(70_000, 0): 3}
    assert (
        kv.inside.reference.num_blocks(70_000),
        kv.inside.reference.num_blocks(70_000, tier=StorageTier.HOST_PINNED),
    ) == (2, 1)
    again = RadixIndex()
    for event in kv.inside.reference.dump_events():
        again.apply(event)
    assert tiers == again.find_tiered(LOCAL)


def test_a_host_block_returns_to_the_device_or_is_removed_from_the_host():
    moved = Updated(3, levels=(0, 1))
    kv = by_hand(Stored(None, (1, 2, 3), LOCAL), moved, Updated(3, levels=(1, 0)), moved, Removed((3,)))
    assert rules(kv) == []
    assert kv.inside.reference.find_tiered(LOCAL) == {StorageTier.DEVICE: {(70_000, 0): 2}}


def test_an_updated_of_an_unknown_block_is_an_error():
    kv = by_hand(Stored(None, (1, 2), LOCAL[:2]), Updated(9, levels=(0, 1)))
    assert rules(kv) == ["block_not_found"]
    assert kv.events.errors[0].expected == "an Updated names a block that is held"


def test_a_leaf_that_its_engine_dropped_silently_may_be_stored_again():
    """In process the engine reports it; on a wire nothing does, and any leaf may be dropped silently."""
    first, again = Stored(None, (1, 2, 3), LOCAL), Stored(2, (3,), LOCAL[2:])
    told = {"silently_gone": [3]}
    assert rules(by_hand((first, {"silently_gone": []}), (again, told))) == []
    assert rules(by_hand(first, again)) == []
    assert [
        problem.rule
        for problem in by_hand((first, {"silently_gone": []}), (again, {"silently_gone": []})).events.problems
    ] == ["duplicate_store"]


def test_storing_a_block_with_children_again_is_a_duplicate():
    kv = by_hand(Stored(None, (1, 2, 3), LOCAL), Stored(1, (2,), LOCAL[1:2]))
    assert [problem.rule for problem in kv.events.problems] == ["duplicate_store"]


def test_a_block_is_a_leaf_again_when_all_its_children_are_removed():
    """Of two children one is removed and the other was dropped silently before."""
    told = {"silently_gone": []}
    forked = [(Stored(None, (1,), LOCAL[:1]), told), *((Stored(1, (name,), (name,)), told) for name in (2, 3))]
    again = Stored(None, (1,), LOCAL[:1])
    gone = (Removed((2,)), {"silently_gone": [3]})
    assert [each.rule for each in by_hand(*forked, gone, (again, {"silently_gone": [1]})).events.problems] == []
    kept = by_hand(*forked, (again, {"silently_gone": [1]})).events.problems
    assert [each.rule for each in kept] == ["duplicate_store"]


def test_a_silently_dropped_leaf_is_no_orphan():
    kv = by_hand(Stored(None, (1, 2, 3), LOCAL), (Removed((2,)), {"silently_gone": [3]}))
    assert [problem.rule for problem in kv.events.problems] == []
    kv = by_hand(Stored(None, (1, 2, 3), LOCAL), (Removed((2,)), {"silently_gone": []}))
    assert [problem.rule for problem in kv.events.problems] == ["orphaned_child"]


def test_a_created_event_counts_as_a_cleared():
    kv = by_hand(Stored(None, (1,), LOCAL[:1]), (Cleared(), {"blocks_per_level": (8, 0)}))
    assert kv.inside.reference.find_matches(LOCAL).scores == {}


def spoilt(change):
    """Return the rules that a stream of real traffic breaks after a change of its events."""
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16, workers=1), VARIANTS[1])
    traffic(kv, Random("spoilt"), 120)
    events = [entry.event for entry in kv.events]
    kv = RouterHarness(EngineProfile(block_size=4, workers=0))
    kv.apply(change(events))
    return {problem.rule for problem in kv.events.problems}


def test_the_unchanged_stream_breaks_no_rule():
    assert spoilt(list) == set()


@pytest.mark.parametrize("kind", [Stored, Removed, Updated])
def test_a_lost_event_is_found_although_the_ids_have_no_gap(kind):
    """Not every one: a block that is never stored again or moved shows only in a comparison with the engine."""

    back = (1, 0)  # a block that is evicted on the host shows nothing

    def without(place):
        def change(events):
            of_kind = [event for event in events if isinstance(event.data, kind)]
            of_kind = [event for event in of_kind if getattr(event.data, "levels", back) == back]
            lost = of_kind[place * len(of_kind) // 8]
            left = [event for event in events if event is not lost]
            return [replace(event, event=replace(event.event, event_id=place)) for place, event in enumerate(left)]

        return change

    found = [spoilt(without(place)) for place in range(8)]
    assert {"block_not_found", "parent_block_not_found", "duplicate_store", "orphaned_child"} & set().union(*found)


def test_an_updated_from_a_wrong_level_is_an_error():
    kv = by_hand(Stored(None, (1,), LOCAL[:1]), Updated(1, levels=(1, 0)))
    assert [problem.observed for problem in kv.events.errors] == ["block 1 is on level 0, and moves from level 1"]


def test_an_overflowing_event_buffer_of_an_engine_leaves_a_gap():
    small = TRTLLM.variant("small_buffer", event_buffer=1)
    with RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=1), small) as kv:
        kv.events.expect_error("event_id_gap")
        kv.worker(0).serve(range(20))
        kv.worker(0).serve(range(100, 120))  # evicts and stores


def test_the_summary_counts_host_blocks_taken_for_device_blocks(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvmock import RadixIndex, Stored
        from pytest_kvmock.values import Updated

        class Ignores(RadixIndex):
            takes_updates = False

        @pytest.fixture
        def kv_index():
            return Ignores()

        def test_it(kv_sink):
            kv_sink(Stored(None, (1, 2), (11, 12)), extra={"window_size": 64})
            kv_sink(Updated(2, levels=(0, 1)), extra={"window_size": 64})
        """
    )
    result = pytester.runpytest_inprocess("-p", "kvmock", "-p", "no:cacheprovider", "--kv-backend=lineage")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvmock: *1 block on the host taken for the device's (no takes_updates)*"])
