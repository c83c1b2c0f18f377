"""Single faults in random traffic: which rule reports them first, and at which event."""

import re
from contextlib import suppress
from random import Random

import pytest
from depth import seeds

from pytest_kvmock import (
    Cleared,
    EngineProfile,
    KvCacheEvent,
    RadixIndex,
    RadixIndexError,
    Removed,
    RouterEvent,
    RouterHarness,
    Stored,
)

BACKENDS = ("lineage", "lru")
RUNS = seeds(20)
PROFILE = EngineProfile(block_size=4, num_blocks=24, workers=2)


class World:
    """Two workers under random traffic, with a transport that a fault may change."""

    def __init__(self, backend, seed, index=None):
        self.rng = Random(f"{backend} {seed}")
        self.kv = RouterHarness(PROFILE, backend, index, name=str(seed))
        self.kv.publisher.transport = self.deliver
        self.prompts = [self.kv.prompt(self.rng.randrange(1, 5)) for _ in range(3)]
        self.fault = None  # called with each event; returns the events that arrive, or None to be called again
        self.changed_at = None  # log position of the first event that arrives with or after the fault
        self.changed = None

    def deliver(self, event):
        if self.fault is None:
            return [event]
        arriving = self.fault(event)
        if arriving is None:
            return [event]
        if self.changed is None:
            self.changed, self.changed_at = event, self.kv.events.total
        return arriving

    def step(self):
        worker = self.kv.worker(self.rng.randrange(2))
        kind = self.rng.random()
        if kind < 0.04:
            worker.clear()
            return
        prompt = self.kv.prompt(
            self.rng.randrange(1, 4), after=self.rng.choice(self.prompts), tail=self.rng.randrange(4)
        )
        if kind < 0.3:
            self.prompts[self.rng.randrange(3)] = prompt if len(prompt.tokens) < 40 else self.kv.prompt(2)
        worker.serve(prompt, output_tokens=self.rng.randrange(10))

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def run_until(self, happened, most=400):
        for _ in range(most):
            self.step()
            if happened():
                return
        pytest.fail("the traffic never came to it")

    def errors(self):
        self.kv.flush()
        return self.kv.events.errors


def first_on(kv, worker_id):
    return next(p for p in kv.events.problems if p.is_error and p.worker_id == worker_id)


def once(kind, change, skip=5):
    """Return a fault in the first event of a kind after `skip` others."""
    state = {"left": skip, "done": False}

    def fault(event):
        if state["done"] or (kind is not None and not isinstance(event.event.data, kind)):
            return None
        if state["left"]:
            state["left"] -= 1
            return None
        arriving = change(event)
        state["done"] = arriving is not None
        return arriving

    return fault


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_clean_traffic_has_no_problems(backend, seed):
    world = World(backend, seed, RadixIndex())
    world.run(40)
    verdict = world.kv.judge()
    assert tuple(verdict) == ([], [], [])
    assert world.kv.events.removed
    assert world.kv.events.problems == []
    world.kv.assert_in_sync()


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Stored, Removed, Cleared])
def test_a_lost_event_is_a_gap_at_the_next_event_of_its_worker(backend, seed, kind):
    world = World(backend, seed)
    world.fault = once(kind, lambda event: [], skip=0 if kind is Cleared else 5)
    world.run_until(lambda: world.changed is not None)
    lost = world.changed
    world.run_until(lambda: any(e.event.worker_id == lost.worker_id for e in list(world.kv.events)[world.changed_at :]))
    world.run(20)

    (error,) = world.errors()
    assert error.rule == "event_id_gap"
    after = [e for e in list(world.kv.events)[world.changed_at :] if e.event.worker_id == lost.worker_id]
    assert after[0].position == error.position
    assert error.observed.startswith(f"event {lost.event.event_id} did not arrive")


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_last_event_is_a_gap_at_the_flush(backend, seed):
    world = World(backend, seed)
    world.run(10)
    due = world.kv.publisher.next_ids.get((0, 0), 0)
    world.fault = lambda event: []
    world.kv.worker(0).serve(world.kv.prompt(1))
    assert world.kv.events.problems == []

    (error,) = world.errors()
    assert (error.rule, error.event) == ("event_id_gap", None)
    assert error.observed.startswith(f"the worker published ids up to {world.kv.publisher.next_ids[0, 0] - 1}; event")
    assert f"{due} " in error.observed
    assert {p.rule for p in error.folded} == {"engine_drift"}
    assert [error] == world.errors()  # reported once


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Stored, Removed, Cleared])
def test_a_doubled_event_is_a_gap_at_its_repeat(backend, seed, kind):
    world = World(backend, seed)
    world.fault = once(kind, lambda event: [event, event], skip=0 if kind is Cleared else 5)
    world.run_until(lambda: world.changed is not None)
    world.run(20)

    (error,) = world.errors()
    assert ("event_id_gap", world.changed_at + 1) == (error.rule, error.position)
    assert world.kv.judge().warnings == []


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_events_are_a_gap_at_the_event_that_comes_too_early(backend, seed):
    world = World(backend, seed)
    held = []

    def swap(event):
        if held:
            if event.worker_id != held[0].worker_id:
                return [event]
            world.fault = None
            return [event, held[0]]
        held.append(event)
        return []

    world.run(6)
    world.fault = swap
    world.run_until(lambda: world.fault is None)
    early = next(
        e
        for e in world.kv.events
        if e.event.worker_id == held[0].worker_id and e.event.event.event_id == held[0].event.event_id + 1
    )
    world.run(20)
    world.errors()
    first = world.kv.events.problems[0]
    assert ("event_id_gap", early.position) == (first.rule, first.position)
    gaps = [p for p in world.kv.events.problems if p.rule == "event_id_gap"]
    assert len(gaps) == 1  # the late event fills the hole


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_foreign_event_is_a_gap_at_both_workers(backend, seed):
    world = World(backend, seed)

    def relabel(event):
        due = world.kv.publisher.next_ids.get((1 - event.worker_id, 0), 0)
        if due == event.event.event_id:
            return None  # this id is due there by chance; see the next test
        return [RouterEvent(1 - event.worker_id, event.event, event.storage_tier, event.token_ids)]

    world.fault = once(None, relabel)
    world.run_until(lambda: world.changed is not None)
    sender, wrong = world.changed.worker_id, 1 - world.changed.worker_id
    world.run_until(lambda: any(e.event.worker_id == sender for e in list(world.kv.events)[world.changed_at + 1 :]))
    world.errors()
    at_wrong, at_sender = first_on(world.kv, wrong), first_on(world.kv, sender)
    assert ("event_id_gap", world.changed_at) == (at_wrong.rule, at_wrong.position)
    assert at_sender.rule == "event_id_gap"
    assert at_sender.observed.startswith(f"event {world.changed.event.event_id} did not arrive")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_foreign_event_with_the_next_id_is_missing_only_at_its_own_worker(backend):
    kv = RouterHarness(PROFILE, backend)
    prompt = kv.prompt(2)
    kv.worker(0).serve(prompt)
    kv.worker(1).serve(prompt)
    kv.publisher.transport = lambda event: [RouterEvent(0, event.event)]
    kv.worker(1).serve(kv.prompt(1, after=prompt))  # id 1, due at worker 0 too
    kv.flush()
    assert {(p.worker_id, p.rule) for p in kv.events.errors} == {(0, "engine_drift"), (1, "event_id_gap")}


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_parent_that_is_held_is_a_wrong_hash_at_its_event(backend, seed):
    world = World(backend, seed)

    def reparent(event):
        held = world.kv._judge.ledger.streams[event.worker_id, 0].tiers[event.storage_tier]
        others = [block for block in held if block not in event.event.data.block_hashes]
        if event.event.data.parent_hash is None or len(others) < 2:
            return None
        other = next(block for block in others if block != event.event.data.parent_hash)
        data = Stored(other, event.event.data.block_hashes, event.event.data.tokens_hashes)
        return [
            RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, data), event.storage_tier, event.token_ids)
        ]

    world.fault = once(Stored, reparent)
    world.run_until(lambda: world.changed is not None)
    world.run(20)
    (error,) = world.errors()
    assert ("wrong_hash", world.changed_at) == (error.rule, error.position)
    assert world.changed.event.data.block_hashes[0] == error.block


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_parent_that_is_not_held_is_parent_block_not_found_at_its_event(backend, seed):
    world = World(backend, seed)
    nobody = 0xDEAD_BEEF

    def reparent(event):
        data = Stored(nobody, event.event.data.block_hashes, event.event.data.tokens_hashes)
        return [
            RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, data), event.storage_tier, event.token_ids)
        ]

    world.fault = once(Stored, reparent)
    world.run_until(lambda: world.changed is not None)
    world.run(20)
    world.errors()
    first = world.kv.events.problems[0]
    assert ("parent_block_not_found", world.changed_at, nobody) == (first.rule, first.position, first.block)
    assert first.observed == f"block 0x{nobody:016x} was never stored"
    assert [first] == world.kv.events.errors  # the chain of hashes is wrong too, which follows from the parent
    assert [p.rule for p in first.folded] == ["wrong_hash"]


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_silent_restart_is_a_gap_at_the_next_event(backend, seed):
    world = World(backend, seed)
    world.run_until(lambda: world.kv.publisher.next_ids.get((0, 0), 0) > 3)
    world.kv.worker(0).restart()
    before = world.kv.events.total
    world.run_until(lambda: any(e.event.worker_id == 0 for e in list(world.kv.events)[before:]))
    world.run(20)
    (error,) = world.errors()
    entry = next(e for e in list(world.kv.events)[before:] if e.event.worker_id == 0)
    assert ("event_id_gap", entry.position, 0) == (error.rule, error.position, error.event_id)
    assert "ids went backwards" in error.observed


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_silent_restart_is_drift_if_a_flush_comes_before_the_next_event(backend, seed):
    world = World(backend, seed)
    world.run_until(lambda: world.kv.worker(0).manager.num_inactive_blocks > 3)
    world.kv.worker(0).restart()
    (error,) = world.errors()
    assert (error.rule, error.event) == ("engine_drift", None)


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_announced_restart_is_not_a_fault(backend, seed):
    world = World(backend, seed, RadixIndex())
    world.run(15)
    world.kv.worker(0).restart(announced=True)
    world.run(15)
    world.kv.assert_in_sync()
    assert world.kv.events.problems == []


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_late_join_is_a_gap_at_the_first_event_received(backend, seed):
    world = World(backend, seed)
    world.fault = lambda event: []
    world.run_until(lambda: world.kv.publisher.next_ids.get((0, 0), 0) > 3)
    world.fault = None
    missed = world.kv.publisher.next_ids[0, 0]
    world.run_until(lambda: any(e.event.worker_id == 0 for e in world.kv.events))
    world.run(20)
    world.errors()
    gap = first_on(world.kv, 0)
    arrived = next(e for e in world.kv.events if e.event.worker_id == 0)
    assert ("event_id_gap", arrived.position) == (gap.rule, gap.position)
    assert gap.observed == f"events 0 to {missed - 1} did not arrive"
    assert {p.rule for p in world.kv.events.errors} == {"event_id_gap"}


# ------------------------------------------------------------------------------------------------- faulty indexes


class FaultyIndex(RadixIndex):
    """Right except for one fault, once after `skip` events; `changed` is the event."""

    def __init__(self, skip=5):
        super().__init__()
        self.left = skip
        self.changed = None

    def apply(self, event):
        if self.changed is None and self.matches(event):
            if not self.left:
                self.changed = event
                return self.wrong(event)
            self.left -= 1
        return super().apply(event)


class ForgetsOneRemoved(FaultyIndex):
    def matches(self, event):
        return isinstance(event.event.data, Removed)

    def wrong(self, event):
        pass


class IgnoresCleared(ForgetsOneRemoved):
    def __init__(self):
        super().__init__(skip=0)

    def matches(self, event):
        return isinstance(event.event.data, Cleared) and self.num_blocks(event.worker_id) > 0


class RemovesFromTheWrongWorker(ForgetsOneRemoved):
    def wrong(self, event):
        with suppress(RadixIndexError):
            RadixIndex.apply(self, RouterEvent(1 - event.worker_id, event.event))


class RaisesOnce(FaultyIndex):
    def matches(self, event):
        return isinstance(event.event.data, Stored)

    def wrong(self, event):
        raise RuntimeError("no room")


class MatchesByContentAlone:
    """Knows which blocks a worker holds, and not their parents."""

    def __init__(self):
        self.held = {}
        self.local = {}

    def apply(self, event):
        data, worker = event.event.data, event.worker_id
        if isinstance(data, Stored):
            self.local.update(zip(data.block_hashes, data.tokens_hashes, strict=True))
            self.held.setdefault(worker, set()).update(data.tokens_hashes)
        elif isinstance(data, Removed):
            self.held[worker] -= {self.local[block] for block in data.block_hashes}
        else:
            self.held.pop(worker, None)

    def find_matches(self, hashes):
        scores = {}
        for worker, held in self.held.items():
            depth = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            scores[worker, 0] = depth
        return scores


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("faulty", [ForgetsOneRemoved, IgnoresCleared, RemovesFromTheWrongWorker])
def test_an_index_that_keeps_removed_blocks_drifts_at_their_event(backend, seed, faulty):
    index = faulty()
    world = World(backend, seed, index)
    world.run_until(lambda: index.changed is not None)
    changed_at = next(e.position for e in world.kv.events if e.event is index.changed)
    world.run(20)
    world.kv.judge()
    first = world.kv.events.errors[0]
    assert ("index_drift", changed_at) == (first.rule, first.position)
    assert first.block in (
        index.changed.event.data.block_hashes
        if not isinstance(index.changed.event.data, Cleared)
        else world.kv.events.stored_blocks
    )


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_that_raises_once_fails_at_that_event_and_its_drift_follows_from_it(backend, seed):
    index = RaisesOnce()
    world = World(backend, seed, index)
    world.run_until(lambda: index.changed is not None)
    changed_at = next(e.position for e in world.kv.events if e.event is index.changed)
    errors = world.kv.events.errors
    assert [("index_failure", changed_at)] == [(p.rule, p.position) for p in errors]
    assert re.fullmatch(r"apply raised RuntimeError: no room \(test_faults\.py:\d+ in wrong\)", errors[0].observed)
    assert "index_drift" in {p.rule for p in errors[0].folded}
    assert {"index_drift", "index_failure"} >= {p.rule for p in errors[0].folded}  # it may lack a later parent


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_that_matches_by_content_only_drifts_at_the_first_event_of_two_blocks(backend, seed):
    world = World(backend, seed, MatchesByContentAlone())
    world.run_until(lambda: any(len(e.data.block_hashes) > 1 for e in world.kv.events.stored))
    first = world.kv.events.errors[0]
    telling = next(e for e in world.kv.events if len(e.event.event.data.block_hashes) > 1)
    assert ("index_drift", telling.position) == (first.rule, first.position)


# ---------------------------------------------------------------------------------------------- a second fault


def with_id(event, event_id):
    return RouterEvent(event.worker_id, KvCacheEvent(event_id, event.event.data), event.storage_tier, event.token_ids)


FIRST_FAULTS = {
    "a lost Stored": (Stored, lambda event: []),
    "a lost Removed": (Removed, lambda event: []),
    "an id far ahead": (Stored, lambda event: [with_id(event, event.event.event_id + 50)]),
    "an id gone back": (Stored, lambda event: [with_id(event, 0)] if event.event.event_id else None),
}


def last_removed(named):
    return [e for e in named if e.kind == "removed"][-1].event.event.data.block_hashes[0]


def removed_again(world, worker_id, named):
    """Publish a Removed of a block that was removed since the first fault."""
    gone = last_removed(named)
    world.kv.apply([Removed((gone,))], worker_id=worker_id)
    return "block_not_found", gone


def stored_again_otherwise(world, worker_id, named):
    """Publish a second local hash for a held block that was stored since the first fault."""
    held = world.kv._judge.ledger.streams[worker_id, 0].tiers["device"]
    stored = [block for e in named if e.kind == "stored" for block in e.event.event.data.block_hashes]
    block = next(block for block in reversed(stored) if block in held)
    world.kv.apply([Stored(None, (block,), (1,))], worker_id=worker_id)
    return "invalid_block", block


def under_a_removed_parent(world, worker_id, named):
    """Publish a Stored under a block that was removed since the first fault."""
    gone = last_removed(named)
    world.kv.apply([Stored(gone, (77,), (7,))], worker_id=worker_id)
    return "parent_block_not_found", gone


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first_fault", FIRST_FAULTS)
@pytest.mark.parametrize("second_fault", [removed_again, stored_again_otherwise, under_a_removed_parent])
def test_a_second_fault_is_separate_if_its_blocks_were_named_since_the_first(backend, seed, first_fault, second_fault):
    world = World(backend, seed)
    world.fault = once(*FIRST_FAULTS[first_fault])
    world.run_until(lambda: world.changed is not None)
    changed, since = world.changed.worker_id, world.changed_at
    world.fault = None

    def named():
        return [e for e in list(world.kv.events)[since + 1 :] if e.event.worker_id == changed]

    world.run_until(lambda: {"stored", "removed"} <= {e.kind for e in named()} and named()[-1].kind != "cleared")
    (first,) = [p for p in world.kv.events.errors if p.worker_id == changed]
    assert first.rule == "event_id_gap"

    rule, block = second_fault(world, changed, named())
    second = world.kv.events.errors[-1]
    assert (rule, block, None) == (second.rule, second.block, second.cause)


def test_a_second_fault_with_a_block_that_was_not_named_since_is_listed_under_the_first():
    kv = RouterHarness(PROFILE, "lineage")
    kv.apply([Stored(None, (1, 2), (1, 2))], worker_id=7)
    kv.apply([KvCacheEvent(5, Stored(None, (3,), (3,)))], worker_id=7)
    kv.apply([Removed((99,))], worker_id=7)
    (gap,) = kv.events.errors
    assert (gap.rule, [p.rule for p in gap.folded]) == ("event_id_gap", ["block_not_found"])
