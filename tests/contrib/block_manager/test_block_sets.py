"""Block sets and descriptor lists: their contents, their bytes, and every refusal of an import."""

from dataclasses import replace

import pytest
from block_helpers import PAGE, chain, make_manager, register
from depth import worth_its_time
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.contrib.block_manager import (
    BlockDescriptorList,
    BlockDescriptorSetError,
    BlockMutability,
    BlockSetLayout,
    DeviceAllocator,
    DType,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    MemType,
    NixlBlockSet,
    NixlSerializationError,
    ProgressEngineShutdown,
    RemoteBlockSetError,
    as_block_descriptor_set,
)

HOST = BlockSetLayout(MemType.DRAM, 16, 3, PAGE, 16)
DEVICE = BlockSetLayout(MemType.VRAM, 8, 3, PAGE, 16)
DTYPES = ", ".join(each.value for each in DType)
SET = NixlBlockSet(7, {1: HOST, 2: DEVICE}, "7")


# ------------------------------------------------------------------------------------------------------ export


def test_the_host_pool_is_block_set_1_and_the_device_pool_block_set_2():
    assert make_manager(7).export_local_blockset() == SET


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"host": None}, {1: DEVICE}),
        ({"device": None}, {1: HOST}),
        ({"device": None, "host": None}, {}),
    ],
)
def test_a_block_set_contains_the_existing_pools(sizes, expected):
    assert make_manager(7, **sizes).export_local_blockset().block_sets == expected


def test_a_block_set_describes_its_gpu_and_block_layout():
    manager = KvBlockManager(
        KvBlockManagerConfig(
            runtime=KvManagerRuntimeConfig(worker_id=1),
            model=KvManagerModelConfig(num_layers=2, page_size=8, inner_dim=4, dtype=DType.FP8),
            device_layout=KvManagerLayoutConfig(num_blocks=5, allocator=DeviceAllocator(3)),
        )
    )
    layout = manager.export_local_blockset().block_sets[1]
    assert BlockSetLayout(MemType.VRAM, 5, 2, 8, 4, DType.FP8, 3) == layout
    assert layout.block_bytes == 2 * 8 * 4


def test_only_blocks_of_exported_sets_can_be_read():
    manager = make_manager(7)
    (host,), (device,) = (pool.allocate_blocks_blocking(1) for pool in (manager.host(), manager.device()))
    assert [(b.worker_id, b.block_set_idx, b.block_idx) for b in (host, device)] == [(7, 1, 0), (7, 2, 0)]


def test_a_manager_without_nixl_exports_its_pools_without_an_agent():
    assert replace(SET, agent_id="") == make_manager(7, nixl="disabled").export_local_blockset()


def test_block_sets_are_immutable_and_compare_by_value():
    assert hash(SET) == hash(NixlBlockSet.from_bytes(SET.to_bytes()))
    with pytest.raises(TypeError):
        SET.block_sets[3] = HOST


# ------------------------------------------------------------------------------------------------------- bytes

layouts = st.builds(
    BlockSetLayout,
    mem_type=st.sampled_from(MemType),
    num_blocks=st.integers(1, 2**64 - 1),
    num_layers=st.integers(1, 200),
    page_size=st.integers(1, 1024),
    inner_dim=st.integers(1, 2**20),
    dtype=st.sampled_from(DType),
    device_id=st.integers(0, 7),
)
block_sets = st.builds(
    NixlBlockSet,
    worker_id=st.integers(0, 2**64 - 1),
    block_sets=st.dictionaries(st.integers(0, 9), layouts, max_size=3),
    agent_id=st.text(max_size=9),
    incarnation=st.integers(0, 9),
)
descriptors = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1).flatmap(
    lambda pairs: st.builds(
        BlockDescriptorList,
        worker_id=st.integers(0, 2**64 - 1),
        block_set_idx=st.integers(0, 3),
        mutability=st.sampled_from(BlockMutability),
        block_indices=st.just(tuple(index for index, _ in pairs)),
        generations=st.just(tuple(generation for _, generation in pairs)),
    )
)


@worth_its_time
@given(st.one_of(block_sets, descriptors))
def test_block_sets_and_descriptors_are_read_back_from_their_bytes(value):
    assert value == type(value).from_bytes(value.to_bytes())


@given(block_sets, st.data())
def test_a_truncated_block_set_is_refused(value, data):
    whole = value.to_bytes()
    with pytest.raises(NixlSerializationError, match=r"^the bytes of a block set are not JSON: "):
        NixlBlockSet.from_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])


GOOD_LAYOUT = (
    b'{"block_set_idx":1,"mem_type":"dram","device_id":0,"num_blocks":16,"num_layers":3,"page_size":4,"inner_dim":16,'
    b'"dtype":"fp16"}'
)


def body(layouts=GOOD_LAYOUT, worker_id=b"7", agent_id=b'"7"'):
    return b'{"worker_id":%b,"agent_id":%b,"incarnation":0,"block_sets":[%b]}' % (worker_id, agent_id, layouts)


def test_a_block_set_written_by_another_program_is_read():
    assert NixlBlockSet(7, {1: HOST}, "7") == NixlBlockSet.from_bytes(body())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the bytes of a block set are not JSON: Expecting value: line 1 column 1 (char 0)"),
        (body()[:-1], "the bytes of a block set are not JSON: Expecting ',' delimiter: line 1 column 188 (char 187)"),
        (body() + b"!", "the bytes of a block set are not JSON: Extra data: line 1 column 189 (char 188)"),
        (
            b'{"\xff',
            (
                "the bytes of a block set are not JSON: 'utf-8' codec can't decode byte 0xff in position 2: invalid "
                "start byte"
            ),
        ),
        (
            BlockDescriptorList(7, 1, "mutable", (0,), (0,)).to_bytes(),
            (
                "a block set has the fields worker_id, agent_id, incarnation, block_sets, got "
                "['block_indices', 'block_set_idx', 'generations', 'mutability', 'worker_id']"
            ),
        ),
        (b"no", "the bytes of a block set are not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[]", "a block set has the fields worker_id, agent_id, incarnation, block_sets, got []"),
        (b"{}", "a block set has the fields worker_id, agent_id, incarnation, block_sets, got []"),
        (body(worker_id=b"-1"), "in a block set, worker_id must be an integer of at least 0 (u64), got -1"),
        (body(worker_id=b"true"), "in a block set, worker_id must be an integer of at least 0 (u64), got True"),
        (body(agent_id=b"7"), "in a block set, agent_id must be text, got 7"),
        (body(GOOD_LAYOUT + b"," + GOOD_LAYOUT), "a block set names set 1 twice"),
        (
            body(GOOD_LAYOUT.replace(b"16,", b"0,", 1)),
            "in a block set's block_sets[0], num_blocks must be an integer of at least 1 (u64), got 0",
        ),
        (
            body(GOOD_LAYOUT.replace(b"fp16", b"fp17")),
            f"in a block set's block_sets[0], dtype: got 'fp17'; did you mean 'fp16'? allowed: {DTYPES}",
        ),
    ],
)
def test_invalid_bytes_of_a_block_set_are_refused_with_the_reason(data, message):
    manager = make_manager(1)
    for read in (NixlBlockSet.from_bytes, manager.import_remote_blockset):
        with pytest.raises(NixlSerializationError) as raised:
            read(data)
        assert str(raised.value) == message


def test_endlessly_nested_lists_are_refused():
    with pytest.raises(
        NixlSerializationError, match=r"^the bytes of a block set are not JSON: maximum recursion depth"
    ):
        NixlBlockSet.from_bytes(b"[" * 200_000)


def test_a_value_that_is_not_bytes_is_refused():
    with pytest.raises(TypeError, match=r"^a block set is read from bytes, got 'KVBM'$"):
        NixlBlockSet.from_bytes("KVBM")
    with pytest.raises(TypeError, match=r"^import_remote_blockset takes a NixlBlockSet, or its bytes, got 'KVBM'$"):
        make_manager().import_remote_blockset("KVBM")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent_id": 7}, "NixlBlockSet.agent_id must be text, got 7"),
        (
            {"block_sets": [HOST]},
            f"NixlBlockSet.block_sets must be a mapping from numbers to layouts, got {[HOST]!r:.80}",
        ),
        ({"block_sets": None}, "NixlBlockSet.block_sets must be a mapping from numbers to layouts, got None"),
        ({"block_sets": {1: 5}}, "NixlBlockSet.block_sets[1] must be a BlockSetLayout, got 5"),
    ],
)
def test_the_fields_of_a_block_set_are_checked(change, message):
    with pytest.raises(TypeError) as raised:
        replace(SET, **change)
    assert str(raised.value) == message


@pytest.mark.parametrize(("name", "least"), [("num_blocks", 1), ("num_layers", 1), ("page_size", 1), ("device_id", 0)])
def test_the_fields_of_a_block_layout_are_checked(name, least):
    replace(DEVICE, **{name: least})
    with pytest.raises(ValueError, match=f"^BlockSetLayout.{name} must be an integer of at least {least}, got -1$"):
        replace(DEVICE, **{name: -1})


# ------------------------------------------------------------------------------------------------------ import


def test_a_block_set_can_be_imported_as_an_object_or_as_bytes():
    descriptors = BlockDescriptorList(7, 2, "mutable", (7, 0, 7), (0, 0, 0))
    for block_set in (SET, SET.to_bytes(), bytearray(SET.to_bytes())):
        manager = make_manager(1)
        manager.import_remote_blockset(block_set)
        for get in (manager.get_remote_blocks_mutable, manager.get_remote_blocks_immutable):
            blocks = get(descriptors)
            assert [block.block_idx for block in blocks] == [7, 0, 7]
            assert (
                blocks[0].mem_type,
                blocks[0].num_layers,
                blocks[0].page_size,
                blocks[0].inner_dim,
                blocks[0].block_bytes,
            ) == (MemType.VRAM, 3, PAGE, 16, 384)


@pytest.mark.parametrize(
    ("importer", "block_set", "message"),
    [
        (
            {},
            replace(SET, worker_id=1, agent_id="1"),
            "Cannot import blockset from self: it is of worker 1, as the manager",
        ),
        (
            {"nixl": "disabled"},
            SET,
            "NIXL agent not initialized: the manager of worker 1 was made with nixl=disabled",
        ),
        # as in Dynamo: its own set is detected before the missing agent
        (
            {"nixl": "disabled"},
            replace(SET, worker_id=1),
            "Cannot import blockset from self: it is of worker 1, as the manager",
        ),
        (
            {},
            replace(SET, agent_id=""),
            "Loading remote metadata: the block set of worker 7 has none, as that was made with nixl=disabled",
        ),
        ({}, replace(SET, agent_id="host-a"), "Failed to parse agent ID string into WorkerID (u64): 'host-a'"),
        ({}, replace(SET, agent_id="7" * 21), f"Failed to parse agent ID string into WorkerID (u64): '{'7' * 21}'"),
        (
            {},
            replace(SET, agent_id="8"),
            "Mismatch with remote worker ID: the metadata are of agent 8, the block set is of worker 7",
        ),
    ],
)
def test_an_invalid_import_is_refused(importer, block_set, message):
    manager = make_manager(1, **importer)
    with pytest.raises(RemoteBlockSetError) as raised:
        manager.import_remote_blockset(block_set)
    assert str(raised.value) == message
    with pytest.raises(RemoteBlockSetError, match=r"^No remote blockset found for worker 7 and block_set_idx 1$"):
        manager.get_remote_blocks_immutable(BlockDescriptorList(7, 1, "immutable", (0,), (0,)))


def test_a_block_set_can_be_imported_only_once():
    manager = make_manager(1)
    manager.import_remote_blockset(SET)
    with pytest.raises(RemoteBlockSetError, match=r"^Worker ID 7 already exists; cannot update remote blockset$"):
        manager.import_remote_blockset(replace(SET, block_sets={1: DEVICE}))
    (block,) = manager.get_remote_blocks_immutable(BlockDescriptorList(7, 1, "immutable", (15,), (0,)))
    assert block.layout == HOST


@pytest.mark.parametrize(
    "use",
    [
        lambda manager: manager.export_local_blockset(),
        lambda manager: manager.import_remote_blockset(SET),
        lambda manager: manager.get_remote_blocks_mutable(BlockDescriptorList(7, 1, "mutable", (0,), (0,))),
        lambda manager: manager.get_remote_blocks_immutable(BlockDescriptorList(7, 1, "mutable", (0,), (0,))),
    ],
    ids=["export", "import", "mutable", "immutable"],
)
def test_a_closed_manager_refuses_exports_and_imports(use):
    manager = make_manager(1)
    manager.close()
    with pytest.raises(ProgressEngineShutdown, match=r"on the manager of worker 1, which was closed"):
        use(manager)


# ------------------------------------------------------------------------------------------------- descriptors


def test_mutable_blocks_are_described_as_writable_and_registered_ones_as_read_only():
    manager = make_manager(7)
    mutable = manager.host().allocate_blocks_blocking(2)
    immutable = register(manager.device(), chain(2))
    assert BlockDescriptorList(7, 1, BlockMutability.MUTABLE, (0, 1), (0, 0)) == mutable.as_block_descriptor_set()
    assert BlockDescriptorList(7, 2, BlockMutability.IMMUTABLE, (0, 1), (0, 0)) == immutable.as_block_descriptor_set()
    assert mutable.as_block_descriptor_set() == BlockDescriptorList.from_mutable_blocks(mutable)
    assert immutable.as_block_descriptor_set() == BlockDescriptorList.from_immutable_blocks(immutable)
    assert len(mutable.as_block_descriptor_set()) == 2


def test_any_sequence_of_handles_can_be_described():
    blocks = make_manager(7).host().allocate_blocks_blocking(3)
    assert as_block_descriptor_set((blocks[2], blocks[0])).block_indices == (2, 0)
    assert as_block_descriptor_set(blocks[1:2]).block_indices == (1,)


def test_blocks_of_two_sets_cannot_be_described_in_one_list():
    manager = make_manager(7)
    host, device = (pool.allocate_blocks_blocking(1) for pool in (manager.host(), manager.device()))
    with pytest.raises(BlockDescriptorSetError) as raised:
        as_block_descriptor_set([*host, *device])
    assert str(raised.value) == (
        "Blocks in the input list are not homogeneous (worker_id, block_set_idx mismatch): "
        "block 0 of the host pool of worker 7 and block 0 of the device pool of worker 7"
    )


def test_an_empty_list_of_blocks_cannot_be_described():
    for describe in (as_block_descriptor_set, BlockDescriptorList.from_immutable_blocks):
        with pytest.raises(BlockDescriptorSetError, match=r"^Input block list cannot be empty$"):
            describe([])
    with pytest.raises(BlockDescriptorSetError, match=r"^Input block list cannot be empty$"):
        BlockDescriptorList(7, 1, "mutable", (), ())


def test_a_closed_handle_cannot_be_described():
    blocks = make_manager(7).host().allocate_blocks_blocking(2)
    blocks[1].close()
    with pytest.raises(BlockDescriptorSetError, match=r"^An invalid block handle was encountered: it was closed"):
        blocks.as_block_descriptor_set()


def test_mutable_and_immutable_blocks_cannot_be_described_in_one_list():
    manager = make_manager(7)
    both = [*manager.device().allocate_blocks_blocking(1), *register(manager.device(), chain(1))]
    with pytest.raises(
        TypeError, match=r"^a descriptor list of mutable blocks takes MutableBlocks, got <ImmutableBlock"
    ):
        as_block_descriptor_set(both)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker_id": -1}, f"BlockDescriptorList.worker_id must be an integer from 0 to {2**64 - 1} (u64), got -1"),
        (
            {"worker_id": 2**64},
            f"BlockDescriptorList.worker_id must be an integer from 0 to {2**64 - 1} (u64), got {2**64}",
        ),
        ({"block_set_idx": None}, "BlockDescriptorList.block_set_idx must be an integer of at least 0, got None"),
        ({"block_indices": 3}, "BlockDescriptorList.block_indices must be integers of at least 0, got 3"),
        (
            {"mutability": "mutabel"},
            (
                "BlockDescriptorList.mutability: got 'mutabel'; did you mean 'mutable' or 'immutable'? allowed: "
                "immutable, mutable"
            ),
        ),
        ({"block_indices": (1, True)}, "BlockDescriptorList.block_indices must be integers of at least 0, got True"),
        (
            {"generations": (0,)},
            "BlockDescriptorList: 2 block_indices and 1 generations; each block has one",
        ),
    ],
)
def test_the_fields_of_a_descriptor_list_are_checked(change, message):
    good = {"worker_id": 7, "block_set_idx": 1, "mutability": "mutable", "block_indices": (0, 1), "generations": (0, 0)}
    with pytest.raises(ValueError) as raised:
        BlockDescriptorList(**good | change)
    assert str(raised.value) == message


def test_bytes_of_an_empty_list_are_refused():
    data = b'{"worker_id":7,"block_set_idx":1,"mutability":"mutable","block_indices":[],"generations":[]}'
    with pytest.raises(NixlSerializationError, match=r"^in a descriptor list, Input block list cannot be empty$"):
        BlockDescriptorList.from_bytes(data)


# ----------------------------------------------------------------------------------------------- remote blocks


@pytest.mark.parametrize(
    ("descriptors", "message"),
    [
        (
            BlockDescriptorList(7, 1, "immutable", (0,), (0,)),
            "Cannot get mutable remote blocks for immutable block descriptor set",
        ),
        (
            BlockDescriptorList(8, 1, "mutable", (0,), (0,)),
            "No remote blockset found for worker 8 and block_set_idx 1",
        ),
        (
            BlockDescriptorList(7, 3, "mutable", (0,), (0,)),
            "No remote blockset found for worker 7 and block_set_idx 3",
        ),
        (
            BlockDescriptorList(7, 2, "mutable", (7, 8), (0, 0)),
            "block index out of bounds: 8 >= 8, in set 2 of worker 7",
        ),
        # the worker's own blocks are not remote
        (
            BlockDescriptorList(1, 1, "mutable", (0,), (0,)),
            "No remote blockset found for worker 1 and block_set_idx 1",
        ),
    ],
)
def test_invalid_requests_for_remote_blocks_are_refused(descriptors, message):
    manager = make_manager(1)
    manager.import_remote_blockset(SET)
    with pytest.raises(RemoteBlockSetError) as raised:
        manager.get_remote_blocks_mutable(descriptors)
    assert str(raised.value) == message


def test_mutable_remote_blocks_can_be_requested_for_reading():
    manager = make_manager(1)
    manager.import_remote_blockset(SET)
    (block,) = manager.get_remote_blocks_immutable(BlockDescriptorList(7, 1, "mutable", (3,), (0,)))
    assert repr(block) == "<ImmutableRemoteBlock: block 3 of set 1 of worker 7>"


def test_a_value_that_is_not_a_list_is_refused():
    with pytest.raises(TypeError, match=r"^get_remote_blocks_mutable takes a BlockDescriptorList, got \[\]$"):
        make_manager().get_remote_blocks_mutable([])
