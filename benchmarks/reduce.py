"""The cost of reducing a failure, on streams of 10,000 events."""

from __future__ import annotations

import random

from benchmarks.measure import Figure, NotHere, cpu_seconds
from pytest_kvmock import BackendSpec, EngineProfile, KvCacheEvent, Removed, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced
from pytest_kvmock.oracle import RadixIndex

EVENTS = 10_000
MARK = 4711
PROFILE = EngineProfile(num_blocks=400, workers=2)
PEER = "the run that failed"


class ForgetsARemoved:
    """An index that ignores the first Removed of more than eight blocks."""

    def __init__(self):
        self.tree, self.forgets = RadixIndex(), 1

    def apply(self, event):
        data = event.event.data
        if self.forgets and isinstance(data, Removed) and len(data.block_hashes) > 8:
            self.forgets = 0
        else:
            self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


class ForgetsWhenItKnows(ForgetsARemoved):
    """An index that ignores every Removed after a certain block of another worker."""

    def apply(self, event):
        data = event.event.data
        if not self.forgets and isinstance(data, Removed):
            return
        if isinstance(data, Stored) and MARK in data.block_hashes:
            self.forgets = 0
        self.tree.apply(event)


def traffic(kv, amid=lambda _: None):
    """Serve requests of 8 to 16 blocks that share prefixes until there are 10,000 events; return the harness and the
    CPU time.
    """
    rng = random.Random(0)
    shared = [kv.prompt(8) for _ in range(30)]

    def serve():
        is_faulty = False
        while kv.events.total < EVENTS:
            if not is_faulty and kv.events.total > EVENTS - 100:
                is_faulty = True
                amid(kv)
            kv.worker(rng.randrange(2)).serve(kv.prompt(rng.randrange(1, 9), after=rng.choice(shared)))
        kv.judge()

    return kv, cpu_seconds(serve)


def tell(kv):
    kv.apply(Stored(None, (MARK,), (MARK,)), worker_id=1)


def removed_twice(kv):
    kv.apply(Removed(kv.events.removed[-1].data.block_hashes[:1]), 0)


def figure(variant, failed, **options):
    kv, serving = failed
    found = []
    try:
        seconds = cpu_seconds(lambda: found.append(reproduce(kv, **options)))
    except NotReduced as reason:
        raise NotHere(f"{variant}: {reason}") from None
    assert found[0].complete
    yield Figure("cut 10,000 events down: its time beside the peer's", seconds / serving, 10, PEER, variant, most=True)
    yield Figure("cut 10,000 events down: what is left", found[0].size, None, "", variant, found[0].level)


def events():
    yield from figure("a Removed that comes twice", traffic(RouterHarness(PROFILE), removed_twice))
    lost = traffic(RouterHarness(PROFILE), lambda kv: kv.drop_next())
    yield from figure("one lost", lost, level="events")
    index = traffic(RouterHarness(PROFILE, index=ForgetsARemoved()))
    yield from figure("an index that forgets one Removed", index)
    index = traffic(RouterHarness(PROFILE, index=ForgetsWhenItKnows()), tell)
    yield from figure("an index that forgets, for a cause that no block leads to", index)


class Quiet:
    """A sink that leaves out the last block of a Removed of more than six blocks."""

    def __init__(self, sink):
        self.sink = sink

    def publish(self, event, storage_tier, token_ids):
        data = event.data
        if isinstance(data, Removed) and len(data.block_hashes) > 6:
            event = KvCacheEvent(event.event_id, Removed(data.block_hashes[:-1]), event.dp_rank)
        self.sink.publish(event, storage_tier, token_ids)


def requests():
    from types import MappingProxyType

    from pytest_kvmock.engines import backends
    from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
    from pytest_kvmock.engines.dynamo.logical import LogicalManager

    def make(*, sink, **sizes):
        return LogicalManager(backend="quiet", eviction=LruPolicy(), sink=Quiet(sink), **sizes)

    known = backends.BACKENDS
    backends.BACKENDS = MappingProxyType({**known, "quiet": BackendSpec("quiet", "nothing", make)})
    try:
        kv = traffic(RouterHarness(PROFILE, "quiet"))
        yield from figure("an engine that does not publish one eviction", kv)
    finally:
        backends.BACKENDS = known
