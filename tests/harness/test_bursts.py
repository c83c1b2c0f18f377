"""Events without a flush in between: a queue that overflows is found, and a drift is placed at one of the events."""

from collections import deque
from contextlib import suppress

import pytest
from faulty_indexes import Async, ForgetsOneRemoved, Queued, RaisesOnce, Sound
from hybrid_sizes import EACH, block_size_of, blocks_a_block

from pytest_kvmock import BACKENDS, Prompt, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.harness import index_comparison as comparison
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.oracle import RadixIndexError


class Counting(Sound):
    """Counts its flushes, in addition to its lookups."""

    flushes = 0

    def flush(self):
        self.flushes += 1


class Overflows:
    """Queues at most `most` events until it is flushed, and loses the oldest."""

    def __init__(self, most, count_copies=False):
        self.queue, self.tree = deque(maxlen=most), RadixIndex(count_copies=count_copies)

    def apply(self, event):
        self.queue.append(event)

    def flush(self):
        while self.queue:
            with suppress(RadixIndexError):  # the Stored of its block was lost
                self.tree.apply(self.queue.popleft())

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


def chain(kv, *numbers, worker=0):
    kv.apply(Stored(None, numbers, numbers), worker_id=worker)


def churn(kv, prompts):
    """Serve `prompts` different prompts of one block each."""
    for number in range(prompts):
        worker = kv.worker(0)
        worker.serve([number] * (kv.profile.block_size + worker.traits.looks_ahead))


@pytest.mark.parametrize("backend", EACH)
def test_a_queue_overflow_is_found_in_a_burst_and_not_after_each_event(make_kv, backend):
    found = {}
    for sync in ("every", "auto", "burst"):
        index = Overflows(64, count_copies=BACKENDS[backend].traits.copies)
        size = block_size_of(backend, 4)
        kv = make_kv(backend, index, sync=sync, block_size=size, num_blocks=max(16, blocks_a_block(backend, size)))
        churn(kv, 16)
        kv.flush()
        churn(kv, 100)
        found[sync] = {problem.rule for problem in kv.judge().errors}
    assert found == {"every": set(), "auto": set(), "burst": {"index_drift"}}


def test_an_index_is_flushed_and_compared_when_the_burst_ends(make_kv):
    index = Counting()
    kv = make_kv(index=index)
    with kv.burst():
        for number in range(1, 100):
            chain(kv, number)
        assert (index.flushes, index.asked) == (0, 0)
    assert (index.flushes, index.asked) == (1, 99)
    chain(kv, 100)
    assert (index.flushes, index.asked) == (2, 100)


@pytest.mark.parametrize(
    "ask",
    [
        lambda kv: kv.overlap(Prompt(hashes=[1])),
        lambda kv: kv.flush(),
        lambda kv: kv.events.assert_no_event_errors(),
        lambda kv: kv.assert_in_sync(),
        lambda kv: kv.judge(),
    ],
    ids=["overlap", "flush", "check", "assert_in_sync", "judge"],
)
def test_a_query_by_the_test_ends_a_burst_and_the_next_event_begins_one(make_kv, ask):
    index = Counting()
    kv = make_kv(index=index, sync="burst")
    chain(kv, 1)
    assert (index.flushes, index.asked) == (0, 0)
    ask(kv)
    flushes, asked = index.flushes, index.asked
    assert flushes
    assert asked
    chain(kv, 2)
    assert (flushes, asked) == (index.flushes, index.asked)


def test_a_burst_has_at_most_ten_thousand_events(make_kv):
    index = Counting()
    kv = make_kv(index=index, sync="burst")
    assert comparison.MOST_IN_A_BURST == 10_000
    for number in range(1, 10_000):
        chain(kv, number)
    assert index.flushes == 0
    chain(kv, 10_000)
    assert (index.flushes, index.asked) == (1, 10_000)
    chain(kv, 10_001)
    assert index.flushes == 1


def test_a_burst_is_compared_in_full_after_two_thousand_events_too(make_kv, monkeypatch):
    monkeypatch.setattr(comparison, "ALWAYS_UPTO", 1)
    index = Counting()
    kv = make_kv(index=index, sync="auto")
    with kv.burst():
        for number in range(1, 50):
            chain(kv, number)
    assert index.asked == 49


def test_an_index_with_sync_end_is_not_compared_after_a_burst(make_kv):
    index = Counting()
    kv = make_kv(index=index, sync="end")
    with kv.burst():
        chain(kv, 1)
    assert (index.flushes, index.asked) == (0, 0)


def test_a_drift_is_placed_at_the_last_event_that_explains_it(make_kv):
    kv = make_kv(index=ForgetsOneRemoved(), sync="burst")
    chain(kv, 1, 2)
    kv.apply(Removed((2,)))
    chain(kv, 3)
    kv.flush()
    (problem,) = kv.events.problems
    assert (problem.rule, problem.position, problem.blocks) == ("index_drift", 1, (2,))


def test_an_index_failure_in_a_burst_is_placed_at_its_event(make_kv):
    kv = make_kv(index=RaisesOnce(at=1), sync="burst")
    for number in range(1, 4):
        chain(kv, number)
    (problem,) = kv.events.problems
    assert (problem.rule, problem.position) == ("index_failure", 1)


def test_a_removed_worker_that_queued_events_restore_is_found(make_kv):
    kv = make_kv(index=Overflows(64), sync="burst", workers=2)
    chain(kv, 1)
    kv.remove_worker(0)
    assert {problem.rule for problem in kv.judge().errors} == {"index_drift"}

    kv = make_kv(index=Overflows(64), workers=2)
    chain(kv, 1)
    kv.remove_worker(0)
    assert kv.judge().errors == []


class ForgetsLongRemoved(RadixIndex):
    def apply(self, event):
        data = event.event.data
        if not isinstance(data, Removed) or len(data.block_hashes) < 3:
            super().apply(event)


def test_a_drift_found_in_a_burst_is_cut(make_kv):
    kv = make_kv(index=ForgetsLongRemoved(), sync="burst", num_blocks=16)
    for number in range(40):
        kv.worker(0).serve(kv.prompt(1 + number % 5))
    kv.judge()
    assert kv.events.errors
    assert reproduce(kv).size == 2


def test_a_burst_ends_when_its_body_raises(make_kv):
    index = Counting()
    kv = make_kv(index=index)
    with pytest.raises(KeyError), kv.burst():
        raise KeyError
    chain(kv, 1)
    assert index.asked == 1


@pytest.mark.parametrize("index", [None, Async()], ids=["none", "async"])
def test_a_burst_has_no_effect_without_a_sync_index(index):
    kv = RouterHarness(index=index, sync="burst")
    with kv.burst():
        chain(kv, 1)
    assert kv.events.problems == []


def test_an_index_with_a_right_queue_passes_in_bursts(make_kv):
    with make_kv(index=Queued(), sync="burst", num_blocks=16) as kv:
        churn(kv, 100)
