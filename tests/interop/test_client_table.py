"""The table of Dynamo's clients has every dialect that is spoken over ZMQ, and the page on fidelity has the table."""

from pathlib import Path

from client_table import TABLE, markdown

from pytest_kvmock.wire import DIALECTS


def test_every_dialect_of_zmq_is_in_the_table():
    assert [name for name, dialect in DIALECTS.items() if dialect.replay] == [*TABLE]


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs/fidelity.md"
    assert markdown() in page.read_text(encoding="utf-8")
