"""Puts and gets between managers of one fabric: transferred payloads, and refusals, which change nothing."""

import asyncio

import pytest
from block_helpers import BLOCK_BYTES, MODEL, PAGE, chain, device_layout, fill, host_layout, make_manager, register

from pytest_kvmock.contrib.block_manager import (
    BlockClosed,
    CancellationToken,
    CountMismatch,
    Fabric,
    IncompatibleTypes,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    MismatchedWorkerID,
    NixlBlockSet,
    ProgressEngineShutdown,
    RemoteBlockSetError,
    StaleBlockDescriptor,
    TransferError,
    TransferRequestGet,
    TransferRequestPut,
    WorkerUnreachable,
)


def manager_in(fabric, worker_id, model=MODEL, **runtime):
    runtime = KvManagerRuntimeConfig(worker_id=worker_id, **runtime)
    return KvBlockManager(
        KvBlockManagerConfig(runtime=runtime, model=model, device_layout=device_layout(), host_layout=host_layout()),
        fabric=fabric,
    )


@pytest.fixture
def fabric():
    return Fabric()


@pytest.fixture
def managers(fabric):
    """Return workers 0, 1 and 2, each with the block sets of the others."""
    made = [manager_in(fabric, worker_id) for worker_id in range(3)]
    fabric.exchange_blocksets()
    return made


def host_blocks(manager, count=2, payload=b""):
    """Return mutable blocks of the host; with `payload`, each has its own."""
    blocks = manager.host().allocate_blocks_blocking(count)
    for number, block in enumerate(blocks):
        block.payload = payload + bytes([number]) if payload else b""
    return blocks


def remote(manager, blocks):
    return manager.get_remote_blocks_mutable(blocks.as_block_descriptor_set())


def payloads(blocks):
    return [block.payload for block in blocks]


# --------------------------------------------------------------------------------------------------- what travels


def test_a_put_writes_payloads_into_remote_blocks(fabric, managers):
    mine, theirs = host_blocks(managers[0], 2, b"kv"), host_blocks(managers[1])
    request = TransferRequestPut(mine, remote(managers[0], theirs))
    assert (payloads(theirs), request.is_executed) == ([b"", b""], False)
    request.execute()
    assert (payloads(theirs), payloads(mine)) == ([b"kv\0", b"kv\1"], [b"kv\0", b"kv\1"])
    assert fabric.transfers == [("put", 0, 1, 2, 6)]


def test_a_get_reads_payloads_of_remote_blocks(fabric, managers):
    theirs = register(managers[1].device(), chain(2))
    first = fill(managers[1].device(), chain(1, 100))
    first[0].payload = b"first"
    sources = managers[0].get_remote_blocks_immutable(first.as_block_descriptor_set())
    sources += managers[0].get_remote_blocks_immutable(theirs.as_block_descriptor_set())
    mine = host_blocks(managers[0], 3)
    mine[1].payload = b"is overwritten"
    TransferRequestGet(sources, mine).execute()
    assert payloads(mine) == [b"first", b"", b""]
    assert fabric.transfers == [("get", 0, 1, 3, 5)]


def test_registered_blocks_are_put_and_read(managers):
    block, other = fill(managers[0].device(), chain(2))
    block.payload, other.payload = b"one", b"two"
    registered = managers[0].device().register_blocks_blocking([block, other])
    theirs = host_blocks(managers[1])
    TransferRequestPut(registered, remote(managers[0], theirs)).execute()
    assert payloads(theirs) == [b"one", b"two"]
    back = host_blocks(managers[2])
    TransferRequestGet(
        managers[2].get_remote_blocks_immutable(registered.as_block_descriptor_set()), reversed(back)
    ).execute()
    assert payloads(back) == [b"two", b"one"]


def test_a_transfer_does_not_copy_state_tokens_or_hashes(managers):
    mine = fill(managers[0].host(), chain(1))
    mine[0].payload = b"kv"
    theirs = host_blocks(managers[1], 1)
    TransferRequestPut(mine, remote(managers[0], theirs)).execute()
    assert (theirs[0].state, theirs[0].tokens, theirs[0].payload) == ("Reset", None, b"kv")
    theirs[0].apply_token_block(chain(1)[0])
    (found,) = managers[1].host().register_blocks_blocking(theirs)
    assert (mine[0].sequence_hash, b"kv") == (found.sequence_hash, found.payload)


def test_a_put_between_pools_of_one_manager_does_not_use_the_fabric(fabric, managers):
    mine = host_blocks(managers[0], 2, b"kv")
    device = managers[0].device().allocate_blocks_blocking(2)
    TransferRequestPut(mine, device).execute()
    assert (payloads(device), fabric.transfers) == ([b"kv\0", b"kv\1"], [])


def test_a_manager_without_fabric_puts_between_its_own_blocks():
    one, other = host_blocks(make_manager(), 2, b"kv")
    TransferRequestPut([one], [other]).execute()
    assert other.payload == b"kv\0"


def test_a_source_block_can_occur_twice_in_a_request(managers):
    (mine,) = host_blocks(managers[0], 1, b"kv")
    theirs = host_blocks(managers[1], 2)
    TransferRequestPut([mine, mine], remote(managers[0], theirs)).execute()
    assert payloads(theirs) == [b"kv\0"] * 2


def test_one_transfer_request_can_reach_several_workers(fabric, managers):
    mine = host_blocks(managers[0], 3, b"kv")
    theirs = [host_blocks(managers[1], 1), host_blocks(managers[2], 2)]
    TransferRequestPut(mine, [block for blocks in theirs for block in remote(managers[0], blocks)]).execute()
    assert [payloads(blocks) for blocks in theirs] == [[b"kv\0"], [b"kv\1", b"kv\2"]]
    assert fabric.transfers == [("put", 0, 1, 1, 3), ("put", 0, 2, 2, 6)]


def test_a_full_payload_is_transferred_through_three_workers(managers):
    whole = bytes(range(256)) + bytes(BLOCK_BYTES - 256)
    blocks = [host_blocks(manager, 1) for manager in managers]
    blocks[0][0].payload = whole
    TransferRequestPut(blocks[0], remote(managers[0], blocks[1])).execute()
    TransferRequestGet(remote(managers[2], blocks[1]), blocks[2]).execute()
    blocks[0][0].payload = b""
    TransferRequestPut(blocks[2], remote(managers[2], blocks[0])).execute()
    assert whole == blocks[0][0].payload


def test_a_transfer_request_keeps_copies_of_its_lists(managers):
    mine, theirs = host_blocks(managers[0], 2, b"kv"), host_blocks(managers[1])
    sources, destinations = list(mine), remote(managers[0], theirs)
    request = TransferRequestPut(iter(sources), iter(destinations))
    sources.clear()
    destinations.pop()
    mine[0].payload = b"later"  # the request transfers the payloads at the time of its execution
    request.execute()
    assert payloads(theirs) == [b"later", b"kv\1"]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("sources", "destinations", "error", "message"),
    [
        (1, 2, CountMismatch, "Mismatched source/destination counts: 1 sources, 2 destinations"),
        (2, 0, CountMismatch, "Mismatched source/destination counts: 2 sources, 0 destinations"),
        (0, 0, TransferError, "Sources cannot be empty"),
    ],
)
def test_different_counts_and_empty_lists_are_refused(managers, sources, destinations, error, message):
    mine, theirs = host_blocks(managers[0]), host_blocks(managers[1])
    for make in (
        lambda: TransferRequestPut(mine[:sources], remote(managers[0], theirs)[:destinations]),
        lambda: TransferRequestPut(mine[:sources], managers[0].device().allocate_blocks_blocking(2)[:destinations]),
        lambda: TransferRequestGet(remote(managers[0], theirs)[:sources], mine[:destinations]),
    ):
        with pytest.raises(error) as raised:
            make()
        assert str(raised.value) == message


def test_a_count_mismatch_error_has_both_counts(managers):
    with pytest.raises(CountMismatch) as raised:
        TransferRequestPut(host_blocks(managers[0], 3), host_blocks(managers[0], 1))
    assert (raised.value.sources, raised.value.destinations) == (3, 1)


def test_a_duplicate_destination_is_refused(managers):
    mine, theirs = host_blocks(managers[0], 2, b"kv"), host_blocks(managers[1], 1)
    blocks = remote(managers[0], theirs) + remote(managers[0], theirs)
    local = managers[0].device().allocate_blocks_blocking(1)
    for request, place in (
        (TransferRequestPut(mine, blocks), "block 0 of set 1 of worker 1"),
        (TransferRequestPut(mine, [*local, *local]), "block 0 of set 2 of worker 0"),
        (TransferRequestGet(blocks, [mine[1], mine[1]]), "block 1 of set 1 of worker 0"),
    ):
        for use in (request.validate_blocks, request.execute):
            with pytest.raises(TransferError) as raised:
                use()
            assert str(raised.value) == f"Duplicate destination blocks: {place} is there twice"
    assert (payloads(theirs), payloads(local), payloads(mine)) == ([b""], [b""], [b"kv\0", b"kv\1"])


def test_a_block_that_is_both_source_and_destination_is_refused(managers):
    mine = host_blocks(managers[0], 3, b"kv")
    theirs = remote(managers[1], mine)  # the same blocks, as worker 1 sees them
    for request, more in (
        (TransferRequestPut(mine[:2], mine[1:]), ""),
        (TransferRequestPut(mine[:2], theirs[1:]), ""),
        (TransferRequestPut(mine[1:], theirs[1:]), ", and 1 more"),
        (TransferRequestGet(theirs[1:], mine[1:]), ", and 1 more"),
    ):
        for use in (request.validate_blocks, request.execute):
            with pytest.raises(TransferError) as raised:
                use()
            expected = "Duplicate entries in source and destination list: block 1 of set 1 of worker 0 is in both"
            assert str(raised.value) == expected + more
    assert payloads(mine) == [b"kv\0", b"kv\1", b"kv\2"]


def test_blocks_of_the_wrong_kind_are_refused(managers):
    mine, theirs = host_blocks(managers[0], 1), remote(managers[0], host_blocks(managers[1], 1))
    immutable = managers[0].get_remote_blocks_immutable(
        register(managers[1].host(), chain(1)).as_block_descriptor_set()
    )
    registered = register(managers[0].host(), chain(1))
    local = managers[0].device().allocate_blocks_blocking(1)
    for make, what in (
        (
            lambda: TransferRequestPut(theirs, mine),
            "the sources of a put are MutableBlocks or ImmutableBlocks of one's own",
        ),
        (
            lambda: TransferRequestPut(mine, immutable),
            "the destinations of a put are MutableRemoteBlocks, or MutableBlocks",
        ),
        (
            lambda: TransferRequestPut(mine, registered),
            "the destinations of a put are MutableRemoteBlocks, or MutableBlocks",
        ),
        (
            lambda: TransferRequestPut(mine * 2, [*theirs, *local]),
            "the destinations of a put are all remote, or all local",
        ),
        (lambda: TransferRequestGet(local, mine), "the sources of a get are remote blocks"),
        (lambda: TransferRequestGet(theirs, registered), "the destinations of a get are MutableBlocks of one's own"),
        (lambda: TransferRequestGet(theirs, theirs), "the destinations of a get are MutableBlocks of one's own"),
        (
            lambda: TransferRequestPut([0], mine),
            "the sources of a put are MutableBlocks or ImmutableBlocks of one's own",
        ),
    ):
        with pytest.raises(IncompatibleTypes) as raised:
            make()
        assert str(raised.value).startswith(f"Incompatible block types provided: {what}, got ")


def test_a_transfer_request_can_be_executed_only_once(fabric, managers):
    mine, theirs = host_blocks(managers[0], 1, b"kv"), host_blocks(managers[1], 1)
    request = TransferRequestPut(mine, remote(managers[0], theirs))
    request.execute()
    with pytest.raises(TransferError, match=r"^this TransferRequestPut was executed before; make another$"):
        request.execute()
    assert len(fabric.transfers) == 1
    assert repr(request) == "<TransferRequestPut of 1 blocks, executed>"


def test_blocks_of_another_worker_are_refused(managers):
    blocks = [host_blocks(manager, 1, b"kv") for manager in managers]
    for request, message in (
        (
            TransferRequestPut(blocks[2], remote(managers[0], blocks[1])),
            (
                "Mismatched Source worker ID: 2 != 0: block 0 of set 1 of worker 2 is of another worker than the one "
                "that carries the put out"
            ),
        ),
        (
            TransferRequestPut(blocks[0], blocks[1]),
            (
                "Mismatched Destination worker ID: 1 != 0: block 0 of set 1 of worker 1 is of another worker than the "
                "one that carries the put out"
            ),
        ),
        (
            TransferRequestPut(
                host_blocks(managers[0]), remote(managers[0], blocks[1]) + remote(managers[1], blocks[2])
            ),
            (
                "Mismatched Destination worker ID: 1 != 0: block 0 of set 1 of worker 2 is asked for by another worker "
                "than the one that carries the put out"
            ),
        ),
        (
            TransferRequestGet(remote(managers[0], blocks[1]), blocks[2]),
            (
                "Mismatched Destination worker ID: 2 != 0: block 0 of set 1 of worker 2 is of another worker than the "
                "one that carries the get out"
            ),
        ),
    ):
        request.validate_blocks()
        with pytest.raises(MismatchedWorkerID) as raised:
            request.execute()
        assert str(raised.value) == message
    assert [payloads(each) for each in blocks] == [[b"kv\0"]] * 3


def test_blocks_of_different_sizes_are_refused(fabric):
    small = manager_in(fabric, 0)
    large = manager_in(fabric, 1, KvManagerModelConfig(num_layers=4, page_size=PAGE, inner_dim=16))
    fabric.exchange_blocksets()
    mine, theirs = host_blocks(small, 1, b"kv"), host_blocks(large, 1)
    with pytest.raises(TransferError) as raised:
        TransferRequestPut(mine, remote(small, theirs)).execute()
    assert str(raised.value) == (
        "blocks differ in size: block 0 of the host pool of worker 0 has 384 bytes, block 0 of the host pool of "
        "worker 1 has 512"
    )
    assert payloads(theirs) == [b""]


# ----------------------------------------------------------------------------------------- stale, closed, cut off


def test_a_descriptor_of_a_returned_block_is_stale(fabric, managers):
    mine, theirs = host_blocks(managers[0], 2, b"kv"), host_blocks(managers[1])
    blocks = remote(managers[0], theirs)
    theirs[1].close()
    with pytest.raises(StaleBlockDescriptor) as raised:
        TransferRequestPut(mine, blocks).execute()
    assert str(raised.value) == (
        "the descriptor of block 1 of set 1 of worker 1 is stale: it was given back, or evicted, since it was "
        "described (generation 1, not 0)"
    )
    assert (raised.value.worker_id, raised.value.block_set_idx, raised.value.block_idx) == (1, 1, 1)
    assert (theirs[0].payload, fabric.transfers) == (b"", [])  # the other block was not written either


def test_a_descriptor_of_a_block_with_a_new_owner_is_stale(managers):
    theirs = host_blocks(managers[1], 16)
    blocks = remote(managers[0], theirs)
    theirs.close()
    managers[1].flush()
    owned = host_blocks(managers[1], 16)
    with pytest.raises(StaleBlockDescriptor):
        TransferRequestPut(host_blocks(managers[0], 1, b"kv"), blocks[:1]).execute()
    assert set(payloads(owned)) == {b""}


def test_a_descriptor_is_stale_for_an_evicted_block_but_not_for_an_inactive_one(managers):
    pool = managers[1].host()
    filled = fill(pool, chain(1))
    filled[0].payload = b"kv"
    registered = pool.register_blocks_blocking(filled)
    blocks = managers[0].get_remote_blocks_immutable(registered.as_block_descriptor_set())
    registered.close()
    managers[1].flush()
    mine = host_blocks(managers[0], 1)
    TransferRequestGet(blocks, mine).execute()
    assert payloads(mine) == [b"kv"]
    with host_blocks(managers[1], 16), pytest.raises(StaleBlockDescriptor):
        TransferRequestGet(blocks, mine).execute()
    assert payloads(mine) == [b"kv"]


def test_a_block_registered_since_its_description_can_be_read_but_not_written(managers):
    theirs = fill(managers[1].host(), chain(1))
    theirs[0].payload = b"kv"
    blocks = remote(managers[0], theirs)
    (registered,) = managers[1].host().register_blocks_blocking(theirs)
    mine = host_blocks(managers[0], 1, b"no")
    with pytest.raises(
        StaleBlockDescriptor, match=r"it was registered since it was described, and may no longer be written"
    ):
        TransferRequestPut(mine, blocks).execute()
    assert registered.payload == b"kv"
    TransferRequestGet(blocks, mine).execute()
    assert payloads(mine) == [b"kv"]


def test_a_block_set_with_nonexistent_blocks_gives_stale_descriptors(fabric):
    mine, other = manager_in(fabric, 0), manager_in(fabric, 1)
    honest = other.export_local_blockset()
    big = type(honest.block_sets[1])("dram", 99, 3, PAGE, 16)
    mine.import_remote_blockset(NixlBlockSet(1, {1: big, 5: big}, "1"))
    descriptors = host_blocks(other, 1).as_block_descriptor_set()
    for change in ({"block_indices": (98,)}, {"block_set_idx": 5}):
        fields = {name: getattr(descriptors, name) for name in descriptors.__dataclass_fields__} | change
        with pytest.raises(StaleBlockDescriptor, match=r"is stale: its worker has no such block$"):
            TransferRequestPut(
                host_blocks(mine, 1), mine.get_remote_blocks_mutable(type(descriptors)(**fields))
            ).execute()


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_closed_handle_is_refused(managers, side):
    mine, theirs = host_blocks(managers[0], 2), host_blocks(managers[0], 2, b"kv")
    request = TransferRequestPut(mine, theirs)
    (mine if side == "source" else theirs)[1].close()
    for use in (request.validate_blocks, request.execute):
        with pytest.raises(BlockClosed, match=r"^this MutableBlock holds no block any more"):
            use()
    assert side == "source" or theirs[0].payload == b"kv\0"


def test_a_closed_manager_transfers_nothing(managers):
    mine, theirs = host_blocks(managers[0], 1, b"kv"), host_blocks(managers[1], 1)
    put = TransferRequestPut(mine, remote(managers[0], theirs))
    local = TransferRequestPut(mine, managers[0].device().allocate_blocks_blocking(1))
    managers[0].close()
    for request in (put, local):
        with pytest.raises(ProgressEngineShutdown, match=r"a put of worker 0, whose manager was closed"):
            request.execute()
    assert payloads(theirs) == [b""]


def test_a_closed_manager_cannot_look_up_remote_blocks(managers):
    theirs = host_blocks(managers[1], 1, b"kv")
    (block,) = remote(managers[0], theirs)
    assert [look_up().payload for look_up in (block.block_to_read, block.block_to_write)] == [b"kv\0"] * 2
    managers[0].close()
    for look_up in (block.block_to_read, block.block_to_write):
        with pytest.raises(
            ProgressEngineShutdown, match=r"^Progress engine shutdown: a transfer on the manager of worker 0"
        ):
            look_up()


def test_blocks_of_a_closed_manager_cannot_be_transferred_by_its_successor(fabric, managers):
    former, theirs = host_blocks(managers[0], 2, b"old"), host_blocks(managers[1], 1, b"kv")
    managers[0].close()
    again = manager_in(fabric, 0)
    again.import_remote_blockset(managers[1].export_local_blockset())
    mine, blocks = host_blocks(again, 2, b"new"), remote(again, theirs)
    for request, kind in (
        (TransferRequestPut(former[:1], blocks), "put"),
        (TransferRequestGet(blocks, former[:1]), "get"),
        (TransferRequestPut(mine[:1], former[1:]), "put"),
        (TransferRequestPut(former[:1], mine[1:]), "put"),
    ):
        with pytest.raises(ProgressEngineShutdown, match=rf"^Progress engine shutdown: a {kind} of worker 0, whose"):
            request.execute()
    assert tuple(map(payloads, (former, theirs, mine))) == ([b"old\0", b"old\1"], [b"kv\0"], [b"new\0", b"new\1"])
    assert fabric.transfers == []


def test_blocks_of_two_managers_with_the_same_worker_id_are_distinguished():
    one, other = make_manager(7), make_manager(7)
    mine, theirs = host_blocks(one, 2, b"kv"), host_blocks(other, 2)
    for targets in (theirs, [mine[1], theirs[0]]):
        with pytest.raises(MismatchedWorkerID) as raised:
            TransferRequestPut(mine[:1] * len(targets), targets).execute()
    assert str(raised.value) == (
        "Mismatched Destination worker ID: 7 != 7: block 0 of set 1 of worker 7 is of another manager than the one "
        "that carries the put out, with the same worker ID"
    )
    assert payloads(theirs) == [b"", b""]


def test_a_get_refuses_blocks_of_another_manager_with_the_same_worker_id(managers):
    stranger = make_manager(0)
    theirs, mine = host_blocks(managers[1], 2, b"kv"), host_blocks(managers[0], 1)
    with pytest.raises(
        MismatchedWorkerID, match=r"^Mismatched Destination worker ID: 0 != 0: .* is of another manager"
    ):
        TransferRequestGet(remote(managers[0], theirs), [mine[0], host_blocks(stranger, 1)[0]]).execute()
    assert payloads(mine) == [b""]


def test_a_closed_worker_is_unreachable(fabric, managers):
    mine, theirs = host_blocks(managers[0], 1, b"kv"), host_blocks(managers[1], 1)
    put = TransferRequestPut(mine, remote(managers[0], theirs))
    managers[1].close()
    assert (fabric.workers, fabric.is_reachable(0, 1), fabric.is_reachable(0, 2)) == ([0, 2], False, True)
    with pytest.raises(WorkerUnreachable) as raised:
        put.execute()
    assert str(raised.value) == "worker 0 does not reach worker 1: its manager was closed"
    assert (raised.value.worker_id, raised.value.remote_worker_id) == (0, 1)


def test_workers_that_share_a_token_are_closed_together(fabric):
    token = CancellationToken()
    for worker_id in (0, 1):
        manager_in(fabric, worker_id, cancellation_token=token)
    manager_in(fabric, 2)
    token.cancel()
    assert fabric.workers == [2]


def test_block_sets_imported_before_a_restart_do_not_reach_the_restarted_worker(fabric, managers):
    theirs = host_blocks(managers[1], 1)
    blocks = remote(managers[0], theirs)
    managers[1].close()
    again = manager_in(fabric, 1)
    owned = host_blocks(again, 1)
    with pytest.raises(WorkerUnreachable, match=r"it was restarted, and the imported block set belongs to its former"):
        TransferRequestPut(host_blocks(managers[0], 1, b"kv"), blocks).execute()
    assert payloads(owned) == [b""]
    newcomer = manager_in(fabric, 3)
    fabric.exchange_blocksets()  # already imported sets stay, because Dynamo cannot update them
    TransferRequestPut(host_blocks(newcomer, 1, b"kv"), remote(newcomer, owned)).execute()
    assert payloads(owned) == [b"kv\0"]


def test_a_cut_link_is_named_in_the_error_and_can_be_restored(fabric, managers):
    mine, theirs = host_blocks(managers[0], 1, b"kv"), host_blocks(managers[1], 1)
    blocks = remote(managers[0], theirs)
    fabric.cut_link(1, 0)
    for request in (TransferRequestPut(mine, blocks), TransferRequestGet(blocks, mine)):
        with pytest.raises(
            WorkerUnreachable, match=r"^worker 0 does not reach worker 1: the link between them is cut$"
        ):
            request.execute()
        assert not request.is_executed
    assert (payloads(theirs), payloads(mine), fabric.transfers) == ([b""], [b"kv\0"], [])
    assert [fabric.is_reachable(*link) for link in ((0, 1), (1, 0), (0, 2))] == [False, False, True]
    fabric.restore_link(0, 1)
    request = TransferRequestPut(mine, blocks)
    request.execute()
    assert payloads(theirs) == [b"kv\0"]


def test_a_refused_request_can_be_executed_later(fabric, managers):
    mine, theirs = host_blocks(managers[0], 1, b"kv"), host_blocks(managers[1], 1)
    request = TransferRequestPut(mine, remote(managers[0], theirs))
    with fabric.cut_link(0, 1), pytest.raises(WorkerUnreachable):
        request.execute()
    request.execute()
    assert payloads(theirs) == [b"kv\0"]


def test_a_link_restored_inside_its_with_block_stays_restored(fabric, managers):
    with fabric.cut_link(0, 1):
        assert repr(fabric) == "<Fabric of workers [0, 1, 2]: 0-1 cut>"
        fabric.restore_link(0, 1)
    assert repr(fabric) == "<Fabric of workers [0, 1, 2]>"


@pytest.mark.parametrize(
    ("step", "workers", "message"),
    [
        ("cut_link", (0, 9), "cut_link: worker 9 is not in the fabric; there are: 0, 1, 2"),
        ("cut_link", ([1], 2), "cut_link: worker [1] is not in the fabric; there are: 0, 1, 2"),
        ("cut_link", (0, True), "cut_link: worker True is not in the fabric; there are: 0, 1, 2"),
        ("restore_link", (0, {}), "restore_link: worker {} is not in the fabric; there are: 0, 1, 2"),
        ("cut_link", (1, 1), "cut_link: a link has two workers, got 1 twice"),
        ("cut_link", (2, 0), "cut_link: the link between workers 2 and 0 is cut already"),
        ("restore_link", (0, 1), "restore_link: the link between workers 0 and 1 is not cut"),
        ("restore_link", ("0", 1), "restore_link: worker '0' is not in the fabric; there are: 0, 1, 2"),
    ],
)
def test_unknown_links_are_refused(fabric, managers, step, workers, message):
    fabric.cut_link(0, 2)
    with pytest.raises(ValueError) as raised:
        getattr(fabric, step)(*workers)
    assert str(raised.value) == message


def test_managers_without_a_common_fabric_cannot_reach_each_other(fabric):
    here, alone, elsewhere = manager_in(fabric, 0), manager_in(None, 1), manager_in(Fabric(), 2)
    for manager, other, why in (
        (here, alone, "it is not in the same fabric"),
        (here, elsewhere, "it is not in the same fabric"),
        (alone, here, "it is in no fabric; make both managers with the same fabric="),
    ):
        manager.import_remote_blockset(other.export_local_blockset())
        request = TransferRequestPut(host_blocks(manager, 1), remote(manager, host_blocks(other, 1)))
        with pytest.raises(WorkerUnreachable) as raised:
            request.execute()
        assert str(raised.value) == f"worker {manager.worker_id()} does not reach worker {other.worker_id()}: {why}"


def test_two_open_managers_with_one_worker_id_are_refused(fabric, managers):
    with pytest.raises(ValueError, match=r"^worker 1 is in the fabric already; close its manager, or take another"):
        manager_in(fabric, 1)
    assert fabric.workers == [0, 1, 2]


def test_a_fabric_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"^KvBlockManager: fabric must be a Fabric or None, got 'fabric'$"):
        manager_in("fabric", 1)


def test_a_second_exchange_of_block_sets_is_harmless(fabric, managers):
    manager_in(fabric, 3)
    fabric.exchange_blocksets()
    fabric.exchange_blocksets()
    theirs = host_blocks(managers[2], 1)
    assert [block.worker_id for block in remote(managers[0], theirs)] == [2]


def test_a_manager_without_nixl_is_left_out_of_the_exchange(fabric):
    first, without, last = manager_in(fabric, 0), manager_in(fabric, 1, nixl="disabled"), manager_in(fabric, 2)
    fabric.exchange_blocksets()
    for manager, other in ((first, last), (last, first)):
        assert [other.worker_id()] == [block.worker_id for block in remote(manager, host_blocks(other, 1))]
    for manager, other in ((first, without), (without, first)):
        with pytest.raises(RemoteBlockSetError, match=f"^No remote blockset found for worker {other.worker_id()} "):
            remote(manager, host_blocks(other, 1))


def test_blocks_from_awaited_allocations_can_be_put(managers):
    async def run():
        mine, theirs = [await manager.host().allocate_blocks(1) for manager in managers[:2]]
        mine[0].payload = b"kv"
        TransferRequestPut(mine, remote(managers[0], theirs)).execute()
        return payloads(theirs)

    assert asyncio.run(run()) == [b"kv"]
