"""Failures over engines of other makes: what they are cut to fails too, pasted as it is."""

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


def test_what_shows_only_where_copies_are_counted_names_the_engine(failure_of):
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


def test_a_sink_whose_copies_are_counted_is_made_so_again(failure_of):
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
def test_the_fault_of_an_index_is_cut_over_every_engine(failure_of, busy, engine):
    """Also where the engine has spoken before the first request (SGLang's Cleared)."""
    kv = busy(engine, IgnoresRemoved(), requests=60)

    found = reproduce(kv)

    assert found.level == "events"
    assert found.size <= 3
    assert "index_drift" in failure_of(found, IgnoresRemoved())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_name_that_only_the_engine_can_judge_is_cut_by_requests_or_not_at_all(monkeypatch, busy, failure_of, engine):
    """As events of a sink, every name of a digest would look wrong."""
    monkeypatch.setattr(backends, "BACKENDS", {**BACKENDS, engine: _misnaming(BACKENDS[engine])})
    kv = busy(engine, requests=30, amid=lambda kv: kv.drop_next())  # where events were lost, they are tried first

    found = reproduce(kv)

    assert (found.level, found.size) == ("requests", 1)
    assert "wrong_hash" in failure_of(found)
    with pytest.raises(NotReduced):
        reproduce(kv, level="events")


def _misnaming(spec):
    """The engine, whose worker publishes names that are off by one."""

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
