"""The documentation is executed: README and the pages of docs/, by the marks that `pages.py` describes."""

import itertools
import os
import re
import shlex
import sys
import tomllib
from fnmatch import fnmatch

import pytest
from depth import DEEP, examples, few, worth_its_time
from hypothesis import settings
from pages import PAGES, ROOT, heading_id, printed
from plugin_parts import OPTIONS

from pytest_kvmock import testing
from pytest_kvmock.__main__ import main as kvmock
from pytest_kvmock.__main__ import parser as kvmock_parser
from pytest_kvmock.plugin.options import LISTS

WRITE = bool(os.environ.get("KVMOCK_WRITE_DOCS"))
README = PAGES["README.md"]
FILES = "https://github.com/pytest-kvmock/pytest-kvmock/blob/main/"
"""The address to which links of README lead."""

settings.register_profile("kvmock_docs", settings.get_profile("kvmock"), max_examples=examples(20))


@pytest.fixture
def page_run(nested, monkeypatch):
    """Run pytest in a page's directory, as its reader would: `page_run(files, *args)`."""
    monkeypatch.setenv("COLUMNS", "80")
    settings.load_profile("kvmock_docs")

    def run(files, *args):
        for name in files:
            if name.startswith("test_"):  # one of our own tests may have that name
                monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        return nested("", *args, plugins=["anyio"], files=files)

    yield run
    settings.load_profile("kvmock")


QUICK_BLOCKS = {"docs/how-to/what-i-run.md": 3}
"""Number of modules that a quick run takes from a page with one module per engine."""


@worth_its_time
@pytest.mark.parametrize("page", few((page for page in PAGES.values() if page.of("python")), 11), ids=repr)
def test_the_tests_of_a_page_pass(page_run, page):
    # Two of eight cases of the scheduler matrix suffice for the page; examples/scheduler_matrix has all.
    cases = [] if DEEP else ["-k", "not nocache and not distinct"]
    blocks = few(page.of("python"), QUICK_BLOCKS.get(page.name, len(page.blocks)))
    left_out = {block.name for block in page.of("python")} - {block.name for block in blocks}
    files = {name: text for name, text in page.files.items() if name not in left_out}
    result = page_run(files, "-v", "-rs", *cases)

    outcomes = result.parseoutcomes()
    assert {"failed", "errors", "error", "xfailed"} & set(outcomes) == set()
    # A contract skips tests of what an index or router does not have; nothing else is skipped.
    skipped = re.findall(
        r"^SKIPPED \[(\d+)\] \S*testing/(?:index/\w+|router/\w+|process/process_subject)\.py:",
        result.stdout.str(),
        re.MULTILINE,
    )
    assert outcomes.get("skipped", 0) == sum(map(int, skipped))
    passed = set(re.findall(r"^(\S+?)::(\w+).* PASSED", result.stdout.str(), re.MULTILINE))
    assert {(block.name, name) for block in blocks for name in block.tests()} <= passed
    assert {name for name in page.files if name.endswith(".kv.yaml")} <= {file for file, _ in passed}
    for block in blocks:
        for name, contract in re.findall(r"^class (\w+)\((\w+Contract)\)", block.text, re.MULTILINE):
            of = getattr(testing, contract)
            promises = sum(test.startswith("test_") and callable(getattr(of, test)) for test in dir(of))
            assert promises <= result.stdout.str().count(f"{block.name}::{name}::"), name


def test_every_python_block_defines_a_test():
    assert [(page, block.line) for page in PAGES.values() for block in page.of("python") if not block.tests()] == []


FAILURES = [(page, *failure) for page in PAGES.values() for failure in page.failures()]


@pytest.mark.parametrize(
    ("page", "block", "outputs"), FAILURES, ids=[f"{page}:{block.line}" for page, block, _ in FAILURES]
)
def test_a_failure_on_a_page_is_what_pytest_prints(page_run, page, block, outputs):
    result = page_run({**dict.fromkeys(page.files, ""), block.name: block.text}, "--kv-reduce=30", block.name)

    result.assert_outcomes(failed=1)
    message = {output: printed(result.stdout.str(), output.value) for output in outputs}
    if WRITE:
        page.write_blocks(message)
    else:
        assert {output: output.text for output in outputs} == message


CONSOLES = [(page, block) for page in PAGES.values() for block in page.of("console")]
SECONDS = re.compile(r"\b\d+\.\d+s\b")


@pytest.mark.parametrize(("page", "block"), CONSOLES, ids=[f"{page}:{block.line}" for page, block in CONSOLES])
def test_a_command_prints_the_output_on_the_page(page_run, page, block, capsys):
    for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = command.partition("\n")
        program, *args = shlex.split(line)
        if program == "python":
            assert args[:2] == ["-m", "pytest_kvmock"]
            assert kvmock(args[2:]) == 0
            assert expected.strip() in capsys.readouterr().out
            continue
        assert program == "pytest"

        result = page_run(page.files, *args)
        capsys.readouterr()

        assert result.ret == 0
        assert SECONDS.sub("0.10s", expected.strip()) in SECONDS.sub("0.10s", result.stdout.str())


# ------------------------------------------------------------------------------------------- what is not run here


def test_every_block_has_a_mark_or_a_language_that_tells_how_it_is_run():
    kinds = {"python", "file", "fails", "output", "console", "sh", "command", "drawing", "signature"}
    assert [
        (page, block.line, block.kind) for page in PAGES.values() for block in page.blocks if block.kind not in kinds
    ] == []
    fences = {page: len(re.findall(r"^ *```", page.text, re.MULTILINE)) for page in PAGES.values()}
    assert {page: 2 * len(page.blocks) for page in PAGES.values()} == fences


COMMANDS = (
    r"cd pytest-kvmock",
    r"python3 -m venv \.venv",
    r"(?:\.venv/bin/)?pip install (?:(?:--quiet )?-e )?'?(?:\.|/path/to/pytest-kvmock)(?:\[(?P<extras>[\w,]+)\])?'?(?P<groups>(?: --group [\w-]+)*)",  # noqa: E501
    r"(?:\.venv/bin/)?pip install --upgrade 'pip>=25\.1'",
    r"(?:\.venv/bin/)?pytest\b(?P<pytest>.*)",
    r"python -m pytest_kvmock (?P<command>(?!--help).*)",
    r"python -m pytest_kvmock --help",
    r"(?:\.venv/bin/)?python (?P<file>[\w/]+\.py)(?P<arguments>.*)",
    r"\.venv/bin/ruff check \. && \.venv/bin/ruff format \. && \.venv/bin/mypy && \.venv/bin/lint-imports",
    r"(?:\.venv/bin/)?mkdocs (?:build --strict|serve)",
    r"KVMOCK_WRITE_DOCS=1 \.venv/bin/pytest (?P<write>tests/[\w/.]+)",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
FLAGS = {option.flag for option in OPTIONS if option.flag} | set(LISTS)
INI = {option.ini for option in OPTIONS if option.ini}


def test_commands_on_pages_name_existing_extras_options_and_settings():
    for page in PAGES.values():
        for block in page.of("sh", "command"):
            for line in filter(None, block.text.splitlines()):
                command = line.partition("  #")[0].strip()
                found = next((match for each in COMMANDS if (match := re.fullmatch(each, command))), None)
                assert found is not None, (page, line)
                groups = found.groupdict()
                if groups.get("command"):
                    kvmock_parser().parse_args(shlex.split(groups["command"]))  # it exits if the command is wrong
                assert {*filter(None, (groups.get("extras") or "").split(","))} <= set(EXTRAS), line
                assert {*re.findall(r"--group ([\w-]+)", groups.get("groups") or "")} <= {
                    *PROJECT["dependency-groups"]
                }, line
                assert all((ROOT / name).exists() for name in (groups.get("file"), groups.get("write")) if name), line
                assert {*re.findall(r"(--kv[\w-]*)", groups.get("pytest") or "")} <= FLAGS, line
                assert {*re.findall(r"-o (\w+)=", groups.get("pytest") or "")} <= INI, line


def test_no_page_names_a_published_package_before_the_first_release():
    texts = {page.name: page.text for page in PAGES.values()}
    for folder in ("pytest_kvmock", "examples"):
        texts |= {str(path): path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    from_index = r"pip install [^\n`]*(?<![\w/])pytest-kvmock"
    assert [name for name, text in texts.items() if re.search(from_index, text)] == []


def test_ci_runs_the_commands_of_readme():
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert [block.value for block in README.of("command")] == ["main job", "tests"]
    assert all(re.search(rf"readme '{block.value}'", ci) for block in README.of("command"))
    assert "export KVMOCK_DEEP=1\n    readme 'tests'" in ci


def test_the_first_test_has_ten_lines():
    assert len(README.of("python")[0].text.strip().splitlines()) == 10


def test_readme_has_at_most_200_lines():
    assert README.text.count("\n") <= 200


def test_the_changelog_of_the_first_version_is_short():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = text.partition("\n## 0.1.0")[2].partition("\n## ")[0]
    assert first.count("\n") <= 40
    assert len(first.split()) <= 700


def test_links_of_readme_are_absolute():
    """They work on a package index too, below the one address of the project in pyproject.toml."""
    links = re.findall(r"\]\(([^)\s]+)\)", README.text)
    assert [link for link in links if not link.startswith(FILES)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if "urls" not in project:
        pytest.skip("pyproject.toml has no [project.urls] yet")
    assert FILES.removesuffix("/blob/main/") in {url.rstrip("/") for url in project["urls"].values()}


def test_files_named_on_pages_exist():
    for page in PAGES.values():
        for name in re.findall(r"`((?:examples|tests|benchmarks|docs|\.ci)/[\w/.-]*)`", page.text):
            assert (ROOT / name).exists(), (page, name)


def test_every_recording_is_explained():
    table = PAGES["CONTRIBUTING.md"].section("How a recording is made")
    named = []
    for pattern in re.findall(r"`([\w.*{},]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))):
        choices = [part.split(",") for part in re.findall(r"\{(.*?)\}", pattern)]
        for chosen in itertools.product(*choices):
            parts = iter(chosen)
            named.append(re.sub(r"\{.*?\}", lambda _, parts=parts: next(parts), pattern))
    files = [path.name.partition(".json")[0] for path in (ROOT / "tests/data").iterdir()]
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in named)] == []
    assert [pattern for pattern in named if not any(fnmatch(file, pattern) for file in files)] == []


def test_links_between_pages_have_targets():
    anchors = {
        page.path: {heading_id(heading) for heading in re.findall(r"^#+ (.*)$", page.text, re.MULTILINE)}
        for page in PAGES.values()
    }
    for page in PAGES.values():
        for target in re.findall(r"\]\(([^)\s]+)\)", page.text):
            name, _, anchor = target.partition("#")
            if name.startswith(FILES):
                name = str(ROOT / name.removeprefix(FILES))
            if not name.startswith("http"):
                path = (page.path.parent / name).resolve() if name else page.path
                assert path.exists(), (page, target)
                assert not anchor or anchor in anchors[path], (page, target)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(f"docs/{name}" for name in named) == sorted(name for name in PAGES if name.startswith("docs/"))


# --------------------------------------------------------------------------------------- what is shown more than once


def test_the_index_on_the_page_is_the_one_of_the_example():
    example = (ROOT / "examples/own_index/test_index_by_hashes.py").read_text(encoding="utf-8")
    methods = re.search(r"    def __init__.*?\n\n\n", example, re.DOTALL)
    assert methods is not None
    assert methods[0] in PAGES["docs/how-to/own-index.md"].text


@pytest.mark.parametrize(("page", "example"), [("process", "sticky_router"), ("serve", "first_block_router")])
def test_the_process_test_on_a_page_is_the_one_of_the_example(page, example):
    (shown,) = PAGES[f"docs/how-to/{page}.md"].of("file")
    text = (ROOT / f"examples/router_process/test_{example}.py").read_text(encoding="utf-8")
    assert text.endswith(f"\n{shown.text}")


@pytest.mark.parametrize("kind", ["Hash", "Token"])
def test_the_copied_index_of_a_page_runs_the_contract_over_all_backends(kind):
    """The examples, which have the same code, run the contract; for hybrid models they follow one group."""
    (example,) = [
        text
        for path in (ROOT / "examples/own_index").glob("test_*.py")
        if f"class {kind}Index:" in (text := path.read_text(encoding="utf-8"))
    ]
    assert f"class OfAttention({kind}Index):\n" in example
    backends = {
        "Hash": '    backends = tuple(name for name in BACKENDS if name != "vllm_deepseek_v4")',
        "Token": """    backends = tuple(
        name for name, spec in BACKENDS.items() if name != "vllm_deepseek_v4" and not spec.traits.looks_ahead
    )""",
    }
    assert backends[kind] in example.partition(f"class Test{kind}Index(IndexContract):\n")[2]
