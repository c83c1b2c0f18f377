"""What a run shows of the plugin on request, and that it shows nothing else."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
from plugin_parts import FIXTURES, OPTIONS

from pytest_kvmock import BACKENDS, EngineProfile
from pytest_kvmock.plugin.options import PROFILE_KEYS
from pytest_kvmock.plugin.report import AS_READ


def test_the_profile_keys_are_the_fields_of_the_profile():
    assert list(EngineProfile.__dataclass_fields__) == list(PROFILE_KEYS)


# ---------------------------------------------------------------------------------------------------- header

OF = f"(of {len(BACKENDS)})"
HEADER = [
    ([], "", None),
    (["-v"], "", f"kvmock: backends=lineage,lru,multi_lru {OF}, event errors=fail, event warnings=ignore, seed=0"),
    (["--kv-backend=lru"], "", f"kvmock: backends=lru {OF}, *"),
    (["--kv-backend=lru", "-q"], "", None),
    (["--kv-event-errors=warn"], "", "kvmock: *, event errors=warn, *"),
    ([], "kvmock_event_warnings = fail", "kvmock: *, event warnings=fail, *"),
    ([], "kvmock_backends = lru", f"kvmock: backends=lru {OF}, *"),
    ([], "kvmock_seed = 7", "kvmock: *, seed=7"),
    (["--kv-backend=lru"], "kvmock_backends = lineage", f"kvmock: backends=none {OF}, *"),
    ([], "kvmock_allow = duplicate_store block_not_found", "kvmock: *, allow=block_not_found,duplicate_store, *"),
]


@pytest.mark.parametrize(("args", "ini", "expected"), HEADER)
def test_the_header_names_settings_that_differ_from_the_default(nested, args, ini, expected):
    result = nested("def test(): pass", *args, files={"pytest.ini": f"[pytest]\n{ini}\n"})

    lines = [line for line in result.outlines if line.startswith("kvmock:")]
    assert bool(lines) == (expected is not None)
    if expected is not None:
        result.stdout.fnmatch_lines([expected])


def test_passing_tests_print_nothing_about_events(nested):
    result = nested("def test(kv_sink): kv_sink(GOOD); kv_sink.compare(lambda: GOOD.block_hashes)", "-q")

    assert [line.split("  ")[0].partition(" in")[0] for line in result.outlines if line] == [".", "1 passed"]


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--kv-backend=vllm"], "kvmock: vllm: only where a test names it; for all tests: -o kvmock_backends=vllm"),
        (
            ["--kv-backend=lru", "--kv-backend=sglang", "--kv-backend=vllm"],
            "kvmock: sglang, vllm: only where *: -o kvmock_backends='sglang vllm'",
        ),
        (["--kv-backend=vllm", "-o", "kvmock_backends=vllm"], None),
        (["--kv-backend=all"], None),
        (["--kv-backend=lru"], None),
    ],
)
def test_the_header_tells_how_to_run_all_tests_over_a_backend_outside_the_matrix(nested, args, hint):
    result = nested("def test(kv_harness): pass", *args)

    lines = [line for line in result.outlines if line.startswith("kvmock: ") and "for all tests" in line]
    assert (hint is not None) == bool(lines)
    if hint is not None:
        result.stdout.fnmatch_lines([hint])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--kv-backend=trtllm"], [f"kvmock: trtllm: {AS_READ}"]),
        (["-o", "kvmock_backends=vllm trtllm trtllm_v2"], [f"kvmock: trtllm, trtllm_v2: {AS_READ}"]),
        (["--kv-backend=vllm"], []),
        (["--kv-backend=all"], []),  # it runs the backends of the matrix
        (["-v"], []),
    ],
)
def test_the_header_names_engines_that_were_only_read(nested, args, expected):
    result = nested("def test(): pass", *args)

    assert [line for line in result.outlines if line.endswith(AS_READ)] == expected


# ---------------------------------------------------------------------------------------------------- lists


def test_kv_list_backends_lists_each_backend_with_its_product(nested):
    result = nested("def test(): raise OSError", "--kv-list-backends")

    assert result.ret == 0
    not_run = {name: "" if spec.in_matrix else " (not in the matrix of this run)" for name, spec in BACKENDS.items()}
    read = {name: f" ({AS_READ})" if spec.as_read else "" for name, spec in BACKENDS.items()}
    assert [(name, spec.models + read[name] + not_run[name]) for name, spec in BACKENDS.items()] == [
        tuple(part.strip() for part in line.split("  ", 1)) for line in result.outlines
    ]


def test_kv_list_backends_names_backends_outside_the_matrix(nested):
    result = nested("", "--kv-list-backends", "--kv-backend=lru")

    result.stdout.fnmatch_lines(
        ["lineage * (not in the matrix of this run)", "lru *[0-9a-z]", "multi_lru * (not in the matrix of this run)"]
    )


def test_markers_are_listed_with_their_full_signature(nested):
    result = nested("", "--markers")

    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.kv_backends(*names, exclude=()): *",
            (
                "@pytest.mark.kvmock([*], block_size=, *event_errors='fail|warn|ignore', *, allow=(rules,), "
                "faults={fault: rate}, survive=(faults,), engine={field: value}, roles={worker type: workers}, "
                "stores={name: {*}}): *"
            ),
        ]
    )
    assert all(f"{key}=" in result.stdout.str() for key in PROFILE_KEYS)


def test_fixtures_are_listed_with_their_first_paragraph(nested):
    result = nested("", "--fixtures")

    shown = [line.split()[0] for line in result.outlines if line.startswith(("kv_", "make_kv", "_kv"))]
    assert sorted(FIXTURES) == sorted(shown)
    result.stdout.no_fnmatch_line("*no docstring*kv*")
    result.stdout.fnmatch_lines(["kv_backend [[]session scope[]] -- *", "    Name of the eviction backend*"])
    scoped = [line for line in result.outlines if line.startswith(("kv_", "make_kv")) and "scope]" in line]
    assert len(scoped) == 2


def test_help_lists_every_option_and_its_ini_setting(nested):
    result = nested("", "--help")

    text = result.stdout.str()
    result.stdout.fnmatch_lines(["KV-cache mocks (pytest-kvmock):"])
    assert all(option.flag in text and option.ini in text for option in OPTIONS)
    result.stdout.fnmatch_lines(["  --kv-list-backends*", "  kvmock_backends (args):*"])


# ---------------------------------------------------------------------------------------------------- trace

TRACE = "".join(f'{{"timestamp": {n}, "input_length": 512, "output_length": 1, "hash_ids": [{n}]}}\n' for n in range(5))


@pytest.mark.parametrize(
    ("args", "ini", "expected"),
    [
        (["--kv-trace=sub/t.jsonl"], "", 5),
        (["--kv-trace=sub/t.jsonl", "--kv-trace-limit=3"], "", 3),
        ([], "kvmock_trace = sub/t.jsonl\nkvmock_trace_limit = 2", 2),
        (["--kv-trace-limit=4"], "kvmock_trace = sub/t.jsonl\nkvmock_trace_limit = 2", 4),
        (["--kv-trace-limit=7"], "", 7),
        ([], "", 200),
    ],
)
def test_kv_trace_has_the_requested_number_of_requests(nested, args, ini, expected):
    result = nested(
        f"def test(kv_trace): assert len(kv_trace) == {expected}\ndef test_again(kv_trace): assert len(kv_trace)",
        *args,
        files={"pytest.ini": f"[pytest]\n{ini}\n", "sub/t.jsonl": TRACE},
    )

    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("args", "ini", "marked", "plain"),
    [
        ([], "", "True", "False"),
        ([], "kvmock_trace_tokens = true", "False", "True"),
        (["--kv-trace-tokens"], "kvmock_trace_tokens = false", "False", "True"),
        (["--kv-trace-tokens", "--kv-trace=t.jsonl"], "", "False", "True"),
    ],
)
def test_prompts_of_kv_trace_have_tokens_on_request(nested, args, ini, marked, plain):
    """Both tests share one trace, which is read once per kind of prompts."""
    wins = "--kv-trace-tokens" in args
    result = nested(
        f"""
        def has_tokens(trace): return {{request.prompt().tokens is not None for request in trace}}

        def test(kv_trace): assert has_tokens(kv_trace) == {{{plain}}}

        @pytest.mark.kvmock(trace_tokens={marked})
        def test_marked(kv_trace): assert has_tokens(kv_trace) == {{{"True" if wins else marked}}}

        def test_again(kv_trace): assert has_tokens(kv_trace) == {{{plain}}}
        """,
        *args,
        files={"pytest.ini": f"[pytest]\n{ini}\n", "t.jsonl": TRACE},
    )

    result.assert_outcomes(passed=3)


TOKEN_INDEX = """
from pytest_kvmock import block_hashes, RadixIndex

class ByTokens(RadixIndex):
    find_matches = None

    def match_tokens(self, tokens):
        return RadixIndex.find_matches(self, block_hashes(tokens, 512))

@pytest.fixture
def kv_index(): return ByTokens()

@pytest.mark.kv_backends("lineage", "vllm")
@pytest.mark.kvmock(block_size=512, num_blocks=64)
def test(kv_worker, kv_trace):
    for request in kv_trace[:20]:
        kv_worker.serve(request.prompt())
"""


def test_a_trace_of_hashes_is_refused_for_an_index_of_tokens_which_runs_with_trace_tokens(nested):
    result = nested(TOKEN_INDEX)
    result.assert_outcomes(failed=2)
    refusal = (
        "E*ValueError: the index under test takes tokens (match_tokens), and this prompt has only hashes; give a "
        "prompt of tokens (of a trace: request.prompt(tokens=True), @pytest.mark.kvmock(trace_tokens=True) or "
        "--kv-trace-tokens), or give the index a find_matches(local_hashes)"
    )
    assert sum(fnmatch(line, refusal.replace("[", "[[]")) for line in result.outlines) == 2
    result.stdout.no_fnmatch_line("*index_failure*")
    nested(TOKEN_INDEX, "--kv-trace-tokens").assert_outcomes(passed=2)


def test_a_trace_in_the_ini_file_is_found_from_any_directory(nested, pytester, monkeypatch):
    files = {"pytest.ini": "[pytest]\nkvmock_trace = t.jsonl\n", "t.jsonl": TRACE, "sub/x": ""}
    nested("def test(kv_trace): assert len(kv_trace) == 5", files=files).assert_outcomes(passed=1)
    monkeypatch.chdir(pytester.path / "sub")
    nested("", "..", "-c", "../pytest.ini").assert_outcomes(passed=1)


def test_the_synthetic_trace_follows_the_seed(nested):
    source = "def test(kv_trace): print('drew', hash(tuple(request.hash_ids for request in kv_trace)))"

    def drawn(*args):
        return [line for line in nested(source, "-s", *args).outlines if "drew" in line]

    assert drawn() == drawn("--kv-seed=0")
    assert drawn() != drawn("--kv-seed=1")
