"""Engines that somebody could have written, each with one bug: a real manager whose events are altered on their way."""

import dataclasses
from collections import Counter

from pytest_kvmock import BACKENDS, KvCacheEvent, Removed, StorageTier, Stored

EVERY = 3
"""Of the events that a bug can spoil, it spoils one in so many."""


class Altered:
    """A sink that passes on what a bug makes of each event, with event ids of its own.

    A subclass changes an event by `alter`: data, each with its token ids.
    """

    def __init__(self, sink):
        self.sink = sink
        self.next_id = 0
        self.seen = Counter()
        self.extra = None

    def publish(self, event, storage_tier, token_ids, extra=None):
        if (
            extra is not None and "window_size" in extra
        ):  # by which blocks that are not full are told; its lists are of blocks
            self.extra = {"window_size": extra["window_size"]}
        for data, tokens in self.alter(event.data, token_ids):
            self.pass_on(data, tokens, event.dp_rank)

    def pass_on(self, data, token_ids=None, dp_rank=0):
        self.sink.publish(KvCacheEvent(self.next_id, data, dp_rank), StorageTier.DEVICE, token_ids, self.extra)
        self.next_id += 1

    def end_step(self):
        """The engine has done what it was asked for."""

    def is_due(self, what):
        """Whether this one, of those of which so many were seen, is to be spoilt."""
        self.seen[what] += 1
        return not self.seen[what] % EVERY

    def alter(self, data, token_ids):
        yield data, token_ids


class ForgetsARemoved(Altered):
    """A Removed is not published."""

    def alter(self, data, token_ids):
        if not (isinstance(data, Removed) and self.is_due("removed")):
            yield data, token_ids


class RemovesParentsFirst(Altered):
    """Blocks that are evicted one after the other are published parents first, an event each."""

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
    """A Stored below another block names the first block that was ever stored."""

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
    """A Stored is published twice."""

    def alter(self, data, token_ids):
        yield data, token_ids
        if isinstance(data, Stored) and self.is_due("stored"):
            yield data, token_ids


class HashesWrongly(Altered):
    """The last block of a Stored has another hash than the one by which it is named later."""

    def alter(self, data, token_ids):
        if isinstance(data, Stored) and self.is_due("stored"):
            *blocks, last = data.block_hashes
            data = Stored(data.parent_hash, (*blocks, last ^ 1), data.tokens_hashes)
        yield data, token_ids


class SkipsIds(Altered):
    """An event id is used up, and no event has it."""

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
    """An engine that does with the data of each event what a function does."""

    def __init__(self, sink, function):
        super().__init__(sink)
        self.function = function

    def alter(self, data, token_ids):
        data = self.function(data)
        yield data, None if token_ids is None else token_ids[: len(data.block_hashes)]


def altered(backend, make_sink, made):
    """The backend of this name, with a sink between each of its managers and whoever listens; `made` gets the sinks."""
    spec = BACKENDS[backend]

    def make(*, sink, **sizes):
        if sink is not None:
            sink = make_sink(sink)
            made.append(sink)
        return spec.make(sink=sink, **sizes)

    return dataclasses.replace(spec, make=make)
