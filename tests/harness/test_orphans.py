"""Chains through an orphan, a block without its parent: which answers are right, and what is blamed for a wrong one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
    Cleared,
    EventRulesBroken,
    KvCacheEvent,
    RadixIndex,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
    sequence_hashes,
)
from pytest_kvmock.harness import Recovery


def chain(*numbers, parent=None):
    """A Stored whose block hashes are its local hashes."""
    return Stored(parent, numbers, numbers)


ORPHAN = (chain(1, 2), Removed((1,)), chain(1))
"""Block 2 loses its parent, which is stored again."""


class Keeps:
    """Holds blocks even if their parent is removed; finds them again when the parent is stored again."""

    def __init__(self):
        self.held = {}

    def apply(self, event):
        self.worker_id = event.worker_id
        data, held = event.event.data, self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        if isinstance(data, Stored):
            parent = data.parent_hash
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                held[block] = (parent, local)
                parent = block
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                self.drop(held, block)
        else:
            held.clear()

    def drop(self, held, block):
        held.pop(block, None)

    def find_matches(self, local_hashes):
        out = {}
        for key, held in self.held.items():
            children = {place: block for block, place in held.items()}
            parent, depth = None, 0
            for local in local_hashes:
                if (parent, local) not in children:
                    break
                parent, depth = children[parent, local], depth + 1
            out[key] = depth
        return out

    def remove_worker(self, worker_id):
        self.held = {key: held for key, held in self.held.items() if key[0] != worker_id}


class DropsWhatIsBelow(Keeps):
    """Drops all blocks below a removed one and ignores later events about them."""

    def apply(self, event):
        data, held = event.event.data, self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        if not isinstance(data, Stored) or data.parent_hash is None or data.parent_hash in held:
            super().apply(event)

    def drop(self, held, block):
        for child in [child for child, (parent, _) in held.items() if parent == block and child != block]:
            self.drop(held, child)
        held.pop(block, None)


class RaisesForWhatItDropped(DropsWhatIsBelow):
    """Drops them too, and raises on events that name a block that it does not hold."""

    def apply(self, event):
        data, held = event.event.data, self.held.setdefault((event.worker_id, event.event.dp_rank), {})
        named = data.block_hashes if isinstance(data, Removed) else (getattr(data, "parent_hash", None),)
        for block in named:
            if block is not None and block not in held:
                raise KeyError(block)
        super().apply(event)


class Scripted(RadixIndex):
    """Returns given answers for some chains, by rank or by worker, and otherwise the reference's answer."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def apply(self, event):
        super().apply(event)
        self.worker_id = event.worker_id

    def find_matches(self, local_hashes):
        return self.answers.get(tuple(local_hashes), super().find_matches(local_hashes))


def harness(index, **options):
    return RouterHarness(backend=None, index=index, sync="every", **options)


def publish(sink, *events):
    for event in events:
        sink(event)


def rules(problems):
    return [problem.rule for problem in problems]


# ------------------------------------------------------------------------------------------------ what is right


@pytest.mark.parametrize("index", [Keeps, DropsWhatIsBelow, RadixIndex])
def test_an_index_may_find_an_orphan_again_or_not(index):
    kv = harness(index())
    publish(kv.make_sink(), *ORPHAN)
    verdict = kv.judge()
    assert (verdict.errors, rules(verdict.warnings)) == ([], ["orphaned_child"])
    assert verdict.warnings[0].folded == []


@pytest.mark.parametrize("by_rank", [True, False], ids=["by rank", "by worker"])
def test_answers_from_the_reference_up_to_the_held_blocks_are_right(by_rank):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, *ORPHAN)
    key = (sink.worker_id, 0) if by_rank else sink.worker_id
    for blocks in (1, 2):
        index.answers[1, 2] = {key: blocks}
        kv.assert_in_sync()
    for blocks in (0, 3):
        index.answers[1, 2] = {key: blocks}
        with pytest.raises(
            EventRulesBroken,
            match="1 to 2 blocks: between what the reference index returned and what is held according to the events",
        ):
            kv.assert_in_sync()


def test_an_answer_outside_of_this_range_follows_from_the_orphan_warning():
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, *ORPHAN)
    index.answers[1, 2] = {}
    verdict = kv.judge()
    assert verdict.errors == []
    (warning,) = verdict.warnings
    assert (warning.rule, warning.event_id) == ("orphaned_child", 1)
    (drift,) = warning.folded
    assert (drift.rule, drift.blocks) == ("index_drift", (2,))
    assert drift.observed == (
        f"find_matches() of your index (Scripted) returned 0 for worker {sink.worker_id} on a 2-block prefix (ends in "
        "2); block 2 was stored by event 0 and never removed; block 2 was left without its parent by event 1"
    )
    assert (
        drift.expected
        == "1 to 2 blocks: between what the reference index returned and what is held according to the events"
    )


@pytest.mark.parametrize(
    ("more", "asked", "wrong"),
    [
        pytest.param([chain(3, parent=2)], (1, 2, 3), 0, id="below the orphan"),
        pytest.param([chain(3, parent=2), chain(2, parent=1)], (1, 2, 3), 2, id="a descendant of it, linked again"),
        pytest.param([Removed((2,)), chain(2, parent=1)], (1, 2), 1, id="stored again as it should be"),
        pytest.param([chain(3, parent=2), Removed((2,)), chain(2, parent=1)], (1, 2, 3), 1, id="gone, and back"),
    ],
)
def test_a_drift_on_a_chain_through_an_orphan_follows_from_it_until_a_cleared(more, asked, wrong):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, *ORPHAN, *more)
    index.answers[asked] = {(sink.worker_id, 0): wrong}
    verdict = kv.judge()
    assert verdict.errors == []
    assert rules(problem for warning in verdict.warnings for problem in warning.folded) == ["index_drift"]


@pytest.mark.parametrize("index", [Keeps, RadixIndex])
@pytest.mark.parametrize(
    "more", [[chain(3, parent=2)], [chain(3, parent=2), chain(2, parent=1)], [Removed((2,)), chain(2, parent=1)]]
)
def test_a_right_index_does_not_drift_when_blocks_are_stored_below_an_orphan(index, more):
    kv = harness(index())
    publish(kv.make_sink(), *ORPHAN, *more)
    kv.judge()
    assert {"orphaned_child", "duplicate_store"} >= set(rules(kv.events.problems))


def test_a_drift_is_listed_under_the_first_orphan_of_its_chain():
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, chain(1, 2, 3, 4), Removed((3,)), Removed((1,)), chain(1), chain(3, parent=2))
    index.answers[1, 2, 3, 4] = {(sink.worker_id, 0): 0}
    kv.judge()
    later, first = kv.events.warnings
    assert [later.blocks, first.blocks] == [(4,), (2,)]
    assert (rules(later.folded), rules(first.folded)) == ([], ["index_drift"])


# ------------------------------------------------------------------------------------------------- what is not


@pytest.mark.parametrize(
    ("asked", "answer"),
    [((5, 6), 1), ((1,), 0), ((2, 3), 1)],
    ids=["another chain", "before the orphan", "the orphan as a root"],
)
def test_a_drift_on_a_chain_without_an_orphan_is_an_error(asked, answer):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, chain(5, 6), Stored(None, (71, 72), (1, 2)), Removed((71,)), Stored(None, (71,), (1,)))
    index.answers[asked] = {(sink.worker_id, 0): answer}
    publish(sink, Stored(72, (73,), (3,)))
    assert rules(kv.judge().errors) == ["index_drift"]


@pytest.mark.parametrize("more", [[], [Removed((2,))]], ids=["behind a hole", "gone"])
def test_an_index_that_returns_more_than_is_held_is_an_error_if_nothing_was_restored(more):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, *ORPHAN[:2], *more)
    index.answers[1, 2] = {(sink.worker_id, 0): 1}
    (error,) = kv.judge().errors
    assert (
        error.rule,
        error.blocks,
        error.expected,
    ) == ("index_drift", (2,), "0 blocks, as the reference index returned")


def test_an_index_that_ignores_the_removed_of_an_inner_block_drifts():
    class Ignores(Keeps):
        def drop(self, held, block):
            pass

    kv = harness(Ignores())
    publish(kv.make_sink(), *ORPHAN[:2])
    (error,) = kv.judge().errors
    assert (error.rule, error.blocks, error.event_id) == ("index_drift", (1,), 1)


@pytest.mark.parametrize("how", ["cleared", "removed"])
def test_after_a_cleared_or_a_removal_orphans_no_longer_count(how):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    publish(sink, *ORPHAN)
    sink(Cleared()) if how == "cleared" else kv.remove_worker(sink.worker_id)
    publish(sink, chain(1, 2))
    index.answers[1, 2] = {(sink.worker_id, 0): 1}
    assert rules(kv.judge().errors) == ["index_drift"]


def test_after_an_announced_restart_orphans_no_longer_count():
    index = Scripted()
    kv = RouterHarness(index=index, sync="every")
    kv.apply([*ORPHAN])
    kv.worker(0).restart(announced=True)
    kv.apply([chain(1, 2)])
    index.answers[1, 2] = {(0, 0): 1}
    assert rules(kv.judge().errors) == ["index_drift"]


def test_each_rank_and_each_worker_has_its_own_orphans():
    index = Scripted()
    kv = harness(index)
    sink, other = kv.make_sink(), kv.make_sink()
    for event_id, data in enumerate(ORPHAN):
        sink(KvCacheEvent(event_id, data, 1))
    for one in (sink, other):
        publish(one, chain(1, 2))
    right = {(sink.worker_id, 1): 1, (sink.worker_id, 0): 2, (other.worker_id, 0): 2}
    for key in [(sink.worker_id, 0), (other.worker_id, 0)]:
        index.answers[1, 2] = right | {key: 1}
        with pytest.raises(EventRulesBroken, match="2 blocks, as the reference index returned"):
            kv.assert_in_sync()
    index.answers[1, 2] = right | {(sink.worker_id, 1): 2}
    kv.assert_in_sync()


@pytest.mark.parametrize(("others", "answer"), [((), 3), ((0,), 1)], ids=["one rank", "two ranks"])
def test_a_drift_of_an_index_by_worker_follows_from_an_orphan_of_any_rank(others, answer):
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    for rank in others:
        sink(KvCacheEvent(0, chain(1, 2), rank))
    for event_id, data in enumerate(ORPHAN):
        sink(KvCacheEvent(event_id, data, 1))
    index.answers[1, 2] = {sink.worker_id: answer}
    verdict = kv.judge()
    assert (verdict.errors, [rules(warning.folded) for warning in verdict.warnings]) == ([], [["index_drift"]])


def test_an_orphan_on_the_host_does_not_count_for_the_device():
    index = Scripted()
    kv = harness(index)
    sink = kv.make_sink()
    for data in (chain(1, 2), Removed((1,))):
        sink.publish(data, storage_tier=StorageTier.HOST_PINNED)
    sink(chain(1, 2))
    index.answers[1, 2] = {(sink.worker_id, 0): 1}
    assert rules(kv.judge().errors) == ["index_drift"]


def test_a_removed_of_parent_and_child_leaves_no_orphan():
    for blocks in ((1, 2), (2, 1)):
        index = Scripted()
        kv = harness(index)
        sink = kv.make_sink()
        publish(sink, chain(1, 2), Removed(blocks), chain(1))
        index.answers[1, 2] = {(sink.worker_id, 0): 2}
        assert tuple(map(rules, kv.judge()[:2])) == (["index_drift"], [])


def test_a_copy_without_its_parent_is_an_orphan_too():
    kv = harness(RadixIndex(count_copies=True))
    sink = kv.make_sink(residency="counted")
    publish(sink, chain(1, 2), chain(2, parent=1), Removed((2, 1)), chain(1))
    kv.assert_in_sync()
    assert rules(kv.judge().warnings) == ["orphaned_child"]
    assert kv.inside.reference.find_matches([1, 2]).scores[sink.worker_id, 0] == 1


# ------------------------------------------------------------------------------------------------- other names


def test_an_orphan_is_recognized_in_the_chain_of_a_worker_with_other_hashes():
    kv = harness(Keeps())
    publish(kv.make_sink(), *ORPHAN)
    publish(kv.make_sink(), Stored(None, (71, 72), (1, 2)))
    kv.judge()
    assert rules(kv.events.problems) == ["orphaned_child"]


def test_an_orphan_with_a_wrong_parent_is_recognized_by_the_hashes_of_its_chain():
    class ByHash(Keeps):
        """Finds blocks by the hashes that it computes from the lookup."""

        def find_matches(self, local_hashes):
            names = sequence_hashes(local_hashes)
            return {
                key: next((i for i, name in enumerate(names) if name not in held), len(names))
                for key, held in self.held.items()
            }

    one, two, three = sequence_hashes((1, 2, 3))
    kv = harness(ByHash())
    sink = kv.make_sink()
    publish(sink, Stored(None, (one,), (1,)), Stored(None, (9,), (9,)), Stored(9, (two, three), (2, 3)), Removed((9,)))
    (problem,) = kv.judge().warnings
    assert ("orphaned_child", (two,)) == (problem.rule, problem.blocks)
    assert [each for each in kv.events.errors if each.position > 2] == []


# ---------------------------------------------------------------------------------------------- it raises there


def test_an_index_that_raises_for_a_dropped_orphan_is_listed_under_the_warning():
    kv = harness(RaisesForWhatItDropped())
    sink = kv.make_sink()
    publish(sink, *ORPHAN[:2], chain(3, parent=2), Removed((2, 3)))
    verdict = kv.judge()
    assert verdict.errors == []
    (warning,) = verdict.warnings
    assert rules(warning.folded) == ["index_failure", "index_failure"]


def test_an_index_that_drops_orphans_still_drifts_on_other_blocks():
    class AndForgetsOne(RaisesForWhatItDropped):
        def drop(self, held, block):
            if block != 6:
                super().drop(held, block)

    kv = harness(AndForgetsOne())
    publish(kv.make_sink(), chain(5, 6), *ORPHAN[:2], chain(3, parent=2), Removed((6,)))
    (error,) = kv.judge().errors
    assert (error.rule, error.blocks) == ("index_drift", (6,))
    assert rules(kv.events.warnings[0].folded) == ["index_failure"]


def test_an_index_that_raises_at_an_event_without_an_orphan_has_failed():
    class Full(Keeps):
        def apply(self, event):
            if event.event.event_id == 3:
                raise OSError("disk full")
            super().apply(event)

    kv = harness(Full())
    publish(kv.make_sink(), *ORPHAN, chain(7))
    assert rules(kv.judge().errors) == ["index_failure"]


# ---------------------------------------------------------------------------------------- faults and recoveries


@pytest.mark.parametrize("index", [Keeps, RadixIndex])
def test_an_orphan_caused_by_a_lost_removed_is_listed_under_the_gap(index):
    kv = harness(index())
    sink = kv.make_sink()
    publish(sink, chain(1, 2))
    kv.faults.lose(worker=sink.worker_id)
    publish(sink, Removed((2,)), Removed((1,)), chain(1))
    (error,) = kv.judge().errors
    assert (error.rule, error.fault.kind) == ("event_id_gap", "lose")
    assert set(rules(error.folded)) == {"orphaned_child"}


@pytest.mark.parametrize("index", [Keeps, RadixIndex])
def test_an_index_that_survives_faults_may_differ_at_an_orphan_too(index):
    kv = harness(index(), survive=["double"])
    sink = kv.make_sink()
    publish(sink, *ORPHAN)
    kv.faults.double(worker=sink.worker_id)
    publish(sink, chain(4), chain(5))
    verdict = kv.judge()
    assert (verdict.errors, rules(verdict.warnings)) == ([], ["orphaned_child"])


def test_a_drift_at_an_orphan_while_surviving_faults_is_listed_under_the_warning():
    index = Scripted()
    kv = harness(index, survive=["lose"])
    sink = kv.make_sink()
    publish(sink, *ORPHAN)
    index.answers[1, 2] = {}
    verdict = kv.judge()
    assert verdict.errors == []
    assert [rules(warning.folded) for warning in verdict.warnings] == [["index_drift"]]


def test_an_orphan_among_recovered_events_is_a_warning():
    class Asks(Keeps):
        def apply(self, event):
            if event.event.event_id == 3:
                for missed in recovery(event.worker_id, 1).events:
                    super().apply(missed)
            else:
                super().apply(event)

    recovery = Recovery()
    kv = harness(Asks(), recovery=recovery, allow=["event_id_gap"])
    sink = kv.make_sink()
    publish(sink, chain(1, 2))
    with kv.faults.lose(2):
        publish(sink, *ORPHAN[1:])
    publish(sink, chain(5))
    kv.judge()
    warning = next(p for p in kv.events.problems if p.rule == "orphaned_child")
    assert (warning.blocks, warning.cause, warning.fault) == ((2,), None, None)
    assert set(rules(kv.events.problems)) == {"event_id_gap", "orphaned_child"}


# ------------------------------------------------------------------------------------------------------ traffic

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "root", "remove", "clear"]),
        st.sampled_from([(0, 0), (0, 1), (1, 0)]),
        st.integers(0, 7),
        st.integers(0, 1),
    ),
    max_size=30,
)


def play(kv, steps):
    """Store chains and remove blocks at any position; the names are Dynamo's."""
    sinks = [kv.make_sink(), kv.make_sink()]
    held = {}
    begin = [("store", (0, 0), at, 0) for at in range(3)]
    for kind, (sink, rank), at, local in (*begin, *steps):
        mine = held.setdefault((sink, rank), [])
        path = mine[at % len(mine)] if mine else ()
        if kind in ("store", "root"):
            path = (local,) if kind == "root" else (*path, local)
            if path in mine:
                continue
            mine.append(path)
            names = sequence_hashes(path)
            data = Stored(names[-2] if len(path) > 1 else None, tuple(names[-1:]), path[-1:])
        elif kind == "clear":
            if at:
                continue
            mine.clear()
            data = Cleared()
        elif mine:
            mine.remove(path)
            data = Removed(tuple(sequence_hashes(path)[-1:]))
        else:
            continue
        worker_id = sinks[sink].worker_id
        sinks[sink](KvCacheEvent(kv.by_hand.next_id(worker_id, rank), data, rank))


@pytest.mark.parametrize("index", [Keeps, DropsWhatIsBelow, RadixIndex])
@given(steps=STEPS)
def test_no_right_index_is_blamed_for_orphans_of_an_engine(index, steps):
    kv = harness(index())
    play(kv, steps)
    assert kv.judge().errors == []
    assert {"orphaned_child"} >= {p.rule for p in kv.events.problems if p.cause is None}
