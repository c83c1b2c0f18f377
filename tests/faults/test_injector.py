"""The injector by itself: a delivery in, an injection and deliveries out; it needs neither a judge nor a harness."""

from random import Random

import pytest

from pytest_kvmock.events import Cleared, KvCacheEvent, Located, Removed, RouterEvent, SparseStored, Stored
from pytest_kvmock.faults import changes
from pytest_kvmock.faults.fault import Fault, RandomFault, wanted
from pytest_kvmock.faults.injector import FaultInjector
from pytest_kvmock.hygiene.delivery import Delivery


def sent(event_id, data=None, worker=0, rank=0, **options):
    data = Stored(None, (event_id + 1,), (event_id + 1,)) if data is None else data
    return Delivery(RouterEvent(worker, KvCacheEvent(event_id, data, rank)), **options)


def armed(kind, change, n=1, *, late_by=0, only=None):
    injector = FaultInjector()
    fault = Fault(
        kind, f"faults.{kind}({n})", change, n, wants=wanted(only, None, None), end=lambda _: None, late_by=late_by
    )
    injector.armed.append(fault)
    return injector


def ids(deliveries):
    return [delivery.event.event.event_id for delivery in deliveries]


def test_without_a_fault_what_is_sent_is_delivered():
    delivery = sent(0)
    assert (None, [delivery]) == FaultInjector().publish(delivery)


def test_a_lost_event_is_an_injection_and_no_delivery():
    injector = armed("lose", changes.lost)
    injection, deliveries = injector.publish(sent(3, Removed((7,)), worker=2, rank=1))
    assert [] == deliveries
    assert ("lose", 2, 1, 3) == (injection.kind, injection.worker_id, injection.dp_rank, injection.event_id)
    assert (True, False, False) == (injection.missing, injection.late, injection.whole)
    assert ({(2, 1)}, {7}, {7}) == (injection.keys, injection.blocks, injection.subjects)
    assert (None, [4]) == (injector.publish(sent(4))[0], ids(injector.publish(sent(4))[1]))


def test_a_doubled_event_arrives_whole_and_only_its_second_copy_comes_of_the_fault():
    delivery = sent(0)
    injection, deliveries = armed("double", changes.doubled).publish(delivery)
    assert [delivery, delivery._replace(injection=injection)] == deliveries
    assert (False, True) == (injection.missing, injection.whole)


def test_an_event_that_is_held_back_goes_on_after_so_many_more_of_its_worker_and_rank():
    injector = armed("delay", changes.lost, late_by=2)
    injection, deliveries = injector.publish(sent(0))
    assert ([], True, True) == (deliveries, injection.missing, injection.late)
    assert [0] == ids(injector.publish(sent(0, worker=1))[1])
    assert [0] == ids(injector.publish(sent(0, rank=1))[1])
    assert [1] == ids(injector.publish(sent(1))[1])
    nothing, deliveries = injector.publish(sent(2))
    assert nothing is None
    assert [2, 0] == ids(deliveries)
    assert [None, injection] == [delivery.injection for delivery in deliveries]
    assert [3] == ids(injector.publish(sent(3))[1])


def test_an_event_that_arrives_as_another_workers_is_missing_at_its_own():
    injector = armed("foreign", changes.foreign(lambda _: (1, 0)))
    injection, (delivery,) = injector.publish(sent(0))
    assert (1, 0) == delivery.key
    assert ({(0, 0), (1, 0)}, True) == (injection.keys, injection.missing)
    assert injection is delivery.injection


def test_an_event_is_changed_by_one_fault_at_most_the_scripted_one_first():
    class Always:
        def random(self):
            return 0.0

    injector = armed("double", changes.doubled)
    injector.random.append(RandomFault("lose", 0.5, changes.lost, Always()))
    assert ["double", "lose"] == [injector.publish(sent(event_id))[0].kind for event_id in (0, 1)]


@pytest.mark.parametrize(("kind", "data"), [("lose", Cleared()), ("restart", None)])
def test_a_cleared_and_a_restart_empty_the_cache(kind, data):
    events = () if data is None else (sent(0, data).event,)
    injection = FaultInjector().injection(kind, (0, 0), *events)
    assert injection.empties
    assert (None if data is None else 0) == injection.event_id


def test_what_a_router_must_survive_is_noted_with_the_injection():
    injector = armed("lose", changes.lost)
    injector.survived = frozenset({"lose"})
    assert injector.publish(sent(0))[0].survived


def test_a_fault_of_the_index_input_leaves_the_delivery_as_it_is():
    injector = FaultInjector()
    injector.of_index_input = armed("signed", changes.signed).armed
    delivery = sent(0, Stored(None, (2**64 - 1,), (1,)))
    assert (None, [delivery]) == injector.publish(delivery)
    injection, given = injector.filter_index_input(delivery.event)
    assert ("signed", (-1,)) == (injection.kind, given.event.data.block_hashes)
    assert (None, delivery.event) == injector.filter_index_input(delivery.event)


WINDOW = {"kv_cache_spec_kind": "sliding_window"}


@pytest.mark.parametrize("change", [changes.wrong_parent(Random(0), 9), changes.self_parent])
@pytest.mark.parametrize(
    ("data", "extra"),
    [(SparseStored(1, (2,), 24, 4), None), (SparseStored(1, (2,), 24, 4), WINDOW), (Stored(1, (2,), (3,)), WINDOW)],
)
def test_no_fault_gives_another_parent_to_what_no_parent_is_asked_of(change, data, extra):
    assert None is change(RouterEvent(0, KvCacheEvent(0, data), extra=extra))
    assert None is not change(RouterEvent(0, KvCacheEvent(0, Stored(1, (2,), (3,))), extra={"group_idx": 1}))


def test_a_sparse_stored_and_a_location_are_signed_and_salted_as_any_event():
    high = 2**64 - 1
    for data in (SparseStored(high, (high, 5), 24, 4), Located((high, 5))):
        (event,) = changes.signed(RouterEvent(0, KvCacheEvent(0, data)))
        assert (type(data), (-1, 5)) == (type(event.data), event.data.block_hashes)

    salt = changes.salted(2, "adapter", None)
    (stored,) = salt(RouterEvent(0, KvCacheEvent(0, Stored(None, (7,), (8,))), token_ids=[[1, 2]]))
    (located,) = salt(RouterEvent(0, KvCacheEvent(1, Located((7, 9)))))
    assert (*stored.data.block_hashes, 9) == located.data.block_hashes
    assert None is salt(RouterEvent(0, KvCacheEvent(2, SparseStored(None, (7,), 4, 2)), token_ids=[[1, 2], [3, 4]]))
