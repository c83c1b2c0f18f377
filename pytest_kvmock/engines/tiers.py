"""The user's settings of the tiers below the device: `tiers={"host": 64, "gbps": 14.0}`, read in one place.

One subject: the keys of `tiers`, and their use by each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.base.bandwidth import DEFAULT_GBPS, HostLinks
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.engines.vllm.host.chunk_eviction import EVICTION_ORDERS
from pytest_kvmock.engines.vllm.host.timed_copies import TimedCopies
from pytest_kvmock.values.checks import check_integer, check_number, unknown_text
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.base.offload import OffloadEngine
    from pytest_kvmock.engines.sglang.host.hicache_storage import PageStore
    from pytest_kvmock.engines.vllm.host.file_tier import FileStore
    from pytest_kvmock.engines.vllm.host.simple_host import SimpleHost
    from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager

DEFAULT_BYTES_PER_TOKEN: Final = 160_000
"""KV cache of a token, roughly for 70 billion parameters at 8 bits; 16 tokens take 0.18 ms at 14 GB/s."""

DEFAULT_FILE_GBPS: Final = 3.0
"""Rough bandwidth of a folder on one disk."""

_MOST_BYTES: Final = 2**63 - 1
_SAME_AS_HOST: Final = "g2"
_NOT_BUILT: Final = ("disk", "g3", "external", "g4")
_OF_BOTH: Final = ("host", _SAME_AS_HOST, "gbps", "bytes_per_token")
_OF_DYNAMO: Final = ("batch",)
_OF_SIMPLE: Final = ("connector", "lazy", "disk")
_CONNECTORS: Final = ("native", "simple")
_OF_VLLM: Final = (
    "chunk",
    "policy",
    "self_describing",
    "prompt_only",
    "store_threshold",
    "max_load_tokens",
    "max_offload_tokens",
    "async_scheduling",
    "files",
    "file_events",
    "file_locality",
    "file_gbps",
)
_OF_FILES: Final = ("file_events", "file_locality", "file_gbps")
_OF_STORAGE: Final = (
    "prefetch_policy",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "retry_interval",
    "retry_attempts",
    "storage_batch",
)
_OF_SGLANG: Final = ("write_policy", "storage", *_OF_STORAGE)
_KNOWN: Final = (*_OF_BOTH, *_OF_DYNAMO, *_OF_VLLM, *_OF_SIMPLE, *_OF_SGLANG)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The host tier of one worker.

    Attributes:
        host: its capacity in blocks.
        gbps: bandwidth of the link to it and of the link back, in GB/s; 0 is infinite.
        bytes_per_token: bytes of KV cache a token.
        batch: for Dynamo's backends: blocks of one transfer to the host, and transfers at once; None: the largest
            number whose square fits the host.
        chunk: for `vllm` (like the fields up to `file_gbps`): blocks of a chunk (`blocks_per_chunk`); it divides
            `host`.
        policy: the host's eviction policy (`eviction_policy`): "lru" or "arc".
        self_describing: whether its events have tokens and parents (`self_describing_kv_events`), or only locations.
        prompt_only: whether only prompts are stored (`offload_prompt_only`), and no output.
        store_threshold: how often a chunk must be offered before it is stored; below 2: at once.
        max_load_tokens: maximum tokens that are loaded for a request, as in its `kv_transfer_params`; None: no limit.
        max_offload_tokens: maximum tokens of a request that are stored, as in its `kv_transfer_params`; None: no limit.
        async_scheduling: whether two batches are in flight, as servers do by default: copies that one batch finds done
            are reported with the next.
        connector: the connector that keeps the host: "native", vLLM's offload, with `chunk` and the fields after it; or
            "simple", its `SimpleCPUOffloadConnector`: a second block pool with `host` usable blocks.
        lazy: with "simple": whether blocks are copied when the device will evict them next (`lazy_offload`), not when
            they are computed. Then a pool with fewer blocks than the device caches never rests: `EndlessOffloadError`.
        disk: with "simple": whether the pool is a file (`kv_offload_backend: disk`); its events show this.
        files: whether there is a folder of files below the host (`TieringOffloadingSpec` with a tier `fs`).
        file_events: whether written files are published; vLLM's own default (`enable_kv_events`) is False.
        file_locality: the locality in its events: "LOCAL", "REMOTE", or None.
        file_gbps: bandwidth to the folder and back, in GB/s; 0 is infinite.
        write_policy: for `sglang`: when blocks are copied to the host: "write_through" (at the first use),
            "write_through_selective" (at the second) or "write_back" (when the device evicts them).
        storage: for `sglang`: whether there is a storage in memory behind the host, shared by the workers of a harness.
        prefetch_policy: with a storage (like the fields up to `storage_batch`): how long a request waits for a
            prefetch: "best_effort" (not at all), "wait_complete" or "timeout".
        prefetch_threshold: minimum number of tokens that are prefetched.
        prefetch_timeout_base: with "timeout": maximum seconds that a request waits.
        prefetch_timeout_per_ki_token: additional seconds for each 1024 tokens.
        retry_interval: steps after which blocks that were not found are looked up again; 0: never.
        retry_attempts: maximum number of these look-ups for a request.
        storage_batch: number of blocks that are read at once.
        store: the pages of the storage; None: each manager has its own.
        folder: the files; None: each manager has its own.

    Raises:
        ValueError: a value is invalid, `chunk` does not divide `host`, `files` and `store_threshold` are both set, an
            option of files is set without `files`, or `batch` squared exceeds `host`. In the last case the host might
            not hold a whole batch, which would be lost with its slots on the device.
    """

    host: int
    gbps: float = DEFAULT_GBPS
    bytes_per_token: int = DEFAULT_BYTES_PER_TOKEN
    batch: int | None = None
    chunk: int = 1
    policy: str = "lru"
    self_describing: bool = False
    prompt_only: bool = True
    store_threshold: int = 0
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    async_scheduling: bool = False
    connector: str = "native"
    lazy: bool = False
    disk: bool = False
    files: bool = False
    file_events: bool = True
    file_locality: str | None = None
    file_gbps: float = DEFAULT_FILE_GBPS
    write_policy: str = "write_through"
    storage: bool = False
    prefetch_policy: str = "timeout"
    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    retry_interval: int = 8
    retry_attempts: int = 8
    storage_batch: int = 128
    store: PageStore | None = field(default=None, init=False, compare=False, repr=False)
    folder: FileStore | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("tiers: host", self.host, 1, " (blocks)")
        check_number("tiers: gbps", self.gbps, unit=" (GB/s; 0 is infinite)")
        check_integer("tiers: bytes_per_token", self.bytes_per_token, 0)
        if self.bytes_per_token > _MOST_BYTES:
            raise ValueError(
                "tiers: bytes_per_token must be an integer of at least 0 and at most 2**63 - 1, "
                f"got {self.bytes_per_token!r:.80}"
            )
        check_integer("tiers: chunk", self.chunk, 1, " (blocks)")
        if self.host % self.chunk:
            raise ValueError(f"tiers: host must be whole chunks of {self.chunk} blocks, got {self.host}")
        if self.policy not in [*EVICTION_ORDERS]:  # it may be unhashable
            raise ValueError(
                f"tiers: policy must be {' or '.join(map(repr, EVICTION_ORDERS))}, got {self.policy!r:.80}"
            )
        from pytest_kvmock.engines.sglang.host.hicache_tree import WRITE_POLICIES

        if self.write_policy not in [*WRITE_POLICIES]:  # it may be unhashable
            raise ValueError(unknown_text("tiers: write_policy", self.write_policy, WRITE_POLICIES))
        check_integer("tiers: store_threshold", self.store_threshold, 0)
        for name in ("max_load_tokens", "max_offload_tokens"):
            if getattr(self, name) is not None:
                check_integer(f"tiers: {name}", getattr(self, name), 0, ", or None")
        from pytest_kvmock.engines.sglang.host.hicache_storage import PREFETCH_POLICIES

        if self.prefetch_policy not in PREFETCH_POLICIES:
            raise ValueError(unknown_text("tiers: prefetch_policy", self.prefetch_policy, PREFETCH_POLICIES))
        for name, least, unit in (
            ("prefetch_threshold", 1, " (tokens)"),
            ("retry_interval", 0, " (steps)"),
            ("retry_attempts", 0, ""),
            ("storage_batch", 1, " (blocks)"),
        ):
            check_integer(f"tiers: {name}", getattr(self, name), least, unit)
        for name in ("prefetch_timeout_base", "prefetch_timeout_per_ki_token"):
            check_number(f"tiers: {name}", getattr(self, name), unit=" (seconds)")
        if self.connector not in _CONNECTORS:
            raise ValueError(unknown_text("tiers: connector", self.connector, _CONNECTORS))
        self._check_files()
        flags = (
            "self_describing",
            "prompt_only",
            "async_scheduling",
            "storage",
            "lazy",
            "disk",
            "files",
            "file_events",
        )
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"tiers: {name} must be True or False, got {getattr(self, name)!r:.80}")  # noqa: TRY004 - one error
        if self.batch is None:
            return
        check_integer("tiers: batch", self.batch, 1, ", or None")
        if self.batch**2 > self.host:
            raise ValueError(
                f"tiers: batch must be at most {isqrt(self.host)} for a host of {self.host} blocks, got {self.batch}: "
                "batch squared blocks may be on their way, and a batch that the host cannot hold whole is lost"
            )

    def _check_files(self) -> None:
        check_number("tiers: file_gbps", self.file_gbps, unit=" (GB/s; 0 is infinite)")
        if self.file_locality not in (None, "LOCAL", "REMOTE"):
            raise ValueError(f"tiers: file_locality must be 'LOCAL', 'REMOTE' or None, got {self.file_locality!r:.80}")
        if self.files and self.store_threshold:
            raise ValueError(
                f"tiers: store_threshold is not for a host with files, which takes all, got {self.store_threshold!r}"
            )
        without = next((name for name in _OF_FILES if name in self.to_dict()), None)
        if without is not None and not self.files:
            raise ValueError(f"tiers: {without!r} is of files below the host; give 'files': True too")

    def __str__(self) -> str:
        return str(self.to_dict())

    @classmethod
    def of(cls, value: object) -> Tiers:
        """Read tiers from a user's mapping; a `Tiers` is returned unchanged.

        Raises:
            ValueError: it is not a mapping, a key is unknown or not built, or the host is missing or given twice; see
                also `Tiers`.
        """
        if isinstance(value, Tiers):
            return value
        if hasattr(value, "put_below"):
            raise ValueError(f"stores: {getattr(value, 'kind', '?')} is only below engines of vllm")
        if not isinstance(value, Mapping):
            raise ValueError(f"tiers must be a mapping such as {{'host': 64, 'gbps': 14.0}}, got {value!r:.80}")  # noqa: TRY004 - one error
        for key in value:
            if key in _NOT_BUILT and not (key == "disk" and value.get("connector") == "simple"):
                raise ValueError(
                    f"tiers: {key!r} is not a key: 'files': True puts a folder below the host of vllm, and no other "
                    "engine is mocked with a disk. Events of disk and external tiers are understood if you "
                    "publish them yourself"
                )
            if key not in _KNOWN:
                raise ValueError(unknown_text("key of tiers", key, _KNOWN))
        given: dict[str, Any] = dict(value)
        if _SAME_AS_HOST in given:
            if "host" in given:
                raise ValueError("tiers: 'host' and 'g2' are the same; give one of them")
            given["host"] = given.pop(_SAME_AS_HOST)
        if "host" not in given:
            raise ValueError("tiers: 'host' is missing, the number of blocks that fit host memory")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `of` reads, without defaults."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self) if each.init}
        return {name: value for name, (value, default) in values.items() if value != default}

    def make(self, block_size: int) -> OffloadEngine:
        """Return an offload engine for one of Dynamo's managers, whose blocks have `block_size` tokens.

        Raises:
            ValueError: an option of another engine is set.
        """
        self._check_has((*_OF_VLLM, *_OF_SIMPLE, *_OF_SGLANG), "a host that evicted blocks travel to has", _OF_DYNAMO)
        return HostOffload(
            self.host,
            block_bytes=self.bytes_per_token * block_size,
            batch_size=self.batch or isqrt(self.host),
            to_host_gbps=self.gbps,
            to_device_gbps=self.gbps,
        )

    @property
    def below(self) -> StorageTier:
        """The tier that these settings describe: the host, or a disk."""
        return StorageTier.DISK if self.disk else StorageTier.HOST_PINNED

    @property
    def leaves_holes(self) -> bool:
        """Whether the device may evict a block before the blocks behind it."""
        return self.connector == "simple"

    def make_simple(self, manager: VllmHybridManager) -> tuple[SimpleHost, TimedCopies]:
        """Return the pool below one of vLLM's managers, and the durations of its copies.

        Raises:
            ValueError: an option of another engine is set, or the manager has blocks of several sizes.
        """
        from pytest_kvmock.engines.vllm.host.simple_host import SimpleHost

        native = tuple(name for name in _OF_VLLM if name != "async_scheduling")
        refused = (*_OF_DYNAMO, *_OF_SGLANG, *native)
        self._check_has(refused, "vLLM's SimpleCPUOffloadConnector has", (*_OF_SIMPLE, "async_scheduling"))
        host = SimpleHost(self.host, manager, lazy=self.lazy, disk=self.disk)
        block_bytes = self.bytes_per_token * manager.block_size
        return host, TimedCopies(self.gbps, block_bytes, reports_late=self.async_scheduling)

    def make_native(self, block_size: int) -> tuple[dict[str, Any], TimedCopies]:
        """Return the host's options for one of vLLM's managers, and the durations of its transfers.

        The manager's blocks have `block_size` tokens.

        Raises:
            ValueError: an option of another engine is set.
        """
        self._check_has((*_OF_DYNAMO, *_OF_SGLANG, *_OF_SIMPLE), "vLLM's native offload has", _OF_VLLM)
        files = None
        if self.files:
            from pytest_kvmock.engines.vllm.host.file_tier import FileStore, FileTier, TimedFileThreads
            from pytest_kvmock.values.shared_stores import note_layout

            folder = FileStore() if self.folder is None else self.folder
            note_layout(folder.block_sizes, block_size)
            threads = TimedFileThreads(
                folder,
                self.file_gbps,
                self.bytes_per_token * block_size * self.chunk,
            )
            files = FileTier(threads, locality=self.file_locality, publishes=self.file_events)
        options: dict[str, Any] = {
            "num_chunks": self.host // self.chunk,
            "blocks_per_chunk": self.chunk,
            "policy": self.policy,
            "prompt_only": self.prompt_only,
            "store_threshold": self.store_threshold,
            "max_load_tokens": self.max_load_tokens,
            "max_offload_tokens": self.max_offload_tokens,
            "self_describing": self.self_describing,
            "files": files,
        }
        return options, TimedCopies(self.gbps, self.bytes_per_token * block_size, reports_late=self.async_scheduling)

    def make_hicache(self, block_size: int) -> tuple[HostLinks, dict[str, Any]]:
        """Return the links of one of SGLang's managers, whose blocks have `block_size` tokens, and its host's options.

        Raises:
            ValueError: an option of another engine is set.
        """
        self._check_has((*_OF_DYNAMO, *_OF_VLLM, *_OF_SIMPLE), "SGLang's HiCache has", _OF_SGLANG)
        options: dict[str, Any] = {"host_blocks": self.host, "write_policy": self.write_policy}
        if self.storage:
            from pytest_kvmock.engines.sglang.host.hicache_storage import HostStorage, PageStore

            store = PageStore() if self.store is None else self.store
            options["storage"] = HostStorage(
                store,
                prefetch_policy=self.prefetch_policy,
                prefetch_threshold=self.prefetch_threshold,
                batch=self.storage_batch,
                retry_interval=self.retry_interval,
                retry_attempts=self.retry_attempts,
                timeout_base=self.prefetch_timeout_base,
                timeout_per_ki_token=self.prefetch_timeout_per_ki_token,
            )
        return HostLinks(self.gbps, self.bytes_per_token * block_size), options

    def with_store(self, store: PageStore | None = None) -> Tiers:
        """Return these tiers with a storage that all managers made from them share; None: a new one."""
        from pytest_kvmock.engines.sglang.host.hicache_storage import PageStore

        shared = replace(self)
        object.__setattr__(shared, "store", PageStore() if store is None else store)
        return shared

    def with_folder(self, folder: FileStore) -> Tiers:
        """Return these tiers with a shared folder.

        Raises:
            ValueError: `files` is not set.
        """
        if not self.files:
            raise ValueError(
                "a store of kind 'files' is below a host: give the workers tiers={'host': …, 'files': True}"
            )
        shared = replace(self)
        object.__setattr__(shared, "folder", folder)
        return shared

    def _check_has(self, refused: tuple[str, ...], who: str, own: tuple[str, ...]) -> None:
        wrong = next((name for name in refused if name in self.to_dict()), None)
        if wrong is not None:
            known = ", ".join(name for name in (*_OF_BOTH, *own) if name != _SAME_AS_HOST)
            raise ValueError(f"tiers: {wrong!r} is not for this backend; {who} {known}")


def host_time_of(driver: Any, now: float) -> HostTime:
    """Return the host time of a worker whose manager has a host of any kind."""
    if isinstance(driver.manager.offload, HostLinks):
        from pytest_kvmock.engines.sglang.host.hicache_host_time import HiCacheHostTime

        return HiCacheHostTime(driver, now)
    if driver.traits.chunk is None:
        from pytest_kvmock.engines.dynamo.host.tier_host_time import TierHostTime

        return TierHostTime(driver, now)
    if hasattr(driver.manager.offload, "empty"):
        from pytest_kvmock.engines.vllm.host.store_host import StoreHostTime

        return StoreHostTime(driver, now)
    from pytest_kvmock.engines.vllm.host.native_host_time import NativeHostTime

    return NativeHostTime(driver, now)
