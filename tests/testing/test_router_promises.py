"""Routers and the blocks of workers, removed workers and waiting requests: wrong policies fail by name, right ones
pass.
"""

import sys
from itertools import count
from pathlib import Path
from random import Random

import pytest
from contract_runs import failure_of
from depth import few
from test_router_load import contract, of_workers

from pytest_kvmock.fleets import DynamoRouter, RoundRobin
from pytest_kvmock.testing import RightRouter

sys.path.append(str(Path(__file__).parents[2] / "examples" / "routing"))

from llm_d_scorers import Scorers
from sglang_rule import CacheAware
from two_choices import TwoChoices

HELD = "test_a_held_prompt_goes_where_it_is_however_loaded_others_are"
DRAINED = "test_what_a_cordoned_worker_held_is_its_still"
RETURNS = "test_it_uses_a_name_that_returns"
HOST = "test_a_prompt_goes_to_the_host_that_has_it"
REFUSED = "test_what_an_engine_refuses_is_no_load"
WAITS = "test_none_waits_while_others_pass"
REPEATS = "test_one_trace_makes_the_same_picks"
CRASH = "test_it_survives_a_crash"
LEAVES = "test_it_lets_a_worker_leave"
SIBLINGS = "test_siblings_go_together_before_the_first_event"
ALL = (HELD, DRAINED, RETURNS, REFUSED, WAITS, REPEATS, CRASH, LEAVES)


class ForgetsTheCordoned(RightRouter):
    """Drops the blocks of a worker that is no candidate; wrong unless it is declared."""

    def __init__(self, workers):
        super().__init__(workers)
        self.seen = set()

    def pick(self, request, candidates):
        there = {each.worker for each in candidates}
        for worker in self.seen - there:
            self.index.remove_worker(worker)
        self.seen = there
        return super().pick(request, candidates)


class TakesTheBackForIdle(RightRouter):
    """Takes a worker that returns among the candidates for idle, and sends it every request for a while."""

    def __init__(self, workers):
        super().__init__(workers)
        self.back, self.seen = {}, set()

    def pick(self, request, candidates):
        there = {each.worker for each in candidates}
        for worker in there - self.seen if self.seen else ():
            if worker in self.left:
                self.back[worker] = 60
        self.left = getattr(self, "left", set()) | (self.seen - there)
        self.seen = there
        for worker in self.back:
            if self.back[worker] and worker in there:
                self.back[worker] -= not self.overlap(request).get(worker)
                return worker
        return super().pick(request, candidates)

    left = frozenset()


class SwitchesByAnotherOne(RightRouter):
    """Balances all requests as soon as one worker has too many."""

    most = 8

    def pick(self, request, candidates):
        if max((each.active_requests for each in candidates), default=0) > self.most:
            least = min(each.active_requests for each in candidates)
            return self.rng.choice([each.worker for each in candidates if each.active_requests == least])
        return super().pick(request, candidates)


class SwitchesLate(SwitchesByAnotherOne):
    most = 64


class ComputesOverlapsForNothing(RightRouter):
    def cost(self, request, worker, overlap):
        return super().cost(request, worker, 0)


class BelievesInTheGone(RightRouter):
    """Believes that prompts of ended requests stay at their worker, whichever worker is removed by then."""

    def __init__(self, workers):
        super().__init__(workers)
        self.ended, self.at = {}, {}

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        self.at[request] = worker

    def finished(self, request):
        super().finished(request)
        self.ended.setdefault(self.at.pop(request, None), set()).update(request.local_hashes)

    def believed(self, request):
        return {
            worker: next(
                (at for at, each in enumerate(request.local_hashes) if each not in held), len(request.local_hashes)
            )
            for worker, held in self.ended.items()
            if worker is not None
        }

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.ended.pop(worker, None)


class KeepsThePageOfTheGone(RightRouter):
    """Keeps the load of a removed worker, with its open requests."""

    def __init__(self, workers):
        super().__init__(workers)
        self.pages = {}

    def worker_removed(self, worker):
        load = self.book.loads[worker]
        self.pages[worker] = (load.prefill_tokens, load.blocks, load.requests + 1)
        super().worker_removed(worker)

    def loads(self):
        return {**self.pages, **super().loads()}


class NeverAgainByThatName(RightRouter):
    """Never picks a worker again that was lost."""

    def __init__(self, workers):
        super().__init__(workers)
        self.lost = set()

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.lost.add(worker)

    def choices(self, candidates):
        return [each for each in super().choices(candidates) if each not in self.lost] or super().choices(candidates)


class CountsTheRefused(RightRouter):
    def finished(self, request):
        if request.status != "rejected":
            super().finished(request)


class CountsTheRefusedInSilence(CountsTheRefused):
    loads = None


class Places:
    """Gives each worker four places; requests that find none wait."""

    def pick(self, request, candidates):
        free = [each for each in candidates if each.active_requests < 4]
        return min(free, key=lambda each: each.active_requests).worker if free else None


class Expects(RightRouter):
    """Right: counts a prompt as held by the worker that it was sent to, until events tell."""

    def __init__(self, workers):
        super().__init__(workers)
        self.sent = {}

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        self.sent[tuple(request.local_hashes[:8])] = worker

    def pick(self, request, candidates):
        worker = self.sent.get(tuple(request.local_hashes[:8]))
        there = {each.worker for each in candidates}
        if worker in there and not any(self.overlap(request).values()):
            return worker
        return super().pick(request, candidates)

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.sent = {head: each for head, each in self.sent.items() if each != worker}


class ExpectsWholePromptsAlone(Expects):
    """Looks up its record of sent prompts by the whole prompt."""

    def dispatched(self, request, worker):
        RightRouter.dispatched(self, request, worker)
        self.sent[request.tokens] = worker

    def pick(self, request, candidates):
        worker = self.sent.get(request.tokens)
        return worker if worker in {each.worker for each in candidates} else RightRouter.pick(self, request, candidates)


class LastFirst(Places):
    def next_waiting(self, requests):
        return requests[-1]


class DrawsFromANewSeed(RightRouter):
    """Takes another seed for each new router: the same ones in each run, as one pair of seeds in twenty picks alike."""

    seeds = count()

    def __init__(self, workers):
        super().__init__(workers, next(self.seeds))


class OfTiers(RightRouter):
    """Values a block on the host at three quarters of a block."""

    weight = 0.75

    def cost(self, request, worker, overlap):
        found = self.index.find_tiered(request.local_hashes)
        below = sum(of.get((worker, 0), 0) for tier, of in found.items() if tier != "device")
        return super().cost(request, worker, overlap) - self.weight * below


class GivesTheHostNoWeight(OfTiers):
    weight = 0.0


TIERS = {"tiers": {"host": 400, "gbps": 0}, "backend": "lineage"}
WRONG = {
    "forgets the cordoned": (of_workers(ForgetsTheCordoned), DRAINED, "overlap() says 0 of"),
    "sends all to who is back": (of_workers(TakesTheBackForIdle), DRAINED, "worker 1 is cordoned"),
    "switches by another one": (of_workers(SwitchesByAnotherOne), HELD, "worker 0 has 12 open requests"),
    "switches late": (of_workers(SwitchesLate), HELD, "worker 0 has 70 open requests"),
    "computes overlaps for nothing": (of_workers(ComputesOverlapsForNothing), HELD, "worker 0 has 0 open requests"),
    "goes in turn": (contract(RoundRobin, uses_overlap=True), HELD, "in turn 4 would"),
    "believes in the gone": (of_workers(BelievesInTheGone), LEAVES, "none, as that worker is gone"),
    "keeps loads of the gone": (of_workers(KeepsThePageOfTheGone), CRASH, "none: all requests sent there are over"),
    "never again by that name": (
        of_workers(NeverAgainByThatName, names_return=True),
        RETURNS,
        "worker 1 got none of 36 requests",
    ),
    "knows siblings by events alone": (
        of_workers(RightRouter, keeps_siblings=True),
        SIBLINGS,
        "went where the first of them went, before its first event; expected half of them at least",
    ),
    "expects whole prompts alone": (
        of_workers(ExpectsWholePromptsAlone, keeps_siblings=True),
        SIBLINGS,
        "went where the first of them went",
    ),
    "counts the refused": (of_workers(CountsTheRefused), REFUSED, "loads() says"),
    "serves the last first": (contract(LastFirst), WAITS, "is the last one served first?"),
    "draws from a new seed": (of_workers(DrawsFromANewSeed), REPEATS, "one trace, played twice: pick ("),
    "gives the host no weight": (
        of_workers(GivesTheHostNoWeight, **TIERS),
        HOST,
        "prompts went where the host has them",
    ),
}
RIGHT = {
    "right": (of_workers(RightRouter, names_return=True), *ALL),
    "dynamo": (contract(lambda: DynamoRouter("1.6.1", rng=Random(0)), uses_overlap=True), *ALL),
    "forgets the cordoned and says so": (of_workers(ForgetsTheCordoned, forgets_cordoned=True), DRAINED),
    "expects what it sent": (of_workers(Expects, keeps_siblings=True), SIBLINGS, *ALL),
    "sglang, siblings": (contract(CacheAware, follows_prefix=True, keeps_siblings=True), SIBLINGS),
    "switches and says so": (of_workers(SwitchesByAnotherOne, switches_by_load=True), HELD, DRAINED),
    "two choices": (contract(lambda: TwoChoices(0)), *ALL),
    "sglang": (contract(CacheAware, follows_prefix=True), *ALL),
    "llm-d": (contract(lambda: Scorers(0)), *ALL),
    "waits in order": (contract(Places), WAITS),
    "weighs the host": (of_workers(OfTiers, **TIERS), HOST),
}
"""Contracts over right routers, each with the tests that it must pass."""


@pytest.mark.parametrize("name", few(WRONG, 15))
def test_a_wrong_router_fails_its_test(name):
    wrong, test, text = WRONG[name]
    assert text in (failure_of(wrong, test) or "")


@pytest.mark.parametrize("name", few(RIGHT, 11))
def test_a_right_router_passes_its_tests(name):
    right, *tests = RIGHT[name]
    failures = {}
    for test in tests:
        try:
            failures[test] = failure_of(right, test)
        except pytest.skip.Exception:
            failures[test] = None
    assert failures == dict.fromkeys(tests)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"repeats": 1}, "repeats must be True or False, got 1"),
        ({"uses_overlap": "yes"}, "uses_overlap must be True, False or None, got 'yes'"),
        (
            {"uses_overlap": False, "forgets_cordoned": True},
            "forgets_cordoned = True is for a router that goes by what workers hold, and uses_overlap is False",
        ),
        ({"tiers": {"host": 0}}, "tiers: host must be an integer of at least 1 (blocks), got 0"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_line(declared, message):
    assert failure_of(of_workers(RightRouter, **declared), REPEATS) == f"Failed: OfX: {message}"
