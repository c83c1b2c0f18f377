"""One HTML page: its data as JSON, with the style and script that show it, in one file.

Theory of operation. The data of a page is plain (mappings, sequences, strings, numbers, None), so that other programs
can read it: it is in the page as `<script type="application/json" id="data">`. The script shows every text as a text
node, so that markup in a name stays text. A policy in the head forbids the page to load anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

MOST_POINTS: Final = 2_000
"""Maximum points of one worker in a chart; of more, the peaks are kept."""

MOST_REQUESTS: Final = 20_000
"""Maximum requests in a timeline; of more, requests at even distances are kept."""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main id="page"><h1>{title}</h1><p>This page needs JavaScript. Its data is JSON, in the element with the id "data".</p></main>
<script type="application/json" id="data">
{data}
</script>
<script>
{script}
</script>
</body>
</html>
"""  # noqa: E501

_START: Final = {
    "fleet": "begin();\nshowFleet(DATA, PAGE);\nready();\n",
    "test": "begin();\nshowTest(DATA, PAGE);\nif (DATA.fleet) showFleet(DATA.fleet, PAGE, el('h2', { id: 'fleet' }, "
    "'The fleet'));\nready();\n",
}

T = TypeVar("T")


def render(kind: Literal["fleet", "test"], title: str, data: Mapping[str, Any]) -> str:
    """Return a page as HTML.

    Args:
        kind: its subject; a test may also have a fleet, whose data is under "fleet".
        title: its heading, any text.
        data: its contents, as plain JSON values.

    Raises:
        TypeError: the data has a value that JSON cannot hold.
        ValueError: the data has a number that is not finite.
    """
    home = files(__package__)
    scripts = ("page.js", "fleet.js", "test.js") if kind == "test" else ("page.js", "fleet.js")
    text = json.dumps({"title": title, **data}, separators=(",", ":"), allow_nan=False)
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style=home.joinpath("page.css").read_text(encoding="utf-8"),
        data=text.replace("<", "\\u003c"),  # no text in it can end the element
        script="\n".join(home.joinpath(name).read_text(encoding="utf-8") for name in scripts) + _START[kind],
    )


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(html, encoding="utf-8", newline="\n")


def every(items: Sequence[T], most: int) -> list[T]:
    """Return items at even distances, the first one included, at most `most`."""
    count = len(items)
    return list(items) if count <= most else [items[at * count // most] for at in range(most)]


def peaks(items: Sequence[T], most: int, key: Callable[[T], Any]) -> list[T]:
    """Return the greatest item, by a key, of each of at most `most` equal parts."""
    count = len(items)
    if count <= most:
        return list(items)
    bounds = [at * count // most for at in range(most + 1)]
    return [max(items[start:end], key=key) for start, end in pairwise(bounds)]
