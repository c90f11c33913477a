"""How results are printed: JSON for programs; tables that fit their width, units and progress bars for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from refitd.protocol.reports import SwapProgress
from refitd.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import ProgressColumn


LEAST_WIDTH = 30  # cells; the minimum for COLUMNS
PIPED_WIDTH, MOST_WIDTH = 120, 100_000  # of a table in a file or a pipe, and the maximum for COLUMNS


def to_json(value: Any) -> dict[str, Any]:
    """Return a report as plain dictionaries, lists, strings and numbers."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def print_json(value: object) -> None:
    """Print a report, or an object of reports, on one line of stdout."""
    click.echo(json.dumps(msgspec.to_builtins(value)))  # ASCII: JSON escapes all other characters


def say(*lines: str, err: bool = False) -> None:
    """Print lines on stdout or stderr, with control characters escaped."""
    for line in lines:
        click.echo(printable(line), err=err)


def json_on_terminal(text: str) -> str:
    """Return indented JSON with control characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def takes_escapes(stream: TextIO) -> bool:
    """Return whether escape codes may go to a stream: it is a terminal, and $NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def console() -> Console:
    """Return a console on stdout, $COLUMNS or the terminal wide; it prints text as it is (reasons hold brackets)."""
    from rich.console import Console

    width: int | None = None if sys.stdout.isatty() else PIPED_WIDTH  # None: as the terminal, which may change
    if (wanted := os.environ.get("COLUMNS", "")).isdecimal() and int(wanted):
        width = max(LEAST_WIDTH, min(int(wanted), MOST_WIDTH))
    plain = None if takes_escapes(sys.stdout) else False
    return Console(width=width, markup=False, emoji=False, highlight=False, force_terminal=plain)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table; a column named ">..." holds numbers."""
    console().print(grid(title, columns, rows))


def size(nbytes: float) -> str:
    """Return bytes for people, in powers of 1000 like every rate here: 1.07 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:  # 1000 after rounding belongs to the next unit
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} TB"


def counted(count: int, what: str) -> str:
    """Return a count with its noun: 1 node, 2 nodes."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration for people: 850 us, 12.3 ms, 1.23 s, 75 s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds:,.0f} s"


def age(seconds: float) -> str:
    """Return how long ago something was, for people: 35 s, 12 min, 5 h, 3 d."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:,.0f} d"


def rate(nbytes: float, seconds: float) -> str:
    """Return bytes per second for people; "-" where no time was measured."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def share(part: float | None) -> str:
    """Return a share for people: 1.02%, and "-" where it is not known."""
    return "-" if part is None else f"{100 * part:.3g}%"


def version(number: int | None) -> str:
    """Return a version as text, or "-" for None."""
    return "-" if number is None else str(number)


def versions(numbers: Iterable[int]) -> str:
    """Return versions as a list, or "-" if it is empty."""
    return ", ".join(map(str, numbers)) or "-"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks for people: "0-7, 16, 24-31"; from MOST_RUNS runs on, how many more there are."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:MOST_RUNS]]
    more = sum(high - low + 1 for low, high in runs[MOST_RUNS:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


MOST_RUNS = 4
_NAME = 24  # cells of a model's name beside its bar


def bar_columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a swap's bar; its task has the fields that `bar_fields` gives."""
    from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TransferSpeedColumn
    from rich.table import Column

    class Rate(TransferSpeedColumn):
        """Bytes a second, once that is known."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.finished_speed or task.speed else Text()

    return (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        DownloadColumn(table_column=Column(no_wrap=True)),
        Rate(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[members]}", markup=False, table_column=Column(no_wrap=True)),
    )


def bar_fields(event: SwapProgress) -> dict[str, Any]:
    """Return a swap's bar fields, as `Progress.update` takes them."""
    return {
        "description": f"{shortened(printable(event.model), _NAME)} v{event.version}: {printable(event.phase)}",
        "total": event.bytes_total or None,
        "completed": event.bytes_done,
        "members": f"{event.members_done}/{event.members_total} ranks" if event.members_total else "",
    }


@contextmanager
def swap_bar(model: str) -> Iterator[Callable[[SwapProgress], None] | None]:
    """Yield the on_progress callback for `Client.swap`, None without a terminal. The bar disappears at the end."""
    if not takes_escapes(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    with Progress(*bar_columns(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(f"{model}: asking"), total=None, members="")
        yield lambda event: progress.update(task, **bar_fields(event))


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], object]]:
    """Yield the on_progress callback for bytes that are read or written. The bar disappears at the end."""
    if not takes_escapes(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


STYLES = {
    "committed": "green",
    "serving": "green",
    "proven": "green",
    "ok": "green",
    "up": "green",
    "staged": "yellow",
    "behind": "yellow",
    "waiting": "yellow",
    "late": "yellow",
    "warn": "yellow",
    "unknown": "yellow",
    "down": "yellow",
    "aborted": "yellow",
    "incomplete": "red",
    "lost": "red",
    "failed": "red",
    "differs": "red",
    "fail": "red",
}

FOLDED = 16  # cells below which a column of text is not folded
CUT = 8  # the minimum in a table with cut text
KEPT = 4  # columns that a table which is cut keeps
_GAP = 2  # cells between columns


@dataclass(frozen=True)
class Grid:
    """A table for a console. A column named ">..." holds numbers; words that are states get their colour."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_cut: bool = False  # one line a row: the last columns are dropped, text loses its middle

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table or, if the width is too small for it, its records."""
        widths = self.widths(options.max_width)
        is_whole = widths == self._whole()
        if self.is_cut and len(self.columns) > 1 and (widths is None or (len(self.columns) > KEPT and not is_whole)):
            fewer = replace(self, columns=self.columns[:-1], rows=tuple(row[:-1] for row in self.rows))
            yield from fewer.__rich_console__(console, options)
            return
        if widths is None:
            yield from self._records()
            return
        if self.title:
            yield Text(self.title, style="bold")
        yield self._table(widths)

    def widths(self, available: int) -> list[int] | None:
        """Return the columns' widths in cells, None if the table does not fit `available`."""
        whole = self._whole()
        least = [
            width if column.startswith(">") else min(width, max(CUT if self.is_cut else FOLDED, cell_len(name)))
            for width, column, name in zip(whole, self.columns, self._names, strict=True)
        ]
        room = available - _GAP * (len(whole) - 1)
        if sum(least) > room:
            return None
        while sum(whole) > room:  # shrink the widest column that may shrink
            whole[max((i for i in range(len(whole)) if whole[i] > least[i]), key=lambda i: whole[i])] -= 1
        return whole

    def _whole(self) -> list[int]:
        return [max(map(cell_len, cells)) for cells in zip(self._names, *self.rows, strict=True)]

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(column.removeprefix(">") for column in self.columns)

    def _table(self, widths: Sequence[int]) -> Table:
        made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, _GAP - 1, 0, 0), pad_edge=False)
        for name, column, width in zip(self._names, self.columns, widths, strict=True):
            made.add_column(name, justify="right" if column.startswith(">") else "left", overflow="fold", width=width)
        for row in self.rows:
            cells = map(shortened, row, widths) if self.is_cut else row
            made.add_row(*map(_cell, cells))
        return made

    def _records(self) -> Iterator[Text]:
        if self.title:
            yield Text(self.title, style="bold")
        width = max(map(cell_len, self._names))
        for row in self.rows:
            for i, (name, cell) in enumerate(zip(self._names, row, strict=True)):
                yield Text.assemble("- " if i == 0 else "  ", (name.ljust(width), "dim"), "  ", _cell(cell))


def _cell(text: str) -> Text:
    return Text(text, style=STYLES.get(text, ""))


def shortened(text: str, width: int) -> str:
    """Return text without its middle if it takes more than `width` cells; names often differ at their end."""
    if cell_len(text) <= width:
        return text
    half = max(0, width - 3) // 2
    return f"{set_cell_size(text, half)}...{text[-half:] if half else ''}"[:width]


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, is_cut: bool = False) -> Grid:
    """Return a table. Control characters in text of other processes are escaped."""
    cells = tuple(tuple(map(printable, row)) for row in rows)
    return Grid(printable(title), tuple(map(printable, columns)), cells, is_cut)
