"""Stores that engines share below their devices: each kind of store that has engines is a row of `SHARED`.

A kind without a row only has rules for events that a test publishes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.values.shared_stores import note_layout

if TYPE_CHECKING:
    from pytest_kvmock.engines.tiers import Tiers
    from pytest_kvmock.values.shared_stores import StoreSpec


@dataclass(frozen=True, slots=True)
class SharedKind:
    """The rules by which workers share one kind of store.

    Attributes:
        make: makes the shared store.
        below: returns the option `tiers` of a new engine's backend, for an engine with this store.
        put: connects an existing block manager to the store.
        layout: returns a text on the layout of a manager's blocks in the store, beyond their names; workers with
            different layouts do not find each other's blocks. It raises ValueError for a manager without a place for
            such a store.
        is_first: whether a manager must be connected to it before its driver is made.
        tiers: the `tiers` that a worker needs for it, in addition to a host; None: the store replaces a host.
    """

    make: Callable[[StoreSpec], Any]
    below: Callable[[StoreSpec, Any, Any], Any]
    put: Callable[[StoreSpec, Any, Any], object]
    layout: Callable[[Any], str]
    is_first: bool = False
    tiers: Mapping[str, Any] | None = field(default_factory=dict)


def store_below(spec: StoreSpec, made: dict[str, Any], tiers: Any) -> Any:
    """Return the option `tiers` of the backend of an engine that can load from a store.

    Args:
        spec: the store.
        made: the existing stores by name; this store is added with its first engine.
        tiers: the engine's other tiers below its device; None: none.

    Raises:
        ValueError: the store does not fit the tiers.
        ImportError: the store is LMCache's, and blake3 is not installed.
    """
    kind = SHARED.get(spec.kind)
    if kind is None:
        return tiers
    if spec.name not in made:
        made[spec.name] = kind.make(spec)
    return kind.below(spec, made[spec.name], tiers)


def _files(spec: StoreSpec) -> Any:  # noqa: ARG001 - a folder has no options
    from pytest_kvmock.engines.vllm.host.file_tier import FileStore

    return FileStore()


def _below_host(spec: StoreSpec, store: Any, tiers: Any) -> Tiers:
    if not hasattr(tiers, "with_folder"):
        raise ValueError(
            f"stores[{spec.name!r}]: files are below a host: give the workers tiers={{'host': …, 'files': True}}"
        )
    below: Tiers = tiers.with_folder(store)
    return below


def _master(spec: StoreSpec) -> Any:
    from pytest_kvmock.engines.sglang.host.mooncake_keys import MooncakeLayout
    from pytest_kvmock.engines.sglang.host.mooncake_master import MooncakeMaster

    layout = MooncakeLayout(
        tp=spec["tp"],
        pp=spec["pp"],
        dcp=spec["dcp"],
        is_mla=spec["is_mla"],
        shares=spec["shares"],
        tag=spec["tag"] or None,
        model=spec["model"] or None,
    )
    return MooncakeMaster(layout, spec["capacity"])


def _behind_host(spec: StoreSpec, store: Any, tiers: Any) -> Tiers:
    if not getattr(tiers, "storage", False):
        raise ValueError(
            f"stores[{spec.name!r}]: HiCache's third level is behind a host: give the workers "
            "tiers={'host': …, 'storage': True}"
        )
    below: Tiers = tiers.with_store(store)
    return below


def _objects(spec: StoreSpec) -> Any:
    from pytest_kvmock.engines.vllm.host.mooncake_ranks import MooncakeObjects

    return MooncakeObjects(spec["capacity"])


def _put_objects(spec: StoreSpec, store: Any, manager: Any) -> None:
    from pytest_kvmock.engines.vllm.host.mooncake_host import MooncakeHost

    note_layout(store.block_sizes, manager.block_size)
    options = {name: spec[name] for name in ("ranks", "heads", "save_decode", "lookup_async")}
    manager.attach_offload(MooncakeHost(store, manager, **options), _copies(spec, manager, spec["ranks"]))


def _server(spec: StoreSpec) -> Any:
    from pytest_kvmock.engines.vllm.host.lmcache_server import LmcacheServer

    return LmcacheServer(chunk_tokens=spec["chunk"], log_records=spec["log"], capacity=spec["capacity"])


def _attach(spec: StoreSpec, store: Any, manager: Any) -> None:
    from pytest_kvmock.engines.vllm.host.lmcache_host import LmcacheHost

    manager.attach_offload(LmcacheHost(store, manager), _copies(spec, manager))


def _copies(spec: StoreSpec, manager: Any, ranks: int = 1) -> Any:
    """Return the durations of transfers, in which each rank moves its part of a block."""
    from pytest_kvmock.engines.vllm.host.timed_copies import TimedCopies

    return TimedCopies(spec["gbps"], spec["bytes_per_token"] * manager.block_size // ranks)


def _in_place_of_host(put: Callable[[StoreSpec, Any, Any], None], spec: StoreSpec, store: Any, tiers: Any) -> Any:
    if tiers is not None:
        raise ValueError(
            f"stores[{spec.name!r}]: {spec.kind} takes the place of a host, and no engine was recorded with both; "
            f"leave tiers out, got {tiers}"
        )
    from pytest_kvmock.engines.vllm.host.store_host import StoreBelow

    return StoreBelow(spec.kind, partial(put, spec, store))


def _over_folder(spec: StoreSpec, folder: Any, manager: Any) -> None:  # noqa: ARG001 - a folder has no options
    manager.offload.files.threads.store = folder


def _over_master(spec: StoreSpec, master: Any, manager: Any) -> None:  # noqa: ARG001 - the master has them
    manager.storage.store = master


def _layout_of_files(manager: Any) -> str:
    """Return the part of vLLM's digest of a folder (`file_mapper.py`) that is not in the names of blocks."""
    offload: Any = getattr(manager, "offload", None)
    if getattr(offload, "files", None) is None:
        raise ValueError("a store of kind 'files' is below a host; give tiers={'host': …, 'files': True}")
    return f"blocks of {manager.block_size} tokens in chunks of {offload.blocks_per_chunk}"


def _layout_of_pages(manager: Any) -> str:
    if getattr(manager, "storage", None) is None:
        raise ValueError("HiCache's third level is behind a host; give tiers={'host': …, 'storage': True}")
    return f"pages of {manager.block_size} tokens"


def _layout_of_device(manager: Any) -> str:
    if getattr(manager, "offload", None) is not None or not hasattr(manager, "attach_offload"):
        raise ValueError("it is in the place of the host of vllm; leave tiers out")
    return f"blocks of {manager.block_size} tokens"


SHARED: Final[Mapping[str, SharedKind]] = MappingProxyType(
    {
        "files": SharedKind(_files, _below_host, _over_folder, _layout_of_files, tiers={"files": True}),
        "mooncake": SharedKind(
            _objects,
            partial(_in_place_of_host, _put_objects),
            _put_objects,
            _layout_of_device,
            is_first=True,
            tiers=None,
        ),
        "hicache": SharedKind(_master, _behind_host, _over_master, _layout_of_pages, tiers={"storage": True}),
        "lmcache": SharedKind(
            _server, partial(_in_place_of_host, _attach), _attach, _layout_of_device, is_first=True, tiers=None
        ),
    }
)
"""The kinds of stores that engines can have, by name."""


def tiers_of(stores: Iterable[StoreSpec], num_blocks: int) -> Tiers | None:
    """Return the tiers that workers need for stores, with a host of `num_blocks` blocks; None if they need none."""
    from pytest_kvmock.engines.tiers import Tiers

    found = [below for each in stores if each.kind in SHARED and (below := SHARED[each.kind].tiers) is not None]
    if not found:
        return None
    below = {name: each[name] for each in found for name in each}
    described = {"self_describing": True} if "files" in below else {}  # events that have the tokens of blocks
    return Tiers.of({"host": num_blocks, **described, **below})
