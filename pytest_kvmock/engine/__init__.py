"""Engines: workers and their requests, and what those who write drivers of their own need."""

import importlib
from typing import TYPE_CHECKING, Any

from pytest_kvmock.cache.dynamo.sequence import ActiveSequence
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
_LATE = {
    "SglangSpeculative": "cache.sglang.speculative",
    "Speculative": "cache.vllm.speculative",
}


def __getattr__(name: str) -> Any:
    home = _LATE.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pytest_kvmock.{home}"), name)
