"""The pages of the site as MkDocs builds them: no table shown as text, no empty heading, no broken anchor.


The environment variable KVMOCK_SITE names the directory of a built site; otherwise it is built here, if MkDocs is
installed (dependency group `docs`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from depth import DEEP
from pages import ROOT

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


class SitePage(HTMLParser):
    """One page: the texts of its paragraphs and headings, its ids, and the targets of its links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.texts: list[tuple[str, str]] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self._open: tuple[str, list[str]] | None = None
        self._permalink = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if named.get("id"):
            self.ids.add(named["id"] or "")
        self._permalink = tag == "a" and "headerlink" in (named.get("class") or "")
        if tag == "a" and named.get("href") and not self._permalink:
            self.links.append(named["href"] or "")
        if tag == "p" or tag in HEADINGS:
            self._open = tag, []

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._permalink = False
        if self._open is not None and tag == self._open[0]:
            self.texts.append((tag, "".join(self._open[1]).strip()))
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None and not self._permalink:
            self._open[1].append(data)


def wrong_in_site(site: Path) -> list[str]:
    """List the errors in the pages of a built site, each with its page."""
    pages = {path.resolve(): SitePage(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        wrong += [f"{name}: a paragraph begins with |: {text[:60]}" for tag, text in page.texts if text.startswith("|")]
        wrong += [f"{name}: a heading without text ({tag})" for tag, text in page.texts if tag in HEADINGS and not text]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not parts.fragment:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if target not in pages or unquote(parts.fragment) not in pages[target].ids:
                wrong.append(f"{name}: the link {link} leads nowhere")
    return wrong


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>| `a` | b |</p>", "a paragraph begins with |: | `a` | b |"),
        ('<h2 id="x"><a class="headerlink" href="#x">¶</a></h2>', "a heading without text (h2)"),
        ('<a href="#there">x</a>', "the link #there leads nowhere"),
        ('<a href="page/#there">x</a>', "the link page/#there leads nowhere"),
    ],
)
def test_each_kind_of_error_in_a_page_is_found(tmp_path, body, problem):
    (tmp_path / "page").mkdir()
    (tmp_path / "page/index.html").write_text('<h1 id="here">A page</h1><p>a | b</p><a href="../">up</a>', "utf-8")
    index = tmp_path / "index.html"
    index.write_text('<h1>Home</h1><a href="page/#here">x</a>', "utf-8")
    assert wrong_in_site(tmp_path) == []
    index.write_text(f"<h1>Home</h1>{body}", "utf-8")
    assert wrong_in_site(tmp_path) == [f"index.html: {problem}"]


@pytest.mark.skipif(not DEEP and "KVMOCK_SITE" not in os.environ, reason="building the site takes long: KVMOCK_DEEP=1")
def test_every_page_of_the_site_renders_correctly(tmp_path):
    site = os.environ.get("KVMOCK_SITE")
    if site is None:
        if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
            pytest.skip("MkDocs is not installed (extra docs)")
        site = str(tmp_path / "site")
        built = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", site]
        subprocess.run(built, cwd=ROOT, check=True, capture_output=True)
    assert wrong_in_site(Path(site)) == []
