"""Routers of P/D pairs with one public bug each, and their right twin.

A number is the row in the list of public bugs; the docstring describes the bug. Each is a contract that must fail the
test that is named with it, in these words.
"""

from pytest_kvmock.fleets import DECODE_ALONE
from pytest_kvmock.fleets.routing.loads import LoadBook
from pytest_kvmock.fleets.routing.routing import id_of
from pytest_kvmock.testing import RightRouter, RouterContract

WAYS = ("vllm", "vllm-mooncake", "sglang")


class PairRouter(RightRouter):
    """A right router of both roles, with one load book and one index."""

    busy_from = None

    def __init__(self, workers, copies=True):
        super().__init__([*workers["prefill"], *workers["decode"]], copies=copies)

    def choices(self, candidates):
        found = super().choices(candidates)
        if self.busy_from is None:
            return found
        free = [each for each in found if self.book.loads[each].prefill_tokens < self.busy_from]
        return free or found


class Pairs(RouterContract):
    """The contract of a right router; wrong ones replace `router`."""

    hand_over = "vllm"
    threshold = 1
    router = PairRouter

    def make_router(self, workers):
        return self.router(workers, copies=self.hand_over != "sglang")


class Silent(PairRouter):
    """Does not report its loads, so that only its picks show them."""

    loads = None


BUGS = []


def bug(row, test, says, *ways, **declared):
    """Register a router with a bug, which fails this test in these words, with these engines."""

    def note(router):
        for way in ways or WAYS:
            about = {"hand_over": way, "router": router, **declared}
            BUGS.append((f"{row}-{router.__name__}-{way}", type(router.__name__, (Pairs,), about), test, says))
        return router

    return note


@bug(1, "test_prompts_are_computed_by_prefill_workers", "was decoded alone")
class NeverPrefills(PairRouter):
    """modelplane 175: prefill workers get no request at all, and nothing reports it."""

    def pick(self, request, candidates):
        return DECODE_ALONE if request.phase == "prefill" else super().pick(request, candidates)


@bug(2, "test_no_prefill_worker_is_not_passed_over_in_silence", "were decoded alone", "vllm", "vllm-mooncake")
@bug(9, "test_a_prefill_worker_that_comes_up_later_is_used", "were decoded alone", "sglang")
class FallsBackInSilence(PairRouter):
    """llm-d-router 2427, dynamo 6678: when no prefill worker is ready, all requests go to decode workers."""

    def pick(self, request, candidates):
        if request.phase == "prefill" and not candidates:
            return DECODE_ALONE
        return super().pick(request, candidates)


@bug(3, "test_prompts_are_computed_by_prefill_workers", "carried no parameters", "vllm")
class DropsParameters(PairRouter):
    """vllm-project/router 46: the decode leg has no parameters."""

    def hand_over(self, request, parameters):
        return None


@bug(5, "test_a_change_of_one_role_keeps_the_loads_of_the_other", "load_drift")
class ForgetsTheOtherRole(PairRouter):
    """vllm-project/router 299: discovery of one role drops the other role's load."""

    def worker_added(self, worker, role):
        for other in [each for each in self.book.loads if (id_of(each) >= 1000) != (role == "decode")]:
            self.book.loads[other] = LoadBook([0]).loads[0]
        super().worker_added(worker)


@bug(6, "test_the_load_of_prefill_ends_with_its_leg", "load_drift")
class HoldsPrefill(PairRouter):
    """llm-d-router 2243: prefill load is held until the end of decode, without being declared."""

    def finished(self, request):
        if request.phase == "decode":
            request.phase = "prefill"
            super().finished(request)
            request.phase = "decode"
            super().finished(request)


@bug(7, "test_prompts_are_computed_by_prefill_workers", "was decoded alone", "vllm", "vllm-mooncake")
class SkipsShortPrompts(PairRouter):
    """llm-d-router 867: a prompt shorter than a block has no prefill leg, although one is always required."""

    def pick(self, request, candidates):
        if request.phase == "prefill" and not request.local_hashes:
            return DECODE_ALONE
        return super().pick(request, candidates)


@bug(8, "test_clients_that_leave_in_any_phase_leave_nothing", "load_drift")
class ForgetsWhoLeft(PairRouter):
    """dynamo 14775: when a client disconnects, the decode load is never freed."""

    def finished(self, request):
        if request.status != "aborted" or request.phase == "prefill":
            super().finished(request)


@bug(8, "test_slow_workers_and_bad_links_leave_nothing", "load_drift")
class ForgetsWhoLeftSlowWorkers(ForgetsWhoLeft):
    """The same, with slow workers and failing transfers."""


@bug(0, "test_restarts_in_each_role_leave_nothing", "load_drift", "vllm-mooncake", "sglang")
class KeepsWhatWasLost(PairRouter):
    """No public report: load that is lost with its worker counts until the next attempt has ended."""

    def finished(self, request):
        if request.status != "lost":
            super().finished(request)


@bug(10, "test_prefill_picks_count_no_block_of_decode_workers", "overlap_drift", "vllm", "vllm-mooncake")
class IndexesDecodeWorkers(PairRouter):
    """dynamo 12084: events of decode workers are indexed in the prefill index."""

    def overlap(self, request):
        found = super().overlap(request)
        best = max((blocks for worker, blocks in found.items() if id_of(worker) >= 1000), default=0)
        return {worker: max(best, found.get(worker, 0)) for worker in self.book.loads}


@bug(11, "test_each_role_is_asked_by_its_own_hashes", "overlap_drift")
class AsksByTheOtherHashes(PairRouter):
    """dynamo 9857: the prefill index is looked up by the hashes of the decode side."""

    def __init__(self, workers, copies=True):
        super().__init__(workers, copies)
        self.times = 2 if copies else 1  # vLLM's roles differ in block size, SGLang's in the draft model

    def overlap(self, request):
        if request.phase == "prefill":
            return self._matched(request.prompt.block_hashes(request.block_size * self.times))
        return super().overlap(request)


@bug(12, "test_legs_meet", "at rank 1 of worker", "sglang")
class KeepsNoRank(PairRouter):
    """sglang 40730: the decode leg looks for its room at another rank."""

    def hand_over(self, request, parameters):
        return parameters.changed(disagg_prefill_dp_rank=1)


@bug(12, "test_legs_meet_at_ranks", "which does not have that room", "sglang")
class MakesRoomsOfItsOwn(PairRouter):
    """sglang 39357: the prefill leg goes to the picked rank, and the decode leg to the rank of the room."""

    rooms = 0

    def hand_over(self, request, parameters):
        self.rooms += 1
        return parameters.changed(bootstrap_room=self.rooms)


@bug(12, "test_legs_meet_at_ranks", "which does not have that room", "sglang")
class SaysTheRankOfDecode(PairRouter):
    """dynamo 5666: the decode leg gets the rank of the decode worker in place of the prefill worker's."""

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        if request.phase == "decode":
            self.rank = worker[1] if isinstance(worker, tuple) else 0

    def hand_over(self, request, parameters):
        return parameters.changed(disagg_prefill_dp_rank=self.rank)


@bug(12, "test_legs_meet_at_ranks", "which has no prefill leg of it", "vllm-mooncake")
class AsksTheFirstRank(PairRouter):
    """The decode leg queries the first engine that the bootstrap server lists, whichever rank has the prefill leg."""

    def hand_over(self, request, parameters):
        return parameters.changed(remote_engine_id=parameters["remote_engine_id"].replace("_dp1", "_dp0"))


@bug(12, "test_it_keeps_ranks_apart", "overlap_drift")
class MergesRanks(PairRouter):
    """sglang 24772: blocks of one rank count for all ranks of its worker, and a prompt is sent to another rank."""

    def overlap(self, request):
        found = super().overlap(request)
        if not self.has_ranks:
            return found
        return {rank: max(found.get((rank[0], each), 0) for each in range(2)) for rank in self.book.loads}


@bug(16, "test_decode_workers_share_what_they_have_room_for", "legs that wait for it count too")
class CountsWhatRuns(Silent):
    """sglang 25125: legs that wait at a full decode worker are not counted."""

    def __init__(self, workers, copies=True):
        super().__init__(workers, copies)
        self.running = dict.fromkeys(workers["decode"], 0)
        self.at = {}

    def pick(self, request, candidates):
        if request.phase == "prefill":
            return super().pick(request, candidates)
        return min(candidates, key=lambda each: self.running[each.worker]).worker

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        self.at[request, request.phase] = worker

    def first_token(self, request):
        super().first_token(request)
        self.running[self.at[request, "decode"]] += 1

    def finished(self, request):
        super().finished(request)
        if request.phase == "decode":
            self.running[self.at[request, "decode"]] -= 1


@bug(17, "test_blocks_that_it_was_never_told_of_do_not_end_it", "overlap_drift", "vllm", "vllm-mooncake")
class GivesUpOnUnknownParents(PairRouter):
    """llm-d-kv-cache 347: blocks under an unknown parent are dropped, and all later events of the worker too."""

    def __init__(self, workers, copies=True):
        super().__init__(workers, copies)
        self.given_up = set()

    def apply(self, event):
        parent = getattr(event.event.data, "parent_hash", None)
        if parent is not None and not self.index.num_blocks(*event.key):
            self.given_up.add(event.worker_id)
        if event.worker_id not in self.given_up:
            super().apply(event)


@bug(19, "test_a_failed_leg_ends_its_request", "480 s later", "vllm-mooncake")
class WaitsForTheOtherLeg(PairRouter):
    """sglang 29482: one leg fails, and the router waits for the other leg until its timeout."""

    def leg_failed(self, request):
        return "wait"


@bug(22, "test_nothing_is_read_after_its_lease", "kept for none of them", "vllm")
class QueuesBetweenTheLegs(PairRouter):
    """aws-do-eks 84: the decode leg is sent after the lease, and reads blocks that are no longer kept for it."""

    def pick(self, request, candidates):
        if request.phase == "decode" and all(each.active_requests >= 2 for each in candidates):
            return None
        return super().pick(request, candidates)


@bug(25, "test_a_busy_prefill_worker_is_passed_over", "tokens to compute, and another had", busy_from=600)
class NeverAsksWhoIsBusy(PairRouter):
    """dynamo 10631: the limit of busy prefill workers is never consulted."""

    def cost(self, request, worker, overlap):
        return worker


class Busy(PairRouter):
    """The right twin of the last one: it has a limit and keeps it."""

    busy_from = 600

    cost = NeverAsksWhoIsBusy.cost
