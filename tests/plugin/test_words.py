"""How many words the pages have, and how many of them say little. Each number may only fall: who needs more words says
in the same commit what fell instead. `docs/style.md` has the words to use.
"""

import re

import pytest
from pages import PAGES, ROOT

MOST_WORDS = 26_000
"""Of prose and code in README and `docs/`, without the pages of facts and those made from code."""

MOST_OF_A_HOW_TO = 1_800
"""With its tables: a page that somebody reads to do one thing."""

MOST_TICS = {"pages": 0, "package": 5}

FACTS = ("docs/fidelity.md", "docs/reference/engines.md", "docs/reference/names.md")
"""Evidence, and what users search by."""

MADE = ("docs/reference/api/", "docs/reference/what-is-mimicked.md")
"""Pages made from docstrings, or by asking the code."""

TIC = re.compile(r"\b(?:so many|beside|nobody|anew|likewise)\b", re.IGNORECASE)


def counted(name):
    return name == "README.md" or (name.startswith("docs/") and not name.startswith(MADE) and name not in FACTS)


def tics_of_pages():
    """The tics of each page, without its code, and without the page that says how not to write."""
    texts = {name: page.text for name, page in PAGES.items() if name != "docs/style.md"}
    texts["SECURITY.md"] = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return {name: found for name, text in texts.items() if (found := TIC.findall(re.sub(r"`[^`]*`", "", text)))}


def tics_of_the_package():
    paths = sorted((ROOT / "pytest_kvmock").rglob("*.py"))
    return {path.name: found for path in paths if (found := TIC.findall(path.read_text(encoding="utf-8")))}


def test_prose_and_code_by_hand_have_no_more_words():
    words = {name: len(page.by_hand.split()) for name, page in PAGES.items() if counted(name)}
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words: shorten a page, {words}"


@pytest.mark.parametrize("page", [page for name, page in PAGES.items() if name.startswith("docs/how-to/")], ids=repr)
def test_a_how_to_page_is_read_at_once(page):
    assert len(page.text.split()) <= MOST_OF_A_HOW_TO


@pytest.mark.parametrize(("where", "tics"), [("pages", tics_of_pages), ("package", tics_of_the_package)])
def test_words_that_say_little_get_fewer(where, tics):
    found = tics()
    assert sum(map(len, found.values())) <= MOST_TICS[where], found


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so many blocks, Beside it", 2), ("besides", 0), ("anew likewise nobody", 3), ("so much, many", 0)],
)
def test_a_tic_is_a_whole_word(text, expected):
    assert len(TIC.findall(text)) == expected
