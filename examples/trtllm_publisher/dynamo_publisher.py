"""Dynamo's publisher for TensorRT-LLM, as a filter between a worker and an index.

Its rules are read from ai-dynamo 1.6.1 (`dynamo.trtllm`), not run. It passes on only the longest window, known from the
created events; the blocks of a Stored before the first partial one; no Removed of blocks that it left out; and signed
hashes. Updated and created are ignored, so that a block on the host counts as one on the device until it is gone.
"""

from collections import defaultdict
from dataclasses import replace

from pytest_kvmock import Cleared, Removed, Stored
from pytest_kvmock.values import Updated


class DynamoPublisher:
    """Passes the events of Dynamo's publisher on to an index, and is itself tested as an index.

    Args:
        index: Dynamo's index, or another one to feed.
        block_size: tokens per block, which Dynamo's publisher also needs.
    """

    def __init__(self, index, block_size):
        self.index, self.block_size = index, block_size
        self.find_matches = index.find_matches
        self.longest = {}  # by worker and rank
        self.partial = defaultdict(set)  # names that were left out, by the same

    def apply(self, event):
        passed = self.passed(event)
        if passed is not None:
            self.index.apply(passed)

    def passed(self, event):
        """Return the part of an event that is published; None if nothing is."""
        data, window = event.data, event.extra["window_size"]
        if isinstance(data, Cleared):
            self.longest[event.key] = max(window, self.longest.get(event.key, 0))
            return None
        if isinstance(data, Updated) or window < self.longest.get(event.key, 0):
            return None
        if isinstance(data, Stored):
            data = self.whole(data, event.token_ids, self.partial[event.key])
        else:
            left_out = self.partial[event.key]
            names = [name for name in data.block_hashes if name not in left_out]
            left_out.difference_update(data.block_hashes)
            data = Removed(map(signed, names))
        if not data.block_hashes:
            return None
        return replace(event, event=replace(event.event, data=data), token_ids=None, extra=None)

    def whole(self, data, token_ids, left_out):
        """Return a Stored up to its first partial block, with signed hashes."""
        sizes = [*map(len, token_ids)]
        count = sizes.count(self.block_size)  # only the last one may have fewer
        left_out.update(data.block_hashes[count:])
        parent = None if data.parent_hash is None else signed(data.parent_hash)
        return Stored(parent, tuple(map(signed, data.block_hashes[:count])), data.tokens_hashes[:count])


def signed(name):
    """Return an unsigned 64-bit hash as a signed one."""
    return name - 2**64 if name >= 2**63 else name
