"""Three routers of P/D pairs in front of their engines: llm-d's, SGLang's and Dynamo's, each with its declarations.

The contract checks both picks, load books, leases and rooms. The fleets below show the characteristics of each policy.
"""

import pytest
from dynamo_prefill_router import DynamoPrefillRouter
from llm_d_disagg import LlmDisagg
from sglang_pairs import SglangPairs

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import FleetRequest, PairLink, synthetic_trace
from pytest_kvmock.testing import RouterContract

BLOCK = 16


class TestLlmDisagg(RouterContract):
    hand_over = "vllm"
    order = "decode_first"
    threshold = BLOCK
    falls_back = True

    def make_router(self):
        return LlmDisagg(non_cached_tokens=BLOCK)


class TestSglangPairs(RouterContract):
    hand_over = "sglang"
    threshold = 1
    holds_prefill = True
    follows_prefix = True
    first_of_equals = True

    def make_router(self, workers):
        router = SglangPairs()
        router.started(workers)
        return router


class TestDynamoPrefillRouter(RouterContract):
    hand_over = "vllm"
    threshold = 1
    falls_back = True

    def make_router(self, workers):
        router = DynamoPrefillRouter()
        router.started(workers)
        return router


def engines(way, prefill=2, decode=2):
    kind = {"engine_type": "sglang"} if way == "sglang" else {"engine_type": "vllm", "semantics": "1.6.1"}
    given = {"hand_over": way, "block_size": BLOCK, "num_gpu_blocks": 800, **kind}
    roles = ["prefill"] * prefill + ["decode"] * decode
    return [MockEngine(MockEngineArgs(worker_type=role, **given), backend=kind["engine_type"]) for role in roles]


ROUTERS = [
    pytest.param(LlmDisagg, "vllm", "decode_first", id="llm-d"),
    pytest.param(SglangPairs, "sglang", "prefill_first", id="sglang"),
    pytest.param(DynamoPrefillRouter, "vllm", "prefill_first", id="dynamo"),
    pytest.param(lambda seed=0: DynamoPrefillRouter(True, seed=seed), "vllm", "decode_first", id="dynamo-conditional"),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("make", "way", "order"), ROUTERS)
def test_whatever_happens_all_is_served_or_said(make, way, order, seed):
    """With slow and failing links, clients that leave, and a restart in each role, every request ends, and nothing is
    held.
    """
    link = PairLink(lambda tokens: tokens / 10, faults={7: "fails", 20: "late", 33: "handshake"})
    fleet = Fleet(engines(way), make(), order=order, link=link)
    fleet.abort_share(0.3, seed)
    fleet.at(150).restart(seed % 2)
    fleet.at(300).restart(2 + seed % 2)
    trace = synthetic_trace(80, seed=seed, block_size=BLOCK, groups=6, prefix_blocks=(2, 10), interval_ms=8)
    report = fleet.run([each for each in trace if each.output_length < 400])
    ended = {request.status for request in report.requests}
    assert ended <= {"finished", "aborted", "failed"}  # a decode leg whose prefill worker restarts fails
    assert len(report.completed) > report.arrived / 3
    assert not report.beliefs
    assert [worker for worker, each in fleet.engines.items() if each.worker.leased] == []


def test_llm_d_decodes_alone_what_the_decode_worker_has():
    prompt = range(20 * BLOCK)
    again = [FleetRequest((*prompt, 7 + at), 4, 1000.0 * at) for at in range(4)]
    report = Fleet(engines("vllm"), LlmDisagg(), order="decode_first").run(again)
    assert report.roles["prefill"].requests == 1
    assert report.roles["decode"].alone_from(64) == []


def test_dynamo_refuses_while_a_prefill_worker_comes_up():
    fleet = Fleet(engines("vllm"), DynamoPrefillRouter())
    fleet.at(0).cordon(0)
    fleet.at(0).cordon(1)
    report = fleet.run([FleetRequest(range(100), 4)])
    assert report.roles["prefill"].refused == (0,)


def test_sglang_sends_a_pair_again_when_a_leg_fails():
    router = SglangPairs()
    report = Fleet(engines("sglang"), router, link=PairLink(faults={0: "fails"})).run([FleetRequest(range(100), 4)])
    assert [request.status for request in report.requests] == ["finished"]
    assert [pick.attempt for pick in report.picks] == [1, 1, 2, 2]
    assert set(router.open.values()) == {0}
