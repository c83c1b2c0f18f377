"""Faults of an index under test are cut, compared as the test compares, and awaited where the index is async."""

import asyncio
import random
import re
import threading

import pytest
from depth import takes_long, worth_its_time
from faulty_worlds import (
    AsyncForgets,
    ByTokens,
    ForgetsLongRemoved,
    ForgetsOldest,
    ForgetsWhatWasFlushed,
    ForgetsWhenItKnows,
    Overflows,
    RaisesOnRemoved,
    Sound,
)

from pytest_kvmock import Cleared, EngineProfile, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced

# ------------------------------------------------------------------------------------------------ how it is made


def test_an_index_that_ignores_a_removed_is_reproduced_by_events(busy, failure_of):
    found = reproduce(busy(index=ForgetsLongRemoved()))
    stored, removed = [event.event.data for event in found.events][-2:]

    assert (found.rule, found.level, found.with_index) == ("index_drift", "events", True)
    assert len(removed.block_hashes) == 4
    assert found.size <= 3
    assert isinstance(stored, Stored)
    assert "index_drift" in failure_of(found, ForgetsLongRemoved()).splitlines()[0]


def test_a_cause_that_shares_no_block_with_the_problem_is_found_among_all_events(busy, failure_of):
    """A block is stored by hand on a full worker; the replay has no engine to make room for it."""

    def store(kv):
        kv.apply(Stored(None, (4711,), (4711,)), worker_id=1)

    found = reproduce(busy(index=ForgetsWhenItKnows(), amid=store))

    assert (found.rule, found.level, found.size) == ("index_drift", "events", 3)
    assert found.allow == ()
    assert "index_drift" in failure_of(found, ForgetsWhenItKnows()).splitlines()[0]


def test_an_index_that_raises_is_reproduced_by_events(busy, failure_of):
    found = reproduce(busy(index=RaisesOnRemoved()))

    assert (found.rule, found.size) == ("index_failure", 2)
    assert "disk full" in failure_of(found, RaisesOnRemoved())


def test_an_index_that_takes_tokens_is_reproduced_by_requests(busy, failure_of):
    found = reproduce(busy(index=ByTokens(4)))

    assert (found.rule, found.level, found.size) == ("index_drift", "requests", 2)
    assert "@pytest.mark.kvmock(block_size=4)\ndef test_reproduction(kv_index):\n" in found.as_test()
    assert "index_drift" in failure_of(found, ByTokens(4))


def test_an_index_that_takes_tokens_can_be_reproduced_by_events_with_tokens(busy, failure_of):
    found = reproduce(busy(index=ByTokens(4)), level="events")

    assert found.size == 2
    assert "index_drift" in failure_of(found, ByTokens(4))


def test_an_index_is_rebuilt_by_its_new_method(busy):
    class Named(ForgetsLongRemoved):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def new(self):
            return Named(self.name)

    assert reproduce(busy(index=Named("a"))).rule == "index_drift"


def test_an_index_is_rebuilt_by_its_class_if_the_inherited_new_method_fails(busy):
    class Forgets(RadixIndex):
        """Its base has a `new()` that passes an argument."""

        def __init__(self):
            super().__init__()

        def apply(self, event):
            if not isinstance(event.event.data, Removed):
                super().apply(event)

    assert reproduce(busy(index=Forgets())).size == 2


def test_an_index_that_cannot_be_rebuilt_is_reported_with_the_error_of_its_new_method(busy):
    class Forgets(ForgetsLongRemoved):
        def __init__(self, name):
            super().__init__()

        def new(self):
            raise OSError("port in use")

    with pytest.raises(NotReduced) as raised:
        reproduce(busy(index=Forgets("a")))
    assert (
        str(raised.value) == "could not rebuild your index for the replay (OSError: port in use): "
        "give Forgets a method `new()` that returns an empty one"
    )


def test_an_index_that_cannot_be_rebuilt_is_reported_with_advice(busy):
    class Named(ForgetsLongRemoved):
        def __init__(self, name):
            super().__init__()

    with pytest.raises(NotReduced) as raised:
        reproduce(busy(index=Named("a")))
    assert (
        str(raised.value) == "could not rebuild your index for the replay (its class needs 'name'): "
        "give Named a method `new()` that returns an empty one"
    )


def only_wrong_here(kind):
    """Return an index that ignores each Removed, unlike other objects of its class."""
    index = kind()
    index.apply = lambda event: None if isinstance(event.event.data, Removed) else index.tree.apply(event)
    return index


class SoundWithNew(Sound):
    def new(self):
        return type(self)()


class NeedsALibrary(Sound):
    def apply(self, event):
        raise RuntimeError("not connected")


NOT_AGAIN = "replayed, the events do not break the rule again; replayed, the requests do not break the rule again"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Sound, "; the replays called Sound(): if yours differs, give it a method `new()`"),
        (SoundWithNew, ""),
        (
            NeedsALibrary,
            "; a new NeedsALibrary failed there: apply raised RuntimeError: not connected (*.py:* in apply)",
        ),
    ],
)
def test_an_index_that_is_wrong_only_in_this_test_is_reported(busy, kind, why):
    kv = busy(index=only_wrong_here(kind), requests=40)

    with pytest.raises(NotReduced) as raised:
        reproduce(kv)
    said = re.sub(r"\(\w+\.py:\d+ in", "(*.py:* in", str(raised.value))
    assert NOT_AGAIN + why == said


def test_a_search_that_ends_early_does_not_mention_how_the_index_is_made(busy):
    with pytest.raises(NotReduced) as raised:
        reproduce(busy(index=ForgetsLongRemoved(), requests=40), work=1)
    assert (
        str(raised.value) == "no part of the events broke the rule again before the limit was reached; "
        "no part of the requests broke the rule again before the limit was reached"
    )


# ------------------------------------------------------------------------------------------- when it is compared


def stored_one_by_one(index, count, sync):
    """Store blocks one by one; once its queue is full, the index drifts at each Stored."""
    kv = RouterHarness(EngineProfile(num_blocks=count), index=index, sync=sync)
    for block in range(1, count + 1):
        kv.apply(Stored(None, (block,), (block,)))
    kv.judge()
    return kv


@pytest.mark.parametrize("room", [8, 52])
def test_an_index_compared_at_the_end_is_compared_at_the_end_of_the_reproduction(failure_of, room):
    found = reproduce(stored_one_by_one(Overflows(room), 60, "end"))

    assert (room + 1, True, "end") == (found.size, found.complete, found.sync)
    assert '    with RouterHarness(index=kv_index, sync="end") as kv:\n' in found.as_test()
    assert "index_drift" in failure_of(found, Overflows(room)).splitlines()[0]


def test_a_drift_that_shows_right_after_its_event_is_reproduced_without_sync_end(failure_of):
    kv = RouterHarness(index=ForgetsLongRemoved(), sync="end")
    for block in range(100, 140):
        kv.apply(Stored(None, (block,), (block,)))
    kv.apply([Stored(None, (1, 2, 3, 4), (1, 2, 3, 4)), Removed((4, 3, 2, 1))])
    kv.judge()
    found = reproduce(kv)

    assert (found.size, found.sync) == (2, "auto")
    assert "    with RouterHarness(index=kv_index) as kv:\n" in found.as_test()
    assert "index_drift" in failure_of(found, ForgetsLongRemoved())


def test_a_reproduction_compares_after_each_event_by_default():
    kv = RouterHarness(index=ForgetsLongRemoved(), sync="every")
    kv.apply([Stored(None, (1, 2, 3, 4), (1, 2, 3, 4)), Removed((4, 3, 2, 1))])
    kv.judge()

    assert "RouterHarness(index=kv_index) as kv" in reproduce(kv).as_test()


@worth_its_time
def test_a_drift_that_only_rare_flushes_show_is_reproduced_with_sync_end(failure_of):
    """After 2,000 events the index is flushed once in 16 events; a short replay would flush after each."""
    found = reproduce(stored_one_by_one(Overflows(8), 2100, "auto"))

    assert (found.size, found.sync) == (9, "end")
    assert "index_drift" in failure_of(found, Overflows(8)).splitlines()[0]


@takes_long
def test_a_drift_that_a_test_would_not_show_is_not_taken_for_a_reproduction(failure_of):
    """Fifty-one events break the rule in a replay, which flushes after each, and not in a test."""

    class ForgetsFresh(Sound):
        """Ignores a Removed of blocks that were stored since the last flush."""

        def __init__(self):
            super().__init__()
            self.fresh = set()

        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                self.fresh.update(data.block_hashes)
            if not isinstance(data, Removed) or self.fresh.isdisjoint(data.block_hashes):
                self.tree.apply(event)

        def flush(self):
            self.fresh.clear()

    kv = RouterHarness(EngineProfile(num_blocks=3000), index=ForgetsFresh())
    for block in range(1, 2003):
        kv.apply(Stored(None, (block,), (block,)))
    kv.apply(Removed((2002,)))
    kv.judge()
    found = reproduce(kv, work=20_000)

    assert (found.size, found.sync) == (2, "end")
    assert "index_drift" in failure_of(found, ForgetsFresh())


@takes_long
def test_an_index_that_fails_after_many_events_is_cut_as_far_as_possible(failure_of):
    """A cut longer than a short replay is compared as its test compares before it is shown."""

    class RunsFull(Sound):
        taken = 0

        def apply(self, event):
            self.taken += 1
            if self.taken <= 52:
                self.tree.apply(event)

    found = reproduce(stored_one_by_one(RunsFull(), 60, "auto"))

    assert (found.size, found.sync, found.complete) == (53, "auto", True)
    assert "index_drift" in failure_of(found, RunsFull()).splitlines()[0]


# ------------------------------------------------------------------------------------------- found in a burst


def traffic(kv, requests=100):
    """Serve prompts with shared prefixes on one worker."""
    rng = random.Random(0)
    shared = [kv.prompt(3) for _ in range(6)]
    for _ in range(requests):
        kv.worker(0).serve(kv.prompt(rng.randrange(1, 5), after=rng.choice(shared)))
    return kv


ROOMY = EngineProfile(block_size=4, num_blocks=2000)


def in_a_burst_of_each(index):
    kv = traffic(RouterHarness(ROOMY, index=index, sync="burst"))
    kv.judge()
    return kv


def in_a_burst_amid_others(index):
    kv = RouterHarness(ROOMY, index=index)
    kv.worker(0).serve(kv.prompt(2))
    with kv.burst():
        traffic(kv)
    kv.worker(0).serve(kv.prompt(2))
    kv.judge()
    return kv


@pytest.mark.parametrize("found_in", [in_a_burst_of_each, in_a_burst_amid_others])
@pytest.mark.parametrize("index", [Overflows, ForgetsOldest])
def test_a_queue_that_overflows_in_a_burst_is_reproduced_in_a_burst(failure_of, found_in, index):
    found = reproduce(found_in(index(64)), work=20_000)

    assert (found.rule, found.size, found.sync, found.complete) == ("index_drift", 65, "burst", True)
    assert found.as_test() == (
        "from pytest_kvmock import RouterHarness, Stored\n"
        "\n"
        "\n"
        "def test_reproduction(kv_index):\n"
        '    with RouterHarness(index=kv_index, sync="burst") as kv:\n'
        "        kv.apply([\n"
        "            *(Stored(None, (block,), (block,)) for block in range(1, 66)),\n"
        "        ])\n"
    )
    assert "index_drift" in failure_of(found, index(64)).splitlines()[0]


def test_the_removed_that_overflows_a_queue_stays_in_the_reproduction(failure_of):
    kv = traffic(RouterHarness(EngineProfile(block_size=4, num_blocks=24), index=Overflows(64), sync="burst"))
    kv.judge()
    found = reproduce(kv, work=20_000)

    assert (
        "            *(Stored(None, (block,), (block,)) for block in range(1, 65)),\n"
        "            Removed((1,)),\n" in found.as_test()
    )
    assert "index_drift" in failure_of(found, Overflows(64)).splitlines()[0]


def test_a_long_overflow_is_written_as_a_range(failure_of):
    found = reproduce(stored_one_by_one(Overflows(500), 600, "burst"), work=50_000)

    assert "            *(Stored(None, (block,), (block,)) for block in range(1, 502)),\n" in found.as_test()
    assert "index_drift" in failure_of(found, Overflows(500)).splitlines()[0]


def test_an_overflow_through_a_sink_is_written_as_a_loop(failure_of):
    kv = RouterHarness(index=Overflows(64), sync="burst")
    sink = kv.make_sink(residency="counted")
    for block in range(100, 200):
        sink(Stored(None, (block,), (block,)))
    kv.judge()
    found = reproduce(kv)

    assert (
        '        sink = kv.make_sink(residency="counted")\n'
        "        for block in range(1, 66):\n"
        "            sink(Stored(None, (block,), (block,)))\n" in found.as_test()
    )
    assert "index_drift" in failure_of(found, Overflows(64)).splitlines()[0]


def test_a_drift_that_shows_without_a_burst_is_reproduced_without_one(failure_of):
    kv = traffic(RouterHarness(EngineProfile(block_size=4, num_blocks=24), index=ForgetsLongRemoved(), sync="burst"))
    kv.judge()
    found = reproduce(kv)

    assert (found.size, found.sync) == (3, "auto")
    assert "index_drift" in failure_of(found, ForgetsLongRemoved())


# ----------------------------------------------------------------------------------------- what a Cleared empties


class ClearsOneRank(Sound):
    """Clears one rank at a Cleared that should clear all ranks of its worker."""


def test_a_drift_under_the_older_rule_of_cleared_is_replayed_under_that_rule(failure_of):
    kv = RouterHarness(EngineProfile(dp_size=2), index=ClearsOneRank(), clears="worker")
    for _ in range(30):
        for rank in range(2):
            kv.worker(0, dp_rank=rank).serve(kv.prompt(2))
    kv.worker(0, dp_rank=0).clear()
    kv.judge()
    found = reproduce(kv)

    assert (found.rule, found.size, found.clears) == ("index_drift", 2, "worker")
    assert found.as_test() == (
        "from pytest_kvmock import Cleared, RouterHarness, Stored\n"
        "\n"
        "\n"
        "def test_reproduction(kv_index):\n"
        '    with RouterHarness(index=kv_index, clears="worker") as kv:\n'
        "        kv.apply(Stored(None, (1,), (1,)), dp_rank=1)\n"
        "        kv.apply(Cleared())\n"
    )
    assert "index_drift" in failure_of(found, ClearsOneRank()).splitlines()[0]


def test_a_replay_does_not_blame_an_index_for_the_older_rule_of_cleared(failure_of):
    class Forgets(RadixIndex):
        def __init__(self):
            super().__init__(clears="worker")

        def new(self):
            return Forgets()

        def apply(self, event):
            if not isinstance(event.event.data, Removed):
                super().apply(event)

    kv = RouterHarness(EngineProfile(dp_size=2), index=Forgets(), clears="worker")
    for rank in range(2):
        kv.apply(Stored(None, (1, 2), (1, 2)), dp_rank=rank)
    kv.apply(Cleared())
    for rank in range(2):
        kv.apply([Stored(None, (1, 2), (1, 2)), Removed((2,))], dp_rank=rank)
    kv.judge()
    found = reproduce(kv)

    assert [type(event.event.data).__name__ for event in found.events] == ["Stored", "Removed"]
    assert "index_drift" in failure_of(found, Forgets()).splitlines()[0]


# ------------------------------------------------------------------------------------------------- async indexes


def awaited(index, *, each=False, sync="auto", **options):
    """Serve thirty requests in a small cache over an async index; return its reproduction, made in a running loop."""

    async def body():
        kv = RouterHarness(EngineProfile(num_blocks=20), index=index() if isinstance(index, type) else index, sync=sync)
        for _ in range(30):
            kv.worker(0).serve(kv.prompt(4))
            if each:
                await kv.aflush()
        await kv.aflush()
        kv.judge()
        return reproduce(kv, **options)

    return asyncio.run(body())


def no_thread_is_left():
    return [thread for thread in threading.enumerate() if "kvmock" in thread.name] == []


def test_a_reproduction_awaits_an_async_index_in_its_own_loop(failure_of):
    found = awaited(AsyncForgets)

    assert found.as_test() == (
        "import asyncio\n\nfrom pytest_kvmock import Removed, RouterHarness, Stored\n\n\ndef "
        "test_reproduction(kv_index):\n    async def body():\n        with RouterHarness(index=kv_index) as "
        "kv:\n            kv.apply([\n                Stored(None, (1,), (1,)),\n                "
        "Removed((1,)),\n            ])\n            await kv.aflush()\n\n    asyncio.run(body())\n"
    )
    assert (found.cut_from, found.size, found.complete) == (55, 2, True)
    assert "index_drift" in failure_of(found, AsyncForgets()).splitlines()[0]
    assert no_thread_is_left()


@pytest.mark.parametrize(("awaited_by", "lines"), [("anyio", ["import pytest", "", "@pytest.mark.anyio"]), ("", [])])
def test_a_reproduction_can_be_written_for_a_plugin_that_awaits_it(awaited_by, lines):
    text = awaited(AsyncForgets).as_test(awaited_by=awaited_by)

    assert [
        *lines[:2],
        "from pytest_kvmock import Removed, RouterHarness, Stored",
        "",
        "",
        *lines[2:],
        "async def test_reproduction(kv_index):",
        "    with RouterHarness(index=kv_index) as kv:",
        "        kv.apply([",
        "            Stored(None, (1,), (1,)),",
        "            Removed((1,)),",
        "        ])",
        "        await kv.aflush()",
    ] == text.splitlines()


def test_an_async_index_is_flushed_after_every_step_if_the_drift_needs_it(failure_of):
    found = awaited(ForgetsWhatWasFlushed, each=True)

    assert (
        "            kv.apply(Stored(None, (1,), (1,)))\n            await kv.aflush()\n            "
        "kv.apply(Removed((1,)))\n            await kv.aflush()\n\n    asyncio.run(body())\n" in found.as_test()
    )
    assert "index_drift" in failure_of(found, ForgetsWhatWasFlushed()).splitlines()[0]


def test_an_async_index_is_flushed_after_every_request_if_the_drift_needs_it(failure_of):
    found = awaited(ForgetsWhatWasFlushed, each=True, level="requests")
    lines = [line.strip() for line in found.as_test().splitlines()]

    assert found.level == "requests"
    assert [*lines[lines.index("request1.finish()") :][:2]] == ["request1.finish()", "await kv.aflush()"]
    assert "index_drift" in failure_of(found, ForgetsWhatWasFlushed()).splitlines()[0]


def test_an_async_index_may_create_tasks_in_its_running_loop():
    class Works(AsyncForgets):
        def __init__(self):
            super().__init__()
            self.queue = asyncio.Queue()
            self.task = asyncio.get_running_loop().create_task(self.work())

        async def work(self):
            while True:
                await AsyncForgets.apply(self, await self.queue.get())
                self.queue.task_done()

        async def apply(self, event):
            await self.queue.put(event)

        async def flush(self):
            await self.queue.join()

    assert awaited(Works).size == 2
    assert no_thread_is_left()


def test_an_async_index_can_be_made_by_an_async_new_method():
    class Connects(AsyncForgets):
        def __init__(self, address):
            super().__init__()
            self.address = address

        async def new(self):
            return type(self)(self.address)

    assert awaited(Connects("a")).size == 2


def test_a_drift_of_an_async_index_is_reproduced_without_sync_end_if_later_lookups_show_it():
    found = awaited(AsyncForgets, sync="end")

    assert (found.size, found.sync, found.aflush) == (2, "auto", "end")


class OnlyTheFirst(AsyncForgets):
    """Only its first object works, in the loop that made it."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.get_running_loop()

    def new(self):
        made = type(self)()
        made.loop = self.loop
        return made

    async def apply(self, event):
        if self.loop is not asyncio.get_running_loop():
            await self.elsewhere()
        await super().apply(event)

    async def elsewhere(self):
        raise RuntimeError("bound to a different event loop")


@takes_long
def test_an_async_index_bound_to_another_loop_is_reported():
    with pytest.raises(NotReduced) as raised:
        awaited(OnlyTheFirst)
    assert (
        re.sub(r":\d+ in elsewhere", ":*", str(raised.value))
        == f"{NOT_AGAIN}; a new OnlyTheFirst failed there: apply raised RuntimeError: bound to a different event loop "
        "(test_reduced_indexes.py:*)"
    )


def test_an_async_index_that_cannot_be_rebuilt_is_reported():
    class Once(AsyncForgets):
        made = 0

        def __init__(self):
            super().__init__()
            Once.made += 1
            if Once.made > 1:
                raise OSError("port in use")

    with pytest.raises(NotReduced) as raised:
        awaited(Once)
    assert (
        str(raised.value) == "could not rebuild your index for the replay (OSError: port in use): "
        "give Once a method `new()` that returns an empty one"
    )


def test_an_async_index_that_never_answers_is_stopped_at_the_limit():
    hangs = threading.Event()

    class Hangs(OnlyTheFirst):
        async def elsewhere(self):
            hangs.set()
            await asyncio.Event().wait()

    with pytest.raises(NotReduced) as raised:
        awaited(Hangs, expired=hangs.is_set)
    assert (
        str(raised.value) == "no part of the events broke the rule again before the limit was reached; "
        "no part of the requests broke the rule again before the limit was reached"
    )
    assert no_thread_is_left()


def test_an_async_new_method_that_never_returns_is_stopped_at_the_limit():
    hangs = threading.Event()

    class NeverMade(AsyncForgets):
        async def new(self):
            hangs.set()
            await asyncio.Event().wait()

    with pytest.raises(NotReduced) as raised:
        awaited(NeverMade, expired=hangs.is_set)
    assert (
        str(raised.value) == "could not rebuild your index for the replay (it took longer than the limit): "
        "give NeverMade a method `new()` that returns an empty one"
    )


def test_an_async_index_that_blocks_its_loop_is_abandoned_at_the_limit():
    blocks, ends = threading.Event(), threading.Event()

    class Blocks(OnlyTheFirst):
        async def elsewhere(self):
            blocks.set()
            ends.wait()

    with pytest.raises(NotReduced) as raised:
        awaited(Blocks, expired=blocks.is_set)
    assert str(raised.value) == "a call of the index under test did not return when it was replayed"

    (left,) = (thread for thread in threading.enumerate() if "kvmock" in thread.name)
    assert left.daemon
    ends.set()
    left.join()  # the event lets it end


def test_an_async_index_that_cancels_its_caller_does_not_cancel_the_search():
    class Cancels(OnlyTheFirst):
        async def elsewhere(self):
            asyncio.current_task().cancel()
            await asyncio.Event().wait()

    with pytest.raises(NotReduced, match=f"^{NOT_AGAIN}$"):
        awaited(Cancels)


def test_a_system_exit_in_an_async_index_is_raised():
    class Exits(OnlyTheFirst):
        async def elsewhere(self):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        awaited(Exits)
