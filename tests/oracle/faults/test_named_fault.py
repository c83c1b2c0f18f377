"""Which of several faults on one stream a problem names."""

import pytest
from fault_worlds import PROFILE
from surviving_indexes import AsksTheWorker, TakesWhatComes

from pytest_kvmock import Cleared, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.harness import Recovery


def chain(*numbers, parent=None):
    return Stored(parent, numbers, numbers)


class World:
    """A sink with room for two blocks, and faults in what it publishes."""

    def __init__(self, index=None, num_blocks=2, **options):
        self.kv = RouterHarness(backend=None, index=index, sync="every", **options)
        self.sink = self.kv.make_sink(num_blocks=num_blocks)

    def publish(self, *events):
        for event in events:
            self.sink(event)

    def inject(self, kind, *events, **how):
        getattr(self.kv.faults, kind)(len(events), **how)
        self.publish(*events)

    def fault_of(self, rule, block=None):
        """Return the fault that the last breach of a rule names."""
        self.kv.flush()
        found = [p for p in self.kv.events.problems if p.rule == rule and (block is None or p.blocks[:1] == (block,))]
        return str(found[-1].fault).removesuffix(f" of worker {self.sink.worker_id}")

    def overflow(self, held=2):
        """Let the sink hold more blocks than its capacity, which names no block, after a fault that does not matter."""
        self.inject("double", chain(held))
        self.publish(chain(90), chain(91))


# -------------------------------------------------------------------------------------- the block, and what it is on


def test_a_problem_names_the_fault_of_its_block_and_not_the_last_fault():
    world = World()
    world.inject("lose", chain(1))
    world.inject("lose", chain(5))
    world.publish(chain(2, parent=1))
    assert world.fault_of("parent_block_not_found", 1) == "lose, event 0"


def test_a_problem_names_the_latest_fault_that_touched_its_block():
    world = World()
    world.inject("lose", chain(1))
    world.publish(Removed((1,)))
    world.inject("lose", chain(1))
    world.inject("lose", chain(5))
    world.publish(chain(2, parent=1))
    assert world.fault_of("parent_block_not_found", 1) == "lose, event 2"


def test_a_fault_of_an_ancestor_counts_if_it_is_later_than_the_blocks_own():
    world = World()
    world.publish(chain(1))
    world.inject("lose", chain(2, parent=1))
    world.inject("lose", Removed((1,)))
    world.inject("lose", chain(5))
    world.publish(chain(3, parent=2))
    assert world.fault_of("parent_block_not_found", 2) == "lose, event 2"


def test_a_fault_of_the_block_counts_if_it_is_later_than_its_ancestors():
    world = World()
    world.inject("lose", chain(1))
    world.inject("lose", chain(2, parent=1))
    world.inject("lose", chain(5))
    world.publish(chain(3, parent=2))
    assert world.fault_of("parent_block_not_found", 2) == "lose, event 1"


def test_a_fault_of_a_child_does_not_touch_its_parent():
    world = World()
    world.inject("lose", chain(1))
    world.inject("lose", chain(2, parent=1))
    world.publish(chain(3, parent=1))
    assert world.fault_of("parent_block_not_found", 1) == "lose, event 0"


def test_an_index_failure_names_the_fault_of_a_lost_ancestor():
    world = World(RadixIndex(), num_blocks=None, survive=["lose"])
    world.publish(chain(1))
    world.inject("lose", chain(2, parent=1))
    world.publish(chain(3, parent=2))
    world.inject("lose", chain(9))
    world.publish(chain(4, parent=3))
    failures = [p for p in world.kv.events.problems if p.rule == "index_failure"]
    assert [str(p.fault)[:13] for p in failures] == ["lose, event 1"] * 2


def test_a_drift_names_the_fault_that_moved_its_block_under_another_parent():
    """The child was stored under a wrong parent, so its chain names that fault."""
    world = World(TakesWhatComes(), num_blocks=None, survive=["lose", "wrong_parent"])
    world.publish(chain(1))
    world.inject("wrong_parent", chain(2, parent=1))
    world.inject("lose", chain(9))
    world.publish(chain(3, parent=2))
    world.kv.judge()
    assert world.fault_of("index_drift", 2) == "wrong_parent, event 1"


def test_a_cleared_that_was_never_published_touched_the_blocks_held_then():
    world = World(num_blocks=None)
    world.publish(chain(1))
    world.inject("lose", chain(2, parent=1))
    world.kv.faults.clear(world.sink.worker_id)
    world.inject("double", chain(5))
    world.publish(chain(3, parent=1))
    assert world.fault_of("parent_block_not_found", 1) == "clear, event 2"


def test_a_restart_touched_the_blocks_held_at_that_time():
    kv = RouterHarness(PROFILE)
    worker = kv.worker(0)
    kv.faults.lose()
    worker.serve(kv.prompt(1))
    worker.serve(kv.prompt(2))
    kv.faults.restart()
    kv.faults.double()
    for _ in range(2):
        worker.serve(kv.prompt(1))
    kv.judge()
    assert {str(p.fault) for p in kv.events.problems if p.rule == "engine_drift"} == {"restart of worker 0"}


# --------------------------------------------------------------------------------- the first that is not recovered


class RaisesAt50(TakesWhatComes):
    """Ignores late and lost events, and raises at an event that no fault has touched."""

    def __init__(self):
        super().__init__()
        self.last = -1

    def apply(self, event):
        if 50 in getattr(event.event.data, "block_hashes", ()):
            raise OSError("disk full")
        if event.event.event_id > self.last:
            self.last = event.event.event_id
            super().apply(event)

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


def untouched(recovery=None):
    kinds = ["lose", "double", "delay", "reorder", "clear"]
    return World(RaisesAt50(), num_blocks=None, survive=kinds, recovery=recovery)


def raised_for(world):
    """Inject one more fault, let the index raise at an untouched event, and return the fault that is named."""
    world.inject("double", chain(60))
    world.publish(chain(50))
    return world.fault_of("index_failure")


def test_without_a_block_the_first_fault_without_recovery_is_named():
    world = untouched()
    world.publish(chain(1), chain(2))
    world.inject("lose", Removed((1,)))
    world.inject("lose", Removed((2,)))
    assert raised_for(world) == "lose, event 2"


@pytest.mark.parametrize("kind", ["delay", "reorder"])
def test_an_event_that_came_late_is_recovered(kind):
    world = untouched()
    world.publish(chain(1), chain(2))
    world.inject(kind, Removed((1,)))
    world.publish(chain(3), chain(4))
    world.inject("lose", Removed((2,)))
    assert raised_for(world) == "lose, event 5"


def test_an_event_that_is_still_held_back_is_not_recovered():
    world = untouched()
    world.publish(chain(1), chain(2))
    world.inject("delay", Removed((1,)), by=9)
    world.inject("lose", Removed((2,)))
    assert raised_for(world) == "delay, event 2"


def test_faults_before_an_arrived_cleared_are_recovered():
    world = World(num_blocks=None)
    world.publish(chain(1), chain(2))
    world.inject("lose", Removed((1,)))
    world.kv.faults.clear(world.sink.worker_id)
    world.inject("double", chain(3))
    cleared, backwards, repeat = (p for p in world.kv.events.problems if p.rule == "event_id_gap")
    assert [p.fault.kind for p in (cleared, backwards, repeat)] == ["lose", "clear", "double"]


def test_faults_after_a_late_cleared_are_not_recovered():
    world = untouched()
    world.publish(chain(1))
    world.inject("delay", Cleared(), by=2)
    world.publish(chain(2))
    world.inject("lose", chain(3))
    world.inject("lose", chain(4))
    assert raised_for(world) == "lose, event 3"


def test_events_of_a_recovery_are_recovered():
    recovery = Recovery()
    world = untouched(recovery)
    world.publish(chain(1), chain(2))
    world.inject("lose", Removed((1,)))
    recovery(world.sink.worker_id, 2)
    world.inject("lose", Removed((2,)))
    assert raised_for(world) == "lose, event 3"


def test_an_id_before_the_requested_ones_is_not_recovered():
    recovery = Recovery()
    world = untouched(recovery)
    world.publish(chain(1), chain(2))
    world.inject("lose", Removed((1,)))
    world.inject("lose", Removed((2,)))
    recovery(world.sink.worker_id, 3)
    world.inject("lose", chain(3))
    assert raised_for(world) == "lose, event 2"


def test_if_all_faults_are_recovered_the_last_one_is_named():
    recovery = Recovery()
    world = untouched(recovery)
    world.publish(chain(1), chain(2))
    world.inject("lose", Removed((1,)))
    world.inject("lose", Removed((2,)))
    recovery(world.sink.worker_id, 0)
    world.publish(chain(50))
    assert world.fault_of("index_failure") == "lose, event 3"


def test_ids_that_go_backwards_name_the_restart_and_not_a_later_fault():
    kv = RouterHarness(PROFILE)
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    kv.faults.restart()
    kv.faults.double()
    worker.serve(kv.prompt(1))
    backwards, repeat = (p for p in kv.events.problems if p.rule == "event_id_gap")
    assert (backwards.fault.kind, repeat.fault.kind) == ("restart", "double")


def test_ids_that_go_backwards_name_the_restart_also_if_the_first_id_is_lost():
    kv = RouterHarness(PROFILE)
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    worker.serve(kv.prompt(1))
    kv.faults.restart()
    kv.faults.lose()
    worker.serve(kv.prompt(2))
    worker.serve(kv.prompt(2))
    (gap,) = (p for p in kv.events.problems if p.rule == "event_id_gap")
    assert gap.fault.kind == "restart"


def test_a_lost_first_event_without_a_gap_is_no_part_of_a_later_gap():
    world = World()
    world.inject("lose", chain(1))
    world.publish(chain(2))
    world.inject("lose", Removed((2,)))
    world.publish(chain(3))
    assert world.fault_of("event_id_gap") == "lose, event 2"


def test_over_capacity_names_the_fault_that_caused_it():
    world = World()
    world.inject("double", chain(1))
    world.inject("self_parent", chain(2, parent=1))
    world.inject("lose", Removed((1,)))
    world.overflow()
    assert world.fault_of("over_capacity") == "lose, event 2"


def test_events_missing_before_a_recovery_make_no_gap_after_it():
    recovery = Recovery()
    world = World(recovery=recovery)
    world.publish(chain(1))
    world.inject("lose", chain(2))
    recovery(world.sink.worker_id, 1)
    world.publish(chain(3))
    world.inject("lose", Removed((1,)))
    world.publish(chain(4))
    assert world.fault_of("event_id_gap") == "lose, event 3"


def test_an_announced_restart_ends_all_faults():
    kv = RouterHarness(PROFILE)
    kv.faults.lose()
    kv.apply([chain(1)])
    kv.worker(0).restart(announced=True)
    kv.apply([chain(1)])
    kv.faults.lose()
    kv.apply([chain(2), chain(3)])
    (gap,) = (p for p in kv.events.problems if p.rule == "event_id_gap")
    assert str(gap.fault) == "lose, event 1 of worker 0"


def test_a_late_event_from_before_a_restart_is_attributed_to_the_delay():
    kv = RouterHarness(PROFILE)
    worker = kv.worker(0)
    worker.serve(kv.prompt(1))
    kv.faults.delay(by=1)
    worker.serve(kv.prompt(2))
    worker.restart(announced=True)
    worker.serve(kv.prompt(1))
    kv.judge()
    assert {p.fault.kind for p in kv.events.problems} == {"delay"}
    assert "engine_drift" in {p.rule for p in kv.events.problems}


# ------------------------------------------------------------------------------------- an index that must survive


def test_a_drift_names_the_first_fault_that_the_index_has_not_recovered_from():
    world = World(TakesWhatComes(), num_blocks=None, survive=["lose", "double"])
    world.publish(chain(1, 2))
    world.inject("lose", Cleared())
    world.inject("double", chain(7))
    world.inject("lose", chain(8))
    world.publish(chain(9))
    world.kv.judge()
    drifts = {p.blocks: str(p.fault) for p in world.kv.events.problems if p.rule == "index_drift"}
    worker = f" of worker {world.sink.worker_id}"
    assert drifts[1,] == f"lose, event 1{worker}"
    assert drifts[8,] == f"lose, event 3{worker}"


def test_a_fault_from_which_an_index_has_recovered_is_not_named():
    index = AsksTheWorker()
    kv = RouterHarness(PROFILE, index=index, survive=["lose"])
    index.listen(kv.worker(0))
    kv.faults.lose(worker=0)
    for _ in range(3):
        kv.worker(0).serve(kv.prompt(1))
    index.tree.apply = lambda event: None  # ignores all events from here on
    kv.worker(0).serve(kv.prompt(1))
    (drift,) = (p for p in kv.events.errors if p.rule == "index_drift")
    assert None is drift.fault


# ----------------------------------------------------------------------------------------------- at the door


def test_an_index_that_received_changed_hashes_names_the_event_that_changed():
    class Reads(RadixIndex):
        def apply(self, event):
            if min(event.event.data.block_hashes) >= 0:
                super().apply(event)

    large = 2**63 + 1
    world = World(Reads(), num_blocks=None)
    world.kv.faults.signed(2)
    world.publish(Stored(None, (large,), (1,)), chain(3), Stored(None, (large + 1,), (2,)), chain(4))
    drifts = {p.blocks[0]: p.fault.event_id for p in world.kv.events.problems if p.rule == "index_drift"}
    assert {large: 0, large + 1: 2} == drifts


def test_consequences_of_a_hidden_engine_warning_are_attributed_to_the_fault_that_hides_it():
    kv = RouterHarness(backend=None)
    sink = kv.make_sink(prefix_closed=False, restores=True)
    sink.compare(lambda: [1])
    sink(Stored(None, (1,), (1,)))
    kv.faults.lose(1)
    sink(Stored(None, (1,), (1,)))  # evicted and stored again in one move: the engine keeps it after the Removed
    sink(Removed((1,)))
    kv.flush()
    drift = next(problem for problem in kv.events.problems if problem.rule == "engine_drift")
    assert str(drift.fault) == "lose, event 1 of worker 65536"
