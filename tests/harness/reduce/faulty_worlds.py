"""Wrong indexes and engines, as a user could have written them."""

from contextlib import suppress

from pytest_kvmock import BackendSpec, KvCacheEvent, Removed, Stored, block_hashes
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.oracle import RadixIndex

# ------------------------------------------------------------------------------------------------- faulty indexes


class Sound:
    """An index without a fault."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


class ForgetsLongRemoved(Sound):
    """Ignores a Removed of more than three blocks."""

    def apply(self, event):
        data = event.event.data
        if not isinstance(data, Removed) or len(data.block_hashes) <= 3:
            self.tree.apply(event)


class RaisesOnRemoved(Sound):
    def apply(self, event):
        if isinstance(event.event.data, Removed):
            raise OSError("disk full")
        self.tree.apply(event)


class Overflows(Sound):
    """Its queue holds `room` events until it is flushed; later events are lost."""

    def __init__(self, room=8):
        super().__init__()
        self.room = room
        self.queue = []

    def new(self):
        return type(self)(self.room)

    def apply(self, event):
        if len(self.queue) < self.room:
            self.queue.append(event)

    def flush(self):
        for event in self.queue:
            self.tree.apply(event)
        self.queue.clear()


class ForgetsWhenItKnows(RadixIndex):
    """Ignores every Removed once it has seen block 4711, which is no block's parent."""

    knows = False

    def apply(self, event):
        if self.knows and isinstance(event.event.data, Removed):
            return
        self.knows = self.knows or 4711 in event.event.data.block_hashes
        super().apply(event)


class ForgetsOldest(Overflows):
    """A new event pushes the oldest one out of its full queue."""

    def apply(self, event):
        self.queue.append(event)
        del self.queue[: -self.room]

    def flush(self):
        for event in self.queue:
            with suppress(ValueError):  # its Stored may be lost
                self.tree.apply(event)
        self.queue.clear()


class AsyncForgets:
    """Is awaited; ignores every Removed."""

    def __init__(self):
        self.tree = RadixIndex()

    async def apply(self, event):
        if not isinstance(event.event.data, Removed):
            self.tree.apply(event)

    async def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores


class ForgetsWhatWasFlushed(AsyncForgets):
    """Ignores a Removed of blocks that were stored before the last flush."""

    def __init__(self):
        super().__init__()
        self.fresh = set()

    async def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            self.fresh.update(data.block_hashes)
        if not isinstance(data, Removed) or self.fresh.issuperset(data.block_hashes):
            self.tree.apply(event)

    async def flush(self):
        self.fresh.clear()


class ByTokens:
    """Looks up by tokens; ignores every Removed."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.tree = RadixIndex()

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            self.tree.apply(event)

    def match_tokens(self, tokens):
        return self.tree.find_matches(block_hashes(tokens, self.block_size)).scores


# ------------------------------------------------------------------------------------------------ faulty engines


class Altering:
    """A sink that passes on an event's data as changed by `alter`."""

    def __init__(self, sink, alter):
        self.sink, self.alter = sink, alter

    def publish(self, event, storage_tier, token_ids):
        data = self.alter(event.data)
        if token_ids is not None:
            token_ids = token_ids[: len(data.block_hashes)]
        self.sink.publish(KvCacheEvent(event.event_id, data, event.dp_rank), storage_tier, token_ids)


def forgets_a_removed(data):
    """Omit the last of more than two blocks that are evicted at once."""
    return Removed(data.block_hashes[:-1]) if isinstance(data, Removed) and len(data.block_hashes) > 2 else data


def keeps_one_secret(data):
    """Omit the last of more than three blocks that are stored at once."""
    if isinstance(data, Stored) and len(data.block_hashes) > 3:
        return Stored(data.parent_hash, data.block_hashes[:-1], data.tokens_hashes[:-1])
    return data


def names_one_twice(data):
    """Name the first of more than three blocks twice when they are evicted at once."""
    if isinstance(data, Removed) and len(data.block_hashes) > 3:
        return Removed((*data.block_hashes, data.block_hashes[0]))
    return data


def hashes_one_wrongly(data):
    """Give the last of more than three blocks that are stored at once a wrong hash."""
    if isinstance(data, Stored) and len(data.block_hashes) > 3:
        return Stored(data.parent_hash, (*data.block_hashes[:-1], 77), data.tokens_hashes)
    return data


def spec(name, alter):
    def make(*, sink, **sizes):
        sink = None if sink is None else Altering(sink, alter)
        return LogicalManager(backend=name, eviction=LruPolicy(), sink=sink, **sizes)

    return BackendSpec(name, "nothing", make)


def does_both(data):
    """Of more than three blocks evicted at once, name the first twice and omit the last."""
    if isinstance(data, Removed) and len(data.block_hashes) > 3:
        return Removed((*data.block_hashes[:-1], data.block_hashes[0]))
    return data


def hashes_decoded_blocks_wrongly(data):
    """Give a block that is stored alone after a parent a wrong hash."""
    if isinstance(data, Stored) and len(data.block_hashes) == 1 and data.parent_hash is not None:
        return Stored(data.parent_hash, (77,), data.tokens_hashes)
    return data


FAULTY = {
    alter.__name__: spec(alter.__name__, alter)
    for alter in (
        forgets_a_removed,
        keeps_one_secret,
        names_one_twice,
        hashes_one_wrongly,
        does_both,
        hashes_decoded_blocks_wrongly,
    )
}
