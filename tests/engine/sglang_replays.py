"""Recorded replays of Dynamo's mock of SGLang, as engines and requests."""

from pytest_kvmock.engine.args import MockEngineArgs
from pytest_kvmock.fleet.mock_engine import MockEngine
from pytest_kvmock.fleet.replay import replay
from pytest_kvmock.traces import TraceRequest

COLUMNS = (
    "arrival_time_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "input_length",
    "output_length",
    "reused_input_tokens",
)
OF_THE_HOST = {"processed_tokens_per_s", "processed_output_tokens_per_s"}
ADDED_BY_1_3_1 = {
    "prefill_worker_seconds",
    "decode_worker_seconds",
    "prefill_gpus_per_worker",
    "decode_gpus_per_worker",
    "gpu_hours",
}


def make_engine(case, semantics, **options):
    args = MockEngineArgs(**case["engine"], semantics=semantics)
    return MockEngine(args, **{"backend": "mocker_sglang", **options})


def play(case, engine, **options):
    """Replay a recorded case, as its recording was made."""
    requests = [TraceRequest(**request) for request in case["requests"]]
    options = {"concurrency": case["replay"].get("replay_concurrency"), **options}
    return replay(requests, [engine], trace_block_size=case["replay"]["trace_block_size"], **options)


def rows(per_request):
    """The rows of a report that are compared, sorted: those of equal requests are in no order."""
    return sorted([row[column] for column in COLUMNS] if isinstance(row, dict) else row for row in per_request)


def differences(expected, found):
    """Figures of a recorded summary that are not as they should be: sums of other orders differ in the last bits."""

    def same(key, value):
        if key.startswith(("mean_", "std_")):
            return abs(value - found[key]) <= 1e-9 * abs(value) + 1e-12
        return value == found[key]

    left_out = OF_THE_HOST | ADDED_BY_1_3_1
    return {key: value for key, value in expected.items() if key not in left_out and not same(key, value)}
