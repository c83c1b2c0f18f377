"""Block managers: one folder an engine, and what they share."""

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy, Slot
from pytest_kvmock.cache.manager import KvManager, PrefillCost

__all__ = [
    "EvictionPolicy",
    "KvManager",
    "PrefillCost",
    "RequestLevel",
    "Slot",
]
