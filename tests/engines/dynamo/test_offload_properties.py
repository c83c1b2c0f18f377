"""Properties of every program on a manager with a host tier: slots, both tiers, and no block lost except by hazards."""

import pytest
from cache_helpers import POLICIES, new_manager
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import Removed, StorageTier, Stored
from pytest_kvmock.engines import BlockDetails, Scheduled
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.values import Deref, Use, lineage_hashes

MB = 1_000_000


def chain_to(block):
    """Return a chain in a small tree: block n > 0 is a child of (n - 1) // 2; names begin at 100."""
    chain = [block]
    while chain[0]:
        chain.insert(0, (chain[0] - 1) // 2)
    return [100 + each for each in chain]


CHAINS = st.integers(0, 30).map(chain_to)


def details_of(block):
    chain = chain_to(block - 100)
    parent = chain[-2] if len(chain) > 1 else None
    return BlockDetails(block, lineage_hashes(chain)[-1], parent, block + 1, (block,) * 4)


class Checked:
    """A manager with a host, requests that hold blocks, and ledgers of its events."""

    def __init__(self, backend, num_blocks, host_blocks, batch_size):
        self.engine = HostOffload(
            host_blocks, block_bytes=MB, batch_size=batch_size, to_host_gbps=1.0, to_device_gbps=2.0
        )
        self.manager = new_manager(backend, num_blocks, 4, offload=self.engine)
        self.now = 0.0
        self.requests = []
        self.swaps = []
        self.pins = []
        self.held = {StorageTier.DEVICE: set(), StorageTier.HOST_PINNED: set()}
        self.departed = set()
        self.sent_twice = False

    def use(self, chain):
        missing = [block for block in chain if block not in self.held[StorageTier.DEVICE]]
        move = Use(chain, [b + 1 for b in chain], lineage_hashes(chain), [(b,) * 4 for b in chain])
        served = self.manager.process(move)
        if served:
            self.requests.append(chain[:served])
        if served < len(chain):
            assert missing

    def free(self, which):
        if self.requests:
            self.manager.process(Deref(self.requests.pop(which % len(self.requests))[::-1]))

    def swap_in(self, chain):
        start = sum(block in self.held[StorageTier.DEVICE] for block in chain)
        pin = self.manager.pin(lineage_hashes(chain)[:start])
        assert pin is not None or len(chain) > len(set(chain) & self.held[StorageTier.DEVICE])
        outcome = self.manager.swap_in(lineage_hashes(chain)[start:], self.now)
        if isinstance(outcome, Scheduled):
            self.swaps.append((outcome, chain[start : start + outcome.num_blocks], pin))
        elif pin is not None:
            self.manager.unpin(pin)

    def end_swap(self, which):
        if self.swaps:
            outcome, blocks, pin = self.swaps.pop(which % len(self.swaps))
            if outcome.is_complete:
                details = [details_of(block) for block in blocks]
                assert len(blocks) == self.manager.register_swapped_in(details, details[0].parent, outcome)
            else:
                self.manager.put_down(outcome)
            if pin is not None:
                self.manager.unpin(pin)

    def tick(self, gap):
        self.now += gap
        self.manager.tick(self.now)

    def finish_transfers(self, _=None):
        while (deadline := self.manager.offload_deadline()) is not None:
            self.now = max(self.now, deadline)
            self.manager.tick(self.now)

    def check(self):
        manager, engine = self.manager, self.engine
        for event in manager.sink.router_events:
            held, data = self.held[event.storage_tier], event.event.data
            if isinstance(data, Stored):
                parents = [data.parent_hash, *data.block_hashes[:-1]]
                for parent, block, local in zip(parents, data.block_hashes, data.tokens_hashes, strict=True):
                    assert block not in held or self.sent_twice
                    assert block + 1 == local
                    # If an ancestor may be evicted first, the real manager anchors it at a later hit.
                    if event.storage_tier != StorageTier.DEVICE or manager.backend == "lineage":
                        assert details_of(block).parent == parent
                held.update(data.block_hashes)
                assert [(block,) * 4 for block in data.block_hashes] == list(event.token_ids)
            elif isinstance(data, Removed):
                assert held.issuperset(data.block_hashes) or self.sent_twice
                held.difference_update(data.block_hashes)
                if event.storage_tier is StorageTier.DEVICE:
                    # A second copy of a block may make the host differ from its events (tests of the engine).
                    self.sent_twice |= not self.departed.isdisjoint(data.block_hashes)
                    self.departed.update(data.block_hashes)
        manager.sink.take()
        assert self.held[StorageTier.DEVICE] == set(manager.resident())
        if not self.sent_twice:
            assert self.held[StorageTier.HOST_PINNED] == set(manager.resident(StorageTier.HOST_PINNED))
        used = {block for chain in self.requests for block in chain}
        pinned = set(manager._form.names.alias_slots.values())
        active = {slot for slot in manager._pool.registered.values() if slot.refs or slot in pinned}
        outside = engine.quarantined + sum(len(outcome.slots) for outcome, *_ in self.swaps)
        assert used == set(manager.active_blocks)
        assert len(active) + outside == manager.num_active_blocks
        assert manager.num_active_blocks + manager.num_inactive_blocks + manager._pool.reset_len == manager.num_blocks
        assert len(manager.inactive_blocks()) == manager.num_inactive_blocks


STEPS = st.one_of(
    st.tuples(st.just("use"), CHAINS),
    st.tuples(st.just("use"), CHAINS),
    st.tuples(st.just("free"), st.integers(0, 9)),
    st.tuples(st.just("free"), st.integers(0, 9)),
    st.tuples(st.just("swap_in"), CHAINS),
    st.tuples(st.just("end_swap"), st.integers(0, 9)),
    st.tuples(st.just("tick"), st.floats(0, 3)),
    st.tuples(st.just("finish_transfers"), st.none()),
)


@pytest.mark.parametrize("backend", sorted(POLICIES))
@given(st.integers(2, 12), st.integers(1, 16), st.integers(1, 4), st.lists(STEPS, max_size=40))
def test_random_traffic_conserves_slots_and_publishes_the_blocks_of_each_tier(
    backend, num_blocks, host_blocks, batch_size, steps
):
    world = Checked(backend, num_blocks, host_blocks, batch_size)
    for name, argument in steps:
        getattr(world, name)(argument)
        world.check()
    world.finish_transfers()
    world.check()
    engine = world.engine
    assert bool(engine.lost_blocks) == bool(engine.quarantined)
    if not engine.lost_blocks and not world.sent_twice and host_blocks >= len(world.departed):
        assert world.departed == world.held[StorageTier.HOST_PINNED]


@pytest.mark.parametrize("backend", sorted(POLICIES))
@given(st.lists(CHAINS, min_size=1, max_size=20))
def test_no_block_is_lost_if_the_host_holds_the_square_of_the_batch_size(backend, chains):
    """At most this many blocks are in transfer; the fixture's default batch size follows from it."""
    world = Checked(backend, 6, 9, 3)
    for chain in chains:
        for _ in range(20):
            world.use(chain)
            world.check()
            held = world.requests[-1] if world.requests else []
            whole = held == chain
            world.free(0)
            if whole:
                break
            world.finish_transfers()
    world.finish_transfers()
    world.check()
    assert world.engine.lost_blocks == 0
    assert (world.engine.quarantined, world.manager.num_active_blocks) == (0, 0)
