"""The promises of every eviction policy, as tests that a policy's test class inherits.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.drafts import play, random_traffic
from pytest_kvmock.testing.manager.slots import Life, Slots, filled_by_manager, slot_names
from pytest_kvmock.testing.subject import call_with, check_offers, refuse
from pytest_kvmock.values.plh import lineage_hash


class EvictionContract:
    """Tests that hold for every eviction policy.

    A subclass defines `make_policy`::

        class TestS3Fifo(EvictionContract):
            def make_policy(self, capacity):
                return S3Fifo(capacity)

    Attributes:
        capacity: blocks that a policy is made for; no test uses more.
        prefix_closed: whether a chain that was freed tail first is evicted tail first, so that a prefix stays.
    """

    capacity: ClassVar[int] = 16
    prefix_closed: ClassVar[bool] = False

    def make_policy(self, *args: Any, **kwargs: Any) -> EvictionPolicy:  # noqa: ARG002 - for those who define it
        """Make a new policy. A subclass defines this, without arguments or with the capacity in blocks."""
        __tracebackhide__ = True
        refuse(self, "define make_policy(self) or make_policy(self, capacity), which makes a new eviction policy")

    def _new(self) -> EvictionPolicy:
        __tracebackhide__ = True
        policy = call_with(self, self.make_policy, "make_policy", self.capacity)
        check_offers(self, policy, EvictionPolicy, "make_policy")
        return policy

    def _start(self) -> Slots:
        __tracebackhide__ = True
        return Slots(self._new())

    # ------------------------------------------------------------------------------------------- what can be evicted

    def test_a_new_policy_has_nothing_to_evict(self) -> None:
        """A new policy has nothing to evict."""
        policy = self._new()
        assert slot_names(policy.order()) == [], f"order() of a new policy is {policy.order()}; expected nothing"
        evicted = policy.evict(1)
        assert slot_names(evicted) == [], f"evict(1) of a new policy gave {evicted}; expected nothing"

    def test_a_block_in_use_is_not_evictable(self) -> None:
        """A block that was registered and not freed is active."""
        slots = self._start()
        slots.chain(3)
        slots.expect_evictable([])

    def test_a_freed_block_is_evicted_once(self) -> None:
        """A freed block can be evicted once; the policy then forgets it."""
        slots = self._start()
        slots.free(slots.chain(1))
        slots.expect_evicted([1], 1)
        slots.expect_evicted([], 1)
        slots.expect_evictable([])

    def test_no_more_are_evicted_than_are_asked_for(self) -> None:
        """The count given to evict is a limit, and may be 0."""
        slots = self._start()
        slots.free(slots.roots(4))
        for asked in (0, 1, 2):
            evicted = slots.policy.evict(asked)
            assert asked == len(evicted), f"evict({asked}) of blocks enough gave {len(evicted)} blocks"

    def test_all_are_evicted_when_more_are_asked_for(self) -> None:
        """An evict of more blocks than there are evicts all."""
        slots = self._start()
        slots.free(slots.roots(3))
        slots.expect_evicted([1, 2, 3], 5)
        slots.expect_evictable([])

    def test_a_reused_block_is_not_evictable(self) -> None:
        """A block that a look-up matched is active again."""
        slots = self._start()
        first, second, third = slots.roots(3)
        slots.free([first, second, third])
        slots.hold([second])
        slots.expect_evictable([1, 3])
        slots.expect_evicted([1, 3], 3)

    def test_a_block_freed_again_is_evicted_once(self) -> None:
        """Reuse leaves no second entry behind."""
        slots = self._start()
        both = slots.roots(2)
        slots.free(both)
        for _ in range(5):
            slots.hold(both)
            slots.free(both)
        slots.expect_evicted([1, 2], 16)
        slots.expect_evictable([])

    def test_a_touch_makes_nothing_evictable(self) -> None:
        """A match of an active block may change only the order."""
        slots = self._start()
        first, second = slots.roots(2)
        slots.policy._on_touch(first)
        slots.expect_evictable([])
        slots.free([first, second])
        slots.expect_evicted([1, 2], 2)

    def test_a_chain_is_evicted_whole(self) -> None:
        """Every block of a chain can be evicted; with `prefix_closed`, a child before its parent."""
        slots = self._start()
        slots.free(slots.chain(6)[::-1])
        evicted = [name for _ in range(6) for name in slot_names(slots.policy.evict(1))]
        assert sorted(evicted) == [1, 2, 3, 4, 5, 6], (
            f"of a freed chain of the blocks 1 to 6 these were evicted: {evicted}"
        )
        if self.prefix_closed:
            assert evicted == [6, 5, 4, 3, 2, 1], (
                f"prefix_closed: the chain 1 to 6, freed tail first, was evicted in the order {evicted}; expected "
                "tail first"
            )

    # ------------------------------------------------------------------------------------- in which order

    def test_order_lists_evictions_in_order(self) -> None:
        """Blocks are evicted in the order that order() lists them."""
        slots = self._start()
        chain, roots = slots.chain(4), slots.roots(4)
        for freed in (chain[::-1], roots):
            slots.free(freed)
        slots.hold(roots[1:3])
        slots.free(roots[1:3])
        expected = slot_names(slots.policy.order())
        evicted = [name for _ in range(8) for name in slot_names(slots.policy.evict(1))]
        assert expected == evicted, f"order() gave {expected}; evicted one by one they came in the order {evicted}"

    def test_order_changes_nothing(self) -> None:
        """The same blocks are evicted with and without a call of order()."""
        looked, blind = self._start(), self._start()
        for slots in (looked, blind):
            slots.free(slots.chain(4)[::-1])
            slots.free(slots.roots(4))
        once, twice = slot_names(looked.policy.order()), slot_names(looked.policy.order())
        assert once == twice, f"order() gave {once}, and then {twice}"
        expected = slot_names(blind.policy.evict(8))
        evicted = slot_names(looked.policy.evict(8))
        assert expected == evicted, f"evict(8) gave {expected}, but {evicted} where order() was asked before"

    def test_many_are_evicted_as_one_by_one(self) -> None:
        """evict(n) is n times evict(1)."""
        bulk, single = self._start(), self._start()
        for slots in (bulk, single):
            slots.free(slots.chain(5)[::-1])
            slots.free(slots.roots(5))
        evicted = slot_names(bulk.policy.evict(7))
        expected = [name for _ in range(7) for name in slot_names(single.policy.evict(1))]
        assert expected == evicted, f"evicted one by one they were {expected}; evict(7) gave {evicted}"

    def test_blocks_freed_one_by_one_are_evicted_as_those_freed_together(self) -> None:
        """Inserting n slots one by one has the effect of one insert of n."""
        together, single = self._start(), self._start()
        freed = [slots.chain(4)[::-1] + slots.roots(2) for slots in (together, single)]
        together.policy.insert(freed[0])
        for slot in freed[1]:
            single.policy.insert((slot,))
        expected, evicted = (slot_names(slots.policy.evict(6)) for slots in (together, single))
        assert expected == evicted, (
            f"freed by one insert, evict(6) gave {expected}; freed by insert, one at a time, it gave {evicted}"
        )

    def test_the_same_life_gives_the_same_evictions(self) -> None:
        """Evictions depend neither on random numbers nor on object addresses."""
        expected = Life(self._start(), self.capacity, seed=1).live(300)
        again = Life(self._start(), self.capacity, seed=1).live(300)
        assert expected == again, f"two policies with the same life evicted {expected[:12]}... and {again[:12]}..."

    # --------------------------------------------------------------------------------------------- a whole life

    def test_a_slot_may_be_registered_anew(self) -> None:
        """An evicted slot comes back with another block; nothing of the old block is left."""
        slots = self._start()
        slots.free(slots.chain(3)[::-1])
        evicted = slots.policy.evict(3)
        slots.register(evicted, after=None)
        slots.expect_evictable([])
        slots.free(evicted[::-1])
        slots.expect_evicted([4, 5, 6], 4)

    def test_many_are_registered_after_many_were_evicted(self) -> None:
        """One evict, then one register of all slots, as for the new blocks of one Use."""
        slots = self._start()
        kept = slots.chain(2)
        slots.free(kept[::-1])
        slots.free(slots.chain(8)[::-1])
        slots.hold(kept)
        evicted = slots.policy.evict(8)
        assert len(evicted) == 8, f"evict(8) of 8 blocks gave {len(evicted)}"
        slots.register(evicted, after=kept[-1])
        slots.expect_evictable([])
        slots.free([*kept, *evicted][::-1])
        slots.expect_evicted([1, 2, *range(11, 19)], 16)

    def test_nothing_is_left_after_a_clear(self) -> None:
        """A cleared policy has neither inactive nor registered blocks."""
        slots = self._start()
        chain = slots.chain(5)
        slots.free(chain[::-1])
        slots.hold(chain[:1])
        slots.policy.clear()
        slots.expect_evictable([])
        slots.expect_evicted([], 5)

    def test_a_cleared_policy_can_be_used(self) -> None:
        """Slots of a cleared policy can be registered again."""
        slots = self._start()
        chain = slots.chain(5)
        slots.free(chain[::-1])
        slots.policy.clear()
        slots.register(chain, after=None)
        slots.expect_evictable([])
        slots.free(chain[::-1])
        slots.expect_evicted([6, 7, 8, 9, 10], 6)

    def test_slots_stay_as_the_manager_filled_them(self) -> None:
        """A policy writes only `place` and `above`."""
        slots = self._start()
        chain = slots.chain(4)
        slots.policy._on_touch(chain[0])
        slots.free(chain[::-1])
        slots.hold(chain[:2])
        slots.free(chain[:2][::-1])
        before = [filled_by_manager(slot) for slot in chain]
        slots.policy.order()
        evicted = slots.policy.evict(4)
        slots.policy.clear()
        assert len({id(slot) for slot in evicted} & {id(slot) for slot in chain}) == 4, (
            f"evict(4) gave {evicted}, which are not the slots that were inserted"
        )
        for slot, expected in zip(chain, before, strict=True):
            assert expected == filled_by_manager(slot), (
                f"the policy wrote into {slot}: {filled_by_manager(slot)}; expected {expected}"
            )

    def test_two_policies_share_nothing(self) -> None:
        """Two policies have no block in common."""
        mine, yours = self._start(), self._start()
        if mine.policy is yours.policy:
            refuse(self, "make_policy gave the same object twice; each manager has a policy of its own")
        mine.free(mine.roots(3))
        yours.expect_evictable([])
        yours.expect_evicted([], 1)
        yours.policy.clear()
        mine.expect_evictable([1, 2, 3])

    def test_a_look_up_by_place_finds_no_other_block(self) -> None:
        """`_find` is called for hashes that are not registered. Blocks at different places do not collide."""
        slots = self._start()
        policy = slots.policy
        slots.free(slots.chain(4)[::-1])
        unknown = lineage_hash(999, 998, 2)
        assert policy._find(unknown) is None, f"find of an unknown hash gave {policy._find(unknown)}"
        assert policy._collisions == 0, f"collisions is {policy._collisions} where each block has a place of its own"
        active = slots.chain(2)
        assert policy._first_refused(active) is None, (
            f"refused gave {policy._first_refused(active)}, which can be inserted"
        )

    def test_no_block_is_lost_or_doubled_in_a_long_life(self) -> None:
        """Requests come and finish: exactly the blocks that no request holds can be evicted."""
        for seed in range(5):
            Life(self._start(), self.capacity, seed=seed).live(300)

    def test_a_manager_with_it_publishes_what_it_does(self) -> None:
        """A block manager with this policy and a router stay in sync under random traffic."""
        for seed in range(3):
            play(self._manager_world(), random_traffic(seed, 80, most_blocks=self.capacity // 3))

    def _manager_world(self) -> RouterHarness:
        spec = BackendSpec.of_policy(
            "under-contract", lambda _: self._new(), models=type(self).__name__, prefix_closed=self.prefix_closed
        )
        return RouterHarness(EngineProfile(block_size=4, num_blocks=self.capacity), spec)
