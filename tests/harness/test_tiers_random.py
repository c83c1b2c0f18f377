"""Random traffic of right engines over all tiers: it has no errors, and lost events cause only gaps."""

from random import Random

import pytest
from depth import seeds
from plain_tiers import PlainTiers

from pytest_kvmock import Cleared, RadixIndex, Removed, RouterHarness, StorageTier, Stored, sequence_hashes

DEVICE, *BELOW = StorageTier


class Engine:
    """Holds blocks in four tiers: the device removes leaves first, lower tiers store and remove any block singly."""

    def __init__(self, sink, rng):
        self.sink, self.rng = sink, rng
        self.held = {tier: {} for tier in StorageTier}  # each block with the local hashes of its prefix
        for tier in StorageTier:
            sink.compare(lambda tier=tier: self.held[tier], storage_tier=tier)
        self.store(DEVICE, [77], 0, 1)  # a lost first event leaves no gap: ids of a sink may begin anywhere

    def store(self, tier, path, start, stop):
        blocks = sequence_hashes(path)
        self.sink(Stored(blocks[start - 1] if start else None, blocks[start:stop], path[start:stop]), tier)
        self.held[tier].update({blocks[i]: tuple(path[: i + 1]) for i in range(start, stop)})

    def step(self, path):
        rng, tier = self.rng, self.rng.choice([*StorageTier])
        held, blocks = self.held[tier], sequence_hashes(path)
        if rng.random() < 0.03:
            for blocks_of_tier in self.held.values():
                blocks_of_tier.clear()
            self.sink(Cleared())
        elif tier is DEVICE and rng.random() < 0.6:
            start = sum(block in held for block in blocks)
            if start < len(blocks):
                self.store(tier, path, start, rng.randint(start + 1, len(blocks)))
        elif tier is not DEVICE and rng.random() < 0.6:
            place = rng.randrange(len(path))
            if blocks[place] not in held:
                self.store(tier, path, place, place + 1)
        elif held:
            parents = {chain[:-1] for chain in held.values()} if tier is DEVICE else ()
            block = rng.choice([block for block, chain in held.items() if chain not in parents])
            del held[block]
            self.sink(Removed((block,)), tier)


def verdict_on(seed, loses, **options):
    rng = Random(seed)
    index, sync = rng.choice([PlainTiers, RadixIndex])(), rng.choice(["auto", "every", "burst", "end"])
    kv = RouterHarness(backend=None, index=index, sync=sync, **options)
    engines = [Engine(kv.make_sink(), rng) for _ in range(2)]
    paths = [[rng.randrange(1, 4) for _ in range(5)] for _ in range(4)]
    for _ in range(60):
        if loses and rng.random() < 0.05:
            kv.drop_next()
        rng.choice(engines).step(rng.choice(paths))
    return kv.judge()


@pytest.mark.parametrize("seed", seeds(30))
def test_right_traffic_over_all_tiers_is_in_sync(seed):
    verdict = verdict_on(seed, loses=False)
    assert (verdict.errors, verdict.warnings) == ([], [])


@pytest.mark.parametrize("seed", seeds(30))
def test_errors_from_lost_events_are_listed_under_the_gap_in_every_tier(seed):
    verdict = verdict_on(seed, loses=True)
    assert {"event_id_gap"} >= {problem.rule for problem in verdict.errors}


@pytest.mark.parametrize("seed", seeds(60))
def test_errors_of_an_index_that_does_not_survive_a_loss_are_attributed_to_it_in_every_tier(seed):
    verdict = verdict_on(seed, loses=True, survive=["lose"])
    assert {"lose"} >= {problem.fault and problem.fault.kind for problem in verdict.errors}
