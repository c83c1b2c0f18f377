"""Fleets behind routers of all kinds: hooks, waiting, candidates, and router errors."""

import asyncio
import math
import re
import tracemalloc
from dataclasses import replace
from random import Random
from statistics import pstdev

import pytest
from depth import seeds
from planned import planned

from pytest_kvmock import (
    BACKENDS,
    EngineProfile,
    Fleet,
    MockEngine,
    MockEngineArgs,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterHarness,
    Stored,
    replay,
)
from pytest_kvmock.fleets import (
    Candidate,
    DynamoRouter,
    EngineStalled,
    FleetRequest,
    LeastLoaded,
    MostCached,
    RoundRobin,
    RouterError,
    RouterRequest,
    RouterStalled,
    TraceRequest,
    synthetic_trace,
)
from pytest_kvmock.fleets.report.statistics import statistics

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)


def engines(count=2, args=ARGS, backend=None):
    return [MockEngine(args, backend=backend, seed=seed) for seed in range(count)]


def request(at, blocks, output=2, **more):
    return TraceRequest(at, 4 * len(blocks), output, tuple(blocks), **more)


def trace(count=40, **options):
    small = {"input_tokens": (4, 24), "output_tokens": (1, 12), "delay_ms": (5, 50)}
    options = {
        **small,
        "groups": 3,
        "prefix_blocks": (3, 3),
        "turns": (1, 3),
        "block_size": 4,
        "interval_ms": 10,
        **options,
    }
    return list(synthetic_trace(count, **options))


class Listening(RoundRobin):
    """A router that records the arguments of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def dispatched(self, request, worker):
        self.calls.append(("dispatched", request.number, worker))

    def first_token(self, request):
        self.calls.append(("first_token", request.number))

    def finished(self, request):
        self.calls.append(("finished", request.number, request.status))


class Hearing(RoundRobin):
    """A router that records its events."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def apply(self, event):
        self.heard.append(event)


@pytest.mark.parametrize("backend", ["vllm", "vllm_0_19", "lineage"])
def test_a_router_without_apply_gives_the_same_run_as_one_with_apply(backend):
    """If no sink needs single events, removed blocks are published together: ids, caches and figures stay the same."""
    hearing, heard = Hearing(), []
    listened = engines(3, backend=backend)

    class Listener:
        def publish(self, event):
            heard.append(event)

    listened[1].worker.publish_to(Listener())
    plain, told, watched = (
        Fleet(engines(3, backend=backend), RoundRobin()),
        Fleet(engines(3, backend=backend), hearing),
        Fleet(listened, RoundRobin()),
    )
    expected = plain.run(trace(120))
    for fleet in (told, watched):
        report = fleet.run(trace(120))
        assert (report.picks, report.per_request()) == (expected.picks, expected.per_request())
        assert report.rows() == expected.rows()
    assert any(isinstance(each.data, Removed) for each in hearing.heard)
    for worker in range(3):
        ids = [each.event_id for each in hearing.heard if each.worker_id == worker]
        assert list(range(len(ids))) == ids
    assert [(each.event_id, each.data) for each in hearing.heard if each.worker_id == 1] == [
        (each.event_id, each.data) for each in heard
    ]


def test_hooks_are_called_in_order_and_a_single_token_has_no_first_token_hook():
    router = Listening()
    Fleet(engines(), router).run([request(0, [1, 2], 1), request(1, [3], 2)])
    expected = {
        0: [("dispatched", 0, 0), ("finished", 0, "finished")],
        1: [("dispatched", 1, 1), ("first_token", 1), ("finished", 1, "finished")],
    }
    assert {number: [call for call in router.calls if call[1] == number] for number in (0, 1)} == expected


def test_all_router_methods_receive_the_same_request_object():
    seen = []

    class Router(Listening):
        def pick(self, request, candidates):
            seen.append(request)
            return super().pick(request, candidates)

        def dispatched(self, request, worker):
            assert request is seen[-1]

        def finished(self, request):
            seen.remove(request)

    Fleet(engines(), Router()).run(trace(10))
    assert seen == []


def test_a_router_receives_every_event():
    heard = []

    class Router(RoundRobin):
        def apply(self, event):
            heard.append(event)

    Fleet(engines(), Router()).run([request(0, [1, 2]), request(5, [3])])
    stored = [(event.worker_id, len(event.data.block_hashes)) for event in heard if isinstance(event.data, Stored)]
    assert {worker for worker, _ in stored} == {0, 1}


def test_a_candidate_has_its_overlap_and_current_loads():
    seen = []

    class Router:
        def pick(self, request, candidates):
            seen.append(candidates)
            return 0

    Fleet(engines(), Router()).run([request(0, [1, 2, 3], 4), request(1, [1, 2, 5], 2)])
    first, second = seen
    assert [each[1:6] for each in first] == [(0, 0, 0, 3, 0)] * 2
    mine, other = second
    assert mine[1:6] == (2, 12, 3, 1, 1)
    assert other[1:6] == (0, 0, 0, 3, 0)


class Holding(RoundRobin):
    """A router that lets requests wait while the given number is open."""

    def __init__(self, most):
        super().__init__()
        self.most, self.open, self.asked = most, 0, []

    def pick(self, request, candidates):
        self.asked.append(request.number)
        return None if self.open >= self.most else super().pick(request, candidates)

    def dispatched(self, request, worker):
        self.open += 1

    def finished(self, request):
        self.open -= 1


def test_waiting_requests_are_picked_again_in_order():
    report = Fleet(engines(), Holding(1)).run([request(0, [n, n + 100]) for n in range(6)])
    assert list(range(6)) == [pick.number for pick in report.picks]
    assert all(pick.waited_ms > 0 for pick in report.picks[1:])


def test_next_waiting_chooses_the_next_request():
    class LastFirst(Holding):
        def next_waiting(self, requests):
            return requests[-1]

    report = Fleet(engines(), LastFirst(1)).run([request(0, [n, n + 100]) for n in range(4)])
    assert [pick.number for pick in report.picks] == [0, 3, 2, 1]


def test_a_new_arrival_queues_behind_waiting_requests():
    router = Holding(1)
    Fleet(engines(), router).run([request(0, [1], 9), request(1, [2]), request(2, [3])])
    assert router.asked[:2] == [0, 1]
    assert 2 not in router.asked[: router.asked.index(1, 2)]


def test_requests_that_wait_while_nothing_runs_stall_the_router():
    with pytest.raises(RouterStalled, match=r"pick\(\) returned None and nothing runs, so 2 requests") as raised:
        Fleet(engines(), Holding(0)).run([request(0, [1]), request(1, [2])])
    assert [each.number for each in raised.value.requests] == [0, 1]
    assert len(raised.value.candidates) == 2


def test_an_async_router_makes_the_same_picks_as_a_sync_one():
    class Async:
        def __init__(self):
            self.inner = DynamoRouter(tie="first")

        async def pick(self, request, candidates):
            await asyncio.sleep(0)
            return self.inner.pick(request, candidates)

    plain = Fleet(engines(), DynamoRouter(tie="first")).run(trace())
    awaited = asyncio.run(Fleet(engines(), Async()).arun(trace()))
    assert plain.picks == awaited.picks
    assert plain.compare(awaited).differences == {}
    with pytest.raises(TypeError, match=r"Async\.pick is async; run the fleet with `await fleet\.arun\(trace\)`"):
        Fleet(engines(), Async()).run(trace())


def test_an_async_router_that_is_slow_is_reported():
    class Slow:
        async def pick(self, request, candidates):
            await asyncio.Event().wait()

    with pytest.raises(RouterError, match=r"Slow\.pick\(\) took longer than pick_timeout_s=0\.01"):
        asyncio.run(Fleet(engines(), Slow(), pick_timeout_s=0.01).arun(trace(2)))


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def pick(self, request, candidates):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (7, r"Answers\.pick\(\) returned 7; there is no such worker\. Candidates: 0, 1"),
        ("a", r"returned 'a'; there is no such worker"),
        ([0], r"returned \[0\]; there is no such worker"),
        (Candidate(0), r"returned Candidate\(.*; that is a candidate; return its worker"),
        (KeyError("x"), r"Answers\.pick\(\) raised KeyError\('x'\)"),
    ],
)
def test_an_invalid_pick_is_reported_with_time_request_and_candidates(answer, text):
    with pytest.raises(RouterError, match=text) as raised:
        Fleet(engines(), Answers(answer)).run([request(0, [1])])
    assert raised.value.now_ms == 0.0
    assert raised.value.request.number == 0
    assert "prefill_tokens" in str(raised.value)
    assert (raised.value.__cause__ is answer) == isinstance(answer, Exception)


def test_a_coroutine_returned_in_a_sync_run_is_reported():
    async def later():
        return 0

    class Hidden:
        def pick(self, request, candidates):
            return later()

    with pytest.raises(RouterError, match="returned an awaitable"):
        Fleet(engines(), Hidden()).run([request(0, [1])])


def test_a_hook_that_raises_is_named_in_the_error():
    class Broken(RoundRobin):
        def finished(self, request):
            raise ZeroDivisionError

    with pytest.raises(RouterError, match=r"Broken\.finished\(\) raised ZeroDivisionError"):
        Fleet(engines(), Broken()).run([request(0, [1])])


def problem_of(router, play):
    with pytest.raises(RouterError) as raised:
        play(Fleet(engines(), router))
    return re.sub(r":\d+", ":LINE", raised.value.problem)


def test_an_error_of_a_router_names_the_line_that_raised():
    class Looks(RoundRobin):
        def pick(self, request, candidates):
            return self.look_up(request)

        def look_up(self, request):
            return {}[request.number]

    text = "Looks.pick() raised KeyError(0) (test_fleet.py:LINE in look_up)"
    assert problem_of(Looks(), lambda fleet: fleet.run([request(0, [1])])) == text


def test_an_error_of_an_async_router_names_the_line_that_raised():
    class Looks(RoundRobin):
        async def pick(self, request, candidates):
            await asyncio.sleep(0)
            return {}[request.number]

    text = "Looks.pick() raised KeyError(0) (test_fleet.py:LINE in pick)"
    assert problem_of(Looks(), lambda fleet: asyncio.run(fleet.arun([request(0, [1])]))) == text


def test_an_error_of_the_call_itself_names_no_line():
    class TakesOne(RoundRobin):
        def finished(self):
            return None

    text = "TakesOne.finished() raised TypeError"
    problem = problem_of(TakesOne(), lambda fleet: fleet.run([request(0, [1])]))
    assert (problem.startswith(text), ".py" in problem) == (True, False)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Fleet(engines(), RoundRobin), TypeError, r"router is the class RoundRobin"),
        (lambda: Fleet(engines(), object()), TypeError, r"must have a method pick\(request, candidates\)"),
        (
            lambda: Fleet([], RoundRobin()),
            ValueError,
            r"there are no engines, so args=",
        ),
        (lambda: Fleet([object()], RoundRobin()), TypeError, "engine 0 must be a MockEngine"),
        (lambda: Fleet(engines(), RoundRobin(), loads="mine"), ValueError, "loads"),
        (lambda: Fleet(engines(), RoundRobin(), loads_every_ms=-1), ValueError, "loads_every_ms"),
        (lambda: Fleet(engines(), RoundRobin(), event_delay_ms=-1), ValueError, "event_delay_ms"),
        (lambda: Fleet(engines(), RoundRobin(), concurrency=0), ValueError, "concurrency"),
        (lambda: Fleet(engines(), RoundRobin(), stop_ms=-1), ValueError, "stop_ms"),
        (lambda: Fleet(engines(), RoundRobin(), arrival_speedup=0), ValueError, "arrival_speedup"),
        (lambda: Fleet(engines(), RoundRobin(), semantics="9"), ValueError, "semantics"),
        (lambda: Fleet(engines(), RoundRobin(), object()), TypeError, r"index must have a method apply\(\)"),
        (lambda: Fleet(engines(), RoundRobin()).run([]), ValueError, "Fleet: there is no request$"),
        (
            lambda: Fleet(engines(), RoundRobin()).run(iter(())),
            ValueError,
            (
                "Fleet: there is no request: the trace is a tuple_iterator that has nothing left: it is empty "
                "after it was read once; a list is not$"
            ),
        ),
        (lambda: Fleet(engines(), RoundRobin()).run([1]), TypeError, "must be a TraceRequest or FleetRequest"),
        (
            lambda: Fleet([*engines(1), MockEngine(MockEngineArgs(block_size=8))], RoundRobin()),
            ValueError,
            "one block_size, got 4, 8",
        ),
        (lambda: Fleet(engines(), RoundRobin()).run([request(0, range(99))]), OutOfBlocks, "can never fit"),
        (lambda: DynamoRouter("1.0"), ValueError, "semantics '1.0'"),
        (lambda: DynamoRouter(router_queue_threshold=-1.0), ValueError, "router_queue_threshold"),
        (lambda: DynamoRouter(router_queue_policy="last"), ValueError, "router_queue_policy"),
    ],
)
def test_invalid_arguments_of_a_fleet_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_router_sees_tokens_and_adapters_of_a_request():
    tokens = tuple(range(12))
    seen = []

    class Router(RoundRobin):
        def pick(self, request, candidates):
            seen.append((request.lora_name, request.tokens, [each.overlap for each in candidates]))
            return 0

    Fleet(engines(backend="vllm", args=MockEngineArgs(num_gpu_blocks=64, block_size=4)), Router()).run(
        [
            FleetRequest(Prompt(tokens, lora_name="a"), 2, 0.0),
            FleetRequest(Prompt(tokens, lora_name="a"), 2, 1000.0),
            FleetRequest(tokens, 2, 2000.0),
        ]
    )
    assert [(name, overlaps) for name, _, overlaps in seen] == [("a", [0, 0]), ("a", [3, 0]), (None, [0, 0])]
    assert all(tokens == each for _, each, _ in seen)


@pytest.mark.parametrize("router", [RoundRobin, LeastLoaded, MostCached, DynamoRouter])
@pytest.mark.parametrize("loads", ["router", "engine"])
def test_every_request_is_served(router, loads):
    report = Fleet(engines(3), router(), loads=loads, loads_every_ms=20).run(trace())
    assert 40 == len(report.completed) == len(report.picks)


@pytest.mark.parametrize("backend", ["lineage", "multi_lru", "vllm", "mocker_sglang_1_6"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_a_run_is_the_same_with_and_without_plans(backend, concurrency):
    kind = "sglang" if "sglang" in backend else "vllm"
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, engine_type=kind)

    def serve(plans):
        fleet = planned(Fleet(engines(3, args, backend), DynamoRouter(), concurrency=concurrency), plans=plans)
        report = fleet.run(trace(output_tokens=(1, 40)))
        return report.to_json(), report.per_request(), report.picks, report.run.passes, report.run.served_by

    assert serve(True) == serve(False)


@pytest.mark.parametrize("backend", ["lineage", "vllm", "mocker_sglang_1_6"])
def test_passes_that_take_no_time_are_not_planned(backend):
    kind = "sglang" if "sglang" in backend else "vllm"
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, engine_type=kind, performance_model=(10.0, 0.0))

    def serve(plans):
        return planned(Fleet(engines(2, args, backend), RoundRobin()), plans=plans).run(
            trace(12, output_tokens=(4, 20))
        )

    each_pass, in_one_go = serve(False), serve(True)
    assert len(in_one_go.completed) == 12
    assert each_pass.per_request() == in_one_go.per_request()


KINDS = {  # engines: every scheduler of every release, with its interval between two prefills
    "1.2.1": ("lineage", {"semantics": "1.2.1"}),
    "1.6.1": ("vllm", {}),
    "ranks": ("vllm", {"dp_size": 2, "prefill_schedule_interval": 3}),
    "sglang-1.6.1": ("mocker_sglang_1_6", {"engine_type": "sglang"}),
    "sglang-1.6.1-interval": ("mocker_sglang_1_6", {"engine_type": "sglang", "prefill_decode_interval": 4}),
    "real-sglang": ("sglang", {"engine_type": "sglang"}),
}


def at_the_ends_of_passes(serve, rng, count=8):
    """Return requests that mostly arrive exactly at the end of a pass of the requests before them."""
    rows = [request(0.0, [1, 2], 40)]
    while len(rows) < count:
        last = rows[-1].timestamp
        ends = sorted({end for each in serve(rows).requests for end in each.token_ms if end > last})
        at = rng.choice(ends[:12]) if ends and rng.random() < 0.8 else last + rng.uniform(1, 60)
        rows.append(request(at, [rng.randrange(6), 10 + len(rows)], rng.randint(1, 30)))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(25))
def test_arrivals_at_pass_ends_are_the_same_with_and_without_plans(kind, seed):
    backend, options = KINDS[kind]
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, **options)
    rng = Random(seed)
    count = rng.choice((1, 2)) * args.dp_size
    concurrency = rng.choice((None, None, 2))

    def serve(rows, plans=False):
        return planned(Fleet(engines(count, args, backend), RoundRobin(), concurrency=concurrency), plans=plans).run(
            rows
        )

    rows = at_the_ends_of_passes(serve, rng)
    each_pass, in_one_go = serve(rows), serve(rows, plans=True)
    assert each_pass.to_json() == in_one_go.to_json()
    assert each_pass.per_request() == in_one_go.per_request()
    assert (each_pass.picks, each_pass.run.passes) == (in_one_go.picks, in_one_go.run.passes)


def test_late_events_of_a_worker_stay_in_order_with_random_delays():
    heard = {}

    class Router(RoundRobin):
        def apply(self, event):
            heard.setdefault(event.key, []).append(event.event.event_id)

    rng = Random(1)
    Fleet(engines(), Router(), event_delay_ms=lambda event: rng.uniform(0, 200)).run(trace())
    assert min(map(len, heard.values())) > 20
    assert all(list(range(len(ids))) == ids for ids in heard.values())


@pytest.mark.parametrize(("semantics", "backend"), [("1.2.1", "lineage"), ("1.6.1", "vllm")])
def test_an_engine_without_progress_stalls_the_fleet(semantics, backend):
    args = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=False)
    args = replace(args, semantics=semantics)
    with pytest.raises(EngineStalled):
        Fleet(engines(2, args, backend), RoundRobin()).run([request(0, [1, 2, 3]), request(1, [4])])


def test_stop_ms_leaves_open_requests_unfinished():
    report = Fleet(engines(), RoundRobin(), stop_ms=50).run([request(0, [1], 99), request(60, [2])])
    assert [each.status for each in report.requests] == ["unfinished"]
    assert report.completed == []


@pytest.mark.parametrize("plans", [True, False])
def test_stop_ms_ends_a_closed_loop(plans):
    report = planned(Fleet(engines(), RoundRobin(), stop_ms=400, concurrency=3), plans=plans).run(
        trace(output_tokens=(1, 40))
    )
    assert {each.status for each in report.requests} == {"finished", "unfinished"}
    assert all(each.arrival_ms < 400 for each in report.requests)
    assert all(sorted(each.token_ms) == each.token_ms for each in report.requests)
    assert [pick.ms for pick in report.picks] == sorted(pick.ms for pick in report.picks)


def test_late_events_are_not_visible_before_their_delay():
    seen = []

    class Router:
        def pick(self, request, candidates):
            seen.append(candidates[0].overlap)
            return 0

    times = (0, 500, 1500)
    Fleet(engines(), Router(), event_delay_ms=1000).run([request(at, [1, 2]) for at in times])
    assert seen == [0, 0, 2]


def test_explain_does_not_change_picks_and_names_the_cheapest_worker():
    texts = []

    class Router(DynamoRouter):
        def pick(self, request, candidates):
            texts.append(self.explain(request, candidates))
            return super().pick(request, candidates)

    plain = Fleet(engines(), DynamoRouter()).run(trace())
    explained = Fleet(engines(), Router()).run(trace())
    assert plain.picks == explained.picks
    assert "= tied" in texts[0]
    assert any("<- chosen" in text for text in texts)


def test_statistics_of_many_values_equal_those_of_the_sorted_list():
    values = [value * 0.37 for value in Random(3).choices(range(500), k=120_000)]
    counted = statistics(values)
    ordered = sorted(values)
    assert (ordered[0], ordered[-1]) == (counted["min"], counted["max"])
    for key, share in (("median", 0.5), ("p75", 0.75), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert ordered[math.floor((len(values) - 1) * share + 0.5)] == counted[key]
    assert pstdev(values) == pytest.approx(counted["std"], rel=1e-12)


def test_requests_without_output_end_in_generating_passes():
    args = replace(ARGS, semantics="1.6.1")
    router = Listening()
    report = Fleet(engines(1, args, "vllm"), router).run(
        [request(0, [1, 2], 0), request(0, [3], 1), request(0, [4], 3)]
    )
    assert [each.status for each in report.requests] == ["finished"] * 3
    assert [number for name, number, *_ in router.calls if name == "finished"] == [0, 1, 2]


def test_a_stalled_engine_is_reported_even_if_requests_wait_in_the_router():
    args = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=False)
    with pytest.raises(EngineStalled):
        Fleet(engines(1, args), Holding(1)).run([request(0, [1, 2, 3]), request(1, [4])])


def test_a_pick_can_be_explained_after_its_dispatch():
    texts = {}

    class Router(DynamoRouter):
        def dispatched(self, request, worker):
            super().dispatched(request, worker)
            texts[request.number] = worker, self.explain(request)

    router = Router()
    Fleet(engines(3), router).run(trace())
    for worker, text in texts.values():
        chosen = [line for line in text.splitlines() if line.endswith("<- chosen")]
        assert [str(worker)] == [line.split()[0] for line in chosen]
    assert any("= tied <- chosen" in text for _, text in texts.values())
    with pytest.raises(ValueError, match="is not among the last 1000 requests"):
        router.explain(RouterRequest(0, Prompt(hashes=[1]), 4, 1))


def test_polled_loads_are_at_most_loads_every_ms_old():
    seen = []

    class Router:
        def pick(self, request, candidates):
            seen.append(candidates[0][2:8])
            return 0

    def loads(every):
        seen.clear()
        times = (0, 1, 40, 60)
        Fleet(engines(1), Router(), loads="engine", loads_every_ms=every).run([request(at, [at], 20) for at in times])
        return list(seen)

    fresh, stale = loads(0), loads(50)
    assert stale[:3] == [(0, 0, 1, 0, 0, 0.0)] * 3
    assert fresh[0] == stale[0]
    assert fresh[3] == stale[3] != stale[2] != fresh[2]


@pytest.mark.parametrize("answer", [-1, math.nan, "soon", None])
def test_a_delay_that_is_not_a_number_is_refused(answer):
    with pytest.raises(ValueError, match=r"the result of event_delay_ms for .* must be a finite number of at least 0"):
        Fleet(engines(), RoundRobin(), event_delay_ms=lambda event: answer).run(trace())


def test_a_pass_ends_requests_without_output_first_and_rejected_ones_last():
    args = replace(ARGS, semantics="1.6.1", max_model_len=16)
    router = Listening()
    rows = [request(0, [9], 40), request(0.5, [1, 2, 3, 4, 5]), request(0.5, [6], 0), request(0.5, [7], 1)]
    Fleet(engines(1, args, "vllm"), router).run(rows)
    assert [call[1] for call in router.calls if call[0] == "finished" and call[1]] == [2, 3, 1]


def test_one_token_requests_of_a_pass_are_reported_first():
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, engine_type="sglang", semantics="1.6.1")
    router = Listening()
    Fleet(engines(1, args, "mocker_sglang_1_6"), router).run([request(0, [1], 2), request(0, [2], 1)])
    assert [call[:2] for call in router.calls if call[0] != "dispatched"][:2] == [("finished", 1), ("first_token", 0)]


def test_the_duration_counts_from_the_first_arrival_even_if_it_is_rejected():
    args = replace(ARGS, num_gpu_blocks=8, semantics="1.6.1")
    report = Fleet(engines(1, args), RoundRobin()).run([request(0, range(9)), request(10, [1])])
    assert report.completed[0].token_ms[-1] == report.figure("duration_ms")


@pytest.mark.parametrize("backend", ["lineage", "vllm", "mocker_sglang_1_6", "sglang"])
@pytest.mark.parametrize("loads", ["router", "engine"])
def test_a_router_sees_the_same_candidates_with_and_without_plans(backend, loads):
    args = MockEngineArgs(num_gpu_blocks=96, block_size=4, engine_type="sglang" if "sglang" in backend else "vllm")

    def seen(plans):
        found = []

        class Router(RoundRobin):
            def pick(self, request, candidates):
                found.append(candidates)
                return super().pick(request, candidates)

        planned(Fleet(engines(3, args, backend), Router(), loads=loads), plans=plans).run(trace(output_tokens=(1, 40)))
        return found

    assert seen(True) == seen(False)


def test_a_closed_loop_follows_the_rules_of_the_original():
    args = MockEngineArgs(block_size=4, num_gpu_blocks=8, semantics="1.6.1")
    rows = [request(0, [1, 2], 6), request(0, range(10, 20), 1), request(0, [3, 4]), request(0, [5, 6])]
    turns = [request(0, [1, 2], session_id="s"), request(0, [1, 2], session_id="s", delay=100)]
    served = [
        lambda trace, **options: Fleet(engines(1, args), RoundRobin(), **options).run(trace),
        lambda trace, **options: replay(trace, engines(1, args), **options),
    ]
    for serve in served:
        # A rejected prompt keeps its place until its turn; a closed loop ignores the speedup ratio.
        arrivals = [row["arrival_time_ms"] for row in serve(rows, concurrency=2).per_request()]
        assert pytest.approx(arrivals[:3]) == [0.0, 0.0, 16.622914]
        assert serve(turns, concurrency=1).figure("duration_ms") == serve(
            turns, concurrency=1, arrival_speedup=2.0
        ).figure("duration_ms")


# ---------------------------------------------------------------------------------------------------- who is there


class ToldOnly:
    """A router made without arguments, as on the command line: it knows its workers only from its hooks."""

    def __init__(self):
        self.calls, self.known = [], None

    def started(self, workers):
        self.calls.append(list(workers))
        self.known = list(workers)

    def worker_added(self, worker):
        self.known.append(worker)

    def worker_removed(self, worker):
        self.known.remove(worker)

    def workers(self):
        return self.known

    def pick(self, request, candidates):
        return self.known[request.number % len(self.known)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_started_is_called_once_with_the_first_workers(ranks):
    router = ToldOnly()
    fleet = Fleet(engines(4, replace(ARGS, dp_size=ranks)), router)
    fleet.at(100).restart(1)
    fleet.at(150).join()
    for seed in range(2):
        report = fleet.run(trace(seed=seed))
        assert len(report.completed) == 40
        report.assert_no_drift()
    assert [[0, 1, 2, 3] if ranks == 1 else [(0, 0), (0, 1), (1, 0), (1, 1)]] == router.calls


def test_started_of_an_async_router_is_awaited():
    class Async(ToldOnly):
        async def started(self, workers):
            await asyncio.sleep(0)
            super().started(workers)

    router = Async()
    fleet = Fleet(engines(), router)
    with pytest.raises(TypeError, match=r"Async\.started is async"):
        fleet.run(trace())
    assert len(asyncio.run(fleet.arun(trace())).completed) == 40
    assert router.calls == [[0, 1]]


def test_a_router_that_raises_in_started_is_named():
    class Raises(ToldOnly):
        def started(self, workers):
            raise KeyError(len(workers))

    with pytest.raises(RouterError, match=r"Raises\.started\(\) raised KeyError\(2\) .* \(at 0 ms\)"):
        Fleet(engines(), Raises()).run(trace())


def test_a_router_that_ignores_started_workers_is_reported():
    class Deaf(ToldOnly):
        def started(self, workers):
            self.known = workers[1:]

        def pick(self, request, candidates):
            return candidates[0].worker

    (belief,) = Fleet(engines(), Deaf()).run(trace()).beliefs
    assert belief.rule == "worker_drift"
    assert belief.observed.startswith("Deaf.workers() does not know worker 0 before the pick for request 0 at 0 ms; ")
    assert belief.observed.endswith("they differ since started([0, 1]) at 0 ms")


def test_started_is_called_for_the_router_of_a_harness():
    router = ToldOnly()
    world = RouterHarness(EngineProfile(num_blocks=64, block_size=4, workers=3))
    world.fleet(router).run(trace())
    assert router.calls == [[0, 1, 2]]
    assert world.judge().errors == []


# ---------------------------------------------------------------------------------------------- what is over


@pytest.mark.parametrize("backend", ["lineage", "vllm", "vllm_gemma3", "sglang", "mocker_sglang_1_6"])
def test_finished_requests_release_their_tokens(backend):
    spec = BACKENDS[backend]
    args = MockEngineArgs(num_gpu_blocks=400, block_size=256, engine_type=spec.scheduler)
    served = [TraceRequest(1_000.0 * at, 4_096, 3, tuple(range(8 * at, 8 * at + 8))) for at in range(20)]
    fleet = Fleet([MockEngine(args, backend=backend)], RoundRobin(), trace_block_size=512)
    fleet.run(served[:2])  # one-time allocations
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    report = fleet.run(served)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = sum(each.input_length for each in served)
    assert len(report.completed) == 20
    held = 150_000  # the cache, rows and reports
    assert after - before < 2 * tokens + held, "a tuple of the tokens has 8 bytes each"
    assert peak - before < 4 * tokens + held
    for asked, row in zip(served, report.completed, strict=True):
        assert asked.prompt(tokens=True).tokens == row.prompt.tokens


def test_events_create_their_token_ids_when_they_are_read():
    served = [TraceRequest(None, 8_192, 1, tuple(range(16 * at, 16 * at + 16))) for at in range(8)]
    with RouterHarness(EngineProfile(block_size=256, num_blocks=20_000), "vllm_deepseek_v4") as kv:
        worker = kv.worker(0)
        worker.serve(served[0].prompt(tokens=True))  # one-time allocations
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for request in served[1:]:
            worker.serve(request.prompt(tokens=True))
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 7 * 8_192 * 28  # rows of all blocks would take 50 bytes per token
        stored = [each for each in kv.events if isinstance(each.event.data, Stored) and each.token_ids]
        assert {4, 64, 256} <= {len(row) for each in stored for row in each.token_ids}
        last = tuple(number for number in served[-1].hash_ids for _ in range(512))
        spans = [tuple(token for row in each.token_ids for token in row) for each in stored[-5:]]
        assert any(span == last for span in spans)
