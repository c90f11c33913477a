"""Tables that fit their width: text folds, numbers stay whole, and what still does not fit becomes one record a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from refitd.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

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
CUT = 8  # likewise, of a table that is cut
KEPT = 4  # columns that a table which is cut keeps
_GAP = 2  # cells between columns


@dataclass(frozen=True)
class Grid:
    """A table for a console. A column named ">..." holds numbers; words that are states get their colour."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_cut: bool = False  # one line a row: the last columns are left out, text loses its middle

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
        while sum(whole) > room:  # the widest of those that may shrink does
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
    """Return a table. Control characters in what other processes say are escaped."""
    cells = tuple(tuple(map(printable, row)) for row in rows)
    return Grid(printable(title), tuple(map(printable, columns)), cells, is_cut)
