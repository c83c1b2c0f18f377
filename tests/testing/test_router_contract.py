"""Right routers pass the contract of routers; planted bugs fail it, each with a text that describes the bug."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from contract_runs import failure_of, names_of_tests
from depth import takes_long, worth_its_time
from planted_bugs import ROUTER_BUGS

from pytest_kvmock import BACKENDS, Prompt, Stored, block_hashes
from pytest_kvmock.fleets import DynamoRouter, LeastLoaded, RoundRobin
from pytest_kvmock.fleets.routing.loads import Load
from pytest_kvmock.testing import RightRouter, RouterContract

TESTS = names_of_tests(RouterContract)


class OfDynamo(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self):
        return DynamoRouter("1.2.1")


class OfRight(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self, workers):
        return RightRouter(workers)


class ByTokens(RightRouter):
    """Indexes tokens, like llm-d and AIBrix: it ignores the local hashes of events and requests."""

    def apply(self, event):
        data, local = event.event.data, []
        if isinstance(data, Stored):
            adapter = (event.extra or {}).get("lora_name")
            for tokens in event.token_ids:
                local += block_hashes(tokens, len(tokens), lora_name=adapter)
            event = replace(event, event=replace(event.event, data=Stored(data.parent_hash, data.block_hashes, local)))
        super().apply(event)

    def overlap(self, request):
        adapter = None if request.prompt.keys is None else request.prompt.keys.lora_name
        return self._matched(block_hashes(request.prompt.tokens, request.block_size, lora_name=adapter))


class OfTokens(RouterContract):
    selector = DynamoRouter("1.2.1")

    def make_router(self, workers):
        return ByTokens(workers)


class OfTurns(RouterContract):
    def make_router(self):
        return RoundRobin()


class OfLeast(RouterContract):
    first_of_equals = True

    def make_router(self):
        return LeastLoaded()


def of_bug(name):
    class OfBug(OfRight):
        def make_router(self, workers):
            return ROUTER_BUGS[name].make(workers)

    return OfBug


def skip_of(contract, name):
    """Return the reason why a test of a contract is skipped, or None if it passes."""
    try:
        getattr(contract(), name)()
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None


@pytest.mark.parametrize("contract", [OfDynamo, OfRight, OfTokens, OfTurns, OfLeast])
@pytest.mark.parametrize("name", TESTS)
def test_a_right_router_passes_the_contract(contract, name):
    skipped = skip_of(contract, name)
    may_skip = {"test_it_believes_no_more_than_it_sent", *DECLARED}
    if contract not in (OfRight, OfTokens):
        may_skip |= {each for each in TESTS if each.endswith(("_are_right", "_cheapest", "_tie_share"))} | {*OF_OVERLAP}
    if contract is OfDynamo:
        may_skip.discard("test_workers_that_tie_share")
    if contract is OfLeast:
        may_skip |= {"test_an_idle_fleet_is_shared", *(each for each in TESTS if "_burst_is_shared_" in each)}
    assert skipped is None or (name in may_skip and "not checked" in skipped)


DECLARED = (
    "test_it_uses_a_name_that_returns",
    "test_a_prompt_goes_to_the_host_that_has_it",
    "test_siblings_go_together_before_the_first_event",
    "test_a_reading_that_is_too_old_is_none",
    "test_a_worker_that_said_nothing_is_unknown_and_not_idle",
    "test_numbers_that_jump_are_no_loss",
    "test_pairs_are_judged",
    "test_a_block_of_a_store_is_no_worker_s_own",
    "test_a_store_outlives_what_happens_to_its_workers",
    "test_a_hole_ends_a_promise_of_a_store",
    "test_a_promise_that_was_broken_is_lowered",
)
"""Tests that need a declaration of the contract."""

OF_OVERLAP = (
    "test_a_held_prompt_goes_where_it_is_however_loaded_others_are",
    "test_what_a_cordoned_worker_held_is_its_still",
)
"""Tests of routers with `overlap(request)`."""

OVER = ("vllm", "sglang", "mocker_sglang_1_6", "hash_cache")


def over(contract, name, **traits):
    """Return a contract over another backend, or with further traits."""
    return type(contract.__name__, (contract,), {"backend": name, **traits})


class OfRightOverAny(OfRight):
    def make_router(self, workers):
        return RightRouter(workers, copies=BACKENDS[self.backend].residency == "counted")


@pytest.mark.parametrize("backend", OVER)
@pytest.mark.parametrize("name", TESTS)
def test_a_right_router_passes_the_contract_over_any_engine(backend, name):
    skips = {
        "test_it_believes_no_more_than_it_sent": "RightRouter has no believed(request): what it takes to be where it "
        "sent it was "
        "not checked"
    }
    if backend == "hash_cache":
        skips["test_it_keeps_adapters_apart"] = (
            "backend 'hash_cache' names no blocks by lora_name: adapters were not checked"
        )
    skipped = skip_of(over(OfRightOverAny, backend), name)
    if name in DECLARED or (backend in ("sglang", "hash_cache") and name == "test_what_an_engine_refuses_is_no_load"):
        assert "not checked" in skipped
    else:
        assert skipped == skips.get(name)


@pytest.mark.parametrize("backend", ["sglang", "mocker_sglang_1_6"])
def test_a_planted_bug_fails_the_contract_over_sglang_too(backend):
    for name in ("stale_index", "lora_blind", "never_freed"):
        test, text = FAILS[name]
        assert text.partition(" says")[0] in (failure_of(over(of_bug(name), backend), test) or "")


def test_an_unknown_backend_is_named():
    wrong = over(OfTurns, "sglng")
    text = "Failed: OfTurns: backends has 'sglng': unknown backend 'sglng'"
    assert failure_of(wrong, "test_it_serves_every_request").startswith(text)


class OfPacking(RouterContract):
    """Fills a worker with 40 requests before it uses the next."""

    def make_router(self):
        class Packing:
            def pick(self, request, candidates):
                return next((each.worker for each in candidates if each.active_requests < 40), None)

        return Packing()


@takes_long
def test_a_policy_that_packs_on_purpose_declares_it():
    asked = ("test_workers_that_know_nothing_share_a_burst", "test_it_uses_a_worker_that_joins")
    assert all("got none of" in failure_of(OfPacking, name) for name in asked)
    packs = over(OfPacking, None, packs=True)
    skips = {name: skip_of(packs, name) for name in TESTS}
    text = "OfPacking.packs is True: a burst of prompts of which no worker holds a block: whether each worker gets some was not checked"  # noqa: E501
    assert skips["test_workers_that_know_nothing_share_a_burst"] == text
    assert "OfPacking.packs is True" in skips["test_it_uses_a_worker_that_joins"]


def test_a_missing_method_of_a_router_causes_a_skip_that_names_it():
    for name, text in (
        ("test_its_loads_are_right", "RoundRobin has no loads(): what it counts of its open requests was not checked"),
        (
            "test_its_overlaps_are_right",
            "RoundRobin has no overlap(request): what it takes each worker to hold was not",
        ),
        ("test_its_workers_are_right", "RoundRobin has no workers(): whom it takes to be there was not checked"),
        (
            "test_its_picks_are_among_the_cheapest",
            "OfTurns.selector is None: whether a cheaper worker was there was not",
        ),
        (
            "test_it_believes_no_more_than_it_sent",
            "RoundRobin has no believed(request): what it takes to be where it sent it",
        ),
    ):
        with pytest.raises(pytest.skip.Exception, match=re.escape(text)):
            getattr(OfTurns(), name)()


UNJUDGED = (
    "kvmock: test_turns.py::TestTurns: RoundRobin was not judged by what it counts of its open requests (no loads()), "
    "what it takes each rank of a worker to hold (no overlap(request) or believed(request)), whom it takes to be there "
    "(no workers()), what it makes of stores that workers share (no stores)"
)
SHORT = (
    "kvmock: test_turns.py::TestTurns: RoundRobin was not judged by what it counts of its open requests, "
    "what it takes each rank of a worker to h..., and 1 more (-v)"
)


@takes_long
@pytest.mark.parametrize(
    ("options", "expected"),
    [([], SHORT), (["-q"], SHORT), (["-n2"], SHORT), (["-v"], UNJUDGED)],
    ids=["plain", "quiet", "xdist", "verbose"],
)
def test_unjudged_scenes_are_summed_up_in_one_line_per_class(pytester, options, expected):
    pytester.makepyfile(
        test_turns="""
        from pytest_kvmock.fleets import RoundRobin
        from pytest_kvmock.testing import RightRouter, RouterContract

        class TestTurns(RouterContract):
            def make_router(self):
                return RoundRobin()

        class TestRight(RouterContract):
            def make_router(self, workers):
                return RightRouter(workers)
        """
    )
    result = pytester.runpytest_subprocess(*options, "-k", "restart or adapters or evictions or token")
    assert "skipped" not in result.parseoutcomes()
    said = [line for line in result.outlines if line.startswith("kvmock: ")]
    assert [line for line in said if " not judged " in line] == [expected]
    assert "-v" in options or len(said) == 1
    assert not [
        line for line in pytester.runpytest_subprocess("-qq", "-k", "one_token").outlines if line.startswith("kvmock: ")
    ]


FAILS = {
    "stale_index": ("test_it_follows_a_restart", "overlap_drift: StaleIndex.overlap() says 8 of 8 blocks on worker 1"),
    "ignores_load": ("test_its_picks_are_among_the_cheapest", "were not among the cheapest by DynamoRouter"),
    "herd": ("test_workers_that_know_nothing_share_a_burst", "worker 1 got none of 36 requests"),
    "never_freed": ("test_it_serves_every_request", "load_drift: NeverFreed.loads() says"),
    "empty_scores": ("test_workers_that_know_nothing_share_a_burst", "worker 1 got none of 36 requests"),
    "counted_twice": ("test_its_loads_are_right", "load_drift: CountedTwice.loads() says"),
    "new_worker_not_learnt": ("test_it_uses_a_worker_that_joins", "workers() does not know worker 3"),
    "dead_worker_kept": ("test_it_survives_a_crash", "pick() returned 1; that worker is gone"),
    "lora_blind": ("test_it_keeps_adapters_apart", "overlap_drift: LoraBlind.overlap() says 0 of 6 blocks"),
    "ranks_summed": ("test_it_keeps_ranks_apart", "overlap_drift: RanksSummed.overlap() says 2 of 4 blocks"),
    "never_matches": ("test_its_overlaps_are_right", "overlap_drift: NeverMatches.overlap() says 0 of"),
    "dearest": ("test_its_picks_are_among_the_cheapest", "were not among the cheapest by DynamoRouter"),
}


@pytest.mark.parametrize("name", ROUTER_BUGS)
def test_a_planted_bug_fails_the_contract(name):
    if name == "trusts_late_events":  # right by its events: only promised blocks that are not found show it
        assert name not in FAILS
        assert ROUTER_BUGS[name].found_by == "promised_not_found"
        assert failure_of(of_bug(name), "test_late_events_do_not_stop_it") is None
        return
    test, text = FAILS[name]
    assert text in (failure_of(of_bug(name), test) or "")


def test_a_bug_can_be_planted_in_a_custom_router():
    class Own(RightRouter):
        """A router with another cost."""

    router = ROUTER_BUGS["never_freed"].make(range(2), of=Own)
    assert isinstance(router, Own)
    with pytest.raises(TypeError, match="of must be RightRouter or a subclass of it, got <class 'int'>"):
        ROUTER_BUGS["never_freed"].make(range(2), of=int)


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (DynamoRouter, "selector is the class DynamoRouter; it must be an object, DynamoRouter()"),
        (3, "selector must have a method cost(request, candidate), got 3"),
    ],
    ids=["class", "number"],
)
def test_an_invalid_selector_is_named(selector, text):
    wrong = type("Wrong", (OfRight,), {"selector": selector})
    assert failure_of(wrong, "test_its_picks_are_among_the_cheapest") == f"Failed: Wrong: {text}"


# ------------------------------------------------------------------------------------------------ wrong routers


class FreedByFirstToken(RightRouter):
    """Frees the prefill of a request at its first token, which a request of one token does not have."""

    def first_token(self, request):
        self.seen = getattr(self, "seen", set()) | {request}
        super().first_token(request)

    def finished(self, request):
        if request in getattr(self, "seen", ()) or request.status == "lost":
            super().finished(request)


class WaitsForFirstTokens(RoundRobin):
    """Runs at most four prompts, and frees none that has only one output token."""

    at_work = 0

    def pick(self, request, candidates):
        return super().pick(request, candidates) if self.at_work < 4 else None

    def dispatched(self, request, worker):
        self.at_work += 1

    def first_token(self, request):
        self.at_work -= 1

    def finished(self, request):
        if request.max_output_tokens > 1 and request.status == "lost":
            self.at_work = max(0, self.at_work - 1)


class SharesOfPrompts(RoundRobin):
    """Divides by the number of blocks of a prompt, which is 0 for a short one."""

    def pick(self, request, candidates):
        return max(
            candidates, key=lambda each: (each.overlap / len(request.local_hashes), -each.active_requests)
        ).worker


class FirstOfEquals(RoundRobin):
    """Picks the first of equal workers."""

    needs_candidates = True

    def pick(self, request, candidates):
        return min(candidates, key=lambda each: (each.active_requests, -each.overlap)).worker


class Sticky(RoundRobin):
    """Keeps a conversation at its first worker, and gives up on a removed worker in one of three ways."""

    def __init__(self, orphans):
        super().__init__()
        self.orphans, self.of = orphans, {}

    def pick(self, request, candidates):
        there = [each.worker for each in candidates]
        began = self.of.get(request.session_id) if request.session_id and request.attempt == 1 else None
        if began is None:
            began = super().pick(request, candidates)
            self.of[request.session_id] = began
        if began in there:
            return began
        return {"dead": began, "none": None, "first": there[0]}[self.orphans]


class BansForGood(RoundRobin):
    """Never picks a worker again that was removed."""

    def __init__(self):
        super().__init__()
        self.banned = set()

    def worker_removed(self, worker):
        self.banned.add(worker)

    def pick(self, request, candidates):
        return super().pick(request, [each for each in candidates if each.worker not in self.banned])


class FirstOfAll:
    """Cannot pick without candidates, and does not declare it."""

    def pick(self, request, candidates):
        return candidates[request.number % len(candidates)].worker


class GivesUp(RoundRobin):
    """Picks nothing any more after a moment without candidates."""

    gave_up = False

    def pick(self, request, candidates):
        self.gave_up = self.gave_up or not candidates
        return None if self.gave_up else super().pick(request, candidates)


class KeepsTheLast(RightRouter):
    """Keeps the last worker after its removal."""

    def worker_removed(self, worker):
        if len(self.book.loads) > 1:
            super().worker_removed(worker)


class WaitsForAll(RoundRobin):
    """Lets all requests wait while one worker is no candidate."""

    def pick(self, request, candidates):
        return super().pick(request, candidates) if len(candidates) in (0, 3, 5) else None


class OwnList(RightRouter):
    """Picks from its own list of workers, candidates or not."""

    def choices(self, candidates):
        return self.workers()


class FirstWhereOneIsMissing(RoundRobin):
    """Picks the first candidate while some workers are missing among the candidates."""

    def started(self, workers):
        self.there = set(workers)

    def worker_added(self, worker):
        self.there.add(worker)

    def worker_removed(self, worker):
        self.there.discard(worker)

    def pick(self, request, candidates):
        is_whole = {each.worker for each in candidates} == self.there
        return super().pick(request, candidates if is_whole else candidates[:1])


class LeavesOutForGood(RoundRobin):
    """Never picks a worker again that was once missing among the candidates."""

    def started(self, workers):
        self.there = set(workers)

    def worker_added(self, worker):
        self.there.add(worker)

    def pick(self, request, candidates):
        self.there &= {each.worker for each in candidates}
        return super().pick(request, [each for each in candidates if each.worker in self.there])


class TakesForGone(RightRouter):
    """Takes a worker that is no candidate for removed."""

    def pick(self, request, candidates):
        for worker in set(self.workers()) - {each.worker for each in candidates}:
            self.book.loads[worker] = Load()
            self.index.remove_worker(worker)
        return super().pick(request, candidates)


class StaleTree(RoundRobin):
    """Keeps its record of prompts sent to a worker that restarts."""

    def __init__(self, forgets=False, adapters=True):
        super().__init__()
        self.sent, self.forgets, self.adapters = {}, forgets, adapters

    def names(self, request):
        adapters = self.adapters or request.tokens is None
        prompt = request.prompt if adapters else Prompt(request.tokens)
        return prompt.sequence_hashes(request.block_size)

    def believed(self, request):
        names = self.names(request)
        return {
            worker: next((at for at, name in enumerate(names) if name not in held), len(names))
            for worker, held in self.sent.items()
        }

    def dispatched(self, request, worker):
        self.sent.setdefault(worker, set()).update(self.names(request))

    def worker_removed(self, worker):
        if self.forgets:
            self.sent.pop(worker, None)


WRONG = {
    "freed by first tokens": (
        lambda: FreedByFirstToken(range(3)),
        "test_it_serves_requests_of_one_token",
        "load_drift: FreedByFirstToken.loads() says",
    ),
    "waits for first tokens": (
        WaitsForFirstTokens,
        "test_it_serves_requests_of_one_token",
        "pick() returned None and nothing runs",
    ),
    "shares of prompts": (
        SharesOfPrompts,
        "test_it_serves_requests_of_one_token",
        "SharesOfPrompts.pick() raised ZeroDivisionError",
    ),
    "first of equals": (
        FirstOfEquals,
        "test_an_idle_fleet_is_shared",
        "requests that come one by one, of prompts of which no worker holds a block: worker 1 got none of 36 requests",
    ),
    "sticks to the dead": (
        lambda: Sticky("dead"),
        "test_sessions_go_on_when_their_worker_dies",
        "pick() returned 1; that worker is gone",
    ),
    "waits for the dead": (
        lambda: Sticky("none"),
        "test_sessions_go_on_when_their_worker_dies",
        "pick() returned None and nothing runs",
    ),
    "orphans to the first": (
        lambda: Sticky("first"),
        "test_sessions_go_on_when_their_worker_dies",
        "of their second turns: worker 2 got none of 20 requests (worker 0: 20, worker 1: 0, worker 2: 0)",
    ),
    "bans for good": (
        BansForGood,
        "test_it_uses_a_worker_that_is_back",
        "and a burst of new prompts comes after it: worker 1 got none of 36 requests",
    ),
    "first of all": (
        FirstOfAll,
        "test_requests_wait_while_nobody_is_there",
        " in pick): no worker was there. Without candidates pick() must return None",
    ),
    "gives up": (GivesUp, "test_requests_wait_while_nobody_is_there", "pick() returned None and nothing runs"),
    "keeps the last": (
        lambda: KeepsTheLast(range(3)),
        "test_requests_wait_while_nobody_is_there",
        "knows worker 2, which is not there",
    ),
    "own list": (lambda: OwnList(range(5)), "test_a_cordoned_worker_gets_nothing", "returned 1; worker 1 is cordoned"),
    "first where one is missing": (
        FirstWhereOneIsMissing,
        "test_a_cordoned_worker_gets_nothing",
        (
            "worker 0 has 4.00 times the mean of their requests, must be at most 2 times (worker 0: 72, worker 2: 0, "
            "worker 3: 0, worker 4: 0)"
        ),
    ),
    "waits for all": (
        WaitsForAll,
        "test_a_cordoned_worker_gets_nothing",
        "comes to the others: none of the others got any until it was uncordoned",
    ),
    "leaves out for good": (
        LeavesOutForGood,
        "test_a_cordoned_worker_gets_nothing",
        "and then a burst of new prompts comes at 3000 ms: worker 1 got none of 72 requests",
    ),
    "takes for gone": (
        lambda: TakesForGone(range(5)),
        "test_a_cordoned_worker_gets_nothing",
        "load_drift: TakesForGone.loads() says",
    ),
    "stale tree": (StaleTree, "test_it_follows_a_restart", "overlap_drift: StaleTree.believed() says"),
    "adapters mixed": (
        lambda: StaleTree(forgets=True, adapters=False),
        "test_it_keeps_adapters_apart",
        "overlap_drift: StaleTree.believed() says 6 of 6 blocks",
    ),
}


def of(make, backend=None):
    return type("OfWrong", (RouterContract,), {"backend": backend, "make_router": lambda self: make()})


@pytest.mark.parametrize("backend", [None, "sglang"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_router_fails_the_contract(name, backend):
    make, test, text = WRONG[name]
    assert text in (failure_of(of(make, backend), test) or "")


@pytest.mark.parametrize("name", TESTS)
def test_a_router_with_a_right_record_of_sent_prompts_passes(name):
    skipped = skip_of(of(lambda: StaleTree(forgets=True)), name)
    may_skip = ("_are_right", "_cheapest", "_tie_share")
    assert skipped is None or name.endswith(may_skip) or name in (*DECLARED, *OF_OVERLAP)


class ByWeight:
    """Gives worker 0, six times as large as each of the others, six times as many requests."""

    def __init__(self):
        self.picked = Counter()

    def pick(self, request, candidates):
        if not candidates:
            return None
        worker = min(
            (each.worker for each in candidates), key=lambda each: (self.picked[each] + 1) / (1 if each else 6)
        )
        self.picked[worker] += 1
        return worker


def test_with_one_worker_cordoned_the_others_may_be_as_uneven_as_otherwise():
    assert None is failure_of(of(ByWeight), "test_a_cordoned_worker_gets_nothing")


def test_a_router_that_needs_candidates_is_right_if_it_declares_it():
    failure = failure_of(of(FirstOfAll), "test_requests_wait_while_nobody_is_there")
    assert "a router that cannot be asked without candidates declares needs_candidates = True" in failure
    declared = type("Declared", (FirstOfAll,), {"needs_candidates": True})
    assert all(failure_of(of(declared), name) is None for name in TESTS)


@worth_its_time
def test_a_policy_that_picks_the_first_of_equals_declares_it():
    contract = type("OfFirst", (of(FirstOfEquals),), {"first_of_equals": True})
    skips = {name: skip_of(contract, name) for name in TESTS}
    text = "OfFirst.first_of_equals is True: requests that come one by one, of prompts of which no worker holds a block: whether"  # noqa: E501
    assert skips["test_an_idle_fleet_is_shared"].startswith(text)
    assert skips["test_workers_that_know_nothing_share_a_burst"] is None


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_gemma3"])
def test_small_caches_of_a_hybrid_model_serve_the_same_requests_as_those_of_a_plain_one(backend):
    assert None is failure_of(of(RoundRobin, backend), "test_it_follows_evictions")


class Rests(RightRouter):
    """Sends nothing to a worker for two seconds after its return."""

    def __init__(self, workers):
        super().__init__(workers)
        self.now_ms, self.until = 0.0, {}

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.until[worker] = self.now_ms + 2000.0

    def pick(self, request, candidates):
        self.now_ms = request.now_ms
        rested = [each for each in candidates if self.until.get(each.worker, 0.0) <= self.now_ms]
        return super().pick(request, rested or candidates)


def test_a_policy_that_lets_a_returned_worker_rest_declares_it():
    name = "test_it_uses_a_worker_that_is_back"
    rests = type("OfRests", (RouterContract,), {"make_router": lambda self, workers: Rests(workers)})
    assert "got none of" in failure_of(rests, name)
    assert failure_of(over(rests, None, cools_down_s=2.0), name) is None
    assert "cools_down_s must be seconds of at least 0, got -1" in failure_of(over(rests, None, cools_down_s=-1), name)
