"""refitctl history and trace: the outcomes of the last swaps, and one swap over all processes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click

from refitd.errors import ConfigError
from refitd.protocol.reports import HistoryEntry, HistoryReport, TraceReport
from refitd_cli.output import counted, duration, print_table, say, share, size, version
from refitd_cli.printed import TraceWritten
from refitd_cli.session import Session, asks, model_names
from refitd_cli.traces import chrome_trace, endpoint_of, send
from refitd_cli.view import kind


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--swap", "swap_id", default="", metavar="ID", help="One of `refitctl history`.  [default: the last one]")
@click.option("--output", "-o", default="", metavar="FILE", help="Where to write the trace, as JSON.")
@click.option(
    "--otlp",
    default="",
    metavar="URL",
    help="Send it to this OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318); needs refitd[otel].",
)
@asks
def trace(session: Session, model: str, swap_id: str, output: str, otlp: str) -> None:
    """Write what every process did in a swap of MODEL, and when: open the file in ui.perfetto.dev.

    The coordinator and the daemons keep the last 16 swaps since they started; a running swap is shown as far as it is.
    Between nodes a worker has a line for each kind of step: read, convert, send, receive, place, digest.
    Times of other nodes are aligned with the coordinator's by the round trips of heartbeats.
    """
    if not output and not otlp:
        raise click.UsageError("say where the trace goes: -o FILE, or --otlp URL")
    if otlp:
        endpoint_of(otlp)
    with session.client() as client:
        report = client.trace(model, swap_id)
    made = chrome_trace(report)
    if output:
        try:
            Path(output).write_text(json.dumps(made) + "\n")
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--output {output!r}: cannot be written: {exc}") from exc
    if otlp:
        send(report, otlp)
    written = TraceWritten(file=output or None, otlp=otlp or None, **made["otherData"])
    session.show(written, lambda written: _show_written(written, report))


def _show_written(written: TraceWritten, report: TraceReport) -> None:
    errors = [node.error_s for node in report.nodes if node.error_s is not None]
    places = (f"in {written.file}" if written.file else "", f"sent to {written.otlp}" if written.otlp else "")
    where = " and ".join(filter(None, places))
    spans = len(report.phases) + sum(len(node.spans) for node in report.nodes)
    say(
        f"swap {report.swap} ({report.model} version {report.version}, {report.outcome or 'running'}): "
        f"{counted(spans, 'span')} of the coordinator and {counted(len(report.nodes), 'node')} {where}; "
        f"clocks agree within "
        f"{duration(max(errors)) if errors else 'an unknown time'}"
    )
    for node in report.nodes:
        if node.error_s is None:
            say(f"node {node.node}: its clock is not aligned: it has no answered heartbeat yet", err=True)
        if node.dropped:
            say(f"node {node.node}: {node.dropped} spans were too many and are not shown", err=True)
    for reason in report.missing:
        say(reason, err=True)


@click.command()
@click.argument("model", default="", shell_complete=model_names)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@asks
def history(session: Session, model: str, limit: int) -> None:
    """Show the last swaps of MODEL (or of all models), the newest first.

    They outlive the coordinator. A swap that stands as "decided" was being committed when it was last heard of.
    "crossed" is what was sent between nodes; "changed" is the share of the weights that had changed, where only that
    was sent.
    """
    with session.client() as client:
        found = client.history(model, limit)
    session.show(found, partial(_show, model=model))


def _show(found: HistoryReport, model: str) -> None:
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
