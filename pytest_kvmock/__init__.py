"""Mock KV-cache engines, event sinks and a router index that checks every event.

The names that most tests need are here. They are loaded on first use (PEP 562): a test suite that has the plugin
installed but does not use it loads none of them. The other public names are in nine modules and packages: `values`,
`engines`, `wire` (with `wire.sockets`), `oracle`, `fleets`, `harness` (with `harness.reduce`), `servers`, `testing` and
the folders of `contrib`. Any name that these do not export may change with any release.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BACKENDS as BACKENDS
    from pytest_kvmock.engines.backends import BackendSpec as BackendSpec
    from pytest_kvmock.engines.backends import EngineProfile as EngineProfile
    from pytest_kvmock.engines.backends import create_manager as create_manager
    from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy as EvictionPolicy
    from pytest_kvmock.engines.base.manager import KvManager as KvManager
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs as MockEngineArgs
    from pytest_kvmock.engines.worker import KvWorker as KvWorker
    from pytest_kvmock.engines.worker import OutOfBlocks as OutOfBlocks
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine as MockEngine
    from pytest_kvmock.fleets.clock.replay import replay as replay
    from pytest_kvmock.fleets.fleet import Fleet as Fleet
    from pytest_kvmock.harness import KvSink as KvSink
    from pytest_kvmock.harness import RouterHarness as RouterHarness
    from pytest_kvmock.oracle.hygiene.log import EventLog as EventLog
    from pytest_kvmock.oracle.hygiene.problem import EventRulesBroken as EventRulesBroken
    from pytest_kvmock.oracle.hygiene.problem import Problem as Problem
    from pytest_kvmock.oracle.index.index import RadixIndex as RadixIndex
    from pytest_kvmock.oracle.index.index import RadixIndexError as RadixIndexError
    from pytest_kvmock.plugin.options import KvEventWarning as KvEventWarning
    from pytest_kvmock.values.checks import KvMockError as KvMockError
    from pytest_kvmock.values.events import Cleared as Cleared
    from pytest_kvmock.values.events import KvCacheEvent as KvCacheEvent
    from pytest_kvmock.values.events import Removed as Removed
    from pytest_kvmock.values.events import RouterEvent as RouterEvent
    from pytest_kvmock.values.events import StorageTier as StorageTier
    from pytest_kvmock.values.events import Stored as Stored
    from pytest_kvmock.values.sinks import CapturingSink as CapturingSink
    from pytest_kvmock.values.tokens import Prompt as Prompt
    from pytest_kvmock.values.tokens import block_hashes as block_hashes
    from pytest_kvmock.values.tokens import sequence_hashes as sequence_hashes

# The same names with their homes, for `__getattr__`; a test compares the two.
_HOME = {
    "BACKENDS": "engines.backends",
    "BackendSpec": "engines.backends",
    "CapturingSink": "values.sinks",
    "Cleared": "values.events",
    "EngineProfile": "engines.backends",
    "EventLog": "oracle.hygiene.log",
    "EvictionPolicy": "engines.base.eviction_policy",
    "Fleet": "fleets.fleet",
    "KvCacheEvent": "values.events",
    "RadixIndexError": "oracle.index.index",
    "KvEventWarning": "plugin.options",
    "EventRulesBroken": "oracle.hygiene.problem",
    "KvManager": "engines.base.manager",
    "KvMockError": "values.checks",
    "KvSink": "harness",
    "KvWorker": "engines.worker",
    "MockEngine": "fleets.clock.mock_engine",
    "MockEngineArgs": "engines.schedulers.args",
    "OutOfBlocks": "engines.worker",
    "Problem": "oracle.hygiene.problem",
    "Prompt": "values.tokens",
    "RadixIndex": "oracle.index.index",
    "Removed": "values.events",
    "RouterEvent": "values.events",
    "RouterHarness": "harness",
    "StorageTier": "values.events",
    "Stored": "values.events",
    "block_hashes": "values.tokens",
    "create_manager": "engines.backends",
    "replay": "fleets.clock.replay",
    "sequence_hashes": "values.tokens",
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
