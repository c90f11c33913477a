"""The live bar of a running swap, on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from refitd.protocol.reports import SwapProgress


@contextmanager
def swap_bar(model: str) -> Iterator[Callable[[SwapProgress], None] | None]:
    """Yield what `Client.swap` takes as on_progress; None where nobody watches. The bar goes at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[members]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{model}: asking", total=None, members="")

        def show(event: SwapProgress) -> None:
            progress.update(
                task,
                description=f"{event.model} v{event.version}: {event.phase}",
                total=event.bytes_total or None,
                completed=event.bytes_done,
                members=f"{event.members_done}/{event.members_total} ranks" if event.members_total else "",
            )

        yield show
