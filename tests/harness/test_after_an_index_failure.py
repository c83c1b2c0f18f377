"""After an index has raised, its blocks are unknown until events name them again."""

import asyncio

import pytest
from faulty_indexes import Async, AsyncManageable, Manageable, RaisesWhenAsked, Sound

from pytest_kvmock import Cleared, Removed, Stored


def raising(kind, at, ignores=()):
    """An index that raises at its event number `at` and ignores later events with data of the kinds `ignores`."""

    class Raising(kind):
        def __init__(self):
            super().__init__()
            self.applied = -1

        def take(self, event):
            self.applied += 1
            if self.applied == at:
                raise OSError("disk full")
            return self.applied < at or not isinstance(event.event.data, ignores)

        if issubclass(kind, Async):

            async def apply(self, event):
                if self.take(event):
                    await super().apply(event)

        else:

            def apply(self, event):
                if self.take(event):
                    super().apply(event)

    return Raising()


def chain(kv, *numbers, parent=None):
    kv.apply(Stored(parent, numbers, numbers))


def standing(kv):
    """Return rule, event and blocks of each error that does not follow from another."""
    return [(p.rule, p.event_id, p.blocks) for p in kv.events.errors]


FAILED = ("index_failure", 0, ())


def test_a_removed_ignored_after_an_expected_index_failure_is_a_drift(make_kv):
    kv = make_kv(index=raising(Sound, 0, Removed))
    with kv.events.expect_error("index_failure"):
        chain(kv, 1)
    chain(kv, 2, 3)
    kv.apply(Removed((3,)))
    assert standing(kv) == [FAILED, ("index_drift", 2, (3,))]
    assert [(p.rule, p.event_id, p.blocks) for p in kv.judge().errors] == [("index_drift", 2, (3,))]


def test_a_drift_of_an_earlier_block_is_found_once_the_block_is_named_again(make_kv):
    kv = make_kv(index=raising(Sound, 1, Removed))
    chain(kv, 1, 2)
    chain(kv, 9)
    for _ in range(2):  # the index may have missed the first Removed; the Stored names the block again
        kv.apply(Removed((2,)))
        chain(kv, 2, parent=1)
    assert standing(kv) == [("index_failure", 1, ()), ("index_drift", 4, (2,))]


def test_a_block_counts_as_named_only_after_the_event_that_stores_it(make_kv):
    kv = make_kv(index=raising(Sound, 0, (Stored, Removed)))
    chain(kv, 1)
    chain(kv, 2)
    assert standing(kv) == [FAILED]
    (failure,) = kv.events.errors
    assert [(p.rule, p.event_id, p.blocks) for p in failure.folded[1:]] == [("index_drift", 1, (2,))]


def test_a_cleared_ends_the_effect_of_an_index_failure(make_kv):
    kv = make_kv(index=raising(Sound, 0, Stored))
    chain(kv, 1)
    kv.apply(Cleared())
    chain(kv, 2)
    assert standing(kv) == [FAILED, ("index_drift", 2, (2,))]


def test_a_cleared_at_which_the_index_raises_does_not_end_the_effect(make_kv):
    kv = make_kv(index=raising(Sound, 0, Stored))
    kv.apply(Cleared())
    chain(kv, 2)
    assert standing(kv) == [FAILED]


def begin_anew(kv, how):
    if how == "removed":
        kv.remove_worker(0)
    else:
        kv.worker(0).restart(announced=True)


@pytest.mark.parametrize("how", ["removed", "restarted"])
def test_the_effect_of_an_index_failure_ends_when_the_worker_starts_again(make_kv, how):
    kv = make_kv(index=raising(Manageable, 0, Stored))
    chain(kv, 1)
    begin_anew(kv, how)
    chain(kv, 2)
    assert [FAILED, ("index_drift", kv.events[-1].event.event.event_id, (2,))] == standing(kv)


@pytest.mark.parametrize("how", ["removed", "restarted"])
def test_the_effect_of_an_async_index_failure_ends_when_the_worker_starts_again(make_kv, how):
    async def body():
        chain(kv, 1)
        begin_anew(kv, how)
        chain(kv, 2)
        await kv.aflush()

    kv = make_kv(index=raising(AsyncManageable, 0, Stored))
    asyncio.run(body())
    assert [FAILED, ("index_drift", kv.events[-1].event.event.event_id, (2,))] == standing(kv)


def test_the_effect_of_an_index_failure_does_not_end_when_another_rank_restarts(make_kv):
    kv = make_kv(index=raising(Manageable, 0, Stored), dp_size=2)
    chain(kv, 1)
    kv.worker(0, dp_rank=1).restart(announced=True)
    chain(kv, 2)
    assert standing(kv) == [FAILED]


def test_an_async_index_that_raises_at_a_removal_has_failed_for_that_worker(make_kv):
    class Stubborn(Async):
        async def remove_worker(self, worker_id):
            raise OSError("no")

    async def body():
        chain(kv, 1)
        kv.remove_worker(0)
        await kv.aflush()

    kv = make_kv(index=Stubborn())
    asyncio.run(body())
    (error, *_) = kv.events.errors
    assert (error.rule, error.worker_id, error.dp_rank, error.event_id) == ("index_failure", 0, 0, None)
    assert error.observed.startswith("remove_worker raised OSError: no (test_after_an_index_failure.py:")


def test_after_one_failed_lookup_the_other_chains_of_an_event_are_not_looked_up(make_kv, rules_of):
    class Counting(RaisesWhenAsked):
        def find_matches(self, local_hashes):
            self.asked += 1
            return super().find_matches(local_hashes)

    kv = make_kv(index=Counting())
    chain(kv, 1, 2, 3)
    assert rules_of(kv.events.problems) == ["index_failure"]
    assert kv.index.asked == 1
