"""The page of results: it is made from the records and shows only ratios; and the answers of `--quick` about them."""

# ruff: noqa: RUF001 - the times sign

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME = ROOT / "benchmarks"
ROWS = json.loads((HOME / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def row(name, ratio, *, bar=None, why="", variant="", most=False):
    from dataclasses import asdict

    from benchmarks.measure import Figure

    figure = Figure(name, ratio, bar, "a peer", variant, most=most, why=why)
    return asdict(figure) | {"command": "python -m benchmarks group", "place": "2026-01-02, Python 3.11.7"}


def line(*rows):
    from benchmarks.page import document

    return next(text for text in document(rows).splitlines() if text.startswith("| a figure"))


def test_page_and_plot_agree_with_the_records():
    from benchmarks.page import document, plot

    assert document(ROWS.values()) == (HOME / "RESULTS.md").read_text(encoding="utf-8")
    assert plot(ROWS.values()) == (HOME / "scaling.svg").read_text(encoding="utf-8")


def test_the_page_has_no_absolute_times():
    page = (HOME / "RESULTS.md").read_text(encoding="utf-8")
    assert re.findall(r"\d (?:[mµn]?s|k/s|M/s|minutes?|seconds?)\b", page) == []


def test_a_figure_that_misses_its_bar_has_a_reason():
    from benchmarks.measure import Figure

    names = set(Figure.__dataclass_fields__)
    figures = [Figure(**{key: value for key, value in row.items() if key in names}) for row in ROWS.values()]
    assert [figure.key for figure in figures if figure.missed and not figure.why] == []


def test_a_run_compared_with_a_peer_shows_the_users_code():
    groups = ("python -m benchmarks engines", "python -m benchmarks fleet")
    beside = [each for each in ROWS.values() if each["command"] in groups and "run_mocker_trace_replay" in each["peer"]]
    assert beside
    assert all(each.get("lines") for each in beside)
    assert line(row("a figure", 2) | {"lines": "a = 1\nb(a)"}).startswith("| a figure:<br>`a = 1`<br>`b(a)` | 2 × |")


def test_variants_share_a_row():
    rows = [row("a figure", 2, bar=1.5, variant="lru"), row("a figure", 0.5, bar=1.5, variant="vllm", why="a reason")]
    assert line(*rows) == (
        "| a figure | lru: 2 ×; vllm: 0.5 × | 1.5 ×; missed by vllm: a reason | a peer | `group` | 2026-01-02 |"
    )


def test_a_bar_may_be_a_maximum():
    assert "| 1.4 × | at most 1.5 × |" in line(row("a figure", 1.4, bar=1.5, most=True))
    assert "missed: a reason" in line(row("a figure", 1.6, bar=1.5, most=True, why="a reason"))


def test_the_plot_has_one_point_per_size():
    from benchmarks.page import cost_name, plot

    rows = [row(cost_name("workers"), cost, variant=size) for size, cost in (("1", 1.0), ("1,024", 3.0))]
    drawn = plot(rows)
    assert drawn.count("<circle") == 2
    assert "1 k</text>" in drawn
    assert "cost a block, workers" in drawn


def test_quick_names_rows_that_fell_and_rows_without_a_record():
    pytest.importorskip("pytest_kvmock.contrib.block_manager", reason="one figure is that of a folder of contrib")
    from benchmarks.quick import FIGURES, falls

    assert falls(ROWS, lambda run: 1e9) == []
    fallen = falls({}, lambda run: 1e9)
    assert len(FIGURES) == len(fallen)
    assert all("nothing is recorded" in text for text in fallen)
    assert len(FIGURES) == len(falls(ROWS, lambda run: 1e-9))
