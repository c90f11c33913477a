"""The page docs/api.md: the exports of `refitd`, from the source text alone. No module is imported, not even torch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "refitd"
WIDTH = 100

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Found: TypeAlias = tuple[str, ast.stmt]  # a module and one of its definitions


def api(made: str) -> str:
    """Return the page; `made` names the command that makes it."""
    parts = [
        f"# Python API\n\n{made}\n\nThe names that `import refitd` exports. [use.md](use.md) explains their use. "
        "Names that begin with `_`, and modules that are not listed, may change at any time."
    ]
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Modules": [], "Other names": []}
    for module, name in exports():
        where, found = definition(module, name)
        match found:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                groups["Functions"].append(entry("###", name, found))
            case ast.ClassDef() if where == "refitd.errors" or name == "SwapFailed":
                groups["Errors"].append(entry("###", name, found))
            case ast.ClassDef():
                groups["Classes"].append("\n\n".join(class_(where, found)))
            case ast.Expr():
                groups["Modules"].append("\n\n".join([f"### {where}", *inside(where)]))
            case _:
                groups["Other names"].append(f"### {name}{block('python', ast.unparse(found))}")
    for title, entries in groups.items():
        parts += [f"## {title}", *sorted(entries)]
    return "\n\n".join(parts) + "\n"


def exports() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every export of the stub."""
    for node in tree("refitd.__init__", ".pyi").body:
        if isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ("refitd", node.module)))
            yield from ((module, alias.name) for alias in node.names)


def inside(module: str) -> Iterator[str]:
    """Yield a module's public names: its functions, and the imports in its `__all__` or in a package's __init__."""
    is_package = PACKAGE.joinpath(*module.split(".")[1:]).is_dir()
    named = [
        node.value for node in tree(module).body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)
    ]
    offered = ast.literal_eval(named[0]) if named else []
    for node in tree(module).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                yield entry("####", f"{module}.{name}", node)
            case ast.ImportFrom(module=str(other)) if other.startswith("refitd."):
                for alias in node.names:
                    if not is_package and alias.name not in offered:
                        continue
                    where, found = definition(other, alias.name)
                    if isinstance(found, ast.ClassDef):
                        yield from class_(where, found, "####", f"{module}.{alias.name}")
                    elif isinstance(found, Function):
                        yield entry("####", f"{module}.{alias.name}", found)


@cache
def tree(module: str, suffix: str = ".py") -> ast.Module:
    """Return a module's syntax tree."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__" if path.is_dir() else path
    return ast.parse(path.with_suffix(suffix).read_text())


def definition(module: str, name: str) -> Found:
    """Return the module that defines a name, followed through imports, and its definition (an Expr for a module)."""
    for node in tree(module).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=assigned)]) | ast.AnnAssign(target=ast.Name(id=assigned)):
                if assigned == name:
                    return module, node
            case ast.ImportFrom(module=str(other)) if other.startswith("refitd.") and other != module:
                if any((alias.asname or alias.name) == name for alias in node.names):
                    return definition(other, name)
    inner = PACKAGE.joinpath(*module.split(".")[1:], name)
    if inner.is_dir() or inner.with_suffix(".py").is_file():
        return f"{module}.{name}", ast.Expr(ast.Constant(name))
    raise LookupError(f"{module} defines no {name}")


def class_(module: str, found: ast.ClassDef, level: str = "###", title: str = "") -> Iterator[str]:
    """Yield a class and its public methods, including those inherited from bases in this package."""
    yield entry(level, title or found.name, found)
    seen = set()
    for owner in lineage(module, found):
        for node in owner.body:
            if isinstance(node, Function) and not node.name.startswith("_") and node.name not in seen:
                seen.add(node.name)
                if ast.get_docstring(node):
                    yield entry(f"{level}#", f"{title or found.name}.{node.name}", node)


def lineage(module: str, found: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield a class and its bases in this package."""
    yield found
    for base in found.bases:
        if isinstance(base, ast.Name):
            try:
                where, node = definition(module, base.id)
            except LookupError:
                continue
            if isinstance(node, ast.ClassDef):
                yield from lineage(where, node)


def entry(level: str, title: str, node: Function | ast.ClassDef) -> str:
    """Return a heading, the signature or the base classes, and the docstring."""
    if isinstance(node, ast.ClassDef):
        fields = [
            part for part in node.body if isinstance(part, ast.AnnAssign) and not ast.unparse(part).startswith("_")
        ]
        shape = ast.ClassDef(node.name, node.bases, [], fields or [ast.Expr(ast.Constant(...))], [])
        code = block("python", ast.unparse(ast.fix_missing_locations(shape))) if node.bases or fields else ""
    else:
        code = block("python", signature(node))
    words = ast.get_docstring(node) or ""
    return f"{level} {title}{code}" + (block("text", inspect.cleandoc(words)) if words else "")


def signature(node: Function) -> str:
    """Return the signature of a function; a long one has a line for each parameter."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    pairs = [*zip(plain, [None] * (len(plain) - len(given.defaults)) + given.defaults, strict=True)]
    words = [_parameter(arg, default) for arg, default in pairs]
    if given.vararg:
        words.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        words.append("*")
    words += [_parameter(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        words.append(f"**{_parameter(given.kwarg, None)}")
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    end = f" -> {ast.unparse(node.returns)}: ..." if node.returns else ": ..."
    before = "@property\n" if any(ast.unparse(one) == "property" for one in node.decorator_list) else ""
    line = f"{kind} {node.name}({', '.join(words)}){end}"
    if len(line) > WIDTH:
        line = f"{kind} {node.name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    return before + line


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if arg.annotation else "="
    return ast.unparse(arg) + (f"{equals}{ast.unparse(default)}" if default else "")


def block(language: str, text: str) -> str:
    """Return a code block."""
    return f"\n\n```{language}\n{text}\n```"
