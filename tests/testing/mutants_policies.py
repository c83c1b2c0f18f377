"""Eviction policies with one fault each."""

from itertools import count

from contract_runs import Mutants

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.testing import EvictionContract
from pytest_kvmock.values.plh import lineage_position

POLICIES = Mutants(EvictionContract)


class Lru(EvictionContract):
    """The contract over the `Subject` of a mutant."""

    prefix_closed = True

    def make_policy(self):
        return self.Subject()


@POLICIES.breaks(
    "test_a_reused_block_is_not_evictable",
    "test_a_block_freed_again_is_evicted_once",
    "test_nothing_is_left_after_a_clear",
    "test_no_block_is_lost_or_doubled_in_a_long_life",
    "test_a_manager_with_it_publishes_what_it_does",
    ends_in=(RuntimeError,),
)
class ForgetsThatABlockIsReused(Lru):
    class Subject(LruPolicy):
        def __init__(self):
            super().__init__()
            self.all = []

        def insert(self, slots):
            self.all += slots

        def remove(self, slots):
            pass

        def evict(self, count):
            gone, self.all = self.all[:count], self.all[count:]
            return gone

        def order(self):
            return list(self.all)


@POLICIES.breaks("test_a_new_policy_has_nothing_to_evict", "test_two_policies_share_nothing")
class SharesItsQueue(Lru):
    queue = LruPolicy()

    def make_policy(self):
        made = LruPolicy()
        made.order, made.evict, made.insert = self.queue.order, self.queue.evict, self.queue.insert
        if not self.queue.order():
            self.queue.insert([_stray_slot()])
        return made


def _stray_slot():
    slot = Slot()
    slot.name = 77
    return slot


@POLICIES.breaks("test_two_policies_share_nothing")
class IsOneForAll(Lru):
    only = LruPolicy()

    def make_policy(self):
        return self.only


@POLICIES.breaks("test_a_freed_block_is_evicted_once", "test_all_are_evicted_when_more_are_asked_for")
class KeepsWhatItEvicts(Lru):
    class Subject(LruPolicy):
        def evict(self, count):
            return self.order()[:count]


@POLICIES.breaks("test_no_more_are_evicted_than_are_asked_for")
class GivesOneWhenAskedForNone(Lru):
    class Subject(LruPolicy):
        def evict(self, count):
            return super().evict(max(count, 1))


@POLICIES.breaks(
    "test_all_are_evicted_when_more_are_asked_for",
    "test_many_are_evicted_as_one_by_one",
    "test_many_are_registered_after_many_were_evicted",
    "test_a_slot_may_be_registered_anew",
    "test_a_cleared_policy_can_be_used",
)
class GivesOneAtMost(Lru):
    class Subject(LruPolicy):
        def evict(self, count):
            return super().evict(min(count, 1))


@POLICIES.breaks("test_order_lists_evictions_in_order")
class ForetellsBackwards(Lru):
    class Subject(LruPolicy):
        def order(self):
            return super().order()[::-1]


@POLICIES.breaks("test_order_changes_nothing")
class TurnsWhenLookedAt(Lru):
    class Subject(LruPolicy):
        def order(self):
            if first := super().evict(1):
                self.insert(first)
            return super().order()


@POLICIES.breaks(
    "test_blocks_freed_one_by_one_are_evicted_as_those_freed_together",
    "test_no_block_is_lost_or_doubled_in_a_long_life",
)
class ForgetsWhatIsFreedAlone(Lru):
    class Subject(LruPolicy):
        def insert(self, slots):
            if len(slots) > 1:
                super().insert(slots)


@POLICIES.breaks("test_a_block_in_use_is_not_evictable", "test_a_slot_may_be_registered_anew")
class TakesWhatIsRegisteredForIdle(Lru):
    class Subject(LruPolicy):
        def _on_register(self, slots, places=None):
            self.insert(slots)


@POLICIES.breaks("test_a_touch_makes_nothing_evictable")
class TakesATouchForAFree(Lru):
    class Subject(LruPolicy):
        def _on_touch(self, slot):
            self.insert([slot])


@POLICIES.breaks("test_nothing_is_left_after_a_clear", "test_a_cleared_policy_can_be_used")
class KeepsAllThroughAClear(Lru):
    class Subject(LruPolicy):
        def clear(self):
            pass


@POLICIES.breaks("test_slots_stay_as_the_manager_filled_them")
class WritesIntoSlots(Lru):
    class Subject(LruPolicy):
        def evict(self, count):
            gone = super().evict(count)
            for slot in gone:
                slot.refs = -1
            return gone


@POLICIES.breaks("test_a_chain_is_evicted_whole")
class TakesTheRootFirst(Lru):
    class Subject(LruPolicy):
        def evict(self, count):
            chosen = sorted(super().evict(99), key=lambda slot: lineage_position(slot.plh))
            self.insert(chosen[count:])
            return chosen[:count]


@POLICIES.breaks("test_the_same_life_gives_the_same_evictions")
class GoesEachTimeAnotherWay(Lru):
    lives = count()

    class Subject(LruPolicy):
        def __init__(self):
            super().__init__()
            self.backwards = next(GoesEachTimeAnotherWay.lives) % 2

        def order(self):
            return super().order()[:: -1 if self.backwards else 1]

        def evict(self, most):
            chosen = self.order()[:most]
            self.remove(chosen)
            return chosen


@POLICIES.breaks("test_a_look_up_by_place_finds_no_other_block")
class FindsAnything(Lru):
    class Subject(LruPolicy):
        def _find(self, plh):
            return next(iter(self.order()), None)
