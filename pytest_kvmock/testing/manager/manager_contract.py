"""The promises of every block manager that takes moves, as tests that a manager's test class inherits.

One subject, one class: a test for each promise.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar
from uuid import UUID

from pytest_kvmock.engines.backends import BackendSpec
from pytest_kvmock.engines.base.manager import KvManager
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.testing.manager.manager_checks import (
    MoveTraffic,
    NotTaken,
    RaisingSink,
    expect_counts,
    expect_published,
    expect_references,
    expect_resident,
    expect_served,
    expect_unchanged,
    published_rows,
    state_of,
)
from pytest_kvmock.testing.subject import OverBackend, refuse
from pytest_kvmock.values.events import value_text
from pytest_kvmock.values.moves import Deref, MoveError, Promote, Use
from pytest_kvmock.values.sinks import CapturingSink, Sink

PARTIAL = UUID(int=1, version=4)
OTHER_PARTIAL = UUID(int=2, version=4)


class ManagerContract(OverBackend):
    """Tests that hold for every block manager that takes moves.

    A subclass names the backend, or makes the manager::

        class TestMine(ManagerContract):
            backend = "lru"

        class TestOther(ManagerContract):
            def make_manager(self, num_blocks, block_size, sink):
                return OtherManager(num_blocks, block_size, publish=sink.publish)

    All rules of events apply to what the manager publishes; the events are also compared with its `resident()`.

    Attributes:
        forgiving: False for a strict manager, such as those of kvbm-logical. True for one like that of dynamo-mocker
            1.0.2: lists of a Use may differ in length; a Use that fails returns 0 and silently keeps the blocks that it
                took; a Deref of a block that is not in use is ignored; a freed partial block stays in the pool until it
                is evicted.
    """

    forgiving: ClassVar[bool] = False

    def spec(self) -> BackendSpec:
        """Return the backend under contract; fail the test if `forgiving` is not a bool."""
        __tracebackhide__ = True
        if not isinstance(self.forgiving, bool):
            refuse(self, f"forgiving must be True or False, got {self.forgiving!r:.80}")
        return super().spec()

    def _start(self, num_blocks: int = 8) -> tuple[KvManager, EventLog]:
        __tracebackhide__ = True
        harness = self.make_harness(num_blocks)
        return harness.worker(0).manager, harness.events

    def _make(self, sink: Sink | None) -> KvManager:
        __tracebackhide__ = True
        return self.spec().make(num_blocks=8, block_size=self.block_size, dp_rank=0, sink=sink)

    # -------------------------------------------------------------------------------------- used and freed

    def test_a_new_manager_is_empty(self) -> None:
        """A new manager holds no block, and has published no event."""
        manager, events = self._start(8)
        assert (8, self.block_size) == (manager.num_blocks, manager.block_size), (
            f"made with 8 blocks of {self.block_size} tokens, it has {manager.num_blocks} of {manager.block_size}"
        )
        expect_counts(manager, active=0, references=0, inactive=0)
        expect_resident(manager, [])
        expect_published(events, [], "it was made")

    def test_used_blocks_are_stored_in_order_under_one_another(self) -> None:
        """A Use of unknown blocks stores each as the child of the one before it."""
        manager, events = self._start()
        expect_served(manager, [1, 2, 3], 3)
        expect_counts(manager, active=3, references=3, inactive=0)
        expect_published(events, [("Stored", 1, None), ("Stored", 2, 1), ("Stored", 3, 2)], "use([1, 2, 3])")
        events.assert_no_event_errors()

    def test_blocks_are_stored_under_the_parent_that_is_named(self) -> None:
        """The first block of a Use is stored as a child of the Use's parent."""
        manager, events = self._start()
        manager.use([1])
        events.take()
        manager.use([2, 3], parent=1)
        expect_published(events, [("Stored", 2, 1), ("Stored", 3, 2)], "use([2, 3], parent=1)")
        events.assert_no_event_errors()

    def test_what_follows_cached_blocks_is_stored_under_the_last_of_them(self) -> None:
        """A Use stores only its new blocks."""
        manager, events = self._start()
        manager.use([1, 2])
        events.take()
        expect_served(manager, [1, 2, 3], 3)
        expect_published(events, [("Stored", 3, 2)], "use([1, 2, 3]), 1 and 2 being cached")
        events.assert_no_event_errors()

    def test_a_block_in_use_gets_one_more_reference(self) -> None:
        """A Use of blocks in use adds one reference to each, without an event."""
        manager, events = self._start()
        manager.use([1, 2])
        events.take()
        expect_served(manager, [1, 2], 2)
        expect_counts(manager, active=2, references=4, inactive=0)
        expect_references(manager, {1: 2, 2: 2})
        expect_published(events, [], "use([1, 2]) while both were in use")

    def test_a_freed_block_stays_cached(self) -> None:
        """A freed block is inactive and cached; no event is published."""
        manager, events = self._start()
        manager.use([1, 2, 3])
        events.take()
        manager.deref(3, 2, 1)
        expect_counts(manager, active=0, references=0, inactive=3)
        expect_resident(manager, [1, 2, 3])
        expect_published(events, [], "deref(3, 2, 1)")
        events.assert_no_event_errors()

    def test_a_block_is_in_use_until_its_last_reference_is_freed(self) -> None:
        """A block stays in use until it has been freed as often as it was used."""
        manager, events = self._start()
        manager.use([1])
        manager.use([1])
        manager.deref(1)
        expect_counts(manager, active=1, references=1, inactive=0)
        expect_references(manager, {1: 1})
        manager.deref(1)
        expect_counts(manager, active=0, references=0, inactive=1)
        events.assert_no_event_errors()

    def test_a_cached_block_is_used_again_without_an_event(self) -> None:
        """A Use of cached blocks publishes nothing."""
        manager, events = self._start()
        manager.use([1, 2])
        manager.deref(2, 1)
        events.take()
        expect_served(manager, [1, 2], 2)
        expect_counts(manager, active=2, references=2, inactive=0)
        expect_published(events, [], "use([1, 2]) while both were cached")
        events.assert_no_event_errors()

    def test_a_deref_may_name_a_block_once_for_each_reference(self) -> None:
        """A Deref that names a block once for each reference frees it. With more names than references the Deref is
        refused; with `forgiving` the surplus is ignored.
        """
        manager, events = self._start()
        manager.use([1])
        manager.use([1])
        events.take()
        manager.deref(1, 1)
        what = "use([1]) twice, then deref(1, 1)"
        expect_counts(manager, active=0, references=0, inactive=1)
        expect_references(manager, {})
        expect_resident(manager, [1])
        listed = list(manager.inactive_blocks())
        assert listed == [1], f"after {what} inactive_blocks() is {value_text(listed)}; expected [1]"
        expect_published(events, [], what)
        expect_served(manager, range(11, 19), 8)  # the whole pool: 1 is evicted, once
        removed = [row[1] for row in published_rows(events) if row[0] == "Removed"]
        assert removed == [1], f"after {what} the Removed events of a pool that is filled name {value_text(removed)}"
        events.assert_no_event_errors()
        if not self.forgiving:
            self._expect_refused("deref(1, 1), 1 being held once", lambda manager: manager.deref(1, 1))
            return
        manager, events = self._start()
        manager.use([1])
        manager.deref(1, 1)
        expect_counts(manager, active=0, references=0, inactive=1)
        expect_resident(manager, [1])

    # ---------------------------------------------------------------------------------------------- evicted

    def test_a_full_manager_evicts_as_many_as_it_needs(self) -> None:
        """A full manager evicts as many blocks as a Use needs, and publishes them."""
        manager, events = self._start(8)
        for root in (1, 11):
            manager.use(range(root, root + 4))
            manager.deref(range(root + 3, root - 1, -1))
        events.take()
        expect_served(manager, [21, 22, 23], 3)
        removed = [row[1] for row in published_rows(events) if row[0] == "Removed"]
        assert len(set(removed)) == 3, (
            f"3 blocks were needed of a full manager, and the Removed events name {value_text(removed)}"
        )
        expect_resident(manager, {1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23} - set(removed))
        expect_counts(manager, active=3, references=3, inactive=5)
        events.assert_no_event_errors()

    def test_blocks_in_use_are_never_evicted(self) -> None:
        """A Use that does not fit takes as many leading blocks as it returns; with `forgiving` it returns 0 and takes
        as many as fit.
        """
        manager, events = self._start(8)
        manager.use(range(1, 7))
        events.take()
        served = manager.use([11, 12, 13, 14])
        allowed = (0,) if self.forgiving else (0, 1, 2)
        assert served in allowed, f"use of 4 blocks with room for 2 answered {served!r}; expected one of {allowed}"
        taken = 2 if self.forgiving else served
        expect_references(manager, dict.fromkeys([*range(1, 7), *range(11, 11 + taken)], 1))
        removed = [row for row in published_rows(events) if row[0] == "Removed"]
        assert removed == [], f"every block was in use, and there were {value_text(removed)}"
        if not self.forgiving:
            events.assert_no_event_errors()

    def test_inactive_blocks_are_evicted_in_the_order_in_which_they_are_listed(self) -> None:
        """Blocks are evicted in the order of `inactive_blocks()`."""
        manager, events = self._start(8)
        for root in (1, 11):
            manager.use(range(root, root + 4))
            manager.deref(range(root + 3, root - 1, -1))
        expected = manager.inactive_blocks()
        events.take()
        for block in range(21, 29):
            manager.use([block])
        removed = [row[1] for row in published_rows(events) if row[0] == "Removed"]
        assert expected == removed, (
            f"inactive_blocks() listed {value_text(expected)}; the Removed events name {value_text(removed)}"
        )
        events.assert_no_event_errors()

    def test_what_is_used_again_is_not_evicted(self) -> None:
        """A block that is used again is not among `inactive_blocks()`."""
        manager, events = self._start(8)
        manager.use([1, 2, 3, 4])
        manager.deref(4, 3, 2, 1)
        manager.use([1, 2])
        listed = sorted(manager.inactive_blocks())
        assert listed == [3, 4], (
            f"1 and 2 are in use again; inactive_blocks() lists {value_text(listed)}, expected 3 and 4"
        )
        manager.use(range(11, 17))
        expect_resident(manager, [1, 2, *range(11, 17)])
        events.assert_no_event_errors()

    # -------------------------------------------------------------------------------------- partial blocks

    def test_a_partial_block_takes_room_and_is_no_event(self) -> None:
        """A partial block takes room, without an event: no request can share it."""
        manager, events = self._start()
        manager.use([1])
        events.take()
        expect_served(manager, [1, PARTIAL], 2)
        expect_counts(manager, active=2, references=3, inactive=0)
        expect_references(manager, {1: 2, PARTIAL: 1})
        expect_resident(manager, [1])
        expect_published(events, [], "use([1, partial])")

    def test_a_freed_partial_block_is_not_cached(self) -> None:
        """A freed partial block is not cached; with `forgiving` it takes room until it is evicted, without an event."""
        manager, events = self._start()
        manager.use([PARTIAL])
        manager.deref(PARTIAL)
        expect_counts(manager, active=0, references=0, inactive=int(self.forgiving))
        expect_references(manager, {})
        expect_resident(manager, [])
        expect_published(events, [], "a partial block was used and freed")
        expect_served(manager, range(1, 9), 8)
        expect_published(
            events, [("Stored", 1, None), *(("Stored", n, n - 1) for n in range(2, 9))], "use(range(1, 9))"
        )
        events.assert_no_event_errors()

    def test_a_partial_block_becomes_a_full_one(self) -> None:
        """A Promote stores the full block under its parent."""
        manager, events = self._start()
        manager.use([1, PARTIAL])
        events.take()
        manager.promote(PARTIAL, 2, parent=1)
        expect_references(manager, {1: 1, 2: 1})
        expect_counts(manager, active=2, references=2, inactive=0)
        expect_published(events, [("Stored", 2, 1)], "promote(partial, 2, parent=1)")
        events.assert_no_event_errors()

    def test_a_partial_block_that_becomes_one_in_use_gives_its_room_back(self) -> None:
        """A Promote to a block in use frees the partial one, and stores nothing."""
        manager, events = self._start()
        manager.use([1, 2])
        manager.use([1, PARTIAL])
        events.take()
        manager.promote(PARTIAL, 2, parent=1)
        expect_references(manager, {1: 2, 2: 2})
        expect_counts(manager, active=2, references=4, inactive=0)
        expect_published(events, [], "promote to a block in use")
        events.assert_no_event_errors()

    def test_a_partial_block_that_becomes_a_cached_one_gives_its_room_back(self) -> None:
        """A Promote to a cached block frees the partial one, and takes the cached block into use."""
        manager, events = self._start()
        manager.use([1, 2])
        manager.deref(2, 1)
        manager.use([1, PARTIAL])
        events.take()
        manager.promote(PARTIAL, 2, parent=1)
        expect_references(manager, {1: 1, 2: 1})
        expect_counts(manager, active=2, references=2, inactive=0)
        expect_published(events, [], "promote to a cached block")
        events.assert_no_event_errors()

    # ------------------------------------------------------------------------------------ clear, and looks

    def test_clear_drops_all_and_publishes_a_cleared(self) -> None:
        """A clear empties the manager, and publishes one Cleared."""
        manager, events = self._start()
        manager.use([1, 2])
        manager.deref(2, 1)
        events.take()
        assert manager.clear(), "clear() of a manager with no block in use was refused"
        expect_counts(manager, active=0, references=0, inactive=0)
        expect_resident(manager, [])
        expect_published(events, [("Cleared",)], "clear()")
        expect_served(manager, [1, 2], 2)
        expect_published(events, [("Stored", 1, None), ("Stored", 2, 1)], "use([1, 2]) after a clear()")
        events.assert_no_event_errors()

    def test_clear_does_nothing_while_a_block_is_in_use(self) -> None:
        """`clear()` is False, without an event, while a block is in use."""
        for held in (1, PARTIAL):
            manager, events = self._start()
            manager.use([1, 2])
            manager.deref(2, 1)
            manager.use([held])
            events.take()
            before = state_of(manager)
            assert not manager.clear(), f"clear() answered True while {value_text(held)} was in use"
            expect_unchanged(manager, before, "a clear() that was refused")
            expect_published(events, [], "a clear() that was refused")

    def test_looking_changes_nothing(self) -> None:
        """Reading the state changes neither blocks nor the order of eviction."""
        manager, events = self._start()
        for root in (1, 11):
            manager.use(range(root, root + 3))
            manager.deref(range(root + 2, root - 1, -1))
        manager.use([1, PARTIAL])
        events.take()
        before = state_of(manager)
        for _ in range(2):
            manager.prefill_cost(ActiveSequence([0] * 9, 1, self.block_size))
            # In forward order the fault would not show.
            for block in (*before["inactive_blocks"][::-1], 1, 99, PARTIAL):
                manager.references(block)
            expect_unchanged(manager, before, "questions alone")
        expect_published(events, [], "questions alone")

    def test_prefill_cost_counts_what_is_cached(self) -> None:
        """`prefill_cost` splits a prompt into new and cached tokens."""
        manager, events = self._start()
        size = self.block_size
        sequence = ActiveSequence(range(3 * size + 1), 1, size)
        for cached in (0, 2):
            whole = sequence.unique_blocks
            manager.process(
                Use(whole[:cached], sequence.block_hashes[:cached], sequence.positional_lineage_hashes[:cached])
            )
            cost = manager.prefill_cost(sequence)
            expected = (4 - cached, (3 - cached) * size + 1, cached * size)
            assert expected == tuple(cost), (
                f"a prompt of 3 blocks and 1 token, {cached} blocks cached: (new blocks, new tokens, cached tokens) "
                f"is {tuple(cost)}; expected {expected}"
            )
        events.assert_no_event_errors()

    # ---------------------------------------------------------------------------------- events and listeners

    def test_event_ids_count_from_0(self) -> None:
        """Event ids count from 0 without gaps, for any kind of event."""
        manager, events = self._start(4)
        for root in (1, 11, 21):
            manager.use([root, root + 1])
            manager.deref(root + 1, root)
        manager.clear()
        manager.use([1])
        ids = [entry.event.event.event_id for entry in events]
        assert list(range(len(ids))) == ids, f"the event ids are {ids}"
        assert len(ids) > 3, f"three Uses that evict, a clear() and a Use made {len(ids)} events"
        events.assert_no_event_errors()

    def test_an_id_that_is_taken_is_used_up(self) -> None:
        """An id from `take_event_id`, which code that publishes in the manager's name uses, is not used again."""
        sink = CapturingSink()
        manager = self._make(sink)
        taken = manager.take_event_id()
        manager.use([1])
        ids = [event.event_id for event in sink.events]
        assert (taken, ids[0]) == (0, 1), f"take_event_id() gave {taken}, and then the events had {ids}"

    def test_token_ids_travel_with_the_event(self) -> None:
        """A Stored has the tokens of each block next to its hash."""
        sink = CapturingSink()
        manager = self._make(sink)
        tokens = [[1] * manager.block_size, [2] * manager.block_size]
        manager.use([1, 2], token_ids=tokens)
        published = [list(block) for event in sink.router_events for block in event.token_ids or ()]
        assert tokens == published, f"blocks with the tokens {tokens} were stored; the events had {published}"

    def test_a_sink_that_raises_does_not_stop_it(self) -> None:
        """When its sink raises, a manager completes the move, and may then raise; the id of each event is used up."""
        refusing = RaisingSink()
        manager = self._make(refusing)
        blocks = list(range(1, manager.num_blocks + 1))
        with suppress(NotTaken):
            expect_served(manager, blocks, len(blocks))
        expect_counts(manager, active=len(blocks), references=len(blocks), inactive=0)
        expect_resident(manager, blocks)
        with suppress(NotTaken):
            manager.deref(blocks[::-1])
        del refusing.refused[:]
        with suppress(NotTaken):
            expect_served(manager, [100], 1)
        expect_counts(manager, active=1, references=1, inactive=len(blocks) - 1)
        kinds = sorted(type(event.data).__name__ for event in refusing.refused)
        assert kinds == ["Removed", "Stored"], (
            f"a Use that evicts a block published {kinds} to a sink that refuses each event; expected one Removed and "
            "one Stored"
        )
        sink = CapturingSink()
        manager.sink = sink
        manager.use([101])
        ids = [event.event_id for event in sink.events]
        assert ids and ids[0] > 0, f"after an event that its sink refused, the next ids were {ids}; expected 1 or more"

    def test_without_a_sink_no_event_id_is_used_up(self) -> None:
        """A manager without a sink uses no event ids."""
        manager = self._make(None)
        expect_served(manager, [1, 2], 2)
        expect_counts(manager, active=2, references=2, inactive=0)
        assert manager.take_event_id() == 0, "event ids were used up without a sink"

    def test_two_managers_share_nothing(self) -> None:
        """Two managers have no block in common."""
        harness = self.make_harness(workers=2)
        one, other = (harness.worker(i).manager for i in (0, 1))
        if one is other:
            refuse(self, "the same manager was made twice; each worker has one of its own")
        one.use([1, 2])
        expect_counts(other, active=0, references=0, inactive=0)
        expect_resident(other, [])
        other.use([1])
        expect_references(one, {1: 1, 2: 1})
        harness.events.assert_no_event_errors()

    # ------------------------------------------------------------------------------------ what is refused

    def test_a_deref_of_what_is_not_held_is_refused_and_changes_nothing(self) -> None:
        """A Deref of blocks that are unknown, inactive or held less often is refused. With `forgiving` it drops the
        references that are held, and ignores the rest.
        """
        for blocks in ([9], [2], [1, 1], [OTHER_PARTIAL], [PARTIAL, PARTIAL]):
            if self.forgiving:
                self._expect_silence(Deref(blocks))
            else:
                self._expect_refused(Deref(blocks))

    def test_a_promote_of_no_partial_block_is_refused_and_changes_nothing(self) -> None:
        """A Promote of an unknown partial block is refused."""
        self._expect_refused(Promote(OTHER_PARTIAL, 9, None, 9, 9))

    def test_a_use_that_is_not_well_formed_is_refused_and_changes_nothing(self) -> None:
        """A Use is refused if its parent is partial or a block is neither a hash nor partial, and, without `forgiving`,
        if its lists differ in length.
        """
        self.spec()  # fails the test if the manager refuses the block size
        tokens = [[1] * self.block_size]
        lengths = (Use([9], [9, 10], [9]), Use([9], [9], [9, 10]), Use([9], [9], [9], tokens * 2))
        for move in (
            *(() if self.forgiving else lengths),
            Use([9], [9], [9], parent=PARTIAL),
            Use(["nine"], [9], [9]),  # type: ignore[list-item]  # the invalid value under test
            Use([-1], [9], [9]),
        ):
            self._expect_refused(move)

    def test_an_unknown_parent_is_refused_and_changes_nothing(self) -> None:
        """`use` and `promote` refuse an unknown parent."""
        self._expect_refused("use([9], parent=77)", lambda manager: manager.use([9], parent=77))
        self._expect_refused("promote(PARTIAL, 9, parent=77)", lambda manager: manager.promote(PARTIAL, 9, parent=77))

    def test_what_is_no_move_is_refused_and_changes_nothing(self) -> None:
        """A value that is not a move is refused."""
        self._expect_refused("a move")

    def _expect_silence(self, move: Deref) -> None:
        """Check that a Deref drops the references that are held, and ignores the rest."""
        __tracebackhide__ = True
        manager, events = self._start()
        manager.use([1, 2, PARTIAL])
        manager.deref(2)
        events.take()
        held = {block: 1 for block in (1, PARTIAL) if block not in move.blocks}
        manager.process(move)
        expect_references(manager, held)
        expect_resident(manager, [1, 2])
        expect_published(events, [], f"{move}")

    def _expect_refused(self, move: Any, do: Callable[[KvManager], Any] | None = None) -> None:
        __tracebackhide__ = True
        manager, events = self._start()
        manager.use([1, 2, PARTIAL])
        manager.deref(2)
        events.take()
        before = state_of(manager)
        try:
            answer = manager.process(move) if do is None else do(manager)
        except MoveError:
            pass
        else:
            raise AssertionError(f"{move} breaks a rule, and was taken: {answer!r}; expected a MoveError")
        expect_unchanged(manager, before, f"{move}, which was refused,")
        expect_published(events, [], f"{move}, which was refused,")

    # --------------------------------------------------------------------------------------- in any traffic

    def test_every_block_is_somewhere_in_any_traffic(self) -> None:
        """After each move the counts add up, and the events agree with the resident blocks."""
        for seed in range(5):
            manager, events = self._start(8)
            traffic = MoveTraffic(manager, seed, fitting=self.forgiving)
            for _ in range(80):
                traffic.step()
                held = traffic.references
                expect_references(manager, held)
                inactive, resident = manager.inactive_blocks(), list(manager.resident())
                partial = sum(isinstance(block, UUID) for block in held)
                assert sorted(resident) == sorted([*inactive, *(b for b in held if isinstance(b, int))]), (
                    f"resident() is {value_text(sorted(resident))}; in use is {value_text(held)} and inactive "
                    f"{value_text(inactive)}"
                )
                expect_counts(
                    manager,
                    active=len(resident) - len(inactive) + partial,
                    references=sum(held.values()),
                    inactive=len(inactive),
                )
                assert len(resident) + partial <= 8, f"{len(resident) + partial} blocks in a manager of 8"
                events.assert_no_event_errors()
