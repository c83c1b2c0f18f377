"""Failures over other engines: their reproductions fail too when they are pasted as they stand."""

from dataclasses import replace

import pytest

from pytest_kvmock import BACKENDS, EngineProfile, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.engines import backends
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced


class ForgetsWithTheFirstCopy(RadixIndex):
    def new(self):
        return type(self)()


class IgnoresRemoved(RadixIndex):
    def new(self):
        return type(self)()

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


def test_a_reproduction_names_the_engine_when_the_fault_needs_counted_copies(failure_of):
    kv = RouterHarness(EngineProfile(num_blocks=48), "vllm", ForgetsWithTheFirstCopy())
    worker = kv.worker(0)
    shared = kv.prompt(3)
    for _ in range(4):
        worker.serve(shared)
    for _ in range(8):
        worker.serve(kv.prompt(30))
    kv.judge()

    found = reproduce(kv)

    assert found.size == 3
    assert 'RouterHarness(backend="vllm", index=kv_index)' in found.as_test()
    assert "index_drift" in failure_of(found, ForgetsWithTheFirstCopy())


def test_a_reproduction_keeps_the_counted_residency_of_a_sink(failure_of):
    kv = RouterHarness(backend=None, index=ForgetsWithTheFirstCopy())
    sink = kv.make_sink(residency="counted")
    for start in range(10, 100, 10):
        for _ in range(2):
            sink(Stored(None, (start, start + 1), (start, start + 1)))
        sink(Removed((start + 1,)))
    kv.judge()

    found = reproduce(kv)

    assert found.size == 3
    assert 'kv.make_sink(residency="counted")' in found.as_test()
    assert "index_drift" in failure_of(found, ForgetsWithTheFirstCopy())


@pytest.mark.parametrize("engine", ["hash_cache", "vllm", "sglang"])
def test_an_index_fault_is_cut_over_every_engine(failure_of, busy, engine):
    """Also where the engine publishes before the first request (SGLang's Cleared)."""
    kv = busy(engine, IgnoresRemoved(), requests=60)

    found = reproduce(kv)

    assert found.level == "events"
    assert found.size <= 3
    assert "index_drift" in failure_of(found, IgnoresRemoved())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_wrong_hash_that_only_the_engine_can_judge_is_cut_by_requests_only(monkeypatch, busy, failure_of, engine):
    """Published through a sink, every digest name would look wrong."""
    monkeypatch.setattr(backends, "BACKENDS", {**BACKENDS, engine: _misnaming(BACKENDS[engine])})
    kv = busy(engine, requests=30, amid=lambda kv: kv.drop_next())  # where events were lost, they are tried first

    found = reproduce(kv)

    assert (found.level, found.size) == ("requests", 1)
    assert "wrong_hash" in failure_of(found)
    with pytest.raises(NotReduced):
        reproduce(kv, level="events")


def _misnaming(spec):
    """Return the engine with a worker that publishes block hashes with the lowest bit flipped."""

    def make(**options):
        manager = spec.make(**options)
        publisher = manager._publisher
        publish = publisher.publish

        def shifted(data, *rest):
            if isinstance(data, Stored):
                data = replace(data, block_hashes=tuple(block ^ 1 for block in data.block_hashes))
            publish(data, *rest)

        manager._publisher = _Shifted(publisher, shifted)
        return manager

    return replace(spec, make=make)


class _Shifted:
    def __init__(self, publisher, publish):
        self.__dict__.update(_publisher=publisher, publish=publish)

    def __getattr__(self, name):
        return getattr(self._publisher, name)

    def __setattr__(self, name, value):
        setattr(self._publisher, name, value)
