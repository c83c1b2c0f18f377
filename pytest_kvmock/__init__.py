"""Mock KV-cache engines, event sinks and a router index that checks every event.

The public names are loaded when they are first used (PEP 562), so that a test suite that has the plugin installed and
does not use it pays for none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pytest_kvmock.events import Cleared as Cleared
    from pytest_kvmock.events import KvCacheEvent as KvCacheEvent
    from pytest_kvmock.events import Removed as Removed
    from pytest_kvmock.events import RouterEvent as RouterEvent
    from pytest_kvmock.events import StorageTier as StorageTier
    from pytest_kvmock.events import Stored as Stored
    from pytest_kvmock.moves import Deref as Deref
    from pytest_kvmock.moves import Destroy as Destroy
    from pytest_kvmock.moves import MoveError as MoveError
    from pytest_kvmock.moves import Promote as Promote
    from pytest_kvmock.moves import Use as Use
    from pytest_kvmock.sinks import CapturingSink as CapturingSink
    from pytest_kvmock.sinks import FanOutSink as FanOutSink
    from pytest_kvmock.sinks import JsonlRecorder as JsonlRecorder
    from pytest_kvmock.tokens import Prompt as Prompt
    from pytest_kvmock.tokens import block_hashes as block_hashes
    from pytest_kvmock.tokens import lineage_hash as lineage_hash
    from pytest_kvmock.tokens import sequence_hashes as sequence_hashes

_HOME = {
    "Cleared": "events",
    "KvCacheEvent": "events",
    "Removed": "events",
    "RouterEvent": "events",
    "StorageTier": "events",
    "Stored": "events",
    "Deref": "moves",
    "Destroy": "moves",
    "MoveError": "moves",
    "Promote": "moves",
    "Use": "moves",
    "CapturingSink": "sinks",
    "FanOutSink": "sinks",
    "JsonlRecorder": "sinks",
    "Prompt": "tokens",
    "block_hashes": "tokens",
    "lineage_hash": "tokens",
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
