"""Lookups of a test are compared with the reference by the rules of the harness's own lookups."""

import asyncio

import pytest
from faulty_indexes import Async, ByTokens, Queued, Sound

from pytest_kvmock import (
    EngineProfile,
    EventRulesBroken,
    Prompt,
    RadixIndex,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
)
from pytest_kvmock.fleets import FleetRequest
from pytest_kvmock.harness.under_test import IndexUnderTest

SIZES = EngineProfile(block_size=4, num_blocks=16)
STORED, OTHER = list(range(100, 108)), list(range(200, 212))  # 2 blocks, and 3 that no worker stores
LONGER = [*STORED, *OTHER]


def lying(kind, *lies, times=None):
    """An index that lies in the first `times` lookups of these prompts; a lie is (tokens, answer)."""

    class Lying(kind):
        left = times

        def told(self, asked, answer):
            for tokens, lie in lies:
                wanted = tokens if hasattr(self, "match_tokens") else hashes_of(tokens)
                if list(asked) == [*wanted] and self.left != 0:
                    self.left = None if self.left is None else self.left - 1
                    return lie
            return answer

        if hasattr(kind, "match_tokens"):

            def match_tokens(self, tokens):
                return self.told(tokens, super().match_tokens(tokens))
        else:

            def find_matches(self, local_hashes):
                return self.told(local_hashes, super().find_matches(local_hashes))

    return Lying()


def hashes_of(tokens):
    return block_hashes(tokens, 4)


def harness(index, backend="lineage", **options):
    return RouterHarness(SIZES, backend, index, **options)


def drifts(kv):
    return [problem for problem in kv.events.problems if problem.rule == "index_drift"]


@pytest.mark.parametrize("kind", [Sound, ByTokens, Queued])
@pytest.mark.parametrize(
    ("asked", "lie", "expected"),
    [(OTHER, {(0, 0): 2}, "0 blocks"), (LONGER, {}, "2 blocks"), (LONGER, {(0, 0): 5}, "2 blocks")],
    ids=["a prompt that nobody stored", "too few of a longer prompt", "too many of a longer prompt"],
)
def test_a_wrong_answer_to_a_test_is_a_drift_and_is_returned_unchanged(kind, asked, lie, expected):
    kv = harness(lying(kind, (asked, lie)))
    kv.worker(0).serve(STORED)
    kv.assert_no_event_errors()
    assert {key[0]: blocks for key, blocks in lie.items()} == kv.overlap(asked)
    (problem,) = drifts(kv)
    assert problem.expected == f"{expected}, as the reference index returned"
    with pytest.raises(EventRulesBroken, match="index_drift"):
        kv.assert_no_event_errors()


def test_a_right_answer_to_a_test_is_no_drift():
    for index in (Sound(), ByTokens(), Queued(), RadixIndex()):
        with harness(index) as kv:
            kv.worker(0).serve(STORED)
            assert [kv.overlap(each) for each in (STORED, LONGER, OTHER, [])] == [{0: 2}, {0: 2}, {}, {}]


def test_a_drift_names_the_shortest_prefix_with_a_wrong_answer():
    lies = [(LONGER[:end], {(0, 0): 3}) for end in (12, 16, 20)]
    kv = harness(lying(Sound, *lies))
    kv.worker(0).serve(STORED)
    kv.overlap(LONGER)
    (problem,) = drifts(kv)
    assert "returned 3 for worker 0 on a 3-block prefix" in problem.observed
    assert "no worker ever stored it" in problem.observed


def test_a_single_wrong_answer_is_a_drift():
    kv = harness(lying(Sound, (OTHER, {(0, 0): 1}), times=1))
    kv.worker(0).serve(STORED)
    assert [kv.overlap(OTHER), kv.overlap(OTHER)] == [{0: 1}, {}]
    assert len(drifts(kv)) == 1


def test_the_same_wrong_answer_is_reported_once():
    kv = harness(lying(Sound, (OTHER, {(0, 0): 1})))
    kv.worker(0).serve(STORED)
    for _ in range(3):
        kv.overlap(OTHER)
    assert len(drifts(kv)) == 1


def test_a_drift_found_by_a_lookup_of_the_test_can_be_expected():
    with harness(lying(Sound, (OTHER, {(0, 0): 1}))) as kv:
        kv.worker(0).serve(STORED)
        with kv.events.expect_error("index_drift"):
            kv.overlap(OTHER)


class Tiered(RadixIndex):
    """Finds one block more on the host for prompts that no worker stored."""

    def find_tiered(self, local_hashes):
        found = super().find_tiered(local_hashes)
        if [*local_hashes] == hashes_of(OTHER):
            found[StorageTier.HOST_PINNED] = {(0, 0): 1}
        return found


def test_a_lower_tier_is_compared_when_the_test_looks_it_up():
    kv = harness(Tiered())
    kv.worker(0).serve(STORED)
    assert kv.overlap(OTHER) == {}
    assert drifts(kv) == []
    assert kv.overlap(OTHER, tier="host") == {0: 1}
    (problem,) = drifts(kv)
    assert "find_tiered() of your index (Tiered) returned 1 in host_pinned for worker 0 " in problem.observed


# -------------------------------------------------------------------------------------- the rules of own look-ups


@pytest.mark.parametrize("sync", ["every", "auto", "burst"])
def test_a_lookup_is_compared_after_each_event_and_after_a_burst(sync):
    kv = harness(lying(Queued, (OTHER, {(0, 0): 1})), sync=sync)
    kv.worker(0).serve(STORED)
    assert kv.overlap(STORED) == {0: 2}
    assert drifts(kv) == []
    kv.overlap(OTHER)
    assert len(drifts(kv)) == 1


def test_a_lookup_is_not_compared_with_sync_end():
    with harness(lying(Sound, (OTHER, {(0, 0): 1})), sync="end") as kv:
        kv.worker(0).serve(STORED)
        assert kv.overlap(OTHER) == {0: 1}


def test_a_bounded_index_may_return_less_but_never_more():
    lies = (STORED, {}), (OTHER, {(0, 0): 1})
    kv = RouterHarness(SIZES, "lineage", IndexUnderTest(lying(Sound, *lies), bounded=2), sync="burst")
    for first in range(0, 40, 8):
        kv.apply(Stored(None, (first + 1,), (first + 1,)))
    kv.worker(0).serve(STORED)
    assert kv.overlap(STORED) == {}
    assert drifts(kv) == []
    kv.overlap(OTHER)
    assert len(drifts(kv)) == 1


def test_a_lookup_on_a_stream_with_a_survived_fault_is_not_compared_before_recovery():
    kv = harness(lying(Sound, (OTHER, {(0, 0): 1})), survive=["lose"])
    kv.worker(0).serve(STORED)
    kv.drop_next()
    kv.worker(0).serve(LONGER)
    assert kv.overlap(OTHER) == {0: 1}
    assert drifts(kv) == []
    assert kv.overlap(LONGER) == {0: 2}
    assert drifts(kv) == []


def test_a_drift_from_an_event_that_a_fault_changed_is_attributed_to_the_fault():
    class Unsigned(Sound):
        """Stores only blocks with unsigned hashes."""

        def apply(self, event):
            if min(event.event.data.block_hashes) >= 0:
                super().apply(event)

    kv = harness(Unsigned(), sync="burst")
    with kv.faults.signed(1):
        kv.apply(Stored(None, (2**63 + 1,), (11,)))
    assert kv.overlap(Prompt(hashes=[11, 12])) == {}
    assert {problem.fault.kind for problem in drifts(kv)} == {"signed"}


def test_a_lost_event_is_no_drift():
    kv = harness(Sound())
    kv.drop_next()
    kv.worker(0).serve(STORED)
    assert kv.overlap(STORED) == {}
    assert drifts(kv) == []


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_qwen3_next"])
def test_a_hybrid_lookup_may_return_less_than_is_held_but_not_less_than_is_reused(backend):
    shared = list(range(32 * 4))
    asked = [*shared, *range(500, 508)]

    class Less(RadixIndex):
        less = None

        def find_matches(self, local_hashes):
            found = super().find_matches(local_hashes)
            return {key: min(blocks, self.less or blocks) for key, blocks in found.scores.items()}

    index = Less(count_copies=True)
    kv = RouterHarness(EngineProfile(4, num_blocks=400), backend, index)
    kv.worker(0).serve([*shared, 300])
    kv.worker(0).serve([*shared, *range(600, 608), 1])
    kv.assert_no_event_errors()
    reused = kv.reusable(asked)[0] // 4
    index.less = reused
    assert {0: reused} == kv.overlap(asked)
    assert drifts(kv) == []
    index.less = reused - 1
    kv.overlap(asked)
    (problem,) = drifts(kv)
    assert problem.expected.startswith(f"{reused} ")


# --------------------------------------------------------------------------------------------------------- async


def test_a_lookup_of_an_async_index_is_compared_when_no_event_waits():
    class Lying(Async):
        async def find_matches(self, local_hashes):
            return {(0, 0): 1} if [*local_hashes] == hashes_of(OTHER) else await super().find_matches(local_hashes)

    async def main():
        kv = harness(Lying())
        kv.worker(0).serve(STORED)
        assert [await kv.aoverlap(STORED), await kv.aoverlap(OTHER)] == [{}, {0: 1}]
        assert drifts(kv) == []  # the index has not received the event yet
        await kv.aflush()
        assert [await kv.aoverlap(STORED), await kv.aoverlap(OTHER)] == [{0: 2}, {0: 1}]
        assert len(drifts(kv)) == 1

    asyncio.run(main())


def test_a_lookup_of_an_async_index_is_not_compared_if_a_flush_comes_in_between():
    class Slow(Async):
        async def find_matches(self, local_hashes):
            found = await super().find_matches(local_hashes)
            if self.pause is not None:
                pause, self.pause = self.pause, None
                await pause()
            return found

        pause = None

    async def main():
        index = Slow()
        with harness(index) as kv:

            async def pause():
                kv.worker(0).serve(STORED)
                await kv.aflush()

            index.pause = pause
            assert await kv.aoverlap(STORED) == {}
            assert await kv.aoverlap(STORED) == {0: 2}

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------------- fleets


def test_lookups_of_a_fleet_for_its_router_are_compared():
    kv = harness(lying(Sound, (OTHER, {(0, 0): 1})))
    kv.fleet().run([FleetRequest(OTHER, 2, 0.0)])
    assert "returned 1 for worker 0 on a 3-block prefix" in drifts(kv)[0].observed
