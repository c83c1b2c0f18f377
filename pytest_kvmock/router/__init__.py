"""The router's side: the reference index of who holds which block, the recovery of missed events, and who gets a request."""

from pytest_kvmock.router.index import (
    BlockNotFound,
    InvalidBlockSequence,
    OverlapScores,
    ParentBlockNotFound,
    RadixIndex,
    RadixIndexError,
)
from pytest_kvmock.router.loads import Load, LoadBook
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
