"""The number of words on the pages, and of words that say little. Each number may only fall: if you need more words,
name in the same commit what fell instead. `docs/style.md` has the words to use.
"""

import re

import pytest
from pages import PAGES, ROOT

MOST_WORDS = 26_000
"""Limit for prose and code in README and `docs/`, without the pages of facts and those generated from code."""

MOST_OF_A_HOW_TO = 1_800
"""Limit with tables, for a page that is read to do one thing."""

MOST_TICS = {"pages": 0, "package": 5}

FACTS = ("docs/fidelity.md", "docs/reference/engines.md", "docs/reference/names.md")
"""Pages of evidence, and of terms that users search for."""

MADE = ("docs/reference/api/", "docs/reference/what-is-mimicked.md")
"""Pages generated from docstrings, or by running the code."""

TIC = re.compile(r"\b(?:so many|beside|nobody|anew|likewise)\b", re.IGNORECASE)


def counted(name):
    return name == "README.md" or (name.startswith("docs/") and not name.startswith(MADE) and name not in FACTS)


def tics_of_pages():
    """Return the tics of each page, without its code, and without the page on style."""
    texts = {name: page.text for name, page in PAGES.items() if name != "docs/style.md"}
    texts["SECURITY.md"] = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return {name: found for name, text in texts.items() if (found := TIC.findall(re.sub(r"`[^`]*`", "", text)))}


def tics_of_the_package():
    paths = sorted((ROOT / "pytest_kvmock").rglob("*.py"))
    return {path.name: found for path in paths if (found := TIC.findall(path.read_text(encoding="utf-8")))}


def test_handwritten_prose_and_code_stay_within_their_word_limit():
    words = {name: len(page.by_hand.split()) for name, page in PAGES.items() if counted(name)}
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words: shorten a page, {words}"


@pytest.mark.parametrize("page", [page for name, page in PAGES.items() if name.startswith("docs/how-to/")], ids=repr)
def test_a_how_to_page_stays_within_its_word_limit(page):
    assert len(page.text.split()) <= MOST_OF_A_HOW_TO


@pytest.mark.parametrize(("where", "tics"), [("pages", tics_of_pages), ("package", tics_of_the_package)])
def test_the_number_of_words_that_say_little_does_not_grow(where, tics):
    found = tics()
    assert sum(map(len, found.values())) <= MOST_TICS[where], found


@pytest.mark.parametrize(
    ("text", "expected"),
    [("so many blocks, Beside it", 2), ("besides", 0), ("anew likewise nobody", 3), ("so much, many", 0)],
)
def test_a_tic_is_a_whole_word(text, expected):
    assert len(TIC.findall(text)) == expected
