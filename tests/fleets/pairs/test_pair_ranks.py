"""Fleets of P/D pairs whose workers have ranks: a pick names a rank, and its blocks are found there."""

from collections import Counter
from random import Random

import pytest
from depth import each_parameter, seeds
from pair_fleets import ORDERS, SIZE, WAYS, Noting, engine_of, engines, fleet, held, trace

from pytest_kvmock import Fleet
from pytest_kvmock.fleets import FleetRequest, PairLink, RouterError

PROMPT = tuple(range(10 * SIZE + 5))
TWO = {"dp_size": 2}
P_RANKS, D_RANKS = [(0, 0), (0, 1)], [(1, 0), (1, 1)]


def ranked(way="vllm", p=2, d=2):
    """Return a prefill and a decode worker with the given numbers of ranks."""
    return engines(way, p, d, p={"dp_size": p}, d={"dp_size": d})


def noting(way="vllm", workers=(*P_RANKS, *D_RANKS), kind=Noting):
    return kind(workers, way)


class Carries(Noting):
    """A router that picks rank 1 of the prefill worker and changes the parameters of the decode leg."""

    changes = staticmethod(lambda parameters: parameters)

    def answer(self, request, candidates):
        return (0, 1) if request.phase == "prefill" else super().answer(request, candidates)

    def hand_over(self, request, parameters):
        return self.changes(parameters)


def carried(way, changes=lambda parameters: parameters):
    """Run one request whose decode leg carries `changes(parameters)`; return the report, parameters and fleet."""
    seen = []
    router = noting(way, kind=Carries)
    router.changes = lambda parameters: seen.append(changes(parameters)) or seen[-1]
    made = fleet(router, way, made=ranked(way))
    return made.run([FleetRequest(PROMPT, 4)]), seen[0], made


@each_parameter
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_router_picks_a_rank_of_each_role(way, order):
    router = noting(way)
    made = fleet(router, way, order=order, made=ranked(way), link=PairLink(lambda tokens: tokens / 20))
    report = made.run(trace())
    assert Counter(each.status for each in report.requests) == {"finished": 40}
    assert {pick.worker for pick in report.picks if pick.phase == "prefill"} == {*P_RANKS}
    assert {pick.worker for pick in report.picks if pick.phase == "decode"} == {*D_RANKS}
    assert report.roles["prefill"].workers == tuple(P_RANKS)
    assert report.beliefs == ()
    assert router.open == []
    assert held(made) == []


@each_parameter
@pytest.mark.parametrize("way", WAYS)
def test_one_role_can_have_ranks_and_the_other_none(way):
    router = noting(way, [*P_RANKS, (1, 0)])
    made = fleet(router, way, made=ranked(way, 2, 1))
    report = made.run(trace())
    assert Counter(each.status for each in report.requests) == {"finished": 40}
    assert [*made.engines] == [*P_RANKS, (1, 0)]
    assert report.beliefs == ()
    assert held(made) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_repeated_prompt_hits_at_its_rank(way):
    router = noting(way, kind=Carries)
    report = fleet(router, way, made=ranked(way)).run([FleetRequest(PROMPT, 4), FleetRequest(PROMPT, 4, 2000.0)])
    assert [pick.overlap for pick in report.picks if pick.phase == "prefill"] == [0, 10]
    assert report.roles["prefill"].hits == 10 * SIZE


# ------------------------------------------------------------------------------------- how a leg finds its rank


def test_a_lease_names_the_side_channel_of_its_rank():
    # 1.24: side channel port + rank, so each rank of D can read.
    report, given, _ = carried("vllm")
    assert (given["remote_engine_id"], given["remote_port"]) == ("prefill-0_dp1", 5601)
    assert len(report.completed) == 1


def test_the_number_of_a_room_encodes_the_picked_rank():
    # 5.2: the room number is moved until its remainder is the picked rank.
    report, given, made = carried("sglang")
    assert given["bootstrap_room"] % 2 == 1
    assert made.engines[0, 0].worker.pair.rooms.seen == [
        (1, given["bootstrap_room"], "prefill"),
        (1, given["bootstrap_room"], "decode"),
    ]
    assert len(report.completed) == 1


@pytest.mark.parametrize(
    ("fields", "completed"),
    [
        ({"bootstrap_room": 4}, 0),  # 3.5: D looks it up at rank 0
        ({"bootstrap_room": 4, "disagg_prefill_dp_rank": 1}, 1),
        ({"disagg_prefill_dp_rank": 0}, 0),
        ({"bootstrap_room": 4, "routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}, 1),
    ],
)
def test_a_decode_leg_at_a_wrong_rank_waits_for_its_timeout(fields, completed):
    report, _, made = carried("sglang", lambda parameters: parameters.changed(**fields))
    assert len(report.completed) == completed
    assert report.run.served[0].request.ended_ms == pytest.approx(300_000 if not completed else 400, abs=400)
    assert held(made) == []


def test_a_decode_leg_at_a_rank_that_does_not_exist_fails_at_once():
    # The bootstrap server has no address of that rank (`CommonKVReceiver`).
    report, _, made = carried("sglang", lambda parameters: parameters.changed(disagg_prefill_dp_rank=7))
    assert len(report.completed) == 0
    assert report.run.served[0].request.ended_ms == pytest.approx(0, abs=400)
    assert held(made) == []


def test_a_transfer_requested_from_the_wrong_rank_waits_for_its_timeout():
    report, _, made = carried("vllm-mooncake", lambda parameters: parameters.changed(remote_engine_id="prefill-0_dp0"))
    assert [each.status for each in report.requests] == ["failed"]
    assert report.requests[0].ended_ms == pytest.approx(480_000, abs=1000)
    assert held(made) == []


# ----------------------------------------------------------------------------------------- workers come and go


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_of_a_worker_restart_leave_and_join_together(way):
    router = noting(way)
    made = fleet(router, way, made=ranked(way))
    made.at(100.0).restart(0)
    assert made.at(150.0).join(role="prefill") == 2
    assert made.at(150.0).join(role="decode") == 3
    made.at(200.0).leave(1)
    report = made.run(trace())
    assert set(Counter(each.status for each in report.requests)) <= {"finished", "failed"}
    late = {pick.worker for pick in report.picks if pick.ms > 201}
    assert late & {(2, 0), (2, 1)}
    assert {worker for worker, _ in late} <= {0, 2, 3}
    assert [*made.engines] == [*P_RANKS, (2, 0), (2, 1), (3, 0), (3, 1)]
    assert report.beliefs == ()
    assert held(made) == []


@pytest.mark.parametrize("seed", seeds(30))
def test_random_incidents_of_ranks_leave_no_block_held_and_no_wrong_belief(seed):
    rng = Random(seed)
    way, order = rng.choice(WAYS), rng.choice(ORDERS)
    p, d = rng.choice([(1, 2), (2, 1), (2, 2), (3, 2)])
    faults = {at: rng.choice(["fails", "late", "handshake", "stale"]) for at in range(40) if rng.random() < 0.05}
    both, sizes = [*ranked(way, p, d), *ranked(way, p, d)], (p, d, p, d)
    router = noting(way, [(worker, rank) for worker, size in enumerate(sizes) for rank in range(size)])
    made = fleet(router, way, order=order, made=both, link=PairLink(lambda tokens: tokens / 50, faults))
    made.abort_share(rng.choice([0, 0.4]), seed)
    worker, at = rng.randrange(4), rng.uniform(0, 400)
    getattr(made.at(at), rng.choice(["restart", "crash", "leave"]))(worker)
    made.at(300.0).join(role=rng.choice(["prefill", "decode"]))
    report = made.run(trace(40, seed))
    assert set(Counter(each.status for each in report.requests)) <= {"finished", "aborted", "failed"}
    assert report.beliefs == ()
    assert router.open == []
    assert held(made) == []


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: engines(prefill=3, p=TWO), r"worker 1 must have the ranks 0 to 1 in order \(dp_size=2\), of one role"),
        (lambda: dict(enumerate(ranked())), r"named by \(id, rank\), as one role has dp_size above 1; got 0"),
        (
            lambda: dict(zip([(0, 0), 2, 3, 4], engines(), strict=True)),
            r"named by their ids, as dp_size is 1; got \(0, 0\)",
        ),
        (
            lambda: dict(zip([(0, 1), (0, 0), (1, 0), (1, 1)], ranked(), strict=True)),
            r"worker 0 must have the ranks 0 to 1 in order .* got 1 \(prefill\), 0 \(prefill\)",
        ),
        (
            lambda: [engine_of("prefill", dp_size=2), *engines("vllm", 1, 1)],
            "all engines of 'prefill' must have one dp_size, got 2, 1",
        ),
    ],
)
def test_workers_with_invalid_ranks_are_refused(made, why):
    with pytest.raises(ValueError, match=why):
        Fleet(made())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": engine_of("decode", dp_size=2)}, "workers have ranks, whose engines join makes itself"),
        ({"role": "both"}, "join: unknown role 'both'"),
        ({}, "needs role='prefill' or 'decode', or engine="),
    ],
)
def test_an_invalid_join_is_refused(options, why):
    made = fleet(made=ranked())
    with pytest.raises(ValueError, match=why):
        made.at(5).join(**options)
    assert [*made.engines] == [*P_RANKS, *D_RANKS]


def test_a_join_with_a_role_and_an_engine_of_another_role_is_refused():
    with pytest.raises(ValueError, match=r"join: role='prefill' and an engine of worker_type='decode'; leave one out"):
        fleet().at(5).join(engine=engine_of("decode"), role="prefill")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"routed_dp_rank": 0}, r"hand_over\(\) returned routed_dp_rank=0; expected 1, the rank that was picked"),
        ({"disagg_prefill_dp_rank": "1"}, r"hand_over\(\): disagg_prefill_dp_rank must be an integer of at least 0"),
    ],
)
def test_invalid_ranks_in_hand_over_parameters_are_refused(fields, why):
    with pytest.raises(RouterError, match=why):
        carried("sglang", lambda parameters: parameters.changed(**fields))
