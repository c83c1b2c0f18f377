"""Engines: workers, their requests, and the drivers that bring those to a block manager."""

from pytest_kvmock.cache.sglang.speculative import SglangSpeculative
from pytest_kvmock.cache.vllm.speculative import Speculative
from pytest_kvmock.engine.driver import Driver, MakeDriver, SlotsLost, Traits, WouldWait
from pytest_kvmock.engine.sequence import ActiveSequence
from pytest_kvmock.engine.worker import KvWorker, OutOfBlocks, Request, RequestError, Served

__all__ = [
    "ActiveSequence",
    "Driver",
    "KvWorker",
    "MakeDriver",
    "OutOfBlocks",
    "Request",
    "RequestError",
    "Served",
    "SglangSpeculative",
    "SlotsLost",
    "Speculative",
    "Traits",
    "WouldWait",
]
