"""Block managers: one folder an engine, and what they share."""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy, Slot
from pytest_kvmock.cache.manager import KvManager, PrefillCost

if TYPE_CHECKING:
    from pytest_kvmock.cache.paged import PagedCacheManager, PagedRequest
    from pytest_kvmock.cache.vllm.groups import CacheGroup

__all__ = [
    "CacheGroup",
    "EvictionPolicy",
    "KvManager",
    "PagedCacheManager",
    "PagedRequest",
    "PrefillCost",
    "RequestLevel",
    "Slot",
]

# Loaded when somebody asks for it: a test of a router needs none of these.
_LATE = {
    "CacheGroup": "cache.vllm.groups",
    "PagedCacheManager": "cache.paged",
    "PagedRequest": "cache.paged",
}


def __getattr__(name: str) -> Any:
    home = _LATE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pytest_kvmock.{home}"), name)
