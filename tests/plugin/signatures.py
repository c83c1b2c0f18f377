"""Signatures of public names as in the source, for readers of `docs/reference/api/` without the site.

The source is parsed, not imported: so they do not depend on the Python version, and lazily loaded names are treated
like all others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from textwrap import dedent, indent
from typing import TypeAlias

from pages import ROOT

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DECORATORS = {"property", "cached_property", "classmethod", "staticmethod", "contextmanager", "asynccontextmanager"}
SHOWN_SPECIALS = ("__init__", "__call__")
FORMS = {"by_place", "by_name", "takes", "needs", "one_of", "short", "amount", "optional", "whose", "states", "becomes"}
"""Parts of the forms of an operation, for those who add one in `programs`; the site does not show them either."""
MOST_OF_A_VALUE = 60
"""The value of a constant that is longer than this is left out."""


@cache
def signature(name: str) -> str:
    """Return the signature of a public name: a class with its fields and methods, a function or a constant, each with
    the first line of its docstring.
    """
    module, _, attribute = name.rpartition(".")
    found = find(module, attribute)
    assert found is not None, f"{name} is defined nowhere"
    home, node = found
    text = "\n".join(lines_of(home, node))
    ast.parse(text)  # raises if it is not Python
    return text + "\n"


# ----------------------------------------------------------------------------------------------- what stands where


@cache
def lines_of_source(module: str) -> list[bytes]:
    """Return the lines of a module as bytes, because `ast` counts columns in bytes."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.read_bytes().splitlines(keepends=True)


@cache
def top_level(module: str) -> list[ast.stmt]:
    """Return the top-level statements of a module, including those under an `if`."""
    return [*statements(ast.parse(b"".join(lines_of_source(module))).body)]


@cache
def definitions(module: str) -> dict[str, Definition | ast.ImportFrom]:
    """Return by name what the top level of a module defines or imports."""
    found: dict[str, Definition | ast.ImportFrom] = {}
    for node in top_level(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pytest_kvmock"):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, node)
        elif isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            found[node.name] = node
        elif name := assigned(node):
            found[name] = node
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements(node.body)


def assigned(node: ast.stmt) -> str:
    """Return the single name that is assigned to, or an empty string."""
    if isinstance(node, ast.AnnAssign):
        target: ast.expr = node.target
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def find(module: str, name: str) -> tuple[str, Definition] | None:
    """Return the module that defines a name, with the definition, or None for a name of another package."""
    node = definitions(module).get(name)
    if isinstance(node, ast.ImportFrom):
        assert node.module is not None
        (original,) = [alias.name for alias in node.names if name == (alias.asname or alias.name)]
        return find(node.module, original)
    return None if node is None else (module, node)


# ------------------------------------------------------------------------------------------------------- in text


def text_of(module: str, node: ast.expr | ast.stmt) -> str:
    """Return the source text, with later lines dedented by their common indentation."""
    lines = lines_of_source(module)[node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = b" " * node.col_offset + lines[0][node.col_offset :]
    return dedent(b"".join(lines).decode())


def lines_of(module: str, node: Definition) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return class_lines(module, node)
    if isinstance(node, FUNCTIONS):
        return function_lines(module, node)
    body = top_level(module)
    return [constant_line(module, node), *doc_lines(string_after(body, body.index(node)))]


def string_after(body: list[ast.stmt], position: int) -> str:
    """Return the string below a constant, which is its docstring."""
    after = body[position + 1] if position + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return after.value.value
    return ""


def doc_lines(docstring: str | None) -> list[str]:
    """Return the first line of a docstring, as a docstring."""
    summary = cleandoc(docstring or "").partition("\n\n")[0].replace("\n", " ").replace("\\", "\\\\")
    return [f'"""{summary}"""'] if summary else []


def constant_line(module: str, node: Definition) -> str:
    assert isinstance(node, (ast.Assign, ast.AnnAssign))
    text = text_of(module, node)
    if node.value is None or ("\n" not in text and len(text_of(module, node.value).strip()) <= MOST_OF_A_VALUE):
        return text
    annotation = f": {text_of(module, node.annotation).strip()}" if isinstance(node, ast.AnnAssign) else ""
    return f"{assigned(node)}{annotation} = ..."


def header(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the source from `def` to the colon, without comments."""
    source, first = lines_of_source(module), node.body[0]
    lines = [re.sub(r"  #.*", "", line.decode()) for line in source[node.lineno - 1 : first.lineno - 1]]
    if lines:
        return dedent("".join(lines)).partition("\n\n")[0].rstrip()
    return source[node.lineno - 1][: first.col_offset].decode().strip()


def function_lines(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    decorators = [text_of(module, each).strip() for each in node.decorator_list]
    shown = [f"@{name}" for name in decorators if name in DECORATORS]
    docs = doc_lines(ast.get_docstring(node))
    head = header(module, node)
    return [*shown, *([head, indent(docs[0], "    ")] if docs else [f"{head} ..."])]


def class_lines(module: str, node: ast.ClassDef) -> list[str]:
    bases = [text_of(module, base).strip() for base in node.bases]
    public = ", ".join(base for base in bases if not base.startswith(("_", "Generic")))
    decorators = [text_of(module, each).strip() for each in node.decorator_list]
    body = [line for lines in members(module, node).values() for line in lines]
    docs = doc_lines(ast.get_docstring(node))
    return [
        *(f"@{text}" for text in decorators if text.startswith("dataclass")),
        f"class {node.name}({public}):" if public else f"class {node.name}:",
        indent("\n".join([*docs, *body] or ["..."]), "    "),
    ]


def members(module: str, node: ast.ClassDef) -> dict[str, list[str]]:
    """Return the lines of each public member: the class's own first, then those inherited from the package."""
    described = attributes_of(ast.get_docstring(node) or "")
    inherited = inherited_members(module, node)
    fields: dict[str, list[str]] = {}
    methods: dict[str, list[str]] = {}
    for position, each in enumerate(node.body):
        name = assigned(each)
        if name in FORMS and module.startswith("pytest_kvmock.values.programs."):
            continue
        if name and not name.startswith("_"):
            docs = doc_lines(string_after(node.body, position) or described.get(name))
            fields[name] = [constant_line(module, each), *docs]  # type: ignore[arg-type]  # `assigned` has shown it
        elif isinstance(each, FUNCTIONS) and is_shown(each):
            methods.setdefault(each.name, function_lines(module, each))
    for name, text in described.items():
        if name not in fields and name not in methods:
            declared = inherited[name][0] if name in inherited else f"{name}{type_of(module, node, name)}"
            fields[name] = [declared, *doc_lines(text)]
    constructors = {name: methods[name] for name in SHOWN_SPECIALS if name in methods}
    own = {**fields, **constructors, **methods}
    return own | {name: lines for name, lines in inherited.items() if name not in own}


def inherited_members(module: str, node: ast.ClassDef) -> dict[str, list[str]]:
    """Return the members of a class's bases in the package; the first of a name counts."""
    found: dict[str, list[str]] = {}
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        origin = find(module, plain.id) if isinstance(plain, ast.Name) else None
        if origin is not None and isinstance(origin[1], ast.ClassDef):
            found = members(origin[0], origin[1]) | found
    return found


def is_shown(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the site would show a method: a constructor, or a public one with a docstring."""
    if method.name.startswith("_"):
        return method.name in SHOWN_SPECIALS
    return ast.get_docstring(method) is not None


def attributes_of(docstring: str) -> dict[str, str]:
    """Return the first sentence of each entry under `Attributes:`."""
    section = re.search(r"^Attributes:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section[1], re.MULTILINE) if section else []
    return {name: re.split(r"(?<=\.) ", " ".join(text.split()))[0] for name, text in entries}


def type_of(module: str, node: ast.ClassDef, name: str) -> str:
    """Return the annotation of an attribute that a method sets, with its colon, or an empty string if the source has
    none.
    """
    values: dict[str, ast.expr | None] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Attribute) and each.target.attr == name:
            return f": {text_of(module, each.annotation).strip()}"
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            values.setdefault(each.attr, None)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute):
            values[each.targets[0].attr] = values.get(each.targets[0].attr) or each.value
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for argument in (*method.args.args, *method.args.kwonlyargs):
                if argument.arg == name and argument.annotation is not None:
                    return f": {text_of(module, argument.annotation).strip()}"
    assert name in values, f"{node.name} has no attribute {name}, which its docstring describes"
    value = values[name]
    if isinstance(value, ast.Call) and re.fullmatch(r"[A-Z]\w+", called := ast.unparse(value.func)):
        return f": {called}"
    return f": {type(value.value).__name__}" if isinstance(value, ast.Constant) and value.value is not None else ""
