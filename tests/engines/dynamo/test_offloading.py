"""A logical manager with a host tier: eviction to the host, swap-in, pins, hazards, invalid input."""

import math
from uuid import UUID

import pytest
from cache_helpers import new_manager, tier_rows

from pytest_kvmock import StorageTier
from pytest_kvmock.engines import BlockDetails, BlockedOnG1Offload, NoHits, Scheduled
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.values import Deref, MoveError, Promote, Use, lineage_hash, lineage_hashes

MB = 1_000_000
HOST = "HostPinned"
PARTIAL = UUID(int=1, version=4)


def root(block):
    return lineage_hash(block, None, 0)


def host(num_blocks, *, block_bytes=MB, gbps=1.0, **options):
    return HostOffload(num_blocks, block_bytes=block_bytes, to_host_gbps=gbps, to_device_gbps=gbps, **options)


@pytest.fixture
def make(backend):
    """Make a manager of this backend with a host of the given number of blocks."""

    def make(num_blocks, host_blocks=None, block_size=4, **options):
        engine = None if host_blocks is None else host(host_blocks, **options)
        return new_manager(backend, num_blocks, block_size, offload=engine)

    return make


def use(manager, *blocks, tokens=None, parent=None):
    """Use root blocks with their own local hashes."""
    plhs = [root(block) for block in blocks]
    return manager.process(Use(blocks, [1000 + block for block in blocks], plhs, tokens, parent))


def use_chain(manager, *blocks, tokens=None):
    return manager.process(Use(blocks, [1000 + block for block in blocks], lineage_hashes(blocks), tokens))


def finish_transfers(manager):
    """Tick until no transfer is active."""
    while (deadline := manager.offload_deadline()) is not None:
        manager.tick(deadline)


def tokens_beside(manager, tier):
    return [event.token_ids for event in manager.sink.router_events if event.storage_tier == tier]


# --------------------------------------------------------------------------------------------- to the host


def test_an_offload_engine_can_be_attached_to_a_manager_without_one(make):
    manager, engine = make(16), HostOffload()
    assert manager.offload is None
    manager.attach_offload(engine)
    assert manager.offload is engine


def test_an_evicted_block_is_stored_on_the_host_when_its_transfer_is_done(make):
    manager = make(1, 1)
    assert use(manager, 1) == 1
    manager.deref(1)
    manager.sink.take()
    assert use(manager, 2) == 0
    assert tier_rows(manager.sink) == [["R", 1, [1]]]
    manager.tick(manager.offload_deadline())
    assert tier_rows(manager.sink) == [["S", 2, None, [[1, 1001]], HOST]]
    assert list(manager.resident(StorageTier.HOST_PINNED)) == [1]
    assert list(manager.resident(StorageTier.DISK)) == []


def test_a_block_evicted_from_the_host_gets_a_host_removed(make):
    manager = make(1, 1)
    for block in (1, 2):
        if not use(manager, block):
            finish_transfers(manager)
            assert use(manager, block) == 1
        manager.deref(block)
    manager.sink.take()
    assert use(manager, 3) == 0
    assert tier_rows(manager.sink) == [["R", 4, [2]], ["R", 5, [1], HOST]]
    finish_transfers(manager)
    assert tier_rows(manager.sink) == [["S", 6, None, [[2, 1002]], HOST]]


def test_the_slot_of_an_evicted_block_counts_as_active_until_the_copy_is_done(make):
    manager = make(1, 100_000)
    use(manager, 1)
    manager.deref(1)
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 1)
    assert use(manager, 2) == 0
    assert (manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks) == (1, 0, 0)
    assert manager.metrics().inflight_mutable == 1
    manager.tick(manager.offload_deadline())
    assert manager.num_active_blocks == 0
    assert use(manager, 2) == 1
    assert manager.num_active_blocks == 1


def test_a_use_without_enough_slots_evicts_for_all_blocks_that_it_still_needs(make):
    manager = make(6, 10)
    use(manager, 1, 2, 3, 4)
    manager.deref(1, 2, 3, 4)
    manager.use([PARTIAL])
    manager.sink.take()
    # One slot is empty: 10 is stored, 11 is blocked; 12 and the new partial block need slots too, 4 is cached.
    other = UUID(int=2, version=4)
    plhs = [root(10), root(11), root(12), root(4)]
    assert manager.process(Use([10, 11, 12, PARTIAL, other, 4], (), plhs)) == 1
    stored, removed = tier_rows(manager.sink)
    assert stored == ["S", 1, None, [[10, 0]]]
    assert removed == ["R", 2, [1, 2, 3]]
    assert manager.offload.quarantined == 3


def test_a_block_evicted_by_the_use_that_needs_it_counts_as_needed(make):
    manager = make(2, 10)
    use(manager, 1, 2)
    manager.deref(1, 2)
    # 3 evicts 1; now 1 must be stored again, so 2 is evicted too.
    assert use(manager, 3, 1) == 0
    assert tier_rows(manager.sink)[1:] == [["R", 1, [1, 2]]]


def test_a_host_stored_names_the_preceding_block_as_parent_and_not_the_anchor(make):
    manager = make(4, 10)
    use(manager, 1, 2)
    manager.deref(2, 1)
    manager.process(Use([1, 5, 6], [1, 5, 6], [root(1), lineage_hash(5, 1, 1), lineage_hash(6, 5, 2)]))
    manager.deref(6, 5, 1)
    manager.sink.take()
    use(manager, 10, 11, 12, 13)
    finish_transfers(manager)
    stored = {row[3][0][0]: row[2] for row in tier_rows(manager.sink) if row[0] == "S" and row[-1] == HOST}
    assert stored == {1: None, 2: 1, 5: 1, 6: 5}


def test_a_promoted_block_is_stored_on_the_host_with_its_hashes_parent_and_tokens(make):
    manager = make(1, 4)
    manager.use([PARTIAL])
    manager.process(Promote(PARTIAL, 7, 3, 77, lineage_hash(7, 3, 1), [1, 2, 3, 4]))
    manager.deref(7)
    manager.sink.take()
    assert use(manager, 8) == 0
    finish_transfers(manager)
    assert tokens_beside(manager, StorageTier.HOST_PINNED) == [[[1, 2, 3, 4]]]
    assert tier_rows(manager.sink)[-1] == ["S", 2, 3, [[7, 77]], HOST]


def test_host_events_carry_token_ids_only_for_blocks_that_had_them(make):
    manager = make(2, 4)
    use(manager, 1, tokens=[[1, 1, 1, 1]])
    use(manager, 2)
    manager.deref(1, 2)
    use(manager, 3, 4)
    finish_transfers(manager)
    assert tokens_beside(manager, StorageTier.HOST_PINNED) == [[[1, 1, 1, 1]], None]


def test_blocks_already_on_the_host_are_not_copied_and_free_their_slots_at_once(make):
    manager = make(1, 4)
    for block in (1, 2):
        if not use(manager, block):
            finish_transfers(manager)
            use(manager, block)
        manager.deref(block)
    assert use(manager, 1) == 0  # evicts 2
    finish_transfers(manager)
    assert use(manager, 1) == 1
    manager.deref(1)
    manager.sink.take()
    assert use(manager, 3) == 0
    assert (
        tier_rows(manager.sink),
        manager.offload_deadline(),
        manager.num_active_blocks,
    ) == ([["R", 7, [1]]], None, 0)
    assert use(manager, 3) == 1


def test_deref_and_promote_are_never_blocked_by_offloading(make):
    manager = make(2, 4)
    manager.use([1, PARTIAL])
    manager.promote(PARTIAL, 2, parent=1)
    assert manager.process(Deref([2, 1])) == 1
    assert (manager.offload_deadline(), manager.offload.quarantined) == (None, 0)


# ------------------------------------------------------------------------------------------------ hazards


def test_a_batch_larger_than_the_host_is_lost_with_its_slots(make):
    manager = make(3, 2)
    use(manager, 1, 2, 3)
    manager.deref(1, 2, 3)
    assert use(manager, 4, 5, 6) == 0
    assert (manager.offload_deadline(), manager.num_active_blocks, manager.offload.quarantined) == (None, 3, 3)
    manager.tick(1e6)
    assert (manager.num_active_blocks, manager.offload.lost_blocks, manager.offload.resident()) == (3, 3, [])


def test_one_lost_batch_loses_the_slots_of_all_batches_of_its_call(make):
    manager = make(5, 4, batch_size=2)
    use(manager, 1, 2, 3, 4, 5)
    manager.deref(1, 2, 3, 4, 5)
    # 1 and 2, then 3 and 4 are in transfer; 5 waits, because the host has no slot for it until they arrive.
    assert use(manager, 11, 12, 13, 14, 15) == 0
    finish_transfers(manager)
    assert (manager.offload.lost_blocks, manager.offload.quarantined) == (0, 0)
    assert len(manager.offload.resident()) == 4
    narrow = make(5, 3, batch_size=2)
    use(narrow, 1, 2, 3, 4, 5)
    narrow.deref(1, 2, 3, 4, 5)
    assert use(narrow, 11, 12, 13, 14, 15) == 0
    finish_transfers(narrow)
    assert (narrow.offload.lost_blocks, narrow.offload.quarantined) == (2, 5)
    assert None is narrow.offload_deadline()


# ------------------------------------------------------------------------------------------------- swap-in


def swapped_out(make, num_blocks=4, host_blocks=8, **options):
    """Return a manager whose host holds the chain 1, 2, 3 and whose device does not."""
    manager = make(num_blocks, host_blocks, **options)
    use_chain(manager, 1, 2, 3)
    manager.deref(3, 2, 1)
    fill = range(100, 100 + num_blocks)
    use(manager, *fill)
    finish_transfers(manager)
    assert set(manager.resident(StorageTier.HOST_PINNED)) == {1, 2, 3}
    held = [block for block in fill if manager.references(block)]
    manager.deref(*held)
    manager.sink.take()
    return manager


CHAIN = lineage_hashes([1, 2, 3])


def test_without_an_engine_there_is_nothing_to_swap_in(make):
    assert NoHits() == make(8).swap_in([root(1), root(2)])


def test_a_prefix_is_swapped_in_and_hit_without_a_stored_of_its_own(make):
    manager = swapped_out(make)
    swap = manager.swap_in([*CHAIN, root(99)], 10.0)
    assert isinstance(swap, Scheduled)
    assert (swap.num_blocks, swap.is_complete, len(swap.slots)) == (3, False, 3)
    assert manager.offload_deadline() == 13.0
    manager.tick(12.9)
    assert not swap.is_complete
    manager.tick(13.0)
    assert swap.is_complete
    blocks = [BlockDetails(n, plh, None, 1000 + n) for n, plh in zip((1, 2, 3), CHAIN, strict=True)]
    inactive = manager.num_inactive_blocks
    assert manager.register_swapped_in(blocks, None, swap) == 3
    [[kind, _, parent, stored]] = tier_rows(manager.sink)
    assert (kind, parent, stored) == ("S", None, [[1, 1001], [2, 1002], [3, 1003]])
    assert inactive + 3 == manager.num_inactive_blocks
    assert use_chain(manager, 1, 2, 3) == 3
    assert tier_rows(manager.sink) == []


def test_a_swap_in_that_needs_evictions_is_blocked_until_they_are_done(make):
    manager = make(2, 8)
    for chain in ((1, 2), (10, 11)):
        if not use_chain(manager, *chain):
            finish_transfers(manager)
            assert use_chain(manager, *chain) == 2
        manager.deref(*chain[::-1])
    manager.sink.take()
    assert BlockedOnG1Offload() == manager.swap_in(lineage_hashes([1, 2]), 5.0)
    assert tier_rows(manager.sink) == [["R", 5, [11, 10]]]
    finish_transfers(manager)
    assert isinstance(manager.swap_in(lineage_hashes([1, 2]), 9.0), Scheduled)


def test_a_swap_in_without_free_slots_hits_nothing(make):
    manager = make(2, 8)
    use_chain(manager, 1, 2)
    manager.deref(2, 1)
    assert use(manager, 10, 11) == 0
    finish_transfers(manager)
    assert use(manager, 10, 11) == 2
    assert NoHits() == manager.swap_in(lineage_hashes([1, 2]), 5.0)
    assert manager.num_active_blocks == 2


def test_swapped_in_blocks_are_stored_below_the_given_parent(make):
    manager = make(8)
    swap = manager._below._reserve(2)
    blocks = [BlockDetails(12, root(12), None, 120, [1] * 4), BlockDetails(13, root(13), None, 130, [2] * 4)]
    assert manager.register_swapped_in(blocks, 11, swap) == 2
    assert tokens_beside(manager, StorageTier.DEVICE) == [[[1] * 4, [2] * 4]]
    assert tier_rows(manager.sink) == [["S", 0, 11, [[12, 120], [13, 130]]]]
    assert (manager.num_inactive_blocks, manager.num_active_blocks) == (2, 0)


def test_a_stored_has_token_ids_only_if_every_block_has_them(make):
    manager = make(8)
    blocks = [BlockDetails(12, root(12), None, 120, [1] * 4), BlockDetails(13, root(13), None, 130)]
    manager.register_swapped_in(blocks, None, manager._below._reserve(2))
    assert tokens_beside(manager, StorageTier.DEVICE) == [None]


def test_a_swapped_in_block_that_the_device_already_has_becomes_the_parent_of_the_next(make):
    manager = make(8, 8)
    use(manager, 2)  # active
    use(manager, 4)
    manager.deref(4)  # inactive
    manager.sink.take()
    blocks = [BlockDetails(block, root(block), None, block * 10) for block in (1, 2, 3, 4, 5, 6)]
    assert manager.register_swapped_in(blocks, 9, manager._below._reserve(6)) == 6
    assert tier_rows(manager.sink) == [
        ["S", 2, 9, [[1, 10]]],
        ["S", 3, 2, [[3, 30]]],
        ["S", 4, 4, [[5, 50], [6, 60]]],
    ]
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (1, 5)


@pytest.mark.parametrize(("slots", "taken", "inactive"), [(1, 1, 1), (3, 3, 3), (5, 3, 3)])
def test_a_swap_in_with_fewer_slots_than_blocks_returns_the_number_registered(make, slots, taken, inactive):
    manager = make(8)
    blocks = [BlockDetails(block, root(block)) for block in (1, 2, 3)]
    assert taken == manager.register_swapped_in(blocks, None, manager._below._reserve(slots))
    assert (0, inactive) == (manager.num_active_blocks, manager.num_inactive_blocks)


def test_a_swapped_in_block_keeps_its_token_ids_for_its_next_offload(make):
    manager = make(1, 1)
    blocks = [BlockDetails(1, root(1), None, 101, [1, 2, 3, 4])]
    assert manager.register_swapped_in(blocks, None, manager._below._reserve(1)) == 1
    manager.sink.take()
    assert use(manager, 2) == 0
    manager.tick(manager.offload_deadline())
    assert tokens_beside(manager, StorageTier.HOST_PINNED) == [[[1, 2, 3, 4]]]


def test_dropping_a_swap_in_frees_its_slots_and_pins_only_once(make):
    manager = swapped_out(make)
    swap = manager.swap_in(CHAIN, 10.0)
    active = manager.num_active_blocks
    manager.put_down(swap)
    assert active - 3 == manager.num_active_blocks
    for again in (manager.put_down, lambda swap: manager.register_swapped_in([], None, swap)):
        with pytest.raises(ValueError) as error:
            again(swap)
        assert str(error.value) == (
            f"<Scheduled of 3 blocks, put down> is not open on {manager!r}: a swap-in is put down, or registered, once"
        )
    assert active - 3 == manager.num_active_blocks


def test_a_swap_in_of_another_manager_is_refused(make):
    swap = swapped_out(make).swap_in(CHAIN, 10.0)
    with pytest.raises(ValueError, match="is not open on"):
        make(4, 4).put_down(swap)
    assert len(swap.slots) == 3


def test_a_pinned_prefix_cannot_be_evicted_from_the_host(make):
    manager = swapped_out(make, 8, 3)
    swap = manager.swap_in(CHAIN, 10.0)
    free = 8 - manager.num_active_blocks
    use(manager, *range(200, 200 + free))
    manager.deref(*[block for block in range(200, 200 + free) if manager.references(block)])
    use(manager, *range(300, 300 + free))
    assert set(manager.resident(StorageTier.HOST_PINNED)) == {1, 2, 3}
    assert manager.offload.lost_blocks  # there was no room for them
    manager.put_down(swap)


# --------------------------------------------------------------------------------------------------- pins


def test_a_pinned_block_is_active_and_has_no_reference(make):
    manager = make(4, 4)
    use_chain(manager, 1, 2, 3)
    manager.deref(3, 2, 1)
    pin = manager.pin(CHAIN[:2])
    assert (manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks) == (2, 0, 1)
    assert manager.active_blocks == {}
    assert use_chain(manager, 1, 2, 3) == 3
    assert manager.active_blocks == {1: 1, 2: 1, 3: 1}
    manager.unpin(pin)
    manager.deref(3, 2, 1)
    assert manager.inactive_blocks() == [3, 2, 1]
    assert tier_rows(manager.sink)[1:] == []


def test_an_incompletely_cached_prefix_is_not_pinned(make):
    manager = make(4, 4)
    use_chain(manager, 1, 2)
    manager.deref(2, 1)
    assert None is manager.pin(CHAIN)
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 2)


def test_a_pin_can_be_dropped_only_once(make):
    manager = make(4, 4)
    use_chain(manager, 1)
    first, second = manager.pin(CHAIN[:1]), manager.pin(CHAIN[:1])
    manager.deref(1)
    manager.unpin(first)
    assert manager.num_active_blocks == 1
    manager.unpin(second)
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 1)
    with pytest.raises(ValueError) as error:
        manager.unpin(first)
    assert str(error.value) == f"<Pin of 1 blocks, dropped> is not a pin of {manager!r}: a pin is dropped once"
    assert (manager.num_active_blocks, manager.num_inactive_blocks) == (0, 1)


# --------------------------------------------------------------------------------------------- the rest


def test_clear_cancels_transfers_and_empties_the_host(make):
    manager = swapped_out(make)
    swap = manager.swap_in(CHAIN, 10.0)
    use_chain(manager, 40, 41)
    held = [block for block in (40, 41) if manager.references(block)]
    manager.deref(*held)
    use(manager, 50, 51)
    manager.deref(*[block for block in (50, 51) if manager.references(block)])
    manager.pin([])
    assert manager.clear()
    assert (manager.num_active_blocks, manager.num_inactive_blocks, manager.offload_deadline()) == (0, 0, None)
    assert list(manager.resident(StorageTier.HOST_PINNED)) == []
    assert tier_rows(manager.sink)[-1][:1] == ["C"]
    assert not swap.is_open
    manager.tick(100.0)
    assert tier_rows(manager.sink) == []
    assert use_chain(manager, 1, 2, 3, 4) == 4


@pytest.mark.parametrize("now", [math.nan, math.inf, -1.0, "soon"])
def test_an_invalid_time_is_refused_and_changes_nothing(make, now):
    for manager in (make(2), swapped_out(make)):
        before = (manager.num_active_blocks, manager.inactive_blocks(), manager.offload_deadline())
        for call in (manager.tick, lambda now, manager=manager: manager.swap_in(CHAIN, now)):
            with pytest.raises(ValueError) as error:
                call(now)
            assert str(error.value) == f"a time must be a finite number of at least 0 (ms), got {now!r}"
        assert before == (manager.num_active_blocks, manager.inactive_blocks(), manager.offload_deadline())


def test_a_value_that_is_not_a_lineage_hash_is_refused(make):
    manager = make(2, 2)
    for call in (manager.swap_in, manager.pin):
        with pytest.raises(MoveError, match="lineage hashes are expected"):
            call([-1])


def test_an_offload_engine_can_be_attached_only_once_and_to_an_empty_manager(make):
    manager = make(2, 2)
    with pytest.raises(ValueError, match="has an offload engine already"):
        manager.attach_offload(HostOffload())
    used = make(2)
    used.use([1])
    with pytest.raises(ValueError) as error:
        used.attach_offload(HostOffload())
    assert str(error.value) == f"an offload engine is attached to a manager that is empty, not to {used!r}"
    assert None is used.offload


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1 (blocks of the host), got 0"),
        ({"block_bytes": -1}, "block_bytes must be an integer of at least 0; 0: a transfer takes no time, got -1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        (
            {"to_host_gbps": math.nan},
            "a bandwidth must be a finite number of at least 0 (GB/s; 0 is infinite), got nan",
        ),
    ],
)
def test_invalid_host_options_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        HostOffload(**options)
    assert str(error.value) == message
