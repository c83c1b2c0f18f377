"""A replay, a fleet behind a round-robin router and a single engine report the same of one trace."""

import pytest

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, replay
from pytest_kvmock.engines.schedulers.scheduler_specs import SCHEDULERS
from pytest_kvmock.fleets import RoundRobin, synthetic_trace

RELEASES = [(name, release) for name, spec in SCHEDULERS.items() for release in spec.releases]


def engines(name, release, count):
    options = {"num_gpu_blocks": 40, "block_size": 4, "max_num_seqs": 4, "speedup_ratio": 2.0}
    args = MockEngineArgs(engine_type=name, semantics=release, **options)
    return [MockEngine(args, seed=seed) for seed in range(count)]


def trace(turns=(1, 1)):
    sizes = {"input_tokens": (4, 30), "output_tokens": (1, 30), "delay_ms": (0, 9)}
    return list(synthetic_trace(24, groups=3, prefix_blocks=(2, 2), turns=turns, block_size=4, interval_ms=4, **sizes))


def told(report, like):
    """Return a report's figures and rows that another report also has, without picks, which only a fleet has."""
    columns = like.per_request()[0].keys() - {"routing_history"}
    figures, rows = report.to_json(), report.per_request()
    return {name: figures[name] for name in like.to_json()}, [{name: row[name] for name in columns} for row in rows]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("concurrency", [None, 5])
@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_a_replay_equals_a_fleet_with_a_round_robin_router(name, release, concurrency, count):
    serving = engines(name, release, count)
    # In a closed loop over one engine, a replay of some releases checks the clock only between passes; a fleet never
    # does.
    only_between = serving[0].args.release.arrivals_between_passes and count == 1 and concurrency is not None
    requests = trace((1, 1) if only_between else (1, 3))
    first = replay(requests, serving, concurrency=concurrency)
    second = Fleet(engines(name, release, count), RoundRobin(), concurrency=concurrency).run(requests)
    assert told(second, first) == told(first, first)
    assert len(first.completed) == len(requests)


@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_a_single_engine_equals_a_replay_on_it(name, release):
    engine = engines(name, release, 1)[0]
    tokens = None if engine.worker.traits.takes_hashes else True
    for request in trace():
        engine.submit(request.prompt(4, tokens=tokens), request.output_length, request.timestamp - trace()[0].timestamp)
    (same,) = engines(name, release, 1)
    together, own = replay(trace(), [same]), engine.run()
    assert told(together, own)[1] == told(own, own)[1]
    assert (engine.passes, engine.now_ms) == (same.passes, same.now_ms)
