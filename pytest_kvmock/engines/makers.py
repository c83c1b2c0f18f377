"""Factories of the managers and drivers of the built-in backends. Each engine is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pytest_kvmock.engines.base.driver import Driver
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.values.hashed_blocks import Chain

GROUP_SETTINGS: Final = (
    "retention",
    "match_unit",
    "speculative",
    "max_num_batched_tokens",
    "max_model_len",
    "async_scheduling",
)
"""Options of vLLM's manager for engines with cache groups or a draft model."""


def lineage(*, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts leaves, the oldest first."""
    from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy

    return _logical(tiers, backend="lineage", eviction=LineagePolicy(), in_runs=True, **sizes)


def lru(*, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts the block that became inactive longest ago."""
    from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy

    return _logical(tiers, backend="lru", eviction=LruPolicy(), in_runs=True, **sizes)


def multi_lru(*, num_blocks: int, tiers: Any = None, **sizes: Any) -> KvManager:
    """Make a `LogicalManager` that evicts by frequency."""
    from pytest_kvmock.engines.dynamo.eviction.multi_lru import MultiLruPolicy

    policy = MultiLruPolicy(num_blocks)
    return _logical(tiers, backend="multi_lru", eviction=policy, num_blocks=num_blocks, **sizes)


def _logical(tiers: Any, **options: Any) -> KvManager:
    """Make a `LogicalManager`, with its own offload engine if there are tiers below it."""
    from pytest_kvmock.engines.dynamo.logical import LogicalManager

    manager = LogicalManager(**options)
    if tiers is not None:
        from pytest_kvmock.engines.tiers import Tiers

        manager.attach_offload(Tiers.of(tiers).make(manager.block_size))
    return manager


def hash_cache(**sizes: Any) -> KvManager:
    """Make a `HashCacheManager`."""
    from pytest_kvmock.engines.dynamo.hash_cache import HashCacheManager

    return HashCacheManager(**sizes)


def whole_move_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `HashCacheManager`."""
    from pytest_kvmock.engines.dynamo.move_driver import WholeMoveDriver

    return WholeMoveDriver(manager, prefix_caching, rng)


def vllm(*, groups: Any = None, tiers: Any = None, **options: Any) -> KvManager:
    """Make a `BlockPoolManager`, or a `VllmHybridManager` for groups other than one of full attention."""
    settings: dict[str, Any] = {}
    if tiers is not None:
        from pytest_kvmock.engines.tiers import Tiers

        if not hasattr(tiers, "put_below") and Tiers.of(tiers).connector == "simple":  # its pool is like the device's
            from pytest_kvmock.engines.vllm.hybrid import by_groups

            settings = {name: options.pop(name) for name in GROUP_SETTINGS if name in options}
            return _with_host(tiers, by_groups(settings, options, groups))
        return _with_host(tiers, vllm(groups=groups, **options))
    settings = {name: options.pop(name) for name in GROUP_SETTINGS if name in options}
    if groups is not None:
        from pytest_kvmock.engines.vllm.hybrid import of_groups

        return of_groups(groups, settings, options)
    if settings.get("speculative") is not None:
        from pytest_kvmock.engines.vllm.hybrid import of_draft_model

        return of_draft_model(settings, options)
    settings.pop("speculative", None)
    if settings:
        raise ValueError(f"{next(iter(settings))} is for engines with cache groups; give groups, too")
    from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager

    return BlockPoolManager(**options)


def _with_host(tiers: Any, manager: Any) -> KvManager:
    """Put a separate host below a manager of vLLM."""
    from pytest_kvmock.engines.tiers import Tiers

    if manager.version.name != "0.33.0":
        raise ValueError(f"tiers are those of vLLM 0.33.0; got version {manager.version.name!r}")
    if hasattr(tiers, "put_below"):  # a store that engines share
        tiers.put_below(manager)
        return cast("KvManager", manager)
    below = Tiers.of(tiers)
    if below.connector == "simple":
        manager.attach_offload(*below.make_simple(manager))
        return cast("KvManager", manager)
    from pytest_kvmock.engines.vllm.host.native_offload import offload_of

    options, copies = below.make_native(manager.block_size)
    manager.attach_offload(offload_of(manager, **options), copies)
    return cast("KvManager", manager)


STEP_SETTINGS: Final = ("speculative", "max_num_batched_tokens", "max_model_len", "async_scheduling")
"""The options of these that an engine with one cache has."""


def vllm_mtp(*, speculative: Any = None, **options: Any) -> KvManager:
    """Make a `VllmHybridManager` of one cache with a draft model, by default MTP with one module and three drafts."""
    from pytest_kvmock.engines.vllm.speculative import Speculative

    given = Speculative() if speculative is None else speculative
    return vllm(backend="vllm_mtp", speculative=given, **options)


def vllm_0_19(**options: Any) -> KvManager:
    """Make a `BlockPoolManager` of vLLM 0.19.1."""
    return vllm(backend="vllm_0_19", version="0.19.1", **options)


def hybrid_model(model: str, *, tiers: Any = None, **options: Any) -> KvManager:
    """Make the `VllmHybridManager` of a model, by its name in `hybrid_models`."""
    from pytest_kvmock.engines.vllm.hybrid_models import hybrid_manager

    if tiers is None:
        return hybrid_manager(model, **options)
    return _with_host(tiers, hybrid_manager(model, **options))


def block_pool_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a manager of vLLM: a `BlockPoolManager` or a `VllmHybridManager`."""
    if hasattr(manager, "geometry"):
        offload = getattr(manager, "offload", None)
        if hasattr(offload, "pool"):
            from pytest_kvmock.engines.vllm.host.simple_host import SimpleOffloadDriver

            return SimpleOffloadDriver(manager, prefix_caching, rng)
        if offload is not None:
            from pytest_kvmock.engines.vllm.host.offload_driver import DraftOffloadDriver, HybridOffloadDriver

            of = HybridOffloadDriver if getattr(manager, "speculative", None) is None else DraftOffloadDriver
            return of(manager, prefix_caching, rng)
        if getattr(manager, "speculative", None) is not None:
            from pytest_kvmock.engines.vllm.draft_pool_driver import DraftPoolDriver

            return DraftPoolDriver(manager, prefix_caching, rng)
        from pytest_kvmock.engines.vllm.hybrid_pool_driver import HybridPoolDriver

        return HybridPoolDriver(manager, prefix_caching, rng)
    if hasattr(getattr(manager, "offload", None), "empty"):
        from pytest_kvmock.engines.vllm.host.store_host import StoreDriver

        return StoreDriver(manager, prefix_caching, rng)
    if getattr(manager, "offload", None) is not None:
        from pytest_kvmock.engines.vllm.host.offload_driver import OffloadDriver

        return OffloadDriver(manager, prefix_caching, rng)
    from pytest_kvmock.engines.vllm.block_pool_driver import BlockPoolDriver

    return BlockPoolDriver(manager, prefix_caching, rng)


def hash_chain(manager: Any) -> Chain:
    """Make the rule of block hashes for the stream of a manager that has a hasher."""
    from pytest_kvmock.engines.base.hashed import HashChain

    geometry = getattr(manager, "geometry", None)
    return HashChain(manager.hasher, getattr(geometry, "hash_unit", None))


PARTS: Final = (
    "window",
    "window_ratio",
    "window_interval",
    "window_gates",
    "release_window",
    "states",
    "state_grid",
    "state_interval",
    "state_strategy",
    "states_per_path",
)
"""Options of SGLang's cache for hybrid models: the fields of a `Geometry`."""


def sglang(*, tiers: Any = None, unified: bool = False, **options: Any) -> KvManager:
    """Make a `RadixCacheManager`, or a `HybridCacheManager` for a window, states or drafts.

    With tiers it is a `HiCacheManager`. With `unified`, as in engines of a P/D pair, it is a `HybridCacheManager` for
    every model.
    """
    is_plain = tiers is None and not unified and not any(name in options for name in (*PARTS, "speculative"))
    if options.get("dcp", 1) != 1 and not is_plain:
        raise ValueError("dcp of sglang is for full attention alone, without tiers, drafts and pairs")
    if not is_plain:
        options.pop("dcp", None)
    if tiers is not None:
        return _with_hicache(tiers, options)
    parts: dict[str, Any] = {name: options.pop(name) for name in PARTS if name in options}
    if parts or unified or options.get("speculative") is not None:
        from pytest_kvmock.engines.sglang.geometry import Geometry

        geometry = Geometry.of(parts)
        if geometry is not None or unified or options.get("speculative") is not None:
            from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager

            return HybridCacheManager(geometry=geometry or Geometry(), **options)
    from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager

    return RadixCacheManager(**options)


def _with_hicache(tiers: Any, options: dict[str, Any]) -> KvManager:
    """Make a `HiCacheManager`, for options that were recorded with a host."""
    from pytest_kvmock.engines.sglang.geometry import Geometry
    from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
    from pytest_kvmock.engines.tiers import Tiers

    parts: dict[str, Any] = {name: options.pop(name) for name in PARTS if name in options}
    geometry = options.pop("geometry", None) or Geometry.of(parts)
    draft = options.get("speculative")
    if draft is not None and geometry is not None and geometry.states is not None:
        raise ValueError(f"tiers of sglang are not for states with drafts: no recording has both; got {draft!r}")
    policy = options.get("policy", "lru")
    if policy in {"priority", "fifo", "filo", "mru"}:
        raise ValueError(f"tiers of sglang are for policy lru, lfu and slru, as these were recorded; got {policy!r}")
    links, host = Tiers.of(tiers).make_hicache(options.get("block_size", 16))
    if geometry is not None and geometry.window is not None and host["write_policy"] == "write_back":
        raise ValueError(
            "write_policy 'write_back' of sglang is not for models with windows: its events promise blocks of the "
            "host of which only the window is there"
        )
    manager = HiCacheManager(geometry=geometry, **host, **options)
    manager.offload = links
    return manager


def sglang_eagle(*, speculative: Any = None, **options: Any) -> KvManager:
    """Make a `HybridCacheManager` without parts, with a draft model, by default EAGLE with three steps."""
    from pytest_kvmock.engines.sglang.speculative import SglangSpeculative

    given = SglangSpeculative() if speculative is None else speculative
    return sglang(backend="sglang_eagle", speculative=given, **options)


def sglang_model(name: str) -> Callable[..., KvManager]:
    """Return a factory of the `HybridCacheManager` of a model."""

    def make(*, num_blocks: int, block_size: int = 16, tiers: Any = None, **options: Any) -> KvManager:
        from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
        from pytest_kvmock.engines.sglang.models import MODELS

        geometry = MODELS[name].geometry(name, num_blocks, block_size)
        options |= {"backend": name, "num_blocks": num_blocks, "block_size": block_size, "geometry": geometry}
        return HybridCacheManager(**options) if tiers is None else _with_hicache(tiers, options)

    return make


def sglang_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `RadixCacheManager`, a `HybridCacheManager` or a `HiCacheManager`."""
    if hasattr(manager, "write_policy"):
        from pytest_kvmock.engines.sglang.host.hicache_driver import HiCacheDriver

        return HiCacheDriver(manager, prefix_caching, rng)
    if getattr(manager, "geometry", None) is not None:
        from pytest_kvmock.engines.sglang.hybrid_radix_driver import HybridRadixDriver

        return HybridRadixDriver(manager, prefix_caching, rng)
    from pytest_kvmock.engines.sglang.radix_driver import RadixDriver

    return RadixDriver(manager, prefix_caching, rng)


V1_OPTIONS: Final = (
    *("secondary_blocks", "windows", "max_seq_len", "partial_reuse", "copy_on_partial_reuse", "onboard"),
    *("offload_min_priority", "removed_order", "event_buffer"),
)
"""Options of TensorRT-LLM's V1 manager."""


def trtllm(**options: Any) -> KvManager:
    """Make a `V1Manager`."""
    from pytest_kvmock.engines.trtllm.v1_manager import V1Manager

    return V1Manager(**options)


def trtllm_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `V1Manager`."""
    from pytest_kvmock.engines.trtllm.trtllm_driver import TrtllmDriver

    return TrtllmDriver(manager, prefix_caching, rng)


def trtllm_v2(**options: Any) -> KvManager:
    """Make a `V2Manager`."""
    from pytest_kvmock.engines.trtllm.v2_manager import V2Manager

    return V2Manager(**options)


def trtllm_v2_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `V2Manager`."""
    from pytest_kvmock.engines.trtllm.trtllm_v2_driver import TrtllmV2Driver

    return TrtllmV2Driver(manager, prefix_caching, rng)


def mocker_sglang_1_6(**options: Any) -> KvManager:
    """Make a `MockerRadixManager`."""
    from pytest_kvmock.engines.dynamo.mocker_sglang import MockerRadixManager

    return MockerRadixManager(**options)


def mocker_sglang_1_6_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `MockerRadixManager`."""
    from pytest_kvmock.engines.dynamo.mocker_sglang_driver import MockerRadixDriver

    return MockerRadixDriver(manager, prefix_caching, rng)
