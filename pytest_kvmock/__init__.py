"""Mock KV-cache engines, event sinks and a router index that checks every event.

The names that most tests need are here; they are loaded when they are first used (PEP 562), so that a test suite that has
the plugin installed and does not use it pays for none of them. The others are in their modules: `moves`, `sinks`, `tokens`,
`plh`, `traces`, `profiles`, `engine`, `fleet`, `cache`, `block_manager`, `router`, `wire`, `reduce`,
`scenarios` and `testing`.
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
    from pytest_kvmock.cache.paged import PagedCacheManager as PagedCacheManager
    from pytest_kvmock.clock.engine_state import EngineStalled as EngineStalled
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
    from pytest_kvmock.harness import KvSink as KvSink
    from pytest_kvmock.harness import RouterHarness as RouterHarness
    from pytest_kvmock.harness.faults import Faults as Faults
    from pytest_kvmock.harness.recovery import Recovery as Recovery
    from pytest_kvmock.hygiene.log import EventLog as EventLog
    from pytest_kvmock.hygiene.problem import EventRulesBroken as EventRulesBroken
    from pytest_kvmock.hygiene.problem import Problem as Problem
    from pytest_kvmock.plugin.options import KvEventWarning as KvEventWarning
    from pytest_kvmock.reduce import Reproduction as Reproduction
    from pytest_kvmock.reduce import reproduce as reproduce
    from pytest_kvmock.router.index import KvEventError as KvEventError
    from pytest_kvmock.router.index import RadixIndex as RadixIndex
    from pytest_kvmock.schedulers.args import MockEngineArgs as MockEngineArgs
    from pytest_kvmock.sinks import CapturingSink as CapturingSink
    from pytest_kvmock.tiers.config import Tiers as Tiers
    from pytest_kvmock.tokens import Prompt as Prompt
    from pytest_kvmock.tokens import block_hashes as block_hashes
    from pytest_kvmock.tokens import sequence_hashes as sequence_hashes
    from pytest_kvmock.wire.zmq import KvPublisher as KvPublisher
    from pytest_kvmock.wire.zmq import KvSubscriber as KvSubscriber

# The same names with their homes, for `__getattr__`; a test compares the two.
_HOME = {
    "BACKENDS": "backends",
    "BackendSpec": "backends",
    "CapturingSink": "sinks",
    "Cleared": "events",
    "EngineProfile": "backends",
    "EngineStalled": "clock.engine_state",
    "EventLog": "hygiene.log",
    "EvictionPolicy": "cache.dynamo.eviction.policy",
    "Faults": "harness.faults",
    "KvCacheEvent": "events",
    "KvEventError": "router.index",
    "KvEventWarning": "plugin.options",
    "EventRulesBroken": "hygiene.problem",
    "KvManager": "cache.manager",
    "KvPublisher": "wire.zmq",
    "KvSink": "harness",
    "KvSubscriber": "wire.zmq",
    "KvWorker": "engine.worker",
    "MockEngine": "clock.mock_engine",
    "MockEngineArgs": "schedulers.args",
    "OutOfBlocks": "engine.worker",
    "PagedCacheManager": "cache.paged",
    "Problem": "hygiene.problem",
    "Prompt": "tokens",
    "RadixIndex": "router.index",
    "Recovery": "harness.recovery",
    "Removed": "events",
    "Reproduction": "reduce",
    "RouterEvent": "events",
    "RouterHarness": "harness",
    "StorageTier": "events",
    "Stored": "events",
    "Tiers": "tiers.config",
    "block_hashes": "tokens",
    "create_manager": "backends",
    "replay": "clock.replay",
    "reproduce": "reduce",
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
