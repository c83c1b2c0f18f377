"""Mock KV-cache engines, event sinks and a router index that checks every event.

The names that most tests need are here; they are loaded when they are first used (PEP 562), so that a test suite that has
the plugin installed and does not use it pays for none of them. The others are in their modules: `moves`, `sinks`, `tokens`,
`plh`, `traces`, `profiles`, `engine`, `clock`, `report`, `fleet`, `cache`, `block_manager`, `tiers`, `router`, `harness`,
`wire`, `wire.zmq`, `reduce`, `testing` and the folders of `contrib`.
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
    from pytest_kvmock.cache.dynamo.eviction.policy import EvictionPolicy as EvictionPolicy
    from pytest_kvmock.cache.manager import KvManager as KvManager
    from pytest_kvmock.checks import KvMockError as KvMockError
    from pytest_kvmock.clock.mock_engine import MockEngine as MockEngine
    from pytest_kvmock.clock.replay import replay as replay
    from pytest_kvmock.engine.worker import KvWorker as KvWorker
    from pytest_kvmock.engine.worker import OutOfBlocks as OutOfBlocks
    from pytest_kvmock.events import Cleared as Cleared
    from pytest_kvmock.events import KvCacheEvent as KvCacheEvent
    from pytest_kvmock.events import Removed as Removed
    from pytest_kvmock.events import RouterEvent as RouterEvent
    from pytest_kvmock.events import StorageTier as StorageTier
    from pytest_kvmock.events import Stored as Stored
    from pytest_kvmock.fleet.fleet import Fleet as Fleet
    from pytest_kvmock.harness import KvSink as KvSink
    from pytest_kvmock.harness import RouterHarness as RouterHarness
    from pytest_kvmock.hygiene.log import EventLog as EventLog
    from pytest_kvmock.hygiene.problem import EventRulesBroken as EventRulesBroken
    from pytest_kvmock.hygiene.problem import Problem as Problem
    from pytest_kvmock.plugin.options import KvEventWarning as KvEventWarning
    from pytest_kvmock.router.index import RadixIndex as RadixIndex
    from pytest_kvmock.router.index import RadixIndexError as RadixIndexError
    from pytest_kvmock.schedulers.args import MockEngineArgs as MockEngineArgs
    from pytest_kvmock.sinks import CapturingSink as CapturingSink
    from pytest_kvmock.tokens import Prompt as Prompt
    from pytest_kvmock.tokens import block_hashes as block_hashes
    from pytest_kvmock.tokens import sequence_hashes as sequence_hashes

# The same names with their homes, for `__getattr__`; a test compares the two.
_HOME = {
    "BACKENDS": "backends",
    "BackendSpec": "backends",
    "CapturingSink": "sinks",
    "Cleared": "events",
    "EngineProfile": "backends",
    "EventLog": "hygiene.log",
    "EvictionPolicy": "cache.dynamo.eviction.policy",
    "Fleet": "fleet.fleet",
    "KvCacheEvent": "events",
    "RadixIndexError": "router.index",
    "KvEventWarning": "plugin.options",
    "EventRulesBroken": "hygiene.problem",
    "KvManager": "cache.manager",
    "KvMockError": "checks",
    "KvSink": "harness",
    "KvWorker": "engine.worker",
    "MockEngine": "clock.mock_engine",
    "MockEngineArgs": "schedulers.args",
    "OutOfBlocks": "engine.worker",
    "Problem": "hygiene.problem",
    "Prompt": "tokens",
    "RadixIndex": "router.index",
    "Removed": "events",
    "RouterEvent": "events",
    "RouterHarness": "harness",
    "StorageTier": "events",
    "Stored": "events",
    "block_hashes": "tokens",
    "create_manager": "backends",
    "replay": "clock.replay",
    "sequence_hashes": "tokens",
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
