"""The injector alone: a delivery in, an injection and deliveries out, without a judge or a harness."""

from random import Random

import pytest

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, Stored
from pytest_kvmock.oracle.faults import changes
from pytest_kvmock.oracle.faults.fault import Fault, RandomFault, wanted
from pytest_kvmock.oracle.faults.injector import FaultInjector
from pytest_kvmock.oracle.hygiene.delivery import Delivery
from pytest_kvmock.values import Located, SparseStored


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


def test_without_a_fault_every_sent_event_is_delivered():
    delivery = sent(0)
    assert (None, [delivery]) == FaultInjector().publish(delivery)


def test_a_lost_event_is_an_injection_and_no_delivery():
    injector = armed("lose", changes.lost)
    injection, deliveries = injector.publish(sent(3, Removed((7,)), worker=2, rank=1))
    assert deliveries == []
    assert (injection.kind, injection.worker_id, injection.dp_rank, injection.event_id) == ("lose", 2, 1, 3)
    assert (injection.missing, injection.late, injection.whole) == (True, False, False)
    assert (injection.keys, injection.blocks, injection.subjects) == ({(2, 1)}, {7}, {7})
    assert (injector.publish(sent(4))[0], ids(injector.publish(sent(4))[1])) == (None, [4])


def test_a_doubled_event_arrives_whole_and_only_its_second_copy_is_attributed_to_the_fault():
    delivery = sent(0)
    injection, deliveries = armed("double", changes.doubled).publish(delivery)
    assert [delivery, delivery._replace(injection=injection)] == deliveries
    assert (injection.missing, injection.whole) == (False, True)


def test_a_held_back_event_is_delivered_after_n_more_of_its_worker_and_rank():
    injector = armed("delay", changes.lost, late_by=2)
    injection, deliveries = injector.publish(sent(0))
    assert (deliveries, injection.missing, injection.late) == ([], True, True)
    assert ids(injector.publish(sent(0, worker=1))[1]) == [0]
    assert ids(injector.publish(sent(0, rank=1))[1]) == [0]
    assert ids(injector.publish(sent(1))[1]) == [1]
    nothing, deliveries = injector.publish(sent(2))
    assert nothing is None
    assert ids(deliveries) == [2, 0]
    assert [None, injection] == [delivery.injection for delivery in deliveries]
    assert ids(injector.publish(sent(3))[1]) == [3]


def test_an_event_that_arrives_as_another_workers_is_missing_at_its_own():
    injector = armed("foreign", changes.foreign(lambda _: (1, 0)))
    injection, (delivery,) = injector.publish(sent(0))
    assert delivery.key == (1, 0)
    assert (injection.keys, injection.missing) == ({(0, 0), (1, 0)}, True)
    assert injection is delivery.injection


def test_at_most_one_fault_changes_an_event_and_a_scripted_one_comes_first():
    class Always:
        def random(self):
            return 0.0

    injector = armed("double", changes.doubled)
    injector.random.append(RandomFault("lose", 0.5, changes.lost, Always()))
    assert [injector.publish(sent(event_id))[0].kind for event_id in (0, 1)] == ["double", "lose"]


@pytest.mark.parametrize(("kind", "data"), [("lose", Cleared()), ("restart", None)])
def test_losing_a_cleared_or_restarting_empties_the_cache(kind, data):
    events = () if data is None else (sent(0, data).event,)
    injection = FaultInjector().injection(kind, (0, 0), *events)
    assert injection.empties
    assert (None if data is None else 0) == injection.event_id


def test_an_injection_records_whether_a_router_must_survive_it():
    injector = armed("lose", changes.lost)
    injector.survived = frozenset({"lose"})
    assert injector.publish(sent(0))[0].survived


def test_a_fault_of_the_index_input_leaves_the_delivery_unchanged():
    injector = FaultInjector()
    injector.of_index_input = armed("signed", changes.signed).armed
    delivery = sent(0, Stored(None, (2**64 - 1,), (1,)))
    assert (None, [delivery]) == injector.publish(delivery)
    injection, given = injector.filter_index_input(delivery.event)
    assert (injection.kind, given.event.data.block_hashes) == ("signed", (-1,))
    assert (None, delivery.event) == injector.filter_index_input(delivery.event)


WINDOW = {"kv_cache_spec_kind": "sliding_window"}


@pytest.mark.parametrize("change", [changes.wrong_parent(Random(0), 9), changes.self_parent])
@pytest.mark.parametrize(
    ("data", "extra"),
    [(SparseStored(1, (2,), 24, 4), None), (SparseStored(1, (2,), 24, 4), WINDOW), (Stored(1, (2,), (3,)), WINDOW)],
)
def test_no_parent_fault_changes_an_event_without_a_parent_to_check(change, data, extra):
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
