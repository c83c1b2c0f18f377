"""vLLM removes block by block: judging these events in one call gives the same verdict as one by one."""

from __future__ import annotations

import pytest

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    KvWorker,
    Prompt,
    Removed,
    RouterHarness,
    create_manager,
)


def judged(one_by_one, disturb):
    """Return all results after blocks were evicted; a sink beside the router makes the harness judge one by one."""
    kv = RouterHarness(EngineProfile(num_blocks=12), "vllm")
    if one_by_one:
        kv.add_sink(CapturingSink())
    worker = kv.worker(0)
    first = Prompt(hashes=range(1000, 1008))
    worker.serve(first)
    disturb(kv, first)
    worker.serve(Prompt(hashes=range(2000, 2010)))
    worker.serve(Prompt(hashes=range(3000, 3010)))
    stream, reference = kv.inside.streams[0, 0], kv.inside.reference
    problems = [(p.rule, p.position, p.event, p.blocks, p.observed) for p in kv.events.problems]
    held = sorted(stream.device), [reference.num_blocks(0), *map(str, reference.dump_events())]
    entries = [(entry.position, entry.event, entry.status) for entry in kv.events]
    return problems, held, entries, repr(kv.events.counts), stream.next_id, stream.stored_at, stream.removed_at


def nothing(kv, prompt):
    pass


def removed_before(kv, prompt):
    """Remove a block in the middle of the chain from the router first."""
    block = prompt.sequence_hashes(16)[3]
    kv.apply(Removed((block,)))


def lost_before(kv, prompt):
    """Skip an event id, so that blocks are unknown."""
    kv.worker(0).manager.take_event_id()


@pytest.mark.parametrize("disturb", [nothing, removed_before, lost_before])
def test_events_judged_in_a_row_give_the_same_verdict_as_one_by_one(disturb):
    in_a_row = judged(False, disturb)
    assert in_a_row == judged(True, disturb)
    assert bool(in_a_row[0]) is (disturb is not nothing)


def test_event_counts_include_all_events_after_some_were_taken():
    kv = RouterHarness(EngineProfile(num_blocks=12), "vllm")
    worker = kv.worker(0)
    worker.serve(Prompt(hashes=range(1000, 1008)))
    assert kv.events.counts.ok("stored") == 1
    kv.events.take()
    worker.serve(Prompt(hashes=range(2000, 2010)))
    kv.events.keep_last(2)
    assert [kv.events.counts.ok(kind) for kind in ("stored", "removed")] == [2, 6]
    assert 8 == kv.events.total == kv.events.for_worker(0).total


def test_a_sink_set_on_a_manager_later_receives_every_event():
    worker = KvWorker(lambda sink: create_manager("vllm", num_blocks=4, sink=sink), driver=BACKENDS["vllm"].driver)
    worker.manager.sink = sink = CapturingSink()
    for first in (10, 20):
        worker.serve(Prompt(hashes=range(first, first + 4)))
    assert [event.data.kind for event in sink.events] == ["stored", *["removed"] * 4, "stored"]
