"""Router indexes with one fault each."""

from collections import Counter, deque
from contextlib import suppress
from threading import Event, current_thread, main_thread
from typing import ClassVar

import draft_readers
import hybrid_readers
from bounded_indexes import BoundedIndex, HangsUnderTheRootWhatItForgot, RemovesNothingOnceItIsFull
from contract_runs import Mutants
from forgetful_indexes import FORGETFUL
from reporting_indexes import REPORTED
from sharing_indexes import SHARED
from threaded_indexes import UnlockedApply
from tiered_indexes import FOUND_BY, contract_of
from truncating_indexes import HashIndex, KeyedTokenIndex, TokenIndex
from untold_indexes import UNTOLD

from pytest_kvmock import (
    BACKENDS,
    Cleared,
    RadixIndex,
    RadixIndexError,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    block_hashes,
)
from pytest_kvmock.oracle.index.index import BlockNotFound
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.values import Updated

INDEXES = Mutants(IndexContract)


class Tree:
    """A right index, from which the others derive."""

    def __init__(self):
        self.tree = RadixIndex()
        self.tree._strict_removed = True  # as when the corpus was recorded: every unknown block is an error

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


class Radix(IndexContract):
    """The contract over the `Subject` of a mutant."""

    def make_index(self):
        return self.Subject()


def with_data(event, data):
    return RouterEvent(event.worker_id, type(event.event)(event.event.event_id, data, event.event.dp_rank))


@INDEXES.breaks(
    "test_a_new_index_is_empty",
    "test_a_longer_prompt_is_found_as_far_as_it_is_held",
    "test_another_prompt_is_not_found",
)
class AnswersWhatItWasAsked(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            return {(0, 0): max(len(local_hashes), 1)}


@INDEXES.breaks("test_a_stored_prompt_is_found_whole", "test_blocks_that_come_later_belong_below_their_parent")
class KeepsTheFirstBlockOfAnEvent(Radix):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                event = with_data(event, Stored(data.parent_hash, data.block_hashes[:1], data.tokens_hashes[:1]))
            super().apply(event)


@INDEXES.breaks("test_a_shorter_prompt_is_found_up_to_its_end", "test_a_prompt_that_parts_is_found_up_to_there")
class CountsAllThatAWorkerHas(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            found = super().find_matches(local_hashes)
            return {key: self.tree.num_blocks(*key) for key in found}


@INDEXES.breaks("test_blocks_are_found_in_their_place_alone", "test_it_follows_live_traffic")
class MatchesByContentAlone(Radix):
    class Subject:
        def __init__(self):
            self.held = {}

        def apply(self, event):
            held, data = self.held.setdefault(event.worker_id, {}), event.event.data
            if isinstance(data, Stored):
                held.update(zip(data.block_hashes, data.tokens_hashes, strict=True))
            else:
                for block in list(getattr(data, "block_hashes", held)):
                    held.pop(block, None)

        def find_matches(self, local_hashes):
            out = {}
            for worker, held in self.held.items():
                known = set(held.values())
                out[worker] = next((i for i, h in enumerate(local_hashes) if h not in known), len(local_hashes))
            return out


@INDEXES.breaks(
    "test_blocks_that_come_later_belong_below_their_parent", "test_chains_that_share_a_prefix_are_both_found"
)
class HangsEverythingUnderTheRoot(Radix):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                event = with_data(event, Stored(None, data.block_hashes, data.tokens_hashes))
            super().apply(event)


@INDEXES.breaks("test_a_block_stored_twice_changes_nothing")
class RefusesABlockTwice(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                if data.block_hashes in self.seen:
                    raise KeyError(data.block_hashes)
                self.seen.add(data.block_hashes)
            super().apply(event)


@INDEXES.breaks("test_a_long_prompt_is_found_whole")
class GivesUpAfterAHundredBlocks(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            return super().find_matches(local_hashes[:100])


@INDEXES.breaks(
    "test_workers_are_kept_apart",
    "test_a_prompt_is_found_on_all_workers_beside_one_that_has_more",
    "test_a_removed_block_stays_with_other_workers",
)
class NamesTheBestWorkerAlone(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            found = super().find_matches(local_hashes)
            return {key: blocks for key, blocks in found.items() if blocks == max(found.values())}


@INDEXES.breaks("test_a_worker_may_have_any_number")
class KnowsWorkersByOneByte(Radix):
    class Subject(Tree):
        def apply(self, event):
            super().apply(RouterEvent(event.worker_id % 256, event.event))


@INDEXES.breaks("test_ranks_of_a_worker_are_kept_apart", "test_it_follows_live_traffic")
class TakesAllRanksForOne(Radix):
    class Subject(Tree):
        def apply(self, event):
            super().apply(RouterEvent(event.worker_id, type(event.event)(event.event.event_id, event.event.data, 0)))


@INDEXES.breaks(
    "test_a_removed_block_is_not_found",
    "test_a_removed_block_hides_what_stands_behind_it",
    "test_it_follows_live_traffic",
)
class IgnoresRemoved(Radix):
    class Subject(Tree):
        def apply(self, event):
            if not isinstance(event.event.data, Removed):
                super().apply(event)


@INDEXES.breaks("test_all_blocks_of_a_removed_event_are_removed")
class RemovesTheFirstBlockOfAnEvent(Radix):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            if isinstance(data, Removed):
                event = with_data(event, Removed(data.block_hashes[:1]))
            super().apply(event)


@INDEXES.breaks("test_a_removed_block_hides_what_stands_behind_it")
class LooksOverHoles(Radix):
    class Subject(Tree):
        def apply(self, event):
            if isinstance(event.event.data, Removed) and len(event.event.data.block_hashes) == 1:
                return  # a single removed block stays until those behind it are removed
            super().apply(event)


@INDEXES.breaks("test_a_removed_block_stays_with_other_workers")
class RemovesABlockFromAllWorkers(Radix):
    class Subject(Tree):
        def apply(self, event):
            if isinstance(event.event.data, Removed):
                for worker, _ in self.tree.workers:
                    with suppress(BlockNotFound):
                        super().apply(RouterEvent(worker, event.event))
            else:
                super().apply(event)


@INDEXES.breaks("test_a_removed_block_leaves_its_siblings")
class RemovesAChainFromItsRoot(Radix):
    class Subject(Tree):
        def apply(self, event):
            if isinstance(event.event.data, Removed):
                event = with_data(event, Cleared())
            super().apply(event)


@INDEXES.breaks("test_a_removed_block_can_be_stored_again")
class BuriesWhatWasRemoved(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.buried = set()

        def apply(self, event):
            data = event.event.data
            if isinstance(data, Removed):
                self.buried.update(data.block_hashes)
            elif isinstance(data, Stored) and self.buried & set(data.block_hashes):
                return
            super().apply(event)


@INDEXES.breaks("test_a_cleared_worker_has_nothing", "test_it_follows_live_traffic")
class IgnoresCleared(Radix):
    class Subject(Tree):
        def apply(self, event):
            if not isinstance(event.event.data, Cleared):
                super().apply(event)


@INDEXES.breaks("test_a_cleared_worker_can_store_again")
class ForgetsAClearedWorkerForGood(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.cleared = set()

        def apply(self, event):
            if isinstance(event.event.data, Cleared):
                self.cleared.add(event.worker_id)
            elif event.worker_id in self.cleared:
                return
            super().apply(event)


@INDEXES.breaks("test_clearing_a_worker_that_has_nothing_is_no_error")
class StumblesOverAnEmptyWorker(Radix):
    class Subject(Tree):
        def apply(self, event):
            if isinstance(event.event.data, Cleared) and not self.tree.num_blocks(event.worker_id):
                raise KeyError(event.worker_id)
            super().apply(event)


@INDEXES.breaks("test_a_removed_worker_has_nothing")
class IsNotToldThatAWorkerIsGone(Radix):
    class Subject(Tree):
        def remove_worker(self, worker_id):
            pass


@INDEXES.breaks("test_a_removed_worker_has_nothing")
class WaitsForTheNextIdOfARemovedWorker(IndexContract):
    def make_index(self):
        return TakesHigherIds()


@INDEXES.breaks("test_a_removed_worker_has_nothing")
class RemembersAnswersOverARemoval(IndexContract):
    def make_index(self):
        return Remembers()


class Remembers(Tree):
    """Keeps its answers until the next event."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def apply(self, event):
        self.answers.clear()
        super().apply(event)

    def find_matches(self, local_hashes):
        asked = tuple(local_hashes)
        if asked not in self.answers:
            self.answers[asked] = dict(super().find_matches(local_hashes))
        return self.answers[asked]


@INDEXES.breaks("test_a_removed_worker_has_nothing")
class RemovesWorkersWhoseNumbersBeginAlike(IndexContract):
    def make_index(self):
        return ComparesNumbersAsText()


class ComparesNumbersAsText(HashIndex):
    """Compares worker ids as text."""

    def remove_worker(self, worker_id):
        self.ranks = {key: held for key, held in self.ranks.items() if not str(key[0]).startswith(str(worker_id))}


class TakesHigherIds(Tree):
    """Drops events with ids that it has seen."""

    def __init__(self):
        super().__init__()
        self.last = {}

    def apply(self, event):
        key, event_id = (event.worker_id, event.event.dp_rank), event.event.event_id
        if event_id > self.last.get(key, -1):
            self.last[key] = event_id
            super().apply(event)


@INDEXES.breaks("test_a_question_changes_nothing")
class ForgetsWhatItWasAsked(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            found = super().find_matches(local_hashes)
            if found:
                self.tree = RadixIndex()
            return found


@INDEXES.breaks("test_two_indexes_share_nothing")
class SharesItsTree(Radix):
    class Subject(Tree):
        only: ClassVar = []

        def __init__(self):
            super().__init__()
            if len(self.only) % 2:
                self.tree = self.only[-1]
            self.only.append(self.tree)


@INDEXES.breaks("test_a_cleared_rank_leaves_the_other_ranks", "test_it_follows_live_traffic")
class ClearsAllRanks(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.tree = RadixIndex(clears="worker")


@INDEXES.breaks("test_a_cleared_rank_leaves_the_other_ranks")
class ClearsOneRankOfAnOlderDynamo(Radix):
    clears = "worker"

    class Subject(Tree):
        pass


@INDEXES.breaks("test_a_removed_worker_loses_all_its_ranks")
class ForgetsRankZeroAlone(Radix):
    class Subject(Tree):
        def remove_worker(self, worker_id):
            self.tree.remove_worker_dp_rank(worker_id, 0)


class OneTier(Tree):
    def apply(self, event):
        super().apply(RouterEvent(event.worker_id, event.event))


@INDEXES.breaks("test_what_another_tier_removes_stays_on_the_device", "test_what_another_tier_alone_has_is_not_found")
class TakesAllTiersForOne(Radix):
    class Subject(OneTier):
        pass


@INDEXES.breaks("test_what_another_tier_removes_stays_on_the_device")
class RemovesFromAllTiers(Radix):
    class Subject(OneTier):
        def apply(self, event):
            if isinstance(event.event.data, Removed) or event.storage_tier is StorageTier.DEVICE:
                super().apply(event)


class Tiered(Tree):
    """A right index with tiers, from which the others derive."""

    def find_tiered(self, local_hashes):
        return self.tree.find_tiered(local_hashes)


@INDEXES.breaks("test_a_tier_goes_on_where_the_faster_ones_end", "test_a_block_of_two_tiers_counts_in_the_faster")
class CountsEachTierFromTheRoot(Radix):
    class Subject(Tiered):
        def find_tiered(self, local_hashes):
            total, out = {}, {}
            for tier, scores in self.tree.find_tiered(local_hashes).items():
                total = {key: total.get(key, 0) + scores.get(key, 0) for key in {*total, *scores}}
                out[tier] = dict(total)
            return out


@INDEXES.breaks("test_a_tier_goes_on_from_the_root_where_the_faster_ones_have_nothing")
class ExtendsTheDeviceAlone(Radix):
    class Subject(Tiered):
        def find_tiered(self, local_hashes):
            found = self.tree.find_tiered(local_hashes)
            device = found.get(StorageTier.DEVICE, {})
            return {tier: {key: scores[key] for key in scores if key in device} for tier, scores in found.items()}


@INDEXES.breaks("test_offloaded_blocks_need_no_parent")
class NeedsAParentBelowTheDevice(Radix):
    class Subject(Tiered):
        def __init__(self):
            super().__init__()
            self.known = {None}

        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                if data.parent_hash not in self.known:
                    return
                self.known.update(data.block_hashes)
            super().apply(event)


@INDEXES.breaks("test_a_hole_ends_the_match_of_a_tier")
class RemovesNothingFromTheHost(Radix):
    class Subject(Tiered):
        def apply(self, event):
            if event.storage_tier is not StorageTier.HOST_PINNED or not isinstance(event.event.data, Removed):
                super().apply(event)


@INDEXES.breaks("test_a_removed_takes_blocks_from_its_own_tier")
class RemovesFromAllTiersBelow(Radix):
    class Subject(Tiered):
        def apply(self, event):
            super().apply(event)
            if event.storage_tier is StorageTier.HOST_PINNED and isinstance(event.event.data, Removed):
                with suppress(BlockNotFound):
                    super().apply(RouterEvent(event.worker_id, event.event, StorageTier.DISK))


@INDEXES.breaks("test_a_cleared_or_removed_worker_has_nothing_in_any_tier")
class ClearsTheDeviceAlone(Radix):
    class Subject(Tiered):
        def apply(self, event):
            kept = []
            if isinstance(event.event.data, Cleared):
                kept = [each for each in self.tree.dump_events() if each.storage_tier is not StorageTier.DEVICE]
            super().apply(event)
            for each in kept:
                super().apply(each)


@INDEXES.breaks("test_a_block_is_held_until_its_last_copy_is_removed", "test_it_follows_live_traffic")
class CountsNoCopies(Radix):
    backends = tuple(BACKENDS)

    class Subject(Tree):
        pass


@INDEXES.breaks("test_a_block_is_held_until_its_last_copy_is_removed")
class CountsNoCopiesOfOneBackend(Radix):
    backends = (BACKENDS["vllm_0_19"],)

    class Subject(Tree):
        pass


@INDEXES.breaks("test_it_does_not_grow_with_events")
class RemembersEveryBlock(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def apply(self, event):
            self.seen.update(getattr(event.event.data, "block_hashes", ()))
            super().apply(event)

        def size(self):
            return len(self.seen)


class Sized(Tree):
    """A right index that reports the number of blocks that it knows."""

    def __init__(self):
        super().__init__()
        self.known = set()

    def apply(self, event):
        self.tree.apply(event)
        data = event.event.data
        if isinstance(data, Cleared):
            self.forget(event.worker_id)
        elif event.storage_tier is StorageTier.DEVICE:
            pairs = {(event.worker_id, block) for block in data.block_hashes}
            self.known = self.known | pairs if isinstance(data, Stored) else self.known - pairs

    def forget(self, worker_id):
        self.known = {pair for pair in self.known if pair[0] != worker_id}

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.forget(worker_id)

    def size(self):
        return len(self.known)


@INDEXES.breaks("test_it_does_not_grow_with_events_that_repeat")
class KeepsEveryStored(Radix):
    class Subject(Sized):
        """Keeps every Stored of each block."""

        def __init__(self):
            super().__init__()
            self.of_block = {}

        def apply(self, event):
            super().apply(event)
            for block in event.event.data.block_hashes if isinstance(event.event.data, Stored) else ():
                self.of_block.setdefault((event.worker_id, block), []).append(event)
            self.of_block = {pair: events for pair, events in self.of_block.items() if pair in self.known}

        def size(self):
            return sum(map(len, self.of_block.values()))


@INDEXES.breaks("test_it_does_not_grow_with_events_that_repeat")
class KeepsCopiesThatAreRemoved(IndexContract):
    backends = ("vllm",)

    def make_index(self):
        return CountsUpAlone()


class CountsUpAlone(HashIndex):
    """Drops a block at its last Removed, and never its count."""

    def __init__(self):
        super().__init__(counts=True)
        self.seen = Counter()

    def apply(self, event):
        super().apply(event)
        self.seen.update(getattr(event.event.data, "block_hashes", ()) if isinstance(event.event.data, Stored) else ())

    def size(self):
        return self.seen.total()


class SizedWithin(BoundedIndex):
    """Right except for what the next two do."""

    def size(self):
        return len(self.held)


class ABudgetForEachWorker:
    """One bounded index per worker."""

    def __init__(self):
        self.of = {}

    def apply(self, event):
        self.of.setdefault(event.worker_id, SizedWithin(32)).apply(event)

    def find_matches(self, local_hashes):
        return {key: n for index in self.of.values() for key, n in index.find_matches(local_hashes).items()}

    def remove_worker(self, worker_id):
        self.of.pop(worker_id, None)


@INDEXES.breaks("test_a_bound_holds_for_all_workers_together")
class HasABudgetForEachWorker(IndexContract):
    bounded = bounded_at_most = 32

    def make_index(self):
        return ABudgetForEachWorker()


@INDEXES.breaks("test_a_bound_holds_for_all_workers_together")
class SaysThatItHoldsMoreThanItMay(IndexContract):
    bounded = bounded_at_most = 32

    def make_index(self):
        index = ABudgetForEachWorker()
        index.size = lambda: sum(each.size() for each in index.of.values())
        return index


class Ranks(Tree):
    """A right index that can remove ranks."""

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.tree.remove_worker_dp_rank(worker_id, dp_rank)


@INDEXES.breaks("test_a_removed_rank_leaves_the_others")
class RemovesAllRanksForOne(Radix):
    class Subject(Ranks):
        def remove_worker_dp_rank(self, worker_id, dp_rank):
            self.tree.remove_worker(worker_id)


@INDEXES.breaks("test_a_removed_rank_leaves_the_others")
class RemovesRankZeroForAny(Radix):
    class Subject(Ranks):
        def remove_worker_dp_rank(self, worker_id, dp_rank):
            super().remove_worker_dp_rank(worker_id, 0)


@INDEXES.breaks("test_a_removed_rank_leaves_the_others")
class RemovesTheRankOfAllWorkers(Radix):
    class Subject(Ranks):
        def remove_worker_dp_rank(self, worker_id, dp_rank):
            for worker, rank in [*self.tree.workers]:
                if rank == dp_rank:
                    super().remove_worker_dp_rank(worker, rank)


@INDEXES.breaks("test_a_removed_rank_leaves_the_others")
class DoesNotRemoveTheRank(Radix):
    class Subject(Ranks):
        def remove_worker_dp_rank(self, worker_id, dp_rank):
            pass


@INDEXES.breaks("test_it_does_not_grow_with_workers_that_go")
class KeepsWhatIsCleared(Radix):
    class Subject(Sized):
        def apply(self, event):
            known = self.known
            super().apply(event)
            if isinstance(event.event.data, Cleared):
                self.known = known


@INDEXES.breaks("test_it_does_not_grow_with_workers_that_go")
class KeepsRemovedWorkers(Radix):
    class Subject(Sized):
        def remove_worker(self, worker_id):
            self.tree.remove_worker(worker_id)


@INDEXES.breaks("test_a_chain_may_be_long")
class StoresAThousandBlocksOfAnEvent(Radix):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            if isinstance(data, Stored):
                event = with_data(event, Stored(data.parent_hash, data.block_hashes[:1024], data.tokens_hashes[:1024]))
            super().apply(event)


@INDEXES.breaks("test_a_chain_may_be_long")
class LooksAtFiveHundredBlocks(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            return super().find_matches(local_hashes[:512])


@INDEXES.breaks("test_what_another_tier_removes_stays_on_the_device")
class RemovesOfTheDiskFromTheDevice(Radix):
    class Subject(Tree):
        def apply(self, event):
            if isinstance(event.event.data, Removed) and event.storage_tier is not StorageTier.HOST_PINNED:
                event = RouterEvent(event.worker_id, event.event, StorageTier.DEVICE)
            super().apply(event)


class Queued(Tree):
    """Queues events until it is flushed."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def apply(self, event):
        self.queue.append(event)

    def flush(self):
        while self.queue:
            with suppress(RadixIndexError):  # the Stored of its block was lost
                self.tree.apply(self.queue.popleft())


@INDEXES.breaks("test_many_events_may_come_before_a_flush", "test_it_follows_live_traffic")
class LosesTheOldestOfAQueueThatOverflows(Radix):
    class Subject(Queued):
        def __init__(self):
            super().__init__(deque(maxlen=64))


@INDEXES.breaks("test_many_events_may_come_before_a_flush")
class LosesOneOfTenThousand(Radix):
    class Subject(Queued):
        def __init__(self):
            super().__init__(deque(maxlen=9_999))


@INDEXES.breaks("test_many_events_may_come_before_a_flush")
class LosesTheNewestOfAQueueThatOverflows(Radix):
    class Subject(Queued):
        def __init__(self):
            super().__init__(deque())

        def apply(self, event):
            if len(self.queue) < 9_999:
                super().apply(event)


@INDEXES.breaks("test_it_holds_what_a_fleet_has")
class HasABoundAndDoesNotSay(Radix):
    class Subject(Tree):
        stored = 0

        def apply(self, event):
            self.stored += len(getattr(event.event.data, "tokens_hashes", ()))
            if self.stored <= 65_536:
                super().apply(event)


@INDEXES.breaks("test_it_holds_what_a_fleet_has")
class NamesAHundredWorkersAtMost(Radix):
    class Subject(Tree):
        def find_matches(self, local_hashes):
            return dict([*super().find_matches(local_hashes).items()][:100])


@INDEXES.breaks("test_it_holds_what_a_fleet_has")
class RecursesOverTheChain(IndexContract):
    def make_index(self):
        return Recursive()


class Recursive(Tree):
    """Follows each chain by recursive calls."""

    def find_matches(self, local_hashes):
        def depth_of(left):
            return 1 + depth_of(left - 1) if left else 0

        return {key: depth_of(blocks) for key, blocks in super().find_matches(local_hashes).items()}


@INDEXES.breaks("test_a_look_up_costs_no_more_than_its_share")
class LooksEachPrefixUpWhole(IndexContract):
    size_blocks = 20_000  # the index is slow

    def make_index(self):
        return HashIndex()


@INDEXES.breaks("test_a_look_up_costs_no_more_than_its_share")
class LooksAtAllBlocksForEachOfAPrompt(IndexContract):
    size_blocks = 20_000  # as slow as the one above

    def make_index(self):
        return Scans()


class Scans(Tree):
    """Scans a list of blocks for each block of a prompt."""

    def __init__(self):
        super().__init__()
        self.blocks = []

    def apply(self, event):
        super().apply(event)
        self.blocks += getattr(event.event.data, "tokens_hashes", ())

    def find_matches(self, local_hashes):
        known = [local for local in local_hashes if self.blocks.count(local)]
        return super().find_matches(known)


@INDEXES.breaks("test_a_look_up_costs_no_more_than_its_share")
class WalksFromTheRootAtEachDepth(IndexContract):
    size_blocks = 20_000  # as slow as the two above

    def make_index(self):
        return Walks()


class Walks(Tree):
    """Makes a node of each Stored, and walks from the root for each depth of a prompt."""

    def __init__(self):
        super().__init__()
        self.nodes, self.of = [], {}

    def apply(self, event):
        super().apply(event)
        data = event.event.data
        if isinstance(data, Stored):
            self.of.update(dict.fromkeys(data.block_hashes, len(self.nodes)))
            self.nodes.append((self.of.get(data.parent_hash), len(data.block_hashes)))

    def find_matches(self, local_hashes):
        found = super().find_matches(local_hashes)
        path, node = [], len(self.nodes) - 1
        while node is not None and node >= 0:
            path.append(self.nodes[node][1])
            node = self.nodes[node][0]
        for depth in range(len(local_hashes)):
            blocks = 0
            for count in reversed(path):
                blocks += count
                if blocks > depth:
                    break
        return found


@INDEXES.breaks("test_local_hashes_are_compared_whole")
class KeepsLocalHashesAsFloats(IndexContract):
    def make_index(self):
        return HashIndex("float53", "local")


@INDEXES.breaks("test_block_hashes_are_compared_whole")
class KeepsBlockHashesWithoutTheirSign(IndexContract):
    def make_index(self, block_size):
        return TokenIndex("low63", "block", size=block_size)


class LossyTokens(IndexContract):
    """The contract over an index by tokens that keeps only `kept(tokens)` of each block."""

    def make_index(self, block_size):
        kept = type(self).kept

        class Lossy(TokenIndex):
            def hashed(self, tokens):
                return [kept(tokens[end - block_size : end]) for end in range(block_size, len(tokens) + 1, block_size)]

        return Lossy(size=block_size)


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsTheSumOfTheTokens(LossyTokens):
    kept = sum


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsTheSetOfTheTokens(LossyTokens):
    kept = frozenset


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsTheTokensSorted(LossyTokens):
    def kept(tokens):  # noqa: N805 - a function, as the others
        return tuple(sorted(tokens))


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsTheTokensAsTextWithoutSeparators(LossyTokens):
    def kept(tokens):  # noqa: N805 - as above
        return "".join(map(str, tokens))


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsTokensOf16Bits(LossyTokens):
    def kept(tokens):  # noqa: N805 - as above
        return tuple(token % 2**16 for token in tokens)


@INDEXES.breaks("test_blocks_of_nearly_the_same_tokens_are_told_apart")
class KeepsAllButTheLastToken(LossyTokens):
    def kept(tokens):  # noqa: N805 - as above
        return tuple(tokens[:-1])


@INDEXES.breaks("test_adapters_are_told_apart")
class IgnoresAdapters(IndexContract):
    def make_index(self):
        return KeyedTokenIndex("lora_name")


@INDEXES.breaks("test_salts_are_told_apart")
class IgnoresSalts(IndexContract):
    def make_index(self):
        return KeyedTokenIndex("cache_salt")


@INDEXES.breaks("test_adapters_with_salts_are_told_apart")
class JoinsAdapterAndSalt(IndexContract):
    def make_index(self):
        return Joins()


class Joins(KeyedTokenIndex):
    """Joins the keys of a block to one text."""

    def looked_at(self, keys, extra):
        return ("".join(key if isinstance(key, str) else str(key) for key in keys or ()),)


@INDEXES.breaks("test_adapters_with_salts_are_told_apart")
class JoinsAdapterAndSaltByAColon(IndexContract):
    def make_index(self):
        index = Joins()
        index.looked_at = lambda keys, extra: (":".join(map(str, keys or ())),)
        return index


@INDEXES.breaks("test_adapters_with_salts_are_told_apart")
class TakesAdapterAndSaltInAnyOrder(IndexContract):
    def make_index(self):
        index = Joins()
        index.looked_at = lambda keys, extra: (frozenset(keys or ()),)
        return index


def of_images(which):
    """Return the contract over an index that looks at some images of a block; each is (identifier, offset)."""

    class Subject(KeyedTokenIndex):
        def looked_at(self, keys, extra):
            images = [key for key in keys or () if isinstance(key, tuple)]
            return (*(key for key in keys or () if isinstance(key, str)), which(images))

    return lambda self: Subject()


@INDEXES.breaks("test_several_multimodal_items_are_told_apart")
class LooksAtTheFirstImageOfABlock(IndexContract):
    make_index = of_images(lambda images: tuple(images[:1]))


@INDEXES.breaks("test_several_multimodal_items_are_told_apart")
class LooksAtTheLastImageOfABlock(IndexContract):
    make_index = of_images(lambda images: tuple(images[-1:]))


@INDEXES.breaks("test_several_multimodal_items_are_told_apart")
class LooksAtImagesWhereTheyBegin(IndexContract):
    make_index = of_images(lambda images: tuple(image for image in images if image[1] >= 0))


@INDEXES.breaks("test_ranks_may_each_have_blocks_of_their_own")
class LooksParentsUpInAllRanks(IndexContract):
    def make_index(self):
        return OneParentForAllRanks()


@INDEXES.breaks("test_ranks_may_each_have_blocks_of_their_own")
class KnowsTwoRanks(Radix):
    class Subject(Tree):
        def apply(self, event):
            inner = event.event
            super().apply(RouterEvent(event.worker_id, type(inner)(inner.event_id, inner.data, min(inner.dp_rank, 1))))


@INDEXES.breaks("test_multimodal_items_are_told_apart")
class IgnoresMultimodalItems(IndexContract):
    def make_index(self):
        return KeyedTokenIndex("multimodal")


@INDEXES.breaks("test_a_redelivered_event_changes_nothing")
class RaisesOnWhatComesTwice(Radix):
    survives = ("double",)

    class Subject(Tree):
        pass


@INDEXES.breaks("test_a_redelivered_event_changes_nothing")
class CountsWhatComesTwice(IndexContract):
    survives = ("double",)
    backends = ("vllm",)

    def make_index(self):
        return LenientCounts()


@INDEXES.breaks("test_a_redelivered_event_changes_nothing")
class CountsWhatComesTwiceWhereCopiesAre(IndexContract):
    survives = ("double",)
    backends = ("vllm",)

    def make_index(self):
        return LenientCounts(self.traits.copies)


class LenientCounts(HashIndex):
    """Never raises."""

    def __init__(self, counts=True):
        super().__init__(counts=counts)

    def apply(self, event):
        with suppress(KeyError):
            super().apply(event)


@INDEXES.breaks("test_a_cleared_worker_can_store_again")
class ClearsFromTheRoot(IndexContract):
    """Clears what a walk from the root finds: blocks behind a hole come back with the block before them."""

    def make_index(self):
        return LeavesWhatIsBehindAHole()


class LeavesWhatIsBehindAHole(HashIndex):
    def apply(self, event):
        chains, copies = self.ranks.get((event.worker_id, event.event.dp_rank), ({}, {}))
        super().apply(event)
        if isinstance(event.event.data, Cleared):
            held = {*chains.values()}
            left = {
                name: chain
                for name, chain in chains.items()
                if any(chain[:n] not in held for n in range(1, len(chain)))
            }
            self.ranks[event.worker_id, event.event.dp_rank] = left, copies


@INDEXES.breaks("test_a_block_is_held_until_its_last_copy_is_removed")
class KeepsCountsOverACleared(IndexContract):
    backends = ("vllm",)

    def make_index(self):
        return ForgetsChainsAndKeepsCounts(counts=self.traits.copies)


class ForgetsChainsAndKeepsCounts(HashIndex):
    def apply(self, event):
        if isinstance(event.event.data, Cleared):
            chains, _ = self.ranks.get((event.worker_id, event.event.dp_rank), ({}, {}))
            chains.clear()
        else:
            super().apply(event)


@INDEXES.breaks("test_an_unannounced_restart_is_noticed")
class KeepsWhatARestartedWorkerHad(Radix):
    survives = ["restart"]  # noqa: RUF012 - a list is allowed, too

    class Subject(Tree):
        pass


@INDEXES.breaks("test_an_unannounced_restart_is_noticed")
class NoticesLowerIdsAlone(Radix):
    survives = ("restart",)

    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.last = {}

        def apply(self, event):
            event_id = event.event.event_id
            if event_id < self.last.get(event.worker_id, -1):
                self.tree.remove_worker(event.worker_id)
            self.last[event.worker_id] = event_id
            super().apply(event)

        def remove_worker(self, worker_id):
            super().remove_worker(worker_id)
            self.last.pop(worker_id, None)


@INDEXES.breaks("test_a_removed_worker_has_nothing")
class KeepsTheFirstEventOfARemovedWorker(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.first = {}

        def apply(self, event):
            known = event.event.event_id == 0 and self.first.get(event.worker_id) == event
            self.first.setdefault(event.worker_id, event)
            if not known:
                super().apply(event)


@INDEXES.breaks("test_it_does_not_grow_with_look_ups")
class KeepsEveryAnswer(Radix):
    class Subject(Sized):
        def __init__(self):
            super().__init__()
            self.answers = {}

        def apply(self, event):
            self.answers.clear()
            super().apply(event)

        def remove_worker(self, worker_id):
            self.answers.clear()
            super().remove_worker(worker_id)

        def find_matches(self, local_hashes):
            asked = tuple(local_hashes)
            if asked not in self.answers:
                self.answers[asked] = super().find_matches(local_hashes)
            return self.answers[asked]

        def size(self):
            return len(self.known) + len(self.answers)


@INDEXES.breaks("test_a_removed_takes_its_blocks_beside_one_that_nobody_stored")
class StopsAtAnUnknownBlock(Radix):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            for block in data.block_hashes if isinstance(data, Removed) else ():
                super().apply(with_data(event, Removed((block,))))
            if not isinstance(data, Removed):
                super().apply(event)


@INDEXES.breaks("test_a_removed_takes_its_blocks_beside_one_that_nobody_stored")
class RemovesNothingBesideAnUnknownBlock(Radix):
    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.held = set()

        def apply(self, event):
            data = event.event.data
            blocks = {(event.worker_id, block) for block in getattr(data, "block_hashes", ())}
            if isinstance(data, Stored):
                self.held |= blocks
            elif isinstance(data, Removed) and not blocks <= self.held:
                raise KeyError(data)
            super().apply(event)


@INDEXES.breaks("test_a_child_of_an_unknown_parent_is_not_found")
class HangsOrphansUnderTheRoot(Radix):
    class Subject(Tree):
        def apply(self, event):
            try:
                super().apply(event)
            except RadixIndexError:
                data = event.event.data
                if isinstance(data, Stored):
                    super().apply(with_data(event, Stored(None, data.block_hashes, data.tokens_hashes)))


@INDEXES.breaks("test_a_child_of_an_unknown_parent_is_not_found")
class HangsOrphansUnderBlocksOfOtherWorkers(IndexContract):
    def make_index(self):
        return OneParentForAll()


class OneParentForAll(HashIndex):
    """Looks up a parent among all workers, and counts a match at any position."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash is not None:
            chains, _ = self.ranks.setdefault((event.worker_id, event.event.dp_rank), ({}, Counter()))
            found = [of[data.parent_hash] for of, _ in self.ranks.values() if data.parent_hash in of]
            for chain in found[:1] if data.parent_hash not in chains else ():
                chains[data.parent_hash] = chain
                chains |= {end: chain[: end + 1] for end in range(len(chain))}
        super().apply(event)


class OneParentForAllRanks(HashIndex):
    """Looks up a parent among all ranks of a worker, and takes it for the rank's own."""

    def apply(self, event):
        data, key = event.event.data, (event.worker_id, event.event.dp_rank)
        if isinstance(data, Stored) and data.parent_hash is not None:
            chains, _ = self.ranks.setdefault(key, ({}, Counter()))
            for (worker, _), (of, _) in self.ranks.items():
                if worker == key[0] and data.parent_hash in of and data.parent_hash not in chains:
                    chains[data.parent_hash] = of[data.parent_hash]
        super().apply(event)


@INDEXES.breaks("test_adapters_are_told_apart")
class IgnoresTheCaseOfAdapters(IndexContract):
    def make_index(self):
        return LowersNames()


class LowersNames(KeyedTokenIndex):
    def looked_at(self, keys, extra):
        return tuple(key.lower() if isinstance(key, str) else key for key in keys or ())


class Paused(Tree):
    """Pauses once in the middle of a Stored until a thread has looked up a prompt."""

    def __init__(self):
        super().__init__()
        self.between, self.has_threads, self.asked = False, False, Event()

    def apply(self, event):
        if isinstance(event.event.data, Stored) and self.has_threads and not self.asked.is_set():
            self.between = True
            self.asked.wait(5)
            self.between = False
        super().apply(event)

    def find_matches(self, local_hashes):
        self.has_threads = self.has_threads or current_thread() is not main_thread()
        if self.between:
            self.asked.set()
            return self.found_between(local_hashes)
        return super().find_matches(local_hashes)


@INDEXES.breaks("test_look_ups_may_come_from_threads")
class IsEmptyWhileItStores(Radix):
    threads = True

    class Subject(Paused):
        def found_between(self, local_hashes):
            return {}


@INDEXES.breaks("test_look_ups_may_come_from_threads")
class FindsWorkersThatDoNotHaveIt(Radix):
    threads = True

    class Subject(Paused):
        def found_between(self, local_hashes):
            return {(1, 0): 4, (2, 0): 1}


@INDEXES.breaks("test_look_ups_may_come_from_threads")
class RaisesWhileItStores(Radix):
    threads = True

    class Subject(Paused):
        def found_between(self, local_hashes):
            raise RuntimeError("dictionary changed size during iteration")


@INDEXES.breaks("test_events_may_come_from_threads")
class AppliesWithoutALock(Radix):
    threads = True
    Subject = UnlockedApply


@INDEXES.breaks("test_a_bounded_index_forgets_and_never_invents")
class HangsUnderTheRoot(IndexContract):
    bounded = 64

    def make_index(self):
        return HangsUnderTheRootWhatItForgot(64)


@INDEXES.breaks("test_a_bounded_index_forgets_and_never_invents", "test_it_follows_live_traffic")
class KeepsWhatIsRemovedOnceItIsFull(IndexContract):
    bounded = 8

    def make_index(self):
        return RemovesNothingOnceItIsFull(8)


@INDEXES.breaks("test_a_long_prompt_is_found_whole", "test_many_events_may_come_before_a_flush")
class ForgetsAndDoesNotSay(IndexContract):
    def make_index(self):
        return BoundedIndex(64)


@INDEXES.breaks("test_a_prompt_is_found_on_all_workers_beside_one_that_has_more")
class ForgetsBelowItsBound(IndexContract):
    bounded = 64

    def make_index(self):
        return BoundedIndex(8)


@INDEXES.breaks("test_adapters_are_told_apart", "test_salts_are_told_apart")
class ReadsTheKeysOfVllmAlone(IndexContract):
    backends = ("sglang",)

    def make_index(self):
        return KeyedTokenIndex()


@INDEXES.breaks("test_adapters_are_told_apart")
class TellsAdaptersApartByTheirNumbers(IndexContract):
    backends = ("vllm",)

    def make_index(self):
        return ByNumber()


class ByNumber(KeyedTokenIndex):
    def looked_at(self, keys, extra):
        return (extra.get("lora_id"),)


# ------------------------------------------------------------------------------------------------- cache groups


class MisreadsGroups(IndexContract):
    """The contract over a reader that misreads cache groups."""

    backends = ("vllm_gpt_oss", "vllm_gemma4")

    def make_index(self, block_size):
        return hybrid_readers.UnderTest(self.Reader, {"block_size": block_size})


@INDEXES.breaks("test_what_a_sparse_group_removes_stays_with_the_attention_group")
class HasOneMapForAllGroups(MisreadsGroups):
    Reader = hybrid_readers.OneMap


@INDEXES.breaks("test_what_a_sparse_group_alone_has_is_not_found")
class CountsAnyGroup(MisreadsGroups):
    Reader = hybrid_readers.AnyGroup


@INDEXES.breaks("test_a_sparse_group_that_lacks_blocks_hides_none", "test_it_follows_live_traffic")
class CountsTheMinimumOverGroups(MisreadsGroups):
    Reader = hybrid_readers.MinimumOverGroups


@INDEXES.breaks("test_the_attention_group_may_have_any_number")
class DividesTheSpanByItsHashes(MisreadsGroups):
    Reader = hybrid_readers.DividesTheSpanByItsHashes


@INDEXES.breaks("test_parents_are_those_of_the_same_group")
class LooksUpParentsAcrossGroups(MisreadsGroups):
    Reader = hybrid_readers.LooksUpParentsAcrossGroups


@INDEXES.breaks("test_what_a_sparse_group_removes_stays_with_the_attention_group")
class RemovesOfAnyGroup(MisreadsGroups):
    Reader = hybrid_readers.RemovesOfAnyGroup


@INDEXES.breaks("test_the_attention_group_may_have_any_number")
class TakesGroupZeroForTheAttentionGroup(MisreadsGroups):
    Reader = hybrid_readers.TakesGroupZero


class OneNumberForAll(HashIndex):
    """Uses one worker's number of the attention group for all workers."""

    def __init__(self):
        super().__init__(size=4)
        self.group.numbers = OneForAll()


class OneForAll(dict):
    def __setitem__(self, key, number):
        super().__setitem__(0, number)

    def get(self, key, default=None):
        return super().get(0, default)


@INDEXES.breaks("test_workers_number_their_groups_each_in_its_own_way")
class TakesTheNumberOfOneWorkerForAll(IndexContract):
    reads_groups = True

    def make_index(self):
        return OneNumberForAll()


class OneKindOfANumber(HashIndex):
    """Remembers the kind of each group number for all workers together: a Removed has only the number."""

    def __init__(self):
        super().__init__(size=4)
        self.attention = {}

    def apply(self, event):
        data, number = event.event.data, (event.extra or {}).get("group_idx", 0)
        is_attention = self.group.has(event)
        if not isinstance(data, Removed):
            self.attention[number] = is_attention
        self.group.numbers[event.worker_id, event.event.dp_rank] = number if self.attention.get(number) else None
        super().apply(event)


@INDEXES.breaks("test_workers_number_their_groups_each_in_its_own_way")
class SharesTheKindsOfNumbers(IndexContract):
    reads_groups = True

    def make_index(self):
        return OneKindOfANumber()


class TakesKindsForAttention(HashIndex):
    """Ignores windows, and takes every other kind for attention."""

    def __init__(self):
        super().__init__(size=4)

    def apply(self, event):
        extra = event.extra or {}
        if "kv_cache_spec_kind" in extra and extra["kv_cache_spec_kind"] != "sliding_window":
            event = (
                event._replace(extra=None)
                if hasattr(event, "_replace")
                else RouterEvent(event.worker_id, event.event, event.storage_tier, event.token_ids)
            )
        super().apply(event)


@INDEXES.breaks("test_groups_of_any_kind_beside_the_attention_group_count_for_nothing")
class LeavesOutWindowsAlone(IndexContract):
    reads_groups = True

    def make_index(self):
        return TakesKindsForAttention()


@INDEXES.breaks("test_a_prompts_tail_is_no_block")
class TakesTailsForBlocks(MisreadsGroups):
    Reader = hybrid_readers.TakesTailsForBlocks


# ------------------------------------------------------------------------------------------------- draft models


class MisreadsDrafts(IndexContract):
    """The contract over a reader that misreads engines with a draft model."""

    reads_drafts = True

    def make_index(self):
        return self.Reader()


@INDEXES.breaks(
    "test_a_block_that_looks_ahead_is_found_with_its_next_tokens",
    "test_a_twin_is_another_block",
    "test_a_page_of_pairs_is_found_with_its_next_token",
    "test_workers_look_ahead_each_in_its_own_way",
)
class TakesWindowsForBlocks(MisreadsDrafts):
    Reader = draft_readers.PlainHashes


@INDEXES.breaks("test_a_block_that_looks_ahead_is_found_with_its_next_tokens", "test_a_twin_is_another_block")
class KnowsBlocksByTheirOwnTokens(MisreadsDrafts):
    Reader = draft_readers.ByTokens


@INDEXES.breaks("test_a_twin_is_another_block")
class HasOneEntryForTwins(MisreadsDrafts):
    def make_index(self):
        return draft_readers.ByTokens(counts=False)


@INDEXES.breaks("test_workers_look_ahead_each_in_its_own_way")
class AsksWindowsOfEveryStream(MisreadsDrafts):
    Reader = draft_readers.Flagged


# ------------------------------------------------------------------------------------------------- TensorRT-LLM


class Partial(IndexContract):
    """The contract over the `Subject` of a mutant, with engines that store partial blocks."""

    backends = ("trtllm",)

    def make_index(self):
        return self.Subject()


@INDEXES.breaks("test_a_partial_block_is_never_promised")
class TakesPartialBlocksForWhole(Partial):
    class Subject(Tree):
        def apply(self, event):
            data, tokens = event.event.data, event.token_ids
            if isinstance(data, Stored) and tokens and len(tokens[-1]) < 4:
                padded = block_hashes([*tokens[-1], *[tokens[-1][-1]] * 4][:4], 4)
                data = Stored(data.parent_hash, data.block_hashes, (*data.tokens_hashes[:-1], *padded))
                event = with_data(event, data)
            super().apply(event)


@INDEXES.breaks("test_what_left_without_a_word_is_stored_once_more_and_removed_once")
class CountsWhatIsStoredTwice(Partial):
    def make_index(self):
        return RadixIndex(count_copies=True)


@INDEXES.breaks("test_a_shorter_window_is_another_group")
class HasOneMapForAllWindows(Partial):
    class Subject(Tree):
        def apply(self, event):
            with suppress(RadixIndexError):
                super().apply(with_data(event, event.event.data))


@INDEXES.breaks("test_names_from_2_to_the_63_on_are_one_block_in_every_event")
class ReadsRemovedAsSigned(Partial):
    class Subject(Tree):
        def apply(self, event):
            data = event.event.data
            if isinstance(data, Removed):
                blocks = (block - 2**64 if block >= 2**63 else block for block in data.block_hashes)
                event = with_data(event, Removed(blocks))
            with suppress(RadixIndexError):
                super().apply(event)


@INDEXES.breaks("test_a_block_that_is_updated_is_held")
class TakesWhatIsUpdatedForGone(Partial):
    class Subject(Tree):
        takes_updates = True

        def apply(self, event):
            data = event.event.data
            if isinstance(data, Updated):
                data = Removed(data.block_hashes if data.levels == (0, 1) else ())
            with suppress(RadixIndexError):
                super().apply(with_data(event, data))

        def find_tiered(self, local_hashes):
            return self.tree.find_tiered(local_hashes)


@INDEXES.breaks("test_priorities_say_nothing_of_what_is_held")
class TakesLowPrioritiesForEvicted(IndexContract):
    """Does not count blocks that may be evicted first."""

    backends = ("trtllm",)

    def make_index(self):
        return OfHighPriorities()


class OfHighPriorities(Tree):
    def apply(self, event):
        if 0 not in (event.extra or {}).get("priorities", ()):
            with suppress(RadixIndexError):
                super().apply(with_data(event, event.event.data))


@INDEXES.breaks("test_what_is_stored_is_on_the_level_that_it_says")
class StoresOnTheDeviceAlone(IndexContract):
    """Reads the levels of an Updated, and not the level of a Stored."""

    backends = ("trtllm",)

    def make_index(self):
        return WithoutStoredLevels()


class WithoutStoredLevels(Tree):
    takes_updates = True

    def apply(self, event):
        with suppress(RadixIndexError):
            super().apply(with_data(event, event.event.data))

    def find_tiered(self, local_hashes):
        return self.tree.find_tiered(local_hashes)


@INDEXES.breaks("test_a_longer_block_takes_the_place_of_its_shorter_sibling")
class DropsTheParentOfAPartialBlock(Partial):
    """Keeps a partial block as a part of its parent, and drops both together."""

    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.parents = {}

        def apply(self, event):
            data, tokens = event.event.data, event.token_ids
            if isinstance(data, Stored) and tokens and len(tokens[-1]) < 4:
                self.parents[data.block_hashes[-1]] = data.parent_hash
                return
            if isinstance(data, Removed):
                data = Removed([self.parents.pop(block, block) for block in data.block_hashes])
            with suppress(RadixIndexError):
                super().apply(with_data(event, data))


@INDEXES.breaks("test_layer_groups_have_any_order")
class TakesTheHighestGroupForAttention(Partial):
    """Orders groups like V1's windows, which are numbered by their length."""

    reads_groups = True

    class Subject(Tree):
        def __init__(self):
            super().__init__()
            self.highest = 0

        def apply(self, event):
            group = (event.extra or {}).get("group_idx", 0)
            self.highest = max(self.highest, group)
            if group == self.highest:
                with suppress(RadixIndexError):
                    super().apply(with_data(event, event.event.data))


@INDEXES.breaks("test_a_block_falls_level_by_level_and_comes_back_from_any")
class KnowsTwoLevels(Partial):
    """Reads only moves between the device and the first level below it."""

    class Subject(Tree):
        takes_updates = True

        def apply(self, event):
            data = event.event.data
            if not isinstance(data, Updated) or data.levels in ((0, 1), (1, 0)):
                super().apply(event)

        def find_tiered(self, local_hashes):
            return self.tree.find_tiered(local_hashes)


for subject, tests in FOUND_BY.items():
    INDEXES.breaks(*tests)(contract_of(subject))

INDEXES.cases += FORGETFUL.cases + REPORTED.cases + SHARED.cases + UNTOLD.cases
