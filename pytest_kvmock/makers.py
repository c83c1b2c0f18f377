"""Factories of the managers and drivers of the built-in backends. Each engine is imported when its first one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.drivers.driver import Driver
    from pytest_kvmock.hygiene.content import Chain

GROUP_SETTINGS: Final = (
    "retention",
    "match_unit",
    "speculative",
    "max_num_batched_tokens",
    "max_model_len",
    "async_scheduling",
)
"""Options of vLLM's manager that are for engines with cache groups, or a draft model."""


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
    from pytest_kvmock.drivers.move_driver import WholeMoveDriver

    return WholeMoveDriver(manager, prefix_caching, rng)


def vllm(*, groups: Any = None, tiers: Any = None, **options: Any) -> KvManager:
    """Make a `BlockPoolManager`, or a `VllmHybridManager` where there are other groups than one of full attention."""
    if tiers is not None:
        return _with_native_offload(tiers, vllm(groups=groups, **options))
    settings: dict[str, Any] = {name: options.pop(name) for name in GROUP_SETTINGS if name in options}
    if groups is not None:
        from pytest_kvmock.cache.vllm.hybrid import of_groups

        return of_groups(groups, settings, options)
    if settings.get("speculative") is not None:
        from pytest_kvmock.cache.vllm.hybrid import of_draft_model

        return of_draft_model(settings, options)
    settings.pop("speculative", None)
    if settings:
        raise ValueError(f"{next(iter(settings))} is for engines with cache groups; give groups, too")
    from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager

    return BlockPoolManager(**options)


def _with_native_offload(tiers: Any, manager: Any) -> KvManager:
    """Put a host of its own below a manager of vLLM."""
    from random import Random

    from pytest_kvmock.tiers.config import Tiers

    if manager.version.name != "0.33.0":
        raise ValueError(f"tiers are those of vLLM 0.33.0; got version {manager.version.name!r}")
    groups = []
    if hasattr(manager, "geometry"):
        from pytest_kvmock.tiers.chunk_events import OffloadGroup

        of_manager = manager.geometry.groups
        groups = [OffloadGroup(each.block_size, each.kind, each.window) for each in of_manager]
        kinds = {each.kind for each in groups}
        if not kinds <= {"full_attention", "sliding_window"} or len({each.block_size for each in groups}) > 1:
            found = ", ".join(f"{each.kind} of {each.block_size} tokens" for each in groups)
            raise ValueError(
                "tiers are for cache groups of full attention and sliding windows with blocks of one size, as these alone were "
                f"recorded; got {found}"
            )
    # A driver has a source of its own.
    manager.attach_offload(*Tiers.of(tiers).make_native(manager.block_size, Random(0), groups))  # noqa: S311 - mock data
    return cast("KvManager", manager)


STEP_SETTINGS: Final = ("speculative", "max_num_batched_tokens", "max_model_len", "async_scheduling")
"""Those of them that an engine with one cache has."""


def vllm_mtp(*, speculative: Any = None, **options: Any) -> KvManager:
    """Make a `VllmHybridManager` of one cache, with a draft model: MTP with one module and three drafts a step, if no other is given."""
    from pytest_kvmock.cache.vllm.speculative import Speculative

    given = Speculative() if speculative is None else speculative
    return vllm(backend="vllm_mtp", speculative=given, **options)


def vllm_0_19(**options: Any) -> KvManager:
    """Make a `BlockPoolManager` of vLLM 0.19.1."""
    return vllm(backend="vllm_0_19", version="0.19.1", **options)


def hybrid_model(model: str, *, tiers: Any = None, **options: Any) -> KvManager:
    """Make the `VllmHybridManager` of a model, by its name in `hybrid_models`."""
    from pytest_kvmock.cache.vllm.hybrid_models import hybrid_manager

    if tiers is None:
        return hybrid_manager(model, **options)
    return _with_native_offload(tiers, hybrid_manager(model, **options))


def block_pool_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a manager of vLLM: a `BlockPoolManager`, or a `VllmHybridManager` if that has several cache groups."""
    if hasattr(manager, "geometry"):
        if getattr(manager, "offload", None) is not None:
            from pytest_kvmock.drivers.offload_driver import HybridOffloadDriver

            return HybridOffloadDriver(manager, prefix_caching, rng)
        if getattr(manager, "speculative", None) is not None:
            from pytest_kvmock.drivers.draft_pool_driver import DraftPoolDriver

            return DraftPoolDriver(manager, prefix_caching, rng)
        from pytest_kvmock.drivers.hybrid_pool_driver import HybridPoolDriver

        return HybridPoolDriver(manager, prefix_caching, rng)
    if getattr(manager, "offload", None) is not None:
        from pytest_kvmock.drivers.offload_driver import OffloadDriver

        return OffloadDriver(manager, prefix_caching, rng)
    from pytest_kvmock.drivers.block_pool_driver import BlockPoolDriver

    return BlockPoolDriver(manager, prefix_caching, rng)


def hash_chain(manager: Any) -> Chain:
    """Make the rule of block hashes for the stream of a manager that has a hasher."""
    from pytest_kvmock.cache.hashed import HashChain

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
"""Options of SGLang's cache that are for hybrid models: the fields of a `Geometry`."""


def sglang(*, tiers: Any = None, **options: Any) -> KvManager:
    """Make a `RadixCacheManager`, a `HybridCacheManager` of a window, states or drafts, or with tiers a `HiCacheManager`."""
    if tiers is not None:
        return _with_hicache(tiers, options)
    parts: dict[str, Any] = {name: options.pop(name) for name in PARTS if name in options}
    if parts or options.get("speculative") is not None:
        from pytest_kvmock.cache.sglang.geometry import Geometry

        geometry = Geometry.of(parts)
        if geometry is not None or options.get("speculative") is not None:
            from pytest_kvmock.cache.sglang.hybrid_cache import HybridCacheManager

            return HybridCacheManager(geometry=geometry or Geometry(), **options)
    from pytest_kvmock.cache.sglang.radix_cache import RadixCacheManager

    return RadixCacheManager(**options)


def _with_hicache(tiers: Any, options: dict[str, Any]) -> KvManager:
    """Make a `HiCacheManager`, for what was recorded with a host."""
    from pytest_kvmock.cache.sglang.hicache_cache import HiCacheManager
    from pytest_kvmock.tiers.config import Tiers

    part = next((name for name in PARTS if options.get(name) is not None), None)
    if part is not None:
        raise ValueError(
            f"tiers of sglang are for full attention alone: of hybrid models only laws were measured; got {part}"
        )
    draft = options.get("speculative")
    if getattr(draft, "has_pairs", False):
        raise ValueError(
            "tiers of sglang are for keys of tokens, as no draft model with pairs was recorded with them; "
            f"got {draft!r}"
        )
    policy = options.get("policy", "lru")
    if policy in {"priority", "fifo", "filo", "mru"}:
        raise ValueError(f"tiers of sglang are for policy lru, lfu and slru, as these were recorded; got {policy!r}")
    links, host = Tiers.of(tiers).make_hicache(options.get("block_size", 16))
    manager = HiCacheManager(**host, **options)
    manager.offload = links
    return manager


def sglang_eagle(*, speculative: Any = None, **options: Any) -> KvManager:
    """Make a `HybridCacheManager` without parts, with a draft model: EAGLE with three steps, if no other is given."""
    from pytest_kvmock.cache.sglang.speculative import SglangSpeculative

    given = SglangSpeculative() if speculative is None else speculative
    return sglang(backend="sglang_eagle", speculative=given, **options)


def sglang_model(name: str) -> Callable[..., KvManager]:
    """Return what makes the `HybridCacheManager` of a model."""

    def make(*, num_blocks: int, block_size: int = 16, **options: Any) -> KvManager:
        from pytest_kvmock.cache.sglang.hybrid_cache import HybridCacheManager
        from pytest_kvmock.cache.sglang.models import MODELS

        geometry = MODELS[name].geometry(name, num_blocks, block_size)
        sizes = {"backend": name, "num_blocks": num_blocks, "block_size": block_size}
        return HybridCacheManager(geometry=geometry, **sizes, **options)

    return make


def sglang_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `RadixCacheManager`, a `HybridCacheManager` or a `HiCacheManager`."""
    if hasattr(manager, "write_policy"):
        from pytest_kvmock.drivers.hicache_driver import HiCacheDriver

        return HiCacheDriver(manager, prefix_caching, rng)
    if getattr(manager, "geometry", None) is not None:
        from pytest_kvmock.drivers.hybrid_radix_driver import HybridRadixDriver

        return HybridRadixDriver(manager, prefix_caching, rng)
    from pytest_kvmock.drivers.radix_driver import RadixDriver

    return RadixDriver(manager, prefix_caching, rng)


V1_OPTIONS: Final = (
    *("secondary_blocks", "windows", "max_seq_len", "partial_reuse", "copy_on_partial_reuse", "onboard"),
    *("offload_min_priority", "removed_order", "event_buffer"),
)
"""Options of TensorRT-LLM's V1 manager."""


def trtllm(**options: Any) -> KvManager:
    """Make a `V1Manager`."""
    from pytest_kvmock.cache.trtllm.v1_manager import V1Manager

    return V1Manager(**options)


def trtllm_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `V1Manager`."""
    from pytest_kvmock.drivers.trtllm_driver import TrtllmDriver

    return TrtllmDriver(manager, prefix_caching, rng)


def trtllm_v2(**options: Any) -> KvManager:
    """Make a `V2Manager`."""
    from pytest_kvmock.cache.trtllm.v2_manager import V2Manager

    return V2Manager(**options)


def trtllm_v2_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `V2Manager`."""
    from pytest_kvmock.drivers.trtllm_v2_driver import TrtllmV2Driver

    return TrtllmV2Driver(manager, prefix_caching, rng)


def mocker_sglang_1_6(**options: Any) -> KvManager:
    """Make a `MockerRadixManager`."""
    from pytest_kvmock.cache.dynamo.mocker_sglang import MockerRadixManager

    return MockerRadixManager(**options)


def mocker_sglang_1_6_driver(manager: KvManager, prefix_caching: bool, rng: Random) -> Driver:
    """Make the driver of a `MockerRadixManager`."""
    from pytest_kvmock.drivers.mocker_sglang_driver import MockerRadixDriver

    return MockerRadixDriver(manager, prefix_caching, rng)
