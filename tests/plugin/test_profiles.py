"""Named engine profiles in a run: their files, their use, and wrong ones."""

from __future__ import annotations

import pytest
from depth import takes_long

PROFILES = """\
profiles:
  small:
    description: evicts soon
    block_size: 4
    num_blocks: 9
  small-fleet:
    base: small
    workers: 4
"""


@pytest.fixture
def run(nested):
    """Run with profiles: `run(source, *args, ini="", profiles=PROFILES)`."""

    def with_profiles(source, *args, ini="", profiles=PROFILES, files=None, **options):
        ini = f"[pytest]\nkvmock_profiles = profiles.yaml\n{ini}\n"
        return nested(source, *args, files={"pytest.ini": ini, "profiles.yaml": profiles, **(files or {})}, **options)

    return with_profiles


def test_a_marker_can_name_a_profile(run):
    result = run(
        """
        from pytest_kvmock import EngineProfile

        @pytest.mark.kvmock(profile="small-fleet")
        class Test:
            @pytest.mark.kv_backends("lru")
            def test(self, kv_profile, kv_harness, kv_manager):
                assert kv_profile == kv_harness.profile == EngineProfile(block_size=4, num_blocks=9, workers=4)
                assert len(kv_harness.workers) == 4
                assert (kv_manager.block_size, kv_manager.num_blocks) == (4, 9)

            @pytest.mark.kvmock(profile="small", num_blocks=7)
            def test_inner(self, kv_profile):
                assert kv_profile == EngineProfile(block_size=4, num_blocks=7)

            @pytest.mark.kvmock(profile=None)
            def test_none(self, kv_profile): assert kv_profile == EngineProfile()

        @pytest.mark.kvmock(profile="small-fleet")
        class TestOverride:
            @pytest.fixture
            def kv_base_profile(self): return EngineProfile(dp_size=3, seed=5)

            def test(self, kv_profile):
                assert kv_profile == EngineProfile(block_size=4, num_blocks=9, workers=4, seed=5)

        class TestCase(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _profile(self, kv_profile): self.profile = kv_profile

            @pytest.mark.kvmock(profile="small")
            def test(self): assert self.profile == EngineProfile(block_size=4, num_blocks=9)
        """
    )

    result.assert_outcomes(passed=5)


@pytest.mark.parametrize(
    ("ini", "args", "expected"),
    [
        ("", [], "EngineProfile()"),
        ("kvmock_profile = small", [], "EngineProfile(block_size=4, num_blocks=9)"),
        ("kvmock_profile = small\nkvmock_block_size = 8", [], "EngineProfile(block_size=8, num_blocks=9)"),
        (
            "kvmock_profile = small\nkvmock_seed = 8",
            ["--kv-seed=7"],
            "EngineProfile(block_size=4, num_blocks=9, seed=7)",
        ),
        ("", ["-o", "kvmock_profile=small"], "EngineProfile(block_size=4, num_blocks=9)"),
    ],
)
def test_the_ini_file_names_the_default_profile(run, ini, args, expected):
    result = run(
        f"from pytest_kvmock import EngineProfile\ndef test(kv_profile): assert kv_profile == {expected}",
        *args,
        ini=ini,
    )

    result.assert_outcomes(passed=1)


def test_profile_files_are_found_relative_to_the_ini_file_and_by_globs(nested, pytester, monkeypatch):
    source = "@pytest.mark.kvmock(profile='b')\ndef test(kv_profile): assert kv_profile.workers == 2"
    files = {
        "conf/pytest.ini": "[pytest]\nkvmock_profiles = more/**/*.yaml a.yaml a.yaml\n",
        "conf/a.yaml": "profiles: {a: {workers: 2}}",
        "conf/more/deep/b.yaml": "profiles: {b: {base: a}}",
    }

    nested(source, "-c", "conf/pytest.ini", files=files).assert_outcomes(passed=1)
    monkeypatch.chdir(pytester.path / "conf")
    nested("", "-c", "pytest.ini", "../test_it.py").assert_outcomes(passed=1)


def test_profiles_work_under_xdist(run):
    result = run(
        "@pytest.mark.kvmock(profile='small')\ndef test(kv_profile): assert kv_profile.num_blocks == 9",
        "-n",
        "1",
        plugins=["xdist"],
    )

    result.assert_outcomes(passed=1)


# ---------------------------------------------------------------------------------------------------- wrong ones


@pytest.mark.parametrize(
    "args", [[], ["--kv-list-profiles"], pytest.param(["-n", "1"], marks=takes_long)], ids=["run", "list", "xdist"]
)
def test_a_wrong_profile_file_is_a_usage_error_in_one_line(run, args):
    text = "profiles: {s: {workers: x}}"  # tests/engines/profiles has all that may be wrong in a file
    result = run("def test(): pass", *args, profiles=text, plugins=["xdist"] if "-n" in args else ())

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.errlines if line]
    assert len(lines) == 1
    result.stderr.fnmatch_lines(["ERROR: profiles.yaml:1:25: workers: got 'x'; allowed: an integer"])


def test_an_unknown_profile_is_refused_in_one_line_with_the_known_ones(run):
    result = run("@pytest.mark.kvmock(profile='smal')\ndef test(kv_sink): pass\ndef test_other(): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            (
                "test_it.py::test: kvmock(profile='smal'): *'smal'; did you mean 'small'? known: small "
                "(profiles.yaml), small-fleet (profiles.yaml)"
            )
        ]
    )


def test_an_unknown_default_profile_is_a_usage_error(run):
    result = run("def test(): pass", ini="kvmock_profile = smal")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: pytest.ini: kvmock_profile: unknown profile 'smal'; did you mean 'small'? known: small (*), *"]
    )


def test_a_block_size_that_a_backend_refuses_names_the_profile(run):
    result = run(
        "@pytest.mark.kv_backends('lru')\n@pytest.mark.kvmock(profile='odd')\ndef test(kv_harness): pass",
        profiles="profiles: {odd: {block_size: 24}}",
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvmock: backend lru: block_size must be *, got 24 (kvmock(profile='odd'))"])


# ---------------------------------------------------------------------------------------------------- the rest


def test_kv_list_profiles_lists_all_profiles(run):
    result = run("def test(): raise OSError", "--kv-list-profiles", ini="kvmock_profile = small-fleet")

    assert result.ret == 0
    assert result.outlines == [
        "small        block_size=4, num_blocks=9  profiles.yaml:2  evicts soon",
        "small-fleet  block_size=4, num_blocks=9, workers=4  profiles.yaml:6  (the default)",
    ]


def test_without_profiles_the_list_says_how_to_have_some(nested):
    result = nested("", "--kv-list-profiles")

    assert result.outlines == ["no profiles: ini kvmock_profiles names their files"]


def test_yaml_is_imported_only_if_a_profile_file_is_named(nested, run):
    check = "def test(kv_profile): assert ('yaml' in sys.modules) is {}"

    nested(check.format(False), subprocess=True).assert_outcomes(passed=1)
    run(check.format(True), subprocess=True).assert_outcomes(passed=1)
