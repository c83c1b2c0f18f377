"""Recovery of missed events: what a worker keeps, what a router asks, and the test's hold on both."""

from pytest_kvmock.harness.recovery import Recovery
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

__all__ = [
    "Events",
    "InvalidRange",
    "LocalIndex",
    "Recovery",
    "RecoveryStep",
    "RouterCursor",
    "TooNew",
    "TreeDump",
    "WorkerQuery",
]
