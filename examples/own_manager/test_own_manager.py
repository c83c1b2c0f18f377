"""A block manager of your own: it publishes to `kv_sink`, and what it says is compared with what it has.

The manager below forgets a Removed on one path. No event is wrong by itself, so only the comparison can find it.
"""

from pytest_kvmock import Removed, Stored


class LruManager:
    """Caches single blocks; the one used longest ago goes first."""

    def __init__(self, capacity, publish):
        self.capacity, self.publish, self.cached = capacity, publish, []  # oldest first

    def use(self, block):
        if block in self.cached:
            self.cached.remove(block)
        else:
            self.publish(Stored(None, (block,), (block,)))
        self.cached.append(block)
        if len(self.cached) > self.capacity:
            self.publish(Removed((self.cached.pop(0),)))

    def resize(self, capacity):
        self.capacity = capacity
        del self.cached[:-capacity]  # and nobody is told


class MendedManager(LruManager):
    """The same, mended."""

    def resize(self, capacity):
        if gone := self.cached[:-capacity]:
            self.publish(Removed(tuple(gone)))
        super().resize(capacity)


def exercise(manager, kv_sink):
    kv_sink.compare(lambda: manager.cached)
    for block in (1, 2, 3, 1, 4):
        manager.use(block)
    manager.resize(2)


def test_a_missing_removed_is_found(kv_sink, kv_events):
    kv_events.expect_error("engine_drift")
    exercise(LruManager(3, kv_sink), kv_sink)


def test_the_mended_manager_says_what_it_does(kv_sink):
    exercise(MendedManager(3, kv_sink), kv_sink)
