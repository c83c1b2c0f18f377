"""The strict YAML reader: the value of each element, and the one error of each unsupported document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock.values.strict_yaml import (
    DEEPEST,
    Place,
    YamlError,
    boolean,
    integer,
    list_of,
    nullable,
    number,
    parse_yaml,
    plain,
    read_yaml,
    string,
)

SCALARS = [
    ("x", "x"),
    ("'1'", "1"),
    ('"\\u0041"', "A"),
    ("1", 1),
    ("-3", -3),
    ("+3", 3),
    ("0", 0),
    ("1_000", 1000),
    ("0x1f", 31),
    ("1.5", 1.5),
    (".5", 0.5),
    ("1e3", 1000.0),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    # YAML 1.1 reads each of these as another type, which authors rarely mean.
    ("yes", "yes"),
    ("no", "no"),
    ("on", "on"),
    ("010", "010"),
    ("1:30", "1:30"),
    ("2024-01-01", "2024-01-01"),
    ("0..15", "0..15"),
    ("1__0", "1__0"),
    ("9" * 5000, "9" * 5000),
]


@pytest.mark.parametrize(("text", "expected"), SCALARS, ids=[text[:12] for text, _ in SCALARS])
def test_a_yaml_scalar_has_the_expected_value_and_type(text, expected):
    value = parse_yaml(f"key: {text}", "f").fields({"key": plain})["key"]

    assert value == expected
    assert type(expected) is type(value)


def test_a_yaml_document_becomes_plain_values():
    text = "a: {b: [1, two, {c: null}]}\nd:\n  - - 3\n  -\n'<<': x\n"

    assert plain(parse_yaml(text, "f")) == {"a": {"b": [1, "two", {"c": None}]}, "d": [[3], None], "<<": "x"}


def test_every_value_and_key_has_its_place_in_the_file():
    root = parse_yaml("# a comment\na: 1\nb:\n  - x\n  - {c: 2}\n", "dir/f.yaml")

    assert Place("dir/f.yaml", 2, 1) == root.place == root.keys["a"]
    assert root.value["a"].place[1:] == (2, 4)
    assert root.keys["b"][1:] == (3, 1)
    assert root.value["b"].value[0].place[1:] == (4, 5)
    assert root.value["b"].value[1].value["c"].place[1:] == (5, 9)
    assert str(root.value["b"].value[1].value["c"].error("odd")) == "dir/f.yaml:5:9: c: odd"
    assert str(root.value["b"].value[1].key_error("c", "odd")) == "dir/f.yaml:5:6: b: odd"


# ---------------------------------------------------------------------------------------------------- odd documents

BOMB = "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"

ODD = [
    pytest.param("", "f:1:1: the file is empty", id="empty"),
    pytest.param("# only a comment\n", "f:1:1: the file is empty", id="comment only"),
    pytest.param("---\n...\n", "f:*: the file is empty", id="an empty document"),
    pytest.param("a: [1, 2\n", "f:2:1: not YAML: *expected ',' or ']'*", id="not closed"),
    pytest.param("a: b: c\n", "f:1:5: not YAML: mapping values are not allowed here", id="two colons"),
    pytest.param("a:\n\t- 1\n", "f:2:1: not YAML: *'\\t'*", id="a tab"),
    pytest.param("a: 1\n b: 2\n", "f:2:3: not YAML: *", id="indentation"),
    pytest.param("a: '", "f:1:5: not YAML: *end of stream", id="an open quote"),
    pytest.param("a: \x07", "f:1:4: not YAML: the character U+0007 is not allowed", id="a control character"),
    pytest.param('ab: "\\UFFFFFFFF"', "f:1:*: not YAML: an escape that stands for no character", id="an escape"),
    pytest.param("a: 1\nb: 2\na: 3\n", "f:3:1: the key 'a' comes twice; first in line 1", id="a key twice"),
    pytest.param("a: {b: 1, 'b': 2}", "f:1:11: the key 'b' comes twice; first in line 1", id="a key twice inside"),
    pytest.param(
        "1.5: a", "f:1:1: got 1.5; allowed: keys that are strings or integers; put it in quotes", id="a float as key"
    ),
    pytest.param("1: a\n'1': b", "f:2:1: the key '1' comes twice; first in line 1", id="an integer and its text"),
    pytest.param("true: a", "f:1:1: got True; allowed: keys that are *", id="a bool as key"),
    pytest.param("?\n: a", "f:1:2: got nothing; allowed: keys that are *", id="nothing as key"),
    pytest.param("? [a]\n: b", "f:1:3: got a list; allowed: keys that are *", id="a list as key"),
    pytest.param(BOMB, "f:1:4: the anchor &a: anchors are not allowed", id="an anchor bomb"),
    pytest.param("a: *b", "f:1:4: the alias *b: aliases are not allowed; write it out", id="an alias of nothing"),
    pytest.param("&a a: 1", "f:1:1: the anchor &a: *", id="an anchor of a key"),
    pytest.param(
        "a: !!python/object/apply:os.getcwd []", "f:1:4: the tag 'tag:yaml.org,2002:python/*", id="python tag"
    ),
    pytest.param("a: !!str 1", "f:1:4: the tag 'tag:yaml.org,2002:str': tags are not allowed", id="a plain tag"),
    pytest.param("!x {a: 1}", "f:1:1: the tag '!x': *", id="a tag of the document"),
    pytest.param("a: {b: 1}\nc:\n  <<: {b: 2}\n", "f:3:3: the merge key <<: merge keys are not allowed", id="merge"),
    pytest.param("a: 1\n---\nb: 2\n", "f:2:1: a second document begins; only one is allowed", id="two documents"),
    pytest.param("[" * 100_000, f"f:1:{DEEPEST + 2}: nested deeper than {DEEPEST} levels", id="deep"),
]


def matches(expected, message):
    return re.fullmatch(".*".join(map(re.escape, expected.split("*"))), message) if "*" in expected else None


@pytest.mark.parametrize(("text", "expected"), ODD)
def test_an_unsupported_document_is_refused_in_one_line_with_its_place(text, expected):
    with pytest.raises(YamlError) as caught:
        parse_yaml(text, "f")

    message = str(caught.value)
    assert expected == message or matches(expected, message), message
    assert "\n" not in message
    assert caught.value.place is not None


def test_the_deepest_allowed_document_is_read():
    assert repr(plain(parse_yaml("[" * DEEPEST + "1" + "]" * DEEPEST, "f"))) == "[" * DEEPEST + "1" + "]" * DEEPEST


@given(st.text(max_size=60) | st.text(alphabet="{}[]:,-?!&*#|>'\"%@ \n\tab0.<~", max_size=40))
def test_any_text_is_read_or_refused_with_a_one_line_error(text):
    message = ""
    try:
        plain(parse_yaml(text, "f"))
    except YamlError as error:
        message = str(error)

    assert "\n" not in message
    assert not message or message.startswith("f:")


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co", "Cs", "Zl", "Zp"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=10,
)


@given(VALUES.filter(lambda value: value is not None))
def test_json_is_read_as_its_value(value):
    assert value == plain(parse_yaml(json.dumps(value, ensure_ascii=False), "f"))


# ---------------------------------------------------------------------------------------------------- readers

READERS = {
    "name": string,
    "size": integer,
    "rate": number,
    "on": boolean,
    "chunk": nullable(integer),
    "names": list_of(string),
}


def test_only_given_fields_are_read_in_the_order_of_the_document():
    root = parse_yaml("{chunk: null, name: x, size: 0, on: false, rate: 2, names: [a, b]}", "f")

    expected = [("chunk", None), ("name", "x"), ("size", 0), ("on", False), ("rate", 2), ("names", ["a", "b"])]
    assert list(root.fields(READERS).items()) == expected
    assert parse_yaml("{}", "f").fields(READERS) == {}


WRONG = [
    ("{size: x}", "f:1:8: size: got 'x'; allowed: an integer"),
    ("{size: true}", "f:1:8: size: got True; allowed: an integer"),
    ("{size: 1.0}", "f:1:8: size: got 1.0; allowed: an integer"),
    ("{size: }", "f:1:7: size: got nothing; allowed: an integer"),
    ("{size: [1]}", "f:1:8: size: got a list; allowed: an integer"),
    ("{name: 1}", "f:1:8: name: got 1; allowed: a string"),
    ("{rate: {}}", "f:1:8: rate: got a mapping; allowed: a number"),
    ("{rate: true}", "f:1:8: rate: got True; allowed: a number"),
    ("{on: yes}", "f:1:6: on: got 'yes'; allowed: true or false"),
    ("{chunk: x}", "f:1:9: chunk: got 'x'; allowed: an integer"),
    ("{names: a}", "f:1:9: names: got 'a'; allowed: a list"),
    ("{names: [a, 1]}", "f:1:13: names: got 1; allowed: a string"),
    ("{nam: a}", "f:1:2: unknown key 'nam'; did you mean 'name' or 'names'? known: name, size, rate, on, chunk, names"),
    ("[name]", "f:1:1: got a list; allowed: a mapping of keys name, size, rate, on, chunk, names"),
    ("name", "f:1:1: got 'name'; allowed: a mapping of keys name, *"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_an_invalid_value_is_refused_in_one_line_with_its_place(text, expected):
    with pytest.raises(YamlError) as caught:
        parse_yaml(text, "f").fields(READERS)

    assert str(caught.value) == expected or matches(expected, str(caught.value)), str(caught.value)


def test_a_missing_key_is_named():
    with pytest.raises(YamlError, match=re.escape("f:2:4: b: the key 'size' is missing")):
        parse_yaml("\nb: {name: x}", "f").fields({"b": lambda node: node.fields(READERS, required=("name", "size"))})


def test_entries_accept_any_names():
    assert parse_yaml("a: 1\nb: 2", "f").entries(integer) == {"a": 1, "b": 2}
    with pytest.raises(YamlError, match=re.escape("f:1:1: got a list; allowed: a mapping of names of your own")):
        parse_yaml("[1]", "f").entries(integer)


def test_a_value_error_of_a_reader_gets_the_place_of_its_value():
    def positive(node):
        if integer(node) < 1:
            raise ValueError("less than 1")

    with pytest.raises(YamlError, match=re.escape("f:1:5: a: less than 1")):
        parse_yaml("{a: 0}", "f").fields({"a": positive})
    with pytest.raises(YamlError, match=re.escape("f:1:5: a: got 'x'; allowed: an integer")):
        parse_yaml("{a: x}", "f").fields({"a": positive})


# ---------------------------------------------------------------------------------------------------- files


def test_a_file_is_read_as_utf_8_under_the_given_name(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes("\ufeffa: ä".encode())

    assert plain(read_yaml(path)) == {"a": "ä"}
    assert read_yaml(path, "shown").place.file == "shown"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a: 1\nb: \xff", "f:2:4: not UTF-8: byte 0xff"),
        ("a: 1".encode("utf-16"), "f:1:1: not UTF-8: byte 0xff"),
        (None, "f: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, data, expected):
    path = Path(tmp_path, "f")
    if data is not None:
        path.write_bytes(data)

    with pytest.raises(YamlError) as caught:
        read_yaml(path, "f")

    assert str(caught.value) == expected


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(YamlError, match=r"^f: \S"):
        read_yaml(tmp_path, "f")
