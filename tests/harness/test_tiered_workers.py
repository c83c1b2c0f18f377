"""Workers of a harness with host memory below the device: the verdict, and what ends transfers under way."""

import math

import pytest
from depth import examples, whole_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tiers import PlainTiers

from pytest_kvmock import (
    EngineProfile,
    KvCacheEvent,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.engines import RequestError, Tiers, WouldWait
from pytest_kvmock.engines.base.driver import SlotsLost
from pytest_kvmock.fleets import read_mooncake, synthetic_trace

BACKENDS = ["lineage", "lru", "multi_lru"]
DEVICE, HOST, DISK, EXTERNAL = StorageTier
SIZE = 4
A, B, C = (list(range(start, start + 24)) for start in (0, 100, 200))


def harness(host=64, num_blocks=8, backend="lineage", index=None, *, workers=1, chunk=None, **tiers):
    """Return a harness whose blocks take a millisecond each when the link is otherwise idle."""
    tiers = {"host": host, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}
    profile = EngineProfile(block_size=SIZE, num_blocks=num_blocks, workers=workers, chunk=chunk, tiers=tiers)
    return RouterHarness(profile, backend, index)


def blocks(tokens):
    """Return prompts of one block each."""
    return [[token] * SIZE for token in tokens]


def by_hand(*numbers, tier, worker_id=0, event_id):
    return RouterEvent(worker_id, KvCacheEvent(event_id, Stored(None, numbers, numbers)), tier)


def test_a_worker_offloads_and_overlap_shows_both_tiers():
    with harness(index=PlainTiers()) as kv:
        worker = kv.worker(0)
        worker.serve(A)
        worker.serve(B)
        assert worker.now == 4.0
        assert kv.overlap(A, tier=None) == {DEVICE: {0: 2}, HOST: {0: 4}}
        with worker.prefill(A) as request:
            assert (request.cached_tokens, request.onboarded_tokens) == (24, 16)
        kv.assert_in_sync()


def test_a_host_over_its_capacity_is_reported():
    kv = harness(host=2)
    kv.apply(by_hand(1, 2, 3, tier=HOST, event_id=0))
    (problem, *_) = kv.judge().errors
    assert problem.rule == "over_capacity"
    assert problem.observed == "according to the events, 3 blocks are held in host_pinned after event 0"
    assert problem.expected == "the engine has 2 blocks there; what it evicts is published as Removed"


def test_a_published_block_that_the_host_does_not_hold_is_drift():
    kv = harness()
    kv.worker(0).serve(A)
    kv.apply(by_hand(1, tier=HOST, event_id=kv.by_hand.next_id(0, 0)))
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.storage_tier) == ("engine_drift", HOST)
    assert problem.observed.startswith("the engine does not hold block 1 in host_pinned; ")


def test_a_block_on_the_host_without_a_stored_is_drift():
    kv = harness()
    worker = kv.worker(0)
    worker.serve(A)
    worker.serve(B)
    kv.flush()
    # As if the engine had copied one more block without publishing it.
    host = worker.manager.offload._host
    host.register(host.allocate(1)[0], [77], [77 << 64])
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.storage_tier) == ("engine_drift", HOST)
    assert problem.observed.startswith("the engine holds block 77 in host_pinned; ")


# ------------------------------------------------------------------------------------ a block that was sent twice


def sent_twice(kv):
    """Let the device evict A again before its first copy has arrived: the second arrives without a Stored."""
    worker, (x, a, c, d, e) = kv.worker(0), blocks([1, 2, 3, 4, 5])
    worker.serve(x)
    worker.serve(a)
    for prompt in (c, d):  # x is being copied, a waits
        with pytest.raises(WouldWait):
            worker.prefill(prompt, wait=False)
    worker.tick(1)
    worker.prefill(a, wait=False).finish()
    with pytest.raises(WouldWait):
        worker.prefill(e, wait=False)
    worker.tick(2)
    worker.tick(3)
    return worker, a


def test_a_block_evicted_again_during_its_copy_may_be_on_the_host_without_a_stored():
    kv = harness(host=1, num_blocks=2)
    worker, a = sent_twice(kv)
    (block,) = worker.manager.resident(HOST)
    assert block in worker.unpublished(HOST)
    assert (worker.cached_tokens(a, HOST), kv.overlap(a, HOST)) == (4, {})
    kv.assert_in_sync()
    assert kv.judge().errors == []


def test_the_removed_of_a_block_that_was_copied_twice_is_no_error():
    kv = harness(host=1, num_blocks=2)
    worker, a = sent_twice(kv)
    (block,) = worker.manager.resident(HOST)
    assert worker.prefill(a).onboarded_tokens == 4
    worker.requests[0].finish()
    for prompt in blocks([6, 7, 8, 9]):
        worker.serve(prompt)
    kv.assert_in_sync()
    events = [entry.event for entry in kv.events if entry.event.storage_tier is HOST]
    of_block = [type(e.event.data) for e in events if block in e.event.data.block_hashes]
    assert [Stored, Removed, Removed] == of_block[:3]
    assert kv.judge().errors == []


def test_a_removed_without_a_stored_of_another_block_is_an_error():
    kv = harness(host=1, num_blocks=2)
    worker, _ = sent_twice(kv)
    (block,) = worker.manager.resident(HOST)
    event = KvCacheEvent(kv.by_hand.next_id(0, 0), Removed((block ^ 1,)))
    kv.apply(RouterEvent(0, event, HOST))
    assert [problem.rule for problem in kv.judge().errors] == ["block_not_found"]


# --------------------------------------------------------------------------------------- what ends a transfer


def under_way(kv):
    """Return a worker with blocks on both tiers and transfers in both directions."""
    worker = kv.worker(0)
    worker.serve(A)
    worker.serve(B)
    worker.tick(50)
    with pytest.raises(WouldWait) as error:
        worker.prefill(A, wait=False)
    worker.tick(error.value.deadline)
    with pytest.raises(WouldWait, match="on their way back"):
        worker.prefill(A, wait=False)
    with pytest.raises(WouldWait, match="on their way to the host"):
        worker.prefill(C, wait=False)
    return worker


ENDS = {
    "clear": lambda kv, worker: worker.clear(),
    "restart": lambda kv, worker: worker.restart(announced=True),
    "remove_worker": lambda kv, worker: kv.remove_worker(0),
}


@pytest.mark.parametrize("index", [None, PlainTiers])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_restart_or_removal_cancels_transfers_and_empties_the_host(end, index):
    kv = harness(index=index and index())
    worker = under_way(kv)
    end(kv, worker)
    manager = worker.manager
    assert (manager.offload_deadline(), manager.num_outside, list(manager.resident(HOST))) == (None, 0, [])
    assert (kv.overlap(A, tier=None), kv.overlap(B, tier=None)) == ({}, {})
    assert [len(kv.inside.streams[0, 0].held(tier)) for tier in (DEVICE, HOST)] == [0, 0]
    total = kv.events.total
    worker.tick(worker.now + 1000)
    assert total == kv.events.total
    kv.worker(0).serve(A)
    kv.assert_in_sync()
    assert kv.judge().errors == []


def test_the_old_manager_of_a_restarted_worker_publishes_nothing():
    kv = harness()
    worker = under_way(kv)
    old = worker.manager
    worker.restart(announced=True)
    total = kv.events.total
    old.tick(1000)
    assert (total, []) == (kv.events.total, list(old.resident(HOST)))


def test_a_removed_worker_keeps_the_blocks_of_its_device():
    kv = harness()
    worker = under_way(kv)
    before = set(worker.manager.resident())
    kv.remove_worker(0)
    assert before == set(worker.manager.resident())


def test_a_worker_whose_clear_fails_keeps_its_transfers():
    kv = harness()
    worker = under_way(kv)
    with worker.prefill(A):
        before = worker.manager.resident(HOST), worker.manager.offload_deadline()
        assert not worker.clear()
        assert before == (worker.manager.resident(HOST), worker.manager.offload_deadline())


# --------------------------------------------------------------------------------------------- tiers and backends


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("backend", ["hash_cache", "vllm_0_19", "mocker_sglang_1_6"])
def test_backends_without_tiers_refuse_them_in_one_line(backend, workers):
    with pytest.raises(ValueError) as error:
        harness(backend=backend, workers=workers)
    assert (
        str(error.value)
        == f"backend {backend!r} takes no tiers; lineage, lru, multi_lru, vllm, sglang and some hybrid models do"
    )


def test_a_worker_of_a_backend_without_tiers_is_refused_and_not_made():
    kv = harness()
    with pytest.raises(ValueError, match="backend 'hash_cache' takes no tiers"):
        kv.worker(1, backend="hash_cache")
    assert list(kv.workers) == [0]


def test_each_rank_has_its_own_host():
    kv = RouterHarness(EngineProfile(block_size=SIZE, num_blocks=8, dp_size=2, tiers={"host": 64}))
    for rank in (0, 1):
        kv.worker(0, dp_rank=rank).serve(A)
    kv.worker(0, dp_rank=1).serve(B)
    assert kv.overlap(A, tier=None)[HOST] == {(0, 1): 4}
    kv.assert_in_sync()


def test_slots_lost_to_pinned_blocks_of_a_swap_in_raise_slots_lost():
    kv = harness(host=1, num_blocks=6)
    worker = kv.worker(0)
    worker.serve(A[:4])
    worker.serve(B)
    with pytest.raises(SlotsLost, match="while blocks that come back to the device are pinned there, and lost it"):
        worker.serve(A[:4])


def test_without_prefix_caching_nothing_is_published_in_any_tier():
    profile = EngineProfile(block_size=SIZE, num_blocks=8, prefix_caching=False, tiers={"host": 64})
    with RouterHarness(profile) as kv:
        for prompt in (A, B, A):
            served = kv.worker(0).serve(prompt)
            assert served.cached_tokens == 0
        assert (kv.events.total, kv.overlap(A, tier=None)) == (0, {})
        assert kv.worker(0).cached_tokens(A, tier="host") == 0
        assert kv.worker(0).manager.resident(HOST)  # evicted blocks are copied in any case
        assert kv.worker(0).now > 0


@pytest.mark.parametrize("tier", [DISK, EXTERNAL])
def test_sinks_and_hand_made_events_can_fill_further_tiers(tier):
    with harness() as kv:
        kv.worker(0).serve(A[:8])
        sink = kv.make_sink(tier_blocks={tier: 4})
        held = set()
        sink.compare(lambda: held, storage_tier=tier)
        sink(Stored(None, (1, 2), (11, 12)), tier)
        held.update((1, 2))
        kv.apply(by_hand(21, 22, tier=tier, worker_id=7, event_id=0))
        assert {tier: {sink.worker_id: 2}} == kv.overlap(Prompt(hashes=[11, 12]), tier=None)
        assert kv.overlap(Prompt(hashes=[21, 22]), tier) == {7: 2}
        sink(Removed((2,)), tier)
        held.discard(2)
        kv.assert_in_sync()


def test_lru_evicts_parents_first_after_a_swap_in_which_is_an_engines_own_warning():
    """A dropped pin frees blocks head first, as in the original."""
    kv = harness(num_blocks=4, backend="lru")
    worker = kv.worker(0)
    worker.serve(A[:12])
    worker.serve(B[:8])
    worker.tick(10)
    for _ in range(2):
        with pytest.raises(WouldWait) as error:
            worker.prefill(A[:12], wait=False)
        worker.tick(error.value.deadline)
    for prompt in blocks([1, 2, 3, 4]):
        worker.serve(prompt)
    (warning, *_) = kv.judge().warnings
    assert (warning.rule, kv.inside.is_engines_own(warning)) == ("orphaned_child", True)


# ----------------------------------------------------------------------------------------------------- bad input

NO_TIME = "a time must be a finite number of at least 0 (ms), got {}"
KNOWN = "device, host_pinned, disk, external, host, g1, g2, g3, g4"
BAD = {
    "a tick that goes backwards": (
        lambda kv, worker: worker.tick(49.5),
        "tick: time does not go backwards; it is 54.0 ms, got 49.5",
    ),
    "a tick of its manager that goes backwards": (
        lambda kv, worker: worker.manager.tick(49.5),
        "tick: time does not go backwards; it is 54.0 ms, got 49.5",
    ),
    "an unknown tier of cached_tokens": (
        lambda kv, worker: worker.cached_tokens(A, tier="hots"),
        f"unknown tier 'hots'; did you mean 'host'? known: {KNOWN}",
    ),
    "an unknown tier of overlap": (lambda kv, worker: kv.overlap(A, tier="g5"), f"unknown tier 'g5'; known: {KNOWN}"),
    "an unknown tier of a sink": (
        lambda kv, worker: kv.make_sink(tier_blocks={"hots": 4}),
        f"make_kv_sink: tier_blocks: unknown tier 'hots'; did you mean 'host'? known: {KNOWN}",
    ),
    "a host of no blocks": (
        lambda kv, worker: kv.profile.replace(tiers={"host": 0}),
        "tiers: host must be an integer of at least 1 (blocks), got 0",
    ),
    "a batch that does not fit": (
        lambda kv, worker: kv.profile.replace(tiers={"host": 8, "batch": 3}),
        "tiers: batch must be at most 2 for a host of 8 blocks, got 3: ",
    ),
    "negative bytes": (
        lambda kv, worker: kv.profile.replace(tiers={"host": 8, "bytes_per_token": -1}),
        "tiers: bytes_per_token must be an integer of at least 0, got -1",
    ),
    **{
        f"{name} at {now}": (lambda kv, worker, call=call, now=now: call(worker, now), NO_TIME.format(now))
        for now in (math.nan, math.inf, -1)
        for name, call in (
            ("a tick of a worker", lambda worker, now: worker.tick(now)),
            ("a tick of a manager", lambda worker, now: worker.manager.tick(now)),
            ("a swap-in", lambda worker, now: worker.manager.swap_in([], now)),
        )
    },
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_error_and_changes_nothing(call, message):
    kv = harness()
    worker = under_way(kv)

    def state():
        manager = worker.manager
        held = [sorted(manager.resident(tier)) for tier in (DEVICE, HOST)]
        return kv.events.total, worker.now, manager.offload_deadline(), manager.num_outside, held

    before = state()
    with pytest.raises(ValueError) as error:
        call(kv, worker)
    assert str(error.value).startswith(message)
    assert before == state()
    kv.assert_in_sync()


# ------------------------------------------------------------------------------------------------ random traffic


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["prefill"] * 4
            + ["prefill_or_not"] * 4
            + ["finish"] * 4
            + ["decode", "preempt", "resume", "tick", "tick", "clear", "restart", "remove_worker"]
            + ["manager_tick", "manager_clear"]
        ),
        st.integers(0, 1),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    max_size=60,
)
TIERS = st.builds(
    lambda host, gbps: {"host": host, "gbps": gbps}, st.sampled_from([1, 2, 4, 9, 40]), st.sampled_from([0, 1.0, 3.0])
)


class Seen:
    """Blocks of one worker according to its events, and the blocks that are between device and host."""

    def __init__(self, kv, worker):
        self.kv, self.worker = kv, worker
        self.forget()

    def forget(self):
        self.at = self.kv.events.total
        self.held = {DEVICE: set(), HOST: set()}
        self.left = set()

    def look(self):
        entries = [entry.event for entry in self.kv.events][self.at :]
        self.at = self.kv.events.total
        for event in entries:
            data, tier = event.event.data, event.storage_tier
            if event.worker_id != self.worker.worker_id:
                continue
            if isinstance(data, Stored):
                self.held[tier].update(data.block_hashes)
            elif isinstance(data, Removed):
                self.held[tier].difference_update(data.block_hashes)
                change = self.left.update if tier is DEVICE else self.left.difference_update
                change(data.block_hashes)

    def check(self):
        manager, silent = self.worker.manager, self.worker.unpublished(HOST)
        assert self.held[DEVICE] == set(manager.resident())
        assert self.held[HOST] == {block for block in manager.resident(HOST) if block not in silent}
        assert manager.offload.lost_blocks == manager.offload.lost_to_pins  # a batch fits by default
        assert len(manager.active_blocks) + manager.num_outside <= manager.num_active_blocks <= manager.num_blocks

    def check_end(self):
        manager = self.worker.manager
        while (deadline := manager.offload_deadline()) is not None:
            self.worker.tick(max(deadline, self.worker.now))
        self.look()
        self.check()
        lost = manager.offload.lost_blocks
        assert len(self.left - set(manager.resident(HOST))) <= lost
        assert lost or (manager.num_active_blocks, manager.num_outside) == (0, 0)


def step(kv, worker, what, which, length):
    """Do one step; return whether the worker starts again."""
    if what in ("prefill", "prefill_or_not"):
        request = worker.prefill([which] * length, wait=what == "prefill")
        assert 0 <= request.onboarded_tokens <= request.cached_tokens
    elif what == "tick":
        worker.tick(worker.now + which)
    elif what == "manager_tick":
        worker.manager.tick(worker.now + which)
    elif what == "clear":
        return worker.clear()
    elif what == "manager_clear":
        return worker.manager.clear()
    elif what == "restart":
        worker.restart(announced=True)
        return True
    elif what == "remove_worker":
        kv.remove_worker(worker.worker_id)
        return True
    elif worker.requests:
        request = worker.requests[which % len(worker.requests)]
        request.decode(length % 9) if what == "decode" else getattr(request, what)()
    return False


def play(kv, steps, *, looks=True):
    seen = {}
    for what, number, which, length in steps:
        worker = kv.worker(number)
        if number not in seen or seen[number].worker is not worker:
            seen[number] = Seen(kv, worker)
        try:
            anew = step(kv, worker, what, which, length)
        except (OutOfBlocks, WouldWait, RequestError):
            anew = False
        except SlotsLost:
            assert worker.manager.offload.lost_to_pins
            worker.restart(announced=True)
            anew = True
        if anew:
            seen[number].forget()
        elif looks:
            seen[number].look()
            seen[number].check()
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@given(STEPS, TIERS, st.integers(4, 12), st.sampled_from([None, 3, 8]))
def test_random_traffic_over_a_host_loses_no_slot_or_block_and_ends_in_sync(backend, steps, tiers, num_blocks, chunk):
    kv = harness(backend=backend, num_blocks=num_blocks, workers=2, chunk=chunk, index=PlainTiers(), **tiers)
    seen = play(kv, steps)
    for number, each in seen.items():
        if kv.workers.get(number) is each.worker:
            for request in list(each.worker.requests):
                request.finish()
            each.check_end()
    kv.assert_in_sync()
    verdict = kv.judge()
    assert verdict.errors == []
    assert [problem for problem in verdict.warnings if not kv.inside.is_engines_own(problem)] == []


@pytest.mark.parametrize("backend", BACKENDS)
@given(STEPS, TIERS, st.integers(4, 12))
def test_with_random_faults_all_errors_are_attributed_to_them(backend, steps, tiers, num_blocks):
    kv = harness(backend=backend, num_blocks=num_blocks, workers=2, **tiers)
    kv.faults.at_random({"lose": 0.05, "double": 0.05})
    play(kv, steps, looks=False)
    assert [problem for problem in kv.judge().errors if problem.fault is None] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_ends_in_sync_and_reuses_more_with_a_host_than_without(backend):
    reused = []
    for tiers in (None, Tiers(host=400)):
        profile = EngineProfile(block_size=512, num_blocks=150, tiers=tiers)
        with RouterHarness(profile, backend, sync="end") as kv:
            worker, count = kv.worker(0), 0
            for request in synthetic_trace(150, seed=1):
                try:
                    with worker.prefill(request.prompt()) as admitted:
                        count += admitted.cached_tokens
                except OutOfBlocks:
                    continue
            kv.assert_in_sync()
            reused.append(count)
    without, with_host = reused
    assert without < with_host


@whole_trace
def test_a_published_trace_ends_in_sync(traces_dir):
    """The same requests and the same reused blocks as of a worker alone (`test_tiered_worker.py`)."""
    profile = EngineProfile(block_size=512, num_blocks=1000, tiers={"host": 4000})
    with RouterHarness(profile, sync="end") as kv:
        worker, blocks = kv.worker(0), 0
        for request in list(read_mooncake(traces_dir / "mooncake_conversation_trace.jsonl"))[:700]:
            with worker.prefill(request.prompt()) as admitted:
                blocks += admitted.cached_tokens // 512
        kv.assert_in_sync()
    assert blocks == 1896


@settings(max_examples=examples(60))
@given(
    num_blocks=st.integers(2, 10),
    backend=st.sampled_from(["lineage", "lru", "multi_lru"]),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10)), min_size=3, max_size=25),
)
def test_a_host_of_twice_the_device_loses_no_slots(num_blocks, backend, prompts):
    """This is what the message of lost slots recommends."""
    kv = harness(host=2 * num_blocks, num_blocks=num_blocks, backend=backend)
    worker = kv.worker(0)
    for root, blocks in prompts:
        worker.serve(range(100 * root, 100 * root + 4 * min(blocks, num_blocks)))
    worker.tick(worker.now + 1000.0)
    assert (worker.manager.num_active_blocks, worker.manager.num_outside) == (0, 0)
