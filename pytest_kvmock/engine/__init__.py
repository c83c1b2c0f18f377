"""Engines: workers and their requests, and what those who write drivers of their own need."""

from pytest_kvmock.cache.dynamo.sequence import ActiveSequence
from pytest_kvmock.cache.sglang.speculative import SglangSpeculative
from pytest_kvmock.cache.vllm.speculative import Speculative
from pytest_kvmock.drivers.driver import Driver, MakeDriver, SlotsLost, Traits, WouldWait
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
