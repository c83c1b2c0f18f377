"""Fleets of P/D pairs: the router picks twice, in either order, and no request leaves an entry or block."""

from collections import Counter
from random import Random

import pytest
from depth import each_parameter, seeds
from pair_fleets import ORDERS, SIZE, WAYS, Noting, engine_of, engines, fleet, held, trace

from pytest_kvmock import RadixIndex
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.fleets import (
    DECODE_ALONE,
    REFUSE,
    Fleet,
    FleetRequest,
    LeastLoaded,
    MockEngine,
    PairLink,
    RouterError,
    RouterStalled,
)
from pytest_kvmock.fleets.report.page_data import fleet_data

PROMPT = tuple(range(10 * SIZE + 5))


def request(prompt=PROMPT, output=4, ms=0.0, **fields):
    return FleetRequest(prompt, output, ms, **fields)


def statuses(report):
    return dict(Counter(each.status for each in report.requests))


class Answers(Noting):
    """A router with fixed answers by leg; without one it picks normally."""

    def __init__(self, way="vllm", *, prefill=None, decode=None, holds=False):
        super().__init__(way=way)
        self.given = {"prefill": prefill, "decode": decode}
        self.holds_prefill = holds

    def answer(self, request, candidates):
        given = self.given[request.phase]
        return super().answer(request, candidates) if given is None else given(request, candidates)


# ------------------------------------------------------------------------------------------------------ two picks


@each_parameter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_router_picks_a_worker_of_each_role_for_each_request(way, order):
    router = Noting(way=way)
    made = fleet(router, way, order=order)
    report = made.run(trace())
    assert statuses(report) == {"finished": 40}
    assert Counter((pick.phase, pick.worker in (0, 1)) for pick in report.picks) == {
        ("prefill", True): 40,
        ("decode", False): 40,
    }
    assert report.beliefs == ()
    assert router.open == []
    assert held(made) == []


def test_serial_legs_are_picked_one_after_the_other():
    router = Noting()
    fleet(router).run([request()])
    told = router.of(0)
    assert [each[:2] for each in told] == [
        ("pick", "prefill"),
        ("dispatched", "prefill"),
        ("finished", "prefill"),
        ("pick", "decode"),
        ("dispatched", "decode"),
        ("first_token", "decode"),
        ("finished", "decode"),
    ]
    assert told[0][2] is None  # no worker was picked before
    assert told[3][2] == told[0][3]  # the decode pick sees the prefill worker


def test_with_decode_first_both_workers_are_picked_before_the_first_leg_is_sent():
    router = Noting()
    fleet(router, order="decode_first").run([request()])
    told = router.of(0)
    assert [each[:2] for each in told][:4] == [
        ("pick", "decode"),
        ("pick", "prefill"),
        ("dispatched", "decode"),
        ("dispatched", "prefill"),
    ]
    assert told[1][2] == told[0][3]


@pytest.mark.parametrize("way", ["vllm-mooncake", "sglang"])
def test_with_both_legs_at_once_the_prefill_leg_finishes_before_the_first_token(way):
    router = Noting(way=way)
    fleet(router, way).run([request()])
    assert [each[:2] for each in router.of(0)] == [
        ("pick", "prefill"),
        ("pick", "decode"),
        ("dispatched", "prefill"),
        ("dispatched", "decode"),
        ("finished", "prefill"),
        ("first_token", "decode"),
        ("finished", "decode"),
    ]


def test_a_router_can_hold_the_prefill_load_until_the_end():
    router = Answers(holds=True)
    report = fleet(router).run([request()])
    assert [each[:2] for each in router.of(0)][-3:] == [
        ("first_token", "decode"),
        ("finished", "prefill"),
        ("finished", "decode"),
    ]
    assert report.beliefs == ()


def test_candidates_of_a_leg_are_the_workers_of_its_role_with_their_overlap():
    asked = []

    def note(request, candidates):
        asked.append((request.phase, {each.worker: each.overlap for each in candidates}))
        return candidates[0].worker

    router = Answers(prefill=note, decode=note)
    fleet(router).run([request(), request(ms=1000.0)])
    assert asked == [
        ("prefill", {0: 0, 1: 0}),
        ("decode", {2: 0, 3: 0}),
        ("prefill", {0: 10, 1: 0}),
        ("decode", {2: 10, 3: 0}),
    ]


def test_each_role_can_have_its_own_router_object():
    class Counting(LeastLoaded):
        def __init__(self):
            self.phases = []

        def pick(self, request, candidates):
            self.phases.append(request.phase)
            return super().pick(request, candidates)

    routers = {"prefill": Counting(), "decode": Counting()}
    report = fleet(routers).run(trace(10))
    assert statuses(report) == {"finished": 10}
    assert {role: {*each.phases} for role, each in routers.items()} == {"prefill": {"prefill"}, "decode": {"decode"}}


def test_each_role_can_have_its_own_index_object():
    index = {"prefill": RadixIndex(count_copies=True), "decode": RadixIndex(count_copies=True)}
    fleet(LeastLoaded(), index=index).run(trace(10))
    workers = {role: {event.worker_id for event in each.dump_events()} for role, each in index.items()}
    assert workers["prefill"] <= {0, 1}
    assert workers["decode"] <= {2, 3}
    assert all(workers.values())


def test_roles_can_have_different_block_sizes():
    router = Noting()
    sizes = []
    router.answer = lambda request, candidates: (
        sizes.append((request.phase, request.block_size, len(request.local_hashes))) or candidates[0].worker
    )
    report = fleet(router, made=engines(d={"size": 32})).run([request()])
    assert sizes == [("prefill", 16, 10), ("decode", 32, 5)]
    assert statuses(report) == {"finished": 1}


# -------------------------------------------------------------------------------------------- other answers


@pytest.mark.parametrize("order", ORDERS)
def test_decode_alone_computes_the_prompt_at_the_decode_worker(order):
    router = Answers(prefill=lambda *_: DECODE_ALONE)
    report = fleet(router, order=order).run([request(), request(PROMPT[: 2 * SIZE], ms=500.0)])
    assert statuses(report) == {"finished": 2}
    assert [pick.phase for pick in report.picks] == ["decode", "decode"]
    roles = report.roles
    assert (roles["prefill"].requests, roles["decode"].computed) == (0, len(PROMPT) + SIZE)
    assert roles["decode"].alone == ((0, len(PROMPT)), (1, 0))
    assert roles["decode"].alone_from(100) == [0]
    assert report.beliefs == ()


def test_requests_decoded_alone_are_counted_from_the_declared_threshold_on():
    prompts = [PROMPT[: 2 * SIZE], range(1000, 1000 + 3 * SIZE), range(2000, 2000 + 6 * SIZE)]
    rows = [request(prompt, ms=500.0 * at) for at, prompt in enumerate(prompts)]
    report = fleet(Answers(prefill=lambda *_: DECODE_ALONE), threshold=3 * SIZE).run(rows)
    decode = report.roles["decode"]
    assert (decode.threshold, decode.alone_from(), decode.alone_from(40)) == (3 * SIZE, [1, 2], [1, 2])
    assert "3 decoded alone (2 from the threshold 48 on)" in fleet_data(report)["roles"][1]
    assert decode.to_json()["threshold"] == 3 * SIZE
    assert report.roles["prefill"].threshold is None


def test_without_a_threshold_only_the_number_of_requests_decoded_alone_is_reported():
    report = fleet(Answers(prefill=lambda *_: DECODE_ALONE)).run([request()])
    assert "1 decoded alone\n" in f"{report}\n"
    with pytest.raises(
        ValueError, match=r"alone_from: give a number of tokens, or declare one: Fleet\(\.\.\., threshold=64\)"
    ):
        report.roles["decode"].alone_from()


def test_decode_alone_is_refused_by_a_decode_engine_that_needs_a_room():
    report = fleet(Answers("sglang", prefill=lambda *_: DECODE_ALONE), "sglang").run([request()])
    assert report.roles["decode"].ends == {"rejected": 1}
    assert len(report.completed) == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_refused_request_leaves_no_load_entry_or_block(order, phase):
    router = Answers(**{phase: lambda *_: REFUSE})
    made = fleet(router, order=order)
    report = made.run([request()])
    assert report.roles[phase].refused == (0,)
    assert report.completed == []
    assert router.open == []
    assert held(made) == []


def test_after_a_refusal_of_the_decode_leg_the_prefill_lease_expires():
    report = fleet(Answers(decode=lambda *_: REFUSE)).run([request()])
    assert report.roles["prefill"].kept == 1
    assert report.roles["prefill"].ran_out == ((0, "refused"),)


def test_a_request_waits_for_a_decode_worker_while_its_lease_runs():
    router = Answers(decode=lambda request, candidates: candidates[0].worker if request.now_ms > 400 else None)
    made = fleet(router)
    report = made.run([request(), request(PROMPT[:20], ms=450.0)])
    assert statuses(report) == {"finished": 2}
    assert report.roles["prefill"].ran_out == ()


def test_a_router_that_waits_forever_is_reported_as_stalled():
    with pytest.raises(RouterStalled, match="1 requests would wait for ever"):
        fleet(Answers(decode=lambda *_: None)).run([request()])


@pytest.mark.parametrize(
    ("phase", "answer", "why"),
    [
        ("prefill", 2, "that worker is gone, or is none for prefill. Candidates: 0, 1"),
        ("decode", 0, "that worker is gone, or is none for decode. Candidates: 2, 3"),
        ("decode", DECODE_ALONE, "that is an answer only for the prefill leg"),
    ],
)
def test_a_worker_of_the_other_role_is_refused_as_an_answer(phase, answer, why):
    with pytest.raises(RouterError, match=why):
        fleet(Answers(**{phase: lambda *_: answer})).run([request()])


# ------------------------------------------------------------------------------------------------- figures


def test_role_figures_count_legs_hits_transfers_and_link_time():
    report = fleet(Noting(), link=PairLink(lambda tokens: tokens / 10)).run([request(), request(ms=1000.0)])
    p, d = report.roles["prefill"], report.roles["decode"]
    assert (p.workers, p.requests, p.kept, p.ends) == ((0, 1), 2, 2, {"finished": 2})
    assert (d.workers, d.requests, d.ends) == ((2, 3), 2, {"finished": 2})
    assert p.computed + p.hits == 2 * len(PROMPT)
    assert d.computed == 2  # the last token of each prompt is computed again
    assert d.transferred + d.hits == 2 * len(PROMPT)
    assert d.link_ms > 10
    assert "prefill (workers 0, 1): 2 legs" in str(report)
    assert fleet_data(report)["roles"][1].startswith("decode (workers 2, 3): 2 legs")


@pytest.mark.parametrize("way", WAYS)
def test_every_kept_prefill_leg_counts_even_if_its_answer_is_late(way):
    # 3.9: SGLang's P may answer after D's first token; here it answers after all of D's tokens.
    report = fleet(Noting(way=way), way, link=PairLink(lambda tokens: tokens / 10)).run(trace(output_tokens=(1, 3)))
    assert (report.roles["prefill"].kept, report.roles["prefill"].requests) == (40, 40)


def test_only_one_block_of_a_prompt_held_by_the_decode_engine_is_transferred_again():
    report = fleet(Noting(), made=engines(prefill=1, decode=1)).run(
        [request(PROMPT[:64]), request(PROMPT[:64], ms=1e3)]
    )
    assert (report.roles["decode"].transferred, report.roles["decode"].transferred_held) == (64 + SIZE, SIZE)


# ------------------------------------------------------------------------------------- what happens to requests


@pytest.mark.parametrize(
    ("after_ms", "ends"),
    [(1.0, {"prefill": "running"}), (30.0, {"decode": "loading"}), (1030.0, {"decode": "running"})],
)
def test_an_aborted_request_leaves_no_entry_in_any_phase(after_ms, ends):
    router = Noting()
    made = fleet(router, link=PairLink(lambda _: 1000.0))
    report = made.run([request(output=100, abort_after_ms=after_ms)])
    assert statuses(report) == {"aborted": 1}
    assert {role: how for role, each in report.roles.items() for how in each.ends if how != "finished"} == ends
    assert router.open == []
    assert held(made) == []


def test_an_abort_does_not_end_requests_with_the_same_name_prefix():
    # 3.10: an abort ends all requests whose id begins with the given one.
    rows = [request(PROMPT[: 40 + at], output=40, abort_after_ms=60.0 if at == 1 else None) for at in range(24)]
    report = fleet(Noting(way="sglang"), made=engines("sglang", 1, 1)).run(rows)
    assert statuses(report) == {"finished": 23, "aborted": 1}


def test_after_an_abort_between_the_legs_the_prefill_lease_expires():
    router = Answers(decode=lambda *_: None)
    made = fleet(router)
    report = made.run([request(abort_after_ms=500.0)])
    assert router.of(0)[-1] == ("withdrawn", "decode")
    assert statuses(report) == {"aborted": 1}
    assert report.roles["prefill"].ran_out == ((0, "aborted"),)
    assert held(made) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_requests_of_a_lost_worker_are_sent_again(way, worker, order):
    router = Noting(way=way)
    made = fleet(router, way, order=order)
    made.at(100.0).restart(worker)
    report = made.run(trace())
    ended = statuses(report)
    # 1.17: a load from an engine that is gone fails.
    assert set(ended) <= {"finished", "failed"}
    assert ended["finished"] >= 25
    assert max(pick.attempt for pick in report.picks) == 2
    assert report.beliefs == ()
    assert router.open == []
    assert held(made) == []


def test_an_engine_that_joins_serves_in_its_role():
    router = Noting()
    made = fleet(router)
    joined = made.at(100.0).join(engine=engine_of("decode"))
    made.at(100.0).leave(2)
    report = made.run(trace())
    assert statuses(report) == {"finished": 40}
    late = {pick.worker for pick in report.picks if pick.phase == "decode" and pick.ms > 101}
    assert late == {3, joined}
    assert report.beliefs == ()


@each_parameter
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("way", WAYS)
def test_an_empty_role_serves_requests_again_when_a_worker_joins(way, role):
    # The role has no worker at the end of the first run and at the start of the second.
    router = Noting(way=way)
    made = fleet(router, way)
    for worker in (0, 1) if role == "prefill" else (2, 3):
        made.at(50.0).leave(worker)
    first = made.run([request(), request(PROMPT[:80], ms=100.0)])
    assert len(first.completed) == 1
    assert [*made.engines] == ([2, 3] if role == "prefill" else [0, 1])
    made.at(20.0).join(role=role)
    second = made.run([request(), request(PROMPT[:80], ms=100.0)])
    assert statuses(second) == {"finished": 2}
    assert held(made) == []


@pytest.mark.parametrize("way", WAYS)
def test_the_remaining_workers_serve_later_runs(way):
    # They were named in the first run, and other engines know them by these names.
    made = fleet(Noting(way=way), way)
    made.at(50.0).leave(0)
    made.at(60.0).restart(2)
    made.at(70.0).join(role="decode")
    for _ in range(3):
        report = made.run(trace(20))
        assert set(statuses(report)) <= {"finished", "failed"}
        assert len(report.completed) >= 18
    assert held(made) == []


def test_a_failed_transfer_fails_only_its_own_request():
    report = fleet(Noting(), link=PairLink(faults={0: "fails"})).run([request(), request(PROMPT[:40], ms=1.0)])
    assert [each.status for each in report.requests] == ["failed", "finished"]
    assert report.roles["prefill"].ran_out == ((0, "failed"),)


@pytest.mark.parametrize(("answer", "status"), [("retry", "finished"), ("wait", "failed"), (None, "failed")])
def test_leg_failed_of_the_router_decides_whether_a_request_is_retried(answer, status):
    router = Noting(way="sglang")
    router.leg_failed = lambda request: answer
    made = fleet(router, "sglang", link=PairLink(faults={0: "fails"}))
    report = made.run([request()])
    assert [each.status for each in report.requests] == [status]
    assert router.open == []
    assert held(made) == []


def test_a_rejected_request_keeps_its_status_and_end_when_its_decode_leg_times_out():
    # The prefill engine rejects it during a pass of the decode engine, whose leg then loads until it times out.
    made = fleet(made=[engine_of("prefill", "vllm-mooncake", blocks=50), engine_of("decode", "vllm-mooncake")])
    report = made.run([request(output=30), request(range(60 * SIZE), ms=60.0)])
    assert [(each.status, each.ended_ms) for each in report.requests][1] == ("rejected", 60.0)
    assert held(made) == []


def test_a_router_that_retries_a_failed_leg_without_end_is_a_router_error():
    # The prefill engine rejects the prompt at once, each time.
    router = Noting()
    router.leg_failed = lambda request: "retry"
    made = fleet(router, made=[engine_of("prefill", WAYS[1], blocks=50), engine_of("decode", WAYS[1])])
    why = r"Noting.leg_failed\(\) answered 'retry' 100 times for request 0, and a leg fails each time \(at 0 ms"
    with pytest.raises(RouterError, match=why):
        made.run([request(range(60 * SIZE))])


def test_leg_failed_gets_the_request_with_the_present_time():
    router, moments = Noting(), []
    router.leg_failed = lambda request: moments.append(request.now_ms)
    report = fleet(router, link=PairLink(lambda _: 500.0, faults={0: "fails"})).run([request()])
    assert moments == [report.requests[0].ended_ms]


@pytest.mark.parametrize("order", ["decode_first", "prefill_first"])
def test_hand_over_gets_the_request_with_the_present_time(order):
    router, moments = Noting(), []
    router.hand_over = lambda request, parameters: moments.append(request.now_ms) or parameters
    fleet(router, order=order).run([request()])
    assert [moment > 0.0 for moment in moments] == [True]  # the prefill leg took its time


def test_a_router_can_drop_the_parameters_of_the_decode_leg():
    router = Noting()
    router.hand_over = lambda request, parameters: None
    report = fleet(router).run([request()])
    assert statuses(report) == {"finished": 1}
    assert report.roles["decode"].computed == len(PROMPT)  # 1.20
    assert report.roles["prefill"].ran_out == ((0, "finished"),)


class Carries(Noting):
    """A correct router that changes the parameters of the decode leg."""

    def __init__(self, way, change):
        super().__init__(way=way)
        self.change = change

    def hand_over(self, request, parameters):
        return self.change(parameters)


@pytest.mark.parametrize("way", WAYS)
def test_the_hand_over_parameters_can_be_a_mapping_of_the_router(way):
    made = fleet(Carries(way, dict), way)
    report = made.run([request(), request(ms=500.0)])
    assert statuses(report) == {"finished": 2}
    assert report.roles["decode"].transferred > 0
    assert held(made) == []


WRONG = [
    ("vllm", lambda given: given.without("remote_port"), "without remote_port, so the decode leg at worker . waits"),
    ("vllm", lambda given: given.changed(remote_block_ids=None), "the engine died, as the original does"),
    (
        "vllm",
        lambda given: given.changed(remote_block_ids=[1, 2, 3]),
        r"the engine died, .* \(TypeError in base_worker",
    ),
    ("vllm", lambda given: {"bootstrap_room": 3}, "parameters of another kind of engine .bootstrap_room. at an engine"),
    ("vllm", lambda given: 7, "must return parameters, or None, got 7"),
    ("vllm-mooncake", lambda given: given.without("transfer_id"), "parameters without transfer_id, so the decode leg"),
    ("vllm-mooncake", lambda given: given.changed(do_remote_prefill=False, do_remote_decode=True), "the engine died"),
    ("sglang", lambda given: None, "request without bootstrap room: .* got None .SGLang answers 400."),
    ("sglang", lambda given: given.changed(bootstrap_room="7"), "request without bootstrap room: .* got '7'"),
    (
        "sglang",
        lambda given: {"transfer_id": "a"},
        "parameters of another kind of engine .transfer_id. at an engine of",
    ),
]


@each_parameter
@pytest.mark.parametrize(("way", "change", "why"), WRONG)
def test_parameters_that_crash_or_hang_an_engine_are_a_router_error(way, change, why):
    with pytest.raises(RouterError, match=why):
        fleet(Carries(way, change), way).run([request(), request(ms=500.0)])


@pytest.mark.parametrize("seed", seeds(40))
def test_random_incidents_leave_no_block_held_and_no_wrong_belief(seed):
    rng = Random(seed)
    way, order = rng.choice(WAYS), rng.choice(ORDERS)

    class Moody(Noting):
        holds_prefill = rng.random() < 0.3

        def answer(self, request, candidates):
            if request.phase == "prefill" and way != "sglang" and rng.random() < 0.1:
                return DECODE_ALONE
            if rng.random() < 0.02:
                return REFUSE
            if rng.random() < 0.1 and request.number < 30:
                return None
            return super().answer(request, candidates)

    faults = {at: rng.choice(["fails", "late", "handshake", "stale"]) for at in range(40) if rng.random() < 0.05}
    router = Moody(way=way)
    made = fleet(router, way, order=order, link=PairLink(lambda tokens: tokens / 50, faults))
    made.abort_share(rng.choice([0, 0.4]), seed)
    worker, at = rng.randrange(4), rng.uniform(0, 400)
    happens = rng.choice(["restart", "crash", "leave", "cordon"])
    getattr(made.at(at), happens)(worker)
    if happens == "cordon":
        made.at(at + 100).uncordon(worker)
    made.at(300.0).join(engine=engine_of(rng.choice(["prefill", "decode"]), way))
    report = made.run(trace(40, seed, output_tokens=(1, 24)))
    assert set(statuses(report)) <= {"finished", "aborted", "failed", "refused"}
    assert report.beliefs == ()
    assert router.open == []
    assert held(made) == []


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("made", "options", "why"),
    [
        (lambda: engines(decode=0), {}, "P/D pairs need engines of both roles; there is none of worker_type='decode'"),
        (lambda: [*engines(), *engines("vllm-mooncake")], {}, "must have one hand_over, got 'vllm', 'vllm-mooncake'"),
        (lambda: engines(way="dynamo"), {}, "must have hand_over 'vllm' or 'vllm-mooncake' or 'sglang', got 'dynamo'"),
        (lambda: [*engines(), engine_of("decode", size=32)], {}, "engines of 'decode' must have one block_size"),
        (lambda: engines("sglang", d={"size": 32}), {}, "pairs with rooms must have one block_size, got 16, 32"),
        (engines, {"order": "both"}, "unknown order 'both'"),
        (engines, {"threshold": -1}, "threshold must be an integer of at least 0 \\(tokens\\), or None, got -1"),
        (engines, {"router": {"prefill": LeastLoaded()}}, "router by role needs 'prefill' and 'decode', got 'prefill'"),
        (engines, {"index": {"p": RadixIndex()}}, "index by role needs 'prefill' and 'decode', got 'p'"),
        (
            lambda: [*engines(), MockEngine(MockEngineArgs(semantics="1.6.1", block_size=16), backend="vllm")],
            {},
            "worker_type='prefill' or 'decode', as others have, got 'aggregated'",
        ),
        (
            lambda: [MockEngine(MockEngineArgs())],
            {"order": "decode_first"},
            "order, link and threshold are for engines of worker_type 'prefill' and 'decode'",
        ),
    ],
)
def test_an_invalid_fleet_of_pairs_is_refused(made, options, why):
    with pytest.raises(ValueError, match=why):
        Fleet(made(), **options)


def test_a_join_without_an_engine_needs_a_role():
    with pytest.raises(ValueError, match="needs role='prefill' or 'decode', or engine=, whose worker_type is its role"):
        fleet().at(5).join()
