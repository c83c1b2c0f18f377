"""Lost batches, as a subscriber reports them, are part of a reproduction."""

import pytest
from scenario_files import load_scenarios, play, scenario_failure, scenario_text

from pytest_kvmock import Removed, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.oracle.hygiene.entries import BatchesLost

LOSS = "batches 4 to 6 did not arrive, and a replay had no such batches any more"


def root(block):
    return Stored(None, (block,), (block + 10,))


@pytest.mark.parametrize("observed", ["", LOSS])
@pytest.mark.parametrize("to_sink", [True, False])
def test_a_lost_batch_is_reproduced_by_the_loss_only(failure_of, observed, to_sink):
    kv = RouterHarness(backend=None)
    sink = kv.make_sink() if to_sink else None
    worker = 0 if sink is None else sink.worker_id
    publish = kv.apply if sink is None else sink
    for block in range(1, 9):
        publish(root(block))
    kv.inside.lost_batches(worker, 0, range(4, 7), observed)
    publish(Removed((99,)))
    kv.judge()

    cut = reproduce(kv)

    assert cut.rule == "event_id_gap"
    assert [BatchesLost(worker, 0, range(4, 7), observed)] == [*cut.steps]
    assert (observed or "batches 4 to 6 did not arrive") in failure_of(cut)


def test_batch_numbers_that_go_backwards_are_reproduced_as_a_loss(failure_of):
    kv = RouterHarness(backend=None)
    kv.apply(root(1))
    kv.inside.lost_batches(0, 0, range(9, 9), "batch 0 came after batch 8")
    kv.judge()

    cut = reproduce(kv)

    assert [BatchesLost(0, 0, range(9, 9), "batch 0 came after batch 8")] == [*cut.steps]
    assert "batch 0 came after batch 8" in failure_of(cut)


def test_a_loss_that_does_not_matter_is_left_out(failure_of):
    kv = RouterHarness(backend=None, allow=["event_id_gap"])
    sink = kv.make_sink()
    sink(root(1))
    sink.lost_batches(sink.worker_id, 0, range(4, 7))
    sink(Stored(5, (5,), (15,)))
    kv.judge()

    cut = reproduce(kv, allow=["event_id_gap"])

    assert cut.rule == "invalid_block"
    assert (len(cut.steps), cut.size) == (1, 1)
    assert "invalid_block" in failure_of(cut)


@pytest.mark.parametrize("residency", ["unique", "counted"])
@pytest.mark.parametrize("to_sink", [True, False])
def test_a_scenario_file_contains_the_loss(tmp_path, to_sink, residency):
    kv = RouterHarness(backend="lineage")
    publish, worker = kv.apply, 0
    if to_sink:
        publish = sink = kv.make_sink(residency=residency)
        worker = sink.worker_id
    publish(root(1))
    kv.inside.lost_batches(worker, 0, range(4, 7), LOSS)
    kv.judge()
    path = tmp_path / "a.kv.yaml"
    path.write_text(scenario_text(reproduce(kv), "lost"))

    (scenario,) = load_scenarios(path)
    harness = RouterHarness(backend="lineage")
    with pytest.raises(scenario_failure(), match="batches 4 to 6 did not arrive, and a replay had no such"):
        play(harness, scenario)

    (problem,) = harness.events.errors
    assert ("event_id_gap", worker, LOSS) == (problem.rule, problem.worker_id, problem.observed)
    assert (residency if to_sink else "unique") == harness.inside.streams[worker, 0].spec.residency
