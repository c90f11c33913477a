"""refitctl doctor: check this machine for what keeps refitd from working."""

from __future__ import annotations

import dataclasses

import click

from refitd_cli import checks
from refitd_cli.group import EXIT_FAILED
from refitd_cli.output import print_json, print_table
from refitd_cli.session import Session, address_option, json_option


@click.command()
@address_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, address: str | None, as_json: bool) -> None:
    """Check this machine and the daemon on it. Exit 1 if something keeps refitd from working."""
    session: Session = ctx.obj
    findings = list(checks.all_findings(lambda: session.factory(address), address))
    healthy = all(finding.state != "fail" for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "checks": [dataclasses.asdict(finding) for finding in findings]})
    else:
        rows = ((finding.name, finding.state, finding.found, finding.advice) for finding in findings)
        print_table("", ("check", "state", "found", "what to do"), rows)
    ctx.exit(0 if healthy else EXIT_FAILED)
