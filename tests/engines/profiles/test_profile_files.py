"""Engine profiles in files: their contents, and the one error of each invalid file."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_kvmock import EngineProfile
from pytest_kvmock.engines import Tiers
from pytest_kvmock.engines.profiles import read_profiles
from pytest_kvmock.values.strict_yaml import YamlError


@pytest.fixture
def read(tmp_path):
    """Read files given as `read(a=text, b=text)`; the keywords are their names."""

    def from_files(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        return read_profiles([(tmp_path / name, name) for name in texts])

    return from_files


def test_a_profile_file_can_set_any_field(read):
    fields = {"block_size": 4, "num_blocks": 9, "workers": 0, "dp_size": 2, "prefix_caching": False, "seed": -1}
    fields["real_sizes"] = True
    for chunk, tiers, text in (
        (32, Tiers(64, 7.5, batch=4), "chunk: 32, tiers: {host: 64, gbps: 7.5, batch: 4}"),
        (None, Tiers(9), "chunk: null, tiers: {g2: 9}"),
        (None, None, "chunk: null, tiers: null"),
    ):
        lines = [f"{key}: {str(value).lower()}" for key, value in fields.items()]
        (small,) = read(a=f"profiles:\n  small: {{{', '.join(lines)}, {text}}}\n").values()

        assert {**fields, "chunk": chunk, "tiers": tiers} == small.fields
        assert EngineProfile(**fields, chunk=chunk, tiers=tiers) == small.in_place_of(EngineProfile(seed=7, workers=3))
        assert {field.name for field in dataclasses.fields(EngineProfile)} == set(small.fields)


def test_missing_fields_take_their_defaults_except_the_seed(read):
    small = read(a="profiles:\n  small: {num_blocks: 9}\n  plain: {}")["small"]

    assert small.fields == {"num_blocks": 9}
    assert EngineProfile(num_blocks=9, seed=7) == small.in_place_of(EngineProfile(block_size=4, workers=3, seed=7))


def test_a_profile_overrides_its_base_from_any_file(read):
    profiles = read(
        a="profiles:\n  fleet: {base: small, workers: 4, block_size: 8}\n  pair: {base: fleet, workers: 2}\n",
        b="profiles:\n  small:\n    description: for tests\n    block_size: 4\n    num_blocks: 9\n",
    )

    assert list(profiles) == ["fleet", "pair", "small"]
    assert profiles["pair"].fields == {"block_size": 8, "num_blocks": 9, "workers": 2}
    assert profiles["fleet"].fields == {"block_size": 8, "num_blocks": 9, "workers": 4}
    assert (profiles["pair"].description, profiles["small"].description) == ("", "for tests")
    assert profiles["small"].place == ("b", 2, 3)


WRONG = [
    pytest.param("", "a:1:1: the file is empty", id="empty"),
    pytest.param("profiles: [", "a:1:12: not YAML: *", id="not YAML"),
    pytest.param(
        "profile: {}",
        "a:1:1: unknown key 'profile'; did you mean 'profiles'? known: profiles",
        id="unknown key of the file",
    ),
    pytest.param("{}", "a:1:1: the key 'profiles' is missing", id="nothing"),
    pytest.param("profiles:", "a:1:10: profiles: got nothing; allowed: a mapping of names of your own", id="no names"),
    pytest.param("profiles: [a]", "a:1:11: profiles: got a list; allowed: a mapping of *", id="a list"),
    pytest.param("profiles: {s: 4}", "a:1:15: s: got 4; allowed: a mapping of keys base, description, block_size, *"),
    pytest.param(
        "profiles: {s: {blok_size: 4}}",
        "a:1:16: s: unknown key 'blok_size'; did you mean 'block_size'? known: base, *",
        id="unknown key",
    ),
    pytest.param("profiles: {s: {block_size: x}}", "a:1:28: block_size: got 'x'; allowed: an integer", id="a string"),
    pytest.param("profiles: {s: {block_size: 0}}", "a:1:28: block_size must be an integer of at least 1, got 0"),
    pytest.param("profiles: {s: {workers: 99999}}", "a:1:25: workers must be at most 65536, got 99999", id="too many"),
    pytest.param("profiles: {s: {dp_size: 1025}}", "a:1:25: dp_size must be at most 1024, got 1025", id="many ranks"),
    pytest.param(
        "profiles: {s: {workers: 65, dp_size: 1024}}",
        "a:1:12: s: workers times dp_size must be at most 65536, got 65 workers of 1024 ranks",
        id="many workers of many ranks",
    ),
    pytest.param("profiles: {s: {chunk: 0}}", "a:1:23: chunk must be *, got 0", id="chunk"),
    pytest.param("profiles: {s: {seed: null}}", "a:1:22: seed: got nothing; allowed: an integer", id="null"),
    pytest.param("profiles: {s: {prefix_caching: 1}}", "a:1:32: prefix_caching: got 1; allowed: true or false", id="1"),
    pytest.param("profiles: {s: {base: 1}}", "a:1:22: base: got 1; allowed: a string", id="base"),
    pytest.param("profiles: {s: {base: t}}", "a:1:22: base: unknown profile 't'; known: s", id="no such base"),
    pytest.param("profiles: {s: {base: s}}", "a:1:22: base: a profile cannot be based on itself: s -> s", id="itself"),
    pytest.param(
        "profiles:\n  s: {base: t}\n  t: {base: u}\n  u: {base: t}\n",
        "a:4:13: base: a profile cannot be based on itself: s -> t -> u -> t",
        id="a cycle",
    ),
    pytest.param("profiles: {s: {}, s: {}}", "a:1:19: the key 's' comes twice; first in line 1", id="a name twice"),
    pytest.param("profiles: {s: &s {}, t: *s}", "a:1:15: the anchor &s: anchors are not allowed", id="an anchor"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_an_invalid_file_is_reported_in_one_line_with_its_place(read, text, expected):
    with pytest.raises(YamlError) as caught:
        read(a=text)

    message = str(caught.value)
    start, star, _ = expected.partition("*")
    assert expected == message or (star and message.startswith(start)), message
    assert "\n" not in message


def test_a_profile_name_in_two_files_is_an_error_that_names_both_files(read):
    with pytest.raises(YamlError, match=r"^b:1:12: there is another profile 's' at a:2:3$"):
        read(a="profiles:\n  s: {}\n", b="profiles: {s: {}}")
