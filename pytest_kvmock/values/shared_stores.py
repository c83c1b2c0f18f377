"""Stores that workers share, as given in a fleet's configuration: `stores={"disk": {"kind": "files", ...}}`.

The configuration is needed because no event says which worker can load from which store.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pytest_kvmock.values.checks import check_integer, check_number, is_integer, unknown_text
from pytest_kvmock.values.events import StorageTier

STORE_KINDS: Final[Mapping[str, StorageTier]] = MappingProxyType(
    {
        "files": StorageTier.DISK,
        "objects": StorageTier.DISK,
        "mooncake": StorageTier.EXTERNAL,
        "lmcache": StorageTier.HOST_PINNED,
        "hicache": StorageTier.EXTERNAL,
    }
)
"""Kinds of stores, each with the tier of its blocks in events: files and objects of vLLM's tiers (`STORAGE`), Mooncake
below vLLM (`cpu`), and LMCache's server (`CPU`). Only LMCache's streams remove announced blocks. Workers publish
nothing about HiCache's third level; Mooncake's master does, in a separate stream (`MasterMessage`).
"""

_IN_TIME: Final[Mapping[str, Any]] = {"gbps": 14.0, "bytes_per_token": 160_000}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "files": {},
    "objects": {},
    "mooncake": {"capacity": None, "ranks": 1, "heads": 8, "save_decode": False, "lookup_async": False, **_IN_TIME},
    "lmcache": {"capacity": None, "chunk": 256, "log": 32_768, **_IN_TIME},
    "hicache": {
        "capacity": None,
        "tp": 1,
        "pp": 1,
        "dcp": 1,
        "is_mla": False,
        "shares": None,
        "tag": "",
        "model": "",
    },
}
_MAY_BE_ZERO: Final = ("log", "bytes_per_token")


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that workers share: the owner of its blocks.

    Attributes:
        name: its name.
        kind: one of `STORE_KINDS`.
        workers: the workers that can load from it.
        options: its other options. For "mooncake" and "lmcache": `capacity`, in objects (one per block and share of the
            heads) or chunks, with the oldest evicted first (None: no limit); `gbps` and `bytes_per_token`, as in
            `Tiers`. For "mooncake": `ranks` of tensor parallelism, `heads` of the model, whether blocks of generated
            tokens are put (`save_decode`), and whether a look-up is answered one step later (`lookup_async`). For
            "lmcache": `chunk`, in tokens, and `log`, in records. For "hicache": `capacity` in objects, and the fields
            of a `MooncakeLayout`; an empty `tag` or `model` means none.
    """

    name: str
    kind: str
    workers: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __getitem__(self, option: str) -> Any:
        """Return the value of an option, or its default."""
        return self.options.get(option, _DEFAULTS[self.kind][option])

    @property
    def tier(self) -> StorageTier:
        """The tier that its blocks have in events."""
        return STORE_KINDS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form that `read_stores` reads, which JSON can hold."""
        return {"kind": self.kind, "workers": [*self.workers], **self.options}


def note_layout(seen: set[int], block_size: int) -> None:
    """Note the block size of an engine of a store with engine-named blocks; warn once if there are two sizes.

    Args:
        seen: the sizes so far; this set is updated.
        block_size: tokens per block.
    """
    is_new = block_size not in seen
    seen.add(block_size)
    if is_new and len(seen) == 2:
        sizes = " and of ".join(map(str, sorted(seen)))
        warnings.warn(
            f"stores: engines with blocks of {sizes} tokens share a store; neither finds what the other has put there",
            stacklevel=2,
        )


class MasterEvent(NamedTuple):
    """An event of Mooncake's master about one object, by its fields on the wire.

    Attributes:
        event_type: "stored" or "removed".
        object_key: the key of the object.
        tenant_id: the tenant that owns it.
        group_id: the group of objects that belong together; "" for none.
    """

    event_type: str
    object_key: str
    tenant_id: str = "default"
    group_id: str = ""


class MasterMessage(NamedTuple):
    """One message of Mooncake's master.

    Attributes:
        number: 0, 1, 2 ... since the start of the master.
        at_ms: when it was published, in ms.
        events: the events of the objects.
        rank: the master's rank; 0.
    """

    number: int
    at_ms: int
    events: tuple[MasterEvent, ...]
    rank: int = 0


def read_stores(given: object) -> dict[str, StoreSpec]:
    """Read the stores of a fleet; return them by name.

    Args:
        given: a mapping of names to mappings of `kind`, `workers`, a list of worker ids, and options of the kind.

    Raises:
        ValueError: `given` is not such a mapping, a key or kind is unknown, an option is invalid, or a worker would
            have two stores in one tier.
    """
    if not isinstance(given, Mapping):
        raise ValueError(  # noqa: TRY004 - one error
            f"stores must be a mapping such as {{'disk': {{'kind': 'files', 'workers': [0, 1]}}}}, got {given!r:.80}"
        )
    stores: dict[str, StoreSpec] = {}
    taken: dict[tuple[int, StorageTier], str] = {}
    for name, value in given.items():
        store = value if isinstance(value, StoreSpec) else _store(name, value)
        stores[store.name] = store
        for worker_id in store.workers:
            other = taken.setdefault((worker_id, store.tier), store.name)
            if other != store.name:
                raise ValueError(
                    f"stores: worker {worker_id} is in {other!r} and in {store.name!r}, which are one tier to its "
                    f"events ({store.tier}); no event would say which"
                )
    return stores


def _store(name: object, value: object) -> StoreSpec:
    where = f"stores[{name!r}]"
    if not isinstance(name, str) or not name:
        raise ValueError(f"stores: a name is a text, got {name!r:.80}")
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of 'kind' and 'workers', got {value!r:.80}")  # noqa: TRY004 - one error
    kind, workers = value.get("kind"), value.get("workers")
    defaults = {} if kind not in [*STORE_KINDS] else _DEFAULTS[str(kind)]  # `kind` may be unhashable
    for key in value:
        if key not in ["kind", "workers", *defaults]:
            raise ValueError(f"{where}: {unknown_text('key', key, ('kind', 'workers', *defaults))}")
    if kind not in [*STORE_KINDS]:
        raise ValueError(f"{where}: {unknown_text('kind', kind, STORE_KINDS)}")
    if not isinstance(workers, list | tuple) or not workers or not all(is_integer(each, 0) for each in workers):
        raise ValueError(f"{where}: workers must be a list of worker ids, at least one, got {workers!r:.80}")
    options = {key: _option(f"{where}: {key}", value[key], defaults[key]) for key in value if key in defaults}
    return StoreSpec(name, str(kind), tuple(dict.fromkeys(workers)), options)


def _option(where: str, value: Any, default: Any) -> Any:
    """Return an option unchanged, after a check by the type of its default."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError(f"{where} must be a text, got {value!r:.80}")  # noqa: TRY004 - one error
    elif isinstance(default, float):
        check_number(where, value, unit=" (GB/s; 0 is infinite)")
    elif value is not None or default is not None:
        least = 0 if where.endswith(_MAY_BE_ZERO) else 1
        check_integer(where, value, least, ", or None" if default is None else "")
    return value
