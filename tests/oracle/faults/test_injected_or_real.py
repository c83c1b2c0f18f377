"""Only problems that come from a fault are attributed to it: over random traffic, all faults and all backends."""

from dataclasses import replace

import pytest
from depth import FEWEST_EXAMPLES, examples, few
from fault_worlds import PROFILE, Traffic
from hybrid_sizes import HYBRID, PLAIN
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.oracle.faults.kinds import FAULTS

RATES = [kind.name for kind in FAULTS.values() if kind.has_rate]
rates = st.dictionaries(st.sampled_from(RATES), st.sampled_from([0.02, 0.1, 0.4]), min_size=1)


def script(kv, rng, kind):
    """Use one fault by hand."""
    faults = kv.faults
    own_words = {
        "restart": lambda: faults.restart(rng.randrange(2)),
        "clear": lambda: faults.clear(rng.randrange(2)),
        "salt": lambda: faults.salt(lora_name="l", worker=rng.randrange(2)),
        "late_join": faults.late_join,
        "block_size": lambda: faults.block_size(2 * kv.profile.block_size),  # any engine has blocks twice as large
        "signed": lambda: None,  # it changes no stream, like faults of stores
        **dict.fromkeys(("evict", "restart_store", "trim_log"), lambda: None),
    }
    fault = own_words.get(kind, getattr(faults, kind))()
    return fault.stop if kind in ("late_join", "salt") else lambda: None


def router_of(backend):
    """Return an index that is right for this engine."""
    return RadixIndex(count_copies=BACKENDS[backend].residency == "counted")


def own(kv):
    """Return all problems; without an engine's own warnings and their consequences if it is not prefix-closed."""
    if BACKENDS[kv.backend].prefix_closed:
        return kv.events.problems
    return [p for p in kv.events.problems if p.is_error and root_of(p).is_error]


def root_of(problem):
    """Return the problem from which this one follows in the end."""
    return problem if problem.cause is None else root_of(problem.cause)


any_rates = given(seed=st.integers(0, 2**32), rates=rates, with_index=st.booleans(), flushed=st.booleans())


@pytest.mark.parametrize("backend", few(PLAIN, 3))
@settings(max_examples=examples(40))
@any_rates
@example(seed=4366, rates={"lose": 0.02}, with_index=True, flushed=True)  # multi_lru's own warning
@example(seed=4366, rates={"lose": 0.1}, with_index=False, flushed=True)  # a fault hides it
def test_all_problems_of_a_right_engine_are_attributed_to_random_faults(backend, seed, rates, with_index, flushed):
    check_injected(backend, seed, rates, with_index=with_index, flushed=flushed)


@pytest.mark.parametrize("backend", few(HYBRID))
@settings(max_examples=FEWEST_EXAMPLES)  # the models of an engine differ in sizes and share its manager
@any_rates
def test_all_problems_of_a_right_hybrid_engine_are_attributed_to_random_faults(
    backend, seed, rates, with_index, flushed
):
    check_injected(backend, seed, rates, with_index=with_index, flushed=flushed)


def check_injected(backend, seed, rates, *, with_index, flushed):
    traffic = Traffic(backend, seed, router_of(backend) if with_index else None, faults=rates)
    for _ in range(20):
        traffic.step()
        if flushed and not traffic.rng.randrange(6):
            traffic.kv.flush()
    traffic.kv.judge()
    problems = own(traffic.kv)
    assert [problem for problem in problems if problem.fault is None] == []
    assert {problem.fault.kind for problem in problems} <= rates.keys()


any_kinds = given(seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from(list(FAULTS)), min_size=1, max_size=4))


@pytest.mark.parametrize("backend", few(PLAIN, 3))
@settings(max_examples=examples(40))
@any_kinds
def test_all_problems_of_a_right_engine_are_attributed_to_scripted_faults(backend, seed, kinds):
    check_by_hand(backend, seed, kinds)


@pytest.mark.parametrize("backend", few(HYBRID))
@settings(max_examples=FEWEST_EXAMPLES)  # as above
@any_kinds
def test_all_problems_of_a_right_hybrid_engine_are_attributed_to_scripted_faults(backend, seed, kinds):
    check_by_hand(backend, seed, kinds)


def check_by_hand(backend, seed, kinds):
    traffic = Traffic(backend, seed, router_of(backend))
    traffic.run(5)
    for kind in kinds:
        stop = script(traffic.kv, traffic.rng, kind)
        traffic.run(4)
        stop()
        traffic.run(4)
    traffic.kv.judge()
    problems = own(traffic.kv)
    assert [problem for problem in problems if problem.fault is None] == []
    assert {problem.fault.kind for problem in problems} <= set(kinds)


@pytest.mark.parametrize("kind", RATES)
def test_a_problem_names_the_kind_that_was_injected(kind):
    kv = Traffic("lineage", 1, faults={kind: 0.2}).run(40)
    kv.judge()
    errors = kv.events.errors
    assert errors
    assert {kind} == {problem.fault.kind for problem in errors}
    assert all(str(problem.fault).startswith(f"{kind}, event ") for problem in errors)


class Buggy:
    """Corrupts events that a worker publishes before any fault changes them: these errors are real."""

    def __init__(self, traffic, rate):
        self.traffic = traffic
        self.rate = rate
        self.wronged = []
        self.publish = traffic.kv.publisher.publish
        traffic.kv.publisher.publish = self.wrong

    def wrong(self, event):
        rng, data = self.traffic.rng, event.event.data
        if isinstance(data, Stored) and rng.random() < self.rate:
            data = Stored(rng.getrandbits(64), data.block_hashes, data.tokens_hashes)
        elif isinstance(data, Removed) and rng.random() < self.rate:
            data = Removed((*data.block_hashes, rng.getrandbits(64)))
        if data is not event.event.data:
            event = replace(event, event=replace(event.event, data=data))
            self.wronged.append(event)
        self.publish(event)


@given(seed=st.integers(0, 2**32), rates=rates, survive=st.booleans())
def test_a_real_problem_is_not_attributed_to_a_fault(seed, rates, survive):
    traffic = Traffic("lineage", seed, faults=rates, survive=list(rates) if survive else ())
    buggy = Buggy(traffic, 0.1)
    kv = traffic.run(30)
    standing = {id(p.event): p for p in kv.judge().errors if p.fault is None}
    arrived = {id(entry.event) for entry in kv.events}  # unchanged; lost or changed events cannot be judged
    for event in buggy.wronged:
        if id(event) in arrived:
            assert standing[id(event)].rule in ("parent_block_not_found", "block_not_found")
    wronged = {name_of(event) for event in buggy.wronged}
    assert {name_of(p.event) for p in standing.values() if p.event is not None} <= wronged


def name_of(event):
    return event.worker_id, event.event.event_id


def test_the_same_seed_and_name_change_the_same_events():
    def injections(seed, **rates):
        kv = Traffic("lineage", seed, faults=rates).run(40)
        kv.judge()
        return [str(p.fault) for p in kv.events.problems if p.fault.kind == "lose"], [e.event for e in kv.events]

    assert injections(1, lose=0.1) == injections(1, lose=0.1)
    assert injections(1, lose=0.1)[1] != injections(2, lose=0.1)[1]


def test_faults_do_not_change_the_traffic():
    plain, lossy = (Traffic("lineage", 3, faults=rates) for rates in ({}, {"lose": 0.5}))
    streams = []
    for traffic in (plain, lossy):
        published = []
        traffic.kv.add_sink(
            type("Captures", (), {"publish": lambda self, e, *_, published=published: published.append(e)})(),
            before=True,
        )
        traffic.run(20)
        streams.append(published)
    assert streams[0] == streams[1]
    assert len(plain.kv.events) > len(lossy.kv.events)


def test_without_faults_a_harness_keeps_no_second_ledger():
    kv = Traffic("lineage", 1, profile=PROFILE).run(3)
    assert kv._judge.book is None
    assert kv.publisher.injector is None


# ------------------------------------------------------------------------------------------ which of several faults


def test_a_problem_names_the_fault_that_changed_its_block_and_not_a_later_one():
    kv = RouterHarness(PROFILE)
    kv.apply([Stored(None, (block,), (block,)) for block in (1, 9)])
    kv.faults.wrong_parent(parent=9)
    kv.apply(Stored(1, (2,), (2,)))  # arrives as a child of 9
    kv.faults.double()
    kv.apply(Stored(None, (20,), (20,)))
    kv.apply(Removed((9,)))
    (orphan,) = [problem for problem in kv.events.problems if problem.rule == "orphaned_child"]
    assert (orphan.block, orphan.fault.kind, orphan.fault.event_id) == (2, "wrong_parent", 2)


def test_a_problem_names_the_later_of_two_faults_that_changed_its_block():
    kv = RouterHarness(PROFILE)
    kv.apply([Stored(None, (block,), (block,)) for block in (1, 8, 9)])
    for parent in (8, 9):
        kv.faults.wrong_parent(parent=parent)
        kv.apply([Stored(1, (2,), (2,))])  # the second one is a warning
    kv.apply(Removed((9,)))
    (orphan,) = [problem for problem in kv.events.problems if problem.rule == "orphaned_child"]
    assert (orphan.block, orphan.fault.kind, orphan.fault.event_id) == (2, "wrong_parent", 4)
