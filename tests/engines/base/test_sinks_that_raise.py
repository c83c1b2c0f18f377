"""A manager raises a sink's error at the end of the call: state, ids and later events are as with any other sink."""

from contextlib import suppress
from random import Random
from uuid import UUID

import pytest

from pytest_kvmock import CapturingSink, Cleared, Prompt, StorageTier, Stored, create_manager
from pytest_kvmock.engines import BlockDetails, Scheduled
from pytest_kvmock.engines.base.manager_base import EventPublisher
from pytest_kvmock.engines.dynamo.mocker_sglang_request import MockerRadixRequest
from pytest_kvmock.values import Destroy, lineage_hash

SIZE = 4
PARTIAL = UUID(int=1, version=4)


class Refusing(CapturingSink):
    """A sink that keeps each event and raises for it."""

    def publish(self, event, storage_tier=StorageTier.DEVICE, token_ids=None):
        super().publish(event, storage_tier, token_ids)
        raise OSError(f"event {event.event_id}")


def moves(manager):
    yield lambda: manager.use([1, 2, 3, 4])
    yield lambda: manager.deref(4, 3, 2, 1)
    yield lambda: manager.use([11, 12, PARTIAL])
    yield lambda: manager.promote(PARTIAL, 13, parent=12)
    yield lambda: manager.use([21])
    yield lambda: manager.deref(21, 13, 12, 11)
    yield manager.clear
    yield lambda: manager.use([31])


def hash_cache_moves(manager):
    yield from moves(manager)
    yield lambda: manager.process(Destroy([31]))
    yield lambda: manager.use([41])


def pool_requests(manager):
    one, other, third = (manager.new_request(range(at, at + 4 * SIZE)) for at in (0, 100, 200))
    yield lambda: manager.allocate_slots(one, 4 * SIZE)
    yield lambda: manager.free(one)
    yield lambda: manager.allocate_slots(other, 3 * SIZE)
    yield lambda: manager.allocate_slots(other, SIZE)
    yield lambda: manager.free(other)
    yield manager.reset_prefix_cache
    yield lambda: manager.allocate_slots(third, SIZE)


def radix_calls(manager):
    one, other = (manager.request(Prompt(range(at, at + 3 * SIZE)), Random(0)) for at in (300, 400))
    yield lambda: manager.insert(range(2 * SIZE))
    yield lambda: manager.insert(range(100, 100 + 2 * SIZE))
    yield lambda: manager.evict(SIZE)
    yield lambda: manager.find(one)
    yield lambda: manager.admit(one)
    yield lambda: manager.allocate(one, 3 * SIZE)
    yield lambda: setattr(one, "computed", 3 * SIZE)
    yield lambda: manager.checkpoint(one)
    yield lambda: manager.release(one)
    yield lambda: setattr(manager, "hold_events", True)
    yield lambda: manager.evict(SIZE)
    yield manager.take_events
    yield lambda: setattr(manager, "hold_events", False)
    yield lambda: manager.find(other)
    yield lambda: manager.admit(other)
    yield lambda: manager.allocate(other, 3 * SIZE)
    yield lambda: manager.release(other)
    yield manager.reset
    yield lambda: manager.insert(range(SIZE))
    yield manager.clear


def page_calls(manager):
    def ask(at, pages=2):
        return MockerRadixRequest(Prompt(range(at, at + pages * SIZE)), SIZE, Random(0))

    one, other, copy, third, long, by_hand = ask(0), ask(100), ask(0), ask(200), ask(500, 4), ask(300)
    fresh, unpublished = ask(600), ask(700)
    yield lambda: manager.allocate(one, 2 * SIZE)
    yield lambda: manager.checkpoint(one)
    yield lambda: manager.finish(one)
    yield lambda: manager.allocate(other, 2 * SIZE)
    yield lambda: manager.finish(other)
    yield lambda: manager.allocate(third, SIZE)  # evicts and stores
    yield lambda: manager.release(third)
    yield lambda: manager.allocate(copy, 2 * SIZE)
    yield lambda: manager.release(copy)
    yield manager.clear
    yield lambda: manager.match(by_hand, 0)
    yield lambda: manager.extend(by_hand, 2 * SIZE)
    yield lambda: manager.checkpoint(by_hand)
    yield lambda: manager.finish(by_hand)
    yield lambda: manager.evict(SIZE)
    yield lambda: manager.allocate(long, 3 * SIZE)
    yield lambda: manager.extend(long, 4 * SIZE)
    yield lambda: manager.checkpoint(long)
    yield lambda: manager.finish(long)
    yield lambda: manager.make_room(2 * SIZE)
    yield lambda: manager.allocate(fresh, 2 * SIZE)
    yield lambda: manager.release(fresh)
    yield lambda: manager.match(unpublished, 0)
    yield lambda: manager.extend(unpublished, 2 * SIZE)
    yield lambda: manager.finish(unpublished)
    yield manager.clear


def offload_calls(manager):
    first = lineage_hash(1, None, 0)
    found = []
    yield lambda: manager.use([1])
    yield lambda: manager.deref(1)
    yield lambda: manager.use([2, 3, 4, 5])
    yield lambda: manager.tick(1000.0)
    yield lambda: manager.deref(4, 3, 2)
    yield lambda: manager.use([6])
    yield lambda: manager.tick(2000.0)
    yield lambda: found.append(manager.swap_in([first], 2000.0))
    yield lambda: manager.tick(3000.0)
    yield lambda: found.append(manager.swap_in([first], 3000.0))
    yield lambda: manager.tick(4000.0)
    yield lambda: manager.register_swapped_in(
        [BlockDetails(1, first, None, 1, None)], None, next(each for each in found if isinstance(each, Scheduled))
    )


PROGRAMS = {
    "lineage": ({}, moves),
    "lru": ({}, moves),
    "multi_lru": ({}, moves),
    "hash_cache": ({}, hash_cache_moves),
    "vllm": ({}, pool_requests),
    "vllm_0_19": ({}, pool_requests),
    "sglang": ({}, radix_calls),
    "mocker_sglang_1_6": ({}, page_calls),
    "lineage with a host": ({"tiers": {"host": 8}}, offload_calls),
}


def state_of(manager):
    asked = ("active_blocks", "num_active_blocks", "num_active_block_refs", "num_inactive_blocks")
    values = [getattr(manager, name) for name in asked]
    below = manager.resident(StorageTier.HOST_PINNED)
    free = [getattr(manager, name, None) for name in ("free_tokens", "_free")]
    return [*values, list(manager.inactive_blocks()), sorted(manager.resident()), sorted(below), repr(free)]


@pytest.mark.parametrize(
    ("name", "options", "program"), [(name, *rest) for name, rest in PROGRAMS.items()], ids=PROGRAMS
)
def test_a_call_completes_before_it_raises_the_first_error_of_its_sink(name, options, program):
    def make():
        return create_manager(name.split()[0], num_blocks=4, block_size=SIZE, sink=CapturingSink(), **options)

    good, refused = make(), make()
    refused.sink = refusing = Refusing()
    good.sink.take()
    raised = 0
    for call, other in zip(program(good), program(refused), strict=True):
        before = len(good.sink.events)
        call()
        published = good.sink.events[before:]
        if published:
            raised += 1
            with pytest.raises(OSError, match=f"^event {published[0].event_id}$"):
                other()
        else:
            other()
        assert good.sink.events == refusing.events
        assert state_of(good) == state_of(refused)
    assert raised > 3


def test_create_manager_raises_the_error_of_a_sink_that_refuses_the_first_event():
    with pytest.raises(OSError, match=r"^event 0$"):
        create_manager("sglang", num_blocks=4, block_size=SIZE, sink=Refusing())


def test_a_refused_call_raises_its_own_error_after_a_sink_error_of_an_earlier_call():
    manager = create_manager("lru", num_blocks=4, block_size=SIZE, sink=Refusing())
    with pytest.raises(OSError, match=r"^event 0$"):
        manager.use([1])
    with pytest.raises(ValueError, match=r"^Deref of block 9"):
        manager.deref(9)
    manager.sink = None
    assert manager.use([2]) == 1


def refused_part(publisher):
    """A call whose sink raises before the call itself raises."""
    with publisher.one_call():
        publisher.publish(Cleared())
        raise ValueError("of the part")


def call_of_parts(publisher):
    """A call that continues after a part of it is refused."""
    with publisher.one_call():
        with suppress(ValueError):
            refused_part(publisher)
        publisher.publish(Cleared())


def test_a_call_that_raises_leaves_no_sink_error_to_the_next_call():
    publisher = EventPublisher(Refusing(), 0)
    with pytest.raises(ValueError, match=r"^of the part$"):
        refused_part(publisher)
    assert None is publisher.failure


def test_a_call_that_catches_the_error_of_a_part_still_raises_the_sink_error_at_its_end():
    publisher = EventPublisher(Refusing(), 0)
    with pytest.raises(OSError, match=r"^event 0$"):
        call_of_parts(publisher)
    assert None is publisher.failure


def test_a_sink_error_for_a_host_event_is_raised_by_the_call_that_publishes_it():
    sink = Refusing()
    manager = create_manager("vllm", num_blocks=4, block_size=SIZE, sink=sink, tiers={"host": 4})
    manager.offload.take_events = lambda: [(Stored(None, (1,), (2,)), StorageTier.HOST_PINNED, None, None)]
    with pytest.raises(OSError, match="event 0"):
        manager.publish_below()
    assert [each.storage_tier for each in sink.router_events] == [StorageTier.HOST_PINNED]
    manager.offload.take_events = list
    manager.publish_below()  # the error is not raised again
