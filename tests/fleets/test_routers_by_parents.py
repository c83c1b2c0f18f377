"""Routers that look up parents: the events on which they may raise, and the message for all other events."""

import re

import pytest

from pytest_kvmock import Cleared, EngineProfile, Fleet, MockEngine, MockEngineArgs, RadixIndex, RouterHarness, Stored
from pytest_kvmock.fleets import RoundRobin, RouterError, synthetic_trace


class ByParents(RoundRobin):
    """A router that keeps the chain of each worker's block, found through its parent."""

    def __init__(self):
        super().__init__()
        self.held = {}

    def apply(self, event):
        data, held = event.event.data, self.held.setdefault(event.worker_id, {})
        if isinstance(data, Cleared):
            held.clear()
        elif isinstance(data, Stored):
            depth = 0 if data.parent_hash is None else held[data.parent_hash]
            held.update((block, depth + number) for number, block in enumerate(data.block_hashes, 1))
        else:
            for block in data.block_hashes:
                held.pop(block, None)

    def worker_removed(self, worker):
        self.held.pop(worker, None)


class Loses(ByParents):
    """Loses a block that no event removed."""

    def apply(self, event):
        super().apply(event)
        held = self.held[event.worker_id]
        if len(held) > 20:
            del held[next(iter(held))]


def trace(count=250):
    return synthetic_trace(
        count,
        seed=1,
        block_size=4,
        groups=6,
        prefix_blocks=(4, 6),
        turns=(1, 1),
        input_tokens=(4, 24),
        output_tokens=(1, 12),
        interval_ms=5,
        delay_ms=(5, 50),
    )


def over(backend, router, num_blocks=20):
    world = RouterHarness(EngineProfile(num_blocks=num_blocks, block_size=4, workers=2), backend)
    return world, world.fleet(router)


def test_a_router_by_parents_may_raise_on_a_stored_below_a_removed_block():
    world, fleet = over("multi_lru", ByParents())
    with world:
        report = fleet.run(trace())
    assert len(report.completed) == 250
    excused = fleet._calls.excused
    assert excused
    pattern = (
        r"ByParents\.apply\(\) raised KeyError\(\d+\) \(.*\) at event \d+ worker [01] Stored blocks? 0x[0-9a-f]{16}.* "
        r"(below|after|under) .*(0x[0-9a-f]{16}).*; block \2 was removed by event \d+"
    )
    assert re.fullmatch(pattern, excused[0]), excused[0]


def test_an_index_may_raise_on_a_stored_below_a_removed_block():
    world = RouterHarness(EngineProfile(num_blocks=20, block_size=4, workers=2), "multi_lru", RadixIndex())
    with world:
        assert len(world.fleet(RoundRobin()).run(trace()).completed) == 250


def test_a_router_over_bare_engines_may_raise_on_a_stored_below_a_removed_block():
    engines = [MockEngine(MockEngineArgs(num_gpu_blocks=20, block_size=4), backend="multi_lru") for _ in range(2)]
    router = ByParents()
    fleet = Fleet(engines, router)
    assert len(fleet.run(trace()).completed) == 250
    assert fleet._calls.excused


def test_a_router_that_raises_on_a_valid_event_is_reported_with_event_and_block():
    _, fleet = over("lineage", Loses())
    with pytest.raises(RouterError) as raised:
        fleet.run(trace())
    pattern = (
        r"Loses\.apply\(\) raised KeyError\((\d+)\) \(.* in apply\) at event \d+ worker [01] Stored blocks? 0x.* "
        r"after (0x[0-9a-f]{16}); block \2 was stored by event \d+ and never removed"
    )
    found = re.fullmatch(pattern, raised.value.problem)
    assert found, raised.value.problem
    assert found[2] == f"0x{int(found[1]):016x}"


def test_a_router_error_names_the_worker_that_has_left():
    _, fleet = over("lineage", ByParents(), 512)
    fleet.at(100).leave(1)
    with pytest.raises(RouterError, match=r"worker 1 has left: worker_removed\(1\) at 100 ms \(at [\d.]+ ms\)$"):
        fleet.run(trace())
