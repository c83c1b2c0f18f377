"""The router's side: the reference index of who holds which block, and the recovery of missed events."""

from pytest_kvmock.router.index import (
    BlockNotFound,
    InvalidBlockSequence,
    KvEventError,
    OverlapScores,
    ParentBlockNotFound,
    RadixIndex,
)

__all__ = [
    "BlockNotFound",
    "InvalidBlockSequence",
    "KvEventError",
    "OverlapScores",
    "ParentBlockNotFound",
    "RadixIndex",
]
