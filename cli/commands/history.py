"""refitctl history: the outcomes of the last swaps, from the coordinator's journal."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from refitd.protocol.reports import HistoryEntry
from refitd_cli.completion import model_names
from refitd_cli.output import duration, print_json, print_table, say, share, size, to_json, version
from refitd_cli.session import Session, address_option, json_option
from refitd_cli.view import kind


@click.command()
@click.argument("model", default="", shell_complete=model_names)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@address_option
@json_option
@click.pass_context
def history(ctx: click.Context, model: str, limit: int, address: str | None, as_json: bool) -> None:
    """Show the last swaps of MODEL (or of all models), the newest first.

    They outlive the coordinator. A swap that stands as "decided" was being committed when it was last heard of.
    "crossed" is what was sent between nodes; "changed" is the share of the weights that had changed, where only that
    was sent.
    """
    session: Session = ctx.obj
    with session.client(address) as client:
        found = client.history(model, limit)
    if as_json:
        print_json(to_json(found))
        return
    if not found.swaps:
        say(f"no swap of {model} has been begun" if model else "no swap has been begun")
        return
    columns = ("when (UTC)", "swap", "model", ">version", "kind", "ended", ">bytes", ">crossed", ">changed", ">took")
    print_table("", (*columns, ">paused", "reason"), map(_row, found.swaps))


def _row(entry: HistoryEntry) -> tuple[str, ...]:
    report = entry.report
    paused = max((member.paused_s for member in report.members), default=0.0) if report else 0.0
    return (
        datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        entry.swap,
        entry.model,
        version(entry.version),
        kind(report) if report else "-",
        entry.state,
        size(report.bytes) if report else "-",
        size(report.crossing.crossed_bytes) if report and report.crossing.bytes else "-",
        share(report.crossing.changed) if report else "-",
        duration(report.total_s) if report else "-",
        duration(paused) if paused else "-",
        entry.reason,
    )
