"""Pages of documentation: their code blocks, the marks of these, and the parts that are generated from the code.

A mark is an HTML comment on the line before a fenced block (an empty line may be between them):

| mark | block |
|---|---|
| none, `python` | a module of tests that pass |
| `file: NAME` | a file next to the page's tests: a conftest, an ini file, a scenario; `test_*.py` and `*.kv.yaml` are tests |
| `fails: NAME` | a module with one test that fails, run by itself |
| `output` | what pytest prints of the failure of the module before it, from the line with the test's name on |
| `output: TITLE` | only the section of that output with this title; `message`: the part before the first one |
| none, `console` | `$ pytest ARGUMENTS` in the page's directory, and what it prints |
| none, `sh` | commands that a reader types: `pip install` of extras that exist, commands that CI runs |
| `command: NAME` | in README: CI runs this block unchanged |
| `drawing` | text that is not output |
| `signature` | the signature of the name in `::: NAME` before it, generated from the source; the site leaves it out |

All tests of a page are one run. `KVMOCK_WRITE_DOCS=1 pytest tests/plugin/test_docs.py` writes outputs, and
`test_docs_tables.py` tables and signatures.
"""  # noqa: E501, W505

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)(?:<!-- (?P<mark>[a-z]+)(?:: (?P<value>[^>]+))? -->\n\n?[ ]*)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",  # noqa: E501
    re.DOTALL | re.MULTILINE,
)
_DIRECTIVE = re.compile(
    r"^::: (?P<name>[\w.]+)\n(?P<options>(?: {4}[^\n]*\n)*)(?:\n<!-- signature -->\n```python\n(?P<text>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_NOT_PROSE = re.compile(r"^ *(?:\|.*|<!-- .* -->|```.*)$", re.MULTILINE)
_TABLE = re.compile(r"^<!-- table: ([\w ]+) -->\n\n?((?:\|.*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block; `number` counts the blocks of its page."""

    number: int
    line: int
    mark: str
    value: str
    language: str
    text: str
    span: tuple[int, int]

    @property
    def kind(self) -> str:
        """The mark, or the language of a block without one."""
        return self.mark or self.language

    @property
    def name(self) -> str:
        """The file name for a module of tests."""
        return self.value or f"test_line_{self.line}.py"

    def tests(self) -> set[str]:
        """Return the names of the tests and test classes in a Python block."""
        defined = [node.name for node in ast.parse(self.text).body if hasattr(node, "name")]
        return {name for name in defined if name.startswith(("test_", "Test"))}


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def blocks(self) -> list[Block]:
        """All fenced blocks, in order."""
        return [
            Block(
                number,
                self.text.count("\n", 0, found.start("text")) + 1,
                found["mark"] or "",
                (found["value"] or "").strip(),
                found["language"],
                re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
                found.span("text"),
            )
            for number, found in enumerate(_BLOCK.finditer(self.text))
        ]

    def of(self, *kinds: str) -> list[Block]:
        """Return the blocks of some kinds."""
        return [block for block in self.blocks if block.kind in kinds]

    @property
    def files(self) -> dict[str, str]:
        """The files of the page's directory, including its modules of tests."""
        return {block.name: block.text for block in self.of("python", "file")}

    def failures(self) -> Iterator[tuple[Block, list[Block]]]:
        """Yield each module whose test fails, with the outputs after it."""
        blocks = self.of("fails", "output")
        for i, block in enumerate(blocks):
            if block.kind == "fails":
                outputs = []
                for after in blocks[i + 1 :]:
                    if after.kind == "fails":
                        break
                    outputs.append(after)
                yield block, outputs

    def tables(self) -> dict[str, str]:
        """Return the tables that are generated from the code, by name."""
        return {found[1]: found[2] for found in _TABLE.finditer(self.text)}

    def signatures(self) -> dict[str, str]:
        """Return the names that the page is the reference of, each with the signature below it."""
        return {found["name"]: found["text"] or "" for found in _DIRECTIVE.finditer(self.text)}

    @property
    def by_hand(self) -> str:
        """Prose and code written by hand: the text without tables, marks and output of tests."""
        text = self.text
        for block in reversed(self.of("output")):
            text = text[: block.span[0]] + text[block.span[1] :]
        return _NOT_PROSE.sub("", text)

    def section(self, heading: str) -> str:
        """Return the text under a heading of any level, up to the next heading of that level."""
        found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", self.text, re.DOTALL | re.MULTILINE)
        assert found is not None, f"{self} has no heading {heading!r}"
        return found[2]

    def write_blocks(self, texts: dict[Block, str]) -> None:
        """Replace the texts of some blocks."""
        text = self.text
        for block in sorted(texts, key=lambda block: block.number, reverse=True):
            start, end = self.blocks[block.number].span
            text = text[:start] + texts[block] + text[end:]
        self.write(text)

    def write_tables(self, make: Callable[[str], str]) -> None:
        """Replace all tables that are generated from the code."""
        self.write(_TABLE.sub(lambda found: found[0].replace(found[2], make(found[1])), self.text))

    def write_signatures(self, make: Callable[[str], str]) -> None:
        """Write the signature below each name that the page is the reference of."""

        def written(found: re.Match[str]) -> str:
            directive = f"::: {found['name']}\n{found['options']}"
            return f"{directive}\n<!-- signature -->\n```python\n{make(found['name'])}```\n"

        self.write(_DIRECTIVE.sub(written, self.text))

    def write(self, text: str) -> None:
        """Replace the page."""
        self.text = text
        self.path.write_text(text, encoding="utf-8")
        self.__dict__.pop("blocks", None)


PAGES = {
    page.name: page
    for page in map(Page, [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
}


def printed(stdout: str, title: str = "") -> str:
    """Return the output of a run for its one failure: all of it, or the section with a title."""
    whole = re.search(r"^_+ \S+ _+\n.*?(?=^=+ short test summary)", stdout, re.DOTALL | re.MULTILINE)
    assert whole is not None, stdout
    if not title:
        return whole[0]
    begin = r"\A" if title == "message" else rf"^-+ {re.escape(title)} -+\n"
    section = re.search(rf"{begin}.*?(?=^-+ .* -+\n|\Z)", whole[0], re.DOTALL | re.MULTILINE)
    assert section is not None, whole[0]
    return section[0]


def heading_id(heading: str) -> str:
    """Return the anchor of a plain heading, as GitHub and MkDocs make it."""
    plain = re.sub(r"[`*]", "", heading).lower()
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", plain).strip())
