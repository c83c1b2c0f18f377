"""The judge: the ledger and its rules, faults of the stream, and the reference index of which worker holds which block.

`hygiene` checks events, `faults` changes them, and `index` is the router's side; none of them imports an engine.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.oracle.index.index import OverlapScores as OverlapScores
    from pytest_kvmock.oracle.index.index import RadixIndex as RadixIndex
    from pytest_kvmock.oracle.index.index import RadixIndexError as RadixIndexError
    from pytest_kvmock.oracle.index.master_pages import MasterPages as MasterPages
    from pytest_kvmock.oracle.index.recovery import Answer as Answer
    from pytest_kvmock.oracle.index.recovery import Events as Events
    from pytest_kvmock.oracle.index.recovery import InvalidRange as InvalidRange
    from pytest_kvmock.oracle.index.recovery import RecoveryStep as RecoveryStep
    from pytest_kvmock.oracle.index.recovery import RouterCursor as RouterCursor
    from pytest_kvmock.oracle.index.recovery import TooNew as TooNew
    from pytest_kvmock.oracle.index.recovery import TreeDump as TreeDump
    from pytest_kvmock.oracle.index.recovery import WorkerQuery as WorkerQuery

_HOME = {
    "Answer": "oracle.index.recovery",
    "Events": "oracle.index.recovery",
    "InvalidRange": "oracle.index.recovery",
    "MasterPages": "oracle.index.master_pages",
    "OverlapScores": "oracle.index.index",
    "RadixIndex": "oracle.index.index",
    "RadixIndexError": "oracle.index.index",
    "RecoveryStep": "oracle.index.recovery",
    "RouterCursor": "oracle.index.recovery",
    "TooNew": "oracle.index.recovery",
    "TreeDump": "oracle.index.recovery",
    "WorkerQuery": "oracle.index.recovery",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use: a test of a router may need none of these.
__getattr__ = late_names(__name__, _HOME)
