"""Tiers in a harness: overlap by tier, and indexes under test with and without tiers."""

import asyncio

import pytest

from pytest_kvmock import (
    Cleared,
    EngineProfile,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
)
from pytest_kvmock.harness.under_test import difference_below
from pytest_kvmock.oracle.hygiene.entries import Opened
from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
from pytest_kvmock.values import Located

DEVICE, HOST, DISK, EXTERNAL = StorageTier


def chain(first, last=None):
    """Return a Stored of numbered blocks under the block before the first; each local hash is the number."""
    numbers = tuple(range(first, (last or first) + 1))
    return Stored(first - 1 or None, numbers, numbers)


def harness(index=None, **options):
    kv = RouterHarness(backend=None, index=index, **options)
    return kv, kv.make_sink()


def play(sink, *events):
    for event in events:
        data, tier = event if isinstance(event, tuple) else (event, DEVICE)
        sink(data, tier)


OFFLOADED = [chain(1, 2), (chain(4), HOST), (chain(3), HOST), (chain(5), DISK)]
PROMPT = Prompt(hashes=[1, 2, 3, 4, 5, 6])


class Tiered:
    """A right index with tiers; answers given by a test come first."""

    def __init__(self):
        self.tree = RadixIndex()
        self.answers = {}
        self.asked = 0

    def apply(self, event):
        self.tree.apply(event)

    def find_tiered(self, local_hashes):
        self.asked += 1
        return self.answers.get(tuple(local_hashes)) or self.tree.find_tiered(local_hashes)


class Both(Tiered):
    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


class AsyncTiered(Tiered):
    async def find_tiered(self, local_hashes):
        return super().find_tiered(local_hashes)


class DeviceOnly:
    """An index of the device only."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        if event.storage_tier is DEVICE:
            self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


# ---------------------------------------------------------------------------------------------------- overlap


@pytest.mark.parametrize("index", [None, Tiered, Both, RadixIndex])
def test_the_overlap_of_a_tier_counts_blocks_beyond_the_faster_tiers(index):
    kv, sink = harness(index and index())
    play(sink, *OFFLOADED)
    worker = sink.worker_id
    assert {worker: 2} == kv.overlap(PROMPT) == kv.overlap(PROMPT, tier=DEVICE) == kv.overlap(PROMPT, "device")
    assert (
        {worker: 2}
        == kv.overlap(PROMPT, tier=HOST)
        == kv.overlap(PROMPT, tier="host")
        == kv.overlap(PROMPT, "host_pinned")
    )
    assert ({worker: 1}, {}) == (kv.overlap(PROMPT, tier="disk"), kv.overlap(PROMPT, tier=EXTERNAL))
    assert {DEVICE: {worker: 2}, HOST: {worker: 2}, DISK: {worker: 1}} == kv.overlap(PROMPT, tier=None)
    assert kv.overlap(Prompt(hashes=[9]), tier=None) == {}
    assert kv.judge().errors == []


def test_overlap_by_tier_names_ranks_like_overlap_without_a_tier():
    kv, sink = harness()
    for event_id, (data, rank, tier) in enumerate(
        [(chain(1, 2), 0, DEVICE), (chain(1, 2), 1, DEVICE), (chain(3), 1, HOST)]
    ):
        sink(RouterEvent(sink.worker_id, KvCacheEvent(event_id // 2, data, rank), tier))
    by_tier = kv.overlap(PROMPT, tier=None)
    assert (kv.overlap(PROMPT), list(kv.overlap(PROMPT))[1:]) == (by_tier[DEVICE], list(by_tier[HOST]))


def test_an_unknown_tier_is_refused_with_the_known_names():
    kv, _ = harness()
    with pytest.raises(
        ValueError, match=r"unknown tier 'host_pined'; did you mean 'host_pinned'\? known: device, host_pinned, disk"
    ):
        kv.overlap(PROMPT, tier="host_pined")
    with pytest.raises(ValueError, match="unknown tier 2; known: device, host_pinned, disk, external"):
        kv.overlap(PROMPT, tier=2)


SHORT = {"host": HOST, "g1": DEVICE, "g2": HOST, "g3": DISK, "g4": EXTERNAL}


@pytest.mark.parametrize(("name", "tier"), [*SHORT.items(), *((tier.value, tier) for tier in StorageTier)])
def test_an_event_may_name_its_tier_by_a_string(name, tier):
    index = Tiered()
    kv, sink = harness(index)
    sink(chain(1), name)
    sink(RouterEvent(0, KvCacheEvent(1, chain(2)), name))
    kv.apply(RouterEvent(5, KvCacheEvent(0, chain(1)), name))
    sink.compare(lambda: [1, 2], storage_tier=name)
    assert [tier] * 3 == [entry.event.storage_tier for entry in kv.events]
    assert {StorageTier} == {type(entry.event.storage_tier) for entry in kv.events}
    assert {sink.worker_id: 2, 5: 1} == kv.overlap(PROMPT, tier=name)
    kv.assert_in_sync()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hots", r"unknown tier 'hots'; did you mean 'host'\? known: device, "),
        (["host"], r"unknown tier \['host'\]; known: device"),
    ],
)
def test_an_event_with_an_unknown_tier_is_refused_before_it_is_logged(name, text):
    kv, sink = harness()
    for call in (
        lambda: sink(chain(1), name),
        lambda: sink(RouterEvent(0, KvCacheEvent(0, chain(1)), name)),
        lambda: kv.apply(RouterEvent(5, KvCacheEvent(0, chain(1)), name)),
        lambda: sink.compare(lambda: [1], storage_tier=name),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    sink(chain(1))
    assert (
        [entry.event.event.event_id for entry in kv.events],
        [event.event_id for event in sink.events],
    ) == ([0], [0])
    kv.assert_in_sync()


def test_an_index_accepts_short_names_of_tiers():
    index = RadixIndex(count_copies=True)
    index.apply(RouterEvent(0, KvCacheEvent(0, chain(1)), "host"))
    assert index.find_tiered([1]) == {HOST: {(0, 0): 1}}
    assert index.num_blocks(0, tier="g2") == 1
    index.apply(RouterEvent(0, KvCacheEvent(1, Removed((1,))), HOST))
    assert index.find_tiered([1]) == {}
    with pytest.raises(ValueError, match=r"unknown tier 'hots'; did you mean 'host'\?"):
        index.apply(RouterEvent(0, KvCacheEvent(2, chain(1)), "hots"))


def test_an_index_without_tiers_is_queried_for_the_device_only():
    kv, sink = harness(DeviceOnly())
    play(sink, *OFFLOADED)
    assert {sink.worker_id: 2} == kv.overlap(PROMPT)
    for call in (lambda: kv.overlap(PROMPT, tier="host"), lambda: kv.overlap(PROMPT, tier=None)):
        with pytest.raises(
            ValueError, match=r"index under test \(DeviceOnly\) does not tell tiers apart: it has no find_tiered"
        ):
            call()
    assert kv.judge().errors == []


def test_an_async_index_with_tiers_is_awaited():
    kv, sink = harness(AsyncTiered())
    play(sink, *OFFLOADED)

    async def look():
        await kv.aflush()
        return await kv.aoverlap(PROMPT), await kv.aoverlap(PROMPT, tier="host"), await kv.aoverlap(PROMPT, tier=None)

    worker = sink.worker_id
    by_tier = {DEVICE: {worker: 2}, HOST: {worker: 2}, DISK: {worker: 1}}
    assert ({worker: 2}, {worker: 2}, by_tier) == asyncio.run(look())
    with pytest.raises(TypeError, match=r"use `await kv_harness.aoverlap\(...\)`"):
        kv.overlap(PROMPT, tier=None)
    with pytest.raises(TypeError, match=r"use `await kv_harness.aoverlap\(...\)`"):
        kv.overlap(PROMPT, tier="host")
    assert kv.judge().errors == []


def test_an_index_without_any_lookup_method_is_refused():
    class Silent:
        def apply(self, event): ...

    with pytest.raises(TypeError, match=r"match_tokens\(tokens\), find_tiered\(local_hashes\) and match_tiered"):
        harness(Silent())


# ------------------------------------------------------------------------------------------------- comparison


@pytest.mark.parametrize("kind", [Tiered, Both])
@pytest.mark.parametrize(
    ("tiers", "observed", "expected"),
    [
        ({DEVICE: 2, HOST: 1}, "returned 1 in host_pinned", "2 blocks, as the reference index returned"),
        ({DEVICE: 2, HOST: 3}, "returned 3 in host_pinned", "2 blocks, as the reference index returned"),
        ({DEVICE: 2}, "returned 0 in host_pinned", "2 blocks, as the reference index returned"),
        ({DEVICE: 2, HOST: 2, DISK: 1}, "returned 1 in disk", "0 blocks, as the reference index returned"),
        ({DEVICE: 1, HOST: 2}, "returned 1 for", "2 blocks, as the reference index returned"),
        ({HOST: 4}, "returned 0 for", "2 blocks, as the reference index returned"),
    ],
)
@pytest.mark.parametrize("by_rank", [True, False])
def test_a_drift_names_the_tier_of_the_wrong_answer(kind, tiers, observed, expected, by_rank):
    index = kind()
    kv, sink = harness(index)
    play(sink, *OFFLOADED[:2])
    key = (sink.worker_id, 0) if by_rank else sink.worker_id
    index.answers[1, 2, 3, 4] = {tier: {key: blocks} for tier, blocks in tiers.items()}
    play(sink, OFFLOADED[2])
    (problem,) = kv.judge().errors
    assert f"find_tiered() of your index ({kind.__name__}) {observed}" in problem.observed
    assert (problem.expected, problem.rule) == (expected, "index_drift")


def test_a_drift_names_the_tier_in_which_the_block_was_stored():
    index = Tiered()
    kv, sink = harness(index)
    play(sink, chain(1, 2), (chain(2), HOST))
    index.answers[1, 2] = {DEVICE: {(sink.worker_id, 0): 1}}
    play(sink, Removed((2,)))
    (problem,) = kv.judge().errors
    assert (problem.storage_tier, problem.blocks) == (HOST, (2,))
    assert (
        problem.observed
        == f"find_tiered() of your index (Tiered) returned 0 in host_pinned for worker {sink.worker_id} on a 2-block "
        "prefix "
        "(ends in 2); block 2 was stored in host_pinned by event 1 and never removed"
    )


def test_a_drift_counts_a_located_event_as_storing_the_block():
    index = Tiered()
    kv, sink = harness(index)
    play(sink, chain(1, 2), (Located((2,)), HOST))
    index.answers[1, 2] = {DEVICE: {(sink.worker_id, 0): 1}}
    play(sink, Removed((2,)))
    (problem,) = kv.judge().errors
    assert problem.observed.endswith("(ends in 2); block 2 was stored in host_pinned by event 1 and never removed")
    assert problem.expected == "1 block, as the reference index returned"


def test_a_stale_host_block_is_found_at_its_removed():
    class Forgets(Tiered):
        def apply(self, event):
            if event.storage_tier is DEVICE or not isinstance(event.event.data, Removed):
                super().apply(event)

    kv, sink = harness(Forgets())
    play(sink, chain(1, 2), (chain(3), HOST), (Removed((3,)), HOST))
    (problem,) = kv.judge().errors
    assert problem.event_id == 2
    assert "returned 1 in host_pinned" in problem.observed
    assert problem.observed.endswith("block 3 was removed from host_pinned by event 2; in no tier since")


def test_host_blocks_that_an_index_keeps_after_a_cleared_are_found():
    class KeepsHost(Tiered):
        def apply(self, event):
            if not isinstance(event.event.data, Cleared):
                super().apply(event)
                return
            kept = [each for each in self.tree.dump_events() if each.storage_tier is not DEVICE]
            self.tree = RadixIndex()
            for each in kept:
                self.tree.apply(each)

    kv, sink = harness(KeepsHost())
    play(sink, (chain(1, 3), HOST), Cleared())
    (problem,) = kv.judge().errors
    assert (problem.event_id, problem.storage_tier) == (1, HOST)
    assert problem.observed.endswith("was stored in host_pinned by event 0 and cleared by event 1")


class DropsBelow(Tiered):
    """Drops a Stored below the device whose parent it does not hold in any tier."""

    def apply(self, event):
        data = event.event.data
        if event.storage_tier is not DEVICE and isinstance(data, Stored) and data.parent_hash is not None:
            held = [block for each in self.tree.dump_events() for block in each.event.data.block_hashes]
            if data.parent_hash not in held:
                return
        super().apply(event)


@pytest.mark.parametrize(
    ("shows", "matched"),
    [
        ([chain(1, 2), (chain(4), HOST), (chain(3), HOST)], 3),
        ([(chain(4), HOST), chain(1, 3)], 3),
        ([chain(1, 2), (chain(5), DISK), (chain(4), HOST), (chain(3), HOST)], 3),
        ([chain(1, 2), (chain(5, 6), DISK), (chain(3, 4), HOST)], 4),
        ([chain(1, 2), (Stored(3, (9,), (9,)), HOST), (chain(5), HOST), (chain(4), HOST), (chain(3), HOST)], 3),
    ],
)
def test_a_missing_block_stored_before_its_parent_is_found_at_the_event_that_links_it(shows, matched):
    kv = RouterHarness(backend=None, index=DropsBelow(), sync="every")
    sink = kv.make_sink()
    play(sink, *shows, *(Stored(None, (i,), (i,)) for i in range(100, 120)))
    problem, *_ = kv.judge().errors  # the last ones are of other chains
    assert ("index_drift", len(shows) - 1) == (problem.rule, problem.event_id)
    assert f"on a {matched + 1}-block prefix" in problem.observed
    assert f"(ends in {matched + 1}); block {matched + 1} was stored in " in problem.observed


def test_blocks_below_a_removed_one_are_looked_up_too():
    """The host holds the block after block 2 of the device; an index that finds block 3 without 2 still counts it."""

    class FindsByItself(Tiered):
        def find_tiered(self, local_hashes):
            found = self.tree.find_tiered(local_hashes)
            if list(local_hashes) == [1, 2, 3] and any(each.storage_tier is HOST for each in self.tree.dump_events()):
                found[HOST] = dict.fromkeys(found[DEVICE], 1)
            return found

    kv = RouterHarness(backend=None, index=FindsByItself(), sync="every")
    sink = kv.make_sink()
    play(sink, chain(1, 2), (chain(3), HOST), Removed((2,)), Stored(None, (100,), (100,)))
    (problem,) = kv.judge().errors
    assert (problem.event_id, problem.storage_tier, problem.blocks) == (2, HOST, (3,))


def test_an_index_of_only_the_device_is_not_queried_for_blocks_below_it():
    class Asked(DeviceOnly):
        lengths = ()

        def find_matches(self, local_hashes):
            self.lengths = (*self.lengths, len(local_hashes))
            return super().find_matches(local_hashes)

    index = Asked()
    kv = RouterHarness(backend=None, index=index, sync="every")
    play(kv.make_sink(), (chain(3, 4), HOST), chain(1, 2))
    assert index.lengths == (2, 2, 1, 2, 2, 1)  # each chain, with another first block, and without its first block


def test_an_index_with_find_matches_and_find_tiered_must_be_right_in_both():
    class Stale(Both):
        def find_matches(self, local_hashes):
            return {}

    kv, sink = harness(Stale())
    play(sink, chain(1))
    assert [problem.observed[:28] for problem in kv.judge().errors] == ["find_matches() of your index"]


def test_tiers_are_looked_up_from_the_first_event_below_the_device_on():
    index = Both()
    kv, sink = harness(index)
    play(sink, chain(1, 2))
    assert index.asked == 0
    play(sink, (chain(3), HOST))
    assert index.asked > 0
    assert kv.judge().errors == []


@pytest.mark.parametrize(
    ("answer", "observed"),
    [
        ([], r"find_tiered\(\) of Tiered returned \[\]; expected a mapping of tiers"),
        (
            {"hbm": {0: 1}},
            r"find_tiered\(\) of Tiered returned the unknown tier 'hbm'; known: device, host_pinned, disk, external",
        ),
        (
            {"device": {0: "one"}},
            r"find_tiered\(\) of Tiered returned in device the entry 0: 'one'; expected worker_id or \(worker_id, dp_rank\)",  # noqa: E501
        ),
        (
            {HOST: None},
            r"find_tiered\(\) of Tiered returned None in host_pinned; expected a mapping of worker_id or \(worker_id,",
        ),
        (
            {(0, 0): 1},
            r"find_tiered\(\) of Tiered returned the key \(0, 0\) in place of a tier; expected a mapping of tiers to",
        ),
        ({0: 1}, r"find_tiered\(\) of Tiered returned the key 0 in place of a tier; expected a mapping of tiers to"),
    ],
)
def test_an_unreadable_tiered_answer_is_an_index_failure(answer, observed):
    class Odd(Tiered):
        def find_tiered(self, local_hashes):
            return answer

    Odd.__name__ = "Tiered"
    kv, sink = harness(Odd())
    play(sink, chain(1))
    with pytest.raises(ValueError, match=observed):
        kv.overlap(PROMPT, tier=None)
    assert {problem.rule for problem in kv.judge().errors} == {"index_failure"}


def test_a_tiered_answer_may_have_tier_names_and_zeros():
    index = Tiered()
    kv, sink = harness(index)
    play(sink, chain(1), (chain(2), HOST))
    worker = sink.worker_id
    index.answers[1, 2, 3] = {"device": {worker: 1, 7: 0}, "host_pinned": {worker: 1}, "disk": {}, "external": {7: 0}}
    assert {DEVICE: {worker: 1}, HOST: {worker: 1}} == kv.overlap(Prompt(hashes=[1, 2, 3]), tier=None)


def test_tiers_below_a_differing_tier_are_not_compared():
    """A right answer for the host proves nothing if the device, from which it continues, is wrong."""
    answer, expected = {DEVICE: {(0, 0): 1}, DISK: {(0, 0): 1}}, {DEVICE: {(0, 0): 2}}
    assert difference_below(answer, expected, ()) is None
    assert (DISK, 0, 0, 1, range(1)) == difference_below(answer, {DEVICE: {(0, 0): 1}}, ())


def test_any_continuation_on_the_host_is_right_if_the_answers_for_the_device_may_differ():
    """An orphan on the device: one index matches it, another does not; the host continues from either end."""
    index = Both()
    kv = RouterHarness(backend=None, index=index)
    sink = kv.make_sink(prefix_closed=False)
    play(sink, chain(1, 3), Removed((2,)), chain(2))
    index.find_matches = lambda hashes: {(sink.worker_id, 0): min(3, len(hashes))} if list(hashes)[:1] == [1] else {}
    index.answers[1, 2, 3, 4] = {DEVICE: {(sink.worker_id, 0): 3}, HOST: {(sink.worker_id, 0): 1}}
    play(sink, (chain(4), HOST))
    assert kv.judge().errors == []


# ---------------------------------------------------------------------------------------------------- capacity


def test_a_sink_has_a_capacity_for_each_tier():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink(num_blocks=2, tier_blocks={"host": 1, DISK: 2})
    play(sink, chain(1, 2), (chain(1, 2), HOST), (chain(1, 2), DISK))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.storage_tier) == ("over_capacity", HOST)


@pytest.mark.parametrize(
    ("tier_blocks", "message"),
    [
        ({"host": 1, HOST: 2}, "make_kv_sink: tier_blocks: the tier host_pinned is given twice"),
        ({"host": 0}, r"make_kv_sink: tier_blocks\['host'\] must be an integer of at least 1, got 0"),
        ({"host_pined": 1}, "make_kv_sink: tier_blocks: unknown tier 'host_pined'; did you mean 'host_pinned'"),
        ({"device": 1}, "make_kv_sink: tier_blocks: the blocks of the device are num_blocks"),
    ],
)
def test_an_invalid_tier_capacity_is_refused(tier_blocks, message):
    with pytest.raises(ValueError, match=message):
        RouterHarness(backend=None).make_sink(tier_blocks=tier_blocks)
    with pytest.raises(TypeError, match="tier_blocks must be a mapping of tiers to numbers of blocks, got 4"):
        RouterHarness(backend=None).make_sink(tier_blocks=4)


def test_a_hand_made_event_of_another_tier_is_no_duplicate():
    kv = RouterHarness()
    kv.apply([Stored(None, (5,), (5,))])
    kv.apply(RouterEvent(0, next(iter(kv.events)).event.event, HOST))
    assert [problem.rule for problem in kv.events.problems] == ["event_id_gap"]  # and no duplicate_store


def test_a_worker_is_compared_in_each_tier_with_a_known_capacity():
    kv = RouterHarness()
    worker = kv.worker(0)
    kv._judge.open(Opened((0, 0), 0, StreamSpec(num_blocks=8, tier_blocks={HOST: 4})))
    worker.serve(kv.prompt(1))
    sink = worker.manager.sink
    sink.publish(KvCacheEvent(1, chain(1)), HOST)
    sink.publish(KvCacheEvent(2, chain(1)), DISK)  # without a known capacity
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.storage_tier) == ("engine_drift", HOST)
    assert problem.observed.startswith(
        "the engine does not hold block 1 in host_pinned; block 1 was stored in host_pinned"
    )


# ------------------------------------------------------------------------------------------- asked by tokens


class OfTokens:
    """An index by tokens with tiers and adapters."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        self.tree.apply(event)

    def match_tiered(self, tokens, extra):
        lora = (extra or {}).get("lora_name")
        return self.tree.find_tiered(block_hashes(tokens, 4, lora_name=lora))


class OfTokensAndHashes(OfTokens):
    def find_tiered(self, local_hashes):
        return self.tree.find_tiered(local_hashes)

    def match_tiered(self, tokens, extra):
        raise AssertionError("it is asked by hashes")


class PlainByHashes(OfTokens):
    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


class ForgetsTheHost(OfTokens):
    def match_tiered(self, tokens, extra):
        return {DEVICE: super().match_tiered(tokens, extra).get(DEVICE, {})}


def serve_over_a_host(kv):
    asked = kv.prompt(3, lora_name="tenant")
    kv.worker(0).serve(asked)
    for _ in range(4):
        kv.worker(0).serve(kv.prompt(3))
    kv.flush()
    return asked


@pytest.mark.parametrize("index", [OfTokens, OfTokensAndHashes, PlainByHashes])
def test_an_index_by_tokens_may_have_tiers(index):
    profile = EngineProfile(block_size=4, num_blocks=6, tiers={"host": 32})
    with RouterHarness(profile, "lru", index()) as kv:
        asked = serve_over_a_host(kv)
        assert kv.overlap(asked, tier=None) == {HOST: {0: 3}}
        assert kv.overlap(Prompt(asked.tokens), tier=None) == {}


def test_an_index_by_tokens_is_compared_tier_by_tier():
    profile = EngineProfile(block_size=4, num_blocks=6, tiers={"host": 32})
    kv = RouterHarness(profile, "lru", ForgetsTheHost())
    serve_over_a_host(kv)
    problem = kv.judge().errors[0]
    assert (problem.rule, problem.storage_tier) == ("index_drift", HOST)
    assert problem.observed.startswith("match_tiered() of your index (ForgetsTheHost) returned 0 in host_pinned")


@pytest.mark.parametrize("index", [OfTokens, PlainByHashes])
def test_a_prompt_of_hashes_is_refused_for_a_tiered_index_by_tokens(index):
    kv = RouterHarness(EngineProfile(block_size=4), "lru", index())
    with pytest.raises(
        ValueError, match=r"takes tokens \(match_tiered\), .* or give the index a find_tiered\(local_hashes\)"
    ):
        kv.worker(0).serve(Prompt(hashes=[1, 2]))


def test_a_profile_returns_the_traits_of_a_backend():
    profile = EngineProfile(block_size=4, tiers={"host": 64, "chunk": 2})
    traits = profile.traits("vllm")
    assert (traits.copies, traits.chunk, traits.clears_below) == (True, 2, False)
    assert traits == RouterHarness(profile, "vllm").worker(0).traits
    assert EngineProfile().traits("vllm_deepseek_v4").publishes_groups
    with pytest.raises(ValueError, match="unknown backend 'vlm'"):
        profile.traits("vlm")
