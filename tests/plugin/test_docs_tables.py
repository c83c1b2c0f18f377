"""Reference tables and signatures of the documentation agree with the code.

Those under a mark `<!-- table: NAME -->` or `<!-- signature -->` are generated here, and `KVMOCK_WRITE_DOCS=1` writes
them; names and defaults of the other tables are compared.
"""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import tomllib
from dataclasses import asdict, fields
from fnmatch import fnmatch
from functools import reduce
from typing import get_args

import draft_fleets
import mimicked
import msgspec
import pytest
from depth import takes_long, worth_its_time
from pages import PAGES, ROOT
from plugin_parts import FIXTURES, OPTIONS
from public_doors import public_names
from signatures import find, signature

from pytest_kvmock import BACKENDS, EngineProfile, Prompt, RouterHarness, Stored, plugin
from pytest_kvmock.engines import MockEngineArgs
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.engines.schedulers.nested_args import SglangArgs
from pytest_kvmock.fleets import Candidate, RouterRequest
from pytest_kvmock.fleets.router_calls import BELIEFS, HOOKS
from pytest_kvmock.fleets.routing.routing import RequestStatus
from pytest_kvmock.oracle.faults.kinds import FAULTS
from pytest_kvmock.oracle.hygiene.rules import RULES
from pytest_kvmock.plugin import hookspecs
from pytest_kvmock.plugin.markers import KVMOCK_KEYS
from pytest_kvmock.plugin.options import LISTS
from pytest_kvmock.plugin.precedence import Policy, resolve_trace_tokens
from pytest_kvmock.wire import DIALECTS, Batch, encode
from pytest_kvmock.wire.codec.defects import DEFECTS

REFERENCE = {name.removeprefix("docs/reference/"): page for name, page in PAGES.items() if "docs/reference/" in name}


def table(*rows):
    """Return a Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def code(text):
    """Return text as code in a cell; only this way of writing a bar works on GitHub and in MkDocs."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`" if text else ""


def made(name):
    if name == "readers":
        return table(
            ("engines", "the router knows blocks by", "promised", "reused", "promised too much", "too little"),
            *(
                (mode, reader, *(f"{share:.0%}" for share in draft_fleets.shares(draft_fleets.served(mode, reader))))
                for mode in draft_fleets.MODES
                for reader in draft_fleets.READERS
            ),
        )
    if name == "backends":
        return table(
            ("backend", "engine", "in the default matrix"),
            *(
                (code(name), spec.models + ", as read" * spec.as_read, "yes" * spec.in_matrix)
                for name, spec in BACKENDS.items()
            ),
        )
    if name == "mimicked":
        alike = {}
        for row in mimicked.rows():
            alike.setdefault(tuple(mimicked.cell(row, each) for each in mimicked.DEPLOYMENTS), []).append(row)
        return table(
            ("backend", *mimicked.DEPLOYMENTS),
            *((", ".join(map(code, names)), *cells) for cells, names in alike.items()),
        )
    if name == "refused":
        return table(
            ("deployment", "backend", "answer to the first of them"),
            *((what, ", ".join(map(code, names)), code(answer)) for what, names, answer in mimicked.refusals()),
        )
    if name == "rules":
        return table(
            ("rule", "kind", "broken when"),
            *((f"[`{rule.name}`](#{rule.name})", rule.kind_text, rule.broken_when) for rule in RULES.values()),
        )
    if name == "faults":
        return table(
            ("fault", "what it does", "at random"),
            *((code(kind.name), kind.does, "yes" if kind.has_rate else "") for kind in FAULTS.values()),
        )
    if name == "dialects":
        rows = (
            (
                code(row.name),
                row.models,
                *map(str, (row.form, row.hashes, row.rank, row.replay or "")),
                "yes" * row.in_matrix,
            )
            for row in DIALECTS.values()
        )
        return table(("dialect", "writer", "form", "block hashes", "rank", "replay", "matrix"), *rows)
    if name == "fields":
        rows = (row for row in DIALECTS.values() if row.is_msgpack and row.hashes != "bytes")
        return table(("dialect", "BlockStored", "BlockRemoved"), *((code(row.name), *fields_of(row)) for row in rows))
    if name == "carried":
        rows = (row for row in DIALECTS.values() if row.hashes != "bytes")
        head = ("dialect", "LoRA adapter", "cache salt", "multimodal items", "session", "cache group")
        return table(head, *((code(row.name), *carried_by(row)) for row in rows))
    if name == "defects":
        return table(("defect", "reported when"), *((code(defect), when) for defect, when in DEFECTS.items()))
    assert name == "options", name
    return table(
        ("option", "ini", "meaning"),
        *(
            (code(f"{option.flag} {option.metavar}".strip()), code(option.ini), option.help.replace("|", r"\|"))
            for option in OPTIONS
        ),
        *((code(flag), "", what) for flag, what in LISTS.items()),
    )


def fields_of(dialect):
    """Return the fields of a dialect, those with a default in brackets."""
    for kind in (dialect.stored, dialect.removed):
        names = [field.name if field.is_required else f"[{field.name}]" for field in kind]
        also = [f"{{{', '.join(dialect.metadata)}}}"] * (kind is dialect.stored and bool(dialect.metadata))
        yield ", ".join([*names, *also])


CARRIED = {"lora_name": "a", "cache_salt": "s", "multimodal": [("1c" * 32, 1, 2)], "session_id": "x"}


def carried_by(dialect):
    """Yield for each key of a prompt the fields of a stored block that depend on it, as the dialect's engine publishes
    them.
    """
    plain = stored_as(dialect)
    for key, value in CARRIED.items():
        try:
            given = stored_as(dialect, **{key: value})
        except ValueError:  # the engine names no block by this key
            given = plain
        yield ", ".join(code(field) for field in given if given[field] != plain.get(field))
    yield code("group_idx" * ("group_idx" in [field.name for field in dialect.stored]))


def stored_as(dialect, **keys):
    """Return the first stored block of a prompt on the wire, without the name of the block."""
    harness = RouterHarness(EngineProfile(block_size=4), speaker_of(dialect))
    harness.worker(0).serve(Prompt(range(4), **keys))
    events = [entry.event for entry in harness.events if isinstance(entry.event.event.data, Stored)]
    payload = encode(Batch(events), dialect)
    if dialect.form == "trtllm_json":
        block = json.loads(payload)[0]["data"]["blocks"][0]
        return {name: value for name, value in block.items() if name != "block_hash"}
    if not dialect.is_msgpack:
        event = json.loads(payload)
        return {"tokens_hash": event.get("event", event)["data"]["stored"]["blocks"][0]["tokens_hash"]}
    event = msgspec.msgpack.decode(payload)[1][0]
    if isinstance(event, list):
        names = ["type", *(field.name for field in dialect.stored)]
        event = {**dict(zip(names, event, strict=False)), **(event[len(names)] if len(event) > len(names) else {})}
    return {name: value for name, value in event.items() if name != "block_hashes"}


WRITE = bool(os.environ.get("KVMOCK_WRITE_DOCS"))
TABLES = [(page, name) for page in PAGES.values() for name in page.tables()]


def marks_of(name):
    """Return the marks of a table: the one of readers runs fleets, the one of mimicked products each engine."""
    if name in ("mimicked", "refused"):
        return [worth_its_time]
    return [takes_long] * (name == "readers" and not WRITE)


@pytest.mark.parametrize(
    ("page", "name"), [pytest.param(page, name, id=f"{page}-{name}", marks=marks_of(name)) for page, name in TABLES]
)
def test_each_generated_table_agrees_with_the_code(page, name):
    if WRITE:
        page.write_tables(made)
    assert page.tables()[name] == made(name)


@takes_long
def test_the_page_has_the_right_numbers_of_recordings():
    kept = mimicked.counted(mimicked.DATA.iterdir())
    assert sorted(kept) == sorted(set(mimicked.WHOLE) - {"vllm_kimi_linear"})  # a model without a recorded part
    more = {
        (row, what): number
        for row, numbers in kept.items()
        for what, number in numbers.items()
        if number > mimicked.WHOLE[row].get(what, 0)
    }
    assert more == {}
    assert {what.removesuffix(mimicked.BY_ROW) for numbers in mimicked.WHOLE.values() for what in numbers} <= set(
        mimicked.DEPLOYMENTS
    )


@worth_its_time
def test_an_engine_that_did_not_run_has_no_cell_that_claims_recordings():
    read = {row for row, spec in mimicked.rows().items() if spec.as_read}
    assert {row for row, spec in mimicked.rows().items() if spec.scheduler == "trtllm"} == read
    assert [row for row in read for each in mimicked.DEPLOYMENTS if "to the" in mimicked.cell(row, each)] == []


def rows_under(page, heading):
    """Return the names in the first cells of the tables under a heading."""
    cells = re.findall(r"^\| (`.*?) \|", PAGES[page].section(heading), re.MULTILINE)
    return [name.strip('"') for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_router_page_lists_everything_that_a_router_receives():
    page = "docs/how-to/own-router.md"
    shown = {name for name in dir(RouterRequest) if not name.startswith("_")} - {"prompt"}  # its fields say more
    asked = rows_under(page, "What it is shown of a request")
    statuses = [name for name in asked if name in get_args(RequestStatus)]
    assert [*get_args(RequestStatus)] == statuses
    assert shown == {*asked} - {*statuses}
    assert [*Candidate._fields] == rows_under(page, "What it is shown of a worker")
    methods = " ".join(rows_under(page, "What a router may have"))
    assert [name for name in ("pick", *HOOKS, *BELIEFS) if f"{name}(" not in methods] == []


def test_all_generated_tables_exist():
    assert sorted(name for _, name in TABLES) == [
        "backends",
        "carried",
        "defects",
        "dialects",
        "faults",
        "fields",
        "mimicked",
        "options",
        "readers",
        "refused",
        "rules",
    ]


def first_cells(text):
    """Return the code in the first column of tables."""
    return re.findall(r"^\| `([^`]*)`", text, re.MULTILINE)


def test_every_rule_has_an_example_that_breaks_it():
    page = REFERENCE["rules.md"]
    assert re.findall(r"^### (\w+)$", page.text, re.MULTILINE) == list(RULES)
    for rule in RULES:
        assert f"def test_{rule}(" in page.section(rule), rule
        assert rule in page.section(rule).partition(f"def test_{rule}(")[2], rule


def test_the_hooks_page_lists_the_hooks_of_the_code():
    hooks = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("pytest_")}
    expected = [f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in hooks.items()]
    assert first_cells(REFERENCE["hooks.md"].text) == expected


def test_every_fixture_is_listed():
    tables = re.findall(r"^\| fixture \|.*\n((?:\|.*\n)+)", REFERENCE["fixtures.md"].text, re.MULTILINE)
    assert sorted(first_cells("".join(tables))) == sorted(FIXTURES)


def test_the_fixtures_page_begins_with_the_fixtures_of_a_first_test():
    first = REFERENCE["fixtures.md"].text.partition("```")[0]
    assert first_cells(first) == ["kv_worker", "kv_prompt", "kv_harness", "kv_events", "kv_index"]
    assert set(first_cells(first)) <= set(re.findall(r"kv_\w+", PAGES["README.md"].text))


def test_every_key_of_the_marker_is_listed_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| `?([^`|]*?)`? \|$", REFERENCE["markers.md"].text, re.MULTILINE))
    assert set(rows) == set(KVMOCK_KEYS)
    profile, policy = EngineProfile(), Policy()
    defaults = {key: getattr(profile, key) for key in KVMOCK_KEYS if hasattr(profile, key)}
    defaults |= {"event_errors": policy.event_errors, "event_warnings": policy.event_warnings}
    defaults |= {
        "allow": tuple(policy.allow),
        "sync": "auto",
        "clears": "rank",
        "profile": None,
        "faults": {},
        "survive": (),
        "engine": {},
        "roles": None,
        "stores": None,
        "trace_tokens": resolve_trace_tokens({}, (), {}),
    }
    assert defaults == {key: ast.literal_eval(value) for key, value in rows.items()}


def defaults_of(cls):
    return {each.name: each.default for each in fields(cls) if each.init}


def test_every_argument_of_an_engine_is_listed_with_its_default():
    text = REFERENCE["engine-args.md"].section("Fields")
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`|[^`]*?) \| .* \|$", text, re.MULTILINE))
    shown = {name: ast.literal_eval(value) for name, value in rows.items() if value}
    expected, options = defaults_of(MockEngineArgs), {**asdict(SglangArgs().filled(64))}
    assert list(rows) == [*expected, *options]
    assert shown == {**expected, **{name: value for name, value in options.items() if name != "page_size"}}


def test_the_traits_table_agrees_with_the_workers():
    """It is compared with the traits of a worker of each engine."""
    table = REFERENCE["engines.md"].text.partition("| `kv_worker.traits` |")[2].partition("\n\n")[0].splitlines()
    columns = [re.findall(r"`(\w+)`", cell) for cell in table[0].split("|")[:-1]]
    assert sorted(BACKENDS) == sorted(name for names in columns for name in names)
    shown = {name: {} for name in BACKENDS}
    for line in table[2:]:
        trait, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for names, cell in zip(columns, cells, strict=True):
            for name in names:
                shown[name][re.match(r"`(\w+)`", trait)[1]] = cell.strip('"')
    for name, traits in shown.items():
        worker = RouterHarness(backend=name).worker(0)
        groups = {"groups": "its own" if worker.traits.groups else "none"}
        assert {field: str(value) for field, value in asdict(worker.traits).items()} | groups == traits, name


def test_the_products_table_has_a_name_or_pattern_for_each_backend():
    table = PAGES["README.md"].text.partition("| product | backends |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [name for row in table for name in re.findall(r"`([\w*]+)`", row)]
    assert [name for name in BACKENDS if not any(fnmatch(name, pattern) for pattern in named)] == []
    assert [pattern for pattern in named if not any(fnmatch(name, pattern) for name in BACKENDS)] == []


DOOR = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\| `(\S+)` \|$", re.MULTILINE)
DESIGN = PAGES["docs/design.md"]
PACKAGE = ROOT / "pytest_kvmock"


def doors():
    return [door for door, *_ in DOOR.findall(DESIGN.section("The doors"))]


def imported_by(door):
    """Return the doors that the modules behind a door import, anywhere in them."""
    found = set()
    for path in (PACKAGE / door).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "pytest_kvmock":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pytest_kvmock."):
                found.add(node.module.split(".")[1])
    return found - {door}


def test_the_design_page_lists_the_doors_in_the_order_of_the_import_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"][::-1]
    assert doors() == [door for layer in layers for door in re.findall(r"\w+", layer) if door != "__main__"]


@worth_its_time
def test_the_design_page_shows_the_imports_of_each_door_and_an_existing_first_file():
    shown = doors()

    def row(found):
        door, purpose, _, first = found.groups()
        imports = imported_by(door)
        return f"| `{door}` | {purpose} | {', '.join(f'`{each}`' for each in shown if each in imports)} | `{first}` |"

    text = DOOR.sub(row, DESIGN.text)
    if os.environ.get("KVMOCK_WRITE_DOCS"):
        DESIGN.write(text)
    assert DESIGN.text == text
    firsts = [first for *_, first in DOOR.findall(DESIGN.section("The doors"))]
    assert [first for first in firsts if not (PACKAGE / first).exists()] == []


API = {name: page for name, page in REFERENCE.items() if name.startswith("api/")}


@pytest.mark.parametrize("page", API.values(), ids=API)
def test_signatures_on_the_pages_agree_with_the_source(page):
    if os.environ.get("KVMOCK_WRITE_DOCS"):
        page.write_signatures(signature)
    assert page.signatures() == {name: signature(name) for name in page.signatures()}


@pytest.mark.parametrize("page", API.values(), ids=API)
def test_the_site_does_not_show_signatures_twice(page):
    hook = runpy.run_path(str(ROOT / ".ci/mkdocs_hooks.py"))["on_page_markdown"]
    text = hook(page.text, page=None)
    assert "```" not in text
    assert [*page.signatures()] == re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)


def test_every_public_name_of_a_door_is_in_the_api_reference():
    listed = {name for page in API.values() for name in page.signatures()}
    unexplained = {
        f"{door}.{name}"
        for door, names in public_names().items()
        for name in names
        if not {f"{door}.{name}", f"pytest_kvmock.{name}"} & listed
    }
    assert unexplained == set()
    handed_out = {f"{door}.{name}" for door, names in public_names().items() for name in names}
    given = [name.rpartition(".") for name in listed - handed_out]  # parameter and return types, by their module
    assert [name for home, _, name in given if find(home, name)[0] != home] == []


def attribute_of(owner, name):
    """Return the attribute of a module or class, or None if only its instances have it, by annotation or docstring."""
    if hasattr(owner, name):
        return getattr(owner, name)
    if inspect.ismodule(owner):
        return importlib.import_module(f"{owner.__name__}.{name}")
    declared = {field for cls in owner.__mro__ for field in getattr(cls, "__annotations__", ())}
    attributes = "".join((inspect.getdoc(cls) or "").partition("Attributes:")[2] for cls in owner.__mro__)
    if name not in declared | set(re.findall(r"^ +(\w+):", attributes, re.MULTILINE)):
        raise AttributeError(f"{owner.__name__} has no {name}")
    return None


def exists(name):
    """Return whether a name exists: a fixture, a marker, or an attribute of the package."""
    if re.match(r"(make_)?kv_", name):
        return name in {*plugin.__all__, *FIXTURES} or f"`{name}" in REFERENCE["markers.md"].text
    try:
        reduce(attribute_of, name.split("."), importlib.import_module("pytest_kvmock"))
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def test_each_name_of_the_originals_has_ours_or_a_reason():
    text = REFERENCE["names.md"].text
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| .*\|$", text, re.MULTILINE)
    ]
    rows = [row for row in rows if row[0] != "name"]
    assert text.count("| name | ours | remarks |") == 5
    assert [row for row in rows if len(row) != 3 or not row[0] or not (row[1] or row[2])] == []
    named = {name for _, ours, _ in rows for name in re.findall(r"`([^`]*)`", ours)}
    named |= {name for *_, remarks in rows for name in re.findall(r"`(\w+(?:\.\w+)+)`", remarks)}
    assert sorted(name for name in named if not exists(name)) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Stored.parent_hash", True), ("KvManager.num_blocks", True), ("kv_worker", True), ("kv_backends", True)]
    + [(name, False) for name in ("Stored.parent", "nothing", "moves.Free", "KvManager.capacity", "kv_free")],
)
def test_the_check_of_names_finds_a_missing_name(name, expected):
    assert exists(name) == expected
