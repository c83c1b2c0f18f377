"""One-line mutants of a module: plausible mistakes, one change each.

The operators leave alone what no test can or should distinguish: docstrings, annotations, `__repr__`, `__slots__`,
decorators, code only for type checkers, asserts, which tell mypy what an earlier line has shown, and unreachable lines
marked `pragma: no cover`. They leave texts alone too: tests compare whole messages, and a misspelt word is no bug of
the verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitOr: (r"\|", "&"),
    ast.BitAnd: ("&", "|"),
}
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "reversed": "list", "sorted": "list"}
EMPTY = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "str": '""', "frozenset": "frozenset()"}
"""The value returned in place of another, by the first word of the annotation; None for other annotations."""


class Mutant(NamedTuple):
    """A change in one place.

    Attributes:
        file: the module, as a path below the root.
        line: the first line that changes, from 1.
        operator: the kind of change.
        start: offset in the module at which the changed text begins.
        stop: offset at which it ends.
        text: the replacement.
        lines: the lines whose execution runs the changed code; empty: it runs when the module is imported.
        old: the first changed line before the change, without its indentation.
        new: the same line after the change.
    """

    file: str
    line: int
    operator: str
    start: int
    stop: int
    text: str
    lines: range
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the module with the change."""
        return source[: self.start] + self.text + source[self.stop :]


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a module in the order of their places, without duplicates."""
    found = {(change.start, change.stop, change.text): change for change in _Finder(file, source).find()}
    return sorted(found.values(), key=lambda each: (each.start, each.stop, each.operator, each.text))


class _Finder:
    """Walks a module and yields its mutants."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = range(0)
        self.returns = ""

    def find(self) -> Iterator[Mutant]:
        unreached = {n for n, line in enumerate(self.source.splitlines(), 1) if "# pragma: no cover" in line}
        for mutant in self._body(self.tree.body):
            if mutant.line not in unreached:
                yield mutant

    # ----------------------------------------------------------------------------------------------- places

    def _at(self, line: int, column: int) -> int:
        """Return the offset of a place; columns of `ast` count bytes."""
        begin = self.starts[line - 1]
        text = self.source[begin : self.starts[line]]
        return begin + len(text.encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, stop = self._span(node)
        return self.source[start:stop]

    def _mutant(self, operator: str, start: int, stop: int, text: str) -> Mutant:
        line = self.source.count("\n", 0, start) + 1
        begin, end = self.source.rfind("\n", 0, start) + 1, self.starts[self.source.count("\n", 0, stop) + 1]
        old = self.source[begin:end].splitlines()[0]
        new = (self.source[begin:start] + text + self.source[stop:end]).splitlines()[0]
        return Mutant(self.file, line, operator, start, stop, text, self.lines, old.strip(), new.strip())

    def _between(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        """Exchange the operator between two expressions."""
        start, stop = self._span(left)[1], self._span(right)[0]
        # Parentheses may be between them too, but no comment.
        found = re.search(rf"(?<![\w<>=!*/]){old}(?![\w<>=*/])", self.source[start:stop])
        if found:
            yield self._mutant(operator, start + found.start(), start + found.end(), new)

    # ------------------------------------------------------------------------------------------- statements

    def _body(self, body: list[ast.stmt]) -> Iterator[Mutant]:
        for node in body:
            yield from self._statement(node)

    def _statement(self, node: ast.stmt) -> Iterator[Mutant]:
        outer = self.lines
        if outer:  # in a function
            last = node.end_lineno
            if isinstance(node, (ast.If, ast.While, ast.With)):
                last = node.body[0].lineno - 1
            elif isinstance(node, ast.For):
                last = node.iter.end_lineno
            assert last is not None
            self.lines = range(node.lineno, max(last, node.lineno) + 1)
        yield from self._kind(node)
        self.lines = outer

    def _kind(self, node: ast.stmt) -> Iterator[Mutant]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._function(node)
            case ast.ClassDef():
                yield from self._body(node.body)
            case ast.If() if "TYPE_CHECKING" in self._text(node.test):
                return
            case ast.If() | ast.While():
                yield from self._condition(node.test)
                yield from self._body([*node.body, *node.orelse])
            case ast.For():
                yield from self._expression(node.iter)
                yield from self._body([*node.body, *node.orelse])
            case ast.With():
                for item in node.items:
                    yield from self._expression(item.context_expr)
                yield from self._body(node.body)
            case ast.Try():
                yield from self._body(node.body)
                for handler in node.handlers:
                    yield from self._body(handler.body)
                yield from self._body([*node.orelse, *node.finalbody])
            case ast.Expr(value=ast.Constant()):
                return  # a docstring
            case ast.Break():
                yield self._mutant("loop", *self._span(node), "continue")
            case ast.Continue():
                yield self._mutant("loop", *self._span(node), "break")
            case ast.Return(value=ast.expr() as value):
                yield from self._returned(value)
                yield from self._expression(value)
            case ast.Raise() | ast.Delete():
                yield self._mutant("removal", *self._span(node), "pass")
            case ast.Expr(value=value):
                if not isinstance(value, (ast.Yield, ast.YieldFrom)):
                    yield self._mutant("removal", *self._span(node), "pass")
                yield from self._expression(value)
            case ast.AugAssign():
                yield self._mutant("removal", *self._span(node), "pass")
                yield from self._expression(node.value)
            case ast.Assign() | ast.AnnAssign():
                yield from self._assigned(node)

    def _assigned(self, node: ast.Assign | ast.AnnAssign) -> Iterator[Mutant]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)
        if node.value is None or alias or names & {"__slots__", "__tracebackhide__", "__all__"}:
            return
        if self.lines and not isinstance(node.value, ast.Constant) and "yield" not in self._text(node.value):
            attribute = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)
            if attribute:  # without the assignment of a name, the next reader fails in any case
                yield self._mutant("removal", *self._span(node), "pass")
        yield from self._expression(node.value)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutant]:
        if node.name == "__repr__" or any("abstractmethod" in ast.unparse(each) for each in node.decorator_list):
            return
        body = node.body
        assert body[-1].end_lineno is not None
        outer, self.lines = (self.lines, self.returns), range(body[0].lineno, body[-1].end_lineno + 1)
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            for mutant in self._expression(default):
                yield mutant._replace(operator="default")
        self.returns = "" if node.returns is None else ast.unparse(node.returns)
        yield from self._body(body)
        self.lines, self.returns = outer

    def _returned(self, value: ast.expr) -> Iterator[Mutant]:
        word = re.match(r"\w*", self.returns)
        kind = word.group() if word else ""
        if kind in {"bool", "TypeGuard"}:
            yield self._mutant("return", *self._span(value), f"not ({self._text(value)})")
        else:
            new = EMPTY.get(kind, "None")
            if new != self._text(value):
                yield self._mutant("return", *self._span(value), new)

    # ------------------------------------------------------------------------------------------ expressions

    def _condition(self, test: ast.expr) -> Iterator[Mutant]:
        negated = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
        one = isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in COMPARISONS
        exact = one and not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))  # type: ignore[attr-defined]
        if negated is None and not exact:  # exact comparisons are negated by their own operators
            yield self._mutant("negation", *self._span(test), f"not ({self._text(test)})")
        yield from self._expression(test)

    def _expression(self, node: ast.expr) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr() | ast.Lambda(body=ast.Constant()):
                return  # a text
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
                    yield from self._between("comparison", left, right, *COMPARISONS[type(op)])
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._between("and-or", left, right, old, new)
            case ast.UnaryOp(op=ast.Not()):
                yield self._mutant("not", *self._span(node), f"({self._text(node.operand)})")
            case ast.BinOp() if self.lines and type(node.op) in ARITHMETIC and not self._is_text(node):
                yield from self._between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
            case ast.IfExp():
                yield from self._condition(node.test)
                yield from self._expression(node.body)
                yield from self._expression(node.orelse)
                return
            case ast.Constant(value=bool() as value):
                yield self._mutant("constant", *self._span(node), repr(not value))
            case ast.Constant(value=int() as value):
                yield self._mutant("constant", *self._span(node), repr(value + 1))
                if value > 1:
                    yield self._mutant("constant", *self._span(node), repr(value - 1))
            case ast.Call(func=ast.Name(id=name)) if name in NAMES and not (name == "sorted" and node.keywords):
                if not any(keyword.arg == "default" for keyword in node.keywords) or name in {"min", "max"}:
                    yield self._mutant("name", *self._span(node.func), NAMES[name])
        for child in ast.iter_child_nodes(node):
            yield from self._child(child)

    def _child(self, child: ast.AST) -> Iterator[Mutant]:
        if isinstance(child, ast.comprehension):
            yield from self._expression(child.iter)
            for test in child.ifs:
                yield from self._condition(test)
        elif isinstance(child, ast.keyword):
            yield from self._expression(child.value)
        elif isinstance(child, ast.expr):
            yield from self._expression(child)
        elif isinstance(child, ast.Slice):
            for part in (child.lower, child.upper, child.step):
                if part is not None:
                    yield from self._expression(part)

    @staticmethod
    def _is_text(node: ast.BinOp) -> bool:
        sides = (node.left, node.right)
        return any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in sides)
