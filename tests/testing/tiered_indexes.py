"""A router index with tiers, written only from the rules of the documentation, and wrong ones with faults that routers
have.
"""

from collections import Counter

from pytest_kvmock import Removed, StorageTier, Stored, block_hashes
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.values import Located
from pytest_kvmock.values.prompt_keys import hash_options

DEVICE = StorageTier.DEVICE


class HostIndex:
    """A right index: by worker and rank, `names` of blocks by parent and local hash, and their counts by tier.

    Args:
        traits: traits of the engine.
    """

    def __init__(self, traits):
        self.counts, self.clears_below = traits.copies, traits.clears_below
        self.chunk = traits.chunk or 1
        self.names, self.held, self.most = {}, {}, 4096

    def apply(self, event):
        key, tier, data = (event.worker_id, event.event.dp_rank), event.storage_tier, event.event.data
        held = self.held.setdefault(key, {each: Counter() for each in StorageTier})
        self.names.setdefault(key, {})
        if isinstance(data, Stored):
            self.store(key, tier, data)
        elif isinstance(data, Located):
            self.locate(key, tier, data)
        elif isinstance(data, Removed):
            self.remove(key, tier, data)
        else:
            for each in StorageTier if self.clears_below else (DEVICE,):
                held[each].clear()

    def add(self, key, tier, blocks):
        held = self.held[key][tier]
        for block in blocks:
            held[block] = held[block] + 1 if self.counts else 1

    def store(self, key, tier, data):
        parent = data.parent_hash
        for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            self.names[key][parent, local] = parent = block
        self.add(key, tier, data.block_hashes)
        if len(self.names[key]) > self.most:
            self.tidy(key)

    def tidy(self, key):
        """Forget the names of blocks in no tier from time to time: a host may locate a block late."""
        held = set().union(*self.held[key].values())
        self.names[key] = {link: block for link, block in self.names[key].items() if block in held}
        self.most = max(4096, 2 * len(self.names[key]))

    def locate(self, key, tier, data):
        self.add(key, tier, data.block_hashes)

    def remove(self, key, tier, data):
        for block in data.block_hashes:
            self.held[key][tier][block] -= 1
            if self.held[key][tier][block] <= 0:
                del self.held[key][tier][block]

    def chain(self, key, local_hashes):
        parent, chain = None, []
        for local in local_hashes:
            parent = self.names[key].get((parent, local))
            if parent is None:
                break
            chain.append(parent)
        return chain

    def end_below(self, held, chain, depth):
        end = depth // self.chunk * self.chunk
        while end + self.chunk <= len(chain) and held[chain[end + self.chunk - 1]]:
            end += self.chunk
        return end if end - depth >= self.chunk else depth

    def find_tiered(self, local_hashes):
        found = {tier: {} for tier in StorageTier}
        for key, held in self.held.items():
            chain, depth = self.chain(key, local_hashes), 0
            while depth < len(chain) and held[DEVICE][chain[depth]]:
                depth += 1
            found[DEVICE][key] = depth
            for tier in list(StorageTier)[1:]:
                end = self.end_below(held[tier], chain, depth)
                found[tier][key], depth = end - depth, end
        return found

    def find_matches(self, local_hashes):
        return self.find_tiered(local_hashes)[DEVICE]

    def remove_worker(self, worker_id):
        for table in (self.names, self.held):
            for key in [key for key in table if key[0] == worker_id]:
                del table[key]


class RemovedIsRemovedEverywhere(HostIndex):
    def remove(self, key, tier, data):
        for each in StorageTier:
            super().remove(key, each, data)


class SubtreeRemoved(HostIndex):
    """Removes the blocks below a removed one with it, in each medium."""

    def remove(self, key, tier, data):
        super().remove(key, tier, data)
        gone = {*data.block_hashes}
        for (parent, _), block in self.names[key].items():  # parents come before their children
            if parent in gone:
                gone.add(block)
                self.held[key][tier].pop(block, None)


class CountsCpuAsGpu(HostIndex):
    def add(self, key, tier, blocks):
        super().add(key, DEVICE, blocks)

    def remove(self, key, tier, data):
        super().remove(key, DEVICE, data)


class IgnoresCpuRemoved(HostIndex):
    def remove(self, key, tier, data):
        if tier is DEVICE:
            super().remove(key, tier, data)


class DropsPlaceholders(HostIndex):
    def locate(self, key, tier, data):
        pass


class PlaceholderIsARoot(HostIndex):
    def locate(self, key, tier, data):
        self.names[key] = {edge: block for edge, block in self.names[key].items() if block not in data.block_hashes}
        super().locate(key, tier, data)


class ForgetsTokensWithTheDevice(HostIndex):
    def remove(self, key, tier, data):
        super().remove(key, tier, data)
        gone = {block for block in data.block_hashes if not any(held[block] for held in self.held[key].values())}
        self.names[key] = {edge: block for edge, block in self.names[key].items() if block not in gone}


class WantsTheParentFirst(HostIndex):
    def store(self, key, tier, data):
        if data.parent_hash is None or self.held[key][tier][data.parent_hash]:
            super().store(key, tier, data)


class NoCopies(HostIndex):
    def __init__(self, traits):
        super().__init__(traits)
        self.counts = False


class NoCopiesBelow(HostIndex):
    """Looks at each block of a described chunk, and does not count copies."""

    def __init__(self, traits):
        super().__init__(traits)
        self.described = set()

    def store(self, key, tier, data):
        super().store(key, tier, data)
        if tier is not DEVICE:
            self.described.update(data.block_hashes)
            self.held[key][tier] = Counter(set(self.held[key][tier]))

    def end_below(self, held, chain, depth):
        end = super().end_below(held, chain, depth)
        return end if all(held[block] for block in chain[depth:end] if block in self.described) else depth


class AnyHole(HostIndex):
    def end_below(self, held, chain, depth):
        return depth + sum(bool(held[block]) for block in chain[depth:])


class BlocksForChunks(HostIndex):
    def __init__(self, traits):
        super().__init__(traits)
        self.chunk = 1


class ClearsTheDeviceOnly(HostIndex):
    def __init__(self, traits):
        super().__init__(traits)
        self.clears_below = False


class ClearsAllTiers(HostIndex):
    def __init__(self, traits):
        super().__init__(traits)
        self.clears_below = True


class HashesTokens:
    """The index above, looked up by tokens only.

    Args:
        traits: traits of the engine.
        block_size: tokens per block.
    """

    def __init__(self, traits, block_size):
        self.by_hashes, self.size = HostIndex(traits), block_size

    def apply(self, event):
        self.by_hashes.apply(event)

    def match_tiered(self, tokens, extra):
        return self.by_hashes.find_tiered(block_hashes(tokens, self.size, **hash_options(extra)))

    def remove_worker(self, worker_id):
        self.by_hashes.remove_worker(worker_id)


class CountsTheDeviceTwice(HashesTokens):
    """Reports blocks of the device on the host too."""

    def match_tiered(self, tokens, extra):
        found = super().match_tiered(tokens, extra)
        host = found[StorageTier.HOST_PINNED]
        found[StorageTier.HOST_PINNED] = {key: found[DEVICE][key] + blocks for key, blocks in host.items() if blocks}
        return found


class KnowsNoAdapters(HashesTokens):
    def match_tiered(self, tokens, extra):
        return super().match_tiered(tokens, None)


class StopsAtAnUnknownBlockBelow(HostIndex):
    """Ignores a Removed below the device if it names an unknown block."""

    def remove(self, key, tier, data):
        if tier is DEVICE or all(self.held[key][tier][block] for block in data.block_hashes):
            super().remove(key, tier, data)


class RemovesTheFirstBelow(HostIndex):
    def remove(self, key, tier, data):
        super().remove(key, tier, data if tier is DEVICE else Removed(data.block_hashes[:1]))


class CountsRepeatsBelow(HostIndex):
    """Below the device, removes a block that was stored twice only at its second Removed, for any engine."""

    def add(self, key, tier, blocks):
        if tier is DEVICE:
            super().add(key, tier, blocks)
        else:
            self.held[key][tier].update(blocks)


class ALoadMoves(HostIndex):
    """Takes a load for a move: blocks that the device stores leave the host."""

    def store(self, key, tier, data):
        super().store(key, tier, data)
        for block in data.block_hashes if tier is DEVICE else ():
            self.held[key][StorageTier.HOST_PINNED].pop(block, None)


class LoadsOnce(HostIndex):
    """Takes a loaded block for the device's: it is gone when the device evicts it the second time."""

    def __init__(self, traits):
        super().__init__(traits)
        self.loads = Counter()

    def store(self, key, tier, data):
        if tier is DEVICE:
            self.loads.update((key, block) for block in data.block_hashes)
        super().store(key, tier, data)

    def remove(self, key, tier, data):
        super().remove(key, tier, data)
        for block in data.block_hashes if tier is DEVICE else ():
            if self.loads[key, block] > 1:
                for each in StorageTier:
                    self.held[key][each].pop(block, None)


class KeepsTheDiskOfARemovedWorker(HostIndex):
    def remove_worker(self, worker_id):
        kept = {key: held for key, held in self.held.items() if key[0] == worker_id}
        names = {key: self.names[key] for key in kept}
        super().remove_worker(worker_id)
        for key, held in kept.items():
            self.held[key] = {each: held[each] if each is StorageTier.DISK else Counter() for each in StorageTier}
            self.names[key] = names[key]


class NoticesRepeats(HostIndex):
    """A right index that drops a repeated event, and the blocks of a worker whose event ids start again."""

    def __init__(self, traits):
        super().__init__(traits)
        self.last = {}

    def apply(self, event):
        key = (event.worker_id, event.event.dp_rank)
        last = self.last.get(key)
        if event == last:
            return
        if last is not None and event.event.event_id <= last.event.event_id:
            self.forget(key)
        self.last[key] = event
        super().apply(event)

    def forget(self, key):
        self.held.pop(key, None)
        self.names.pop(key, None)

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.last = {key: last for key, last in self.last.items() if key[0] != worker_id}


class ForgetsTheDeviceAlone(NoticesRepeats):
    def forget(self, key):
        self.held[key][DEVICE].clear()


class DropsDoublesOfTheDeviceAlone(NoticesRepeats):
    def __init__(self, traits):
        super().__init__(traits)
        self.counts = True

    def apply(self, event):
        if event.storage_tier is DEVICE:
            super().apply(event)
        else:
            HostIndex.apply(self, event)


FOUND_BY = {
    StopsAtAnUnknownBlockBelow: (
        "test_a_removed_of_a_tier_takes_its_blocks_beside_one_that_nobody_stored",
        "test_a_removed_of_a_host_that_is_a_copy_may_name_what_was_not_located",
        "test_after_a_gap_a_tier_has_no_more_than_came",
    ),
    RemovesTheFirstBelow: (
        "test_a_removed_of_a_tier_takes_its_blocks_beside_one_that_nobody_stored",
        "test_a_removed_of_a_tier_leaves_siblings_workers_and_what_is_stored_again",
    ),
    CountsRepeatsBelow: ("test_a_block_stored_twice_in_a_tier_is_removed_as_often_as_copies_count",),
    ALoadMoves: ("test_a_load_leaves_what_is_below", "test_a_host_that_is_a_copy_is_loaded_again_and_again"),
    LoadsOnce: ("test_a_load_leaves_what_is_below", "test_a_host_that_is_a_copy_is_loaded_again_and_again"),
    KeepsTheDiskOfARemovedWorker: ("test_a_worker_that_is_removed_begins_again_in_each_tier",),
    ForgetsTheDeviceAlone: ("test_an_unannounced_restart_empties_each_tier",),
    DropsDoublesOfTheDeviceAlone: ("test_a_redelivered_event_changes_nothing_in_a_tier",),
    SubtreeRemoved: ("test_a_host_keeps_what_stands_below_a_copy_that_it_gives_up",),
    RemovedIsRemovedEverywhere: (
        "test_what_the_device_lets_go_of_is_where_it_was_located",
        "test_it_follows_traffic_over_a_host",
    ),
    CountsCpuAsGpu: ("test_what_is_located_is_not_on_the_device", "test_a_tier_goes_on_where_the_faster_ones_end"),
    IgnoresCpuRemoved: ("test_a_host_removes_its_own_copies", "test_a_hole_ends_the_match_of_a_tier"),
    DropsPlaceholders: (
        "test_what_the_device_lets_go_of_is_where_it_was_located",
        "test_a_location_may_come_before_what_it_is_of",
    ),
    PlaceholderIsARoot: ("test_what_is_located_is_not_on_the_device",),
    ForgetsTokensWithTheDevice: ("test_a_location_may_come_after_the_device_has_let_go",),
    WantsTheParentFirst: ("test_chunks_come_in_any_order", "test_offloaded_blocks_need_no_parent"),
    NoCopies: ("test_a_block_that_is_loaded_again_is_a_copy",),
    NoCopiesBelow: ("test_copies_of_a_host_are_counted",),
    AnyHole: ("test_a_host_is_read_from_where_the_device_ends_and_there_is_no_way_back",),
    BlocksForChunks: ("test_part_of_a_chunk_is_worth_nothing",),
    ClearsTheDeviceOnly: (
        "test_a_cleared_or_removed_worker_has_nothing_in_any_tier",
        "test_a_cleared_of_a_tier_is_as_the_engine_says",
    ),
    ClearsAllTiers: ("test_a_cleared_leaves_a_host_that_is_a_copy",),
    CountsTheDeviceTwice: ("test_a_tier_goes_on_where_the_faster_ones_end", "test_it_follows_traffic_over_a_host"),
    KnowsNoAdapters: ("test_adapters_are_told_apart",),
}
"""Each wrong index, with the tests of the contract about its fault."""


def contract_of(subject):
    """Return the contract over an index for tiers of Dynamo and of vLLM."""

    class Tiered(IndexContract):
        backends = ("lru", "vllm")
        survives = ("double", "restart") if issubclass(subject, NoticesRepeats) else ()

        def make_index(self, block_size):
            return subject(self.traits, block_size) if issubclass(subject, HashesTokens) else subject(self.traits)

    Tiered.__name__ = subject.__name__
    return Tiered
