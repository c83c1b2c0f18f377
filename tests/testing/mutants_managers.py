"""Block managers with one fault each."""

from typing import ClassVar
from uuid import UUID

from contract_runs import Mutants

from pytest_kvmock import Cleared, KvCacheEvent, Removed, Stored
from pytest_kvmock.engines.base.manager_base import EventPublisher
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.testing import ManagerContract
from pytest_kvmock.values import Deref, MoveError, Promote, Use

MANAGERS = Mutants(ManagerContract)


class Spoilt(LogicalManager):
    """A right manager; `Says` may be another publisher."""

    Says = EventPublisher

    def __init__(self, num_blocks, block_size, sink):
        super().__init__(
            backend="spoilt", eviction=LruPolicy(), num_blocks=num_blocks, block_size=block_size, sink=sink
        )
        self._publisher = self.Says(sink, 0)


class Lru(ManagerContract):
    """The contract over the `Subject` of a mutant."""

    def make_manager(self, num_blocks, block_size, sink):
        return self.Subject(num_blocks, block_size, sink)


@MANAGERS.breaks("test_a_full_manager_evicts_as_many_as_it_needs", "test_every_block_is_somewhere_in_any_traffic")
class ForgetsRemoved(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def publish(self, data, *beside):
                if not isinstance(data, Removed):
                    super().publish(data, *beside)


@MANAGERS.breaks("test_inactive_blocks_are_evicted_in_the_order_in_which_they_are_listed")
class ListsBackwards(Lru):
    class Subject(Spoilt):
        def inactive_blocks(self):
            return super().inactive_blocks()[::-1]


@MANAGERS.breaks(
    "test_used_blocks_are_stored_in_order_under_one_another",
    "test_blocks_are_stored_under_the_parent_that_is_named",
    "test_what_follows_cached_blocks_is_stored_under_the_last_of_them",
    "test_a_partial_block_becomes_a_full_one",
)
class MakesEveryBlockARoot(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def publish(self, data, *beside):
                if not isinstance(data, Stored):
                    super().publish(data, *beside)
                    return
                for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                    super().publish(Stored(None, (block,), (local,)))


@MANAGERS.breaks("test_event_ids_count_from_0", "test_an_id_that_is_taken_is_used_up")
class CountsInTwos(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def take_id(self):
                self.next_event_id += 1
                return super().take_id()


@MANAGERS.breaks(
    "test_a_cached_block_is_used_again_without_an_event",
    "test_a_block_in_use_gets_one_more_reference",
)
class StoresWhatIsReused(Lru):
    class Subject(Spoilt):
        def _use(self, move):
            served = super()._use(move)
            full = tuple(block for block in move.blocks[:served] if not isinstance(block, UUID))
            if full:
                self._publisher.publish(Stored(None, full, full))
            return served


@MANAGERS.breaks("test_a_block_in_use_gets_one_more_reference", "test_a_partial_block_takes_room_and_is_no_event")
class CountsBlocksForReferences(Lru):
    class Subject(Spoilt):
        @property
        def num_active_block_refs(self):
            return self.num_active_blocks


@MANAGERS.breaks("test_a_block_is_in_use_until_its_last_reference_is_freed")
class LetsGoOfAllReferences(Lru):
    class Subject(Spoilt):
        def _deref(self, blocks):
            return super()._deref([block for block in blocks for _ in range(self.references(block))])


@MANAGERS.breaks("test_a_deref_may_name_a_block_once_for_each_reference")
class FreesABlockOnceForEachName(Lru):
    class Subject(Spoilt):
        again = 0

        def _deref(self, blocks):
            self.again += len(blocks) - len(set(blocks))
            return super()._deref(blocks)

        @property
        def num_inactive_blocks(self):
            return super().num_inactive_blocks + self.again


@MANAGERS.breaks("test_a_deref_may_name_a_block_once_for_each_reference")
class ListsABlockOnceForEachName(Lru):
    class Subject(Spoilt):
        again = ()

        def _deref(self, blocks):
            self.again = tuple(block for block in set(blocks) for _ in range(blocks.count(block) - 1))
            return super()._deref(blocks)

        def inactive_blocks(self):
            return [*super().inactive_blocks(), *self.again]


@MANAGERS.breaks("test_a_deref_may_name_a_block_once_for_each_reference", ends_in=(MoveError,))
class RefusesANameThatRepeats(Lru):
    forgiving = False

    class Subject(Spoilt):
        def _deref(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise MoveError("a block is named twice")
            return super()._deref(blocks)


@MANAGERS.breaks("test_a_freed_block_stays_cached")
class ForgetsWhatIsFreed(Lru):
    class Subject(Spoilt):
        def _deref(self, blocks):
            super()._deref(blocks)
            if not self.num_active_blocks:
                self.clear()
            return 1


@MANAGERS.breaks("test_a_new_manager_is_empty", "test_without_a_sink_no_event_id_is_used_up")
class SaysThatItIsThere(Lru):
    class Subject(Spoilt):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self._publisher.publish(Cleared())
            if self.sink is None:
                self.take_event_id()


@MANAGERS.breaks("test_blocks_in_use_are_never_evicted")
class AnswersWhatItWasAsked(Lru):
    class Subject(Spoilt):
        def _use(self, move):
            super()._use(move)
            return len(move.blocks)


@MANAGERS.breaks("test_what_is_used_again_is_not_evicted", "test_every_block_is_somewhere_in_any_traffic")
class ListsWhatIsInUseToo(Lru):
    class Subject(Spoilt):
        def inactive_blocks(self):
            return list(self.resident())


@MANAGERS.breaks("test_a_freed_partial_block_is_not_cached")
class KeepsPartialBlocks(Lru):
    class Subject(Spoilt):
        def _deref(self, blocks):
            return super()._deref([block for block in blocks if not isinstance(block, UUID)])


@MANAGERS.breaks(
    "test_a_partial_block_that_becomes_one_in_use_gives_its_room_back",
    "test_a_partial_block_that_becomes_a_cached_one_gives_its_room_back",
)
class StoresWhatIsPromotedAgain(Lru):
    class Subject(Spoilt):
        def _promote(self, move):
            known = move.block in self.resident()
            super()._promote(move)
            if known:
                self._publisher.publish(Stored(move.parent, (move.block,), (move.local_hash,)))
            return 1


@MANAGERS.breaks("test_clear_drops_all_and_publishes_a_cleared")
class ClearsWithoutAWord(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def publish(self, data, *beside):
                if not isinstance(data, Cleared):
                    super().publish(data, *beside)


@MANAGERS.breaks("test_clear_does_nothing_while_a_block_is_in_use")
class ClearsAroundWhatIsInUse(Lru):
    class Subject(Spoilt):
        def clear(self):
            return super().clear() or not self._publisher.publish(Cleared())


@MANAGERS.breaks("test_looking_changes_nothing")
class LooksWithItsHands(Lru):
    class Subject(Spoilt):
        def references(self, block):
            if block in self.inactive_blocks():
                self.use([block])
                self.deref(block)
            return super().references(block)


@MANAGERS.breaks("test_prefill_cost_counts_what_is_cached")
class CostsAsIfNothingWereCached(Lru):
    class Subject(Spoilt):
        def prefill_cost(self, sequence):
            cost = super().prefill_cost(sequence)
            return type(cost)(len(sequence.unique_blocks), sequence.num_input_tokens, cost.cached_tokens)


@MANAGERS.breaks("test_token_ids_travel_with_the_event")
class LosesTheTokens(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def publish(self, data, token_ids=None, *tier):
                super().publish(data, None, *tier)


@MANAGERS.breaks("test_a_sink_that_raises_does_not_stop_it", ends_in=(OSError,))
class StopsWhenNobodyListens(Lru):
    class Subject(Spoilt):
        class Says(EventPublisher):
            def publish(self, data, *beside):
                if self.sink is not None:
                    self.sink.publish(KvCacheEvent(self.take_id(), data, 0), *beside)


@MANAGERS.breaks("test_two_managers_share_nothing")
class SharesItsBlocks(Lru):
    made: ClassVar = []

    class Subject(Spoilt):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            if SharesItsBlocks.made:
                self.__dict__.update(SharesItsBlocks.made[0].__dict__)
            SharesItsBlocks.made.append(self)


def taking(kind):
    """Return a manager that accepts any move of a kind, and ignores one that breaks a rule."""

    class Taking(Spoilt):
        def process(self, move):
            try:
                return super().process(move)
            except MoveError:
                if isinstance(move, kind):
                    return 1
                raise

    return Taking


@MANAGERS.breaks(
    "test_a_deref_of_what_is_not_held_is_refused_and_changes_nothing",
    "test_a_deref_may_name_a_block_once_for_each_reference",
)
class TakesAnyDeref(Lru):
    Subject = taking(Deref)


@MANAGERS.breaks("test_a_promote_of_no_partial_block_is_refused_and_changes_nothing")
class TakesAnyPromote(Lru):
    Subject = taking(Promote)


@MANAGERS.breaks("test_a_use_that_is_not_well_formed_is_refused_and_changes_nothing")
class TakesAnyUse(Lru):
    Subject = taking(Use)


@MANAGERS.breaks("test_what_is_no_move_is_refused_and_changes_nothing")
class TakesAnything(Lru):
    Subject = taking(str)


@MANAGERS.breaks("test_an_unknown_parent_is_refused_and_changes_nothing")
class MakesARootOfWhatHasAnUnknownParent(Lru):
    class Subject(Spoilt):
        def _known(self, parent, what):
            try:
                return super()._known(parent, what)
            except MoveError:
                return None


@MANAGERS.breaks(
    "test_blocks_in_use_are_never_evicted",
    "test_a_freed_partial_block_is_not_cached",
    "test_a_deref_of_what_is_not_held_is_refused_and_changes_nothing",
    "test_a_deref_may_name_a_block_once_for_each_reference",
    ends_in=(MoveError,),
)
class IsSaidToBeForgivingAndIsNot(ManagerContract):
    backend = "lru"
    forgiving = True
