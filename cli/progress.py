"""The progress bars of swaps and checkpoints, shown on stderr if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from refitd.protocol.reports import SwapProgress
from refitd.text import printable

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


_NAME = 24  # cells of a model's name beside its bar


def bar_columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a swap's bar; its task has the fields that `bar_fields` gives."""
    from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TransferSpeedColumn
    from rich.table import Column
    from rich.text import Text

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
    from refitd_cli.tables import shortened

    return {
        "description": f"{shortened(printable(event.model), _NAME)} v{event.version}: {printable(event.phase)}",
        "total": event.bytes_total or None,
        "completed": event.bytes_done,
        "members": f"{event.members_done}/{event.members_total} ranks" if event.members_total else "",
    }


@contextmanager
def swap_bar(model: str) -> Iterator[Callable[[SwapProgress], None] | None]:
    """Yield the on_progress callback for `Client.swap`, None without a terminal. The bar disappears at the end."""
    if not sys.stderr.isatty():
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
    if not sys.stderr.isatty():
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
