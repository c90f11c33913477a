"""refitctl status, watch and models: nodes, links, models, versions and running swaps, once or refreshed."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import click
from msgspec import structs

from refitd.errors import RefusedError, TransportError
from refitd.protocol.reports import ModelStatus, StatusReport
from refitd.text import printable
from refitd_cli.output import (
    Grid,
    bar_columns,
    bar_fields,
    console,
    print_table,
    say,
    size,
    takes_escapes,
    version,
    versions,
)
from refitd_cli.session import Connection, Duration, Session, asks, model_names, node_names
from refitd_cli.view import NO_MODELS, print_parts, screen_parts, status_parts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import TaskID


RETRY_S = 1.0  # how often a daemon that is away is looked for, at least
DAY_S = 86400.0


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option(
    "--interval",
    type=Duration(min=0.1, max=DAY_S),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between refreshes.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N refreshes.  [default: Ctrl-C ends]")
@click.option(
    "--wait",
    "wait_s",
    type=Duration(min=0, max=DAY_S),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds that a daemon which was there may be away, while it is restarted.",
)
@asks
def watch(
    session: Session,
    model: str | None,
    interval: float,
    count: int | None,
    wait_s: float,
) -> None:
    """Show the status, of MODEL alone if one is given, and keep it fresh until Ctrl-C.

    Where stdout is no terminal, tables are printed at every refresh; with --json one object a line.
    """
    with (
        suppress(KeyboardInterrupt),
        closing(refreshes(session, interval, wait_s)) as results,
        _display(session, model, interval) as display,
    ):
        shown = 0
        for found in results:
            if isinstance(found, StatusReport):
                display.show(_only(found, model))
                shown += 1
            else:
                display.wait(found)
            if shown == count:
                return


def refreshes(session: Session, interval_s: float, wait_s: float) -> Generator[StatusReport | TransportError]:
    """Yield the status every `interval_s` seconds; while the daemon is away, the error that says so.

    Raises:
        TransportError: there was no daemon to begin with, or one has been away for more than `wait_s` seconds.
    """
    seen = False
    gone_at: float | None = None
    with closing(Connection(session)) as connection:
        while True:
            try:
                with connection.client() as client:
                    report = client.status()
            except TransportError as exc:
                if not seen:
                    raise
                now = time.monotonic()
                gone_at = now if gone_at is None else gone_at
                if now - gone_at >= wait_s:
                    raise TransportError(f"the daemon has not come back within {wait_s:g} s: {exc}") from exc
                yield exc
                time.sleep(min(interval_s, RETRY_S))
            else:
                seen, gone_at = True, None
                yield report
                time.sleep(interval_s)


class Display(Protocol):
    """Shows refreshes."""

    def show(self, report: StatusReport) -> None:
        """Show one status."""
        ...

    def wait(self, why: TransportError) -> None:
        """Report that the daemon is unreachable. Called at every attempt to reach it."""
        ...


class Printed:
    """Prints refreshes below each other: tables, or one JSON object per line. Reports a lost daemon once, on stderr."""

    def __init__(self, session: Session, model: str | None) -> None:
        self._session, self._model = session, model
        self._waits = False

    def show(self, report: StatusReport) -> None:
        """Print one status."""
        self._waits = False
        self._session.show(report, self._print)

    def _print(self, report: StatusReport) -> None:
        say(f"--- {_clock()}")
        print_parts(status_parts(report, _nothing(self._model)))

    def wait(self, why: TransportError) -> None:
        """Print the error if it is a new one."""
        if not self._waits:
            say(_waiting(why), err=True)
        self._waits = True


class Screen:
    """Replaces each refresh by the next in a terminal, inside `rich.live`; the last one stays at the end."""

    def __init__(self, terminal: Console, model: str | None, interval_s: float) -> None:
        from rich.live import Live
        from rich.progress import Progress

        self._terminal, self._model, self._interval_s = terminal, model, interval_s
        # never started: it is only drawn, as a part of the live view
        self._bars = Progress(*bar_columns(), console=terminal, auto_refresh=False)
        self._tasks: dict[str, TaskID] = {}
        self._parts: list[str | Grid] = []
        self.live = Live(console=terminal, auto_refresh=False)

    def show(self, report: StatusReport) -> None:
        """Replace the shown status."""
        running = {model.swap.swap: model.swap for model in report.models if model.swap is not None}
        for swap in self._tasks.keys() - running.keys():
            self._bars.remove_task(self._tasks.pop(swap))
        for swap, event in running.items():
            if swap not in self._tasks:
                self._tasks[swap] = self._bars.add_task("", members="")
            self._bars.update(self._tasks[swap], **bar_fields(event))
        room = self._terminal.height - 1 - len(self._tasks)  # below the clock and the bars
        self._parts = [*screen_parts(report, _nothing(self._model), room)]
        self._draw(_text(f"{_clock()}, every {self._interval_s:g} s; Ctrl-C ends", "dim"))

    def wait(self, why: TransportError) -> None:
        """Show the error above the last status, without its running swaps."""
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        self._draw(_text(f"{_clock()}, {_waiting(why)}", "yellow"))

    def _draw(self, head: RenderableType) -> None:
        from rich.console import Group

        bars = [self._bars] if self._tasks else []
        parts = [_text(part) if isinstance(part, str) else part for part in self._parts]
        self.live.update(Group(head, *bars, *parts), refresh=True)


@contextmanager
def _display(session: Session, model: str | None, interval_s: float) -> Iterator[Display]:
    if session.as_json or not takes_escapes(sys.stdout) or (terminal := console()).is_dumb_terminal:
        yield Printed(session, model)
        return
    screen = Screen(terminal, model, interval_s)
    with screen.live:
        yield screen


def _only(report: StatusReport, model: str | None) -> StatusReport:
    if model is None:
        return report
    return structs.replace(
        report,
        models=tuple(found for found in report.models if found.model == model),
        links=tuple(link for link in report.links if link.model == model),
    )


def _nothing(model: str | None) -> str:
    return NO_MODELS if model is None else f"no model {model!r}: neither a trainer nor an engine has registered it yet"


def _waiting(why: TransportError) -> str:
    return f"waiting for the daemon: {why}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _text(text: str, style: str = "") -> RenderableType:
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")  # one line, as is counted on


def _on(report: StatusReport, node: str | None) -> StatusReport:
    """Return the status of one node, connected or lost: its line, its links, and the models with ranks on it."""
    if node is None:
        return report
    known = [*(each.node for each in report.nodes), *(each.node for each in report.lost)]
    if node not in known:
        raise RefusedError(f"no node {node!r} is connected or lost; known nodes: {', '.join(known) or 'none'}")
    models = (
        structs.replace(
            model,
            sources=tuple(source for source in model.sources if source.node == node),
            targets=tuple(target for target in model.targets if target.node == node),
        )
        for model in report.models
    )
    return structs.replace(
        report,
        nodes=tuple(each for each in report.nodes if each.node == node),
        lost=tuple(each for each in report.lost if each.node == node),
        models=tuple(model for model in models if model.sources or model.targets),
        links=tuple(link for link in report.links if node in (link.source, link.target)),
    )


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option("--node", metavar="NAME", shell_complete=node_names, help="Only this node, and the ranks on it.")
@click.option("--events", "with_events", is_flag=True, help="Also the last events of each swap and each target rank.")
@asks
def status(session: Session, model: str | None, node: str | None, with_events: bool) -> None:
    """Show the cluster, or only MODEL, as the coordinator sees it."""
    with session.client() as client:
        report = _on(_only(client.status(), model), node)
    session.show(report, lambda report: print_parts(status_parts(report, _nothing(model), with_events=with_events)))


NAMED = 4  # replicas of a model in its line; of more, `refitctl watch` has one each


@click.command()
@asks
def models(session: Session) -> None:
    """List the models: published versions, and the version of every replica."""
    with session.client() as client:
        found = client.status().models
    session.show({"models": found}, lambda _: _show(found))


def _show(found: Sequence[ModelStatus]) -> None:
    if found:
        columns = ("model", "complete versions", "source ranks", "source bytes", "serving", "auto swap")
        print_table("", columns, map(_row, found))
    else:
        say("no models: no trainer and no engine has registered yet")


def _row(model: ModelStatus) -> tuple[str, ...]:
    attached = sum(source.attached for source in model.sources)
    return (
        model.model,
        versions(model.complete_versions),
        f"{attached}/{model.source_world_size}",
        size(sum(source.bytes for source in model.sources)),
        served(model),
        "yes" if model.auto_swap else "no",
    )


def served(model: ModelStatus) -> str:
    """Return what each replica serves: "a: 7, b: 6" or, where ranks of one differ, "a: 6+7"; or how many serve what."""
    replicas: dict[str, set[str]] = {}
    for target in model.targets:
        replicas.setdefault(target.replica, set()).add(version(target.version))
    found = {name: "+".join(sorted(those)) for name, those in sorted(replicas.items())}
    if len(found) > NAMED:
        counts = sorted(Counter(found.values()).items())
        return ", ".join(f"{served} in {count} of them" for served, count in counts)
    return ", ".join(f"{name}: {served}" for name, served in found.items()) or "-"
