"""Pages: plain data in, one self-contained file out, whatever names the data has."""

import json
import re
from html.parser import HTMLParser

import pytest

from pytest_kvmock.values.pages.page import every, peaks, render, write_page

EVIL = "</script><img src=x onerror=alert(1)>&\u2028'\""


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements(html):
    parser = Elements()
    parser.feed(html)
    return parser.found


@pytest.mark.parametrize("kind", ["fleet", "test"])
def test_a_page_is_one_file_without_external_resources(kind):
    html = render(kind, "a title", {})
    assert [each for tag, each in elements(html) if "src" in each or "href" in each or tag in ("link", "img")] == []
    assert "default-src 'none'" in html
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|\bimport\b", html)


@pytest.mark.parametrize("kind", ["fleet", "test"])
def test_page_scripts_never_insert_text_as_markup(kind):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", render(kind, "", {}))


def test_markup_in_names_is_escaped():
    html = render("fleet", EVIL, {"router": EVIL})
    plain = render("fleet", "", {"router": ""})
    assert [tag for tag, _ in elements(plain)] == [tag for tag, _ in elements(html)]
    data = html.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == {"title": EVIL, "router": EVIL}


def test_page_data_must_be_plain_json():
    with pytest.raises(TypeError, match="not JSON serializable"):
        render("test", "", {"at": object()})
    with pytest.raises(ValueError, match="not JSON compliant"):
        render("test", "", {"at": float("inf")})


def test_a_page_is_written_to_a_path(tmp_path):
    write_page(tmp_path / "a.html", "été\n")
    assert "été\n".encode() == (tmp_path / "a.html").read_bytes()
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "none" / "a.html", "")


def test_thinning_keeps_samples_over_the_whole_range_and_the_peaks():
    assert every(range(3), 3) == [0, 1, 2]
    assert every(range(10), 4) == [0, 2, 5, 7]
    assert peaks([1, 3, 2, 0, 1, 9], 3, key=lambda each: each) == [3, 2, 9]
    assert peaks([1], 3, key=lambda each: each) == [1]
