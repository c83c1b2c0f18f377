"""Values shared by all packages: tokens, hashes, events, moves, prompt keys, sinks, checks, and programs of requests.

The names that most tests need are at the root; this package has the others that users import.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.values.events import Located as Located
    from pytest_kvmock.values.events import SparseStored as SparseStored
    from pytest_kvmock.values.events import Updated as Updated
    from pytest_kvmock.values.moves import Block as Block
    from pytest_kvmock.values.moves import Deref as Deref
    from pytest_kvmock.values.moves import Destroy as Destroy
    from pytest_kvmock.values.moves import MoveError as MoveError
    from pytest_kvmock.values.moves import Promote as Promote
    from pytest_kvmock.values.moves import Use as Use
    from pytest_kvmock.values.plh import lineage_hash as lineage_hash
    from pytest_kvmock.values.plh import lineage_hashes as lineage_hashes
    from pytest_kvmock.values.prompt_keys import group_extra as group_extra

_HOME = {
    "Block": "values.moves",
    "Deref": "values.moves",
    "Destroy": "values.moves",
    "Located": "values.events",
    "MoveError": "values.moves",
    "Promote": "values.moves",
    "SparseStored": "values.events",
    "Updated": "values.events",
    "Use": "values.moves",
    "group_extra": "values.prompt_keys",
    "lineage_hash": "values.plh",
    "lineage_hashes": "values.plh",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use, because a test of a router needs none of these.
__getattr__ = late_names(__name__, _HOME)
