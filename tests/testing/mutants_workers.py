"""Engines with one fault each, in the block manager or between requests and block manager."""

from random import SystemRandom

from contract_runs import Mutants
from mutants_managers import ForgetsRemoved, Spoilt
from mutants_policies import TakesWhatIsRegisteredForIdle

from pytest_kvmock import Prompt, StorageTier
from pytest_kvmock.engines import Traits
from pytest_kvmock.engines.dynamo.move_driver import MoveDriver
from pytest_kvmock.engines.dynamo.pool import BlockPool
from pytest_kvmock.testing import WorkerContract
from pytest_kvmock.values import Deref, MoveError

WORKERS = Mutants(WorkerContract)


class Lru(WorkerContract):
    """The contract over `lru`, driven by the `Subject` of a mutant."""

    backend = "lru"
    Subject = MoveDriver

    def make_harness(self, *sizes, **fields):
        harness = super().make_harness(*sizes, **fields)
        for worker in harness.workers.values():
            start = worker._start

            def spoilt(worker=worker, start=start):
                return self.Subject(start().manager, worker.prefix_caching, worker._rng)

            worker._start = spoilt
            worker._driver = spoilt()
            self.break_it(worker)
        return harness

    def break_it(self, worker):
        """Break the worker itself; the default breaks nothing."""


@WORKERS.breaks(
    "test_a_new_worker_has_nothing",
    "test_a_prompt_is_cached_as_far_as_it_agrees",
    "test_without_prefix_caching_nothing_is_published_or_found",
)
class FindsEveryPrompt(Lru):
    class Subject(MoveDriver):
        def lookup(self, request):
            return len(request)


@WORKERS.breaks(
    "test_what_was_served_is_cached",
    "test_chunks_make_no_difference_to_what_is_cached",
    "test_a_full_worker_makes_room",
    "test_clear_drops_all_that_is_cached",
)
class ForgetsTheLastBlock(Lru):
    class Subject(MoveDriver):
        def lookup(self, request):
            return max(0, super().lookup(request) - self.manager.block_size)


@WORKERS.breaks("test_a_prompt_that_is_cached_whole_is_reused")
class NeverReusesAWholePrompt(Lru):
    class Subject(MoveDriver):
        def lookup(self, request):
            found = super().lookup(request)
            return found if found < len(request) else 0


@WORKERS.breaks(
    "test_a_request_has_the_tokens_that_were_cached_when_it_came",
    "test_serve_answers_what_was_cached_and_what_became_so",
)
class SaysThatNothingWasCached(Lru):
    class Subject(MoveDriver):
        def lookup(self, request):
            return 0


@WORKERS.breaks(
    "test_what_was_decoded_is_a_prefix_of_the_next_turn", "test_a_resumed_request_continues_with_its_tokens"
)
class ForgetsWhatItGenerates(Lru):
    class Subject(MoveDriver):
        def extend(self, request, token):
            pass


@WORKERS.breaks("test_a_prompt_of_hashes_is_served", ends_in=(TypeError,))
class NeedsTokens(Lru):
    class Subject(MoveDriver):
        def open(self, prompt, *, to_look=False):
            return super().open(Prompt(prompt.tokens), to_look=to_look)


@WORKERS.breaks("test_a_look_touches_nothing")
class LooksWithItsHands(Lru):
    class Subject(MoveDriver):
        def lookup(self, request):
            found = super().lookup(request)
            held = [block for block in request.blocks if block in self.manager.inactive_blocks()]
            if held:
                self.manager.use(held)
                self.manager.deref(held[::-1])
            return found


@WORKERS.breaks("test_requests_that_agree_share_their_blocks")
class SharesNothing(Lru):
    class Subject(MoveDriver):
        def __init__(self, manager, prefix_caching, rng):
            super().__init__(manager, False, rng)


@WORKERS.breaks(
    "test_a_finished_request_frees_its_blocks",
    "test_a_request_finishes_when_its_with_block_is_left",
    "test_output_that_does_not_fit_frees_the_prompt",
    "test_a_preempted_request_gives_its_room_back",
    "test_any_traffic_stays_in_sync_at_every_step",
)
class KeepsTheFirstBlock(Lru):
    class Subject(MoveDriver):
        def free(self, request, *, done):
            self.manager.process(Deref(request.allocated_blocks[:0:-1]))
            request.commit_allocation(0)


@WORKERS.breaks("test_clear_drops_all_that_is_cached")
class ClearsNothing(Lru):
    class Subject(MoveDriver):
        def clear(self):
            return True


@WORKERS.breaks(
    "test_a_prompt_that_does_not_fit_is_refused_and_changes_nothing",
    "test_a_resume_that_does_not_fit_leaves_it_preempted",
)
class AdmitsWhatDoesNotFit(Lru):
    class Subject(MoveDriver):
        def plan(self, request, upto):
            return super().plan(request, upto)._replace(need=0)


@WORKERS.breaks(
    "test_a_decode_that_does_not_fit_generates_nothing",
    "test_output_that_does_not_fit_frees_the_prompt",
    ends_in=(MoveError,),
)
class DecodesWhatDoesNotFit(Lru):
    class Subject(MoveDriver):
        def need(self, request, upto, tokens=()):
            return 0 if tokens else super().need(request, upto)


@WORKERS.breaks("test_the_same_requests_give_the_same_events")
class GeneratesWhatItLikes(Lru):
    class Subject(MoveDriver):
        def extend(self, request, tokens):
            super().extend(request, [SystemRandom().getrandbits(32) for _ in tokens])


class Manager(WorkerContract):
    """The contract over managers that a mutant makes itself."""

    def make_manager(self, num_blocks, block_size, sink):
        return self.Subject(num_blocks, block_size, sink)


@WORKERS.breaks(
    "test_a_full_worker_makes_room",
    "test_the_router_learns_what_is_cached",
    "test_any_traffic_stays_in_sync_at_every_step",
)
class SaysNothingOfWhatIsEvicted(Manager):
    Subject = ForgetsRemoved.Subject


@WORKERS.breaks(
    "test_what_is_in_use_is_not_evicted", "test_any_traffic_stays_in_sync_at_every_step", ends_in=(RuntimeError,)
)
class EvictsWhatIsInUse(Manager):
    class Subject(Spoilt):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self._pool = BlockPool(self.num_blocks, TakesWhatIsRegisteredForIdle.Subject())
            self._form = self._new_slots()


@WORKERS.breaks("test_workers_share_nothing")
class HasOneManagerForAll(Manager):
    def __init__(self):
        self.made = []

    def make_manager(self, num_blocks, block_size, sink):
        self.made.append(Spoilt(num_blocks, block_size, sink))
        return self.made[sink is not None]  # the first one only tells the contract its name


@WORKERS.breaks("test_open_requests_are_listed")
class ListsTheNewestFirst(Lru):
    def break_it(self, worker):
        class Reversed(list):
            def append(self, request):
                self.insert(0, request)

        worker.requests = Reversed()


@WORKERS.breaks("test_what_a_requests_state_does_not_allow_is_refused")
class AllowsEverything(Lru):
    def break_it(self, worker):
        def prefill(prompt):
            request = type(worker).prefill(worker, prompt)
            request._need = lambda what, *allowed: None
            return request

        worker.prefill = prefill


@WORKERS.breaks("test_a_worker_in_use_is_not_cleared")
class SaysThatItIsCleared(Lru):
    def break_it(self, worker):
        worker.clear = lambda: True


@WORKERS.breaks("test_a_restart_begins_anew")
class DoesNotRestart(Lru):
    def break_it(self, worker):
        worker.restart = lambda *, announced=False: None


@WORKERS.breaks("test_a_restart_begins_anew")
class KeepsABlockOverARestart(Lru):
    """Keeps a block that no prompt finds."""

    def break_it(self, worker):
        restart = worker.restart

        def restarted(*, announced=False):
            restart(announced=announced)
            worker.manager.use([2**63])
            worker.manager.deref([2**63])

        worker.restart = restarted


# ------------------------------------------------------------------------- engines that do not do what their traits say


@WORKERS.breaks("test_a_prompt_that_is_cached_whole_is_reused")
class ClaimsToRecomputeTheLastToken(Lru):
    class Subject(MoveDriver):
        traits = Traits(recomputes_last_token=True)


@WORKERS.breaks("test_a_block_that_output_fills_is_published_when_the_traits_say")
class ClaimsToStoreFullBlocksAtOnce(Lru):
    class Subject(MoveDriver):
        traits = Traits(stores_when="full")


@WORKERS.breaks("test_a_block_that_output_fills_is_published_when_the_traits_say")
class ClaimsToStoreAtTheEnd(Lru):
    class Subject(MoveDriver):
        traits = Traits(stores_when="finish")


@WORKERS.breaks("test_a_block_that_output_fills_is_published_when_the_traits_say")
class ClaimsToStoreWhenNobodyKnows(Lru):
    class Subject(MoveDriver):
        traits = Traits(stores_when="sometimes")


@WORKERS.breaks("test_a_block_is_cached_several_times_where_the_traits_say_so")
class ClaimsCopies(Lru):
    class Subject(MoveDriver):
        traits = Traits(copies=True)


@WORKERS.breaks("test_a_block_is_cached_several_times_where_the_traits_say_so")
class KeepsCopiesInSecret(Manager):
    class Subject(Spoilt):
        def resident(self, tier=StorageTier.DEVICE):
            return [*super().resident(tier)] * 2


@WORKERS.breaks("test_what_is_evicted_is_published_before_what_is_stored_or_after_it_as_the_traits_say")
class ClaimsThatRemovedComesFirst(Lru):
    class Subject(MoveDriver):
        traits = Traits(removed_first=True)


@WORKERS.breaks("test_a_new_worker_has_nothing")
class ClaimsToBeginWithACleared(Lru):
    class Subject(MoveDriver):
        traits = Traits(cleared_first=True)


@WORKERS.breaks("test_a_new_worker_has_nothing")
class BeginsWithACleared(Lru):
    class Subject(MoveDriver):
        def __init__(self, manager, prefix_caching, rng):
            super().__init__(manager, prefix_caching, rng)
            manager.clear()


@WORKERS.breaks("test_a_prompt_is_taken_chunk_by_chunk_where_the_traits_say_so")
class ClaimsThatChunksAreOne(Lru):
    class Subject(MoveDriver):
        traits = Traits(chunks=False)


@WORKERS.breaks("test_a_prompt_is_taken_chunk_by_chunk_where_the_traits_say_so")
class TakesAllChunksAtOnce(Lru):
    class Subject(MoveDriver):
        def admit(self, request, upto, plan=None):
            super().admit(request, len(request), plan)
