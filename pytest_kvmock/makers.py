"""Factories of the managers and drivers of the built-in backends. Each engine is imported when its first one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.engine.driver import Driver
    from pytest_kvmock.hygiene.content import Chain


def lineage(*, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts leaves first."""
    from pytest_kvmock.cache.dynamo.eviction.lineage import LineagePolicy

    return _logical(tiers, backend="lineage", eviction=LineagePolicy(), in_runs=True, **sizes)


def lru(*, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts the least recently used block."""
    from pytest_kvmock.cache.dynamo.eviction.lru import LruPolicy

    return _logical(tiers, backend="lru", eviction=LruPolicy(), in_runs=True, **sizes)


def multi_lru(*, num_blocks: int, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts by frequency."""
    from pytest_kvmock.cache.dynamo.eviction.multi_lru import MultiLruPolicy

    policy = MultiLruPolicy(num_blocks)
    return _logical(tiers, backend="multi_lru", eviction=policy, num_blocks=num_blocks, **sizes)


def _logical(tiers: Any, **options: Any) -> KvManager:
    """Make a `LogicalManager`, with an engine of its own for the tiers below it, if there are any."""
    from pytest_kvmock.cache.dynamo.logical import LogicalManager

    manager = LogicalManager(**options)
    if tiers is not None:
        from pytest_kvmock.tiers.config import Tiers

        manager.attach_offload(Tiers.of(tiers).make(manager.block_size))
    return manager


def hash_cache(**sizes: Any) -> KvManager:
    """Make a `HashCacheManager`."""
    from pytest_kvmock.cache.dynamo.hash_cache import HashCacheManager

    return HashCacheManager(**sizes)


def whole_move_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `HashCacheManager`."""
    from pytest_kvmock.engine.move_driver import WholeMoveDriver

    return WholeMoveDriver(manager, prefix_caching, rng)


def vllm(**options: Any) -> KvManager:
    """Make a `BlockPoolManager`."""
    from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager

    return BlockPoolManager(**options)


def vllm_0_19(**options: Any) -> KvManager:
    """Make a `BlockPoolManager` of vLLM 0.19.1."""
    return vllm(backend="vllm_0_19", version="0.19.1", **options)


def block_pool_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `BlockPoolManager`."""
    from pytest_kvmock.engine.block_pool_driver import BlockPoolDriver

    return BlockPoolDriver(manager, prefix_caching, rng)


def hash_chain(manager: Any) -> Chain:
    """Make the rule of block hashes for the stream of a manager that has a hasher."""
    from pytest_kvmock.cache.hashed import HashChain

    return HashChain(manager.hasher)


def sglang(**options: Any) -> KvManager:
    """Make a `RadixCacheManager`."""
    from pytest_kvmock.cache.sglang.radix_cache import RadixCacheManager

    return RadixCacheManager(**options)


def sglang_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `RadixCacheManager`."""
    from pytest_kvmock.engine.radix_driver import RadixDriver

    return RadixDriver(manager, prefix_caching, rng)


def mocker_sglang_1_6(**options: Any) -> KvManager:
    """Make a `MockerRadixManager`."""
    from pytest_kvmock.cache.dynamo.mocker_sglang import MockerRadixManager

    return MockerRadixManager(**options)


def mocker_sglang_1_6_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `MockerRadixManager`."""
    from pytest_kvmock.engine.mocker_sglang_driver import MockerRadixDriver

    return MockerRadixDriver(manager, prefix_caching, rng)
