"""Scenario files as tests: collected files, their backends, and failure reports."""

from __future__ import annotations

import pytest
from depth import takes_long

INI = "[pytest]\nkvmock_scenarios = *.kv.yaml\n"
PASSES = "steps: [{use: [1], expect: {allocated: 1}}]\n"
FAILS = """\
profile: {num_blocks: 4, block_size: 4}
scenarios:
  fits:
    steps:
      - use: [1]
  evicts the oldest:
    backends: [lru]
    steps:
      - serve: {tokens: 0..15}
      - serve: {tokens: 100..103}
        expect:
          overlap: {tokens: 0..15, workers: {0: 4}}
"""


def ids_of(result):
    return [line for line in result.outlines if "::" in line]


def test_without_kvmock_scenarios_no_scenario_is_collected(nested):
    result = nested("", "--collect-only", "-q", files={"a.kv.yaml": PASSES})
    assert ids_of(result) == []


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        ("*.kv.yaml", ["a.kv.yaml", "sub/b.kv.yaml"]),
        ("sub/*", ["sub/b.kv.yaml"]),
        ("b.kv.yaml", ["sub/b.kv.yaml"]),
        ("nowhere/*", []),
    ],
)
def test_scenario_files_that_match_a_glob_are_collected(nested, globs, expected):
    files = {"pytest.ini": f"[pytest]\nkvmock_scenarios = {globs}\n", "a.kv.yaml": PASSES, "sub/b.kv.yaml": PASSES}
    result = nested("", "--collect-only", "-q", "--kv-backend", "lru", files={**files, "sub/c.yaml": "x: 1"})
    assert [line.partition("::")[0] for line in ids_of(result)] == expected


def test_each_scenario_runs_over_its_backend_matrix_and_the_rest_is_deselected(nested):
    files = {"pytest.ini": INI + "kvmock_backends = lineage lru\n", "a.kv.yaml": FAILS}
    collected = ids_of(nested("", "--collect-only", "-q", files=files))
    assert [line.partition("::")[2] for line in collected] == ["fits[lineage]", "fits[lru]", "evicts the oldest[lru]"]
    result = nested("", "--collect-only", "-q", "--kv-backend", "lineage", files=files)
    assert ids_of(result) == ["a.kv.yaml::fits[lineage]"]
    result.stdout.fnmatch_lines(["1/3 tests collected (2 deselected)*"])


def test_a_failure_shows_the_line_of_the_file_and_no_traceback(nested):
    result = nested("", "-k", "oldest", files={"pytest.ini": INI, "a.kv.yaml": FAILS})
    result.assert_outcomes(failed=1, deselected=len(ids_of(nested("", "--collect-only", "-q", "-k", "fits"))))
    assert """\
___________________________ evicts the oldest[lru] ____________________________
a.kv.yaml:12: expect overlap {0: 4}: got {0: 3}
    11          expect:
>   12            overlap: {tokens: 0..15, workers: {0: 4}}
------------------------- Captured kvmock events call --------------------------
3 events
""" in result.stdout.str()
    result.stdout.fnmatch_lines(["FAILED a.kv.yaml::evicts the oldest[[]lru[]]*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_full_trace_shows_where_a_scenario_failure_was_raised(nested):
    result = nested("", "-k", "oldest", "--full-trace", files={"pytest.ini": INI, "a.kv.yaml": FAILS})
    result.stdout.fnmatch_lines(["*player.py*ScenarioFailure*"])


def test_an_invalid_scenario_file_is_a_one_line_error_with_its_place(nested):
    files = {"pytest.ini": INI, "a.kv.yaml": "steps:\n- jump: 1\n"}
    result = nested("", files=files)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ERROR collecting a.kv.yaml*", "a.kv.yaml:2:3: steps: unknown key 'jump'; known: *"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "backends: [lruu]\n" + PASSES,
            "a.kv.yaml:1:1: backends: unknown backend 'lruu'; did you mean 'lru'? known: lineage, lru*",
        ),
        ("profile: {workers: 99999}\n" + PASSES, "a.kv.yaml:1:20: workers must be at most 65536, got 99999"),
    ],
)
def test_a_value_that_only_the_plugin_can_check_is_a_one_line_error(nested, text, message):
    result = nested("", files={"pytest.ini": INI, "a.kv.yaml": text})
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


def test_a_size_that_the_backend_refuses_is_a_one_line_error(nested):
    text = "profile: {block_size: 12}\n" + PASSES
    result = nested("", "--kv-backend", "lru", files={"pytest.ini": INI, "a.kv.yaml": text})
    result.stdout.fnmatch_lines(["a.kv.yaml:1: backend lru: *12*"])


def test_scenarios_follow_the_warning_policy_of_the_command_line(nested):
    files = {"pytest.ini": INI, "a.kv.yaml": "steps: [{use: [1]}, {event: {stored: [1]}}]\n"}
    nested("", "--kv-backend", "lru", files=files).assert_outcomes(passed=1)
    result = nested("", "--kv-backend", "lru", "--kv-event-warnings", "fail", files=files)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*1 KV event warning: duplicate_store*"])


@takes_long
def test_scenario_outcomes_are_the_same_under_xdist(nested):
    files = {"pytest.ini": INI, "a.kv.yaml": FAILS}
    plain = nested("", "-v", files=files)
    spread = nested("", "-v", "-n", "2", plugins=["xdist"], files=files, subprocess=True)
    assert plain.parseoutcomes() == spread.parseoutcomes()


def test_a_scenario_runs_in_a_custom_test(nested):
    source = """
    from pytest_kvmock.contrib.scenarios import load_scenarios, play

    @pytest.mark.parametrize("scenario", load_scenarios("a.kv.yaml"), ids=lambda scenario: scenario.name)
    @pytest.mark.kv_backends("lru")
    def test_mine(kv_harness, scenario):
        play(kv_harness, scenario)
    """
    nested(source, files={"a.kv.yaml": PASSES}).assert_outcomes(passed=1)


def test_a_saved_reproduction_is_a_scenario_that_fails_in_the_same_way(nested):
    source = """
    class TestIt:
        @pytest.mark.parametrize("path", ["a/b"])
        def test_sink(self, kv_sink, path):
            kv_sink(GOOD)
            kv_sink(BAD)
    """
    result = nested(source, "--kv-save-scenario", "saved/here")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["# saved as saved/here/test_it.py-TestIt-test_sink-a-b.kv.yaml"])
    again = nested("", "saved", files={"pytest.ini": INI})
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*test_it.py-TestIt-test_sink-a-b.kv.yaml:*: block_not_found"])


def test_a_saved_scenario_that_needs_an_index_is_skipped_with_a_hint_how_to_play_it(nested):
    index = """
    from pytest_kvmock import RadixIndex

    class Forgets:
        def __init__(self):
            self.tree = RadixIndex()

        def apply(self, event):
            if not isinstance(event.event.data, Removed):
                self.tree.apply(event)

        def find_matches(self, local_hashes):
            return self.tree.find_matches(local_hashes).scores

    @pytest.fixture
    def kv_index():
        return Forgets()
    """
    test = """
    def test_it(kv_sink):
        kv_sink(GOOD)
        kv_sink(Removed((2,)))
    """
    nested(index + test, "--kv-save-scenario", "saved").assert_outcomes(failed=1)
    ini = {"pytest.ini": INI}
    again = nested("", "saved", "-rs", files=ini)
    again.assert_outcomes(skipped=1)
    again.stdout.fnmatch_lines(["SKIPPED*it needs the index under test: play(kv_harness, load_scenarios(path)[[]0])*"])
    played = """
    from pytest_kvmock.contrib.scenarios import load_scenarios, play

    def test_saved(kv_harness):
        play(kv_harness, load_scenarios("saved/test_it.py-test_it.kv.yaml")[0])
    """
    result = nested(index + played, "--kv-backend", "lru")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ScenarioFailure: *test_it.kv.yaml:*: index_drift*"])


def test_a_scenario_that_cannot_be_saved_is_reported(nested):
    source = """
        def test(kv_sink, pytestconfig):
            (pytestconfig.invocation_params.dir / "file").touch()
            kv_sink(BAD)
        """
    result = nested(source, "--kv-save-scenario", "file")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["# not saved as file/test_it.py-test.kv.yaml: *"])


PARENTLESS = {"pytest.ini": INI, "a.kv.yaml": "steps: [{event: {stored: [3], parent: 2}}]\n"}


@pytest.mark.parametrize(
    ("args", "outcome"),
    [
        ((), {"failed": 1}),
        (("--kv-event-errors", "ignore"), {"passed": 1}),
        (("--kv-event-errors", "warn"), {"passed": 1, "warnings": 1}),
        (("-o", "kvmock_allow=parent_block_not_found"), {"passed": 1}),
        (("-o", "kvmock_allow=block_not_found"), {"failed": 1}),
    ],
)
def test_scenarios_follow_the_error_policy_of_the_run(nested, args, outcome):
    nested("", "--kv-backend", "lru", "-W", "default", *args, files=PARENTLESS).assert_outcomes(**outcome)


def test_a_waived_problem_does_not_fail_a_step(nested):
    hook = "def pytest_kvmock_event_error(item, problem): return problem.rule == 'parent_block_not_found'"
    nested("", "--kv-backend", "lru", files={**PARENTLESS, "conftest.py": hook}).assert_outcomes(passed=1)


def test_a_saved_scenario_of_a_warning_fails(nested):
    source = """
    @pytest.mark.kvmock(event_warnings="fail")
    def test_it(kv_sink):
        kv_sink(GOOD)
        kv_sink(TWICE)
    """
    nested(source, "--kv-save-scenario", "saved").assert_outcomes(failed=1)
    again = nested("", "saved", files={"pytest.ini": INI})
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*expect problems []: got ['duplicate_store']*"])


UNSAVABLE = [
    ([""], "got ''; allowed: a directory, which need not exist yet"),
    (["file"], "got 'file'; allowed: a directory, which need not exist yet"),
    (["file/below"], "got 'file/below'; allowed: a directory, which need not exist yet"),
    (["new", "--kv-reduce=off"], "there is nothing to save with --kv-reduce=off; allowed: one of the two"),
    (["new", "-o", "kvmock_reduce=off"], "there is nothing to save with -o kvmock_reduce=off; allowed: one of the two"),
]


@pytest.mark.parametrize(("args", "message"), UNSAVABLE)
def test_a_directory_that_cannot_be_written_is_a_usage_error(nested, args, message):
    result = nested("def test(): pass", "--kv-save-scenario", *args, files={"file": ""})

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [f"ERROR: --kv-save-scenario: {message}"]


def test_a_scenario_can_drive_engines(nested):
    text = (
        "profile: {block_size: 4}\nengine: {max_num_seqs: 1, num_gpu_blocks: 9}\nsteps:\n"
        "- submit: {request: a, tokens: 0..7, output_tokens: 2}\n- submit: {tokens: 0..7}\n- step: 1\n"
        "  expect: {metrics: {running: 1, waiting: 1}}\n- run:\n  expect: {requests: {a: finished}}\n"
        "- submit: {tokens: 0..36}\n  expect: {refused: 10 blocks are needed for prompt and output}\n"
    )
    files = {"pytest.ini": INI + "kvmock_backends = lineage hash_cache\n", "a.kv.yaml": text}
    nested("", files=files).assert_outcomes(passed=2)


def test_engine_arguments_that_contradict_the_profile_are_a_collection_error(nested):
    text = "profile: {num_blocks: 7}\nengine: {num_gpu_blocks: 9}\nsteps: [{run: }]\n"
    result = nested("", files={"pytest.ini": INI, "a.kv.yaml": text})
    result.stdout.fnmatch_lines(
        [
            (
                "a.kv.yaml:2:1: engine: num_gpu_blocks=9 contradicts num_blocks=7 of the profile; set one of them, or "
                "both to the same value"
            )
        ]
    )


SECRETIVE = """
from pytest_kvmock import BackendSpec, KvCacheEvent, Stored
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.logical import LogicalManager


class KeepsOneSecret:
    def __init__(self, sink):
        self.sink = sink

    def publish(self, event, tier, token_ids):
        data = event.data
        if isinstance(data, Stored) and len(data.block_hashes) > 2:
            data = Stored(data.parent_hash, data.block_hashes[:-1], data.tokens_hashes[:-1])
        self.sink.publish(KvCacheEvent(event.event_id, data, event.dp_rank), tier, None)


def make(*, sink, **sizes):
    return LogicalManager(backend="secretive", eviction=LruPolicy(), sink=sink and KeepsOneSecret(sink), **sizes)


def pytest_kvmock_backends():
    return {"secretive": BackendSpec("secretive", "nothing", make, in_matrix=False)}
"""


def test_an_engine_failure_is_saved_as_a_scenario_that_fails_until_it_is_fixed(nested):
    files = {"pytest.ini": INI, "conftest.py": SECRETIVE}
    body = """
        @pytest.mark.kv_backends("secretive")
        @pytest.mark.kvmock(block_size=4, num_blocks=24)
        def test_driven(kv_harness, kv_backend):
            engine = kv_harness.engine(0, max_num_seqs=3)
            for number in range(20):
                engine.submit(range(100 * number, 100 * number + 12), 6)
            engine.run()
    """
    result = nested(body, "--kv-save-scenario", "saved", files=files)
    result.stdout.fnmatch_lines(
        [
            "# cut from 20 requests to 1",
            "# saved as saved/test_it.py-test_driven-secretive.kv.yaml",
            "        kv.engine(0).submit([[]*range(12)], 5)",
            "        kv.engine(0).run()",
        ]
    )
    nested("", "saved", files=files).assert_outcomes(failed=1)
