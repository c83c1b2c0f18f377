"""The block managers of one test: the values of `kv_block_manager`, `make_kv_block_manager` and `kv_fabric`.

This module is loaded with the first test that uses one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_kvmock.contrib.block_manager.fabric import Fabric
from pytest_kvmock.contrib.block_manager.kv_block_manager import KvBlockManager, check_not_cancelled
from pytest_kvmock.contrib.block_manager.manager_config import (
    CancellationToken,
    KvBlockManagerConfig,
    KvManagerLayoutConfig,
    KvManagerModelConfig,
    KvManagerRuntimeConfig,
    NixlOptions,
)
from pytest_kvmock.contrib.block_manager.storage import DeviceAllocator, DType, PinnedAllocator
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.user_sink import KvSink
    from pytest_kvmock.values.sinks import GivenSink

FIRST_WORKER_ID: Final = 1337
"""Worker id of the first manager of a test whose events are not checked; the original's tests begin there, too."""

Blocks: TypeAlias = int | Literal["profile"] | None
"""Number of blocks of a pool: an integer, "profile" for the number in the test's profile, or None for no such pool."""


class BlockManagers:
    """Makes block managers in the fabric of a test, and closes them when the test ends.

    Args:
        profile: the test's profile, with block size and blocks of the device.
        harness: returns the harness of the test, which checks the managers' events.
        is_judged: whether the test has the harness; managers are then checked by default.

    Attributes:
        fabric: the fabric of all managers of the test.
    """

    def __init__(self, profile: EngineProfile, harness: Callable[[], RouterHarness], *, is_judged: bool) -> None:
        self.fabric = Fabric()
        self._profile = profile
        self._harness = harness
        self._is_judged = is_judged
        self._made: list[KvBlockManager] = []
        self._sinks: dict[int, KvSink] = {}

    def make(
        self,
        *,
        worker_id: int | None = None,
        device_blocks: Blocks = "profile",
        host_blocks: Blocks = "profile",
        page_size: int | None = None,
        num_layers: int = 3,
        inner_dim: int = 16,
        dtype: DType | str = DType.FP16,
        nixl: NixlOptions | str = NixlOptions.ENABLED,
        cancellation_token: CancellationToken | None = None,
        config: KvBlockManagerConfig | None = None,
        sink: GivenSink | bool | None = None,
    ) -> KvBlockManager:
        """Make a manager in the fabric of the test.

        Omitted arguments come from the test's profile, or from the original's tests. `config` replaces all arguments
        except `sink`.

        Args:
            worker_id: id of the worker, also in its events; None: the next from 1337 on, or from 65536 on if events are
                checked. The id of a closed manager means its restart: the router removes the former one first.
            device_blocks: blocks of the device; by default those of the profile; None: no device pool.
            host_blocks: blocks of the host; by default twice those of the profile.
            page_size: tokens per block; None: the block size of the profile.
            num_layers: layers of the model.
            inner_dim: numbers per token and layer.
            dtype: type of the numbers.
            nixl: whether it exchanges blocks with others.
            cancellation_token: stops it; None: a new token.
            config: a complete configuration, instead of the profile.
            sink: receives its events. True: a new checked sink, like `kv_sink`; False: no sink; None: True if the test
                uses `kv_harness`, `kv_sink`, `kv_events` or another fixture of the harness, otherwise False.

        Raises:
            ValueError: a value is out of range, or given with `config`; the worker id belongs to another manager or, if
                events are checked, to an engine or a sink; or the page size differs from the block size with which
                events are checked.
            TypeError: the configuration or the sink is invalid.
        """
        named = locals()
        if config is None:
            config = self._config(
                KvManagerModelConfig(
                    num_layers=num_layers,
                    page_size=self._profile.block_size if page_size is None else page_size,
                    inner_dim=inner_dim,
                    dtype=dtype,  # type: ignore[arg-type]  # names are accepted, too
                ),
                KvManagerRuntimeConfig(
                    worker_id=self._next_worker_id() if worker_id is None else worker_id,
                    cancellation_token=CancellationToken() if cancellation_token is None else cancellation_token,
                    nixl=nixl,  # type: ignore[arg-type]  # as above
                ),
                self._profile.num_blocks if device_blocks == "profile" else device_blocks,
                2 * self._profile.num_blocks if host_blocks == "profile" else host_blocks,
            )
        elif not isinstance(config, KvBlockManagerConfig):
            raise TypeError(f"make_kv_block_manager: config must be a KvBlockManagerConfig, got {config!r:.80}")
        else:
            if extra := [name for name, default in _DEFAULTS.items() if named[name] != default]:
                raise ValueError(
                    "make_kv_block_manager: config describes a manager completely, so "
                    f"{' and '.join(extra)} cannot be given with it; only sink can"
                )
            worker_id = config.runtime.worker_id
        if sink is None:
            sink = self._is_judged
        if sink is True:
            manager = self._make_judged(config, keeps_id=worker_id is not None)
        else:
            manager = KvBlockManager(config, sink=None if sink is False else sink, fabric=self.fabric)
        self._made.append(manager)
        return manager

    @staticmethod
    def _config(
        model: KvManagerModelConfig, runtime: KvManagerRuntimeConfig, device: int | None, host: int | None
    ) -> KvBlockManagerConfig:
        return KvBlockManagerConfig(
            runtime=runtime,
            model=model,
            device_layout=None if device is None else KvManagerLayoutConfig(device, allocator=DeviceAllocator()),
            host_layout=None if host is None else KvManagerLayoutConfig(host, allocator=PinnedAllocator()),
        )

    def _make_judged(self, config: KvBlockManagerConfig, *, keeps_id: bool) -> KvBlockManager:
        """Make a manager whose events are checked as those of a separate worker."""
        harness = self._harness()
        if config.model.page_size != harness.profile.block_size:
            raise ValueError(
                f"make_kv_block_manager: page_size is {config.model.page_size}, and events are judged with the block "
                f"size {harness.profile.block_size} of the test: set "
                f"@pytest.mark.kvmock(block_size={config.model.page_size}), or sink=False"
            )
        check_not_cancelled(config)
        if keeps_id:
            self._make_way(harness, config.runtime.worker_id)
        device, host = config.device_layout, config.host_layout
        judged = harness.make_sink(
            chained=True,  # without this, blocks of another salt, which no router finds, would pass
            num_blocks=None if device is None else device.num_blocks,
            tier_blocks={} if host is None else {StorageTier.HOST_PINNED: host.num_blocks},
            prefix_closed=False,  # 0.2.1 evicts parents before their children
            worker_id=config.runtime.worker_id if keeps_id else None,
        )
        self._sinks[judged.worker_id] = judged
        if not keeps_id:
            config = replace(config, runtime=replace(config.runtime, worker_id=judged.worker_id))
        manager = KvBlockManager(config, sink=judged, fabric=self.fabric)
        for pool in manager.pools:
            judged.compare(pool.registered_hashes, storage_tier=pool.block_set.tier)
        return manager

    def _make_way(self, harness: RouterHarness, worker_id: int) -> None:
        """Let the router remove the closed former manager of a worker id, if there was one."""
        self.fabric.check_free(worker_id)  # before a worker is added to the router
        former = self._sinks.get(worker_id)
        if former is not None and not former.is_removed:
            harness.remove_worker(worker_id)

    def close(self) -> None:
        """Close all managers."""
        for manager in self._made:
            manager.close()

    def _next_worker_id(self) -> int:
        taken = {manager.worker_id() for manager in self._made}
        return next(i for i in range(FIRST_WORKER_ID, FIRST_WORKER_ID + len(taken) + 1) if i not in taken)


_DEFAULTS: Final = {
    name: default
    for name, default in (BlockManagers.make.__kwdefaults__ or {}).items()
    if name not in ("config", "sink")
}
"""The defaults of the arguments of `make` that a configuration replaces."""
