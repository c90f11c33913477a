"""Print figures of the code's size as a table, or as JSON."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# The classes that describe one target rank, by process: (file pattern, class).
RANKS = {
    "coordinator": ("coordinator/**/*.py", "Member"),
    "daemon": ("daemon/**/*.py", "LocalMember"),
    "client": ("client/**/*.py", "CommitState"),
}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="scripts/figures", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--swap", action="store_true", help="run one swap and count the functions it passes")
    parser.add_argument("--functions", action="store_true", help="list these functions in order (with --swap)")
    parser.add_argument("--root", type=Path, default=ROOT, help="measure the checkout in this folder (not with --swap)")
    given = parser.parse_args()
    found = measured(given.root)
    if given.swap:
        from tests.figures.traced_swap import run

        rows = run()
        found["functions of a swap"] = len({(r["process"], r["file"], r["function"]) for r in rows})
        found["files of a swap"] = len({r["file"] for r in rows})
        found["calls of a swap"] = sum(r["calls"] for r in rows)
        if given.functions:
            for row in rows:
                print(f"{row['process']:12} {row['file']:40} {row['function']:60} {row['calls']}")
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:58} {value}")
    return 0


def measured(root: Path) -> dict[str, Any]:
    """Return each figure of the checkout in `root`, by name."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / "refitd").rglob("*.py"))}
    found: dict[str, Any] = {}
    for process, (pattern, name) in RANKS.items():
        found[f"fields of a target rank, {process}"] = _fields(root / "refitd", pattern, name)
    found["message types"] = len(_messages(trees))
    found["callback parameters in refitd/"] = sum(map(_callbacks, trees.values()))
    found.update(_register_target(trees))
    found["files in refitd/"] = len(trees)
    found["files with one importer"] = _imported_once(root, trees)
    found["lines in refitd/"] = _lines(root / "refitd")
    found["lines in cli/"] = _lines(root / "cli")
    found["lines in tests/"] = _lines(root / "tests")
    pages = [path for path in (root / "docs").glob("*.md")]
    found["pages in docs/"] = len(pages)
    for folder in ("README.md", "docs", "refitd", "cli", "tests"):
        words, rate = _plain(root, folder)
        found[f"words in {folder}"] = words
        found[f"stopping constructions per 1,000 words, {folder}"] = rate
    return found


def _fields(folder: Path, pattern: str, name: str) -> int | str:
    """Return how many attributes a class declares, or sets in `__init__`."""
    for path in folder.glob(pattern):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == name:
                declared = {
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        declared |= {
                            n.attr
                            for n in ast.walk(method)
                            if isinstance(n, ast.Attribute)
                            and isinstance(n.ctx, ast.Store)
                            and getattr(n.value, "id", "") == "self"
                        }
                return len(declared)
    return f"no class {name}"


def _messages(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the classes that derive from Message, directly or not."""
    bases: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {
                    b.id if isinstance(b, ast.Name) else b.attr
                    for b in node.bases
                    if isinstance(b, ast.Name | ast.Attribute)
                }
                bases.setdefault(node.name, set()).update(names)
    found = {"Message"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found - {"Message"}


def _callbacks(tree: ast.Module) -> int:
    """Return how many parameters of functions are annotated as Callable."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    parameters = [a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return sum(a.annotation is not None and "Callable" in ast.unparse(a.annotation) for a in parameters)


def _register_target(trees: dict[Path, ast.Module]) -> dict[str, Any]:
    for path, tree in trees.items():
        if path.parent.name != "client":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "register_target":
                branches = sum(
                    isinstance(
                        n, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.IfExp | ast.comprehension | ast.Assert
                    )
                    + (len(n.values) - 1 if isinstance(n, ast.BoolOp) else 0)
                    for n in ast.walk(node)
                )
                arguments = len(node.args.args) + len(node.args.kwonlyargs) - 1
                return {
                    "register_target: parameters": arguments,
                    "register_target: lines": (node.end_lineno or 0) - node.lineno + 1,
                    "register_target: complexity": branches + 1,
                }
    return {"register_target: parameters": "not found"}


def _imported_once(root: Path, trees: dict[Path, ast.Module]) -> int:
    """Return how many modules of refitd/ exactly one other module of refitd/ or cli/ imports."""
    names = {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in trees}
    importers: Counter[str] = Counter()
    for path in (*trees, *(root / "cli").rglob("*.py")):
        here = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        seen = set()
        for node in ast.walk(trees.get(path) or ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                seen |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                seen |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        importers.update((seen & names) - {here})
    return sum(importers[name] == 1 for name in names)


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def _plain(root: Path, path: str) -> tuple[int, float]:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts/plain"), str(root / path)], capture_output=True, text=True, check=True
    )
    found = re.match(r"(\d+) words, ([\d.]+)", ran.stdout)
    assert found is not None, ran.stdout
    return int(found[1]), float(found[2])


if __name__ == "__main__":
    sys.exit(main())
