"""Engines: workers and their requests, and what those who write drivers of their own need."""

from typing import TYPE_CHECKING

from pytest_kvmock.cache.dynamo.sequence import ActiveSequence
from pytest_kvmock.checks import late_names
from pytest_kvmock.drivers.driver import Driver, MakeDriver, SchedulerDriver, SlotsLost, Traits, WouldWait
from pytest_kvmock.engine.worker import KvWorker, OutOfBlocks, Request, RequestError, Served

if TYPE_CHECKING:
    from pytest_kvmock.cache.sglang.speculative import SglangSpeculative
    from pytest_kvmock.cache.vllm.speculative import Speculative

__all__ = [
    "ActiveSequence",
    "Driver",
    "KvWorker",
    "MakeDriver",
    "OutOfBlocks",
    "Request",
    "RequestError",
    "SchedulerDriver",
    "Served",
    "SglangSpeculative",
    "SlotsLost",
    "Speculative",
    "Traits",
    "WouldWait",
]

# Loaded when somebody asks for it: a test of a router needs none of these.
__getattr__ = late_names(
    __name__,
    {
        "SglangSpeculative": "cache.sglang.speculative",
        "Speculative": "cache.vllm.speculative",
    },
)
