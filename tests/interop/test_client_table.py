"""The tables of Dynamo's and llm-d's clients have every dialect of ZMQ, and the page on fidelity has the tables."""

from pathlib import Path

import client_table
import llmd_table
import pytest

from pytest_kvmock.wire import DIALECTS

TABLES = [client_table, llmd_table]


@pytest.mark.parametrize("table", TABLES)
def test_every_zmq_dialect_is_in_the_table(table):
    read = "trtllm-1.3-zmq"  # only its source was read: no client was run against it
    assert [name for name, dialect in DIALECTS.items() if dialect.replay and name != read] == [*table.TABLE]


@pytest.mark.parametrize("table", TABLES)
def test_the_fidelity_page_has_the_table(table):
    page = Path(__file__).parents[2] / "docs/fidelity.md"
    assert table.markdown() in page.read_text(encoding="utf-8")
