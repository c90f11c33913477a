"""refitctl doctor: check this machine for what keeps refitd from working, or measure the cables between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from refitd.errors import ConfigError
from refitd_cli import checks
from refitd_cli.group import EXIT_FAILED
from refitd_cli.numbers import Number
from refitd_cli.output import print_json, print_table, say, to_json
from refitd_cli.session import Session, address_option, json_option

if TYPE_CHECKING:
    from refitd.protocol.cable_reports import CableRate


class DoctorFound(msgspec.Struct, frozen=True):
    """What keeps refitd from working on this machine; `healthy` where no check fails."""

    healthy: bool
    checks: tuple[checks.CheckResult, ...]


@click.command()
@click.option("--links", is_flag=True, help="Measure how fast the nodes' cables are instead, between the daemons.")
@click.option(
    "--seconds",
    type=Number(min=0.1, max=10),
    default=2.0,
    show_default=True,
    help="With --links: how long to measure, for each of at most 8 rounds.",
)
@click.option("-o", "--output", "file", metavar="FILE", help="With --links: write the file for transport.cables.")
@address_option
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, links: bool, seconds: float, file: str | None, address: str | None, as_json: bool
) -> None:
    """Check this machine and the daemon on it. Exit 1 if something keeps refitd from working.

    With --links, measure each node's cable in both directions: the daemons' workers send to each other over the copy
    service that moves weights. Refused while a swap runs, and ended by one that begins. Exit 1 if a cable could not be
    measured.
    """
    session: Session = ctx.obj
    if links:
        _links(ctx, session, seconds, file, address, as_json)
        return
    if file is not None:
        raise click.UsageError("--output is for --links")
    findings = tuple(checks.all_findings(lambda: session.factory(address), address))
    healthy = all(finding.state != "fail" for finding in findings)
    if as_json:
        print_json(to_json(DoctorFound(healthy, findings)))
    else:
        rows = ((finding.name, finding.state, finding.found, finding.advice) for finding in findings)
        print_table("", ("check", "state", "found", "what to do"), rows)
    ctx.exit(0 if healthy else EXIT_FAILED)


def _links(
    ctx: click.Context, session: Session, seconds: float, file: str | None, address: str | None, as_json: bool
) -> None:
    from refitd_cli import cables

    def told(number: int, rounds: int, rates: Sequence[CableRate]) -> None:
        slowest = min(rates, key=lambda rate: rate.speed)
        say(
            f"round {number} of {rounds}: {len(rates)} cables, the slowest {slowest.source} to {slowest.target}, "
            f"{8 * slowest.speed / 1e9:.3g} Gbit/s",
            err=True,
        )

    with session.client(address) as client:
        report = cables.measured(client, seconds, told)
    report = replace(report, file=cables.file_of(report))
    if file is not None and report.file:
        try:
            Path(file).write_text(report.file, encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"{file}: cannot be written: {exc.strerror}; choose another --output FILE") from exc
    if as_json:
        print_json(to_json(report))
    else:
        cables.show(report)
        if file is not None and report.file:
            say(f"written to {file}: set transport.cables to it at the coordinator, then `refitctl reload`")
        elif report.file:
            say("a file for transport.cables at the coordinator (--output FILE writes it):")
            for line in ("", *report.file.splitlines()):
                say(line)
    ctx.exit(0 if all(node.send and node.receive for node in report.nodes) else EXIT_FAILED)
