"""Block managers: one folder an engine, and what they share."""

from typing import TYPE_CHECKING

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy, Slot
from pytest_kvmock.cache.manager import KvManager, PrefillCost
from pytest_kvmock.checks import late_names

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
__getattr__ = late_names(
    __name__,
    {
        "CacheGroup": "cache.vllm.groups",
        "PagedCacheManager": "cache.paged",
        "PagedRequest": "cache.paged",
    },
)
