"""Find the places of a module that can be mutated, and make the mutated text.

A place is one edit of the source text. All other text keeps its line numbers. Annotations, decorators,
class headers, docstrings, and texts of errors and logs have no places.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
    ast.Div: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
}

# Calls whose arguments are for people.
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn", "note", "print", "echo", "cast"}

# GPUs, their transports and frameworks are not on the machine that runs the tests; a prediction moves no weights.
SKIPPED = re.compile(r"cuda|nixl|nvshmem|nccl|triton|device|^gpu|simulate\.py$|testing/|__main__|\.pyi$")


class Place(NamedTuple):
    """One mutation: the text between two offsets (in UTF-8 bytes) becomes another one."""

    file: str
    function: str  # its qualified name, as a code object has it; "<module>" outside functions
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        """Return the place and the change."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {before[:90]} -> {after[:90]}"


class _Finder:
    """Walks one module and collects its places."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.places = file, source, list[Place]()
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str, function: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = self.source[start:end].decode()
        if before != after:
            self.places.append(Place(self.file, function, node.lineno, kind, start, end, before, after))

    def body(self, statements: list[ast.stmt], function: str, path: str) -> None:
        for statement in statements:
            self.statement(statement, function, path)

    def statement(self, node: ast.stmt, function: str, path: str) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                name = path + node.name
                for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.expression(default, function)
                self.body(node.body, name, f"{name}.<locals>.")
                return
            case ast.ClassDef():
                self.body(node.body, function, f"{path}{node.name}.")
                return
            case ast.Import() | ast.ImportFrom() | ast.Assert():
                return
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                return
            case ast.Raise():
                self.add(node, "removed raise", "pass", function)
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr(value=ast.Call()):
                if not _is_for_people(node.value):
                    self.add(node, "removed call", "pass", function)
            case ast.Assign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if all(isinstance(target, ast.Attribute) for target in targets):
                    self.add(node, "removed assignment", "pass", function)
            case _:
                pass
        for field, value in ast.iter_fields(node):
            if field == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                match child:
                    case ast.Return() if field == "body" and isinstance(node, ast.If):
                        self.add(child, "removed return", "pass", function)
                        self.statement(child, function, path)
                    case ast.stmt():
                        self.statement(child, function, path)
                    case ast.expr():
                        if field == "test":
                            self.add(child, "negated condition", f"(not ({ast.unparse(child)}))", function)
                        self.expression(child, function)
                    case ast.ExceptHandler():
                        self.body(child.body, function, path)
                    case ast.match_case():
                        if child.guard is not None:
                            self.add(child.guard, "negated condition", f"not ({ast.unparse(child.guard)})", function)
                            self.expression(child.guard, function)
                        self.body(child.body, function, path)
                    case ast.withitem():
                        self.expression(child.context_expr, function)

    def expression(self, node: ast.expr, function: str) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.Call() if _is_for_people(node):
                return
            case ast.Lambda():
                self.expression(node.body, function)
                return
            case ast.IfExp():
                self.add(node.test, "negated condition", f"(not ({ast.unparse(node.test)}))", function)
            case ast.Compare(ops=[operator, *_]):
                other = ast.Compare(node.left, [COMPARISONS[type(operator)], *node.ops[1:]], node.comparators)
                self.add(node, "comparison", f"({ast.unparse(other)})", function)
            case ast.BoolOp():
                swapped = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
                self.add(node, "and/or", f"({ast.unparse(swapped)})", function)
            case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text_or_type(node):
                other_sign = ast.BinOp(node.left, ARITHMETIC[type(node.op)], node.right)
                self.add(node, "arithmetic", f"({ast.unparse(other_sign)})", function)
            case ast.Constant(value=bool(value)):
                self.add(node, "constant", str(not value), function)
            case ast.Constant(value=int(number)):
                self.add(node, "constant", str(number + 1), function)
            case ast.Constant(value=str(text)) if not re.search(r"\s", text):  # a text with spaces is for people
                self.add(node, "constant", repr(text + "x"), function)
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass" | "getattr" | "TypeVar" | "NewType")):
                pass  # any test that passes through finds these swapped
            case ast.Call(args=[first, second, *rest]) if not any(isinstance(a, ast.Starred) for a in node.args):
                swapped_call = ast.Call(node.func, [second, first, *rest], node.keywords)
                self.add(node, "swapped arguments", ast.unparse(swapped_call), function)
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.expr():
                    self.expression(child, function)
                case ast.keyword():
                    self.expression(child.value, function)
                case ast.comprehension():
                    self.expression(child.iter, function)
                    for test in child.ifs:
                        self.add(test, "negated condition", f"(not ({ast.unparse(test)}))", function)
                        self.expression(test, function)


def _is_for_people(call: ast.expr) -> bool:
    """Whether a call logs a text or makes an error."""
    if not isinstance(call, ast.Call):
        return False
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in LOGGING or name.endswith(("Error", "Refused", "Failed", "Lost", "Exception"))


def _is_text_or_type(node: ast.BinOp) -> bool:
    """Whether an operator joins texts, or types as in `int | None`."""
    types = {"None", "int", "str", "float", "bool", "bytes", "list", "dict", "tuple", "set", "object"}
    for side in (node.left, node.right):
        if isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)):
            return True
        name = ast.unparse(side).partition("[")[0].rpartition(".")[2]
        if isinstance(node.op, ast.BitOr) and (name in types or (name[:1].isupper() and not name.isupper())):
            return True
    return False


def places(file: str, source: str) -> list[Place]:
    """Return all places of a module in the order of its text."""
    finder = _Finder(file, source.encode())
    finder.body(ast.parse(source).body, "<module>", "")
    return finder.places


def mutated(source: str, place: Place) -> str:
    """Return the text of a module with one place mutated."""
    raw = source.encode()
    return (raw[: place.start] + place.after.encode() + raw[place.end :]).decode()


def choose(sources: dict[str, str], seed: int, count: int) -> Iterator[Place]:
    """Yield `count` different places: a file drawn by its lines, then one of its places.

    Args:
        sources: {path below refitd/: text}.
        seed: equal seeds choose equal places from equal sources.
        count: the number of places; fewer if the sources run out.
    """
    drawn = random.Random(seed)
    left = {file: places(file, text) for file, text in sorted(sources.items()) if not SKIPPED.search(file)}
    lines = {file: sources[file].count("\n") for file in left}
    for _ in range(count):
        left = {file: found for file, found in left.items() if found}
        if not left:
            return
        (file,) = drawn.choices(list(left), [lines[file] for file in left])
        yield left[file].pop(drawn.randrange(len(left[file])))
