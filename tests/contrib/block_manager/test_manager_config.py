"""The configuration of a block manager, and refused values."""

import pytest
from block_helpers import MODEL, device_layout, host_layout

from pytest_kvmock.contrib.block_manager import (
    CancellationToken,
    DeviceAllocator,
    DeviceStorage,
    DType,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    LayoutError,
    LayoutType,
    NixlOptions,
    PinnedAllocator,
    PinnedStorage,
)

RUNTIME = KvManagerRuntimeConfig(worker_id=7)
U64 = 2**64 - 1


def test_configuration_defaults_equal_those_of_the_original():
    assert NixlOptions.ENABLED is RUNTIME.nixl
    assert not RUNTIME.cancellation_token.is_cancelled()
    assert DType.FP16 is MODEL.dtype
    assert LayoutType.FULLY_CONTIGUOUS is device_layout().layout_type
    assert (
        KvBlockManagerConfig(RUNTIME, MODEL).device_layout,
        KvBlockManagerConfig(RUNTIME, MODEL).host_layout,
    ) == (None, None)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (DType.FP8, 1),
        (DType.FP16, 2),
        (DType.BF16, 2),
        (DType.FP32, 4),
    ],
)
def test_the_data_type_sets_the_bytes_of_an_element_and_of_a_block(dtype, size):
    assert size == dtype.size_in_bytes
    assert 3 * 4 * 16 * size == KvManagerModelConfig(3, 4, 16, dtype).block_bytes


def test_every_data_type_has_a_test_case():
    assert len(DType) == 4


@pytest.mark.parametrize("worker_id", [0, 1337, U64])
def test_a_worker_id_can_be_any_u64(worker_id):
    assert worker_id == KvManagerRuntimeConfig(worker_id).worker_id


@pytest.mark.parametrize("worker_id", [-1, U64 + 1, 1.0, "7", True, None])
def test_a_value_that_is_not_a_worker_id_is_refused(worker_id):
    with pytest.raises(ValueError) as error:
        KvManagerRuntimeConfig(worker_id)
    assert (
        str(error.value)
        == f"KvManagerRuntimeConfig.worker_id must be an integer from 0 to {U64} (u64), got {worker_id!r}"
    )  # fmt: skip


@pytest.mark.parametrize("field", ["num_layers", "page_size", "inner_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None])
def test_model_sizes_must_be_at_least_1(field, value):
    with pytest.raises(ValueError) as error:
        KvManagerModelConfig(**({"num_layers": 3, "page_size": 4, "inner_dim": 16} | {field: value}))
    assert str(error.value).startswith(f"KvManagerModelConfig.{field} must be an integer of at least 1")
    assert str(error.value).endswith(f", got {value!r}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: KvManagerLayoutConfig(0, allocator=PinnedAllocator()),
            "KvManagerLayoutConfig.num_blocks must be an integer of at least 1, got 0",
        ),
        (
            lambda: KvManagerLayoutConfig(8),
            "KvManagerLayoutConfig: must provide either storage or allocator",
        ),
        (
            lambda: KvManagerLayoutConfig(8, storage=[PinnedStorage(1)], allocator=PinnedAllocator()),
            "KvManagerLayoutConfig: cannot provide both storage and allocator; give exactly one",
        ),
        (
            lambda: KvManagerLayoutConfig(8, storage=PinnedStorage(1)),
            (
                "KvManagerLayoutConfig.storage must be a sequence of DeviceStorage or PinnedStorage, got "
                "PinnedStorage(size=1)"
            ),
        ),
        (
            lambda: KvManagerLayoutConfig(8, layout_type="layer_separate", allocator=PinnedAllocator()),
            "KvManagerLayoutConfig.layout_type: got 'layer_separate'; allowed: fully_contiguous",
        ),
        (
            lambda: KvManagerModelConfig(1, 1, 1, "fp4"),
            "KvManagerModelConfig.dtype: got 'fp4'; allowed: fp8, fp16, bf16, fp32",
        ),
        (
            lambda: KvManagerRuntimeConfig(1, nixl="enable"),
            "KvManagerRuntimeConfig.nixl: got 'enable'; did you mean 'enabled'? allowed: enabled, disabled",
        ),
        (
            lambda: KvBlockManagerConfig(RUNTIME, MODEL, device_layout=host_layout()),
            "KvBlockManagerConfig.device_layout: its memory must be of type device, got pinned",
        ),
        (
            lambda: KvBlockManagerConfig(RUNTIME, MODEL, host_layout=device_layout()),
            "KvBlockManagerConfig.host_layout: its memory must be of type pinned, got device",
        ),
        (lambda: DeviceStorage(0), "DeviceStorage.size must be an integer of at least 1 (bytes), got 0"),
        (lambda: PinnedStorage(-4), "PinnedStorage.size must be an integer of at least 1 (bytes), got -4"),
        (lambda: DeviceAllocator(-1), "DeviceAllocator.device_id must be an integer of at least 0, got -1"),
        (lambda: DeviceStorage(1, -1), "DeviceStorage.device_id must be an integer of at least 0, got -1"),
    ],
)
def test_an_invalid_value_is_named_with_the_allowed_ones(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: KvManagerRuntimeConfig(1, cancellation_token=False),
            "KvManagerRuntimeConfig.cancellation_token must be a CancellationToken, got False",
        ),
        (
            lambda: KvManagerLayoutConfig(8, allocator="cuda:0"),
            "KvManagerLayoutConfig.allocator must be a DeviceAllocator or PinnedAllocator, got 'cuda:0'",
        ),
        (
            lambda: KvBlockManagerConfig(7, MODEL),
            "KvBlockManagerConfig.runtime must be a KvManagerRuntimeConfig, got 7",
        ),
        (
            lambda: KvBlockManagerConfig(RUNTIME, 4),
            "KvBlockManagerConfig.model must be a KvManagerModelConfig, got 4",
        ),
        (
            lambda: KvBlockManagerConfig(RUNTIME, MODEL, 8),
            "KvBlockManagerConfig.device_layout must be a KvManagerLayoutConfig, got 8",
        ),
        (lambda: KvBlockManager({}), "KvBlockManager takes a KvBlockManagerConfig, got {}"),
        (lambda: CancellationToken(1), "CancellationToken: parent must be a CancellationToken or None, got 1"),
    ],
)
def test_a_configuration_part_of_another_class_is_refused(make, message):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value) == message


NEEDED = 8 * MODEL.block_bytes


@pytest.mark.parametrize("size", [NEEDED, NEEDED + 1])
def test_a_pool_accepts_storage_that_is_large_enough(size):
    layout = KvManagerLayoutConfig(8, storage=[DeviceStorage(size)])
    manager = KvBlockManager(KvBlockManagerConfig(RUNTIME, MODEL, device_layout=layout))
    assert manager.device().available_blocks == 8


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (
            [DeviceStorage(NEEDED - 1)],
            f"storage size {NEEDED - 1} is less than required size {NEEDED} (8 blocks of 384 bytes)",
        ),
        ([], "a fully contiguous layout takes one region, got 0"),
        ([DeviceStorage(NEEDED), DeviceStorage(NEEDED)], "a fully contiguous layout takes one region, got 2"),
    ],
)
def test_storage_of_the_wrong_size_or_kind_is_refused(storage, message):
    layout = KvManagerLayoutConfig(8, storage=storage)
    with pytest.raises(LayoutError) as error:
        KvBlockManagerConfig(RUNTIME, MODEL, device_layout=layout)
    assert str(error.value) == f"KvBlockManagerConfig.device_layout: {message}"


def test_an_allocator_creates_storage_of_its_kind():
    assert DeviceStorage(384, 3) == DeviceAllocator(3).allocate(384)
    assert PinnedStorage(384) == PinnedAllocator().allocate(384)


@pytest.mark.parametrize("config", [RUNTIME, MODEL, device_layout()], ids=lambda config: type(config).__name__)
def test_a_configuration_is_immutable(config):
    with pytest.raises(AttributeError):
        setattr(config, next(iter(type(config).__slots__)), 1)


def test_cancelling_a_parent_token_cancels_its_children_but_not_vice_versa():
    parent = CancellationToken()
    child, other = parent.child_token(), parent.child_token()
    child.cancel()
    assert (child.is_cancelled(), other.is_cancelled(), parent.is_cancelled()) == (True, False, False)
    parent.cancel()
    assert (other.is_cancelled(), parent.is_cancelled()) == (True, True)
    assert other.child_token().is_cancelled()
