"""The router's side: the reference index of who holds which block, the recovery of missed events, and who gets a request."""

from typing import TYPE_CHECKING

from pytest_kvmock.checks import late_names
from pytest_kvmock.router.index import (
    BlockNotFound,
    InvalidBlockSequence,
    OverlapScores,
    ParentBlockNotFound,
    RadixIndex,
    RadixIndexError,
)
from pytest_kvmock.router.recovery import (
    Events,
    InvalidRange,
    LocalIndex,
    RecoveryStep,
    RouterCursor,
    TooNew,
    TreeDump,
    WorkerQuery,
)

if TYPE_CHECKING:
    from pytest_kvmock.router.loads import Load, LoadBook
    from pytest_kvmock.router.routing import Candidate, RouterRequest
    from pytest_kvmock.router.selection import DynamoRouter, LeastLoaded, MostCached, RoundRobin

__all__ = [
    "BlockNotFound",
    "Candidate",
    "DynamoRouter",
    "Events",
    "InvalidBlockSequence",
    "InvalidRange",
    "LeastLoaded",
    "Load",
    "LoadBook",
    "LocalIndex",
    "MostCached",
    "OverlapScores",
    "ParentBlockNotFound",
    "RadixIndex",
    "RadixIndexError",
    "RecoveryStep",
    "RoundRobin",
    "RouterCursor",
    "RouterRequest",
    "TooNew",
    "TreeDump",
    "WorkerQuery",
]

# Loaded when somebody asks for it: a test of an index needs none of these.
__getattr__ = late_names(
    __name__,
    {
        "Candidate": "router.routing",
        "DynamoRouter": "router.selection",
        "LeastLoaded": "router.selection",
        "Load": "router.loads",
        "LoadBook": "router.loads",
        "MostCached": "router.selection",
        "RoundRobin": "router.selection",
        "RouterRequest": "router.routing",
    },
)
