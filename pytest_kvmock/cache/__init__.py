"""Block managers: one folder an engine, and what they share."""

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy, Slot
from pytest_kvmock.cache.manager import KvManager, PrefillCost
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
