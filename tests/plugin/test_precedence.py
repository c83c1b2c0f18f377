"""The precedence of settings: three rules as tables, and in whole runs."""

from __future__ import annotations

import pytest

from pytest_kvmock import EngineProfile
from pytest_kvmock.engines.profiles import NamedProfile
from pytest_kvmock.plugin.precedence import (
    Policy,
    resolve_matrix,
    resolve_policy,
    resolve_profile,
    resolve_trace_tokens,
)
from pytest_kvmock.values.strict_yaml import Place

# ---------------------------------------------------------------------------------------------------- policy

POLICY = [
    # command line, markers from outer to inner, ini, expected
    pytest.param({}, [], {}, Policy(), id="default"),
    pytest.param({}, [], {"event_errors": "warn"}, Policy("warn"), id="ini over default"),
    pytest.param({}, [{"event_errors": "ignore"}], {"event_errors": "warn"}, Policy("ignore"), id="marker over ini"),
    pytest.param(
        {"event_errors": "fail"},
        [{"event_errors": "ignore"}],
        {"event_errors": "warn"},
        Policy("fail"),
        id="command line over marker, though it says the default",
    ),
    pytest.param(
        {}, [{"event_errors": "ignore"}, {"event_errors": "warn"}], {}, Policy("warn"), id="inner marker over outer"
    ),
    pytest.param(
        {},
        [{"event_errors": "warn"}, {"event_warnings": "fail"}],
        {"log": "all"},
        Policy("warn", "fail", log="all"),
        id="keys are merged",
    ),
    pytest.param(
        {"event_warnings": "fail"}, [{"event_errors": "warn"}], {}, Policy("warn", "fail"), id="and so with the others"
    ),
    pytest.param({}, [], {"log": "all"}, Policy(log="all"), id="log by ini"),
    pytest.param({"log": "none"}, [], {"log": "all"}, Policy(log="none"), id="log by command line"),
    pytest.param(
        {},
        [{"allow": ["index_drift"]}, {"allow": "block_not_found"}],
        {"allow": ("duplicate_store",)},
        Policy(allow=frozenset(["index_drift", "block_not_found", "duplicate_store"])),
        id="allow is united",
    ),
    pytest.param(
        {"event_errors": "fail"},
        [{"allow": ["index_drift"]}],
        {},
        Policy(allow=frozenset(["index_drift"])),
        id="allow stays beside the command line",
    ),
    pytest.param({}, [{"block_size": 4, "sync": "end", "seed": 1}], {}, Policy(), id="what is no policy is left out"),
]


@pytest.mark.parametrize(("command_line", "markers", "ini", "expected"), POLICY)
def test_the_policy_has_the_documented_precedence(command_line, markers, ini, expected):
    assert resolve_policy(command_line, markers, ini) == expected


TRACE_TOKENS = [
    # command line, markers from outer to inner, ini, expected
    pytest.param({}, [], {}, False, id="default"),
    pytest.param({}, [], {"trace_tokens": True}, True, id="ini over default"),
    pytest.param({}, [{"trace_tokens": False}], {"trace_tokens": True}, False, id="marker over ini"),
    pytest.param({}, [{"trace_tokens": True}, {"trace_tokens": False}], {}, False, id="inner marker over outer"),
    pytest.param({}, [{"trace_tokens": True}, {"block_size": 4}], {}, True, id="an inner marker without it"),
    pytest.param({"trace_tokens": True}, [{"trace_tokens": False}], {}, True, id="command line over marker"),
]


@pytest.mark.parametrize(("command_line", "markers", "ini", "expected"), TRACE_TOKENS)
def test_trace_tokens_has_the_documented_precedence(command_line, markers, ini, expected):
    assert expected is resolve_trace_tokens(command_line, markers, ini)


# ---------------------------------------------------------------------------------------------------- matrix

DEFAULT = ("a", "b", "c")
KNOWN = (*DEFAULT, "d")


def only(*names, **kwargs):
    return pytest.mark.kv_backends(*names, **kwargs).mark


MATRIX = [
    # command line, markers closest first, ini, expected
    pytest.param((), [], (), ["a", "b", "c"], id="default"),
    pytest.param((), [], ["d", "a"], ["a", "d"], id="ini over default, one that is not in it too"),
    pytest.param((), [only("d")], (), ["d"], id="a marker names one that is not in the default"),
    pytest.param(["d"], [], (), [], id="the command line does not add to the default"),
    pytest.param(["d"], [only("d", "a")], (), ["d"], id="nor keep what a marker names out"),
    pytest.param((), [], ["c", "a"], ["a", "c"], id="ini, in order of registration"),
    pytest.param((), [only("b")], ["c", "a"], ["b"], id="a marker's names replace ini"),
    pytest.param((), [only()], ["c", "a"], ["a", "c"], id="a marker without names leaves ini"),
    pytest.param((), [only(exclude=["a"])], ["c", "a"], ["c"], id="exclude is taken from ini"),
    pytest.param((), [only(exclude="a")], (), ["b", "c"], id="exclude is taken from the default"),
    pytest.param((), [only("a", "b", exclude=("a",))], (), ["b"], id="exclude is taken from the names"),
    pytest.param((), [only("c"), only("a")], (), ["c"], id="the closest marker counts"),
    pytest.param((), [only(exclude=["c"]), only("c")], (), ["a", "b"], id="and nothing of the others"),
    pytest.param(["b", "a"], [], (), ["a", "b"], id="command line"),
    pytest.param(["b"], [only("a", "b")], ["c"], ["b"], id="command line is intersected with the marker"),
    pytest.param(["b"], [], ["c", "b"], ["b"], id="command line is intersected with ini"),
    pytest.param(["c"], [only("a")], (), [], id="nothing may be left"),
    pytest.param((), [only(exclude=KNOWN)], (), [], id="nothing may be left by exclude"),
    pytest.param(KNOWN, [], ["b"], ["b"], id="all on the command line is no restriction"),
]


@pytest.mark.parametrize(("command_line", "markers", "ini", "expected"), MATRIX)
def test_the_matrix_has_the_documented_precedence(command_line, markers, ini, expected):
    command_line = {"backends": command_line} if command_line else {}
    ini = {"backends": ini} if ini else {}

    assert resolve_matrix(KNOWN, DEFAULT, command_line, markers, ini) == tuple(expected)


# ---------------------------------------------------------------------------------------------------- profile

BASE = EngineProfile(block_size=8, seed=1)

FLEET = NamedProfile("fleet", {"num_blocks": 32, "workers": 4}, "", Place("f.yaml", 2, 3))
SMALL = NamedProfile("small", {"block_size": 4, "num_blocks": 9, "seed": 5}, "", Place("f.yaml", 5, 3))

PROFILE = [
    # base, markers from outer to inner, command line, expected
    pytest.param(EngineProfile(), [], {}, EngineProfile(), id="default"),
    pytest.param(BASE, [], {}, BASE, id="base"),
    pytest.param(BASE, [{"block_size": 4}], {}, EngineProfile(block_size=4, seed=1), id="marker over base"),
    pytest.param(
        BASE,
        [{"block_size": 4, "workers": 2}, {"block_size": 2}],
        {},
        EngineProfile(block_size=2, workers=2, seed=1),
        id="inner marker over outer, key by key",
    ),
    pytest.param(BASE, [{"seed": 2}], {"seed": 3}, BASE.replace(seed=3), id="command line over marker"),
    pytest.param(BASE, [], {"seed": 0}, BASE.replace(seed=0), id="a zero counts as said"),
    pytest.param(BASE, [{"prefix_caching": False}], {}, BASE.replace(prefix_caching=False), id="False counts as said"),
    pytest.param(BASE.replace(chunk=32), [{"chunk": None}], {}, BASE, id="None counts as said"),
    pytest.param(
        BASE, [{"event_errors": "warn", "allow": (), "sync": "end"}], {"log": "all"}, BASE, id="the rest is left out"
    ),
    pytest.param(
        BASE.replace(dp_size=2),
        [{"profile": "fleet"}],
        {},
        EngineProfile(num_blocks=32, workers=4, seed=1),
        id="a named profile takes the place of the base, but for a seed that it does not say",
    ),
    pytest.param(
        BASE, [{"profile": "small"}], {}, EngineProfile(block_size=4, num_blocks=9, seed=5), id="its own seed"
    ),
    pytest.param(
        BASE,
        [{"profile": "fleet", "workers": 2}],
        {"seed": 7},
        EngineProfile(num_blocks=32, workers=2, seed=7),
        id="other keys, then the command line, over a named profile",
    ),
    pytest.param(
        BASE,
        [{"workers": 2, "num_blocks": 7}, {"profile": "fleet"}],
        {},
        EngineProfile(num_blocks=7, workers=2, seed=1),
        id="other keys of an outer marker over a named profile, too",
    ),
    pytest.param(
        BASE,
        [{"profile": "fleet"}, {"profile": "small", "num_blocks": 7}],
        {},
        EngineProfile(block_size=4, num_blocks=7, seed=5),
        id="the inner profile replaces the outer one",
    ),
    pytest.param(BASE, [{"profile": "fleet"}, {"profile": None}], {}, BASE, id="None brings the base back"),
    pytest.param(
        BASE,
        [{"engine": {"num_gpu_blocks": 9, "enable_prefix_caching": False}}],
        {},
        BASE.replace(num_blocks=9, prefix_caching=False),
        id="sizes of the engine over the base",
    ),
    pytest.param(
        BASE,
        [{"engine": {"num_gpu_blocks": 9, "dp_size": 2}}, {"engine": {"num_gpu_blocks": 7}}],
        {},
        BASE.replace(num_blocks=7, dp_size=2),
        id="the inner engine over the outer one, field by field",
    ),
    pytest.param(BASE, [{"engine": {"block_size": 8}}], {}, BASE, id="what the base says is no contradiction"),
    pytest.param(BASE, [{"engine": {"speedup_ratio": 2.0}}], {}, BASE, id="the rest of the engine is left out"),
    pytest.param(
        BASE,
        [{"profile": "fleet", "engine": {"block_size": 64}}],
        {},
        EngineProfile(block_size=64, num_blocks=32, workers=4, seed=1),
        id="the base does not count where a named profile is in its place",
    ),
]


@pytest.mark.parametrize(("base", "markers", "command_line", "expected"), PROFILE)
def test_the_profile_has_the_documented_precedence(base, markers, command_line, expected):
    assert resolve_profile(base, markers, command_line, {"fleet": FLEET, "small": SMALL}) == expected


def test_a_profile_with_invalid_fields_is_refused():
    with pytest.raises(ValueError, match="num_blocks"):
        resolve_profile(BASE, [{"num_blocks": 0}], {})


CONTRADICTIONS = [
    # base, markers from outer to inner, what is set
    pytest.param(BASE, [{"engine": {"block_size": 16}}], "block_size=8", id="a base that is not the default"),
    pytest.param(
        BASE, [{"num_blocks": 256, "engine": {"num_gpu_blocks": 9}}], "num_blocks=256", id="a key, as default"
    ),
    pytest.param(BASE, [{"engine": {"num_gpu_blocks": 9}}, {"num_blocks": 8}], "num_blocks=8", id="an inner key"),
    pytest.param(BASE, [{"profile": "small"}, {"engine": {"num_gpu_blocks": 8}}], "num_blocks=9", id="a named profile"),
    pytest.param(BASE, [{"chunk": 32, "engine": {"max_num_batched_tokens": 8}}], "chunk=32", id="a chunk"),
]


@pytest.mark.parametrize(("base", "markers", "given"), CONTRADICTIONS)
def test_an_engine_that_contradicts_the_profile_is_refused(base, markers, given):
    with pytest.raises(ValueError, match=f"contradicts {given} of the profile; set one of them, or both to the same"):
        resolve_profile(base, markers, {}, {"fleet": FLEET, "small": SMALL})


MATRIX_FIELDS = {"num_blocks": 500, "block_size": 64, "prefix_caching": False, "chunk": None}

OVER_THE_MATRIX = [
    # base, markers, expected
    pytest.param(
        BASE.replace(chunk=32, workers=3),
        [],
        EngineProfile(block_size=64, num_blocks=500, prefix_caching=False, workers=3, seed=1),
        id="it is laid over the base",
    ),
    pytest.param(
        BASE, [{"num_blocks": 9}], EngineProfile(64, 9, prefix_caching=False, seed=1), id="a key is laid over it"
    ),
    pytest.param(
        BASE,
        [{"engine": {"num_gpu_blocks": 9}}],
        EngineProfile(64, 9, prefix_caching=False, seed=1),
        id="so is a field of the engine",
    ),
    pytest.param(
        BASE,
        [{"profile": "small", "workers": 2}],
        EngineProfile(64, 500, workers=2, prefix_caching=False, seed=5),
        id="it is laid over a named profile",
    ),
]


@pytest.mark.parametrize(("base", "markers", "expected"), OVER_THE_MATRIX)
def test_a_case_of_the_scheduler_matrix_overrides_engine_fields_with_the_documented_precedence(base, markers, expected):
    assert resolve_profile(base, markers, {}, {"fleet": FLEET, "small": SMALL}, MATRIX_FIELDS) == expected


# ---------------------------------------------------------------------------------------------------- whole runs


def test_a_profile_is_laid_over_the_base_of_ini_or_override(nested):
    result = nested(
        """
        from pytest_kvmock import EngineProfile

        @pytest.mark.kvmock(num_blocks=8)
        class TestIni:
            @pytest.mark.kvmock(block_size=2)
            def test(self, kv_profile, kv_harness, kv_manager):
                assert kv_profile == EngineProfile(block_size=2, num_blocks=8, workers=3, seed=7)
                assert kv_profile == kv_harness.profile
                assert len(kv_harness.workers) == 3
                assert (kv_manager.block_size, kv_manager.num_blocks) == (2, 8)

        class TestOverride:
            @pytest.fixture
            def kv_base_profile(self): return EngineProfile(block_size=32, seed=5)

            @pytest.mark.kvmock(num_blocks=8)
            def test(self, kv_profile, kv_harness):
                assert kv_profile == EngineProfile(block_size=32, num_blocks=8, seed=7)
                assert kv_profile == kv_harness.profile

        class TestOverrideThatCallsTheOriginal:
            @pytest.fixture
            def kv_base_profile(self, kv_base_profile): return kv_base_profile.replace(num_blocks=9)

            def test(self, kv_profile): assert kv_profile == EngineProfile(block_size=4, num_blocks=9, workers=3, seed=7)
        """,  # noqa: E501
        "--kv-seed=7",
        files={"pytest.ini": "[pytest]\nkvmock_block_size = 4\nkvmock_workers = 3\nkvmock_seed = 6\n"},
    )

    result.assert_outcomes(passed=7)


def test_an_index_can_read_the_effective_block_size(nested):
    result = nested(
        """
        class Index:
            def __init__(self, block_size): self.block_size = block_size
            def apply(self, event): pass
            def find_matches(self, hashes): return {}

        @pytest.fixture
        def kv_index(kv_profile): return Index(kv_profile.block_size)

        @pytest.mark.kvmock(block_size=4)
        def test(kv_index, kv_harness):
            assert kv_index.block_size == 4
            assert kv_harness.index is kv_index
        """
    )

    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("ini", "marker", "args", "outcome"),
    [
        ("", "", [], "failed"),
        ("kvmock_event_errors = ignore", "", [], "passed"),
        ("kvmock_event_errors = ignore", "@pytest.mark.kvmock(event_errors='fail')", [], "failed"),
        ("", "@pytest.mark.kvmock(event_errors='fail')", ["--kv-event-errors=ignore"], "passed"),
        ("kvmock_allow = block_not_found", "@pytest.mark.kvmock(allow=['invalid_block'])", [], "passed"),
    ],
)
def test_a_policy_has_the_documented_precedence_in_a_whole_run(nested, ini, marker, args, outcome):
    result = nested(f"{marker}\ndef test(kv_sink): kv_sink(BAD)", *args, files={"pytest.ini": f"[pytest]\n{ini}\n"})

    result.assert_outcomes(**{outcome: 1})


def test_markers_added_after_collection_count_at_setup(nested):
    result = nested(
        "def test(kv_profile): assert kv_profile.num_blocks == 8",
        files={
            "conftest.py": """
            import pytest
            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.kvmock(num_blocks=8))
            """
        },
    )

    result.assert_outcomes(passed=1)


def test_a_marker_of_a_parameter_counts_for_its_test(nested):
    result = nested(
        """
        @pytest.mark.kvmock(num_blocks=4, workers=2)
        @pytest.mark.parametrize("expected", [
            4, pytest.param(8, marks=pytest.mark.kvmock(num_blocks=8), id="marked")
        ])
        def test(kv_profile, expected): assert (kv_profile.num_blocks, kv_profile.workers) == (expected, 2)
        """
    )

    result.assert_outcomes(passed=2)


def test_markers_of_a_parameter_are_the_innermost_ones(nested):
    result = nested(
        """
        @pytest.mark.kvmock(num_blocks=4, workers=3)
        @pytest.mark.parametrize("n", [
            pytest.param(1, marks=[pytest.mark.kvmock(num_blocks=8), pytest.mark.kvmock(workers=2)])
        ])
        def test(kv_profile, n): assert (kv_profile.num_blocks, kv_profile.workers) == (8, 2)
        """
    )

    result.assert_outcomes(passed=1)


def test_random_values_depend_only_on_seed_and_test(nested):
    source = """
    def test_a(kv_prompt): print("drew", kv_prompt().tokens[:3])
    def test_b(kv_prompt): print("drew", kv_prompt().tokens[:3])
    """

    def drawn(*args, **options):
        return sorted(
            line.partition("drew")[2] for line in nested(source, "-s", *args, **options).outlines if "drew" in line
        )

    both = drawn()
    assert len(set(both)) == 2
    assert both == drawn()
    assert both == drawn("--kv-seed=0")
    assert not set(both) & set(drawn("--kv-seed=1"))
    assert set(drawn("-k", "test_b")) < set(both)
