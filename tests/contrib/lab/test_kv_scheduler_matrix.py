"""`kv_engine`, `kv_harness.engine`, `kvmock(engine={...})` and the scheduler matrix, as in a user's tests."""

from __future__ import annotations

import re

import pytest
from depth import takes_long

from pytest_kvmock.contrib.lab.scheduler_cases import SCHEDULER_CASES

BACKENDS = ["lineage", "lru", "multi_lru"]
CASES = [
    "distinct-nocache-whole",
    "distinct-cached-whole",
    "shared-nocache-whole",
    "shared-cached-whole",
    "distinct-nocache-chunked",
    "distinct-cached-chunked",
    "shared-nocache-chunked",
    "shared-cached-chunked",
]

TAKES = "def test(kv_engine, kv_scheduler_case, kv_scheduler_requests)"
MARK = "@pytest.mark.kv_scheduler_matrix"
MATRIX = f"{MARK}\n"

# ---------------------------------------------------------------------------------------------------- fixtures


def test_tests_with_kv_engine_run_over_the_backend_matrix(ids):
    assert [f"{test}[{name}]" for test in ("test_one", "test_more") for name in BACKENDS] == ids(
        "def test_one(kv_engine): pass\ndef test_more(kv_harness): pass"
    )


def test_kv_engine_drives_worker_0_and_further_engines_the_next_workers(nested):
    result = nested(
        """
        def test(kv_engine, kv_harness, kv_worker, kv_manager, kv_backend, kv_prompt):
            assert kv_engine is kv_harness.engine(0)
            assert kv_worker is kv_engine.worker
            assert kv_manager is kv_engine.worker.manager
            assert (kv_backend, 16, 256) == (kv_manager.backend, kv_manager.block_size, kv_manager.num_blocks)
            slow, fast = kv_harness.engine(None), kv_harness.engine(None, speedup_ratio=4.0)
            assert [1, 2] == [engine.worker.worker_id for engine in (slow, fast)]
            assert kv_backend == fast.worker.backend
            prompt = kv_prompt(blocks=4)
            request = kv_engine.submit(prompt, 3)
            assert [request] == kv_worker.requests
            kv_engine.run()
            assert 3 == request.generated_tokens
            assert {0: 4} == kv_harness.overlap(prompt)
            for engine in (slow, fast):
                engine.submit(prompt, 3)
                engine.run()
            assert fast.now_ms < slow.now_ms
        """
    )

    result.assert_outcomes(passed=3)


def test_kv_engine_serves_requests_over_every_backend(nested):
    result = nested(
        """
        @pytest.mark.kv_backends("hash_cache", "vllm", "vllm_0_19", "sglang")
        def test(kv_engine, kv_harness, kv_prompt):
            for engine in (kv_engine, kv_harness.engine(None, speedup_ratio=10)):
                for _ in range(3):
                    engine.submit(kv_prompt(blocks=4), 20)
                engine.run()
                assert [20] * 3 == [request.generated_tokens for request in engine.requests]
                assert 0 == engine.metrics.active_blocks
        """
    )

    result.assert_outcomes(passed=4)


@pytest.mark.parametrize("args", [[], ["--kv-event-warnings=fail"]], ids=["default", "warnings fail"])
def test_open_requests_of_an_engine_are_reported_as_leaks(nested, args):
    result = nested(
        "def test(kv_engine):\n    kv_engine.submit([1] * 16, 4)\n    kv_engine.step()", "--kv-backend=lru", *args
    )

    result.assert_outcomes(**{"failed" if args else "passed": 1})
    result.stdout.fnmatch_lines(["*leaked_requests*"])


def test_a_closed_engine_has_no_leaked_requests(nested):
    result = nested(
        """
        def test(kv_engine):
            with kv_engine:
                for length in (16, 160, 1600):
                    kv_engine.submit([1] * length, 40)
                kv_engine.submit([2], 1, 1e9)
                kv_engine.step()
                assert kv_engine.metrics.active_blocks > 0
            assert 0 == kv_engine.metrics.active_blocks
        """,
        "--kv-event-warnings=fail",
    )

    result.assert_outcomes(passed=3)


def test_a_stalled_engine_raises_in_the_test_body(nested):
    result = nested(
        """
        from pytest_kvmock.fleets import EngineStalled

        @pytest.mark.kvmock(num_blocks=6, block_size=4, engine={"enable_chunked_prefill": False,
                                                                "max_num_batched_tokens": 8})
        def test(kv_engine):
            with kv_engine:
                kv_engine.submit([1] * 16, 4)
                with pytest.raises(EngineStalled):
                    kv_engine.run()
        """
    )

    result.assert_outcomes(passed=3)


# ---------------------------------------------------------------------------------------------------- kvmock(engine=)


def test_engine_fields_of_markers_are_merged_and_set_the_profile_sizes(nested):
    result = nested(
        """
        pytestmark = pytest.mark.kvmock(engine={"num_gpu_blocks": 7, "max_num_seqs": 3, "block_size": 8})

        @pytest.mark.kvmock(engine={"max_num_seqs": 2, "preemption_mode": "fifo"}, workers=2)
        class TestC:
            @pytest.mark.kvmock(engine={"num_gpu_blocks": 9}, event_warnings="fail")
            def test(self, kv_engine, kv_harness, kv_profile, kv_prompt):
                assert (9, 8, 2) == (kv_profile.num_blocks, kv_profile.block_size, kv_profile.workers)
                assert kv_profile == kv_harness.profile
                for engine in (kv_engine, kv_harness.engine(1), kv_harness.engine(None)):
                    args = engine.args
                    assert (9, 8, 2, "fifo") == (
                        args.num_gpu_blocks, args.block_size, args.max_num_seqs, args.preemption_mode
                    )
                    assert (9, 8) == (engine.worker.manager.num_blocks, engine.worker.manager.block_size)
                assert 9 == kv_harness.inside.streams[0, 0].spec.num_blocks  # of the ledger

        def test_without_an_engine(kv_profile, kv_events): assert 7 == kv_profile.num_blocks
        """
    )

    result.assert_outcomes(passed=4)


def test_an_engine_without_prefix_caching_publishes_nothing(nested):
    result = nested(
        """
        @pytest.mark.kvmock(engine={"enable_prefix_caching": False})
        def test(kv_engine, kv_events, kv_profile):
            assert not kv_profile.prefix_caching
            kv_engine.submit([1] * 64, 2)
            kv_engine.run()
            assert 0 == kv_events.total
        """
    )

    result.assert_outcomes(passed=3)


CONTRADICTIONS = {
    "a key of the marker": ("@pytest.mark.kvmock(num_blocks=8, engine={'num_gpu_blocks': 9})", "", "num_blocks=8"),
    "a key of an outer marker": (
        "pytestmark = pytest.mark.kvmock(num_blocks=8)\n@pytest.mark.kvmock(engine={'num_gpu_blocks': 9})",
        "",
        "num_blocks=8",
    ),
    "a key that says the default": (
        "@pytest.mark.kvmock(num_blocks=256, engine={'num_gpu_blocks': 9})",
        "",
        "num_blocks=256",
    ),
    "a named profile that says the default": (
        "@pytest.mark.kvmock(profile='mine', engine={'num_gpu_blocks': 9})",
        "kvmock_profiles = mine.yaml",
        "num_blocks=256",
    ),
    "ini": ("@pytest.mark.kvmock(engine={'num_gpu_blocks': 9})", "kvmock_num_blocks = 8", "num_blocks=8"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_engine_field_that_contradicts_the_profile_is_a_one_line_error(nested, name):
    marker, ini, shown = CONTRADICTIONS[name]
    files = {"pytest.ini": f"[pytest]\n{ini}\n", "mine.yaml": "profiles:\n  mine:\n    num_blocks: 256\n"}

    result = nested(f"{marker}\ndef test(kv_engine): pass", "--kv-backend=lru", files=files)

    result.assert_outcomes(errors=1)
    assert [line for line in result.outlines if line.startswith("kvmock: num_gpu")] == [
        f"kvmock: num_gpu_blocks=9 contradicts {shown} of the profile; set one of them, or both to the same value"
    ]
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


def test_an_engine_field_that_agrees_with_the_profile_is_accepted(nested):
    source = "@pytest.mark.kvmock(num_blocks=9, engine={'num_gpu_blocks': 9})\ndef test(kv_engine): pass"

    nested(source).assert_outcomes(passed=3)


WRONG = [
    ("{'num_gpu_block': 8}", "unknown field of the engine's arguments 'num_gpu_block'; did you mean 'num_gpu_blocks'*"),
    ("{'num_gpu_blocks': 0}", "num_gpu_blocks must be an integer of at least 1, got 0"),
    ("{'speedup_ratio': float('nan')}", "speedup_ratio must be a finite number of at least 0, got nan"),
    ("{'preemption_mode': 'filo'}", "*preemption_mode*filo*lifo*fifo*"),
    ("{'is_prefill': True}", "unknown field of the engine's arguments 'is_prefill'*"),
    ("{'num_g2_blocks': 0}", "num_g2_blocks must be an integer of at least 1, or None, got 0"),
    ("{'num_g3_blocks': 8}", "num_g3_blocks=8: there are no tiers beyond the host; leave it out"),
    ("{'planner_profile_data': 'missing.npz'}", "planner_profile_data: *missing.npz*"),
    ("{'sglang': {'page_sze': 8}}", "*page_sze*did you mean 'page_size'*"),
    ("{3: 8}", "a field is named by a string, got 3"),
    ("['num_gpu_blocks']", "got [[]'num_gpu_blocks'[]]; allowed: a mapping of fields of MockEngineArgs"),
    ("None", "got None; allowed: a mapping of fields of MockEngineArgs"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_invalid_engine_fields_are_a_collection_error(nested, fields, message):
    result = nested(f"@pytest.mark.kvmock(engine={fields})\ndef test(kv_engine): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_it.py::test: kvmock(engine=*): engine: {message}"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_each_invalid_engine_field_is_reported_on_its_own_line(nested):
    source = "@pytest.mark.kvmock(engine={'max_num_seqs': 0, 'block_sise': 4, 'dp_size': 2})\ndef test(kv_engine): pass"

    result = nested(source)

    expected_message = [
        line.partition("): engine: ")[2] for line in result.outlines if line.startswith("test_it.py::test: ")
    ]
    assert [line.split()[0] for line in expected_message] == ["max_num_seqs", "unknown"]


def test_invalid_engine_fields_of_a_testcase_are_a_one_line_error_at_setup(nested):
    result = nested(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _kv(self, kv_sink): pass
            @pytest.mark.kvmock(engine={"num_gpu_blocks": 0})
            def test(self): pass
        """
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvmock: kvmock(engine={'num_gpu_blocks': 0}): engine: num_gpu_blocks must be *"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


def test_an_engine_type_unknown_to_the_backend_is_a_one_line_error(nested):
    result = nested(
        "@pytest.mark.kvmock(engine={'engine_type': 'sglang'})\ndef test(kv_engine): pass", "--kv-backend=lru"
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvmock: kv_engine: engine_type 'sglang' *; got 'lru'"])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


def test_an_invalid_field_of_an_additional_engine_adds_no_worker(nested):
    result = nested(
        """
        def test(kv_harness):
            with pytest.raises(ValueError, match="unknown field.*did you mean 'max_num_seqs'"):
                kv_harness.engine(None, max_num_seq=3)
            with pytest.raises(ValueError, match="num_gpu_blocks=3 contradicts num_blocks=256 of the profile"):
                kv_harness.engine(None, num_gpu_blocks=3)
            assert [0] == [*kv_harness.workers]
        """
    )

    result.assert_outcomes(passed=3)


# ---------------------------------------------------------------------------------------------------- the matrix


def test_the_scheduler_cases_are_those_of_dynamo_in_its_order():
    rows = [(case.shared, case.caching, case.chunked) for case in SCHEDULER_CASES]
    four = [(False, False), (False, True), (True, False), (True, True)]
    assert [(*row, False) for row in four] + [(*row, True) for row in four] == rows
    assert [case.id for case in SCHEDULER_CASES] == CASES


def test_the_matrix_combines_all_cases_with_all_backends(ids):
    assert [f"test[{case}-{name}]" for case in CASES for name in BACKENDS] == ids(f"{MATRIX}{TAKES}: pass")


@pytest.mark.parametrize("fixtures", ["kv_engine", "kv_harness", "kv_engine, kv_scheduler_case"])
def test_a_matrix_test_can_use_any_of_the_engine_fixtures(ids, fixtures):
    assert len(ids(f"{MATRIX}def test({fixtures}): pass")) == 8 * 3


def test_a_class_or_a_module_can_have_the_matrix_marker(ids):
    assert (
        len(
            ids(
                f"{MATRIX}class TestC:\n    {TAKES.replace('(', '_1(self, ')}: pass\n    "
                f"{TAKES.replace('(', '_2(self, ')}: pass"
            )
        )
        == 2 * 8 * 3
    )
    assert len(ids(f"pytestmark = pytest.mark.kv_scheduler_matrix\n{TAKES}: pass")) == 8 * 3


def test_the_matrix_multiplies_with_other_parameters_which_come_first_in_the_id(ids):
    found = ids(f"{MATRIX}@pytest.mark.parametrize('n', [1, 2])\ndef test(n, kv_engine): pass")

    assert [f"test[{n}-{case}-{name}]" for n in (1, 2) for case in CASES for name in BACKENDS] == found


@pytest.mark.parametrize(
    ("args", "left"),
    [
        (["--kv-backend=lru"], [f"test[{case}-lru]" for case in CASES]),
        (["-k", ("shared and cached and "
        "lineage")], ["test[shared-cached-whole-lineage]", "test[shared-cached-chunked-lineage]"]),
        (["-k", "nocache and not multi_lru and whole"], [
            f"test[{case}-nocache-whole-{name}]" for case in ("distinct", "shared") for name in ("lineage", "lru")
        ]),
    ],
    ids=["kv-backend", "k", "k not"],
)  # fmt: skip
def test_the_scheduler_matrix_can_be_filtered_like_any_matrix(ids, args, left):
    assert left == ids(f"{MATRIX}{TAKES}: pass", *args)


def test_all_cases_are_deselected_if_no_backend_is_left(nested):
    source = f"{MATRIX}@pytest.mark.kv_backends('lineage')\n{TAKES}: pass\ndef test_other(): pass"

    nested(source, "--kv-backend=lru").assert_outcomes(passed=1, deselected=8)


def test_kv_engine_has_the_arguments_of_the_scheduler_case(nested):
    result = nested(
        f"""
        {MARK}
        {TAKES[:-1]}, kv_profile, request):
            case, args = kv_scheduler_case, kv_engine.args
            assert case.id in request.node.name
            assert str(case) == case.id
            assert (case.caching, case.chunked) == (args.enable_prefix_caching, args.enable_chunked_prefill)
            assert (500, 64, 1000.0) == (args.num_gpu_blocks, args.block_size, args.speedup_ratio)
            assert (500, 64, case.caching) == (kv_profile.num_blocks, kv_profile.block_size, kv_profile.prefix_caching)
            assert [(1000, 100)] * 200 == [(len(r.prompt.tokens), r.max_output_tokens) for r in kv_scheduler_requests]
            heads = {{r.prompt.tokens[:500] for r in kv_scheduler_requests}}
            assert (1 if case.shared else 200) == len(heads)
            assert 200 == len({{r.prompt.tokens[500:] for r in kv_scheduler_requests}})
            prompt, max_output_tokens = kv_scheduler_requests[0]
        """
    )

    result.assert_outcomes(passed=24)


def test_marker_fields_override_those_of_the_scheduler_case(nested):
    result = nested(
        """
        pytestmark = [pytest.mark.kv_scheduler_matrix, pytest.mark.kv_backends("lru")]

        @pytest.mark.kvmock(engine={"num_gpu_blocks": 40, "max_num_seqs": 2}, workers=2)
        def test_engine(kv_engine, kv_harness):
            assert (40, 64, 2) == (kv_engine.args.num_gpu_blocks, kv_engine.args.block_size, kv_engine.args.max_num_seqs)
            assert 2 == len(kv_harness.workers)

        @pytest.mark.kvmock(num_blocks=41)
        def test_profile(kv_engine): assert (41, 64) == (kv_engine.args.num_gpu_blocks, kv_engine.args.block_size)
        """,  # noqa: E501
        files={"pytest.ini": "[pytest]\nkvmock_num_blocks = 9\nkvmock_chunk = 32\nkvmock_prefix_caching = false\n"},
    )

    result.assert_outcomes(passed=16)


def test_scheduler_requests_depend_only_on_the_seed_and_the_test(nested):
    source = f"""
    {MARK}
    @pytest.mark.kv_backends("lru")
    {TAKES}: print("drew", [r.prompt.tokens[-1] for r in kv_scheduler_requests][:3])
    """

    def drawn(*args):
        lines = nested(source, "-s", *args).outlines
        return [line.partition("drew")[2] for line in lines if "drew" in line]

    assert len(set(drawn())) == 8
    assert drawn() == drawn()
    assert not set(drawn()) & set(drawn("--kv-seed=1"))


# ---------------------------------------------------------------------------------------------------- a user's router

USERS = """
from pytest_kvmock import RadixIndex, Removed

class Router(RadixIndex):
    '''A router's index, with a fault where `FAULT` says one.'''
    fault = "FAULT"
    removed = 0

    def apply(self, event):
        if isinstance(event.event.data, Removed):
            self.removed += 1
            if self.fault == "forgets a Removed" and self.removed == 40:
                return
        super().apply(event)

@pytest.fixture
def kv_index():
    return Router()

@pytest.mark.kv_scheduler_matrix
def test_router(kv_engine, kv_scheduler_case, kv_scheduler_requests, kv_index, kv_harness):
    assert kv_harness.index is kv_index
    for request in kv_scheduler_requests[:80]:  # more than fit in the cache; examples/scheduler_matrix serves all
        kv_engine.submit(*request)
    report = kv_engine.run()
    assert 80 * 100 == sum(request.generated_tokens for request in report.requests)
    metrics = kv_engine.metrics
    assert (0, 0.0) == (metrics.active_blocks, metrics.cache_usage)
    assert metrics.total_blocks > 0
    if kv_scheduler_case.caching:
        assert kv_index.removed > 40
    else:
        assert kv_index.removed == 0
"""


def run_users(nested, fault, *args, **options):
    return nested(USERS.replace("FAULT", fault), "--kv-reduce=off", *args, **options)


@takes_long
def test_a_correct_router_passes_the_scheduler_matrix(nested):
    run_users(nested, "", "-k", "lineage or (shared and cached and chunked)").assert_outcomes(passed=10, deselected=14)


@takes_long
def test_a_faulty_router_fails_only_in_cases_that_publish_events(nested):
    result = run_users(nested, "forgets a Removed", "-k", "lru and not multi_lru")

    result.assert_outcomes(passed=4, failed=4, deselected=16)
    failed = set(re.findall(r"^FAILED \S+\[(\S+)-lru\]", result.stdout.str(), re.MULTILINE))
    assert {case for case in CASES if "-cached-" in case} == failed
    result.stdout.fnmatch_lines(["*KV event error*: index_drift*"])


@takes_long
def test_the_scheduler_matrix_runs_under_xdist(nested):
    result = run_users(nested, "", "-k", "lru and not multi_lru and whole", "-n", "2", plugins=["xdist"])

    result.assert_outcomes(passed=4)


# ---------------------------------------------------------------------------------------------------- refused

ERRORS = {
    "without an engine": (
        f"{MATRIX}def test(kv_worker): pass",
        "kv_scheduler_matrix is for tests that take kv_engine, or kv_harness for engines; this one has neither",
    ),
    "without an engine, with its case and requests": (
        f"{MATRIX}def test(kv_scheduler_case, kv_scheduler_requests): pass",
        "kv_scheduler_matrix is for tests that take kv_engine, or kv_harness for engines; this one has neither",
    ),
    "without any fixture": (
        f"{MATRIX}def test(): pass",
        "kv_scheduler_matrix is for tests that take kv_engine, or kv_harness for engines; this one has neither",
    ),
    "with arguments": (
        "@pytest.mark.kv_scheduler_matrix('lru')\ndef test(kv_engine): pass",
        ("kv_scheduler_matrix('lru'): takes no arguments; fields of the engine are those of kvmock(engine={...}), "
        "backends "
        "those of kv_backends"),
    ),
    "with keywords": (
        "@pytest.mark.kv_scheduler_matrix(chunked=True)\ndef test(kv_engine): pass",
        ("kv_scheduler_matrix(chunked=True): takes no arguments; fields of the engine are those of "
        "kvmock(engine={...}), "
        "backends those of kv_backends"),
    ),
    "with a parametrize of the case": (
        f"{MATRIX}@pytest.mark.parametrize('kv_scheduler_case', [1])\n{TAKES}: pass",
        "kv_scheduler_case gets its values from @pytest.mark.kv_scheduler_matrix; do not parametrise it",
    ),
    "a parametrize of the case alone": (
        f"@pytest.mark.parametrize('kv_scheduler_case', [1])\n{TAKES}: pass",
        "kv_scheduler_case gets its values from @pytest.mark.kv_scheduler_matrix; do not parametrise it",
    ),
    "with caching of the engine": (
        f"{MATRIX}@pytest.mark.kvmock(engine={{'enable_prefix_caching': True}})\n{TAKES}: pass",
        ("kvmock(engine={'enable_prefix_caching': True}): each case of kv_scheduler_matrix sets enable_prefix_caching; "
        "leave it out"),
    ),
    "with chunks of the engine": (
        f"{MATRIX}@pytest.mark.kvmock(engine={{'enable_chunked_prefill': True}})\n{TAKES}: pass",
        ("kvmock(engine={'enable_chunked_prefill': True}): each case of kv_scheduler_matrix sets "
        "enable_chunked_prefill; "
        "leave it out"),
    ),
    "with caching of the profile": (
        f"{MATRIX}@pytest.mark.kvmock(prefix_caching=True)\n{TAKES}: pass",
        "kvmock(prefix_caching=True): each case of kv_scheduler_matrix sets prefix_caching; leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_invalid_matrix_is_one_collection_error(nested, name):
    source, message = ERRORS[name]

    result = nested(source)

    result.assert_outcomes(errors=1)
    assert [line for line in result.outlines if line.startswith("test_it.py::")] == [f"test_it.py::test: {message}"]
    result.stdout.no_fnmatch_line("*pytest_kvmock/plugin*")


CASE_ONLY = "kvmock: {} is for tests with @pytest.mark.kv_scheduler_matrix"


@pytest.mark.parametrize("fixture", ["kv_scheduler_case", "kv_scheduler_requests"])
def test_matrix_fixtures_without_the_marker_are_a_one_line_error(nested, fixture):
    result = nested(f"def test({fixture}): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([CASE_ONLY.format(fixture)])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


ON_TESTCASE = (
    "kvmock: this test has kv_scheduler_matrix and cannot be run over its cases: pytest does not parametrise methods "
    "of unittest.TestCase; write it as a function, or in a class of no base"
)


@pytest.mark.parametrize("fixture", ["kv_engine", "kv_harness", None])
def test_the_matrix_marker_on_a_testcase_is_a_one_line_error(nested, fixture):
    takes = f"@pytest.fixture(autouse=True)\n            def _kv(self, {fixture}): pass" if fixture else "pass"
    result = nested(
        f"""
        {MARK}
        @pytest.mark.kv_backends("lru")
        class T(unittest.TestCase):
            {takes}
            def test(self): pass
        """
    )

    result.assert_outcomes(**{"errors" if fixture else "failed": 1})
    result.stdout.fnmatch_lines([ON_TESTCASE])
    result.stdout.no_fnmatch_line("*pytest_kvmock/*:*")


def test_the_matrix_marker_on_a_skipped_testcase_has_no_effect(nested):
    result = nested(
        f"""
        {MARK}
        @pytest.mark.skip
        class T(unittest.TestCase):
            def test(self): pass
        """
    )

    result.assert_outcomes(skipped=1)


@pytest.mark.parametrize("fixture", ["kv_engine", "kv_harness", ""])
def test_a_matrix_marker_added_after_collection_is_a_one_line_error(nested, fixture):
    files = {
        "conftest.py": """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.kv_scheduler_matrix)
        """
    }

    result = nested(f"def test({fixture}): pass", "--kv-backend=lru", files=files)

    result.assert_outcomes(**{"errors" if fixture else "failed": 1})
    result.stdout.fnmatch_lines(
        ["kvmock: this test has kv_scheduler_matrix and cannot be run over its cases: *after collection"]
    )


def test_parametrizing_kv_scheduler_case_is_a_one_line_error(nested):
    generate = """
    def pytest_generate_tests(metafunc):
        metafunc.parametrize("kv_scheduler_case", [1])
    """

    result = nested(
        f"{MATRIX}{TAKES}: pass", "-k", "lru and shared-cached-whole and not multi_lru", files={"conftest.py": generate}
    )

    result.assert_outcomes(errors=1, deselected=23)
    result.stdout.fnmatch_lines(["kvmock: kv_scheduler_case gets its values from *; do not parametrise it"])


def test_the_marker_of_a_module_has_no_effect_on_a_test_that_needs_no_engine(nested):
    result = nested(
        """
        import pytest
        pytestmark = pytest.mark.kv_scheduler_matrix

        def test_plain(): pass
        def test_engine(kv_engine): pass
        """,
        "--kv-backend=lineage",
        "-q",
    )

    result.assert_outcomes(passed=1 + 8)
