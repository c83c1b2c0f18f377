"""First tests of a user, each with one change: they work, or the error says what to type."""

import json

import pytest
from depth import few

from pytest_kvmock import BACKENDS

ROWS = [
    {"timestamp": 0, "input_length": 1_000, "output_length": 4, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 1_600, "output_length": 4, "hash_ids": [0, 2, 3, 4]},
]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


MARKED = f"@pytest.mark.kv_backends(*{few([*BACKENDS], 4)})"


@pytest.mark.parametrize("marker", ["", MARKED, "@pytest.mark.kvmock(num_blocks=12, workers=2)"])
def test_a_fleet_serves_the_synthetic_trace_at_the_sizes_of_the_test(nested, marker):
    source = f"""
    {marker}
    def test(kv_fleet, kv_trace):
        assert len(kv_fleet.run(kv_trace).completed) == 200
    """
    result = nested(source, *["--kv-backend=lineage"] * (marker != MARKED))
    assert list(result.parseoutcomes()) == ["passed"]


def test_the_synthetic_trace_uses_the_block_size_and_prompts_of_a_quarter_of_the_blocks(nested):
    source = """
    @pytest.mark.kv_backends("lineage", "vllm_gpt_oss", "trtllm")
    def test(kv_worker, kv_trace, kv_backend, kv_profile):
        size = kv_profile.block_size
        most = 256 * size // (8 if kv_backend == "vllm_gpt_oss" else 4)  # two cache groups take blocks
        assert most // 2 < max(request.input_length for request in kv_trace) <= most
        assert all(len(request.hash_ids) == -(-request.input_length // size) for request in kv_trace)
        assert kv_worker.serve(kv_trace[0].prompt()).stored_blocks

    @pytest.mark.kvmock(engine={"num_gpu_blocks": 100})
    def test_of_engine_fields(kv_trace):
        assert max(request.input_length for request in kv_trace) <= 400
    """
    nested(source).assert_outcomes(passed=4)


def test_a_trace_with_another_block_size_names_both_keys_to_type(nested):
    source = """
    {}
    def test(kv_fleet, kv_trace): assert len(kv_fleet.run(kv_trace).completed) == 2
    """
    options = ("--kv-backend=lineage", "--kv-trace=t.jsonl")
    result = nested(source.format(""), *options, files={"t.jsonl": lines(ROWS)})
    result.assert_outcomes(failed=1)
    asked = "@pytest.mark.kvmock(block_size=512, num_blocks=16)"
    why = "requests[0]: a prompt of 1000 tokens has 2 hash ids, where the engines' block size of 16 makes 63"
    assert why in result.stdout.str()
    assert asked in result.stdout.str()
    nested(source.format(asked), *options).assert_outcomes(passed=1)


def test_rows_that_disagree_about_their_block_size_are_both_named(nested):
    rows = [*ROWS, {"timestamp": 10, "input_length": 64, "output_length": 4, "hash_ids": [0, 5, 6, 7]}]
    result = nested("def test(kv_trace): pass", "--kv-trace=t.jsonl", files={"t.jsonl": lines(rows)})
    result.assert_outcomes(errors=1)
    both = (
        "line 2 (1600 tokens, number of ids 4: blocks of 400 to 533) and line 3 (64 tokens, number of ids 4: blocks of "
        "16 to 21) disagree about it"
    )
    assert f"a trace has one block size, and {both}" in result.stdout.str()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "def test(kv_worker, kv_trace): kv_worker.serve(kv_trace[0])",
            (
                "TypeError: tokens must be a sequence of token ids: * a request of a trace is served by its "
                "request.prompt()"
            ),
        ),
        (
            "def test(kv_fleet, kv_prompt): kv_fleet.run([kv_prompt(blocks=3)])",
            (
                "TypeError: Fleet: requests[[]0] must be *, got <Prompt of 48 tokens>; "
                "a prompt is sent by FleetRequest(prompt, output_tokens)"
            ),
        ),
        (
            "def test(make_kv_fleet): make_kv_fleet(worker=2)",
            "TypeError: fleet: unknown argument 'worker'; did you mean 'workers' or 'order'? known: *",
        ),
        (
            "@pytest.mark.kvmock(engine={'max_model_len': 64})\ndef test(kv_fleet): pass",
            (
                "kvmock: kv_fleet: max_model_len=64 is an argument of 1.6.1; this engine follows 1.2.1 "
                "(semantics='1.6.1' has it)"
            ),
        ),
        (
            "@pytest.mark.kvmock(engine={'semantics': '1.6.1'})\ndef test(kv_fleet): pass",
            "kvmock: kv_fleet: semantics='1.6.1' * got 'lineage' (of a test: @pytest.mark.kv_backends('vllm'))",
        ),
        (
            "@pytest.mark.kvmock(workers=0)\ndef test(kv_fleet): pass",
            "kvmock: kv_fleet: *there are no engines, * (of a test: @pytest.mark.kvmock(workers=...))",
        ),
    ],
)
def test_a_typical_first_mistake_gets_an_error_with_what_to_type(nested, body, problem):
    result = nested(body, "--kv-backend=lineage")
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*{problem}"])


@pytest.mark.parametrize(
    ("name", "meant"), [("kv_backend", "kv_backends"), ("kv_dialect", "kv_dialects"), ("kv_mock", "kvmock")]
)
def test_a_marker_that_resembles_one_of_the_plugin_is_refused(nested, name, meant):
    source = f"@pytest.mark.{name}\ndef test(kv_prompt): pass"
    result = nested(source)
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"*{name}(): unknown marker; did you mean {meant}?"])
    registered = {"pytest.ini": f"[pytest]\nmarkers = {name}: a marker of the project\n"}
    nested(source, files=registered).assert_outcomes(passed=1)
