"""How results are printed: JSON for programs, tables and units for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from refitd.text import printable

if TYPE_CHECKING:
    from rich.console import Console

LEAST_WIDTH = 30  # cells; whatever COLUMNS says
PIPED_WIDTH = 100_000  # a table in a file or a pipe is as wide as its text


def to_json(value: Any) -> dict[str, Any]:
    """Return a report as plain dictionaries, lists, strings and numbers."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line of stdout."""
    click.echo(json.dumps(value))  # ASCII, with whatever is not written as JSON escapes it


def say(text: str, *, err: bool = False) -> None:
    """Print one line on stdout or stderr, with control characters escaped."""
    click.echo(printable(text), err=err)


def json_on_terminal(text: str) -> str:
    """Return indented JSON with control characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def console() -> Console:
    """Return a console on stdout, $COLUMNS or the terminal wide; it prints text as it is (reasons hold brackets)."""
    from rich.console import Console

    width: int | None = None if sys.stdout.isatty() else PIPED_WIDTH  # None: as the terminal, which may change
    if (wanted := os.environ.get("COLUMNS", "")).isdecimal() and int(wanted):
        width = max(LEAST_WIDTH, min(int(wanted), PIPED_WIDTH))
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table; a column named ">..." holds numbers."""
    from refitd_cli.tables import grid

    console().print(grid(title, columns, rows))


def size(nbytes: float) -> str:
    """Return bytes for people, in powers of 1000 like every rate here: 1.07 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} TB"


def counted(count: int, what: str) -> str:
    """Return `count` and what is counted: 1 node, 2 nodes."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration for people: 850 us, 12.3 ms, 1.23 s, 75 s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds:,.0f} s"


def rate(nbytes: float, seconds: float) -> str:
    """Return bytes per second for people; "-" where no time was measured."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def share(part: float | None) -> str:
    """Return a share for people: 1.02%, and "-" where it is not known."""
    return "-" if part is None else f"{100 * part:.3g}%"


def version(number: int | None) -> str:
    """Return a version, or "-" where there is none."""
    return "-" if number is None else str(number)


def versions(numbers: Iterable[int]) -> str:
    """Return versions as a list, or "-" where there is none."""
    return ", ".join(map(str, numbers)) or "-"


def rank_ranges(ranks: Sequence[int], limit: int = 4) -> str:
    """Return ascending ranks for people: "0-7, 16, 24-31"; from `limit` runs on, how many more there are."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:limit]]
    more = sum(high - low + 1 for low, high in runs[limit:])
    return ", ".join(shown) + (f" and {more} more" if more else "")
