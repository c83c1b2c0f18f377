"""The pages on served engines list exactly the existing paths, faults, options and parameters."""

import re
from pathlib import Path

from pytest_kvmock.__main__ import parser as kvmock_parser
from pytest_kvmock.servers.serve import control
from pytest_kvmock.servers.serve.controls import known_faults

DOCS = Path(__file__).parents[3] / "docs"


def rows_of(page, column, text):
    """Return the first cells of those table rows of a page that have a text in a column."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return [row for row in rows if len(row) > column and text in row[column]]


def test_each_path_of_the_control_api_has_a_row_in_the_reference():
    listed = [path for row in rows_of("reference/serve.md", 0, "`/") for path in re.findall(r"`/(\w+)`", row[0])]
    assert sorted(listed) == sorted((*control._METHODS, *control._WAITS))
    reads = [path for row in rows_of("reference/serve.md", 0, "GET `/") for path in re.findall(r"`/(\w+)`", row[0])]
    assert sorted(reads) == sorted(control._READS)


def test_each_fault_is_named_in_the_reference():
    ((_, arguments, _),) = rows_of("reference/serve.md", 0, "`/fault`")
    assert set(known_faults()) <= set(re.findall(r"`(\w+)`", arguments))


def test_each_option_of_the_serve_command_has_a_row_in_the_reference():
    commands = next(each for each in kvmock_parser()._actions if each.choices and "serve" in each.choices)
    options = {each.option_strings[-1] for each in commands.choices["serve"]._actions} - {"--help", "--plugin"}
    listed = [
        name for row in rows_of("reference/command.md", 1, "`serve`") for name in re.findall(r"`(--[\w-]+)", row[0])
    ]
    assert sorted(listed) == sorted(options)
