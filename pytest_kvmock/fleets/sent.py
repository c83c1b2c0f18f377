"""The prompts sent to each worker since its last announced start: the upper bound of a router's tree of sent prompts.

Theory of operation. A router that keeps such a tree has the prompts that it sent, whatever became of them. It has the
output tokens only from the worker's events, because no other source reports them. So one trie for each worker holds
every prompt that was dispatched to it and every block that it published. Only an announced start empties it; an
eviction or a silent restart does not. The keys are local hashes of blocks, which include adapters and salts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_kvmock.values.events import SparseStored, Stored
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, is_attention_group
from pytest_kvmock.values.tokens import windows_of

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.values.events import RouterEvent

_Node: TypeAlias = "dict[int, Any]"
"""The blocks that follow a block, by local hash, each with its own followers."""


class SentBlocks:
    """The prompts that were sent to each worker, and the blocks that it published, since its last announced start."""

    def __init__(self) -> None:
        self._tries: dict[Worker, _Node] = {}
        self._named: dict[Worker, dict[int, _Node]] = {}  # by the engine's block hash
        self._unknown: set[Worker] = set()
        self._is_begun = False

    def begin(self, holding: Collection[Worker]) -> None:
        """Begin a run. What was sent to workers that hold blocks before the first run is unknown."""
        if not self._is_begun:
            self._is_begun = True
            self._unknown.update(holding)

    def sent(self, local_hashes: Sequence[int], worker: Worker) -> None:
        """Note a prompt that was sent to a worker."""
        node = self._tries.setdefault(worker, {})
        for each in local_hashes:
            node = node.setdefault(each, {})

    def stored(self, event: RouterEvent, worker: Worker) -> None:
        """Note the blocks of a Stored. Other events remove nothing, and a block with an unknown parent belongs to no
        prompt.
        """
        data = event.event.data
        if not isinstance(data, Stored) or isinstance(data, SparseStored) or not is_attention_group(event.extra):
            return
        named = self._named.setdefault(worker, {})
        node = self._tries.setdefault(worker, {}) if data.parent_hash is None else named.get(data.parent_hash)
        if node is None:
            return
        if windows_of(event.token_ids or (), None if event.extra is None else event.extra.get(LOOKAHEAD))[1]:
            self._unknown.add(worker)  # the trie has blocks, but this worker's hashes cover windows
        for name, local_hash in zip(data.block_hashes, data.tokens_hashes, strict=True):
            node = named[name] = node.setdefault(local_hash, {})

    def forget(self, worker: Worker) -> None:
        """Forget a worker that restarts or is gone."""
        self._tries.pop(worker, None)
        self._named.pop(worker, None)
        self._unknown.discard(worker)

    def most(self, local_hashes: Sequence[int], worker: Worker) -> int | None:
        """Return the greatest possible number of leading blocks of a prompt on a worker; None: it is unknown what was
        sent.
        """
        if worker in self._unknown:
            return None
        node = self._tries.get(worker, {})
        for at, each in enumerate(local_hashes):
            found = node.get(each)
            if found is None:
                return at
            node = found
        return len(local_hashes)
