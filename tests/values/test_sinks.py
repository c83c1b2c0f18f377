"""Sinks of a manager: their signatures, and the order in which they are called."""

from functools import partial
from queue import Queue

import pytest

from pytest_kvmock import (
    CapturingSink,
    Cleared,
    KvCacheEvent,
    MockEngine,
    MockEngineArgs,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    create_manager,
)
from pytest_kvmock.values.sinks import adapted

STORED = KvCacheEvent(0, Stored(None, (1, 2), (3, 4)))
REMOVED = KvCacheEvent(1, Removed((2,)))
CLEARED = KvCacheEvent(2, Cleared())


def test_a_capturing_sink_keeps_events_in_order_with_tier_and_tokens():
    sink = CapturingSink(worker_id=7)
    sink.publish(STORED, StorageTier.DEVICE, ((1,), (2,)))
    sink.publish(REMOVED, StorageTier.DISK)
    sink.publish(CLEARED)
    assert sink.events == [STORED, REMOVED, CLEARED]
    expected = [RouterEvent(7, STORED), RouterEvent(7, REMOVED, StorageTier.DISK), RouterEvent(7, CLEARED)]
    assert sink.router_events == expected
    assert [event.token_ids for event in sink.router_events] == [((1,), (2,)), None, None]


def test_take_returns_and_clears_the_captured_events():
    sink = CapturingSink()
    sink.publish(STORED)
    assert sink.take() == [STORED]
    assert (sink.events, sink.router_events, sink.take()) == ([], [], [])
    sink.publish(REMOVED)
    assert [RouterEvent(0, REMOVED)] == sink.router_events


# ------------------------------------------------------------------------------------------- the shapes of a sink


class OfEvent:
    """A sink with the signature of Dynamo's `KvCacheEventSink`: `publish(event)`."""

    def __init__(self):
        self.taken = []

    def publish(self, event):
        self.taken.append(event)


class OfTokens:
    """A sink with the earlier signature `publish(event, token_ids)`."""

    def __init__(self):
        self.taken = []

    def publish(self, event, token_ids):
        self.taken.append((event, token_ids))


class WithExtra:
    """A sink that takes the event and its extra data."""

    def __init__(self):
        self.taken = []

    def publish(self, event, *, extra=None):
        self.taken.append((event, extra))


TOKENS = [[1, 2, 3, 4]]
NEW = KvCacheEvent(0, Stored(None, (7,), (7,)))
WHOLE = RouterEvent(0, NEW)


def store_one(sink, backend="lineage"):
    create_manager(backend, num_blocks=4, block_size=4, sink=sink).use([7], token_ids=TOKENS)


def test_a_sink_that_takes_only_the_event_receives_whole_router_events():
    sink = OfEvent()
    store_one(sink)
    assert sink.taken == [WHOLE]
    assert [list(tokens) for tokens in sink.taken[0].token_ids] == TOKENS


def test_a_sink_that_takes_event_and_token_ids_receives_both():
    sink = OfTokens()
    store_one(sink)
    assert [(NEW, tuple(map(tuple, TOKENS)))] == [(e, tuple(map(tuple, tokens))) for e, tokens in sink.taken]


def test_a_function_is_called_with_as_many_arguments_as_it_accepts():
    events, three = [], []
    store_one(events.append)
    store_one(lambda event, *beside: three.append((event, beside[0])))
    assert (events, three) == ([WHOLE], [(NEW, StorageTier.DEVICE)])


def test_a_parameter_with_a_default_is_passed_only_the_value_that_it_is_named_after():
    queue, tier, tokens = Queue(1), [], []
    store_one(queue.put)
    store_one(lambda event, storage_tier="mine", token_ids=None: tier.append((event, storage_tier, token_ids)))
    store_one(lambda event, token_ids=None, retries=3: tokens.append((event, token_ids, retries)))
    assert queue.get_nowait() == WHOLE
    assert [(e, each, [*map(list, of)]) for e, each, of in tier] == [(NEW, StorageTier.DEVICE, TOKENS)]
    assert [(e, [*map(list, of)], retries) for e, of, retries in tokens] == [(NEW, TOKENS, 3)]


def test_a_sink_receives_extra_only_if_it_accepts_it():
    sink = WithExtra()
    adapted(sink).publish(NEW, StorageTier.DEVICE, None, {"lora_name": "a"})
    adapted(sink).publish(NEW)
    without = OfEvent()
    adapted(without).publish(NEW, StorageTier.DEVICE, None, {"lora_name": "a"})
    assert (sink.taken, without.taken) == ([(WHOLE, {"lora_name": "a"}), (WHOLE, None)], [WHOLE])
    assert without.taken[0].extra == {"lora_name": "a"}


def test_a_sink_with_the_standard_signature_is_used_unchanged():
    sink = CapturingSink()
    assert sink is adapted(sink)


@pytest.mark.parametrize(("make", "event"), [(CapturingSink, NEW), (OfEvent, WHOLE)])
def test_a_publish_method_that_is_replaced_later_is_the_one_called(make, event, monkeypatch):
    sink, taken = make(), []
    manager = create_manager("lru", num_blocks=4, block_size=4, sink=sink)
    monkeypatch.setattr(sink, "publish", lambda event, *_: taken.append(event))
    manager.use([7])
    assert [event] == taken


def test_a_manager_returns_its_sink_as_it_was_given():
    sink = OfEvent()
    manager = create_manager("lru", num_blocks=4, block_size=4, sink=sink)
    assert sink is manager.sink
    manager.sink = other = OfTokens()
    assert other is manager.sink
    manager.sink = None
    assert None is manager.sink


class Empty:
    pass


class OfNothing:
    def publish(self):
        pass


class OfFour:
    def publish(self, event, storage_tier, token_ids, worker):
        pass


class OfTier:
    def publish(self, event, storage_tier):
        pass


class NeedsName:
    def publish(self, event, *, name):
        pass


class Awaited:
    async def publish(self, event):
        pass


class CalledAndAwaited:
    async def __call__(self, event):
        pass

    def __repr__(self):
        return "CalledAndAwaited()"


class Iterated:
    def publish(self, event):
        yield event


class IteratedAndAwaited:
    async def publish(self, event):
        yield event


class PublishesByAnObject:
    def __init__(self):
        self.publish = partial(CalledAndAwaited())


CALLED = "a sink is called as publish(event), publish(event, token_ids) or publish(event, storage_tier, token_ids)"
REFUSED = {
    "an object without publish": (
        [],
        (
            "sink must have a method publish(event), publish(event, token_ids) or "
            "publish(event, storage_tier, token_ids), or be such a function; got []"
        ),
    ),
    "a class": (CapturingSink, "sink is the class CapturingSink; it must be an object, CapturingSink()"),
    "no argument": (OfNothing(), f"sink: OfNothing.publish takes (); {CALLED}"),
    "too many": (OfFour(), f"sink: OfFour.publish takes (event, storage_tier, token_ids, worker); {CALLED}"),
    "a tier without tokens": (OfTier(), f"sink: OfTier.publish takes (event, storage_tier); {CALLED}"),
    "a keyword that nobody gives": (NeedsName(), f"sink: NeedsName.publish takes (event, *, name); {CALLED}"),
    "a coroutine": (
        Awaited(),
        "sink: Awaited.publish is a coroutine function, and a manager does not await; give it a plain function",
    ),
    "an object whose call is a coroutine": (
        CalledAndAwaited(),
        "sink CalledAndAwaited() is a coroutine function, and a manager does not await; give it a plain function",
    ),
    "a publish that is such an object": (
        PublishesByAnObject(),
        (
            "sink: PublishesByAnObject.publish is a coroutine function, and a manager does not await; give it a plain "
            "function"
        ),
    ),
    "a generator": (
        Iterated(),
        "sink: Iterated.publish is a generator function, and a manager does not iterate; give it a plain function",
    ),
    "an async generator": (
        IteratedAndAwaited(),
        (
            "sink: IteratedAndAwaited.publish is a generator function, and a manager does not iterate; give it a plain "
            "function"
        ),
    ),
}


@pytest.mark.parametrize(("sink", "message"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_sink_is_refused_by_every_call_that_takes_one(sink, message):
    manager = create_manager("lru", num_blocks=4, block_size=4)
    harness = RouterHarness()
    with pytest.raises(TypeError) as of_create_manager:
        create_manager("lru", num_blocks=4, block_size=4, sink=sink)
    with pytest.raises(TypeError) as of_manager:
        manager.sink = sink
    with pytest.raises(TypeError) as of_engine:
        MockEngine(MockEngineArgs(), sink=sink)
    with pytest.raises(TypeError) as of_harness:
        harness.add_sink(sink)
    assert [str(each.value) for each in (of_create_manager, of_manager, of_engine)] == [message] * 3
    assert str(of_harness.value) == f"add_sink: {message}"
    assert None is manager.sink
    harness.worker(0).serve(harness.prompt(1))  # no refused sink was added
    assert harness.judge().errors == []


def test_a_harness_accepts_sinks_of_any_signature_and_returns_them_unchanged():
    one, taken = OfEvent(), []
    two = taken.append
    with RouterHarness() as harness:
        harness.add_sink(one, worker_id=0)
        harness.add_sink(two, before=True)
        assert [(two, None), (one, 0)] == harness.inside.sinks_of(0)
        harness.worker(0).serve(harness.prompt(1))
        harness.publisher.remove_sink(one)
        harness.worker(0).serve(harness.prompt(1))
    assert (len(one.taken), len(taken)) == (1, 2)


def test_a_harness_names_a_raising_sink_of_any_signature():
    class Broken:
        def publish(self, event):
            raise OSError("gone")

    def refuse(event):
        raise OSError("gone")

    for sink, name in ((Broken(), "Broken.publish"), (refuse, refuse.__qualname__)):
        harness = RouterHarness()
        harness.add_sink(sink)
        harness.worker(0).serve(harness.prompt(1))
        (problem,) = harness.judge().errors
        assert (problem.rule, problem.observed) == ("sink_failure", f"{name} raised OSError: gone")


def test_a_sink_of_any_signature_is_notified_of_a_restart():
    class Restarting(OfEvent):
        def worker_restarted(self, dp_rank):
            self.taken.append(dp_rank)

    sink = Restarting()
    with RouterHarness() as harness:
        harness.add_sink(sink, worker_id=0)
        harness.worker(0).restart(announced=True)
    assert sink.taken == [0]
