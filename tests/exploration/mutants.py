"""Remove each row of each table and each guard, one at a time, and see which removals the exploration finds.

usage: python -m tests.exploration.mutants [--seconds S] [--kind row|guard] [--only TEXT]

A table's row is removed from the table in memory. A guard is the condition of an `if`, a conditional expression, a
`case` or a comprehension in the code of the machines; it is replaced by False, and by True. Files stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from refitd.commit import decision, lockstep, rank_state, target_state
from tests.exploration import probes
from tests.exploration.explore import Exploration
from tests.exploration.lockstep import POLLS, PollExploration
from tests.exploration.settings import SHORT
from tests.exploration.worlds import Violation

TABLES = (
    (decision, "ROWS"),
    (target_state, "STEPS"),
    (target_state, "LIVES"),
    (target_state, "LIVES_IN_PLACE"),
    (rank_state, "STEPS"),
    (rank_state, "BONDS"),
)
MACHINES = (decision, target_state, rank_state, lockstep)

# Functions that make texts for people, or reports: no rule is about them.
TEXTS = {"__str__", "__hash__", "_refusal", "_reason", "_named", "poisoned"}


PROBES, UNIT = "state probes", "unit tests"

# Tried if the exploration finds nothing.
UNITS = {
    decision: "tests/unit/test_swap_machine.py",
    target_state: "tests/unit/test_target_state.py",
    lockstep: "tests/unit/test_flip_steps.py",
}


class Mutant(NamedTuple):
    """One removal."""

    kind: str  # "row" or "guard"
    name: str
    module: ModuleType
    patch: Any  # a table, or (function name, syntax tree)


def rows() -> Iterator[Mutant]:
    """Yield a mutant for each row of each table."""
    for module, table in TABLES:
        full = dict(getattr(module, table))
        for key in full:
            event, state = key
            less = {other: row for other, row in full.items() if other != key}
            short = module.__name__.rpartition(".")[2]
            yield Mutant("row", f"{short}.{table}: {event.__name__} in {state.name}", module, (table, less))


class _Cut(ast.NodeTransformer):
    """Replaces the guard with the given number by a constant; with a number that is too large it only counts them."""

    def __init__(self, number: int, value: bool) -> None:
        self.number, self.value, self.seen, self.text = number, value, -1, ""

    def _guard(self, test: ast.expr) -> ast.expr:
        self.seen += 1
        if self.seen != self.number:
            return test
        self.text = ast.unparse(test)
        return ast.Constant(self.value)

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.ifs = [self._guard(test) for test in node.ifs]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        node.test = self._guard(node.test)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test = self._guard(node.test)
        return self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> Any:
        if node.guard is not None:
            node.guard = self._guard(node.guard)
        return self.generic_visit(node)


def functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions of a machine whose guards decide something."""
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and name not in TEXTS:
            yield value


def guards() -> Iterator[Mutant]:
    """Yield two mutants for each guard: it never holds, and it always holds."""
    for module in MACHINES:
        for function in functions(module):
            source = textwrap.dedent(inspect.getsource(function))
            for value in (False, True):
                number, texts = 0, Counter[str]()
                while True:
                    tree = ast.parse(source)
                    cut = _Cut(number, value)
                    tree = ast.fix_missing_locations(cut.visit(tree))
                    if cut.seen < number:
                        break
                    short = module.__name__.rpartition(".")[2]
                    texts[cut.text] += 1
                    text = f"{cut.text} ({texts[cut.text]})" if texts[cut.text] > 1 else cut.text
                    name = f"{short}.{function.__name__}: {text} -> {value}"
                    yield Mutant("guard", name, module, (function.__name__, tree))
                    number += 1


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Apply a mutant while the block runs."""
    module, (name, patch) = mutant.module, mutant.patch
    before = getattr(module, name)
    table = getattr(module, "ROWS", None)
    if mutant.kind == "row":
        setattr(module, name, patch)
    else:
        exec(compile(patch, f"<{mutant.name}>", "exec"), vars(module))
        if table is not None:  # its rows name functions
            changed = getattr(module, name)
            module.ROWS = {  # type: ignore[attr-defined]
                key: decision.Row(changed, row.to) if row.do is before else row for key, row in table.items()
            }
    try:
        yield
    finally:
        setattr(module, name, before)
        if table is not None:
            module.ROWS = table  # type: ignore[attr-defined]


class _Watched(dict[Any, Any]):
    """A table that notes which of its rows are looked up."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.used: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)


def used_rows() -> tuple[dict[str, set[tuple[str, str, Any]]], dict[str, float]]:
    """Return the rows that each setting looks up, and its seconds: a row that is never looked up cannot be missed."""
    found: dict[str, set[tuple[str, str, Any]]] = {}
    seconds: dict[str, float] = {}
    for name, setting in SHORT.items():
        tables = [(module, table, getattr(module, table)) for module, table in TABLES]
        # the tables of `live` are merged for ranks in place: all of their rows may be looked up there
        watched = [(module, table, _Watched(rows)) for module, table, rows in tables]
        for module, table, rows in watched:
            setattr(module, table, rows)
        result = Exploration(setting).run()
        print(f"{name}: {result}", flush=True)
        seconds[name] = result.seconds
        found[name] = {
            (module.__name__, table, key)
            for module, table, rows in watched
            for key in (rows if setting.mode.in_place and table.startswith("LIVES") else rows.used)
        }
        for module, table, rows in tables:
            setattr(module, table, rows)
    return found, seconds


def found_by(mutant: Mutant, settings: list[str], seconds: float) -> str:
    """Return the setting, or else the probes, that find a mutant, and the broken rule; "" for a survivor."""
    with applied(mutant):
        for name in (*settings, PROBES):
            try:
                if name == PROBES:
                    probes.check()
                elif name in POLLS:
                    PollExploration(POLLS[name]).run()
                else:
                    Exploration(SHORT[name]).run(seconds)
            except Violation as exc:
                return f"{name}: {exc.reason[:100]}"
            except TimeoutError:
                continue
            except Exception as exc:  # a machine that fails in another way is found, too
                return f"{name}: {type(exc).__name__}: {str(exc)[:100]}"
    return ""


def found_by_unit(mutant: Mutant) -> str:
    """Return the unit tests that find a mutant; "" if there are none, or none fails."""
    path = UNITS.get(mutant.module)
    if path is None:
        return ""
    for name in [name for name in sys.modules if name.startswith("tests.unit")]:
        del sys.modules[name]  # its values were made with the machine as it is
    with applied(mutant), contextlib.redirect_stdout(io.StringIO()):
        failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", path])
    return f"{UNIT}: {path}" if failed else ""


def main() -> None:
    """Try all mutants; print the survivors, and the share of found ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for each setting of each mutant")
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    parser.add_argument("--kind", default="", choices=("", "row", "guard"))
    asked = parser.parse_args()
    began, total, survivors = time.monotonic(), Counter[str](), Counter[str]()
    by_probes, by_unit = Counter[str](), Counter[str]()
    used, seconds = used_rows()
    for mutant in (*rows(), *guards()):
        if asked.kind not in ("", mutant.kind) or asked.only not in mutant.name:
            continue
        total[mutant.kind] += 1
        settings = list(POLLS) if mutant.module is lockstep else sorted(SHORT, key=seconds.__getitem__)
        if mutant.kind == "row":
            table, less = mutant.patch
            (key,) = getattr(mutant.module, table).keys() - less.keys()
            settings = [name for name in settings if (mutant.module.__name__, table, key) in used[name]]
        by = found_by(mutant, settings, asked.seconds) or found_by_unit(mutant)
        survivors[mutant.kind] += not by
        by_probes[mutant.kind] += by.startswith(PROBES)
        by_unit[mutant.kind] += by.startswith(UNIT)
        print(f"{'found   ' if by else 'SURVIVES'} {mutant.kind} {mutant.name}: {by}", flush=True)
    for kind, count in total.items():
        left, probed, unit = survivors[kind], by_probes[kind], by_unit[kind]
        share = 100 * (count - left) / count
        by = f"settings {count - left - probed - unit}, only state probes {probed}, only unit tests {unit}"
        print(f"{kind}s: {count - left} of {count} found ({share:.1f} %): {by}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
