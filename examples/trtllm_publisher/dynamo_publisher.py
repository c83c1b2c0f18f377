"""What Dynamo's publisher for TensorRT-LLM gives its router, as a filter between a worker and an index.

As read in ai-dynamo 1.6.1 (`dynamo.trtllm`), not run: of windows the longest alone, which it learns from the created events;
of a Stored what stands before the first partial block; no Removed of what it left out; hashes signed; Updated and created are
ignored, so that a block on the host counts as one of the device until it is gone.
"""

from dataclasses import replace

from pytest_kvmock import Cleared, Removed, Stored
from pytest_kvmock.events import Updated


class DynamoPublisher:
    """Gives an index what Dynamo's publisher lets through; itself what is tested as an index.

    Args:
        index: Dynamo's, or another that it is to feed.
    """

    def __init__(self, index):
        self.index = index
        self.find_matches = index.find_matches
        self.longest = {}  # by worker and rank
        self.partial = set()  # names that were left out

    def apply(self, event):
        passed = self.passed(event)
        if passed is not None:
            self.index.apply(passed)

    def passed(self, event):
        """What is published of an event; None: nothing."""
        data, window = event.data, event.extra["window_size"]
        if isinstance(data, Cleared):
            self.longest[event.key] = max(window, self.longest.get(event.key, 0))
            return None
        if isinstance(data, Updated) or window < self.longest.get(event.key, 0):
            return None
        if isinstance(data, Stored):
            data = self.whole(data, event.token_ids)
        else:
            names = [name for name in data.block_hashes if name not in self.partial]
            self.partial.difference_update(data.block_hashes)
            data = Removed(map(signed, names))
        if not data.block_hashes:
            return None
        return replace(event, event=replace(event.event, data=data), token_ids=None, extra=None)

    def whole(self, data, token_ids):
        """A Stored up to its first partial block, in signed hashes."""
        size = max(self.size, *map(len, token_ids))
        self.size = size
        count = next((place for place, tokens in enumerate(token_ids) if len(tokens) < size), len(token_ids))
        self.partial.update(data.block_hashes[count:])
        parent = None if data.parent_hash is None else signed(data.parent_hash)
        return Stored(parent, tuple(map(signed, data.block_hashes[:count])), data.tokens_hashes[:count])

    size = 0
    """Tokens a block, as far as any was seen; Dynamo's publisher is told."""


def signed(name):
    """A hash of 64 bits without a sign as one with a sign."""
    return name - 2**64 if name >= 2**63 else name
