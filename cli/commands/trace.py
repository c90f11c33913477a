"""refitctl trace: one swap over all processes, as a file for ui.perfetto.dev or to an OpenTelemetry collector."""

from __future__ import annotations

import json
from pathlib import Path

import click

from refitd.errors import ConfigError
from refitd_cli.chrome_trace import chrome_trace
from refitd_cli.completion import model_names
from refitd_cli.otlp import endpoint_of, send
from refitd_cli.output import counted, duration, print_json, say, to_json
from refitd_cli.printed import TraceWritten
from refitd_cli.session import Session, address_option, json_option


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
@address_option
@json_option
@click.pass_obj
def trace(
    session: Session, model: str, swap_id: str, output: str, otlp: str, address: str | None, as_json: bool
) -> None:
    """Write what every process did in a swap of MODEL, and when: open the file in ui.perfetto.dev.

    The coordinator and the daemons keep the last 16 swaps since they started; a running swap is shown as far as it is.
    Times of other nodes are aligned with the coordinator's by the round trips of heartbeats.
    """
    if not output and not otlp:
        raise click.UsageError("say where the trace goes: -o FILE, or --otlp URL")
    if otlp:
        endpoint_of(otlp)
    with session.client(address) as client:
        report = client.trace(model, swap_id)
    made = chrome_trace(report)
    if output:
        try:
            Path(output).write_text(json.dumps(made) + "\n")
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--output {output!r}: cannot be written: {exc}") from exc
    if otlp:
        send(report, otlp)
    errors = [node.error_s for node in report.nodes if node.error_s is not None]
    if as_json:
        print_json(to_json(TraceWritten(file=output or None, otlp=otlp or None, **made["otherData"])))
        return
    where = " and ".join(filter(None, (f"in {output}" if output else "", f"sent to {otlp}" if otlp else "")))
    spans = len(report.phases) + sum(len(node.spans) for node in report.nodes)
    say(
        f"swap {report.swap} ({model} version {report.version}, {report.outcome or 'running'}): "
        f"{counted(spans, 'span')} of the coordinator and {counted(len(report.nodes), 'node')} {where}; "
        f"clocks agree within "
        f"{duration(max(errors)) if errors else 'an unknown time'}"
    )
    for node in report.nodes:
        if node.error_s is None:
            say(f"node {node.node}: its clock is not aligned: it has no answered heartbeat yet", err=True)
        if node.dropped:
            say(f"node {node.node}: {node.dropped} spans were too many and are left out", err=True)
    for reason in report.missing:
        say(reason, err=True)
