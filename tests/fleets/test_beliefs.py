"""A router's beliefs are compared before each pick with the events and hooks that it received."""

import asyncio
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from depth import few
from planted_bugs import (
    ROUTER_BUGS,
    CountedTwice,
    DeadWorkerKept,
    LoraBlind,
    NeverFreed,
    NeverMatches,
    NewWorkerNotLearnt,
    RanksSummed,
    StaleIndex,
)

from pytest_kvmock import (
    BACKENDS,
    EngineProfile,
    EventRulesBroken,
    Fleet,
    MockEngine,
    MockEngineArgs,
    Prompt,
    RadixIndexError,
    Removed,
    RouterHarness,
    Stored,
)
from pytest_kvmock.fleets import DynamoRouter, FleetRequest, RoundRobin, RouterError, synthetic_trace
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.hygiene.problem import ROUTER_RULES
from pytest_kvmock.testing import RightRouter

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=32)
SETTINGS = [
    "plain",
    "eight",
    "small",
    "restart",
    "silent",
    "join",
    "leave",
    "crash",
    "noticed",
    "late",
    "lost",
    "ranks",
]


class OnlyTheLiving(RightRouter):
    """A router that picks only offered workers, whatever it believes, so that the run reaches its report."""

    def pick(self, request, candidates):
        live = {each.worker for each in candidates} & {*self.workers()}
        overlaps = self.overlap(request)
        return min(sorted(live), key=lambda worker: self.cost(request, worker, overlaps.get(worker, 0)))


class DeadIsKept(DeadWorkerKept, OnlyTheLiving):
    """Keeps a worker that is gone."""


class RemovesForAll(RightRouter):
    """Removes the block of a Removed from all workers."""

    def apply(self, event):
        super().apply(event)
        if isinstance(event.event.data, Removed):
            for worker in self.workers():
                if worker != event.worker_id:
                    super().apply(replace(event, worker_id=worker))


def trace(count=40, seed=0, **options):
    options = {"groups": 4, "prefix_blocks": (2, 5), "turns": (1, 3), "interval_ms": 15, "delay_ms": (5, 50), **options}
    sizes = {"block_size": 4, "input_tokens": (4, 24), "output_tokens": (1, 12)}
    return list(synthetic_trace(count, seed=seed, **sizes, **options))


def happen(fleet, setting, at=200):
    if setting in ("restart", "crash", "leave"):
        getattr(fleet.at(at), setting)(1)
    elif setting == "noticed":
        fleet.at(at).crash(1, notice_ms=60)
    elif setting == "silent":
        fleet.at(at).restart(1, announced=False)


def bare(router_type, setting="plain", seed=0, backend=None, rows=None, **options):
    """Return the report of a fleet outside of a harness, behind one of our routers."""
    count = 8 if setting == "eight" else 3
    fields = {"num_gpu_blocks": 38 if setting == "small" else 64, "block_size": 4}
    if setting == "ranks":
        fields |= {"dp_size": 2}
        count = 4
    if backend is not None and "sglang" in backend:
        fields["engine_type"] = "sglang"
    else:
        fields["max_num_batched_tokens"] = 32
    args = MockEngineArgs(**fields)
    engines = [MockEngine(args, backend=backend, seed=each) for each in range(count)]
    named = [(each // 2, each % 2) for each in range(count)] if setting == "ranks" else range(count)
    router = router_type(named, seed, copies=BACKENDS[backend or "lineage"].residency == "counted")
    options = {"event_delay_ms": 40 if setting == "late" else 0, **options}
    fleet = Fleet(engines, router, **options)
    happen(fleet, setting)
    if setting == "join":
        fleet.at(200).join(engine=MockEngine(args, backend=backend, seed=9))
    return fleet.run(trace(seed=seed) if rows is None else rows)


def judged(router_type, setting="plain", seed=0, backend="lineage", **options):
    """Return a harness and the report of its fleet."""
    world = RouterHarness(
        EngineProfile(num_blocks=64, block_size=4, workers=3, dp_size=2 if setting == "ranks" else 1),
        backend,
        **options,
    )
    router = router_type(world.workers, seed, copies=BACKENDS[backend or "lineage"].residency == "counted")
    if setting == "lost":
        world.faults.at_random({"lose": 0.2})
    fleet = world.fleet(router, event_delay_ms=40 if setting == "late" else 0)
    happen(fleet, setting)
    if setting == "join":
        fleet.at(200).join()
    return world, fleet.run(trace(seed=seed))


# -------------------------------------------------------------------------------------------------- no false alarm


@pytest.mark.parametrize("seed", few(range(10)))
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each != "lost"])
def test_a_correct_router_has_no_wrong_belief(setting, seed):
    assert bare(RightRouter, setting, seed).beliefs == ()


@pytest.mark.parametrize("setting", ["plain", "restart", "crash", "late"])
@pytest.mark.parametrize(
    "backend", ["multi_lru", "hash_cache", "vllm", "mocker_sglang_1_6", "sglang", "vllm_gpt_oss", "vllm_qwen3_next"]
)
def test_a_correct_router_has_no_wrong_belief_over_any_engine(backend, setting):
    report = bare(RightRouter, setting, 0, backend)
    report.assert_no_drift()
    assert report.beliefs == ()


@pytest.mark.parametrize("seed", few(range(10)))
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_correct_router_has_no_wrong_belief_in_a_harness_with_faults(setting, seed):
    world, report = judged(RightRouter, setting, seed)
    assert report.beliefs == ()
    assert not {problem.rule for problem in world.judge().errors} & {"load_drift", "overlap_drift", "worker_drift"}


@pytest.mark.parametrize("semantics", ["1.2.1", "1.6.1"])
@pytest.mark.parametrize("setting", ["restart", "crash", "noticed", "leave", "join", "silent"])
def test_a_correct_router_has_no_wrong_belief_of_ranks_after_incidents(setting, semantics):
    args = MockEngineArgs(num_gpu_blocks=64, block_size=4, dp_size=2, semantics=semantics)
    named = [(each // 2, each % 2) for each in range(6)]
    fleet = Fleet([MockEngine(args) for _ in named], RightRouter(named), record=True)
    happen(fleet, setting)
    if setting == "join":
        fleet.at(200).join()
    report = fleet.run(trace())
    report.assert_no_drift()
    if setting not in ("silent", "noticed"):  # where the router is notified late or never
        report.assert_regret(DynamoRouter())
    assert (setting == "join") + 3 == len({worker[0] for worker in report.workers})


@pytest.mark.parametrize("loads", ["router", "engine"])
def test_a_correct_router_that_makes_requests_wait_has_no_wrong_belief(loads):
    class Waiting(RightRouter):
        """Allows at most two requests per worker."""

        def pick(self, request, candidates):
            free = {worker for worker, (*_, requests) in self.loads().items() if requests < 2}
            return min(free, key=lambda worker: self.cost(request, worker, 0)) if free else None

    for setting in SETTINGS:
        if setting != "lost":
            bare(Waiting, setting, loads=loads).assert_no_drift()


def test_a_correct_router_has_no_wrong_belief_in_a_second_run():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3))
    fleet = world.fleet(RightRouter(range(3)))
    assert [fleet.run(trace(seed=seed)).beliefs for seed in range(2)] == [(), ()]
    assert world.judge().errors == []


def test_requests_left_open_by_stop_ms_are_no_wrong_belief():
    fleet = Fleet([MockEngine(ARGS) for _ in range(3)], RightRouter(range(3)), stop_ms=200)
    assert [fleet.run(trace(seed=seed)).beliefs for seed in range(2)] == [(), ()]


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_router_need_not_know_blocks_stored_outside_its_runs(when):
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3))
    fleet = world.fleet(RightRouter(range(3)))
    if when == "between":
        fleet.run(trace(20, seed=3))
    hashes = [row.prompt(4).block_hashes(4) for row in trace()[:5]]
    for each in hashes:
        world.worker(1).serve(Prompt(hashes=each))
    assert fleet.run(trace()).beliefs == ()


# ------------------------------------------------------------------------------------------------------ planted bugs


BUGS = [
    (StaleIndex, "restart", "overlap_drift"),
    (NeverFreed, "plain", "load_drift"),
    (CountedTwice, "plain", "load_drift"),
    (NewWorkerNotLearnt, "join", "worker_drift"),
    (DeadIsKept, "crash", "worker_drift"),
    (RanksSummed, "ranks", "overlap_drift"),
    (NeverMatches, "plain", "overlap_drift"),
    (RemovesForAll, "small", "overlap_drift"),
]


@pytest.mark.parametrize("seed", few(range(10)))
@pytest.mark.parametrize(("bug", "setting", "rule"), BUGS, ids=[bug.__name__ for bug, *_ in BUGS])
def test_a_planted_bug_is_reported_at_the_first_wrong_belief(bug, setting, rule, seed):
    report = bare(bug, setting, seed)
    assert rule == report.beliefs[0].rule
    with pytest.raises(AssertionError, match=rule):
        report.assert_no_drift()


def found_by(name, seed):
    """Return the check that finds a planted bug in its setting: the first wrong belief, else regret, else promised
    blocks that were not found.
    """
    bug = ROUTER_BUGS[name]
    rows = None
    if bug.shows_in == "adapters":
        rows = [FleetRequest(Prompt(range(24), lora_name="ab"[at % 2]), 2, 100.0 * at) for at in range(6)]

    def make(workers, seed, copies):
        return bug.make(workers, seed, copies=copies, of=OnlyTheLiving)

    setting = {"adapters": "plain", "late": "small"}.get(bug.shows_in, bug.shows_in)
    late_ms = 400 if bug.shows_in == "late" else 0
    report = bare(make, setting, seed, rows=rows, record=True, event_delay_ms=late_ms)
    if report.beliefs:
        return report.beliefs[0].rule
    if not late_ms and report.regret(DynamoRouter()).share > 0:  # a correct router has some when events are late
        return "regret"
    return "promised_not_found" if report.figure("promised_not_found") else None


@pytest.mark.parametrize("seed", few(range(10)))
@pytest.mark.parametrize("name", ROUTER_BUGS)
def test_each_planted_bug_is_found_by_the_checks_of_its_table_row(name, seed):
    assert ROUTER_BUGS[name].found_by == found_by(name, seed)


def test_a_router_that_ignores_adapters_is_reported():
    rows = [
        FleetRequest(Prompt(range(24), lora_name=name), 2, 100.0 * at) for at, name in enumerate(["a", "b", "a", "b"])
    ]
    report = bare(LoraBlind, rows=rows)
    assert (report.beliefs[0].rule, report.beliefs[0].number) == ("overlap_drift", 2)
    bare(RightRouter, rows=rows).assert_no_drift()


@pytest.mark.parametrize(("bug", "setting", "rule"), BUGS[:6], ids=[bug.__name__ for bug, *_ in BUGS[:6]])
def test_a_wrong_belief_fails_the_test_of_a_harness(bug, setting, rule):
    world, _ = judged(bug, setting)
    (problem, *_) = world.judge().errors
    assert rule == problem.rule
    with pytest.raises(EventRulesBroken, match=rule):
        world.events.assert_no_event_errors()


def test_a_wrong_belief_can_be_expected_or_allowed():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3))
    with world.events.expect_error("load_drift"):
        world.fleet(NeverFreed(range(3))).run(trace())
    assert world.judge().errors == []
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3), allow=["load_drift"])
    world.fleet(NeverFreed(range(3))).run(trace())
    world.events.assert_no_event_errors()


def test_consequences_of_a_wrong_belief_are_listed_under_it():
    world, report = judged(NeverMatches)
    assert [belief.rule for belief in report.beliefs] == ["overlap_drift", "load_drift"]
    (problem,) = world.judge().errors
    assert problem.rule == "overlap_drift"
    assert [each.rule for each in problem.folded] == ["load_drift"]


# ------------------------------------------------------------------------------------------------------------- texts


def test_a_wrong_load_names_the_hook_since_which_it_differs():
    (belief, *_) = bare(NeverFreed).beliefs
    text = (
        r"NeverFreed\.loads\(\) says \d+ prefill tokens, \d+ blocks, \d+ requests of worker \d before the pick for request \d+ at "  # noqa: E501
        r"[\d.]+ ms; they differ since finished\(request 6\) at [\d.]+ ms"
    )
    assert re.fullmatch(text, belief.observed)
    assert belief.expected == "9 prefill tokens, 17 blocks, 3 requests"


def test_a_wrong_belief_names_a_hook_that_the_router_lacks():
    class Deaf(RightRouter):
        worker_added = None

    (belief, *_) = bare(Deaf, "join").beliefs
    assert (
        belief.observed
        == f"Deaf.workers() does not know worker 3 before the pick for request {belief.number} at {belief.ms:g} ms; "
        "they differ since worker_added(3) at 200 ms, which it does not have"
    )
    assert belief.expected == "the workers 0, 1, 2, 3"


def test_a_wrong_overlap_names_the_last_event_received_from_the_worker():
    (belief, *_) = bare(StaleIndex, "restart").beliefs
    assert "; the last call about that worker is " in belief.observed
    assert belief.expected.endswith(", by the reference index of the same events")


def test_a_wrong_overlap_names_the_restart_before_the_last_event():
    class AllToOne(StaleIndex):
        def pick(self, request, candidates):
            return 1

    rows = [FleetRequest(Prompt(range(start, start + 24)), 2, at) for start, at in ((0, 0.0), (100, 300.0), (0, 600.0))]
    (belief, *_) = bare(AllToOne, "restart", rows=rows).beliefs
    assert belief.number == 2
    text = r"of worker 1 before .*; the last call about that worker is apply\(\) of Stored event \d+ at [\d.]+ ms, and before that worker_removed\(1\) at 200 ms: "  # noqa: E501
    assert re.search(text.removeprefix("of "), belief.observed)
    assert belief.observed.endswith("what it held until then is gone")


def test_a_wrong_overlap_names_the_other_rank_that_has_it():
    class BestOfRanks(RightRouter):
        def overlap(self, request):
            found = super().overlap(request)
            return {
                (worker, rank): max(found.get((worker, each), 0) for each in (0, 1)) for worker, rank in self.workers()
            }

    (belief, *_) = bare(BestOfRanks, "ranks").beliefs
    worker, rank = belief.worker
    assert (
        f"blocks on worker {(worker, rank)}, which {(worker, 1 - rank)} holds, another rank, before the pick"
        in belief.observed
    )


def test_a_load_part_that_a_router_does_not_count_is_not_expected():
    class RequestsOnly(NeverFreed):
        def loads(self):
            return {worker: (None, None, requests) for worker, (*_, requests) in super().loads().items()}

    (belief, *_) = bare(RequestsOnly).beliefs
    assert re.fullmatch(r"\d+ requests", belief.expected)


def test_a_load_part_that_a_router_does_not_count_is_not_compared():
    class RequestsOnly(CountedTwice):
        def loads(self):
            return {worker: (None, None, requests) for worker, (*_, requests) in super().loads().items()}

        def cost(self, request, worker, overlap):
            return self.book.loads[worker].requests

    assert bare(RequestsOnly).beliefs == ()


def test_the_beliefs_of_an_async_router_are_checked():
    class Async(NeverFreed):
        async def loads(self):
            await asyncio.sleep(0)
            return super().loads()

    fleet = Fleet([MockEngine(ARGS) for _ in range(2)], Async(range(2)))
    with pytest.raises(TypeError, match=r"Async\.loads is async; run the fleet with `await fleet\.arun\(trace\)`"):
        fleet.run(trace())
    report = asyncio.run(fleet.arun(trace()))
    assert report.beliefs[0].rule == "load_drift"


def test_a_router_without_beliefs_is_not_asked():
    report = Fleet([MockEngine(ARGS) for _ in range(2)], RoundRobin()).run(trace())
    assert report.beliefs is None
    with pytest.raises(ValueError, match="assert_no_drift: RoundRobin does not say what it believes"):
        report.assert_no_drift()


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("method", "answer", "shape"),
    [
        ("loads", [1, 2], "{worker: (prefill_tokens, blocks, requests)}"),
        ("loads", {0: 3}, "{worker: (prefill_tokens, blocks, requests)}"),
        ("loads", {0: (1, 2)}, "{worker: (prefill_tokens, blocks, requests)}"),
        ("loads", {0: (1, 2, "3")}, "{worker: (prefill_tokens, blocks, requests)}"),
        ("overlap", [3], "{worker: blocks}"),
        ("overlap", {0: 1.5}, "{worker: blocks}"),
        ("believed", [3], "{worker: blocks}"),
        ("believed", {0: 1.5}, "{worker: blocks}"),
        ("workers", None, "the workers that it knows"),
        ("workers", "012", "the workers that it knows"),
    ],
    ids=map(str, range(10)),
)
def test_beliefs_with_an_invalid_structure_are_reported(method, answer, shape):
    class Wrong(RightRouter):
        pass

    setattr(Wrong, method, lambda self, *request: answer)
    with pytest.raises(RouterError) as failure:
        bare(Wrong)
    assert f"Wrong.{method}() must return {shape}, got {answer!r}" in str(failure.value)


@pytest.mark.parametrize(
    ("method", "answer", "setting", "name", "allowed"),
    [
        ("loads", {"0": (0, 0, 0)}, "plain", "'0'", "its id, 0"),
        ("loads", {(0, 0, 0): (0, 0, 0)}, "plain", "(0, 0, 0)", "its id, 0"),
        ("loads", {0: (0, 0, 0)}, "ranks", "0", "its id and rank, (0, 0)"),
        ("overlap", {"0": 1}, "plain", "'0'", "its id, 0"),
        ("overlap", {0: 1}, "ranks", "0", "its id and rank, (0, 0)"),
        ("overlap", {True: 1}, "plain", "True", "its id, 0"),
        ("believed", {"0": 1}, "plain", "'0'", "its id, 0"),
        ("believed", {0: 1}, "ranks", "0", "its id and rank, (0, 0)"),
        ("workers", [[0], [1]], "plain", "[0]", "its id, 0"),
        ("workers", [(0, [0])], "plain", "(0, [0])", "its id, 0"),
        ("workers", [0.5], "plain", "0.5", "its id, 0"),
        ("workers", [0, 1], "ranks", "0", "its id and rank, (0, 0)"),
    ],
    ids=map(str, range(12)),
)
def test_a_belief_about_an_unknown_worker_is_a_router_error(method, answer, setting, name, allowed):
    class Wrong(RightRouter):
        pass

    setattr(Wrong, method, lambda self, *request: answer)
    with pytest.raises(RouterError) as failure:
        bare(Wrong, setting)
    text = f"Wrong.{method}() names a worker {name}; in this fleet a worker is named by {allowed} (at 0 ms, <request 0 "
    assert str(failure.value).startswith(text)


def test_loads_can_be_keyed_by_worker_and_rank_0():
    class Keys(RightRouter):
        """Without ranks, (id, 0) also names a worker, as in the scores of a RadixIndex."""

        def loads(self):
            return {(worker, 0): load for worker, load in super().loads().items()}

    assert bare(Keys).beliefs == ()


def test_a_belief_method_with_another_signature_is_refused():
    class Other(RoundRobin):
        def overlap(self, request, candidate):
            return 0

    text = (
        "Other.overlap() says what the router believes and is asked as overlap(request); got overlap(request, "
        "candidate). A method for something else needs another name"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        Fleet([MockEngine(ARGS)], Other())


# ------------------------------------------------------------------------------------------- trees of what was sent


class Sends(RoundRobin):
    """A router that records the blocks sent to each worker; with `answers` also the generated blocks in its events."""

    def __init__(self, workers=(), seed=0, *, copies=False, answers=False):
        super().__init__()
        self.sent, self.answers, self.out = {}, answers, RadixIndex(count_copies=True)

    def believed(self, request):
        found = {worker: self.leading(request, held) for worker, held in self.sent.items()}
        for key, score in self.out.find_matches(request.local_hashes).scores.items():
            worker = key if any(isinstance(each, tuple) for each in found) else key[0]
            found[worker] = max(found.get(worker, 0), score)
        return found

    def leading(self, request, held):
        return next((at for at, block in enumerate(self.names(request)) if block not in held), len(self.names(request)))

    def names(self, request):
        return request.sequence_hashes

    def dispatched(self, request, worker):
        self.sent.setdefault(worker, set()).update(self.names(request))

    def apply(self, event):
        if self.answers and isinstance(event.event.data, Stored):
            with suppress(RadixIndexError):  # from a worker that leaves, or below a block whose event was lost
                self.out.apply(event)

    def worker_removed(self, worker):
        self.sent.pop(worker, None)
        self.out.remove_worker(worker[0] if isinstance(worker, tuple) else worker)


class StaleTree(Sends):
    """Keeps the record of a worker that restarts."""

    def worker_removed(self, worker):
        pass


class CutHashes(Sends):
    """Keeps only three bits of each hash."""

    def names(self, request):
        return [each & 7 for each in request.local_hashes]


class MixesAdapters(Sends):
    """Records tokens without their adapter."""

    def names(self, request):
        return Prompt(request.tokens).sequence_hashes(request.block_size)


class SentToAll(Sends):
    """Assumes that a prompt sent to one worker is on all workers."""

    def believed(self, request):
        found = super().believed(request)
        return dict.fromkeys(found, max(found.values(), default=0))


class CountsPicks(Sends):
    """Records each pick as a sent prompt, from the second request on for the wrong worker."""

    def pick(self, request, candidates):
        self.dispatched(request, 1 if request.number else 0)
        return 0


def sends_answers(workers, seed, *, copies):
    return Sends(answers=True)


@pytest.mark.parametrize("make", [Sends, sends_answers], ids=["prompts", "answers"])
@pytest.mark.parametrize("setting", [each for each in SETTINGS if each != "lost"])
def test_a_correct_record_of_sent_prompts_has_no_drift(setting, make):
    for seed in range(3):
        report = bare(make, setting, seed)
        report.assert_no_drift()
        assert report.figure("believed_not_found") is not None


@pytest.mark.parametrize(
    "backend", ["multi_lru", "hash_cache", "vllm", "mocker_sglang_1_6", "sglang", "vllm_gpt_oss", "vllm_qwen3_next"]
)
def test_a_correct_record_of_sent_prompts_has_no_drift_over_any_engine(backend):
    for setting in ("small", "restart"):
        bare(sends_answers, setting, 0, backend).assert_no_drift()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_correct_record_of_sent_prompts_has_no_drift_with_faults(setting):
    world, report = judged(sends_answers, setting)
    assert report.beliefs == ()
    assert not {problem.rule for problem in world.judge().errors} & ROUTER_RULES


def test_a_record_of_sent_prompts_stays_correct_across_runs_and_fleets():
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3))
    router = Sends()
    for _ in range(2):
        fleet = world.fleet(router)
        assert [fleet.run(trace(seed=seed)).beliefs for seed in range(2)] == [(), ()]
    assert world.judge().errors == []


@pytest.mark.parametrize(("tree", "count"), [(Sends, 0), (StaleTree, 1)])
def test_a_worker_filled_by_another_fleet_is_checked_from_its_restart_on(tree, count):
    named, router = [MockEngine(ARGS) for _ in range(2)], tree()
    assert Fleet(named, router).run(trace()).beliefs == ()
    fleet = Fleet(named, router)
    fleet.at(100).restart(1)
    assert count == len(fleet.run(trace()).beliefs)


ADAPTERS = [FleetRequest(Prompt(range(24), lora_name="ab"[at % 2]), 2, 100.0 * at) for at in range(6)]


@pytest.mark.parametrize(
    ("bug", "setting", "rows"),
    [
        (StaleTree, "restart", None),
        (CutHashes, "plain", None),
        (MixesAdapters, "plain", ADAPTERS),
        (SentToAll, "plain", None),
        (SentToAll, "ranks", None),
        (CountsPicks, "plain", None),
    ],
)
def test_a_wrong_record_of_sent_prompts_is_reported(bug, setting, rows):
    (belief,) = bare(bug, setting, rows=rows).beliefs
    assert belief.rule == "overlap_drift"
    assert re.match(
        rf"{bug.__name__}\.believed\(\) says \d+ of \d+ blocks on worker .* before the pick", belief.observed
    )
    assert re.fullmatch(
        r"at most \d+: no more of it was sent to that worker, or generated there, since its last announced start",
        belief.expected,
    )


def test_a_record_that_outlives_a_restart_names_that_restart():
    class AllToOne(StaleTree):
        def pick(self, request, candidates):
            return 1

    rows = [FleetRequest(Prompt(range(24)), 2, 300.0 * at) for at in range(3)]
    (belief,) = bare(AllToOne, "restart", rows=rows).beliefs
    assert belief.number == 1
    assert (
        "AllToOne.believed() says 6 of 6 blocks on worker 1 before the pick for request 1 at 300 ms" in belief.observed
    )
    assert "worker_removed(1) at 200 ms" in belief.observed
    assert belief.expected.startswith("at most 0: ")


@pytest.mark.parametrize(("setting", "lost"), [("plain", 0), ("silent", 6)])
def test_blocks_lost_by_a_silent_restart_are_a_figure_but_no_failure(setting, lost):
    class AllToOne(Sends):
        def pick(self, request, candidates):
            return 1

    rows = [FleetRequest(Prompt(range(24)), 2, 300.0 * at) for at in range(2)]
    report = bare(AllToOne, setting, rows=rows)
    assert report.beliefs == ()
    assert [pick.believed for pick in report.picks] == [0, 6]
    assert lost == report.figure("believed_not_found") == report.to_json()["fleet"]["all"]["believed_not_found"]
    assert lost == report.figure("believed_not_found", 1)
    assert "believed, not found" in str(report)


def test_a_router_without_believed_has_no_believed_not_found_figure():
    report = bare(RightRouter)
    assert report.figure("believed_not_found") is None
    assert "believed, not found" not in str(report)
    assert {pick.believed for pick in report.picks} == {None}


@pytest.mark.parametrize("invented", [0, 1])
def test_only_generated_answers_may_be_believed_besides_sent_prompts(invented):
    router, first = Sends(answers=True), Prompt(range(16))
    fleet = Fleet([MockEngine(ARGS)], router)
    fleet.run([FleetRequest(first, 9, 0.0)])
    out = [each for event in router.out.dump_events() for each in event.event.data.tokens_hashes]
    answer = out[len(first.block_hashes(4)) :]
    assert answer
    chain = (*out, *range(1, 1 + invented))  # a turn begins with the previous turn and its answer
    if invented:
        router.sent[0].update(Prompt(hashes=chain).sequence_hashes(4))
    report = fleet.run([FleetRequest(Prompt(hashes=chain), 2, 0.0)])
    assert len(out) + invented == report.picks[0].believed
    assert invented == len(report.beliefs)
