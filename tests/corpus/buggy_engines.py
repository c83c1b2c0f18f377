"""Plausible engines with one bug each: a real manager whose events are altered before the sink gets them."""

import dataclasses
from collections import Counter

from pytest_kvmock import BACKENDS, KvCacheEvent, Removed, StorageTier, Stored

EVERY = 3
"""A bug alters one of this many events that it could alter."""


class Altered:
    """A sink that passes on the events that a bug makes of each event, with event ids of its own.

    A subclass overrides `alter`, which yields pairs of event data and token ids.
    """

    def __init__(self, sink):
        self.sink = sink
        self.next_id = 0
        self.seen = Counter()
        self.extra = None

    def publish(self, event, storage_tier, token_ids, extra=None):
        if (
            extra is not None and "window_size" in extra
        ):  # by it readers expect partial blocks; other fields are lists per block
            self.extra = {"window_size": extra["window_size"]}
        for data, tokens in self.alter(event.data, token_ids):
            self.pass_on(data, tokens, event.dp_rank)

    def pass_on(self, data, token_ids=None, dp_rank=0):
        self.sink.publish(KvCacheEvent(self.next_id, data, dp_rank), StorageTier.DEVICE, token_ids, self.extra)
        self.next_id += 1

    def end_step(self):
        """Called when the engine has finished a requested action."""

    def is_due(self, what):
        """Return whether this one of every EVERY calls for the same thing is to be altered."""
        self.seen[what] += 1
        return not self.seen[what] % EVERY

    def alter(self, data, token_ids):
        yield data, token_ids


class ForgetsARemoved(Altered):
    """Does not publish some Removed events."""

    def alter(self, data, token_ids):
        if not (isinstance(data, Removed) and self.is_due("removed")):
            yield data, token_ids


class RemovesParentsFirst(Altered):
    """Publishes consecutively evicted blocks parents first, in an event each."""

    def __init__(self, sink):
        super().__init__(sink)
        self.evicted = []

    def alter(self, data, token_ids):
        if isinstance(data, Removed):
            self.evicted += data.block_hashes
        else:
            self.end_step()
            yield data, token_ids

    def end_step(self):
        for block in reversed(self.evicted):
            self.pass_on(Removed((block,)))
        self.evicted = []


class NamesAWrongParent(Altered):
    """Names the first block ever stored as the parent in some Stored events."""

    def __init__(self, sink):
        super().__init__(sink)
        self.first = None

    def alter(self, data, token_ids):
        if isinstance(data, Stored):
            if self.first is None:
                self.first = data.block_hashes[0]
            if data.parent_hash not in (None, self.first) and self.is_due("stored"):
                data = Stored(self.first, data.block_hashes, data.tokens_hashes)
        yield data, token_ids


class StoresTwice(Altered):
    """Publishes some Stored events twice."""

    def alter(self, data, token_ids):
        yield data, token_ids
        if isinstance(data, Stored) and self.is_due("stored"):
            yield data, token_ids


class HashesWrongly(Altered):
    """Stores the last block of some Stored events under another hash than later events use."""

    def alter(self, data, token_ids):
        if isinstance(data, Stored) and self.is_due("stored"):
            *blocks, last = data.block_hashes
            data = Stored(data.parent_hash, (*blocks, last ^ 1), data.tokens_hashes)
        yield data, token_ids


class SkipsIds(Altered):
    """Skips some event ids."""

    def alter(self, data, token_ids):
        if self.is_due("event"):
            self.next_id += 1
        yield data, token_ids


BUGGY_ENGINES = {
    "removed_missing": ForgetsARemoved,
    "parent_removed_first": RemovesParentsFirst,
    "parent_wrong": NamesAWrongParent,
    "stored_twice": StoresTwice,
    "hash_wrong": HashesWrongly,
    "ids_skipped": SkipsIds,
}


class Alters(Altered):
    """Applies a function to the data of each event."""

    def __init__(self, sink, function):
        super().__init__(sink)
        self.function = function

    def alter(self, data, token_ids):
        data = self.function(data)
        yield data, None if token_ids is None else token_ids[: len(data.block_hashes)]


def altered(backend, make_sink, made):
    """Return the named backend with a sink between each manager and its listener; `made` collects these sinks."""
    spec = BACKENDS[backend]

    def make(*, sink, **sizes):
        if sink is not None:
            sink = make_sink(sink)
            made.append(sink)
        return spec.make(sink=sink, **sizes)

    return dataclasses.replace(spec, make=make)
