"""Engines with a draft model in virtual time: the seed determines the accepted drafts, as recorded from
ai-dynamo-runtime 1.6.1.
"""

import pytest
from recorded_replays import request_of

from pytest_kvmock import BACKENDS, EngineProfile, MockEngine, RouterHarness, replay
from pytest_kvmock.engines import MockEngineArgs, SglangSpeculative, Speculative
from pytest_kvmock.values.acceptance import USUAL_RATES, AcceptedDrafts

FILE = "dynamo_1.6.1_nextn.json.gz"
BACKEND = {"vllm": "vllm", "sglang": "mocker_sglang_1_6"}


def test_the_number_of_passes_of_a_single_request_follows_from_the_seed(recording):
    checked = 0
    for series in recording(FILE)["lone"]:
        drafts, rates = series["nextn"], series["rates"]
        given = USUAL_RATES[:drafts] if rates is None else tuple(map(float, rates.split(",")))
        for outputs, passes in enumerate(series["passes"], 1):
            accepted, left, made = AcceptedDrafts(given, drafts, series["seed"]), outputs, 0
            while left > 0:
                left -= 1 + accepted.draw()
                made += 1
            assert passes == made, (series["seed"], outputs)
            checked += 1
    assert checked == 480


@pytest.mark.parametrize("number", range(8))
def test_replays_with_drafts_give_the_recorded_rows(recording, number):
    run = recording(FILE)["replays"][number]
    args = MockEngineArgs.from_json({"engine": run["engine"]})
    engines = [MockEngine(args, backend=BACKEND[args.engine_type]) for _ in range(run["replay"]["num_workers"])]
    rows = replay(map(request_of, run["requests"]), engines, trace_block_size=16).per_request()
    columns = sorted({column for row in run["per_request"] for column in row})

    def as_recorded(found):
        return sorted(str([row.get(column) for column in columns]) for row in found)

    assert as_recorded(run["per_request"]) == as_recorded(rows)


def test_draft_arguments_are_read_and_written():
    args = MockEngineArgs.from_json({"engine": {"aic_nextn": 2, "aic_nextn_accept_rates": "0.5,1", "aic_mtp_seed": 7}})
    assert (args.aic_nextn, args.aic_nextn_accept_rates, args.aic_mtp_seed) == (2, "0.5,1", 7)
    assert args == MockEngineArgs.from_json(args.to_json())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aic_nextn": 6}, "aic_nextn must be .* 1 to 5"),
        ({"aic_nextn_accept_rates": "0.5"}, "aic_nextn_accept_rates is set without aic_nextn"),
        ({"aic_nextn": 1, "aic_nextn_accept_rates": "high"}, "aic_nextn_accept_rates must be rates from 0 to 1"),
        ({"aic_nextn": 1, "aic_nextn_accept_rates": "1.5"}, r"aic_nextn_accept_rates must be .* got \(1.5,\)"),
        ({"aic_nextn": 1, "decode_speedup_ratio": 2.0}, "aic_nextn is for a decode_speedup_ratio of 1"),
    ],
)
def test_invalid_draft_arguments_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MockEngineArgs(semantics="1.6.1", **fields)


def test_aic_nextn_is_refused_over_a_backend_with_a_draft_model():
    args = MockEngineArgs(block_size=4, semantics="1.6.1", aic_nextn=2)
    with pytest.raises(ValueError, match=r"aic_nextn=2 is for a backend without a draft model, and 'vllm_mtp' has"):
        MockEngine(args, backend="vllm_mtp")


@pytest.mark.parametrize("backend", ["vllm_mtp", "sglang_eagle"])
def test_a_pass_generates_its_accepted_drafts_and_one_more_token(backend):
    accepted = [2, 0, 1, 3]
    draft = (SglangSpeculative if backend == "sglang_eagle" else Speculative)(acceptance=accepted)
    spec = BACKENDS[backend].variant("drafts", speculative=draft)
    with RouterHarness(EngineProfile(block_size=4, num_blocks=64), spec) as kv:
        engine = kv.engine(0, performance_model=(10.0, 5.0))
        request = engine.submit(range(13), 9)
        engine.run()
        runs = [request.token_ms.count(moment) for moment in sorted(set(request.token_ms))]
        assert runs == [3, 1, 2, 3]
        assert request.status == "finished"
        again = kv.worker(0).cached_tokens([*range(13), 0])
        assert again == 12


@pytest.mark.parametrize("backend", ["vllm_mtp", "sglang_eagle"])
def test_engines_with_drafts_preempt_and_resume_requests(backend):
    with RouterHarness(EngineProfile(block_size=4, num_blocks=24), backend) as kv:
        engine = kv.engine(0)
        requests = [engine.submit([number, *range(number % 3, 12)], 15, float(number)) for number in range(8)]
        engine.run()
        assert {request.status for request in requests} == {"finished"}
        assert {len(request.token_ms) for request in requests} == {15}
        assert kv.worker(0).manager.num_active_blocks == 0
