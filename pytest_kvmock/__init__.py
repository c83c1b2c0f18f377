"""Mock KV-cache engines, event sinks and a router index that checks every event.

The public names are loaded when they are first used (PEP 562), so that a test suite that has the plugin installed and
does not use it pays for none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pytest_kvmock.backends import BACKENDS as BACKENDS
    from pytest_kvmock.backends import BackendSpec as BackendSpec
    from pytest_kvmock.backends import EngineProfile as EngineProfile
    from pytest_kvmock.backends import create_manager as create_manager
    from pytest_kvmock.cache.base import RequestLevel as RequestLevel
    from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy as EvictionPolicy
    from pytest_kvmock.cache.dynamo.eviction.policy import Slot as Slot
    from pytest_kvmock.cache.manager import KvManager as KvManager
    from pytest_kvmock.cache.manager import PrefillCost as PrefillCost
    from pytest_kvmock.cache.paged import PagedCacheManager as PagedCacheManager
    from pytest_kvmock.cache.paged import PagedRequest as PagedRequest
    from pytest_kvmock.cache.vllm.hashes import ExtraKeys as ExtraKeys
    from pytest_kvmock.cache.vllm.hashes import MultimodalItem as MultimodalItem
    from pytest_kvmock.engine.driver import Driver as Driver
    from pytest_kvmock.engine.driver import Traits as Traits
    from pytest_kvmock.engine.sequence import ActiveSequence as ActiveSequence
    from pytest_kvmock.engine.worker import KvWorker as KvWorker
    from pytest_kvmock.engine.worker import OutOfBlocks as OutOfBlocks
    from pytest_kvmock.engine.worker import Request as Request
    from pytest_kvmock.engine.worker import RequestError as RequestError
    from pytest_kvmock.engine.worker import Served as Served
    from pytest_kvmock.events import Cleared as Cleared
    from pytest_kvmock.events import KvCacheEvent as KvCacheEvent
    from pytest_kvmock.events import Removed as Removed
    from pytest_kvmock.events import RouterEvent as RouterEvent
    from pytest_kvmock.events import StorageTier as StorageTier
    from pytest_kvmock.events import Stored as Stored
    from pytest_kvmock.faults.fault import Fault as Fault
    from pytest_kvmock.faults.faults import Faults as Faults
    from pytest_kvmock.harness import KvSink as KvSink
    from pytest_kvmock.harness import RouterHarness as RouterHarness
    from pytest_kvmock.harness import Verdict as Verdict
    from pytest_kvmock.harness.questions import WorkerKey as WorkerKey
    from pytest_kvmock.harness.recovery import Recovery as Recovery
    from pytest_kvmock.hygiene.injected import Injected as Injected
    from pytest_kvmock.hygiene.log import EventLog as EventLog
    from pytest_kvmock.hygiene.log import Expectation as Expectation
    from pytest_kvmock.hygiene.log import KvEventsError as KvEventsError
    from pytest_kvmock.hygiene.log import LogEntry as LogEntry
    from pytest_kvmock.hygiene.problem import Problem as Problem
    from pytest_kvmock.moves import Block as Block
    from pytest_kvmock.moves import Deref as Deref
    from pytest_kvmock.moves import Destroy as Destroy
    from pytest_kvmock.moves import MoveError as MoveError
    from pytest_kvmock.moves import Promote as Promote
    from pytest_kvmock.moves import Use as Use
    from pytest_kvmock.plh import lineage_hash as lineage_hash
    from pytest_kvmock.plugin.options import KvEventWarning as KvEventWarning
    from pytest_kvmock.profiles import NamedProfile as NamedProfile
    from pytest_kvmock.profiles import read_profiles as read_profiles
    from pytest_kvmock.reduce import NotReduced as NotReduced
    from pytest_kvmock.reduce import Reproduction as Reproduction
    from pytest_kvmock.reduce import reproduce as reproduce
    from pytest_kvmock.router.index import BlockNotFound as BlockNotFound
    from pytest_kvmock.router.index import InvalidBlockSequence as InvalidBlockSequence
    from pytest_kvmock.router.index import KvEventError as KvEventError
    from pytest_kvmock.router.index import OverlapScores as OverlapScores
    from pytest_kvmock.router.index import ParentBlockNotFound as ParentBlockNotFound
    from pytest_kvmock.router.index import RadixIndex as RadixIndex
    from pytest_kvmock.router.recovery import Events as Events
    from pytest_kvmock.router.recovery import InvalidRange as InvalidRange
    from pytest_kvmock.router.recovery import LocalIndex as LocalIndex
    from pytest_kvmock.router.recovery import RecoveryStep as RecoveryStep
    from pytest_kvmock.router.recovery import RouterCursor as RouterCursor
    from pytest_kvmock.router.recovery import TooNew as TooNew
    from pytest_kvmock.router.recovery import TreeDump as TreeDump
    from pytest_kvmock.router.recovery import WorkerQuery as WorkerQuery
    from pytest_kvmock.sinks import CapturingSink as CapturingSink
    from pytest_kvmock.sinks import FanOutSink as FanOutSink
    from pytest_kvmock.sinks import JsonlRecorder as JsonlRecorder
    from pytest_kvmock.sinks import Sink as Sink
    from pytest_kvmock.strict_yaml import YamlError as YamlError
    from pytest_kvmock.tokens import Prompt as Prompt
    from pytest_kvmock.tokens import TokenIds as TokenIds
    from pytest_kvmock.tokens import block_hashes as block_hashes
    from pytest_kvmock.tokens import sequence_hashes as sequence_hashes
    from pytest_kvmock.traces import TraceError as TraceError
    from pytest_kvmock.traces import TraceRequest as TraceRequest
    from pytest_kvmock.traces import read_mooncake as read_mooncake
    from pytest_kvmock.traces import synthetic_trace as synthetic_trace

_HOME = {
    "TokenIds": "tokens",
    "Sink": "sinks",
    "Expectation": "hygiene.log",
    "WorkerKey": "harness.questions",
    "Fault": "faults.fault",
    "Faults": "faults.faults",
    "Injected": "hygiene.injected",
    "KvEventWarning": "plugin.options",
    "Block": "moves",
    "LogEntry": "hygiene.log",
    "Served": "engine.worker",
    "ExtraKeys": "cache.vllm.hashes",
    "MultimodalItem": "cache.vllm.hashes",
    "PrefillCost": "cache.manager",
    "RequestLevel": "cache.base",
    "KvManager": "cache.manager",
    "PagedCacheManager": "cache.paged",
    "PagedRequest": "cache.paged",
    "EvictionPolicy": "cache.dynamo.eviction.policy",
    "Slot": "cache.dynamo.eviction.policy",
    "BACKENDS": "backends",
    "BackendSpec": "backends",
    "EngineProfile": "backends",
    "create_manager": "backends",
    "ActiveSequence": "engine.sequence",
    "Driver": "engine.driver",
    "KvWorker": "engine.worker",
    "OutOfBlocks": "engine.worker",
    "Request": "engine.worker",
    "RequestError": "engine.worker",
    "Traits": "engine.driver",
    "Cleared": "events",
    "KvCacheEvent": "events",
    "Removed": "events",
    "RouterEvent": "events",
    "StorageTier": "events",
    "Stored": "events",
    "KvSink": "harness",
    "RouterHarness": "harness",
    "Verdict": "harness",
    "EventLog": "hygiene.log",
    "KvEventsError": "hygiene.log",
    "Problem": "hygiene.problem",
    "NamedProfile": "profiles",
    "read_profiles": "profiles",
    "Deref": "moves",
    "Destroy": "moves",
    "MoveError": "moves",
    "Promote": "moves",
    "Use": "moves",
    "NotReduced": "reduce",
    "Reproduction": "reduce",
    "reproduce": "reduce",
    "BlockNotFound": "router.index",
    "InvalidBlockSequence": "router.index",
    "KvEventError": "router.index",
    "OverlapScores": "router.index",
    "ParentBlockNotFound": "router.index",
    "RadixIndex": "router.index",
    "Recovery": "harness.recovery",
    "Events": "router.recovery",
    "InvalidRange": "router.recovery",
    "LocalIndex": "router.recovery",
    "RecoveryStep": "router.recovery",
    "RouterCursor": "router.recovery",
    "TooNew": "router.recovery",
    "TreeDump": "router.recovery",
    "WorkerQuery": "router.recovery",
    "CapturingSink": "sinks",
    "FanOutSink": "sinks",
    "JsonlRecorder": "sinks",
    "YamlError": "strict_yaml",
    "Prompt": "tokens",
    "block_hashes": "tokens",
    "lineage_hash": "plh",
    "sequence_hashes": "tokens",
    "TraceError": "traces",
    "TraceRequest": "traces",
    "read_mooncake": "traces",
    "synthetic_trace": "traces",
}

__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605 - the table is the one list


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
