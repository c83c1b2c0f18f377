"""Which mutants a line has, and which code is left alone."""

import ast
from textwrap import dedent, indent

import pytest
from mutate import ids_in
from operators import mutants


def changed(body, returns="object"):
    """Return the operator and the changed line of each mutant of a function's body."""
    source = f"def f(a, b, c) -> {returns}:\n" + indent(dedent(body), "    ")
    found = mutants("m.py", source)
    for mutant in found:
        ast.parse(mutant.apply(source))
    return [(mutant.operator, mutant.new) for mutant in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a <= b:\n    g()", [("negation", "if not (a <= b):"), ("comparison", "if a < b:"), ("removal", "pass")]),
        ("if a is not b:\n    pass", [("comparison", "if a is b:")]),
        ("if a not in b:\n    pass", [("comparison", "if a in b:")]),
        ("if not a:\n    pass", [("not", "if (a):")]),
        ("x = a and b or c", [("and-or", "x = a or b or c"), ("and-or", "x = a and b and c")]),
        ("x = a + 2", [("arithmetic", "x = a - 2"), ("constant", "x = a + 1"), ("constant", "x = a + 3")]),
        ("x = g(a, every=True)", [("constant", "x = g(a, every=False)")]),
        ("x = a[1:]", [("constant", "x = a[2:]")]),
        ("a.b = c", [("removal", "pass")]),
        ("a += b", [("removal", "pass")]),
        ("x = any(a)", [("name", "x = all(a)")]),
        ("for x in a:\n    break", [("loop", "continue")]),
        ("x = [y for y in a if y]", [("negation", "x = [y for y in a if not (y)]")]),
    ],
)
def test_each_place_of_a_line_has_its_mutants(line, expected):
    assert sorted(changed(line)) == sorted(expected)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ("bool", "return not (a)"),
        ("list[int]", "return []"),
        ("str", 'return ""'),
        ("int | None", "return None"),
    ],
)
def test_a_return_is_mutated_to_none_or_the_opposite(returns, expected):
    assert changed("return a", returns) == [("return", expected)]


@pytest.mark.parametrize(
    "body",
    [
        '"""Text."""',
        "x: int | None",
        "assert a == b",
        "__tracebackhide__ = True",
        'x = f"{a} of {b + 1}"',
        "if TYPE_CHECKING:\n    x = 1",
        "x = a",
        "raise a  # pragma: no cover",
    ],
)
def test_equivalent_mutants_are_left_out(body):
    assert changed(body) == []


def test_a_default_runs_with_its_function_definition():
    (mutant,) = mutants("m.py", "def f(a=False):\n    g = a\n    return\n")
    assert ("default", "def f(a=True):", range(2, 4)) == (mutant.operator, mutant.new, mutant.lines)


def test_a_constant_of_a_module_runs_at_import():
    assert [range(0)] == [mutant.lines for mutant in mutants("m.py", "MOST = 1\n")]


def test_columns_are_counted_in_characters_and_not_in_bytes():
    assert changed('x = "ä" == a') == [("comparison", 'x = "ä" != a')]


def test_ids_in_reads_only_the_test_ids_that_pytest_prints():
    text = "tests/a/test_b.py::test_c[x y]\ntests/a.kv.yaml::case\n\nSKIPPED [1] tests/a.py:3: why\n2 tests collected in 1s\n"  # noqa: E501
    assert ids_in(text) == {"tests/a/test_b.py::test_c[x y]", "tests/a.kv.yaml::case"}
