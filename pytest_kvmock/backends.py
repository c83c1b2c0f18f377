"""Which mock engines there are: names, what each follows, and the profile that sizes them.

This module imports none of them: a spec loads its manager when one is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.sinks import Sink


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One named behaviour of an engine's block manager.

    Attributes:
        name: the name that tests see, in ids too.
        follows: the program and version whose behaviour it is.
        make: makes a manager; called with `num_blocks`, `block_size`, `dp_rank` and `sink` by keyword.
        residency: "unique" where a block is published once while it is held; "counted" where an engine publishes
            every copy of it.
        prefix_closed: whether a block goes before its parent in scheduler traffic, so that what is held is always a
            set of whole prefixes, and links a block to no other parent than its own.
    """

    name: str
    follows: str
    make: Callable[..., KvManager]
    residency: Literal["unique", "counted"] = "unique"
    prefix_closed: bool = True


def _lineage(**sizes: Any) -> KvManager:
    from pytest_kvmock.cache.eviction.lineage import LineagePolicy
    from pytest_kvmock.cache.logical import LogicalManager

    return LogicalManager(backend="lineage", eviction=LineagePolicy(), **sizes)


def _lru(**sizes: Any) -> KvManager:
    from pytest_kvmock.cache.eviction.lru import LruPolicy
    from pytest_kvmock.cache.logical import LogicalManager

    return LogicalManager(backend="lru", eviction=LruPolicy(), **sizes)


def _multi_lru(*, num_blocks: int, **sizes: Any) -> KvManager:
    from pytest_kvmock.cache.eviction.multi_lru import MultiLruPolicy
    from pytest_kvmock.cache.logical import LogicalManager

    policy = MultiLruPolicy(num_blocks)
    return LogicalManager(backend="multi_lru", eviction=policy, num_blocks=num_blocks, **sizes)


_LOGICAL: Final = "dynamo-mocker 1.2.1 on kvbm-logical 1.2.1"

BACKENDS: Final[Mapping[str, BackendSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            BackendSpec("lineage", f"{_LOGICAL}, lineage backend (its default)", _lineage),
            BackendSpec("lru", f"{_LOGICAL}, lru backend", _lru),
            BackendSpec("multi_lru", f"{_LOGICAL}, multi_lru backend", _multi_lru, prefix_closed=False),
        )
    }
)
"""All backends by name, in the order in which the matrix runs them."""


def backend_spec(name: str) -> BackendSpec:
    """Look a backend up.

    Raises:
        ValueError: there is none of this name; the known ones are listed.
    """
    spec = BACKENDS.get(name)
    if spec is None:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    return spec


def create_manager(
    backend: str = "lineage", *, num_blocks: int, block_size: int = 16, dp_rank: int = 0, sink: Sink | None = None
) -> KvManager:
    """Make a block manager by itself: no pytest, no harness, nobody who judges.

    Args:
        backend: its name.
        num_blocks: capacity in blocks.
        block_size: tokens a block; for the logical backends a power of two from 2 to 1024.
        dp_rank: the data-parallel rank that its events name.
        sink: who hears its events; None for nobody.

    Raises:
        ValueError: an unknown backend, a capacity below 1, a block size that the backend refuses.
    """
    return backend_spec(backend).make(num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)


MOST_WORKERS: Final = 2**16
"""Worker ids are below this; those above are of sinks."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """How large and of what kind the mock engines of a test are.

    Attributes:
        block_size: tokens a block.
        num_blocks: capacity of one worker (of each rank), in blocks.
        workers: how many workers exist from the start, with ids from 0.
        dp_size: data-parallel ranks of each worker.
        prefix_caching: False: nothing is reused and nothing is published, as in the real stack.
        chunk: prefill in chunks of this many tokens; None: in one go.
        seed: seeds everything random, together with the test's name.

    Raises:
        ValueError: a field out of range. The message has its name, what was given and what is allowed.
    """

    block_size: int = 16
    num_blocks: int = 256
    workers: int = 1
    dp_size: int = 1
    prefix_caching: bool = True
    chunk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("num_blocks", 1), ("workers", 0), ("dp_size", 1)):
            _check_int(name, getattr(self, name), least)
        if self.workers > MOST_WORKERS:
            raise ValueError(f"workers must be at most {MOST_WORKERS}, got {self.workers}")
        if self.chunk is not None:
            _check_int("chunk", self.chunk, 1, " tokens, or None")
        if not isinstance(self.prefix_caching, bool):
            raise ValueError(f"prefix_caching must be True or False, got {self.prefix_caching!r}")  # noqa: TRY004
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")  # noqa: TRY004 - one error a profile

    def replace(self, **fields: Any) -> EngineProfile:
        """Return the same profile with some fields changed.

        Raises:
            ValueError: no such field, or a value out of range.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in known:
                raise ValueError(f"unknown profile field {name!r}; known: {', '.join(known)}")
        return dataclasses.replace(self, **fields)


def _check_int(name: str, value: object, least: int, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}{unit}, got {value!r}")
